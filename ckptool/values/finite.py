"""Counting the numbers that are none: NaN and the infinities, in every floating format.

Knows: the bits of floating-point numbers. Must not know: files, views, verbs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ckptool.values.floats import FLOATS

_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
COUNTABLE = frozenset((*FLOATS, *_PARTS))
"""Names of the dtypes that can hold NaN (float4 cannot)."""


class NonFinite(NamedTuple):
    """How many of `element_count` elements are NaN, and how many infinite; of a complex element one
    part is enough, and both may be said of it, as torch.isnan and torch.isinf do.
    """

    nan: int
    inf: int
    element_count: int


def nonfinite(chunks: Iterable[bytes | memoryview], dtype: str) -> NonFinite:
    """Count over chunks of whole little-endian elements of a `COUNTABLE` dtype."""
    import numpy as np

    made = FLOATS[_PARTS.get(dtype, dtype)]
    parts = 2 if dtype in _PARTS else 1
    # The sign bit away, but where -0 stands for NaN.
    mask = 2 * made.top - 1 if made.sign == "one-zero" else made.top - 1
    nan = inf = count = 0
    for chunk in chunks:
        magnitudes = np.frombuffer(chunk, f"<u{made.size_bytes}") & mask
        count += len(magnitudes) // parts
        over = magnitudes == made.nan if made.sign == "one-zero" else magnitudes >= made.end
        if not over.any():
            continue
        infinite = (magnitudes == made.end) & made.has_infinity
        nan += _elements(over & ~infinite, parts)
        inf += _elements(infinite, parts)
    return NonFinite(nan, inf, count)


def _elements(flags: object, parts: int) -> int:
    import numpy as np

    found = np.asarray(flags)
    return int(np.count_nonzero(found if parts == 1 else found.reshape(-1, 2).any(axis=1)))
