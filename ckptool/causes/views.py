"""One table as a model sees it: as it stands, and after the rules that explain it.

Knows: how a matcher is asked, sparingly. Must not know: other tables, sentences, files, torch.
"""

from __future__ import annotations

from typing import NamedTuple

from ckptool.causes.guesses import Tie
from ckptool.causes.search import search
from ckptool.causes.surplus import parts, stale
from ckptool.causes.trials import Target, Trial, Trials
from ckptool.checkpoint import Match, Table
from ckptool.compare import Matcher


class View(NamedTuple):
    """`stands` is the table as it is, `after` what `trial` makes of it (no steps: nothing
    explains it). `rivals` would load as much from other keys, so that none was taken; `ties` are
    names that nothing tells apart; `said` are sentences on what was left out.
    """

    trials: Trials
    stands: Match
    trial: Trial
    after: Match
    rivals: tuple[Trial, ...] = ()
    ties: tuple[Tie, ...] = ()
    said: tuple[str, ...] = ()

    @property
    def table(self) -> Table:
        """The table."""
        return self.trials.table

    @property
    def names(self) -> list[str]:
        """The names of tensors that come out."""
        return [name for name in self.trial.names if name is not None]

    @property
    def rank(self) -> tuple[bool, int, int, int]:
        """More is better."""
        after = self.after
        return (after.fits, *_named(after), -len(after.unexpected_keys))

    def is_better(self, other: View) -> bool:
        """Whether it explains more than `other`; one that explains as much is no better."""
        if self.after.fits != other.after.fits:
            return self.after.fits
        gain = len(self.after.loaded) - len(other.after.loaded)
        return gain > 0 and gain * 2 >= _left(other.after)


def look(table: Table, target: Target, matcher: Matcher) -> View:
    """Search one table for what makes it the model's."""
    trials = Trials(table, target)
    asked = _Asked(trials, matcher)
    bare = trials.bare
    stands = asked.match(bare)
    if stands.fits:
        return View(trials, stands, bare, stands)
    found = search(trials)
    is_cause = found.best is not bare
    if is_cause and found.rivals:
        return View(trials, stands, bare, stands, (found.best, *found.rivals))
    trial, after = bare, stands
    if is_cause:
        trial, after = asked.simplest(found.best)
        if not (after.fits or _named(after) > _named(stands)):
            trial, after = bare, stands
    trial, after, said = asked.without_surplus(trial, after)
    missing = {*after.missing_keys, *(key.rpartition(".")[0] for key in after.missing_keys)}
    ties = tuple(tie for tie in found.ties if not missing.isdisjoint(tie.wanted))
    return View(trials, stands, trial, after, (), ties, tuple(said))


class _Asked:
    """What the matcher says of trials."""

    def __init__(self, trials: Trials, matcher: Matcher) -> None:
        self.trials = trials
        self.matcher = matcher

    def match(self, trial: Trial) -> Match:
        """What would load after a trial."""
        have, metadata = self.trials.have(trial)
        return self.matcher(self.trials.target.wanted, have, metadata)

    def simplest(self, best: Trial) -> tuple[Trial, Match]:
        """The best trial without its last steps, where the model's own hooks do what they do."""
        after = self.match(best)
        for count in range(1, len(best.steps)):
            shorter = self.trials.run(self.trials.bare, *best.steps[:count])
            if shorter is not None and shorter.loaded < best.loaded:
                found = self.match(shorter)
                if found.fits or (not after.fits and _rank(found) >= _rank(after)):
                    return shorter, found
        return best, after

    def without_surplus(self, base: Trial, after: Match) -> tuple[Trial, Match, list[str]]:
        """Leave out what has no place in the model, as far as nothing is lost by it."""
        wanted = self.trials.target.wanted
        few = not after.loaded or len(after.loaded) * 2 < len(wanted)
        if few or not after.unexpected_keys:
            return base, after, []
        trial, said = stale(self.trials, base, after.unexpected_keys)
        found = after if trial is base else self.match(trial)
        if not _left(found) and found.unexpected_keys:
            trial, more = parts(self.trials, trial, found.unexpected_keys)
            found = self.match(trial) if more else found
            said += more
        if len(found.loaded) < len(after.loaded):  # a hook that made use of what went
            return base, after, []
        return trial, found, said


def _named(found: Match) -> tuple[int, int]:
    """The model's keys that the file has: of the right shape, and of another."""
    return len(found.loaded), len(found.mismatched)


def _left(found: Match) -> int:
    """How many of the model's keys do not load."""
    return len(found.missing_keys) + len(found.mismatched)


def _rank(found: Match) -> tuple[int, int]:
    return len(found.loaded), -_left(found)
