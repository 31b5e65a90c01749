"""load_into beside load_state_dict: every kind of net, every wrapper, refusals that touch nothing."""

from __future__ import annotations

import warnings
from collections import OrderedDict

import pytest
import torch
from expected_nets import NETS
from expected_support import quietly
from expected_support import trained as changed
from load_support import Net, equal, net, numbers, prefixed, saved
from torch import nn
from verbs_support import FIXTURES, data_offset

import ckptool
from ckptool.errors import (
    CkptError,
    CrcMismatch,
    DoesNotFit,
    ModelError,
    RuleMatchesNothing,
    Unsupported,
    UsageError,
)

HOW = ("", "module.", "_orig_mod.module.", "backbone.")
NOT_OURS = {"quantized_lstm"}  # its weights are objects of torch's C++, which nothing unpickles


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says of quantized layers that they are deprecated
        yield


def same(one, two):
    if nn.parameter.is_lazy(one):
        return nn.parameter.is_lazy(two)
    if isinstance(one, torch.Tensor):
        if one.is_quantized:
            one, two = one.dequantize(), two.dequantize()
        return one.shape == two.shape and torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two


@pytest.mark.parametrize("name", [name for name in NETS if name not in NOT_OURS])
def test_every_net_has_what_torch_would_load(name, tmp_path):
    """Whatever hooks it has, and whatever wrapped it when it was saved."""
    state = quietly(lambda: changed(NETS[name]()))
    theirs = quietly(NETS[name])
    theirs.load_state_dict(OrderedDict(state) if name == "loading_by_hand" else state)
    for prefix in HOW:
        path = saved({"epoch": 1, "state_dict": prefixed(state, prefix) if prefix else state}, tmp_path / "a.pth")  # fmt: skip
        model = quietly(NETS[name])

        report = ckptool.load_into(model, path)

        assert report.match.fits, prefix
        assert same(theirs.state_dict(), model.state_dict()), prefix
        assert report.extras == {"epoch": 1}


def test_what_is_not_unpickled_is_not_loaded(tmp_path):
    path = saved(quietly(NETS["quantized_lstm"]).state_dict(), tmp_path / "a.pth")
    model = quietly(NETS["quantized_lstm"])

    with pytest.raises(Unsupported, match=r"a torch.ScriptObject, which ckptool does not unpickle"):
        ckptool.load_into(model, path)


# -- wrappers on our side ----------------------------------------------------------------------
@pytest.mark.parametrize("prefix", HOW)
@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile, lambda m: nn.DataParallel(torch.compile(m))], ids=["dp", "compile", "both"])  # fmt: skip
def test_a_wrapped_model_takes_a_file_of_any_other(wrap, prefix, tmp_path):
    state = net(1).state_dict()
    path = saved(prefixed(state, prefix) if prefix else state, tmp_path / "a.pth")
    inner = net(2)

    report = ckptool.load_into(wrap(inner), path)

    assert equal(inner.state_dict(), state)
    assert report.loaded == tuple(state)  # names of the net itself, to freeze by
    assert report.missing_keys == report.unexpected_keys == report.mismatched == ()


def test_a_model_that_wraps_a_part_takes_a_plain_file(tmp_path):
    state = net(1).state_dict()
    model = net(2)
    model.features = nn.DataParallel(model.features)
    path = saved(state, tmp_path / "a.pth")

    report = ckptool.load_into(model, path)

    assert report.match.fits
    assert equal(model.features.module.state_dict(), {k[9:]: v for k, v in state.items() if k[:9] == "features."})  # fmt: skip
    back = net(3)
    ckptool.load_into(back, saved(model.state_dict(), path))
    assert equal(back.state_dict(), state)


# -- which part of the file --------------------------------------------------------------------
def test_at_names_the_state_dict(tmp_path):
    one, two = net(1).state_dict(), net(2).state_dict()
    path = saved({"netG": one, "netD": two, "epoch": 4}, tmp_path / "a.pth")
    model = net(3)

    assert ckptool.load_into(model, path, at="netD").table == ("netD",)
    assert equal(model.state_dict(), two)
    with pytest.raises(UsageError, match="there is no state_dict at 'netX'") as info:
        ckptool.load_into(model, path, at="netX")
    assert "'netG', 'netD'" in info.value.hint


def test_every_container(tmp_path):
    state = net(1).state_dict()
    source = saved(state, tmp_path / "a.pth")
    for name, options in {"a.safetensors": {}, "old.pth": {"to": "legacy"}, "shards": {"to": "shards", "max_shard_size": 300}}.items():  # fmt: skip
        ckptool.convert(source, tmp_path / name, fsync=False, **options)
        model = net(2)
        assert ckptool.load_into(model, tmp_path / name).match.fits
        assert equal(model.state_dict(), state)
    with open(source, "rb") as f:
        assert ckptool.load_into(net(2), f).match.fits


def test_a_pickled_model_gives_its_state(tmp_path):
    whole = nn.DataParallel(net(1))
    path = saved({"model": whole, "epoch": 2}, tmp_path / "a.pth")
    model = net(2)

    report = ckptool.load_into(model, path)

    assert equal(model.state_dict(), whole.module.state_dict())
    assert report.extras == {"epoch": 2}


# -- rules -------------------------------------------------------------------------------------
def test_rules_of_ones_own(tmp_path):
    state = net(1).state_dict()
    odd = OrderedDict((f"net.{k.replace('fc', 'head')}", v) for k, v in state.items())
    path = saved({**odd, "net.extra": torch.ones(1)}, tmp_path / "a.pth")
    model = net(2)
    rules = [("strip-prefix", "net."), ("rename", "^head", "fc"), ("drop", "extra")]

    report = ckptool.load_into(model, path, rules=rules)

    assert equal(model.state_dict(), state)
    assert report.renames["net.head.weight"] == "fc.weight"
    assert report.left_out == ("net.extra",)
    with pytest.raises(RuleMatchesNothing, match=r"--strip-prefix other\. matches no key"):
        ckptool.load_into(model, path, rules=[("strip-prefix", "other.")])
    for odd in ("strip-module", ("rename", "a", "b", "c")):
        with pytest.raises(UsageError, match="is no row such as"):
            ckptool.load_into(model, path, rules=[odd])
    with pytest.raises(UsageError, match="no key rule is called 'strip'"):
        ckptool.load_into(model, path, rules=[("strip", "net.")])
    with pytest.raises(UsageError, match="rules='all'"):
        ckptool.load_into(model, path, rules="all")


def test_without_rules_names_count_as_they_stand(tmp_path):
    state = net(1).state_dict()
    path = saved(prefixed(state, "module."), tmp_path / "a.pth")
    model = net(2)
    before = numbers(model)

    for strict in (True, False):  # nothing would load: strict=False does not hide that
        with pytest.raises(DoesNotFit, match=r"all 9 keys match after removing 'module.'") as info:
            ckptool.load_into(model, path, rules=None, strict=strict)
        assert "rules='auto' loads 9 keys" in info.value.hint
        assert f"ckptool convert {path}" in info.value.hint
    assert numbers(model) == before
    assert ckptool.load_into(model, path, rules="auto").match.fits


def test_metadata_follows_the_rule(tmp_path):
    """A BatchNorm without its counter is forgiven or not by the version of its layer."""
    state = prefixed(net(1).state_dict(), "module.")
    del state["module.features.1.num_batches_tracked"]
    path = saved(state, tmp_path / "a.pth")

    with pytest.raises(DoesNotFit, match=r"1 missing \(features.1.num_batches_tracked\)"):
        ckptool.load_into(net(2), path)
    state._metadata["module.features.1"] = {"version": 1}
    assert ckptool.load_into(net(2), saved(state, path)).match.fits


# -- strictness --------------------------------------------------------------------------------
def short(tmp_path):
    state = net(1).state_dict()
    del state["fc.bias"]
    state["more"] = torch.ones(3)
    return saved(state, tmp_path / "a.pth"), state


def test_strict_asks_about_keys(tmp_path):
    path, state = short(tmp_path)
    model = net(2)
    before = numbers(model)

    with pytest.raises(DoesNotFit, match=r"1 missing \(fc.bias\).*nothing loaded. Cause: ") as info:
        ckptool.load_into(model, path, rules=None)
    assert "strict=False loads the 8 that fit" in info.value.hint
    assert numbers(model) == before

    bias = model.fc.bias.clone()
    report = ckptool.load_into(model, path, rules=None, strict=False)
    assert report.missing_keys == ("fc.bias",)
    assert report.unexpected_keys == ("more",)
    assert report.loaded == tuple(key for key in state if key != "more")
    assert torch.equal(model.fc.bias, bias)
    assert torch.equal(model.fc.weight, state["fc.weight"])


def test_mismatched_asks_about_shapes(tmp_path):
    path = saved(net(1, classes=7).state_dict(), tmp_path / "a.pth")
    for strict in (True, False):  # as in torch, strict=False does not pass over shapes
        model = net(2)
        before = numbers(model)
        with pytest.raises(DoesNotFit, match=r"2 of another shape \(fc.weight \[7, 4\], in the model \[5, 4\]"):  # fmt: skip
            ckptool.load_into(model, path, strict=strict)
        assert numbers(model) == before
        head = model.fc.weight.clone()
        report = ckptool.load_into(model, path, strict=strict, mismatched="skip")
        assert [row.key for row in report.mismatched] == ["fc.weight", "fc.bias"]
        assert report.missing_keys == report.unexpected_keys == ()  # a skipped key is neither
        assert torch.equal(model.fc.weight, head)
        assert set(report.loaded) == set(model.state_dict()) - {"fc.weight", "fc.bias"}
    with pytest.raises(UsageError, match="one of 'error', 'skip'"):
        ckptool.load_into(net(2), path, mismatched="ignore")


def test_equal_candidates_are_not_guessed_between(tmp_path):
    path = saved({"a": net(1).state_dict(), "b": net(2).state_dict()}, tmp_path / "a.pth")
    state = OrderedDict((f"{w}.{k}", v) for w in ("student", "teacher") for k, v in net(1).state_dict().items())  # fmt: skip

    assert ckptool.load_into(net(3), path).match.fits  # one is the weights by name or order
    path = saved(state, tmp_path / "b.pth")
    with pytest.raises(DoesNotFit, match="fit the model equally well") as info:
        ckptool.load_into(net(3), path)
    assert "student" in info.value.hint
    assert "teacher" in info.value.hint


# -- untouched ---------------------------------------------------------------------------------
def test_a_damaged_file_touches_nothing(tmp_path):
    path = saved(net(1).state_dict(), tmp_path / "a.pth")
    with open(path, "r+b") as f:
        f.seek(data_offset(path, "data/7") + 4)
        f.write(b"\xff")
    model = net(2)
    before = numbers(model)

    with pytest.raises(CrcMismatch, match=r"a\.pth: bytes of 'fc.weight'"):
        ckptool.load_into(model, path)
    assert numbers(model) == before
    ckptool.load_into(model, path, check=False)


class Failing(Net):
    """Its own hook copies, then fails: where torch leaves half of a model behind."""

    def _load_from_state_dict(self, state, prefix, *rest):
        super()._load_from_state_dict(state, prefix, *rest)
        self.tables.append(len(state))
        self.register_buffer("made", torch.ones(1))
        if float(next(iter(state.values())).sum()) != 0:
            raise ValueError("no such luck")


class FailingLater(Failing):
    """Fails only after all of its children were loaded."""

    _load_from_state_dict = Net._load_from_state_dict

    def load_state_dict(self, state, strict=True):
        result = super().load_state_dict(state, strict)
        self.tables.append(1)
        if float(self.fc.weight.abs().sum()) > 1e-6:
            raise ValueError("no such luck")
        return result


@pytest.mark.parametrize("kind", [Failing, FailingLater])
def test_hooks_that_fail_in_the_middle_touch_nothing(kind, tmp_path):
    path = saved(net(1).state_dict(), tmp_path / "a.pth")
    model = kind()
    model.tables = []
    nn.init.zeros_(model.fc.weight)
    before, attributes = numbers(model), dict(model.__dict__)

    with pytest.raises(ModelError, match="no such luck"):
        ckptool.load_into(model, path)
    assert numbers(model) == before
    assert model.__dict__ == attributes
    assert model.tables == []
    assert not hasattr(model, "made")


def test_a_file_without_numbers_touches_nothing(tmp_path):
    state = net(1).state_dict()
    state["fc.weight"] = torch.empty(5, 4, device="meta")
    model = net(2)
    before = numbers(model)

    with pytest.raises(Unsupported, match=r"holds no numbers of it, only its shape.*key 'fc.weight'"):  # fmt: skip
        ckptool.load_into(model, saved(state, tmp_path / "a.pth"))
    assert numbers(model) == before


def test_a_cast_that_loses_something_is_said(tmp_path):
    state = net(1).state_dict()
    state["features.1.num_batches_tracked"] = torch.tensor(2.5)
    state["fc.bias"] = torch.ones(5, dtype=torch.complex64)
    model = net(2)

    report = ckptool.load_into(model, saved(state, tmp_path / "a.pth"))

    (note,) = report.notes
    assert "features.1.num_batches_tracked (float32 to int64), fc.bias (complex64 to float32)" in note.text  # fmt: skip
    assert ckptool.load_into(net(2).half(), saved(net(1).state_dict(), tmp_path / "b.pth")).notes == ()  # fmt: skip


def test_hooks_that_answer_otherwise_touch_nothing(tmp_path):
    """A hook that drops what it was given once it sees the numbers."""
    model = net(2)

    def drop(module, state, *rest):
        if float(state["fc.bias"].sum()) != 0:
            del state["fc.bias"]

    model.register_load_state_dict_pre_hook(drop)
    before = numbers(model)

    with pytest.raises(ModelError, match=r"took other keys than its shapes told: fc.bias"):
        ckptool.load_into(model, saved(net(1).state_dict(), tmp_path / "a.pth"))
    assert numbers(model) == before


def test_what_is_no_model_says_so(tmp_path):
    with pytest.raises(UsageError, match="a type is no model") as info:
        ckptool.load_into(Net, FIXTURES / "net_plain.pth")
    assert "load_into(Net(), path)" in info.value.hint
    with pytest.raises(CkptError, match="no such file"):
        ckptool.load_into(net(), tmp_path / "none.pth")


# -- the report --------------------------------------------------------------------------------
def test_the_report_as_text_and_data(tmp_path):
    import json

    path = saved({"state_dict": prefixed(net(1, classes=7).state_dict(), "module."), "epoch": 7}, tmp_path / "a.pth")  # fmt: skip

    report = ckptool.load_into(net(2), path, mismatched="skip")

    text = str(report)
    assert f"{path} at 'state_dict' into Net: 7 keys loaded" in text
    assert "after removing 'module.'" in text
    assert "kept fc.weight: [5, 4] in the model, [7, 4] in the file" in text
    assert "extras: epoch" in text
    assert report._repr_html_().startswith("<pre>")
    data = json.loads(json.dumps(report.to_dict()))
    assert data["mismatched"][0] == {"key": "fc.weight", "file_shape": [7, 4], "model_shape": [5, 4]}  # fmt: skip
    assert data["loaded"] == list(report.loaded)
    with pytest.raises(AttributeError):
        report.file = "other"
