"""Which tensors read a storage, by the names that people know them by.

Knows: where tensors stand, what a tensor is made of. Must not know: verbs, bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ckptool.checkpoint import Checkpoint, Path, Tensor
from ckptool.formats.assemble import PickleHandle
from ckptool.formats.discover import Discoverer
from ckptool.formats.measures import View
from ckptool.formats.torch_pickle import TensorReader
from ckptool.limits import DEFAULT
from ckptool.pickles.nodes import Box, Obj, Pers, Tup, children

_NODES = frozenset((Tup, Box, Obj, Pers))


def users_of(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """{storage key: names of the tensors that read it}: keys where they stand in the weights,
    dotted paths elsewhere.
    """
    found: dict[str, dict[str, None]] = {}
    names: dict[Path, str] = {}
    for tensor, name in named_tensors(checkpoint):
        names[tensor.path] = name
        if tensor.storage is not None:
            found.setdefault(tensor.storage.key, {})[name] = None
    for key, paths in _compound_users(checkpoint, found).items():
        for path in paths:
            found.setdefault(key, {})[names.get(path) or ".".join(map(str, path))] = None
    return {key: tuple(rows) for key, rows in found.items()}


def lost_tensors(checkpoint: Checkpoint, lost: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """(name, what became of it) of every tensor that reads a lost storage, in file order."""
    if not lost:
        return ()
    found: dict[str, str] = {}
    for key, names in users_of(checkpoint).items():
        if key in lost:
            for name in names:
                found.setdefault(name, lost[key])
    order = {name: None for _, name in named_tensors(checkpoint)}
    return tuple((name, found[name]) for name in {**order, **dict.fromkeys(found)} if name in found)


def named_tensors(checkpoint: Checkpoint) -> Iterator[tuple[Tensor, str]]:
    """Every tensor of the file with the name that people know it by, those of the weights first;
    those of a pickled model under the names of its state_dict alone.
    """
    shown = None if checkpoint.weights is None else checkpoint.tables[checkpoint.weights]
    weights = shown.tensors if shown is not None else ()
    seen = {tensor.path for tensor in weights}
    for tensor in weights:
        yield tensor, tensor.key
    modules = {table.path for table in checkpoint.tables if table.kind == "module"}
    tables = [table for table in checkpoint.tables if table is not shown]
    others = [tensor for table in tables for tensor in table.tensors]
    others += [tensor for tensor in checkpoint.tensors if not _inside(tensor.path, modules)]
    for tensor in others:
        if tensor.path not in seen:
            seen.add(tensor.path)
            yield tensor, ".".join(map(str, tensor.path)) or tensor.key


def _inside(path: Path, roots: Collection[Path]) -> bool:
    return bool(roots) and any(path[:size] in roots for size in range(len(path) + 1))


def _compound_users(checkpoint: Checkpoint, known: Collection[str]) -> dict[str, list[Path]]:
    """{storage key: paths of tensors} for storages that are a part of a tensor but not its
    numbers: the indices of a sparse one, the scales of a quantized one, what an attribute holds.
    """
    handle = checkpoint.handle
    left = {storage.key for storage in checkpoint.storages} - set(known)
    if not left or not isinstance(handle, PickleHandle):
        return {}
    search = _Search(handle.reader, left)
    search.run(handle.walked.root)
    return search.users


class _Search(Discoverer):
    """The walk that names tensors, once more, for what lies inside each of them."""

    def __init__(self, reader: TensorReader, wanted: Collection[str]) -> None:
        super().__init__(reader, DEFAULT)
        self.wanted = wanted
        self.users: dict[str, list[Path]] = {}

    def _tensor(self, node: Any, path: Path) -> bool:
        if self.reader.tensor(node) is None:
            return False
        for key in _storages_under(node, self.reader):
            if key in self.wanted:
                self.users.setdefault(key, []).append(path)
        return True

    def _table(self, node: Any, rows: Any, path: Path) -> None:
        """Nothing: every tensor is met on its way."""


def _storages_under(node: Any, reader: TensorReader) -> Iterator[str]:
    seen: set[int] = set()
    stack = [node]
    while stack:
        node = stack.pop()
        if type(node) not in _NODES or id(node) in seen:
            continue
        seen.add(id(node))
        view = reader.view(node) if type(node) is Pers else None
        if type(view) is View:
            yield view.storage.key
        if type(node) is Obj and isinstance(node.told, Tensor) and node.told.storage is not None:
            yield node.told.storage.key  # what it was given may be forgotten (`let_go_parts`)
        stack.extend(children(node))
