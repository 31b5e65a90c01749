"""Zips byte by byte, so that each field can lie where it stands.

Knows: the zip format, and torch's layout. Must not know: what a lie is good for.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

LOCAL, CENTRAL, END, END64, LOCATOR = (
    b"PK\x03\x04",
    b"PK\x01\x02",
    b"PK\x05\x06",
    b"PK\x06\x06",
    b"PK\x06\x07",
)


def deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


@dataclass
class Entry:
    """One entry. `local` and `central` replace what the two headers would truly say.

    Their keys: name, flags, method, crc, packed, size; `central` also offset, extra, attributes.
    `packed` is what is stored instead of `data`; without `body` there is a directory row only.
    """

    name: str
    data: bytes = b""
    method: int = 0
    flags: int = 0
    packed: bytes | None = None
    aligned: bool = True
    described: bool = False
    body: bool = True
    local: dict[str, Any] = field(default_factory=dict)
    central: dict[str, Any] = field(default_factory=dict)

    def stored(self) -> bytes:
        if self.packed is not None:
            return self.packed
        return deflated(self.data) if self.method == 8 else self.data

    def told(self, lies: dict[str, Any]) -> dict[str, Any]:
        truth = {
            "name": self.name,
            "flags": self.flags,
            "method": self.method,
            "crc": zlib.crc32(self.data),
            "packed": len(self.stored()),
            "size": len(self.data),
            "extra": b"",
            "attributes": 0,
        }
        return truth | lies

    def local_bytes(self, at: int) -> bytes:
        """Header, padding to 64 bytes as torch does it, and what is stored."""
        told = self.told(self.local)
        name = told["name"].encode()
        extra = told["extra"]
        if self.aligned:
            gap = -(at + 30 + len(name) + len(extra) + 4) % 64
            extra += b"FB" + struct.pack("<H", gap) + b"Z" * gap
        head = _fields(told) + struct.pack("<HH", len(name), told.get("extra_size", len(extra)))
        out = LOCAL + struct.pack("<H", 0) + head + name + extra + self.stored()
        if self.described:
            true = self.told({})
            out += b"PK\x07\x08" + struct.pack("<III", true["crc"], true["packed"], true["size"])
        return out

    def central_bytes(self, at: int) -> bytes:
        told = self.told(self.central)
        name, extra = told["name"].encode(), told["extra"]
        sizes = struct.pack("<HHHHHI", len(name), len(extra), 0, 0, 0, told["attributes"])
        offset = struct.pack("<I", told.get("offset", at))
        return CENTRAL + b"\0\0\0\0" + _fields(told) + sizes + offset + name + extra


def _fields(told: dict[str, Any]) -> bytes:
    return struct.pack(
        "<HHHHIII",
        told["flags"],
        told["method"],
        0,
        0x21,
        told["crc"],
        told["packed"],
        told["size"],
    )


def bodies(entries: Iterable[Entry], out: bytearray, base: int = 0) -> list[int]:
    """Append the entries to `out`; where each begins."""
    at = []
    for entry in entries:
        at.append(len(out) - base)
        if entry.body:
            out += entry.local_bytes(len(out))
    return at


def directory(entries: Sequence[Entry], at: Sequence[int]) -> bytes:
    return b"".join(entry.central_bytes(here) for entry, here in zip(entries, at, strict=True))


def end(count: int, size: int, offset: int, comment: bytes = b"", disk: int = 0) -> bytes:
    """The record that closes a zip."""
    numbers = struct.pack("<HHHHIIH", disk, disk, count, count, size, offset, len(comment))
    return END + numbers + comment


def end64(count: int, size: int, offset: int) -> bytes:
    return END64 + struct.pack("<QHHIIQQQQ", 44, 0x31E, 45, 0, 0, count, count, size, offset)


def locator(at: int) -> bytes:
    return LOCATOR + struct.pack("<IQI", 0, at, 1)


def zipped(
    entries: Sequence[Entry],
    *,
    prefix: bytes = b"",
    base: int = 0,
    comment: bytes = b"",
    disk: int = 0,
    large: bool = True,
) -> bytes:
    """A whole zip; `large` writes the zip64 records that torch always writes."""
    out = bytearray(prefix)
    at = bodies(entries, out, base)
    start = len(out) - base
    out += directory(entries, at)
    size = len(out) - base - start
    if large:
        record = len(out) - base
        out += end64(len(entries), size, start) + locator(record)
    return bytes(out) + end(min(len(entries), 0xFFFF), size, start, comment, disk)
