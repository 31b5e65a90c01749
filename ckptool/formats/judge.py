"""What a pickle would do if somebody ran it: every call is known, foreign, or could run code.

Knows: the exact (module, name) pairs that are harmless, and the shapes of their arguments.
Must not know: containers. There is no block list: what is neither known nor foreign could
run code. A module is never trusted as a whole where its functions could be called (hostile 3).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from ckptool.checkpoint import DTYPE_ALIASES, Global
from ckptool.errors import CkptError
from ckptool.formats.torch_pickle import BUILDERS, storage_dtype
from ckptool.pickles.nodes import (
    INST,
    NEWOBJ,
    OBJ,
    PAIR_OPS,
    REDUCE,
    Box,
    Obj,
    Pers,
    Raw,
    Tup,
    Walked,
    children,
    items_of,
    text_of,
)
from ckptool.pickles.nodes import Global as GlobalNode

KNOWN, FOREIGN, CODE = "known", "foreign", "code"
_WORST = {KNOWN: 0, FOREIGN: 1, CODE: 2}

# Standard modules that left the standard library: a class of theirs is not foreign.
_GONE = frozenset(("distutils", "imp", "asynchat", "asyncore", "smtpd", "cgi", "cgitb", "crypt",
                   "pipes", "telnetlib", "uu", "xdrlib", "nntplib", "commands", "lib2to3"))  # fmt: skip
_OURS = frozenset(("torch", "numpy", "builtins", "__builtin__", "copy_reg", "exceptions"))


def _plain(args: list[Any]) -> bool:
    """Whether the arguments are data: nothing that would be called on their behalf."""
    return all(type(arg) is not GlobalNode for arg in args)


def _none(args: list[Any]) -> bool:
    return not args


def _texts(args: list[Any]) -> bool:
    return all(text_of(arg) is not None for arg in args)


def _factory(args: list[Any]) -> bool:
    """defaultdict(list, …): the factory is a plain container type."""
    names = ("dict", "list", "set", "int", "float", "str", "tuple", "bool", "OrderedDict")
    first = args[0] if args else None
    if first is None:
        return _plain(args[1:])
    if type(first) is not GlobalNode:
        return False
    module, name = _mapped(first, 2)
    return name in names and module in ("builtins", "collections") and _plain(args[1:])


def _array_parts(args: list[Any]) -> bool:
    """_reconstruct(ndarray, (0,), b'b')."""
    return len(args) == 3 and type(args[0]) is GlobalNode and args[0].full == "numpy.ndarray" and _plain(args[1:])  # fmt: skip


def _any(args: list[Any]) -> bool:
    return True


Check = Callable[["list[Any]"], bool]
_DICT_STATE, _TUPLE_STATE, _NO_STATE = "dict", "tuple", "none"

# name -> (what its arguments must be, what BUILD may give it, whether items may be added)
_CALLS: dict[str, tuple[Check, str, bool]] = {
    **{name: (_any, _TUPLE_STATE if name.endswith("Tensor") else _NO_STATE, False) for name in BUILDERS},  # fmt: skip
    "collections.OrderedDict": (_plain, _DICT_STATE, True),
    "collections.defaultdict": (_factory, _NO_STATE, True),
    "collections.Counter": (_plain, _DICT_STATE, True),
    "collections.deque": (_plain, _NO_STATE, True),
    "builtins.set": (_plain, _NO_STATE, False),
    "builtins.frozenset": (_plain, _NO_STATE, False),
    "builtins.bytearray": (_plain, _NO_STATE, False),
    "builtins.bytes": (_plain, _NO_STATE, False),
    "builtins.complex": (_plain, _NO_STATE, False),
    "builtins.slice": (_plain, _NO_STATE, False),
    "builtins.range": (_plain, _NO_STATE, False),
    "builtins.xrange": (_plain, _NO_STATE, False),
    "_codecs.encode": (_texts, _NO_STATE, False),
    "argparse.Namespace": (_none, _DICT_STATE, False),
    "types.SimpleNamespace": (_none, _DICT_STATE, False),
    "datetime.datetime": (_plain, _NO_STATE, False),
    "datetime.date": (_plain, _NO_STATE, False),
    "datetime.time": (_plain, _NO_STATE, False),
    "datetime.timedelta": (_plain, _NO_STATE, False),
    "datetime.timezone": (_plain, _NO_STATE, False),
    "decimal.Decimal": (_texts, _NO_STATE, False),
    "fractions.Fraction": (_plain, _NO_STATE, False),
    "uuid.UUID": (_none, _DICT_STATE, False),
    "_io.BytesIO": (_none, _TUPLE_STATE, False),
    **{
        f"pathlib.{name}": (_texts, _NO_STATE, False)
        for name in ("Path", "PurePath", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
    "numpy.dtype": (_plain, _TUPLE_STATE, False),
    "torch.Size": (_plain, _NO_STATE, False),
    "torch.device": (_plain, _NO_STATE, False),
    "torch.serialization._get_layout": (_texts, _NO_STATE, False),
    "torch.torch_version.TorchVersion": (_texts, _DICT_STATE, False),
    "torch._C.Generator": (_plain, "any", False),
    "torch.nested._internal.nested_tensor._rebuild_njt": (_any, _NO_STATE, False),
}  # fmt: skip
for _core in ("numpy.core", "numpy._core"):
    _CALLS[f"{_core}.multiarray.scalar"] = (_plain, _NO_STATE, False)
    _CALLS[f"{_core}.multiarray._reconstruct"] = (_array_parts, _TUPLE_STATE, False)
    _CALLS[f"{_core}.numeric._frombuffer"] = (_plain, _NO_STATE, False)

# Instances of these packages' classes: made without arguments, filled by a dict.
_INSTANCES = ("torch.nn.", "torch.ao.nn.", "torch.optim.",
              "torch.amp.grad_scaler.", "torch.cuda.amp.grad_scaler.", "omegaconf.")  # fmt: skip

# Records of torch.distributed and nested tensors: NEWOBJ with data, any data as state.
_RECORDS = ("torch.distributed.tensor.", "torch.distributed._tensor.", "torch.distributed._shard.",
            "torch.distributed._mesh_layout.", "torch.distributed.device_mesh.",
            "torch.distributed.remote_device.", "torch.distributed.checkpoint.metadata.",
            "torch._dynamo.decorators._DimRange")  # fmt: skip
_SHARDED = "torch.distributed._shard.sharded_tensor"
_DOTTED = frozenset((f"{_SHARDED}.api.ShardedTensor.ProcessGroupState", f"{_SHARDED}.metadata.MEM_FORMAT_ENCODING"))  # fmt: skip

_REFERENCES = frozenset((
    "typing.Any", "collections.OrderedDict", "collections.defaultdict", "torch.Tensor", "torch.Size",
    "torch.device", "torch.nn.parameter.Parameter", "numpy.ndarray", "numpy.dtype",
    "torch.storage.UntypedStorage", "torch.storage.TypedStorage", "argparse.Namespace",
    *(f"builtins.{name}" for name in ("bool", "bytes", "bytearray", "complex", "dict", "float",
      "frozenset", "int", "long", "list", "object", "set", "str", "tuple", "unicode", "range", "slice")),
    *(f"torch.{name}" for name in DTYPE_ALIASES),
    *(f"torch.{name}" for name in (
      "strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged",
      "per_tensor_affine", "per_channel_affine", "per_tensor_symmetric", "per_channel_symmetric",
      "per_channel_affine_float_qparams", "contiguous_format", "channels_last", "preserve_format")),
    *(f"numpy.{name}" for name in ("float16", "float32", "float64", "int8", "int16", "int32",
      "int64", "uint8", "uint16", "uint32", "uint64", "bool_", "complex64", "complex128")),
))  # fmt: skip
_BY_ARGUMENTS = frozenset(("builtins.getattr", "torch.storage._load_from_bytes"))
_REFERENCE_MODULES = ("torch.nn.functional.", "torch._C._nn.")


_NJT = "torch.nested._internal.nested_tensor._rebuild_njt"
# A tensor subclass stands among the arguments of these, after its builder or alone.
_CLASS_ARGUMENT = {
    "torch._tensor._rebuild_from_type": 1,
    "torch._tensor._rebuild_from_type_v2": 1,
    "torch.tensor._rebuild_from_type": 1,
    "torch.tensor._rebuild_from_type_v2": 1,
    "torch._utils._rebuild_wrapper_subclass": 0,
}


def _mapped(node: GlobalNode, protocol: int) -> tuple[str, str]:
    """(module, name) as a Python 3 loader looks it up: protocols below 3 are mapped first."""
    if protocol >= 3:
        return node.module, node.name
    from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING

    module, name = NAME_MAPPING.get((node.module, node.name), (node.module, node.name))
    return IMPORT_MAPPING.get(module, module), name


def is_foreign(module: str) -> bool:
    """Whether a module belongs to neither the standard library nor torch nor numpy."""
    top = module.partition(".")[0]
    return bool(top) and top not in sys.stdlib_module_names and top not in _GONE | _OURS


class Judge:
    """Verdicts on one walked pickle. `nested` are names whose content was judged apart
    (torch.storage._load_from_bytes of a literal)."""

    def __init__(self, walked: Walked, member: str = "data.pkl", nested: Iterable[int] = ()) -> None:
        self.walked = walked
        self.member = member
        self.nested = frozenset(nested)
        self.verdicts: dict[str, list[Any]] = {}
        self._callees: set[int] = set()
        self._class_tuples: set[int] = set()

    def run(self) -> tuple[Global, ...]:
        """Every name of the pickle with the worst verdict on its uses, in file order."""
        usual: dict[int, bool] = {}  # judged once; True: known whatever the arguments are
        for call in self.walked.calls:
            if call.op == REDUCE and call.state is None and not call.batches:
                known = usual.get(id(call.fn))
                if known or (known is False and call.args == ()):
                    continue
            self._judge_call(call)
            kind = _usual_kind(call)
            if kind is not None:
                usual[id(call.fn)] = kind
        for offset, owner in self.walked.builds_on_others:
            self._say(_callee_name(owner), CODE, offset, "BUILD changes it")
        for pers in self.walked.persistent:
            self._storage_class(pers)
        for (module, name), node in self.walked.globals.items():
            if id(node) not in self._callees:
                self._reference(node, module, name)
        if any(self._must_be_called(name) for name in self.verdicts):
            self._held_as_values()
        rows = sorted(self.verdicts.items(), key=lambda row: row[1][1])
        return tuple(Global(name, row[0], row[1], self.member, row[2]) for name, row in rows)

    def _say(self, name: str, verdict: str, offset: int, detail: str = "") -> str:
        known = self.verdicts.get(name)
        if known is None:
            self.verdicts[name] = [verdict, offset, detail]
        elif _WORST[verdict] > _WORST[known[0]]:
            self.verdicts[name] = [verdict, offset, detail]
        return verdict

    def _judge_call(self, call: Obj) -> None:
        fn = _embedded_class(call.fn)
        if type(fn) is GlobalNode and not fn.computed:
            self._callees.add(id(fn))
            module, name = _mapped(fn, self.walked.protocol)
        else:
            dotted = _attribute(fn, self.walked.protocol)
            if dotted is None:
                self._say(_callee_name(fn), CODE, call.end, "called")
                return
            module, name = dotted
        full = f"{module}.{name}"
        verdict, detail = self._verdict(module, name, call)
        self._say(full, verdict, call.end, detail)

    def _verdict(self, module: str, name: str, call: Obj) -> tuple[str, str]:
        args = items_of(call.args)
        full = f"{module}.{name}"
        if args is None or ("." in name and not is_foreign(module) and full not in _DOTTED):
            return CODE, "called"
        if full in _CLASS_ARGUMENT and not self._subclass(full, args, call):
            return CODE, "called in an unusual way"
        row = _CALLS.get(full)
        if row is not None:
            return (KNOWN, "") if self._fits(row, args, call) else (CODE, "called in an unusual way")
        if full == "torch.storage._load_from_bytes":
            return (KNOWN, "") if id(call) in self.nested else (CODE, "loads a pickle")
        if full == "copyreg._reconstructor":
            return self._reconstructed(args, call)
        if full == "builtins.getattr":
            dotted = _attribute(call, self.walked.protocol)
            if dotted and (is_foreign(dotted[0]) or ".".join(dotted) in _DOTTED):
                self._take_class(args[0], call)
                return KNOWN, ""
            return CODE, "called"
        if call.op == NEWOBJ and full.startswith(_RECORDS) and "." not in name:
            return KNOWN, ""
        if full in _DOTTED:
            return KNOWN, ""
        if call.op in (NEWOBJ, INST, OBJ) and not args and call.kwargs is None:
            return self._instance(module, name, call)
        return CODE, "called"

    def _take_class(self, node: GlobalNode, call: Obj) -> None:
        """A class that is an argument by right: its tuple is no place where it is a value."""
        self._callees.add(id(node))
        self._class_tuples.add(id(call.args))

    def _subclass(self, full: str, args: list[Any], call: Obj) -> bool:
        """A tensor subclass: its class is an argument, its builder must be one of torch's."""
        at = _CLASS_ARGUMENT[full]
        if len(args) <= at or type(args[at]) is not GlobalNode:
            return False
        if at == 1 and (type(args[0]) is not GlobalNode or args[0].full not in {*BUILDERS, _NJT}):
            return False
        module, name = _mapped(args[at], self.walked.protocol)
        self._take_class(args[at], call)
        known = f"{module}.{name}" in _REFERENCES or module.startswith("torch.")
        self._say(f"{module}.{name}", KNOWN if known else FOREIGN if is_foreign(module) else CODE, call.end)  # fmt: skip
        return True

    def _fits(self, row: tuple[Check, str, bool], args: list[Any], call: Obj) -> bool:
        check, state, holds = row
        if (call.batches and not holds) or call.kwargs is not None:
            return False
        if call.batches and any(batch.op not in PAIR_OPS for batch in call.batches):
            name = call.fn.name if type(call.fn) is GlobalNode else ""
            if name != "deque":
                return False
        return check(args) and (call.state is None or state == "any" or _state_kind(call) == state)

    def _reconstructed(self, args: list[Any], call: Obj) -> tuple[str, str]:
        """copyreg._reconstructor(cls, object, None): an instance of cls."""
        if len(args) != 3 or type(args[0]) is not GlobalNode or args[2] is not None:
            return CODE, "called in an unusual way"
        base = args[1]
        if type(base) is not GlobalNode or _mapped(base, self.walked.protocol) != ("builtins", "object"):
            return CODE, "called in an unusual way"
        self._take_class(args[0], call)
        module, name = _mapped(args[0], self.walked.protocol)
        row = _CALLS.get(f"{module}.{name}")
        if row is not None and row[0] is _none and self._fits(row, [], call):
            return KNOWN, ""
        verdict, detail = self._instance(module, name, call)
        self._say(f"{module}.{name}", verdict, call.end, detail)
        return KNOWN, ""

    def _instance(self, module: str, name: str, call: Obj) -> tuple[str, str]:
        """cls() with a dict, list items or dict items as its state."""
        full = f"{module}.{name}"
        if call.state is not None and _state_kind(call) != _DICT_STATE:
            return CODE, "its __setstate__ would be called"
        if full.startswith(_INSTANCES) and "." not in name:
            return KNOWN, ""
        return (FOREIGN, "") if is_foreign(module) else (CODE, "called")

    def _storage_class(self, pers: Pers) -> None:
        items = items_of(pers.pid) or []
        if len(items) > 1 and type(items[1]) is GlobalNode:
            node = items[1]
            if text_of(items[0]) != "module":
                self._callees.add(id(node))
            elif is_foreign(node.module):
                self._callees.add(id(node))
                self._say(node.full, FOREIGN, pers.end)

    def _reference(self, node: GlobalNode, module: str, name: str) -> None:
        """A name that is never called here, but may be by whoever holds it."""
        if node.computed:
            self._say("a name that is computed", CODE, node.offset, "a name that is computed")
            return
        module, name = _mapped(node, self.walked.protocol)
        full = f"{module}.{name}"
        known = full in _REFERENCES or full in _CALLS or _is_storage_class(node)
        known = known or full.startswith((*_REFERENCE_MODULES, *_INSTANCES, *_RECORDS))
        known = known and "." not in name
        known = known or full == "copyreg._reconstructor"
        self._say(full, KNOWN if known else CODE, node.offset, "" if known else "named as a value")

    def _must_be_called(self, name: str) -> bool:
        """A foreign class, and what is known by its arguments alone: harmless when called
        here as it is, of unknown use to whoever holds it."""
        return self.verdicts.get(name, [KNOWN])[0] == FOREIGN or name in _BY_ARGUMENTS

    def _held_as_values(self) -> None:
        """A foreign class that is also held as a value could be called by its holder."""
        protocol = self.walked.protocol
        bound = {
            id(node) for node in self.walked.globals.values()
            if self._must_be_called(".".join(_mapped(node, protocol)))
        }  # fmt: skip
        seen: set[int] = set()
        stack: list[Any] = [self.walked.root]
        while stack:
            node = stack.pop()
            if type(node) not in (Tup, Box, Obj, Pers) or id(node) in seen:
                continue
            seen.add(id(node))
            if type(node) is Tup and id(node) in self._class_tuples:
                stack.extend(item for item in node.items if id(item) not in bound)
                continue
            for child in children(node):
                held = _embedded_class(child)
                if id(held) in bound and not _made_by(node, child):
                    self._say(".".join(_mapped(held, protocol)), CODE, held.offset, "named as a value")
                elif held is child:
                    stack.append(child)


def _made_by(node: Any, child: Any) -> bool:
    return type(node) is Obj and node.fn is child


def _attribute(node: Any, protocol: int) -> tuple[str, str] | None:
    """(module, 'Class.Inner') when a node is getattr(Class, 'Inner')."""
    if type(node) is not Obj or node.op != REDUCE or type(node.fn) is not GlobalNode:
        return None
    args = items_of(node.args)
    if _mapped(node.fn, protocol) != ("builtins", "getattr") or not args or len(args) != 2:
        return None
    if type(args[0]) is not GlobalNode or type(args[1]) is not str:
        return None
    module, name = _mapped(args[0], protocol)
    return module, f"{name}.{args[1]}"


_ANY_ARGUMENTS = frozenset(name for name, row in _CALLS.items() if row[0] is _any) - _CLASS_ARGUMENT.keys()  # fmt: skip


def _usual_kind(call: Obj) -> bool | None:
    """Whether this judged call stands for all plain calls of its function (True), for those
    without arguments (False), or for itself alone (None)."""
    fn = call.fn
    if type(fn) is not GlobalNode or fn.computed or items_of(call.args) is None:
        return None
    if fn.full in _ANY_ARGUMENTS:
        return True
    return False if fn.full == "collections.OrderedDict" and call.args == () else None


def _embedded_class(node: Any) -> Any:
    """The class in a legacy file's ('module', class, file, source); else the node itself."""
    items = items_of(node.pid) if type(node) is Pers else None
    if items and len(items) == 4 and text_of(items[0]) == "module":
        return items[1]
    return node


def _callee_name(node: Any) -> str:
    if type(node) is GlobalNode:
        return node.full if not node.computed else "a name that is computed"
    if type(node) is Obj and type(node.fn) is GlobalNode:
        return f"the result of {node.fn.full}"
    return "a value that is no class"


def _state_kind(call: Obj) -> str:
    value = call.state.value if call.state is not None else None
    if type(value) is Box and value.kind == 0x7D:
        return _DICT_STATE
    return _TUPLE_STATE if items_of(value) is not None else "other"


def _is_storage_class(node: GlobalNode) -> bool:
    try:
        storage_dtype(node, node)
    except CkptError:
        return False
    return True


def inert_raw(node: Any) -> bytes | None:
    """The bytes of a literal, also as protocol 2 spells them; None for anything else."""
    if type(node) is Raw:
        return node.value
    if type(node) is Obj and type(node.fn) is GlobalNode and node.fn.full == "_codecs.encode":
        args = items_of(node.args) or []
        if args and type(args[0]) is str:
            try:
                return args[0].encode("latin-1")
            except UnicodeEncodeError:
                return None
    return None
