"""An object in a store, or on a web server, as a Source.

Knows: how few and how large reads become requests. Must not know: formats, how requests are made.

The first request brings the head of the object with its size and identity; reads near the end
bring the end; small ones elsewhere a few kB. Who reads on and on gets more each time, and the
next pieces are fetched beside. What is kept is bounded; every answer must come from the same
version of the object.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING

from ckptool.errors import CkptError
from ckptool.reads import Source, changed
from ckptool.remote_errors import short
from ckptool.remote_stores import Answer, Meta, Store
from ckptool.remote_urls import Located
from ckptool.spans import Address, Span

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

HEAD = 64 << 10
"""Bytes of the first request, and of the one for the end."""
_LITTLE = 8 << 10  # the least that a read elsewhere brings
_GAP = 16 << 10  # what is skipped and still counts as reading on; between spans of one request
_STREAM = 1 << 20  # read on for this long, pieces are fetched ahead
_PIECE = 4 << 20
_AHEAD = 3  # pieces
_KEPT = 16 << 20
_HELPERS = 8
_FRESH = 1.0  # seconds for which an answer tells that the object is unchanged


class RemoteSource(Source):
    """`address.identity` is its ETag, or where there is none its date."""

    far = True

    def __init__(self, store: Store, first: Answer) -> None:
        place, meta = store.place, first.meta
        super().__init__(place.name, meta.size, Address(place.url, meta.size, meta.identity))
        self._store = store
        self._meta = meta
        self._kept = _Kept()
        self._kept.add(first.start, first.data)
        self._lock = Lock()
        self._next = first.start + len(first.data)  # where reading on would begin
        self._run = 0  # bytes that were read on, without a leap
        self._ahead: dict[int, Future[Answer]] = {}
        self._helpers: ThreadPoolExecutor | None = None
        self._heard = monotonic()

    def near(self, span: Span) -> bool:
        """Whether all of it is kept."""
        with self._lock:
            return self._kept.has(span)

    def expect(self, spans: Iterable[Span]) -> None:
        """Fetch those that are missing, several at a time."""
        with self._lock:
            ends = sorted((s.offset, min(s.end, self.size)) for s in spans if not self._kept.has(s))
        for answer in (
            self._pool().map(lambda span: self._get(*span), _joined(ends)) if ends else ()
        ):
            with self._lock:
                self._kept.add(answer.start, answer.data, pinned=True)

    def unchanged(self) -> bool:
        """Ask the server, unless it has just said."""
        if monotonic() - self._heard < _FRESH or not self.size:
            return True
        try:
            self._get(0, 1)
        except CkptError as error:
            if error.slug in ("input-changed", "special-file"):
                return False
            raise
        return True

    def close(self) -> None:
        """Forget what was read and what is on its way."""
        with self._lock:
            helpers, self._helpers = self._helpers, None
            self._ahead.clear()
            self._kept = _Kept()
        if helpers is not None:
            helpers.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, offset: int, size: int) -> bytes:
        if not size:  # no store gives a range of nothing
            return b""
        with self._lock:
            found = self._kept.find(offset, size)
            if found:
                return found
            waiting = self._ahead.pop(offset, None)
            start, end = self._wanted(offset, size)
        answer = waiting.result() if waiting is not None else self._get(start, end)
        with self._lock:
            self._kept.add(answer.start, answer.data)
            self._next = answer.start + len(answer.data)
            self._order_ahead()
            return bytes(answer.data[offset - answer.start :][:size])

    def _wanted(self, offset: int, size: int) -> tuple[int, int]:
        """What to ask for; never beyond what is read plus a bounded surplus."""
        if 0 <= offset - self._next <= _GAP:
            self._run += size
        else:
            self._run = 0
            self._ahead.clear()
        streaming = self._run >= _STREAM
        want = _PIECE if streaming else max(size, _LITTLE)
        start, end = offset, min(offset + min(want, _PIECE), self.size)
        if end > self.size - HEAD and size < HEAD and not self._run:
            start = max(min(start, self.size - HEAD), 0)
            end = self.size
        return start, end

    def _order_ahead(self) -> None:
        """Ask for the next pieces of what is read on and on."""
        if self._run < _STREAM:
            return
        at = max([self._next, *(start + _PIECE for start in self._ahead)])
        while len(self._ahead) < _AHEAD and at < self.size:
            self._ahead[at] = self._pool().submit(self._get, at, min(at + _PIECE, self.size))
            at += _PIECE

    def _pool(self) -> ThreadPoolExecutor:
        if self._helpers is None:
            from concurrent.futures import ThreadPoolExecutor

            self._helpers = ThreadPoolExecutor(_HELPERS, "ckptool-read")
        return self._helpers

    def _get(self, start: int, end: int) -> Answer:
        """These bytes, of the version that was opened. Raises InputChanged, Truncated, CkptError."""
        answer = self._store.get(start, end)
        if answer.meta != self._meta:
            raise changed(self.name)
        if answer.start != start or len(answer.data) != end - start:
            raise short(self._store.place)
        self._heard = monotonic()
        return answer


def open_object(place: Located) -> Source:
    """Open it with one request. Raises CkptError."""
    store = Store(place)
    try:
        return RemoteSource(store, store.get(0, HEAD))
    except CkptError as error:
        if error.slug == "remote-no-ranges":
            whole = store.whole()
            if whole is None:
                raise
            return RemoteSource(store, whole)
        if "416" not in error.text:  # an empty object has no first byte
            raise
    return RemoteSource(store, Answer(0, memoryview(b""), Meta(0, ("empty",))))


def _joined(ends: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Sorted spans as fewer ones: those that nearly touch are one, of bounded size."""
    start, end = ends[0]
    for first, last in ends[1:]:
        if first - end <= _GAP and last - start <= _PIECE:
            end = max(end, last)
        else:
            yield start, end
            start, end = first, last
    yield start, end


class _Kept:
    """Runs of bytes by where they begin. The oldest go first; pinned ones stay."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._runs: dict[int, memoryview] = {}
        self._loose: deque[int] = deque()
        self._size = 0

    def find(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset`; empty when its first byte is not kept."""
        run = self._run_at(offset)
        return bytes(run[1][offset - run[0] :][:size]) if run else b""

    def has(self, span: Span) -> bool:
        """Whether all of it is kept, in one run."""
        run = self._run_at(span.offset)
        return run is not None and span.end <= run[0] + len(run[1])

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
        self._size += len(data)
        if not pinned:
            self._loose.append(start)
        while self._size > _KEPT and len(self._loose) > 1:
            self._drop(self._loose[0])

    def _run_at(self, offset: int) -> tuple[int, memoryview] | None:
        at = bisect_right(self._starts, offset) - 1
        for number in (at, at - 1):  # a short run may begin inside a long one
            if number >= 0:
                start = self._starts[number]
                if offset < start + len(self._runs[start]):
                    return start, self._runs[start]
        return None

    def _drop(self, start: int) -> None:
        self._size -= len(self._runs.pop(start))
        del self._starts[bisect_right(self._starts, start) - 1]
        if start in self._loose:
            self._loose.remove(start)
