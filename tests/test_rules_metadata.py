"""`_metadata` follows the keys, with torch as the judge."""

from __future__ import annotations

import time
from collections import OrderedDict

import pytest
from rules_support import rules_of
from torch import nn

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
    start = time.perf_counter()

    assert metadata_renames(["", "module"], {key: "w"}) == ({}, ())
    assert time.perf_counter() - start < 1


# Rules that say the new name


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.act = nn.ReLU()


def nest(path, net):
    """The net at a dotted path of plain modules."""
    for part in reversed(path.split(".")):
        outer = nn.Module()
        outer.add_module(part, net)
        net = outer
    return net


def blocks(first="layer1", second="layer2"):
    layers = {first: nn.Sequential(Block(), Block()), second: nn.Sequential(Block())}
    return nn.Sequential(OrderedDict(**layers, fc=nn.Linear(4, 2)))


def renamed(state, *rules):
    """The state_dict after `rules`, `_metadata` with it."""
    keys = list(state)
    outcome = apply(rules_of(rules), keys)
    left = [key for key in keys if key not in outcome.drops]
    moves, dropped = metadata_renames(list(state._metadata), outcome.renames, left)
    made = OrderedDict((outcome.renames.get(key, key), state[key]) for key in left)
    made._metadata = OrderedDict(moved(state, moves, dropped))
    return made


def swap(state):
    """A file of names that swaps the two blocks of layer1."""
    flip = {"0": "1", "1": "0"}
    parts = [key.split(".") for key in state if key.startswith("layer1.")]
    pairs = tuple((".".join(p), ".".join([p[0], flip[p[1]], *p[2:]])) for p in parts)
    return Rule("rename-file", "f", pairs=pairs)


MOVES = {
    "strip-prefix": (lambda: nest("model", blocks()), ["strip-prefix model."], blocks),
    "strip two": (lambda: nest("model.net", blocks()), ["strip-prefix model.net"], blocks),
    "strip one of two": (
        lambda: nest("model.net", blocks()),
        ["strip-prefix model"],
        lambda: nest("net", blocks()),
    ),
    "inside": (
        blocks,
        [r"rename ^layer(\d) block\1"],
        lambda: blocks("block1", "block2"),
    ),
    "inside, under a prefix": (
        lambda: nest("model", blocks()),
        ["strip-prefix model", "rename layer1 stage.a", "rename ^layer2 layer1"],
        None,
    ),
    "swap of modules": (blocks, [swap], blocks),
    "swap of names": (
        blocks,
        ["rename layer1 tmp", "rename layer2 layer1", "rename tmp layer2"],
        lambda: blocks("layer2", "layer1"),
    ),
    "only a part": (
        lambda: nest("model", blocks()),
        ["only model.layer2.**", "strip-prefix model.layer2"],
        lambda: nn.Sequential(Block()),
    ),
    "onto the place of what is dropped": (
        blocks,
        ["drop layer2.0.bn", r"rename ^layer1\.0\.bn layer2.0.bn"],
        None,
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_torch_finds_every_version_after_the_move(name):
    """Each BatchNorm's counter is missed when it is taken away: torch found version 2."""
    build, rules, wanted = MOVES[name]
    state = build().state_dict()
    made = renamed(state, *(rule(state) if callable(rule) else rule for rule in rules))
    norms = [key.rpartition(".")[0] for key in made if key.endswith("running_var")]

    assert norms
    assert {made._metadata[path]["version"] for path in norms} == {2}
    if wanted is None:
        return
    net = wanted()
    expected = net.state_dict()._metadata
    assert dict(made._metadata, **expected) == dict(made._metadata)
    net.load_state_dict(made, strict=True)
    for path in norms:
        del made[f"{path}.num_batches_tracked"]
    missing = net.load_state_dict(made, strict=False).missing_keys
    assert sorted(missing) == sorted(f"{path}.num_batches_tracked" for path in norms)


def test_metadata_equals_that_of_the_net_with_the_other_names():
    state = renamed(
        nest("model", blocks()).state_dict(), "strip-prefix model", "rename layer block"
    )

    assert dict(state._metadata) == dict(blocks("block1", "block2").state_dict()._metadata)


def test_metadata_of_an_added_prefix_invents_no_root():
    made = renamed(blocks().state_dict(), "add-prefix backbone.")
    expected = nest("backbone", blocks()).state_dict()._metadata

    assert dict(made._metadata) == {path: v for path, v in expected.items() if path}
    nest("backbone", blocks()).load_state_dict(made, strict=True)


def test_the_old_version_moves_too():
    """A file from before BatchNorm counted: torch forgives the counters under the new names."""
    state = blocks().state_dict()
    for path in state._metadata:
        state._metadata[path] = {"version": 1}
    for key in [key for key in state if key.endswith("num_batches_tracked")]:
        del state[key]
    made = renamed(state, "add-prefix net", r"rename layer(\d) block\1")

    nest("net", blocks("block1", "block2")).load_state_dict(made, strict=True)


def test_the_majority_of_a_modules_tensors_takes_its_version_along():
    leaves = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    keys = [f"bn.{leaf}" for leaf in leaves]

    few = {f"bn.{leaf}": f"scale.{leaf}" for leaf in leaves[:2]}
    assert metadata_renames(["", "bn"], few, keys) == ({}, ())
    most = {f"bn.{leaf}": f"stats.{leaf}" for leaf in leaves[1:]}
    assert metadata_renames(["", "bn"], most, keys) == ({"bn": "stats"}, ())
    one = {"fc.weight": "head.weight"}
    assert metadata_renames(["", "fc"], one, ["fc.weight", "fc.bias"]) == ({}, ())


def test_a_tensor_renamed_at_another_depth_takes_its_module_along():
    renames = {"a.b.gamma": "x.weight", "a.b.beta": "x.bias", "a.c.w": "a.c.w2"}

    assert metadata_renames(["", "a", "a.b", "a.c"], renames) == ({"a.b": "x"}, ())


def test_two_modules_in_one_place_keep_one_entry():
    renames = {"a.weight": "x.weight", "b.bias": "x.bias"}

    assert metadata_renames(["", "a", "b"], renames) == ({"a": "x"}, ("b",))


def test_dropped_keys_of_densenets_dotted_names():
    keys = ["layer.norm.1.weight", "layer.norm.1.bias", "layer.conv.1.weight"]
    renames = {key: key.replace(".1.", "1.") for key in keys}
    paths = ["", "layer", "layer.norm", "layer.norm.1", "layer.conv.1"]

    assert metadata_renames(paths, renames) == (
        {"layer.norm.1": "layer.norm1", "layer.conv.1": "layer.conv1"},
        ("layer.norm",),
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_weight_norm_keeps_the_entry_of_its_module(bias, prefix):
    """R16 both ways: the helper's entry goes; its child without tensors follows the module."""
    net = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, bias=bias))
    state = nest(prefix + "conv", net).state_dict()
    place = r"parametrizations\.weight\.original"
    back = renamed(state, f"rename {place}0 weight_g", f"rename {place}1 weight_v")
    paths = ["", "module", "module.conv"] if prefix else ["", "conv"]

    assert list(back._metadata) == [*paths, f"{prefix}conv.0"]
    there = [
        r"rename weight_g$ parametrizations.weight.original0",
        r"rename weight_v$ parametrizations.weight.original1",
    ]
    again = renamed(back, *there)
    assert list(again) == list(state)
    assert list(again._metadata) == list(back._metadata)


def test_a_wrappers_counter_does_not_hold_its_entry():
    keys = ["n_averaged", "module.w", "module.fc.w"]
    renames = {"module.w": "w", "module.fc.w": "fc.w"}

    assert metadata_renames(["", "module", "module.fc"], renames, keys) == (
        {"module": "", "module.fc": "fc"},
        ("",),
    )
