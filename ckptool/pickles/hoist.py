"""Emitting an edited pickle without breaking its memo.

Knows: which bytes define a memo slot, which fetch it. Must not know: why bytes are edited.
Rule 1: a fetch whose definition was cut or replaced brings the definition with it (hoisting);
inside a hoisted definition, slots that are defined by then become fetches, so that identity
is kept. Rule 2: MEMOIZE numbers by memo size, so when a PUT comes or goes all become explicit.
Rule 3: a definition that leads back into itself is refused. Nothing here recurses: a hoisted
definition is a frame on a list.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from struct import pack, unpack_from
from typing import Any

from ckptool.errors import PickleInvalid
from ckptool.pickles.nodes import Box, Global, Obj, Raw, Walked

_INSERT, _CUT, _DEFINES, _REPLACE, _FETCH, _FRAME, _MEMOIZE = range(7)


@dataclass(slots=True)
class Replacement:
    """Bytes for [start, end).

    `defines`: the slot they set; `fresh`: a new slot shared by equal replacements;
    `same_meaning`: another spelling of the same value.
    """

    start: int
    end: int
    data: bytes
    defines: int | None = None
    fresh: int | None = None
    same_meaning: bool = False


@dataclass(slots=True)
class _Frame:
    """A run of bytes being emitted; `slot` is what a hoisted one defines, -1 for the stream."""

    pos: int
    end: int
    event: int
    slot: int = -1
    first: int = -1


def put_op(slot: int) -> bytes:
    """BINPUT or LONG_BINPUT."""
    return b"q" + bytes((slot,)) if slot < 256 else b"r" + pack("<I", slot)


def get_op(slot: int) -> bytes:
    """BINGET or LONG_BINGET."""
    return b"h" + bytes((slot,)) if slot < 256 else b"j" + pack("<I", slot)


class Emitter:
    """Collects replacements and deletions of one walked pickle, then emits it."""

    def __init__(self, walked: Walked) -> None:
        self.walked = walked
        self.data = walked.data
        self.replacements: dict[int, Replacement] = {}
        self.spellings: dict[int, Replacement] = {}
        self.patched: dict[int, bytes] = {}
        self.cuts: list[tuple[int, int]] = []
        self.inserted: dict[int, bytes] = {}
        self.next_slot = max(walked.memo, default=-1) + 1
        self.first_fresh = self.next_slot
        self.respell: Callable[[Any], bytes] | None = None
        self._put_index: dict[int, int] | None = None

    # -- collecting --------------------------------------------------------------------------
    def replace(self, replacement: Replacement) -> None:
        """Replace bytes; of two at one start the one that changes the meaning wins."""
        if replacement.same_meaning:
            self.spellings[replacement.start] = replacement
        else:
            self.replacements[replacement.start] = replacement

    def patch(self, slot: int, start: int, end: int, literal: bytes) -> None:
        """Change the literal that defines `slot`, for all who fetch it."""
        self.patched[slot] = literal
        self.replacements[start] = Replacement(start, end, literal)

    def delete(self, start: int, end: int) -> None:
        """Cut whole items."""
        self.cuts.append((start, end))

    def insert(self, start: int, data: bytes) -> None:
        """Put a new item before what stands at `start`."""
        self.inserted[start] = data

    def fresh_slot(self) -> int:
        """A memo slot that the pickle does not use."""
        if self.next_slot > 0xFFFFFFFF:
            raise PickleInvalid("the pickle cannot be rewritten: its last memo slot is used")
        self.next_slot += 1
        return self.next_slot - 1

    # -- memo opcodes ------------------------------------------------------------------------
    def get_at(self, pos: int) -> tuple[int, int]:
        """(slot, size) of the GET at byte `pos`."""
        code = self.data[pos]
        if code == 0x68:
            return self.data[pos + 1], 2
        if code == 0x6A:
            return unpack_from("<I", self.data, pos + 1)[0], 5
        end = self.data.index(b"\n", pos)
        return int(self.data[pos + 1 : end]), end + 1 - pos

    def put_at(self, index: int) -> tuple[int, int]:
        """(slot, size) of the PUT number `index` of the stream."""
        pos = self.walked.puts[index]
        code = self.data[pos]
        if code == 0x71:
            return self.data[pos + 1], 2
        if code == 0x72:
            return unpack_from("<I", self.data, pos + 1)[0], 5
        if code == 0x94:
            return index, 1
        end = self.data.index(b"\n", pos)
        return int(self.data[pos + 1 : end]), end + 1 - pos

    def put_end(self, slot: int) -> int:
        """The byte after the PUT of `slot`."""
        index = self._index_of(slot)
        return self.walked.puts[index] + self.put_at(index)[1]

    def _index_of(self, slot: int) -> int:
        if self._put_index is None:
            puts = range(len(self.walked.puts))
            self._put_index = {self.put_at(index)[0]: index for index in puts}
        return self._put_index[slot]

    def uses_of(self, slots: Iterable[int]) -> dict[int, list[int]]:
        """The bytes of all GETs of these slots."""
        wanted, uses = set(slots), dict[int, list[int]]()
        for pos in self.walked.gets:
            slot = self.data[pos + 1] if self.data[pos] == 0x68 else self.get_at(pos)[0]
            if slot in wanted:
                uses.setdefault(slot, []).append(pos)
        return uses

    # -- planning ----------------------------------------------------------------------------
    def _lost_slots(self) -> dict[int, int]:
        """Slots whose PUT is cut or replaced, with the end of their definition."""
        puts, lost = self.walked.puts, dict[int, int]()
        spans = list(self.cuts)
        for table in (self.replacements, self.spellings):
            spans.extend((r.start, r.end) for r in table.values())
        for start, end in spans:
            at = bisect_left(puts, start)
            while at < len(puts) and puts[at] < end:
                slot = self.put_at(at)[0]
                lost[slot] = self._definition_end(slot, at)
                at += 1
        return lost

    def _definition_end(self, slot: int, put: int) -> int:
        """A mutable value ends after its last batch or BUILD, any other after its PUT."""
        end = self.walked.puts[put] + self.put_at(put)[1]
        node = self.walked.memo[slot]
        if type(node) in (Box, Obj):
            for batch in node.batches or ():
                end = max(end, batch.end + 1)
            if node.state is not None:
                end = max(end, node.state.end + 1)
        return end

    def _events(self) -> list[tuple[int, int, int, Any]]:
        """(byte, kind, -end, payload), in the order in which they must be met."""
        events: list[tuple[int, int, int, Any]] = []
        for start, data in self.inserted.items():
            events.append((start, _INSERT, 0, data))
        for start, end in self.cuts:
            events.append((start, _CUT, -end, end))
        for slot, end in self.lost.items():
            events.append((self.walked.memo_start[slot], _DEFINES, -end, slot))
        for start, replacement in {**self.spellings, **self.replacements}.items():
            events.append((start, _REPLACE, -replacement.end, replacement))
        for slot, uses in self.uses_of(self.lost).items() if self.lost else ():
            events.extend((pos, _FETCH, 0, slot) for pos in uses)
        events.extend((pos, _FRAME, 0, None) for pos in self.walked.frames)
        if self.explicit:
            for index, pos in enumerate(self.walked.puts):
                if self.data[pos] == 0x94:
                    events.append((pos, _MEMOIZE, 0, index))
        events.sort(key=lambda event: event[:3])
        return events

    # -- emitting ----------------------------------------------------------------------------
    def emit(self) -> bytes:
        """The edited stream. Raises PickleInvalid where a definition leads into itself."""
        self.lost = self._lost_slots()
        memoizes = 0x94 in map(self.data.__getitem__, self.walked.puts)
        adds = self.next_slot != self.first_fresh
        self.explicit = memoizes and bool(self.lost or adds or self.spellings)
        self.events = self._events()
        self.positions = [event[0] for event in self.events]
        self.out = bytearray()
        self.defined: set[int] = set()
        self.active: set[int] = set()
        self.frames = [_Frame(self.walked.start, self.walked.end, 0)]
        while self.frames:
            frame = self.frames[-1]
            if frame.event < len(self.events) and self.positions[frame.event] < frame.end:
                event = self.events[frame.event]
                frame.event += 1
                if event[0] >= frame.pos:
                    self._meet(frame, event)
            else:
                self._copy(frame, frame.end)
                self.active.discard(frame.slot)
                self.frames.pop()
        return bytes(self.out)

    def _meet(self, frame: _Frame, event: tuple[int, int, int, Any]) -> None:
        pos, kind, _, payload = event
        if kind == _CUT:
            if frame.slot < 0 or pos > frame.first:
                self._copy(frame, pos)
                frame.pos = max(frame.pos, payload)
        elif kind == _DEFINES:
            if payload in self.active and payload != frame.slot:
                raise self._cycle(payload)
            if frame.slot >= 0 and payload in self.defined and not self._is_edited(pos, payload):
                self._fetch_instead(frame, pos, payload)
        elif kind == _REPLACE:
            chosen = self._chosen(frame, payload)
            if chosen is None:
                return
            self._copy(frame, pos)
            self._replacement(chosen)
            frame.pos = chosen.end
        elif kind == _FETCH:
            self._fetch(frame, pos, payload)
        elif kind == _INSERT:
            self._copy(frame, pos)
            self.out += payload
        elif kind == _FRAME:
            self._copy(frame, pos)
            frame.pos = pos + 9
        else:
            self._copy(frame, pos)
            self.out += put_op(payload)
            frame.pos = pos + 1
            if payload in self.lost:
                self.defined.add(payload)

    def _is_edited(self, pos: int, slot: int) -> bool:
        """Whether an edit replaces the whole definition: the edit counts, not the old value."""
        replacement = self.replacements.get(pos)
        return replacement is not None and replacement.end >= self.lost[slot]

    def _chosen(self, frame: _Frame, replacement: Replacement) -> Replacement | None:
        """What to write for it: where it edits the one place from where this frame's value is
        being hoisted, the old value, in the new spelling if there is one.
        """
        is_role = (
            frame.slot >= 0
            and not replacement.same_meaning
            and replacement.start == frame.first
            and replacement.end >= self.lost[frame.slot]
        )
        return self.spellings.get(replacement.start) if is_role else replacement

    def _replacement(self, replacement: Replacement) -> None:
        fresh = replacement.fresh
        if fresh is not None and fresh in self.defined:
            self.out += get_op(fresh)
            return
        self.out += replacement.data
        if fresh is not None:
            self.out += put_op(fresh)
            self.defined.add(fresh)
        if replacement.defines is not None:
            self.defined.add(replacement.defines)

    def _fetch_instead(self, frame: _Frame, pos: int, slot: int) -> None:
        """A nested definition that stands in the output already."""
        self._copy(frame, pos)
        self.out += get_op(slot)
        frame.pos = self.lost[slot]

    def _fetch(self, frame: _Frame, pos: int, slot: int) -> None:
        self._copy(frame, pos)
        size = self.get_at(pos)[1]
        frame.pos = pos + size
        if slot in self.active and slot != frame.slot:
            raise self._cycle(slot)  # it is begun, perhaps not filled
        if slot in self.defined:
            self.out += self.data[pos : pos + size]
            return
        if slot in self.active or (frame.slot < 0 and self._inside_own(slot, pos)):
            raise self._cycle(slot)
        node, start = self.walked.memo[slot], self.walked.memo_start[slot]
        if type(node) in (str, Raw) or (type(node) is Global and self.data[start] == 0x63):
            self._literal(slot, start)
            return
        self.active.add(slot)
        at = bisect_left(self.positions, start)
        self.frames.append(_Frame(start, self.lost[slot], at, slot, start))

    def _inside_own(self, slot: int, pos: int) -> bool:
        """Whether a fetch of the stream itself stands inside the definition it fetches."""
        return bool(self.walked.memo_start[slot] <= pos < self.lost[slot])

    def _literal(self, slot: int, start: int) -> None:
        """The definition of a string, bytes or class name, as it was before any edit of its
        first occurrence.
        """
        put = self.walked.puts[self._index_of(slot)]
        node = self.walked.memo[slot]
        if slot in self.patched:
            self.out += self.patched[slot]
        elif self.respell is not None and type(node) is not Global:
            self.out += self.respell(node)
        else:
            self.out += self.data[start:put]
        self.out += put_op(slot) if self.explicit else self.data[put : self.put_end(slot)]
        self.defined.add(slot)

    def _copy(self, frame: _Frame, to: int) -> None:
        if frame.pos >= to:
            return
        self.out += self.data[frame.pos : to]
        if frame.slot >= 0:
            puts = self.walked.puts
            at = bisect_left(puts, frame.pos)
            while at < len(puts) and puts[at] < to:
                slot = self.put_at(at)[0]
                if slot in self.lost:
                    self.defined.add(slot)
                at += 1
        frame.pos = to

    def _cycle(self, slot: int) -> PickleInvalid:
        return PickleInvalid(
            "the pickle cannot be rewritten: a value that stays leads back into one that goes",
            offset=self.walked.memo_start[slot],
        )
