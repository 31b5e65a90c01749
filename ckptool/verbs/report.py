"""An inspection as plain data: JSON schema 1, and what the screens need beside it.

Knows: the schema. Must not know: how it is shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Checkpoint, Extra, Match, Note, Table, Tensor
from ckptool.formats import TITLES
from ckptool.formats.collector import paused
from ckptool.formats.judge import CODE
from ckptool.verbs.numbering import parameter_count

if TYPE_CHECKING:
    from ckptool.verbs.fitting import Fit
    from ckptool.verbs.stats import Measurement


@dataclass(frozen=True, slots=True)
class Inspection:
    """What `inspect` found. `shown` is the table asked for, `rows` its selected tensors, `fit`
    what a model says of it, where one was asked, `measured` what was told of the numbers of `rows`.
    """

    checkpoint: Checkpoint
    shown: Table | None
    rows: tuple[Tensor, ...]
    row_total: int
    notes: tuple[Note, ...]
    wrappers: tuple[tuple[str, int, int], ...]
    index: dict[str, str] = field(default_factory=dict)
    fit: Fit | None = None
    measured: Measurement | None = None

    @property
    def match(self) -> Match | None:
        """Torch's missing, unexpected and mismatched keys as the file stands, with the cause in
        a sentence and the command that mends it; None where no model was asked.
        """
        if self.fit is None:
            return None
        return self.fit.cause.match._replace(cause=self.fit.cause.sentence, fix=self.fit.command)

    @property
    def could_run_code(self) -> bool:
        """Whether loading the file with torch.load(weights_only=False) could run code."""
        return could_run_code(self.checkpoint)

    def to_dict(self) -> dict[str, Any]:
        """JSON schema 1 of the command line, with what the screens need beside it."""
        return report(self)


def could_run_code(checkpoint: Checkpoint) -> bool:
    """Whether the file names anything that could run code when it is loaded."""
    return any(row.verdict == CODE for row in checkpoint.globals)


def headline(checkpoint: Checkpoint, shown: Table | None) -> dict[str, Any]:
    """The part of `report` that says in a line what the file is."""
    counted = shown.tensors if shown is not None else checkpoint.tensors
    weights = checkpoint.weights
    return {
        "schema": 1,
        "file": checkpoint.file,
        "format": checkpoint.format,
        "title": title_of(checkpoint),
        "size_bytes": checkpoint.size_bytes,
        "tensor_count": len(counted),
        "parameter_count": parameter_count(shown) if shown is not None else 0,
        "weights": None if weights is None else list(checkpoint.tables[weights].path),
        "dtypes": _counts(t.dtype.name for t in counted if t.dtype),
        "devices": _counts(t.device for t in counted),
        "could_run_code": could_run_code(checkpoint),
    }


@paused()
def report(found: Inspection) -> dict[str, Any]:
    """The whole object; `shown` says how many rows a limit left."""
    checkpoint = found.checkpoint
    result = headline(checkpoint, found.shown)
    result |= {
        "tables": [_table(table, found) for table in checkpoint.tables],
        "extras": [_extra(extra, checkpoint) for extra in checkpoint.extras],
        "globals": [
            {"name": g.name, "verdict": g.verdict, "offset": g.offset, "member": g.member}
            for g in checkpoint.globals[:1000]
        ],
        "wrappers": [{"name": n, "count": c, "of": of} for n, c, of in found.wrappers],
        "notes": [{"slug": n.slug, "text": n.text, "command": n.command} for n in found.notes],
    }
    if found.fit is not None:
        result["match"] = found.fit.to_dict()
    if len(found.rows) < found.row_total:
        result["shown"] = {"total": found.row_total, "shown": len(found.rows)}
    return result


def title_of(checkpoint: Checkpoint) -> str:
    """The container in words: `PyTorch zip`; a folder's reader may know more of it."""
    words = getattr(checkpoint.handle, "title", None) or TITLES[checkpoint.format]
    return f"{words}, big-endian" if "big-endian" in checkpoint.traits else words


def _counts(words: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return counts


def _table(table: Table, found: Inspection) -> dict[str, Any]:
    selected = table is found.shown
    rows = found.rows if selected else table.tensors
    tensors = [_tensor(t, found.index.get(t.key) if selected else None) for t in rows]
    if found.measured is not None and selected:
        for tensor, row in zip(tensors, found.measured.rows, strict=True):
            tensor.update(found.measured.of(row))
    return {
        "path": list(table.path),
        "kind": table.kind,
        "class_name": table.class_name,
        "size_bytes": stored_bytes(table.tensors),
        "selected": selected,
        "metadata": dict(table.metadata) if table.metadata else None,
        "tensors": tensors,
    }


def _tensor(tensor: Tensor, index: str | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "key": tensor.key,
        "shape": None if tensor.shape is None else list(tensor.shape),
        "dtype": tensor.dtype.name if tensor.dtype else None,
        "device": tensor.device,
        "stride": None if tensor.stride is None else list(tensor.stride),
        "offset": tensor.offset,
        "storage": tensor.storage.key if tensor.storage else None,
        "size_bytes": tensor.size_bytes,
        "requires_grad": tensor.requires_grad,
        "kind": tensor.kind,
    }
    if index is not None:
        row["index"] = index
    return row


def _extra(extra: Extra, checkpoint: Checkpoint) -> dict[str, Any]:
    inside = [t for t in checkpoint.tensors if t.path[: len(extra.path)] == extra.path]
    return {
        "path": list(extra.path), "type": extra.type, "value": extra.value, "text": extra.text,
        "size_bytes": stored_bytes(tuple(inside)),
    }  # fmt: skip


def stored_bytes(tensors: tuple[Tensor, ...]) -> int:
    """Bytes of the storages that these tensors need, each counted once."""
    return sum({t.storage.key: t.storage.size_bytes for t in tensors if t.storage}.values())
