"""A Plan sent to a bucket by many hands: each of its larger outputs is a task, the index comes last.

Knows: which objects may be replaced, how the answers of workers are checked, what is kept for
--resume. Must not know: formats, how an object is sent.
Objects are seen one after another here, not all at once as where one process sends them. So that
nobody loads old and new ones together, an old index that is to be replaced goes first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from threading import Lock
from time import sleep
from typing import Any

from ckptool import __version__
from ckptool.engines import plain_results, results_of
from ckptool.errors import (
    CkptError,
    CrcMismatch,
    EngineError,
    InputChanged,
    OutputError,
    SpecialFile,
    StorageSize,
)
from ckptool.executors import AGAIN, Engine, carry_out, hands_of, refuse_secrets
from ckptool.plans import Literal, Output, Plan, Written
from ckptool.ranges import localised
from ckptool.reads import Source
from ckptool.remote_book import NAME, Found, Kept, ObjectBook, busy
from ckptool.remote_folder import RemoteFolder
from ckptool.remote_sink import EXISTS, ObjectTarget, PrefixSink, is_object, place_under
from ckptool.remote_source import open_object
from ckptool.remote_stores import Look, Store
from ckptool.remote_tasks import ObjectTask, Stored, send, send_far
from ckptool.remote_urls import Located
from ckptool.sinks import Outlet, check_none_is_source, refuse_mixed
from ckptool.targets import output_error, refusal
from ckptool.taskbook import digest
from ckptool.values import RECIPES
from ckptool.writing import write

_PATIENCE = 30.0  # seconds for workers to find out that the run was given up: they ask every 10
_GRACE = 2.0  # seconds for one that has just asked; Dask calls those cancelled that still run


def send_by(
    engine: Engine | None,
    plan: Plan,
    sink: PrefixSink,
    *,
    jobs: int = 1,
    resume: bool = False,
    check: bool = True,
    verify: Callable[[Source], object] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Written:
    """As `engines.write_by`, to objects under a prefix.

    A run that is killed leaves the objects it has sent, and a book of them beside them, which
    `resume` goes on from; one that fails leaves them with `resume`, where another try could help,
    and removes them else. Raises as `writing.write`, and EngineError.
    """
    if engine is not None:
        refuse_secrets([*(source.uri for source in plan.sources), sink.url])
    run = _Run(plan, sink, check=check, resume=resume, far=engine is not None)
    told = _Told(progress)
    try:
        run.begin()
        told.add(run.kept_bytes())

        def received(task: ObjectTask, stored: Stored) -> None:
            run.received(task, stored)
            told.reached(task.number, task.size)

        def here(task: ObjectTask, tick: Callable[[int], object]) -> Stored:
            def both(done: int) -> None:
                tick(done)
                told.reached(task.number, done)

            return send(task, RECIPES, both)

        with hands_of(engine, jobs, send_far, here) as (executor, work):
            carry_out(executor, work, run.tasks(), received, run.left)
        run.finish(verify)
    except BaseException as error:
        raised = run.failed(error)
        if raised is error:
            raise
        raise raised from error
    return run.written()


class _Told:
    """How far all tasks are together; those in threads of ours tell it themselves."""

    def __init__(self, progress: Callable[[int], object] | None) -> None:
        self._progress = progress
        self._lock = Lock()
        self._done: dict[int, int] = {}

    def add(self, size: int) -> None:
        """These bytes were there before."""
        self._done[-1] = size

    def reached(self, number: int, done: int) -> None:
        """So far is this task."""
        with self._lock:
            self._done[number] = done
            if self._progress:
                self._progress(sum(self._done.values()))


class _Given:
    """A sink of targets that are there already."""

    def __init__(self, path: str, made: Sequence[Outlet]) -> None:
        self.path = path
        self._made = made

    def targets(self, names: Sequence[str]) -> Sequence[Outlet]:
        return self._made


class _Run:
    """One conversion: its book, the objects that tasks send, and those the driver sends itself."""

    def __init__(
        self, plan: Plan, sink: PrefixSink, *, check: bool, resume: bool, far: bool
    ) -> None:
        self._plan = plan
        self._sink = sink
        self._check = check
        self._resume = resume
        self._far = far
        self._driver = os.urandom(8).hex()
        self._run = os.urandom(8).hex()
        self._book = ObjectBook(f"{sink.url}/{NAME}", self._driver)
        self._begun = self._given_up = self._complete = False
        self._places: dict[int, Located] = {}  # of what tasks send
        self._own: dict[int, Outlet] = {}  # literal alone: an index, and what goes elsewhere
        self._kept: dict[int, Kept] = {}  # done by an earlier run
        self._again: set[int] = set()
        self._foreign: list[str] = []  # names of what -f replaces
        self._asked = 0
        self._stored: dict[int, Stored] = {}
        self._notes: list[str] = []

    # -- before the tasks ----------------------------------------------------------------------
    def begin(self) -> None:
        """See what lies there, take the book. Raises OutputError for what may not be replaced."""
        there = set(self._sink.folder.list())
        plan = digest(self._plan, 0, __version__, self._check)
        old = self._book.read() if NAME in there else None
        found = self._adopted(old, plan)
        inside = [o.name for o in self._plan.outputs if o.name not in self._sink.beside]
        refuse_mixed(self._sink.path, sorted(there), inside)
        self._sort_outputs()
        self._look_around(there, found)
        kept = {self._plan.outputs[number].name: row for number, row in self._kept.items()}
        self._begun = True
        self._book.begin(plan, self._run, kept, create=old is None)
        for number, target in self._own.items():
            name = self._plan.outputs[number].name
            if name in self._foreign and isinstance(target, ObjectTarget):
                Store(place_under(self._sink.url, name)).delete()

    def _adopted(self, old: Found | None, plan: str) -> Found | None:
        """The book of the run that is gone on with."""
        if old is None:
            return None
        if self._resume and old.plan == plan:
            self._run = old.run
            return old
        if not self._resume and not self._sink.force:
            raise busy(self._book.place)
        if not self._sink.force:
            raise refusal(
                self._sink.path, "exists",
                "what an interrupted run sent is of another conversion (other inputs, or other options)",
                "give the options and inputs of that run, another -o, or -f to begin anew",
            )  # fmt: skip
        self._notes.append("what an interrupted run sent is not used: it is sent anew")
        return None

    def _sort_outputs(self) -> None:
        beside, url = self._sink.beside, self._sink.url
        for number, output in enumerate(self._plan.outputs):
            if output.name in beside:
                self._own[number] = beside[output.name]
                continue
            place = place_under(url, output.name)
            if any(is_object(source, place) for source in self._plan.sources):
                raise refusal(place.name, "same", "the output is the input itself")
            if all(isinstance(part, Literal) for part in output.parts):
                self._own[number] = ObjectTarget(
                    place, force=self._sink.force, mark=self._mark(number)
                )
            else:
                self._places[number] = place
        check_none_is_source(list(self._own.values()), self._plan.sources)

    def _mark(self, number: int) -> str:
        return f"{self._run}/{number}"

    def _look_around(self, there: set[str], found: Found | None) -> None:
        """What is done, what is replaced. Raises OutputError `output-exists`."""
        for number, output in enumerate(self._plan.outputs):
            if output.name not in there or output.name in self._sink.beside:
                continue
            place = place_under(self._sink.url, output.name)
            look = Store(place).look()
            if look is None:
                continue
            kept = found.done.get(output.name) if found else None
            if number in self._places and kept and _is_kept(kept, look, output):
                self._kept[number] = kept
            elif found and look.mark == self._mark(number):
                self._again |= {number} if kept else set()
            elif not self._sink.force:
                text = "it is not what the interrupted run sent" if kept else "it exists already"
                raise refusal(place.name, "exists", text, EXISTS)
            else:
                self._foreign.append(output.name)

    def kept_bytes(self) -> int:
        """What need not be sent again."""
        return sum(row.meta.size for row in self._kept.values())

    def tasks(self) -> list[ObjectTask]:
        """Those that are not done; the largest first, so that none is left alone at the end."""
        left = [number for number in self._places if number not in self._kept]
        self._asked = len(left)
        left.sort(key=lambda number: -self._plan.outputs[number].size_bytes)
        return [self._task(number) for number in left]

    def _task(self, number: int) -> ObjectTask:
        output = self._plan.outputs[number]
        parts, sources = localised(output.parts, self._plan.sources)
        return ObjectTask(
            number, self._places[number].url, output._replace(parts=parts), sources,
            self._mark(number), self._book.place.url, self._driver, self._sink.force,
            number in self._again, self._check, __version__,
        )  # fmt: skip

    # -- while they run ------------------------------------------------------------------------
    def received(self, task: ObjectTask, stored: Stored) -> None:
        """One object is there: write it down. Raises EngineError for an answer to another task."""
        if stored.number != task.number or stored.meta.size != task.size:
            raise EngineError("a worker answered for another task", hint="report this")
        self._stored[task.number] = stored
        told = plain_results(stored.results)
        if told is not None:  # counts of nothing need not be kept
            told = tuple((label, counts) for label, counts in told if any(counts))
            self._book.add(task.output.name, Kept(stored.meta, told))

    def left(self, error: BaseException, running: list[Future[Any]]) -> None:
        """Other workers may still be at it: what they are sending must not be seen later on."""
        if not self._far or self._helps(error) or len(self._stored) == self._asked:
            return
        self._quietly(self._give_up)
        sleep(_GRACE)
        wait(running, _PATIENCE)

    def _give_up(self) -> None:
        """Take the book away, unless another driver has it: then this run leaves all as it is."""
        if not self._given_up and self._book.is_mine():
            self._book.remove()
            self._given_up = True

    # -- after them ----------------------------------------------------------------------------
    def finish(self, verify: Callable[[Source], object] | None) -> None:
        """Each object as the store gives it, then what is no task: the index last."""
        for number in self._places:
            self._confirm(number, verify)
        self._book.check()
        outputs = tuple(self._plan.outputs[number] for number in self._own)
        targets = list(self._own.values())
        rest = Plan(self._plan.sources, outputs)  # its sources are looked at once more, too
        try:
            given = _Given(self._sink.path, targets)
            done = write(rest, given, RECIPES, check=self._check, verify=verify)
            self._notes += done.findings
            self._complete = True
        finally:
            self._complete |= bool(targets) and all(target.published for target in targets)
        self._book.remove()

    def _confirm(self, number: int, verify: Callable[[Source], object] | None) -> None:
        place = self._places[number]
        try:
            with open_object(place) as source:
                if (source.size, source.address.identity) != self._meta(number):
                    raise InputChanged("another version")
                if verify:
                    verify(source)
        except (SpecialFile, InputChanged) as error:
            what = "removed" if isinstance(error, SpecialFile) else "replaced"
            raise OutputError(
                f"it was {what} after it had been sent", path=place.name,
                hint="does another program write there? Give another -o",
            ) from error  # fmt: skip

    def _meta(self, number: int) -> tuple[int, tuple[str, ...]]:
        row = self._kept[number] if number in self._kept else self._stored[number]
        return row.meta.size, row.meta.identity

    def written(self) -> Written:
        """What was written, results in the order of the plan."""
        found = len(self._kept) + sum(stored.found for stored in self._stored.values())
        if found:
            told = f"{found:,} of {len(self._places):,} tasks were done"
            self._notes.append(f"gone on from an interrupted run: {told}")
        paths = {number: place.name for number, place in self._places.items()}
        paths |= {number: target.path for number, target in self._own.items()}
        outputs = tuple(
            (paths[number], output.size_bytes) for number, output in enumerate(self._plan.outputs)
        )
        results = {number: results_of(row.results) for number, row in self._kept.items()}
        results |= {number: row.results for number, row in self._stored.items()}
        checked = sum(row.checked_bytes for row in self._stored.values())
        rows = tuple(row for _, told_rows in sorted(results.items()) for row in told_rows)
        return Written(outputs, checked, tuple(self._notes), rows)

    # -- failures ------------------------------------------------------------------------------
    def _helps(self, error: BaseException) -> bool:
        """Whether what was sent stays: another try could help, as long as the input is good."""
        return self._resume and not isinstance(error, InputChanged | CrcMismatch | StorageSize)

    def failed(self, error: BaseException) -> BaseException:
        """The error to raise. What was sent is removed, unless `resume` is asked and could help."""
        found = output_error(error, self._sink.path) if isinstance(error, OSError) else error
        if not self._begun:
            return found
        if self._complete:
            self._quietly(self._book.remove)
            return found
        if not self._helps(error):
            if isinstance(found, EngineError) and found.hint == AGAIN:
                found.hint = "with --resume, what is done would have been kept"
            return _with(found, self._quietly(self._remove_sent))
        self._quietly(self._book.flush)
        if isinstance(found, KeyboardInterrupt):
            return KeyboardInterrupt(AGAIN)
        if isinstance(found, CkptError) and found.slug != "output-busy":
            found.hint = AGAIN if found.hint in (None, AGAIN) else f"{found.hint}; then {AGAIN}"
        return found

    def _quietly(self, done: Callable[[], object]) -> str:
        """What there is to say of it: its own error would hide the first one."""
        try:
            return str(done() or "")
        except CkptError as error:
            return f"what was sent could not be removed: {error.text}"
        except KeyboardInterrupt:
            return f"what was sent is not all removed: look at {self._sink.path}"

    def _remove_sent(self) -> str:
        """Remove what this run sent, and its book; nothing when another driver has the run."""
        self._give_up()
        if not self._given_up:
            return ""
        names = {output.name: number for number, output in enumerate(self._plan.outputs)}
        there = set(RemoteFolder(self._sink.place).list())
        gone = [name for name in self._foreign if name not in there]
        for name in sorted(there & set(names) - set(self._sink.beside)):
            store = Store(place_under(self._sink.url, name))
            look = store.look()
            if look is not None and look.mark == self._mark(names[name]):
                store.delete()
                gone += [name] if name in self._foreign else []
        return f"{len(gone):,} of the objects that -f replaces are gone" if gone else ""


def _is_kept(kept: Kept, look: Look, output: Output) -> bool:
    return kept.meta == look.meta and look.meta.size == output.size_bytes


def _with(error: BaseException, said: str) -> BaseException:
    """The error, and what is left of the run."""
    if not said:
        return error
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt(said)
    if isinstance(error, CkptError):
        error.text = f"{error.text}; {said}"
        error.findings = (*error.findings, said)
    return error
