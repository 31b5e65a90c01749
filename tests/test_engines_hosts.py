"""Three hosts that share a file system: network namespaces with a cable each. One runs driver and
scheduler, two a worker; one of them dies in the middle.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engines_support import convert, digests, left, make

pytest.importorskip("distributed", reason="Dask is not installed: ckptool[dask]")
HERE = Path(__file__).parent
NET = "10.213.7"
SCHEDULER = f"tcp://{NET}.1:8786"


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


def may_make_namespaces():
    """Whether this user, kernel and sandbox allow it: the only way to know is to try."""
    if shutil.which("ip") is None:
        return False
    name = f"ckpt-{os.getpid()}-try"
    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "add", "switch", "type", "bridge")
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return True


pytestmark = pytest.mark.long


@pytest.fixture
def hosts():
    """Names of three namespaces on one bridge, NET.1 to NET.3."""
    if not may_make_namespaces():
        pytest.skip("network namespaces need root, iproute2 and a kernel that lets us")
    names = [f"ckpt-{os.getpid()}-{number}" for number in (1, 2, 3)]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        first = names[0]
        ip("-n", first, "link", "add", "switch", "type", "bridge")
        ip("-n", first, "addr", "add", f"{NET}.1/24", "dev", "switch")
        ip("-n", first, "link", "set", "switch", "up")
        for number, name in enumerate(names[1:], 2):
            ip("-n", first, "link", "add", f"port{number}", "type", "veth",
               "peer", "name", "eth0", "netns", name)  # fmt: skip
            ip("-n", first, "link", "set", f"port{number}", "master", "switch", "up")
            ip("-n", name, "addr", "add", f"{NET}.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE), *sys.path])}


@contextlib.contextmanager
def running(*commands):
    """Programs that are ended with the block, each by its own number."""
    started = []
    try:
        started += [
            subprocess.Popen(
                command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            for command in commands
        ]
        yield started
    finally:
        for program in started:
            program.kill()
            program.wait()


def python(host, *words):
    return ["ip", "netns", "exec", host, sys.executable, *words]


def test_three_hosts_write_one_file_although_one_dies(hosts, tmp_path):
    source = make(tmp_path / "net.pth")
    shared = tmp_path / "shared"
    shared.mkdir()
    one, *others = hosts
    scheduler = python(one, "-m", "distributed.cli.dask_scheduler", "--host", f"{NET}.1",
                       "--port", "8786", "--no-dashboard", "--no-show")  # fmt: skip
    workers = [
        python(host, "-m", "distributed.cli.dask_worker", SCHEDULER, "--host", f"{NET}.{number}",
               "--nthreads", "1", "--no-nanny", "--no-dashboard",
               "--local-directory", str(tmp_path / f"worker{number}"))
        for number, host in enumerate(others, 2)
    ]  # fmt: skip
    with running(scheduler, *workers):
        wait_for_workers(one, 2)
        driver = python(one, str(HERE / "engines_driver.py"), str(source),
                        str(shared / "out.pth"), f"dask={SCHEDULER}")  # fmt: skip
        done = subprocess.run(
            driver, env=environment(), capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 0, done.stderr
    (tmp_path / "plain").mkdir()
    assert digests(shared / "out.pth") == digests(convert(source, tmp_path / "plain", "zip")[1])
    assert left(shared) == []
    signed = {path.name for path in shared.iterdir() if path.name.startswith("by-")}
    assert signed == {f"by-{NET}.2", f"by-{NET}.3"}
    assert (shared / "died").exists()


WAIT = """
import sys
from distributed import Client
with Client(sys.argv[1], timeout=60) as client:
    client.wait_for_workers(int(sys.argv[2]), timeout=60)
"""


def wait_for_workers(host, count):
    subprocess.run(
        python(host, "-c", WAIT, SCHEDULER, str(count)), env=environment(), check=True,
        capture_output=True, timeout=120,
    )  # fmt: skip


def test_the_hosts_are_apart(hosts):
    """A port that listens on one is not there on another's loopback."""
    code = "import socket; s = socket.create_server(('127.0.0.1', 8999)); input()"
    with subprocess.Popen(
        python(hosts[0], "-c", code), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as listening:
        time.sleep(0.3)
        reach = "import socket; socket.create_connection(('127.0.0.1', 8999), 1)"
        here = subprocess.run(python(hosts[0], "-c", reach), capture_output=True, check=False)
        there = subprocess.run(python(hosts[1], "-c", reach), capture_output=True, check=False)
        listening.kill()
    assert (here.returncode, there.returncode) == (0, 1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", 8999), 1)
