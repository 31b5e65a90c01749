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
from ckptool.places import BytesSource, Source
from ckptool.sides import Side
from ckptool.sources import Sources
from ckptool.spans import Span
from ckptool.verbs.reading import Opened


def side_of(found: Opened, limits: Limits) -> Side:
    """All that is in the file but its numbers, under the path of the file. Raises LimitExceeded."""
    checkpoint = found.checkpoint
    try:
        held = contents(checkpoint, limits)
    except CkptError as error:
        error.path = error.path or checkpoint.file
        raise
    return Side(
        checkpoint.file, checkpoint.tables, checkpoint.weights, held.values, held.tensors, held.inside,
        held.complete,
    )  # fmt: skip


class SideFiles:
    """The bytes of one side; `equal.Files`. Close it at the end."""

    def __init__(self, found: Opened) -> None:
        self._files = Sources(found.checkpoint.sources, found.source)
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
        self._files.check_unchanged()

    def close(self) -> None:
        """Close what was opened here."""
        self._files.close()

    def _of(self, source_id: int) -> Source:
        return self._texts[-source_id - 1] if source_id < 0 else self._files[source_id]
