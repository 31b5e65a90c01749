"""Checksums of bytes on their way from a source to a file, taken beside the copying.

Knows: spans of sources, CRC-32. Must not know: plans, files that are written.
"""

from __future__ import annotations

import mmap
import queue
import threading
import zlib
from collections.abc import Callable
from types import TracebackType

from ckptool.errors import CrcMismatch
from ckptool.places import Source
from ckptool.spans import Span

BLOCK = 1 << 20  # one read
_AHEAD = 16  # jobs the copy may be ahead of the check, so that both hit the page cache
_LENT = 4  # blocks that are read, written and summed at one time
_AGAIN = "download or copy it again, or skip the check with --no-check"


def _block() -> memoryview:
    """A buffer that starts with a page: reading into it costs half of what a bytearray may."""
    return memoryview(mmap.mmap(-1, BLOCK))


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


def crc_of_both(first: int, second: int, size: int) -> int:
    """The CRC-32 of two runs of bytes one after the other, from those of each; `size` is that of
    the second. As zlib's crc32_combine: the first is moved on by 8 * `size` zero bits, a product
    of polynomials.
    """
    power, at = 1 << 31, 3  # x ** 0, and x ** (2 ** at) for each bit of `size`
    while size:
        if size & 1:
            power = _product(_squares(at), power)
        size >>= 1
        at += 1
    return _product(power, first) ^ second


_POLYNOMIAL = 0xEDB88320  # CRC-32, its bits from x ** 0 at the left
_SQUARES = [1 << 30]  # x ** (2 ** n)


def _squares(number: int) -> int:
    while len(_SQUARES) <= number:
        _SQUARES.append(_product(_SQUARES[-1], _SQUARES[-1]))
    return _SQUARES[number]


def _product(a: int, b: int) -> int:
    """The product modulo the polynomial."""
    result = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            result ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return result


_Job = Callable[[memoryview], None]


class Checker:
    """One thread for a whole write: it sums the blocks it is handed, and reads and sums the
    spans that the kernel copies.
    """

    def __init__(self) -> None:
        self._jobs: queue.Queue[_Job | None] = queue.Queue(_AHEAD)
        self._blocks: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._lent = 0
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
        """Read and sum these bytes soon; raise what went wrong with earlier ones."""
        self._add(lambda buffer: self._sum(buffer, source, span, total))

    def lend(self) -> memoryview:
        """A block to read into, of `BLOCK` bytes; waits until one is free. `take` ends the loan."""
        if self._lent < _LENT and self._blocks.empty():
            self._lent += 1
            return _block()
        return self._blocks.get()

    def take(self, block: memoryview, size: int, total: Sum | None) -> None:
        """Sum the first `size` bytes of a lent block soon, where `total` is given. Until the next
        `lend` its bytes stay; raises what went wrong with earlier ones.
        """
        if total is None:
            self._blocks.put(block)
        else:
            self._add(lambda _: self._sum_block(block, size, total))

    def _add(self, job: _Job) -> None:
        if not self._thread:
            self._thread = threading.Thread(target=self._work, name="ckptool-crc", daemon=True)
            self._thread.start()
        self._jobs.put(job)
        if self._error:
            raise self._error

    def settle(self) -> None:
        """Wait until all that was fed is summed; raise what went wrong."""
        self._jobs.join()
        if self._error:
            raise self._error

    def _work(self) -> None:
        buffer = _block()
        while (job := self._jobs.get()) is not None:
            try:
                job(buffer)
            except BaseException as error:  # handed to the writing thread
                self._error = error
            self._jobs.task_done()

    def _sum_block(self, block: memoryview, size: int, total: Sum) -> None:
        try:
            if not self._error and not self._stopped:
                total.add(block[:size])
        finally:
            self._blocks.put(block)

    def _sum(self, buffer: memoryview, source: Source, span: Span, total: Sum) -> None:
        for offset in range(span.offset, span.end, BLOCK):
            if self._error or self._stopped:
                return
            view = buffer[: min(BLOCK, span.end - offset)]
            source.read_into(offset, view)
            total.add(view)
