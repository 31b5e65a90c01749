"""What load_into did, as text.

Knows: the look. Must not know: files, verbs, models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptool.render.text import LONG, shape_text, show

_MOST = 8
_SETS = (("missing", "missing_keys"), ("unexpected", "unexpected_keys"), ("left out", "left_out"))


def loading_text(report: Mapping[str, Any]) -> str:
    """A line for what was loaded, then what was not, and the other contents."""
    place = ".".join(map(str, report["table"]))
    at = f" at '{show(place)}'" if place else ""
    count = f"{len(report['loaded']):,} keys loaded"
    lines = [f"{show(report['file'])}{at} into {show(report['model'], LONG)}: {count}"]
    lines += [f"  {show(report['cause'], LONG)}"] if report["cause"] else []
    lines += [f"  {word} {len(report[field]):,}: {_some(report[field])}" for word, field in _SETS if report[field]]  # fmt: skip
    lines += [_kept(row) for row in report["mismatched"]]
    if report["optimizer"] is not None:
        name = ".".join(map(str, report["optimizer"])) or "the root"
        lines.append(f"  the optimizer's state from '{show(name)}'")
    if report["extras"]:
        lines.append(f"  extras: {_some(report['extras'])}")
    lines += [f"  note: {show(note['text'], LONG)}" for note in report["notes"]]
    return "\n".join(lines)


def _kept(row: Mapping[str, Any]) -> str:
    shapes = f"{shape_text(row['model_shape'])} in the model, {shape_text(row['file_shape'])} in the file"
    return f"  kept {show(row['key'])}: {shapes}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST:,} more" if len(names) > _MOST else ""
    return ", ".join(map(show, names[:_MOST])) + more
