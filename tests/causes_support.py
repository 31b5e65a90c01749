"""What the tests of causes share: nets, their keys as records, and torch's word on a fix."""

from __future__ import annotations

import copy
from collections import OrderedDict
from itertools import pairwise

import torch
from torch import nn

from ckptool.causes import explain
from ckptool.checkpoint import DTYPES, Table, Tensor, Wanted
from ckptool.layer_versions import metadata_renames
from ckptool.rules import apply


# -- nets --------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self, ins, outs):
        super().__init__()
        self.conv1 = nn.Conv2d(ins, outs, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outs)
        self.conv2 = nn.Conv2d(outs, outs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outs)
        if ins != outs:
            self.downsample = nn.Sequential(nn.Conv2d(ins, outs, 1), nn.BatchNorm2d(outs))


class ResNet(nn.Module):
    """conv1, bn1, layer1-4 of BasicBlocks, fc: the names of torchvision's ResNets."""

    def __init__(self, blocks=(2, 2, 2, 2), width=4, classes=10, ins=3):
        super().__init__()
        self.conv1 = nn.Conv2d(ins, width, 7, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        for n, count in enumerate(blocks):
            before, outs = max(width, width << n - 1) if n else width, width << n
            layers = [Block(before if i == 0 else outs, outs) for i in range(count)]
            setattr(self, f"layer{n + 1}", nn.Sequential(*layers))
        self.fc = nn.Linear(width << len(blocks) - 1, classes)


class VGG(nn.Module):
    """features and classifier, as torchvision's VGG; `features` may be wrapped."""

    def __init__(self, classes=10, wrap=False):
        super().__init__()
        widths = (3, 4, 4, 8, 8, 8)
        layers = []
        for ins, outs in pairwise(widths):
            layers += [nn.Conv2d(ins, outs, 3), nn.BatchNorm2d(outs), nn.ReLU()]
        features = nn.Sequential(*layers)
        self.features = nn.DataParallel(features) if wrap else features
        self.classifier = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, classes)
        )


class Attention(nn.Module):
    def __init__(self, dim, names):
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(dim, dim))


class Layer(nn.Module):
    def __init__(self, dim, names, norms, mlp):
        super().__init__()
        self.attn = Attention(dim, names)
        self.add_module(norms[0], nn.LayerNorm(dim))
        setattr(
            self, mlp, nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))
        )
        self.add_module(norms[1], nn.LayerNorm(dim))


class Transformer(nn.Module):
    """An embedding tied to the head, blocks of equal shapes."""

    def __init__(self, layers=3, dim=8, vocab=20, blocks="blocks", names=("q", "k", "v", "out"),
                 norms=("norm1", "norm2"), mlp="mlp"):  # fmt: skip
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.add_module(blocks, nn.ModuleList(Layer(dim, names, norms, mlp) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.emb.weight


class Inside(nn.Module):
    """A net under a name: `Inside("backbone", net)`, with more beside it."""

    def __init__(self, name, net, **more):
        super().__init__()
        self.add_module(name, net)
        for other, module in more.items():
            self.add_module(other, module)


# -- records -----------------------------------------------------------------------------------
def wanted_of(model):
    """What the model wants, as `models.expected` says it."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    first: dict[int, str] = {}
    rows = []
    for key, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            rows.append(Wanted(key, None, kind="extra"))
            continue
        tie = first.setdefault(id(value), key)
        kind = "parameter" if key in parameters else "buffer"
        rows.append(
            Wanted(key, tuple(value.shape), _dtype(value), kind, tie if tie != key else None)
        )
    return rows


def _dtype(value):
    return str(value.dtype).removeprefix("torch.")


def table_of(state, path=(), metadata=True):
    """A state_dict as a table of a file; what is no tensor stands beside."""
    tensors = tuple(
        Tensor(key, DTYPES[_dtype(value)], tuple(value.shape), None, 0, None, path=(*path, key))
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    )
    others = tuple(
        (k, type(v).__name__) for k, v in state.items() if not isinstance(v, torch.Tensor)
    )
    versions = getattr(state, "_metadata", None) if metadata else None
    return Table(path, tensors, versions, others=others, order=tuple(state) if others else ())


def rekeyed(state, change):
    """The same tensors under other names, `_metadata` following where it can."""
    named = OrderedDict((change(key), value) for key, value in state.items())
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        renames = {key: change(key) for key in state if change(key) != key}
        moved, gone = metadata_renames(list(versions), renames, list(state))
        named._metadata = OrderedDict(
            (moved.get(path, path), value) for path, value in versions.items() if path not in gone
        )
    return named


def prefixed(state, prefix):
    return rekeyed(state, lambda key: prefix + key)


def asked(model, state, **options):
    """The cause for one state_dict against a model."""
    return explain(wanted_of(model), [table_of(state)], 0, **options)


# -- torch's word ------------------------------------------------------------------------------
def mended(cause, state):
    """The state_dict after the rules of a cause."""
    outcome = apply(cause.rules, list(state))
    gone = set(outcome.drops)
    named = OrderedDict(
        (outcome.renames.get(key, key), value) for key, value in state.items() if key not in gone
    )
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        left = [key for key in state if key not in gone]
        moved, lost = metadata_renames(list(versions), outcome.renames, left)
        named._metadata = {moved.get(p, p): v for p, v in versions.items() if p not in lost}
    return named


def loads(model, state):
    """Whether torch loads it with strict=True; the values are compared, every one of them."""
    fresh = copy.deepcopy(model)
    with torch.no_grad():
        for value in fresh.state_dict().values():
            value.zero_()
    fresh.load_state_dict(state, strict=True)
    return all(torch.equal(value, state[key]) for key, value in fresh.state_dict().items())


def randomized(model, seed=0):
    """The model with values that differ everywhere."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape))
            else:
                value.random_(1, 99)
    return model
