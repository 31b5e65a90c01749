"""The places of values: what has no key in a file, and what a tensor is told beside its elements.

Knows: torch's rebuild functions, keys of dicts. Must not know: walks, verbs. A part of a place that
is no key is a `Mark`: no key of a file is equal to one, so that two things never share a place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ckptool.checkpoint import Path
from ckptool.formats.dicts import key_parts
from ckptool.formats.measures import global_name
from ckptool.pickles.nodes import REDUCE, Obj, items_of, text_of

_UTILS = "torch._utils."
_PLAIN_CALLS = frozenset(
    f"{_UTILS}_rebuild_{name}" for name in ("tensor", "tensor_v2", "tensor_v3", "parameter")
)


class Mark(str):
    """A part of a place that is no key of a file, whatever a file calls its keys."""

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__


KEY, ARGUMENT, ARGUMENTS, FUNCTION, STATE, ATTRIBUTES = map(
    Mark, ("<key>", "<argument>", "<arguments>", "<function>", "<state>", "__dict__")
)

Child = tuple[Any, Path]
"""A node and its place below another."""


def pairs(rows: Any) -> Iterator[Child]:
    """The values of a dict by their keys, and the keys that are more than their place tells."""
    for (key, value, *_), part in zip(rows, key_parts(rows), strict=True):
        yield value, (part,)
        if type(part) is str and type(key) is not str and text_of(key) is None:
            yield key, (part, KEY)


def parts(node: Any) -> Iterator[Child]:
    """What torch is told of a tensor beside a storage, offset, sizes and strides."""
    if type(node) is not Obj or _is_old(node):
        return
    name, args = global_name(node.fn) or "", items_of(node.args) or ()
    if name.startswith(f"{_UTILS}_rebuild_parameter") and args:
        yield from parts(args[0])
        if len(args) > 3:
            yield args[3], ("state",)
    elif name.endswith(("._rebuild_from_type_v2", "._rebuild_from_type")) and len(args) == 4:
        yield from parts(Obj(REDUCE, args[0], args[2], node.start, node.args_start, node.end))
        if global_name(args[1]) not in ("torch.Tensor", "torch.nn.parameter.Parameter"):
            yield args[1], ("class",)
        yield args[3], ("state",)
    elif name not in _PLAIN_CALLS:
        yield from _told(name, args)
    if node.state is not None:
        yield node.state.value, ("state",)


def _is_old(node: Obj) -> bool:
    """torch.FloatTensor() of torch 0.1, whose state is storage, offset, sizes and strides."""
    name = global_name(node.fn) or ""
    return name.startswith("torch.") and name.endswith("Tensor") and not node.batches


def _told(name: str, args: Sequence[Any]) -> Iterator[Child]:
    names = _TOLD.get(name.removeprefix(_UTILS))
    if names is None:
        yield from ((item, (at,)) for at, item in enumerate(args))
        return
    for at, word in names.items():
        if at < len(args):
            yield args[at], (word,)


_TOLD: dict[str, dict[int, str]] = {
    "_rebuild_qtensor": {4: "quantizer"},
    "_rebuild_meta_tensor_no_storage": {},
    "_rebuild_wrapper_subclass": {0: "class"},
    "_rebuild_device_tensor_from_cpu_tensor": {0: "data"},
    "_rebuild_device_tensor_from_numpy": {0: "data"},
    "_rebuild_xla_tensor": {0: "data"},
}
"""Arguments that say more than a record does, by what they are called here; of other functions
all of them.
"""
