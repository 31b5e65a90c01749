"""The walk against pickle itself, every opcode, every way to break a stream."""

from __future__ import annotations

import copyreg
import gc
import io
import os
import pickle
import pickletools
import struct
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pickles_support import (
    SlowPickler,
    Storage,
    SubDict,
    Tensor,
    dump,
    load,
    opcodes,
    stream,
    strict,
    text,
    value_of,
)

from ckptool.errors import CkptError, LimitExceeded, PickleInvalid
from ckptool.limits import Limits
from ckptool.pickles.nodes import (
    INST,
    NEWOBJ,
    NEWOBJ_EX,
    OBJ,
    REDUCE,
    Box,
    Global,
    Obj,
    Pers,
    Raw,
    Tup,
    children,
    elements,
    items_of,
    pairs,
    text_of,
)
from ckptool.pickles.walk import walk

PROTOCOLS = range(6)

hashable = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.floats(allow_nan=False),
    st.text(st.characters(), max_size=8),
    st.binary(max_size=8),
)
leaves = st.one_of(
    hashable,
    st.just("x" * 300),
    st.just(b"y" * 300),
    st.binary(max_size=4).map(bytearray),
    st.sets(st.integers(), max_size=4),
    st.frozensets(st.text(max_size=3), max_size=4),
)
plain = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(hashable, inner, max_size=4),
        inner.map(lambda value: [value, value]),
    ),
    max_leaves=15,
)


def u4(number: int) -> bytes:
    return struct.pack("<I", number)


def u8(number: int) -> bytes:
    return struct.pack("<Q", number)


# -- the same as pickle ------------------------------------------------------------------------
@settings(deadline=None, max_examples=150)
@given(plain, st.sampled_from(PROTOCOLS))
def test_plain_data_reads_as_pickle_reads_it(value, protocol):
    data = pickle.dumps(value, protocol)
    for made in (data, dump(value, protocol, SlowPickler), pickletools.optimize(data)):
        assert strict(value_of(walk(made).root)) == strict(pickle.loads(made))


@settings(deadline=None, max_examples=100)
@given(plain, st.sampled_from(PROTOCOLS))
def test_fast_mode_reads_as_pickle_reads_it(value, protocol):
    for pickler in (pickle.Pickler, pickle._Pickler):
        data = dump(value, protocol, pickler, fast=True)
        assert strict(value_of(walk(data).root)) == strict(pickle.loads(data))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_batches_beyond_a_thousand_items(protocol):
    value = [list(range(2501)), {i: str(i) for i in range(2001)}, set(range(1500)), [1] * 1001]
    assert strict(value_of(walk(pickle.dumps(value, protocol)).root)) == strict(value)


@pytest.mark.parametrize("protocol", [4, 5])
def test_several_frames(protocol):
    value = [str(i) * 20 for i in range(9000)] + ["y" * 70_000, b"z" * 70_000]
    walked = walk(pickle.dumps(value, protocol))
    assert len(walked.frames) > 2
    assert value_of(walked.root) == value


def test_a_start_offset_and_the_end():
    data = b"head" + pickle.dumps([1, "a"], 2) + b"tail"
    walked = walk(data, 4)
    assert (walked.start, data[walked.end :]) == (4, b"tail")
    assert value_of(walked.root) == [1, "a"]


G = b"cnowhere\nThing\n"  # no such module: nothing of it may be imported
STREAMS = {
    "INT": (b"I7\n.", 7),
    "INT bool": (b"(I00\nI01\nt.", (False, True)),
    "INT long": (b"I12345678901234567890\n.", 12345678901234567890),
    "INT hex": (b"I0x1f\n.", 31),
    "LONG": (b"L-5L\n.", -5),
    "LONG without L": (b"L5\n.", 5),
    "FLOAT": (b"F1.5\n.", 1.5),
    "BININT": (b"J\xfe\xff\xff\xff.", -2),
    "BININT1": (b"K\xff.", 255),
    "BININT2": (b"M\x01\x02.", 513),
    "LONG1": (b"\x8a\x02\x00\x80.", -32768),
    "LONG1 empty": (b"\x8a\x00.", 0),
    "LONG4": (b"\x8b\x03\0\0\0\0\0\x01.", 65536),
    "BINFLOAT": (b"G?\xf8\0\0\0\0\0\0.", 1.5),
    "NONE": (b"N.", None),
    "NEWTRUE": (b"\x88.", True),
    "NEWFALSE": (b"\x89.", False),
    "STRING": (b"S'a\\n\\x41\\u0041'\n.", b"a\nA\\u0041"),
    "STRING odd escape": (b'S"a\\d"\n.', b"a\\d"),
    "BINSTRING": (b"T\x02\0\0\0ab.", b"ab"),
    "SHORT_BINSTRING": (b"U\x02ab.", b"ab"),
    "UNICODE": (b"Va\\u00e9\n.", "aé"),
    "BINUNICODE": (b"X\x03\0\0\0\xed\xb2\x80.", "\udc80"),
    "SHORT_BINUNICODE": (b"\x8c\x02\xc3\xa9.", "é"),
    "BINUNICODE8": (b"\x8d" + u8(2) + b"ab.", "ab"),
    "BINBYTES": (b"B\x02\0\0\0ab.", b"ab"),
    "SHORT_BINBYTES": (b"C\x02ab.", b"ab"),
    "BINBYTES8": (b"\x8e" + u8(2) + b"ab.", b"ab"),
    "BYTEARRAY8": (b"\x96" + u8(2) + b"ab.", bytearray(b"ab")),
    "EMPTY_LIST APPEND": (b"]K\x01a.", [1]),
    "APPENDS": (b"](K\x01K\x02e.", [1, 2]),
    "APPENDS nothing": (b"](e.", []),
    "LIST": (b"(K\x01K\x02l.", [1, 2]),
    "EMPTY_TUPLE": (b").", ()),
    "TUPLE": (b"(K\x01K\x02t.", (1, 2)),
    "TUPLE of nothing": (b"(t.", ()),
    "TUPLE1": (b"K\x01\x85.", (1,)),
    "TUPLE2": (b"K\x01K\x02\x86.", (1, 2)),
    "TUPLE3": (b"K\x01K\x02K\x03\x87.", (1, 2, 3)),
    "EMPTY_DICT SETITEM": (b"}K\x01K\x02s.", {1: 2}),
    "SETITEMS": (b"}(K\x01K\x02K\x03K\x04u.", {1: 2, 3: 4}),
    "DICT": (b"(K\x01K\x02d.", {1: 2}),
    "EMPTY_SET ADDITEMS": (b"\x8f(K\x01K\x02\x90.", {1, 2}),
    "FROZENSET": (b"(K\x01K\x02\x91.", frozenset((1, 2))),
    "MARK POP": (b"K\x01(0.", 1),
    "POP": (b"K\x01K\x020.", 1),
    "POP in a MARK": (b"(K\x01K\x020t.", (1,)),
    "POP_MARK": (b"K\x01(K\x02K\x031.", 1),
    "DUP": (b"K\x012\x86.", (1, 1)),
    "GET PUT": (b"(K\x01p300\ng300\nt.", (1, 1)),
    "BINGET BINPUT": (b"(K\x01q\x07h\x07t.", (1, 1)),
    "LONG_BINGET LONG_BINPUT": (b"(K\x01r\x01\x01\0\0j\x01\x01\0\0t.", (1, 1)),
    "MEMOIZE": (b"(K\x05\x94K\x06\x94h\x01h\x00t.", (5, 6, 6, 5)),
    "PROTO FRAME": (b"\x80\x04\x95" + u8(2) + b"N.", None),
    "two frames": (b"\x80\x04\x95" + u8(2) + b"K\x01\x95" + u8(1) + b".", 1),
    "a frame of nothing": (b"\x80\x04\x95" + u8(0) + b"N.", None),
}
SHAPES = {
    "GLOBAL": (G + b".", Global),
    "STACK_GLOBAL": (b"\x8c\x07nowhere\x8c\x05Thing\x93.", Global),
    "REDUCE": (G + b"(K\x01tR.", REDUCE),
    "BUILD": (G + b")R}b.", REDUCE),
    "NEWOBJ": (G + b"K\x01\x85\x81.", NEWOBJ),
    "NEWOBJ_EX": (G + b"K\x01\x85}\x92.", NEWOBJ_EX),
    "INST": (b"(K\x01inowhere\nThing\n.", INST),
    "OBJ": (b"(" + G + b"K\x01o.", OBJ),
    "PERSID": (b"Pname\n.", Pers),
    "BINPERSID": (b"X\x04\0\0\0nameQ.", Pers),
}
REFUSED = {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_tables_hold_every_opcode_that_pickletools_knows():
    tables = {**STREAMS, **SHAPES}
    tables.pop("INT hex")  # pickle reads it, pickletools does not
    seen = {name for data, _ in tables.values() for name in opcodes(data)}
    assert seen | REFUSED == {op.name for op in pickletools.opcodes}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", STREAMS)
def test_each_opcode_of_plain_data(name):
    data, value = STREAMS[name]
    assert strict(value_of(walk(data).root)) == strict(value)
    assert strict(pickle.loads(data, encoding="bytes")) == strict(value)


@pytest.mark.parametrize("name", SHAPES)
def test_each_opcode_that_names_or_calls(name):
    data, kind = SHAPES[name]
    walked = walk(data)
    root = walked.root
    if kind is Global:
        assert (root.full, root.offset, root.computed) == (
            "nowhere.Thing",
            len(data) - 2,
            False,
        ) or (name == "GLOBAL" and root.offset == 0)
    elif kind is Pers:
        assert root.pid == "name"
        assert walked.persistent == [root]
    else:
        assert (root.op, root.fn.full) == (kind, "nowhere.Thing")
        assert items_of(root.args) == (() if name == "BUILD" else (1,))
        assert walked.calls == [root]
        assert (root.state is not None) == (name == "BUILD")
        assert (root.kwargs is not None) == (name == "NEWOBJ_EX")
    assert "nowhere" not in sys.modules


def test_a_computed_name_is_marked():
    walked = walk(b"\x8c\x01m" + G + b")R\x93.")
    assert walked.root.computed
    assert walked.stack_globals[0][2] is walked.root


def test_one_node_for_each_name_with_the_byte_of_its_first_use():
    walked = walk(b"(" + G + G + b"\x8c\x07nowhere\x8c\x05Thing\x93t.")
    first, second, third = walked.root.items
    assert first is second is third
    assert walked.globals == {("nowhere", "Thing"): first}
    assert first.offset == 1


def test_text_of_a_python_2_string():
    assert text_of(walk(b"U\x02\xc3\xa9.").root) == "é"
    assert text_of(walk(b"U\x01\xe9.").root) == "é"
    assert text_of(walk(b"C\x01a.").root) is None
    assert text_of(1) is None


def test_children_in_file_order():
    data = stream(G, b"(K\x01K\x02tR(K\x03K\x04uK\x05b", protocol=2)
    root = walk(data).root
    assert children(root)[0] is root.fn
    assert children(root)[3:] == [3, 4, 5]
    assert children(walk(b"X\x01\0\0\0aQ.").root) == ["a"]
    assert children(7) == []


# -- spans -------------------------------------------------------------------------------------
def spans(node):
    """(child, start, end) of every child of a container."""
    if type(node) is Tup:
        ends = [*node.starts[1:], node.end] if node.items else []
        return list(zip(node.items, node.starts, ends, strict=True))
    found = []
    if type(node) is Box:
        for key, value, at, middle, end in pairs(node):
            found += [(key, at, middle), (value, middle, end)]
        found += list(elements(node))
    return found


@settings(deadline=None, max_examples=100)
@given(plain, st.sampled_from(PROTOCOLS))
def test_the_span_of_a_child_is_the_child(value, protocol):
    data = dump(value, protocol, fast=True)
    stack = [walk(data).root]
    while stack:
        for child, start, end in spans(stack.pop()):
            again = walk(data[start:end] + b".").root
            assert strict(value_of(again)) == strict(value_of(child))
            stack.append(child)


def test_the_spans_of_a_memoised_stream_tile():
    data = stream(b"(", text("a"), b"q\0h\0K\x01K\x02\x86q\x01h\x01t")
    root = walk(data).root
    parts = [data[start:end] for _, start, end in spans(root)]
    assert parts == [text("a") + b"q\0", b"h\0", b"K\x01K\x02\x86q\x01", b"h\x01"]


def test_puts_gets_frames_and_starts_are_positions():
    data = stream(b"(", text("a"), b"q\0h\0r\x01\x01\0\0t")
    walked = walk(data)
    assert [data[pos : pos + 1] for pos in walked.puts] == [b"q", b"r"]
    assert [data[pos : pos + 1] for pos in walked.gets] == [b"h"]
    assert walked.memo == {0: "a", 257: "a"}
    assert [data[pos : pos + 1] for pos in walked.memo_start.values()] == [b"X", b"h"]


# -- broken streams ------------------------------------------------------------------------------
def framed(size: int, rest: bytes) -> bytes:
    return b"\x80\x04\x95" + u8(size) + rest


BROKEN = {
    "empty": (b"", 0),
    "no STOP": (b"N", 1),
    "no STOP after PROTO": (b"\x80\x02", 2),
    "only half a PROTO": (b"\x80", 0),
    "memo undefined": (b"\x80\x02h\x05.", 2),
    "memo undefined, long": (b"j\x01\0\0\0.", 0),
    "memo undefined, text": (b"g3\n.", 0),
    "memo number missing": (b"g\n.", 0),
    "memo number negative": (b"Np-1\n.", 1),
    "memo number of 33 bits": (b"Np4294967296\n.", 1),
    "memo number of 5,000 digits": (b"Np" + b"1" * 5000 + b"\n.", 1),
    "STOP on nothing": (b".", 0),
    "STOP in a MARK": (b"N(.", 2),
    "STOP in a filled MARK": (b"(N.", 2),
    "PROTO 6": (b"\x80\x06N.", 0),
    "PROTO 255": (b"\x80\xffN.", 0),
    "PROTO twice": (b"\x80\x02\x80\x02N.", 2),
    "PROTO not first": (b"N\x80\x02.", 1),
    "EXT1": (b"\x82\x01.", 0),
    "EXT2": (b"\x83\x01\0.", 0),
    "EXT4": (b"\x84\x01\0\0\0.", 0),
    "NEXT_BUFFER": (b"\x97.", 0),
    "READONLY_BUFFER": (b"N\x98.", 1),
    "opcode 0": (b"\x00.", 0),
    "opcode 0x99": (b"N\x99.", 1),
    "opcode 0xff": (b"\xff.", 0),
    "SETITEMS odd": (b"}(K\x01u.", 4),
    "DICT odd": (b"(K\x01d.", 3),
    "APPENDS on a dict": (b"}(K\x01e.", 4),
    "APPENDS on an int": (b"K\x01(K\x02e.", 5),
    "APPEND on a str": (b"X\0\0\0\0Na.", 6),
    "SETITEMS on a list": (b"](NNu.", 4),
    "SETITEM on a tuple": (b")NNs.", 3),
    "ADDITEMS on a list": (b"](N\x90.", 3),
    "ADDITEMS on a dict": (b"}(N\x90.", 3),
    "SETITEMS on a name": (G + b"(NNu.", len(G) + 3),
    "LONG of 5,000 digits": (b"L" + b"9" * 5000 + b"L\n.", 0),
    "INT of 5,000 digits": (b"I" + b"9" * 5000 + b"\n.", 0),
    "INT with a leading zero": (b"I010\n.", 0),
    "INT of letters": (b"Iabc\n.", 0),
    "FLOAT of letters": (b"Fabc\n.", 0),
    "INT without line end": (b"I12", 0),
    "STRING without quotes": (b"Sabc\n.", 0),
    "STRING half quoted": (b"S'abc\n.", 0),
    "STRING of one quote": (b"S'\n.", 0),
    "STRING of nothing": (b"S\n.", 0),
    "STRING with a broken escape": (b"S'\\x4'\n.", 0),
    "UNICODE with a broken escape": (b"V\\u12\n.", 0),
    "text not UTF-8": (b"X\x01\0\0\0\xff.", 0),
    "short text not UTF-8": (b"\x8c\x01\xff.", 0),
    "GLOBAL module not UTF-8": (b"c\xff\nx\n.", 0),
    "GLOBAL name not UTF-8": (b"cm\n\xff\n.", 0),
    "GLOBAL without a second line": (b"cos\n.", 0),
    "GLOBAL without a line": (b"cos", 0),
    "INST not UTF-8": (b"(i\xff\nx\n.", 1),
    "PERSID not UTF-8": (b"P\xff\n.", 0),
    "LONG4 negative": (b"\x8b\xff\xff\xff\xff.", 0),
    "frame beyond the end": (framed(9, b"N."), 2),
    "frame of 2**63": (framed(2**63, b"N."), 2),
    "frame in a frame": (framed(11, b"\x95" + u8(1) + b"N."), 11),
    "frame in a frame to the end": (framed(11, b"\x95" + u8(2) + b"N."), 11),
    "opcode crosses its frame": (framed(1, b"K\x01."), 13),
    "STOP inside a frame": (framed(3, b"N.N" + b"."), 12),
    "STOP inside a frame to the end": (framed(3, b"N.N"), 12),
    "half a frame length": (b"\x80\x04\x95\0\0", 2),
}
for _name, _data in {
    "BININT": b"J\0\0\0",
    "BININT1": b"K",
    "BININT2": b"M\0",
    "BINFLOAT": b"G\0\0",
    "BINGET": b"h",
    "LONG_BINGET": b"j\0",
    "BINUNICODE": b"X\0\0",
    "LONG1": b"\x8a",
    "LONG4": b"\x8b\0",
    "SHORT_BINBYTES": b"C",
    "BINBYTES8": b"\x8e\0",
}.items():
    BROKEN[f"the end inside {_name}"] = (_data, 0)
for _name, _data in {
    "BINPUT": b"q\0", "LONG_BINPUT": b"r\0\0\0\0", "PUT": b"p0\n", "MEMOIZE": b"\x94", "POP": b"0",
    "DUP": b"2", "TUPLE1": b"\x85", "BINPERSID": b"Q", "REDUCE": b"R", "BUILD": b"b",
    "NEWOBJ": b"\x81", "NEWOBJ_EX": b"\x92", "STACK_GLOBAL": b"\x93", "APPEND": b"a",
    "SETITEM": b"s", "TUPLE2": b"\x86", "TUPLE3": b"\x87",
}.items():  # fmt: skip
    BROKEN[f"underflow {_name}"] = (_data + b".", 0)
    if _name != "POP":
        BROKEN[f"underflow to a MARK {_name}"] = (b"NNN(" + _data + b".", 4)
    if _name in ("REDUCE", "BUILD", "NEWOBJ", "NEWOBJ_EX", "STACK_GLOBAL", "APPEND", "SETITEM"):
        BROKEN[f"underflow by one {_name}"] = (b"N" + _data + b".", 1)
for _name, _data in {
    "TUPLE": b"t", "LIST": b"l", "DICT": b"d", "SETITEMS": b"u", "APPENDS": b"e", "OBJ": b"o",
    "ADDITEMS": b"\x90", "FROZENSET": b"\x91", "POP_MARK": b"1", "INST": b"im\nn\n",
}.items():  # fmt: skip
    BROKEN[f"no MARK {_name}"] = (b"N" + _data + b".", 1)
BROKEN["OBJ of nothing"] = (b"(o.", 1)
BROKEN["APPENDS on nothing"] = (b"(e.", 1)
for _name, _code, _width in (
    ("SHORT_BINSTRING", b"U", 1), ("BINSTRING", b"T", 4), ("BINUNICODE", b"X", 4),
    ("SHORT_BINUNICODE", b"\x8c", 1), ("BINUNICODE8", b"\x8d", 8), ("SHORT_BINBYTES", b"C", 1),
    ("BINBYTES", b"B", 4), ("BINBYTES8", b"\x8e", 8), ("BYTEARRAY8", b"\x96", 8),
    ("LONG1", b"\x8a", 1), ("LONG4", b"\x8b", 4),
):  # fmt: skip
    for _size in (3, 2 ** (8 * _width - 1) - 1):
        _length = _size.to_bytes(_width, "little")
        BROKEN[f"{_name} of {_size} bytes in 2"] = (b"N" + _code + _length + b"a.", 1)
BROKEN["BINBYTES8 of 2**64-1"] = (b"\x8e" + b"\xff" * 8 + b"a.", 0)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_stream_is_refused_with_its_byte(name):
    data, offset = BROKEN[name]
    with pytest.raises(PickleInvalid) as caught:
        walk(b"head" + data, 4, member="x/data.pkl")
    assert caught.value.offset == offset + 4
    assert caught.value.member == "x/data.pkl"
    assert caught.value.text


def test_the_reason_is_in_words():
    reasons = {}
    for name, (data, _) in BROKEN.items():
        with pytest.raises(PickleInvalid) as caught:
            walk(data)
        reasons[name] = str(caught.value)
    assert "memo slot is fetched that was never set" in reasons["memo undefined"]
    assert "without STOP" in reasons["no STOP"]
    assert "protocol 6 does not exist" in reasons["PROTO 6"]
    assert "PROTO 2 where none may stand" in reasons["PROTO twice"]
    assert "extension code" in reasons["EXT1"]
    assert "not in the file" in reasons["NEXT_BUFFER"]
    assert "0x99 is unknown" in reasons["opcode 0x99"]
    assert "odd number" in reasons["SETITEMS odd"]
    assert "another kind" in reasons["APPENDS on a dict"]
    assert "5,000 digits" in reasons["INT of 5,000 digits"]
    assert "inside a frame" in reasons["STOP inside a frame"]
    assert "crosses the end of its frame" in reasons["opcode crosses its frame"]
    assert "crosses the end of another" in reasons["frame in a frame to the end"]
    assert "longer than the bytes left" in reasons["LONG4 negative"]


def test_an_error_keeps_what_was_seen_before_it():
    with pytest.raises(PickleInvalid) as caught:
        walk(b"cos\nsystem\nX\x02\0\0\0ls\x85R\xff")
    seen = caught.value.partial
    assert list(seen.globals) == [("os", "system")]
    assert len(seen.calls) == 1


@pytest.mark.parametrize(
    ("data", "limits", "slug"),
    [
        (b"N" * 9 + b".", Limits(opcode_count=9), "limit-opcodes"),
        (b"N" * 9 + b".", Limits(pickle_bytes=9), "limit-pickle-bytes"),
        (b"(" * 7 + b"t" * 7 + b".", Limits(nesting=3), "limit-nesting"),
        (b"(" * 1001, Limits(), "limit-nesting"),
    ],
)
def test_one_step_beyond_a_limit(data, limits, slug):
    with pytest.raises(LimitExceeded) as caught:
        walk(data, 0, limits)
    assert caught.value.slug == slug


@pytest.mark.parametrize(
    ("data", "limits"),
    [
        (b"N" * 9 + b".", Limits(opcode_count=10)),
        (b"N" * 9 + b".", Limits(pickle_bytes=10)),
        (b"(" * 6 + b"t" * 6 + b".", Limits(nesting=3)),
    ],
)
def test_exactly_at_a_limit(data, limits):
    assert walk(data, 0, limits).end == len(data)


# -- nothing happens -----------------------------------------------------------------------------
def test_nothing_is_imported_or_called(tmp_path):
    marker = tmp_path / "marker"
    command = text(f"touch {marker}")
    payloads = [
        b"cos\nsystem\n" + command + b"\x85R.",
        b"\x8c\x05posix\x8c\x06system\x93" + command + b"\x85R.",
        b"(" + command + b"ios\nsystem\n.",
        b"(cos\nsystem\n" + command + b"o.",
        b"cno_such_module\nf\n)R.",
        b"\x80\x02cantigravity\nx\n.",
        b"cbuiltins\nexec\n" + text(f"open({str(marker)!r}, 'w')") + b"\x85R.",
    ]
    before = set(sys.modules)
    for data in payloads:
        assert type(walk(data).root) in (Obj, Global)
    assert set(sys.modules) == before
    assert not marker.exists()
    assert os.listdir(tmp_path) == []


def test_a_registered_extension_code_is_refused_too():
    copyreg.add_extension("os", "getcwd", 77)
    try:
        with pytest.raises(PickleInvalid):
            walk(b"\x82\x4d)R.")
    finally:
        copyreg.remove_extension("os", "getcwd", 77)


@pytest.mark.parametrize("data", [b"N.", b"\xff"])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was(data, enabled):
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        try:
            walk(data)
        except PickleInvalid:
            assert data == b"\xff"
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()


# -- bombs ---------------------------------------------------------------------------------------
def test_a_tuple_200_000_deep():
    node, depth = walk(b")" + b"\x85" * 200_000 + b".").root, 0
    while type(node) is Tup:
        node, depth = node.items[0], depth + 1
    assert depth == 200_000


def test_a_deep_tuple_as_a_dict_key_is_not_hashed():
    root = walk(b"})" + b"\x85" * 200_000 + b"Ns.").root
    assert type(root.batches[0].items[0]) is Tup


def test_a_tuple_of_a_trillion_leaves_as_a_set_item():
    levels = b"".join(bytes((0x68, i, 0x68, i, 0x86, 0x71, i + 1)) for i in range(40))
    root = walk(stream(b"\x8f(K\x01K\x01\x86q\0", levels, b"\x90", protocol=4)).root
    assert len(root.batches[0].items) == 41


def test_a_high_memo_slot_costs_nothing():
    walked = walk(b"\x80\x02Nr\xff\xff\xff\x3f.")
    assert walked.memo == {2**30 - 1: None}


def test_a_million_marks_popped():
    assert walk(b"N" + b"(1" * 500_000 + b".").root is None


# -- oddities ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("data", "oddity", "offset"),
    [
        (b"Nq\0Nq\0.", "memo slot set twice", 0),
        (b"]2\x86.", "DUP", 1),
        (b"(]q\0h\0Na0t.", "items added to a value fetched from the memo", 7),
        (b"(" + G + b")Rq\0h\0(NNut.", "items added to a value fetched from the memo", 25),
        (b"(" + G + b")Rq\0h\0}bt.", "BUILD twice or on a value fetched from the memo", 23),
        (G + b")R}b}b.", "BUILD twice or on a value fetched from the memo", 20),
        (G + b"}b.", "BUILD on a value that is no object", 16),
        (b"NN.", "values left on the stack", 0),
    ],
)
def test_an_oddity_is_recorded(data, oddity, offset):
    assert walk(data).oddities.get(oddity) == offset


def test_honest_streams_have_no_oddities():
    shared = SubDict(a=[1])
    shared.extra = {1}
    value = {"a": shared, "b": [shared, Tensor(Storage("0", "cpu"))]}
    for protocol in range(1, 6):
        assert walk(dump(value, protocol)).oddities == {}


def test_build_on_something_that_is_no_object_is_listed():
    walked = walk(G + b"}b.")
    assert [(at, owner.full) for at, owner in walked.builds_on_others] == [(16, "nowhere.Thing")]


# -- damage --------------------------------------------------------------------------------------
def nodes_or_error(data: bytes) -> None:
    """Any exception but a CkptError with its byte fails the test."""
    try:
        end = walk(data).end
    except CkptError as error:
        end = error.offset
    assert 0 <= end <= len(data)


def sample(protocol: int) -> bytes:
    shared = ["cuda:0", b"bytes", bytearray(b"ba"), {1, 2}, frozenset("a"), 2**70, -1, 70000, 1.5]
    value = {"k": SubDict(x=shared), "t": (shared, None, True), "s": Storage("0", "cpu")}
    return dump(value, protocol) if protocol else dump({"k": shared, "n": (1, 2)}, 0)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_truncation_is_a_ckpt_error(protocol):
    data = sample(protocol)
    walk(data)
    for size in range(len(data)):
        with pytest.raises(CkptError) as caught:
            walk(data[:size])
        assert 0 <= caught.value.offset <= size


@settings(deadline=None, max_examples=600)
@given(
    st.sampled_from([sample(protocol) for protocol in PROTOCOLS]),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_mutated_bytes_give_nodes_or_a_ckpt_error(data, changes):
    damaged = bytearray(data)
    for at, byte in changes:
        damaged[at % len(damaged)] = byte
    nodes_or_error(bytes(damaged))


@settings(deadline=None, max_examples=600)
@given(st.binary(max_size=40))
def test_random_bytes_give_nodes_or_a_ckpt_error(data):
    nodes_or_error(data)


PARTS = [data[:-1] for data, _ in STREAMS.values() if data[:1] != b"\x80"]
PARTS += [b"q\0", b"h\0", *(bytes((code,)) for code in b"at(sue0bR\x86\x94\x90")]


@settings(deadline=None, max_examples=400)
@given(st.lists(st.sampled_from(PARTS), max_size=12))
def test_opcodes_in_any_order_give_nodes_or_a_ckpt_error(parts):
    nodes_or_error(b"".join(parts) + b".")


def test_raw_knows_its_payload_bytes():
    data = stream(b"C\x03abc", protocol=3)
    raw = walk(data).root
    assert type(raw) is Raw
    assert data[raw.start : raw.start + 3] == raw.value == b"abc"


def test_persistent_ids_as_torch_writes_them():
    data = dump({"a": Tensor(Storage("0", "cuda:0"))}, 2)
    (pers,) = walk(data).persistent
    assert pers.pid.items[2:] == ("0", "cuda:0", 4)
    assert load(data)["a"].storage.location == "cuda:0"
    assert io.BytesIO(data).read(2) == b"\x80\x02"


def test_repeated_keys_are_bounded_by_the_limits_that_are_given():
    key = "k" * 1_000
    data = pickle.dumps([{key: 1} for _ in range(20)], protocol=2)
    room = 20 * len(key) - len(data)
    assert walk(data, limits=Limits(repeated_key_bytes=room)).key_bytes == 20_000
    with pytest.raises(LimitExceeded, match="keys of dicts of more than"):
        walk(data, limits=Limits(repeated_key_bytes=room - 1))
