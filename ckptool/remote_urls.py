"""What a URL names: a store, a key in it, the headers to send; hf:// as its https address.

Knows: the spelling of URLs, the environment variables of the Hugging Face hub. Must not know:
networks.
"""

from __future__ import annotations

import os
from base64 import b64encode
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from ckptool.errors import UsageError
from ckptool.urls import masked

BUCKETS = {"s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "azure": "az"}
WEB = ("http", "https")
_HUB = "https://huggingface.co"
_KINDS = ("datasets", "spaces")


class Located(NamedTuple):
    """`root` is what a store is made for, `key` the object in it ("" on the web, where the root
    is the whole address); `name` is what may be shown; `authorization`, the header of that name,
    goes to this host alone.
    """

    url: str
    scheme: str
    root: str
    key: str
    name: str
    authorization: str = ""

    @property
    def is_web(self) -> bool:
        """Whether it is read only, and cannot be listed."""
        return self.scheme in WEB


def locate(url: str) -> Located | None:
    """What obstore opens for this URL; None for a scheme that it does not know.

    Raises UsageError for a URL that names nothing.
    """
    scheme = url.partition("://")[0].lower()
    if scheme == "hf":
        return _located_hub(url)
    if scheme in WEB:
        return _located_web(url, scheme)
    if scheme not in BUCKETS:
        return None
    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket:
        raise UsageError("a URL without a bucket", path=masked(url), hint=f"{scheme}://BUCKET/KEY")
    return Located(url, scheme, f"{BUCKETS[scheme]}://{bucket}", key, masked(url))


def _located_web(url: str, scheme: str) -> Located:
    try:
        parts = urlsplit(url.partition("#")[0])
        named = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a bracket that is not closed, a port that is none, odd letters
        named = False
    if not named:
        raise UsageError("a URL without a host, or with none that could be", path=masked(url))
    user, at, host = parts.netloc.rpartition("@")
    login = b64encode(unquote(user).encode()).decode() if at else ""
    root = urlunsplit(parts._replace(netloc=host))
    return Located(url, scheme, root, "", masked(url), f"Basic {login}" if at else "")


def _located_hub(url: str) -> Located:
    """hf://[datasets/]ORG/NAME[@REVISION]/FILE, as huggingface_hub spells it."""
    kind, parts = _hub_parts(url)
    if len(parts) < 3 or not all(parts):
        text = "a URL of the hub names an organisation, a repository and a file"
        raise UsageError(
            text, path=masked(url), hint="hf://ORG/NAME/FILE, or hf://datasets/ORG/NAME/FILE"
        )
    name, _, revision = parts[1].partition("@")
    root = "/".join([
        os.environ.get("HF_ENDPOINT", "").rstrip("/") or _HUB, *kind, quote(parts[0]), quote(name),
        "resolve", quote(unquote(revision) or "main", safe=""), *map(quote, parts[2:]),
    ])  # fmt: skip
    scheme = urlsplit(root).scheme.lower()
    token = os.environ.get("HF_TOKEN", "").strip()
    return Located(url, scheme, root, "", masked(url), f"Bearer {token}" if token else "")


def _hub_parts(url: str) -> tuple[list[str], list[str]]:
    parts = url.partition("://")[2].partition("?")[0].split("/")
    return (parts[:1], parts[1:]) if parts[0] in _KINDS else ([], parts)
