"""devices: what CUDA shows here and, with a file, whether that fits on it.

Knows: which storages follow a net onto a GPU, what a tag needs to be loaded. Must not know:
printing, how devices are found.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool.checkpoint import Checkpoint, Note
from ckptool.commands import convert_command
from ckptool.limits import DEFAULT, Limits
from ckptool.places import PlaceLike

if TYPE_CHECKING:
    from ckptool.models.devices import Device, Seen

CONTEXT_BYTES = 600_000_000
"""What CUDA itself takes of a device once it is used, about."""


class Load(NamedTuple):
    """What a file puts on a device. `needs_bytes`: its weights and optimizer state, each storage
    once; `weights_bytes`: the weights shown by default, alone; `tags`: how many storages each
    location tag has; `select` names the weights where they are a part of the file.
    """

    file: str
    needs_bytes: int
    weights_bytes: int
    tags: Mapping[str, int]
    select: str | None
    convertible: bool


@dataclass(frozen=True, slots=True)
class Devices:
    """What was seen, and for a file `fits`: whether some device has room for all of it (None:
    no file, no device, or memory that nobody tells).
    """

    seen: Seen
    load: Load | None
    notes: tuple[Note, ...]

    @property
    def fits(self) -> bool | None:
        """The best answer of any device."""
        answers = [fits_on(device, self.load) for device in self.seen.devices]
        if any(answers):
            return True
        return False if answers and None not in answers and self.seen.count is not None else None

    def to_dict(self) -> dict[str, Any]:
        """JSON schema 1 of the command line, with what the screen needs beside it."""
        return _report(self)


def devices_here(place: PlaceLike | None = None, limits: Limits = DEFAULT) -> Devices:
    """Ask the machine and, where there is one, read the file. Raises CkptError for the file."""
    from ckptool.models.devices import visible

    load = _read(place, limits) if place is not None else None
    seen = visible()
    return Devices(seen, load, (*seen.notes, *(_advice(seen, load) if load else ())))


def fits_on(device: Device, load: Load | None) -> bool | None:
    """Whether what the file needs is at most what is free."""
    if load is None or device.free_bytes is None:
        return None
    return load.needs_bytes <= device.free_bytes


# -- the file ------------------------------------------------------------------------------------
def _read(place: PlaceLike, limits: Limits) -> Load:
    from ckptool.verbs.reading import opened

    with opened(place, limits) as found:
        return load_of(found.checkpoint)


def load_of(checkpoint: Checkpoint) -> Load:
    """What `checkpoint` puts on a GPU: what `convert --to-gpu` would tag so."""
    from ckptool.verbs.advice import can_convert
    from ckptool.verbs.moving import gpu_storages
    from ckptool.verbs.report import stored_bytes
    from ckptool.verbs.tables import path_name

    moving = gpu_storages(checkpoint)
    weights = None if checkpoint.weights is None else checkpoint.tables[checkpoint.weights]
    needs = sum(s.size_bytes for s in checkpoint.storages if s.key in moving)
    return Load(
        checkpoint.file,
        needs,
        stored_bytes(tuple(t for t in weights.tensors if _moves(t, moving))) if weights else 0,
        _tags(checkpoint),
        path_name(weights.path) if weights and weights.path else None,
        can_convert(checkpoint),
    )


def _moves(tensor: Any, moving: frozenset[str]) -> bool:
    return tensor.storage is not None and tensor.storage.key in moving


def _tags(checkpoint: Checkpoint) -> dict[str, int]:
    tags = [storage.device for storage in checkpoint.storages]
    tags += [t.device for t in checkpoint.tensors if t.kind == "device-argument"]
    return {tag: tags.count(tag) for tag in dict.fromkeys(tags)}


# -- what to do ----------------------------------------------------------------------------------
_CUDA = re.compile(r"cuda(?::(\d+))?", re.ASCII)


def _advice(seen: Seen, load: Load) -> list[Note]:
    return [*_absent(seen, load), *_room(seen, load)]


def _absent(seen: Seen, load: Load) -> list[Note]:
    """Tags of devices that are not here; nothing when it is not known what is."""
    if seen.count is None:
        return []
    gone = [
        tag
        for tag in load.tags
        if (found := _CUDA.fullmatch(tag)) and _number(found[1]) >= seen.count
    ]
    if not gone:
        return []
    listed = ", ".join(gone[:4]) + (f" and {len(gone) - 4} more" if len(gone) > 4 else "")
    shown = {0: "no device is visible", 1: "only cuda:0 is visible"}
    what = shown.get(seen.count, f"only cuda:0 to cuda:{seen.count - 1} are visible")
    text = f"saved on {listed}, and {what}: torch.load fails unless map_location is given"
    fitting = [d.index for d in seen.devices if d.index is not None and fits_on(d, load)]
    option = f"--to-gpu {fitting[0] if fitting else 0}" if seen.count else "--to-cpu"
    command = convert_command(load.file, option) if load.convertible else None
    return [Note("device-missing", text, command)]


def _number(digits: str | None) -> int:
    return int(digits) if digits and len(digits) < 10 else 10**9 if digits else 0


def _room(seen: Seen, load: Load) -> list[Note]:
    known = [device for device in seen.devices if device.free_bytes is not None]
    if not known:
        return (
            [Note("memory-unknown", "how much memory is free is not known")] if seen.count else []
        )
    best = max(known, key=lambda device: device.free_bytes or 0)
    free = best.free_bytes or 0
    if load.needs_bytes > free:
        return _weights_alone(load, free)
    if load.needs_bytes and free - load.needs_bytes < CONTEXT_BYTES:
        text = f"{free - load.needs_bytes:,} bytes would be left, and CUDA itself takes some hundred MB"
        return [Note("tight", text)]
    return []


def _weights_alone(load: Load, free: int) -> list[Note]:
    if not 0 < load.weights_bytes <= free or load.weights_bytes == load.needs_bytes:
        return []
    text = f"the weights alone, {load.weights_bytes:,} bytes, would fit; the rest is optimizer state and other tables"
    if load.select is None or not load.convertible:
        return [Note("weights-fit", text)]
    from shlex import quote

    from ckptool.verbs.naming import suffixed

    name = f"./{load.file}" if load.file.startswith("-") else load.file
    options = f"--select {quote(load.select)} -o {quote(suffixed(name, 'weights'))}"
    return [Note("weights-fit", text, convert_command(load.file, options))]


# -- plain data ----------------------------------------------------------------------------------
def _report(found: Devices) -> dict[str, Any]:
    seen, load = found.seen, found.load
    rows = [
        {**asdict(device), **({"fits": fits_on(device, load)} if load else {})}
        for device in seen.devices
    ]
    report: dict[str, Any] = {
        "schema": 1,
        "cuda_visible_devices": seen.mask,
        "visible_count": seen.count,
        "summary": seen.summary,
        "devices": rows,
        "fits": found.fits,
        "notes": [note._asdict() for note in found.notes],
    }
    if load is not None:
        report["file"] = load.file
        report["needs_bytes"] = load.needs_bytes
        report["weights_bytes"] = load.weights_bytes
        report["tags"] = dict(load.tags)
    return report
