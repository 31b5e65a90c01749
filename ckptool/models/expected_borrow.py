"""A model for a while without its numbers: every tensor stands aside for a meta one, then returns.

Knows: where modules keep tensors. Must not know: files, state_dicts.

A copy would not do: hooks are closures and bound methods that know their own module, and a
model may refuse to be copied (DistributedDataParallel, weight_norm). So the modules stay what
they are, their tensors are swapped, what hooks then do to modules and to the plain containers
in them is undone, and not one number is read, copied or written. What a hook does to objects
of other kinds (a tokenizer of the user's own) is not undone.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch  # noqa: TID253 - this room is imported only where torch is asked for
from torch.nn.parameter import is_lazy  # noqa: TID253

_CONTAINERS = frozenset((list, dict, set, OrderedDict, defaultdict, deque))
_PLAIN = frozenset((bool, int, float, str, type(None), tuple, type, torch.dtype, torch.device))
_SWAPPED = frozenset(("_parameters", "_buffers", "_modules"))
_LARGEST = 100_000
"""Items of a container that is looked into: larger ones are the user's data, not a module's."""
SMALL = 1 << 16
"""Elements of a tensor that keeps its numbers where a hook asks for them."""


class Borrowed:
    """A model whose tensors are stand-ins. `root` is what to call; `kinds` {id of a stand-in:
    parameter or buffer}, `originals` {id of a stand-in: the model's own tensor}.
    """

    def __init__(self, real: bool) -> None:
        self.root: Any = None
        self.kinds: dict[int, str] = {}
        self.originals: dict[int, torch.Tensor] = {}
        self._real = real
        self._stands: dict[int, torch.Tensor] = {}
        self._skeletons: dict[int, torch.nn.Module] = {}
        self._modules: dict[int, tuple[Any, type, dict[str, Any]]] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._empty: list[Any] = []

    def take(self, model: torch.nn.Module) -> None:
        """Swap the tensors of `model` and of every module that it reaches."""
        self.root = self._module(model)
        waiting = [self.root]
        while waiting:
            module = waiting.pop()
            if id(module) not in self._modules:
                waiting += self._swap(module)

    def give_back(self) -> None:
        """Put everything where it was, as the objects they were."""
        for module, kind, saved in self._modules.values():
            if type(module) is not kind:
                object.__setattr__(module, "__class__", kind)
            _refill_dict(module.__dict__, saved)
        for container, saved in self._containers.values():
            _refill(container, saved)
        for container in filter(len, self._empty):
            container.clear()

    def modules(self) -> list[Any]:
        """Every module that was swapped."""
        return [row[0] for row in self._modules.values()]

    def _swap(self, module: Any) -> list[Any]:
        """One module; gives the modules it holds."""
        own = module.__dict__
        self._modules[id(module)] = (module, type(module), own.copy())
        for word, name in (("parameter", "_parameters"), ("buffer", "_buffers")):
            if own[name]:
                own[name] = own[name].copy()
                self._swap_tensors(own[name], word)
        met: list[Any] = []
        if own["_modules"]:
            own["_modules"] = children = own["_modules"].copy()
            children.update({k: self._module(m) for k, m in children.items() if m is not None})
            met += [child for child in children.values() if child is not None]
        for name, value in own.items():
            kind = type(value)
            if kind in _PLAIN:
                continue
            if kind in _CONTAINERS and not value:  # hooks, mostly: half of all attributes
                self._empty.append(value)
            elif name not in _SWAPPED:
                other = self._other(value, met)
                if other is not value:
                    own[name] = other
        return met

    def _swap_tensors(self, tensors: dict[str, Any], kind: str) -> None:
        for key, tensor in tensors.items():
            if tensor is not None:
                tensors[key] = stand = self._stand_in(tensor)
                self.kinds.setdefault(id(stand), kind)

    def _other(self, value: Any, met: list[Any]) -> Any:
        """What takes the place of an attribute or item; containers keep theirs, with new items."""
        if type(value) in _CONTAINERS:
            if not value:
                self._empty.append(value)
            elif id(value) not in self._containers:
                self._container(value, met)
        elif isinstance(value, torch.Tensor):
            return self._stand_in(value)
        elif isinstance(value, torch.nn.Module):
            met.append(value := self._module(value))
        return value

    def _container(self, container: Any, met: list[Any]) -> None:
        if len(container) > _LARGEST:
            return
        self._containers[id(container)] = container, container.copy()
        if isinstance(container, set):
            return
        rows = container.items() if isinstance(container, dict) else enumerate(container)
        for key, item in list(rows):
            other = item if type(item) in _PLAIN else self._other(item, met)
            if other is not item:
                container[key] = other

    def _module(self, module: Any) -> Any:
        """The module itself; of a scripted one, whose tensors C++ holds, a plain likeness."""
        if not isinstance(module, torch.jit.ScriptModule):
            return module
        if id(module) not in self._skeletons:
            likeness = self._skeletons[id(module)] = torch.nn.Module()
            likeness._parameters.update(module._parameters.items())
            likeness._buffers.update(module._buffers.items())
            for name, child in module._modules.items():
                likeness._modules[name] = self._module(child)
        return self._skeletons[id(module)]

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """The one tensor that stands for `tensor` wherever it is met."""
        known = self._stands.get(id(tensor))
        if known is None:
            known = self._stands[id(tensor)] = _likeness(tensor, self._real)
            self.originals[id(known)] = tensor
        return known


@contextmanager
def borrowed(model: torch.nn.Module, *, real: bool = False) -> Iterator[Borrowed]:
    """`model` with stand-ins until the block ends; with `real`, small tensors that have numbers
    keep a copy of them.
    """
    loan = Borrowed(real)
    try:
        loan.take(model)
        yield loan
    finally:
        loan.give_back()


def _likeness(tensor: torch.Tensor, real: bool) -> torch.Tensor:
    """A tensor of the same shape, dtype and class without numbers."""
    if is_lazy(tensor):
        kind: Any = type(tensor)
        return _flagged(kind(tensor.requires_grad, device="meta", dtype=tensor.dtype), tensor)
    if real and not tensor.is_meta and tensor.numel() <= SMALL:
        data = tensor.detach().clone()
    else:
        data = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
    if not isinstance(tensor, torch.nn.Parameter):
        return _flagged(data, tensor)
    try:
        return _flagged(
            torch.Tensor._make_subclass(type(tensor), data, tensor.requires_grad), tensor
        )
    except (RuntimeError, TypeError):  # a class with a constructor of its own
        return torch.nn.Parameter(data, tensor.requires_grad)


def _flagged(stand: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """With the attributes people hang on a parameter."""
    if getattr(tensor, "__dict__", None):
        stand.__dict__.update(tensor.__dict__)
    return stand


def _refill_dict(container: dict[Any, Any], saved: dict[Any, Any]) -> None:
    for key in [key for key in container if key not in saved]:
        del container[key]
    for key, value in saved.items():
        if key not in container or container[key] is not value:
            container[key] = value


def _refill(container: Any, saved: Any) -> None:
    """Give a container its former items, in their order; untouched where it has them."""
    now, then = list(container), list(saved)
    same = len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))
    if isinstance(container, dict):
        if same and all(container[key] is saved[key] for key in then):
            return
    elif same:
        return
    container.clear()
    container.update(saved) if isinstance(container, (dict, set)) else container.extend(saved)
