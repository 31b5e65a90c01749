"""Prefixes, regular expressions and files of names, against the recipes of public reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rules_support import NET, pre, run, slugs

from ckptool.errors import KeyCollision, UsageError
from ckptool.renaming import parse_rename_file
from ckptool.rules import Rule, apply

DENSE = "module.densenet121.features.denseblock1.denselayer1."
LAYERS = ["norm.1.weight", "norm.1.running_mean", "conv.1.weight", "norm.2.bias", "conv.2.weight"]
BERT = ["enc.LayerNorm.gamma", "enc.LayerNorm.beta", "block.gamma", "gamma_proj.weight", "noise.alphabeta"]  # fmt: skip

CASES = {
    "R05 mlp_module": (
        ["module.mlp_module.layer0.weight", "module.submodule.head_module.bias"],
        [Rule("strip-prefix", "module.")],
        ["mlp_module.layer0.weight", "submodule.head_module.bias"],
    ),
    "R06 some carry it": (
        ["module.backbone.weight", "classifier.weight"],
        [Rule("strip-prefix", "module")],
        ["backbone.weight", "classifier.weight"],
    ),
    "R11 only the first": (
        ["_model.field._model.weight", "_model.proposal_networks.0.weight"],
        [Rule("strip-prefix", "_model.")],
        ["field._model.weight", "proposal_networks.0.weight"],
    ),
    "R12 siblings": (
        ["layers.1.weight", "layers.10.weight", "layers.18.weight", "layers.1.weight.lora_A"],
        [Rule("strip-prefix", "layers.1")],
        ["weight", "layers.10.weight", "layers.18.weight", "weight.lora_A"],
    ),
    "R13 for a detector": (NET, [Rule("add-prefix", "backbone.")], pre("backbone.", NET)),
    "R13 of a detector": (
        [*pre("backbone.", NET), "neck.aux_backbone.weight"],
        [Rule("only", "backbone.**"), Rule("strip-prefix", "backbone.")],
        NET,
    ),
    "R13 neck stays": (
        ["backbone.w", "neck.aux_backbone.weight", "neck.backbone.weight"],
        [Rule("strip-prefix", "backbone.")],
        ["w", "neck.aux_backbone.weight", "neck.backbone.weight"],
    ),
    "R14 LayerNorm only": (
        BERT,
        [
            Rule("rename", r"(LayerNorm)\.gamma$", r"\1.weight"),
            Rule("rename", r"(?P<of>LayerNorm)\.beta$", r"\g<of>.bias"),
        ],
        ["enc.LayerNorm.weight", "enc.LayerNorm.bias", *BERT[2:]],
    ),
    "R14 every gamma": (
        BERT,
        [Rule("rename", r"(^|\.)gamma$", r"\1weight")],
        ["enc.LayerNorm.weight", BERT[1], "block.weight", *BERT[3:]],
    ),
    "R15 by component": (
        [DENSE + "norm.1.weight", DENSE + "conv.2.weight", "module.densenet121.features.norm5.weight"],
        [Rule("rename", r"norm\.(\d)", r"norm\1"), Rule("rename", r"conv\.(\d)", r"conv\1")],
        [DENSE + "norm1.weight", DENSE + "conv2.weight", "module.densenet121.features.norm5.weight"],
    ),
    "R15 as the recipe": (
        [*pre(DENSE, LAYERS), "module.densenet121.features.conv0.weight"],
        [Rule("strip-module"), Rule("rename", r"(denselayer\d+\.(?:norm|conv))\.(\d)", r"\1\2")],
        [
            *pre(DENSE[7:], ["norm1.weight", "norm1.running_mean", "conv1.weight", "norm2.bias", "conv2.weight"]),
            "densenet121.features.conv0.weight",
        ],
    ),
    "R16 weight_norm": (
        ["conv.bias", "conv.weight_g", "conv.weight_v"],
        [
            Rule("rename", r"weight_g$", "parametrizations.weight.original0"),
            Rule("rename", r"weight_v$", "parametrizations.weight.original1"),
        ],
        ["conv.bias", "conv.parametrizations.weight.original0", "conv.parametrizations.weight.original1"],
    ),
    "R17 add model": (["encoder.w", "decoder.w"], [Rule("add-prefix", "model")], ["model.encoder.w", "model.decoder.w"]),
    "several components": (
        ["model.net.w", "model.network.w", "model.net", "model.net."],
        [Rule("strip-prefix", "model.net")],
        ["w", "model.network.w", "model.net", "model.net."],
    ),
    "part of a component": (["smp_model.x", "model_ema.x"], [Rule("strip-prefix", "model.")], ["smp_model.x", "model_ema.x"]),
    "once": (["model.model.w"], [Rule("strip-prefix", "model")], ["model.w"]),
    "not a pattern": (["a+b.w", "aab.w"], [Rule("strip-prefix", "a+b")], ["w", "aab.w"]),
    "every match": (["a.a.w"], [Rule("rename", "a", "b")], ["b.b.w"]),
    "nothing put there": (["enc_0.w"], [Rule("rename", "_", "")], ["enc0.w"]),
    "an empty part was there": (["a..w", "b"], [Rule("rename", "a", "c")], ["c..w", "b"]),
    "Chinese": (["网络.卷积.权重"], [Rule("strip-prefix", "网络."), Rule("rename", "卷积", "conv")], ["conv.权重"]),
    "emoji": (["🔥.w", "🔥🔥.w"], [Rule("strip-prefix", "🔥")], ["w", "🔥🔥.w"]),
    "a new line": (["m.a\nb.w", "m\n.w"], [Rule("strip-prefix", "m")], ["a\nb.w", "m\n.w"]),
    "a swap by file": (
        ["a.w", "b.w", "c.w"],
        [Rule("rename-file", "f", pairs=(("a.w", "b.w"), ("b.w", "a.w")))],
        ["b.w", "a.w", "c.w"],
    ),
    "whole keys by file": (["a", "a.b", "ba"], [Rule("rename-file", "f", pairs=(("a", "x"),))], ["x", "a.b", "ba"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_recipes(name):
    """Each rule gives the names that the recipe's ground truth asks for."""
    keys, rules, expected = CASES[name]

    assert run(keys, *rules) == expected


def test_a_prefix_that_some_carry_is_said():
    """R06, P015: never cut by length; say how many had it."""
    (note,) = apply([Rule("strip-prefix", "m.")], ["m.a", "m.b", "c.m.d", "n_averaged"]).notes

    assert (note.slug, note.text) == (
        "partial-prefix",
        "2 of 3 keys carry 'm.'; the others keep their names",
    )
    assert slugs(["m.a", "n_averaged"], "strip-prefix m") == []
    assert slugs(["a"], "strip-prefix m") == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("(", "x", "'(' is no regular expression: missing ), unterminated subpattern at position 0"),
        ("a[", "x", "at position 1"),
        ("(a)", r"\2", r"'\2' cannot replace '(a)': invalid group reference 2 at position 1"),
        ("a", r"\g<n>", "unknown group name 'n'"),
        ("a", "b\\", "bad escape (end of pattern) at position 1"),
        ("a", r"\q", r"bad escape \q at position 0"),
    ],
)  # fmt: skip
def test_a_bad_expression_is_named_with_its_place(old, new, says):
    with pytest.raises(UsageError) as caught:
        apply([Rule("rename", old, new)], ["a.w"])

    assert says in caught.value.text


@pytest.mark.parametrize(
    ("old", "new", "key", "result"),
    [
        ("fc", "", "fc.weight", ".weight"),
        (r"\.weight", ".", "fc.weight", "fc."),
        ("fc", "", "a.fc.weight", "a..weight"),
        (".", ".", "fc", ".."),
        ("$", ".", "a..b", "a..b."),
    ],
)
def test_an_empty_component_is_refused(old, new, key, result):
    with pytest.raises(UsageError) as caught:
        apply([Rule("rename", old, new)], [key])

    assert f"'{result}' of '{key}'" in caught.value.text


def test_nothing_left_of_a_name_is_refused():
    with pytest.raises(UsageError, match="leave nothing of 'fc'"):
        apply([Rule("rename", ".*", "")], ["fc"])
    with pytest.raises(UsageError, match="leave nothing of 'a'"):
        apply([Rule("rename-file", "f.json", pairs=(("a", ""),))], ["a"])


def test_a_rename_of_two_to_one_is_refused():
    with pytest.raises(
        KeyCollision, match=r"'layer\.1' and 'layer\.0' would both become 'layer\.0'"
    ):
        apply([Rule("rename", r"\d", "0")], ["layer.0", "layer.1"])
    with pytest.raises(KeyCollision, match="would both become 'c'"):
        apply([Rule("rename-file", "f", pairs=(("a", "c"), ("b", "c")))], ["a", "b"])


# Files of names


def test_entries_without_a_key_are_said_and_the_others_done():
    pairs = tuple((old, old.upper()) for old in ["a", "z", "y", "x", "w", "v"])
    rule = Rule("rename-file", "F.json", pairs=pairs)
    outcome = apply([rule], ["a", "b"])

    assert outcome.renames == {"a": "A"}
    assert [tuple(note) for note in outcome.notes] == [
        ("rename-unmatched", "5 of 6 entries of F.json match no key: z, y, x and 2 more", None)
    ]
    assert outcome.idle == ()


def test_a_file_without_a_match_is_idle_and_says_no_more():
    rule = Rule("rename-file", "F.json", pairs=(("z", "y"),))
    outcome = apply([rule], ["a"])

    assert (outcome.renames, outcome.notes, outcome.idle) == ({}, (), (rule,))


def test_an_entry_that_keeps_its_name_matches():
    rule = Rule("rename-file", "F.json", pairs=(("a", "a"),))
    outcome = apply([rule], ["a"])

    assert (outcome.renames, outcome.idle) == ({}, ())


def test_a_file_of_names_is_read_in_order():
    data = '\ufeff{"fc.w": "head.w", "权重": "w\\u0031"}'.encode()

    assert parse_rename_file(data, "F.json") == (("fc.w", "head.w"), ("权重", "w1"))
    assert parse_rename_file(b"{}", "F.json") == ()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"a": "b",\n "c" "d"}', "Expecting ':' delimiter (line 2, column 6)"),
        (b"", "line 1, column 1"),
        (b'{"a": "b", "a": "b"}', "'a' stands in it twice"),
        (b'{"a": 1}', "the new name of 'a' is no text"),
        (b'{"a": {"b": "c"}}', "the new name of 'a' is no text"),
        (b'[["a", "b"]]', "no JSON object of names"),
        (b'"a"', "no JSON object of names"),
        (b'{"\xff": "b"}', "byte 2 is no UTF-8"),
        (b"[" * 200_000, "nested too deep"),
        (b'{"a": ' + b"1" * 5_000 + b"}", "no text"),
    ],
)
def test_a_bad_file_of_names_is_refused_with_the_place(data, says):
    with pytest.raises(UsageError) as caught:
        parse_rename_file(data, "F.json")

    assert caught.value.path == "F.json"
    assert says in caught.value.text or "number too long" in caught.value.text


@given(st.dictionaries(st.text(min_size=1), st.text(), max_size=6))
def test_a_file_of_names_comes_back(names):
    import json

    assert parse_rename_file(json.dumps(names).encode(), "f") == tuple(names.items())
