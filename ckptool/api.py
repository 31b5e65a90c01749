"""The Python API: what the command line does, as functions with typed results.

Knows: verbs. Must not know: click; nothing here prints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckptool.api_tensors import TensorRecord, Weights
from ckptool.checkpoint import Checkpoint, Extra, Table
from ckptool.errors import CkptError, UsageError
from ckptool.keynames import Rule
from ckptool.limits import DEFAULT, Limits
from ckptool.places import PlaceLike, Source
from ckptool.render import render
from ckptool.verbs import conversion as _converting
from ckptool.verbs import devices as _looking
from ckptool.verbs import report as _reporting
from ckptool.verbs.convert import build_request, convert_place
from ckptool.verbs.inspect import Selection, describe, inspect_place, measuring
from ckptool.verbs.reading import Opened, opened
from ckptool.verbs.tables import choose_table

if TYPE_CHECKING:
    from ckptool.verbs.stats_plan import Wish

PathLike = str | os.PathLike[str]
Names = str | Sequence[str]
"""One name or glob, or several."""


@dataclass(frozen=True, slots=True)
class Inspection(_reporting.Inspection):
    """What `inspect` found; as text it is what the command prints."""

    def __str__(self) -> str:
        if self.fit is None:
            return render("table", self.to_dict())
        from ckptool.render.fit import fit_text

        report = self.to_dict()
        fit = fit_text(report)
        if self.measured is None:
            return fit
        return f"{render('table', {**report, 'notes': []})}\n\n{fit}"

    def _repr_html_(self) -> str:
        return render("html", self.to_dict())


@dataclass(frozen=True, slots=True)
class Conversion(_converting.Conversion):
    """What `convert` did; as text it is what the command prints."""

    def __str__(self) -> str:
        from ckptool.render.convert import convert_text

        return convert_text(self.to_dict())

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"


@dataclass(frozen=True, slots=True)
class Devices(_looking.Devices):
    """What `devices` saw; as text it is what the command prints."""

    def __str__(self) -> str:
        from ckptool.render.devices import devices_text

        return devices_text(self.to_dict())

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"


def _fields(result: Any) -> dict[str, Any]:
    """What a verb returned, for the same record with a look."""
    return {row.name: getattr(result, row.name) for row in fields(result)}


class OpenCheckpoint:
    """An open file, read without its tensors; a context manager."""

    def __init__(self, source: Source | None, checkpoint: Checkpoint, files: ExitStack) -> None:
        self._source = source
        self._checkpoint = checkpoint
        self._files = files

    @property
    def format(self) -> str:
        """The container: `torch-zip`, `torch-legacy`, `safetensors` …"""
        return self._checkpoint.format

    @property
    def tables(self) -> tuple[Table, ...]:
        """Every state_dict found."""
        return self._checkpoint.tables

    @property
    def extras(self) -> tuple[Extra, ...]:
        """The values beside the weights: epoch, optimizer, args."""
        return self._checkpoint.extras

    @property
    def weights(self) -> Weights:
        """The state_dict shown by default."""
        return self.at(None)

    def at(self, path: str | None) -> Weights:
        """The state_dict at a dotted path. Raises UsageError when there is none."""
        return Weights(self._checkpoint, choose_table(self._checkpoint, path), self._source)

    def inspect(self, *, stats: bool = False, hash: bool = False, **selection: Any) -> Inspection:  # noqa: A002
        """The same report as `ckptool.inspect`."""
        here = Opened(self._checkpoint, self._source)
        measure = measuring(here, _wish(stats, hash, None), DEFAULT)
        return Inspection(
            **_fields(describe(here.checkpoint, Selection(**selection), None, measure))
        )

    def close(self) -> None:
        """Close the file."""
        self._files.close()

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        checkpoint = self._checkpoint
        return f"<{checkpoint.format} {checkpoint.file!r}, {len(checkpoint.tensors)} tensors>"


def open(place: PlaceLike, *, limits: Limits = DEFAULT) -> OpenCheckpoint:  # noqa: A001 - the API's word
    """Open a path or a binary file object. Raises CkptError, naming the file."""
    with ExitStack() as stack:
        found = stack.enter_context(opened(place, limits, numbers=True))
        return OpenCheckpoint(found.source, found.checkpoint, stack.pop_all())


def inspect(
    place: PlaceLike,
    *,
    at: str | None = None,
    only: Sequence[str] = (),
    drop: Sequence[str] = (),
    sort: str = "order",
    limit: int | None = None,
    index: bool = False,
    model: Any = None,
    model_args: Mapping[str, str] | None = None,
    against: PathLike | None = None,
    stats: bool = False,
    hash: bool = False,  # noqa: A002 - the command line's word
    progress: Callable[[int, int], None] | None = None,
    limits: Limits = DEFAULT,
) -> Inspection:
    """What is in a file: tables, values, wrappers, notes. Raises CkptError.

    `stats` reads the tensors shown for their range, mean, spread, zeros and NaN, `hash` for the
    SHA-256 of their bytes; `progress` is called with (bytes done, bytes in all). `model` is a torch.nn.Module or the name of one ("net.py:Net", called with `model_args`),
    `against` another file: then `.fit` says whether the file fits it, and `.match` how.
    """
    asked = None
    if model is not None or against is not None or model_args:
        from ckptool.verbs.fitting import ask

        other = None if against is None else os.fspath(against)
        asked = ask(model, model_args, other, limits)
    selection = Selection(at, only, drop, sort, limit, index)
    found = inspect_place(place, selection, limits, asked, _wish(stats, hash, progress))
    return Inspection(**_fields(found))


def _wish(stats: bool, hashed: bool, progress: Callable[[int, int], None] | None) -> Wish | None:
    if not (stats or hashed):
        return None
    from ckptool.verbs.stats_plan import Wish

    return Wish(stats, hashed, progress)


def convert(
    path: PathLike,
    output: PathLike | None = None,
    *,
    to_cpu: bool = False,
    to_gpu: int | None = None,
    map_location: Mapping[str, str] | None = None,
    strip_module: bool = False,
    add_module: bool = False,
    keep_module: bool = False,
    add_module_at: Sequence[str] = (),
    unwrap: bool = False,
    unwrap_at: Sequence[str] = (),
    strip_prefix: Names = (),
    add_prefix: Names = (),
    rename: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    rename_keys: Mapping[str, str] | None = None,
    at: Names = (),
    select: str | None = None,
    only: Names = (),
    drop: Names = (),
    drop_entry: Names = (),
    compact: bool = False,
    dtype: Any = None,
    keep_dtype: Names = (),
    to: str | None = None,
    max_shard_size: str | int | None = None,
    extras: PathLike | None = None,
    tied: str = "alias",
    keep_object: bool = False,
    in_place: bool = False,
    fit: Any = None,
    model_args: Mapping[str, str] | None = None,
    partial: bool = False,
    salvage: bool = False,
    keep_unknown: bool = False,
    check: bool = True,
    fsync: bool = True,
    force: bool = False,
    dry_run: bool = False,
    rules: Sequence[Sequence[str]] | None = None,
    jobs: int = 1,
    engine: Any = None,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
    limits: Limits = DEFAULT,
) -> Conversion:
    """Write a checkpoint with other devices, names, parts, types or container; what is not asked
    for is kept to the byte.

    The options are those of the command line; `dtype` also takes a torch.dtype, `rename` are
    (regular expression, new text), `rename_keys` whole keys {old: new}, `progress` is called
    with (bytes done, bytes in all); `fit` is a torch.nn.Module or the name of one. Key rules run in the order strip_module, unwrap,
    unwrap_at, strip_prefix, rename, rename_keys, only, drop, add_prefix, add_module_at,
    add_module; `rules` gives them in an order of its own instead:
    [("drop", "fc.*"), ("rename", "^net", "model")].
    `jobs` threads write at one time, or the workers of `engine`: any concurrent.futures.Executor
    (one of processes, mpi4py's, Dask's), or "dask=tcp://HOST:PORT"; `resume` goes on from a run that
    was killed, and keeps what is done of one that fails. Into a bucket they share out shards alone.
    Without `output`, to_cpu writes `net.cpu.pth` and to_gpu=1 `net.cuda1.pth` beside the input.
    Raises CkptError; then nothing was written.
    """
    renames = rename.items() if isinstance(rename, Mapping) else rename
    keys = tuple((rename_keys or {}).items())
    found = [
        *([Rule("strip-module")] if strip_module else []),
        *([Rule("unwrap")] if unwrap else []),
        *(Rule("unwrap-at", name) for name in _words(unwrap_at)),
        *(Rule("strip-prefix", name) for name in _words(strip_prefix)),
        *(Rule("rename", old, new) for old, new in renames),
        *([Rule("rename-file", "rename_keys", pairs=keys)] if keys else []),
        *(Rule("only", glob) for glob in _words(only)),
        *(Rule("drop", glob) for glob in _words(drop)),
        *(Rule("add-prefix", name) for name in _words(add_prefix)),
        *(Rule("add-module-at", name) for name in _words(add_module_at)),
        *([Rule("add-module")] if add_module else []),
    ]
    if rules is not None:
        if found:
            raise UsageError("give key rules by their options or by rules=, not both")
        found = [_rule(*row) for row in rules]
    request = build_request(
        to_cpu=to_cpu, to_gpu=to_gpu, mapped=tuple((map_location or {}).items()),
        rules=tuple(found), keep_module=keep_module, at=_words(at), keep_unknown=keep_unknown,
        check=check, fsync=fsync, force=force, dry_run=dry_run, select=select,
        entries=_words(drop_entry), compact=compact, dtype=None if dtype is None else str(dtype),
        keep_dtype=_words(keep_dtype), to=to, max_shard_size=max_shard_size,
        extras=None if extras is None else os.fspath(extras), tied=tied, keep_object=keep_object,
        in_place=in_place, fit=fit, model_arguments=tuple((model_args or {}).items()),
        partial=partial, salvage=salvage, jobs=jobs, engine=engine, resume=resume,
    )  # fmt: skip
    target = None if output is None else os.fspath(output)
    if in_place:
        from ckptool.verbs.appending import convert_in_place

        return Conversion(**_fields(convert_in_place(os.fspath(path), target, request, limits)))
    done = convert_place(os.fspath(path), target, request, limits, progress)
    return Conversion(**_fields(done))


def _rule(name: str, argument: str | None = None, to: str | None = None) -> Rule:
    return Rule(name, argument, to)


def _words(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def undo(path: PathLike, *, fsync: bool = True, limits: Limits = DEFAULT) -> tuple[int, int]:
    """Take the last in-place edit of a file back, to the byte: sizes before and after."""
    from ckptool.verbs.inplace import undo as restore

    return restore(os.fspath(path), limits, fsync=fsync)


def recover(path: PathLike, *, fsync: bool = True, limits: Limits = DEFAULT) -> tuple[int, int]:
    """Give a file back after an in-place edit that was killed: sizes before and after."""
    from ckptool.verbs.inplace import recover as restore

    return restore(os.fspath(path), limits, fsync=fsync)


def devices(file: PlaceLike | None = None, *, limits: Limits = DEFAULT) -> Devices:
    """What CUDA makes visible here and, with a file, whether that fits. Raises CkptError."""
    return Devices(**_fields(_looking.devices_here(file, limits)))


__all__ = [
    "CkptError", "Conversion", "Devices", "Inspection", "OpenCheckpoint", "TensorRecord", "Weights",
    "convert", "devices", "inspect", "open", "recover", "undo",
]  # fmt: skip
