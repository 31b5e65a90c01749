"""Sources and folders: what may be opened, and that no read leaves its bounds."""

import io
import os
import pickle
import socket
import threading

import pytest

from ckptool import places
from ckptool.errors import CkptError, InputChanged, PathEscape, SpecialFile, Truncated
from ckptool.places import BytesSource, Folder, open_source, reopen
from ckptool.spans import Address, Span

DATA = bytes(range(256)) * 40


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "a file.bin"
    file.write_bytes(DATA)
    return file


def openers(path):
    return {
        "path": lambda: open_source(path),
        "str": lambda: open_source(str(path)),
        "bytes": lambda: open_source(os.fsencode(path)),
        "stream": lambda: open_source(io.BytesIO(DATA)),
        "memory": lambda: BytesSource(DATA, "x"),
        "window": lambda: BytesSource(b"ab" + DATA + b"c", "x").window(Span(2, len(DATA))),
    }


KINDS = ["path", "str", "bytes", "stream", "memory", "window"]


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_reads_exactly_what_is_asked(path, kind, fallback, monkeypatch):
    if fallback:
        monkeypatch.setattr(places, "pread", None)
        monkeypatch.setattr(places, "preadv", None)
    with openers(path)[kind]() as source:
        assert source.size == len(DATA)
        assert source.read(3, 500) == DATA[3:503]
        assert source.read(0, source.size) == DATA
        assert source.read(source.size, 0) == b""
        buffer = bytearray(300)
        source.read_into(10, memoryview(buffer))
        assert buffer == DATA[10:310]
        assert source.unchanged()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "span", [Span(-1, 1), Span(0, -1), Span(len(DATA), 1), Span(1, len(DATA)), Span(1 << 63, 1)]
)
def test_refuses_out_of_bounds(path, kind, span):
    with openers(path)[kind]() as source:
        with pytest.raises(Truncated):
            source.read(span.offset, span.size)
        with pytest.raises(Truncated):
            source.window(span)


def test_short_reads_are_continued(path, monkeypatch):
    monkeypatch.setattr(places, "pread", lambda fd, size, at: os.pread(fd, min(size, 7), at))
    monkeypatch.setattr(places, "preadv", lambda fd, views, at: os.preadv(fd, [views[0][:7]], at))
    with open_source(path) as source:
        assert source.read(1, 1000) == DATA[1:1001]
        buffer = bytearray(100)
        source.read_into(5, memoryview(buffer))
        assert buffer == DATA[5:105]


def test_windows_nest(path):
    with open_source(path) as source:
        inner = source.window(Span(100, 1000)).window(Span(20, 50))
        assert inner.read(0, 50) == DATA[120:170]
        assert inner.absolute(Span(5, 10)) == Span(125, 10)
        assert inner.fileno() == source.fileno()
        assert inner.name == source.name == str(path)


def test_a_file_cut_meanwhile_is_truncated(path):
    with open_source(path) as source:
        path.write_bytes(b"short")
        assert not source.unchanged()
        with pytest.raises(Truncated, match="shorter"):
            source.read(0, 100)
        with pytest.raises(Truncated, match="shorter"):
            source.read_into(0, memoryview(bytearray(100)))


def test_a_failing_device_is_our_error(path, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(places, "pread", fail)
    monkeypatch.setattr(places, "preadv", fail)
    with open_source(path) as source:
        for read in (lambda: source.read(3, 1), lambda: source.read_into(3, memoryview(b"1"))):
            with pytest.raises(CkptError, match="Input/output error") as caught:
                read()
            assert (caught.value.offset, caught.value.hint is not None) == (3, True)


def test_what_is_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name, text in {
            "fifo": "a FIFO",
            "dangling": "a link to 'nowhere'",
            "loop": "leads back",
            "socket": "a socket",
            "missing": "no such file",
            ".": "a folder",
            "fifo/x": "no such file",
            "/dev/zero": "a character device",
            "nul\0": "not a possible path",
        }.items():
            with pytest.raises(SpecialFile, match=text) as caught:
                open_source(os.path.join(tmp_path, name))
            assert caught.value.hint


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_no_permission(path):
    path.chmod(0)
    with pytest.raises(SpecialFile, match="permission"):
        open_source(path)


def test_a_stream_that_cannot_seek():
    read_end, write_end = os.pipe()
    with open(read_end, "rb") as stream, pytest.raises(SpecialFile, match="seek"):
        open_source(stream)
    os.close(write_end)


def test_a_closed_source_reads_nothing(path):
    source = open_source(path)
    source.close()
    source.close()
    with pytest.raises(CkptError):
        source.read(0, 1)


def test_reopen_knows_the_same_file(path):
    with open_source(path) as source:
        address = pickle.loads(pickle.dumps(source.address))
    assert address.uri == str(path)
    with reopen(address) as again:
        assert again.read(0, 4) == DATA[:4]
    path.write_bytes(DATA + b"x")
    with pytest.raises(InputChanged):
        reopen(address)
    with pytest.raises(SpecialFile):
        reopen(Address("", 3))


def test_threads_share_a_source_without_pread(path, monkeypatch):
    monkeypatch.setattr(places, "pread", None)
    wrong = []
    with open_source(path) as source:

        def read(start):
            found = {source.read(start, 64) for _ in range(200)}
            wrong.extend(found - {DATA[start : start + 64]})

        threads = [threading.Thread(target=read, args=(n * 31,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_folder(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "outside").write_bytes(b"out")
    (inside / "b").write_bytes(b"bb")
    (inside / "a").symlink_to("b")
    (inside / "out").symlink_to("../outside")
    (inside / "sub").mkdir()
    os.mkfifo(inside / "fifo")
    folder = Folder(inside)
    assert folder.list() == ["a", "b", "out"]
    with folder.child("a") as source:
        assert source.read(0, 2) == b"bb"
        assert source.name == str(inside / "a")
    for name in ("../outside", "/etc/passwd", "sub/x", "a\\b", "..", ".", "", "x\0", "out"):
        with pytest.raises(PathEscape):
            folder.child(name)
    for name in ("fifo", "sub", "missing"):
        with pytest.raises(SpecialFile):
            folder.child(name)
    for path in (tmp_path / "outside", tmp_path / "missing"):
        with pytest.raises(SpecialFile):
            Folder(path)
