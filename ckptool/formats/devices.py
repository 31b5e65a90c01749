"""Device tags of storages, device arguments of rebuild functions, and what else names a device.

Knows: where a device stands in a pickle (formats 4.3). Must not know: containers, verbs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptool.checkpoint import Changes, Checkpoint, Path
from ckptool.errors import PickleInvalid
from ckptool.formats.assemble import PickleHandle
from ckptool.formats.dicts import dict_items, key_part
from ckptool.formats.measures import device_text, global_name, id_text
from ckptool.formats.rebuild import DEVICE_ARGUMENT
from ckptool.pickles.nodes import PAIR_OPS, Box, Obj, Tup, elements, items_of, text_of
from ckptool.pickles.splice import Edits, text_literal

Retagged = dict[tuple[str, str], int]
"""(old, new) -> how many."""


def retag(handle: PickleHandle, changes: Changes, edits: Edits, retagged: Retagged) -> None:
    """Edit the tag of every persistent id whose storage moves."""
    done: set[str] = set()
    for pers in handle.walked.persistent if changes.devices else ():
        items = items_of(pers.pid)
        if items is None or text_of(items[0]) != "storage":
            continue
        key = id_text(items[2]) or ""
        new, old = changes.devices.get(key), text_of(items[3])
        if new is None or old == new:
            continue
        edits.strings[pers.pid.starts[3]] = new
        if key not in done:
            done.add(key)
            change = (handle.reader.storages[key].device, new)
            retagged[change] = retagged.get(change, 0) + 1


def retag_arguments(
    handle: PickleHandle, changes: Changes, edits: Edits, retagged: Retagged
) -> None:
    """Edit the devices that rebuild functions are told."""
    for call in handle.walked.calls if changes.device_arguments else ():
        at = DEVICE_ARGUMENT.get(global_name(call.fn) or "")
        if at is not None:
            _retag_argument(call, at, changes.device_arguments, edits, retagged)


def _retag_argument(
    call: Obj, at: int, devices: Mapping[str, str], edits: Edits, retagged: Retagged
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
    retagged[change] = retagged.get(change, 0) + 1


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
            yield value, (*path, key_part(key) if type(key) is int else text_of(key) or "?")
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
