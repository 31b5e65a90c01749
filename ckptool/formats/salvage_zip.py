"""What is left of a damaged zip archive: records found by the directory where that can be read,
else by their own headers, and the tensors that they hold.

Knows: which of two contradicting places the checksum speaks for. Must not know: verbs.
The directory counts first, as in torch. No record is taken on the word of a damaged header.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple

from ckptool.checkpoint import DType, Piece
from ckptool.errors import CkptError, ZipAmbiguous
from ckptool.formats.assemble import assemble, walk_checked
from ckptool.formats.salvaged import Remains, unreadable
from ckptool.formats.torch_pickle import Located, TensorReader
from ckptool.limits import Limits
from ckptool.places import Source
from ckptool.spans import Span
from ckptool.zipcentral import REFUSED_FLAGS, central_entries, find_directory
from ckptool.zipcut import walk_entries
from ckptool.ziplayout import (
    CENTRAL,
    CENTRAL_MARK,
    DEFLATED,
    END,
    END64,
    END_MARK,
    FULL16,
    LOCAL,
    LOCAL_MARK,
    LOCATOR,
    STORED,
)
from ckptool.ziplocal import match_local_headers
from ckptool.zipnames import check_names
from ckptool.zips import Entry, read_directory, read_entry

NAME = "torch-zip"
_MOST_BROKEN = 64  # more entries than these with a wrong header are no accident
_CHUNK = 1 << 20
_FIELDS = 28  # bytes of a zip64 field of the directory with all it can hold


class Records(NamedTuple):
    """Records by their names in the folder; `lost` says of others what became of them, `gone` of
    those that nothing is seen of.
    """

    found: dict[str, Entry]
    lost: dict[str, str]
    gone: str = "not in the file"


def remains(source: Source, limits: Limits) -> Remains:
    """The tensors of an archive that cannot be read strictly.

    Raises CkptError when the pickle that names them is not whole, or two readers could see two.
    """
    records = find_records(source, limits)
    entry = _find(records, "data.pkl")
    if entry is None:
        raise unreadable(records.lost.get("data.pkl", "its data.pkl is not in what is left"))
    if any(_find(records, name) for name in ("constants.pkl", ".data/extern_modules")):
        raise unreadable("not a plain state_dict file")
    data = read_entry(source, entry, limits)
    walked = walk_checked(data, 0, limits, "data.pkl")
    encoding = "swapped" if _is_big_endian(source, records, limits) else "stored"
    lost: dict[str, str] = {}

    def resolve(key: str, dtype: DType, count: int) -> Located:
        located = _located(source, records, key, encoding, count * dtype.size_bytes)
        if isinstance(located, str):
            lost[key] = located
            return (), None
        return located

    checkpoint = assemble(
        source, NAME, walked, TensorReader(resolve, limits), limits,
        traits=frozenset(("salvaged", *(("big-endian",) if encoding == "swapped" else ()))),
    )  # fmt: skip
    return Remains(checkpoint, lost)


def _located(source: Source, records: Records, key: str, encoding: str, size: int) -> Located | str:
    """Where a storage lies, or what became of it."""
    entry = _find(records, f"data/{key}")
    if entry is None:
        return records.lost.get(f"data/{key}", records.gone)
    if entry.size != size:
        return f"{entry.size:,} bytes where its tensors need {size:,}"
    if entry.method == DEFLATED:
        encoding = "deflated" if encoding == "stored" else "deflated-swapped"
    span = source.absolute(Span(entry.data_offset, entry.compressed_size))
    return ((Piece(0, span, encoding),) if entry.size else ()), entry.crc or None


def _find(records: Records, name: str) -> Entry | None:
    if name in records.found:
        return records.found[name]
    lower = name.lower()
    return next((entry for key, entry in records.found.items() if key.lower() == lower), None)


def _is_big_endian(source: Source, records: Records, limits: Limits) -> bool:
    """A damaged record still tells by its length."""
    entry = _find(records, "byteorder")
    if entry is None:
        return False
    try:
        return read_entry(source, entry, limits) == b"big"
    except CkptError:
        return entry.size == len(b"big")


# -- records -----------------------------------------------------------------------------------
def find_records(source: Source, limits: Limits) -> Records:
    """All records that can be placed. Raises CkptError where names are doubled or escape, or
    more than one archive lies in the file.
    """
    try:
        end = find_directory(source)
        listed = central_entries(source.read(end.offset, end.size), end.total)
        top = check_names([entry.name for entry in listed])
    except CkptError:
        return _before_a_tail(source, limits) or _by_headers(source)
    found, lost = _by_directory(source, sorted(listed), end.offset, len(top) + 1)
    walk = walk_entries(source) if lost else None
    # One wrong place in the directory leaves its neighbours no room either. Where the records end
    # before the directory, the file was edited in place: what they call data.pkl is an old one.
    if walk is not None and walk.end == end.offset:
        for entry in walk.entries:
            name = entry.name[len(top) + 1 :]
            if name in lost and proven(source, entry):
                found[name] = entry
                del lost[name]
    return Records(found, lost)


def _by_directory(
    source: Source, listed: list[Entry], end: int, skip: int
) -> tuple[dict[str, Entry], dict[str, str]]:
    """Entries that lie where the directory puts them, or near there; what became of the others."""
    found: dict[str, Entry] = {}
    lost: dict[str, str] = {}
    bounds = [*(entry.header_offset for entry in listed[1:]), end]
    broken = 0
    for entry, bound in zip(listed, bounds, strict=True):
        exact = _exact(source, entry, bound)
        broken += exact is None
        if broken > _MOST_BROKEN:
            raise unreadable("too many entries do not lie where the zip directory puts them")
        placed = exact or _best(source, entry, bound)
        if placed is None:
            lost[entry.name[skip:]] = "its header is damaged and no place for it has its checksum"
            continue
        found[entry.name[skip:]] = placed
        if exact is None and placed.name != entry.name:
            found.setdefault(placed.name[skip:], placed)
    if not broken and listed[0].header_offset:
        raise ZipAmbiguous("bytes before the first record, and no record is damaged")
    return found, lost


def _exact(source: Source, entry: Entry, bound: int) -> Entry | None:
    """The entry, when its header, its data and its descriptor fill the bytes up to `bound`."""
    try:
        return match_local_headers(source, [entry], bound, entry.header_offset)[0]
    except CkptError:
        return None


def _best(source: Source, entry: Entry, bound: int) -> Entry | None:
    """An entry that its header contradicts: what the checksum speaks for."""
    return next((row for row in _candidates(source, entry, bound) if proven(source, row)), None)


def _candidates(source: Source, entry: Entry, bound: int) -> Iterator[Entry]:
    """Where an entry's data could lie, by its header and by the entry behind it; at last what
    the header itself says of the record.
    """
    at = entry.header_offset
    if at + LOCAL.size > bound or bound > source.size:
        return
    header = LOCAL.unpack(source.read(at, LOCAL.size))
    starts = [at + LOCAL.size + header[9] + header[10]]
    starts += [bound - entry.compressed_size - behind for behind in (16, 24, 0)]
    name_at = at + LOCAL.size
    name = entry.name
    if starts[0] <= bound:
        name = source.read(name_at, header[9]).decode("utf-8", "backslashreplace")
    for start in dict.fromkeys(starts):
        if name_at <= start <= start + entry.compressed_size <= bound:
            yield entry._replace(data_offset=start, name=name)
            yield entry._replace(data_offset=start)
    walk = walk_entries(source.window(Span(at, bound - at)))
    for row in walk.entries[:1]:
        yield row._replace(header_offset=at, data_offset=at + row.data_offset)


def proven(source: Source, entry: Entry) -> bool:
    """Whether the bytes of an entry have the checksum and the size recorded for them."""
    if not entry.crc or entry.method not in (STORED, DEFLATED):
        return not entry.size and not entry.compressed_size
    crc = size = 0
    try:
        for chunk in _contents(source, entry):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
            if size > entry.size:
                return False
    except (zlib.error, CkptError):
        return False
    return (crc, size) == (entry.crc, entry.size)


def _contents(source: Source, entry: Entry) -> Iterator[bytes]:
    span = Span(entry.data_offset, entry.compressed_size)
    inflater = zlib.decompressobj(-zlib.MAX_WBITS) if entry.method == DEFLATED else None
    for offset in range(span.offset, span.end, _CHUNK):
        data = source.read(offset, min(_CHUNK, span.end - offset))
        while data and inflater is not None and not inflater.eof:
            yield inflater.decompress(data, _CHUNK)
            data = inflater.unconsumed_tail
        if inflater is None:
            yield data


def _before_a_tail(source: Source, limits: Limits) -> Records | None:
    """The records of an archive that is whole, but with bytes behind its end; None: it is not."""
    start = max(0, source.size - END.size - FULL16)
    tail = source.read(start, source.size - start)
    stop = start + tail.rfind(END_MARK) + END.size
    if stop < start + END.size or stop >= source.size:
        return None
    try:
        directory = read_directory(source.window(Span(0, stop)), limits)
    except CkptError:
        return None
    return Records(dict(directory.records), {})


def _by_headers(source: Source) -> Records:
    """Records as they follow each other from byte 0, where no directory can be read."""
    walk = walk_entries(source)
    names = [entry.name for entry in walk.entries]
    if not names:
        raise unreadable("no record of it can be found")
    top = check_names([*names, *([walk.cut.name] if walk.cut else [])])
    _refuse_more(source, walk.end, names)
    skip = len(top) + 1
    readable = [entry for entry in walk.entries if not entry.flags & REFUSED_FLAGS]
    readable = [entry for entry in readable if entry.method in (STORED, DEFLATED)]
    found = {entry.name[skip:]: entry for entry in readable}
    names = [name[skip:] for name in names]
    lost = dict.fromkeys(names, "packed or encrypted in a way that torch cannot read")
    lost = {name: why for name, why in lost.items() if name not in found}
    if walk.cut is not None:
        return Records(found, {**lost, walk.cut.name[skip:]: "cut"}, "cut off")
    after = source.read(walk.end, min(LOCAL.size, source.size - walk.end))
    if after.startswith(CENTRAL_MARK):
        return Records(found, lost)
    cut = len(after) < LOCAL.size or after.startswith(LOCAL_MARK)
    return Records(found, lost, "cut off" if cut else "behind a damaged header")


def _refuse_more(source: Source, end: int, names: list[str]) -> None:
    """Raise ZipAmbiguous when more than one directory lies behind the last record: another archive,
    or an edit in place that is not whole.
    """
    if source.read(end, min(4, source.size - end)) != CENTRAL_MARK:
        return
    most = sum(CENTRAL.size + _FIELDS + len(name.encode()) for name in names)
    most += END64.size + LOCATOR.size + END.size
    rest = source.read(end, min(most, source.size - end))
    if source.size - end > most or LOCAL_MARK in rest or rest.count(END_MARK) > 1:
        raise ZipAmbiguous("more than one zip directory, or bytes that none accounts for")
