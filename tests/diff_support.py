"""What the tests of comparing share: tensors in memory as one side of it, fine-tuned pairs."""

from __future__ import annotations

import argparse
import math
from collections import OrderedDict
from functools import partial

import torch
from fixtures.make_fixtures import save
from safetensors.torch import save_file
from torch import nn
from values_support import encode
from verbs_support import LEGACY

import ckptool
from ckptool.checkpoint import DTYPES, Piece, Storage, Tensor
from ckptool.formats.runs import contiguous
from ckptool.values.equal import Seen

BASE_NAMES = (
    "conv1.weight", "conv1.bias", "layer1.0.weight", "layer1.0.bias", "layer2.0.weight",
    "layer2.0.bias", "fc.weight", "fc.bias",
)  # fmt: skip
FLOATS = {name for name, row in DTYPES.items() if row.kind == "float"} - {"float4_e2m1fn_x2"}


# -- one tensor in memory ----------------------------------------------------------------------
class Memory:
    """The bytes of one storage as `equal.Files`; notes what was read."""

    def __init__(self, place):
        self.place = place

    def read(self, source_id, offset, size):
        return self.place(source_id, offset, size)

    def read_into(self, source_id, offset, buffer):
        buffer[:] = self.place(source_id, offset, len(buffer))


def seen(tensor, encoding="stored", kind="tensor", dtype=None):
    """A torch tensor, its whole storage in that encoding, as one side of a comparison; `dtype`
    is what its bits are said to be.
    """
    dtype = DTYPES[dtype or str(tensor.dtype).removeprefix("torch.")]
    raw = storage_bytes(tensor)
    place, crc = encode(raw, encoding, dtype.size_bytes // dtype.components)
    count = len(raw) // dtype.size_bytes
    storage = Storage("0", dtype, count, "cpu", (Piece(3, place.span, encoding),), crc)
    record = Tensor(
        "w", dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), storage, False,
        kind, ("w",),
    )  # fmt: skip
    return Seen(record, Memory(place))


def storage_bytes(tensor):
    """All bytes of the storage."""
    whole = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())
    return whole.numpy().tobytes()


def raw(values, dtype):
    """A contiguous tensor of that type with these bits (unsigned)."""
    size = DTYPES[dtype].size_bytes
    data = b"".join(int(v).to_bytes(size, "little") for v in values)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(getattr(torch, dtype))


def contiguous_record(key, shape, dtype="float32", **fields):
    """A record without numbers."""
    row = DTYPES[dtype]
    storage = Storage(key, row, math.prod(shape), "cpu", (), None)
    return Tensor(
        key, row, tuple(shape), contiguous(tuple(shape)), 0, storage, False, "tensor", (key,),
        **fields,
    )  # fmt: skip


# -- a fine-tuned pair -------------------------------------------------------------------------
class Small(nn.Module):
    """Four layers, batch norm, a tied pair, a head."""

    def __init__(self, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.bn1 = nn.BatchNorm2d(4)
        for number in range(1, 5):
            setattr(self, f"layer{number}", nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)))
        self.emb = nn.Embedding(5, 6)
        self.out = nn.Linear(6, 5, bias=False)
        self.out.weight = self.emb.weight
        self.fc = nn.Linear(6, classes)


def tuned_pair():
    """(base, tuned) state_dicts: all frozen but layer4, which drifted; one NaN in layer3.0.bias;
    fc replaced by another head; one key more; conv1.weight stays as it is.
    """
    torch.manual_seed(5)
    base, tuned = OrderedDict(Small(10).state_dict()), OrderedDict(Small(3).state_dict())
    for key, tensor in base.items():
        if not key.startswith("fc."):
            tuned[key] = tensor.clone()
    tuned["out.weight"] = tuned["emb.weight"]
    for key in tuned:
        if key.startswith("layer4."):
            tuned[key] += 1e-3 * torch.randn(tuned[key].shape)
    tuned["layer3.0.bias"][2] = float("nan")
    tuned["extra.scale"] = torch.ones(2)
    return base, tuned


def training(sd, epoch, lr):
    """A training file around a state_dict."""
    return {
        "epoch": epoch,
        "args": argparse.Namespace(arch="small", lr=lr),
        "state_dict": sd,
    }


def strided(sd):
    """The same numbers in other storages: transposed, and inside a larger one; ties stay."""
    found, known = OrderedDict(), {}
    for key, tensor in sd.items():
        place = tensor.data_ptr(), tensor.shape
        if place in known:
            found[key] = known[place]
        elif tensor.dim() == 2:
            found[key] = tensor.t().contiguous().t()
        else:
            room = torch.zeros(tensor.numel() + 7, dtype=tensor.dtype)
            room[3 : 3 + tensor.numel()] = tensor.flatten()
            found[key] = room[3 : 3 + tensor.numel()].view(tensor.shape)
        if tensor.numel():
            known[place] = found[key]
    return found


def prefixed(sd, prefix):
    return OrderedDict((prefix + key, tensor) for key, tensor in sd.items())


def cast(sd, dtype):
    """Floats of another type; what was tied stays tied."""
    known = {}
    found = OrderedDict()
    for key, tensor in sd.items():
        if not tensor.is_floating_point():
            found[key] = tensor
            continue
        place = tensor.data_ptr()
        found[key] = known.setdefault(place, tensor.to(dtype))
    return found


def write_zip(path, obj, tag="cpu"):
    save(obj, path.with_suffix(".pth"), tag)
    return path.with_suffix(".pth")


def write_legacy(path, obj, tag="cpu"):
    save(obj, path.with_suffix(".legacy.pth"), tag, **LEGACY)
    return path.with_suffix(".legacy.pth")


def write_safetensors(path, obj, tag="cpu"):
    """By our own converter, so that ties are noted; values are left behind."""
    source = write_zip(path.with_name(f"{path.name}_source"), obj)
    target = path.with_suffix(".safetensors")
    ckptool.convert(source, target, fsync=False, force=True)
    return target


def write_package(path, obj, tag="cpu"):
    """By the safetensors package, which knows neither ties nor strides."""
    sd = obj.get("state_dict", obj)
    target = path.with_suffix(".package.safetensors")
    save_file({key: tensor.clone().contiguous() for key, tensor in sd.items()}, target)
    return target


def write_shards(path, obj, tag="cpu"):
    source = write_zip(path.with_name(f"{path.name}_source"), obj)
    target = path.with_name(f"{path.name}_shards")
    ckptool.convert(source, target, to="shards", max_shard_size=300, fsync=False, force=True)
    return target


WRITERS = {
    "zip": write_zip, "legacy": write_legacy, "safetensors": write_safetensors,
    "shards": write_shards,
}  # fmt: skip
diff = partial(ckptool.diff)
