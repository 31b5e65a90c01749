"""The values beside the weights, as one line for people and plain data for JSON.

Knows: optimizers, schedulers, argparse and numpy scalars as nodes. Must not know: containers.
Bounded: of any value what `SHOWN` allows is spelled out, and '…' stands for the rest; `ALL` is
for who wants the whole, and refuses what is more. What the memo of a pickle repeats, at two bytes a
time, is weighed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from ckptool.checkpoint import Extra, Path, Table
from ckptool.errors import LimitExceeded
from ckptool.formats.dicts import Rows, dict_items, is_optimizer, key_parts, key_text
from ckptool.formats.measures import SETS, array_shape, global_name
from ckptool.formats.plain_values import (
    call_items,
    class_of,
    filling,
    items_of_list,
    scalar,
    short,
    special_value,
    type_word,
)
from ckptool.formats.repeated import ITEM_BYTES, Weigher
from ckptool.formats.torch_pickle import TensorReader
from ckptool.pickles.nodes import (
    Box,
    Global,
    Obj,
    Pers,
    Raw,
    Tup,
    elements,
    held_count,
    items_of,
    text_of,
)

_OPTIMIZERS = (("exp_avg_sq", "Adam-like"), ("momentum_buffer", "SGD-like"),
               ("square_avg", "RMSprop-like"), ("sum", "Adagrad-like"), ("exp_avg", "Lion-like"))  # fmt: skip
_LONG = 1_000  # rows of a dict that are remembered, since thousands may hold it


class Bounds(NamedTuple):
    """How much of a value is spelled out: items of one list, levels, lists and objects in all.
    Beyond them '…' stands, or the value is refused where it must be whole.
    """

    items: int
    depth: int
    leaves: int
    whole: bool = False


SHOWN = Bounds(64, 4, 64)
ALL = Bounds(1_000_000, 100, 1_000_000, whole=True)


class _States(NamedTuple):
    """How many parameters have state, the names of its parts, where its tensors are, and whether
    the parameters have numbers spelled as texts: DCP makes all keys of dicts texts, and torch's
    load_state_dict takes nothing of such a state, without a word.
    """

    parameter_count: int
    names: dict[str, int]
    devices: dict[str, int]
    texts: bool


class Describer:
    """Turns nodes into plain values; `reader` tells tensors from other objects."""

    def __init__(self, reader: TensorReader, bounds: Bounds = SHOWN) -> None:
        self.reader = reader
        self.bounds = bounds
        self._sizes: dict[int, list[Any]] = {}  # lists that calls are given, which many may share
        self._known_states: dict[int, _States] = {}
        self._known_rows: dict[int, tuple[Rows, int]] = {}
        self._known_groups: dict[int, tuple[list[dict[str, Any]], int]] = {}
        self.weigher = Weigher("values", reader.limits.repeated_value_bytes)

    def extra(self, node: Any, path: Path) -> Extra:
        """One entry: its type, its JSON-ready value (None when opaque), one line of text."""
        optimizer = self._optimizer(node)
        if optimizer is not None:
            return Extra(path, "optimizer", optimizer, _optimizer_text(optimizer))
        tensor = self.reader.tensor(node)
        if tensor is not None:
            value = {
                "shape": list(tensor.shape or ()),
                "dtype": tensor.dtype.name if tensor.dtype else None,
                "device": tensor.device,
            }
            return Extra(
                path,
                "tensor",
                value,
                f"{value['dtype']} tensor {value['shape']} on {tensor.device}",
            )
        value = self._value(node, self.bounds.depth, [self.bounds.leaves], frozenset())
        return Extra(path, type_word(node), value, self._text(node, value))

    def _text(self, node: Any, value: Any) -> str:
        if type(node) is Obj and global_name(node.fn) in SETS:
            return f"set of {call_items(node)[1]}"
        if type(node) is Obj and self._special(node) is not None:
            return short(value)
        if type(node) is Obj and array_shape(node) is not None:
            return f"numpy array {list(array_shape(node) or ())}"
        if type(node) is Obj and class_of(node) is not None:
            inner = value if isinstance(value, dict) else {}
            shown = ", ".join(f"{k}={short(v)}" for k, v in list(inner.items())[:6])
            more = ", …" if len(inner) > 6 else ""
            name = str(class_of(node)).rpartition(".")[2]
            return f"{name}({shown}{more})"[:160] if inner else name
        if isinstance(value, dict):
            listed = ", ".join(map(str, list(value)[:8]))
            return f"dict of {self._rows(node)[1]}" + (f": {listed}" if listed else "")
        if isinstance(value, list):
            return f"{type_word(node)} of {items_of_list(node)[1]}"
        return short(value)

    def _value(self, node: Any, depth: int, left: list[int], above: frozenset[int]) -> Any:
        """Plain data for a node; '…' where a bound is reached, '<cycle>' where it holds itself."""
        if type(node) not in (Box, Obj, Tup, Pers, Global, Raw):
            if type(node) is str:
                self.weigher.weigh(node, len(node))
            return scalar(node)
        left[0] -= 1
        if left[0] < 0 or depth < 0:
            return self._rest("…")
        if id(node) in above:
            return "<cycle>"
        above = above | {id(node)}
        if type(node) is Raw:
            self.weigher.weigh(node, len(node.value))
            return text_of(node) or f"<{len(node.value)} bytes>"
        if type(node) is Global:
            return f"<{node.full}>"
        if type(node) is Pers:
            return "<storage>"
        return self._compound(node, depth - 1, left, above)

    def _compound(self, node: Any, depth: int, left: list[int], above: frozenset[int]) -> Any:
        self.weigher.weigh(node, ITEM_BYTES * min(held_count(node), self.bounds.items + 1))
        if type(node) is Obj:
            tensor = self.reader.tensor(node)
            if tensor is not None:
                return f"<tensor {list(tensor.shape or ())}>"
            self._weigh_call(node)
            special = self._special(node)
            if special is not None:
                return special
        rows, count = self._rows(node)
        if rows is not None:
            more = self._more(count, left)
            for key, *_ in rows:
                self.weigher.weigh(key, len(key) if type(key) is str else 0)
            told = {
                str(part): self._value(row[1], depth, left, above)
                for part, row in zip(key_parts(rows), rows, strict=True)
            }
            return told | {"…": self._rest(f"{more:,} more")} if more else told
        values, count = items_of_list(node)
        if type(node) in (Box, Tup) or count:
            more = self._more(count, left)
            some = islice(values, self.bounds.items)
            listed = [self._value(value, depth, left, above) for value in some]
            return [*listed, self._rest("…")] if more else listed
        name = class_of(node)
        return f"<{name}>" if name else "<object>"

    def _rows(self, node: Any) -> tuple[Rows | None, int]:
        """The first items of a dict, or of what an object is filled with, and how many there are;
        None for another.
        """
        if id(node) in self._known_rows:
            return self._known_rows[id(node)]
        rows = dict_items(node)
        if not rows and type(node) is Obj:
            rows = dict_items(filling(node))
        if rows is None:
            return None, 0
        found = rows[: self.bounds.items], len(rows)
        if len(rows) > _LONG:
            self._known_rows[id(node)] = found
        return found

    def _more(self, count: int, left: list[int]) -> int:
        """How many of `count` values are not told."""
        if self.bounds.whole:
            left[0] -= count
            if left[0] < 0:
                self._rest("")
        return max(0, count - self.bounds.items)

    def _rest(self, mark: str) -> str:
        """What stands for what is not told. Raises LimitExceeded where all has to be."""
        if self.bounds.whole:
            raise LimitExceeded(
                "extras", f"values beside the tensors of more than {self.bounds.leaves:,} parts or {self.bounds.depth} levels",
                hint="leave --extras out",
            )  # fmt: skip
        return mark

    def _special(self, node: Obj) -> Any:
        """As `_special`, but what calls share is told once."""
        args = items_of(node.args) or ()
        if global_name(node.fn) != "torch.Size" or not args:
            return special_value(node, self.bounds.items)
        known = self._sizes.get(id(args[0])) if type(args[0]) in (Box, Tup) else None
        if known is None:
            known = self._sizes[id(args[0])] = special_value(node, self.bounds.items)
        return known

    def _weigh_call(self, node: Obj) -> None:
        """Count the first arguments of one: texts that a path has, what a size or set is made of."""
        most = self.bounds.items
        for arg in (items_of(node.args) or ())[:most]:
            if type(arg) is str:
                self.weigher.weigh(arg, len(arg))
            elif type(arg) in (Box, Tup):
                self.weigher.weigh(arg, ITEM_BYTES * min(held_count(arg), most))

    # -- optimizers --------------------------------------------------------------------------
    def _optimizer(self, node: Any) -> dict[str, Any] | None:
        """Groups, parameter count, state names and devices of an optimizer's state_dict."""
        rows = dict_items(node)
        if rows is None or not is_optimizer(rows):
            return None
        parts = {text_of(key): value for key, value, *_ in rows}
        count, names, devices, texts = self._states(parts["state"])
        groups = self._groups(parts["param_groups"])
        lost = texts and _has_numbers(parts["param_groups"])
        family = next((word for name, word in _OPTIMIZERS if name in names), "optimizer")
        return {
            "family": family,
            "groups": groups,
            "state_count": count,
            "state_names": list(names),
            "devices": devices,
        } | ({"ids_are_text": True} if lost else {})

    def _groups(self, node: Any) -> list[dict[str, Any]]:
        """The groups in a list, which thousands of optimizers may share."""
        if type(node) is not Box:
            return []
        known, size_bytes = self._known_groups.get(id(node), (None, 0))
        if known is None:
            before = self.weigher.bytes
            known = [self._group(group) for group, *_ in elements(node)]
            self._known_groups[id(node)] = known, self.weigher.bytes - before
        else:
            self.weigher.repeat(size_bytes)
        return known

    def _states(self, node: Any) -> _States:
        """What an optimizer's state holds. Remembered, since thousands of optimizers may share one."""
        if id(node) in self._known_states:
            known = self._known_states[id(node)]
            self.weigher.repeat(sum(ITEM_BYTES + len(name) for name in known.names))
            return known
        states = dict_items(node) or []
        names: dict[str, int] = {}
        devices: dict[str, int] = {}
        for _, state, *_ in states:
            for key, value, *_ in dict_items(state) or ():
                names[key_text(key)] = names.get(key_text(key), 0) + 1
                tensor = self.reader.tensor(value)
                if tensor is not None:
                    devices[tensor.device] = devices.get(tensor.device, 0) + 1
        ids = [text_of(key) for key, *_ in states]
        texts = bool(ids) and all(text is not None and text.isdecimal() for text in ids)
        known = self._known_states[id(node)] = _States(len(states), names, devices, texts)
        return known

    def _count(self, box: Box) -> int:
        """The items of a list, which thousands of groups may share."""
        self.weigher.weigh(box, len(box.batches))
        return items_of_list(box)[1]

    def _group(self, node: Any) -> dict[str, Any]:
        group: dict[str, Any] = {}
        self.weigher.weigh(node, ITEM_BYTES * (1 + held_count(node)))
        for key, value, *_ in dict_items(node) or ():
            name = key_text(key)
            if name in ("params", "param_names"):
                group[f"{name}_count"] = self._count(value) if type(value) is Box else 0
            elif len(group) < self.bounds.items:
                depth = self.bounds.depth if self.bounds.whole else 1
                group[name] = self._value(value, depth, [self.bounds.leaves], frozenset())
        return group


def _has_numbers(groups: Any) -> bool:
    """Whether the first parameter of the first group has a number, no name."""
    first = next((group for group, *_ in elements(groups)), None) if type(groups) is Box else None
    params = [value for key, value, *_ in dict_items(first) or () if text_of(key) == "params"]
    return any(type(next(iter(items_of_list(value)[0]), None)) is int for value in params)


def _optimizer_text(value: dict[str, Any]) -> str:
    groups = value["groups"]
    params = sum(group.get("params_count", 0) for group in groups)
    words = [
        value["family"],
        f"{len(groups)} group{'s' * (len(groups) != 1)}",
        f"{params} parameters",
    ]
    buffers = [name for name in value["state_names"] if name != "step"]
    if buffers and value["devices"]:
        where = ", ".join(f"{device} ({count})" for device, count in value["devices"].items())
        words.append(f"{', '.join(buffers[:4])} on {where}")
    elif not value["state_count"]:
        words.append("no state yet")
    return ", ".join(words)


def top_extras(
    root: Any, reader: TensorReader, tables: Sequence[Table], bounds: Bounds = SHOWN
) -> tuple[Extra, ...]:
    """The entries of the root that no table holds, in file order."""
    rows = dict_items(root)
    if rows is None:
        return ()
    describer, found = Describer(reader, bounds), []
    told: dict[int, tuple[Extra, int]] = {}
    held = {table.path for table in tables}
    held |= {tensor.path for table in tables if table.path == () for tensor in table.tensors}
    also = {path: table.path for table in tables for path in table.also}
    for (_, value, *_), part in zip(rows, key_parts(rows), strict=True):
        path: Path = (part,)
        if path not in held:
            if id(value) in told:  # a large one may stand under thousands of names
                one, size_bytes = told[id(value)]
                describer.weigher.repeat(size_bytes)
            else:
                before = describer.weigher.bytes
                one = describer.extra(value, path)
                told[id(value)] = one, describer.weigher.bytes - before
            text = (
                f"the same object as '{'.'.join(map(str, also[path]))}'"
                if path in also
                else one.text
            )
            found.append(Extra(path, one.type, one.value, text))
    return tuple(found)
