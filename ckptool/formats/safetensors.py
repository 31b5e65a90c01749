"""safetensors: an 8-byte length, a JSON header, the data (formats 3.7).

Knows: the rules of safetensors/src/tensor.rs, and stricter where it is lax (a key twice).
Must not know: verbs. The data is not read.
"""

from __future__ import annotations

from typing import Any

from ckptool.checkpoint import (
    BY_SAFETENSORS,
    Checkpoint,
    DType,
    Extra,
    Note,
    Piece,
    Storage,
    Table,
    Tensor,
)
from ckptool.errors import CkptError, HeaderInvalid, LimitExceeded, Truncated
from ckptool.formats.measures import named
from ckptool.formats.rows import ALIAS_PLACES, LAYER_VERSIONS, OWN
from ckptool.formats.runs import contiguous
from ckptool.limits import DEFAULT, Limits
from ckptool.places import Source
from ckptool.spans import Span

NAME = "safetensors"
TITLE = "safetensors"
SUFFIXES = (".safetensors",)
_FIELDS = frozenset(("dtype", "shape", "data_offsets"))
_AGAIN = "download or copy it again"
_WORD = 1 << 64


def read(source: Source, limits: Limits = DEFAULT) -> Checkpoint:
    """Read and check the header. Raises HeaderInvalid or Truncated."""
    return _read(source, limits)[0]


def read_remains(source: Source, limits: Limits) -> tuple[Checkpoint, dict[str, str]]:
    """The same of a file that is too short for its header: its checkpoint, and
    {storage key: what became of it} of what is cut. Raises as `read` when the header is damaged.
    """
    return _read(source, limits, exact=False)


def _read(source: Source, limits: Limits, exact: bool = True) -> tuple[Checkpoint, dict[str, str]]:
    size = int.from_bytes(source.read(0, 8), "little")
    if size > limits.header_bytes:
        raise LimitExceeded("header-bytes", f"a header of {size:,} bytes", path=source.name)
    if size < 2 or size > source.size - 8:
        raise Truncated(
            f"the header should have {size:,} bytes, the file has {source.size - 8:,} after its length",
            path=source.name,
            hint=_AGAIN,
        )
    data = source.read(0, 8 + size)
    _refuse_pickle(source, data, limits)
    header = parse_header(data[8:])
    metadata = header.pop("__metadata__", None)
    notes: list[Note] = []
    del data
    rows = [_row(key, header.pop(key), notes, limits) for key in list(header)]
    data_bytes = source.size - 8 - size
    lost = {} if exact else _cut_rows(rows, data_bytes)
    _check_cover([(begin, end, key) for key, _, _, begin, end in rows], data_bytes, exact)
    known: Known = {}
    tensors = tuple([_tensor(source, row, 8 + size, known) for row in rows])
    storages = tuple(t.storage for t in tensors if t.storage is not None)
    extras = _metadata_extras(metadata)
    tensors = _with_aliases(metadata or {}, tensors)
    if "DCP_SHARDING_INFO" in (metadata or ()):
        from ckptool.formats.rank_slices import note_of

        notes += note_of(metadata or {}, source.name)
    table = Table((), tensors, _layer_versions(metadata or {}))
    checkpoint = Checkpoint(
        file=source.name, format=NAME, size_bytes=source.size, sources=(source.address,),
        tables=(table,), weights=0, tensors=tensors, storages=storages,
        extras=extras, notes=tuple(notes), handle=metadata,
    )  # fmt: skip
    return checkpoint, lost


def _cut_rows(rows: list[Row], size: int) -> dict[str, str]:
    """What became of the tensors that do not lie in `size` bytes of data."""
    return {
        key: "cut" if begin < size else "cut off" for key, _, _, begin, end in rows if end > size
    }


def _with_aliases(metadata: dict[str, str], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors and the second names of those that are written once: {second: first} in
    `__metadata__`, as safetensors.torch.save_model and our own --tied alias note them. Ours
    also say where such a name stood.
    """
    known = {tensor.key: tensor for tensor in tensors}
    found = {
        second: named(known[first], second, (second,))
        for second, first in metadata.items()
        if second not in known
        and first in known
        and second != "format"
        and not second.startswith(OWN)
    }
    rows = list(tensors)
    places = _json_of(metadata, ALIAS_PLACES)
    for second, at in sorted(places.items(), key=lambda row: row[1] if type(row[1]) is int else 0):
        if second in found and type(at) is int and 0 <= at <= len(rows):
            rows.insert(at, found.pop(second))
    return (*rows, *found.values())


def _json_of(metadata: dict[str, str], key: str) -> dict[str, Any]:
    """An entry of ours: a JSON object; anything else counts as none."""
    import json

    try:
        found = json.loads(metadata[key])
    except (KeyError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _layer_versions(metadata: dict[str, str]) -> dict[str, Any] | None:
    """A state_dict's `_metadata` as our writer notes it; anything else is left as text."""
    found = _json_of(metadata, LAYER_VERSIONS)
    plain = all(isinstance(row, dict) and _is_plain(row) for row in found.values())
    return found if plain and LAYER_VERSIONS in metadata else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):  # the version of a spectral_norm stands one level down
        return all(_is_plain(item) for item in value.values())
    return isinstance(value, str | int | float | None)


def _refuse_pickle(source: Source, data: bytes, limits: Limits) -> None:
    """Lengths of some sizes are opcodes too; torch.load would run what they lead to."""
    from ckptool.pickles.walk import walk

    for more in (0, 1 << 20):
        if more:
            data = source.read(0, min(source.size, len(data) + more))
        try:
            seen, why = walk(data, 0, limits), ""
        except CkptError as error:
            seen, why = error.partial, error.text  # type: ignore[attr-defined]
        names = seen.globals.values()
        named = any(n.computed or n.module.replace(".", "_").isidentifier() for n in names)
        if named or seen.calls or seen.persistent or (more and "bytes left" in why):
            raise HeaderInvalid("its first bytes are a pickle that calls functions", offset=0)
        if why.startswith(("opcode", "the pickle takes", "a memo slot")):
            return


def parse_header(data: bytes) -> dict[str, Any]:
    """The header as a dict; a key that stands twice is refused. Raises HeaderInvalid."""
    import json

    if data[:1] != b"{":
        raise HeaderInvalid("the header does not begin with '{'", offset=8)
    try:
        header = json.loads(
            data.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant
        )
        if b"\\u" in data:
            json.dumps(header, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except RecursionError:
        raise HeaderInvalid("the header is nested too deeply", offset=8) from None
    except ValueError as error:
        raise HeaderInvalid(f"the header is not JSON: {str(error)[:80]}", offset=8) from None
    if not isinstance(header, dict):
        raise HeaderInvalid("the header is not a JSON object", offset=8)
    return header


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise HeaderInvalid(
            "a name stands twice in the header: readers disagree on which counts", key=twice
        )
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


Row = tuple[str, DType, "tuple[int, ...]", int, int]


def _row(key: str, value: Any, notes: list[Note], limits: Limits) -> Row:
    """(key, dtype, shape, begin, end), every number a plain int.

    Raises HeaderInvalid, LimitExceeded beyond the rank.
    """
    if not isinstance(value, dict) or not value.keys() >= _FIELDS:
        raise HeaderInvalid("an entry without dtype, shape and data_offsets", key=key)
    if len(value) > len(_FIELDS):
        notes.append(
            Note(
                "header-extra-field",
                f"'{key}' has fields that safetensors does not know; they are ignored",
            )
        )
    dtype = BY_SAFETENSORS.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise HeaderInvalid(f"the dtype {str(value['dtype'])[:20]!r} does not exist", key=key)
    shape, offsets = value["shape"], value["data_offsets"]
    if not _whole(shape) or not _whole(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise HeaderInvalid(
            "shape and data_offsets must be lists of whole numbers, in order", key=key
        )
    if len(shape) > limits.rank:
        raise LimitExceeded("rank", f"a tensor of {len(shape):,} dimensions", key=key)
    count, bits = _count(shape, key), 4 if dtype.safetensors == "F4" else dtype.bits
    if count * bits != 8 * (offsets[1] - offsets[0]):
        raise HeaderInvalid(
            f"{offsets[1] - offsets[0]:,} bytes for {count:,} elements of {dtype.name}", key=key
        )
    if dtype.safetensors == "F4" and shape:
        if shape[-1] % 2:
            raise HeaderInvalid(
                "two 4-bit numbers share a byte: the last size must be even", key=key
            )
        shape = [*shape[:-1], shape[-1] // 2]
    return key, dtype, tuple(shape), offsets[0], offsets[1]


def _count(shape: list[int], key: str) -> int:
    """The product of the sizes; beyond 63 bits torch has no strides for them, though it be 0."""
    reach = 1
    for size in shape:
        reach *= size or 1
        if reach >= _WORD >> 1:
            raise HeaderInvalid("a shape of more elements than 63 bits can count", key=key)
    return 0 if 0 in shape else reach


def _whole(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < _WORD for v in values)


def _check_cover(spans: list[tuple[int, int, str]], size: int, exact: bool = True) -> None:
    """The tensors must tile the data: no hole, no overlap, nothing after the last and, if
    `exact`, all of the last.
    """
    at = 0
    for begin, end, key in sorted(spans):
        if begin != at:
            raise HeaderInvalid("bytes overlap or are left out before it", key=key, offset=begin)
        at = end
    if exact and at > size:
        raise Truncated(f"the data should have {at:,} bytes, the file has {size:,}", hint=_AGAIN)
    if at < size:  # perhaps the length of the header is wrong, and all data is elsewhere
        raise HeaderInvalid(f"{size - at:,} bytes after the last tensor", hint=_AGAIN)


Known = dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]]
"""Shapes, with their strides: each once in memory."""


def _tensor(source: Source, row: Row, base: int, known: Known) -> Tensor:
    key, dtype, shape, begin, end = row
    if shape not in known:
        known[shape] = shape, contiguous(shape)
    shape, stride = known[shape]
    span = source.absolute(Span(base + begin, end - begin))
    pieces = (Piece(0, span),) if span.size else ()
    storage = Storage(key, dtype, span.size // dtype.size_bytes, "cpu", pieces)
    return Tensor(key, dtype, shape, stride, 0, storage, None, "tensor", (key,), "cpu")


def _metadata_extras(metadata: Any) -> tuple[Extra, ...]:
    if metadata is None:
        return ()
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise HeaderInvalid("__metadata__ may hold texts only", key="__metadata__")
    shown = [(key, value) for key, value in metadata.items() if not key.startswith(OWN)]
    text = ", ".join(f"{key}={value}" for key, value in shown[:8])
    return (Extra(("__metadata__",), "dict", dict(metadata), text),)
