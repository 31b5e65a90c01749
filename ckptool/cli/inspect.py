"""`ckptool inspect`.

Knows: flags and screens. Must not know: formats.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from ckptool.cli.many import Seen, are_many, look_at_many, tidy
from ckptool.cli.options import Command, model_arguments, options
from ckptool.cli.output import echo, error_data, note, report_error, summary, trace
from ckptool.cli.progress import Bar
from ckptool.errors import CkptError, UsageError
from ckptool.formats.collector import paused
from ckptool.verbs.inspect import Selection, inspect_place, summarise_place
from ckptool.verbs.report import Inspection

if TYPE_CHECKING:
    from ckptool.verbs.fitting import Asked
    from ckptool.verbs.stats_plan import Wish

_TEXT = ("table", "tree")  # these print their notes themselves


@click.command(
    "inspect",
    cls=Command,
    examples=(
        "ckptool inspect net.pth",
        "ckptool inspect net.pth --model net.py:ResNet --model-arg num_classes=10",
        "ckptool inspect net.pth --stats --only 'fc.*'",
        "ckptool inspect a.pth b.safetensors --json",
        "ckptool inspect -r checkpoints --format jsonl",
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("files", nargs=-1, metavar="FILE…", type=click.Path())
@options(
    "model",
    "model_arg",
    "against",
    "at",
    "only",
    "drop",
    "sort",
    "limit",
    "index",
    "stats",
    "hash",
    "format",
    "keys",
    "recursive",
    "files_from",
)
@click.pass_context
def command(ctx: click.Context, /, files: tuple[str, ...], **flags: Any) -> None:
    """Show what is in checkpoints: no code of theirs is run, no tensor is read unless --stats or
    --hash ask for it.
    """
    style = "json" if flags["as_json"] else flags["format_"]
    selection = Selection(
        flags["at"], flags["only"], flags["drop"], flags["sort"], flags["limit"], flags["index"]
    )
    if flags["keys"] and style not in ("table", "plain"):
        raise UsageError("--keys contradicts --format")
    _refuse_unshown(flags, style)
    asked = _asked(flags)
    if are_many(files, flags):
        ctx.exit(_look_at_many(files, flags, style, selection, asked))
    status, reports = 0, []
    for i, file in enumerate(files):
        if i:
            tidy(i)
        try:
            limited = _limited(selection, style, flags["keys"])
            with Bar("reading") as bar:
                wish = _wish(flags, bar)
                found = inspect_place(file, limited, asked=asked, wish=wish)
        except CkptError as error:
            status = max(status, error.exit_status)
            reports.append(error_data(error, file))
            if style not in ("json", "jsonl"):
                report_error(error, file, flags)
            elif flags["debug"]:
                trace(error)
            continue
        status = max(status, _status(found))
        reports.append(found.to_dict())
        found = _without_records(found, flags["keys"])
        if style not in ("json", "jsonl"):
            if i and style in _TEXT:
                echo("")
            _print(found, reports.pop(), style, flags)
    if style in ("json", "jsonl"):
        _print_data(reports, style, len(files))
    ctx.exit(status)


def _without_records(found: Inspection, keys: bool) -> Inspection:
    """What is printed beside the report: a hundred thousand records would only take memory."""
    bare = found.checkpoint._replace(tables=(), tensors=(), storages=(), weights=None)
    return replace(found, checkpoint=bare, shown=None, rows=found.rows if keys else ())


def _look_at_many(
    files: tuple[str, ...], flags: dict[str, Any], style: str, selection: Selection,
    asked: Asked | None,
) -> int:  # fmt: skip
    """One row a file. Raises UsageError for what one row does not show."""
    if flags["keys"] or flags["index"]:
        raise UsageError("--keys and --index show one file", hint="leave out -r and --files-from")
    measured = flags["stats"] or flags["hash"]
    if measured and style not in ("json", "jsonl"):
        raise UsageError("a row a file does not show numbers", hint="take --format jsonl")

    from ckptool.formats.alike import Alike

    alike = Alike()

    def look(file: str) -> Seen:
        if asked is None and style not in ("json", "jsonl"):  # a row needs no more
            found = summarise_place(file, flags["at"], alike=alike)
            return Seen(int(found["could_run_code"]), found)
        wish = _wish(flags, None)
        whole = inspect_place(file, selection, asked=asked, wish=wish, alike=alike)
        return Seen(_status(whole), whole.to_dict())

    return look_at_many(files, flags, style, look)


def _status(found: Inspection) -> int:
    unfit = found.fit is not None and not found.fit.fits
    return int(found.could_run_code or unfit)


def _refuse_unshown(flags: dict[str, Any], style: str) -> None:
    """What is read would not be shown. Raises UsageError."""
    for name in ("stats", "hash"):
        if flags[name] and (flags["keys"] or style == "tree"):
            other = "--keys" if flags["keys"] else "--format tree"
            raise UsageError(f"{other} does not show what --{name} reads", hint="leave one out")


def _wish(flags: dict[str, Any], bar: Bar | None) -> Wish | None:
    """What to tell of the numbers; None where nothing is asked of them."""
    if not (flags["stats"] or flags["hash"]):
        return None
    from ckptool.verbs.stats_plan import Wish

    return Wish(flags["stats"], flags["hash"], None if flags["quiet"] or bar is None else bar.show)


def _asked(flags: dict[str, Any]) -> Asked | None:
    """The model or file to compare with, asked for once for all files."""
    if not (flags["model"] or flags["against"] or flags["model_arg"]):
        return None
    from ckptool.verbs.fitting import ask

    return ask(flags["model"], dict(model_arguments(flags["model_arg"])), flags["against"])


def _limited(selection: Selection, style: str, keys: bool) -> Selection:
    """On a terminal a long table is cut; piped, all of it is printed."""
    if selection.limit is not None or style != "table" or keys or not sys.stdout.isatty():
        return selection
    return Selection(
        selection.at, selection.only, selection.drop, selection.sort, -1, selection.index
    )


@paused()
def _print(found: Inspection, report: dict[str, Any], style: str, flags: dict[str, Any]) -> None:
    from ckptool.render import render

    if flags["keys"]:
        from ckptool.escapes import escape

        for tensor in found.rows:
            echo(escape(tensor.key))
        return
    notes = report["notes"]
    if flags["quiet"]:
        report["notes"] = []
    fitted = found.fit is not None and style in _TEXT
    text = render(style, {**report, "notes": []} if fitted else report)
    if fitted:  # with the notes
        from ckptool.render.fit import fit_text

        fit = fit_text(report)
        text = f"{text}\n\n{fit}" if flags["index"] or style == "tree" or found.measured else fit
    if text:
        echo(text)
    if style not in _TEXT and not flags["quiet"]:
        for row in notes:
            note(row)
    if flags["verbose"]:
        _print_globals(found, echo if style in _TEXT else summary)


def _print_globals(found: Inspection, say: Callable[[str], None]) -> None:
    from ckptool.render.text import show

    names = found.checkpoint.globals
    for row in names[:200]:
        say(f"  {row.verdict:8} {show(row.name)}")
    if len(names) > 200:
        say(f"  and {len(names) - 200:,} more names")


@paused()
def _print_data(reports: list[dict[str, Any]], style: str, count: int) -> None:
    from ckptool.render.structured import json_text, jsonl_text

    if style == "jsonl":
        for report in reports:
            echo(jsonl_text(report))
    elif count == 1:
        echo(json_text(reports[0]))
    else:
        echo("[" + ",\n".join(json_text(report) for report in reports) + "]")
