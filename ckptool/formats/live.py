"""What a pickle still reads after parts of it are cut, and where values stand in it.

Knows: nodes and spans. Must not know: containers, what tensors become.
Nothing recurses: a hostile file nests deeper than a stack.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from ckptool.formats.dense import dense_of
from ckptool.pickles.nodes import PAIR_OPS, Box, Obj, Pers, Tup, Walked, child_spans, children

_NODES = frozenset((Tup, Box, Obj, Pers))


class Occurrence(NamedTuple):
    """One place where a value stands: [start, end) of the pickle's bytes."""

    node: Any
    start: int
    end: int


def occurrences(walked: Walked, wanted: Collection[int]) -> list[Occurrence]:
    """Every place of the nodes with these ids, in file order; not those inside another."""
    first = walked.start + (2 if walked.data[walked.start] == 0x80 else 0)
    found: list[Occurrence] = []
    seen: set[int] = set()
    stack: list[tuple[Any, int, int]] = [(walked.root, first, walked.end - 1)]
    while stack:
        node, start, end = stack.pop()
        if id(node) in wanted:
            found.append(Occurrence(node, start, end))
        elif type(node) in _NODES and id(node) not in seen:
            seen.add(id(node))
            stack.extend(reversed(list(child_spans(node))))
    return sorted(found, key=lambda place: place.start)


def live_nodes(
    root: Any, cuts: Collection[int], leaves: Collection[int], stray: Collection[Pers] = ()
) -> Iterator[Any]:
    """Dense calls and bare persistent ids under `root`, in the order of the output's bytes,
    each once; items that begin at a byte of `cuts` are left out. Nodes with an id in `leaves`
    are given themselves and not entered. `stray` ids come last.
    """
    seen: set[int] = set()
    stack: list[Any] = [*reversed(list(stray)), root]
    while stack:
        node = stack.pop()
        if type(node) not in _NODES or id(node) in seen:
            continue
        seen.add(id(node))
        if id(node) in leaves or type(node) is Pers:
            yield node
            continue
        dense = dense_of(node) if type(node) is Obj else None
        if dense is not None and dense.call is node:
            yield node
            seen.add(id(dense.args.items[0]))  # its storage is no bare one
        stack.extend(reversed(_children(node, cuts)))


def _children(node: Any, cuts: Collection[int]) -> list[Any]:
    """What stands under a node and is not cut."""
    if not cuts or not isinstance(node, Box | Obj):
        return children(node)
    found: list[Any] = [node.fn, node.args, node.kwargs] if isinstance(node, Obj) else []
    for batch in node.batches or ():
        step = 2 if batch.op in PAIR_OPS else 1
        for i in range(0, len(batch.items), step):
            if batch.starts[i] not in cuts:
                found.extend(batch.items[i : i + step])
    if node.state is not None:
        found.append(node.state.value)
    return found


def strays(walked: Walked) -> list[Pers]:
    """Persistent ids that no path leads to (popped ones): they stay in the stream."""
    missing = {id(pers) for pers in walked.persistent}
    seen: set[int] = set()
    stack: list[Any] = [walked.root]
    while stack and missing:
        node = stack.pop()
        if type(node) not in _NODES or id(node) in seen:
            continue
        seen.add(id(node))
        if type(node) is Pers:
            missing.discard(id(node))
        stack.extend(children(node))
    return [pers for pers in walked.persistent if id(pers) in missing]
