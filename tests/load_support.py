"""What the tests of load share: two loaded objects side by side, and nets for tutorials."""

from __future__ import annotations

import warnings
from collections import OrderedDict

import numpy as np
import torch
from fixtures.make_fixtures import element_bytes
from parts_support import addresses
from torch import nn

import ckptool


class Same:
    """Two objects side by side, cycles and all: types, keys in order, values, attributes, which
    values are one object, and of tensors shape, stride, dtype, flags, every byte, and which
    elements share memory. Counts what it compared.
    """

    def __init__(self, meta=False):
        self.meta = meta  # the second one has no numbers
        self.there, self.back = {}, {}
        self.objects = {}
        self.tensors = self.values = 0

    def same(self, one, two):
        stack = [(one, two, ())]
        while stack:
            left, right, path = stack.pop()
            self.values += 1
            if isinstance(left, dict | list | set | torch.Tensor) or hasattr(left, "__dict__"):
                if id(left) in self.objects:
                    assert self.objects[id(left)][1] is right, path
                    continue
                self.objects[id(left)] = (left, right)  # both stay alive: ids are not reused
            stack += self._parts(left, right, path)
        return self

    def _parts(self, one, two, path):
        if isinstance(one, torch.Tensor):
            self._tensor(one, two, path)
            plain = type(one) in (torch.Tensor, nn.Parameter)  # a jagged one holds its own parts
            return self._attributes(one, two, path) if plain else []
        assert type(one) is type(two), path
        if isinstance(one, dict):
            assert list(one) == list(two), path
            rows = [(one[key], two[key], (*path, key)) for key in one]
            return rows + self._attributes(one, two, path)
        if isinstance(one, list | tuple):
            assert len(one) == len(two), path
            return [(*pair, (*path, at)) for at, pair in enumerate(zip(one, two, strict=True))]
        if isinstance(one, np.ndarray):
            assert (one.dtype, one.shape, one.flags.f_contiguous) == (
                two.dtype, two.shape, two.flags.f_contiguous,
            ), path  # fmt: skip
            assert one.tolist() == two.tolist(), path
        elif isinstance(one, torch.UntypedStorage | torch.TypedStorage):
            self._storage(one, two, path)
        elif isinstance(one, torch.Generator):
            assert torch.equal(one.get_state(), two.get_state()), path
        elif hasattr(one, "getvalue"):
            assert (one.getvalue(), one.tell()) == (two.getvalue(), two.tell()), path
        elif hasattr(one, "__dict__") and not isinstance(one, type):
            return self._attributes(one, two, path)
        else:
            assert one == two or (one != one and two != two), path
        return []

    def _attributes(self, one, two, path):
        mine, theirs = getattr(one, "__dict__", {}), getattr(two, "__dict__", {})
        assert mine.keys() == theirs.keys(), path
        return [(mine[key], theirs[key], (*path, f".{key}")) for key in mine]

    def _storage(self, one, two, path):
        assert one.nbytes() == two.nbytes(), path
        if isinstance(one, torch.TypedStorage):
            assert one.dtype == two.dtype, path
            one, two = one.untyped(), two.untyped()
        if not self.meta:
            self._tensor(*(torch.empty(0, dtype=torch.uint8).set_(s) for s in (one, two)), path)

    def _tensor(self, one, two, path):
        self.tensors += 1
        assert type(one) is type(two), path
        lazy = isinstance(one, nn.UninitializedParameter | nn.parameter.UninitializedBuffer)
        facts = ("dtype", "requires_grad", "layout", "is_quantized", "is_nested")
        facts += () if lazy or one.is_nested else ("shape",)
        for fact in facts:
            assert getattr(one, fact) == getattr(two, fact), (path, fact)
        if lazy:
            return
        if self.meta and (one.is_nested or one.layout is not torch.strided):
            assert two.is_meta, path
        elif one.is_nested:
            self._several(one.unbind(), two.unbind(), path)
        elif one.layout is not torch.strided:
            self._several([parts(one)], [parts(two)], path)
        elif self.meta and not one.is_meta:
            assert two.is_meta, path
            assert one.stride() == two.stride(), path
        else:
            self._strided(one.detach(), two.detach(), path)

    def _several(self, one, two, path):
        assert len(one) == len(two), path
        for left, right in zip(one, two, strict=True):
            assert torch.equal(left.to_dense(), right.to_dense()), path

    def _strided(self, one, two, path):
        assert one.stride() == two.stride(), path
        assert (one.is_conj(), one.is_neg()) == (two.is_conj(), two.is_neg()), path
        assert one.device == two.device, path
        if one.is_meta:
            return
        if one.is_quantized:
            assert one.qscheme() == two.qscheme(), path
            assert torch.equal(one.dequantize(), two.dequantize()), path
        codes = [t.int_repr() if t.is_quantized else t for t in (one, two)]
        made = [t.resolve_conj().resolve_neg().contiguous() for t in codes]
        assert element_bytes(made[0]) == element_bytes(made[1]), path
        if one.dtype.itemsize and not one.is_conj():
            for old, new in zip(addresses(one).tolist(), addresses(two).tolist(), strict=True):
                assert self.there.setdefault(old, new) == new, path
                assert self.back.setdefault(new, old) == old, path


def parts(sparse):
    return sparse.to_dense()


def loaded(path, *args, **options):
    """`ckptool.load`, whose warnings about pickled models are not asked about here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ckptool.load(path, *args, **options)


def saved(obj, path, **options):
    torch.save(obj, path, **options)
    return path


def prefixed(state, prefix):
    """A state_dict as a wrapper of that name saves it."""
    made = OrderedDict((prefix + key, value) for key, value in state.items())
    layers = getattr(state, "_metadata", {})
    made._metadata = OrderedDict(((prefix + k).rstrip("."), v) for k, v in layers.items())
    return made


# -- nets --------------------------------------------------------------------------------------
class Net(nn.Module):
    """A small net with all that a tutorial's has: convolution, BatchNorm, a head."""

    def __init__(self, classes=5, width=4):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU())
        self.fc = nn.Linear(width, classes)

    def forward(self, x):
        return self.fc(self.features(x).mean((2, 3)))


def net(seed=0, **options):
    torch.manual_seed(seed)
    return Net(**options)


def trained(model, optimizer, steps=2, seed=7):
    """A few steps of training; the inputs are the same each time."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 8, 8, generator=generator)).square().mean().backward()
        optimizer.step()
    return model


def adam(model, **options):
    return torch.optim.Adam(model.parameters(), lr=1e-2, **options)


def numbers(module):
    """Every number of a module and where it lies: what must not move when a load fails."""
    tensors = [*module.parameters(), *module.buffers()]
    return [(id(t), t.data_ptr(), t.requires_grad, element_bytes(t.detach())) for t in tensors]


def optimizer_numbers(optimizer):
    """The same of an optimizer: groups and state."""
    state = [
        (id(p), name, element_bytes(v.detach()) if isinstance(v, torch.Tensor) else v)
        for p, row in optimizer.state.items()
        for name, v in row.items()
    ]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return state, groups, [[id(p) for p in g["params"]] for g in optimizer.param_groups]


def equal(one, two):
    """Whether two state_dicts have the same keys and numbers."""
    one, two = OrderedDict(one), OrderedDict(two)
    assert list(one) == list(two)
    return all(torch.equal(one[key], two[key]) for key in one)
