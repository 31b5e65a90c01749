"""torch's rebuild functions: which arguments of theirs are a tensor (formats 4.1).

Knows: the signatures in torch/_utils.py and torch/_tensor.py. Must not know: containers.
One function a rebuild function, one row in `BUILDERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ckptool.checkpoint import BY_TORCH_STORAGE, DType, Tensor
from ckptool.errors import LimitExceeded, PickleInvalid
from ckptool.formats.measures import array_shape, device_text, evolve, global_name, named_dtype
from ckptool.pickles.nodes import DICT, REDUCE, Box, Obj, held_count, items_of, pairs, text_of


class Reader(Protocol):
    """What a builder needs of `torch_pickle.TensorReader`."""

    def tensor(self, node: Any) -> Tensor | None:
        """The tensor a node builds, remembered."""

    def build(self, node: Any) -> Tensor | None:
        """The same, not remembered."""

    def dense(
        self,
        node: Obj,
        args: Sequence[Any],
        dtype: DType | None = None,
        kind: str = "tensor",
        requires_grad: bool = False,
    ) -> Tensor:
        """A strided tensor from (storage, offset, size, stride, …)."""

    def sizes(self, node: Any, what: str, owner: Any) -> tuple[int, ...]:
        """A tuple of whole numbers."""


_FLAGS = ("conj", "neg")
_MOST_ATTRIBUTES = 256
_NUMBERS = frozenset(("data", "real", "imag", "__dict__", "__class__"))
_PLAIN = ("torch.Tensor", "torch.nn.parameter.Parameter")

Builder = Callable[[Reader, Obj, Sequence[Any]], "Tensor | None"]


def _arity(node: Obj, args: Sequence[Any], *allowed: int) -> None:
    if len(args) not in allowed:
        raise PickleInvalid(
            f"{global_name(node.fn)} is called with {len(args)} arguments", offset=node.end
        )


def _flag(value: Any, node: Obj) -> bool:
    if type(value) is not bool and value not in (0, 1):
        raise PickleInvalid("requires_grad is not a truth value", offset=node.end)
    return bool(value)


def _flagged_kind(metadata: Any, node: Obj) -> str:
    """Conj or neg when the math bits are set: the raw bytes are not the values.

    torch sets a bit when its name is there, whatever its value, and takes any mapping; it writes
    a plain dict with True. Source: setTensorMetadata in torch/csrc/jit/serialization/pickler.h.
    """
    if metadata is None:
        return "tensor"
    if type(metadata) is not Box or metadata.kind != DICT:
        raise PickleInvalid("the flags of a tensor are no plain dict", offset=node.end)
    _refuse_many(metadata, node)
    found: set[str] = set()
    for key, value, *_ in pairs(metadata):
        name = text_of(key)
        if name is None or type(value) is not bool or (name in _FLAGS and not value):
            raise PickleInvalid("a flag of a tensor that torch does not write", offset=node.end)
        found.add(name)
    return "+".join(flag for flag in _FLAGS if flag in found) or "tensor"


def _keeps_numbers(state: Any, node: Obj, strict: bool = True) -> None:
    """Raise PickleInvalid when a state could give a tensor other numbers: `data` is an attribute
    too, set like the others (torch/_utils.py, _set_obj_state). A class that is not torch's own
    (not `strict`) may make what it likes of what is no dict.
    """
    for part in [state] if items_of(state) is None else items_of(state) or ():
        is_dict = (
            _is_ordered(part) if type(part) is Obj else type(part) is Box and part.kind == DICT
        )
        if strict and part is not None and not is_dict:
            raise PickleInvalid("a tensor with a state that is no dict", offset=node.end)
        _refuse_many(part if is_dict else None, node)
        keys = {text_of(key) for key, *_ in pairs(part)} if is_dict else set()
        hidden = sorted(_NUMBERS & keys)
        if hidden:
            text = f"a tensor whose state gives it other numbers, as '{hidden[0]}'"
            raise PickleInvalid(text, offset=node.end)


def _refuse_many(held: Any, node: Obj) -> None:
    """Raise LimitExceeded for a dict of many attributes: thousands of tensors could share it."""
    count = held_count(held)
    if count > 2 * _MOST_ATTRIBUTES:
        raise LimitExceeded("attributes", f"a tensor of {count // 2:,} attributes", offset=node.end)


def _is_ordered(node: Obj) -> bool:
    return global_name(node.fn) == "collections.OrderedDict" and not items_of(node.args)


def _v1(reader: Reader, node: Obj, args: Sequence[Any]) -> Tensor:
    _arity(node, args, 4)
    return reader.dense(node, args)


def _v2(reader: Reader, node: Obj, args: Sequence[Any]) -> Tensor:
    _arity(node, args, 6, 7)
    kind = _flagged_kind(args[6], node) if len(args) > 6 else "tensor"
    return reader.dense(node, args, None, kind, _flag(args[4], node))


def _v3(reader: Reader, node: Obj, args: Sequence[Any]) -> Tensor:
    _arity(node, args, 7, 8)
    kind = _flagged_kind(args[7], node) if len(args) > 7 else "tensor"
    return reader.dense(node, args, named_dtype(args[6], node), kind, _flag(args[4], node))


def _parameter(reader: Reader, node: Obj, args: Sequence[Any]) -> Tensor:
    _arity(node, args, 3, 4)
    inner = reader.tensor(args[0])
    if inner is None:
        raise PickleInvalid("a Parameter without a tensor", offset=node.end)
    if len(args) == 4:
        _keeps_numbers(args[3], node)
    kind = "parameter" if inner.kind == "tensor" else inner.kind
    return evolve(inner, requires_grad=_flag(args[1], node), kind=kind)


def _quantized(reader: Reader, node: Obj, args: Sequence[Any]) -> Tensor:
    _arity(node, args, 7)
    return evolve(reader.dense(node, args, kind="quantized"), requires_grad=_flag(args[5], node))


def _from_type(reader: Reader, node: Obj, args: Sequence[Any]) -> Tensor | None:
    """_rebuild_from_type(_v2)(function, class, arguments, state): a tensor subclass."""
    _arity(node, args, 4)
    inner = Obj(REDUCE, args[0], args[2], node.start, node.args_start, node.end)
    tensor = reader.build(inner)  # not remembered: this node is ours, its id may be reused
    cls = global_name(args[1])
    if tensor is None:
        return Tensor("", None, None, None, 0, None, None, "subclass", (), "", cls)
    _keeps_numbers(args[3], node, strict=cls in _PLAIN)
    kind = tensor.kind
    if cls not in _PLAIN:
        kind = "subclass" if kind in ("tensor", "parameter") else kind
    return evolve(tensor, kind=kind, class_name=cls)


def _sparse(reader: Reader, node: Obj, args: Sequence[Any]) -> Tensor:
    """(layout, (indices, values, size[, coalesced])) or (layout, (comp, plain, values, size))."""
    _arity(node, args, 2)
    parts = items_of(args[1]) or ()
    tensors = [reader.tensor(part) for part in parts]
    dense = [tensor for tensor in tensors if tensor is not None]
    if len(dense) not in (2, 3) or len(parts) < len(dense) + 1:
        raise PickleInvalid("a sparse tensor without indices and values", offset=node.end)
    shape = reader.sizes(parts[len(dense)], "size", node)
    *indices, values = dense
    if any(one.dtype is None or one.dtype.kind != "int" for one in indices):
        raise PickleInvalid("indices of a sparse tensor that are no integers", offset=node.end)
    return Tensor(
        "", values.dtype, shape, None, 0, values.storage, False, "sparse", (), values.device
    )


def _nested(reader: Reader, node: Obj, args: Sequence[Any]) -> Tensor:
    _arity(node, args, 4)
    buffer = reader.tensor(args[0])
    if buffer is None:
        raise PickleInvalid("a nested tensor without a buffer", offset=node.end)
    return evolve(buffer, shape=None, stride=None, kind="nested")


def _meta(reader: Reader, node: Obj, args: Sequence[Any]) -> Tensor:
    _arity(node, args, 4)
    shape, stride = reader.sizes(args[1], "size", node), reader.sizes(args[2], "stride", node)
    dtype = named_dtype(args[0], node)
    return Tensor("", dtype, shape, stride, 0, None, _flag(args[3], node), "meta", (), "meta")


def _wrapper(reader: Reader, node: Obj, args: Sequence[Any]) -> Tensor:
    """(class, dtype, size, stride, offset, layout, device, requires_grad): no storage."""
    _arity(node, args, 8)
    shape, stride = reader.sizes(args[2], "size", node), reader.sizes(args[3], "stride", node)
    dtype, cls = named_dtype(args[1], node), global_name(args[0])
    return Tensor(
        "",
        dtype,
        shape,
        stride,
        0,
        None,
        _flag(args[7], node),
        "subclass",
        (),
        device_text(args[6]) or "?",
        cls,
    )


def _on_device(reader: Reader, node: Obj, args: Sequence[Any]) -> Tensor | None:
    """(data, dtype, 'xla:0', requires_grad): the device is an argument, not a tag."""
    _arity(node, args, 4)
    device = text_of(args[2])
    if device is None:
        raise PickleInvalid("a device argument that is not text", offset=node.end)
    inner = reader.tensor(args[0])
    dtype = named_dtype(args[1], node)
    if inner is None:
        inner = Tensor("", dtype, array_shape(args[0]), None, 0, None)
    if inner.dtype is not dtype:
        raise PickleInvalid(
            "a tensor of a device that has one dtype and is declared with another", offset=node.end
        )
    return evolve(inner, requires_grad=_flag(args[3], node), device=device, kind="device-argument")


def _lazy(reader: Reader, node: Obj, args: Sequence[Any]) -> Tensor:
    return Tensor(
        "", None, None, None, 0, None, None, "uninitialized", (), "cpu", global_name(node.fn)
    )


def _old_tensor(reader: Reader, node: Obj, args: Sequence[Any]) -> Tensor:
    """torch.FloatTensor() BUILD (storage, offset, size, stride), torch 0.1. Called with sizes it
    has whatever memory holds, with a list its numbers: neither is ever saved.
    """
    state = items_of(node.state.value) if node.state is not None else None
    if args or state is None or len(state) != 4:
        text = f"{global_name(node.fn)} with arguments, or without its four parts"
        raise PickleInvalid(text, offset=node.end)
    tensor = reader.dense(node, state)
    written = (tensor.dtype.torch_storage or "") if tensor.dtype else ""
    if global_name(node.fn) != f"torch.{written.replace('Storage', 'Tensor')}":
        raise PickleInvalid("a tensor over a storage of another type", offset=node.end)
    return tensor


BUILDERS: dict[str, Builder] = {
    "torch._utils._rebuild_tensor": _v1,
    "torch._utils._rebuild_tensor_v2": _v2,
    "torch._utils._rebuild_tensor_v3": _v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _on_device,
    "torch._utils._rebuild_device_tensor_from_numpy": _on_device,
    "torch._utils._rebuild_xla_tensor": _on_device,
    "torch._tensor._rebuild_from_type": _from_type,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.tensor._rebuild_from_type": _from_type,
    "torch.tensor._rebuild_from_type_v2": _from_type,
    "torch.nn.parameter.UninitializedParameter": _lazy,
    "torch.nn.parameter.UninitializedBuffer": _lazy,
    **{
        f"torch.{d.torch_storage.replace('Storage', 'Tensor')}": _old_tensor
        for d in BY_TORCH_STORAGE.values()
        if d.torch_storage and d.kind in ("float", "int")
    },
}

STATEFUL = frozenset((_old_tensor, _lazy))
"""Builders that read, or need not read, the state that BUILD gives their object."""

DEVICE_ARGUMENT = {
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": 2,
    "torch._utils._rebuild_device_tensor_from_numpy": 2,
    "torch._utils._rebuild_xla_tensor": 2,
    "torch._utils._rebuild_wrapper_subclass": 6,
}
"""Which argument of a rebuild function says the device (a string or a torch.device)."""
