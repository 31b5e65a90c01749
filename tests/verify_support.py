"""What the tests of verify and salvage share: files with damage in a known place, torch's word on
what was in them before.
"""

from __future__ import annotations

import io
import zipfile

import torch
from formats_support import saved, saved_legacy
from safetensors.torch import save as save_safetensors

from ckptool.limits import DEFAULT
from ckptool.places import BytesSource
from ckptool.verbs.verify_file import verify_source
from ckptool.zips import read_directory


def training():
    """A checkpoint of a training run: weights in two dtypes, an optimizer with state, values."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3, dtype=torch.bfloat16)
    )
    optimizer = torch.optim.Adam(list(net[0].parameters()))
    net[0](torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return {
        "epoch": 7, "state_dict": net.state_dict(), "optimizer": optimizer.state_dict(),
        "args": {"lr": 0.1},
    }  # fmt: skip


TRAINING = training()
WEIGHTS = {key: value.clone() for key, value in TRAINING["state_dict"].items()}


def repacked(data, method=zipfile.ZIP_STORED):
    """The same records packed again by Python's zipfile."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return stream.getvalue()


ZIP = saved(TRAINING)
FILES = {
    "zip": ZIP,
    "repacked": repacked(ZIP),
    "deflated": repacked(ZIP, zipfile.ZIP_DEFLATED),
    "legacy": saved_legacy(TRAINING),
    "safetensors": save_safetensors(WEIGHTS),
}


def verified(data, finite=False, name="net.pth"):
    """verify of bytes."""
    return verify_source(BytesSource(bytes(data), name), finite, DEFAULT, None)


def flipped(data, at, bit=0):
    """The same bytes with one bit the other way."""
    damaged = bytearray(data)
    damaged[at] ^= 1 << bit
    return bytes(damaged)


def entries(data):
    """{record name: its entry}."""
    return read_directory(BytesSource(data, "x")).records


def storage_of(loaded, key):
    """The record of a tensor of a file saved by torch: 'data/3'."""
    keys = {}
    for tensor in (*loaded["state_dict"].values(), *_state(loaded)):
        keys.setdefault(tensor.untyped_storage().data_ptr(), len(keys))
    return f"data/{keys[loaded['state_dict'][key].untyped_storage().data_ptr()]}"


def _state(loaded):
    for row in loaded.get("optimizer", {}).get("state", {}).values():
        yield from row.values()


def same_bits(one, two):
    """Whether two tensors are equal to the bit, NaN too."""
    one, two = one.detach().contiguous(), two.detach().contiguous()
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8))
