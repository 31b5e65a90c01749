"""Zip archives read so strictly that no two readers can disagree about them (Rule Z).

Knows: what an archive is as a whole, contents of records. Must not know: torch's meanings.
`zipfile` is not used: it and torch show different contents for several kinds of file, and it
refuses honest files without checksums.
`zipcentral` and `ziplocal` read the parts, `zipchain` files edited in place; `zipplan` plans
archives, `zipcut` looks for what is left of a cut one.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ckptool.errors import CkptError, CrcMismatch, LimitExceeded, ZipAmbiguous
from ckptool.limits import DEFAULT, Limits
from ckptool.places import Source
from ckptool.spans import Span
from ckptool.zipcentral import AGAIN, Entry, central_entries, find_directory
from ckptool.ziplayout import DEFLATED, DESCRIPTOR64, LOCAL, REPACK
from ckptool.ziplocal import data_end, match_local_headers
from ckptool.zipnames import check_names

__all__ = ["EDITED", "Directory", "Entry", "read_directory", "read_entry"]

EDITED = "data.pkl"
"""The one record that an in-place edit replaces."""


class Records(Mapping[str, Entry]):
    """Entries by their name inside the folder `top`, in file order; folders are none."""

    __slots__ = ("_entries", "_lead")

    def __init__(self, top: str, entries: Iterable[Entry]) -> None:
        self._lead = f"{top}/"
        self._entries = {entry.name: entry for entry in entries if entry.name[-1] != "/"}

    def __getitem__(self, name: str) -> Entry:
        return self._entries[self._lead + name]

    def __contains__(self, name: object) -> bool:
        return f"{self._lead}{name}" in self._entries

    def find(self, name: str) -> Entry | None:
        """The entry of that very name."""
        return self._entries.get(self._lead + name)

    def __iter__(self) -> Iterator[str]:
        return (name[len(self._lead) :] for name in self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Directory(NamedTuple):
    """All entries in file order; `records` finds them by their name inside the folder `top`.

    `central` is the span of the central directory. A file that was edited in place has
    `links`, the sizes of the files it once was, and `older`, their entries of data.pkl, both
    oldest first; `entries` then hold the newest data.pkl in the place of the oldest.
    """

    top: str
    entries: tuple[Entry, ...]
    records: Records
    central: Span
    links: tuple[int, ...] = ()
    older: tuple[Entry, ...] = ()


def read_directory(source: Source, limits: Limits = DEFAULT) -> Directory:
    """Every entry of the archive, checked against its local header.

    Raises Truncated, ZipAmbiguous, ZipEncrypted, PathEscape, LimitExceeded, and
    NotACheckpoint for an empty zip or one whose entries are in no folder.
    """
    try:
        return _read_directory(source, limits)
    except CkptError as error:
        error.path = error.path or source.name
        raise


def _read_directory(source: Source, limits: Limits) -> Directory:
    end = find_directory(source)
    if end.total > limits.entry_count:
        raise LimitExceeded(
            "entries", f"{end.total:,} zip entries, at most {limits.entry_count:,} are read"
        )
    central = source.read(end.offset, end.size)
    listed = central_entries(central, end.total)
    top = check_names([entry.name for entry in listed])
    in_order = sorted(listed)
    links: tuple[int, ...] = ()
    older: tuple[Entry, ...] = ()
    if _is_edited(source, in_order, f"{top}/{EDITED}", end.offset):
        from ckptool.zipchain import unfold

        entries, links, older = unfold(source, end, central, listed)
    else:
        entries = match_local_headers(source, in_order, end.offset)
    records = Records(top, entries)
    return Directory(top, entries, records, Span(end.offset, end.size), links, older)


def _is_edited(source: Source, in_order: list[Entry], edited: str, end: int) -> bool:
    """Whether data.pkl comes last and after a gap that no descriptor fills.

    Both a strict archive and a chain of edits it cannot be: a base ends with a directory.
    """
    last = in_order[-1]
    if last.name != edited or last.header_offset + LOCAL.size > end:
        return False
    before = data_end(source, in_order[-2]) if len(in_order) > 1 else 0
    return last.header_offset - before > DESCRIPTOR64.size


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
            hint=AGAIN,
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
            hint=AGAIN,
        ) from error
    if len(result) != entry.size or not inflater.eof or inflater.unused_data:
        raise ZipAmbiguous(
            "a deflated entry that does not inflate to its recorded size",
            path=path,
            member=entry.name,
            hint=REPACK,
        )
    return result
