"""Which tensors of a file share elements, and where two files differ in that.

Knows: views of one storage. Must not know: values, how a difference is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from ckptool.checkpoint import Path, Tensor
from ckptool.differences import Pair
from ckptool.formats.runs import clusters, elements_overlap, extent_of, runs_of

_RUNS = 1 << 19  # of all views whose extents meet: they are sorted together
_FEW = 8  # views of more runs than that, which are held against each other one by one


def changed_ties(pairs: Sequence[Pair]) -> dict[Path, tuple[str, str]]:
    """{place: (key of what it shares elements with in a, in b)}, an empty text for nothing, where
    the two differ. The first of those that share elements stands for all of them.
    """
    one = _leaders([pair.a for pair in pairs])
    two = _leaders([pair.b for pair in pairs])
    return {
        pair.path: tuple("" if at == number else pairs[at].key for at in (mine, theirs))  # type: ignore[misc]
        for number, (pair, mine, theirs) in enumerate(zip(pairs, one, two, strict=True))
        if mine != theirs
    }


def _leaders(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor the number of the first that it shares elements with, or its own."""
    storages: dict[str, list[tuple[int, Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.storage is not None and tensor.count and tensor.stride is not None:
            storages.setdefault(tensor.storage.key, []).append((number, tensor))
    found = list(range(len(tensors)))
    for users in storages.values():
        if len(users) > 1:
            for number, first in _sharing(users).items():
                found[number] = first
    return found


def _sharing(users: list[tuple[int, Tensor]]) -> dict[int, int]:
    """The same within one storage: views that overlap, and those that overlap them in turn."""
    views: dict[object, list[int]] = {}
    for number, (_, t) in enumerate(users):
        views.setdefault((t.dtype, t.offset, t.shape, t.stride), []).append(number)
    groups = _Groups(len(users))
    for same in views.values():
        for number in same[1:]:
            groups.join(same[0], number)
    firsts = {numbers[0]: users[numbers[0]][1] for numbers in views.values()}
    for near in clusters((*extent_of(tensor), n) for n, tensor in firsts.items()):
        for together in _overlapping({n: firsts[n] for n in near}):
            for number in together[1:]:
                groups.join(together[0], number)
    return {users[n][0]: users[groups.first(n)][0] for n in range(len(users))}


def _overlapping(near: dict[int, Tensor]) -> Iterable[list[int]]:
    """Numbers of views that share elements, of those whose extents meet. One pass over all their
    runs where these are not too many; else pairs where those are few; else all of them.
    """
    if len(near) == 1:
        return ()
    runs = runs_of(near, _RUNS)
    if runs is not None:
        return clusters(runs)
    if len(near) > _FEW:
        return (list(near),)
    return [[n, m] for n, m in combinations(near, 2) if elements_overlap(near[n], near[m])]


class _Groups:
    """Numbers that belong together; the smallest stands for its group."""

    def __init__(self, count: int) -> None:
        self._above = list(range(count))

    def first(self, number: int) -> int:
        """The smallest number of the group."""
        while self._above[number] != number:
            self._above[number] = self._above[self._above[number]]
            number = self._above[number]
        return number

    def join(self, one: int, two: int) -> None:
        """Make two groups one."""
        low, high = sorted((self.first(one), self.first(two)))
        self._above[high] = low
