"""Parameters out of the flat tensors of ZeRO's ranks: which elements of which of them, in order.

Knows: how stages 1, 2 and 3 lay parameters out (deepspeed/utils/zero_to_fp32.py is the reference).
Must not know: files, pickles. Arithmetic alone; a sum that does not come out is refused.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from ckptool.checkpoint import DTYPES, DType, Piece, Tensor
from ckptool.errors import HeaderInvalid, Unsupported
from ckptool.formats.runs import is_contiguous
from ckptool.spans import Span

Shape = tuple[int, ...]
_AGAIN = "copy the folder again: its files are not of one checkpoint, or one is damaged"


class Joined(NamedTuple):
    """One parameter: its elements are those of `pieces`, one after another."""

    shape: Shape
    dtype: DType
    pieces: tuple[Piece, ...]


class Chain:
    """Flat tensors one after another, as one run of elements. Raises Unsupported, HeaderInvalid."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) != 1 or None in dtypes:
            raise HeaderInvalid("flat tensors of several dtypes, or of none", hint=_AGAIN)
        self.dtype: DType = next(iter(dtypes))  # type: ignore[assignment]
        self.tensors = tensors
        self.bases = [_base(tensor) for tensor in tensors]
        self.starts = [0, *accumulate(tensor.count for tensor in tensors)]

    @property
    def count(self) -> int:
        """Elements in all."""
        return self.starts[-1]

    def cut(self, start: int, count: int) -> Iterator[Piece]:
        """The pieces that hold `count` elements from `start`; they must be there."""
        at = bisect_right(self.starts, start) - 1
        size, end = self.dtype.size_bytes, start + count
        while start < end:
            stop = min(end, self.starts[at + 1])
            if stop > start:
                base = self.bases[at]
                begin = base.span.offset + (start - self.starts[at]) * size
                yield Piece(base.source_id, Span(begin, (stop - start) * size), base.encoding)
            start, at = stop, at + 1


_NOTHING = Piece(0, Span(0, 0))


def _base(tensor: Tensor) -> Piece:
    """Where the elements of a flat tensor lie: a run of bytes in one file."""
    storage, dtype = tensor.storage, tensor.dtype
    if not tensor.count:
        return _NOTHING
    if storage is None or dtype is None or not is_contiguous(tensor):
        raise Unsupported("a flat tensor that is no plain run of elements", key=tensor.key)
    if len(storage.pieces) != 1 or storage.pieces[0].encoding not in ("stored", "swapped"):
        raise Unsupported(
            "a flat tensor that is packed, or not there", key=tensor.key,
            hint="write the rank's file anew with ckptool convert FILE -o OUT",
        )  # fmt: skip
    piece, size = storage.pieces[0], dtype.size_bytes
    if piece.encoding == "swapped" and storage.dtype is not dtype:
        raise Unsupported("a big-endian flat tensor of two dtypes", key=tensor.key)
    span = Span(piece.span.offset + tensor.offset * size, tensor.count * size)
    return Piece(piece.source_id, span, piece.encoding)


# -- stages 1 and 2 ----------------------------------------------------------------------------
def join_groups(
    groups: Sequence[Mapping[str, Shape]],
    ranks: Sequence[Sequence[Tensor]],
    paddings: Sequence[Sequence[int]] | None,
) -> dict[str, Joined]:
    """Stages 1 and 2: the partitions of a group, rank after rank, are its flat tensor; parameters
    lie in it one behind the other (each with its padding), the rest is padding too.

    `ranks` has the flat tensors of each rank, one a group. Raises HeaderInvalid.
    """
    if any(len(flat) != len(groups) for flat in ranks):
        counts = sorted({len(flat) for flat in ranks})
        text = f"{len(groups)} groups of parameters, and {counts} flat tensors a rank"
        raise HeaderInvalid(text, hint=_AGAIN)
    if paddings is not None and [*map(len, paddings)] != [*map(len, groups)]:
        raise HeaderInvalid("paddings that are not one a parameter", hint=_AGAIN)
    found: dict[str, Joined] = {}
    for number, shapes in enumerate(groups):
        if not shapes and not any(flat[number].count for flat in ranks):
            continue
        chain, at = Chain([flat[number] for flat in ranks]), 0
        gaps = paddings[number] if paddings is not None else (0,) * len(shapes)
        for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
            count = prod(shape)
            _check_room(at + count, chain.count, name)
            found[name] = Joined(shape, chain.dtype, tuple(chain.cut(at, count)))
            at += count + gap
        unit = 2 * len(ranks)  # ranks are aligned to twice their number
        if -(-at // unit) != -(-chain.count // unit):
            raise _wrong_sum(at, chain.count)
    return found


# -- stage 3 -----------------------------------------------------------------------------------
def join_partitions(
    shapes: Mapping[str, Shape], ranks: Sequence[Sequence[Tensor]]
) -> dict[str, Joined]:
    """Stage 3: every rank holds ceil(elements / ranks) of each parameter, the last ones padding.

    `ranks` has the flat tensors of each rank, which follow one another. Raises HeaderInvalid.
    """
    sizes = [[tensor.count for tensor in flat] for flat in ranks]
    if any(row != sizes[0] for row in sizes):
        raise HeaderInvalid("ranks with flat tensors of different sizes", hint=_AGAIN)
    chains = [Chain(flat) for flat in ranks] if sizes[0] else []
    dtype = chains[0].dtype if chains else DTYPES["float32"]
    found: dict[str, Joined] = {}
    at = 0
    for name, shape in shapes.items():
        count = prod(shape)
        part = -(-count // len(ranks))
        _check_room(at + part, sum(sizes[0]), name)
        found[name] = Joined(shape, dtype, _gathered(chains, at, part, count))
        at += part
    if at != sum(sizes[0]):
        raise _wrong_sum(at, sum(sizes[0]))
    return found


def join_fragments(name: str, shape: Shape, ranks: Sequence[Tensor]) -> Joined:
    """A frozen parameter of stage 3: the fragments of all ranks, less the padding at the end."""
    chain, count = Chain(ranks), prod(shape)
    _check_room(count, chain.count, name)
    return Joined(shape, chain.dtype, tuple(chain.cut(0, count)))


def _gathered(chains: Sequence[Chain], at: int, part: int, count: int) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for rank, chain in enumerate(chains):
        wanted = min(part, count - rank * part)
        if wanted > 0:
            pieces += chain.cut(at, wanted)
    return tuple(pieces)


def _check_room(end: int, count: int, name: str) -> None:
    if end > count:
        raise HeaderInvalid(
            f"it should end at element {end:,} of the ranks' flat tensors, which have {count:,}",
            key=name, hint=_AGAIN,
        )  # fmt: skip


def _wrong_sum(used: int, count: int) -> HeaderInvalid:
    text = f"the parameters take {used:,} elements, the ranks' flat tensors have {count:,}"
    return HeaderInvalid(text, hint=_AGAIN)
