"""Protocols 3 to 5 spelled in protocol 2, opcode by opcode, without importing a class.

Knows: which opcodes have an exact protocol-2 spelling in the set that torch's restricted
loader accepts (torch/_weights_only_unpickler.py). Must not know: files, torch's meanings.
What has none (a dotted class name, NEWOBJ_EX, FROZENSET, a set that holds itself, a name that
protocol 2 would map to another) keeps its own protocol: `spellings` says why.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from ckptool.pickles.hoist import Emitter, put_op
from ckptool.pickles.nodes import FROZENSET, NEWOBJ_EX, SET, Box, Raw, Walked
from ckptool.pickles.splice import Edits, text_literal

_BYTES_OPS = frozenset((0x43, 0x42, 0x8E))
_BYTEARRAY8 = 0x96
_PUTS = frozenset((0x71, 0x72, 0x94, 0x70))
_ENCODE = b"c_codecs\nencode\n"


def bytes_literal(value: bytes) -> bytes:
    """A bytes value as protocol 2 spells it: _codecs.encode(text, 'latin1')."""
    return _ENCODE + text_literal(value.decode("latin-1")) + text_literal("latin1") + b"\x86R"


def _respell(node: Any) -> bytes:
    if type(node) is str:
        return text_literal(node)
    if type(node) is Raw and node.op in _BYTES_OPS:
        return bytes_literal(node.value)
    if type(node) is Raw and node.op == _BYTEARRAY8:
        return b"c__builtin__\nbytearray\n" + bytes_literal(node.value) + b"\x85R"
    raise AssertionError("a node that is no literal")


def why_not(walked: Walked) -> str | None:
    """What keeps this pickle from being spelled in protocol 2; None when nothing does."""
    for _, _, found in walked.stack_globals:
        reason = _unspellable(found.module, found.name, found.computed)
        if reason:
            return reason
    for call in walked.calls:
        if call.op == NEWOBJ_EX:
            return "an object made with keyword arguments"
    if walked.data[walked.start] != 0x80:
        return "a stream that does not say its protocol"
    if walked.oddities:
        return next(iter(walked.oddities))
    return None


def _unspellable(module: str, name: str, computed: bool) -> str | None:
    from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING

    if computed:
        return "a class name that is computed"
    if "." in name:
        return f"the dotted class name {module}.{name}"
    if "\n" in module + name:
        return "a class name with a line break"
    if module in IMPORT_MAPPING or (module, name) in NAME_MAPPING:
        return f"the name {module}.{name}, which protocol 2 reads as another"
    return None


def add_spellings(walked: Walked, edits: Edits) -> str | None:
    """Add to `edits` what turns the stream into protocol 2; returns why not, or None."""
    reason = why_not(walked)
    if reason is None:
        spelled = _spell(walked)
        if isinstance(spelled, str):
            return spelled
        edits.spellings.update(spelled)
        edits.respell = _respell
    return reason


Spellings = dict[int, tuple[int, bytes, int | None]]


def _spell(walked: Walked) -> Spellings | str:
    """Every opcode that protocol 2 lacks, found by a second pass over the stream's opcodes."""
    found: Spellings = {walked.start: (walked.start + 2, b"\x80\x02", None)}
    skip = 0
    inside = sorted((start, end + 1, glob) for start, end, glob in walked.stack_globals)
    for start, end, glob in inside:
        text = f"c{glob.module}\n{glob.name}\n"
        found[start] = (end, text.encode("utf-8", "surrogatepass"), None)
    starts = {start: end for start, end, _ in inside}
    boxes = _sets(walked)
    if isinstance(boxes, str):
        return boxes
    found.update(boxes)
    data = walked.data
    for pos, end in opcodes(walked):
        skip = max(skip, starts.get(pos, 0))
        code = data[pos]
        if pos >= skip and pos not in found:
            if code in (0x8C, 0x8D):
                first = pos + (2 if code == 0x8C else 9)
                text = str(data[first:end], "utf-8", "surrogatepass")
                found[pos] = (end, text_literal(text), None)
            elif code in _BYTES_OPS or code == _BYTEARRAY8:
                first = pos + {0x43: 2, 0x42: 5, 0x8E: 9, _BYTEARRAY8: 9}[code]
                found[pos] = (end, _respell(Raw(code, data[first:end], first)), None)
            elif code == FROZENSET:
                return "a frozenset"
            elif code == 0x8B and end - pos - 5 < 256:
                found[pos] = (end, b"\x8a" + data[pos + 1 : pos + 2] + data[pos + 5 : end], None)
    return found


def _sets(walked: Walked) -> Spellings | str:
    """EMPTY_SET … ADDITEMS becomes set([…]), whose memo slot is set after the call."""
    found: Spellings = {}
    data = walked.data
    slots: dict[int, list[int]] = {}
    for name, node in walked.memo.items():
        if type(node) is Box and node.kind == SET:
            slots.setdefault(walked.memo_start[name], []).append(name)
    pos = data.find(b"\x8f", walked.start, walked.end)
    if pos < 0:
        return found
    emitter = Emitter(walked)
    for box in _all_sets(walked):
        named = slots.get(box.start, [])
        opened = box.start + 1
        if len(named) > 1 or (named and data[opened] not in _PUTS):
            return "a set that is memoised in an odd way"
        slot = named[0] if named else None
        if slot is not None:
            opened += _size_at(data, opened)
            if _holds_itself(emitter, box, slot):
                return "a set that holds itself"
        close = b"\x85R" + (put_op(slot) if slot is not None else b"")
        make = b"c__builtin__\nset\n]"
        if box.state is not None:
            return "a set with a state"
        if not box.batches:
            found[box.start] = (opened, make + close, slot)
            continue
        found[box.start] = (opened, make, None)
        for batch in box.batches[:-1]:
            found[batch.end] = (batch.end + 1, b"e", None)
        last = box.batches[-1].end
        found[last] = (last + 1, b"e" + close, slot)
    return found


def _holds_itself(emitter: Emitter, box: Box, slot: int) -> bool:
    """Whether the set is fetched while it is being filled."""
    gets = emitter.walked.gets
    end = box.batches[-1].end if box.batches else box.start
    inside = gets[bisect_left(gets, box.start) : bisect_left(gets, end)]
    return any(emitter.get_at(pos)[0] == slot for pos in inside)


def _all_sets(walked: Walked) -> list[Box]:
    """Every set of the stream, popped ones too: found from the root and the memo."""
    from ckptool.pickles.nodes import children

    seen: set[int] = set()
    stack: list[Any] = [walked.root, *walked.memo.values(), *walked.calls]
    found = []
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if type(node) is Box and node.kind == SET:
            found.append(node)
        stack.extend(children(node))
    return found


_FIXED = {0x4B: 2, 0x4D: 3, 0x4A: 5, 0x47: 9, 0x68: 2, 0x71: 2, 0x6A: 5, 0x72: 5, 0x80: 2,
          0x95: 9, 0x82: 2, 0x83: 3, 0x84: 5}  # fmt: skip
_COUNTED = {0x58: 4, 0x8C: 1, 0x8D: 8, 0x43: 1, 0x42: 4, 0x8E: 8, 0x96: 8, 0x55: 1, 0x54: 4,
            0x8A: 1, 0x8B: 4}  # fmt: skip
_LINES = {0x63: 2, 0x69: 2, 0x49: 1, 0x4C: 1, 0x46: 1, 0x56: 1, 0x53: 1, 0x70: 1, 0x67: 1, 0x50: 1}


def opcodes(walked: Walked) -> Iterator[tuple[int, int]]:
    """(start, end) of every opcode with its argument, but for a PROTO that begins the stream."""
    data = walked.data
    pos = walked.start + (2 if data[walked.start] == 0x80 else 0)
    while pos < walked.end:
        end = pos + _size_at(data, pos)
        yield pos, end
        pos = end


def _size_at(data: bytes, pos: int) -> int:
    """Bytes of the opcode at `pos` with its argument (of a stream that `walk` accepted)."""
    code = data[pos]
    if code in _FIXED:
        return _FIXED[code]
    if code in _COUNTED:
        width = _COUNTED[code]
        return 1 + width + int.from_bytes(data[pos + 1 : pos + 1 + width], "little")
    if code in _LINES:
        end = pos
        for _ in range(_LINES[code]):
            end = data.index(b"\n", end + 1)
        return end + 1 - pos
    return 1
