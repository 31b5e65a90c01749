"""The tensors of an open file: a lazy mapping of key to record.

Knows: records of tensors, who makes numbers of them. Must not know: click, torch, numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckptool.checkpoint import Checkpoint, Storage, Table, Tensor
from ckptool.places import Source


class _Home(NamedTuple):
    """Where a tensor was found; no source: the files are opened when they are read."""

    checkpoint: Checkpoint
    table: Table
    source: Source | None


class TensorRecord:
    """One tensor of an open file: its facts at once, its numbers on demand."""

    __slots__ = ("_home", "tensor")

    def __init__(self, tensor: Tensor, home: _Home) -> None:
        self.tensor = tensor
        self._home = home

    @property
    def key(self) -> str:
        """Its name in the state_dict."""
        return self.tensor.key

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Sizes in elements; None where the file does not say (nested, uninitialised)."""
        return self.tensor.shape

    @property
    def dtype(self) -> str | None:
        """Torch's name of the element type."""
        return self.tensor.dtype.name if self.tensor.dtype else None

    @property
    def device(self) -> str:
        """The location tag in the file."""
        return self.tensor.device

    @property
    def stride(self) -> tuple[int, ...] | None:
        """Steps in elements."""
        return self.tensor.stride

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements one after another."""
        return self.tensor.size_bytes

    @property
    def storage(self) -> Storage | None:
        """Where its bytes lie."""
        return self.tensor.storage

    @property
    def requires_grad(self) -> bool | None:
        """As recorded; None where the container does not say."""
        return self.tensor.requires_grad

    def numpy(self) -> Any:
        """Its numbers as a numpy array of the same shape and strides; needs no torch.

        Raises Unsupported for what numpy cannot hold (bfloat16, quantized, sparse …), and what
        reading raises: the recorded checksum is compared.
        """
        from ckptool.verbs.load_array import array_of

        return array_of(self._home.checkpoint, self._home.source, self.tensor)

    def torch(self, device: Any = "cpu") -> Any:
        """Its numbers as a torch tensor on `device` (None: where the file says), of whatever
        kind, over a storage of its own. Raises CkptError.
        """
        from ckptool.verbs.load import tensor_of

        home = self._home
        return tensor_of(home.checkpoint, home.source, home.table, self.tensor, device)

    def __repr__(self) -> str:
        return (
            f"<{self.dtype} {list(self.shape or ())} on {self.device}, {self.size_bytes:,} bytes>"
        )


class Weights(Mapping[str, TensorRecord]):
    """The tensors of one state_dict by key, in file order."""

    def __init__(self, checkpoint: Checkpoint, table: Table | None, source: Source | None) -> None:
        home = _Home(checkpoint, table or Table((), ()), source)
        self._rows = {tensor.key: TensorRecord(tensor, home) for tensor in home.table.tensors}

    def __getitem__(self, key: str) -> TensorRecord:
        return self._rows[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<{len(self)} tensors>"
