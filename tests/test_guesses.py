"""The general renaming: what is certain is found exactly, what is not is never guessed."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.causes import explain
from ckptool.causes.guesses import Tie, guess
from ckptool.causes.series import Content
from ckptool.causes.spelling import is_exact, renaming, spell
from ckptool.checkpoint import DTYPES, Table, Tensor, Wanted
from ckptool.rules import apply


def items(*rows):
    """Names with shapes: 'a.weight 3 4' is a matrix."""
    split = [row.split() for row in rows]
    return [(name, Content(tuple(map(int, sizes)))) for name, *sizes in split]


def table(rows):
    return Table((), tuple(Tensor(k, DTYPES["float32"], s, None, 0, None) for k, s in rows))


def asked(wanted, have):
    return explain([Wanted(key, shape) for key, shape in wanted], [table(have)], 0)


# -- random renamings --------------------------------------------------------------------------
def names(letters, count):
    """Different names of one to four components, no letter of which the other side has."""
    part = st.text(letters, min_size=1, max_size=4)
    name = st.lists(part, min_size=1, max_size=4).map(".".join)
    return st.lists(name, min_size=count, max_size=count, unique=True)


@st.composite
def renamings(draw, distinct):
    """(wanted rows, file rows, truth {file name: key}), the file's rows in any order."""
    count = draw(st.integers(1, 12))
    ours, theirs = draw(names("nopqr", count)), draw(names("abcde", count))
    sizes = st.lists(st.integers(1, 4), max_size=3).map(tuple)
    if distinct:
        shapes = draw(st.lists(sizes, min_size=count, max_size=count, unique=True))
    else:
        few = draw(st.lists(sizes, min_size=1, max_size=3, unique=True))
        shapes = draw(st.lists(st.sampled_from(few), min_size=count, max_size=count))
    wanted = list(zip(theirs, shapes, strict=True))
    have = draw(st.permutations(list(zip(ours, shapes, strict=True))))
    return wanted, have, dict(zip(ours, theirs, strict=True))


def has_a_key_below_a_key(keys):
    """Whether a key lies below another, which no state_dict has."""
    return any(a != b and b.startswith(a + ".") for a in keys for b in keys)


@settings(max_examples=150, deadline=None)
@given(renamings(distinct=True))
def test_a_renaming_with_distinct_shapes_is_found_exactly(case):
    wanted, have, truth = case
    cause = asked(wanted, have)
    assert cause.after.fits
    made = apply(cause.rules, [name for name, _ in have])
    assert made.renames == {old: new for old, new in truth.items() if old != new}
    assert made.drops == ()
    assert cause.choices == ()


@settings(max_examples=150, deadline=None)
@given(renamings(distinct=False))
def test_a_renaming_is_never_guessed_wrong(case):
    """Names say nothing, so a shape that several have stays open, whatever the order."""
    wanted, have, truth = case
    cause = asked(wanted, have)
    made = apply(cause.rules, [name for name, _ in have])
    loaded = set(cause.after.loaded)
    for old, new in made.renames.items():
        if new in loaded:
            assert truth[old] == new
    shapes = [shape for _, shape in have]
    twins = any(shapes.count(shape) > 1 for shape in shapes)
    if twins and not has_a_key_below_a_key([key for key, _ in wanted]):
        assert not cause.after.fits


@settings(max_examples=100, deadline=None)
@given(renamings(distinct=False), st.integers(0, 5), st.integers(0, 5))
def test_nor_where_both_sides_have_more(case, more_ours, more_theirs):
    wanted, have, truth = case
    have = have + [(f"s{i}.t", shape) for i, (_, shape) in enumerate(have[:more_ours])]
    wanted = wanted + [(f"f{i}.g", shape) for i, (_, shape) in enumerate(wanted[:more_theirs])]
    found = guess([(k, Content(s)) for k, s in have], [(k, Content(s)) for k, s in wanted])
    for old, new in found.pairs.items():
        assert truth.get(old) == new
    assert len(set(found.pairs.values())) == len(found.pairs)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_numbers_that_speak_against_the_order_settle_nothing(data):
    """Blocks of one shape, listed in an order that their numbers do not have."""
    count = data.draw(st.integers(2, 6))
    order = data.draw(st.permutations(range(count)))
    ours = items(*(f"n.{i}.weight 3 3" for i in order))
    theirs = items(*(f"a.{i}.weight 3 3" for i in range(count)))
    pairs = guess(ours, theirs).pairs
    in_order = list(order) == sorted(order)
    assert pairs == ({f"n.{i}.weight": f"a.{i}.weight" for i in range(count)} if in_order else {})


# -- series ------------------------------------------------------------------------------------
def test_numbers_may_begin_elsewhere_and_leave_gaps():
    found = guess(
        items("features.0.weight 3 3", "features.3.weight 3 3", "features.6.weight 3 3"),
        items("conv1.weight 3 3", "conv2.weight 3 3", "conv3.weight 3 3"),
    )
    assert list(found.pairs.items()) == [
        ("features.0.weight", "conv1.weight"), ("features.3.weight", "conv2.weight"),
        ("features.6.weight", "conv3.weight"),
    ]  # fmt: skip


def test_ten_comes_after_nine():
    ours = items(*(f"n.{i}.weight 3 3" for i in range(12)))
    theirs = items(*(f"a.{i}.weight 3 3" for i in range(12)))
    assert guess(ours, theirs).pairs["n.10.weight"] == "a.10.weight"


def test_blocks_divided_otherwise_are_no_series():
    """Two and three blocks on one side, three and two on the other."""
    ours = items(*(f"n{s}.{b}.weight 3 3" for s, b in ((1, 0), (1, 1), (2, 0), (2, 1), (2, 2))))
    theirs = items(*(f"a{s}.{b}.weight 3 3" for s, b in ((1, 0), (1, 1), (1, 2), (2, 0), (2, 1))))
    assert guess(ours, theirs).pairs == {}


def test_a_part_of_some_blocks_goes_where_its_blocks_went():
    """A shortcut in blocks 2 and 3 is none of blocks 1 and 2."""

    def net(block, short, places):
        rows = [f"{block}{i}.c.weight 4 4" for i in (1, 2, 3)]
        return items(*rows, *(f"{block}{i}.{short}.weight 9 1" for i in places))

    right = guess(net("n", "s", (2, 3)), net("a", "z", (2, 3)))
    assert right.pairs["n2.s.weight"] == "a2.z.weight"
    wrong = guess(net("n", "s", (2, 3)), net("a", "z", (1, 2)))
    assert set(wrong.pairs) == {f"n{i}.c.weight" for i in (1, 2, 3)}


def test_what_one_side_has_more_of_is_open():
    ours = items("n.0.weight 3 3", "n.1.weight 3 3", "x.weight 3 3")
    theirs = items("a.0.weight 3 3", "a.1.weight 3 3")
    found = guess(ours, theirs)
    assert found.pairs == {}
    assert found.ties == (
        Tie(("n.0.weight", "n.1.weight", "x.weight"), ("a.0.weight", "a.1.weight")),
    )


# -- words -------------------------------------------------------------------------------------
def attention(names, at="attn"):
    return items(*(f"{b}.{at}.{name}.weight 4 4" for b in ("blk.0", "blk.1") for name in names))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (("query", "key", "value"), ("q", "k", "v")),
        (("q_proj", "k_proj", "v_proj", "out_proj"), ("query", "key", "value", "out")),
        (("wq", "wk", "wv", "wo"), ("q", "k", "v", "o")),
        (("toQ", "toK", "toV"), ("q", "k", "v")),
        (("query", "key", "value", "dense"), ("q", "k", "v", "proj")),
    ],
)
def test_words_that_go_with_one_word_each(ours, theirs):
    found = guess(attention(ours), attention(theirs, "self"))
    assert found.pairs == {
        f"blk.{b}.attn.{one}.weight": f"blk.{b}.self.{two}.weight"
        for b in (0, 1)
        for one, two in zip(ours, theirs, strict=True)
    }


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (("query", "key", "value"), ("k", "q", "v")),  # the order speaks against the words
        (("a", "b"), ("c", "d")),
        (("q", "kv", "v"), ("q", "k", "v")),
        (("one", "two", "q"), ("three", "four", "q")),
        (("input_norm", "post_attention_norm"), ("attention_norm", "ffn_norm")),
    ],
)
def test_words_that_do_not_settle_it(ours, theirs):
    found = guess(attention(ours), attention(theirs, "self"))
    assert found.pairs == {}
    assert found.ties


# -- what is never the same --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a.weight_v", "a.weight"), ("a.weight_orig", "a.weight"), ("a.weight", "a.bias"),
        ("a.parametrizations.weight.original", "a.weight"), ("a.running_mean", "b.running_var"),
        ("a.weight_mask", "a.weight"), ("a.weight_g", "a.weight_v"),
    ],
)  # fmt: skip
def test_values_of_another_meaning(old, new):
    assert guess(items(f"{old} 3 4"), items(f"{new} 3 4")).pairs == {}


def test_a_bias_does_not_come_without_its_weight():
    """Ten classes on both sides, other features: half a head would be worse than none."""
    ours = items("old.weight 10 512", "old.bias 10", "n.weight 7 7", "m.weight 6 6")
    theirs = items("new.weight 10 256", "new.bias 10", "a.weight 7 7", "b.weight 6 6")
    assert guess(ours, theirs).pairs == {"n.weight": "a.weight", "m.weight": "b.weight"}


def test_numbers_of_another_kind_do_not_go_together():
    left = [("a.index", Content((4, 4), "int"))]
    assert guess(left, [("b.table", Content((4, 4), "float"))]).pairs == {}
    assert guess(left, [("b.index", Content((4, 4), "int"))]).pairs == {"a.index": "b.index"}


# -- how it is said ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("pairs", "count"),
    [
        ({"net.a.weight": "model.a.weight", "net.b.weight": "model.b.weight"}, 1),
        ({"a.net.w": "a.w", "b.net.w": "b.w"}, None),
        ({f"h.{i}.ln.weight": f"layers.{i}.norm.weight" for i in range(30)}, 1),
        ({f"l.{i}.w": f"l.{i}._orig_mod.w" for i in range(30)}, 1),
        ({f"x.{n}.gamma": f"x.{n}.weight" for n in "abcdefghijk"}, 1),
        ({"a": "b", "b": "a"}, None),
        ({"a.w": "b.w", "b.w": "a.w"}, None),
        ({f"p{i * i}.w": f"q{7 * i % 31}.w" for i in range(20)}, None),
        ({r"a\1.w": r"b\g<1>.w"}, 1),
        ({"a+(.w": "b$.w"}, 1),
    ],
)
def test_a_renaming_as_rules(pairs, count):
    """Exact in every case; None: the names alone can say it."""
    others = ["bystander.weight", "h", "x.z.other", "net2.a.weight"]
    rules = spell(pairs, [*pairs, *others])
    assert is_exact(rules, pairs, [*pairs, *others])
    if count is None:
        assert rules[0].name in ("rename-file", "rename")
    else:
        assert [rule.name for rule in rules] == ["rename"] * count


@settings(max_examples=100, deadline=None)
@given(renamings(distinct=True))
def test_any_renaming_is_said_exactly(case):
    truth = case[2]
    assert is_exact(spell(truth, list(truth)), truth, list(truth))
    assert renaming(truth).startswith("renaming ")


# -- large files -------------------------------------------------------------------------------
def transformer(layers, block, names, norms):
    rows = [("emb.weight", (99, 8))]
    for i in range(layers):
        rows += [(f"{block}.{i}.attn.{n}.{leaf}", (8, 8)[: 2 - k]) for n in names
                 for k, leaf in enumerate(("weight", "bias"))]  # fmt: skip
        rows += [(f"{block}.{i}.{n}.{leaf}", (8,)) for n in norms for leaf in ("weight", "bias")]
        rows += [(f"{block}.{i}.mlp.weight", (32, 8)), (f"{block}.{i}.mlp.bias", (32,))]
    return [*rows, ("head.weight", (99, 8))]


@pytest.mark.parametrize("layers", [143, 715])
def test_thousands_of_names(layers):
    """2,004 names in well under two seconds, 10,012 in five times that (processor time)."""
    wanted = transformer(layers, "blocks", ("q", "k", "v", "o"), ("norm1", "norm2"))
    have = transformer(layers, "h", ("query", "key", "value", "out"), ("ln_1", "ln_2"))
    started = time.process_time()
    cause = asked(wanted, have)
    spent = time.process_time() - started
    assert cause.after.fits
    assert cause.options
    assert spent < layers * 2 / 143


@pytest.mark.parametrize("count", [10_000])
def test_thousands_of_names_that_nothing_tells_apart(count):
    wanted = [(f"a{i}.b.w", (3, 3)) for i in range(count)]
    have = [(f"n{i * 7919 % count}x.o.w", (3, 3)) for i in range(count)]
    started = time.process_time()
    assert asked(wanted, have).rules == ()
    assert time.process_time() - started < 10


def test_names_beyond_all_measure():
    deep = ".".join("a" * 50_000)
    wide = [(f"{deep}.{i}", (2,)) for i in range(20)]
    started = time.process_time()
    assert not asked(
        [("x.weight", (2,)), ("y.weight", (3,))], [*wide, ("z" * 1_000_000, (3,))]
    ).after.fits
    assert time.process_time() - started < 10


def test_a_rule_that_nobody_could_read_is_none():
    pairs = {f"{'x' * 1000}.{n}.w": f"{'y' * 1000}.{n}.w" for n in range(3)}
    assert spell(pairs, list(pairs))[0].name == "rename-file"
