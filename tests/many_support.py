"""Folders that are one checkpoint each, for walks of a disk and of a bucket."""

from __future__ import annotations

import shutil
import zipfile

import torch
import zero_support as zero
from verbs_support import FIXTURES

import ckptool

LAYOUTS = {
    "dcp": "dcp",
    "epoch=1.ckpt": "deepspeed-zero",
    "fsdp.ckpt": "dcp",
    "hf/model.safetensors.index.json": "hf-shards",
    "net": "torch-unpacked",
    "zero": "deepspeed-zero",
    f"zero/{zero.TAG}0": "deepspeed-zero",
}
"""{what a walk says of `whole_folders`: how it is read}."""


def whole_folders(folder):
    """One of each layout in `folder`; two tags of DeepSpeed's, of which `latest` names one."""
    shutil.copytree(FIXTURES / "dcp" / "fsdp", folder / "dcp")
    shutil.copytree(FIXTURES / "dcp" / "fsdp", folder / "fsdp.ckpt")
    torch.save({"epoch": 3}, folder / "fsdp.ckpt" / "meta.pt")
    zero.write(folder / "zero", zero.net(), 2, 2, tag=f"{zero.TAG}0")
    zero.write(folder / "more", zero.net(), 3, 2)
    (folder / "more" / zero.TAG).rename(folder / "zero" / zero.TAG)
    shutil.rmtree(folder / "more")
    (folder / "zero" / "latest").write_text(zero.TAG)
    zero.write(folder / "epoch=1.ckpt", zero.net(), 2, 2, tag="checkpoint")
    for name in ("zero", "epoch=1.ckpt"):
        (folder / name / "zero_to_fp32.py").write_text("raise SystemExit")
    torch.save({f"w{i}": torch.zeros(1000) for i in range(4)}, folder / "net.pth")
    ckptool.convert(folder / "net.pth", folder / "hf", max_shard_size="5KB")
    with zipfile.ZipFile(folder / "net.pth") as z:
        z.extractall(folder)
    (folder / "net.pth").unlink()


def put_tree(store, folder, prefix):
    """Every file of a folder as an object under `prefix`."""
    import obstore

    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = f"{prefix}/{path.relative_to(folder).as_posix()}"
            obstore.put(store, name, path.read_bytes())
