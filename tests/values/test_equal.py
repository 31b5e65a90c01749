"""Whether two tensors hold the same numbers: torch says what is the same, whatever the layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diff_support import FLOATS, Memory, raw, seen
from values_support import ENCODINGS

from ckptool.checkpoint import DTYPES
from ckptool.errors import LimitExceeded, Unsupported
from ckptool.values import equal
from ckptool.values.equal import Seen, blocks, once, place, rounds_to, runs, same, spread

EVERY = sorted(name for name in DTYPES if hasattr(torch, name) and not name.startswith(("int1", "int2")))  # fmt: skip
WIDE = [name for name in EVERY if DTYPES[name].kind in ("float", "int", "complex", "bool")]


def bits(dtype, count, seed=0):
    """A tensor of random bits (bool: 0 and 1)."""
    generator = torch.Generator().manual_seed(seed)
    size = DTYPES[dtype].size_bytes
    high = 2 if dtype == "bool" else 256
    data = torch.randint(0, high, (count * size,), generator=generator, dtype=torch.uint8)
    return data.view(getattr(torch, dtype))


def truly_same(one, two):
    """torch's word: equal, with NaN equal to NaN."""
    if one.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        return torch.equal(one.isnan(), two.isnan()) and torch.equal(
            one.nan_to_num(), two.nan_to_num()
        )
    return torch.equal(one, two)


pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


# -- every dtype -------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", WIDE)
def test_a_tensor_is_itself_and_differs_where_one_element_does(dtype):
    one = bits(dtype, 100)
    one.view(torch.uint8)[37 * one.element_size() : 38 * one.element_size()] = 0  # no NaN there
    two = one.clone()
    assert same(seen(one), seen(two)) == equal.Sameness(True)

    two.view(torch.uint8)[37 * one.element_size()] ^= 1
    found = same(seen(one), seen(two))

    assert (found.equal, found.at) == (False, 37)


@pytest.mark.parametrize("dtype", ["quint8", "qint8", "qint32"])
def test_quantized_tensors_go_by_their_codes(dtype):
    codes = torch.arange(-3, 9).to(
        {"quint8": torch.uint8, "qint8": torch.int8, "qint32": torch.int32}[dtype]
    )
    other = codes.clone()
    other[5] += 1
    one, two = (seen(t, kind="quantized", dtype=dtype) for t in (codes, other))
    assert same(one, one).equal
    assert same(one, two).at == 5


# -- numbers, not bits -------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", sorted(FLOATS - {"float8_e8m0fnu"}))
def test_signs_of_zero_are_no_difference(dtype):
    size = DTYPES[dtype].size_bytes
    one, two = raw([0, 1, 0], dtype), raw([0, 1, 1 << (8 * size - 1)], dtype)
    if dtype.endswith("fnuz"):  # there the pattern is NaN
        assert same(seen(one), seen(two)) == equal.Sameness(False, 2, "b")
    else:
        assert same(seen(one), seen(two)) == equal.Sameness(True, odd=True)


@pytest.mark.parametrize(
    ("dtype", "patterns"),
    [
        ("float32", (0x7FC00000, 0xFFC00000, 0x7F800001)),
        ("float16", (0x7E00, 0xFE01)),
        ("bfloat16", (0x7FC0, 0xFFFF)),
        ("float64", (0x7FF8 << 48, (0xFFF8 << 48) + 5)),
        ("float8_e4m3fn", (0x7F, 0xFF)),
        ("float8_e5m2", (0x7D, 0xFE)),
    ],
)
def test_nan_is_nan_whatever_its_bits(dtype, patterns):
    for first in patterns:
        for second in patterns:
            found = same(seen(raw([0, first], dtype)), seen(raw([0, second], dtype)))
            assert found == equal.Sameness(True, odd=first != second)
    assert same(seen(raw([0, patterns[0]], dtype)), seen(raw([0, 0], dtype))).nan == "a"
    assert same(seen(raw([0, 0], dtype)), seen(raw([0, patterns[0]], dtype))).nan == "b"


def test_complex_numbers_with_a_nan_part():
    nan = float("nan")
    one = torch.tensor([complex(1, 2), complex(nan, 0), complex(0, nan)])
    two = torch.tensor([complex(1, 2), complex(0, nan), complex(nan, 5)])
    assert same(seen(one), seen(two)).equal
    assert same(seen(one), seen(two + 1)).at == 0


@pytest.mark.parametrize("kind", ["conj", "neg"])
def test_a_flag_changes_what_the_bytes_mean(kind):
    one = torch.tensor([complex(1, 2), complex(3, 0)])
    shown = one.conj() if kind == "conj" else -one
    plain = shown.resolve_conj().clone()
    assert same(seen(one, kind=kind), seen(plain)).equal
    assert same(seen(plain), seen(one, kind=kind)).equal
    assert same(seen(one, kind=kind), seen(one, kind=kind)).equal
    assert same(seen(one, kind=kind), seen(one)).at == 0


# -- every layout ------------------------------------------------------------------------------
def layouts(numbers):
    """The same numbers in different places of different storages."""
    wide = torch.zeros(numbers.numel() * 2 + 5, dtype=numbers.dtype)
    step = wide[5:].as_strided(numbers.shape, [2 * s for s in numbers.stride()], 5)
    step.copy_(numbers)
    inside = torch.zeros(numbers.numel() + 9, dtype=numbers.dtype)
    inside[4 : 4 + numbers.numel()] = numbers.flatten()
    return {
        "contiguous": numbers,
        "transposed": numbers.transpose(0, -1).contiguous().transpose(0, -1),
        "stepped": step,
        "inside": inside[4 : 4 + numbers.numel()].view(numbers.shape),
    }


LAYOUTS = ("contiguous", "transposed", "stepped", "inside")


@pytest.mark.parametrize("one", LAYOUTS)
@pytest.mark.parametrize("two", LAYOUTS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_layout_and_encoding_do_not_matter_and_the_place_is_right(one, two, encoding):
    numbers = torch.arange(2 * 5 * 7, dtype=torch.int32).view(2, 5, 7) * 3 - 50
    other = numbers.clone()
    left = seen(layouts(numbers)[one])
    assert same(left, seen(layouts(other)[two], encoding)).equal

    other[1, 3, 2] += 1
    for found in (
        same(left, seen(layouts(other)[two], encoding)),
        same(seen(layouts(other)[two], encoding), left),
    ):
        assert (found.equal, found.at) == (False, 35 + 3 * 7 + 2)


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (1, 1, 4), (0,), (2, 0)])
def test_scalars_and_sizes_of_one_and_zero(shape):
    one = torch.randn(shape)
    assert same(seen(one), seen(one.clone())).equal
    if one.numel():
        assert same(seen(one), seen(one + 1)).at == 0


def test_an_expanded_tensor_is_the_same_as_one_that_is_written_out():
    one = torch.tensor([[1.0], [2.0]]).expand(2, 3)
    assert same(seen(one), seen(one.contiguous())).equal
    other = one.clone()
    other[1, 1] = 7
    assert same(seen(one), seen(other)).at == 4


@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, 2500])
def test_blocks_cover_every_element_once(count):
    one = torch.arange(count, dtype=torch.float64)
    stepped = torch.zeros(count, 2, dtype=torch.float64)[:, 0]
    stepped.copy_(one)
    for other in (one, stepped):
        have, at = b"", 0
        for block in blocks(seen(one), seen(other), 8000):  # its buffers are used again
            assert block.at == at
            assert block.alike
            assert block.left == block.right
            have += block.left
            at += len(block.left) // 8
        assert have == one.numpy().tobytes()


def test_a_difference_in_the_last_block_of_many_is_found():
    one = torch.zeros(300_000)
    two = one.clone()
    two[-1] = 1
    assert same(seen(one), seen(two)).at == 299_999
    assert same(seen(one), seen(two.view(600, 500).t().contiguous().t().reshape(-1))).at == 299_999


def test_reading_stops_at_the_first_difference():
    one, two = torch.zeros(1_000_000), torch.ones(1_000_000)
    left, right = seen(one), seen(two)
    assert same(left, right).at == 0
    assert sum(size for _, size in left.files.place.reads) <= equal.BLOCK


# -- elements that are repeated ----------------------------------------------------------------
def test_an_expanded_tensor_is_read_once_however_large_it_says_it_is():
    one = torch.tensor([[1.0], [2.0]]).expand(2, 1 << 50)
    a, b, times = once(seen(one), seen(one))
    assert times == 1 << 50
    assert same(a, b).equal
    assert a.tensor.shape == (2, 1)
    assert [spread(at, (2, 1), (2, 1 << 50)) for at in (0, 1)] == [0, 1 << 50]


def test_only_what_both_repeat_is_left_out():
    one, two = torch.ones(3, 1).expand(3, 4), torch.ones(3, 4)
    assert once(seen(one), seen(two))[2] == 1
    assert once(seen(one), seen(one))[2] == 4
    assert once(seen(torch.ones(())), seen(torch.ones(())))[2] == 1


def test_views_out_of_all_proportion_are_refused():
    tensor, files = seen(torch.ones(64))
    huge = replace(tensor, shape=(3,) * 20, stride=(1,) * 20)
    with pytest.raises(LimitExceeded, match="elements in 512 bytes"):
        once(Seen(huge, files), Seen(huge, files))


# -- where two tensors lie alike ---------------------------------------------------------------
def test_plain_runs_are_read_without_numpy_and_others_are_not_taken_for_runs():
    numbers = torch.randn(4, 6)
    for one, two, alike in (
        (numbers, numbers.clone(), True),
        (numbers.t(), numbers.clone().t(), True),
        (numbers, numbers.t().contiguous().t(), False),
        (numbers[:, ::2], numbers[:, ::2], False),
        (numbers[1:3], numbers[1:3], True),
        (numbers.expand(2, 4, 6), numbers.expand(2, 4, 6), False),
    ):
        assert (runs(seen(one), seen(two)) is not None) is alike
    assert runs(seen(numbers), seen(numbers, "deflated")) is None
    assert runs(seen(numbers), seen(numbers, "swapped")) is None


def test_places_in_a_permuted_run_are_row_major():
    one = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)  # a run in another order
    two = one.clone(memory_format=torch.preserve_format)
    assert two.stride() == one.stride()
    for at in range(24):
        index = (at // 6, at // 3 % 2, at % 3)
        assert (
            one.flatten()[place(seen(one), seen(two), int(one[index]))]
            == one.flatten()[(index[0] * 2 + index[1]) * 3 + index[2]]
        )
    two[3, 1, 2] += 1
    assert same(seen(one), seen(two)).at == 23


# -- rounding ----------------------------------------------------------------------------------
PAIRS = [
    (wide, narrow)
    for wide in sorted(FLOATS)
    for narrow in sorted(FLOATS)
    if DTYPES[wide].bits >= DTYPES[narrow].bits and wide != narrow and "e8m0" not in wide + narrow
]


@pytest.mark.parametrize(("wide", "narrow"), PAIRS)
def test_rounding_is_that_of_to(wide, narrow):
    one = bits(wide, 4000, 3).view(40, 100)
    two = one.to(getattr(torch, narrow))
    assert rounds_to(seen(one), seen(two))
    assert rounds_to(seen(one.t()), seen(two.t().contiguous()))

    size = DTYPES[narrow].size_bytes
    nan = two.double().isnan().flatten()
    at = int((~nan).nonzero()[1000])
    two.view(torch.uint8).view(-1)[at * size] ^= 1
    changed = not truly_same(one.to(two.dtype).float().flatten()[at], two.float().flatten()[at])
    assert rounds_to(seen(one), seen(two)) is not changed


def test_rounding_sees_nan_as_nan_and_a_big_endian_side():
    one = torch.tensor([1.0000001, float("nan"), -0.0, 3e38, 65520.0])
    two = one.half()
    two.view(torch.int16)[1] = 0x7E55
    assert rounds_to(seen(one, "swapped"), seen(two, "swapped"))
    assert not rounds_to(seen(one), seen(two.nan_to_num()))


# -- refusals ----------------------------------------------------------------------------------
def test_a_big_endian_storage_under_another_dtype_is_refused():
    one = seen(torch.arange(4, dtype=torch.int32), "swapped")
    t = one.tensor
    other = type(t)(
        t.key, DTYPES["int16"], (8,), (1,), 0, t.storage, False, "tensor", t.path
    )  # fmt: skip
    with pytest.raises(Unsupported, match="another dtype"):
        same(Seen(other, one.files), Seen(other, Memory(one.files.place)))
