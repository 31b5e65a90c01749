"""Numbers beside the weights, in dicts and lists: an epoch, a loss, the learning rate of a group.

Knows: in which bytes they stand, and what depends on them. Must not know: containers, files.
Two pickles that differ in the arguments of these opcodes alone build the same nodes, but for the
numbers: no opcode goes by one. Such a number is no key; it stands in a dict or list that the root
holds by dicts and lists, and nothing else holds (no GET fetches one of them, none is doubled). So
no call is given it, and what else is read asks for its type alone: only `extras` shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any, NamedTuple

from ckptool.checkpoint import DType, Extra, Path
from ckptool.errors import StorageSize
from ckptool.formats.extras import Describer
from ckptool.formats.torch_pickle import Located, TensorReader
from ckptool.pickles.nodes import DICT, LIST, Box, Obj, Walked

_READERS = {
    0x4B: Struct("<B"), 0x4D: Struct("<H"), 0x4A: Struct("<i"), 0x47: Struct(">d"),
}  # fmt: skip
"""BININT1, BININT2, BININT, BINFLOAT."""
_GETS = {0x68: 1, 0x6A: 4}  # BINGET, LONG_BINGET: bytes of the slot
_PICKLE_BYTES = 1 << 16  # nodes of such a pickle are kept


class _Number(NamedTuple):
    """One number, item `at` of `items`: its argument is read by `reader` from byte `start`."""

    reader: Struct
    start: int
    items: list[Any]
    at: int


class _Entry(NamedTuple):
    """An entry of the root that is, or holds, such numbers: the one item of `holder`, told in the
    `extra`-th of the extras. The nodes of other entries are not kept by it.
    """

    extra: int
    holder: list[Any]


class Loose(NamedTuple):
    """All such numbers of a pickle, in file order, and the entries of its root they are in."""

    numbers: tuple[_Number, ...] = ()
    entries: tuple[_Entry, ...] = ()

    def parts_between(self, data: bytes) -> tuple[tuple[int, bytes], ...]:
        """(first byte, bytes) of all that is no such number."""
        starts = (0, *(one.start + one.reader.size for one in self.numbers))
        ends = (*(one.start for one in self.numbers), len(data))
        return tuple((a, data[a:b]) for a, b in zip(starts, ends, strict=True))

    def told(self, data: bytes, extras: Sequence[Extra]) -> tuple[Extra, ...]:
        """The extras with the numbers as they stand in `data`; the nodes are changed."""
        for reader, start, items, at in self.numbers:
            items[at] = reader.unpack_from(data, start)[0]
        describer, rows = Describer(TensorReader(_nowhere)), list(extras)
        for extra, holder in self.entries:
            rows[extra] = describer.extra(holder[0], extras[extra].path)
        return tuple(rows)


def _nowhere(key: str, dtype: DType, count: int) -> Located:
    raise StorageSize(f"storage '{key}' was not met before")


def loose_numbers(walked: Walked, extras: Sequence[Extra]) -> Loose:
    """All of a pickle whose root's entries were told as `extras`."""
    root = walked.root
    if walked.oddities or len(walked.data) > _PICKLE_BYTES:  # DUP is one of them
        return Loose()
    fetched = _fetched(walked) if type(root) is Box and root.kind == DICT else None
    if fetched is None or not _is_ours(root, fetched):
        return Loose()
    numbers: list[_Number] = []
    entries = []
    told: dict[Path, list[int]] = {}
    for number, extra in enumerate(extras):
        told.setdefault(extra.path, []).append(number)
    for key, items, at, start, end in _held(root):
        once = told.get((key,), []) if type(key) is str else []
        if len(once) == 1:
            holder = [items[at]]
            found = list(_numbers_in(walked.data, (holder, 0, start, end), fetched))
            numbers += found
            entries += [_Entry(once[0], holder)] if found else []
    return Loose(tuple(sorted(numbers, key=lambda one: one.start)), tuple(entries))


_Place = tuple[list[Any], int, int, int]
"""Item `at` of `items`; its bytes, [start, end)."""


def _numbers_in(data: bytes, place: _Place, fetched: frozenset[int]) -> Iterator[_Number]:
    stack = [place]
    while stack:
        items, at, start, end = stack.pop()
        node, reader = items[at], _READERS.get(data[start])
        if type(node) is Box and _is_ours(node, fetched):
            stack.extend((items, at, start, end) for _, items, at, start, end in _held(node))
        elif type(node) in (int, float) and reader is not None and end - start == 1 + reader.size:
            yield _Number(reader, start + 1, items, at)


def _is_ours(node: Any, fetched: frozenset[int]) -> bool:
    plain = type(node) is Box and node.kind in (DICT, LIST) and node.state is None
    return plain and id(node) not in fetched


def _held(box: Box) -> Iterator[tuple[Any, list[Any], int, int, int]]:
    """(key, items, at, start, end) of each value of a dict, each element of a list (key None)."""
    step = 2 if box.kind == DICT else 1
    for batch in box.batches:
        items, ends = batch.items, (*batch.starts[1:], batch.end)
        for at in range(step - 1, len(items), step):
            yield items[at - 1] if step == 2 else None, items, at, batch.starts[at], ends[at]


def _fetched(walked: Walked) -> frozenset[int] | None:
    """The ids of all nodes that a GET takes from the memo; None where one names its slot in text,
    or takes what grows later: only such nodes can hold themselves, and those that do would stay in
    memory after nobody needs them.
    """
    data, ids = walked.data, set()
    for pos in walked.gets:
        width = _GETS.get(data[pos])
        if width is None:
            return None
        node = walked.memo[int.from_bytes(data[pos + 1 : pos + 1 + width], "little")]
        if type(node) in (Box, Obj) and _grows_after(node, pos):
            return None
        ids.add(id(node))
    return frozenset(ids)


def _grows_after(node: Box | Obj, pos: int) -> bool:
    filled = node.batches[-1].end if node.batches else 0
    return max(filled, node.state.end if node.state is not None else 0) > pos
