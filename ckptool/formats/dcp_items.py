"""The items of a DCP folder: each a whole torch.save zip inside a `.distcp` file (formats 3.9).

Knows: where the bytes of a slice lie in its item, what an object in one says. Must not know:
`.metadata`'s pickle, verbs. With SerializationFormat.SAFETENSORS the tensors of a file are one
.safetensors behind its objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from ckptool.checkpoint import DTYPES, UNTYPED, DType, Piece, Region, Storage, Tensor
from ckptool.errors import CkptError, HeaderInvalid, StorageSize, Unsupported
from ckptool.formats import expressions, safetensors, torch_zip
from ckptool.formats.audit import Member
from ckptool.formats.dcp_metadata import Chunk, Item, Key
from ckptool.formats.judge import Judge
from ckptool.formats.measures import View
from ckptool.formats.moved import Moved, Verdicts
from ckptool.formats.respell import Respeller
from ckptool.formats.runs import common_order, contiguous
from ckptool.formats.torch_pickle import Located
from ckptool.limits import Limits
from ckptool.pickles.nodes import Pers
from ckptool.pieces import ordered
from ckptool.places import Source
from ckptool.spans import Span
from ckptool.ziplayout import DEFLATED

_AGAIN = "copy the folder again"
_ANEW = "load and save it again with torch.distributed.checkpoint"
_ROOM = 1 << 20  # bytes that an object may take beside eight times those of its own pickle


Seal = tuple[tuple[str, int, int], ...]
"""(name, size, recorded checksum) of the records of an item that say what it holds."""


class _Here(NamedTuple):
    """One item, and the open file that it lies in."""

    source: Source
    number: int
    key: Key
    at: int
    item: Item
    copy: bool


class Shelf:
    """What was read of the items: storages by their new keys, objects as expressions, verdicts."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.storages: dict[str, Storage] = {}
        self.slices: dict[tuple[str, int], Tensor] = {}
        self.objects: dict[str, bytes] = {}
        self.verdicts = Verdicts()
        self._zips: dict[int, list[tuple[Key, Item, bool]]] = {}
        self._seals: dict[tuple[str, int], set[Seal | None]] = {}
        self._headers: dict[tuple[int, int], dict[str, Tensor]] = {}

    def resolve(self, key: str, dtype: Any, count: int) -> Located:
        """Where a storage of the joined pickle lies."""
        storage = self.storages[key]
        if storage.size_bytes != count * dtype.size_bytes:
            raise StorageSize(f"storage '{key}' is declared with two sizes")
        return storage.pieces, storage.crc

    def is_header(self, number: int, offset: int) -> bool:
        """Whether a .safetensors begins there, which many items share."""
        return (number, offset) in self._headers

    def add(
        self, source: Source, number: int, key: Key, at: int, item: Item, *, copy: bool = False
    ) -> None:
        """Read one item: slice `at` of a tensor, or an object; of a copy, which does not count, only
        its checksums and its verdict are kept. Raises CkptError, naming the key.
        """
        here = _Here(source, number, key, at, item, copy)
        try:
            if key.dtype is None:
                self._object(here)
            else:
                found = _checked(self._tensor(here), key, key.chunks[at])
                if not copy:
                    self.slices[key.name, at] = found
        except CkptError as error:
            error.key = error.key or key.name
            error.path = source.name
            raise

    def _tensor(self, here: _Here) -> Tensor:
        source, item = here.source, here.item
        if source.read(item.offset, min(4, source.size - item.offset)) != b"PK\3\4":
            return self._of_header(here)
        walked, reader = self._zip(here)
        tensor = reader.tensor(walked.root)
        if tensor is None:
            raise HeaderInvalid("its item holds no tensor", hint=_AGAIN)
        return Moved(here.number).tensors([tensor])[0]

    def _of_header(self, here: _Here) -> Tensor:
        """A tensor of the .safetensors that fills the rest of the file."""
        source, at = here.source, here.item.offset
        place = (here.number, at)
        if place not in self._headers:
            rest = source.window(Span(at, source.size - at))
            tensors = safetensors.read(rest, self.limits).tensors
            self._headers[place] = {tensor.key: tensor for tensor in tensors}
        found = self._headers[place].get(here.key.name)
        if found is None:
            raise HeaderInvalid("the .safetensors of its file does not hold it", hint=_AGAIN)
        self._seal(here, None)
        return Moved(here.number).tensors([found])[0]

    def _zip(self, here: _Here) -> Any:
        """The walked pickle of an item and who reads its tensors; its verdicts are kept."""
        key, item = here.key, here.item
        window = here.source.window(Span(item.offset, item.length))
        archive = torch_zip.open_archive(window, self.limits)
        walked, reader, _ = torch_zip.pickled(archive, self.limits)
        member = f"{item.file}:{key.name}:data.pkl"
        self.verdicts.add(Judge(walked, member).run())
        self._zips.setdefault(here.number, []).append((key, item, here.copy))
        self._seal(here, archive)
        return walked, reader

    # -- copies ------------------------------------------------------------------------------
    def _seal(self, here: _Here, archive: torch_zip.Archive | None) -> None:
        """What the records of an item have for checksums, where other ranks saved it too."""
        if here.key.copies:
            seal = None if archive is None else _seal_of(archive)
            self._seals.setdefault((here.key.name, here.at), set()).add(seal)

    def differing(self) -> list[str]:
        """Keys under which ranks have not the same bytes."""
        rows = (name for (name, _), seals in self._seals.items() if len(seals - {None}) > 1)
        return list(dict.fromkeys(rows))

    def unproven(self) -> list[str]:
        """Keys of several ranks, of which some have no checksums."""
        rows = (name for (name, _), seals in self._seals.items() if None in seals)
        return list(dict.fromkeys(rows))

    def records(self, source: Source, number: int) -> list[Member]:
        """Every record of the zips in file `number`, which is open, with the checksum recorded."""
        found = []
        for key, item, copy in self._zips.get(number, ()):
            window = source.window(Span(item.offset, item.length))
            archive = torch_zip.open_archive(window, self.limits)
            for entry in archive.directory.entries:
                if entry.size:
                    span = window.absolute(Span(entry.data_offset, entry.compressed_size))
                    inner = entry.name[len(archive.directory.top) + 1 :]
                    found.append(Member(
                        f"{item.file}:{key.name}:{inner}", span, entry.method == DEFLATED,
                        entry.size, entry.crc or None, None if copy else _storage_key(key, inner),
                    ))  # fmt: skip
        return found

    # -- objects -----------------------------------------------------------------------------
    def _object(self, here: _Here) -> None:
        key = here.key
        walked, reader = self._zip(here)
        reader.finish(walked)
        if here.copy:
            return

        def storage(node: Pers) -> bytes:
            view = reader.view(node)
            if type(view) is not View or view.offset:
                raise Unsupported("an object with an old kind of storage")
            return self._carried(view.storage, here.number, f"{key.name}/{view.storage.key}")

        most = _ROOM + 8 * len(walked.data)
        self.objects[key.name] = Respeller(storage, most).expression(walked.root)

    def _carried(self, storage: Storage, number: int, name: str) -> bytes:
        """The persistent id of a storage inside an object, under a key of its own."""
        if name not in self.storages:
            pieces = tuple([piece._replace(source_id=number) for piece in storage.pieces])
            self.storages[name] = Storage(
                name, storage.dtype, storage.count, storage.device, pieces, storage.crc
            )
        return expressions.id_of(self.storages[name])

    def blank(self, key: Key) -> bytes:
        """The expression of a tensor whose numbers are lost, or of nothing in an object's place."""
        dtype, shape = (DTYPES["uint8"], (0,)) if key.dtype is None else (key.dtype, key.shape)
        storage = _storage(key._replace(dtype=dtype, shape=shape), (), None)
        self.storages[key.name] = storage
        return _expression(storage, dtype, shape, contiguous(shape), 0)

    # -- tensors -----------------------------------------------------------------------------
    def joined(self, key: Key) -> bytes:
        """The expression of a tensor; its storage is put together from its slices.

        Raises Unsupported for slices that cannot be.
        """
        assert key.dtype is not None
        slices = [self.slices.pop((key.name, at)) for at in range(len(key.chunks))]
        stride, offset = contiguous(key.shape), 0
        if len(slices) == 1 and slices[0].storage is not None:
            tensor = slices[0]
            storage, stride, offset = _of_one(tensor, key)
        else:
            storage, stride = _of_several(slices, key)
        self.storages[key.name] = storage
        return _expression(storage, key.dtype, key.shape, stride, offset)


def _expression(
    storage: Storage, dtype: DType, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> bytes:
    untyped = storage.dtype is UNTYPED
    pers = expressions.id_of(storage)
    return expressions.tensor(pers, dtype, shape, stride, offset, untyped=untyped)


def _seal_of(archive: torch_zip.Archive) -> Seal | None:
    """None where a record has no checksum."""
    skip = len(archive.directory.top) + 1
    rows = [(entry.name[skip:], entry.size, entry.crc) for entry in archive.directory.entries]
    rows = [row for row in rows if row[0] == "data.pkl" or row[0].startswith("data/")]
    return None if any(size and not crc for _, size, crc in rows) else tuple(sorted(rows))


def _storage_key(key: Key, record: str) -> str | None:
    """The joined pickle's key of the storage that is this record of an item."""
    if not record.startswith("data/"):
        return None
    return key.name if key.dtype is not None else f"{key.name}/{record[5:]}"


def _checked(tensor: Tensor, key: Key, chunk: Chunk) -> Tensor:
    """Raise HeaderInvalid unless it is what `.metadata` says."""
    shape = tuple([high - low for low, high in chunk.region])
    if tensor.kind not in ("tensor", "parameter") or tensor.storage is None:
        raise Unsupported(f"a {tensor.kind} tensor in a distributed checkpoint")
    if tensor.dtype is not key.dtype or tensor.shape != shape:
        have = f"{tensor.dtype.name if tensor.dtype else 'nothing'} {list(tensor.shape or ())}"
        said = f"{key.dtype.name if key.dtype else 'nothing'} {list(shape)}"
        raise HeaderInvalid(f"its item holds {have}, .metadata says {said}", hint=_AGAIN)
    return tensor


def _storage(key: Key, pieces: tuple[Piece, ...], crc: int | None, size: int = -1) -> Storage:
    """As torch would tag it: untyped where it has no typed storage."""
    assert key.dtype is not None
    size = prod(key.shape) * key.dtype.size_bytes if size < 0 else size
    dtype = key.dtype if key.dtype.torch_storage else UNTYPED
    return Storage(key.name, dtype, size // dtype.size_bytes, "cpu", pieces, crc)


def _of_one(tensor: Tensor, key: Key) -> tuple[Storage, tuple[int, ...], int]:
    """A tensor that is one item keeps its storage, with its strides."""
    held = tensor.storage
    assert held is not None
    storage = _storage(key, held.pieces, held.crc, held.size_bytes)
    return storage, tensor.stride or (), tensor.offset


def _of_several(slices: list[Tensor], key: Key) -> tuple[Storage, tuple[int, ...]]:
    """A storage of slices in the order of axes that all of them have in memory, and the strides of
    the tensor in it. torch copies value by value, so that only the layout can differ from its own.
    """
    rows = [row for row in zip(slices, key.chunks, strict=True) if row[0].count]
    order = common_order([tensor for tensor, _ in rows], len(key.shape))
    if order is None:
        raise Unsupported("slices that do not lie in memory in one order of axes", key=key.name,
                          hint=_ANEW)  # fmt: skip
    pieces = [_piece(tensor, chunk.region, key, order) for tensor, chunk in rows]
    shape = tuple([key.shape[axis] for axis in order])
    steps = dict(zip(order, contiguous(shape), strict=True))
    stride = tuple([steps[axis] for axis in range(len(shape))])
    return _storage(key, ordered(pieces, shape), None), stride


def _piece(tensor: Tensor, region: Region, key: Key, order: Sequence[int]) -> Piece:
    """Where the numbers of a slice lie."""
    assert tensor.storage is not None
    assert tensor.dtype is not None
    held, item = tensor.storage, tensor.dtype.size_bytes
    piece = held.pieces[0]
    if piece.encoding not in ("stored", "swapped"):
        raise Unsupported("a compressed slice", key=key.name, hint=_ANEW)
    size = tensor.count * item
    crc = held.crc if size == piece.span.size else None
    span = Span(piece.span.offset + tensor.offset * item, size)
    turned = tuple([region[axis] for axis in order])
    return piece._replace(span=span, region=turned, crc=crc)
