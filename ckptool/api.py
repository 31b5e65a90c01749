"""The Python API: what the command line does, as functions with typed results.

Knows: verbs. Must not know: click; nothing here prints.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any

from ckptool.checkpoint import Checkpoint, Extra, Storage, Table, Tensor
from ckptool.errors import CkptError
from ckptool.formats import read
from ckptool.limits import DEFAULT, Limits
from ckptool.places import PlaceLike, Source, open_source
from ckptool.render import render
from ckptool.rules import Rule
from ckptool.verbs import convert as _converting
from ckptool.verbs import report as _reporting
from ckptool.verbs.convert import build_request, convert_place
from ckptool.verbs.inspect import Selection, inspect_place, inspect_source
from ckptool.verbs.tables import choose_table

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Inspection(_reporting.Inspection):
    """What `inspect` found; as text it is what the command prints."""

    def __str__(self) -> str:
        return render("table", self.to_dict())

    def _repr_html_(self) -> str:
        return render("html", self.to_dict())


@dataclass(frozen=True, slots=True)
class Conversion(_converting.Conversion):
    """What `convert` did; as text it is what the command prints."""

    def __str__(self) -> str:
        from ckptool.render.convert import convert_text

        return convert_text(self.to_dict())

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"


def _fields(result: Any) -> dict[str, Any]:
    """What a verb returned, for the same record with a look."""
    return {row.name: getattr(result, row.name) for row in fields(result)}


class TensorRecord:
    """One tensor of an open file: its facts at once, its numbers on demand."""

    __slots__ = ("_source", "tensor")

    def __init__(self, tensor: Tensor, source: Source) -> None:
        self.tensor = tensor
        self._source = source

    @property
    def key(self) -> str:
        """Its name in the state_dict."""
        return self.tensor.key

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Sizes in elements; None where the file does not say (nested, uninitialised)."""
        return self.tensor.shape

    @property
    def dtype(self) -> str | None:
        """Torch's name of the element type."""
        return self.tensor.dtype.name if self.tensor.dtype else None

    @property
    def device(self) -> str:
        """The location tag in the file."""
        return self.tensor.device

    @property
    def stride(self) -> tuple[int, ...] | None:
        """Steps in elements."""
        return self.tensor.stride

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements one after another."""
        return self.tensor.size_bytes

    @property
    def storage(self) -> Storage | None:
        """Where its bytes lie."""
        return self.tensor.storage

    @property
    def requires_grad(self) -> bool | None:
        """As recorded; None where the container does not say."""
        return self.tensor.requires_grad

    def __repr__(self) -> str:
        return (
            f"<{self.dtype} {list(self.shape or ())} on {self.device}, {self.size_bytes:,} bytes>"
        )


class Weights(Mapping[str, TensorRecord]):
    """The tensors of one state_dict by key, in file order."""

    def __init__(self, table: Table | None, source: Source) -> None:
        tensors = table.tensors if table is not None else ()
        self._rows = {tensor.key: TensorRecord(tensor, source) for tensor in tensors}

    def __getitem__(self, key: str) -> TensorRecord:
        return self._rows[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<{len(self)} tensors>"


class OpenCheckpoint:
    """An open file, read without its tensors; a context manager."""

    def __init__(self, source: Source, checkpoint: Checkpoint, limits: Limits) -> None:
        self._source = source
        self._checkpoint = checkpoint
        self._limits = limits

    @property
    def format(self) -> str:
        """The container: `torch-zip`, `torch-legacy`, `safetensors` …"""
        return self._checkpoint.format

    @property
    def tables(self) -> tuple[Table, ...]:
        """Every state_dict found."""
        return self._checkpoint.tables

    @property
    def extras(self) -> tuple[Extra, ...]:
        """The values beside the weights: epoch, optimizer, args."""
        return self._checkpoint.extras

    @property
    def weights(self) -> Weights:
        """The state_dict shown by default."""
        return self.at(None)

    def at(self, path: str | None) -> Weights:
        """The state_dict at a dotted path. Raises UsageError when there is none."""
        return Weights(choose_table(self._checkpoint, path), self._source)

    def inspect(self, **selection: Any) -> Inspection:
        """The same report as `ckptool.inspect`."""
        found = inspect_source(self._source, Selection(**selection), self._limits)
        return Inspection(**_fields(found))

    def close(self) -> None:
        """Close the file."""
        self._source.close()

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        checkpoint = self._checkpoint
        return f"<{checkpoint.format} {checkpoint.file!r}, {len(checkpoint.tensors)} tensors>"


def open(place: PlaceLike, *, limits: Limits = DEFAULT) -> OpenCheckpoint:  # noqa: A001 - the API's word
    """Open a path or a binary file object. Raises CkptError, naming the file."""
    source = open_source(place)
    try:
        return OpenCheckpoint(source, read(source, limits), limits)
    except BaseException:
        source.close()
        raise


def inspect(
    place: PlaceLike,
    *,
    at: str | None = None,
    only: Sequence[str] = (),
    drop: Sequence[str] = (),
    sort: str = "order",
    limit: int | None = None,
    index: bool = False,
    limits: Limits = DEFAULT,
) -> Inspection:
    """What is in a file: tables, values, wrappers, notes. Raises CkptError."""
    found = inspect_place(place, Selection(at, only, drop, sort, limit, index), limits)
    return Inspection(**_fields(found))


def convert(
    path: PathLike,
    output: PathLike | None = None,
    *,
    to_cpu: bool = False,
    to_gpu: int | None = None,
    map_location: Mapping[str, str] | None = None,
    strip_module: bool = False,
    add_module: bool = False,
    keep_module: bool = False,
    add_module_at: Sequence[str] = (),
    unwrap: bool = False,
    unwrap_at: Sequence[str] = (),
    at: Sequence[str] = (),
    keep_unknown: bool = False,
    check: bool = True,
    fsync: bool = True,
    force: bool = False,
    dry_run: bool = False,
    limits: Limits = DEFAULT,
) -> Conversion:
    """Write the same checkpoint with other devices or names; all else is kept to the byte.

    Without `output`, to_cpu writes `net.cpu.pth` and to_gpu=1 `net.cuda1.pth` beside the input.
    Raises CkptError; then nothing was written.
    """
    rules = [
        Rule(name)
        for name, wanted in (("strip-module", strip_module), ("unwrap", unwrap))
        if wanted
    ]
    rules += [Rule("unwrap-at", path_at) for path_at in unwrap_at]
    rules += [Rule("add-module-at", path_at) for path_at in add_module_at]
    rules += [Rule("add-module")] if add_module else []
    request = build_request(
        to_cpu=to_cpu, to_gpu=to_gpu, mapped=tuple((map_location or {}).items()), rules=tuple(rules),
        keep_module=keep_module, at=tuple(at), keep_unknown=keep_unknown, check=check, fsync=fsync,
        force=force, dry_run=dry_run,
    )  # fmt: skip
    target = None if output is None else os.fspath(output)
    return Conversion(**_fields(convert_place(os.fspath(path), target, request, limits)))


__all__ = [
    "CkptError", "Conversion", "Inspection", "OpenCheckpoint", "TensorRecord", "Weights",
    "convert", "inspect", "open",
]  # fmt: skip
