"""What wrappers leave in names, against the recipes of public reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rules_support import NET, pre, run, slugs

from ckptool.errors import KeyCollision
from ckptool.rules import UNCOUNTED, Rule, apply, wrappers

ALEX = ["features.0.weight", "features.2.bias", "classifier.0.weight", "classifier.2.weight"]
BLOCKS = ["layers.0.weight", "layers.1.weight", "head.weight"]


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


def test_counter_of_the_wrapper_collides_with_that_of_the_net():
    with pytest.raises(KeyCollision, match="total_ops"):
        apply([Rule("strip-module-if-all")], ["total_ops", "module.total_ops", "module.w"])


def test_a_leaf_called_module_collides_with_its_like():
    with pytest.raises(KeyCollision):
        run(["module", "module.module"], "strip-module")


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


# Properties

component = st.sampled_from(
    ["module", "mlp_module", "features", "0", "w", "_orig_mod", "x_orig_mod", "modules", "", "权重"]
)
name = st.lists(component, min_size=1, max_size=5).map(".".join).filter(bool)
tables = st.lists(name, unique=True, max_size=12)
tables = st.lists(name, unique=True, max_size=12)
ours = ["strip-module-if-all", "strip-module", "add-module", "add-module-at", "unwrap", "unwrap-at"]
every_rule = st.sampled_from([Rule(name, "features") for name in ours])


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


def test_hostile_depth_costs_nothing():
    key = "module." * 100_000 + "w"

    assert run([key], "strip-module") == ["w"]
    assert wrappers([key])[0][1:] == (1, 1)
