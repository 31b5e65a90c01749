"""The numbers in a block of bytes, whatever torch's name of their type.

Knows: how many bytes an element has and what it means; which elements count as the same.
Must not know: files, views, formats. numpy only inside functions.
Blocks are little-endian and hold whole elements. What torch gives no numbers to (quantized,
bits, packed types) goes by its raw codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptool.values.floats import FLOATS, table

Buffer = bytes | bytearray | memoryview

_PLAIN = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "int64": "<i8", "int32": "<i4",
    "int16": "<i2", "int8": "i1", "uint8": "u1", "uint16": "<u2", "uint32": "<u4",
    "uint64": "<u8", "complex64": "<c8", "complex128": "<c16", "qint8": "i1", "quint8": "u1",
    "qint32": "<i4", "bits16": "<u2",
}  # fmt: skip
"""torch's name to numpy's; what is missing has a way of its own or raw codes of one byte."""


def numbers(data: Buffer, dtype: str) -> Any:
    """The elements as an array of a type numpy can reckon with: bfloat16, float16 and 8-bit
    floats as float32 (every value is exact), complex32 as complex64, bool as 0 and 1.
    """
    import numpy as np

    special = _SPECIAL.get(dtype)
    if special is not None:
        return special(data)
    kind = _PLAIN.get(dtype)
    if kind is None and dtype in FLOATS:
        codes = np.frombuffer(data, "u1")
        return np.take(table(dtype, "float32"), codes).view("f4")
    found = np.frombuffer(data, kind or "u1")
    if kind == "<f2":
        return _wider(found)
    return found.astype(found.dtype.newbyteorder("="), copy=False)


def _wider(halves: Any) -> Any:
    import numpy as np

    with np.errstate(all="ignore"):  # signalling NaN
        return halves.astype("f4")


def _brain(data: Buffer) -> Any:
    import numpy as np

    return (np.frombuffer(data, "<u2").astype("u4") << np.uint32(16)).view("f4")


def _truth(data: Buffer) -> Any:
    import numpy as np

    return (np.frombuffer(data, "u1") != 0).astype("u1")


def _half_complex(data: Buffer) -> Any:
    import numpy as np

    return _wider(np.frombuffer(data, "<f2")).view("c8")


_SPECIAL: dict[str, Callable[[Buffer], Any]] = {
    "bfloat16": _brain, "bool": _truth, "complex32": _half_complex,
}  # fmt: skip


def resolved(values: Any, kind: str) -> Any:
    """What torch shows of a tensor whose bits say that it is conjugated or negated."""
    import numpy as np

    if kind in ("conj", "conj+neg"):
        values = np.conjugate(values)
    return -values if kind in ("neg", "conj+neg") else values


def unequal(left: Any, right: Any) -> Any:
    """Where two arrays differ, as truth values: NaN is NaN whatever its bits, 0 is -0.

    Signed and unsigned 64-bit integers are compared as they are, not as floats.
    """
    import numpy as np

    if {left.dtype.kind, right.dtype.kind} == {"i", "u"}:
        signed, other = (left, right) if left.dtype.kind == "i" else (right, left)
        return (signed < 0) | (signed.astype("u8") != other.astype("u8"))
    with np.errstate(all="ignore"):  # signalling NaN
        found = left != right
        if left.dtype.kind in "fc" and right.dtype.kind in "fc" and found.any():
            found &= ~(np.isnan(left) & np.isnan(right))
    return found
