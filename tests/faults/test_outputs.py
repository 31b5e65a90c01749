"""Where an output may go, who may write there, and what is never replaced."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest
import torch
from fixtures.make_fixtures import save
from verbs_support import ROOT, cli, left_alone, load, run

import ckptool
from ckptool.errors import OutputError

SUFFIXES = [".pth", ".safetensors"]


@pytest.fixture
def net(tmp_path):
    path = tmp_path / "net.pth"
    save({"w": torch.arange(50_000.0), "b": torch.ones(3)}, path)
    return path


# -- a disk that is really full, a file that may really not grow ----------------------------------
@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors", "shards", "in place"])
@pytest.mark.parametrize("limit", [100, 70_000, 199_000, 210_000])
def test_a_limit_on_the_size_of_files_cuts_writes_short(kind, limit, net, tmp_path):
    """RLIMIT_FSIZE: the last write is truly short, the next one fails."""
    before = net.read_bytes()
    words = ["--in-place", "--add-module"] if kind == "in place" else ["--to", kind, "-o", "out"]

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = run("convert", net, *words, cwd=tmp_path, preexec_fn=limited)
    fits = limit == 210_000 and kind != "in place"

    if limit == 210_000 and kind == "in place":
        return  # the file and its new end are about that long
    assert done.returncode == (0 if fits else 2), done.stderr
    if not fits:
        assert b"larger than the disk or a limit (ulimit -f) allows" in done.stderr
        assert net.read_bytes() == before
        left_alone(tmp_path, net.name)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 300 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(folder)]
    if not shutil.which("mount") or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("no disk may be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("asked", [True, False], ids=["asks", "finds out"])
@pytest.mark.parametrize("target", ["out.pth", "out.safetensors", "out/"])
def test_a_full_disk_keeps_the_old_file(target, asked, small_disk, net, monkeypatch, capsys):
    """Whether the free space is asked for before, or only the write finds out."""
    if not asked:
        monkeypatch.setattr("ckptool.targets.free_bytes", None)
    old = small_disk / "out.pth"
    old.write_bytes(b"old")
    status, _, err = cli(capsys, "convert", net, "--dtype", "float64", "-f", "-o", f"{small_disk}/{target}")  # fmt: skip

    assert status == 2
    assert ("are free on the disk" if asked else "No space left on device") in err
    assert "free some space" in err
    assert old.read_bytes() == b"old"
    left_alone(small_disk, "out.pth")


# -- links -------------------------------------------------------------------------------------
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_chain_of_links_is_followed_to_its_end(suffix, net, tmp_path):
    ends = tmp_path / "ends"
    ends.mkdir()
    (tmp_path / "two").symlink_to("ends/real")
    link = tmp_path / f"one{suffix}"
    link.symlink_to("two")
    ckptool.convert(net, link, add_module=True)

    assert os.readlink(link) == "two"
    assert ckptool.inspect(ends / "real").rows[0].key == "module.w"
    left_alone(ends, "real")


def test_a_link_to_itself_or_into_nothing_is_refused(net, tmp_path, capsys):
    (tmp_path / "loop.pth").symlink_to("loop.pth")
    (tmp_path / "lost.pth").symlink_to("no/such/folder/x.pth")
    for name in ("loop.pth", "lost.pth"):
        status, _, err = cli(capsys, "convert", net, "--to", "zip", "-f", "-o", tmp_path / name)
        assert status == 2, err
        assert "bug" not in err
        assert (tmp_path / name).is_symlink()
    left_alone(tmp_path, "net.pth", "loop.pth", "lost.pth")


# -- who may ------------------------------------------------------------------------------------
def as_nobody():
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


@pytest.fixture
def readable():
    """A place that another user reaches: pytest's own folders are closed to others."""
    import tempfile

    if not hasattr(os, "getuid") or os.getuid() != 0:
        pytest.skip("needs root, who may become another user")
    if not os.access(ROOT, os.R_OK):
        pytest.skip("another user cannot read the sources")
    folder = tempfile.mkdtemp(prefix="ckptool-")
    os.chmod(folder, 0o755)
    if subprocess.run([sys.executable, "-c", "import click"], preexec_fn=as_nobody, capture_output=True).returncode:  # fmt: skip
        shutil.rmtree(folder)
        pytest.skip("another user cannot run this interpreter")
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("target", ["out.pth", "out.safetensors", "new"])
def test_a_folder_that_may_not_be_written_to(target, readable, net):
    """Root may write anywhere, so another user tries; the file itself is writable to all."""
    shutil.copy(net, f"{readable}/net.pth")
    if target != "new":
        with open(f"{readable}/{target}", "wb") as file:
            file.write(b"old")
        os.chmod(f"{readable}/{target}", 0o666)
    before = sorted(os.listdir(readable))
    to = ["--to", "shards"] if target == "new" else []
    done = run("convert", "net.pth", "--dtype", "float16", *to, "-f", "-o", target, cwd=readable, preexec_fn=as_nobody)  # fmt: skip

    assert done.returncode == 2
    assert b"it needs write permission on the folder" in done.stderr
    assert sorted(os.listdir(readable)) == before
    if target != "new":
        with open(f"{readable}/{target}", "rb") as file:
            assert file.read() == b"old"


def test_a_file_of_somebody_else_keeps_its_mode(readable, net):
    """In a folder of one's own a stranger's file is replaced; its mode stays, its owner cannot."""
    os.chmod(readable, 0o777)
    shutil.copy(net, f"{readable}/net.pth")
    os.chmod(f"{readable}/net.pth", 0o644)
    with open(f"{readable}/out.pth", "wb"):
        os.chmod(f"{readable}/out.pth", 0o640)
    done = run("convert", "net.pth", "--add-module", "-f", "-o", "out.pth", cwd=readable, preexec_fn=as_nobody)  # fmt: skip

    info = os.stat(f"{readable}/out.pth")
    assert done.returncode == 0, done.stderr
    assert (stat.S_IMODE(info.st_mode), info.st_uid) == (0o640, 65534)


def test_in_place_needs_no_more_than_the_file_and_says_what(readable, net):
    shutil.copy(net, f"{readable}/net.pth")
    os.chmod(f"{readable}/net.pth", 0o444)
    done = run("convert", "net.pth", "--add-module", "--in-place", cwd=readable, preexec_fn=as_nobody)  # fmt: skip

    assert done.returncode == 2
    assert b"it cannot be opened for writing: Permission denied" in done.stderr
    assert b"hint: give yourself write permission" in done.stderr


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o007, 0o660), (0o077, 0o600)])
@pytest.mark.parametrize("target", ["out.pth", "out.safetensors", "out"])
def test_a_new_file_obeys_the_umask(target, mask, mode, net, tmp_path):
    before = os.umask(mask)
    try:
        ckptool.convert(net, tmp_path / target, dtype="float16", **({"to": "shards"} if target == "out" else {}))  # fmt: skip
    finally:
        os.umask(before)
    made = tmp_path / target
    found = list(made.iterdir()) if made.is_dir() else [made]
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {mode}


# -- at once ------------------------------------------------------------------------------------
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_many_writers_of_one_path_leave_a_whole_file(suffix, net, tmp_path):
    out = tmp_path / f"out{suffix}"
    wanted = {}
    for dtype in ("float64", "float16", "bfloat16"):
        ckptool.convert(net, tmp_path / f"{dtype}{suffix}", dtype=dtype)
        wanted[(tmp_path / f"{dtype}{suffix}").read_bytes()] = dtype
    errors, seen = [], set()

    def write(dtype):
        for _ in range(8):
            try:
                ckptool.convert(net, out, dtype=dtype, force=True, fsync=False)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=write, args=(dtype,)) for dtype in wanted.values()]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if out.exists():
            seen.add(wanted.get(out.read_bytes(), "torn"))
        time.sleep(0.002)
    assert errors == []
    assert "torn" not in seen
    assert out.read_bytes() in wanted
    assert [p.name for p in tmp_path.iterdir() if "ckptool-" in p.name] == []


@pytest.mark.parametrize("how", ["appended", "shortened", "replaced", "touched"])
@pytest.mark.parametrize("target", ["zip", "safetensors", "shards"])
def test_an_input_that_changes_while_it_is_read(how, target, net, tmp_path, monkeypatch, capsys):
    real = os.fsync

    def change(fd):
        monkeypatch.setattr(os, "fsync", real)
        if how == "replaced":
            shutil.copy(net, tmp_path / "other")
            os.replace(tmp_path / "other", net)
            os.utime(net, (5, 5))
        elif how == "touched":
            os.utime(net, (5, 5))
        else:
            with open(net, "r+b") as file:
                file.truncate(net.stat().st_size + (9 if how == "appended" else -9))
        real(fd)

    from ckptool import writing

    real_flush = writing._Out.flush

    def flush(self):
        if monkeypatch is not None:
            change(self._fd)
            monkeypatch.setattr(writing._Out, "flush", real_flush)
        real_flush(self)

    monkeypatch.setattr(writing._Out, "flush", flush)
    status, out, _ = cli(capsys, "convert", net, "--to", target, "-o", tmp_path / "out", "--json")

    if how == "replaced":  # the open file is what was planned with, and it is whole
        assert status == 0
        assert os.path.exists(tmp_path / "out")
        return
    assert status == 2
    assert '"input-changed"' in out or '"truncated"' in out
    left_alone(tmp_path, net.name)


def test_a_temp_file_lies_beside_what_a_link_names(net, tmp_path, monkeypatch):
    """A rename is at once within one disk only, so the temp file goes where the file goes."""
    (tmp_path / "far").mkdir()
    (tmp_path / "out.pth").symlink_to("far/real.pth")
    seen, real = [], os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (seen.append((old, new)), real(old, new)))
    ckptool.convert(net, tmp_path / "out.pth", add_module=True)

    ((old, new),) = seen
    assert os.path.dirname(old) == os.path.dirname(new) == str(tmp_path / "far")
    assert load(tmp_path / "out.pth")["module.b"].tolist() == [1, 1, 1]


def test_mode_bits_that_cannot_be_kept_widen_nothing(net, tmp_path, monkeypatch):
    """On a disk without modes a private file is not replaced by one that all may read."""
    out = tmp_path / "out.pth"
    out.write_bytes(b"old")

    def denied(fd, mode):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", denied)
    out.chmod(0o600)
    with pytest.raises(OutputError, match="cannot be given the mode 600") as caught:
        ckptool.convert(net, out, add_module=True, force=True)
    assert caught.value.slug == "output-mode"
    assert out.read_bytes() == b"old"
    left_alone(tmp_path, "net.pth", "out.pth")
    out.chmod(0o666)
    ckptool.convert(net, out, add_module=True, force=True)
    assert "module.w" in load(out)
