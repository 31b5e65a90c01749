"""inspect: what is in a file, and what to do about it.

Knows: what people want to know of a checkpoint. Must not know: printing, flags of a shell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Checkpoint, Note, Table, Tensor
from ckptool.errors import UsageError
from ckptool.formats.collector import paused
from ckptool.globs import match_glob
from ckptool.limits import DEFAULT, Limits
from ckptool.places import PlaceLike
from ckptool.rules import wrappers
from ckptool.verbs.advice import advise
from ckptool.verbs.numbering import numbered
from ckptool.verbs.opening import doubting
from ckptool.verbs.reading import Opened, opened
from ckptool.verbs.report import Inspection, headline
from ckptool.verbs.tables import choose_table

if TYPE_CHECKING:
    from ckptool.formats.alike import Alike
    from ckptool.verbs.fitting import Asked, Fit
    from ckptool.verbs.stats import Measurement
    from ckptool.verbs.stats_plan import Wish

    Measure = Callable[[Sequence[Tensor]], Measurement]


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
    place: PlaceLike,
    selection: Selection = Selection(),
    limits: Limits = DEFAULT,
    asked: Asked | None = None,
    wish: Wish | None = None,
    alike: Alike | None = None,
) -> Inspection:
    """Open, read and describe one file; `asked` is a model it is to fit, `wish` what to tell of the
    numbers of the tensors shown, `alike` what the files before it were. Raises CkptError, naming
    the file.
    """
    if asked is not None or wish is not None:  # they may ask the pickle itself
        alike = None
    reads = wish is not None and (wish.stats or wish.hash)

    def inspected(patient: bool) -> Inspection:
        with paused(), opened(
            place, limits, strict=reads, patient=patient, keep=False, alike=alike
        ) as found:  # fmt: skip
            seen = describe(found.checkpoint, selection, asked, measuring(found, wish, limits))
        if hasattr(found.checkpoint.handle, "let_go"):  # who shows it needs no pickle, no records
            return replace(seen, checkpoint=found.checkpoint._replace(handle=None))
        return seen

    return doubting(inspected)


def summarise_place(
    place: PlaceLike,
    at: str | None = None,
    limits: Limits = DEFAULT,
    alike: Alike | None = None,
) -> dict[str, Any]:
    """What a file is in a line (`report.headline`), without what there is to say of its tensors;
    `alike` is what the files before it were. Raises CkptError, naming the file.
    """
    with paused(), opened(place, limits, keep=False, alike=alike) as found:
        return headline(found.checkpoint, choose_table(found.checkpoint, at))


def measuring(found: Opened, wish: Wish | None, limits: Limits) -> Measure | None:
    """A function that reads tensors of an open file; None where nothing is asked of them."""
    if wish is None or not (wish.stats or wish.hash):
        return None
    from ckptool.verbs.stats import measure

    return lambda tensors: measure(found, tensors, wish, limits)


def describe(
    checkpoint: Checkpoint,
    selection: Selection = Selection(),
    asked: Asked | None = None,
    measure: Measure | None = None,
) -> Inspection:
    """Describe what was read. Raises UsageError for a path or an order that does not exist, and
    what `measure` raises, which reads the tensors shown.
    """
    found_fit = _fit(checkpoint, selection, asked) if asked is not None else None
    shown = choose_table(checkpoint, selection.at)
    if found_fit is not None and found_fit.table is not None:
        shown = found_fit.table
    rows = _select(shown, selection) if shown else ()
    limited = rows[: _limit(selection.limit, len(rows))]
    index, extra = _index(checkpoint, shown, found_fit) if selection.index else ({}, ())
    wrapped = {
        i: wrappers([t.key for t in table.tensors])
        for i, table in enumerate(checkpoint.tables)
        if _named(table)
    }
    found = next((tuple(wrapped[i]) for i in wrapped if checkpoint.tables[i] is shown), ())
    notes = (*advise(checkpoint, shown, wrapped), *extra)
    if found_fit is not None:
        notes = (*found_fit.notes, *(note for note in notes if note.slug not in _OF_NAMES))
    measured = None
    if measure is not None:
        measured = measure(limited)
        notes = (*measured.notes, *notes)
    return Inspection(
        checkpoint, shown, limited, len(rows), notes, found, index, found_fit, measured
    )


_OF_NAMES = ("module-prefix", "wrapper")  # what a model says of names counts for more


def _fit(checkpoint: Checkpoint, selection: Selection, asked: Asked) -> Fit:
    from ckptool.verbs.fitting import fit

    return fit(checkpoint, asked, selection.at)


def _index(
    checkpoint: Checkpoint, shown: Table | None, found: Fit | None
) -> tuple[dict[str, str], tuple[Note, ...]]:
    """Numbers of parameters: the model's own where there is one."""
    if found is not None and found.asked.is_model:
        from ckptool.verbs.fitting import numbers

        return numbers(found), ()
    return numbered(checkpoint, shown) if shown else ({}, ())


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
