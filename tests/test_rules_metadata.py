"""`_metadata` follows the keys, with torch as the judge."""

from __future__ import annotations

import time
from collections import OrderedDict

import pytest
from rules_support import rules_of

from ckptool.layer_versions import metadata_renames
from ckptool.rules import Rule, apply


def paths_after(state, *rules):
    """(renames, dropped) of the `_metadata` of a torch state_dict."""
    keys = list(state)
    renames = apply(rules_of(rules), keys).renames
    return metadata_renames(list(state._metadata), renames, keys)


def moved(state, renames, dropped):
    """The `_metadata` that these renames make."""
    return {renames.get(p, p): v for p, v in state._metadata.items() if p not in dropped}


@pytest.fixture(scope="module")
def nets():
    from torch import nn

    def plain():
        block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        return nn.Sequential(
            OrderedDict(features=block, act=nn.ReLU(), fc=nn.Linear(4, 2), drop=nn.Dropout())
        )

    def inner():
        net = plain()
        net.features = nn.DataParallel(net.features)
        return net

    return {"plain": plain, "inner": inner, "wrap": nn.DataParallel}


def test_metadata_follows_as_torch_does(nets):
    from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

    state = nets["wrap"](nets["plain"]()).state_dict()
    renames, dropped = paths_after(state, "strip-module-if-all")
    ours = moved(state, renames, dropped)
    assert renames["module"] == ""
    assert renames["module.features.2"] == "features.2"
    assert dropped == ("",)
    consume_prefix_in_state_dict_if_present(state, "module.")

    assert ours == dict(state._metadata)
    assert ours == dict(nets["plain"]().state_dict()._metadata)


METADATA = {
    "twice": (lambda n: n["wrap"](n["wrap"](n["plain"]())), "strip-module", "plain"),
    "interior": (lambda n: n["inner"](), "unwrap", "plain"),
    "outer and interior": (lambda n: n["wrap"](n["inner"]()), "unwrap", "plain"),
    "outer only": (lambda n: n["wrap"](n["inner"]()), "strip-module", "inner"),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_equals_that_of_the_unwrapped_net(nets, name):
    build, rule, expected = METADATA[name]
    state = build(nets).state_dict()

    assert moved(state, *paths_after(state, rule)) == dict(nets[expected]().state_dict()._metadata)


def test_metadata_of_added_module(nets):
    state = nets["plain"]().state_dict()
    renames, dropped = paths_after(state, "add-module")

    assert (renames[""], renames["fc"], renames["act"]) == ("module", "module.fc", "module.act")
    assert dropped == ()
    wrapped = dict(nets["wrap"](nets["plain"]()).state_dict()._metadata)
    assert moved(state, renames, dropped) == {p: v for p, v in wrapped.items() if p}


def test_metadata_of_module_added_inside(nets):
    state = nets["plain"]().state_dict()
    renames, dropped = paths_after(state, "add-module-at features")

    inside = ["features", "features.0", "features.1", "features.2"]
    assert renames == {p: p.replace("features", "features.module") for p in inside}
    assert dropped == ()


def test_metadata_of_fsdp_names():
    fsdp, ckpt = "_fsdp_wrapped_module", "_checkpoint_wrapped_module"
    key = f"{fsdp}.blocks.0.{fsdp}.{ckpt}.lin.weight"
    paths = ["", fsdp, f"{fsdp}.blocks", f"{fsdp}.blocks.0", f"{fsdp}.blocks.0.{fsdp}",
             f"{fsdp}.blocks.0.{fsdp}.{ckpt}", f"{fsdp}.blocks.0.{fsdp}.{ckpt}.act"]  # fmt: skip
    renames, dropped = metadata_renames(paths, apply([Rule("unwrap")], [key]).renames)

    assert renames == {
        paths[1]: "",
        paths[2]: "blocks",
        paths[5]: "blocks.0",
        paths[6]: "blocks.0.act",
    }
    assert dropped == ("", paths[3], paths[4])


def test_metadata_where_some_keys_stay():
    keys = ["fc.weight", "conv.weight"]
    renames, dropped = metadata_renames(
        ["", "fc", "conv", "relu"], {"fc.weight": "head.fc.weight"}, keys
    )

    assert renames == {"fc": "head.fc"}
    assert dropped == ()


def test_metadata_of_ten_thousand_keys_is_quick():
    """Best of three: linear work takes a few hundredths of a second, quadratic work minutes."""
    keys = [f"module.layers.{i // 10}.block{i % 10}.weight" for i in range(10_000)]
    renames = apply([Rule("strip-module")], keys).renames
    paths = list(dict.fromkeys(key.rpartition(".")[0] for key in keys))
    took = []
    for _ in range(3):
        start = time.perf_counter()
        moves, dropped = metadata_renames(paths, renames, keys)
        took.append(time.perf_counter() - start)

    assert len(moves) == len(paths)
    assert dropped == ()
    assert min(took) < 0.5


def test_hostile_depth_costs_nothing():
    key = "module." * 100_000 + "w"
