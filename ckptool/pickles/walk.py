"""The opcode loop: one pass over a pickle into inert nodes. Nothing is imported or called.

Knows: the pickle opcodes, protocols 0 to 5. Must not know: files, torch's meanings.
Rules: no recursion; containers from the file are never hashed; the memo is a dict; every
length is checked against the bytes left before a slice; the collector is paused, since it
would walk millions of young nodes again and again. The most frequent opcodes stand first.
Source: Lib/pickletools.py of CPython for the opcodes and their arguments.
"""

from __future__ import annotations

import codecs
import gc
import struct
import warnings
from itertools import repeat
from struct import Struct
from typing import Any

from ckptool.errors import CkptError, LimitExceeded, PickleInvalid
from ckptool.limits import DEFAULT, Limits
from ckptool.pickles.nodes import Batch, Box, Global, Obj, Pers, Raw, State, Tup, Walked

_UINT1 = Struct("<B").unpack_from
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
    seen = Walked(data, start, start, None, 0, {}, {}, [], [], [], [], {}, [], [], [])
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
    if isinstance(error, KeyError):
        return "a memo slot is fetched that was never set"
    if isinstance(error, IndexError):
        return "the pickle takes from an empty stack, or ends early"
    if isinstance(error, struct.error):
        return "the pickle ends inside a number"
    return "an opcode has an impossible argument"


def _run(seen: Walked, limits: Limits) -> None:  # noqa: C901 - one loop is the design
    """The loop. Stacks are pairs: nodes in `st`, their start offsets in `ss`; MARK opens a
    new pair, so that nothing can reach below a MARK. `limit` is the end of the open frame,
    of the data while none is open.
    """
    b = seen.data
    n = limit = len(b)
    pos = seen.start
    st: list[Any] = []
    ss: list[int] = []
    outer: list[tuple[list[Any], list[int], int]] = []
    memo, memo_start = seen.memo, seen.memo_start
    on_get, on_put, on_pers, on_call = (
        seen.gets.append, seen.puts.append, seen.persistent.append, seen.calls.append,
    )  # fmt: skip
    named: dict[tuple[bytes, bytes], Global] = {}
    deepest = 2 * limits.nesting
    framed = False
    try:
        for _ in repeat(None, limits.opcode_count):
            if pos >= limit:
                if pos > limit or pos >= n:
                    raise _crossing(pos, limit, n)
                limit = n
                framed = False
            c = b[pos]
            if c == 0x72:  # LONG_BINPUT
                i = _UINT4(b, pos + 1)[0]
                memo[i] = st[-1]
                memo_start[i] = ss[-1]
                on_put(pos)
                pos += 5
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
                    raise _too_long(pos)
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
                st[-1] = Tup([st[-1], last], [ss[-1], at], pos)
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
            elif c == 0x71:  # BINPUT
                i = b[pos + 1]
                memo[i] = st[-1]
                memo_start[i] = ss[-1]
                on_put(pos)
                pos += 2
            elif c == 0x85:  # TUPLE1
                st[-1] = Tup([st[-1]], [ss[-1]], pos)
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
                pos += 1
            elif c == 0x73:  # SETITEM
                batch = Batch(c, st[-2:], ss[-2:], pos, -1)
                del st[-2:], ss[-2:]
                _add(seen, batch, st[-1], ss[-1])
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
                    found = _name_global(seen, module, str(name[1], "utf-8"), pos)
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
                    raise _too_long(pos)
                st.append(int.from_bytes(b[pos + 2 : end], "little", signed=True))
                ss.append(pos)
                pos = end
            elif c == 0x94:  # MEMOIZE
                i = len(memo)
                memo[i] = st[-1]
                memo_start[i] = ss[-1]
                on_put(pos)
                pos += 1
            elif c == 0x8C:  # SHORT_BINUNICODE
                end = pos + 2 + b[pos + 1]
                if end > n:
                    raise _too_long(pos)
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
                    found = _name_global(seen, node, name_text, pos)
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
            elif c in _RARE:
                pos = _RARE[c](seen, st, ss, pos)
            elif c in _RARE_MARKED:
                node_items, node_starts = st, ss
                st, ss, mark = outer.pop()
                pos = _RARE_MARKED[c](seen, st, ss, pos, (node_items, node_starts, mark))
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


def _crossing(pos: int, limit: int, n: int) -> PickleInvalid:
    if pos > limit and limit < n:
        return PickleInvalid("an opcode crosses the end of its frame", offset=pos)
    return PickleInvalid("the pickle ends without STOP", offset=pos)


def _too_long(pos: int) -> PickleInvalid:
    return PickleInvalid("a string or number is longer than the bytes left", offset=pos)


def _bad_frame(pos: int) -> PickleInvalid:
    return PickleInvalid("a frame crosses the end of another or of the file", offset=pos)


def _bad_protocol(seen: Walked, pos: int) -> PickleInvalid:
    if pos != seen.start:
        return PickleInvalid(f"PROTO {seen.protocol} where none may stand", offset=pos)
    return PickleInvalid(f"pickle protocol {seen.protocol} does not exist", offset=pos)


def _name_global(seen: Walked, module: str, name: str, pos: int) -> Global:
    """One node for each (module, name), with the byte of its first use."""
    found = seen.globals.get((module, name))
    if found is None:
        found = seen.globals[(module, name)] = Global(module, name, pos)
    return found


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


# -- opcodes that honest torch files seldom or never hold -------------------------------------
def _counted(width: int) -> Any:
    """BINBYTES and friends: a length of `width` bytes, then raw bytes."""
    unpack = {1: _UINT1, 4: _UINT4, 8: _UINT8}[width]

    def read(seen: Walked, st: list[Any], ss: list[int], pos: int) -> int:
        first = pos + 1 + width
        end = first + unpack(seen.data, pos + 1)[0]
        if end > len(seen.data):
            raise _too_long(pos)
        st.append(Raw(seen.data[pos], seen.data[first:end], first))
        ss.append(pos)
        return int(end)

    return read


def _binunicode8(seen: Walked, st: list[Any], ss: list[int], pos: int) -> int:
    end = pos + 9 + _UINT8(seen.data, pos + 1)[0]
    if end > len(seen.data):
        raise _too_long(pos)
    st.append(str(seen.data[pos + 9 : end], "utf-8", "surrogatepass"))
    ss.append(pos)
    return int(end)


def _long4(seen: Walked, st: list[Any], ss: list[int], pos: int) -> int:
    size = _INT4(seen.data, pos + 1)[0]
    end = pos + 5 + size
    if size < 0 or end > len(seen.data):
        raise _too_long(pos)
    st.append(int.from_bytes(seen.data[pos + 5 : end], "little", signed=True))
    ss.append(pos)
    return int(end)


def _newobj_ex(seen: Walked, st: list[Any], ss: list[int], pos: int) -> int:
    kwargs, args = st.pop(), st.pop()
    ss.pop()
    args_start = ss.pop()
    node = Obj(0x92, st[-1], args, ss[-1], args_start, pos)
    node.kwargs = kwargs
    st[-1] = node
    seen.calls.append(node)
    return pos + 1


def _dup(seen: Walked, st: list[Any], ss: list[int], pos: int) -> int:
    st.append(st[-1])
    ss.append(pos)
    seen.oddities.setdefault("DUP", pos)
    return pos + 1


def _line(seen: Walked, pos: int) -> tuple[bytes, int]:
    end = seen.data.index(b"\n", pos + 1)
    return seen.data[pos + 1 : end], end + 1


def _number(text: bytes, pos: int) -> int:
    if len(text) > DEFAULT.digits:
        raise PickleInvalid(f"a number of {len(text):,} digits in text", offset=pos)
    return int(text, 0)


def _slot(text: bytes, pos: int) -> int:
    """A memo slot in text; more than 32 bits could not be written again."""
    if not text.isdigit() or len(text) > 10 or int(text) >> 32:
        raise PickleInvalid("a memo slot that is no 32-bit number", offset=pos)
    return int(text)


def _text_value(code: int, line: bytes, pos: int) -> Any:
    """The value of a protocol 0 text opcode."""
    if code == 0x49 and line in (b"00", b"01"):
        return line == b"01"
    if code in (0x49, 0x4C):
        return _number(line.removesuffix(b"L") if code == 0x4C else line, pos)
    if code == 0x46:
        return float(line)
    if code == 0x56:
        return line.decode("raw-unicode-escape")
    quoted = len(line) > 1 and line[:1] == line[-1:] and line[:1] in (b"'", b'"')
    if not quoted:
        raise PickleInvalid("a STRING without quotes", offset=pos)
    plain = line[1:-1]
    if b"\\" in plain:
        plain = _unescaped(plain)
    return Raw(code, plain, pos + 2)


def _unescaped(text: bytes) -> bytes:
    """What pickle itself makes of a Python 2 repr; its warning about odd escapes is noise here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return bytes(codecs.escape_decode(text)[0])


def _text(seen: Walked, st: list[Any], ss: list[int], pos: int) -> int:
    line, end = _line(seen, pos)
    st.append(_text_value(seen.data[pos], line, pos))
    ss.append(pos)
    return end


def _put_text(seen: Walked, st: list[Any], ss: list[int], pos: int) -> int:
    line, end = _line(seen, pos)
    i = _slot(line, pos)
    seen.memo[i] = st[-1]
    seen.memo_start[i] = ss[-1]
    seen.puts.append(pos)
    return end


def _get_text(seen: Walked, st: list[Any], ss: list[int], pos: int) -> int:
    line, end = _line(seen, pos)
    st.append(seen.memo[_slot(line, pos)])
    ss.append(pos)
    seen.gets.append(pos)
    return end


def _persid_text(seen: Walked, st: list[Any], ss: list[int], pos: int) -> int:
    line, end = _line(seen, pos)
    node = Pers(line.decode("utf-8"), pos, end - 1)
    st.append(node)
    ss.append(pos)
    seen.persistent.append(node)
    return end


_RARE = {
    0x43: _counted(1), 0x55: _counted(1), 0x42: _counted(4), 0x54: _counted(4),
    0x8E: _counted(8), 0x96: _counted(8), 0x8D: _binunicode8, 0x8B: _long4,
    0x92: _newobj_ex, 0x32: _dup, 0x49: _text, 0x4C: _text, 0x46: _text, 0x56: _text,
    0x53: _text, 0x70: _put_text, 0x67: _get_text, 0x50: _persid_text,
}  # fmt: skip

Marked = tuple[list[Any], list[int], int]


def _list_or_dict(seen: Walked, st: list[Any], ss: list[int], pos: int, marked: Marked) -> int:
    items, starts, mark = marked
    op = seen.data[pos]
    box = Box(0x5D if op == 0x6C else 0x7D, mark)
    if op == 0x64 and len(items) & 1:
        raise PickleInvalid("a dict is filled with an odd number of items", offset=pos)
    box.batches.append(Batch(op, items, starts, pos, mark))
    st.append(box)
    ss.append(mark)
    return pos + 1


def _frozenset(_seen: Walked, st: list[Any], ss: list[int], pos: int, marked: Marked) -> int:
    items, starts, mark = marked
    node = Obj(0x91, None, Tup(items, starts, pos), mark, mark, pos)
    st.append(node)
    ss.append(mark)
    return pos + 1


def _inst(seen: Walked, st: list[Any], ss: list[int], pos: int, marked: Marked) -> int:
    items, starts, mark = marked
    module, middle = _line(seen, pos)
    name, end = _line(seen, middle - 1)
    found = _name_global(seen, str(module, "utf-8"), str(name, "utf-8"), pos)
    node = Obj(0x69, found, Tup(items, starts, pos), mark, mark, end - 1)
    st.append(node)
    ss.append(mark)
    seen.calls.append(node)
    return end


def _obj(seen: Walked, st: list[Any], ss: list[int], pos: int, marked: Marked) -> int:
    items, starts, mark = marked
    node = Obj(0x6F, items[0], Tup(items[1:], starts[1:], pos), mark, starts[0], pos)
    st.append(node)
    ss.append(mark)
    seen.calls.append(node)
    return pos + 1


def _pop_mark(_seen: Walked, _st: list[Any], _ss: list[int], pos: int, _marked: Marked) -> int:
    return pos + 1


_RARE_MARKED = {
    0x6C: _list_or_dict, 0x64: _list_or_dict, 0x91: _frozenset, 0x69: _inst, 0x6F: _obj,
    0x31: _pop_mark,
}  # fmt: skip
