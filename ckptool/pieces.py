"""Storages that lie in several places: what a Plan is told of their pieces.

Knows: pieces, regions, their sizes. Must not know: files, formats, how bytes are read.
Pieces without a region follow one another; pieces with one each fill that slice of the tensor
which is the storage, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ckptool.checkpoint import Piece, Region, Storage
from ckptool.errors import LimitExceeded, Unsupported
from ckptool.plans import Made
from ckptool.spans import Span

_COMPARED = 5_000_000  # pairs of slices: a grid of 256 by 128 ranks has fewer


def is_plain(storage: Storage) -> bool:
    """Whether its bytes lie in one place as they are."""
    return [(p.encoding, p.region) for p in storage.pieces] == [("stored", None)]


def is_pieced(storage: Storage) -> bool:
    """Whether it has to be put together from several places."""
    return len(storage.pieces) > 1 or any(piece.region for piece in storage.pieces)


def is_chain(storage: Storage) -> bool:
    """Whether its bytes are those of its pieces one after another, as they are."""
    return all(p.encoding == "stored" and p.region is None for p in storage.pieces)


def encoding_of(storage: Storage, label: str = "") -> str:
    """The one encoding of all pieces. Raises Unsupported where they differ."""
    first = storage.pieces[0].encoding
    if any(piece.encoding != first for piece in storage.pieces):
        raise Unsupported("a storage whose pieces are encoded in several ways", key=label or None)
    return first


def made_from(
    storage: Storage, recipe: str, args: tuple[Any, ...], size: int = 0,
    crc: int | None = None, label: str = "", check: bool = False,
) -> Made:  # fmt: skip
    """What computes `size` bytes from all pieces of a storage; `check` has recorded checksums of
    single pieces compared.
    """
    pieces = storage.pieces
    spans = tuple([(piece.source_id, piece.span) for piece in pieces])
    if len(pieces) == 1 and pieces[0].region is None:
        return Made(spans, recipe, args, size, crc, label)
    regions = tuple([piece.region for piece in pieces]) if pieces[0].region else ()
    crcs = tuple([piece.crc or 0 for piece in pieces]) if check else ()
    return Made(spans, recipe, args, size, crc, label, regions, crcs)


def cut(storage: Storage, start: int, size: int) -> list[Piece]:
    """Bytes `start` to `start + size` of a chain, as pieces; a checksum stays with a whole one."""
    found, at, end = [], 0, start + size
    for piece in storage.pieces:
        low, high = max(start, at) - at, min(end, at + piece.span.size) - at
        if low < high:
            whole = high - low == piece.span.size
            span = Span(piece.span.offset + low, high - low)
            found.append(piece._replace(span=span, crc=piece.crc if whole else None))
        at += piece.span.size
    return found


def ordered(pieces: Sequence[Piece], shape: Sequence[int]) -> tuple[Piece, ...]:
    """Pieces of regions that tile a tensor, as plain ones where they are runs of it, one after
    another; others in row-major order of their first elements.
    """
    rows = sorted(pieces, key=lambda piece: piece.region or ())
    if all(is_run(piece.region or (), shape) for piece in rows):
        return tuple([piece._replace(region=None) for piece in rows])
    return tuple(rows)


def is_run(region: Region, shape: Sequence[int]) -> bool:
    """Whether the elements of a region follow one another in the tensor."""
    axis = 0
    while axis < len(shape) and region[axis][1] - region[axis][0] == 1:
        axis += 1
    rest = zip(region[axis + 1 :], shape[axis + 1 :], strict=True)
    return all(low == 0 and high == size for (low, high), size in rest)


def overlap(regions: Sequence[Region]) -> tuple[int, int] | None:
    """Numbers of two regions that have an element in common; None where all are apart.

    Neighbours along the axis of the most cuts are compared while they reach into each other.
    Raises LimitExceeded where that would be too many.
    """
    axes = range(len(regions[0]) if regions else 0)
    axis = max(axes, key=lambda at: len({region[at] for region in regions}), default=None)
    if axis is None:
        return (0, 1) if len(regions) > 1 else None
    order = sorted(range(len(regions)), key=lambda number: regions[number][axis])
    near: list[int] = []
    compared = 0
    for number in order:
        here = regions[number]
        near = [other for other in near if regions[other][axis][1] > here[axis][0]]
        compared += len(near)
        if compared > _COMPARED:
            raise LimitExceeded("slices", f"{len(regions):,} slices that are no grid")
        for other in near:
            if all(a[0] < b[1] and b[0] < a[1] for a, b in zip(here, regions[other], strict=True)):
                return other, number
        near.append(number)
    return None


def count(region: Region) -> int:
    """Elements of a region."""
    return prod(high - low for low, high in region)
