"""Names that no rule of the trade explains: another library's, counted anew, twins."""

from __future__ import annotations

import re

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


def other_names(key):
    """A ResNet as another library calls its parts: other words, other numbers, other depth."""
    if not key.startswith("layer"):
        return key.replace("conv1", "stem.0").replace("bn1", "stem.1").replace("fc", "head")
    key = re.sub(r"^layer(\d)", lambda found: f"stages.{int(found[1]) - 1}.blocks", key)
    return key.replace("downsample", "short").replace("conv", "c").replace("bn", "n")


def test_a_net_of_another_library():
    model = randomized(ResNet())
    for prefix in ("", "module."):
        state = prefixed(rekeyed(model.state_dict(), other_names), prefix)
        cause = asked(model, state)
        assert loads(model, mended(cause, state))
        assert [rule.name for rule in cause.rules][-1] == "rename-file"
        assert cause.options == ""  # a file of names cannot be said with flags


def test_blocks_of_equal_shapes_by_numbers_order_and_words():
    model = randomized(Transformer())
    names = {"blocks": "layers", "names": ("query", "key", "value", "proj"),
             "norms": ("ln_1", "ln_2"), "mlp": "ffn"}  # fmt: skip
    state = randomized(Transformer(**names), seed=2).state_dict()
    cause = asked(model, state)
    after = mended(cause, state)
    assert cause.after.fits
    assert torch.equal(after["blocks.2.attn.q.weight"], state["layers.2.attn.query.weight"])
    assert torch.equal(after["blocks.1.attn.out.bias"], state["layers.1.attn.proj.bias"])
    assert torch.equal(after["blocks.0.norm2.weight"], state["layers.0.ln_2.weight"])
    assert loads(model, after)
    assert 0 < len(cause.rules) <= 8
    assert cause.options


@pytest.mark.parametrize("prefix", ["", "module."])
def test_layers_counted_anew(prefix):
    """features.3 of the file is a convolution, features.3 of the model is one too: another."""
    model = randomized(VGG())
    state = rekeyed(
        model.state_dict(),
        lambda k: re.sub(r"^features\.(\d+)", lambda at: f"features.{2 * int(at[1])}", k),
    )
    cause = asked(model, prefixed(state, prefix))
    assert loads(model, mended(cause, prefixed(state, prefix)))
    assert ("removing 'module.'" in cause.sentence) is bool(prefix)


def test_a_simple_cause_is_not_doubted_for_a_far_fetched_one():
    """Without its norm the root's own gamma could be called layer_norm.weight."""
    net = Inside("emb", nn.Embedding(7, 3), layer_norm=nn.LayerNorm(3), out=nn.Linear(3, 2))
    net.gamma = nn.Parameter(torch.ones(3))
    state = prefixed(net.state_dict(), "module.")
    for leaf in ("weight", "bias"):
        del state[f"module.layer_norm.{leaf}"]
    cause = asked(net, state)
    assert cause.options == "--strip-module"
    assert cause.choices == ()
    assert cause.after.missing_keys == ("layer_norm.weight", "layer_norm.bias")


def test_twins_are_not_guessed_between():
    model = Transformer()
    cause = asked(model, Transformer(norms=("attention_norm", "ffn_norm")).state_dict())
    assert cause.rules == ()
    assert len(cause.choices) == 1
    assert "'blocks.#.attention_norm', 'blocks.#.ffn_norm'" in cause.choices[0]
    assert "'blocks.#.norm{1,2}'" in cause.choices[0]


def test_a_head_of_another_name():
    model = randomized(ResNet())
    state = rekeyed(model.state_dict(), lambda key: key.replace("fc.", "classifier."))
    cause = asked(model, state)
    assert cause.options == r"--rename '^classifier\.' fc."
    assert cause.sentence == "all 125 keys match after renaming 'classifier.' to 'fc.'"
    assert loads(model, mended(cause, state))


def test_two_heads_of_one_shape_are_not_guessed_between():
    model = Inside("net", VGG(), cls=nn.Linear(4, 4))
    state = Inside("net", VGG(), a=nn.Linear(4, 4), b=nn.Linear(4, 4)).state_dict()
    cause = asked(model, state)
    assert cause.rules == ()
    assert cause.choices == (
        "'a', 'b' could each be any of 'cls': one shape, and neither names nor order settle it",
    )


@pytest.mark.parametrize("prefix", ["", "module.", "bert."])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_layer_of_the_right_shape_is_no_proof(prefix, layers):
    """The head of a language model has a layer of the pooler's shape and last name."""
    net = Transformer(layers=layers)
    state = prefixed(
        Inside("net", net, cls=Inside("dense", nn.Linear(8, 8), norm=nn.LayerNorm(8))).state_dict(),
        prefix,
    )
    for wanted in (Inside("net", net, pooler=Inside("dense", nn.Linear(8, 8))),
                   Inside("net", net, pooler=Inside("dense", nn.Linear(8, 8)), head=nn.Linear(8, 2))):  # fmt: skip
        cause = asked(wanted, state)
        assert "pooler.dense.weight" in cause.after.missing_keys
        assert len(cause.after.loaded) == len(net.state_dict())


def test_what_words_and_order_leave_open_is_left_open():
    """The gate and the up projection of a Llama are twins, its two norms too."""

    def llama(key):
        for new, old in (
            ("attn.k", "attention.wk"), ("attn.q", "attention.wq"), ("attn.v", "attention.wv"),
            ("attn.out", "attention.wo"), ("gate", "feed_forward.w1"), ("down", "feed_forward.w2"),
            ("up", "feed_forward.w3"), ("norm1", "attention_norm"), ("norm2", "ffn_norm"),
        ):  # fmt: skip
            key = key.replace(f".{new}.", f".{old}.")
        return key.replace("blocks", "layers")

    model = nn.Module()
    model.blocks = nn.ModuleList()
    for _ in range(4):
        block = Inside(
            "attn", nn.ModuleDict({n: nn.Linear(8, 8, False) for n in ("q", "k", "v", "out")})
        )
        block.gate, block.down, block.up = (
            nn.Linear(*size, False) for size in ((8, 20), (20, 8), (8, 20))
        )
        block.norm1, block.norm2 = nn.RMSNorm(8), nn.RMSNorm(8)
        model.blocks.append(block)
    state = rekeyed(randomized(model).state_dict(), llama)
    cause = asked(model, state)
    made = mended(cause, state)
    assert len(cause.after.loaded) == 20
    for key in cause.after.loaded:
        assert torch.equal(made[key], model.state_dict()[key])
    assert {key.split(".")[2] for key in cause.after.missing_keys} == {
        "gate",
        "up",
        "norm1",
        "norm2",
    }
    assert len(cause.choices) == 2
    assert "w{1,3}" in cause.choices[0]


def test_another_net_is_not_made_to_fit():
    cause = asked(ResNet(), Transformer().state_dict())
    assert cause.rules == ()
    assert cause.options == ""
    assert cause.after == cause.match


def test_an_auxiliary_head_is_no_head():
    """Of what lies under `aux`, the smaller part has the names and shapes of what is missing."""
    aux = Inside("conv", nn.Conv2d(3, 4, 1), bn=nn.BatchNorm2d(4), fc=nn.Linear(32, 10))
    net = ResNet()
    net.aux = aux
    for prefix in ("", "module."):
        state = prefixed(net.state_dict(), prefix)
        for leaf in ("weight", "bias"):
            del state[f"{prefix}fc.{leaf}"]
        cause = asked(ResNet(), state)
        assert cause.after.missing_keys == ("fc.weight", "fc.bias")
        assert cause.options == ("--strip-module" if prefix else "")
