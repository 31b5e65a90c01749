"""The notes under an inspection: what will go wrong at loading, and the command that mends it.

Knows: torch's error messages and where they come from. Must not know: printing.
One function a trouble; a new one is a function and a row in `_FIRST` or `_THEN`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from shlex import quote

from ckptool.checkpoint import Checkpoint, Note, Table
from ckptool.commands import convert_command
from ckptool.errors import CkptError
from ckptool.formats.judge import CODE, FOREIGN
from ckptool.rules import UNCOUNTED, Rule, apply
from ckptool.verbs.naming import clean_name, default_output, suffixed
from ckptool.verbs.numbering import tie_of

Trouble = Callable[[Checkpoint, "Table | None"], Iterator[Note]]
Wrapped = Mapping[int, "list[tuple[str, int, int]]"]
"""Index of a table -> what `rules.wrappers` says of its keys."""
_FOLDERS = ("hf-shards", "dcp", "deepspeed-zero", "torch-unpacked")  # no name to write beside
_KNOWN_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "xla", "mtia", "meta", "npu", "privateuseone")


def advise(checkpoint: Checkpoint, shown: Table | None, wrapped: Wrapped) -> tuple[Note, ...]:
    """All notes, the file's own first."""
    found = list(checkpoint.notes)
    for trouble in _FIRST:
        found.extend(trouble(checkpoint, shown))
    found.extend(_names(checkpoint, shown, wrapped))
    for trouble in _THEN:
        found.extend(trouble(checkpoint, shown))
    return tuple(found)


def can_convert(checkpoint: Checkpoint) -> bool:
    """Whether a note may offer `ckptool convert` for this file."""
    if any(row.verdict == CODE for row in checkpoint.globals):
        return False
    return "inspect-only" not in checkpoint.traits and checkpoint.format not in _FOLDERS


def _whole(checkpoint: Checkpoint) -> bool:
    return any(table.kind == "module" for table in checkpoint.tables)


def offer(checkpoint: Checkpoint, options: str, output: str = "") -> str | None:
    """`ckptool convert FILE options`, written to FILE with the word `output` in its name; None
    when convert cannot serve this file.
    """
    if not can_convert(checkpoint):
        return None
    name = checkpoint.file if not checkpoint.file.startswith("-") else f"./{checkpoint.file}"
    words = [options] if options else []
    if output:
        words += ["-o", quote(suffixed(name, output))]
    return convert_command(checkpoint.file, " ".join(words))


# -- what the file is --------------------------------------------------------------------------
def _code(checkpoint: Checkpoint, shown: Table | None) -> Iterator[Note]:
    rows = [row for row in checkpoint.globals if row.verdict == CODE]
    for row in rows[:50]:
        detail = f", {row.detail}" if row.detail else ""
        yield Note(
            "unsafe-pickle",
            f"could run code: {row.name} at byte {row.offset:,} of {row.member}{detail}",
            _tensors_alone(checkpoint) if row is rows[0] else None,
        )
    if len(rows) > 50:
        yield Note("unsafe-pickle", f"could run code: and {len(rows) - 50:,} more names")


def _tensors_alone(checkpoint: Checkpoint) -> str | None:
    """The clean way out of a file that could run code: .safetensors holds tensors alone."""
    if "inspect-only" in checkpoint.traits or checkpoint.weights is None:
        return None
    return convert_command(checkpoint.file, f"-o {quote(clean_name(checkpoint.file))}")


def _restricted(checkpoint: Checkpoint, shown: Table | None) -> Iterator[Note]:
    """Every name that torch.load's default refuses, at once (torch names one at a time)."""
    from ckptool.verbs.restricted import refused_by_torch

    if checkpoint.format not in ("torch-zip", "torch-legacy"):
        return
    names = refused_by_torch(checkpoint)
    if names and not any(row.verdict == CODE for row in checkpoint.globals):
        foreign = [row.name for row in checkpoint.globals if row.verdict == FOREIGN]
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        what = "classes of other packages, inert here" if foreign else "plain data, no code"
        yield Note(
            "weights-only",
            f"torch.load refuses it unless weights_only=False, because of {listed} ({what})",
        )


def _module(checkpoint: Checkpoint, shown: Table | None) -> Iterator[Note]:
    if shown is None or shown.kind != "module" or "inspect-only" in checkpoint.traits:
        return
    name = f" of class {shown.class_name}" if shown.class_name else ""
    yield Note(
        "whole-model",
        f"a whole pickled model{name}, not a state_dict: torch.load needs its classes; the keys shown are its state_dict, which convert writes",
        offer(checkpoint, "", "plain"),
    )


def _protocol(checkpoint: Checkpoint, shown: Table | None) -> Iterator[Note]:
    walked = getattr(checkpoint.handle, "walked", None)
    if (
        walked is not None
        and walked.protocol >= 4
        and checkpoint.format in ("torch-zip", "torch-legacy")
    ):
        yield Note(
            "pickle-protocol",
            f"pickle protocol {walked.protocol}: torch.load's default (weights_only=True) refuses it; every convert writes protocol 2",
            offer(checkpoint, "--to-cpu"),
        )


def _big_endian(checkpoint: Checkpoint, shown: Table | None) -> Iterator[Note]:
    if "big-endian" in checkpoint.traits:
        yield Note(
            "big-endian", "saved on a big-endian machine: torch swaps the bytes when it loads"
        )


# -- devices -----------------------------------------------------------------------------------
def _devices(checkpoint: Checkpoint, shown: Table | None) -> Iterator[Note]:
    counts: dict[str, int] = {}
    for storage in checkpoint.storages:
        counts[storage.device] = counts.get(storage.device, 0) + 1
    for tensor in checkpoint.tensors:
        if tensor.kind == "device-argument":
            counts[tensor.device] = counts.get(tensor.device, 0) + 1
    away = {tag: n for tag, n in counts.items() if tag not in ("cpu", "meta")}
    if not away:
        return
    writes, command = _to_cpu(checkpoint, shown)
    where = (
        ", ".join(f"{tag or repr('')} ({n})" for tag, n in away.items())
        if len(counts) > 1
        else next(iter(away)) or "''"
    )
    strange = [
        tag
        for tag in away
        if tag.partition(":")[0].rstrip("0123456789") not in _KNOWN_DEVICES or tag == ""
    ]
    if strange:
        yield Note(
            "device-unknown",
            f"saved on {where}: torch knows no device '{strange[0]}' and cannot load it without map_location{writes}",
            command,
        )
        return
    text = f"saved on {where}: torch.load fails on a machine without {_hardware(away)} unless map_location is given"
    if any(extra.type == "optimizer" for extra in checkpoint.extras):
        text += "; in a DDP resume every process would open that device"
    yield Note("device", text + writes, command)
    high = sorted(tag for tag in away if tag.startswith("cuda:") and tag != "cuda:0")
    if high:
        yield Note(
            "device-index",
            f"tagged {', '.join(high)}: a machine with fewer GPUs cannot load it as it is",
            offer(checkpoint, f"--map-location {quote(high[0])} cuda:0", "cuda0"),
        )


def _hardware(away: dict[str, int]) -> str:
    kinds = {tag.partition(":")[0].rstrip("0123456789") for tag in away}
    return "that GPU" if kinds <= {"cuda"} else "that device"


def _to_cpu(checkpoint: Checkpoint, shown: Table | None) -> tuple[str, str | None]:
    """What --to-cpu would write, and the command."""
    command = offer(checkpoint, "--to-cpu")
    if command is None:
        return "", None
    strips = shown is not None and _strips(shown)
    what = "on cpu, without 'module.', all else kept" if strips else "on cpu, all else kept"
    if _whole(checkpoint):
        what = "the state_dict in its place, " + what
    return f"; this writes {default_output(checkpoint.file, 'cpu')}: {what}", command


def _strips(table: Table) -> bool:
    try:
        return bool(apply([Rule("strip-module-if-all")], [t.key for t in table.tensors]).renames)
    except CkptError:
        return False


def _float64(checkpoint: Checkpoint, shown: Table | None) -> Iterator[Note]:
    wide = [t.key for t in shown.tensors if t.dtype and t.dtype.name == "float64"] if shown else []
    if wide:
        yield Note("float64", f"{_some(wide)} in float64, which an Apple GPU (mps) cannot hold")


def _meta(checkpoint: Checkpoint, shown: Table | None) -> Iterator[Note]:
    empty = [t.key for t in shown.tensors if t.kind == "meta"] if shown else []
    if empty:
        yield Note("meta", f"no data in the file, only shapes (device meta): {_some(empty)}")


# -- names -------------------------------------------------------------------------------------
_WRAPPED_BY = {
    "module": "DataParallel or DistributedDataParallel",
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
}


def _names(checkpoint: Checkpoint, shown: Table | None, wrapped: Wrapped) -> Iterator[Note]:
    """One note a table: what wraps its names, and the one command that unwraps them all."""
    commands: dict[str, str | None] = {}
    for i, rows in wrapped.items():
        table = checkpoint.tables[i]
        at = f" at '{'.'.join(map(str, table.path))}'" if table is not shown else ""
        counted = sum(t.key not in UNCOUNTED for t in table.tensors)
        if not rows:
            continue
        texts = [_wrapper_text(row, counted, at) for row in rows]
        only_module = len(rows) == 1 and set(rows[0][0].split(".")) == {"module", ""}
        options = "--strip-module" if only_module else "--unwrap"
        slug = "module-prefix" if only_module else "wrapper"
        if options not in commands:  # once for all tables: each asks all tables
            works = _works(checkpoint, options[2:])
            commands[options] = offer(checkpoint, options, "plain") if works else None
        yield Note(slug, "; ".join(dict.fromkeys(texts)), commands[options])


def _works(checkpoint: Checkpoint, rule: str) -> bool:
    """Whether the rule makes no two keys one, in any table."""
    try:
        for table in (table for table in checkpoint.tables if table.kind != "tensors"):
            apply([Rule(rule)], [t.key for t in table.tensors] + [key for key, _ in table.others])
    except CkptError:
        return False
    return True


def _wrapper_text(row: tuple[str, int, int], counted: int, at: str) -> str:
    name, count, of = row
    parts = [part for part in name.split(".") if part]
    by = " and ".join(dict.fromkeys(_WRAPPED_BY[part] for part in parts if part in _WRAPPED_BY))
    if not name.endswith("."):
        if parts[-1] == "module":
            return f"'{name}.' inside {count:,} of {of:,} keys{at}: that part of the net was saved from DataParallel"
        return (
            f"'{name}' inside {count:,} of {of:,} keys{at}: a part of the net was saved from {by}"
        )
    if set(parts) == {"module"} and count < counted:
        return f"{count:,} of {of:,} keys{at} start with '{name}', the others do not: --to-cpu leaves such names alone"
    every = "every key" if count >= counted else f"{count:,} of {of:,} keys"
    verb = "starts" if count >= counted else "start"
    return f"{every}{at} {verb} with '{name}': saved from {by}; a plain net calls them unexpected"


def _several(checkpoint: Checkpoint, shown: Table | None) -> Iterator[Note]:
    if len(checkpoint.tables) > 1:
        names = ", ".join(
            f"'{'.'.join(map(str, t.path))}' ({len(t.tensors)})" for t in checkpoint.tables[:8]
        )
        yield Note(
            "several-tables",
            f"{len(checkpoint.tables)} sets of weights: {names}; --at PATH shows another",
        )


def _none(checkpoint: Checkpoint, shown: Table | None) -> Iterator[Note]:
    if checkpoint.weights is None:
        what = "tensors, but no state_dict" if checkpoint.tensors else "no tensors"
        optimizer = {"state", "param_groups"} <= {str(e.path[0]) for e in checkpoint.extras}
        yield Note("no-weights", f"{what}{': an optimizer state' if optimizer else ''}")


# -- tensors -----------------------------------------------------------------------------------
def _ties(checkpoint: Checkpoint, shown: Table | None) -> Iterator[Note]:
    groups: dict[object, list[str]] = {}
    for tensor in shown.tensors if shown else ():
        place = tie_of(tensor)
        if place is not None:
            groups.setdefault(place, []).append(tensor.key)
    tied = [" = ".join(keys[:4]) for keys in groups.values() if len(keys) > 1]
    if tied:
        yield Note(
            "tied",
            f"one tensor under several names: {'; '.join(tied[:4])}{f' and {len(tied) - 4} more' if len(tied) > 4 else ''}",
        )


def _views(checkpoint: Checkpoint, shown: Table | None) -> Iterator[Note]:
    """Storages much larger than what any tensor uses of them; strides that repeat memory."""
    used: dict[str, int] = {}
    for tensor in checkpoint.tensors:
        if tensor.storage is not None and tensor.storage.pieces:
            key = tensor.storage.key
            used[key] = min(used.get(key, 0) + tensor.size_bytes, tensor.storage.size_bytes)
            if tensor.size_bytes > max(tensor.storage.size_bytes, 1 << 20):
                yield Note(
                    "stride-bomb",
                    f"'{tensor.key}' is a view: {tensor.count:,} elements over {tensor.storage.size_bytes:,} bytes",
                )
    stored = sum(s.size_bytes for s in checkpoint.storages if s.key in used)
    needed = sum(used.values())
    if stored > 2 * needed and stored - needed > 4096:
        yield Note(
            "views",
            f"{stored:,} bytes stored, {needed:,} used by tensors: slices were saved with all that they were cut from",
            offer(checkpoint, "--compact", "small"),
        )


def _others(checkpoint: Checkpoint, shown: Table | None) -> Iterator[Note]:
    entries = [f"{key} ({kind})" for key, kind in shown.others] if shown else []
    if entries and shown and shown.path:
        yield Note("not-tensors", f"in the state_dict and no tensors: {_some(entries)}")


def _counters(checkpoint: Checkpoint, shown: Table | None) -> Iterator[Note]:
    found = (
        [t.key for t in shown.tensors if t.key.rpartition(".")[2] in ("total_ops", "total_params")]
        if shown
        else []
    )
    if found:
        yield Note(
            "profiler-counters",
            f"{len(found)} counters left by a FLOP profiler (total_ops, total_params): a net without them calls them unexpected; nothing is lost without them",
            offer(checkpoint, _drop_counters(found), "plain"),
        )


def _drop_counters(keys: list[str]) -> str:
    names = dict.fromkeys(key.rpartition(".")[2] for key in keys)
    return " ".join(f"--drop {name}" for name in names)


def _batch_norm(checkpoint: Checkpoint, shown: Table | None) -> Iterator[Note]:
    """BatchNorm counters came in torch 0.4.1; version 2 of the layer expects them."""
    if shown is None:
        return
    keys = {t.key for t in shown.tensors}
    bare = [
        key[: -len("running_mean")]
        for key in keys
        if key.rpartition(".")[2] == "running_mean"
        and f"{key[: -len('running_mean')]}num_batches_tracked" not in keys
    ]
    if not bare:
        return
    versions = {str(path): entry.get("version") for path, entry in (shown.metadata or {}).items()}
    missed = sorted(p for p in bare if (versions.get(p.rstrip(".")) or 1) >= 2)
    if missed:
        yield Note(
            "batch-norm",
            f"no num_batches_tracked for {_some(missed)} though the file says layer version 2: torch calls them missing",
        )
    else:
        yield Note(
            "batch-norm",
            "no num_batches_tracked: saved before torch 0.4.1 or without layer versions, torch forgives it",
        )


def _some(names: list[str]) -> str:
    listed = ", ".join(names[:4])
    return f"{listed} and {len(names) - 4} more" if len(names) > 4 else listed


_FIRST: tuple[Trouble, ...] = (_code, _module, _restricted, _protocol, _big_endian)
_THEN: tuple[Trouble, ...] = (
    _devices, _float64, _meta, _several, _none, _ties, _views, _others, _counters, _batch_norm,
)  # fmt: skip
