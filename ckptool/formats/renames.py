"""Names in a pickle: keys of state_dicts, their `_metadata`, and the optimizers that go by name.

Knows: where a name stands. Must not know: containers, what rules there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptool.checkpoint import Changes, Checkpoint, Path
from ckptool.errors import Unsupported
from ckptool.formats.assemble import PickleHandle
from ckptool.formats.dicts import dict_items, is_optimizer, key_text, state_items
from ckptool.layer_versions import metadata_renames
from ckptool.pickles.nodes import Box, Obj, Tup, children, elements, items_of, text_of
from ckptool.pickles.splice import Edits


def rename_and_drop(
    checkpoint: Checkpoint, changes: Changes, edits: Edits, generated: set[int]
) -> None:
    """Edit the keys of all tables but the `generated` ones, cut what goes, let names follow.

    Raises Unsupported for a table whose keys stand in no dict.
    """
    handle: PickleHandle = checkpoint.handle
    names: dict[str, str] = {}
    renames = by_table(changes.renames)
    for table in checkpoint.tables:
        wanted = renames.get(table.path, {})
        for key, new in wanted.items():
            names.setdefault(key, new)
        dropped = {key for path, key in changes.drops if path == table.path}
        owner = handle.found.owners.get(table.path)
        if id(owner) not in generated and (wanted or dropped):
            _edit_table(owner, wanted, dropped, edits)
    if names:
        _follow_names(handle, names, edits)
    if changes.entries:
        _drop_entries(handle.walked.root, changes.entries, edits)


def by_table(renames: Mapping[tuple[Path, str], str]) -> dict[Path, dict[str, str]]:
    """{table path: {old: new}}."""
    found: dict[Path, dict[str, str]] = {}
    for (path, key), new in renames.items():
        found.setdefault(path, {})[key] = new
    return found


def _edit_table(owner: Any, renames: Mapping[str, str], dropped: set[str], edits: Edits) -> None:
    rows = dict_items(owner)
    if rows is None:
        raise Unsupported("keys of this kind of table cannot be edited in place")
    closes = _closers(owner) if dropped else {}
    cut: set[str] = set()
    for key, _, start, _, end in rows:
        name = key_text(key)
        if name in cut:
            raise Unsupported("two keys that read the same, one of them no text", key=name)
        if name in dropped:
            cut.add(name)
            edits.deletions.append(_item_span(owner, start, end, closes))
        elif name in renames and text_of(key) is not None:  # a number keeps its place
            edits.strings[start] = renames[name]
    if renames:
        keys = [text_of(row[0]) or "" for row in rows]
        _rename_metadata(owner, renames, [key for key in keys if key not in dropped], edits)


def _drop_entries(root: Any, names: frozenset[str], edits: Edits) -> None:
    """Cut top-level entries."""
    closes = _closers(root)
    for key, _, start, _, end in dict_items(root) or ():
        if text_of(key) in names:
            edits.deletions.append(_item_span(root, start, end, closes))


def _rename_metadata(owner: Any, renames: Mapping[str, str], keys: list[str], edits: Edits) -> None:
    """`_metadata` goes by module paths; its entries follow their keys (formats 4.7)."""
    node = (state_items(owner) or {}).get("_metadata") if type(owner) is Obj else None
    rows = dict_items(node)
    if not rows:
        return
    moved, dropped = metadata_renames([text_of(row[0]) or "" for row in rows], renames, keys)
    closes = _closers(node) if dropped else {}
    for key, _, start, _, end in rows:
        path = text_of(key)
        if path in dropped:
            edits.deletions.append(_item_span(node, start, end, closes))
        elif path in moved:
            edits.strings[start] = moved[path]


def _closers(node: Any) -> dict[int, int]:
    """Where an item ends with an opcode of its own (SETITEM), the end with it."""
    ends: dict[int, int] = {}
    for owner in (node, *(items_of(node.args) or () if type(node) is Obj else ())):
        if type(owner) in (Box, Obj):
            for batch in owner.batches or ():
                if batch.op in (0x73, 0x61):
                    ends[batch.end] = batch.end + 1
    return ends


def _item_span(node: Any, start: int, end: int, closes: Mapping[int, int]) -> tuple[int, int]:
    """All bytes of the item whose key starts at `start`; Python 2 lists items as [key, value],
    and the whole inner list goes.
    """
    args = items_of(node.args) if type(node) is Obj else None
    if args and type(args[0]) is Box:
        for _, at, stop in elements(args[0]):
            if at <= start < stop:
                return at, closes.get(stop, stop)
    return start, closes.get(end, end)


def _follow_names(handle: PickleHandle, names: Mapping[str, str], edits: Edits) -> None:
    """Optimizers that go by name: `param_names`, and state or params keyed by key."""
    states: set[int] = set()  # optimizers may share one
    for node in _optimizers(handle):
        rows = {text_of(key): value for key, value, *_ in dict_items(node) or ()}
        state = rows["state"]
        if id(state) not in states:
            states.add(id(state))
            for key, _, start, _, _ in dict_items(state) or ():
                if (name := text_of(key)) in names:
                    edits.strings[start] = names[name or ""]
        groups = rows["param_groups"]
        for group, *_ in elements(groups) if type(groups) is Box else ():
            for key, value, *_ in dict_items(group) or ():
                if text_of(key) in ("param_names", "params") and type(value) is Box:
                    for item, start, _ in elements(value):
                        if (name := text_of(item)) in names:
                            edits.strings[start] = names[name or ""]


def _optimizers(handle: PickleHandle) -> Iterator[Any]:
    """Every dict with `state` and `param_groups`, wherever it stands."""
    seen: set[int] = set()
    stack: list[Any] = [handle.walked.root]
    while stack:
        node = stack.pop()
        if type(node) not in (Box, Obj, Tup) or id(node) in seen:
            continue
        seen.add(id(node))
        if type(node) is Obj and handle.reader.tensor(node) is not None:
            continue
        rows = dict_items(node)
        if rows and is_optimizer(rows):
            yield node
        else:
            stack.extend(children(node))
