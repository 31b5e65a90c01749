"""One tensor of an open file as a numpy array, without torch.

Knows: which kinds of tensors numpy can hold, that only what a view needs is read. Must not know:
torch, printing. numpy only inside functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptool.checkpoint import FLAGGED, UNTYPED, Checkpoint, Storage, Tensor
from ckptool.errors import CkptError, StorageSize, Unsupported
from ckptool.pieces import encoding_of, made_from
from ckptool.places import Source
from ckptool.sources import Sources
from ckptool.values.storages import coded, run, swapped

_KINDS = frozenset(("tensor", "parameter", "ndarray", "subclass", *FLAGGED, "storage"))
_DTYPES = frozenset(
    ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "uint16",
     "uint32", "uint64", "bool", "complex64", "complex128")
)  # fmt: skip
_TORCH = "take it as a torch tensor: .torch()"


def array_of(checkpoint: Checkpoint, source: Source | None, tensor: Tensor) -> Any:
    """An array of the tensor's shape, strides and dtype with memory of its own, as far as the
    view reaches. Raises Unsupported for what numpy cannot hold, CrcMismatch, Truncated.
    """
    try:
        return _array(checkpoint, source, tensor)
    except CkptError as error:
        error.path = error.path or checkpoint.file
        error.key = error.key or tensor.key
        raise


def _array(checkpoint: Checkpoint, source: Source | None, tensor: Tensor) -> Any:
    import numpy as np

    storage, dtype = tensor.storage, tensor.dtype
    if tensor.kind not in _KINDS or dtype is None or tensor.shape is None or tensor.stride is None:
        raise Unsupported(f"a tensor of the kind '{tensor.kind}' is no array", hint=_TORCH)
    kind = "uint8" if dtype is UNTYPED else dtype.name
    if kind not in _DTYPES:
        raise Unsupported(f"numpy has no {dtype.name}", hint=_TORCH)
    if storage is None or storage.device == "meta":
        raise Unsupported("the file holds no numbers of it, only its shape")
    item = dtype.size_bytes
    reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
    if not tensor.count:
        return np.empty(tensor.shape, kind)
    flat = np.empty(reach, kind)
    view, at = flat.data.cast("B"), 0
    for chunk in _bytes(checkpoint, source, storage, tensor.offset * item, reach * item, item):
        view[at : at + len(chunk)] = chunk
        at += len(chunk)
    # what numpy cannot count is the step of an axis of one element or none: never taken
    strides = [step * item if step * item < 1 << 63 else item for step in tensor.stride]
    made = np.lib.stride_tricks.as_strided(flat, tensor.shape, strides)
    if tensor.kind in ("conj", "conj+neg"):
        made = np.conj(made)
    return np.negative(made) if tensor.kind in ("neg", "conj+neg") else made


def _bytes(
    checkpoint: Checkpoint, source: Source | None, storage: Storage, start: int, size: int, item: int
) -> Iterator[bytes]:  # fmt: skip
    """Decoded bytes of a storage from `start`; its checksum is compared where one is recorded."""
    if not storage.pieces:
        inline = getattr(getattr(checkpoint.handle, "container", None), "inline", None)
        data = inline(storage) if inline is not None else b""
        if len(data) != storage.size_bytes:
            raise StorageSize("its bytes are not in the file")
        yield data[start : start + size]
        return
    unit = storage.dtype.size_bytes // storage.dtype.components
    made = made_from(storage, "", (), label=storage.key, check=True)
    stored = coded(made, encoding_of(storage), unit, storage.size_bytes, storage.crc)
    with Sources(checkpoint.sources, source) as files:
        chunks = run(files.read, stored, start, size, item)
        yield from swapped(chunks, stored.component)
