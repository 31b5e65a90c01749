"""Writing .safetensors: a header, then the numbers, streamed (formats 3.7).

Knows: what the format can hold, ties, layout. Must not know: verbs, how pickles are read.
Header entries stand in file order; the data is sorted by the size of an element, so that
every tensor is aligned, as the safetensors package does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ckptool.checkpoint import Changes, Checkpoint, DType, Table
from ckptool.errors import KeyDuplicate, LimitExceeded, OutputError, UnsafePickle, Unsupported
from ckptool.formats.assemble import PickleHandle
from ckptool.formats.contents import Filler
from ckptool.formats.dicts import dict_items, state_items
from ckptool.formats.expressions import KEPT_METADATA
from ckptool.formats.homes import Read
from ckptool.formats.judge import CODE
from ckptool.formats.rows import (
    ALIAS_PLACES,
    LAYER_VERSIONS,
    OWN,
    Row,
    chosen_table,
    final_metadata,
    kept_metadata,
    odd_keys,
    rows_of,
)
from ckptool.formats.runs import is_contiguous
from ckptool.limits import DEFAULT, Limits
from ckptool.pickles.nodes import Obj, text_of
from ckptool.places import Source
from ckptool.plans import Literal, Output, Part, Plan, total_size

_DENSE = ("tensor", "parameter", "subclass", "ndarray", "device-argument")
_SMALL_VIEW = 1 << 20  # a view may repeat memory up to this: a stride bomb needs more
_LEAVE = "leave it out with --drop, or take others with --only"


@dataclass(slots=True)
class Exported:
    """What was planned: the rows of each file, and the names that are only noted."""

    rows: tuple[tuple[Row, ...], ...]
    aliases: dict[str, str] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    duplicated: tuple[str, ...] = ()
    data: bytes = b""
    retagged: dict[tuple[str, str], int] = field(default_factory=dict)
    kept_protocol: str | None = None
    from_protocol: int | None = None


def write(checkpoint: Checkpoint, changes: Changes) -> tuple[Plan, Exported]:
    """One file of one state_dict. Raises Unsupported, naming the tensor, for what the format
    cannot hold.
    """
    rows, aliases, exported = select_rows(checkpoint, changes)
    metadata = file_metadata(checkpoint, changes) | aliases | alias_places(exported.places)
    parts = file_parts(rows, metadata, Filler(changes.check, inline_of(checkpoint)))
    return Plan(checkpoint.sources, (Output("", parts, total_size(parts)),)), exported


def confirm(checkpoint: Checkpoint, exported: Exported, written: Source, limits: Limits) -> None:
    """Read the header back: keys, dtypes, shapes. Raises OutputError."""
    from ckptool.formats.safetensors import read

    found = {tensor.key: (tensor.dtype, tensor.shape) for tensor in read(written, limits).tensors}
    firsts, named = set(exported.aliases.values()), {}
    wrong = False
    for row in exported.rows[0]:
        what = dtype_of(row), row.tensor.shape
        wrong = found.pop(row.key, None) != what or wrong
        if row.key in firsts:
            named[row.key] = what
    wrong = (
        any(found.pop(second, None) != named[first] for second, first in exported.aliases.items())
        or wrong
    )
    if wrong or found:
        raise OutputError("self-check failed: the header was not written as planned")


def select_rows(
    checkpoint: Checkpoint, changes: Changes
) -> tuple[list[Row], dict[str, str], Exported]:
    """The tensors to write, checked, and {second name: first} of those that are the same."""
    table = chosen_table(checkpoint, changes)
    if table.duplicate_keys:
        raise Unsupported("the state_dict sets a key more than once", key=table.duplicate_keys[0])
    _refuse_repeated(checkpoint, table)
    _refuse_odd_keys(checkpoint, table, changes)
    _refuse_odd_owner(checkpoint, table, changes)
    rows = rows_of(checkpoint, table, changes)
    _refuse_rows(rows)
    kept, aliases, doubled = _untie(rows, changes.tied)
    places = {row.key: at for at, row in enumerate(rows) if row.key in aliases}
    return kept, aliases, Exported((tuple(kept),), aliases, places, doubled)


def alias_places(places: Mapping[str, int]) -> dict[str, str]:
    """The entry of `__metadata__` that keeps the order of the state_dict; none without ties."""
    return {ALIAS_PLACES: json.dumps(places, separators=(",", ":"))} if places else {}


def inline_of(checkpoint: Checkpoint) -> Any:
    """Where a bare pickle's numbers without a span come from."""
    handle = checkpoint.handle
    return getattr(handle.container, "inline", None) if isinstance(handle, PickleHandle) else None


# -- what can be held --------------------------------------------------------------------------
def _refuse_repeated(checkpoint: Checkpoint, table: Table) -> None:
    """A key set twice on the way to the state_dict or inside it: which one counts is not clear."""
    found = getattr(checkpoint.handle, "found", None)
    for path in found.repeated if found is not None else ():
        if path[: len(table.path)] == table.path[: len(path)]:
            key = ".".join(map(str, path))
            raise KeyDuplicate("one dict sets this key more than once", key=key)


def _refuse_odd_keys(checkpoint: Checkpoint, table: Table, changes: Changes) -> None:
    """A number as a key would come back as text; a tensor that is a key itself has no name."""
    nameless = next((t.key for t in table.tensors if "<key>" in t.path), None)
    if nameless is not None:
        raise Unsupported("a tensor that is the key of a dict", key=nameless, hint=_LEAVE)
    names = {t.key for t in table.tensors if (table.path, t.key) not in changes.drops}
    for key in sorted(odd_keys(checkpoint, table) & names):
        raise Unsupported("a key that is no text", key=key, hint=_LEAVE)


def _refuse_odd_owner(checkpoint: Checkpoint, table: Table, changes: Changes) -> None:
    """Tensors come out of a file that could run code, but not of a dict that such a call makes;
    a storage of two typed dtypes holds numbers of only one.
    """
    if not isinstance(checkpoint.handle, PickleHandle):
        return
    paths = checkpoint.handle.found.call_paths
    for row in checkpoint.globals:
        if row.verdict == CODE and paths.get(row.offset, ("",)) == table.path:
            raise UnsafePickle(f"the state_dict itself is made by a call that could run code: {row.name}",
                               member=row.member, offset=row.offset)  # fmt: skip
    doubled = set(checkpoint.handle.reader.two_dtypes)
    for tensor in table.tensors if doubled else ():
        stays = (table.path, tensor.key) not in changes.drops
        if stays and tensor.storage is not None and tensor.storage.key in doubled:
            raise Unsupported(
                "its storage is used with another dtype too", key=tensor.key, hint=_LEAVE
            )


def _refuse_rows(rows: list[Row]) -> None:
    """Raise Unsupported, naming every tensor that safetensors cannot hold, each with why."""
    found = [(row.key, why) for row in rows if (why := _why_not(row)) is not None]
    if not found:
        return
    if len(found) == 1:
        raise Unsupported(
            f"{found[0][1]}: .safetensors cannot hold it", key=found[0][0], hint=_LEAVE
        )
    listed = "; ".join(f"'{key}': {why}" for key, why in found[:5])
    more = f"; and {len(found) - 5:,} more" if len(found) > 5 else ""
    text = f".safetensors cannot hold {len(found):,} of the tensors: {listed}{more}"
    raise Unsupported(text, hint=_LEAVE)


def _why_not(row: Row) -> str | None:
    """Why safetensors cannot hold this tensor under this name; None when it can."""
    t = row.tensor
    try:
        row.key.encode("utf-8")
    except UnicodeEncodeError:
        return "a key that is no Unicode text"
    if row.key == "__metadata__" or row.key.startswith(OWN):
        return "a key that the format keeps for itself"
    if t.kind not in _DENSE or t.storage is None or t.dtype is None or t.shape is None:
        return f"a {t.kind} tensor"
    dtype = dtype_of(row)
    if dtype.safetensors is None:
        return f"dtype {dtype.name}"
    if dtype.safetensors == "F4" and not (t.shape and is_contiguous(t)):
        return "packed 4-bit numbers that are no plain run"
    if t.size_bytes > max(t.storage.size_bytes, _SMALL_VIEW):
        held = f"a view of {t.count:,} elements over {t.storage.size_bytes:,} bytes"
        return f"{held}, {t.size_bytes:,} when written out"
    return None


def dtype_of(row: Row) -> DType:
    """The element type that is written."""
    dtype = row.target or row.tensor.dtype
    if dtype is None:
        raise Unsupported(f"a {row.tensor.kind} tensor without a dtype", key=row.key, hint=_LEAVE)
    return dtype


# -- ties --------------------------------------------------------------------------------------
def _untie(rows: list[Row], tied: str) -> tuple[list[Row], dict[str, str], tuple[str, ...]]:
    """(rows to write, {second: first}, names written again) by what --tied says."""
    first: dict[Any, str] = {}
    kept, aliases, doubled = [], {}, []
    for row in rows:
        view = _view(row)
        owner = first.setdefault(view, row.key) if view is not None else row.key
        if owner == row.key:
            kept.append(row)
        elif tied == "error":
            raise Unsupported(f"'{owner}' and '{row.key}' are one tensor", key=row.key,
                              hint="write it once with --tied alias, or twice with --tied duplicate")  # fmt: skip
        elif tied == "alias" and row.key != "format":
            aliases[row.key] = owner
        else:
            doubled.append(row.key)
            kept.append(row)
    return kept, aliases, tuple(doubled)


def _view(row: Row) -> Any:
    t = row.tensor
    if t.storage is None or not t.count:
        return None
    return t.storage.key, t.offset, t.shape, t.stride, t.dtype, row.target


# -- the file ----------------------------------------------------------------------------------
def file_metadata(checkpoint: Checkpoint, changes: Changes) -> dict[str, str]:
    """`__metadata__`: the format, what the input's said, and the layer versions as JSON."""
    table = chosen_table(checkpoint, changes)
    found = {"format": "pt", **kept_metadata(checkpoint, {t.key for t in table.tensors})}
    found |= _kept_in_pickle(checkpoint, table)
    versions = final_metadata(table, changes)
    if versions is not None:
        found[LAYER_VERSIONS] = json.dumps(versions, separators=(",", ":"))
    return found


def _kept_in_pickle(checkpoint: Checkpoint, table: Table) -> dict[str, str]:
    if not isinstance(checkpoint.handle, PickleHandle):
        return {}
    owner = checkpoint.handle.found.owners.get(table.path)
    node = (state_items(owner) or {}).get(KEPT_METADATA) if type(owner) is Obj else None
    rows = ((text_of(key), text_of(value)) for key, value, *_ in dict_items(node) or ())
    return {key: value for key, value in rows if key is not None and value is not None}


def file_parts(
    rows: Iterable[Row], metadata: Mapping[str, str], filler: Filler
) -> tuple[Part, ...]:
    """Header and data. Raises LimitExceeded for a header that no reader takes."""
    rows = list(rows)
    by_size = sorted(rows, key=lambda row: -dtype_of(row).bits)
    begins, at = {}, 0
    for row in by_size:
        begins[row.key] = at
        at += size_of(row)
    entries = chain(
        (("__metadata__", dict(metadata)),),
        ((row.key, _entry(row, begins[row.key])) for row in rows),
    )
    header = Literal(_header_bytes(entries))
    begins.clear()
    return (header, *(part for row in by_size for part in _fill(row, filler)))


def _entry(row: Row, begin: int) -> dict[str, Any]:
    return {
        "dtype": dtype_of(row).safetensors,
        "shape": _shape(row),
        "data_offsets": [begin, begin + size_of(row)],
    }


def _header_bytes(entries: Iterable[tuple[str, Any]], limits: Limits = DEFAULT) -> bytes:
    """The header, its JSON made an entry at a time."""
    tell = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    text = b"{%b}" % b",".join(f"{tell(key)}:{tell(entry)}".encode() for key, entry in entries)
    text += b" " * (-len(text) % 8)
    if len(text) > limits.header_bytes:
        raise LimitExceeded("header-bytes", f"the header would have {len(text):,} bytes",
                            hint="write several files with --max-shard-size")  # fmt: skip
    return len(text).to_bytes(8, "little") + text


def size_of(row: Row) -> int:
    """Bytes of a tensor in the file."""
    return row.tensor.count * dtype_of(row).size_bytes


def _shape(row: Row) -> list[int]:
    """As the format counts: packed 4-bit numbers one by one."""
    shape = list(row.tensor.shape or ())
    return [*shape[:-1], 2 * shape[-1]] if dtype_of(row).safetensors == "F4" else shape


def _fill(row: Row, filler: Filler) -> tuple[Part, ...]:
    t = row.tensor
    assert t.storage is not None
    assert t.dtype is not None
    if is_contiguous(t):
        read = Read(t.dtype, (t.count,), (1,), t.offset)
    else:
        read = Read(t.dtype, t.shape or (), t.stride or (), t.offset)
    return filler.fill(t.storage, read, dtype_of(row), size_of(row), row.key)
