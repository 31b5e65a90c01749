"""What is left of a zip archive that was cut: its records, found without the directory.

Knows: local headers and data descriptors. Must not know: torch's meanings.
For messages only: nothing found here is trusted or converted.
"""

from __future__ import annotations

import re

from ckptool.places import Source
from ckptool.spans import Span
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


def walk_local_headers(source: Source, budget: int = 8 << 30) -> list[tuple[str, Span, bool]]:
    """(name, span of the data, whether whole) of each record from byte 0 on, the cut one last.

    Where a header leaves the size open (torch's do), it is found as the distance to the first
    descriptor that records just that distance. One pass forward over at most `budget` bytes;
    the record reached there is left out. Raises Truncated when the file shrinks meanwhile,
    ZipAmbiguous for a malformed zip64 field.
    """
    found: list[tuple[str, Span, bool]] = []
    at = 0
    while at + LOCAL.size <= source.size:
        header = LOCAL.unpack(source.read(at, LOCAL.size))
        name_at = at + LOCAL.size
        start = name_at + header[9] + header[10]
        if header[0] != LOCAL_MARK or start > source.size:
            break
        name = source.read(name_at, header[9]).decode("utf-8", "backslashreplace")
        extra = source.read(start - header[10], header[10])
        end, at = _data_end(source, header, extra, start, budget)
        if end <= source.size:
            found.append((name, Span(start, end - start), True))
            continue
        if source.size <= budget:
            found.append((name, Span(start, source.size - start), False))
        break
    return found


def _data_end(
    source: Source, header: tuple[int, ...], extra: bytes, start: int, budget: int
) -> tuple[int, int]:
    """(end of the data, start of the next header); both beyond the file when it is cut."""
    flags, packed, size = header[2], header[7], header[8]
    if flags & HAS_DESCRIPTOR and packed in (0, FULL32):
        return _find_descriptor(source, start, budget)
    if packed == FULL32:
        packed = zip64_values(extra, (size, packed), "")[1]
    return start + packed, start + packed


def _find_descriptor(source: Source, start: int, budget: int) -> tuple[int, int]:
    for at in range(start, min(source.size, budget), _STEP):
        block = source.read(at, min(_STEP + _REACH, source.size - at))
        for match in re.finditer(re.escape(DESCRIPTOR_MARK), block[: _STEP + 3]):
            end = at + match.start()
            size = _descriptor_size(block[match.start() :][:_REACH], end - start)
            if size:
                return end, end + size
    return source.size + 1, source.size + 1


def _descriptor_size(block: bytes, distance: int) -> int:
    """The size of the descriptor that `block` begins with, if it records `distance` bytes."""
    for layout in (DESCRIPTOR, DESCRIPTOR64):
        after = block[layout.size : layout.size + 4]
        follows = any(mark.startswith(after) for mark in (LOCAL_MARK, CENTRAL_MARK))
        if len(block) >= layout.size and layout.unpack_from(block)[2] == distance and follows:
            return layout.size
    return 0
