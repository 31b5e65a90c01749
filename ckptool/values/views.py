"""Which elements a strided view takes, and in which reads they are best fetched.

Knows: sizes and strides. Must not know: files, encodings, dtypes, numpy.
Offsets, strides and extents count elements; budgets count bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

Dims = tuple[tuple[int, int], ...]
"""(size, stride) of each axis, the outermost first."""

BLOCK = 4 << 20
"""Bytes of the view made at a time."""
WIDE_BLOCK = 32 << 20
"""The same where a block is scattered over much more of the storage than it has bytes, as in
a transposed matrix: what is read at one place is the longer, the more is made at a time."""
TILE = 512 << 10
"""Bytes fetched at a time: they stay in a processor's cache while they are put in order."""
GAP = 16 << 10
"""Unneeded bytes between two needed ones that cost less than a read of their own."""
_SCATTERED = 2  # times the bytes of a block that it may extend over before it is a wide one


def collapse(shape: Sequence[int], stride: Sequence[int]) -> Dims:
    """The same elements in the same order with the fewest axes; at least one size is not 0."""
    dims: list[tuple[int, int]] = []
    for size, step in zip(shape, stride, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * step:
            size *= dims.pop()[0]
        dims.append((size, step))
    return tuple(dims)


def count(dims: Dims) -> int:
    """Elements of the view."""
    return prod(size for size, _ in dims)


def extent(dims: Dims) -> int:
    """Elements of the storage from the first to the last that the view takes."""
    return 1 + sum((size - 1) * step for size, step in dims)


class Block(NamedTuple):
    """A part of the view that is contiguous in row-major order: its first element's offset."""

    dims: Dims
    offset: int


def blocks(dims: Dims, offset: int, item: int) -> Iterator[Block]:
    """The view cut into blocks of `item`-byte elements, in order; BLOCK or WIDE_BLOCK each."""
    block = next(_blocks(dims, offset, BLOCK // item))
    if extent(block.dims) > _SCATTERED * count(block.dims):
        return _blocks(dims, offset, WIDE_BLOCK // item)
    return _blocks(dims, offset, BLOCK // item)


def _blocks(dims: Dims, offset: int, limit: int) -> Iterator[Block]:
    axis = len(dims)
    inside = 1
    while axis and inside * dims[axis - 1][0] <= limit:
        axis -= 1
        inside *= dims[axis][0]
    if not axis:
        yield Block(dims, offset)
        return
    outer, (size, step), inner = dims[: axis - 1], dims[axis - 1], dims[axis:]
    lots = -(-size // (limit // inside))
    some = -(-size // lots)  # all lots about the same
    for place in product(*map(range, _sizes(outer))):
        base = offset + sum(at * outer[i][1] for i, at in enumerate(place))
        for low in range(0, size, some):
            lot = (min(some, size - low), step)
            yield Block((lot, *inner), base + low * step)


def _sizes(dims: Dims) -> Iterator[int]:
    return (size for size, _ in dims)


class Reading(NamedTuple):
    """How the elements of a block are fetched: one read for each index of the axes `outer`
    and each `lot` indices of the axis `pivot` (`joined`), or for each index of it. A read
    takes the `inner` axes of one index, `width` elements of the storage.
    """

    outer: tuple[int, ...]
    pivot: int
    lot: int
    joined: bool
    inner: tuple[int, ...]
    width: int


def reading(dims: Dims, item: int) -> Reading:
    """The reads of a block: as few as TILE and GAP allow. `dims` has at least one axis."""
    order = sorted(range(len(dims)), key=lambda axis: dims[axis][1] * (dims[axis][0] > 1))
    width = 1
    for rank, axis in enumerate(order):
        size, step = dims[axis]
        joined = size == 1 or (step - width) * item <= GAP
        unit = step if joined else width
        fits = (width + (size - 1) * unit) * item <= TILE
        if joined and fits and rank < len(order) - 1:
            width += (size - 1) * step
            continue
        lot = size if fits else (TILE // item - width) // unit + 1
        outer = tuple(sorted(order[rank + 1 :]))
        return Reading(outer, axis, max(1, lot), joined, tuple(order[:rank]), width)
    raise ValueError("a view without axes has nothing to read in order")


class Tile(NamedTuple):
    """One lot: where it lies in the block (an index or slice for each axis), the offset of its
    first element in the storage, and how many indices of the pivot it takes.
    """

    place: tuple[int | slice, ...]
    offset: int
    lot: int


def tiles(block: Block, read: Reading) -> Iterator[Tile]:
    """The lots of a block, each fetched and put in place by itself."""
    dims, offset = block
    place: list[int | slice] = [slice(None)] * len(dims)
    size, step = dims[read.pivot]
    for outer in product(*(range(dims[axis][0]) for axis in read.outer)):
        base = offset
        for axis, at in zip(read.outer, outer, strict=True):
            place[axis] = at
            base += at * dims[axis][1]
        for low in range(0, size, read.lot):
            lot = min(read.lot, size - low)
            place[read.pivot] = slice(low, low + lot)
            yield Tile(tuple(place), base + low * step, lot)
