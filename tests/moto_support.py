"""moto's S3 server in a virtual environment of its own, for the long tests of buckets."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request

import pytest
from servers_support import free_port, started


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
def server(moto, tmp_path_factory):
    port = free_port()
    command = [str(moto), "-H", "127.0.0.1", "-p", str(port)]
    with started(command, port, tmp_path_factory.mktemp("moto") / "said"):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def environment(server):
    """What a process needs to be let in."""
    return {
        "AWS_ENDPOINT_URL": server, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_REGION": "us-east-1",
    }  # fmt: skip


@pytest.fixture
def bucket(server, environment, monkeypatch, request):
    for name, value in environment.items():
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

    def put(self, key, data=b""):
        """As any program may, also under a key that obstore would not write."""
        kind = {"Content-Type": "application/octet-stream"}
        made = urllib.request.Request(f"{self.server}/{self.name}/{key}", data, kind, method="PUT")
        urllib.request.urlopen(made).close()

    def is_bare(self):
        """No object, no upload under way."""
        return b"<Contents>" not in self.ask("?list-type=2") and b"<Upload>" not in self.ask(
            "?uploads"
        )
