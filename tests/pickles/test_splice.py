"""Edits of random object graphs against pickle, and the rules of the memo one by one."""

from __future__ import annotations

import collections
import pickle
import pickletools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pickles_support import (
    Graph,
    Pickler,
    SlowPickler,
    Storage,
    SubDict,
    SubList,
    Tensor,
    canonical,
    dump,
    edited,
    edits_of,
    load,
    opcodes,
    rename,
    stream,
    text,
)

from ckptool.errors import PickleInvalid
from ckptool.pickles.check import check_rewrite
from ckptool.pickles.nodes import PAIR_OPS, Box, Global, Obj, Tup, Walked, children, elements, pairs
from ckptool.pickles.splice import Edits, literal_end, splice
from ckptool.pickles.walk import walk

KINDS = ("none", "retag", "rename", "rename some", "drop", "all")


# -- random graphs -------------------------------------------------------------------------------
class Case:
    """A random graph, pickled, and edits to make."""

    def __init__(self, rnd: random.Random) -> None:
        self.cyclic = rnd.random() < 0.3
        self.kind = rnd.choice(KINDS)
        self.protocol = rnd.randint(2, 5)
        root = Graph(rnd).root(self.cyclic)
        pickler = rnd.choice([Pickler, Pickler, SlowPickler])
        self.data = dump(root, self.protocol, pickler)
        if rnd.random() < 0.15:
            self.data = pickletools.optimize(self.data)
        keys = list(root)
        some = [key for key in keys if rnd.random() < 0.5]
        self.how = {
            "renamed": {"rename": keys, "all": keys, "rename some": some}.get(self.kind, []),
            "dropped": some if self.kind in ("drop", "all") else [],
            "retag": self.kind in ("retag", "all"),
        }

    def check(self) -> str:
        walked = walk(self.data)
        edits = edits_of(walked, **self.how)
        try:
            out = splice(walked, edits)
        except PickleInvalid:
            assert self.cyclic, "a graph without cycles was refused"
            return "refused"
        wanted = edited(load(self.data), **self.how)
        assert canonical(load(out)) == canonical(wanted)
        check_rewrite(walked, walk(out), edits)
        if not edits:
            assert out == self.data
        if self.protocol < 4:
            self._check_bytes(walked, edits, out)
        return self.kind

    def _check_bytes(self, walked: Walked, edits: Edits, out: bytes) -> None:
        """Where all occurrences of each string change alike, only literals change, and the
        inverse gives the old bytes. (Protocol 4 writes a new literal another way.)
        """
        wanted = only_literals(walked, edits)
        if wanted is None or edits.deletions:
            return
        assert out == wanted
        back = walk(out)
        old = {start: data_text(walked, start) for start in edits.strings}
        moved = dict(zip(sorted(edits.strings), starts_after(walked, edits), strict=True))
        inverse = Edits(strings={moved[start]: old[start] for start in edits.strings})
        assert splice(back, inverse) == self.data


def data_text(walked: Walked, start: int) -> str:
    """The string that the occurrence at `start` says."""
    if walked.data[start] in b"hj":
        return walked.memo[slot_at(walked.data, start)]
    return walk(walked.data[start : literal_end(walked.data, start)] + b".").root


def literals(walked: Walked, edits: Edits) -> dict[int, str] | None:
    """The edited literals, or None where an occurrence of one of them stays as it is."""
    chosen = {start: new for start, new in edits.strings.items() if walked.data[start] not in b"hj"}
    for slot, start in walked.memo_start.items():
        if type(walked.memo[slot]) is not str:
            continue
        uses = {pos for pos in walked.gets if slot_at(walked.data, pos) == slot} | {start}
        news = {edits.strings.get(use) for use in uses}
        if len(news) > 1:
            return None
    return chosen


def slot_at(data: bytes, pos: int) -> int:
    size = 1 if data[pos] == ord("h") else 4
    return int.from_bytes(data[pos + 1 : pos + 1 + size], "little")


def only_literals(walked: Walked, edits: Edits) -> bytes | None:
    chosen = literals(walked, edits)
    if chosen is None:
        return None
    out, at = b"", 0
    for start, new in sorted(chosen.items()):
        out += walked.data[at:start] + text(new)
        at = literal_end(walked.data, start)
    return out + walked.data[at:]


def starts_after(walked: Walked, edits: Edits) -> list[int]:
    """Where the edited occurrences stand in the output of `only_literals`."""
    found, shift = [], 0
    for start in sorted(edits.strings):
        found.append(start + shift)
        if walked.data[start] not in b"hj":
            shift += len(text(edits.strings[start])) - (literal_end(walked.data, start) - start)
    return found


@settings(deadline=None, max_examples=300)
@given(st.randoms(use_true_random=False))
def test_an_edited_graph_loads_as_the_edited_object(rnd):
    Case(rnd).check()


def fuzz(seeds: range) -> collections.Counter:
    done: collections.Counter = collections.Counter()
    for seed in seeds:
        done[checked(seed)] += 1
    return done


def checked(seed: int) -> str:
    try:
        return Case(random.Random(seed)).check()
    except Exception as error:
        raise AssertionError(f"seed {seed}") from error


def test_two_thousand_graphs():
    done = fuzz(range(2000))
    assert set(KINDS) <= set(done)
    assert done["refused"] < 40


@pytest.mark.long
def test_twenty_thousand_graphs():
    fuzz(range(10_000, 30_000))


# -- edits anywhere ------------------------------------------------------------------------------
def places(walked: Walked) -> tuple[list[int], list[tuple[int, int]]]:
    """Every string occurrence and every span of an item that a container holds."""
    texts, items, seen, stack = [], [], set(), [walked.root]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if type(node) is Obj and type(node.fn) is Global and node.fn.name == "encode":
            continue  # bytes in protocol 2: its text is no text
        stack.extend(children(node))
        if type(node) is Tup:
            rows = zip(node.items, node.starts, strict=True)
            texts += [at for item, at in rows if type(item) is str]
        for batch in getattr(node, "batches", None) or ():
            rows = list(zip(batch.items, batch.starts, strict=True))
            texts += [at for item, at in rows if type(item) is str]
            step = 2 if batch.op in PAIR_OPS else 1
            firsts = batch.starts[::step]
            ends = [*firsts[1:], batch.end + (batch.op in (0x73, 0x61))]
            items += zip(firsts, ends, strict=True)
    return texts, items


def edit_anywhere(seed: int) -> str:
    rnd = random.Random(seed)
    cyclic = rnd.random() < 0.2
    data = dump(Graph(rnd).root(cyclic), rnd.randint(2, 5))
    walked = walk(data)
    texts, items = places(walked)
    edits = Edits(deletions=[span for span in items if rnd.random() < rnd.choice([0, 0.1, 0.4])])
    cut = {start for start, _ in edits.deletions}
    for at in texts:
        if at not in cut and rnd.random() < 0.4:
            edits.strings[at] = rnd.choice(["new", "other", "module.k0"])
    try:
        out = splice(walked, edits)
    except PickleInvalid:
        assert cyclic, f"seed {seed}"
        return "refused"
    try:
        check_rewrite(walked, walk(out), edits)
    except PickleInvalid as error:
        raise AssertionError(f"seed {seed}") from error
    return "edited"


def test_strings_and_items_anywhere_are_edited():
    done = collections.Counter(edit_anywhere(seed) for seed in range(2000))
    assert done["refused"] < 60


@pytest.mark.long
def test_strings_and_items_anywhere_twenty_thousand_times():
    for seed in range(10_000, 30_000):
        edit_anywhere(seed)


# -- helpers for streams by hand -----------------------------------------------------------------
def key_starts(walked: Walked) -> dict[str, int]:
    return {key: start for key, _, start, _, _ in pairs(walked.root)}


def drop(walked: Walked, *keys: str) -> list[tuple[int, int]]:
    return edits_of(walked, dropped=keys).deletions


def spliced(walked: Walked, **edits) -> bytes:
    """The output, self-checked."""
    made = Edits(**edits)
    out = splice(walked, made)
    check_rewrite(walked, walk(out), made)
    return out


# -- a shared string (formats 6.3) ---------------------------------------------------------------
SHARED = stream(b"(", text("a"), b"q\0h\0h\0t")  # ('a', 'a', 'a'), one string


def test_one_fetch_of_a_shared_string_is_edited():
    walked = walk(SHARED)
    out = spliced(walked, strings={walked.root.starts[1]: "b"})
    assert pickle.loads(out) == ("a", "b", "a")
    assert out == stream(b"(", text("a"), b"q\0", text("b"), b"h\0t")


def test_the_first_occurrence_alone_is_edited():
    walked = walk(SHARED)
    out = spliced(walked, strings={walked.root.starts[0]: "b"})
    assert pickle.loads(out) == ("b", "a", "a")
    assert out == stream(b"(", text("b"), text("a"), b"q\0h\0t")


def test_all_occurrences_edited_alike_patch_the_literal():
    walked = walk(SHARED)
    out = spliced(walked, strings=dict.fromkeys(walked.root.starts, "longer"))
    assert out == stream(b"(", text("longer"), b"q\0h\0h\0t")


def test_two_occurrences_edited_alike_share_a_new_slot():
    walked = walk(SHARED)
    out = spliced(walked, strings=dict.fromkeys(walked.root.starts[1:], "b"))
    assert out == stream(b"(", text("a"), b"q\0", text("b"), b"q\x01h\x01t")


def test_occurrences_edited_each_in_its_own_way():
    walked = walk(SHARED)
    out = spliced(walked, strings=dict(zip(walked.root.starts, "xyz", strict=True)))
    assert pickle.loads(out) == ("x", "y", "z")


def test_a_string_outside_the_memo_is_replaced_alone():
    data = dump([{"k": 1}, {"k": 2}], 2, fast=True)
    walked = walk(data)
    first = next(elements(walked.root))[0]
    start = next(pairs(first))[2]
    out = spliced(walked, strings={start: "new"})
    assert pickle.loads(out) == [{"new": 1}, {"k": 2}]
    assert out == data.replace(text("k"), text("new"), 1)


def test_a_string_with_a_slot_that_nobody_fetches_keeps_its_put():
    walked = walk(stream(b"]", text("a"), b"q\x05a"))
    assert spliced(walked, strings={3: "b"}) == stream(b"]", text("b"), b"q\x05a")


# -- cut definitions -----------------------------------------------------------------------------
def test_a_dropped_definition_is_hoisted_to_its_first_fetch():
    data = stream(b"}(", text("x"), b"]q\x01K\x07a", text("y"), b"h\x01", text("z"), b"h\x01u")
    walked = walk(data)
    out = spliced(walked, deletions=drop(walked, "x"))
    assert out == stream(b"}(", text("y"), b"]q\x01K\x07a", text("z"), b"h\x01u")
    loaded = pickle.loads(out)
    assert loaded["y"] is loaded["z"]


def test_a_hoisted_object_brings_its_items_and_state():
    made = collections.OrderedDict(a=[1])
    made._metadata = {"v": 1}
    listed = SubList([made])
    listed.extra = "e"
    for protocol in range(2, 6):
        walked = walk(dump({"x": made, "l": listed, "y": [made, listed, listed]}, protocol))
        loaded = load(spliced(walked, deletions=drop(walked, "x", "l")))
        assert list(loaded) == ["y"]
        assert loaded["y"][0]._metadata == {"v": 1}
        assert loaded["y"][1] is loaded["y"][2]
        assert loaded["y"][1][0] is loaded["y"][0]
        assert loaded["y"][1].extra == "e"


@pytest.mark.parametrize("protocol", range(2, 6))
def test_the_first_tensor_goes_and_its_names_stay_for_the_others(protocol):
    value = {k: Tensor(Storage(str(i), "cuda:0")) for i, k in enumerate("abc")}
    walked = walk(dump(value, protocol))
    loaded = load(spliced(walked, deletions=drop(walked, "a")))
    assert [(k, t.storage.key) for k, t in loaded.items()] == [("b", "1"), ("c", "2")]


def test_setitem_goes_with_its_opcode():
    walked = walk(dump({"only": 1}, 2))
    out = spliced(walked, deletions=drop(walked, "only"))
    assert out == stream(b"}q\0")


def test_a_batch_may_become_empty():
    walked = walk(dump({"a": 1, "b": 2}, 2))
    out = spliced(walked, deletions=drop(walked, "a", "b"))
    assert out == stream(b"}q\0(u")


def test_a_list_element_is_cut():
    walked = walk(dump([["x"], "y", ["z"]], 2))
    _, start, end = list(elements(walked.root))[1]
    assert pickle.loads(spliced(walked, deletions=[(start, end)])) == [["x"], ["z"]]


def test_a_value_is_replaced_and_its_definition_hoisted():
    walked = walk(stream(b"}(", text("x"), b"]q\x01", text("y"), b"h\x01u"))
    _, _, _, start, end = next(pairs(walked.root))
    assert pickle.loads(spliced(walked, values={start: (end, b"K\x05")})) == {"x": 5, "y": []}


def test_the_first_item_of_a_tuple_is_edited_where_the_tuple_starts_too():
    walked = walk(stream(b"]", text("a"), b"K\x01\x86a"))
    tup = walked.root.batches[0].items[0]
    out = spliced(walked, strings={tup.starts[0]: "b"})
    assert pickle.loads(out) == [("b", 1)]
    walked = walk(stream(b"]", text("a"), b"K\x01\x86a"))
    start, end = tup.starts
    assert pickle.loads(spliced(walked, values={start: (end, b"N")})) == [(None, 1)]


def test_the_callee_of_a_call_is_replaced():
    walked = walk(stream(b"]cbuiltins\nlist\n", b")Ra"))
    call = walked.root.batches[0].items[0]
    edits = {call.start: (call.args_start, b"cbuiltins\ndict\n")}
    assert pickle.loads(spliced(walked, values=edits)) == [{}]


# -- bugs that fuzzing found in the sketch (formats 6.4) -------------------------------------------
def test_bug_1_an_edited_fetch_of_a_dropped_definition():
    data = stream(b"}(", text("a"), b"q\0K\x01", text("b"), b"}h\0K\x02su")
    walked = walk(data)
    inner = list(pairs(walked.root))[1][1]
    start = next(pairs(inner))[2]
    out = spliced(walked, strings={start: "z"}, deletions=drop(walked, "a"))
    assert pickle.loads(out) == {"b": {"z": 2}}


def test_bug_2_a_restored_parent_does_not_define_a_restored_child_again():
    data = stream(
        b"}(", text("x"), b"]q\x01}q\x02a", text("y"), b"h\x02", text("z"), b"h\x01u"
    )  # fmt: skip
    walked = walk(data)
    out = spliced(walked, deletions=drop(walked, "x"))
    loaded = pickle.loads(out)
    assert loaded["z"][0] is loaded["y"]
    assert out.count(b"q\x02") == 1


def test_bug_3_a_use_in_a_dropped_region_counts():
    data = stream(
        b"}(", text("k"), b"q\0K\x01", text("drop"), b"]q\x01h\0a", text("keep"), b"h\x01u"
    )  # fmt: skip
    walked = walk(data)
    starts = key_starts(walked)
    out = spliced(walked, strings={starts["k"]: "m"}, deletions=drop(walked, "drop"))
    assert pickle.loads(out) == {"m": 1, "keep": ["k"]}


def test_bug_4_a_new_slot_is_not_defined_in_a_dropped_region():
    data = stream(
        b"}(", text("drop"), b"]", text("s"), b"q\0a", text("a"), b"h\0", text("b"), b"h\0",
        text("c"), b"h\0u",
    )  # fmt: skip
    walked = walk(data)
    rows = list(pairs(walked.root))
    inside = next(elements(rows[0][1]))[1]
    edits = dict.fromkeys([inside, rows[1][3], rows[2][3]], "n")
    out = spliced(walked, strings=edits, deletions=drop(walked, "drop"))
    assert pickle.loads(out) == {"a": "n", "b": "n", "c": "s"}


def test_bug_5_a_put_in_an_edited_literal_defines_nothing():
    data = stream(
        b"}(", text("drop"), b"](", text("s"), b"q\0h\0eq\x01", text("keep"), b"h\x01",
        text("last"), b"h\0u",
    ).replace(b"](", b"]q\x01(").replace(b"eq\x01", b"e")  # fmt: skip
    walked = walk(data)
    first = next(elements(next(pairs(walked.root))[1]))[1]
    out = spliced(walked, strings={first: "n"}, deletions=drop(walked, "drop"))
    assert pickle.loads(out) == {"keep": ["n", "s"], "last": "s"}


def test_bug_6_an_edited_definition_in_a_hoisted_value_whose_old_string_stands_already():
    data = stream(
        b"}(", text("drop"), b"]q\x01", text("s"), b"q\0a", text("early"), b"h\0",
        text("keep"), b"h\x01u",
    )  # fmt: skip
    walked = walk(data)
    inside = next(elements(next(pairs(walked.root))[1]))[1]
    out = spliced(walked, strings={inside: "n"}, deletions=drop(walked, "drop"))
    assert pickle.loads(out) == {"early": "s", "keep": ["n"]}


def test_bytes_of_a_literal_that_look_like_a_put_are_text():
    walked = walk(stream(b"(", text("q\0q\x01"), b"q\x01h\x01t"))
    out = spliced(walked, strings={walked.root.starts[1]: "r\0\0\0\0"})
    assert pickle.loads(out) == ("q\0q\x01", "r\0\0\0\0")


# -- opcodes of other dialects -------------------------------------------------------------------
def test_a_python_2_literal_stays_one():
    walked = walk(stream(b"}U\x01aq\0K\x01s"))
    assert spliced(walked, strings={3: "bc"}) == stream(b"}U\x02bcq\0K\x01s")


def test_a_python_2_literal_too_long_for_it_becomes_text():
    walked = walk(stream(b"}U\x01aq\0K\x01s"))
    assert spliced(walked, strings={3: "b" * 256}) == stream(b"}", text("b" * 256), b"q\0K\x01s")


def test_a_long_python_2_literal_and_a_shared_one():
    long = b"T" + (300).to_bytes(4, "little") + b"x" * 300
    walked = walk(stream(b"(", long, b"q\0h\0U\x01\xe9t"))
    starts = walked.root.starts
    out = spliced(walked, strings={starts[1]: "cpu", starts[2]: "é"})
    assert out == stream(b"(", long, b"q\0U\x03cpuU\x02\xc3\xa9t")


@pytest.mark.parametrize("protocol", [0, 1])
def test_protocols_0_and_1_can_be_edited(protocol):
    value = {"a": [1, "s"], "b": "cuda:0"}
    value["c"] = value["a"]
    walked = walk(pickle.dumps(value, protocol))
    edits = edits_of(walked, renamed=["b"], dropped=["a"])
    out = splice(walked, edits)
    check_rewrite(walked, walk(out), edits)
    assert pickle.loads(out) == {"module.b": "cuda:0", "c": [1, "s"]}


def test_slots_above_255_are_long():
    value = {f"key{i}": [i] for i in range(300)}
    value["again"] = value["key299"]
    value["twice"] = [value["key299"], "late", "late"]
    walked = walk(dump(value, 2))
    late = [start for _, start, _ in elements(list(pairs(walked.root))[-1][1])][1:]
    out = spliced(walked, strings={late[1]: "x"}, deletions=drop(walked, "key299"))
    loaded = pickle.loads(out)
    assert loaded["twice"] == [[299], "late", "x"]
    assert loaded["twice"][0] is loaded["again"]


def test_the_new_slot_after_255_is_long():
    walked = walk(stream(b"(", text("a"), b"q\xffh\xffh\xfft"))
    out = spliced(walked, strings=dict.fromkeys(walked.root.starts[1:], "n"))
    long = b"\x00\x01\0\0"
    assert out == stream(b"(", text("a"), b"q\xff", text("n"), b"r" + long + b"j" + long + b"t")


def test_sparse_slots_of_optimize():
    value = {"a": [1], "b": [2]}
    value["c"] = [value["a"], value["b"]]
    for protocol in range(2, 6):
        walked = walk(pickletools.optimize(dump(value, protocol)))
        loaded = pickle.loads(spliced(walked, deletions=drop(walked, "a")))
        assert loaded == {"b": [2], "c": [[1], [2]]}
        assert loaded["c"][1] is loaded["b"]


def test_memoize_stays_while_no_slot_comes_or_goes():
    walked = walk(dump({"a": 1, "b": [1]}, 4))
    names = opcodes(spliced(walked, strings={key_starts(walked)["a"]: "z"}))
    assert "MEMOIZE" in names
    assert "FRAME" not in names
    assert "BINPUT" not in names


def test_memoize_becomes_explicit_when_a_slot_goes():
    value = {"a": ["x"], "b": [1]}
    value["c"] = [value["b"], value["a"]]
    walked = walk(dump(value, 4))
    out = spliced(walked, deletions=drop(walked, "a"))
    names = opcodes(out)
    assert "MEMOIZE" not in names
    assert "FRAME" not in names
    slots = [arg for op, arg, _ in pickletools.genops(out) if op.name == "BINPUT"]
    assert len(slots) == len(set(slots))
    loaded = pickle.loads(out)
    assert loaded == {"b": [1], "c": [[1], ["x"]]}
    assert loaded["b"] is loaded["c"][0]


def test_memoize_becomes_explicit_beyond_255():
    value = {f"key{i}": [i] for i in range(300)}
    value["again"] = [value["key1"], value["key299"]]
    walked = walk(dump(value, 5))
    out = spliced(walked, deletions=drop(walked, "key1"))
    assert {"BINPUT", "LONG_BINPUT"} <= set(opcodes(out))
    loaded = pickle.loads(out)
    assert loaded["again"] == [[1], [299]]
    assert loaded["again"][1] is loaded["key299"]


def test_no_edit_gives_the_same_bytes_of_any_stream():
    for protocol in range(6):
        data = pickle.dumps({"a": [1, "x"], "b": {1}}, protocol)
        walked = walk(b"head" + data + b"tail", 4)
        assert splice(walked, Edits()) == data
    assert splice(walk(b"]2\x86."), Edits()) == b"]2\x86."


def test_only_bytes_of_this_pickle_come_out():
    data = dump({"a": 1}, 2)
    walked = walk(b"head" + data + b"tail", 4)
    start = key_starts(walked)["a"]
    assert splice(walked, Edits(strings={start: "b"})) == data.replace(text("a"), text("b"))


# -- refusals --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "data",
    [
        stream(b"(", text("a"), b"2t"),
        stream(b"(", text("a"), b"q\0Nq\0t"),
        stream(b"(", text("a"), b"]q\0h\0Nat"),
        stream(b"(", text("a"), b"cm\nn\n}bt"),
    ],
)
def test_a_stream_that_no_pickler_writes_is_not_edited(data):
    with pytest.raises(PickleInvalid, match="cannot be rewritten"):
        splice(walk(data), Edits(strings={3: "b"}))


def test_values_left_on_the_stack_are_no_obstacle():
    data = stream(b"N", text("a"))
    assert splice(walk(data), Edits(strings={3: "b"})) == stream(b"N", text("b"))


@pytest.mark.parametrize("data", [stream(b"(K\x01t"), stream(b"((tt"), stream(b"(C\x01at")])
def test_what_is_no_text_is_not_edited(data):
    with pytest.raises(PickleInvalid, match="plain literal"):
        splice(walk(data), Edits(strings={3: "b"}))


def test_a_kept_value_that_leads_back_into_a_dropped_one_is_refused():
    parent, child = SubDict(), SubDict()
    parent.child, child.parent = child, parent
    ring: list = []
    ring.append((ring, 1))
    for dropped, kept in (((parent,), child), (ring, ring[0])):
        walked = walk(dump({"drop": dropped, "keep": kept}, 2))
        with pytest.raises(PickleInvalid, match="leads back"):
            splice(walked, Edits(deletions=drop(walked, "drop")))


def test_the_last_memo_slot_leaves_no_room_for_a_new_one():
    data = stream(b"(", text("a"), b"r\xff\xff\xff\xff", b"j\xff\xff\xff\xff" * 2, b"t")
    walked = walk(data)
    with pytest.raises(PickleInvalid, match="last memo slot"):
        splice(walked, Edits(strings=dict.fromkeys(walked.root.starts[1:], "b")))
    out = splice(walked, Edits(strings={walked.root.starts[2]: "b"}))
    assert walk(out).root.items == ("a", "a", "b")


def test_a_root_that_holds_itself_can_be_renamed_and_cut():
    root: dict = {"a": 1, "b": 2}
    root["self"] = root
    for protocol in range(2, 6):
        walked = walk(dump(root, protocol))
        edits = edits_of(walked, renamed=["a"], dropped=["b"])
        loaded = load(splice(walked, edits))
        assert loaded["self"] is loaded
        assert list(loaded) == [rename("a"), "self"]
        assert type(walked.root) is Box
