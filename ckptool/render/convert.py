"""The convert screen: what was written, what changed, what was left.

Knows: the look. Must not know: files, verbs.
"""

from __future__ import annotations

from typing import Any

from ckptool.render.parts import Report, blocks, note_lines
from ckptool.render.text import count, human_bytes, listing, path_text, show


def convert_text(result: Report) -> str:
    """What a conversion did or, with `dry_run`, would do: then every renamed key is listed."""
    lines = [_first(result), *_devices(result), *_keys(result), *_types(result), *_left(result)]
    if result.get("dry_run"):
        pairs = (result.get("renames") or {}).items()
        lines += [f"    {show(old)} -> {show(new)}" for old, new in pairs]
        lines += [f"    {show(name)} dropped" for name in result.get("dropped") or ()]
    return blocks(lines, note_lines(result))


def restored_text(result: Report) -> str:
    """One line for --undo and --recover."""
    before, after = result["size_before_bytes"], result["outputs"][0]["size_bytes"]
    cut = human_bytes(before - after)
    return f"{show(result['input'])}   {human_bytes(after)}: the former bytes, {cut} cut off"


def _first(result: Report) -> str:
    outputs = result["outputs"]
    names = listing([show(output["file"]) for output in outputs])
    size = human_bytes(sum(output["size_bytes"] for output in outputs))
    before = result.get("size_before_bytes")
    if before and _shrank(before, sum(output["size_bytes"] for output in outputs)):
        size = f"{human_bytes(before)} -> {size}"
    if result.get("dry_run"):
        size += ", dry run: nothing written"
    elif result.get("seconds") is not None:
        size += f" in {result['seconds']:.2f} s"
    if [output["file"] for output in outputs] == [result["input"]]:
        return f"{names} edited in place   {size}"
    return f"{show(result['input'])} -> {names}   {size}"


def _shrank(before: int, after: int) -> bool:
    """Whether the size is a part of the news."""
    return after * 10 < before * 9


def _devices(result: Report) -> list[str]:
    moves = result.get("device_counts") or {}
    if not result.get("has_devices", True):
        folder = any(str(row["file"]).endswith(".distcp") for row in result["outputs"])
        return [f"  devices   none: {'DCP' if folder else '.safetensors'} records none"]
    if not moves:
        return ["  devices   unchanged"]
    lines = [f"{count(n, 'storage')} {show(move)}" for move, n in moves.items()]
    return [f"  {'' if at else 'devices':<10}{line}" for at, line in enumerate(lines)]


def _keys(result: Report) -> list[str]:
    renames = result.get("renames") or {}
    what = f"{len(renames):,} renamed" if renames else "unchanged"
    if renames and result.get("rename_summary"):
        what += f", {show(result['rename_summary'])}"
    kept = [show(name) for name in result.get("kept") or ()]
    aside = [f"{listing(kept, 5)} kept"] if kept else []
    mentions = [row for row in result.get("left_behind") or () if row.get("text")]
    aside += [listing([_mention(row) for row in mentions])] if mentions else []
    lines = [f"  keys      {what}" + (f" ({'; '.join(aside)})" if aside else "")]
    dropped = [show(name) for name in result.get("dropped") or ()]
    if dropped:
        lines.append(f"  dropped   {len(dropped):,}: {listing(dropped, 5)}")
    return lines


def _types(result: Report) -> list[str]:
    rows = [
        f"{count(n, 'tensor')} cast to {name}" for name, n in (result.get("dtypes") or {}).items()
    ]
    return [f"  types     {', '.join(rows)}"] if rows else []


def _left(result: Report) -> list[str]:
    rows = [row for row in result.get("left_behind") or () if not row.get("text")]
    names = [path_text(row["path"]) for row in rows]
    return [f"  left behind: {listing(names, 8)}"] if names else []


def _mention(row: dict[str, Any]) -> str:
    return f"{path_text(row['path'])} still says '{show(row['text'])}'"
