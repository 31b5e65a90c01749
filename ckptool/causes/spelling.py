"""How a renaming is said: pairs of names as a few rules that a command line can carry.

Knows: components of names, regular expressions. Must not know: why names differ, files.

A way of saying it counts only when the rules, run as a conversion runs them, rename exactly the
pairs and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import starmap

from ckptool.errors import CkptError
from ckptool.keynames import Rule
from ckptool.rules import apply

MOST = 8
"""Rules that a person still reads; beyond that the names go into a file."""

_LONGEST = 500
"""Characters of a rule that a person still reads."""

Pairs = Mapping[str, str]
_DIGITS = re.compile(r"\d+")
_START, _END = r"(^|\.)", r"(?=\.|$)"


def spell(pairs: Pairs, names: Sequence[str]) -> tuple[Rule, ...]:
    """Rules that rename `names` by `pairs` {old: new} and touch no other; where a few regular
    expressions do not say it, one `rename-file` with all pairs.
    """
    ways = [rules for form in _FORMS if 0 < len(rules := form(pairs)) <= MOST]
    for rules in sorted(ways, key=len):
        if is_exact(rules, pairs, names):
            return tuple(rules)
    return (Rule("rename-file", "rename_keys", pairs=tuple(pairs.items())),)


def renaming(pairs: Pairs) -> str:
    """What a renaming does, in words: the part that changes, or an example."""
    heads = dict.fromkeys(_heads(*pair) for pair in pairs.items())
    if len(heads) <= 2 and all(old and new for old, new in heads):
        return " and ".join(f"renaming '{old}.' to '{new}.'" for old, new in heads)
    old, new = next(iter(pairs.items()))
    return f"renaming {len(pairs):,} key{'s' * (len(pairs) > 1)} ('{old}' to '{new}')"


def is_exact(rules: Sequence[Rule], pairs: Pairs, names: Sequence[str]) -> bool:
    """Whether `rules` make exactly `pairs` of `names`."""
    try:
        outcome = apply(rules, names)
    except CkptError:
        return False
    return outcome.renames == dict(pairs) and not outcome.drops and not outcome.idle


def flags(rules: Sequence[Rule]) -> str | None:
    """The rules as flags of `convert`; None where a file of names would be needed."""
    if any(rule.name == "rename-file" for rule in rules):
        return None
    return " ".join(rule.flag for rule in rules)


# -- where two names differ --------------------------------------------------------------------
def _common(left: Sequence[str], right: Sequence[str]) -> int:
    """Components that both begin with."""
    same = 0
    for one, two in zip(left, right, strict=False):
        if one != two:
            break
        same += 1
    return same


def _heads(old: str, new: str) -> tuple[str, str]:
    """Both without the components they end in."""
    left, right = old.split("."), new.split(".")
    same = _common(left[::-1], right[::-1])
    return ".".join(left[: len(left) - same]), ".".join(right[: len(right) - same])


def _tails(old: str, new: str, context: int) -> tuple[str, str]:
    """Both without the components they begin with, but for the last `context` of those."""
    left, right = old.split("."), new.split(".")
    same = max(_common(left, right) - context, 0)
    return ".".join(left[same:]), ".".join(right[same:])


# -- forms -------------------------------------------------------------------------------------
def _text(new: str) -> str:
    """As `re.sub` takes it."""
    return new.replace("\\", r"\\")


def _few(rows: Iterable[tuple[str, str] | None]) -> list[tuple[str, str]]:
    """Each once, the longest first (`layer1.0` before `layer1`); none at all where a row is None
    or they are too many or too long to be read.
    """
    found: dict[tuple[str, str], None] = {}
    for row in rows:
        if row is None or len(row[0]) + len(row[1]) > _LONGEST:
            return []
        found[row] = None
        if len(found) > MOST:
            return []
    return sorted(found, key=lambda row: -len(row[0]))


def _by_head(pairs: Pairs) -> list[Rule]:
    r"""`^net\.` to `model.`"""
    rows = _few(starmap(_heads, pairs.items()))
    return [Rule("rename", f"^{re.escape(_dotted(o))}", _text(_dotted(n))) for o, n in rows]


def _dotted(head: str) -> str:
    return f"{head}." if head else ""


def _by_name(pairs: Pairs) -> list[Rule]:
    """Whole names, where they are few."""
    return [Rule("rename", f"^{re.escape(o)}$", _text(n)) for o, n in _few(pairs.items())]


def _by_tail(context: int) -> Callable[[Pairs], list[Rule]]:
    def form(pairs: Pairs) -> list[Rule]:
        rows = _few(_tails(old, new, context) for old, new in pairs.items())
        return [
            Rule("rename", f"{_START}{re.escape(o)}$", rf"\g<1>{_text(n)}")
            for o, n in rows
            if o and n
        ]

    return form


def _by_part(pairs: Pairs) -> list[Rule]:
    """Each component that changes, wherever it stands."""
    split = [(old.split("."), new.split(".")) for old, new in pairs.items()]
    if any(len(left) != len(right) for left, right in split):
        return []
    rows = _few(
        part
        for left, right in split
        for part in zip(left, right, strict=True)
        if part[0] != part[1]
    )
    return [Rule("rename", f"{_START}{re.escape(o)}{_END}", rf"\g<1>{_text(n)}") for o, n in rows]


def _by_numbered_head(pairs: Pairs) -> list[Rule]:
    r"""`^layers\.(\d+)\.attn\.` to `blocks.\1.attention.`"""
    rows = _few(_template(*head) for head in starmap(_heads, pairs.items()))
    made = [_numbered(old, new, 0) for old, new in rows]
    return [Rule("rename", f"^{old}\\.", f"{new}.") for old, new in made]


def _by_numbered_middle(pairs: Pairs) -> list[Rule]:
    """The components in between, numbers kept."""
    tails = (_tails(old, new, 0) for old, new in pairs.items())
    rows = _few(_template(*middle) for middle in starmap(_heads, tails))
    made = [_numbered(old, new, 1) for old, new in rows]
    return [Rule("rename", f"{_START}{old}{_END}", rf"\g<1>{new}") for old, new in made]


_NUMBER = "\0"
"""Stands for a number; no key of a layer has it, and a rule that meets one is not exact."""


def _template(old: str, new: str) -> tuple[str, str] | None:
    """Both with their numbers left open; None where these differ, or one is empty."""
    if not (old and new) or _DIGITS.findall(old) != _DIGITS.findall(new):
        return None
    return _DIGITS.sub(_NUMBER, old), _DIGITS.sub(_NUMBER, new)


def _numbered(old: str, new: str, groups: int) -> tuple[str, str]:
    """An expression and its new text with the numbers as groups, after `groups` others."""
    expression = r"(\d+)".join(re.escape(part) for part in old.split(_NUMBER))
    first, *texts = [_text(part) for part in new.split(_NUMBER)]
    numbers = enumerate(texts, groups + 1)
    return expression, first + "".join(f"\\g<{at}>{text}" for at, text in numbers)


_FORMS: tuple[Callable[[Pairs], list[Rule]], ...] = (
    _by_head, _by_tail(0), _by_part, _by_tail(1), _by_numbered_middle, _by_numbered_head, _by_name,
)  # fmt: skip
