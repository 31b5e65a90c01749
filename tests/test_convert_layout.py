"""The layout of every zip that convert builds anew: what `.format_version` promises."""

from __future__ import annotations

import os
import zipfile
from collections import OrderedDict

import pytest
import torch
from container_support import big_endian, convert, promise_kept, records_of, rezipped, same_weights
from torch.utils.serialization import config
from verbs_support import data_offset, load, notes, save_resume

BUILT = {
    "entry": {"drop_entry": "optimizer"}, "first": {"drop": "module.conv.weight"},
    "only": {"only": "bias"}, "select": {"select": "state_dict"}, "compact": {"compact": True},
    "bfloat16": {"dtype": "bfloat16", "drop_entry": "scalar"}, "float8": {"dtype": "float8_e4m3fn"},
    "all": {"strip_module": True, "select": "state_dict", "compact": True, "dtype": "float16",
            "keep_dtype": "*bn*", "drop": "conv.*"},
}  # fmt: skip


@pytest.mark.parametrize("options", BUILT.values(), ids=BUILT)
def test_the_layout_that_torch_computes_is_exact(options, tmp_path):
    path = save_resume(tmp_path / "net.pth", "cpu")
    convert(path, tmp_path / "o.pth", **options)

    promise_kept(tmp_path / "o.pth", weights_only=False)


def many():
    return OrderedDict((f"w{i}", torch.full((i + 1,), float(i))) for i in range(23))


def lexicographic(path, sd):
    """Torch 1.8 to 2.0: records in the order 0, 1, 10, 11, 2, and no promise."""
    records = records_of(sd)
    return rezipped(path, dict(sorted(records.items())))


def test_records_in_another_order_are_put_in_the_order_of_use(tmp_path):
    path = lexicographic(tmp_path / "net.pth", many())
    convert(path, tmp_path / "o.pth", drop="w1")
    convert(path, tmp_path / "p.pth", rename={"w2": "v2"})

    sd = many()
    del sd["w1"]
    with zipfile.ZipFile(tmp_path / "o.pth") as z:
        stored = [n.rsplit("/", 1)[1] for n in z.namelist() if "/data/" in n]
    assert stored == [str(i) for i in range(22)]
    same_weights(sd, load(tmp_path / "o.pth", mmap=True))
    assert list(load(tmp_path / "p.pth", mmap=True).values())[21].tolist() == [21.0] * 22


def test_files_without_checksums_stay_readable(tmp_path):
    config.save.compute_crc32 = False
    try:
        path = save_resume(tmp_path / "net.pth")
    finally:
        config.save.compute_crc32 = True
    for at, options in enumerate(
        [{"to_cpu": True}, {"drop_entry": "optimizer"}, {"dtype": "float16"}]
    ):
        out = tmp_path / f"{at}.pth"
        convert(path, out, **options)
        with zipfile.ZipFile(out) as z:
            assert all(i.CRC == 0 for i in z.infolist() if "/data/" in i.filename) == (at < 2)
        assert load(out)["epoch"] == 90
        assert load(out, mmap=True)["epoch"] == 90
        assert convert(out, tmp_path / f"{at}.again.pth", to_gpu=1).devices
    sd = convert(path, tmp_path / "o.safetensors")
    assert sd.outputs[0][1] == os.path.getsize(tmp_path / "o.safetensors")


def test_another_alignment_is_kept(tmp_path):
    config.save.storage_alignment = 4096
    try:
        torch.save(many(), tmp_path / "net.pth")
    finally:
        config.save.storage_alignment = 64
    convert(tmp_path / "net.pth", tmp_path / "o.pth", drop="w3")

    assert data_offset(tmp_path / "o.pth", "data/7") % 4096 == 0
    promise_kept(tmp_path / "o.pth")


def test_a_big_endian_zip_whose_parts_go_comes_out_little(tmp_path):
    sd = OrderedDict(a=torch.arange(3.0), b=torch.arange(4).view(2, 2).t(), c=torch.ones(2) * 2j)
    path = big_endian(tmp_path / "net.pth", sd)
    done = convert(path, tmp_path / "o.pth", drop="a")
    convert(path, tmp_path / "l.pth", to="legacy")

    assert "byte-order" in notes(done)
    same_weights(sd, load(tmp_path / "l.pth", weights_only=True))
    del sd["a"]
    same_weights(sd, load(tmp_path / "o.pth", mmap=True))
