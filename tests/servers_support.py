"""Servers on loopback while a test needs them: programs, and handlers in a thread of this process."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from http.server import ThreadingHTTPServer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def started(command, port, said, **options):
    """The process of a program that listens on `port`; what it prints goes into the file `said`."""
    with said.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, **options)
    try:
        for _ in range(600):
            assert process.poll() is None, said.read_text()
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.05)
        else:
            raise AssertionError(f"{command[0]} does not answer: {said.read_text()}")
        yield process
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:  # it waits for connections that are kept alive
            process.kill()
            process.wait()


@contextlib.contextmanager
def answering(handler):
    """A web server on a port of its own, that answers by `handler`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
