"""`python -m fuzz.against KIND START COUNT`: mutated files that torch's restricted loader takes,
read by ckptool in every way it has: it refuses, or agrees on every key, type, shape and byte.

From 0 on, the files that are mutated come first, as they are, with numbers below 0.
One line of JSON a step on stdout; the phase is said before it begins, so that whoever reads knows
whose crash it was (torch can be crashed by a pickle). File n of a kind is always the same.
"""

from __future__ import annotations

import faulthandler
import io
import json
import random
import resource
import signal
import sys
import tempfile
import traceback
import warnings
import zlib
from collections import OrderedDict
from pathlib import Path

import torch
from formats_support import read_bytes, tensor_bytes
from fuzz import otherwise, picklewise, zipwise
from fuzz.asked import _HOME, Finding
from fuzz.described import TooLarge, described, elements_of, tensors_in
from fuzz.targets import FIXTURES, records_for, zipped

import ckptool
from ckptool.checkpoint import Changes
from ckptool.errors import CkptError
from ckptool.formats.rows import chosen_table

_SECONDS = 20
_BROKEN = ("truncated.pth", "twice.pth")
_MEMORY = 6 << 30
_WIDE = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
         "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "C64": "complex64"}  # fmt: skip


# -- files to start from ---------------------------------------------------------------------------
def objects():
    """What people save, small."""
    torch.manual_seed(3)
    base = torch.arange(12.0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    adam = torch.optim.Adam(net.parameters())
    net(torch.ones(4, 2)).sum().backward()
    adam.step()
    views = {
        "all": base,
        "part": base[2:8].view(2, 3),
        "turned": base.view(3, 4).t(),
        "none": base[:0],
    }
    kinds = (
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
        torch.complex64,
    )
    typed = {str(kind): torch.arange(6).to(kind) for kind in kinds}
    tied = OrderedDict(a=torch.ones(3), b=torch.zeros(2, 2))
    tied["c"] = tied["a"]
    return [
        net.state_dict(), views, typed, tied, {"model": net.state_dict(), "opt": adam.state_dict(), "n": 3},
        {"w": torch.nn.Parameter(torch.ones(2)), "l": [torch.zeros(3), (torch.ones(1), "x")], 1: base[:2]},
        [torch.arange(4), {"a": torch.ones(2)}], {"s": {1, 2}, "f": 0.5, "big": 1 << 70, "w": torch.ones(2)},
        {"q": torch.quantize_per_tensor(torch.ones(4), 0.1, 2, torch.qint8), "sparse": torch.eye(3).to_sparse()},
    ]  # fmt: skip


def _saved(zip_file):
    found = []
    for number, value in enumerate(objects()):
        for protocol in (2, 4) if number < 4 else (2,):
            stream = io.BytesIO()
            torch.save(
                value, stream, pickle_protocol=protocol, _use_new_zipfile_serialization=zip_file
            )
            found.append(stream.getvalue())
    return found


def _small(pattern, head):
    paths = [path for path in sorted(FIXTURES.glob(pattern)) if path.name not in _BROKEN]
    found = [path.read_bytes() for path in paths]
    return [data for data in found if data.startswith(head) and len(data) < 10_000]


def zip_seeds():
    return _saved(True) + _small("*.pth", b"PK\3\4")


def legacy_seeds():
    return _saved(False) + _small("legacy*.pth", b"")


# -- mutation --------------------------------------------------------------------------------------
def mutated_zip(data, dice):
    """By records; or the pickle alone, in a zip whose storages have the sizes it now gives."""
    if dice.random() < 0.4:
        return zipwise.rebuilt(data, dice)
    entries = zipwise.entries_of(data)
    if not any(e.name.endswith("/data.pkl") for e in entries):
        return zipwise.rebuilt(data, dice)
    pickle = next(e.data for e in entries if e.name.endswith("/data.pkl"))
    pickle = picklewise.mutate(pickle, dice)
    if dice.random() < 0.5:
        return zipped(pickle)
    records = {e.name.partition("/data/")[2]: e.data for e in entries if "/data/" in e.name}
    return zipped(pickle, records)


def mutated_legacy(data, dice):
    """By pickles; or the main one alone, the keys and storages behind it made to fit."""
    pickles, _ = otherwise.pickles_of(data)
    if len(pickles) < 5 or dice.random() < 0.3:
        return otherwise.mutate_stream(data, dice)
    pickles[3] = picklewise.mutate(pickles[3], dice)
    records = records_for(pickles[3])
    keys = b"".join(map(picklewise.text, sorted(records)))
    tail = b"".join(_counted(data, pickles[3], key) for key, data in sorted(records.items()))
    return b"".join(pickles[:4]) + b"\x80\x02](" + keys + b"e." + tail


def _counted(data, pickle, key):
    """A storage behind its count of elements."""
    from ckptool.pickles.nodes import items_of
    from ckptool.pickles.walk import walk

    pids = (items_of(node.pid) or () for node in walk(pickle).persistent)
    counts = (items[4] for items in pids if len(items) > 4 and items[2] == key)
    count = next(count for count in counts if type(count) is int)
    return (count & (1 << 64) - 1).to_bytes(8, "little") + data


KINDS = {"zip": (zip_seeds, mutated_zip), "legacy": (legacy_seeds, mutated_legacy)}


class Opaque(Exception):
    """We know the class of an object less well than torch, and say so by a Record."""


# -- comparing -------------------------------------------------------------------------------------
class Differs(Finding):
    """We and torch read different things."""


def theirs(data):
    """What torch's restricted loader says of the bytes; None where it refuses."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:  # whatever it raises
        return None


def compare(data, wanted, folder):
    """Every way of ours against what torch loaded. Returns what became of each way."""
    path = folder / "net.pth"
    path.write_bytes(data)
    return {
        "inspect": _guarded(lambda: _inspected(data, wanted)),
        "load": _guarded(lambda: _same(ckptool.load(path), wanted, "ckptool.load")),
        "pth": _guarded(lambda: _rewritten(path, wanted, "zip")),
        "legacy": _guarded(lambda: _rewritten(path, wanted, "legacy")),
        "safetensors": _guarded(lambda: _exported(data, path, wanted)),
    }


def _guarded(way):
    try:
        way()
    except CkptError as error:
        return f"{error.slug}: {error.text}"[:150]
    except Opaque:
        return "left as a Record"
    return "agrees"


def _same(ours, wanted, what):
    one, two = described(ours), described(wanted)
    if one != two:
        rows = [f"ours {a} | torch {b}" for a, b in zip(one, two, strict=False) if a != b]
        if any("<Record>" in line for line in one):
            raise Opaque(what)
        raise Differs(f"{what}: {len(one)} lines, torch {len(two)}; {rows[:2]}")


def _inspected(data, wanted):
    """Tensors that stand in dicts and lists, by path; a key set twice counts as set last."""
    checkpoint = read_bytes(data, "net.pth")
    found = {one.path: one for one in checkpoint.tensors}
    for path, tensor in tensors_in(wanted):
        one = found.get(path)
        if one is None and _told(checkpoint):
            continue
        if one is None:
            raise Differs(f"inspect has no {path}")
        shape = (one.dtype.name, one.shape) if one.dtype else None
        if shape != (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)):
            raise Differs(f"inspect {path}: {shape}, torch {tensor.dtype} {tuple(tensor.shape)}")
        plain = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized)
        read = plain and one.kind in ("tensor", "parameter")
        if read and _our_bytes(one, data) not in (None, elements_of(tensor)):
            raise Differs(f"inspect {path}: other bytes")


def _told(checkpoint):
    """Whether it is said that a call could run code: what such a call makes is not shown. torch
    calls torch.Tensor([1, 2]), we do not.
    """
    return any(row.verdict == "code" for row in checkpoint.globals)


def _our_bytes(one, data):
    """What the spans of a tensor hold; None where that is no deflated data: `inspect` inflates
    nothing, those that do are asked too.
    """
    try:
        return tensor_bytes(one, data)
    except zlib.error:
        return None


def _rewritten(path, wanted, target):
    """In the other container, and on the CPU: which torch makes of it anyway here."""
    output = path.with_name("out.pth")
    ckptool.convert(path, output, to=target, to_cpu=True, keep_module=True, force=True, fsync=False)
    again = theirs(output.read_bytes())
    if again is None and wanted is not None:
        raise Differs(f"torch refuses our {target}")
    _same(again, wanted, f"our {target}")


def _exported(data, path, wanted):
    output = path.with_name("out.safetensors")
    ckptool.convert(path, output, to="safetensors", force=True, fsync=False)
    raw = output.read_bytes()
    checkpoint = read_bytes(data, "net.pth")
    table = chosen_table(checkpoint, Changes())
    paths = {one.key: one.path for one in table.tensors}
    there = dict(tensors_in(wanted))
    written = set()
    size = int.from_bytes(raw[:8], "little")
    for key, row in json.loads(raw[8 : 8 + size]).items():
        if key == "__metadata__":
            continue
        tensor, (start, end) = there.get(paths[key]), row["data_offsets"]
        written.add(paths[key])
        if tensor is None and table.kind == "tensors":
            continue  # an attribute of an object, under the name of its place
        if tensor is None:
            raise Differs(f".safetensors has {key!r}, torch does not")
        kind = (_WIDE.get(row["dtype"], row["dtype"]), tuple(row["shape"]))
        if kind != (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)):
            raise Differs(
                f".safetensors {key!r}: {kind}, torch {tensor.dtype} {tuple(tensor.shape)}"
            )
        if raw[8 + size + start : 8 + size + end] != elements_of(tensor):
            raise Differs(f".safetensors {key!r}: other bytes")
    written |= {
        paths[key] for key in json.loads(raw[8 : 8 + size]).get("__metadata__", {}) if key in paths
    }
    depth = len(table.path)
    right = {path for path in there if path[:depth] == table.path and len(path) == depth + 1}
    if right - written and not _told(checkpoint):
        raise Differs(f".safetensors lacks {right - written}")


# -- the loop --------------------------------------------------------------------------------------
def one_file(kind, number, seeds=None):
    """The bytes of file `number`."""
    dice = random.Random(f"{kind}-{number}")
    return KINDS[kind][1](dice.choice(seeds or KINDS[kind][0]()), dice)


def say(**row):
    print(json.dumps(row), flush=True)


def check(kind, number, data, folder):
    signal.alarm(_SECONDS)
    say(n=number, phase="torch")
    wanted = theirs(data)
    if wanted is None:
        say(n=number, result="torch refuses")
        return
    say(n=number, phase="ours")
    try:
        described(wanted)
        say(n=number, result=compare(data, wanted, folder))
    except TooLarge:
        say(n=number, result="too large to compare")
    except Exception:
        (Path(tempfile.gettempdir()) / f"against-{kind}-{number}.pth").write_bytes(data)
        say(n=number, problem=traceback.format_exc()[-1500:])


def main():
    kind, start, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    faulthandler.enable()
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seeds = KINDS[kind][0]()
    with tempfile.TemporaryDirectory(dir=_HOME, prefix="ckptool-fuzz-") as folder:
        for number, data in enumerate(seeds if start == 0 else ()):
            check(kind, -1 - number, data, Path(folder))
        for number in range(start, start + count):
            check(kind, number, one_file(kind, number, seeds), Path(folder))


if __name__ == "__main__":
    main()
