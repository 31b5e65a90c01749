"""A Plan onto a sink: temp files, kernel copies with checksums taken beside, then the rename.

Knows: parts, a few sources at a time, how this system copies. Must not know: formats.
Memory is constant. Where source and output lie alike on their pages the kernel copies, and
the checking thread reads the same span; elsewhere a kernel's copy is slower than reading blocks
and writing them up to the ends of pages, and the thread sums those very blocks.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any

from ckptool.errors import CkptError, StorageSize
from ckptool.interrupts import held
from ckptool.places import Source, open_source, reopen
from ckptool.plans import Copy, Late, Literal, Made, Output, Part, Plan, Recipe, Written
from ckptool.sent import Sent
from ckptool.sinks import (
    FileSink,
    FolderSink,
    Outlet,
    Sink,
    Target,
    check_different,
    check_none_is_source,
    check_space,
    findings_beside,
    output_error,
    sync_folder,
)
from ckptool.sources import Sources
from ckptool.spans import Address, Span
from ckptool.sums import BLOCK, Checker, Sum
from ckptool.targets import lost, write_all

__all__ = ["FileSink", "FolderSink", "check_different", "write"]

_CHUNK = 16 << 20  # one kernel copy, and the step of the progress
_TICK_SECONDS = 0.5  # and of a slow line
_SMALL = 64 << 10  # below this, reading once costs less than a second thread
_PAGE = 4096


def _copy_range(source_fd: int, sink_fd: int, offset: int, size: int) -> int:
    return os.copy_file_range(source_fd, sink_fd, size, offset)


def _send(source_fd: int, sink_fd: int, offset: int, size: int) -> int:
    return os.sendfile(sink_fd, source_fd, offset, size)


# Ways the kernel copies, best first; read and write is what remains. Tests patch this table.
COPIERS: tuple[Callable[[int, int, int, int], int], ...] = tuple(
    way
    for name, way in (("copy_file_range", _copy_range), ("sendfile", _send))
    if hasattr(os, name)
)
# What a kernel or file system says that cannot copy this way (EPERM: some sandboxes).
_CANNOT = {
    getattr(errno, name, None)
    for name in ("ENOSYS", "EXDEV", "EINVAL", "EOPNOTSUPP", "ENOTSUP", "EPERM", "ENOTSOCK")
}


def write(
    plan: Plan,
    sink: Sink,
    recipes: Mapping[str, Recipe],
    *,
    check: bool = True,
    fsync: bool = True,
    verify: Callable[[Source], object] | None = None,
    progress: Callable[[int], object] | None = None,
    opener: Callable[[Address], Source] = reopen,
) -> Written:
    """Write all outputs beside their targets, then rename them, in order (in an object store:
    upload all of them, then complete them).

    `check` compares copies with their recorded CRC; `verify(source)` sees each finished temp
    file (of an upload: what was sent) under the name of its target and may raise;
    `progress(bytes so far)` is called about every 16 MiB or half second, and at the end. `opener` may be asked
    for an address more than once; no more than `sources.OPEN` of what it gives are open at a time.
    Raises OutputError, InputChanged, CrcMismatch, StorageSize, Truncated; whatever is raised,
    no temp file is left and the targets are as they were, but for a failure between two
    renames: then the error names what is in place already.
    """
    targets = sink.targets([output.name for output in plan.outputs])
    check_none_is_source(targets, plan.sources)
    findings = findings_beside(targets)
    run = _Run(plan.sources, recipes, check, progress, opener)
    path = sink.path
    late: list[dict[int, bytes]] = []
    try:
        check_space(targets, [output.size_bytes for output in plan.outputs])
        with run.checker:
            run.sources.start()
            for output, target in zip(plan.outputs, targets, strict=True):
                path = target.path
                late.append(_write_output(run, output, target, fsync))
            run.sources.finish()
        for number, target in enumerate(targets if verify else ()):
            sent = (plan.outputs[number], late[number], recipes, plan.sources, opener)
            verify_target(target, verify, sent)
        with held("all was written before"):  # no loader meets old and new shards together
            for target in targets:
                path = target.path
                target.publish()
    except OSError as error:
        raise output_error(error, path, [t.path for t in targets if t.published]) from error
    finally:
        for target in targets:
            target.discard()
        run.sources.close()
    findings += sync_folders(targets) if fsync else []
    written = tuple((t.path, o.size_bytes) for t, o in zip(targets, plan.outputs, strict=True))
    return Written(written, run.checked, tuple(findings), tuple(run.results))


def _write_output(run: _Run, output: Output, target: Outlet, fsync: bool) -> dict[int, bytes]:
    """The bytes of its late parts, where it cannot be read back."""
    fd = target.open()
    out = _Out(fd, target.write if fd < 0 else None)
    run.parts(output.parts, out)
    out.flush()
    run.checker.settle()
    run.report(end=True)
    size = target.written()
    if size != output.size_bytes:
        raise lost(target.path, size, output.size_bytes)
    target.close(fsync=fsync)
    return out.late


def verify_target(
    target: Outlet, verify: Callable[[Source], object] | None, sent: Sequence[Any] = ()
) -> None:
    """Show what was written to `verify`, under the name of its target: the finished temp file,
    or, where there is none to read, what was `sent`.
    """
    with (
        open_source(target.temp)
        if isinstance(target, Target)
        else Sent(target.path, *sent) as source
    ):
        source.name = target.path
        if verify:
            verify(source)


def sync_folders(targets: Sequence[Outlet]) -> list[str]:
    """The files are in place by now: a failure here is told, not raised."""
    try:
        for folder in sorted({folder for target in targets for folder in target.folders()}):
            sync_folder(folder)
    except OSError as error:
        return [f"written, but the folder could not be flushed to disk: {error.strerror}"]
    return []


class _Sources(Sources):
    """The files a plan reads; `settle` waits until nobody reads an open one any more."""

    def __init__(
        self,
        addresses: Sequence[Address],
        opener: Callable[[Address], Source],
        settle: Callable[[], None],
    ) -> None:
        super().__init__(addresses, opener=opener)
        self._settle = settle
        self._unseen = set(range(len(addresses)))

    def __getitem__(self, source_id: int) -> Source:
        source = super().__getitem__(source_id)
        self._unseen.discard(source_id)
        return source

    def start(self) -> None:
        """Open the first, so that a plan of one file fails before anything is written."""
        if self._addresses:
            self[0]

    def finish(self) -> None:
        """Close all; see that those no part asked for are still what was planned with."""
        for source_id in sorted(self._unseen):
            self[source_id]
        for source_id in list(self._open):
            self.leave(source_id)

    def leave(self, source_id: int) -> None:
        self._settle()
        super().leave(source_id)


class _Out:
    """A descriptor written in order: small writes gathered, large spans by the kernel.

    Where there is none (-1), `write` takes all bytes. `late` are those of late parts, by index.
    """

    def __init__(self, fd: int, write: Callable[[memoryview], object] | None = None) -> None:
        self._fd = fd
        self._other = write
        self.late: dict[int, bytes] = {}
        self._pending: list[bytes] = []
        self._pending_size = 0
        self._copiers = list(COPIERS)
        self.position = 0  # of what is written

    def put(self, data: bytes) -> None:
        self._pending.append(data)
        self._pending_size += len(data)
        if self._pending_size >= BLOCK:
            self.flush()

    def flush(self) -> None:
        data = memoryview(b"".join(self._pending))
        self._pending.clear()
        self._pending_size = 0
        self.write(data)

    def write(self, data: memoryview) -> None:
        """Write at once, after all that was put before."""
        if self._pending:
            self.flush()
        self.position += len(data)
        if self._other is not None:
            self._other(data)
        else:
            write_all(self._fd, data)

    def kernel_copies(self, source: Source, span: Span) -> bool:
        """Whether the kernel may copy this, and does so faster than we write blocks."""
        if not self._copiers or source.fileno() is None or self._fd < 0:
            return False
        return (source.absolute(span).offset - self.position - self._pending_size) % _PAGE == 0

    def copy(self, source: Source, span: Span) -> int:
        """Let the kernel copy; bytes copied, fewer when no way works any more."""
        self.flush()
        fd = source.fileno()
        start = source.absolute(span).offset
        done = 0
        while fd is not None and done < span.size:
            count = self._kernel_copy(fd, start + done, span.size - done)
            if not count:
                break
            done += count
        self.position += done
        return done

    def _kernel_copy(self, fd: int, offset: int, size: int) -> int:
        """Bytes copied; 0 when no way works, and then reading tells why."""
        while self._copiers:
            try:
                count = self._copiers[0](fd, self._fd, offset, size)
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
                count = 0
            if count:
                return count
            self._copiers.pop(0)
        return 0


class _Run:
    """One write: what its parts need, what they gave, and how far it is."""

    def __init__(
        self,
        addresses: Sequence[Address],
        recipes: Mapping[str, Recipe],
        check: bool,
        progress: Callable[[int], object] | None,
        opener: Callable[[Address], Source],
    ) -> None:
        self.checker = Checker()
        self.sources = _Sources(addresses, opener, self.checker.settle)
        self.checked = 0
        self.results: list[tuple[str, Any]] = []
        self._recipes = recipes
        self._check = check
        self._progress = progress
        self._done = self._reported = 0
        self._told = monotonic()

    def parts(self, parts: Sequence[Part], out: _Out, wanted: Iterable[int] = ()) -> dict[int, Sum]:
        """Run the parts in order. Gives the checksums that later parts need or that are `wanted`,
        by the number of their part: right once the checker has settled.
        """
        needed = {index for part in parts if isinstance(part, Late) for index in part.needs}
        needed.update(wanted)
        sums: dict[int, Sum] = {}
        self.sources.will_read(lambda: _spans(parts))
        for index, part in enumerate(parts):
            total = self._sum_for(part, index in needed)
            if total and index in needed:
                sums[index] = total
            if isinstance(part, Literal):
                self._put(part.data, total, out)
            elif isinstance(part, Copy):
                self._copy(part, total, out)
            elif isinstance(part, Made):
                self._make(part, total, out)
            else:
                self.checker.settle()
                data = _filled(part, sums)
                out.late[index] = data
                self._put(data, total, out)
        return sums

    def report(self, done: int = 0, *, end: bool = False) -> None:
        self._done += done
        now = monotonic()
        due = self._done - self._reported >= _CHUNK or now - self._told >= _TICK_SECONDS
        if self._progress and (end or due):
            self._reported, self._told = self._done, now
            self._progress(self._done)

    def _sum_for(self, part: Part, needed: bool) -> Sum | None:
        recorded = part.crc if self._check and isinstance(part, Copy | Made) else None
        if not recorded and not needed:
            return None
        if recorded:
            self.checked += part.size
        label = part.label if isinstance(part, Copy | Made) else ""
        path = self.sources[part.source_id].name if isinstance(part, Copy) else None
        return Sum(part.size, recorded, label, path)

    def _put(self, data: bytes, total: Sum | None, out: _Out) -> None:
        if total:
            total.add(data)
        out.put(data)
        self.report(len(data))

    def _copy(self, part: Copy, total: Sum | None, out: _Out) -> None:
        source, span = self.sources[part.source_id], part.span
        if span.size < _SMALL:
            self._put(source.read(span.offset, span.size), total, out)
            return
        for offset in range(span.offset, span.end, _CHUNK):
            chunk = Span(offset, min(_CHUNK, span.end - offset))
            kernel = out.kernel_copies(source, chunk)
            if kernel and total:
                self.checker.feed(source, chunk, total)
            done = out.copy(source, chunk) if kernel else 0
            rest = Span(chunk.offset + done, chunk.size - done)
            self.report(done)
            self._carry(source, rest, None if kernel else total, out)

    def _carry(self, source: Source, span: Span, total: Sum | None, out: _Out) -> None:
        """Read blocks and write them, each up to the end of a page of the output."""
        out.flush()
        offset = span.offset
        while offset < span.end:
            size = min(BLOCK - out.position % _PAGE, span.end - offset)
            block = self.checker.lend()
            source.read_into(offset, block[:size])
            self.checker.take(block, size, total)
            out.write(block[:size])
            offset += size
            self.report(size)

    def _make(self, part: Made, total: Sum | None, out: _Out) -> None:
        left = part.size
        made = self._recipes[part.recipe](self.sources.read, part)
        for data in self._keeping_result(made, part.label):
            left -= len(data)
            if left < 0:
                break
            self._put(data, total, out)
        if left:
            text = f"'{part.recipe}' made {'more' if left < 0 else 'fewer'} bytes than planned"
            raise StorageSize(text, key=part.label or None, hint="report this with the file")

    def _keeping_result(self, made: Any, label: str) -> Iterator[bytes]:
        """The chunks; what the generator returns at their end is a result of the write."""
        result = yield from made
        if result is not None:
            self.results.append((label, result))


def _spans(parts: Sequence[Part]) -> Iterator[tuple[int, Span]]:
    for part in parts:
        if isinstance(part, Copy):
            yield part.source_id, part.span
        elif isinstance(part, Made):
            yield from part.pieces


def _filled(part: Late, sums: Mapping[int, Sum]) -> bytes:
    data = part.fill(tuple(sums[index].value for index in part.needs))
    if len(data) != part.size:
        raise CkptError(f"a late part has {len(data):,} bytes, {part.size:,} were planned")
    return data
