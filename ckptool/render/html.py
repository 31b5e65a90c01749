"""A small table for notebooks (`_repr_html_`).

Knows: HTML escaping. Must not know: files, verbs. No script, no style sheet, no attribute that
holds text from a file.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from ckptool.render.parts import Report, cells, contents, header, hidden_line, shown_tensors, top
from ckptool.render.text import LONG, show

ROWS = 100
"""Rows of a notebook's table; the rest is counted."""


def html(report: Report, *, limit: int = ROWS) -> str:
    """Headline, contents, the first `limit` keys and the notes as one `<div>`."""
    names, _ = header(report)
    rest = len(shown_tensors(report)) - limit
    hidden = hidden_line(report) or (f"… {rest:,} more" if rest > 0 else "")
    return "\n".join(
        [
            "<div>",
            *(f"<p>{_safe(line.strip())}</p>" for line in top(report)),
            *_grid([], contents(report)),
            *_grid(names, islice(cells(report, names), limit)),
            *([f"<p>{_safe(hidden)}</p>"] if hidden else []),
            *_notes(report),
            "</div>",
        ]
    )


def _grid(names: list[str], rows: Iterable[Iterable[str]]) -> list[str]:
    body = [_row("td", row) for row in rows]
    if not body:
        return []
    return ["<table>", *([_row("th", names)] if names else []), *body, "</table>"]


def _row(tag: str, row: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{_safe(cell)}</{tag}>' for cell in row)}</tr>"


def _notes(report: Report) -> list[str]:
    lines = []
    for note in report.get("notes") or ():
        command = f"<br><code>{_safe(note['command'])}</code>" if note.get("command") else ""
        lines.append(f"<li>{_safe(note['text'])}{command}</li>")
    return ["<p>Notes</p>", "<ul>", *lines, "</ul>"] if lines else []


def _safe(text: str) -> str:
    from html import escape  # its table of entities takes a millisecond to import

    return escape(show(text, LONG))
