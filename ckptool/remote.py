"""Which room opens a URL: obstore's stores, or fsspec for what they do not know.

Knows: what each scheme can do. Must not know: formats, requests.
"""

from __future__ import annotations

from ckptool.errors import OutputError, SpecialFile, Unsupported
from ckptool.reads import Source
from ckptool.remote_folder import RemoteFolder
from ckptool.remote_sink import PrefixSink, UrlSink
from ckptool.remote_source import open_object
from ckptool.remote_stores import Store
from ckptool.remote_urls import Located, locate
from ckptool.urls import masked


def open_url(url: str) -> Source:
    """Open one object for reading. Raises CkptError (slugs `remote-…`), SpecialFile where there
    is none, UsageError for a URL that names nothing.
    """
    place = locate(url)
    if place is not None:
        return open_object(place)
    from ckptool.remote_fsspec import open_other

    return open_other(url)


def open_prefix(url: str, *, known: bool = False, strict: bool = False) -> RemoteFolder | None:
    """The folder that a URL names: it ends with a slash, or its last name has no suffix and
    something lies under it. `known`: it is one, nothing is asked.

    Raises SpecialFile for an empty prefix, Unsupported where nothing can be listed.
    """
    last = url.rstrip("/").rpartition("/")[2]
    if not known and not url.endswith("/") and "." in last:
        return None
    place = _listable(url)
    if place is None or (place.is_web and not known):
        if url.endswith("/"):
            raise Unsupported(
                "there is no list of the files under it", path=masked(url),
                hint="give the URL of a file, or of the index of its shards (….index.json)",
            )  # fmt: skip
        return None
    folder = RemoteFolder(place, strict=strict)
    if known or folder.exists():
        return folder
    if url.endswith("/"):
        raise _nothing(url)
    return None


def open_tree(url: str, *, known: bool = False) -> RemoteFolder | None:
    """The prefix that is walked where all under a URL is meant; None where it names one object.
    `known`: it is a prefix, nothing is asked.

    Raises SpecialFile for an empty prefix, Unsupported where nothing can be listed.
    """
    place = _listable(url)
    if place is None or place.is_web:
        if not known and "." in url.rpartition("/")[2]:
            return None
        raise _no_list(url)
    folder = RemoteFolder(place)
    if known or folder.exists():
        return folder
    if url.endswith("/") or not place.key:
        raise _nothing(url)
    return None


def is_there(url: str) -> bool:
    """Whether an object or a prefix has this very name; where nothing can be listed, whether it
    may be one. Raises CkptError.
    """
    place = _listable(url)
    if place is None or place.is_web:
        return "*" not in url
    named = not url.endswith("/") and Store(place).head() is not None
    return named or RemoteFolder(place).exists()


def _no_list(url: str) -> Unsupported:
    scheme = url.partition("://")[0].lower()
    return Unsupported(
        f"what lies under a {scheme}:// address cannot be listed", path=masked(url),
        hint="give the files themselves, with --files-from",
    )  # fmt: skip


def _nothing(url: str) -> SpecialFile:
    return SpecialFile("nothing lies under this prefix", path=masked(url), hint="check the URL")


def _listable(url: str) -> Located | None:
    if url.lower().startswith("hf://"):  # its parent may be no file's address
        return Located(url, "https", "", "", masked(url))
    return locate(url)


def make_sink(
    url: str, *, shards: bool, force: bool, beside: dict[str, str] | None
) -> UrlSink | PrefixSink:
    """A sink for what -o names. Raises OutputError: `output-read-only` for the web and the hub,
    and what the sinks raise.
    """
    place = None if url.lower().startswith("hf://") else locate(url)
    if place is None or place.is_web:
        raise OutputError(
            "it can only be read: nothing is written there", path=masked(url),
            hint="write to a file, or to s3://, gs:// or az://", slug="output-read-only",
        )  # fmt: skip
    kind = PrefixSink if shards else UrlSink
    return kind(place, force=force, beside=beside)
