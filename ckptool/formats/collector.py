"""Python's garbage collector, paused while a file is read or worked on, or many are: with
millions of nodes alive, looking for dead ones takes half of the time.

Knows: that nearly all of what is read stays alive, and of many files the walked pickles do not.
Must not know: files, formats.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any


class paused(ContextDecorator):  # noqa: N801 - used like a function
    """Yields what to call after each file: it lets go of that file's pickle alone. A class, since
    every file enters it six times.
    """

    def _recreate_cm(self) -> paused:
        return paused()  # for each call of a function: they may be nested

    def __enter__(self) -> Callable[[], None]:
        self._was_enabled = gc.isenabled()
        gc.disable()
        return _let_go

    def __exit__(self, *error: Any) -> None:
        if self._was_enabled:
            gc.enable()


def _let_go() -> None:
    gc.collect(0)
