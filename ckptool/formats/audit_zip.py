"""The bytes of an archive that no checksum covers: headers, padding, directory, end records.

Knows: torch's layout, which is exact, so that a changed bit in it shows. Must not know: verbs.
The archive has been read strictly: what is found here is read by no loader, but it was not
written like this, so the file is not what it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

from ckptool.errors import CkptError
from ckptool.formats.torch_zip import Archive
from ckptool.ziplayout import CENTRAL, LOCAL, STORED
from ckptool.zipplan import Expected, expected, expected_end
from ckptool.zips import Entry

_TIMES, _TIMES_AT = Struct("<2H"), 10  # of a local header; in the directory two bytes later
_LENGTHS, _LENGTHS_AT = Struct("<3H"), 28  # name, extra field and comment of a directory entry


class Oddity(NamedTuple):
    """A byte (`offset` in the file) that does not stand as it was written; `member` is the
    record it belongs to, None for the end of the archive.
    """

    member: str | None
    offset: int
    text: str


class _Row(NamedTuple):
    """One entry: what stands in front of its data and in the directory, what torch writes there."""

    entry: Entry
    header: bytes
    listed: bytes
    listed_at: int
    wanted: Expected


def odd_layout(archive: Archive) -> list[Oddity]:
    """What differs from torch's layout in an archive that torch wrote, most of whose records are
    laid out just so; in any other, where a header and the directory give two times.
    """
    count = stored = exact = 0
    times: list[Oddity] = []
    changed: list[Oddity] = []
    skip = len(archive.directory.top) + 1
    for row in _rows(archive):  # of a hundred thousand, one at a time
        count += 1
        times += _two_times(row, skip)
        if row.entry.method == STORED:
            stored += 1
            exact += row.header == row.wanted.header
            changed += _changed(row, skip)
    return times if 2 * exact <= stored else changed + _odd_end(archive, count)


def _rows(archive: Archive) -> Iterator[_Row]:
    source, central = archive.source, archive.directory.central
    by_name = {entry.name: entry for entry in archive.directory.entries}
    alignment = _alignment(archive)
    listing = source.read(central.offset, central.size)
    at = 0
    while at < len(listing):
        sizes = _LENGTHS.unpack_from(listing, at + _LENGTHS_AT)
        start = at + CENTRAL.size
        entry = by_name[listing[start : start + sizes[0]].decode()]
        end = start + sum(sizes)
        header = source.read(entry.header_offset, entry.data_offset - entry.header_offset)
        wanted = _wanted(entry, alignment)
        if header != wanted.header and archive.directory.links:
            wanted = _wanted(entry, 64)  # an edit in place aligns its pickle by itself
        yield _Row(entry, header, listing[at:end], central.offset + at, wanted)
        at = end


def _wanted(entry: Entry, alignment: int) -> Expected:
    return expected(entry.name, entry.size, entry.crc, entry.header_offset, alignment)


def _alignment(archive: Archive) -> int:
    """As the archive says, where it does (formats 2.2)."""
    try:
        text = archive.read(".storage_alignment") if archive.find(".storage_alignment") else b"64"
    except CkptError:
        return 64
    value = int(text) if text.isdigit() and len(text) < 6 else 64
    return value if 1 <= value <= 0xFFFF else 64


_ODD_HEADER = "its local header is not as torch writes it; no number of it is read from there"
_ODD_PADDING = (
    "the padding before its data is not as torch writes it; no number of it is read from there"
)


def _changed(row: _Row, skip: int) -> list[Oddity]:
    """The first byte of each part of an entry that is not torch's."""
    name, entry = row.entry.name[skip:], row.entry
    found = []
    at = _first_difference(row.header, row.wanted.header)
    if at is not None:
        padding = at >= LOCAL.size + len(entry.name.encode())
        text = _ODD_PADDING if padding else _ODD_HEADER
        found.append(Oddity(name, entry.header_offset + at, text))
    at = _first_difference(row.listed, row.wanted.directory)
    if at is not None:
        text = "its entry in the zip directory is not as torch writes it"
        found.append(Oddity(name, row.listed_at + at, text))
    return found


def _odd_end(archive: Archive, count: int) -> list[Oddity]:
    central = archive.directory.central
    wanted = expected_end(count, central.size, central.offset)
    here = archive.source.read(central.end, archive.source.size - central.end)
    at = _first_difference(here, wanted)
    if at is None:
        return []
    return [Oddity(None, central.end + at, "the zip end records are not as torch writes them")]


def _two_times(row: _Row, skip: int) -> list[Oddity]:
    here, there = _TIMES.unpack_from(row.header, _TIMES_AT), _TIMES.unpack_from(row.listed, 12)
    if here == there:
        return []
    text = "its local header and the zip directory give two times"
    return [Oddity(row.entry.name[skip:], row.entry.header_offset + _TIMES_AT, text)]


def _first_difference(here: bytes, wanted: bytes) -> int | None:
    if here == wanted:
        return None
    pairs = zip(here, wanted, strict=False)
    shorter = min(len(here), len(wanted))
    return next((at for at, (one, two) in enumerate(pairs) if one != two), shorter)
