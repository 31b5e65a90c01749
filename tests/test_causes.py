"""The rule that explains a difference: found, said, and true by torch's own strict loading."""

from __future__ import annotations

import re
import shlex
import warnings
from collections import OrderedDict

import pytest
import torch
from causes_support import (
    VGG,
    Inside,
    ResNet,
    Transformer,
    asked,
    loads,
    mended,
    prefixed,
    randomized,
    rekeyed,
)  # fmt: skip
from torch import nn
from torch.nn.utils import parametrizations
from verbs_support import cli, load

from ckptool.compare import match
from ckptool.keynames import Rule

NETS = {"resnet": ResNet(), "vgg": VGG(), "transformer": Transformer()}
for _net in NETS.values():
    randomized(_net)


def compiled(net):
    return Inside("_orig_mod", net)


def blocks_compiled(key):
    return re.sub(r"^(layer\d|blocks|features)\.(\d+)\.", r"\1.\2._orig_mod.", key)


def everywhere(prefix):
    return lambda net: prefixed(net.state_dict(), prefix)


def same(net):
    return net


# what the file has, what the model is, the flags
WAYS = {
    "plain": (everywhere(""), same, ""),
    "DataParallel": (everywhere("module."), same, "--strip-module"),
    "twice": (everywhere("module.module."), same, "--strip-module"),
    "compiled": (everywhere("_orig_mod."), same, "--unwrap"),
    "compiled DDP": (everywhere("_orig_mod.module."), same, "--unwrap"),
    "FSDP": (everywhere("_fsdp_wrapped_module."), same, "--unwrap"),
    "compiled blocks": (lambda net: rekeyed(net.state_dict(), blocks_compiled), same, "--unwrap"),
    "backbone removed": (everywhere("backbone."), same, "--strip-prefix backbone."),
    "deep": (everywhere("module.model.net."), same, "--strip-module --strip-prefix model.net."),
    "backbone added": (everywhere(""), lambda net: Inside("backbone", net), "--add-prefix backbone."),
    "backbone renamed": (everywhere("encoder."), lambda net: Inside("backbone", net),
                         r"--rename '^encoder\.' backbone."),
    "wrapped model": (everywhere(""), nn.DataParallel, "--add-module"),
    "wrapped model, wrapped file": (everywhere("module."), nn.DataParallel, ""),
    "compiled model": (everywhere(""), compiled, "--add-prefix _orig_mod."),
    "compiled model, DDP file": (everywhere("module."), compiled, r"--rename '^module\.' _orig_mod."),
    "wrapped twice": (everywhere("module."), lambda net: nn.DataParallel(nn.DataParallel(net)),
                      "--add-prefix module."),
}  # fmt: skip


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("way", WAYS)
def test_the_rule_makes_strict_loading_pass(name, way):
    file, model, flags = WAYS[way]
    state, wanted = file(NETS[name]), model(NETS[name])
    cause = asked(wanted, state)
    assert cause.after.fits
    assert loads(wanted, mended(cause, state))
    assert cause.choices == ()
    assert cause.sentence.startswith(f"all {len(state)} keys match")
    assert cause.options == flags


PARTS = {
    "features wrapped": (VGG(wrap=True), VGG(), "--unwrap-at features"),
    "features wrapped in the model": (VGG(), VGG(wrap=True), "--add-module-at features"),
    "both wrapped": (nn.DataParallel(VGG(wrap=True)), VGG(), "--unwrap"),
    "both wrapped in the model": (VGG(), nn.DataParallel(VGG(wrap=True)),
                                  "--add-module-at features --add-module"),
    "one here, one there": (nn.DataParallel(VGG()), VGG(wrap=True),
                            "--strip-module --add-module-at features"),
    "two parts": (Inside("a", nn.DataParallel(VGG()), b=nn.DataParallel(nn.Linear(2, 2))),
                  Inside("a", VGG(), b=nn.Linear(2, 2)), "--unwrap-at a --unwrap-at b"),
    "a part": (VGG(), VGG().features, "--only 'features.**' --strip-prefix features."),
    "a part of a wrapped one": (nn.DataParallel(Inside("net", VGG())), VGG(),
                                "--strip-module --strip-prefix net."),
    "a detector's": (Inside("backbone", ResNet(), neck=nn.Linear(3, 3)), ResNet(),
                     "--only 'backbone.**' --strip-prefix backbone."),
    "an honest module": (Inside("_orig_mod", Inside("module", VGG(), extra=nn.Linear(2, 2))),
                         Inside("module", VGG(), extra=nn.Linear(2, 2)), "--unwrap"),
    "a head less": (ResNet(), Inside("x", ResNet()).x, ""),
}  # fmt: skip


@pytest.mark.parametrize("way", PARTS)
def test_parts_of_a_net(way):
    source, model, flags = PARTS[way]
    state = randomized(source).state_dict()
    cause = asked(model, state)
    assert cause.after.fits
    assert loads(model, mended(cause, state))
    assert cause.options == flags


def test_a_prefix_for_all_but_the_head():
    head = nn.Linear(3, 2)
    state = OrderedDict({**randomized(VGG()).state_dict(), **prefixed(head.state_dict(), "fc.")})
    model = Inside("backbone", VGG(), fc=nn.Linear(3, 2))
    cause = asked(model, state)
    assert "adding 'backbone.' to all but 'fc'" in cause.sentence
    assert len(cause.rules) == 1
    assert loads(model, mended(cause, state))


def test_a_part_is_not_taken_from_a_head_that_differs():
    """What stands beside the prefix belongs to the model too: nothing of it is left out."""
    state = prefixed(ResNet().state_dict(), "backbone.")
    state["aux.weight"] = torch.ones(5, 4)
    model = ResNet()
    model.aux = nn.Linear(4, 2)
    cause = asked(model, state)
    assert [rule.name for rule in cause.rules] == ["strip-prefix"]
    assert [row.key for row in cause.after.mismatched] == ["aux.weight"]
    assert cause.after.missing_keys == ("aux.bias",)


# -- names of other versions -------------------------------------------------------------------
def normed(new):
    norm = parametrizations.weight_norm if new else nn.utils.weight_norm
    lstm = nn.LSTM(3, 4, 2, bidirectional=True)
    for name in [name for name, _ in lstm.named_parameters() if name.startswith("weight_hh")]:
        lstm = norm(lstm, name)
    return nn.Sequential(OrderedDict(conv=norm(nn.Conv1d(3, 3, 1)), lstm=lstm, fc=nn.Linear(8, 2)))


def spectral(new):
    norm = parametrizations.spectral_norm if new else nn.utils.spectral_norm
    return nn.Sequential(norm(nn.Linear(3, 4)), norm(nn.Linear(4, 5)))


class DenseLayer(nn.Module):
    def __init__(self, ins):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(ins), nn.Conv2d(ins, 8, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, bias=False)


def dense():
    block = nn.Sequential(OrderedDict(denselayer1=DenseLayer(8), denselayer2=DenseLayer(12)))
    features = OrderedDict(conv0=nn.Conv2d(3, 8, 7), norm0=nn.BatchNorm2d(8), denseblock1=block)
    return Inside("features", nn.Sequential(features), classifier=nn.Linear(16, 5))


def old_dense(key):
    return re.sub(r"(denselayer\d+\.(?:norm|conv))([12])", r"\1.\2", key)


def gamma(key):
    key = re.sub(r"(norm\d)\.weight$", r"\1.gamma", key)
    return re.sub(r"(norm\d)\.bias$", r"\1.beta", key)


@pytest.mark.parametrize("prefix", ["", "module.", "net."])
def test_names_of_other_versions(prefix):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = [
            (normed(new=False).state_dict(), normed(new=True), "weight_norm"),
            (spectral(new=False).state_dict(), spectral(new=True), "spectral_norm"),
            (spectral(new=True).state_dict(), spectral(new=False), "spectral_norm"),
            (rekeyed(dense().state_dict(), old_dense), dense(), "DenseNet"),
            (rekeyed(Transformer().state_dict(), gamma), Transformer(), "gamma and beta"),
        ]
    for state, model, word in cases:
        state = prefixed(state, prefix)
        cause = asked(model, state)
        assert cause.after.fits, word
        assert word in cause.sentence
        assert loads(model, mended(cause, state))
        assert cause.options


def test_new_weight_norm_names_for_an_old_net():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cause = asked(normed(new=False), normed(new=True).state_dict())
    assert cause.after.fits


def test_gamma_is_renamed_where_it_is_a_norms_and_nowhere_else():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.LayerNorm, self.gamma_proj = nn.LayerNorm(4), nn.Linear(4, 3)
            self.gamma, self.alphabeta = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    model = randomized(Net())
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    state = rekeyed(model.state_dict(), lambda key: old.get(key, key))
    cause = asked(model, state)
    assert loads(model, mended(cause, state))
    assert [rule.argument for rule in cause.rules] == [
        r"(^|\.)LayerNorm\.gamma$", r"(^|\.)LayerNorm\.beta$",
    ]  # fmt: skip


def test_what_a_models_own_hooks_map_is_not_renamed_again():
    """A matcher that knows the hook of weight_norm needs no rule for it."""

    def knowing(wanted, have, metadata):
        def new(key):
            key = re.sub(r"weight_g$", "parametrizations.weight.original0", key)
            return re.sub(r"weight_v$", "parametrizations.weight.original1", key)

        return match(wanted, {new(key): shape for key, shape in have.items()}, metadata)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old, new = (
            nn.utils.weight_norm(nn.Linear(3, 4)),
            parametrizations.weight_norm(nn.Linear(3, 4)),
        )
    model = Inside("a", new, b=nn.Linear(2, 2))
    plain = Inside("a", old, b=nn.Linear(2, 2)).state_dict()
    assert asked(model, plain, matcher=knowing).rules == ()
    assert asked(model, plain, matcher=knowing).after.fits
    wrapped = asked(model, prefixed(plain, "module."), matcher=knowing)
    assert wrapped.rules == (Rule("strip-module"),)
    assert wrapped.after.fits


def test_a_value_that_a_weight_is_computed_from_is_no_weight():
    """Shapes agree, and loading it would be silently wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        olds = [
            nn.utils.weight_norm(nn.Linear(4, 4)),
            nn.utils.spectral_norm(nn.Linear(4, 4)),
            parametrizations.orthogonal(nn.Linear(4, 4)),
        ]
    for old in olds:
        for prefix in ("", "net."):
            cause = asked(nn.Linear(4, 4), prefixed(old.state_dict(), prefix))
            assert "weight" not in cause.after.loaded


# -- the command is true -----------------------------------------------------------------------
@pytest.mark.parametrize(
    "way", ["DataParallel", "FSDP", "backbone renamed", "compiled model, DDP file"]
)
def test_the_flags_do_what_the_rules_do(way, tmp_path, capsys):
    file, model, _ = WAYS[way]
    state, wanted = file(NETS["vgg"]), model(NETS["vgg"])
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "in.pth")
    cause = asked(wanted, state)
    words = shlex.split(cause.options)
    status, _, err = cli(capsys, "convert", tmp_path / "in.pth", *words, "-o", tmp_path / "out.pth")
    assert status == 0, err
    assert loads(wanted, load(tmp_path / "out.pth")["state_dict"])
