"""An output that cannot be read back before it is complete, read from what it was made of.

Knows: parts, where their bytes came from. Must not know: formats, where outputs go.
An object store shows nothing of an upload until that is completed, and then everybody sees it.
So what is checked before are the bytes that were handed over: literal and late ones as they were,
copied ones from the source, where they are again those whose checksum was taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from ckptool.errors import OutputError
from ckptool.plans import Copy, Late, Made, Output, Recipe
from ckptool.reads import Source
from ckptool.sources import Sources
from ckptool.spans import Address

_LARGEST = 64 << 20


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
        self._sources = Sources(addresses, opener=opener)
        self._made: tuple[int, bytes] = (-1, b"")

    def _fetch(self, offset: int, size: int) -> bytes:
        index = bisect_right(self._ends, offset)
        part = self._parts[index]
        at = offset - (self._ends[index] - part.size)
        size = min(size, part.size - at)
        if isinstance(part, Copy):
            return self._sources.read(part.source_id, part.span.offset + at, size)
        if isinstance(part, Made):
            return self._computed(index, part)[at : at + size]
        data = self._late[index] if isinstance(part, Late) else part.data
        return data[at : at + size]

    def _computed(self, index: int, part: Made) -> bytes:
        if index != self._made[0]:
            if part.size > _LARGEST:
                raise OutputError(f"self-check failed: a part of {part.size:,} bytes is asked for")
            self._made = index, b"".join(self._recipes[part.recipe](self._sources.read, part))
        return self._made[1]

    def close(self) -> None:
        """Close the sources that were read."""
        self._sources.close()
