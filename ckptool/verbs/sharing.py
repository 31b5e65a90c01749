"""Names that DeepSpeed left to others: `shared_params` beside the weights of a rank.

Knows: which names of the `module` those are. Must not know: containers, how tensors are written.
"""

from __future__ import annotations

from ckptool.checkpoint import Checkpoint, Note, Table
from ckptool.formats.extras_full import full_extra
from ckptool.formats.measures import named
from ckptool.formats.wording import some
from ckptool.verbs.request import ONE_TABLE

_WEIGHTS, _SHARED, _MARK = "module", "shared_params", "ds_version"


def with_shared(checkpoint: Checkpoint, target: str) -> tuple[Checkpoint, tuple[Note, ...]]:
    """The checkpoint as a container of tensors alone gets it: each name of `shared_params` that
    `module` lacks is there as its owner's second name (deepspeed/utils/zero_to_fp32.py).
    """
    table = checkpoint.tables[checkpoint.weights] if checkpoint.weights is not None else None
    if target not in ONE_TABLE or table is None or table.path != (_WEIGHTS,):
        return checkpoint, ()
    filled, lost = _filled(table, _owners(checkpoint))
    added = [tensor.key for tensor in filled.tensors[len(table.tensors) :]]
    notes = []
    if added:
        text = f"DeepSpeed's {_SHARED} gives {some(added)}, as second names of what is there"
        notes.append(Note("shared-params", text))
    if lost:
        text = f"shared parameters whose owner is not there, left out: {some(lost)}"
        notes.append(Note("shared-params-lost", text))
    tables = tuple([filled if one is table else one for one in checkpoint.tables])
    return checkpoint._replace(tables=tables), tuple(notes)


def _owners(checkpoint: Checkpoint) -> dict[str, str]:
    """{name that is not stored: name that is}; empty where the file is not DeepSpeed's."""
    if (_MARK,) not in {extra.path for extra in checkpoint.extras}:
        return {}
    shared = full_extra(checkpoint, _SHARED)
    if shared is None or not isinstance(shared.value, dict):
        return {}
    return {name: owner for name, owner in shared.value.items() if isinstance(owner, str)}


def _filled(table: Table, owners: dict[str, str]) -> tuple[Table, list[str]]:
    """The table with what its own tensors can fill; `name = owner` of what they cannot."""
    rows = {tensor.key: tensor for tensor in table.tensors}
    taken = rows.keys() | {key for key, _ in table.others}
    lost = []
    for name, owner in owners.items():
        if name in taken:
            continue
        if owner in rows:
            rows[name] = named(rows[owner], name, (*table.path, name))
        else:
            lost.append(f"{name} = {owner}")
    added = [tensor for key, tensor in rows.items() if key not in taken]
    order = (*table.order, *(t.key for t in added)) if table.order else ()
    return table._replace(tensors=(*table.tensors, *added), order=order), lost
