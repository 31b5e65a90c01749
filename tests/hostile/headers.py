"""Headers of .safetensors and indexes of shards that lie or lead elsewhere."""

from __future__ import annotations

import json

from hostile.blocks import BAD, ROW_B, ROW_W, ROWS, SIX, TWO, net, safe
from hostile.cases import (
    CODE,
    ESCAPE,
    HEADER,
    INVALID,
    OTHER_FILE,
    SAME,
    SHORT,
    SPECIAL,
    Case,
    Special,
    refused,
)  # fmt: skip

LONG = refused("limit-header-bytes")
INDEX = "model.safetensors.index.json"
W_TEXT, B_TEXT = json.dumps(ROW_W), json.dumps(ROW_B)
BOTH = f'"w":{W_TEXT},"b":{B_TEXT}'


def row(**changes) -> bytes:
    """A header with `w` alone, part of it changed."""
    return safe({"w": ROW_W | changes}, SIX)


def raw(text: str, data: bytes = SIX + TWO) -> bytes:
    return safe(text.encode(), data)


def spelled(shape: str = "[2,3]", offsets: str = "[0,24]") -> bytes:
    return raw(f'{{"w":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}', SIX)


HEADERS = (
    ("length-far", "a header longer than the file", SHORT, lambda: safe(length=100_000)),
    ("length-2-63", "a header of 2**63 + 1 bytes", LONG, lambda: safe(length=2**63 + 1)),
    ("length-101mb", "a header of 101 MB in a small file", LONG, lambda: safe(length=101_000_000)),
    ("length-0", "a header of 0 bytes", OTHER_FILE, lambda: safe(b"")),
    ("seven", "seven bytes", OTHER_FILE, lambda: b"\x10" + b"\0" * 6),
    ("no-json", "a header that is no JSON", HEADER, lambda: raw('{"w": nope}')),
    ("no-utf8", "a header that is no UTF-8", HEADER, lambda: safe(b'{"\xff\xfe":1}')),
    ("list", "a header that is a list", OTHER_FILE, lambda: raw("[1,2,3]", b"")),
    ("twice", "one tensor twice, with another type: the last wins elsewhere", HEADER,
     lambda: raw(f'{{"w":{W_TEXT},"w":{W_TEXT.replace("F32", "I32")},"b":{B_TEXT}}}')),
    ("field-twice", "one field twice", HEADER,
     lambda: raw('{"w":{"dtype":"I32",' + W_TEXT[1:] + f',"b":{B_TEXT}}}')),
    ("metadata-twice", "__metadata__ twice", HEADER,
     lambda: raw(f'{{"__metadata__":{{"a":"1"}},"__metadata__":{{"a":"2"}},{BOTH}}}')),
    ("metadata-nested", "__metadata__ with an object inside", HEADER,
     lambda: safe({"__metadata__": {"a": {"b": 1}}, **ROWS})),
    ("overlap", "two tensors share bytes", HEADER,
     lambda: safe({"w": ROW_W, "b": ROW_B | {"data_offsets": [16, 24]}}, SIX)),
    ("hole", "eight bytes between tensors that belong to none", HEADER,
     lambda: safe({"w": ROW_W, "b": ROW_B | {"data_offsets": [32, 40]}}, SIX + bytes(8) + TWO)),
    ("tail", "a malicious zip behind the last tensor", HEADER, lambda: safe(None, SIX + TWO + net(BAD))),
    ("cut", "the end of the data is missing", SHORT, lambda: safe(None, (SIX + TWO)[:-4])),
    ("offset-negative", "offsets [-8, 16]", HEADER, lambda: row(data_offsets=[-8, 16])),
    ("end-first", "offsets [24, 0]", HEADER, lambda: row(data_offsets=[24, 0])),
    ("overflow", "a shape whose product overflows", HEADER,
     lambda: safe({"w": {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]}}, b"")),
    ("overflow-empty", "no elements, and strides that 64 bits cannot hold", HEADER,
     lambda: safe({"z": {"dtype": "F32", "shape": [0, 2**63 - 1, 2**63 - 1], "data_offsets": [0, 0]}, **ROWS})),
    ("shape-negative", "a shape of [-2, -3]", HEADER, lambda: row(shape=[-2, -3])),
    ("dtype", "a type called EVIL", HEADER, lambda: row(dtype="EVIL")),
    ("sizes", "shape and offsets disagree", HEADER, lambda: row(shape=[7])),
    ("bom", "a byte order mark before the header", INVALID,
     lambda: safe(b"\xef\xbb\xbf" + f"{{{BOTH}}}".encode())),
    ("nul", "a header padded with NUL", HEADER, lambda: safe(f"{{{BOTH}}}".encode() + bytes(16))),
    ("spaces-first", "a header that begins with spaces", INVALID,
     lambda: raw(f"   {{{BOTH}}}")),
    ("deep", "100,000 lists inside each other", HEADER,
     lambda: raw('{"w":' + "[" * 100_000 + "]" * 100_000 + "}", b"")),
    ("digits", "an offset of 100,000 digits", HEADER, lambda: spelled(offsets=f"[0,1{'0' * 100_000}]")),
    ("float", "offsets and sizes that are 24.0", HEADER, lambda: spelled("[6.0]", "[0.0,2.4e1]")),
    ("bool", "a shape with true in it", HEADER, lambda: spelled("[true,6]")),
    ("text", "offsets that are text", HEADER, lambda: spelled(offsets='["0","24"]')),
    ("nan", "a shape with NaN in it", HEADER, lambda: spelled("[NaN,3]")),
    ("field", "a field that no version knows", SAME,
     lambda: safe({"w": ROW_W | {"evil": 1}, "b": ROW_B})),
)  # fmt: skip

SHARD = safe({"w": ROW_W}, SIX)


def index(weight_map: object, text: str | None = None, **files):
    """A folder with one honest shard, what else it holds, and an index."""
    text = (
        json.dumps({"metadata": {"total_size": 24}, "weight_map": weight_map})
        if text is None
        else text
    )
    return lambda: {"s1.safetensors": SHARD, **files.get("files", {}), INDEX: text.encode()}


SHARDS = (
    ("dots", "a shard at ../../../etc/passwd", ESCAPE, index({"w": "../../../../../../etc/passwd"})),
    ("absolute", "a shard at /etc/passwd", ESCAPE, index({"w": "/etc/passwd"})),
    ("link", "a shard that is a link to /etc/passwd", ESCAPE,
     index({"w": "link.safetensors"}, files={"link.safetensors": Special("link", "/etc/passwd")})),
    ("backslash", "a shard at ..\\..\\x", ESCAPE, index({"w": "..\\..\\x.safetensors"})),
    ("escape-codes", "a shard whose name is escape codes", SPECIAL,
     index({"w": "\x1b[2Jx.safetensors"})),
    ("nul", "a shard whose name has NUL in it", ESCAPE, index({"w": "s1\0.safetensors"})),
    ("missing", "a shard that is not there", SPECIAL,
     index({"w": "s1.safetensors", "b": "s2.safetensors"})),
    ("key-missing", "a key that its shard has not", HEADER,
     index({"w": "s1.safetensors", "b": "s1.safetensors"})),
    ("key-extra", "a shard with a key that the index does not name", HEADER,
     index({"w": "s1.safetensors"}, files={"s1.safetensors": safe()})),
    ("list", "a shard name that is a list", HEADER, index({"w": ["s1.safetensors"]})),
    ("itself", "the index as its own shard", HEADER, index({"w": INDEX})),
    ("pickle", "a shard that is a malicious .bin", CODE,
     index({"w": "evil.bin", "b": "evil.bin"}, files={"evil.bin": net(BAD)})),
    ("fifo", "a shard that is a FIFO", SPECIAL,
     index({"w": "pipe.safetensors"}, files={"pipe.safetensors": Special("fifo")})),
    ("deep", "100,000 lists inside each other", HEADER,
     index(None, '{"weight_map":' + "[" * 100_000 + "]" * 100_000 + "}")),
    ("twice", "one key in two shards", HEADER,
     index(None, '{"weight_map":{"w":"s1.safetensors","w":"s2.safetensors"}}',
           files={"s2.safetensors": safe({"w": ROW_W}, bytes(24))})),
)  # fmt: skip

CASES = (
    *(Case(f"header-{name}", tries, want, make, file="net.safetensors")
      for name, tries, want, make in HEADERS),
    *(Case(f"index-{name}", tries, want, make, file=INDEX) for name, tries, want, make in SHARDS),
)  # fmt: skip
