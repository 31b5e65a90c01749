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
from ckptool.formats.runs import contiguous

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
    return [
        n * tensor.dtype.size_bytes for n in at(tensor.shape, tensor.stride, tensor.offset)
    ]


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


@given(cases())
@settings(max_examples=600, deadline=None)
def test_every_element_is_found_where_it_went(case):
    refs, devices, compact = case
    try:
        made = house(refs, devices, compact)
    except Unsupported as error:
        assert torn(refs)
        assert error.key in {ref.label for ref in refs if isinstance(ref, User)}
        assert error.hint
        return
    assert not torn(refs)
    check(refs, made, devices)


@given(cases())
@settings(max_examples=300, deadline=None)
def test_homes_stand_in_the_order_of_first_use_and_none_is_idle(case):
    refs, devices, compact = case
    try:
        made = house(refs, devices, compact)
    except Unsupported:
        return
    used = []
    for ref in refs:
        used.append(made.places[ref.id].home if isinstance(ref, User) else made.bare[ref.key])
    assert list(dict.fromkeys(used)) == list(range(len(made.homes)))


@given(cases())
@settings(max_examples=300, deadline=None)
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
