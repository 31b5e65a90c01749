"""The calls that make dense tensors, and how one is told of another storage, dtype or place.

Knows: the arguments of torch._utils._rebuild_tensor, _v2, _v3 and _rebuild_qtensor (formats
4.1). Must not know: containers, which tensors change.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ckptool.checkpoint import UNTYPED, Tensor
from ckptool.errors import Unsupported
from ckptool.formats.expressions import V2, V3, dtype_name, storage_id
from ckptool.formats.homes import Home, Place
from ckptool.formats.measures import global_name
from ckptool.pickles.nodes import REDUCE, Obj, Pers, Tup, text_of
from ckptool.pickles.splice import Edits
from ckptool.pickles.write import ORDERED, integer, integers

_UTILS = "torch._utils."
_DENSE = frozenset(
    _UTILS + name
    for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor")
)
_WRAPPING = frozenset(_UTILS + n for n in ("_rebuild_parameter", "_rebuild_parameter_with_state"))
_TYPED = frozenset(
    f"{module}.{name}"
    for module in ("torch._tensor", "torch.tensor")
    for name in ("_rebuild_from_type", "_rebuild_from_type_v2")
)
_GRAD_AT = 4
_DTYPE_AT = 6  # of the arguments of _rebuild_tensor_v3; _v2 ends or has its metadata there


class Dense(NamedTuple):
    """A call that makes a dense tensor: the span of its function's name, its arguments."""

    call: Obj
    function: str
    function_start: int
    function_end: int
    args: Tup


def dense_of(node: Any) -> Dense | None:
    """The dense call behind a tensor node: its own, its Parameter's or its subclass's."""
    for _ in range(3):  # a Parameter of a subclass
        if type(node) is not Obj or node.op != REDUCE or type(node.args) is not Tup:
            return None
        name = global_name(node.fn) or ""
        if name in _WRAPPING:
            node = node.args.items[0]
            continue
        if name in _DENSE:
            return Dense(node, name, node.start, node.args_start, node.args)
        return _inside_type(node, node.args) if name in _TYPED else None
    return None


def _inside_type(node: Obj, args: Tup) -> Dense | None:
    """_rebuild_from_type_v2(function, class, arguments, state)."""
    name = global_name(args.items[0]) or ""
    if name not in _DENSE or len(args.items) != 4 or type(args.items[2]) is not Tup:
        return None
    return Dense(node, name, args.starts[0], args.starts[1], args.items[2])


def tell(dense: Dense, old: Tensor, place: Place, home: Home, key: str, legacy: bool, edits: Edits) -> None:  # fmt: skip
    """Edit the arguments: storage id, offset, strides and, where it changes, the dtype."""
    args = dense.args
    storage = args.items[0]
    direct = type(storage) is Pers and storage.start == args.starts[0]
    if home.read is None and direct:
        tell_storage(storage, home, key, legacy, edits)
    else:
        _set(edits, args, 0, storage_id(home, key, legacy=legacy))
    if args.items[1] != place.offset:
        _set(edits, args, 1, integer(place.offset))
    if old.stride != place.stride:
        _set(edits, args, 3, integers(place.stride))
    if place.dtype is not old.dtype:
        _tell_dtype(dense, place, home, edits)


def tell_storage(pers: Pers, home: Home, key: str, legacy: bool, edits: Edits) -> None:
    """Edit the persistent id of a storage that stays whole: its key, its tag, its length."""
    pid = pers.pid
    assert type(pid) is Tup
    if legacy and home.dtype is UNTYPED:
        storage_id(home, key, legacy=True)  # refuses
    if type(pid.items[2]) is int:
        raise Unsupported("a storage whose key is a number", key=home.label or None)
    if text_of(pid.items[2]) != key:
        edits.strings[pid.starts[2]] = key
    if text_of(pid.items[3]) != home.device:
        edits.strings[pid.starts[3]] = home.device
    if legacy and len(pid.items) == 5:
        edits.inserts[pid.end] = (b"N",)
    elif len(pid.items) == 6 and (not legacy or pid.items[5] is not None):
        if legacy:
            _set(edits, pid, 5, b"N")
        else:
            edits.dropped[pid.starts[5]] = pid.end


def _set(edits: Edits, args: Tup, at: int, data: bytes) -> None:
    edits.values[args.starts[at]] = (_end(args, at), data)


def _end(args: Tup, at: int) -> int:
    return args.starts[at + 1] if at + 1 < len(args.starts) else args.end


def _tell_dtype(dense: Dense, place: Place, home: Home, edits: Edits) -> None:
    """Typed storages are rebuilt by _v2, untyped ones by _v3, which is told the dtype."""
    args, count = dense.args, len(dense.args.items)
    old_v3, new_v3 = dense.function.endswith("_v3"), home.dtype is UNTYPED
    if dense.function.endswith("_rebuild_qtensor"):
        raise Unsupported("a quantized tensor is not cast", key=home.label or None)
    name = dtype_name(place.dtype)
    if old_v3 and new_v3:
        _set(edits, args, _DTYPE_AT, name)
    elif old_v3:
        edits.values[dense.function_start] = (dense.function_end, V2)
        edits.dropped[args.starts[_DTYPE_AT]] = _end(args, _DTYPE_AT)
    elif new_v3:
        if count > _GRAD_AT and args.items[_GRAD_AT] is True:
            _set(edits, args, _GRAD_AT, b"\x89")  # torch fails to rebuild such a leaf by _v3
        edits.values[dense.function_start] = (dense.function_end, V3)
        if count == 4:  # _rebuild_tensor of torch 0.3 has neither requires_grad nor hooks
            edits.inserts[args.end] = (b"\x89", ORDERED, name)
        else:
            edits.inserts[args.starts[_DTYPE_AT] if count > _DTYPE_AT else args.end] = (name,)
