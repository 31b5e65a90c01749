"""docs/scale.md: every command is run, with a server on loopback for what has a URL."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys

import pytest
from readme_support import ROOT, expected_status, options_known, options_named, run, steps

pytest.importorskip("obstore")
from remote_support import serving

SCALE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
FIXTURES = ROOT / "tests" / "fixtures"
BLOCKS = [step for step in steps(SCALE) if step.kind == "bash" and not step.mark]
ELSEWHERE = {
    "stores": "test_remote_s3.py",
    "cluster": "test_engines_dask.py",
    "shards": "test_remote_tasks_s3.py",
}
"""Blocks that need a store or a cluster, and the long tests that run such commands."""


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(FIXTURES / "dcp" / "fsdp", tmp_path / "step5")
    (tmp_path / "runs").mkdir()
    for name in ("net_plain.pth", "dp_cuda.pth"):
        shutil.copy(FIXTURES / name, tmp_path / "runs")
    shutil.copy(FIXTURES / "dp_cuda.pth", tmp_path / "net.pth")
    return tmp_path


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line {block.line}")
def test_a_block_works_from_its_first_line_to_its_last(block, folder):
    with serving(files={"net.pth": folder / "net.pth"}) as site:
        for line in block.commands:
            (folder / "net.st.safetensors").unlink(missing_ok=True)
            told = line.replace("https://example.com/", site.url(""))
            done = run(shlex.split(told, comments=True)[1:], folder)
            assert done.returncode == expected_status(line), (line, done.stdout + done.stderr)


def test_an_executor_of_processes_writes_what_one_process_writes(folder):
    (code,) = [step.text for step in steps(SCALE) if step.mark == "executor"]
    (folder / "go.py").write_text(code)
    subprocess.run([sys.executable, "go.py"], cwd=folder, check=True)
    run(["convert", "net.pth", "-o", "one.safetensors"], folder)
    several = (folder / "net.st.safetensors").read_bytes()
    assert several == (folder / "one.safetensors").read_bytes()


def test_what_is_not_run_here_is_run_by_long_tests(tmp_path):
    marks = {step.mark for step in steps(SCALE) if step.kind == "bash" and step.mark}
    assert marks == set(ELSEWHERE)
    for name in ELSEWHERE.values():
        assert "pytest.mark.long" in (ROOT / "tests" / name).read_text(encoding="utf-8")
    named = options_named(SCALE)
    assert {"--engine", "--resume"} <= named
    assert named <= options_known(tmp_path)
