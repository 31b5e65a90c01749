"""A checkpoint without the storages that are lost: which tensors and entries go with them.

Knows: what in a pickle leads to a storage. Must not know: how a storage was lost, verbs.
What goes is as little as can be cut: one key of a state_dict, else one top-level entry, since an
optimizer without half of its state is none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ckptool.checkpoint import Checkpoint, Path, Table
from ckptool.errors import Unsupported
from ckptool.formats.assemble import PickleHandle
from ckptool.formats.audit_users import lost_tensors
from ckptool.formats.dicts import dict_items, key_text
from ckptool.formats.measures import View
from ckptool.pickles.nodes import Box, Obj, Pers, Tup, child_spans, text_of

_NODES = frozenset((Tup, Box, Obj, Pers))
Place = tuple[Path, str]


class Kept(NamedTuple):
    """`checkpoint` has the whole tensors alone; `drops` and `entries` cut the rest out of the
    pickle, as `Changes` names them (an entry goes as a whole, though some of its tensors may be
    whole); `gone` are (name, what became of it) of every lost tensor; `stuck` is the error for a
    container that keeps the pickle, where something that reads a lost storage cannot be cut out.
    """

    checkpoint: Checkpoint
    drops: frozenset[Place] = frozenset()
    entries: frozenset[str] = frozenset()
    gone: tuple[tuple[str, str], ...] = ()
    stuck: Unsupported | None = None


def without(checkpoint: Checkpoint, lost: Mapping[str, str]) -> Kept:
    """The checkpoint without these storages."""
    gone = lost_tensors(checkpoint, lost)
    tables = tuple(_whole(table, lost) for table in checkpoint.tables)
    pairs = zip(checkpoint.tables, tables, strict=True)
    drops = {(old.path, key) for old, new in pairs for key in _keys(old) - _keys(new)}
    entries: frozenset[str] = frozenset()
    stuck = None
    if isinstance(checkpoint.handle, PickleHandle) and lost:
        graph = _Graph(checkpoint, lost)
        drops |= graph.cut_rows()
        entries, stuck = graph.cut_entries()
        tables = tuple(_kept(table, drops, entries) for table in tables)
    storages = tuple(storage for storage in checkpoint.storages if storage.key not in lost)
    kept = checkpoint._replace(
        tables=tables, storages=storages,
        tensors=tuple(t for t in checkpoint.tensors if not (t.storage and t.storage.key in lost)),
        extras=tuple(extra for extra in checkpoint.extras if extra.path[0] not in entries),
    )  # fmt: skip
    return Kept(kept, frozenset(drops), entries, gone, stuck)


def _whole(table: Table, lost: Mapping[str, str]) -> Table:
    rows = (t for t in table.tensors if t.storage is None or t.storage.key not in lost)
    return table._replace(tensors=tuple(rows))


def _keys(table: Table) -> set[str]:
    return {tensor.key for tensor in table.tensors}


def _kept(table: Table, drops: Collection[Place], entries: Collection[str]) -> Table:
    """A table without what else is cut out of it; one inside a cut entry has nothing left."""
    if table.path and table.path[0] in entries:
        return table._replace(tensors=(), others=())
    tensors = tuple(t for t in table.tensors if (table.path, t.key) not in drops)
    others = tuple(row for row in table.others if (table.path, row[0]) not in drops)
    return table._replace(tensors=tensors, others=others)


class _Graph:
    """Who leads to a lost storage, as long as it is not cut: edges from a node to its holders,
    each with the byte where it stands there; `cuts` are nodes with such a byte.
    """

    def __init__(self, checkpoint: Checkpoint, lost: Mapping[str, str]) -> None:
        self.checkpoint = checkpoint
        self.handle: PickleHandle = checkpoint.handle
        self.root = self.handle.walked.root
        owners = self.handle.found.owners
        self.modules = {
            id(owners.get(table.path)) for table in checkpoint.tables if table.kind == "module"
        }
        self.holders: dict[int, list[tuple[int, int]]] = {}
        self.cuts: set[tuple[int, int]] = set()
        self.lost = [id(pers) for pers in self.handle.walked.persistent if self._reads(pers, lost)]
        self._link()

    def _reads(self, pers: Pers, lost: Mapping[str, str]) -> bool:
        view = self.handle.reader.view(pers)
        return type(view) is View and view.storage.key in lost

    def _link(self) -> None:
        seen: set[int] = set()
        stack: list[Any] = [self.root]
        while stack:
            node = stack.pop()
            if type(node) not in _NODES or id(node) in seen:
                continue
            seen.add(id(node))
            for child, start, _ in child_spans(node):
                if type(child) in _NODES:
                    self.holders.setdefault(id(child), []).append((id(node), start))
                    stack.append(child)

    def _reached(self) -> set[int]:
        """Nodes that lead to a lost storage by what is not cut. A pickled model is written anew
        from its tensors, so that nothing above it is reached through it.
        """
        found = set(self.lost)
        stack = list(self.lost)
        while stack:
            node = stack.pop()
            if node in self.modules:
                continue
            for holder, start in self.holders.get(node, ()):
                if holder not in found and (node, start) not in self.cuts:
                    found.add(holder)
                    stack.append(holder)
        return found - self.modules

    def cut_rows(self) -> set[Place]:
        """Keys of state_dicts whose values lead to a lost storage."""
        reached, drops = self._reached(), set()
        for table in self.checkpoint.tables:
            owner = self.handle.found.owners.get(table.path)
            if table.kind != "state_dict" or id(owner) not in reached:
                continue
            for key, value, _, start, _ in dict_items(owner) or ():
                if id(value) in reached:
                    drops.add((table.path, key_text(key)))
                    self.cuts.add((id(value), start))
        return drops

    def cut_entries(self) -> tuple[frozenset[str], Unsupported | None]:
        """Top-level entries that still do, and the error when that is not all of them, or when
        the weights are in one.
        """
        reached = self._reached()
        if id(self.root) not in reached:
            return frozenset(), None
        names = set()
        for key, value, _, start, _ in dict_items(self.root) or ():
            name = text_of(key)
            if id(value) in reached and name is not None:
                names.add(name)
                self.cuts.add((id(value), start))
        weights = self.checkpoint.weights
        path = () if weights is None else self.checkpoint.tables[weights].path
        if id(self.root) not in self._reached() and not (path and path[0] in names):
            return frozenset(names), None
        error = Unsupported(
            "a lost tensor stands where it cannot be cut out: in no state_dict and no entry of its own",
            path=self.checkpoint.file,
            hint="take one state_dict with --select PATH, or -o OUT.safetensors",
        )
        return frozenset(), error
