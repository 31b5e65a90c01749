"""Short spans of an object that are kept when they pass, whoever fetches what lies around them.

Knows: spans, answers. Must not know: requests, stores, what the spans hold.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from threading import Lock

from ckptool.spans import Span


class Noted:
    """`spans` are sorted here, by where they begin; one that lies in two answers is not noted.

    Several sources of the same version of an object may share it.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = sorted(set(spans))
        self._found: dict[Span, memoryview] = {}
        self._lock = Lock()

    def take(self, start: int, data: memoryview) -> None:
        """Keep copies of the spans that lie in `data`, which begins at byte `start`."""
        at, end = bisect_left(self.spans, Span(start, 0)), start + len(data)
        with self._lock:
            for span in self.spans[at : bisect_left(self.spans, Span(end, 0))]:
                if span.end <= end and span not in self._found:
                    copy = bytes(data[span.offset - start : span.end - start])
                    self._found[span] = memoryview(copy)

    def found(self) -> Iterator[tuple[int, memoryview]]:
        """(where it begins, its bytes) of each that has passed."""
        with self._lock:
            for span, data in self._found.items():
                yield span.offset, data
