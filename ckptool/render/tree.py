"""The keys folded by component: an indented tree with counts and sizes.

Knows: dotted names. Must not know: files, verbs. No recursion: names nest as deep as they like.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptool.render.parts import (
    CELLS,
    Report,
    blocks,
    content_lines,
    hidden_line,
    note_lines,
    shown_tensors,
    top,
)
from ckptool.render.text import count, human_bytes, lay_out, show

DEEPEST = 32
"""Levels of the tree; what is left of a deeper name stands on one line."""


@dataclass(slots=True)
class _Node:
    """A component: what is below it, and the tensors that bear exactly this name."""

    below: dict[str, _Node] = field(default_factory=dict)
    tensors: list[Mapping[str, Any]] = field(default_factory=list)
    count: int = 0
    size: int = 0


def tree(report: Report) -> str:
    """The inspection with its keys as a tree."""
    lines = [f"  {line}" for line in lay_out(list(_rows(_fold(shown_tensors(report)))), {3})]
    if hidden := hidden_line(report):
        lines.append(f"  {hidden}")
    return blocks(top(report), content_lines(report), lines, note_lines(report))


def _fold(tensors: Iterable[Mapping[str, Any]]) -> _Node:
    root = _Node()
    for tensor in tensors:
        node = root
        for part in str(tensor["key"]).split(".", DEEPEST):
            node = node.below.setdefault(part, _Node())
            node.count += 1
            node.size += tensor.get("size_bytes") or 0
        node.tensors.append(tensor)
    return root


def _rows(root: _Node) -> Iterator[tuple[str, str, str, str, str]]:
    """(name, what, dtype, size, device) from the top down, in file order."""
    stack = [(name, node, 0) for name, node in reversed(root.below.items())]
    while stack:
        name, node, depth = stack.pop()
        label = "  " * depth + show(name)
        for t in node.tensors:
            yield label, CELLS["shape"](t), CELLS["dtype"](t), CELLS["size"](t), CELLS["device"](t)
        if node.below:
            yield label, count(node.count, "tensor"), "", human_bytes(node.size), ""
        stack += [(sub, child, depth + 1) for sub, child in reversed(node.below.items())]
