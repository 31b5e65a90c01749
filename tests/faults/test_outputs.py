"""Where an output may go, who may write there, and what is never replaced."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

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
@pytest.mark.parametrize("limit", [100, 150_000])
def test_a_limit_on_the_size_of_files_cuts_writes_short(kind, limit, net, tmp_path):
    """RLIMIT_FSIZE: the last write is truly short, the next one fails."""
    before = net.read_bytes()
    words = ["--in-place", "--add-module"] if kind == "in place" else ["--to", kind, "-o", "out"]

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = run("convert", net, *words, cwd=tmp_path, preexec_fn=limited)

    assert done.returncode == 2
    assert b"larger than the disk or a limit (ulimit -f) allows" in done.stderr
    assert net.read_bytes() == before
    left_alone(tmp_path, net.name)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 300 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(folder)]
    if (
        not shutil.which("mount")
        or subprocess.run(words, capture_output=True, check=False).returncode
    ):
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
STRANGER = 65534
DROPPED = ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-chown,-fowner"]


@pytest.fixture
def foreign(tmp_path):
    """A folder of somebody else. Root may write anywhere, so the commands run without that."""
    if not hasattr(os, "getuid") or os.getuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("needs root and setpriv, to give a folder away and to give up rights")
    if subprocess.run([*DROPPED, "true"], capture_output=True, check=False).returncode:
        pytest.skip("rights cannot be given up here")
    folder = tmp_path / "foreign"
    folder.mkdir()
    yield folder
    os.chown(folder, 0, 0)


def unprivileged(*words, cwd):
    words = [*DROPPED, sys.executable, "-m", "ckptool", *map(str, words)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, check=False)


@pytest.mark.parametrize("target", ["out.pth", "out.safetensors", "new"])
def test_a_folder_that_may_not_be_written_to(target, foreign, net):
    """The file in it may be written to by all."""
    if target != "new":
        (foreign / target).write_bytes(b"old")
        (foreign / target).chmod(0o666)
    before = sorted(os.listdir(foreign))
    os.chown(foreign, STRANGER, STRANGER)
    to = ["--to", "shards"] if target == "new" else []
    done = unprivileged("convert", net, "--dtype", "float16", *to, "-f", "-o", target, cwd=foreign)

    assert done.returncode == 2
    assert b"it needs write permission on the folder" in done.stderr
    left_alone(foreign, *before)
    assert target == "new" or (foreign / target).read_bytes() == b"old"


def test_a_file_of_somebody_else_keeps_its_mode(foreign, net):
    """In a folder of one's own it is replaced; its owner cannot be kept."""
    out = foreign / "out.pth"
    out.touch(0o640)
    os.chown(out, STRANGER, STRANGER)
    done = unprivileged("convert", net, "--add-module", "-f", "-o", "out.pth", cwd=foreign)

    assert done.returncode == 0, done.stderr
    assert (stat.S_IMODE(out.stat().st_mode), out.stat().st_uid) == (0o640, 0)


def test_root_keeps_owner_and_mode(foreign, net):
    out = foreign / "out.pth"
    out.touch(0o640)
    os.chown(out, STRANGER, STRANGER)
    ckptool.convert(net, out, add_module=True, force=True)
    assert (stat.S_IMODE(out.stat().st_mode), out.stat().st_uid) == (0o640, STRANGER)


@pytest.mark.parametrize("words", [["--in-place", "--strip-module"], ["--undo"]], ids=" ".join)
def test_in_place_says_when_the_file_may_not_be_written_to(words, foreign, net):
    ckptool.convert(net, in_place=True, add_module=True)
    net.chmod(0o444)
    os.chown(net, STRANGER, STRANGER)
    done = unprivileged("convert", net, *words, cwd=foreign)

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
    seen = set()

    def write(dtype):
        for _ in range(8):
            ckptool.convert(net, out, dtype=dtype, force=True, fsync=False)

    with ThreadPoolExecutor() as pool:
        writers = [pool.submit(write, dtype) for dtype in wanted.values()]
        while not all(writer.done() for writer in writers):
            if out.exists():
                seen.add(wanted.get(out.read_bytes(), "torn"))
            time.sleep(0.002)
    for writer in writers:
        writer.result()
    assert "torn" not in seen
    assert out.read_bytes() in wanted
    assert [p.name for p in tmp_path.iterdir() if "ckptool-" in p.name] == []


def lengthen(net):
    with net.open("ab") as file:
        file.write(b"more")


CHANGED = {
    "appended to": lengthen,
    "cut": lambda net: os.truncate(net, 9),
    "written to": lambda net: os.utime(net, (5, 5)),
}


@pytest.mark.parametrize("how", CHANGED)
@pytest.mark.parametrize("target", ["zip", "safetensors", "shards"])
def test_an_input_that_changes_while_it_is_read(how, target, net, tmp_path, monkeypatch, capsys):
    real = os.open

    def change(path, *rest):
        if "ckptool-" in os.fsdecode(path):  # the temp file: the plan is made
            CHANGED[how](net)
        return real(path, *rest)

    monkeypatch.setattr(os, "open", change)
    status, out, _ = cli(capsys, "convert", net, "--to", target, "-o", tmp_path / "out", "--json")
    monkeypatch.undo()

    assert status == 2
    assert json.loads(out)["error"]["slug"] in ("input-changed", "truncated")
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
