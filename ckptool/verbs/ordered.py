"""One function over many things: a bounded number at one time, the results in their order.

Knows: threads, and when they help. Must not know: what is done.
Python runs one thread at a time, and threads that all compute take half as long again. So the
first things are done one by one, and the others start when most of the time is spent waiting for
a disk or a network. That is asked again and again: a disk that was waited for has it all at hand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from time import perf_counter, thread_time
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

HANDS = 16
"""Threads that wait at one time: for a network, not for processors."""
_LOT = 4  # things a thread takes at once
_AHEAD = 2  # lots that wait for each thread, so that memory stays bounded
_STINT = 256  # things done by threads before it is asked again; twice as many each time
_TRIAL = 0.05  # seconds to look at before it is decided
_LARGE = 0.01  # seconds for one thing: bytes are read and summed, which lets other threads run


def in_order(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    hands: int = HANDS,
    cores: int = 1,
) -> Iterator[Result]:
    """`function` of each item, in their order, whatever is finished first; `items` is read no
    further than is needed. With `cores` over one, as many threads also where nothing waits and
    one item takes long (`function` then leaves most of its time to other threads).

    Raises what the function raises; then, and when the caller leaves, no further lot is begun.
    """
    source = iter(items)
    watch = _Watch(hands, cores)
    stint = _STINT
    for item in source:
        yield watch.timed(function, item)
        if (count := watch.wanted()) > 1:
            yield from _at_once(function, islice(source, stint), count)
            watch.begin()
            stint *= 2


class _Watch:
    """What the time of the calling thread goes to."""

    def __init__(self, hands: int, cores: int) -> None:
        self._hands = hands
        self._cores = cores
        self.begin()

    def begin(self) -> None:
        """Forget what was seen."""
        self._wall = self._computed = 0.0
        self._count = 0
        self._slept = _sleeps()

    def timed(self, function: Callable[[Item], Result], item: Item) -> Result:
        wall, computed = perf_counter(), thread_time()
        result = function(item)
        self._wall += perf_counter() - wall
        self._computed += thread_time() - computed
        self._count += 1
        return result

    def wanted(self) -> int:
        """How many threads would help; judged anew after each trial."""
        if self._wall < _TRIAL:
            return 1
        before, self._slept = self._slept, _sleeps()
        slept = self._slept is None or before is None or self._slept - before >= self._count
        waited = slept and self._wall > 3 * self._computed
        large = self._wall > _LARGE * self._count
        self._wall, self._computed, self._count = 0.0, 0.0, 0
        return self._hands if waited else min(self._cores, self._hands) if large else 1


def _sleeps() -> int | None:
    """How often this thread has waited for something; None where the system does not count.
    On a busy machine a thread loses time too, but not by waiting.
    """
    try:
        from resource import RUSAGE_THREAD, getrusage
    except ImportError:
        return None
    return getrusage(RUSAGE_THREAD).ru_nvcsw


def _at_once(
    function: Callable[[Item], Result], source: Iterator[Item], hands: int
) -> Iterator[Result]:
    from concurrent.futures import ThreadPoolExecutor

    def work(lot: list[Item]) -> list[Result]:
        return [function(item) for item in lot]

    pool = ThreadPoolExecutor(hands, "ckptool-many")
    running: deque[Any] = deque()
    try:
        while True:
            while len(running) < hands * _AHEAD and (lot := list(islice(source, _LOT))):
                running.append(pool.submit(work, lot))
            if not running:
                return
            yield from running.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
