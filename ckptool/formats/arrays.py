"""numpy arrays in a bare pickle (the detectron2 zoo), as tensors.

Knows: how numpy pickles an array and a dtype (numpy/core/src/multiarray/methods.c, __reduce__).
Must not know: containers, verbs.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from ckptool.checkpoint import DTYPES, DType, Piece, Storage, Tensor
from ckptool.formats.measures import array_shape, global_name
from ckptool.pickles.nodes import Obj, Raw, Tup, items_of, text_of
from ckptool.spans import Span

# numpy's short codes, without byte order
_CODES = {"f8": "float64", "f4": "float32", "f2": "float16", "i8": "int64", "i4": "int32",
          "i2": "int16", "i1": "int8", "u8": "uint64", "u4": "uint32", "u2": "uint16",
          "u1": "uint8", "b1": "bool", "c8": "complex64", "c16": "complex128"}  # fmt: skip


def numpy_dtype(node: Any) -> tuple[DType, bool] | None:
    """(dtype, whether its bytes are big-endian) of a numpy.dtype node; None for another."""
    args = items_of(node.args) if type(node) is Obj else None
    if not args or global_name(node.fn) != "numpy.dtype":
        return None
    dtype = DTYPES.get(_CODES.get(text_of(args[0]) or "", ""))
    state = items_of(node.state.value) if node.state is not None else None
    order = text_of(state[1]) if state and len(state) > 1 else None
    return None if dtype is None else (dtype, order == ">")


class ArrayReader:
    """Turns array nodes of one pickle into Tensor records of kind ndarray."""

    def __init__(self, data: bytes, absolute: Callable[[Span], Span]) -> None:
        self.data = data
        self.absolute = absolute
        self._read: dict[int, Tensor | None] = {}

    def read(self, node: Any) -> Tensor | None:
        """The array a node builds; None when it builds none. Unknown dtypes stay None."""
        if type(node) is not Obj:
            return None
        if id(node) not in self._read:
            self._read[id(node)] = self._array(node)
        return self._read[id(node)]

    def _array(self, node: Obj) -> Tensor | None:
        shape = array_shape(node)
        if shape is None:
            return None
        dtype_node, fortran, payload = array_parts(node)
        known = numpy_dtype(dtype_node)
        if known is None or any(size < 0 for size in shape):
            return Tensor("", None, shape, None, 0, None, None, "ndarray")
        dtype, big = known
        stride = _strides(shape, fortran)
        count = prod(shape)
        pieces = self._pieces(payload, count * dtype.size_bytes, big)
        known_bytes = bool(pieces) or not count
        storage = Storage(str(node.end), dtype, count, "cpu", pieces) if known_bytes else None
        return Tensor("", dtype, shape, stride, 0, storage, None, "ndarray")

    def _pieces(self, payload: Any, size: int, big: bool) -> tuple[Piece, ...]:
        """Where the numbers lie: raw bytes, or (protocol 2) Latin-1 text spelled in UTF-8."""
        swapped = "-swapped" if big else ""
        if type(payload) is Raw and len(payload.value) == size:
            encoding = "swapped" if big else "stored"
            return (Piece(0, self.absolute(Span(payload.start, size)), encoding),) if size else ()
        span = self._text(payload, size)
        return (Piece(0, self.absolute(span), f"latin1{swapped}"),) if span is not None else ()

    def _text(self, payload: Any, size: int) -> Span | None:
        """The literal in _codecs.encode(text, 'latin1'), when it stands for `size` bytes."""
        if type(payload) is not Obj or global_name(payload.fn) != "_codecs.encode":
            return None
        args = payload.args
        if type(args) is not Tup or type(args.items[0]) is not str or len(args.items[0]) != size:
            return None
        return _text_span(self.data, args.starts[0]) if size else None


_TEXT_WIDTH = {0x58: 4, 0x8C: 1, 0x8D: 8}  # BINUNICODE and its short and long forms


def _text_span(data: bytes, start: int) -> Span | None:
    """The UTF-8 bytes of the string literal at `start`; None where the memo is fetched."""
    width = _TEXT_WIDTH.get(data[start])
    if width is None:
        return None
    first = start + 1 + width
    return Span(first, int.from_bytes(data[start + 1 : first], "little"))


def array_parts(node: Obj) -> tuple[Any, bool, Any]:
    """(dtype node, Fortran order, payload node) of a node that has an `array_shape`. The dtype is
    None where the order is none that numpy writes.
    """
    if (global_name(node.fn) or "").endswith(".numeric._frombuffer"):
        payload, dtype, _, order = items_of(node.args) or [None] * 4
        return dtype if text_of(order) in ("C", "F") else None, text_of(order) == "F", payload
    state = items_of(node.state.value) if node.state is not None else None
    _, _, dtype, fortran, payload = state or [None] * 5
    known = type(fortran) in (bool, int)  # numpy writes True, and takes any number for it
    return dtype if known else None, bool(known and fortran), payload


def _strides(shape: tuple[int, ...], fortran: bool) -> tuple[int, ...]:
    """Steps in elements: the last dimension is the closest one, the first in Fortran order."""
    steps, step = [], 1
    for size in shape if fortran else reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(steps if fortran else reversed(steps))
