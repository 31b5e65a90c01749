"""What a pickle would do if somebody ran it: every call is known, foreign, or could run code.

Knows: the tables of `vetted`, and how a name may stand in a pickle. Must not know: containers.
There is no block list: what is neither known nor foreign could run code (hostile 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ckptool.checkpoint import Global
from ckptool.errors import CkptError
from ckptool.formats.measures import at_byte, storage_dtype
from ckptool.formats.rebuild import BUILDERS
from ckptool.formats.vetted import (
    BY_ARGUMENTS,
    CALLS,
    CLASS_ARGUMENT,
    DICT_STATE,
    DOTTED,
    INSTANCES,
    NJT,
    RECORDS,
    REFERENCES,
    TUPLE_STATE,
    Check,
    any_arguments,
    is_class,
    is_foreign,
    is_foreign_class,
    is_value,
    mapped,
    no_arguments,
)
from ckptool.formats.vetted_dtypes import is_plain_dtype
from ckptool.pickles.nodes import (
    NEWOBJ,
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


class Judge:
    """Verdicts on one walked pickle. `nested` are names whose content was judged apart
    (torch.storage._load_from_bytes of a literal).
    """

    def __init__(
        self, walked: Walked, member: str = "data.pkl", nested: Iterable[int] = ()
    ) -> None:
        self.walked = walked
        self.member = member
        self.nested = frozenset(nested)
        self.verdicts: dict[str, list[Any]] = {}
        self._callees: set[int] = set()
        self._class_tuples: set[int] = set()
        self._class_names: set[str] = set()  # of torch, harmless as an argument by right only
        self._attributes: dict[int, str] = {}  # getattr calls that name a nested class

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
        if self._attributes or any(self._must_be_called(name) for name in self.verdicts):
            self._held_as_values()
        rows = sorted(self.verdicts.items(), key=lambda row: row[1][1])
        return tuple(Global(name, row[0], row[1], self.member, row[2]) for name, row in rows)

    def _say(self, name: str, verdict: str, offset: int, detail: str = "") -> str:
        known = self.verdicts.get(name)
        if known is None or _WORST[verdict] > _WORST[known[0]]:
            self.verdicts[name] = [verdict, offset, detail]
        return verdict

    def _judge_call(self, call: Obj) -> None:
        fn = embedded_class(call.fn)
        if type(fn) is GlobalNode and not fn.computed:
            self._callees.add(id(fn))
            module, name = mapped(fn, self.walked.protocol)
        else:
            dotted = _attribute(fn, self.walked.protocol)
            if dotted is None:
                self._say(_callee_name(fn), CODE, call.end, _called_with(call))
                return
            module, name = dotted
        full = f"{module}.{name}"
        verdict, detail = self._verdict(module, name, call)
        if _filled_late(call):
            verdict, detail = CODE, "items added after its state, by methods the state may name"
        self._say(full, verdict, call.end, _called_with(call) if detail == "called" else detail)

    def _odd(self, full: str, args: Sequence[Any], call: Obj) -> str:
        """What is odd about a call of a known name: its class argument, a dtype's state."""
        if full in CLASS_ARGUMENT and not self._subclass(full, args, call):
            return "called in an unusual way"
        if full == "numpy.dtype" and not is_plain_dtype(call):
            return "a dtype that numpy does not write: it could make pointers of bytes"
        return ""

    def _verdict(self, module: str, name: str, call: Obj) -> tuple[str, str]:
        args = items_of(call.args)
        full = f"{module}.{name}"
        if args is None or (
            "." in name and not is_foreign_class(module, name) and full not in DOTTED
        ):
            return CODE, "called"
        if odd := self._odd(full, args, call):
            return CODE, odd
        row = CALLS.get(full)
        if row is not None:
            return (
                (KNOWN, "") if self._fits(row, args, call) else (CODE, "called in an unusual way")
            )
        if full == "torch.storage._load_from_bytes":
            return (KNOWN, "") if id(call) in self.nested else (CODE, "loads a pickle")
        if full == "copyreg._reconstructor":
            return self._reconstructed(args, call)
        if full == "builtins.getattr":
            dotted = _attribute(call, self.walked.protocol)
            if dotted and (is_foreign_class(*dotted) or ".".join(dotted) in DOTTED):
                self._take_class(args[0], call)
                if is_foreign(dotted[0]):
                    self._attributes[id(call)] = ".".join(dotted)
                return KNOWN, ""
            return CODE, "called"
        if full in DOTTED:
            return KNOWN, ""
        if call.op == NEWOBJ and full.startswith(RECORDS) and not call.batches:
            return (KNOWN, "") if is_class(name) or name == "_remote_device" else (CODE, "called")
        if call.op == NEWOBJ and not args and call.kwargs is None:
            return self._instance(module, name, call)
        return CODE, "called"  # INST and OBJ too: without arguments they call what is no class

    def _take_class(self, node: GlobalNode, call: Obj) -> None:
        """A class that is an argument by right: its tuple is no place where it is a value."""
        self._callees.add(id(node))
        self._class_tuples.add(id(call.args))

    def _makes(self, args: Sequence[Any]) -> bool:
        """Whether (builder, class, arguments, state) has a builder of torch's: a rebuild
        function, or the one of wrappers when it is given the very same class.
        """
        if len(args) < 3 or type(args[0]) is not GlobalNode:
            return False
        if args[0].full != _WRAPPER:
            return args[0].full in _MAKERS
        inner = items_of(args[2])
        if not inner or inner[0] is not args[1]:
            return False
        self._class_tuples.add(id(args[2]))
        return True

    def _subclass(self, full: str, args: Sequence[Any], call: Obj) -> bool:
        """A tensor subclass: its class is an argument, its builder must be one of torch's."""
        at = CLASS_ARGUMENT[full]
        if len(args) <= at or type(args[at]) is not GlobalNode:
            return False
        if at == 1 and not self._makes(args):
            return False
        module, name = mapped(args[at], self.walked.protocol)
        full = f"{module}.{name}"
        self._take_class(args[at], call)
        if at == 1:
            self._callees.add(id(args[0]))
            self._say(args[0].full, KNOWN, call.end)
        known = full in REFERENCES or (module.startswith("torch.") and is_class(name))
        if known and not is_value(module, name):
            self._class_names.add(full)
        foreign = is_foreign_class(module, name)
        self._say(full, KNOWN if known else FOREIGN if foreign else CODE, call.end)
        return True

    def _fits(self, row: tuple[Check, str, bool], args: Sequence[Any], call: Obj) -> bool:
        check, state, holds = row
        if (call.batches and not holds) or call.kwargs is not None:
            return False
        if call.batches and any(batch.op not in PAIR_OPS for batch in call.batches):
            name = call.fn.name if type(call.fn) is GlobalNode else ""
            if name != "deque":
                return False
        return check(args) and (call.state is None or state == "any" or _state_kind(call) == state)

    def _reconstructed(self, args: Sequence[Any], call: Obj) -> tuple[str, str]:
        """copyreg._reconstructor(cls, object, None): an instance of cls."""
        if len(args) != 3 or type(args[0]) is not GlobalNode or args[2] is not None:
            return CODE, "called in an unusual way"
        base = args[1]
        if type(base) is not GlobalNode or mapped(base, self.walked.protocol) != (
            "builtins",
            "object",
        ):
            return CODE, "called in an unusual way"
        self._take_class(args[0], call)
        module, name = mapped(args[0], self.walked.protocol)
        row = CALLS.get(f"{module}.{name}")
        if row is not None and row[0] is no_arguments and self._fits(row, [], call):
            return KNOWN, ""
        verdict, detail = self._instance(module, name, call)
        self._say(f"{module}.{name}", verdict, call.end, detail)
        return KNOWN, ""

    def _instance(self, module: str, name: str, call: Obj) -> tuple[str, str]:
        """cls() with a dict, list items or dict items as its state."""
        full = f"{module}.{name}"
        if call.state is not None and _state_kind(call) != DICT_STATE:
            return CODE, "its __setstate__ would be called"
        if full.startswith(INSTANCES):
            plain = is_class(name) and call.op in (NEWOBJ, REDUCE) and not call.batches
            return (KNOWN, "") if plain else (CODE, "called in an unusual way")
        return (FOREIGN, "") if is_foreign_class(module, name) else (CODE, "called")

    def _storage_class(self, pers: Pers) -> None:
        items = items_of(pers.pid) or ()
        if len(items) > 1 and type(items[1]) is GlobalNode:
            node = items[1]
            if text_of(items[0]) != "module":
                if id(node) not in self._callees and _is_storage_class(node):
                    self._callees.add(id(node))
            elif is_foreign_class(node.module, node.name):
                self._callees.add(id(node))
                self._say(node.full, FOREIGN, pers.end)

    def _reference(self, node: GlobalNode, module: str, name: str) -> None:
        """A name that is never called here, but may be by whoever holds it."""
        if node.computed:
            self._say("a name that is computed", CODE, node.offset, "a name that is computed")
            return
        module, name = mapped(node, self.walked.protocol)
        full = f"{module}.{name}"
        known = is_value(module, name) or _is_storage_class(node)
        self._say(full, KNOWN if known else CODE, node.offset, "" if known else "named as a value")

    def _must_be_called(self, name: str) -> bool:
        """A foreign class, and what is known by its arguments alone: harmless when called
        here as it is, of unknown use to whoever holds it.
        """
        foreign = self.verdicts.get(name, [KNOWN])[0] == FOREIGN
        return foreign or name in BY_ARGUMENTS or name in self._class_names

    def _held_as_values(self) -> None:
        """A foreign class that is also held as a value could be called by its holder."""
        protocol = self.walked.protocol
        named = ((node, ".".join(mapped(node, protocol))) for node in self.walked.globals.values())
        bound = {id(node): name for node, name in named if self._must_be_called(name)}
        bound |= self._attributes
        seen: set[int] = set()
        stack: list[Any] = [self.walked.root, *self.walked.calls]  # also what is popped again
        while stack:
            node = stack.pop()
            if type(node) not in (Tup, Box, Obj, Pers) or id(node) in seen:
                continue
            seen.add(id(node))
            if type(node) is Tup and id(node) in self._class_tuples:
                stack.extend(item for item in node.items if id(item) not in bound)
                continue
            for child in children(node):
                held = embedded_class(child)
                if id(held) in bound and not _made_by(node, child):
                    self._say(
                        bound[id(held)], CODE, at_byte(held) or held.offset, "named as a value"
                    )
                elif held is child:
                    stack.append(child)


def _made_by(node: Any, child: Any) -> bool:
    return type(node) is Obj and node.fn is child


def _attribute(node: Any, protocol: int) -> tuple[str, str] | None:
    """(module, 'Class.Inner') when a node is getattr(Class, 'Inner')."""
    if type(node) is not Obj or node.op != REDUCE or type(node.fn) is not GlobalNode:
        return None
    args = items_of(node.args)
    if mapped(node.fn, protocol) != ("builtins", "getattr") or not args or len(args) != 2:
        return None
    if type(args[0]) is not GlobalNode or type(args[1]) is not str:
        return None
    module, name = mapped(args[0], protocol)
    return module, f"{name}.{args[1]}"


_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_MAKERS = {*BUILDERS, NJT} - CLASS_ARGUMENT.keys()
_ANY_ARGUMENTS = (
    frozenset(name for name, row in CALLS.items() if row[0] is any_arguments)
    - CLASS_ARGUMENT.keys()
)


def _usual_kind(call: Obj) -> bool | None:
    """Whether this judged call stands for all plain calls of its function (True), for those
    without arguments (False), or for itself alone (None).
    """
    fn = call.fn
    if type(fn) is not GlobalNode or fn.computed or items_of(call.args) is None:
        return None
    if fn.full in _ANY_ARGUMENTS:
        return True
    return False if fn.full == "collections.OrderedDict" and call.args == () else None


def _filled_late(call: Obj) -> bool:
    """Items after BUILD go through `append`, `extend` or `__setitem__` as the state has them."""
    state = call.state
    return state is not None and any(batch.end > state.end for batch in call.batches or ())


def embedded_class(node: Any) -> Any:
    """The class in a legacy file's ('module', class, file, source); else the node itself."""
    items = items_of(node.pid) if type(node) is Pers else None
    if items and len(items) == 4 and text_of(items[0]) == "module":
        return items[1]
    return node


def _called_with(call: Obj) -> str:
    """`called with 'touch x'`: its first arguments as far as they are plain."""
    shown = []
    for arg in (items_of(call.args) or ())[:3]:
        text = text_of(arg)
        if text is not None:
            shown.append(repr(text[:60] + "…") if len(text) > 60 else repr(text))
        else:
            plain = type(arg) is int and abs(arg) < 1 << 64
            shown.append(str(arg) if plain or arg is None else "…")
    return f"called with {', '.join(shown)}" if shown else "called"


def _callee_name(node: Any) -> str:
    if type(node) is GlobalNode:
        return node.full if not node.computed else "a name that is computed"
    if type(node) is Obj and type(node.fn) is GlobalNode:
        return f"the result of {node.fn.full}"
    return "a value that is no class"


def _state_kind(call: Obj) -> str:
    value = call.state.value if call.state is not None else None
    if type(value) is Box and value.kind == 0x7D:
        return DICT_STATE
    return TUPLE_STATE if items_of(value) is not None else "other"


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
        args = items_of(node.args) or ()
        if len(args) == 2 and type(args[0]) is str and text_of(args[1]) in ("latin1", "latin-1"):
            try:
                return args[0].encode("latin-1")
            except UnicodeEncodeError:
                return None
    return None
