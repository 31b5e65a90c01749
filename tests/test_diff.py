"""diff of a fine-tuned pair, in all pairings of container, prefix, device, dtype and stride: what
is said of every tensor is what torch says.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from diff_support import (
    WRITERS,
    cast,
    diff,
    prefixed,
    strided,
    training,
    tuned_pair,
    write_legacy,
    write_package,
    write_zip,
)

BASE, TUNED = tuned_pair()
PREFIXES, TAGS, DTYPES, LAYOUTS = (
    ("", "module."),
    ("cpu", "cuda:0"),
    (None, "bfloat16"),
    (False, True),
)
VARIANTS = list(product(PREFIXES, TAGS, DTYPES, LAYOUTS))
HOLDS_VALUES = ("zip", "legacy")


def variant(prefix, tag, dtype, layout):
    """The tuned state_dict in other clothes."""
    sd = cast(TUNED, getattr(torch, dtype)) if dtype else TUNED
    return prefixed(strided(sd) if layout else sd, prefix)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """path(container, side, variant), written once."""
    folder = tmp_path_factory.mktemp("pairs")
    known = {}

    def path(container, side, clothes=("", "cpu", None, False)):
        key = (container, side, clothes)
        if key not in known:
            sd = BASE if side == "base" else variant(*clothes)
            obj = training(sd, *((7, 0.1) if side == "base" else (9, 0.02)))
            known[key] = WRITERS[container](folder / f"f{len(known)}", obj, clothes[1])
        return known[key]

    return path


def same_numbers(one, two):
    """torch's word on two tensors of one dtype: NaN is NaN."""
    return torch.equal(one.isnan(), two.isnan()) and torch.equal(one.nan_to_num(), two.nan_to_num())


def truth(one, two):
    """{key: what differs} of two tensors' dicts, by torch."""
    found = {}
    for key in one:
        if key not in two:
            continue
        left, right = one[key], two[key]
        what = set()
        if left.shape != right.shape:
            what.add("shape")
        if left.dtype != right.dtype:
            what.add("dtype")
        if left.shape == right.shape and not same_numbers(left.to(right.dtype), right):
            what.add("value")
        found[key] = what
    return found


@pytest.mark.parametrize("one", WRITERS)
@pytest.mark.parametrize("two", WRITERS)
def test_every_tensor_is_what_torch_says(one, two, files):
    a = files(one, "base")
    for clothes in VARIANTS:
        prefix, tag, dtype, _ = clothes
        found = diff(a, files(two, "tuned", clothes))

        told = {row.key: set(row.what) for row in found.tensors}
        assert told == truth(BASE, cast(TUNED, getattr(torch, dtype)) if dtype else TUNED)
        assert [row.key for row in found.added] == ["extra.scale"]
        assert found.removed == ()
        assert not found.same
        values = {
            ".".join(map(str, row.path)): (row.a and row.a.value, row.b and row.b.value)
            for row in found.extras
        }
        held = {"epoch": (7, 9), "args.lr": (0.1, 0.02)}
        if one in HOLDS_VALUES and two in HOLDS_VALUES:
            assert values == held
        elif one in HOLDS_VALUES or two in HOLDS_VALUES:  # the other can hold no values
            assert set(values) == {"epoch", "args.lr", "args.arch"}
        else:
            assert values == {}
        words = "; ".join(found.explained_by)
        assert (f"strip '{prefix}'" in words) is bool(prefix)
        tagged = tag if two in HOLDS_VALUES else "cpu"
        assert ("device cpu -> cuda:0" in words) is (tagged == "cuda:0")
        assert ("container" in words) is (one != two)


@pytest.mark.parametrize("one", WRITERS)
@pytest.mark.parametrize("two", WRITERS)
def test_the_same_tensors_in_other_clothes_are_the_same(one, two, files):
    """Seen through: prefix, device, container, storage layout, order; not the dtype."""
    a = files(one, "tuned")
    for clothes in VARIANTS:
        found = diff(a, files(two, "tuned", clothes), at=None)
        assert found.same_tensors is (clothes[2] is None)
        if clothes[2] is None and (one in HOLDS_VALUES) == (two in HOLDS_VALUES):
            assert found.same
        if clothes[2]:
            assert found.rounding == "bfloat16"
            assert {row.what for row in found.changed} == {("dtype",)}


@pytest.mark.parametrize("two", WRITERS)
def test_distances_are_torchs(two, files):
    for layout in LAYOUTS:
        found = diff(
            files("zip", "base"), files(two, "tuned", ("module.", "cpu", None, layout)), values=True
        )
        for row in found.tensors:
            if row.pair.a.shape != row.pair.b.shape:
                assert row.verdict is None
                continue
            left, right = BASE[row.key].double(), TUNED[row.key].double()
            known = ~(left.isnan() | right.isnan())
            if row.verdict.distance is None:
                assert same_numbers(left, right)
                continue
            assert row.verdict.distance.max_abs == pytest.approx(
                float((left - right)[known].abs().max()), rel=1e-6
            )
            assert row.verdict.distance.differing_count == int(
                ((left != right) & ~(left.isnan() & right.isnan())).sum()
            )
            if row.verdict.distance.cosine is None:
                assert left[known].norm() * right[known].norm() == 0
                continue
            cosine = torch.cosine_similarity(left[known].flatten(), right[known].flatten(), dim=0)
            assert row.verdict.distance.cosine == pytest.approx(float(cosine), abs=1e-9)
        nan = {row.key: row.verdict.distance.nan_at for row in found.changed
               if row.verdict and row.verdict.distance and row.verdict.distance.nan_b_count}  # fmt: skip
        assert nan == {"layer3.0.bias": (2,)}


# -- evidence ----------------------------------------------------------------------------------
def test_checksums_are_trusted_and_bytes_prove(files, tmp_path):
    a = files("zip", "tuned")
    b = files("zip", "tuned", ("module.", "cuda:0", None, False))
    trusted, proven = diff(a, b), diff(a, b, bytes=True)
    assert (trusted.evidence, proven.evidence) == ("crc", "bytes")
    assert trusted.same
    assert proven.same

    data = bytearray(b.read_bytes())
    at = data.index(TUNED["layer1.0.weight"].numpy().tobytes())
    data[at] ^= 1
    damaged = tmp_path / "damaged.pth"
    damaged.write_bytes(data)
    assert diff(a, damaged).same  # its recorded checksum says so; verify knows better
    found = diff(a, damaged, bytes=True)
    assert [row.key for row in found.changed] == ["layer1.0.weight"]


def test_checksums_of_other_storages_are_no_evidence(tmp_path):
    """One checksum, another view: equal storages do not make equal tensors."""
    numbers = torch.arange(12.0)
    a = write_zip(tmp_path / "a", {"w": numbers.view(3, 4), "x": numbers.clone()[:6]})
    b = write_zip(tmp_path / "b", {"w": numbers.view(4, 3).t(), "x": numbers.clone()[6:]})
    found = diff(a, b)
    assert {row.key: row.what for row in found.changed} == {"w": ("value",), "x": ("value",)}
    assert found.evidence == "bytes"


def test_a_file_without_checksums_is_read(tmp_path, files):
    from torch.utils.serialization import config

    before = config.save.compute_crc32
    config.save.compute_crc32 = False
    try:
        b = write_zip(tmp_path / "b", training(TUNED, 9, 0.02))
    finally:
        config.save.compute_crc32 = before
    found = diff(files("zip", "tuned"), b)
    assert found.same
    assert found.evidence == "bytes"


def test_tolerances_decide_what_counts(files):
    a, b = files("zip", "base"), files("zip", "tuned", ("module.", "cpu", None, True))
    keys = [row.key for row in diff(a, b, atol=1.0).changed if "value" in row.what]
    assert keys == ["layer3.0.bias"]  # NaN is close to nothing
    assert "4 tensors within atol 1, rtol 0" in diff(a, b, atol=1.0).explained_by
    for atol, rtol in ((1e-3, 0.0), (0.0, 0.01), (5e-4, 1e-3)):
        found = diff(a, b, atol=atol, rtol=rtol)
        told = {row.key: "value" in row.what for row in found.tensors if row.verdict}
        assert told == {
            key: not torch.allclose(BASE[key], TUNED[key], rtol, atol, equal_nan=True)
            for key in told
        }


# -- ties --------------------------------------------------------------------------------------
def test_a_lost_tie_is_a_difference_and_is_named(tmp_path):
    a = write_zip(tmp_path / "a", BASE)
    loose = type(BASE)((key, tensor.clone()) for key, tensor in BASE.items())
    for b in (
        write_zip(tmp_path / "b", loose),
        write_legacy(tmp_path / "b", loose),
        write_package(tmp_path / "b", BASE),
    ):
        found = diff(a, b)
        assert {row.key: (row.what, row.ties) for row in found.changed} == {
            "out.weight": (("tie",), ("emb.weight", ""))
        }
    back = diff(tmp_path / "b.pth", a)
    assert [row.ties for row in back.changed] == [("", "emb.weight")]


def test_views_of_one_storage_are_a_tie_only_where_they_share_elements(tmp_path):
    room = torch.arange(20.0)
    apart = {"q": room[:6], "k": room[6:12], "v": room[12:]}
    a = write_zip(tmp_path / "a", apart)
    b = write_zip(tmp_path / "b", {key: t.clone() for key, t in apart.items()})
    found = diff(a, b)
    assert found.same
    assert "storage layout (3 tensors)" in found.explained_by

    near = write_zip(tmp_path / "c", {"q": room[:7], "k": room[6:12], "v": room[12:]})
    far = write_zip(tmp_path / "d", {"q": room[:7].clone(), "k": room[6:12], "v": room[12:]})
    assert [(row.key, row.ties) for row in diff(near, far).changed] == [("k", ("q", ""))]
