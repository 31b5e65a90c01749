"""Many files on one screen: a row for each, and the line that counts them.

Knows: the look, and which word stands for what became of a file. Must not know: files, verbs.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence

from ckptool.escapes import escape
from ckptool.render.parts import Report
from ckptool.render.structured import csv_cell, md_row
from ckptool.render.table import grid
from ckptool.render.text import count, human_bytes, listing, show

OK, CODE, UNFIT, DAMAGED, ODD, REFUSED = (
    "ok", "could run code", "does not fit", "damaged", "not finite", "refused",
)  # fmt: skip
FIELDS = ("file", "container", "size", "tensors", "parameters", "dtype", "device", "verdict")
_RIGHT = frozenset((2, 3, 4))
_PLAIN = (
    "file", "format", "size_bytes", "tensor_count", "parameter_count", "dtypes", "devices",
    "verdict",
)  # fmt: skip


def verdict_of(report: Report) -> str:
    """What became of one file: one of the words above."""
    if "error" in report:
        return REFUSED
    if "findings" in report:  # verify's
        kinds = {row["kind"] for row in report["findings"]}
        named = ((DAMAGED, "damage"), (CODE, "code"), (ODD, "numbers"))
        return next((word for word, kind in named if kind in kinds), OK)
    if report["could_run_code"]:
        return CODE
    return OK if report.get("match") is None or report["match"]["fits"] else UNFIT


def counted(verdicts: Mapping[str, int], skipped: int, links: int) -> str:
    """The last line: `5,000 files: 4,990 ok, 3 could run code, 7 refused; 12 others skipped`."""
    order = (OK, CODE, UNFIT, DAMAGED, ODD, REFUSED)
    told = [
        f"{verdicts.get(word, 0):,} {word}"
        for word in order
        if verdicts.get(word) or word in (OK, CODE, REFUSED)
    ]
    line = f"{count(sum(verdicts.values()), 'file')}: {', '.join(told)}"
    passed = [f"{count(skipped, 'other file')} skipped"] if skipped else []
    passed += [f"{count(links, 'link')} to folders not followed"] if links else []
    return "; ".join([line, *passed])


def row_of(report: Report) -> tuple[object, ...]:
    """The fields of one file, sizes in bytes, None where there is nothing to say."""
    verdict = verdict_of(report)
    if "error" in report:
        text = f"{verdict}: {report['error']['text']}"
        return (report["file"], None, None, None, None, None, None, text)
    if verdict != OK and report.get("findings"):
        text = report["findings"][0]["text"]
        verdict = text if text.startswith(verdict) else f"{verdict}: {text}"
    return (
        report["file"], report.get("title") or report["format"], report["size_bytes"],
        report["tensor_count"], report.get("parameter_count"), _names(report.get("dtypes")),
        _names(report.get("devices")), verdict,
    )  # fmt: skip


def table(rows: Sequence[tuple[object, ...]]) -> str:
    """One line a file."""
    shown = [FIELDS, *map(_cells, rows)]
    used = [at for at in range(len(FIELDS)) if any(row[at] for row in shown[1:])]
    right = {place for place, at in enumerate(used) if at in _RIGHT}
    return "\n".join(grid([[row[at] for at in used] for row in shown], right))


def plain(rows: Sequence[tuple[object, ...]]) -> str:
    """One line a file, tab separated, `?` where unknown."""
    return "\n".join("\t".join("?" if v is None else escape(str(v)) for v in row) for row in rows)


def csv_text(rows: Sequence[tuple[object, ...]]) -> str:
    """A table of the files; no cell begins with what a spreadsheet would compute."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([_PLAIN, *([csv_cell(value) for value in row] for row in rows)])
    return out.getvalue().rstrip("\n")


def markdown(rows: Sequence[tuple[object, ...]]) -> str:
    """The same table for an issue or a README."""
    rule = ["--:" if at in _RIGHT else "---" for at in range(len(FIELDS))]
    return "\n".join(
        [md_row(FIELDS), f"| {' | '.join(rule)} |", *(md_row(_cells(r)) for r in rows)]
    )


STYLES: dict[str, Callable[[Sequence[tuple[object, ...]]], str]] = {
    "table": table,
    "plain": plain,
    "csv": csv_text,
    "markdown": markdown,
}


def _cells(row: tuple[object, ...]) -> list[str]:
    file, title, size, tensors, parameters, dtypes, devices, verdict = row
    return [
        show(str(file)), show(str(title or "")),
        "" if size is None else human_bytes(int(str(size))),
        *("" if number is None else f"{number:,}" for number in (tensors, parameters)),
        show(str(dtypes or "")), show(str(devices or "")), show(str(verdict)),
    ]  # fmt: skip


def _names(counts: Mapping[str, int] | None) -> str | None:
    """`float32, int64`, the most frequent first."""
    ranked = sorted(counts or (), key=lambda name: -(counts or {})[name])
    return listing(ranked) if ranked else None
