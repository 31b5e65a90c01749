"""A Plan onto a sink: temp files, kernel copies with checksums taken beside, then the rename.

Knows: parts, checksums, how this system copies. Must not know: formats.
Memory is constant: a large copy never enters this process except through one buffer of the
checking thread, which reads the same span while the kernel copies it.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType

from ckptool.errors import CkptError, CrcMismatch, StorageSize
from ckptool.places import Source, changed, open_source, reopen
from ckptool.plans import Copy, Late, Literal, Made, Output, Part, Plan, Written
from ckptool.sinks import FileSink, Target, check_different, output_error, sync_folder
from ckptool.spans import Address, Span

__all__ = ["FileSink", "Reader", "Recipe", "check_different", "write"]

Reader = Callable[[int, int, int], bytes]
Recipe = Callable[[Reader, Made], Iterator[bytes]]

_CHUNK = 16 << 20  # one kernel copy, and the step of the progress
_SMALL = 64 << 10  # below this, reading once costs less than a second thread
_BLOCK = 1 << 20  # one read of the checking thread; also the write buffer
_AHEAD = 16  # chunks the copy may be ahead of the check, so that both hit the page cache
_AGAIN = "download or copy it again, or skip the check with --no-check"


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
    sink: FileSink,
    recipes: Mapping[str, Recipe],
    *,
    check: bool = True,
    fsync: bool = True,
    verify: Callable[[Source], object] | None = None,
    progress: Callable[[int], object] | None = None,
    opener: Callable[[Address], Source] = reopen,
) -> Written:
    """Write all outputs beside their targets, then rename them, in order.

    `check` compares copies with their recorded CRC; `verify(source)` sees each finished temp
    file and may raise; `progress(bytes so far)` is called about every 16 MiB and at the end.
    What `opener` gives is closed afterwards.
    Raises OutputError, InputChanged, CrcMismatch, StorageSize, Truncated; whatever is raised,
    the targets are as they were and no temp file is left.
    """
    targets = sink.targets([output.name for output in plan.outputs])
    findings = [said for target in targets for said in target.findings()]
    sources: list[Source] = []
    path = sink.path
    try:
        if targets:
            targets[0].check_space(sum(output.size_bytes for output in plan.outputs))
        sources.extend(map(opener, plan.sources))
        with _Checker() as checker:
            run = _Run(sources, recipes, checker, check, progress)
            for output, target in zip(plan.outputs, targets, strict=True):
                path = target.path
                _write_output(run, output, target, fsync)
        _check_unchanged(sources)
        for target in targets if verify else ():
            _verify(target, verify)
        for target in targets:
            path = target.path
            target.publish()
    except OSError as error:
        raise output_error(error, path) from error
    finally:
        for target in targets:
            target.discard()
        for source in sources:
            source.close()
    findings += _sync_folders(targets) if fsync else []
    written = tuple((t.path, o.size_bytes) for t, o in zip(targets, plan.outputs, strict=True))
    return Written(written, run.checked, tuple(findings))


def _write_output(run: _Run, output: Output, target: Target, fsync: bool) -> None:
    out = _Out(target.open())
    run.parts(output.parts, out)
    out.flush()
    run.checker.settle()
    run.report(end=True)
    size = os.fstat(target.fd).st_size
    if size != output.size_bytes:
        raise StorageSize(f"{size:,} bytes were written, {output.size_bytes:,} were planned")
    target.close(fsync=fsync)


def _check_unchanged(sources: Sequence[Source]) -> None:
    for source in sources:
        if not source.unchanged():
            raise changed(source.name)


def _verify(target: Target, verify: Callable[[Source], object] | None) -> None:
    with open_source(target.temp) as source:
        source.name = target.path
        if verify:
            verify(source)


def _sync_folders(targets: Sequence[Target]) -> list[str]:
    """The files are in place by now: a failure here is told, not raised."""
    try:
        for folder in sorted({target.folder for target in targets}):
            sync_folder(folder)
    except OSError as error:
        return [f"written, but the folder could not be flushed to disk: {error.strerror}"]
    return []


class _Sum:
    """The CRC of one part while its bytes pass, compared at the end where one is recorded."""

    __slots__ = ("_expected", "_label", "_left", "_path", "value")

    def __init__(self, size: int, expected: int | None, label: str, path: str | None) -> None:
        self.value = 0
        self._left = size
        self._expected = expected
        self._label = label
        self._path = path

    def add(self, data: bytes | memoryview) -> None:
        self.value = zlib.crc32(data, self.value)
        self._left -= len(data)
        if not self._left and self._expected and self.value != self._expected:
            what = f"bytes of '{self._label}'" if self._label else "bytes"
            text = f"{what} do not have their recorded checksum"
            raise CrcMismatch(text, path=self._path, hint=_AGAIN)


class _Checker:
    """One thread for a whole write that reads and sums the spans it is fed."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[tuple[Source, Span, _Sum] | None] = queue.Queue(_AHEAD)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stopped = False

    def __enter__(self) -> _Checker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped = True
        if self._thread:
            self._jobs.put(None)
            self._thread.join()

    def feed(self, source: Source, span: Span, total: _Sum) -> None:
        """Sum these bytes soon; raise what went wrong with earlier ones."""
        if not self._thread:
            self._thread = threading.Thread(target=self._work, name="ckptool-crc", daemon=True)
            self._thread.start()
        self._jobs.put((source, span, total))
        if self._error:
            raise self._error

    def settle(self) -> None:
        """Wait until all that was fed is summed; raise what went wrong."""
        self._jobs.join()
        if self._error:
            raise self._error

    def _work(self) -> None:
        buffer = memoryview(bytearray(_BLOCK))
        while (job := self._jobs.get()) is not None:
            self._guarded(buffer, *job)
            self._jobs.task_done()

    def _guarded(self, buffer: memoryview, source: Source, span: Span, total: _Sum) -> None:
        try:
            self._sum(buffer, source, span, total)
        except BaseException as error:  # handed to the writing thread
            self._error = error

    def _sum(self, buffer: memoryview, source: Source, span: Span, total: _Sum) -> None:
        for offset in range(span.offset, span.end, _BLOCK):
            if self._error or self._stopped:
                return
            view = buffer[: min(_BLOCK, span.end - offset)]
            source.read_into(offset, view)
            total.add(view)


class _Out:
    """A descriptor written in order: small writes gathered, large spans by the kernel."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pending: list[bytes] = []
        self._pending_size = 0
        self._copiers = list(COPIERS)

    def put(self, data: bytes) -> None:
        self._pending.append(data)
        self._pending_size += len(data)
        if self._pending_size >= _BLOCK:
            self.flush()

    def flush(self) -> None:
        data = memoryview(b"".join(self._pending))
        self._pending.clear()
        self._pending_size = 0
        while data:
            data = data[os.write(self._fd, data) :]

    def copy(self, source: Source, span: Span) -> None:
        self.flush()
        fd = source.fileno()
        start = source.absolute(span).offset
        done = 0
        while done < span.size:
            left = span.size - done
            count = self._kernel_copy(fd, start + done, left) if fd is not None else 0
            if not count:
                data = source.read(span.offset + done, min(left, _BLOCK))
                count = len(data)
                self.put(data)
                self.flush()
            done += count

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
    """One write: what its parts need, and how far it is."""

    def __init__(
        self,
        sources: Sequence[Source],
        recipes: Mapping[str, Recipe],
        checker: _Checker,
        check: bool,
        progress: Callable[[int], object] | None,
    ) -> None:
        self.checker = checker
        self.checked = 0
        self._sources = sources
        self._recipes = recipes
        self._check = check
        self._progress = progress
        self._done = 0
        self._reported = 0

    def parts(self, parts: Sequence[Part], out: _Out) -> None:
        """Run the parts in order; keep the checksums that later ones ask for."""
        needed = {index for part in parts if isinstance(part, Late) for index in part.needs}
        sums: dict[int, _Sum] = {}
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
                self._put(_filled(part, sums), total, out)

    def report(self, *, end: bool = False) -> None:
        if self._progress and (end or self._done - self._reported >= _CHUNK):
            self._reported = self._done
            self._progress(self._done)

    def _sum_for(self, part: Part, needed: bool) -> _Sum | None:
        recorded = part.crc if self._check and isinstance(part, Copy | Made) else None
        if not recorded and not needed:
            return None
        if recorded:
            self.checked += part.size
        label = part.label if isinstance(part, Copy | Made) else ""
        path = self._sources[part.source_id].name if isinstance(part, Copy) else None
        return _Sum(part.size, recorded, label, path)

    def _put(self, data: bytes, total: _Sum | None, out: _Out) -> None:
        if total:
            total.add(data)
        out.put(data)
        self._done += len(data)
        self.report()

    def _copy(self, part: Copy, total: _Sum | None, out: _Out) -> None:
        source, span = self._sources[part.source_id], part.span
        if span.size < _SMALL:
            self._put(source.read(span.offset, span.size), total, out)
            return
        for offset in range(span.offset, span.end, _CHUNK):
            chunk = Span(offset, min(_CHUNK, span.end - offset))
            if total:
                self.checker.feed(source, chunk, total)
            out.copy(source, chunk)
            self._done += chunk.size
            self.report()

    def _make(self, part: Made, total: _Sum | None, out: _Out) -> None:
        left = part.size
        for data in self._recipes[part.recipe](self._read, part):
            left -= len(data)
            if left < 0:
                break
            self._put(data, total, out)
        if left:
            text = f"'{part.recipe}' made {'more' if left < 0 else 'fewer'} bytes than planned"
            raise StorageSize(text, key=part.label or None, hint="report this with the file")

    def _read(self, source_id: int, offset: int, size: int) -> bytes:
        return self._sources[source_id].read(offset, size)


def _filled(part: Late, sums: Mapping[int, _Sum]) -> bytes:
    data = part.fill(tuple(sums[index].value for index in part.needs))
    if len(data) != part.size:
        raise CkptError(f"a late part has {len(data):,} bytes, {part.size:,} were planned")
    return data
