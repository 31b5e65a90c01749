"""From inert nodes to Python values, without running what a pickle says.

Knows: how values hold each other, so that sharing and cycles come out as they are in the file;
which keys may be hashed. Must not know: what single classes mean (`tensors_calls`,
`tensors_rebuild` do), files.
Nothing recurses. A container is made empty and filled later; a tuple or a call needs the values
it is made from first. What no table knows becomes a Record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from ckptool.errors import CkptError, KeyDuplicate, LimitExceeded, PickleInvalid, UnsafePickle
from ckptool.formats.dicts import dict_items
from ckptool.formats.vetted import mapped
from ckptool.pickles.nodes import (
    DICT,
    FROZENSET,
    LIST,
    REDUCE,
    Box,
    Global,
    Obj,
    Pers,
    Raw,
    Tup,
    Walked,
    elements,
    items_of,
    pairs,
    text_of,
)
from ckptool.records import Record, Reference

_NODES = frozenset((Box, Obj, Tup, Pers, Global, Raw))
_BYTEARRAY = 0x96  # the opcode BYTEARRAY8
_KEY_PARTS = 10_000  # values inside one key that is a tuple: shared ones could be without end
_HUGE, _HUGE_KEYS = (1 << 61) - 1, 1_000  # numbers from which on many can have one hash
_MISSING = object()


class Way(NamedTuple):
    """How a node becomes a value: `needs` are the nodes whose values `make` takes, `fill`
    completes the value once it is known to others.
    """

    make: Callable[[], Any]
    needs: Iterable[Any] = ()
    fill: Callable[[Any], None] | None = None


class Call(NamedTuple):
    """A call that was never made: the name of what is called, as Python 3 spells it, and the
    nodes of its arguments.
    """

    name: str
    args: Sequence[Any]
    node: Obj


class Knows(Protocol):
    """What a table of known calls gives: a way, or None for a Record."""

    def __call__(self, build: Builder, call: Call, /) -> Way | None:
        """How the call becomes a value."""


class Builder:
    """Values of the nodes of one pickle, each made once.

    `known` maps names of calls to what they make, `references` names of classes to themselves;
    `special(node)` may say what an object or a persistent id is before anything else is asked.
    """

    def __init__(
        self,
        walked: Walked,
        known: dict[str, Knows],
        references: Callable[[str], Any],
        special: Callable[[Builder, Any], Way | None],
    ) -> None:
        if walked.builds_on_others:
            offset, _ = walked.builds_on_others[0]
            text = "BUILD changes a value that has been built: what comes out depends on its class"
            raise UnsafePickle(text, offset=offset)
        self.protocol = walked.protocol
        self._known = known
        self._references = references
        self._special = special
        self._made: dict[int, Any] = {}
        self._fills: deque[tuple[Any, Callable[[Any], None]]] = deque()
        self._huge_keys = 0

    def value(self, node: Any) -> Any:
        """The value of a node, complete. Raises CkptError."""
        found = self.get(node)
        while self._fills:
            made, fill = self._fills.popleft()
            fill(made)
        return found

    def get(self, node: Any) -> Any:
        """The value of a node, which may still be filled later."""
        self._make(node)
        return self.of(node)

    def of(self, node: Any) -> Any:
        """The value of a node that is made."""
        kind = type(node)
        if kind not in _NODES:
            return node
        return self._made[id(node)]

    def _make(self, root: Any) -> None:
        stack, opened = [root], set()
        while stack:
            node = stack[-1]
            if type(node) not in _NODES or id(node) in self._made:
                stack.pop()
                continue
            way = self._way(node)
            missing = [need for need in way.needs if self._lacks(need)]
            if missing:
                if id(node) in opened:
                    raise _cycle(node)
                opened.add(id(node))
                stack += missing
                continue
            made = self._made[id(node)] = _carefully(way.make, node)
            if way.fill is not None:
                self._fills.append((made, way.fill))
            stack.pop()

    def _lacks(self, node: Any) -> bool:
        return type(node) in _NODES and id(node) not in self._made

    # -- ways --------------------------------------------------------------------------------
    def _way(self, node: Any) -> Way:
        kind = type(node)
        if kind is Obj or kind is Pers:
            special = self._special(self, node)
            if special is not None:
                return special
        if kind is Obj:
            return self._object(node)
        if kind is Tup:
            return Way(lambda: tuple([self.of(item) for item in node.items]), node.items)
        if kind is Box:
            return self._box(node)
        if kind is Raw:
            return Way(lambda: _text_or_bytes(node))
        return Way(lambda: self.reference(node))

    def _box(self, node: Box) -> Way:
        if node.state is not None:
            raise UnsafePickle("BUILD on a plain container", offset=node.state.end)
        if node.kind == DICT:
            return Way(dict, (), lambda made: self.fill_dict(made, pairs(node)))
        if node.kind == LIST:
            return Way(list, (), lambda made: self.fill_list(made, node))
        return Way(set, (), lambda made: self.fill_set(made, (v for v, *_ in elements(node))))

    def _object(self, node: Obj) -> Way:
        if node.op == FROZENSET:
            items = items_of(node.args) or ()
            return Way(lambda: frozenset(self.hashed(items)), items)
        call = self.call(node)
        knows = self._known.get(call.name)
        way = knows(self, call) if knows is not None else None
        return way if way is not None else self.record(call)

    def call(self, node: Obj) -> Call:
        """What is called with which arguments; an instance that copyreg makes is a call of its
        class without any.
        """
        name, args = self.name_of(node.fn), items_of(node.args)
        if args is None:
            raise PickleInvalid("a call without a tuple of arguments", offset=node.end)
        if name == "copyreg._reconstructor" and len(args) == 3 and args[2] is None:
            base = type(args[1]) is Global and ".".join(mapped(args[1], self.protocol))
            if base == "builtins.object" and type(args[0]) is Global:
                return Call(self.name_of(args[0]), [], node)
        return Call(name, args, node)

    def name_of(self, node: Any) -> str:
        """`module.name` of what is called, also where getattr or a legacy file's id spells it."""
        pid = items_of(node.pid) if type(node) is Pers else None
        if pid and len(pid) == 4 and text_of(pid[0]) == "module":
            node = pid[1]
        if type(node) is Global:
            return "?" if node.computed else ".".join(mapped(node, self.protocol))
        if type(node) is not Obj or node.op != REDUCE or type(node.fn) is not Global:
            return "?"
        function, args = ".".join(mapped(node.fn, self.protocol)), items_of(node.args) or ()
        if function == "builtins.getattr" and len(args) == 2 and type(args[0]) is Global:
            return f"{'.'.join(mapped(args[0], self.protocol))}.{text_of(args[1]) or '?'}"
        return f"{function}(…)"

    def reference(self, node: Any) -> Any:
        """A class or function that stands as a value: itself where that is harmless."""
        name = self.name_of(node)
        found = self._references(name)
        return Reference(name) if found is None else found

    # -- records -----------------------------------------------------------------------------
    def record(self, call: Call) -> Way:
        """An object of a class that is not imported."""
        node = call.node
        needs = [*call.args, *([node.kwargs] if node.kwargs is not None else [])]

        def make() -> Record:
            return Record(call.name, tuple([self.of(arg) for arg in call.args]))

        return Way(make, needs, lambda made: self._fill_record(made, node))

    def _fill_record(self, made: Record, node: Obj) -> None:
        if node.kwargs is not None:
            made.keywords = self.get(node.kwargs)
        items, rows = [row[0] for row in elements(node)], list(pairs(node))
        if items and rows:
            raise PickleInvalid("an object with items of a list and of a dict", offset=node.end)
        if node.batches:
            made.entries = [self.get(item) for item in items]
        if rows:
            made.entries = {}
            self.fill_dict(made.entries, rows)
        if node.state is not None:
            self._fill_state(made, node.state.value)

    def _fill_state(self, made: Record, state: Any) -> None:
        """Attributes: a dict, or (dict or None, dict of slots); anything else as it is."""
        parts = items_of(state) or ()
        tables = [part for part in parts if type(part) is Box and part.kind == DICT]
        if type(state) is Box and state.kind == DICT:
            made.fields = self.get(state)
        elif len(parts) == 2 and len(tables) + parts.count(None) == 2 and parts[1] is not None:
            for table in tables:
                self.fill_dict(made.fields, pairs(table))
        else:
            made.state = self.get(state)

    # -- filling -----------------------------------------------------------------------------
    def fill_dict(self, made: dict[Any, Any], rows: Iterable[Any]) -> None:
        """Set (key node, value node, …) rows. Raises KeyDuplicate where two values have one key."""
        nodes: dict[Any, Any] = {}
        get = self.get
        for key_node, node, *_ in rows:
            key = key_node if type(key_node) is str else self.key(get(key_node))
            known = nodes.setdefault(key, node)
            if known is not node:
                raise KeyDuplicate(
                    "a key stands twice in one dict: readers disagree on which counts",
                    key=repr(key)[1:-1][:80] if isinstance(key, str) else None,
                )
            made[key] = get(node)

    def fill_list(self, made: list[Any], node: Any) -> None:
        """Append the items of a list node."""
        made.extend([self.get(item) for item, *_ in elements(node)])

    def fill_set(self, made: set[Any], nodes: Iterable[Any]) -> None:
        """Add the values of some nodes."""
        made.update(self.hashed(nodes))

    def hashed(self, nodes: Iterable[Any]) -> list[Any]:
        """The values of some nodes, each fit to be hashed."""
        return [self.key(self.get(node)) for node in nodes]

    def attributes(self, node: Obj) -> dict[str, Any]:
        """The attributes BUILD gives a known object, by their names. Raises PickleInvalid."""
        if node.state is None:
            return {}
        rows = dict_items(node.state.value)
        if rows is None:
            raise PickleInvalid("a state that is no dict of attributes", offset=node.state.end)
        made: dict[str, Any] = {}
        self.fill_dict(made, rows)
        if not all(isinstance(name, str) for name in made):
            raise PickleInvalid("an attribute whose name is no text", offset=node.state.end)
        return made

    def key(self, value: Any) -> Any:
        """`value`, if it may be hashed: a tuple from a file can take forever, and so can many
        numbers with one hash. Raises LimitExceeded, PickleInvalid.
        """
        kind = type(value)
        if kind is str or kind is bool or value is None:
            return value
        left = [value]
        for _ in range(_KEY_PARTS):
            if not left:
                break
            part = left.pop()
            if isinstance(part, tuple | frozenset):
                left.extend(part)
            elif isinstance(part, int | float) and abs(part) >= _HUGE:
                self._huge_keys += 1
        if left or self._huge_keys > _HUGE_KEYS:
            raise LimitExceeded("keys", "keys that would take too long to tell apart")
        try:
            hash(value)
        except TypeError as error:
            raise PickleInvalid(f"a key of the type {kind.__name__}") from error
        return value


def _text_or_bytes(node: Raw) -> Any:
    text = text_of(node)
    if text is not None:
        return text
    return bytearray(node.value) if node.op == _BYTEARRAY else node.value


def _cycle(node: Any) -> PickleInvalid:
    return PickleInvalid("a value is part of what it is made from", offset=getattr(node, "end", None))  # fmt: skip


_PLAIN_FAILURES = (ValueError, TypeError, OverflowError, ArithmeticError, RuntimeError, KeyError,
                   LookupError, MemoryError, AttributeError)  # fmt: skip


def _carefully(make: Callable[[], Any], node: Any) -> Any:
    """The value; what its parts refuse to become is a fault of the file, at this byte."""
    try:
        return make()
    except CkptError as error:
        if error.offset is None and not error.key:
            error.offset = getattr(node, "end", None)
        raise
    except _PLAIN_FAILURES as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        offset = getattr(node, "end", None)
        raise PickleInvalid(f"a value that cannot be: {reason}", offset=offset) from error
