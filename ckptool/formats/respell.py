"""Nodes of one pickle as expressions of another, without a memo.

Knows: which opcodes protocol 2 spells a node with. Must not know: files, what objects mean.
What is shared is written where it stands, so sizes are bounded; what holds itself is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptool.errors import LimitExceeded, Unsupported
from ckptool.pickles.nodes import (
    DICT,
    FROZENSET,
    LIST,
    NEWOBJ,
    PAIR_OPS,
    REDUCE,
    SET,
    TEXT_OPS,
    Box,
    Global,
    Obj,
    Pers,
    Raw,
    Tup,
    items_of,
    text_of,
)
from ckptool.pickles.splice import text_literal
from ckptool.pickles.write import call, named, plain, tuple_of

_DEEP = 100
_MAKERS = {DICT: b"}", LIST: b"]"}
_HINT = "load and save it with torch, if you trust it, and give that file"


class Respeller:
    """Writes nodes; `storage(pers)` is the persistent id that stands for one of the old pickle.

    Raises Unsupported for what has no spelling, LimitExceeded beyond `most_bytes`.
    """

    def __init__(self, storage: Callable[[Pers], bytes], most_bytes: int) -> None:
        self._storage = storage
        self._left = most_bytes
        self._above: set[int] = set()

    def expression(self, node: Any) -> bytes:
        """The bytes that make this value."""
        kind = type(node)
        if kind not in (Tup, Box, Obj, Pers):
            return self._counted(_leaf(node))
        if id(node) in self._above:
            raise Unsupported("an object that holds itself", hint=_HINT)
        if len(self._above) >= _DEEP:
            raise LimitExceeded("nesting", f"objects inside each other, more than {_DEEP} deep")
        self._above.add(id(node))
        made = self._counted(_SPELLERS[kind](self, node))
        self._above.discard(id(node))
        return made

    def _counted(self, made: bytes) -> bytes:
        self._left -= len(made)
        if self._left < 0:
            raise LimitExceeded("value-bytes", "a short pickle that spells a very large object")
        return made

    def _tuple(self, node: Tup) -> bytes:
        return tuple_of(map(self.expression, node.items))

    def _pers(self, node: Pers) -> bytes:
        return self._storage(node)

    def _box(self, node: Box) -> bytes:
        if node.state is not None:
            raise Unsupported("a state given to a plain container", hint=_HINT)
        if node.kind == SET:
            rows = [value for batch in node.batches for value in batch.items]
            return call(named("builtins", "set"), self._list(rows))
        return _MAKERS[node.kind] + self._batches(node)

    def _list(self, rows: list[Any]) -> bytes:
        return b"](" + b"".join(map(self.expression, rows)) + b"e" if rows else b"]"

    def _batches(self, node: Box | Obj) -> bytes:
        found = []
        for batch in node.batches or ():
            body = b"".join(map(self.expression, batch.items))
            if body:
                found.append(b"(" + body + (b"u" if batch.op in PAIR_OPS else b"e"))
        return b"".join(found)

    def _obj(self, node: Obj) -> bytes:
        state, args = node.state, items_of(node.args)
        late = state is not None and any(batch.end > state.end for batch in node.batches or ())
        if node.op == FROZENSET:
            rows = [value for batch in node.batches or () for value in batch.items]
            return call(named("builtins", "frozenset"), self._list(rows or list(args or ())))
        if node.op not in (REDUCE, NEWOBJ) or args is None or node.kwargs is not None or late:
            raise Unsupported("an object made in an unusual way", hint=_HINT)
        made = self.expression(node.fn) + tuple_of(map(self.expression, args))
        made += b"R" if node.op == REDUCE else b"\x81"
        made += self._batches(node)
        return made if state is None else made + self.expression(state.value) + b"b"


_SPELLERS: dict[type, Callable[[Respeller, Any], bytes]] = {
    Tup: Respeller._tuple,
    Pers: Respeller._pers,
    Box: Respeller._box,
    Obj: Respeller._obj,
}


def _leaf(node: Any) -> bytes:
    if type(node) is Global:
        odd = node.computed or "\n" in node.full or "." in node.name
        if odd or not node.full.isascii():
            raise Unsupported("a class with an unusual name", hint=_HINT)
        return named(node.module, node.name)
    if type(node) is Raw:
        return _raw(node)
    return plain(node)


def _raw(node: Raw) -> bytes:
    if node.op in TEXT_OPS:
        return text_literal(text_of(node) or "")
    args = (text_literal(node.value.decode("latin-1")), text_literal("latin1"))
    made = call(named("_codecs", "encode"), *args)
    return call(named("builtins", "bytearray"), made) if node.op == 0x96 else made
