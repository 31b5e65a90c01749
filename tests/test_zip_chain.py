"""The one exception to Rule Z, a zip that was edited in place, and its near misses."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib

import pytest
import torch
from torch.utils.serialization import config

from ckptool.errors import CkptError, LimitExceeded, Truncated, ZipAmbiguous
from ckptool.limits import Limits
from ckptool.places import BytesSource
from ckptool.plans import Literal
from ckptool.zipcentral import central_span
from ckptool.ziplayout import CENTRAL, END, LOCAL
from ckptool.zipplan import Record, plan_append, plan_zip
from ckptool.zips import read_directory, read_entry


def saved(value, **options):
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def packed(records, **options):
    """An archive by Python's zipfile, of {name: bytes} in this order."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", **options) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    return stream.getvalue()


def read(data, **options):
    return read_directory(BytesSource(data, "file.pth"), **options)


def contents(data, entry):
    return read_entry(BytesSource(data, "file.pth"), entry)


def planned(records):
    """An archive in torch's layout, of {name: bytes}."""
    rows = [
        Record(n, (Literal(d),) if d else (), len(d), zlib.crc32(d)) for n, d in records.items()
    ]
    return b"".join(part.data for part in plan_zip(rows))


OLD, NEW = b"the old pickle" * 20, b"the new pickle, a longer one" * 11


def link(base, pickle=NEW, name=None, replaces="data.pkl", count=None, crc=None):
    """`base` with one more record at its end, and the directory that says so."""
    before = read(base)
    at, size = before.central
    central = base[at : at + size]
    top = before.top
    span = central_span(central, f"{top}/{replaces}")
    crc = zlib.crc32(pickle) if crc is None else crc
    record = Record(f"{top}/{name or replaces}", (Literal(pickle),), len(pickle), crc)
    count = len(before.entries) if count is None else count
    around = central[: span.offset], central[span.end :]
    return base + plan_append(record, len(base), *around, count)


def taken_apart(data):
    """base, appended record, directory, of a chain."""
    found = read(data)
    at, size = found.central
    return data[: found.links[-1]], data[found.links[-1] : at], data[at : at + size]


def joined(base, record, central, count):
    """An archive again, with plain end records."""
    at = len(base) + len(record)
    return base + record + central + END.pack(b"PK\5\6", 0, 0, count, count, len(central), at, 0)


def rows(central):
    """The entries of a directory, one byte string each."""
    found, at = [], 0
    while at < len(central):
        end = at + CENTRAL.size + sum(CENTRAL.unpack_from(central, at)[10:13])
        found.append(central[at:end])
        at = end
    return found


STATE = {"w": torch.arange(60.0).reshape(6, 10), "b": torch.ones(3, dtype=torch.int64)}
GOOD = saved(STATE)
CHAIN = link(GOOD)
ORDER = [entry.name for entry in read(GOOD).entries]


# --- honest chains ---------------------------------------------------------------------------
def no_checksums():
    config.save.compute_crc32 = False
    try:
        return saved(STATE)
    finally:
        config.save.compute_crc32 = True


RECORDS = {"a/data.pkl": OLD, "a/data/0": b"0" * 99, "a/empty": b"", "a/version": b"3\n"}
BASES = {
    "torch": GOOD,
    "no checksums": no_checksums(),
    "layout": planned(RECORDS),
    "zipfile": packed(RECORDS),
    "deflated": packed(RECORDS, compression=zipfile.ZIP_DEFLATED),
    "data.pkl last": packed(dict(reversed(RECORDS.items()))),
    "data.pkl in the middle": packed({"a/version": b"3\n", **RECORDS}),
    "data.pkl alone": packed({"a/data.pkl": OLD}),
    "folders": packed({"a/": b"", **RECORDS, "a/data/": b""}),
    "foreign names": packed({f"\u00fc{name}"[:1] + name[1:]: data for name, data in RECORDS.items()}),
}  # fmt: skip


@pytest.mark.parametrize("name", BASES)
def test_chains_of_every_length(name):
    base = data = BASES[name]
    before = read(base)
    pickles = [contents(base, before.records["data.pkl"])]
    sizes = []
    for number in range(1, 9):
        sizes.append(len(data))
        pickles.append(b"pickle %d " % number * 9)
        data = link(data, pickles[-1])
        found = read(data)

        assert found.links == tuple(sizes)
        assert [contents(data, entry) for entry in found.older] == pickles[:-1]
        assert contents(data, found.records["data.pkl"]) == pickles[-1]
        assert found.records["data.pkl"].header_offset == sizes[-1]
        assert [entry.name for entry in found.entries] == [entry.name for entry in before.entries]
        others = [entry for entry in found.entries if not entry.name.endswith("/data.pkl")]
        assert others == [entry for entry in before.entries if not entry.name.endswith("/data.pkl")]
        assert found.central.end < len(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None or name == "no checksums"
        assert archive.namelist() == zipfile.ZipFile(io.BytesIO(base)).namelist()
        assert name == "no checksums" or archive.read(f"{before.top}/data.pkl") == pickles[-1]


def test_a_strict_archive_has_no_links():
    assert read(GOOD).links == read(GOOD).older == ()
    assert read(GOOD).central.end == len(GOOD) - 98


def test_a_ninth_link_is_refused():
    data = GOOD
    for number in range(9):
        data = link(data, b"pickle %d" % number) if number < 8 else data
    before = read(data)
    at, size = before.central
    span = central_span(data[at : at + size], "archive/data.pkl")
    central = data[at : at + size]
    record = Record("archive/data.pkl", (Literal(NEW),), len(NEW), 0)
    ninth = data + plan_append(
        record, len(data), central[: span.offset], central[span.end :], len(before.entries)
    )

    with pytest.raises(LimitExceeded, match="more than 8 times") as caught:
        read(ninth)
    assert caught.value.slug == "limit-links"
    assert "ordinary convert" in caught.value.hint


def test_a_zip_inside_a_zip_is_no_chain():
    """The record before data.pkl ends like a base; it is a record all the same."""
    names = {"a/data/0": packed({"a/data/0": b"", "a/data.pkl": OLD}), "a/data.pkl": NEW}
    for data in (packed(names), planned(names)):
        found = read(data)
        assert found.links == ()
        assert contents(data, found.records["data.pkl"]) == NEW


def test_the_count_of_entries_is_bounded_first():
    with pytest.raises(LimitExceeded) as caught:
        read(CHAIN, limits=Limits(entry_count=3))
    assert caught.value.slug == "limit-entries"


def test_ten_thousand_entries_cost_one_pass():
    """Bytes read: the directory once a link, local headers once."""

    class Counted(BytesSource):
        total = 0

        def _fetch(self, offset, size):
            Counted.total += size
            return super()._fetch(offset, size)

    names = {f"a/data/{n}": b"" for n in range(10_000)}
    data = base = planned({"a/data.pkl": OLD, **names, "a/version": b"3\n"})
    for number in range(8):
        data = link(data, b"pickle %d" % number)
    Counted.total = 0
    assert len(read_directory(Counted(data, "x")).links) == 8
    headers, directory = read(base).central
    assert Counted.total < headers + 9 * (directory + 200_000)


# --- near misses -----------------------------------------------------------------------------
def two_records():
    """data.pkl and version, both new, both in the directory."""
    one = link(GOOD, b"4\n", replaces="version")[len(GOOD) :]
    record = one[: one.index(b"PK\1\2")]
    middle = GOOD + record
    name = b"archive/data.pkl"
    head = LOCAL.pack(b"PK\3\4", 0, 0x808, 0, 0, 0, 0, 0, 0, len(name), 0) + name
    tail = struct.pack("<4s3I", b"PK\7\x08", zlib.crc32(NEW), len(NEW), len(NEW))
    sums = (zlib.crc32(NEW), len(NEW), len(NEW), len(name))
    entry = CENTRAL.pack(
        b"PK\1\2", 0, 0, 0x808, 0, 0, 0, *sums, 0, 0, 0, 0, 0, len(middle)
    ) + name  # fmt: skip
    two = one[one.index(b"PK\1\2") : -98]
    replaced = b"".join(entry if name in row else row for row in rows(two))
    return joined(GOOD, record + head + NEW + tail, replaced, len(ORDER))


def other_directory(change):
    """An honest record, and a directory that `change` was made to."""
    base, record, central = taken_apart(CHAIN)
    entries = change(rows(central))
    return joined(base, record, b"".join(entries), len(entries))


def patched(entries, number, field, value):
    """One field of one entry set, or changed by a function."""
    entry = entries[number]
    fields = list(CENTRAL.unpack_from(entry))
    fields[field] = value(fields[field]) if callable(value) else value
    entries[number] = CENTRAL.pack(*fields) + entry[CENTRAL.size :]
    return entries


def extra_entry(entries):
    """A second name for the bytes of data/0."""
    twin = patched(list(entries), 4, 2, 0)[4].replace(b"data/0", b"data/7")
    return [*entries, twin]


def swapped(entries):
    entries[-1], entries[-2] = entries[-2], entries[-1]
    return entries


def renamed_top():
    data = CHAIN[len(GOOD) :].replace(b"archive/", b"brchive/")
    return GOOD + data


def another_base(change, base=GOOD):
    """A chain on bytes that are no strict archive; all offsets are true."""
    broken = change(base)
    before = read(base)
    at, size = before.central
    central = base[at : at + size]
    span = central_span(central, f"{before.top}/data.pkl")
    record = Record(f"{before.top}/data.pkl", (Literal(NEW),), len(NEW), zlib.crc32(NEW))
    around = central[: span.offset], central[span.end :]
    return broken + plan_append(record, len(broken), *around, len(before.entries))


def with_comment(base):
    return base[:-2] + b"\5\0hello"


def other_record(change):
    """A chain whose appended record `change(record)` made; the directory follows it."""
    base, record, central = taken_apart(CHAIN)
    return joined(base, change(record), central, len(ORDER))


def deflated_record():
    base, _, central = taken_apart(CHAIN)
    name = b"archive/data.pkl"
    squeezer = zlib.compressobj(9, zlib.DEFLATED, -15)
    small = squeezer.compress(NEW) + squeezer.flush()
    sums = (zlib.crc32(NEW), len(small), len(NEW), len(name))
    record = LOCAL.pack(b"PK\3\4", 0, 0x800, 8, 0, 0, *sums, 0) + name + small
    entry = CENTRAL.pack(b"PK\1\2", 0, 0, 0x800, 8, 0, 0, *sums, 0, 0, 0, 0, 0, len(base)) + name
    return joined(base, record, b"".join([entry, *rows(central)[1:]]), len(ORDER))


def without_descriptor():
    """Sizes in the local header, as other writers do it."""
    base, _, central = taken_apart(CHAIN)
    name = b"archive/data.pkl"
    sums = (zlib.crc32(NEW), len(NEW), len(NEW), len(name))
    record = LOCAL.pack(b"PK\3\4", 0, 0x800, 0, 0, 0, *sums, 0) + name + NEW
    entry = CENTRAL.pack(b"PK\1\2", 0, 0, 0x800, 0, 0, 0, *sums, 0, 0, 0, 0, 0, len(base)) + name
    return joined(base, record, b"".join([entry, *rows(central)[1:]]), len(ORDER))


def only_a_directory():
    base, _, _ = taken_apart(CHAIN)
    at, size = read(base).central
    return joined(base, b"", base[at : at + size], len(ORDER))


def record_inside():
    """The record is put into what the base's directory is; the base has none then."""
    base, record, central = taken_apart(CHAIN)
    at = read(base).central.offset
    fields = list(CENTRAL.unpack_from(central))
    fields[-1] = at
    moved = CENTRAL.pack(*fields) + central[CENTRAL.size :]
    return joined(base[:at], record, moved, len(ORDER))


def middle_link_differs():
    """Two links; the older directory says of data/0 what no other says."""
    one = other_directory(lambda e: patched(e, 4, 2, 20))
    _, record, central = taken_apart(CHAIN)
    fields = list(CENTRAL.unpack_from(central))
    fields[-1] = len(one)
    moved = CENTRAL.pack(*fields) + central[CENTRAL.size :]
    return joined(one, record, moved, len(ORDER))


def hidden_count():
    """The base's end record counts one entry more than its directory holds."""
    small, big = GOOD[:-22], list(END.unpack(GOOD[-22:]))
    count = struct.pack("<Q", len(ORDER) + 1) * 2
    big[3] = big[4] = len(ORDER) + 1
    at = len(small) - 76
    return small[: at + 24] + count + small[at + 40 :] + END.pack(*big)


DIFFER, GAP = "differ in more than data.pkl", "no entry owns"
MISSES = {
    "another name": (GAP, lambda: link(GOOD, name="data/1", replaces="data/1")),
    "another name at data.pkl's place": ("differ|owns", lambda: link(GOOD, name="data/9")),
    "upper case": (GAP, lambda: link(GOOD, name="DATA.PKL")),
    "upper case in both": (
        GAP,
        lambda: link(planned({"a/DATA.PKL": OLD, "a/version": b"3\n"}), replaces="DATA.PKL"),
    ),
    "two records": (GAP, two_records),
    "a record added": ("differ|owns|two entries", lambda: other_directory(extra_entry)),
    "an entry removed": (DIFFER, lambda: other_directory(lambda e: e[:-1])),
    "the first other entry removed": (DIFFER, lambda: other_directory(lambda e: [e[0], *e[2:]])),
    "two entries swapped": (DIFFER, lambda: other_directory(swapped)),
    "data.pkl moved to the end": (DIFFER, lambda: other_directory(lambda e: [*e[1:], e[0]])),
    "another checksum": (
        DIFFER,
        lambda: other_directory(lambda e: patched(e, 4, 7, lambda c: c ^ 1)),
    ),
    "another size": (
        DIFFER,
        lambda: other_directory(lambda e: patched(patched(e, 4, 8, 20), 4, 9, 20)),
    ),
    "another offset": (
        DIFFER,
        lambda: other_directory(lambda e: patched(e, 4, 16, lambda o: o + 64)),
    ),
    "another version": (DIFFER, lambda: other_directory(lambda e: patched(e, 4, 1, 20))),
    "another top folder": ("differ|local header|folder", renamed_top),
    "no data.pkl in the base": (
        "differ|owns",
        lambda: link(packed({"a/version": b"3", "a/x": b"1"}), name="data.pkl", replaces="x"),
    ),
    "base with a comment": ("a zip comment", lambda: another_base(with_comment)),
    "base with bytes after it": ("4 bytes after", lambda: another_base(lambda b: b + b"1234")),
    "base with a gap of a descriptor": ("after the", lambda: another_base(lambda b: b + b"x" * 16)),
    "base with a prefix": ("point|begins|owns", lambda: another_base(lambda b: b"x" * 64 + b)),
    "base cut": ("no whole zip before", lambda: another_base(lambda b: b[:-200])),
    "base with another count": (DIFFER, lambda: another_base(lambda _: hidden_count())),
    "base with a hidden record": (
        "owns|differ|local",
        lambda: another_base(lambda b: planned({**RECORDS, "a/z": b"1"}), planned(RECORDS)),
    ),
    "bytes after the chain": ("3 bytes after", lambda: CHAIN + b"abc"),
    "a comment of the chain": ("a zip comment", lambda: with_comment(CHAIN)),
    "a gap after the record": (GAP, lambda: other_record(lambda r: r + b"x" * 16)),
    "no descriptor": ("descriptor|owns", lambda: other_record(lambda r: r[:-16])),
    "another descriptor": (
        "descriptor",
        lambda: other_record(lambda r: r[:-12] + b"1234" + r[-8:]),
    ),
    "another local name": ("local header", lambda: other_record(lambda r: r.replace(b"pkl", b"pkx"))),
    "a deflated record": ("not as an edit", deflated_record),
    "a record without descriptor": ("not as an edit", without_descriptor),
    "an empty record": ("not as an edit|differ", lambda: link(GOOD, b"")),
    "a directory alone": (GAP, only_a_directory),
    "no directory in the base": (GAP, record_inside),
    "a middle link that differs": (DIFFER, middle_link_differs),
    "another zip": ("owns|begins|point", lambda: GOOD + GOOD),
    "another chain": ("owns|begins|point", lambda: GOOD + CHAIN),
    "an end record in the pickle": (
        "two zip end",
        lambda: link(GOOD, END.pack(b"PK\5\6", 0, 0, 0, 0, 0, 0, 65_535)[:-2] + b"\x00\x80" * 99),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSES)
def test_near_misses_are_refused(name):
    text, make = MISSES[name]
    with pytest.raises(CkptError, match=text) as caught:
        read(make())
    assert type(caught.value) is ZipAmbiguous
    assert caught.value.path == "file.pth"
    assert caught.value.hint


def test_honest_neighbours_of_the_near_misses():
    """The builders above make chains when nothing is changed."""
    for data in (
        other_directory(lambda e: e),
        other_record(lambda r: r),
        another_base(lambda b: b),
    ):
        assert read(data).links == (len(GOOD),)
    harmless = link(GOOD, b"PK\5\6" + bytes(18) + b"PK\1\2 and PK\3\4 in a pickle")
    assert read(harmless).links == (len(GOOD),)


def test_an_empty_zip_is_no_base():
    with pytest.raises(ZipAmbiguous):
        read(another_base(lambda _: packed({})))


def test_every_byte_of_an_edit_is_accounted_for():
    """No flipped bit behind the base changes what a reader uses unseen; nor one in its end."""
    data = link(GOOD, b"tiny")
    before = read(data)
    held = range(before.entries[0].data_offset, before.entries[0].data_offset + 4)
    generator = random.Random(1)
    refused = 0
    for at in range(read(GOOD).central.offset, len(data)):
        if at in held:
            continue
        flipped = bytearray(data)
        flipped[at] ^= 1 << generator.randrange(8)
        try:
            after = read(bytes(flipped))
        except CkptError:
            refused += 1
            continue
        assert (after.entries[0][1:], after.links) == (before.entries[0][1:], before.links), at
        assert after.entries[1:] == before.entries[1:], at
        assert [e[1:] for e in after.older] == [e[1:] for e in before.older], at
    assert refused > 700


def test_every_cut_of_a_chain_is_refused_but_the_base():
    data = link(CHAIN, b"second")
    whole = {len(GOOD): (), len(CHAIN): (len(GOOD),)}
    for size in {*range(len(GOOD) - 60, len(data), 7), *whole}:
        if size in whole:
            assert read(data[:size]).links == whole[size]
            continue
        with pytest.raises((Truncated, ZipAmbiguous)):
            read(data[:size])
