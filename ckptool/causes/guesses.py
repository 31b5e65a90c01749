"""A renaming that no rule of the trade explains, inferred from shapes, numbers, order and words.

Knows: names and shapes that found no partner, on both sides. Must not know: rules, files, torch.

1. Tensors go together only in one shape and kind of number, and modules only with the same tensors.
2. What one side has once and the other has once is certain.
3. Where shapes leave several candidates, numbers or words of the names have to tell them apart,
   and the order of the keys has to agree. Otherwise nothing is said: they are a tie.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ckptool.causes.series import (
    Content,
    Group,
    Item,
    Leaves,
    Module,
    groups_of,
    modules_of,
    pair_members,
    resolve,
)

_COMPUTED = re.compile(r"_(orig|mask|g|v|u)$")
_LEAVES = frozenset({"weight", "bias", "running_mean", "running_var", "num_batches_tracked"})
"""Leaves with a meaning of their own in every torch layer: none is ever another."""


class Tie(NamedTuple):
    """Modules or tensors of the file and of the model that are equal in all that counts."""

    names: tuple[str, ...]
    wanted: tuple[str, ...]


class Guess(NamedTuple):
    """`pairs` {name in the file: name in the model} are certain; `ties` are left open."""

    pairs: dict[str, str]
    ties: tuple[Tie, ...] = ()


def guess(left: Sequence[Item], missing: Sequence[Item]) -> Guess:
    """Which of the names `left` in the file are which of those `missing` in the model; both in
    the order of their state_dict. What is told by elimination alone counts only where all of
    both sides goes together.
    """
    pairs = _attempt(left, missing, by_elimination=True)
    if not len(pairs) == len(left) == len(missing):
        pairs = _attempt(left, missing, by_elimination=False)
    return Guess(pairs, _ties(left, missing, pairs))


def _attempt(left: Sequence[Item], missing: Sequence[Item], by_elimination: bool) -> dict[str, str]:
    ours, theirs = modules_of(left), modules_of(missing)
    modules = _by_series(ours, theirs)
    if by_elimination:
        modules += _by_content(_without(ours, modules, 0), _without(theirs, modules, 1))
    else:
        spoken = {one.path for one, _ in modules}
        modules += [pair for pair in _by_content(ours, theirs) if pair[0].path not in spoken]
    pairs = _names(_in_order(modules, ours, theirs))
    pairs.update(_by_shape(left, missing, pairs, by_elimination))
    return _whole_modules({o: n for o, n in pairs.items() if _may_be(o, n)}, left, missing)


# -- modules -----------------------------------------------------------------------------------
Pair = tuple[Module, Module]


def _by_series(ours: Sequence[Module], theirs: Sequence[Module]) -> list[Pair]:
    """Members of groups of one profile: the only two, or told apart by their words. What finds
    no group is grouped anew by the numbers above its own name.
    """
    pairs: list[Pair] = []
    found: list[list[Pair]] = []
    for keep_last in (False, True):
        rest = _without(ours, pairs, 0), _without(theirs, pairs, 1)
        rows: dict[tuple[Leaves, ...], tuple[list[Group], list[Group]]] = {}
        for side, modules in enumerate(rest):
            for group in groups_of(modules, keep_last):
                rows.setdefault(group.profile, ([], []))[side].append(group)
        found += [members for ones, twos in rows.values() for members in _members(ones, twos)]
        pairs = [pair for members in found for pair in members]
    return _consistent(found)


def _members(ones: Sequence[Group], twos: Sequence[Group]) -> list[list[Pair]]:
    """The members of groups of one profile, group by group: those of one name first, then by
    words. A group of one is no series.
    """
    if len(ones) != len(twos):
        return []
    there = {group.template: group for group in twos}
    matched = [(one, there[one.template]) for one in ones if one.template in there]
    named = {one.template for one, _ in matched}
    ones = [group for group in ones if group.template not in named]
    twos = [group for group in twos if group.template not in named]
    if len(ones) > 1:
        matched += resolve(ones, twos) or []
    elif ones and len(ones[0].members) > 1:
        matched.append((ones[0], twos[0]))
    found = [pair_members(one, two) for one, two in matched]
    return [members for members in found if members]


def _by_content(ours: Sequence[Module], theirs: Sequence[Module]) -> list[Pair]:
    """Modules that hold what no other module left on their side holds."""
    ones, twos = _single(ours), _single(theirs)
    return [(ones[key], twos[key]) for key in ones if key in twos]


def _without(modules: Sequence[Module], pairs: Sequence[Pair], side: int) -> list[Module]:
    gone = {pair[side].path for pair in pairs}
    return [module for module in modules if module.path not in gone]


def _names(pairs: Sequence[Pair]) -> dict[str, str]:
    """{name: name} of the tensors of all pairs, in the order of the file."""
    return {
        _joined(one.path, leaf): _joined(two.path, leaf)
        for one, two in sorted(pairs, key=lambda pair: pair[0].at)
        for leaf, _ in one.leaves
    }


def _joined(path: str, leaf: str) -> str:
    return f"{path}.{leaf}" if path else leaf


def _single(modules: Sequence[Module]) -> dict[Leaves, Module]:
    count = Counter(module.leaves for module in modules)
    return {module.leaves: module for module in modules if count[module.leaves] == 1}


def _consistent(series: list[list[Pair]]) -> list[Pair]:
    """All pairs, without the series that send one numbered block to two places: the larger
    series have the say.
    """
    goals: dict[tuple[str, int], tuple[int, ...]] = {}
    kept: list[Pair] = []
    for pairs in sorted(series, key=len, reverse=True):
        said = {block: goal for one, two in pairs for block, goal in _blocks(one, two)}
        if all(goals.get(block, numbers) == numbers for block, numbers in said.items()):
            goals.update(said)
            kept += pairs
    return kept


def _blocks(one: Module, two: Module) -> list[tuple[tuple[str, int], tuple[int, ...]]]:
    """For each number of a path: the block up to it, and the numbers of the other side."""
    ends = [match.end() for match in re.finditer(r"\d+", one.path)]
    numbers = two.numbers
    if len(ends) != len(numbers):
        return []
    return [((one.path[:end], len(ends)), numbers[: at + 1]) for at, end in enumerate(ends)]


def _in_order(
    pairs: Sequence[Pair], ours: Sequence[Module], theirs: Sequence[Module]
) -> list[Pair]:
    """Without those of equal content where one side has more of it than the other, or another
    order.
    """
    counts = [Counter(module.leaves for module in side) for side in (ours, theirs)]
    equal: dict[Leaves, list[Pair]] = {}
    for pair in pairs:
        equal.setdefault(pair[0].leaves, []).append(pair)
    kept: list[Pair] = []
    for leaves, rows in equal.items():
        rows.sort(key=lambda pair: pair[0].at)
        places = [two.at for _, two in rows]
        if places == sorted(places) and counts[0][leaves] == counts[1][leaves]:
            kept += rows
    return kept


# -- tensors -----------------------------------------------------------------------------------
def _by_shape(
    left: Sequence[Item], missing: Sequence[Item], pairs: dict[str, str], by_elimination: bool
) -> dict[str, str]:
    """Tensors of a shape that stands once on either side; by elimination, that is left once, and
    then under any leaf.
    """
    taken = set(pairs.values())
    ours = [row for row in left if row[0] not in pairs or not by_elimination]
    theirs = [row for row in missing if row[0] not in taken or not by_elimination]
    goals = _by_content_of(theirs)
    found = {
        names[0]: goals[content][0]
        for content, names in _by_content_of(ours).items()
        if len(names) == 1 and len(goals.get(content, ())) == 1 and names[0] not in pairs
    }
    if by_elimination:
        return found
    return {o: n for o, n in found.items() if n not in taken and _leaf(o) == _leaf(n)}


def _whole_modules(
    pairs: dict[str, str], left: Sequence[Item], missing: Sequence[Item]
) -> dict[str, str]:
    """Without those of modules that would be loaded in part, as a bias without its weight."""
    while True:
        taken = set(pairs.values())
        torn = {_owner(name) for name, _ in left if name not in pairs}
        lame = {_owner(name) for name, _ in missing if name not in taken}
        kept = {o: n for o, n in pairs.items() if _owner(o) not in torn and _owner(n) not in lame}
        if len(kept) == len(pairs):
            return kept
        pairs = kept


def _owner(name: str) -> str:
    """The module of a tensor; a tensor right at the root stands for itself."""
    return name.rpartition(".")[0] or name


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _by_content_of(items: Sequence[Item]) -> dict[Content, list[str]]:
    found: dict[Content, list[str]] = {}
    for name, content in items:
        found.setdefault(content, []).append(name)
    return found


def _may_be(old: str, new: str) -> bool:
    """Whether a tensor named `old` can be what is called `new`: what a weight is computed from is
    no weight, a mean no variance.
    """
    one, two = _leaf(old), _leaf(new)
    if one != two and one in _LEAVES and two in _LEAVES:
        return False
    return _role(old) == _role(new)


def _role(name: str) -> str:
    """What kind of value takes part in computing a weight; empty for a tensor used as it is."""
    parts = name.split(".")
    if "parametrizations" in parts:
        return ".".join(parts[parts.index("parametrizations") + 1 :])
    found = _COMPUTED.search(parts[-1])
    return found.group(1) if found else ""


def _ties(left: Sequence[Item], missing: Sequence[Item], pairs: dict[str, str]) -> tuple[Tie, ...]:
    """What is left on both sides and may be one another: modules of one content, then tensors of
    one shape.
    """
    taken = set(pairs.values())
    ours = [row for row in left if row[0] not in pairs]
    theirs = [row for row in missing if row[0] not in taken]
    mine, yours = _by_leaves(modules_of(ours)), _by_leaves(modules_of(theirs))
    both = [leaves for leaves in mine if leaves in yours and len(leaves) > 1]
    found = [Tie(tuple(mine[leaves]), tuple(yours[leaves])) for leaves in both]
    spoken = [{path for tie in found for path in tie[side]} for side in (0, 1)]
    names = _by_content_of([row for row in ours if _owner(row[0]) not in spoken[0]])
    wanted = _by_content_of([row for row in theirs if _owner(row[0]) not in spoken[1]])
    for shape, rows in names.items():
        goals = [key for key in wanted.get(shape, ()) if _may_be(rows[0], key)]
        if goals:
            found.append(Tie(tuple(rows), tuple(goals)))
    return tuple(tie for tie in found if len(tie.names) > 1 or len(tie.wanted) > 1)


def _by_leaves(modules: Sequence[Module]) -> dict[Leaves, list[str]]:
    found: dict[Leaves, list[str]] = {}
    for module in modules:
        found.setdefault(module.leaves, []).append(module.path)
    return found
