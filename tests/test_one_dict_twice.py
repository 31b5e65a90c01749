"""One state_dict under two names, as `{"model": weights, "ema": weights}` is pickled: one table, found
under both.
"""

import pytest
import torch
from verbs_support import cli

import ckptool


@pytest.fixture
def net(tmp_path):
    path, weights = tmp_path / "net.pth", torch.nn.Linear(3, 2).state_dict()
    torch.save({"model": weights, "epoch": 3, "ema": weights, "deep": {"er": weights}}, path)
    return path


def same(one, two):
    return list(one) == list(two) and all(torch.equal(one[key], two[key]) for key in one)


def test_inspect_names_the_first_place(net, capsys):
    status, text, _ = cli(capsys, "inspect", net)
    assert status == 0
    assert "ema     the same object as 'model'" in text
    assert text.count("weight") == 1 + text.count("weights")


@pytest.mark.parametrize("place", ["model", "ema", "deep.er"])
def test_each_name_is_a_place_to_take_it_from(net, tmp_path, capsys, place):
    loaded = torch.load(net)
    for suffix in (".pth", ".safetensors"):
        out = tmp_path / f"out{suffix}"
        status, _, said = cli(capsys, "convert", net, "-o", out, "--select", place)
        assert status == 0
        assert "left behind: epoch" in said
        assert same(ckptool.load(out), loaded["model"])
    assert cli(capsys, "inspect", net, "--at", place)[1].count("float32") == 3
    assert cli(capsys, "diff", net, tmp_path / "out.pth", "--at", place)[0] == 0


def test_its_keys_are_renamed_under_every_name(net, tmp_path, capsys):
    out = tmp_path / "out.pth"
    said = cli(capsys, "convert", net, "-o", out, "--add-module")[2]
    assert "(epoch, deep kept)" in said
    new, old = torch.load(out), torch.load(net)
    renamed = {f"module.{key}": value for key, value in old["model"].items()}
    for found in (new["model"], new["ema"], new["deep"]["er"]):
        assert same(found, renamed)


def test_the_state_of_a_pickled_optimizer_is_no_set_of_weights(tmp_path, capsys):
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    path = tmp_path / "net.pth"
    torch.save({"model": net.state_dict(), "opt": optimizer}, path)
    found = ckptool.inspect(path)
    assert [table.path for table in found.checkpoint.tables] == [("model",)]
    assert "sets of weights" not in cli(capsys, "inspect", path)[1]


ASIDE = {
    "config first": ({"config": {"init": 0}, "model": 0, "n": 1}, ["model"]),
    "an optimizer's name first": ({"optimizer_init": 0, "state_dict": 0}, ["state_dict"]),
    "all of a dict": ({"args": {"g": 0, "d": 1}, "nets": None}, ["nets.g", "nets.d"]),
    "a loss first": ({"loss": [0], "deep": {"er": 0}}, ["deep.er"]),
    "weights first": ({"model": 0, "config": {"init": 0}}, ["model"]),
}  # fmt: skip


@pytest.mark.parametrize("case", ASIDE)
def test_weights_that_stand_first_under_a_name_of_no_weights_are_found(case, tmp_path, capsys):
    """What a config, an optimizer or a loss holds is no set of weights; the same object beside it is."""
    shape, places = ASIDE[case]
    nets = [torch.nn.Linear(3, 2).state_dict(prefix="module.") for _ in range(2)]

    def filled(value):
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items()}
        return [filled(item) for item in value] if isinstance(value, list) else nets[value]

    whole = {
        key: value if key == "n" else filled(value)
        for key, value in shape.items()
        if value is not None
    }
    if case == "all of a dict":
        whole["nets"] = whole["args"]
    path, out = tmp_path / "net.pth", tmp_path / "out.pth"
    torch.save(whole, path)
    found = ckptool.inspect(path)
    assert [".".join(table.path) for table in found.checkpoint.tables] == places
    assert [tensor.key for tensor in found.shown.tensors] == ["module.weight", "module.bias"]
    assert cli(capsys, "convert", path, "-o", out, "--strip-module")[0] == 0
    new = torch.load(out)
    for at, place in enumerate(places):
        inner = new
        for part in place.split("."):
            inner = inner[part]
        assert same(inner, {key[7:]: value for key, value in nets[at].items()})
    assert list(new) == list(whole)
