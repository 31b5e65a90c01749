"""What people report when a checkpoint does not go into a model, one small file for each: names,
the wrong level, shapes.
"""

from __future__ import annotations

import io
from collections import OrderedDict

import pytest
import torch
from causes_support import rekeyed
from reports_support import NETS, SPACE, asked, build, holds, loads, mended, other, screen
from torch import nn
from verbs_support import cli

import ckptool
from ckptool.errors import DoesNotFit


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)


# -- names -------------------------------------------------------------------------------------
def test_a_prefix_on_some_keys_is_not_cut_by_length(capsys):
    """k[7:] cuts seven letters off the names that do not carry 'module.'."""
    state = build("mixed").state_dict()
    rows = [(f"module.{k}" if k.startswith("backbone") else k, v) for k, v in state.items()]
    torch.save(OrderedDict(rows), "net.pth")
    match = asked(capsys, "net.pth", "mixed")
    assert match["missing_keys"] == ["backbone.weight", "backbone.bias"]
    assert match["cause"] == "all 4 keys match after removing 'module.'"
    assert list(mended(capsys, match)) == list(state)


def test_a_prefix_whose_text_returns_goes_once(capsys):
    keys = ["_model.field._model.weight", "_model.field.bias", "_model.proposal_networks.0.weight"]
    torch.save({"pipeline": OrderedDict((k, torch.ones(2)) for k in keys), "step": 10}, "s.ckpt")
    found = mended(capsys, asked(capsys, "s.ckpt", "fields"))
    assert set(found["pipeline"]) == set(build("fields").state_dict())
    assert found["step"] == 10


def test_gamma_and_beta_as_whole_components_only(capsys):
    keys = ["enc.LayerNorm.gamma", "enc.LayerNorm.beta", "block.gamma", "noise.alphabeta"]
    torch.save(OrderedDict((key, torch.ones(2)) for key in keys), "old.bin")
    assert list(mended(capsys, asked(capsys, "old.bin", "bert"))) == list(
        build("bert").state_dict()
    )


# -- the wrong level ---------------------------------------------------------------------------
def test_strict_false_that_loads_nothing_is_said_loudly(capsys):
    torch.save(build().state_dict(), "net.pth")
    out = screen(capsys, "net.pth", "Wrapped")
    assert "as it stands 0 of 9 keys match: load_state_dict(strict=False) would load nothing" in out
    assert "all 9 keys match after adding 'model.'" in out
    model = SPACE["Wrapped"]()
    said = model.load_state_dict(torch.load("net.pth"), strict=False)  # torch raises nothing
    assert len(said.missing_keys) == 8
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(DoesNotFit, match="none of its 9 keys is in the file"):
        ckptool.load_into(model, "net.pth", strict=False, rules=None)
    assert holds(model, before)
    assert len(ckptool.load_into(model, "net.pth").loaded) == 9


def test_the_training_dict_is_opened(capsys):
    net = nn.DataParallel(build())
    torch.save({"epoch": 7, "arch": "net", "state_dict": net.state_dict(), "best": 71.5}, "net.pth")
    match = asked(capsys, "net.pth")
    assert match["table"] == ["state_dict"]
    found = mended(capsys, match)
    assert loads(found.pop("state_dict"))
    assert found == {"epoch": 7, "arch": "net", "best": 71.5}


def test_the_averaged_weights_are_named_where_they_are_asked_for(capsys):
    plain, averaged = build().state_dict(), nn.DataParallel(other()).state_dict()
    torch.save({"state_dict": plain, "state_dict_ema": averaged, "epoch": 1}, "timm.pth.tar")
    assert asked(capsys, "timm.pth.tar")["fits"]
    out = screen(capsys, "timm.pth.tar", "net", "--at", "state_dict_ema")
    assert 'ckptool.load_into(net, "timm.pth.tar", at="state_dict_ema")' in out
    net = build()
    report = ckptool.load_into(net, "timm.pth.tar", at="state_dict_ema")
    assert (report.table, report.extras) == (("state_dict_ema",), {"epoch": 1})
    assert holds(net, other().state_dict())
    found = mended(capsys, asked(capsys, "timm.pth.tar", "net", "--at", "state_dict_ema"))
    assert loads(found["state_dict_ema"])
    assert list(found["state_dict"]) == list(plain)


@pytest.mark.parametrize("output", ["out.ckpt", "out.safetensors"])
def test_a_state_dict_in_the_state_dict(capsys, output):
    """Torch calls the inner one unexpected; --fit leaves it out, and no tensor of it comes along."""
    outer = rekeyed(build().state_dict(), lambda key: f"model.{key}")
    outer["state_dict"] = {"extra.weight": torch.ones(2)}
    torch.save({"state_dict": outer, "global_step": 3}, "merged.ckpt")
    match = asked(capsys, "merged.ckpt")
    assert (match["after"]["missing_keys"], match["after"]["unexpected_keys"]) == (
        [],
        ["state_dict"],
    )
    words = ("convert", "merged.ckpt", "--fit", "nets.py:net", "-o", output)
    status, _, err = cli(capsys, *words)
    assert status == 0
    assert "dropped   1: state_dict" in err
    if output.endswith(".ckpt"):
        found = torch.load(output)
        assert loads(found["state_dict"])
        assert found["global_step"] == 3
    else:
        from safetensors.torch import load_file

        assert loads(load_file(output))


def test_extra_state_that_no_layer_keeps(capsys):
    state = build().state_dict()
    state["fc._extra_state"] = io.BytesIO(b"amax history")
    state["conv._extra_state"] = None
    state["bn._extra_state"] = torch.tensor([1, 2], dtype=torch.uint8)
    torch.save(state, "te.pt")
    match = asked(capsys, "te.pt")
    said = other().load_state_dict(torch.load("te.pt", weights_only=False), strict=False)
    assert match["unexpected_keys"] == said.unexpected_keys
    assert len(said.unexpected_keys) == 3
    assert match["missing_keys"] == match["mismatched"] == []
    assert "no weights" in " ".join(match["findings"])
    status, _, err = cli(capsys, "convert", "te.pt", "--fit", "nets.py:net", "-o", "out.pt")
    assert status == 0, err
    assert loads(torch.load("out.pt", weights_only=True))  # the stream went with its entry
    net = other()
    assert ckptool.load_into(net, "te.pt", strict=False).unexpected_keys
    assert holds(net, build().state_dict())


# -- shapes ------------------------------------------------------------------------------------
def test_a_head_of_another_size(capsys):
    torch.save(build(classes=1000).state_dict(), "imagenet.pth")
    match = asked(capsys, "imagenet.pth")
    assert match["mismatched"] == [
        {"key": "fc.weight", "file_shape": [1000, 4], "model_shape": [10, 4]},
        {"key": "fc.bias", "file_shape": [1000], "model_shape": [10]},
    ]
    assert match["findings"] == [
        "the head 'fc' was trained for 1,000 outputs, the model has 10",
        "strict=False does not pass over shapes: torch raises on them all the same",
    ]
    assert match["fix"] == "ckptool convert imagenet.pth --drop 'fc.*' -o imagenet.fit.pth"
    net = other()
    said = net.load_state_dict(mended(capsys, match), strict=False)
    assert said.missing_keys == ["fc.weight", "fc.bias"]
    fine = other()
    report = ckptool.load_into(fine, "imagenet.pth", mismatched="skip")
    assert holds(fine, net.state_dict())
    frozen = ckptool.freeze(fine, only=report.loaded)
    assert frozen.kept == ("fc.weight", "fc.bias")
    assert [name for name, p in fine.named_parameters() if p.requires_grad] == list(frozen.kept)


def test_another_variant_is_no_new_head(capsys):
    torch.save(build(width=8).state_dict(), "big.pth")
    match = asked(capsys, "big.pth")
    assert len(match["mismatched"]) == 7
    said = " ".join(match["findings"])
    assert "another variant of the net, no new head" in said
    assert "2 times as wide" in said
    status, _, err = cli(capsys, "convert", "big.pth", "--fit", "nets.py:net", "-o", "out.pth")
    assert status == 1
    assert "7 mismatched (conv.weight, conv.bias, bn.weight and 4 more); nothing written" in err
