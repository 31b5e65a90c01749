"""Outputs as objects in a bucket: uploaded in parts, visible when all is sent and checked.

Knows: uploads, which objects may be replaced. Must not know: plans, formats.
A small output is one request, which the store itself refuses where an object is in the way. A
large one is sent in parts by a thread of its own, which waits before the last step for the
verdict: completed, or given up. For parts obstore has no such condition, so the place is looked
at again right before they are put together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from queue import Empty, Full, Queue
from threading import Thread

from ckptool.errors import CkptError, OutputError
from ckptool.places import is_plain_name, is_url
from ckptool.remote_errors import explained
from ckptool.remote_folder import RemoteFolder
from ckptool.remote_stores import Look, Store
from ckptool.remote_urls import Located, locate
from ckptool.sinks import Outlet, refuse_mixed
from ckptool.spans import Address
from ckptool.targets import Target, refusal
from ckptool.urls import masked

ONE_REQUEST = 16 << 20
"""Outputs up to this size are sent at once."""
_PART = 8 << 20
_PARTS = 9_000  # of S3's 10,000
_PIECE = 1 << 20
_AT_ONCE = 3
_LARGEST = 5 * 10**12  # of one object, in every store we know
EXISTS = "replace it with -f"


class _GivenUp(Exception):
    """Ends an upload without completing it."""


class ObjectTarget:
    """One object. Raises OutputError `output-exists` without `force`, before anything is sent.

    `mark` says whose it is: what the same run has put there may be replaced, and `ours` tells it.
    """

    def __init__(self, place: Located, *, force: bool, mark: str = "") -> None:
        self.path = place.name
        self.published = False
        self._place = place
        self._force = force
        self._size = 0
        self._written = 0
        self._pending = bytearray()
        self._upload: _Upload | None = None
        if not place.key or place.key.endswith("/"):
            raise refusal(self.path, "special", "it names a prefix, not an object", "give a name")
        self._store = Store(place, reading=False, mark=mark)
        self.ours = self._check_free()

    def open(self) -> int:
        """Begin the upload."""
        if self._size > ONE_REQUEST:
            self._upload = _Upload(self._store, max(_PART, -(-self._size // _PARTS)))
        return -1

    def write(self, data: memoryview) -> None:
        """Take a copy of `data`."""
        self._written += len(data)
        self._pending += data
        while self._upload is not None and len(self._pending) >= _PIECE:
            self._upload.hand(bytes(self._pending[:_PIECE]))
            del self._pending[:_PIECE]

    def written(self) -> int:
        """Bytes taken so far."""
        return self._written

    def close(self, *, fsync: bool) -> None:
        """Hand over what is left; nothing is visible yet."""
        if self._upload is not None and self._pending:
            self._upload.hand(bytes(self._pending))
            self._pending.clear()

    def publish(self) -> None:
        """Complete the upload, unless the same run has done so elsewhere meanwhile: then it is given
        up. Raises OutputError, and then the object is what it was.
        """
        marked = self._store.mark
        ours = self._check_free() if marked or self._upload else None
        if ours is None or ours == self.ours:
            try:
                if self._upload is not None:
                    self._upload.complete()
                    self._upload = None
                else:
                    self._store.put(bytes(self._pending), create=not (self._force or ours))
            except FileExistsError:
                if not marked or self._check_free() is None:
                    raise self._exists() from None
        self.discard()
        self.published = True

    def discard(self) -> None:
        """Give the upload up; the store drops its parts."""
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.give_up()
        self._pending.clear()

    def folders(self) -> tuple[str, ...]:
        """None on this machine."""
        return ()

    def check_space(self, needed: int) -> None:
        """Remember the size. Raises OutputError for more than an object may have."""
        self._size = needed
        if needed > _LARGEST:
            text = f"{needed:,} bytes are more than an object may have"
            raise refusal(self.path, "space", text, "write shards: --max-shard-size 50GB")

    def is_source(self, address: Address) -> bool:
        """Whether it is the object that `address` names."""
        return is_object(address, self._place)

    def look(self) -> Look | None:
        """What lies there now."""
        return self._store.look()

    def _check_free(self) -> Look | None:
        """What the same run has put there. Raises OutputError for what it may not replace."""
        if not self._store.mark:
            if not self._force and self._store.head() is not None:
                raise self._exists()
            return None
        there = self._store.look()
        if there is None or there.mark == self._store.mark:
            return there
        if not self._force:
            raise self._exists()
        return None

    def _exists(self) -> OutputError:
        return refusal(self.path, "exists", "it exists already", EXISTS)


def is_object(address: Address, place: Located) -> bool:
    """Whether the address is that of this object."""
    read = locate(address.uri) if is_url(address.uri) else None
    return read is not None and (read.root, read.key) == (place.root, place.key)


class _Upload:
    """Parts on their way in a thread. `hand` waits while the line is slower than we are."""

    def __init__(self, store: Store, part_bytes: int) -> None:
        self._store = store
        self._queue: Queue[bytes | bool] = Queue(2)  # False: give up, True: complete
        self._error: BaseException | None = None
        self._thread = Thread(target=self._send, args=(part_bytes,), name="ckptool-send")
        self._thread.start()

    def hand(self, piece: bytes | bool) -> None:
        """Give the next piece. Raises OutputError when the upload has failed."""
        while self._thread.is_alive():
            with contextlib.suppress(Full):
                self._queue.put(piece, timeout=0.2)
                return
        self._raise()

    def complete(self) -> None:
        """Put the parts together. Raises OutputError."""
        self.hand(True)
        self._thread.join()
        self._raise()

    def give_up(self) -> None:
        """Have the store drop the parts, also when it is broken already."""
        while self._thread.is_alive():
            with contextlib.suppress(Full):
                self._queue.put(False, timeout=0.2)
                break
            with contextlib.suppress(Empty):  # what still waits is not wanted any more
                self._queue.get_nowait()
        self._thread.join()

    def _send(self, part_bytes: int) -> None:
        try:
            self._store.put_parts(self._pieces(), part_bytes, _AT_ONCE)
        except BaseException as error:
            self._error = error

    def _pieces(self) -> Iterator[bytes]:
        while True:
            piece = self._queue.get()
            if piece is True:
                return
            if piece is False:
                raise _GivenUp
            yield piece

    def _raise(self) -> None:
        if self._error is not None:
            raise _failed(self._error, self._store.place) from None


def _failed(error: BaseException, place: Located) -> CkptError:
    found = explained(error, place)
    return OutputError(
        f"writing failed: {found.text}", path=place.name, hint=found.hint, slug=found.slug
    )


class UrlSink:
    """One output to an object; several, by their names, under its prefix; `beside` as in
    `sinks.FileSink`. Raises OutputError.
    """

    def __init__(self, place: Located, *, force: bool, beside: Mapping[str, str] | None) -> None:
        self.path = place.name
        self.force = force
        self._place = place
        self._first = ObjectTarget(place, force=force)
        self._beside = _beside(beside, force)

    def targets(self, names: Sequence[str]) -> list[Outlet]:
        """One target for each output, all of them checked."""
        inside = [name for name in names if name not in self._beside]
        if len(inside) == 1:
            made: dict[str, Outlet] = {inside[0]: self._first}
        else:
            made = _under(self._place.url.rpartition("/")[0], inside, self.force)
        return _in_order(names, {**made, **self._beside})


class PrefixSink:
    """Outputs by their names under a prefix, as `sinks.FolderSink`: refused, `output-mixed`, when
    shards or an index lie there that would not be replaced. `beside` are those that go elsewhere.
    """

    def __init__(self, place: Located, *, force: bool, beside: Mapping[str, str] | None) -> None:
        self.path = place.name
        self.force = force
        self.place = place
        self.url = place.url.rstrip("/")
        self.folder = RemoteFolder(place)
        self.beside = _beside(beside, force)

    def targets(self, names: Sequence[str]) -> list[Outlet]:
        """One target for each output, all of them checked."""
        inside = [name for name in names if name not in self.beside]
        refuse_mixed(self.path, self.folder.list(), inside)
        return _in_order(names, {**_under(self.url, inside, self.force), **self.beside})


def place_under(prefix: str, name: str) -> Located:
    """Where an output of this name goes. Raises OutputError unless it is a plain one."""
    place = locate(f"{prefix}/{name}")
    if place is None or not is_plain_name(name):
        raise OutputError(f"not a plain file name: '{name}'", path=masked(prefix))
    return place


def _under(prefix: str, names: Sequence[str], force: bool) -> dict[str, Outlet]:
    return {name: ObjectTarget(place_under(prefix, name), force=force) for name in names}


def _beside(paths: Mapping[str, str] | None, force: bool) -> dict[str, Outlet]:
    made: dict[str, Outlet] = {}
    for name, path in (paths or {}).items():
        place = locate(path) if is_url(path) else None
        made[name] = ObjectTarget(place, force=force) if place else Target(path, force)
    return made


def _in_order(names: Sequence[str], made: Mapping[str, Outlet]) -> list[Outlet]:
    found = [made[name] for name in names]
    paths = [outlet.path for outlet in found]
    for path in paths:
        if paths.count(path) > 1:
            raise refusal(path, "same", "two outputs in one object", "give them different names")
    return found
