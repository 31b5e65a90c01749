"""torch's own values out of a pickle: strided tensors, storages, modules as state_dicts.

Knows: what torch's rebuild functions mean (torch/_utils.py, torch/_tensor.py), spelled by torch's
constructors over memory that `tensors_memory` fills. Must not know: files.
The bounds of strided tensors have been checked by `formats`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch  # noqa: TID253 - this room is imported only where torch is asked for

from ckptool.checkpoint import FLAGGED, UNTYPED, DType, Tensor
from ckptool.errors import PickleInvalid, Unsupported
from ckptool.formats.dicts import dict_items, module_parts
from ckptool.formats.measures import View, global_name, named_dtype
from ckptool.formats.torch_pickle import TensorReader
from ckptool.models.tensors_calls import set_attributes
from ckptool.models.tensors_memory import Memory
from ckptool.models.tensors_modules import state_rows
from ckptool.models.tensors_values import Builder, Call, Way
from ckptool.pickles.nodes import NEWOBJ, REDUCE, Box, Obj, items_of, pairs, text_of
from ckptool.records import Record

_FLAGS = ("conj", "neg")


def torch_dtype(dtype: DType | None, key: str = "") -> torch.dtype:
    """The torch.dtype of this name. Raises Unsupported where this torch has none."""
    found = getattr(torch, dtype.name, None) if dtype is not None else None
    if not isinstance(found, torch.dtype):
        name = dtype.name if dtype is not None else "of an unknown dtype"
        text = f"this torch ({torch.__version__}) has no {name}"
        raise Unsupported(text, key=key or None, hint="load it with a newer torch")
    return found


def typed(memory: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """The storage with a dtype, as old files name theirs."""
    return torch.TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


class Tensors:
    """Tensors of one checkpoint over one memory. `put` says where what is tagged so goes,
    `builders` what each rebuild function makes.

    `late` is run when all memory is filled; `modules` are the classes of the modules that came
    as state_dicts.
    """

    def __init__(
        self,
        reader: TensorReader | None,
        memory: Memory,
        put: Callable[[str], torch.device],
        builders: Mapping[str, Rebuild],
    ) -> None:
        self._reader = reader
        self.builders = builders
        self.memory = memory
        self.put = put
        self.late: list[Callable[[], None]] = []
        self.modules: dict[str, None] = {}
        self._inner: dict[int, Obj] = {}  # by the call around it
        self._ours: set[int] = set()

    def finish(self) -> None:
        """Fill all memory, then complete what needed numbers."""
        self.memory.read()
        late, self.late = self.late, []
        for step in late:
            step()

    # -- from records ------------------------------------------------------------------------
    def strided(self, record: Tensor) -> torch.Tensor:
        """The view a record describes over its storage; its flags are not set yet."""
        if record.storage is None:
            text = f"a tensor of the kind '{record.kind}' whose numbers ckptool cannot read"
            raise Unsupported(text, key=record.key or None)
        memory = self.memory.storage(record.storage)
        dtype = torch_dtype(record.dtype, record.key)
        if memory.device.type == "mps" and dtype in (torch.float64, torch.complex128):
            raise Unsupported(
                f"an Apple GPU has no {record.dtype.name if record.dtype else dtype}",
                key=record.key or None,
                hint="load it with device='cpu', or write a copy in float32: ckptool convert --dtype float32",
            )
        bare = torch.empty(0, dtype=dtype, device=memory.device)
        return bare.set_(memory, record.offset, record.shape or (), record.stride or ())

    def of_record(self, record: Tensor) -> torch.Tensor:
        """A tensor by its record alone. Raises Unsupported for kinds that need more."""
        if record.kind == "meta":
            return _on_meta(record.dtype, record.shape or (), record.stride or (), bool(record.requires_grad))  # fmt: skip
        if record.kind not in ("tensor", "parameter", "subclass", "ndarray", *FLAGGED):
            text = f"a tensor of the kind '{record.kind}' in a {record.kind} of its own"
            raise Unsupported(text, key=record.key or None)
        flags = dict.fromkeys(record.kind.split("+"), True) if record.kind in FLAGGED else {}
        made = _flagged(self.strided(record), flags)
        if record.kind == "parameter":
            return torch.nn.Parameter(made, bool(record.requires_grad))
        return made.requires_grad_(bool(record.requires_grad))

    # -- from nodes --------------------------------------------------------------------------
    def special(self, build: Builder, node: Any) -> Way | None:
        """How a node of torch's becomes a value; None for all others."""
        view = self._reader.view(node) if self._reader is not None else None
        if type(view) is View:
            found = view
            return Way(lambda: self._storage(found))
        if isinstance(view, Tensor):  # of a tar
            return Way(lambda: self.of_record(view))
        if type(node) is not Obj:
            return Way(lambda: build.reference(node))
        if module_parts(node) is not None:
            return self._module(build, node)
        name = global_name(node.fn) or ""
        builder = self.builders.get(name)
        args = items_of(node.args)
        if builder is None or node.op not in (REDUCE, NEWOBJ) or args is None:
            return None
        return builder(self, build, Call(name, args, node))

    def record_of(self, node: Obj) -> Tensor:
        """The record of the tensor a node builds. Raises PickleInvalid."""
        reader = self._reader
        record = None
        if reader is not None:  # a node of ours is not remembered: its id may be reused
            record = reader.build(node) if id(node) in self._ours else reader.tensor(node)
        if record is None:
            raise PickleInvalid("a call that builds no tensor", offset=node.end)
        return record

    def inner(self, node: Obj, function: Any, args: Any) -> Obj:
        """The call that `_rebuild_from_type` makes, as a node."""
        known = self._inner.get(id(node))
        if known is None:
            known = Obj(REDUCE, function, args, node.start, node.args_start, node.end)
            self._inner[id(node)] = known
            self._ours.add(id(known))
        return known

    def _storage(self, view: View) -> Any:
        memory = self.memory.storage(view.storage)
        dtype = view.storage.dtype
        if view.offset:
            memory = memory[view.offset * dtype.size_bytes :]
        if dtype is UNTYPED:
            return memory
        return typed(memory, torch_dtype(dtype))

    def _module(self, build: Builder, node: Obj) -> Way:
        call = build.call(node)

        def fill(made: OrderedDict[str, Any]) -> None:
            self.modules[call.name] = None
            for key, value in state_rows(node):
                found = build.get(value) if value is not node else None
                made[key] = found.detach() if isinstance(found, torch.nn.Parameter) else found

        return Way(OrderedDict, (), fill)


# -- strided -----------------------------------------------------------------------------------
def _dense(tensors: Tensors, build: Builder, call: Call) -> Way:
    at = {"torch._utils._rebuild_tensor_v2": 6, "torch._utils._rebuild_tensor_v3": 7}.get(call.name)
    flags = call.args[at] if at is not None and len(call.args) > at else None

    def make() -> torch.Tensor:
        record = tensors.record_of(call.node)
        made = tensors.strided(record)
        if flags is not None:
            made = _flagged(made, _flags(flags))
        return made.requires_grad_() if record.requires_grad else made

    return Way(make)


def _flags(node: Any) -> dict[str, bool]:
    """The math bits in {'conj': True}. Raises Unsupported for others."""
    found = {}
    for key, value, *_ in pairs(node) if type(node) is Box else ():
        name = text_of(key) or "?"
        if name not in _FLAGS or type(value) is not bool:
            raise Unsupported(f"a tensor with the flag {name!r}, which ckptool does not know")
        found[name] = value
    return found


def _flagged(made: torch.Tensor, flags: dict[str, bool]) -> torch.Tensor:
    made = torch.conj(made) if flags.get("conj") else made
    return torch._neg_view(made) if flags.get("neg") else made


def _on_meta(
    dtype: DType | None, shape: Sequence[int], stride: Sequence[int], requires_grad: bool
) -> torch.Tensor:
    return torch.empty_strided(
        shape, stride, dtype=torch_dtype(dtype), device="meta", requires_grad=requires_grad
    )


def _meta(tensors: Tensors, build: Builder, call: Call) -> Way:
    return Way(lambda: tensors.of_record(tensors.record_of(call.node)))


# -- around another tensor ---------------------------------------------------------------------
def _parameter(tensors: Tensors, build: Builder, call: Call) -> Way:
    def make() -> Any:
        data = build.of(call.args[0])
        if not isinstance(data, torch.Tensor):  # of a class that is not imported
            return Record("torch.nn.parameter.Parameter", (data,))
        return torch.nn.Parameter(data, bool(call.args[1]))

    return Way(make, call.args[:1], lambda made: _set_state(build, made, call.args[3:]))


def _set_state(build: Builder, made: Any, states: Sequence[Any]) -> None:
    """The attributes of a tensor: a dict, or (dict or None, dict of slots). Of a record any."""
    for state in states:
        parts = [state] if type(state) is Box else items_of(state) or ()
        rows = [dict_items(part) for part in parts if part is not None]
        if state is not None and (None in rows or not parts):
            if not isinstance(made, Record):
                raise PickleInvalid("a tensor with a state that is no dict of attributes")
            made.state = build.get(state)
            continue
        found: dict[Any, Any] = {}
        for part in rows:
            build.fill_dict(found, part or ())
        if isinstance(made, Record):
            made.fields.update(found)
        else:
            set_attributes(made, {str(key): value for key, value in found.items()})


_CLASSES: dict[str, type[torch.Tensor]] = {
    "torch.nn.parameter.Parameter": torch.nn.Parameter,
    "torch.nn.parameter.Buffer": getattr(torch.nn, "Buffer", torch.Tensor),  # since torch 2.5
}
_HAVE_STATE = (torch.Tensor, *_CLASSES.values())


def _from_type(tensors: Tensors, build: Builder, call: Call) -> Way | None:
    """(function, class, arguments, state): a tensor with attributes, or of a subclass. One whose
    class is not imported comes as the plain tensor under it, where there is one.
    """
    if len(call.args) != 4:
        return None
    function, kind, args, state = call.args
    if (global_name(function) or "") not in tensors.builders:
        return None
    inner = tensors.inner(call.node, function, args)

    def make() -> Any:
        made = build.of(inner)
        if not isinstance(made, Record):
            cls = _CLASSES.get(global_name(kind) or "")
            return made if cls is None or type(made) is cls else made.as_subclass(cls)
        return Record(build.name_of(kind), made.arguments)

    def fill(made: Any) -> None:
        if isinstance(made, Record) or type(made) in _HAVE_STATE:
            _set_state(build, made, [state])  # a jagged one has got its parts as arguments

    return Way(make, [inner], fill)


def _wrapper(tensors: Tensors, build: Builder, call: Call) -> Way:
    """A subclass without memory of its own: always a record."""
    return build.record(call)


def _on_device(tensors: Tensors, build: Builder, call: Call) -> Way | None:
    """(data, dtype, 'xla:0', requires_grad), data a tensor on the CPU or an array."""
    if len(call.args) != 4:
        return None
    dtype = torch_dtype(named_dtype(call.args[1], call.node))

    def make() -> Any:
        data = build.of(call.args[0])
        if isinstance(data, Record):
            return Record(call.name, (data,))
        tensors.memory.read()
        found = data if isinstance(data, torch.Tensor) else torch.from_numpy(data)
        made = found.to(dtype=dtype, device=tensors.put(text_of(call.args[2]) or ""))
        return made.requires_grad_(bool(call.args[3]))

    return Way(make, call.args[:1])


def _lazy(tensors: Tensors, build: Builder, call: Call) -> Way:
    from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

    device = tensors.put("cpu")
    if call.name.endswith("Buffer"):
        return Way(lambda: UninitializedBuffer(device=device))  # type: ignore[call-arg]
    grad = tuple(call.args[:1]) != (False,)
    return Way(lambda: UninitializedParameter(grad, device=device))  # type: ignore[call-arg, arg-type]


_OLD = [f"torch.{name}Tensor" for name in ("Double", "Float", "Half", "Long", "Int", "Short", "Char", "Byte", "BFloat16")]  # fmt: skip
Rebuild = Callable[[Tensors, Builder, Call], "Way | None"]
STRIDED: dict[str, Rebuild] = {
    "torch._utils._rebuild_tensor": _dense,
    "torch._utils._rebuild_tensor_v2": _dense,
    "torch._utils._rebuild_tensor_v3": _dense,
    **dict.fromkeys(_OLD, _dense),
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _on_device,
    "torch._utils._rebuild_device_tensor_from_numpy": _on_device,
    "torch._utils._rebuild_xla_tensor": _on_device,
    **dict.fromkeys(
        [f"torch.{home}._rebuild_from_type{v}" for home in ("_tensor", "tensor") for v in ("", "_v2")],
        _from_type,
    ),
    "torch.nn.parameter.UninitializedParameter": _lazy,
    "torch.nn.parameter.UninitializedBuffer": _lazy,
}  # fmt: skip
