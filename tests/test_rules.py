"""The order of key rules, what they leave out, and names that become one."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rules_support import pre, rules_of, run

from ckptool.errors import KeyCollision, UsageError
from ckptool.rules import RULES, Rule, apply, check_collisions


def test_renames_hold_changed_keys_in_key_order():
    outcome = apply([Rule("strip-module")], ["module.b", "c", "module.a"])

    assert list(outcome.renames.items()) == [("module.b", "b"), ("module.a", "a")]
    assert outcome.idle == ()
    assert outcome.drops == ()


ORDERS = {
    "strip, then a place": (
        ["module.features.0.w", "module.fc.w"],
        ["strip-module", "add-module-at features"],
        ["features.module.0.w", "fc.w"],
    ),
    "rename, then drop": (["a.w", "b.w"], ["rename ^a c", "drop c"], ["b.w"]),
    "rename, then drop the old name": (["a.w", "b.w"], ["rename ^a c", "drop a"], ["c.w", "b.w"]),
    "drop, then rename": (["a.w", "b.w"], ["drop a", "rename b a"], ["a.w"]),
    "strip, then only": (
        ["model.net.w", "model.head.w"],
        ["strip-prefix model", "only net.*"],
        ["net.w"],
    ),
    "only, then strip": (["model.net.w", "ema.net.w"], ["only ema.**", "strip-prefix ema"], ["net.w"]),
    "prefix twice": (["a.a.a.w"], ["strip-prefix a", "strip-prefix a."], ["a.w"]),
    "three renames swap": (
        ["a.w", "b.w"],
        ["rename ^a tmp", "rename ^b a", "rename ^tmp b"],
        ["b.w", "a.w"],
    ),
    "all carry it once the other is gone": (
        ["module.a", "module.b", "head.w"],
        ["drop head", "strip-module-if-all"],
        ["a", "b"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_rules_run_in_order_on_the_names_as_they_stand(name):
    keys, rules, expected = ORDERS[name]

    assert run(keys, *rules) == expected


def test_drops_are_original_keys_in_key_order_and_no_renames():
    outcome = apply(
        rules_of(["strip-module", "drop fc"]), ["module.fc.b", "module.a", "module.fc.a"]
    )

    assert outcome.drops == ("module.fc.b", "module.fc.a")
    assert outcome.renames == {"module.a": "a"}


def test_only_rules_side_by_side_are_a_union():
    keys = ["a.w", "b.w", "c.w"]

    assert run(keys, "only a", "only b") == ["a.w", "b.w"]
    assert run(keys, "only a", "drop a.w", "only b") == ["b.w"]


def test_a_renaming_rule_ends_the_union():
    """The second `only` sees what the first left, even where the rule between changed nothing."""
    keys = ["a.w", "b.w"]

    assert run(keys, "only a", "rename x y", "only b") == []
    assert run(keys, "only a", "rename ^a b", "only b") == ["b.w"]


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        (["only a", "only z", "drop y"], ["only z", "drop y"]),
        (["only z"], ["only z"]),
        (["drop a", "drop a"], []),
        (["drop a", "drop a.w"], ["drop a.w"]),
        (["only a", "drop b"], ["drop b"]),
        (["only a", "drop a", "only b"], []),
        (["unwrap", "unwrap-at a", "strip-prefix z"], ["unwrap", "unwrap-at a", "strip-prefix z"]),
    ],
)
def test_rules_that_match_nothing_are_named_once(words, idle):
    assert apply(rules_of(words), ["a.w", "b.w"]).idle == tuple(rules_of(idle))


def test_only_that_matches_nothing_leaves_no_tensor():
    assert apply([Rule("only", "z")], ["a", "b"], ["epoch"]).drops == ("a", "b")


def test_other_entries_are_renamed_and_never_dropped():
    rules = [Rule("only", "fc"), Rule("drop", "epoch"), Rule("add-prefix", "m")]
    outcome = apply(rules, ["fc.w", "a.w"], ["epoch", "lr"])

    assert outcome.renames == {"fc.w": "m.fc.w", "epoch": "m.epoch", "lr": "m.lr"}
    assert outcome.drops == ("a.w",)
    assert outcome.idle == (rules[1],)


def test_other_entries_collide_with_tensors():
    with pytest.raises(KeyCollision) as caught:
        apply([Rule("rename", "^w$", "epoch")], ["w", "b"], ["epoch"])

    assert caught.value.text == "'w' and 'epoch' would both become 'epoch'; nothing written"
    assert caught.value.hint == "keep one of them with --drop 'w' before --rename '^w$' epoch"


def test_collision_names_both_keys_and_the_way_out():
    with pytest.raises(KeyCollision) as caught:
        apply([Rule("strip-prefix", "module.")], ["fc.weight", "module.fc.weight"])

    assert caught.value.text == (
        "'module.fc.weight' and 'fc.weight' would both become 'fc.weight'; nothing written"
    )
    assert caught.value.hint == (
        "keep one of them with --drop 'fc.weight' or --drop 'module.fc.weight'"
        " before --strip-prefix module."
    )


def test_the_way_out_of_a_collision_works_and_drops_one_tensor():
    keys = ["fc.weight", "module.fc.weight", "module.a.w"]

    assert run(keys, "drop fc.weight", "strip-module") == ["fc.weight", "a.w"]
    assert run(keys, "drop module.fc.weight", "strip-module") == ["fc.weight", "a.w"]


def test_a_drop_behind_the_collision_is_too_late():
    """On the names as they stand it would take both."""
    with pytest.raises(KeyCollision):
        run(["fc.weight", "module.fc.weight"], "strip-module", "drop fc.weight")


def test_collision_of_the_default_rule_offers_to_leave_names_alone():
    with pytest.raises(KeyCollision) as caught:
        run(["total_ops", "module.total_ops", "module.w"], "strip-module-if-all")

    assert caught.value.hint.endswith(", or leave names alone with --keep-module")


@pytest.mark.parametrize(
    ("keys", "hint"),
    [
        (["w", "module.w"], "keep one of them with --drop 'module.w' before --strip-module"),
        (["a.w", "module.a.w", "module.a.w.x"], "keep one of them with --drop 'a.w' before --strip-module"),
        (["it's.w", "module.it's.w"], "keep one of them with --drop 'it'\"'\"'s.w' or --drop 'module.it'\"'\"'s.w' before --strip-module"),
        (["a*.w", "module.a*.w", "ab.w", "module.ab"], "keep one of them with --drop 'module.a*.w' before --strip-module"),
        (["a*", "module.a*", "module.ab.w", "c.a"], "give one of them another name first, with --rename-file"),
    ],
)  # fmt: skip
def test_the_way_out_names_globs_that_take_that_tensor_alone(keys, hint):
    with pytest.raises(KeyCollision) as caught:
        run(keys, "strip-module")

    assert caught.value.hint == hint


def test_the_way_out_speaks_of_the_names_as_they_stand_there():
    with pytest.raises(KeyCollision) as caught:
        run(["m.fc.w", "m.module.fc.w"], "strip-prefix m", "strip-module")

    assert caught.value.text.startswith("'m.module.fc.w' and 'm.fc.w' would both become 'fc.w'")
    assert "--drop 'fc.w' or --drop 'module.fc.w' before --strip-module" in caught.value.hint


def test_collision_counts_the_others():
    with pytest.raises(KeyCollision, match=r"become 'a' \(and 2 more\); nothing"):
        apply([Rule("strip-module")], ["module.a", "a", "module.b", "b", "c", "module.c"])


def test_a_swap_is_no_collision():
    check_collisions(["a", "b"], {"a": "b", "b": "a"})


def test_check_collisions_names_both():
    with pytest.raises(KeyCollision, match=r"'a\.w' and 'b\.w' would both become 'b\.w'") as caught:
        check_collisions(["a.w", "b.w"], {"a.w": "b.w"})

    assert caught.value.hint == "keep one of them with --drop 'b.w' or --drop 'a.w'"


BAD = [
    Rule("strip"), Rule("unwrap-at"), Rule("add-module-at", "."), Rule("strip-prefix", "."),
    Rule("add-prefix", ""), Rule("add-prefix", "a..b"), Rule("add-prefix", ".a"), Rule("only"),
    Rule("drop", ""), Rule("rename", "", "x"), Rule("rename", "x"), Rule("rename-file"),
]  # fmt: skip


@pytest.mark.parametrize("rule", BAD, ids=lambda rule: rule.flag)
def test_bad_rules_are_usage_errors_even_without_keys(rule):
    with pytest.raises(UsageError, match=rule.name):
        apply([rule], [])


def test_a_rule_knows_its_flag():
    assert Rule("rename", r"(^|\.)g$", r"\1w").flag == r"--rename '(^|\.)g$' '\1w'"
    assert (
        Rule("rename-file", "my names.json", pairs=(("a", "b"),)).flag
        == "--rename-file 'my names.json'"
    )


# Properties

component = st.sampled_from(
    ["module", "features", "model", "0", "w", "_orig_mod", "", "权重", "🔥"]
)
name = st.lists(component, min_size=1, max_size=4).map(".".join).filter(bool)
tables = st.lists(name, unique=True, max_size=10)
every_rule = st.one_of(
    st.sampled_from([Rule(name, "features") for name in RULES if not name.startswith("rename")]),
    st.sampled_from([
        Rule("rename", "o", "0"), Rule("rename", r"(^|\.)w$", r"\1features"), Rule("drop", "*o*"),
        Rule("rename-file", "f", pairs=(("module.w", "w"), ("w", "module.w"), ("0", "model"))),
    ]),
)  # fmt: skip


@given(tables, st.lists(every_rule, max_size=5), st.integers(0, 3))
def test_no_rule_loses_a_tensor_unasked(keys, rules, few):
    keys, others = keys[few:], keys[:few]
    try:
        outcome = apply(rules, keys, others)
    except KeyCollision:
        return
    left = [key for key in keys if key not in outcome.drops] + others
    names = [outcome.renames.get(key, key) for key in left]

    assert len(set(names)) == len(names) == len(keys) + len(others) - len(outcome.drops)
    assert all(names)
    assert not outcome.renames.keys() & set(outcome.drops)
    assert all(old != new for old, new in outcome.renames.items())
    if not {rule.name for rule in rules} & {"only", "drop"}:
        assert outcome.drops == ()


@given(tables, st.sampled_from(["model", "a.b.", "网络", "module"]))
def test_strip_prefix_undoes_add_prefix(keys, prefix):
    added = run(keys, f"add-prefix {prefix}")

    assert added == pre(prefix.rstrip(".") + ".", keys)
    assert run(added, f"strip-prefix {prefix}") == keys


@given(tables, st.sampled_from(["*o*", "module.*", "features", "**.w"]))
def test_only_and_drop_of_one_glob_share_the_tensors(keys, glob):
    kept = apply([Rule("only", glob)], keys).drops
    left = apply([Rule("drop", glob)], keys).drops

    assert sorted(kept + left) == sorted(keys)


def test_many_rules_over_a_hundred_thousand_keys():
    """Best of two: about a second, a third of it Python's `re` with groups in the new text."""
    keys = [f"module.model.layers.{i // 10}.block{i % 10}.weight" for i in range(100_000)]
    rules = rules_of([
        "strip-module", "strip-prefix model", r"rename layers\.(\d+) l\1", "drop *norm*",
        "only **.weight", "add-prefix net",
    ])  # fmt: skip
    took = []
    for _ in range(2):
        start = time.process_time()
        outcome = apply(rules, keys)
        took.append(time.process_time() - start)

    assert outcome.renames[keys[-1]] == "net.l9999.block9.weight"
    assert [rule.name for rule in outcome.idle] == ["drop"]
    assert min(took) < 4
