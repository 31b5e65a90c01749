"""The inspect screen: what the file is, its contents, the table of keys, what to do now.

Knows: the look. Must not know: files, verbs.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from ckptool.render.parts import (
    Report,
    blocks,
    cells,
    content_lines,
    header,
    hidden_line,
    note_lines,
    top,
)
from ckptool.render.text import lay_out

TABULATED = 1_000
"""Rows that tabulate lays out. It takes about 40 µs a row, 0.4 s for ten thousand keys, where
one format string takes a hundredth; above this many rows we use that."""


def table(report: Report) -> str:
    """The inspection as a person reads it."""
    names, right = header(report)
    rows = list(cells(report, names))
    keys = [f"  {line}" for line in grid([names, *rows], right)] if rows else ["  no tensors"]
    hidden = hidden_line(report)
    if hidden:
        keys.append(f"  {hidden}")
    summary = top(report)[:1] if hidden else ()
    return blocks(top(report), content_lines(report), keys, summary, note_lines(report))


def grid(rows: Sequence[Sequence[str]], right: Set[int]) -> list[str]:
    """Lines of a table, `right` its right-aligned columns; every cell has passed show(), so tabulate
    meets no escapes. It asks wcwidth, as we do, how wide a character is.
    """
    if len(rows) > TABULATED:  # tabulate makes a column two wider than its heading: so do we
        names = [f"  {name}" if at in right else f"{name}  " for at, name in enumerate(rows[0])]
        return lay_out([names, *rows[1:]], right)
    from tabulate import tabulate

    align = ["right" if at in right else "left" for at in range(len(rows[0]))]
    text: str = tabulate(
        rows[1:], headers=rows[0], tablefmt="plain", disable_numparse=True, colalign=align
    )
    return text.splitlines()
