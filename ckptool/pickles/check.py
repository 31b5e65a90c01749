"""The self-check after every rewrite: the new pickle says the old one, edits applied.

Knows: nodes and edits. Must not know: how the bytes were emitted.
Both pickles are walked side by side: same values, same order, same sharing (two names of one
object stay two names of one object). It costs about one more walk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckptool.errors import PickleInvalid
from ckptool.pickles.nodes import (
    NEWOBJ,
    NEWOBJ_EX,
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
    Walked,
    text_of,
)
from ckptool.pickles.splice import Edits

_NODES = frozenset((Tup, Box, Obj, Pers))
_FN_FIRST = frozenset((REDUCE, NEWOBJ, NEWOBJ_EX))
_BYTES = frozenset((0x43, 0x42, 0x8E))
_SPELLED = frozenset(("_codecs.encode", "__builtin__.bytearray", "__builtin__.set"))
_EXACT = frozenset((int, bool, tuple, type(None)))  # equal means the same, unlike 0.0 and -0.0
_SHORT = 64  # characters that cost less to compare than to remember


def check_rewrite(old: Walked, new: Walked, edits: Edits, root: Any = None) -> None:
    """Raise PickleInvalid unless `new` is `old` with exactly these edits; where `root` is set,
    unless it is that value of `old` alone.

    A failure is a bug of ours or a stream stranger than any pickler writes; either way
    nothing is written.
    """
    changed = (dict(edits.deletions), edits.dropped, edits.inserts)
    strings, values = edits.strings, edits.values
    whole = not (edits.dropped or edits.inserts)
    twins: dict[int, Any] = {}
    owners: dict[int, Any] = {}
    stack: list[tuple[Any, Any, int]] = [(old.root if root is None else root, new.root, -1)]
    while stack:
        a, b, start = stack.pop()
        kind = type(a)
        if kind is type(b) and kind in _EXACT and a == b:
            continue
        if kind is str and kind is type(b) and len(a) <= _SHORT and a == b and start not in strings:
            continue
        if start in values and getattr(a, "end", -1) < values[start][0]:
            continue  # the value edited there is this one, not the first thing inside it
        if twins.get(id(a), twins) is b:
            continue
        if kind is type(b) and (whole or kind is not Tup) and (inside := _inside(a, b)):
            _pair(a, b, start, twins, owners)
            stack.extend(inside)
            continue
        if start in strings and kind in (str, Raw):
            _same_text(strings[start], a, b, start)
            continue
        plain, spelled = _plain(a), _plain(b)
        if edits.decoded and kind is Raw and _is_decoded(a, spelled):
            continue
        if _has_identity(plain):
            _pair(a, b, start, twins, owners)
        elif type(plain) in (Raw, Global) or (type(plain) is str and len(plain) > _SHORT):
            twins[id(a)] = b  # one that is fetched a million times is compared once
        if type(plain) in _NODES:
            _same_shape(a, b, changed, start, stack)
        else:
            _same_scalar(plain, spelled, start)


def _inside(a: Any, b: Any) -> Iterable[tuple[Any, Any, int]] | None:
    """What the most frequent nodes, of one kind, hold side by side (checkpoints have little
    else); None where it takes a closer look.
    """
    kind = type(a)
    if kind is Tup and len(a.items) == len(b.items):
        return zip(a.items, b.items, a.starts, strict=True)
    if kind is Pers:
        return ((a.pid, b.pid, a.start),)
    if kind is not Obj or a.op != REDUCE or b.op != REDUCE or a.batches or b.batches:
        return None
    if a.state or b.state or type(a.fn) is not Global or a.fn.full in _SPELLED:
        return None
    return (a.fn, b.fn, a.start), (a.args, b.args, a.args_start)


def _pair(a: Any, b: Any, start: int, twins: dict[int, Any], owners: dict[int, Any]) -> None:
    """Each has the other and no third: two names of one object stay two names of one."""
    if id(a) in twins or id(b) in owners:
        raise _differs(start)
    twins[id(a)] = b
    owners[id(b)] = a


def _is_decoded(old: Raw, new: Any) -> bool:
    """Whether `new` is what stands for a byte string of Python 2."""
    return text_of(old) == new if type(new) is str else old.value == getattr(new, "value", None)


def _has_identity(node: Any) -> bool:
    """Whether two of it differ from one of it twice: what can be changed, and what holds it."""
    return type(node) in _NODES or (type(node) is Raw and _raw_kind(node) == "bytearray")


Changed = tuple["dict[int, int]", "dict[int, int]", "dict[int, tuple[bytes, ...]]"]
"""Deletions and dropped tuple items by their start, and inserts."""


def _same_shape(a: Any, b: Any, changed: Changed, start: int, stack: list[Any]) -> None:
    """Compare what two nodes are; what they hold goes on the stack."""
    if type(b) not in _NODES or _shape(a) != _shape(b):
        raise _differs(start)
    if type(a) is Tup:
        before, after = _tuple_members(a, b, changed)
    else:
        before, after = _members(a, changed[0]), _members(b, {})
    if len(before) != len(after):
        raise _differs(start)
    stack.extend((x, y, at) for (x, at), (y, _) in zip(before, after, strict=True))


def _tuple_members(old: Tup, new: Tup, changed: Changed) -> tuple[Any, Any]:
    """The items of both that must be the same: without those dropped and those inserted."""
    _, dropped, added = changed
    before = [row for row in zip(old.items, old.starts, strict=True) if row[1] not in dropped]
    if not added:
        return before, list(zip(new.items, new.starts, strict=True))
    after = []
    items = iter(zip(new.items, new.starts, strict=True))
    for start in (*old.starts, old.end):
        for _ in added.get(start, ()):
            next(items, None)
        if start != old.end and start not in dropped:
            after += [row for row in (next(items, None),) if row is not None]
    return before, after + list(items)


def _differs(start: int) -> PickleInvalid:
    text = "self-check failed: the rewritten pickle says something else"
    return PickleInvalid(text, offset=start if start >= 0 else None)


def _same_text(wanted: str, old: Any, new: Any, start: int) -> None:
    if type(new) is Raw and new.op in TEXT_OPS and type(old) is Raw:
        same = new.value == wanted.encode("utf-8", "surrogatepass")
    else:
        same = type(new) is str and new == wanted
    if not same:
        raise _differs(start)


def _same_scalar(a: Any, b: Any, start: int) -> None:
    if type(a) is not type(b):
        raise _differs(start)
    if type(a) is Global:
        same = (a.module, a.name) == (b.module, b.name)
    elif type(a) is Raw:
        same = _raw_kind(a) == _raw_kind(b) and a.value == b.value
    elif type(a) is float:
        same = a.hex() == b.hex()
    else:
        same = a == b
    if not same:
        raise _differs(start)


def _raw_kind(raw: Raw) -> str:
    return "text" if raw.op in TEXT_OPS else "bytes" if raw.op in _BYTES else "bytearray"


def _plain(node: Any) -> Any:
    """Protocol 2's spelling of bytes, bytearray and set as what it stands for."""
    if type(node) is not Obj or type(node.fn) is not Global or type(node.args) is not Tup:
        return node
    name, items = node.fn.full, node.args.items
    if name == "_codecs.encode" and len(items) == 2 and type(items[0]) is str:
        try:
            return Raw(0x43, items[0].encode("latin-1"), 0)
        except UnicodeEncodeError:
            return node
    if len(items) == 1 and name == "__builtin__.bytearray" and type(_plain(items[0])) is Raw:
        return Raw(0x96, _plain(items[0]).value, 0)
    return node


def _is_set_call(node: Any) -> bool:
    """set([…]): what protocol 2 writes for a set."""
    return (
        type(node) is Obj
        and type(node.fn) is Global
        and node.fn.full == "__builtin__.set"
        and type(node.args) is Tup
        and len(node.args.items) == 1
        and type(node.args.items[0]) is Box
        and node.state is None
        and not node.batches
    )


def _shape(node: Any) -> tuple[Any, ...]:
    """What kind of node it is, apart from what it holds."""
    if type(node) is Box:
        return ("box", node.kind, node.state is None)
    if _is_set_call(node):
        return ("box", SET, True)
    if type(node) is Obj:
        return ("call", node.op, node.state is None)
    return (type(node).__name__,)


def _members(node: Any, cut: dict[int, int]) -> list[tuple[Any, int]]:
    """(value, start) of everything under a node, cut items left out."""
    if type(node) is Pers:
        return [(node.pid, node.start)]
    found: list[tuple[Any, int]] = []
    if _is_set_call(node):
        node = node.args.items[0]
    elif type(node) is Obj:
        first = node.start if node.op in _FN_FIRST else -1
        found += [(node.fn, first), (node.args, node.args_start), (node.kwargs, -1)]
    for batch in node.batches or ():
        if not cut:
            found.extend(zip(batch.items, batch.starts, strict=True))
            continue
        step = 2 if batch.op in PAIR_OPS else 1
        for i in range(0, len(batch.items), step):
            if batch.starts[i] not in cut:
                found.extend(
                    zip(batch.items[i : i + step], batch.starts[i : i + step], strict=True)
                )
    if node.state is not None:
        found.append((node.state.value, node.state.start))
    return found
