"""An object in a store, or on a web server, as a Source.

Knows: how few and how large reads become requests. Must not know: formats, how requests are made.

The first request brings the head of the object with its size and identity; reads near the end
bring the end; small ones elsewhere a few kB, long ones large pieces, several at once. What is
kept is bounded; every answer must come from the same version of the object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING

from ckptool.errors import CkptError
from ckptool.reads import Doubted, Source, changed
from ckptool.remote_ahead import AT_ONCE, GAP, HEAD, PIECE, Ahead, Request
from ckptool.remote_errors import short
from ckptool.remote_kept import Kept
from ckptool.remote_noted import Noted, Watch
from ckptool.remote_stores import Answer, Meta, Store
from ckptool.remote_urls import Located
from ckptool.spans import Address, Span

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

_FRESH = 1.0  # seconds for which an answer tells that the object is unchanged


class RemoteSource(Source):
    """`address.identity` is its ETag, or where there is none its date."""

    far = True

    def __init__(self, store: Store, first: Answer, noted: Noted | None = None) -> None:
        place, meta = store.place, first.meta
        super().__init__(place.name, meta.size, Address(place.url, meta.size, meta.identity))
        self._store = store
        self._meta = meta
        self._kept = Kept()
        self._kept.add(first.start, first.data, pinned=len(first.data) <= HEAD)
        self._lock = Lock()
        self._ahead = Ahead(meta.size, first.start + len(first.data))
        self._helpers: ThreadPoolExecutor | None = None
        self._heard = monotonic()
        self._noted = noted
        self._owed: Callable[[], bool] | None = None
        self._watches: list[Watch] = []
        self._note(first)

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

    def put_off(self, spans: Iterable[Span], check: Callable[[], bool]) -> None:
        """Once: the directory of an archive is read once."""
        noted = Noted(spans)
        with self._lock:
            for start, data in self._kept.runs():
                noted.take(start, data)
        self._noted, self._owed = noted, check
        self.patient = False

    def watch(self, spans: Sequence[Span], check: Callable[[int], object]) -> None:
        """As often as parts of it are computed."""
        self._watches.append(Watch(spans, check))

    def settle(self) -> None:
        """Fetch what has not passed, run the check. Raises Doubted, and what `expect` raises."""
        noted, check = self._noted, self._owed
        if noted is None or check is None:
            return
        self._noted = self._owed = None  # a check that fails is not asked again
        with self._lock:
            for start, data in noted.found():
                if not self._kept.has(Span(start, len(data))):
                    self._kept.add(start, data, pinned=True)
        self.expect(noted.spans)
        if not check():
            raise Doubted

    def again(self, address: Address) -> Source | None:
        """With one request. Raises InputChanged, and what `open_object` raises."""
        if self._noted is None or address != self.address:
            return None
        source = open_object(self._store.place, self._noted)
        if source.address == address:
            return source
        source.close()
        raise changed(self.name)

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
            self._ahead.give_up()
            self._kept = Kept()
        if helpers is not None:
            helpers.shutdown(wait=False, cancel_futures=True)

    def will_read(self, spans: Iterable[Span]) -> None:
        """Pieces of these are fetched ahead, and of nothing else."""
        with self._lock:
            self._ahead.foresee(spans)

    def _fetch(self, offset: int, size: int) -> bytes:
        if not size:  # no store gives a range of nothing
            return b""
        for watch in self._watches:
            watch.look(offset, size)
        with self._lock:
            found = self._kept.find(offset, size)
            if found:
                return found
            request = self._ahead.under_way(offset)
            own = request is None
            if request is None:
                request = self._ahead.begin(*self._ahead.wanted(offset, size))
        if own:
            self._carry_out(request)
        answer = self._answer(request) or self._get(offset, offset + min(size, PIECE))
        with self._lock:
            if self._ahead.end(request):
                end = answer.start + len(answer.data) == self.size  # it is looked at once more
                self._kept.add(
                    answer.start, answer.data, pinned=end and len(answer.data) <= 2 * HEAD
                )
            self._order_ahead(offset, request)
            kept = self._kept.find(offset, size)
        return kept or bytes(answer.data[offset - answer.start :][:size])

    def _order_ahead(self, offset: int, request: Request) -> None:
        try:
            for more in self._ahead.ahead(offset, request):
                self._pool().submit(self._carry_out, more)
        except BaseException:  # no thread, or Ctrl-C: nobody may wait for what is not begun
            self._ahead.give_up()
            raise

    def _carry_out(self, request: Request) -> None:
        if not request.future.set_running_or_notify_cancel():
            return
        try:
            request.future.set_result(self._get(request.start, request.end))
        except BaseException as error:  # raised by whoever waits
            request.future.set_exception(error)

    def _answer(self, request: Request) -> Answer | None:
        """None where it was given up before it was begun."""
        from concurrent.futures import CancelledError

        try:
            return request.future.result()
        except CancelledError:
            return None
        except BaseException:  # the next read asks again
            with self._lock:
                self._ahead.end(request)
            raise

    def _pool(self) -> ThreadPoolExecutor:
        if self._helpers is None:
            from concurrent.futures import ThreadPoolExecutor

            self._helpers = ThreadPoolExecutor(AT_ONCE, "ckptool-read")
        return self._helpers

    def _get(self, start: int, end: int) -> Answer:
        """These bytes, of the version that was opened. Raises InputChanged, Truncated, CkptError."""
        answer = self._store.get(start, end)
        if answer.meta != self._meta:
            raise changed(self.name)
        if answer.start != start or len(answer.data) != end - start:
            raise short(self._store.place)
        self._heard = monotonic()
        self._note(answer)
        return answer

    def _note(self, answer: Answer) -> None:
        noted = self._noted
        if noted is not None:
            noted.take(answer.start, answer.data)


def open_object(place: Located, noted: Noted | None = None) -> Source:
    """Open it with one request. Raises CkptError."""
    store = Store(place)
    try:
        return RemoteSource(store, store.get(0, HEAD), noted)
    except CkptError as error:
        if error.slug == "remote-no-ranges":
            whole = store.whole()
            if whole is None:
                raise
            return RemoteSource(store, whole, noted)
        if "416" not in error.text:  # an empty object has no first byte
            raise
    return RemoteSource(store, Answer(0, memoryview(b""), Meta(0, ("empty",))))


def _joined(ends: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Sorted spans as fewer ones: those that nearly touch are one, of bounded size."""
    start, end = ends[0]
    for first, last in ends[1:]:
        if first - end <= GAP and last - start <= PIECE:
            end = max(end, last)
        else:
            yield start, end
            start, end = first, last
    yield start, end
