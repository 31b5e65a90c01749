"""What stands beside the weights: bounded, JSON-ready, in words."""

import argparse
import collections
import datetime
import json
import pathlib
import pickle

import numpy as np
import pytest
import torch
from formats_support import (
    FIXTURES,
    archive,
    call,
    dictionary,
    name,
    pickled,
    read_bytes,
    read_path,
    saved,
    saved_legacy,
    tensor,
    text,
    tup,
)
from torch import nn

from ckptool.errors import LimitExceeded
from ckptool.formats import extras
from ckptool.limits import DEFAULT

STATE = {"w": torch.ones(2)}


def extra(value, save=saved, **options):
    """The one extra beside a state_dict, through a file; always writable as strict JSON."""
    found = read_bytes(save({"state_dict": STATE, "it": value}, **options)).extras
    (row,) = [row for row in found if row.path == ("it",)]
    json.dumps(row.value, allow_nan=False)
    assert "\n" not in row.text
    return row


def raw_extra(body):
    data = archive(pickled(dictionary(("state_dict", dictionary(("w", tensor()))), ("it", body))))
    (row,) = [row for row in read_bytes(data).extras if row.path == ("it",)]
    json.dumps(row.value, allow_nan=False)
    assert len(row.text) < 5000
    return row


# -- plain values ------------------------------------------------------------------------------
@pytest.mark.parametrize("save", [saved, saved_legacy])
@pytest.mark.parametrize(
    "value",
    [
        7,
        -1,
        0,
        1.5,
        True,
        False,
        None,
        "text",
        "",
        "größe",
        2**63,
        -(2**63),
        [1, 2],
        {"a": [1, {"b": "c"}]},
        [],
        {},
        [[]],
    ],
    ids=repr,
)
def test_plain_values_are_themselves(value, save):
    row = extra(value, save)
    assert row.value == value
    assert type(row.value) is type(value)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (7, "int"),
        (1.5, "float"),
        (True, "bool"),
        (None, "NoneType"),
        ("x", "str"),
        ([1], "list"),
        ({"a": 1}, "dict"),
        ((1, 2), "tuple"),
        ({1}, "set"),
        (argparse.Namespace(a=1), "argparse.Namespace"),
        (collections.OrderedDict(a=1), "dict"),
    ],
    ids=repr,
)
def test_types_in_words(value, kind):
    assert extra(value, pickle_protocol=4).type == kind


def test_tuples_and_sets_are_lists():
    assert extra((1, (2, "x"))).value == [1, [2, "x"]]
    assert extra({5}).value == [5]
    assert extra({5}, pickle_protocol=4).value == [5]
    assert extra(()).value == []
    assert extra(torch.Size((2, 3))).value == [2, 3]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (2**70, "<71-bit int>"),
        (1 << 100_000, "<100001-bit int>"),
        (-(2**70), "<71-bit int>"),
        (torch.device("cuda:1"), "device('cuda:1')"),
        (torch.float16, "<torch.float16>"),
        (pathlib.PurePosixPath("/a/b"), "/a/b"),
        (np.float64(0.5), 0.5),
        (np.int64(-3), -3),
        (np.bool_(True), True),
        (np.float32(0.25), 0.25),
        (np.float64("nan"), "nan"),
        (np.uint8(200), 200),
        (np.float16(2), 2.0),
        (np.dtype(">f8").type(1.5), 1.5),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_values_that_json_or_python_would_choke_on(value, shown, protocol):
    row = extra(value, pickle_protocol=protocol)
    if isinstance(value, pathlib.PurePath):
        shown = row.value if row.value.replace("//", "/") == shown else shown
    assert row.value == shown
    assert extra({"in": [value]}, pickle_protocol=protocol).value == {"in": [row.value]}


def test_numbers_inside_numpy_dicts_and_keys_of_other_kinds():
    value = {1: "a", None: "b", (1, 2): "c", b"x": "d"}
    assert list(extra(value).value) == ["1", "None", "(1, 2)", "b'x'"]


def test_bytes_are_counted():
    assert extra(b"\0\1\2", pickle_protocol=4).value == "<3 bytes>"
    assert extra(b"\0\xff\2").value == "<3 bytes>"
    assert extra(bytearray(b"xyz"), pickle_protocol=5).value == "<3 bytes>"


def test_a_big_endian_numpy_scalar():
    dtype = call("numpy.dtype", "f8", 0, 1) + tup(3, ">", None, None, None, -1, -1, 0) + b"b"
    body = call("numpy.core.multiarray.scalar", dtype, b"C\x08?\xf8\0\0\0\0\0\0")
    assert raw_extra(body).value == 1.5


@pytest.mark.parametrize(
    "body",
    [
        call("numpy.core.multiarray.scalar", call("numpy.dtype", "f8", 0, 1), b"C\x01x"),
        call("numpy.core.multiarray.scalar", 1, 2),
        call("numpy.core.multiarray.scalar", call("numpy.dtype", "O8", 0, 1), b"C\x01x"),
        call("numpy.core.multiarray.scalar", call("numpy.dtype"), text("x")),
        call("pathlib.PosixPath", 3),
        call("torch.device"),
        call("torch.Size"),
        call("torch.Size", 5),
        call("_codecs.encode"),
        call("_codecs.encode", 1),
        call("__builtin__.set"),
        call("__builtin__.set", 3),
        call("collections.OrderedDict", 3),
        call("argparse.Namespace", 1),
        name("argparse", "Namespace") + b")\x81K\x01b",
        name("os", "system"),
        call("os.system", "true"),
        call(call("os.system", "x")),
        name("a", "b") + b")\x81" + b"(K\x01e" + b"(K\x01K\x02u" + b"}b",
    ],
)
def test_odd_objects_are_described_all_the_same(body):
    row = raw_extra(body)
    assert row.type


# -- objects -----------------------------------------------------------------------------------
def test_a_namespace_shows_its_attributes():
    row = extra(argparse.Namespace(arch="small", lr=0.1, deeper=argparse.Namespace(a=[1])))
    assert row.value == {"arch": "small", "lr": 0.1, "deeper": {"a": [1]}}
    assert row.text.startswith("Namespace(arch='small', lr=0.1")


def test_many_attributes_make_one_short_line():
    row = extra(argparse.Namespace(**{f"a{i}": "x" * 50 for i in range(500)}))
    assert len(row.text) <= 160
    assert len(row.value) <= 65


def test_a_stranger_is_named_with_its_attributes():
    found = {row.path[0]: row for row in read_path(FIXTURES / "namespace_foreign.pth").extras}
    assert found["config"].type == "acme.config.Config"
    assert found["config"].value["name"] == "small"
    assert found["config"].text.startswith("Config(")
    assert found["history"].value == [0.5, 0.25]
    assert found["registry"].value == {"a": 1}


def test_a_call_that_could_run_code_is_only_named():
    assert raw_extra(call("os.system", "true")).value == "<os.system>"
    assert raw_extra(name("os", "system")).value == "<os.system>"


def test_dates_and_modules_are_named():
    assert extra(datetime.datetime(2020, 1, 2)).value == "<datetime.datetime>"
    assert "Linear" in extra([nn.Linear(1, 1)]).text or extra([nn.Linear(1, 1)]).type == "list"


def test_tensors_beside_the_weights():
    row = extra(torch.ones(2, 3, dtype=torch.int16))
    assert (row.type, row.value) == ("tensor", {"shape": [2, 3], "dtype": "int16", "device": "cpu"})
    assert row.text == "int16 tensor [2, 3] on cpu"
    assert extra({"w": [torch.ones(2)]}).value == {"w": ["<tensor [2]>"]}
    assert extra([torch.ones(2).untyped_storage()]).value == ["<storage>"]


# -- bounds ------------------------------------------------------------------------------------
def test_cycles_end():
    value = {"a": 1}
    value["me"] = value
    assert extra(value).value == {"a": 1, "me": "<cycle>"}
    row = []
    row.append(row)
    assert extra(row).value == ["<cycle>"]


def test_what_is_merely_shared_is_no_cycle():
    shared = [1]
    assert extra([shared, shared]).value == [[1], [1]]


def test_deep_and_wide_values_are_cut():
    deep = 1
    for _ in range(50):
        deep = [deep]
    assert "…" in json.dumps(extra(deep).value, ensure_ascii=False)
    wide = extra({f"k{i}": [i] for i in range(10_000)})
    assert len(json.dumps(wide.value)) < 5000
    assert wide.text.startswith("dict of ")


def test_laughs_are_cut():
    body = b")q\x00" + b"".join(b"0(" + b"h\x00" * 10 + b"tq\x00" for _ in range(40))
    assert len(json.dumps(raw_extra(body).value)) < 20_000


def test_long_texts_stay_in_the_value_and_leave_one_line():
    row = extra("a\nb" * 10)
    assert row.value == "a\nb" * 10


@pytest.mark.parametrize("key", [1, None, (1, 2), True, 1.5, "", "a\nb"])
def test_keys_of_any_kind_name_an_extra(key):
    found = read_bytes(saved({"state_dict": STATE, key: 5})).extras
    assert [row.value for row in found] == [5]
    assert all(type(step) in (str, int) for step in found[0].path)


# -- optimizers --------------------------------------------------------------------------------
def optimizer(make, steps=1, groups=1):
    nets = [nn.Linear(2, 2) for _ in range(groups)]
    made = make([{"params": net.parameters()} for net in nets])
    for _ in range(steps):
        sum(net(torch.ones(1, 2)).sum() for net in nets).backward()
        made.step()
    return made.state_dict()


@pytest.mark.parametrize(
    ("make", "family"),
    [
        (torch.optim.Adam, "Adam-like"),
        (torch.optim.AdamW, "Adam-like"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "SGD-like"),
        (lambda p: torch.optim.SGD(p, lr=0.1), "optimizer"),
        (torch.optim.RMSprop, "RMSprop-like"),
        (torch.optim.Adagrad, "Adagrad-like"),
    ],
)
def test_an_optimizer_in_one_line(make, family):
    row = extra(optimizer(make))
    assert row.type == "optimizer"
    assert row.value["family"] == family
    assert [g["params_count"] for g in row.value["groups"]] == [2]
    assert row.text.startswith(f"{family}, 1 group, 2 parameters")


def test_groups_states_and_devices_are_counted():
    row = extra(optimizer(torch.optim.Adam, groups=3))
    assert row.value["state_count"] == 6
    assert row.value["state_names"] == ["step", "exp_avg", "exp_avg_sq"]
    assert row.value["devices"] == {"cpu": 18}
    assert row.value["groups"][0]["lr"] == 0.001
    assert row.text == "Adam-like, 3 groups, 6 parameters, exp_avg, exp_avg_sq on cpu (18)"


def test_an_optimizer_before_its_first_step():
    assert (
        extra(optimizer(torch.optim.Adam, steps=0)).text
        == "Adam-like, 1 group, 2 parameters, no state yet"
        or extra(optimizer(torch.optim.Adam, steps=0)).text
        == "optimizer, 1 group, 2 parameters, no state yet"
    )


def test_the_optimizer_of_the_tutorials_stands_on_two_devices():
    (row,) = [r for r in read_path(FIXTURES / "dp_cuda.pth").extras if r.type == "optimizer"]
    assert row.value["devices"] == {"cpu": 6, "cuda:0": 12}


@pytest.mark.parametrize(
    "value",
    [
        {"state": 1, "param_groups": 2},
        {"state": {}, "param_groups": {}},
        {"state": {0: 5}, "param_groups": [3]},
        {"state": [], "param_groups": [{"params": 5}]},
        {"state": {"w": {"m": None}}, "param_groups": [{"params": ["w"], "x": {"y": {"z": [1]}}}]},
    ],
    ids=repr,
)
def test_what_only_looks_like_an_optimizer(value):
    assert extra(value).type == "optimizer"


def test_arrays_show_their_shape():
    for protocol in (2, 4, 5):
        assert extra({"a": np.ones((2, 3))}, pickle_protocol=protocol).value == {
            "a": "<array [2, 3]>"
        }


# -- which entries -----------------------------------------------------------------------------
def test_tables_and_weights_are_no_extras():
    value = {"model": STATE, "ema": dict(STATE), "epoch": 3, "args": argparse.Namespace(a=1)}
    assert [row.path for row in read_bytes(saved(value)).extras] == [("epoch",), ("args",)]


def test_values_beside_tensors_in_the_root():
    assert [(r.path, r.value) for r in read_bytes(saved({**STATE, "epoch": 3})).extras] == [
        (("epoch",), 3)
    ]


def test_a_file_without_a_dict_at_its_root_has_none():
    assert read_bytes(saved([torch.ones(1), 5])).extras == ()
    assert read_bytes(saved(nn.Linear(1, 1))).extras == ()


@pytest.mark.parametrize("protocol", range(6))
def test_extras_of_a_bare_pickle(protocol):
    value = {
        "w": np.ones(3),
        "epoch": 3,
        "lr": np.float32(0.5),
        "note": "é",
        "many": list(range(100)),
    }
    found = {r.path[0]: r.value for r in read_bytes(pickle.dumps(value, protocol), "x.pkl").extras}
    assert (found["epoch"], found["lr"], found["note"]) == (3, 0.5, "é")
    assert "w" not in found
    assert len(found["many"]) <= 65


def test_metadata_of_safetensors_is_an_extra():
    (row,) = read_path(FIXTURES / "model.safetensors").extras
    assert (row.path, row.value) == (("__metadata__",), {"format": "pt"})


def shared(rows, first, limit):
    """A file whose entries `rows` are one object, told within `limit` bytes of repetition."""
    memo = first + b"q\x09"
    entries = [("w", tensor()), ("n0", memo), *((f"n{at}", b"h\x09") for at in range(1, rows))]
    data = archive(pickled(dictionary(*entries)))
    return read_bytes(data, limits=DEFAULT._replace(repeated_value_bytes=limit)).extras


OPTIMIZER = dictionary(
    ("state", b"}"), ("param_groups", b"](" + dictionary(("lr", 0.5), ("params", [0, 1])) + b"e")
)
GROUP = 24 * 5 + 1  # the group, its two keys and values, the list of its parameters


@pytest.mark.parametrize(("first", "each"), [
    (text("x" * 100), 100),  # the text alone
    (b"](" + text("y" * 50) + text("z") + b"e", 2 * 24 + 51),
    (dictionary(("kk", 3), ("m", text("y" * 50))), 4 * 24 + 3 + 50),
    (OPTIMIZER, GROUP),
    (call("pathlib.PurePosixPath", text("p" * 30), text("q")), 31),
    (call("torch.Size", tup(2, 3)), 48),
])  # fmt: skip
def test_what_the_memo_repeats_is_told_up_to_a_limit(first, each):
    """Of ten names for one value nine are repetitions; three bytes of pickle could be a megabyte."""
    told = shared(10, first, 9 * each)
    assert len(told) == 10
    assert len({repr(one[1:]) for one in told}) == 1
    if each:
        with pytest.raises(
            LimitExceeded, match=f"more than {9 * each - 1:,} bytes that are repeated"
        ):
            shared(10, first, 9 * each - 1)


def test_optimizers_that_share_their_groups_are_weighed_too():
    """Each is an object of its own, and the second one of ten names."""
    groups = b"](" + dictionary(("lr", 0.5), ("params", [0, 1])) + b"eq\x07"
    first = dictionary(("state", b"}"), ("param_groups", groups))
    second = dictionary(("state", b"}"), ("param_groups", b"h\x07")) + b"q\x09"
    names = [
        ("w", tensor()),
        ("a", first),
        ("n0", second),
        *((f"n{at}", b"h\x09") for at in range(1, 10)),
    ]
    data = archive(pickled(dictionary(*names)))
    (one, *others) = read_bytes(
        data, limits=DEFAULT._replace(repeated_value_bytes=10 * GROUP)
    ).extras
    assert [row.value for row in others] == [one.value] * 10
    assert one.value["groups"] == [{"lr": 0.5, "params_count": 2}]
    with pytest.raises(LimitExceeded):
        read_bytes(data, limits=DEFAULT._replace(repeated_value_bytes=10 * GROUP - 1))


def test_a_path_of_many_parts_is_cut():
    parts = [text("p") + b"q\x09", *[b"h\x09"] * 99]
    data = archive(
        pickled(dictionary(("w", tensor()), ("p", call("pathlib.PurePosixPath", *parts))))
    )
    (row,) = read_bytes(data).extras
    assert row.value == "/".join(["p"] * 64 + ["…"])


def test_a_long_dict_in_many_lists_is_read_once(monkeypatch):
    """Its first items are shown; all of them would be looked at each time."""
    looked = []
    real = extras.dict_items
    monkeypatch.setattr(extras, "dict_items", lambda node: looked.append(real(node)) or looked[-1])
    long = dictionary(*((f"k{at}", 1) for at in range(1_001))) + b"q\x09"
    lists = [(f"l{at}", b"](" + (b"h\x09" if at else long) + b"e") for at in range(50)]
    told = read_bytes(archive(pickled(dictionary(("w", tensor()), *lists)))).extras
    assert [len(row.value[0]) for row in told] == [65] * 50
    assert sum(rows is not None and len(rows) == 1_001 for rows in looked) == 1
