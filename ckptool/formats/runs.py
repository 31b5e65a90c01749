"""Which elements of a storage a strided tensor reads.

Knows: shapes, strides, offsets. Must not know: files, pickles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from ckptool.checkpoint import Tensor

_MOST_ORDERS = 8  # one model has one or two
_MOST_RUNS = 1 << 20  # above this, overlapping extents count as overlapping elements


class Extent(NamedTuple):
    """Bytes [start, end) of a storage from the first to the last element; empty: (0, 0)."""

    start: int
    end: int


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a row-major tensor, in elements, as torch makes them."""
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


def is_contiguous(tensor: Tensor) -> bool:
    """Whether the elements lie one after another in row-major order (sizes of 1 do not count)."""
    step = 1
    for size, stride in zip(
        reversed(tensor.shape or ()), reversed(tensor.stride or ()), strict=True
    ):
        if size != 1 and stride != step:
            return not tensor.count
        step *= size
    return True


def common_order(tensors: Sequence[Tensor], axis_count: int) -> tuple[int, ...] | None:
    """The axes in an order, slowest first, in which every tensor's elements lie one after another
    in memory; row-major where that holds, None where there is no such order. One of channels_last
    is (0, 2, 3, 1).
    """
    orders = dict.fromkeys((tuple(range(axis_count)), *map(_order_of, tensors)))
    for order in list(orders)[:_MOST_ORDERS]:
        if all(_is_dense(tensor, order) for tensor in tensors):
            return order
    return None


def _order_of(tensor: Tensor) -> tuple[int, ...]:
    stride = tensor.stride or ()
    return tuple(sorted(range(len(stride)), key=lambda axis: -stride[axis]))


def _is_dense(tensor: Tensor, order: Sequence[int]) -> bool:
    shape, stride = tensor.shape or (), tensor.stride or ()
    turned = replace(
        tensor,
        shape=tuple([shape[axis] for axis in order]),
        stride=tuple([stride[axis] for axis in order]),
    )
    return is_contiguous(turned)


def extent_of(tensor: Tensor) -> Extent:
    """Where the elements begin and end, in bytes of the storage."""
    if not tensor.count or tensor.dtype is None:
        return Extent(0, 0)
    rows = zip(tensor.shape or (), tensor.stride or (), strict=True)
    last = tensor.offset + sum((size - 1) * step for size, step in rows)
    size = tensor.dtype.size_bytes
    return Extent(tensor.offset * size, (last + 1) * size)


def elements_overlap(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors of one storage share an element.

    Exact up to a million runs; above, tensors whose extents overlap count as sharing.
    """
    a, b = extent_of(one), extent_of(two)
    if a.start >= b.end or b.start >= a.end:
        return False
    left, right = _runs(one), _runs(two)
    if left is None or right is None:
        return True
    at = 0
    for start, end in left:
        while at < len(right) and right[at][1] <= start:
            at += 1
        if at < len(right) and right[at][0] < end:
            return True
    return False


def runs_of(tensors: Mapping[int, Tensor], most: int) -> list[tuple[int, int, int]] | None:
    """(start, end, number) of each run of bytes that these tensors of one storage read; None
    when there are more than `most`.
    """
    found: list[tuple[int, int, int]] = []
    for number, tensor in tensors.items():
        runs = _runs(tensor, most - len(found))
        if runs is None:
            return None
        found += [(start, end, number) for start, end in runs]
    return found


def clusters(rows: Iterable[tuple[int, int, int]]) -> list[list[int]]:
    """The numbers of rows (start, end, number) that overlap, or overlap in turn, each list by
    where they start.
    """
    found: list[list[int]] = []
    reach = 0
    for start, end, number in sorted(rows):
        if start < reach:
            found[-1].append(number)
        else:
            found.append([number])
        reach = max(reach, end)
    return found


def _runs(tensor: Tensor, most: int = _MOST_RUNS) -> list[tuple[int, int]] | None:
    """The bytes read, as sorted runs that do not touch; None when there are too many."""
    assert tensor.dtype is not None
    rows = zip(tensor.shape or (), tensor.stride or (), strict=True)
    steps = sorted((step, size) for size, step in rows if size > 1 and step)
    length = 1
    outer: list[tuple[int, int]] = []
    for step, size in steps:
        if step <= length and not outer:
            length += (size - 1) * step
        else:
            outer.append((step, size))
    count = 1
    for _, size in outer:
        count *= size
    if count > most:
        return None
    size = tensor.dtype.size_bytes
    bases = product(*(range(0, n * step, step) for step, n in outer))
    starts = sorted({(tensor.offset + sum(base)) * size for base in bases})
    runs: list[tuple[int, int]] = []
    for start in starts:
        if runs and start <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], start + length * size))
        else:
            runs.append((start, start + length * size))
    return runs
