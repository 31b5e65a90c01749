"""The elements of a strided view, written one after another.

Knows: bytes of elements and how they are put in order. Must not know: formats, what the
elements mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

from ckptool.errors import TensorBounds
from ckptool.plans import Made, Reader
from ckptool.values import views
from ckptool.values.storages import CHUNK, Coded, check, coded, random_access, run, swapped
from ckptool.values.views import Block, Dims, Reading

Fetch = Callable[[int, int], bytes | memoryview]

# Kinds of numpy that move elements of that many bytes untouched.
_KINDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


def gather(reader: Reader, made: Made) -> Iterator[bytes]:
    """Recipe: the elements of a view in row-major order, little-endian.

    `made.args` are (encoding, component_bytes, item_bytes, decoded_size, shape, stride,
    offset, crc); shape, stride and offset count elements. Raises CrcMismatch before the end,
    Unsupported for a strided view of a large deflated storage, TensorBounds.
    """
    encoding, component, item, size, shape, stride, offset, crc = made.args
    storage = coded(made, encoding, component, size, crc)
    yield from elements(reader, storage, item, shape, stride, offset)


def elements(
    reader: Reader,
    storage: Coded,
    item: int,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> Iterator[bytes]:
    """As `gather`, in chunks of whole elements of at most 1 MiB."""
    if not prod(shape):
        check(reader, storage)
        return
    dims = views.collapse(shape, stride)
    end = offset + views.extent(dims)
    if item not in _KINDS or min((offset, *shape, *stride)) < 0 or end * item > storage.size:
        text = f"elements {offset:,} to {end:,} of {item} bytes in {storage.size:,} bytes"
        raise TensorBounds(text, key=storage.label or None, hint="report this with the file")
    if dims in ((), ((end - offset, 1),)):  # one run
        chunks = run(reader, storage, offset * item, (end - offset) * item, item)
    else:
        fetch = random_access(reader, storage, offset * item, end * item)
        chunks = _scattered(fetch, dims, offset, item)
    yield from swapped(chunks, storage.component)


def _scattered(fetch: Fetch, dims: Dims, offset: int, item: int) -> Iterator[bytes]:
    import numpy as np

    buffer = np.empty(0, _KINDS[item])
    step = CHUNK // item
    for block in views.blocks(dims, offset, item):
        count = views.count(block.dims)
        if len(buffer) < count:
            buffer = np.empty(count, _KINDS[item])
        _fill(buffer[:count], block, fetch, item)
        for low in range(0, count, step):
            yield buffer[low : min(low + step, count)].tobytes()


def _fill(flat: Any, block: Block, fetch: Fetch, item: int) -> None:
    """Put the elements of a block in order into an array of one axis."""
    import numpy as np

    dims = block.dims
    out = flat.reshape([size for size, _ in dims])
    read = views.reading(dims, item)
    axes = sorted((read.pivot, *read.inner))
    steps = [dims[axis][1] * item for axis in axes]
    pivot = axes.index(read.pivot)
    if not read.joined:
        steps[pivot] = read.width * item
    for tile in views.tiles(block, read):
        shape = [dims[axis][0] for axis in axes]
        shape[pivot] = tile.lot
        data = _fetch_tile(fetch, tile, dims[read.pivot][1], read, item)
        out[tile.place] = np.ndarray(shape, flat.dtype, data, 0, steps)


def _fetch_tile(
    fetch: Fetch, tile: views.Tile, step: int, read: Reading, item: int
) -> bytes | memoryview:
    start, size = tile.offset * item, read.width * item
    if read.joined:
        return fetch(start, size + (tile.lot - 1) * step * item)
    step *= item
    return b"".join([fetch(at, size) for at in range(start, start + tile.lot * step, step)])
