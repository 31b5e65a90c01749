"""Trying rules on the names of a table: what they make match, counted the quick way.

Knows: keys and shapes of both sides, what `rules.apply` makes of names. Must not know: which
rules are worth trying, torch, files.

A rule counts by what it really makes match: every trial runs the very rules that a conversion
would run, and one that a conversion would refuse is no trial.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptool.causes.modules import DEEPEST
from ckptool.checkpoint import DTYPES, Table, Wanted
from ckptool.compare import COUNTER, Shape, takes
from ckptool.errors import CkptError
from ckptool.keynames import Rule
from ckptool.layer_versions import metadata_renames
from ckptool.rules import apply

MOST_OWNERS = 4
"""Keys of a model that one ending may stand for; what more of them share names no place."""


class Step(NamedTuple):
    """Rules that belong together, and what they do in words (`removing 'module.'`)."""

    rules: tuple[Rule, ...]
    deed: str
    is_unwrapping: bool = False


class Target:
    """The keys a model wants, in its order."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self.wanted = tuple(wanted)
        self.shapes: dict[str, Shape] = {row.key: row.shape for row in self.wanted}
        self.keys = tuple(self.shapes)
        self.required = sum(key.rpartition(".")[2] != COUNTER for key in self.keys)
        self.kinds = _kinds(self.wanted)
        self._endings: dict[str, list[str]] | None = None

    def takes(self, key: str, shape: Shape) -> bool:
        """Whether the model has this key in this shape."""
        return key in self.shapes and takes(self.shapes[key], shape)

    def owners(self, ending: str) -> list[str]:
        """The keys that are these components or end in them; none where they are too many."""
        if self._endings is None:
            self._endings = {}
            for key in self.keys:
                for end in endings(key):
                    self._endings.setdefault(end, []).append(key)
        found = self._endings.get(ending, [])
        return found if len(found) <= MOST_OWNERS else []

    def renamed(self, names: dict[str, str]) -> Target:
        """The same with other keys."""
        return Target([row._replace(key=names.get(row.key, row.key)) for row in self.wanted])


def _kinds(wanted: Sequence[Wanted]) -> dict[str, str]:
    """{key: float, int …}; empty unless the model says the dtype of every tensor."""
    found = {row.key: DTYPES[row.dtype].kind for row in wanted if row.dtype in DTYPES}
    return found if all(row.key in found or row.shape is None for row in wanted) else {}


def endings(name: str) -> Iterator[str]:
    """The name, then the name without its first component, and so on; of names beyond all
    measure the name alone.
    """
    if name.count(".") >= DEEPEST:
        yield name
        return
    while name:
        yield name
        name = name.partition(".")[2]


@dataclass(frozen=True, slots=True)
class Trial:
    """What `steps` make of a table: `names` beside its keys (None: left out), and counts of the
    model's keys (counters of BatchNorm, which torch may forgive, are never `missing`).
    """

    steps: tuple[Step, ...]
    names: tuple[str | None, ...]
    loaded: int
    mismatched: int
    missing: int
    unexpected: int

    @property
    def rules(self) -> tuple[Rule, ...]:
        """All rules, in order."""
        return tuple(rule for step in self.steps for rule in step.rules)

    @property
    def fits(self) -> bool:
        """Whether nothing is missing, mismatched or unexpected."""
        return not (self.missing or self.mismatched or self.unexpected)

    @property
    def gap(self) -> int:
        """The model's keys that do not load."""
        return self.missing + self.mismatched

    @property
    def rank(self) -> tuple[int, ...]:
        """More is better (a name that is right counts half, a shape that is too the rest); of two
        that do the same, what a command line can say, then the shorter.
        """
        return (
            2 * self.loaded + self.mismatched, self.loaded, -self.unexpected,
            *(-cost for cost in map(sum, zip((0, 0), *map(_cost, self.rules), strict=True))),
        )  # fmt: skip


_RULE = 30
"""What a rule costs, in characters of what it renames."""


def _cost(rule: Rule) -> tuple[int, int]:
    """How long a rule is to say: files of names, and characters."""
    if rule.name == "rename-file":
        return 1, _RULE + sum(len(old) + len(new) for old, new in rule.pairs)
    if rule.name == "rename":
        return 0, _RULE + len(rule.argument or "") + len(rule.to or "")
    return 0, _RULE


class Trials:
    """Trials of one table against one model; the same rules are tried once."""

    def __init__(self, table: Table, target: Target) -> None:
        self.table = table
        self.target = target
        tensors = {tensor.key: tensor for tensor in table.tensors}
        self.keys = tuple(tensors)
        self.shapes: tuple[Shape, ...] = tuple(t.shape for t in tensors.values())
        self.dtypes = tuple(t.dtype.kind if t.dtype else "" for t in tensors.values())
        self._others = tuple(key for key, _ in table.others if key not in tensors)
        self._done: dict[tuple[Rule, ...], Trial | None] = {}
        self.bare = self._count((), self.keys)
        self._done[()] = self.bare
        self._sound: dict[tuple[Step, ...], bool] = {}

    @property
    def all(self) -> list[Trial]:
        """Every trial that went through, in order."""
        return [trial for trial in self._done.values() if trial is not None]

    def run(self, base: Trial, *steps: Step) -> Trial | None:
        """`steps` after those of `base`; None where a conversion would refuse them: two names
        become one, or a rule matches nothing.
        """
        every = base.steps + steps
        rules = tuple(rule for step in every for rule in step.rules)
        if rules not in self._done:
            self._done[rules] = self._try(every, rules)
        return self._done[rules]

    def _try(self, steps: tuple[Step, ...], rules: tuple[Rule, ...]) -> Trial | None:
        try:
            outcome = apply(rules, self.keys, self._others)
        except CkptError:
            return None
        if outcome.idle:
            return None
        gone = frozenset(outcome.drops)
        renames = outcome.renames
        names = [None if key in gone else renames.get(key, key) for key in self.keys]
        return self._count(steps, names)

    def _count(self, steps: tuple[Step, ...], names: Sequence[str | None]) -> Trial:
        loaded = mismatched = unexpected = required = 0
        shapes = self.target.shapes
        for name, shape in zip(names, self.shapes, strict=True):
            if name is None:
                continue
            if name not in shapes:
                unexpected += 1
                continue
            required += name.rpartition(".")[2] != COUNTER
            if takes(shapes[name], shape):
                loaded += 1
            else:
                mismatched += 1
        missing = self.target.required - required
        return Trial(steps, tuple(names), loaded, mismatched, missing, unexpected)

    def is_sound(self, trial: Trial) -> bool:
        """Whether each step is the model's: half of the names it changes are keys of the model in
        the end, or fill half of the model.
        """
        if trial.steps not in self._sound:
            self._sound[trial.steps] = all(self._lands(trial, at) for at in range(len(trial.steps)))
        return self._sound[trial.steps]

    def _lands(self, trial: Trial, at: int) -> bool:
        before = self.run(self.bare, *trial.steps[:at])
        after = self.run(self.bare, *trial.steps[: at + 1])
        if before is None or after is None:
            return False
        changed = landed = 0
        for old, new, name in zip(before.names, after.names, trial.names, strict=True):
            if name is not None and old != new:
                changed += 1
                landed += name in self.target.shapes
        return landed * 2 >= min(changed, self.target.required)

    def sources(self, trial: Trial) -> dict[str, str]:
        """{key of the model: key of the file that would be loaded there}."""
        rows = zip(trial.names, self.keys, self.shapes, strict=True)
        return {name: key for name, key, shape in rows if name and self.target.takes(name, shape)}

    def unmatched(self, trial: Trial) -> list[tuple[str, Shape, str]]:
        """Names the model does not have, in file order: (name, shape, kind of dtype)."""
        rows = zip(trial.names, self.shapes, self.dtypes, strict=True)
        return [row for row in rows if row[0] and row[0] not in self.target.shapes]  # type: ignore[misc]

    def others(self, trial: Trial) -> list[str]:
        """The names of the entries that are no tensors, after a trial."""
        renames = apply(trial.rules, self.keys, self._others).renames
        return [renames.get(key, key) for key in self._others]

    def have(self, trial: Trial) -> tuple[dict[str, Shape], dict[str, Any] | None]:
        """The entries of the table after a trial and its `_metadata`, as a loader gets them."""
        outcome = apply(trial.rules, self.keys, self._others)
        gone = frozenset(outcome.drops)
        shapes = dict(zip(self.keys, self.shapes, strict=True))
        order = dict.fromkeys((*self.table.order, *self.keys, *self._others))
        left = [key for key in order if key not in gone]
        entries = {outcome.renames.get(key, key): shapes.get(key) for key in left}
        metadata = self.table.metadata
        if metadata is None or not outcome.renames:
            return entries, None if metadata is None else dict(metadata)
        moved, dropped = metadata_renames(list(metadata), outcome.renames, left)
        lost = frozenset(dropped)
        kept = {
            moved.get(path, path): value for path, value in metadata.items() if path not in lost
        }
        return entries, kept
