"""Which storages a device flag moves.

Knows: accelerators, what follows a net onto a GPU and what stays. Must not know: files, names.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptool.checkpoint import Checkpoint, Path, Storage, Table, Tensor
from ckptool.verbs.request import Request

ACCELERATORS = ("cuda", "mps", "xpu", "hpu", "npu", "musa", "mtia", "xla", "privateuseone", "gpu")


def devices_of(
    checkpoint: Checkpoint, tables: Sequence[Table], request: Request
) -> tuple[dict[str, str], dict[str, str]]:
    """{storage key: new tag}, {old device argument: new}. `meta` is never retagged."""
    mapped = dict(request.mapped)
    moves = (
        _cpu_storages_to_move(checkpoint, tables)
        if request.device not in (None, "cpu")
        else frozenset()
    )
    found: dict[str, str] = {}
    for storage in checkpoint.storages:
        new = mapped.get(storage.device) or _moved(storage, request.device, moves)
        if new is not None and new != storage.device and storage.device != "meta":
            found[storage.key] = new
    arguments: dict[str, str] = {}
    for tensor in checkpoint.tensors:
        if tensor.kind in ("device-argument", "subclass") and tensor.device:
            new = mapped.get(tensor.device) or _argument_moved(tensor, request.device)
            if new is not None and new != tensor.device:
                arguments[tensor.device] = new
    return found, arguments


def gpu_storages(checkpoint: Checkpoint) -> frozenset[str]:
    """Keys of the storages that are on an accelerator once the file is on one; all of them
    where no state_dict says what follows.
    """
    follow = _cpu_storages_to_move(checkpoint, checkpoint.tables)
    named = any(table.kind != "tensors" for table in checkpoint.tables)
    return frozenset(
        s.key
        for s in checkpoint.storages
        if s.device != "meta" and (not named or s.key in follow or is_accelerator(s.device))
    )


def _moved(storage: Storage, device: str | None, moves: frozenset[str]) -> str | None:
    if device is None:
        return None
    if device == "cpu" or is_accelerator(storage.device) or storage.key in moves:
        return device
    return None


def _argument_moved(tensor: Tensor, device: str | None) -> str | None:
    if device is None or tensor.device in ("meta", "cpu", "?"):
        return None
    return device if device == "cpu" or is_accelerator(tensor.device) else None


def is_accelerator(tag: str) -> bool:
    """Whether a location tag names a device that computes, whatever its index."""
    return tag.partition(":")[0].rstrip("0123456789") in ACCELERATORS


def _cpu_storages_to_move(checkpoint: Checkpoint, tables: Sequence[Table]) -> frozenset[str]:
    """CPU storages that follow the net: its weights, and optimizer state of more than one
    element. Step counters, random states and the rest stay.
    """
    keys = {
        t.storage.key
        for table in tables
        if table.kind != "tensors"
        for t in table.tensors
        if t.storage
    }
    optimizers = [extra.path for extra in checkpoint.extras if extra.type == "optimizer"]
    for tensor in checkpoint.tensors:
        if tensor.storage is None or tensor.storage.count < 2:
            continue
        if (
            any("rng" in str(part).lower() for part in tensor.path)
            and tensor.dtype
            and tensor.dtype.name == "uint8"
        ):
            continue
        inside = any(tensor.path[: len(path)] == path for path in optimizers)
        if inside or _in_optimizer_list(tensor.path):
            keys.add(tensor.storage.key)
    return frozenset(keys)


def _in_optimizer_list(path: Path) -> bool:
    """Lightning keeps `optimizer_states` as a list; others nest optimizers by name."""
    return "state" in path and any("optim" in str(part).lower() for part in path)
