"""What stands beside the weights, and tensors that are more than their elements."""

from __future__ import annotations

import argparse
import io
import pathlib
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
from diff_support import diff, write_legacy, write_shards, write_zip
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import ckptool

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.quantize", "ignore:Sparse", "ignore:The PyTorch API of nested",
    "ignore:TypedStorage is deprecated",
)  # fmt: skip
W = {"fc.weight": torch.arange(6.0).view(2, 3)}


def changes(tmp_path, one, two, writer=write_zip, **options):
    """[(dotted place, value in a, value in b)] of two values beside one state_dict."""
    a = writer(tmp_path / "a", {"state_dict": W, "it": one})
    b = writer(tmp_path / "b", {"state_dict": W, "it": two})
    found = diff(a, b, **options)
    assert found.same_tensors is not any(isinstance(v, torch.Tensor) for v in (one, two))
    rows = [
        (".".join(map(str, row.path)), *(None if e is None else e.value for e in (row.a, row.b)))
        for row in found.extras
    ]
    assert found.same is not (rows or not found.same_tensors)
    return rows


# -- plain values ------------------------------------------------------------------------------
@pytest.mark.parametrize("writer", [write_zip, write_legacy])
@pytest.mark.parametrize(
    ("one", "two", "rows"),
    [
        (7, 9, [("it", 7, 9)]),
        (0.1, 0.1, []),
        (float("nan"), float("nan"), []),
        (1, 1.0, [("it", 1, 1.0)]),
        (1, True, [("it", 1, True)]),
        (None, 0, [("it", None, 0)]),
        ("adam", "sgd", [("it", "adam", "sgd")]),
        (10**30, 10**30 + 1, [("it", 10**30, 10**30 + 1)]),
        ({"lr": 0.1, "x": 1}, {"lr": 0.2, "x": 1}, [("it.lr", 0.1, 0.2)]),
        ({"lr": 0.1}, {"lr": 0.1, "new": [1, 2]}, [("it.new.0", None, 1), ("it.new.1", None, 2)]),
        ({"a": {}}, {}, [("it.a", None, None)]),
        ([1, 2, 3], [1, 5, 3], [("it.1", 2, 5)]),
        ((1, 2), [1, 2], [("it", None, None)]),
        ({1, 2, 3}, {3, 2, 1}, []),
        ({1, 2}, {1, 4}, [("it", ("1", "2"), ("1", "4"))]),
        (b"abc", b"abd", [("it", b"abc", b"abd")]),
        (OrderedDict(a=1), {"a": 1}, []),
        (torch.device("cuda:0"), torch.device("cpu"), [("it", "cuda:0", "cpu")]),
        (torch.float32, torch.float16, [("it", "torch.float32", "torch.float16")]),
        (torch.Size([1, 2]), torch.Size([1, 3]), [("it.1", 2, 3)]),
        (np.float64(0.5), np.float64(0.25), [("it", 0.5, 0.25)]),
        (np.float64(0.5), 0.5, []),
        (pathlib.PurePosixPath("a/b"), pathlib.PurePosixPath("a/c"), [("it", "a/b", "a/c")]),
        ([0] * 5000 + [1], [0] * 5000 + [2], [("it.5000", 1, 2)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_values(one, two, rows, writer, tmp_path):
    assert changes(tmp_path, one, two, writer) == rows


def test_attributes_of_objects(tmp_path):
    one, two = argparse.Namespace(lr=0.1, gpu=0), argparse.Namespace(lr=0.2, gpu=0)
    assert changes(tmp_path, one, two) == [("it.lr", 0.1, 0.2)]
    assert changes(tmp_path, one, {"lr": 0.1, "gpu": 0}) == [("it", None, None)]


def test_arrays_by_every_byte(tmp_path):
    one = np.arange(6, dtype="f4")
    two = one.copy()
    two[5] = 9
    assert changes(tmp_path, one, one.copy()) == []
    assert [row[0] for row in changes(tmp_path, one, two)] == ["it"]
    assert [row[0] for row in changes(tmp_path, one, one.reshape(2, 3))] == ["it"]
    assert [row[0] for row in changes(tmp_path, np.array(["a", "b"]), np.array(["a", "c"]))]


def test_a_value_that_became_a_tensor(tmp_path):
    a = write_zip(tmp_path / "a", {"state_dict": W, "best": 0.5})
    b = write_zip(tmp_path / "b", {"state_dict": W, "best": torch.tensor(0.5)})
    found = diff(a, b)
    assert [row.key for row in found.added] == ["best"]
    assert [(row.path, row.b) for row in found.extras] == [(("best",), None)]


def test_an_object_that_holds_itself_ends(tmp_path):
    loop = {"a": 1}
    loop["me"] = loop
    assert changes(tmp_path, loop, loop) == []
    assert changes(tmp_path, loop, {"a": 1, "me": {}}) == [("it.me", None, None)]


def test_one_object_at_two_places_is_two_values(tmp_path):
    shared = {"lr": 1}
    assert changes(tmp_path, [shared, shared], [{"lr": 1}, {"lr": 1}]) == []
    assert changes(tmp_path, [shared, shared], [{"lr": 1}, {"lr": 2}]) == [("it.1.lr", 1, 2)]
    tensors = {"m": torch.ones(2)}
    a = write_zip(tmp_path / "c", {"state_dict": W, "it": [tensors, tensors]})
    b = write_zip(tmp_path / "d", {"state_dict": W, "it": [tensors, {"m": torch.zeros(2)}]})
    assert diff(a, a).same
    assert {row.key: row.what for row in diff(a, b).changed} == {"it.1.m": ("tie", "value")}


def test_values_inside_a_state_dict_follow_its_names(tmp_path):
    extra = {"fc._extra_state": {"scale": 2}, **W}
    wrapped = {"module." + key: value for key, value in extra.items()}
    a = write_zip(tmp_path / "a", {"model": extra})
    assert diff(a, write_zip(tmp_path / "b", wrapped)).same
    wrapped["module.fc._extra_state"] = {"scale": 3}
    found = diff(a, write_zip(tmp_path / "c", wrapped))
    assert [(row.path, row.a.value, row.b.value) for row in found.extras] == [
        (("fc._extra_state", "scale"), 2, 3)
    ]


def test_drop_leaves_out_entries_too(tmp_path):
    a = write_zip(
        tmp_path / "a", {"state_dict": W, "optimizer": {"lr": 1, "m": torch.ones(1)}, "epoch": 1}
    )
    b = write_zip(tmp_path / "b", {"state_dict": W, "epoch": 2})
    assert diff(a, b, drop=["optimizer", "epoch"]).same
    assert {row.path for row in diff(a, b, drop="optimizer").extras} == {("epoch",)}


SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(width=16) | st.sampled_from("ab")
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["x", "y", 1]), inner, max_size=3)
    | st.lists(inner, max_size=2).map(tuple),
    max_leaves=6,
)  # fmt: skip


def alike(one, two):
    """Equal as Python has it, but 1, 1.0 and True are three, and NaN is NaN."""
    if type(one) is not type(two):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(alike, one, two))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(alike(one[key], two[key]) for key in one)
    return one == two or (one != one and two != two)


@settings(max_examples=150, deadline=None)
@given(VALUES, VALUES, st.booleans())
def test_any_two_values_are_the_same_when_python_says_so(one, two, twice):
    two = pickle.loads(pickle.dumps(one)) if twice else two
    files = [io.BytesIO(), io.BytesIO()]
    for file, value in zip(files, (one, two), strict=True):
        torch.save({"state_dict": W, "it": value}, file)
    found = diff(*files)
    assert found.same is alike(one, two)
    assert (found.extras == ()) is found.same


# -- optimizers --------------------------------------------------------------------------------
def run(steps, prefix=""):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.Adam(net.named_parameters(), lr=0.1 / (1 + steps))
    for _ in range(steps):
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    state = optimizer.state_dict()
    sd = OrderedDict((prefix + key, value) for key, value in net.state_dict().items())
    for group in state["param_groups"]:
        group["param_names"] = [prefix + name for name in group["param_names"]]
    return {"model": sd, "optimizer": state, "epoch": steps}


def test_optimizer_state_is_compared_by_place(tmp_path):
    a, b = write_zip(tmp_path / "a", run(1)), write_zip(tmp_path / "b", run(2, "module."))
    found = diff(a, b)
    keys = {row.key for row in found.changed}
    assert {"optimizer.state.0.exp_avg", "optimizer.state.3.step", "0.weight"} <= keys
    assert {row.path for row in found.extras} == {
        ("optimizer", "param_groups", 0, "lr"),
        ("epoch",),
    }
    assert diff(a, write_zip(tmp_path / "c", run(1, "module."))).same


def test_state_by_name_follows_the_keys(tmp_path):
    def obj(prefix):
        names = [f"{prefix}fc.weight"]
        return {
            "model": {names[0]: torch.ones(2)},
            "optim": {
                "state": {names[0]: {"step": torch.tensor(3.0)}},
                "param_groups": [{"params": [0]}],
            },
            "best_key": names[0],
        }

    a, b = write_zip(tmp_path / "a", obj("")), write_zip(tmp_path / "b", obj("module."))
    found = diff(a, b)
    assert found.same_tensors
    assert [row.path for row in found.extras] == [("best_key",)]  # a user's text is a text


# -- layer versions ----------------------------------------------------------------------------
def test_versions_of_layers(tmp_path):
    def sd(version, prefix=""):
        found = nn.Sequential(nn.BatchNorm1d(2)).state_dict(prefix=prefix)
        found._metadata[f"{prefix}0"]["version"] = version
        return found

    a = write_zip(tmp_path / "a", sd(2))
    assert diff(a, write_zip(tmp_path / "b", sd(2, "module."))).same
    found = diff(a, write_zip(tmp_path / "c", sd(1)))
    assert [(row.path, row.a.value, row.b.value) for row in found.extras] == [
        (("_metadata", "0", "version"), 2, 1)
    ]
    plain = write_zip(tmp_path / "d", dict(sd(2)))
    found = diff(a, plain)
    assert found.same
    assert [note.slug for note in found.notes] == ["no-metadata"]


# -- texts of .safetensors ---------------------------------------------------------------------
def test_metadata_of_safetensors(tmp_path):
    for name, metadata in (
        ("a", {"format": "pt", "author": "me"}),
        ("b", {"author": "me"}),
        ("c", {"author": "you"}),
    ):
        save_file(W, tmp_path / f"{name}.safetensors", metadata)
    a, b, c = (tmp_path / f"{name}.safetensors" for name in "abc")
    assert diff(a, b).same
    assert [(row.path, row.a.value, row.b.value) for row in diff(a, c).extras] == [
        (("__metadata__", "author"), "me", "you")
    ]
    ckptool.convert(a, tmp_path / "d.pth", fsync=False)
    assert diff(a, tmp_path / "d.pth").same
    assert write_shards(tmp_path / "e", W)
    assert diff(b, tmp_path / "e_shards", drop="__metadata__").same


# -- compound tensors --------------------------------------------------------------------------
def compound():
    """{name: (one tensor, another that differs in something beside a dense element)}"""
    numbers = torch.tensor([[0.0, 1.5], [2.0, 0.0]])
    quantized = [
        torch.quantize_per_tensor(numbers, scale, 0, torch.quint8) for scale in (0.5, 0.25)
    ]
    codes = quantized[0].int_repr()
    quantized[1] = torch._make_per_tensor_quantized_tensor(codes, 0.25, 0)
    channels = [
        torch._make_per_channel_quantized_tensor(
            codes, torch.tensor(s), torch.zeros(2, dtype=torch.long), 0
        )
        for s in ([0.5, 0.5], [0.5, 1.0])
    ]
    sparse = numbers.to_sparse()
    moved = torch.sparse_coo_tensor(sparse.indices().flip(0), sparse.values(), (2, 2))
    other = torch.sparse_coo_tensor(sparse.indices(), sparse.values() + 1, (2, 2)).coalesce()
    csr = numbers.to_sparse_csr()
    conjugated = torch.tensor([complex(1, 2)])
    tagged = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    tagged[0].parallel, tagged[1].parallel = 1, 2
    nested = [torch.nested.nested_tensor([torch.ones(2), torch.ones(n)]) for n in (3, 4)]
    return {
        "per_tensor": quantized,
        "per_channel": channels,
        "coo_places": (sparse, moved),
        "coo_values": (sparse, other),
        "csr": (csr, (numbers * 2).to_sparse_csr()),
        "conj": (conjugated.conj(), conjugated),
        "attribute": tagged,
        "nested": nested,
    }


COMPOUND = (
    "per_tensor",
    "per_channel",
    "coo_places",
    "coo_values",
    "csr",
    "conj",
    "attribute",
    "nested",
)


@pytest.mark.parametrize("name", COMPOUND)
def test_compound_tensors(name, tmp_path):
    assert set(COMPOUND) == compound().keys()
    one, two = compound()[name]
    a, b = write_zip(tmp_path / "a", {"x": one, **W}), write_zip(tmp_path / "b", {"x": two, **W})
    for options in ({}, {"bytes": True}, {"values": True}):
        assert diff(a, a, **options).same
        assert diff(a, write_zip(tmp_path / "c", {"x": compound()[name][0], **W}), **options).same
        found = diff(a, b, **options)
        assert [row.key for row in found.changed] == ["x"]
    what = {"attribute": ("attributes",)}.get(name, ("value",))
    assert found.changed[0].what == what


def test_conjugated_and_negated_numbers_are_what_torch_shows(tmp_path):
    one = torch.tensor([complex(1, 2), complex(3, -4)])
    a = write_zip(tmp_path / "a", {"x": one.conj(), "y": one.clone().conj().imag})
    b = write_zip(
        tmp_path / "b", {"x": one.conj().resolve_conj(), "y": one.conj().imag.resolve_neg()}
    )
    for options in ({}, {"values": True, "bytes": True}):
        found = diff(a, b, **options)
        assert [row.key for row in found.changed] == []


def test_meta_tensors_have_no_numbers(tmp_path):
    a = write_zip(tmp_path / "a", {"x": torch.ones(2, device="meta"), **W})
    b = write_zip(tmp_path / "b", {"x": torch.ones(2), **W})
    assert diff(a, a).same
    found = diff(a, b)
    assert [(row.key, row.what, row.verdict.text) for row in found.changed] == [
        ("x", ("value",), "the numbers are not in a")
    ]
    assert diff(a, write_zip(tmp_path / "c", {"x": torch.ones(3, device="meta"), **W})).changed


def test_another_layout_is_another_kind(tmp_path):
    a = write_zip(tmp_path / "a", {"x": torch.eye(2), **W})
    b = write_zip(tmp_path / "b", {"x": torch.eye(2).to_sparse(), **W})
    assert [row.what for row in diff(a, b).changed] == [("kind",)]


def test_expanded_tensors_of_any_size(tmp_path):
    one = torch.tensor([[1.0], [2.0]]).expand(2, 10**12)
    a = write_zip(tmp_path / "a", {"x": one, **W})
    b = write_zip(
        tmp_path / "b",
        {
            "x": (one.as_strided((2, 1), (1, 1)) + torch.tensor([[0.0], [3.0]])).expand(2, 10**12),
            **W,
        },
    )
    assert diff(a, a, values=True, bytes=True).same
    (row,) = diff(a, b, values=True).changed
    assert row.verdict.sameness.at == 10**12
    assert (row.verdict.distance.differing_count, row.verdict.distance.max_abs) == (10**12, 3.0)
    assert row.verdict.distance.l2 == pytest.approx(3e6)


# -- dtypes ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("one", "two", "what", "rounding"),
    [
        (torch.tensor([1.0, 0.1]), torch.tensor([1.0, 0.1]).half(), ("dtype",), "float16"),
        (torch.tensor([1.0, 0.1]).bfloat16(), torch.tensor([1.0, 0.1]), ("dtype",), "bfloat16"),
        (torch.tensor([1.0, 0.1]), torch.tensor([1.0, 0.2]).half(), ("dtype", "value"), ""),
        (torch.tensor([0.1]).double(), torch.tensor([0.1]).double().float(), ("dtype",), "float32"),
        (torch.tensor([0.1]).half(), torch.tensor([0.1]).half().bfloat16(), ("dtype",), "bfloat16"),
        (
            torch.tensor([1e30]).bfloat16().half(),
            torch.tensor([1e30]).bfloat16(),
            ("dtype",),
            "float16",
        ),
        (torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32), ("dtype",), ""),
        (torch.tensor([1, 300]), torch.tensor([1, 44], dtype=torch.uint8), ("dtype", "value"), ""),
        (torch.tensor([1.0]), torch.tensor([1]), ("dtype",), ""),
    ],
)
def test_two_precisions(one, two, what, rounding, tmp_path):
    a, b = write_zip(tmp_path / "a", {"x": one, **W}), write_zip(tmp_path / "b", {"x": two, **W})
    for options in ({}, {"values": True}):
        found = diff(a, b, **options)
        assert [(row.what, row.verdict.rounding) for row in found.changed] == [(what, rounding)]
        assert found.rounding == (rounding if what == ("dtype",) else "")
        assert not found.same
    distance = found.changed[0].verdict.distance
    assert distance.max_abs == float((one.double() - two.double()).abs().max())
