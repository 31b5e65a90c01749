"""What torch means by pickle nodes: which are storages, which are tensors.

Knows: the persistent ids of torch/serialization.py (formats 4.2). Must not know: containers; a
`Resolver` says where a storage's bytes lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ckptool.checkpoint import DTYPES, UNTYPED, DType, Path, Piece, Storage, Tensor
from ckptool.errors import LimitExceeded, PickleInvalid, StorageSize, TensorBounds
from ckptool.formats.measures import (
    COUNTED,
    View,
    at_byte,
    check_bounds,
    global_name,
    id_text,
    storage_dtype,
    whole,
)
from ckptool.formats.rebuild import BUILDERS, STATEFUL
from ckptool.limits import DEFAULT, Limits
from ckptool.pickles.nodes import (
    NEWOBJ,
    REDUCE,
    UNTOLD,
    Box,
    Global,
    Obj,
    Pers,
    Tup,
    Walked,
    elements,
    items_of,
    text_of,
)

Located = tuple[tuple[Piece, ...], int | None]
Resolver = Callable[[str, DType, int], Located]
"""(storage key, dtype, count) -> (pieces, recorded checksum). Raises StorageSize."""


_BYTES = DTYPES["uint8"]  # what torch reads a storage without a type as
# NEWOBJ asks __new__ alone, which ignores what __init__ would fill them with
_MADE_EMPTY = frozenset(
    f"{module}.{name}"
    for module, names in (
        ("collections", ("OrderedDict", "Counter", "defaultdict", "deque")),
        ("builtins", ("dict", "list", "set", "bytearray")),
        ("__builtin__", ("dict", "list", "set", "bytearray")),
    )
    for name in names
)
_PLAIN = "torch._utils._rebuild_tensor_v2"
_CALLS_DEEP = 50  # a Parameter of a subclass of a tensor is three


_SAID = Tup(("storage",), (0,), 0)  # what is left of the id of a storage


def let_go_parts(node: Obj) -> None:
    """Forget the arguments of a plain tensor, of which its record says all: a storage, numbers,
    an empty OrderedDict. Most of the memory of a pickle of many tensors.
    """
    args = items_of(node.args) or ()
    if global_name(node.fn) != _PLAIN or node.op != REDUCE or len(args) != 6:
        return
    pers, _, size, stride, _, hooks = args
    plain = type(size) in (Tup, tuple) and type(stride) in (Tup, tuple) and type(pers) is Pers
    if not plain or type(hooks) is not Obj or global_name(hooks.fn) != "collections.OrderedDict":
        return
    if hooks.args == () and not (hooks.batches or hooks.state or hooks.kwargs):
        node.args = ()
        pid = items_of(pers.pid) or ()
        if type(pers.told) is Storage and len(pid) == 5 and pid[0] == "storage":
            pers.pid = _SAID


class TensorReader:
    """Turns nodes of one pickle into Storage and Tensor records; remembers both."""

    def __init__(self, resolve: Resolver, limits: Limits = DEFAULT) -> None:
        self.resolve = resolve
        self.limits = limits
        self.storages: dict[str, Storage] = {}
        self.two_dtypes: list[str] = []
        # None: torch_storage; its own method kept here would keep all of it until the next gc
        self.persistent: Callable[[Pers], View | Storage | Tensor | None] | None = None
        self.nested: Callable[[Obj], View | None] = lambda node: None
        self.keeps = True  # what tensors are made of, for who rewrites or loads the pickle
        self._sizes: dict[tuple[int, ...], tuple[int, ...]] = {}  # each once
        self._depth = 0
        self._label: tuple[str, Path] = ("", ())
        self._first: dict[str, Sequence[Any]] = {}  # the first id of a storage that has others
        self._spelled: dict[str, type] = {}  # storage keys as numbers or as text
        self._shifts: dict[str, tuple[str, DType, int, int]] = {}
        self._dtypes: dict[int, DType] = {}  # of storage classes, which live in the pickle
        self._bare: dict[int, Tensor | None] = {}  # ids of storages that stand for a tensor

    # -- storages ----------------------------------------------------------------------------
    def view(self, node: Any) -> View | Tensor | None:
        """The storage (or, in tar files, tensor) a node names; None when it names none."""
        if type(node) is not Pers:
            return self.nested(node) if type(node) is Obj else None
        told = self.told(node)
        return View(told) if isinstance(told, Storage) else told

    def told(self, node: Pers) -> Storage | View | Tensor | None:
        """The same, but of a View that begins with its storage, as nearly all do, that alone."""
        found: Storage | View | Tensor | None = node.told
        if found is UNTOLD:
            found = (self.persistent or self.torch_storage)(node)
            if type(found) is View and not found.offset:
                found = found.storage
            node.told = found
        return found

    def torch_storage(self, node: Pers) -> View | Storage:
        """('storage', StorageType, key, location, count[, view]). Raises PickleInvalid."""
        items = items_of(node.pid)
        if items is None or len(items) not in (5, 6) or text_of(items[0]) != "storage":
            raise PickleInvalid("a persistent id that is not a storage", offset=node.end)
        key, device = id_text(items[2]), text_of(items[3])
        if key is None or device is None:
            raise PickleInvalid("a storage without a text key or location", offset=node.end)
        dtype = self._dtypes.get(id(items[1])) or self._dtype_of(items[1], node)
        count = items[4]
        if type(count) is not int or not 0 <= count < COUNTED:
            if type(count) is int and count >= COUNTED:
                text = "a storage of more elements than 64 bits can count"
                raise StorageSize(text, offset=node.end)
            whole(count, "the element count of a storage", node)
        if self._spelled.setdefault(key, type(items[2])) is not type(items[2]):
            text = f"storage '{key}' is named by a number and by a text"  # torch reads it twice
            raise StorageSize(text, offset=node.end)
        storage = self.add_storage(key, dtype, count, device, node)
        if len(items) == 5:
            return storage
        return View(storage, self._shift(items, dtype, storage, node))

    def add_storage(self, key: str, dtype: DType, count: int, device: str, node: Any) -> Storage:
        """The one record of this key: a second id may only repeat it. The location and dtype that
        the pickle gives first count for all, as in torch (`loaded_storages` there).

        Raises StorageSize when sizes disagree.
        """
        known = self.storages.get(key)
        if known is None:
            if key in self._shifts:
                text = f"'{key}' is a storage and a view of another"
                raise StorageSize(text, offset=at_byte(node))
            first, items = dtype, self._first.get(key)
            if items is not None:
                device = text_of(items[3]) or ""
                first = dtype if items[1] is None else self._dtype_of(items[1], node)
            size, own_count = count * dtype.size_bytes, count
            if first is not dtype:
                if size % first.size_bytes:
                    raise self._two_sizes(key, node)
                own_count = size // first.size_bytes
            pieces, crc = self.resolve(key, first, own_count)
            known = self.storages[key] = Storage(key, first, own_count, device, pieces, crc)
        elif count * dtype.size_bytes != known.size_bytes:
            raise self._two_sizes(key, node)
        if known.dtype is not dtype:
            if not known.count:  # torch forgets an empty one of a zip, not of a legacy stream
                raise StorageSize(f"empty storage '{key}' has two dtypes", offset=at_byte(node))
            self.two_dtypes.append(key)
        return known

    def _dtype_of(self, kind: Any, node: Any) -> DType:
        found = self._dtypes.get(id(kind))
        if found is None:
            found = self._dtypes[id(kind)] = storage_dtype(kind, node)
        return found

    def _two_sizes(self, key: str, node: Any) -> StorageSize:
        return StorageSize(f"storage '{key}' is declared with two sizes", offset=at_byte(node))

    def _shift(self, items: Sequence[Any], dtype: DType, storage: Storage, node: Pers) -> int:
        """Elements by which a storage view of torch 0.3 and earlier starts later. Views and
        storages share one table of keys there, in which the first of a key counts for all.
        """
        if items[5] is None:
            return 0
        view = items_of(items[5])
        key = text_of(view[0]) if view and len(view) == 3 else None
        if view is None or key is None:
            raise PickleInvalid("a storage view that has not three parts", offset=node.end)
        offset = whole(view[1], "a storage view's offset", node)
        size = whole(view[2], "a storage view's size", node)
        if offset + size > storage.count:
            raise TensorBounds("a storage view reaches past its storage", offset=node.end)
        said = (storage.key, dtype, offset, size)
        if (
            key in self.storages
            or self._shifts.setdefault(key, said) != said
            or dtype is not storage.dtype
        ):
            raise PickleInvalid(f"storage view '{key}' is declared in two ways", offset=node.end)
        return offset

    def note_tags(self, walked: Walked) -> None:
        """Remember the first location and class of storages that have several: those count in
        torch, whatever the order in which tensors are met here.
        """
        first: dict[str, Sequence[Any]] = {}
        for pers in walked.persistent:
            items = items_of(pers.pid)
            if items is not None and len(items) in (5, 6):
                name, device = items[2], items[3]
                key = name if type(name) is str else id_text(name)
                if key is None or (type(device) is not str and text_of(device) is None):
                    continue
                known = first.setdefault(key, items)
                if known is not items and known != items:
                    self._first[key] = known

    # -- tensors -----------------------------------------------------------------------------
    def finish(self, walked: Walked) -> None:
        """Check what no path led to: popped, or inside what we do not understand; and that
        nothing changes a storage, or makes a dict of arguments that its class then ignores.
        """
        for offset, owner in walked.builds_on_others:
            if type(owner) is Pers:
                raise PickleInvalid("a state is given to a storage", offset=offset)
        for pers in walked.persistent:
            self.told(pers)
        for call in walked.calls:
            if call.told is UNTOLD:
                self.tensor(call)
            if call.op != REDUCE and call.args != () and global_name(call.fn) in _MADE_EMPTY:
                raise PickleInvalid("a container made anew, with arguments", offset=call.end)

    def tensor(self, node: Any, key: str = "", path: Path = ()) -> Tensor | None:
        """The tensor a node builds; None when it is something else. One that is met for the
        first time may get its name at once.

        Raises TensorBounds, StorageSize or PickleInvalid when it lies.
        """
        if type(node) is Pers:
            if id(node) not in self._bare:
                self._bare[id(node)] = self.build(node)
            return self._bare[id(node)]
        if type(node) is not Obj:
            return None
        if node.told is UNTOLD:
            if type(node.fn) is Global and node.fn.full not in BUILDERS and not self._depth:
                node.told = None
                return None
            self._label = (key, path)
            node.told = self.build(node)
            self._label = ("", ())
            if not self.keeps and node.told is not None:
                let_go_parts(node)
        found: Tensor | None = node.told
        return found

    def build(self, node: Any) -> Tensor | None:
        """The tensor of a node, built anew. Raises LimitExceeded for calls in calls in calls."""
        self._depth += 1
        try:
            if self._depth > _CALLS_DEEP:
                raise LimitExceeded(
                    "nesting",
                    f"rebuild calls inside each other, more than {_CALLS_DEEP} deep",
                    offset=at_byte(node),
                )
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
        if node.state is not None and builder not in STATEFUL:
            raise PickleInvalid("a state is given to a tensor", offset=node.state.end)
        return builder(self, node, args)

    def _bare_storage(self, found: View | Tensor | None) -> Tensor | None:
        if type(found) is not View:
            return None
        storage = found.storage
        count = storage.count - found.offset
        return Tensor(
            "",
            storage.dtype,
            (count,),
            (1,),
            found.offset,
            storage,
            None,
            "storage",
            (),
            storage.device,
        )

    def dense(
        self,
        node: Obj,
        args: Sequence[Any],
        dtype: DType | None = None,
        kind: str = "tensor",
        requires_grad: bool = False,
    ) -> Tensor:
        """A strided tensor from (storage, offset, size, stride, …), its bounds checked."""
        offset = args[1]
        storage = self.told(args[0]) if type(args[0]) is Pers else None
        if type(storage) is not Storage:
            view = self.view(args[0])
            if type(view) is not View:
                raise PickleInvalid("a tensor without a storage", offset=node.end)
            storage = view.storage
            offset = whole(offset, "the offset of a tensor", node) + view.offset
        elif type(offset) is not int or not 0 <= offset < COUNTED:
            whole(offset, "the offset of a tensor", node)
        dtype = dtype or (_BYTES if storage.dtype is UNTYPED else storage.dtype)
        shape = self.sizes(args[2], "size", node)
        stride = self.sizes(args[3], "stride", node)
        if len(shape) != len(stride):
            raise TensorBounds(f"{len(shape)} sizes and {len(stride)} strides", offset=node.end)
        check_bounds(shape, stride, offset, storage.size_bytes // dtype.size_bytes, node)
        if not self.keeps:
            shape, stride = (
                self._sizes.setdefault(shape, shape),
                self._sizes.setdefault(stride, stride),
            )
        key, path = self._label
        return Tensor(
            key, dtype, shape, stride, offset, storage, requires_grad, kind, path, storage.device
        )

    def sizes(self, node: Any, what: str, owner: Any) -> tuple[int, ...]:
        """A tuple of whole numbers, also as torch.Size((…)). Raises TensorBounds."""
        if type(node) is Tup and len(node.items) <= self.limits.rank:
            for item in node.items:
                if type(item) is not int or not 0 <= item < COUNTED:
                    whole(item, f"the {what} of a tensor", owner)
            return node.items
        if type(node) is Obj and global_name(node.fn) == "torch.Size":
            inner = items_of(node.args)
            node = inner[0] if inner and len(inner) == 1 else None
        if type(node) is Box and node.kind == 0x5D:
            if any(batch.end > owner.end for batch in node.batches):
                raise TensorBounds(f"the {what} of a tensor grows later", offset=at_byte(owner))
            items: Sequence[Any] | None = [value for value, _, _ in elements(node)]
        else:
            items = items_of(node)
        if items is None:
            raise TensorBounds(f"the {what} of a tensor is not a tuple", offset=at_byte(owner))
        if len(items) > self.limits.rank:
            raise LimitExceeded(
                "rank", f"a tensor of {len(items):,} dimensions", offset=at_byte(owner)
            )
        return tuple([whole(item, f"the {what} of a tensor", owner) for item in items])
