"""Checksums of bytes on their way from a source to a file, taken beside the copying.

Knows: spans of sources, CRC-32. Must not know: plans, files that are written.
"""

from __future__ import annotations

import queue
import threading
import zlib
from types import TracebackType

from ckptool.errors import CrcMismatch
from ckptool.places import Source
from ckptool.spans import Span

_BLOCK = 1 << 20  # one read of the checking thread
_AHEAD = 16  # chunks the copy may be ahead of the check, so that both hit the page cache
_AGAIN = "download or copy it again, or skip the check with --no-check"


class Sum:
    """The CRC of one part while its bytes pass, compared at the end where one is recorded."""

    __slots__ = ("_expected", "_label", "_left", "_path", "value")

    def __init__(self, size: int, expected: int | None, label: str, path: str | None) -> None:
        self.value = 0
        self._left = size
        self._expected = expected
        self._label = label
        self._path = path

    def add(self, data: bytes | memoryview) -> None:
        """Raises CrcMismatch with the last bytes, unless they are what was recorded."""
        self.value = zlib.crc32(data, self.value)
        self._left -= len(data)
        if not self._left and self._expected and self.value != self._expected:
            what = f"bytes of '{self._label}'" if self._label else "bytes"
            text = f"{what} do not have their recorded checksum"
            raise CrcMismatch(text, path=self._path, hint=_AGAIN)


class Checker:
    """One thread for a whole write that reads and sums the spans it is fed."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[tuple[Source, Span, Sum] | None] = queue.Queue(_AHEAD)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stopped = False

    def __enter__(self) -> Checker:
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

    def feed(self, source: Source, span: Span, total: Sum) -> None:
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

    def _guarded(self, buffer: memoryview, source: Source, span: Span, total: Sum) -> None:
        try:
            self._sum(buffer, source, span, total)
        except BaseException as error:  # handed to the writing thread
            self._error = error

    def _sum(self, buffer: memoryview, source: Source, span: Span, total: Sum) -> None:
        for offset in range(span.offset, span.end, _BLOCK):
            if self._error or self._stopped:
                return
            view = buffer[: min(_BLOCK, span.end - offset)]
            source.read_into(offset, view)
            total.add(view)
