"""torch's zip layout, planned to the byte: what PyTorchStreamWriter (miniz) would have written.

Knows: the layout of headers, padding, descriptors and end records. Must not know: torch's
meanings. Verified field by field against torch 2.13, see tests/test_zips.py: `.format_version`
is a promise that storages lie exactly like this.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from ckptool.crcs import joined
from ckptool.plans import Late, Literal, Part, total_size
from ckptool.ziplayout import (
    CENTRAL,
    CENTRAL_MARK,
    DESCRIPTOR,
    DESCRIPTOR64,
    DESCRIPTOR_MARK,
    END,
    END64,
    END64_MARK,
    END_MARK,
    FULL16,
    FULL32,
    LOCAL,
    LOCAL_MARK,
    LOCATOR,
    LOCATOR_MARK,
    ZIP64_FIELD,
)

_FLAGS = 0x0808  # names are UTF-8; sizes and CRC follow in a descriptor
_FLAGS_EMPTY = 0x0800
_MADE_BY, _NEEDED = 0x031E, 45  # in the zip64 end record only; elsewhere miniz leaves zeros
_FIELD_HEAD = struct.Struct("<2H")
_PADDING = struct.Struct("<2sH")


class Record(NamedTuple):
    """An entry to be written: full `name`, `parts` of together `size` bytes.

    `crc` of those bytes, 0 for "not recorded"; None: computed while they are written.
    """

    name: str
    parts: tuple[Part, ...]
    size: int
    crc: int | None


class _Awaited(NamedTuple):
    """The parts whose CRCs together are that of a record: their indexes and sizes."""

    needs: tuple[int, ...]
    sizes: tuple[int, ...]


class _Placed(NamedTuple):
    """A record and where its header goes: what its directory entry needs."""

    name: bytes
    size: int
    crc: int | None
    offset: int

    @property
    def wide(self) -> bool:
        """Whether the record needs zip64 fields."""
        return self.size >= FULL32 or self.offset >= FULL32

    @property
    def flags(self) -> int:
        return _FLAGS if self.size else _FLAGS_EMPTY


class _Layout:
    """Parts in order, neighbouring literals merged, and the offset reached."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.at = 0
        self._pending: list[bytes] = []

    def add(self, part: Part) -> None:
        self.at += part.size
        if isinstance(part, Literal):
            self._pending.append(part.data)
        else:
            self.flush()
            self.parts.append(part)

    def flush(self) -> None:
        data = b"".join(self._pending)
        self._pending.clear()
        if data:
            self.parts.append(Literal(data))

    def last(self) -> int:
        """The index of the part added last."""
        return len(self.parts) - 1


def plan_zip(records: Sequence[Record], alignment: int = 64) -> tuple[Part, ...]:
    """The parts of an archive of these records, data at multiples of `alignment` bytes.

    Raises ValueError when sizes do not add up, or when a record without a CRC is made of
    literals and other parts.
    """
    if not 1 <= alignment <= FULL16:
        raise ValueError(f"alignment {alignment} is not in 1..{FULL16}")
    layout = _Layout()
    placed: list[_Placed] = []
    late: dict[int, _Awaited] = {}  # by record number
    known: dict[Any, Any] = {}  # what equal records share
    for number, record in enumerate(records):
        crc = _known_crc(record)
        entry = _Placed(record.name.encode("utf-8"), record.size, crc, layout.at)
        placed.append(entry)
        layout.add(Literal(_local_header(entry, alignment)))
        for part in record.parts:
            layout.add(part)
        if crc is None:
            count, end = len(record.parts), layout.last() + 1
            sizes = tuple([part.size for part in record.parts])
            sizes = known.setdefault(sizes, sizes)
            late[number] = _Awaited(tuple(range(end - count, end)), sizes)
        if record.size:
            layout.add(_descriptor_part(entry, late.get(number), known))
    layout.add(_directory_part(tuple(placed), layout.at, tuple(late.values())))
    layout.flush()
    return tuple(layout.parts)


def plan_append(
    record: Record, at: int, before: bytes, after: bytes, count: int, alignment: int = 64
) -> bytes:
    """What goes behind an archive of `at` bytes to replace one of its `count` entries: the
    record (all literals), and the directory anew, `before` and `after` being what it holds
    around the replaced entry.
    """
    crc = _known_crc(record)
    entry = _Placed(record.name.encode("utf-8"), record.size, crc, at)
    pieces = [_local_header(entry, alignment)]
    pieces += [part.data for part in record.parts if isinstance(part, Literal)]
    pieces.append(_descriptor((crc or 0,), size=entry.size, wide=entry.wide))
    start = at + sum(map(len, pieces))
    directory = before + _central(entry, crc or 0) + after
    return b"".join((*pieces, directory, _end_records(count, len(directory), start)))


class Expected(NamedTuple):
    """What torch writes around the bytes of one record."""

    header: bytes
    directory: bytes


def expected(name: str, size: int, crc: int, offset: int, alignment: int = 64) -> Expected:
    """Local header and directory entry of a record whose header stands at byte `offset`."""
    entry = _Placed(name.encode("utf-8"), size, crc, offset)
    return Expected(_local_header(entry, alignment), _central(entry, crc))


def expected_end(count: int, size: int, at: int) -> bytes:
    """The end records behind a directory of `count` entries in `size` bytes from byte `at`."""
    return _end_records(count, size, at)


def _known_crc(record: Record) -> int | None:
    if total_size(record.parts) != record.size:
        raise ValueError(f"the parts of '{record.name}' do not have {record.size} bytes")
    if record.crc is not None:
        return record.crc
    literals = [part.data for part in record.parts if isinstance(part, Literal)]
    if len(literals) == len(record.parts):
        return zlib.crc32(b"".join(literals))
    if literals:
        raise ValueError(f"'{record.name}' has no CRC and literals among other parts")
    return None


def _zip64(size: int, packed: int, offset: int) -> bytes:
    """The zip64 field: sizes where `size` needs it, the offset where that does."""
    if size < FULL32 and offset < FULL32:
        return b""
    values = ([size, packed] if size >= FULL32 else []) + ([offset] if offset >= FULL32 else [])
    body = struct.pack(f"<{len(values)}Q", *values)
    return _FIELD_HEAD.pack(ZIP64_FIELD, len(body)) + body


def _local_header(entry: _Placed, alignment: int) -> bytes:
    field = _zip64(entry.size, 0, entry.offset)
    start = entry.offset + LOCAL.size + len(entry.name) + len(field) + _PADDING.size
    padding = -start % alignment
    extra = field + _PADDING.pack(b"FB", padding) + b"Z" * padding
    zeros = (0,) * 6  # method, time, date, CRC and both sizes
    head = LOCAL.pack(LOCAL_MARK, 0, entry.flags, *zeros, len(entry.name), len(extra))
    return head + entry.name + extra


def _descriptor_part(entry: _Placed, awaited: _Awaited | None, known: dict[Any, Any]) -> Part:
    if awaited is None:
        return Literal(_descriptor((entry.crc or 0,), size=entry.size, wide=entry.wide))
    layout = DESCRIPTOR64 if entry.wide else DESCRIPTOR
    fill = _LateDescriptor(awaited.sizes, entry.size, entry.wide)
    return Late(layout.size, known.setdefault(fill, fill), awaited.needs)


class _LateDescriptor(NamedTuple):
    """What fills a descriptor: a third of a `partial`, of which a plan may have a hundred thousand."""

    sizes: tuple[int, ...]
    size: int
    wide: bool

    def __call__(self, crcs: tuple[int, ...]) -> bytes:
        return _descriptor((joined(crcs, self.sizes),), size=self.size, wide=self.wide)


def _descriptor(crcs: tuple[int, ...], *, size: int, wide: bool) -> bytes:
    layout = DESCRIPTOR64 if wide else DESCRIPTOR
    return layout.pack(DESCRIPTOR_MARK, crcs[0], size, size)


def _directory_part(placed: tuple[_Placed, ...], at: int, late: Sequence[_Awaited]) -> Part:
    sizes = tuple([row.sizes for row in late])
    needs = tuple([index for row in late for index in row.needs])
    fill = partial(_directory, sizes=sizes, placed=placed, at=at)
    if not needs:
        return Literal(fill(()))
    return Late(len(fill((0,) * len(needs))), fill, needs)


def _directory(
    crcs: tuple[int, ...], *, sizes: tuple[tuple[int, ...], ...], placed: tuple[_Placed, ...],
    at: int,
) -> bytes:  # fmt: skip
    """The central directory at offset `at` and the end records; `crcs` of the parts of those
    unknown, of `sizes` bytes.
    """
    known = iter(crcs)
    awaited = iter([joined(tuple(islice(known, len(row))), row) for row in sizes])
    entries = [
        _central(entry, next(awaited) if entry.crc is None else entry.crc) for entry in placed
    ]
    directory = b"".join(entries)
    return directory + _end_records(len(placed), len(directory), at)


def _central(entry: _Placed, crc: int) -> bytes:
    field = _zip64(entry.size, entry.size, entry.offset)
    size = min(entry.size, FULL32)
    sizes = (crc, size, size, len(entry.name), len(field))
    place = (0, 0, 0, 0, min(entry.offset, FULL32))  # comment, disk, attributes, header
    head = CENTRAL.pack(CENTRAL_MARK, 0, 0, entry.flags, 0, 0, 0, *sizes, *place)
    return head + entry.name + field


def _end_records(count: int, size: int, at: int) -> bytes:
    """The zip64 pair is written always, needed or not (miniz)."""
    totals = (count, count, size, at)
    small = min(count, FULL16)
    end64 = END64.pack(END64_MARK, END64.size - 12, _MADE_BY, _NEEDED, 0, 0, *totals)
    locator = LOCATOR.pack(LOCATOR_MARK, 0, at + size, 1)
    sizes = (min(size, FULL32), min(at, FULL32))
    return end64 + locator + END.pack(END_MARK, 0, 0, small, small, *sizes, 0)
