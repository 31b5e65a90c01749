"""Local headers, data and descriptors of a zip archive: they fill its bytes without a gap.

Knows: local headers, descriptors. Must not know: end records, torch's meanings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct

from ckptool.errors import CkptError, Truncated, ZipAmbiguous
from ckptool.places import Source
from ckptool.spans import Span
from ckptool.zipcentral import Entry, new_entry
from ckptool.ziplayout import (
    DESCRIPTOR,
    DESCRIPTOR64,
    DESCRIPTOR_MARK,
    FULL32,
    HAS_DESCRIPTOR,
    LOCAL,
    LOCAL_MARK,
    ambiguous,
    zip64_values,
)

_FIELDS = Struct("<4s2x2H4x3I2H")  # of LOCAL, without version and times
_AHEAD, _SMALL = 1 << 16, 1 << 12
_LONGEST_EXTRA = (1 << 16) - 1  # of a local header: a 16-bit field
_ALIGNED = 64
_AT_ONCE = 1 << 19
_PADDING = 4 + _ALIGNED  # the extra field by which torch aligns data


class _ReadAhead:
    """Many headers in one read where entries are small; where they are not, one read each."""

    def __init__(self, source: Source, end: int, count: int) -> None:
        self.source = source
        self.end = end
        self.chunk = _chunk(end, count)
        self.start = 0
        self.data = b""

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from byte `offset`; offsets mostly grow."""
        at = offset - self.start
        if at < 0 or at + size > len(self.data):
            self.data = self.source.read(offset, max(size, min(self.chunk, self.end - offset)))
            self.start, at = offset, 0
        return self.data[at : at + size]


def _chunk(end: int, count: int) -> int:
    """Bytes of one read of many headers; 0: each is read by itself."""
    return _AHEAD if end < count * _SMALL else 0


def match_local_headers(
    source: Source, listed: list[Entry], end: int, start: int = 0
) -> tuple[Entry, ...]:
    """Entries whose headers, data and descriptors fill [`start`, `end`) without gap or overlap.

    Of a far source they are computed, where that is certain; those at hand are compared, and of the
    others each before its data is read. Of one that puts checks off, all of them are, in its `settle`. Raises ZipAmbiguous.
    """
    if source.far:
        computed = computed_entries(source, listed, end)
        if computed is not None:
            _watch(source, computed, end)
            return computed
    elif source.patient and not start and not _chunk(end, len(listed)):
        computed = computed_entries(source, listed, end)
        if computed is not None:
            _put_off(source, listed, end, computed)
            return computed
    source.expect(_around(listed))
    return _matched(source, listed, end, start)


def _around(entries: Iterable[Entry]) -> Iterator[Span]:
    """Each header, a descriptor before it and an extra field of usual length, up to the data
    where that is known.
    """
    for entry in entries:
        start = max(entry.header_offset - DESCRIPTOR64.size, 0)
        end = entry.header_offset + _about(entry) + _PADDING
        yield Span(start, (min(end, entry.data_offset) if entry.data_offset > 0 else end) - start)


def _watch(source: Source, computed: tuple[Entry, ...], end: int) -> None:
    """Have the source compare each header, and what follows the data, before the data is read."""

    def check(number: int) -> None:
        entry = computed[number]
        last = number + 1 == len(computed)
        whole = (end if last else computed[number + 1].header_offset) - entry.header_offset
        try:
            if whole <= _AT_ONCE:  # one journey for its header, its data and what follows
                source.read(entry.header_offset, whole)
            found = _matched(source, [entry], entry.header_offset + whole, entry.header_offset)
            if found != (entry,):
                ambiguous(
                    "from afar it cannot be told where its data begins: download it", entry.name
                )
        except CkptError as error:
            error.path = error.path or source.name
            raise

    source.watch([Span(entry.data_offset, entry.compressed_size) for entry in computed], check)


def _put_off(source: Source, listed: list[Entry], end: int, computed: tuple[Entry, ...]) -> None:
    """Have the source see to it that all headers say what was computed."""

    def same() -> bool:
        try:
            return _matched(source, listed, end) == computed
        except (ZipAmbiguous, Truncated):  # who begins again meets it anew
            return False

    last = Span(max(end - DESCRIPTOR64.size, 0), DESCRIPTOR64.size)
    source.put_off([*_around(computed), last], same)


def _matched(source: Source, listed: list[Entry], end: int, start: int = 0) -> tuple[Entry, ...]:
    """By their headers: one read an entry takes the descriptor of the entry before, too."""
    entries: list[Entry] = []
    ahead = _ReadAhead(source, end, len(listed))
    at = start  # where the data of the entry before ends
    tail = 0  # the flags of the entry before, if it has data: whether a descriptor follows
    told: tuple[bytes, int, int, int] | None = None  # what that descriptor says
    for entry in listed:
        offset, name, method, flags, crc, packed, size, _ = entry
        raw_name = name.encode()
        gap = offset - at
        if gap not in (0, 16, 24) or offset + LOCAL.size + len(raw_name) > end:
            ambiguous("bytes that no entry owns, or two entries own, before it", name)
        block = ahead.read(at, gap + LOCAL.size + len(raw_name))
        if (gap or tail & HAS_DESCRIPTOR) and (
            gap != DESCRIPTOR.size or DESCRIPTOR.unpack_from(block) != told
        ):
            _check_descriptor(entries, block[:gap])
        fields = _FIELDS.unpack_from(block, gap)
        mark, flags_here, method_here, *sums, name_size, extra_size = fields
        if mark != LOCAL_MARK or name_size != len(raw_name) or not block.endswith(raw_name):
            ambiguous("no local header of that name where the zip directory puts it", name)
        if flags_here != flags or method_here != method:
            ambiguous("the local header and the zip directory disagree", name)
        data = offset + LOCAL.size + name_size + extra_size
        if sums != [0, 0, 0] or not flags & HAS_DESCRIPTOR:
            _check_sums(source, entry, sums, Span(data - extra_size, extra_size))
        at = data + packed
        if at > end:
            ambiguous("an entry that reaches beyond the data of the zip", name)
        tail = flags if packed else 0
        told = (DESCRIPTOR_MARK, crc, packed, size) if flags & HAS_DESCRIPTOR else None
        entries.append(new_entry((offset, name, method, flags, crc, packed, size, data)))
    if end - at not in (0, 16, 24):
        ambiguous("bytes that no entry owns before the zip directory")
    if end - at or tail & HAS_DESCRIPTOR:
        _check_descriptor(entries, source.read(at, end - at))
    return tuple(entries)


def computed_entries(source: Source, listed: list[Entry], end: int) -> tuple[Entry, ...] | None:
    """The entries of an archive without gaps, by where the next one begins; None where that is
    not certain, or a header at hand says otherwise.

    Torch's writer puts data at multiples of 64, which tells a descriptor of 16 bytes from one
    of 24. Entries that overlap are not certain.
    """
    entries = []
    ends = [entry.header_offset for entry in listed[1:]] + [end]
    for entry, after in zip(listed, ends, strict=True):
        first = entry.header_offset + _about(entry)
        room = after - first - entry.compressed_size
        gaps = (16, 24) if entry.flags & HAS_DESCRIPTOR else (0,)
        found = [first + room - gap for gap in gaps if 0 <= room - gap <= _LONGEST_EXTRA]
        if len(gaps) > 1:
            found = [data for data in found if not data % _ALIGNED]
        header = Span(entry.header_offset, LOCAL.size)
        if len(found) != 1 or not entry.compressed_size:
            return None
        if source.near(header) and found[0] + entry.compressed_size != data_end(source, entry):
            return None
        entries.append(entry._replace(data_offset=found[0]))
    return tuple(entries)


def _about(entry: Entry) -> int:
    """Bytes of a local header without its extra field."""
    return LOCAL.size + len(entry.name.encode())


def data_end(source: Source, entry: Entry) -> int:
    """Where the data of one entry ends, by its local header, of which nothing is checked."""
    *_, name_size, extra_size = LOCAL.unpack(source.read(entry.header_offset, LOCAL.size))
    return entry.header_offset + LOCAL.size + int(name_size + extra_size) + entry.compressed_size


def _check_sums(source: Source, entry: Entry, sums: list[int], extra: Span) -> None:
    """The CRC and sizes of a local header; with a descriptor, each may be left at zero."""
    crc, packed, size = sums
    if FULL32 in (size, packed):
        field = source.read(extra.offset, extra.size)
        size, packed = zip64_values(field, (size, packed), entry.name)
    true = (entry.crc, entry.compressed_size, entry.size)
    late = entry.flags & HAS_DESCRIPTOR
    if any(f != t and (f or not late) for f, t in zip((crc, packed, size), true, strict=True)):
        ambiguous("the local header and the zip directory give different sizes", entry.name)


def _check_descriptor(entries: list[Entry], data: bytes) -> None:
    """`data` lies between the end of the last entry's data and the next header."""
    if not entries or not entries[-1].flags & HAS_DESCRIPTOR:
        ambiguous("bytes that no entry owns after it", entries[-1].name if entries else None)
    entry = entries[-1]
    layout = DESCRIPTOR64 if len(data) == DESCRIPTOR64.size else DESCRIPTOR
    expected = (DESCRIPTOR_MARK, entry.crc, entry.compressed_size, entry.size)
    if not data or layout.unpack(data) != expected:
        ambiguous("a missing or different data descriptor", entry.name)
