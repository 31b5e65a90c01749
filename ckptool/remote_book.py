"""The book of a run whose tasks are whole objects: a small object beside them.

Knows: whose run it is, which objects are done, who may go on. Must not know: plans, tasks.
An object cannot be added to: the book is put anew, soon after each task; a killed driver's may be
a little behind, and then the marks of the objects tell (`remote_tasks`). The book's own mark names the driver that
has the run; a worker or driver that finds another mark there, or no book, leaves off. Nobody can
tell from afar whether a driver still lives, so that only `--resume` and `-f` take a book over.
It is hostile input like any other object: obeyed for the very plan alone, and what it calls done
is looked at again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from time import monotonic
from typing import Any, NamedTuple

from ckptool.errors import OutputError, SpecialFile
from ckptool.remote_stores import Meta, Store
from ckptool.remote_urls import Located, locate

NAME = ".ckptool-tasks"
"""Of the object, under the prefix."""
_MAGIC = "ckptool-objects"
_RUN = re.compile("[0-9a-f]{16}")  # it goes into the metadata of objects
_PAUSE = 2.0  # seconds: Google's store takes one write of an object a second
_TAKEN = "wait for it; a run that was killed is gone on with by --resume, and begun anew by -f"


class Kept(NamedTuple):
    """What a finished task gave: what the store says of the object, and what its recipes told."""

    meta: Meta
    results: tuple[tuple[str, tuple[int, ...]], ...] = ()


class Found(NamedTuple):
    """A book that lies there: of which plan (empty: it is no book), the mark of what that run
    put, its finished objects by their names.
    """

    plan: str
    run: str = ""
    done: dict[str, Kept] = {}  # noqa: RUF012 - never changed


class ObjectBook:
    """The book at `url`, as the driver of this name sees it. Raises CkptError."""

    def __init__(self, url: str, driver: str) -> None:
        place = locate(url)
        assert place is not None  # its scheme is that of the outputs
        self.place: Located = place
        self._store = Store(place, mark=driver)
        self._head: dict[str, Any] = {}
        self._done: dict[str, Kept] = {}
        self._unsaved = False
        self._saved = 0.0

    def read(self) -> Found | None:
        """What lies there."""
        try:
            answer = self._store.whole()
        except SpecialFile:
            return None
        return _parsed(bytes(answer.data)) if answer else Found("")

    def begin(self, plan: str, run: str, done: Mapping[str, Kept], *, create: bool) -> None:
        """Write it; from here on the run is this driver's. Raises OutputError `output-busy` when
        with `create` one is there.
        """
        self._head = {"book": _MAGIC, "version": 1, "plan": plan, "run": run}
        self._done = dict(done)
        try:
            self._save(create=create)
        except FileExistsError:
            raise busy(self.place) from None

    def add(self, name: str, kept: Kept) -> None:
        """One more object is done; soon the book says so. Raises as `check`."""
        self._done[name] = kept
        self._unsaved = True
        if monotonic() - self._saved > _PAUSE:
            self.flush()

    def flush(self) -> None:
        """Let the book say all that is done. Raises as `check`."""
        if self._unsaved:
            self.check()
            self._save(create=False)

    def _save(self, *, create: bool) -> None:
        self._store.put(self._data(), create=create)
        self._unsaved, self._saved = False, monotonic()

    def is_mine(self) -> bool:
        """Whether this driver has the run."""
        there = self._store.look()
        return there is not None and there.mark == self._store.mark

    def check(self) -> None:
        """Raise OutputError `output-busy` unless this driver still has the run."""
        if not self.is_mine():
            raise OutputError(
                "the run was given up, or another one has taken it over", path=self.place.name,
                slug="output-busy", hint="wait for that run, or give another -o",
            )  # fmt: skip

    def remove(self) -> None:
        """No run will go on from here."""
        self._store.delete()

    def _data(self) -> bytes:
        done = {name: [*kept.meta, kept.results] for name, kept in self._done.items()}
        return json.dumps({**self._head, "done": done}, separators=(",", ":")).encode()


def busy(place: Located) -> OutputError:
    """Somebody's book lies there."""
    return OutputError(
        "another run of ckptool is sending to this prefix, or was killed there",
        path=place.name, slug="output-busy", hint=_TAKEN,
    )  # fmt: skip


# -- reading -----------------------------------------------------------------------------------
def _parsed(data: bytes) -> Found:
    try:
        head = json.loads(data)
        if not isinstance(head, dict) or (head["book"], head["version"]) != (_MAGIC, 1):
            return Found("")
        plan, run, rows = head["plan"], head["run"], head["done"]
        if not (isinstance(plan, str) and _RUN.fullmatch(run) and isinstance(rows, dict)):
            return Found("")
        return Found(plan, run, {name: _kept(*row) for name, row in rows.items()})
    except (ValueError, TypeError, KeyError, RecursionError):
        return Found("")


def _kept(size: Any, identity: Any, results: Any) -> Kept:
    """Raises TypeError, ValueError for what no book of ours says."""
    texts = tuple(identity)
    if type(size) is not int or not all(isinstance(text, str) for text in texts):
        raise TypeError
    told = tuple((str(label), tuple(map(int, numbers))) for label, numbers in results)
    if any(len(numbers) != 2 for _, numbers in told):  # those of a cast
        raise ValueError
    return Kept(Meta(size, texts), told)
