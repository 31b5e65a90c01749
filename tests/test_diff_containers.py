"""diff over every container we read: against itself, against the same in another container."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import torch
from container_support import big_endian, records_of, rezipped
from diff_support import diff, tuned_pair, write_zip
from formats_support import archive, dictionary, pickled, tensor
from verbs_support import FIXTURES, TRUTHS

import ckptool
from ckptool.checkpoint import DTYPES
from ckptool.errors import CkptError, LimitExceeded
from ckptool.formats import entries
from ckptool.limits import Limits
from ckptool.verbs.inspect import opened

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")
BASE, TUNED = tuned_pair()
READABLE = sorted(name for name, truth in TRUTHS.items() if not truth.get("error"))
LOOSE = {"legacy_shared.pth", "tar_01x.pth", "views.pth"}
"""Tensors that share elements part in .safetensors, and are said to."""


@pytest.mark.parametrize("fixture", READABLE)
@pytest.mark.parametrize(
    "options", [{}, {"bytes": True, "values": True, "strict": True}], ids=("", "all")
)
def test_every_fixture_is_the_same_as_itself(fixture, options):
    found = diff(FIXTURES / fixture, FIXTURES / fixture, **options)
    assert found.same, str(found)
    assert found.explained_by == ()


@pytest.mark.parametrize("fixture", READABLE)
@pytest.mark.parametrize(
    "asked",
    [{"to": "zip"}, {"to": "legacy"}, {"add_prefix": "net"}, {"to_cpu": True}, {"compact": True}],
    ids=str,
)
def test_every_conversion_is_the_same_checkpoint(fixture, asked, tmp_path):
    try:
        ckptool.convert(FIXTURES / fixture, tmp_path / "out.pth", fsync=False, **asked)
    except CkptError:
        pytest.skip("convert refuses it")
    found = diff(FIXTURES / fixture, tmp_path / "out.pth")
    assert found.same, str(found)
    assert diff(FIXTURES / fixture, tmp_path / "out.pth", bytes=True).same


@pytest.mark.parametrize("fixture", READABLE)
def test_every_export_holds_the_same_tensors(fixture, tmp_path):
    try:
        ckptool.convert(FIXTURES / fixture, tmp_path / "out.safetensors", fsync=False)
    except CkptError:
        pytest.skip("convert refuses it")
    with opened(FIXTURES / fixture) as found:
        table = found.checkpoint.tables[found.checkpoint.weights or 0]
    at = ".".join(map(str, table.path)) or "."
    found = diff(FIXTURES / fixture, tmp_path / "out.safetensors", at=at)
    assert {word for row in found.changed for word in row.what} <= {"tie"}
    assert found.same is (fixture not in LOOSE), str(found)


def test_every_pair_of_fixtures_ends_in_a_sentence(tmp_path):
    """Whatever is compared with whatever, nothing breaks."""
    anchor = FIXTURES / "dp_cuda.pth"
    for fixture in READABLE:
        for options in ({}, {"values": True, "bytes": True, "strict": True}):
            found = diff(FIXTURES / fixture, anchor, **options)
            assert str(found)
            assert found.same is (fixture == "dp_cuda.pth")


# -- encodings ---------------------------------------------------------------------------------
def test_a_big_endian_file_holds_the_same_numbers(tmp_path):
    sd = {"f": torch.randn(5), "h": torch.randn(4).half(), "c": torch.randn(3, dtype=torch.complex64),
          "i": torch.arange(6), "b": torch.tensor([True, False])}  # fmt: skip
    a, b = write_zip(tmp_path / "a", sd), big_endian(tmp_path / "b.pth", sd)
    for options in ({}, {"bytes": True}, {"values": True}):
        found = diff(a, b, **options)
        assert found.same
        assert found.evidence in ("bytes", "values")
        assert "byte order" in found.explained_by
        assert diff(b, b, **options).same
    other = big_endian(tmp_path / "c.pth", {**sd, "i": torch.arange(6) + (torch.arange(6) == 3)})
    assert [(row.key, row.verdict.sameness.at) for row in diff(a, other).changed] == [("i", 3)]


def test_one_checksum_of_two_byte_orders_is_no_evidence(tmp_path):
    """The recorded bytes are the same, the numbers are not."""
    sd = {"i": torch.arange(1, 5)}
    a = rezipped(tmp_path / "a.pth", records_of(sd))
    b = rezipped(tmp_path / "b.pth", {**records_of(sd), "byteorder": b"big"})
    found = diff(a, b)
    assert [row.what for row in found.changed] == [("value",)]
    assert diff(b, b).same


def test_a_deflated_file(tmp_path):
    import zipfile

    a = write_zip(tmp_path / "a", BASE)
    b = rezipped(tmp_path / "b.pth", records_of(BASE), zipfile.ZIP_DEFLATED)
    for options in ({}, {"bytes": True}):
        assert diff(a, b, **options).same
    c = rezipped(tmp_path / "c.pth", records_of(TUNED), zipfile.ZIP_DEFLATED)
    assert {row.key for row in diff(a, c).changed} == {
        row.key for row in diff(a, write_zip(tmp_path / "d", TUNED)).changed
    }


@pytest.mark.parametrize("protocol", range(1, 6))
def test_bare_pickles_of_tensors_and_of_arrays(protocol, tmp_path):
    """Protocol 2 spells bytes as text; some of it has no span in the file."""
    sd = {key: t for key, t in BASE.items() if key.startswith(("layer", "bn"))}
    a = write_zip(tmp_path / "a", sd)
    files = {"tensors": sd, "arrays": {key: t.numpy() for key, t in sd.items()}}
    for what, obj in files.items():
        b = tmp_path / f"{what}.pkl"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            b.write_bytes(pickle.dumps(obj, protocol))
        for options in ({}, {"values": True, "bytes": True}):
            assert diff(a, b, **options).same
            assert diff(b, b, **options).same
    changed = {**files["arrays"], "bn1.weight": np.full(4, 7, "f4")}
    b.write_bytes(pickle.dumps(changed, protocol))
    assert [row.key for row in diff(a, b).changed] == ["bn1.weight"]
    assert [row.key for row in diff(tmp_path / "tensors.pkl", b).changed] == ["bn1.weight"]


@pytest.mark.parametrize("dtype", sorted(n for n, d in DTYPES.items() if d.torch_storage is None and hasattr(torch, n) and d.kind != "bits"))  # fmt: skip
def test_dtypes_without_a_typed_storage(dtype, tmp_path):
    data = torch.arange(64, dtype=torch.uint8)
    a = write_zip(tmp_path / "a", {"x": data.clone().view(getattr(torch, dtype))})
    data[40] = 3
    b = write_zip(tmp_path / "b", {"x": data.view(getattr(torch, dtype))})
    size = DTYPES[dtype].size_bytes
    for options in ({}, {"values": True}):
        assert diff(a, a, bytes=True, **options).same
        found = diff(a, b, **options)
        assert [row.verdict.sameness.at for row in found.changed] == [40 // size]
    assert found.changed[0].verdict.distance.differing_count == 1


def test_numbers_that_cannot_be_read_are_not_called_the_same(tmp_path):
    """Protocol 0 writes arrays in a spelling we do not read."""
    b = tmp_path / "b.pkl"
    b.write_bytes(pickle.dumps({"w": np.ones(2, "f4"), "v": np.ones(3, "f4")}, 0))
    one, two = diff(b, b).changed
    assert one.what == two.what == ("value",)
    assert one.verdict.text == "the numbers of a and b cannot be read"


# -- whole models ------------------------------------------------------------------------------
def test_a_whole_model_is_compared_by_its_state_dict():
    found = diff(FIXTURES / "whole_model.pth", FIXTURES / "net_plain.pth")
    assert found.same
    assert "a whole pickled model -> state_dict" in found.explained_by
    assert "attributes-not-compared" in {note.slug for note in found.notes}
    wrapped = diff(FIXTURES / "whole_model.pth", FIXTURES / "whole_model_dp.pth")
    assert wrapped.same
    assert wrapped.extras == ()


# -- hostile -----------------------------------------------------------------------------------
def doubled(levels):
    """A list of two references to a list of two references …: 2 ** levels values in no bytes."""
    body = b"]K\1a"
    for at in range(levels):
        slot = b"q" + bytes([at + 10])
        body = body + slot + b"0](h" + bytes([at + 10]) + b"h" + bytes([at + 10]) + b"e"
    return body


def test_a_pickle_that_spells_more_values_than_memory_holds():
    data = archive(
        pickled(dictionary(("state_dict", dictionary(("w", tensor()))), ("it", doubled(60))))
    )
    from ckptool.formats import read
    from ckptool.places import BytesSource

    with pytest.raises(LimitExceeded) as caught:
        entries.contents(read(BytesSource(data, "bomb.pth")), Limits(value_count=5000))
    assert caught.value.slug == "limit-values"


def test_calls_that_could_run_code_are_values_and_nothing_is_run():
    found = diff(FIXTURES / "evil.pth", FIXTURES / "evil.pth")
    assert found.same
    assert not diff(FIXTURES / "evil.pth", FIXTURES / "dp_cuda.pth").same
