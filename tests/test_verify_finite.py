"""--finite: NaN and infinities, counted as torch.isnan and torch.isinf count them."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch
from formats_support import saved, saved_legacy
from safetensors.torch import save as save_safetensors
from verbs_support import FIXTURES
from verify_support import FILES, entries, flipped, repacked, verified

import ckptool
from ckptool.values import finite
from ckptool.values.finite import nonfinite
from ckptool.values.floats import FLOATS

NAN, INF = float("nan"), float("inf")
COMPLEX = ("complex64", "complex128", "complex32")


def counts(found):
    return {row["key"]: (row["nan_count"], row["inf_count"]) for row in found.numbers.found}


def patterns(dtype):
    """Every pattern of a small type, many of a large one, all kinds of NaN and infinity among."""
    size = dtype.itemsize
    if size <= 2:
        whole = torch.arange(1 << 8 * size, dtype=torch.int64)
        whole = torch.where(whole >= 1 << (8 * size - 1), whole - (1 << 8 * size), whole)
        return whole.to({1: torch.int8, 2: torch.int16}[size]).view(dtype)
    torch.manual_seed(1)
    values = torch.randn(5_000, dtype=dtype)
    values[::7], values[1::11], values[2::13], values[3::5] = NAN, INF, -INF, 0.0
    return torch.cat([values, -values])


@pytest.mark.parametrize("name", sorted(FLOATS))
def test_every_floating_type_as_torch_counts(name):
    values = patterns(getattr(torch, name))
    exact = values.to(torch.float64)  # float8 has no isnan of its own
    wanted = int(exact.isnan().sum()), int(exact.isinf().sum())
    raw = values.view(torch.uint8).numpy().tobytes()
    assert nonfinite([raw[:16], raw[16:]], name) == (*wanted, values.numel())
    assert sum(wanted) > 0
    found = verified(saved({"w": values}), finite=True)
    assert counts(found) == {"w": wanted}
    assert (found.exit_status, found.whole) == (1, True)
    assert [(f.slug, f.kind, f.keys) for f in found.findings] == [("not-finite", "numbers", ("w",))]


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_are_counted_once(name):
    parts = [(1, 2), (NAN, 0), (0, NAN), (NAN, INF), (INF, 1), (-INF, INF), (3, 4)]
    values = torch.view_as_complex(torch.tensor(parts, dtype=getattr(torch, name).to_real()))
    wide = values.to(torch.complex128)
    wanted = int(wide.isnan().sum()), int(wide.isinf().sum())
    assert wanted == (3, 3)
    assert counts(verified(saved({"z": values}), finite=True)) == {"z": wanted}


def test_every_type_that_can_hold_one_is_counted():
    assert set(FLOATS) | set(COMPLEX) == finite.COUNTABLE
    whole = verified(saved({"i": torch.ones(3, dtype=torch.int64), "b": torch.ones(2) > 0}), True)
    assert whole.numbers == (0, ())
    assert whole.exit_status == 0


VALUES = torch.tensor([[1.0, NAN, 3.0, 4.0], [INF, 6.0, 7.0, 8.0], [9.0, 10.0, 11.0, -INF]])
VIEWS = {
    "all": VALUES,
    "transposed": VALUES.t(),
    "row": VALUES[0],
    "column": VALUES[:, 0],
    "finite part": VALUES[:, 2],
    "stepped": VALUES.view(-1)[1::2],
    "expanded": VALUES[:1].expand(50, 4),
    "scalar": VALUES[0, 1],
    "empty": VALUES[:0],
    "windows": VALUES.view(-1).unfold(0, 3, 1),
    "parameter": torch.nn.Parameter(VALUES.clone()),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("save", [saved, saved_legacy], ids=["zip", "legacy"])
def test_views_are_counted_by_their_elements(name, save):
    view = VIEWS[name]
    nan, inf = int(view.isnan().sum()), int(view.isinf().sum())
    found = verified(save({"v": view}), finite=True)
    if name == "windows":  # it reads its storage again and again: the storage is counted
        assert counts(found) == {"v": (1, 2)}
        assert "in its whole storage" in found.findings[0].text
    else:
        assert counts(found) == ({"v": (nan, inf)} if nan or inf else {})
        assert found.numbers.tensor_count == 1


def test_a_view_of_terabytes_takes_no_time():
    one = torch.tensor([NAN, 1.0])
    view = torch.as_strided(one, (1_000_000, 1_000_000), (0, 0))
    steps = torch.as_strided(torch.tensor([INF] * 1000), (500, 500), (1, 1))
    found = verified(saved({"v": view, "s": steps}), finite=True)
    assert counts(found) == {"v": (10**12, 0), "s": (0, 1000)}


def test_ties_once_sparse_nested_and_optimizers():
    bad = torch.tensor([NAN, 1.0, 2.0])
    state = {
        "a": bad, "b": bad, "sparse": torch.tensor([INF, 0.0, 1.0, 0.0]).to_sparse(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.tensor([NAN])]),
    }  # fmt: skip
    found = verified(saved({"state_dict": state, "optimizer": {"x": [torch.tensor([NAN])]}}), True)
    got = counts(found)
    assert got["a"] == (1, 0)
    assert "b" not in got
    assert got["sparse"] == (0, 1)
    assert got["nested"] == (1, 0)
    assert got["optimizer.x.0"] == (1, 0)


def test_other_containers_and_byte_orders(tmp_path):
    values = {"w": VALUES, "h": torch.tensor([NAN, 1.0, INF], dtype=torch.bfloat16)}
    data = saved(values)
    expected = {"w": (1, 2), "h": (1, 1)}
    for one in (data, repacked(data, zipfile.ZIP_DEFLATED), save_safetensors(values)):
        assert counts(verified(one, finite=True)) == expected
    big = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(big, "w") as new:
        for name in old.namelist():
            raw = old.read(name)
            if name.endswith("byteorder"):
                raw = b"big"
            if "/data/" in name:
                width = 4 if len(raw) == 48 else 2
                raw = b"".join(raw[i : i + width][::-1] for i in range(0, len(raw), width))
            new.writestr(name, raw)
    assert counts(verified(big.getvalue(), finite=True)) == expected
    for name in ("big_endian.pth", "numpy_pickle.pkl", "plain_pickle.pkl", "dtypes.pth"):
        assert ckptool.verify(FIXTURES / name, finite=True).numbers.found == ()


def test_lost_storages_are_not_counted():
    data = saved({"a": torch.tensor([NAN]), "b": torch.tensor([NAN])})
    found = verified(flipped(data, entries(data)["data/0"].data_offset), finite=True)
    assert counts(found) == {"b": (1, 0)}
    assert {finding.kind for finding in found.findings} == {"damage", "numbers"}
    cut = verified(FILES["zip"][:-2500], finite=True)
    assert cut.exit_status == 2
    assert cut.numbers.tensor_count < verified(FILES["zip"], finite=True).numbers.tensor_count


def test_without_it_no_number_is_read():
    found = verified(saved({"w": torch.tensor([NAN])}))
    assert (found.numbers, found.exit_status) == (None, 0)
