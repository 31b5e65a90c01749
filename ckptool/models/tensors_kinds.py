"""Quantized, sparse and nested tensors, and the table of all rebuild functions.

Knows: what torch believes of them without a check, and would read out of bounds if it were
false: all of that is checked here. Must not know: files.
A new kind of tensor is one function and one row in `BUILDERS`.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from math import prod
from typing import Any

import torch  # noqa: TID253 - this room is imported only where torch is asked for

from ckptool.errors import PickleInvalid, Unsupported
from ckptool.formats.dicts import dict_items
from ckptool.models.tensors_rebuild import STRIDED, Rebuild, Tensors, torch_dtype, typed
from ckptool.models.tensors_values import Builder, Call, Way
from ckptool.pickles.nodes import Box, Obj, text_of

_COMPRESSED = ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")


def _quantized(tensors: Tensors, build: Builder, call: Call) -> Way:
    """(storage, offset, size, stride, (scheme, scale, zero point[, axis]), requires_grad, …)."""

    def make() -> torch.Tensor:
        record, how = tensors.record_of(call.node), build.of(call.args[4])
        memory = tensors.memory.storage(record.storage)  # type: ignore[arg-type]
        if not isinstance(how, tuple) or len(how) not in (3, 4):
            raise PickleInvalid("a quantized tensor without its scale", offset=call.node.end)
        if memory.device.type == "meta":
            raise Unsupported(
                "torch has no quantized tensors on meta", hint="load it with device='cpu'"
            )
        if len(how) == 4:
            _check_channels(how, record.shape or (), call.node)
            tensors.memory.read()  # scales are copied at once
        storage = typed(memory, torch_dtype(record.dtype, record.key))
        view = (record.offset, record.shape, record.stride)
        grad = bool(record.requires_grad)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch will drop some day is in the file today
            return torch._utils._rebuild_qtensor(storage, *view, how, grad, OrderedDict())  # type: ignore[no-any-return, no-untyped-call]

    return Way(make, [call.args[4]])


def _check_channels(how: tuple[Any, ...], shape: Sequence[int], node: Obj) -> None:
    _, scales, zeros, axis = how
    counts = [len(x) if isinstance(x, list) else getattr(x, "numel", lambda: -1)() for x in (scales, zeros)]  # fmt: skip
    if type(axis) is not int or not 0 <= axis < len(shape) or counts != [shape[axis]] * 2:
        raise PickleInvalid("a quantized tensor whose scales do not fit", offset=node.end)


def _sparse(tensors: Tensors, build: Builder, call: Call) -> Way:
    """(layout, (indices, values, size[, coalesced])) or (layout, (outer, inner, values, size))."""

    def make() -> torch.Tensor:
        layout, parts = build.of(call.args[0]), build.of(call.args[1])
        kept = [part for part in parts if isinstance(part, torch.Tensor)]
        on_meta = kept[0].device.type == "meta"
        if not on_meta:
            tensors.memory.read()
        if layout == torch.sparse_coo and len(parts) in (3, 4) and len(kept) == 2:
            made = torch.sparse_coo_tensor(*parts[:3], check_invariants=not on_meta)
            return made if parts[3:] in ((), (None,)) else made._coalesced_(bool(parts[3]))
        if str(layout) not in [f"torch.{name}" for name in _COMPRESSED] or len(kept) != 3:
            raise PickleInvalid("a sparse tensor of an unknown layout", offset=call.node.end)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "in beta state"
            return torch.sparse_compressed_tensor(
                *parts, layout=layout, check_invariants=not on_meta
            )

    return Way(make, call.args)


def _nested(tensors: Tensors, build: Builder, call: Call) -> Way:
    """(buffer, sizes, strides, offsets): the last three stay on the CPU."""

    def make() -> torch.Tensor:
        tensors.memory.read()
        buffer, *facts = map(build.of, call.args)
        if any(fact.device.type == "meta" for fact in facts):
            hint = "load it with device='cpu'"
            raise Unsupported("a nested tensor has its sizes in memory, none on meta", hint=hint)
        sizes, strides, offsets = (fact.cpu() for fact in facts)
        _check_nested(buffer, sizes.tolist(), strides.tolist(), offsets.tolist(), call.node)
        return torch._nested_view_from_buffer(buffer, sizes, strides, offsets)

    return Way(make, call.args)


def _check_nested(buffer: Any, sizes: Any, strides: Any, offsets: Any, node: Obj) -> None:
    """Every part within the buffer."""
    fits = len(sizes) == len(strides) == len(offsets)
    for size, stride, offset in zip(sizes, strides, offsets, strict=False):
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        inside = min((offset, *size, *stride)) >= 0 and (not prod(size) or last < buffer.numel())
        fits = fits and inside
    if not fits or buffer.dim() != 1:
        raise PickleInvalid("a nested tensor reaches past its buffer", offset=node.end)


_JAGGED = frozenset(
    ("values", "offsets", "lengths", "_ragged_idx", "_metadata_cache", "requires_grad")
)


def _jagged(tensors: Tensors, build: Builder, call: Call) -> Way | None:
    """_rebuild_njt({values, offsets, …})."""
    given = call.args[0] if len(call.args) == 1 else None
    rows = dict_items(given) if type(given) is Box else None
    names = {text_of(key): value for key, value, *_ in rows or ()}
    if not names.keys() <= _JAGGED or not {"values", "offsets"} <= names.keys():
        return None
    cache = names.pop("_metadata_cache", None)
    parts = {text_of(key): value for key, value, *_ in dict_items(cache) or ()}

    def make() -> Any:
        from torch.nested._internal.nested_tensor import NestedTensor

        found: dict[Any, Any] = {name: build.of(node) for name, node in names.items()}
        found["_metadata_cache"] = {name: build.of(node) for name, node in parts.items()}
        tensors.late.append(lambda: _check_jagged(found, call.node))
        return NestedTensor(**found)

    return Way(make, [*names.values(), *parts.values()])


def _check_jagged(found: dict[str, Any], node: Obj) -> None:
    values, offsets = found["values"], found["offsets"]
    if offsets.device.type == "meta":
        return
    ends, most = offsets.tolist(), values.shape[found.get("_ragged_idx", 1) - 1]
    lengths = found.get("lengths")
    reach = ends if lengths is None else [a + n for a, n in zip(ends, lengths.tolist(), strict=False)]  # fmt: skip
    if ends != sorted(ends) or not ends or min(ends) < 0 or max(*ends, *reach) > most:
        raise PickleInvalid("a nested tensor reaches past its values", offset=node.end)


BUILDERS: dict[str, Rebuild] = {
    **STRIDED,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch.nested._internal.nested_tensor._rebuild_njt": _jagged,
}
