"""The verify screen: the verdict, what is damaged, what was checked, what torch.load would say.

Knows: the look. Must not know: files, verbs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptool.render.parts import Report, blocks, note_lines
from ckptool.render.text import LONG, count, human_bytes, lay_out, listing, path_text, show

_ROWS = 20
"""Lines of one kind; the rest is counted."""
_KEYS = 6
_MENDS = frozenset(("salvage", "tensors-alone", "hint"))
_ORDER = ("code", "foreign", "refused", "known")
_VERDICTS = {"known": "known: plain data", "foreign": "a class of another package"}


def verify_text(report: Report, quiet: bool = False) -> str:
    """The whole screen; `quiet`: the verdict and what is wrong, nothing when nothing is."""
    if quiet and not report["exit_status"]:
        return ""
    damage = _damage(report)
    if quiet:
        return "\n".join([headline(report), *damage])
    notes = [note for note in report["notes"] if note["slug"] not in _MENDS]
    lines = [headline(report), *damage, *_facts(report), *_mends(report)]
    return blocks(lines, note_lines({"notes": notes}))


def verify_html(report: Report) -> str:
    """The same for a notebook: no script, no attribute that holds text from a file."""
    from html import escape

    rows = [
        (row["slug"], row["member"] or "", _keys(row), row["text"]) for row in report["findings"]
    ]
    shown = rows[: 5 * _ROWS]
    cells = ["".join(f"<td>{escape(show(cell, LONG))}</td>" for cell in row) for row in shown]
    table = "".join(f"<tr>{row}</tr>" for row in cells)
    more = f"<p>and {len(rows) - len(shown):,} more</p>" if len(rows) > len(shown) else ""
    facts = "".join(f"<p>{escape(line.strip())}</p>" for line in _facts(report))
    found = f"<table>{table}</table>{more}" if rows else ""
    return f"<div><p>{escape(headline(report))}</p>{found}{facts}</div>"


def headline(report: Report) -> str:
    """The verdict in one line."""
    facts = [show(report["title"])]
    if report["size_bytes"]:  # unknown of a folder that cannot be read
        facts.append(human_bytes(report["size_bytes"]))
    if report["tensor_count"] is not None and report["whole"]:
        facts.append(count(report["tensor_count"], "tensor"))
    return f"{show(report['file'])}: {_verdict(report)}   {', '.join(facts)}"


def _verdict(report: Report) -> str:
    kinds = {row["kind"] for row in report["findings"]}
    words = []
    if "code" in kinds:
        scripted = report["format"] in ("torchscript", "torch-package", "torch-export")
        loader = "loading it" if scripted else "torch.load(weights_only=False)"
        loader = "pickle.load" if report["format"] == "pickle" else loader
        words.append(f"{loader} would run code")
    if "numbers" in kinds:
        words.append("not all of its numbers are finite")
    if report["whole"]:
        return f"whole, but {' and '.join(words)}" if words else "whole"
    return ", and ".join(("damaged", *words))


# -- what is wrong -----------------------------------------------------------------------------
def _damage(report: Report) -> list[str]:
    """One line a cause: records with the same trouble are told together."""
    rows = [row for row in report["findings"] if row["kind"] == "damage"]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["text"], []).append(row)
    lines = [_cause(text, group) for text, group in list(groups.items())[:_ROWS]]
    if len(groups) > _ROWS:
        lines.append(f"  and {len(groups) - _ROWS:,} more kinds of damage")
    if rows and report["tensor_count"]:
        lines.append(
            f"  {report['whole_count']:,} of {count(report['tensor_count'], 'tensor')} {_are(report)} whole"
        )
    return [*lines, *_not_finite(report)]


def _are(report: Report) -> str:
    return "is" if report["tensor_count"] == 1 else "are"


def _cause(text: str, group: Sequence[Mapping[str, Any]]) -> str:
    members = [show(row["member"]) for row in group if row["member"]]
    keys = [show(key) for row in group for key in row["keys"]]
    said = show(text, LONG)
    where = listing(members, 3) if members else ""
    named = listing(keys, _KEYS)
    if where and named:
        return f"  {named}: {said} ({where})"
    if where and len(group) == 1 and group[0]["offset"] is not None:
        return f"  {where}: {said} (byte {group[0]['offset']:,})"
    place = where or named
    return f"  {place}: {said}" if place else f"  {said}"


def _not_finite(report: Report) -> list[str]:
    found = (report["numbers"] or {}).get("not_finite") or ()
    rows = [(show(row["key"]), _amounts(row)) for row in found[:_ROWS]]
    lines = [f"  {line}" for line in lay_out(rows)] if rows else []
    return [*lines, *([f"  and {len(found) - _ROWS:,} more tensors"] if len(found) > _ROWS else [])]


def _amounts(row: Mapping[str, Any]) -> str:
    parts = [f"{row['nan_count']:,} NaN"] if row["nan_count"] else []
    parts += [f"{row['inf_count']:,} infinite"] if row["inf_count"] else []
    return f"{' and '.join(parts)} of {row['element_count']:,}"


def _keys(row: Mapping[str, Any]) -> str:
    return listing([show(key) for key in row["keys"]], _KEYS)


# -- what was checked --------------------------------------------------------------------------
def _facts(report: Report) -> list[str]:
    rows = [("checksums", _checksums(report)), ("numbers", _numbers(report))]
    lines = [f"  {name:<10}  {text}" for name, text in rows if text]
    return [*lines, *_torch(report)]


def _checksums(report: Report) -> str:
    found = report["checksums"]
    lengths = "lengths and structure are checked, the bytes cannot be"
    if found["text"]:
        return f"{show(found['text'], LONG)}: {lengths}"
    total, checked = found["record_count"], found["checked_count"]
    if not total:
        return ""
    if not checked:
        return f"none is recorded for {count(total, 'record')}: {lengths}"
    wrong = sum(row["slug"] == "crc-mismatch" for row in report["findings"])
    right = f"{checked - wrong:,}" if checked - wrong < total else "all"
    text = (
        f"{right} of {count(total, 'record')} ({human_bytes(found['checked_bytes'])}) have theirs"
    )
    bare = total - checked
    return text + (
        f"; none is recorded for {bare:,}: only their lengths are checked" if bare else ""
    )


def _numbers(report: Report) -> str:
    found = report["numbers"]
    if found is None or found["not_finite"]:
        return ""
    return f"finite in {count(found['tensor_count'], 'floating tensor')}"


def _torch(report: Report) -> list[str]:
    found = report["torch_load"]
    if found is None:
        return []
    worst_first = sorted(found["blockers"], key=lambda row: _ORDER.index(row["verdict"]))
    rows = [_blocker(row) for row in worst_first[:_ROWS]]
    lines = [f"    {line}" for line in lay_out(rows)] if rows else []
    more = found["blocker_count"] - len(rows)
    lines += [f"    and {more:,} more"] if more > 0 else []
    first = [f"  {'loading':<10}  {show(found['text'], LONG)}"] if found["text"] else []
    return [*first, *lines]


def _blocker(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """A name, where it stands, and what it is."""
    at = f"byte {row['offset']:,} of {show(row['member'])}" if row["offset"] is not None else ""
    inside = f", while building '{path_text(row['path'])}'" if row["path"] else ""
    if row["name"] is None:
        return show(row["detail"], LONG), at, ""
    verdict = _VERDICTS.get(row["verdict"], "could run code")
    detail = f"{show(row['detail'])}, " if row["detail"] and row["verdict"] == "code" else ""
    return show(row["name"]), f"{detail}{at}{inside}", verdict


# -- what to do --------------------------------------------------------------------------------
def _mends(report: Report) -> list[str]:
    lines: list[str] = []
    for note in report["notes"]:
        if note["slug"] in _MENDS:
            lines.append(f"  {'' if lines else 'mend':<10}  {show(note['text'], LONG)}")
        if note["slug"] in _MENDS and note["command"]:
            lines.append(f"    {show(note['command'], LONG)}")
    return lines
