"""A Plan written into files by many hands: its ranges are the tasks.

Knows: how the answers of workers are checked, what is kept for --resume. Must not know: formats, how
a range is written, who runs the tasks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ckptool import __version__
from ckptool.errors import CkptError, EngineError, OutputError
from ckptool.executors import AGAIN, Engine, carry_out, hands_of, prepare, refuse_secrets
from ckptool.interrupts import held
from ckptool.places import Source
from ckptool.plans import Plan, Written
from ckptool.ranges import (
    STEP,
    Done,
    Range,
    Sums,
    Task,
    check_sources,
    cut,
    step_for,
    task_of,
    write_task,
)
from ckptool.sinks import (
    FileSink,
    FolderSink,
    Target,
    check_none_is_source,
    check_space,
    findings_beside,
    output_error,
)
from ckptool.targets import write_all
from ckptool.taskbook import Book, Entry, Found, Temp, book_path, digest
from ckptool.values import RECIPES, CastCounts
from ckptool.writing import sync_folders, verify_target


def run_task(task: Task) -> Done:
    """What a worker runs. Raises UsageError on another version of ckptool than the driver's."""
    prepare(task.version, task.sources)
    return write_task(task, RECIPES)


def _write_here(task: Task, progress: Callable[[int], object]) -> Done:
    return write_task(task, RECIPES, progress)


def write_by(
    engine: Engine | None,
    plan: Plan,
    sink: FileSink | FolderSink,
    *,
    jobs: int = 1,
    resume: bool = False,
    check: bool = True,
    fsync: bool = True,
    verify: Callable[[Source], object] | None = None,
    progress: Callable[[int], object] | None = None,
    step: int | None = None,
) -> Written:
    """As `writing.write`, by tasks that an engine runs: the same bytes.

    A run that is killed leaves its temp files and a book of what is done; with `resume` a run of
    the same plan goes on from there, and one that fails leaves them too, where another try could
    help. Raises as `write`, and EngineError.
    """
    if engine is not None:
        refuse_secrets(source.uri for source in plan.sources)
    targets = sink.targets([output.name for output in plan.outputs])
    check_none_is_source(targets, plan.sources)
    step = step_for(sum(output.size_bytes for output in plan.outputs), step or STEP)
    run = _Run(plan, targets, step, check=check, fsync=fsync, far=engine is not None)
    try:
        run.begin(resume)
        with hands_of(engine, jobs, run_task, _write_here) as (executor, work):
            carry_out(executor, work, run.tasks(), partial(run.received, progress))
        run.finish(verify)
    except BaseException as error:
        raised = run.failed(error, sink.path, resume)
        if raised is error:
            raise
        raise raised from error
    finally:
        run.close()
    return run.written()


class _Run:
    """One write: its temp files, its book, and what the tasks have answered."""

    def __init__(
        self, plan: Plan, targets: list[Target], step: int, *, check: bool, fsync: bool, far: bool
    ) -> None:
        self._plan = plan
        self._targets = targets
        self._step = step
        self._check = check
        self._fsync = fsync
        self._far = far  # workers may be on other machines: each has to flush what it wrote
        self._ranges: list[Range] = cut(plan, step)
        self._sums = [Sums(output, check) for output in plan.outputs]
        self._known: dict[int, Entry] = {}
        self._adopted: set[int] = set()
        self._results: dict[int, tuple[tuple[str, Any], ...]] = {}
        self._book: Book | None = None
        self._keep = False
        self._bytes = self._found = 0
        self._notes: list[str] = []

    # -- before the tasks ----------------------------------------------------------------------
    def begin(self, resume: bool) -> None:
        """Temp files of full size, new ones or those of the run that is gone on with."""
        first = self._targets[0]
        self._notes = findings_beside(self._targets)
        if first.new:
            first.new.make()
        self._book = Book(book_path(first.folder, first.name))
        self._forget(os.path.basename(self._book.path))  # what became of it is told below
        plan = digest(self._plan, self._step, __version__, self._check)
        adopted = self._adopt(self._book.found, plan, resume)
        check_space(self._targets, [_missing(t, o.size_bytes) for t, o in self._pairs()])
        temps = [_made(target, output.size_bytes) for target, output in self._pairs()]
        self._known = {
            number: entry
            for number, entry in adopted.items()
            if number < len(self._ranges) and self._ranges[number].output in self._adopted
        }
        self._book.begin(plan, temps, self._known)

    def _pairs(self) -> Iterator[tuple[Target, Any]]:
        return zip(self._targets, self._plan.outputs, strict=True)

    def _adopt(self, found: Found | None, plan: str, resume: bool) -> dict[int, Entry]:
        """What an earlier run has done, its temp files taken over."""
        if found is None:
            return {}
        if found.plan != plan or len(found.temps) != len(self._targets):
            self._notes.append("what an interrupted run did is not used: it was another conversion")
            return {}
        if not resume:
            self._notes.append(
                "an interrupted run of this conversion was not gone on with: --resume does that"
            )
            return {}
        for number, (target, temp) in enumerate(zip(self._targets, found.temps, strict=True)):
            if temp.size == self._plan.outputs[number].size_bytes and target.adopt(*temp):
                self._adopted.add(number)
        self._forget(*(os.path.basename(t.temp) for t in self._targets if t.temp))
        return dict(found.done)

    def _forget(self, *names: str) -> None:
        """Drop what was said of files that are ours."""
        self._notes = [note for note in self._notes if not note.endswith(names)]

    def tasks(self) -> list[Task]:
        """All ranges; those an earlier run finished are only proven."""
        return [
            task_of(
                number, row, self._targets[row.output].temp, self._plan.sources,
                check=self._check, fsync=self._fsync and self._far, version=__version__,
                known=self._known[number].crcs if number in self._known else None,
            )
            for number, row in enumerate(self._ranges)
        ]  # fmt: skip

    # -- while they run ------------------------------------------------------------------------
    def received(self, progress: Callable[[int], object] | None, task: Task, done: Done) -> None:
        """One task is done: write it down. Raises EngineError for an answer to another task."""
        if done.number != task.number:
            raise EngineError("a worker answered for another task", hint="report this")
        row = self._ranges[task.number]
        self._sums[row.output].add(row, done.crcs)
        results = self._told(task.number) if done.found else done.results
        self._results[task.number] = results
        self._found += done.found
        told = plain_results(results)
        if self._book and not done.found and told is not None:
            self._book.add(task.number, Entry(done.crcs, told))
        self._bytes += task.size
        if progress:
            progress(self._bytes)

    def _told(self, number: int) -> tuple[tuple[str, Any], ...]:
        return results_of(self._known[number].results)

    # -- after them ----------------------------------------------------------------------------
    def finish(self, verify: Callable[[Source], object] | None) -> None:
        """Late parts, inputs that are what they were, the self-check, the disk; then the renames."""
        for number, target in enumerate(self._targets):
            late = self._sums[number].finish(self._plan.sources)
            _complete(target, late, self._plan.outputs[number].size_bytes, self._fsync)
        check_sources(self._plan.sources)
        for target in self._targets:
            verify_target(target, verify)
        with held("all was written before"):  # as in writing.write
            for target in self._targets:
                target.publish()
        self._notes += sync_folders(self._targets) if self._fsync else []

    def written(self) -> Written:
        """What was written, results in the order of the plan."""
        if self._known:
            self._notes.append(
                f"gone on from an interrupted run: {self._found:,} of {len(self._ranges):,} tasks were done"
            )
        outputs = tuple((t.path, o.size_bytes) for t, o in self._pairs())
        checked = sum(sums.checked_bytes for sums in self._sums)
        results = tuple(row for _, rows in sorted(self._results.items()) for row in rows)
        return Written(outputs, checked, tuple(self._notes), results)

    def failed(self, error: BaseException, path: str, resume: bool) -> BaseException:
        """The error to raise; temp files stay where `resume` is asked and could help."""
        gone = [target.path for target in self._targets if target.published]
        helps = isinstance(error, OSError | EngineError | KeyboardInterrupt)
        self._keep = resume and helps and not gone
        found: BaseException = error
        if isinstance(error, OSError):
            found = output_error(error, path, gone)
        if self._keep and isinstance(found, CkptError):
            found.hint = AGAIN if isinstance(found, EngineError) else f"{found.hint}; then {AGAIN}"
        elif isinstance(found, EngineError) and not resume:
            found.hint = "with --resume, what is done would have been kept"
        if self._keep and isinstance(error, KeyboardInterrupt):
            found = KeyboardInterrupt(AGAIN)
        return found

    def close(self) -> None:
        """Remove what is not kept."""
        for target in self._targets:
            if self._keep:
                target.leave()
            target.discard()
        if self._book:
            self._book.close(remove=not self._keep)


Numbers = tuple[tuple[str, tuple[int, ...]], ...]
"""(label of a Made part, what its recipe told)."""


def plain_results(results: Sequence[tuple[str, Any]]) -> Numbers | None:
    """Results as a book keeps them; None where one is of another kind."""
    if not all(isinstance(result, CastCounts) for _, result in results):
        return None
    return tuple((label, tuple(result)) for label, result in results)


def results_of(told: Numbers) -> tuple[tuple[str, Any], ...]:
    """Results as a task gave them."""
    return tuple((label, CastCounts(*counts)) for label, counts in told)


def _missing(target: Target, size: int) -> int:
    """Bytes the disk still has to find for it."""
    if not target.temp:
        return size
    return max(0, size - getattr(os.stat(target.temp), "st_blocks", 0) * 512)


def _made(target: Target, size: int) -> Temp:
    """The temp file, of its full size; made unless it was adopted."""
    if target.temp:
        fd = target.reopen()
    else:
        fd = target.open(int.from_bytes(os.urandom(6), "big"))
        os.ftruncate(fd, size)
    inode = os.fstat(fd).st_ino
    target.close(fsync=False)
    return Temp(os.path.basename(target.temp), inode, size)


def _complete(target: Target, late: Sequence[tuple[int, bytes]], size: int, fsync: bool) -> None:
    fd = target.reopen()
    for at, data in late:
        os.lseek(fd, at, os.SEEK_SET)
        write_all(fd, data)
    found = os.fstat(fd).st_size
    if found != size:
        raise OutputError(f"{found:,} bytes were written, {size:,} were planned", path=target.path)
    target.close(fsync=fsync)
