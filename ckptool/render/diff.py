"""The diff screen: what explains the difference, what is the same, what is not, the sum of it.

Knows: the look. Must not know: files, verbs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckptool.render.diff_rollup import Row, rows
from ckptool.render.parts import Report, blocks, note_lines
from ckptool.render.text import columns, count, listing, padded, path_text, shape_text, show

_LISTED = 8  # names of what is the same
_FEW = 3  # new or lost tensors of a module that are told one by one
_COLUMN = 44  # a longer name moves no other row
_WIDTH = 60  # characters of one plain value
_LONG = 200
_SAME: Hashable = "same"


class Line(NamedTuple):
    """A mark (`= ! + -`), a name, and what there is to say of it."""

    mark: str
    name: str
    text: str


def diff_text(report: Report, *, limit: int | None = None, verbose: bool = False) -> str:
    """The comparison as a person reads it: at most `limit` rows; `verbose`: no row is folded."""
    lines = list(_lines(report, verbose))
    shown = lines if limit is None else lines[:limit]
    rest = len(lines) - len(shown)
    width = max((columns(line.name) for line in shown if columns(line.name) <= _COLUMN), default=0)
    body = [f"  {line.mark} {padded(line.name, width)}  {line.text}".rstrip() for line in shown]
    if rest:
        body.append(f"  … {rest:,} more rows" if rest > 1 else "  … 1 more row")
    return blocks([first_line(report), *body, summary_line(report)], note_lines(report))


def first_line(report: Report) -> str:
    """What explains the difference, or that nothing does."""
    words = "; ".join(show(word) for word in report["explained_by"])
    if report["same_tensors"]:
        return f"same tensors after: {words}" if words else "same tensors"
    if report.get("rounding"):
        head = f"same tensors up to {report['rounding']} rounding"
        return f"{head}, after: {words}" if words else head
    if words:
        return f"compared after: {words}"
    return f"{show(report['a'])} and {show(report['b'])} differ"


def summary_line(report: Report) -> str:
    """The sum of it, and what it rests on."""
    return _same_summary(report) if report["same"] else _differ_summary(report)


def _same_summary(report: Report) -> str:
    tensors = report["equal_count"]
    values = f", {count(report['extra_count'], 'value')}" if report["extra_count"] else ""
    trusted = report["by_checksum_count"]
    if trusted and trusted == tensors:
        head = "same by stored checksums (not read; --bytes proves it)"
        return f"{head}: {count(tensors, 'tensor')}{values}"
    way = f" ({trusted:,} by stored checksums, not read; --bytes proves it)" if trusted else ""
    return f"same: {count(tensors, 'tensor')}{way}{values}"


def _differ_summary(report: Report) -> str:
    changed = report["changed"]
    reshaped = sum("shape" in row["what"] for row in changed)
    facts = [
        f"{report['equal_count']:,} same",
        f"{len(changed) - reshaped:,} changed",
        f"{reshaped:,} reshaped",
        f"{len(report['added']):,} added",
        f"{len(report['removed']):,} removed",
    ]
    values = len({(row["change"], *row["top"]) for row in report["extras"]})
    facts += [count(values, "value")] if values else []
    facts += [f"other {word}" for word in report["strict_differences"]]
    trusted = report["by_checksum_count"]
    way = f" ({trusted:,} by stored checksums, not read; --bytes proves it)" if trusted else ""
    return f"differ: {', '.join(facts)}{way}"


# -- rows --------------------------------------------------------------------------------------
def _lines(report: Report, verbose: bool) -> Iterator[Line]:
    """What is the same, what is not, then the plain values."""
    states = dict(_states(report))
    details = {row["key"]: row for row in report["changed"]}
    lone = {row["key"]: row for row in (*report["removed_tensors"], *report["added_tensors"])}
    if verbose:
        found = [Row(key, (key,), state, False) for key, state in states.items()]
    else:
        found = rows(states.items(), {s for s in states.values() if _is_apart(s)})
    yield from _same_lines([row for row in found if row.state == _SAME], verbose)
    alike: dict[Hashable, list[Row]] = {}
    for row in found:
        if not verbose and _is_alike(row.state):
            alike.setdefault(row.state, []).append(row)
    for members in alike.values():
        yield _alike_line(members, details)
    for row in found:
        if row.state != _SAME and row.state not in alike:
            yield from _changed_lines(row, details, lone)
    yield from _value_lines(report)


def _states(report: Report) -> Iterator[tuple[str, Hashable]]:
    """Each tensor and what became of it; tensors that went with a whole entry are told there."""
    changed = {row["key"]: row for row in report["changed"]}
    for key in report["keys"]:
        row = changed.get(key)
        yield key, _SAME if row is None else (tuple(row["what"]), _detail(row))
    for mark, name in (("-", "removed_tensors"), ("+", "added_tensors")):
        yield from ((row["key"], mark) for row in report[name] if row["top"] == row["path"])


_FOLDED = frozenset(("value", "dtype", "device", "order"))


def _is_apart(state: Hashable) -> bool:
    """Shapes, ties and what is rare are told one by one."""
    return isinstance(state, tuple) and not _FOLDED.issuperset(state[0])


def _detail(row: Mapping[str, Any]) -> Hashable:
    """What rows of one state have in common beside it."""
    a, b, what = row["a"], row["b"], row["what"]
    dtypes = (a["dtype"], b["dtype"], row["rounding"]) if "dtype" in what else None
    devices = (a["device"], b["device"]) if "device" in what else None
    return dtypes, devices, row["text"]


def _same_lines(found: Sequence[Row], verbose: bool) -> Iterator[Line]:
    if verbose:
        yield from (Line("=", show(row.name), "equal") for row in found)
    elif found:
        total = sum(len(row.keys) for row in found)
        names = listing([show(row.name) for row in found], _LISTED)
        yield Line("=", names, f"{count(total, 'tensor')}, equal")


def _is_alike(state: Hashable) -> bool:
    """Whether tensors of this state have nothing of their own to tell: no numbers, no shapes."""
    return isinstance(state, tuple) and not _is_apart(state) and "value" not in state[0]


def _alike_line(members: Sequence[Row], details: Mapping[str, Any]) -> Line:
    """Tensors that fared alike in something that has no numbers, wherever they are."""
    total = sum(len(row.keys) for row in members)
    names = listing([show(row.name) for row in members], _LISTED)
    text = _words(details[members[0].keys[0]], total > 1)
    return Line("!", names, f"{count(total, 'tensor')} {text}")


def _changed_lines(row: Row, details: Mapping[str, Any], lone: Mapping[str, Any]) -> Iterator[Line]:
    if isinstance(row.state, str):
        if len(row.keys) > _FEW:
            yield Line(row.state, _module(row), count(len(row.keys), "tensor"))
        else:
            yield from (Line(row.state, show(key), _facts(lone[key])) for key in row.keys)
    elif len(row.keys) > 1:
        several = [details[key] for key in row.keys]
        head = f"{count(len(several), 'tensor')} {_words(several[0], True)}"
        yield Line("!", _module(row), ", ".join([head, *_numbers_of(several)]))
    else:
        one = details[row.keys[0]]
        yield Line("!", show(one["key"]), ", ".join([_words(one, False), *_numbers(one)]))


def _module(row: Row) -> str:
    return show(row.name) if row.name == "all" or not row.whole else f"{show(row.name)}.*"


def _facts(row: Mapping[str, Any]) -> str:
    return f"{shape_text(row['shape'])} {show(str(row['dtype']))}"


def _words(row: Mapping[str, Any], several: bool) -> str:
    """What differs of one tensor, or of several that fared alike."""
    told = [_value(row, several) if word == "value" else _WORDS[word](row) for word in row["what"]]
    return ", ".join(told)


def _both(row: Mapping[str, Any], name: str) -> str:
    return " -> ".join(show(str(row[side][name])) for side in ("a", "b"))


_WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "shape": lambda row: (
        f"{shape_text(row['a']['shape'])} -> {shape_text(row['b']['shape'])}, replaced"
    ),
    "dtype": lambda row: _both(row, "dtype") + _rounded(row),
    "device": lambda row: _both(row, "device"),
    "order": lambda row: "elsewhere in the order",
    "tie": lambda row: " -> ".join(
        f"shared with {show(name)}" if name else "on its own" for name in row["ties"]
    ),
    "kind": lambda row: show(row["text"] or "of another kind"),
    "attributes": lambda row: f"attributes differ: {show(row['text'] or '')}",
}


def _rounded(row: Mapping[str, Any]) -> str:
    if "value" in row["what"]:
        return ""
    return f" (same up to {row['rounding']} rounding)" if row["rounding"] else " (same numbers)"


def _value(row: Mapping[str, Any], several: bool) -> str:
    if row["text"]:
        return show(row["text"])
    if several:
        return "drifted"
    if row["max_abs"] is None and row["first_at"] is not None:
        return f"{shape_text(row['a']['shape'])} differs from {row['first_at']} on{_nan_first(row)}"
    return f"{shape_text(row['a']['shape'])} drifted" if "dtype" not in row["what"] else "drifted"


def _nan_first(row: Mapping[str, Any]) -> str:
    return ", NaN on one side there" if row["nan_at"] else ""


def _numbers(row: Mapping[str, Any]) -> Iterator[str]:
    """Distances of one tensor."""
    if row["max_abs"] is None:
        return
    size = 1
    for length in row["a"]["shape"] or ():
        size *= length
    yield f"{row['differing_count']:,} of {count(size, 'element')}"
    if row["max_abs"]:
        yield f"max |d| {_number(row['max_abs'])}, rel {_number(row['max_rel'])}"
        yield from [f"cosine {row['cosine']:.6f}"] if row["cosine"] is not None else []
        yield from [f"L2 {_number(row['l2'])}"] if row["l2"] is not None else []
    yield from _nan(row)


def _nan(row: Mapping[str, Any]) -> Iterator[str]:
    if row["nan_a_count"] or row["nan_b_count"]:
        where = (
            f" (on one side only at {', '.join(map(str, row['nan_at']))})" if row["nan_at"] else ""
        )
        yield f"NaN {row['nan_a_count']:,} -> {row['nan_b_count']:,}{where}"


def _numbers_of(several: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Distances of several: the largest difference, the mean cosine."""
    known = [row for row in several if row["max_abs"] is not None]
    if not known:
        return
    yield f"max |d| {_number(max(row['max_abs'] for row in known))}"
    cosines = [row["cosine"] for row in known if row["cosine"] is not None]
    if cosines:
        yield f"mean cosine {sum(cosines) / len(cosines):.6f}"
    nans = [row for row in known if row["nan_a_count"] or row["nan_b_count"]]
    if nans:
        yield f"NaN in {listing([show(row['key']) for row in nans])}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.1e}"


# -- plain values ------------------------------------------------------------------------------
def _value_lines(report: Report) -> Iterator[Line]:
    """Each value that differs; what only one side has, by the largest thing that is gone."""
    tensors = {
        "removed": [row for row in report["removed_tensors"] if row["top"] != row["path"]],
        "added": [row for row in report["added_tensors"] if row["top"] != row["path"]],
    }
    groups: dict[tuple[str, tuple[Any, ...]], list[Mapping[str, Any]]] = {}
    for row in report["extras"]:
        groups.setdefault((row["change"], tuple(row["top"])), []).append(row)
    for change, lost in tensors.items():
        for row in lost:
            groups.setdefault((change, tuple(row["top"])), [])
    for (change, top), members in groups.items():
        if change == "changed":
            yield from (_changed_value(row, groups) for row in members)
        elif ("changed", top) not in groups:
            inside = sum(tuple(row["top"]) == top for row in tensors[change])
            yield _lost_value(change, top, members, inside)


def _changed_value(row: Mapping[str, Any], groups: Mapping[Any, Any]) -> Line:
    words = [_plain(row[side], row[f"{side}_type"]) for side in ("a", "b")]
    if words[0] == words[1]:
        types = [show(str(row[f"{side}_type"])) for side in ("a", "b")]
        same = types[0] == types[1]
        words = (
            [words[0], "differs"]
            if same
            else [f"{w} ({t})" for w, t in zip(words, types, strict=True)]
        )
        if same:
            return Line("!", path_text(row["path"]), " ".join(words))
    return Line("!", path_text(row["path"]), " -> ".join(words))


def _lost_value(
    change: str, top: tuple[Any, ...], members: Sequence[Mapping[str, Any]], inside: int
) -> Line:
    mark, side = ("-", "a") if change == "removed" else ("+", "b")
    if len(members) == 1 and not inside and tuple(members[0]["path"]) == top:
        return Line(mark, path_text(top), _plain(members[0][side], members[0][f"{side}_type"]))
    facts = [count(inside, "tensor")] if inside else []
    facts += [count(len(members), "value")] if members else []
    return Line(mark, path_text(top), ", ".join(facts))


def _plain(value: Any, kind: str | None) -> str:
    """A plain value as Python writes it, cut short; a container by its type."""
    if value is None and kind not in (None, "NoneType"):
        return show(kind)
    return show(repr(value[:_LONG] if isinstance(value, str) else value), _WIDTH)
