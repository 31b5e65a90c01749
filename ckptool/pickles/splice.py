"""Rewriting a pickle: edited bytes replaced, every other byte copied.

Knows: nodes, spans, memo opcodes. Must not know: files, what an edited string means.
The rules of the memo (who defined what, and where it is fetched) are in `hoist`; this file
turns edits of values into edits of bytes and says no where that cannot be done exactly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from struct import Struct, pack
from typing import Any

from ckptool.errors import PickleInvalid
from ckptool.pickles.hoist import Emitter, Replacement
from ckptool.pickles.nodes import TEXT_OPS, Walked

_LINE_OPS = frozenset((0x56, 0x53, 0x67))
_UINT4 = Struct("<I").unpack_from
_COUNT_WIDTH = {0x8C: 1, 0x8D: 8, 0x55: 1, 0x54: 4}
_GET_SIZE = {0x68: 2, 0x6A: 5}


@dataclass(slots=True)
class Edits:
    """What to change, by byte positions of the walked pickle.

    `strings` maps the start of one occurrence of a string to its new text; `values` maps the
    start of a value to (end, new bytes: a whole expression); `spellings` maps the start of
    opcodes to (end, bytes that say the same, memo id they define or None); `deletions` are
    spans of whole dict items or list elements, `dropped` those of tuple items (start -> end);
    `inserts` maps the byte of a tuple's opcode, or the start of one of its items, to new
    items before it. Values of one group in `shared` (start -> group) are one object. `respell` gives the literal of a string or bytes node when the output has
    another protocol; `decoded`: Python 2 texts come out as unicode.
    """

    strings: dict[int, str] = field(default_factory=dict)
    values: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    spellings: dict[int, tuple[int, bytes, int | None]] = field(default_factory=dict)
    deletions: list[tuple[int, int]] = field(default_factory=list)
    dropped: dict[int, int] = field(default_factory=dict)
    inserts: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    shared: dict[int, int] = field(default_factory=dict)
    respell: Callable[[Any], bytes] | None = None
    decoded: bool = False

    def __bool__(self) -> bool:
        tables = (self.strings, self.values, self.spellings, self.deletions, self.dropped)
        return any(tables) or bool(self.inserts)


def splice(walked: Walked, edits: Edits) -> bytes:
    """The pickle's bytes with the edits made; without any, its own bytes.

    Raises PickleInvalid where the stream holds what no honest pickler writes (formats 6.6).
    """
    if not edits:
        return walked.data[walked.start : walked.end]
    for oddity, offset in walked.oddities.items():
        if oddity != "values left on the stack":
            raise PickleInvalid(f"the pickle cannot be rewritten: {oddity}", offset=offset)
    emitter = Emitter(walked)
    emitter.respell = edits.respell
    for start, (end, data, defines) in edits.spellings.items():
        emitter.replace(Replacement(start, end, data, defines=defines, same_meaning=True))
    groups = {group: emitter.fresh_slot() for group in dict.fromkeys(edits.shared.values())}
    for start, (end, data) in edits.values.items():
        group = edits.shared.get(start)
        fresh = None if group is None else groups[group]
        emitter.replace(Replacement(start, end, data, fresh=fresh))
    for start, items in edits.inserts.items():
        emitter.insert(start, b"".join(items))
    _string_edits(walked, edits, emitter)
    for start, end in (*edits.deletions, *edits.dropped.items()):
        emitter.delete(start, end)
    return emitter.emit()


def text_literal(text: str) -> bytes:
    """BINUNICODE, the one string opcode of protocol 2 that torch's restricted loader knows."""
    raw = text.encode("utf-8", "surrogatepass")
    return b"X" + pack("<I", len(raw)) + raw


def literal_like(code: int, text: str, decoded: bool = False) -> bytes:
    """A literal of the same kind: a Python 2 str stays one where its opcode can hold it, unless
    all are decoded.
    """
    if code in TEXT_OPS and not decoded:
        raw = text.encode("utf-8", "surrogatepass")
        if len(raw) < 256:
            return b"U" + bytes((len(raw),)) + raw
    return text_literal(text)


def literal_end(data: bytes, start: int) -> int:
    """The byte after the string literal or GET at `start`.

    Raises PickleInvalid for any other opcode: such an occurrence cannot be edited.
    """
    code = data[start]
    if code == 0x58:
        return start + 5 + int(_UINT4(data, start + 1)[0])
    if code in _LINE_OPS:
        return data.index(b"\n", start) + 1
    if code in _GET_SIZE:
        return start + _GET_SIZE[code]
    width = _COUNT_WIDTH.get(code)
    if width is None:
        raise PickleInvalid("a string to edit is not a plain literal", offset=start)
    return start + 1 + width + int.from_bytes(data[start + 1 : start + 1 + width], "little")


@dataclass(slots=True)
class _Occurrence:
    start: int
    end: int
    new: str
    defines: bool


def _string_edits(walked: Walked, edits: Edits, emitter: Emitter) -> None:
    """Sort the occurrences by the memo slot they share; a string of its own is replaced."""
    data, puts = walked.data, walked.puts
    by_slot: dict[int, list[_Occurrence]] = {}
    for start, new in edits.strings.items():
        end = literal_end(data, start)
        code = data[start]
        if code in _GET_SIZE or code == 0x67:
            slot = emitter.get_at(start)[0]
            by_slot.setdefault(slot, []).append(_Occurrence(start, end, new, False))
            continue
        at = bisect_left(puts, end)
        if at < len(puts) and puts[at] == end:
            slot = emitter.put_at(at)[0]
            by_slot.setdefault(slot, []).append(_Occurrence(start, end, new, True))
        else:
            emitter.replace(Replacement(start, end, literal_like(code, new, edits.decoded)))
    if by_slot:
        uses = emitter.uses_of(by_slot.keys())
        for slot, found in by_slot.items():
            _shared_string(walked, emitter, slot, found, uses.get(slot, ()), edits.decoded)


def _shared_string(
    walked: Walked, emitter: Emitter, slot: int, found: list[_Occurrence], uses: Any, decoded: bool
) -> None:
    """One memoised string, some of whose occurrences change.

    When all change alike, the literal is patched and PUT and GETs stay. Otherwise each
    edited one becomes a literal (repeated ones share a new slot), and the first fetch that
    is not edited brings the old definition with it.
    """
    definition = walked.memo_start[slot]
    code = walked.data[definition]
    first = found[0]
    if len(found) == 1 and first.start == definition and not uses:  # nearly every key
        emitter.patch(slot, definition, first.end, literal_like(code, first.new, decoded))
        return
    news = {occurrence.new for occurrence in found}
    edited = {occurrence.start for occurrence in found}
    if len(news) == 1 and definition in edited and all(use in edited for use in uses):
        end = literal_end(walked.data, definition)
        emitter.patch(slot, definition, end, literal_like(code, first.new, decoded))
        return
    counts: dict[str, int] = {}
    for occurrence in found:
        counts[occurrence.new] = counts.get(occurrence.new, 0) + 1
    fresh = {new: emitter.fresh_slot() for new, count in counts.items() if count > 1}
    for occurrence in found:
        end = occurrence.end
        if occurrence.defines:
            end = emitter.put_end(slot)
        emitter.replace(
            Replacement(
                occurrence.start, end, literal_like(code, occurrence.new, decoded),
                fresh=fresh.get(occurrence.new),
            )
        )  # fmt: skip
