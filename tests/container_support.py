"""What the tests of containers share: files as old writers left them, and what must not change."""

from __future__ import annotations

import io
import json
import pickletools
import zipfile
from collections import OrderedDict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from fixtures.make_fixtures import element_bytes
from torch import nn
from verbs_support import LEGACY, assert_same, calculated_offsets, data_offset, load

import ckptool

convert = partial(ckptool.convert, fsync=False)


# -- comparing ---------------------------------------------------------------------------------
def ties(sd):
    """The groups of names that are one view of one storage."""
    groups = {}
    for key, tensor in sd.items():
        if tensor.numel():
            place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.stride())
            groups.setdefault((*place, tensor.shape, tensor.dtype), []).append(key)
    return [keys for keys in groups.values() if len(keys) > 1]


def same_weights(one, two, tied=True):
    """Two state_dicts: names in order, types, shapes, every byte, layer versions, ties; not
    strides. Returns the number of tensors.
    """
    assert list(one) == list(two)
    for key, left in one.items():
        right = two[key]
        assert (left.dtype, left.shape) == (right.dtype, right.shape), key
        assert element_bytes(left.detach()) == element_bytes(right.detach()), key
    assert getattr(one, "_metadata", None) == getattr(two, "_metadata", None)
    if tied:
        assert ties(one) == ties(two)
    return len(one)


def promise_kept(path, weights_only=True):
    """Every way of torch to read the zip agrees, and its layout is what `.format_version` says:
    records data/0 to data/n-1 in the order of first use, one after another, 64-aligned.
    """
    plain = load(path, map_location=None, weights_only=weights_only)
    with calculated_offsets():
        assert_same(plain, load(path, map_location=None, mmap=True))
        assert_same(plain, load(path, map_location="meta"), meta=True)
    assert_same(plain, load(path, map_location=None, mmap=True))
    with zipfile.ZipFile(path) as z:
        assert z.testzip() is None
        names = [info.filename.split("/", 1)[1] for info in z.infolist()]
    stored = [name for name in names if name.startswith("data/")]
    first = names.index(stored[0]) if stored else 0
    assert names[0] == "data.pkl"
    assert ".format_version" in names
    assert stored == [f"data/{i}" for i in range(len(stored))]
    assert names[first : first + len(stored)] == stored
    assert all(data_offset(path, name) % 64 == 0 for name in names)
    used = [storage.key for storage in ckptool.inspect(path).checkpoint.storages]
    assert used == [str(i) for i in range(len(stored))]
    return plain


# -- .safetensors ------------------------------------------------------------------------------
def header(path):
    """(the JSON header, where the data begins)."""
    with open(path, "rb") as f:
        size = int.from_bytes(f.read(8), "little")
        return json.loads(f.read(size)), 8 + size


def metadata(path):
    return header(path)[0]["__metadata__"]


def st_loaded(path):
    """What the safetensors package reads, in the order of the header."""
    from safetensors import safe_open

    with safe_open(path, "pt") as f:
        names = set(f.keys())
        return OrderedDict((k, f.get_tensor(k)) for k in header(path)[0] if k in names)


# -- zips by hand ------------------------------------------------------------------------------
def records_of(obj, **options):
    """{name without the top folder: bytes} as torch saves it."""
    stream = io.BytesIO()
    torch.save(obj, stream, **options)
    with zipfile.ZipFile(stream) as z:
        return {i.filename.split("/", 1)[1]: z.read(i) for i in z.infolist()}


def rezipped(path, records, method=zipfile.ZIP_STORED):
    """The records in a zip of Python's; without the promises about where they lie."""
    with zipfile.ZipFile(path, "w", method) as z:
        for name, data in records.items():
            if name not in (".format_version", ".storage_alignment"):
                z.writestr(f"net/{name}", data)
    return path


def big_endian(path, sd):
    """A state_dict of typed tensors with one storage each, as a big-endian machine saves it."""
    records = records_of(sd)
    for at, tensor in enumerate(sd.values()):
        width = tensor.element_size() // (2 if tensor.is_complex() else 1)
        swapped = np.frombuffer(records[f"data/{at}"], f"u{width}").byteswap().tobytes()
        records[f"data/{at}"] = swapped
    return rezipped(path, {**records, "byteorder": b"big"})


# -- legacy streams by hand --------------------------------------------------------------------
def legacy_parts(obj, **options):
    """([the five pickles], the storages) as torch saves a legacy stream."""
    stream = io.BytesIO()
    torch.save(obj, stream, **LEGACY, **options)
    stream.seek(0)
    pickles = []
    for _ in range(5):
        start = stream.tell()
        for _ in pickletools.genops(stream):
            pass
        end = stream.tell()
        stream.seek(start)
        pickles.append(stream.read(end - start))
    return pickles, stream.read()


def python2(data, odd=None):
    """A pickle with every unicode text as the byte string that Python 2 wrote; `odd` maps a
    text to other bytes.
    """
    rows = list(pickletools.genops(data))
    ends = [at for _, _, at in rows[1:]] + [len(data)]
    out = b""
    for (op, arg, start), end in zip(rows, ends, strict=True):
        raw = (odd or {}).get(arg, arg.encode()) if op.name == "BINUNICODE" else b""
        out += b"U" + bytes([len(raw)]) + raw if op.name == "BINUNICODE" else data[start:end]
    return out


def python2_legacy(path, obj, odd=None):
    """A legacy stream as Python 2 wrote it."""
    pickles, storages = legacy_parts(obj)
    pickles[3:] = [python2(pickles[3], odd), python2(pickles[4])]
    Path(path).write_bytes(b"".join(pickles) + storages)
    return path


# -- nets --------------------------------------------------------------------------------------
class Tied(nn.Module):
    """An embedding and a head with one weight."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.emb.weight
