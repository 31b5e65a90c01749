"""The CRC-32 of bytes that are known only by the CRC-32s of their parts.

Knows: the polynomial of zip. Must not know: files. The arithmetic is that of zlib's
crc32_combine (crc32.c): polynomials over GF(2), the lowest power in the highest bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def joined(crcs: Sequence[int], sizes: Sequence[int]) -> int:
    """The CRC-32 of parts of `sizes` bytes that have these CRC-32s, one after another."""
    total = crcs[0]
    for crc, size in zip(crcs[1:], sizes[1:], strict=True):
        total = _times(_power(size), total) ^ crc
    return total


def _times(a: int, b: int) -> int:
    """Multiply, modulo the polynomial."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=256)
def _power(size: int) -> int:
    """The power 8 * size of x, modulo the polynomial: what `size` more bytes do to a CRC."""
    found, square = _ONE, 1 << 23  # x ** 0, x ** 8
    while size:
        if size & 1:
            found = _times(square, found)
        square = _times(square, square)
        size >>= 1
    return found
