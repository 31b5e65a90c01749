"""What stands beside the weights of a pickled checkpoint: its optimizers, its plain values.

Knows: dicts of nodes and where state_dicts lie in them. Must not know: torch, printing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, Protocol

from ckptool.checkpoint import Checkpoint, Path
from ckptool.errors import UsageError
from ckptool.formats.dicts import dict_items, is_optimizer, key_parts
from ckptool.pickles.nodes import LIST, Box, Obj, Tup, elements
from ckptool.verbs.tables import path_name

_DEEP = 4
"""How far below the root optimizers are looked for: {'optimizers': {'G': …}} is two."""


class Values(Protocol):
    """What makes values of nodes (`models.tensors.Loader`)."""

    def value(self, node: Any) -> Any:
        """The value of a node."""


def root_of(checkpoint: Checkpoint) -> Any:
    """The node of the whole object; None where the file is no pickle of one."""
    walked = getattr(checkpoint.handle, "walked", None)
    return walked.root if walked is not None and "inspect-only" not in checkpoint.traits else None


def optimizers(root: Any) -> dict[Path, Any]:
    """{path: node} of the optimizers' state_dicts, in file order."""
    found: dict[Path, Any] = {}
    stack: list[tuple[Path, Any]] = [((), root)]
    seen: set[int] = set()
    while stack:
        path, node = stack.pop()
        if type(node) not in (Box, Obj, Tup) or id(node) in seen:
            continue
        seen.add(id(node))
        rows = dict_items(node)
        if rows is not None and is_optimizer(rows):
            found[path] = node
        elif len(path) < _DEEP:
            stack += reversed(list(_below(path, node)))
    return found


def _below(path: Path, node: Any) -> Iterator[tuple[Path, Any]]:
    rows = dict_items(node)
    if rows is not None:
        parts = key_parts(rows)
        yield from (((*path, part), row[1]) for part, row in zip(parts, rows, strict=True))
    elif type(node) is Tup:
        yield from (((*path, at), item) for at, item in enumerate(node.items))
    elif type(node) is Box and node.kind == LIST:
        yield from (((*path, at), item) for at, (item, *_) in enumerate(elements(node)))


def choose(found: dict[Path, Any], at: str | None, file: str) -> dict[Path, Any]:
    """The optimizers that may be meant: the one at a dotted path, else all of them.

    Raises UsageError where there is none.
    """
    if not found:
        raise UsageError("the file holds no state of an optimizer", path=file,
                         hint="leave optimizer= out")  # fmt: skip
    if at is None:
        return found
    chosen = {path: node for path, node in found.items() if path_name(path) == at}
    if not chosen:
        raise UsageError(f"there is no optimizer at '{at}'", path=file,
                         hint=f"there is one at {listed(found)}")  # fmt: skip
    return chosen


def listed(paths: Iterable[Path]) -> str:
    """The paths, quoted."""
    return ", ".join(repr(path_name(path)) for path in list(paths)[:8])


# -- plain values ------------------------------------------------------------------------------
def extras(
    checkpoint: Checkpoint, values: Values, taken: Collection[str] = ()
) -> dict[Any, Any]:  # fmt: skip
    """The entries of the outermost dict but the state_dicts and optimizers; beside a state_dict
    at the root, its entries that are no tensors and that the model has not `taken`. Of a
    .safetensors file, its `__metadata__`.
    """
    root = root_of(checkpoint)
    if root is None:
        return {row.path[0]: row.value for row in checkpoint.extras if row.path}
    rows = dict_items(root)
    if rows is None:
        return {}
    base = next((table for table in checkpoint.tables if table.path == ()), None)
    if base is not None and base.kind == "tensors":
        base = None
    tensors = {t.key for t in base.tensors} if base is not None else set()
    gone = _Gone(checkpoint, root)
    made: dict[Any, Any] = {}
    for path, node in _below((), root):
        if path[0] not in tensors and path[0] not in taken:
            kept = gone.left_of(node, path, values)
            if kept is not _NOTHING:
                made[path[0]] = kept
    return made


_NOTHING = object()


class _Gone:
    """The state_dicts and optimizers, which are no plain values."""

    def __init__(self, checkpoint: Checkpoint, root: Any) -> None:
        owners = checkpoint.handle.found.owners
        found = {t.path: owners[t.path] for t in checkpoint.tables if t.path and t.path in owners}
        found |= optimizers(root)
        self._ids = {id(node) for node in found.values()}
        self._above = {path[:i] for path in found for i in range(len(path))}

    def left_of(self, node: Any, path: Path, values: Values) -> Any:
        """The value of a node less what is gone; _NOTHING where that is all there was."""
        if id(node) in self._ids:
            return _NOTHING
        if path not in self._above:
            return values.value(node)
        made = {
            place[-1]: kept
            for place, value in _below(path, node)
            if (kept := self.left_of(value, place, values)) is not _NOTHING
        }
        if not made:
            return _NOTHING
        return made if dict_items(node) is not None else list(made.values())
