"""The convert screen: what was written, what changed, what was left.

Knows: the look. Must not know: files, verbs.
"""

from __future__ import annotations

from typing import Any

from ckptool.render.parts import Report, blocks, note_lines
from ckptool.render.text import count, human_bytes, listing, path_text, show


def convert_text(result: Report) -> str:
    """What a conversion did or, with `dry_run`, would do: then every renamed key is listed."""
    lines = [_first(result), *_devices(result), _keys(result)]
    if result.get("dry_run"):
        pairs = (result.get("renames") or {}).items()
        lines += [f"    {show(old)} -> {show(new)}" for old, new in pairs]
    return blocks(lines, note_lines(result))


def _first(result: Report) -> str:
    outputs = result["outputs"]
    names = listing([show(output["file"]) for output in outputs])
    size = human_bytes(sum(output["size_bytes"] for output in outputs))
    if result.get("dry_run"):
        size += ", dry run: nothing written"
    elif result.get("seconds") is not None:
        size += f" in {result['seconds']:.2f} s"
    return f"{show(result['input'])} -> {names}   {size}"


def _devices(result: Report) -> list[str]:
    moves = result.get("device_counts") or {}
    if not moves:
        return ["  devices   unchanged"]
    lines = [f"{count(n, 'storage')} {show(move)}" for move, n in moves.items()]
    return [f"  {'' if at else 'devices':<10}{line}" for at, line in enumerate(lines)]


def _keys(result: Report) -> str:
    renames = result.get("renames") or {}
    what = f"{len(renames):,} renamed" if renames else "unchanged"
    if renames and result.get("rename_summary"):
        what += f", {show(result['rename_summary'])}"
    kept = [show(name) for name in result.get("kept") or ()]
    aside = [f"{listing(kept, 5)} kept"] if kept else []
    aside += (
        [listing([_left(row) for row in result["left_behind"]])]
        if result.get("left_behind")
        else []
    )
    return f"  keys      {what}" + (f" ({'; '.join(aside)})" if aside else "")


def _left(row: dict[str, Any]) -> str:
    return f"{path_text(row['path'])} still says '{show(row['text'])}'"
