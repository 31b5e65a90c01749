"""The classes of the standard library that come out of a file as themselves.

Knows: how each of them pickles itself, which arguments are harmless to give it. Must not know:
torch, numpy, files. A call in another shape than its class writes becomes a Record.
A new class is one function and one row in `CALLS`.
"""

from __future__ import annotations

import argparse
import datetime
import io
import pathlib
import re
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from ckptool.errors import UnsafePickle
from ckptool.formats.dicts import dict_items
from ckptool.formats.judge import inert_raw
from ckptool.models.tensors_values import Builder, Call, Knows, Way
from ckptool.pickles.nodes import DICT, LIST, SET, Box, Raw, Tup, elements, pairs, text_of
from ckptool.records import Record

_FACTORIES: dict[str, Callable[[], Any]] = {
    **{
        f"builtins.{kind.__name__}": kind
        for kind in (dict, list, set, int, float, str, tuple, bool)
    },
    "collections.OrderedDict": OrderedDict,
}
_RATIO = re.compile(r"[+-]?\d{1,4300}(/\d{1,4300})?", re.ASCII)
_DIGITS = 4_300  # of a decimal number in text: Python's own limit for whole numbers


def scalar(node: Any) -> Any:
    """A number, text, bytes or None as it stands; the node itself where it is something else."""
    if type(node) is Raw:
        text = text_of(node)
        return node.value if text is None else text
    return node


def are(nodes: Iterable[Any], *kinds: type) -> bool:
    """Whether every node is a plain value of one of these types (a bool is no int)."""
    return all(type(scalar(node)) in kinds for node in nodes)


# -- containers --------------------------------------------------------------------------------
def _ordered(build: Builder, call: Call) -> Way | None:
    """Also as Python 2 wrote it, with a list of pairs."""
    given = call.args[0] if len(call.args) == 1 and type(call.args[0]) is Box else None
    if call.args and given is None:
        return None
    rows = list(pairs(given)) if given is not None and given.kind == DICT else []
    if given is not None and given.kind == LIST:
        rows = dict_items(call.node) or []
        if len(rows) != sum(1 for _ in elements(given)):
            return None
    rows += pairs(call.node)

    def fill(made: OrderedDict[Any, Any]) -> None:
        build.fill_dict(made, rows)
        set_attributes(made, build.attributes(call.node))

    return Way(OrderedDict, (), fill)


def set_attributes(made: Any, attributes: dict[str, Any]) -> None:
    """Give an object attributes of its own. Raises UnsafePickle for one that would hide what its
    class has.
    """
    for name, value in attributes.items():
        if hasattr(type(made), name):
            text = f"an attribute that would hide what every {type(made).__name__} has"
            raise UnsafePickle(text, key=name[:80])
        setattr(made, name, value)


def _defaults(build: Builder, call: Call) -> Way | None:
    factory, *_ = call.args or [None]
    if factory is not None:
        factory = _FACTORIES.get(build.name_of(factory))
        if factory is None:
            return None
    rows = dict_items(call.node) or ()
    return Way(lambda: defaultdict(factory), (), lambda made: build.fill_dict(made, rows))


def _counter(build: Builder, call: Call) -> Way | None:
    given = call.args[0] if call.args else None
    if len(call.args) > 1 or (given is not None and (type(given) is not Box or given.kind != DICT)):
        return None
    rows = [*(pairs(given) if given is not None else ()), *pairs(call.node)]
    return Way(Counter, (), lambda made: build.fill_dict(made, rows))


def _deque(build: Builder, call: Call) -> Way | None:
    """deque(() or [], maxlen), then its items."""
    given, *rest = call.args or [()]
    if rest and not (len(rest) == 1 and (rest[0] is None or are(rest, int))):
        return None
    if given != () and not (type(given) is Box and given.kind == LIST):
        return None
    items = [*(elements(given) if given != () else ()), *elements(call.node)]

    def fill(made: deque[Any]) -> None:
        made.extend([build.get(item) for item, *_ in items])

    most = rest[0] if rest else None
    return Way(lambda: deque(maxlen=most), (), fill)


def _set(build: Builder, call: Call) -> Way | None:
    nodes = _listed(call)
    if nodes is None:
        return None
    return Way(set, (), lambda made: build.fill_set(made, nodes))


def _frozenset(build: Builder, call: Call) -> Way | None:
    nodes = _listed(call)
    if nodes is None:
        return None
    return Way(lambda: frozenset(build.hashed(nodes)), nodes)


def _listed(call: Call) -> list[Any] | None:
    """The nodes of the items of set([…]); None for another argument."""
    if not call.args:
        return []
    given = call.args[0]
    if len(call.args) > 1 or type(given) not in (Box, Tup, tuple):
        return None
    if type(given) is Box:
        return [v for v, *_ in elements(given)] if given.kind in (LIST, SET) else None
    return list(given.items) if type(given) is Tup else []


# -- bytes and numbers -------------------------------------------------------------------------
def _bytes(build: Builder, call: Call) -> Way | None:
    """bytes(), and what protocol 2 makes of bytes: encode(text, 'latin1')."""
    data = inert_raw(call.node) if call.args else b""
    return None if data is None else Way(lambda: data)


def _bytearray(build: Builder, call: Call) -> Way | None:
    """bytearray(b'…'), also bytearray('…', 'latin-1')."""
    if not call.args:
        return Way(bytearray)
    data = inert_raw(call.args[0]) if len(call.args) == 1 else None
    if len(call.args) == 2 and text_of(call.args[1]) in ("latin1", "latin-1"):
        data = (text_of(call.args[0]) or "").encode("latin-1")
    return None if data is None else Way(lambda: bytearray(data))


def _numbers(make: Callable[..., Any], least: int, most: int, *kinds: type) -> Knows:
    """A class that takes `least` to `most` plain values of these types."""

    def known(build: Builder, call: Call) -> Way | None:
        if not least <= len(call.args) <= most or not are(call.args, *kinds):
            return None
        return Way(lambda: make(*map(scalar, call.args)))

    return known


def _fraction(build: Builder, call: Call) -> Way | None:
    """Fraction('3/4') or Fraction(3, 4); an exponent in the text could cost forever."""
    text = text_of(call.args[0]) if len(call.args) == 1 else None
    if text is not None and _RATIO.fullmatch(text):
        return Way(lambda: Fraction(text))
    if are(call.args, int) and len(call.args) in (1, 2):
        return Way(lambda: Fraction(*call.args))
    return None


def _decimal(build: Builder, call: Call) -> Way | None:
    text = text_of(call.args[0]) if len(call.args) == 1 else None
    return Way(lambda: Decimal(text)) if text is not None and len(text) <= _DIGITS else None


# -- objects with attributes -------------------------------------------------------------------
def _namespace(make: Callable[[], Any]) -> Knows:
    def known(build: Builder, call: Call) -> Way | None:
        if call.args or call.node.batches:
            return None
        return Way(make, (), lambda made: set_attributes(made, build.attributes(call.node)))

    return known


def _uuid(build: Builder, call: Call) -> Way | None:
    rows = dict_items(call.node.state.value) if call.node.state is not None else None
    found = {text_of(key): value for key, value, *_ in rows or ()}
    number = found.get("int")
    if call.args or type(number) is not int or not 0 <= number < 1 << 128:
        return None
    return Way(lambda: uuid.UUID(int=number))


def _stream(build: Builder, call: Call) -> Way | None:
    """BytesIO: its state is (bytes, position, attributes)."""
    state = call.node.state
    parts = state.value.items if state is not None and type(state.value) is Tup else []
    data = inert_raw(parts[0]) if len(parts) == 3 else None
    if call.args or data is None or type(parts[1]) is not int or parts[2] is not None:
        return None

    def make() -> io.BytesIO:
        made = io.BytesIO(data)
        made.seek(parts[1])
        return made

    return Way(make)


# -- times and paths ---------------------------------------------------------------------------
def _moment(make: type, size: int) -> Knows:
    """A date or time from its own `size` bytes, and perhaps a zone."""

    def known(build: Builder, call: Call) -> Way | None:
        data = inert_raw(call.args[0]) if call.args else None
        if data is None or len(data) != size or len(call.args) > 2:
            return None
        return Way(lambda: _with_zone(make, data, build, call), call.args[1:])

    return known


def _with_zone(make: type, data: bytes, build: Builder, call: Call) -> Any:
    """A zone of a class that is not imported makes a record of the whole."""
    zones = [build.of(arg) for arg in call.args[1:]]
    if any(not isinstance(zone, datetime.tzinfo) for zone in zones):
        return Record(call.name, (data, *zones))
    return make(data, *zones)


def _zone(build: Builder, call: Call) -> Way | None:
    """timezone(timedelta, name)."""
    if not 1 <= len(call.args) <= 2:
        return None
    return Way(lambda: datetime.timezone(*map(build.of, call.args)), call.args)


def _path(build: Builder, call: Call) -> Way | None:
    """A path of this system as itself, of another one as a pure path."""
    if not are(call.args, str):
        return None
    kind = call.name.rpartition(".")[2]
    pure = pathlib.PureWindowsPath if "Windows" in kind else pathlib.PurePosixPath
    native = type(pathlib.Path())
    make: Any = native if issubclass(native, pure) and not kind.startswith("Pure") else pure
    return Way(lambda: make(*map(text_of, call.args)))


_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
CALLS: dict[str, Knows] = {
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": _defaults,
    "collections.Counter": _counter,
    "collections.deque": _deque,
    "builtins.set": _set,
    "builtins.frozenset": _frozenset,
    "builtins.bytes": _bytes,
    "_codecs.encode": _bytes,
    "builtins.bytearray": _bytearray,
    "builtins.complex": _numbers(complex, 2, 2, int, float),
    "builtins.slice": _numbers(slice, 3, 3, int, type(None)),
    "builtins.range": _numbers(range, 3, 3, int),
    "builtins.xrange": _numbers(range, 3, 3, int),
    "fractions.Fraction": _fraction,
    "decimal.Decimal": _decimal,
    "argparse.Namespace": _namespace(argparse.Namespace),
    "types.SimpleNamespace": _namespace(types.SimpleNamespace),
    "uuid.UUID": _uuid,
    "_io.BytesIO": _stream,
    "datetime.datetime": _moment(datetime.datetime, 10),
    "datetime.date": _moment(datetime.date, 4),
    "datetime.time": _moment(datetime.time, 6),
    "datetime.timedelta": _numbers(datetime.timedelta, 3, 3, int),
    "datetime.timezone": _zone,
    **{f"{home}.{name}": _path for home in ("pathlib", "pathlib._local") for name in _PATHS},
}
