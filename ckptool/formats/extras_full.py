"""All that stands beside the tensors, for who keeps it elsewhere.

Knows: where the entries are that no container of tensors holds. Must not know: which are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptool.checkpoint import Checkpoint, Extra
from ckptool.formats.assemble import PickleHandle
from ckptool.formats.dicts import dict_items, key_parts
from ckptool.formats.extras import ALL, Describer, top_extras


def full_extras(checkpoint: Checkpoint) -> tuple[Extra, ...]:
    """`Checkpoint.extras` without bounds, and the entries of its state_dicts that are no tensors;
    what was read without keeping a pickle's nodes is told as it was. Raises LimitExceeded.
    """
    handle = checkpoint.handle
    if not isinstance(handle, PickleHandle):
        return checkpoint.extras
    top = top_extras(handle.walked.root, handle.reader, checkpoint.tables, ALL)
    return (*top, *_inside(checkpoint, handle))


def full_extra(checkpoint: Checkpoint, name: str) -> Extra | None:
    """The entry of this name alone, without bounds; None where there is none. Raises LimitExceeded."""
    handle = checkpoint.handle
    if not isinstance(handle, PickleHandle):
        return next((extra for extra in checkpoint.extras if extra.path == (name,)), None)
    rows = dict_items(handle.walked.root) or []
    for part, (_, value, *_) in zip(key_parts(rows), rows, strict=True):
        if part == name:
            return Describer(handle.reader, ALL).extra(value, (name,))
    return None


def _inside(checkpoint: Checkpoint, handle: PickleHandle) -> Iterator[Extra]:
    describer = Describer(handle.reader, ALL)
    for table in checkpoint.tables:
        names = {key for key, _ in table.others} if table.path else frozenset()
        rows = dict_items(handle.found.owners.get(table.path)) or [] if names else []
        for part, (_, value, *_) in zip(key_parts(rows), rows, strict=True):
            if str(part) in names:
                yield describer.extra(value, (*table.path, part))
