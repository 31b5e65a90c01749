"""One flipped bit in each region of a file: found, named, and what is whole is still told."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from formats_support import read_bytes
from verify_support import FILES, WEIGHTS, entries, flipped, verified

from ckptool.errors import NotACheckpoint
from ckptool.places import BytesSource
from ckptool.zips import read_directory

LOCAL = 30


def regions(data):
    """{(region, record): (first byte, behind the last)} of an archive, none left out."""
    directory = read_directory(BytesSource(data, "x"))
    found, at = {}, 0
    for record, entry in directory.records.items():
        name = entry.header_offset + LOCAL
        pad = name + len(entry.name.encode())
        end = entry.data_offset + entry.compressed_size
        bounds = [("header", name), ("name", pad), ("extra", entry.data_offset), ("data", end)]
        for region, stop in bounds:
            found[region, record] = (at, stop)
            at = stop
        if entry.flags & 8 and entry.size:
            found["descriptor", record] = (at, at + 16)
            at += 16
    found["directory", None] = (at, directory.central.end)
    found["end", None] = (directory.central.end, len(data))
    assert at == directory.central.offset
    return found


def some_bytes(span, generator, most=10):
    """Bytes of a region, with a bit each: all of a short one, some of a long one."""
    places = range(*span)
    chosen = places if len(places) <= most else generator.sample(places, most)
    return [(at, generator.randrange(8)) for at in chosen]


def test_every_region_of_torchs_archive():
    """torch's layout is known to the byte: no flip anywhere goes unnoticed, and outside of data
    none costs a tensor.
    """
    data = FILES["zip"]
    generator = random.Random(5)
    whole = verified(data).tensor_count
    seen = Counter()
    for (region, record), span in regions(data).items():
        for at, bit in some_bytes(span, generator):
            found = verified(flipped(data, at, bit))
            assert found.exit_status in (1, 2), (region, record, at, bit)
            assert not found.whole
            seen[region] += 1
            if record == "data.pkl" and region == "data":
                assert (found.exit_status, found.tensor_count) == (2, None)
                continue
            lost = int(region == "data" and record.startswith("data/"))
            assert found.whole_count == whole - lost, (region, record, at, bit)
            named = {finding.member for finding in found.findings} - {None}
            if region in ("extra", "data") and record not in ("version", "byteorder"):
                assert {name.removeprefix("archive/") for name in named} == {record}
                assert found.exit_status == 1
            if region == "data" and record.startswith("data/"):
                assert len(found.findings[0].keys) == 1
    assert set(seen) == {"header", "name", "extra", "data", "descriptor", "directory", "end"}


@pytest.mark.parametrize("kind", ["repacked", "deflated"])
def test_every_region_of_another_writers_archive(kind):
    """What no reader and no checksum looks at may change: versions, attributes, times."""
    data = FILES[kind]
    generator = random.Random(6)
    whole = verified(data).tensor_count
    for (region, record), span in regions(data).items():
        for at, bit in some_bytes(span, generator, 12):
            found = verified(flipped(data, at, bit))
            if found.exit_status == 0:
                assert region in ("header", "directory", "data"), (record, at)
                assert region != "data" or kind == "deflated"  # a spare bit at the end of a stream
            if region == "data" and record == "data.pkl":
                continue
            lost = int(region == "data" and record.startswith("data/"))
            assert found.whole_count in (whole - lost, whole), (region, record, at, bit)


def test_every_byte_of_a_legacy_stream():
    """No checksums: a flip in numbers or names is out of reach, one in a count or in the build of
    the pickles is found; whatever is called whole is as long as it must be.
    """
    data = FILES["legacy"]
    checkpoint = read_bytes(data)
    spans = [storage.pieces[0].span for storage in checkpoint.storages]
    generator = random.Random(7)
    for span in spans:
        for at, bit in some_bytes((span.offset, span.end), generator, 3):
            assert verified(flipped(data, at, bit)).exit_status == 0  # and says: no checksums
        for at, bit in some_bytes((span.offset - 8, span.offset), generator):
            found = verified(flipped(data, at, bit))
            assert (found.exit_status, len(found.lost)) == (2, 1)
            assert "its count is" in found.lost[0][1]
    statuses = Counter()
    for at in range(0, min(span.offset for span in spans) - 8, 2):
        statuses[_status(flipped(data, at, generator.randrange(8)))] += 1
    assert statuses[2] > statuses[0] > 0
    assert set(statuses) <= {0, 1, 2, "no checkpoint"}


def test_every_byte_of_safetensors():
    """Lengths, types and shapes hold each other; names and numbers are vouched for by nothing."""
    data = FILES["safetensors"]
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size]
    generator = random.Random(8)
    for at in range(len(data)):
        for bit in generator.sample(range(8), 2):
            status = _status(flipped(data, at, bit))
            if at < 8:
                assert status != 0, (at, bit)
            elif at >= 8 + size:
                assert status == 0
            elif status == 0:  # within a text of the header
                assert header[: at - 8].count(b'"') % 2 == 1, (at, bit)


def _status(data):
    try:
        return verified(data, name="net.bin").exit_status
    except NotACheckpoint:
        return "no checkpoint"


def test_padding_is_named_and_costs_nothing():
    data = FILES["zip"]
    entry = entries(data)["data/1"]
    found = verified(flipped(data, entry.data_offset - 1))
    (finding,) = found.findings
    assert (finding.slug, finding.member) == ("zip-layout", "data/1")
    assert finding.offset == entry.data_offset - 1
    assert "padding" in finding.text
    assert (found.exit_status, found.whole_count) == (1, found.tensor_count)
    assert len(WEIGHTS) == 9
