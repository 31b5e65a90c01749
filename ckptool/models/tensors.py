"""A checkpoint as torch tensors in the file's own nesting; nothing in it is unpickled.

Knows: which containers are built from a pickle's nodes and which from records alone, where what
is tagged so goes. Must not know: paths, models.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Any

from ckptool.models import torch_missing

try:
    import torch  # this room is imported only where torch is asked for
except (ImportError, OSError) as error:
    raise torch_missing(error) from error

from ckptool.checkpoint import Checkpoint, Storage, Table, Tensor
from ckptool.errors import KeyDuplicate, Unsupported, UsageError
from ckptool.formats.collector import paused
from ckptool.formats.dicts import dict_items, key_text
from ckptool.models.devices import check_device
from ckptool.models.tensors_kinds import BUILDERS
from ckptool.models.tensors_memory import Files, Memory
from ckptool.models.tensors_modules import state_rows
from ckptool.models.tensors_rebuild import Tensors
from ckptool.models.tensors_torch import calls, device_named, reference
from ckptool.models.tensors_values import Builder
from ckptool.pickles.nodes import Obj
from ckptool.places import Source

_PACKED = ("safetensors", "hf-shards")
_PICKLES = ("torch-zip", "torch-legacy", "torch-tar", "pickle", "dcp", "torch-unpacked")
_CPU = torch.device("cpu")


def find_device(device: Any) -> torch.device | None:
    """The torch.device of `cuda:1`, 1 or a torch.device; None for None: as the file says.

    Raises UsageError, saying what is visible, where it does not exist.
    """
    if device is None:
        return None
    if type(device) is int:
        device = f"cuda:{device}"
    name = str(device)
    check_device(name)
    found = device_named(name)
    if found is None:
        raise UsageError(f"torch knows no device {name!r}", hint="such as cpu, cuda:0, mps, meta")
    return found


class Loader:
    """Values and tensors of one open checkpoint. `source` is its file (None: several, opened when
    they are read), `device` where tensors go (None: as the file says), `stays` are the keys of
    storages that stay on the CPU unless it is meta.

    What it gives is complete after `finish`. Errors are CkptErrors.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        source: Source | None,
        device: torch.device | None,
        *,
        stays: frozenset[str] = frozenset(),
        check: bool = True,
    ) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._stays = stays if device is None or device.type != "meta" else frozenset()
        self._tags: dict[str, torch.device] = {}
        pickled = checkpoint.format in _PICKLES
        handle = checkpoint.handle
        memory = Memory(
            checkpoint.storages,
            Files(checkpoint.sources, source, checkpoint.format in _PACKED),
            self._place,
            check=check,
            inline=getattr(handle.container, "inline", None) if pickled else None,
            labels=_labels(checkpoint),
        )
        self._tensors = Tensors(handle.reader if pickled else None, memory, self._put, BUILDERS)
        self._builder: Builder | None = None
        if pickled:
            known = calls(self._tensors)
            self._builder = Builder(handle.walked, known, reference, self._tensors.special)

    @property
    def modules(self) -> tuple[str, ...]:
        """Classes of the pickled modules that came as their state_dicts."""
        return tuple(self._tensors.modules)

    def finish(self) -> None:
        """Read all that was asked for."""
        self._tensors.finish()

    # -- where -------------------------------------------------------------------------------
    def _place(self, storage: Storage) -> torch.device:
        return _CPU if storage.key in self._stays else self._put(storage.device)

    def _put(self, tag: str) -> torch.device:
        """Where what is tagged so goes. Raises UsageError for a tag of no device here."""
        if self._device is not None:
            return self._device
        found = self._tags.get(tag)
        if found is None:
            try:
                found = find_device(tag) or _CPU
            except UsageError as error:
                error.text = f"the file says '{tag}': {error.text}"
                error.hint = "give the device to load to, such as device='cpu'"
                raise
            self._tags[tag] = found
        return found

    # -- what --------------------------------------------------------------------------------
    def nesting(self) -> Any:
        """The object in the file: a pickle's own nesting, else its one state_dict."""
        if self._builder is not None:
            return self.value(self._checkpoint.handle.walked.root)
        tables = self._checkpoint.tables
        if len(tables) != 1:
            text = f"a {self._checkpoint.format} file with {len(tables)} objects"
            raise Unsupported(text, hint="see them with ckptool inspect")
        made = self.table(tables[0])
        return made if hasattr(made, "_metadata") else dict(made)

    def value(self, node: Any) -> Any:
        """The value of a node of the pickle."""
        assert self._builder is not None
        with paused():
            return self._builder.value(node)

    def table(self, table: Table, only: Collection[str] | None = None) -> OrderedDict[str, Any]:
        """One state_dict: tensors, and what stands beside them; arrays become tensors. `only`:
        these keys of it.
        """
        made: OrderedDict[str, Any] = OrderedDict()
        owner = self._checkpoint.handle.found.owners.get(table.path) if self._builder else None
        if owner is None:
            for record in table.tensors:
                if only is None or record.key in only:
                    made[record.key] = self._tensors.of_record(record)
        else:
            for key, node in node_rows(table, owner):
                if only is None or key in only:
                    made[key] = node
            values = self._several(list(made.values()))
            made.update(zip(made, map(_as_tensor, values), strict=True))
        if table.metadata is not None:
            layers = OrderedDict((path, dict(row)) for path, row in table.metadata.items())
            made._metadata = layers  # type: ignore[attr-defined]
        return made

    def _several(self, nodes: list[Any]) -> list[Any]:
        assert self._builder is not None
        with paused():
            return [self._builder.value(node) for node in nodes]

    def tensor(self, table: Table, record: Tensor) -> torch.Tensor:
        """One tensor of a table."""
        owner = self._checkpoint.handle.found.owners.get(table.path) if self._builder else None
        if owner is not None:
            for key, node in node_rows(table, owner):
                if key == record.key:
                    found = _as_tensor(self.value(node))
                    if isinstance(found, torch.Tensor):
                        return found
        return self._tensors.of_record(record)


def node_rows(table: Table, owner: Any) -> Iterator[tuple[str, Any]]:
    """(key, node) of the entries of a state_dict or of a pickled module's. Raises KeyDuplicate."""
    if table.kind == "module" and type(owner) is Obj:
        yield from state_rows(owner)
        return
    nodes: dict[str, Any] = {}
    for key, node, *_ in dict_items(owner) or ():
        name = key_text(key)
        if nodes.setdefault(name, node) is not node:
            raise KeyDuplicate("a key stands twice in one dict", key=name)
    yield from nodes.items()


def _as_tensor(value: Any) -> Any:
    if type(value).__module__ != "numpy":
        return value
    import numpy as np

    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiubc":
        return value
    return torch.from_numpy(value.astype(value.dtype.newbyteorder("="), copy=False))


def _labels(checkpoint: Checkpoint) -> dict[str, str]:
    """What errors call a storage: the place of the first tensor over it."""
    found: dict[str, str] = {}
    for tensor in checkpoint.tensors:
        if tensor.storage is not None:
            found.setdefault(tensor.storage.key, ".".join(map(str, tensor.path)) or tensor.key)
    return found
