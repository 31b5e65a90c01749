"""The nouns: what a checkpoint is, whatever its container.

Knows: names and shapes, and the one dtype table. Must not know: files, formats.
Bare data; nothing here reaches upward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from ckptool.spans import Span

Path = tuple[str | int, ...]
Region = tuple[tuple[int, int], ...]
"""A slice of a tensor: (start, stop) of each dimension, in elements."""


class DType(NamedTuple):
    """One element type. `torch_storage` is the typed storage class (None: untyped storage
    and a dtype argument), `safetensors` the name in its header (None: cannot be held),
    `components` how many numbers one element is for a byte swap.
    """

    name: str
    bits: int
    torch_storage: str | None
    safetensors: str | None
    kind: str
    components: int = 1

    @property
    def size_bytes(self) -> int:
        """Bytes of one element in a torch storage (packed types: of one storage unit)."""
        return self.bits // 8


# Sources: torch/storage.py (typed storages), safetensors/src/tensor.rs (names). float4_e2m1fn_x2
# packs two numbers in one byte; safetensors counts them apart (F4, last dimension doubled).
_ROWS = (
    ("float64", 64, "DoubleStorage", "F64", "float"),
    ("float32", 32, "FloatStorage", "F32", "float"),
    ("float16", 16, "HalfStorage", "F16", "float"),
    ("bfloat16", 16, "BFloat16Storage", "BF16", "float"),
    ("float8_e4m3fn", 8, None, "F8_E4M3", "float"),
    ("float8_e5m2", 8, None, "F8_E5M2", "float"),
    ("float8_e4m3fnuz", 8, None, "F8_E4M3FNUZ", "float"),
    ("float8_e5m2fnuz", 8, None, "F8_E5M2FNUZ", "float"),
    ("float8_e8m0fnu", 8, None, "F8_E8M0", "float"),
    ("float4_e2m1fn_x2", 8, None, "F4", "float"),
    ("int64", 64, "LongStorage", "I64", "int"),
    ("int32", 32, "IntStorage", "I32", "int"),
    ("int16", 16, "ShortStorage", "I16", "int"),
    ("int8", 8, "CharStorage", "I8", "int"),
    ("uint8", 8, "ByteStorage", "U8", "int"),
    ("uint16", 16, None, "U16", "int"),
    ("uint32", 32, None, "U32", "int"),
    ("uint64", 64, None, "U64", "int"),
    ("bool", 8, "BoolStorage", "BOOL", "bool"),
    ("complex64", 64, "ComplexFloatStorage", "C64", "complex", 2),
    ("complex128", 128, "ComplexDoubleStorage", None, "complex", 2),
    ("complex32", 32, None, None, "complex", 2),
    ("qint8", 8, "QInt8Storage", None, "quantized"),
    ("quint8", 8, "QUInt8Storage", None, "quantized"),
    ("qint32", 32, "QInt32Storage", None, "quantized"),
    ("quint4x2", 8, "QUInt4x2Storage", None, "quantized"),
    ("quint2x4", 8, "QUInt2x4Storage", None, "quantized"),
    ("bits8", 8, None, None, "bits"),
    ("bits16", 16, None, None, "bits"),
    ("bits1x8", 8, None, None, "bits"),
    ("bits2x4", 8, None, None, "bits"),
    ("bits4x2", 8, None, None, "bits"),
    *((f"{sign}int{bits}", 8, None, None, "bits") for sign in ("", "u") for bits in range(1, 8)),
)
DTYPES: dict[str, DType] = {str(row[0]): DType(*row) for row in _ROWS}  # type: ignore[arg-type]
_SHORT = (("double", "float64"), ("float", "float32"), ("half", "float16"), ("long", "int64"),
          ("int", "int32"), ("short", "int16"), ("cfloat", "complex64"), ("cdouble", "complex128"),
          ("chalf", "complex32"))  # fmt: skip
DTYPE_ALIASES: dict[str, DType] = {**DTYPES, **{short: DTYPES[name] for short, name in _SHORT}}
BY_TORCH_STORAGE: dict[str, DType] = {
    d.torch_storage: d for d in DTYPES.values() if d.torch_storage
}
BY_SAFETENSORS: dict[str, DType] = {d.safetensors: d for d in DTYPES.values() if d.safetensors}
UNTYPED = DType("untyped", 8, "UntypedStorage", None, "untyped")


class Piece(NamedTuple):
    """Where bytes of a storage lie. `encoding` is stored, deflated, latin1 (text in UTF-8
    that stands for bytes), swapped (big-endian), or one of the former with -swapped. Several
    pieces of a storage follow one another, or each has a `region`: the slice it fills, row by row,
    of the contiguous tensor that is the storage. `crc` is the CRC-32 recorded for this piece
    alone, where a storage has several.
    """

    source_id: int
    span: Span
    encoding: str = "stored"
    region: Region | None = None
    crc: int | None = None


@dataclass(frozen=True, slots=True)
class Storage:
    """One run of `count` elements; `pieces` is empty when the file holds no bytes (meta).

    `crc` is the recorded CRC-32 of the plain bytes; None when not recorded, or where each of
    several pieces has its own.
    """

    key: str
    dtype: DType
    count: int
    device: str
    pieces: tuple[Piece, ...] = ()
    crc: int | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the storage once decoded."""
        return self.count * (self.dtype.bits // 8)  # spelled out: asked of each, often


FLAGGED = frozenset(("conj", "neg", "conj+neg"))
"""Kinds of tensors whose numbers are their bytes conjugated, negated, or both."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor. `shape` and `stride` count elements, `offset` is in elements from the start
    of the storage. `kind` is tensor, parameter, quantized, sparse, nested, meta,
    uninitialized, subclass, storage, one of FLAGGED or foreign (what a module keeps in a way of
    its own). `path` is its place in the file.
    """

    key: str
    dtype: DType | None
    shape: tuple[int, ...] | None
    stride: tuple[int, ...] | None
    offset: int
    storage: Storage | None
    requires_grad: bool | None = None
    kind: str = "tensor"
    path: Path = ()
    device: str = "cpu"
    class_name: str | None = None

    @property
    def count(self) -> int:
        """Number of elements (0 when the shape is unknown)."""
        return 0 if self.shape is None else prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements written one after another."""
        if self.shape is None or not self.dtype:
            return 0
        return prod(self.shape) * (self.dtype.bits // 8)


class Table(NamedTuple):
    """One state_dict found in the file. `kind` is state_dict or module (walked from a whole
    pickled model). `others` are its entries that are not tensors: (key, kind of value); where
    there are any, `order` has all keys as they stand. `also` are further places of the same object.
    """

    path: Path
    tensors: tuple[Tensor, ...]
    metadata: Mapping[str, Any] | None = None
    kind: str = "state_dict"
    class_name: str | None = None
    duplicate_keys: tuple[str, ...] = ()
    others: tuple[tuple[str, str], ...] = ()
    order: tuple[str, ...] = ()
    also: tuple[Path, ...] = ()

    @property
    def places(self) -> tuple[Path, ...]:
        """Everywhere it stands."""
        return (self.path, *self.also)


class Extra(NamedTuple):
    """A value beside the weights: `type` in words, `value` JSON-ready (None when opaque),
    `text` one line for people.
    """

    path: Path
    type: str
    value: Any
    text: str


class Global(NamedTuple):
    """A class or function the file names: verdict known, foreign or code; `offset` of its
    first use in `member`.
    """

    name: str
    verdict: str
    offset: int
    member: str = "data.pkl"
    detail: str = ""


class Note(NamedTuple):
    """Something to know; `command`, where set, mends it."""

    slug: str
    text: str
    command: str | None = None


class Checkpoint(NamedTuple):
    """A whole file, read without its tensors. `weights` indexes `tables` (None: no weights).
    `tensors` are all tensors of the file, `storages` all storages in file order. `handle`
    is the format's own, read by its `edit` alone.
    """

    file: str
    format: str
    size_bytes: int
    sources: tuple[Any, ...]
    tables: tuple[Table, ...]
    weights: int | None
    tensors: tuple[Tensor, ...]
    storages: tuple[Storage, ...]
    extras: tuple[Extra, ...] = ()
    globals: tuple[Global, ...] = ()
    notes: tuple[Note, ...] = ()
    handle: Any = None
    traits: frozenset[str] = frozenset()


class Changes(NamedTuple):
    """What a conversion asks for, decided: renames, drops and dtypes are keyed by (table path,
    key), devices map a storage key to its new tag, device_arguments an old tag to a new one
    for what rebuild functions are told; `entries` are top-level names to drop; `select` is the
    path of the one table that comes out; `compact` cuts storages to what tensors use; `tied`
    says what .safetensors does with two names of one tensor.
    """

    renames: Mapping[tuple[Path, str], str] = MappingProxyType({})
    devices: Mapping[str, str] = MappingProxyType({})
    device_arguments: Mapping[str, str] = MappingProxyType({})
    keep_unknown: bool = False
    drops: frozenset[tuple[Path, str]] = frozenset()
    dtypes: Mapping[tuple[Path, str], DType] = MappingProxyType({})
    entries: frozenset[str] = frozenset()
    select: Path | None = None
    compact: bool = False
    tied: str = "alias"
    keep_object: bool = False
    check: bool = True

    @property
    def restructures(self) -> bool:
        """Whether storages go, change or move; without that, only a pickle is edited."""
        parts = (self.drops, self.dtypes, self.entries, self.compact)
        return any(parts) or self.select is not None


class Wanted(NamedTuple):
    """What a model (or another file) has under one key of its state_dict. `kind` is parameter,
    buffer, extra (`_extra_state`) or tensor (a file does not say which); `shape` is None where
    any will do (extra state, lazy modules); `tie` is the first key of the tensor it shares, where it does.
    """

    key: str
    shape: tuple[int, ...] | None
    dtype: str | None = None
    kind: str = "tensor"
    tie: str | None = None


class Mismatched(NamedTuple):
    """A key that both have, with shapes that differ (in elements). `file_shape` is None where
    what the file has is no tensor, or one without a shape.
    """

    key: str
    file_shape: tuple[int, ...] | None
    model_shape: tuple[int, ...]


class Match(NamedTuple):
    """What `load_state_dict(strict=False)` would say of a file's keys, as torch orders them.
    `loaded` are the keys that both have in one shape; `cause` says in a sentence why the rest
    differs, `fix` is the command that mends it.
    """

    loaded: tuple[str, ...] = ()
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()
    mismatched: tuple[Mismatched, ...] = ()
    cause: str = ""
    fix: str | None = None

    @property
    def fits(self) -> bool:
        """Whether nothing is missing, unexpected or mismatched."""
        return not (self.missing_keys or self.unexpected_keys or self.mismatched)
