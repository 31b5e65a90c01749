"""Shards sent to moto's S3 server by threads, by processes and by Dask, some of them killed."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import monotonic, sleep

import engines_support as support
import pytest
from engines_support import CONVERSIONS, digests, make
from readme_support import ROOT, steps
from verbs_support import FIXTURES, cli

import ckptool
from ckptool import remote_book, remote_engine, remote_sink, remote_tasks
from ckptool.errors import EngineError

pytest_plugins = ["moto_support"]
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # Dask's own, of sockets
obstore = pytest.importorskip("obstore")
KILLED = Path(__file__).with_name("engine_killed.py")
WORDS = {"max_shard_size": "700KB"}
LARGE = {"max_shard_size": "20MB"}


@pytest.fixture
def source(tmp_path):
    return make(tmp_path / "net.pth")


@pytest.fixture
def large(tmp_path):
    """49 MB: shards of it are sent in parts."""
    return make(tmp_path / "large.pth", 12, 1 << 20)


def local(source, tmp_path, words=WORDS):
    """What one process makes of it, on the disk."""
    ckptool.convert(source, tmp_path / "plain", **words)
    return digests(tmp_path / "plain")


def objects(bucket, prefix="out/"):
    """SHA-256 of each object under a prefix, by name."""
    store = obstore.store.S3Store(bucket.name, client_options={"allow_http": True})
    found = [row["path"] for rows in obstore.list(store, prefix) for row in rows]
    return {
        name.removeprefix(prefix): hashlib.sha256(
            bytes(obstore.get(store, name).bytes())
        ).hexdigest()
        for name in found
    }


def unfinished(bucket):
    """Whether an upload is under way."""
    return b"<Upload>" in bucket.ask("?uploads")


def processes(count):
    """obstore's threads do not outlive a fork."""
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"))


@pytest.fixture
def workers(monkeypatch):
    """Let the tasks be run by another function."""

    def use(function):
        real = remote_engine.carry_out
        monkeypatch.setattr(
            remote_engine, "carry_out",
            lambda pool, work, tasks, *rest: real(pool, function, tasks, *rest),
        )  # fmt: skip

    return use


# -- threads and processes ---------------------------------------------------------------------
def test_threads_send_the_same_bytes(bucket, large, tmp_path, capsys):
    args = ("convert", large, "-o", f"{bucket.url}/out/", "--max-shard-size", "20MB", "--jobs", "2")
    assert cli(capsys, *args)[0] == 0
    assert objects(bucket) == local(large, tmp_path, LARGE)
    assert not unfinished(bucket)
    assert ckptool.verify(f"{bucket.url}/out/").exit_status == 0


@pytest.mark.parametrize("name", ["shards", "cast shards"])
def test_processes_send_the_same_bytes(name, bucket, source, tmp_path):
    words = CONVERSIONS[name][1]
    with processes(2) as pool:
        ckptool.convert(source, f"{bucket.url}/out", **words, engine=pool)
    assert objects(bucket) == local(source, tmp_path, words)


@pytest.mark.parametrize("what", ["shards", "dcp"])
def test_processes_read_a_folder_in_the_bucket(what, bucket, source, tmp_path):
    here = FIXTURES / "dcp" / "mixed"
    if what == "shards":
        here = tmp_path / "in"
        ckptool.convert(source, here, max_shard_size="1500KB")
    store = obstore.store.S3Store(bucket.name, client_options={"allow_http": True})
    for file in sorted(here.iterdir()):
        obstore.put(store, f"in/{file.name}", file.read_bytes())
    words = {"max_shard_size": "700KB" if what == "shards" else "150B"}
    with processes(2) as pool:
        ckptool.convert(f"{bucket.url}/in/", f"{bucket.url}/out/", **words, engine=pool)
    wanted = local(here, tmp_path, words)
    assert objects(bucket) == wanted
    assert len(wanted) > 2


def test_processes_that_were_forked_say_so(bucket, source):
    """They would wait for ever."""
    forked = ProcessPoolExecutor(1, mp_context=get_context("fork"))
    with forked as pool, pytest.raises(EngineError, match="was forked") as caught:
        ckptool.convert(source, f"{bucket.url}/out", **WORDS, engine=pool)
    assert "spawn" in caught.value.hint
    assert bucket.is_bare()


def test_two_runs_into_one_prefix(bucket, source, tmp_path, capsys):
    args = (
        "convert",
        source,
        "-o",
        f"{bucket.url}/out",
        "--max-shard-size",
        "700KB",
        "--jobs",
        "2",
        "--json",
    )
    assert cli(capsys, *args)[0] == 0
    status, out, _ = cli(capsys, *args)
    assert (status, json.loads(out)["error"]["slug"]) == (2, "output-exists")
    assert cli(capsys, *args, "-f")[0] == 0
    assert objects(bucket) == local(source, tmp_path)


@pytest.mark.parametrize("method", ["write", "publish"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_killed_process(method, resume, bucket, source, tmp_path, workers, monkeypatch):
    """In the middle of a shard, or after it when nobody knows yet."""
    with monkeypatch.context() as patch:
        real = remote_engine.carry_out
        dying = partial(support.dying_sender, method=method)
        patch.setattr(
            remote_engine,
            "carry_out",
            lambda pool, work, tasks, *rest: real(pool, dying, tasks, *rest),
        )
        with processes(1) as pool, pytest.raises(EngineError, match="BrokenProcessPool"):
            ckptool.convert(source, f"{bucket.url}/out", **WORDS, engine=pool, resume=resume)
    assert (tmp_path / "died").exists()
    if not resume:
        assert bucket.is_bare()
        return
    assert remote_book.NAME in objects(bucket)
    with processes(2) as pool:
        done = ckptool.convert(source, f"{bucket.url}/out", **WORDS, engine=pool, resume=True)
    assert objects(bucket) == local(source, tmp_path)
    assert any("gone on from" in note.text for note in done.notes)


def test_a_process_killed_between_two_parts(bucket, large, tmp_path, workers):
    words = {"max_shard_size": "18MB"}
    workers(partial(support.dying_sender, number=0, after=12 << 20))
    with processes(1) as pool, pytest.raises(EngineError):
        ckptool.convert(large, f"{bucket.url}/out", **words, engine=pool, resume=True)
    assert (tmp_path / "died").exists()
    ckptool.convert(large, f"{bucket.url}/out", **words, jobs=2, resume=True)
    assert objects(bucket) == local(large, tmp_path, words)


# -- a driver that is killed -------------------------------------------------------------------
def killed(source, target, count, *flags):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, str(KILLED), str(source), target, str(count), *flags]
    done = subprocess.run(argv, env=env, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_a_killed_driver_is_gone_on_with(bucket, large, tmp_path, monkeypatch):
    out = f"{bucket.url}/out/"
    flags = ("--max-shard-size", "9MB", "--jobs", "2")
    killed(large, out, 2, *flags)
    left = set(objects(bucket))
    assert remote_book.NAME in left
    assert not any(name.endswith(".json") for name in left)

    sent, real = [], remote_tasks.write_whole
    monkeypatch.setattr(
        remote_tasks, "write_whole",
        lambda output, outlet, *rest, **words: (
            sent.append(output.name), real(output, outlet, *rest, **words))[1],
    )  # fmt: skip
    words = {"max_shard_size": "9MB"}
    done = ckptool.convert(large, out, **words, resume=True)
    wanted = local(large, tmp_path, words)
    assert objects(bucket) == wanted
    assert set(sent).isdisjoint(left)
    assert any(note.text.startswith("gone on from an interrupted run: ") for note in done.notes)


# -- Dask --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def cluster(environment):
    distributed = pytest.importorskip("distributed", reason="Dask is not installed: ckptool[dask]")
    here = str(Path(__file__).parent)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
        with distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        ) as made:
            yield made


def test_a_cluster_sends_the_same_bytes(bucket, large, cluster, tmp_path, capsys):
    args = ("convert", large, "-o", f"{bucket.url}/out/", "--max-shard-size", "20MB", "--engine",
            f"dask={cluster.scheduler_address}")  # fmt: skip
    assert cli(capsys, *args)[0] == 0
    assert objects(bucket) == local(large, tmp_path, LARGE)


def test_the_commands_of_the_guide(bucket, source, cluster, tmp_path, capsys):
    scale = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    (block,) = [step for step in steps(scale) if step.mark == "shards"]
    ckptool.convert(source, f"{bucket.url}/step5/", **WORDS)
    for number, line in enumerate(block.commands):
        line = (
            line.replace("big.pth", str(source))
            .replace("5GB", "700KB")
            .replace("/out/", f"/{number}/")
        )
        line = line.replace("s3://bucket", bucket.url)
        line = line.replace("tcp://HOST:8786", cluster.scheduler_address)
        status, _, err = cli(capsys, *shlex.split(line)[1:])
        assert status == 0, (line, err)
        assert objects(bucket, f"{number}/") == objects(bucket, "step5/")
    assert number == 2


@pytest.mark.parametrize("method", ["write", "publish"])
def test_the_task_of_a_killed_worker_runs_again(method, bucket, source, cluster, tmp_path, workers):
    workers(partial(support.dying_sender, method=method))
    engine = f"dask={cluster.scheduler_address}"
    done = ckptool.convert(source, f"{bucket.url}/out", **WORDS, engine=engine)
    dead = int((tmp_path / "died").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(dead, 0)
    assert objects(bucket) == local(source, tmp_path)
    assert any("gone on" in n.text for n in done.notes) == (method == "publish")  # it was found


def test_a_killed_driver_of_a_cluster(bucket, source, cluster, tmp_path):
    engine = f"dask={cluster.scheduler_address}"
    killed(source, f"{bucket.url}/out", 2, "--max-shard-size", "700KB", "--engine", engine)
    ckptool.convert(source, f"{bucket.url}/out", **WORDS, engine=engine, resume=True)
    assert objects(bucket) == local(source, tmp_path)


def test_an_interrupted_cluster_leaves_nothing(bucket, large, cluster, monkeypatch):
    """Workers that are in the middle of a shard give it up when its run is."""
    real = remote_engine._Run.received

    def received(self, task, stored):
        real(self, task, stored)
        raise KeyboardInterrupt

    monkeypatch.setattr(remote_engine._Run, "received", received)
    with pytest.raises(KeyboardInterrupt):
        ckptool.convert(
            large, f"{bucket.url}/out", max_shard_size="9MB",
            engine=f"dask={cluster.scheduler_address}",
        )  # fmt: skip
    assert objects(bucket) == {}
    until = monotonic() + 20
    while not bucket.is_bare():  # uploads that their workers are giving up
        assert monotonic() < until
        sleep(0.2)


def test_nothing_is_left_of_an_interrupted_upload(bucket, large, monkeypatch):
    real = remote_engine._Run.received

    def received(self, task, stored):
        real(self, task, stored)
        raise KeyboardInterrupt

    monkeypatch.setattr(remote_engine._Run, "received", received)
    monkeypatch.setattr(remote_sink, "ONE_REQUEST", 0)
    with pytest.raises(KeyboardInterrupt):
        ckptool.convert(large, f"{bucket.url}/out", max_shard_size="9MB", jobs=2)
    assert bucket.is_bare()
