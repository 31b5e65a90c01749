"""A DeepSpeed ZeRO checkpoint (stages 1, 2, 3): the fp32 weights that its ranks hold together.

Knows: which files belong together, and the order of the state_dict that DeepSpeed's own
zero_to_fp32.py makes of them. Must not know: what a file says (`zero_files`), how partitions lie
(`zero_join`), verbs. Nothing is unpickled, nothing is copied: a weight is spans of several files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from shlex import quote
from typing import NamedTuple, TypeVar

from ckptool.checkpoint import Checkpoint, Extra, Note, Storage, Table, Tensor
from ckptool.commands import convert_command
from ckptool.errors import CkptError, HeaderInvalid, LimitExceeded, SpecialFile, Unsupported
from ckptool.formats import read as read_file
from ckptool.formats.audit import Listed, Member, Records, records_of
from ckptool.formats.collector import paused
from ckptool.formats.judge import CODE
from ckptool.formats.layouts import tag_of
from ckptool.formats.moved import Verdicts
from ckptool.formats.runs import contiguous
from ckptool.formats.zero_files import (
    RANK_FILE,
    ModelState,
    OptimState,
    Shape,
    model_state,
    named,
    optim_state,
)
from ckptool.formats.zero_join import Joined, join_fragments, join_groups, join_partitions
from ckptool.limits import DEFAULT, Limits
from ckptool.places import Folder
from ckptool.spans import Address

NAME = "deepspeed-zero"
_State = TypeVar("_State")
_AGAIN = "copy what is missing into the folder"


class _Names(NamedTuple):
    """The files of one tag, by rank."""

    models: tuple[str, ...]
    optims: tuple[str, ...]


def read(folder: Folder, limits: Limits = DEFAULT, name: str | None = None) -> Checkpoint:
    """Read the checkpoint that `latest` names, or that lies right in `folder`; no numbers.

    One table: buffers in their own dtype, frozen parameters, then the fp32 parameters, shared
    names last. Raises SpecialFile for missing files, PathEscape for a tag that leads out,
    HeaderInvalid where files do not belong together, Unsupported for parallel models.
    """
    tag = tag_of(folder)
    inner = folder.below(tag) if tag else folder
    names = _names_in(inner)
    if len(names.models) + len(names.optims) > limits.shard_count:
        raise LimitExceeded("shard-count", f"{len(names.models):,} ranks", path=inner.path)
    files = _Files(inner, limits)
    with paused() as let_go:
        models = [files.add(file, model_state, let_go) for file in names.models]
        optims = [files.add(file, optim_state, let_go) for file in names.optims]
        stage, world = _agreed(inner, names, optims)
        try:
            rows = _state_dict(models, optims, stage)
        except CkptError as error:
            error.path = error.path or inner.path
            raise
    where = tag or os.path.basename(os.path.abspath(inner.path))
    title = f"DeepSpeed ZeRO-{stage}, {world} rank{'s' * (world != 1)}, {where}"
    table = Table((), tuple(rows.values()))
    return Checkpoint(
        file=folder.path, format=NAME, size_bytes=files.size_bytes, sources=tuple(files.sources),
        tables=(table,), weights=0, tensors=table.tensors, storages=_storages(table.tensors),
        extras=(*models[0].extras, *_optimizer(optims)), globals=tuple(files.verdicts.rows),
        notes=(*_notes(models, rows), *files.notes, *_offer(folder.path, files)),
        handle=Listed(title, files.records()),
    )  # fmt: skip


def _offer(path: str, files: _Files) -> tuple[Note, ...]:
    """What people look for who have such a folder."""
    if any(row.verdict == CODE for row in files.verdicts.rows):
        return ()
    name = (path.rstrip(os.sep) or path).removesuffix(".ckpt")
    text = (
        "torch.load opens no folder; the fp32 weights that DeepSpeed's zero_to_fp32.py would make"
    )
    return (Note("zero-folder", text, convert_command(path, f"-o {quote(name + '.safetensors')}")),)


# -- which files -------------------------------------------------------------------------------
def _names_in(folder: Folder) -> _Names:
    """All rank files. Raises SpecialFile where one is missing, Unsupported for other parallelism."""
    found: dict[str, dict[int, str]] = {"model": {}, "optim": {}}
    for name in folder.list():
        if not name.endswith(("_model_states.pt", "_optim_states.pt")):
            continue
        match = RANK_FILE.fullmatch(name)
        if match is None:
            what = f"'{name}': experts, layers or ranks beyond ZeRO's own"
            raise _parallel(folder, what)
        if int(match.group(2)):
            raise _parallel(folder, f"several model-parallel ranks ('{name}')")
        rank = int(match.group(1) or 0)
        other = found[match.group(3)].setdefault(rank, name)
        if other != name:
            raise HeaderInvalid(f"two files of rank {rank}: '{other}' and '{name}'", path=folder.path,
                                hint="remove the one of an older checkpoint")  # fmt: skip
    for kind, rows in found.items():
        if not rows:
            raise SpecialFile(f"no {kind}_states files", path=folder.path, hint=_AGAIN)
        missing = [rank for rank in range(max(rows, default=0) + 1) if rank not in rows]
        if missing:
            text = f"the {kind}_states file of rank {_some(missing)} is missing"
            raise SpecialFile(text, path=folder.path, hint=_AGAIN)
    models, optims = (tuple([rows[rank] for rank in sorted(rows)]) for rows in found.values())
    return _Names(models, optims)


def _parallel(folder: Folder, what: str) -> Unsupported:
    return Unsupported(
        f"a DeepSpeed checkpoint of a parallel model: {what}", path=folder.path,
        hint="join it with DeepSpeed's ds_to_universal.py; ckptool inspect reads each file alone",
    )  # fmt: skip


class _Files:
    """The files, read one after another."""

    def __init__(self, folder: Folder, limits: Limits) -> None:
        self._folder = folder
        self._limits = limits
        self._told: set[tuple[str, str]] = set()
        self.sources: list[Address] = []
        self.verdicts = Verdicts()
        self.notes: list[Note] = []
        self.size_bytes = 0
        self._members: dict[int, tuple[Member, ...]] = {}

    def add(
        self, name: str, read: Callable[[Checkpoint, int, Limits], _State], done: Callable[[], None]
    ) -> _State:
        """What `read` makes of one file; `done` is called when nothing else of it is needed."""
        found, number = self._read(name)
        state = read(found, number, self._limits)
        del found
        done()
        return state

    def _read(self, name: str) -> tuple[Checkpoint, int]:
        with self._folder.child(name) as source:
            found = read_file(source, self._limits)
            self.size_bytes += source.size
        self.verdicts.add(found.globals, name)
        for note in found.notes:
            if (note.slug, note.text) not in self._told:
                self.notes.append(note._replace(text=f"{name}: {note.text}"))
            self._told.add((note.slug, note.text))
        number = len(self.sources)
        self.sources += found.sources
        self._members[number] = records_of(found, name)
        return found, number

    def records(self) -> Records:
        """All records of all files."""
        return Records(self._members)


def _agreed(folder: Folder, names: _Names, optims: Sequence[OptimState]) -> tuple[int, int]:
    """Stage and number of ranks, which all files must say alike."""
    stages = sorted({state.stage for state in optims})
    if len(stages) > 1:
        raise HeaderInvalid(f"rank files of stages {_some(stages)} in one folder", path=folder.path,
                            hint="remove those of an older checkpoint")  # fmt: skip
    counts = sorted({count for state in optims for count in state.partition_counts})
    if len(counts) != 1:
        raise _parallel(folder, f"groups with {_some(counts)} partitions")
    if counts[0] != len(optims):
        raise SpecialFile(
            f"{counts[0]} ranks saved it, the optim_states files of {len(optims)} are there",
            path=folder.path, hint=_AGAIN if counts[0] > len(optims) else
            "remove those of an older checkpoint",
        )  # fmt: skip
    if stages[0] == 3 and len(names.models) not in (1, counts[0]):
        raise SpecialFile(
            f"{counts[0]} ranks saved it, the model_states files of {len(names.models)} are there",
            path=folder.path, hint=_AGAIN,
        )  # fmt: skip
    return stages[0], counts[0]


# -- the state_dict ----------------------------------------------------------------------------
def _state_dict(
    models: Sequence[ModelState], optims: Sequence[OptimState], stage: int
) -> dict[str, Tensor]:
    """Every tensor, in zero_to_fp32.py's order: what comes later replaces in place."""
    first = models[0]
    rows = {buffer.key: buffer for buffer in first.buffers}
    rows.update(_frozen(models, len(optims), stage))
    flat = [state.flat for state in optims]
    if stage == 3:
        merged = {name: shape for group in first.groups for name, shape in group.items()}
        joined = join_partitions(merged, flat)
    else:
        joined = join_groups(first.groups, flat, optims[0].paddings)
    rows.update({name: _tensor(name, row) for name, row in joined.items()})
    for name, owner in first.shared:
        if owner in rows:
            rows[name] = named(rows[owner], name)
    return rows


def _frozen(models: Sequence[ModelState], world: int, stage: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    shapes = models[0].frozen
    if stage == 3 and shapes and len(models) != world:
        raise SpecialFile("frozen parameters are in the model_states files of all ranks, and "
                          f"{len(models)} of {world} are there", hint=_AGAIN)  # fmt: skip
    for name, shape in shapes.items():
        parts = [
            m.fragments[name] for m in models[: None if stage == 3 else 1] if name in m.fragments
        ]
        if len(parts) != (world if stage == 3 else 1):
            raise HeaderInvalid("a frozen parameter without its numbers", key=name, hint=_AGAIN)
        if stage == 3:
            found[name] = _tensor(name, join_fragments(name, shape, parts))
            continue
        if parts[0].shape != shape:
            raise HeaderInvalid("a frozen parameter of another shape than is said", key=name)
        found[name] = named(parts[0], name)
    return found


def _tensor(name: str, row: Joined) -> Tensor:
    """A contiguous tensor over a storage of its own."""
    shape: Shape = row.shape
    size = sum(piece.span.size for piece in row.pieces)
    storage = Storage(f"fp32/{name}", row.dtype, size // row.dtype.size_bytes, "cpu", row.pieces)
    return Tensor(name, row.dtype, shape, contiguous(shape), 0, storage, False, path=(name,))


def _storages(tensors: Sequence[Tensor]) -> tuple[Storage, ...]:
    return tuple({t.storage.key: t.storage for t in tensors if t.storage is not None}.values())


# -- what is said ------------------------------------------------------------------------------
def _optimizer(optims: Sequence[OptimState]) -> list[Extra]:
    """One entry for the states of all ranks, which stay where they are."""
    names = optims[0].state_names
    value = {"files": len(optims), "names": list(names)}
    many = f"in {len(optims)} rank file{'s' * (len(optims) != 1)}"
    text = f"{', '.join(names)} {many}" if names else f"no state yet, {many}"
    return [Extra(("optimizer_states",), "dict", value, text)]


def _notes(models: Sequence[ModelState], rows: dict[str, Tensor]) -> list[Note]:
    notes = []
    half = [b.key for b in models[0].buffers if b.dtype and b.dtype.name in ("float16", "bfloat16")]
    if half:
        text = f"{len(half)} buffers as they were saved, in half precision ({_some(half)}); zero_to_fp32.py widens them: --dtype float32"
        notes.append(Note("half-buffers", text))
    lost = [f"{name} = {owner}" for name, owner in models[0].shared if owner not in rows]
    if lost:
        text = f"shared parameters whose owner is not there, left out: {_some(lost)}"
        notes.append(Note("shared-params-lost", text))
    return notes


def _some(rows: Sequence[object]) -> str:
    more = f" and {len(rows) - 4} more" if len(rows) > 4 else ""
    return ", ".join(map(str, rows[:4])) + more
