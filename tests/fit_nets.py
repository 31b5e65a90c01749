"""Nets that run, by name: what tells whether a mended file is the original is what comes out.

Structures that keep their state in a way of their own are those of `expected_nets`; here they get
an input. Those of transformers are in `fit_transformers`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from expected_nets import NETS as STRUCTURES
from expected_nets import VGG, Counting
from torch import nn
from torch.nn.utils import parametrizations


class Case(NamedTuple):
    """`make` builds it; `run(net)` gives the tensors that come out of a fixed input."""

    make: Callable[[], nn.Module]
    run: Callable[[Any], Any]


CASES: dict[str, Case] = {}


def fixed(*shape: int) -> torch.Tensor:
    """Numbers between -1 and 1 that are the same everywhere."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(1.0, count + 1)).view(shape)


def words(count: int = 6, vocabulary: int = 7) -> torch.Tensor:
    return (torch.arange(count) * 3 % vocabulary).view(1, count)


def on(*shape: int) -> Callable[[Any], Any]:
    return lambda net: net(fixed(*shape))


def case(run: Callable[[Any], Any], name: str | None = None) -> Callable[[Any], Any]:
    def add(make: Any) -> Any:
        CASES[name or make.__name__.lower()] = Case(make, run)
        return make

    return add


def structure(name: str, run: Callable[[Any], Any]) -> None:
    CASES[name] = Case(STRUCTURES[name], run)


# -- of expected_nets --------------------------------------------------------------------------
structure("mlp", on(2, 3))
structure("cnn", on(1, 1, 4, 4))
structure("vgg", lambda net: net.classifier(net.features(fixed(2, 3, 8, 8)).mean((2, 3))))
structure("gru_cell", lambda net: (net[0](fixed(1, 2)), net[1](fixed(4, 3))[0]))
structure("lstm", lambda net: net["out"](net["rnn"](fixed(5, 3))[0]))
structure("lstm_old_weight_norm", lambda net: net[1](net[0](fixed(5, 3))[0]))
structure("lstm_new_weight_norm", lambda net: net[1](net[0](fixed(5, 3))[0]))
structure("conv_weight_norm", on(2, 2, 6))
structure("old_spectral", lambda net: (net[:2](fixed(2, 3)), net[2](fixed(1, 1, 4, 4))))
structure("new_spectral", on(2, 3))
structure("orthogonal", on(2, 3))
structure("parametrized_twice", on(2, 3))
structure("pruned", on(2, 3))
structure("transformer_tied", lambda net: net.head(net.body(net.emb(words()))))
structure("encoder_decoder", lambda net: net(fixed(3, 1, 4), fixed(2, 1, 4)))
structure("attention", lambda net: (
    net[0](*[fixed(3, 4)] * 3)[0], net[1](fixed(3, 4), fixed(2, 3), fixed(2, 5))[0],
))  # fmt: skip
structure("norms", on(2, 2, 2, 2))
structure("embeddings", lambda net: (
    net[0](words(4, 5)), net[1](words(4, 4)), net[3](net[2](fixed(3, 2), fixed(3, 2))),
))  # fmt: skip
structure("lists_and_scalars", lambda net: [
    *net.scales, *net.by_name.values(), net.scalar, net.one, net.flags, net.grid, net.steps,
])  # fmt: skip
structure("shared_module", on(2, 3))
structure("half_and_complex", lambda net: (
    net[0](fixed(2, 2).bfloat16()), net[1](fixed(2, 2).double()), net.phase,
))  # fmt: skip
structure("averaged", on(1, 1, 4, 4))
structure("extra_state_dict", lambda net: (
    net(fixed(2, 2)), *[torch.tensor(m.seen["steps"]) for m in net if isinstance(m, Counting)],
))  # fmt: skip
structure("extra_state_tensor", lambda net: (net[1](fixed(2, 2)), torch.tensor(net[0].scale)))
structure("quantized_dynamic", on(2, 4))
structure("quantized_lstm", lambda net: net["out"](net["rnn"](fixed(5, 1, 3))[0]))
structure("quantized_static", on(1, 1, 4, 4))


# -- convolutions ------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(ins, outs, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outs)
        self.conv2 = nn.Conv2d(outs, outs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outs)
        self.downsample: Any = None
        if ins != outs:
            self.downsample = nn.Sequential(nn.Conv2d(ins, outs, 1), nn.BatchNorm2d(outs))

    def forward(self, x: Any) -> Any:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + (self.downsample(x) if self.downsample is not None else x)).relu()


@case(on(1, 3, 8, 8))
class ResNet(nn.Module):
    """The names of torchvision's."""

    def __init__(self, blocks: tuple[int, ...] = (2, 2, 1), classes: int = 5) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 7, padding=3, bias=False), nn.BatchNorm2d(4)
        widths = [4, *(4 << n for n in range(len(blocks)))]
        for n, count in enumerate(blocks):
            rows = [
                Block(widths[n] if i == 0 else widths[n + 1], widths[n + 1]) for i in range(count)
            ]
            setattr(self, f"layer{n + 1}", nn.Sequential(*rows))
        self.stages = len(blocks)
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: Any) -> Any:
        x = self.bn1(self.conv1(x)).relu()
        for n in range(self.stages):
            x = getattr(self, f"layer{n + 1}")(x)
        return self.fc(x.mean((2, 3)))


CASES["resnet_deep"] = Case(lambda: ResNet((3, 4)), on(1, 3, 8, 8))
CASES["vgg_plain"] = Case(
    lambda: VGG(lambda net: net),
    lambda net: net.classifier(net.features(fixed(2, 3, 8, 8)).mean((2, 3))),
)


class DenseLayer(nn.Sequential):
    def __init__(self, ins: int) -> None:
        super().__init__(OrderedDict(
            norm1=nn.BatchNorm2d(ins), relu1=nn.ReLU(), conv1=nn.Conv2d(ins, 4, 1, bias=False),
            norm2=nn.BatchNorm2d(4), relu2=nn.ReLU(), conv2=nn.Conv2d(4, 2, 3, padding=1, bias=False),
        ))  # fmt: skip

    def forward(self, x: Any) -> Any:
        return torch.cat([x, super().forward(x)], 1)


@case(lambda net: net.classifier(net.features(fixed(1, 3, 6, 6)).mean((2, 3))))
class DenseNet(nn.Module):
    """The names of torchvision's, without its hook for those before torch 0.4."""

    def __init__(self) -> None:
        super().__init__()
        block = [(f"denselayer{n + 1}", DenseLayer(4 + 2 * n)) for n in range(3)]
        self.features = nn.Sequential(OrderedDict(
            conv0=nn.Conv2d(3, 4, 3), norm0=nn.BatchNorm2d(4),
            denseblock1=nn.Sequential(OrderedDict(block)), norm5=nn.BatchNorm2d(10),
        ))  # fmt: skip
        self.classifier = nn.Linear(10, 3)


@case(on(1, 2, 8, 8))
class UNet(nn.Module):
    """Two ways with layers of the same shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(2, 2, 3, padding=1) for _ in range(3)])
        self.up = nn.ModuleList([nn.Conv2d(2, 2, 3, padding=1) for _ in range(3)])
        self.mid, self.out = nn.ConvTranspose2d(2, 2, 1), nn.Conv2d(2, 1, 1)

    def forward(self, x: Any) -> Any:
        for layer in self.down:
            x = layer(x).tanh()
        x = self.mid(x)
        for layer in self.up:
            x = layer(x).tanh()
        return self.out(x)


@case(on(1, 4), "generator")
def generator() -> nn.Module:
    return nn.Sequential(OrderedDict(
        main=nn.Sequential(
            nn.Linear(4, 8), nn.Unflatten(1, (2, 2, 2)), nn.ConvTranspose2d(2, 4, 4, 2, 1),
            nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 3, 4, 2, 1), nn.Tanh(),
        )
    ))  # fmt: skip


@case(on(1, 3, 6, 6), "discriminator")
def discriminator() -> nn.Module:
    spectral = parametrizations.spectral_norm
    return nn.Sequential(OrderedDict(
        c1=spectral(nn.Conv2d(3, 4, 3)), a1=nn.LeakyReLU(0.2), c2=spectral(nn.Conv2d(4, 4, 3)),
        flat=nn.Flatten(), out=nn.Linear(16, 1),
    ))  # fmt: skip


@case(on(1, 3, 6, 6), "mobilenet")
def mobilenet() -> nn.Module:
    def unit(ins: int, outs: int) -> nn.Module:
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(ins, ins, 3, groups=ins), nn.BatchNorm2d(ins), nn.ReLU6()),
            nn.Conv2d(ins, outs, 1, bias=False), nn.BatchNorm2d(outs),
        )  # fmt: skip

    return nn.Sequential(
        OrderedDict(features=nn.Sequential(unit(3, 4), unit(4, 4)), classifier=nn.Linear(2, 2))
    )


@case(on(1, 1, 4, 4, 4), "volume")
def volume() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 2, 3), nn.InstanceNorm3d(2, affine=True, track_running_stats=True),
        nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


@case(lambda net: net.model(fixed(1, 3, 6, 6)))
class Yolo(nn.Module):
    """All of it under `model`, by numbers."""

    def __init__(self) -> None:
        super().__init__()
        unit = [
            nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 3, 3, bias=False), bn=nn.BatchNorm2d(3)))
            for _ in range(2)
        ]
        self.model = nn.Sequential(*unit, nn.Conv2d(3, 2, 1))
        self.register_buffer("stride", torch.tensor([8.0, 16.0]))


# -- names that mislead ------------------------------------------------------------------------
@case(lambda net: net.submodule["head_module"](net.mlp_module(fixed(2, 4))))
class MlpModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp_module = nn.Sequential(OrderedDict(layer0=nn.Linear(4, 4)))
        self.submodule = nn.ModuleDict({"head_module": nn.Linear(4, 2)})


@case(lambda net: net.tail(net.module(fixed(2, 3))))
class HonestModule(nn.Module):
    """A child that is called `module` by its author."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.tail = nn.Linear(3, 2)


@case(lambda net: net.encoder.module(net.decoder.module(fixed(2, 3))))
class ModulesBelow(nn.Module):
    """Several children that have an honest `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"module": nn.Linear(3, 3)})
        self.decoder = nn.ModuleDict({"module": nn.Linear(3, 3)})


@case(lambda net: net.head(net.neck.aux_backbone(net.backbone(fixed(2, 3)))))
class Detector(nn.Module):
    """Has a backbone itself, and the word once more elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.neck = nn.Module()
        self.neck.aux_backbone = nn.Linear(4, 4)
        self.head = nn.ModuleList([nn.Linear(4, 2)])[0]


@case(lambda net: net.model.encoder(net.model.decoder(fixed(2, 3))))
class ModelModel(nn.Module):
    """Prefixes that return further right: model.model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.encoder = nn.Sequential(
            OrderedDict(model=nn.Linear(3, 3), backbone=nn.Linear(3, 2))
        )
        self.model.decoder = nn.Linear(3, 3)


@case(lambda net: sum(layer(fixed(2, 2)) for layer in net.layers))
class Twelve(nn.Module):
    """Numbers of two digits, all of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(12)])


@case(
    lambda net: net.out(
        net.layer_norm(net.emb(words()) * net.gamma + net.beta_proj(net.noise_alphabeta))
    )
)
class GammaBeta(nn.Module):
    """Parameters that merely contain gamma and beta, beside a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.layer_norm = nn.Embedding(7, 3), nn.LayerNorm(3)
        self.gamma, self.noise_alphabeta = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.beta_proj, self.out = nn.Linear(3, 3), nn.Linear(3, 2)


# -- attention ---------------------------------------------------------------------------------
class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Any) -> Any:
        weights = (self.q(x) @ self.k(x).transpose(-1, -2)).softmax(-1)
        return self.out(weights @ self.v(x))


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(dim), Attention(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Any) -> Any:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


@case(lambda net: net(words()))
class GPT(nn.Module):
    """Four projections of one shape in each block; the head is the embedding; positions that no
    file keeps and a mask that every file keeps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(7, 4), nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([Layer(4) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("positions", torch.arange(8), persistent=False)
        self.register_buffer("mask", torch.ones(8, 8).tril())

    def forward(self, index: Any) -> Any:
        x = self.wte(index) + self.wpe(self.positions[: index.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) + self.mask.sum()


@case(lambda net: net(fixed(1, 3, 8, 8)))
class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 4, 4, 4)
        self.cls_token, self.pos_embed = (
            nn.Parameter(torch.ones(1, 1, 4)),
            nn.Parameter(torch.ones(1, 5, 4)),
        )
        self.blocks = nn.Sequential(*[Layer(4) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token, x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


@case(
    lambda net: net.pool(
        net.gate(fixed(2, 3)).softmax(-1)
        * torch.cat([e(fixed(2, 3)) for e in net.experts.values()], -1)
    )
)
class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({f"expert_{n}": nn.Linear(3, 1) for n in range(3)})
        self.gate, self.pool = nn.Linear(3, 3), nn.Linear(3, 2)


@case(lambda net: net.critic(net.actor(fixed(2, 3)).tanh() @ fixed(2, 4)))
class ActorCritic(nn.Module):
    """Two nets of which parts are shared by both."""

    def __init__(self) -> None:
        super().__init__()
        body = nn.Linear(3, 3)
        self.actor = nn.Sequential(body, nn.Tanh(), nn.Linear(3, 2))
        self.critic = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), body, nn.Linear(3, 1))
