"""What still differs, each in a sentence of its own."""

from __future__ import annotations

import copy
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
from torch.nn.utils import prune

from ckptool.keynames import Rule

LOUD = "as it stands 0 of 125 keys match: load_state_dict(strict=False) would load nothing"
SHAPES = "strict=False does not pass over shapes: torch raises on them all the same"


def without(state, *starts):
    kept = OrderedDict((k, v) for k, v in state.items() if not k.startswith(starts))
    kept._metadata = getattr(state, "_metadata", None)
    return kept


def test_nothing_would_load():
    cause = asked(ResNet(), prefixed(ResNet().state_dict(), "net."))
    assert cause.findings == (LOUD,)
    assert asked(ResNet(), ResNet().state_dict()).findings == ()


def test_next_to_nothing_would_load():
    model = Inside("backbone", ResNet(), fc=nn.Linear(2, 2))
    state = {**ResNet().state_dict(), "fc.weight": torch.ones(2, 2), "fc.bias": torch.ones(2)}
    del state["fc.bias"]
    cause = asked(model, without(state, "zzz"))
    assert "as it stands 1 of 127 keys match" in cause.findings[0]
    assert "would load no more and say nothing" in cause.findings[0]


# -- shapes ------------------------------------------------------------------------------------
@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("more", [{}, {"total_ops": torch.zeros(1)}])
def test_every_name_meets_and_no_shape(wrapper, more):
    state = {f"{wrapper}{key}": t for key, t in {**nn.LSTM(5, 9).state_dict(), **more}.items()}
    cause = asked(nn.LSTM(4, 8), state)
    assert cause.sentence.startswith("0 of 4 keys match, 4 differ in shape")
    assert cause.sentence.endswith(f"after removing '{wrapper}'")
    assert not cause.match.mismatched
    assert [m.file_shape for m in cause.after.mismatched] == [(36, 5), (36, 9), (36,), (36,)]


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_replaced_head(prefix):
    state = prefixed(ResNet(classes=1000).state_dict(), prefix)
    cause = asked(ResNet(), state)
    said = "123 of 125 keys match, 2 differ in shape"
    flags = "--strip-module " if prefix else ""
    assert cause.sentence == (f"{said} after removing 'module.'" if prefix else said)
    head = "the head 'fc' was trained for 1,000 outputs, the model has 10"
    assert cause.findings == ((LOUD, head, SHAPES) if prefix else (head, SHAPES))
    assert cause.partial == f"{flags}--drop 'fc.*'"
    assert cause.options == flags.strip()
    assert [m.key for m in cause.after.mismatched] == ["fc.weight", "fc.bias"]


def test_another_width_is_another_variant():
    for prefix in ("", "module.", "backbone."):
        cause = asked(ResNet(), prefixed(ResNet(width=8).state_dict(), prefix))
        text = cause.findings[-2]
        assert "another variant of the net, no new head: 104 of 105 tensors" in text
        assert "'conv1.weight' is [8, 3, 7, 7] in the file and [4, 3, 7, 7] in the model" in text
        assert "2 times as wide" in text
        assert cause.partial == ""
        assert (cause.options != "") is (prefix != "")


def test_one_width_inside_is_no_head():
    def net(hidden):
        return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3), nn.Linear(3, 3),
                             nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))  # fmt: skip

    said = " ".join(asked(net(8), net(6).state_dict()).findings)
    assert "head" not in said
    assert "3 keys of other shapes" in said
    assert "'0.{weight,bias}'" in said


def test_other_input_channels():
    cause = asked(ResNet(), ResNet(ins=1).state_dict())
    assert cause.findings == ("'conv1' was trained for 1 input channel, the model has 3", SHAPES)
    assert cause.sentence == "124 of 125 keys match, 1 differs in shape"


def test_another_vocabulary():
    model, state = Transformer(vocab=22), Transformer(vocab=20).state_dict()
    said = asked(model, state).findings
    assert "'emb': 20 rows in the file, 22 in the model: another vocabulary" in said


def test_positions_of_another_length():
    model = nn.Module()
    model.net, model.pos_embed = ResNet(), nn.Parameter(torch.ones(1, 197, 8))
    state = model.state_dict()
    state["pos_embed"] = torch.ones(1, 577, 8)
    text = asked(model, state).findings[0]
    assert text.startswith("'pos_embed' is [1, 577, 8] in the file and [1, 197, 8] in the model")
    assert "interpolated" in text


def test_transposed_weights():
    model = nn.Sequential(*(nn.Linear(3, 5 + i) for i in range(4)))
    state = OrderedDict((k, v.T if v.dim() == 2 else v) for k, v in model.state_dict().items())
    text = asked(model, state).findings[0]
    assert text.startswith("4 weights transposed, as '0.weight' is [3, 5] in the file and [5, 3]")


def test_a_convolution_of_one_pixel_is_no_linear_layer():
    state = nn.Sequential(nn.Conv2d(4, 5, 1), nn.Linear(5, 5)).state_dict()
    text = asked(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5)), state).findings[0]
    assert text.startswith("1 tensor with as many elements in another shape, as '0.weight'")


# -- layers ------------------------------------------------------------------------------------
def test_a_deeper_net_is_another_variant_though_every_key_is_there():
    """Dropping the further blocks would load, and be silently wrong."""
    cause = asked(ResNet(), ResNet((3, 4, 6, 3)).state_dict())
    assert cause.sentence == "125 of 125 keys match, 96 are unexpected"
    assert (cause.rules, cause.options) == ((), "")
    assert len(cause.findings) == 1
    assert "another variant of the net" in cause.findings[0]
    for layer, ours, theirs in (("layer1", 3, 2), ("layer3", 6, 2)):
        assert f"{ours} of '{layer}.#' in the file and {theirs} in the model" in cause.findings[0]
    deeper = asked(ResNet((3, 4, 6, 3)), prefixed(ResNet().state_dict(), "module."))
    assert deeper.options == "--strip-module"
    assert "2 of 'layer3.#' in the file and 6 in the model" in deeper.findings[-1]


def test_parts_of_every_block_are_no_surplus():
    """Squeeze-and-excitation, say: the net is another one."""
    state = ResNet().state_dict()
    for n in (0, 1):
        state[f"layer1.{n}.se.weight"] = torch.ones(4, 4)
    cause = asked(ResNet(), state)
    assert cause.rules == ()
    assert cause.findings == ("the file has more: 'layer1.0.se', 'layer1.1.se' (2 keys)",)


@pytest.mark.parametrize(
    ("gone", "said"),
    [("fc.", "'fc' (2 keys)"), ("layer2.1.conv2.", "'layer2.1.conv2' (1 key)"),
     ("layer2.0.", "'layer2.0' (19 keys)"), ("layer3.", "'layer3' (")],
)  # fmt: skip
def test_a_layer_that_is_missing(gone, said):
    for prefix in ("", "module."):
        state = without(ResNet().state_dict(), gone)
        cause = asked(ResNet(), prefixed(state, prefix))
        texts = [text for text in cause.findings if text.startswith("not in the file")]
        assert len(texts) == 1
        assert said in texts[0]
        assert not any("variant" in text or "head" in text for text in cause.findings)
        assert cause.options == ("--strip-module" if prefix else "")


def test_a_head_that_the_model_has_not():
    model = ResNet()
    model.fc = nn.Identity()
    state = randomized(ResNet()).state_dict()
    cause = asked(model, state)
    assert cause.rules == (Rule("drop", "fc.**"),)
    assert cause.findings == (
        "the file also holds 'fc' (2 keys), which the model does not have: left out",
    )
    assert loads(model, mended(cause, state))


def test_another_head():
    model = ResNet()
    model.fc = nn.Sequential(nn.Dropout(), nn.Linear(32, 7))
    cause = asked(model, ResNet().state_dict())
    assert cause.findings == (
        "another head: the file has 'fc.{weight,bias}' (2 keys), the model 'fc.1' (2 keys)",
    )
    assert cause.rules == ()


def test_another_net():
    cause = asked(ResNet(), Transformer().state_dict())
    assert cause.findings[0] == LOUD
    assert cause.findings[1] == "the model's 105 keys are not in the file: it may be another net's"


# -- entries that are no weights ---------------------------------------------------------------
def test_counters_of_a_profiler():
    model = randomized(ResNet())
    state = copy.copy(model.state_dict())
    for name, _ in model.named_modules():
        for leaf in ("total_ops", "total_params"):
            state[f"{name}.{leaf}".lstrip(".")] = torch.zeros(1, dtype=torch.float64)
    for prefix in ("", "module."):
        cause = asked(model, prefixed(state, prefix))
        assert cause.after.fits
        assert loads(model, mended(cause, prefixed(state, prefix)))
        assert "counters left by a FLOP profiler (total_ops, total_params)" in cause.findings[-1]
        flags = "--drop total_ops --drop total_params"
        assert cause.options == (f"--strip-module {flags}" if prefix else flags)


@pytest.mark.parametrize("leaf", ["position_ids", "inv_freq", "masked_bias"])
def test_buffers_that_are_no_longer_saved(leaf):
    model = randomized(Transformer())
    state = copy.copy(model.state_dict())
    state[f"blocks.0.attn.{leaf}"] = torch.arange(6).unsqueeze(0)
    cause = asked(model, state)
    assert cause.options == f"--drop {leaf}"
    assert loads(model, mended(cause, state))


def test_a_causal_mask_is_dropped_and_no_bias():
    model = randomized(Transformer())
    state = copy.copy(model.state_dict())
    for n in range(3):
        state[f"blocks.{n}.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8).tril()
    cause = asked(model, state)
    assert cause.options == "--drop '**.attn.bias'"
    assert loads(model, mended(cause, state))
    for n in range(3):
        state[f"blocks.{n}.attn.bias"] = torch.ones(8)
    assert asked(model, state).rules == ()


@pytest.mark.parametrize(("version", "missing"), [(1, 0), (2, 1), (None, 0)])
def test_counters_of_batch_norm(version, missing):
    model = Inside("bn", nn.BatchNorm2d(3), fc=nn.Linear(3, 3))
    state = without(model.state_dict(), "bn.num_batches")
    if version is None:
        state._metadata = None
    else:
        state._metadata = {"bn": {"version": version}}
    cause = asked(model, state)
    assert len(cause.after.missing_keys) == missing
    (text,) = cause.findings
    if missing:
        assert text.startswith(
            "no num_batches_tracked in the file for 'bn' though it says layer version 2"
        )
        assert cause.sentence == "6 of 7 keys match, 1 is missing"
    else:
        assert "torch starts it at 0" in text
        assert cause.sentence == "all 6 keys of the file match"


def test_entries_that_are_no_tensors():
    model = ResNet()
    state = copy.copy(model.state_dict())
    state["epoch"] = 3
    state["conv1._extra_state"] = None
    cause = asked(model, state)
    assert cause.after.unexpected_keys == ("epoch", "conv1._extra_state")
    assert cause.findings == (
        "'epoch' in the state_dict is no tensor: torch calls it unexpected",
        "'conv1._extra_state': extra state that the model keeps none of, no weights",
    )


def test_entries_that_are_no_tensors_under_a_wrapper():
    state = prefixed(ResNet().state_dict(), "module.")
    state["module.classes"] = ["cat", "dog"]
    cause = asked(ResNet(), state)
    assert cause.findings == (
        LOUD,
        "'classes' in the state_dict is no tensor: torch calls it unexpected",
    )


def test_extra_state_that_is_missing():
    class Kept(nn.Linear):
        def get_extra_state(self):
            return {"scale": 1}

        def set_extra_state(self, state):
            pass

    cause = asked(Kept(2, 2), nn.Linear(2, 2).state_dict())
    assert cause.after.missing_keys == ("_extra_state",)
    assert cause.findings == ("'_extra_state' missing: extra state of a layer, no weights",)


def test_a_tie_that_the_file_keeps_once():
    model = Transformer()
    cause = asked(model, without(model.state_dict(), "head."))
    assert cause.findings == (
        "'head.weight' is missing and is the same tensor as 'emb.weight', which loads: nothing is lost, strict=True refuses all the same",
    )
    other = asked(model, without(model.state_dict(), "emb."))
    assert "'emb.weight' is missing and is the same tensor as 'head.weight'" in other.findings[0]


def test_a_pruned_net():
    model = Inside("a", nn.Linear(3, 4), b=ResNet())
    pruned = copy.deepcopy(model)
    prune.l1_unstructured(pruned.a, "weight", 2)
    cause = asked(model, pruned.state_dict())
    assert cause.rules == ()
    assert cause.findings[0].startswith(
        "'a.weight' pruned: torch.nn.utils.prune keeps _orig and _mask"
    )
    assert "a.weight" in cause.after.missing_keys


def test_keys_below_a_tensor():
    state = OrderedDict((f"layers.{i}.weight", torch.ones(2)) for i in (1, 10, 18))
    model = Inside(
        "layers", nn.ModuleDict({str(i): nn.LayerNorm(2, bias=False) for i in (1, 10, 18)})
    )
    state["layers.1.weight.lora_A"] = torch.ones(2)
    cause = asked(model, state)
    assert cause.findings == (
        "'layers.1.weight.lora_A' below the name of a tensor: no layer reads it",
    )


def test_a_scalar_in_place_of_a_tensor():
    state = rekeyed(VGG().state_dict(), str)
    state["classifier.0.bias"] = 3
    cause = asked(VGG(), state)
    assert (
        cause.findings[0]
        == "'classifier.0.bias': the file has no tensor there, or one without a shape"
    )
