"""What convert refuses, keeps and checks; and when it writes nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
from fixtures.make_fixtures import absent, save
from verbs_support import (
    FIXTURES,
    LEGACY,
    TRUTHS,
    acme,
    assert_same,
    cli,
    data_offset,
    devices,
    left_alone,
    load,
    members,
    notes,
    save_resume,
)

import ckptool
from ckptool.errors import (
    CkptError,
    CrcMismatch,
    KeyDuplicate,
    OutputError,
    UnsafePickle,
    Unsupported,
)

# -- what is refused, what is kept -------------------------------------------------------------
INSPECT_ONLY = ["torchscript.pt", "torch_package.pt", "exported.pt2"]


@pytest.mark.parametrize("name", INSPECT_ONLY)
def test_what_is_inspect_only_is_refused_in_a_sentence(name, tmp_path, capsys):
    out = tmp_path / "out.pth"
    with pytest.raises(Unsupported):
        ckptool.convert(FIXTURES / name, out, to_cpu=True)
    status, stdout, err = cli(capsys, "convert", FIXTURES / name, "--to-cpu", "-o", out)

    assert (status, stdout) == (2, "")
    assert err.splitlines()[0].startswith(f"ckptool: {FIXTURES / name}: ")
    assert "not converted" in err
    left_alone(tmp_path)


BROKEN = sorted(name for name, truth in TRUTHS.items() if truth.get("error"))


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_checkpoint_is_refused(name, tmp_path, capsys):
    status, _, err = cli(capsys, "convert", FIXTURES / name, "--to-cpu", "-o", tmp_path / "o")

    assert status == 2
    assert "Traceback" not in err
    left_alone(tmp_path)


@pytest.mark.parametrize("name", ["evil.pth", "acme_enum.pth"])
def test_what_could_run_code_is_refused(name, copy, tmp_path):
    path = copy(name)
    with pytest.raises(UnsafePickle, match=r"\.system|acme\.colors\.Color") as caught:
        ckptool.convert(path, to_cpu=True)

    assert "--keep-unknown" in caught.value.hint
    left_alone(tmp_path, name)


def test_keep_unknown_copies_without_running(copy, capfd):
    done = ckptool.convert(copy("evil.pth"), to_cpu=True, keep_unknown=True)

    assert "unsafe-pickle" in notes(done)
    assert b"system" in members(done.output)["data.pkl"]
    assert set(devices(done.output).values()) == {"cpu"}
    assert ckptool.inspect(done.output).could_run_code
    assert capfd.readouterr() == ("", "")


def test_keep_unknown_keeps_an_honest_enum(copy):
    import enum

    done = ckptool.convert(copy("acme_enum.pth"), to_cpu=True, keep_unknown=True)
    color = enum.Enum("Color", {"RED": 1})
    with absent("acme.colors", Color=color):
        assert torch.load(done.output, weights_only=False)["color"] is color.RED


def test_foreign_classes_are_kept_and_named(copy):
    done = ckptool.convert(copy("namespace_foreign.pth"), to_cpu=True)
    (note,) = (note for note in done.notes if note.slug == "foreign-classes")

    assert "acme.config.Config" in note.text
    with acme():
        config = torch.load(done.output, weights_only=False)["config"]
    assert config.device == "cuda:0"
    assert config.extra.device.type == "cpu"


def test_one_key_twice_is_refused(tmp_path):
    from formats_support import archive, dictionary, pickled, tensor

    path = tmp_path / "net.pth"
    path.write_bytes(archive(pickled(dictionary(("w", tensor()), ("w", tensor())))))
    with pytest.raises(KeyDuplicate):
        ckptool.convert(path, to_cpu=True)
    left_alone(tmp_path, "net.pth")


# -- checksums ---------------------------------------------------------------------------------
@pytest.fixture
def flipped(copy):
    path = copy("net_cuda3.pth")
    (wanted,) = (t for t in ckptool.inspect(path).rows if t.key == "fc.weight")
    position = data_offset(path, f"data/{wanted.storage.key}") + 5
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    return path


def test_a_flipped_bit_stops_the_convert_and_names_the_tensor(flipped, tmp_path):
    with pytest.raises(CrcMismatch, match=r"fc\.weight") as caught:
        ckptool.convert(flipped, to_cpu=True)

    assert caught.value.path == str(flipped)
    left_alone(tmp_path, flipped.name)


def test_no_check_copies_the_flipped_bit(flipped):
    done = ckptool.convert(flipped, to_cpu=True, check=False)

    assert_same(load(flipped), load(done.output))


# -- outputs -----------------------------------------------------------------------------------
def test_an_output_that_exists_is_refused_without_force(copy, tmp_path):
    path, out = copy("net_cuda3.pth"), tmp_path / "out.pth"
    out.write_bytes(b"mine")
    with pytest.raises(OutputError) as caught:
        ckptool.convert(path, out, to_cpu=True)
    assert caught.value.slug == "output-exists"
    assert out.read_bytes() == b"mine"

    ckptool.convert(path, out, to_cpu=True, force=True)
    assert_same(load(path), load(out))


@pytest.mark.parametrize("link", ["path", "symlink", "hard link"])
def test_the_input_is_never_the_output(link, copy, tmp_path):
    path, out = copy("net_cuda3.pth"), tmp_path / "out.pth"
    if link == "symlink":
        out.symlink_to(path)
    elif link == "hard link":
        os.link(path, out)
    before = path.read_bytes()
    with pytest.raises(OutputError) as caught:
        ckptool.convert(path, path if link == "path" else out, to_cpu=True, force=True)

    assert caught.value.slug == "output-same"
    assert path.read_bytes() == before


def test_a_dry_run_writes_nothing_and_tells_all(copy, tmp_path):
    path = copy("dp_cuda.pth")
    wet = ckptool.convert(path, tmp_path / "wet.pth", to_cpu=True)
    (tmp_path / "wet.pth").unlink()
    dry = ckptool.convert(path, to_cpu=True, dry_run=True)

    left_alone(tmp_path, path.name)
    assert (dry.renames, dry.devices, dry.size_bytes) == (wet.renames, wet.devices, wet.size_bytes)
    assert "module.fc.weight -> fc.weight" in str(dry)


def test_no_output_is_named_where_none_can_be_guessed(copy):
    with pytest.raises(CkptError, match="no output is named"):
        ckptool.convert(copy("dp_cuda.pth"), strip_module=True)


def test_a_rewrite_keeps_the_layout_torch_computes(tmp_path):
    """`.format_version` is a promise: first storage '0', in order of first use, 64-aligned."""
    out = tmp_path / "out.pth"
    path = save_resume(tmp_path / "net.pth")
    ckptool.convert(path, out, to_cpu=True)
    names = list(members(out))

    assert names[0] == "data.pkl"
    assert ".format_version" in names
    count = sum(name.startswith("data/") for name in names)
    assert [n for n in names if n.startswith("data/")] == [f"data/{i}" for i in range(count)]
    assert all(data_offset(out, name) % 64 == 0 for name in names)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory from /proc")
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_memory_does_not_grow_with_the_tensors(legacy, tmp_path):
    path = tmp_path / "net.pth"
    sd = {f"module.layer{i}.weight": torch.zeros(1024, 2048) for i in range(25)}
    save(sd, path, "cuda:0", **(LEGACY if legacy else {}))  # 25 * 8 MiB
    del sd
    name = "legacy.pth" if legacy else "net_cuda3.pth"
    small = shutil.copy(FIXTURES / name, tmp_path / "small.pth")
    code = """
import sys, ckptool
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
ckptool.convert(sys.argv[1], to_cpu=True, fsync=False)
before = peak()
ckptool.convert(sys.argv[2], to_cpu=True, fsync=False)
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, small, path], capture_output=True, text=True, check=True
    )
    assert os.path.getsize(tmp_path / "net.cpu.pth") > 200_000_000
    assert int(done.stdout) < 40_000  # kB


def test_the_comparison_sees_a_difference():
    """The comparison itself sees a changed byte, a lost tie, a changed stride."""
    one, two = load(FIXTURES / "views.pth"), load(FIXTURES / "views.pth")
    assert_same(one, two)
    two["scalar"].add_(1)
    with pytest.raises(AssertionError):
        assert_same(one, two)
    two = load(FIXTURES / "views.pth")
    two["again"] = two["again"].clone()
    with pytest.raises(AssertionError):
        assert_same(one, two)
