"""Keys that read alike, arrays and flags spelled oddly: two things are never taken for one."""

import datetime
import pathlib

import numpy as np
import pytest
import torch
from formats_support import archive, call, dictionary, name, pickled, tensor, tup

import ckptool
from ckptool.errors import UsageError

A, B = torch.arange(4.0), torch.arange(4.0) + 1
P = pathlib.PurePosixPath


def write(path, value):
    torch.save(value, path)
    return str(path)


KEYS = {
    "object": ({P("a"): A, P("b"): A}, {P("a"): B, P("b"): A}),
    "object-value": ({P("a"): 1, P("b"): 2}, {P("a"): 9, P("b"): 2}),
    "path": ({P("a"): 1}, {P("b"): 1}),
    "date": ({datetime.date(2020, 1, 1): 1}, {datetime.date(2020, 1, 2): 1}),
    "class": ({int: 1}, {float: 1}),
    "dtype": ({torch.float32: 1, torch.float16: 2}, {torch.float32: 3, torch.float16: 2}),
    "scalar": ({np.int64(1): 1}, {np.int64(2): 1}),
    "tuple-in-tuple": ({(1, (2,)): A, (1, (3,)): A}, {(1, (2,)): B, (1, (3,)): A}),
    "long-tuple": ({tuple(range(12)): 1}, {(*range(11), 99): 1}),
    "float-text": ({1.5: 1, "1.5": 2}, {1.5: 9, "1.5": 2}),
    "float-or-text": ({1.5: A}, {"1.5": A}),
    "float-text-tensors": ({1.5: A, "1.5": A}, {1.5: B, "1.5": A}),
    "none": ({None: 1}, {"None": 1}),
    "true": ({True: 1, "True": 2}, {True: 3, "True": 2}),
    "bytes": ({b"a": 1, "b'a'": 2}, {b"a": 3, "b'a'": 2}),
    "huge": ({1 << 5000: A, (1 << 5000) + 1: B}, {1 << 5000: B, (1 << 5000) + 1: B}),
    "tensor": ({A: 1}, {B: 1}),
    "inside": ({P("a"): {"<key>": 1}}, {P("b"): {"<key>": 1}}),
}


@pytest.mark.parametrize("label", KEYS)
@pytest.mark.parametrize("top", [True, False])
def test_dicts_that_differ_in_such_keys_are_not_the_same(tmp_path, label, top):
    one, two = ({**value, "w": A} if top else {"sd": {"w": A}, "x": value} for value in KEYS[label])
    a, b = write(tmp_path / "a.pth", one), write(tmp_path / "b.pth", two)
    for options in ({}, {"values": True}, {"strict": True, "bytes": True}):
        assert not ckptool.diff(a, b, **options).same
        assert ckptool.diff(a, a, **options).same


def test_two_state_dicts_whose_keys_read_alike_are_two(tmp_path):
    file = write(tmp_path / "a.pth", {1.5: {"w": A, "b": A}, "1.5": {"w": B, "b": B}})
    report = ckptool.inspect(file).to_dict()
    assert [table["path"] for table in report["tables"]] == [["1.5"], ["1.5 (2)"]]
    for number, (at, want) in enumerate((("1.5", A), ("1.5 (2)", B))):
        out = tmp_path / f"{number}.pth"
        ckptool.convert(file, str(out), select=at)
        assert torch.equal(torch.load(out)["w"], want)


@pytest.mark.parametrize("keys", [(1, "1"), ("a.b", ("a", "b"))])
def test_a_name_of_two_state_dicts_is_no_choice(tmp_path, keys):
    first, second = keys
    value = {first: {"w": A, "b": A}}
    inner = {"w": B, "b": B}
    value |= {second[0]: {second[1]: inner}} if isinstance(second, tuple) else {second: inner}
    file = write(tmp_path / "a.pth", value)
    for options in ({"select": str(first)}, {"at": str(first)}):
        with pytest.raises(UsageError, match="there are 2 state_dicts"):
            ckptool.convert(file, str(tmp_path / "o.pth"), **options)
    with pytest.raises(UsageError, match="there are 2 state_dicts"):
        ckptool.diff(file, file, at=str(first))


def array(fortran):
    dtype = call("numpy.dtype", "f4", False, True) + tup(3, "<", None, None, None, -1, -1, 0) + b"b"
    made = call("numpy.core.multiarray._reconstruct", name("numpy", "ndarray"), (0,), b"C\x01b")
    data = np.arange(6, dtype="<f4").tobytes()
    return made + tup(1, (2, 3), dtype, fortran, b"C\x18" + data) + b"b"


@pytest.mark.parametrize("fortran", [True, False, 0, 1, 2])
def test_the_order_of_an_array_is_a_number_to_numpy(tmp_path, fortran):
    file = tmp_path / "a.pth"
    file.write_bytes(
        archive(pickled(dictionary(("w", tensor()), ("x", array(fortran))), protocol=3))
    )
    want = torch.load(file, weights_only=False)["x"]
    assert ckptool.load(str(file))["x"].tolist() == want.tolist()
    bare = tmp_path / "b.pkl"
    bare.write_bytes(pickled(dictionary(("x", array(fortran))), protocol=3))
    with ckptool.open(str(bare)) as found:
        assert found.weights["x"].numpy().tolist() == want.tolist()


def test_conjugated_and_negated_at_once(tmp_path):
    one = torch.tensor([complex(1, 2), complex(3, -4)])
    both = torch._neg_view(one.conj())
    a = write(tmp_path / "a.pth", {"w": both})
    same = write(tmp_path / "b.pth", {"w": both.resolve_conj().resolve_neg()})
    for other in (one.conj(), torch._neg_view(one)):
        b = write(tmp_path / "c.pth", {"w": other})
        assert not ckptool.diff(a, b).same
        assert not ckptool.diff(a, b, values=True).same
    assert ckptool.diff(a, same, values=True).same
    with ckptool.open(a) as found:
        assert found.weights["w"].numpy().tolist() == both.tolist()
    assert "-2-1j" in str(ckptool.stats(a))


@pytest.mark.parametrize("cls", [torch.nn.Parameter, torch.nn.Buffer])
def test_a_parameter_by_its_class_is_one(tmp_path, cls):
    file = tmp_path / "a.pth"
    module, _, called = f"torch.nn.parameter.{cls.__name__}".rpartition(".")
    parts = tensor()[len(name("torch._utils", "_rebuild_tensor_v2")) : -1]
    made = call("torch._tensor._rebuild_from_type_v2", name("torch._utils", "_rebuild_tensor_v2"),
                name(module, called), parts, None)  # fmt: skip
    file.write_bytes(archive(pickled(dictionary(("w", made)))))
    want, got = torch.load(file, weights_only=False)["w"], ckptool.load(str(file))["w"]
    assert type(got) is type(want)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("line", "want"), [(b"S'a\\x41'\n", "aA"), (b'S"b"\n', "b"), (b"S'a'b'\n", "a'b")]
)
def test_texts_of_protocol_0_become_legacy(tmp_path, line, want):
    file, out = tmp_path / "a.pth", tmp_path / "o.pth"
    file.write_bytes(archive(pickled(dictionary((line, tensor()), ("x", line)))))
    assert list(torch.load(file, weights_only=False)) == [want, "x"]
    ckptool.convert(str(file), str(out), to="legacy")
    found = torch.load(out, weights_only=False)
    assert (list(found), found["x"]) == ([want, "x"], want)


def test_an_ellipsis_is_data(tmp_path):
    file = write(tmp_path / "a.pth", {"w": A, "x": (..., NotImplemented)})
    assert not ckptool.inspect(file).could_run_code
    assert ckptool.load(file)["x"] == (..., NotImplemented)


@pytest.mark.parametrize(
    ("line", "want"), [(b"I-1\n", -1), (b"I01\n", True), (b"I10\n", 10), (b"I1\n", 1)]
)
def test_numbers_of_protocol_0(tmp_path, line, want):
    file = tmp_path / "a.pth"
    file.write_bytes(archive(pickled(dictionary(("w", tensor()), ("x", line)))))
    for found in (torch.load(file, weights_only=False), ckptool.load(str(file))):
        assert (type(found["x"]), found["x"]) == (type(want), want)
