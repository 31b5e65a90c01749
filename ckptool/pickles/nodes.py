"""What a pickle says, as inert nodes that know their byte spans.

Knows: the shapes a stack machine can build. Must not know: files, what torch means by them.
In a stack language every occurrence of a value is one run of bytes [start, end): child i of
a container ends where child i+1 starts, the last one where the consuming opcode stands.
Ints, floats, str, bool and None stand for themselves.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from struct import Struct
from typing import Any, Literal

DICT, LIST, SET = 0x7D, 0x5D, 0x8F  # the opcodes that make an empty one
REDUCE, NEWOBJ, NEWOBJ_EX, INST, OBJ, FROZENSET = 0x52, 0x81, 0x92, 0x69, 0x6F, 0x91
PAIR_OPS = frozenset((0x75, 0x73, 0x64))  # SETITEMS SETITEM DICT: items are key, value, key …
UNTOLD = object()
_SHORT, _LONG = Struct("<3I"), Struct("<3Q")  # where a call stands
_PACKS = [Struct(f"={count + 1}I").pack for count in range(8)]  # where a short tuple's items do
TEXT_OPS = frozenset((0x55, 0x54, 0x53))  # SHORT_BINSTRING BINSTRING STRING: a Python 2 str


class Global:
    """A class or function by name (`full` is `module.name`); `offset` is where it is first
    named.
    """

    __slots__ = ("computed", "full", "module", "name", "offset")

    def __init__(self, module: str, name: str, offset: int) -> None:
        self.module = module
        self.name = name
        self.full = f"{module}.{name}"
        self.offset = offset
        self.computed = False


class Tup:
    """A tuple; item i starts at starts[i]; `end` is the opcode that made it.

    Most nodes of a checkpoint are tuples: where they stand is kept as packed numbers.
    """

    __slots__ = ("_where", "items")

    def __init__(self, items: Iterable[Any], starts: Iterable[int], end: int) -> None:
        self.items = tuple(items)
        count = len(self.items)
        if count < len(_PACKS) and not end >> 32:  # starts are smaller
            self._where = _PACKS[count](*starts, end)
            return
        try:
            self._where = array("I", (*starts, end)).tobytes()
        except OverflowError:
            self._where = array("Q", (*starts, end)).tobytes()

    def _numbers(self) -> memoryview[int]:
        code: Literal["I", "Q"] = "I" if len(self._where) == 4 * (len(self.items) + 1) else "Q"
        return memoryview(self._where).cast(code)

    @property
    def starts(self) -> list[int]:
        """The first byte of each item."""
        return self._numbers()[:-1].tolist()

    @property
    def end(self) -> int:
        """The byte of its opcode."""
        return self._numbers()[-1]


class Batch:
    """Items added by one opcode `op` at byte `end`; `mark` is the MARK's byte, -1 for none."""

    __slots__ = ("end", "items", "mark", "op", "starts")

    def __init__(self, op: int, items: list[Any], starts: list[int], end: int, mark: int) -> None:
        self.op = op
        self.items = items
        self.starts = array("Q", starts)
        self.end = end
        self.mark = mark


class Box:
    """A dict, list or set (`kind`), filled by batches; `state` as in Obj."""

    __slots__ = ("batches", "kind", "start", "state")

    def __init__(self, kind: int, start: int) -> None:
        self.kind = kind
        self.start = start
        self.batches: list[Batch] = []
        self.state: State | None = None


class State:
    """What BUILD at byte `end` gave an object."""

    __slots__ = ("end", "start", "value")

    def __init__(self, value: Any, start: int, end: int) -> None:
        self.value = value
        self.start = start
        self.end = end


class Obj:
    """A call never made: REDUCE, NEWOBJ, NEWOBJ_EX, INST, OBJ or FROZENSET at byte `end`.

    `told` is what the reader of the pickle made of it, UNTOLD until it was asked.
    """

    __slots__ = ("_where", "args", "batches", "fn", "kwargs", "op", "state", "told")

    def __init__(self, op: int, fn: Any, args: Any, start: int, args_start: int, end: int) -> None:
        self.op = op
        self.fn = fn
        self.args = args
        self._where = (_SHORT if end >> 32 == 0 else _LONG).pack(start, args_start, end)
        self.kwargs: Any = None
        self.batches: list[Batch] | None = None
        self.state: State | None = None
        self.told: Any = UNTOLD

    def _numbers(self) -> tuple[int, int, int]:
        return (_SHORT if len(self._where) == _SHORT.size else _LONG).unpack(self._where)

    @property
    def start(self) -> int:
        """The first byte of the call."""
        return self._numbers()[0]

    @property
    def args_start(self) -> int:
        """The first byte of its arguments."""
        return self._numbers()[1]

    @property
    def end(self) -> int:
        """The byte of its opcode."""
        return self._numbers()[2]


class Pers:
    """A persistent id: how torch names a storage. `told` as in Obj."""

    __slots__ = ("end", "pid", "start", "told")

    def __init__(self, pid: Any, start: int, end: int) -> None:
        self.pid = pid
        self.start = start
        self.end = end
        self.told: Any = UNTOLD


class Raw:
    """Bytes: a bytes, bytearray or Python 2 str, by the opcode that pushed it.

    `start` is the first byte of the payload; `text` is what it was decoded to, once it was.
    """

    __slots__ = ("op", "start", "text", "value")

    def __init__(self, op: int, value: bytes, start: int) -> None:
        self.op = op
        self.text: str | None = None
        self.value = value
        self.start = start


class Slots(Mapping[int, Any]):
    """What the memo has by slot number. Picklers count from 0 without a gap: `rows` is then a
    list, or an array, a fifth of a dict; `spread` makes it a dict for those who do not.
    """

    __slots__ = ("rows",)

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def spread(self) -> dict[int, Any]:
        """The same as a dict, from now on."""
        if type(self.rows) is not dict:
            self.rows = dict(enumerate(self.rows))
        return self.rows

    def __getitem__(self, slot: int) -> Any:
        try:
            return self.rows[slot]
        except IndexError:
            raise KeyError(slot) from None

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows if type(self.rows) is dict else range(len(self.rows)))

    def __len__(self) -> int:
        return len(self.rows)


def positions(data: bytes) -> array[int]:
    """An empty array for bytes of `data`: a list of a million is ten times as big."""
    return array("Q" if len(data) >> 32 else "I")


class Walked:
    """One pickle, walked: `root`, and what a rewrite needs. All positions are bytes of `data`."""

    __slots__ = ("builds_on_others", "calls", "data", "end", "frames", "gets", "globals", "key_bytes",
                 "memo", "memo_start", "most_key_bytes", "oddities", "persistent", "protocol", "puts",
                 "root", "stack_globals", "start")  # fmt: skip

    def __init__(self, data: bytes, start: int) -> None:
        self.data = data
        self.start = start
        self.end = start
        self.root: Any = None
        self.protocol = 0
        self.memo = Slots([])
        self.memo_start = Slots(positions(data))
        self.gets = positions(data)
        self.puts = positions(data)
        self.persistent: list[Pers] = []
        self.calls: list[Obj] = []
        self.globals: dict[tuple[str, str], Global] = {}
        self.frames: list[int] = []
        self.stack_globals: list[tuple[int, int, Global]] = []
        self.builds_on_others: list[tuple[int, Any]] = []
        self.oddities: dict[str, int] = {}
        self.key_bytes = 0  # of all keys of dicts, each as often as it is used
        self.most_key_bytes = 0  # of these

    def let_go(self) -> None:
        """Forget all nodes and positions."""
        self.root, self.data = None, b""
        self.let_go_memo()
        for nodes in (self.calls, self.persistent, self.stack_globals, self.builds_on_others):
            nodes.clear()

    def let_go_memo(self) -> None:
        """Forget the memo: a rewrite alone needs it, and it holds every node."""
        self.memo, self.memo_start = Slots([]), Slots([])
        self.gets, self.puts = positions(b""), positions(b"")

    def put(self, slot: int, node: Any, start: int) -> None:
        """Set a memo slot, whatever its number."""
        if slot == len(self.memo) and type(self.memo.rows) is list:
            self.memo.rows.append(node)
            self.memo_start.rows.append(start)
        else:
            self.memo.spread()[slot] = node
            self.memo_start.spread()[slot] = start

    def slots(self) -> tuple[Any, Any, int]:
        """The rows of `memo` and `memo_start`, and the slot that may be appended to both; -1 once
        they are dicts.
        """
        rows = self.memo.rows
        return rows, self.memo_start.rows, len(rows) if type(rows) is list else -1


def pairs(node: Box | Obj) -> Iterator[tuple[Any, Any, int, int, int]]:
    """(key, value, key start, value start, end) of each dict item, in file order."""
    for batch in node.batches or ():
        if batch.op not in PAIR_OPS:
            continue
        items, starts, count = batch.items, batch.starts, len(batch.items)
        start = starts[0] if count else 0
        for i in range(0, count, 2):
            end = starts[i + 2] if i + 2 < count else batch.end
            yield items[i], items[i + 1], start, starts[i + 1], end
            start = end  # the same number: rows of a large dict share it


def elements(node: Box | Obj) -> Iterator[tuple[Any, int, int]]:
    """(value, start, end) of each list or set item, in file order."""
    for batch in node.batches or ():
        if batch.op in PAIR_OPS:
            continue
        starts, count = batch.starts, len(batch.items)
        for i, value in enumerate(batch.items):
            yield value, starts[i], starts[i + 1] if i + 1 < count else batch.end


def items_of(args: Any) -> tuple[Any, ...] | None:
    """The items of a tuple node; None for anything else."""
    if type(args) is Tup:
        return args.items
    return () if args == () and type(args) is tuple else None


def held_count(node: Any) -> int:
    """How many things stand right under a node: of a dict, keys and values."""
    if type(node) is Tup:
        return len(node.items)
    return sum(len(batch.items) for batch in getattr(node, "batches", None) or ())


def children(node: Any) -> list[Any]:
    """All nodes directly under a node, in file order (empty for scalars)."""
    kind = type(node)
    if kind is Tup:
        return list(node.items)
    if kind is Pers:
        return [node.pid]
    if kind is not Box and kind is not Obj:
        return []
    found: list[Any] = [] if kind is Box else [node.fn, node.args, node.kwargs]
    for batch in node.batches or ():
        found.extend(batch.items)
    if node.state is not None:
        found.append(node.state.value)
    return found


def child_spans(node: Any) -> Iterator[tuple[Any, int, int]]:
    """(value, start, end) of what stands directly under a node, in file order; start and end
    are -1 where the stream does not say (the class of INST, keyword arguments).
    """
    kind = type(node)
    if kind is Tup:
        yield from zip(node.items, node.starts, (*node.starts[1:], node.end), strict=True)
    elif kind is Pers:
        yield node.pid, node.start, node.end
    if kind is not Box and kind is not Obj:
        return
    if kind is Obj:
        known = node.op == REDUCE or node.op == NEWOBJ
        yield node.fn, *((node.start, node.args_start) if known else (-1, -1))
        yield node.args, *((node.args_start, node.end) if known else (-1, -1))
        yield node.kwargs, -1, -1
    for batch in node.batches or ():
        ends = (*batch.starts[1:], batch.end) if batch.starts else ()  # `(u` fills nothing
        yield from zip(batch.items, batch.starts, ends, strict=True)
    if node.state is not None:
        yield node.state.value, node.state.start, node.state.end


def weight_of(key: Any) -> int:
    """About the bytes of a dict's key, were it written out: of a tuple, eight items are."""
    kind = type(key)
    if kind is int:
        return int(key.bit_length() >> 3)
    if kind is Raw:
        return len(key.value)
    if kind is Obj:
        return sum(len(arg) for arg in items_of(key.args) or () if type(arg) is str)
    if kind is Tup:
        shown = (item for item in key.items[:8] if type(item) is not Tup)
        return 8 * len(key.items) + sum(map(weight_of, shown))
    return len(key) if kind is str else 0


def text_of(node: Any) -> str | None:
    """A str, or a Python 2 str decoded (UTF-8, else Latin-1); None for anything else."""
    if type(node) is str:
        return node
    if type(node) is not Raw or node.op not in TEXT_OPS:
        return None
    if node.text is None:  # a long one may be fetched a million times
        try:
            node.text = node.value.decode("utf-8")
        except UnicodeDecodeError:
            node.text = node.value.decode("latin-1")
    return node.text
