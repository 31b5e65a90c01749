"""A checkpoint as torch.distributed.checkpoint flattens it: tensors and objects by their places.

Knows: the rules of torch/distributed/checkpoint/_traverse.py (dicts by text, lists only where
they hold tensors or dicts), what a conversion renames and leaves out. Must not know: how items
are written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from ckptool.checkpoint import Changes, Checkpoint, DType, Path, Storage, Table, Tensor
from ckptool.errors import CkptError, KeyCollision, LimitExceeded, Unsupported
from ckptool.formats.assemble import PickleHandle
from ckptool.formats.dicts import dict_items, key_text
from ckptool.formats.expressions import id_of
from ckptool.formats.measures import View, global_name
from ckptool.formats.respell import Respeller
from ckptool.formats.rows import chosen_table, rows_of
from ckptool.pickles.nodes import LIST, Box, Obj, Pers, elements

_DENSE = ("tensor", "parameter", "subclass", "ndarray", "device-argument")
_MAPPINGS = ("collections.OrderedDict", "collections.defaultdict", "collections.Counter")
_DEEP = 100
_MOST = 64 << 20  # bytes of one object
_LEAVE = "leave it out with --drop"


class Leaf(NamedTuple):
    """One value: a tensor (to be written as `target`, None: its own type), or an object as an
    expression whose storages are `storages`, in the order of their new keys.
    """

    path: Path
    tensor: Tensor | None = None
    target: DType | None = None
    expression: bytes = b""
    storages: tuple[Storage, ...] = ()

    @property
    def key(self) -> str:
        """Its name in the flattened state_dict."""
        return ".".join(map(str, self.path))


class Flattened(NamedTuple):
    """All values in order; `empty_count` dicts and lists without one, which DCP has no word for."""

    leaves: tuple[Leaf, ...]
    empty_count: int


def flatten(checkpoint: Checkpoint, changes: Changes) -> Flattened:
    """Raises KeyCollision where two values get one name, Unsupported for what DCP cannot hold."""
    walk = _Flattening(checkpoint, changes)
    leaves: list[Leaf] = []
    seen: set[str] = set()
    for leaf in walk.leaves():
        if leaf.key in seen:
            raise KeyCollision("two values get this name when the state_dict is flattened",
                               key=leaf.key)  # fmt: skip
        seen.add(leaf.key)
        if leaf.tensor is not None:
            _refuse_odd(leaf.key, leaf.tensor)
        leaves.append(leaf)
    return Flattened(tuple(leaves), walk.empty_count)


def _refuse_odd(key: str, t: Tensor) -> None:
    if t.kind not in _DENSE or t.storage is None or t.dtype is None or t.shape is None:
        raise Unsupported(f"a {t.kind} tensor: DCP cannot hold it", key=key, hint=_LEAVE)


class _Flattening:
    """One walk; `leaves` once."""

    def __init__(self, checkpoint: Checkpoint, changes: Changes) -> None:
        self.checkpoint = checkpoint
        self.changes = changes
        self.empty_count = 0
        self._tables = {table.path: table for table in checkpoint.tables}

    def leaves(self) -> Iterator[Leaf]:
        handle, select = self.checkpoint.handle, self.changes.select
        if not isinstance(handle, PickleHandle):
            table = chosen_table(self.checkpoint, self.changes)
            for row in rows_of(self.checkpoint, table, self.changes):
                yield Leaf((row.key,), row.tensor, row.target)
            return
        node = handle.walked.root if select is None else handle.found.owners[select]
        self._cut = len(select or ())
        self._reader = handle.reader
        yield from self._below(node, select or (), select or ())

    def _below(self, node: Any, old: Path, new: Path) -> Iterator[Leaf]:
        """What stands in a container at the place `old`, which is to be `new`."""
        if len(old) > _DEEP:
            raise LimitExceeded("nesting", f"containers inside each other, more than {_DEEP} deep")
        table = self._tables.get(old)
        if table is not None and table.kind in ("module", "tensors"):
            yield from self._table(table, new)
            return
        tensors = {} if table is None else {tensor.key: tensor for tensor in table.tensors}
        count = 0
        for name, value in _children(node):
            if self._is_gone(old, name):
                continue
            count += 1
            renamed = self.changes.renames.get((old, str(name)), name)
            yield from self._value(value, (*old, name), (*new, renamed), tensors.get(str(name)))
        self.empty_count += not count

    def _is_gone(self, old: Path, name: str | int) -> bool:
        dropped = not old and name in self.changes.entries
        return dropped or (old, str(name)) in self.changes.drops

    def _value(self, node: Any, old: Path, new: Path, known: Tensor | None) -> Iterator[Leaf]:
        tensor = known or self._reader.tensor(node)
        if tensor is not None:
            target = self.changes.dtypes.get((old[:-1], tensor.key))
            yield Leaf(self._place(new), tensor, target)
        elif old in self._tables or not self._is_terminal(node):
            yield from self._below(node, old, new)
        else:
            yield self._object(node, self._place(new))

    def _place(self, path: Path) -> Path:
        return path[self._cut :]

    def _table(self, table: Table, new: Path) -> Iterator[Leaf]:
        for tensor in table.tensors:
            place = (table.path, tensor.key)
            if place not in self.changes.drops:
                key = self.changes.renames.get(place, tensor.key)
                target = self.changes.dtypes.get(place)
                yield Leaf(self._place((*new, key)), tensor, target)

    def _is_terminal(self, node: Any) -> bool:
        """Whether torch keeps it as one object."""
        if _is_mapping(node):
            return False
        if type(node) is not Box or node.kind != LIST:
            return True
        for value, *_ in elements(node):
            inside = _is_mapping(value) or (type(value) is Box and value.kind == LIST)
            if (inside and not self._is_terminal(value)) or self._reader.tensor(value) is not None:
                return False
        return True

    def _object(self, node: Any, path: Path) -> Leaf:
        storages: list[Storage] = []
        numbers: dict[str, int] = {}

        def storage(pers: Pers) -> bytes:
            view = self._reader.view(pers)
            if type(view) is not View or view.offset:
                raise Unsupported("an object with an old kind of storage")
            number = numbers.setdefault(view.storage.key, len(storages))
            if number == len(storages):
                storages.append(view.storage)
            return id_of(view.storage, str(number), "cpu")

        try:
            made = Respeller(storage, _MOST).expression(node)
        except CkptError as error:
            error.key = error.key or ".".join(map(str, path))
            raise
        return Leaf(path, expression=made, storages=tuple(storages))


def _is_mapping(node: Any) -> bool:
    if type(node) is Box:
        return node.kind == 0x7D
    return type(node) is Obj and global_name(node.fn) in _MAPPINGS


def _children(node: Any) -> list[tuple[str | int, Any]]:
    """(text of the key, value) of a dict, (number, value) of a list. Raises KeyCollision for two
    keys with one text, such as 1 and "1".
    """
    if type(node) is Box and node.kind == LIST:
        return list(enumerate(value for value, *_ in elements(node)))
    rows = dict_items(node) or ()
    found = [(key_text(key), value) for key, value, *_ in rows]
    twice = [name for name, count in Counter(name for name, _ in found).items() if count > 1]
    if twice:
        raise KeyCollision("two keys of one dict are the same text", key=twice[0])
    return list(found)
