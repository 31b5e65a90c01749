"""A Megatron-LM checkpoint: one file a rank, listed side by side.

Knows: the names of folders and files (Megatron-LM, megatron/training/checkpointing.py,
`get_checkpoint_name`). Must not know: how ranks are joined: that is a matter of each layer, so
this is inspect only.
"""

from __future__ import annotations

import os
import re
from math import prod
from typing import Any

from ckptool.checkpoint import Checkpoint, Extra, Note, Path, Table, Tensor
from ckptool.errors import HeaderInvalid, LimitExceeded, SpecialFile, UsageError
from ckptool.formats import read as read_file
from ckptool.formats.assemble import PickleHandle
from ckptool.formats.audit import Listed, Member, Records, records_of
from ckptool.formats.collector import paused
from ckptool.formats.dicts import dict_items, state_items
from ckptool.formats.layouts import ITERATION, pointer
from ckptool.formats.measures import evolve
from ckptool.formats.moved import Moved, Verdicts
from ckptool.limits import DEFAULT, Limits
from ckptool.pickles.nodes import Obj, text_of
from ckptool.places import Folder, is_plain_name
from ckptool.spans import Address

NAME = "megatron"
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_SIZES = (("tp", "tensor_model_parallel_size"), ("pp", "pipeline_model_parallel_size"),
          ("ep", "expert_model_parallel_size"))  # fmt: skip


def read(folder: Folder, limits: Limits = DEFAULT, name: str | None = None) -> Checkpoint:
    """Read every rank of the iteration that is named, or that `folder` is; no numbers.

    Each table's path begins with the folder of its rank. Raises SpecialFile for an iteration that
    is not there, HeaderInvalid for a folder of none.
    """
    inner = _iteration(folder)
    ranks = _ranks(inner)
    if len(ranks) > limits.shard_count:
        raise LimitExceeded("shard-count", f"{len(ranks):,} ranks", path=inner.path)
    found = _Ranks(limits)
    with paused() as let_go:
        for rank, file in ranks:
            found.add(inner.below(rank), rank, file)
            let_go()
    sizes = ", ".join(f"{word} {found.sizes[name]}" for word, name in _SIZES if name in found.sizes)
    many = f"{len(ranks)} rank{'s' * (len(ranks) != 1)}" + (f" ({sizes})" if sizes else "")
    where = os.path.basename(os.path.abspath(inner.path))
    return Checkpoint(
        file=folder.path, format=NAME, size_bytes=found.size_bytes, sources=tuple(found.sources),
        tables=tuple(found.tables), weights=found.weights, tensors=tuple(found.tensors),
        storages=tuple(found.storages), extras=tuple(found.extras), globals=tuple(found.verdicts.rows),
        notes=(*_notes(ranks, found.sizes), *found.notes),
        handle=Listed(f"Megatron, {many}, {where}", found.records()),
        traits=frozenset(("inspect-only",)),
    )  # fmt: skip


# -- which files -------------------------------------------------------------------------------
def _iteration(folder: Folder) -> Folder:
    """The folder of the iteration that the pointer file names; `folder` where there is none."""
    if ITERATION not in folder.list():
        return folder
    text = pointer(folder, ITERATION)
    name = f"iter_{int(text):07d}" if text.isascii() and text.isdigit() and len(text) < 20 else text
    if name not in folder.folders():
        if not is_plain_name(name):
            folder.below(name)  # raises
        raise SpecialFile(f"'{ITERATION}' names '{text}', and there is no folder '{name}'",
                          path=folder.path, hint="copy it too")  # fmt: skip
    inner = folder.below(name)
    if ".metadata" in inner.list():
        raise UsageError(
            f"a Megatron folder whose '{name}' is a distributed checkpoint (DCP)",
            path=folder.path, hint=f"give {inner.path}",
        )  # fmt: skip
    return inner


def _ranks(folder: Folder) -> list[tuple[str, str]]:
    """(folder, file) of every rank, by its numbers."""
    rows = []
    for name in folder.folders():
        match = _RANK.fullmatch(name)
        files = folder.below(name).list() if match else []
        file = next((file for file in _FILES if file in files), None)
        if match and file:
            rows.append(([int(part) for part in match.groups(default="0")], name, file))
    if not rows:
        raise HeaderInvalid(
            f"a Megatron folder without ranks: no mp_rank_XX/{_FILES[0]}", path=folder.path,
            hint="copy the folder again",
        )  # fmt: skip
    return [(name, file) for _, name, file in sorted(rows)]


# -- ranks side by side ------------------------------------------------------------------------
class _Ranks:
    """What was read of the ranks so far."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._members: dict[int, tuple[Member, ...]] = {}
        self.sizes: dict[str, int] = {}
        self.size_bytes = 0
        self.weights: int | None = None
        self.sources: list[Address] = []
        self.tables: list[Table] = []
        self.tensors: list[Tensor] = []
        self.storages: list[Any] = []
        self.extras: list[Extra] = []
        self.verdicts = Verdicts()
        self.notes: list[Note] = []

    def add(self, folder: Folder, rank: str, file: str) -> None:
        """One rank's file."""
        with folder.child(file) as source:
            found = read_file(source, self._limits)
            self.size_bytes += source.size
        first, number = not self.sources, len(self.sources)
        moved = Moved(number)
        if first:
            self.sizes = _sizes(found)
            self.weights = found.weights
            self.extras += [e._replace(path=(rank, *e.path)) for e in found.extras]
        for table in found.tables:
            tensors = [_under(rank, t) for t in moved.tensors(table.tensors)]
            self.tables.append(table._replace(path=(rank, *table.path), tensors=tuple(tensors)))
        self.tensors += [_under(rank, t) for t in moved.tensors(found.tensors)]
        self.storages += [moved.storage(storage) for storage in found.storages]
        self.verdicts.add(found.globals, f"{rank}/{file}")
        self.notes += [n._replace(text=f"{rank}: {n.text}") for n in found.notes if first]
        self.sources += found.sources
        self._members[number] = records_of(found, f"{rank}/{file}")

    def records(self) -> Records:
        """All records of all files."""
        return Records(self._members)


def _under(rank: str, tensor: Tensor) -> Tensor:
    path: Path = (rank, *tensor.path)
    return evolve(tensor, path=path)


def _sizes(found: Checkpoint) -> dict[str, int]:
    """The parallel sizes among the arguments that the first rank was started with."""
    if not isinstance(found.handle, PickleHandle):
        return {}
    rows = dict_items(found.handle.walked.root) or []
    args = next((value for key, value, *_ in rows if text_of(key) == "args"), None)
    said = state_items(args) if type(args) is Obj else None
    return {name: n for _, name in _SIZES if type(n := (said or {}).get(name)) is int}


def _notes(ranks: list[tuple[str, str]], sizes: dict[str, int]) -> list[Note]:
    notes: list[Note] = []
    wanted = prod(max(sizes.get(name, 1), 1) for _, name in _SIZES)
    if sizes and wanted != len(ranks):
        text = f"its arguments ask for {wanted} ranks, {len(ranks)} are there"
        notes.append(Note("megatron-ranks-missing", text))
    return notes
