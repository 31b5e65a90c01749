"""What the numbers of tensors are like, and hashes of their bytes: inspect --stats and --hash.

Knows: who reads what, what to say of tensors that are odd. Must not know: printing, how numbers are
reckoned with.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from hashlib import sha256
from typing import Any, NamedTuple

from ckptool.checkpoint import Note, Tensor
from ckptool.errors import Unsupported
from ckptool.limits import Limits
from ckptool.values.equal import Seen
from ckptool.values.statistics import Room, Statistics, Tally, counts_codes
from ckptool.values.stats_streams import all_blocks, in_order, run_blocks
from ckptool.verbs.diff_files import SideFiles
from ckptool.verbs.reading import Opened
from ckptool.verbs.stats_crew import Hand, Tick, at_once, hand_count, in_turn
from ckptool.verbs.stats_plan import LOT, Measured, Plan, Task, Wish, planned, tally_of

_WORTH = 4 << 20  # bytes from which on threads pay


class Measurement(NamedTuple):
    """What was asked, and one row for each tensor asked, in their order."""

    wish: Wish
    rows: tuple[Measured, ...] = ()
    notes: tuple[Note, ...] = ()

    def of(self, row: Measured) -> dict[str, Any]:
        """What JSON says of a row: null where something asked could not be told, and why."""
        found: dict[str, Any] = {}
        if self.wish.stats:
            found["stats"] = None if row.stats is None else row.stats.to_dict()
        if self.wish.hash:
            found["sha256"] = row.sha256
        if row.reason:
            found["not_measured"] = row.reason
        return found


def measure(found: Opened, tensors: Sequence[Tensor], wish: Wish, limits: Limits) -> Measurement:
    """Read the tensors once, in constant memory; one that stands under several names once for all.

    Raises what reading raises, InputChanged.
    """
    with ExitStack() as stack:
        files = _Files(found, stack)
        plan = planned(files.main, tensors, wish, limits)
        told = _told(plan, files, wish)
        files.check_unchanged()
    rows = tuple(told[place] for place in plan.places)
    return Measurement(wish, rows, _notes(tensors, rows))


# -- reading -----------------------------------------------------------------------------------
class _Files:
    """The open file, or the shards of a folder, once for each thread."""

    def __init__(self, found: Opened, stack: ExitStack) -> None:
        self._found, self._stack = found, stack
        self._made: list[SideFiles] = []
        self.main = self.another()

    def another(self) -> SideFiles:
        """For one more thread."""
        self._made.append(SideFiles(self._found))
        self._stack.callback(self._made[-1].close)
        return self._made[-1]

    def check_unchanged(self) -> None:
        """Raise InputChanged when a file is not the one that was opened."""
        for one in self._made:
            one.check_unchanged()


class _Done(NamedTuple):
    """What came of a task."""

    task: Task
    tally: Tally | None = None
    sha256: str | None = None
    reason: str = ""


def _told(plan: Plan, files: _Files, wish: Wish) -> list[Measured]:
    done = 0

    def tick(size: int) -> None:
        nonlocal done
        done += size
        if wish.progress is not None:
            wish.progress(done, plan.total_bytes)

    with closing(_results(plan, files, tick)) as results:
        for lot in results:
            for row in lot:
                _take(row)
    return [view.told() for view in plan.views]


def _take(row: _Done) -> None:
    view = row.task.view
    if row.reason:
        view.stats = view.hash = False
        view.reason = row.reason
    if row.tally is not None:
        view.tallies[row.task.start] = row.tally
    view.sha256 = row.sha256


def _results(plan: Plan, files: _Files, tick: Tick) -> Generator[list[_Done], None, None]:
    texts = any(_is_text(view.tensor) for view in plan.views)  # they are held by one reader
    count = 1 if texts or plan.total_bytes < _WORTH else min(hand_count(), len(plan.lots))
    if count <= 1:
        yield from in_turn(plan.lots, _hand(files.main, nullcontext()), tick)
        return
    from threading import Lock

    lock = Lock()
    hands = [_hand(files.another(), lock) for _ in range(count)]
    with closing(at_once(plan.lots, hands, tick)) as results:
        yield from results


def _is_text(tensor: Tensor) -> bool:
    return tensor.storage is not None and any(p.source_id < 0 for p in tensor.storage.pieces)


def _hand(files: SideFiles, lock: AbstractContextManager[Any]) -> Hand[list[Task], list[_Done]]:
    """A function that works off a lot. What is put in order takes the most memory: one at a time."""
    room = Room()

    def work(lot: list[Task], tick: Tick) -> list[_Done]:
        rows, meter = [], _Meter(tick)
        for task in lot:
            scattered = task.run is None and not in_order(task.view.tensor)
            with lock if scattered else nullcontext():
                rows.append(_measured(task, files, room, meter))
        meter.flush()
        return rows

    return work


class _Meter:
    """Bytes that are done, told in large sums."""

    def __init__(self, tick: Tick) -> None:
        self._tick = tick
        self._waiting = 0

    def add(self, size: int) -> None:
        self._waiting += size
        if self._waiting >= LOT:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            self._tick(self._waiting)
        self._waiting = 0


def _measured(task: Task, files: SideFiles, room: Room, meter: _Meter) -> _Done:
    """Read it once. Unsupported is a reason, all else is raised."""
    tensor = task.view.tensor
    total = tally_of(tensor, room) if task.view.stats else None
    digest = sha256() if task.view.hash else None
    seen = Seen(tensor, files)
    try:
        if task.run is not None:
            blocks = run_blocks(seen, task.run, task.start, task.element_count)
        else:
            blocks = all_blocks(seen)
        for block in blocks:
            if total is not None:
                total.add(block)
            if digest is not None:
                digest.update(block)
            meter.add(len(block))
    except Unsupported as error:
        return _Done(task, reason=error.text)
    return _Done(task, total, digest.hexdigest() if digest is not None else None)


# -- what to say -------------------------------------------------------------------------------
_NAMED = 3  # tensors that a note names


def _notes(tensors: Sequence[Tensor], rows: Sequence[Measured]) -> tuple[Note, ...]:
    pairs = list(zip(tensors, rows, strict=True))
    odd = [f"'{t.key}' ({_odd(row.stats)})" for t, row in pairs if row.stats and _odd(row.stats)]
    codes = [f"'{t.key}'" for t, row in pairs if row.stats and t.dtype and counts_codes(t.dtype)]
    lacking = [f"'{t.key}' ({row.reason})" for t, row in pairs if row.reason]
    found = []
    if odd:
        text = (
            f"NaN or infinities in {len(odd):,} of {_counted(len(rows), 'tensor')}: {_listed(odd)}"
        )
        found.append(Note("nonfinite", f"{text}; the other figures are of the finite numbers"))
    if codes:
        text = (
            f"{_counted(len(codes), 'quantized tensor')} by raw codes, before scale and zero point"
        )
        found.append(Note("raw-codes", f"{text}: {_listed(codes)}"))
    if lacking:
        text = f"{_counted(len(lacking), 'tensor')} not measured: {_listed(lacking)}"
        found.append(Note("not-measured", text))
    return tuple(found)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _odd(stats: Statistics) -> str:
    counts = ((stats.nan_count, "NaN"), (stats.inf_count, "infinite"))
    return ", ".join(f"{count:,} {word}" for count, word in counts if count)


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + rest
