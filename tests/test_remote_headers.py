"""Local headers of a far zip: compared as strictly as near ones, without requests of their own."""

from __future__ import annotations

import io
import json
import re
import struct
import sys
from pathlib import Path

import pytest
import torch
from remote_support import serving
from verbs_support import cli

import ckptool
from ckptool import writing
from ckptool.places import BytesSource
from ckptool.remote_ahead import PIECE
from ckptool.remote_noted import Noted
from ckptool.spans import Span
from ckptool.ziplayout import CENTRAL, DESCRIPTOR, END64, LOCAL, LOCATOR
from ckptool.zips import read_directory

pytest.importorskip("obstore")
COUNT = 200
VICTIM = "archive/data/100"  # neither in the first request nor in the last


@pytest.fixture(scope="module")
def good():
    """200 tensors of 20 kB, more of a journey than what lies in the first and the last request."""
    stream = io.BytesIO()
    torch.save({f"l.{i}.w": torch.randn(5000) for i in range(COUNT)}, stream)
    return stream.getvalue()


def entry_of(data, name=VICTIM):
    found = read_directory(BytesSource(data, "x"))
    return next(entry for entry in found.entries if entry.name == name)


def patched(data, at, new):
    return data[:at] + new + data[at + len(new) :]


def moved(data):
    """The archive with the data of one record 8 bytes after a multiple of 64: an honest one that no
    torch writes. Arithmetic takes its descriptor of 16 bytes for one of 24.
    """
    return padded(padded(data, VICTIM, 8), "archive/data/101", 56)


def padded(data, name, more):
    """The extra field of one record, longer."""
    entry = entry_of(data, name)
    at = entry.header_offset + 28
    size = int.from_bytes(data[at : at + 2], "little") + more
    return _inserted(patched(data, at, struct.pack("<H", size)), entry.data_offset, bytes(more))


def _inserted(data, at, new):
    """With bytes put in, and every offset of the directory told."""
    end = data.rfind(b"PK\5\6")
    size, start = struct.unpack_from("<2I", data, end + 12)
    out = bytearray(data[:at] + new + data[at:])
    at_row = start + len(new)
    while at_row < start + len(new) + size:
        name, extra, comment = struct.unpack_from("<3H", out, at_row + 28)
        (offset,) = struct.unpack_from("<I", out, at_row + 42)
        if offset > at:
            struct.pack_into("<I", out, at_row + 42, offset + len(new))
        at_row += CENTRAL.size + name + extra + comment
    end += len(new)
    struct.pack_into("<I", out, end + 16, start + len(new))
    struct.pack_into("<Q", out, end - LOCATOR.size - END64.size + 48, start + len(new))
    struct.pack_into("<Q", out, end - LOCATOR.size + 8, end - LOCATOR.size - END64.size)
    return bytes(out)


def lies(good):
    """{what lies: the file}"""
    entry = entry_of(good)
    head, data, after = entry.header_offset, entry.data_offset, entry.data_offset + 20_000
    name = head + LOCAL.size
    return {
        "mark": patched(good, head, b"PK\3\5"),
        "name": patched(good, name + len(VICTIM) - 1, b"9"),
        "flags": patched(good, head + 6, b"\0\0"),
        "method": patched(good, head + 8, b"\x08\0"),
        "crc": patched(good, head + 14, b"\1\2\3\4"),
        "size": patched(good, head + 18, b"\1\0\0\0"),
        "extra": patched(good, head + 28, struct.pack("<H", data - name - len(VICTIM) - 1)),
        "descriptor": patched(good, after + 4, struct.pack("<I", entry.crc ^ 1)),
        "no descriptor": patched(good, after, bytes(DESCRIPTOR.size)),
    }


LIES = ["mark", "name", "flags", "method", "crc", "size", "extra", "descriptor", "no descriptor"]


@pytest.fixture
def site(good, tmp_path, monkeypatch):
    """The same file here is `net.pth` in the current folder."""
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    with serving(files={"net.pth": good}) as made:
        yield made


def place(site, data):
    """The file on the server and the same here."""
    site.files["net.pth"] = data
    Path("net.pth").write_bytes(data)
    return site.url("net.pth"), "net.pth"


def answers(url, here):
    """What verify says of both, as text."""
    said = [json.dumps(ckptool.verify(path).to_dict()) for path in (url, here)]
    return said[0].replace(url, here), said[1], json.loads(said[1])["exit_status"]


@pytest.mark.parametrize("lie", LIES)
def test_verify_says_what_it_says_of_a_near_one(lie, site, good, tmp_path):
    url, here = place(site, lies(good)[lie])
    there, near, status = answers(url, here)
    assert (there, status) == (near, 2)


@pytest.mark.parametrize("out", ["o.pth", "o.safetensors"])
@pytest.mark.parametrize("lie", LIES)
def test_convert_refuses_it_and_leaves_nothing(lie, out, site, good, tmp_path, capsys):
    url, here = place(site, lies(good)[lie])
    said = []
    for path in (url, here):
        for more in ((), ("--dry-run",), ("--jobs", 2), ("--no-check",)):
            status, text, _ = cli(
                capsys, "convert", path, "--add-module", "-o", tmp_path / out, "--json", *more
            )
            error = json.loads(text)["error"]
            said.append((status, error["slug"], error["text"], error.get("member")))
    assert set(said) == {said[0]}
    assert said[0][0] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def into(place):
    """Load it into a model of zeros; what the model then holds."""
    model = torch.nn.Module()
    model.l = torch.nn.Module()
    for i in range(COUNT):
        part = torch.nn.Module()
        part.w = torch.nn.Parameter(torch.zeros(5000))
        model.l.add_module(str(i), part)
    try:
        ckptool.load_into(model, place)
    finally:
        total = sum(float(value.detach().abs().sum()) for value in model.parameters())
    return total


READERS = {
    "load": ckptool.load,
    "unchecked": lambda place: ckptool.load(place, check=False),
    "into": into,
    "stats": lambda place: ckptool.inspect(place, stats=True).to_dict(),
    "hash": lambda place: ckptool.inspect(place, hash=True).to_dict(),
    "bytes": lambda place: ckptool.diff(place, "good.pth", bytes=True).to_dict(),
    "values": lambda place: ckptool.diff("good.pth", place, values=True).to_dict(),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("lie", ["name", "crc", "extra", "no descriptor"])
def test_who_reads_the_numbers_refuses_it(lie, reader, site, good):
    Path("good.pth").write_bytes(good)
    said = []
    for path in place(site, lies(good)[lie]):
        with pytest.raises(ckptool.CkptError) as caught:
            READERS[reader](path)
        said.append((caught.value.slug, caught.value.text, caught.value.member))
    assert said[0] == said[1]


@pytest.mark.parametrize("reader", READERS)
def test_who_reads_the_numbers_reads_the_right_ones(reader, site, good):
    """Also where the beginning of the data was computed wrongly."""
    Path("good.pth").write_bytes(good)
    there, near = (READERS[reader](path) for path in place(site, moved(good)))
    if isinstance(near, dict) and "l.0.w" in near:
        assert all(torch.equal(there[key], near[key]) for key in near)
    else:
        assert json.dumps(there).replace(site.url("net.pth"), "net.pth") == json.dumps(near)


def uncounted(data):
    """The same without checksums, which torch can leave out: nothing else then tells wrong bytes."""
    out = bytearray(data)
    for entry in read_directory(BytesSource(data, "x")).entries:
        if "/data/" in entry.name:
            length = struct.pack("<H", len(entry.name))
            at = [m.start() for m in re.finditer(re.escape(entry.name.encode()), data)]
            row = next(n for n in (a - CENTRAL.size for a in at[::-1])
                       if data[n : n + 4] == b"PK\1\2" and data[n + 28 : n + 30] == length)  # fmt: skip
            end = entry.data_offset + entry.compressed_size
            for at in (entry.header_offset + 14, row + 16, end + 4):
                out[at : at + 4] = bytes(4)
    return bytes(out)


def first_of(url, key):
    with ckptool.open(url) as found:
        return found.weights[key].numpy()[0]


def test_no_wrong_number_where_data_begins_elsewhere_than_computed(site, good):
    """It was shown, and two equal files told apart, without a word."""
    url, here = place(site, uncounted(moved(good)))
    assert first_of(url, "l.3.w") == first_of(here, "l.3.w") == torch.load(here)["l.3.w"][0]
    assert torch.equal(ckptool.load(url)["l.100.w"], torch.load(here)["l.100.w"])
    for read in (lambda: first_of(url, "l.100.w"), lambda: ckptool.diff(url, here)):
        with pytest.raises(ckptool.CkptError) as caught:
            read()
        assert (caught.value.slug, caught.value.member) == ("zip-ambiguous", VICTIM)


@pytest.mark.parametrize("lie", ["name", "crc", "extra", "no descriptor"])
def test_a_tensor_whose_header_lies_is_not_given(lie, site, good):
    url, _ = place(site, lies(good)[lie])
    assert first_of(url, "l.3.w") == torch.load(io.BytesIO(good))["l.3.w"][0]
    for _ in range(2):
        with pytest.raises(ckptool.CkptError) as caught:
            first_of(url, "l.100.w")
        assert caught.value.slug == "zip-ambiguous"


def test_what_was_there_stays(site, good, tmp_path, capsys):
    url, _ = place(site, lies(good)["name"])
    (tmp_path / "o.pth").write_bytes(b"old")
    assert cli(capsys, "convert", url, "--add-module", "-f", "-o", tmp_path / "o.pth")[0] == 2
    assert (tmp_path / "o.pth").read_bytes() == b"old"


def test_an_honest_one_that_was_computed_wrongly_is_read_again(site, good, tmp_path, capsys):
    url, here = place(site, moved(good))
    there, near, _ = answers(url, here)
    assert there == near
    assert json.loads(near)["whole_count"] == COUNT
    for path, out in ((url, "there"), (here, "here")):
        assert cli(capsys, "convert", path, "--add-module", "-o", tmp_path / out)[0] == 0
    assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes()
    assert torch.load(tmp_path / "here").keys() == {f"module.l.{i}.w" for i in range(COUNT)}


@pytest.mark.parametrize("verb", ["verify", "pth", "safetensors"])
def test_headers_cost_no_requests(verb, site, good, tmp_path):
    if verb == "verify":
        assert ckptool.verify(site.url("net.pth")).exit_status == 0
    else:
        ckptool.convert(site.url("net.pth"), tmp_path / f"o.{verb}", add_module=True)
    assert len(site.asked) <= 8
    assert site.sent_bytes <= len(good) + 4 * (64 << 10)


def test_pieces_lie_on_one_grid(tmp_path):
    """Several threads begin at tensors: they do not cut the pieces of the others in two."""
    torch.save({f"l.{i}.w": torch.zeros(2_600_000) for i in range(6)}, tmp_path / "net.pth")
    with serving(files={"net.pth": tmp_path / "net.pth"}) as site:
        assert ckptool.verify(site.url("net.pth")).exit_status == 0
        starts = [int(re.match(r"bytes=(\d+)", row[1])[1]) for row in site.asked]
    assert len(starts) <= -(-(tmp_path / "net.pth").stat().st_size // PIECE) + 2


def test_a_file_that_is_no_longer_there_is_not_asked_again(site, monkeypatch, tmp_path, capsys):
    """After a failure of the network no header is asked for: that would wait for it once more."""
    asked = []

    def slow(*args):
        asked.append(args)
        site.status = 403
        return []

    monkeypatch.setattr("ckptool.remote_source.RemoteSource.will_read", slow)
    args = ("convert", site.url("net.pth"), "--add-module", "-o", tmp_path / "o.pth", "--json")
    status, out, _ = cli(capsys, *args)
    assert (status, json.loads(out)["error"]["slug"]) == (2, "remote-denied")
    assert asked
    assert len(site.asked) <= 6


# -- the parts ---------------------------------------------------------------------------------
def test_noted_spans_are_those_that_passed_whole():
    data = bytes(range(200))
    noted = Noted([Span(90, 20), Span(10, 5), Span(50, 10), Span(199, 1)])
    noted.take(0, memoryview(data)[:55])
    assert {at: bytes(found) for at, found in noted.found()} == {10: data[10:15]}
    noted.take(50, memoryview(data)[50:110])
    noted.take(110, memoryview(data)[110:])
    assert {at: bytes(found) for at, found in noted.found()} == {
        10: data[10:15], 50: data[50:60], 90: data[90:110], 199: data[199:],
    }  # fmt: skip


def test_progress_is_told_on_a_slow_line(site, monkeypatch, tmp_path):
    """Not only every 16 MiB: at 1 MB a second that is a quarter of a minute without a word."""
    monkeypatch.setattr(writing, "_TICK_SECONDS", 0)
    told = []
    ckptool.convert(
        site.url("net.pth"), tmp_path / "o.pth", add_module=True,
        progress=lambda done, total: told.append(done),
    )  # fmt: skip
    assert told == sorted(told)
    assert len(told) > COUNT
    assert told[-1] == (tmp_path / "o.pth").stat().st_size


def test_without_obstore_the_url_is_named(site, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "obstore", None)
    args = ("convert", "net.pth", "--to-cpu", "-o", "s3://bucket/o.pth")
    Path("net.pth").write_bytes(site.files["net.pth"])
    status, _, err = cli(capsys, *args)
    assert status == 2
    assert "s3://bucket/o.pth: URLs need the package obstore" in err
    assert "pip install 'ckptool[remote]'" in err
