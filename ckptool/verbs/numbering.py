"""Which tensors of a state_dict are parameters, and their numbers in list(net.parameters()).

Knows: that a state_dict does not say it; Parameters and optimizers do. Must not know: printing.
"""

from __future__ import annotations

from ckptool.checkpoint import FLAGGED, Checkpoint, Note, Table, Tensor

_BUFFERS = frozenset(("running_mean", "running_var", "num_batches_tracked", "position_ids",
                      "total_ops", "total_params", "n_averaged", "relative_position_index",
                      "attn_mask", "anchors", "anchor_grid"))  # fmt: skip
_COUNTED = ("float", "complex")


def candidates(table: Table) -> list[Tensor]:
    """Tensors that are, or may be, parameters; a tied one counts once."""
    known = [t for t in table.tensors if t.kind in ("parameter", "uninitialized")]
    if not known:
        known = [t for t in table.tensors if _may_be(t)]
    seen: set[object] = set()
    once = []
    for tensor in known:
        place = tie_of(tensor)
        if place is None or place not in seen:
            seen.add(place)
            once.append(tensor)
    return once


def _may_be(tensor: Tensor) -> bool:
    leaf = tensor.key.rpartition(".")[2]
    return tensor.dtype is not None and tensor.dtype.kind in _COUNTED and leaf not in _BUFFERS


def tie_of(tensor: Tensor) -> tuple[object, ...] | None:
    """What two names of one tensor have in common; None for tensors without bytes."""
    if tensor.storage is None or not tensor.count:
        return None
    flag = tensor.kind if tensor.kind in FLAGGED else ""
    return tensor.storage.key, tensor.offset, tensor.shape, tensor.stride, tensor.dtype, flag


def parameter_count(table: Table) -> int:
    """Elements of all parameters, as well as a state_dict can say."""
    return sum(tensor.count for tensor in candidates(table))


def numbered(checkpoint: Checkpoint, table: Table) -> tuple[dict[str, str], tuple[Note, ...]]:
    """{key: '12' or '12?'} and, for the question marks, a note that says why."""
    found = candidates(table)
    sure = any(t.kind == "parameter" for t in found) or _optimizer_agrees(checkpoint, len(found))
    mark = "" if sure else "?"
    rows = {tensor.key: f"{i}{mark}" for i, tensor in enumerate(found)}
    if sure:
        return rows, ()
    text = "numbers carry a '?': a state_dict does not say which tensors are parameters and which are buffers"
    return rows, (Note("index-unsure", text),)


def _optimizer_agrees(checkpoint: Checkpoint, count: int) -> bool:
    for extra in checkpoint.extras:
        if extra.type == "optimizer" and isinstance(extra.value, dict):
            groups = extra.value["groups"]
            if sum(group.get("params_count", 0) for group in groups) == count:
                return True
    return False
