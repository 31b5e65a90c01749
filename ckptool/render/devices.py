"""The devices screen: what is visible, a row for each, whether the file fits, what to do.

Knows: the look. Must not know: files, verbs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptool.render.parts import Report, blocks, note_lines
from ckptool.render.table import grid
from ckptool.render.text import LONG, human_bytes, listing, show

_HEADER = ("device", "physical", "name", "free", "used", "total", "busy", "uuid")
_RIGHT = frozenset((3, 4, 5, 6))


def devices_text(report: Report) -> str:
    """What CUDA shows, as a person reads it."""
    rows = [_row(device) for device in report["devices"]]
    table = [f"  {line}" for line in grid([_HEADER, *rows], _RIGHT)] if rows else []
    return blocks([show(report["summary"], LONG)], table, _file(report), note_lines(report))


def _row(device: Mapping[str, Any]) -> tuple[str, ...]:
    index, busy = device["index"], device["utilisation_percent"]
    return (
        "cuda:?" if index is None else f"cuda:{index}",
        _known(device["physical"]),
        _known(device["name"]),
        *(human_bytes(device[name]) for name in ("free_bytes", "used_bytes", "total_bytes")),
        "?" if busy is None else f"{busy} %",
        _known(device["uuid"]),
    )


def _known(value: object) -> str:
    return "?" if value is None else show(str(value))


def _file(report: Report) -> list[str]:
    """One line: what the file needs, where it was saved, and where it fits."""
    if "file" not in report:
        return []
    tags = [f"{show(tag) or repr('')} ({count})" for tag, count in report["tags"].items()]
    needs = f"needs {human_bytes(report['needs_bytes'])} on a GPU"
    saved = f"saved on {listing(tags, 4)}" if tags else "no device recorded"
    return [f"{show(report['file'])}: {needs}, {saved}", f"  {_verdict(report)}"]


def _verdict(report: Report) -> str:
    devices = report["devices"]
    if report["fits"] is None:
        return "not known whether it fits" if report["visible_count"] != 0 else "no GPU to hold it"
    if not report["fits"]:
        most = max(device["free_bytes"] for device in devices)
        return f"does not fit: the most that is free on one device is {human_bytes(most)}"
    fitting = [device for device in devices if device["fits"]]
    names = [
        f"physical {device['physical']}" if device["index"] is None else f"cuda:{device['index']}"
        for device in fitting
    ]
    return f"fits on {listing(names, 8)}"
