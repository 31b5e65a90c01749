"""The search for the rules that make a table fit a model, simplest explanation first.

Knows: the order in which causes are tried, when rules count as an explanation, when two are
equal. Must not know: how any of them works, sentences, files, torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ckptool.causes.general import renamed, renumbered
from ckptool.causes.guesses import Tie
from ckptool.causes.oldnames import renamed_everywhere, renamed_where_missing
from ckptool.causes.prefixes import moved, moved_by_parts
from ckptool.causes.trials import Trial, Trials
from ckptool.causes.wrapped import plain_target, rewrapped, unwrapped
from ckptool.rules import wrappers

_WIDTH = 3
"""Trials from which the search goes on, the best ones."""


class Found(NamedTuple):
    """What a search came to: the `best` trial; `rivals` load as much from other
    keys of the file; `ties` are names that nothing tells apart.
    """

    best: Trial
    rivals: tuple[Trial, ...] = ()
    ties: tuple[Tie, ...] = ()


def search(trials: Trials) -> Found:
    """The best rules for a table, cause after cause until one makes everything fit."""
    ties: tuple[Tie, ...] = ()
    for stage in _STAGES:
        if _best(trials).fits:
            break
        ties = stage(trials) or ties
    best = _best(trials)
    return Found(best, _rivals(trials, best), () if best.fits else ties)


def _best(trials: Trials) -> Trial:
    """The best trial that explains anything, or the bare names."""
    found = [trial for trial in trials.all if explains(trials, trial)]
    return max(found, key=lambda trial: trial.rank, default=trials.bare)


def explains(trials: Trials, trial: Trial) -> bool:
    """Whether `trial` says why the table does not fit: it makes everything load, or half of what
    did not load before, or half of what had no place, and no step of it is far-fetched. Where
    no more loads, for the shapes, that all names meet is enough.
    """
    bare = trials.bare
    gain = trial.loaded - bare.loaded
    named = gain + trial.mismatched - bare.mismatched
    if gain < 0 or named <= 0 or (not gain and trial.missing):
        return False
    if trial.gap and max(gain, named) * 2 < min(bare.gap, bare.unexpected):
        return False
    return trials.is_sound(trial)


def _rivals(trials: Trials, best: Trial) -> tuple[Trial, ...]:
    """Trials of as many steps that load as many tensors as the best, but others."""
    if best is trials.bare:
        return ()
    seen = [trials.sources(best)]
    found = []
    for trial in sorted(trials.all, key=lambda t: t.rank, reverse=True):
        is_equal = (trial.loaded, trial.gap) == (best.loaded, best.gap)
        if is_equal and len(trial.steps) == len(best.steps) and explains(trials, trial):
            sources = trials.sources(trial)
            if sources not in seen:
                seen.append(sources)
                found.append(trial)
    return tuple(found)


# -- stages ------------------------------------------------------------------------------------
Stage = Callable[[Trials], "tuple[Tie, ...] | None"]


def _wrappers(trials: Trials) -> None:
    unwrapped(trials)


def _wrapped_model(trials: Trials) -> None:
    """The model is wrapped: fit its plain form, then put the wrappers on."""
    plain = plain_target(trials.target)
    if plain is None:
        return
    target, back = plain
    inner = Trials(trials.table, target)
    for stage in (_wrappers, _prefixes, _old_names, _parts):
        if _best(inner).fits:
            break
        stage(inner)
    rewrapped(trials, _best(inner), back)
    moved(trials, trials.bare)


def _prefixes(trials: Trials) -> None:
    for start in _starts(trials):
        moved(trials, start)
        everywhere = renamed_everywhere(trials, start)
        if everywhere is not None:
            moved(trials, everywhere)


def _old_names(trials: Trials) -> None:
    for trial in _leading(trials):
        renamed_where_missing(trials, trial)


def _parts(trials: Trials) -> None:
    for trial in _leading(trials):
        moved_by_parts(trials, trial)
    renamed_where_missing(trials, _best(trials))


def _guesses(trials: Trials) -> tuple[Tie, ...]:
    """The general renaming of what is left on both sides, or of all that has a number."""
    bases = _leading(trials)
    ties: dict[Trial, tuple[Tie, ...]] = {}
    for base in bases:
        done, left_open = renamed(trials, base)
        ties[done or base] = left_open
    if _best(trials).gap:
        for base in bases:
            renumbered(trials, base)
    return ties.get(_best(trials), ())


_STAGES: tuple[Stage, ...] = (
    _wrappers, _wrapped_model, _prefixes, _old_names, _parts, _guesses,
)  # fmt: skip


def _bases(trials: Trials) -> list[Trial]:
    """The trials to go on from: without wrappers, where the file has some and the model none."""
    unwrapped = {
        trial.steps for trial in trials.all if trial.steps and trial.steps[0].is_unwrapping
    }
    if not unwrapped or wrappers(trials.target.keys):
        return trials.all
    return [trial for trial in trials.all if trial.steps[:1] in unwrapped]


def _starts(trials: Trials) -> list[Trial]:
    """The names without wrappers and as they stand, each form once."""
    found: dict[tuple[str | None, ...], Trial] = {}
    for trial in sorted(_bases(trials), key=lambda t: not t.steps):
        found.setdefault(trial.names, trial)
    return list(found.values())[: _WIDTH + 1]


def _leading(trials: Trials) -> list[Trial]:
    """The best trials, each form of the names once, and the first of all."""
    found: dict[tuple[str | None, ...], Trial] = {}
    bases = _bases(trials)
    for trial in sorted(bases, key=lambda t: t.rank, reverse=True):
        found.setdefault(trial.names, trial)
    return list(dict.fromkeys([*list(found.values())[:_WIDTH], bases[0]]))
