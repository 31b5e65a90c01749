"""What torch.load would say: torch itself is asked."""

from __future__ import annotations

import io

import pytest
import torch
from formats_support import (
    HOOKS,
    archive,
    call,
    dictionary,
    name,
    op,
    pickled,
    read_bytes,
    saved,
    saved_legacy,
    storage,
    tensor,
    tried,
    tup,
)
from verbs_support import FIXTURES, TRUTHS, allowed_by_torch

from ckptool.formats.audit_pickle import refusals
from ckptool.verbs.reading import opened
from ckptool.verbs.verify_torch import loading

NAMES = sorted(
    key
    for key, truth in TRUTHS.items()
    if truth["format"] in ("torch-zip", "torch-legacy") and not truth.get("error")
)


@pytest.mark.parametrize("fixture", NAMES)
def test_weights_only_is_what_torch_says(fixture):
    with opened(FIXTURES / fixture) as found:
        said = loading(found.checkpoint)
    assert said.weights_only == (allowed_by_torch(FIXTURES / fixture) is True)
    assert said.weights_only == (not said.blockers)


def loads(data):
    try:
        torch.load(io.BytesIO(data), weights_only=True)
    except Exception:
        return False
    return True


W = ("w", tensor())
# what stands in data.pkl beside the names torch allows
PICKLES = {
    "plain": pickled(dictionary(W)),
    "ordered": pickled(HOOKS + b"(" + op("w") + tensor() + b"u"),
    "one item": pickled(b"}" + op("w") + tensor() + b"s"),
    "python 2 text": pickled(b"}(U\x01w" + tensor() + b"u"),
    "long": pickled(dictionary(W, ("n", 1 << 70))),
    "very long": pickled(dictionary(W, ("n", 1 << 4000))),
    "set": pickled(dictionary(W, ("s", call("__builtin__.set", [1])))),
    "empty set": pickled(dictionary(W, ("s", b"\x8f"))),
    "set with items": pickled(dictionary(W, ("s", b"\x8f(K\x01\x90")), protocol=4),
    "popped": pickled(b"N0" + dictionary(W)),
    "doubled": pickled(dictionary(W) + b"20"),
    "text protocol": pickled(b"}(" + op("n") + b"I5\n" + op("w") + tensor() + b"u"),
    "state of a dict": pickled(dictionary(W) + op((1,))[:-1] + b"t" + b"b"),
    "state of a list": pickled(dictionary(W, ("l", op([1]) + dictionary(("a", 1)) + b"b"))),
    "state of an ordered dict": pickled(
        HOOKS + b"(" + op("w") + tensor() + b"u" + dictionary(("a", 1)) + b"b"
    ),
    "items of a tensor": pickled(dictionary(W, ("c", call("collections.Counter") + b"(K\x01K\x02u"))),
    "items of a set": pickled(
        dictionary(W, ("s", call("__builtin__.set", [1]) + b"(K\x01K\x02e"))
    ),
    "a class unknown": pickled(dictionary(W, ("a", call("argparse.Namespace")))),
    "a call of a call": pickled(dictionary(W, ("a", call(call("torch.Size", (1,)), 1)))),
    "size": pickled(dictionary(W, ("a", call("torch.Size", (1, 2))))),
    "device": pickled(dictionary(W, ("a", call("torch.device", "cpu")))),
    "bytes": pickled(dictionary(W, ("b", call("_codecs.encode", "x", "latin1")))),
    "bytes of protocol 3": pickled(dictionary(W, ("b", b"C\x01x")), protocol=3),
    "a short text": pickled(dictionary(W, ("b", b"\x8c\x01x")), protocol=4),
    "memo of protocol 4": pickled(b"}\x94(" + op("w") + tensor() + b"u", protocol=4),
    "new object": pickled(dictionary(W, ("d", name("collections", "OrderedDict") + b")\x81"))),
    "new object of a function": pickled(dictionary(W, ("d", name("torch", "Size") + b")\x81"))),
    "not a storage": pickled(dictionary(W, ("m", tup("module", name("torch.nn", "Linear"), "", "") + b"Q"))),
}  # fmt: skip


@pytest.mark.parametrize("case", PICKLES)
def test_a_pickle_is_refused_where_torch_refuses_it(case):
    data = archive(PICKLES[case])
    error = tried(data, "net.pth")
    said = error is None and loading(read_bytes(data)).weights_only
    assert said == loads(data)


def test_all_reasons_at_once_with_their_bytes():
    body = dictionary(W, ("a", call("argparse.Namespace")), ("b", call("os.system", "x"))) + b"20"
    checkpoint = read_bytes(archive(pickled(body)))
    blockers = loading(checkpoint).blockers
    assert [row.name for row in blockers] == ["argparse.Namespace", "os.system", None]
    assert [row.verdict for row in blockers] == ["known", "code", "refused"]
    data = checkpoint.handle.walked.data
    assert [data[row.offset : row.offset + 1] for row in blockers] == [b"R", b"R", b"2"]
    assert [row.path for row in blockers[:2]] == [("a",), ("b",)]


def test_old_streams_of_new_types():
    """torch writes a legacy file of float8 that it cannot read."""
    data = saved_legacy({"w": torch.zeros(4, dtype=torch.uint16)})
    assert not loads(data)
    said = loading(read_bytes(data))
    assert said.weights_only is False
    assert "as a zip" in said.blockers[0].detail or "from a zip" in said.blockers[0].detail
    assert loading(read_bytes(saved({"w": torch.zeros(4, dtype=torch.uint16)}))).weights_only


@pytest.mark.parametrize(
    ("fixture", "weights_only"),
    [("tar_01x.pth", False), ("torchscript.pt", False), ("model.safetensors", None),
     ("plain_pickle.pkl", None), ("exported.pt2", None)],
)  # fmt: skip
def test_containers_that_are_not_torch_loads(fixture, weights_only):
    with opened(FIXTURES / fixture) as found:
        assert loading(found.checkpoint).weights_only is weights_only


def test_long_runs_of_opcodes_are_walked_in_pieces():
    """The scan takes 4,096 opcodes at a time."""
    body = dictionary(W, ("n", [1] * 10_000)) + b"20"
    walked = read_bytes(archive(pickled(body))).handle.walked
    (found,) = refusals(walked)
    assert walked.data[found.offset : found.offset + 1] == b"2"
    assert "DUP" in found.text
    assert storage() in walked.data
