"""Which module writes a container, from what.

Knows: the writers of `FORMATS`, that what is no pickle is written afresh. Must not know: verbs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ckptool.checkpoint import Changes, Checkpoint
from ckptool.errors import Unsupported
from ckptool.formats import FORMATS, TITLES
from ckptool.formats.assemble import PickleHandle
from ckptool.limits import Limits
from ckptool.places import Source
from ckptool.plans import Plan

_WRITERS = {row.name: row.writer for row in FORMATS if row.writer}


def write(
    checkpoint: Checkpoint, changes: Changes, target: str, shard_bytes: int = 0
) -> tuple[Plan, Any]:
    """The Plan that writes the container `target` (shards: of at most `shard_bytes`), and what
    it changes. Raises Unsupported for what cannot be written.
    """
    if target == "hf-shards":
        from ckptool.formats import hf_shards_edit

        return hf_shards_edit.write(checkpoint, changes, shard_bytes)
    if target == "dcp":
        from ckptool.formats import dcp_edit

        return dcp_edit.write(checkpoint, changes)
    if target not in _WRITERS:
        raise Unsupported(f"a {TITLES.get(target, target)} cannot be written", path=checkpoint.file)
    if target != "safetensors" and not _is_pickled(checkpoint):
        from ckptool.formats import fresh

        return fresh.write(checkpoint, changes, target)
    plan, made = import_module(f"ckptool.formats.{_WRITERS[target]}").write(checkpoint, changes)
    return plan, made


def confirm(
    checkpoint: Checkpoint, made: Any, target: str, written: Source, limits: Limits, name: str = ""
) -> None:
    """Raise CkptError unless `written` (output `name` of the plan) is what `write` planned, read
    back from its bytes.
    """
    if target == "hf-shards":
        from ckptool.formats import hf_shards_edit

        hf_shards_edit.confirm(checkpoint, made, written, limits, name)
    elif target == "dcp":
        from ckptool.formats import dcp_edit

        dcp_edit.confirm(checkpoint, made, written, limits, name)
    elif target != "safetensors" and not _is_pickled(checkpoint):
        from ckptool.formats import fresh

        fresh.confirm(checkpoint, made, written, limits)
    else:
        writer = import_module(f"ckptool.formats.{_WRITERS[target]}")
        writer.confirm(checkpoint, made, written, limits)


def _is_pickled(checkpoint: Checkpoint) -> bool:
    return isinstance(checkpoint.handle, PickleHandle)
