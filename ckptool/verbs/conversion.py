"""What a conversion did (or, on a dry run, would do), as plain data.

Knows: JSON schema 1. Must not know: how it is shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckptool.checkpoint import Note, Path


@dataclass(frozen=True, slots=True)
class Conversion:
    """`output` is what -o named, `outputs` the files with their sizes; `mentions` are places
    that still name a device, `entries_left` what the container or --select left behind, `lost`
    what --salvage could not take out of a damaged file: (name, what became of it).
    """

    input: str
    output: str
    outputs: tuple[tuple[str, int], ...]
    renames: dict[str, str]
    dropped: tuple[str, ...]
    devices: dict[str, str]
    device_counts: dict[str, int]
    mentions: tuple[tuple[Path, str], ...]
    entries_left: tuple[str, ...]
    kept: tuple[str, ...]
    notes: tuple[Note, ...]
    seconds: float
    dry_run: bool
    rename_summary: str = ""
    dtypes: dict[str, int] = field(default_factory=dict)
    size_before: int = 0
    has_devices: bool = True
    lost: tuple[tuple[str, str], ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all outputs together."""
        return sum(size for _, size in self.outputs)

    @property
    def left_behind(self) -> tuple[tuple[Path, str], ...]:
        """Places that keep naming a device, then entries that are not in the output."""
        return (*self.mentions, *(((name,), "") for name in self.entries_left))

    def to_dict(self) -> dict[str, Any]:
        """JSON schema 1 of the command line, with what the screen needs beside it."""
        return {
            "schema": 1,
            "input": self.input,
            "outputs": [{"file": file, "size_bytes": size} for file, size in self.outputs],
            "renames": self.renames,
            "dropped": list(self.dropped),
            "devices": self.devices,
            "device_counts": self.device_counts,
            "has_devices": self.has_devices,
            "dtypes": self.dtypes,
            "left_behind": [
                *({"path": list(path), "text": text} for path, text in self.mentions),
                *({"path": [name], "text": None} for name in self.entries_left),
            ],
            "kept": list(self.kept),
            "rename_summary": self.rename_summary,
            "size_before_bytes": self.size_before,
            "lost": [{"key": key, "text": text} for key, text in self.lost],
            "dry_run": self.dry_run,
            "seconds": round(self.seconds, 3),
            "notes": [{"slug": n.slug, "text": n.text, "command": n.command} for n in self.notes],
        }
