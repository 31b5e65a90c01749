"""Bytes of an object that are at hand, and which were asked for before.

Knows: runs of bytes, how many may be kept. Must not know: requests, stores, threads.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from ckptool.spans import Span

KEPT = 64 << 20
"""Bytes that are kept, beside pinned ones: four threads, each in a piece of its own, and what one of
them has brought of the part of another."""
_LARGE = 1 << 20
_REST = 16 << 10  # headers between storages: nobody reads them again


class Kept:
    """Runs of bytes by where they begin. The one that was not read for longest goes first, and a
    large one when all of it was read; pinned ones stay.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._runs: dict[int, memoryview] = {}
        self._large: set[int] = set()  # a few; short runs lie inside of them
        # where a run begins -> bytes of it that were read; the last one read at the end
        self._loose: dict[int, int] = {}
        self.size = 0

    def find(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset`; empty when its first byte is not kept."""
        run = self._run_at(offset)
        if run is None:
            return b""
        start, data = run
        found = bytes(data[offset - start :][:size])
        if start in self._loose:
            read = self._loose[start] = self._loose.pop(start) + len(found)
            ends = offset + len(found) == start + len(data)
            if ends and len(data) >= _LARGE and read >= len(data) - _REST:
                self._drop(start)
        return found

    def has(self, span: Span) -> bool:
        """Whether all of it is kept, in one run."""
        run = self._run_at(span.offset)
        return run is not None and span.end <= run[0] + len(run[1])

    def runs(self) -> Iterable[tuple[int, memoryview]]:
        """(where it begins, its bytes) of each run."""
        return self._runs.items()

    def add(self, start: int, data: memoryview, *, pinned: bool = False) -> None:
        """Keep one more run; another that begins there gives way."""
        if not data:
            return
        if start in self._runs:
            if len(self._runs[start]) >= len(data):
                return
            self._drop(start)
        self._starts.insert(bisect_right(self._starts, start), start)
        self._runs[start] = data
        if len(data) >= _LARGE:
            self._large.add(start)
        self.size += len(data)
        if not pinned:
            self._loose[start] = 0
        while self.size > KEPT and len(self._loose) > 1:
            self._drop(next(iter(self._loose)))

    def _run_at(self, offset: int) -> tuple[int, memoryview] | None:
        at = bisect_right(self._starts, offset)
        for start in (*self._starts[max(at - 2, 0) : at][::-1], *self._large):
            if start <= offset < start + len(self._runs[start]):
                return start, self._runs[start]
        return None

    def _drop(self, start: int) -> None:
        self.size -= len(self._runs.pop(start))
        del self._starts[bisect_left(self._starts, start)]
        self._loose.pop(start, None)
        self._large.discard(start)


class Asked:
    """Which bytes were asked for, as few runs as may be."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """These too."""
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def end_at(self, at: int) -> int:
        """Where the run that holds byte `at` ends; `at` where none does."""
        number = bisect_right(self._starts, at) - 1
        return max(at, self._ends[number]) if number >= 0 else at

    def last(self, at: int, end: int) -> int:
        """Where the last run that begins before byte `end` ends, at least `at`."""
        number = bisect_right(self._starts, end) - 1
        return max(at, self._ends[number]) if number >= 0 else at

    def next(self, at: int, end: int) -> int:
        """Where the first run after byte `at` begins, at most `end`."""
        number = bisect_right(self._starts, at)
        return min(end, self._starts[number]) if number < len(self._starts) else end
