"""Mutation of a pickle by its opcodes, so that most results are still streams a reader follows.

Opcodes are deleted, doubled, exchanged, moved, inserted; integers, memo indexes, texts and names
get other values. What cannot be split (from the first broken opcode on) is kept as it is.
"""

from __future__ import annotations

import pickletools
import struct
from itertools import pairwise

from fuzz import bytewise

GLOBALS = (
    "torch FloatStorage", "torch HalfStorage", "torch LongStorage", "torch BFloat16Storage",
    "torch ByteStorage", "torch BoolStorage", "torch ComplexFloatStorage", "torch QInt8Storage",
    "torch.storage UntypedStorage", "torch.storage TypedStorage", "torch._utils _rebuild_tensor",
    "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3",
    "torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state",
    "torch._utils _rebuild_qtensor", "torch._utils _rebuild_sparse_tensor",
    "torch._utils _rebuild_meta_tensor_no_storage", "torch._utils _rebuild_wrapper_subclass",
    "torch._tensor _rebuild_from_type_v2", "torch Size", "torch Tensor", "torch device",
    "torch float32", "torch float16", "torch int64", "torch bfloat16", "torch float8_e4m3fn",
    "torch.nn.parameter Parameter", "collections OrderedDict", "collections Counter",
    "collections defaultdict", "_codecs encode", "__builtin__ set", "builtins set",
    "__builtin__ bytearray", "builtins bytearray", "__builtin__ complex", "torch complex64",
    "torch.serialization _get_layout", "torch._utils _rebuild_device_tensor_from_numpy",
    "argparse Namespace", "acme Thing", "os system", "torch per_tensor_affine", "torch strided",
    "torch.torch_version TorchVersion", "torch.nn.modules.linear Linear", "builtins getattr",
)  # fmt: skip
TEXTS = (
    "", "0", "1", "2", "00", " 0", "\u0660", "0.0", "data/0", "../0", "storage", "module", "cpu",
    "cuda:0", "meta", "a", "weight", "bias", "state_dict", "_metadata", "__metadata__", "version",
    "\ud800", "é", "é", "\0", "\x1b[2J", "module.a", "_extra_state", "latin1", "utf-8",
    "little", "big", "float32", "torch.sparse_coo", "x" * 300,
)  # fmt: skip
_HUGE = 1 << 20_000  # more digits than Python writes
_SIMPLE = b"(.0210N}])\x88\x89\x85\x86\x87tQRbseua\x81\x8f\x90\x91\x93\x94dl"
_BATCH = (
    b"N",
    b"}",
    b"]",
    b")",
    b"\x88",
    b"K\x01",
    b"M\xe9\x03",
    b"X\x01\0\0\0a",
    b"I1\n",
    b"L1L\n",
)
_JOINS = (
    b"NN\x86",
    b"(NNt",
    b"}(NNu",
    b"](NNe",
    b"0",
    b"2",
    b"(1",
    b")R",
    b"}b",
    b"K\0K\0s",
    b"Na",
)


def split(data):
    """(opcodes as byte strings, the rest behind STOP or from the first broken one on)."""
    starts = []
    try:
        for _, _, at in pickletools.genops(data):
            starts.append(at)
        starts.append(starts[-1] + 1)
    except Exception:  # pickletools raises many kinds; the last opcode may be the broken one
        starts = starts or [0]
    return [data[a:b] for a, b in pairwise(starts)], data[starts[-1] :]


def text(value):
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def integer(value):
    """The opcode pickle takes for it."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    size = value.bit_length() // 8 + 1
    head = b"\x8a" + bytes([size]) if size < 256 else b"\x8b" + struct.pack("<i", size)
    return head + value.to_bytes(size, "little", signed=True)


def named(dice):
    module, name = dice.choice(GLOBALS).split()
    if dice.random() < 0.2:
        return text(module) + text(name) + b"\x93"
    return f"c{module}\n{name}\n".encode()


def memo_numbers(ops):
    """What BINPUT and LONG_BINPUT set, or the first numbers."""
    found = [op[1] if op[:1] == b"q" else struct.unpack("<I", op[1:])[0]
             for op in ops if op[:1] in b"qr" and len(op) in (2, 5)]  # fmt: skip
    return found or [0, 1, 2]


def getting(ops, dice):
    at = dice.choice(memo_numbers(ops)) + dice.choice((0, 0, 0, 1, -1))
    return b"h" + bytes([at]) if 0 <= at < 256 else b"j" + struct.pack("<I", at & 0xFFFFFFFF)


def fresh(ops, dice):
    """An opcode from nowhere."""
    way = dice.randrange(8)
    if way == 0:
        return named(dice)
    if way == 1:
        return text(dice.choice(TEXTS))
    if way == 2:
        return integer(dice.choice((*bytewise.ODD_NUMBERS, _HUGE)))
    if way == 3:
        return getting(ops, dice)
    if way == 4:
        return dice.choice(_BATCH)
    if way == 5:
        return dice.choice(_JOINS)
    if way == 6:
        return dice.choice((b"q", b"h")) + bytes([dice.randrange(256)])
    return bytes([dice.choice(_SIMPLE)])


def altered(op, ops, dice):
    """The same opcode with another argument; one without becomes any."""
    code = op[:1]
    if not code:
        return fresh(ops, dice)
    if code in b"KMJ\x8aIL":
        return _other_integer(op, dice)
    if code in b"hj":
        return getting(ops, dice)
    if code in b"qr":
        at = dice.choice(memo_numbers(ops))
        return b"q" + bytes([at]) if at < 256 else b"r" + struct.pack("<I", at)
    if code in b"XU\x8cTV":
        others = [o for o in ops if o[:1] == code]
        return dice.choice(others) if dice.random() < 0.5 else text(dice.choice(TEXTS))
    if code == b"c":
        return named(dice)
    if code in b"\x88\x89":
        return b"\x88" if code == b"\x89" else b"\x89"
    if code in b"\x80\x95":
        return op
    return fresh(ops, dice)


def _other_integer(op, dice):
    try:
        old = next(pickletools.genops(op + b"."))[1]
    except ValueError:
        return op
    way = dice.randrange(5)
    near = int(old) + dice.choice((-1, 1, 2, 6))
    if way == 0:
        return integer(near)
    if way == 1:
        return dice.choice((b"\x88", b"\x89", b"N", b"G?\xf0\0\0\0\0\0\0", text(str(old))))
    if way == 2:
        return integer(int(old) * dice.choice((0, 2, 3, -1)))
    return integer(dice.choice((*bytewise.ODD_NUMBERS, _HUGE)))


# -- ways ----------------------------------------------------------------------------------------
def _alter(ops, dice):
    at = dice.randrange(len(ops))
    ops[at] = altered(ops[at], ops, dice)


def _alter_value(ops, dice):
    """Rather an argument than a bare opcode: integers, texts and names."""
    places = [i for i, op in enumerate(ops) if op and op[:1] in b"KMJ\x8aXc\x88\x89\x8chj"]
    if places:
        at = dice.choice(places)
        ops[at] = altered(ops[at], ops, dice)


def _delete(ops, dice):
    at = dice.randrange(len(ops))
    del ops[at : at + dice.choice((1, 1, 1, 2, 5))]


def _double(ops, dice):
    at = dice.randrange(len(ops))
    size = dice.choice((1, 1, 2, 4, 12))
    ops[at:at] = ops[at : at + size]


def _exchange(ops, dice):
    one, two = dice.randrange(len(ops)), dice.randrange(len(ops))
    ops[one], ops[two] = ops[two], ops[one]


def _exchange_alike(ops, dice):
    """Two opcodes of one kind: the arguments change places."""
    one = dice.randrange(len(ops))
    alike = [i for i, op in enumerate(ops) if op[:1] == ops[one][:1]]
    two = dice.choice(alike)
    ops[one], ops[two] = ops[two], ops[one]


def _move(ops, dice):
    start = dice.randrange(len(ops))
    piece = ops[start : start + dice.choice((1, 2, 8))]
    del ops[start : start + len(piece)]
    at = dice.randrange(len(ops) + 1)
    ops[at:at] = piece


def _copy(ops, dice):
    start = dice.randrange(len(ops))
    at = dice.randrange(len(ops) + 1)
    ops[at:at] = ops[start : start + dice.choice((1, 3, 10, 40))]


def _insert(ops, dice):
    ops.insert(dice.randrange(len(ops) + 1), fresh(ops, dice))


def _break(ops, dice):
    at = dice.randrange(len(ops))
    ops[at] = bytewise.mutate(ops[at], dice)


def _protocol(ops, dice):
    if ops[0][:1] == b"\x80":
        ops[0] = b"\x80" + bytes([dice.choice((0, 1, 2, 3, 4, 5, 6, 255))])


_WAYS = (
    *(_alter,) * 3, *(_alter_value,) * 9, _delete, _delete, _double, _exchange, *(_exchange_alike,) * 5,
    _move, _copy, _copy, _insert, _insert, _break, _protocol,
)  # fmt: skip


def mutate(data, dice):
    """One to three changes by opcode; now and then by byte."""
    if dice.random() < 0.1:
        return bytewise.mutate(data, dice)
    ops, rest = split(data)
    ops = [op for op in ops if op[:1] != b"\x95"] if dice.random() < 0.9 else ops  # no FRAME
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        if ops:
            dice.choice(_WAYS)(ops, dice)
    return b"".join(ops) + rest
