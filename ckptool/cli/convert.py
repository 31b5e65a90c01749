"""`ckptool convert`.

Knows: flags, the progress bar. Must not know: formats.
"""

from __future__ import annotations

import sys
from time import monotonic
from typing import Any

import click

from ckptool.cli.options import Command, model_arguments, options, ordered
from ckptool.cli.output import echo, summary
from ckptool.errors import UsageError
from ckptool.keynames import Rule
from ckptool.render.convert import convert_text, restored_text
from ckptool.verbs.conversion import Conversion
from ckptool.verbs.convert import build_request, convert_place

# name of the option -> name of the rule; what it takes is the rule's argument
_RULES = {
    "strip_module": "strip-module",
    "add_module": "add-module",
    "unwrap": "unwrap",
    "add_module_at": "add-module-at",
    "unwrap_at": "unwrap-at",
    "strip_prefix": "strip-prefix",
    "add_prefix": "add-prefix",
    "rename": "rename",
    "rename_file": "rename-file",
    "only": "only",
    "drop": "drop",
}
_FLAGS = ("to_cpu", "to_gpu", "map_location",
          "strip_module", "add_module", "keep_module", "add_module_at", "unwrap", "unwrap_at",
          "strip_prefix", "add_prefix", "rename", "rename_file", "at_many", "fit", "model_arg", "partial",
          "select", "only_tensors", "drop_tensors", "drop_entry", "compact", "dtype", "keep_dtype",
          "output", "to", "max_shard_size", "extras", "tied", "keep_object", "in_place", "undo",
          "force", "dry_run", "recover", "salvage", "keep_unknown", "no_check", "no_fsync",
          "jobs", "engine", "resume")  # fmt: skip


@click.command(
    "convert",
    cls=Command,
    examples=(
        "ckptool convert net.pth --to-cpu                      # net.cpu.pth",
        "ckptool convert net.pth --unwrap --drop 'fc.*' -o backbone.pth",
        "ckptool convert net.pth -o net.safetensors --dtype bfloat16",
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("file", metavar="FILE", type=click.Path())
@options(*_FLAGS)
@click.pass_context
def command(ctx: click.Context, /, file: str, **flags: Any) -> None:
    """Write a checkpoint for another device, with other names, parts, types or container.

    Optimizer, epoch, args and everything else are kept to the byte; no tensor is held in
    memory, no code of the file is run.
    """
    if flags["undo"] or flags["recover"]:
        _restore(ctx, file, flags)
        return
    request = build_request(
        to_cpu=flags["to_cpu"], to_gpu=flags["to_gpu"], mapped=tuple(flags["map_location"]),
        rules=tuple(_rules(ctx)), keep_module=flags["keep_module"], at=tuple(flags["at"]),
        keep_unknown=flags["keep_unknown"], check=not flags["no_check"],
        fsync=not flags["no_fsync"], force=flags["force"], dry_run=flags["dry_run"],
        select=flags["select"], entries=tuple(flags["drop_entry"]), compact=flags["compact"],
        dtype=flags["dtype"], keep_dtype=tuple(flags["keep_dtype"]), to=flags["to"],
        max_shard_size=flags["max_shard_size"], extras=flags["extras"], tied=flags["tied"],
        keep_object=flags["keep_object"], in_place=flags["in_place"], fit=flags["fit"],
        partial=flags["partial"], model_arguments=model_arguments(flags["model_arg"]),
        salvage=flags["salvage"], jobs=flags["jobs"], engine=flags["engine"],
        resume=flags["resume"],
    )  # fmt: skip
    if request.in_place:
        from ckptool.verbs.appending import convert_in_place

        done = convert_in_place(file, flags["output"], request)
    else:
        with _Bar() as bar:
            done = convert_place(file, flags["output"], request, progress=bar.show)
    _print(done, flags)
    if done.lost:
        ctx.exit(1)


def _rules(ctx: click.Context) -> list[Rule]:
    """The key rules in the order of the command line, across options."""
    rows = [(_RULES[name], value) for name, value in ordered(ctx) if name in _RULES]
    return [_rule(name, value) for name, value in rows]


def _rule(name: str, value: Any) -> Rule:
    if name == "rename-file":
        from ckptool.verbs.names import read_names

        return Rule(name, value, pairs=read_names(value))
    if name == "rename":
        return Rule(name, value[0], value[1])
    return Rule(name, value if isinstance(value, str) else None)


_ALONE = frozenset(
    ("undo", "recover", "no_fsync", "as_json", "quiet", "verbose", "color", "debug", "file")
)


def _restore(ctx: click.Context, file: str, flags: dict[str, Any]) -> None:
    """--undo and --recover: the former bytes."""
    from ckptool.verbs.inplace import recover, undo

    others = sorted({name for name, _ in ordered(ctx)} - _ALONE)
    if others or (flags["undo"] and flags["recover"]):
        raise UsageError("--undo and --recover give the former bytes back: each stands alone")
    restore = undo if flags["undo"] else recover
    before, after = restore(file, fsync=not flags["no_fsync"])
    data = {
        "schema": 1, "input": file, "outputs": [{"file": file, "size_bytes": after}],
        "renames": {}, "dropped": [], "devices": {}, "left_behind": [], "notes": [],
        "size_before_bytes": before,
    }  # fmt: skip
    if flags["as_json"]:
        from ckptool.render.structured import json_text

        echo(json_text(data))
    elif not flags["quiet"]:
        summary(restored_text(data))


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
