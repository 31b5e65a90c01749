"""DCP tensors whose slices do not lie row by row: torch copies them value by value, so do we."""

import pytest
import safetensors.torch
import torch
from dcp_support import assert_same, oracle, raw, save_slices

import ckptool
from ckptool.formats import dcp
from ckptool.places import Folder

LAST = torch.channels_last
IMAGE = torch.arange(4 * 6 * 3 * 2, dtype=torch.float32).view(4, 6, 3, 2)


def cut(tensor, grid, layout):
    """`tensor` in a grid of slices (how many along each axis), each laid out by `layout`."""
    parts = {(): tensor}
    for axis, count in enumerate(grid):
        cuts = {}
        for start, part in parts.items():
            at = 0
            for piece in torch.chunk(part, count, dim=axis):
                cuts[(*start, at)] = piece
                at += piece.shape[axis]
        parts = cuts
    return tuple(tensor.shape), {start: layout(part) for start, part in parts.items()}


def last(part):
    return part.contiguous(memory_format=LAST)


def turned(part):
    """The slice as a transposed view of a contiguous one."""
    return part.t().contiguous().t()


TABLE = torch.arange(35, dtype=torch.float64).view(5, 7)
CASES = {
    "rows": (IMAGE, (2, 1, 1, 1), last),
    "columns": (IMAGE, (1, 3, 1, 1), last),
    "grid": (IMAGE, (2, 4, 1, 1), last),
    "heights": (IMAGE, (1, 1, 2, 1), last),
    "one channel": (IMAGE[:, :3], (1, 3, 1, 1), last),  # both layouts at once
    "half": (IMAGE.half(), (4, 2, 1, 1), last),
    "matrix by rows": (TABLE, (3, 1), turned),
    "matrix by columns": (TABLE, (1, 2), turned),
    "volume": (torch.arange(96).view(2, 3, 2, 4, 2), (1, 2, 1, 1, 1),
               lambda part: part.contiguous(memory_format=torch.channels_last_3d)),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    slices = {name: cut(*case) for name, case in CASES.items()}
    return save_slices(tmp_path_factory.mktemp("layouts") / "x", slices)


@pytest.fixture(scope="module")
def wanted(folder, tmp_path_factory):
    found = oracle(folder, tmp_path_factory.mktemp("oracle"))
    for name, (tensor, *_) in CASES.items():
        assert torch.equal(found[name], tensor), name
    return found


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_container_has_the_values_of_torch(folder, wanted, jobs, tmp_path):
    ckptool.convert(folder, tmp_path / "net.pth", jobs=jobs)
    assert_same(torch.load(tmp_path / "net.pth", weights_only=True), wanted)
    ckptool.convert(folder, tmp_path / "net.safetensors", jobs=jobs)
    found = safetensors.torch.load_file(tmp_path / "net.safetensors")
    assert {k: raw(v) for k, v in found.items()} == {k: raw(v) for k, v in wanted.items()}
    ckptool.convert(folder, tmp_path / "again", to="dcp", jobs=jobs)
    assert_same(oracle(tmp_path / "again", tmp_path), wanted)


def test_python_has_them_too(folder, wanted):
    assert_same(ckptool.load(folder), wanted)
    with ckptool.open(folder) as found:
        for name, tensor in wanted.items():
            assert (found.weights[name].numpy() == tensor.numpy()).all(), name


def test_a_diff_and_the_statistics(folder, wanted, tmp_path):
    torch.save(wanted, tmp_path / "net.pth")
    assert ckptool.diff(folder, tmp_path / "net.pth", values=True).to_dict()["same_tensors"]
    other = wanted["grid"].clone()
    other[3, 5, 2, 1] += 1
    torch.save(wanted | {"grid": other}, tmp_path / "net.pth")
    rows = ckptool.diff(folder, tmp_path / "net.pth", values=True).to_dict()["changed"]
    assert [row["key"] for row in rows] == ["grid"]


def test_cast_on_the_way(folder, wanted, tmp_path):
    ckptool.convert(folder, tmp_path / "net.safetensors", dtype="bf16")
    found = safetensors.torch.load_file(tmp_path / "net.safetensors")
    for name in ("rows", "grid", "matrix by columns"):
        assert raw(found[name]) == raw(wanted[name].to(torch.bfloat16)), name


def test_the_layout_stays(folder):
    """As the one slice of a whole tensor keeps it."""
    strides = {t.key: t.stride for t in dcp.read(Folder(folder)).tensors}
    assert strides["grid"] == IMAGE.contiguous(memory_format=LAST).stride()
    assert strides["matrix by rows"] == (1, 5)


def test_slices_of_both_layouts_in_one_tensor_are_refused(tmp_path):
    shape, parts = cut(IMAGE, (2, 1, 1, 1), last)
    parts[2, 0, 0, 0] = parts[2, 0, 0, 0].contiguous()
    folder = save_slices(tmp_path / "x", {"w": (shape, parts)})
    with pytest.raises(ckptool.CkptError, match="one order of axes") as caught:
        dcp.read(Folder(folder))
    assert (caught.value.slug, caught.value.key) == ("unsupported", "w")
