"""The targets: a name, what is done with the bytes, how they are mutated, where they start."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fuzz import otherwise, picklewise, zipwise
from fuzz.asked import chosen

from ckptool.errors import CkptError
from ckptool.pickles.nodes import items_of
from ckptool.pickles.walk import walk

FIXTURES = Path(__file__).parent.parent / "fixtures"
_BIGGEST = 20_000
_WIDTHS = {"Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2,
           "ComplexFloat": 8, "ComplexDouble": 16, "QInt32": 4}  # fmt: skip


class Target(NamedTuple):
    """`ask(desk, data)` puts the bytes where they belong and asks; `seeds` are valid inputs."""

    ask: Callable
    mutate: Callable
    seeds: Callable


# -- the pickle of a zip ---------------------------------------------------------------------------
def records_for(data):
    """Storages of the sizes that the pickle gives, so that a change of a size is followed too."""
    try:
        persistent = walk(data).persistent
    except CkptError:
        return {}
    found = {}
    for node in persistent[:64]:
        items = items_of(node.pid) or ()
        if len(items) < 5 or type(items[2]) is not str or type(items[4]) is not int:
            continue
        width = _WIDTHS.get(getattr(items[1], "name", "").removesuffix("Storage"), 1)
        if 0 <= items[4] * width <= 4096 and len(items[2]) < 99:
            found[items[2]] = bytes(i & 63 for i in range(items[4] * width))
    return found


def zipped(data, records=None):
    """A zip around a pickle, as torch reads it; Rule Z kept."""
    records = records_for(data) if records is None else records
    members = {"data.pkl": data, **{f"data/{k}": v for k, v in records.items()}, "version": b"3\n"}
    return zipwise.built([zipwise.Entry(f"net/{name}", body) for name, body in members.items()])


def _pickle(desk, data):
    desk.ask(desk.put("net.pth", zipped(data)), chosen(data))
    if chosen(data[1:]):
        desk.ask(desk.put("net.pkl", data))


def _pickles():
    found = [path.read_bytes() for path in FIXTURES.glob("*.pkl")]
    for path in sorted(FIXTURES.glob("*.pth")):
        with suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as z:
            found += [z.read(name) for name in z.namelist() if name.endswith("/data.pkl")]
    return found


# -- whole files -----------------------------------------------------------------------------------
def _file(name):
    def ask(desk, data):
        desk.ask(desk.put(name, data), chosen(data))

    return ask


def _fixtures(*patterns):
    def seeds():
        paths = sorted(path for pattern in patterns for path in FIXTURES.glob(pattern))
        return [path.read_bytes() for path in paths if path.stat().st_size < _BIGGEST]

    return seeds


def _zips():
    return [data for data in _fixtures("*.pth", "*.pt", "*.pt2")() if data[:4] == b"PK\3\4"]


def _safetensors():
    """The fixture, and headers with what it has not: every width, views of no bytes, metadata."""
    wide = '"a":{"dtype":"F64","shape":[],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[2,1,3],"data_offsets":[8,20]}'
    small = '"c":{"dtype":"U8","shape":[1],"data_offsets":[20,21]},"d":{"dtype":"F32","shape":[0,4],"data_offsets":[21,21]}'
    said = '"__metadata__":{"format":"pt","e":"a"}'
    rows = [(f"{{{said},{wide},{small}}}", 21), (f"{{{wide}}}", 20), ("{}", 0), (f"{{{said}}}", 0)]
    return [*_fixtures("*.safetensors")(), *(_framed(text.encode(), size) for text, size in rows)]


def _framed(header, size):
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + bytes(size)


# -- an index and its shards -----------------------------------------------------------------------
_ONE, _TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
_INDEX = "model.safetensors.index.json"


def _shard(keys):
    header = ",".join(f'"{key}":{{"dtype":"F32","shape":[2],"data_offsets":[{8 * i},{8 * i + 8}]}}'
                      for i, key in enumerate(keys)).encode()  # fmt: skip
    return _framed(b"{" + header + b"}", 8 * len(keys))


def _index(desk, data):
    """By its name, and as the one index of a folder."""
    folder = desk.path / "shards"
    if not folder.exists():
        folder.mkdir()
        desk.put(f"shards/{_ONE}", _shard(["a", "b"]))
        desk.put(f"shards/{_TWO}", _shard(["c"]))
        desk.put("shards/net.bin", (FIXTURES / "net_plain.pth").read_bytes())
    path = desk.put(f"shards/{_INDEX}", data)
    desk.ask(str(folder) if chosen(data[1:]) else path, chosen(data))


def _indexes():
    keys = f'"a":"{_ONE}","b":"{_ONE}"'
    return [
        f'{{"metadata":{{"total_size":24}},"weight_map":{{{keys},"c":"{_TWO}"}}}}'.encode(),
        f'{{"weight_map":{{{keys}}}}}'.encode(),
        b'{"metadata":{},"weight_map":{"fc.weight":"net.bin","fc.bias":"net.bin"},"more":[1]}',
    ]


TARGETS = {
    "pickle": Target(_pickle, picklewise.mutate, _pickles),
    "zip": Target(_file("net.pth"), zipwise.mutate, _zips),
    "legacy": Target(_file("net.pt"), otherwise.mutate_stream, _fixtures("legacy*.pth")),
    "tar": Target(_file("net.tar"), otherwise.mutate_tar, _fixtures("tar*.pth")),
    "safetensors": Target(_file("net.safetensors"), otherwise.mutate_header, _safetensors),
    "index": Target(_index, otherwise.mutate_index, _indexes),
}
