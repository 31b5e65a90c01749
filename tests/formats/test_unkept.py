"""Reading without keeping the nodes of a pickle says the same of every file, and holds less."""

from __future__ import annotations

import gc
from collections import OrderedDict

import pytest
import torch
from formats_support import FIXTURES, read_bytes, read_path, saved
from hostile.corpus import CORPUS

from ckptool.errors import CkptError
from ckptool.formats import assemble
from ckptool.formats.audit_users import lost_tensors
from ckptool.formats.entries import contents
from ckptool.pickles.nodes import Tup
from ckptool.verbs.verify_torch import loading


@pytest.fixture(autouse=True)
def _all_are_many(monkeypatch):
    monkeypatch.setattr(assemble, "_MANY", -1)


def told(read):
    """All that is said of a file: its records, its values, how torch loads it; or the refusal."""
    try:
        found = read()
        return repr((found._replace(handle=None, sources=()), contents(found), loading(found)))
    except CkptError as error:
        return type(error), str(error), error.offset, error.key, error.member


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.pth")), ids=lambda path: path.stem)
def test_what_is_said_of_a_fixture(path):
    assert told(lambda: read_path(path, keep=False)) == told(lambda: read_path(path))


HOSTILE = [
    label for label, case in CORPUS.items()
    if case.file == "net.pth" and case.seconds <= 1 and not label.startswith("file/")
    and "epoch" not in label
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("label", HOSTILE)
def test_what_is_said_of_a_hostile_file(label):
    data = CORPUS[label].make()
    assert told(lambda: read_bytes(data, keep=False)) == told(lambda: read_bytes(data))


def test_what_a_plain_tensor_was_made_of_is_let_go():
    """Two nodes a tensor stay: its call, and the empty OrderedDict of its hooks."""
    data = saved(OrderedDict((f"w{i}", torch.ones(2, 3)) for i in range(50)))
    counts = {}
    for keep in (True, False):
        gc.collect()
        found = read_bytes(data, keep=keep)
        counts[keep] = sum(type(node) is Tup for node in gc.get_objects())
        assert [t.shape for t in found.tensors] == [(2, 3)] * 50
        del found
    assert counts[True] - counts[False] >= 4 * 50


@pytest.mark.filterwarnings("ignore:torch.quantize_per")
def test_the_tensor_that_a_lost_storage_is_a_part_of_is_named():
    """Scales and zero points, indices, what an attribute holds: none is the storage of the record."""
    scales, points = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1, 2, 3])
    net = torch.nn.Linear(2, 2)
    net.weight.mask = torch.ones(5)
    data = saved({
        "quantized": torch.quantize_per_channel(torch.ones(3, 2), scales, points, 0, torch.qint8),
        "sparse": torch.eye(2).to_sparse(), "w": net.weight,
    })  # fmt: skip
    lost = {}
    for keep in (True, False):
        found = read_bytes(data, keep=keep)
        keys = [storage.key for storage in found.storages]
        lost[keep] = [lost_tensors(found, {key: "damaged"}) for key in keys]
    names = ["quantized"] * 3 + ["sparse"] * 2 + ["w"] * 2
    assert lost[False] == lost[True] == [((name, "damaged"),) for name in names]


def test_what_others_need_of_a_tensor_stays():
    """Flags, parameters and hooks are read again: by whoever compares, or asks what torch refuses."""
    net = torch.nn.Linear(2, 2)
    net.weight.hidden = "attribute"
    data = saved({"conj": torch.ones(2, dtype=torch.complex64).conj(), "w": net.weight})
    found = read_bytes(data, keep=False)
    conj, parameter = (
        call for call in found.handle.walked.calls if call.told is not None and call.args
    )
    assert [conj.told.kind, parameter.told.kind] == ["conj", "parameter"]
