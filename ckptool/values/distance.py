"""How far the numbers of two tensors are apart: one pass over both, in constant memory.

Knows: maximum and relative differences, cosine, L2, torch.allclose's rule, NaN. Must not know:
formats, verbs. numpy only inside functions.
`a` is torch.allclose's input, `b` its other: differences are relative to b.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import fsum, isfinite, sqrt
from typing import Any, NamedTuple

from ckptool.values.distance_numbers import numbers, resolved, unequal
from ckptool.values.equal import Block, Seen, blocks, place

STEP = 1 << 17
"""Elements reckoned with at a time: enough that numpy's calls cost little beside them, few enough
that they stay in a processor's cache.
"""
LISTED = 3
"""Places of NaN that are told."""
_DOT = 8192  # above this OpenBLAS wakes threads for a dot product, which costs more than it saves


class Tolerance(NamedTuple):
    """torch.allclose's rule, with equal_nan: |a - b| <= atol + rtol * |b|, in double precision."""

    atol: float = 0.0
    rtol: float = 0.0


class Distance(NamedTuple):
    """What `measure` found. `differing_count` elements are not the same number, `beyond_count`
    of them are out of tolerance; NaN on both sides is the same. `max_abs` and `max_rel` are
    over elements that are NaN on neither side (`max_rel` is infinite where b is 0 and a is not);
    `cosine` and `l2` over those that are finite on both, None where a square is out of the range of
    a double; `cosine` also where one side is 0 all over.
    `nan_at` are up to three places, counted in row-major order, that are NaN on one side only.
    """

    differing_count: int
    beyond_count: int
    max_abs: float | int
    max_rel: float
    cosine: float | None
    l2: float | None
    nan_a_count: int = 0
    nan_b_count: int = 0
    nan_at: tuple[int, ...] = ()


EXACT = Tolerance()


def measure(a: Seen, b: Seen, tolerance: Tolerance = EXACT) -> Distance:
    """Compare two tensors of one shape, also of different dtypes. Raises what reading raises."""
    import numpy as np

    meter = _Meter(a, b, tolerance)
    item, other = a.dtype.size_bytes, b.dtype.size_bytes
    with np.errstate(all="ignore"):
        for block in _cut(blocks(a, b, STEP * max(item, other)), item, other):
            meter.add(block)
    return meter.distance()


def _cut(found: Iterator[Block], item: int, other: int) -> Iterator[Block]:
    """No more than STEP elements at a time."""
    for block in found:
        count = len(block.left) // item
        if count <= STEP:
            yield block
            continue
        left, right = memoryview(block.left), memoryview(block.right)
        for at in range(0, count, STEP):
            end = at + STEP
            here, there = left[at * item : end * item], right[at * other : end * other]
            yield Block(block.at + at, here, there, block.alike)


class _Meter:
    """What is known of the blocks so far."""

    def __init__(self, a: Seen, b: Seen, tolerance: Tolerance) -> None:
        self._a, self._b, self._tolerance = a, b, tolerance
        self._tolerant = tolerance != EXACT
        kinds = a.tensor.kind, b.tensor.kind
        self._flags = ("", "") if kinds[0] == kinds[1] else kinds
        self._doubles: list[Any] = []
        self._scratch: tuple[Any, ...] = ()
        self._sums: list[list[float]] = [[], [], [], []]
        self._differing = self._beyond = self._nan_a = self._nan_b = 0
        self._max_abs: float | int = 0
        self._max_rel = 0.0
        self._nan_at: list[int] = []

    def distance(self) -> Distance:
        """All of it."""
        aa, bb, ab, dd = map(_sum, self._sums)
        known = aa > 0 and bb > 0 and isfinite(aa + bb + ab)
        return Distance(
            self._differing,
            self._beyond if self._tolerant else self._differing,
            self._max_abs,
            self._max_rel,
            max(-1.0, min(1.0, ab / (sqrt(aa) * sqrt(bb)))) if known else None,
            sqrt(dd) if isfinite(dd) else None,
            self._nan_a,
            self._nan_b,
            tuple(sorted(place(self._a, self._b, at) for at in self._nan_at)[:LISTED]),
        )

    def add(self, block: Block) -> None:
        """One block. The common case, finite floats of one kind, takes the fewest passes."""
        left = resolved(numbers(block.left, self._a.dtype.name), self._flags[0])
        right = resolved(numbers(block.right, self._b.dtype.name), self._flags[1])
        kinds = left.dtype.kind + right.dtype.kind
        if block.alike and self._flags == ("", ""):
            self._add_alike(left)
        elif kinds == "ff" and self._add_finite(left, right):
            pass
        elif set(kinds) <= {"i", "u"}:
            self._add_whole(left, right)
        else:
            self._add_any(left, right, block.at)

    def _add_alike(self, values: Any) -> None:
        """Blocks of equal bytes: nothing but the sums for the cosine is left to do."""
        import numpy as np

        flat = _real(values)
        (x,) = self._as_doubles(flat)
        total = _dot(x, x)
        if not isfinite(total):
            finite = np.isfinite(values)
            nan = int(np.count_nonzero(np.isnan(values))) if values.dtype.kind in "fc" else 0
            self._nan_a, self._nan_b = self._nan_a + nan, self._nan_b + nan
            (x,) = self._as_doubles(_real(np.where(finite, values, 0)))
            total = _dot(x, x)
        self._take_sums(total, total, total, 0.0)

    def _add_finite(self, left: Any, right: Any) -> bool:
        """Two blocks of floats; False when something in them is not finite."""
        import numpy as np

        if left.dtype != right.dtype:
            left, right = left.astype("f8", copy=False), right.astype("f8", copy=False)
        gaps, size, where = self._scratch_like(left)
        np.subtract(left, right, out=gaps)
        np.absolute(gaps, out=gaps)
        top = gaps.max()
        if not isfinite(top):
            return False
        x, y, d = self._as_doubles(left, right, gaps)
        sums = _dot(x, x), _dot(y, y), _dot(x, y), _dot(d, d)
        if self._tolerant:  # exact to the last bit of a double, unlike the gaps of floats
            np.subtract(x, y, out=d)
            self._beyond += int(np.count_nonzero(np.absolute(d, out=d) > self._allowed(y)))
        self._differing += int(np.count_nonzero(np.not_equal(left, right, out=where)))
        self._max_abs = max(self._max_abs, float(top))
        np.absolute(right, out=size)
        self._max_rel = max(self._max_rel, _top(np.divide(gaps, size, out=gaps)))
        self._take_sums(*sums)
        return True

    def _add_whole(self, left: Any, right: Any) -> None:
        """Integers, whose differences are exact also where they need 64 bits."""
        import numpy as np

        where = unequal(left, right)
        x, y = self._as_doubles(left, right)
        gaps = np.abs(x - y)
        self._differing += int(np.count_nonzero(where))
        if where.any():
            self._max_abs = max(self._max_abs, _widest(left[where], right[where]))
            self._max_rel = max(self._max_rel, _top(gaps / np.abs(y)))
            self._beyond += int(np.count_nonzero(where & (gaps > self._allowed(y))))
        self._take_sums(_dot(x, x), _dot(y, y), _dot(x, y), _dot(gaps, gaps))

    def _add_any(self, left: Any, right: Any, at: int) -> None:
        """The rest: NaN, infinity, complex numbers, a float beside an integer."""
        import numpy as np

        kind = "c16" if "c" in left.dtype.kind + right.dtype.kind else "f8"
        x, y = left.astype(kind), right.astype(kind)
        nan_x, nan_y = np.isnan(x), np.isnan(y)
        where = unequal(left, right)
        known = ~(nan_x | nan_y)
        gaps = np.where(known & (x != y), np.abs(x - y), 0.0)
        size = np.abs(y)
        close = np.isfinite(gaps) & (gaps <= self._allowed(y)) & known
        self._differing += int(np.count_nonzero(where))
        self._beyond += int(np.count_nonzero(where & ~close))
        self._max_abs = max(self._max_abs, float(gaps.max()))
        self._max_rel = max(self._max_rel, _top(np.where(known, gaps / size, 0.0)))
        self._nan_a += int(np.count_nonzero(nan_x))
        self._nan_b += int(np.count_nonzero(nan_y))
        if len(self._nan_at) < LISTED:
            self._nan_at += (np.flatnonzero(nan_x ^ nan_y)[:LISTED] + at).tolist()
        finite = np.isfinite(x) & np.isfinite(y)
        p, q = _real(np.where(finite, x, 0)), _real(np.where(finite, y, 0))
        self._take_sums(_dot(p, p), _dot(q, q), _dot(p, q), _dot(p - q, p - q))

    def _allowed(self, other: Any) -> Any:
        import numpy as np

        return self._tolerance.atol + self._tolerance.rtol * np.abs(other)

    def _take_sums(self, *sums: float) -> None:
        for held, one in zip(self._sums, sums, strict=True):
            held.append(float(one))

    def _scratch_like(self, values: Any) -> tuple[Any, ...]:
        """Two arrays of this type and one of truth values, which the next call gives again:
        memory that is new each time costs more than what is reckoned in it.
        """
        import numpy as np

        count = len(values)
        if not self._scratch or len(self._scratch[0]) < count or (
            self._scratch[0].dtype != values.dtype
        ):  # fmt: skip
            kind = values.dtype
            self._scratch = np.empty(count, kind), np.empty(count, kind), np.empty(count, "?")
        return tuple(one[:count] for one in self._scratch)

    def _as_doubles(self, *blocks: Any) -> list[Any]:
        """The same as doubles, in arrays that the next call fills again."""
        import numpy as np

        found = []
        for number, values in enumerate(blocks):
            if number == len(self._doubles):
                self._doubles.append(np.empty(0))
            if len(self._doubles[number]) < len(values):
                self._doubles[number] = np.empty(len(values))
            found.append(self._doubles[number][: len(values)])
            np.copyto(found[-1], values)
        return found


def _real(values: Any) -> Any:
    """Complex numbers as twice as many real ones."""
    return values.view(f"f{values.dtype.itemsize // 2}") if values.dtype.kind == "c" else values


def _widest(left: Any, right: Any) -> int:
    """The largest difference of two arrays of integers, exactly."""
    import numpy as np

    if left.dtype.kind != right.dtype.kind:
        pairs = zip(left.tolist(), right.tolist(), strict=True)
        return int(max(abs(p - q) for p, q in pairs))
    wide = f"{left.dtype.kind}8"
    x, y = left.astype(wide), right.astype(wide)
    gaps: Any = np.where(x > y, x - y, y - x)  # modulo 2**64: as unsigned numbers it is right
    return int(gaps.view("u8").max())


def _top(ratios: Any) -> float:
    """The largest, but for 0 / 0."""
    import numpy as np

    top = float(ratios.max())
    return top if top == top else float(np.fmax.reduce(ratios, initial=0.0))


def _dot(x: Any, y: Any) -> float:
    """The sum of the products, in double precision."""
    import numpy as np

    if len(x) <= _DOT:
        return float(np.dot(x, y))
    return sum(float(np.dot(x[i : i + _DOT], y[i : i + _DOT])) for i in range(0, len(x), _DOT))


def _sum(terms: list[float]) -> float:
    """Their sum whatever their order; infinite where it is out of range."""
    try:
        return fsum(terms)
    except (OverflowError, ValueError):
        return float("inf")
