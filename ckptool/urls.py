"""URLs as places: which room opens them, what of them may be shown.

Knows: schemes, secrets in URLs. Must not know: networks; `remote…` is imported when a URL comes.
Importing this module makes `places.open_source` open URLs.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckptool import places

if TYPE_CHECKING:
    from ckptool.remote_folder import RemoteFolder
    from ckptool.remote_sink import PrefixSink, UrlSink

_USER = re.compile(r"(?<=://)[^/?#@]*@")
_SECRET = re.compile(
    r"(?i)\b(x-amz-signature|x-amz-credential|x-amz-security-token|x-goog-signature|x-goog-credential|"
    r"signature|awsaccesskeyid|googleaccessid|key-pair-id|policy|sig|sv|se|sp|token|access_token|"
    r"key|apikey|api_key|password|auth|authorization)=[^&#\s]*"
)


def masked(url: str) -> str:
    """The URL as it may be shown: without user, password and signatures; a path is left as it is."""
    if not places.is_url(url):
        return url
    head, mark, query = _USER.sub("***@", url, count=1).partition("?")
    return head + mark + _SECRET.sub(r"\1=***", query)


def mask_within(text: str) -> str:
    """A text of another program, such as an error, with the secrets of every URL in it hidden."""
    return _SECRET.sub(r"\1=***", _USER.sub("***@", text))


def open_remote(url: str) -> places.Source:
    """Open one object. Raises what `remote.open_url` raises."""
    from ckptool.remote import open_url

    return open_url(url)


def remote_folder(url: str, *, known: bool = False, strict: bool = False) -> RemoteFolder | None:
    """The prefix a URL names, if it is one; `known`: it is one."""
    from ckptool.remote import open_prefix

    return open_prefix(url, known=known, strict=strict)


def remote_sink(
    url: str, *, shards: bool, force: bool, beside: dict[str, str] | None
) -> UrlSink | PrefixSink:
    """Where outputs go that a URL names. Raises OutputError."""
    from ckptool.remote import make_sink

    return make_sink(url, shards=shards, force=force, beside=beside)


places.open_url = open_remote
