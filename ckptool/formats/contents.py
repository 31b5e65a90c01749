"""The part of a plan that fills a new storage or a tensor's place in .safetensors.

Knows: encodings of pieces, names of recipes. Must not know: containers, numbers.
A checksum is compared once a storage: by the copy when all of it is copied, else by the first
part that reads from it.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptool.checkpoint import UNTYPED, DType, Storage
from ckptool.errors import Unsupported
from ckptool.formats.homes import Home, Read
from ckptool.plans import Copy, Literal, Made, Part
from ckptool.spans import Span

Inline = Callable[[Storage], bytes]
"""Gives the bytes of a storage that the pickle itself holds in a form without a span."""


class Filler:
    """Makes the parts of one plan; remembers which storages have been checked."""

    def __init__(self, check: bool = True, inline: Inline | None = None) -> None:
        self.check = check
        self.inline = inline
        self._checked: set[int] = set()

    def part(self, home: Home) -> Part | None:
        """The part of one home; None when it has no bytes."""
        return self.fill(home.source, home.read, home.element, home.size_bytes, home.label)

    def fill(
        self, source: Storage, read: Read | None, element: DType, size: int, label: str
    ) -> Part | None:
        """`size` bytes of `source`: all of it (`read` None) or some elements, cast to `element`.

        Raises Unsupported where the file holds no bytes or they cannot be reached.
        """
        if not size:
            return None
        if not source.pieces:
            return self._literal(source, read, element, label)
        if len(source.pieces) != 1:
            raise Unsupported("a storage in several pieces", key=label)
        if read is None or (read.dtype is element and _is_all(read, source)):
            return self._whole(source, label)
        encoding, span = source.pieces[0].encoding, source.pieces[0].span
        if read.dtype is element and encoding == "stored" and _is_run(read):
            crc = self._crc(source)
            if crc is None:
                start = span.offset + read.offset * element.size_bytes
                return Copy(source.pieces[0].source_id, Span(start, size), None, label)
            return self._made(source, read, element, size, label, crc)
        return self._made(source, read, element, size, label, self._crc(source))

    def _whole(self, source: Storage, label: str) -> Part:
        piece, size = source.pieces[0], source.size_bytes
        crc = self._crc(source)
        pieces = ((piece.source_id, piece.span),)
        if piece.encoding == "stored":
            return Copy(piece.source_id, piece.span, crc, label)
        if piece.encoding == "deflated":
            return Made(pieces, "inflate", (), size, crc, label)
        args = (piece.encoding, _swapped_bytes(source.dtype), size, crc)
        return Made(pieces, "decode", args, size, None, label)

    def _made(
        self, source: Storage, read: Read, element: DType, size: int, label: str, crc: int | None
    ) -> Part:
        piece = source.pieces[0]
        encoding = _encoding(source, read.dtype, label)
        pieces = ((piece.source_id, piece.span),)
        where = (source.size_bytes, read.shape, read.stride, read.offset, crc)
        if read.dtype is element:
            unit = _swapped_bytes(source.dtype)
            args = (encoding, unit, element.size_bytes, *where)
            return Made(pieces, "gather", args, size, None, label)
        cast = (encoding, read.dtype.name, element.name, *where)
        return Made(pieces, "cast", cast, size, None, label)

    def _literal(self, source: Storage, read: Read | None, element: DType, label: str) -> Part:
        data = self.inline(source) if self.inline is not None else None
        if data is None or len(data) != source.size_bytes:
            raise Unsupported("the file holds no numbers of it, only its shape", key=label,
                              hint="leave it out with --drop")  # fmt: skip
        if read is None:
            return Literal(data)
        if read.dtype is not element or not _is_run(read):
            raise Unsupported(
                "its numbers stand inside the pickle as text: they can be copied, not computed with",
                key=label, hint="convert it to .pth first, then this file",
            )  # fmt: skip
        start = read.offset * element.size_bytes
        return Literal(data[start : start + read.shape[0] * element.size_bytes])

    def _crc(self, source: Storage) -> int | None:
        """The recorded checksum, for whoever reads this storage first."""
        key = id(source)
        if not self.check or key in self._checked:
            return None
        self._checked.add(key)
        return source.crc


def _encoding(source: Storage, dtype: DType, label: str) -> str:
    """As the piece says; torch swaps the bytes of a typed storage by its type, of an untyped
    one never.
    """
    encoding = source.pieces[0].encoding
    if "swapped" not in encoding or dtype is source.dtype:
        return encoding
    if source.dtype is UNTYPED:
        return {"swapped": "stored"}.get(encoding, encoding.removesuffix("-swapped"))
    raise Unsupported("a big-endian storage that is used with another dtype", key=label)


def _is_run(read: Read) -> bool:
    return len(read.shape) == 1 and (read.stride[0] == 1 or read.shape[0] == 1)


def _is_all(read: Read, source: Storage) -> bool:
    size = read.shape[0] * read.dtype.size_bytes if _is_run(read) else -1
    return read.offset == 0 and size == source.size_bytes


def _swapped_bytes(dtype: DType) -> int:
    """Bytes of one number of a big-endian storage (a complex element has two)."""
    return dtype.size_bytes // dtype.components
