"""Zips written and mutated field by field, checksums right where nothing else is asked.

Not Python's zipfile: it writes no lies.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib

from fuzz import bytewise, picklewise

_LOCAL = "<4s5H3I2H"  # signature version flags method time date crc packed size name extra
_CENTRAL = "<4s6H3I5H2I"
_END = "<4s4H2IH"
FIELDS = ("flags", "method", "crc", "packed", "size")
_NAMES = ("data.pkl", "DATA.PKL", "data/0", "data/1", "version", "byteorder", ".data/version",
          ".format_version", ".storage_alignment", "constants.pkl", "code/a.py", "../x", "data//0",
          ".data/serialization_id", "data/00", "data", "data/0/", "archive_format")  # fmt: skip


class Entry:
    """One record; `local` and `central` override fields of the headers."""

    def __init__(self, name, data, method=0):
        self.name, self.data, self.method = name, data, method
        self.local, self.central, self.extra = {}, {}, b""

    def packed(self):
        if self.method != 8:
            return self.data
        squeezer = zlib.compressobj(6, wbits=-15)
        return squeezer.compress(self.data) + squeezer.flush()

    def fields(self):
        packed = self.packed()
        return {"flags": 0, "method": self.method, "crc": zlib.crc32(self.data),
                "packed": len(packed), "size": len(self.data)}  # fmt: skip


def entries_of(data):
    """The entries of an honest zip, without their extras."""
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        return [Entry(i.filename, _read(z, i), i.compress_type) for i in z.infolist()]


def _read(archive, info):
    """Without the checksum, which some honest files have not."""
    with archive.open(info) as file:
        file._expected_crc = None
        return file.read()


def _fit(values):
    sizes = (0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
    return [value & most for value, most in zip(values, sizes, strict=True)]


def built(entries, end=None):
    """The bytes; `end` overrides count, size and offset of the directory."""
    out, central = bytearray(), bytearray()
    for entry in entries:
        name, at = entry.name.encode("utf-8", "surrogatepass"), len(out)
        flags, method, *sums = _fit([{**entry.fields(), **entry.local}[f] for f in FIELDS])
        head = (b"PK\3\4", 20, flags, method, 0, 33, *sums, len(name), len(entry.extra))
        out += struct.pack(_LOCAL, *head) + name + entry.extra + entry.packed()
        flags, method, *sums = _fit([{**entry.fields(), **entry.central}[f] for f in FIELDS])
        at = entry.central.get("offset", at) & 0xFFFFFFFF
        row = (b"PK\1\2", 20, 20, flags, method, 0, 33, *sums, len(name), 0, 0, 0, 0, 0, at)
        central += struct.pack(_CENTRAL, *row) + entry.central.get("name", name)[: len(name)]
    row = {"count": len(entries), "size": len(central), "offset": len(out), **(end or {})}
    count, size, offset = (
        row["count"] & 0xFFFF,
        row["size"] & 0xFFFFFFFF,
        row["offset"] & 0xFFFFFFFF,
    )
    return bytes(out + central) + struct.pack(_END, b"PK\5\6", 0, 0, count, count, size, offset, 0)


# -- ways ----------------------------------------------------------------------------------------
def _pickle(entries, dice):
    """The pickle, by opcode; its checksum is right."""
    for entry in entries:
        if entry.name.endswith(".pkl"):
            entry.data = picklewise.mutate(entry.data, dice)


def _contents(entries, dice):
    entry = dice.choice(entries)
    entry.data = bytewise.mutate(entry.data, dice)


def _rename(entries, dice):
    entry = dice.choice(entries)
    top = entry.name.split("/")[0]
    entry.name = dice.choice(
        (f"{top}/{dice.choice(_NAMES)}", dice.choice(_NAMES), entry.name.upper())
    )


def _exchange(entries, dice):
    one, two = dice.choice(entries), dice.choice(entries)
    one.data, two.data = two.data, one.data


def _drop(entries, dice):
    del entries[dice.randrange(len(entries))]


def _double(entries, dice):
    old = dice.choice(entries)
    entries.insert(dice.randrange(len(entries) + 1), Entry(old.name, old.data, old.method))


def _add(entries, dice):
    top = entries[0].name.split("/")[0]
    entries.append(
        Entry(
            f"{top}/{dice.choice(_NAMES)}",
            dice.choice((b"", b"1", b"little", b"big", b"64", b"3\n")),
        )
    )


def _move(entries, dice):
    entries.insert(dice.randrange(len(entries)), entries.pop(dice.randrange(len(entries))))


def _method(entries, dice):
    dice.choice(entries).method = dice.choice((0, 8, 8, 12))


def _lie(entries, dice):
    """A field of a header: in one of the two places or in both."""
    entry, field = dice.choice(entries), dice.choice((*FIELDS, "offset"))
    old = entry.fields().get(field, 0)
    value = dice.choice((old + 1, old - 1, old ^ 1, old ^ 8, *bytewise.ODD_NUMBERS))
    place = dice.randrange(3)
    if place != 0:
        entry.central[field] = value
    if place != 1 and field != "offset":
        entry.local[field] = value


def _extra(entries, dice):
    body = dice.randbytes(dice.randrange(0, 24))
    kind = dice.choice((0x0001, 0x4246, 0x5455, 0xD935))
    dice.choice(entries).extra = struct.pack("<HH", kind, len(body) + dice.choice((0, 0, 1))) + body


WAYS = (
    *(_pickle,) * 8, _contents, _rename, _exchange, _drop, _double, _add, _move, _method, _lie, _lie,
    _extra,
)  # fmt: skip


def rebuilt(data, dice):
    """An honest zip mutated and put together again, its checksums right (most of the time)."""
    entries = entries_of(data)
    for _ in range(dice.choice((1, 1, 1, 2))):
        if entries:
            dice.choice(WAYS)(entries, dice)
    end = {}
    if dice.random() < 0.03:
        end = {dice.choice(("count", "size", "offset")): dice.choice(bytewise.ODD_NUMBERS)}
    return built(entries, end)


def mutate(data, dice):
    """By records where it is an honest zip, else (and now and then) by bytes."""
    if dice.random() < 0.8:
        try:
            return rebuilt(data, dice)
        except Exception:  # zipfile raises many kinds on a zip that a fuzzer made
            pass
    return bytewise.mutate(data, dice)
