"""In-place edits that are killed, interrupted or refused by the disk, and hostile journals."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from inplace_support import changes_of, edit, journal, links, opened
from verbs_support import FIXTURES, ROOT, left_alone

from ckptool import inplace, journals, targets
from ckptool.errors import CkptError, NothingToDo, OutputError, SpecialFile
from ckptool.formats import read
from ckptool.journals import pending
from ckptool.places import open_source
from ckptool.sinks import findings_beside
from ckptool.verbs.inplace import append_changes, plan_append, recover, undo
from ckptool.verbs.opening import open_place

NAME = "dp_cuda.pth"
FORMER = (FIXTURES / NAME).read_bytes()
CALLS = ("write", "fsync", "link", "unlink", "lseek", "ftruncate")


def attempt(path):
    """What an edit gives, or what it raises."""
    try:
        return edit(path, "cuda:7", strip=True)
    except (OutputError, KeyboardInterrupt) as error:
        return error


# -- kill -9 -----------------------------------------------------------------------------------
def kills(tmp_path):
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "inplace_killed.py", FIXTURES / NAME],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_every_call(tmp_path):
    """The former file is there, or there after --recover, or the new one is complete."""
    rows = kills(tmp_path)
    size = len(FORMER)
    assert {row["call"] for row in rows} >= {"write", "fsync", "link", "unlink"}
    assert len(rows) > 20
    whole = max(row["size"] for row in rows)
    for row in rows:
        assert row["kept"], row
        assert row["untouched"], row  # reading writes nothing
        if row["journal"]:
            assert row["seen"] == [size, ["pending-journal"]], row
            assert (row["recovered"], row["former"]) == (size, True), row
        else:
            assert row["seen"] == [row["size"], []], row
            assert row["size"] in (size, whole), row
            assert row["recovered"] is None, row
        assert [name for name in row["left"] if not name.endswith(".tmp")] == []
    torn = [row for row in rows if size < row["size"] < whole]
    assert len(torn) == 1
    assert torn[0]["when"] == "within"
    assert {row["size"] for row in rows if row["journal"]} >= {size, whole, torn[0]["size"]}


# -- interrupted, or refused by the disk -------------------------------------------------------
class Failing:
    """Raises once (or from then on) at call number `at` of those that write."""

    def __init__(self, monkeypatch, at, error, when="before", always=False):
        self.at, self.error, self.when, self.always, self.calls = at, error, when, always, []
        for name in CALLS:
            monkeypatch.setattr(os, name, self.wrap(name, getattr(os, name)))

    def wrap(self, name, real):
        def call(*args, **options):
            self.calls.append(name)
            here = len(self.calls)
            fails = here >= self.at if self.always else here == self.at
            if fails and self.when == "before":
                raise self.error()
            result = real(*args, **options)
            if fails:
                raise self.error()
            return result

        return call


def count_of_calls(copy, monkeypatch):
    path = copy(NAME)
    with monkeypatch.context() as patched:
        counted = Failing(patched, 1_000, KeyboardInterrupt)
        edit(path, "cuda:7", strip=True)
    new = path.read_bytes()
    assert new.startswith(FORMER)
    assert len(counted.calls) > 8
    return len(counted.calls), new


def full():
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken():
    return OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, full, broken], ids=["^C", "ENOSPC", "EIO"])
def test_whatever_fails_the_former_file_stays(error, when, copy, monkeypatch):
    count, new = count_of_calls(copy, monkeypatch)
    kept = 0
    for at in range(1, count + 1):
        path = copy(NAME)
        with monkeypatch.context() as patched:
            failing = Failing(patched, at, error, when)
            done = attempt(path)
        if isinstance(done, OutputError):
            assert done.path == str(path)
            assert done.slug == ("output-space" if error is full else "output-io")
        elif isinstance(done, KeyboardInterrupt):
            assert error is KeyboardInterrupt
        else:  # the edit was done; flushing the folder was all that was left
            assert failing.calls[at - 1] == "fsync"
            assert "could not be flushed" in done.findings[0]
        assert path.read_bytes() in (FORMER, new), (at, failing.calls)
        kept += path.read_bytes() == FORMER
        left_alone(path.parent, path.name)
    assert kept >= count - 2  # all but the calls behind the removal of the journal


def test_a_disk_that_stays_broken_leaves_the_journal(copy, monkeypatch):
    """What cannot be cut back now is cut back by --recover later."""
    count, _ = count_of_calls(copy, monkeypatch)
    torn = 0
    for at in range(1, count + 1):
        path = copy(NAME)
        with monkeypatch.context() as patched:
            Failing(patched, at, broken, always=True)
            done = attempt(path)
        if not isinstance(done, OutputError):
            continue
        if path.read_bytes() != FORMER:
            torn += 1
            assert "so did cutting the file back" in done.text
            assert "--recover" in done.hint
            assert recover(str(path))[1] == len(FORMER)
        assert path.read_bytes() == FORMER
        for left in path.parent.glob(".*"):
            left.unlink()
    assert torn >= 2


def test_short_writes_are_continued(copy, monkeypatch):
    _, new = count_of_calls(copy, monkeypatch)
    path = copy(NAME)
    real = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda fd, data: real(fd, data[:700]))
        edit(path, "cuda:7", strip=True)
    assert path.read_bytes() == new


def test_without_fsync_nothing_is_flushed(copy, monkeypatch):
    path = copy(NAME)
    with monkeypatch.context() as patched:
        counted = Failing(patched, 1_000, broken)
        edit(path, "cuda:7", fsync=False)
        undo(str(path), fsync=False)
    assert "fsync" not in counted.calls
    assert path.read_bytes() == FORMER


def test_the_journal_is_durable_before_the_first_byte(copy, monkeypatch):
    """Journal, its fsync, its name, the folder's fsync; then the bytes, then their fsync."""
    path = copy(NAME)
    with monkeypatch.context() as patched:
        counted = Failing(patched, 1_000, broken)
        edit(path, "cuda:7")
    assert counted.calls == [
        "write", "fsync", "link", "unlink", "fsync",
        "lseek", "write", "fsync", "unlink", "fsync",
    ]  # fmt: skip


def test_no_space_is_said_before_anything_is_written(copy, monkeypatch):
    path = copy(NAME)
    monkeypatch.setattr(targets, "free_bytes", lambda folder: 1_000)

    with pytest.raises(OutputError, match="1,000 are free") as caught:
        edit(path, "cuda:7")
    assert caught.value.slug == "output-space"
    assert path.read_bytes() == FORMER
    left_alone(path.parent, path.name)


def test_what_does_not_read_back_is_cut_off(copy, monkeypatch):
    """The disk lies: one byte of the new pickle is another one."""
    path = copy(NAME)
    real = os.write

    def lying(fd, data):
        data = bytes(data)
        return real(fd, data.replace(b"cuda:7", b"cuda:9", 1))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lying)
        with pytest.raises(CkptError, match="checksum"):
            edit(path, "cuda:7")
    assert path.read_bytes() == FORMER
    left_alone(path.parent, path.name)


def test_a_folder_that_cannot_be_written_to(copy, monkeypatch):
    path = copy(NAME)
    real = os.open

    def refusing(name, flags, *rest):
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(name, flags, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refusing)
        with pytest.raises(OutputError) as caught:
            edit(path, "cuda:7")
    assert "write permission on the folder" in caught.value.hint
    assert path.read_bytes() == FORMER


def test_a_file_system_without_hard_links(copy, monkeypatch):
    _, new = count_of_calls(copy, monkeypatch)
    path = copy(NAME)

    def refusing(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", refusing)
        edit(path, "cuda:7", strip=True)
    assert path.read_bytes() == new
    left_alone(path.parent, path.name)


def test_a_longest_name_is_refused_clearly(copy):
    path = copy(NAME, "n" * 250 + ".pth")

    with pytest.raises(OutputError) as caught:
        edit(path, "cuda:7")
    assert "shorter name" in caught.value.hint
    assert path.read_bytes() == FORMER
    source, said = open_place(str(path))
    source.close()
    assert said == ()


# -- two at once -------------------------------------------------------------------------------
def test_two_runs_exclude_each_other(copy):
    path = copy(NAME)
    said = []

    def meanwhile():
        with pytest.raises(OutputError) as caught:
            edit(path, "cpu")
        said.append(caught.value.text)
        for other in (recover, undo):
            with pytest.raises(OutputError):
                other(str(path))

    with open_source(str(path)) as source:
        checkpoint = read(source)
        data, _ = plan_append(source, checkpoint, changes_of(checkpoint, "cuda:7"))
        inplace.append(source, data, confirm=meanwhile)
    assert "lies beside it" in said[0]
    assert path.read_bytes() == FORMER + data


def test_the_lock_excludes_a_run_that_has_not_seen_the_journal(copy):
    path = copy(NAME)
    with open_source(str(path)) as one, open_source(str(path)) as two:

        def meanwhile():
            with pytest.raises(OutputError, match="another run"):
                inplace.truncate(two, 5)

        pytest.importorskip("fcntl")
        inplace.append(one, b"x", confirm=meanwhile)
    assert path.read_bytes() == FORMER + b"x"


def test_a_journal_that_another_run_placed_first_is_kept(copy, monkeypatch):
    """Between looking for a journal and placing ours."""
    path = copy(NAME)
    with open_source(str(path)) as source:
        journal(path).write_text("theirs")
        with pytest.raises(OutputError, match="lies beside it"):
            inplace.append(source, b"x")
    assert journal(path).read_text() == "theirs"
    assert path.read_bytes() == FORMER
    left_alone(path.parent, path.name, journal(path).name)


def test_special_files_are_refused(tmp_path, copy):
    path = copy(NAME)
    with open_source(str(path)) as source:
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(SpecialFile):
            inplace.append(source, b"x")


# -- journals ----------------------------------------------------------------------------------
def interrupted(path, extra=b"half of an edit"):
    """A file as a killed edit leaves it, with its honest journal."""
    with open_source(str(path)) as source:
        made = journals.Journal(str(path), journals.facts(source, source.size))
    made.place(fsync=False)
    with path.open("ab") as stream:
        stream.write(extra)
    return path


def test_a_reader_sees_the_former_file(copy):
    path = interrupted(copy(NAME, "a b.pth"))
    state = path.read_bytes()
    source, said = open_place(path)
    with source:
        checkpoint = read(source)
        assert source.size == checkpoint.size_bytes == len(FORMER)
        assert source.read(0, source.size) == FORMER
        buffer = bytearray(100)
        source.read_into(700, memoryview(buffer))
        assert bytes(buffer) == FORMER[700:800]
        with pytest.raises(CkptError):
            source.read(len(FORMER) - 1, 2)
        assert source.unchanged()
        assert source.fileno() is not None
        fd = source.fileno()
        assert source.absolute(checkpoint.handle.container.directory.central).offset > 0
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)  # closed with it
    assert [(note.slug, note.text) for note in said] == [
        ("pending-journal", "an in-place edit was interrupted: read up to the former end")
    ]
    assert said[0].command == f"ckptool convert '{path}' --recover"
    assert path.read_bytes() == state


def test_recover_gives_the_file_back(copy):
    path = interrupted(copy(NAME))

    assert recover(str(path)) == (len(FORMER) + 15, len(FORMER))
    assert path.read_bytes() == FORMER
    left_alone(path.parent, path.name)
    with pytest.raises(NothingToDo, match="no journal") as caught:
        recover(str(path))
    assert caught.value.exit_status == 1
    assert caught.value.path == str(path)


def test_recover_through_a_link(copy):
    path = interrupted(copy(NAME))
    (path.parent / "deep").mkdir()
    way = path.parent / "deep" / "link.pth"
    way.symlink_to(path)
    source, said = open_place(way)
    source.close()

    assert said[0].slug == "pending-journal"
    assert recover(str(way))[1] == len(FORMER)
    assert path.read_bytes() == FORMER


def test_recover_of_an_edit_that_wrote_nothing(copy):
    path = interrupted(copy(NAME), b"")
    before = path.stat().st_mtime_ns

    assert recover(str(path)) == (len(FORMER), len(FORMER))
    assert path.stat().st_mtime_ns == before
    left_alone(path.parent, path.name)


def test_recover_of_an_edit_of_an_edited_file(copy):
    path = copy(NAME)
    edit(path, "cuda:7")
    once = path.read_bytes()
    recover(str(interrupted(path)))

    assert path.read_bytes() == once
    assert links(path) == (len(FORMER),)


def test_an_interrupted_file_is_not_edited(copy):
    path = interrupted(copy(NAME))
    source, _ = open_place(path)
    with source:
        checkpoint = read(source)
        with pytest.raises(OutputError, match="interrupted") as caught:
            append_changes(source, checkpoint, changes_of(checkpoint, "cuda:7"))
    assert "--recover first" in caught.value.hint
    with pytest.raises(OutputError, match="interrupted"):
        undo(str(path))


def said_of(path):
    """The text of a journal of this very file as it is now."""
    with open_source(str(path)) as source:
        journals.Journal(str(path), journals.facts(source, source.size)).place(fsync=False)
    text = journal(path).read_text()
    journal(path).unlink()
    return text


def changed_word(text, name, change):
    words = text.split()
    at = words.index(name) + 1
    words[at] = change(words[at])
    return " ".join(words) + "\n"


def plus(number):
    return lambda word: str(int(word) + number)


FORGED = {
    "another device": ("another file", lambda t: changed_word(t, "device", plus(1))),
    "another inode": ("another file", lambda t: changed_word(t, "inode", plus(1))),
    "another checksum": (
        "other bytes",
        lambda t: changed_word(t, "crc32", lambda w: f"{int(w, 16) ^ 1:08x}"),
    ),
    "shorter": ("other bytes", lambda t: changed_word(t, "length", plus(-1))),
    "nothing": ("other bytes", lambda t: changed_word(t, "length", lambda w: "0")),
    "longer than the file": ("shorter", lambda t: changed_word(t, "length", plus(1_000_000))),
    "huge length": ("shorter", lambda t: changed_word(t, "length", lambda w: "9" * 19)),
    "too many digits": ("not a journal", lambda t: changed_word(t, "length", lambda w: "9" * 20)),
    "negative": ("not a journal", lambda t: changed_word(t, "length", lambda w: "-1")),
    "other digits": ("not a journal", lambda t: changed_word(t, "length", lambda w: "\u0661")),
    "another version": ("not a journal", lambda t: t.replace("journal 1", "journal 2")),
    "empty": ("not a journal", lambda t: ""),
    "cut": ("not a journal", lambda t: t[:-1]),
    "more": ("not a journal", lambda t: t + "\n"),
    "garbage": ("not a journal", lambda t: "\0\x1b[2J" * 40),
    "a gigabyte": ("not a journal", lambda t: t + " " * 100_000),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_journal_is_not_obeyed(name, copy):
    reason, forge = FORGED[name]
    path = copy(NAME)
    text = said_of(path)
    edit(path, "cuda:7")
    state = path.read_bytes()
    journal(path).write_text(forge(text), encoding="utf-8")
    source, said = open_place(path)
    with source:
        assert source.size == len(state)  # the whole file is read
    assert [note.slug for note in said] == ["pending-journal"]
    assert said[0].command is None
    assert reason in said[0].text
    with pytest.raises(OutputError, match=reason) as caught:
        recover(str(path))
    assert caught.value.exit_status == 2
    assert str(journal(path)) in caught.value.hint
    with pytest.raises(OutputError, match="lies beside it"):
        edit(path, "cpu")
    assert path.read_bytes() == state
    assert journal(path).exists()


@pytest.mark.parametrize("kind", ["link", "dangling", "folder", "fifo"])
def test_a_journal_that_is_no_file_is_not_obeyed(kind, copy, tmp_path):
    path = interrupted(copy(NAME))
    honest = tmp_path / "elsewhere"
    journal(path).rename(honest)
    if kind in ("link", "dangling"):
        journal(path).symlink_to(honest if kind == "link" else tmp_path / "nowhere")
    else:
        (os.mkdir if kind == "folder" else os.mkfifo)(journal(path))
    state = path.read_bytes()
    source, said = open_place(path)
    source.close()

    assert said[0].slug == "pending-journal"
    assert "not obeyed" in said[0].text
    with pytest.raises(OutputError, match="not obeyed"):
        recover(str(path))
    assert path.read_bytes() == state
    assert honest.exists()


def test_a_journal_that_agrees_and_would_leave_no_archive_is_not_obeyed(copy):
    """All four facts can be forged by who may read the file; the former file must be whole."""
    path = copy(NAME)
    state = path.read_bytes()
    with open_source(str(path)) as source:
        journals.Journal(str(path), journals.facts(source, 4_000)).place(fsync=False)
        assert pending(source).reason == ""

    with pytest.raises(CkptError, match="zip"):
        recover(str(path))
    assert path.read_bytes() == state


def test_the_files_end_is_compared_over_64_kib(tmp_path):
    """A byte further back may differ, one within may not; shorter files are compared whole."""
    path = tmp_path / "f"
    for size, at, agrees in ((70_000, 100, True), (70_000, 5_000, False), (300, 0, False)):
        path.write_bytes(bytes(size))
        with open_source(str(path)) as source:
            made = journals.Journal(str(path), journals.facts(source, size))
            made.place(fsync=False)
            with path.open("r+b") as stream:
                stream.seek(at)
                stream.write(b"x")
            assert (pending(source).reason == "") is agrees
            made.remove(fsync=False)
    assert pending(open_source(str(path))) is None


def test_a_file_object_has_no_journal(copy):
    path = interrupted(copy(NAME))
    with path.open("rb") as stream:
        source, said = open_place(stream)
        assert (source.size, said) == (path.stat().st_size, ())


def test_looking_for_a_journal_costs_one_open(copy, monkeypatch):
    path = copy(NAME)
    tried = []
    real = os.open

    def noting(name, *rest):
        tried.append(Path(os.fsdecode(name)).name)
        return real(name, *rest)

    monkeypatch.setattr(os, "open", noting)
    source, said = open_place(path)
    source.close()
    assert tried == [NAME, journal(path).name]
    assert said == ()


def test_stale_temp_files_are_told_of(tmp_path, copy):
    """A journal's own temp file goes by the name that the next convert knows."""
    path = copy(NAME)
    with open_source(str(path)) as source:
        made = journals.Journal(str(path), journals.facts(source, 5))
    (path.parent / os.path.basename(made._temp).replace(str(os.getpid()), "999999999")).touch()
    said = findings_beside([targets.Target(str(path), True)])
    assert len(said) == 1
    assert said[0].startswith("left by an interrupted run")
    assert opened(path).size_bytes == len(FORMER)
