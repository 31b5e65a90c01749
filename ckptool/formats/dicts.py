"""Dicts, however a pickle spells them: plain, ordered, Python 2's pair lists, object states.

Knows: nodes. Must not know: tensors, containers.
"""

from __future__ import annotations

from typing import Any

from ckptool.errors import PickleInvalid
from ckptool.formats.judge import inert_raw
from ckptool.formats.measures import global_name
from ckptool.formats.repeated import ITEM_BYTES, Weigher
from ckptool.limits import DEFAULT
from ckptool.pickles.nodes import (
    DICT,
    LIST,
    PAIR_OPS,
    Box,
    Obj,
    Pers,
    Raw,
    Tup,
    elements,
    items_of,
    pairs,
    text_of,
)

_MANY = 1_000
_PRINTED = 4_096  # bits of a number that Python still writes in decimal
EXACT = 1 << 53
"""Whole numbers below have hashes of their own, and are floats of their own."""
SCALARS = (int, float, bool, type(None))
Row = tuple[Any, Any, int, int, int]
Rows = list[Row]


def dict_items(node: Any) -> list[tuple[Any, Any, int, int, int]] | None:
    """(key, value, key start, value start, end) of a dict-like node; None for another.

    Python 2 wrote OrderedDict's items as a list of pairs among its arguments.
    """
    if type(node) is Box:
        return list(pairs(node)) if node.kind == 0x7D else None
    if type(node) is not Obj:
        return None
    filled = any(batch.op in PAIR_OPS for batch in node.batches or ())
    rows = _given(node, filled)
    return [*(rows or []), *pairs(node)] if filled else rows


# Which argument of a dict-like class is a mapping, or a list of pairs, that it begins with.
_BEGINS_WITH = {"OrderedDict": 0, "Counter": 0, "AttributeDict": 0, "defaultdict": 1}
_DICTS = ("collections.OrderedDict", "collections.Counter", "collections.defaultdict")


def _given(node: Obj, filled: bool) -> Rows | None:
    """What a dict is made of before items are added: what its argument held by then. None for
    what is no dict; of others than Python's own this is asked only where items are added too.

    Raises PickleInvalid for an argument that no pickler writes.
    """
    name = global_name(node.fn) or ""
    if name not in _DICTS and not filled:
        return None
    at = _BEGINS_WITH.get(name.rpartition(".")[2], 1 << 16)
    args = items_of(node.args) or ()
    first = args[at] if len(args) > at else ()
    if type(first) is Box and first.kind == DICT:
        return list(pairs(_as_of(first, node.end)))
    if type(first) is Box and first.kind == LIST and not name.endswith("Counter"):
        rows = [_listed_pair(row, node.end) for row in elements(_as_of(first, node.end))]
        if None not in rows:
            return [row for row in rows if row is not None]
    elif type(first) not in (Box, Obj, Tup):
        return []  # Python takes none of these
    raise PickleInvalid("a dict that is made of what is neither dict nor pairs", offset=node.end)


def _as_of(box: Box, end: int) -> Box:
    """A container without what was added to it after byte `end`."""
    if all(batch.end < end for batch in box.batches):
        return box
    before = Box(box.kind, box.start)
    before.batches = [batch for batch in box.batches if batch.end < end]
    return before


def _listed_pair(element: tuple[Any, int, int], end: int) -> Row | None:
    """What a list or tuple of two was at byte `end`; None for all else, text of two letters too."""
    node, _, _ = element
    if type(node) is Box and node.kind == LIST:
        parts = list(elements(_as_of(node, end)))
        if len(parts) == 2:
            return parts[0][0], parts[1][0], parts[0][1], parts[1][1], parts[1][2]
    if type(node) is Tup and len(node.items) == 2:
        return node.items[0], node.items[1], node.starts[0], node.starts[1], node.end
    return None


def state_items(node: Obj) -> dict[str, Any] | None:
    """The dict BUILD gave an object, by text keys (the last wins); None without one."""
    if node.state is None or type(node.state.value) is not Box:
        return None
    rows = dict_items(node.state.value)
    if rows is None:
        return None
    return {name: v for k, v, *_ in rows if (name := text_of(k)) is not None}


def is_optimizer(rows: Rows) -> bool:
    """Whether these are the items of an optimizer's state_dict: few, `state` and `param_groups`
    among them.
    """
    return len(rows) < _MANY and {"state", "param_groups"} <= {text_of(key) for key, *_ in rows}


def kind_word(value: Any) -> str:
    """What a value is called in a list of entries."""
    if type(value) in (*SCALARS, str):
        return type(value).__name__
    if type(value) is Box:
        return {0x7D: "dict", 0x5D: "list"}.get(value.kind, "set")
    if type(value) is Obj:
        return global_name(value.fn) or "object"
    return {Tup: "tuple", Raw: "bytes", Pers: "storage"}.get(type(value), "value")


def key_text(key: Any) -> str:
    """A dict key as text: strings as they are, other scalars as Python writes them."""
    text = text_of(key)
    if text is not None:
        return text
    raw = inert_raw(key)
    if raw is not None:
        return repr(raw)
    if type(key) is Tup:
        return f"({', '.join(key_text(item) if type(item) is not Tup else '…' for item in key.items[:8])})"
    if type(key) is int and key.bit_length() > _PRINTED:
        return f"<{key.bit_length()}-bit int>"
    return repr(key) if type(key) in (*SCALARS, tuple) else f"<{type(key).__name__.lower()}>"


def key_part(key: Any) -> str | int:
    """A dict key as part of a path: an int stays one, but for a large one, whose hash a file can
    make that of any other.
    """
    return key if type(key) is int and abs(key) < EXACT else key_text(key)


def key_parts(rows: Rows) -> list[str | int]:
    """The parts of places that the keys of one dict give. Keys that are not equal have parts of
    their own, though they read alike: 1.5 and '1.5', two objects.
    """
    parts = [key_part(row[0]) for row in rows]
    taken = set(parts)
    if len(taken) == len(parts):
        return parts  # nearly always
    named: dict[str | int, dict[Any, str | int]] = {}
    last: dict[str | int, int] = {}
    for at, part in enumerate(parts):
        known = named.setdefault(part, {})
        key = _comparable(rows[at][0])
        if not known:
            known[key] = part
        elif key not in known:
            count = last.get(part, 1) + 1
            while f"{part} ({count})" in taken:
                count += 1
            last[part] = count
            known[key] = f"{part} ({count})"
            taken.add(known[key])
        parts[at] = known[key]
    return parts


def twice(keys: list[str]) -> tuple[str, ...]:
    """Texts that stand more than once, in their order."""
    counts: dict[str, int] = {}
    for key in keys:
        counts[key] = counts.get(key, 0) + 1
    return tuple(key for key, count in counts.items() if count > 1)


def repeated_keys(rows: Rows) -> tuple[str, ...]:
    """Keys that a dict sets more than once, as Python compares them: 1, 1.0 and True are one."""
    if len({row[0] for row in rows if type(row[0]) is str}) == len(rows):
        return ()  # nearly always
    seen: set[Any] = set()
    met: set[int] = set()
    found: dict[str, None] = {}
    for key, *_ in rows:
        same = None if id(key) in met else _comparable(key)
        met.add(id(key))
        if same is None or same in seen:
            found[key_text(key)] = None
        seen.add(same)
    return tuple(found)


def _comparable(key: Any, inside: bool = False) -> Any:
    """Something equal for equal keys, whose hashes no file can make collide: that of a large
    number can, that of its digits not. What other rules compare is equal to itself alone.
    """
    kind = type(key)
    if kind is float and key.is_integer():
        key, kind = int(key), int
    if kind is int or kind is bool:
        printed = key.bit_length() <= _PRINTED
        return int(key) if abs(key) < EXACT else ("number", hex(key) if printed else id(key))
    if kind is float and key == key:
        return "number", key.hex()
    if kind is Tup and not inside and len(key.items) <= _MANY:
        return ("tuple", *(_comparable(item, inside=True) for item in key.items))
    text, raw = text_of(key), inert_raw(key)
    if text is None and raw is None:
        return "same", id(key)
    return ("bytes", raw) if text is None else text


def texts_of(node: Any) -> frozenset[str]:
    """The strings of a set node (protocol 2 writes set([…]))."""
    if type(node) is Obj:
        args = items_of(node.args) or ()
        node = args[0] if args else None
    if type(node) is not Box:
        return frozenset()
    return frozenset(text for value, _, _ in elements(node) if (text := text_of(value)) is not None)


def module_parts(node: Obj) -> dict[str, Any] | None:
    """The attributes of a pickled nn.Module; None for another object."""
    state = state_items(node)
    if state is None or "_modules" not in state or "_parameters" not in state:
        return None
    return state


def reconstructed(node: Obj) -> str | None:
    """The class that copy_reg._reconstructor makes an instance of."""
    args = items_of(node.args) or ()
    return global_name(args[0]) if args else None


def metadata_of(node: Any) -> dict[str, Any] | None:
    """A state_dict's `_metadata`: module path to its plain values; None without one."""
    if type(node) is not Obj:
        return None
    rows = dict_items((state_items(node) or {}).get("_metadata"))
    if rows is None:
        return None
    layers = _Layers()
    return {key_text(key): layers.read(value) for key, value, *_ in rows}


class _Layers:
    """Scalars and texts of dicts, and of dicts in them: spectral_norm keeps its version in one. A
    dict that the memo of the pickle repeats is read once, and weighed each time.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[dict[str, Any], int]] = {}
        self._weigher = Weigher("layer versions", DEFAULT.repeated_value_bytes)

    def read(self, node: Any, depth: int = 2) -> dict[str, Any]:
        """The values of one. Raises PickleInvalid for a number that Python would not write out,
        LimitExceeded for much that is repeated.
        """
        known = self._known.get((id(node), depth))
        if known is not None:
            self._weigher.repeat(known[1])
            return known[0]
        out: dict[str, Any] = {}
        size_bytes = 0  # about, in a report
        for key, value, *_ in dict_items(node) or ():
            size_bytes += ITEM_BYTES
            if type(value) in (*SCALARS, str):
                out[key_text(key)] = value
                size_bytes += self._checked(key, value)
            elif depth > 1 and dict_items(value) is not None:
                out[key_text(key)] = self.read(value, depth - 1)
                size_bytes += self._known[id(value), depth - 1][1]
        self._known[id(node), depth] = out, size_bytes
        return out

    def _checked(self, key: Any, value: Any) -> int:
        if type(value) is int and value.bit_length() > _PRINTED:
            text = f"a layer version of {value.bit_length():,} bits"
            raise PickleInvalid(text, key=key_text(key))
        if type(value) is not str:
            return 0
        self._weigher.repeat(len(value))  # honest ones have no texts
        return len(value)
