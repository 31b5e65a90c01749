"""Choosing one state_dict of a file by its path.

Knows: dotted paths. Must not know: files, printing.
"""

from __future__ import annotations

from ckptool.checkpoint import Checkpoint, Path, Table
from ckptool.errors import UsageError


def choose_table(checkpoint: Checkpoint, at: str | None) -> Table | None:
    """The table at `at`, or the weights, or whatever there is. Raises UsageError."""
    tables = checkpoint.tables
    if at is None:
        if checkpoint.weights is not None:
            return tables[checkpoint.weights]
        return tables[0] if tables else None
    return table_at(checkpoint, at)


def table_at(checkpoint: Checkpoint, at: str) -> Table:
    """The table whose dotted path is `at` ('' or '.' is the root). Raises UsageError, also where
    several read alike: a number and its text as keys, a key with a dot.
    """
    wanted = "" if at == "." else at
    named = [t for t in checkpoint.tables for place in t.places if path_name(place) == wanted]
    if len(named) > 1:
        raise UsageError(
            f"there are {len(named)} state_dicts at '{at}': their places read alike",
            path=checkpoint.file, hint="take one of them out in Python: ckptool.load(file)",
        )  # fmt: skip
    if named:
        return named[0]
    known = ", ".join(repr(path_name(table.path) or ".") for table in checkpoint.tables[:8])
    raise UsageError(
        f"there is no state_dict at '{at}'", path=checkpoint.file,
        hint=f"there is one at {known}" if known else "the file holds none",
    )  # fmt: skip


def path_name(path: Path) -> str:
    """`('net', 'bert')` as `net.bert`."""
    return ".".join(map(str, path))
