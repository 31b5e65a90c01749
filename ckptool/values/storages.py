"""The bytes of one storage, decoded in chunks and checked.

Knows: how a storage may be encoded, byte order. Must not know: formats, views, dtypes.
Whatever the encoding, a pass takes about 2 MiB.
"""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ckptool.errors import CrcMismatch, StorageSize, Truncated, Unsupported
from ckptool.plans import Made, Reader
from ckptool.spans import Span
from ckptool.values.inflate import inflate
from ckptool.values.laid import Laid, laid_out

CHUNK = 1 << 20
"""Bytes of one read; what the casts make of it still lies in a processor's cache."""
HELD_BYTES = 256 << 20
"""The most of a storage held in memory, where its encoding has no random access."""
_READ_ONCE = 4 << 20  # a storage this small is read once for its checksum and its elements
_AGAIN = "download or copy it again, or skip the check with --no-check"
_FIRST = "convert the file to .pth first, which stores it plainly, and convert that"


class Coded(NamedTuple):
    """One storage as it lies in a source. `way` is stored, deflated or latin1; `component`
    is how many bytes are swapped at a time (1: none); `size` counts decoded bytes; `crc`,
    where recorded (not None or 0), is that of the decoded bytes before the swap. `laid`, where
    set, are its pieces: then `span` is all of it, counted in itself.
    """

    source_id: int
    span: Span
    way: str
    component: int
    size: int
    crc: int | None
    label: str
    laid: Laid | None = None

    @property
    def checked(self) -> bool:
        """Whether a checksum is to be compared."""
        return self.crc is not None or (self.laid is not None and any(self.laid.crcs))

    def fetch(self, reader: Reader, offset: int, size: int) -> bytes:
        """Bytes of the storage as they are stored."""
        if self.laid is not None:
            return self.laid.fetch(reader, offset, size)
        return reader(self.source_id, self.span.offset + offset, size)


def coded(made: Made, encoding: str, component: int, size: int, crc: int | None) -> Coded:
    """The storage that a recipe's arguments describe; `encoding` is that of a checkpoint's Piece.

    Raises Unsupported for an unknown encoding or several pieces that are not stored plainly,
    StorageSize or Truncated when the pieces cannot have `size` bytes.
    """
    way = "stored" if encoding == "swapped" else encoding.removesuffix("-swapped")
    several = len(made.pieces) != 1 or bool(made.regions)
    if way not in _WAYS or (several and way != "stored"):
        text = f"a storage of {len(made.pieces)} pieces in the encoding '{encoding}'"
        raise Unsupported(text, key=made.label or None, hint="report this with the file")
    component = component if encoding.endswith("swapped") else 1
    if component not in (1, 2, 4, 8) or size % component:
        text = f"{size:,} bytes are no whole number of {component}-byte numbers"
        raise StorageSize(text, key=made.label or None, hint="report this with the file")
    if several:
        laid = laid_out(made, size)
        return Coded(0, Span(0, size), way, component, size, crc or None, made.label, laid)
    ((source_id, span),) = made.pieces
    storage = Coded(source_id, span, way, component, size, crc or None, made.label)
    if way == "stored":
        _check_size(storage, span.size)
    return storage


def whole(reader: Reader, storage: Coded) -> Iterator[bytes]:
    """All decoded bytes before the swap, in chunks of at most 1 MiB.

    Raises CrcMismatch after the last chunk, StorageSize or Truncated when there are more or
    fewer bytes than `storage.size`.
    """
    _check_pieces(reader, storage)
    total = 0
    for chunk in _WAYS[storage.way](reader, storage):
        if storage.crc is not None:
            total = zlib.crc32(chunk, total)
        yield chunk
    if storage.crc is not None and total != storage.crc:
        raise _mismatch(storage)


def _check_pieces(reader: Reader, storage: Coded) -> None:
    """Compare each piece with its own checksum. Raises CrcMismatch."""
    laid = storage.laid
    for (source_id, start, size), crc in zip(laid.pieces, laid.crcs, strict=False) if laid else ():
        total = 0
        for at in range(0, size if crc else 0, CHUNK):
            total = zlib.crc32(reader(source_id, start + at, min(CHUNK, size - at)), total)
        if crc and total != crc:
            raise _mismatch(storage)


def _mismatch(storage: Coded) -> CrcMismatch:
    what = f"bytes of '{storage.label}'" if storage.label else "bytes"
    return CrcMismatch(f"{what} do not have their recorded checksum", hint=_AGAIN)


def check(reader: Reader, storage: Coded) -> None:
    """Compare the storage with its recorded checksum, if it has one. Raises as `whole`."""
    if storage.crc is not None:
        for _ in whole(reader, storage):
            pass
    else:
        _check_pieces(reader, storage)


def run(reader: Reader, storage: Coded, start: int, size: int, item: int) -> Iterator[bytes]:
    """`size` decoded bytes from byte `start`, before the swap, in chunks of whole items.

    The checksum is compared on the way. Raises as `whole`.
    """
    if storage.way == "stored" and not storage.checked:
        return _stored(reader, storage, start, start + size)
    return _aligned(_cut(whole(reader, storage), storage, start, start + size), item)


def random_access(
    reader: Reader, storage: Coded, start: int, end: int
) -> Callable[[int, int], bytes | memoryview]:
    """`fetch(offset, size)` for decoded bytes from `start` to `end`, before the swap; all of
    the storage is checked first.

    Raises Unsupported where more than HELD_BYTES would have to be held; as `whole`.
    """
    if storage.way == "stored" and not (storage.crc and storage.size <= _READ_ONCE):
        check(reader, storage)
        return lambda offset, size: storage.fetch(reader, offset, size)
    if end - start > HELD_BYTES:
        text = f"{end - start:,} bytes of a {storage.way} storage that a strided tensor needs"
        raise Unsupported(
            f"{text} at hand, at most {HELD_BYTES:,} are held",
            key=storage.label or None,
            hint=_FIRST,
        )
    held = bytearray(end - start)
    position = 0
    for chunk in _cut(whole(reader, storage), storage, start, end):
        held[position : position + len(chunk)] = chunk
        position += len(chunk)
    view = memoryview(held)
    return lambda offset, size: view[offset - start : offset - start + size]


def swapped(chunks: Iterator[bytes], component: int) -> Iterator[bytes]:
    """The same bytes with every `component` of them reversed; chunks hold whole components."""
    if component == 1:
        return chunks
    import numpy as np

    kind = f"u{component}"
    return (np.frombuffer(chunk, kind).byteswap().tobytes() for chunk in chunks)


def decode(reader: Reader, made: Made) -> Iterator[bytes]:
    """Recipe: a whole storage as plain little-endian bytes.

    `made.args` are (encoding, component_bytes, decoded_size, crc). Raises as `whole`.
    """
    storage = coded(made, *made.args)
    chunks = run(reader, storage, 0, storage.size, storage.component)
    yield from swapped(chunks, storage.component)


def _cut(chunks: Iterator[bytes], storage: Coded, start: int, end: int) -> Iterator[bytes]:
    """What lies in `start` to `end`; the rest passes only where a checksum needs it."""
    position = 0
    for chunk in chunks:
        low, high = max(0, start - position), max(0, end - position)
        if low < len(chunk) and low < high:
            yield chunk[low:high]
        position += len(chunk)
        if position >= end and storage.crc is None:
            return


def _aligned(chunks: Iterator[bytes], item: int) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        data = rest + chunk if rest else chunk
        cut = len(data) - len(data) % item
        rest = data[cut:]
        if cut:
            yield data[:cut]


def _stored(reader: Reader, storage: Coded, start: int, end: int) -> Iterator[bytes]:
    for offset in range(start, end, CHUNK):
        yield storage.fetch(reader, offset, min(CHUNK, end - offset))


def _stored_whole(reader: Reader, storage: Coded) -> Iterator[bytes]:
    return _stored(reader, storage, 0, storage.size)


def _deflated(reader: Reader, storage: Coded) -> Iterator[bytes]:
    pieces = ((storage.source_id, storage.span),)
    return inflate(reader, Made(pieces, "inflate", (), storage.size, None, storage.label))


def _latin1(reader: Reader, storage: Coded) -> Iterator[bytes]:
    """Text in UTF-8 whose code points are the bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    span = storage.span
    done = 0
    for offset in range(span.offset, span.end, CHUNK):
        data = reader(storage.source_id, offset, min(CHUNK, span.end - offset))
        try:
            text = decoder.decode(data, offset + CHUNK >= span.end)
            chunk = text.encode("latin-1")
        except UnicodeError as error:
            text = f"its text does not stand for bytes: {error.reason}"  # type: ignore[attr-defined]
            raise StorageSize(text, key=storage.label or None, hint=_AGAIN) from error
        done += len(chunk)
        if done <= storage.size:
            yield chunk
    _check_size(storage, done)


def _check_size(storage: Coded, have: int) -> None:
    if have != storage.size:
        kind = Truncated if have < storage.size else StorageSize
        text = f"{storage.size:,} bytes are needed, there are {have:,}"
        raise kind(text, key=storage.label or None, hint="download or copy it again")


_WAYS: dict[str, Callable[[Reader, Coded], Iterator[bytes]]] = {
    "stored": _stored_whole,
    "deflated": _deflated,
    "latin1": _latin1,
}
