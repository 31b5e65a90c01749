"""From one walked pickle to a Checkpoint, the same way in every pickle container.

Knows: the order of the checks. Must not know: where storages lie (the reader does).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ckptool.checkpoint import Checkpoint, Extra, Global, Note, Storage, Table, Tensor
from ckptool.errors import CkptError, NotACheckpoint
from ckptool.formats.collector import paused
from ckptool.formats.dicts import dict_items
from ckptool.formats.discover import Discoverer, Found
from ckptool.formats.extras import top_extras
from ckptool.formats.judge import CODE, Judge
from ckptool.formats.measures import View
from ckptool.formats.torch_pickle import TensorReader
from ckptool.formats.wording import some
from ckptool.limits import Limits
from ckptool.pickles.nodes import Obj, Walked
from ckptool.pickles.walk import walk
from ckptool.places import Source

BEFORE = "before that it would call"
"""What the error of a damaged pickle says of calls that loaders make before they meet the damage."""
_MANY = 10_000  # calls: below, what nodes take is nothing


class PickleHandle(NamedTuple):
    """What a rewrite needs again: the walked pickle, what was found in it, the container's own."""

    walked: Walked
    found: Found
    reader: TensorReader
    container: Any = None

    def let_go(self) -> None:
        """Keep what was read of the nodes, not the nodes: most of the memory of a large file."""
        self.walked.let_go()
        self.found.owners.clear()


def walk_checked(data: bytes, start: int, limits: Limits, member: str) -> Walked:
    """Walk; an error names the calls that stand before the damage, since loaders run them."""
    try:
        return walk(data, start, limits, member)
    except CkptError as error:
        partial = getattr(error, "partial", None)
        judged = Judge(partial, member).run() if partial else ()
        calls = [g for g in judged if g.verdict == CODE and g.detail != "named as a value"]
        if calls:
            error.text += f"; {BEFORE} {', '.join(g.name for g in calls[:3])}"
            error.args = (error.text,)
        raise


def assemble(
    source: Source,
    format_name: str,
    walked: Walked,
    reader: TensorReader,
    limits: Limits,
    *,
    container: Any = None,
    notes: tuple[Note, ...] = (),
    arrays: Callable[[Any], Tensor | None] | None = None,
    judged: tuple[Global, ...] = (),
    traits: frozenset[str] = frozenset(),
    discoverer: Discoverer | None = None,
    keep: bool = True,
) -> Checkpoint:
    """Discover, check every storage and tensor (reached or not), judge every call.

    Where the nodes need not be kept, for a rewrite or to load objects, those of many plain tensors
    go once they are read. Raises TensorBounds, StorageSize, PickleInvalid, NotACheckpoint when
    nothing is in it.
    """
    with paused():
        verdicts = judged or Judge(walked).run()
        reader.note_tags(walked)
        if not keep and len(walked.calls) > _MANY:
            walked.let_go_memo()
            reader.keeps = False
        found = (discoverer or Discoverer(reader, limits, arrays)).run(walked.root)
        reader.finish(walked)
        if not any(g.verdict == CODE for g in verdicts):
            _must_hold_something(walked, found, source)
        extras = top_extras(walked.root, reader, found.tables)
        return Checkpoint(
            file=source.name,
            format=format_name,
            size_bytes=source.size,
            sources=(source.address,),
            tables=tuple(found.tables),
            weights=found.weights,
            tensors=tuple(found.tensors),
            storages=_in_file_order(walked, reader),
            extras=extras,
            globals=tuple(_placed(row, found) for row in verdicts),
            notes=notes + _notes(walked, found, reader) + _of_optimizers(extras),
            handle=PickleHandle(walked, found, reader, container),
            traits=traits,
        )


def _in_file_order(walked: Walked, reader: TensorReader) -> tuple[Storage, ...]:
    """All storages by their first reference in the pickle: discovery met them in its own order."""
    first: dict[str, None] = {}
    for pers in walked.persistent:
        told = reader.told(pers)
        if type(told) is Storage:
            first[told.key] = None
        elif type(told) is View:
            first[told.storage.key] = None
    first |= dict.fromkeys(reader.storages)
    return tuple(map(reader.storages.__getitem__, first))


def _placed(row: Global, found: Found) -> Global:
    """A dangerous name, with the place in the object where it is called."""
    path = found.call_paths.get(row.offset) if row.verdict == CODE else None
    if not path:
        return row
    detail = f"{row.detail}, while building '{'.'.join(map(str, path))}'"
    return Global(row.name, row.verdict, row.offset, row.member, detail)


def _must_hold_something(walked: Walked, found: Found, source: Source) -> None:
    rows = dict_items(walked.root)
    if found.tensors or type(walked.root) is Obj or any(type(row[0]) is str for row in rows or ()):
        return
    if rows == []:
        return
    kind = type(walked.root).__name__.lower()
    word = {"tup": "tuple", "box": "container", "nonetype": "None"}.get(kind, kind)
    raise NotACheckpoint(f"a pickle that holds one {word} and no tensors", path=source.name)


def _of_optimizers(extras: Sequence[Extra]) -> tuple[Note, ...]:
    """Those whose state torch would leave aside."""
    rows = [e for e in extras if e.type == "optimizer" and e.value.get("ids_are_text")]
    names = [".".join(map(str, e.path)) for e in rows]
    text = f"{some(names)}: parameters are numbers in its groups and texts in its state (DCP makes them so); optimizer.load_state_dict takes none of that state and says nothing, ckptool.load_into does take it"
    return (Note("optimizer-ids", text),) if rows else ()


def _notes(walked: Walked, found: Found, reader: TensorReader) -> tuple[Note, ...]:
    notes = []
    twice = [(*table.path, key) for table in found.tables for key in table.duplicate_keys]
    if twice or found.repeated:
        names = [".".join(map(str, path)) for path in dict.fromkeys((*twice, *found.repeated))]
        keys = ", ".join(f"'{name}'" for name in names[:5])
        notes.append(
            Note(
                "key-duplicate",
                f"set more than once in one dict: {keys}; torch keeps the last, other readers the first",
            )
        )
    for table in found.tables:
        notes.extend(_look_alikes(table))
    if reader.two_dtypes:
        notes.append(
            Note(
                "storage-two-dtypes",
                f"storage {reader.two_dtypes[0]} is named with two dtypes; torch, and ckptool, read all of it as the first",
            )
        )
    for oddity, offset in walked.oddities.items():
        if oddity != "DUP":
            notes.append(Note("pickle-odd", f"an odd pickle: {oddity} (byte {offset:,})"))
    return tuple(notes)


def _look_alikes(table: Table) -> list[Note]:
    """Keys that a person cannot tell apart: equal once normalised and stripped of the unseen."""
    odd = [tensor.key for tensor in table.tensors if not tensor.key.isascii()]
    if not odd:
        return []
    from unicodedata import category, normalize

    seen: dict[str, set[str]] = {}
    for tensor in table.tensors:
        plain = "".join(
            c for c in normalize("NFC", tensor.key) if category(c) not in ("Cf", "Cc", "Mn")
        )
        seen.setdefault(plain, set()).add(tensor.key)
    twins = [keys for keys in seen.values() if len(keys) > 1]
    if not twins:
        return []
    return [Note("keys-look-alike", f"{sum(map(len, twins))} keys look alike and are different")]
