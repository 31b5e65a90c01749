"""What CUDA shows to a process on this machine, and whether a device exists.

Knows: the environment variables CUDA reads, whom to ask (nvidia-smi; torch only where there is
none). Must not know: checkpoints, printing. Importing this imports no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptool.checkpoint import Note
from ckptool.errors import UsageError
from ckptool.models.masks import Choice, Target, choose
from ckptool.models.smi import Answer, ask

MASK, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


@dataclass(frozen=True, slots=True)
class Device:
    """One device as torch counts them; None is what is not known. `physical` is the card's
    number in nvidia-smi.
    """

    index: int | None
    physical: int | None = None
    uuid: str | None = None
    name: str | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    utilisation_percent: int | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """`count` devices are visible (None: not known), `summary` says so in a sentence; `mask` is
    CUDA_VISIBLE_DEVICES (None: not set).
    """

    mask: str | None
    devices: tuple[Device, ...]
    count: int | None
    summary: str
    notes: tuple[Note, ...] = ()


def visible(environ: Mapping[str, str] | None = None, timeout_s: float | None = None) -> Seen:
    """What CUDA would show to a process with these environment variables (default: ours)."""
    environ = os.environ if environ is None else environ
    answer = ask(environ, timeout_s)
    if answer is None:
        return _without_smi(environ.get(MASK), environ)
    if not answer.cards:
        return _no_cards(environ.get(MASK), answer)
    return _chosen(environ.get(MASK), answer, environ.get(ORDER) == "PCI_BUS_ID")


def _chosen(mask: str | None, answer: Answer, by_bus: bool) -> Seen:
    choice = choose(mask, by_bus, answer.cards, not answer.trouble)
    numbers = range(len(choice.targets)) if choice.ordered else (None,) * len(choice.targets)
    devices = tuple(map(_device, numbers, choice.targets))
    summary = _summary(mask, choice, len(answer.cards))
    notes = [Note("nvidia-smi", text) for text in (answer.trouble, *answer.warnings) if text]
    if choice.ended and choice.count:
        notes.append(Note("mask-ended", f"{MASK}={mask}: {choice.ended}"))
    if choice.doubt and choice.count is not None:
        notes.append(Note("order-unknown", f"{choice.doubt}; {_SURE}"))
    if choice.aside:
        notes.append(Note("mig", choice.aside))
    if choice.count:
        unusable = _torch_without_cuda()
        notes += [row._replace(text=f"{row.text} and can use no device here") for row in unusable]
    notes += _disagreeing(choice.count)
    return Seen(mask, devices, choice.count, summary, tuple(notes))


_SURE = f"with {ORDER}=PCI_BUS_ID both count alike"


def _device(index: int | None, target: Target) -> Device:
    card, one = target
    if card is None:
        return Device(index)
    if one is None:
        busy = card.utilisation_percent
        return Device(index, card.physical, card.uuid, card.name, *card.memory, busy)
    name = f"{card.name} MIG {one.profile}"
    return Device(index, card.physical, one.uuid, name, *one.memory)


def _summary(mask: str | None, choice: Choice, cards: int) -> str:
    here = f"{cards} cards" if cards > 1 else "1 card"
    if choice.count is None:
        return f"not known what CUDA shows of {here}: {choice.doubt}"
    if not choice.count:
        why = "is empty" if not mask and mask is not None else f"is {mask}"
        ended = f" ({choice.ended})" if choice.ended else ""
        what = f"{MASK} {why}{ended}" if mask is not None else choice.ended
        return f"CUDA shows no device of {here}: {what}"
    shown = f"CUDA shows {_devices(choice.count)} of {here}"
    return f"{shown} ({MASK} is {'not set' if mask is None else mask})"


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _no_cards(mask: str | None, answer: Answer) -> Seen:
    notes = tuple(Note("nvidia-smi", text) for text in answer.warnings)
    if answer.certain:
        return Seen(mask, (), 0, f"no CUDA here: {answer.trouble}", notes)
    return Seen(mask, (), None, f"not known whether there is CUDA: {answer.trouble}", notes)


# -- torch, where nvidia-smi is missing ----------------------------------------------------------
_LOADED = "/proc/driver/nvidia/version"


def _without_smi(mask: str | None, environ: Mapping[str, str]) -> Seen:
    from importlib.util import find_spec

    lacking = "there is no nvidia-smi on the PATH"
    without = _torch_without_cuda()
    notes = _apple()
    if "torch" in sys.modules or (find_spec("torch") is not None and not without):
        return _by_torch(mask, environ, lacking, notes)
    if os.path.exists(_LOADED):
        summary = f"not known what CUDA shows: an NVIDIA driver is loaded, but {lacking}"
        return Seen(mask, (), None, summary, notes)
    why = f"and {without[0].text}" if without else "and torch is not installed"
    return Seen(mask, (), 0, f"no CUDA here: {lacking}, {why}", notes)


def _by_torch(
    mask: str | None, environ: Mapping[str, str], lacking: str, notes: tuple[Note, ...]
) -> Seen:
    try:
        import torch
    except Exception as error:
        summary = f"not known what CUDA shows: {lacking}, and torch cannot be imported: {error}"
        return Seen(mask, (), None, summary, notes)
    count = torch.cuda.device_count()
    if not count:
        built = getattr(torch.version, "cuda", None) or getattr(torch.version, "hip", None)
        why = "finds no device" if built else "is built without CUDA"
        return Seen(mask, (), 0, f"no CUDA here: {lacking}, and torch {why}", notes)
    by_bus = environ.get(ORDER) == "PCI_BUS_ID"
    devices = tuple(_asked(torch, i, i if by_bus and mask is None else None) for i in range(count))
    summary = f"CUDA shows {_devices(count)} ({lacking}: asked torch)"
    return Seen(mask, devices, count, summary, notes)


def _asked(torch: Any, index: int, physical: int | None) -> Device:
    facts = torch.cuda.get_device_properties(index)
    uuid = getattr(facts, "uuid", None)
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError:  # out of memory, or another process has it for itself
        free, total = None, facts.total_memory
    used = None if free is None else total - free
    kind = "MIG" if " MIG " in facts.name else "GPU"
    return Device(index, physical, uuid and f"{kind}-{uuid}", facts.name, free, used, total)


def _torch_without_cuda() -> tuple[Note, ...]:
    """A note when the torch that is installed can use no card; read off its version, for
    importing it takes a second.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("torch")
    except PackageNotFoundError:
        return ()
    if not found.endswith("+cpu"):
        return ()
    return (Note("torch-without-cuda", f"torch {found} is built without CUDA"),)


def _started() -> Any:
    """torch, when it has started CUDA in this process: what it saw then stays; else None."""
    torch: Any = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def _disagreeing(count: int | None) -> tuple[Note, ...]:
    torch = _started()
    held = None if torch is None else torch.cuda.device_count()
    if held is None or held == count:
        return ()
    text = f"CUDA was started in this process with {_devices(held)}: what {MASK} says since does not count here"
    return (Note("cuda-started", text),)


def _apple() -> tuple[Note, ...]:
    if sys.platform != "darwin":
        return ()
    return (Note("mps", "a Mac has no CUDA; torch calls an Apple GPU 'mps'"),)


# -- one device ----------------------------------------------------------------------------------
_NO_INDEX = ("cpu", "meta")


def check_device(device: str) -> None:
    """Raise UsageError, saying what is visible, unless `device` (`cpu`, `cuda:1`, `mps` …)
    exists here. torch counts where it is imported; where nothing can, the device passes.
    """
    kind, colon, index = device.partition(":")
    if not kind.isidentifier() or (colon and not (index.isascii() and index.isdecimal())):
        raise UsageError(f"{device!r} names no device", hint="such as cpu, cuda:0, mps, meta")
    if kind in _NO_INDEX:
        return
    torch: Any = sys.modules.get("torch")
    count = _count(torch, kind, device)
    if count is not None and int(index or 0) >= count:
        raise _absent(torch, kind, int(index or 0), count)


def _count(torch: Any, kind: str, device: str) -> int | None:
    """How many devices of that kind there are; None when nobody can tell."""
    if torch is None:
        return visible().count if kind == "cuda" else None
    try:
        torch.device(device)
    except RuntimeError:
        known = "such as cpu, cuda:0, mps, meta"
        raise UsageError(f"torch knows no device {device!r}", hint=known) from None
    counter = getattr(getattr(torch, kind, None), "device_count", None)
    return None if counter is None else int(counter())


def _absent(torch: Any, kind: str, index: int, count: int) -> UsageError:
    what = f"{kind}:{index} does not exist here"
    if kind != "cuda":
        return UsageError(f"{what}: torch finds {_devices(count)} of that kind")
    if torch is not None and not (torch.version.cuda or torch.version.hip) and not count:
        return UsageError(
            f"{what}: this torch ({torch.__version__}) is built without CUDA",
            hint="take device='cpu', or install a build of torch with CUDA",
        )
    seen = visible()
    if not count:
        why = seen.summary if seen.count == 0 else "torch finds no CUDA device"
        return UsageError(f"{what}: {why}", hint="take device='cpu'")
    verb = "is" if count == 1 else "are"
    text = f"{what}: {_devices(count)} {verb} visible{_names(seen, count)}"
    return UsageError(text, hint=_hint(seen.mask, count))


def _hint(mask: str | None, count: int) -> str:
    last = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
    counted = "" if mask is None or _started() else f", counted after {MASK}={mask}"
    return f"take {last}{counted}; `ckptool devices` shows them"


def _names(seen: Seen, count: int) -> str:
    """Of the devices that are visible; by torch where CUDA runs already, else where we agree."""
    torch = _started()
    if torch is not None:
        rows = [f"cuda:{index}, {torch.cuda.get_device_name(index)}" for index in range(count)]
    else:
        rows = [
            f"cuda:{device.index} = physical {device.physical}, {device.name}"
            for device in seen.devices
            if seen.count == count and None not in (device.index, device.physical)
        ]
    return f" ({'; '.join(rows[:8])})" if rows else ""
