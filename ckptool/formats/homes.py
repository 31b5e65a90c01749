"""Where the numbers of a checkpoint live after a conversion: old storages to new ones.

Knows: which elements a tensor reads, what a cast or `--compact` does to a storage.
Must not know: pickles, containers, how bytes are read.
Rule 1: a storage that nothing asks to change stays whole. Rule 2: tensors whose elements
overlap stay in one storage. Rule 3: where that cannot be, the tensor is refused by name.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from math import prod
from typing import NamedTuple

from ckptool.checkpoint import UNTYPED, DType, Storage, Tensor
from ckptool.errors import Unsupported
from ckptool.formats.runs import Extent, contiguous, elements_overlap, extent_of


class User(NamedTuple):
    """Someone who reads a storage: a tensor, the dtype it shall have, what errors call it."""

    id: Hashable
    tensor: Tensor
    target: DType | None = None
    label: str = ""

    @property
    def storage(self) -> Storage:
        """The storage it reads."""
        assert self.tensor.storage is not None
        return self.tensor.storage

    @property
    def dtype(self) -> DType:
        """The element type it reads."""
        assert self.tensor.dtype is not None
        return self.tensor.dtype

    @property
    def cast(self) -> bool:
        """Whether its dtype changes."""
        return self.target is not None and self.target is not self.dtype


class Read(NamedTuple):
    """Elements of `dtype` to take from a storage: shape and strides count such elements."""

    dtype: DType
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Home(NamedTuple):
    """One storage of the output: `length` elements of `dtype` (UNTYPED: bytes) out of `source`.

    `read` says which elements, None: the whole storage as it is; `element` is the type of
    what is written (`dtype` but for untyped storages).
    """

    source: Storage
    dtype: DType
    length: int
    device: str
    read: Read | None
    element: DType
    label: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the storage."""
        return self.length * self.dtype.size_bytes


class Place(NamedTuple):
    """Where a tensor is in the output: number of its home, offset and strides in elements."""

    home: int
    offset: int
    stride: tuple[int, ...]
    dtype: DType


class Housing(NamedTuple):
    """All homes in the order of first use; `bare` maps a whole old storage to its home."""

    homes: tuple[Home, ...]
    places: dict[Hashable, Place]
    bare: dict[str, int]


class _Group(NamedTuple):
    """Users that share one new home."""

    home: Home
    places: dict[Hashable, tuple[int, tuple[int, ...], DType]]


def house(refs: Sequence[User | Storage], devices: dict[str, str], compact: bool) -> Housing:
    """New homes for all storages that `refs` read, in that order; a Storage among them is one
    that something uses as a whole.

    Raises Unsupported, naming the tensor, where a cast would tear overlapping elements apart.
    """
    users: dict[str, dict[Hashable, User]] = {}
    whole: dict[str, Storage] = {}
    for ref in refs:
        if isinstance(ref, User):
            users.setdefault(ref.storage.key, {}).setdefault(ref.id, ref)
        else:
            whole.setdefault(ref.key, ref)
    groups: dict[Hashable, _Group] = {}
    for key, found in users.items():
        tag = devices.get(key, next(iter(found.values())).storage.device)
        for group in _groups(list(found.values()), whole.get(key), tag, compact):
            groups.update(dict.fromkeys(group.places, group))
    return _numbered(refs, groups, devices)


def _numbered(
    refs: Iterable[User | Storage], groups: dict[Hashable, _Group], devices: dict[str, str]
) -> Housing:
    homes: list[Home] = []
    numbers: dict[int, int] = {}  # id of a group's home
    places: dict[Hashable, Place] = {}
    bare: dict[str, int] = {}
    by_storage: dict[str, int] = {}
    for ref in refs:
        if isinstance(ref, Storage):
            if ref.key not in by_storage:
                home = _whole(ref, devices.get(ref.key, ref.device), "")
                by_storage[ref.key] = len(homes)
                homes.append(home)
            bare[ref.key] = by_storage[ref.key]
        elif ref.id not in places:
            group = groups[ref.id]
            is_whole = group.home.read is None
            number = by_storage.get(ref.storage.key) if is_whole else numbers.get(id(group.home))
            if number is None:
                number = numbers[id(group.home)] = len(homes)
                homes.append(group.home)
                if is_whole:
                    by_storage[ref.storage.key] = number
            places[ref.id] = Place(number, *group.places[ref.id])
    return Housing(tuple(homes), places, bare)


def _whole(storage: Storage, device: str, label: str, element: DType | None = None) -> Home:
    dtype, length = _counted(storage, storage.size_bytes)
    return Home(storage, dtype, length, device, None, element or storage.dtype, label)


def _counted(storage: Storage, size_bytes: int) -> tuple[DType, int]:
    """(dtype, length) of a home of the same kind: untyped where torch has no typed storage, as
    for the uint16 of a .safetensors file.
    """
    dtype = storage.dtype if storage.dtype.torch_storage else UNTYPED
    return dtype, size_bytes // dtype.size_bytes


def _groups(users: list[User], whole: Storage | None, device: str, compact: bool) -> list[_Group]:
    """The new homes of one storage."""
    leaving = [user for user in users if user.cast]
    staying = [user for user in users if not user.cast]
    together = leaving and not staying and whole is None
    if together and not (compact and _wasteful(users)) and (group := _cast_whole(users, device)):
        return [group]
    if leaving:
        _refuse_torn(users, whole)
    groups = [
        _cluster_home(cluster, device)
        for kind in dict.fromkeys(map(_kind, leaving))
        for cluster in _clusters([user for user in leaving if _kind(user) == kind])
    ]
    if not staying:
        return groups
    if compact and whole is None and (leaving or _wasteful(staying)):
        return groups + [_cluster_home(cluster, device) for cluster in _clusters(staying)]
    home = _whole(staying[0].storage, device, staying[0].label, staying[0].dtype)
    rows = {u.id: (u.tensor.offset, u.tensor.stride or (), u.dtype) for u in staying}
    return [*groups, _Group(home, rows)]


def _cast_whole(users: list[User], device: str) -> _Group | None:
    """All of a storage cast at once: offsets and strides stay. None where types are mixed."""
    first = users[0]
    source, target = first.dtype, first.target
    size = first.storage.size_bytes
    if target is None or size % source.size_bytes:
        return None
    if any(user.dtype is not source or user.target is not target for user in users):
        return None
    count = size // source.size_bytes
    home = _made(first.storage, Read(source, (count,), (1,), 0), target, device, first.label)
    return _Group(home, {u.id: (u.tensor.offset, u.tensor.stride or (), target) for u in users})


def _made(source: Storage, read: Read, target: DType, device: str, label: str) -> Home:
    count = 1
    for size in read.shape:
        count *= size
    if target.torch_storage is None:
        return Home(source, UNTYPED, count * target.size_bytes, device, read, target, label)
    return Home(source, target, count, device, read, target, label)


# -- clusters ----------------------------------------------------------------------------------
def _clusters(users: list[User]) -> list[list[User]]:
    """Users whose extents overlap, together; those of no elements each alone."""
    rows = sorted(((extent_of(u.tensor), u) for u in users), key=lambda row: row[0])
    found: list[list[User]] = []
    end = -1
    for extent, user in rows:
        if not user.tensor.count or extent.start >= end or not found:
            found.append([user])
        else:
            found[-1].append(user)
        end = max(end, extent.end)
    return found


def _cluster_home(users: list[User], device: str) -> _Group:
    """One new storage for what these users read of the old one."""
    first = users[0]
    target = first.target or first.dtype
    span, storage = _span(users), first.storage
    if len(users) == 1 and (shape := _picked(first, span)) is not None:
        t = first.tensor
        read = Read(first.dtype, shape, t.stride or (), t.offset)
        steps = zip(contiguous(shape), t.stride or (), strict=True)
        home = _rehomed(storage, read, first, device)
        return _Group(home, {first.id: (0, tuple(new if old else 0 for new, old in steps), target)})
    read = _run(first, span.start, span.end)
    home = _rehomed(storage, read, first, device)
    if not first.cast and home.size_bytes == storage.size_bytes:
        home = _whole(storage, device, first.label, first.dtype)
    return _Group(home, {u.id: _shifted(u, span.start) for u in users})


def _span(users: list[User]) -> Extent:
    """From the first to the last byte; it starts where an element of each of them could."""
    extents = [extent_of(user.tensor) for user in users]
    start = min(extent.start for extent in extents)
    start -= start % max(user.dtype.size_bytes for user in users)
    return Extent(start, max(extent.end for extent in extents))


def _picked(user: User, span: Extent) -> tuple[int, ...] | None:
    """What to read of a view with gaps, its elements alone (expanded ones once); None where
    that saves nothing, or where the view meets itself.
    """
    rows = list(zip(user.tensor.shape or (), user.tensor.stride or (), strict=True))
    shape = tuple(size if step else min(size, 1) for size, step in rows)
    reach = 1
    for step, size in sorted((step, size) for size, step in rows if size > 1 and step):
        if step < reach:
            return None
        reach += (size - 1) * step
    return shape if prod(shape) * user.dtype.size_bytes < span.end - span.start else None


def _run(user: User, start: int, end: int) -> Read:
    """Bytes [start, end) of the storage, as elements of the user's dtype where it casts."""
    dtype = user.dtype if user.cast else user.storage.dtype
    size = dtype.size_bytes
    return Read(dtype, (-(-(end - start) // size),), (1,), start // size)


def _shifted(user: User, start: int) -> tuple[int, tuple[int, ...], DType]:
    offset = user.tensor.offset - start // user.dtype.size_bytes if user.tensor.count else 0
    return offset, user.tensor.stride or (), user.target or user.dtype


def _rehomed(storage: Storage, read: Read, user: User, device: str) -> Home:
    """A part of a storage; uncast, an untyped one stays untyped."""
    if user.cast and user.target is not None:
        return _made(storage, read, user.target, device, user.label)
    count = 1
    for size in read.shape:
        count *= size
    dtype, length = _counted(storage, count * read.dtype.size_bytes)
    return Home(storage, dtype, length, device, read, read.dtype, user.label)


def _wasteful(users: list[User]) -> bool:
    """Whether these users need fewer bytes than their storage has."""
    needed = 0
    for cluster in _clusters(users):
        span = _span(cluster)
        picked = _picked(cluster[0], span) if len(cluster) == 1 else None
        if picked is None:
            needed += span.end - span.start
        else:
            needed += prod(picked) * cluster[0].dtype.size_bytes
    return needed < users[0].storage.size_bytes


# -- refusals ----------------------------------------------------------------------------------
def _kind(user: User) -> tuple[DType, DType | None]:
    return user.dtype, user.target if user.cast else None


def _refuse_torn(users: list[User], whole: Storage | None) -> None:
    """A cast takes along all who share its elements, as one type, or it is none."""
    rows = sorted(((extent_of(u.tensor), u) for u in users if u.tensor.count), key=_start)
    near: list[tuple[Extent, User]] = []
    for row in rows:
        extent, user = row
        if whole is not None and user.cast:
            raise Unsupported(
                "its storage is used as a whole by something that is not cast", key=user.label,
                hint="leave it as it is with --keep-dtype",
            )  # fmt: skip
        near = [other for other in near if other[0].end > extent.start]
        for _, other in near:
            if _kind(user) != _kind(other) and elements_overlap(user.tensor, other.tensor):
                _refuse_pair(user, other)
        near.append(row)


def _start(row: tuple[Extent, User]) -> Extent:
    return row[0]


def _refuse_pair(one: User, two: User) -> None:
    """Two that share elements and would part; two that stay as they are do not."""
    if not (one.cast or two.cast):
        return
    first, second = (one, two) if one.cast else (two, one)
    what, both = ("has another dtype", "") if second.cast else ("is not cast", "cast both, or ")
    raise Unsupported(
        f"it shares elements with '{second.label}', which {what}", key=first.label,
        hint=f"{both}leave both as they are with --keep-dtype",
    )  # fmt: skip
