"""An output that cannot be read back before it is complete, read from what it was made of.

Knows: parts, where their bytes came from. Must not know: formats, where outputs go.
An object store shows nothing of an upload until that is completed, and then everybody sees it.
So what is checked before are the bytes that were handed over: literal and late ones as they were,
copied ones from the source, where they are again those whose checksum was taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from ckptool.errors import OutputError
from ckptool.plans import Copy, Late, Literal, Made, Output
from ckptool.reads import Source
from ckptool.spans import Address

_LARGEST = 64 << 20
Recipe = Callable[[Callable[[int, int, int], bytes], Made], Iterator[bytes]]


class Sent(Source):
    """`late` are the bytes of the late parts by their index. Close it at the end.

    Raises what sources and recipes raise; OutputError for a computed part of more than 64 MiB,
    which no check needs.
    """

    def __init__(
        self, name: str, output: Output, late: Mapping[int, bytes], recipes: Mapping[str, Recipe],
        addresses: Sequence[Address], opener: Callable[[Address], Source],
    ) -> None:  # fmt: skip
        super().__init__(name, output.size_bytes, Address("", output.size_bytes))
        self._parts = output.parts
        self._ends = list(accumulate(part.size for part in output.parts))
        self._late = late
        self._recipes = recipes
        self._addresses = addresses
        self._opener = opener
        self._open: tuple[int, Source] | None = None
        self._made: tuple[int, bytes] = (-1, b"")

    def _fetch(self, offset: int, size: int) -> bytes:
        index = bisect_right(self._ends, offset)
        part = self._parts[index]
        at = offset - (self._ends[index] - part.size)
        size = min(size, part.size - at)
        if isinstance(part, Copy):
            return self._read(part.source_id, part.span.offset + at, size)
        if isinstance(part, Made):
            return self._computed(index, part)[at : at + size]
        data = self._late[index] if isinstance(part, Late) else _literal(part)
        return data[at : at + size]

    def _computed(self, index: int, part: Made) -> bytes:
        if index != self._made[0]:
            if part.size > _LARGEST:
                raise OutputError(f"self-check failed: a part of {part.size:,} bytes is asked for")
            self._made = index, b"".join(self._recipes[part.recipe](self._read, part))
        return self._made[1]

    def _read(self, source_id: int, offset: int, size: int) -> bytes:
        if self._open is None or self._open[0] != source_id:
            self.close()
            self._open = source_id, self._opener(self._addresses[source_id])
        return self._open[1].read(offset, size)

    def close(self) -> None:
        """Close the source that was read last."""
        opened, self._open = self._open, None
        if opened is not None:
            opened[1].close()


def _literal(part: Literal) -> bytes:
    return part.data
