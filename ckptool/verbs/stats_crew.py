"""Reading many tensors with a few threads: numpy, hashes and reads let the others go on.

Knows: threads, who takes which lot, how they are stopped. Must not know: tensors, files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

Lot = TypeVar("Lot")
Found = TypeVar("Found")
Tick = Callable[[int], None]
"""Called by a hand with bytes that are done; raises Stopped where nobody waits for it any more."""
Hand = Callable[[Lot, Tick], Found]

MOST = 4
"""Threads: more of them wait for Python's lock most of the time."""


class Stopped(Exception):
    """The crew is going home."""


def hand_count() -> int:
    """As many threads as processors that we may use, at most MOST."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(MOST, cores)


def in_turn(lots: Sequence[Lot], hand: Hand[Lot, Found], tick: Tick) -> Iterator[Found]:
    """What the hand finds in each lot, in this thread."""
    for lot in lots:
        yield hand(lot, tick)


def at_once(
    lots: Sequence[Lot], hands: Sequence[Hand[Lot, Found]], tick: Tick
) -> Generator[Found, None, None]:
    """What the hands find, each in a thread of its own, in any order; `tick` is called in this
    thread. Raises what a hand raises; then, and when the caller leaves, the others stop soon.
    """
    import queue
    import threading

    results: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    waiting, lock, stop = iter(lots), threading.Lock(), threading.Event()

    def report(done: int) -> None:
        if stop.is_set():
            raise Stopped
        results.put(("tick", done))

    def work(hand: Hand[Lot, Found]) -> None:
        try:
            while not stop.is_set():
                with lock:
                    lot = next(waiting, None)
                if lot is None:
                    return
                results.put(("found", hand(lot, report)))
        except Stopped:
            return
        except BaseException as error:  # handed to the thread that waits
            results.put(("error", error))

    threads = [threading.Thread(target=work, args=(hand,), daemon=True) for hand in hands]
    try:
        for thread in threads:
            thread.start()
        yield from _received(results, len(lots), tick)
    finally:
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def _received(results: Any, count: int, tick: Tick) -> Iterator[Any]:
    while count:
        what, value = results.get()
        if what == "error":
            raise value
        if what == "tick":
            tick(value)
        else:
            count -= 1
            yield value
