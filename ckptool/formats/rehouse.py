"""Storages that move, told to every call that reads them; modules and arrays as state_dicts.

Knows: what a live part of a pickle reads, in which order; what is written anew in it.
Must not know: how archives and streams are laid out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from ckptool.checkpoint import Changes, Checkpoint, DType, Path, Storage, Table, Tensor
from ckptool.errors import PickleInvalid, Unsupported, UsageError
from ckptool.formats import expressions
from ckptool.formats.assemble import PickleHandle
from ckptool.formats.dense import Dense, dense_of, tell, tell_storage
from ckptool.formats.devices import Retagged
from ckptool.formats.dicts import dict_items, key_text
from ckptool.formats.homes import Home, Housing, Place, User, house
from ckptool.formats.live import Occurrence, live_nodes, occurrences, strays
from ckptool.formats.measures import View, global_name
from ckptool.pickles.nodes import NEWOBJ, Obj, Pers, items_of
from ckptool.pickles.splice import Edits
from ckptool.pickles.write import named

_DENSE_KINDS = ("tensor", "parameter", "subclass", "ndarray")


class Expected(NamedTuple):
    """What reading the output back must show at `path`; None: not known beforehand."""

    path: Path
    dtype: DType | None
    shape: tuple[int, ...] | None
    stride: tuple[int, ...] | None
    offset: int
    storage: str | None


class Row(NamedTuple):
    """One tensor of a table: the record, its final key, the node that makes it (None in a
    module), the dtype it shall have.
    """

    tensor: Tensor
    key: str
    node: Any
    target: DType | None


class Rehousing:
    """The work on one pickle: `generated` are ids of nodes that are written anew, `root` the
    one value that comes out where not all does, `fresh` the whole new expression.
    """

    def __init__(
        self, checkpoint: Checkpoint, changes: Changes, target: str, edits: Edits, retagged: Retagged
    ) -> None:  # fmt: skip
        self.checkpoint = checkpoint
        self.changes = changes
        self.edits = edits
        self.retagged = retagged
        self.handle: PickleHandle = checkpoint.handle
        self.legacy = target == "torch-legacy"
        self.root: Any = None
        self.fresh: bytes | None = None
        self.housing = Housing((), {}, {})
        self.tables = [t for t in checkpoint.tables if t.kind != "tensors" and self._stays(t)]
        self.modules = {} if changes.keep_object else {
            id(self.owner(t)): t for t in self.tables if t.kind == "module"
        }  # fmt: skip
        self.rows: dict[Path, list[Row]] = {}

    def _stays(self, table: Table) -> bool:
        """Whether it comes out: inside what is selected, in no entry that is dropped."""
        changes, path = self.changes, table.path
        select = changes.select or ()
        dropped = bool(path) and path[0] in changes.entries
        inside = any((path[:i], path[i]) in changes.drops for i in range(len(path)))
        return path[: len(select)] == select and (bool(select) or not dropped) and not inside

    @property
    def generated(self) -> set[int]:
        """Ids of the nodes of modules, which become state_dicts."""
        return set(self.modules)

    def owner(self, table: Table) -> Any:
        """The node that holds a table."""
        return self.handle.found.owners.get(table.path)

    def rows_of(self, table: Table) -> list[Row]:
        """The tensors of a table that stay, in order, under their final keys."""
        if table.path in self.rows:
            return self.rows[table.path]
        changes, nodes = self.changes, {}
        if id(self.owner(table)) not in self.modules:
            nodes = {key_text(row[0]): row[1] for row in dict_items(self.owner(table)) or ()}
        found = []
        for tensor in table.tensors:
            place = (table.path, tensor.key)
            if place not in changes.drops:
                new = changes.renames.get(place, tensor.key)
                found.append(Row(tensor, new, nodes.get(tensor.key), changes.dtypes.get(place)))
        self.rows[table.path] = found
        return found

    def expected(self) -> list[Expected]:
        """What the output must hold, of everything that could be told beforehand."""
        found, above = [], len(self.changes.select or ())
        for table in self.tables:
            path = table.path[above:]
            found += [self._expected(row, (*path, _name(row))) for row in self.rows_of(table)]
        return found

    def _expected(self, row: Row, path: Path) -> Expected:
        place = self.housing.places.get(_place_id(row))
        t = row.tensor
        if place is None:
            return Expected(path, t.dtype, t.shape, t.stride, t.offset, None)
        return Expected(path, place.dtype, t.shape, place.stride, place.offset, str(place.home))


def _name(row: Row) -> str | int:
    last = row.tensor.path[-1] if row.tensor.path else row.key
    return last if type(last) is int else row.key


def _place_id(row: Row) -> Any:
    if row.node is None:
        return id(row.tensor)
    dense = dense_of(row.node)
    return id(dense.call) if dense is not None else id(row.node)


def rehouse(work: Rehousing) -> Housing:
    """Find what is live, give it homes, and edit every call that reads one.

    Raises Unsupported, naming the tensor, for what cannot be cast or has no numbers.
    """
    _select(work)
    _refuse_half_gone(work)
    wanted = _wanted(work)
    arrays = {id(row.node): row for rows in work.rows.values() for row in rows if _is_anew(row)}
    walked = work.handle.walked
    cuts = {start for start, _ in work.edits.deletions}
    leaves = {*work.modules, *arrays, *_nested(work)}
    root = walked.root if work.root is None else work.root
    stray = strays(walked) if work.root is None and work.fresh is None else []
    _refuse_nested(work)
    nodes = list(live_nodes(root, cuts, leaves, stray))
    refs = [ref for node in nodes for ref in _refs(work, node, wanted, arrays)]
    refs += _of_two_types(work, refs)
    housing = work.housing = house(refs, dict(work.changes.devices), work.changes.compact)
    _count_tags(work, housing)
    for node in nodes:
        _tell(work, node, housing)
    _write_anew(work, arrays)
    return housing


def _select(work: Rehousing) -> None:
    """Leave one table: cut all before and after it."""
    select = work.changes.select
    table = next((t for t in work.tables if t.path == select), None)
    if select is None or table is None:
        return
    owner = work.owner(table)
    work.root = owner
    if select and id(owner) not in work.modules:
        walked = work.handle.walked
        place = occurrences(walked, {id(owner)})[0]
        first = walked.start + (2 if walked.data[walked.start] == 0x80 else 0)
        inside = [cut for cut in work.edits.deletions if place.start <= cut[0] < place.end]
        work.edits.deletions[:] = [(first, place.start), *inside, (place.end, walked.end - 1)]


def _wanted(work: Rehousing) -> dict[int, tuple[DType | None, str]]:
    """{id of the node that makes a tensor: (dtype it shall have, key)} of all rows."""
    found: dict[int, tuple[DType | None, str]] = {}
    for table in work.tables:
        for row in work.rows_of(table):
            dense = dense_of(row.node)
            if row.node is None or _is_anew(row):
                continue
            if row.target is not None and dense is None and type(row.node) is not Pers:
                raise Unsupported("a tensor of this kind is not cast", key=row.tensor.key,
                                  hint="leave it as it is with --keep-dtype")  # fmt: skip
            maker = id(row.node if dense is None else dense.call)
            known = found.setdefault(maker, (row.target, row.tensor.key))
            if known[0] is not row.target:
                raise Unsupported(
                    f"it is one tensor with '{known[1]}', which gets another dtype",
                    key=row.tensor.key, hint="cast both, or leave both with --keep-dtype",
                )  # fmt: skip
    _refuse_elsewhere(work)
    return found


def _refuse_elsewhere(work: Rehousing) -> None:
    """A cast tensor object may stand in state_dicts alone: what else holds it (an optimizer, a
    list) would be cast with it.
    """
    rows = (row for found in work.rows.values() for row in found)
    cast = {id(row.node): row for row in rows if row.target and row.node is not None}
    tables = (work.owner(table) for table in work.tables)
    inside = {start for owner in tables for _, _, _, start, _ in dict_items(owner) or ()}
    for place in _uncut(work, cast):
        if place.start not in inside:
            raise Unsupported(
                "the same tensor stands elsewhere in the file, where it is not cast",
                key=cast[id(place.node)].tensor.key, hint="leave it as it is with --keep-dtype",
            )  # fmt: skip


def _uncut(work: Rehousing, wanted: Collection[int]) -> Iterator[Occurrence]:
    """Every place of these nodes that comes out."""
    cuts = sorted(work.edits.deletions)
    for place in occurrences(work.handle.walked, wanted) if wanted else ():
        before = bisect_right(cuts, (place.start, work.handle.walked.end))
        if not before or place.start >= cuts[before - 1][1]:
            yield place


def _refuse_half_gone(work: Rehousing) -> None:
    """A model under two names of which the first goes would stay an object under the second."""
    if work.changes.keep_object or id(work.root) in work.modules:
        return
    tables = (table for table in work.checkpoint.tables if table.kind == "module")
    gone = {id(work.owner(table)): table for table in tables}
    for place in _uncut(work, gone.keys() - work.modules.keys()):
        name = ".".join(map(str, gone[id(place.node)].path))
        raise Unsupported(
            f"the model '{name}' goes, but it is one object with another entry that stays",
            path=work.checkpoint.file, hint=f"drop the other name, or take this one with --select {name}",
        )  # fmt: skip


def _is_anew(row: Row) -> bool:
    """Whether a tensor is written as a new expression: a numpy array; a tensor of torch 0.1
    that is cast (its class is its dtype).
    """
    node = row.node
    old = type(node) is Obj and node.op == NEWOBJ and dense_of(node) is None
    cast = row.target is not None and row.tensor.storage is not None
    return node is not None and (row.tensor.kind == "ndarray" or (old and cast))


def _refuse_nested(work: Rehousing) -> None:
    """Torch builds a nested tensor at once, before it has read the numbers of a legacy stream."""
    if work.legacy and work.checkpoint.format != "torch-legacy":
        for tensor in work.checkpoint.tensors:
            if tensor.kind == "nested":
                raise Unsupported("torch cannot load a nested tensor from a legacy file",
                                  key=tensor.key, hint="write a zip (--to zip)")  # fmt: skip


def _nested(work: Rehousing) -> set[int]:
    """Calls that are storages: a legacy stream inside bytes (bare pickles)."""
    views = getattr(work.handle.container, "views", None)
    return set(views) if isinstance(views, dict) else set()


def _refs(
    work: Rehousing, node: Any, wanted: dict[int, tuple[DType | None, str]], arrays: dict[int, Row]
) -> Iterator[User | Storage]:
    """Who reads a storage at this node, in order."""
    if id(node) in work.modules:
        for row in work.rows_of(work.modules[id(node)]):
            yield _row_user(row, id(row.tensor))
    elif id(node) in arrays:
        yield _row_user(arrays[id(node)], id(node))
    elif type(node) is Pers or dense_of(node) is None:
        found = work.handle.reader.view(node)
        if isinstance(found, Tensor):
            target, label = wanted.get(id(node), (None, found.key))
            yield User(id(node), found, target, label)
        elif type(found) is View:
            yield found.storage
    else:
        tensor = work.handle.reader.tensor(node)
        assert tensor is not None
        target, label = wanted.get(id(node), (None, tensor.key))
        yield User(id(node), tensor, target, label)


def _of_two_types(work: Rehousing, refs: list[User | Storage]) -> list[Storage]:
    """Storages that go by two types: torch takes the first it meets for all of them, so they
    stay whole. Raises Unsupported for a cast of one.
    """
    mixed = set(work.handle.reader.two_dtypes)
    users = [ref for ref in refs if isinstance(ref, User) and ref.storage.key in mixed]
    for user in users:
        if user.cast:
            raise Unsupported("its storage is used with another dtype too", key=user.label,
                              hint="leave it as it is with --keep-dtype")  # fmt: skip
    return [user.storage for user in users]


def _row_user(row: Row, place: int) -> User:
    t = row.tensor
    if t.kind not in _DENSE_KINDS or t.storage is None or t.dtype is None:
        raise Unsupported(f"a {t.kind} tensor cannot be written into a plain state_dict",
                          key=t.key, hint="leave it out with --drop")  # fmt: skip
    return User(place, t, row.target, t.key)


def _count_tags(work: Rehousing, housing: Housing) -> None:
    done: set[str] = set()
    for home in housing.homes:
        change = (home.source.device, home.device)
        if home.source.key not in done and change[0] != change[1]:
            done.add(home.source.key)
            work.retagged[change] = work.retagged.get(change, 0) + 1


def _tell(work: Rehousing, node: Any, housing: Housing) -> None:
    """Edit what a live node says of its storage."""
    reader, edits, legacy = work.handle.reader, work.edits, work.legacy
    dense = dense_of(node) if type(node) is Obj else None
    if isinstance(dense, Dense) and dense.call is node:
        place = housing.places[id(node)]
        tensor = reader.tensor(node)
        assert tensor is not None
        tell(dense, tensor, place, housing.homes[place.home], str(place.home), legacy, edits)
        return
    if id(node) in work.modules or type(node) not in (Pers, Obj):
        return
    found = reader.view(node)
    if type(found) is View:
        number = housing.bare[found.storage.key]
        home = housing.homes[number]
        if type(node) is Pers and items_of(node.pid) is not None:
            tell_storage(node, home, str(number), legacy, edits)
        else:
            data = expressions.storage_id(home, str(number), legacy=legacy)
            edits.values[node.start] = (node.end + 1, data)
    elif isinstance(found, Tensor):
        edits.values[node.start] = (node.end + 1, _fresh_tensor(work, found, id(node)))
    elif type(node) is Pers:
        edits.values[node.start] = (node.end + 1, _class_of(node))


def _class_of(node: Pers) -> bytes:
    """A class that came with its source in an old file, by its name alone."""
    items = items_of(node.pid) or ()
    name = global_name(items[1]) if len(items) == 4 else None
    if name is None:
        raise PickleInvalid("a persistent id that is neither storage nor class", offset=node.end)
    return named(items[1].module, items[1].name)


def _fresh_tensor(work: Rehousing, tensor: Tensor, place_id: int, grad: bool = False) -> bytes:
    place: Place = work.housing.places[place_id]
    home: Home = work.housing.homes[place.home]
    storage = expressions.storage_id(home, str(place.home), legacy=work.legacy)
    untyped = home.dtype.torch_storage == "UntypedStorage"
    return expressions.tensor(storage, place.dtype, tensor.shape or (), place.stride, place.offset,
                              untyped=untyped, requires_grad=grad)  # fmt: skip


def _write_anew(work: Rehousing, arrays: dict[int, Row]) -> None:
    """Modules and arrays as expressions, wherever they stand; one object stays one."""
    made: dict[int, bytes] = {}
    for node_id, table in work.modules.items():
        if work.root is None or id(work.root) == node_id:
            made[node_id] = _module(work, table)
    if work.root is not None and id(work.root) in made:
        work.fresh = made[id(work.root)]
        return
    if id(work.handle.walked.root) in made:
        work.fresh = made[id(work.handle.walked.root)]
        return
    live = [row for row in arrays.values() if id(row.node) in work.housing.places]
    made.update({id(r.node): _fresh_tensor(work, r.tensor, id(r.node)) for r in live})
    groups: dict[int, int] = {}
    for place in occurrences(work.handle.walked, made) if made else ():
        work.edits.values[place.start] = (place.end, made[id(place.node)])
        work.edits.shared[place.start] = groups.setdefault(id(place.node), len(groups))


def _module(work: Rehousing, table: Table) -> bytes:
    rows = [
        (row.key, _fresh_tensor(work, row.tensor, id(row.tensor))) for row in work.rows_of(table)
    ]
    names = [key for key, _ in rows]
    if len(set(names)) < len(names):
        raise UsageError("two tensors of the module have one name", path=work.checkpoint.file)
    return expressions.state_dict(rows)
