"""What one file of several holds, as part of the whole.

Knows: storages, tensors, verdicts. Must not know: files, which layout they are put together by.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptool.checkpoint import Global, Piece, Storage, Tensor
from ckptool.formats.judge import KNOWN


class Moved:
    """The tensors of file `number`, with storages that say so in pieces and key, on `device` where
    it is given; ties stay. What is handed over must live as long as this does.
    """

    def __init__(self, number: int, device: str | None = None) -> None:
        self._number = number
        self._device = device
        self._storages: dict[int, Storage] = {}
        self._tensors: dict[int, Tensor] = {}

    def storage(self, s: Storage) -> Storage:
        """The one record of a storage of that file."""
        return self._storages.get(id(s)) or self._move_storage(s)

    def tensors(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The records of tensors, each once."""
        return [self._tensors.get(id(tensor)) or self._move(tensor) for tensor in tensors]

    def _move_storage(self, s: Storage) -> Storage:
        number, device = self._number, self._device or s.device
        pieces = tuple([Piece(number, p.span, p.encoding, p.region, p.crc) for p in s.pieces])
        moved = Storage(f"{number}/{s.key}", s.dtype, s.count, device, pieces, s.crc)
        self._storages[id(s)] = moved
        return moved

    def _move(self, t: Tensor) -> Tensor:
        storage = None if t.storage is None else self.storage(t.storage)
        moved = Tensor(
            t.key, t.dtype, t.shape, t.stride, t.offset, storage, t.requires_grad, t.kind,
            t.path, self._device or t.device, t.class_name,
        )  # fmt: skip
        self._tensors[id(t)] = moved
        return moved


class Verdicts:
    """The classes that several files name: a known one once, any other each time."""

    def __init__(self) -> None:
        self.rows: list[Global] = []
        self._known: set[str] = set()

    def add(self, rows: Iterable[Global], file: str = "") -> None:
        """Those of one file, which is named before their members."""
        for row in rows:
            if row.verdict != KNOWN or row.name not in self._known:
                self.rows.append(row._replace(member=f"{file}:{row.member}") if file else row)
            self._known.add(row.name)
