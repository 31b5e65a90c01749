"""Strings for people: whatever came from a file passes `show()` first.

Knows: code points, units, columns. Must not know: reports, files, verbs.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from ckptool.escapes import UNSAFE, escape

WIDTH = 200
"""Columns of one string from a file in a screen."""

LONG = 2_000
"""Columns of an error, a note or a command: our own words around names from a file."""


def show(text: str, width: int = WIDTH) -> str:
    """`text` on one line, safe for a terminal, at most `width` characters long."""
    if len(text) <= width and not UNSAFE.search(text):
        return text
    safe = escape(text[: width + 1])  # never a megabyte for the sake of two hundred
    return safe if len(safe) <= width else safe[: width - 1] + "…"


_UNITS = ("kB", "MB", "GB", "TB", "PB", "EB", "ZB")


def human_bytes(size: int | None) -> str:
    """Bytes in decimal units with one decimal: `256 B`, `37.6 kB`; `?` when unknown."""
    if size is None:
        return "?"
    if size < 1000:
        return f"{size} B"
    if size >= 10**21:
        return "over 1,000 EB"
    value, unit = size / 1000, 0
    while round(value, 1) >= 1000:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {_UNITS[unit]}"


def count(number: int, noun: str = "") -> str:
    """`11,689,512`; with a noun `1 tensor`, `62 tensors`."""
    if not noun:
        return f"{number:,}"
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def shape_text(shape: Sequence[int] | None) -> str:
    """A shape as torch prints it: `[64, 3, 7, 7]`; `?` when unknown."""
    return "?" if shape is None else show(str(list(shape)))


def path_text(path: Sequence[str | int]) -> str:
    """A place in the file: components joined by dots, `(root)` for the top."""
    return show(".".join(map(str, path))) if path else "(root)"


def listing(items: Sequence[str], most: int = 3) -> str:
    """`a, b, c and 4 more`."""
    rest = f" and {len(items) - most:,} more" if len(items) > most else ""
    return ", ".join(items[:most]) + rest


def lay_out(rows: Sequence[Sequence[str]], right: Set[int] = frozenset()) -> list[str]:
    """Rows of strings as lines: columns two spaces apart, those in `right` right-aligned."""
    widths = [max(map(columns, column)) for column in zip(*rows, strict=True)]
    aligned = (f"{{:{'>' if at in right else '<'}{width}}}" for at, width in enumerate(widths))
    line = "  ".join(aligned)
    return [
        line.format(*row).rstrip() if "".join(row).isascii() else _laid(row, widths, right)
        for row in rows
    ]


def _laid(row: Sequence[str], widths: Sequence[int], right: Set[int]) -> str:
    """One line where a character may take two columns, or none."""
    cells = [
        padded(text, width, right=at in right)
        for at, (text, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def padded(text: str, width: int, *, right: bool = False) -> str:
    """`text` and the spaces that make it `width` columns wide; it is never cut."""
    space = " " * (width - columns(text))
    return space + text if right else text + space


def columns(text: str) -> int:
    """Columns of a terminal that `text` takes: two for CJK and emoji, none for combining marks."""
    if text.isascii():
        return len(text)
    from wcwidth import wcswidth

    width: int = wcswidth(text)
    return width if width >= 0 else len(text)
