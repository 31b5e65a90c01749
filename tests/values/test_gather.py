"""Strided views against torch: every encoding, element size and shape of stride."""

import random
import sys
import tracemalloc
from functools import cache

import pytest
import torch
from values_support import ENCODINGS, INTS, bytes_of, encode, run

from ckptool.errors import CrcMismatch, TensorBounds, Unsupported
from ckptool.plans import Made
from ckptool.spans import Span
from ckptool.values import RECIPES, views

storages = sys.modules["ckptool.values.storages"]
DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
RNG = random.Random(7)
PLAIN = RNG.randbytes(1 << 16)


@pytest.fixture
def small(monkeypatch):
    """Budgets that make many blocks and tiles of a small view."""
    for name, value in (("BLOCK", 512), ("WIDE_BLOCK", 2048), ("TILE", 256), ("GAP", 32)):
        monkeypatch.setattr(views, name, value)
    monkeypatch.setattr(storages, "CHUNK", 256)


def args(encoding, component, item, size, view, crc):
    return (encoding, component, item, size, *view, crc)


def expected(plain, item, view):
    flat = torch.frombuffer(bytearray(plain), dtype=DTYPES[item])
    return bytes_of(torch.as_strided(flat, *view).clone(memory_format=torch.contiguous_format))


def some_view(rng, room):
    """(shape, stride, offset) of a view that fits `room` elements."""
    while True:
        rank = rng.randint(0, 5)
        shape = tuple(rng.choice((0, 1, 1, 2, 3, 4, 7, 8, 40)) for _ in range(rank))
        if rng.random() < 0.7:
            shape = tuple(max(size, 1) for size in shape)
        stride = []
        step = rng.choice((1, 1, 1, 2, 3))
        for at in rng.sample(range(rank), rank):  # a permuted, perhaps padded layout
            stride.append((at, rng.choice((step, step, step, 0, step + 1, rng.randint(0, 99)))))
            step *= max(shape[at], 1)
        stride = tuple(step for _, step in sorted(stride))
        reach = sum((n - 1) * s for n, s in zip(shape, stride, strict=True) if n) + 1
        count = torch.Size(shape).numel()
        if reach <= room and count <= 40_000:
            return shape, stride, rng.randint(0, room - reach)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("item", DTYPES)
def test_any_view_is_what_torch_makes_contiguous(small, encoding, item):
    rng = random.Random(f"{encoding} {item}")
    components = {1: (1,), 2: (2,), 4: (4, 2), 8: (8, 4), 16: (8,)}[item]
    for _ in range(25):
        component = rng.choice(components)
        size = rng.choice((1 << 10, 1 << 14))
        place, crc = encode(PLAIN[:size], encoding, component)
        view = some_view(rng, size // item)
        want = expected(PLAIN[:size], item, view)
        for recorded in (None, crc):
            given = args(encoding, component, item, size, view, recorded)
            assert run(place, "gather", given, len(want)) == (want, None), view
        with pytest.raises(CrcMismatch):
            run(place, "gather", args(encoding, component, item, size, view, crc ^ 1), len(want))


@cache
def large(encoding):
    plain = torch.arange(2_550_000, dtype=torch.int32).numpy().tobytes()
    return plain, *encode(plain, encoding, 4)


@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [
        ((1700, 1500), (1, 1700), 0),  # transposed
        ((1500, 1400), (1, 1700), 9),  # transposed, of a slice
        ((40, 100, 25, 25), (62500, 1, 2500, 100), 0),  # channels_last
        ((1200, 3, 7), (1, 1200, 3600), 4),
        ((1000, 300), (2500, 1), 77),  # columns
        ((1000, 300), (2500, 8), 0),
        ((3_000_000,), (0,), 123),  # one element, expanded
        ((1500, 2000), (0, 1), 5),
        ((1500, 2000), (1, 0), 5),
        ((1500, 2000), (1, 1), 5),  # overlapping windows
        ((2_000_000,), (1,), 1),  # one run
    ],
)
@pytest.mark.parametrize("encoding", ["stored", "deflated-swapped"])
def test_large_views_at_the_true_budgets(shape, stride, offset, encoding):
    plain, place, crc = large(encoding)
    size = len(plain)
    want = expected(plain, 4, (shape, stride, offset))
    got = run(place, "gather", args(encoding, 4, 4, size, (shape, stride, offset), crc), len(want))
    assert got[0] == want


@pytest.mark.parametrize("item", [1, 16])
def test_sixty_four_axes(item):
    shape, stride = [1] * 64, [77] * 64
    for axis, size, step in ((3, 4, 100), (17, 2, 0), (40, 3, 9), (63, 5, 1)):
        shape[axis], stride[axis] = size, step
    view = (tuple(shape), tuple(stride), 2)
    want = expected(PLAIN, item, view)
    place, _ = encode(PLAIN, "stored", 1)
    assert run(place, "gather", args("stored", 1, item, 1 << 16, view, None), len(want))[0] == want


def test_a_scalar_is_one_element():
    place, _ = encode(PLAIN, "swapped", 4)
    got = run(place, "gather", args("swapped", 4, 4, 1 << 16, ((), (), 3), None), 4)
    assert got[0] == PLAIN[12:16]


def test_a_complex_number_is_swapped_half_by_half():
    place, _ = encode(b"ABCDEFGHabcdefgh", "swapped", 4)
    got = run(place, "gather", args("swapped", 4, 8, 16, ((2,), (0,), 1), None), 16)
    assert got[0] == b"abcdefgh" * 2


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_no_elements_and_still_the_storage_is_checked(encoding, shape):
    place, crc = encode(PLAIN, encoding, 2)
    view = (shape, (1,) * len(shape), 0)
    assert run(place, "gather", args(encoding, 2, 2, 1 << 16, view, crc), 0) == (b"", None)
    with pytest.raises(CrcMismatch):
        run(place, "gather", args(encoding, 2, 2, 1 << 16, view, crc ^ 1), 0)


@pytest.mark.parametrize(
    "view",
    [
        ((65, 256), (256, 1), 0),
        ((2,), (1,), 16383),
        ((), (), 16384),
        ((2,), (-1,), 5),
        ((2,), (1,), -1),
    ],
)
@pytest.mark.parametrize("encoding", ["stored", "latin1"])
def test_elements_outside_of_the_storage_are_refused(view, encoding):
    place, _ = encode(PLAIN, encoding, 4)
    with pytest.raises(TensorBounds):
        run(place, "gather", args(encoding, 4, 4, 1 << 16, view, None), 0)
    assert place.reads == []


def test_a_run_is_read_alone_and_a_checksum_reads_the_rest_once():
    plain = RNG.randbytes(6 << 20)
    place, crc = encode(plain, "stored", 1)
    view = ((500_000,), (1,), 250_000)
    got = run(place, "gather", args("stored", 4, 4, len(plain), view, None), 2_000_000)
    assert got[0] == plain[1_000_000:3_000_000]
    assert sum(size for _, size in place.reads) == 2_000_000
    place.reads.clear()
    run(place, "gather", args("stored", 4, 4, len(plain), view, crc), 2_000_000)
    assert sum(size for _, size in place.reads) == len(plain)


def test_a_slice_of_rows_far_apart_reads_no_more_than_it_needs():
    plain = RNG.randbytes(6 << 20)
    place, _ = encode(plain, "stored", 1)
    view = ((30, 10), (50_000, 1), 3)
    run(place, "gather", args("stored", 1, 4, len(plain), view, None), 1200)
    assert sorted(place.reads) == [(20 + 12 + row * 200_000, 40) for row in range(30)]


@pytest.mark.parametrize("encoding", ["deflated", "latin1-swapped"])
def test_a_strided_view_of_too_large_a_deflated_storage_is_refused(encoding, monkeypatch):
    monkeypatch.setattr(storages, "HELD_BYTES", 40_000)
    place, _ = encode(PLAIN, encoding, 4)
    size = len(PLAIN)
    far = ((2, 5001), (1, 2), 0)  # 40,008 bytes from the first to the last
    with pytest.raises(Unsupported, match="at most 40,000 are held") as caught:
        run(place, "gather", args(encoding, 4, 4, size, far, None), 40_008)
    assert ".pth first" in caught.value.hint
    assert caught.value.key == "fc.weight"
    assert place.reads == []
    near = ((2, 5000), (1, 2), 6000)  # 40,000: what lies before it is not held
    want = expected(PLAIN, 4, near)
    assert run(place, "gather", args(encoding, 4, 4, size, near, None), len(want))[0] == want
    whole = ((size // 4,), (1,), 0)  # one run: streamed
    assert run(place, "gather", args(encoding, 4, 4, size, whole, None), size)[0] == PLAIN


def peak(made, chunk=bytes(4 << 20)):
    """The most memory while a recipe runs over a large storage of zeros."""
    tracemalloc.start()
    try:
        have = sum(
            len(data) for data in RECIPES[made.recipe](lambda _, __, size: chunk[:size], made)
        )
        assert have == made.size
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("view", "most"),
    [
        (((1 << 26,), (1,), 0), 4),  # one run
        (((1 << 13, 1 << 12), (1 << 13, 1), 0), 12),  # half of the columns
        (((1 << 13, 1 << 13), (1, 1 << 13), 0), 40),  # transposed
        (((1 << 13, 1 << 13), (0, 0), 0), 12),  # expanded
    ],
)
def test_a_view_of_256_mib_takes_constant_memory(view, most):
    size = 1 << 28
    count = torch.Size(view[0]).numel()
    given = args("stored", 1, 4, size, view, None)
    made = Made(((0, Span(0, size)),), "gather", given, count * 4)
    assert peak(made) < most << 20


def test_kinds_of_numbers_are_those_of_torch():
    assert set(INTS) | {16} == set(DTYPES)
