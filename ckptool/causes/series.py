"""Layers as series: names that differ by their numbers alone, and what the numbers say.

Knows: numbers in names, the order of keys. Must not know: which names a model has, files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_DIGITS = re.compile(r"\d+")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
MOST = 64
"""Groups that words are asked to tell apart; every word is held against every other."""
_LONGEST_NUMBER = 18
"""Digits of a number that is read as one: longer ones are no count of layers."""


class Content(NamedTuple):
    """What a tensor is, apart from its name: its shape in elements, and whether it holds float,
    int … (empty where one side does not say).
    """

    shape: tuple[int, ...]
    kind: str = ""


Item = tuple[str, Content]
"""A name and what goes by it."""
Leaves = tuple[tuple[str, Content], ...]


class Module(NamedTuple):
    """A module that owns tensors: its path, its place among the others, and (leaf, content)
    of its tensors, sorted.
    """

    path: str
    at: int
    leaves: Leaves

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of its path."""
        return tuple(int(text[:_LONGEST_NUMBER]) for text in _DIGITS.findall(self.path))

    def template(self, keep_last: bool) -> str:
        """Its path with # for each number, but for those of its own name with `keep_last`."""
        if not keep_last:
            return _DIGITS.sub("#", self.path)
        above, dot, name = self.path.rpartition(".")
        return _DIGITS.sub("#", above) + dot + name


class Group(NamedTuple):
    """Modules of one template and one kind, sorted by their numbers."""

    template: str
    members: tuple[Module, ...]

    @property
    def profile(self) -> tuple[Leaves, ...]:
        """What the members hold, one after another."""
        return tuple(module.leaves for module in self.members)

    @property
    def in_order(self) -> bool:
        """Whether the numbers grow in the order of the keys."""
        places = [module.at for module in self.members]
        numbers = [module.numbers for module in self.members]
        return places == sorted(places) and len(set(numbers)) == len(numbers)


def modules_of(items: Sequence[Item]) -> list[Module]:
    """The modules that own `items`, in order."""
    owned: dict[str, list[Item]] = {}
    for name, content in items:
        path, _, leaf = name.rpartition(".")
        owned.setdefault(path, []).append((leaf, content))
    return [Module(path, at, tuple(sorted(rows))) for at, (path, rows) in enumerate(owned.items())]


def groups_of(modules: Sequence[Module], keep_last: bool = False) -> list[Group]:
    """The modules by template and kind (leaves and their number of dimensions)."""
    found: dict[tuple[str, tuple[tuple[str, int], ...]], list[Module]] = {}
    for module in modules:
        kind = tuple((leaf, len(content.shape)) for leaf, content in module.leaves)
        found.setdefault((module.template(keep_last), kind), []).append(module)
    return [
        Group(template, tuple(sorted(members, key=lambda m: (m.numbers, m.at))))
        for (template, _), members in found.items()
    ]


def pair_members(left: Group, right: Group) -> list[tuple[Module, Module]] | None:
    """The members of two groups of one profile, one by one; None where that would be a guess.

    Members that no other member equals need no order. Otherwise numbers and order of keys have
    to agree on both sides, and number by number one has to follow from the other.
    """
    pairs = list(zip(left.members, right.members, strict=True))
    if len(set(left.profile)) == len(left.members):
        return pairs
    if not (left.in_order and right.in_order):
        return None
    ones, twos = _varying(left), _varying(right)
    if len(ones) == len(twos):
        for rows in map(zip, ones, twos):
            if not _is_monotone(set(rows)):
                return None
    return pairs


def _varying(group: Group) -> list[tuple[int, ...]]:
    """The numbers at each place of the template, where not all members have the same."""
    columns = zip(*(module.numbers for module in group.members), strict=True)
    return [column for column in columns if len(set(column)) > 1]


def _is_monotone(rows: set[tuple[int, int]]) -> bool:
    """Whether the pairs are one to one and grow together."""
    ones, twos = {one for one, _ in rows}, {two for _, two in rows}
    return len(ones) == len(twos) == len(rows) and sorted(twos) == [two for _, two in sorted(rows)]


# -- words -------------------------------------------------------------------------------------
def resolve(left: Sequence[Group], right: Sequence[Group]) -> list[tuple[Group, Group]] | None:
    """Groups of one profile, as many on both sides, told apart by the words of their names; None
    where words do not, or speak against the order of the keys.

    Each name has to go with exactly one of the other side (`q` with `query`); a single pair may
    be left over, without words for it.
    """
    if len(left) > MOST:
        return None
    ones, twos = _telling(left), _telling(right)
    rows = [[at for at, two in enumerate(twos) if _akin(one, two)] for one in ones]
    goals = [row[0] for row in rows if len(row) == 1]
    if any(len(row) > 1 for row in rows) or len(set(goals)) < len(goals):
        return None
    rest = sorted(set(range(len(twos))) - set(goals))
    if len(rest) > 1 or not goals:
        return None
    order = [row[0] if row else rest[0] for row in rows]
    pairs = [(one, right[at]) for one, at in zip(left, order, strict=True)]
    by_file = sorted(pairs, key=lambda pair: pair[0].members[0].at)
    places = [two.members[0].at for _, two in by_file]
    return pairs if places == sorted(places) else None


def _telling(groups: Sequence[Group]) -> list[set[str]]:
    """The words of each template that not all of them have."""
    words = [{word.lower() for word in _WORD.findall(group.template)} for group in groups]
    common = set.intersection(*words)
    return [row - common for row in words]


def _akin(left: set[str], right: set[str]) -> bool:
    """Whether a word of one is, begins or ends a word of the other."""
    return any(_is_short_for(one, two) for one in left for two in right)


def _is_short_for(one: str, two: str) -> bool:
    short, long = sorted((one, two), key=len)
    return long.startswith(short) or long.endswith(short)
