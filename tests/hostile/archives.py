"""Zips that two readers read differently, lie about themselves, or point outside."""

from __future__ import annotations

import struct

from hostile.blocks import BAD, SIX, STORED, TWO, entries, net, one, ordered, stored, stream, tensor
from hostile.cases import (
    AMBIGUOUS,
    CODE,
    DONE,
    ESCAPE,
    HEADER,
    NO,
    OTHER,
    OTHER_FILE,
    SAME,
    SIZES,
    TROUBLE,
    Case,
    Want,
    refused,
)  # fmt: skip
from hostile.zipbytes import Entry, bodies, directory, end, end64, locator, zipped

PICKLE = "archive/data.pkl"
LOCKED = refused("zip-encrypted")
CHECKSUM = refused("crc-mismatch")


def bad(**lies) -> bytes:
    return net(Entry(PICKLE, BAD, **lies))


def also(*last: Entry, first: tuple[Entry, ...] = (), **more) -> bytes:
    return net(first=first, last=last, **more)


def two_sets() -> tuple[bytearray, list[list[Entry]], list[list[int]]]:
    sets, out = [entries(BAD), entries()], bytearray()
    return out, sets, [bodies(rows, out) for rows in sets]


def two_directories() -> bytes:
    """The end record points at one directory; another lies where Python looks, just before it."""
    out, (evil, good), (evil_at, good_at) = two_sets()
    start = len(out)
    told = directory(evil, evil_at)
    decoy = directory(good, [at - len(told) for at in good_at])
    return bytes(out + told + decoy) + end(len(evil), len(told), start)


def two_locators() -> bytes:
    """The locator points at one record; another stands right before it (CVE-2025-8291)."""
    out, (evil, good), (evil_at, good_at) = two_sets()
    start, rows = len(out), directory(evil, evil_at)
    out += rows
    record = len(out)
    out += end64(len(evil), len(rows), start)
    decoy_start, decoy = len(out), directory(good, good_at)
    out += decoy + end64(len(good), len(decoy), decoy_start) + locator(record)
    return bytes(out) + end(0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)


def overlapping() -> bytes:
    rows = entries()
    at = bodies(rows, bytearray())
    first = next(i for i, row in enumerate(rows) if row.name == "archive/data/0")
    rows[first + 1].central = {"offset": at[first], "packed": 8, "size": 8}
    return zipped(rows)


def shifted() -> bytes:
    out = bytearray(net())
    at = out.index(b"archive/data/0") - 30
    out[at + 28 : at + 30] = b"\xff\xff"
    return bytes(out)


def crowded() -> bytes:
    extra = [Entry(f"archive/data/x{i}", body=False, central={"offset": 0}) for i in range(60_000)]
    return zipped([*entries(), *extra])


def backslashed() -> bytes:
    names = {"data.pkl": stream(), "data\\0": SIX, "data\\1": TWO, "version": b"3\n"}
    return zipped([Entry(f"archive\\{name}", data) for name, data in names.items()])


HUGE = struct.pack("<HHQQQ", 1, 24, 2**63, 2**63, 2**64 - 1)
FAR = {"packed": 0xFFFFFFFF, "size": 0xFFFFFFFF, "offset": 0xFFFFFFFF, "extra": HUGE}
BILLION = {"packed": 1 << 30, "size": 1 << 30}
LIED = {"size": 8}
SCRIPT = (
    Entry("archive/constants.pkl", stream(b")")),
    Entry(
        "archive/code/__torch__.py", b"class M(Module):\n  def forward(self, x):\n    return x\n"
    ),
)
SALTED = bytes(range(12)) + bytes(byte ^ 0x5A for byte in stream())
DECOYS = Entry("archive/.data.pkl", stream()), Entry("archive/.data/data.pkl", stream())
OTHER_ROOT = tuple(
    Entry(f"evil/{name}", data)
    for name, data in {"data.pkl": BAD, "data/0": SIX, "data/1": TWO, "version": b"3\n"}.items()
)

CASES = (
    Case("flag-encrypted", "the flag of encryption on plain data (CVE-2025-1945)", LOCKED,
         lambda: bad(flags=1)),
    Case("flag-patch", "the flags of patch data and strong encryption", LOCKED,
         lambda: bad(flags=0x60)),
    Case("password", "a zip with a password", LOCKED,
         lambda: net(Entry(PICKLE, stream(), flags=1, packed=SALTED))),
    Case("crc", "a wrong checksum of data.pkl (CVE-2025-10156)", CHECKSUM,
         lambda: bad(local={"crc": 0x12345678}, central={"crc": 0x12345678})),
    Case("local-name", "the two headers name different files (CVE-2025-1944)", AMBIGUOUS,
         lambda: bad(local={"name": "archive/xata.pkl"})),
    Case("local-size", "the two headers say different sizes", AMBIGUOUS,
         lambda: bad(local={"packed": 8, "size": 8})),
    Case("local-method", "one header says stored, the other deflated", AMBIGUOUS,
         lambda: bad(local={"method": 8})),
    Case("twice-evil-first", "two data.pkl, the first malicious", AMBIGUOUS,
         lambda: net(BAD, last=(Entry(PICKLE, stream()),))),
    Case("twice-evil-last", "two data.pkl, the last malicious", AMBIGUOUS,
         lambda: also(Entry(PICKLE, BAD))),
    Case("storage-twice", "two data/0: which weights load depends on the reader", AMBIGUOUS,
         lambda: also(Entry("archive/data/0", SIX[::-1]))),
    Case("capitals", "DATA.PKL before data.pkl: torch looks names up without case", AMBIGUOUS,
         lambda: also(first=(Entry("archive/DATA.PKL", BAD),))),
    Case("two-roots", "a second folder, first in the file", AMBIGUOUS,
         lambda: also(first=OTHER_ROOT)),
    Case("decoys", "harmless pickles under similar names beside a malicious one", CODE,
         lambda: net(BAD, last=DECOYS)),
    Case("directories", "two directories of one size", AMBIGUOUS, two_directories),
    Case("locators", "two zip64 records", AMBIGUOUS, two_locators),
    Case("appended", "a whole malicious zip after an honest one", AMBIGUOUS,
         lambda: zipped(entries(BAD), prefix=net())),
    Case("comment", "the comment is an end record of an empty zip", AMBIGUOUS,
         lambda: zipped(entries(BAD), comment=end(0, 0, 0))),
    Case("size-lie", "data.pkl inflates to more than it says", AMBIGUOUS,
         lambda: net(Entry(PICKLE, stream(), method=8, local=LIED, central=LIED))),
    Case("overlap", "two storages share bytes of the file", AMBIGUOUS, overlapping),
    Case("one-header", "60,000 entries that share one header", AMBIGUOUS, crowded, seconds=3),
    Case("offset-far", "an entry that begins after the end of the file", AMBIGUOUS,
         lambda: net(storages=STORED | {"0": Entry("archive/data/0", SIX,
                                                   central={"offset": 0x7FFFFFFF})})),
    Case("size-far", "a storage of 1 GiB in a file of 2 kB", AMBIGUOUS,
         lambda: net(one(tensor(stored(count=1 << 28), 0, (1 << 28,), (1,))),
                     {"0": Entry("archive/data/0", SIX, local=BILLION, central=BILLION)})),
    Case("extra-far", "an extra field that moves the data behind the end of the file", AMBIGUOUS, shifted),
    Case("size-2-63", "zip64 numbers of 2**63 and 2**64 - 1", AMBIGUOUS,
         lambda: net(storages=STORED | {"0": Entry("archive/data/0", SIX, central=FAR)})),
    Case("disk", "a zip that says it is the third of several", AMBIGUOUS,
         lambda: zipped(entries(), large=False, disk=3)),
    Case("prefix", "a script of 300 bytes before the zip", OTHER_FILE,
         lambda: zipped(entries(), prefix=b"#!/bin/sh\n".ljust(300, b"#"), base=300)),
    Case("escape", "names with .., an absolute path, a drive, a link", ESCAPE,
         lambda: also(Entry("archive/../../evil.txt", b"x"), Entry("/etc/ckptool_evil", b"x"),
                      Entry("C:\\evil.txt", b"x"),
                      Entry("archive/link", b"/etc/passwd",
                            central={"attributes": 0xA1FF << 16}))),
    Case("dots", "a name with ..", ESCAPE, lambda: also(Entry("archive/../../evil.txt", b"x"))),
    Case("link", "an entry that unpacks as a link to /etc/passwd", ESCAPE,
         lambda: also(Entry("archive/link", b"/etc/passwd",
                            central={"attributes": 0xA1FF << 16}))),
    Case("backslash", "backslashes for slashes", ESCAPE, backslashed),
    Case("source", "a zip of source code renamed .pth", OTHER_FILE,
         lambda: zipped([Entry("project/README.md", b"hello"),
                         Entry("project/main.py", b"print(1)")], large=False)),
    Case("nested", "a zip with one entry, a malicious checkpoint", OTHER_FILE,
         lambda: zipped([Entry("inner.pth", net(BAD))])),
    Case("script", "TorchScript: torch.load would hand it to torch.jit", Want(
        DONE, NO, TROUBLE, TROUBLE, NO), lambda: also(*SCRIPT)),
    Case("pickle-in-storage", "a storage whose bytes are a malicious pickle", OTHER,
         lambda: net(storages={"0": BAD[:24], "1": TWO}, last=(Entry("archive/extra.pkl", BAD),)),
         weights=False),
    Case("version", "a version of the archive that no torch writes", HEADER,
         lambda: net(version=b"99999999999\n")),
    Case("markers", "markers of the layout that say nonsense", SAME,
         lambda: net(markers=False,
                     last=(Entry("archive/.format_version", b"1"),
                           Entry("archive/.storage_alignment", b"-1\x1b[31m")))),
    Case("byteorder", "a byte order with escape codes", refused("header-invalid"),
         lambda: net(byteorder=b"mi\x1b[31mddle")),
    Case("storage-missing", "a storage that is not in the zip", SIZES,
         lambda: net(storages={"0": SIX})),
    Case("storage-short", "a storage shorter than the pickle says", SIZES,
         lambda: net(one(tensor(stored(count=1024), 0, (1024,), (1,))), {"0": SIX})),
    Case("storage-short-first", "the same, with other bytes of the file behind it", SIZES,
         lambda: net(stream(ordered(("w", tensor(stored(count=32), 0, (32,), (1,))),
                                    ("b", tensor(stored("1", 2), 0, (2,), (1,))))))),
    Case("storage-long", "a storage longer than the pickle says", SIZES,
         lambda: net(one(tensor(stored(count=2), 0, (2,), (1,))), {"0": SIX})),
)  # fmt: skip
