"""convert killed, interrupted, and pointed at odd places: the old output stays or the new is whole."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys

import pytest
import torch
from fixtures.make_fixtures import save
from parts_support import convert
from safetensors.torch import save_file
from verbs_support import FIXTURES, ROOT, cli, left_alone, load, notes

import ckptool
from ckptool.errors import CkptError, OutputError

SCRIPT = ROOT / "tests" / "convert_killed.py"


def weights():
    """Enough for kernel copies, a gather, several writes."""
    sd = {f"layers.{i}": torch.arange(35_000.0) + i for i in range(3)}
    return {**sd, "turned": torch.arange(2000.0).view(40, 50).t(), "n": torch.arange(3)}


KILLED = {
    "zip": ({"to": "zip"}, "old"),
    "legacy": ({"to": "legacy"}, "old"),
    "safetensors": ({"to": "safetensors"}, "old"),
    "shards": ({"to": "shards", "max_shard_size": 1}, "old"),
    "new shards": ({"to": "shards", "max_shard_size": 150_000}, "fresh"),
    "new zip from safetensors": ({"to": "zip"}, "fresh"),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("case", KILLED)
def test_killed_or_interrupted_at_twenty_points(case, tmp_path):
    words, before = KILLED[case]
    if "from" in case:
        save_file({k: v.contiguous() for k, v in weights().items()}, tmp_path / "in")
    else:
        save({"epoch": 3, "state_dict": weights()}, tmp_path / "in")
    seed = str(sum(case.encode()))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(words), before, seed],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=True,
    )  # fmt: skip
    report = json.loads(done.stdout)
    rows = report["rows"]

    assert report["count"] > 10
    assert len([row for row in rows if row["stop"] == "kill"]) == 20
    assert all(row["stopped"] for row in rows)
    for row in rows:
        assert row["whole"], row
        assert row.get("again", True), row
        assert row["old"] or row["new"] or "shards" in case, row
        assert row["index_is_last"], row
        if row["stop"] == "interrupt":
            assert not row["left"], row
            assert not row["missing"], row
        if row["stop"] == "interrupt" and row["old"] and before == "fresh":
            assert not row["folder"], row
        if row["left"] and "new shards" not in case:
            assert row.get("said", True), row
    assert any(row["left"] for row in rows)


def test_a_kill_of_the_command_keeps_the_old_file(tmp_path):
    """The real thing, once: SIGKILL from outside while it waits in the middle of the write."""
    save(weights(), tmp_path / "in.pth")
    out = tmp_path / "out.pth"
    out.write_bytes(b"old")
    script = (
        "import os, signal\n"
        "real = os.fsync\n"
        "os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)\n"
        "import sys\n"
        "sys.argv = ['ckptool', 'convert', 'in.pth', '--dtype', 'float16', '-o', 'out.pth', '-f']\n"
        "from ckptool.cli.main import run\n"
        "run()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )  # fmt: skip
    assert done.returncode == -9
    assert out.read_bytes() == b"old"
    (temp,) = tmp_path.glob(".out.pth.ckptool-*.tmp")
    made = convert(tmp_path / "in.pth", out, dtype="float16", force=True)
    (note,) = (note for note in made.notes if note.slug == "stale-temp")
    assert temp.name in note.text
    assert load(out)["layers.2"].dtype is torch.float16


# -- places ------------------------------------------------------------------------------------
@pytest.fixture
def net(tmp_path):
    path = tmp_path / "net.pth"
    save({"w": torch.ones(3)}, path)
    return path


def test_a_link_under_the_name_that_nobody_gave_is_not_followed(net, tmp_path):
    """A folder that was downloaded could lead the output anywhere."""
    (tmp_path / "net.cpu.pth").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CkptError, match=r"is a link: 'net.cpu.pth'"):
        convert(net, to_cpu=True, force=True)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_link_is_kept_and_what_it_names_is_replaced(suffix, net, tmp_path):
    (tmp_path / "deep").mkdir()
    real, link = tmp_path / "deep" / "real", tmp_path / f"link{suffix}"
    link.symlink_to(real)
    convert(net, link)  # it names nothing yet
    assert link.is_symlink()
    first = real.read_bytes()
    with pytest.raises(OutputError, match="exists"):
        convert(net, link, dtype="float16")
    convert(net, link, dtype="float16", force=True)

    assert link.is_symlink()
    assert real.read_bytes() != first
    left_alone(tmp_path / "deep", "real")


def test_a_hard_link_is_broken_and_told(net, tmp_path):
    out, other = tmp_path / "out.pth", tmp_path / "other.pth"
    out.write_bytes(b"old")
    os.link(out, other)
    done = convert(net, out, force=True)

    assert other.read_bytes() == b"old"
    assert load(out)["w"].tolist() == [1, 1, 1]
    assert any("hard link" in note.text for note in done.notes)


@pytest.mark.parametrize("how", ["same", "dot", "hard link", "symbolic link", "link to its folder"])
@pytest.mark.parametrize("options", [{}, {"to": "safetensors"}, {"dry_run": True}], ids=str)
def test_the_input_is_never_the_output(how, options, net, tmp_path):
    out = {"same": net, "dot": f"{tmp_path}/./net.pth"}.get(how, tmp_path / "link" / "net.pth")
    if how == "link to its folder":
        (tmp_path / "link").symlink_to(tmp_path)
    elif "link" in how:
        out = tmp_path / "link.pth"
        os.link(net, out) if how == "hard link" else out.symlink_to(net)
    before = net.read_bytes()
    for force in (False, True):
        with pytest.raises(OutputError, match="the output is the input itself") as caught:
            convert(net, out, to_cpu=True, force=force, **options)
        assert caught.value.slug == "output-same"
    assert net.read_bytes() == before


def test_the_extras_are_not_the_input_or_the_output(tmp_path):
    path = tmp_path / "net.pth"
    save({"epoch": 3, "model": {"w": torch.ones(2)}}, path)
    before = path.read_bytes()
    for extras in (path, tmp_path / "out.safetensors", f"{tmp_path}/./out.safetensors"):
        with pytest.raises(OutputError):
            convert(path, tmp_path / "out.safetensors", extras=extras, force=True)
    assert path.read_bytes() == before
    left_alone(tmp_path, "net.pth")


@pytest.mark.parametrize("target", ["out.pth", "out.safetensors", "out/"])
def test_extras_that_exist_are_refused_without_force(target, tmp_path, capsys):
    path, extras = tmp_path / "net.pth", tmp_path / "extras.json"
    save({"epoch": 3, "model": {"w": torch.ones(2)}}, path)
    extras.write_text("mine")
    flags = ["-o", f"{tmp_path}/{target}", "--select", "model", "--extras", extras]
    status, _, err = cli(capsys, "convert", path, *flags)

    assert status == 2
    assert str(extras) in err
    assert "-f" in err
    assert extras.read_text() == "mine"
    left_alone(tmp_path, "net.pth", "extras.json")
    status, _, err = cli(capsys, "convert", path, *flags, "-f")
    assert status == 0, err
    assert json.loads(extras.read_text())["extras"][0]["value"] == 3


@pytest.mark.parametrize("target", ["out.pth", "out.safetensors", "out"])
@pytest.mark.parametrize("at", [1, 2])
def test_a_failure_leaves_neither_output_nor_extras(at, target, tmp_path, monkeypatch):
    path = tmp_path / "net.pth"
    save({"epoch": 3, "model": {"w": torch.ones(2)}}, path)
    real, calls = os.fsync, []

    def fails(fd):
        calls.append(fd)
        if len(calls) == at:
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fails)
    options = {"to": "shards"} if target == "out" else {}
    with pytest.raises(OutputError, match="Input/output error"):
        ckptool.convert(
            path, tmp_path / target, select="model", extras=tmp_path / "x.json", **options
        )
    left_alone(tmp_path, "net.pth")


def test_a_dry_run_of_extras_writes_nothing(tmp_path):
    path = tmp_path / "net.pth"
    save({"epoch": 3, "model": {"w": torch.ones(2)}}, path)
    done = convert(path, tmp_path / "o.safetensors", extras=tmp_path / "x.json", dry_run=True)

    assert [os.path.basename(file) for file, _ in done.outputs] == ["o.safetensors", "x.json"]
    left_alone(tmp_path, "net.pth")
    again = convert(path, tmp_path / "o.safetensors", extras=tmp_path / "x.json")
    assert again.outputs == done.outputs
    assert [os.path.getsize(file) for file, _ in done.outputs] == [size for _, size in done.outputs]


@pytest.mark.parametrize(
    "where", ["", ".", "folder", "no/such/folder/o.pth", "file/o.pth", "/dev/null"]
)
def test_places_where_nothing_can_be_written(where, net, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    status, _, err = cli(capsys, "convert", net, "--to", "zip", "-f", "-o", where)

    assert status == 2, err
    assert "Traceback" not in err
    assert "bug" not in err
    left_alone(tmp_path, "net.pth", "folder", "file")
    left_alone(tmp_path / "folder")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_a_fifo_is_no_output(net, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for one, two in ((net, tmp_path / "pipe"), (tmp_path / "pipe", tmp_path / "o.pth")):
        with pytest.raises(CkptError):
            convert(one, two, to="zip", force=True)
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


@pytest.mark.parametrize("bits", [0o640, 0o600, 0o664])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_the_mode_of_a_replaced_file_stays(suffix, bits, net, tmp_path):
    out = tmp_path / f"out{suffix}"
    out.touch()
    out.chmod(bits)
    convert(net, out, force=True)
    assert stat.S_IMODE(out.stat().st_mode) == bits


def test_too_little_space_is_said_before_anything_is_written(net, tmp_path, monkeypatch):
    monkeypatch.setattr("ckptool.targets.free_bytes", lambda folder: 100)
    for name in ("o.pth", "o.safetensors", "o/"):
        with pytest.raises(OutputError, match="100 are free") as caught:
            convert(net, f"{tmp_path}/{name}", dtype="float64")
        assert caught.value.slug == "output-space"
    left_alone(tmp_path, net.name)


def test_no_fsync_is_obeyed(net, tmp_path, monkeypatch, capsys):
    calls = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(fd), real(fd)))
    cli(capsys, "convert", net, "--to", "zip", "-o", tmp_path / "a.pth", "--no-fsync")
    assert calls == []
    cli(capsys, "convert", net, "--to", "zip", "-o", tmp_path / "b.pth")
    assert len(calls) == 2  # the file, then its folder


def test_the_same_file_twice_is_the_same_file(tmp_path):
    for name in ("a.pth", "a.safetensors"):
        outs = [tmp_path / f"{i}{name[1:]}" for i in range(2)]
        for out in outs:
            convert(FIXTURES / "ema.pth", out, dtype="float16", to_cpu=True)
        assert outs[0].read_bytes() == outs[1].read_bytes()
        assert "stale-temp" not in notes(convert(FIXTURES / "ema.pth", outs[0], force=True, dtype="float16"))  # fmt: skip


@pytest.mark.parametrize("target", ["zip", "legacy", "safetensors", "shards"])
def test_an_interrupt_exits_130_and_leaves_nothing(target, tmp_path, monkeypatch, capsys):
    save({"epoch": 3, "model": weights()}, tmp_path / "net.pth")
    real, calls = os.fsync, []

    def interrupted(fd):
        calls.append(fd)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(fd)

    monkeypatch.setattr(os, "fsync", interrupted)
    flags = ["--to", target, "-o", tmp_path / "out", "--extras", tmp_path / "x.json"]
    status, out, err = cli(capsys, "convert", tmp_path / "net.pth", *flags)

    assert (status, out) == (130, "")
    assert err.strip() == "ckptool: interrupted; nothing is left behind"  # click ends the ^C line
    left_alone(tmp_path, "net.pth")
