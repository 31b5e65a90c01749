"""torch's small values out of a pickle: sizes, devices, layouts, generators, dtypes by name.

Knows: how each of them pickles itself. Must not know: tensors' memory, files.
"""

from __future__ import annotations

import argparse
import typing
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch  # noqa: TID253 - this room is imported only where torch is asked for

from ckptool.formats.measures import device_text
from ckptool.models import tensors_numpy
from ckptool.models.tensors_calls import CALLS as PLAIN_CALLS
from ckptool.models.tensors_calls import are, set_attributes
from ckptool.models.tensors_rebuild import Tensors
from ckptool.models.tensors_values import Builder, Call, Knows, Way
from ckptool.pickles.nodes import LIST, Box, elements, items_of, text_of

# -- calls -------------------------------------------------------------------------------------


def _size(build: Builder, call: Call) -> Way | None:
    given = call.args[0] if len(call.args) == 1 else None
    sizes: Sequence[Any] | None = items_of(given)
    if type(given) is Box and given.kind == LIST:
        sizes = [value for value, *_ in elements(given)]
    if sizes is None or not are(sizes, int):
        return None
    return Way(lambda: torch.Size(sizes))


def _device(build: Builder, call: Call) -> Way | None:
    text = device_text(call.node)
    found = device_named(text) if text is not None else None
    return None if found is None else Way(lambda: found)


def device_named(text: str) -> torch.device | None:
    """The device of this name; None where this torch knows none."""
    try:
        return torch.device(text)
    except (RuntimeError, ValueError):
        return None


_LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged")  # fmt: skip


def _layout(build: Builder, call: Call) -> Way | None:
    """_get_layout('torch.sparse_coo')."""
    name = (text_of(call.args[0]) or "") if len(call.args) == 1 else ""
    short = name.removeprefix("torch.")
    found = getattr(torch, short, None) if short in _LAYOUTS else None
    return None if found is None else Way(lambda: found)


def _version(build: Builder, call: Call) -> Way | None:
    from torch.torch_version import TorchVersion

    text = text_of(call.args[0]) if len(call.args) == 1 else None
    if text is None:
        return None
    return Way(
        lambda: TorchVersion(text), (), lambda made: set_attributes(made, build.attributes(call.node))
    )  # fmt: skip


def _generator(tensors: Tensors) -> Knows:
    """A generator of the CPU with its state; of another device a record."""

    def known(build: Builder, call: Call) -> Way | None:
        device = device_text(call.args[0]) if len(call.args) == 1 else None
        parts = items_of(call.node.state.value) if call.node.state is not None else None
        if device not in ("cpu", None) or not parts or len(parts) != 3:
            return None

        def fill(made: torch.Generator) -> None:
            state = build.get(parts[2])
            tensors.late.append(lambda: _set_state(made, state))

        return Way(torch.Generator, (), fill)

    return known


def _set_state(made: torch.Generator, state: Any) -> None:
    if state.device.type == "cpu":  # on meta there are no numbers
        made.set_state(state)


def calls(tensors: Tensors) -> dict[str, Knows]:
    """What every known call makes."""
    return {
        **PLAIN_CALLS,
        **tensors_numpy.CALLS,
        "torch.Size": _size,
        "torch.device": _device,
        "torch.serialization._get_layout": _layout,
        "torch.torch_version.TorchVersion": _version,
        "torch._C.Generator": _generator(tensors),
    }


# -- names -------------------------------------------------------------------------------------
_BUILTINS = (bool, bytes, bytearray, complex, dict, float, frozenset, int, list, object, set, str,
             tuple, range, slice)  # fmt: skip
_PLAIN: dict[str, Any] = {
    **{f"builtins.{kind.__name__}": kind for kind in _BUILTINS},
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": defaultdict,
    "argparse.Namespace": argparse.Namespace,
    "typing.Any": typing.Any,
    "builtins.Ellipsis": ...,
    "builtins.NotImplemented": NotImplemented,
    "torch.Tensor": torch.Tensor,
    "torch.nn.parameter.Parameter": torch.nn.Parameter,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
}
_KINDS = (torch.dtype, torch.layout, torch.qscheme, torch.memory_format)


def reference(name: str) -> Any:
    """A harmless class or constant by its name; None for whatever else a file may name."""
    found = _PLAIN.get(name)
    if found is not None or not name.startswith(("torch.", "numpy.")):
        return found
    if name.startswith("numpy."):
        return tensors_numpy.reference(name)
    found = vars(torch).get(name.removeprefix("torch."))
    return found if isinstance(found, _KINDS) else None
