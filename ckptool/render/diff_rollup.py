"""Tensors that fared alike, folded by module: `layer1-3` the same, `layer4.*` drifted.

Knows: dotted names, runs of numbered siblings. Must not know: what the states mean, files, verbs.
Only whole modules are folded, and only where every tensor in them has one state. No recursion:
names nest as deep as they like.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

DEEPEST = 32
"""Levels that are folded; what is left of a deeper name is one component."""
_NUMBERED = re.compile(r"(.*?)(\d{1,9})", re.DOTALL)


class Row(NamedTuple):
    """Tensors of one state. `name` is a key, or a module's, with numbered siblings as `layer1-3`;
    `whole` says that it is a module.
    """

    name: str
    keys: tuple[str, ...]
    state: Hashable
    whole: bool


@dataclass(slots=True)
class _Node:
    """A component: what is below it, the keys under it with the states they have, and its own
    state, where a key ends here.
    """

    keys: list[str]
    states: frozenset[Hashable]
    below: dict[str, _Node] = field(default_factory=dict)
    own: tuple[tuple[str, Hashable], ...] = ()


def rows(states: Iterable[tuple[str, Hashable]], alone: Iterable[Hashable] = ()) -> list[Row]:
    """Rows in the order of the first key of each. `alone` are states that are never folded."""
    root, apart = _grown(states), frozenset(alone)
    if len(root.keys) > 1 and _is_one(root, apart):
        return [Row("all", tuple(root.keys), next(iter(root.states)), True)]
    return list(_told(root, apart))


def _grown(states: Iterable[tuple[str, Hashable]]) -> _Node:
    """The tree. Most nodes are leaves, of one state: they share its set, and have no dict."""
    root = _Node([], frozenset())
    sets: dict[Hashable, frozenset[Hashable]] = {}
    for key, state in states:
        alone = sets.setdefault(state, frozenset((state,)))
        node = root
        _join(node, key, alone)
        for part in key.split(".", DEEPEST):
            known = node.below.get(part)
            if known is None:
                known = _Node([key], alone, _NOTHING)
                if node.below is _NOTHING:
                    node.below = {}
                node.below[part] = known
            else:
                _join(known, key, alone)
            node = known
        node.own += ((key, state),)
    return root


_NOTHING: dict[str, _Node] = {}  # below a leaf; never filled


def _join(node: _Node, key: str, alone: frozenset[Hashable]) -> None:
    node.keys.append(key)
    if not alone <= node.states:
        node.states |= alone


def _told(root: _Node, apart: frozenset[Hashable]) -> Iterator[Row]:
    """From the top down: a module of one state at once, others by what is in them."""
    stack: list[tuple[str, _Node]] = [("", root)]
    while stack:
        name, node = stack.pop()
        if node is not root and _is_one(node, apart):
            whole = bool(node.below) or len(node.keys) > 1
            yield Row(name, tuple(node.keys), next(iter(node.states)), whole)
            continue
        for key, state in node.own:
            yield Row(key, (key,), state, False)
        above = "" if node is root else f"{name}."
        stack += reversed(list(_siblings(above, node, apart)))


def _is_one(node: _Node, apart: frozenset[Hashable]) -> bool:
    return len(node.states) == 1 and (not node.states & apart or len(node.keys) == 1)


def _siblings(above: str, node: _Node, apart: frozenset[Hashable]) -> Iterator[tuple[str, _Node]]:
    """The children, numbered ones of one state that follow each other as one."""
    run: list[tuple[str, _Node]] = []
    for row in node.below.items():
        if run and not _follows(run[-1], row, apart):
            yield _joined(above, run)
            run = []
        run.append(row)
    if run:
        yield _joined(above, run)


def _follows(last: tuple[str, _Node], this: tuple[str, _Node], apart: frozenset[Hashable]) -> bool:
    one, two = _NUMBERED.fullmatch(last[0]), _NUMBERED.fullmatch(this[0])
    if one is None or two is None or one[1] != two[1] or int(one[2]) + 1 != int(two[2]):
        return False
    same = last[1].states == this[1].states and len(this[1].states) == 1
    return same and not this[1].states & apart


def _joined(above: str, run: list[tuple[str, _Node]]) -> tuple[str, _Node]:
    first, node = run[0]
    last = _NUMBERED.fullmatch(run[-1][0])
    if len(run) == 1 or last is None:
        return above + first, node
    keys = [key for _, one in run for key in one.keys]
    return f"{above}{first}-{last[2]}", _Node(keys, node.states)
