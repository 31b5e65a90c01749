"""A ^C that comes while something must not be left half done waits until it is done.

Knows: SIGINT. Must not know: files, what is done.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def held(done: str = "") -> Iterator[None]:
    """Hold SIGINT back during the block, which should take milliseconds.

    Afterwards the former handler gets it; a KeyboardInterrupt of that says `done`, what was
    completed before it. When the block raises, its own error is the answer. Where no
    KeyboardInterrupt can come (other threads, SIGINT ignored) nothing is changed.
    """
    former = signal.getsignal(signal.SIGINT)
    came: list[Any] = []
    try:
        if callable(former):
            signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    except ValueError:  # another thread than the main one
        former = None
    if not callable(former):
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
    if came:
        try:
            former(*came[0])
        except KeyboardInterrupt:
            raise KeyboardInterrupt(*([done] if done else [])) from None
