"""Zip archives that were edited in place: the one exception to Rule Z, and only its shape.

Knows: a base, which is a whole archive, followed by one new data.pkl and one directory that
says of everything else what the base's says, byte for byte; the base may be such a file.
Must not know: torch's meanings, why anybody edits.
"""

from __future__ import annotations

from ckptool.errors import LimitExceeded, NotACheckpoint, Truncated
from ckptool.places import Source
from ckptool.spans import Span
from ckptool.zipcentral import End, Entry, central_entries, central_span, find_directory
from ckptool.ziplayout import DESCRIPTOR64, STORED, USUAL_FLAGS, ambiguous
from ckptool.ziplocal import data_end, match_local_headers

MOST_LINKS = 8
ORDINARY = "an ordinary convert (with -o) writes it as one archive again"
_DIFFER = "two zip directories that differ in more than data.pkl"

Chain = tuple[tuple[Entry, ...], tuple[int, ...], tuple[Entry, ...]]


def unfold(source: Source, end: End, central: bytes, listed: list[Entry]) -> Chain:
    """(entries, sizes of the bases, entries of the older data.pkl), as `zips.Directory` has
    them, of an archive whose newest data.pkl lies behind all else in `listed`.

    Cost: two comparisons of the directory a link; local headers are matched once.
    Raises ZipAmbiguous unless it is exactly such a chain, LimitExceeded for a longer one.
    """
    newest = max(listed)
    rest = [entry for entry in listed if entry is not newest]
    behind = data_end(source, max(rest)) if rest else 0
    span = central_span(central, newest.name)
    before, after = central[: span.offset], central[span.end :]
    edits: list[Entry] = []
    while newest.header_offset - behind > DESCRIPTOR64.size:
        edits.append(_appended(source, newest, end))
        if len(edits) > MOST_LINKS:
            text = f"edited in place more than {MOST_LINKS} times"
            raise LimitExceeded("links", text, hint=ORDINARY)
        base = source.window(Span(0, newest.header_offset))
        end = _directory_of(base)
        if end.total != len(listed):
            ambiguous(_DIFFER, newest.name)
        newest = _replaced(base.read(end.offset, end.size), before, after, newest.name)
    entries = match_local_headers(base, sorted([*rest, newest]), end.offset)
    place = [entry.name for entry in entries].index(newest.name)
    edits.reverse()
    links = tuple(entry.header_offset for entry in edits)
    older = (entries[place], *edits[:-1])
    return (*entries[:place], edits[-1], *entries[place + 1 :]), links, older


def last_link(source: Source, around: tuple[bytes, bytes], name: str, count: int) -> Entry:
    """The entry `name` that was put behind a base whose directory of `count` entries reads as
    the last one, but for that entry between the two parts of `around`. The base is not read.

    Raises ZipAmbiguous unless it is so.
    """
    end = find_directory(source)
    if end.total != count:
        ambiguous(_DIFFER, name)
    entry = _replaced(source.read(end.offset, end.size), *around, name)
    return _appended(source, entry, end)


def _directory_of(base: Source) -> End:
    try:
        return find_directory(base)
    except (Truncated, NotACheckpoint) as error:
        ambiguous(f"no whole zip before the last data.pkl: {error.text}")


def _appended(source: Source, entry: Entry, end: End) -> Entry:
    """The record that an edit added: stored, with a descriptor, up to its directory."""
    if entry.method != STORED or entry.flags != USUAL_FLAGS or not entry.size:
        ambiguous("a data.pkl behind the end of a zip, and not as an edit in place writes it")
    return match_local_headers(source, [entry], end.offset, entry.header_offset)[0]


def _replaced(central: bytes, before: bytes, after: bytes, name: str) -> Entry:
    """The entry of data.pkl in the base's directory, the rest of which is as it is now."""
    middle = central[len(before) : len(central) - len(after)]
    if not (middle and central.startswith(before) and central.endswith(after)):
        ambiguous(_DIFFER, name)
    entry = central_entries(middle, 1)[0]
    if entry.name != name:
        ambiguous(_DIFFER, name)
    return entry
