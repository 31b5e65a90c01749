"""Python's garbage collector, paused while a file is read or worked on, or many are: with
millions of nodes alive, looking for dead ones takes half of the time.

Knows: that nearly all of what is read stays alive, and of many files the walked pickles do not.
Must not know: files, formats.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[Callable[[], None]]:
    """Yields what to call after each file: it lets go of that file's pickle alone."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield _let_go
    finally:
        if was_enabled:
            gc.enable()


def _let_go() -> None:
    gc.collect(0)
