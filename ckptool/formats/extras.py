"""The values beside the weights, as one line for people and plain data for JSON.

Knows: optimizers, schedulers, argparse and numpy scalars as nodes. Must not know: containers.
Bounded: at most `_LEAVES` leaves and `_DEPTH` levels of any value are spelled out, and what the memo
of a pickle repeats, at two bytes a time, is weighed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from ckptool.checkpoint import Extra, Path, Table
from ckptool.formats.arrays import numpy_dtype
from ckptool.formats.dicts import Rows, dict_items, is_optimizer, key_parts, key_text
from ckptool.formats.judge import inert_raw
from ckptool.formats.measures import SETS, array_shape, device_text, global_name
from ckptool.formats.repeated import ITEM_BYTES, Weigher
from ckptool.formats.torch_pickle import TensorReader
from ckptool.pickles.nodes import (
    PAIR_OPS,
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

_LEAVES, _DEPTH, _TEXT = 64, 4, 160
_OPTIMIZERS = (("exp_avg_sq", "Adam-like"), ("momentum_buffer", "SGD-like"),
               ("square_avg", "RMSprop-like"), ("sum", "Adagrad-like"), ("exp_avg", "Lion-like"))  # fmt: skip
_BIG = 1 << 64
_LONG = 1_000  # rows of a dict that are remembered, since thousands may hold it


class Describer:
    """Turns nodes into plain values; `reader` tells tensors from other objects."""

    def __init__(self, reader: TensorReader) -> None:
        self.reader = reader
        self._sizes: dict[int, list[Any]] = {}  # lists that calls are given, which many may share
        self._known_states: dict[int, tuple[int, dict[str, int], dict[str, int]]] = {}
        self._known_rows: dict[int, Rows] = {}
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
        left = [_LEAVES]
        value = self._value(node, _DEPTH, left, frozenset())
        return Extra(path, _type_word(node), value, self._text(node, value))

    def _text(self, node: Any, value: Any) -> str:
        if type(node) is Obj and global_name(node.fn) in SETS:
            return f"set of {len(value)}"
        if type(node) is Obj and self._special(node) is not None:
            return _short(value)
        if type(node) is Obj and array_shape(node) is not None:
            return f"numpy array {list(array_shape(node) or ())}"
        if type(node) is Obj and class_of(node) is not None:
            inner = value if isinstance(value, dict) else {}
            shown = ", ".join(f"{k}={_short(v)}" for k, v in list(inner.items())[:6])
            more = ", …" if len(inner) > 6 else ""
            name = str(class_of(node)).rpartition(".")[2]
            return f"{name}({shown}{more})"[:_TEXT] if inner else name
        if isinstance(value, dict):
            listed = ", ".join(map(str, list(value)[:8]))
            return f"dict of {len(value)}" + (f": {listed}" if listed else "")
        if isinstance(value, list):
            return f"{_type_word(node)} of {len(value)}"
        return _short(value)

    def _value(self, node: Any, depth: int, left: list[int], above: frozenset[int]) -> Any:
        """Plain data for a node; '…' where a bound is reached, '<cycle>' where it holds itself."""
        if type(node) not in (Box, Obj, Tup, Pers, Global, Raw):
            if type(node) is str:
                self.weigher.weigh(node, len(node))
            return _scalar(node)
        left[0] -= 1
        if left[0] < 0 or depth < 0:
            return "…"
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
        self.weigher.weigh(node, ITEM_BYTES * min(held_count(node), _LEAVES + 1))
        if type(node) is Tup:
            return [self._value(item, depth, left, above) for item in node.items[: _LEAVES + 1]]
        if type(node) is Obj:
            tensor = self.reader.tensor(node)
            if tensor is not None:
                return f"<tensor {list(tensor.shape or ())}>"
            self._weigh_call(node)
            special = self._special(node)
            if special is not None:
                return special
        rows = self._rows(node)
        if rows is not None:
            for key, *_ in rows:
                self.weigher.weigh(key, len(key) if type(key) is str else 0)
            return {
                str(part): self._value(row[1], depth, left, above)
                for part, row in zip(key_parts(rows), rows, strict=True)
            }
        values = [value for value, *_ in islice(elements(node), _LEAVES + 1)]
        if type(node) is Box or values:
            return [self._value(value, depth, left, above) for value in values]
        name = class_of(node)
        return f"<{name}>" if name else "<object>"

    def _rows(self, node: Any) -> Rows | None:
        """The first items of a dict, or of what an object is filled with; None for another."""
        rows = self._known_rows.get(id(node)) or dict_items(node)
        if not rows and type(node) is Obj:
            rows = dict_items(_filling(node))
        if rows is None:
            return None
        cut = rows[: _LEAVES + 1]
        if len(rows) > _LONG:
            self._known_rows[id(node)] = cut
        return cut

    def _special(self, node: Obj) -> Any:
        """As `_special`, but what calls share is told once."""
        args = items_of(node.args) or ()
        if global_name(node.fn) != "torch.Size" or not args:
            return _special(node)
        known = self._sizes.get(id(args[0])) if type(args[0]) in (Box, Tup) else None
        if known is None:
            known = self._sizes[id(args[0])] = _special(node)
        return known

    def _weigh_call(self, node: Obj) -> None:
        """Count the first arguments of one: texts that a path has, what a size or set is made of."""
        for arg in (items_of(node.args) or ())[:_IN_CALL]:
            if type(arg) is str:
                self.weigher.weigh(arg, len(arg))
            elif type(arg) in (Box, Tup):
                self.weigher.weigh(arg, ITEM_BYTES * min(held_count(arg), _IN_CALL))

    # -- optimizers --------------------------------------------------------------------------
    def _optimizer(self, node: Any) -> dict[str, Any] | None:
        """Groups, parameter count, state names and devices of an optimizer's state_dict."""
        rows = dict_items(node)
        if rows is None or not is_optimizer(rows):
            return None
        parts = {text_of(key): value for key, value, *_ in rows}
        count, names, devices = self._states(parts["state"])
        groups = self._groups(parts["param_groups"])
        family = next((word for name, word in _OPTIMIZERS if name in names), "optimizer")
        return {
            "family": family,
            "groups": groups,
            "state_count": count,
            "state_names": list(names),
            "devices": devices,
        }

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

    def _states(self, node: Any) -> tuple[int, dict[str, int], dict[str, int]]:
        """How many parameters have state, the names of its parts, and where its tensors are.
        Remembered, since thousands of optimizers may share one.
        """
        if id(node) in self._known_states:
            known = self._known_states[id(node)]
            self.weigher.repeat(sum(ITEM_BYTES + len(name) for name in known[1]))
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
        known = self._known_states[id(node)] = (len(states), names, devices)
        return known

    def _count(self, box: Box) -> int:
        """The items of a list, which thousands of groups may share."""
        self.weigher.weigh(box, len(box.batches))
        return sum(len(batch.items) for batch in box.batches if batch.op not in PAIR_OPS)

    def _group(self, node: Any) -> dict[str, Any]:
        group: dict[str, Any] = {}
        self.weigher.weigh(node, ITEM_BYTES * (1 + held_count(node)))
        for key, value, *_ in dict_items(node) or ():
            name = key_text(key)
            if name in ("params", "param_names"):
                group[f"{name}_count"] = self._count(value) if type(value) is Box else 0
            elif len(group) < _LEAVES:
                group[name] = self._value(value, 1, [_LEAVES], frozenset())
        return group


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


def _scalar(node: Any) -> Any:
    if type(node) is int and abs(node) >= _BIG:
        return f"<{node.bit_length()}-bit int>"
    if type(node) is float and (node != node or node in (float("inf"), float("-inf"))):
        return repr(node)
    if node == () and type(node) is tuple:
        return []
    return node


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "{…}" if value else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value[:4]))}{', …' if len(value) > 4 else ''}]"
    return repr(value) if isinstance(value, str) and not value.startswith("<") else str(value)


def class_of(node: Obj) -> str | None:
    """The class an object is of, seen through copy_reg._reconstructor."""
    name = global_name(node.fn)
    if name in ("copy_reg._reconstructor", "copyreg._reconstructor"):
        args = items_of(node.args) or ()
        return global_name(args[0]) if args else None
    if name in ("collections.OrderedDict", "collections.defaultdict"):
        return None
    return name


def _filling(node: Obj) -> Any:
    """What an object is filled with: its state, else a dict among its arguments."""
    if node.state is not None:
        return node.state.value
    args = items_of(node.args) or ()
    return args[0] if len(args) == 1 else None


def _special(node: Obj) -> Any:
    """Values that one call spells: devices, paths, bytes, numpy scalars, sets, sizes."""
    device = device_text(node)
    if device is not None:
        return f"device('{device}')"
    shape = array_shape(node)
    if shape is not None:
        return f"<array {list(shape)}>"
    name = global_name(node.fn) or ""
    args = items_of(node.args) or ()
    if name.startswith("pathlib."):
        slash = "\\" if "Windows" in name else "/"
        parts = [*map(text_of, args[:_IN_CALL]), "…" if len(args) > _IN_CALL else None]
        return slash.join(filter(None, parts))
    raw = inert_raw(args[0] if name.endswith(".bytearray") and args else node)
    if raw is not None:
        return f"<{len(raw)} bytes>"
    if name.endswith("multiarray.scalar") and len(args) == 2:
        return numpy_scalar(args[0], args[1])
    if name in ("torch.Size", *SETS) and args:
        inner = args[0]
        items = items_of(inner) if type(inner) is not Box else (v for v, *_ in elements(inner))
        return [
            _scalar(item) if type(item) in (int, float, str, bool) else "…"
            for item in islice(items or (), _IN_CALL)
        ]
    return None


_IN_CALL = 64  # items of a torch.Size or a set: thousands of calls may share one list
_FORMATS = {"float16": "e", "float32": "f", "float64": "d", "int8": "b", "int16": "h", "int32": "i",
            "int64": "q", "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q", "bool": "?"}  # fmt: skip


def numpy_scalar(dtype: Any, data: Any) -> Any:
    """The number in numpy's scalar(dtype, bytes); None when it is no plain number."""
    from struct import error, unpack

    known, raw = numpy_dtype(dtype), inert_raw(data)
    if known is None or raw is None or known[0].name not in _FORMATS:
        return None
    try:
        return _scalar(unpack((">" if known[1] else "<") + _FORMATS[known[0].name], raw)[0])
    except error:
        return None


def _type_word(node: Any) -> str:
    if type(node) is Obj:
        name = class_of(node) or "dict"
        return "set" if name in SETS else name
    if type(node) is Box:
        return {0x7D: "dict", 0x5D: "list"}.get(node.kind, "set")
    if type(node) is Tup:
        return "tuple"
    if type(node) is Raw:
        return "str" if text_of(node) is not None else "bytes"
    if type(node) is Global:
        return "class"
    return {Pers: "storage"}.get(type(node), type(node).__name__)


def top_extras(root: Any, reader: TensorReader, tables: Sequence[Table]) -> tuple[Extra, ...]:
    """The entries of the root that no table holds, in file order."""
    rows = dict_items(root)
    if rows is None:
        return ()
    describer, found = Describer(reader), []
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
