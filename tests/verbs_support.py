"""What the tests of the verbs share: files as torch saves them, and torch's word on two files."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import torch
from fixtures.make_fixtures import Net, Tags, absent, filled, save
from torch import nn
from torch.utils.serialization import config

import ckptool
from ckptool.cli.main import main

ROOT = Path(__file__).parent.parent
FIXTURES = Path(__file__).parent / "fixtures"
TRUTHS = {p.name[:-5]: json.loads(p.read_text("utf-8")) for p in sorted(FIXTURES.glob("*.json"))}
REFUSED_KINDS = {"whole_model.pth", "whole_model_dp.pth"}
UNSAFE = {"evil.pth", "acme_enum.pth"}
CONVERTIBLE = sorted(
    name
    for name, truth in TRUTHS.items()
    if truth["format"] in ("torch-zip", "torch-legacy")
    and not truth.get("error")
    and name not in REFUSED_KINDS | UNSAFE
)
LEGACY = {"_use_new_zipfile_serialization": False}


def run(*args, cwd=None, env=None, **options):
    """The command in a process of its own."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, **(env or {})}
    return subprocess.run(
        [sys.executable, "-m", "ckptool", *map(str, args)],
        cwd=cwd, env=env, capture_output=True, check=False, **options,
    )  # fmt: skip


def cli(capsys, *args):
    """(exit status, stdout, stderr) of the command in this process."""
    capsys.readouterr()
    status = main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return status, out, err


# -- loading -----------------------------------------------------------------------------------
@contextlib.contextmanager
def acme():
    """The classes of namespace_foreign.pth, which no reader has."""
    names = {"Config": (object,), "History": (list,), "Registry": (dict,)}
    made = {name: type(name, bases, {}) for name, bases in names.items()}
    with absent("acme.config", **made):
        yield


@contextlib.contextmanager
def calculated_offsets():
    """Let torch compute storage offsets instead of reading the zip directory."""
    before = config.load.calculate_storage_offsets
    config.load.calculate_storage_offsets = True
    try:
        yield
    finally:
        config.load.calculate_storage_offsets = before


def load(path, **options):
    """What torch makes of a file we trust; every storage on the CPU unless told otherwise."""
    with warnings.catch_warnings(), acme():
        warnings.simplefilter("ignore")
        return torch.load(path, **{"map_location": "cpu", "weights_only": False, **options})


def allowed_by_torch(path):
    """Whether torch.load's default reads the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            return "Weights only load failed" not in str(error) and None
    return True


# -- comparing ---------------------------------------------------------------------------------
class Comparison:
    """Two loaded objects side by side: every type, value, key, byte, stride and tie."""

    def __init__(self, rename=None, meta=False):
        self.rename = rename or {}
        self.meta = meta  # the second object has shapes only
        self.ties = {}
        self.tensors = 0

    def same(self, one, two, path=()):
        where = ".".join(map(str, path))
        if isinstance(one, torch.Tensor):
            self._tensor(one, two, where)
        elif isinstance(one, dict):
            self._keys(one, two, path, where)
            for (key, left), right in zip(one.items(), two.values(), strict=True):
                self.same(left, right, (*path, key))
            self._state(one, two, path)
        elif isinstance(one, list | tuple):
            assert type(one).__name__ == type(two).__name__, where
            assert len(one) == len(two), where
            for at, (left, right) in enumerate(zip(one, two, strict=True)):
                self.same(left, right, (*path, at))
            self._state(one, two, path)
        elif isinstance(one, torch.UntypedStorage | torch.TypedStorage):
            assert bytes(one.tolist()) == bytes(two.tolist()), where
        elif hasattr(one, "__dict__") and not isinstance(one, type):
            assert type(one).__name__ == type(two).__name__, where
            self.same(vars(one), vars(two), (*path, "__dict__"))
        else:
            assert type(one) is type(two), where
            assert one == two or (one != one and two != two), where

    def _keys(self, one, two, path, where):
        assert type(one).__name__ == type(two).__name__, where
        renames = self.rename.get(path, {})
        assert [renames.get(key, key) for key in one] == list(two), where

    def _state(self, one, two, path):
        mine, theirs = vars(one) if hasattr(one, "__dict__") else {}, getattr(two, "__dict__", {})
        left = {k: v for k, v in mine.items() if k != "_metadata" or path not in self.rename}
        right = {k: v for k, v in theirs.items() if k != "_metadata" or path not in self.rename}
        if left or right:
            self.same(left, right, (*path, "__dict__"))

    def _tensor(self, one, two, where):
        self.tensors += 1
        assert type(one) is type(two), where
        assert (one.shape, one.dtype, one.requires_grad, one.layout, one.is_quantized) == (
            two.shape, two.dtype, two.requires_grad, two.layout, two.is_quantized,
        ), where  # fmt: skip
        if self.meta:
            return
        if one.layout != torch.strided:
            assert torch.equal(one.to_dense(), two.to_dense()), where
            return
        assert (one.stride(), one.storage_offset()) == (two.stride(), two.storage_offset()), where
        assert one.device == two.device, where
        if one.device.type == "meta":
            return
        assert raw_bytes(one) == raw_bytes(two), where
        mine, theirs = one.untyped_storage(), two.untyped_storage()
        if mine.nbytes():
            assert self.ties.setdefault(mine.data_ptr(), theirs.data_ptr()) == theirs.data_ptr()
            assert mine.nbytes() == theirs.nbytes(), where


def raw_bytes(tensor):
    """All bytes of the storage, whatever the view."""
    storage = tensor.detach().untyped_storage()
    return torch.tensor([], dtype=torch.uint8).set_(storage).numpy().tobytes()


def assert_same(one, two, rename=None, **options):
    """`two` is `one` with these keys renamed ({path of a dict: {old: new}}); returns the count."""
    comparison = Comparison(rename, **options)
    comparison.same(one, two)
    return comparison.tensors


def stripped(keys):
    """{old: new} of a `module.` that all keys carry, as torch's own function renames."""
    tensors = OrderedDict((key, torch.zeros(0)) for key in keys if isinstance(key, str))
    if not tensors or not all(key.startswith("module.") for key in tensors):
        return {}
    names = list(tensors)
    while all(key.startswith("module.") for key in tensors):
        nn.modules.utils.consume_prefix_in_state_dict_if_present(tensors, "module.")
    return dict(zip(names, tensors, strict=True))


def at(obj, path):
    for step in path:
        obj = obj[step]
    return obj


def default_renames(obj, truth):
    """What --to-cpu renames in each table of a fixture."""
    found = {tuple(t["path"]): stripped(at(obj, t["path"])) for t in truth["tables"]}
    return {path: renames for path, renames in found.items() if renames}


# -- files -------------------------------------------------------------------------------------
def members(path):
    """{name without the top folder: bytes} of a zip with every checksum in place."""
    with zipfile.ZipFile(path) as z:
        return {i.filename.split("/", 1)[1]: raw_member(path, i) for i in z.infolist()}


def raw_member(path, info):
    with open(path, "rb") as f:
        f.seek(info.header_offset + 26)
        name, extra = (int.from_bytes(f.read(2), "little") for _ in range(2))
        f.seek(name + extra, 1)
        return f.read(info.compress_size)


def data_offset(path, member):
    """Where the bytes of a stored member begin."""
    with zipfile.ZipFile(path) as z, open(path, "rb") as f:
        info = next(i for i in z.infolist() if i.filename.split("/", 1)[1] == member)
        f.seek(info.header_offset + 26)
        name, extra = (int.from_bytes(f.read(2), "little") for _ in range(2))
        return info.header_offset + 30 + name + extra


def devices(path):
    """{storage key: tag} of every storage in the file, as our own reader sees it."""
    return {s.key: s.device for s in ckptool.inspect(path).checkpoint.storages}


def device_of(path):
    """{path of a tensor: tag}."""
    return {t.path: t.device for t in ckptool.inspect(path).checkpoint.tensors}


def keys(path, at=None):
    return [t.key for t in ckptool.inspect(path, at=at).rows]


def notes(done):
    return {note.slug for note in done.notes}


def left_alone(folder, *names):
    """Nothing but these files is in the folder: no output, no temp file."""
    assert sorted(p.name for p in Path(folder).iterdir()) == sorted(names)


def resume(seed=0):
    """A training run as people save it, and where its storages are said to be.

    The net on cuda:0 in DataParallel with a tied pair, a view and a buffer; Adam with its step
    counters on the CPU; random states on the CPU; strings that look like keys and devices.
    """
    net = nn.DataParallel(Net(seed))
    net.module.head = nn.Linear(8, 3)
    net.module.head.weight = net.module.fc.weight
    filled(net.module, seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    state, sd = optimizer.state_dict(), net.state_dict()
    base = torch.arange(24.0)
    sd["module.view"] = base.view(4, 6).t()
    sd["module.slice"] = base[3:9]
    sd["module.scale"] = nn.Parameter(torch.tensor(2.0))
    cpu = [one["step"] for one in state["state"].values()]
    obj = {
        "epoch": 90,
        "best_key": "module.fc.weight",
        "device": "cuda:0 of my machine",
        "args": argparse.Namespace(arch="small", lr=0.1, device="cuda:0", gpus=[0, 1]),
        "history": [{"loss": 0.5, "keys": list(sd)}],
        "state_dict": sd,
        "optimizer": state,
        "rng": {"cpu": torch.arange(16, dtype=torch.uint8), "numpy": ("MT", [1, 2], 3)},
        "scalar": torch.tensor(7.0),
        "curve": torch.arange(5.0),
    }
    cpu += [obj["rng"]["cpu"], obj["scalar"], obj["curve"]]
    tags = Tags("cuda:0")
    for tensor in cpu:
        tags.put(tensor, "cpu")
    return obj, tags


def save_resume(path, tag=None, **options):
    """`resume()` in a file; `tag` puts every storage on one device."""
    obj, tags = resume()
    save(obj, path, tags if tag is None else tag, **options)
    return path
