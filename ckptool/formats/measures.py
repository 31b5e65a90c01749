"""What single nodes mean to torch: names, numbers, dtypes, devices; each checked before use.

Knows: storage classes, dtypes and torch.device as nodes. Must not know: containers, rebuild
functions. Every number that a file declares is checked here, in Python ints.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ckptool.checkpoint import (
    BY_TORCH_STORAGE,
    DTYPE_ALIASES,
    UNTYPED,
    DType,
    Path,
    Storage,
    Tensor,
)
from ckptool.errors import PickleInvalid, TensorBounds
from ckptool.pickles.nodes import Global, Obj, items_of, text_of

COUNTED = 1 << 63
"""torch counts elements in 64 bits; a pickle can spell numbers that Python will not print."""


class View(NamedTuple):
    """A storage as one persistent id names it: legacy files may shift it by elements."""

    storage: Storage
    offset: int = 0


SETS = ("__builtin__.set", "builtins.set", "__builtin__.frozenset", "builtins.frozenset")


def global_name(node: Any) -> str | None:
    """`module.name` of a Global node; None for anything else."""
    return node.full if type(node) is Global else None


def whole(value: Any, what: str, node: Any, low: int = 0) -> int:
    """`value` when it is an int (no bool) of at least `low` that torch can count to. Raises
    TensorBounds otherwise.
    """
    if type(value) is not int or not low <= value < COUNTED:
        shown = value if type(value) is int and abs(value) < COUNTED else type(value).__name__
        what = f"{what} is beyond 63 bits" if shown == "int" else f"{what} is {shown}"
        raise TensorBounds(f"{what}, not a whole number", offset=at_byte(node))
    return value


def id_text(node: Any) -> str | None:
    """What names a storage: a text, or a number as torch before 0.4 gave; None for another."""
    if type(node) is int and abs(node) < COUNTED:
        return str(node)
    return text_of(node)


def at_byte(node: Any) -> int | None:
    """Where a node's opcode stands, when it says so."""
    return getattr(node, "end", None)


def check_bounds(
    shape: tuple[int, ...], stride: tuple[int, ...], offset: int, count: int, node: Any
) -> None:
    """Raise TensorBounds unless every element lies in a storage of `count` elements."""
    last = offset
    for size, step in zip(shape, stride, strict=True):
        if size == 0:
            last = -1
            break
        last += (size - 1) * step
    if last >= count or (last < 0 and offset > count):
        raise TensorBounds(
            f"a tensor reaches element {max(last, offset):,} of a storage of {count:,}",
            offset=at_byte(node),
        )


def storage_dtype(node: Any, owner: Any) -> DType:
    """The dtype of a storage class. Raises PickleInvalid for a class torch does not have."""
    name = global_name(node) or ""
    module, _, cls = name.rpartition(".")
    if module in ("torch", "torch.storage", "torch.cuda") and node.name == cls:
        if cls == "UntypedStorage":
            return UNTYPED
        if cls in BY_TORCH_STORAGE:
            return BY_TORCH_STORAGE[cls]
    raise PickleInvalid(f"'{name or 'no class'}' is not a storage type", offset=at_byte(owner))


def named_dtype(node: Any, owner: Any) -> DType:
    """The dtype a `torch.float32`-like Global names. Raises PickleInvalid."""
    name = global_name(node) or ""
    found = DTYPE_ALIASES.get(name.removeprefix("torch."))
    if found is None or not name.startswith("torch."):
        raise PickleInvalid(f"'{name or 'no name'}' is not a dtype", offset=at_byte(owner))
    return found


def evolve(tensor: Tensor, **changes: Any) -> Tensor:
    """The tensor with some fields changed."""
    fields = {name: getattr(tensor, name) for name in tensor.__slots__}
    return Tensor(**{**fields, **changes})


def named(t: Tensor, key: str, path: Path) -> Tensor:
    """The tensor under this name (spelled out: it is done for every tensor of a file)."""
    return Tensor(
        key,
        t.dtype,
        t.shape,
        t.stride,
        t.offset,
        t.storage,
        t.requires_grad,
        t.kind,
        path,
        t.device,
        t.class_name,
    )


def on_storage(t: Tensor, storage: Storage) -> Tensor:
    """The tensor as it lies in this storage (spelled out, as `named`)."""
    return Tensor(
        t.key,
        t.dtype,
        t.shape,
        t.stride,
        t.offset,
        storage,
        t.requires_grad,
        t.kind,
        t.path,
        t.device,
        t.class_name,
    )


def array_shape(node: Any) -> tuple[int, ...] | None:
    """The shape in a numpy array's BUILD state (version, shape, dtype, order, bytes), or in
    the arguments protocol 5 gives: _frombuffer(bytes, dtype, shape, order).
    """
    if type(node) is not Obj:
        return None
    if (global_name(node.fn) or "").endswith(".numeric._frombuffer"):
        args = items_of(node.args) or ()
        sizes = items_of(args[2]) if len(args) == 4 else None
    else:
        state = items_of(node.state.value) if node.state is not None else None
        sizes = items_of(state[1]) if state and len(state) == 5 else None
    if sizes is None or any(type(size) is not int for size in sizes):
        return None
    return tuple(sizes)


def device_text(node: Any) -> str | None:
    """'cuda:1' from torch.device(('cuda', 1)); None for anything else."""
    if type(node) is not Obj or global_name(node.fn) != "torch.device":
        return None
    args = items_of(node.args) or ()
    name = text_of(args[0]) if args else None
    if name is None:
        return None
    return f"{name}:{args[1]}" if len(args) > 1 and type(args[1]) is int else name
