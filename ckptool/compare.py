"""What a file's keys are to a model: torch's missing, unexpected and mismatched keys, by record.

Knows: keys, shapes, versions of layers. Must not know: files, torch, load hooks of a model (but
for the one of BatchNorm), how to mend a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ckptool.checkpoint import Match, Mismatched, Wanted

COUNTER, _STATISTICS = "num_batches_tracked", "running_mean"
Shape = tuple[int, ...] | None
Matcher = Callable[
    [Sequence[Wanted], Mapping[str, Sequence[int] | None], Mapping[str, Any] | None], Match
]
"""What says which keys load: `match` below, or a model's own load hooks."""


def match(
    wanted: Sequence[Wanted],
    have: Mapping[str, Sequence[int] | None],
    metadata: Mapping[str, Any] | None = None,
) -> Match:
    """What `load_state_dict(strict=False)` of a plain net would say.

    `wanted` is the model's state_dict in order; `have` the file's entries in order, with their
    shapes in elements (None: no tensor, or one without a shape); `metadata` the file's
    `_metadata`. Missing keys come in the model's order, unexpected ones in the file's.
    """
    keys = {row.key for row in wanted}
    loaded: list[str] = []
    missing: list[str] = []
    mismatched: list[Mismatched] = []
    for row in wanted:
        if row.key not in have:
            if not is_forgiven(row.key, keys, metadata):
                missing.append(row.key)
            continue
        shape = shape_of(have[row.key])
        if takes(row.shape, shape):
            loaded.append(row.key)
        else:
            mismatched.append(Mismatched(row.key, shape, row.shape or ()))
    unexpected = tuple(key for key in have if key not in keys)
    return Match(tuple(loaded), tuple(missing), unexpected, tuple(mismatched))


def shape_of(shape: Sequence[int] | None) -> Shape:
    """A shape as a tuple."""
    return None if shape is None else tuple(shape)


def takes(model: Shape, file: Shape) -> bool:
    """Whether a model's tensor takes a file's of these shapes. None in the model takes anything;
    a scalar takes one element in one dimension, which torch 0.3 wrote for it.
    """
    return model is None or model == file or (model == () and file == (1,))


def is_forgiven(key: str, keys: Collection[str], metadata: Mapping[str, Any] | None) -> bool:
    """Whether torch starts a missing `key` of the model's `keys` by itself: the counter of a
    BatchNorm whose layer the file says to be older than version 2 (torch 0.4.1), or of which
    it says nothing.
    """
    module, _, leaf = key.rpartition(".")
    if leaf != COUNTER or f"{key[: -len(COUNTER)]}{_STATISTICS}" not in keys:
        return False
    version = version_of(module, metadata)
    return version is None or version < 2


def version_of(module: str, metadata: Mapping[str, Any] | None) -> float | None:
    """The version of a layer as `_metadata` has it; None where it has none. What is no number
    counts as the newest: torch would not forgive it.
    """
    entry = (metadata or {}).get(module)
    version = entry.get("version") if isinstance(entry, Mapping) else None
    if version is None:
        return None
    return version if isinstance(version, int | float) else float("inf")
