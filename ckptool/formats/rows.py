"""The tensors that a conversion takes out of one state_dict, under their final names.

Knows: tables, renames, drops; which entries inside a state_dict are tensors too.
Must not know: pickles, how they are written.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from ckptool.checkpoint import Changes, Checkpoint, DType, Table, Tensor
from ckptool.errors import KeyCollision, Unsupported
from ckptool.formats.assemble import PickleHandle
from ckptool.formats.dicts import dict_items, key_text
from ckptool.layer_versions import metadata_renames
from ckptool.pickles.nodes import text_of

OWN = "ckptool."
LAYER_VERSIONS = f"{OWN}state_dict_metadata"
"""Key of `__metadata__` under which a state_dict's `_metadata` travels, as JSON."""
ALIAS_PLACES = f"{OWN}alias_places"
"""Key of `__metadata__` for the places of names that are written as a tie, as JSON {key: place
in the order of the state_dict}: .safetensors has no entry that could stand there.
"""
_SKIPPED = ("optim", "sched", "rng")


class Row(NamedTuple):
    """One tensor, its final key, and the dtype it shall have (None: its own)."""

    key: str
    tensor: Tensor
    target: DType | None


def chosen_table(checkpoint: Checkpoint, changes: Changes) -> Table:
    """The one state_dict that comes out. Raises Unsupported when the file holds none."""
    for table in checkpoint.tables:
        if changes.select is not None and table.path == changes.select:
            return table
    if checkpoint.weights is not None:
        return checkpoint.tables[checkpoint.weights]
    if checkpoint.tables:
        return checkpoint.tables[0]
    raise Unsupported("no tensors in it: nothing to write", path=checkpoint.file,
                      hint="see what it holds with ckptool inspect")  # fmt: skip


def rows_of(checkpoint: Checkpoint, table: Table, changes: Changes) -> list[Row]:
    """The tensors of a table that stay, then those in lists and dicts inside it, in file order.

    Raises KeyCollision when two get one name, as `a.b` and a `b` inside `a` do.
    """
    found = []
    for tensor in table.tensors:
        place = (table.path, tensor.key)
        if place not in changes.drops:
            key = changes.renames.get(place, tensor.key)
            found.append(Row(key, tensor, changes.dtypes.get(place)))
    found += nested_rows(checkpoint, table, changes)
    seen: set[str] = set()
    for row in found:
        if row.key in seen:
            raise KeyCollision(f"a tensor inside another entry and '{row.key}' have one name")
        seen.add(row.key)
    return found


def nested_rows(checkpoint: Checkpoint, table: Table, changes: Changes) -> list[Row]:
    """Tensors below the table's entries that are no tensors themselves, by dotted names."""
    inside = {
        key
        for key, _ in table.others
        if not any(word in key for word in _SKIPPED) and (table.path, key) not in changes.drops
    }
    if not inside:
        return []
    depth, found = len(table.path), []
    for tensor in checkpoint.tensors:
        path = tensor.path
        if len(path) < depth + 2 or path[:depth] != table.path or path[depth] not in inside:
            continue
        if tensor.kind == "storage" or path[depth] in (changes.entries if not depth else ()):
            continue
        found.append(Row(".".join(map(str, path[depth:])), tensor, None))
    return found


def odd_keys(checkpoint: Checkpoint, table: Table) -> set[str]:
    """Keys of a state_dict that are no text (numbers, None, tuples), as they are shown."""
    if not isinstance(checkpoint.handle, PickleHandle) or table.kind != "state_dict":
        return set()
    rows = dict_items(checkpoint.handle.found.owners.get(table.path)) or ()
    return {key_text(key) for key, *_ in rows if text_of(key) is None}


def final_metadata(table: Table, changes: Changes) -> dict[str, Any] | None:
    """`_metadata` after the renames."""
    if table.metadata is None:
        return None
    renames = {key: new for (path, key), new in changes.renames.items() if path == table.path}
    paths = list(table.metadata)
    keys = [t.key for t in table.tensors if (table.path, t.key) not in changes.drops]
    moved, dropped = metadata_renames(paths, renames, keys)
    return {moved.get(path, path): table.metadata[path] for path in paths if path not in dropped}


def kept_metadata(checkpoint: Checkpoint, keys: Collection[str]) -> dict[str, str]:
    """What `__metadata__` of the input said, but for what is written anew; an entry named like
    one of the tensor `keys` was a tie.
    """
    for extra in checkpoint.extras:
        if extra.path == ("__metadata__",) and isinstance(extra.value, dict):
            return {
                key: value
                for key, value in extra.value.items()
                if key != "format" and not key.startswith(OWN) and key not in keys
            }
    return {}
