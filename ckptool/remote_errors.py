"""What a store's refusal means, as an error of ours.

Knows: the words obstore and its HTTP client use. Must not know: requests, sources.
Their texts hold whole URLs and pages of the server: one line is kept, secrets hidden.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ckptool.errors import CkptError, SpecialFile, Truncated
from ckptool.remote_urls import Located
from ckptool.urls import mask_within

RETRIES = 3
_STATUS = re.compile(r"status code: (\d{3}[A-Za-z -]*)")
_SIGNED = re.compile(r"(?i)[?&](x-amz-signature|x-goog-signature|signature|sig|expires)=")
_AWS_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket"
_LOGINS = {
    "hf": "set HF_TOKEN to a token that may read it; some models ask to accept terms on their page",
    "s3": _AWS_KEYS,
    "s3a": _AWS_KEYS,
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or a SAS token)",
}
_LOGINS["azure"] = _LOGINS["az"]


_MACHINES = ("169.254.169.254", "metadata.google", "InstanceMetadata")
"""Who is asked for a login where the environment has none; outside of a cloud anything answers."""


class _Sign(NamedTuple):
    """`words`, any of which stands in obstore's text; what that means, and what to do."""

    words: tuple[str, ...]
    slug: str
    text: str
    hint: str


_SIGNS = (
    _Sign(("dns error", "failed to lookup address"), "remote-unreachable",
          "no such host, or no network", "check the name of the host, and the network"),
    _Sign(("certificate", "UnknownIssuer", "InvalidMessage", "InvalidContentType", "HandshakeFailure",
           "AlertReceived", "CaUsedAsEndEntity"), "remote-tls",
          "no secure connection: its certificate or its TLS is not accepted",
          "check https:// against http://, the date of this machine, and SSL_CERT_FILE"),
    _Sign(("ConnectionRefused", "tcp connect error", "Network is unreachable"), "remote-unreachable",
          "nothing answers there", "check host and port, and the network"),
    _Sign(("credential",), "remote-denied", "no credentials were found", ""),
    _Sign(("MissingAccount",), "remote-denied", "no account is named", ""),
    _Sign(("redirect without LOCATION", "PermanentRedirect"), "remote-error",
          "the bucket is in another region", "set AWS_REGION to the region of the bucket"),
    _Sign(("object with invalid path",), "remote-error",
          "a key here is no path: an empty name, '..' or a control character is in it",
          "rename that object; what lies beside it can be given by name"),
    _Sign(("TimedOut", "timed out"), "remote-timeout",
          "no answer in time", "try again; the network or the server is slow"),
)  # fmt: skip


def explained(error: BaseException, place: Located) -> CkptError:
    """The error of a request for `place` as one of ours, without the other's traceback."""
    kind, text = type(error).__name__, str(error)
    if kind in ("FileNotFoundError", "NotFoundError") or _has_no_bucket(text):
        return _missing(text, place)
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return denied(place, _status(text) or "no permission")
    if kind == "NotSupportedError":
        return no_ranges(place)
    if "IncompleteBody" in text or "UnexpectedEof" in text:
        return short(place)
    if any(name in text.partition("\n")[0] for name in _MACHINES):
        return _no_login(place, "no credentials were found")
    status = _status(text)
    for sign in () if status and "LOCATION" not in text else _SIGNS:
        if any(word in text for word in sign.words):
            hint = sign.hint or login_hint(place)
            return CkptError(sign.text, path=place.name, hint=hint, slug=sign.slug)
    said = f"the server answers {status}" if status else _first_line(text, kind)
    tries = f", also after {RETRIES} more tries" if status.startswith("5") else ""
    return CkptError(
        said + tries, path=place.name, hint="try again later, or download the file",
        slug="remote-error",
    )  # fmt: skip


def denied(place: Located, said: str) -> CkptError:
    """No permission."""
    return _no_login(place, f"the server refuses it: {said}")


def _no_login(place: Located, text: str) -> CkptError:
    return CkptError(text, path=place.name, hint=login_hint(place), slug="remote-denied")


def login_hint(place: Located) -> str:
    """How this kind of store is told who asks."""
    scheme = place.url.partition("://")[0].lower()
    if scheme in _LOGINS:
        return _LOGINS[scheme]
    if _SIGNED.search(place.url):
        return "a signed URL expires: get a new one"
    return "download it with the program that may, then give the file"


def no_ranges(place: Located) -> CkptError:
    """The server sends whole files only."""
    return CkptError(
        "the server gives whole files only, no parts of them (no range requests)",
        path=place.name, hint="download it first, then give the file", slug="remote-no-ranges",
    )  # fmt: skip


def short(place: Located) -> Truncated:
    """Fewer bytes came than were announced."""
    return Truncated(
        "the server broke off in the middle of an answer, or sent another number of bytes than it said",
        path=place.name, hint="try again; if it stays so, the file on the server is damaged",
    )  # fmt: skip


def _missing(text: str, place: Located) -> SpecialFile:
    if _has_no_bucket(text):
        return SpecialFile("no such bucket", path=place.name, hint="check its name")
    hint = "check the URL; a prefix ends with /"
    return SpecialFile(
        "no such file there", path=place.name, hint="check the URL" if place.is_web else hint
    )


def _has_no_bucket(text: str) -> bool:
    return "NoSuchBucket" in text or "ContainerNotFound" in text


def _status(text: str) -> str:
    found = _STATUS.search(text)
    return found.group(1).strip() if found else ""


def _first_line(text: str, kind: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return f"the request failed: {mask_within(lines[0] if lines else kind)[:300]}"
