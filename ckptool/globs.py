"""Globs over dotted names, the same in every verb.

Knows: names made of components joined by dots. Must not know: rules, tables.

Names come from the file, so no glob may take more than linear time on one. A star takes as
little as it can and is never asked again. Nothing is missed that way: a literal without a dot
that fits early leaves the rest more room than one that fits late, and a literal with a dot fits
at one place of a component only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from itertools import count

_SKIP = r"(?:[^.]*\.)*?"  # whole components, as few as possible
_GAP = "[^.]*?"  # what one star takes
_END = r"(?=\.|\Z)"


def match_glob(pattern: str, key: str) -> bool:
    """Whether the glob `pattern` selects `key`.

    `*` and `?` stay within a component, `**` crosses dots. Without a dot the pattern is tried on
    each component (`fc` selects `fc.weight`, not `fc2.weight`); with dots it must match the key
    from its start to the end of a component (`layers.1` selects `layers.1.weight`).
    """
    return compiled(pattern).match(key) is not None


@lru_cache(maxsize=256)
def compiled(pattern: str) -> re.Pattern[str]:
    """The expression whose `match` (not `search`) on a key says whether `pattern` selects it."""
    settled = _settler()
    runs = re.sub(r"\*{3,}", "**", pattern).split("**")
    body = "(?s)"
    for i, run in enumerate(runs):
        last = i == len(runs) - 1
        literals = ["[^.]".join(map(re.escape, piece.split("?"))) for piece in run.split("*")]
        literals[-1] += _END if last else ""
        lead = _SKIP if i or "." not in pattern else ""
        lead += settled(_GAP + literals[0]) if i else literals[0]
        whole = lead + "".join(settled(_GAP + literal) for literal in literals[1:])
        body += whole if last else settled(whole)
    return re.compile(body)


def _settler() -> Callable[[str], str]:
    """What makes an expression match without second thoughts (atomic, as from Python 3.11)."""
    number = count()

    def settled(body: str) -> str:
        n = next(number)
        return f"(?=(?P<g{n}>{body}))(?P=g{n})"

    return settled
