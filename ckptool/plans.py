"""The Plan: what a conversion is before it is run. Spans are copied, few bytes are new.

Knows: parts, sizes, checksums. Must not know: files, formats.
All of it is picklable bare data: a Plan can be printed, counted, or run on another machine.
It stands apart from `spans` because looking needs none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ckptool.spans import Address, Span


class Literal(NamedTuple):
    """Bytes that the plan itself holds (headers, edited pickles)."""

    data: bytes

    @property
    def size(self) -> int:
        """Bytes this part adds to the output."""
        return len(self.data)


class Copy(NamedTuple):
    """A span of a source, copied as it is.

    `crc` is the CRC-32 recorded for these bytes: checked while copying; None or 0: unknown.
    `label` is what an error calls them (a tensor key, an entry name).
    """

    source_id: int
    span: Span
    crc: int | None = None
    label: str = ""

    @property
    def size(self) -> int:
        """Bytes this part adds to the output."""
        return self.span.size


class Made(NamedTuple):
    """Bytes computed from spans by a named recipe (inflate, cast, gather).

    `pieces` are (source_id, span); `crc`, where known, is that of the result. Several pieces
    follow one another, or `regions` say which slice of a tensor each fills ((start, stop) of
    every dimension, row by row); `crcs`, where given, are the recorded ones of the pieces (0:
    not recorded).
    """

    pieces: tuple[tuple[int, Span], ...]
    recipe: str
    args: tuple[Any, ...]
    size: int
    crc: int | None = None
    label: str = ""
    regions: tuple[tuple[tuple[int, int], ...] | None, ...] = ()
    crcs: tuple[int, ...] = ()


Reader = Callable[[int, int, int], bytes]
"""(source_id, offset, size) -> exactly these bytes."""
Recipe = Callable[[Reader, Made], Iterator[bytes]]
"""What computes the bytes of a Made part."""


class Late(NamedTuple):
    """Bytes known only after others have passed: `fill(checksums)` gives exactly `size` bytes.

    `needs` are indexes of parts of the same output, in the order `fill` (picklable) gets
    their CRC-32s.
    """

    size: int
    fill: Callable[[tuple[int, ...]], bytes]
    needs: tuple[int, ...]


Part = Literal | Copy | Made | Late


class Output(NamedTuple):
    """One file to be written: its parts in order."""

    name: str
    parts: tuple[Part, ...]
    size_bytes: int


class Plan(NamedTuple):
    """What a conversion will do. Every size is known before a byte is written."""

    sources: tuple[Address, ...]
    outputs: tuple[Output, ...]
    notes: tuple[str, ...] = ()


class Written(NamedTuple):
    """What a write did: (path, size) of each output; `crc_checked_bytes` of checked copies;
    `results`: (label of a Made part, what its recipe returned), in order, where not None.
    """

    outputs: tuple[tuple[str, int], ...]
    crc_checked_bytes: int = 0
    findings: tuple[str, ...] = ()
    results: tuple[tuple[str, Any], ...] = ()


def total_size(parts: tuple[Part, ...]) -> int:
    """Bytes that these parts make together."""
    return sum(part.size for part in parts)
