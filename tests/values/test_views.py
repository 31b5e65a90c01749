"""The plan of reads: every element once, in order, within the budgets."""

import random

import pytest

from ckptool.values import views
from ckptool.values.views import Block, blocks, collapse, extent, reading, tiles


def offsets(dims, start=0):
    """Offsets of all elements in row-major order, the plain way."""
    found = [start]
    for size, step in dims:
        found = [base + at * step for base in found for at in range(size)]
    return found


def some_dims(rng):
    rank = rng.randint(1, 5)
    return tuple(
        (rng.choice((2, 3, 5, 9)), rng.choice((0, 1, 2, 7, 30, 1000))) for _ in range(rank)
    )


@pytest.fixture
def small(monkeypatch):
    for name, value in (("BLOCK", 96), ("WIDE_BLOCK", 200), ("TILE", 64), ("GAP", 8)):
        monkeypatch.setattr(views, name, value)


@pytest.mark.parametrize(
    ("shape", "stride", "dims"),
    [
        ((), (), ()),
        ((1, 1), (9, 9), ()),
        ((2, 3, 4), (12, 4, 1), ((24, 1),)),
        ((2, 1, 4), (4, 77, 1), ((8, 1),)),
        ((2, 3), (1, 2), ((2, 1), (3, 2))),
        ((5, 6), (0, 0), ((30, 0),)),
        ((5, 6), (0, 1), ((5, 0), (6, 1))),
        ((4, 3, 2), (20, 2, 1), ((4, 20), (6, 1))),
    ],
)
def test_axes_that_are_one_become_one(shape, stride, dims):
    assert collapse(shape, stride) == dims


def test_collapsing_keeps_every_offset():
    rng = random.Random(1)
    for _ in range(300):
        dims = tuple((rng.choice((1, 2, 3)), rng.choice((0, 1, 2, 3, 6))) for _ in range(5))
        assert offsets(collapse(*zip(*dims, strict=True))) == offsets(dims)


@pytest.mark.parametrize("item", [1, 4, 16])
def test_blocks_are_the_view_in_order_and_small(small, item):
    rng = random.Random(item)
    for _ in range(200):
        dims = some_dims(rng)
        made = list(blocks(dims, 11, item))
        assert [o for block in made for o in offsets(*block)] == offsets(dims, 11)
        assert max(views.count(block.dims) for block in made) * item <= views.WIDE_BLOCK


@pytest.mark.parametrize("item", [1, 4, 16])
def test_tiles_put_every_element_in_its_place(small, item):
    rng = random.Random(item)
    for _ in range(200):
        dims = some_dims(rng)
        read = reading(dims, item)
        shape = [size for size, _ in dims]
        want = dict(zip(places(shape), offsets(dims, 5), strict=True))
        have = {}
        for tile in tiles(Block(dims, 5), read):
            taken = [
                range(*at.indices(size)) if isinstance(at, slice) else range(at, at + 1)
                for at, size in zip(tile.place, shape, strict=True)
            ]
            corner = [axis[0] for axis in taken]
            inside = [(len(axis), dims[i][1]) for i, axis in enumerate(taken)]
            assert tile.offset == want[tuple(corner)]
            assert taken[read.pivot] == range(corner[read.pivot], corner[read.pivot] + tile.lot)
            for at, offset in zip(
                places([n for n, _ in inside]), offsets(inside, tile.offset), strict=True
            ):
                place = tuple(a + b for a, b in zip(at, corner, strict=True))
                assert place not in have
                have[place] = offset
        assert have == want


def places(shape):
    found = [()]
    for size in shape:
        found = [(*base, at) for base in found for at in range(size)]
    return found


@pytest.mark.parametrize("item", [1, 4, 16])
def test_what_is_fetched_at_a_time_fits_a_tile(small, item):
    rng = random.Random(item)
    for _ in range(300):
        dims = some_dims(rng)
        read = reading(dims, item)
        step = dims[read.pivot][1]
        unit = step if read.joined else read.width
        assert (read.width + (read.lot - 1) * unit) * item <= views.TILE or read.lot == 1
        assert read.width == extent(tuple(dims[axis] for axis in read.inner))
        assert sorted((*read.outer, read.pivot, *read.inner)) == list(range(len(dims)))


def test_a_transposed_matrix_is_read_in_long_runs():
    """Not whole for each block, and not element by element: 1 GiB in half a million reads."""
    dims = ((16384, 1), (16384, 16384))
    made = list(blocks(dims, 0, 4))
    assert len(made) == 32
    read = reading(made[0].dims, 4)
    assert not read.joined
    assert read.width * 4 == 2048
    assert len(made) * 16384 == 1 << 19


def test_a_few_columns_are_read_with_what_lies_between_them():
    read = reading(((1000, 1000), (10, 1)), 4)
    assert read.joined
    assert (read.lot - 1) * 4000 + 40 <= views.TILE < read.lot * 4000 + 40


def test_columns_far_apart_are_read_each_by_itself():
    read = reading(((1000, 100_000), (10, 1)), 4)
    assert not read.joined
    assert (read.width, read.lot) == (10, 1000)


def test_one_element_expanded_is_read_once_a_block():
    dims = collapse((1 << 14, 1 << 14), (0, 0))
    made = list(blocks(dims, 3, 4))
    assert len(made) == (1 << 30) // views.BLOCK
    assert all(len(list(tiles(block, reading(block.dims, 4)))) == 1 for block in made)
