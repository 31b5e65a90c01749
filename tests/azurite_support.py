"""Azurite, Microsoft's emulator of Azure's blobs, on loopback: started, and asked over its own wire."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import shutil
import subprocess
import urllib.request
from email.utils import formatdate
from pathlib import Path
from xml.etree import ElementTree

from servers_support import free_port, started

ACCOUNT = "devstoreaccount1"
# Not a secret: every emulator has this one, its documentation gives it.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
PACKAGE = "azurite@3.37.0"


def find_program(cache) -> str | None:
    """CKPTOOL_AZURITE names it, or it is on PATH; else npm installs it into `cache()`."""
    found = os.environ.get("CKPTOOL_AZURITE") or shutil.which("azurite-blob")
    npm = shutil.which("npm")
    if found or npm is None:
        return found
    home = Path(cache())
    program = home / "node_modules" / ".bin" / "azurite-blob"
    if not program.exists():
        command = [npm, "install", "--no-audit", "--no-fund", "--prefix", home, PACKAGE]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, check=True, capture_output=True, timeout=300)
    return str(program) if program.exists() else None


@contextlib.contextmanager
def azurite(program: str, home: Path):
    """Its address, while it runs; all it holds is in memory."""
    port = free_port()
    command = [program, "--inMemoryPersistence", "--skipApiVersionCheck", "--silent",
               "--blobHost", "127.0.0.1", "--blobPort", str(port)]  # fmt: skip
    with started(command, port, home / "said", cwd=home):
        yield f"http://127.0.0.1:{port}"


def ask(url: str, method: str, path: str, **query: str) -> bytes:
    """One signed request; the signature is that of Shared Key for a request without a body."""
    date, version = formatdate(usegmt=True), "2021-08-06"
    resource = f"/{ACCOUNT}/{ACCOUNT}/{path}"
    resource += "".join(f"\n{name}:{value}" for name, value in sorted(query.items()))
    text = "\n".join([method, *[""] * 11, f"x-ms-date:{date}\nx-ms-version:{version}", resource])
    signed = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    login = f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}"
    asked = "&".join(f"{name}={value}" for name, value in query.items())
    headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": login}
    request = urllib.request.Request(
        f"{url}/{ACCOUNT}/{path}?{asked}", method=method, headers=headers
    )
    with urllib.request.urlopen(request) as answer:
        return answer.read()


def blobs(url: str, container: str) -> list[str]:
    """Names of all blobs, with those of which only blocks were sent."""
    rows = ask(url, "GET", container, restype="container", comp="list", include="uncommittedblobs")
    return [
        row.text or "" for row in ElementTree.fromstring(rows.lstrip(b"\xef\xbb\xbf")).iter("Name")
    ]
