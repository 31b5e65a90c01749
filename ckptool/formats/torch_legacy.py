"""torch's stream before 1.6: five pickles, then the storages one after another (formats 3.1).

Knows: the five pickles and the layout of the data. Must not know: verbs.
The stream has no index: where a storage lies follows from the sizes of all before it, and
those from the storage classes in the main pickle. No checksum is recorded anywhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ckptool.checkpoint import Checkpoint, DType, Global, Note, Piece, Storage
from ckptool.errors import HeaderInvalid, PickleInvalid, StorageSize, Truncated
from ckptool.formats.assemble import BEFORE, assemble, walk_checked
from ckptool.formats.judge import Judge
from ckptool.formats.measures import View, storage_dtype, whole
from ckptool.formats.torch_pickle import Located, TensorReader
from ckptool.formats.torch_zip import cut_error
from ckptool.limits import DEFAULT, Limits
from ckptool.pickles.nodes import Box, Pers, Walked, elements, items_of, text_of
from ckptool.places import BytesSource, Source
from ckptool.spans import Span

NAME = "torch-legacy"
TITLE = "PyTorch legacy stream"
SUFFIXES = (".pth", ".pt", ".pth.tar")
MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
_FIRST_BYTES = 1 << 20
_LONGEST_NAME = 1 << 10  # of a class, with its module: a read may end inside one
_PARTS = ("magic number", "protocol version", "system info", "main pickle", "storage keys")


class Stream(NamedTuple):
    """The five walked pickles, and where the storages' data begins and ends."""

    pickles: tuple[Walked, ...]
    data_end: int


def read(source: Source, limits: Limits = DEFAULT) -> Checkpoint:
    """Read the five pickles and the 8-byte counts; no storage.

    Raises HeaderInvalid, StorageSize, Truncated (naming what is whole), PickleInvalid.
    """
    checkpoint, end = _read(source, limits, None)
    if end > source.size:
        lost = [
            t.key
            for t in checkpoint.tensors
            if t.storage and any(p.span.end > source.size for p in t.storage.pieces)
        ]
        raise cut_error(
            source,
            len(checkpoint.tensors),
            lost,
            f"cut at {source.size:,} bytes: {end - source.size:,} bytes are missing",
        )
    return checkpoint


def read_remains(source: Source, limits: Limits) -> tuple[Checkpoint, dict[str, str]]:
    """The same of a damaged stream whose pickles are whole: its checkpoint, and {storage key: what
    became of it} of those that are cut or whose count is not the one the pickle gives.

    Raises as `read`, but for those storages.
    """
    lost: dict[str, str] = {}
    checkpoint, _ = _read(source, limits, lost)
    return checkpoint, lost


def _read(source: Source, limits: Limits, lost: dict[str, str] | None) -> tuple[Checkpoint, int]:
    """The checkpoint and where its data should end; `lost`, where given, takes what is wrong with
    single storages, which then have no bytes.
    """
    pickles = _read_pickles(source, limits)
    _check_head(pickles)
    main, keys = pickles[3], _storage_keys(pickles[4])
    sizes = _declared_sizes(main)
    layout, end = _lay_out(source, keys, sizes, pickles[4].end, lost)

    def resolve(key: str, dtype: DType, count: int) -> Located:
        if key not in layout:
            raise StorageSize(f"storage '{key}' is used and not in the list of stored ones")
        if lost and key in lost:
            return (), None
        span = source.absolute(layout[key])
        return ((Piece(0, span),) if span.size else ()), None

    reader = TensorReader(resolve, limits)
    reader.persistent = lambda node: _module_or_storage(reader, node)
    verdicts = tuple(
        g for walked, name in zip(pickles, _PARTS, strict=True) for g in Judge(walked, name).run()
    )
    notes: tuple[Note, ...] = (Note("no-checksums", "a legacy stream records no checksums"),)
    if end < source.size:
        notes += (
            Note(
                "trailing-bytes",
                f"{source.size - end:,} bytes after the last storage; torch reads none of them, a rewrite leaves them out",
            ),
        )
    checkpoint = assemble(
        source,
        NAME,
        main,
        reader,
        limits,
        container=Stream(pickles, end),
        notes=notes,
        judged=verdicts,
    )
    return checkpoint, end


def read_nested(data: bytes, limits: Limits) -> tuple[Storage, Span, list[Global]]:
    """The one storage of a stream that TypedStorage wrote for plain pickling: its record, the
    span of its bytes in `data`, the verdicts on its pickles.
    """
    pickles = _walk_all(data, limits)
    _check_head(pickles)
    main = pickles[3]
    layout, end = _lay_out(
        BytesSource(data, "bytes"), _storage_keys(pickles[4]), _declared_sizes(main), pickles[4].end
    )
    if end > len(data):
        raise Truncated("it is cut")
    reader = TensorReader(lambda key, dtype, count: ((), None), limits)
    found = reader.view(main.root)
    if type(found) is not View:
        raise PickleInvalid("it holds no storage")
    verdicts = [
        g
        for walked, name in zip(pickles, _PARTS, strict=True)
        for g in Judge(walked, f"{name} of a nested stream").run()
    ]
    return found.storage, layout[found.storage.key], verdicts


def _read_pickles(source: Source, limits: Limits) -> tuple[Walked, ...]:
    """Read from the front until the five pickles are whole, four times as much each time."""
    size = min(source.size, _FIRST_BYTES)
    while True:
        data = source.read(0, size)
        try:
            return _walk_all(data, limits)
        except PickleInvalid as error:
            cut = _cut_text(error, data)
            near = (error.offset or 0) >= size - _LONGEST_NAME
            if size < source.size and (cut is not None or near) and size <= limits.pickle_bytes:
                size = min(source.size, size * 4)
                continue
            if cut is not None:
                text = f"the file is cut at {source.size:,} bytes{cut}, inside its {error.member}"
                raise Truncated(text, hint="download it again") from None
            raise


def _cut_text(error: PickleInvalid, data: bytes) -> str | None:
    """What else could be wrong than a cut, where the pickle ends too early ('' for nothing); None
    for an error that has nothing to do with the end.
    """
    offset = error.offset or 0
    if BEFORE in error.text:
        return None
    if "bytes left" in error.text:
        return " or a length in it is wrong"
    name_ends = data.count(b"\n", offset, offset + _LONGEST_NAME) >= 2
    at_end = offset >= len(data) - 16 or (data[offset : offset + 1] == b"c" and not name_ends)
    ends = error.text.startswith(("the pickle ends", "the pickle takes", "an opcode has"))
    return "" if ends and at_end else None


def _walk_all(data: bytes, limits: Limits) -> tuple[Walked, ...]:
    walked: list[Walked] = []
    at = 0
    for name in _PARTS:
        walked.append(walk_checked(data, at, limits, name))
        at = walked[-1].end
    return tuple(walked)


def _check_head(pickles: tuple[Walked, ...]) -> None:
    magic, version = pickles[0].root, pickles[1].root
    if type(magic) is not int or magic != MAGIC:
        raise HeaderInvalid("the magic number is not a plain number", offset=0)
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise HeaderInvalid("the protocol version is not 1001", offset=pickles[1].start)


def _storage_keys(walked: Walked) -> list[str]:
    root = walked.root
    keys = [text_of(key) for key, _, _ in elements(root)] if type(root) is Box else [None]
    if None in keys or len(set(keys)) < len(keys):
        raise HeaderInvalid(
            "the list of storage keys is not a list of different texts", offset=walked.start
        )
    return [key for key in keys if key is not None]


def _declared_sizes(main: Walked) -> dict[str, tuple[DType, int]]:
    """(dtype, count) of each storage, from all persistent ids of the main pickle."""
    sizes: dict[str, tuple[DType, int]] = {}
    for pers in main.persistent:
        items = items_of(pers.pid) or ()
        if len(items) in (5, 6) and text_of(items[0]) == "storage":
            key = text_of(items[2])
            if key is None:
                raise PickleInvalid("a storage without a text key", offset=pers.end)
            dtype = storage_dtype(items[1], pers)
            sizes.setdefault(key, (dtype, whole(items[4], "the element count of a storage", pers)))
    return sizes


def _lay_out(
    source: Source, keys: list[str], sizes: dict[str, tuple[DType, int]], at: int,
    lost: dict[str, str] | None = None,
) -> tuple[dict[str, Span], int]:  # fmt: skip
    """The span of each storage, in the order of the key list. Counts on both sides agree; where
    they do not, and where the file ends too early, `lost` is told, if it is there. Of a far
    source the pickle is believed.
    """
    layout: dict[str, Span] = {}
    for key in keys:
        if key not in sizes:
            raise StorageSize(f"storage '{key}' is stored and used by no tensor", offset=at)
        dtype, count = sizes[key]
        if at + 8 <= source.size and (not source.far or source.near(Span(at, 8))):
            stored = int.from_bytes(source.read(at, 8), "little", signed=True)
            if stored != count and lost is not None:
                lost[key] = f"its count is {stored:,} in its header and {count:,} in the pickle"
            elif stored != count:
                raise StorageSize(
                    f"the count of storage '{key}' is {stored:,} in its header and {count:,} in the pickle:"
                    " the file is damaged, or two programs wrote it at once",
                    offset=at,
                    hint="take another copy of it",
                )
        layout[key] = Span(at + 8, count * dtype.size_bytes)
        if lost is not None and layout[key].end > source.size:
            lost[key] = "cut" if at + 8 < source.size else "cut off"
        at = layout[key].end
    missing = [key for key in sizes if key not in layout]
    if missing:
        raise StorageSize(f"storage '{missing[0]}' is used and not in the list of stored ones")
    return layout, at


def _module_or_storage(reader: TensorReader, node: Pers) -> View | Any:
    """('module', class, file, source) embeds a class; anything else is a storage."""
    items = items_of(node.pid)
    if items is not None and len(items) == 4 and text_of(items[0]) == "module":
        return None
    return reader.torch_storage(node)
