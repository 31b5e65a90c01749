"""Who shares elements with whom, of many views of one storage: exact, and in one pass."""

from __future__ import annotations

import pytest
import torch
from diff_support import DTYPES

from ckptool.checkpoint import Piece, Storage, Tensor
from ckptool.differences import Pair
from ckptool.formats import runs
from ckptool.spans import Span
from ckptool.verbs import diff_ties
from ckptool.verbs.diff_ties import changed_ties

FLOAT = DTYPES["float32"]


def record(tensor, key):
    size = tensor.untyped_storage().nbytes()
    store = Storage("0", FLOAT, size // 4, "cpu", (Piece(0, Span(0, size)),))
    shape, stride = tuple(tensor.shape), tensor.stride()
    return Tensor(
        key, FLOAT, shape, stride, tensor.storage_offset(), store, False, "tensor", (key,)
    )


def ties(views, alone):
    """Of each view the first that shares its elements, by what differs from storages of their own."""
    pairs = []
    for number, (view, other) in enumerate(zip(views, alone, strict=True)):
        a, b = record(view, f"k{number}"), record(other, f"k{number}")
        own = Storage(f"own{number}", FLOAT, b.storage.count, "cpu", b.storage.pieces)
        pairs.append(
            Pair(a.key, a.path, a, Tensor(b.key, FLOAT, b.shape, b.stride, b.offset, own), 0)
        )
    return {path[0]: mine for path, (mine, _) in changed_ties(pairs).items()}


def alone(views):
    return [view.clone() for view in views]


@pytest.fixture
def counted(monkeypatch):
    """How often the elements of a view, or of two, are looked at."""
    count = {"runs": 0, "pairs": 0}

    def runs_of(tensor, *most):
        count["runs"] += 1
        return listed(tensor, *most)

    def overlap(one, two):
        count["pairs"] += 1
        return runs.elements_overlap(one, two)

    listed = runs._runs
    monkeypatch.setattr(runs, "_runs", runs_of)
    monkeypatch.setattr(diff_ties, "elements_overlap", overlap)
    return count


def test_columns_share_nothing_though_their_extents_meet(counted):
    columns = list(torch.zeros(4, 3_000).unbind(1))

    assert ties(columns, alone(columns)) == {}
    assert counted == {"runs": 3_000, "pairs": 0}


def test_windows_are_one_chain(counted):
    base = torch.zeros(5_000)
    windows = [base[i : i + 1_000] for i in range(3_000)]

    assert ties(windows, alone(windows)) == {f"k{i}": "k0" for i in range(1, 3_000)}
    assert counted == {"runs": 3_000, "pairs": 0}


def test_a_row_ties_the_columns_it_crosses():
    base = torch.zeros(4, 6)
    views = [base[:, 0], base[:, 2], base[1, 1:3], base[:, 5]]

    assert ties(views, alone(views)) == {"k2": "k1"}


def test_slices_that_touch_are_not_looked_into(counted):
    slices = list(torch.zeros(9_000).split(3))

    assert ties(slices, alone(slices)) == {}
    assert counted == {"runs": 0, "pairs": 0}


def test_too_many_runs_for_one_pass(monkeypatch, counted):
    """A few views are then held against each other, of many the extents decide."""
    monkeypatch.setattr(diff_ties, "_RUNS", 10)
    columns = list(torch.zeros(4, 9).unbind(1))

    assert ties(columns[:8], alone(columns[:8])) == {}
    assert counted["pairs"] == 28
    assert ties(columns, alone(columns)) == {f"k{i}": "k0" for i in range(1, 9)}
