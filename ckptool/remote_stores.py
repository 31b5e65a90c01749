"""Requests to object stores and web servers, made by obstore.

Knows: how a store is made, retried and asked. Must not know: formats, sources, what is cached.
obstore is imported when the first URL is opened. It reads the variables of each cloud (AWS_…,
GOOGLE_…, AZURE_…, HTTPS_PROXY) by itself; its HTTP client follows redirects and takes the token
off when one leads to another host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread, current_thread, main_thread
from typing import Any, NamedTuple, TypeVar

from ckptool.errors import CkptError, EngineError
from ckptool.remote_errors import RETRIES, explained, short
from ckptool.remote_landing import landed
from ckptool.remote_urls import Located

_HINT = "pip install 'ckptool[remote]'"
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AZURE_STORAGE_ENDPOINT",
              "GOOGLE_BASE_URL")  # fmt: skip
_TIMEOUT = "10m"  # of one request: a part of 8 MiB over a slow line
_STALLED = "60s"  # without a byte
_LARGEST_WHOLE = 16 << 20
_KEPT = 8
_kept: dict[tuple[Any, ...], Any] = {}
Given = TypeVar("Given")
_MARK = "ckptool"  # a name in the metadata of objects, which every store we write to keeps


class Meta(NamedTuple):
    """What a store says of an object; `identity` changes when its bytes do."""

    size: int
    identity: tuple[str, ...]


class Look(NamedTuple):
    """What lies there, and the mark that its writer gave it ("": none)."""

    meta: Meta
    mark: str


class Answer(NamedTuple):
    """Bytes from `start`, and what the server said of the whole."""

    start: int
    data: memoryview
    meta: Meta


class Store:
    """One object's store. All methods raise CkptError, naming the object.

    `mark`, where given, is kept with the object that is put: `look` tells it.
    """

    def __init__(self, place: Located, *, reading: bool = True, mark: str = "") -> None:
        self.place = place
        self.mark = mark
        self.obs = _obstore(place)
        try:
            self.store = _made(landed(place), reading)
        except Exception as error:
            raise explained(error, place) from None

    def get(self, start: int, end: int) -> Answer:
        """Bytes [`start`, `end`), fewer at the end of the object."""

        def answer() -> Answer:
            found = self.obs.get(self.store, self.place.key, options={"range": (start, end)})
            first, last = found.range
            data = _body(found, min(last - first, end - start))
            if len(data) != last - first:
                raise short(self.place)
            return Answer(first, data, _meta(found.meta))

        return self._asked(answer)

    def _asked(self, work: Callable[[], Given]) -> Given:
        try:
            return waited(work)
        except CkptError:
            raise
        except Exception as error:
            raise explained(error, self.place) from None

    def whole(self) -> Answer | None:
        """The whole of a small object; None where it is not small."""

        def answer() -> Answer | None:
            found = self.obs.get(self.store, self.place.key)
            meta = _meta(found.meta)
            if meta.size > _LARGEST_WHOLE:
                return None
            data = _body(found, meta.size)
            if len(data) != meta.size:
                raise short(self.place)
            return Answer(0, data, meta)

        return self._asked(answer)

    def head(self) -> Meta | None:
        """Size and identity without content; None where there is no such object."""
        try:
            return waited(lambda: _meta(self.obs.head(self.store, self.place.key)))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise explained(error, self.place) from None

    def look(self) -> Look | None:
        """As `head`, with the mark it was put with."""
        try:
            found = waited(lambda: self.obs.get(self.store, self.place.key, options={"head": True}))
            return Look(_meta(found.meta), str(found.attributes.get(_MARK, "")))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise explained(error, self.place) from None

    def listed(self, prefix: str) -> tuple[dict[str, int], list[str]]:
        """{name: size in bytes} and prefixes right under a prefix that ends with / (or is "")."""
        found = self._asked(
            lambda: self.obs.list_with_delimiter(self.store, prefix.rstrip("/") or None)
        )
        marker = prefix.rstrip("/")  # an empty object that some programs make for a folder
        files = {
            row["path"].rpartition("/")[2]: row["size"]
            for row in found["objects"]
            if row["path"] != marker
        }
        return files, [name.rstrip("/").rpartition("/")[2] for name in found["common_prefixes"]]

    def put(self, data: bytes, *, create: bool) -> None:
        """The whole object at once; with `create` only where none is. Raises FileExistsError."""
        mode = "create" if create else "overwrite"
        try:
            waited(lambda: self.obs.put(
                self.store, self.place.key, data, mode=mode, use_multipart=False,
                **self._attributes(),
            ))  # fmt: skip
        except Exception as error:
            if type(error).__name__ in ("AlreadyExistsError", "PreconditionError"):
                raise FileExistsError from None
            raise explained(error, self.place) from None

    def put_parts(self, pieces: Iterator[bytes], part_bytes: int, at_once: int) -> None:
        """The object in parts, visible when `pieces` ends; given up when `pieces` raises."""
        self.obs.put(
            self.store, self.place.key, pieces, use_multipart=True, chunk_size=part_bytes,
            max_concurrency=at_once, **self._attributes(),
        )  # fmt: skip

    def _attributes(self) -> dict[str, Any]:
        return {"attributes": {_MARK: self.mark}} if self.mark else {}

    def delete(self) -> None:
        """Remove the object; none there is fine."""
        try:
            waited(lambda: self.obs.delete(self.store, self.place.key))
        except FileNotFoundError:
            return
        except Exception as error:
            raise explained(error, self.place) from None


def _body(found: Any, size: int) -> memoryview:
    """What came, up to one byte more than `size`: a server may send without end."""
    return memoryview(next(iter(found.stream(min_chunk_size=size + 1)), b""))[: size + 1]


def waited(work: Callable[[], Given]) -> Given:
    """What `work` gives. The main thread has another one do it: obstore does not hear of signals,
    and a ^C would wait for a server that says nothing.
    """
    if current_thread() is not main_thread():
        return work()
    done: Future[Given] = Future()

    def carry_out() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    Thread(target=carry_out, name="ckptool-ask", daemon=True).start()
    return done.result()


_first: list[int] = []  # the process in which obstore was first asked for


def _obstore(place: Located) -> Any:
    """Obstore. Its threads do not outlive a fork: whoever waits for them there waits for ever."""
    if os.getpid() not in (_first or [os.getpid()]):
        raise EngineError(
            "this process was forked from one that had used the network, and cannot use it itself",
            hint="ProcessPoolExecutor(N, mp_context=multiprocessing.get_context('spawn'))",
        )
    try:
        import obstore
    except ImportError:
        raise CkptError(
            "URLs need the package obstore, which is not installed", path=place.name,
            hint=_HINT, slug="remote-missing",
        ) from None  # fmt: skip
    _first[:] = [os.getpid()]
    return obstore


def _made(place: Located, reading: bool) -> Any:
    """A store of a bucket is made once, for its connections; anew for another environment."""
    if place.is_web:
        return _new(place, reading)
    key = (place.root, reading, *os.environ.items())
    found = _kept.get(key)
    if found is None:
        found = _new(place, reading)
        _kept[key] = found
        while len(_kept) > _KEPT:
            _kept.pop(next(iter(_kept)), None)
    return found


def _new(place: Located, reading: bool) -> Any:
    from obstore.store import HTTPStore, from_url

    retries: Any = {
        "max_retries": RETRIES,
        "backoff": {
            "init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2),
            "base": 2,
        },
        "retry_timeout": timedelta(minutes=2),
    }  # fmt: skip
    options: Any = {"timeout": _TIMEOUT, "connect_timeout": "10s"}
    if reading:  # while a part is sent, nothing is read
        options["read_timeout"] = _STALLED
    if place.is_web:
        options["allow_http"] = place.root.lower().startswith("http://")
        if place.authorization:
            options["default_headers"] = {"Authorization": place.authorization}
        return HTTPStore.from_url(place.root, client_options=options, retry_config=retries)
    endpoints = [os.environ.get(name, "") for name in _ENDPOINTS]
    if any(url.lower().startswith("http://") for url in endpoints):  # the user's own word
        options["allow_http"] = True
    return from_url(place.root, client_options=options, retry_config=retries)


def _meta(found: Any) -> Meta:
    """By ETag; by date where there is none (no date at all reads as 1970)."""
    tag = found["e_tag"]
    return Meta(found["size"], (tag,) if tag else (found["last_modified"].isoformat(),))
