"""A model and an optimizer put back as they were when a load fails in the middle.

Knows: where modules and optimizers keep what a load changes. Must not know: files, keys.
A load of plain tensors into a plain net cannot fail once shapes are checked; where hooks of the
model's own take part, the numbers are copied first.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch  # noqa: TID253 - this room is imported only where torch is asked for
from torch.nn.parameter import is_lazy  # noqa: TID253

_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque)


@contextmanager
def put_back(model: torch.nn.Module, optimizer: Any, *, numbers: bool) -> Iterator[None]:
    """Restore both when the block raises; `numbers`: those of the model's tensors too."""
    kept = _Kept(model, optimizer, numbers)
    try:
        yield
    except BaseException:
        kept.restore()
        raise


def is_plain(model: torch.nn.Module, state: Iterable[Any]) -> bool:
    """Whether nothing but torch's own copying takes part in loading these values."""
    tensors = [*model.parameters(), *model.buffers(), *state]
    return (
        type(model).load_state_dict is torch.nn.Module.load_state_dict
        and "load_state_dict" not in model.__dict__
        and all(map(_is_plain_module, model.modules()))
        and all(map(_is_plain_tensor, tensors))
    )


def _is_plain_module(module: torch.nn.Module) -> bool:
    loads = getattr(module._load_from_state_dict, "__func__", None)
    home = getattr(loads, "__module__", "")
    return (
        home.startswith("torch.nn.modules.")
        and not module._load_state_dict_pre_hooks
        and not module._load_state_dict_post_hooks
        and type(module).set_extra_state is torch.nn.Module.set_extra_state
    )


def _is_plain_tensor(value: Any) -> bool:
    """Dense, real or complex numbers, each element in a place of its own."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or is_lazy(value):
        return False
    if value.layout is not torch.strided or value.is_quantized or value.is_inference():
        return False
    spread = any(step == 0 and size > 1 for size, step in zip(value.shape, value.stride(), strict=True))  # fmt: skip
    return not spread and not value.is_nested


class _Kept:
    def __init__(self, model: torch.nn.Module, optimizer: Any, numbers: bool) -> None:
        modules = list(model.modules())
        self._objects = [(module, type(module), module.__dict__.copy()) for module in modules]
        self._containers: list[tuple[Any, Any]] = []
        for module in modules:
            self._contain(module.__dict__.values())
        if optimizer is not None:
            self._objects.append((optimizer, type(optimizer), optimizer.__dict__.copy()))
            self._contain(optimizer.__dict__.values())
            self._contain(optimizer.param_groups)
            self._contain(getattr(optimizer, "state", {}).values())
        tensors = {id(t): t for t in _tensors(modules)}.values()
        self._tensors = [
            (tensor, type(tensor), tensor.data, tensor.__dict__.copy(), tensor.requires_grad)
            for tensor in tensors
        ]
        self._numbers = list(_copies(tensors)) if numbers else []
        if optimizer is not None and not _loads_as_torch(optimizer):
            self._numbers += _copies(_state_tensors(optimizer))

    def _contain(self, values: Iterable[Any]) -> None:
        found = [value for value in values if type(value) in _CONTAINERS]
        self._containers += [(value, copy(value)) for value in found]

    def restore(self) -> None:
        for owner, kind, saved in self._objects:
            if type(owner) is not kind:
                object.__setattr__(owner, "__class__", kind)
            owner.__dict__.clear()
            owner.__dict__.update(saved)
        for container, saved in self._containers:
            _refill(container, saved)
        with torch.no_grad():
            for tensor, its_kind, data, attributes, grad in self._tensors:
                if type(tensor) is not its_kind:
                    tensor.__class__ = its_kind
                tensor.data = data
                tensor.__dict__.clear()
                tensor.__dict__.update(attributes)
                if tensor.requires_grad != grad:
                    tensor.requires_grad_(grad)
            for storage, numbers in self._numbers:
                storage.copy_(numbers)


def _tensors(modules: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Parameters, buffers and other tensors that modules hold as attributes."""
    for module in modules:
        own = module.__dict__
        held = [*own["_parameters"].values(), *own["_buffers"].values(), *own.values()]
        yield from (value for value in held if isinstance(value, torch.Tensor))


def _loads_as_torch(optimizer: Any) -> bool:
    """Whether its state is replaced, as torch does it, not written into."""
    return type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict


def _state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    for state in getattr(optimizer, "state", {}).values():
        values = state.values() if isinstance(state, dict) else ()
        yield from (value for value in values if isinstance(value, torch.Tensor))


def _copies(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[Any, Any]]:
    """Each memory once, with its numbers."""
    seen: set[int] = set()
    for tensor in tensors:
        if is_lazy(tensor) or tensor.is_meta:
            continue
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse, nested, wrapped: as a whole
            yield tensor.data, tensor.data.clone()
            continue
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            on_cpu = storage.device.type == "cpu"  # a GPU may have no room for two
            yield storage, storage.clone() if on_cpu else storage.cpu()  # type: ignore[no-untyped-call]


def _refill(container: Any, saved: Any) -> None:
    container.clear()
    if isinstance(container, dict | set):
        container.update(saved)
    else:
        container.extend(saved)
