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
