"""The self-check of what was written: read back as any file, compared with what was planned.

Knows: paths, shapes, places in storages. Must not know: how it was written.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptool.checkpoint import Tensor
from ckptool.errors import OutputError
from ckptool.formats.homes import Housing
from ckptool.formats.rehouse import Expected
from ckptool.limits import Limits
from ckptool.places import Source


def compare(
    written: Source, expected: Iterable[Expected], housing: Housing, limits: Limits
) -> None:
    """Raise OutputError unless every expected tensor is there, in its storage, and every
    storage that is there was planned, with its size and tag.
    """
    from ckptool.formats import read

    found = read(written, limits, keep=False)._replace(handle=None)
    tensors = {tensor.path: tensor for tensor in found.tensors}
    for table in found.tables:  # those of a module are named as in its state_dict
        tensors.update((tensor.path, tensor) for tensor in table.tensors)
    for row in expected:
        tensor = tensors.get(row.path)
        if tensor is None or not _same(tensor, row):
            name = ".".join(map(str, row.path))
            raise OutputError(f"self-check failed: '{name}' was not written as planned")
    storages = {storage.key: storage for storage in found.storages}
    planned = {str(number): home for number, home in enumerate(housing.homes)}
    for key in {**storages, **planned}:
        storage, home = storages.get(key), planned.get(key)
        if storage is None or home is None or storage.size_bytes != home.size_bytes or (
            storage.device != home.device
        ):  # fmt: skip
            raise OutputError(f"self-check failed: storage {key} was not written as planned")


def _same(tensor: Tensor, row: Expected) -> bool:
    if (tensor.dtype, tensor.shape) != (row.dtype, row.shape):
        return False
    if row.storage is None:
        return True
    storage = tensor.storage.key if tensor.storage else None
    return (tensor.stride, tensor.offset, storage) == (row.stride, row.offset, row.storage)
