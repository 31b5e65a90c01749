"""numpy's arrays, scalars and dtypes out of a pickle, as themselves.

Knows: how numpy pickles them (numpy/_core/src/multiarray/methods.c, __reduce__). Must not know:
torch, files. Kinds whose elements have parts of their own (structured ones) become Records.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

from ckptool.formats.arrays import array_parts
from ckptool.formats.judge import inert_raw
from ckptool.formats.measures import array_shape
from ckptool.models.tensors_values import Builder, Call, Knows, Way
from ckptool.pickles.nodes import LIST, Box, Obj, elements, items_of, text_of

_PLAIN = re.compile(r"[fiubcSUO]\d{1,9}|[mM]8", re.ASCII)
_UNIT = re.compile(r"Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as|generic")
_ORDERS = ("<", ">", "=", "|")


def dtype_of(build: Builder, node: Any) -> Any:
    """The numpy dtype a node builds; None for another node, or a kind with parts."""
    import numpy as np

    if type(node) is not Obj or build.name_of(node.fn) != "numpy.dtype":
        return None
    args = items_of(node.args) or ()
    code = text_of(args[0]) if args else None
    state = items_of(node.state.value) if node.state is not None else ()
    order = text_of(state[1]) if state and len(state) > 1 else "|"
    if code is None or not _PLAIN.fullmatch(code) or order not in _ORDERS:
        return None
    if state and len(state) > 4 and any(part is not None for part in state[2:5]):
        return None
    if code[0] in "mM":
        unit = _unit(state[8]) if state and len(state) > 8 else None
        if unit is None:
            return None
        code = f"{code}[{unit}]"
    wanted: Any = "=" if order == "|" else order
    return np.dtype(code).newbyteorder(wanted)


def _unit(node: Any) -> str | None:
    """`25ms` from ({}, (b'ms', 25, 1, 1)), a datetime's metadata."""
    parts = items_of(node) or ()
    facts = items_of(parts[1]) if len(parts) == 2 else None
    if facts is None or len(facts) != 4 or any(type(part) is not int for part in facts[1:]):
        return None
    name = text_of(facts[0]) or (inert_raw(facts[0]) or b"").decode("ascii", "replace")
    if not _UNIT.fullmatch(name) or facts[1] < 1 or facts[2] != 1:
        return None
    return name if name == "generic" else f"{facts[1]}{name}"


def _dtype(build: Builder, call: Call) -> Way | None:
    found = dtype_of(build, call.node)
    return None if found is None else Way(lambda: found)


def _scalar(build: Builder, call: Call) -> Way | None:
    """scalar(dtype, bytes)."""
    import numpy as np

    dtype = dtype_of(build, call.args[0]) if len(call.args) == 2 else None
    if dtype is None or dtype.hasobject or not dtype.itemsize:
        return None
    data = inert_raw(call.args[1])
    if data is None or len(data) != dtype.itemsize:
        return None
    return Way(lambda: np.frombuffer(data, dtype)[0])


def _array(build: Builder, call: Call) -> Way | None:
    """An array of the shape, dtype and order that its state or its arguments give."""
    shape = array_shape(call.node)
    if shape is None or any(size < 0 for size in shape):
        return None
    dtype_node, fortran, payload = array_parts(call.node)
    dtype = dtype_of(build, dtype_node)
    if dtype is None:
        return None
    if dtype.hasobject:
        return _of_objects(build, shape, fortran, payload)
    data = inert_raw(payload)
    if data is None or prod(shape) * dtype.itemsize != len(data):
        return None
    return Way(lambda: _made(data, dtype, shape, fortran))


def _made(data: bytes, dtype: Any, shape: tuple[int, ...], fortran: bool) -> Any:
    import numpy as np

    order: Any = "F" if fortran else "C"
    return np.ndarray(shape, dtype, bytearray(data), order=order)


def _of_objects(
    build: Builder, shape: tuple[int, ...], fortran: bool, payload: Any
) -> Way | None:  # fmt: skip
    """An array of Python objects: a list of them in order."""
    import numpy as np

    if type(payload) is not Box or payload.kind != LIST:
        return None
    items = [item for item, *_ in elements(payload)]
    if len(items) != prod(shape):
        return None
    order: Any = "F" if fortran else "C"

    def fill(made: Any) -> None:
        flat = made.reshape(-1, order=order)  # the same memory
        for at, item in enumerate(items):
            flat[at] = build.get(item)

    return Way(lambda: np.empty(shape, object, order), (), fill)


def reference(name: str) -> Any:
    """A scalar type or class of numpy by its name; None for another name."""
    import numpy as np

    short = name.removeprefix("numpy.")
    return getattr(np, short, None) if name in _REFERENCES else None


_REFERENCES = frozenset(
    f"numpy.{name}"
    for name in ("ndarray", "dtype", "float16", "float32", "float64", "int8", "int16", "int32",
                 "int64", "uint8", "uint16", "uint32", "uint64", "bool_", "complex64", "complex128")
)  # fmt: skip
CALLS: dict[str, Knows] = {"numpy.dtype": _dtype}
for _core in ("numpy.core", "numpy._core"):
    CALLS[f"{_core}.multiarray.scalar"] = _scalar
    CALLS[f"{_core}.multiarray._reconstruct"] = _array
    CALLS[f"{_core}.numeric._frombuffer"] = _array
