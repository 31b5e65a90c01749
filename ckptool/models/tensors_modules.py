"""A pickled module as its state_dict, without its class.

Knows: where torch.nn.Module keeps parameters, buffers and children. Must not know: files, torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptool.errors import LimitExceeded
from ckptool.formats.dicts import dict_items, key_text, module_parts, texts_of
from ckptool.pickles.nodes import Obj

_NESTING, _SHARED = 500, 10_000  # as in `formats.discover`, which has refused more already
_GROUPS = ("_parameters", "_buffers")


def state_rows(module: Obj) -> Iterator[tuple[str, Any]]:
    """(key, node) in the order of torch's state_dict: own parameters, own persistent buffers,
    then the children; a module under two names twice, inside itself not at all. What a module
    keeps in a way of its own is the module's own node, under the module's name.
    """
    stack: list[tuple[Any, str, frozenset[int]]] = [(module, "", frozenset())]
    seen: set[int] = set()
    again = 0
    while stack:
        node, prefix, above = stack.pop()
        if type(node) is not Obj or id(node) in above:
            continue
        parts = module_parts(node)
        if parts is None:
            yield prefix[:-1], node
            continue
        again += id(node) in seen
        if again > _SHARED or len(above) > _NESTING:
            raise LimitExceeded("nesting", "modules inside each other without end")
        seen.add(id(node))
        yield from _own(parts, prefix)
        above |= {id(node)}
        children = dict_items(parts.get("_modules")) or []
        stack += [(child, f"{prefix}{key_text(key)}.", above) for key, child, *_ in reversed(children)]  # fmt: skip


def _own(parts: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    hidden = texts_of(parts.get("_non_persistent_buffers_set"))
    for group in _GROUPS:
        for key, value, *_ in dict_items(parts.get(group)) or ():
            name = key_text(key)
            if value is not None and not (group == "_buffers" and name in hidden):
                yield prefix + name, value
