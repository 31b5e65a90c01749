"""The recipe that changes the floating-point type of a tensor's elements.

Knows: how blocks of numbers are converted fast. Must not know: formats.
A block stays in the processor's cache from the read to the last step; one look at its largest
magnitudes says whether anything in it overflows or is no number.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from ckptool.errors import Unsupported
from ckptool.plans import Made, Reader
from ckptool.values.floats import FLOATS, first_beyond, rounded, table
from ckptool.values.gather import elements
from ckptool.values.storages import coded

_STEP = 1 << 18  # elements converted at a time


class CastCounts(NamedTuple):
    """What a cast could not keep. `overflowed` elements were beyond the target's range (finite
    ones, and infinities where it has none) and became infinity, NaN or, as torch has it for
    float8_e4m3fn, the largest number; `nan` elements were NaN already.
    """

    overflowed: int
    nan: int


def cast(reader: Reader, made: Made) -> Generator[bytes, None, CastCounts]:
    """Recipe: the elements of a view in row-major order as another type, little-endian.

    `made.args` are (encoding, source dtype, target dtype, decoded_size, shape, stride, offset,
    crc). Raises as `gather`, and Unsupported for what is not in `floats.CASTABLE`.
    """
    import numpy as np

    encoding, source, target, size, shape, stride, offset, crc = made.args
    if source not in FLOATS or target not in FLOATS:
        text = f"a cast from {source} to {target}"
        raise Unsupported(text, key=made.label or None, hint="leave it out with --keep-dtype")
    item, wide = FLOATS[source].size_bytes, FLOATS[target].size_bytes
    storage = coded(made, encoding, item, size, crc)
    count, convert = _counter(source, target), _converter(source, target)
    overflowed = nan = 0
    for chunk in elements(reader, storage, item, shape, stride, offset):
        numbers = np.frombuffer(chunk, f"<u{item}").astype(f"u{item}", copy=False)
        for low in range(0, len(numbers), _STEP):
            bits = numbers[low : low + _STEP]
            found = count(bits)
            overflowed, nan = overflowed + found.overflowed, nan + found.nan
            yield convert(bits, found.nan > 0).astype(f"<u{wide}", copy=False).tobytes()
    return CastCounts(overflowed, nan)


def _counter(source: str, target: str) -> Callable[[Any], CastCounts]:
    """A function that counts what of a block of patterns the cast cannot keep."""
    import numpy as np

    made, to = FLOATS[source], FLOATS[target]
    if made.sign != "kept":
        return _histogram(source, target)
    limit, top = first_beyond(source, target), made.top
    first_nan = made.end + made.has_infinity
    signed = f"i{made.size_bytes}"
    none = CastCounts(0, 0)

    def count(bits: Any) -> CastCounts:
        # Positive numbers order as signed integers do, negative ones as unsigned.
        if bits.view(signed).max() < limit and bits.max() < top + limit:
            return none
        magnitudes = bits & bits.dtype.type(top - 1)
        nan = int(np.count_nonzero(magnitudes >= first_nan))
        kept = int(np.count_nonzero(magnitudes == made.end)) if to.has_infinity else 0
        kept *= made.has_infinity
        return CastCounts(int(np.count_nonzero(magnitudes >= limit)) - nan - kept, nan)

    return count


def _histogram(source: str, target: str) -> Callable[[Any], CastCounts]:
    """The same for the 8-bit formats whose patterns are not in the order of magnitudes."""
    import numpy as np

    singles = table(source, "float32")
    numbers = singles.view("f4")
    nan = np.isnan(numbers)  # they have no infinity
    beyond = ((singles & 0x7FFFFFFF) >= first_beyond("float32", target)) & ~nan

    def count(bits: Any) -> CastCounts:
        have = np.bincount(bits, minlength=256)
        return CastCounts(int(have[beyond].sum()), int(have[nan].sum()))

    return count


def _converter(source: str, target: str) -> Callable[[Any, bool], Any]:
    """A function of a block of patterns, and of whether NaN is among them, that gives the
    patterns of the target.
    """
    import numpy as np

    if source == target:
        return lambda bits, odd: bits
    if FLOATS[source].size_bytes <= 2:
        known = table(source, target)
        return lambda bits, odd: np.take(known, bits, mode="wrap")
    if source == "float32":
        return _from_single(target)
    if target == "float32":
        return _to_single
    narrow = _from_single(target)
    return lambda bits, odd: narrow(_to_single(bits, odd), odd)


def _to_single(bits: Any, odd: bool) -> Any:
    import numpy as np

    with np.errstate(all="ignore"):
        return bits.view("f8").astype("f4").view("u4")


def _from_single(target: str) -> Callable[[Any, bool], Any]:
    ways: dict[str, Callable[[Any, bool], Any]] = {"float64": _to_double, "float16": _to_half}
    return ways.get(target) or _Shortened(target).convert


def _to_double(bits: Any, odd: bool) -> Any:
    import numpy as np

    with np.errstate(all="ignore"):
        return bits.view("f4").astype("f8").view("u8")


def _to_half(bits: Any, odd: bool) -> Any:
    import numpy as np

    with np.errstate(all="ignore"):
        result = bits.view("f4").astype("f2").view("u2")
    return _with_nan(result, bits, "float16") if odd else result


def _with_nan(result: Any, bits: Any, target: str) -> Any:
    import numpy as np

    lanes = np.flatnonzero((bits & 0x7FFFFFFF) > FLOATS["float32"].end)
    result[lanes] = rounded(bits[lanes], target)
    return result


class _Shortened:
    """float32 to bfloat16, its rounded first half, and to 8 bits, which a table makes of the
    first half when its last bit is set where anything was cut off ("rounded to odd"): the
    table then rounds as if nothing had been.
    """

    def __init__(self, target: str) -> None:
        import numpy as np

        self._known = None if target == "bfloat16" else table("bfloat16", target)
        self._work = np.empty(0, "u4")
        self._half = np.empty(0, "u2")

    def convert(self, bits: Any, odd: bool) -> Any:
        """Patterns of the target, in an array that the next call may fill again."""
        import numpy as np

        if len(self._work) < len(bits):
            self._work, self._half = np.empty(len(bits), "u4"), np.empty(len(bits), "u2")
        work, half = self._work[: len(bits)], self._half[: len(bits)]
        self._round(bits, work)
        np.right_shift(work, 16, out=work)
        if self._known is not None:
            return np.take(self._known, work, mode="wrap")
        np.copyto(half, work, casting="unsafe")
        return _with_nan(half, bits, "bfloat16") if odd else half

    def _round(self, bits: Any, work: Any) -> None:
        import numpy as np

        if self._known is None:
            np.right_shift(bits, 16, out=work)
            np.bitwise_and(work, 1, out=work)
            np.add(work, 0x7FFF, out=work)
            np.add(work, bits, out=work)
        else:
            np.bitwise_and(bits, 0xFFFF, out=work)
            np.add(work, 0xFFFF, out=work)
            np.bitwise_or(work, bits, out=work)
