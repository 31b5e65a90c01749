"""What diff sees through: wrappers and prefixes, places of state_dicts, order; and what counts."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from diff_support import BASE_NAMES, contiguous_record, diff, prefixed, write_legacy, write_zip

from ckptool.alignment import meet, moved_keys, pair_tables
from ckptool.checkpoint import Table
from ckptool.errors import KeyCollision, RuleMatchesNothing, UsageError

SHAPES = {name: (at + 1,) for at, name in enumerate(BASE_NAMES)}


def net(prefix="", names=BASE_NAMES):
    """A small state_dict under a prefix."""
    return OrderedDict((prefix + n, torch.arange(float(at + 1))) for at, n in enumerate(names))


def named(prefix, shapes=SHAPES):
    return {prefix + key: shape for key, shape in shapes.items()}


# -- names -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ("", "", ((), ())),
        ("module.", "", (("strip 'module.'",), ())),
        ("", "module.", ((), ("strip 'module.'",))),
        ("_orig_mod.module.", "", (("strip '_orig_mod.module.'",), ())),
        ("module.", "_orig_mod.", (("strip 'module.'",), ("strip '_orig_mod.'",))),
        ("backbone.", "", (("strip 'backbone.'",), ())),
        ("model.net.", "net.", (("strip 'model.'",), ())),
        ("module.model.", "", (("strip 'module.model.'",), ())),
        ("student.", "teacher.", (("strip 'student.'",), ("strip 'teacher.'",))),
        ("module.", "module.", ((), ())),
    ],
)
def test_a_wrapper_or_prefix_on_all_keys_is_found(a, b, words):
    left, right = meet(named(a), named(b))
    assert (left.words, right.words) == words
    one = {left.renames.get(key, key) for key in named(a)}
    two = {right.renames.get(key, key) for key in named(b)}
    assert one == two


def test_interior_wrappers_are_seen_through():
    inside = {"features.module.0.weight": (3,), "features.module.1.weight": (4,), "fc.bias": (1,)}
    plain = {key.replace(".module", ""): shape for key, shape in inside.items()}
    left, _ = meet(inside, plain)
    assert left.renames == {key: key.replace(".module", "") for key in list(inside)[:2]}
    assert left.words == ("unwrap features.module",)


def test_a_prefix_on_some_keys_is_none():
    some = named("module.")
    some["extra.bias"] = (1,)
    left, right = meet(some, {**SHAPES, "extra.bias": (1,)})
    assert (left.renames, right.renames) == ({}, {})


def test_counters_at_the_root_do_not_count():
    averaged = {"n_averaged": (), **named("module.")}
    left, _ = meet(averaged, SHAPES)
    assert left.words == ("strip 'module.'",)
    assert "n_averaged" not in left.renames


def test_names_that_meet_with_more_shapes_win():
    """`0.weight` of b is `1.0.weight` of a only where the shapes say so."""
    a = {"1.0.weight": (3, 2), "1.0.bias": (3,)}
    assert meet(a, {"0.weight": (3, 2), "0.bias": (3,)})[0].words == ("strip '1.'",)
    assert meet(a, {"2.weight": (3, 2)})[0].words == ()  # another layer, not the same under 2
    assert meet(a, {"2.weight": (3, 2), "2.bias": (3,)})[0].words == ()


def test_a_part_of_the_net_keeps_its_names():
    part = {key: shape for key, shape in SHAPES.items() if key.startswith("layer1.")}
    assert len(part) > 1
    left, right = meet(SHAPES, part)
    assert (left.renames, right.renames) == ({}, {})


def test_a_prefix_that_would_make_one_of_two_keys_is_left():
    twins = {"module.a.w": (1,), "module.module.a.w": (1,), "module.b": (2,)}
    left, _ = meet(twins, {"a.w": (1,), "b": (2,), "module.a.w": (1,)})
    assert sorted(left.renames.values()) == ["a.w", "b", "module.a.w"]


def test_two_new_heads_do_not_hide_the_wrapper(tmp_path):
    one, two = net(), net("module.")
    two["module.fc.weight"] = torch.zeros(9, 9)
    two["module.extra"] = torch.zeros(2)
    del two["module.conv1.bias"]
    found = diff(write_zip(tmp_path / "a", one), write_zip(tmp_path / "b", two))
    assert found.explained_by == ("strip 'module.' from b.pth",)
    assert [row.key for row in found.added] == ["extra"]
    assert [row.key for row in found.removed] == ["conv1.bias"]
    assert {row.key: row.what for row in found.changed} == {"fc.weight": ("shape",)}


# -- rules that are asked for ------------------------------------------------------------------
def test_asked_rules_run_over_both_files(tmp_path):
    a = write_zip(tmp_path / "a", {**net("model."), "ema.x": torch.ones(1)})
    b = write_zip(tmp_path / "b", {**net(), "ema.x": torch.ones(1)})
    assert not diff(a, b).same
    found = diff(a, b, strip_prefix="model.")
    assert found.same
    assert found.explained_by == ("strip 'model.' from a.pth",)
    with pytest.raises(RuleMatchesNothing, match=r"--strip-prefix net\. matches no key"):
        diff(a, b, strip_prefix=["net."])
    with pytest.raises(RuleMatchesNothing, match="--unwrap"):
        diff(a, b, unwrap=True)


def test_unwrap_takes_what_is_on_some_keys_too(tmp_path):
    mixed = {"_orig_mod.a": torch.ones(1), "b": torch.ones(2)}
    a, b = (
        write_zip(tmp_path / "a", mixed),
        write_zip(tmp_path / "b", {"a": torch.ones(1), "b": torch.ones(2)}),
    )
    found = diff(a, b, unwrap=True)
    assert found.same
    assert found.strict is False


def test_an_asked_rule_that_would_lose_a_key_is_refused(tmp_path):
    a = write_zip(tmp_path / "a", {"module.a": torch.ones(1), "a": torch.ones(1)})
    with pytest.raises(KeyCollision, match=r"'module\.a' and 'a'"):
        diff(a, a, strip_prefix="module.")


@pytest.mark.parametrize(
    "options", [{"only": "fc*"}, {"only": ["fc.*"]}, {"drop": ["conv*", "layer1", "layer2"]}]
)
def test_globs_choose_tensors_by_any_of_their_names(options, tmp_path):
    one, two = net(), net("module.")
    two["module.conv1.weight"] += 1
    a, b = write_zip(tmp_path / "a", one), write_zip(tmp_path / "b", two)
    found = diff(a, b, **options)
    assert found.same
    assert {row.key for row in found.tensors} == {
        key for key in BASE_NAMES if key.startswith("fc.")
    }
    assert not diff(a, b, only="module.conv1.*").same
    with pytest.raises(RuleMatchesNothing):
        diff(a, b, only="nothing")


# -- --strict ----------------------------------------------------------------------------------
def test_strict_makes_names_devices_and_order_count(tmp_path):
    a = write_zip(tmp_path / "a", net())
    for name, obj, tag, what in (
        ("names", net("module."), "cpu", set()),
        ("device", net(), "cuda:1", {"device"}),
        ("order", OrderedDict(reversed(net().items())), "cpu", {"order"}),
    ):
        b = write_zip(tmp_path / name, obj, tag)
        assert diff(a, b).same
        found = diff(a, b, strict=True)
        assert not found.same
        assert {word for row in found.changed for word in row.what} == what
        assert found.strict_differences == (("names",) if name == "names" else ())
    assert diff(a, write_legacy(tmp_path / "c", net()), strict=True).same


def test_the_fewest_keys_are_said_to_have_moved(tmp_path):
    assert moved_keys("abcdef", "abfcde") == {"f"}
    assert moved_keys("abcdef", "fedcba") == set("abcde")
    assert moved_keys("abc", "xaybzc") == set()
    assert moved_keys("", "abc") == set()
    assert moved_keys("abcd", "cdab") in ({"a", "b"}, {"c", "d"})
    one = net()
    two = net()
    two.move_to_end(BASE_NAMES[0])
    a, b = write_zip(tmp_path / "a", one), write_zip(tmp_path / "b", two)
    assert diff(a, b).explained_by == ("order of keys (1 moved)",)
    assert [row.key for row in diff(a, b, strict=True).changed] == [BASE_NAMES[0]]


# -- state_dicts -------------------------------------------------------------------------------
def tables(*paths):
    return [Table(path, (contiguous_record("w", (1,)),)) for path in paths]


def test_state_dicts_meet_by_place_then_by_being_the_weights():
    model, ema, root = ("model",), ("ema",), ()
    for one, first, two, second, pairs in (
        ([model], 0, [root], 0, [(0, 0)]),
        ([model, ema], 0, [ema, model], 0, [(0, 1), (1, 0)]),
        ([model, ema], 0, [ema], 0, [(1, 0)]),
        ([model, ema], 0, [("state_dict",), ema], 0, [(0, 0), (1, 1)]),
        ([], None, [root], 0, []),
    ):
        assert pair_tables(tables(*one), first, tables(*two), second) == pairs


def test_several_state_dicts_are_compared_each_with_its_own(tmp_path):
    a = write_zip(tmp_path / "a", {"netG": net("module."), "netD": net(), "step": 3})
    changed = net("module.")
    changed["module.fc.bias"] = changed["module.fc.bias"] + 1
    b = write_zip(tmp_path / "b", {"netG": net(), "netD": changed, "step": 3})
    found = diff(a, b)
    assert [(row.key, row.what) for row in found.changed] == [("netD.fc.bias", ("value",))]
    assert set(found.explained_by) == {"strip 'module.' from a.pth", "strip 'module.' from b.pth"}
    assert len(found.tensors) == 2 * len(BASE_NAMES)


def test_a_lost_state_dict_is_lost(tmp_path):
    a = write_zip(tmp_path / "a", {"model": net(), "model_ema": net(), "epoch": 1})
    b = write_zip(tmp_path / "b", {"model": net(), "epoch": 1})
    found = diff(a, b)
    assert [row.top for row in found.removed] == [("model_ema",)] * len(BASE_NAMES)
    assert found.extras == ()
    assert not found.same


def test_at_compares_one_state_dict_and_nothing_beside_it(tmp_path):
    a = write_zip(tmp_path / "a", {"model": net(), "ema": net("module."), "epoch": 1})
    b = write_zip(tmp_path / "b", net())
    for place in ("model", "ema"):
        found = diff(a, b, at=place)
        assert found.same
        assert found.extra_count == 0
        assert len(found.tensors) == len(BASE_NAMES)
    assert diff(b, a, at="ema").same
    with pytest.raises(UsageError, match="neither file has a state_dict at 'nothing'"):
        diff(a, b, at="nothing")
    with pytest.raises(UsageError, match=r"there is no state_dict at '\.'"):
        diff(b, a, at=".")  # two in the other: which is meant is no guess


def test_nesting_is_seen_through_and_said(tmp_path):
    a = write_zip(tmp_path / "a", {"state_dict": net("module.")})
    b = write_zip(tmp_path / "b", net())
    found = diff(a, b)
    assert found.same
    assert "state_dict at 'state_dict' -> the top" in found.explained_by


# -- what was renamed --------------------------------------------------------------------------
def test_a_tensor_under_another_name_is_told_but_counts(tmp_path):
    one, two = net(), net()
    two["fc.scale"] = two.pop("fc.weight")
    found = diff(write_zip(tmp_path / "a", one), write_zip(tmp_path / "b", two))
    assert [row.key for row in found.removed] == ["fc.weight"]
    assert [row.key for row in found.added] == ["fc.scale"]
    assert [n.text for n in found.notes if n.slug == "renamed"] == [
        "the same numbers under another name: 'fc.weight' -> 'fc.scale'"
    ]


def test_what_could_be_either_of_two_is_not_called_renamed(tmp_path):
    one = {"a": torch.zeros(3), "b": torch.zeros(3), "x": torch.ones(1)}
    two = {"c": torch.zeros(3), "d": torch.zeros(3), "x": torch.ones(1)}
    found = diff(write_zip(tmp_path / "a", one), write_zip(tmp_path / "b", two))
    assert not [n for n in found.notes if n.slug == "renamed"]


def test_prefixed_file_against_itself(tmp_path):
    a = write_zip(tmp_path / "a", prefixed(net(), "x."))
    assert diff(a, a).explained_by == ()
