"""What mutation found, made small and named: each was once a traceback or a wrong answer."""

from __future__ import annotations

import io
import struct

import pytest
import torch
from formats_support import (
    FIXTURES,
    FLOAT,
    HOOKS,
    SIX,
    archive,
    call,
    dictionary,
    legacy,
    name,
    number,
    op,
    pickled,
    read_bytes,
    refusal,
    storage,
    tar,
    tensor,
    tup,
)
from fuzz import zipwise

import ckptool
from ckptool.errors import CkptError

HUGE = 1 << 20_000  # Python refuses to write it in decimal
LONG = name("torch", "LongStorage")
GET_PID, PUT_PID = b"h\x07", b"q\x07"


@pytest.fixture
def file(tmp_path):
    def write(data, as_name="net.pth"):
        path = tmp_path / as_name
        path.write_bytes(data)
        return path

    return write


def converted(path, target):
    """The slug of the refusal, or None."""
    try:
        ckptool.convert(path, path.with_name("out.pth"), to=target, fsync=False, force=True)
    except CkptError as error:
        return error.slug
    return None


def sparse(indices):
    """A 3 x 3 matrix in coordinates, three of them."""
    values = tensor(storage("1", 3), 0, (3,), (1,))
    layout = call("torch.serialization._get_layout", "torch.sparse_coo")
    parts = tup(indices, values, call("torch.Size", (3, 3)))
    return call("torch._utils._rebuild_sparse_tensor", layout, parts)


def test_a_name_with_control_characters_is_harmless_in_a_traceback():
    """A CkptError that nobody catches is printed by Python, not by our screens."""
    data = archive(pickled(dictionary(("w", tensor(storage(kind=name("torch", "Floa\x1b[2Jt")))))))
    error = refusal(data)
    assert "\\x1b[2J" in str(error)
    assert str(error).isprintable()


def test_surrogates_in_a_refusal_can_be_printed():
    """Half a surrogate pair in a key: str(error) once could not be encoded."""
    error = refusal(archive(pickled(dictionary(("\ud800", tensor(size=(9, 9)))))))
    assert error.key == "\ud800"
    assert "\\ud800" in str(error)
    str(error).encode()


HUGE_NUMBERS = {
    "the count of a storage": tensor(storage(count=HUGE)),
    "the key of a storage": tensor(storage(key=HUGE)),
    "a size": tensor(size=(HUGE, 3), stride=(0, 1)),
    "a stride": tensor(size=(1, 1), stride=(HUGE, HUGE)),
    "an offset": tensor(offset=HUGE),
    "a size of a meta tensor": call(
        "torch._utils._rebuild_meta_tensor_no_storage", name("torch", "float32"), (HUGE,), (1,), False
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", HUGE_NUMBERS)
def test_numbers_too_long_to_be_printed_are_refused(what):
    data = archive(pickled(dictionary(("w", HUGE_NUMBERS[what]))))
    error = refusal(data)
    wanted = {"the count of a storage": "storage-size", "the key of a storage": "pickle-invalid"}
    assert error.slug == wanted.get(what, "tensor-bounds")
    assert len(str(error)) < 200


def test_a_number_too_long_to_be_printed_is_a_key(file):
    path = file(archive(pickled(dictionary((HUGE, tensor()), ("a", 1)))))
    found = ckptool.inspect(path)
    assert [t.key for t in found.checkpoint.tensors] == ["<20001-bit int>"]
    assert "<20001-bit int>" in str(found)
    assert converted(path, "safetensors") == "unsupported"


@pytest.mark.parametrize(
    ("rows", "key"),
    [
        ((("model", dictionary(("w", tensor()))), ("model", "gone")), "model"),
        ((("model", "gone"), ("model", dictionary(("w", tensor())))), "model"),
        (((1, tensor()), (True, "gone"), ("w", tensor())), "True"),
        ((("model", dictionary(("w", tensor()), ("lr", 1), ("lr", 2))),), "model.lr"),
    ],
)
def test_a_key_that_any_dict_sets_twice_is_told_and_refused(rows, key, file):
    """The weights that were shown, and exported, were not those that torch keeps."""
    path = file(archive(pickled(dictionary(*rows))))
    notes = {note.slug: note.text for note in read_bytes(path.read_bytes()).notes}
    assert f"'{key}'" in notes["key-duplicate"]
    assert converted(path, "zip") == "key-duplicate"
    assert converted(path, "safetensors") in ("key-duplicate", "unsupported")


def test_equal_keys_of_two_dicts_are_no_repeats(file):
    one, two = dictionary(("w", tensor())), dictionary(("w", tensor()), ("1", 1), (1, 2))
    path = file(archive(pickled(dictionary(("a", one), ("b", two), (0, 1), (False + 2, 1)))))
    assert "key-duplicate" not in {note.slug for note in read_bytes(path.read_bytes()).notes}
    assert converted(path, "zip") is None


def test_indices_of_a_sparse_tensor_that_are_floats_are_refused():
    """torch makes integers of whatever bits these are, each machine its own."""
    good = tensor(storage("0", 6, LONG), 0, (2, 3), (3, 1))
    records = {"0": bytes(48), "1": bytes(12)}
    checkpoint = read_bytes(archive(pickled(dictionary(("s", sparse(good)))), records))
    assert [t.kind for t in checkpoint.tensors] == ["sparse"]
    bad = tensor(storage("0", 6), 0, (2, 3), (3, 1))
    records["0"] = bytes(24)
    error = refusal(archive(pickled(dictionary(("s", sparse(bad)))), records))
    assert error.slug == "pickle-invalid"


@pytest.mark.parametrize(("make", "view"), [(archive, ()), (legacy, (None,))])
def test_a_storage_tagged_meta_that_has_bytes_is_read(make, view, file):
    """As torch.load(map_location='cpu'), for which a tag is a tag; without a device as torch too."""
    data = make(pickled(dictionary(("w", tensor(storage("0", 6, FLOAT, "meta", *view))))))
    theirs = torch.load(io.BytesIO(data), map_location="cpu")["w"]
    ours = ckptool.load(file(data))["w"]
    assert ours.device.type == "cpu"
    assert torch.equal(ours, theirs)
    assert ckptool.load(file(data), device=None)["w"].is_meta


def test_the_id_of_a_storage_that_is_a_value_too_is_not_edited(file):
    """One tuple, memoized: a new tag or key in it would change the value as well."""
    pid = tup("storage", name("torch", "FloatStorage"), "0", "cuda:0", 6) + PUT_PID + b"Q"
    data = archive(pickled(dictionary(("w", tensor(pid)), ("copied", GET_PID))))
    path = file(data)
    assert converted(path, "legacy") == "pickle-invalid"
    with pytest.raises(CkptError, match="the id of a storage is a value too"):
        ckptool.convert(path, path.with_name("out.pth"), to_cpu=True, fsync=False)
    assert ckptool.inspect(path).checkpoint.tensors[0].device == "cuda:0"


def test_a_tensor_that_is_a_key_has_no_name_to_be_exported_under(file):
    path = file(archive(pickled(dictionary((tensor(), "w")))))
    assert len(ckptool.inspect(path).checkpoint.tensors) == 1
    assert converted(path, "safetensors") == "unsupported"


@pytest.mark.parametrize("target", ["zip", "safetensors"])
def test_a_tensor_over_a_storage_without_a_type_is_bytes(target, file):
    """As torch reads it; it was shown as 'untyped', which no tensor is."""
    bare = storage(count=24, kind=name("torch.storage", "UntypedStorage"))
    path = file(archive(pickled(dictionary(("w", tensor(bare, 2, (3,), (2,)))))))
    theirs = torch.load(path)["w"]
    (ours,) = ckptool.inspect(path).checkpoint.tensors
    assert (ours.dtype.name, theirs.dtype) == ("uint8", torch.uint8)
    assert torch.equal(ckptool.load(path)["w"], theirs)
    assert converted(path, target) is None
    assert torch.equal(ckptool.load(path.with_name("out.pth"))["w"], theirs)


@pytest.mark.parametrize("step", [1 << 60, 1 << 62, (1 << 63) - 1])
def test_a_step_that_is_never_taken_may_be_larger_than_numpy_counts(step, file):
    path = file(archive(pickled(dictionary(("w", tensor(size=(1, 3), stride=(step, 1)))))))
    with ckptool.open(path) as opened:
        assert opened.weights["w"].numpy().tolist() == [[0, 1, 2]]


def test_a_record_of_an_exported_program_that_is_no_whole_number_of_elements():
    """inspect read it, verify could not."""
    data = (FIXTURES / "exported.pt2").read_bytes()
    entries = zipwise.entries_of(data)
    assert len(read_bytes(zipwise.built(entries), "net.pt2").tensors) == 2
    weight = next(entry for entry in entries if entry.name.endswith("/weight_0"))
    weight.data += b"\0\0"
    error = refusal(zipwise.built(entries), "net.pt2")
    assert (error.slug, error.key) == ("storage-size", "weight")


def test_a_tar_with_a_number_too_long_to_be_printed_is_refused():
    head = b"\x80\x02"
    rows = op((number(HUGE), "cpu", name("torch", "FloatStorage")))
    members = {
        "storages": head + op(1) + b"." + head + rows + b"." + struct.pack("<q", 6) + SIX,
        "tensors": head + op(0) + b".",
        "pickle": head + HOOKS + b".",
    }
    assert refusal(tar(members)).slug == "pickle-invalid"


THEY = tensor(storage("1", 6))
LISTED = b"](" + tensor() + THEY + b"e"
ONE = dictionary(("w", tensor()))
DROPPED = {
    "a deque of more items than its room": call("collections.deque", b"]", 1) + b"(" + tensor() + THEY + b"e",
    "a deque of a list longer than its room": call("collections.deque", LISTED, 1),
    "a deque whose first item is set again": call("collections.deque", LISTED) + op(0) + tensor() + b"s",
    "a deque of the rows of a tensor": call("collections.deque", tensor()),
    "a deque of the keys of a dict": call("collections.deque", ONE),
    "a set of the rows of a tensor": call("builtins.set", tensor()),
    "a Counter of a list": call("collections.Counter", LISTED),
    "an OrderedDict of the rows of a tensor": call("collections.OrderedDict", tensor()),
    "a defaultdict of the rows of a tensor": call("collections.defaultdict", None, tensor()),
}  # fmt: skip


@pytest.mark.parametrize("what", DROPPED)
def test_containers_that_hold_other_things_than_are_written_are_refused(what, file):
    """Tensors that torch drops, or never makes, were exported."""
    data = archive(pickled(dictionary(("w", tensor()), ("x", DROPPED[what]))), {"0": SIX, "1": SIX})
    assert refusal(data).slug == "pickle-invalid"
    assert converted(file(data), "safetensors") == "pickle-invalid"


HELD = {
    "a deque with room": (call("collections.deque", b"]", 2) + b"(" + tensor() + THEY + b"e", [0, 1]),
    "a deque as Python 2 writes it": (call("collections.deque", LISTED, 2), [(0, 0), (0, 1)]),
    "a deque without bounds": (call("collections.deque", LISTED, None), [(0, 0), (0, 1)]),
    "a set of a list": (call("builtins.set", LISTED), [(0, 0), (0, 1)]),
    "a defaultdict of a dict": (call("collections.defaultdict", None, ONE), ["w"]),
    "a Counter of a dict": (call("collections.Counter", ONE), ["w"]),
}  # fmt: skip


@pytest.mark.parametrize("what", HELD)
def test_containers_that_hold_what_is_written(what):
    body, inside = HELD[what]
    checkpoint = read_bytes(archive(pickled(dictionary(("x", body))), {"0": SIX, "1": SIX}))
    steps = [at if isinstance(at, tuple) else (at,) for at in inside]
    assert [t.path for t in checkpoint.tensors] == [("x", *step) for step in steps]


@pytest.mark.parametrize("kind", ["defaultdict", "Counter"])
def test_a_dict_made_of_a_dict_has_the_keys_that_python_gives_it(kind, file):
    """They were called `1.w` and `0.w`, by the place of the argument."""
    args = (None, ONE) if kind == "defaultdict" else (ONE,)
    path = file(archive(pickled(call(f"collections.{kind}", *args))))
    theirs = torch.load(path, weights_only=False)
    assert list(ckptool.load(path)) == list(theirs) == ["w"]
    assert converted(path, "safetensors") is None
    assert list(ckptool.load(path.with_name("out.pth"))) == ["w"]
