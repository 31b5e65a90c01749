"""Files of torch's HuggingFaceStorageWriter(save_distributed=True): each holds the slices of one rank.

Knows: their names (torch/distributed/checkpoint/_hf_utils.py of 2.13) and DCP_SHARDING_INFO, where
each slice begins. Must not know: files, verbs. How large the tensors are is written nowhere, so
that slices of missing ranks would not be missed: they are told of, not joined.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ckptool.checkpoint import Note
from ckptool.errors import Unsupported

_NAME = re.compile(r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors")
_INFO = "DCP_SHARDING_INFO"


def note_of(metadata: Mapping[str, str], path: str) -> tuple[Note, ...]:
    """What to know of one such file, by its `__metadata__` and its name."""
    if _INFO not in metadata:
        return ()
    slices = [key for key, row in _rows(metadata[_INFO]) if _begins_inside(row)]
    said = "torch.distributed.checkpoint wrote it for one rank:"
    if slices:
        more = f" and {len(slices) - 1:,} more are slices of larger tensors"
        which = more if len(slices) > 1 else " is a slice of a larger tensor"
        return (Note("rank-slices", f"{said} '{slices[0]}'{which}"),)
    if _NAME.fullmatch(os.path.basename(path)):
        return (Note("rank-slices", f"{said} its tensors may be the first slices of larger ones"),)
    return ()


def _rows(text: str) -> Iterable[tuple[str, Any]]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # anybody's text: then it says nothing
        return ()
    return found.items() if isinstance(found, dict) else ()


def _begins_inside(row: Any) -> bool:
    offsets = row.get("saved_offsets") if isinstance(row, dict) else None
    return isinstance(offsets, list) and any(type(n) is int and n > 0 for n in offsets)


def refusal(path: str, names: Iterable[str]) -> Unsupported | None:
    """The error for a folder of such files; None where there are not several."""
    found = [name for name in names if _NAME.fullmatch(name)]
    if len(found) < 2:
        return None
    return Unsupported(
        f"slices of {len(found)} ranks, which no index joins: '{found[0]}' …", path=path,
        hint="save them with enable_consolidation=True, or join them with torch's "
        "consolidate_safetensors_files",
    )  # fmt: skip
