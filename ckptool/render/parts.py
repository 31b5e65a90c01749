"""What several reports begin and end with: headline, contents, notes.

Knows: the shape of a report. Must not know: how tensors are laid out, files, verbs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from shlex import quote
from typing import Any

from ckptool.render import stats
from ckptool.render.text import (
    LONG,
    count,
    human_bytes,
    lay_out,
    listing,
    path_text,
    shape_text,
    show,
)

Report = Mapping[str, Any]
PLAIN_KINDS = frozenset({None, "tensor", "parameter"})
"""Kinds of tensor that need no column of their own."""


def headline(report: Report) -> str:
    """What the file is, in one line."""
    title = str(report.get("title") or report.get("format") or "unknown format")
    facts = [show(title), human_bytes(report.get("size_bytes"))]
    facts.append(count(report.get("tensor_count") or 0, "tensor"))
    if report.get("parameter_count") is not None:
        facts.append(count(report["parameter_count"], "parameter"))
    if dtypes := _shares(report.get("dtypes")):
        facts.append(dtypes)
    if devices := _shares(report.get("devices")):
        facts.append(f"saved on {devices}")
    return f"{show(str(report['file']))}: {', '.join(facts)}"


def wrapper_line(report: Report) -> str:
    """Which wrappers the names carry; empty without any."""
    found = [
        f"'{show(row['name'])}' on {row['count']:,} of {row.get('of', row['count']):,} keys"
        for row in report.get("wrappers") or ()
    ]
    return f"wrappers: {listing(found, 4)}" if found else ""


def contents(report: Report) -> list[tuple[str, str]]:
    """The top of the file: (place, what stands there), values first, then the state_dicts."""
    rows = [(path_text(e["path"]), _value(e)) for e in report.get("extras") or ()]
    tables, shown = report.get("tables") or (), shown_table(report)
    if rows or len(tables) > 1 or any(t["path"] or t.get("kind") == "module" for t in tables):
        rows += [(path_text(table["path"]), _table(table, shown, report)) for table in tables]
    return rows


def content_lines(report: Report) -> list[str]:
    """The contents as indented lines."""
    return [
        f"  {line}" for line in lay_out([(f"{name} ", text) for name, text in contents(report)])
    ]


def note_lines(report: Report) -> list[str]:
    """The last block: each note, its command below it."""
    lines = []
    for note in report.get("notes") or ():
        lines.append(f"  {show(note['text'], LONG)}")
        if note.get("command"):
            lines.append(f"    {show(note['command'], LONG)}")
    return ["Notes", *lines] if lines else []


def blocks(*parts: Sequence[str]) -> str:
    """Blocks of lines, an empty line between them."""
    return "\n\n".join("\n".join(part) for part in parts if part)


def top(report: Report) -> list[str]:
    """The first block: headline and wrappers."""
    wrapped = wrapper_line(report)
    return [headline(report), f"  {wrapped}"] if wrapped else [headline(report)]


def shown_table(report: Report) -> Mapping[str, Any] | None:
    """The table whose rows are shown: the selected one, else that of the weights."""
    tables = report.get("tables") or ()
    chosen = [table for table in tables if table.get("selected")]
    chosen += [table for table in tables if list(table["path"]) == report.get("weights")]
    return chosen[0] if chosen else None


def shown_tensors(report: Report) -> Sequence[Mapping[str, Any]]:
    """The tensors to show, cut where the report is limited."""
    table = shown_table(report)
    tensors: Sequence[Mapping[str, Any]] = table["tensors"] if table else ()
    limit = report.get("shown")
    return tensors[: limit["shown"]] if limit else tensors


def hidden_line(report: Report) -> str:
    """How many rows a limit has left out; empty when all are there."""
    limit = report.get("shown") or {"total": 0, "shown": 0}
    rest = limit["total"] - limit["shown"]
    return f"… {rest:,} more of {count(limit['total'], 'tensor')}" if rest > 0 else ""


def header(report: Report) -> tuple[list[str], set[int]]:
    """The columns this report needs, and which of them are right-aligned."""
    names = ["key", "shape", "dtype", "size", "device"]
    tensors = shown_tensors(report)
    if any(t.get("index") is not None for t in tensors):
        names.insert(0, "#")
    if any(t.get("kind") not in PLAIN_KINDS for t in tensors):
        names.append("kind")
    more = stats.columns(tensors)
    if "mean" in more:  # where a line has no room for both
        names = [name for name in names if name not in ("size", "device")]
    return names + more, {at for at, name in enumerate([*names, *more]) if name in _RIGHT}


def cells(report: Report, names: Sequence[str]) -> Iterator[list[str]]:
    """One row of safe strings for each tensor shown."""
    makers = [CELLS[name] for name in names]
    for tensor in shown_tensors(report):
        yield [make(tensor) for make in makers]


def _text(tensor: Mapping[str, Any], field: str) -> str:
    value = tensor.get(field)
    return "?" if value is None else show(str(value))


CELLS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "#": lambda t: "" if t.get("index") is None else _text(t, "index"),
    "key": lambda t: _text(t, "key"),
    "shape": lambda t: shape_text(t.get("shape")),
    "dtype": lambda t: _text(t, "dtype"),
    "size": lambda t: human_bytes(t.get("size_bytes")),
    "device": lambda t: _text(t, "device"),
    "kind": lambda t: _text(t, "kind"),
    **stats.CELLS,
}
"""Each column of a key table, by its heading."""
_RIGHT = {"#", "size", *stats.CELLS} - {"sha256"}


def _shares(counts: Mapping[str, int] | None) -> str:
    """`float32`, or `float32 (102), int64 (20)` where there are several."""
    if not counts:
        return ""
    if len(counts) == 1:
        return show(next(iter(counts)))
    return listing([f"{show(name)} ({n:,})" for name, n in counts.items()])


def _value(extra: Mapping[str, Any]) -> str:
    text = extra.get("text")
    size = f", {human_bytes(extra['size_bytes'])}" if extra.get("size_bytes") else ""
    return show(str(extra["type"] if text is None else text)) + size


def _table(table: Mapping[str, Any], shown: Any, report: Report) -> str:
    limit = report.get("shown")
    total = limit["total"] if limit and table is shown else len(table["tensors"])
    facts = [show(table["class_name"])] if table.get("class_name") else []
    facts.append(count(total, "tensor"))
    if table.get("size_bytes") is not None:
        facts.append(human_bytes(table["size_bytes"]))
    return ", ".join(facts) + _mark(table, shown, report)


def _mark(table: Mapping[str, Any], shown: Any, report: Report) -> str:
    """Why this table matters, or how to see it."""
    if list(table["path"]) == report.get("weights"):
        return "  <- weights"
    if table is shown:
        return "  <- shown"
    return f"  --at {show(quote('.'.join(map(str, table['path']))))}" if table["path"] else ""
