"""A progress bar on stderr: after one second, only on a terminal.

Knows: click's bar. Must not know: checkpoints, what is done.
"""

from __future__ import annotations

import sys
from time import monotonic
from typing import Any

import click

_PATIENCE = 1.0  # seconds


class Bar:
    """A context manager; `show(done, total)` with bytes."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._started = monotonic()
        self._stream = sys.stderr
        self._bar: Any = None
        self._done = 0

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.render_finish()

    def show(self, done: int, total: int) -> None:
        """Draw, where somebody waits and sees it."""
        if monotonic() - self._started < _PATIENCE or not self._stream.isatty():
            return
        if self._bar is None:
            self._bar = click.progressbar(length=total, file=self._stream, label=self._label)
        self._bar.update(done - self._done)
        self._done = done
