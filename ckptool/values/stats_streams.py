"""The bytes of one tensor for statistics and hashes: in file order where any order will do.

Knows: views, runs of elements, the sign bits that a view may flip. Must not know: formats, verbs,
what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from ckptool.checkpoint import FLAGGED, DType, Tensor
from ckptool.errors import Unsupported
from ckptool.values.distance_numbers import Buffer
from ckptool.values.equal import Run, Seen, axes, ordered, runs
from ckptool.values.statistics import STEP

_CHUNK = 1 << 20


def once(tensor: Tensor) -> tuple[Tensor, int]:
    """The tensor without the axes that repeat one element (stride 0), and how often they do."""
    shape, stride = tensor.shape or (), tensor.stride or ()
    if 0 not in stride or not tensor.count:
        return tensor, 1
    bare = tuple(size if step else 1 for size, step in zip(shape, stride, strict=True))
    return replace(tensor, shape=bare), prod(shape) // prod(bare)


def in_order(tensor: Tensor) -> bool:
    """Whether the elements fill a run of the storage in row-major order."""
    found = axes(tensor)
    return found is not None and list(found) == sorted(found)


def plain_run(seen: Seen, any_order: bool) -> Run | None:
    """Where the elements lie as they are needed, plainly stored one after another; None for
    others, and for those that a view flips.
    """
    if seen.tensor.kind in FLAGGED or not (any_order or in_order(seen.tensor)):
        return None
    found = runs(seen, seen)
    return None if found is None else found[0]


def run_blocks(seen: Seen, run: Run, start: int, count: int) -> Iterator[Buffer]:
    """`count` elements of a run from its element `start` on; a block is overwritten by the next."""
    item = seen.dtype.size_bytes
    step = min(count, STEP if item > 1 else _CHUNK)
    room = memoryview(bytearray(step * item))
    for at in range(start, start + count, step):
        block = room[: min(step, start + count - at) * item]
        seen.files.read_into(run.source_id, run.offset + at * item, block)
        yield block


def all_blocks(seen: Seen) -> Iterator[Buffer]:
    """All elements in row-major order, little-endian, with the signs that torch shows."""
    kind = seen.tensor.kind
    if kind not in FLAGGED:
        return ordered(seen)
    return (_flipped(block, seen.dtype, kind) for block in ordered(seen))


def _flipped(block: Buffer, dtype: DType, kind: str) -> Buffer:
    """The signs of all numbers turned, or those of imaginary parts."""
    import numpy as np

    signed = dtype.kind in ("float", "complex") and dtype.size_bytes > 1
    if not signed or (kind != "neg" and dtype.components != 2):
        raise Unsupported(
            f"a view of {dtype.name} that is marked '{kind}'", hint="report this with the file"
        )
    width = dtype.size_bytes // dtype.components
    bits = np.frombuffer(block, f"<u{width}").copy()
    first, every = {"conj": (1, 2), "neg": (0, 1), "conj+neg": (0, 2)}[kind]
    bits[first::every] ^= bits.dtype.type(1 << (8 * width - 1))
    flipped: bytes = bits.tobytes()
    return flipped
