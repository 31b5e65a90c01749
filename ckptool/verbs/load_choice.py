"""Which state_dict of a file goes into a model, under which names, and whether it may.

Knows: rules, what torch would say of the names. Must not know: tensors, optimizers, printing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ckptool.checkpoint import Checkpoint, Match, Table
from ckptool.errors import DoesNotFit, RuleMatchesNothing, UsageError
from ckptool.keynames import Outcome, Rule, some
from ckptool.layer_versions import metadata_renames
from ckptool.rules import apply
from ckptool.verbs.fitting import Asked, Fit, fit
from ckptool.verbs.tables import choose_table

AUTO = "auto"
_LOUD = "as it stands"  # of the file without the rule: it says less than the rest
Rules = str | None | Sequence[Sequence[str]]
"""`auto`, None for none, or rows as those of `convert`: ("strip-prefix", "net.")."""


class Choice(NamedTuple):
    """`outcome` says what becomes of the keys of `table`, `metadata` is its `_metadata` then and
    `match` what loads: its cause and fix are those of the file as it stands.
    """

    table: Table
    outcome: Outcome
    metadata: dict[str, Any] | None
    match: Match
    found: Fit | None = None

    def name(self, key: str) -> str:
        """The name a key of the table gets."""
        return self.outcome.renames.get(key, key)

    @property
    def keys(self) -> list[str]:
        """The keys of the table that are left, tensors first."""
        gone = frozenset(self.outcome.drops)
        every = [*(t.key for t in self.table.tensors), *(key for key, _ in self.table.others)]
        return [key for key in dict.fromkeys(every) if key not in gone]


def choose(checkpoint: Checkpoint, asked: Asked, rules: Rules, at: str | None) -> Choice:
    """The table, its names and what would load. Raises UsageError, RuleMatchesNothing,
    KeyCollision.
    """
    if rules == AUTO:
        found = fit(checkpoint, asked, at)
        table = _there(checkpoint, found.table)
        cause = found.cause
        match = cause.after._replace(cause=cause.sentence, fix=found.command)
        outcome = apply(cause.rules, *_names(table))
        return Choice(table, outcome, _metadata(table, outcome), match, found)
    if isinstance(rules, str):
        raise UsageError(f"rules={rules!r}: 'auto', None or rows such as ('strip-prefix', 'net.')")
    table = _there(checkpoint, choose_table(checkpoint, at))
    given = tuple(map(_rule, rules or ()))
    outcome = apply(given, *_names(table))
    if outcome.idle:
        text = f"{outcome.idle[0].flag} matches no key; nothing loaded"
        raise RuleMatchesNothing(text, hint="see the keys with ckptool inspect")
    metadata = _metadata(table, outcome)
    choice = Choice(table, outcome, metadata, Match())
    shapes = {tensor.key: tensor.shape for tensor in table.tensors}
    have = {choice.name(key): shapes.get(key) for key in choice.keys}
    return choice._replace(match=asked.matcher(asked.wanted, have, metadata))


def _rule(row: Sequence[str]) -> Rule:
    if isinstance(row, str) or not 1 <= len(row) <= 3:
        raise UsageError(f"rules: {row!r} is no row such as ('strip-prefix', 'net.')")
    name, argument, to = (*row, None, None)[:3]
    return Rule(str(name), argument, to)


def _there(checkpoint: Checkpoint, table: Table | None) -> Table:
    if table is None:
        raise UsageError("the file holds no state_dict", path=checkpoint.file,
                         hint="see what it holds with ckptool inspect")  # fmt: skip
    return table


def _names(table: Table) -> tuple[list[str], list[str]]:
    return [tensor.key for tensor in table.tensors], [key for key, _ in table.others]


def _metadata(table: Table, outcome: Outcome) -> dict[str, Any] | None:
    """The layer versions under the new names, as a conversion would write them."""
    if table.metadata is None or not outcome.renames:
        return None if table.metadata is None else dict(table.metadata)
    gone = frozenset(outcome.drops)
    left = [key for names in _names(table) for key in names if key not in gone]
    moved, dropped = metadata_renames(list(table.metadata), outcome.renames, left)
    lost = frozenset(dropped)
    return {moved.get(k, k): v for k, v in table.metadata.items() if k not in lost}


# -- whether it may ----------------------------------------------------------------------------
def refuse(checkpoint: Checkpoint, asked: Asked, choice: Choice, at: str | None, *,
           strict: bool, skip: bool) -> None:  # fmt: skip
    """Raise DoesNotFit, with cause and fix, for what may not be loaded: keys that differ while
    `strict`, shapes that differ unless `skip`, a file of which nothing would load.
    """
    match = choice.match
    facts = []
    if strict and match.missing_keys:
        facts.append(f"{len(match.missing_keys):,} missing ({some(list(match.missing_keys))})")
    if strict and match.unexpected_keys:
        facts.append(f"{len(match.unexpected_keys):,} unexpected ({some(list(match.unexpected_keys))})")  # fmt: skip
    if match.mismatched and not skip:
        rows = [f"{m.key} {_sizes(m.file_shape)}, in the model {_sizes(m.model_shape)}" for m in match.mismatched]  # fmt: skip
        facts.append(f"{len(rows):,} of another shape ({some(rows)})")
    if not match.loaded and asked.wanted:
        facts = facts or [f"none of its {len(asked.wanted):,} keys is in the file"]
    if not facts:
        return
    found = choice.found or fit(checkpoint, asked, at)
    cause = found.cause
    said = [text for text in cause.findings if not text.startswith(_LOUD)][:1]
    why = "; ".join([cause.sentence, *said])
    text = f"it does not fit {asked.name}: {'; '.join(facts)}; nothing loaded. Cause: {why}"
    error = DoesNotFit(text, path=checkpoint.file, hint=_fix(choice, found, strict, skip))
    error.findings = (*cause.findings, *cause.choices)
    raise error


def _sizes(shape: Sequence[int] | None) -> str:
    return "no tensor" if shape is None else str(list(shape))


def _fix(choice: Choice, found: Fit, strict: bool, skip: bool) -> str:
    """What to do, the likeliest first."""
    cause, match = found.cause, choice.match
    ways = []
    if choice.found is None and cause.rules and len(cause.after.loaded) > len(match.loaded):
        ways.append(f"rules='auto' loads {len(cause.after.loaded):,} keys")
    if choice.found is None and found.command:
        ways.append(f"{found.command} writes a file that fits")
    if cause.choices:
        ways.append(f"name one with at= or rules=: {' | '.join(cause.choices[:3])}")
    if match.loaded and match.mismatched and not skip:
        ways.append("mismatched='skip' leaves those as the model has them")
    if match.loaded and strict and (match.missing_keys or match.unexpected_keys):
        ways.append(f"strict=False loads the {len(match.loaded):,} that fit")
    if not ways and cause.findings:
        ways.append(cause.findings[0])
    return "; ".join(ways) or "compare the names: ckptool inspect FILE --model SPEC"
