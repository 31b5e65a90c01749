"""Why a file does not fit a model, in one sentence, and the rules that mend it.

Pure records: no files, no torch. `search` finds the rules for one table, `views` asks the model's
matcher about them, `findings` says what still differs, `options` how a command line says the
rules. This module chooses among the tables and puts the answer together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ckptool.causes.findings import Rest, findings
from ckptool.causes.modules import listing, templates
from ckptool.causes.options import dotted, options_of, partial_of
from ckptool.causes.spelling import flags
from ckptool.causes.trials import Target, Trial, Trials
from ckptool.causes.views import View, look
from ckptool.checkpoint import Match, Path, Table, Wanted
from ckptool.compare import Matcher, match
from ckptool.keynames import Rule

__all__ = ["Cause", "Matcher", "explain"]

_TABLES = 16
"""Other tables that are searched: those that share most shapes with the model."""
_SHOWN = 8
"""Choices that are listed."""


class Cause(NamedTuple):
    """Why a file fits or does not. `match` is the default table as it stands; `table` the one to
    take and `rules` what mends its names; `after` what is left then. `sentence` says it, each of
    `findings` one difference more; `choices` are equal candidates that were not guessed between;
    `options` are the flags of `convert` that do the same, `partial` those that also leave out
    what differs in shape (empty where there are none).
    """

    match: Match
    table: Path
    rules: tuple[Rule, ...]
    after: Match
    sentence: str
    findings: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    options: str = ""
    partial: str = ""


def explain(
    wanted: Sequence[Wanted],
    tables: Sequence[Table],
    weights: int | None,
    matcher: Matcher = match,
    at: Path | None = None,
) -> Cause:
    """Search for what makes the file's keys those of the model.

    `wanted` is the model's state_dict in order; `tables` are the state_dicts of the file and
    `weights` the index of the default one (None: the first); `at` names the only one to look at.
    Raises nothing: where no rule explains the difference, `rules` is empty and `after` is `match`.
    """
    default = _default(tables, weights, at)
    if default is None:
        sentence = "the file holds no state_dict" + (f" at '{dotted(at)}'" if at else "")
        found = matcher(wanted, {}, None)._replace(cause=sentence)
        return Cause(found, at or (), (), found, sentence)
    target = Target(wanted)
    first = look(default, target, matcher)
    best = [first]
    if at is None and not first.after.fits:
        views = [look(table, target, matcher) for table in _others(tables, default, target)]
        better = [view for view in views if view.is_better(first)]
        highest = max((view.rank for view in better), default=None)
        best = [view for view in better if view.rank == highest] or best
    if len(best) > 1:
        return _undecided(first, best, default, tables)
    return _answer(first, best[0], default, tables)


def _default(tables: Sequence[Table], weights: int | None, at: Path | None) -> Table | None:
    if at is not None:
        return next((table for table in tables if table.path == at), None)
    if weights is not None and weights < len(tables):
        return tables[weights]
    return tables[0] if tables else None


def _others(tables: Sequence[Table], default: Table, target: Target) -> list[Table]:
    """The tables that may be the model's too."""
    rows = [table for table in tables if table is not default and table.kind != "tensors"]
    if len(rows) <= _TABLES:
        return rows
    shapes = Counter(target.shapes.values())

    def shared(table: Table) -> int:
        return (Counter(tensor.shape for tensor in table.tensors) & shapes).total()

    return sorted(rows, key=shared, reverse=True)[:_TABLES]


# -- the answer --------------------------------------------------------------------------------
def _answer(first: View, best: View, default: Table, tables: Sequence[Table]) -> Cause:
    """The answer when `best` is the table to take."""
    if best.rivals:
        count = "two" if len(best.rivals) == 2 else f"{len(best.rivals):,}"
        sentence = f"{count} parts of the file fit the model equally well: name the one to take"
    else:
        where = (
            "" if best.table is default else f" in the state_dict at '{dotted(best.table.path)}'"
        )
        sentence = f"{_counts(best.after, best.trials.target)}{where}{_deeds(best.trial)}"
    choices = [_rival(best.trials, rival) for rival in best.rivals]
    choices += [_tie(*tie) for tie in best.ties]
    stands = first.stands._replace(cause=sentence)
    is_as_it_stands = best is first and not best.trial.rules
    return Cause(
        stands, best.table.path, best.trial.rules, stands if is_as_it_stands else best.after,
        sentence, (*_findings(first, best), *best.said), tuple(choices[:_SHOWN]),
        options_of(best, default, tables), partial_of(best, default, tables),
    )  # fmt: skip


def _undecided(
    first: View, equal: Sequence[View], default: Table, tables: Sequence[Table]
) -> Cause:
    """The answer when several tables fit alike."""
    names = listing([dotted(view.table.path) for view in equal], _SHOWN)
    sentence = f"the state_dicts at {names} fit equally well: name the one to take"
    choices = []
    for view in equal[:_SHOWN]:
        said = options_of(view, default, tables) or f"'{dotted(view.table.path)}'"
        choices.append(f"{said}: {_counts(view.after, view.trials.target)}{_deeds(view.trial)}")
    stands = first.stands._replace(cause=sentence)
    said_of_first = _findings(first, first._replace(trial=first.trials.bare, after=first.stands))
    return Cause(
        stands, first.table.path, (), stands, sentence, said_of_first, tuple(choices)
    )  # fmt: skip


def _findings(first: View, best: View) -> tuple[str, ...]:
    wanted = first.trials.target.wanted
    others = frozenset(best.trials.others(best.trial))
    return tuple(findings(Rest(wanted, first.stands, best.after, best.names, others)))


# -- words -------------------------------------------------------------------------------------
def _counts(after: Match, target: Target) -> str:
    total, loaded = len(target.wanted), len(after.loaded)
    if after.fits:
        whose = "" if loaded == total else " of the file"
        return (
            f"the only key{whose} matches" if loaded == 1 else f"all {loaded:,} keys{whose} match"
        )
    parts = [f"{loaded:,} of {total:,} keys match"]
    for keys, one, many in (
        (after.mismatched, "differs in shape", "differ in shape"),
        (after.missing_keys, "is missing", "are missing"),
        (after.unexpected_keys, "is unexpected", "are unexpected"),
    ):
        if keys:
            parts.append(f"{len(keys):,} {one if len(keys) == 1 else many}")
    return ", ".join(parts)


def _deeds(trial: Trial) -> str:
    deeds = [step.deed for step in trial.steps]
    if not deeds:
        return ""
    return f" after {', '.join(deeds[:-1])}{' and ' if deeds[1:] else ''}{deeds[-1]}"


def _rival(trials: Trials, rival: Trial) -> str:
    said = flags(rival.rules) or " and ".join(step.deed for step in rival.steps)
    return f"{said}: {rival.loaded:,} of {len(trials.target.wanted):,} keys match"


def _tie(names: Sequence[str], wanted: Sequence[str]) -> str:
    ours, theirs = templates(names), templates(wanted)
    could = "could each be any of" if len(ours) > 1 else "could be any of"
    return f"{listing(ours)} {could} {listing(theirs)}: one shape, and neither names nor order settle it"
