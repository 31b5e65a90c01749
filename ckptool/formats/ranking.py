"""Which of a file's state_dicts is shown first: by its name, then its size.

Knows: the names that frameworks give their weights. Must not know: pickles, containers.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptool.checkpoint import Path, Table

RANK = ("state_dict", "model", "model_state_dict", "net", "network", "module", "params_ema",
         "params", "model_state", "weights", "generator", "G", "netG", "netG_A", "teacher", "student",
         "ema", "ema_model", "model_ema", "state_dict_ema", "ema_state_dict")  # fmt: skip
"""The names, the best first."""


def ranked(tables: Sequence[Table]) -> tuple[list[Table], int | None]:
    """The tables that are in no module, and the index of the one that is shown (None: of none)."""
    nested = {table.path for table in tables if table.kind == "module"}
    keep = [table for table in tables if not _under(table.path, nested)]
    return keep, min(range(len(keep)), key=lambda i: _rank_of(keep[i]), default=None)


def _under(path: Path, roots: set[Path]) -> bool:
    return any(path[:i] in roots for i in range(len(path)))


def _rank_of(table: Table) -> tuple[int, int, int]:
    depth = len(table.path)
    name = str(table.path[0]) if table.path else ""
    place = RANK.index(name) if name in RANK else len(RANK)
    if "ema" in name.lower() and name not in RANK:
        place += 1
    return (-1 if depth == 0 else place, -len(table.tensors), depth)
