"""What is left of a zip archive that was cut: its records, found without the directory.

Knows: local headers and data descriptors. Must not know: torch's meanings.
What is found here is no more than likely: whoever uses it compares checksums.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ckptool.places import Source
from ckptool.spans import Span
from ckptool.zipcentral import Entry
from ckptool.ziplayout import (
    CENTRAL_MARK,
    DESCRIPTOR,
    DESCRIPTOR64,
    DESCRIPTOR_MARK,
    FULL32,
    HAS_DESCRIPTOR,
    LOCAL,
    LOCAL_MARK,
    zip64_values,
)

_STEP = 1 << 20
_REACH = DESCRIPTOR64.size + len(LOCAL_MARK)  # a descriptor and what must follow it


class Walk(NamedTuple):
    """The records from byte 0 on: whole ones, as their headers and descriptors say; the one that
    the end of the file cuts, with the size it has left; where the last whole one ends.
    """

    entries: tuple[Entry, ...]
    cut: Entry | None
    end: int


def walk_entries(source: Source, budget: int | None = None) -> Walk:
    """Every record, found by its local header, in one pass forward.

    Where a header leaves the size open (torch's do), it is found as the distance to the first
    descriptor that records just that distance. Beyond `budget` bytes nothing is read: the record
    reached there is left out. Raises Truncated when the file shrinks meanwhile, ZipAmbiguous for
    a malformed zip64 field.
    """
    most = source.size if budget is None else budget
    entries: list[Entry] = []
    at = 0
    while at + LOCAL.size <= source.size:
        header = LOCAL.unpack(source.read(at, LOCAL.size))
        name_at = at + LOCAL.size
        start = name_at + header[9] + header[10]
        if header[0] != LOCAL_MARK or start > source.size:
            break
        name = source.read(name_at, header[9]).decode("utf-8", "backslashreplace")
        extra = source.read(start - header[10], header[10])
        found = _measured(source, header, extra, start, most)
        if found is None or start + found.packed > source.size:
            left = Entry(at, name, header[3], header[2], 0, source.size - start, 0, start)
            return Walk(tuple(entries), left if source.size <= most else None, at)
        packed, size = found.packed, found.size
        entries.append(Entry(at, name, header[3], header[2], found.crc, packed, size, start))
        at = start + found.packed + found.descriptor
    return Walk(tuple(entries), None, at)


def walk_local_headers(source: Source, budget: int = 8 << 30) -> list[tuple[str, Span, bool]]:
    """(name, span of the data, whether whole) of each record from byte 0 on, the cut one last.
    As `walk_entries`.
    """
    walk = walk_entries(source, budget)
    rows = [(row.name, Span(row.data_offset, row.compressed_size), True) for row in walk.entries]
    if walk.cut is not None:
        span = Span(walk.cut.data_offset, walk.cut.compressed_size)
        rows.append((walk.cut.name, span, False))
    return rows


class _Measured(NamedTuple):
    """What a header, or the descriptor behind the data, says of a record."""

    crc: int
    packed: int
    size: int
    descriptor: int


def _measured(
    source: Source, header: tuple[int, ...], extra: bytes, start: int, budget: int
) -> _Measured | None:
    """None: the descriptor that would tell is not there."""
    flags, crc, packed, size = header[2], header[6], header[7], header[8]
    if flags & HAS_DESCRIPTOR and packed in (0, FULL32):
        return _find_descriptor(source, start, budget)
    if packed == FULL32:
        size, packed = zip64_values(extra, (size, packed), "")
    return _Measured(crc, packed, size, 0)


def _find_descriptor(source: Source, start: int, budget: int) -> _Measured | None:
    for at in range(start, min(source.size, budget), _STEP):
        block = source.read(at, min(_STEP + _REACH, source.size - at))
        for match in re.finditer(re.escape(DESCRIPTOR_MARK), block[: _STEP + 3]):
            distance = at + match.start() - start
            found = _descriptor(block[match.start() :][:_REACH], distance)
            if found is not None:
                return found
    return None


def _descriptor(block: bytes, distance: int) -> _Measured | None:
    """The descriptor that `block` begins with, if it records `distance` bytes."""
    for layout in (DESCRIPTOR, DESCRIPTOR64):
        after = block[layout.size : layout.size + 4]
        follows = any(mark.startswith(after) for mark in (LOCAL_MARK, CENTRAL_MARK))
        if len(block) >= layout.size and follows:
            _, crc, packed, size = layout.unpack_from(block)
            if packed == distance:
                return _Measured(crc, packed, size, layout.size)
    return None
