"""Which requests are made for the reads of an object, and which of them before they are needed.

Knows: reads, their order where that was told, requests under way. Must not know: stores, formats,
how bytes come. Whoever calls holds one lock.

Where the order is known, pieces of what follows are fetched ahead, and nothing else. Where it is
not, who reads on and on gets more each time. Several threads may read, each in a place of its
own: what one of them has asked for is waited for by the others, and not asked for again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptool.remote_kept import Asked
from ckptool.spans import Span

if TYPE_CHECKING:
    from ckptool.remote_stores import Answer

HEAD = 64 << 10
"""Bytes of the first request, and of the one for the end."""
GAP = 16 << 10
"""What is skipped and still counts as reading on; between spans of one request."""
PIECE = 8 << 20
"""The largest request."""
AT_ONCE = 8
_LITTLE = 8 << 10  # the least that a read elsewhere brings
_STREAM = 1 << 20  # read on for this long, pieces are fetched ahead
_AHEAD = 2 * PIECE  # for one thread
_WAITING = 3 * PIECE  # fetched ahead in all and not read
_TRAILS = 8
_NOTED = 256 << 10  # smaller requests do not stop a piece
_STALE = 64  # reads after which nobody will come for a piece


@dataclass(frozen=True, eq=False)
class Request:
    """Bytes [`start`, `end`), asked for at read number `turn`."""

    start: int
    end: int
    turn: int
    future: Future[Answer] = field(default_factory=Future)


class Ahead:
    """The requests for one object of `size` bytes, of which the first `have` were brought."""

    def __init__(self, size: int, have: int) -> None:
        self._size = size
        self._have = have
        self._order: Order | None = None
        self._asked = Asked()
        self._flying: dict[int, Request] = {}
        self._trails = [_Trail(have)]
        self._turn = 0

    def foresee(self, spans: Iterable[Span]) -> None:
        """These will be read now, mostly in this order, by any number of threads."""
        self._order = Order(spans, self._size)
        self._asked = Asked()

    def under_way(self, offset: int) -> Request | None:
        """The request that brings this byte."""
        for request in self._flying.values():
            if request.start <= offset < request.end:
                return request
        return None

    def begin(self, start: int, end: int) -> Request:
        """A request that is made now."""
        request = Request(start, end, self._turn)
        self._flying[start] = request
        if self._order or end - start >= _NOTED:
            self._asked.add(start, end)
        return request

    def end(self, request: Request) -> bool:
        """Its answer is here; whether this is the first to say so."""
        if self._flying.get(request.start) is not request:
            return False
        del self._flying[request.start]
        return True

    def wanted(self, offset: int, size: int) -> tuple[int, int]:
        """What to ask for when `size` bytes are read; the answer may be shorter, or begin before.

        Of what was told, whole pieces: who begins in the middle of one does not cut it in two.
        """
        self._turn += 1
        trail = self._trail(offset, size)
        first, end = self._order.piece_at(offset) if self._order else (0, 0)
        again = self._asked.end_at(offset) > offset
        if again and not end and trail.run > _STREAM:  # all of it is read once more
            self._asked, again = Asked(), False
        want = size if again else max(size, PIECE if end else min(trail.run, PIECE))
        last = self._size - HEAD
        if not end and not trail.run and size < HEAD and offset + max(want, _LITTLE) > last:
            trail.next = self._size
            return max(min(offset, last), 0), self._size
        stop = min(offset + min(max(want, _LITTLE), PIECE), end or self._size)
        start = offset
        if not again:
            stop = self._asked.next(offset, stop)
            start = self._asked.last(max(first, min(self._have, offset)), offset) if end else offset
        trail.next = stop
        return start, stop

    def ahead(self, offset: int, request: Request) -> list[Request]:
        """What to ask for beside, now that `request` has brought the byte at `offset`."""
        self._turn += 1
        if self._order and self._order.end_at(offset):
            return list(self._pieces(self._order.after(request.end), _AHEAD, known=True))
        trail = self._trail_of(request)
        reach = min(trail.run, _AHEAD) if trail.run >= _STREAM else 0
        return list(self._pieces([(request.end, self._size)], reach, known=False))

    def give_up(self) -> None:
        """Nobody waits for what was not begun."""
        for request in self._flying.values():
            request.future.cancel()
        self._flying.clear()

    def _pieces(
        self, runs: Iterable[tuple[int, int]], reach: int, *, known: bool
    ) -> Iterator[Request]:
        """Requests for what was not asked for before, `reach` bytes under way in all."""
        piece = min(reach, PIECE)
        for at, end in runs:
            while at < end and reach > 0 and len(self._flying) < AT_ONCE:
                asked = self._asked.end_at(at)
                if asked > at:
                    request = self.under_way(at)
                    if request is None and not known:  # another thread was there
                        return
                    asked = request.end if request else asked
                    reach -= asked - at if request else 0
                    at = asked
                    continue
                stop = self._asked.next(at, min(at + piece, end))
                if not self._has_room(stop - at):
                    return
                reach -= stop - at
                yield self.begin(at, stop)
                at = stop

    def _has_room(self, size: int) -> bool:
        waiting = sum(request.end - request.start for request in self._flying.values())
        for request in list(self._flying.values()):
            if waiting + size > _WAITING and self._turn - request.turn > _STALE:
                request.future.cancel()
                waiting -= request.end - request.start
                del self._flying[request.start]
        return waiting + size <= _WAITING

    def _trail_of(self, request: Request) -> _Trail:
        """The one that the request belongs to, or goes on with."""
        for trail in reversed(self._trails):
            if trail.next == request.end:
                return trail
        trail = self._trail(request.start, request.end - request.start)
        trail.next = request.end
        return trail

    def _trail(self, offset: int, size: int) -> _Trail:
        for number, trail in enumerate(self._trails):
            if 0 <= offset - trail.next <= GAP:
                self._trails.append(self._trails.pop(number))
                trail.run += size
                return trail
        self._trails.append(_Trail(offset))
        del self._trails[:-_TRAILS]
        return self._trails[-1]


class _Trail:
    """Where reading on would begin, and the bytes that were read on without a leap."""

    __slots__ = ("next", "run")

    def __init__(self, at: int) -> None:
        self.next = at
        self.run = 0


class Order:
    """Spans in the order in which they are read; those that nearly touch are one run."""

    def __init__(self, spans: Iterable[Span], size: int) -> None:
        self._runs: list[tuple[int, int]] = []
        for span in spans:
            start, end = span.offset, min(span.end, size)
            if self._runs and self._runs[-1][0] <= start <= self._runs[-1][1] + GAP:
                self._runs[-1] = self._runs[-1][0], max(end, self._runs[-1][1])
            elif start < end:
                self._runs.append((start, end))
        self._numbers = sorted(range(len(self._runs)), key=self._runs.__getitem__)
        self._starts = [self._runs[number][0] for number in self._numbers]

    def end_at(self, offset: int) -> int:
        """Where the run that holds this byte ends; 0 where none does."""
        number = self._number(offset)
        return self._runs[number][1] if number >= 0 and offset < self._runs[number][1] else 0

    def piece_at(self, offset: int) -> tuple[int, int]:
        """The piece of its run that holds this byte, as (start, end); (0, 0) where none does."""
        number = self._number(offset)
        if number < 0 or offset >= self._runs[number][1]:
            return 0, 0
        start, end = self._runs[number]
        start += (offset - start) // PIECE * PIECE
        return start, min(start + PIECE, end)

    def after(self, at: int) -> Iterator[tuple[int, int]]:
        """What is read from byte `at` on: the rest of its run, then the next ones."""
        number = self._number(at - 1)
        if number >= 0:
            yield at, self._runs[number][1]
            for next_one in range(number + 1, min(number + 64, len(self._runs))):
                yield self._runs[next_one]

    def _number(self, offset: int) -> int:
        at = bisect_right(self._starts, offset) - 1
        return self._numbers[at] if at >= 0 else -1
