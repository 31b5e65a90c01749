"""Round trips through moto's S3 server, in a virtual environment of its own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from verbs_support import FIXTURES, cli

import ckptool
from ckptool import remote_sink, remote_stores
from ckptool.errors import CkptError

pytestmark = pytest.mark.long
obstore = pytest.importorskip("obstore")
NET = FIXTURES / "dp_cuda.pth"


@pytest.fixture(scope="module")
def moto(pytestconfig):
    """The program: CKPTOOL_MOTO names it, else pytest's cache keeps the environment."""
    given = os.environ.get("CKPTOOL_MOTO")
    if given:
        return given
    home = pytestconfig.cache.mkdir("moto")
    program = home / "bin" / "moto_server"
    if not program.exists():
        try:
            subprocess.run([sys.executable, "-m", "venv", home], check=True, capture_output=True)
            pip = [home / "bin" / "pip", "install", "-q", "moto[server,s3]==5.2.5"]
            subprocess.run(pip, check=True, capture_output=True, timeout=300)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"moto cannot be installed: {error}")
    return program


@pytest.fixture(scope="module")
def server(moto):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(moto), "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def bucket(server, monkeypatch, request):
    for name, value in {
        "AWS_ENDPOINT_URL": server, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    name = f"b{abs(hash(request.node.name)):x}"
    made = urllib.request.Request(f"{server}/{name}", method="PUT")
    urllib.request.urlopen(made).close()
    return Bucket(server, name)


class Bucket:
    def __init__(self, server, name):
        self.server, self.name, self.url = server, name, f"s3://{name}"

    def ask(self, path):
        with urllib.request.urlopen(f"{self.server}/{self.name}{path}") as answer:
            return answer.read()

    def is_bare(self):
        """No object, no upload under way."""
        return b"<Contents>" not in self.ask("?list-type=2") and b"<Upload>" not in self.ask(
            "?uploads"
        )


@pytest.fixture
def big(tmp_path):
    """40 MB: sent in parts."""
    path = tmp_path / "big.pth"
    state = {f"module.{i}": torch.randn(1 << 20).to("cpu") for i in range(10)}
    torch.save(state, path)
    return path


@pytest.mark.parametrize("size", ["small", "big"])
def test_a_round_trip(size, bucket, big, tmp_path, capsys):
    file = big if size == "big" else NET
    there = f"{bucket.url}/a b/out.pth"
    assert cli(capsys, "convert", file, "--to-cpu", "-o", there)[0] == 0
    assert cli(capsys, "convert", file, "--to-cpu", "-o", tmp_path / "here")[0] == 0
    store = obstore.store.S3Store(bucket.name, client_options={"allow_http": True})
    found = bytes(obstore.get(store, "a b/out.pth").bytes())
    assert found == (tmp_path / "here").read_bytes()
    assert ckptool.verify(there).exit_status == 0
    assert cli(capsys, "convert", there, "--add-module", "-o", f"{bucket.url}/back.pth")[0] == 0
    assert ckptool.diff(f"{bucket.url}/back.pth", str(file)).same
    loaded = ckptool.load(there)
    assert loaded.keys() == torch.load(tmp_path / "here", weights_only=False).keys()


@pytest.mark.parametrize("size", ["small", "big"])
def test_create_only_and_force(size, bucket, big, capsys):
    args = (
        "convert",
        big if size == "big" else NET,
        "--to-cpu",
        "-o",
        f"{bucket.url}/o.pth",
        "--json",
    )
    assert cli(capsys, *args)[0] == 0
    status, out, _ = cli(capsys, *args)
    assert (status, json.loads(out)["error"]["slug"]) == (2, "output-exists")
    assert cli(capsys, *args, "-f")[0] == 0


def test_a_small_one_is_created_by_the_store_alone(bucket, monkeypatch, capsys):
    """Not by looking first: the look sees nothing here, the request itself is refused."""
    monkeypatch.setattr(remote_sink.ObjectTarget, "_check_free", lambda self: None)
    args = ("convert", NET, "--to-cpu", "-o", f"{bucket.url}/o.pth", "--json")
    assert cli(capsys, *args)[0] == 0
    status, out, _ = cli(capsys, *args)
    assert (status, json.loads(out)["error"]["slug"]) == (2, "output-exists")


def test_a_large_one_is_read_once(bucket, big, tmp_path, monkeypatch):
    """In large pieces: moto, and whoever bills requests, does not care how many bytes one has."""
    ckptool.convert(big, f"{bucket.url}/big.pth", strip_module=True)
    sizes, get = [], remote_stores.Store.get

    def counted(self, start, end):
        sizes.append(end - start)
        return get(self, start, end)

    monkeypatch.setattr(remote_stores.Store, "get", counted)
    ckptool.convert(f"{bucket.url}/big.pth", tmp_path / "o.pth", add_module=True)
    assert big.stat().st_size <= sum(sizes) <= 1.05 * big.stat().st_size
    assert len([size for size in sizes if size > 100_000]) <= 8


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_upload_given_up_leaves_nothing(error, bucket, big, monkeypatch):
    from ckptool.verbs import convert

    def fails(*args):
        raise error("no")

    monkeypatch.setattr(convert, "confirm", fails)
    with pytest.raises((KeyboardInterrupt, CkptError)):
        ckptool.convert(big, f"{bucket.url}/o.pth", to_cpu=True)
    assert bucket.is_bare()


def test_shards(bucket, big, capsys):
    args = ("convert", big, "--strip-module", "--max-shard-size", "20MB", "-o", f"{bucket.url}/m/")
    assert cli(capsys, *args)[0] == 0
    assert ckptool.verify(f"{bucket.url}/m/").exit_status == 0
    assert ckptool.diff(f"{bucket.url}/m/", str(big)).same


def test_a_missing_bucket(bucket):
    with pytest.raises(CkptError) as caught:
        ckptool.inspect("s3://no-such-bucket/a.pth")
    assert (caught.value.slug, caught.value.text) == ("special-file", "no such bucket")
