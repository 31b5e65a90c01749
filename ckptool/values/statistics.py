"""What the numbers of one tensor are like: range, mean, spread, zeros, NaN.

Knows: which dtypes have numbers, what torch says of them. Must not know: files, views, verbs.
numpy only inside functions.
Minimum, maximum, mean, standard deviation and norm are of the finite numbers; NaN and infinities
are counted. Where all are finite, that is what torch computes in double precision.
"""

from __future__ import annotations

from math import fsum, isfinite
from typing import Any, NamedTuple, Protocol

from ckptool.checkpoint import DType
from ckptool.values.distance_numbers import Buffer, numbers
from ckptool.values.floats import table
from ckptool.values.stats_moments import Moments, deviation, moments, norm

STEP = 1 << 17
"""Elements reckoned with at a time: they stay in a processor's cache from the read to the last sum."""
_PAIRED = 1 << 18  # from here on, one-byte codes are counted two at a time
_CODES = frozenset(("qint8", "quint8", "qint32"))
_FOUR_BITS = "float4_e2m1fn_x2"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling Formats 1.0, 5.3.3
Number = float | int


class Statistics(NamedTuple):
    """`element_count` numbers, of which so many are zero, NaN and infinite (a complex number may be
    both). `min`, `max`, `mean`, `std` (unbiased, as torch's) and `norm` (L2) are of the finite ones:
    None where there are none, `std` for a single one too, `min` and `max` for complex numbers,
    anything that is out of a double's range. `min` and `max` of whole numbers are exact ints.
    """

    element_count: int
    zero_count: int
    nan_count: int
    inf_count: int
    min: Number | None
    max: Number | None
    mean: float | complex | None
    std: float | None
    norm: float | None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON: a complex mean is [real, imaginary]."""
        mean = self.mean
        pair = [mean.real, mean.imag] if isinstance(mean, complex) else mean
        return {**self._asdict(), "mean": pair}


def has_statistics(dtype: DType) -> bool:
    """Whether torch (or, of quantized types, `int_repr()`) has one number for each element;
    float4_e2m1fn_x2 has two.
    """
    return dtype.kind in ("float", "int", "bool", "complex") or dtype.name in _CODES


def counts_codes(dtype: DType) -> bool:
    """Whether the numbers are raw codes, before scale and zero point."""
    return dtype.name in _CODES


class Tally(Protocol):
    """What is known of the elements seen so far."""

    def add(self, block: Buffer) -> None:
        """Whole elements, little-endian, in any order."""

    def join(self, other: Any) -> None:
        """What another tally has seen of the same dtype."""

    def statistics(self, times: int = 1) -> Statistics:
        """Of all elements, each of them `times` over."""


class Room:
    """Arrays that are used again and again: new memory costs more than what is reckoned in it. One
    for each thread.
    """

    def __init__(self) -> None:
        self.doubles: Any = None
        self.flags: Any = None

    def make(self, count: int) -> None:
        """At least so many elements."""
        import numpy as np

        if self.doubles is None or len(self.doubles) < count:
            self.doubles, self.flags = np.empty(count), np.empty(count, "?")


def tally(dtype: DType, room: Room | None = None) -> Tally:
    """A tally of nothing yet, for a dtype that `has_statistics`."""
    if dtype.size_bytes == 1:
        return _Codes(dtype.name)
    return _Numbers(dtype.name, room or Room())


class _Numbers:
    """Elements of more than one byte, block by block."""

    def __init__(self, dtype: str, room: Room) -> None:
        self._dtype = dtype
        self._room = room
        self._count = self._zero = self._nan = self._inf = 0
        self._low: Number | None = None
        self._high: Number | None = None
        self._parts = [Moments()] * (2 if dtype.startswith("complex") else 1)

    def add(self, block: Buffer) -> None:
        import numpy as np

        with np.errstate(all="ignore"):
            values = _values(block, self._dtype)
            self._room.make(min(len(values), STEP))
            for at in range(0, len(values), STEP):
                self._add(values[at : at + STEP])

    def join(self, other: _Numbers) -> None:
        self._count += other._count
        self._zero += other._zero
        self._nan += other._nan
        self._inf += other._inf
        self._widen(other._low, other._high)
        self._take(other._parts)

    def statistics(self, times: int = 1) -> Statistics:
        counts = (self._count * times, self._zero * times, self._nan * times, self._inf * times)
        return _told(counts, (self._low, self._high), [p.repeated(times) for p in self._parts])

    def _add(self, values: Any) -> None:
        import numpy as np

        self._count += len(values)
        if values.dtype.kind == "c":
            self._add_complex(values)
            return
        low, high = values.min(), values.max()
        if values.dtype.kind == "f" and not (isfinite(low) and isfinite(high)):
            values = self._finite(values)
            if not len(values):
                return
            low, high = values.min(), values.max()
        if low <= 0 <= high:
            where = np.equal(values, 0, out=self._room.flags[: len(values)])
            self._zero += int(np.count_nonzero(where))
        low, high = low.item(), high.item()
        self._widen(low, high)
        self._take([moments(values, low, high, self._room.doubles)])

    def _add_complex(self, values: Any) -> None:
        import numpy as np

        if not np.isfinite(values).all():
            values = self._finite(values)
        if not len(values):
            return
        self._zero += int(np.count_nonzero(values == 0))
        sides = [np.ascontiguousarray(side) for side in (values.real, values.imag)]
        room = self._room.doubles
        self._take([moments(s, s.min().item(), s.max().item(), room) for s in sides])

    def _finite(self, values: Any) -> Any:
        """The finite ones; the others are counted."""
        import numpy as np

        self._nan += int(np.count_nonzero(np.isnan(values)))
        self._inf += int(np.count_nonzero(np.isinf(values)))
        return values[np.isfinite(values)]

    def _widen(self, low: Number | None, high: Number | None) -> None:
        if low is not None:
            self._low = low if self._low is None else min(self._low, low)
        if high is not None:
            self._high = high if self._high is None else max(self._high, high)

    def _take(self, found: list[Moments]) -> None:
        self._parts = [one.joined(two) for one, two in zip(self._parts, found, strict=True)]


def _values(block: Buffer, dtype: str) -> Any:
    """The numbers of a block; of float16 by a table, which takes half the time of numpy's cast."""
    import numpy as np

    if dtype != "float16":
        return numbers(block, dtype)
    halves = np.frombuffer(block, "<u2")
    return np.take(table(dtype, "float32"), halves, mode="wrap").view("f4")


class _Codes:
    """Elements of one byte: how often each of 256 codes stands there says all."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._counts: Any = None

    def add(self, block: Buffer) -> None:
        import numpy as np

        codes = np.frombuffer(block, "u1")
        even = len(codes) & ~1 if len(codes) >= _PAIRED else 0
        found = np.bincount(codes[even:], minlength=256)
        if even:
            pairs = np.bincount(codes[:even].view("u2"), minlength=1 << 16).reshape(256, 256)
            found = found + pairs.sum(0) + pairs.sum(1)
        self._counts = found if self._counts is None else self._counts + found

    def join(self, other: _Codes) -> None:
        if self._counts is None or other._counts is None:
            self._counts = other._counts if self._counts is None else self._counts
        else:
            self._counts = self._counts + other._counts

    def statistics(self, times: int = 1) -> Statistics:
        rows = [(value, n * times) for value, n in self._rows() if n]
        finite = [(value, n) for value, n in rows if isfinite(value)]
        count = sum(n for _, n in finite)
        mean = fsum(value * n for value, n in finite) / max(count, 1)
        spread = fsum(n * (value - mean) ** 2 for value, n in finite)
        known = [value for value, _ in finite]
        counts = (
            sum(n for _, n in rows),
            sum(n for value, n in rows if value == 0),
            sum(n for value, n in rows if value != value),
            sum(n for value, n in rows if abs(value) == float("inf")),
        )
        ends = (min(known, default=None), max(known, default=None))
        return _told(counts, ends, [Moments(count, mean, spread)])

    def _rows(self) -> list[tuple[Number, int]]:
        """(value, how often) of each code."""
        if self._counts is None:
            return []
        if self._dtype == _FOUR_BITS:
            square = self._counts.reshape(16, 16)
            values = [*_E2M1, *(-value for value in _E2M1)]
            return list(zip(values, (square.sum(0) + square.sum(1)).tolist(), strict=True))
        values = numbers(bytes(range(256)), self._dtype).tolist()
        return list(zip(values, self._counts.tolist(), strict=True))


def _told(
    counts: tuple[int, int, int, int], ends: tuple[Number | None, Number | None],
    parts: list[Moments],
) -> Statistics:  # fmt: skip
    low, high = (None if end is None else end + 0 for end in ends)  # -0.0 is 0.0
    if not parts[0].element_count:
        return Statistics(*counts, low, high, None, None, None if counts[0] else 0.0)
    means = [part.total_mean() for part in parts]
    mean: float | complex | None = None
    if None not in means:
        mean = means[0] if len(means) == 1 else complex(*means)  # type: ignore[arg-type]
    return Statistics(*counts, low, high, mean, deviation(*parts), norm(*parts))
