"""The part of the Python API that gives tensors: load.

Knows: verbs. Must not know: click, models; nothing here prints.
"""

from __future__ import annotations

from typing import Any

from ckptool.limits import DEFAULT, Limits
from ckptool.places import PlaceLike
from ckptool.verbs.load import load_place


def load(
    place: PlaceLike,
    device: Any = "cpu",
    *,
    trust: bool = False,
    check: bool = True,
    limits: Limits = DEFAULT,
) -> Any:
    """The object in a file or folder, in its own nesting, with its tensors on `device`; nothing
    is unpickled.

    `device` is a name, a number (of CUDA), a torch.device, or None: each tensor where the file
    says. Random states, and step counters that are on the CPU in the file, stay on the CPU. What
    is tied in the file is tied after it; strides, Parameters, requires_grad are as they were.
    Objects of classes that ckptool does not know come as `Record`s with their fields, a pickled
    model as its state_dict, with a warning. `trust=True` calls torch.load(weights_only=False)
    instead, which runs the code that a file names. `check=False` compares no checksums.
    Raises CkptError, naming the file.
    """
    return load_place(place, device, trust=trust, check=check, limits=limits)
