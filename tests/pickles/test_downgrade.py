"""Protocols 3 to 5 spelled in protocol 2: the same to pickle, accepted by torch's loader."""

from __future__ import annotations

import collections
import io
import pickle
import random
import zipfile

import pytest
from pickles_support import (
    Graph,
    KeywordMade,
    Outer,
    SubDict,
    canonical,
    dump,
    edited,
    edits_of,
    load,
    opcodes,
    stream,
    strict,
)

from ckptool.errors import PickleInvalid
from ckptool.pickles.check import check_rewrite
from ckptool.pickles.downgrade import add_spellings, bytes_literal, why_not
from ckptool.pickles.splice import Edits, splice
from ckptool.pickles.walk import walk

PROTOCOLS = (3, 4, 5)
RESTRICTED = {
    "GLOBAL", "BINUNICODE", "SHORT_BINSTRING", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "APPEND",
    "APPENDS", "SETITEM", "SETITEMS", "REDUCE", "NEWOBJ", "BUILD", "BINPERSID", "BINGET",
    "LONG_BINGET", "BINPUT", "LONG_BINPUT", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "PROTO", "STOP",
}  # fmt: skip


def downgraded(data: bytes, edits: Edits | None = None) -> bytes:
    walked, edits = walk(data), edits or Edits()
    assert add_spellings(walked, edits) is None
    out = splice(walked, edits)
    check_rewrite(walked, walk(out), edits)
    assert out[:2] == b"\x80\x02"
    return out


SAMPLES = {
    "text": ["", "é\udc80", "x" * 255, "x" * 256, "k", "y" * 70_000],
    "bytes": [b"", b"ab\xff", b"z" * 300, b"\n" * 70_000],
    "bytearray": [bytearray(), bytearray(b"ab\xff"), bytearray(b"z" * 300)],
    "numbers": [0, -1, 255, 256, 70_000, -(2**31), 2**63, -(2**2000), 1.5, True, None],
    "sets": [set(), {1}, {"a", "b"}, {(1, 2)}, set(range(2500))],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    "lists": [[], [1], list(range(2500))],
    "dicts": [{}, {1: 2}, {i: str(i) for i in range(2500)}, {b"k": {b"v"}}],
    "a set of bytes": {b"a", b"b" * 300},
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", SAMPLES)
def test_plain_data_in_protocol_2(name, protocol):
    out = downgraded(pickle.dumps(SAMPLES[name], protocol))
    assert strict(pickle.loads(out)) == strict(SAMPLES[name])
    assert set(opcodes(out)) <= RESTRICTED


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shared_values_stay_shared(protocol):
    array, members, raw = bytearray(b"a"), {1, 2}, b"raw" * 100
    made = SubDict(m=members)
    made.extra = [array, members, raw]
    value = {"a": array, "s": members, "o": made, "e": set(), "again": [array, members, made, raw]}
    value["e2"] = value["e"]
    out = downgraded(dump(value, protocol))
    loaded = load(out)
    assert canonical(loaded) == canonical(value)
    assert loaded["e"] is loaded["e2"]
    assert loaded["again"][1] is loaded["o"]["m"] is loaded["s"]
    assert set(opcodes(out)) <= RESTRICTED


def test_numbers_beyond_255_bytes_stay_long():
    value = [2**2050, -(2**9000)]
    out = downgraded(pickle.dumps(value, 4))
    assert pickle.loads(out) == value
    assert set(opcodes(out)) - RESTRICTED == {"LONG4"}


def test_a_small_long4_becomes_long1():
    out = downgraded(stream(b"\x8b\x03\0\0\0\0\0\x01", protocol=4))
    assert out == stream(b"\x8a\x03\0\0\x01")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_fast_mode_and_optimized_streams(protocol):
    import pickletools

    value = [{"k": {1, 2}}, [b"a", bytearray(b"b"), set()], collections.OrderedDict(a=1)]
    for data in (dump(value, protocol, fast=True), pickletools.optimize(dump(value, protocol))):
        assert strict(load(downgraded(data))) == strict(value)


def test_edits_and_spellings_together():
    value = {"a": {1}, "b": [b"x"], "c": "a"}
    value["d"] = [value["a"], value["b"]]
    walked = walk(dump(value, 4))
    out = downgraded(walked.data, edits_of(walked, renamed=["b", "c"], dropped=["a"]))
    loaded = load(out)
    assert loaded == {"module.b": [b"x"], "module.c": "a", "d": [{1}, [b"x"]]}
    assert loaded["d"][1] is loaded["module.b"]


def test_the_literal_of_bytes():
    for value in (b"", b"abc", bytes(range(256))):
        assert pickle.loads(stream(bytes_literal(value))) == value


# -- what keeps its protocol -----------------------------------------------------------------------
def queue_name() -> bytes:
    """A class whose protocol-2 name would be read as another: the module 'Queue'."""
    return stream(b"\x8c\x05Queue\x8c\x05Queue\x93", protocol=4)


KEPT = {
    "dotted": (lambda: pickle.dumps(Outer.Inner, 4), "the dotted class name"),
    "keywords": (lambda: dump(KeywordMade(x=1), 4), "keyword arguments"),
    "frozenset": (lambda: dump([frozenset("ab")], 4), "a frozenset"),
    "Queue": (queue_name, "which protocol 2 reads as another"),
    "a name of two lines": (
        lambda: stream(b"\x8c\x03a\nb\x8c\x01c\x93", protocol=4),
        "a class name with a line break",
    ),
    "computed": (lambda: stream(b"\x8c\x01mN\x93", protocol=4), "computed"),
    "odd": (lambda: stream(b"N2\x86", protocol=4), "DUP"),
    "a set with a state": (lambda: stream(b"\x8f}b", protocol=4), "a set with a state"),
    "a set put late": (lambda: stream(b"\x8f(K\x01\x90\x94", protocol=4), "in an odd way"),
    "a set put twice": (lambda: stream(b"\x8f\x94\x94(K\x01\x90", protocol=4), "in an odd way"),
    "no PROTO": (lambda: b"]\x94C\x01aa.", "does not say its protocol"),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_has_no_spelling_keeps_its_protocol_with_a_reason(name):
    make, reason = KEPT[name]
    walked, edits = walk(make()), Edits()
    kept = add_spellings(walked, edits)
    assert kept is not None
    assert reason in kept
    assert not edits
    assert edits.respell is None
    assert splice(walked, edits) == walked.data


def test_a_set_that_holds_itself_keeps_its_protocol_with_a_reason():
    members = {KeyedByIdentity()}
    next(iter(members)).members = members
    walked, edits = walk(dump(members, 4)), Edits()
    kept = add_spellings(walked, edits)
    assert kept is not None
    assert "holds itself" in kept
    assert not edits


class KeyedByIdentity:
    pass


def test_plain_names_have_no_reason():
    assert why_not(walk(dump({"a": SubDict()}, 4))) is None


# -- random graphs -------------------------------------------------------------------------------
def one_graph(seed: int) -> str:
    rnd = random.Random(seed)
    cyclic = rnd.random() < 0.2
    data = dump(Graph(rnd).root(cyclic), rnd.choice(PROTOCOLS))
    walked = walk(data)
    keys = [key for key in load(data) if rnd.random() < 0.4]
    how = rnd.choice([{}, {"renamed": keys}, {"dropped": keys}, {"retag": True}])
    edits = edits_of(walked, **how)
    if add_spellings(walked, edits) is not None:
        return "kept"
    try:
        out = splice(walked, edits)
    except PickleInvalid:
        assert cyclic, f"seed {seed}"
        return "refused"
    assert canonical(load(out)) == canonical(edited(load(data), **how)), f"seed {seed}"
    assert set(opcodes(out)) <= RESTRICTED | {"POP", "POP_MARK"}, f"seed {seed}"
    check_rewrite(walked, walk(out), edits)
    return "spelled"


def test_two_thousand_graphs_in_protocol_2():
    done = collections.Counter(one_graph(seed) for seed in range(2000))
    assert done["spelled"] > 700
    assert done["refused"] < 20


@pytest.mark.long
def test_twenty_thousand_graphs_in_protocol_2():
    for seed in range(10_000, 30_000):
        one_graph(seed)


# -- torch -----------------------------------------------------------------------------------------
def with_pickle(archive: bytes, change) -> bytes:
    """The zip with its data.pkl changed and its promise of a layout dropped."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            data = old.read(entry)
            if entry.filename.endswith("/data.pkl"):
                data = change(data)
            if not entry.filename.endswith(("/.format_version", "/.storage_alignment")):
                new.writestr(entry.filename, data)
    return out.getvalue()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_torch_loads_the_rewritten_archive_with_weights_only(protocol):
    import torch

    state = collections.OrderedDict(
        (f"layer{i}.weight", torch.arange(6, dtype=torch.float32).view(2, 3) + i) for i in range(40)
    )
    state._metadata = collections.OrderedDict({"": {"version": 1}})
    value = {"state_dict": state, "tied": state["layer0.weight"], "names": {"a"}, "b": b"raw"}
    value["parameter"] = torch.nn.Parameter(torch.ones(2))
    value["more"] = [torch.float16, torch.Size([1, 2]), torch.device("cpu"), 2**70, "x" * 300]
    file = io.BytesIO()
    torch.save(value, file, pickle_protocol=protocol)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    out = with_pickle(file.getvalue(), downgraded)
    loaded = torch.load(io.BytesIO(out), weights_only=True)
    assert list(loaded) == list(value)
    for key, tensor in state.items():
        assert torch.equal(loaded["state_dict"][key], tensor)
    assert loaded["state_dict"]._metadata == state._metadata
    assert loaded["tied"] is loaded["state_dict"]["layer0.weight"]
    assert type(loaded["parameter"]) is torch.nn.Parameter
    assert [loaded[key] for key in ("names", "b", "more")] == [
        value[k] for k in ("names", "b", "more")
    ]
