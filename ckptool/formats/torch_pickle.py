"""What torch means by pickle nodes: which are storages, which are tensors.

Knows: the rebuild functions of torch/_utils.py and the persistent ids of torch/serialization.py
(formats 4.1 to 4.3). Must not know: containers; a `Resolver` says where a storage's bytes lie.
Every number that a file declares is checked here, in Python ints, before anything uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckptool.checkpoint import (
    BY_TORCH_STORAGE,
    DTYPE_ALIASES,
    UNTYPED,
    DType,
    Path,
    Piece,
    Storage,
    Tensor,
)
from ckptool.errors import CkptError, LimitExceeded, PickleInvalid, StorageSize, TensorBounds
from ckptool.limits import DEFAULT, Limits
from ckptool.pickles.nodes import (
    NEWOBJ,
    REDUCE,
    Box,
    Global,
    Obj,
    Pers,
    Tup,
    Walked,
    elements,
    items_of,
    pairs,
    text_of,
)

Located = tuple[tuple[Piece, ...], int | None]
Resolver = Callable[[str, DType, int], Located]
"""(storage key, dtype, count) -> (pieces, recorded checksum). Raises StorageSize."""


_CALLS_DEEP = 50  # a Parameter of a subclass of a tensor is three


@dataclass(frozen=True, slots=True)
class View:
    """A storage as one persistent id names it: legacy files may shift it by elements."""

    storage: Storage
    offset: int = 0


def global_name(node: Any) -> str | None:
    """`module.name` of a Global node; None for anything else."""
    return node.full if type(node) is Global else None


def whole(value: Any, what: str, node: Any, low: int = 0) -> int:
    """`value` when it is an int (no bool) of at least `low`. Raises TensorBounds otherwise."""
    if type(value) is not int or value < low:
        shown = value if type(value) is int and abs(value) < 1 << 64 else type(value).__name__
        raise TensorBounds(f"{what} is {shown}, not a whole number", offset=_at(node))
    return value


def _at(node: Any) -> int | None:
    return getattr(node, "end", None)


class TensorReader:
    """Turns nodes of one pickle into Storage and Tensor records; remembers both."""

    def __init__(self, resolve: Resolver, limits: Limits = DEFAULT) -> None:
        self.resolve = resolve
        self.limits = limits
        self.storages: dict[str, Storage] = {}
        self.two_dtypes: list[str] = []
        self.persistent: Callable[[Pers], View | Tensor | None] = self.torch_storage
        self.nested: Callable[[Obj], View | None] = lambda node: None
        self._depth = 0
        self._views: dict[int, View | Tensor | None] = {}
        self._tensors: dict[int, Tensor | None] = {}

    # -- storages ----------------------------------------------------------------------------
    def view(self, node: Any) -> View | Tensor | None:
        """The storage (or, in tar files, tensor) a node names; None when it names none."""
        if type(node) is Obj:
            return self.nested(node)
        if type(node) is not Pers:
            return None
        if id(node) not in self._views:
            self._views[id(node)] = self.persistent(node)
        return self._views[id(node)]

    def torch_storage(self, node: Pers) -> View:
        """('storage', StorageType, key, location, count[, view]). Raises PickleInvalid."""
        items = items_of(node.pid)
        if items is None or len(items) not in (5, 6) or text_of(items[0]) != "storage":
            raise PickleInvalid("a persistent id that is not a storage", offset=node.end)
        key, device = text_of(items[2]), text_of(items[3])
        if key is None and type(items[2]) is int:
            key = str(items[2])
        if key is None or device is None:
            raise PickleInvalid("a storage without a text key or location", offset=node.end)
        dtype = storage_dtype(items[1], node)
        count = whole(items[4], "the element count of a storage", node)
        storage = self.add_storage(key, dtype, count, device, node)
        return View(storage, self._shift(items, storage, node))

    def add_storage(self, key: str, dtype: DType, count: int, device: str, node: Any) -> Storage:
        """The one record of this key; a second id may only repeat it (the first location
        wins, as in torch). Raises StorageSize when sizes disagree.
        """
        known = self.storages.get(key)
        if known is None:
            pieces, crc = self.resolve(key, dtype, count)
            known = self.storages[key] = Storage(key, dtype, count, device, pieces, crc)
        elif known.dtype is not dtype or known.count != count:
            if count * dtype.size_bytes != known.size_bytes:
                raise StorageSize(f"storage '{key}' is declared with two sizes", offset=_at(node))
            self.two_dtypes.append(key)
            return Storage(key, dtype, count, known.device, known.pieces, known.crc)
        return known

    def _shift(self, items: Sequence[Any], storage: Storage, node: Pers) -> int:
        """Elements by which a storage view of torch 0.3 and earlier starts later."""
        view = items_of(items[5]) if len(items) == 6 else None
        if not view:
            return 0
        if len(view) != 3:
            raise PickleInvalid("a storage view that has not three parts", offset=node.end)
        offset = whole(view[1], "a storage view's offset", node)
        size = whole(view[2], "a storage view's size", node)
        if offset + size > storage.count:
            raise TensorBounds("a storage view reaches past its storage", offset=node.end)
        return offset

    # -- tensors -----------------------------------------------------------------------------
    def finish(self, walked: Walked) -> None:
        """Check what no path led to: popped, or inside what we do not understand."""
        for pers in walked.persistent:
            if id(pers) not in self._views:
                self.view(pers)
        for call in walked.calls:
            if id(call) not in self._tensors:
                self.tensor(call)

    def tensor(self, node: Any) -> Tensor | None:
        """The tensor a node builds; None when it is something else.

        Raises TensorBounds, StorageSize or PickleInvalid when it lies.
        """
        if type(node) not in (Obj, Pers):
            return None
        key = id(node)
        if key not in self._tensors:
            self._tensors[key] = self.build(node)
        return self._tensors[key]

    def build(self, node: Any) -> Tensor | None:
        """The tensor of a node, built anew. Raises LimitExceeded for calls in calls in calls."""
        self._depth += 1
        try:
            if self._depth > _CALLS_DEEP:
                raise LimitExceeded("nesting", f"rebuild calls inside each other, more than {_CALLS_DEEP} deep", offset=_at(node))  # fmt: skip
            return self._built(node)
        finally:
            self._depth -= 1

    def _built(self, node: Any) -> Tensor | None:
        if type(node) is Pers:
            found = self.view(node)
            return found if isinstance(found, Tensor) else self._bare_storage(found)
        name = global_name(node.fn)
        builder = BUILDERS.get(name) if name else None
        if builder is None or node.op not in (REDUCE, NEWOBJ):
            return None
        args = items_of(node.args)
        if args is None:
            raise PickleInvalid(f"{name} is called without a tuple of arguments", offset=node.end)
        if node.batches:
            raise PickleInvalid("items are added to a tensor", offset=node.batches[0].end)
        return builder(self, node, args)

    def _bare_storage(self, found: View | Tensor | None) -> Tensor | None:
        if type(found) is not View:
            return None
        storage = found.storage
        count = storage.count - found.offset
        return Tensor("", storage.dtype, (count,), (1,), found.offset, storage, None, "storage", (), storage.device)  # fmt: skip

    def dense(
        self,
        node: Obj,
        args: Sequence[Any],
        dtype: DType | None = None,
        kind: str = "tensor",
        requires_grad: bool = False,
    ) -> Tensor:
        """A strided tensor from (storage, offset, size, stride, …), its bounds checked."""
        view = self.view(args[0])
        if type(view) is not View:
            raise PickleInvalid("a tensor without a storage", offset=node.end)
        storage = view.storage
        dtype = dtype or storage.dtype
        offset = whole(args[1], "the offset of a tensor", node) + view.offset
        shape = self.sizes(args[2], "size", node)
        stride = self.sizes(args[3], "stride", node)
        if len(shape) != len(stride):
            raise TensorBounds(f"{len(shape)} sizes and {len(stride)} strides", offset=node.end)
        check_bounds(shape, stride, offset, storage.size_bytes // dtype.size_bytes, node)
        return Tensor("", dtype, shape, stride, offset, storage, requires_grad, kind, (), storage.device)  # fmt: skip

    def sizes(self, node: Any, what: str, owner: Any) -> tuple[int, ...]:
        """A tuple of whole numbers, also as torch.Size((…)). Raises TensorBounds."""
        if type(node) is Tup and len(node.items) <= self.limits.rank:
            for item in node.items:
                if type(item) is not int or item < 0:
                    whole(item, f"the {what} of a tensor", owner)
            return tuple(node.items)
        if type(node) is Obj and global_name(node.fn) == "torch.Size":
            inner = items_of(node.args)
            node = inner[0] if inner and len(inner) == 1 else None
        if type(node) is Box and node.kind == 0x5D:
            items: list[Any] | None = [value for value, _, _ in elements(node)]
        else:
            items = items_of(node)
        if items is None:
            raise TensorBounds(f"the {what} of a tensor is not a tuple", offset=_at(owner))
        if len(items) > self.limits.rank:
            raise LimitExceeded("rank", f"a tensor of {len(items):,} dimensions", offset=_at(owner))
        return tuple([whole(item, f"the {what} of a tensor", owner) for item in items])


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
            offset=_at(node),
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
    raise PickleInvalid(f"'{name or 'no class'}' is not a storage type", offset=_at(owner))


def named_dtype(node: Any, owner: Any) -> DType:
    """The dtype a `torch.float32`-like Global names. Raises PickleInvalid."""
    name = global_name(node) or ""
    found = DTYPE_ALIASES.get(name.removeprefix("torch."))
    if found is None or not name.startswith("torch."):
        raise PickleInvalid(f"'{name or 'no name'}' is not a dtype", offset=_at(owner))
    return found


# -- one function a rebuild function of torch --------------------------------------------------
Builder = Callable[[TensorReader, Obj, "list[Any]"], "Tensor | None"]


def _arity(node: Obj, args: Sequence[Any], *allowed: int) -> None:
    if len(args) not in allowed:
        raise PickleInvalid(
            f"{global_name(node.fn)} is called with {len(args)} arguments", offset=node.end
        )


def _evolve(tensor: Tensor, **changes: Any) -> Tensor:
    fields = {name: getattr(tensor, name) for name in tensor.__slots__}
    return Tensor(**{**fields, **changes})


def named(t: Tensor, key: str, path: Path) -> Tensor:
    """The tensor under this name (spelled out: it is done for every tensor of a file)."""
    return Tensor(key, t.dtype, t.shape, t.stride, t.offset, t.storage, t.requires_grad, t.kind, path, t.device, t.class_name)  # fmt: skip


def _flag(value: Any, node: Obj) -> bool:
    if type(value) is not bool and value not in (0, 1):
        raise PickleInvalid("requires_grad is not a truth value", offset=node.end)
    return bool(value)


def _flagged_kind(metadata: Any) -> str:
    """Conj or neg when the math bits are set: the raw bytes are not the values."""
    if type(metadata) is Box:
        for key, value, *_ in pairs(metadata):
            if key in ("conj", "neg") and value is True:
                return str(key)
    return "tensor"


def _v1(reader: TensorReader, node: Obj, args: list[Any]) -> Tensor:
    _arity(node, args, 4)
    return reader.dense(node, args)


def _v2(reader: TensorReader, node: Obj, args: list[Any]) -> Tensor:
    _arity(node, args, 6, 7)
    kind = _flagged_kind(args[6]) if len(args) > 6 else "tensor"
    return reader.dense(node, args, None, kind, _flag(args[4], node))


def _v3(reader: TensorReader, node: Obj, args: list[Any]) -> Tensor:
    _arity(node, args, 7, 8)
    kind = _flagged_kind(args[7]) if len(args) > 7 else "tensor"
    return reader.dense(node, args, named_dtype(args[6], node), kind, _flag(args[4], node))


def _parameter(reader: TensorReader, node: Obj, args: list[Any]) -> Tensor:
    _arity(node, args, 3, 4)
    inner = reader.tensor(args[0])
    if inner is None:
        raise PickleInvalid("a Parameter without a tensor", offset=node.end)
    kind = "parameter" if inner.kind == "tensor" else inner.kind
    return _evolve(inner, requires_grad=_flag(args[1], node), kind=kind)


def _quantized(reader: TensorReader, node: Obj, args: list[Any]) -> Tensor:
    _arity(node, args, 7)
    return _evolve(reader.dense(node, args, kind="quantized"), requires_grad=_flag(args[5], node))


def _from_type(reader: TensorReader, node: Obj, args: list[Any]) -> Tensor | None:
    """_rebuild_from_type(_v2)(function, class, arguments, state): a tensor subclass."""
    _arity(node, args, 4)
    inner = Obj(REDUCE, args[0], args[2], node.start, node.args_start, node.end)
    tensor = reader.build(inner)  # not remembered: this node is ours, its id may be reused
    cls = global_name(args[1])
    if tensor is None:
        return Tensor("", None, None, None, 0, None, None, "subclass", (), "", cls)
    kind = tensor.kind
    if cls not in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        kind = "subclass" if kind in ("tensor", "parameter") else kind
    return _evolve(tensor, kind=kind, class_name=cls)


def _sparse(reader: TensorReader, node: Obj, args: list[Any]) -> Tensor:
    """(layout, (indices, values, size[, coalesced])) or (layout, (comp, plain, values, size))."""
    _arity(node, args, 2)
    parts = items_of(args[1]) or []
    tensors = [reader.tensor(part) for part in parts]
    dense = [tensor for tensor in tensors if tensor is not None]
    if len(dense) not in (2, 3) or len(parts) < len(dense) + 1:
        raise PickleInvalid("a sparse tensor without indices and values", offset=node.end)
    shape = reader.sizes(parts[len(dense)], "size", node)
    values = dense[-1]
    return Tensor("", values.dtype, shape, None, 0, values.storage, False, "sparse", (), values.device)  # fmt: skip


def _nested(reader: TensorReader, node: Obj, args: list[Any]) -> Tensor:
    _arity(node, args, 4)
    buffer = reader.tensor(args[0])
    if buffer is None:
        raise PickleInvalid("a nested tensor without a buffer", offset=node.end)
    return _evolve(buffer, shape=None, stride=None, kind="nested")


def _meta(reader: TensorReader, node: Obj, args: list[Any]) -> Tensor:
    _arity(node, args, 4)
    shape, stride = reader.sizes(args[1], "size", node), reader.sizes(args[2], "stride", node)
    dtype = named_dtype(args[0], node)
    return Tensor("", dtype, shape, stride, 0, None, _flag(args[3], node), "meta", (), "meta")


def _wrapper(reader: TensorReader, node: Obj, args: list[Any]) -> Tensor:
    """(class, dtype, size, stride, offset, layout, device, requires_grad): no storage."""
    _arity(node, args, 8)
    shape, stride = reader.sizes(args[2], "size", node), reader.sizes(args[3], "stride", node)
    dtype, cls = named_dtype(args[1], node), global_name(args[0])
    return Tensor("", dtype, shape, stride, 0, None, _flag(args[7], node), "subclass", (), device_text(args[6]) or "?", cls)  # fmt: skip


def _on_device(reader: TensorReader, node: Obj, args: list[Any]) -> Tensor | None:
    """(data, dtype, 'xla:0', requires_grad): the device is an argument, not a tag."""
    _arity(node, args, 4)
    device = text_of(args[2])
    if device is None:
        raise PickleInvalid("a device argument that is not text", offset=node.end)
    inner = reader.tensor(args[0])
    dtype = named_dtype(args[1], node)
    if inner is None:
        inner = Tensor("", dtype, array_shape(args[0]), None, 0, None)
    return _evolve(inner, requires_grad=_flag(args[3], node), device=device, kind="device-argument")


def _lazy(reader: TensorReader, node: Obj, args: list[Any]) -> Tensor:
    return Tensor("", None, None, None, 0, None, None, "uninitialized", (), "cpu", global_name(node.fn))  # fmt: skip


def _old_tensor(reader: TensorReader, node: Obj, args: list[Any]) -> Tensor | None:
    """torch.FloatTensor() BUILD (storage, offset, size, stride), torch 0.1."""
    state = items_of(node.state.value) if node.state is not None else None
    if state is None or len(state) != 4:
        return None
    return reader.dense(node, state)


def array_shape(node: Any) -> tuple[int, ...] | None:
    """The shape in a numpy array's BUILD state (version, shape, dtype, order, bytes), or in
    the arguments protocol 5 gives: _frombuffer(bytes, dtype, shape, order).
    """
    if type(node) is not Obj:
        return None
    if (global_name(node.fn) or "").endswith(".numeric._frombuffer"):
        args = items_of(node.args) or []
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
    args = items_of(node.args) or []
    name = text_of(args[0]) if args else None
    if name is None:
        return None
    return f"{name}:{args[1]}" if len(args) > 1 and type(args[1]) is int else name


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

DEVICE_ARGUMENT = {
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": 2,
    "torch._utils._rebuild_device_tensor_from_numpy": 2,
    "torch._utils._rebuild_xla_tensor": 2,
    "torch._utils._rebuild_wrapper_subclass": 6,
}
"""Which argument of a rebuild function says the device (a string or a torch.device)."""


def name_error(error: CkptError, key: str) -> CkptError:
    """The error, naming the key it happened at when it does not name one yet."""
    if error.key is None:
        error.key = key
    return error
