"""convert: the same checkpoint with other names, devices, types, parts or container.

Knows: which container comes out, where it goes, what is said of it. Must not know: printing,
how bytes are copied.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptool.checkpoint import Changes, Checkpoint, Note, Path
from ckptool.errors import CkptError, UsageError
from ckptool.formats import TITLES
from ckptool.formats.collector import paused
from ckptool.formats.writers import confirm, write
from ckptool.limits import DEFAULT, Limits
from ckptool.places import Source, is_url, reopen
from ckptool.plans import Literal, Output, Plan, Written
from ckptool.rules import OF_TENSORS
from ckptool.sinks import FileSink, FolderSink, Sink, check_different
from ckptool.spans import Address
from ckptool.urls import masked
from ckptool.values import RECIPES
from ckptool.verbs.conversion import Conversion
from ckptool.verbs.deciding import Decision, decide, refuse_kind
from ckptool.verbs.joined_sums import check_joined
from ckptool.verbs.leaving import extras_json, left_entries, nested_entries, result_notes
from ckptool.verbs.naming import default_output
from ckptool.verbs.opening import doubting, is_folder, url_sink
from ckptool.verbs.reading import Opened, let_go, names_index, opened
from ckptool.verbs.request import FOLDERS, NO_DEVICES, SHARD_BYTES, Request, build_request
from ckptool.verbs.sharing import with_shared
from ckptool.writing import write as run_plan

if TYPE_CHECKING:
    from ckptool.verbs.salvage import Salvaged

__all__ = ["Conversion", "Request", "build_request", "convert_place"]

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""
_EXTRAS = "extras"
_SHARDS = "hf-shards"
_FILE_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".tar", ".pkl", ".json")


def convert_place(
    path: str,
    output: str | None,
    request: Request,
    limits: Limits = DEFAULT,
    progress: Progress | None = None,
) -> Conversion:
    """Convert one file or folder. Raises CkptError; then no output and no temp file is left."""
    started = time.monotonic()
    target_path = _beside(path, request) if output is None else output

    def converted(patient: bool) -> Conversion:
        with _opened(path, target_path, request, limits, patient) as found:
            return _convert(path, target_path, request, found, limits, progress, started)

    try:
        return doubting(converted)
    except CkptError as error:
        error.path = error.path or masked(path)
        raise


def _takes_tensors(request: Request, output: str) -> bool:
    """Whether a .safetensors alone comes out: nothing of the pickle itself is written."""
    if request.extras is not None:
        return False
    if request.target is not None:
        return request.target == "safetensors"
    return not request.shard_bytes and output.lower().endswith(".safetensors")


def _opened(
    path: str, output: str, request: Request, limits: Limits, patient: bool
) -> AbstractContextManager[Opened | Salvaged]:
    """The input; with --salvage also a damaged one, without what is lost of it. Tasks cannot be
    `patient`: their reads pass elsewhere, and an object that one has sent is there.
    """
    if not request.salvage:
        keep = not _takes_tensors(request, output)
        patient = patient and not request.by_tasks
        return opened(path, limits, strict=True, patient=patient, keep=keep)
    from ckptool.verbs.salvage import salvaged

    return salvaged(path, limits)


def _convert(
    path: str, output: str, request: Request, found: Opened | Salvaged, limits: Limits,
    progress: Progress | None, started: float,
) -> Conversion:  # fmt: skip
    checkpoint = found.checkpoint
    check_different(checkpoint.sources, output)
    refuse_kind(checkpoint, request)
    fit_notes: tuple[Note, ...] = ()
    if request.fit is not None:
        from ckptool.verbs.fitting import fitted

        request, fit_notes = fitted(checkpoint, request)
    target = container_of(checkpoint, request, output)
    if request.keep_object and target in NO_DEVICES:
        raise UsageError(f"--keep-object: a {TITLES[target]} holds a state_dict, no object")
    sink = None if request.dry_run else _sink(output, target, request)
    with paused():
        checkpoint, shared_notes = with_shared(checkpoint, target)
        decision = decide(checkpoint, request, target)
        decision = decision._replace(notes=(*fit_notes, *shared_notes, *decision.notes))
        if not isinstance(found, Opened):
            decision = found.without_lost(decision, target)
        plan, made = write(checkpoint, decision.changes, target, request.shard_bytes or SHARD_BYTES)
    mentions = mentioned(checkpoint, decision.changes)
    left = left_entries(checkpoint, decision.changes, target)
    if request.extras is not None:
        nested = nested_entries(checkpoint, decision.changes, target)
        plan = _with_extras(plan, extras_json(checkpoint, left, nested))
    if isinstance(found, Opened):
        let_go(checkpoint)  # the plan has all that is written
    if request.check and sink is not None:
        check_joined(checkpoint)
    source = found.source if isinstance(found, Opened) else None
    done = _run(checkpoint, source, plan, made, target, sink, request, limits, progress)
    report = conversion(
        path, output, checkpoint, request, decision, made, target, plan, done, left, mentions,
        time.monotonic() - started,
    )  # fmt: skip
    return report if isinstance(found, Opened) else replace(report, lost=found.lost)


# -- where and what ----------------------------------------------------------------------------
def _beside(path: str, request: Request) -> str:
    if not request.changes_something and request.target is None:
        text = "nothing to do: no device, no key rule and no output is given"
        raise UsageError(text, hint="--to-cpu is the usual one")
    if request.device is None and request.dry_run:
        return f"OUT{os.path.splitext(path)[1]}"
    if request.device is None:
        raise UsageError("no output is named", hint="give one with -o OUT")
    if is_folder(path) or names_index(path):
        raise UsageError("a folder has no name to write beside", hint="give one with -o OUT")
    output = default_output(path, request.device)
    if os.path.islink(output):  # nobody named it: it may lead anywhere
        text = "the name beside the input is a link"
        raise UsageError(f"{text}: '{os.path.basename(output)}'", hint="give a name with -o OUT")
    return output


def container_of(checkpoint: Checkpoint, request: Request, output: str) -> str:
    """What --to, the size of shards, or the name of the output asks for; else the input's own
    where it can be: legacy stays legacy while only names, tags or dtypes change.
    """
    if request.target == _SHARDS or request.shard_bytes:
        _refuse_file_name(output)
        return _SHARDS
    if request.target in FOLDERS:
        _refuse_file_name(output)
    if request.target is not None:
        return request.target
    if output.endswith(("/", os.sep)) or (not is_url(output) and is_folder(output)):
        return _SHARDS
    if output.lower().endswith(".safetensors"):
        return "safetensors"
    whole = any(table.kind == "module" for table in checkpoint.tables) and not request.keep_object
    drops = any(rule.name in OF_TENSORS for rule in request.rules)
    parts = whole or drops or request.compact or bool(request.select or request.entries)
    old_types = request.dtype is None or request.dtype.torch_storage is not None
    if checkpoint.format == "torch-legacy" and not parts and old_types:
        return "torch-legacy"
    return "torch-zip"


def _refuse_file_name(output: str) -> None:
    """Shards asked for by name under what is plainly the name of one file."""
    suffix = os.path.splitext(output)[1].lower()
    if suffix in _FILE_SUFFIXES and (is_url(output) or not is_folder(output)):
        raise UsageError(
            f"several files go into a folder, '{suffix}' is a file's name",
            hint="name a folder with -o, or leave --max-shard-size and --to out",
        )


def _sink(output: str, target: str, request: Request) -> Sink:
    beside = {_EXTRAS: request.extras} if request.extras else None
    if is_url(output):
        if request.by_tasks and target != _SHARDS:
            raise UsageError("one object is sent in order, by one process: there is nothing to share out",
                             hint="write shards: --max-shard-size 5GB; or leave --jobs, --engine and --resume out")  # fmt: skip
        return url_sink(output, shards=target in FOLDERS, force=request.force, beside=beside)
    if beside and is_url(beside[_EXTRAS]):
        raise UsageError("--extras beside a file is a file too", hint="give a path")
    if target in FOLDERS:
        return FolderSink(output, force=request.force, beside=beside)
    return FileSink(output, force=request.force, beside=beside)


def _with_extras(plan: Plan, data: bytes) -> Plan:
    """The entries left behind as one more output, before the others."""
    extra = Output(_EXTRAS, (Literal(data),), len(data))
    outputs = [output._replace(name=output.name or "model") for output in plan.outputs]
    return plan._replace(outputs=(extra, *outputs))


# -- writing -----------------------------------------------------------------------------------
def _run(
    checkpoint: Checkpoint, source: Source | None, plan: Plan, made: object, target: str,
    sink: Sink | None, request: Request, limits: Limits,
    progress: Progress | None,
) -> Written:  # fmt: skip
    if sink is None:
        return Written(())
    total = sum(output.size_bytes for output in plan.outputs)
    told = (lambda done: progress(done, total)) if progress else None
    extras = os.path.realpath(masked(request.extras)) if request.extras else None

    def verify(written: Source) -> None:
        if source is not None:
            source.settle()  # before anything is in its place
        if extras is None or os.path.realpath(written.name) != extras:
            name = os.path.basename(written.name)
            confirm(checkpoint, made, target, written, limits, name)

    if request.by_tasks:
        return _shared_out(plan, sink, request, verify, told)

    def opener(address: Address) -> Source:
        return (source.again(address) if source is not None else None) or reopen(address)

    return run_plan(
        plan, sink, RECIPES, check=request.check, fsync=request.fsync, verify=verify,
        progress=told, opener=opener,
    )  # fmt: skip


def _shared_out(
    plan: Plan, sink: Sink, request: Request, verify: Callable[[Source], object],
    told: Callable[[int], object] | None,
) -> Written:  # fmt: skip
    if isinstance(sink, FileSink | FolderSink):
        from ckptool.engines import write_by

        return write_by(
            request.engine, plan, sink, jobs=request.jobs, resume=request.resume,
            check=request.check, fsync=request.fsync, verify=verify, progress=told,
        )  # fmt: skip
    from ckptool.remote_engine import send_by
    from ckptool.remote_sink import PrefixSink

    assert isinstance(sink, PrefixSink)  # shards alone: see `_sink`
    return send_by(
        request.engine, plan, sink, jobs=request.jobs, resume=request.resume,
        check=request.check, verify=verify, progress=told,
    )  # fmt: skip


# -- what is said ------------------------------------------------------------------------------
Mentions = tuple[tuple[Path, str], ...]


def mentioned(checkpoint: Checkpoint, changes: Changes) -> Mentions:
    """Where a pickle that gets other devices names some that stay."""
    moved = bool(changes.devices or changes.device_arguments)
    if not moved or not hasattr(checkpoint.handle, "walked"):
        return ()
    from ckptool.formats.devices import device_mentions

    return tuple(device_mentions(checkpoint))


def conversion(
    path: str, output: str, checkpoint: Checkpoint, request: Request, decision: Decision,
    made: object, target: str, plan: Plan, done: Written, left: tuple[str, ...],
    mentions: Mentions, seconds: float,
) -> Conversion:  # fmt: skip
    """The report of what was done."""
    changes = decision.changes
    retagged: dict[tuple[str, str], int] = getattr(made, "retagged", {})
    dtypes: dict[str, int] = {}
    for dtype in changes.dtypes.values():
        dtypes[dtype.name] = dtypes.get(dtype.name, 0) + 1
    return Conversion(
        input=masked(path), output=masked(output), outputs=_extras_last(
            done.outputs or _planned_outputs(plan, output, target, request), request
        ),
        renames=decision.renames, dropped=decision.dropped,
        devices=dict(list(retagged)),
        device_counts={f"{old} -> {new}": n for (old, new), n in retagged.items()},
        mentions=() if left else mentions,
        entries_left=left, kept=_kept(checkpoint, left, changes),
        notes=(*decision.notes, *result_notes(checkpoint, request, decision, made, target, done, output)),
        seconds=seconds, dry_run=request.dry_run,
        rename_summary=rename_words(request, bool(decision.renames)), dtypes=dtypes,
        size_before=checkpoint.size_bytes, has_devices=target not in NO_DEVICES,
    )  # fmt: skip


def _extras_last(
    outputs: tuple[tuple[str, int], ...], request: Request
) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(outputs, key=lambda row: row[0] == request.extras))


def _planned_outputs(
    plan: Plan, output: str, target: str, request: Request
) -> tuple[tuple[str, int], ...]:
    rows = []
    for row in plan.outputs:
        file = masked(output)
        if row.name == _EXTRAS and request.extras:
            file = request.extras
        elif target in FOLDERS:
            file = os.path.join(masked(output), row.name)
        rows.append((file, row.size_bytes))
    return tuple(rows)


def _kept(checkpoint: Checkpoint, left: tuple[str, ...], changes: Changes) -> tuple[str, ...]:
    gone = {*left, *changes.entries, *(key for path, key in changes.drops if not path)}
    again = {place for table in checkpoint.tables for place in table.also}
    names = (str(extra.path[0]) for extra in checkpoint.extras if extra.path not in again)
    return tuple(name for name in names if name not in gone)


def rename_words(request: Request, renamed: bool) -> str:
    """In words what was renamed."""
    if not renamed:
        return ""
    words = {
        "strip-module": "'module.' removed",
        "add-module": "'module.' added",
        "unwrap": "wrappers removed",
    }
    rules = [rule for rule in request.rules if rule.name not in OF_TENSORS]
    said = [words.get(rule.name, rule.flag) for rule in rules]
    return ", ".join(said) or "'module.' removed"
