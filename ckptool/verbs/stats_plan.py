"""Which views of which storages are read for statistics and hashes, in which pieces.

Knows: which tensors have numbers, in what order their elements are best read. Must not know: files,
threads, how numbers are reckoned with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptool.checkpoint import Tensor
from ckptool.limits import Limits
from ckptool.values.equal import Run, Seen, has_numbers
from ckptool.values.statistics import Room, Statistics, Tally, has_statistics, tally
from ckptool.values.stats_streams import once, plain_run
from ckptool.verbs.diff_files import SideFiles

Progress = Callable[[int, int], None]

LOT = 16 << 20
"""Bytes that one thread takes at a time, and between two calls of `progress`."""


class Wish(NamedTuple):
    """What is asked of each tensor; `progress` is called with (bytes done, bytes in all)."""

    stats: bool = False
    hash: bool = False
    progress: Progress | None = None


class Measured(NamedTuple):
    """One tensor: what was asked and could be told, and in words why the rest could not."""

    stats: Statistics | None = None
    sha256: str | None = None
    reason: str = ""


@dataclass(slots=True)
class View:
    """One distinct view of a storage, and what is known of it: tallies by the part they are of."""

    tensor: Tensor
    stats: bool
    hash: bool
    reason: str = ""
    times: int = 1
    sha256: str | None = None
    tallies: dict[int, Tally] = field(default_factory=dict)

    def told(self) -> Measured:
        """All of it."""
        stats = None
        if self.stats:
            total = tally_of(self.tensor)
            for _, part in sorted(self.tallies.items()):  # one order, whoever was first
                total.join(part)
            stats = total.statistics(self.times)
        return Measured(stats, self.sha256, self.reason)


class Task(NamedTuple):
    """Elements of a view that are read in one go; `run` says where they lie, None: all in order."""

    view: View
    run: Run | None
    start: int
    element_count: int

    @property
    def size_bytes(self) -> int:
        """Bytes of these elements."""
        return self.element_count * _item(self.view.tensor)


class Plan(NamedTuple):
    """The distinct views, which of them each tensor is, and the tasks in lots."""

    views: list[View]
    places: list[int]
    lots: list[list[Task]]
    total_bytes: int


def tally_of(tensor: Tensor, room: Room | None = None) -> Tally:
    """A tally of nothing yet for the elements of a tensor."""
    assert tensor.dtype is not None
    return tally(tensor.dtype, room)


def planned(files: SideFiles, tensors: Sequence[Tensor], wish: Wish, limits: Limits) -> Plan:
    """What to read for these tensors. Raises what spelling numbers out of a pickle raises."""
    known: dict[Any, int] = {}
    views: list[View] = []
    places = []
    for tensor in tensors:
        readable = files.readable(tensor)
        key = _identity(readable)
        if key not in known:
            known[key] = len(views)
            views.append(_view(readable, wish, limits))
        places.append(known[key])
    tasks = [task for view in views for task in _tasks(view, files)]
    return Plan(views, places, _lots(tasks), sum(task.size_bytes for task in tasks))


def _identity(t: Tensor) -> tuple[Any, ...]:
    storage = t.storage.key if t.storage is not None else t.path
    kind = "tensor" if t.kind == "parameter" else t.kind
    return (storage, t.dtype, t.shape, t.stride, t.offset, kind)


_WITHOUT = {
    "sparse": "a sparse tensor, which is made of several",
    "nested": "a nested tensor, which is made of several",
    "meta": "a meta tensor, which has no numbers",
    "uninitialized": "not initialized yet",
}
_UNREADABLE = {
    "subclass": "a tensor subclass, which is made of others",
    "foreign": "kept in a way that only its own class reads",
}


def _view(tensor: Tensor, wish: Wish, limits: Limits) -> View:
    dtype = tensor.dtype
    if tensor.kind in _WITHOUT:
        return View(tensor, False, False, _WITHOUT[tensor.kind])
    if dtype is None or not has_numbers(tensor):
        return View(tensor, False, False, _unreadable(tensor))
    bare, times = once(tensor)
    lacking = "" if has_statistics(dtype) else f"torch has no numbers for {dtype.name}"
    no_stats = lacking or _too_often(bare, limits)
    no_hash = _too_often(tensor, limits)
    reasons = [no_stats] if wish.stats and no_stats else []
    reasons += [no_hash] if wish.hash and no_hash else []
    reason = "; ".join(dict.fromkeys(reasons))
    stats, hashed = wish.stats and not no_stats, wish.hash and not no_hash
    if hashed:  # one pass over all of it for both
        bare, times = tensor, 1
    return View(bare, stats, hashed, reason, times)


def _unreadable(tensor: Tensor) -> str:
    if tensor.kind == "ndarray" and tensor.dtype is None:
        return "an array of a type that torch does not have"
    return _UNREADABLE.get(tensor.kind, "its numbers do not lie in the file in one piece")


def _too_often(tensor: Tensor, limits: Limits) -> str:
    """Why a view that takes elements of its storage again and again is not read; empty when it is."""
    held = tensor.storage.size_bytes if tensor.storage is not None else 0
    if tensor.size_bytes <= max(held, limits.repeated_bytes):
        return ""
    return f"a view of {tensor.size_bytes:,} bytes of a storage of {held:,}"


def _tasks(view: View, files: SideFiles) -> Iterator[Task]:
    if not (view.stats or view.hash):
        return
    count, item = view.tensor.count, _item(view.tensor)
    run = plain_run(Seen(view.tensor, files), any_order=not view.hash) if count else None
    step = max(LOT // item, 1) if run is not None and not view.hash else max(count, 1)
    for start in range(0, max(count, 1), step):
        yield Task(view, run, start, min(step, count - start))


def _item(tensor: Tensor) -> int:
    assert tensor.dtype is not None
    return tensor.dtype.size_bytes


def _lots(tasks: Sequence[Task]) -> list[list[Task]]:
    """Neighbours together, until they have about LOT bytes."""
    lots: list[list[Task]] = []
    size = 0
    for task in tasks:
        if not lots or size + task.size_bytes > LOT:
            lots.append([])
            size = 0
        lots[-1].append(task)
        size += task.size_bytes
    return lots
