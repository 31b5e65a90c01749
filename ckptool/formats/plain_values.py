"""What one node is in plain data, with nothing below it but what a single call spells.

Knows: classes, paths, bytes, numpy scalars, sets and sizes as nodes. Must not know: containers, reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from ckptool.formats.arrays import numpy_dtype
from ckptool.formats.judge import inert_raw
from ckptool.formats.measures import SETS, array_shape, device_text, global_name
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

_BIG = 1 << 64


def scalar(node: Any) -> Any:
    """A number, text or None, in what JSON can hold."""
    if type(node) is int and abs(node) >= _BIG:
        return f"<{node.bit_length()}-bit int>"
    if type(node) is float and (node != node or node in (float("inf"), float("-inf"))):
        return repr(node)
    if node == () and type(node) is tuple:
        return []
    return node


def short(value: Any) -> str:
    """A plain value in a few words."""
    if isinstance(value, dict):
        return "{…}" if value else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(short, value[:4]))}{', …' if len(value) > 4 else ''}]"
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


def filling(node: Obj) -> Any:
    """What an object is filled with: its state, else a dict among its arguments."""
    if node.state is not None:
        return node.state.value
    args = items_of(node.args) or ()
    return args[0] if len(args) == 1 else None


def items_of_list(node: Any) -> tuple[Iterable[Any], int]:
    """The elements of a list, a tuple or a set, and how many."""
    if type(node) in (Box, Obj):
        count = sum(len(b.items) for b in node.batches or () if b.op not in PAIR_OPS)
        return (value for value, *_ in elements(node)), count
    items = items_of(node) or ()
    return items, len(items)


def call_items(node: Obj) -> tuple[Iterable[Any], int]:
    """The elements that a set or torch.Size is made of."""
    args = items_of(node.args)
    return items_of_list(args[0]) if args else ((), 0)


def special_value(node: Obj, count: int) -> Any:
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
        parts = [*map(text_of, args[:count]), "…" if len(args) > count else None]
        return slash.join(filter(None, parts))
    raw = inert_raw(args[0] if name.endswith(".bytearray") and args else node)
    if raw is not None:
        return f"<{len(raw)} bytes>"
    if name.endswith("multiarray.scalar") and len(args) == 2:
        return numpy_scalar(args[0], args[1])
    if name in ("torch.Size", *SETS) and args:
        items, size = call_items(node)
        told = [scalar(item) if type(item) in (int, float, str, bool) else "…" for item in islice(items, count)]  # fmt: skip
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
        return scalar(unpack((">" if known[1] else "<") + _FORMATS[known[0].name], raw)[0])
    except error:
        return None


def type_word(node: Any) -> str:
    """What a node is: its class, or dict, list, tuple, str …."""
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
