"""Which state_dicts and keys of two checkpoints are the same ones under other names.

Knows: places of state_dicts, wrappers and prefixes on all keys, the order of keys. Must not know:
files, values. A prefix is seen through only where every counted key of a state_dict carries it, and
only where more keys meet for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ckptool.checkpoint import Path, Table
from ckptool.errors import KeyCollision
from ckptool.keynames import Rule
from ckptool.rules import UNCOUNTED, apply, wrappers

DEEPEST = 8
"""Components of a common prefix that are tried; honest ones have one to four."""
Shape = tuple[int, ...] | None
Names = Mapping[str, Shape]
"""The keys of a state_dict, with the shapes of its tensors."""


class Naming(NamedTuple):
    """What became of the keys of one state_dict: {key: name to compare by}, changed ones only,
    and what was done, in words (`strip 'module.'`).
    """

    renames: dict[str, str]
    words: tuple[str, ...] = ()


AS_IT_IS = Naming({})


# -- state_dicts -------------------------------------------------------------------------------
def pair_tables(
    a: Sequence[Table], a_weights: int | None, b: Sequence[Table], b_weights: int | None
) -> list[tuple[int, int]]:
    """Indexes of state_dicts that belong together, the weights of `a` first: those at one place,
    then the weights of both (each file's only or best table) where neither has met another.
    """
    places = {table.path: number for number, table in enumerate(b)}
    found: dict[int, int] = {
        i: places[table.path] for i, table in enumerate(a) if table.path in places
    }
    first, second = _best(a, a_weights), _best(b, b_weights)
    free = second is not None and second not in found.values()
    if first is not None and second is not None and first not in found and free:
        found[first] = second
    return sorted(found.items(), key=lambda row: (row[0] != first, row[0]))


def _best(tables: Sequence[Table], weights: int | None) -> int | None:
    return weights if weights is not None else 0 if tables else None


# -- keys --------------------------------------------------------------------------------------
def renamed(names: Naming, keys: Sequence[str], rules: Sequence[Rule]) -> Naming:
    """The same with `rules` run over the names. Raises KeyCollision, UsageError."""
    if not rules:
        return names
    now = [names.renames.get(key, key) for key in keys]
    changed = apply(rules, now).renames
    if not changed:
        return names
    after = {key: changed.get(name, name) for key, name in zip(keys, now, strict=True)}
    renames = {key: name for key, name in after.items() if key != name}
    return Naming(renames, (*names.words, _in_words(changed, now)))


def with_others(naming: Naming, others: Sequence[str]) -> Naming:
    """The same for entries of the state_dict that are no tensors: they lose the prefix that the
    keys lost, and the wrappers inside a name.
    """
    cut = _prefix(naming.renames)
    found = dict(naming.renames)
    if cut:
        found.update({name: name[len(cut) :] for name in others if name.startswith(cut)})
    elif naming.renames:
        paths = {old.rpartition(".")[0]: new.rpartition(".")[0] for old, new in found.items()}
        for name in others:
            owner, dot, leaf = name.rpartition(".")
            if owner in paths:
                found[name] = f"{paths[owner]}{dot}{leaf}" if paths[owner] else leaf
    return Naming(found, naming.words)


def _prefix(renames: Mapping[str, str]) -> str:
    """What all renamed keys lost in front; empty where that is not all there is to it."""
    cut = {old.removesuffix(new) if old.endswith(new) else "" for old, new in renames.items()}
    return cut.pop() if len(cut) == 1 else ""


def meet(a: Names, b: Names) -> tuple[Naming, Naming]:
    """How both sides are best renamed so that keys meet: not at all, or by taking wrappers or a
    prefix from all keys of one side or both. Keys of one shape count first; where two ways are
    as good, the one that changes less is taken.
    """
    best = (AS_IT_IS, AS_IT_IS)
    score = _score(a, best[0], b, best[1])
    if score[0] == min(len(a), len(b)):
        return best
    for left in _unwrapped(a):
        for right in _unwrapped(b):
            for pair in _stripped(a, left, b, right):
                found = _score(a, pair[0], b, pair[1])
                if found > score:
                    best, score = pair, found
    return best


def _score(a: Names, left: Naming, b: Names, right: Naming) -> tuple[int, int]:
    """Keys that meet in one shape, keys that meet."""
    mine, theirs = _named(a, left), _named(b, right)
    both = mine.keys() & theirs.keys()
    return sum(mine[key] == theirs[key] for key in both), len(both)


def _named(names: Names, naming: Naming) -> dict[str, Shape]:
    if not naming.renames:
        return dict(names)
    return {naming.renames.get(key, key): shape for key, shape in names.items()}


def _unwrapped(names: Names) -> list[Naming]:
    """The names as they are and, where that differs, without what wrappers left."""
    try:
        without = renamed(AS_IT_IS, list(names), [Rule("unwrap")])
    except KeyCollision:
        return [AS_IT_IS]
    return [AS_IT_IS, without] if without.renames else [AS_IT_IS]


def _stripped(a: Names, left: Naming, b: Names, right: Naming) -> list[tuple[Naming, Naming]]:
    """Ways to take a common prefix from one side, or from both, the shortest first."""
    names = _named(a, left), _named(b, right)
    mine, theirs = _common(names[0]), _common(names[1])
    ways: list[tuple[list[str], list[str]]] = [([], [])]
    ways += [(mine[:depth], []) for depth in range(1, len(mine) + 1)]
    ways += [([], theirs[:depth]) for depth in range(1, len(theirs) + 1)]
    both = _has_modules(names[0], len(mine)) and _has_modules(names[1], len(theirs))
    if mine and theirs and both:
        ways.append((mine, theirs))
    found = [(_without(a, left, one), _without(b, right, two)) for one, two in ways]
    return [(one, two) for one, two in found if one is not None and two is not None]


def _has_modules(names: Names, depth: int) -> bool:
    """Whether something but the tensors of one layer remains below a prefix: `conv.weight` and
    `fc.weight` are not one tensor because both are a weight.
    """
    return any(name.count(".") > depth for name in names if name not in UNCOUNTED)


def _without(names: Names, naming: Naming, prefix: Sequence[str]) -> Naming | None:
    """The names without the prefix; None where two would become one."""
    rules = [Rule("strip-prefix", ".".join(prefix))] if prefix else []
    try:
        return renamed(naming, list(names), rules)
    except KeyCollision:
        return None


def _common(names: Mapping[str, Shape]) -> list[str]:
    """The leading components that all counted names share; something remains of each."""
    split = [name.split(".", DEEPEST) for name in names if name not in UNCOUNTED]
    if not split:
        return []
    low, high = min(split), max(split)
    most = min(len(parts) for parts in split) - 1
    depth = 0
    while depth < most and low[depth] == high[depth] and low[depth]:
        depth += 1
    return low[:depth]


def _in_words(renames: Mapping[str, str], names: Sequence[str]) -> str:
    """What was taken from the names."""
    cut = _prefix(renames)
    if cut:
        return f"strip '{cut}'"
    found = [name for name, *_ in wrappers(names)]
    return f"unwrap {', '.join(found[:4])}" if found else "rename keys"


# -- order -------------------------------------------------------------------------------------
def moved_keys(a: Sequence[str], b: Sequence[str]) -> frozenset[str]:
    """The fewest of the common keys that stand elsewhere in `b`: without them the order is one."""
    there = {key: at for at, key in enumerate(b)}
    rows = [(there[key], key) for key in a if key in there]
    tails: list[int] = []  # last places of increasing runs, by their length
    lengths = []
    for at, _ in rows:
        length = bisect_left(tails, at)
        tails[length : length + 1] = [at]
        lengths.append(length)
    stay, wanted = set(), len(tails) - 1
    for (_, key), length in zip(reversed(rows), reversed(lengths), strict=True):
        if length == wanted:
            stay.add(key)
            wanted -= 1
    return frozenset(key for _, key in rows if key not in stay)


def under(path: Path, root: Path) -> bool:
    """Whether a place is below another."""
    return len(path) > len(root) and path[: len(root)] == root
