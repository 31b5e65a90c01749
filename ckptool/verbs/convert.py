"""convert: the same checkpoint with other names or devices, everything else to the byte.

Knows: which keys and storages a flag means. Must not know: printing, how bytes are copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from shlex import quote
from typing import Any

from ckptool.checkpoint import Changes, Checkpoint, Note, Path, Storage, Table, Tensor
from ckptool.errors import CkptError, RuleMatchesNothing, Unsupported, UsageError
from ckptool.formats import confirm, edit, read
from ckptool.formats.judge import CODE, FOREIGN
from ckptool.formats.rewrite import Rewritten, device_mentions
from ckptool.limits import DEFAULT, Limits
from ckptool.places import Source, open_source
from ckptool.plans import Plan
from ckptool.rules import Rule, apply
from ckptool.values import RECIPES
from ckptool.verbs.naming import default_output, suffixed
from ckptool.verbs.tables import path_name, table_at
from ckptool.writing import FileSink, check_different, write

ACCELERATORS = ("cuda", "mps", "xpu", "hpu", "npu", "musa", "mtia", "xla", "privateuseone", "gpu")


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for. `device` is 'cpu' or 'cuda:N'; `mapped` are (from, to) tags;
    `rules` in the order given; `keep_module` leaves names alone under a device move.
    """

    device: str | None = None
    mapped: tuple[tuple[str, str], ...] = ()
    rules: tuple[Rule, ...] = ()
    keep_module: bool = False
    at: tuple[str, ...] = ()
    keep_unknown: bool = False
    check: bool = True
    fsync: bool = True
    force: bool = False
    dry_run: bool = False


def build_request(*, to_cpu: bool, to_gpu: int | None, **rest: Any) -> Request:
    """A Request, its contradictions refused. Raises UsageError."""
    mapped, rules = rest["mapped"], rest["rules"]
    if (to_cpu and to_gpu is not None) or (mapped and (to_cpu or to_gpu is not None)):
        raise UsageError("only one of to-cpu, to-gpu and map-location can be given")
    if any(new == "meta" for _, new in mapped):
        raise UsageError("nothing can move to meta: torch would find no data there")
    if to_gpu is not None and to_gpu < 0:
        raise UsageError(f"there is no GPU {to_gpu}")
    if rest["keep_module"] and any(rule.name in ("strip-module", "add-module") for rule in rules):
        raise UsageError("keep-module contradicts strip-module and add-module")
    if {"strip-module", "add-module"} <= {rule.name for rule in rules}:
        raise UsageError("strip-module contradicts add-module")
    if not (to_cpu or to_gpu is not None or mapped or rules):
        raise UsageError(
            "nothing to do: no device and no key rule is given", hint="--to-cpu is the usual one"
        )
    device = "cpu" if to_cpu else f"cuda:{to_gpu}" if to_gpu is not None else None
    return Request(device=device, **rest)


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was (or, on a dry run, would be) done."""

    input: str
    output: str
    size_bytes: int
    renames: dict[str, str]
    devices: dict[str, str]
    device_counts: dict[str, int]
    left_behind: tuple[tuple[Path, str], ...]
    kept: tuple[str, ...]
    notes: tuple[Note, ...]
    seconds: float
    dry_run: bool
    rename_summary: str = ""
    findings: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """JSON schema 1 of the command line, with what the screen needs beside it."""
        return {
            "schema": 1,
            "input": self.input,
            "outputs": [{"file": self.output, "size_bytes": self.size_bytes}],
            "renames": self.renames,
            "dropped": [],
            "devices": self.devices,
            "device_counts": self.device_counts,
            "left_behind": [{"path": list(path), "text": text} for path, text in self.left_behind],
            "kept": list(self.kept),
            "rename_summary": self.rename_summary,
            "dry_run": self.dry_run,
            "seconds": round(self.seconds, 3),
            "notes": [{"slug": n.slug, "text": n.text, "command": n.command} for n in self.notes],
        }


def convert_place(
    path: str,
    output: str | None,
    request: Request,
    limits: Limits = DEFAULT,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Convert one file. Raises CkptError; then no output and no temp file is left.

    `progress(done, total)` is called in bytes.
    """
    started = time.monotonic()
    target = output or _beside(path, request)
    with open_source(path) as source:
        try:
            check_different([source.address], target)
            sink = None if request.dry_run else FileSink(target, force=request.force)
            checkpoint = read(source, limits)
            refuse_kind(checkpoint)
            changes, renames, notes, summary = decide(checkpoint, request)
            plan, rewritten = edit(checkpoint, changes)
            findings = (
                _write(checkpoint, plan, rewritten, sink, request, limits, progress) if sink else ()
            )
        except CkptError as error:
            error.path = error.path or path
            raise
    return Conversion(
        input=path, output=target, size_bytes=plan.outputs[0].size_bytes, renames=renames,
        devices=dict(list(rewritten.retagged)),
        device_counts={f"{old} -> {new}": n for (old, new), n in rewritten.retagged.items()},
        left_behind=tuple(device_mentions(checkpoint)) if changes.devices else (),
        kept=_kept(checkpoint), notes=(*notes, *_notes(checkpoint, rewritten, findings)),
        seconds=time.monotonic() - started, dry_run=request.dry_run, rename_summary=summary,
        findings=findings,
    )  # fmt: skip


def _beside(path: str, request: Request) -> str:
    if request.device is None:
        raise UsageError("no output is named", hint="give one with -o OUT")
    return default_output(path, request.device)


def _write(
    checkpoint: Checkpoint, plan: Plan, rewritten: Rewritten, sink: FileSink, request: Request, limits: Limits,
    progress: Callable[[int, int], None] | None,
) -> tuple[str, ...]:  # fmt: skip
    total = sum(output.size_bytes for output in plan.outputs)
    told = (lambda done: progress(done, total)) if progress else None

    def verify(written: Source) -> None:
        confirm(checkpoint, rewritten, written, limits)

    done = write(
        plan, sink, RECIPES, check=request.check, fsync=request.fsync, verify=verify, progress=told
    )
    return done.findings


# -- what can be converted ---------------------------------------------------------------------
def refuse_kind(checkpoint: Checkpoint) -> None:
    """Raise Unsupported for what is inspect only."""
    module = next((table for table in checkpoint.tables if table.kind == "module"), None)
    if "inspect-only" in checkpoint.traits:
        reason = "its code may hold devices of its own"
        raise Unsupported(
            f"{checkpoint.format} can be inspected, not converted: {reason}", path=checkpoint.file
        )
    if module is not None:
        where = f" (at '{path_name(module.path)}')" if module.path else ""
        raise Unsupported(
            f"a whole pickled model{where}, not a state_dict: it can be inspected, not converted",
            path=checkpoint.file,
            hint="where its class can be imported: torch.save(model.state_dict(), 'net.pth')",
        )
    if checkpoint.format not in ("torch-zip", "torch-legacy"):
        raise Unsupported(
            f"{checkpoint.format} files can be inspected, not converted", path=checkpoint.file
        )


def decide(
    checkpoint: Checkpoint, request: Request
) -> tuple[Changes, dict[str, str], tuple[Note, ...], str]:
    """Changes, all renames as {old: new}, notes, and in words what was renamed.

    Raises KeyCollision, RuleMatchesNothing, UsageError.
    """
    tables = [table_at(checkpoint, at) for at in request.at] or list(checkpoint.tables)
    renames, notes = _renames(checkpoint, tables, request)
    devices, arguments = _devices(checkpoint, tables, request)
    if request.mapped and not devices and not arguments:
        tags = ", ".join(f"'{old}'" for old, _ in request.mapped)
        raise RuleMatchesNothing(
            f"no storage is tagged {tags}; nothing written", path=checkpoint.file
        )
    flat = {key: new for (_, key), new in renames.items()}
    if request.device and not devices and not arguments and not renames:
        notes += (
            Note(
                "nothing-to-change",
                f"nothing to change: everything is on {request.device} and no key is renamed; the output is a copy",
            ),
        )
    changes = Changes(renames, devices, arguments, request.keep_unknown)
    return changes, flat, notes, _rename_words(request, bool(renames))


# -- names -------------------------------------------------------------------------------------
def _renames(
    checkpoint: Checkpoint, tables: Sequence[Table], request: Request
) -> tuple[dict[tuple[Path, str], str], tuple[Note, ...]]:
    rules = list(request.rules)
    if request.device and not rules and not request.keep_module:
        rules = [Rule("strip-module-if-all")]
    found: dict[tuple[Path, str], str] = {}
    notes: dict[Note, None] = {}
    idle = set(rules)
    for table in tables:
        if table.kind == "tensors":
            continue
        outcome = apply(rules, [t.key for t in table.tensors] + [k for k, _ in table.others])
        found.update({(table.path, key): new for key, new in outcome.renames.items()})
        for remark in outcome.notes:
            notes[Note(remark.slug, remark.text, _again(checkpoint, request, remark.command))] = (
                None
            )
        idle &= set(outcome.idle)
    explicit = [rule for rule in rules if rule in idle and rule.name != "strip-module-if-all"]
    if explicit:
        raise RuleMatchesNothing(
            f"{_flag(explicit[0])} matches no key; nothing written", path=checkpoint.file,
            hint="see the keys with ckptool inspect",
        )  # fmt: skip
    return found, tuple(notes)


def _again(checkpoint: Checkpoint, request: Request, flags: str | None) -> str | None:
    """The command with the flag that settles what was left."""
    if flags is None:
        return None
    device = {None: "", "cpu": " --to-cpu"}.get(
        request.device, f" --to-gpu {str(request.device)[5:]}"
    )
    return f"ckptool convert {quote(checkpoint.file)}{device} {flags} -o {quote(suffixed(checkpoint.file, 'plain'))}"


def _flag(rule: Rule) -> str:
    return f"--{rule.name}" + (f" {rule.argument}" if rule.argument else "")


def _rename_words(request: Request, renamed: bool) -> str:
    if not renamed:
        return ""
    words = {
        "strip-module": "'module.' removed",
        "add-module": "'module.' added",
        "unwrap": "wrappers removed",
    }
    said = [words.get(rule.name, _flag(rule)) for rule in request.rules]
    return ", ".join(said) or "'module.' removed"


# -- devices -----------------------------------------------------------------------------------
def _devices(
    checkpoint: Checkpoint, tables: Sequence[Table], request: Request
) -> tuple[dict[str, str], dict[str, str]]:
    """{storage key: new tag}, {old device argument: new}. `meta` is never retagged."""
    mapped = dict(request.mapped)
    moves = (
        _cpu_storages_to_move(checkpoint, tables)
        if request.device not in (None, "cpu")
        else frozenset()
    )
    found: dict[str, str] = {}
    for storage in checkpoint.storages:
        new = mapped.get(storage.device) or _moved(storage, request.device, moves)
        if new is not None and new != storage.device and storage.device != "meta":
            found[storage.key] = new
    arguments: dict[str, str] = {}
    for tensor in checkpoint.tensors:
        if tensor.kind in ("device-argument", "subclass") and tensor.device:
            new = mapped.get(tensor.device) or _argument_moved(tensor, request.device)
            if new is not None and new != tensor.device:
                arguments[tensor.device] = new
    return found, arguments


def _moved(storage: Storage, device: str | None, moves: frozenset[str]) -> str | None:
    if device is None:
        return None
    if device == "cpu" or is_accelerator(storage.device) or storage.key in moves:
        return device
    return None


def _argument_moved(tensor: Tensor, device: str | None) -> str | None:
    if device is None or tensor.device in ("meta", "cpu", "?"):
        return None
    return device if device == "cpu" or is_accelerator(tensor.device) else None


def is_accelerator(tag: str) -> bool:
    """Whether a location tag names a device that computes, whatever its index."""
    return tag.partition(":")[0].rstrip("0123456789") in ACCELERATORS


def _cpu_storages_to_move(checkpoint: Checkpoint, tables: Sequence[Table]) -> frozenset[str]:
    """CPU storages that follow the net: its weights, and optimizer state of more than one
    element. Step counters, random states and the rest stay.
    """
    keys = {
        t.storage.key
        for table in tables
        if table.kind != "tensors"
        for t in table.tensors
        if t.storage
    }
    optimizers = [extra.path for extra in checkpoint.extras if extra.type == "optimizer"]
    for tensor in checkpoint.tensors:
        if tensor.storage is None or tensor.storage.count < 2:
            continue
        if (
            any("rng" in str(part).lower() for part in tensor.path)
            and tensor.dtype
            and tensor.dtype.name == "uint8"
        ):
            continue
        inside = any(tensor.path[: len(path)] == path for path in optimizers)
        if inside or _in_optimizer_list(tensor.path):
            keys.add(tensor.storage.key)
    return frozenset(keys)


def _in_optimizer_list(path: Path) -> bool:
    """Lightning keeps `optimizer_states` as a list; others nest optimizers by name."""
    return "state" in path and any("optim" in str(part).lower() for part in path)


# -- words -------------------------------------------------------------------------------------
def _kept(checkpoint: Checkpoint) -> tuple[str, ...]:
    return tuple(str(extra.path[0]) for extra in checkpoint.extras)


def _notes(
    checkpoint: Checkpoint, rewritten: Rewritten, findings: tuple[str, ...]
) -> tuple[Note, ...]:
    notes = [note for note in checkpoint.notes if note.slug != "no-checksums"]
    if rewritten.kept_protocol is not None:
        notes.append(
            Note(
                "protocol-kept",
                f"pickle protocol {rewritten.from_protocol} is kept: {rewritten.kept_protocol} has no spelling in protocol 2; torch.load needs weights_only=False",
            )
        )
    elif rewritten.from_protocol is not None:
        notes.append(
            Note(
                "protocol-2",
                f"pickle protocol {rewritten.from_protocol} comes out as 2, which torch.load's default reads",
            )
        )
    foreign = [g.name for g in checkpoint.globals if g.verdict == FOREIGN]
    if foreign:
        more = f" and {len(foreign) - 4} more" if len(foreign) > 4 else ""
        notes.append(
            Note("foreign-classes", f"kept as they are: objects of {', '.join(foreign[:4])}{more}")
        )
    code = [g.name for g in checkpoint.globals if g.verdict == CODE]
    if code:
        notes.append(
            Note(
                "unsafe-pickle",
                f"the output could run code as the input could: {', '.join(code[:4])}",
            )
        )
    notes.extend(Note("stale-temp", finding) for finding in findings)
    return tuple(notes)
