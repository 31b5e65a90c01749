"""Tensors and state_dicts as fresh pickle expressions, as torch's restricted loader reads them.

Knows: the spelling of torch.save (formats 4.1, 4.2). Must not know: files, walked pickles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptool.checkpoint import UNTYPED, DType, Storage
from ckptool.errors import Unsupported
from ckptool.formats.homes import Home
from ckptool.pickles.splice import text_literal
from ckptool.pickles.write import (
    ORDERED,
    built,
    call,
    filled,
    integer,
    integers,
    named,
    persistent,
    plain,
    tuple_of,
)

V2 = named("torch._utils", "_rebuild_tensor_v2")
V3 = named("torch._utils", "_rebuild_tensor_v3")
KEPT_METADATA = "_safetensors_metadata"
"""The attribute of a state_dict under which `__metadata__` of a .safetensors file is kept."""


def storage_class(dtype: DType) -> bytes:
    """The name of a storage's class: `torch FloatStorage`."""
    if dtype is UNTYPED or dtype.torch_storage is None:
        return named("torch.storage", "UntypedStorage")
    return named("torch", dtype.torch_storage)


def dtype_name(dtype: DType) -> bytes:
    """A dtype by its name: `torch float8_e4m3fn`."""
    return named("torch", dtype.name)


def storage_id(home: Home, key: str, *, legacy: bool) -> bytes:
    """The persistent id of a storage; a legacy stream has a sixth part, the (unused) view."""
    if legacy and home.dtype is UNTYPED:
        raise Unsupported(
            f"torch before 1.6 has no {home.element.name}, and this torch cannot load it from a legacy file",
            key=home.label or None, hint="write a zip (--to zip), or cast it with --dtype",
        )  # fmt: skip
    return _id(home.dtype, key, home.device, home.length, *([b"N"] if legacy else []))


def id_of(storage: Storage, key: str | None = None, device: str | None = None) -> bytes:
    """The persistent id of a storage as it is, or under another key, on another device."""
    key, device = storage.key if key is None else key, device or storage.device
    return _id(storage.dtype, key, device, storage.count)


def _id(dtype: DType, key: str, device: str, count: int, *view: bytes) -> bytes:
    parts = (text_literal("storage"), storage_class(dtype), text_literal(key), text_literal(device))
    return persistent(tuple_of((*parts, integer(count), *view)))


def tensor(
    storage: bytes, dtype: DType, shape: Iterable[int], stride: Iterable[int], offset: int,
    *, untyped: bool = False, requires_grad: bool = False,
) -> bytes:  # fmt: skip
    """A dense tensor over the storage with this id; offset and strides in elements."""
    args = (storage, integer(offset), integers(shape), integers(stride))
    tail = (b"\x88" if requires_grad else b"\x89", ORDERED)
    if untyped:
        return call(V3, *args, *tail, dtype_name(dtype))
    return call(V2, *args, *tail)


def state_dict(
    rows: Iterable[tuple[str, bytes]],
    metadata: Mapping[str, Any] | None = None,
    kept: Mapping[str, str] | None = None,
) -> bytes:
    """An OrderedDict of tensors; `metadata` becomes `_metadata`: {module path: values}."""
    owner = filled(ORDERED, rows)
    state = {}
    if metadata is not None:
        state["_metadata"] = filled(ORDERED, ((k, plain(v)) for k, v in metadata.items()))
    if kept:
        state[KEPT_METADATA] = plain(dict(kept))
    return built(owner, state) if state else owner
