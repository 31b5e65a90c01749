"""Zip archives read so strictly that no two readers can disagree about them (Rule Z).

Knows: zip records, their descriptors, the end records. Must not know: torch's meanings.
`zipfile` is not used: it and torch show different contents for several kinds of file, and it
refuses honest files without checksums.
`zipplan` plans archives, `zipcut` looks for what is left of a cut one.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import NamedTuple, NoReturn

from ckptool.errors import (
    CkptError,
    CrcMismatch,
    LimitExceeded,
    NotACheckpoint,
    Truncated,
    ZipAmbiguous,
    ZipEncrypted,
)
from ckptool.limits import DEFAULT, Limits
from ckptool.places import Source
from ckptool.spans import Span
from ckptool.ziplayout import (
    CENTRAL,
    CENTRAL_MARK,
    DEFLATED,
    DESCRIPTOR,
    DESCRIPTOR64,
    DESCRIPTOR_MARK,
    END,
    END64,
    END64_MARK,
    END_MARK,
    FULL16,
    FULL32,
    HAS_DESCRIPTOR,
    LOCAL,
    LOCAL_MARK,
    LOCATOR,
    LOCATOR_MARK,
    REPACK,
    STORED,
    zip64_values,
)
from ckptool.zipnames import check_names

_ENCRYPTED = 0x1 | 0x40 | 0x2000  # encrypted, strongly encrypted, headers masked
_PATCHED = 0x20
_MODES = (0, 0o10, 0o4)  # Unix file type: unset, regular file, folder

_USUAL_FLAGS = 0x808  # a descriptor follows, names are UTF-8
_AGAIN = "download or copy it again"


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


class Directory(NamedTuple):
    """All entries in file order; `records` finds them by their name inside the folder `top`."""

    top: str
    entries: tuple[Entry, ...]
    records: dict[str, Entry]


class _End(NamedTuple):
    """Where the central directory lies, from the end records."""

    total: int
    offset: int
    size: int


def read_directory(source: Source, limits: Limits = DEFAULT) -> Directory:
    """Every entry of the archive, checked against its local header.

    Raises Truncated, ZipAmbiguous, ZipEncrypted, PathEscape, LimitExceeded, and
    NotACheckpoint for an empty zip or one whose entries are in no folder.
    """
    try:
        end = _find_directory(source)
        if end.total > limits.entry_count:
            raise LimitExceeded(
                "entries", f"{end.total:,} zip entries, at most {limits.entry_count:,} are read"
            )
        listed = _central_entries(source.read(end.offset, end.size), end.total)
        top = check_names([entry.name for entry in listed])
        entries = _match_local_headers(source, sorted(listed), end.offset)
    except CkptError as error:
        error.path = error.path or source.name
        raise
    skip = len(top) + 1
    records = {entry.name[skip:]: entry for entry in entries if entry.name[-1] != "/"}
    return Directory(top, entries, records)


def _ambiguous(text: str, member: str | None = None, hint: str = REPACK) -> NoReturn:
    raise ZipAmbiguous(text, member=member, hint=hint)


# --- the end records -------------------------------------------------------------------------


def _find_directory(source: Source) -> _End:
    at = _find_end(source)
    mark, disk, first_disk, here, count, size, offset, _ = END.unpack(source.read(at, END.size))
    if mark == END_MARK and at == 0:
        raise NotACheckpoint("an empty zip", hint="save the checkpoint again")
    if disk or first_disk or here != count:
        _ambiguous("one part of a zip over several disks")
    end = _End(count, offset, size)
    locator = source.read(at - LOCATOR.size, LOCATOR.size) if at >= LOCATOR.size else b""
    if locator.startswith(LOCATOR_MARK):
        at, end = _read_end64(source, at - LOCATOR.size, locator, end)
    elif count == FULL16 or FULL32 in (size, offset):
        _ambiguous("the zip64 end record is missing")
    if end.offset + end.size != at:
        _ambiguous("the zip directory does not end where the end record begins")
    if end.total * CENTRAL.size > end.size:
        _ambiguous("the end record counts more entries than the zip directory can hold")
    return end


def _find_end(source: Source) -> int:
    """The offset of the one end record, which has no comment and ends the file."""
    start = max(0, source.size - END.size - FULL16)
    tail = source.read(start, source.size - start)
    at = tail.rfind(END_MARK)
    if at < 0:
        raise Truncated(f"no zip end record: the file is cut at {source.size:,} bytes", hint=_AGAIN)
    ends = [_end_of(tail, match.start()) for match in re.finditer(END_MARK, tail)]
    if at + END.size > len(tail):
        raise Truncated(
            f"the file is cut inside the zip end record, at {source.size:,} bytes", hint=_AGAIN
        )
    if ends[-1] > len(tail):
        raise Truncated("the file is cut inside the comment of the zip", hint=_AGAIN)
    if ends[-1] < len(tail):
        _ambiguous(f"{len(tail) - ends[-1]:,} bytes after the end of the zip")
    if at + END.size != len(tail):
        _ambiguous(f"a zip comment of {len(tail) - at - END.size:,} bytes")
    if any(end >= len(tail) for end in ends[:-1]):
        _ambiguous("two zip end records")
    return start + at


def _end_of(tail: bytes, at: int) -> int:
    """Where the end record at `at` ends, its comment included."""
    length = tail[at + 20 : at + 22]
    return at + END.size + (int.from_bytes(length, "little") if len(length) == 2 else 0)


def _read_end64(source: Source, locator_at: int, locator: bytes, small: _End) -> tuple[int, _End]:
    """The zip64 end record, which must lie right before its locator and agree with `small`."""
    _, disk, at, disks = LOCATOR.unpack(locator)
    if disk or disks != 1 or at + END64.size != locator_at:
        _ambiguous("the zip64 locator does not point at the record before it")
    mark, size, _, _, *rest = END64.unpack(source.read(at, END64.size))
    disk, first_disk, here, count, cd_size, cd_offset = rest
    if mark != END64_MARK or size != END64.size - 12 or disk or first_disk or here != count:
        _ambiguous("the zip64 end record is malformed")
    big = _End(count, cd_offset, cd_size)
    full = _End(FULL16, FULL32, FULL32)
    if any(s not in (b, f) for s, b, f in zip(small, big, full, strict=True)):
        _ambiguous("the zip and the zip64 end record disagree")
    return at, big


# --- the central directory -------------------------------------------------------------------


def _central_entries(directory: bytes, count: int) -> list[Entry]:
    """Its entries in their order there, data offsets still unknown (-1)."""
    entries = []
    at = 0
    for _ in range(count):
        try:
            fields = CENTRAL.unpack_from(directory, at)
        except struct.error:
            _ambiguous("the zip directory is cut")
        mark, _, _, flags, method, _, _, crc, packed, size, name_size, extra_size = fields[:12]
        comment_size, disk, _, attributes, offset = fields[12:]
        name_at = at + CENTRAL.size
        extra_at = name_at + name_size
        at = extra_at + extra_size + comment_size
        if mark != CENTRAL_MARK or at > len(directory):
            _ambiguous("a malformed entry in the zip directory")
        name = _decoded(directory[name_at:extra_at])
        if FULL32 in (size, packed, offset):
            extra = directory[extra_at : extra_at + extra_size]
            size, packed, offset = zip64_values(extra, (size, packed, offset), name)
        if packed != size or flags & ~_USUAL_FLAGS or method or disk or attributes:
            _check_unusual(name, flags, method, packed == size, disk, attributes)
        entries.append(Entry(offset, name, method, flags, crc, packed, size, -1))
    if at != len(directory):
        _ambiguous("the zip directory holds more than the end record counts")
    return entries


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        _ambiguous("an entry name that is not UTF-8", repr(raw[:80]))


def _check_unusual(
    name: str, flags: int, method: int, one_size: bool, disk: int, attributes: int
) -> None:
    """What torch's own entries never have: refused, unless it is harmless."""
    if flags & (_ENCRYPTED | _PATCHED):
        what = "encrypted" if flags & _ENCRYPTED else "marked as patch data"
        raise ZipEncrypted(f"a zip entry is {what}", member=name, hint=REPACK)
    if method not in (STORED, DEFLATED):
        _ambiguous(f"compression method {method}, which torch cannot read", name)
    if method == STORED and not one_size:
        _ambiguous("an uncompressed entry with two sizes", name)
    if disk or attributes >> 28 not in _MODES:
        _ambiguous("an entry that is a link or special file, or on another disk", name)


# --- the local headers -----------------------------------------------------------------------


_AHEAD, _SMALL = 1 << 16, 1 << 12


class _ReadAhead:
    """Many headers in one read where entries are small; where they are not, one read each."""

    def __init__(self, source: Source, end: int, count: int) -> None:
        self.source = source
        self.end = end
        self.chunk = _AHEAD if end < count * _SMALL else 0
        self.start = 0
        self.data = b""

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from byte `offset`; offsets mostly grow."""
        at = offset - self.start
        if at < 0 or at + size > len(self.data):
            self.data = self.source.read(offset, max(size, min(self.chunk, self.end - offset)))
            self.start, at = offset, 0
        return self.data[at : at + size]


def _match_local_headers(source: Source, listed: list[Entry], end: int) -> tuple[Entry, ...]:
    """Entries whose headers, data and descriptors fill [0, `end`) without gap or overlap.

    One read an entry takes the descriptor of the entry before and the header together.
    """
    entries: list[Entry] = []
    ahead = _ReadAhead(source, end, len(listed))
    at = 0  # where the data of the entry before ends
    tail = 0  # the flags of the entry before, if it has data: whether a descriptor follows
    for entry in listed:
        offset, name, method, flags, crc, packed, size, _ = entry
        raw_name = name.encode()
        gap = offset - at
        if gap not in (0, 16, 24) or offset + LOCAL.size + len(raw_name) > end:
            _ambiguous("bytes that no entry owns, or two entries own, before it", name)
        block = ahead.read(at, gap + LOCAL.size + len(raw_name))
        if gap or tail & HAS_DESCRIPTOR:
            _check_descriptor(entries, block[:gap])
        mark, _, flags_here, method_here, _, _, *sums, name_size, extra_size = LOCAL.unpack_from(
            block, gap
        )
        if mark != LOCAL_MARK or name_size != len(raw_name) or not block.endswith(raw_name):
            _ambiguous("no local header of that name where the zip directory puts it", name)
        if flags_here != flags or method_here != method:
            _ambiguous("the local header and the zip directory disagree", name)
        data = offset + LOCAL.size + name_size + extra_size
        if sums != [0, 0, 0] or not flags & HAS_DESCRIPTOR:
            _check_sums(source, entry, sums, Span(data - extra_size, extra_size))
        at = data + packed
        if at > end:
            _ambiguous("an entry that reaches beyond the data of the zip", name)
        tail = flags if packed else 0
        entries.append(Entry(offset, name, method, flags, crc, packed, size, data))
    if end - at not in (0, 16, 24):
        _ambiguous("bytes that no entry owns before the zip directory")
    if end - at or tail & HAS_DESCRIPTOR:
        _check_descriptor(entries, source.read(at, end - at))
    return tuple(entries)


def _check_sums(source: Source, entry: Entry, sums: list[int], extra: Span) -> None:
    """The CRC and sizes of a local header; with a descriptor, each may be left at zero."""
    crc, packed, size = sums
    if FULL32 in (size, packed):
        field = source.read(extra.offset, extra.size)
        size, packed = zip64_values(field, (size, packed), entry.name)
    true = (entry.crc, entry.compressed_size, entry.size)
    late = entry.flags & HAS_DESCRIPTOR
    if any(f != t and (f or not late) for f, t in zip((crc, packed, size), true, strict=True)):
        _ambiguous("the local header and the zip directory give different sizes", entry.name)


def _check_descriptor(entries: list[Entry], data: bytes) -> None:
    """`data` lies between the end of the last entry's data and the next header."""
    if not entries or not entries[-1].flags & HAS_DESCRIPTOR:
        _ambiguous("bytes that no entry owns after it", entries[-1].name if entries else None)
    entry = entries[-1]
    layout = DESCRIPTOR64 if len(data) == DESCRIPTOR64.size else DESCRIPTOR
    expected = (DESCRIPTOR_MARK, entry.crc, entry.compressed_size, entry.size)
    if not data or layout.unpack(data) != expected:
        _ambiguous("a missing or different data descriptor", entry.name)


# --- contents --------------------------------------------------------------------------------


def read_entry(source: Source, entry: Entry, limits: Limits = DEFAULT) -> bytes:
    """The bytes of a record, inflated if need be, checked against its CRC where recorded.

    Raises LimitExceeded before memory is spent, CrcMismatch when the bytes are damaged.
    """
    _check_limits(source, entry, limits)
    data = source.read(entry.data_offset, entry.compressed_size)
    if entry.method == DEFLATED:
        data = _inflated(data, entry, source.name)
    if entry.crc and zlib.crc32(data) != entry.crc:
        raise CrcMismatch(
            f"the bytes of '{entry.name}' do not have their recorded checksum",
            path=source.name,
            member=entry.name,
            hint=_AGAIN,
        )
    return data


def _check_limits(source: Source, entry: Entry, limits: Limits) -> None:
    biggest = max(entry.size, entry.compressed_size)
    if biggest > limits.pickle_bytes:
        text = f"a record of {biggest:,} bytes, at most {limits.pickle_bytes:,} are read"
        raise LimitExceeded("pickle-bytes", text, path=source.name, member=entry.name)
    ratio = entry.size / max(entry.compressed_size, 1)
    if entry.method == DEFLATED and entry.size > 1 << 20 and ratio > limits.inflate_ratio:
        text = f"a record that inflates {ratio:,.0f} times, at most {limits.inflate_ratio} is read"
        raise LimitExceeded("inflate-ratio", text, path=source.name, member=entry.name)


def _inflated(data: bytes, entry: Entry, path: str) -> bytes:
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        result = inflater.decompress(data, entry.size + 1)
    except zlib.error as error:
        raise CrcMismatch(
            f"the deflated bytes of '{entry.name}' are damaged: {error}",
            path=path,
            member=entry.name,
            hint=_AGAIN,
        ) from error
    if len(result) != entry.size or not inflater.eof or inflater.unused_data:
        raise ZipAmbiguous(
            "a deflated entry that does not inflate to its recorded size",
            path=path,
            member=entry.name,
            hint=REPACK,
        )
    return result
