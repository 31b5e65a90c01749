"""The committed files are what their generator makes, and what torch says they are."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FIXTURES = Path(__file__).parent / "fixtures"
OPTIONAL = {"omegaconf_like.pth"}
"""Made only where omegaconf is importable; its committed file stays valid without."""


def truths_in(folder: Path) -> dict[str, dict[str, Any]]:
    found = (json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("*.json")))
    return {truth["file"]: truth for truth in found}


COMMITTED = truths_in(FIXTURES)
LOADABLE = sorted(name for name, truth in COMMITTED.items() if truth["torch_load"])


@pytest.fixture(scope="module")
def torch() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.__version__.startswith("2.13."):
        pytest.skip("the fixtures are those of torch 2.13")
    return torch


def test_every_file_has_its_truth_and_is_small():
    files = {p.name for p in FIXTURES.iterdir() if p.suffix not in (".json", ".py") and p.is_file()}
    assert files == set(COMMITTED)
    sizes = [p.stat().st_size for p in FIXTURES.iterdir() if p.is_file()]
    assert max(sizes) < 50_000
    assert sum(sizes) < 500_000


@pytest.mark.usefixtures("torch")
def test_the_generator_makes_what_is_committed(tmp_path: Path):
    script = FIXTURES / "make_fixtures.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, tmp_path],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONHASHSEED": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = truths_in(tmp_path)
    assert set(COMMITTED) - set(made) <= OPTIONAL
    for name, truth in made.items():
        assert truth == COMMITTED[name], name


@pytest.mark.parametrize("name", LOADABLE)
def test_torch_reads_the_committed_file_as_its_truth_says(name: str, torch: Any):
    from fixtures.make_fixtures import element_bytes

    truth = COMMITTED[name]
    full = truth["torch_load"] == "full"
    obj = torch.load(FIXTURES / name, map_location="cpu", weights_only=not full)
    for table in truth["tables"]:
        sd = obj
        for step in table["path"]:
            sd = sd[step]
        tensors = [(k, v) for k, v in sd.items() if isinstance(v, torch.Tensor)]
        assert [k for k, _ in tensors] == [row["key"] for row in table["tensors"]]
        for (_, tensor), row in zip(tensors, table["tensors"], strict=True):
            torch_offset = truth.get("torch_offsets", {}).get(row["key"], row["offset"])
            check_tensor(tensor, {**row, "offset": torch_offset}, element_bytes)


def check_tensor(tensor: Any, row: dict[str, Any], element_bytes: Any) -> None:
    assert list(tensor.shape) == row["shape"]
    assert str(tensor.dtype) == f"torch.{row['dtype']}"
    assert tensor.requires_grad == row["requires_grad"]
    if row["stride"] is not None:
        assert (list(tensor.stride()), tensor.storage_offset()) == (row["stride"], row["offset"])
    if row["sha256"] is not None:
        assert hashlib.sha256(element_bytes(tensor.detach())).hexdigest() == row["sha256"]
