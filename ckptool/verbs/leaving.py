"""What a conversion leaves behind, and what is to be said of the rest.

Knows: what a container cannot hold. Must not know: printing, how it is written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from ckptool.checkpoint import Changes, Checkpoint, Note
from ckptool.formats.extras_full import full_extras
from ckptool.formats.judge import CODE, FOREIGN
from ckptool.formats.rows import chosen_table, nested_rows
from ckptool.plans import Written
from ckptool.verbs.deciding import Decision
from ckptool.verbs.request import ONE_TABLE, Request
from ckptool.verbs.tables import path_name

_METADATA = ("__metadata__",)
JOINED = ("deepspeed-zero",)
"""Containers that many files of ranks are joined from: what comes out is the weights alone."""


def left_entries(checkpoint: Checkpoint, changes: Changes, target: str) -> tuple[str, ...]:
    """Dotted names of the entries that the output does not have, though nobody dropped them."""
    if (target == "dcp" and checkpoint.format in ONE_TABLE) or checkpoint.format in JOINED:
        return tuple(path_name(extra.path) for extra in checkpoint.extras)
    if checkpoint.format == "hf-shards":  # what .bin shards hold beside their tensors
        beside = (path_name(extra.path) for extra in checkpoint.extras if extra.path != _METADATA)
        return tuple(name for name in beside if name.partition(".")[0] not in changes.entries)
    alone = target in ONE_TABLE or changes.select is not None or _is_root_module(checkpoint)
    if not alone or checkpoint.format in ONE_TABLE or not checkpoint.tables:
        return ()
    table = chosen_table(checkpoint, changes)
    nested = nested_entries(checkpoint, changes, target)
    names: dict[str, None] = {}
    for other in checkpoint.tables:
        if other.path[: len(table.path)] != table.path:
            names[path_name(other.path)] = None
    for extra in checkpoint.extras:
        if extra.path not in table.places and path_name(extra.path) not in nested:
            names[path_name(extra.path)] = None
    if target in ONE_TABLE:
        inside = [path_name((*table.path, key)) for key, _ in table.others]
        names.update(dict.fromkeys(name for name in inside if name not in nested))
    return tuple(name for name in names if name.partition(".")[0] not in changes.entries)


def nested_entries(checkpoint: Checkpoint, changes: Changes, target: str) -> dict[str, int]:
    """{entry of the state_dict that is no tensor: how many tensors inside it come out}."""
    found: dict[str, int] = {}
    if target not in ONE_TABLE or not checkpoint.tables:
        return found
    table = chosen_table(checkpoint, changes)
    tensors = [row.tensor for row in nested_rows(checkpoint, table, changes)]
    if table.kind == "tensors":  # no state_dict: tensors from anywhere
        tensors += [t for t in table.tensors if len(t.path) > len(table.path) + 1]
    for tensor in tensors:
        name = path_name(tensor.path[: len(table.path) + 1])
        found[name] = found.get(name, 0) + 1
    return found


def _is_root_module(checkpoint: Checkpoint) -> bool:
    return any(table.kind == "module" and not table.path for table in checkpoint.tables)


def extras_json(checkpoint: Checkpoint, left: tuple[str, ...], nested: Collection[str]) -> bytes:
    """The values of the entries left behind, and of those of which more than the tensors that
    come out is left behind: {"schema": 1, "file", "extras": [{path, type,
    value}]}. Tensors, arrays and bytes among them are described, not written. Raises LimitExceeded.
    """
    rows = [
        {"path": list(extra.path), "type": extra.type, "value": _plain(extra.value)}
        for extra in full_extras(checkpoint)
        if (name := path_name(extra.path)) in left or (name in nested and _is_mixed(extra.value))
    ]
    data = {"schema": 1, "file": checkpoint.file, "extras": rows}
    return json.dumps(data, indent=2).encode("ascii") + b"\n"


def _is_mixed(value: Any) -> bool:
    """Whether a value told in JSON's words is more than tensors in lists and dicts."""
    if isinstance(value, dict | list):
        return any(map(_is_mixed, value.values() if isinstance(value, dict) else value))
    return not (isinstance(value, str) and value.startswith("<tensor "))


def _plain(value: Any) -> Any:
    """The value with text for numbers that JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


# -- notes -------------------------------------------------------------------------------------
def result_notes(
    checkpoint: Checkpoint, request: Request, decision: Decision, made: Any, target: str,
    done: Written, output: str,
) -> tuple[Note, ...]:  # fmt: skip
    """The file's own notes, then what the conversion did that one should know."""
    alone = target in ONE_TABLE or decision.changes.select is not None
    gone = _NOT_AGAIN | {"optimizer-ids"} if alone else _NOT_AGAIN
    notes = [note for note in checkpoint.notes if note.slug not in gone]
    notes += _unchanged(checkpoint, request, decision, made, target)
    notes += _container(checkpoint, made, target, request)
    nested = nested_entries(checkpoint, decision.changes, target)
    if nested:
        listed = ", ".join(f"{name} ({n:,})" for name, n in list(nested.items())[:4])
        text = f"tensors inside other entries come out under dotted names: {listed}"
        if any(path_name(e.path) in nested and _is_mixed(e.value) for e in checkpoint.extras):
            text += "; what else is in them is left behind"
        notes.append(Note("nested-tensors", text))
    notes += _uncut(checkpoint, request, made)
    notes += _protocol(made)
    notes += _ties(made)
    notes += _classes(checkpoint, target)
    notes += _casts(decision, done)
    notes += [Note("stale-temp", finding) for finding in done.findings]
    return tuple(dict.fromkeys(notes))


_NOT_AGAIN = frozenset(("no-checksums", "edited-in-place", "dcp-folder", "unpacked", "zero-folder"))


def _unchanged(
    checkpoint: Checkpoint, request: Request, decision: Decision, made: Any, target: str
) -> list[Note]:
    changes = decision.changes
    moved = changes.devices or changes.device_arguments or changes.renames
    rebuilt = getattr(made, "housing", None) is not None or target == "dcp"
    if moved or rebuilt or changes.restructures or target != checkpoint.format:
        return []
    where = f"everything is on {request.device} and " if request.device else ""
    text = f"nothing to change: {where}no key is renamed; the output is a copy"
    return [Note("nothing-to-change", text)]


def _container(checkpoint: Checkpoint, made: Any, target: str, request: Request) -> list[Note]:
    notes = []
    if "big-endian" in checkpoint.traits and getattr(made, "housing", True) is not None:
        notes.append(Note("byte-order", "big-endian numbers come out little-endian"))
    modules = [t for t in checkpoint.tables if t.kind == "module"]
    if modules and not request.keep_object:
        name = modules[0].class_name
        of = f" of class {name}" if name else ""
        notes.append(Note("whole-model", f"a whole pickled model{of} comes out as its state_dict"))
    if target == "dcp":
        notes += _flattened(checkpoint, made)
    arrays = sum(t.kind == "ndarray" for table in checkpoint.tables for t in table.tensors)
    if arrays:
        notes.append(Note("arrays", f"{arrays:,} numpy arrays come out as tensors"))
    return notes


def _flattened(checkpoint: Checkpoint, made: Any) -> list[Note]:
    """What torch's flattening has no word for."""
    notes = []
    if any(table.metadata for table in checkpoint.tables):
        text = (
            "DCP keeps no layer versions (_metadata): torch loads the layers as their first version"
        )
        notes.append(Note("dcp-metadata", text))
    if made.empty_count:
        text = f"DCP keeps no empty dicts and lists: {made.empty_count:,} are left out"
        notes.append(Note("dcp-empty", text))
    return notes


def _uncut(checkpoint: Checkpoint, request: Request, made: Any) -> list[Note]:
    """--compact where every storage is used whole."""
    housing = getattr(made, "housing", None)
    if not request.compact or housing is None or any(home.read for home in housing.homes):
        return []
    return [Note("nothing-to-cut", "nothing to cut: tensors use all of every storage")]


def _protocol(made: Any) -> list[Note]:
    if made.kept_protocol is not None:
        text = f"pickle protocol {made.from_protocol} is kept: {made.kept_protocol} has no spelling in protocol 2; torch.load needs weights_only=False"
        return [Note("protocol-kept", text)]
    if made.from_protocol is not None:
        text = (
            f"pickle protocol {made.from_protocol} comes out as 2, which torch.load's default reads"
        )
        return [Note("protocol-2", text)]
    return []


def _ties(made: Any) -> list[Note]:
    notes = []
    aliases: Mapping[str, str] = getattr(made, "aliases", {})
    if aliases:
        listed = ", ".join(f"{second} = {first}" for second, first in list(aliases.items())[:4])
        more = f" and {len(aliases) - 4:,} more" if len(aliases) > 4 else ""
        text = f"{listed}{more} written once: load with safetensors.torch.load_model, or --tied duplicate"
        notes.append(Note("tied", text))
    doubled = getattr(made, "duplicated", ())
    if doubled:
        notes.append(
            Note("tied", f"written again, since the format has no ties: {', '.join(doubled[:4])}")
        )
    return notes


def _classes(checkpoint: Checkpoint, target: str) -> list[Note]:
    foreign = [g.name for g in checkpoint.globals if g.verdict == FOREIGN]
    code = [g.name for g in checkpoint.globals if g.verdict == CODE]
    notes = []
    if target in ONE_TABLE or checkpoint.format in (*ONE_TABLE, *JOINED):
        if code:
            text = f"left behind, could run code: {', '.join(code[:4])}; the output holds tensors alone"
            notes.append(Note("unsafe-pickle", text))
        return notes
    whole = any(table.kind == "module" for table in checkpoint.tables)
    if foreign and not whole:
        more = f" and {len(foreign) - 4} more" if len(foreign) > 4 else ""
        notes.append(
            Note("foreign-classes", f"kept as they are: objects of {', '.join(foreign[:4])}{more}")
        )
    if code:
        text = f"the output could run code as the input could: {', '.join(code[:4])}"
        notes.append(Note("unsafe-pickle", text))
    return notes


def _casts(decision: Decision, done: Written) -> list[Note]:
    """What casts could not keep: numbers beyond the range of the new type, NaN."""
    rows = [(label, counts) for label, counts in done.results if hasattr(counts, "overflowed")]
    notes = []
    over = [(label, c.overflowed) for label, c in rows if c.overflowed]
    if over:
        total = sum(n for _, n in over)
        listed = ", ".join(f"{label} ({n:,})" for label, n in over[:4])
        more = f" and {len(over) - 4:,} more" if len(over) > 4 else ""
        name = next(iter(decision.changes.dtypes.values())).name
        text = f"{total:,} numbers are beyond the range of {name}: {listed}{more}"
        notes.append(Note("cast-overflow", text))
    nan = [(label, c.nan) for label, c in rows if c.nan]
    if nan:
        listed = ", ".join(f"{label} ({n:,})" for label, n in nan[:4])
        notes.append(
            Note("cast-nan", f"{sum(n for _, n in nan):,} numbers were NaN before: {listed}")
        )
    return notes
