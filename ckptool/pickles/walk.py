"""The opcode loop: one pass over a pickle into inert nodes. Nothing is imported or called.

Knows: the pickle opcodes, protocols 0 to 5. Must not know: files, torch's meanings.
Rules: no recursion; containers from the file are never hashed; the memo is a dict; every
length is checked against the bytes left before a slice; the collector is paused, since it
would walk millions of young nodes again and again. The most frequent opcodes stand first.
Source: Lib/pickletools.py of CPython for the opcodes and their arguments.
"""

from __future__ import annotations

import gc
import struct
from itertools import repeat
from struct import Struct
from typing import Any

from ckptool.errors import CkptError, LimitExceeded, PickleInvalid
from ckptool.limits import DEFAULT, Limits
from ckptool.pickles.nodes import Batch, Box, Global, Obj, Pers, State, Tup, Walked
from ckptool.pickles.rare import RARE, RARE_MARKED, name_global, too_long, weigh_keys

_UINT4 = Struct("<I").unpack_from
_INT4 = Struct("<i").unpack_from
_UINT2 = Struct("<H").unpack_from
_UINT8 = Struct("<Q").unpack_from
_DOUBLE = Struct(">d").unpack_from
_BOX_STARTS = frozenset((0x7D, 0x5D, 0x8F, 0x28))
_FAILURES = (IndexError, KeyError, struct.error, ValueError, OverflowError)


def walk(
    data: bytes,
    start: int = 0,
    limits: Limits = DEFAULT,
    member: str = "data.pkl",
) -> Walked:
    """Walk the pickle that starts at byte `start` of `data`.

    Raises PickleInvalid (with the byte) or LimitExceeded. The error's `partial` attribute
    holds what was seen until then: a payload may stand before the damage.
    """
    if len(data) - start > limits.pickle_bytes:
        raise LimitExceeded("pickle-bytes", f"the pickle has {len(data) - start:,} bytes")
    seen = Walked(data, start)
    seen.most_key_bytes = len(data) + limits.repeated_key_bytes
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        _run(seen, limits)
    except CkptError as error:
        _annotate(error, seen, member)
        raise
    except _FAILURES as error:
        reason = _explain(error, seen)
        invalid = PickleInvalid(reason, offset=seen.end)
        _annotate(invalid, seen, member)
        raise invalid from None
    finally:
        if was_enabled:
            gc.enable()
    if len(seen.puts) != len(seen.memo):
        seen.oddities["memo slot set twice"] = seen.start
    return seen


def _annotate(error: CkptError, seen: Walked, member: str) -> None:
    error.member = member
    error.partial = seen  # type: ignore[attr-defined]
    if error.offset is None:
        error.offset = seen.end


def _explain(error: Exception, seen: Walked) -> str:
    """A reason in words for an exception of the loop."""
    if seen.end >= len(seen.data):
        return "the pickle ends without STOP"
    if isinstance(error, KeyError) or _is_get(seen):
        return "a memo slot is fetched that was never set"
    if isinstance(error, IndexError):
        return "the pickle takes from an empty stack, or ends early"
    if isinstance(error, struct.error):
        return "the pickle ends inside a number"
    return "an opcode has an impossible argument"


def _is_get(seen: Walked) -> bool:
    """Whether the loop stopped at a GET that is whole."""
    code, room = seen.data[seen.end], len(seen.data) - seen.end
    return room > {0x68: 1, 0x6A: 4}.get(code, room)


def _run(seen: Walked, limits: Limits) -> None:  # noqa: C901 - one loop is the design
    """The loop. Stacks are pairs: nodes in `st`, their start offsets in `ss`; MARK opens a
    new pair, so that nothing can reach below a MARK. `limit` is the end of the open
    frame while `framed`.
    """
    b = seen.data
    n = limit = len(b)
    pos = seen.start
    st: list[Any] = []
    ss: list[int] = []
    outer: list[tuple[list[Any], list[int], int]] = []
    memo, memo_start, free = seen.slots()
    on_get, on_put, on_pers, on_call = (
        seen.gets.append, seen.puts.append, seen.persistent.append, seen.calls.append,
    )  # fmt: skip
    named: dict[tuple[bytes, bytes], Global] = {}
    deepest = 2 * limits.nesting
    framed = False
    try:
        for _ in repeat(None, limits.opcode_count):
            if framed and pos >= limit:
                if pos > limit:
                    raise PickleInvalid("an opcode crosses the end of its frame", offset=pos)
                framed = False
            c = b[pos]
            if c == 0x72:  # LONG_BINPUT
                i = _UINT4(b, pos + 1)[0]
                if i == free:
                    memo.append(st[-1])
                    memo_start.append(ss[-1])
                    free += 1
                else:
                    seen.put(i, st[-1], ss[-1])
                    memo, memo_start, free = seen.slots()
                on_put(pos)
                pos += 5
            elif c == 0x71:  # BINPUT
                i = b[pos + 1]
                if i == free:
                    memo.append(st[-1])
                    memo_start.append(ss[-1])
                    free += 1
                else:
                    seen.put(i, st[-1], ss[-1])
                    memo, memo_start, free = seen.slots()
                on_put(pos)
                pos += 2
            elif c == 0x4B:  # BININT1
                st.append(b[pos + 1])
                ss.append(pos)
                pos += 2
            elif c == 0x68:  # BINGET
                st.append(memo[b[pos + 1]])
                ss.append(pos)
                on_get(pos)
                pos += 2
            elif c == 0x58:  # BINUNICODE
                end = pos + 5 + _UINT4(b, pos + 1)[0]
                if end > n:
                    raise too_long(pos)
                st.append(str(b[pos + 5 : end], "utf-8", "surrogatepass"))
                ss.append(pos)
                pos = end
            elif c == 0x28:  # MARK
                if len(outer) >= deepest:
                    raise LimitExceeded("nesting", f"more than {deepest} open marks", offset=pos)
                outer.append((st, ss, pos))
                st = []
                ss = []
                pos += 1
            elif c == 0x74:  # TUPLE
                node: Any = Tup(st, ss, pos)
                st, ss, mark = outer.pop()
                st.append(node)
                ss.append(mark)
                pos += 1
            elif c == 0x52:  # REDUCE
                args = st.pop()
                at = ss.pop()
                node = st[-1] = Obj(c, st[-1], args, ss[-1], at, pos)
                on_call(node)
                pos += 1
            elif c == 0x86:  # TUPLE2
                last = st.pop()
                at = ss.pop()
                st[-1] = Tup((st[-1], last), (ss[-1], at), pos)
                pos += 1
            elif c == 0x6A:  # LONG_BINGET
                st.append(memo[_UINT4(b, pos + 1)[0]])
                ss.append(pos)
                on_get(pos)
                pos += 5
            elif c == 0x29:  # EMPTY_TUPLE
                st.append(())
                ss.append(pos)
                pos += 1
            elif c == 0x51:  # BINPERSID
                node = st[-1] = Pers(st[-1], ss[-1], pos)
                on_pers(node)
                pos += 1
            elif c == 0x89 or c == 0x88:  # NEWFALSE NEWTRUE
                st.append(c == 0x88)
                ss.append(pos)
                pos += 1
            elif c == 0x4D:  # BININT2
                st.append(_UINT2(b, pos + 1)[0])
                ss.append(pos)
                pos += 3
            elif c == 0x85:  # TUPLE1
                st[-1] = Tup((st[-1],), (ss[-1],), pos)
                pos += 1
            elif c == 0x87:  # TUPLE3
                if len(st) < 3:
                    raise IndexError
                node = Tup(st[-3:], ss[-3:], pos)
                del st[-2:], ss[-2:]
                st[-1] = node
                pos += 1
            elif c == 0x75 or c == 0x65 or c == 0x90:  # SETITEMS APPENDS ADDITEMS
                batch = Batch(c, st, ss, pos, 0)
                st, ss, batch.mark = outer.pop()
                _add(seen, batch, st[-1], ss[-1])
                if c == 0x75:
                    weigh_keys(seen, batch)
                pos += 1
            elif c == 0x73:  # SETITEM
                batch = Batch(c, st[-2:], ss[-2:], pos, -1)
                del st[-2:], ss[-2:]
                _add(seen, batch, st[-1], ss[-1])
                weigh_keys(seen, batch)
                pos += 1
            elif c == 0x61:  # APPEND
                batch = Batch(c, [st.pop()], [ss.pop()], pos, -1)
                _add(seen, batch, st[-1], ss[-1])
                pos += 1
            elif c == 0x7D or c == 0x5D or c == 0x8F:  # EMPTY_DICT EMPTY_LIST EMPTY_SET
                st.append(Box(c, pos))
                ss.append(pos)
                pos += 1
            elif c == 0x47:  # BINFLOAT
                st.append(_DOUBLE(b, pos + 1)[0])
                ss.append(pos)
                pos += 9
            elif c == 0x4E:  # NONE
                st.append(None)
                ss.append(pos)
                pos += 1
            elif c == 0x4A:  # BININT
                st.append(_INT4(b, pos + 1)[0])
                ss.append(pos)
                pos += 5
            elif c == 0x63:  # GLOBAL
                mid = b.index(b"\n", pos + 1)
                end = b.index(b"\n", mid + 1)
                name = (b[pos + 1 : mid], b[mid + 1 : end])
                found = named.get(name)
                if found is None:
                    module = str(name[0], "utf-8")
                    found = name_global(seen, module, str(name[1], "utf-8"), pos)
                    named[name] = found
                st.append(found)
                ss.append(pos)
                pos = end + 1
            elif c == 0x62:  # BUILD
                state = State(st.pop(), ss.pop(), pos)
                _build(seen, state, st[-1], ss[-1])
                pos += 1
            elif c == 0x81:  # NEWOBJ
                args = st.pop()
                at = ss.pop()
                node = st[-1] = Obj(c, st[-1], args, ss[-1], at, pos)
                on_call(node)
                pos += 1
            elif c == 0x8A:  # LONG1
                end = pos + 2 + b[pos + 1]
                if end > n:
                    raise too_long(pos)
                st.append(int.from_bytes(b[pos + 2 : end], "little", signed=True))
                ss.append(pos)
                pos = end
            elif c == 0x94:  # MEMOIZE
                seen.put(len(memo), st[-1], ss[-1])
                memo, memo_start, free = seen.slots()
                on_put(pos)
                pos += 1
            elif c == 0x8C:  # SHORT_BINUNICODE
                end = pos + 2 + b[pos + 1]
                if end > n:
                    raise too_long(pos)
                st.append(str(b[pos + 2 : end], "utf-8", "surrogatepass"))
                ss.append(pos)
                pos = end
            elif c == 0x93:  # STACK_GLOBAL
                name_text = st.pop()
                ss.pop()
                node = st[-1]
                if type(name_text) is not str or type(node) is not str:
                    found = Global("?", "?", pos)
                    found.computed = True
                    seen.globals.setdefault((f"(computed at byte {pos})", "?"), found)
                else:
                    found = name_global(seen, node, name_text, pos)
                seen.stack_globals.append((ss[-1], pos, found))
                st[-1] = found
                pos += 1
            elif c == 0x95:  # FRAME
                size = _UINT8(b, pos + 1)[0]
                seen.frames.append(pos)
                pos += 9
                if framed or size > n - pos:
                    raise _bad_frame(pos - 9)
                limit = pos + size
                framed = True
            elif c == 0x80:  # PROTO
                seen.protocol = b[pos + 1]
                if pos != seen.start or seen.protocol > 5:
                    raise _bad_protocol(seen, pos)
                pos += 2
            elif c == 0x2E:  # STOP
                pos += 1
                if framed and pos != limit:
                    raise PickleInvalid("STOP stands inside a frame", offset=pos - 1)
                if outer or not st:
                    raise PickleInvalid("STOP with an open mark or an empty stack", offset=pos - 1)
                seen.root = st[-1]
                if len(st) > 1:
                    seen.oddities["values left on the stack"] = ss[0]
                return
            elif c in RARE:
                pos = RARE[c](seen, st, ss, pos)
                memo, memo_start, free = seen.slots()
            elif c in RARE_MARKED:
                node_items, node_starts = st, ss
                st, ss, mark = outer.pop()
                pos = RARE_MARKED[c](seen, st, ss, pos, (node_items, node_starts, mark))
            elif c == 0x30:  # POP takes an empty MARK too
                if not st and outer:
                    st, ss, _ = outer.pop()
                else:
                    st.pop()
                    ss.pop()
                pos += 1
            else:
                raise PickleInvalid(f"opcode 0x{c:02x} is {_REFUSED.get(c, 'unknown')}", offset=pos)
        raise LimitExceeded("opcodes", f"more than {limits.opcode_count:,} opcodes", offset=pos)
    finally:
        seen.end = pos


_REFUSED = {
    0x82: "EXT1: an extension code that runs whatever is registered under it",
    0x83: "EXT2: an extension code that runs whatever is registered under it",
    0x84: "EXT4: an extension code that runs whatever is registered under it",
    0x97: "NEXT_BUFFER: data that is not in the file",
    0x98: "READONLY_BUFFER: data that is not in the file",
}


def _bad_frame(pos: int) -> PickleInvalid:
    return PickleInvalid("a frame crosses the end of another or of the file", offset=pos)


def _bad_protocol(seen: Walked, pos: int) -> PickleInvalid:
    if pos != seen.start:
        return PickleInvalid(f"PROTO {seen.protocol} where none may stand", offset=pos)
    return PickleInvalid(f"pickle protocol {seen.protocol} does not exist", offset=pos)


def _add(seen: Walked, batch: Batch, owner: Any, start: int) -> None:
    """Give a batch to its owner; pairs must be even and fit a dict."""
    kind = type(owner)
    paired = batch.op in (0x75, 0x73)
    if paired and len(batch.items) & 1:
        raise PickleInvalid("a dict is filled with an odd number of items", offset=batch.end)
    if kind is Box:
        wanted = 0x7D if paired else 0x8F if batch.op == 0x90 else 0x5D
        if owner.kind != wanted:
            raise PickleInvalid("items are added to a container of another kind", offset=batch.end)
        if seen.data[start] not in _BOX_STARTS:
            seen.oddities["items added to a value fetched from the memo"] = batch.end
    elif kind is Obj:
        if owner.batches is None:
            owner.batches = []
        if owner.start != start:
            seen.oddities["items added to a value fetched from the memo"] = batch.end
    else:
        raise PickleInvalid("items are added to a value that cannot hold them", offset=batch.end)
    owner.batches.append(batch)


def _build(seen: Walked, state: State, owner: Any, start: int) -> None:
    """Remember the state BUILD gives; on anything but an object it is a call of its own."""
    if type(owner) not in (Box, Obj):
        seen.builds_on_others.append((state.end, owner))
        seen.oddities["BUILD on a value that is no object"] = state.end
        return
    if owner.state is not None or owner.start != start:
        seen.oddities["BUILD twice or on a value fetched from the memo"] = state.end
        seen.builds_on_others.append((state.end, owner))
    owner.state = state
