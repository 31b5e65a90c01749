"""The nouns of key rules.

Knows: what a rule, a remark and an outcome are. Must not know: any rule.
"""

from __future__ import annotations

from shlex import quote
from typing import NamedTuple


class Rule(NamedTuple):
    """One row of `rules.RULES` by name.

    `argument` is its path, prefix, glob, regular expression or file name; `to` the new text of
    `rename`; `pairs` are the (old, new) entries of `rename-file`.
    """

    name: str
    argument: str | None = None
    to: str | None = None
    pairs: tuple[tuple[str, str], ...] = ()

    @property
    def flag(self) -> str:
        """As it stands on a command line, quoted for a shell."""
        words = [quote(word) for word in (self.argument, self.to) if word is not None]
        return " ".join([f"--{self.name}", *words])


class Remark(NamedTuple):
    """Something to tell about the names; `command`, where set, is the flag that settles it.

    The fields are those of `checkpoint.Note`, which stands on this module's own floor.
    """

    slug: str
    text: str
    command: str | None = None


class Outcome(NamedTuple):
    """What rules make of a table's keys.

    `renames` {key: final name} holds changed keys only, in key order; `idle` are the rules that
    matched nothing, each once; `drops` the keys that are left out, in key order.
    """

    renames: dict[str, str]
    notes: tuple[Remark, ...] = ()
    idle: tuple[Rule, ...] = ()
    drops: tuple[str, ...] = ()


def some(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    listed = ", ".join(names[:3])
    return f"{listed} and {len(names) - 3:,} more" if len(names) > 3 else listed
