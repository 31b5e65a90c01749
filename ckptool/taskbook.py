"""The book beside an output that many write: which tasks of a plan are done.

Knows: how it is kept, whose it is, when it is obeyed. Must not know: formats, who runs the tasks.
One JSON object a line: first the plan and its temp files, then a line for each task that is done.
It is hostile input like any other file. It is obeyed only for the very plan (inputs by inode, size
and time; every part; the length of a task) and the very temp files it was made for; and what it
says is done is proven again by the checksums in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, NamedTuple

from ckptool.errors import OutputError
from ckptool.plans import Plan
from ckptool.targets import write_all

_MAGIC = "ckptool-tasks"
_LARGEST = 1 << 30
_READ = os.O_RDWR | sum(
    getattr(os, name, 0)
    for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY", "O_NOFOLLOW", "O_APPEND")
)
_CREATE = _READ | os.O_CREAT | os.O_EXCL


class Temp(NamedTuple):
    """The temp file of one output."""

    name: str
    inode: int
    size: int


class Entry(NamedTuple):
    """What a finished task gave: checksums of its parts, and what its recipes told."""

    crcs: tuple[int, ...]
    results: tuple[tuple[str, tuple[int, ...]], ...] = ()


class Found(NamedTuple):
    """A book that lies there: of which plan (empty: it is no book), its temp files, its entries."""

    plan: str
    temps: tuple[Temp, ...] = ()
    done: dict[int, Entry] = {}  # noqa: RUF012 - never changed


def digest(plan: Plan, step: int, version: str, check: bool) -> str:
    """What tells one plan from another: 64 hexadecimal digits over all it says."""
    import pickle

    out = BytesIO()
    pickler = pickle.Pickler(out, 4)
    pickler.fast = True  # equal values give equal bytes, whichever of them are one object
    pickler.dump((plan.sources, plan.outputs, step, version, check))
    return hashlib.sha256(out.getbuffer()).hexdigest()


def book_path(folder: str, name: str) -> str:
    """Where the book of a run lies whose first output has this folder and name."""
    return os.path.join(folder, f".{name[:50]}.ckptool-tasks")


class Book:
    """The book of this run, locked until `close`: no other run writes these outputs meanwhile.

    `found` is what lay there. Raises OutputError: `output-busy` when another run has it,
    `output-special` when it is no file of its own; OSError.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1
        self.found: Found | None = None
        for _ in range(3):  # between opening and locking, the run that had it may remove it
            there = self._open()
            self._lock()
            info = os.fstat(self._fd)
            if info.st_nlink > 1 or not stat.S_ISREG(info.st_mode):
                os.close(self._fd)
                raise OutputError(
                    "something else has the name of its list of tasks", path=path,
                    slug="output-special", hint="remove it, or give another -o",
                )  # fmt: skip
            if info.st_nlink:
                break
            os.close(self._fd)
        if there:
            self.found = _parsed(_whole(self._fd))

    def _open(self) -> bool:
        """Open it, or make it; whether it was there."""
        try:
            self._fd = os.open(self.path, _READ)
        except FileNotFoundError:
            self._fd = os.open(self.path, _CREATE, 0o666)
            return False
        return True

    def _lock(self) -> None:
        """Where the system and the file system have such locks; a killed run holds none."""
        try:
            import fcntl
        except ImportError:
            return
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise OutputError(
                "another run of ckptool is writing it", path=self.path, slug="output-busy",
                hint="wait for that run, or give another -o",
            ) from None  # fmt: skip
        except OSError:  # a file system without locks
            return

    def begin(self, plan: str, temps: Sequence[Temp], done: Mapping[int, Entry]) -> None:
        """Write it anew, with what is done already."""
        os.ftruncate(self._fd, 0)
        head = {"book": _MAGIC, "version": 1, "plan": plan, "temps": list(temps)}
        self._append(head, *(_row(number, entry) for number, entry in done.items()))

    def add(self, number: int, entry: Entry) -> None:
        """One more task is done."""
        self._append(_row(number, entry))

    def _append(self, *rows: dict[str, Any]) -> None:
        lines = [json.dumps(row, separators=(",", ":")) + "\n" for row in rows]
        write_all(self._fd, "".join(lines).encode())

    def close(self, *, remove: bool) -> None:
        """Give the lock back; `remove`: no run will go on from here."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        with contextlib.suppress(OSError):
            if remove:
                os.unlink(self.path)
        os.close(fd)


def _row(number: int, entry: Entry) -> dict[str, Any]:
    row: dict[str, Any] = {"done": number, "crcs": "".join(f"{crc:08x}" for crc in entry.crcs)}
    return {**row, "results": entry.results} if entry.results else row


# -- reading -----------------------------------------------------------------------------------
def _whole(fd: int) -> bytes:
    if os.fstat(fd).st_size > _LARGEST:
        return b""
    pieces = []
    while data := os.read(fd, 1 << 20):
        pieces.append(data)
    return b"".join(pieces)


def _parsed(data: bytes) -> Found:
    """What it says; an unfinished or strange line ends it, as the end of a killed run does."""
    first, *rows = data.split(b"\n")[:-1] or [b""]
    head = _object(first)
    temps = _temps(head.get("temps"))
    plan = head.get("plan")
    if head.get("book") != _MAGIC or head.get("version") != 1 or temps is None:
        return Found("")
    done: dict[int, Entry] = {}
    for row in map(_object, rows):
        number, entry = row.get("done"), _entry(row)
        if type(number) is not int or entry is None:
            break
        done[number] = entry
    return Found(plan if isinstance(plan, str) else "", temps, done)


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _temps(rows: Any) -> tuple[Temp, ...] | None:
    if not isinstance(rows, list):
        return None
    kinds = [[type(value) for value in row] if isinstance(row, list) else [] for row in rows]
    if any(kind != [str, int, int] for kind in kinds):
        return None
    return tuple(Temp(*row) for row in rows)


def _entry(row: dict[str, Any]) -> Entry | None:
    text, results = row.get("crcs"), row.get("results", [])
    if not isinstance(text, str) or len(text) % 8 or not isinstance(results, list):
        return None
    try:
        crcs = tuple(int(text[at : at + 8], 16) for at in range(0, len(text), 8))
        told = tuple((str(label), tuple(map(int, numbers))) for label, numbers in results)
    except (ValueError, TypeError):
        return None
    return Entry(crcs, told)
