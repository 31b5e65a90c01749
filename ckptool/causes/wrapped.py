"""Wrappers between a file's names and a model's: which rules take them away or put them on.

Knows: how `rules.wrappers` reads names. Must not know: prefixes that are no wrapper, files, torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptool.causes.spelling import spell
from ckptool.causes.trials import Step, Target, Trial, Trials
from ckptool.errors import CkptError
from ckptool.keynames import Rule
from ckptool.rules import apply, wrappers

_INSIDE = ".module"
_UNWRAP, _STRIP = Rule("unwrap"), Rule("strip-module")


def unwrapped(trials: Trials) -> None:
    """Try the file's names without their wrappers."""
    rows = [name for name, _, _ in wrappers(trials.keys)]
    if not rows:
        return
    said = f"removing {_listed(rows)}"
    leads = [name for name in rows if name.endswith(".")]
    if any(name.startswith("module.") for name in leads):
        _try(trials, f"removing {_listed(_modules(leads))}", _STRIP)
    every = _interior(rows)
    dishonest = [path for path in every if not _has_module_below(trials.target, path)]
    for paths in (every, dishonest):
        inside = [Rule("unwrap-at", path) for path in paths]
        if inside:
            _try(trials, f"removing {_listed([path + _INSIDE for path in paths])}", *inside)
            _try(trials, said, _STRIP, *inside)
            _try(trials, said, _UNWRAP, *inside)
    _try(trials, said, _UNWRAP)


def _try(trials: Trials, deed: str, *rules: Rule) -> None:
    trials.run(trials.bare, Step(rules, deed, is_unwrapping=True))


def _modules(leads: Sequence[str]) -> list[str]:
    """The `module` that --strip-module takes of leading stacks."""
    found = []
    for lead in leads:
        parts = lead.split(".")[:-1]
        count = next((at for at, part in enumerate(parts) if part != "module"), len(parts))
        found.append("module." * count)
    return [name for name in dict.fromkeys(found) if name]


def _interior(rows: Sequence[str]) -> list[str]:
    """Paths with a `module` below, deepest first: rules run in order, and an outer one would
    move the path of an inner one.
    """
    paths = [name.removesuffix(_INSIDE) for name in rows if name.endswith(_INSIDE)]
    return sorted(paths, key=lambda path: -path.count("."))


def _has_module_below(target: Target, path: str) -> bool:
    """Whether the model itself has a `module` under a module of that name."""
    below = f"{path.rpartition('.')[2]}{_INSIDE}."
    return any(key.startswith(below) or f".{below}" in key for key in target.keys)


def _listed(names: Sequence[str]) -> str:
    """Leading stacks in quotes, `module` inside with its place."""
    words = [
        f"'module' under '{name.removesuffix(_INSIDE)}'" if name.endswith(_INSIDE) else f"'{name}'"
        for name in dict.fromkeys(names)
    ]
    more = f" and {len(words) - 3:,} more" if len(words) > 3 else ""
    return ", ".join(words[:3]) + more


# A wrapped model


def plain_target(target: Target) -> tuple[Target, dict[str, str]] | None:
    """The model without its wrappers, and {plain key: key}; None where it has none."""
    rows = [name for name, _, _ in wrappers(target.keys)]
    if not rows:
        return None
    inside = [Rule("unwrap-at", path) for path in _interior(rows)]
    for rules in ([_UNWRAP, *inside], inside, [_UNWRAP]):
        try:
            outcome = apply(rules, target.keys)
        except CkptError:
            continue
        if rules and not outcome.idle:
            back = {outcome.renames.get(key, key): key for key in target.keys}
            return target.renamed(outcome.renames), back
    return None


def rewrapped(trials: Trials, base: Trial, back: dict[str, str]) -> None:
    """Try to put the model's wrappers onto the plain names that `base` leads to."""
    start = trials.run(trials.bare, *base.steps)
    if start is None:
        return
    for step in _adding(trials.target):
        done = trials.run(start, step)
        if done is not None and done.loaded >= base.loaded:
            return
    said = f"adding {_listed([name for name, _, _ in wrappers(trials.target.keys)])}"
    names = [name for name in start.names if name is not None]
    for lead, add in (*_leads(trials.target), ("", None)):
        pairs = {name: back[name].removeprefix(lead) for name in names if name in back}
        pairs = {old: new for old, new in pairs.items() if old != new}
        inner = spell(pairs, names) if pairs else ()
        trials.run(start, Step((*inner, add) if add else inner, said))


def _adding(target: Target) -> list[Step]:
    """Rules that put wrappers on, the most usual first."""
    rows = wrappers(target.keys)
    inside = [Rule("add-module-at", path) for path in _interior([name for name, _, _ in rows])]
    said = f"adding {_listed([name for name, _, _ in rows])}"
    steps = [Step(tuple(inside), said)] if inside else []
    for _, add in _leads(target):
        steps.insert(0, Step((add,), said))
        steps.append(Step((*inside, add), said))
    return steps


def _leads(target: Target) -> list[tuple[str, Rule]]:
    """The stack that all keys of a model begin with, and the rule that adds it."""
    leads = [
        name for name, count, total in wrappers(target.keys) if name[-1] == "." and count == total
    ]
    return [
        (lead, Rule("add-module") if lead == "module." else Rule("add-prefix", lead))
        for lead in leads
    ]
