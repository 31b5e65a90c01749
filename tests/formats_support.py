"""What the tests of reading share: files made in memory, pickles made by hand, numbers gathered."""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from ckptool.errors import CkptError
from ckptool.formats import read
from ckptool.places import BytesSource, open_source

FIXTURES = Path(__file__).parent / "fixtures"
MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."


def truths():
    return {p.name[:-5]: json.loads(p.read_text("utf-8")) for p in sorted(FIXTURES.glob("*.json"))}


def read_bytes(data, name="file.pth", **options):
    return read(BytesSource(data, name), **options)


def read_path(path, **options):
    with open_source(path) as source:
        return read(source, **options)


def tried(data, name):
    """The CkptError that reading raises, or None; any other exception is a failure."""
    try:
        read_bytes(data, name)
    except CkptError as error:
        return error
    return None


def refusal(data, filename="file.pth", **options):
    with pytest.raises(CkptError) as caught:
        read_bytes(data, filename, **options)
    error = caught.value
    assert error.exit_status == 2
    assert error.path == filename
    assert "\n" not in str(error)
    assert error.text
    return error


def saved(value, **options):
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def saved_legacy(value, **options):
    return saved(value, _use_new_zipfile_serialization=False, **options)


# -- pickles made by hand ----------------------------------------------------------------------
def text(value):
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def number(value):
    if type(value) is int and 0 <= value < 256:
        return b"K" + bytes([value])
    size = value.bit_length() // 8 + 1
    head = b"\x8a" + bytes([size]) if size < 256 else b"\x8b" + struct.pack("<i", size)
    return head + value.to_bytes(size, "little", signed=True)


def name(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


def tup(*items):
    return b"(" + b"".join(map(op, items)) + b"t"


def call(function, *args):
    """REDUCE; `function` is 'module.name' or opcodes."""
    if isinstance(function, str):
        function = name(*function.rsplit(".", 1))
    return function + tup(*args) + b"R"


def dictionary(*rows):
    return b"}(" + b"".join(op(k) + op(v) for k, v in rows) + b"u"


def op(value):
    """Opcodes of a literal; bytes are opcodes already."""
    if isinstance(value, bytes):
        return value
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, int):
        return number(value)
    if isinstance(value, str):
        return text(value)
    if isinstance(value, tuple):
        return tup(*value)
    if isinstance(value, list):
        return b"](" + b"".join(map(op, value)) + b"e"
    raise TypeError(value)


def pickled(*parts, protocol=2):
    return b"\x80" + bytes([protocol]) + b"".join(map(op, parts)) + b"."


FLOAT = b"ctorch\nFloatStorage\n"
HOOKS = b"ccollections\nOrderedDict\n)R"


def storage(key="0", count=6, kind=FLOAT, location="cpu", *more):
    return tup("storage", kind, key, location, count, *more) + b"Q"


def tensor(stored=None, offset=0, size=(2, 3), stride=(3, 1), grad=False, hooks=HOOKS, *more):
    stored = storage() if stored is None else stored
    return call("torch._utils._rebuild_tensor_v2", stored, offset, size, stride, grad, hooks, *more)


# -- containers made by hand -------------------------------------------------------------------
SIX = struct.pack("<6f", *range(6))


def archive(pickle_data, records=None, top="archive", version=b"3\n", **more):
    """A zip as torch reads it: data.pkl, data/N, version, others by name (None leaves out)."""
    members = {"data.pkl": pickle_data}
    members |= {f"data/{k}": v for k, v in ({"0": SIX} if records is None else records).items()}
    members |= {"version": version, **more}
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as out:
        for member, data in members.items():
            if data is not None:
                out.writestr(f"{top}/{member}", data)
    return stream.getvalue()


def legacy(main, keys=("0",), data=None, magic=MAGIC, version=b"\x80\x02M\xe9\x03.", system=None):
    system = pickled(b"}") if system is None else system
    if data is None:
        data = struct.pack("<q", 6) + SIX
    key_list = pickled(list(keys)) if not isinstance(keys, bytes) else keys
    return magic + version + system + main + key_list + data


def tar(members, links=()):
    import tarfile

    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as out:
        for member, data in members.items():
            info = tarfile.TarInfo(member)
            if member in links:
                info.type, info.linkname, data = tarfile.SYMTYPE, data.decode(), b""
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def safetensors(header, data=b"", pad=True):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8 if pad else 0)
    return struct.pack("<Q", len(raw)) + raw + data


# -- what the bytes say ------------------------------------------------------------------------
def storage_bytes(stored, data):
    """The little-endian bytes of a Storage out of its file's `data`."""
    out = b""
    for piece in stored.pieces:
        raw = data[piece.span.offset : piece.span.end]
        if piece.encoding.startswith("deflated"):
            raw = zlib.decompress(raw, -15)
        if piece.encoding.startswith("latin1"):
            raw = raw.decode("utf-8").encode("latin-1")
        if piece.encoding.endswith("swapped"):
            width = stored.dtype.size_bytes // stored.dtype.components
            raw = np.frombuffer(raw, f"V{width}").view("u1").reshape(-1, width)[:, ::-1].tobytes()
        out += raw
    assert len(out) == stored.size_bytes
    return out


def tensor_bytes(one, data):
    """The elements of a Tensor, contiguous and little-endian."""
    raw = storage_bytes(one.storage, data)
    width = one.dtype.size_bytes
    if not one.count:
        return b""
    grid = np.frombuffer(raw, np.uint8)
    view = np.lib.stride_tricks.as_strided(
        grid[one.offset * width :],
        (*one.shape, width),
        (*(min(s, len(grid)) * width for s in one.stride), 1),
    )
    return np.ascontiguousarray(view).tobytes()


def weights(checkpoint):
    return checkpoint.tables[checkpoint.weights]


def verdicts(checkpoint):
    return {row.name: row.verdict for row in checkpoint.globals}
