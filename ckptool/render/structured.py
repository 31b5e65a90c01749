"""Reports for machines and documents: json, jsonl, csv, markdown.

Knows: what each of these must escape. Must not know: files, verbs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ckptool.escapes import UNSAFE_IN_JSON, escape
from ckptool.render.parts import (
    Report,
    blocks,
    cells,
    contents,
    header,
    hidden_line,
    shown_tensors,
    top,
)
from ckptool.render.stats import fields, is_measured, names_of
from ckptool.render.text import LONG, show

CSV_FIELDS = (
    *("key", "shape", "dtype", "device", "stride", "offset"),
    *("storage", "size_bytes", "requires_grad", "kind"),
)


def json_text(report: Report) -> str:
    """One JSON object, a line for each of its keys (`{}` when empty)."""
    rows = (f"  {_dumps(str(key))}: {_dumps(value)}" for key, value in report.items())
    return "{\n" + ",\n".join(rows) + "\n}"


def jsonl_text(report: Report) -> str:
    """One JSON object on one line."""
    return _dumps(report)


def csv_text(report: Report) -> str:
    """A table of the tensors shown; no cell begins with what a spreadsheet would compute."""
    import csv
    import io

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    tensors = shown_tensors(report)
    asked = is_measured(tensors)
    writer.writerow([*CSV_FIELDS, *names_of(*asked)])
    for tensor in tensors:
        values = [*(tensor.get(name) for name in CSV_FIELDS), *fields(tensor, *asked)]
        writer.writerow([csv_cell(value) for value in values])
    return out.getvalue().rstrip("\n")


def markdown_text(report: Report) -> str:
    """Headline, contents, key table and notes for an issue or a README."""
    headline, *wrapped = top(report)
    names, right = header(report)
    return blocks(
        [f"**{_md(headline)}**"],
        [_md(line.strip()) for line in wrapped],
        [f"- {_md(name)}: {_md(text)}" for name, text in contents(report)],
        [
            _md_row(names),
            _md_row("--:" if at in right else "---" for at in range(len(names))),
            *map(md_row, cells(report, names)),
        ],
        [hidden] if (hidden := hidden_line(report)) else [],
        _md_notes(report),
    )


def _dumps(value: Any) -> str:
    """JSON that keeps CJK readable and escapes what could act on a terminal.

    JSON has no NaN or Infinity: such numbers become strings.
    """
    try:
        text = _encode(value)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False)
    if text.isascii() and "\x7f" not in text:  # nearly always
        return text
    return UNSAFE_IN_JSON.sub(_json_escape, text)


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def _json_escape(match: re.Match[str]) -> str:
    return json.dumps(match.group())[1:-1]


_WORDS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return _WORDS[str(value)]
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def csv_cell(value: Any) -> Any:
    """One CSV cell: numbers as they are, text escaped and, where needed, kept from computing."""
    if value is None or isinstance(value, (int, float)):
        return value
    text = escape(str(value))
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


_MARKUP = re.compile(r"[\\`*\[<>&|]")


def _md(text: str) -> str:
    return _MARKUP.sub(r"\\\g<0>", text)


def _md_row(row: Iterable[str]) -> str:
    return f"| {' | '.join(row)} |"


def md_row(row: Iterable[str]) -> str:
    """One row of a Markdown table, its cells escaped."""
    return _md_row(map(_md, row))


def _md_notes(report: Report) -> list[str]:
    lines = []
    for note in report.get("notes") or ():
        lines.append(f"- {_md(show(note['text'], LONG))}")
        if note.get("command"):  # an indented block: nothing in it is markup
            lines += ["", f"      {show(note['command'], LONG)}", ""]
    return ["Notes", "", *lines] if lines else []
