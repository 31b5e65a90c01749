"""Servers that lie, send without end, say nothing, or would be told what they should not."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from test_remote import NET, refused
from verbs_support import ROOT

import ckptool
from ckptool.urls import mask_within, masked

pytest.importorskip("obstore")
FLOOD = 64 << 20  # bytes a server sends, of which few may be taken


class Raw:
    """A server of sockets: `answer(head of the request, connection)` does as it likes."""

    def __init__(self, answer):
        self.answer = answer
        self.sent = 0
        self.heads: list[bytes] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/f.pth"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                line, _ = self._listening.accept()
                threading.Thread(target=self._one, args=(line,), daemon=True).start()

    def _one(self, line):
        head = b""
        with line, contextlib.suppress(OSError):
            while b"\r\n\r\n" not in head:
                more = line.recv(65536)
                if not more:
                    return
                head += more
            self.heads.append(head)
            self.answer(head, line, self)

    def flood(self, line, block):
        for _ in range(FLOOD // len(block)):
            line.sendall(block)
            self.sent += len(block)

    def close(self):
        self._listening.close()


@pytest.fixture
def raw():
    made = []

    def serve(answer):
        made.append(Raw(answer))
        return made[-1]

    yield serve
    for server in made:
        server.close()


def flooding(status, length, chunked):
    def answer(head, line, server):
        said = ["ETag: 1", f"Content-Length: {length}"]
        said += ["Content-Range: bytes 0-65535/200000"] if status == 206 else []
        said += ["Transfer-Encoding: chunked"] if chunked else []
        line.sendall("\r\n".join([f"HTTP/1.1 {status} X", *said, "", ""]).encode())
        data = bytes(1 << 16)
        server.flood(line, b"%x\r\n%s\r\n" % (len(data), data) if chunked else data)

    return answer


@pytest.mark.parametrize(("status", "length", "chunked"), [
    (206, 1 << 40, False), (206, 65536, True), (200, 65536, True), (200, 1 << 40, False),
])  # fmt: skip
def test_of_an_answer_without_end_little_is_taken(status, length, chunked, raw):
    server = raw(flooding(status, length, chunked))
    error = refused(server.url)
    assert error.slug == ("truncated" if (status, chunked) != (200, False) else "remote-no-ranges")
    time.sleep(0.05)
    assert server.sent < FLOOD // 2  # what a socket's buffers hold


def test_a_break_goes_on_where_it_was(raw):
    """Where less comes than was said, what is left is asked for."""
    data = NET.read_bytes()

    def answer(head, line, server):
        start = int(head.partition(b"bytes=")[2].partition(b"-")[0])
        text = f"HTTP/1.1 206 X\r\nETag: 1\r\nContent-Length: {len(data) - start}\r\nContent-Range: bytes {start}-{len(data) - 1}/{len(data)}\r\n\r\n"
        line.sendall(text.encode() + data[start : start + len(data) // 2])

    server = raw(answer)
    there, here = (ckptool.inspect(place).to_dict() for place in (server.url, NET))
    assert there["tables"] == here["tables"]
    assert len(server.heads) == 2


def test_an_interrupt_does_not_wait_for_a_server_that_says_nothing(raw):
    asked = threading.Event()

    def silent(head, line, server):
        asked.set()
        time.sleep(60)

    server = raw(silent)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "ckptool", "inspect", server.url]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE
    ) as process:
        assert asked.wait(20)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"ckptool: interrupted" in said


# -- what is shown -----------------------------------------------------------------------------
@pytest.mark.parametrize(("url", "shown"), [
    ("https://h/f?private_token=S", "https://h/f?private_token=***"),
    ("https://h/f?authToken=S&client_secret=S&dl=1", "https://h/f?authToken=***&client_secret=***&dl=1"),
    ("https://h/f?X%2DAmz%2DSignature=S", "https://h/f?X%2DAmz%2DSignature=***"),
    ("https://h/f?q=0123456789abcdef", "https://h/f?q=***"),
    ("https://h/f?0123456789abcdef", "https://h/f?***"),
    ("https://h/f?a=1;token=S", "https://h/f?a=1;token=***"),
    ("https://h/f#access_token=S", "https://h/f#access_token=***"),
    ("https://h/f?file=model-00001-of-00002.bin", "https://h/f?file=model-00001-of-00002.bin"),
    ("https://u:a@b@h/f", "https://***@h/f"),
    ("https://u:a/b@h/f", "https://***@h/f"),
    ("https://u:a#b?@h/f", "https://***@h/f"),
    ("http://[::1]:80/a@b", "http://[::1]:80/a@b"),
    ("http://h:8080/a@b", "http://h:8080/a@b"),
    ("hf://org/name@v1/f", "hf://org/name@v1/f"),
    ("s3://b/what?/0123456789abcdef.pth", "s3://b/what?/0123456789abcdef.pth"),
])  # fmt: skip
def test_whatever_may_be_a_secret_is_not_shown(url, shown):
    assert masked(url) == shown
    assert masked(shown) == shown


def test_nor_in_the_words_of_another_program():
    text = "error for http://u:a@b@h/f?jwt=S&q=0123456789abcdef (try http://h/)"
    assert mask_within(text) == "error for http://***@h/f?jwt=***&q=*** (try http://h/)"
