"""What torch's restricted loader (weights_only=True) refuses in a pickle beside names.

Knows: torch/_weights_only_unpickler.py, torch 2.13: which opcodes it has, what it lets be called,
filled and given a state. Must not know: which names it allows, verbs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from ckptool.formats.rebuild import BUILDERS
from ckptool.pickles.nodes import (
    NEWOBJ,
    PAIR_OPS,
    REDUCE,
    Box,
    Obj,
    Tup,
    Walked,
    children,
    items_of,
    text_of,
)
from ckptool.pickles.nodes import Global as GlobalNode

# Opcodes of a fixed length: alone, and with 1, 2, 4 and 8 bytes. A run of them in one match.
_FIXED = re.compile(
    rb"(?s:[()\]}\x8ftNRQbaesu\x81\x85-\x89]|[Khq\x80].|M..|[Jjr].{4}|G.{8}){1,4096}"
)
_COUNTED = {0x58: 4, 0x55: 1, 0x8A: 1}  # BINUNICODE, SHORT_BINSTRING, LONG1: bytes of the length
_GLOBAL, _STOP = 0x63, 0x2E
_NAMES = {
    0x30: "POP", 0x31: "POP_MARK", 0x32: "DUP", 0x42: "BINBYTES", 0x43: "SHORT_BINBYTES",
    0x46: "FLOAT", 0x49: "INT", 0x4C: "LONG", 0x50: "PERSID", 0x53: "STRING", 0x54: "BINSTRING",
    0x56: "UNICODE", 0x64: "DICT", 0x67: "GET", 0x69: "INST", 0x6C: "LIST", 0x6F: "OBJ",
    0x70: "PUT", 0x8B: "LONG4", 0x8C: "SHORT_BINUNICODE", 0x8D: "BINUNICODE8", 0x8E: "BINBYTES8",
    0x90: "ADDITEMS", 0x91: "FROZENSET", 0x92: "NEWOBJ_EX", 0x93: "STACK_GLOBAL",
    0x94: "MEMOIZE", 0x95: "FRAME", 0x96: "BYTEARRAY8",
}  # fmt: skip
_DICTS = ("collections.OrderedDict", "collections.Counter")
_WITH_STATE = ("collections.OrderedDict", "torch.nn.parameter.Parameter", *BUILDERS)


class Refusal(NamedTuple):
    """What the restricted loader stops at, in words, and the byte of the pickle's file."""

    text: str
    offset: int


def refusals(walked: Walked) -> Iterator[Refusal]:
    """Everything but names that torch.load(weights_only=True) would refuse in this pickle, one
    of a kind, the first of its kind.
    """
    opcode = _unknown_opcode(walked)
    if opcode is not None:
        yield opcode
    for find in (_calls, _filled, _given_state, _persistent):
        found = next(find(walked), None)
        if found is not None:
            yield found


def _unknown_opcode(walked: Walked) -> Refusal | None:
    data, at = walked.data, walked.start
    while True:
        run = _FIXED.match(data, at)
        if run is not None:
            at = run.end()
            continue
        code = data[at]
        if code == _STOP:
            return None
        if code in _COUNTED:
            width = _COUNTED[code]
            at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
        elif code == _GLOBAL:
            at = data.index(b"\n", data.index(b"\n", at) + 1) + 1
        else:
            name = _NAMES.get(code, f"0x{code:02x}")
            protocol = f", of pickle protocol {walked.protocol}" if walked.protocol > 2 else ""
            return Refusal(f"its loader does not know the opcode {name}{protocol}", at)


def _calls(walked: Walked) -> Iterator[Refusal]:
    """What is called must be a name, and what is made a class it allows."""
    for call in walked.calls:
        if call.op in (REDUCE, NEWOBJ) and type(call.fn) is not GlobalNode:
            yield Refusal("it calls what another call made", call.end)


def _filled(walked: Walked) -> Iterator[Refusal]:
    """Items go into dicts, OrderedDict, Counter and lists alone."""
    for call in walked.calls:
        for batch in call.batches or ():
            if batch.op not in PAIR_OPS or _name(call) not in _DICTS:
                yield Refusal("it adds items to an object", batch.end)


def _given_state(walked: Walked) -> Iterator[Refusal]:
    """BUILD is for tensors, Parameters and OrderedDict."""
    for offset, _ in walked.builds_on_others:
        yield Refusal("it gives a state to what is no object", offset)
    for call in walked.calls:
        if call.state is not None and _name(call) not in _WITH_STATE:
            yield Refusal("it gives a state to an object of another class", call.state.end)
    for box in _boxes(walked):
        if box.state is not None:
            yield Refusal("it gives a state to a plain container", box.state.end)


def _boxes(walked: Walked) -> Iterator[Box]:
    """All plain containers that the object holds."""
    seen: set[int] = set()
    stack: list[Any] = [walked.root]
    while stack:
        node = stack.pop()
        kind = type(node)
        if (kind is Box or kind is Obj or kind is Tup) and id(node) not in seen:
            seen.add(id(node))
            if kind is Box:
                yield node
            stack.extend(children(node))


def _persistent(walked: Walked) -> Iterator[Refusal]:
    for pers in walked.persistent:
        items = items_of(pers.pid)
        if items is None or not items or text_of(items[0]) != "storage":
            yield Refusal("it has a persistent id that is not a storage", pers.end)


def _name(call: Obj) -> str | None:
    return call.fn.full if type(call.fn) is GlobalNode else None
