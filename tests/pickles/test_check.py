"""The self-check: a good rewrite passes, each way to damage it is caught."""

from __future__ import annotations

import collections
import copy
import pickle
import time

import pytest
from pickles_support import SubDict, SubList, Tensor, dump, stream, text

from ckptool.errors import PickleInvalid
from ckptool.pickles.check import check_rewrite
from ckptool.pickles.nodes import pairs
from ckptool.pickles.splice import Edits, splice
from ckptool.pickles.walk import walk


def original():
    """Every kind of node; `shared` stands twice, `equal` are two lists that look alike."""
    shared = ["s", 1]
    metadata = collections.OrderedDict(a=1)
    metadata._metadata = {"version": 2}
    listed = SubList([1, 2])
    listed.extra = "e"
    return {
        "old": 1,
        "gone": "x",
        "shared": [shared, shared],
        "equal": [[7], [7]],
        "tuple": (1, 2.5, None, True),
        "float": 0.0,
        "raw": [b"bytes", bytearray(b"array")],
        "arrays": [bytearray(b"same"), bytearray(b"same")],
        "set": {3},
        "ordered": metadata,
        "sub": SubDict(k="v"),
        "listed": listed,
        "tensor": Tensor,
        "call": complex(1, 2),
    }


def good():
    """What the edits of `edits_of_old` make of it."""
    value = original()
    items = [("new" if k == "old" else k, v) for k, v in value.items() if k != "gone"]
    return dict(items)


def edits_of_old(walked) -> Edits:
    edits = Edits()
    for key, _, start, _, end in pairs(walked.root):
        if key == "old":
            edits.strings[start] = "new"
        elif key == "gone":
            edits.deletions.append((start, end))
    return edits


def swapped(value):
    items = list(value.items())
    items[1], items[2] = items[2], items[1]
    value.clear()
    value.update(items)


def renamed(value, old, new):
    items = [(new if k == old else k, v) for k, v in value.items()]
    value.clear()
    value.update(items)


def put(value, path, new):
    for step in path[:-1]:
        value = value[step]
    value[path[-1]] = new


DAMAGE = {
    "a value changed": lambda v: put(v, ["new"], 2),
    "an int became a bool": lambda v: put(v, ["new"], True),
    "an int became a float": lambda v: put(v, ["new"], 1.0),
    "zero lost its sign": lambda v: put(v, ["float"], -0.0),
    "None became a string": lambda v: put(v, ["tuple"], (1, 2.5, "None", True)),
    "a string became bytes": lambda v: put(v["shared"][0], [0], b"s"),
    "bytes changed": lambda v: put(v, ["raw", 0], b"bytez"),
    "bytes became a bytearray": lambda v: put(v, ["raw", 0], bytearray(b"bytes")),
    "a bytearray became bytes": lambda v: put(v, ["raw", 1], b"array"),
    "a tuple became a list": lambda v: put(v, ["tuple"], [1, 2.5, None, True]),
    "a tuple lost an item": lambda v: put(v, ["tuple"], (1, 2.5, None)),
    "a set became a list": lambda v: put(v, ["set"], [3]),
    "a set gained an item": lambda v: put(v, ["set"], {3, 4}),
    "the order of keys": swapped,
    "a key changed": lambda v: renamed(v, "float", "floaT"),
    "an edit not applied": lambda v: renamed(v, "new", "old"),
    "an edit applied wrongly": lambda v: renamed(v, "new", "newer"),
    "a deletion not applied": lambda v: v.update(gone="x"),
    "an item lost": lambda v: v.pop("equal"),
    "an element lost": lambda v: v["equal"].pop(),
    "an element gained": lambda v: v["equal"].append([7]),
    "a shared object duplicated": lambda v: put(v, ["shared", 1], ["s", 1]),
    "two objects merged": lambda v: put(v, ["equal", 1], v["equal"][0]),
    "two bytearrays merged": lambda v: put(v, ["arrays", 1], v["arrays"][0]),
    "a loop where there was none": lambda v: put(v, ["equal", 0], v["equal"]),
    "a state lost": lambda v: v["ordered"].__dict__.clear(),
    "a state changed": lambda v: put(v["ordered"]._metadata, ["version"], 3),
    "a state gained": lambda v: setattr(v["sub"], "more", 1),
    "an item of a subclass lost": lambda v: v["sub"].clear(),
    "an element of a subclass changed": lambda v: put(v["listed"], [1], 3),
    "another class": lambda v: put(v, ["sub"], collections.Counter(k="v")),
    "a class became a name": lambda v: put(v, ["tensor"], "Tensor"),
    "another name": lambda v: put(v, ["tensor"], SubList),
    "an argument changed": lambda v: put(v, ["call"], complex(1, 3)),
}


def checked(protocol: int, made: bytes) -> None:
    old = walk(dump(original(), protocol))
    check_rewrite(old, walk(made), edits_of_old(old))


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_good_rewrite_passes(protocol):
    old = walk(dump(original(), protocol))
    checked(protocol, splice(old, edits_of_old(old)))
    checked(protocol, dump(good(), protocol))


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_rewrite_is_caught(name, protocol):
    value = good()
    DAMAGE[name](value)
    with pytest.raises(PickleInvalid, match="self-check"):
        checked(protocol, dump(value, protocol))


@pytest.mark.parametrize("protocol", range(2, 6))
def test_merged_bytearrays_are_caught_in_every_spelling(protocol):
    old = walk(dump([bytearray(b"a"), bytearray(b"a")], protocol))
    check_rewrite(old, walk(dump([bytearray(b"a"), bytearray(b"a")], protocol)), Edits())
    same = bytearray(b"a")
    with pytest.raises(PickleInvalid):
        check_rewrite(old, walk(dump([same, same], protocol)), Edits())


def test_the_spellings_of_two_protocols_are_one_value():
    value = [b"b", b"b" * 300, {1, 2}, set()]
    for protocol in (3, 4):
        old = walk(pickle.dumps(value, protocol))
        out = stream(
            b"](c_codecs\nencode\n", text("b"), text("latin1"), b"\x86R",
            b"c_codecs\nencode\n", text("b" * 300), text("latin1"), b"\x86R",
            b"c__builtin__\nset\n](K\x01K\x02e\x85R", b"c__builtin__\nset\n]\x85Re",
        )  # fmt: skip
        if protocol == 4:
            check_rewrite(old, walk(out), Edits())
        with pytest.raises(PickleInvalid):
            check_rewrite(old, walk(out.replace(b"K\x02", b"K\x03")), Edits())


def test_bytes_that_are_no_latin_1_stay_a_call():
    old = walk(stream(b"c_codecs\nencode\n", text("Ω"), text("utf-8"), b"\x86R"))
    check_rewrite(old, walk(old.data), Edits())
    other = walk(stream(b"c_codecs\nencode\n", text("ω"), text("utf-8"), b"\x86R"))
    with pytest.raises(PickleInvalid):
        check_rewrite(old, other, Edits())


def test_an_edit_not_applied_to_a_python_2_string():
    old = walk(stream(b"]U\x01\xe9a"))
    edits = Edits(strings={3: "é"})
    check_rewrite(old, walk(splice(old, edits)), edits)
    for wrong in (b"U\x01\xe9", b"U\x02ab", b"C\x01e", b"K\x01"):
        with pytest.raises(PickleInvalid, match="byte 3"):
            check_rewrite(old, walk(stream(b"]", wrong, b"a", protocol=3)), edits)


def test_a_string_that_became_python_2_text():
    old = walk(stream(b"]", text("a"), b"a"))
    with pytest.raises(PickleInvalid):
        check_rewrite(old, walk(stream(b"]U\x01ba")), Edits(strings={3: "b"}))


def test_the_opcode_of_a_call_counts():
    old = walk(stream(b"cm\nn\n)R"))
    check_rewrite(old, walk(old.data), Edits())
    with pytest.raises(PickleInvalid):
        check_rewrite(old, walk(stream(b"cm\nn\n)\x81")), Edits())


def test_persistent_ids_are_compared():
    old = walk(stream(text("a"), b"Q"))
    check_rewrite(old, walk(old.data), Edits())
    with pytest.raises(PickleInvalid):
        check_rewrite(old, walk(stream(text("b"), b"Q")), Edits())
    with pytest.raises(PickleInvalid):
        check_rewrite(old, walk(stream(text("a"))), Edits())


def test_a_cycle_is_compared_once_and_another_cycle_is_caught():
    ring: list = []
    ring.append(ring)
    old = walk(pickle.dumps(ring, 2))
    check_rewrite(old, walk(old.data), Edits())
    longer: list = [ring]
    ring[0] = longer
    with pytest.raises(PickleInvalid):
        check_rewrite(old, walk(pickle.dumps(longer, 2)), Edits())


def test_a_deep_or_wide_pickle_costs_no_recursion_and_no_second_look():
    deep = walk(b")" + b"\x85" * 100_000 + b".")
    check_rewrite(deep, walk(deep.data), Edits())
    doubling = b"".join(bytes((0x68, i, 0x68, i, 0x86, 0x71, i + 1)) for i in range(60))
    wide = walk(stream(b"(K\x01K\x01\x86q\0", doubling, b"t"))
    check_rewrite(wide, walk(wide.data), Edits())


def test_a_big_string_fetched_often_is_compared_once():
    big = text("x" * 10_000_000)
    encoded = b"c_codecs\nencode\n" + big + text("latin1") + b"\x86R"
    data = stream(b"(", big, b"q\0", encoded, b"q\x01", b"h\0h\x01" * 20_000, b"t")
    old, new = walk(data), walk(bytes(bytearray(data)))
    start = time.monotonic()
    check_rewrite(old, new, Edits())
    assert time.monotonic() - start < 20


def test_the_sample_is_what_the_damage_needs():
    value = copy.deepcopy(original())
    assert value["shared"][0] is value["shared"][1]
    assert value["equal"][0] is not value["equal"][1]
