"""Small nets of every kind that keeps its state in a way of its own: name -> maker.

Each maker gives a fresh net with the same structure; those of `ON_CPU` need numbers to be built.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm

NETS = {}


def net(make):
    NETS[make.__name__] = make
    return make


@net
def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))


@net
def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)
    )


class VGG(nn.Module):
    def __init__(self, wrap=nn.DataParallel):
        super().__init__()
        self.features = wrap(
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))
        )
        self.classifier = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 3))


@net
def vgg():
    return VGG()


class Block(nn.Module):
    def __init__(self, width, down):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, bias=False), nn.BatchNorm2d(width)
        self.downsample = (
            nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width)) if down else None
        )


@net
def resnet():
    rows = [("conv1", nn.Conv2d(3, 4, 7)), ("bn1", nn.BatchNorm2d(4))]
    rows += [(f"layer{n}", nn.Sequential(Block(4, True), Block(4, False))) for n in (1, 2)]
    return nn.Sequential(OrderedDict([*rows, ("fc", nn.Linear(4, 10))]))


class DenseNet(nn.Module):
    """Takes the keys of its former version, as torchvision's does."""

    def __init__(self):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1)
        self._register_load_state_dict_pre_hook(self._old_names)

    def _old_names(self, state, prefix, *_):
        for key in [key for key in state if key.startswith(prefix)]:
            name = key[len(prefix) :]
            if name.startswith(("norm.1.", "conv.1.")):
                state[prefix + name.replace(".1", "1", 1)] = state.pop(key)


@net
def densenet():
    return nn.Sequential(DenseNet(), DenseNet())


@net
def lstm():
    return nn.ModuleDict({"rnn": nn.LSTM(3, 4, 2, bidirectional=True), "out": nn.Linear(8, 2)})


@net
def gru_cell():
    return nn.ModuleList([nn.GRUCell(2, 3), nn.RNN(3, 2)])


@net
def lstm_old_weight_norm():
    return nn.Sequential(old_weight_norm(nn.LSTM(3, 4), "weight_hh_l0"), nn.Linear(4, 1))


@net
def lstm_new_weight_norm():
    rnn = nn.LSTM(3, 4)
    for name in ("weight_hh_l0", "weight_ih_l0"):
        parametrizations.weight_norm(rnn, name)
    return nn.Sequential(rnn, nn.Linear(4, 1))


@net
def conv_weight_norm():
    return nn.Sequential(parametrizations.weight_norm(nn.Conv1d(2, 3, 3), dim=2), nn.BatchNorm1d(3))


@net
def old_spectral():
    return nn.Sequential(
        old_spectral_norm(nn.Linear(3, 4)), nn.ReLU(), old_spectral_norm(nn.Conv2d(1, 2, 3))
    )


@net
def new_spectral():
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Linear(4, 4))


@net
def orthogonal():
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 3)), nn.Linear(3, 2))


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)

    def right_inverse(self, weight):
        return weight


@net
def parametrized_twice():
    layer = nn.Linear(3, 3)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    return nn.Sequential(layer)


@net
def pruned():
    layer = nn.Linear(3, 4)
    prune.l1_unstructured(layer, "weight", 2)
    return nn.Sequential(layer, nn.Linear(4, 2))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(7, 4)
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight


@net
def transformer_tied():
    return Tied()


@net
def encoder_decoder():
    return nn.Transformer(4, 2, 1, 1, 8)


@net
def attention():
    return nn.Sequential(
        nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True)
    )


@net
def norms():
    return nn.Sequential(
        nn.InstanceNorm2d(2), nn.InstanceNorm2d(2, affine=True, track_running_stats=True),
        nn.BatchNorm2d(2, track_running_stats=False), nn.BatchNorm2d(2, affine=False),
        nn.GroupNorm(1, 2), nn.LayerNorm((2, 2)), nn.SyncBatchNorm(2),
    )  # fmt: skip


@net
def embeddings():
    return nn.Sequential(
        nn.Embedding(5, 2, padding_idx=0), nn.EmbeddingBag(4, 2), nn.Bilinear(2, 2, 3), nn.PReLU()
    )


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(2), torch.ones(3)])
        self.by_name = nn.ParameterDict({"a": torch.ones(1), "b": nn.Parameter(torch.ones(2, 2))})
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.one = nn.Parameter(torch.ones(1))
        self.none = None
        self.register_parameter("absent", None)
        self.register_buffer("no_buffer", None)
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("grid", torch.ones(3), persistent=False)
        self.register_buffer("steps", torch.tensor(0))


@net
def lists_and_scalars():
    return Lists()


@net
def shared_module():
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.BatchNorm1d(3), layer)


@net
def half_and_complex():
    model = nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2, dtype=torch.float64))
    model.register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    return model


@net
def lazy():
    return nn.Sequential(
        nn.LazyConv2d(2, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(4), nn.Linear(4, 2)
    )


@net
def averaged():
    return torch.optim.swa_utils.AveragedModel(cnn(), use_buffers=True)


@net
def scripted():
    return torch.jit.script(cnn())


@net
def script_inside():
    return nn.Sequential(
        nn.Linear(2, 2), torch.jit.script(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))
    )


@net
def traced_by_fx():
    return torch.fx.symbolic_trace(cnn())


# --- state and hooks of the user's own ---------------------------------------------------


class Counting(nn.Linear):
    """Extra state that is a dict."""

    def __init__(self):
        super().__init__(2, 2)
        self.seen = {"steps": 0}

    def get_extra_state(self):
        return dict(self.seen)

    def set_extra_state(self, state):
        self.seen.update(state)


@net
def extra_state_dict():
    return nn.Sequential(Counting(), nn.BatchNorm1d(2), Counting())


class Scaled(nn.Module):
    """Extra state that is a tensor, and no other."""

    scale = 1.0

    def get_extra_state(self):
        return torch.tensor([self.scale, 0.0])

    def set_extra_state(self, state):
        self.scale = float(state[0])


@net
def extra_state_tensor():
    return nn.Sequential(Scaled(), nn.Linear(2, 2))


class Renamed(nn.Module):
    """Hooks of every kind of registration rename what an older version wrote."""

    def __init__(self):
        super().__init__()
        self.gain, self.offset = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.inner = nn.Linear(2, 2)
        self._register_load_state_dict_pre_hook(self._gamma, with_module=False)
        self.register_load_state_dict_pre_hook(_beta)

        def by_closure(state, prefix, *_):
            for key in [key for key in state if key.startswith(prefix + "core.")]:
                state[prefix + "inner." + key[len(prefix) + 5 :]] = state.pop(key)
            self.offset.data.fill_(0.5)

        self._register_load_state_dict_pre_hook(by_closure)

    def _gamma(self, state, prefix, *_):
        if prefix + "gamma" in state:
            state[prefix + "gain"] = state.pop(prefix + "gamma")


def _beta(module, state, prefix, *_):
    if prefix + "beta" in state:
        state[prefix + "offset"] = state.pop(prefix + "beta")


@net
def renaming_hooks():
    return nn.Sequential(Renamed(), nn.Linear(2, 2))


class Filling(nn.Module):
    """What an older file lacks comes from the model; what does not fit is left out."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))
        self.register_buffer("index", torch.arange(4))

    def _load_from_state_dict(self, state, prefix, metadata, strict, missing, unexpected, errors):
        if metadata.get("version", 1) < 2:
            state.setdefault(prefix + "index", self.index)
        found = state.get(prefix + "weight")
        if isinstance(found, torch.Tensor) and found.shape != self.weight.shape:
            state[prefix + "weight"] = self.weight
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, errors)


@net
def filling():
    return nn.Sequential(Filling(), nn.Linear(2, 2))


class ByHand(nn.Module):
    """Loads by itself, without torch's help."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state, prefix, metadata, strict, missing, unexpected, errors):
        for name in ("weight", "bias"):
            found = state.get(prefix + name)
            if found is None:
                missing.append(prefix + name)
            elif not isinstance(found, torch.Tensor) or found.shape != getattr(self, name).shape:
                errors.append(f"no good: {name}")
            elif name == "bias":
                self.bias = nn.Parameter(found.clone())
            else:
                self.weight.data.copy_(found)


@net
def loading_by_hand():
    return nn.Sequential(ByHand(), nn.Linear(2, 2))


class Resizing(nn.Module):
    """Takes the head of whatever file comes, and forgets its hook once it has run."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.handle = self._register_load_state_dict_pre_hook(self._resize)
        self.log = []

    def _resize(self, state, prefix, *_):
        found = state.get(prefix + "fc.weight")
        if isinstance(found, torch.Tensor) and found.dim() == 2:
            self.fc = nn.Linear(found.shape[1], found.shape[0])
        self.log.append(prefix)
        self.handle.remove()


@net
def resizing():
    return nn.Sequential(Resizing(), nn.Linear(4, 2))


class Padding(nn.Module):
    """Computes: positions are repeated where the file has fewer."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.ones(6, 2))
        self.register_load_state_dict_pre_hook(Padding._pad)

    def _pad(self, state, prefix, *_):
        found = state.get(prefix + "positions")
        if isinstance(found, torch.Tensor) and found.dim() == 2:
            more = self.positions.new_zeros(max(0, 6 - len(found)), found.shape[1])
            state[prefix + "positions"] = torch.cat([found[:6], more + torch.zeros(2)])


@net
def padding():
    return nn.Sequential(Padding(), nn.Linear(2, 2))


class Forgiving(nn.Module):
    """Post hooks decide what counts."""

    def __init__(self):
        super().__init__()
        self.lora, self.base = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_load_state_dict_post_hook(self._only_lora)

    def _only_lora(self, module, keys):
        keys.missing_keys[:] = [key for key in keys.missing_keys if "lora" in key]
        keys.unexpected_keys.reverse()


@net
def post_hooks():
    return nn.Sequential(Forgiving(), nn.BatchNorm1d(2))


class Overriding(nn.Module):
    """Its own load_state_dict takes keys with another prefix, and says less."""

    def __init__(self):
        super().__init__()
        self.fc, self.bn = nn.Linear(2, 2), nn.BatchNorm1d(2)

    def load_state_dict(self, state_dict, strict=True, assign=False):
        versions = getattr(state_dict, "_metadata", None)
        state = OrderedDict((key.removeprefix("module."), v) for key, v in state_dict.items())
        if versions is not None:
            state._metadata = versions
        return super().load_state_dict(state, strict, assign)


@net
def overriding_load():
    return Overriding()


class Delegating(nn.Module):
    """A wrapper that no key shows: both ways go to what it wraps."""

    def __init__(self):
        super().__init__()
        self.inner = cnn()

    def state_dict(self, *args, **kwargs):
        return self.inner.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict, strict=True):
        return self.inner.load_state_dict(state_dict, strict)


@net
def delegating():
    return Delegating()


class Reading(nn.Module):
    """Its hook reads a number, as quantized layers do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("depth", torch.tensor(2))
        self.register_load_state_dict_pre_hook(Reading._read)

    def _read(self, state, prefix, *_):
        found = state.get(prefix + "depth")
        if isinstance(found, torch.Tensor):
            self.last = int(found.reshape(-1)[0])


@net
def reading_numbers():
    return nn.Sequential(Reading(), nn.Linear(2, 2))


class Hidden(nn.Module):
    """Modules and tensors outside of torch's books: in a list, in a dict, behind a property."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.helpers = [nn.Linear(2, 2)]
        self.cache = {"mean": torch.zeros(2), "parent": [self]}
        self.running = torch.zeros(2)
        self._register_load_state_dict_pre_hook(self._spoil)

    def _spoil(self, state, prefix, *_):
        self.helpers[0].weight.data.fill_(9)
        self.helpers.append(None)
        self.cache["mean"].fill_(9)
        self.cache["new"] = 1
        self.running.fill_(9)
        self.extra = 1


@net
def hidden_state():
    return nn.Sequential(Hidden())


# --- quantized: torch's own layers, with packed weights ----------------------------------


@net
def quantized_dynamic():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@net
def quantized_lstm():
    model = nn.ModuleDict({"rnn": nn.LSTM(3, 4), "out": nn.Linear(4, 2)})
    return torch.ao.quantization.quantize_dynamic(model, {nn.LSTM, nn.Linear}, dtype=torch.qint8)


class Static(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = (
            torch.ao.quantization.QuantStub(),
            torch.ao.quantization.DeQuantStub(),
        )
        self.conv, self.fc = nn.Conv2d(1, 2, 3), nn.Linear(8, 2)

    def forward(self, x):
        return self.dequant(self.fc(self.conv(self.quant(x)).flatten(1)))


def _prepared():
    model = Static().eval()
    model.qconfig = torch.ao.quantization.default_qconfig
    return torch.ao.quantization.prepare(model)


@net
def quantized_static():
    model = _prepared()
    model(torch.ones(1, 1, 4, 4))
    return torch.ao.quantization.convert(model)


@net
def observed():
    return _prepared()


@net
def quantization_aware():
    model = Static().train()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    return torch.ao.quantization.prepare_qat(model)


PACKED = {"quantized_dynamic", "quantized_lstm", "quantized_static"}
ON_CPU = {*PACKED, "orthogonal", "scripted", "script_inside", "pruned"}
