"""What torch.load would say of a file: whether its default reads it, and what stands in the way.

Knows: torch's two loaders. Must not know: printing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ckptool.checkpoint import UNTYPED, Checkpoint, Global, Path
from ckptool.formats.assemble import PickleHandle
from ckptool.formats.audit_pickle import Refusal, refusals
from ckptool.formats.judge import CODE, KNOWN
from ckptool.verbs.restricted import ALLOWED


class Blocker(NamedTuple):
    """One thing that torch.load(weights_only=True) stops at: a class or function by `name` with
    the `verdict` of the judge, or (no name) something in the pickle, in words. `offset` is the
    byte of `member`, `path` the place in the object where it is known.
    """

    name: str | None
    verdict: str
    offset: int | None
    member: str
    path: Path | None = None
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        path = None if self.path is None else list(self.path)
        return {**self._asdict(), "path": path}


class Loading(NamedTuple):
    """`weights_only` says whether torch.load's default accepts the file's pickle (None: torch.load
    is not what reads this container, `text` says what is); `blockers` are all that it refuses,
    in file order.
    """

    weights_only: bool | None
    text: str
    blockers: tuple[Blocker, ...] = ()


_OTHERS = {
    "torch-tar": (False, "torch.load needs weights_only=False for a tar of torch 0.1"),
    "torchscript": (False, "torch.load(weights_only=True) refuses TorchScript; torch.jit.load runs its code"),
    "torch-package": (None, "torch.package.PackageImporter reads it, and runs its code"),
    "torch-export": (None, "torch.export.load reads it"),
    "pickle": (None, "torch.load does not read a bare pickle; pickle.load does, and would call all it names"),
    "safetensors": (None, "nothing in it can run"),
}  # fmt: skip


def loading(checkpoint: Checkpoint) -> Loading:
    """What torch.load would say of a file that has been read."""
    if checkpoint.format in _OTHERS:
        weights_only, text = _OTHERS[checkpoint.format]
        strange = (row for row in checkpoint.globals if row.verdict != KNOWN)
        return Loading(weights_only, text, tuple(blocker(checkpoint, row) for row in strange))
    blockers = _named(checkpoint) + _unnamed(checkpoint)
    if not blockers:
        return Loading(True, "torch.load(weights_only=True) accepts it")
    return Loading(False, "torch.load(weights_only=True) refuses it", blockers)


def _named(checkpoint: Checkpoint) -> tuple[Blocker, ...]:
    """Names that the restricted loader does not allow, and all that could run code."""
    rows = (row for row in checkpoint.globals if row.name not in ALLOWED or row.verdict == CODE)
    return tuple(blocker(checkpoint, row) for row in rows)


def blocker(checkpoint: Checkpoint, row: Global) -> Blocker:
    """A name of the file with its place in the object."""
    handle = checkpoint.handle
    paths = handle.found.call_paths if isinstance(handle, PickleHandle) else {}
    detail = row.detail.partition(", while building")[0]
    return Blocker(row.name, row.verdict, row.offset, row.member, paths.get(row.offset), detail)


def _unnamed(checkpoint: Checkpoint) -> tuple[Blocker, ...]:
    legacy = checkpoint.format == "torch-legacy"
    member = "main pickle" if legacy else "data.pkl"
    rows = list(refusals(checkpoint.handle.walked))
    if legacy and not rows:
        others = (row for walked in checkpoint.handle.container.pickles for row in refusals(walked))
        rows += list(others)[:1]
    if legacy and any(storage.dtype is UNTYPED for storage in checkpoint.storages):
        text = "torch cannot load a legacy stream of this element type; from a zip it can"
        rows.append(Refusal(text, checkpoint.handle.walked.start))
    return tuple(Blocker(None, "refused", row.offset, member, None, row.text) for row in rows)
