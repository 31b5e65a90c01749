"""`ckptool verify`.

Knows: flags, the progress bar. Must not know: formats.
"""

from __future__ import annotations

import sys
from time import monotonic
from typing import Any

import click

from ckptool.cli.many import Look, Seen, are_many, look_at_many, tidy
from ckptool.cli.options import Command, options
from ckptool.cli.output import colours, echo, error_data, report_error, summary, trace
from ckptool.errors import CkptError, UsageError
from ckptool.render.verify import verify_text
from ckptool.verbs.stats_crew import hand_count
from ckptool.verbs.verify import verify_place


@click.command(
    "verify",
    cls=Command,
    examples=(
        "ckptool verify download.pth                           # is all of it there, and right?",
        "ckptool verify --finite *.pth                         # and no NaN in it?",
        "ckptool verify model-folder -q || echo damaged",
        "ckptool verify -r checkpoints --format jsonl          # a line for each file below",
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("files", nargs=-1, metavar="FILE…", type=click.Path())
@options("finite", "format_many", "recursive", "files_from")
@click.pass_context
def command(ctx: click.Context, /, files: tuple[str, ...], **flags: Any) -> None:
    """Check that files are whole: structure, sizes, every recorded checksum; and say what
    torch.load would make of them.

    Exit status 0: whole; 1: wrong bytes, or something that could run code; 2: a file that cannot
    be read as a whole, after saying which tensors are whole.
    """
    style = "json" if flags["as_json"] else flags["format_"]
    if are_many(files, flags):
        ctx.exit(look_at_many(files, flags, style, _looking(flags["finite"]), hand_count()))
    if style not in ("table", "json", "jsonl"):
        raise UsageError(f"--format {style} is for many files", hint="give -r or --files-from")
    data = style != "table"
    status, reports = 0, []
    for number, file in enumerate(files):
        if number:
            tidy(number)
        try:
            with _Bar(flags["quiet"]) as bar:
                found = verify_place(file, flags["finite"], progress=bar.show)
        except CkptError as error:
            status = max(status, error.exit_status)
            reports.append(error_data(error, file))
            if not data:
                report_error(error, file, flags)
            elif flags["debug"]:
                trace(error)
            continue
        status = max(status, found.exit_status)
        reports.append(found.to_dict())
        if not data:
            _print(reports[-1], flags, first=not number)
    if data:
        _print_data(reports, style)
    elif len(files) > 1 and not flags["quiet"]:
        summary(_counted(reports))
    ctx.exit(status)


def _print(report: dict[str, Any], flags: dict[str, Any], first: bool) -> None:
    text = verify_text(report, flags["quiet"])
    if not text:
        return
    if not first and not flags["quiet"]:
        echo("")
    if colours(flags["color"], sys.stdout):
        code = "31" if report["exit_status"] else "32"
        word = "whole" if report["whole"] else "damaged"
        text = text.replace(f": {word}", f": \x1b[{code}m{word}\x1b[0m", 1)
    echo(text)


def _looking(finite: bool) -> Look:
    def look(file: str) -> Seen:
        found = verify_place(file, finite)
        return Seen(found.exit_status, found.to_dict())

    return look


def _print_data(reports: list[dict[str, Any]], style: str) -> None:
    from ckptool.render.structured import json_text, jsonl_text

    if style == "jsonl":
        for report in reports:
            echo(jsonl_text(report))
    elif len(reports) == 1:
        echo(json_text(reports[0]))
    else:
        echo("[" + ",\n".join(map(json_text, reports)) + "]")


def _counted(reports: list[dict[str, Any]]) -> str:
    """One line over several files."""
    good = sum(report.get("exit_status") == 0 for report in reports)
    return f"{good:,} of {len(reports):,} files are whole and run nothing"


class _Bar:
    """click's progress bar on stderr, after one second, only on a terminal."""

    def __init__(self, quiet: bool) -> None:
        self._started = monotonic()
        self._shown = not quiet and sys.stderr.isatty()
        self._bar: Any = None
        self._done = 0

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.render_finish()

    def show(self, done: int, total: int) -> None:
        """Called with bytes; numbers are counted after checksums, from the start again."""
        if not self._shown or monotonic() - self._started < 1:
            return
        if self._bar is None or done < self._done:
            self.__exit__()
            self._bar, self._done = (
                click.progressbar(length=total, file=sys.stderr, label="checking"),
                0,
            )
        self._bar.update(done - self._done)
        self._done = done
