"""What of a URL may be shown.

Knows: secrets in URLs. Must not know: networks, what a URL names.
"""

from __future__ import annotations

import re

from ckptool.places import is_url

_USER = re.compile(r"(?<=://)[^/?#@]*@")
_SECRET = re.compile(
    r"(?i)\b(x-amz-signature|x-amz-credential|x-amz-security-token|x-goog-signature|x-goog-credential|"
    r"signature|awsaccesskeyid|googleaccessid|key-pair-id|policy|sig|sv|se|sp|token|access_token|"
    r"key|apikey|api_key|password|auth|authorization)=[^&#\s]*"
)


def masked(url: str) -> str:
    """The URL as it may be shown: without user, password and signatures; a path is left as it is."""
    if not is_url(url):
        return url
    head, mark, query = _USER.sub("***@", url, count=1).partition("?")
    return head + mark + _SECRET.sub(r"\1=***", query)


def mask_within(text: str) -> str:
    """A text of another program, such as an error, with the secrets of every URL in it hidden."""
    return _SECRET.sub(r"\1=***", _USER.sub("***@", text))
