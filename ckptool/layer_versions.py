"""`_metadata` follows the keys: where the entry of each module goes when keys are renamed.

Knows: dotted names; that torch looks the version of a layer up by the path of its own tensors.
Must not know: rules, pickles.

A key says for certain where the module went that owns it. What it says of the modules above is
read from the right, component by component, and counts less; least counts what followed a
module above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckptool.wrapping import UNCOUNTED

DEEPEST = 32
"""Components of a key that are read for the modules above its owner; honest names stay under
twenty."""


def metadata_renames(
    module_paths: Sequence[str], renames: Mapping[str, str], keys: Iterable[str] = ()
) -> tuple[dict[str, str], tuple[str, ...]]:
    """How the entries of `_metadata` follow `renames`: (changed paths, dropped paths).

    `module_paths` are its keys, also of modules without parameters. `keys` are the keys of the
    table that are left: where some stay, the modules above them stay too. A path without keys
    follows its nearest ancestor that moved. Where two would take one place, the module whose
    own tensors are there has it, then the inner one: a wrapper yields to what it wrapped, and
    its entry is dropped.
    """
    if not renames:
        return {}, ()  # every key stays, and every path with it
    ways = _Ways()
    for key in keys:
        if key not in renames:
            ways.learn(key, key)
    for old, new in renames.items():
        ways.learn(old, new)
    ranks, target = ways.known(), {}
    owner: dict[str, str] = {}
    for path in sorted(module_paths, key=lambda p: (ranks.get(p, ("", 3))[1], -len(p))):
        target[path] = _follow(path, ranks)
        owner.setdefault(target[path], path)
    stay = [path for path in module_paths if owner[target[path]] == path]
    dropped = tuple(path for path in module_paths if owner[target[path]] != path)
    return {path: target[path] for path in stay if target[path] != path}, dropped


class _Ways:
    """Where module paths went, as keys tell it."""

    def __init__(self) -> None:
        # of each owner: {(whether the tensor kept its own name, new path): how many say so}
        self._votes: dict[str, dict[tuple[bool, str], int]] = {}
        self._moved: dict[str, str] = {}
        self._wrapping: dict[str, str] = {}

    def learn(self, old: str, new: str) -> None:
        """Note what one key says of the module that owns it and of those above."""
        if old in UNCOUNTED:
            return  # a counter of the wrapper, not of the net at the root
        above, _, leaf = old.rpartition(".")
        goal, _, name = new.rpartition(".")
        if leaf != name and _inside(goal, above):
            goal = above  # parametrized: the module stays, its tensor moved into a helper
        if leaf != name and _inside(above, goal):
            above = self._helper(above, goal)  # the reverse: the helper is gone
        else:
            votes = self._votes.setdefault(above, {})
            votes[leaf == name, goal] = votes.get((leaf == name, goal), 0) + 1
            if votes[leaf == name, goal] > 1:
                return  # another key has said the same of the modules above
        self._learn_above(above, goal)

    def _helper(self, above: str, goal: str) -> str:
        while above != goal:
            self._wrapping.setdefault(above, goal)
            above = above.rpartition(".")[0]
        self._moved.setdefault(goal, goal)
        return goal

    def _learn_above(self, old: str, new: str) -> None:
        """Match the components of two paths from the right and note where each above went.

        `_moved`: its next component went along; `_wrapping`: its next was removed.
        """
        left, right = _depth(old), _depth(new)
        if max(left, right) >= DEEPEST:
            return
        while left:
            above, _, last = old.rpartition(".")
            goal, _, name = new.rpartition(".")
            if left == right or (right and last == name):
                if self._moved.get(above) == goal:
                    return  # from here on another key has shown the same
                self._moved.setdefault(above, goal)
                old, new, left, right = above, goal, left - 1, right - 1
            elif left > right:
                self._wrapping.setdefault(above, new)
                old, left = above, left - 1
            else:
                new, right = goal, right - 1

    def known(self) -> dict[str, tuple[str, int]]:
        """{path: (where it went, how sure: 0 owns tensors there, 1 is above them, 2 wraps)}."""
        ranks = {path: (goal, 2) for path, goal in self._wrapping.items()}
        ranks.update({path: (goal, 1) for path, goal in self._moved.items()})
        for path, votes in self._votes.items():
            (_, goal), _ = max(votes.items(), key=lambda v: (v[0][0], v[1], v[0][1] == path))
            ranks[path] = goal, 0
        return ranks


def _inside(path: str, above: str) -> bool:
    """Whether `path` is truly below `above`; '' is the root."""
    return path != above and (not above or path.startswith(above + "."))


def _depth(path: str) -> int:
    return path.count(".") + 1 if path else 0


def _follow(path: str, ranks: Mapping[str, tuple[str, int]]) -> str:
    """Where `path` goes: as its own keys say, as a wrapper, or with its nearest ancestor."""
    above, rest = path, ""
    for _ in range(DEEPEST):
        if above in ranks:
            goal = ranks[above][0]
            return f"{goal}.{rest}" if goal and rest else goal + rest
        if not above:
            break
        above, _, last = above.rpartition(".")
        rest = f"{last}.{rest}" if rest else last
    return path
