"""A fresh pickle from plain values, in the opcodes that torch's restricted loader accepts.

Knows: protocol 2 (formats 4.5). Must not know: files, torch's meanings.
Every function gives the bytes of one expression; `whole` makes a pickle of one. No memo:
what stands twice is written twice, and persistent ids say what is shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from struct import pack
from typing import Any

from ckptool.errors import Unsupported
from ckptool.pickles.splice import text_literal


def whole(expression: bytes) -> bytes:
    """A pickle, protocol 2, of one expression."""
    return b"\x80\x02" + expression + b"."


def integer(value: int) -> bytes:
    """The shortest of BININT1, BININT2, BININT and LONG1."""
    if 0 <= value < 1 << 8:
        return b"K" + bytes((value,))
    if 0 <= value < 1 << 16:
        return b"M" + pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(data) > 255:
        raise Unsupported("a number of more than 2,000 bits cannot be written")
    return b"\x8a" + bytes((len(data),)) + data


def tuple_of(items: Iterable[bytes]) -> bytes:
    """A tuple of expressions."""
    parts = list(items)
    if not parts:
        return b")"
    if len(parts) <= 3:
        return b"".join(parts) + b"\x85\x86\x87"[len(parts) - 1 : len(parts)]
    return b"(" + b"".join(parts) + b"t"


def integers(values: Iterable[int]) -> bytes:
    """A tuple of numbers: a shape, strides."""
    return tuple_of(map(integer, values))


def named(module: str, name: str) -> bytes:
    """A class or function by its name."""
    return f"c{module}\n{name}\n".encode()


def call(function: bytes, *args: bytes) -> bytes:
    """REDUCE of a function with these arguments."""
    return function + tuple_of(args) + b"R"


def persistent(pid: bytes) -> bytes:
    """BINPERSID of an expression."""
    return pid + b"Q"


ORDERED = named("collections", "OrderedDict") + b")R"
"""An empty OrderedDict."""


def filled(owner: bytes, items: Iterable[tuple[str, bytes]]) -> bytes:
    """`owner` (an expression of a dict) with text keys set."""
    body = b"".join(text_literal(key) + value for key, value in items)
    return owner + b"(" + body + b"u" if body else owner


def built(owner: bytes, state: Mapping[str, bytes]) -> bytes:
    """`owner` with a dict as its state (BUILD)."""
    return owner + filled(b"}", state.items()) + b"b"


def plain(value: Any) -> bytes:
    """None, bool, int, float, str, and lists, tuples and dicts of them.

    Raises Unsupported for anything else.
    """
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return integer(value)
    if isinstance(value, float):
        return b"G" + pack(">d", value)
    if isinstance(value, str):
        return text_literal(value)
    if isinstance(value, Mapping):
        body = b"".join(plain(key) + plain(item) for key, item in value.items())
        return b"}(" + body + b"u" if body else b"}"
    if isinstance(value, tuple):
        return tuple_of(map(plain, value))
    if isinstance(value, list):
        return b"](" + b"".join(map(plain, value)) + b"e" if value else b"]"
    raise Unsupported(f"a value of the type {type(value).__name__} is not written")
