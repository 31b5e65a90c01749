"""What load makes of values that are no tensors: known ones themselves, the rest inert records."""

from __future__ import annotations

import argparse
import copy
import datetime
import functools
import io
import pathlib
import pickle
import time
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from fixtures.make_fixtures import absent
from formats_support import SIX, archive, call, dictionary, name, pickled, tensor, text, tup
from hypothesis import given, settings
from hypothesis import strategies as st
from load_support import Same, loaded, saved
from verbs_support import FIXTURES

import ckptool
from ckptool.errors import (
    CkptError,
    KeyDuplicate,
    LimitExceeded,
    PickleInvalid,
    UnsafePickle,
)

FORTY = [40 * "x"]


def known():
    shared = {"a": [1, 2]}
    space = argparse.Namespace(
        lr=0.1, device=torch.device("cuda", 1), nested=argparse.Namespace(x=1)
    )
    stream = io.BytesIO(b"numbers")
    stream.seek(3)
    counted = Counter("abca")
    ordered = OrderedDict(b=1, a=shared)
    ordered.note = "an attribute"
    return {
        "numbers": [0, -5, 1 << 70, 1.5, float("inf"), True, None, 1 + 2j],
        "text": "käse\n\udc80\0", "bytes": b"\0\xff", "array": bytearray(b"zz"), "tuple": (1, (2, ())),
        "sets": [{1, "a", (2, 3)}, frozenset({"x"}), set()], "slice": slice(1, None, 2), "range": range(0, 9, 3),
        "shared": [shared, shared, ordered], "counter": counted, "default": defaultdict(list, {"a": FORTY, "b": FORTY}),
        "deque": deque([1, [2]], maxlen=3), "namespace": space, "simple": types.SimpleNamespace(a=1),
        "when": [datetime.datetime(2024, 1, 2, 3, 4, 5, 6), datetime.date(2024, 2, 29), datetime.time(1, 2), datetime.timedelta(1, 2, 3),
                 datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=8), "CST"))],
        "exact": [Decimal("1.50"), Fraction(1, 3)], "uuid": uuid.UUID(int=12345), "stream": stream,
        "paths": [pathlib.PurePosixPath("/a/b"), pathlib.PureWindowsPath("C:/a"), pathlib.Path("/tmp") / "x"],
        "torch": [torch.Size([2, 3]), torch.device("cpu"), torch.bfloat16, torch.sparse_csr, torch.per_channel_affine,
                  torch.Generator().manual_seed(3), torch.__version__], "types": [int, dict, OrderedDict, torch.Tensor],
        "ellipsis": ..., "keys": {0: "a", -1: "b", None: "c", (1, (2,)): "d", 1.5: "e", b"k": 1, torch.float32: 2},
    }  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_known_values_come_as_themselves(protocol, tmp_path):
    one = known()
    path = saved(one, tmp_path / "a.pth", pickle_protocol=protocol)

    assert Same().same(one, ckptool.load(path)).values > 80


def test_a_value_that_holds_itself(tmp_path):
    one = {"list": [1], "dict": {}}
    one["list"].append(one["list"])
    one["dict"]["up"] = one
    inside = []
    one["tuple"] = (inside,)
    inside.append(one["tuple"])
    path = saved(one, tmp_path / "a.pth")

    Same().same(one, ckptool.load(path))


def test_wide_and_deep_values_do_not_recurse(tmp_path):
    deep = []
    for _ in range(450):
        deep = [deep]
    one = {"w": torch.ones(1), "deep": deep, "wide": [{"i": i} for i in range(20_000)]}
    path = saved(one, tmp_path / "a.pth")

    found = ckptool.load(path)
    for _ in range(450):
        (found["deep"],) = found["deep"]
    assert found["deep"] == []
    assert found["wide"][-1] == {"i": 19_999}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner)
    | st.dictionaries(st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)), inner, max_size=4)
    | st.sets(st.integers(), max_size=3),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(VALUES, st.integers(2, 5))
def test_any_plain_value(value, protocol):
    one = {"w": 1.0, "value": value, "again": value}
    stream = io.BytesIO()
    torch.save(one, stream, pickle_protocol=protocol)

    Same().same(one, ckptool.load(stream))


# -- records -----------------------------------------------------------------------------------
class Config:
    def __init__(self):
        self.lr, self.depth, self.self = 0.1, [2, 3], self
        self.weight = torch.ones(2)


class Slotted:
    __slots__ = ("__dict__", "a", "b")

    def __init__(self):
        self.a, self.b, self.c = 1, torch.zeros(1), 3


class Items(dict):
    pass


class Rows(list):
    pass


class Reduced:
    def __reduce__(self):
        return Reduced, (1, "two", {"three": 3}), {"extra": 4}


class Stated:
    def __getstate__(self):
        return [1, 2]

    def __setstate__(self, state):
        raise AssertionError("never called")


def foreign(tmp_path, **values):
    kinds = (Config, Slotted, Items, Rows, Reduced, Stated)
    with absent("acme.models", **{kind.__name__: kind for kind in kinds}):
        saved({"w": torch.ones(1), **values}, tmp_path / "a.pth")
    return ckptool.load(tmp_path / "a.pth")


def test_an_object_of_an_unknown_class_has_its_fields(tmp_path):
    config = Config()
    found = foreign(tmp_path, config=config, again=config)["config"]

    assert type(found) is ckptool.Record
    assert found.class_name == "acme.models.Config"
    assert (found.lr, found.depth, found.arguments, found.entries) == (0.1, [2, 3], (), None)
    assert found.self is found
    assert torch.equal(found.weight, torch.ones(2))
    assert "lr" in dir(found)
    with pytest.raises(AttributeError, match=r"a acme.models.Config has no field 'lx'"):
        found.lx  # noqa: B018
    found.lr = 0.2
    assert found.fields["lr"] == 0.2
    assert copy.copy(found).lr == pickle.loads(pickle.dumps(found)).lr == 0.2
    assert repr(found).startswith("<acme.models.Config: lr=0.2, depth=<list of 2>, self=<acme")


def test_slots_items_and_calls(tmp_path):
    found = foreign(tmp_path, slotted=Slotted(), items=Items(a=1, b=[2]), rows=Rows([1, 2]),
                    reduced=Reduced(), stated=Stated(), part=functools.partial(int, base=2))  # fmt: skip

    assert (found["slotted"].a, found["slotted"].c) == (1, 3)
    assert found["items"].entries == {"a": 1, "b": [2]}
    assert (found["items"]["a"], "b" in found["items"], len(found["items"])) == (1, True, 2)
    assert list(found["rows"]) == [1, 2]
    assert found["reduced"].arguments == (1, "two", {"three": 3})
    assert found["reduced"].extra == 4
    assert found["stated"].state == [1, 2]
    assert found["part"].class_name == "functools.partial"
    assert bool(found["stated"])
    with pytest.raises(TypeError, match="holds no items"):
        found["stated"][0]


def test_names_are_not_looked_up(tmp_path):
    found = foreign(tmp_path, kind=Config, function=loaded)

    assert found["kind"] == ckptool.Reference("acme.models.Config")
    assert found["function"].name == "load_support.loaded"
    assert hash(found["kind"]) == hash(ckptool.Reference("acme.models.Config"))
    assert repr(found["kind"]) == "<name acme.models.Config>"


def test_what_could_run_code_is_data(tmp_path):
    found = loaded(FIXTURES / "evil.pth")

    record = found["extra"]
    assert record.class_name in ("os.system", "posix.system", "builtins.print")
    assert all(isinstance(arg, str) for arg in record.arguments)
    assert loaded(FIXTURES / "acme_enum.pth")  # an Enum is a call of its class


def test_paths_of_another_system_are_pure(tmp_path):
    windows = call("pathlib.WindowsPath", "C:\\", "runs", "best.pt")
    data = pickled(dictionary(("w", tensor()), ("path", windows)))
    (tmp_path / "a.pth").write_bytes(archive(data))

    found = ckptool.load(tmp_path / "a.pth")["path"]

    assert found == pathlib.PureWindowsPath("C:\\runs\\best.pt")


# -- what a file must not do -------------------------------------------------------------------
def made(tmp_path, *rows, protocol=2, records=None):
    data = pickled(dictionary(("w", tensor()), *rows), protocol=protocol)
    (tmp_path / "a.pth").write_bytes(archive(data, records))
    return ckptool.load(tmp_path / "a.pth")


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("builtins.bytearray", (1 << 40,)), ("builtins.bytes", (1 << 40,)),
        ("fractions.Fraction", ("1e999999999",)), ("builtins.range", ("a", 1, 2)),
        ("collections.deque", (1,)), ("builtins.set", (5,)), ("torch.device", ("nonsense", 0)),
        ("datetime.datetime", ("tomorrow",)), ("collections.defaultdict", (name("os", "system"),)),
        ("builtins.complex", ("1+2j",)), ("torch.Size", (("a",),)), ("uuid.UUID", ("x",)),
    ],
)  # fmt: skip
def test_a_known_class_called_in_another_way_is_a_record(function, args, tmp_path):
    found = made(tmp_path, ("value", call(function, *args)))["value"]

    assert type(found) is ckptool.Record
    assert found.class_name == function
    assert len(found.arguments) == len(args)


def test_keys_that_take_forever_are_refused_at_once(tmp_path):
    bomb = tup("x")
    for i in range(40):  # a tuple of two of itself, forty times over: 2**40 to hash
        bomb += b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86"
    start = time.monotonic()

    with pytest.raises(LimitExceeded, match="keys that would take too long"):
        made(tmp_path, ("value", b"}" + bomb + b"K\x01s"))
    collide = [(((1 << 61) - 1) * i, 0) for i in range(2_000)]  # all have the hash 0
    with pytest.raises(LimitExceeded, match="keys that would take too long"):
        made(tmp_path, ("value", dictionary(*collide)))
    assert time.monotonic() - start < 2


def test_a_key_that_stands_twice_is_refused(tmp_path):
    with pytest.raises(KeyDuplicate, match="a key stands twice") as info:
        made(tmp_path, ("value", dictionary(("a", 1), ("a", [2]))))
    assert info.value.key == "a"
    with pytest.raises(KeyDuplicate):
        made(tmp_path, ("value", dictionary((1, [1]), (True, [2]))))


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (dictionary((b"]", 1)), PickleInvalid, "a key of the type list"),
        (name("collections", "OrderedDict") + b")R}" + text("items") + b"K\x01sb", UnsafePickle, "hide what every OrderedDict has"),
        (name("argparse", "Namespace") + b")\x81}" + text("__class__") + b"K\x01sb", UnsafePickle, "hide what every Namespace has"),
        (b"](" + text("a") + b"e}" + text("k") + b"K\x01sb", UnsafePickle, "BUILD on a plain container"),
        (name("acme", "A") + b")\x81}b}b", UnsafePickle, "BUILD changes a value"),
        (call("datetime.date", call("_codecs.encode", "\xff\xff\xff\xff", "latin1")), PickleInvalid, "a value that cannot be"),
        (name("acme", "A") + b")\x81(K\x01e(K\x01K\x02u", PickleInvalid, "items of a list and of a dict"),
    ],
)  # fmt: skip
def test_what_no_reader_should_accept(value, error, words, tmp_path):
    with pytest.raises(error, match=words):
        made(tmp_path, ("value", value))


def test_a_call_inside_its_own_arguments_is_refused(tmp_path):
    loop = name("acme", "A") + b"]q\x05" + b"\x85R" + b"q\x06"  # A([…]); the list holds A's call
    value = b"(" + loop + b"h\x05h\x06a" + b"t"

    found = made(tmp_path, ("value", value))["value"]  # through a list it can be

    assert found[0].arguments[0][0] is found[0]
    frozen = name("builtins", "frozenset") + b"]q\x05\x85Rq\x06"
    with pytest.raises((PickleInvalid, CkptError)):
        made(tmp_path, ("value", b"(" + frozen + b"h\x05h\x06a" + b"t"))


def test_numbers_that_torch_would_believe_are_checked(tmp_path):
    """Sizes, indices and scales taken from the file's floats: far out of bounds."""
    long = tup("storage", name("torch", "LongStorage"), "1", "cpu", 3) + b"Q"
    quantized = tup("storage", name("torch", "QInt8Storage"), "2", "cpu", 24) + b"Q"
    buffer, values = tensor(size=(6,), stride=(1,)), tensor(size=(3,), stride=(1,))
    sizes, offsets = tensor(long, 0, (1, 1), (1, 1)), tensor(long, 0, (1,), (1,))
    indices, affine = tensor(long, 0, (1, 3), (3, 1)), name("torch", "per_channel_affine")
    layout = call("torch.serialization._get_layout", "torch.sparse_coo")
    cases = {
        "past its buffer": call("torch._utils._rebuild_nested_tensor", buffer, sizes, sizes, offsets),
        "size is inconsistent": call("torch._utils._rebuild_sparse_tensor", layout, tup(indices, values, tup(5))),
        "scales do not fit": call("torch._utils._rebuild_qtensor", quantized, 0, (2, 3), (3, 1), tup(affine, buffer, buffer, 7), False, b"}"),
    }  # fmt: skip
    for words, case in cases.items():
        with pytest.raises(PickleInvalid, match=words):
            made(tmp_path, ("value", case), records=dict.fromkeys("012", SIX))


def test_attributes_cannot_hide_what_a_tensor_is(tmp_path):
    rebuilt = call("torch._tensor._rebuild_from_type_v2", name("torch._utils", "_rebuild_tensor_v2"),
                   name("torch", "Tensor"), tup(tup("storage", name("torch", "FloatStorage"), "0", "cpu", 6) + b"Q", 0, (6,), (1,), False, b"}"),
                   dictionary(("backward", 1)))  # fmt: skip

    with pytest.raises(UnsafePickle, match="hide what every Tensor has"):
        made(tmp_path, ("value", rebuilt))


def test_a_subclass_that_is_not_imported_is_the_tensor_under_it(tmp_path):
    class TensorImage(torch.Tensor):
        pass

    image = torch.arange(3.0).as_subclass(TensorImage)
    image.codes = ["a"]
    with absent("fastai.torch_core", TensorImage=TensorImage):
        saved({"img": image, "p": torch.nn.Parameter(torch.ones(1))}, tmp_path / "a.pth")

    found = ckptool.load(tmp_path / "a.pth")["img"]

    assert type(found) is torch.Tensor
    assert found.tolist() == [0, 1, 2]
    assert found.codes == ["a"]


def test_a_wrapper_without_memory_is_a_record(tmp_path):
    from torch.testing._internal.two_tensor import TwoTensor

    path = saved({"t": TwoTensor(torch.ones(2), torch.zeros(2))}, tmp_path / "a.pth")

    found = ckptool.load(path)["t"]

    assert found.class_name.endswith("TwoTensor")
    assert torch.equal(found.a, torch.ones(2))
    assert torch.equal(found.b, torch.zeros(2))
