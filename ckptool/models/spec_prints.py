"""What the user's own code prints goes to stderr: stdout is for our data.

Knows: streams and their file descriptors. Must not know: models, checkpoints.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """Send prints to stderr until the block ends, those of C code and of child processes too."""
    with ExitStack() as stack:
        stack.enter_context(_descriptor_on_stderr())
        stack.enter_context(redirect_stdout(sys.stderr))
        yield


@contextmanager
def _descriptor_on_stderr() -> Iterator[None]:
    """File descriptor 1 itself, where Python's stdout is really that (not in a notebook)."""
    saved = None
    with suppress(AttributeError, OSError, ValueError):
        if sys.stdout.fileno() == 1:
            sys.stdout.flush()
            saved = os.dup(1)
            os.dup2(sys.stderr.fileno(), 1)
    try:
        yield
    finally:
        if saved is not None:
            os.dup2(saved, 1)
            os.close(saved)
