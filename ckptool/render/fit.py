"""The screen of inspect --model: whether a file fits, why not, the command that mends it.

Knows: the look. Must not know: files, verbs, models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from ckptool.render.parts import Report, blocks, note_lines
from ckptool.render.text import LONG, lay_out, shape_text, show

_MOST = 40
"""Rows of one kind that are listed; JSON has them all."""
Row = tuple[str, ...]


def fit_text(report: Report) -> str:
    """The answer as a person reads it; `report` is an inspection with its `match`."""
    match = report["match"]
    return blocks([*_head(report, match), *_why(match)], _mend(report, match), note_lines(report))


def _head(report: Report, match: Mapping[str, Any]) -> list[str]:
    sets = (match["missing_keys"], match["unexpected_keys"], match["mismatched"])
    verdict = "fits" if match["fits"] else "does not fit" if any(sets) else "not known"
    place = ".".join(map(str, match["table"]))
    at = f" at '{show(place)}'" if place else ""
    counts = [
        f"matched {match['loaded_count']:,} of {match['wanted_count']:,}",
        *(
            f"{name} {len(match[name]):,}"
            for name in ("missing_keys", "unexpected_keys", "mismatched")
        ),
    ]
    return [
        f"{show(report['file'])}{at} against {show(match['model'], LONG)}: {verdict}",
        f"  {', '.join(counts)}",
    ]


def _why(match: Mapping[str, Any]) -> list[str]:
    """Cause, then what is left of the difference once its rule is applied."""
    if match["fits"]:
        return []
    lines = [f"cause   {show(match['cause'], LONG)}"]
    lines += [f"        {show(text, LONG)}" for text in match["findings"]]
    after = match["after"]
    owner = "model" if match["is_model"] else "other"
    rows: list[Row] = [
        ("mismatched", name, f"file {file}", f"{owner} {model}")
        for name, file, model in _folded(after["mismatched"])
    ]
    for word, field in (("missing", "missing_keys"), ("unexpected", "unexpected_keys")):
        rows += [(word, name, "", "") for name in fold(after[field])]
    lines += [f"  {line}" for line in lay_out(_cut(rows))] if rows else []
    return lines + [f"  not guessed: {show(text, LONG)}" for text in match["choices"]]


def _cut(rows: Sequence[Row]) -> list[Row]:
    found: list[Row] = []
    for word in dict.fromkeys(row[0] for row in rows):
        some = [row for row in rows if row[0] == word]
        found += some[:_MOST]
        if len(some) > _MOST:
            found.append(("", f"and {len(some) - _MOST:,} more {word}", "", ""))
    return found


def fold(keys: Sequence[str]) -> list[str]:
    """`fc.weight`, `fc.bias` as `fc.{weight,bias}`: neighbours that differ in their last part."""
    return [_joined(module, leaves) for module, leaves in _groups(keys)]


def _groups(keys: Sequence[str]) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for key in keys:
        module, dot, leaf = key.rpartition(".")
        if dot and found and found[-1][0] == module:
            found[-1][1].append(leaf)
        else:
            found.append((module, [leaf]))
    return found


def _joined(module: str, leaves: Sequence[str]) -> str:
    lead = f"{show(module)}." if module else ""
    if len(leaves) == 1:
        return f"{lead}{show(leaves[0])}"
    return f"{lead}{{{','.join(map(show, leaves))}}}"


def _folded(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """(name, shapes in the file, shapes in the model), folded as `fold` does."""
    found: list[Row] = []
    left = iter(rows)
    for module, leaves in _groups([row["key"] for row in rows]):
        some = list(islice(left, len(leaves)))
        file = ", ".join(shape_text(row["file_shape"]) for row in some)
        model = ", ".join(shape_text(row["model_shape"]) for row in some)
        found.append((_joined(module, leaves), file, model))
    return found


def _mend(report: Report, match: Mapping[str, Any]) -> list[str]:
    if match["fits"]:
        return []
    lines = [f"mend    {show(match['fix'], LONG)}"] if match["fix"] else []
    if match["is_model"] and match["after"]["loaded_count"]:
        skip = ', mismatched="skip"' if match["after"]["mismatched"] else ""
        after = match["after"]
        loose = ", strict=False" if after["missing_keys"] or after["unexpected_keys"] else ""
        place = ".".join(map(str, match["table"])) or "."
        at = f', at="{show(place)}"' if match["table"] != report["weights"] else ""
        call = f'ckptool.load_into(net, "{show(report["file"])}"{at}{skip}{loose})'
        lines.append(f"        or in Python: {call}" if lines else f"mend    in Python: {call}")
    return lines
