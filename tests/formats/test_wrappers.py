"""Wrapper subclasses: torch names their class twice, and the second time must be the first."""

import io
import pickletools
import zipfile

import pytest
import torch
from formats_support import read_bytes, saved
from torch.testing._internal.two_tensor import TwoTensor

from ckptool.formats.judge import Judge
from ckptool.pickles.walk import walk


def two_tensor_pickle():
    archive = saved({"t": TwoTensor(torch.arange(3.0), torch.ones(3))})
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        return archive, files.read("archive/data.pkl")


def codes(data):
    return {row.name for row in Judge(walk(data)).run() if row.verdict == "code"}


def second_naming(data):
    """The byte and size of the GET that fetches the class for the wrapper's own arguments."""
    ops = list(pickletools.genops(data))
    at = next(i for i, (op, arg, _) in enumerate(ops) if op.name == "GLOBAL" and "TwoTensor" in arg)
    slot = ops[at + 1][1]
    return next((pos, 2) for op, arg, pos in ops[at + 2 :] if op.name == "BINGET" and arg == slot)


def test_a_wrapper_made_of_its_own_class_is_known():
    archive, data = two_tensor_pickle()

    assert codes(data) == set()
    assert [t.kind for t in read_bytes(archive).tables[0].tensors] == ["subclass"]


@pytest.mark.parametrize("other", [b"cos\nsystem\n", b"ctorch.serialization\nload\n"])
def test_a_wrapper_made_of_another_class_could_run_code(other):
    _, data = two_tensor_pickle()
    at, size = second_naming(data)
    changed = data[:at] + other + data[at + size :]

    assert "torch._tensor._rebuild_from_type_v2" in codes(changed)
