"""Shared by the tests of the pickle engine: nodes as values, random graphs, canonical text."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import io
import pickle
import pickletools
import struct

from ckptool.pickles.nodes import (
    DICT,
    FROZENSET,
    LIST,
    Box,
    Obj,
    Raw,
    Tup,
    elements,
    pairs,
    text_of,
)
from ckptool.pickles.splice import Edits

BYTEARRAY8 = 0x96


# -- streams by hand ---------------------------------------------------------------------------
def text(value: str) -> bytes:
    """BINUNICODE."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def stream(*parts: bytes, protocol: int = 2) -> bytes:
    """PROTO, the parts, STOP."""
    return b"\x80" + bytes((protocol,)) + b"".join(parts) + b"."


def opcodes(data: bytes) -> list[str]:
    return [op.name for op, _, _ in pickletools.genops(data)]


# -- nodes as Python values ----------------------------------------------------------------------
_CALLS = {
    "__builtin__.set": set,
    "builtins.set": set,
    "__builtin__.frozenset": frozenset,
    "builtins.frozenset": frozenset,
    "__builtin__.bytes": bytes,
    "builtins.bytes": bytes,
    "__builtin__.bytearray": bytearray,
    "builtins.bytearray": bytearray,
    "_codecs.encode": str.encode,
}


def value_of(node):
    """Plain data from nodes: what pickle.loads would say."""
    kind = type(node)
    if kind is Tup:
        return tuple(value_of(item) for item in node.items)
    if kind is Raw:
        return bytearray(node.value) if node.op == BYTEARRAY8 else node.value
    if kind is Box and node.kind == DICT:
        return {value_of(key): value_of(value) for key, value, *_ in pairs(node)}
    if kind is Box:
        items = [value_of(item) for item, *_ in elements(node)]
        return items if node.kind == LIST else set(items)
    if kind is Obj and node.op == FROZENSET:
        return frozenset(value_of(item) for item in node.args.items)
    if kind is Obj:
        return _CALLS[node.fn.full](*value_of(node.args))
    return node


def strict(value) -> str:
    """Text that differs where types or the order of dict items differ."""
    if isinstance(value, dict):
        inside = ",".join(f"{strict(k)}:{strict(v)}" for k, v in value.items())
    elif isinstance(value, (list, tuple)):
        inside = ",".join(map(strict, value))
    elif isinstance(value, (set, frozenset)):
        inside = ",".join(sorted(map(strict, value)))
    else:
        inside = repr(value)
    return f"{type(value).__name__}({inside})"


# -- objects that checkpoints hold -----------------------------------------------------------------
class SubDict(dict):
    pass


class SubList(list):
    pass


class Slotted:
    __slots__ = ("a", "b")


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Reduced:
    def __init__(self, *parts):
        self.parts = parts

    def __reduce__(self):
        return (Reduced, self.parts)


class KeywordMade:
    def __new__(cls, *, x):
        made = object.__new__(cls)
        made.x = x
        return made

    def __getnewargs_ex__(self):
        return (), {"x": self.x}


class Outer:
    class Inner:
        pass


class Storage:
    """Stands for a torch storage: pickled as a persistent id."""

    def __init__(self, key, location):
        self.key = key
        self.location = location


class Tensor:
    def __init__(self, storage):
        self.storage = storage

    def __reduce__(self):
        return (Tensor, (self.storage,))


def _persistent_id(_, obj):
    if isinstance(obj, Storage):
        return ("storage", Storage, obj.key, obj.location, 4)
    return None


class Pickler(pickle.Pickler):
    persistent_id = _persistent_id


class SlowPickler(pickle._Pickler):
    persistent_id = _persistent_id


class Unpickler(pickle.Unpickler):
    def __init__(self, file):
        super().__init__(file)
        self.storages = {}

    def persistent_load(self, pid):
        return self.storages.setdefault(pid[2], Storage(pid[2], pid[3]))


def load(data: bytes):
    return Unpickler(io.BytesIO(data)).load()


def dump(value, protocol: int, pickler=Pickler, fast: bool = False) -> bytes:
    file = io.BytesIO()
    writer = pickler(file, protocol)
    writer.fast = fast
    writer.dump(value)
    return file.getvalue()


# -- random graphs -----------------------------------------------------------------------------
NAMES = ["cuda:0", "cpu", "storage", *(f"k{i}" for i in range(8)), "é\udc80", "x" * 300]
LEAVES = [
    lambda r: None,
    lambda r: r.random() < 0.5,
    lambda r: r.randint(-3, 300),
    lambda r: r.randint(-(2**70), 2**70),
    lambda r: r.randint(0, 1000) / 8,
    lambda r: r.choice(NAMES),
    lambda r: r.choice(NAMES),
    lambda r: b"z" * r.choice([0, 3, 300]),
    lambda r: bytearray(b"ab"),
    lambda r: r.choice([Colour.RED, Colour, len]),
    lambda r: datetime.date(2020, 1, 2),
    lambda r: 1j,
    lambda r: decimal.Decimal("1.5"),
    lambda r: slice(1, 2),
]


class Graph:
    """Grows random objects that share parts, strings and storages."""

    def __init__(self, rnd):
        self.r = rnd
        self.pool = []
        self.storages = [Storage(str(i), rnd.choice(["cuda:0", "cuda:1", "cpu"])) for i in range(3)]

    def root(self, cyclic: bool):
        names = [f"k{i}" for i in range(self.r.randint(0, 6))]
        made = self.r.choice([dict, dict, collections.OrderedDict, SubDict])()
        for name in names:
            key = self.r.choice([name, NAMES[NAMES.index(name)]])
            made[key] = self.value(3)
        if type(made) is not dict:
            made._metadata = self.value(2)
        if cyclic:
            self._close_cycles(made)
        return made

    def _close_cycles(self, root):
        for _ in range(3):
            owner = self.r.choice([*self.pool, root])
            target = self.r.choice([*self.pool, root])
            if isinstance(owner, list):
                owner.append(target)
            elif isinstance(owner, dict) and owner is not root:
                owner["cycle"] = target

    def value(self, depth):
        roll = self.r.random()
        if self.pool and roll < 0.2:
            return self.r.choice(self.pool)
        if depth <= 0 or roll < 0.45:
            made = self.r.choice(LEAVES)(self.r)
        else:
            made = self.r.choice(MAKERS)(self, depth - 1, self.r.randint(0, 4))
        self.pool.append(made)
        return made

    def values(self, depth, count):
        return [self.value(depth) for _ in range(count)]

    def named(self, depth, count):
        return [(self.r.choice(NAMES), value) for value in self.values(depth, count)]


def _ordered(g, depth, count):
    made = collections.OrderedDict(g.named(depth, count))
    made._metadata = {g.r.choice(NAMES): 1}
    return made


def _subdict(g, depth, count):
    made = SubDict(enumerate(g.values(depth, count)))
    made.extra = g.value(depth)
    return made


def _slotted(g, depth, count):
    made = Slotted()
    made.a, made.b = g.value(depth), count
    return made


def _set(g, depth, count):
    kind = g.r.choice([set, frozenset])
    return kind(g.r.choice(["a", "cpu", 1, 2.5, (1, 2)]) for _ in range(count))


MAKERS = [
    lambda g, d, n: g.values(d, n),
    lambda g, d, n: tuple(g.values(d, n)),
    lambda g, d, n: dict(g.named(d, n)),
    lambda g, d, n: dict(g.named(d, n)),
    _ordered,
    _subdict,
    lambda g, d, n: SubList(g.values(d, n)),
    _slotted,
    lambda g, d, n: argparse.Namespace(**{f"k{i}": v for i, v in enumerate(g.values(d, n))}),
    lambda g, d, n: Reduced(*g.values(d, n)),
    lambda g, d, n: KeywordMade(x=g.value(d)),
    _set,
    lambda g, d, n: Tensor(g.r.choice(g.storages)),
    lambda g, d, n: Tensor(g.r.choice(g.storages)),
]


# -- canonical text ------------------------------------------------------------------------------
_ATOMS = (int, float, complex, str, bytes, type(None), type, enum.Enum, type(len))
_PARTS = {
    Slotted: lambda x: [x.a, x.b],
    Reduced: lambda x: [x.parts],
    Storage: lambda x: [x.key, x.location],
    Tensor: lambda x: [x.storage],
}


def _parts(value) -> list:
    if isinstance(value, (list, tuple)):
        found = list(value)
    elif isinstance(value, dict):
        found = [part for item in value.items() for part in item]
    elif type(value) in _PARTS:
        return _PARTS[type(value)](value)
    else:
        found = []
    return [*found, vars(value)] if getattr(value, "__dict__", None) else found


def canonical(root) -> str:
    """Text of an object graph; what is met again is a number, so sharing shows."""
    numbers: dict[int, int] = {}
    out: list[str] = []
    stack = [root]
    while stack:
        value = stack.pop()
        if isinstance(value, _ATOMS):
            out.append(f"{type(value).__name__} {value!r}")
        elif id(value) in numbers and value not in ((), frozenset()):
            out.append(f"#{numbers[id(value)]}")
        else:
            numbers[id(value)] = len(numbers)
            parts = _parts(value)
            out.append(f"{type(value).__name__}/{len(parts)}")
            if isinstance(value, (set, frozenset)):
                out.append(strict(value))
            elif not parts:
                out.append("" if hasattr(value, "__dict__") else repr(value))
            stack.extend(reversed(parts))
    return "\n".join(out)


# -- edits and what they should do -------------------------------------------------------------
def rename(key: str) -> str:
    return f"module.{key}"


def all_values(root):
    """Every object under a root, once."""
    seen, stack = {}, [root]
    while stack:
        value = stack.pop()
        if id(value) not in seen and not isinstance(value, _ATOMS):
            seen[id(value)] = value
            stack.extend(_parts(value))
    return list(seen.values())


def edits_of(walked, renamed=(), dropped=(), retag=False) -> Edits:
    """Edits of the root's keys and of the storages' devices."""
    edits = Edits()
    closers = {batch.end for batch in walked.root.batches or () if batch.op == 0x73}
    for key, _, start, _, end in pairs(walked.root):
        if key in dropped:
            edits.deletions.append((start, end + (end in closers)))
        elif key in renamed:
            edits.strings[start] = rename(key)
    for pers in walked.persistent if retag else ():
        if text_of(pers.pid.items[3]).startswith("cuda"):
            edits.strings[pers.pid.starts[3]] = "cpu"
    return edits


def edited(root, renamed=(), dropped=(), retag=False):
    """The same edits on the loaded object, in place."""
    items = [(rename(k) if k in renamed else k, v) for k, v in root.items() if k not in dropped]
    root.clear()
    root.update(items)
    for value in all_values(root) if retag else ():
        if isinstance(value, Storage) and value.location.startswith("cuda"):
            value.location = "cpu"
    return root
