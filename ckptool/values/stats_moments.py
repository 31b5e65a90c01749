"""Count, mean and spread of numbers that come in blocks, in double precision.

Knows: a stable way to join blocks, numbers near the ends of a double's range, 64-bit integers.
Must not know: files, views, dtypes' names. numpy only inside functions.
"""

from __future__ import annotations

from math import ldexp, sqrt
from typing import Any, NamedTuple

_LARGE = 2.0**500
"""Squares of numbers beyond this, or below its inverse, leave the range of a double: such blocks are
scaled by a power of two, which is exact."""
_SCALE = 600  # its exponent
_FAR = 1 << 32  # 64-bit integers beyond this are told from near by, as 2**53 + 1 is no double
_LOST = 2.0**-10
"""Where less than this share of the sum of squares is spread, the mean is taken off first: the
difference of two sums would lose ten bits or more."""
_DOT = 8192  # above this OpenBLAS wakes threads for a dot product, which costs more than it saves


class Moments(NamedTuple):
    """Of `element_count` numbers `(base + x) * 2**exponent`: the mean of x, and the sum of the squares
    of its distances from it. `base` is a number near by where the spread is small beside the mean,
    whose last digits would be lost in a sum; an int only where `exponent` is 0.
    """

    element_count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    base: float | int = 0
    exponent: int = 0

    def joined(self, other: Moments) -> Moments:
        """Those of both together (Chan, Golub and LeVeque's way)."""
        if not self.element_count or not other.element_count:
            return self if self.element_count else other
        exponent = max(self.exponent, other.exponent)
        a, b = self._at(exponent), other._at(exponent)
        count = a.element_count + b.element_count
        gap = (b.base - a.base) + (b.mean - a.mean)
        squares = a.squares + b.squares + gap * gap * (a.element_count * b.element_count / count)
        return Moments(count, a.mean + gap * (b.element_count / count), squares, a.base, exponent)

    def repeated(self, times: int) -> Moments:
        """Those of the same numbers, each of them `times` over."""
        return self._replace(element_count=self.element_count * times, squares=self.squares * times)

    def total_mean(self) -> float | None:
        """The mean of the numbers themselves; None when there are none, and out of range."""
        if not self.element_count:
            return None
        return _scaled(self.base + self.mean, self.exponent)

    def _at(self, exponent: int) -> Moments:
        shift = self.exponent - exponent
        if not shift:
            return self
        mean, base = ldexp(self.mean, shift), ldexp(self.base, shift)
        return Moments(self.element_count, mean, ldexp(self.squares, 2 * shift), base, exponent)


def deviation(*parts: Moments) -> float | None:
    """The unbiased standard deviation, of complex numbers by their two parts; None for fewer than
    two numbers, and out of range.
    """
    count, squares, exponent = _summed(parts, centred=True)
    return _scaled(sqrt(squares / (count - 1)), exponent) if count > 1 else None


def norm(*parts: Moments) -> float | None:
    """The root of the sum of the squares; None out of range."""
    _, squares, exponent = _summed(parts, centred=False)
    return _scaled(sqrt(squares), exponent)


def _summed(parts: tuple[Moments, ...], centred: bool) -> tuple[int, float, int]:
    """(count, sum of squares of distances from the mean or from 0, exponent)."""
    exponent = max(part.exponent for part in parts)
    rows = [part._at(exponent) for part in parts]
    squares = sum(row.squares for row in rows)
    if not centred:  # all terms are positive: nothing cancels
        squares += sum(row.element_count * (row.base + row.mean) ** 2 for row in rows)
    return parts[0].element_count, squares, exponent


def _scaled(number: float, exponent: int) -> float | None:
    try:
        return ldexp(number, exponent)
    except OverflowError:
        return None


def moments(values: Any, low: float | int, high: float | int, room: Any) -> Moments:
    """Those of a block of finite numbers, one at least, with its smallest and largest as Python
    numbers; `room` is an array of doubles, as long at least, that is overwritten.
    """
    count = len(values)
    if values.dtype.kind in "iu" and max(-low, high) > _FAR:
        return _whole(values, int(low), room)
    exponent = _exponent(max(-low, high)) if values.dtype == "f8" else 0
    if low == high:
        return Moments(count, 0.0, 0.0, ldexp(low, -exponent), exponent)
    doubles = _doubles(values, exponent, room)
    total, squares = float(doubles.sum()), dot(doubles, doubles)
    mean = total / count
    spread = squares - total * mean
    if spread >= squares * _LOST:
        return Moments(count, mean, spread, 0, exponent)
    return _near(doubles, mean, room)._replace(base=mean, exponent=exponent)


def _near(doubles: Any, mean: float, room: Any) -> Moments:
    """Those of what is left when something near the mean is taken off."""
    import numpy as np

    rest = np.subtract(doubles, mean, out=room[: len(doubles)])
    total = float(rest.sum())
    spread = dot(rest, rest) - total * total / len(rest)
    return Moments(len(rest), total / len(rest), max(spread, 0.0))


def _whole(values: Any, low: int, room: Any) -> Moments:
    """64-bit integers by their distances from the smallest one, which no rounding has touched."""
    import numpy as np

    distances = values.view("u8") - np.uint64(low % (1 << 64))  # modulo 2**64
    doubles = room[: len(distances)]
    np.copyto(doubles, distances)
    mean = float(doubles.sum()) / len(doubles)
    found = _near(doubles, mean, room)
    return found._replace(mean=mean + found.mean, base=low)


def _exponent(top: float) -> int:
    if top > _LARGE:
        return _SCALE
    return -_SCALE if top < 1 / _LARGE else 0


def _doubles(values: Any, exponent: int, room: Any) -> Any:
    import numpy as np

    if values.dtype == "f8" and not exponent:
        return values
    doubles = room[: len(values)]
    if exponent:
        return np.multiply(values, 2.0**-exponent, out=doubles)
    np.copyto(doubles, values)
    return doubles


def dot(x: Any, y: Any) -> float:
    """The sum of the products of doubles."""
    import numpy as np

    if len(x) <= _DOT:
        return float(np.dot(x, y))
    return sum(float(np.dot(x[i : i + _DOT], y[i : i + _DOT])) for i in range(0, len(x), _DOT))
