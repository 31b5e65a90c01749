"""The module trees of both sides as their keys show them: parts, series, folded names.

Knows: dotted names, numbers in them. Must not know: shapes, rules, files, torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from math import prod

DEEPEST = 64
"""Components of a name that is read as a place in a tree; honest ones stay under twenty."""
_FEW = 4
"""Numbers that are listed one by one."""
_DIGITS = re.compile(r"\d+")


class Tree:
    """Modules and keys of one side."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.keys = tuple(keys)
        self.nodes: set[str] = set()
        self._series: dict[str, set[str]] = {}
        for key in self.keys:
            for path in paths_above(key):
                if path in self.nodes:
                    break
                self.nodes.add(path)
        for path in self.nodes:
            if path[-1:].isdigit() or _DIGITS.search(path.rpartition(".")[2]):
                self._series.setdefault(series_of(path), set()).add(path)

    def root_of(self, key: str) -> str:
        """The outermost module above a foreign `key` (or the key) that this side does not have."""
        root = key
        for path in paths_above(key):
            if path in self.nodes:
                break
            root = path
        return root

    def members(self, series: str) -> set[str]:
        """The modules and keys that are numbered like `series` says."""
        return self._series.get(series, set())


def paths_above(key: str) -> Iterator[str]:
    """The key, its module, the module above it …; of keys beyond all measure the key alone."""
    yield key
    if key.count(".") < DEEPEST:
        while key := key.rpartition(".")[0]:
            yield key


def series_of(path: str) -> str:
    """`layer1.2` belongs to `layer1.#`, `layer4` to `layer#`; empty where nothing is numbered."""
    above, _, name = path.rpartition(".")
    template = _DIGITS.sub("#", name)
    if template == name:
        return ""
    return f"{above}.{template}" if above else template


def is_inside_a_series(path: str) -> bool:
    """Whether a module above is numbered: what lies there belongs to a block."""
    return _DIGITS.search(path.rpartition(".")[0]) is not None


def roots(tree: Tree, keys: Iterable[str]) -> dict[str, list[str]]:
    """{outermost module that `tree` lacks: its keys}, in order."""
    found: dict[str, list[str]] = {}
    for key in keys:
        found.setdefault(tree.root_of(key), []).append(key)
    return found


def folded(keys: Sequence[str]) -> list[str]:
    """The keys by their modules, `fc.{weight,bias}` for several of one; each stands for exactly
    the keys it spells.
    """
    owned: dict[str, list[str]] = {}
    for key in keys:
        owner, _, leaf = key.rpartition(".")
        owned.setdefault(owner, []).append(leaf)
    found = []
    for owner, leaves in owned.items():
        text = leaves[0] if len(leaves) == 1 else "{" + ",".join(leaves) + "}"
        found.append(f"{owner}.{text}" if owner else text)
    return found


def templates(paths: Sequence[str]) -> list[str]:
    """The paths, those that differ by numbers alone as one: `#` for what counts the blocks,
    `norm{1,2}` for a few numbers below.
    """
    found: dict[str, list[str]] = {}
    for path in paths:
        found.setdefault(_DIGITS.sub("#", path), []).append(path)
    return [_template(same) for same in found.values()]


def _template(paths: Sequence[str]) -> str:
    columns = [
        list(dict.fromkeys(column)) for column in zip(*map(_DIGITS.findall, paths), strict=True)
    ]
    exact = prod(map(len, columns)) == len(set(paths))
    texts, blocks = [], False
    for column in columns:
        if len(column) == 1:
            texts.append(column[0])
        elif blocks and exact and len(column) <= _FEW:
            texts.append("{" + ",".join(column) + "}")
        else:
            texts.append("#")
            blocks = True
    first, *rest = _DIGITS.split(paths[0])
    return first + "".join(text + part for text, part in zip(texts, rest, strict=True))


def listing(names: Sequence[str], most: int = 4) -> str:
    """`'a', 'b' and 3 more`."""
    quoted = ", ".join(f"'{name}'" for name in names[:most])
    return f"{quoted} and {len(names) - most:,} more" if len(names) > most else quoted


def counted(number: int, noun: str) -> str:
    """`1 key`, `2 keys`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
