"""A Plan cut into tasks: ranges of bytes that anyone may write, in any order, more than once.

Knows: how parts are cut, how one range is written into a file that is there, how checksums are
joined again. Must not know: formats, who runs the tasks.
A task is picklable and carries all it needs. It writes the same bytes at the same place however
often it runs, so that one whose worker died is simply run again. Parts that are known only after
others (Late) belong to no task: whoever has all checksums fills them in.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckptool.crcs import joined
from ckptool.errors import CrcMismatch, OutputError, StorageSize
from ckptool.places import Source, changed, is_url, open_source, reopen
from ckptool.plans import Copy, Late, Literal, Made, Output, Part, Plan, Recipe
from ckptool.sinks import Outlet
from ckptool.spans import Address, Span
from ckptool.sums import BLOCK
from ckptool.writing import _Out, _Run, _write_output

STEP = 64 << 20
"""Bytes of one task: a second of a slow disk. Doubled until there are at most MOST tasks."""
MOST = 4096
_FLAGS = os.O_RDWR | sum(getattr(os, n, 0) for n in ("O_CLOEXEC", "O_BINARY", "O_NOFOLLOW"))


class Segment(NamedTuple):
    """A part, or a piece of a copied one: `place` is that of the part in its output."""

    place: int
    part: Part


class Range(NamedTuple):
    """Segments that follow one another from byte `start` of output number `output`."""

    output: int
    start: int
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return sum(segment.part.size for segment in self.segments)


class Task(NamedTuple):
    """One range to be written into the file `path`, which is there in its full size. Parts count
    their sources by their place in `sources`. `known` are the checksums that an earlier run gave:
    where the file has them, nothing is written.
    """

    number: int
    path: str
    start: int
    parts: tuple[Copy | Literal | Made, ...]
    sources: tuple[Address, ...]
    check: bool
    fsync: bool
    version: str
    known: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Bytes it writes."""
        return sum(part.size for part in self.parts)


class Done(NamedTuple):
    """What became of a task: the CRC-32 of each of its parts; `results` as in `plans.Written`;
    `found`: the bytes were there already.
    """

    number: int
    crcs: tuple[int, ...]
    checked_bytes: int = 0
    results: tuple[tuple[str, Any], ...] = ()
    found: bool = False


def step_for(size: int, step: int = STEP) -> int:
    """Bytes a task for `size` bytes in all. The same for the same plan, whoever runs it."""
    while size > step * MOST:
        step *= 2
    return step


def cut(plan: Plan, step: int) -> list[Range]:
    """The ranges of a plan, of about `step` bytes; only Copy parts are cut. Raises StorageSize
    unless ranges and late parts fill each output.
    """
    return [row for at, output in enumerate(plan.outputs) for row in _cut_output(at, output, step)]


def _cut_output(number: int, output: Output, step: int) -> Iterator[Range]:
    at = start = 0
    pending: list[Segment] = []
    for index, part in enumerate(output.parts):
        for piece in _pieces(part, step, at - start):
            full = at - start and at - start + piece.size > step
            if pending and (full or isinstance(part, Late)):
                yield Range(number, start, tuple(pending))
                pending = []
            if not pending:
                start = at
            if isinstance(piece, Made) or (piece.size and not isinstance(piece, Late)):
                pending.append(Segment(index, piece))
            at += piece.size
        if isinstance(part, Late):
            start = at
    if pending:
        yield Range(number, start, tuple(pending))
    if at != output.size_bytes:
        raise StorageSize(f"the parts have {at:,} bytes, {output.size_bytes:,} were planned")


def _pieces(part: Part, step: int, used: int) -> Iterator[Part]:
    """A large Copy as spans, the first of them filling up the range that is begun."""
    if not isinstance(part, Copy) or part.size <= step:
        yield part
        return
    offset, room = part.span.offset, step - used if used < step else step
    while offset < part.span.end:
        size = min(room, part.span.end - offset)
        yield Copy(part.source_id, Span(offset, size), None, part.label)
        offset, room = offset + size, step


def task_of(
    number: int, row: Range, path: str, sources: Sequence[Address], *,
    check: bool, fsync: bool, version: str, known: tuple[int, ...] | None = None,
) -> Task:  # fmt: skip
    """A range as a task for anyone who sees the same files under the same names."""
    found, used = localised([segment.part for segment in row.segments], sources)
    parts = tuple(part for part in found if not isinstance(part, Late))
    return Task(number, os.path.abspath(path), row.start, parts, used, check, fsync, version, known)


def localised(
    parts: Sequence[Part], sources: Sequence[Address]
) -> tuple[tuple[Part, ...], tuple[Address, ...]]:
    """Parts that count only the sources they need, and these, their paths absolute."""
    homes: dict[int, int] = {}

    def local(source_id: int) -> int:
        return homes.setdefault(source_id, len(homes))

    made: list[Part] = []
    for part in parts:
        if isinstance(part, Copy):
            part = part._replace(source_id=local(part.source_id))
        elif isinstance(part, Made):
            part = part._replace(pieces=tuple((local(i), span) for i, span in part.pieces))
        made.append(part)
    return tuple(made), tuple(_absolute(sources[source_id]) for source_id in homes)


def _absolute(address: Address) -> Address:
    if not address.uri or is_url(address.uri):
        return address
    return address._replace(uri=os.path.abspath(address.uri))


def same_file(address: Address) -> Source:
    """Open what an address names, if it has its inode, size and time; not its device, which has
    another number on another machine. Raises InputChanged, SpecialFile.
    """
    if not address.uri or is_url(address.uri):
        return reopen(address)
    source = open_source(address.uri)
    if source.address.identity[1:] == address.identity[1:] and source.size == address.size_bytes:
        return source
    source.close()
    raise changed(address.uri)


def write_task(
    task: Task,
    recipes: Mapping[str, Recipe],
    progress: Callable[[int], object] | None = None,
    opener: Callable[[Address], Source] = same_file,
) -> Done:
    """Write one range. Raises what `writing.write` raises, OSError where the disk refuses, and
    OutputError where the file is not there: on a machine that does not share the folder.
    """
    try:
        fd = os.open(task.path, _FLAGS)
    except FileNotFoundError as error:
        raise _not_shared(task.path) from error
    try:
        if task.known is not None and _has(fd, task):
            return Done(task.number, task.known, found=True)
        done = _write(fd, task, recipes, progress, opener)
        if task.fsync:
            os.fsync(fd)
        return done
    finally:
        os.close(fd)


def _not_shared(path: str) -> OutputError:
    from platform import node

    return OutputError(
        f"the worker on '{node()}' does not see the folder '{os.path.dirname(path)}'",
        hint="the folders of input and output must be the same on all machines",
        slug="output-folder",
    )


def _write(
    fd: int, task: Task, recipes: Mapping[str, Recipe],
    progress: Callable[[int], object] | None, opener: Callable[[Address], Source],
) -> Done:  # fmt: skip
    run = _Run(task.sources, recipes, task.check, progress, opener)
    os.lseek(fd, task.start, os.SEEK_SET)
    out = _Out(fd)
    out.position = task.start
    try:
        with run.checker:
            run.sources.start()
            sums = run.parts(task.parts, out, range(len(task.parts)))
            out.flush()
            run.checker.settle()
            run.sources.finish()
    finally:
        run.sources.close()
    if out.position != task.start + task.size:
        text = f"{out.position - task.start:,} bytes were written, {task.size:,} were planned"
        raise StorageSize(text)
    crcs = tuple(sums[index].value for index in range(len(task.parts)))
    return Done(task.number, crcs, run.checked, tuple(run.results))


def write_whole(
    output: Output,
    outlet: Outlet,
    sources: Sequence[Address],
    recipes: Mapping[str, Recipe],
    *,
    check: bool,
    progress: Callable[[int], object] | None = None,
    opener: Callable[[Address], Source] = same_file,
) -> tuple[int, tuple[tuple[str, Any], ...]]:
    """Write one output to where it is not read back from, and close it; publishing is for others.
    Gives `checked_bytes` and `results` as in `Done`. Raises what `writing.write` raises.
    """
    run = _Run(sources, recipes, check, progress, opener)
    try:
        with run.checker:
            run.sources.start()
            _write_output(run, output, outlet, fsync=False)
            run.sources.finish()
    finally:
        run.sources.close()
    return run.checked, tuple(run.results)


def _has(fd: int, task: Task) -> bool:
    """Whether the file has bytes of the known checksums there."""
    if task.known is None or len(task.known) != len(task.parts):
        return False
    os.lseek(fd, task.start, os.SEEK_SET)
    for part, wanted in zip(task.parts, task.known, strict=True):
        left, crc = part.size, 0
        while left:
            data = os.read(fd, min(BLOCK, left))
            if not data:
                return False
            crc, left = zlib.crc32(data, crc), left - len(data)
        if crc != wanted:
            return False
    return True


# -- joined again ------------------------------------------------------------------------------
class Sums:
    """The checksums of the parts of one output, from those of its segments, in any order."""

    def __init__(self, output: Output, check: bool) -> None:
        self._parts = output.parts
        self._check = check
        self._found: dict[int, dict[int, tuple[int, int]]] = {}  # part -> start -> (crc, size)
        self.checked_bytes = 0

    def add(self, row: Range, crcs: Sequence[int]) -> None:
        """What one range gave. Raises StorageSize unless that is one checksum a segment."""
        if len(crcs) != len(row.segments):
            raise StorageSize("a worker answered for another task", hint="report this")
        at = row.start
        for segment, crc in zip(row.segments, crcs, strict=True):
            self._found.setdefault(segment.place, {})[at] = (crc, segment.part.size)
            at += segment.part.size

    def finish(self, sources: Sequence[Address]) -> list[tuple[int, bytes]]:
        """The late parts, as (offset, bytes). Raises CrcMismatch for a part that was cut and has
        not its recorded checksum (whole ones were checked by their task).
        """
        sums: dict[int, int] = {}
        late: list[tuple[int, bytes]] = []
        at = 0
        needed = {i for part in self._parts if isinstance(part, Late) for i in part.needs}
        for index, part in enumerate(self._parts):
            if isinstance(part, Late):
                data = part.fill(tuple(sums[number] for number in part.needs))
                if len(data) != part.size:
                    raise StorageSize(f"a late part has {len(data):,} bytes, not {part.size:,}")
                late.append((at, data))
                sums[index] = zlib.crc32(data) if index in needed else 0
            else:
                pieces = self._found.pop(index, {})
                self._check_part(part, pieces, sources)
                if index in needed:
                    sums[index] = _joined(pieces)
            at += part.size
        return late

    def _check_part(
        self, part: Part, pieces: Mapping[int, tuple[int, int]], sources: Sequence[Address]
    ) -> None:
        if sum(size for _, size in pieces.values()) != part.size:
            raise StorageSize("not all of a part was written", hint="report this")
        recorded = part.crc if self._check and isinstance(part, Copy | Made) else None
        self.checked_bytes += part.size if recorded else 0
        if recorded and len(pieces) > 1 and _joined(pieces) != recorded:
            raise CrcMismatch(
                f"bytes of '{getattr(part, 'label', '')}' do not have their recorded checksum",
                path=sources[part.source_id].uri if isinstance(part, Copy) else None,
                hint="download or copy it again, or skip the check with --no-check",
            )


def _joined(pieces: Mapping[int, tuple[int, int]]) -> int:
    found = [piece for _, piece in sorted(pieces.items())]
    return joined([crc for crc, _ in found], [size for _, size in found]) if found else 0


def check_sources(sources: Sequence[Address], opener: Callable[[Address], Source] = reopen) -> None:
    """Raise InputChanged unless every source is what it was when the plan was made."""
    for address in sources:
        opener(address).close()
