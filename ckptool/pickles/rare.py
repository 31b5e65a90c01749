"""The opcodes that honest torch files seldom or never hold.

Knows: their arguments, by the same rules as the loop in `walk`. Must not know: the loop.
Each function gets the two stacks and the byte of its opcode, and returns the byte after it.
Source: Lib/pickletools.py of CPython.
"""

from __future__ import annotations

import codecs
import warnings
from struct import Struct
from typing import Any

from ckptool.errors import LimitExceeded, PickleInvalid
from ckptool.limits import DEFAULT
from ckptool.pickles.nodes import Batch, Box, Global, Obj, Pers, Raw, Tup, Walked, weight_of

_UINT1 = Struct("<B").unpack_from
_UINT4 = Struct("<I").unpack_from
_INT4 = Struct("<i").unpack_from
_UINT8 = Struct("<Q").unpack_from


def too_long(pos: int) -> PickleInvalid:
    """What a length beyond the bytes left raises."""
    return PickleInvalid("a string or number is longer than the bytes left", offset=pos)


def weigh_keys(seen: Walked, batch: Batch) -> None:
    """Raise LimitExceeded once the keys of all dicts, each as often as the memo repeats it, have
    many more bytes than the pickle: each would be written out as often.
    """
    keys = batch.items[::2]
    try:
        seen.key_bytes += sum(map(len, keys))  # nearly always texts
    except TypeError:
        seen.key_bytes += sum(map(weight_of, keys))
    if seen.key_bytes > seen.most_key_bytes:
        text = f"keys of dicts of more than {seen.most_key_bytes:,} bytes in all, most of them repeated"
        raise LimitExceeded("key-bytes", text, offset=batch.end)


def name_global(seen: Walked, module: str, name: str, pos: int) -> Global:
    """One node for each (module, name), with the byte of its first use."""
    found = seen.globals.get((module, name))
    if found is None:
        found = seen.globals[(module, name)] = Global(module, name, pos)
    return found


def _counted(width: int) -> Any:
    """BINBYTES and friends: a length of `width` bytes, then raw bytes."""
    unpack = {1: _UINT1, 4: _UINT4, 8: _UINT8}[width]

    def read(seen: Walked, st: list[Any], ss: list[int], pos: int) -> int:
        first = pos + 1 + width
        end = first + unpack(seen.data, pos + 1)[0]
        if end > len(seen.data):
            raise too_long(pos)
        st.append(Raw(seen.data[pos], seen.data[first:end], first))
        ss.append(pos)
        return int(end)

    return read


def _binunicode8(seen: Walked, st: list[Any], ss: list[int], pos: int) -> int:
    end = pos + 9 + _UINT8(seen.data, pos + 1)[0]
    if end > len(seen.data):
        raise too_long(pos)
    st.append(str(seen.data[pos + 9 : end], "utf-8", "surrogatepass"))
    ss.append(pos)
    return int(end)


def _long4(seen: Walked, st: list[Any], ss: list[int], pos: int) -> int:
    size = _INT4(seen.data, pos + 1)[0]
    end = pos + 5 + size
    if size < 0 or end > len(seen.data):
        raise too_long(pos)
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


# CPython's own reader takes two letters that make 0 or 1 for a bool, the one in Python does not.
_TRUTHS = (b"-0", *(mark + digit for mark in (b"+", b" ", b"\t", b"\r", b"\v", b"\f") for digit in (b"0", b"1")))  # fmt: skip


def _text_value(code: int, line: bytes, pos: int) -> Any:
    """The value of a protocol 0 text opcode."""
    if code == 0x49 and line in (b"00", b"01"):
        return line == b"01"
    if code in (0x49, 0x4C):
        if code == 0x49 and len(line) == 2 and line in _TRUTHS:
            raise PickleInvalid("a number that some readers take for True or False", offset=pos)
        return _number(line.removesuffix(b"L") if code == 0x4C else line, pos)
    if code == 0x46:
        return float(line)
    if code == 0x56:
        return line.decode("raw-unicode-escape")
    return Raw(code, string_of(line, pos), pos + 2)


def string_of(line: bytes, pos: int) -> bytes:
    """What the quoted text of a STRING opcode stands for. Raises PickleInvalid."""
    quoted = len(line) > 1 and line[:1] == line[-1:] and line[:1] in (b"'", b'"')
    if not quoted:
        raise PickleInvalid("a STRING without quotes", offset=pos)
    plain = line[1:-1]
    return _unescaped(plain) if b"\\" in plain else plain


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
    seen.put(_slot(line, pos), st[-1], ss[-1])
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


RARE = {
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
    batch = Batch(op, items, starts, pos, mark)
    box.batches.append(batch)
    if op == 0x64:
        weigh_keys(seen, batch)
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
    found = name_global(seen, str(module, "utf-8"), str(name, "utf-8"), pos)
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


RARE_MARKED = {
    0x6C: _list_or_dict, 0x64: _list_or_dict, 0x91: _frozenset, 0x69: _inst, 0x6F: _obj,
    0x31: _pop_mark,
}  # fmt: skip
