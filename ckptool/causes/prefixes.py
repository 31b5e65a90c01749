"""The level of the module tree: prefixes that a file's names have too much or too little.

Knows: that the longest ending a name shares with one key of the model tells what lies in front.
Must not know: wrappers, renamed layers, files, torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from ckptool.causes.modules import DEEPEST, listing
from ckptool.causes.spelling import MOST, renaming, spell
from ckptool.causes.trials import Step, Target, Trial, Trials, endings
from ckptool.compare import Shape
from ckptool.keynames import Rule

_TRIED = 4
"""Pairs of prefixes that are tried, most votes first."""


def moved(trials: Trials, base: Trial) -> None:
    """Try the prefixes that most names vote for: to strip, to add, or one for the other."""
    for old, new in _elected(trials, base):
        part = Rule("only", f"{old}**")
        if old and new:
            swap = Rule("rename", f"^{re.escape(old)}", new.replace("\\", r"\\"))
            deed = f"renaming '{old}' to '{new}'"
            trials.run(base, Step((swap,), deed))
            trials.run(base, Step((part, swap), f"taking '{old}' alone and {deed}"))
        elif old:
            strip = Rule("strip-prefix", old)
            trials.run(base, Step((strip,), f"removing '{old}'"))
            trials.run(base, Step((part, strip), f"taking the part '{old}'"))
        else:
            trials.run(base, Step((Rule("add-prefix", new),), f"adding '{new}'"))
            _added_but(trials, base, new)


def _added_but(trials: Trials, base: Trial, new: str) -> None:
    """Try to add a prefix to all parts but those that have their place already."""
    rows = zip(base.names, trials.shapes, strict=True)
    stay: dict[str, None] = {}
    move: set[str] = set()
    for name, shape in rows:
        if name is not None:
            top = name.partition(".")[0]
            if trials.target.takes(name, shape):
                stay[top] = None
            else:
                move.add(top)
    if stay and len(stay) <= MOST and not move & stay.keys():
        parts = "|".join(map(re.escape, stay))
        rule = Rule("rename", rf"^(?!(?:{parts})(?:\.|$))", new.replace("\\", r"\\"))
        trials.run(base, Step((rule,), f"adding '{new}' to all but {listing(list(stay))}"))


def _elected(trials: Trials, base: Trial) -> list[tuple[str, str]]:
    """(prefix in the file, prefix in the model) of most votes, each with its dot. One layer under
    another name proves nothing, unless it is all that is left on both sides.
    """
    votes: Counter[tuple[str, str]] = Counter()
    voters: dict[tuple[str, str], set[str]] = {}
    for name, shape in zip(base.names, trials.shapes, strict=True):
        for place in _places(trials.target, name, shape) if name is not None else ():
            votes[place] += 1
            voters.setdefault(place, set()).add((name or "").rpartition(".")[0])
    del votes["", ""]
    whole = max(base.unexpected, base.gap)
    return [
        (old, new)
        for (old, new), count in votes.most_common(_TRIED)
        if not (old and new) or len(voters[old, new]) > 1 or count >= whole
    ]


def _places(target: Target, name: str, shape: Shape) -> list[tuple[str, str]]:
    """What would have to change in front of `name`, by the longest ending that a key of this
    shape shares with it; several where several keys do.
    """
    for end in endings(name):
        owners = [key for key in target.owners(end) if target.takes(key, shape)]
        if owners:
            cut = len(end)
            return [(name[: len(name) - cut], key[: len(key) - cut]) for key in owners]
    return []


def moved_by_parts(trials: Trials, base: Trial) -> None:
    """Try a change of its own for each part of the net, where all names of the part agree. A part
    is more than one layer, unless the parts are all that is left on both sides.
    """
    target = trials.target
    taken = {name for name in base.names if name in target.shapes}
    lacking = trials.unmatched(base)
    goals: dict[str, set[str]] = {}
    for name, shape, _ in lacking:
        found = _places(target, name, shape)
        if len(found) == 1 and _is_telling(name, *found[0]):
            goals.setdefault(found[0][0], set()).add(found[0][1])
    settled = {old: next(iter(news)) for old, news in goals.items() if len(news) == 1}
    parts: dict[str, dict[str, str]] = {}
    for name, _, _ in lacking:
        part, new = _moved(name, settled)
        if new in target.shapes and new not in taken:
            parts.setdefault(part, {})[name] = new
    count = sum(map(len, parts.values()))
    if count < max(len(lacking), base.gap):
        parts = {part: moves for part, moves in parts.items() if len(_modules(moves)) > 1}
    pairs = _one_to_one({name: new for moves in parts.values() for name, new in moves.items()})
    if pairs:
        names = [name for name in base.names if name is not None]
        trials.run(base, Step(spell(pairs, names), renaming(pairs)))


def _modules(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[0] for name in names}


def _is_telling(name: str, old: str, new: str) -> bool:
    """Whether more than the last word agrees: `weight` alone is every layer's."""
    end = name[len(old) :]
    return "." in end or not old or not new


def _moved(name: str, settled: dict[str, str]) -> tuple[str, str]:
    """The longest prefix of the name that has a new one, and the name with it."""
    at = len(name) if name.count(".") < DEEPEST else 0
    while (at := name.rfind(".", 0, at)) >= 0:
        old = name[: at + 1]
        if (new := settled.get(old)) is not None:
            return old, new + name[at + 1 :]
    return "", settled.get("", "") + name


def _one_to_one(pairs: dict[str, str]) -> dict[str, str]:
    """Without those that would share a name."""
    count = Counter(pairs.values())
    return {old: new for old, new in pairs.items() if count[new] == 1}
