"""Changes of keys and devices as edits of one pickle, made and checked.

Knows: where a state_dict's keys, its `_metadata`, optimizer names and device tags stand.
Must not know: containers, command lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptool.checkpoint import Changes, Checkpoint, Path
from ckptool.errors import KeyDuplicate, PickleInvalid, UnsafePickle, Unsupported
from ckptool.formats.assemble import PickleHandle
from ckptool.formats.dicts import dict_items, is_optimizer, state_items
from ckptool.formats.judge import CODE
from ckptool.formats.measures import device_text, global_name
from ckptool.formats.rebuild import DEVICE_ARGUMENT
from ckptool.pickles.check import check_rewrite
from ckptool.pickles.downgrade import add_spellings
from ckptool.pickles.nodes import (
    PAIR_OPS,
    Box,
    Obj,
    Tup,
    Walked,
    children,
    elements,
    items_of,
    text_of,
)
from ckptool.pickles.splice import Edits, splice, text_literal
from ckptool.pickles.walk import walk
from ckptool.rules import metadata_renames


@dataclass(slots=True)
class Rewritten:
    """The new pickle, and what was changed on the way: counts of tags by (old, new)."""

    data: bytes
    retagged: dict[tuple[str, str], int] = field(default_factory=dict)
    kept_protocol: str | None = None
    from_protocol: int | None = None


def rewrite(checkpoint: Checkpoint, changes: Changes) -> Rewritten:
    """Edit the checkpoint's pickle and prove the result.

    Raises UnsafePickle, KeyDuplicate, PickleInvalid or Unsupported; then nothing was made.
    """
    refuse_unsafe(checkpoint, changes)
    _refuse_duplicates(checkpoint)
    handle: PickleHandle = checkpoint.handle
    edits, result = Edits(), Rewritten(b"")
    _rename(checkpoint, changes, edits, result)
    _retag(handle, changes, edits, result)
    walked = handle.walked
    if walked.protocol >= 3:
        result.from_protocol = walked.protocol
        result.kept_protocol = add_spellings(walked, edits)
    result.data = _spliced(walked, edits, result)
    return result


def refuse_unsafe(checkpoint: Checkpoint, changes: Changes) -> None:
    """Our output never carries a call that could run code, unless that was asked for."""
    code = [g for g in checkpoint.globals if g.verdict == CODE]
    if code and not changes.keep_unknown:
        more = f" and {len(code) - 3} more" if len(code) > 3 else ""
        raise UnsafePickle(
            f"it could run code when loaded: {', '.join(g.name for g in code[:3])}{more}; nothing written",
            member=code[0].member,
            offset=code[0].offset,
            hint="--keep-unknown copies it as it is: the output is no safer than the input",
        )


def _refuse_duplicates(checkpoint: Checkpoint) -> None:
    for table in checkpoint.tables:
        for key in table.duplicate_keys:
            raise KeyDuplicate(
                "one dict sets this key more than once, readers disagree on which counts", key=key
            )


def _spliced(walked: Walked, edits: Edits, result: Rewritten) -> bytes:
    """Splice and prove; a protocol-2 spelling that cannot be emitted is given up alone."""
    try:
        data = splice(walked, edits)
    except PickleInvalid as error:
        if not edits.spellings:
            raise
        edits.spellings, edits.respell = {}, None
        result.kept_protocol = error.text
        data = splice(walked, edits)
    if edits:
        check_rewrite(walked, walk(data), edits)
    return data


# -- keys --------------------------------------------------------------------------------------
def _rename(checkpoint: Checkpoint, changes: Changes, edits: Edits, result: Rewritten) -> None:
    handle: PickleHandle = checkpoint.handle
    names: dict[str, str] = {}
    by_path: dict[Path, dict[str, str]] = {}
    for (path, key), new_key in changes.renames.items():
        by_path.setdefault(path, {})[key] = new_key
    for table in checkpoint.tables:
        renames = by_path.get(table.path)
        if not renames:
            continue
        owner = handle.found.owners.get(table.path)
        rows = dict_items(owner)
        if rows is None:
            raise Unsupported("keys of this kind of table cannot be renamed in place")
        for key, _, start, _, _ in rows:
            text = text_of(key)
            new = None if text is None else renames.get(text)  # a number is no empty name
            if new is not None:
                edits.strings[start] = new
        _rename_metadata(owner, renames, [text_of(row[0]) or "" for row in rows], edits)
        for key, new in renames.items():
            names.setdefault(key, new)
    if names:
        _follow_names(handle, names, edits)


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


# -- devices -----------------------------------------------------------------------------------
def _retag(handle: PickleHandle, changes: Changes, edits: Edits, result: Rewritten) -> None:
    if changes.devices:
        done: set[str] = set()
        for pers in handle.walked.persistent:
            items = items_of(pers.pid)
            if items is None or text_of(items[0]) != "storage":
                continue
            key = text_of(items[2]) or str(items[2])
            new, old = changes.devices.get(key), text_of(items[3])
            if new is None or old == new:
                continue
            edits.strings[pers.pid.starts[3]] = new
            if key not in done:
                done.add(key)
                change = (handle.reader.storages[key].device, new)
                result.retagged[change] = result.retagged.get(change, 0) + 1
    if changes.device_arguments:
        for call in handle.walked.calls:
            at = DEVICE_ARGUMENT.get(global_name(call.fn) or "")
            if at is not None:
                _retag_argument(call, at, changes.device_arguments, edits, result)


def _retag_argument(
    call: Obj, at: int, devices: Mapping[str, str], edits: Edits, result: Rewritten
) -> None:
    """The device that a rebuild function is told: a string, or a torch.device."""
    if type(call.args) is not Tup or len(call.args.items) <= at:
        raise PickleInvalid("a rebuild function with too few arguments", offset=call.end)
    node, start = call.args.items[at], call.args.starts[at]
    starts = call.args.starts
    end = starts[at + 1] if at + 1 < len(starts) else call.args.end
    old = text_of(node) or device_text(node)
    new = devices.get(old or "")
    if old is None or new is None or new == old:
        return
    if text_of(node) is not None:
        edits.strings[start] = new
    else:
        edits.values[start] = (end, _device_expression(new))
    change = (old, new)
    result.retagged[change] = result.retagged.get(change, 0) + 1


def _device_expression(device: str) -> bytes:
    """torch.device('cuda', 1) or torch.device('cpu') in protocol 2."""
    name, _, index = device.partition(":")
    args = text_literal(name)
    if index:
        return b"ctorch\ndevice\n" + args + b"K" + bytes((int(index) & 0xFF,)) + b"\x86R"
    return b"ctorch\ndevice\n" + args + b"\x85R"


def device_mentions(checkpoint: Checkpoint) -> list[tuple[Path, str]]:
    """Devices named elsewhere: strings and torch.device objects, which a conversion leaves."""
    import re

    looks = re.compile(r"(cuda|mps|xpu|hpu|npu|musa|mtia|xla|privateuseone)(:\d+)?$")
    handle: PickleHandle = checkpoint.handle
    found: list[tuple[Path, str]] = []
    seen: set[int] = set()
    stack: list[tuple[Any, Path]] = [(handle.walked.root, ())]
    while stack:
        node, path = stack.pop()
        if type(node) is str:
            if looks.match(node):
                found.append((path, node))
            continue
        if type(node) not in (Box, Obj, Tup) or id(node) in seen:
            continue
        seen.add(id(node))
        if type(node) is Obj:
            device = device_text(node)
            if device is not None and looks.match(device):
                found.append((path, device))
            if device is not None or handle.reader.tensor(node) is not None:
                continue
        stack.extend(reversed(list(_named_children(node, path))))
    return found


def _named_children(node: Any, path: Path) -> Iterator[tuple[Any, Path]]:
    rows = dict_items(node)
    if rows is not None:
        for key, value, *_ in rows:
            yield value, (*path, key if type(key) is int else text_of(key) or "?")
    if type(node) is Tup:
        yield from ((item, (*path, i)) for i, item in enumerate(node.items))
        return
    if rows is None:
        yield from ((value, (*path, i)) for i, (value, *_) in enumerate(elements(node)))
    if type(node) is Obj:
        yield from ((item, (*path, i)) for i, item in enumerate(items_of(node.args) or ()))
    if node.state is not None:
        inner = node.state.value
        if type(inner) is Box and any(batch.op in PAIR_OPS for batch in inner.batches):
            yield from _named_children(inner, path)
        else:
            yield inner, path
