"""load: the object in a file with torch tensors, onto a device, without unpickling it.

Knows: which tensors stay on the CPU whatever the device, when torch is handed the file.
Must not know: how tensors are made, printing.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from ckptool.checkpoint import Checkpoint, Table, Tensor
from ckptool.errors import CkptError, Unsupported, UsageError
from ckptool.formats import identify
from ckptool.limits import DEFAULT, Limits
from ckptool.models.tensors import Loader, find_device
from ckptool.models.tensors_trust import trusted_load
from ckptool.places import PlaceLike, Source, is_url, open_source
from ckptool.verbs.joined_sums import check_joined
from ckptool.verbs.opening import doubting, is_folder
from ckptool.verbs.reading import opened

_SHOWN = 3
_CALLER = 4  # frames from the warning to the line that called ckptool.load


def load_place(
    place: PlaceLike,
    device: Any,
    *,
    trust: bool = False,
    check: bool = True,
    limits: Limits = DEFAULT,
) -> Any:
    """The object in a file or folder. Raises CkptError, naming it; with `trust` also what
    torch.load raises.
    """
    name = os.fsdecode(place) if isinstance(place, str | bytes | os.PathLike) else None
    try:
        where = find_device(device)
        if trust and name is not None and is_url(name):
            raise UsageError("trust=True hands a file to torch.load: download it first")
        if trust and _is_pickled(place, name):
            return trusted_load(name if name is not None else place, where)  # type: ignore[arg-type]

        def loaded(patient: bool) -> tuple[Any, Checkpoint, Loader]:
            with opened(place, limits, strict=True, patient=patient) as found:
                refuse_ranks(found.checkpoint)
                if check:
                    check_joined(found.checkpoint)
                stays = staying(found.checkpoint)
                loader = Loader(found.checkpoint, found.source, where, stays=stays, check=check)
                made = loader.nesting()
                loader.finish()
            return made, found.checkpoint, loader

        made, checkpoint, loader = doubting(loaded)
    except CkptError as error:
        error.path = error.path or name
        raise
    _tell(checkpoint.file, loader.modules)
    return made


def refuse_ranks(checkpoint: Checkpoint) -> None:
    """Raise Unsupported for parts of a model that nobody has put together."""
    if checkpoint.format == "megatron":
        raise Unsupported(
            "each rank of a Megatron checkpoint holds a part of the model: it can be inspected, not loaded",
            path=checkpoint.file,
            hint="give the model_optim_rng.pt of one rank, or merge the ranks with Megatron's tools/checkpoint/convert.py",
        )


def tensor_of(
    checkpoint: Checkpoint, source: Source | None, table: Table, tensor: Tensor, device: Any
) -> Any:
    """One tensor of a state_dict as torch's. Raises CkptError."""
    try:
        loader = Loader(checkpoint, source, find_device(device))
        made = loader.tensor(table, tensor)
        loader.finish()
    except CkptError as error:
        error.path = error.path or checkpoint.file
        error.key = error.key or tensor.key
        raise
    return made


def _is_pickled(place: PlaceLike, name: str | None) -> bool:
    """Whether trusting the file means anything: a .safetensors file runs nothing."""
    if name is not None and (is_folder(name) or name.endswith(".index.json")):
        raise UsageError("trust=True hands one file to torch.load, and this is a folder of them")
    with open_source(place) as source:
        found = identify(source).name
    if name is None:
        place.seek(0)  # type: ignore[union-attr]
    return found != "safetensors"


def staying(checkpoint: Checkpoint) -> frozenset[str]:
    """Keys of storages that no device moves: random states, and the step counters that are on
    the CPU in the file. One that other tensors use too goes with them.
    """
    stay: set[str] = set()
    go: set[str] = set()
    for tensor in checkpoint.tensors:
        if tensor.storage is not None:
            (stay if _stays(tensor) else go).add(tensor.storage.key)
    return frozenset(stay - go)


def _stays(tensor: Tensor) -> bool:
    if tensor.dtype is None:
        return False
    if tensor.dtype.name == "uint8" and any("rng" in str(part).lower() for part in tensor.path):
        return True
    counts = tensor.path[-1:] == ("step",) and tensor.path[-3:-2] == ("state",)
    return counts and tensor.count == 1 and tensor.device == "cpu"


def _tell(file: str, modules: tuple[str, ...]) -> None:
    """A pickled model is something else than what comes out: say so."""
    if not modules:
        return
    more = f" and {len(modules) - _SHOWN} more" if len(modules) > _SHOWN else ""
    names = ", ".join(repr(name)[1:-1] for name in modules[:_SHOWN])
    warnings.warn(
        f"{file!r} holds whole models ({names}{more}): they came as their state_dicts; "
        "trust=True has torch unpickle them, which runs the code that the file names",
        stacklevel=_CALLER,
    )
