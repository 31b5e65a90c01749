"""Where storages go: random storages, views, casts; every element must be found where it went."""

from __future__ import annotations

from itertools import combinations, product
from time import perf_counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.checkpoint import DTYPES, UNTYPED, Storage, Tensor
from ckptool.errors import Unsupported
from ckptool.formats.homes import User, house

F4, F2, B2, F1, G1, I4 = (
    DTYPES[name]
    for name in ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32")
)


# -- what the numbers mean ---------------------------------------------------------------------
def at(shape, stride, offset):
    """Element numbers in row-major order."""
    steps = zip(shape, stride, strict=True)
    return [offset + sum(p) for p in product(*([i * step for i in range(n)] for n, step in steps))]


def elements(tensor):
    """First bytes of its elements in the old storage, in row-major order."""
    return [n * tensor.dtype.size_bytes for n in at(tensor.shape, tensor.stride, tensor.offset)]


def bytes_of(tensor):
    size = tensor.dtype.size_bytes
    return {b + i for b in elements(tensor) for i in range(size)}


def origins(home):
    """For each element of a home, of `home.element`, the first byte of the old element."""
    if home.read is None:
        return range(0, home.source.size_bytes, home.element.size_bytes)
    read = home.read
    return [n * read.dtype.size_bytes for n in at(read.shape, read.stride, read.offset)]


def old_bytes(home, start, size):
    """Where `size` bytes of a home that casts nothing come from."""
    unit = home.element.size_bytes
    first = origins(home)
    return [first[b // unit] + b % unit for b in range(start, start + size)]


def check(refs, made, devices):
    """Every user finds its own elements, as its target, and what was one byte still is."""
    ways = {}
    for user in (ref for ref in refs if isinstance(ref, User)):
        place = made.places[user.id]
        home = made.homes[place.home]
        assert home.source is user.storage
        assert home.device == devices.get(user.storage.key, user.storage.device)
        wanted = user.target or user.dtype
        assert place.dtype is wanted
        size = wanted.size_bytes
        there = at(user.tensor.shape, place.stride, place.offset)
        assert place.offset >= 0
        assert all((n + 1) * size <= home.size_bytes for n in there)
        for old, new in zip(elements(user.tensor), there, strict=True):
            if user.cast:
                assert (home.element, home.read.dtype) == (wanted, user.dtype)
                assert home.dtype in (wanted, UNTYPED)
                assert (home.dtype is UNTYPED) == (wanted.torch_storage is None)
                assert origins(home)[new] == old
            else:
                assert home.dtype is user.storage.dtype
                assert old_bytes(home, new * size, size) == list(range(old, old + size))
            for i in range(user.dtype.size_bytes):
                mine = (place.home, new * size + (0 if user.cast else i))
                assert ways.setdefault((user.storage.key, old + i), mine) == mine
    for ref in (ref for ref in refs if isinstance(ref, Storage)):
        home = made.homes[made.bare[ref.key]]
        assert (home.source, home.read, home.size_bytes) == (ref, None, ref.size_bytes)


def torn(refs):
    """Whether a cast would tear elements apart that two have in common."""
    whole = {ref.key for ref in refs if isinstance(ref, Storage)}
    users = [ref for ref in refs if isinstance(ref, User)]
    if any(user.cast and user.tensor.count and user.storage.key in whole for user in users):
        return True
    return any(
        one.storage is two.storage
        and (one.cast or two.cast)
        and (one.dtype, one.target or one.dtype) != (two.dtype, two.target or two.dtype)
        and bytes_of(one.tensor) & bytes_of(two.tensor)
        for one, two in combinations(users, 2)
    )


# -- random ones -------------------------------------------------------------------------------
@st.composite
def view(draw, storage, dtype):
    """A view that lies inside its storage, strided, expanded, overlapping itself, or empty."""
    most = storage.size_bytes // dtype.size_bytes
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    left = max(most - 1, 0)
    stride = []
    for size in shape:
        step = draw(st.integers(0, left // max(size - 1, 1) if size > 1 else 9))
        left -= (size - 1) * step if size > 1 else 0
        stride.append(step)
    if not most and 0 not in shape:
        shape, stride = [0], [1]
    offset = draw(st.integers(0, left if most else 0))
    return Tensor("t", dtype, tuple(shape), tuple(stride), offset, storage)


@st.composite
def cases(draw):
    refs, number = [], 0
    for key in "ab"[: draw(st.integers(1, 2))]:
        dtype = draw(st.sampled_from((F4, F2, B2, UNTYPED)))
        storage = Storage(key, dtype, draw(st.integers(0, 40)), "cpu")
        kinds = (F4, F2, F1, G1, I4) if dtype is UNTYPED else (dtype,)
        target = draw(st.sampled_from((None, F4, B2, F1)))
        for _ in range(draw(st.integers(0, 5))):
            tensor = draw(view(storage, draw(st.sampled_from(kinds))))
            wanted = target if tensor.dtype.kind == "float" and draw(st.booleans()) else None
            refs.append(User(number, tensor, wanted, f"t{number}"))
            number += 1
        if draw(st.integers(0, 5)) == 0:
            refs.append(storage)
    devices = draw(st.sampled_from(({}, {"a": "cuda:1"}, {"a": "cuda:0", "b": "cuda:1"})))
    return draw(st.permutations(refs)), devices, draw(st.booleans())


def outcome(refs, devices, compact):
    try:
        return house(refs, devices, compact)
    except Unsupported as error:
        return error


@given(cases())
@settings(max_examples=250, deadline=None)
def test_every_element_is_found_where_it_went(case):
    refs, devices, compact = case
    made = outcome(refs, devices, compact)
    assert isinstance(made, Unsupported) == torn(refs)
    if isinstance(made, Unsupported):
        assert made.key in {ref.label for ref in refs if isinstance(ref, User)}
        assert made.hint
        return
    check(refs, made, devices)
    users = [made.places[r.id].home if isinstance(r, User) else made.bare[r.key] for r in refs]
    assert list(dict.fromkeys(users)) == list(range(len(made.homes)))


@given(cases())
@settings(max_examples=80, deadline=None)
def test_compact_never_grows_and_nothing_else_shrinks(case):
    refs = [r if isinstance(r, Storage) else r._replace(target=None) for r in case[0]]
    plain, compact = house(refs, {}, False), house(refs, {}, True)
    before = {ref.key if isinstance(ref, Storage) else ref.storage.key: ref for ref in refs}
    sizes = {
        key: (ref if isinstance(ref, Storage) else ref.storage).size_bytes
        for key, ref in before.items()
    }

    assert sum(home.size_bytes for home in plain.homes) == sum(sizes.values())
    assert all(home.read is None for home in plain.homes)
    for key, size in sizes.items():
        mine = [home.size_bytes for home in compact.homes if home.source.key == key]
        assert sum(mine) <= size


# -- ones to look at ---------------------------------------------------------------------------
MATRIX = Storage("m", F4, 1200, "cuda:0")


def column(first, count=1, target=None):
    """Some columns of a matrix of 100 rows and 12 columns."""
    name = f"c{first}+{count}"
    return User(name, Tensor(name, F4, (100, count), (12, 1), first, MATRIX), target, name)


def sizes(made):
    return [home.size_bytes for home in made.homes]


def test_columns_that_interleave_part_when_one_is_cast():
    made = house([column(0, target=F2), column(1), column(2, 10)], {}, False)

    assert sizes(made) == [200, 4800]
    assert made.places["c0+1"] == (0, 0, (1, 1), F2)
    assert made.places["c1+1"] == (1, 1, (12, 1), F4)
    assert made.homes[1].read is None


def test_columns_that_touch_and_overlap():
    with pytest.raises(Unsupported, match=r"'c1\+2', which is not cast") as caught:
        house([column(0, 2, F2), column(1, 2)], {}, False)
    assert caught.value.key == "c0+2"
    assert sizes(house([column(0, 2, F2), column(2, 2)], {}, False)) == [400, 4800]
    assert sizes(house([column(0, 2, F2), column(1, 2, F2)], {}, False)) == [2400]


def test_a_storage_that_is_cast_whole_keeps_its_places():
    made = house([column(0, 2, F2), column(7, 2, F2)], {"m": "cpu"}, False)

    assert sizes(made) == [2400]
    assert [place.offset for place in made.places.values()] == [0, 7]
    assert {place.stride for place in made.places.values()} == {(12, 1)}
    assert made.homes[0].device == "cpu"


def test_a_storage_without_a_typed_class_becomes_untyped():
    made = house([column(0, 12, F1)], {}, False)

    assert (made.homes[0].dtype, made.homes[0].length) == (UNTYPED, 1200)
    assert made.places["c0+12"].dtype is F1


def test_compact_takes_columns_alone():
    assert sizes(house([column(3, 2)], {}, True)) == [800]
    assert sizes(house([column(3), column(4)], {}, True)) == [4 * (99 * 12 + 2)]
    assert sizes(house([column(0, 12)], {}, True)) == [4800]
    assert house([column(0, 12)], {}, True).homes[0].read is None
    assert sizes(house([column(3, 2), MATRIX], {}, True)) == [4800]


def test_compact_reads_what_is_expanded_once():
    row = Tensor("r", F4, (50, 12), (0, 1), 24, MATRIX)
    far = Tensor("f", F4, (2, 9), (600, 0), 3, MATRIX)
    made = house([User(0, row), User(1, far)], {}, True)

    assert sizes(made) == [4 * 601]
    assert sizes(house([User(0, row)], {}, True)) == [48]
    alone = house([User(1, far)], {}, True)
    assert sizes(alone) == [8]
    assert alone.places[1] == (0, 0, (1, 0), F4)


def test_twenty_thousand_views_of_one_buffer():
    flat = Storage("f", F4, 200_000, "cpu")
    users = [
        User(i, Tensor(str(i), F4, (10,), (1,), 10 * i, flat), F2 if i % 2 else None, str(i))
        for i in range(20_000)
    ]
    started = perf_counter()
    made = house(users, {}, False)

    assert len(made.homes) == 10_001
    assert perf_counter() - started < 10
