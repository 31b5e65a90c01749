"""What the tests of reports share: small nets, also as a file of a user's, and who says what."""

from __future__ import annotations

import json
import shlex

import torch
from verbs_support import cli

NETS = '''
from collections import OrderedDict

from torch import nn


def net(classes=10, width=4):
    return nn.Sequential(OrderedDict(
        conv=nn.Conv2d(3, width, 3), bn=nn.BatchNorm2d(width), fc=nn.Linear(width, classes),
    ))


def names(*keys):
    """A model that wants these keys, of two numbers each."""
    from torch import zeros
    root = nn.Module()
    for key in keys:
        *path, leaf = key.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        module.register_parameter(leaf, nn.Parameter(zeros(2)))
    return root


class Wrapped(nn.Module):
    def __init__(self, name="model"):
        super().__init__()
        self.add_module(name, net())


def mixed():
    return nn.ModuleDict({"backbone": nn.Linear(4, 4), "classifier": nn.Linear(4, 2)})


def fields():
    return names("field._model.weight", "field.bias", "proposal_networks.0.weight")


def bert():
    return names("enc.LayerNorm.weight", "enc.LayerNorm.bias", "block.gamma", "noise.alphabeta")


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)


class Yolo(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(Conv(), nn.Conv2d(4, 2, 1))


def yolo():
    return Yolo().half()
'''
SPACE: dict = {"__name__": "nets"}
exec(NETS, SPACE)


def build(name="net", **words):
    torch.manual_seed(len(name))
    return SPACE[name](**words)


def other(name="net", **words):
    """The same net with other numbers."""
    net = build(name, **words)
    with torch.no_grad():
        for value in net.parameters():
            value += 1
    return net


def asked(capsys, file, name="net", *words):
    status, out, err = cli(capsys, "inspect", file, "--json", "--model", f"nets.py:{name}", *words)
    assert err == ""
    match = json.loads(out)["match"]
    assert match["fits"] == (status == 0)
    return match


def screen(capsys, file, name="net", *words):
    return cli(capsys, "inspect", file, "--model", f"nets.py:{name}", *words)[1]


def mended(capsys, match, *more):
    """What the named command writes."""
    words = shlex.split(match["fix"])
    status, _, err = cli(capsys, *words[1:], *more)
    assert status == 0, err
    return torch.load(words[words.index("-o") + 1], weights_only=False)


def loads(state, name="net", **words):
    net = other(name, **words)
    net.load_state_dict(state, strict=True)
    return all(torch.equal(value, state[key]) for key, value in net.state_dict().items())


def holds(net, state):
    """Whether the net has exactly these numbers."""
    own = net.state_dict()
    return list(own) == list(state) and all(torch.equal(own[key], state[key]) for key in own)
