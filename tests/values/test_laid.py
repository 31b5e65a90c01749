"""Storages in several pieces: any tiling of a tensor, read in any way, is the tensor."""

import zlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.checkpoint import DTYPES, Piece, Storage
from ckptool.crcs import joined
from ckptool.errors import CrcMismatch, StorageSize, Unsupported
from ckptool.formats.contents import Filler
from ckptool.formats.homes import Read
from ckptool.pieces import cut, is_run, made_from, ordered, overlap
from ckptool.plans import Copy, Made
from ckptool.spans import Span
from ckptool.values import RECIPES
from ckptool.values.laid import boxes

F32, I16 = DTYPES["float32"], DTYPES["int16"]


class Files:
    """Several sources in memory; counts what is read of them."""

    def __init__(self):
        self.blobs, self.read_bytes = [], 0

    def add(self, data, before=3):
        self.blobs.append(b"\xee" * before + data + b"\xdd")
        return len(self.blobs) - 1, Span(before, len(data))

    def __call__(self, source_id, offset, size):
        data = self.blobs[source_id]
        assert 0 <= offset <= offset + size <= len(data)
        self.read_bytes += size
        return data[offset : offset + size]


def tiled(array, cuts, encoding="stored", dtype=F32, crcs=False, keep=False):
    """(files, storage) of an array cut along each axis at `cuts`, each tile a source."""
    files, pieces = Files(), []
    edges = [[0, *inner, size] for inner, size in zip(cuts, array.shape, strict=True)]
    spans = [list(pairwise(row)) for row in edges]
    for index in np.ndindex(*map(len, spans)):
        region = tuple(spans[axis][i] for axis, i in enumerate(index))
        data = np.ascontiguousarray(array[tuple(slice(*s) for s in region)]).tobytes()
        number, span = files.add(data, before=len(pieces) % 5)
        pieces.append(Piece(number, span, encoding, region, zlib.crc32(data) if crcs else None))
    pieces = tuple(pieces) if keep else ordered(pieces, array.shape)
    return files, Storage("w", dtype, array.size, "cpu", pieces)


def made_bytes(files, part):
    if isinstance(part, Copy):
        data = files(part.source_id, part.span.offset, part.span.size)
        assert part.crc in (None, zlib.crc32(data))
        return data
    return b"".join(RECIPES[part.recipe](files, part))


def filled(files, storage, read=None, element=F32, size=None, check=True):
    parts = Filler(check).fill(storage, read, element, size or storage.size_bytes, "w")
    return parts, b"".join(made_bytes(files, part) for part in parts)


@st.composite
def tilings(draw):
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    cuts = [sorted(draw(st.sets(st.integers(1, n - 1)))) if n > 1 else [] for n in shape]
    return tuple(shape), cuts


@settings(max_examples=150, deadline=None)
@given(tilings(), st.data())
def test_any_tiling_gives_the_tensor_and_any_run_of_it(tiling, data):
    shape, cuts = tiling
    array = np.arange(np.prod(shape), dtype="<f4").reshape(shape)
    files, storage = tiled(array, cuts, crcs=data.draw(st.booleans()))
    _, found = filled(files, storage)
    assert found == array.tobytes()
    low = data.draw(st.integers(0, array.size - 1))
    high = data.draw(st.integers(low + 1, array.size))
    read = Read(F32, (high - low,), (1,), low)
    assert (
        filled(files, storage, read, F32, 4 * (high - low))[1] == array.ravel()[low:high].tobytes()
    )
    turned = Read(F32, shape[::-1], tuple(s // 4 for s in array.strides[::-1]), 0)
    assert filled(files, storage, turned)[1] == np.ascontiguousarray(array.T).tobytes()


@settings(max_examples=60, deadline=None)
@given(tilings())
def test_bytes_that_are_no_whole_elements(tiling):
    shape, cuts = tiling
    array = np.arange(np.prod(shape), dtype="<f4").reshape(shape)
    files, storage = tiled(array, cuts)
    size = array.nbytes - 2
    if storage.pieces[0].region is None:
        return
    read = Read(DTYPES["uint8"], (size,), (1,), 1)
    assert filled(files, storage, read, DTYPES["uint8"], size)[1] == array.tobytes()[1:-1]


def test_rows_are_copied_and_columns_put_together():
    array = np.arange(24, dtype="<f4").reshape(4, 6)
    files, rows = tiled(array, [[1, 3], []])
    assert [type(part) for part in filled(files, rows)[0]] == [Copy] * 3
    files, columns = tiled(array, [[], [2]])
    assert [type(part) for part in filled(files, columns)[0]] == [Made]
    files, lone = tiled(array[None, :1], [[], [], [2]])  # one row: its columns are runs
    assert [type(part) for part in filled(files, lone)[0]] == [Copy] * 2


def test_a_region_in_one_piece_is_the_whole():
    array = np.arange(6, dtype="<f4").reshape(2, 3)
    files, storage = tiled(array, [[], []], keep=True)
    assert storage.pieces[0].region == ((0, 2), (0, 3))
    assert filled(files, storage)[1] == array.tobytes()


def test_a_cast_of_columns_is_the_cast_of_the_tensor():
    array = np.random.default_rng(0).normal(size=(700, 900)).astype("<f4")
    files, storage = tiled(array, [[], [100, 333]])
    read = Read(F32, (array.size,), (1,), 0)
    _, found = filled(files, storage, read, DTYPES["float16"], array.size * 2)
    assert found == array.astype("<f2").tobytes()
    assert files.read_bytes == array.nbytes


def test_swapped_pieces_are_swapped():
    array = np.arange(12, dtype=">i2").reshape(3, 4)
    for cuts in ([[1], []], [[], [3]]):
        files, storage = tiled(array, cuts, "swapped", I16)
        assert filled(files, storage, element=I16)[1] == array.astype("<i2").tobytes()


@pytest.mark.parametrize("cuts", [[[2], []], [[], [2]]])
@pytest.mark.parametrize("target", ["float32", "bfloat16"])
def test_a_damaged_piece_is_found(cuts, target):
    array = np.arange(12, dtype="<f4").reshape(3, 4)
    files, storage = tiled(array, cuts, crcs=True)
    files.blobs[1] = files.blobs[1][:-2] + b"\x99" + files.blobs[1][-1:]
    element = DTYPES[target]
    read = Read(F32, (12,), (1,), 0)
    if target == "float32" and cuts[0]:  # copied: the writer compares
        (_, second), _ = filled(files, storage, check=False)
        assert second.crc is None
        assert [part.crc for part in Filler().fill(storage, None, F32, 48, "w")] == [
            piece.crc for piece in storage.pieces
        ]
        return
    with pytest.raises(CrcMismatch, match="'w'"):
        filled(files, storage, read, element, 12 * element.size_bytes)
    filled(files, storage, read, element, 12 * element.size_bytes, check=False)


def test_checksums_are_compared_once():
    _, storage = tiled(np.arange(12, dtype="<f4").reshape(3, 4), [[], [2]], crcs=True)
    filler = Filler()
    parts = [filler.fill(storage, None, F32, 48, "w")[0] for _ in range(2)]
    assert [bool(part.crcs) for part in parts] == [True, False]


def test_memory_does_not_grow_with_the_tensor():
    import tracemalloc

    array = np.arange(8 << 20, dtype="<f4").reshape(2048, -1)
    files, storage = tiled(array, [[], [1000, 3000]])
    made = Filler().fill(storage, None, F32, array.nbytes, "w")[0]
    tracemalloc.start()
    assert sum(map(len, RECIPES[made.recipe](files, made))) == array.nbytes
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_pieces_that_do_not_add_up_are_refused():
    files, storage = tiled(np.arange(12, dtype="<f4").reshape(3, 4), [[], [2]])
    args = ("stored", 4, 44, None)
    with pytest.raises(StorageSize, match="48 bytes, 44 are needed"):
        list(RECIPES["decode"](files, made_from(storage, "decode", args, 44)))
    odd = made_from(storage, "decode", ("stored", 4, 48, None), 48)
    odd = odd._replace(regions=(((0, 3), (0, 1)), ((0, 3), (1, 4))))
    with pytest.raises(StorageSize, match="slices they fill"):
        list(RECIPES["decode"](files, odd))
    mixed = Storage(
        "w", F32, 12, "cpu", (storage.pieces[0], storage.pieces[1]._replace(encoding="deflated"))
    )
    with pytest.raises(Unsupported, match="several ways"):
        Filler().fill(mixed, None, F32, 48, "w")


def test_boxes_are_in_order_and_whole_but_for_one_axis():
    assert list(boxes(5, 23, (2, 3, 4))) == [
        ((0, 1), (1, 2), (1, 4)),
        ((0, 1), (2, 3), (0, 4)),
        ((1, 2), (0, 2), (0, 4)),
        ((1, 2), (2, 3), (0, 3)),
    ]
    assert list(boxes(0, 1, ())) == [()]
    assert list(boxes(3, 3, (4,))) == []


def test_cut_keeps_checksums_of_whole_pieces_alone():
    pieces = tuple(Piece(n, Span(10 * n, 8), crc=n + 1) for n in range(3))
    storage = Storage("w", F32, 6, "cpu", pieces)
    assert cut(storage, 4, 16) == [
        Piece(0, Span(4, 4)),
        Piece(1, Span(10, 8), crc=2),
        Piece(2, Span(20, 4)),
    ]


def test_overlap_names_two_regions():
    assert overlap([((0, 2), (0, 2)), ((2, 4), (0, 2)), ((0, 4), (2, 3))]) is None
    assert overlap([((0, 2), (0, 2)), ((1, 4), (1, 2))]) == (0, 1)
    assert overlap([(), ()]) == (0, 1)
    assert not is_run(((0, 2), (0, 1)), (2, 2))
    assert is_run(((1, 2), (0, 1)), (2, 2))


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=6))
def test_checksums_join(parts):
    crcs, sizes = [zlib.crc32(p) for p in parts], [len(p) for p in parts]
    assert joined(crcs, sizes) == zlib.crc32(b"".join(parts))
