"""A web server on loopback for the tests of URLs: ranges, redirects, broken answers, counts."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from servers_support import answering
from verbs_support import cli


@dataclass
class Site:
    """`files` are paths or bytes by name; `asked` are (path, range, headers) of each request."""

    files: dict[str, Path | bytes] = field(default_factory=dict)
    asked: list[tuple[str, str | None, dict[str, str]]] = field(default_factory=list)
    sent_bytes: int = 0
    tag: str | None = '"one"'
    ranges: bool = True
    short: bool = False
    status: int | None = None
    page: bytes = b""
    redirect: str | None = None
    change_after: int | None = None  # requests, after which the ETag is another
    fail_after: int | None = None  # requests, after which there is only an error
    port: int = 0

    def url(self, name: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}/{name}"

    def read(self, name: str, start: int, end: int) -> bytes:
        found = self.files[name]
        if isinstance(found, bytes):
            return found[start:end]
        with found.open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    def size(self, name: str) -> int:
        found = self.files[name]
        return len(found) if isinstance(found, bytes) else found.stat().st_size


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        site: Site = self.server.site
        path, wanted = self.path.lstrip("/"), self.headers.get("Range")
        site.asked.append((path, wanted, {k.lower(): v for k, v in self.headers.items()}))
        name = path.partition("?")[0]
        if site.redirect:
            return self._answer(302, b"", {"Location": site.redirect})
        if site.fail_after is not None and len(site.asked) > site.fail_after:
            return self._answer(500, b"", {})
        if site.status:
            return self._answer(site.status, site.page, {})
        if name not in site.files:
            return self._answer(404, b"<html>nothing here</html>", {})
        size = site.size(name)
        headers = (
            {"ETag": site.tag} if site.tag else {"Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
        )
        if site.change_after is not None and len(site.asked) > site.change_after:
            headers["ETag"] = '"two"'
        if not (wanted and site.ranges):
            return self._answer(200, site.read(name, 0, size), headers)
        start, end = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted).groups()
        start, end = int(start), min(int(end) + 1, size)
        if start >= size:
            return self._answer(416, b"", {"Content-Range": f"bytes */{size}"})
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        return self._answer(206, site.read(name, start, end), headers)

    def _answer(self, status, body, headers):
        site = self.server.site
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if site.short and status == 206:
            body, self.close_connection = body[: len(body) // 2], True
        if self.command != "HEAD":
            with contextlib.suppress(OSError):
                self.wfile.write(body)
            site.sent_bytes += len(body)


@contextlib.contextmanager
def serving(**options):
    """A Site on a port of its own."""
    site = Site(**options)
    with answering(_Handler) as server:
        server.site = site
        site.port = server.server_port
        yield site


def refused_as_there(capsys, *args):
    """Convert to what is there already: it is not replaced."""
    status, out, _ = cli(capsys, "convert", *args, "--json")
    assert (status, json.loads(out)["error"]["slug"]) == (2, "output-exists")
