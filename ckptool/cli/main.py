"""The `ckptool` command: sub-commands imported when they are called, errors, exit status.

Knows: exit statuses (0 done, 1 no, 2 trouble, 70 our bug, 130 interrupted, 141 reader gone).
Must not know: what a command does.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

import click

from ckptool import __version__
from ckptool.cli.output import Stdout, Unwritten, summary
from ckptool.errors import CkptError, UsageError

# name -> (module, one line)
COMMANDS = {
    "inspect": ("ckptool.cli.inspect", "show what is in checkpoints, and what to do about it"),
    "diff": ("ckptool.cli.diff", "say what two checkpoints have in common and apart"),
    "convert": ("ckptool.cli.convert", "move between GPU and CPU, add or strip 'module.'"),
    "verify": ("ckptool.cli.verify", "check that files are whole, and what loading them runs"),
    "devices": (
        "ckptool.cli.devices",
        "show what CUDA makes visible, and whether a file fits on it",
    ),
}
BUG, INTERRUPTED, READER_GONE = 70, 130, 141


class _Lazy(click.Group):
    """Lists commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = import_module(COMMANDS[name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, row[1]) for name, row in COMMANDS.items()])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ckptool")
def cli() -> None:
    """Look inside, compare and convert PyTorch checkpoints without running them."""


def main(args: list[str]) -> int:
    """Run one command; every way out becomes an exit status."""
    try:
        return _main(args)
    except Unwritten as error:
        return _unwritten(error)


def _main(args: list[str]) -> int:
    try:
        result = cli.main(args=args, prog_name="ckptool", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except CkptError as error:
        return _fail(error, args)
    except click.exceptions.Exit as error:
        return error.exit_code
    except (click.Abort, KeyboardInterrupt) as error:
        said = str(error.__cause__ or error.__context__ or error)  # click's Abort says nothing
        summary(f"ckptool: interrupted; {said or 'nothing is left behind'}")
        return INTERRUPTED
    except click.ClickException as error:
        return _misused(error, args)
    except (BrokenPipeError, SystemExit):  # click makes an exit of a closed pipe
        _silence()
        return READER_GONE
    except Unwritten:
        raise
    except Exception as error:
        return _bug(error, args)


def _fail(error: CkptError, args: list[str]) -> int:
    from ckptool.cli.output import echo, error_data, report_error, trace

    if "--json" in args:
        from ckptool.render.structured import json_text

        if "--debug" in args:
            trace(error)
        echo(json_text(error_data(error, "")))
    else:
        report_error(error, "", {"color": _colour(args), "debug": "--debug" in args})
    return error.exit_status


def _colour(args: list[str]) -> str:
    """What --color says, where no command is left to ask."""
    for word, after in zip(args, [*args[1:], ""], strict=True):
        if word == "--color":
            return after
        if word.startswith("--color="):
            return word.partition("=")[2]
    return "auto"


def _misused(error: click.ClickException, args: list[str]) -> int:
    if "--json" in args:
        return _fail(UsageError(error.format_message()), args)
    with suppress(OSError):
        error.show(sys.stderr)  # in its own encoding, which click would set aside
    return error.exit_code if error.exit_code != 1 else 2


def _bug(error: Exception, args: list[str]) -> int:
    from ckptool.cli.output import trace
    from ckptool.render.text import show

    if "--debug" in args:
        trace(error)
    text = show(f"{type(error).__name__}: {error}")
    summary(
        f"ckptool: a bug in ckptool {__version__}: {text}\n"
        "  hint: run it again with --debug and report what it prints"
    )
    return BUG


def _unwritten(error: Unwritten) -> int:
    summary(f"ckptool: standard output: it cannot be written to: {error}")
    summary("  hint: give it a file, a pipe or a terminal that takes it")
    _silence()
    return 2


def _silence() -> None:
    """Keep the interpreter from complaining about the closed pipe once more."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _prepare() -> None:
    """No terminal or locale may make us fail: what it cannot show is escaped.

    Streams that whoever called us has closed are opened, or a file of ours would get their
    numbers: reading finds the end, messages go nowhere, data on stdout is an error.
    """
    for fd, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        if _closed(fd):
            os.open(os.devnull, mode)  # it gets the lowest number that is free
    out: Any = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    encoding, lines = out.encoding, out.line_buffering
    sys.stdout = Stdout(out.detach(), encoding, "backslashreplace", line_buffering=lines)
    err: Any = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
    err.reconfigure(errors="backslashreplace")
    sys.stderr = err


def _closed(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return True
    return False


def run() -> NoReturn:
    """The console script. Ends without tearing down a million nodes one by one."""
    gc.disable()
    _prepare()
    status = main(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        status = READER_GONE
    except Unwritten as error:
        status = _unwritten(error)
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(status)
