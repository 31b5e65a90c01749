"""Casts against torch: every pattern of the small formats, every edge of the large ones."""

import random
import sys
import tracemalloc
from functools import cache

import numpy as np
import pytest
import torch
from values_support import ENCODINGS, bits_of, bytes_of, encode, run

from ckptool.checkpoint import DTYPES
from ckptool.errors import CrcMismatch, Unsupported
from ckptool.plans import Made
from ckptool.spans import Span
from ckptool.values import CASTABLE, RECIPES, CastCounts
from ckptool.values.floats import FLOATS, first_beyond

SMALL = [name for name, made in FLOATS.items() if made.size_bytes <= 2]
PAIRS = [(source, target) for source in FLOATS for target in FLOATS]


def tensor_of(patterns, name):
    """A torch tensor of these patterns (a numpy array of unsigned integers)."""
    flat = torch.from_numpy(patterns.view("u1").copy())
    return flat.view(getattr(torch, name))


@cache
def patterns_of(name):
    """All patterns of an 8- or 16-bit format; for the others those near anything of interest."""
    wide = FLOATS[name].size_bytes
    if wide <= 2:
        return np.arange(1 << 8 * wide).astype(f"u{wide}")
    rng = np.random.default_rng(5)
    known = [tensor_of(patterns_of(small), small).double().numpy() for small in SMALL]
    values = np.unique(np.abs(np.concatenate(known)))
    if wide == 8:  # and what float32 rounds, near its own values
        values = values[:: max(1, len(values) // 40_000)]
        singles = rng.integers(0, 0x7F800000, 20_000).astype("u4").view("f4").astype("f8")
        edge = np.array([0x7F7FFFFF, 1, 0x7FFFFF], "u4").view("f4").astype("f8")
        values = np.unique(np.concatenate([values, singles, edge, np.nextafter(edge, 0)]))
    with np.errstate(all="ignore"):
        middles = (values[1:] + values[:-1]) / 2
        bits = np.concatenate([values, middles]).astype(f"f{wide}").view(f"i{wide}")
    bits = np.unique(np.concatenate([bits + near for near in (-2, -1, 0, 1, 2)]))
    bits = bits[bits >= 0].astype(f"u{wide}")
    sign = bits.dtype.type(1 << (8 * wide - 1))
    anything = np.frombuffer(rng.bytes(wide * 100_000), f"u{wide}")
    return np.concatenate([bits, bits | sign, anything])


def cast(patterns, source, target, encoding="stored", view=None, crc=None):
    """(patterns of the target, counts)."""
    place, _ = encode(patterns.tobytes(), encoding, patterns.itemsize)
    size = patterns.nbytes
    shape, stride, offset = view or ((len(patterns),), (1,), 0)
    given = (encoding, source, target, size, shape, stride, offset, crc)
    wide = FLOATS[target].size_bytes
    data, counts = run(place, "cast", given, torch.Size(shape).numel() * wide)
    return np.frombuffer(data, f"u{wide}"), counts


def test_the_table_has_the_floats_of_torch_but_the_packed_one():
    floats = {name for name, dtype in DTYPES.items() if dtype.kind == "float"}
    assert floats - CASTABLE == {"float4_e2m1fn_x2"}
    assert set(FLOATS) == CASTABLE
    for name, made in FLOATS.items():
        assert made.size_bytes == DTYPES[name].size_bytes


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_pattern_is_what_torch_makes_of_it(source, target):
    patterns = patterns_of(source)
    given = tensor_of(patterns, source)
    made = given.to(getattr(torch, target))
    want = bits_of(made).numpy().view(f"u{made.element_size()}")
    got, counts = cast(patterns, source, target)
    nan = torch.isnan(given.double()).numpy()
    wrong = (got != want) & ~nan
    first = int(wrong.argmax())
    assert not wrong.any(), f"{patterns[first]:#x}: {got[first]:#x}, not {want[first]:#x}"
    assert torch.isnan(tensor_of(got, target)[nan].double()).all()
    if source in ("float32", "float64", "float16") and target == "bfloat16":
        # torch writes 0xffff where it converts many numbers at once, 0x7fc0 for a single one.
        assert set(want[nan].tolist()) <= {0xFFFF, 0x7FC0}
        assert set(got[nan].tolist()) == {0x7FC0}
    else:
        assert (got == want)[nan].all()
    assert counts == CastCounts(lost(given.double(), made, target), int(nan.sum()))


def lost(given, made, target):
    """Numbers out of the target's range, told by what torch made of them."""
    finite = torch.isfinite(given)
    after = made.double()
    if target == "float8_e4m3fn":  # torch writes the largest number; 464 is the tie to it
        return int((given.to(torch.float32).abs() > 464).sum())
    count = finite & ~torch.isfinite(after)
    if not FLOATS[target].has_infinity:
        count |= torch.isinf(given)
    return int(count.sum())


def test_formats_without_infinity():
    has = {name for name, made in FLOATS.items() if made.has_infinity}
    assert has == {"float64", "float32", "float16", "bfloat16", "float8_e5m2"}


@pytest.mark.parametrize(
    ("source", "target", "limit"),
    [
        ("float32", "float16", 0x477FF000),  # 65520
        ("float32", "bfloat16", 0x7F7F8000),
        ("float32", "float8_e4m3fn", 0x43E80001),  # just above 464
        ("float32", "float8_e5m2", 0x47700000),  # 61440
        ("float32", "float8_e4m3fnuz", 0x43780000),  # 248
        ("float32", "float8_e8m0fnu", 0x7F400000),
        ("float64", "float32", 0x47EFFFFFF0000000),
        ("float64", "float16", 0x40EFFDFFF0000000),  # twice rounded: a little below 65520
        ("float16", "bfloat16", 0x7C00),
        ("bfloat16", "float16", 0x4780),
        ("float32", "float64", 0x7F800000),
    ],
)
def test_where_a_range_ends(source, target, limit):
    assert first_beyond(source, target) == limit
    below, at = (cast(np.array([bits], f"u{FLOATS[source].size_bytes}"), source, target)[1]
                 for bits in (limit - 1, limit))  # fmt: skip
    assert below == CastCounts(0, 0)
    infinite = limit == FLOATS[source].end
    assert at == CastCounts(0 if infinite else 1, 0)


@pytest.mark.parametrize("target", ["bfloat16", "float16", "float8_e5m2", "float32", "float64"])
@pytest.mark.parametrize("sign", [0, 0x80000000])
def test_one_odd_number_among_many_is_counted(target, sign):
    """The quick look at a block sees it wherever it stands, with either sign."""
    for odd, counts in ((0x7FC00000, (0, 1)), (0x7F800001, (0, 1)), (0x7F800000, (0, 0)),
                        (0x7F7FFFFF, (int(target not in ("float32", "float64")), 0))):  # fmt: skip
        for place in (0, 777, 299_999):
            patterns = np.full(300_000, 0x3F812345, "u4")
            patterns[place] = odd | sign
            got, have = cast(patterns, "float32", target)
            assert have == counts
            assert (np.delete(got, place) == got[place - 1]).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("source", "target"), [("float32", "bfloat16"), ("float64", "float16"),
                                                ("bfloat16", "float8_e4m3fn"),
                                                ("float8_e5m2", "float32")])  # fmt: skip
def test_strided_views_in_every_encoding(encoding, source, target):
    rng = random.Random(encoding)
    wide = FLOATS[source].size_bytes
    numbers = torch.randn(30_000, generator=torch.Generator().manual_seed(1)).to(
        getattr(torch, source)
    )
    patterns = np.frombuffer(bytes_of(numbers), f"u{wide}")
    _, crc = encode(patterns.tobytes(), encoding, wide)
    for view in (((150, 200), (1, 150), 0), ((7, 30, 11), (500, 3, 0), 20), ((30_000,), (1,), 0),
                 ((rng.randint(1, 100), 5), (9, 1), rng.randint(0, 99))):  # fmt: skip
        got, counts = cast(patterns, source, target, encoding, view, crc)
        want = torch.as_strided(numbers, *view).to(getattr(torch, target))
        assert got.tobytes() == bytes_of(want)
        assert counts == (0, 0)
        with pytest.raises(CrcMismatch, match=r"'fc\.weight'"):
            cast(patterns, source, target, encoding, view, crc ^ 1)


def test_an_empty_tensor_counts_nothing():
    got, counts = cast(np.zeros(4, "u4"), "float32", "bfloat16", view=((0, 3), (3, 1), 0))
    assert (len(got), counts) == (0, CastCounts(0, 0))


@pytest.mark.parametrize(("source", "target"), [("int64", "float32"), ("float32", "int8"),
                                                ("float4_e2m1fn_x2", "float32"),
                                                ("complex64", "bfloat16")])  # fmt: skip
def test_what_is_no_float_is_refused(source, target):
    given = ("stored", source, target, 8, (1,), (1,), 0, None)
    made = Made(((0, Span(0, 8)),), "cast", given, 4, None, "step")
    with pytest.raises(Unsupported, match=f"a cast from {source} to {target}") as caught:
        list(RECIPES["cast"](None, made))
    assert caught.value.key == "step"


def test_the_names_of_castable_dtypes_cost_no_numpy():
    assert "numpy" not in vars(sys.modules["ckptool.values.floats"])


@pytest.mark.parametrize("target", ["bfloat16", "float16", "float8_e4m3fn", "float64"])
def test_a_cast_of_256_mib_takes_constant_memory(target):
    size = 1 << 28
    chunk = np.full(1 << 18, 0x3F812345, "u4").tobytes()
    count = size // 4
    given = ("stored", "float32", target, size, (count,), (1,), 0, None)
    made = Made(((0, Span(0, size)),), "cast", given, count * FLOATS[target].size_bytes)
    tracemalloc.start()
    try:
        have = sum(len(data) for data in RECIPES["cast"](lambda _, __, size: chunk[:size], made))
        assert have == made.size
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()
