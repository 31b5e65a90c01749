"""Small files that ask for much: memory, time, depth, lines on the screen."""

from __future__ import annotations

import struct
import zlib

from hostile.blocks import (
    HOOKS,
    MARK,
    PLAIN,
    POP,
    SIX,
    W,
    call,
    dictionary,
    name,
    net,
    one,
    op,
    ordered,
    safe,
    stored,
    stream,
    tensor,
    tup,
)  # fmt: skip
from hostile.cases import (
    DONE,
    INVALID,
    OTHER,
    SAME,
    TROUBLE,
    Case,
    Want,
    refused,
)  # fmt: skip
from hostile.zipbytes import Entry

DEEP = refused("limit-nesting")
BOMB = refused("limit-pickle-bytes")
UNCOMPARED = OTHER._replace(diff=TROUBLE)
STORAGE_BYTES = 1 << 30


def beside(value: bytes):
    """An honest `w` and `b`, and a value that costs."""
    return lambda: net(stream(ordered(("w", W), ("b", tensor(stored("1", 2), 0, (2,), (1,))),
                                      ("x", value))))  # fmt: skip


def sparse(slot: int):
    """A memo slot of a high number: C code allocates everything below it."""
    return lambda: net(b"\x80\x02" + op("x") + b"r" + struct.pack("<I", slot) + POP + PLAIN + b".")


def deflated_bomb(block: bytes, count: int, head: bytes = b"", tail: bytes = b"") -> Entry:
    """An entry of `head`, `count` blocks and `tail`, deflated without ever being held whole."""
    packer, crc, size, packed = zlib.compressobj(9, zlib.DEFLATED, -15), 0, 0, b""
    for part in (head, *(block for _ in range(count)), tail):
        packed += packer.compress(part)
        crc, size = zlib.crc32(part, crc), size + len(part)
    told = {"crc": crc, "size": size}
    return Entry("", method=8, packed=packed + packer.flush(), local=told, central=told)


def pickle_bomb() -> bytes:
    entry = deflated_bomb(b"N0" * (1 << 19), 256, b"\x80\x02", PLAIN + b".")
    entry.name = "archive/data.pkl"
    return net(entry)


def storage_bomb() -> bytes:
    entry = deflated_bomb(bytes(1 << 20), STORAGE_BYTES >> 20)
    entry.name = "archive/data/0"
    count = STORAGE_BYTES // 4
    return net(one(tensor(stored(count=count), 0, (count,), (1,))), {"0": entry})


def laughing_memo() -> bytes:
    """10**12 leaves: each tuple holds the one before ten times."""
    rows = (b"q%c0(" % slot + b"h%c" % slot * 10 + b"t" for slot in range(12))
    return op("lol") + b"".join(rows)


def laughing_dict() -> bytes:
    rows = (b"q%c0}" % i + op("a") + b"h%cs" % i + op("b") + b"h%cs" % i for i in range(30))
    return net(stream(b"}" + b"".join(rows)))


def calls_in_calls(count: int) -> bytes:
    head = name("torch._utils", "_rebuild_parameter") + MARK
    return head * count + W + (b"\x89" + op(None) + b"tR") * count


def many() -> bytes:
    return net(stream(ordered(*((f"layer{i:05}.w", W) for i in range(20_000)))), {"0": SIX})


def many_safe() -> bytes:
    row = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return safe({f"t{i:05}": row for i in range(20_000)}, b"")


def equal_hashes(count: int, value: object = None) -> bytes:
    """Keys that all hash alike: multiples of 2**61 - 1, one times each."""
    rows = (op(i * (2**61 - 1)) + op(value) for i in range(1, count))
    return dictionary(("k", 1)) + MARK + b"".join(rows) + b"u"


def repeated(key: bytes, count: int, value: bytes = W) -> bytes:
    """A dict with one key, by the memo, `count` times."""
    body = b"}(" + key + b"q\x08" + value + b"q\x09" + b"h\x08h\x09" * count + b"u"
    return net(stream(body, 3), {"0": SIX})


def under(key: bytes, count: int, tail: bytes = b"") -> bytes:
    """`count` names of one tensor below a key."""
    names = b"".join(op(f"p{i}") + b"h\x09" for i in range(count))
    body = b"}(" + op("w") + W + b"q\x09" + key + b"}(" + names + b"u" + tail + b"u"
    return net(stream(body), {"0": SIX})


def long_module() -> bytes:
    """A module of a long name with 10,000 parameters."""
    made = name("torch.nn.modules.container", "Sequential") + b")\x81"
    names = b"".join(op(f"p{i}") + b"h\x09" for i in range(10_000))
    inner = made + dictionary(("_parameters", b"}(" + names + b"u"), ("_modules", b"}")) + b"b"
    outer = dictionary(("_parameters", b"}"), ("_modules", dictionary((LONG, inner))))
    return net(stream(dictionary(("w", W + b"q\x09"), ("m", made + outer + b"b"))), {"0": SIX})


def deep_many(count: int) -> bytes:
    chain = (b"}(" + op("k")) * 400 + W + b"u" * 400
    return net(stream(b"](" + chain * count + b"e"), {"0": SIX})


LONG = "x" * (1 << 19)
KEYS, PLACES = refused("limit-key-bytes"), refused("limit-place-bytes")
ATTRIBUTES = refused("limit-attributes")


def shared(inner: bytes, use: bytes, count: int) -> bytes:
    """A large `inner` in memo slot 7, taken by `count` entries that are made by `use`."""
    rows = b"".join(op(f"t{number}") + use for number in range(count))
    return net(stream(inner + b"q\x07" + POP + b"}(" + op("w") + W + rows + b"u"), {"0": SIX})


WIDE = dictionary(*((f"k{number}", True) for number in range(5_000)))
LISTED = b"](" + b"K\x01" * 50_000 + b"e"
TYPED = call("torch._tensor._rebuild_from_type_v2", name("torch._utils", "_rebuild_tensor_v2"),
             name("torch", "Tensor"), (stored(), 0, (2, 3), (3, 1), False, HOOKS), b"h\x07")  # fmt: skip
RAW = b"B" + struct.pack("<I", 1 << 20) + b"x" * (1 << 20)
MULTIPLIED = (
    Case("key-bytes", "a key of a megabyte of bytes, 50,000 times by the memo", KEYS,
         lambda: repeated(RAW, 50_000)),
    Case("key-text", "the same as a text of Python 2", KEYS,
         lambda: repeated(b"T" + RAW[1:], 50_000)),
    Case("key-number", "the same as a number of a million bytes", KEYS,
         lambda: repeated(b"\x8b" + RAW[1:], 50_000)),
    Case("key-encoded", "the same as bytes that protocol 2 spells", KEYS,
         lambda: repeated(call("_codecs.encode", LONG, "latin1"), 50_000)),
    Case("key-tuple", "the same as a tuple of 100,000 numbers", KEYS,
         lambda: repeated(MARK + b"K\x01" * 100_000 + b"t", 50_000)),
    Case("name-dict", "10,000 tensors in a dict of a name of half a megabyte", PLACES,
         lambda: under(op(LONG), 10_000)),
    Case("name-module", "10,000 parameters in a module of such a name", PLACES, long_module),
    Case("name-deep", "200 chains of 400 dicts: 16 million levels", PLACES,
         lambda: deep_many(200), seconds=3),
    Case("shared-flags", "5,000 flags that 5,000 tensors share", ATTRIBUTES,
         lambda: shared(WIDE, tensor(stored(), 0, (2, 3), (3, 1), False, HOOKS, b"h\x07"), 5_000)),
    Case("shared-attributes", "5,000 attributes that 5,000 tensors share", ATTRIBUTES,
         lambda: shared(WIDE, TYPED, 5_000)),
    Case("shared-state", "5,000 attributes that 5,000 dicts share", PLACES,
         lambda: shared(WIDE, HOOKS + b"h\x07b", 5_000), seconds=4),
    Case("shared-size", "a list of 50,000 that 1,000 sizes share", UNCOMPARED,
         lambda: shared(LISTED, name("torch", "Size") + tup(b"h\x07") + b"R", 1_000), seconds=4),
    Case("value-text", "a text of 16 kB at 20,000 places", UNCOMPARED,
         beside(b"](" + op("x" * (1 << 14)) + b"q\x08" + b"h\x08" * 20_000 + b"e")),
    Case("value-bytes", "bytes that protocol 2 spells, the same", UNCOMPARED,
         beside(b"](" + call("_codecs.encode", "x" * (1 << 14), "latin1") + b"q\x08"
                + b"h\x08" * 20_000 + b"e")),
)  # fmt: skip

CASES = (
    *MULTIPLIED,
    Case("pickle-bomb", "256 MiB of nothing in a data.pkl of 256 kB", BOMB, pickle_bomb),
    Case("storage-bomb", "a storage of 1 GiB in 1 MB: looking never inflates it",
         OTHER, storage_bomb, seconds=60, long=("verify", "pth", "safetensors", "diff", "api"),
         weights=False),
    Case("deep-tuple", "200,000 tuples inside each other", DEEP,
         beside(b")" + b"\x85" * 200_000)),
    Case("deep-key", "the same as a key: hash() of it kills CPython", DEEP,
         lambda: net(stream(ordered(("w", W), (b")" + b"\x85" * 200_000, None))))),
    Case("deep-list", "100,000 lists inside each other", DEEP,
         beside(MARK * 100_000 + b"l" * 100_000)),
    Case("deep-dict", "50,000 dicts inside each other", DEEP,
         beside((b"}" + op("k")) * 50_000 + b"N" + b"s" * 50_000)),
    Case("deep-calls", "100,000 rebuild calls inside each other", DEEP,
         beside(calls_in_calls(100_000)), seconds=3),
    Case("laughs", "2**40 leaves by DUP", UNCOMPARED, beside(op("lol") + b"2\x86" * 40), seconds=3),
    Case("laughs-memo", "10**12 leaves by the memo", UNCOMPARED, beside(laughing_memo()),
         seconds=3),
    Case("laughs-dict", "2**30 paths through dicts", Want(DONE, DONE, DONE, TROUBLE, TROUBLE),
         laughing_dict, seconds=3),
    Case("marks", "two million MARKs", refused("limit-nesting"), lambda: net(stream(MARK * 2_000_000 + PLAIN)),
         seconds=4),
    Case("dups", "two million DUPs", SAME, lambda: net(stream(b"N" + b"2" * 2_000_000 + PLAIN)),
         seconds=4),
    Case("hashes", "20,000 keys of one hash", OTHER, beside(equal_hashes(20_000)), seconds=2),
    Case("hashes-tensors", "20,000 tensors under such keys", OTHER,
         lambda: net(stream(dictionary(("w", W + b"q\x09"), ("d", equal_hashes(20_000, b"h\x09")))),
                     {"0": SIX}), seconds=4),
    Case("memo-4g", "memo slot 4,294,967,280", SAME, sparse(0xFFFFFFF0)),
    Case("memo-64m", "memo slot 67,108,864: a gigabyte in C", SAME, sparse(1 << 26)),
    Case("memo-many", "one object in 100,000 memo slots", SAME, lambda: net(
        b"\x80\x02" + op("x") + b"".join(b"r" + struct.pack("<I", i) for i in range(100_000))
        + POP + PLAIN + b".")),
    Case("epoch", "a number of 100,000 bits: str() of it raises", OTHER,
         lambda: net(stream(dictionary(("epoch", 1 << 99_999), ("state_dict", PLAIN))))),
    Case("digits", "a million decimal digits: conversion is quadratic", INVALID,
         lambda: net(b"\x80\x02L" + b"9" * 1_000_000 + b"L\n.")),
    Case("key", "a key of a megabyte", OTHER, lambda: net(one(W)[:-1].replace(
        op("w"), op("k" * (1 << 20))) + b".", {"0": SIX})),
    Case("tensors", "20,000 tensors on one storage", OTHER, many, seconds=4),
    Case("safe-tensors", "20,000 empty tensors in a .safetensors", OTHER, many_safe,
         file="net.safetensors", seconds=4),
    Case("safe-spaces", "4 MB of spaces in a header", SAME,
         lambda: safe(b'{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
                      b'"b":{"dtype":"F32","shape":[2],"data_offsets":[24,32]}}'
                      + b" " * 4_000_000), file="net.safetensors"),
)  # fmt: skip
