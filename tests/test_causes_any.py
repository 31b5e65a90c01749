"""Whatever the keys are: no error, and the answer is what its rules really make."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptool.causes import explain
from ckptool.checkpoint import DTYPES, Table, Tensor, Wanted
from ckptool.cli.convert import _RULES
from ckptool.compare import match
from ckptool.layer_versions import metadata_renames
from ckptool.rules import apply

WORDS = ["module", "_orig_mod", "_fsdp_wrapped_module", "net", "a", "b", "layer1", "0", "1", "10", "fc",
         "weight", "bias", "gamma", "weight_g", "weight_v", "running_mean", "num_batches_tracked",
         "parametrizations", "original0", "total_ops", "_extra_state", "", "é", "*", "x.y", "\x00",
         "a\\1", "-o", "'", "\n", "denselayer1", "norm", "norm1"]  # fmt: skip
KEYS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(".".join)
SHAPES = st.one_of(st.none(), st.lists(st.integers(0, 4), max_size=3).map(tuple))
ROWS = st.dictionaries(KEYS, SHAPES, max_size=10)
VERSIONS = st.one_of(
    st.none(),
    st.dictionaries(KEYS, st.sampled_from([{}, {"version": 1}, {"version": 2}]), max_size=3),
)


def table(rows, others, path, metadata=None):
    tensors = tuple(Tensor(k, DTYPES["float32"], s, None, 0, None) for k, s in rows.items())
    return Table(path, tensors, metadata, others=tuple((key, "int") for key in others))


@st.composite
def questions(draw):
    """A model, and tables whose keys are often the model's, under other names."""
    wanted = draw(ROWS)
    tables = []
    for n in range(draw(st.integers(0, 3))):
        rows = draw(ROWS)
        prefix = draw(st.sampled_from(["", "module.", "net.", "_orig_mod.module."]))
        for key in draw(st.lists(st.sampled_from(sorted(wanted)), max_size=8)) if wanted else ():
            rows[prefix + key] = wanted[key]
        others = [k for k in draw(st.lists(KEYS, max_size=2, unique=True)) if k not in rows]
        tables.append(table(rows, others, (f"t{n}",), draw(VERSIONS)))
    weights = draw(st.one_of(st.none(), st.integers(0, 3)))
    kinds = st.sampled_from(["parameter", "buffer", "tensor", "extra"])
    return [Wanted(k, s, None, draw(kinds)) for k, s in wanted.items()], tables, weights


@settings(max_examples=400, deadline=None)
@given(questions())
@example(([], [], None))
@example(([Wanted("a", ())], [table({"": ()}, [], ())], 0))
def test_the_answer_is_what_its_rules_make(question):
    wanted, tables, weights = question
    cause = explain(wanted, tables, weights)
    default = None if not tables else tables[weights if weights in range(len(tables)) else 0]
    stands = match(wanted, have_of(default), default and default.metadata)
    assert cause.match == stands._replace(cause=cause.sentence)
    chosen = next((t for t in tables if t.path == cause.table), None)
    assert (chosen is None) == (not tables)
    if chosen is None:
        return
    assert cause.after._replace(cause="") == after(wanted, chosen, cause.rules)
    assert len(cause.after.loaded) >= len(stands.loaded)
    assert cause.sentence
    if not cause.rules and chosen is default:
        assert cause.after == cause.match
        assert cause.options == ""


def have_of(source):
    if source is None:
        return {}
    return {**{t.key: t.shape for t in source.tensors}, **{k: None for k, _ in source.others}}


def after(wanted, source, rules):
    """What a conversion with these rules leaves for the model."""
    keys = [t.key for t in source.tensors]
    others = [key for key, _ in source.others if key not in keys]
    outcome = apply(rules, keys, others)
    assert not outcome.idle  # a conversion refuses a rule that matches nothing
    gone = set(outcome.drops)
    left = [key for key in (*keys, *others) if key not in gone]
    shapes = {t.key: t.shape for t in source.tensors}
    have = {outcome.renames.get(key, key): shapes.get(key) for key in left}
    versions = source.metadata
    if versions is not None and outcome.renames:
        moved, lost = metadata_renames(list(versions), outcome.renames, left)
        versions = {moved.get(p, p): v for p, v in versions.items() if p not in lost}
    return match(wanted, have, versions)


@settings(max_examples=300, deadline=None)
@given(questions())
def test_the_flags_are_the_rules(question):
    wanted, tables, weights = question
    cause = explain(wanted, tables, weights)
    names = {name: option for option, name in _RULES.items()}
    words = shlex.split(cause.options)
    if words[:1] in (["--at"], ["--select"]):
        assert words[1] == ".".join(map(str, cause.table)) or words[1] == "."
        words = words[2:]
    if not words:
        return
    said = [
        w
        for rule in cause.rules
        for w in (f"--{rule.name}", rule.argument, rule.to)
        if w is not None
    ]
    assert words == said
    assert all(rule.name in names for rule in cause.rules)


@pytest.mark.parametrize("count", [0, 1])
def test_the_smallest_questions(count):
    wanted = [Wanted("w", (2,))][:count]
    assert explain(wanted, [table({}, [], ())], 0).after.fits is (count == 0)
    assert explain(wanted, [table({"w": (2,)}, [], ())], 0).after.fits is (count == 1)
