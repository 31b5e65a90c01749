"""Rule Z, one row for each way to lie, and torch's own layout to the byte."""

import io
import itertools
import pickle
import random
import struct
import zipfile
import zlib

import pytest
import torch
from torch.utils.serialization import config

from ckptool.errors import (
    CkptError,
    CrcMismatch,
    LimitExceeded,
    NotACheckpoint,
    PathEscape,
    Truncated,
    ZipAmbiguous,
    ZipEncrypted,
)
from ckptool.limits import Limits
from ckptool.places import BytesSource, open_source
from ckptool.plans import Copy, Late, Literal, Made, Output, Plan, total_size
from ckptool.spans import Span
from ckptool.writing import FileSink, write
from ckptool.zipcut import walk_local_headers
from ckptool.ziplayout import CENTRAL, END, END64, LOCAL, LOCATOR
from ckptool.zipplan import Record, plan_zip
from ckptool.zips import read_directory, read_entry


def saved(value, **options):
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def packed(names=("a/data.pkl", "a/data/0"), data=b"some bytes " * 40, **options):
    """An archive by Python's zipfile."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", **options) as archive:
        for name in names:
            archive.writestr(name, data)
    return stream.getvalue()


def read(data, **options):
    return read_directory(BytesSource(data, "file.pth"), **options)


STATE = {"w": torch.arange(60.0).reshape(6, 10), "b": torch.ones(3, dtype=torch.int64)}
GOOD = saved(STATE)


# --- reading what is honest ------------------------------------------------------------------


def assert_as_zipfile_sees_it(data):
    source = BytesSource(data, "file.pth")
    directory = read_directory(source)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
        assert [entry.name for entry in directory.entries] == [info.filename for info in infos]
        for entry, info in zip(directory.entries, infos, strict=True):
            assert (entry.crc, entry.size) == (info.CRC, info.file_size)
            assert (entry.compressed_size, entry.header_offset) == (
                info.compress_size,
                info.header_offset,
            )
            assert read_entry(source, entry) == archive.read(info)
    return directory


def test_torch_archive():
    directory = assert_as_zipfile_sees_it(GOOD)
    assert directory.top == "archive"
    assert directory.records["data/0"].size == 240
    assert directory.records["data/0"].data_offset % 64 == 0


def streamed(**options):
    """An archive written to a pipe: flag 8 and descriptors, after zero bytes too."""

    class Pipe(io.BytesIO):
        def seekable(self):
            return False

        def seek(self, *_):
            raise OSError

        def tell(self):
            raise OSError

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w", **options) as archive:
        for name, data in {"a/x": b"hello" * 90, "a/empty": b"", "a/\u00fc": b"z"}.items():
            with archive.open(name, "w", force_zip64=name == "a/x") as stream:
                stream.write(data)
    return pipe.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        packed(),
        packed(compression=zipfile.ZIP_DEFLATED),
        packed(names=("a/data.pkl", "a/", "a/data/", "a/\u00fc\u4e2d"), data=b""),
        packed(names=("r 1/x y\x1b[31m", "r 1/\u00e9\n"), compression=zipfile.ZIP_DEFLATED),
        streamed(),
        streamed(compression=zipfile.ZIP_DEFLATED),
        saved({str(n): torch.zeros(n) for n in range(30)}),
        saved(torch.jit.script(torch.nn.Linear(2, 2)).state_dict()),
    ],
)
def test_honest_archives(data):
    assert_as_zipfile_sees_it(data)


def test_forced_zip64():
    stream = io.BytesIO()
    archive = zipfile.ZipFile(stream, "w")
    with archive, archive.open("a/x", "w", force_zip64=True) as record:
        record.write(b"12345")
    assert_as_zipfile_sees_it(stream.getvalue())


def test_folders_are_entries_but_no_records():
    directory = read(packed(names=("a/", "a/data.pkl"), data=b""))
    assert len(directory.entries) == 2
    assert set(directory.records) == {"data.pkl"}


def test_no_checksums():
    config.save.compute_crc32 = False
    try:
        data = saved(STATE)
    finally:
        config.save.compute_crc32 = True
    source = BytesSource(data, "x")
    entry = read_directory(source).records["data/0"]
    assert entry.crc == 0
    assert len(read_entry(source, entry)) == 240


# --- Rule Z: each way to lie -----------------------------------------------------------------


def central(data, number):
    """The offset of the central entry `number`, and its fields as a list."""
    at = struct.unpack_from("<I", data, len(data) - 6)[0]
    for _ in range(number):
        fields = CENTRAL.unpack_from(data, at)
        at += CENTRAL.size + sum(fields[10:13])
    return at, list(CENTRAL.unpack_from(data, at))


def edit_central(field, value, number=1, data=None):
    data = GOOD if data is None else data
    at, fields = central(data, number)
    fields[field] = value(fields[field]) if callable(value) else value
    return data[:at] + CENTRAL.pack(*fields) + data[at + CENTRAL.size :]


def edit_local(field, value, number=1, data=None):
    data = GOOD if data is None else data
    at = central(data, number)[1][-1]
    fields = list(LOCAL.unpack_from(data, at))
    fields[field] = value(fields[field]) if callable(value) else value
    return data[:at] + LOCAL.pack(*fields) + data[at + LOCAL.size :]


def edit_both(central_field, local_field, value, data=None):
    data = edit_central(central_field, value, data=data)
    return edit_local(local_field, value, data=data)


def edit_end(field, value):
    fields = list(END.unpack_from(GOOD, len(GOOD) - 22))
    fields[field] = value(fields[field])
    return GOOD[:-22] + END.pack(*fields)


def edit_end64(field, value):
    at = len(GOOD) - 98
    fields = list(END64.unpack_from(GOOD, at))
    fields[field] = value(fields[field])
    return GOOD[:at] + END64.pack(*fields) + GOOD[at + 56 :]


def edit_locator(field, value):
    at = len(GOOD) - 42
    fields = list(LOCATOR.unpack_from(GOOD, at))
    fields[field] = value(fields[field])
    return GOOD[:at] + LOCATOR.pack(*fields) + GOOD[at + 20 :]


def renamed(old, new, data=None):
    """The same name length, in the local and the central header."""
    return (packed() if data is None else data).replace(old, new)


def up(value):
    return value + 1


def descriptor_changed():
    at = GOOD.index(b"PK\7\x08")
    return GOOD[: at + 4] + b"\1\2\3\4" + GOOD[at + 8 :]


def with_gap():
    """Bytes between the last record and the directory, all offsets mended."""
    data = packed()
    at = central(data, 0)[0]
    end = list(END.unpack_from(data, len(data) - 22))
    end[6] += 16
    return data[:at] + b"hidden in a gap!" + data[at:-22] + END.pack(*end)


def nested_end(comment=22):
    """A comment that holds a second end record."""
    fields = list(END.unpack_from(GOOD, len(GOOD) - 22))
    fields[7] = comment
    return GOOD[:-22] + END.pack(*fields) + GOOD[-22:]


def comment():
    fields = list(END.unpack_from(GOOD, len(GOOD) - 22))
    fields[7] = 5
    return GOOD[:-22] + END.pack(*fields) + b"hello"


def without_zip64():
    end = list(END.unpack_from(GOOD, len(GOOD) - 22))
    end[3] = end[4] = 0xFFFF
    return GOOD[:-98] + END.pack(*end)


def doubled():
    with pytest.warns(UserWarning, match="Duplicate"):
        return packed(names=("a/x", "a/x"))


LIES = {
    "comment": (ZipAmbiguous, "a zip comment of 5 bytes", comment),
    "trailing": (ZipAmbiguous, "3 bytes after the end", lambda: GOOD + b"abc"),
    "trailing zeros": (ZipAmbiguous, "bytes after the end", lambda: GOOD + bytes(20_000)),
    "two ends": (ZipAmbiguous, "two zip end records", nested_end),
    "two ends, one cut": (ZipAmbiguous, "two zip end records", lambda: nested_end(999)),
    "appended": (ZipAmbiguous, "begins|no entry owns|point", lambda: GOOD + packed()),
    "prepended": (ZipAmbiguous, "point|begins", lambda: b"x" * 300 + GOOD),
    "disk": (ZipAmbiguous, "several disks", lambda: edit_end(1, up)),
    "first disk": (ZipAmbiguous, "several disks", lambda: edit_end(2, up)),
    "count here": (ZipAmbiguous, "several disks", lambda: edit_end(3, up)),
    "end count": (ZipAmbiguous, "several|disagree", lambda: edit_end(4, up)),
    "end size": (ZipAmbiguous, "disagree", lambda: edit_end(5, up)),
    "end offset": (ZipAmbiguous, "disagree", lambda: edit_end(6, up)),
    "end64 mark": (ZipAmbiguous, "malformed", lambda: edit_end64(0, lambda _: b"PK\6\0")),
    "end64 length": (ZipAmbiguous, "malformed", lambda: edit_end64(1, up)),
    "end64 count": (ZipAmbiguous, "malformed|disagree", lambda: edit_end64(7, up)),
    "end64 size": (ZipAmbiguous, "disagree", lambda: edit_end64(8, up)),
    "end64 offset": (ZipAmbiguous, "disagree", lambda: edit_end64(9, up)),
    "locator disk": (ZipAmbiguous, "locator", lambda: edit_locator(1, up)),
    "locator offset": (ZipAmbiguous, "locator", lambda: edit_locator(2, up)),
    "locator disks": (ZipAmbiguous, "locator", lambda: edit_locator(3, up)),
    "no zip64 end": (ZipAmbiguous, "zip64 end record is missing", without_zip64),
    "central mark": (ZipAmbiguous, "malformed entry", lambda: edit_central(0, b"PK\1\0")),
    "central name length": (ZipAmbiguous, ".", lambda: edit_central(10, 60_000)),
    "central comment": (ZipAmbiguous, ".", lambda: edit_central(12, up)),
    "entry disk": (ZipAmbiguous, "another disk", lambda: edit_central(13, up)),
    "symlink": (PathEscape, "a link", lambda: edit_central(15, 0o120777 << 16)),
    "device": (PathEscape, "a link", lambda: edit_central(15, 0o020777 << 16)),
    "encrypted": (ZipEncrypted, "encrypted", lambda: edit_both(3, 2, 0x809)),
    "strongly encrypted": (ZipEncrypted, "encrypted", lambda: edit_central(3, 0x848)),
    "patched": (ZipEncrypted, "patch", lambda: edit_central(3, 0x828)),
    "method": (ZipAmbiguous, "method 12", lambda: edit_both(4, 3, 12)),
    "two sizes": (ZipAmbiguous, "two sizes", lambda: edit_central(9, up)),
    "header offset": (ZipAmbiguous, "owns", lambda: edit_central(16, up)),
    "offset past the end": (ZipAmbiguous, "owns", lambda: edit_central(16, 1 << 31)),
    "offset needs zip64": (ZipAmbiguous, "zip64 field", lambda: edit_central(16, 0xFFFFFFFF)),
    "overlap": (ZipAmbiguous, "no local header", lambda: edit_central(16, 0)),
    "central crc": (ZipAmbiguous, "descriptor", lambda: edit_central(7, lambda crc: crc ^ 1)),
    "descriptor": (ZipAmbiguous, "descriptor", descriptor_changed),
    "gap": (ZipAmbiguous, "owns", with_gap),
    "local mark": (ZipAmbiguous, "no local header", lambda: edit_local(0, b"PK\3\0")),
    "local flags": (ZipAmbiguous, "disagree", lambda: edit_local(2, 0x800)),
    "local method": (ZipAmbiguous, "disagree", lambda: edit_local(3, 8)),
    "local crc": (ZipAmbiguous, "different sizes", lambda: edit_local(6, 1)),
    "local sizes": (ZipAmbiguous, "different sizes", lambda: edit_local(7, 5)),
    "plain local crc": (
        ZipAmbiguous,
        "different sizes",
        lambda: edit_local(6, lambda crc: crc ^ 1, data=packed()),
    ),
    "plain local size 0": (
        ZipAmbiguous,
        "different sizes",
        lambda: edit_local(8, 0, data=packed()),
    ),
    "local name length": (ZipAmbiguous, "no local header", lambda: edit_local(9, up)),
    "extra shift": (ZipAmbiguous, ".", lambda: edit_local(10, up)),
    "extra past the end": (ZipAmbiguous, "beyond|owns", lambda: edit_local(10, 60_000)),
    "local name": (ZipAmbiguous, "of that name", lambda: GOOD.replace(b"data/0", b"data/9", 1)),
    "duplicate": (ZipAmbiguous, "two entries", doubled),
    "case": (ZipAmbiguous, "two entries", lambda: packed(names=("a/data.pkl", "a/DATA.pkl"))),
    "roots": (ZipAmbiguous, "more than one folder", lambda: packed(names=("a/x", "b/x"))),
    "not UTF-8": (ZipAmbiguous, "not UTF-8", lambda: renamed(b"a/data/0", b"a/data/\xff")),
    "NUL": (PathEscape, "plain path", lambda: renamed(b"a/data/0", b"a/da\0a/0")),
    "backslash": (PathEscape, "plain path", lambda: renamed(b"a/data/0", b"a/da\\a/0")),
    "parent": (PathEscape, "plain path", lambda: renamed(b"a/data/0", b"a/../a/0")),
    "parent at the end": (PathEscape, "plain path", lambda: renamed(b"a/data/0", b"a/dat/..")),
    "dot": (PathEscape, "plain path", lambda: renamed(b"a/data/0", b"a/data/.")),
    "double slash": (PathEscape, "plain path", lambda: renamed(b"a/data/0", b"a/data//")),
    "absolute": (PathEscape, "plain path", lambda: renamed(b"a/data/0", b"/etc/pwd")),
    "drive": (PathEscape, "plain path", lambda: renamed(b"a/data/0", b"C:/abc/0")),
    "no folder": (
        NotACheckpoint,
        "holds a checkpoint and is none itself: model.pth",
        lambda: packed(["model.pth"]),
    ),
    "other files": (
        NotACheckpoint,
        "files: 0, 1, 2, 3, 4, ...",
        lambda: packed(map(str, range(9))),
    ),
    "npz": (NotACheckpoint, "numpy archive .* a.npy, b.npy", lambda: packed(["a.npy", "b.npy"])),
    "records without a folder": (
        NotACheckpoint,
        "without their folder",
        lambda: packed(["data.pkl", "version"]),
    ),
    "empty zip": (NotACheckpoint, "an empty zip", lambda: packed([])),
    "cut": (Truncated, "cut at 900 bytes", lambda: GOOD[:900]),
    "cut in the end": (Truncated, "inside the zip end record", lambda: GOOD[:-1]),
    "zero tail": (Truncated, "no zip end", lambda: GOOD[:-500] + bytes(500)),
    "nothing": (Truncated, "cut at 0", lambda: b""),
}


@pytest.mark.parametrize("name", LIES)
def test_lies_are_refused(name):
    kind, text, make = LIES[name]
    with pytest.raises(kind, match=text) as caught:
        read(make())
    assert type(caught.value) is kind
    assert caught.value.path == "file.pth"
    assert caught.value.hint


@pytest.mark.parametrize("mark", [b"PK\5\6", b"PK\1\2", b"PK\3\4", b"PK\6\6", b"PK\6\7"])
@pytest.mark.parametrize("more", [b"", bytes(40), b"\xff" * 40, b"\1\2" * 20], ids=range(4))
def test_marks_in_the_data_of_a_user_are_data(mark, more):
    saved = io.BytesIO()
    torch.save({"note": mark + more}, saved)

    assert "archive/data.pkl" in {r.name for r in read(saved.getvalue()).records.values()}


def test_an_honest_neighbour_of_each_lie():
    for number in (0, 1):
        assert edit_central(0, b"PK\1\2", number) == edit_local(0, b"PK\3\4", number) == GOOD
    assert read(renamed(b"a/data/0", b"a/data.0")).records["data.0"]
    assert read(renamed(b"a/data/0", b"a/...a/0")).records["...a/0"]


def test_sixty_thousand_entries_on_one_header():
    one = packed(["a/x"])
    at, fields = central(one, 0)
    entries = b"".join(
        CENTRAL.pack(*fields[:10], 7, *fields[11:]) + b"a/%05d" % n for n in range(60_000)
    )
    end = END.pack(b"PK\5\6", 0, 0, 60_000, 60_000, len(entries), at, 0)
    with pytest.raises(ZipAmbiguous):
        read(one[:at] + entries + end)


def test_count_larger_than_the_directory():
    with pytest.raises(LimitExceeded) as caught:
        read(GOOD, limits=Limits(entry_count=3))
    assert caught.value.slug == "limit-entries"


def test_every_byte_of_the_framing_is_accounted_for():
    """No single flipped bit yields a crash, and none changes names, sizes or places unseen."""
    before = read(GOOD)
    held = [range(e.data_offset, e.data_offset + e.size) for e in before.entries]
    generator = random.Random(1)
    for at in range(len(GOOD)):
        if any(at in span for span in held):
            continue
        data = bytearray(GOOD)
        data[at] ^= 1 << generator.randrange(8)
        try:
            after = read(bytes(data))
        except CkptError:
            continue
        # Padding, times and version fields may change; what a reader uses may not.
        assert [e[1:] for e in after.entries] == [e[1:] for e in before.entries], at


@pytest.mark.parametrize("size", range(0, len(GOOD), 37))
def test_every_cut_is_refused(size):
    with pytest.raises((Truncated, ZipAmbiguous)):
        read(GOOD[:size])


# --- contents --------------------------------------------------------------------------------


def test_crc_is_checked():
    at = read(GOOD).records["data.pkl"].data_offset
    source = BytesSource(GOOD[:at] + b"\0" + GOOD[at + 1 :], "x")
    with pytest.raises(CrcMismatch, match=r"archive/data\.pkl"):
        read_entry(source, read_directory(source).records["data.pkl"])


def test_inflating_is_bounded():
    data = packed(["a/x"], bytes(5 << 20), compression=zipfile.ZIP_DEFLATED)
    source = BytesSource(data, "x")
    entry = read_directory(source).records["x"]
    for limits, slug in (
        (Limits(), "limit-inflate-ratio"),
        (Limits(pickle_bytes=1 << 20), "limit-pickle-bytes"),
    ):
        with pytest.raises(LimitExceeded) as caught:
            read_entry(source, entry, limits)
        assert caught.value.slug == slug
    assert read_entry(source, entry, Limits(inflate_ratio=10_000)) == bytes(5 << 20)
    for wrong in (entry.size - 1, entry.size + 1, 10):
        with pytest.raises(ZipAmbiguous, match="recorded size"):
            read_entry(source, entry._replace(size=wrong), Limits(inflate_ratio=10_000))
    with pytest.raises(CrcMismatch, match="damaged"):
        read_entry(source, entry._replace(data_offset=entry.data_offset + 7, size=9))


# --- torch's layout to the byte --------------------------------------------------------------


def records_of(data, *, crc=True):
    directory = read(data)
    return [
        Record(e.name, (Copy(0, Span(e.data_offset, e.size)),), e.size, e.crc if crc else None)
        for e in directory.entries
    ]


def written(parts, data):
    """The output of a plan, by the shortest writer there is."""
    pieces = []
    for part in parts:
        if isinstance(part, Literal):
            pieces.append(part.data)
        elif isinstance(part, Copy):
            pieces.append(data[part.span.offset : part.span.end])
        else:
            assert isinstance(part, Late)
            fill = pickle.loads(pickle.dumps(part.fill))
            pieces.append(fill(tuple(zlib.crc32(pieces[need]) for need in part.needs)))
            assert len(pieces[-1]) == part.size
    return b"".join(pieces)


def save_with(path, value, **options):
    old = {name: getattr(config.save, name) for name in options}
    try:
        for name, setting in options.items():
            setattr(config.save, name, setting)
        torch.save(value, path)
    finally:
        for name, setting in old.items():
            setattr(config.save, name, setting)
    return path.read_bytes()


LAYOUTS = {
    "plain": (STATE, {}),
    "many": ({f"layer.{n}": torch.full((n % 7 + 1,), n) for n in range(1200)}, {}),
    "alignment": (STATE, {"storage_alignment": 4096}),
    "no checksums": (STATE, {"compute_crc32": False}),
    "zero bytes": ({"a": torch.zeros(0), "b": torch.ones(2), "c": torch.zeros(0, 4)}, {}),
    "unicode keys": ({"gewicht.\u00fc": torch.ones(2), "\u91cd\u307f": torch.ones(1)}, {}),
}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_planned_as_torch_writes(tmp_path, name, known):
    value, options = LAYOUTS[name]
    data = save_with(tmp_path / "some name.pth", value, **options)
    if not known and name == "no checksums":
        pytest.skip("0 is recorded there; computing it gives another file")
    parts = plan_zip(records_of(data, crc=known), options.get("storage_alignment", 64))
    assert written(parts, data) == data
    assert total_size(parts) == len(data)
    pairs = itertools.pairwise(parts)
    assert not any(isinstance(a, Literal) and isinstance(b, Literal) for a, b in pairs)


def test_names_outside_ascii():
    record = Record("\u91cd\u307f/d\u00e4ta", (Literal(b"abc"),), 3, None)
    directory = assert_as_zipfile_sees_it(written(plan_zip([record]), b""))
    assert directory.top == "\u91cd\u307f"
    assert directory.records["d\u00e4ta"].crc == zlib.crc32(b"abc")


def test_more_than_65535_records(tmp_path):
    """Their number no longer fits the end record."""
    stream = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(stream)
    for number in range(66_000):
        writer.write_record(f"data/{number}", b"x", 1)
    writer.write_end_of_file()
    data = stream.getvalue()
    assert struct.unpack_from("<H", data, len(data) - 12)[0] == 0xFFFF
    assert written(plan_zip(records_of(data)), data) == data


@pytest.mark.long
def test_beyond_four_gigabytes(tmp_path):
    """Sizes and offsets around 0xFFFFFFFF, in sparse files: every byte but the holes compared."""
    path = tmp_path / "big.pth"
    sizes = [0xFFFFFFFF - 1, 100, 0xFFFFFFFF, 5, 0, 0xFFFFFFFF + 1, 3]
    with torch.serialization.skip_data():
        torch.save({str(n): torch.empty(s, dtype=torch.uint8) for n, s in enumerate(sizes)}, path)
    with open_source(path) as source:
        directory = read_directory(source)
        records = [
            Record(e.name, (Copy(0, Span(e.data_offset, e.size)),), e.size, e.crc)
            for e in directory.entries
        ]
        at = 0
        for part in plan_zip(records):
            if isinstance(part, Literal):
                assert part.data == source.read(at, part.size), at
            else:
                assert part.span.offset == at
            at += part.size
        assert at == source.size


def test_plans_that_cannot_be():
    made = Made(((0, Span(0, 1)),), "x", (), 1)
    for record in (
        Record("a/x", (Literal(b"x"),), 2, None),
        Record("a/x", (made, Literal(b"x")), 2, None),
    ):
        with pytest.raises(ValueError, match="a/x"):
            plan_zip([record])
    for alignment in (0, 70_000):
        with pytest.raises(ValueError, match="alignment"):
            plan_zip([], alignment)


def test_a_record_of_several_parts_has_the_checksum_of_all(tmp_path):
    """As torch.save would have written it from one."""
    path = tmp_path / "in"
    path.write_bytes(bytes(range(256)) * 40)
    with open_source(path) as source:
        spans = (Span(3, 5000), Span(0, 1), Span(100, 4999))
        parts = tuple(Copy(0, span) for span in spans)
        made = plan_zip([Record("a/x", parts, 10_000, None), Record("a/y", parts[:1], 5000, None)])
        plan = Plan((source.address,), (Output("", made, total_size(made)),))
        write(plan, FileSink(tmp_path / "out"), {})
        data = [source.read(*span) for span in spans]
    with zipfile.ZipFile(tmp_path / "out") as file:
        assert file.testzip() is None
        assert file.read("a/x") == b"".join(data)
        assert zlib.crc32(b"".join(data)) == file.getinfo("a/x").CRC
    with open_source(tmp_path / "out") as source:
        assert [entry.size for entry in read_directory(source).entries] == [10_000, 5000]


# --- what is left of a cut archive -----------------------------------------------------------


def test_walk_finds_the_whole_records():
    entries = read(GOOD).entries
    whole = walk_local_headers(BytesSource(GOOD, "x"))
    assert whole == [(e.name, Span(e.data_offset, e.size), True) for e in entries]
    for cut in range(0, len(GOOD), 53):
        found = walk_local_headers(BytesSource(GOOD[:cut], "x"))
        done = [name for name, _, ok in found if ok]
        expected = [e.name for e in entries if e.data_offset + e.size + 16 * bool(e.size) <= cut]
        assert done == expected, cut
        assert len(found) <= len(done) + 1


def test_walk_across_chunks_and_other_writers(monkeypatch):
    monkeypatch.setattr("ckptool.zipcut._STEP", 50)
    names = [e.name for e in read(GOOD).entries]
    assert [name for name, _, _ in walk_local_headers(BytesSource(GOOD, "x"))] == names
    for data in (packed(), streamed(), streamed(compression=zipfile.ZIP_DEFLATED)):
        found = walk_local_headers(BytesSource(data, "x"))
        assert [name for name, _, ok in found if ok] == [e.name for e in read(data).entries]


def test_walk_keeps_its_budget():
    big = saved({"a": torch.zeros(1 << 20)})[: 3 << 20]
    assert [ok for _, _, ok in walk_local_headers(BytesSource(big, "x"))][-1] is False
    within = walk_local_headers(BytesSource(big, "x"), budget=1 << 20)
    assert all(ok for _, _, ok in within)


def test_walk_of_noise():
    generator = random.Random(3)
    for _ in range(300):
        data = bytearray(GOOD)
        for _ in range(4):
            data[generator.randrange(len(data))] = generator.randrange(256)
        try:
            walk_local_headers(BytesSource(bytes(data), "x"))
        except CkptError:
            continue
