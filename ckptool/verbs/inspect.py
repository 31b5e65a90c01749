"""inspect: what is in a file, and what to do about it.

Knows: what people want to know of a checkpoint. Must not know: printing, flags of a shell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptool.checkpoint import Checkpoint, Table, Tensor
from ckptool.errors import UsageError
from ckptool.globs import match_glob
from ckptool.limits import DEFAULT, Limits
from ckptool.places import PlaceLike
from ckptool.rules import wrappers
from ckptool.verbs.advice import advise
from ckptool.verbs.numbering import numbered
from ckptool.verbs.reading import opened
from ckptool.verbs.report import Inspection
from ckptool.verbs.tables import choose_table


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows are shown, in which order. Globs as `rules.match_glob` reads them."""

    at: str | None = None
    only: Sequence[str] = ()
    drop: Sequence[str] = ()
    sort: str = "order"
    limit: int | None = None  # -1: what fits a terminal
    index: bool = False


def inspect_place(
    place: PlaceLike, selection: Selection = Selection(), limits: Limits = DEFAULT
) -> Inspection:
    """Open, read and describe one file. Raises CkptError, naming the file."""
    with opened(place, limits) as found:
        return describe(found.checkpoint, selection)


def describe(checkpoint: Checkpoint, selection: Selection = Selection()) -> Inspection:
    """Describe what was read. Raises UsageError for a path or an order that does not exist."""
    shown = choose_table(checkpoint, selection.at)
    rows = _select(shown, selection) if shown else ()
    limited = rows[: _limit(selection.limit, len(rows))]
    index, extra = numbered(checkpoint, shown) if selection.index and shown else ({}, ())
    wrapped = {
        i: wrappers([t.key for t in table.tensors])
        for i, table in enumerate(checkpoint.tables)
        if _named(table)
    }
    found = next((tuple(wrapped[i]) for i in wrapped if checkpoint.tables[i] is shown), ())
    notes = (*advise(checkpoint, shown, wrapped), *extra)
    return Inspection(checkpoint, shown, limited, len(rows), notes, found, index)


_LONG, _SCREEN = 200, 100  # a table over 200 rows is cut to 100 on a terminal


def _limit(limit: int | None, count: int) -> int:
    """Rows to keep; -1 stands for what fits a terminal."""
    if limit is None or (limit < 0 and count <= _LONG):
        return count
    return limit if limit >= 0 else _SCREEN


def _named(table: Table) -> bool:
    """Whether its keys are names of parameters (not paths we made up)."""
    return table.kind != "tensors"


_SORTS = {
    "order": None,
    "name": lambda t: t.key,
    "size": lambda t: -t.size_bytes,
}


def _select(table: Table, selection: Selection) -> tuple[Tensor, ...]:
    rows = [
        t for t in table.tensors
        if (not selection.only or any(match_glob(glob, t.key) for glob in selection.only))
        and not any(match_glob(glob, t.key) for glob in selection.drop)
    ]  # fmt: skip
    if selection.sort not in _SORTS:
        raise UsageError(f"there is no order '{selection.sort}'", hint="one of order, name, size")
    order = _SORTS[selection.sort]
    return tuple(sorted(rows, key=order) if order else rows)
