"""One row for each lie of hostile.md 4, 5 and 8, and the slug it is refused with."""

import io
import pickle
import struct
import time

import pytest
import torch
from formats_support import (
    FLOAT,
    HOOKS,
    MAGIC,
    SIX,
    archive,
    call,
    dictionary,
    legacy,
    name,
    pickled,
    read_bytes,
    refusal,
    safetensors,
    saved,
    storage,
    tar,
    tensor,
    text,
    tried,
    tup,
    weights,
)

from ckptool.limits import Limits


def slug_of(body, **more):
    return refusal(archive(pickled(dictionary(("w", body))), **more)).slug


UNTYPED = name("torch.storage", "UntypedStorage")


def v3(stored, offset, size, stride, dtype=None):
    dtype = name("torch", "float8_e4m3fn") if dtype is None else dtype
    return call(
        "torch._utils._rebuild_tensor_v3", stored, offset, size, stride, False, HOOKS, dtype
    )


BOUNDS = {
    "offset one too far": tensor(offset=1),
    "offset far": tensor(offset=2**62),
    "offset negative": tensor(offset=-1),
    "offset of nothing": tensor(offset=7, size=(0,), stride=(1,)),
    "size": tensor(size=(3, 3)),
    "size negative": tensor(size=(-2, 3)),
    "size of minus nothing": tensor(size=(0, -3)),
    "size huge": tensor(size=(2**62, 2**62), stride=(1, 1)),
    "size of 2000 bits": tensor(size=(1 << 2000, 3)),
    "stride": tensor(stride=(4, 1)),
    "stride negative": tensor(stride=(-3, 1)),
    "stride huge": tensor(stride=(2**63, 1)),
    "fewer strides": tensor(stride=(1,)),
    "more strides": tensor(stride=(1, 1, 1)),
    "count too small": tensor(storage(count=-6)),
    "offset a float": tensor(offset=0.0),
    "offset a bool": tensor(offset=False),
    "offset a text": tensor(offset="0"),
    "offset None": tensor(offset=None),
    "size a float": tensor(size=(2.0, 3)),
    "size a bool": tensor(size=(True, 3)),
    "size a text": tensor(size="23"),
    "size a number": tensor(size=6),
    "size None": tensor(size=None),
    "size a dict": tensor(size=b"}"),
    "size a torch.Size of two": tensor(size=call("torch.Size", (2,), (3,))),
    "stride a text": tensor(stride=("3", 1)),
    "stride None": tensor(stride=None),
    "count a float": tensor(storage(count=6.0)),
    "count a bool": tensor(storage(count=True)),
    "count a text": tensor(storage(count="6")),
    "v1": call("torch._utils._rebuild_tensor", storage(), 1, (2, 3), (3, 1)),
    "v3": v3(storage("0", 24, UNTYPED), 1, (24,), (1,)),
    "v3, larger dtype": v3(storage("0", 24, UNTYPED), 0, (7,), (1,), name("torch", "uint32")),
    "parameter": call("torch._utils._rebuild_parameter", tensor(offset=1), True, HOOKS),
    "old tensor": name("torch", "FloatTensor") + b")\x81" + tup(storage(), 1, (6,), (1,)) + b"b",
    "quantized": call(
        "torch._utils._rebuild_qtensor",
        storage("0", 24, name("torch", "QInt8Storage")),
        0,
        (25,),
        (1,),
        (name("torch", "per_tensor_affine"), 0.5, 1),
        False,
        HOOKS,
    ),
    "inside a subclass": call(
        "torch._tensor._rebuild_from_type_v2",
        name("torch._utils", "_rebuild_tensor_v2"),
        name("acme", "T"),
        (storage(), 9, (6,), (1,), False, HOOKS),
        b"}",
    ),
    "meta, negative": call(
        "torch._utils._rebuild_meta_tensor_no_storage", name("torch", "float32"), (-1,), (1,), False
    ),
    "view": tensor(storage("0", 6, FLOAT, "cpu", ("v", 5, 2)), size=(2,), stride=(1,)),
    "view negative": tensor(storage("0", 6, FLOAT, "cpu", ("v", -1, 2)), size=(2,), stride=(1,)),
    "past a view": tensor(storage("0", 6, FLOAT, "cpu", ("v", 4, 2)), size=(3,), stride=(1,)),
}


@pytest.mark.parametrize("case", BOUNDS)
def test_a_tensor_outside_of_its_storage(case):
    assert slug_of(BOUNDS[case]) == "tensor-bounds"


@pytest.mark.parametrize("case", BOUNDS)
def test_a_lie_is_refused_wherever_it_hides(case):
    """As a dict key, popped, among arguments, in a state: reached by no walk of ours."""
    lie = BOUNDS[case]
    honest = dictionary(("w", tensor()))
    for body in (
        honest + b"0" + lie + b"0" + honest,
        tup(lie) + b"0" + honest,
        dictionary(
            ("w", tensor()), ("x", name("acme", "C") + b")\x81" + dictionary(("t", lie)) + b"b")
        ),
        b"}(" + lie + tensor() + b"u",
    ):
        assert refusal(archive(pickled(body))).slug == "tensor-bounds"


def test_the_key_of_the_lying_tensor_is_named():
    error = refusal(archive(pickled(dictionary(("good", tensor()), ("bad", tensor(offset=1))))))
    assert error.key == "bad"
    deep = dictionary(("state_dict", dictionary(("bad", tensor(offset=1)))))
    assert refusal(archive(pickled(deep))).key in ("bad", "state_dict.bad")


@pytest.mark.parametrize(("rank", "fine"), [(64, True), (65, False), (100_000, False)])
def test_rank(rank, fine):
    body = tensor(size=(1,) * rank, stride=(1,) * rank)
    if fine:
        data = archive(pickled(dictionary(("w", body))))
        assert len(weights(read_bytes(data)).tensors[0].shape) == rank
    else:
        assert slug_of(body) == "limit-rank"


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [
        ((2, 3), (3, 1), 0),
        ((1,), (2**62,), 5),
        ((), (), 5),
        ((0,), (1,), 6),
        ((0, 2**40), (1, 2**40), 0),
        ((2**62, 3), (0, 1), 3),
        ((5, 2), (1, 1), 0),
    ],
)
def test_odd_views_that_stay_inside(size, stride, offset):
    data = archive(pickled(dictionary(("w", tensor(size=size, stride=stride, offset=offset)))))
    (one,) = weights(read_bytes(data)).tensors
    assert (one.shape, one.stride, one.offset) == (size, stride, offset)


INVALID = {
    "pid of four": tensor(tup("storage", FLOAT, "0", "cpu") + b"Q"),
    "pid of seven": tensor(storage("0", 6, FLOAT, "cpu", None, None)),
    "pid a text": tensor(text("0") + b"Q"),
    "pid a list": tensor(b"](" + text("storage") + b"eQ"),
    "pid None": tensor(b"NQ"),
    "pid of another word": tensor(tup("module", FLOAT, "0", "cpu", 6) + b"Q"),
    "pid key a list": tensor(storage(b"]")),
    "pid key bytes": tensor(storage(b"C\x010")),
    "pid location a number": tensor(storage(location=0)),
    "pid location None": tensor(storage(location=None)),
    "pid type unknown": tensor(storage(kind=name("torch", "MagicStorage"))),
    "pid type a text": tensor(storage(kind=text("FloatStorage"))),
    "pid type of user code": tensor(storage(kind=name("acme", "FloatStorage"))),
    "pid type a function": tensor(storage(kind=name("os", "system"))),
    "pid type dotted": tensor(storage(kind=name("torch", "storage.FloatStorage"))),
    "pid of the text opcode": tensor(b"P0\n"),
    "v2 of five": call("torch._utils._rebuild_tensor_v2", storage(), 0, (6,), (1,), False),
    "v2 of eight": call(
        "torch._utils._rebuild_tensor_v2", storage(), 0, (6,), (1,), False, HOOKS, None, None
    ),
    "v2 of none": call("torch._utils._rebuild_tensor_v2"),
    "v1 of three": call("torch._utils._rebuild_tensor", storage(), 0, (6,)),
    "v3 of six": call("torch._utils._rebuild_tensor_v3", storage(), 0, (6,), (1,), False, HOOKS),
    "v3 dtype unknown": v3(storage("0", 24, UNTYPED), 0, (6,), (1,), name("torch", "float99")),
    "v3 dtype of another module": v3(
        storage("0", 24, UNTYPED), 0, (6,), (1,), name("acme", "float32")
    ),
    "v3 dtype a text": v3(storage("0", 24, UNTYPED), 0, (6,), (1,), text("float32")),
    "arguments a list": name("torch._utils", "_rebuild_tensor_v2") + b"]R",
    "arguments None": name("torch._utils", "_rebuild_tensor_v2") + b"NR",
    "no storage": tensor(b"N"),
    "a tensor as the storage": tensor(tensor()),
    "requires_grad a text": tensor(grad="yes"),
    "requires_grad None": tensor(grad=None),
    "parameter of two": call("torch._utils._rebuild_parameter", tensor(), True),
    "parameter of nothing": call("torch._utils._rebuild_parameter", None, True, HOOKS),
    "quantized of six": call("torch._utils._rebuild_qtensor", storage(), 0, (6,), (1,), (), False),
    "sparse of one": call("torch._utils._rebuild_sparse_tensor", 1),
    "sparse of no tensors": call("torch._utils._rebuild_sparse_tensor", 1, (1, 2, (3,))),
    "subclass of three": call("torch._tensor._rebuild_from_type_v2", 1, 2, 3),
    "nested without a buffer": call("torch._utils._rebuild_nested_tensor", 1, 2, 3, 4),
    "device that is no text": call(
        "torch._utils._rebuild_xla_tensor", tensor(), name("torch", "float32"), 0, False
    ),
    "items into a tensor": tensor() + text("k") + b"K\x01s",
    "a list's items into a tensor": tensor() + b"K\x01a",
    "a dict filled as a list": b"}K\x01a",
    "a list filled as a dict": b"]K\x01K\x02s",
    "a number filled": b"K\x05K\x01a",
    "a tuple filled": b")K\x01a",
    "an odd dict": b"}(K\x01u",
    "storage view of two": tensor(storage("0", 6, FLOAT, "cpu", ("v", 0)), size=(1,), stride=(1,)),
}


@pytest.mark.parametrize("case", INVALID)
def test_what_no_torch_ever_wrote(case):
    assert slug_of(INVALID[case]) == "pickle-invalid"


STREAMS = {
    "empty": b"",
    "no STOP": b"\x80\x02N",
    "unknown opcode": b"\x80\x02\xff.",
    "PROTO 6": b"\x80\x06N.",
    "PROTO 255": b"\x80\xffN.",
    "PROTO twice": b"\x80\x02\x80\x02N.",
    "PROTO later": b"N0\x80\x02N.",
    "STOP alone": b"\x80\x02.",
    "open MARK": b"\x80\x02N(.",
    "MARK underflow": b"\x80\x02tt.",
    "memo never set": b"\x80\x02h\x05.",
    "BINBYTES8 of a terabyte": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
    "BINBYTES8 of 2**63": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 63) + b"x.",
    "BINUNICODE of 4 GiB": b"\x80\x02X\xff\xff\xff\xffx.",
    "LONG4 of 2 GiB": b"\x80\x02\x8b\xff\xff\xff\x7fx.",
    "LONG4 of -1": b"\x80\x02\x8b\xff\xff\xff\xffx.",
    "FRAME of 2**63": b"\x80\x04\x95" + struct.pack("<Q", 1 << 63) + b"N.",
    "FRAME too short": b"\x80\x04\x95" + struct.pack("<Q", 1) + b"K\x05.",
    "a million digits": b"I" + b"9" * 1_000_000 + b"\n.",
    "bad UTF-8": b"\x80\x02X\x01\x00\x00\x00\xff.",
    "name without an end": b"\x80\x02cos\nsystem",
    "NEXT_BUFFER": b"\x80\x05\x97.",
    "READONLY_BUFFER": b"\x80\x05N\x98.",
}


@pytest.mark.parametrize("case", STREAMS)
def test_broken_streams(case):
    start = time.monotonic()
    assert refusal(archive(STREAMS[case])).slug == "pickle-invalid"
    assert time.monotonic() - start < 1


HARMLESS = {
    "a memo number of 2**30": b"\x80\x02}r\xff\xff\xff\x3f.",
    "bytes after STOP": b"\x80\x02}." + b"os\nsystem",
    "a number of 100,000 bits": pickled(dictionary(("epoch", 1 << 100_000))),
    "two million MARKs and POPs": b"\x80\x02" + b"(1" * 200_000 + b"}.",
    "many DUPs": b"\x80\x02N" + b"20" * 100_000 + b"}.",
}


@pytest.mark.parametrize("case", HARMLESS)
def test_strange_streams_that_harm_nobody(case):
    read_bytes(archive(HARMLESS[case]))


def test_bytes_after_the_end_are_noted():
    notes = [n.slug for n in read_bytes(archive(b"\x80\x02}." + b"more")).notes]
    assert notes == ["bytes-after-stop"]


# -- storages ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("records", "body"),
    [
        ({}, tensor()),
        ({"1": SIX}, tensor()),
        ({"0": SIX[:-1]}, tensor()),
        ({"0": SIX + b"\0"}, tensor()),
        ({"0": b""}, tensor()),
        ({"0": SIX}, tensor(storage(count=7))),
        ({"0": SIX}, tensor(storage(count=5), size=(5,), stride=(1,))),
        ({"0": SIX}, tensor(storage(count=2**62))),
        ({"0": SIX}, tensor(storage("../version"))),
        ({"0": SIX}, tensor(storage("/etc/passwd"))),
        ({"0": SIX}, tensor(storage("00"))),
        ({"0": SIX}, tensor(storage(""))),
        ({"0": SIX}, tup(tensor(), tensor(storage(count=3), size=(1,), stride=(1,)))),
        ({"0": SIX}, storage("7")),
        ({"0": SIX}, tup(tensor(), storage("0", 25, UNTYPED))),
    ],
)
def test_a_storage_that_is_not_as_declared(records, body):
    assert slug_of(body, records=records) == "storage-size"


def test_one_storage_under_two_dtypes_is_read_as_the_first_and_noted():
    """As torch: whatever comes later is the storage that it has already, of the first type."""
    ints = name("torch", "IntStorage")
    body = dictionary(("f", tensor()), ("i", tensor(storage("0", 6, ints))))
    data = archive(pickled(body))
    checkpoint = read_bytes(data)
    assert [t.dtype.name for t in weights(checkpoint).tensors] == ["float32", "float32"]
    assert [n.slug for n in checkpoint.notes] == ["storage-two-dtypes"]
    theirs = torch.load(io.BytesIO(data))
    assert [t.dtype for t in theirs.values()] == [torch.float32, torch.float32]


def test_the_first_dtype_is_that_of_the_pickle_not_of_what_is_shown_first():
    """An optimizer's storage, met last by whoever looks for weights, comes first in the pickle."""
    half = storage("0", 12, name("torch", "HalfStorage"))
    body = tup(tup(half, 1), tensor(), dictionary(("w", tensor())))
    data = archive(pickled(body))
    checkpoint = read_bytes(data)
    assert {t.dtype.name for t in checkpoint.tensors} == {"float16"}
    assert checkpoint.storages[0].count == 12
    assert torch.load(io.BytesIO(data))[1].dtype is torch.float16


def test_a_number_as_the_key_of_a_storage_is_that_text():
    checkpoint = read_bytes(archive(pickled(dictionary(("w", tensor(storage(0)))))))
    assert weights(checkpoint).tensors[0].storage.key == "0"


@pytest.mark.parametrize(
    "tag", ["cuda:9999999999", "cuda", "cuda0", "\x1b[2J", "", "meta", "x" * 5000]
)
def test_any_text_is_a_location(tag):
    checkpoint = read_bytes(archive(pickled(dictionary(("w", tensor(storage(location=tag)))))))
    assert weights(checkpoint).tensors[0].device == tag


# -- the archive -------------------------------------------------------------------------------
GOOD = pickled(dictionary(("w", tensor())))


@pytest.mark.parametrize("order", [b"LITTLE", b"", b"middle", b"little\n", b"\x1b[2J", b"big\0"])
def test_byteorder_is_little_or_big(order):
    assert refusal(archive(GOOD, byteorder=order)).slug == "header-invalid"


@pytest.mark.parametrize(
    "version", [b"0\n", b"11\n", b"", b"three", b"-1", b"1e9", b"\xff", None, "٣".encode()]
)
def test_version_is_1_to_10(version):
    assert refusal(archive(GOOD, version=version)).slug == "header-invalid"


@pytest.mark.parametrize("version", [b"1", b"3\n", b"10\n"])
def test_versions_that_torch_reads(version):
    read_bytes(archive(GOOD, version=version))
    read_bytes(archive(GOOD, version=None, **{".data/version": version}))


@pytest.mark.parametrize("marker", [".format_version", ".storage_alignment"])
def test_other_markers_may_say_anything(marker):
    data = archive(GOOD, **{marker: b"\x1b garbage"})
    assert weights(read_bytes(data)).tensors[0].shape == (2, 3)


def test_a_zip_of_something_else():
    error = refusal(archive(None, {}))
    assert (error.slug, bool(error.hint)) == ("not-a-checkpoint", True)
    deeper = archive(None, {}, **{"inner/data.pkl": GOOD, "inner/data/0": SIX})
    error = refusal(deeper)
    assert error.slug == "not-a-checkpoint"
    assert "archive/inner" in error.text


def test_a_cut_zip_says_which_tensors_are_whole():
    data = saved({f"w{i}": torch.ones(100) for i in range(9)})
    error = refusal(data[: len(data) // 2])
    assert error.slug == "truncated"
    assert "of 9 tensors are whole" in error.text
    assert 0 < len(error.findings) < 9


# -- legacy ------------------------------------------------------------------------------------
BODY = dictionary(("w", tensor()))


def count(n):
    return struct.pack("<q", n)


TWO = dictionary(("a", tensor()), ("b", tensor(storage("1"))))
LEGACY = {
    "count less": ({"data": count(5) + SIX}, "storage-size"),
    "count more": ({"data": count(7) + SIX}, "storage-size"),
    "count negative": ({"data": count(-6) + SIX}, "storage-size"),
    "count huge": ({"data": count(2**62) + SIX}, "storage-size"),
    "count huge in both": (
        {
            "main": pickled(dictionary(("w", tensor(storage(count=2**60))))),
            "data": count(2**60) + SIX,
        },
        "truncated",
    ),
    "cut in the data": ({"data": count(6) + SIX[:-1]}, "truncated"),
    "cut in the count": ({"data": b"\6\0"}, "truncated"),
    "no data": ({"data": b""}, "truncated"),
    "no keys": ({"keys": ()}, "storage-size"),
    "key of no storage": ({"keys": ("0", "1")}, "storage-size"),
    "key missing": ({"main": pickled(TWO)}, "storage-size"),
    "key twice": ({"keys": ("0", "0")}, "header-invalid"),
    "keys a text": ({"keys": pickled("0")}, "header-invalid"),
    "keys numbers": ({"keys": pickled([0])}, "header-invalid"),
    "keys a dict": ({"keys": pickled(dictionary(("0", 1)))}, "storage-size"),
    "cut in the keys": ({"keys": b"\x80\x02]", "data": b""}, "truncated"),
    "version": ({"version": pickled(1002)}, "header-invalid"),
    "tensor outside": ({"main": pickled(dictionary(("w", tensor(offset=1))))}, "tensor-bounds"),
    "view outside": (
        {"main": pickled(dictionary(("w", tensor(storage("0", 6, FLOAT, "cpu", ("v", 4, 3))))))},
        "tensor-bounds",
    ),
    "two sizes": (
        {"main": pickled(tup(tensor(), tensor(storage(count=3), size=(1,), stride=(1,))))},
        "storage-size",
    ),
    "pid of a wrong shape": (
        {"main": pickled(tup("storage") + b"Q"), "keys": (), "data": b""},
        "pickle-invalid",
    ),
}


@pytest.mark.parametrize("case", LEGACY)
def test_lies_of_a_legacy_stream(case):
    parts, slug = LEGACY[case]
    assert refusal(legacy(parts.pop("main", None) or pickled(BODY), **parts)).slug == slug


def test_a_legacy_file_made_by_hand_is_read_and_its_tail_noted():
    one = read_bytes(legacy(pickled(BODY)))
    assert (one.format, weights(one).tensors[0].shape) == ("torch-legacy", (2, 3))
    more = read_bytes(legacy(pickled(BODY), data=count(6) + SIX + b"tail"))
    assert "trailing-bytes" in [n.slug for n in more.notes]


def test_a_legacy_view_shifts_the_tensor():
    shifted = tensor(storage("0", 6, FLOAT, "cpu", ("v", 2, 4)), offset=1, size=(3,), stride=(1,))
    (one,) = read_bytes(legacy(pickled(dictionary(("w", shifted))))).tensors
    assert one.offset == 3


# -- tar ---------------------------------------------------------------------------------------
def tar_parts(**changes):
    floats = b"ctorch\nFloatStorage\n"
    kind = b"ctorch\nFloatTensor\n"
    row = {
        "n": 1,
        "storage": pickled(tup(7, "cpu", floats)),
        "count": 6,
        "data": SIX,
        "views": pickled([(8, 7, 1, 5)]),
        "tensors": 1,
        "tensor": pickled(tup(100, 8, kind)),
        "rank": 1,
        "size": 5,
        "stride": 1,
        "offset": 0,
        "pickle": pickled(dictionary(("w", text("100") + b"Q"))),
    } | changes
    return {
        "sys_info": pickled(b"}"),
        "pickle": row["pickle"],
        "tensors": pickled(row["tensors"])
        + row["tensor"]
        + struct.pack("<i4x", row["rank"])
        + struct.pack("<3q", row["size"], row["stride"], row["offset"]),
        "storages": pickled(row["n"])
        + row["storage"]
        + count(row["count"])
        + row["data"]
        + row["views"],
    }


TAR = {
    "offset": ({"offset": 1}, "tensor-bounds"),
    "size": ({"size": 6}, "tensor-bounds"),
    "size negative": ({"size": -1}, "tensor-bounds"),
    "stride negative": ({"stride": -1}, "tensor-bounds"),
    "rank": ({"rank": 65}, "limit-rank"),
    "rank negative": ({"rank": -1}, "limit-rank"),
    "count": ({"count": 2**60}, "truncated"),
    "count negative": ({"count": -1}, "tensor-bounds"),
    "more storages": ({"n": 2, "views": b""}, "truncated"),
    "storages a text": ({"n": "1"}, "tensor-bounds"),
    "storage a text": ({"storage": pickled("x")}, "pickle-invalid"),
    "storage of an unknown type": (
        {"storage": pickled(tup(7, "cpu", name("torch", "XStorage")))},
        "pickle-invalid",
    ),
    "view of nothing": ({"views": pickled([(8, 9, 1, 5)])}, "pickle-invalid"),
    "view outside": ({"views": pickled([(8, 7, 2, 5)])}, "header-invalid"),
    "view of three": ({"views": pickled([(8, 7, 2)])}, "pickle-invalid"),
    "tensor of an unknown storage": (
        {"tensor": pickled(tup(100, 9, b"ctorch\nFloatTensor\n"))},
        "pickle-invalid",
    ),
    "tensor of two": ({"tensor": pickled(tup(100, 8))}, "pickle-invalid"),
    "more tensors": ({"tensors": 2}, "truncated"),
    "id of nothing": (
        {"pickle": pickled(dictionary(("w", text("101") + b"Q")))},
        "pickle-invalid",
    ),
    "id a list": ({"pickle": pickled(dictionary(("w", b"]Q")))}, "pickle-invalid"),
}


@pytest.mark.parametrize("case", TAR)
def test_lies_of_a_tar(case):
    changes, slug = TAR[case]
    assert refusal(tar(tar_parts(**changes))).slug == slug


def test_the_honest_tar_is_read():
    checkpoint = read_bytes(tar(tar_parts()))
    (one,) = weights(checkpoint).tensors
    assert (checkpoint.format, one.shape, one.offset) == ("torch-tar", (5,), 1)


@pytest.mark.parametrize("member", ["storages", "tensors", "pickle"])
def test_a_link_in_a_tar(member):
    """CVE-2025-32434's road: nothing is followed, nothing extracted."""
    parts = tar_parts() | {member: b"/etc/passwd"}
    assert refusal(tar(parts, links=(member,))).slug == "header-invalid"


def test_other_tars_say_what_is_inside():
    error = refusal(tar({"model.pth": b"x"}))
    assert error.slug == "not-a-checkpoint"
    assert "model.pth" in error.text


def test_a_cut_tar_and_a_member_twice():
    data = tar(tar_parts())
    assert refusal(data[:1600]).slug in ("truncated", "not-a-checkpoint")
    first = tar({"pickle": b"x"})[:1024]
    assert refusal(first + data).slug == "header-invalid"


def test_the_alpha_of_2016_without_locations():
    floats = b"ctorch\nFloatStorage\n"
    parts = tar_parts(
        storage=pickled(tup(7, floats)),
        views=b"",
        tensor=pickled(tup(100, b"ctorch\nFloatTensor\n", 7)),
    )
    (one,) = weights(read_bytes(tar(parts))).tensors
    assert (one.device, one.shape) == ("cpu", (5,))


# -- bare pickles ------------------------------------------------------------------------------
def test_a_data_pkl_without_its_archive():
    assert refusal(GOOD, "data.pkl").slug == "pickle-invalid"


def test_a_bare_pickle_has_a_size():
    data = pickle.dumps({"w": 1, "x": b"0" * 1000})
    assert refusal(data, limits=Limits(pickle_bytes=500)).slug == "limit-pickle-bytes"


def test_a_broken_stream_inside_a_bare_pickle():
    data = pickle.dumps({"w": torch.ones(3)}, 4)
    for at in range(data.index(MAGIC), len(data) - 1, 7):
        broken = data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
        tried(broken, "x.pkl")


# -- safetensors -------------------------------------------------------------------------------
F = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
SAFE = {
    "length past the end": (struct.pack("<Q", 999) + b"{}", "truncated"),
    "length 2**63": (struct.pack("<Q", 2**63) + b"{}", "limit-header-bytes"),
    "length over 100 MB": (struct.pack("<Q", 100_000_001) + b"{}", "limit-header-bytes"),
    "length 0": (struct.pack("<Q", 0) + b"{}", "truncated"),
    "length 1": (struct.pack("<Q", 1) + b"{}", "truncated"),
    "not JSON": (safetensors(b"{nope}  "), "header-invalid"),
    "not UTF-8": (safetensors(b'{"\xff": 1}'), "header-invalid"),
    "NUL padding": (safetensors(b"{}\0\0\0\0\0\0"), "header-invalid"),
    "deep": (safetensors(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "header-invalid"),
    "100,000 digits": (safetensors(b'{"a":' + b"9" * 100_000 + b"}"), "header-invalid"),
    "a name twice": (
        safetensors(
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}}',
            b"1234",
        ),
        "header-invalid",
    ),
    "a field twice": (
        safetensors(
            b'{"a":{"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}}', b"1234"
        ),
        "header-invalid",
    ),
    "__metadata__ twice": (safetensors(b'{"__metadata__":{},"__metadata__":{}}'), "header-invalid"),
    "metadata of numbers": (safetensors({"__metadata__": {"a": 1}}), "header-invalid"),
    "metadata a list": (safetensors({"__metadata__": []}), "header-invalid"),
    "overlap": (safetensors({"a": F, "b": F}, b"1234"), "header-invalid"),
    "hole": (
        safetensors({"a": F, "b": {**F, "data_offsets": [5, 9]}}, b"123456789"),
        "header-invalid",
    ),
    "hole at the start": (
        safetensors({"a": {**F, "data_offsets": [1, 5]}}, b"12345"),
        "header-invalid",
    ),
    "trailing": (safetensors({"a": F}, b"12345"), "header-invalid"),
    "cut": (safetensors({"a": F}, b"123"), "truncated"),
    "size": (safetensors({"a": {**F, "shape": [2]}}, b"1234"), "header-invalid"),
    "end before start": (
        safetensors({"a": {**F, "data_offsets": [4, 0]}}, b"1234"),
        "header-invalid",
    ),
    "negative": (safetensors({"a": {**F, "shape": [-1]}}, b"1234"), "header-invalid"),
    "negative twice": (safetensors({"a": {**F, "shape": [-1, -1]}}, b"1234"), "header-invalid"),
    "overflow": (safetensors({"a": {**F, "shape": [2**62, 2**62]}}, b"1234"), "header-invalid"),
    "a float": (safetensors({"a": {**F, "shape": [1.0]}}, b"1234"), "header-invalid"),
    "a bool": (safetensors({"a": {**F, "shape": [True]}}, b"1234"), "header-invalid"),
    "a text": (safetensors({"a": {**F, "shape": ["1"]}}, b"1234"), "header-invalid"),
    "NaN": (
        safetensors(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', b"1234"),
        "header-invalid",
    ),
    "dtype unknown": (safetensors({"a": {**F, "dtype": "F99"}}, b"1234"), "header-invalid"),
    "dtype a number": (safetensors({"a": {**F, "dtype": 1}}, b"1234"), "header-invalid"),
    "field missing": (
        safetensors({"a": {"dtype": "F32", "shape": [1]}}, b"1234"),
        "header-invalid",
    ),
    "rank": (safetensors({"a": {**F, "shape": [1] * 65}}, b"1234"), "limit-rank"),
    "odd four bits": (
        safetensors({"a": {"dtype": "F4", "shape": [2, 1], "data_offsets": [0, 1]}}, b"1"),
        "header-invalid",
    ),
    "half a surrogate": (
        safetensors(b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"1234"),
        "header-invalid",
    ),
}


@pytest.mark.parametrize("case", SAFE)
def test_lies_of_a_safetensors_header(case):
    data, slug = SAFE[case]
    start = time.monotonic()
    assert refusal(data, "model.safetensors").slug == slug
    assert time.monotonic() - start < 1


def test_an_unknown_field_is_noted():
    checkpoint = read_bytes(safetensors({"a": {**F, "extra": 1}}, b"1234"), "a.safetensors")
    assert [n.slug for n in checkpoint.notes] == ["header-extra-field"]


def test_leading_spaces_are_no_safetensors():
    assert refusal(safetensors(b"  {}    "), "a.safetensors").slug == "not-a-checkpoint"
