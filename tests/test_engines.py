"""Many hands give the bytes of one: threads, processes, runs that are killed and gone on with."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import engines_support as support
import pytest
from engines_support import CONVERSIONS, STEP, convert, digests, left, made_alone, make

import ckptool
from ckptool import engines, ranges, taskbook
from ckptool.cli.main import main
from ckptool.errors import (
    CkptError,
    CrcMismatch,
    EngineError,
    InputChanged,
    LimitExceeded,
    OutputError,
    UsageError,
)
from ckptool.targets import Target

KILLED = Path(__file__).with_name("engine_killed.py")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make(tmp_path_factory.mktemp("in") / "net.pth")


@pytest.fixture(scope="module")
def plain(source, tmp_path_factory):
    return made_alone(source, tmp_path_factory, CONVERSIONS)


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch):
    monkeypatch.setattr(engines, "STEP", STEP)


@pytest.fixture(scope="module")
def processes():
    with ProcessPoolExecutor(2) as pool:
        yield pool


def slugs(done):
    return [note.slug for note in done.notes]


# -- the same bytes ----------------------------------------------------------------------------
@pytest.mark.parametrize("name", CONVERSIONS)
def test_threads_write_the_same_bytes(name, source, plain, tmp_path):
    done, path = convert(source, tmp_path, name, jobs=3)

    assert digests(path) == plain[name][0]
    assert left(tmp_path) == []
    assert (slugs(done), done.dtypes, done.devices) == (
        slugs(plain[name][1]), plain[name][1].dtypes, plain[name][1].devices,
    )  # fmt: skip


@pytest.mark.parametrize("name", CONVERSIONS)
def test_processes_write_the_same_bytes(name, source, plain, processes, tmp_path):
    _, path = convert(source, tmp_path, name, engine=processes)

    assert digests(path) == plain[name][0]
    assert left(tmp_path) == []


def test_the_work_is_really_cut(source, processes, tmp_path, monkeypatch):
    sizes = []
    whole = engines.carry_out

    def watched(executor, work, tasks, received):
        sizes.extend(task.size for task in tasks)
        whole(executor, work, tasks, received)

    monkeypatch.setattr(engines, "carry_out", watched)
    convert(source, tmp_path, "zip", engine=processes)

    assert len(sizes) > 30
    assert max(sizes) <= STEP + 4096  # a literal is not cut


def test_what_a_cast_could_not_keep_is_told_all_the_same(source, plain, tmp_path):
    done, _ = convert(source, tmp_path, "cast zip", jobs=2)

    told = [note.text for note in done.notes if "module.big" in note.text]
    assert told
    assert told == [note.text for note in plain["cast zip"][1].notes if "module.big" in note.text]


def test_the_command_takes_jobs(source, plain, tmp_path, capsys):
    out = str(tmp_path / "out.pth")
    assert main(["convert", str(source), "--to-cpu", "-o", out, "--jobs", "2"]) == 0
    assert digests(Path(out)) == plain["zip"][0]


def test_one_job_goes_the_usual_way(source, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "write_by", None)  # calling it would fail
    convert(source, tmp_path, "zip", jobs=1)


def test_an_executor_is_not_shut_down(source, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        convert(source, tmp_path, "zip", engine=pool)
        assert pool.submit(int, "5").result() == 5


def test_progress_reaches_the_whole(source, tmp_path):
    told = []
    convert(
        source, tmp_path, "zip", jobs=2, progress=lambda done, total: told.append((done, total))
    )

    assert told == sorted(told)
    assert 0.99 < told[-1][0] / told[-1][1] <= 1


@pytest.mark.parametrize(
    "words",
    [{"jobs": 0}, {"jobs": 2, "engine": "dask=tcp://127.0.0.1:1"}, {"engine": "ray"},
     {"engine": "dask="}],
    ids=str,
)  # fmt: skip
def test_contradictions_are_refused(words, source, tmp_path):
    with pytest.raises(UsageError):
        convert(source, tmp_path, "zip", **words)
    assert os.listdir(tmp_path) == []


def test_in_place_needs_no_hands(source):
    with pytest.raises(UsageError, match="in place"):
        ckptool.convert(source, to_cpu=True, in_place=True, jobs=2)


# -- failures ----------------------------------------------------------------------------------
@pytest.fixture
def worker(monkeypatch):
    """Let the tasks be run by another function of `engines_support`."""

    def use(function):
        whole = engines.carry_out
        monkeypatch.setattr(
            engines, "carry_out", lambda pool, work, tasks, got: whole(pool, function, tasks, got)
        )

    return use


@pytest.mark.parametrize("resume", [False, True])
def test_a_worker_that_raises(source, processes, tmp_path, worker, resume):
    worker(support.raising)
    with pytest.raises(EngineError, match="RuntimeError: the worker fell over") as caught:
        convert(source, tmp_path, "zip", engine=processes, resume=resume)

    assert "--resume" in caught.value.hint
    assert not (tmp_path / "out.pth").exists()
    assert bool(left(tmp_path)) == resume


@pytest.mark.parametrize("resume", [False, True])
def test_a_full_disk(source, plain, tmp_path, resume, monkeypatch):
    with monkeypatch.context() as patch:
        whole = engines.carry_out
        patch.setattr(
            engines, "carry_out", lambda p, w, tasks, got: whole(p, support.full_disk, tasks, got)
        )
        with pytest.raises(OutputError) as caught:
            convert(source, tmp_path, "zip", jobs=2, resume=resume)
    assert caught.value.slug == "output-space"
    assert bool(left(tmp_path)) == resume

    _, path = convert(source, tmp_path, "zip", resume=True)
    assert digests(path) == plain["zip"][0]
    assert left(tmp_path) == []


def test_a_killed_worker_of_a_pool_ends_the_run(source, tmp_path, worker):
    worker(support.dying)
    with ProcessPoolExecutor(1) as pool, pytest.raises(EngineError, match="BrokenProcessPool"):
        convert(source, tmp_path, "zip", engine=pool)
    assert left(tmp_path) == []


def test_an_input_that_changes_between_tasks(source, tmp_path, monkeypatch):
    moving = tmp_path / "moving.pth"
    moving.write_bytes(source.read_bytes())
    real, count = engines._Run.received, []

    def received(self, progress, task, done):
        real(self, progress, task, done)
        count.append(task.number)
        if len(count) == 3:
            os.utime(moving, ns=(1, 1))

    monkeypatch.setattr(engines._Run, "received", received)
    with pytest.raises(InputChanged):
        convert(moving, tmp_path, "zip", jobs=1, resume=True)

    assert sorted(os.listdir(tmp_path)) == ["moving.pth"]  # nothing to go on from either


def test_an_input_that_changes_after_the_last_task(source, tmp_path, monkeypatch):
    moving = tmp_path / "moving.pth"
    moving.write_bytes(source.read_bytes())
    real = engines.carry_out

    def carried(*args):
        real(*args)
        os.utime(moving, ns=(1, 1))

    monkeypatch.setattr(engines, "carry_out", carried)
    with pytest.raises(InputChanged):
        convert(moving, tmp_path, "safetensors", jobs=2)
    assert sorted(os.listdir(tmp_path)) == ["moving.pth"]


@pytest.mark.parametrize("small", [False, True], ids=["cut", "whole"])
def test_wrong_bytes_are_found_in_a_tensor_of_several_tasks_too(source, tmp_path, small):
    with ckptool.open(source) as opened:
        storages = opened._checkpoint.storages
    piece = next(s.pieces[0] for s in storages if (s.size_bytes < STEP) == small)
    data = bytearray(source.read_bytes())
    data[piece.span.end - 1] ^= 1
    (tmp_path / "bad.pth").write_bytes(data)
    with pytest.raises(CrcMismatch):
        convert(tmp_path / "bad.pth", tmp_path, "zip", jobs=2)
    assert os.listdir(tmp_path) == ["bad.pth"]

    convert(tmp_path / "bad.pth", tmp_path, "zip", jobs=2, check=False)


def test_a_worker_that_does_not_see_the_folder(source, tmp_path):
    plan_task = ranges.Task(0, str(tmp_path / "elsewhere" / "x"), 0, (), (), True, True, "")
    with pytest.raises(OutputError, match="does not see the folder"):
        ranges.write_task(plan_task, {})


def test_a_worker_of_another_version(source, tmp_path):
    with pytest.raises(UsageError, match="a worker has ckptool"):
        engines.run_task(ranges.Task(0, "x", 0, (), (), True, True, "0.0.1"))


def test_errors_cross_processes_whole():
    error = LimitExceeded("rank", "too many", key="a.b", hint="do that")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is LimitExceeded
    assert (str(back), back.slug, back.hint, back.key) == (
        str(error),
        "limit-rank",
        "do that",
        "a.b",
    )


@pytest.mark.parametrize("resume", [False, True])
def test_an_interruption(source, tmp_path, monkeypatch, capsys, resume):
    real = engines._Run.received

    def received(self, progress, task, done):
        real(self, progress, task, done)
        if len(self._results) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(engines._Run, "received", received)
    out = str(tmp_path / "out.pth")
    flags = ["--resume"] if resume else ["--jobs", "2"]
    assert main(["convert", str(source), "--to-cpu", "-o", out, *flags]) == 130

    said = capsys.readouterr().err
    assert ("with --resume" in said) == resume
    assert ("nothing is left behind" in said) != resume
    assert bool(left(tmp_path)) == resume
    assert not os.path.exists(out)
    assert not [t for t in threading.enumerate() if t.name.startswith("ckptool-job")]


# -- a driver that is killed -------------------------------------------------------------------
def killed(source, target, count, *flags):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, str(KILLED), str(source), str(target), str(count), *flags]
    done = subprocess.run(argv, env=env, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not Path(target).is_file()


@pytest.fixture
def written(monkeypatch):
    """The numbers of the tasks that really write."""
    numbers, real = [], ranges._write

    def write(fd, task, *rest):
        numbers.append(task.number)
        return real(fd, task, *rest)

    monkeypatch.setattr(ranges, "_write", write)
    return numbers


def test_resume_runs_only_what_is_not_done(source, plain, tmp_path, written):
    killed(source, tmp_path / "out.pth", 9, "--to-cpu", "--jobs", "2")
    assert len(left(tmp_path)) == 2

    done, path = convert(source, tmp_path, "zip", resume=True)
    assert digests(path) == plain["zip"][0]
    assert left(tmp_path) == []
    (told,) = [n.text for n in done.notes if "gone on" in n.text]
    total = int(told.split(" of ")[1].split()[0].replace(",", ""))
    assert told == f"gone on from an interrupted run: 9 of {total} tasks were done"
    assert len(written) == total - 9
    assert not [note for note in done.notes if "remove it" in note.text]


def test_resume_keeps_what_a_cast_told(source, plain, tmp_path):
    killed(source, tmp_path / "out.pth", 45, "--dtype", "float16", "--resume")
    done, path = convert(source, tmp_path, "cast zip", resume=True)

    assert digests(path) == plain["cast zip"][0]
    assert [n.text for n in done.notes if "module.big" in n.text] == [
        n.text for n in plain["cast zip"][1].notes if "module.big" in n.text
    ]


def test_resume_of_a_resume(source, plain, tmp_path, written):
    killed(source, tmp_path / "out.pth", 5, "--to-cpu", "--resume")
    killed(source, tmp_path / "out.pth", 5, "--to-cpu", "--resume")
    _, path = convert(source, tmp_path, "zip", resume=True)

    assert digests(path) == plain["zip"][0]
    assert sorted(written) == list(range(10, max(written) + 1))


def test_bytes_that_are_not_what_the_book_says_are_written_again(source, plain, tmp_path, written):
    killed(source, tmp_path / "out.pth", 9, "--to-cpu", "--resume")
    (temp,) = [name for name in left(tmp_path) if name.endswith(".tmp")]
    with open(tmp_path / temp, "r+b") as file:
        file.seek(2 * STEP + 7)
        file.write(b"broken disk")
    done, path = convert(source, tmp_path, "zip", resume=True)

    assert digests(path) == plain["zip"][0]
    assert any("8 of" in note.text for note in done.notes)


def test_another_conversion_does_not_go_on(source, plain, tmp_path, written):
    killed(source, tmp_path / "out.pth", 9, "--to-cpu", "--jobs", "2")
    done, path = convert(source, tmp_path, "cast zip", resume=True)

    assert digests(path) == plain["cast zip"][0]
    assert 0 in written
    assert any("it was another conversion" in note.text for note in done.notes)
    assert [name for name in left(tmp_path) if name.endswith(".tmp")]  # named, not removed
    assert any("left by an interrupted run, remove it" in note.text for note in done.notes)


def test_changed_inputs_do_not_go_on(source, tmp_path, written):
    moving = tmp_path / "moving.pth"
    moving.write_bytes(source.read_bytes())
    killed(moving, tmp_path / "out.pth", 9, "--to-cpu", "--jobs", "2")
    os.utime(moving, ns=(5, 5))
    done, _ = convert(moving, tmp_path, "zip", resume=True)

    assert 0 in written
    assert any("it was another conversion" in note.text for note in done.notes)


def test_without_resume_everything_is_done_anew(source, plain, tmp_path, written):
    killed(source, tmp_path / "out.pth", 9, "--to-cpu", "--jobs", "2")
    done, path = convert(source, tmp_path, "zip", jobs=2)

    assert digests(path) == plain["zip"][0]
    assert 0 in written
    assert any("--resume does that" in note.text for note in done.notes)


def test_shards_go_on_file_by_file(source, plain, tmp_path, written):
    killed(source, tmp_path / "out", 12, "--max-shard-size", "700KB", "--jobs", "2")
    temps = sorted(name for name in left(tmp_path) if name.endswith(".tmp"))
    os.unlink(tmp_path / "out" / temps[0])  # its tasks are done again
    done, path = convert(source, tmp_path, "shards", resume=True)

    assert digests(path) == plain["shards"][0]
    assert left(tmp_path) == []
    assert any("gone on" in note.text for note in done.notes)


def test_two_runs_at_one_time(source, tmp_path):
    book = taskbook.Book(taskbook.book_path(str(tmp_path), "out.pth"))
    try:
        with pytest.raises(OutputError) as caught:
            convert(source, tmp_path, "zip", jobs=2)
        assert caught.value.slug == "output-busy"
    finally:
        book.close(remove=True)


def test_a_plain_run_tells_of_the_book(source, plain, tmp_path):
    killed(source, tmp_path / "out.pth", 9, "--to-cpu", "--jobs", "2")
    done, path = convert(source, tmp_path, "zip")

    assert digests(path) == plain["zip"][0]
    told = [note.text for note in done.notes if ".ckptool-" in note.text]
    assert len(told) == 2  # the temp file, and the book
    assert any(text.endswith("or remove it: .out.pth.ckptool-tasks") for text in told)


@pytest.mark.parametrize("kind", ["hard link", "link", "fifo", "folder"])
def test_what_only_has_the_name_of_a_book_is_left_alone(source, tmp_path, kind):
    other = tmp_path / "precious"
    other.write_bytes(b"years of work")
    book = taskbook.book_path(str(tmp_path), "out.pth")
    {"hard link": lambda: os.link(other, book), "link": lambda: os.symlink(other, book),
     "fifo": lambda: os.mkfifo(book), "folder": lambda: os.mkdir(book)}[kind]()  # fmt: skip
    with pytest.raises(OutputError):
        convert(source, tmp_path, "zip", jobs=2)

    assert other.read_bytes() == b"years of work"
    assert sorted(os.listdir(tmp_path)) == [os.path.basename(book), "precious"]


HOSTILE = [
    b"", b"\n", b"\0" * 100, b"[" * 100_000 + b"\n", b'{"book": 1}\n', b'{"book": "ckptool-tasks"}\n',
    b'{"book":"ckptool-tasks","version":1,"plan":7,"temps":[["../x",1,2]]}\n',
    b'{"book":"ckptool-tasks","version":1,"plan":"PLAN","temps":[["../../etc/passwd",1,2]]}\n{"done":0,"crcs":"00000000"}\n',
    b'{"book":"ckptool-tasks","version":1,"plan":"PLAN","temps":[[".out.pth.ckptool-1.tmp",1,2]]}\n{"done":-1,"crcs":"zz"}\n',
    b'{"book":"ckptool-tasks","version":1,"plan":"PLAN","temps":[[1,2,3]]}\n',
]  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_a_strange_book_is_not_obeyed(data, source, plain, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "digest", lambda *_: "PLAN")
    Path(taskbook.book_path(str(tmp_path), "out.pth")).write_bytes(data)
    _, path = convert(source, tmp_path, "zip", resume=True)

    assert digests(path) == plain["zip"][0]
    assert left(tmp_path) == []


def test_a_temp_file_that_is_a_link_is_not_taken_over(source, plain, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "digest", lambda *_: "PLAN")
    other = tmp_path / "precious"
    size = convert(source, tmp_path, "zip")[1].stat().st_size
    os.unlink(tmp_path / "out.pth")
    other.write_bytes(b"\0" * size)
    name = ".out.pth.ckptool-1.tmp"
    os.link(other, tmp_path / name)
    head = {"book": "ckptool-tasks", "version": 1, "plan": "PLAN",
            "temps": [[name, other.stat().st_ino, size]]}  # fmt: skip
    Path(taskbook.book_path(str(tmp_path), "out.pth")).write_text(json.dumps(head) + "\n")
    _, path = convert(source, tmp_path, "zip", resume=True)

    assert digests(path) == plain["zip"][0]
    assert other.read_bytes() == b"\0" * size


def test_the_plan_is_known_by_what_it_says(source):
    from ckptool.formats.writers import write
    from ckptool.verbs.convert import build_request
    from ckptool.verbs.deciding import decide

    def plan():
        with ckptool.open(source) as opened:
            request = build_request(
                to_cpu=True, to_gpu=None, mapped=(), rules=(), keep_module=False
            )
            changes = decide(opened._checkpoint, request, "torch-zip").changes
            return write(opened._checkpoint, changes, "torch-zip")[0]

    one = taskbook.digest(plan(), STEP, "1", True)
    assert one == taskbook.digest(plan(), STEP, "1", True)
    assert one == taskbook.digest(pickle.loads(pickle.dumps(plan())), STEP, "1", True)
    assert one != taskbook.digest(plan(), STEP + 1, "1", True)
    assert one != taskbook.digest(plan(), STEP, "1", False)


def test_a_full_disk_before_anything(source, tmp_path, monkeypatch):
    from ckptool import targets

    monkeypatch.setattr(targets, "free_bytes", lambda folder: 1000)
    with pytest.raises(OutputError) as caught:
        convert(source, tmp_path, "zip", jobs=2, resume=False)
    assert caught.value.slug == "output-space"
    assert os.listdir(tmp_path) == []


def test_every_error_of_a_task_names_the_file(source, tmp_path):
    (tmp_path / "gone.pth").write_bytes(source.read_bytes())
    with pytest.raises(CkptError) as caught:
        engines.run_task(
            ranges.Task(0, str(tmp_path / "gone.pth"), 0, (ranges.Copy(0, ranges.Span(0, 5)),),
                        (ranges.Address("/nowhere/x.pth", 5),), True, False, ckptool.__version__)
        )  # fmt: skip
    assert caught.value.slug == "special-file"


def test_an_interrupt_waits_until_all_shards_are_renamed(source, tmp_path, monkeypatch):
    """Old and new shards never lie together, as where one process writes them."""
    (tmp_path / "plain").mkdir()
    wanted = digests(convert(source, tmp_path / "plain", "shards")[1])
    publish = Target.publish

    def interrupted(target):
        publish(target)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Target, "publish", interrupted)
    with pytest.raises(KeyboardInterrupt, match="all was written before"):
        convert(source, tmp_path, "shards", jobs=2)
    assert len(wanted) > 2
    assert digests(tmp_path / "out") == wanted
    assert left(tmp_path) == []
