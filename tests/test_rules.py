"""Key rules against the recipes of public reports, torch's own prefix function, and properties."""

from __future__ import annotations

import time
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.errors import KeyCollision, UsageError
from ckptool.rules import (
    RULES,
    UNCOUNTED,
    Rule,
    apply,
    check_collisions,
    match_glob,
    metadata_renames,
    wrappers,
)

NET = ["conv.weight", "bn.weight", "bn.running_mean", "fc.bias"]
ALEX = ["features.0.weight", "features.2.bias", "classifier.0.weight", "classifier.2.weight"]
BLOCKS = ["layers.0.weight", "layers.1.weight", "head.weight"]


def run(keys, *rules):
    """The names after `rules`, each given as 'name' or 'name PATH'."""
    outcome = apply([Rule(*rule.split()) for rule in rules], keys)
    return [outcome.renames.get(key, key) for key in keys]


def slugs(keys, *rules):
    return [note.slug for note in apply([Rule(*rule.split()) for rule in rules], keys).notes]


def pre(prefix, keys):
    return [prefix + key for key in keys]


SAME = None

CASES = {
    "R01 DataParallel": (pre("module.", NET), "strip-module-if-all", NET),
    "R02 wants module": (NET, "add-module", pre("module.", NET)),
    "R02 already there": (pre("module.", NET), "add-module", SAME),
    "R05 mlp_module": (
        ["module.mlp_module.layer0.weight", "module.submodule.head_module.bias"],
        "strip-module-if-all",
        ["mlp_module.layer0.weight", "submodule.head_module.bias"],
    ),
    "R05 nothing to strip": (["mlp_module.w", "a_module.w"], "strip-module", SAME),
    "R06 mixed, default": (
        ["module.backbone.weight", "module.backbone.bias", "classifier.weight", "classifier.bias"],
        "strip-module-if-all",
        SAME,
    ),
    "R06 mixed, explicit": (
        ["module.backbone.weight", "module.backbone.bias", "classifier.weight", "classifier.bias"],
        "strip-module",
        ["backbone.weight", "backbone.bias", "classifier.weight", "classifier.bias"],
    ),
    "R07 compile": (pre("_orig_mod.", NET), "unwrap", NET),
    "R08 compile of ddp": (pre("_orig_mod.module.", BLOCKS), "unwrap", BLOCKS),
    "R08 ddp of compile": (pre("module._orig_mod.", BLOCKS), "unwrap", BLOCKS),
    "R08 compiled blocks": (
        ["layers.0._orig_mod.weight", "layers.1._orig_mod.weight", "head.weight"],
        "unwrap",
        BLOCKS,
    ),
    "R09 fsdp": (
        [
            f"_fsdp_wrapped_module.blocks.{i}._fsdp_wrapped_module._checkpoint_wrapped_module.{leaf}"
            for i in (0, 1)
            for leaf in ("weight", "bias")
        ],
        "unwrap",
        ["blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias"],
    ),
    "R10 twice": (pre("module.module.", NET), "strip-module-if-all", NET),
    "R10 twice, explicit": (pre("module.module.", NET), "strip-module", NET),
    "some deeper": (["module.module.a", "module.b"], "strip-module-if-all", ["module.a", "b"]),
    "R03 interior": (
        ["features.module.0.weight", "features.module.2.bias", *ALEX[2:]],
        "unwrap",
        ALEX,
    ),
    "R04 outer and interior": (
        pre("module.", ["features.module.0.weight", "features.module.2.bias", *ALEX[2:]]),
        "unwrap",
        ALEX,
    ),
    "R04 default leaves the interior": (
        ["module.features.module.0.weight", "module.classifier.0.weight"],
        "strip-module-if-all",
        ["features.module.0.weight", "classifier.0.weight"],
    ),
    "interior twice": (["f.module.module.w", "h.w"], "unwrap", ["f.w", "h.w"]),
    "interior with a sibling": (["f.module.w", "f.other.w"], "unwrap", SAME),
    "several parents": (["a.module.w", "b.module.w"], "unwrap", SAME),
    "named parent": (["a.module.w", "b.module.w"], "unwrap-at a", ["a.w", "b.module.w"]),
    "exactly that path": (["a.module.w", "x.a.module.w"], "unwrap-at a", ["a.w", "x.a.module.w"]),
    "add at": (
        ["features.0.weight", "features2.0.weight", "features.module.1.w", "features"],
        "add-module-at features",
        ["features.module.0.weight", "features2.0.weight", "features.module.1.w", "features"],
    ),
    "counters at the root": (
        ["n_averaged", "total_ops", "module.a.w", "module.a.total_ops"],
        "strip-module-if-all",
        ["n_averaged", "total_ops", "a.w", "a.total_ops"],
    ),
    "only counters": (["n_averaged", "_extra_state"], "strip-module-if-all", SAME),
    "something remains": (["module", "module."], "strip-module", SAME),
    "wrapper as a leaf": (["a._orig_mod", "_orig_mod"], "unwrap", SAME),
    "nothing behind the dot": (["module.", "f.module."], "unwrap", SAME),
    "lightning's stays": (["_forward_module.a", "_forward_module.b"], "unwrap", SAME),
    "R11 not ours": (["_model.field._model.weight"], "unwrap", SAME),
    "no keys": ([], "unwrap", []),
}


@pytest.mark.parametrize("name", CASES)
def test_recipes(name):
    """Each rule gives the names that the recipe's ground truth asks for."""
    keys, rule, expected = CASES[name]

    assert run(keys, rule) == (keys if expected is SAME else expected)


def test_renames_hold_changed_keys_in_key_order():
    outcome = apply([Rule("strip-module")], ["module.b", "c", "module.a"])

    assert list(outcome.renames.items()) == [("module.b", "b"), ("module.a", "a")]
    assert outcome.idle == ()


def test_rules_run_in_order_on_the_names_as_they_stand():
    keys = ["module.features.0.w", "module.fc.w"]

    assert run(keys, "strip-module", "add-module-at features") == ["features.module.0.w", "fc.w"]


def test_idle_rules_are_named():
    rules = [Rule("unwrap"), Rule("unwrap-at", "a"), Rule("unwrap-at", "z")]
    outcome = apply(rules, ["a.module.w", "b.module.w"])

    assert outcome.idle == (rules[0], rules[2])


def test_partial_prefix_note():
    (note,) = apply([Rule("strip-module-if-all")], ["module.a", "module.b", "c", "d"]).notes

    assert note.slug == "partial-prefix"
    assert note.text.startswith("2 of 4 keys carry 'module.'")
    assert note.command == "--strip-module"


def test_root_counters_do_not_make_a_prefix_partial():
    assert slugs(["n_averaged", "module.a"], "strip-module-if-all") == []


def test_interior_note_names_every_parent_deepest_first():
    keys = ["f.module.0.module.w", "f.module.1.w", "g-h.module.w"]
    (note,) = apply([Rule("unwrap")], keys).notes

    assert note.slug == "interior-module"
    assert note.command == "--unwrap-at f.module.0 --unwrap-at f --unwrap-at g-h"
    flags = ["unwrap-at f.module.0", "unwrap-at f", "unwrap-at g-h"]
    assert run(keys, "unwrap", *flags) == ["f.0.w", "f.1.w", "g-h.w"]


def test_interior_note_goes_when_the_places_are_named():
    keys = ["a.module.w", "b.module.w"]

    assert slugs(keys, "unwrap") == ["interior-module"]
    assert slugs(keys, "unwrap", "unwrap-at a", "unwrap-at b") == []
    assert run(keys, "unwrap", "unwrap-at a", "unwrap-at b") == ["a.w", "b.w"]


def test_a_hostile_path_is_quoted_in_the_command():
    keys = ["$(rm).module.w", "it's.module.w"]
    (note,) = apply([Rule("unwrap")], keys).notes

    assert note.command == "--unwrap-at '$(rm)' --unwrap-at 'it'\"'\"'s'"


def test_collision_names_both_keys():
    with pytest.raises(KeyCollision) as caught:
        apply([Rule("strip-module")], ["fc.weight", "module.fc.weight"])

    assert caught.value.text == (
        "'module.fc.weight' and 'fc.weight' would both become 'fc.weight'; nothing written"
    )
    assert caught.value.hint == (
        "rename one of them before saving, or leave names alone with --keep-module"
    )


def test_collision_counts_the_others():
    with pytest.raises(KeyCollision, match=r"become 'a' \(and 2 more\); nothing"):
        apply([Rule("strip-module")], ["module.a", "a", "module.b", "b", "c", "module.c"])


def test_counter_of_the_wrapper_collides_with_that_of_the_net():
    with pytest.raises(KeyCollision, match="total_ops"):
        apply([Rule("strip-module-if-all")], ["total_ops", "module.total_ops", "module.w"])


def test_a_leaf_called_module_collides_with_its_like():
    with pytest.raises(KeyCollision):
        run(["module", "module.module"], "strip-module")


def test_a_swap_is_no_collision():
    check_collisions(["a", "b"], {"a": "b", "b": "a"})


@pytest.mark.parametrize("rule", [Rule("strip"), Rule("unwrap-at"), Rule("add-module-at", ".")])
def test_bad_rules_are_usage_errors(rule):
    with pytest.raises(UsageError):
        apply([rule], ["a"])


WRAPPED = {
    "module.": (pre("module.", NET), [("module.", 4, 4)]),
    "mixed": (["module.a", "module.b", "c", "d"], [("module.", 2, 4)]),
    "twice": (pre("module.module.", NET), [("module.module.", 4, 4)]),
    "uneven": (["module.module.a", "module.b"], [("module.", 2, 2)]),
    "stack": (pre("_orig_mod.module.", NET), [("_orig_mod.module.", 4, 4)]),
    "two kinds": (["module.a", "_orig_mod.b"], [("module.", 1, 2), ("_orig_mod.", 1, 2)]),
    "inner": (["l.0._orig_mod.w", "l.1._orig_mod.w", "h.w"], [("_orig_mod", 2, 3)]),
    "fsdp": (
        ["_fsdp_wrapped_module.b._fsdp_wrapped_module._checkpoint_wrapped_module.w"],
        [
            ("_fsdp_wrapped_module.", 1, 1),
            ("_fsdp_wrapped_module", 1, 1),
            ("_checkpoint_wrapped_module", 1, 1),
        ],
    ),
    "interior": (["features.module.0.w", "fc.w"], [("features.module", 1, 2)]),
    "both": (
        ["module.features.module.0.w", "module.fc.w"],
        [("module.", 2, 2), ("features.module", 1, 2)],
    ),
    "plain": ([*NET, "mlp_module.w"], []),
    "root counters": (["n_averaged", "module.a"], [("module.", 1, 1)]),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers(name):
    keys, expected = WRAPPED[name]

    assert wrappers(keys) == expected


GLOBS = [
    ("fc", "fc.weight", True),
    ("fc", "fc2.weight", False),
    ("fc", "a.fc.weight", True),
    ("*norm*", "layers.0.norm1.weight", True),
    ("*norm*", "layers.0.fc.weight", False),
    ("total_ops", "a.total_ops", True),
    ("layers.1", "layers.1.weight", True),
    ("layers.1", "layers.1.weight.lora_A", True),
    ("layers.1", "layers.10.weight", False),
    ("layers.1", "x.layers.1.weight", False),
    ("fc.*", "fc.weight", True),
    ("*.weight", "fc.weight", True),
    ("*.weight", "a.fc.weight", False),
    ("**.weight", "a.fc.weight", True),
    ("layers.?.w", "layers.1.w", True),
    ("layers.?.w", "layers.11.w", False),
    ("**", "a.b", True),
    ("*", "a.b", True),
    ("a.***.c", "a.b.x.c", True),
    ("a[b].c", "a[b].c", True),
    ("a[b].c", "ab.c", False),
    ("FC", "fc.weight", False),
    ("f?", "a\n.fc", True),
]


@pytest.mark.parametrize(("pattern", "key", "expected"), GLOBS)
def test_globs(pattern, key, expected):
    assert match_glob(pattern, key) is expected


# Properties

component = st.sampled_from(
    ["module", "mlp_module", "features", "0", "w", "_orig_mod", "x_orig_mod", "modules", "", "权重"]
)
name = st.lists(component, min_size=1, max_size=5).map(".".join).filter(bool)
tables = st.lists(name, unique=True, max_size=12)
every_rule = st.sampled_from([Rule(name, "features") for name in RULES])


@given(tables)
def test_strip_undoes_add(keys):
    if any(not key.startswith("module.") for key in keys if key not in UNCOUNTED):
        added = run(keys, "add-module")
        assert all(key.startswith("module.") for key in added)
        assert run(added, "strip-module-if-all") == keys


@given(tables)
def test_unwrap_at_undoes_add_at(keys):
    if not any("features.module" in key or key == "features." for key in keys):
        assert run(run(keys, "add-module-at features"), "unwrap-at features") == keys


@given(tables, st.lists(every_rule, max_size=4))
def test_rules_keep_the_number_of_keys_and_touch_whole_wrappers_only(keys, rules):
    try:
        outcome = apply(rules, keys)
    except KeyCollision:
        return
    names = [outcome.renames.get(key, key) for key in keys]
    wrapping = {"module", "_orig_mod"}

    assert len(set(names)) == len(keys)
    assert all(names)
    for key, new in zip(keys, names, strict=True):
        honest = [part for part in key.split(".") if part not in wrapping]
        assert [part for part in new.split(".") if part not in wrapping] == honest
        assert new.split(".")[-1] == key.split(".")[-1]


@given(tables)
def test_unwrap_is_done_after_one_run(keys):
    try:
        once = run(keys, "unwrap")
        assert run(once, "unwrap") == once
    except KeyCollision:
        return


# _metadata


def paths_after(state, *rules):
    """(renames, dropped) of the `_metadata` of a torch state_dict."""
    keys = list(state)
    renames = apply([Rule(*rule.split()) for rule in rules], keys).renames
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
    assert run([key], "strip-module") == ["w"]
    assert wrappers([key])[0][1:] == (1, 1)
    assert metadata_renames(["", "module"], {key: "w"}) == ({}, ())
