"""How far two tensors are apart: torch, in double precision, is the oracle."""

from __future__ import annotations

import math

import pytest
import torch
from diff_support import FLOATS, raw, seen

from ckptool.checkpoint import DTYPES
from ckptool.values import distance
from ckptool.values.distance import Tolerance, measure

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")
INTS = sorted(name for name, row in DTYPES.items() if row.kind == "int")


def pair(dtype, count=5000, seed=1):
    """Two tensors close to each other, some elements the same, a few zeros."""
    torch.manual_seed(seed)
    one = torch.randn(count, dtype=torch.float64)
    two = one + 0.1 * torch.randn(count, dtype=torch.float64) * (torch.rand(count) < 0.7)
    one[:10] = 0
    two[5:15] = 0
    return one.to(getattr(torch, dtype)), two.to(getattr(torch, dtype))


def truth(one, two):
    """(differing, max abs, max rel, cosine, L2) of finite tensors, in doubles."""
    x, y = (
        t.to(torch.complex128 if t.is_complex() else torch.float64).flatten() for t in (one, two)
    )
    gap = (x - y).abs()
    ratio = gap / y.abs()
    flat = [torch.view_as_real(t).flatten() if t.is_complex() else t for t in (x, y)]
    cosine = torch.nn.functional.cosine_similarity(*flat, dim=0) if len(x) else None
    return (
        int((x != y).sum()), float(gap.max()), float(ratio[~ratio.isnan()].max()), float(cosine),
        float(torch.linalg.vector_norm(flat[0] - flat[1])),
    )  # fmt: skip


def close(found, one, two):
    """The distance is torch's."""
    differing, max_abs, max_rel, cosine, l2 = truth(one, two)
    assert found.differing_count == found.beyond_count == differing
    assert found.max_abs == pytest.approx(max_abs, rel=1e-6)
    assert found.max_rel == pytest.approx(max_rel, rel=1e-5)
    assert found.cosine == pytest.approx(cosine, rel=1e-9)
    assert found.l2 == pytest.approx(l2, rel=1e-6)
    assert (found.nan_a_count, found.nan_b_count, found.nan_at) == (0, 0, ())


# -- every dtype -------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", sorted(FLOATS - {"float8_e8m0fnu"}))
def test_floats(dtype):
    one, two = pair(dtype)
    assert (one.double() == two.double()).any()
    close(measure(seen(one), seen(two)), one.double(), two.double())


def test_scales_of_powers_of_two():
    one, two = (
        raw([0, 1, 127, 200, 254], "float8_e8m0fnu"),
        raw([0, 2, 127, 200, 254], "float8_e8m0fnu"),
    )
    found = measure(seen(one), seen(two))
    assert (found.differing_count, found.max_abs, found.max_rel) == (1, 2.0**-126, 0.5)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers(dtype):
    parts = [pair("float64", seed=seed) for seed in (1, 2)]
    one, two = (torch.complex(parts[0][i], parts[1][i]).to(getattr(torch, dtype)) for i in (0, 1))
    close(measure(seen(one), seen(two)), one, two)


def test_half_complex_numbers():
    halves = [t.half().view(-1, 2) for t in pair("float64")]
    found = measure(*(seen(torch.view_as_complex(t)) for t in halves))
    close(found, *(torch.view_as_complex(t.double()) for t in halves))


def test_truth_values_count_as_zero_and_one():
    one, two = torch.tensor([True, False, True, True]), torch.tensor([True, True, False, True])
    found = measure(seen(one), seen(two))
    assert (found.differing_count, found.max_abs, found.l2) == (2, 1, math.sqrt(2))
    assert found.cosine == pytest.approx(2 / 3)
    assert type(found.max_abs) is int


@pytest.mark.parametrize("dtype", INTS)
def test_integers_are_exact_also_at_the_ends_of_their_range(dtype):
    info = torch.iinfo(getattr(torch, dtype))
    rows = [(0, 0), (info.max, info.max), (info.min, info.max), (info.max, info.max - 1), (3, 5)]
    size = DTYPES[dtype].size_bytes
    one, two = (raw([row[side] % (1 << 8 * size) for row in rows], dtype) for side in (0, 1))
    found = measure(seen(one), seen(two))
    assert found.differing_count == 3
    assert found.max_abs == info.max - info.min
    assert type(found.max_abs) is int


@pytest.mark.parametrize(("dtype", "code"), [("quint8", "uint8"), ("qint32", "int32"), ("bits8", "uint8"), ("quint4x2", "uint8")])  # fmt: skip
def test_what_has_no_numbers_goes_by_raw_codes(dtype, code):
    one = torch.arange(6).to(getattr(torch, code))
    two = one.clone()
    two[4] += 3
    found = measure(seen(one, dtype=dtype), seen(two, dtype=dtype))
    assert (found.differing_count, found.max_abs) == (1, 3)


# -- two dtypes --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("left", "right"),
    [("float32", "float16"), ("bfloat16", "float64"), ("float32", "int32"), ("int8", "int64"),
     ("uint8", "bool"), ("complex64", "float32"), ("float8_e5m2", "bfloat16")],
)  # fmt: skip
def test_two_dtypes_are_measured_as_numbers(left, right):
    torch.manual_seed(3)
    wide = (
        torch.randint(0, 2, (400,)).double() if "bool" in right else torch.randn(400).double() * 9
    )
    one, two = wide.to(getattr(torch, left)), (wide * 1.01).to(getattr(torch, right))
    close(measure(seen(one), seen(two)), *(
        (one, two.to(torch.complex128)) if "complex" in left else (one.double(), two.double())
    ))  # fmt: skip


def test_signed_and_unsigned_64_bit_integers_are_compared_exactly():
    one = torch.tensor([-1, 5, 2**62])
    two = raw([2**64 - 1, 5, 2**62 + 1], "uint64")
    found = measure(seen(one), seen(two))
    assert (found.differing_count, found.max_abs) == (2, 2**64)


# -- NaN and infinity --------------------------------------------------------------------------
def test_nan_is_equal_to_nan_and_its_places_are_told():
    one = torch.arange(20.0).view(4, 5)
    two = one.clone() + 0.5
    one[0, 1] = two[0, 1] = one[2, 2] = two[3, 4] = two[3, 3] = float("nan")
    found = measure(seen(one), seen(two))
    assert (found.nan_a_count, found.nan_b_count) == (2, 3)
    assert found.nan_at == (12, 18, 19)
    assert found.differing_count == 19
    assert found.max_abs == 0.5
    assert found.cosine == pytest.approx(
        float(
            torch.cosine_similarity(*(t[~(one.isnan() | two.isnan())] for t in (one, two)), dim=0)
        )
    )
    permuted = measure(seen(one.t().contiguous().t()), seen(two.t().contiguous().t()))
    assert permuted.nan_at == found.nan_at


def test_equal_infinities_are_equal_and_others_are_not():
    inf = float("inf")
    one, two = torch.tensor([inf, -inf, inf, 1.0]), torch.tensor([inf, inf, 2.0, 1.0])
    found = measure(seen(one), seen(two))
    assert (found.differing_count, found.max_abs) == (2, inf)
    assert (found.cosine, found.l2) == (pytest.approx(1.0), 0.0)


def test_nan_inside_equal_blocks_is_counted_on_both_sides():
    one = torch.zeros(4)
    one[1] = float("nan")
    found = measure(seen(one), seen(one.clone()))
    assert (found.differing_count, found.nan_a_count, found.nan_b_count) == (0, 1, 1)
    assert found.cosine is None


# -- edges -------------------------------------------------------------------------------------
def test_relative_to_zero_is_infinite_and_zero_to_zero_is_nothing():
    found = measure(seen(torch.tensor([0.0, 0.0])), seen(torch.tensor([0.0, 1.0])))
    assert found.max_rel == 1.0
    found = measure(seen(torch.tensor([0.0, 1.0])), seen(torch.tensor([0.0, 0.0])))
    assert found.max_rel == float("inf")
    assert found.cosine is None


def test_empty_and_single_elements():
    empty = measure(seen(torch.zeros(0)), seen(torch.zeros(0)))
    assert (empty.differing_count, empty.max_abs, empty.cosine, empty.l2) == (0, 0, None, 0.0)
    one = measure(seen(torch.tensor(2.0)), seen(torch.tensor(-2.0)))
    assert (one.max_abs, one.max_rel, one.cosine, one.l2) == (4.0, 2.0, -1.0, 4.0)


def test_tiny_and_huge_numbers_keep_their_cosine():
    small = torch.tensor([1e-30, 2e-30, -1e-30])
    assert measure(seen(small), seen(small * 2)).cosine == pytest.approx(1.0)
    huge = torch.tensor([1e30, 2e30, -1e30])
    found = measure(seen(huge), seen(huge * torch.tensor([1, 1, -1])))
    assert found.cosine == pytest.approx(4 / 6)
    assert found.l2 == pytest.approx(2e30)
    beyond = torch.tensor([1e200, -1e200], dtype=torch.float64)
    found = measure(seen(beyond), seen(beyond * 2))
    assert (found.cosine, found.l2) == (None, None)
    assert found.max_abs == 1e200


@pytest.mark.parametrize("count", [8191, 8192, 8193, distance.STEP, 2 * distance.STEP + 17])
def test_long_tensors_are_measured_whole(count):
    one, two = pair("float32", count)
    two[-1] = one[-1] + 50
    for left, right in ((one, two), (one.view(1, -1), two.view(1, -1))):
        close(measure(seen(left), seen(right)), one, two)
    stepped = torch.zeros(count, 2)
    stepped[:, 1] = two
    close(measure(seen(one), seen(stepped[:, 1])), one, two)


# -- torch.allclose's rule ---------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int16", "complex64"])
@pytest.mark.parametrize(
    ("atol", "rtol"), [(0.0, 0.0), (0.05, 0.0), (0.0, 0.3), (0.02, 0.1), (5.0, 0.0)]
)
def test_tolerances_are_those_of_isclose(dtype, atol, rtol):
    one, two = (t * 10 for t in pair("float64"))
    if "complex" in dtype:
        one, two = torch.complex(one, one.flip(0)), torch.complex(two, two.flip(0))
    else:
        one[3], two[4], one[5], two[5], one[6] = *4 * [float("nan")], float("inf")
        if dtype == "int16":
            one, two = one.nan_to_num(0, 0, 0), two.nan_to_num(0, 0, 0)
    one, two = one.to(getattr(torch, dtype)), two.to(getattr(torch, dtype))
    found = measure(seen(one), seen(two), Tolerance(atol, rtol))
    wide = torch.complex128 if "complex" in dtype else torch.float64
    truly = torch.isclose(one.to(wide), two.to(wide), rtol=rtol, atol=atol, equal_nan=True)
    assert found.beyond_count == int((~truly).sum())
    assert found.differing_count >= found.beyond_count


def test_infinities_are_close_to_nothing_else():
    inf = float("inf")
    one, two = torch.tensor([inf, 1.0, -inf]), torch.tensor([1.0, inf, -inf])
    for rule in (Tolerance(1e9, 0.0), Tolerance(0.0, 0.5), Tolerance(1.0, 1.0)):
        truly = torch.isclose(one, two, rtol=rule.rtol, atol=rule.atol, equal_nan=True)
        assert measure(seen(one), seen(two), rule).beyond_count == int((~truly).sum()) == 2
