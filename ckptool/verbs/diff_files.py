"""One file or folder that is compared: what it holds, and its bytes on demand.

Knows: open files, shards that are opened when they are read, storages that a pickle spells as
text. Must not know: the other side, how numbers are compared.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptool.checkpoint import Piece, Storage, Tensor
from ckptool.errors import CkptError
from ckptool.formats.entries import contents
from ckptool.limits import Limits
from ckptool.places import BytesSource, Source, changed, reopen
from ckptool.sides import Side
from ckptool.spans import Span
from ckptool.verbs.reading import Opened

_OPEN = 4  # shards that are open at once


def side_of(found: Opened, name: str, limits: Limits) -> Side:
    """All that is in the file but its numbers. Raises LimitExceeded."""
    checkpoint = found.checkpoint
    try:
        held = contents(checkpoint, limits)
    except CkptError as error:
        error.path = error.path or checkpoint.file
        raise
    return Side(
        name, checkpoint.tables, checkpoint.weights, held.values, held.tensors, held.inside,
        held.complete,
    )  # fmt: skip


class SideFiles:
    """The bytes of one side; `equal.Files`. Close it at the end."""

    def __init__(self, found: Opened) -> None:
        self._source = found.source
        self._addresses = found.checkpoint.sources
        self._open: dict[int, Source] = {}
        self._texts: list[Source] = []
        self._spelled: dict[str, Storage] = {}
        container = getattr(found.checkpoint.handle, "container", None)
        self._inline: Callable[[Storage], bytes] | None = getattr(container, "inline", None)

    def read(self, source_id: int, offset: int, size: int) -> bytes:
        """Exactly `size` bytes. Raises as `places.Source`, InputChanged."""
        return self._of(source_id).read(offset, size)

    def read_into(self, source_id: int, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`. Raises as `read`."""
        self._of(source_id).read_into(offset, buffer)

    def readable(self, tensor: Tensor) -> Tensor:
        """The same tensor; where its numbers are text inside a pickle, with a piece that can be
        read as any other.
        """
        storage = tensor.storage
        if storage is None or storage.pieces or not storage.count or self._inline is None:
            return tensor
        if storage.key not in self._spelled:
            data = self._inline(storage)
            self._texts.append(BytesSource(data, "text"))
            piece = Piece(-len(self._texts), Span(0, len(data)))
            plain = Storage(
                storage.key, storage.dtype, storage.count, storage.device, (piece,), storage.crc
            )
            self._spelled[storage.key] = plain
        t = tensor
        return Tensor(
            t.key, t.dtype, t.shape, t.stride, t.offset, self._spelled[storage.key],
            t.requires_grad, t.kind, t.path, t.device, t.class_name,
        )  # fmt: skip

    def check_unchanged(self) -> None:
        """Raise InputChanged when a file is not the one that was opened."""
        for source in (self._source, *self._open.values()):
            if source is not None and not source.unchanged():
                raise changed(source.name)

    def close(self) -> None:
        """Close what was opened here."""
        while self._open:
            self._open.popitem()[1].close()

    def _of(self, source_id: int) -> Source:
        if source_id < 0:
            return self._texts[-source_id - 1]
        if self._source is not None:
            return self._source
        source = self._open.pop(source_id, None)
        if source is None:
            if len(self._open) >= _OPEN:
                self._open.pop(next(iter(self._open))).close()
            source = reopen(self._addresses[source_id])
        self._open[source_id] = source  # the last one used is the last to go
        return source
