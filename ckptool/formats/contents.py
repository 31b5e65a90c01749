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
from ckptool.pieces import cut, encoding_of, is_chain, made_from
from ckptool.plans import Copy, Literal, Part

Inline = Callable[[Storage], bytes]
"""Gives the bytes of a storage that the pickle itself holds in a form without a span."""


class Filler:
    """Makes the parts of one plan; remembers which storages have been checked."""

    def __init__(self, check: bool = True, inline: Inline | None = None) -> None:
        self.check = check
        self.inline = inline
        self._checked: set[int] = set()

    def parts(self, home: Home) -> tuple[Part, ...]:
        """The parts of one home; none when it has no bytes."""
        return self.fill(home.source, home.read, home.element, home.size_bytes, home.label)

    def fill(
        self, source: Storage, read: Read | None, element: DType, size: int, label: str
    ) -> tuple[Part, ...]:
        """`size` bytes of `source`: all of it (`read` None) or some elements, cast to `element`.

        Raises Unsupported where the file holds no bytes or they cannot be reached.
        """
        if not size:
            return ()
        if not source.pieces:
            return (self._literal(source, read, element, label),)
        if read is None or (read.dtype is element and _is_all(read, source)):
            return self._whole(source, label)
        if read.dtype is element and is_chain(source) and _is_run(read):
            return self._run(source, read, element, size, label)
        return (self._made(source, read, element, size, label),)

    def _whole(self, source: Storage, label: str) -> tuple[Part, ...]:
        size, first = source.size_bytes, self._is_first(source)
        crc = source.crc if first else None
        if is_chain(source):
            rows = [p for p in source.pieces if p.span.size]
            own = len(source.pieces) > 1 and first
            return tuple([Copy(p.source_id, p.span, p.crc if own else crc, label) for p in rows])
        encoding = encoding_of(source, label)
        if encoding == "deflated" and len(source.pieces) == 1:
            return (made_from(source, "inflate", (), size, crc, label),)
        args = (encoding, _swapped_bytes(source.dtype), size, crc)
        return (made_from(source, "decode", args, size, None, label, first),)

    def _run(
        self, source: Storage, read: Read, element: DType, size: int, label: str
    ) -> tuple[Part, ...]:
        """Elements that lie one after another: copied, unless all has to be read for a checksum."""
        found = cut(source, read.offset * element.size_bytes, size)
        torn = any(p.crc for p in source.pieces) and not all(p.crc for p in found)
        if self._is_first(source, look=True) and (source.crc or torn):
            return (self._made(source, read, element, size, label),)
        own = self._is_first(source)
        return tuple([Copy(p.source_id, p.span, p.crc if own else None, label) for p in found])

    def _made(self, source: Storage, read: Read, element: DType, size: int, label: str) -> Part:
        encoding, first = _encoding(source, read.dtype, label), self._is_first(source)
        crc = source.crc if first else None
        where = (source.size_bytes, read.shape, read.stride, read.offset, crc)
        if read.dtype is element:
            unit = _swapped_bytes(source.dtype)
            args = (encoding, unit, element.size_bytes, *where)
            return made_from(source, "gather", args, size, None, label, first)
        cast = (encoding, read.dtype.name, element.name, *where)
        return made_from(source, "cast", cast, size, None, label, first)

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

    def _is_first(self, source: Storage, look: bool = False) -> bool:
        """Whether whoever reads this storage now compares its checksums, as the first one; only
        to `look` changes nothing.
        """
        key = id(source)
        if not self.check or key in self._checked:
            return False
        if not look:
            self._checked.add(key)
        return True


def _encoding(source: Storage, dtype: DType, label: str) -> str:
    """As the piece says; torch swaps the bytes of a typed storage by its type, of an untyped
    one never.
    """
    encoding = encoding_of(source, label)
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
