"""Short spans of an object that are kept when they pass, whoever fetches what lies around them; spans
that are checked when they are asked for.

Knows: spans, answers. Must not know: requests, stores, what the spans hold.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
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


class Watch:
    """Has `check(number)` run before `spans[number]` is read; again where that raised."""

    def __init__(self, spans: Sequence[Span], check: Callable[[int], object]) -> None:
        self._spans = sorted((span, number) for number, span in enumerate(spans))
        self._starts = [span.offset for span, _ in self._spans]
        self._seen: set[int] = set()
        self._check = check

    def look(self, offset: int, size: int) -> None:
        """These bytes are asked for. Raises what the check raises."""
        at = max(bisect_right(self._starts, offset) - 1, 0)
        for span, number in self._spans[at : bisect_left(self._starts, offset + size)]:
            if span.end > offset and number not in self._seen:
                self._seen.add(number)  # first: the check may read some of it
                try:
                    self._check(number)
                except BaseException:
                    self._seen.discard(number)
                    raise
