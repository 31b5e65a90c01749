"""`ckptool convert`.

Knows: flags, the progress bar. Must not know: formats.
"""

from __future__ import annotations

import sys
from time import monotonic
from typing import Any

import click

from ckptool.cli.options import Command, options, ordered
from ckptool.cli.output import echo, summary
from ckptool.render.convert import convert_text
from ckptool.rules import Rule
from ckptool.verbs.convert import Conversion, build_request, convert_place

_RULES = {
    "strip_module": False,
    "add_module": False,
    "unwrap": False,
    "add_module_at": True,
    "unwrap_at": True,
}
_FLAGS = ("to_cpu", "to_gpu", "map_location", "strip_module", "add_module", "keep_module",
          "add_module_at", "unwrap", "unwrap_at", "at_many", "output", "force", "dry_run",
          "keep_unknown", "no_check", "no_fsync")  # fmt: skip


@click.command(
    "convert",
    cls=Command,
    examples=(
        "ckptool convert net.pth --to-cpu                      # net.cpu.pth",
        "ckptool convert net.cpu.pth --to-gpu 1 --add-module -o back.pth",
        "ckptool convert net.pth --unwrap -o plain.pth",
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("file", metavar="FILE", type=click.Path())
@options(*_FLAGS)
@click.pass_context
def command(ctx: click.Context, /, file: str, **flags: Any) -> None:
    """Write the same checkpoint for another device or with other names.

    Optimizer, epoch, args and everything else are kept to the byte; no tensor is held in
    memory, no code of the file is run.
    """
    request = build_request(
        to_cpu=flags["to_cpu"], to_gpu=flags["to_gpu"], mapped=tuple(flags["map_location"]),
        rules=tuple(_rules(ctx)), keep_module=flags["keep_module"], at=tuple(flags["at"]),
        keep_unknown=flags["keep_unknown"], check=not flags["no_check"],
        fsync=not flags["no_fsync"], force=flags["force"], dry_run=flags["dry_run"],
    )  # fmt: skip
    with _Bar() as bar:
        done = convert_place(file, flags["output"], request, progress=bar.show)
    _print(done, flags)


def _rules(ctx: click.Context) -> list[Rule]:
    """The key rules in the order of the command line, across options."""
    rows = [(name, value) for name, value in ordered(ctx) if name in _RULES]
    return [Rule(name.replace("_", "-"), value if _RULES[name] else None) for name, value in rows]


def _print(done: Conversion, flags: dict[str, Any]) -> None:
    if flags["as_json"]:
        from ckptool.render.structured import json_text

        echo(json_text(done.to_dict()))
    elif done.dry_run:
        echo(convert_text(done.to_dict()))
    elif not flags["quiet"]:
        summary(convert_text(done.to_dict()))


class _Bar:
    """click's progress bar on stderr, after one second, only on a terminal."""

    def __init__(self) -> None:
        self._started = monotonic()
        self._stream = sys.stderr
        self._bar: Any = None
        self._done = 0

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.render_finish()

    def show(self, done: int, total: int) -> None:
        """Called by the writer with bytes."""
        if monotonic() - self._started < 1 or not self._stream.isatty():
            return
        if self._bar is None:
            self._bar = click.progressbar(length=total, file=self._stream, label="writing")
        self._bar.update(done - self._done)
        self._done = done
