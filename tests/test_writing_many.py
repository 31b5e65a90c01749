"""Plans of many sources and outputs: few sources open at a time, and all files or none."""

import errno
import os
import stat
import subprocess
import sys
import textwrap
import zlib

import pytest

from ckptool import sources, targets, writing
from ckptool.errors import CkptError, CrcMismatch, InputChanged, OutputError, SpecialFile
from ckptool.places import open_source, reopen
from ckptool.plans import Copy, Literal, Made, Output, Plan, total_size
from ckptool.spans import Span
from ckptool.writing import FileSink, FolderSink, write

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(writing.__file__)))
SIZE = 200_000  # above what is read at once: the checking thread has a part in it


def content(number):
    return number.to_bytes(4, "big") * (SIZE // 4)


@pytest.fixture
def inputs(tmp_path):
    """Five files and their addresses."""
    folder = tmp_path / "in"
    folder.mkdir()
    paths = [folder / f"{number}.bin" for number in range(5)]
    for number, path in enumerate(paths):
        path.write_bytes(content(number))
    return paths


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def addresses(paths):
    found = []
    for path in paths:
        with open_source(path) as source:
            found.append(source.address)
    return tuple(found)


def whole(number, crc=True):
    return Copy(number, Span(0, SIZE), zlib.crc32(content(number)) if crc else None, f"t{number}")


def plan_of(paths, *parts, name="x"):
    return Plan(addresses(paths), (Output(name, parts, total_size(parts)),))


def outputs(**parts):
    return Plan(
        (), tuple(Output(name, (Literal(data),), len(data)) for name, data in parts.items())
    )


class Watched:
    """An opener that counts what is open."""

    def __init__(self):
        self.opened = []
        self.open = set()
        self.most = 0

    def __call__(self, address):
        source = reopen(address)
        name = os.path.basename(address.uri)
        assert name not in self.open
        self.opened.append(name)
        self.open.add(name)
        self.most = max(self.most, len(self.open))
        close = source.close

        def closing():
            self.open.discard(name)
            close()

        source.close = closing
        return source


# --- few sources at a time --------------------------------------------------------------------


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0], [1, 0, 1, 0], [3], []])
def test_no_more_than_a_few_are_open(inputs, out, order, check, monkeypatch):
    monkeypatch.setattr(sources, "OPEN", 2)
    watched = Watched()
    plan = plan_of(inputs, *map(whole, order))
    write(plan, FileSink(out), {}, opener=watched, check=check)
    assert out.read_bytes() == b"".join(map(content, order))
    assert watched.most == 2
    assert watched.open == set()
    assert set(watched.opened) == {f"{n}.bin" for n in range(5)}  # the unread ones are checked


def test_one_that_is_read_again_stays_open(inputs, out, monkeypatch):
    monkeypatch.setattr(sources, "OPEN", 2)
    watched = Watched()
    write(plan_of(inputs[:3], *map(whole, [0, 1, 0, 2, 0])), FileSink(out), {}, opener=watched)
    assert watched.opened == ["0.bin", "1.bin", "2.bin"]


def test_one_source_is_opened_once(inputs, out):
    watched = Watched()
    parts = [Copy(0, Span(n, 300)) for n in range(50)] + [whole(0)]
    write(plan_of(inputs[:1], *parts), FileSink(out), {}, opener=watched)
    assert watched.opened == ["0.bin"]


def test_small_and_large_parts_keep_their_order(inputs, out):
    parts = [
        part
        for n in range(5)
        for part in (Copy(n, Span(n, 10)), Literal(b"|"), whole(n), Copy(4 - n, Span(0, 3)))
    ]
    write(plan_of(inputs, *parts), FileSink(out), {})
    expected = b"".join(
        content(n)[n : n + 10] + b"|" + content(n) + content(4 - n)[:3] for n in range(5)
    )
    assert out.read_bytes() == expected


def test_a_made_part_reads_several(inputs, out):
    def zipped(reader, made):
        for at in range(0, made.size // len(made.pieces), 4):
            yield b"".join(reader(number, span.offset + at, 4) for number, span in made.pieces)

    pieces = tuple((n, Span(8, 40)) for n in (3, 1, 4))
    made = Made(pieces, "zipped", (), 120)
    watched = Watched()
    write(plan_of(inputs, made), FileSink(out), {"zipped": zipped}, opener=watched)
    assert out.read_bytes() == b"".join(n.to_bytes(4, "big") for n in (3, 1, 4)) * 10
    assert watched.opened == ["0.bin", "3.bin", "1.bin", "4.bin", "2.bin"]


def test_a_bad_checksum_of_an_earlier_source_is_found(inputs, out):
    parts = [whole(0), whole(1)._replace(crc=1), whole(2), whole(3)]
    with pytest.raises(CrcMismatch) as caught:
        write(plan_of(inputs, *parts), FileSink(out), {})
    assert caught.value.path == str(inputs[1])
    assert not out.exists()


@pytest.mark.parametrize("number", range(5))
def test_a_source_that_changes_while_it_is_open(inputs, out, number, monkeypatch):
    """Its size and its first bytes stay: only the time of change tells."""
    monkeypatch.setattr(writing, "_CHUNK", SIZE // 4)
    monkeypatch.setattr(sources, "OPEN", 1)  # each is left before the next one is opened
    seen = []

    def touch(done):
        seen.append(done)
        if done // SIZE == number and done % SIZE == SIZE // 2:
            os.utime(inputs[number], (1, 1))

    with pytest.raises(InputChanged) as caught:
        write(plan_of(inputs, *map(whole, range(5))), FileSink(out), {}, progress=touch)
    assert caught.value.path == str(inputs[number])
    assert max(seen) <= (number + 1) * SIZE
    assert os.listdir(out.parent) == ["in"]


@pytest.mark.parametrize("number", range(1, 5))
def test_a_source_that_changes_before_its_turn(inputs, out, number):
    parts = tuple(Output(f"o{n}", (whole(n),), SIZE) for n in range(5))
    plan = Plan(addresses(inputs), parts)

    def change(_):
        inputs[number].write_bytes(content(number) + b"!")

    with pytest.raises(InputChanged) as caught:
        write(plan, FolderSink(out), {}, progress=change)
    assert caught.value.path == str(inputs[number])
    assert not out.exists()


def test_one_that_no_part_reads_must_be_the_same_still(inputs, out):
    plan = plan_of(inputs, whole(0))
    inputs[3].write_bytes(b"another")
    with pytest.raises(InputChanged):
        write(plan, FileSink(out), {})
    inputs[3].unlink()
    with pytest.raises(SpecialFile):
        write(plan, FileSink(out), {})
    assert not out.exists()


def test_the_first_source_is_tried_before_anything_is_written(inputs, out, monkeypatch):
    plan = plan_of(inputs, Literal(b"head"), whole(0))
    inputs[0].unlink()
    monkeypatch.setattr(targets.Target, "open", lambda self: pytest.fail("a temp file was made"))
    with pytest.raises(SpecialFile):
        write(plan, FileSink(out), {})


def test_three_hundred_sources_with_few_descriptors(tmp_path):
    """Under a limit of 64 open files, each source 100 kB, and 80 outputs."""
    code = """
        import os, resource, sys, zlib
        from ckptool.plans import *; from ckptool.spans import *
        from ckptool.places import open_source
        from ckptool.writing import FolderSink, write
        os.chdir(sys.argv[1])
        data = [n.to_bytes(4, "big") * 25_000 for n in range(300)]
        addresses = []
        for n, held in enumerate(data):
            with open(f"in{n}", "wb") as file:
                file.write(held)
            with open_source(f"in{n}") as source:
                addresses.append(source.address)
        parts = [Copy(n, Span(0, 100_000), zlib.crc32(data[n])) for n in range(300)]
        outputs = [Output(f"o{i:02}", tuple(parts[i::80]), 100_000 * len(parts[i::80])) for i in range(80)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        done = write(Plan(tuple(addresses), tuple(outputs)), FolderSink("out"), {}, fsync=False)
        assert done.crc_checked_bytes == 30_000_000
        for i in range(80):
            with open(f"out/o{i:02}", "rb") as file:
                assert file.read() == b"".join(data[i::80])
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": ROOT},
        check=True,
    )


# --- what recipes return ---------------------------------------------------------------------


def counting(reader, made):
    yield from (b"a" * 1000 for _ in range(made.size // 1000))
    return made.args[0]


def test_results_come_in_order_and_none_is_left_out(out):
    returned = (7, None, 0, {"nan": 1})
    made = [Made((), "counting", (r,), 2000, None, f"t{n}") for n, r in enumerate(returned)]
    plan = Plan(
        (),
        (
            Output("a", (made[0], made[1], Literal(b"x")), 4001),
            Output("b", (made[2], Made((), "plain", (), 3, None, "p"), made[3]), 4003),
        ),
    )
    recipes = {"counting": counting, "plain": lambda reader, made: iter([b"abc"])}
    result = write(plan, FolderSink(out), recipes)
    assert result.results == (("t0", 7), ("t2", 0), ("t3", {"nan": 1}))
    assert (out / "b").read_bytes() == b"a" * 2000 + b"abc" + b"a" * 2000


def test_no_results(inputs, out):
    assert write(plan_of(inputs, whole(0)), FileSink(out), {}).results == ()


# --- into a folder ---------------------------------------------------------------------------


def tree(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_a_new_folder_is_made_at_the_write_and_not_before(out):
    sink = FolderSink(out)
    found = sink.targets(["a"])
    assert not out.exists()
    assert [target.path for target in found] == [str(out / "a")]
    old = os.umask(0o027)
    try:
        result = write(outputs(a=b"1", b=b"22"), sink, {})
    finally:
        os.umask(old)
    assert tree(out) == {"a": b"1", "b": b"22"}
    assert result.outputs == ((str(out / "a"), 1), (str(out / "b"), 2))
    assert stat.S_IMODE(out.stat().st_mode) == 0o750


@pytest.mark.parametrize("slash", ["", "/"])
def test_one_output_goes_into_the_folder_too(out, slash):
    write(outputs(a=b"1"), FolderSink(f"{out}{slash}"), {})
    assert tree(out) == {"a": b"1"}


def test_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(outputs(a=b"1"), FolderSink("new"), {})
    write(outputs(b=b"2"), FolderSink("new"), {})
    write(outputs(c=b"3"), FolderSink("."), {})
    assert tree(tmp_path) == {"new/a": b"1", "new/b": b"2", "c": b"3"}


def test_a_link_to_a_folder_that_is_not_there_yet(tmp_path):
    (tmp_path / "link").symlink_to("real")
    write(outputs(a=b"1"), FolderSink(tmp_path / "link"), {})
    assert tree(tmp_path / "real") == {"a": b"1"}
    assert (tmp_path / "link").is_symlink()


def test_both_folders_are_flushed(out, monkeypatch):
    flushed = []
    monkeypatch.setattr(writing, "sync_folder", flushed.append)
    write(outputs(a=b"1"), FolderSink(out), {})
    write(outputs(b=b"1"), FolderSink(out), {})
    assert flushed == [str(out.parent), str(out), str(out)]


def test_the_order_of_publishing_is_that_of_the_outputs(out, monkeypatch):
    seen = []
    real = os.replace

    def spy(temp, path):
        seen.append(os.path.basename(path))
        real(temp, path)

    monkeypatch.setattr(os, "replace", spy)
    names = ["z.safetensors", "a.safetensors", "model.safetensors.index.json"]
    write(outputs(**dict.fromkeys(names, b"1")), FolderSink(out), {})
    assert seen == names


def refusal(make):
    with pytest.raises(OutputError) as caught:
        make()
    assert caught.value.hint
    return caught.value


def test_folders_that_are_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for path, slug, text in (
        (tmp_path / "file", "special", "a file, not a folder"),
        (tmp_path / "fifo", "special", "a FIFO"),
        ("/dev/null", "special", "a character device"),
        ("nul\0", "special", "not a possible path"),
        ("", "special", "an empty path"),
        (tmp_path / "loop", "special", ""),
        (tmp_path / "missing" / "x", "folder", "no folder"),
        (tmp_path / "file" / "x", "folder", "no folder"),
    ):
        for force in (False, True):
            error = refusal(lambda path=path, force=force: FolderSink(path, force=force))
            assert error.slug == f"output-{slug}"
            assert text in error.text
    assert sorted(os.listdir(tmp_path)) == ["fifo", "file", "loop"]


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_without_permission(out, there, monkeypatch):
    if there:
        out.mkdir()
    monkeypatch.setattr(targets.os, "access", lambda *_: False)
    error = refusal(lambda: FolderSink(out))
    assert error.slug == "output-folder"


def test_old_files_are_replaced_with_force_only(out):
    out.mkdir()
    (out / "b").write_bytes(b"old")
    (out / "b").chmod(0o640)
    plan = outputs(a=b"1", b=b"2")
    assert refusal(lambda: write(plan, FolderSink(out), {})).slug == "output-exists"
    assert tree(out) == {"b": b"old"}
    write(plan, FolderSink(out, force=True), {})
    assert tree(out) == {"a": b"1", "b": b"2"}
    assert stat.S_IMODE((out / "b").stat().st_mode) == 0o640


NEW = {"model-00001-of-00001.safetensors": b"1", "model.safetensors.index.json": b"{}"}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "old",
    [
        "model-00001-of-00002.safetensors",
        "model.safetensors",
        "other.SAFETENSORS",
        "other.index.json",
        "model.safetensors.index.json.index.json",
    ],
)
def test_stale_shards_are_never_mixed_with_new_ones(out, old, force):
    out.mkdir()
    (out / old).write_bytes(b"old")
    (out / "config.json").write_bytes(b"{}")
    error = refusal(lambda: write(outputs(**NEW), FolderSink(out, force=force), {}))
    assert error.slug == "output-mixed"
    assert error.findings == (old,)
    assert old in error.text
    assert tree(out) == {old: b"old", "config.json": b"{}"}


def test_the_same_shards_again_and_strangers_are_fine(out):
    out.mkdir()
    strangers = {
        "config.json": b"{}",
        "pytorch_model.bin": b"b",
        "pytorch_model.bin.index.json": b"{}",
    }
    for name, data in {**strangers, **NEW}.items():
        (out / name).write_bytes(data)
    new = dict.fromkeys(NEW, b"new")
    assert refusal(lambda: write(outputs(**new), FolderSink(out), {})).slug == "output-exists"
    write(outputs(**new), FolderSink(out, force=True), {})
    assert tree(out) == {**strangers, **new}


@pytest.mark.parametrize("name", ["../b", "", ".", "x/y", "a\\b", "nul\0"])
def test_names_stay_in_the_folder(out, name):
    plan = Plan((), (Output("a", (), 0), Output(name, (), 0)))
    with pytest.raises(OutputError, match="plain file name"):
        write(plan, FolderSink(out), {})
    assert not out.exists()


def test_a_target_that_is_a_source(inputs):
    plan = plan_of(inputs, whole(1), name="0.bin")
    folder = inputs[0].parent
    for sink in (FolderSink(folder, force=True), FileSink(inputs[3], force=True)):
        assert refusal(lambda sink=sink: write(plan, sink, {})).slug == "output-same"
    assert [path.read_bytes() for path in inputs] == [content(n) for n in range(5)]


# --- a file beside ---------------------------------------------------------------------------


def test_beside_a_file(tmp_path):
    sink = FileSink(
        tmp_path / "a.pth", beside={"extras": tmp_path / "b.json", "unused": tmp_path / "c"}
    )
    result = write(outputs(main=b"1", extras=b"{}"), sink, {})
    assert tree(tmp_path) == {"a.pth": b"1", "b.json": b"{}"}
    assert result.outputs == ((str(tmp_path / "a.pth"), 1), (str(tmp_path / "b.json"), 2))


def test_beside_the_outputs_of_a_folder(tmp_path, out):
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "elsewhere" / "b.json"
    sink = FolderSink(out, beside={"extras": path})
    write(outputs(a=b"1", extras=b"{}", c=b"2"), sink, {})
    assert tree(tmp_path) == {"out/a": b"1", "out/c": b"2", "elsewhere/b.json": b"{}"}


@pytest.mark.parametrize("order", [["a", "extras"], ["extras", "a"]])
def test_beside_inside_the_new_folder(out, order):
    sink = FolderSink(out, beside={"extras": out / "notes.json"})
    write(outputs(**dict.fromkeys(order, b"1")), sink, {})
    assert tree(out) == {"a": b"1", "notes.json": b"1"}


def test_what_lies_beside_is_checked_when_the_sink_is_made(tmp_path, out):
    (tmp_path / "old").write_bytes(b"x")
    (tmp_path / "link").symlink_to("a.pth")
    for path, slug in (
        ("old", "exists"),
        ("missing/x", "folder"),
        (".", "special"),
        ("a.pth", "same"),
        ("link", "same"),
    ):
        beside = {"extras": tmp_path / path}
        error = refusal(lambda beside=beside: FileSink(tmp_path / "a.pth", beside=beside))
        assert error.slug == f"output-{slug}"
    for path, slug in (("old", "exists"), ("missing/x", "folder"), ("old/", "special")):
        beside = {"extras": f"{tmp_path}/{path}"}
        assert (
            refusal(lambda beside=beside: FolderSink(out, beside=beside)).slug == f"output-{slug}"
        )


def test_two_outputs_in_one_file(tmp_path, out):
    out.mkdir()
    (out / "a").write_bytes(b"x")
    os.link(out / "a", out / "b")
    (out / "c").symlink_to("d")
    cases = [
        lambda: write(outputs(a=b"1", b=b"2"), FolderSink(out, force=True), {}),
        lambda: write(outputs(c=b"1", d=b"2"), FolderSink(out, force=True), {}),
        lambda: write(outputs(d=b"1", e=b"2"), FolderSink(out, beside={"e": out / "d"}), {}),
        lambda: write(
            outputs(d=b"1", f=b"", e=b"2"), FileSink(out / "z", beside={"e": out / "c"}), {}
        ),
        lambda: FolderSink(out, beside={"e": out / "q", "f": out / "q"}),
    ]
    for case in cases:
        assert refusal(case).slug == "output-same"


# --- all or nothing --------------------------------------------------------------------------


@pytest.fixture(params=["new", "old"])
def before(request, out):
    """The folder before the write: not there, or with older files."""
    if request.param == "old":
        out.mkdir()
        (out / "a").write_bytes(b"old")
    then = tree(out)

    def check():
        assert out.exists() == (request.param == "old")
        assert tree(out) == then

    return check


def failing(name, code, after):
    """os.`name` that fails once it was called `after` times."""
    real = getattr(os, name)
    calls = []

    def way(*args):
        calls.append(args)
        if len(calls) > after:
            raise OSError(code, os.strerror(code))
        return real(*args)

    return way


@pytest.mark.parametrize("name", ["write", "fsync"])
def test_a_fault_in_the_second_output_leaves_nothing(out, before, name, monkeypatch):
    sink = FolderSink(out, force=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing(name, errno.ENOSPC, 1))
        with pytest.raises(OutputError) as caught:
            write(outputs(a=b"1", b=b"2"), sink, {})
    assert caught.value.slug == "output-space"
    assert caught.value.path == str(out / "b")
    before()


def test_a_folder_that_cannot_be_made(out, monkeypatch):
    sink = FolderSink(out)
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", failing("mkdir", errno.ENOSPC, 0))
        assert refusal(lambda: write(outputs(a=b"1"), sink, {})).slug == "output-space"
    assert not out.exists()


def test_a_folder_that_somebody_else_makes_meanwhile_stays(out):
    sink = FolderSink(out)
    out.mkdir()
    error = refusal(lambda: write(outputs(a=b"1"), sink, {}))
    assert "File exists" in error.text
    assert out.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, CkptError("stop")])
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("where", ["progress", "verify"])
def test_stopped_at_any_output(out, before, error, after, where):
    seen = []

    def stop(what):
        seen.append(what)
        if len(seen) > after:
            raise error

    with pytest.raises(error if isinstance(error, type) else CkptError):
        write(outputs(a=b"1", b=b"2"), FolderSink(out, force=True), {}, **{where: stop})
    before()


def test_a_missing_source_of_the_second_output(inputs, out, before):
    plan = plan_of(inputs, whole(0))
    plan = plan._replace(outputs=(*plan.outputs, Output("b", (whole(2),), SIZE)))
    inputs[2].unlink()
    with pytest.raises(SpecialFile):
        write(plan, FolderSink(out, force=True), {})
    before()


def test_a_failure_between_two_renames_says_what_is_in_place(out, monkeypatch):
    plan = outputs(a=b"1", b=b"2", c=b"3")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing("replace", errno.EACCES, 1))
        error = refusal(lambda: write(plan, FolderSink(out), {}))
    assert error.path == str(out / "b")
    assert f"1 of the files are in place already: {out / 'a'}" in error.text
    assert error.findings == (f"written: {out / 'a'}",)
    assert tree(out) == {"a": b"1"}


def test_space_is_summed_on_each_disk(out, tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "free_bytes", lambda folder: 10)
    plan = outputs(a=b"12345", b=b"1234", extras=b"12")
    sink = FolderSink(out, beside={"extras": tmp_path / "e.json"})
    error = refusal(lambda: write(plan, sink, {}))
    assert "11 bytes are needed, 10 are free" in error.text
    assert not out.exists()
    disks = {str(tmp_path / "e.json"): 1, str(out / "a"): 2, str(out / "b"): 2}
    monkeypatch.setattr(targets.Target, "disk", lambda self: disks[self.path])
    write(plan, sink, {})
    assert tree(out) == {"a": b"12345", "b": b"1234"}


def test_stale_temps_of_every_target_are_named(out, tmp_path):
    out.mkdir()
    stale = [".b.ckptool-999999999.tmp", ".b.ckptool-999999999-3.tmp"]
    others = [".c.ckptool-999999999.tmp", f".a.ckptool-{os.getpid()}.tmp", ".a.ckptool-x.tmp"]
    for name in stale + others:
        (out / name).write_bytes(b"")
    found = write(outputs(a=b"1", b=b"2"), FolderSink(out), {}).findings
    assert sorted(found) == sorted(f"left by an interrupted run, remove it: {n}" for n in stale)


def test_ten_thousand_outputs_are_checked_in_a_moment(out):
    """Checking must not list the folder once for each."""
    import time

    out.mkdir()
    names = [f"model-{n:05}.safetensors" for n in range(10_000)]
    started = time.process_time()
    found = writing.findings_beside(FolderSink(out).targets(names))
    assert found == []
    assert time.process_time() - started < 5
