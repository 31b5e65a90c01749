"""What of a URL may be shown.

Knows: secrets in URLs. Must not know: networks, what a URL names.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from ckptool.places import is_url

_USER = re.compile(r"(?<=://)[^/?#\s]*@")
# A password in which `/`, `?` or `#` was not escaped: what stands before it is no port.
_BROKEN_USER = re.compile(r"(?<=://)(?!\[)[^/?#@\s]*:(?!\d*(?:[/?#]|$))\S*@")
_PAIR = re.compile(r"(?<=[?&;#])(?:([^=&;#?\s]+)=)?([^&;#\s]+)")
_TELLING = re.compile(
    "sig|secret|token|key|pass|pwd|auth|cred|session|jwt|hmac|policy|ticket|code|accessid"
)
_SAS = frozenset(("sv", "se", "sp", "st"))  # of Azure's signed URLs
_LONG = 16  # characters: no name says all that a server may take for a password
_PLAIN = frozenset(("version", "versionid", "revision", "rev", "ref", "file", "filename", "path"))
_SECRET = re.compile(
    r"(?i)\b(x-amz-signature|x-amz-credential|x-amz-security-token|x-goog-signature|x-goog-credential|"
    r"signature|awsaccesskeyid|googleaccessid|key-pair-id|policy|sig|sv|se|sp|token|access_token|"
    r"key|apikey|api_key|password|auth|authorization)=[^&#\s]*"
)


def masked(url: str) -> str:
    """The URL as it may be shown: without user, password, signatures, and whatever in its query may
    be one; a path is left as it is.
    """
    if not is_url(url):
        return url
    web = url[:4].lower() == "http"  # elsewhere `?` is a letter of a key
    return _without_pairs(_without_user(url), _LONG if web else len(url))


def mask_within(text: str) -> str:
    """A text of another program, such as an error, with the secrets of every URL in it hidden."""
    return _SECRET.sub(r"\1=***", _without_pairs(_without_user(text)))


def _without_user(text: str) -> str:
    return _USER.sub("***@", _BROKEN_USER.sub("***@", text))


def _without_pairs(text: str, long: int = _LONG) -> str:
    """`long`: characters from which on a value may be a secret, whatever its name."""

    def shown(pair: re.Match[str]) -> str:
        name, value = unquote(pair[1] or "").lower(), pair[2]
        told = name in _SAS or _TELLING.search(name)
        if told or (len(value) >= long and name not in _PLAIN):
            return f"{pair[1]}=***" if pair[1] else "***"
        return pair[0]

    return _PAIR.sub(shown, text)
