"""Everything in a checkpoint that is no element of a state_dict's tensors, by its place.

Knows: how values, objects, arrays and compound tensors are spelled. Must not know: verbs, what is
done with them. Unlike `extras`, nothing is cut short: two files can be compared by it.
What a reader of the file cannot tell apart is one: OrderedDict and dict, a numpy scalar and its
number, text of Python 2 and 3.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from ckptool.checkpoint import Checkpoint, Extra, Path, Table, Tensor
from ckptool.errors import LimitExceeded
from ckptool.formats.arrays import array_parts, numpy_dtype
from ckptool.formats.assemble import PickleHandle
from ckptool.formats.dicts import dict_items, key_text
from ckptool.formats.entries_parts import (  # fmt: skip
    ARGUMENT,
    ARGUMENTS,
    ATTRIBUTES,
    FUNCTION,
    STATE,
    Child,
    pairs,
    parts,
)
from ckptool.formats.expressions import KEPT_METADATA
from ckptool.formats.judge import inert_raw
from ckptool.formats.measures import SETS, array_shape, device_text, global_name, named
from ckptool.formats.plain_values import class_of, numpy_scalar
from ckptool.formats.rows import OWN
from ckptool.formats.torch_pickle import TensorReader
from ckptool.limits import DEFAULT, Limits
from ckptool.pickles.nodes import (  # fmt: skip
    Box,
    Global,
    Obj,
    Pers,
    Raw,
    Tup,
    elements,
    items_of,
    text_of,
)

_SHARED = 50_000  # containers that stand at further places too: they could multiply without end
_PART = 8  # levels that a tensor may add to a place
_METADATA = "__metadata__"


class Inside(NamedTuple):
    """What a compound tensor (quantized, sparse, nested, of a subclass) is made of beside its own
    elements, by places below its own.
    """

    values: dict[Path, Extra]
    tensors: dict[Path, Tensor]


class Contents(NamedTuple):
    """`values` by place, an Extra without a value for each container; `tensors` that are in no
    table, `inside` what compound tensors are made of, `complete` whether that is all.
    """

    values: dict[Path, Extra]
    tensors: dict[Path, Tensor]
    inside: dict[Path, Inside]
    complete: bool = True


def contents(checkpoint: Checkpoint, limits: Limits = DEFAULT) -> Contents:
    """Walk what was read. Raises LimitExceeded for too many values or levels."""
    handle = checkpoint.handle
    if isinstance(handle, PickleHandle) and checkpoint.format != "torch-package":
        owners = {id(node) for node in handle.found.owners.values()}
        held = {t.path for table in checkpoint.tables for t in table.tensors}
        walk = _Walk(handle.reader, limits, held, owners)
        found = walk.run(handle.walked.root)
        _leave_out_modules(found, checkpoint.tables)
        return found
    if checkpoint.format == "deepspeed-zero":  # beside the weights lies the training
        return Contents({}, {}, {})
    keys = {t.key for table in checkpoint.tables for t in table.tensors}
    values, complete = _shown(checkpoint.extras, keys)
    whole = complete and checkpoint.format in ("safetensors", "hf-shards", "torch-export")
    beside = {} if whole else {t.path: t for t in checkpoint.tensors}
    for table in checkpoint.tables:
        for tensor in table.tensors:
            beside.pop(tensor.path, None)
    return Contents(values, beside, {}, whole)


def _leave_out_modules(found: Contents, tables: tuple[Table, ...]) -> None:
    """A pickled module holds its tensors at places of its own; its table has them already."""
    for table in tables:
        if table.kind == "module":
            known = {_view(tensor) for tensor in table.tensors}
            for path, tensor in list(found.tensors.items()):
                if path[: len(table.path)] == table.path and _view(tensor) in known:
                    del found.tensors[path]


def _view(t: Tensor) -> tuple[Any, ...]:
    return (t.storage.key if t.storage else None, t.dtype, t.shape, t.stride, t.offset, t.kind)


def _shown(extras: tuple[Extra, ...], keys: Collection[str]) -> tuple[dict[Path, Extra], bool]:
    """The values of a container without a pickle, and whether none of them is cut short. What
    our writers and save_model note for themselves is no value.
    """
    found: dict[Path, Extra] = {}
    stack = [(extra.path, extra.value, extra.type) for extra in reversed(extras)]
    complete = True
    while stack:
        path, value, kind = stack.pop()
        if path[0] == _METADATA and len(path) > 1:
            name = str(path[1])
            if name == "format" or name.startswith(OWN) or name in keys:
                continue
        rows: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
        if isinstance(value, list):
            rows = enumerate(value)
        elif not isinstance(value, dict):
            complete = complete and value is not None and value != "…"
            found[path] = Extra(path, kind, value, "")
        stack += [((*path, key), inner, type(inner).__name__) for key, inner in rows]
    return found, complete


class _Walk:
    """One walk over a pickle, each place once, also where two places hold one object."""

    def __init__(
        self, reader: TensorReader, limits: Limits, held: Collection[Path], owners: Collection[int]
    ) -> None:
        self.reader = reader
        self.limits = limits
        self.held = held
        self.owners = owners
        self.count = self.again = self.size = 0
        self.literals: dict[int, tuple[str, Any] | None] = {}
        self.seen: set[int] = set()
        self.inside: dict[Path, Inside] = {}

    def run(self, root: Any) -> Contents:
        """All that is under `root`."""
        found = Inside({}, {})
        self._descend([(root, ())], found, True)
        found.values.pop((), None)
        return Contents(found.values, found.tensors, self.inside)

    def _descend(self, roots: list[Child], into: Inside, top: bool) -> None:
        """Put what is below into `into`; `top` says that this is no part of a tensor."""
        stack: list[tuple[Any, Path, Any]] = [(node, path, ()) for node, path in reversed(roots)]
        while stack:
            node, path, above = stack.pop()
            self._check(node, path)
            tensor = self.reader.tensor(node) if type(node) in (Obj, Pers) else None
            if tensor is not None:
                self._tensor(node, tensor, path, into, top)
                continue
            if path in self.held and type(node) is Obj and array_shape(node) is not None:
                continue  # an array that is in a table as a tensor
            if _is_above(node, above):
                into.values[path] = Extra(path, "cycle", None, "")
                continue
            into.values[path], below = self._value(node, path)
            self._weigh(into.values[path].value)
            stack += [(child, (*path, *at), (id(node), above)) for child, at in reversed(below)]

    def _check(self, node: Any, path: Path) -> None:
        self.count += 1
        if type(node) in (Box, Obj, Tup):
            self.again += id(node) in self.seen
            self.seen.add(id(node))
        if self.count > self.limits.value_count or self.again > _SHARED:
            text = f"more than {self.count - 1:,} values beside its tensors"
            raise LimitExceeded("values", text)
        if len(path) > self.limits.nesting + _PART:
            raise LimitExceeded(
                "nesting", f"containers inside each other, more than {self.limits.nesting} deep"
            )

    def _weigh(self, value: Any) -> None:
        """A long text may stand at a million places: it would be compared at each."""
        self.size += len(value) if type(value) in (str, bytes, bytearray) else 0
        if self.size > self.limits.pickle_bytes:
            raise LimitExceeded("values", f"values of more than {self.limits.pickle_bytes:,} bytes")

    # -- tensors -----------------------------------------------------------------------------
    def _tensor(self, node: Any, tensor: Tensor, path: Path, into: Inside, top: bool) -> None:
        if not top or path not in self.held:
            into.tensors[path] = named(tensor, ".".join(map(str, path)), path)
        below = list(parts(node))
        if below and top:
            self.inside[path] = Inside({}, {})
            self._descend(below, self.inside[path], False)
        elif below:
            self._descend([(child, (*path, *at)) for child, at in below], into, False)

    # -- values ------------------------------------------------------------------------------
    def _value(self, node: Any, path: Path) -> tuple[Extra, list[Child]]:
        """The value of a node, and what is below it."""
        kind = type(node)
        if kind is Obj:
            return self._object(node, path)
        if kind is Box:
            return self._box(node, path)
        if kind is Tup:
            return Extra(path, "tuple", None, ""), list(_items(node))
        if kind is Raw:
            text = text_of(node)
            value = node.value if text is None else text
            return Extra(path, "bytes" if text is None else "str", value, ""), []
        if kind is Global:
            return Extra(path, "class", node.full, ""), []
        if kind is Pers:  # a class that a legacy stream embeds, with its source
            parts = items_of(node.pid) or [None, None]
            return Extra(path, "class", global_name(parts[1]), ""), []
        if node == () and kind is tuple:
            return Extra(path, "tuple", None, ""), []
        return Extra(path, kind.__name__, node, ""), []

    def _box(self, node: Box, path: Path) -> tuple[Extra, list[Child]]:
        rows = dict_items(node)
        if rows is not None:
            return Extra(path, "dict", None, ""), [*pairs(rows), *self._attributes(node)]
        if node.kind == 0x5D:
            return Extra(path, "list", None, ""), list(_items(node))
        return _set(path, [value for value, *_ in elements(node)])

    def _object(self, node: Obj, path: Path) -> tuple[Extra, list[Child]]:
        if id(node) not in self.literals:
            self.literals[id(node)] = _literal(node)
        literal = self.literals[id(node)]
        if literal is not None:
            return Extra(path, *literal, ""), []
        name, args = global_name(node.fn) or "", items_of(node.args) or ()
        if name in SETS and len(args) == 1 and type(args[0]) is Box:
            return _set(path, [value for value, *_ in elements(args[0])])
        if name == "torch.Size" and len(args) == 1:
            return Extra(path, name, None, ""), list(_items(args[0]))
        rows = dict_items(node)
        if rows is not None:
            kind = class_of(node) or "dict"
            listed = bool(rows) and not node.batches  # Python 2: the items are the arguments
            made = [] if listed else _arguments(node)
            return Extra(path, kind, None, ""), [*pairs(rows), *made, *self._attributes(node)]
        below = [*_arguments(node), *_items(node), *_fields(node)]
        return Extra(path, class_of(node) or name or "object", None, ""), below

    def _attributes(self, node: Box | Obj) -> Iterator[Child]:
        """The state of a dict: what is beside its items."""
        if node.state is None:
            return
        rows = dict_items(node.state.value)
        if rows is None:
            yield node.state.value, (ATTRIBUTES,)
            return
        for key, value, *_ in rows:
            name = key_text(key)
            if name == KEPT_METADATA and id(node) in self.owners:
                yield value, (_METADATA,)
            elif name != "_metadata" or id(node) not in self.owners:
                yield value, (ATTRIBUTES, name)


def _is_above(node: Any, above: Any) -> bool:
    """Whether a container is inside itself; `above` is (id, the rest) of all it is in."""
    if type(node) not in (Box, Obj, Tup):
        return False
    while above:
        if above[0] == id(node):
            return True
        above = above[1]
    return False


def _items(node: Any) -> Iterator[Child]:
    if type(node) is Tup:
        found: Any = node.items
    else:
        found = [value for value, *_ in elements(node)] if type(node) in (Box, Obj) else ()
    for at, value in enumerate(found):
        yield value, (at,)


def _arguments(node: Obj) -> list[Child]:
    """What a call is given, but for the classes of copy_reg._reconstructor."""
    args = items_of(node.args) or ()
    hidden = 2 if (global_name(node.fn) or "").endswith("reg._reconstructor") else 0
    below: list[Child] = [
        (item, (ARGUMENT, at)) for at, item in enumerate(args) if at >= hidden and not
        (hidden and item is None)
    ]  # fmt: skip
    if node.kwargs is not None:
        below.append((node.kwargs, (ARGUMENTS,)))
    if type(node.fn) is Obj:
        below.append((node.fn, (FUNCTION,)))
    return below


def _fields(node: Obj) -> Iterator[Child]:
    """What BUILD gave an object: attributes by name, or a state of its own kind."""
    if node.state is None:
        return
    rows = dict_items(node.state.value)
    if rows is None:
        yield node.state.value, (STATE,)
    else:
        yield from pairs(rows)


def _set(path: Path, items: list[Any]) -> tuple[Extra, list[Child]]:
    """A set has no order: its items as sorted text, where they are plain."""
    if all(type(item) in (int, float, bool, str, type(None), Raw) for item in items):
        words = [repr(text_of(item) if text_of(item) is not None else item) for item in items]
        if not any(type(item) is Raw and text_of(item) is None for item in items):
            return Extra(path, "set", tuple(sorted(words)), ""), []
    return Extra(path, "set", None, ""), [(item, (at,)) for at, item in enumerate(items)]


def _literal(node: Obj) -> tuple[str, Any] | None:
    """(type, value) of what one call spells; None for anything else."""
    device = device_text(node)
    if device is not None:
        return "torch.device", device
    name, args = global_name(node.fn) or "", items_of(node.args) or ()
    if array_shape(node) is not None:
        return _array(node)
    if name.endswith("multiarray.scalar") and len(args) == 2:
        number = numpy_scalar(args[0], args[1])
        return None if number is None else (type(number).__name__, number)
    if name.startswith("pathlib.") and all(text_of(arg) is not None for arg in args):
        return "pathlib.Path", "/".join(str(text_of(arg)) for arg in args)
    raw = inert_raw(args[0] if name.endswith(".bytearray") and args else node)
    return None if raw is None else ("bytes", raw)


def _array(node: Obj) -> tuple[str, Any] | None:
    dtype, fortran, payload = array_parts(node)
    known, raw = numpy_dtype(dtype), inert_raw(payload)
    if known is None or raw is None:
        return None
    order = ("big-endian " if known[1] else "") + ("Fortran order " if fortran else "")
    return f"{order}{known[0].name} array {list(array_shape(node) or ())}", raw
