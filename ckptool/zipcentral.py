"""The tail of a zip archive, read strictly: its end records and its central directory.

Knows: end records, central entries, what makes an entry refusable. Must not know: local
headers, torch's meanings.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

from ckptool.errors import NotACheckpoint, PathEscape, Truncated, ZipEncrypted
from ckptool.places import Source
from ckptool.spans import Span
from ckptool.ziplayout import (
    CENTRAL,
    CENTRAL_MARK,
    DEFLATED,
    END,
    END64,
    END64_MARK,
    END_MARK,
    FULL16,
    FULL32,
    LOCATOR,
    LOCATOR_MARK,
    REPACK,
    STORED,
    USUAL_FLAGS,
    ambiguous,
    zip64_values,
)

_ENCRYPTED = 0x1 | 0x40 | 0x2000  # encrypted, strongly encrypted, headers masked
_PATCHED = 0x20
REFUSED_FLAGS = _ENCRYPTED | _PATCHED
_MODES = (0, 0o10, 0o4)  # Unix file type: unset, regular file, folder
_LENGTHS, _LENGTHS_AT = struct.Struct("<3H"), 28  # of the name, the extra field, the comment
_FIELDS = struct.Struct("<4s4x2H4x3I4H2x2I")  # of CENTRAL, without versions and times
AGAIN = "download or copy it again"


class Entry(NamedTuple):
    """One record. Offsets and sizes in bytes; `crc` as recorded (0 may mean: not recorded).

    `name` is the full one, `method` 0 (stored) or 8 (deflated). A tuple because a file may
    have a hundred thousand, and dataclasses take four times as long to make.
    """

    header_offset: int
    name: str
    method: int
    flags: int
    crc: int
    compressed_size: int
    size: int
    data_offset: int


new_entry = cast("Callable[[tuple[int, str, int, int, int, int, int, int]], Entry]",
                 partial(tuple.__new__, Entry))  # fmt: skip
"""Entry(*fields), in half the time."""


class End(NamedTuple):
    """Where the central directory lies, from the end records."""

    total: int
    offset: int
    size: int


# --- the end records -------------------------------------------------------------------------


def find_directory(source: Source) -> End:
    """Where the directory lies; its end records are the last bytes of `source`.

    Raises Truncated, ZipAmbiguous, and NotACheckpoint for an empty zip.
    """
    at = _find_end(source)
    mark, disk, first_disk, here, count, size, offset, _ = END.unpack(source.read(at, END.size))
    if mark == END_MARK and at == 0:
        raise NotACheckpoint("an empty zip", hint="save the checkpoint again")
    if disk or first_disk or here != count:
        ambiguous("one part of a zip over several disks")
    end = End(count, offset, size)
    locator = source.read(at - LOCATOR.size, LOCATOR.size) if at >= LOCATOR.size else b""
    if locator.startswith(LOCATOR_MARK):
        at, end = _read_end64(source, at - LOCATOR.size, locator, end)
    elif count == FULL16 or FULL32 in (size, offset):
        ambiguous("the zip64 end record is missing")
    if end.offset + end.size != at:
        ambiguous("the zip directory does not end where the end record begins")
    if end.total * CENTRAL.size > end.size:
        ambiguous("the end record counts more entries than the zip directory can hold")
    return end


def _find_end(source: Source) -> int:
    """The offset of the one end record, which has no comment and ends the file."""
    start = max(0, source.size - END.size - FULL16)
    tail = source.read(start, source.size - start)
    at = tail.rfind(END_MARK)
    if at < 0:
        raise Truncated(f"no zip end record: the file is cut at {source.size:,} bytes", hint=AGAIN)
    end = _end_of(tail, at)
    if at + END.size > len(tail):
        raise Truncated(
            f"the file is cut inside the zip end record, at {source.size:,} bytes", hint=AGAIN
        )
    if end > len(tail):
        raise Truncated("the file is cut inside the comment of the zip", hint=AGAIN)
    if end < len(tail):
        ambiguous(f"{len(tail) - end:,} bytes after the end of the zip")
    if at + END.size != len(tail):
        ambiguous(f"a zip comment of {len(tail) - at - END.size:,} bytes")
    earlier = re.finditer(END_MARK, tail[:at]) if tail.find(END_MARK) < at else ()
    if any(_rivals(tail, match.start(), start) for match in earlier):
        ambiguous("two zip end records")
    return start + at


def _rivals(tail: bytes, at: int, start: int) -> bool:
    """Whether a reader could take the earlier mark at `at` for the end record: its comment ends
    the file, or would pass its end while the other numbers are sound. Four bytes of a user's
    text that happen to be a mark are neither.
    """
    end = _end_of(tail, at)
    if end <= len(tail):
        return end == len(tail)
    _, disk, first_disk, here, count, size, offset, _ = END.unpack_from(tail, at)
    if disk or first_disk or here != count:
        return False
    return FULL32 in (size, offset) or offset + size <= start + at


def _end_of(tail: bytes, at: int) -> int:
    """Where the end record at `at` ends, its comment included."""
    length = tail[at + 20 : at + 22]
    return at + END.size + (int.from_bytes(length, "little") if len(length) == 2 else 0)


def _read_end64(source: Source, locator_at: int, locator: bytes, small: End) -> tuple[int, End]:
    """The zip64 end record, which must lie right before its locator and agree with `small`."""
    _, disk, at, disks = LOCATOR.unpack(locator)
    if disk or disks != 1 or at + END64.size != locator_at:
        ambiguous("the zip64 locator does not point at the record before it")
    mark, size, _, _, *rest = END64.unpack(source.read(at, END64.size))
    disk, first_disk, here, count, cd_size, cd_offset = rest
    if mark != END64_MARK or size != END64.size - 12 or disk or first_disk or here != count:
        ambiguous("the zip64 end record is malformed")
    big = End(count, cd_offset, cd_size)
    full = End(FULL16, FULL32, FULL32)
    if any(s not in (b, f) for s, b, f in zip(small, big, full, strict=True)):
        ambiguous("the zip and the zip64 end record disagree")
    return at, big


# --- the central directory -------------------------------------------------------------------


def central_entries(directory: bytes, count: int) -> list[Entry]:
    """Its entries in their order there, data offsets still unknown (-1).

    Raises ZipAmbiguous, ZipEncrypted.
    """
    entries = []
    at = 0
    for _ in range(count):
        try:
            fields = _FIELDS.unpack_from(directory, at)
        except struct.error:
            ambiguous("the zip directory is cut")
        mark, flags, method, crc, packed, size, name_size, *more = fields
        extra_size, comment_size, disk, attributes, offset = more
        name_at = at + CENTRAL.size
        extra_at = name_at + name_size
        at = extra_at + extra_size + comment_size
        if mark != CENTRAL_MARK or at > len(directory):
            ambiguous("a malformed entry in the zip directory")
        raw_name = directory[name_at:extra_at]
        try:
            name = raw_name.decode()
        except UnicodeDecodeError:
            ambiguous("an entry name that is not UTF-8", repr(raw_name[:80]))
        if FULL32 in (size, packed, offset):
            extra = directory[extra_at : extra_at + extra_size]
            size, packed, offset = zip64_values(extra, (size, packed, offset), name)
        if packed != size or flags & ~USUAL_FLAGS or method or disk or attributes:
            _check_unusual(name, flags, method, packed == size, disk, attributes)
        entries.append(new_entry((offset, name, method, flags, crc, packed, size, -1)))
    if at != len(directory):
        ambiguous("the zip directory holds more than the end record counts")
    return entries


def central_span(directory: bytes, name: str) -> Span:
    """The bytes of the entry of that name, in a directory that `central_entries` has read."""
    wanted = name.encode()
    start = end = 0
    found = b""
    while found != wanted:
        start = end
        name_at = start + CENTRAL.size
        name_size, *others = _LENGTHS.unpack_from(directory, start + _LENGTHS_AT)
        found = directory[name_at : name_at + name_size]
        end = name_at + int(name_size + sum(others))
    return Span(start, end - start)


def _check_unusual(
    name: str, flags: int, method: int, one_size: bool, disk: int, attributes: int
) -> None:
    """What torch's own entries never have: refused, unless it is harmless."""
    if flags & REFUSED_FLAGS:
        what = "encrypted" if flags & _ENCRYPTED else "marked as patch data"
        raise ZipEncrypted(f"a zip entry is {what}", member=name, hint=REPACK)
    if method not in (STORED, DEFLATED):
        ambiguous(f"compression method {method}, which torch cannot read", name)
    if method == STORED and not one_size:
        ambiguous("an uncompressed entry with two sizes", name)
    if attributes >> 28 not in _MODES:
        raise PathEscape("a zip entry that is a link or special file", member=name, hint=REPACK)
    if disk:
        ambiguous("an entry on another disk", name)
