"""What the numbers of one tensor are like: torch, in double precision, is the oracle; exact
fractions where doubles are not enough.
"""

from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from diff_support import FLOATS, raw
from stats_support import agrees, wide
from values_support import bytes_of

from ckptool.checkpoint import DTYPES
from ckptool.values import statistics
from ckptool.values.statistics import counts_codes, has_statistics, tally

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:torch.quantize")
INTS = sorted(name for name, row in DTYPES.items() if row.kind == "int")
COMPLEX = ("complex32", "complex64", "complex128")


def told(tensor, cuts=(), times=1):
    """The statistics of a tensor whose bytes come in blocks, cut before these elements."""
    dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
    data, item = bytes_of(tensor), dtype.size_bytes
    found = tally(dtype)
    edges = [0, *cuts, len(data) // item]
    for low, high in pairwise(edges):
        found.add(memoryview(data)[low * item : high * item])
    return found.statistics(times)


def sample(dtype, count=5000, seed=3):
    torch.manual_seed(seed)
    kind = DTYPES[dtype].kind
    numbers = torch.randn(count, dtype=torch.float64) * (40 if kind == "int" else 1)
    if kind == "complex":
        numbers = torch.complex(numbers, torch.randn(count, dtype=torch.float64))
    if dtype.startswith("uint"):
        numbers = numbers.abs()
    numbers[:7] = 0
    return (numbers > 0 if kind == "bool" else numbers).to(getattr(torch, dtype))


# -- every dtype -------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [*sorted(FLOATS), *INTS, *COMPLEX, "bool"])
def test_every_dtype(dtype):
    tensor = sample(dtype)
    agrees(told(tensor), tensor)
    agrees(told(tensor, (1, 17, 2500)), tensor)


@pytest.mark.parametrize("dtype", [*sorted(FLOATS), *INTS, *COMPLEX, "bool"])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_elements(dtype, count):
    tensor = sample(dtype, 9)[7 : 7 + count]
    found = told(tensor)
    agrees(found, tensor)
    assert count or found == (0, 0, 0, 0, None, None, None, None, 0.0)


def test_all_patterns_of_one_and_two_bytes():
    for dtype in (*FLOATS, "int8", "uint8", "int16", "uint16", "bool"):
        size = DTYPES[dtype].size_bytes
        if size <= 2:
            tensor = raw(range(256**size), dtype)
            agrees(told(tensor), tensor.bool() if dtype == "bool" else tensor)


def test_counts_do_not_depend_on_how_codes_are_counted(monkeypatch):
    tensor = torch.randint(-128, 127, (1001,), dtype=torch.int8)
    one = told(tensor)
    monkeypatch.setattr(statistics, "_PAIRED", 10)
    assert told(tensor) == told(tensor, (500,)) == one


def test_more_than_one_step(monkeypatch):
    monkeypatch.setattr(statistics, "STEP", 100)
    for dtype in ("float32", "bfloat16", "int64", "complex64"):
        tensor = sample(dtype, 1234)
        agrees(told(tensor), tensor)


def test_bool_bytes_that_are_neither_0_nor_1_are_true():
    found = told(torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool))
    assert (found.min, found.max, found.mean, found.zero_count) == (0, 1, 0.75, 1)


def test_quantized_types_by_their_codes():
    for name in ("qint8", "quint8", "qint32"):
        numbers = torch.randn(100) * 3
        q = torch.quantize_per_tensor(numbers, 0.05, 3, getattr(torch, name))
        found = tally(DTYPES[name])
        found.add(q.int_repr().numpy().tobytes())
        agrees(found.statistics(), q.int_repr())
        assert counts_codes(DTYPES[name])


def test_four_bit_floats():
    """0.5 * 2^(e-1) * (2 + m), 0 and 0.5 below: OCP Microscaling Formats, E2M1."""
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    data = bytes(random.Random(1).randrange(256) for _ in range(999))
    found = tally(DTYPES["float4_e2m1fn_x2"])
    found.add(data)
    truth = torch.tensor([values[c] for byte in data for c in (byte & 15, byte >> 4)])
    agrees(found.statistics(), truth.double())


def test_what_has_no_numbers():
    without = {name for name, row in DTYPES.items() if not has_statistics(row)}
    assert without == {
        "quint4x2", "quint2x4", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    }  # fmt: skip


# -- numbers that are none ---------------------------------------------------------------------
ODD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("dtype", sorted({*FLOATS, *COMPLEX} - {"float8_e8m0fnu"}))
def test_nan_and_infinity_are_counted_and_left_out(dtype):
    """Where a format has no infinity, torch makes NaN or its largest number of one."""
    torch.manual_seed(1)
    numbers = torch.randn(300, dtype=torch.float64)
    numbers[torch.randperm(300)[:30]] = torch.tensor(ODD * 10, dtype=torch.float64)
    if dtype in COMPLEX:
        numbers = torch.view_as_complex(numbers.view(-1, 2).contiguous())
    tensor = numbers.to(getattr(torch, dtype))
    assert not torch.isfinite(wide(tensor)).all()
    agrees(told(tensor), tensor)
    agrees(told(tensor, (1, 100)), tensor)


def test_a_complex_number_may_be_nan_and_infinite():
    tensor = torch.tensor([complex(math.nan, math.inf), 1 + 2j, complex(0, math.nan)])
    found = told(tensor)
    assert (found.nan_count, found.inf_count, found.zero_count) == (2, 1, 0)
    assert (found.mean, found.std, found.norm) == (1 + 2j, None, pytest.approx(5**0.5))


@pytest.mark.parametrize("dtype", ["float32", "float8_e5m2", "complex64"])
def test_nothing_finite(dtype):
    found = told(torch.tensor(ODD).to(getattr(torch, dtype)))
    assert found == (3, 0, 1, 2, None, None, None, None, None)


def test_negative_zero_is_zero():
    for dtype in ("float32", "float8_e5m2"):
        found = told(torch.tensor([-0.0, -0.0]).to(getattr(torch, dtype)))
        assert found.zero_count == 2
        assert [math.copysign(1, end) for end in (found.min, found.max)] == [1, 1]


def test_signalling_nan_is_counted_without_a_warning():
    assert told(raw([0x7F800001, 0x3F800000], "float32")).nan_count == 1
    assert told(raw([0x7C01, 0x3C00], "float16")).nan_count == 1


# -- precision ---------------------------------------------------------------------------------
def exact(values):
    """(mean, std, norm) of whole or floating numbers, rounded once."""
    rows = [Fraction(value) for value in values]
    mean = sum(rows) / len(rows)
    spread = sum((row - mean) ** 2 for row in rows)
    return float(mean), root(spread / (len(rows) - 1)), root(sum(row * row for row in rows))


def root(fraction):
    """The square root of a fraction of any size, in double precision; None out of range."""
    if not fraction:
        return 0.0
    shift = (fraction.numerator.bit_length() - fraction.denominator.bit_length()) // 2
    scaled = math.sqrt(float(fraction / Fraction(4) ** shift))
    try:
        return math.ldexp(scaled, shift)
    except OverflowError:
        return None


def is_exact(tensor, cuts=(), rel=1e-13):
    found = told(tensor, cuts)
    values = tensor.tolist()
    mean, std, norm = exact(values)
    most = max(map(abs, values))
    assert found.mean == pytest.approx(mean, rel=rel, abs=most * 1e-15)
    assert found.std == pytest.approx(std, rel=rel)
    assert found.norm == (norm and pytest.approx(norm, rel=rel))
    assert (found.min, found.max) == (min(values), max(values))


def test_a_small_spread_far_from_zero():
    """Where float32 sums, and sums of squares in doubles, have no digit left."""
    torch.manual_seed(2)
    near = 1e8 + torch.randint(0, 3, (4000,)).double()
    is_exact(near)
    is_exact(near, (1, 1999, 2000))
    is_exact((16_777_216 + 2 * torch.randint(0, 3, (4000,))).float())
    is_exact((1000 + torch.randn(4000) * 1e-3).float(), (77,))


def test_one_number_over_and_over():
    for dtype in ("float32", "float64", "bfloat16", "int64"):
        found = told(torch.full((1000,), 3).to(getattr(torch, dtype)), (10,))
        assert (found.mean, found.std, found.norm) == (3, 0, pytest.approx(3 * 1000**0.5))
    third = told(torch.full((1000,), 1 / 3), (10,))
    assert (third.std, third.mean) == (0, torch.tensor(1 / 3).item())


@pytest.mark.parametrize(
    "values",
    [
        [1e300, 2e300, -3e300, 5.0],
        [1e-300, 2e-300, 5e-300],
        [0.0, 0.0, 3e-310, 5e-324],
        [1e-200, 1e200, 1.0, 0.0],
        [1.5e308, -1.5e308, 1.5e308],
        [1e170] * 3 + [1e171],
        [1e-170, 3e-170, 1.0],
    ],
    ids=str,
)
def test_near_the_ends_of_a_doubles_range(values):
    tensor = torch.tensor(values, dtype=torch.float64)
    for cuts in ((), (1,), (1, 2)):
        is_exact(tensor, cuts, rel=1e-12)
    flat = torch.view_as_complex(torch.stack([tensor, tensor.flip(0)], 1))
    found = told(flat, (1,))
    norm = exact([*values, *values])[2]
    assert found.norm == (norm and pytest.approx(norm, rel=1e-12))


def test_out_of_range_is_none():
    found = told(torch.tensor([1.7e308, -1.7e308] * 50, dtype=torch.float64))
    assert (found.mean, found.norm) == (0, None)
    assert found.std == pytest.approx(exact([1.7e308, -1.7e308] * 50)[1]) != math.inf


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("int64", [2**60 + n for n in (0, 1, 5, 7, 7)]),
        ("int64", [-(2**63), 2**63 - 1, 0, 1]),
        ("int64", [-(2**62) - 3, -(2**62), -(2**62) + 9]),
        ("uint64", [2**64 - 1, 2**64 - 2, 2**64 - 9]),
        ("uint64", [0, 2**64 - 1, 2**63, 3]),
        ("int64", [2**53 + 1, 2**53 + 3]),
        ("int64", [2**53 - 1, 2**53 - 3, 2**53]),
        ("int64", [-(2**63)] * 3),
        ("int32", [-(2**31), 2**31 - 1, 5]),
        ("uint32", [2**32 - 1, 2**32 - 4, 7]),
    ],
    ids=str,
)
def test_whole_numbers_that_are_no_doubles(dtype, values):
    tensor = torch.from_numpy(np.array(values, dtype))
    for cuts in ((), (1,), (2,)):
        is_exact(tensor, cuts)


def test_blocks_of_any_size_tell_the_same():
    torch.manual_seed(4)
    tensor = (torch.randn(3000) * torch.logspace(-3, 3, 3000)).double() + 50
    cuts = sorted(random.Random(2).sample(range(1, 3000), 200))
    one, many = told(tensor), told(tensor, cuts)
    assert many[:6] == one[:6]
    assert many[6:] == pytest.approx(one[6:], rel=1e-13)


# -- joining, repeating ------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float32", "int64", "int8", "float8_e4m3fn", "complex64"])
def test_tallies_join(dtype):
    tensor = sample(dtype, 1000)
    if tensor.is_floating_point() or tensor.is_complex():
        tensor[3] = math.nan
    parts = [tensor[:0], tensor[:1], tensor[1:600], tensor[600:], tensor[:0]]
    total = tally(DTYPES[dtype])
    for part in parts:
        other = tally(DTYPES[dtype])
        if len(part):
            other.add(bytes_of(part))
        total.join(other)
    agrees(total.statistics(), tensor)


@pytest.mark.parametrize("dtype", ["float32", "int64", "int8", "complex64"])
def test_repeated_elements(dtype):
    tensor = sample(dtype, 50)
    agrees(told(tensor, times=7), tensor.repeat(7))


def test_a_complex_mean_in_json_is_a_pair():
    found = told(torch.tensor([1 + 2j, 3 - 1j])).to_dict()
    assert found["mean"] == [2.0, 0.5]
    assert list(found) == [
        "element_count", "zero_count", "nan_count", "inf_count", "min", "max", "mean", "std", "norm",
    ]  # fmt: skip
