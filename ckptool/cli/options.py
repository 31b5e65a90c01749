"""Every flag of every command, in one table, and the command class that groups them in help.

Knows: click. Must not know: checkpoints.
A new flag is one row; a command names the rows it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ckptool.errors import UsageError

ORDER = "ckptool.order"
"""Key in `ctx.meta`: (name, value) of each option in the order of the command line."""


_LAST = "Other"


class HeadedOption(click.Option):
    """An option that stands under a heading of the help."""

    def __init__(self, *args: Any, heading: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading


class Command(click.Command):
    """A command whose help opens with examples and groups its options under headings, and
    which remembers the order of options (click keeps it only within one option).
    """

    def __init__(self, *args: Any, examples: tuple[str, ...] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, and note the order."""
        if args:
            values, _, order = self.make_parser(ctx).parse_args(args=list(args))
            taken: dict[str, int] = {}
            rows = []
            for param in order:
                name = param.name or ""
                value = values.get(name)
                if getattr(param, "multiple", False) and isinstance(value, list | tuple):
                    value = value[taken.get(name, 0)]
                taken[name] = taken.get(name, 0) + 1
                rows.append((name, value))
            ctx.meta[ORDER] = rows
        return super().parse_args(ctx, args)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Two or three examples first: most readers need no more."""
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in self.examples))
        super().format_help_text(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One section a heading, in the order in which they first appear."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and not isinstance(param, click.Argument):
                heading = getattr(param, "heading", _LAST)
                sections.setdefault(heading, []).append(record)
        for heading, records in sorted(sections.items(), key=lambda row: row[0] == _LAST):
            with formatter.section(heading):
                formatter.write_dl(records)


# name -> (declarations, heading, help, click's own words)
_TABLE: dict[str, tuple[tuple[str, ...], str, str, dict[str, Any]]] = {
    "to_cpu": (("--to-cpu",), "Device", "every storage to cpu; a leading 'module.' on all keys goes too", {"is_flag": True}),
    "to_gpu": (("--to-gpu",), "Device", "weights and optimizer state to cuda:N; counters and random states stay", {"type": click.IntRange(min=0), "metavar": "N"}),
    "map_location": (("--map-location",), "Device", "change exactly the tag FROM to TO (repeatable)", {"nargs": 2, "multiple": True, "metavar": "FROM TO"}),
    "strip_module": (("--strip-module",), "Names", "remove 'module.' wherever it leads", {"is_flag": True}),
    "add_module": (("--add-module",), "Names", "put 'module.' before every key, for a DataParallel net", {"is_flag": True}),
    "keep_module": (("--keep-module",), "Names", "leave names alone under --to-cpu and --to-gpu", {"is_flag": True}),
    "add_module_at": (("--add-module-at",), "Names", "put 'module.' after PATH, for a net that wraps only that part (repeatable)", {"multiple": True, "metavar": "PATH"}),
    "unwrap": (("--unwrap",), "Names", "remove the names of torch.compile, FSDP, checkpointing and DataParallel wrappers", {"is_flag": True}),
    "unwrap_at": (("--unwrap-at",), "Names", "remove the 'module' right under PATH (repeatable)", {"multiple": True, "metavar": "PATH"}),
    "strip_prefix": (("--strip-prefix",), "Names", "remove PREFIX, whole parts of a name, where it leads (repeatable)", {"multiple": True, "metavar": "PREFIX"}),
    "add_prefix": (("--add-prefix",), "Names", "put PREFIX before every key (repeatable)", {"multiple": True, "metavar": "PREFIX"}),
    "rename": (("--rename",), "Names", "replace what the regular expression OLD matches by NEW (repeatable)", {"nargs": 2, "multiple": True, "metavar": "OLD NEW"}),
    "rename_file": (("--rename-file",), "Names", "rename whole keys by a JSON object of old to new names (repeatable)", {"multiple": True, "metavar": "F.json"}),
    "fit": (("--fit",), "Fit", "find the rules that make the file fit a model, path/net.py:Net or package.module:Net", {"metavar": "SPEC"}),
    "partial": (("--partial",), "Fit", "with --fit: leave out tensors of another shape, and write what fits", {"is_flag": True}),
    "at_many": (("--at",), "Names", "only the state_dict at PATH (repeatable)", {"multiple": True, "metavar": "PATH"}),
    "select": (("--select",), "Parts", "only the state_dict at NAME comes out, bare", {"metavar": "NAME"}),
    "only_tensors": (("--only",), "Parts", "keep only tensors that match GLOB (repeatable; ** crosses dots)", {"multiple": True, "metavar": "GLOB"}),
    "drop_tensors": (("--drop",), "Parts", "leave out tensors that match GLOB (repeatable)", {"multiple": True, "metavar": "GLOB"}),
    "drop_entry": (("--drop-entry",), "Parts", "leave out a top-level entry, such as optimizer (repeatable)", {"multiple": True, "metavar": "NAME"}),
    "compact": (("--compact",), "Parts", "cut storages to what tensors use of them", {"is_flag": True}),
    "dtype": (("--dtype",), "Types", "cast floating-point tensors of state_dicts: bfloat16, float16, float32, float8_e4m3fn ...", {"metavar": "T"}),
    "keep_dtype": (("--keep-dtype",), "Types", "but not those that match GLOB (repeatable)", {"multiple": True, "metavar": "GLOB"}),
    "output": (("-o", "--output"), "Output", "where to write: .safetensors by its suffix, a folder is shards; --to-cpu alone writes NAME.cpu.pth beside the input", {"metavar": "OUT"}),
    "to": (("--to",), "Output", "the container, whatever OUT is called", {"type": click.Choice(("zip", "legacy", "safetensors", "shards", "dcp"))}),
    "max_shard_size": (("--max-shard-size",), "Output", "write .safetensors shards of at most SIZE into the folder OUT", {"metavar": "SIZE"}),
    "extras": (("--extras",), "Output", "write what .safetensors cannot hold (epoch, args) to F.json", {"metavar": "F.json"}),
    "tied": (("--tied",), "Output", "two names of one tensor in .safetensors", {"type": click.Choice(("alias", "duplicate", "error")), "default": "alias", "show_default": True}),
    "keep_object": (("--keep-object",), "Output", "keep a whole pickled model an object, retagged", {"is_flag": True}),
    "in_place": (("--in-place",), "Output", "change names and devices in FILE itself, in milliseconds", {"is_flag": True}),
    "undo": (("--undo",), "Output", "take the last --in-place back, to the byte", {"is_flag": True}),
    "force": (("-f", "--force"), "Output", "overwrite OUT when it exists", {"is_flag": True}),
    "dry_run": (("-n", "--dry-run"), "Output", "say what would change, write nothing", {"is_flag": True}),
    "recover": (("--recover",), "Safety", "give FILE back after an --in-place that was killed", {"is_flag": True}),
    "keep_unknown": (("--keep-unknown",), "Safety", "copy calls that could run code as they are", {"is_flag": True}),
    "salvage": (("--salvage",), "Safety", "write what is whole of a damaged FILE, and list the rest (exit status 1 when there is one)", {"is_flag": True}),
    "no_check": (("--no-check",), "Safety", "do not compare recorded checksums while copying", {"is_flag": True}),
    "no_fsync": (("--no-fsync",), "Safety", "do not wait until the disk has everything", {"is_flag": True}),
    "jobs": (("--jobs",), "Workers", "write with N threads", {"type": click.IntRange(min=1), "default": 1, "show_default": True, "metavar": "N"}),
    "engine": (("--engine",), "Workers", "let the workers of a Dask scheduler write: dask=tcp://HOST:PORT", {"metavar": "ENGINE"}),
    "resume": (("--resume",), "Workers", "go on from a run that was killed; keep what is done when this one fails", {"is_flag": True}),
    "recursive": (("-r", "--recursive"), "Files", "go through folders: one row a file, by its suffix; shards once, by their index", {"is_flag": True}),
    "files_from": (("--files-from",), "Files", "take the names of files from LIST, one a line or NUL between them; - is stdin", {"metavar": "LIST"}),
    "model": (("--model",), "Fit", "does it fit this model? path/net.py:Net or package.module:Net, built without its numbers", {"metavar": "SPEC"}),
    "model_arg": (("--model-arg",), "Fit", "NAME=VALUE the model is called with, a Python literal (repeatable)", {"multiple": True, "metavar": "NAME=VALUE"}),
    "against": (("--against",), "Fit", "does it fit what this file has? A checkpoint, or JSON of keys", {"metavar": "FILE"}),
    "stats": (("--stats",), "Numbers", "read the tensors shown: min, max, mean, std, norm, zeros, NaN, infinities", {"is_flag": True}),
    "hash": (("--hash",), "Numbers", "SHA-256 of the bytes of each tensor shown, as if it were contiguous", {"is_flag": True}),
    "finite": (("--finite",), "Numbers", "count NaN and infinities in every floating tensor", {"is_flag": True}),
    "strict": (("--strict",), "Compare", "names, devices and order count as differences", {"is_flag": True}),
    "values": (("--values",), "Compare", "measure how far the numbers are apart: max |d|, cosine, L2, NaN", {"is_flag": True}),
    "bytes": (("--bytes",), "Compare", "read all bytes, whatever recorded checksums say", {"is_flag": True}),
    "atol": (("--atol",), "Compare", "numbers this close are the same: |a - b| <= ATOL + RTOL * |b| (implies --values)", {"type": float, "metavar": "ATOL"}),
    "rtol": (("--rtol",), "Compare", "the same, relative to b", {"type": float, "metavar": "RTOL"}),
    "at": (("--at",), "Rows", "show the state_dict at PATH ('.' is the root)", {"metavar": "PATH"}),
    "only": (("--only",), "Rows", "only keys that match GLOB (repeatable; ** crosses dots)", {"multiple": True, "metavar": "GLOB"}),
    "drop": (("--drop",), "Rows", "leave out keys that match GLOB (repeatable)", {"multiple": True, "metavar": "GLOB"}),
    "sort": (("--sort",), "Rows", "order of the rows", {"type": click.Choice(("order", "name", "size")), "default": "order", "show_default": True}),
    "limit": (("--limit",), "Rows", "at most N rows", {"type": click.IntRange(min=0), "metavar": "N"}),
    "index": (("--index",), "Rows", "number parameters as list(net.parameters()) does", {"is_flag": True}),
    "format": (("--format", "format_"), "Format", "how to print", {"type": click.Choice(("table", "tree", "plain", "json", "jsonl", "csv", "markdown")), "default": "table", "show_default": True}),
    "format_many": (("--format", "format_"), "Format", "how to print; the last four with -r, --files-from or a pattern", {"type": click.Choice(("table", "json", "jsonl", "plain", "csv", "markdown")), "default": "table", "show_default": True}),
    "keys": (("--keys",), "Format", "print the keys alone, one a line", {"is_flag": True}),
    "json": (("--json", "as_json"), "Format", "print JSON (schema 1)", {"is_flag": True}),
    "quiet": (("-q", "--quiet"), "Other", "no notes, no summary", {"is_flag": True}),
    "verbose": (("-v", "--verbose"), "Other", "say more", {"is_flag": True}),
    "color": (("--color",), "Other", "when to colour", {"type": click.Choice(("auto", "always", "never")), "default": "auto", "show_default": True}),
    "debug": (("--debug",), "Other", "show a traceback on errors", {"is_flag": True}),
}  # fmt: skip
COMMON = ("json", "quiet", "verbose", "color", "debug")


def options(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add these rows of the table, then those every command takes."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed((*names, *COMMON)):
            declarations, heading, help_text, words = _TABLE[name]
            function = click.option(
                *declarations, cls=HeadedOption, heading=heading, help=help_text, **words
            )(function)
        return function

    return decorate


def ordered(ctx: click.Context) -> list[tuple[str, Any]]:
    """(name, value) of every option as it stood on the line."""
    rows: list[tuple[str, Any]] = ctx.meta.get(ORDER, [])
    return rows


def model_arguments(texts: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """(name, value) of each `--model-arg NAME=VALUE`. Raises UsageError."""
    pairs = [text.partition("=") for text in texts]
    for text, (name, sign, _) in zip(texts, pairs, strict=True):
        if not sign or not name.strip().isidentifier():
            raise UsageError(
                f"--model-arg is NAME=VALUE, not '{text}'", hint="as in num_classes=10"
            )
    return tuple((name.strip(), value) for name, _, value in pairs)
