"""What the commands print, and where: data to stdout, everything else to stderr.

Knows: streams, colour. Must not know: checkpoints.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

from ckptool.errors import CkptError
from ckptool.urls import masked


class Unwritten(Exception):
    """Stdout takes no more: a full disk, a closed descriptor. (A reader that went away is not
    this but BrokenPipeError.)
    """


class Stdout(io.TextIOWrapper):
    """The stream of the command: its errors are told from those of any file."""

    def write(self, text: str) -> int:
        """Write; raises Unwritten."""
        with _telling():
            return super().write(text)

    def flush(self) -> None:
        """Flush; raises Unwritten."""
        with _telling():
            super().flush()


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Unwritten(error.strerror or str(error)) from error


def echo(text: str) -> None:
    """One block of data to stdout."""
    sys.stdout.write(f"{text}\n")


def summary(text: str) -> None:
    """One block for people to stderr; where it cannot be written, the exit status still says it."""
    try:
        sys.stderr.write(f"{text}\n")
    except BrokenPipeError:
        raise
    except OSError:
        return


def note(row: dict[str, Any]) -> None:
    """One note to stderr, with its command."""
    from ckptool.render.text import LONG, show

    summary(f"note: {show(row['text'], LONG)}")
    if row["command"]:
        summary(f"  {show(row['command'], LONG)}")


def error_data(error: CkptError, file: str) -> dict[str, Any]:
    """JSON schema 1 of an error."""
    return {
        "schema": 1,
        "file": masked(error.path or file),
        "error": {
            "slug": error.slug,
            "text": error.text,
            "where": error.where(),
            "hint": error.hint,
        },
    }


def report_error(error: CkptError, file: str, flags: dict[str, Any]) -> None:
    """The error line and its hint; with --debug the traceback before them."""
    from ckptool.render.errors import error_lines

    if flags.get("debug"):
        trace(error)
    data = error_data(error, file)
    text = error_lines({"file": data["file"], **data["error"]})
    if colours(flags.get("color", "auto"), sys.stderr):
        text = text.replace("ckptool:", "\x1b[31mckptool:\x1b[0m", 1)
    summary(text)


def trace(error: BaseException) -> None:
    """The traceback to stderr; names from a file may stand in it."""
    from traceback import format_exception

    from ckptool.escapes import escape

    for line in "".join(format_exception(error)).split("\n"):
        summary(escape(line))


def colours(wanted: str, stream: Any) -> bool:
    """Whether to colour: as asked, else by NO_COLOR, FORCE_COLOR and the terminal."""
    if wanted != "auto":
        return wanted == "always"
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()
