"""Where a web address leads, found out before obstore asks.

Knows: redirects, and that obstore's client tells the host it is sent to the whole address it comes
from (Referer), query and all. Must not know: stores, what is at an address.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urljoin, urlsplit

from ckptool.remote_urls import WEB, Located

_MOST = 5
_SECONDS = 20.0
_MOVED = (301, 302, 303, 307, 308)


def landed(place: Located) -> Located:
    """The place behind the redirects of a web address whose query may hold a secret; another host
    gets no authorization. What cannot be found out is left to obstore, as is all else.
    """
    for _ in range(_MOST if place.is_web else 0):
        if not urlsplit(place.root).query:
            break
        target = _target(place)
        if target is None:
            break
        told = place.authorization if _host(target) == _host(place.root) else ""
        place = place._replace(root=target, authorization=told)
    return place


def _host(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.lower()


def _target(place: Located) -> str | None:
    """Where one address is redirected to; None where it is not, or not to the web."""
    from urllib.error import HTTPError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class Staying(HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            """No request follows: the answer comes out as an HTTPError."""

    headers = {"Range": "bytes=0-0", "User-Agent": "ckptool"}
    if place.authorization:
        headers["Authorization"] = place.authorization
    try:
        build_opener(Staying).open(Request(place.root, headers=headers), timeout=_SECONDS).close()
    except HTTPError as answer:
        answer.close()
        target = urljoin(place.root, answer.headers.get("Location") or place.root)
        lower = urlsplit(place.root).scheme == "https" and urlsplit(target).scheme == "http"
        moved = answer.code in _MOVED and urlsplit(target).scheme in WEB and not lower
        return target.partition("#")[0] if moved and target != place.root else None
    except (OSError, ValueError):
        return None
    return None
