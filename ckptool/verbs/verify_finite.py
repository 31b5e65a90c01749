"""Which tensors hold NaN or infinities: every floating one is read, in chunks.

Knows: where a tensor's numbers lie. Must not know: formats' insides, printing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from math import prod
from typing import NamedTuple

from ckptool.checkpoint import UNTYPED, Checkpoint, Storage, Tensor
from ckptool.errors import CkptError
from ckptool.formats.assemble import PickleHandle
from ckptool.formats.audit_users import named_tensors
from ckptool.pieces import encoding_of, made_from
from ckptool.places import Source
from ckptool.plans import Made, Reader
from ckptool.sources import Sources
from ckptool.spans import Span
from ckptool.values.finite import COUNTABLE, NonFinite, nonfinite
from ckptool.values.gather import elements
from ckptool.values.storages import Coded, coded, swapped, whole

Progress = Callable[[int, int], None]


class Counted(NamedTuple):
    """One tensor: its counts; `problem`, where it could not be read. Where `storage_wide`, the
    numbers of its whole storage were counted (sparse and nested tensors, views that repeat).
    """

    name: str
    counts: NonFinite
    storage_wide: bool = False
    problem: CkptError | None = None


def count_nonfinite(
    checkpoint: Checkpoint, source: Source | None, lost: Collection[str] = (),
    progress: Progress | None = None,
) -> Iterator[Counted]:  # fmt: skip
    """Count each tensor that can hold such numbers, but for those of `lost` storages; one that
    stands under several names under the first alone.
    """
    rows = list(_countable(checkpoint, lost))
    total = sum(tensor.size_bytes for tensor, _ in rows)
    done = 0
    with Sources(checkpoint.sources, source) as files:
        for tensor, name in rows:
            yield _counted(checkpoint, files.read, tensor, name)
            done += tensor.size_bytes
            if progress is not None:
                progress(done, total)


def _countable(checkpoint: Checkpoint, lost: Collection[str]) -> Iterable[tuple[Tensor, str]]:
    seen = set()
    spelled = _inline(checkpoint) is not None
    for tensor, name in named_tensors(checkpoint):
        s, dtype = tensor.storage, tensor.dtype
        if s is None or dtype is None or s.key in lost or dtype.name not in COUNTABLE:
            continue
        place = (s.key, tensor.offset, tensor.shape, tensor.stride, dtype.name)
        if place not in seen and s.size_bytes and (s.pieces or spelled):
            seen.add(place)
            yield tensor, name


def _counted(checkpoint: Checkpoint, read: Reader, tensor: Tensor, name: str) -> Counted:
    assert tensor.storage is not None
    assert tensor.dtype is not None
    try:
        reader, storage = _coded(checkpoint, read, tensor.storage, tensor, name)
        dtype = tensor.dtype
        view = _view(tensor)
        if view is None:
            items = _items(whole(reader, storage), dtype.size_bytes)
            return Counted(name, nonfinite(swapped(items, storage.component), dtype.name), True)
        shape, times = view
        found = elements(
            reader, storage, dtype.size_bytes, shape, tensor.stride or (), tensor.offset
        )
        counts = nonfinite(found, dtype.name)
    except CkptError as error:
        return Counted(name, NonFinite(0, 0, 0), False, error)
    return Counted(name, NonFinite(*(number * times for number in counts)))


def _view(tensor: Tensor) -> tuple[tuple[int, ...], int] | None:
    """The shape to read once, and how often a view repeats it; None where the tensor is no plain
    view, or one that reads its storage again and again.
    """
    shape, stride = tensor.shape, tensor.stride
    if shape is None or stride is None or tensor.storage is None or tensor.dtype is None:
        return None
    once = tuple(size if step else min(size, 1) for size, step in zip(shape, stride, strict=True))
    if prod(once) * tensor.dtype.size_bytes > tensor.storage.size_bytes:
        return None
    return once, prod(shape) // max(prod(once), 1)


def _coded(
    checkpoint: Checkpoint, read: Reader, storage: Storage, tensor: Tensor, name: str
) -> tuple[Reader, Coded]:
    """How the bytes of a storage are read. Raises what `coded` raises."""
    inline = _inline(checkpoint)
    if not storage.pieces and inline is not None:
        data = inline(storage)
        made = Made(((0, Span(0, len(data))),), "gather", (), storage.size_bytes, None, name)
        return lambda _, at, size: data[at : at + size], coded(made, "stored", 1, len(data), None)
    encoding, unit = encoding_of(storage, name), storage.dtype
    if tensor.dtype is not unit and unit is UNTYPED:  # torch never swaps an untyped storage
        encoding = {"swapped": "stored"}.get(encoding, encoding.removesuffix("-swapped"))
    made = made_from(storage, "gather", (), storage.size_bytes, label=name)
    swap = unit.size_bytes // unit.components
    return read, coded(made, encoding, swap, storage.size_bytes, None)


def _inline(checkpoint: Checkpoint) -> Callable[[Storage], bytes] | None:
    """Where a bare pickle spells numbers as text (protocol 2), what gives them."""
    handle = checkpoint.handle
    return getattr(handle.container, "inline", None) if isinstance(handle, PickleHandle) else None


def _items(chunks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The same bytes in chunks of whole elements; a rest that is none is left out."""
    rest = b""
    for chunk in chunks:
        data = rest + chunk
        cut = len(data) - len(data) % size
        rest = data[cut:]
        if cut:
            yield data[:cut]
