"""Key rules: keys in, `{old: new}` and drops out; conflicts found before a byte is written.

Knows: the order of rules, which names they see, when two names became one. Must not know: what
any rule does, files, tensors.

1. A name is components joined by dots.
2. Rules run in order, each on the names as they stand. Several `only` without a renaming rule
   between them are one rule: a key stays where one of them matches.
3. Two names that become one are refused at the rule that does it; a key dropped before takes
   no part. No rule loses a tensor but `only`, `drop` and `leave-out`, which alone takes what is
   no tensor too.
4. What is worth saying about wrappers is judged on the final names.

A new rule is one function and one row in `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ckptool import renaming, wrapping
from ckptool.errors import KeyCollision, UsageError
from ckptool.globs import compiled
from ckptool.keynames import Outcome, Remark, Rule
from ckptool.wrapping import UNCOUNTED, wrappers

__all__ = [
    "OF_TENSORS", "RULES", "UNCOUNTED", "Outcome", "Remark", "Row", "Rule", "apply", "check_collisions",
    "wrappers",
]  # fmt: skip


def _listed(names: Sequence[str], rule: Rule) -> dict[str, str]:
    """The names that stand in `pairs`: what --fit found to leave out, tensors or not, which no
    glob may widen.
    """
    listed = dict(rule.pairs)
    return {name: name for name in names if name in listed}


def _matching(names: Sequence[str], rule: Rule) -> dict[str, str]:
    match = compiled(rule.argument or "").match
    return {name: name for name in names if match(name)}


class Row(NamedTuple):
    """`match` gives the names a rule matches, each with the name it gets; `needs` says what its
    argument is, with an example. `tells` speaks of the match, `ends` of the final names.
    """

    match: Callable[[Sequence[str], Rule], dict[str, str]]
    needs: tuple[str, str] | None = None
    tells: Callable[[Sequence[str], Rule, Mapping[str, str]], list[Remark]] | None = None
    ends: Callable[[Sequence[str]], list[Remark]] | None = None


_PATH, _PREFIX, _GLOB = (
    ("the path of a module", "features"),
    ("a prefix", "model."),
    ("a glob", "'fc.*'"),
)

RULES: dict[str, Row] = {
    "strip-module-if-all": Row(wrapping.strip_module_if_all, ends=wrapping.partial),
    "strip-module": Row(wrapping.strip_module),
    "add-module": Row(wrapping.add_module),
    "add-module-at": Row(wrapping.add_module_at, _PATH),
    "unwrap": Row(wrapping.unwrap, ends=wrapping.left),
    "unwrap-at": Row(wrapping.unwrap_at, _PATH),
    "strip-prefix": Row(renaming.strip_prefix, _PREFIX, renaming.some_carry),
    "add-prefix": Row(renaming.add_prefix, _PREFIX),
    "rename": Row(renaming.rename, ("what to look for", r"'\.gamma$' .weight")),
    "rename-file": Row(renaming.rename_file, ("a file of names", "names.json"), renaming.unmatched),
    "only": Row(_matching, _GLOB),
    "drop": Row(_matching, _GLOB),
    "leave-out": Row(_listed),
}
_LEAVE_OUT = "leave-out"
OF_TENSORS = frozenset({"only", "drop", _LEAVE_OUT})
"""Rules that rename nothing."""


def apply(rules: Sequence[Rule], keys: Sequence[str], others: Sequence[str] = ()) -> Outcome:
    """Run `rules` over `keys`, the names of tensors, and `others`, names of other entries of the
    same dict, which only `leave-out` drops.

    Raises KeyCollision when two names would become one, UsageError on a rule that is none.
    """
    for rule in rules:
        _check(rule)
    names = _Names(keys, others)
    worked: set[Rule] = set()
    notes: list[Remark] = []
    for step in _steps(rules):
        found = [RULES[rule.name].match(names.seen_by(rule), rule) for rule in step]
        worked.update(rule for rule, match in zip(step, found, strict=True) if match)
        notes += _told(names, step[0], found[0])
        for more in found[1:]:
            found[0].update(more)
        names.take(step[0], found[0])
    for rule in rules:
        ends = RULES[rule.name].ends
        notes += ends(names.now) if ends else []
    idle = dict.fromkeys(rule for rule in rules if rule not in worked)
    drops = names.drops([*keys, *others])
    return Outcome(names.renames(), tuple(dict.fromkeys(notes)), tuple(idle), drops)


def _told(names: _Names, rule: Rule, match: Mapping[str, str]) -> list[Remark]:
    tells = RULES[rule.name].tells
    return tells(names.now, rule, match) if tells else []


def _steps(rules: Sequence[Rule]) -> list[list[Rule]]:
    """Rules one by one, but an `only` joins the one before it when just drops lie between."""
    steps: list[list[Rule]] = []
    only: list[Rule] | None = None
    for rule in rules:
        if rule.name == "only" and only is not None:
            only.append(rule)
            continue
        steps.append([rule])
        if rule.name != "drop":
            only = steps[-1] if rule.name == "only" else None
    return steps


def _check(rule: Rule) -> None:
    row = RULES.get(rule.name)
    if row is None:
        raise UsageError(f"no key rule is called '{rule.name}'")
    argument = rule.argument or ""
    if row.needs and not (argument.strip(".") if row.needs in (_PATH, _PREFIX) else argument):
        what, example = row.needs
        raise UsageError(f"--{rule.name} needs {what}, as in --{rule.name} {example}")


class _Names:
    """The keys that are left and the names that stand for them, tensors first."""

    def __init__(self, keys: Iterable[str], others: Iterable[str]) -> None:
        tensors = dict.fromkeys(keys)
        self.keys = list({**tensors, **dict.fromkeys(others)})
        self.now = list(self.keys)
        self.tensors = len(tensors)

    def seen_by(self, rule: Rule) -> list[str]:
        """Names a rule may match."""
        globs = rule.name in OF_TENSORS and rule.name != _LEAVE_OUT
        return self.now[: self.tensors] if globs else self.now

    def take(self, rule: Rule, found: dict[str, str]) -> None:
        """Do what `rule` means by the names it found."""
        if rule.name == "only":
            self._keep({*found, *self.now[self.tensors :]})
        elif not found:
            return
        elif rule.name in OF_TENSORS:
            self._keep(set(self.now) - found.keys())
        else:
            self._rename(rule, found)

    def _keep(self, wanted: Collection[str]) -> None:
        stay = [i for i, name in enumerate(self.now) if name in wanted]
        self.tensors = sum(i < self.tensors for i in stay)
        self.keys = [self.keys[i] for i in stay]
        self.now = [self.now[i] for i in stay]

    def _rename(self, rule: Rule, found: Mapping[str, str]) -> None:
        names = [found.get(name, name) for name in self.now]
        if len(set(names)) < len(names):
            raise self._collision(rule, names)
        self.now = names

    def _collision(self, rule: Rule, names: Sequence[str]) -> KeyCollision:
        (first, second), *more = _clashes(names, self.now)
        hint = _way_out(self.now[: self.tensors], [self.now[first], self.now[second]], rule)
        return _refusal(self.keys[first], self.keys[second], names[first], len(more), hint)

    def renames(self) -> dict[str, str]:
        """{key: final name} of what changed."""
        return {key: now for key, now in zip(self.keys, self.now, strict=True) if key != now}

    def drops(self, keys: Iterable[str]) -> tuple[str, ...]:
        """The keys that are gone."""
        left = set(self.keys)
        return tuple(key for key in dict.fromkeys(keys) if key not in left)


# Two names that become one


def check_collisions(keys: Iterable[str], renames: Mapping[str, str]) -> None:
    """Raise KeyCollision when two of `keys` have the same name after `renames`."""
    before = list(dict.fromkeys(keys))
    after = [renames.get(key, key) for key in before]
    clashes = _clashes(after, before)
    if clashes:
        first, second = clashes[0]
        hint = _way_out(before, [before[first], before[second]])
        raise _refusal(before[first], before[second], after[first], len(clashes) - 1, hint)


def _clashes(after: Sequence[str], before: Sequence[str]) -> list[tuple[int, int]]:
    """Places of names that became one; of each two, the one that moved is first."""
    owner: dict[str, int] = {}
    found = []
    for at, name in enumerate(after):
        held = owner.setdefault(name, at)
        if held != at:
            found.append((held, at) if before[held] != name else (at, held))
    return found


def _refusal(first: str, second: str, name: str, more: int, hint: str) -> KeyCollision:
    others = f" (and {more:,} more)" if more else ""
    text = f"'{first}' and '{second}' would both become '{name}'{others}; nothing written"
    return KeyCollision(text, hint=hint)


def _way_out(tensors: Sequence[str], pair: Sequence[str], rule: Rule | None = None) -> str:
    """The flag that leaves out one of a pair and nothing else, said only where there is one."""
    flags = []
    for name in reversed(pair):
        match = compiled(name).match
        if [other for other in tensors if match(other)] == [name]:
            flags.append("--drop '{}'".format(name.replace("'", "'\"'\"'")))
    if not flags:
        return "give one of them another name first, with --rename-file"
    way = f"keep one of them with {' or '.join(flags)}"
    if rule is None:
        return way
    if rule.name == "strip-module-if-all":
        return f"{way}, or leave names alone with --keep-module"
    return f"{way} before {rule.flag}"
