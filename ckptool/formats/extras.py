"""The values beside the weights, as one line for people and plain data for JSON.

Knows: optimizers, schedulers, argparse and numpy scalars as nodes. Must not know: containers.
Bounded: of any value what `SHOWN` allows is spelled out, and '…' stands for the rest; `ALL` is
for who wants the whole, and refuses what is more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from ckptool.checkpoint import Extra, Path, Table
from ckptool.errors import LimitExceeded
from ckptool.formats.arrays import numpy_dtype
from ckptool.formats.dicts import dict_items, is_optimizer, key_parts, key_text
from ckptool.formats.judge import inert_raw
from ckptool.formats.measures import SETS, array_shape, device_text, global_name
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
    items_of,
    text_of,
)

_OPTIMIZERS = (("exp_avg_sq", "Adam-like"), ("momentum_buffer", "SGD-like"),
               ("square_avg", "RMSprop-like"), ("sum", "Adagrad-like"), ("exp_avg", "Lion-like"))  # fmt: skip
_BIG = 1 << 64


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


class Describer:
    """Turns nodes into plain values; `reader` tells tensors from other objects."""

    def __init__(self, reader: TensorReader, bounds: Bounds = SHOWN) -> None:
        self.reader = reader
        self.bounds = bounds
        self._sizes: dict[int, list[Any]] = {}  # lists that calls are given, which many may share
        self._known_states: dict[int, tuple[int, dict[str, int], dict[str, int]]] = {}

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
        return Extra(path, _type_word(node), value, self._text(node, value))

    def _text(self, node: Any, value: Any) -> str:
        if type(node) is Obj and global_name(node.fn) in SETS:
            return f"set of {_call_items(node)[1]}"
        if type(node) is Obj and self._special(node) is not None:
            return _short(value)
        if type(node) is Obj and array_shape(node) is not None:
            return f"numpy array {list(array_shape(node) or ())}"
        if type(node) is Obj and class_of(node) is not None:
            inner = value if isinstance(value, dict) else {}
            shown = ", ".join(f"{k}={_short(v)}" for k, v in list(inner.items())[:6])
            more = ", …" if len(inner) > 6 else ""
            name = str(class_of(node)).rpartition(".")[2]
            return f"{name}({shown}{more})"[:160] if inner else name
        if isinstance(value, dict):
            listed = ", ".join(map(str, list(value)[:8]))
            return f"dict of {len(_rows_of(node) or ())}" + (f": {listed}" if listed else "")
        if isinstance(value, list):
            return f"{_type_word(node)} of {_items_of(node)[1]}"
        return _short(value)

    def _value(self, node: Any, depth: int, left: list[int], above: frozenset[int]) -> Any:
        """Plain data for a node; '…' where a bound is reached, '<cycle>' where it holds itself."""
        if type(node) not in (Box, Obj, Tup, Pers, Global, Raw):
            return _scalar(node)
        left[0] -= 1
        if left[0] < 0 or depth < 0:
            return self._rest("…")
        if id(node) in above:
            return "<cycle>"
        above = above | {id(node)}
        if type(node) is Raw:
            return text_of(node) or f"<{len(node.value)} bytes>"
        if type(node) is Global:
            return f"<{node.full}>"
        if type(node) is Pers:
            return "<storage>"
        return self._compound(node, depth - 1, left, above)

    def _compound(self, node: Any, depth: int, left: list[int], above: frozenset[int]) -> Any:
        if type(node) is Obj:
            tensor = self.reader.tensor(node)
            if tensor is not None:
                return f"<tensor {list(tensor.shape or ())}>"
            special = self._special(node)
            if special is not None:
                return special
        rows = _rows_of(node)
        if rows is not None:
            some, more = self._begin(rows, len(rows), left)
            told = {
                str(part): self._value(row[1], depth, left, above)
                for part, row in zip(key_parts(some), some, strict=True)
            }
            return told | {"…": self._rest(f"{more:,} more")} if more else told
        values, count = _items_of(node)
        if type(node) in (Box, Tup) or count:
            some, more = self._begin(values, count, left)
            listed = [self._value(value, depth, left, above) for value in some]
            return [*listed, self._rest("…")] if more else listed
        name = class_of(node)
        return f"<{name}>" if name else "<object>"

    def _begin(self, values: Iterable[Any], count: int, left: list[int]) -> tuple[list[Any], int]:
        """What is told of `count` values, and how many are not."""
        if self.bounds.whole:
            left[0] -= count
            if left[0] < 0:
                self._rest("")
        return list(islice(values, self.bounds.items)), max(0, count - self.bounds.items)

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
            return _special(node, self.bounds.items)
        known = self._sizes.get(id(args[0])) if type(args[0]) in (Box, Tup) else None
        if known is None:
            known = self._sizes[id(args[0])] = _special(node, self.bounds.items)
        return known

    # -- optimizers --------------------------------------------------------------------------
    def _optimizer(self, node: Any) -> dict[str, Any] | None:
        """Groups, parameter count, state names and devices of an optimizer's state_dict."""
        rows = dict_items(node)
        if rows is None or not is_optimizer(rows):
            return None
        parts = {text_of(key): value for key, value, *_ in rows}
        count, names, devices = self._states(parts["state"])
        groups = (
            [self._group(group) for group, *_ in elements(parts["param_groups"])]
            if type(parts["param_groups"]) is Box
            else []
        )
        family = next((word for name, word in _OPTIMIZERS if name in names), "optimizer")
        texts = {"ids_are_text": True} if _ids_are_text(parts) else {}
        return texts | {
            "family": family,
            "groups": groups,
            "state_count": count,
            "state_names": list(names),
            "devices": devices,
        }

    def _states(self, node: Any) -> tuple[int, dict[str, int], dict[str, int]]:
        """How many parameters have state, the names of its parts, and where its tensors are.
        Remembered, since thousands of optimizers may share one.
        """
        if id(node) in self._known_states:
            return self._known_states[id(node)]
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

    def _group(self, node: Any) -> dict[str, Any]:
        group: dict[str, Any] = {}
        for key, value, *_ in dict_items(node) or ():
            name = key_text(key)
            if name in ("params", "param_names"):
                group[f"{name}_count"] = (
                    sum(1 for _ in elements(value)) if type(value) is Box else 0
                )
            elif len(group) < self.bounds.items:
                depth = self.bounds.depth if self.bounds.whole else 1
                group[name] = self._value(value, depth, [self.bounds.leaves], frozenset())
        return group


def _ids_are_text(parts: dict[str | None, Any]) -> bool:
    """Whether parameters that have numbers in their groups have texts in the state, as DCP makes
    all keys of dicts texts: torch's load_state_dict takes none of it, without a word.
    """
    texts = [text_of(key) for key, *_ in dict_items(parts["state"]) or ()]
    if not texts or not all(text is not None and text.isdecimal() for text in texts):
        return False
    groups = [group for group, *_ in elements(parts["param_groups"])]
    found = [
        dict(zip(key_parts(rows), rows, strict=True)) for g in groups if (rows := dict_items(g))
    ]
    params = [rows["params"][1] for rows in found if "params" in rows]
    return any(type(item) is int for node in params for item in _items_of(node)[0])


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


def _rows_of(node: Any) -> list[Any] | None:
    """The entries of a dict, or of what an object is filled with; None for what has none."""
    rows = dict_items(node)
    return dict_items(_filling(node)) if not rows and type(node) is Obj else rows


def _items_of(node: Any) -> tuple[Iterable[Any], int]:
    """The elements of a list, a tuple or a set, and how many."""
    if type(node) in (Box, Obj):
        count = sum(len(b.items) for b in node.batches or () if b.op not in PAIR_OPS)
        return (value for value, *_ in elements(node)), count
    items = items_of(node) or ()
    return items, len(items)


def _call_items(node: Obj) -> tuple[Iterable[Any], int]:
    """The elements that a set or torch.Size is made of."""
    args = items_of(node.args)
    return _items_of(args[0]) if args else ((), 0)


def _special(node: Obj, count: int) -> Any:
    """Values that one call spells: devices, paths, bytes, numpy scalars, and the first `count` items
    of sets and sizes.
    """
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
        return slash.join(filter(None, map(text_of, args)))
    raw = inert_raw(args[0] if name.endswith(".bytearray") and args else node)
    if raw is not None:
        return f"<{len(raw)} bytes>"
    if name.endswith("multiarray.scalar") and len(args) == 2:
        return numpy_scalar(args[0], args[1])
    if name in ("torch.Size", *SETS) and args:
        items, size = _call_items(node)
        told = [_scalar(item) if type(item) in (int, float, str, bool) else "…" for item in islice(items, count)]  # fmt: skip
        return [*told, "…"] if size > count else told
    return None


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


def top_extras(
    root: Any, reader: TensorReader, tables: Sequence[Table], bounds: Bounds = SHOWN
) -> tuple[Extra, ...]:
    """The entries of the root that no table holds, in file order."""
    rows = dict_items(root)
    if rows is None:
        return ()
    describer, found = Describer(reader, bounds), []
    told: dict[int, Extra] = {}
    held = {table.path for table in tables}
    held |= {tensor.path for table in tables if table.path == () for tensor in table.tensors}
    also = {path: table.path for table in tables for path in table.also}
    for (_, value, *_), part in zip(rows, key_parts(rows), strict=True):
        path: Path = (part,)
        if path not in held:
            one = told.get(id(value))  # a large one may stand under thousands of names
            if one is None:
                one = told[id(value)] = describer.extra(value, path)
            text = (
                f"the same object as '{'.'.join(map(str, also[path]))}'"
                if path in also
                else one.text
            )
            found.append(Extra(path, one.type, one.value, text))
    return tuple(found)
