"""The recipe that writes a deflated record stored.

Knows: raw deflate. Must not know: zip directories.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

from ckptool.errors import CrcMismatch, StorageSize, Truncated
from ckptool.plans import Made

_CHUNK = 1 << 20
_AGAIN = "download or copy it again"


def inflate(reader: Callable[[int, int, int], bytes], made: Made) -> Iterator[bytes]:
    """The `made.size` bytes of one deflated piece, in chunks of at most 1 MiB.

    Raises Truncated when the stream ends early, StorageSize when it holds more, CrcMismatch
    when it is damaged.
    """
    member = made.label or "a deflated record"
    left = made.size
    try:
        for chunk in _chunks(reader, made):
            left -= len(chunk)
            if left < 0:
                raise StorageSize(
                    f"it inflates to more than {made.size:,} bytes", member=member, hint=_AGAIN
                )
            yield chunk
    except zlib.error as error:
        raise CrcMismatch(
            f"the deflated bytes are damaged: {error}", member=member, hint=_AGAIN
        ) from error
    if left:
        raise Truncated(f"the deflated bytes end {left:,} bytes early", member=member, hint=_AGAIN)


def _chunks(reader: Callable[[int, int, int], bytes], made: Made) -> Iterator[bytes]:
    ((source_id, span),) = made.pieces
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    for offset in range(span.offset, span.end, _CHUNK):
        data = reader(source_id, offset, min(_CHUNK, span.end - offset))
        chunk = b""
        # A full chunk may leave output inside the inflater even when all input is taken.
        while (data or len(chunk) == _CHUNK) and not inflater.eof:
            chunk = inflater.decompress(data, _CHUNK)
            data = inflater.unconsumed_tail
            yield chunk
