"""The benchmarks run, on files too small to say anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
ROWS = {
    "inspect": ("ckptool inspect", "torch.load(mmap=True)", "import click, tabulate"),
    "convert": ("ckptool convert --to-cpu --no-check", "rename, torch.save", "| cp |"),
    "export": (
        "Hugging Face's way",
        "load_file, torch.save",
        "ckptool convert --to zip --no-check",
        "ckptool convert --dtype bfloat16, fsync",
        "torch.load(mmap=True), clone, torch.save",
        "ckptool convert --in-place --strip-module",
        "times cp, at most 1.6",
        "MB, at most 200: reached",
        "beyond python -c 'import click, tabulate', at most 0.5 s",
    ),
    "verify": (
        "python -m zipfile -t",
        "zlib.crc32 over the file",
        "torch.load(mmap=True), torch.isfinite",
        "times a bare CRC pass on the clock, at most 1.3",
    ),
    "load": (
        "ckptool.load(check=False)",
        "load_file, clone",
        "times torch.load from start to end, at most 1",
        "peak memory: ",
        "beyond import torch: ",
    ),
    "dcp": (
        "dcp_to_torch_save, load, save_file",
        "times faster than dcp_to_torch_save and an export, at least 5",
        "MB, at most 60: reached",
    ),
    "diff": (
        "ckptool diff --bytes",
        "| cmp |",
        "torch.load(mmap=True), the same figures",
        "MB, at most 150: reached",
    ),
    "stats": (
        "ckptool inspect --stats --hash",
        "torch.load(mmap=True), its sums in doubles",
        "times torch's own sums without its import, at most 1",
        "MB, at most 150: reached",
    ),
    "many": (
        "ckptool inspect -r --format jsonl",
        "torch.load of each, one process",
        "safe_open of each, one process",
        "s for 50 files, at most 2",
    ),
    "jobs": ("| --jobs 2 |", "| --resume |", "cast to float8_e4m3fn, shards"),
    "walk": ("ckptool.pickles.walk", "pickletools.genops"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ROWS)
def test_a_benchmark_runs_and_keeps_its_table(name: str, tmp_path: Path):
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    results = tmp_path / "results.md"
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--small", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--dir", tmp_path / "files", "--results", results],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = results.read_text(encoding="utf-8")
    assert "Machine: " in text
    for row in ROWS[name]:
        assert row in text
    assert text in done.stdout
