"""Dask's own scheduler and workers: the same bytes, also when a worker is killed in the middle."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import engines_support as support
import pytest
from engines_support import CONVERSIONS, STEP, convert, digests, left, make

from ckptool import engines
from ckptool.cli.main import main
from ckptool.errors import EngineError

dask = pytest.importorskip("dask", reason="Dask is not installed: ckptool[dask]")
distributed = pytest.importorskip("distributed", reason="Dask is not installed: ckptool[dask]")
KILLED = Path(__file__).with_name("engine_killed.py")
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # Dask's own, of sockets and of event loops
]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make(tmp_path_factory.mktemp("in") / "net.pth")


@pytest.fixture(scope="module")
def cluster():
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as made:
        yield made


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch):
    monkeypatch.setattr(engines, "STEP", STEP)


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_cluster_writes_the_same_bytes(name, source, cluster, tmp_path):
    (tmp_path / "plain").mkdir()
    wanted = digests(convert(source, tmp_path / "plain", name)[1])
    _, path = convert(source, tmp_path, name, engine=f"dask={cluster.scheduler_address}")

    assert digests(path) == wanted
    assert left(tmp_path) == []


def test_the_command_takes_a_scheduler(source, cluster, tmp_path):
    out = tmp_path / "out.safetensors"
    flags = ["--engine", f"dask={cluster.scheduler_address}"]
    assert main(["convert", str(source), "-o", str(out), *flags]) == 0
    (tmp_path / "plain").mkdir()
    assert digests(out) == digests(convert(source, tmp_path / "plain", "safetensors")[1])


def test_the_tasks_of_a_killed_worker_run_again(source, cluster, tmp_path, monkeypatch):
    whole = engines.carry_out
    monkeypatch.setattr(
        engines, "carry_out", lambda pool, work, tasks, got: whole(pool, support.dying, tasks, got)
    )
    _, path = convert(source, tmp_path, "zip", engine=f"dask={cluster.scheduler_address}")

    killed = int((tmp_path / "died").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(killed, 0)
    (tmp_path / "plain").mkdir()
    assert digests(path) == digests(convert(source, tmp_path / "plain", "zip")[1])
    assert left(tmp_path) == []


def test_a_killed_driver_is_gone_on_with(source, cluster, tmp_path):
    engine = f"dask={cluster.scheduler_address}"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, str(KILLED), str(source), str(tmp_path / "out.pth"), "7", "--to-cpu",
            "--engine", engine]  # fmt: skip
    killed = subprocess.run(argv, env=env, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(left(tmp_path)) == 2
    done, path = convert(source, tmp_path, "zip", engine=engine, resume=True)

    (tmp_path / "plain").mkdir()
    assert digests(path) == digests(convert(source, tmp_path / "plain", "zip")[1])
    assert left(tmp_path) == []
    assert any("interrupted run: 7 of" in note.text for note in done.notes)


def test_a_worker_that_raises(source, cluster, tmp_path, monkeypatch):
    whole = engines.carry_out
    monkeypatch.setattr(
        engines,
        "carry_out",
        lambda pool, work, tasks, got: whole(pool, support.raising, tasks, got),
    )
    with pytest.raises(EngineError, match="the worker fell over"):
        convert(source, tmp_path, "zip", engine=f"dask={cluster.scheduler_address}")
    assert os.listdir(tmp_path) == []


def test_a_scheduler_that_is_not_there(source, tmp_path):
    quick = dask.config.set({"distributed.comm.timeouts.connect": "1s"})
    with quick, pytest.raises(EngineError, match="no Dask scheduler answers"):
        convert(source, tmp_path, "zip", engine="dask=tcp://127.0.0.1:1")
    assert os.listdir(tmp_path) == []
