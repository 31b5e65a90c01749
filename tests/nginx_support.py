"""nginx on a port of loopback: a config of its own, all its files in one folder, its log read back."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from servers_support import free_port, started

PROGRAM = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
_CONFIG = """
{user}daemon off;
master_process off;
pid {home}/nginx.pid;
error_log {home}/error.log;
events {{ worker_connections 64; }}
http {{
    log_format counts '$status $body_bytes_sent $request_method $uri auth=$http_authorization range=$http_range';
    access_log {home}/access.log counts;
    client_body_temp_path {home}/tmp; proxy_temp_path {home}/tmp; fastcgi_temp_path {home}/tmp;
    uwsgi_temp_path {home}/tmp; scgi_temp_path {home}/tmp;
    default_type application/octet-stream;
    server {{
        listen 127.0.0.1:{port};
        root {home}/files;
        {inside}
    }}
}}
"""


@dataclass(frozen=True)
class Line:
    """One answer of the server."""

    status: int
    sent_bytes: int
    method: str
    path: str
    authorization: str
    range: str


@dataclass(frozen=True)
class Nginx:
    """`files` is the folder that is served."""

    home: Path
    port: int

    @property
    def files(self) -> Path:
        return self.home / "files"

    def url(self, name: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}/{name}"

    def asked(self) -> list[Line]:
        """What was answered so far; a line is written when its answer is sent."""
        time.sleep(0.1)
        found = []
        for row in (self.home / "access.log").read_text().splitlines():
            status, sent, method, rest = row.split(" ", 3)
            path, _, rest = rest.partition(" auth=")
            login, _, wanted = rest.rpartition(" range=")
            found.append(Line(int(status), int(sent), method, path, login, wanted))
        return found


@contextlib.contextmanager
def nginx(home: Path, inside: str = ""):
    """A server that is there as long as the block; `inside` goes into its `server`."""
    for name in ("files", "tmp"):
        (home / name).mkdir(parents=True)
    port = free_port()
    user = "user root;\n" if os.geteuid() == 0 else ""
    config = _CONFIG.format(home=home, port=port, inside=inside, user=user)
    (home / "nginx.conf").write_text(config)
    command = [PROGRAM, "-p", home, "-c", home / "nginx.conf", "-e", home / "error.log"]
    with started(command, port, home / "said"):
        yield Nginx(home, port)
