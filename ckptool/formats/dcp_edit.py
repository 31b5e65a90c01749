"""Writing a DCP folder: one `.distcp` of torch.save zips, and the `.metadata` that names them.

Knows: the classes of torch/distributed/checkpoint (metadata.py, filesystem.py of torch 2.13),
spelled in protocol 2. Must not know: verbs. `.metadata` comes last: without it there is no
checkpoint, so none is ever half there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptool.checkpoint import UNTYPED, Changes, Checkpoint, DType, Storage
from ckptool.errors import OutputError, UnsafePickle
from ckptool.formats import expressions
from ckptool.formats.contents import Filler
from ckptool.formats.dcp_flat import Leaf, flatten
from ckptool.formats.dcp_metadata import FILE, read_metadata
from ckptool.formats.homes import Read
from ckptool.formats.judge import CODE, Judge
from ckptool.formats.runs import contiguous, is_contiguous
from ckptool.formats.safetensors_edit import inline_of
from ckptool.formats.torch_zip import open_archive
from ckptool.formats.torch_zip_edit import new_records
from ckptool.limits import Limits
from ckptool.pickles.splice import text_literal
from ckptool.pickles.walk import walk
from ckptool.pickles.write import call, filled, integer, integers, named, plain, tuple_of, whole
from ckptool.places import Source
from ckptool.plans import Late, Literal, Output, Part, Plan, total_size
from ckptool.spans import Span
from ckptool.zipplan import Record, plan_zip

DATA = "__0_0.distcp"
_TOP = "archive"
_CLASSES = "torch.distributed.checkpoint.metadata"
_VERSION = "1.0.0"  # CURRENT_DCP_VERSION, filesystem.py


class Placed(NamedTuple):
    """One item: what it is of, its pickle, and where it lies in `DATA`."""

    leaf: Leaf
    data: bytes
    span: Span

    @property
    def dtype(self) -> DType | None:
        """Of a tensor, as it is written."""
        tensor = self.leaf.tensor
        return None if tensor is None else self.leaf.target or tensor.dtype


@dataclass(slots=True)
class Exported:
    """What was planned; `duplicated` are second names of a tensor, written again."""

    items: tuple[Placed, ...]
    duplicated: tuple[str, ...] = ()
    empty_count: int = 0
    kept_protocol: str | None = None
    from_protocol: int | None = None


def write(checkpoint: Checkpoint, changes: Changes) -> tuple[Plan, Exported]:
    """Two files, the index last. Raises UnsafePickle for objects that could run code, Unsupported,
    KeyCollision.
    """
    flat = flatten(checkpoint, changes)
    filler = Filler(changes.check, inline_of(checkpoint))
    parts: list[Part] = []
    items: list[Placed] = []
    at = 0
    for leaf in flat.leaves:
        data = whole(_tensor(leaf) if leaf.tensor is not None else leaf.expression)
        if leaf.tensor is None and not changes.keep_unknown:
            _refuse_unsafe(data, leaf.key)
        item = plan_zip(new_records(_TOP, data, _stored(leaf, filler)))
        size = total_size(item)
        items.append(Placed(leaf, data, Span(at, size)))
        parts += _shifted(item, len(parts))
        at += size
    index = whole(_metadata(items))
    outputs = (Output(DATA, tuple(parts), at), Output(FILE, (Literal(index),), len(index)))
    exported = Exported(tuple(items), _twice(items), flat.empty_count)
    return Plan(checkpoint.sources, outputs), exported


def confirm(
    checkpoint: Checkpoint, exported: Exported, written: Source, limits: Limits, name: str
) -> None:
    """Read one of the two back. Raises OutputError."""
    if name == FILE:
        rows = [
            (key.name, key.path, key.dtype, key.shape, _span_of(key))
            for key in read_metadata(written, limits).keys
        ]
        planned = [
            (p.leaf.key, p.leaf.path, p.dtype, _shape(p.leaf), p.span) for p in exported.items
        ]
        if rows != planned:
            raise OutputError(f"self-check failed: {FILE} was not written as planned")
        return
    for placed in exported.items:
        archive = open_archive(written.window(placed.span), limits)
        sizes = [e.size for e in archive.directory.entries if e.name.startswith(f"{_TOP}/data/")]
        if archive.read("data.pkl") != placed.data or sizes != _sizes(placed):
            text = f"self-check failed: '{placed.leaf.key}' was not written as planned"
            raise OutputError(text)


def _span_of(key: Any) -> Span | None:
    item = key.item if key.dtype is None else key.chunks[0].item
    return Span(item.offset, item.length) if item.file == DATA else None


def _shape(leaf: Leaf) -> tuple[int, ...]:
    return () if leaf.tensor is None else leaf.tensor.shape or ()


def _sizes(placed: Placed) -> list[int]:
    tensor, dtype = placed.leaf.tensor, placed.dtype
    if tensor is None or dtype is None:
        return [storage.size_bytes for storage in placed.leaf.storages]
    return [tensor.count * dtype.size_bytes]


def _refuse_unsafe(data: bytes, key: str) -> None:
    code = [row.name for row in Judge(walk(data)).run() if row.verdict == CODE]
    if code:
        raise UnsafePickle(
            f"it could run code when loaded: {', '.join(code[:3])}; nothing written", key=key,
            hint="leave it out with --drop-entry; --keep-unknown writes it as it is",
        )  # fmt: skip


def _twice(items: list[Placed]) -> tuple[str, ...]:
    """Names of tensors that are the same view as one before."""
    seen: set[Any] = set()
    found = []
    for item in items:
        t = item.leaf.tensor
        if t is None or t.storage is None or not t.count:
            continue
        view = (t.storage.key, t.dtype, t.shape, t.stride, t.offset)
        if view in seen:
            found.append(item.leaf.key)
        seen.add(view)
    return tuple(found)


# -- items -------------------------------------------------------------------------------------
def _tensor(leaf: Leaf) -> bytes:
    """The tensor over a storage of its own, row by row."""
    t = leaf.tensor
    assert t is not None
    dtype = leaf.target or t.dtype
    assert dtype is not None
    unit = dtype if dtype.torch_storage else UNTYPED
    storage = Storage("0", unit, t.count * dtype.size_bytes // unit.size_bytes, "cpu")
    shape, untyped = t.shape or (), unit is UNTYPED
    return expressions.tensor(
        expressions.id_of(storage), dtype, shape, contiguous(shape), 0, untyped=untyped
    )


def _stored(leaf: Leaf, filler: Filler) -> list[Record]:
    t = leaf.tensor
    if t is None:
        return [
            _record(number, filler.fill(s, None, s.dtype, s.size_bytes, leaf.key), s.size_bytes)
            for number, s in enumerate(leaf.storages)
        ]
    assert t.storage is not None
    assert t.dtype is not None
    dtype = leaf.target or t.dtype
    plain_run = is_contiguous(t)
    shape, stride = ((t.count,), (1,)) if plain_run else (t.shape or (), t.stride or ())
    size = t.count * dtype.size_bytes
    parts = filler.fill(t.storage, Read(t.dtype, shape, stride, t.offset), dtype, size, leaf.key)
    return [_record(0, parts, size)]


def _record(number: int, parts: tuple[Part, ...], size: int) -> Record:
    return Record(f"{_TOP}/data/{number}", parts, size, None if parts else 0)


def _shifted(parts: tuple[Part, ...], base: int) -> list[Part]:
    """The parts behind `base` others: late ones name the parts they wait for by number."""
    return [
        part._replace(needs=tuple([index + base for index in part.needs]))
        if isinstance(part, Late)
        else part
        for part in parts
    ]


# -- .metadata ---------------------------------------------------------------------------------
def _object(cls: str, state: bytes, module: str = _CLASSES) -> bytes:
    return named(module, cls) + b")\x81" + state + b"b"


def _fields(**fields: bytes) -> bytes:
    return filled(b"}", fields.items())


def _size(numbers: tuple[int, ...]) -> bytes:
    return call(named("torch", "Size"), integers(numbers))


def _metadata(items: list[Placed]) -> bytes:
    places = b"".join(_index(item) + _place(item) for item in items)
    return _object("Metadata", _fields(
        state_dict_metadata=filled(b"}", ((i.leaf.key, _entry(i)) for i in items)),
        planner_data=filled(b"}", ((i.leaf.key, plain(i.leaf.path)) for i in items)),
        storage_data=b"}(" + places + b"u" if places else b"}",
        storage_meta=b"N",
        version=text_literal(_VERSION),
    ))  # fmt: skip


def _entry(item: Placed) -> bytes:
    tensor = item.leaf.tensor
    if tensor is None or item.dtype is None:
        return _object("BytesStorageMetadata", b"}")
    shape = tensor.shape or ()
    properties = tuple_of((
        expressions.dtype_name(item.dtype),
        call(named("torch.serialization", "_get_layout"), text_literal("torch.strided")),
        plain(bool(tensor.requires_grad)),
        call(named(_CLASSES, "_MEM_FORMAT_ENCODING"), integer(0)),
        plain(False),
    ))  # fmt: skip
    whole_of = _fields(offsets=_size((0,) * len(shape)), sizes=_size(shape))
    return _object("TensorStorageMetadata", _fields(
        properties=_object("TensorProperties", properties),
        size=_size(shape),
        chunks=b"](" + _object("ChunkStorageMetadata", whole_of) + b"e",
    ))  # fmt: skip


def _index(item: Placed) -> bytes:
    tensor = item.leaf.tensor
    start = b"N" if tensor is None else _size((0,) * len(tensor.shape or ()))
    number = b"N" if tensor is None else integer(0)
    fields = _fields(fqn=text_literal(item.leaf.key), offset=start, index=number)
    return _object("MetadataIndex", fields)


def _place(item: Placed) -> bytes:
    fields = _fields(
        relative_path=text_literal(DATA),
        offset=integer(item.span.offset),
        length=integer(item.span.size),
    )
    return _object("_StorageInfo", fields, "torch.distributed.checkpoint.filesystem")
