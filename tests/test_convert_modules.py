"""convert of whole pickled models: their state_dict comes out, or the object with other tags."""

from __future__ import annotations

import argparse
from collections import OrderedDict

import pytest
import torch
from container_support import Tied, convert, promise_kept, same_weights, st_loaded, ties
from fixtures.make_fixtures import filled, save, user_net
from torch import nn
from verbs_support import (
    FIXTURES,
    LEGACY,
    assert_same,
    cli,
    devices,
    keys,
    left_alone,
    load,
    notes,
)

import ckptool
from ckptool.errors import Unsupported, UsageError

SAVES = {"zip": {}, "legacy": LEGACY, "protocol 4": {"pickle_protocol": 4}}


def state(net):
    """The state_dict without layer versions, which are the classes' and in no pickle."""
    return OrderedDict(net.state_dict())


def body():
    """Of classes that every torch has."""
    return filled(nn.Sequential(OrderedDict(
        conv=nn.Conv2d(1, 2, 3, bias=False), bn=nn.BatchNorm2d(2), act=nn.ReLU(), flat=nn.Flatten(),
        fc=nn.Linear(8, 3),
    )))  # fmt: skip


class Odd(nn.Module):
    """What modules hold beside plain parameters."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("gone", torch.ones(2), persistent=False)
        self.register_buffer("unset", None)
        self.register_parameter("none", None)
        self.plain = torch.ones(4)  # no part of the state_dict
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.one = nn.Linear(2, 2)
        self.two = self.one
        self.listed = nn.ParameterList([torch.ones(1), torch.zeros(2)])
        self.named = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Identity()})
        self.rnn = nn.LSTM(2, 3)  # holds its parameters in a list besides
        self.heads = nn.MultiheadAttention(4, 2)
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.empty = None


# -- as a state_dict ---------------------------------------------------------------------------
@pytest.mark.parametrize("make", [body, Odd, Tied], ids=["body", "odd", "tied"])
@pytest.mark.parametrize("options", SAVES.values(), ids=SAVES)
def test_a_whole_model_comes_out_as_its_state_dict(options, make, tmp_path):
    net = make()
    torch.save(net, tmp_path / "net.pth", **options)
    done = convert(tmp_path / "net.pth", tmp_path / "o.pth")
    convert(tmp_path / "net.pth", tmp_path / "l.pth", to="legacy")
    convert(tmp_path / "net.pth", tmp_path / "o.safetensors")

    after = promise_kept(tmp_path / "o.pth")
    assert type(after) is OrderedDict
    same_weights(state(net), after)
    assert not any(t.requires_grad or type(t) is not torch.Tensor for t in after.values())
    same_weights(after, load(tmp_path / "l.pth", weights_only=True))
    assert set(st_loaded(tmp_path / "o.safetensors")) <= set(after)
    convert(tmp_path / "o.safetensors", tmp_path / "s.pth")
    same_weights(after, load(tmp_path / "s.pth"))
    make().load_state_dict(after, strict=True)
    assert "whole-model" in notes(done)


def test_one_module_under_two_names_is_tied(tmp_path):
    torch.save(Odd(), tmp_path / "net.pth")
    convert(tmp_path / "net.pth", tmp_path / "o.pth")

    after = load(tmp_path / "o.pth")
    assert ["one.weight", "two.weight"] in ties(after)
    assert not {"gone", "unset", "none", "plain"} & set(after)
    assert after["turned"].stride() == (1, 3)


@pytest.mark.parametrize("options", SAVES.values(), ids=SAVES)
def test_a_model_beside_other_entries(options, tmp_path):
    net = body()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 1, 4, 4)).sum().backward()
    optimizer.step()
    obj = {"epoch": 7, "model": net, "optimizer": optimizer.state_dict(), "names": ["a", None]}
    torch.save(obj, tmp_path / "net.pth", **options)
    done = convert(tmp_path / "net.pth", tmp_path / "o.pth")

    after = promise_kept(tmp_path / "o.pth")
    assert list(after) == list(obj)
    same_weights(state(net), after["model"])
    assert_same(obj["optimizer"], after["optimizer"])
    assert (after["epoch"], after["names"]) == (7, ["a", None])
    assert done.left_behind == ()


def test_what_else_is_in_the_way_stays(tmp_path):
    obj = {"model": body(), "args": argparse.Namespace(lr=0.5)}
    torch.save(obj, tmp_path / "net.pth")
    convert(tmp_path / "net.pth", tmp_path / "o.pth")

    assert promise_kept(tmp_path / "o.pth", weights_only=False)["args"].lr == 0.5


def test_one_object_under_two_names_stays_one(tmp_path):
    net = body()
    torch.save({"model": net, "epoch": 1, "ema": net}, tmp_path / "net.pth")
    convert(tmp_path / "net.pth", tmp_path / "o.pth")
    convert(tmp_path / "net.pth", tmp_path / "p.pth", drop_entry="ema")
    convert(tmp_path / "net.pth", tmp_path / "q.pth", drop_entry=["model", "ema"])

    after = promise_kept(tmp_path / "o.pth")
    assert after["model"] is after["ema"]
    same_weights(state(net), after["ema"])
    alone = promise_kept(tmp_path / "p.pth")
    assert list(alone) == ["model", "epoch"]
    same_weights(state(net), alone["model"])
    assert load(tmp_path / "q.pth") == {"epoch": 1}
    with pytest.raises(Unsupported, match="one object with another entry"):
        convert(tmp_path / "net.pth", tmp_path / "r.pth", drop_entry="model")


@pytest.mark.parametrize("turned", [False, True])
def test_a_module_and_a_part_of_it(turned, tmp_path):
    net = body()
    obj = {"net": net, "head": net.fc, "bn": net.bn.state_dict(), "w": net.fc.weight}
    obj = dict(reversed(obj.items())) if turned else obj
    torch.save(obj, tmp_path / "net.pth")
    convert(tmp_path / "net.pth", tmp_path / "o.pth")

    after = promise_kept(tmp_path / "o.pth")
    same_weights(state(net), after["net"])
    same_weights(state(net.fc), after["head"])
    pointer = after["net"]["fc.weight"].data_ptr()
    assert after["head"]["weight"].data_ptr() == after["w"].data_ptr() == pointer
    assert after["bn"]["weight"].data_ptr() == after["net"]["bn.weight"].data_ptr()
    assert after["bn"]._metadata == {"": {"version": 2}}


@pytest.mark.parametrize("options", SAVES.values(), ids=SAVES)
def test_a_data_parallel_model(options, tmp_path):
    net = body()
    save({"net": nn.DataParallel(net), "epoch": 2}, tmp_path / "net.pth", "cuda:0", **options)
    convert(tmp_path / "net.pth", tmp_path / "o.pth", to_cpu=True)
    convert(tmp_path / "net.pth", tmp_path / "k.pth")

    after = promise_kept(tmp_path / "o.pth")
    assert after["epoch"] == 2
    same_weights(state(net), after["net"])
    assert list(load(tmp_path / "k.pth")["net"]) == [f"module.{key}" for key in state(net)]
    assert set(devices(tmp_path / "k.pth").values()) == {"cuda:0"}


@pytest.mark.parametrize("name", ["whole_model.pth", "whole_model_dp.pth"])
def test_a_model_of_a_class_that_is_not_there(name, tmp_path):
    convert(FIXTURES / name, tmp_path / "o.pth", to_cpu=True)
    convert(FIXTURES / name, tmp_path / "o.safetensors", strip_module="_dp" in name)
    with user_net():
        net = load(FIXTURES / name)

    truth = state(net.module if "_dp" in name else net)
    same_weights(truth, promise_kept(tmp_path / "o.pth"))
    same_weights(truth, st_loaded(tmp_path / "o.safetensors"))
    assert b"acme" not in (tmp_path / "o.pth").read_bytes()


def test_parts_names_and_types_of_a_model(tmp_path):
    net = body()
    obj = {"model": net, "ema": filled(body(), 3), "epoch": 2}
    torch.save(obj, tmp_path / "net.pth")
    done = convert(tmp_path / "net.pth", tmp_path / "o.pth", select="ema", rename={"^fc": "head"},
                   drop="bn", dtype="float16", compact=True)  # fmt: skip

    after = promise_kept(tmp_path / "o.pth")
    assert sorted(done.entries_left) == ["epoch", "model"]
    assert list(after) == ["conv.weight", "head.weight", "head.bias"]
    assert torch.equal(after["head.weight"], obj["ema"].fc.weight.half())
    assert done.renames == {"fc.weight": "head.weight", "fc.bias": "head.bias"}


def test_a_root_model_leaves_its_attributes_behind(tmp_path):
    net = body()
    net.history = [1, 2]
    net.cached = torch.ones(5)
    torch.save(net, tmp_path / "net.pth")
    convert(tmp_path / "net.pth", tmp_path / "o.pth")

    after = promise_kept(tmp_path / "o.pth")
    same_weights(state(net), after)
    assert len(devices(tmp_path / "o.pth")) == len(after)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_quantized_part_is_refused_by_name(tmp_path):
    net = torch.ao.nn.quantized.Linear(4, 2)
    whole = nn.Sequential(OrderedDict(first=nn.Linear(3, 4), q=net))
    torch.save({"model": whole, "epoch": 1}, tmp_path / "net.pth")
    for out in ("o.pth", "o.safetensors"):
        with pytest.raises(Unsupported, match=r"q\.") as caught:
            convert(tmp_path / "net.pth", tmp_path / out)
        assert "--drop" in caught.value.hint
    left_alone(tmp_path, "net.pth")
    convert(tmp_path / "net.pth", tmp_path / "o.pth", only="first")

    same_weights(state(whole.first), OrderedDict((key[6:], t) for key, t in promise_kept(tmp_path / "o.pth")["model"].items()))  # fmt: skip


# -- legacy models carry their source ----------------------------------------------------------
SECRET = "what modules hold beside plain"


def test_the_source_of_a_legacy_model_stays_behind(tmp_path):
    torch.save({"net": Odd(), "epoch": 1}, tmp_path / "net.pth", **LEGACY)
    assert SECRET in (tmp_path / "net.pth").read_bytes().decode("latin-1").lower()
    convert(tmp_path / "net.pth", tmp_path / "o.pth")
    convert(tmp_path / "net.pth", tmp_path / "k.pth", keep_object=True, to="zip")

    for name in ("o.pth", "k.pth"):
        data = (tmp_path / name).read_bytes().decode("latin-1").lower()
        assert SECRET not in data
        assert __file__.lower() not in data
    kept = load(tmp_path / "k.pth")
    assert type(kept["net"]) is Odd
    same_weights(state(kept["net"]), load(tmp_path / "o.pth")["net"])


# -- --keep-object -----------------------------------------------------------------------------
@pytest.mark.parametrize("options", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize("target", [None, "zip", "legacy"])
def test_keep_object_retags_the_model(target, options, tmp_path):
    net = body()
    net.device = "cuda:0"
    save({"net": net, "epoch": 1}, tmp_path / "net.pth", "cuda:0", **options)
    done = convert(
        tmp_path / "net.pth", tmp_path / "o.pth", to_cpu=True, keep_object=True, to=target
    )

    after = load(tmp_path / "o.pth", map_location=None)
    assert type(after["net"]) is nn.Sequential
    assert_same(load(tmp_path / "net.pth"), after)
    image = torch.ones(1, 1, 4, 4)
    assert torch.equal(after["net"].eval()(image), net.eval()(image))
    assert set(devices(tmp_path / "o.pth").values()) == {"cpu"}
    assert [text for _, text in done.mentions] == ["cuda:0"]
    assert "whole-model" not in notes(done)
    legacy = target == "legacy" or (target is None and "_use_new_zipfile_serialization" in options)
    found = ckptool.inspect(tmp_path / "o.pth").checkpoint.format
    assert found == ("torch-legacy" if legacy else "torch-zip")


def test_keep_object_lists_the_devices_inside(tmp_path, capsys):
    net = body()
    net.fc.where = torch.device("cuda:0")
    save(net, tmp_path / "net.pth", "cuda:0")
    status, out, err = cli(capsys, "convert", tmp_path / "net.pth", "--to-cpu", "--keep-object",
                           "-o", tmp_path / "o.pth")  # fmt: skip

    assert status == 0
    assert "where" in out + err
    assert load(tmp_path / "o.pth", map_location=None).fc.where == torch.device("cuda:0")


def test_keep_object_drops_another_entry(tmp_path):
    torch.save({"net": body(), "optimizer": {"m": torch.ones(9)}}, tmp_path / "net.pth")
    convert(tmp_path / "net.pth", tmp_path / "o.pth", keep_object=True, drop_entry="optimizer")

    after = promise_kept(tmp_path / "o.pth", weights_only=False)
    assert list(after) == ["net"]
    same_weights(state(body()), state(after["net"]))


def test_keep_object_refuses_data_parallel(tmp_path):
    for obj in (nn.DataParallel(body()), {"a": body(), "b": nn.DataParallel(body())}):
        save(obj, tmp_path / "net.pth", "cuda:0")
        with pytest.raises(Unsupported, match="DataParallel"):
            convert(tmp_path / "net.pth", tmp_path / "o.pth", to_cpu=True, keep_object=True)
        left_alone(tmp_path, "net.pth")


def test_keep_object_refuses_data_parallel_inside(tmp_path):
    net = nn.Sequential(OrderedDict(features=nn.DataParallel(nn.Linear(2, 2)), fc=nn.Linear(2, 1)))
    save(net, tmp_path / "net.pth", "cuda:0")
    with pytest.raises(Unsupported, match="DataParallel"):
        convert(tmp_path / "net.pth", tmp_path / "o.pth", to_cpu=True, keep_object=True)
    convert(tmp_path / "net.pth", tmp_path / "o.pth", to_cpu=True)
    assert keys(tmp_path / "o.pth")[0] == "features.module.weight"


RULES = [{"strip_module": True}, {"rename": {"a": "b"}}, {"drop": "fc"}, {"add_prefix": "net."},
         {"dtype": "float16"}, {"select": "model"}]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: next(iter(rule)))
def test_keep_object_refuses_other_changes(rule, tmp_path):
    torch.save({"model": body()}, tmp_path / "net.pth")
    with pytest.raises(UsageError, match="keep-object"):
        convert(tmp_path / "net.pth", tmp_path / "o.pth", keep_object=True, **rule)
    left_alone(tmp_path, "net.pth")


def test_keep_object_needs_an_object(tmp_path):
    torch.save(body().state_dict(), tmp_path / "net.pth")
    with pytest.raises(UsageError, match="no pickled model"):
        convert(tmp_path / "net.pth", tmp_path / "o.pth", keep_object=True)
