"""Plans onto files: the right bytes by every way of copying, and nothing at all on any fault."""

import errno
import os
import pickle
import resource
import signal
import stat
import subprocess
import sys
import textwrap
import zlib
from functools import partial

import pytest

from ckptool import places, targets, writing
from ckptool.errors import (
    CkptError,
    CrcMismatch,
    InputChanged,
    OutputError,
    SpecialFile,
    StorageSize,
    Truncated,
)
from ckptool.places import open_source
from ckptool.plans import Copy, Late, Literal, Made, Output, Plan, total_size
from ckptool.spans import Span
from ckptool.values import RECIPES
from ckptool.writing import FileSink, check_different, write

DATA = os.urandom(1 << 16) * 40 + b"the end"  # 2.5 MiB: several blocks
BIG = Span(10, 2_500_000)
SMALL = Span(5, 300)


def crc(span):
    return zlib.crc32(DATA[span.offset : span.end])


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.pth"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder / "new.pth"


def plan_of(source, *parts, name="new.pth"):
    with open_source(source) as opened:
        return Plan((opened.address,), (Output(name, parts, total_size(parts)),))


def run(source, target, *parts, force=False, **options):
    return write(plan_of(source, *parts), FileSink(target, force=force), RECIPES, **options)


def usual_parts():
    """The first big part lies as in the source on its pages (the kernel copies), others do not."""
    return (
        Literal(b"head456789"),
        Copy(0, BIG, crc(BIG), "big"),
        Literal(b"between"),
        *(Copy(0, Span(n * 300, 300), crc(Span(n * 300, 300)), f"small{n}") for n in range(50)),
        Copy(0, BIG, None),
        Copy(0, Span(7, 0)),
        Copy(0, BIG, 0),
    )


def expected(parts):
    return b"".join(
        p.data if isinstance(p, Literal) else DATA[p.span.offset : p.span.end] for p in parts
    )


def files(path):
    return sorted(os.listdir(path.parent))


def assert_nothing_left(target):
    assert files(target) == []


# --- the right bytes -------------------------------------------------------------------------


def cannot(code):
    def way(*_):
        raise OSError(code, os.strerror(code))

    return way


def short(way):
    return lambda source, sink, offset, size: way(source, sink, offset, min(size, 999_983))


WAYS = {
    "as here": writing.COPIERS,
    "copy_file_range": (writing._copy_range,),
    "sendfile": (writing._send,),
    "read and write": (),
    "short copies": (short(writing._copy_range),),
    "short sendfile": (short(writing._send),),
    "says nothing": (lambda *_: 0,),
    **{
        f"{errno.errorcode[code]} then sendfile": (cannot(code), writing._send)
        for code in (errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
    },
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_copies(source, target, way, check, monkeypatch):
    monkeypatch.setattr(writing, "COPIERS", WAYS[way])
    parts = usual_parts()
    seen = []
    result = run(source, target, *parts, check=check, progress=seen.append)
    assert target.read_bytes() == expected(parts)
    assert files(target) == ["new.pth"]
    assert result.outputs == ((str(target), total_size(parts)),)
    assert result.crc_checked_bytes == (BIG.size + 50 * 300 if check else 0)
    assert result.findings == ()
    assert seen[-1] == total_size(parts)
    assert seen == sorted(seen)


@pytest.mark.parametrize("shift", [0, 1, 4086, 4096])
def test_the_kernel_copies_what_lies_alike_on_its_pages(source, target, shift, monkeypatch):
    sizes = []

    def count(*args):
        sizes.append(args[3])
        return writing._copy_range(*args)

    monkeypatch.setattr(writing, "COPIERS", (count,))
    parts = (Literal(b"x" * (BIG.offset + shift)), Copy(0, BIG, crc(BIG)))
    run(source, target, *parts)
    assert target.read_bytes() == expected(parts)
    assert sum(sizes) == (BIG.size if shift % 4096 == 0 else 0)


@pytest.mark.parametrize("lead", [b"", b"x" * BIG.offset], ids=["blocks", "kernel"])
def test_damage_is_found_on_both_ways(source, target, lead):
    span = Span(BIG.offset, BIG.size)
    with pytest.raises(CrcMismatch, match="recorded checksum"):
        run(source, target, Literal(lead), Copy(0, span, crc(span) ^ 1, "big"))
    assert_nothing_left(target)


def test_blocks_end_where_pages_of_the_output_end(source, target, monkeypatch):
    real, ends = os.write, []

    def note(fd, data):
        ends.append(os.lseek(fd, 0, os.SEEK_CUR) + len(data))
        return real(fd, data)

    monkeypatch.setattr(writing.os, "write", note)
    run(source, target, Literal(b"head"), Copy(0, BIG, crc(BIG)))
    assert len(ends) > 3
    assert [end % 4096 for end in ends[1:-1]] == [0] * (len(ends) - 2)


def test_without_pread(source, target, monkeypatch):
    monkeypatch.setattr(writing, "COPIERS", ())
    monkeypatch.setattr(places, "pread", None)
    monkeypatch.setattr(places, "preadv", None)
    run(source, target, *usual_parts())
    assert target.read_bytes() == expected(usual_parts())


def test_short_writes_are_continued(source, target, monkeypatch):
    real = os.write
    monkeypatch.setattr(writing, "COPIERS", ())
    monkeypatch.setattr(writing.os, "write", lambda fd, data: real(fd, data[:70_001]))
    run(source, target, *usual_parts())
    assert target.read_bytes() == expected(usual_parts())


def test_many_chunks_and_their_progress(source, target, monkeypatch):
    monkeypatch.setattr(writing, "_CHUNK", 100_000)
    seen = []
    run(source, target, Copy(0, BIG, crc(BIG)), progress=seen.append)
    assert target.read_bytes() == DATA[BIG.offset : BIG.end]
    assert len(seen) == 26


def listed(crcs, note):
    return b"|".join(b"%08x" % value for value in crcs) + note


@pytest.mark.parametrize("check", [True, False])
def test_late_parts(source, target, check):
    parts = (
        Copy(0, BIG, crc(BIG)),
        Literal(b"abc"),
        Copy(0, SMALL),
        Late(9, partial(listed, note=b"!"), (0,)),
        Copy(0, BIG),
        Late(36, partial(listed, note=b"."), (4, 1, 2, 0)),
    )
    plan = pickle.loads(pickle.dumps(plan_of(source, *parts)))
    write(plan, FileSink(target), {}, check=check)
    sums = [crc(BIG), zlib.crc32(b"abc"), crc(SMALL), crc(BIG)]
    got = target.read_bytes()
    assert got.endswith(listed(sums, b"."))
    assert got[BIG.size + 303 :].startswith(b"%08x!" % crc(BIG))


def test_a_late_part_of_the_wrong_size(source, target):
    with pytest.raises(CkptError, match="late part"):
        run(source, target, Literal(b"x"), Late(5, partial(listed, note=b""), (0,)))
    assert_nothing_left(target)


def deflated(data, extra=b""):
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush() + extra


def test_inflate(source, target):
    for data in (b"", b"x", bytes(3 << 20), DATA, os.urandom(1 << 20), bytes(1 << 20)):
        held = deflated(data)
        source.write_bytes(b"__" + held)
        made = Made(((0, Span(2, len(held))),), "inflate", (), len(data), zlib.crc32(data), "x")
        late = Late(8, partial(listed, note=b""), (0,))
        run(source, target, made, late, force=True)
        assert target.read_bytes() == data + b"%08x" % zlib.crc32(data)


@pytest.mark.parametrize(
    ("held", "size", "error"),
    [
        (deflated(DATA), len(DATA) - 1, StorageSize),
        (deflated(DATA), len(DATA) + 1, Truncated),
        (deflated(DATA)[:-1000], len(DATA), Truncated),
        (b"\xff" + deflated(DATA), len(DATA), CrcMismatch),
        (deflated(DATA[::-1]), len(DATA), CrcMismatch),
    ],
)
def test_inflate_refuses(source, target, held, size, error):
    source.write_bytes(held)
    made = Made(((0, Span(0, len(held))),), "inflate", (), size, zlib.crc32(DATA), "data/0")
    with pytest.raises(error):
        run(source, target, made)
    assert_nothing_left(target)


@pytest.mark.parametrize("chunks", [[b"abc"], [b"abcd", b"e"], []])
def test_made_of_the_wrong_size(source, target, chunks):
    plan = plan_of(source, Made((), "odd", (), 4))
    with pytest.raises(StorageSize):
        write(plan, FileSink(target), {"odd": lambda reader, made: iter(chunks)})
    assert_nothing_left(target)


def test_several_outputs_and_sources(source, target):
    with open_source(source) as first:
        other = target.parent / "other-in"
        other.write_bytes(b"0123456789")
        with open_source(other) as second:
            addresses = (first.address, second.address)
    outputs = (
        Output("a", (Copy(1, Span(2, 3)),), 3),
        Output("b", (Copy(0, BIG, crc(BIG)), Late(8, partial(listed, note=b""), (0,))), 2_500_008),
    )
    result = write(Plan(addresses, outputs), FileSink(target.parent / "x"), {})
    assert (target.parent / "a").read_bytes() == b"234"
    assert (target.parent / "b").read_bytes().endswith(b"%08x" % crc(BIG))
    assert files(target) == ["a", "b", "other-in"]
    assert [path for path, _ in result.outputs] == [str(target.parent / n) for n in "ab"]


def test_names_of_several_outputs_stay_in_the_folder(source, target):
    outputs = (Output("a", (), 0), Output("../b", (), 0))
    with pytest.raises(OutputError, match="plain file name"):
        write(Plan((), outputs), FileSink(target), {})


# --- every fault leaves what was there -------------------------------------------------------


@pytest.fixture(params=["new", "old"])
def before(request, target):
    """The target before the write: not there, or an older file."""
    if request.param == "old":
        target.write_bytes(b"old content")
    names = files(target)

    def check():
        assert files(target) == names
        assert not names or target.read_bytes() == b"old content"

    return check


@pytest.mark.parametrize("span", [BIG, SMALL])
def test_checksum_mismatch(source, target, before, span):
    with pytest.raises(CrcMismatch, match=r"bytes of 'module\.fc\.weight' do not") as caught:
        run(source, target, Copy(0, span, crc(span) ^ 1, "module.fc.weight"), force=True)
    assert caught.value.path == str(source)
    before()
    run(source, target, Copy(0, span, crc(span) ^ 1), force=True, check=False)


def test_mismatch_stops_a_long_write_early(source, target, before, monkeypatch):
    monkeypatch.setattr(writing, "_CHUNK", 1 << 16)
    parts = (Copy(0, BIG, 1, "w"), *(Copy(0, BIG, crc(BIG)) for _ in range(40)))
    seen = []
    with pytest.raises(CrcMismatch):
        run(source, target, *parts, force=True, progress=seen.append)
    assert max(seen) < 4 * BIG.size
    before()


@pytest.mark.parametrize("part", [Copy(0, Span(0, len(DATA) + 1)), Copy(0, Span(len(DATA), 9))])
def test_spans_beyond_the_source(source, target, before, part):
    with pytest.raises(Truncated):
        run(source, target, part, force=True)
    before()


def test_input_changed_before(source, target, before):
    plan = plan_of(source, Copy(0, BIG))
    source.write_bytes(DATA + b"more")
    with pytest.raises(InputChanged):
        write(plan, FileSink(target, force=True), {})
    before()


def test_input_changed_meanwhile(source, target, before):
    def touch(_):
        os.utime(source, (1, 1))

    with pytest.raises(InputChanged):
        run(source, target, Copy(0, BIG, crc(BIG)), force=True, progress=touch)
    before()


def test_input_gone(source, target, before):
    plan = plan_of(source, Copy(0, BIG))
    source.unlink()
    with pytest.raises(SpecialFile):
        write(plan, FileSink(target, force=True), {})
    before()


FAULTS = {
    "write": (writing.os, "write", errno.ENOSPC, "output-space"),
    "quota": (writing.os, "write", errno.EDQUOT, "output-space"),
    "copy_file_range": (writing.os, "copy_file_range", errno.ENOSPC, "output-space"),
    "copy EIO": (writing.os, "copy_file_range", errno.EIO, "output-io"),
    "fsync": (targets.os, "fsync", errno.EIO, "output-io"),
    "rename": (targets.os, "replace", errno.EACCES, "output-folder"),
    "open": (targets.os, "open", errno.EROFS, "output-folder"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_the_system(source, target, before, name, monkeypatch):
    module, function, code, slug = FAULTS[name]
    plan = plan_of(source, Literal(b"head456789"), Copy(0, BIG, crc(BIG)))
    with open_source(source) as opened, monkeypatch.context() as patch:
        patch.setattr(module, function, cannot(code))
        sink = FileSink(target, force=True)
        with pytest.raises(OutputError) as caught:
            write(plan, sink, {}, opener=lambda _: opened)
    assert caught.value.slug == slug
    assert caught.value.path == str(target)
    assert caught.value.hint
    before()


def test_file_size_limit(source, target, before):
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, old[1]))
    try:
        with pytest.raises(OutputError) as caught:
            run(source, target, *usual_parts(), force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.slug == "output-io"
    before()


def test_too_little_space(source, target, before, monkeypatch):
    monkeypatch.setattr(targets, "free_bytes", lambda folder: 1000)
    with pytest.raises(OutputError, match="2,500,000 bytes are needed, 1,000 are free") as caught:
        run(source, target, Copy(0, BIG), force=True)
    assert caught.value.slug == "output-space"
    before()
    monkeypatch.setattr(targets, "free_bytes", None)
    run(source, target, Copy(0, BIG), force=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, CkptError("stop"), MemoryError])
@pytest.mark.parametrize("where", ["progress", "verify"])
def test_interrupted(source, target, before, error, where):
    def stop(_):
        raise error

    with pytest.raises(error if isinstance(error, type) else CkptError):
        run(source, target, *usual_parts(), force=True, **{where: stop})
    before()


def test_verify_sees_the_finished_file(source, target):
    seen = []

    def verify(source):
        seen.append((source.name, source.read(0, source.size)))
        assert not target.exists()

    run(source, target, Literal(b"abc"), Copy(0, SMALL), verify=verify)
    assert seen == [(str(target), b"abc" + DATA[5:305])]


def test_a_killed_run_leaves_the_old_file_and_is_named_by_the_next(source, target):
    target.write_bytes(b"old content")
    code = """
        import os, signal, sys
        from ckptool.plans import *; from ckptool.spans import *
        from ckptool.places import open_source
        from ckptool.writing import FileSink, write
        a = open_source(sys.argv[1]).address
        plan = Plan((a,), (Output("x", (Copy(0, Span(0, 2_000_000)),), 2_000_000),))
        kill = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        write(plan, FileSink(sys.argv[2], force=True), {}, progress=kill)
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(writing.__file__)))
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(source), str(target)],
        env={**os.environ, "PYTHONPATH": root},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert target.read_bytes() == b"old content"
    (stale,) = set(files(target)) - {"new.pth"}
    assert stale.startswith(".new.pth.ckptool-")
    result = run(source, target, Literal(b"new"), force=True)
    assert result.findings == (f"left by an interrupted run, remove it: {stale}",)
    assert stale in files(target)


def test_temp_files_of_others_are_never_taken_or_removed(source, target):
    mine = target.parent / f".new.pth.ckptool-{os.getpid()}.tmp"
    mine.write_bytes(b"another thread's")
    run(source, target, Literal(b"new"))
    assert mine.read_bytes() == b"another thread's"
    assert target.read_bytes() == b"new"


def test_a_folder_that_cannot_be_flushed_is_told(source, target, monkeypatch):
    monkeypatch.setattr(writing, "sync_folder", cannot(errno.EIO))
    (said,) = run(source, target, Literal(b"new")).findings
    assert "could not be flushed" in said
    assert target.read_bytes() == b"new"


@pytest.mark.parametrize("fsync", [True, False])
def test_fsync_before_the_rename(source, target, fsync, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def spy(*args, name=name, real=real):
            calls.append(name)
            return real(*args)

        monkeypatch.setattr(os, name, spy)
    run(source, target, Literal(b"new"), fsync=fsync)
    assert calls == (["fsync", "replace", "fsync"] if fsync else ["replace"])


# --- targets ---------------------------------------------------------------------------------


def refusal(path, **options):
    with pytest.raises(OutputError) as caught:
        FileSink(path, **options)
    assert caught.value.path == str(path)
    assert caught.value.hint
    return caught.value.slug


def test_targets_that_are_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "to null").symlink_to("/dev/null")
    (tmp_path / "loop").symlink_to("loop")
    assert refusal(tmp_path / "file") == "output-exists"
    for force in (False, True):
        for name in ("fifo", "to null", "loop", "."):
            assert refusal(tmp_path / name, force=force) == "output-special"
        assert refusal(tmp_path / "missing" / "x", force=force) == "output-folder"
        assert refusal(tmp_path / "file" / "x", force=force) == "output-folder"
        assert refusal("nul\0", force=force) == "output-special"
    assert refusal("/dev/full", force=True) == "output-special"


def test_a_folder_without_permission(tmp_path, monkeypatch):
    monkeypatch.setattr(targets.os, "access", lambda *_: False)
    with pytest.raises(OutputError, match="no permission") as caught:
        FileSink(tmp_path / "x")
    assert "write permission on the folder" in caught.value.hint


def test_check_different(tmp_path, source):
    (tmp_path / "link").symlink_to(source)
    os.link(source, tmp_path / "hard")
    (tmp_path / "copy").write_bytes(DATA)
    with open_source(source) as opened:
        for name in ("in.pth", "link", "hard"):
            with pytest.raises(OutputError) as caught:
                check_different([opened.address], tmp_path / name)
            assert caught.value.slug == "output-same"
        for name in ("copy", "missing", "in.pth/x", "\0"):
            check_different([opened.address], tmp_path / name)


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.mark.parametrize("mask", [0o022, 0o007, 0o077])
def test_the_mode_of_a_new_file_follows_umask(source, target, mask):
    old = os.umask(mask)
    try:
        run(source, target, Literal(b"new"))
    finally:
        os.umask(old)
    assert mode(target) == 0o666 & ~mask


@pytest.mark.parametrize("bits", [0o640, 0o600, 0o444, 0o777])
def test_the_mode_of_an_old_file_is_kept(source, target, bits):
    target.write_bytes(b"old")
    target.chmod(bits)
    during = []

    def look(_):
        (temp,) = target.parent.glob(".*.tmp")
        during.append(mode(temp))

    run(source, target, Literal(b"new"), force=True, progress=look)
    assert target.read_bytes() == b"new"
    assert {mode(target), *during} == {bits}


def test_a_link_is_kept_and_what_it_names_is_written(source, target):
    real = target.parent / "elsewhere"
    target.symlink_to("elsewhere")
    run(source, target, Literal(b"one"))  # dangling: creates what it names
    run(source, target, Literal(b"two"), force=True)
    assert target.is_symlink()
    assert real.read_bytes() == b"two"
    assert files(target) == ["elsewhere", "new.pth"]


def test_a_hard_link_is_broken_and_told(source, target):
    target.write_bytes(b"old")
    os.link(target, target.parent / "other")
    (said,) = run(source, target, Literal(b"new"), force=True).findings
    assert "hard link" in said
    assert (target.parent / "other").read_bytes() == b"old"


@pytest.mark.parametrize("name", ["x" * 250, "\u91cd" * 80, "sp ace\nline", "\udcff.pth"])
def test_names(source, target, name):
    path = target.parent / name
    run(source, path, Literal(b"new"))
    assert path.read_bytes() == b"new"
    assert len(files(target)) == 1


def test_memory_is_constant(source, target):
    """A copy of 64 MiB with its checksum keeps far less than that."""
    code = """
        import resource, sys, zlib
        from ckptool.plans import *; from ckptool.spans import *
        from ckptool.places import open_source
        from ckptool.writing import FileSink, write
        a = open_source(sys.argv[1]).address
        parts = (Copy(0, Span(0, 64 << 20), int(sys.argv[3])),)
        low = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        write(Plan((a,), (Output("x", parts, 64 << 20),)), FileSink(sys.argv[2]), {})
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - low)
    """
    data = bytes(64 << 20)
    source.write_bytes(data)
    root = os.path.dirname(os.path.dirname(os.path.abspath(writing.__file__)))
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(code),
            str(source),
            str(target),
            str(zlib.crc32(data)),
        ],
        env={**os.environ, "PYTHONPATH": root},
        check=True,
        capture_output=True,
    )
    assert int(ran.stdout) < 16 << 10
