"""Executors of other packages, by their own servers: MPI's processes, Ray's."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from engines_support import CONVERSIONS, STEP, convert, digests, left, make
from readme_support import ROOT, steps

from ckptool import engines

SCALE = ROOT / "docs" / "scale.md"
RANKS = Path(__file__).with_name("engines_ranks.py")
MPIEXEC = shutil.which(
    "mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
)
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # Ray's own


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make(tmp_path_factory.mktemp("in") / "net.pth")


def plain(source, folder, name):
    folder.mkdir()
    return digests(convert(source, folder, name)[1])


@pytest.mark.skipif(MPIEXEC is None or find_spec("mpi4py") is None, reason="no mpi4py and mpiexec")
def test_three_mpi_processes_write_the_same_bytes(source, tmp_path):
    for name in CONVERSIONS:
        (tmp_path / name).mkdir()
    command = [MPIEXEC, "-n", "3", sys.executable, str(RANKS), str(source), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

    for name, (output, _) in CONVERSIONS.items():
        wanted = plain(source, tmp_path / f"plain {name}", name)
        assert digests(tmp_path / name / output) == wanted, name
    assert left(tmp_path) == []


def test_ray_writes_the_same_bytes(source, tmp_path, monkeypatch):
    """By the executor that docs/scale.md gives."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")

    (code,) = [step.text for step in steps(SCALE.read_text("utf-8")) if step.mark == "ray"]
    names = {}
    exec(code, names)
    monkeypatch.setattr(engines, "STEP", STEP)
    paths = os.pathsep.join([str(RANKS.parent), *sys.path])
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    try:
        for name in CONVERSIONS:
            (tmp_path / name).mkdir()
            _, path = convert(source, tmp_path / name, name, engine=names["OnRay"]())
            assert digests(path) == plain(source, tmp_path / f"plain {name}", name), name
    finally:
        ray.shutdown()
    assert left(tmp_path) == []
