"""A .pth that somebody unpacked: a folder with data.pkl and its storages as files data/0, data/1 …

Knows: the names of the records (formats 2.1), that each is a file now. Must not know: verbs.
No checksum is left: it stood in the archive's directory.
"""

from __future__ import annotations

import os
from shlex import quote

from ckptool.checkpoint import Checkpoint, DType, Note, Piece
from ckptool.commands import convert_command
from ckptool.errors import (
    HeaderInvalid,
    LimitExceeded,
    SpecialFile,
    StorageSize,
    Unsupported,
    UsageError,
)
from ckptool.formats.assemble import assemble, walk_checked
from ckptool.formats.audit import Records
from ckptool.formats.layouts import unpacked_tops
from ckptool.formats.salvaged import WHOLE, Losses, Remains
from ckptool.formats.torch_pickle import Located, TensorReader
from ckptool.limits import DEFAULT, Limits
from ckptool.places import BytesSource, Folder
from ckptool.spans import Address, Span

NAME = "torch-unpacked"
TITLE = "unpacked PyTorch zip"
_AGAIN = f"unpack it again, give the archive itself{WHOLE}"
_DATA, _ORDER = "data", "byteorder"


def read(folder: Folder, limits: Limits = DEFAULT, name: str | None = None) -> Checkpoint:
    """Read data.pkl of `folder`, or of the one folder in it that has one; no storage.

    `sources` are data.pkl and a file a storage, in the order of first mention. Raises UsageError
    for several such folders, StorageSize for storages that are missing or of another size,
    Unsupported for TorchScript, PathEscape for a key that is no plain file name.
    """
    return _read(folder, limits, Losses())


def read_remains(folder: Folder, limits: Limits, name: str | None = None) -> Remains:
    """What is whole of a folder whose storages are missing or cut. Raises CkptError where its
    pickle is damaged.
    """
    losses = Losses(tolerant=True)
    return Remains(_read(folder, limits, losses), losses.lost)


def _read(folder: Folder, limits: Limits, losses: Losses) -> Checkpoint:
    top = _top(folder)
    files = top.list()
    if "constants.pkl" in files:
        raise Unsupported("an unpacked TorchScript archive", path=top.path,
                          hint="pack it again: zip -0 -r -D net.pt NAME, run beside it")  # fmt: skip
    encoding = "swapped" if _ORDER in files and _is_big_endian(top) else "stored"
    with top.child("data.pkl") as source:
        if source.size > limits.pickle_bytes:
            raise LimitExceeded(
                "pickle-bytes", f"data.pkl has {source.size:,} bytes", path=top.path
            )
        data = source.read(0, source.size)
        storages = _Storages(top, encoding, source.address, losses)
    walked = walk_checked(data, 0, limits, "data.pkl")
    reader = TensorReader(storages.resolve, limits)
    traits = frozenset(("big-endian",)) if encoding == "swapped" else frozenset()
    found = assemble(
        BytesSource(data, folder.path), NAME, walked, reader, limits, traits=traits,
        container=Records({}, "unpacked files have no checksums"),
    )  # fmt: skip
    return found._replace(
        notes=(_packing(folder.path), *found.notes),
        size_bytes=sum(address.size_bytes for address in storages.sources),
        sources=tuple(storages.sources),
    )


def _packing(path: str) -> Note:
    stem = path.rstrip(os.sep).removesuffix(".pth")
    text = "an unpacked archive: torch.load reads no folder; this packs it again"
    return Note("unpacked", text, convert_command(path, f"-o {quote(stem + '.packed.pth')}"))


def _top(folder: Folder) -> Folder:
    tops = unpacked_tops(folder, folder.list())
    if len(tops) != 1:
        raise UsageError(f"{len(tops)} unpacked archives in one folder", path=folder.path,
                         hint="give the path of one of them")  # fmt: skip
    return folder if tops[0] == "." else folder.below(tops[0])


def _is_big_endian(top: Folder) -> bool:
    with top.child(_ORDER) as source:
        order = source.read(0, min(source.size, 20)).strip()
    if order not in (b"little", b"big"):
        raise HeaderInvalid(
            f"the byteorder file says {order!r}, neither little nor big", path=top.path
        )
    return order == b"big"


class _Storages:
    """The files of `data/`, opened once each to see how large they are."""

    def __init__(self, top: Folder, encoding: str, pickle: Address, losses: Losses) -> None:
        self._path = top.path
        self._folder = top.below(_DATA) if _DATA in top.folders() else None
        self._encoding = encoding
        self._losses = losses
        self.sources = [pickle]

    def resolve(self, key: str, dtype: DType, count: int) -> Located:
        """Where a storage lies. Raises StorageSize, PathEscape."""
        size = count * dtype.size_bytes
        try:
            address = self._find(key, size)
        except StorageSize as error:
            self._losses.add(key, error)
            return (), None
        self.sources.append(address)
        piece = Piece(len(self.sources) - 1, Span(0, size), self._encoding)
        return (piece,) if size else (), None

    def _find(self, key: str, size: int) -> Address:
        try:
            if self._folder is None:
                raise SpecialFile("no such folder")
            with self._folder.child(key) as source:
                found, address = source.size, source.address
        except SpecialFile as error:
            text = f"storage '{key}' is not there: {error.text}"
            raise StorageSize(
                text, path=self._path, member=f"{_DATA}/{key}", hint=_AGAIN
            ) from error
        if found != size:
            raise StorageSize(
                f"storage '{key}' has {found:,} bytes, its tensors need {size:,}",
                path=self._path, member=f"{_DATA}/{key}", hint=_AGAIN,
            )  # fmt: skip
        return address
