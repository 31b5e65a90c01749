"""Bytes of a storage that lies in several pieces, by their place in the storage.

Knows: pieces that follow one another, pieces that fill slices of a tensor. Must not know:
formats, what the bytes mean. numpy only where slices are put together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from ckptool.checkpoint import Region
from ckptool.errors import StorageSize
from ckptool.plans import Made, Reader

_KINDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


class Laid(NamedTuple):
    """The pieces of a storage: (source_id, offset, size) each, and where they start in it
    (chains), or which slice of a tensor of `shape` and `item_bytes` each fills (`regions`).
    """

    pieces: tuple[tuple[int, int, int], ...]
    starts: tuple[int, ...]
    regions: tuple[Region, ...] = ()
    shape: tuple[int, ...] = ()
    item_bytes: int = 1
    crcs: tuple[int, ...] = ()

    def fetch(self, reader: Reader, offset: int, size: int) -> bytes:
        """Exactly `size` bytes of the storage from byte `offset`. Raises what `reader` raises."""
        if self.regions:
            return _boxed(self, reader, offset, size)
        return _chained(self, reader, offset, size)


def laid_out(made: Made, size: int) -> Laid:
    """The pieces of a Made part that together are a storage of `size` bytes.

    Raises StorageSize where they have more or fewer bytes, or a piece not those of its slice.
    """
    pieces = tuple([(number, span.offset, span.size) for number, span in made.pieces])
    sizes = [piece[2] for piece in pieces]
    if sum(sizes) != size:
        raise _wrong(made, f"its pieces have {sum(sizes):,} bytes, {size:,} are needed")
    starts = tuple(accumulate(sizes[:-1], initial=0))
    regions = tuple([region for region in made.regions if region is not None])
    if not regions:
        return Laid(pieces, starts, crcs=made.crcs)
    if len(regions) != len(pieces):
        raise _wrong(made, "only some of its pieces say which slice they fill")
    shape = tuple([max(stop for _, stop in rows) for rows in zip(*regions, strict=True)])
    item, rest = divmod(size, max(prod(shape), 1))
    counts = [prod(stop - start for start, stop in region) for region in regions]
    if rest or any(n * item != have for n, have in zip(counts, sizes, strict=True)):
        raise _wrong(made, "its pieces do not have the bytes of the slices they fill")
    return Laid(pieces, starts, regions, shape, item, made.crcs)


def _wrong(made: Made, text: str) -> StorageSize:
    return StorageSize(text, key=made.label or None, hint="report this with the file")


def _chained(laid: Laid, reader: Reader, offset: int, size: int) -> bytes:
    number = bisect_right(laid.starts, offset) - 1
    found = []
    while size:
        source_id, start, length = laid.pieces[number]
        inside = offset - laid.starts[number]
        lot = min(size, length - inside)
        if lot:
            found.append(reader(source_id, start + inside, lot))
        offset, size, number = offset + lot, size - lot, number + 1
    return found[0] if len(found) == 1 else b"".join(found)


# -- slices of a tensor ------------------------------------------------------------------------
def _boxed(laid: Laid, reader: Reader, offset: int, size: int) -> bytes:
    """Whole elements are put together, and what was asked for cut out of them."""
    import numpy as np

    item = laid.item_bytes
    low, high = offset // item, -(-(offset + size) // item)
    flat = np.empty(high - low, _KINDS.get(item, f"V{item}"))
    at = 0
    for box in boxes(low, high, laid.shape):
        sizes = [stop - start for start, stop in box]
        count = prod(sizes)
        _put_together(flat[at : at + count].reshape(sizes), box, laid, reader)
        at += count
    skip = offset - low * item
    return (
        flat.tobytes()[skip : skip + size] if skip or size != len(flat) * item else flat.tobytes()
    )


def _put_together(out: Any, box: Region, laid: Laid, reader: Reader) -> None:
    """Fill one box. What a piece has of it is a run of the piece: all axes of a box but one are
    single indices or whole.
    """
    import numpy as np

    for (source_id, start, _), region in zip(laid.pieces, laid.regions, strict=True):
        common = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(box, region, strict=True)]
        if any(first >= stop for first, stop in common):
            continue
        at, sizes = 0, []
        for (first, stop), (low, high) in zip(common, region, strict=True):
            at = at * (high - low) + first - low
            sizes.append(stop - first)
        data = reader(source_id, start + at * laid.item_bytes, prod(sizes) * laid.item_bytes)
        place = tuple(
            slice(first - low, stop - low)
            for (first, stop), (low, _) in zip(common, box, strict=True)
        )
        out[place] = np.frombuffer(data, out.dtype).reshape(sizes)


def boxes(low: int, high: int, shape: Sequence[int]) -> Iterator[Region]:
    """Elements `low` to `high` (row-major numbers) of a tensor as slices of it, in order: in each
    all axes but one are single indices (before it) or whole (after it).
    """
    if low >= high:
        return
    if not shape:
        yield ()
        return
    inner = prod(shape[1:])
    first, last = -(-low // inner), high // inner
    if first > last:  # within one row
        row = low // inner
        for box in boxes(low - row * inner, high - row * inner, shape[1:]):
            yield ((row, row + 1), *box)
        return
    for box in boxes(low - (first - 1) * inner, inner, shape[1:]) if low < first * inner else ():
        yield ((first - 1, first), *box)
    if first < last:
        yield ((first, last), *((0, size) for size in shape[1:]))
    for box in boxes(0, high - last * inner, shape[1:]):
        yield ((last, last + 1), *box)
