"""One output as a task: whole, to one object, by any worker, more than once.

Knows: what a worker is told, and what it answers. Must not know: formats, who runs the tasks.
A task is picklable and holds no secret: who may read and write is told by the worker's own
environment. Each object gets the mark of its run and task, so that a task which runs again (its
worker died, or was thought dead) knows its own object from another's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, NamedTuple

from ckptool.errors import CkptError, OutputError
from ckptool.executors import prepare
from ckptool.plans import Made, Output, Recipe
from ckptool.ranges import write_whole
from ckptool.remote_book import ObjectBook
from ckptool.remote_sink import ObjectTarget
from ckptool.remote_stores import Meta
from ckptool.remote_urls import locate
from ckptool.spans import Address
from ckptool.values import RECIPES

_ASK = 10.0  # seconds after which a worker asks whether the run still wants its object


class ObjectTask(NamedTuple):
    """One output, whose parts count their sources by their place in `sources`, to be sent to
    `url`. `mark` is given to the object; `book` and `driver` tell whether the run goes on. `again`:
    send it also where an object of this mark is there.
    """

    number: int
    url: str
    output: Output
    sources: tuple[Address, ...]
    mark: str
    book: str
    driver: str
    force: bool
    again: bool
    check: bool
    version: str

    @property
    def size(self) -> int:
        """Bytes it sends."""
        return self.output.size_bytes


class Stored(NamedTuple):
    """What became of a task: `meta` as the store says it; the rest as in `ranges.Done`."""

    number: int
    meta: Meta
    checked_bytes: int = 0
    results: tuple[tuple[str, Any], ...] = ()
    found: bool = False


def send_far(task: ObjectTask) -> Stored:
    """What a worker runs. Raises UsageError on another version of ckptool than the driver's."""
    prepare(task.version, task.sources)
    return send(task, RECIPES)


def send(
    task: ObjectTask,
    recipes: Mapping[str, Recipe],
    progress: Callable[[int], object] | None = None,
) -> Stored:
    """Send one object; it is seen when all of it was sent. Raises what `writing.write` raises,
    OutputError `output-busy` when the run does not want it any more.
    """
    place = locate(task.url)
    assert place is not None  # the driver sends to buckets alone
    watch = _Watch(ObjectBook(task.book, task.driver), progress)
    watch.book.check()
    target = ObjectTarget(place, force=task.force, mark=task.mark)
    there = target.ours
    if there is not None and not task.again and not _tells(task.output):
        return Stored(task.number, _right(task, target), found=True)
    try:
        target.check_space(task.size)
        checked, results = write_whole(
            task.output, target, task.sources, recipes, check=task.check, progress=watch
        )
        watch.book.check()
        target.publish()
    finally:
        target.discard()
    return Stored(task.number, _right(task, target), checked, results)


def _tells(output: Output) -> bool:
    """Whether a recipe may have something to tell, which only running it gives."""
    return any(isinstance(part, Made) for part in output.parts)


def _right(task: ObjectTask, target: ObjectTarget) -> Meta:
    """What the store has of this task. Raises OutputError unless that is all of it."""
    there = target.look()
    if there is None or there.mark != task.mark:
        raise OutputError(
            "the store does not have what was just sent, or not its metadata", path=target.path,
            hint="does another program write or remove there? Leave out --jobs, --engine and --resume",
        )  # fmt: skip
    if there.meta.size != task.size:
        text = f"the store kept {there.meta.size:,} bytes of {task.size:,} that were sent"
        raise OutputError(text, path=target.path, hint="send it again, with -f")
    return there.meta


class _Watch:
    """Passes on how far a task is; from time to time asks whether it is still wanted."""

    def __init__(self, book: ObjectBook, progress: Callable[[int], object] | None) -> None:
        self.book = book
        self._progress = progress
        self._asked = monotonic()

    def __call__(self, done: int) -> None:
        if self._progress:
            self._progress(done)
        if monotonic() - self._asked > _ASK:
            self._asked = monotonic()
            try:
                self.book.check()
            except OutputError:
                raise
            except CkptError:  # no answer: it is asked again, at the latest before the end
                return
