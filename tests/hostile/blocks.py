"""What the cases are built from: a small honest checkpoint in each container, a payload.

`formats_support` makes the opcodes; here is what is put together from them. A payload is harmless:
what runs it creates the empty file that the variable MARKER names.
"""

from __future__ import annotations

import json
import struct

from formats_support import (
    FLOAT,
    HOOKS,
    MAGIC,
    SIX,
    call,
    dictionary,
    name,
    op,
    storage,
    tensor,
    tup,
)
from hostile.zipbytes import Entry, zipped

COMMAND = 'touch "$MARKER"'
SOURCE = "import os;open(os.environ['MARKER'],'w').close()"
TWO = struct.pack("<2f", 7.0, 8.0)
STORED = {"0": SIX, "1": TWO}
STOP, POP, MARK, BUILD = b".", b"0", b"(", b"b"
STACK_GLOBAL, MEMOIZE, NEWOBJ = b"\x93", b"\x94", b")\x81"

W = tensor()
B = tensor(storage("1", 2), 0, (2,), (1,))
SHOWN = {"w": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "b": [7.0, 8.0]}


def ordered(*rows: tuple[object, object]) -> bytes:
    """An OrderedDict."""
    return HOOKS + b"(" + b"".join(op(k) + op(v) for k, v in rows) + b"u"


PLAIN = ordered(("w", W), ("b", B))


def stream(body: object = PLAIN, protocol: int = 2) -> bytes:
    return b"\x80" + bytes([protocol]) + op(body) + STOP


def looked_up(module: str, attribute: str) -> bytes:
    """A name by STACK_GLOBAL, dots allowed."""
    return op(module) + op(attribute) + STACK_GLOBAL


def before(gadget: bytes, protocol: int = 2) -> bytes:
    """The gadget runs, what it gives is dropped, then an honest state_dict loads."""
    return stream(gadget + POP + PLAIN, protocol)


BAD = before(call("os.system", COMMAND))


def entries(
    pickle: bytes | Entry | None = None,
    storages: dict[str, bytes | Entry] | None = None,
    *,
    root: str = "archive",
    byteorder: bytes = b"little",
    version: bytes = b"3\n",
    first: tuple[Entry, ...] = (),
    last: tuple[Entry, ...] = (),
    markers: bool = True,
) -> list[Entry]:
    """The entries of a zip as torch writes them; `first` and `last` are put around them."""
    pickle = stream() if pickle is None else pickle
    made = [pickle if isinstance(pickle, Entry) else Entry(f"{root}/data.pkl", pickle)]
    if markers:
        made += [Entry(f"{root}/.format_version", b"1"), Entry(f"{root}/.storage_alignment", b"64")]
    made.append(Entry(f"{root}/byteorder", byteorder))
    for key, data in (STORED if storages is None else storages).items():
        made.append(data if isinstance(data, Entry) else Entry(f"{root}/data/{key}", data))
    made.append(Entry(f"{root}/version", version))
    made.append(Entry(f"{root}/.data/serialization_id", b"0636067015612062" + b"0" * 24))
    return [*first, *made, *last]


def net(pickle: bytes | Entry | None = None, storages: object = None, **more: object) -> bytes:
    """A checkpoint in torch's zip."""
    return zipped(entries(pickle, storages, **more))  # type: ignore[arg-type]


def stored(
    key: str = "0", count: object = 6, kind: object = FLOAT, location: object = "cpu"
) -> bytes:
    """A persistent id whose parts may be anything."""
    return tup("storage", kind, key, location, count) + b"Q"


def old_storage(key: str = "0", count: int = 6, view: object = None) -> bytes:
    return tup("storage", FLOAT, key, "cpu", count, view) + b"Q"


OLD_PLAIN = ordered(("w", tensor(old_storage())), ("b", tensor(old_storage("1", 2), 0, (2,), (1,))))
OLD_DATA = struct.pack("<q", 6) + SIX + struct.pack("<q", 2) + TWO


def old(
    body: bytes = OLD_PLAIN,
    keys: object = None,
    data: bytes = OLD_DATA,
    *,
    magic: bytes = MAGIC,
    version: object = 1001,
    system: object = b"}",
    tail: bytes = b"",
) -> bytes:
    """A stream as torch wrote it before 1.6: five pickles, then the storages."""
    keys = ["0", "1"] if keys is None else keys
    return magic + b"".join(map(stream, (version, system, body, keys))) + data + tail


ROW_W = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
ROW_B = {"dtype": "F32", "shape": [2], "data_offsets": [24, 32]}
ROWS = {"w": ROW_W, "b": ROW_B}


def safe(header: object = None, data: bytes = SIX + TWO, length: int | None = None) -> bytes:
    """A .safetensors; the header may be bytes, the length a lie."""
    header = ROWS if header is None else header
    raw = header
    if not isinstance(raw, bytes):
        raw = json.dumps(header, ensure_ascii=False).encode()
        raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def one(tensor_ops: bytes) -> bytes:
    """A stream of a state_dict with a single `w`."""
    return stream(ordered(("w", tensor_ops)))


__all__ = [
    "BAD",
    "BUILD",
    "COMMAND",
    "FLOAT",
    "HOOKS",
    "MAGIC",
    "MARK",
    "MEMOIZE",
    "NEWOBJ",
    "OLD_DATA",
    "OLD_PLAIN",
    "PLAIN",
    "POP",
    "ROWS",
    "ROW_B",
    "ROW_W",
    "SHOWN",
    "SIX",
    "SOURCE",
    "STACK_GLOBAL",
    "STOP",
    "STORED",
    "TWO",
    "B",
    "W",
    "before",
    "call",
    "dictionary",
    "entries",
    "looked_up",
    "name",
    "net",
    "old",
    "old_storage",
    "one",
    "op",
    "ordered",
    "safe",
    "storage",
    "stored",
    "stream",
    "tensor",
    "tup",
]  # fmt: skip
