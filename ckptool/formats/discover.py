"""Finding the state_dicts, modules and tensors of a walked pickle.

Knows: how frameworks lay out a checkpoint (formats 7): structure first, names second.
Must not know: containers, verbs. Nothing recurses: a million nested dicts cost a list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from ckptool.checkpoint import Path, Table, Tensor
from ckptool.errors import CkptError, LimitExceeded
from ckptool.formats.containers import check_contents
from ckptool.formats.dicts import (
    SCALARS,
    Rows,
    dict_items,
    is_optimizer,
    key_parts,
    key_text,
    kind_word,
    metadata_of,
    module_parts,
    reconstructed,
    repeated_keys,
    texts_of,
    twice,
)
from ckptool.formats.judge import embedded_class
from ckptool.formats.measures import global_name, named
from ckptool.formats.ranking import RANK, ranked
from ckptool.formats.torch_pickle import TensorReader
from ckptool.limits import Limits
from ckptool.pickles.nodes import Box, Obj, Pers, Tup, elements, held_count, items_of, text_of

_SKIP = re.compile(
    r"optim|sched|scaler|(^|_)rng|loss|criterion|callback|loops|args|cfg|config|hyper|meta$|history|(^|_)amp(_|$)"
)
_NODES = frozenset((Box, Obj, Tup, Pers))
_SHARED = 10_000  # further names of submodules: they could multiply without end


class Found:
    """What stands in one pickle. `owners` maps a table's path to the dict node that holds it,
    `call_paths` the byte of a call's opcode to its place, `repeated` are the places of keys that
    one dict sets more than once.
    """

    __slots__ = ("call_paths", "owners", "repeated", "tables", "tensors", "weights")

    def __init__(self) -> None:
        self.tables: list[Table] = []
        self.tensors: list[Tensor] = []
        self.owners: dict[Path, Any] = {}
        self.weights: int | None = None
        self.call_paths: dict[int, Path] = {}
        self.repeated: list[Path] = []


class Discoverer:
    """One walk over all nodes, in file order, each node once: twice, where a place for weights comes
    after one for something else.
    """

    def __init__(
        self,
        reader: TensorReader,
        limits: Limits,
        arrays: Callable[[Any], Tensor | None] | None = None,
    ) -> None:
        self.reader = reader
        self.arrays = arrays
        self.limits = limits
        self.found = Found()
        self.seen: set[int] = set()
        self._aside: set[int] = set()  # of these, what was met only where no weights are looked for
        self._counts: dict[int, int] = {}
        self._leaves: dict[int, Table] = {}  # tables of tensors and plain values alone
        self._owned: set[int] = set()  # what is a table
        self._also: dict[int, list[Path]] = {}  # further places of it
        self._place_bytes = 0
        self.placed: dict[tuple[Path, int], Tensor] = {}
        self.module_attributes: Callable[[Obj], dict[str, Any] | None] = module_parts

    def run(self, root: Any) -> Found:
        """Find everything under `root`. Raises LimitExceeded beyond the nesting limit."""
        stack: list[tuple[Any, Path, bool]] = [(root, (), True)]
        while stack:
            node, path, wanted = stack.pop()
            if type(node) not in _NODES or (id(node) in self.seen and not self._due(node, wanted)):
                self._again(node, path, wanted)
                continue
            self.seen.add(id(node))
            if len(path) > self.limits.nesting:
                raise LimitExceeded(
                    "nesting", f"containers inside each other, more than {self.limits.nesting} deep"
                )
            if self._tensor(node, path):
                continue
            if not wanted:
                self._aside.add(id(node))
            rows = dict_items(node)
            self._weigh(path, held_count(node) if rows is None else len(rows))
            if type(node) is Obj:
                self.found.call_paths.setdefault(node.end, path)
                check_contents(node, self._is_tensor)
            self._note_repeated(rows, path)
            if wanted:
                self._table(node, rows, path)
            below = list(self._below(node, rows, path, wanted))
            stack.extend(reversed(below))
        self._rank()
        return self.found

    def _due(self, node: Any, wanted: bool) -> bool:
        """Whether it is met among weights at last. Modules have tables of their own (`_again`)."""
        if not wanted or id(node) not in self._aside or self._is_module(node):
            return False
        self._aside.discard(id(node))
        return True

    def _weigh(self, above: Path, count: int) -> None:
        """Raise LimitExceeded when places of `count` things below these would take too much."""
        self._place_bytes += (len(repr(above)) + 32) * (count + 1)
        if self._place_bytes > self.limits.place_bytes:
            text = "the names of all places in it take more than"
            raise LimitExceeded("place-bytes", f"{text} {self.limits.place_bytes:,} bytes")

    def _note_repeated(self, rows: Rows | None, path: Path) -> None:
        if rows and len(rows) > 1 and (keys := repeated_keys(rows)):
            self.found.repeated.extend((*path, key) for key in keys)

    def _tensor(self, node: Any, path: Path) -> bool:
        try:
            tensor = self.reader.tensor(node) or self._array(node)
        except CkptError as error:
            if error.key is None:
                error.key = ".".join(map(str, path)) or None
            raise
        if tensor is None:
            return False
        self.found.tensors.append(self._place(tensor, path, id(node)))
        return True

    def _place(self, tensor: Tensor, path: Path, node_id: int) -> Tensor:
        """The record under this path: the one its table has, where it is in one. A key that
        stands twice has two tensors under one path.
        """
        placed = self.placed.pop((path, node_id), None)
        return placed or named(tensor, str(path[-1]) if path else "", path)

    def _again(self, node: Any, path: Path, wanted: bool) -> None:
        """A tensor object met a second time is a second name of it, a table one more place of it;
        a module met first inside another is a table of its own.
        """
        if type(node) is Obj and self.reader.tensor(node) is not None:
            self._tensor(node, path)
        elif wanted and id(node) in self._owned:
            self._also.setdefault(id(node), []).append(path)
        elif wanted and self._is_module(node):
            self._table(node, None, path)

    def _array(self, node: Any) -> Tensor | None:
        return self.arrays(node) if self.arrays is not None else None

    # -- going down --------------------------------------------------------------------------
    def _below(
        self, node: Any, rows: Rows | None, path: Path, wanted: bool
    ) -> Iterator[tuple[Any, Path, bool]]:
        if rows is not None:
            leaf = self._leaves.pop(id(node), None)
            yield from self._entries(rows, path, wanted and not is_optimizer(rows), leaf)
        if type(node) is Tup:
            for i, item in enumerate(node.items):
                yield item, (*path, i), wanted
        elif type(node) is Pers:
            yield node.pid, path, False
        else:
            if rows is None:
                for i, (value, _, _) in enumerate(elements(node)):
                    yield value, (*path, i), wanted
            yield from self._object(node, path, wanted, listed=bool(rows) and not node.batches)

    def _entries(
        self, rows: Rows, path: Path, wanted: bool, leaf: Table | None
    ) -> Iterator[tuple[Any, Path, bool]]:
        """Keys and values of a dict; of a `leaf`, whose tensors are all read, the keys."""
        if leaf is not None:
            self.found.tensors.extend(leaf.tensors)
            self.seen.update(id(value) for _, value, *_ in rows if type(value) in _NODES)
        for (key, value, *_), name in zip(rows, key_parts(rows), strict=True):
            if type(key) in _NODES:
                yield key, (*path, "<key>"), False
            if leaf is None and type(value) in _NODES:
                inside = wanted and (type(name) is not str or _SKIP.search(name) is None)
                yield value, (*path, name), inside

    def _object(
        self, node: Box | Obj, path: Path, wanted: bool, listed: bool
    ) -> Iterator[tuple[Any, Path, bool]]:
        """Arguments (unless they are the listed items of a Python 2 dict) and state."""
        if type(node) is Obj and not listed:
            for i, item in enumerate(items_of(node.args) or ()):
                yield item, (*path, i), False
            if node.kwargs is not None:
                yield node.kwargs, (*path, "kwargs"), False
            if type(node.fn) is Obj:
                yield node.fn, (*path, "function"), False
        if node.state is not None:
            state = node.state.value
            rows = dict_items(state)
            if rows is None:
                yield state, (*path, "state"), False
                return
            self.seen.add(id(state))
            self._weigh(path, len(rows))
            self._note_repeated(rows, path)
            inside = wanted and not (self._is_module(node) or is_optimizer(rows))
            for (_, value, *_), part in zip(rows, key_parts(rows), strict=True):
                name = str(part)
                if name != "_metadata":  # layer versions by the thousand, no tensors
                    yield value, (*path, name), inside and _SKIP.search(name) is None

    def _is_module(self, node: Any) -> bool:
        return type(node) is Obj and self.module_attributes(node) is not None

    # -- tables ------------------------------------------------------------------------------
    def _table(self, node: Any, rows: Rows | None, path: Path) -> None:
        if self._is_module(node):
            table = self._module_table(node, path)
        else:
            table = self._dict_table(node, rows, path)
        if table is not None and path not in self.found.owners:
            self.found.tables.append(table)
            self.found.owners[path] = node
            self._owned.add(id(node))

    def _dict_table(self, node: Any, rows: Rows | None, path: Path) -> Table | None:
        if not rows:
            return None
        names = [text for row in rows if (text := text_of(row[0])) is not None]
        keys = set(names)
        if {"state", "param_groups"} <= keys:
            return None
        tensors, nodes, rest, containers = [], [], [], 0
        for (key, value, *_), part in zip(rows, key_parts(rows), strict=True):
            tensor = self._member(value, (*path, part), key_text(key))
            if tensor is not None:
                tensors.append(tensor)
                nodes.append(value)
            else:
                rest.append((key, value))
                containers += type(value) not in (*SCALARS, str)
        versions = metadata_of(node)
        is_one = _is_state_dict(len(tensors), len(rows), containers, len(names))
        is_one = (is_one or bool(tensors and versions)) and not self._holds_weights(rest, tensors)
        once = len({tensor.key for tensor in tensors}) == len(tensors)
        leaf = is_one and once and all(type(value) not in _NODES for _, value in rest)
        if not leaf:
            for value, tensor in zip(nodes, tensors, strict=True):
                self.placed[tensor.path, id(value)] = tensor
        if not is_one:
            return None
        table = Table(path, tuple(tensors), versions, "state_dict", None,
                     twice([key_text(row[0]) for row in rows]) if not once or len(keys) < len(names) else (),
                     tuple((key_text(key), kind_word(value)) for key, value in rest),
                     tuple(key_text(row[0]) for row in rows) if rest else ())  # fmt: skip
        if leaf:
            self._leaves[id(node)] = table
        return table

    def _holds_weights(self, rows: list[tuple[Any, Any]], beside: list[Tensor]) -> bool:
        """Whether an entry has more of the weights than the tensors `beside` it, or, where none
        of those is named like a parameter (`fc.weight`), any under a name for weights:
        {state_dict: {…}, best_acc: tensor} is no table itself.
        """
        if not rows:
            return False
        count, plain = len(beside), all("." not in tensor.key for tensor in beside)
        for key, value in rows:
            name = text_of(key) or ""
            if type(value) not in (Box, Obj) or _SKIP.search(name) or name.endswith("_extra_state"):
                continue
            inside = self._tensors_in(value)
            if self._is_module(value) or inside > count or (inside and plain and name in RANK):
                return True
        return False

    def _tensors_in(self, node: Any) -> int:
        """Tensors right inside a dict; remembered, since thousands of dicts may share one."""
        if id(node) not in self._counts:
            rows = dict_items(node) or ()
            self._counts[id(node)] = sum(self._is_tensor(inner) for _, inner, *_ in rows)
        return self._counts[id(node)]

    def _is_tensor(self, node: Any) -> bool:
        tensor = self.reader.tensor(node) or self._array(node)
        return tensor is not None and tensor.kind != "storage"

    def _member(self, value: Any, place: Path, name: str) -> Tensor | None:
        try:
            tensor = self.reader.tensor(value, name, place) or self._array(value)
        except CkptError as error:
            if error.key is None:
                error.key = name
            raise
        if tensor is None or tensor.kind == "storage":
            return None
        if tensor.path != place or tensor.key != name:
            tensor = named(tensor, name, place)
        return tensor

    def _module_table(self, node: Obj, path: Path) -> Table | None:
        tensors = tuple(self._module_tensors(node, path))
        name = global_name(embedded_class(node.fn)) or reconstructed(node)
        return Table(path, tensors, None, "module", name)

    def _module_tensors(self, node: Obj, path: Path) -> Iterator[Tensor]:
        """The state_dict of a pickled module, in torch's order: own parameters, own
        persistent buffers, then the children (torch/nn/modules/module.py). A module under
        two names is listed twice, as there; inside itself it is left out.
        """
        stack: list[tuple[Any, str, frozenset[int]]] = [(node, "", frozenset())]
        seen: set[int] = set()
        again = 0
        while stack:
            module, prefix, above = stack.pop()
            parts = self.module_attributes(module) if type(module) is Obj else None
            if parts is None and type(module) is Obj:
                yield _foreign(prefix[:-1], path)  # as a quantized Conv2d, which has a tuple
            if parts is None or id(module) in above:
                continue
            again += id(module) in seen
            if again > _SHARED or len(above) > self.limits.nesting:
                raise LimitExceeded(
                    "nesting",
                    f"more than {self.limits.nesting} modules inside each other, or {_SHARED:,} shared ones",
                )
            seen.add(id(module))
            above |= {id(module)}
            hidden = texts_of(parts.get("_non_persistent_buffers_set"))
            self._weigh((*path, prefix), sum(held_count(part) for part in parts.values()))
            for group in ("_parameters", "_buffers"):
                for key, value, *_ in dict_items(parts.get(group)) or ():
                    name = prefix + key_text(key)
                    tensor = self._member(value, (*path, name), name)
                    if tensor is not None:
                        self.placed[tensor.path, id(value)] = tensor
                    if tensor is None and type(value) is Obj:
                        tensor = _foreign(name, path)
                    if tensor is not None and not (group == "_buffers" and key_text(key) in hidden):
                        yield tensor
            yield from (_foreign(prefix + name, path) for name in self._packed(module, parts))
            below = [
                (value, f"{prefix}{key_text(key)}.", above)
                for key, value, *_ in dict_items(parts.get("_modules")) or ()
            ]
            stack.extend(reversed(below))

    def _packed(self, module: Obj, parts: dict[str, Any]) -> Iterator[str]:
        """What a quantized layer adds to its state_dict, though it is neither parameter nor
        buffer (torch/ao/nn/quantized/modules/linear.py, _save_to_state_dict).
        """
        if ".quantized." in (global_name(embedded_class(module.fn)) or ""):
            for name, value in parts.items():
                packed = type(value) is Obj and value.state is not None
                if packed or (name in ("scale", "zero_point") and type(value) in (int, float)):
                    yield name

    # -- which one is shown ------------------------------------------------------------------
    def _rank(self) -> None:
        found = self.found
        found.tables[:], best = ranked(found.tables)
        for at, table in enumerate(found.tables):
            also = self._also.get(id(found.owners[table.path]))
            if also:
                found.tables[at] = table._replace(also=tuple(also))
        if best is None and found.tensors:
            members = [t for t in found.tensors if t.kind != "storage"]
            rows = tuple(named(t, ".".join(map(str, t.path)), t.path) for t in members)
            if rows:
                found.tables.append(Table((), rows, None, "tensors"))
        found.weights = best


def _foreign(key: str, path: Path) -> Tensor:
    """An entry of a module's state_dict that nothing here can make."""
    return Tensor(key, None, None, None, 0, None, None, "foreign", (*path, key))


def _is_state_dict(tensor_count: int, count: int, container_count: int, named_count: int) -> bool:
    """At least half tensors, or 60 % of what is neither a number nor None; named by strings."""
    if not tensor_count or named_count * 2 < count:
        return False
    return tensor_count * 2 >= count or tensor_count >= 0.6 * (tensor_count + container_count)
