"""The general renaming of a table: what shapes, numbers, order and words say, tried.

Knows: when a guess is convincing. Must not know: how one is made, files, torch.
"""

from __future__ import annotations

import re

from ckptool.causes.guesses import Guess, Tie, guess
from ckptool.causes.series import Content, Item
from ckptool.causes.spelling import renaming, spell
from ckptool.causes.surplus import is_left_behind
from ckptool.causes.trials import Step, Trial, Trials

_DIGITS = re.compile(r"\d+")


def renamed(trials: Trials, base: Trial) -> tuple[Trial | None, tuple[Tie, ...]]:
    """Try the renaming of the names without a partner; and what it leaves open.

    Shapes may speak alone for half of the model, or for all that is left on both sides: a single
    layer of the right shape proves nothing.
    """
    here = set(base.names)
    missing = [row for row in _wanted(trials) if row[0] not in here]
    leaves = {key.rpartition(".")[2] for key, _ in missing}
    left = [
        row
        for row in _standing(trials, base)
        if row[0] not in trials.target.shapes and not is_left_behind(row[0], leaves)
    ]
    found = guess(left, missing) if left and missing else Guess({})
    count = len(found.pairs)
    is_whole = count == len(left) == len(missing)
    if count and (is_whole or count * 2 >= trials.target.required):
        return _run(trials, base, found.pairs), found.ties
    return None, found.ties


def renumbered(trials: Trials, base: Trial) -> Trial | None:
    """Try other numbers: the layers of a Sequential counted anew, so that a name of the file may
    be that of another layer in the model. Only where every key of the model gets its tensor.
    """
    left, missing = _standing(trials, base), _wanted(trials)
    pairs = guess(left, missing).pairs
    if len(pairs) < len(missing):
        return None
    if any(_DIGITS.sub("#", old) != _DIGITS.sub("#", new) for old, new in pairs.items()):
        return None
    return _run(trials, base, {old: new for old, new in pairs.items() if old != new})


def _run(trials: Trials, base: Trial, pairs: dict[str, str]) -> Trial | None:
    names = [name for name in base.names if name is not None]
    return trials.run(base, Step(spell(pairs, names), renaming(pairs))) if pairs else None


def _standing(trials: Trials, base: Trial) -> list[Item]:
    """The names of a trial that have a shape, and what goes by them."""
    told = bool(trials.target.kinds)  # else the model does not say what it holds
    rows = zip(base.names, trials.shapes, trials.dtypes, strict=True)
    return [
        (name, Content(shape, kind if told else ""))
        for name, shape, kind in rows
        if name is not None and shape is not None
    ]


def _wanted(trials: Trials) -> list[Item]:
    """The keys of the model that want a shape."""
    target = trials.target
    return [
        (key, Content(shape, target.kinds.get(key, "")))
        for key, shape in target.shapes.items()
        if shape is not None
    ]
