"""Whether two tensors hold the same numbers, block by block, in constant memory.

Knows: where the elements of a tensor lie and how two streams of them are laid side by side.
Must not know: formats, verbs. numpy is imported only where bytes differ or are out of order.
Equal bytes are equal numbers, NaN included; where bytes differ, -0 is 0 and NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple, Protocol

from ckptool.checkpoint import FLAGGED, UNTYPED, DType, Storage, Tensor
from ckptool.errors import LimitExceeded, Unsupported
from ckptool.pieces import encoding_of, is_plain, made_from
from ckptool.plans import Made
from ckptool.values.cast import cast
from ckptool.values.distance_numbers import Buffer, numbers, resolved, unequal
from ckptool.values.floats import FLOATS
from ckptool.values.gather import elements
from ckptool.values.storages import Coded, coded

_REPEATED, _TIMES = 1 << 28, 64  # elements, and elements a stored byte, that no honest view has
BLOCK = 128 << 10
"""Bytes compared at a time: a block of each side stays in a processor's second cache."""


class Files(Protocol):
    """Where the bytes of one side lie. Both raise as `places.Source` does."""

    def read(self, source_id: int, offset: int, size: int) -> bytes:
        """Exactly `size` bytes."""

    def read_into(self, source_id: int, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`."""


class Seen(NamedTuple):
    """A tensor that has numbers, and the files they lie in."""

    tensor: Tensor
    files: Files

    @property
    def dtype(self) -> DType:
        """Its element type."""
        assert self.tensor.dtype is not None
        return self.tensor.dtype

    @property
    def storage(self) -> Storage:
        """What holds its elements."""
        assert self.tensor.storage is not None
        return self.tensor.storage


class Sameness(NamedTuple):
    """`at` is the first element that differs, counted in row-major order; `nan` says on which
    side it is NaN (a, b, or nothing); `odd` whether some bytes differ that are the same number.
    """

    equal: bool
    at: int | None = None
    nan: str = ""
    odd: bool = False


class Run(NamedTuple):
    """Elements that lie one after another, plainly stored: the byte they start at."""

    source_id: int
    offset: int


class Block(NamedTuple):
    """Elements of both sides from element `at` on; `alike` says whether the bytes are equal.
    The buffers are filled again for the next block.
    """

    at: int
    left: Buffer
    right: Buffer
    alike: bool


def has_numbers(tensor: Tensor) -> bool:
    """Whether the file holds the elements in a way that can be read in order."""
    if tensor.dtype is None or tensor.shape is None or tensor.stride is None:
        return False
    return not tensor.count or (tensor.storage is not None and bool(tensor.storage.pieces))


def same(a: Seen, b: Seen) -> Sameness:
    """Compare two tensors of one shape and dtype. Raises what reading raises."""
    odd = False
    kinds = a.tensor.kind, b.tensor.kind
    flagged = kinds[0] != kinds[1] and not FLAGGED.isdisjoint(kinds)
    for block in blocks(a, b):
        if block.alike and not flagged:
            continue
        left = resolved(numbers(block.left, a.dtype.name), kinds[0])
        right = resolved(numbers(block.right, b.dtype.name), kinds[1])
        where = unequal(left, right)
        if where.any():
            at = int(where.argmax())
            return Sameness(False, place(a, b, block.at + at), _nan(left[at], right[at]), odd)
        odd = odd or not block.alike
    return Sameness(True, odd=odd)


def _nan(left: object, right: object) -> str:
    """Which of two numbers is NaN, as a word."""
    return "a" if left != left else "b" if right != right else ""


def rounds_to(wide: Seen, narrow: Seen) -> bool:
    """Whether `wide`, cast as torch's `.to()` casts, is `narrow` (NaN is NaN, 0 is -0).

    Both have one shape and types of `floats.FLOATS`. Raises what reading raises.
    """
    source, target = wide.dtype.name, narrow.dtype.name
    t = wide.tensor
    where = (wide.storage.size_bytes, t.shape, t.stride, t.offset, None)
    made = _made(wide, "cast", (_encoding(wide), source, target, *where))
    item = narrow.dtype.size_bytes
    for block in _zipped(cast(wide.files.read, made), item, ordered(narrow), item):
        left, right = numbers(block.left, target), numbers(block.right, target)
        if not block.alike and unequal(left, right).any():
            return False
    return True


def can_round(wide: Seen, narrow: Seen) -> bool:
    """Whether `rounds_to` applies: two float formats, whose bits mean the same otherwise."""
    kinds = {wide.tensor.kind, narrow.tensor.kind}
    if len(kinds) > 1 and not kinds.isdisjoint(("neg", "conj+neg")):
        return False
    return wide.dtype.name in FLOATS and narrow.dtype.name in FLOATS


# -- blocks ------------------------------------------------------------------------------------
def blocks(a: Seen, b: Seen, most: int = BLOCK) -> Iterator[Block]:
    """Both tensors side by side, in blocks of about `most` bytes.

    Where they lie alike (see `runs`), elements come in the order of the file, of others in
    row-major order.
    """
    lying = runs(a, b)
    if lying is not None:
        yield from _stored(a, b, lying, most)
        return
    sizes = a.dtype.size_bytes, b.dtype.size_bytes
    yield from _zipped(ordered(a), sizes[0], ordered(b), sizes[1])


def _stored(a: Seen, b: Seen, lying: tuple[Run, Run], most: int) -> Iterator[Block]:
    """Both sides read into two buffers that are used again and again."""
    (one, two), item, other = lying, a.dtype.size_bytes, b.dtype.size_bytes
    total = a.tensor.count
    step = max(1, min(most // max(item, other), total))
    left, right = bytearray(step * item), bytearray(step * other)
    for at in range(0, total, step):
        count = min(step, total - at)
        if count < step:  # comparing whole buffers is what the processor does fastest
            left, right = bytearray(count * item), bytearray(count * other)
        a.files.read_into(one.source_id, one.offset + at * item, memoryview(left))
        b.files.read_into(two.source_id, two.offset + at * other, memoryview(right))
        yield Block(at, left, right, item == other and left == right)


def _zipped(
    left: Iterator[bytes], item: int, right: Iterator[bytes], other: int
) -> Iterator[Block]:
    """Two streams of elements, cut where either ends a chunk."""
    one, two, at = b"", b"", 0
    while True:
        one, two = one or next(left, b""), two or next(right, b"")
        count = min(len(one) // item, len(two) // other)
        if not count:
            return
        here, there = one[: count * item], two[: count * other]
        yield Block(at, here, there, item == other and here == there)
        one, two, at = one[count * item :], two[count * other :], at + count


def ordered(seen: Seen) -> Iterator[bytes]:
    """The elements in row-major order, little-endian, in chunks of whole elements."""
    t = seen.tensor
    if not t.count:
        return iter(())
    item = seen.dtype.size_bytes
    return elements(seen.files.read, coded_of(seen), item, t.shape or (), t.stride or (), t.offset)


def coded_of(seen: Seen) -> Coded:
    """The storage as the readers of `storages` want it; its checksum is not asked for.

    Raises Unsupported for a big-endian storage that is used with another dtype.
    """
    unit, encoding = seen.storage.dtype, _encoding(seen)
    component = unit.size_bytes // unit.components
    return coded(_made(seen, "gather", ()), encoding, component, seen.storage.size_bytes, None)


def _made(seen: Seen, recipe: str, args: tuple[Any, ...]) -> Made:
    return made_from(seen.storage, recipe, args, label=seen.tensor.key)


def _encoding(seen: Seen) -> str:
    """As the piece says; torch swaps the bytes of a typed storage by its type, of an untyped
    one never.
    """
    encoding, unit = encoding_of(seen.storage, seen.tensor.key), seen.storage.dtype
    if "swapped" not in encoding or seen.dtype is unit:
        return encoding
    if unit is UNTYPED:
        return "stored" if encoding == "swapped" else encoding.removesuffix("-swapped")
    text = "a big-endian storage that is used with another dtype"
    raise Unsupported(text, key=seen.tensor.key, hint="leave it out with --drop")


# -- elements that are repeated ----------------------------------------------------------------
def once(a: Seen, b: Seen) -> tuple[Seen, Seen, int]:
    """Both without the axes along which both repeat themselves (steps of 0), and how often they
    do: an expanded tensor has as many elements as it likes.

    Raises LimitExceeded where what is left is still out of all proportion to its bytes.
    """
    shape, steps = (
        a.tensor.shape or (),
        zip(a.tensor.stride or (), b.tensor.stride or (), strict=True),
    )
    sizes = tuple(1 if pair == (0, 0) else size for size, pair in zip(shape, steps, strict=True))
    times = prod(shape) // max(1, prod(sizes))
    stored = a.storage.size_bytes + b.storage.size_bytes
    if prod(sizes) > max(_REPEATED, _TIMES * stored):
        text = f"{prod(sizes):,} elements in {stored:,} bytes"
        raise LimitExceeded("elements", text, key=a.tensor.key, hint="leave it out with --drop")
    if times == 1:
        return a, b, 1
    return _resized(a, sizes), _resized(b, sizes), times


def _resized(seen: Seen, shape: tuple[int, ...]) -> Seen:
    return Seen(replace(seen.tensor, shape=shape), seen.files)


def spread(at: int, sizes: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Element `at` of a tensor of `sizes`, as the first that it is in one of `shape`."""
    found, step = 0, 1
    for small, size in zip(reversed(sizes), reversed(shape), strict=True):
        at, index = divmod(at, small)
        found, step = found + index * step, step * size
    return found


# -- how two tensors lie -----------------------------------------------------------------------
def runs(a: Seen, b: Seen) -> tuple[Run, Run] | None:
    """Where both start, when both are plainly stored, without gaps and with one order of axes;
    None for others.
    """
    one, two = _run(a), _run(b)
    if one is None or two is None or axes(a.tensor) != axes(b.tensor):
        return None
    return one, two


def _run(seen: Seen) -> Run | None:
    t, storage = seen.tensor, seen.tensor.storage
    if storage is None or not is_plain(storage) or axes(t) is None:
        return None
    piece = storage.pieces[0]
    return Run(piece.source_id, piece.span.offset + t.offset * seen.dtype.size_bytes)


def axes(tensor: Tensor) -> tuple[int, ...] | None:
    """The axes of more than one element, outermost in the file first; None where the elements
    do not fill a run.
    """
    rows = zip(tensor.stride or (), tensor.shape or (), strict=True)
    found = sorted(((step, axis, size) for axis, (step, size) in enumerate(rows) if size != 1))
    reach = 1
    for step, _, size in found:
        if step != reach and tensor.count:
            return None
        reach *= size
    return tuple(axis for _, axis, _ in reversed(found))


def place(a: Seen, b: Seen, at: int) -> int:
    """Element `at` of what `blocks` gives, counted in row-major order."""
    order = axes(a.tensor)
    if order is None or runs(a, b) is None or list(order) == sorted(order):
        return at
    shape = a.tensor.shape or ()
    index = [0] * len(shape)
    for axis in reversed(order):
        at, index[axis] = divmod(at, shape[axis])
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return sum(i * step for i, step in zip(index, steps, strict=True))
