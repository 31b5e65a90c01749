"""Which tensors of a file share elements, and where two files differ in that.

Knows: views of one storage. Must not know: values, how a difference is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckptool.checkpoint import Path, Tensor
from ckptool.differences import Pair
from ckptool.formats.runs import elements_overlap, extent_of

_VIEWS = 1_000  # different views of one storage that are held against each other one by one


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
    firsts = sorted(
        (numbers[0] for numbers in views.values()), key=lambda n: extent_of(users[n][1])
    )
    exact = len(firsts) <= _VIEWS
    meets: Callable[[Tensor, Tensor], bool] = elements_overlap if exact else _extents_meet
    near: list[int] = []
    for number in firsts:
        tensor = users[number][1]
        start = extent_of(tensor).start
        near = [other for other in near if extent_of(users[other][1]).end > start]
        for other in near if exact else near[-1:]:
            if meets(users[other][1], tensor):
                groups.join(other, number)
        near.append(number)
        near.sort(key=lambda n: extent_of(users[n][1]).end)  # the last reaches furthest
    return {users[n][0]: users[groups.first(n)][0] for n in range(len(users))}


def _extents_meet(one: Tensor, two: Tensor) -> bool:
    a, b = extent_of(one), extent_of(two)
    return a.start < b.end and b.start < a.end


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
