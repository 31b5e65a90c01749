"""The floating-point formats of torch, and how the numbers of one are rounded to another.

Knows: exponents, mantissas, what torch makes of overflow and NaN. Must not know: files, views.
Patterns are the bits of numbers as unsigned integers. All of it is what `tensor.to(dtype)`
gives, bit for bit (torch 2.13); torch takes float64 to float32 first, and rounds twice.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

_FULL = 25  # a shift that leaves nothing of float32's 24 significant bits


class Float(NamedTuple):
    """One format. `end` is the first magnitude that is no finite number, `beyond` the one
    written for what is out of range, `nan` the one written for NaN. `sign` says what becomes
    of the sign: kept, dropped, or `one-zero` (NaN stands where -0 would).
    """

    exponent: int
    mantissa: int
    bias: int
    end: int
    beyond: int
    nan: int
    sign: str = "kept"

    @property
    def top(self) -> int:
        """The sign bit; the patterns below it are magnitudes, in order."""
        return 1 << (self.exponent + self.mantissa)

    @property
    def size_bytes(self) -> int:
        """Bytes of one number."""
        return (self.exponent + self.mantissa + 1) // 8

    @property
    def has_infinity(self) -> bool:
        """Whether there is a pattern for it: the others write NaN or their largest number."""
        return self.beyond == self.end != self.nan


FLOATS = {
    "float64": Float(11, 52, 1023, 0x7FF << 52, 0x7FF << 52, 0x7FF8 << 48),
    "float32": Float(8, 23, 127, 0x7F800000, 0x7F800000, 0x7FC00000),
    "float16": Float(5, 10, 15, 0x7C00, 0x7C00, 0x7E00),
    "bfloat16": Float(8, 7, 127, 0x7F80, 0x7F80, 0x7FC0),
    "float8_e4m3fn": Float(4, 3, 7, 0x7F, 0x7E, 0x7F),
    "float8_e5m2": Float(5, 2, 15, 0x7C, 0x7C, 0x7F),
    "float8_e4m3fnuz": Float(4, 3, 8, 0x80, 0x80, 0x80, "one-zero"),
    "float8_e5m2fnuz": Float(5, 2, 16, 0x80, 0x80, 0x80, "one-zero"),
    "float8_e8m0fnu": Float(8, 0, 127, 0xFF, 0xFF, 0xFF, "dropped"),
}
CASTABLE = frozenset(FLOATS)
"""Names of the dtypes that the recipe `cast` takes and gives."""

_SINGLE = FLOATS["float32"]
_SIGNALLING = 0x7F800001  # what torch reads NaN as where a format has only one


@lru_cache(maxsize=32)
def table(source: str, target: str) -> Any:
    """What each pattern of an 8- or 16-bit format becomes in another (an array to index)."""
    import numpy as np

    made = FLOATS[source]
    patterns = np.arange(1 << (8 * made.size_bytes))
    if source == target:
        return patterns.astype(f"u{made.size_bytes}")
    singles = widened(patterns, source)
    if target == "float64":
        with np.errstate(invalid="ignore"):
            return singles.view("f4").astype("f8").view("u8")
    return singles if target == "float32" else rounded(singles, target)


def widened(patterns: Any, source: str) -> Any:
    """The float32 patterns (uint32) of an 8- or 16-bit format's: every value is exact."""
    import numpy as np

    made = FLOATS[source]
    patterns = patterns.astype("i8")
    if source == "bfloat16":
        return (patterns << 16).astype("u4")
    lost = 23 - made.mantissa
    magnitude = patterns & (made.top - 1) if made.sign != "dropped" else patterns
    raised, fraction = magnitude >> made.mantissa, magnitude & ((1 << made.mantissa) - 1)
    lowest = np.maximum(raised, 1) - made.bias - made.mantissa
    value = np.ldexp((fraction + ((raised > 0) << made.mantissa)).astype("f8"), lowest)
    if made.sign == "dropped":  # no zero: its place is the next power of two
        value[magnitude == 0] = 2.0**-made.bias
    over = magnitude >= made.end
    value[over] = 0
    bits = value.astype("f4").view("u4").astype("i8")
    quiet = (fraction > 0) << 22
    bits[over] = (_SINGLE.end | quiet | fraction << lost)[over]
    bits |= (patterns & made.top if made.sign != "dropped" else 0) << (31 - 8 * made.size_bytes + 1)
    if made.sign != "kept":
        bits[patterns == made.nan] = _SIGNALLING
    return bits.astype("u4")


def rounded(singles: Any, target: str) -> Any:
    """The patterns of an 8- or 16-bit format nearest to float32 patterns, ties to even."""
    import numpy as np

    to = FLOATS[target]
    bits = singles.astype("i8")
    magnitude = bits & 0x7FFFFFFF
    raised = magnitude >> 23
    significand = (magnitude & 0x7FFFFF) + ((raised > 0) << 23)
    raised = np.maximum(raised, 1) - 127 + to.bias  # below 1: subnormal in the target
    lost = np.minimum(23 - to.mantissa + np.maximum(1 - raised, 0), _FULL)
    half = (1 << (lost - 1)) - 1 + (significand >> lost & 1)
    result = ((np.maximum(raised, 1) - 1) << to.mantissa) + (significand + half >> lost)
    result[result >= to.end] = to.beyond
    nan = magnitude > _SINGLE.end
    result[nan] = to.nan
    if target == "float16":  # the processor keeps what it can of NaN
        result[nan] |= (magnitude[nan] & 0x7FFFFF) >> 13
    return _signed(result, bits >> 31, nan, target).astype(f"u{to.size_bytes}")


def _signed(result: Any, sign: Any, nan: Any, target: str) -> Any:
    to = FLOATS[target]
    if to.sign == "dropped":
        return result
    sign = sign * to.top
    if to.sign == "one-zero":
        sign[(result == 0) | (result == to.nan)] = 0
    if target == "bfloat16":
        sign[nan] = 0
    return result | sign


@lru_cache(maxsize=128)
def first_beyond(source: str, target: str) -> int:
    """The smallest magnitude of `source` (float64 to bfloat16) that is out of `target`'s range;
    where there is none, the infinity.
    """
    import numpy as np

    made, to = FLOATS[source], FLOATS[target]
    if source == target or target == "float64":
        return made.end
    if source == "float64":
        near = _SINGLE.end if target == "float32" else first_beyond("float32", target)
        return _first_rounding_to(near)
    if target == "float32":
        return made.end
    largest = int(widened(np.array([to.end - 1]), target)[0])
    # Half a step above the largest; an even largest number gets the tie, an odd one does not.
    even = to.mantissa > 0 and to.end & 1
    limit = largest + (1 << (22 - to.mantissa)) + even
    if source == "float32":
        return min(limit, made.end)
    return int(np.searchsorted(widened(np.arange(made.end), source), limit))


def _first_rounding_to(single: int) -> int:
    """The smallest float64 magnitude that becomes this float32 magnitude or more."""
    step = 1 << 29
    exact = (single << 29) + ((1023 - 127) << 52)  # normal numbers alone are asked for
    return exact - step // 2 + (single & 1)
