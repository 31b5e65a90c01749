"""Bytes put at the end of a file and cut off again: the one writer that touches a file itself.

Knows: journals, locks, how an append is undone when it fails. Must not know: formats.
No byte before the former end is ever written. The journal lies beside the file from before the
first byte until after the last fsync, so whatever stops an edit in between, the former file is
`recover` away.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator

from ckptool import targets
from ckptool.errors import CkptError, NothingToDo, OutputError, SpecialFile
from ckptool.interrupts import held
from ckptool.journals import Journal, facts, pending
from ckptool.places import Source, changed, describe, open_source
from ckptool.targets import output_error, sync_folder, write_all

_FLAGS = os.O_RDWR | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
_ELSEWHERE = "write another file with -o OUT"


def append(
    source: Source,
    data: bytes,
    *,
    fsync: bool = True,
    confirm: Callable[[], object] = lambda: None,
) -> tuple[str, ...]:
    """Put `data` at the end of the file that `source` was opened from (whole, by a path).

    `confirm()` is called when all is written and may raise. Returns sentences about the file.
    Raises InputChanged, OutputError, SpecialFile; whatever is raised, KeyboardInterrupt too,
    the file is as it was and no journal is left.
    """
    with _opened(source) as fd:
        folder = os.path.dirname(os.path.realpath(source.address.uri))
        free = targets.free_bytes(folder) if targets.free_bytes else None
        if free is not None and free < len(data):
            text = f"{len(data):,} bytes are needed, {free:,} are free on the disk"
            raise OutputError(text, path=source.name, slug="output-space", hint="free some space")
        journal = Journal(source.address.uri, facts(source, source.size))
        _append(fd, source, data, journal, fsync, confirm)
        return _findings(fd, journal, fsync)


def _append(
    fd: int,
    source: Source,
    data: bytes,
    journal: Journal,
    fsync: bool,
    confirm: Callable[[], object],
) -> None:
    started = removing = False
    try:
        journal.place(fsync=fsync)
        _check_same(fd, source)  # another run may have come between
        started = True
        _write_at(fd, source.size, data)
        if fsync:
            os.fsync(fd)
        confirm()
        removing = True
        journal.remove(fsync=False)
    except BaseException:
        if started and (journal.placed() or not removing):
            _cut_back(fd, source.size, fsync)
        with contextlib.suppress(OSError):  # beside the former file it does no harm
            journal.discard(fsync=fsync)
        raise


def _write_at(fd: int, offset: int, data: bytes) -> None:
    os.lseek(fd, offset, os.SEEK_SET)
    write_all(fd, data)


def _cut_back(fd: int, size: int, fsync: bool) -> None:
    try:
        os.ftruncate(fd, size)
        if fsync:
            os.fsync(fd)
    except OSError as error:
        raise OutputError(
            f"writing failed, and so did cutting the file back: {error.strerror or error}",
            hint="run ckptool convert FILE --recover",
            slug="output-io",
        ) from error


def _findings(fd: int, journal: Journal, fsync: bool) -> tuple[str, ...]:
    """The edit is done: a failure here is told, not raised."""
    said = []
    others = os.fstat(fd).st_nlink - 1
    if others > 0:
        said.append(f"{others} other hard link(s) to the file see the edit too")
    if fsync:
        try:
            sync_folder(journal.folder)
        except OSError as error:
            said.append(f"written, but the folder could not be flushed to disk: {error.strerror}")
    return tuple(said)


def truncate(source: Source, size: int, *, fsync: bool = True) -> None:
    """Cut the file that `source` was opened from back to `size` bytes.

    Raises InputChanged when it is not the same any more, OutputError.
    """
    with _opened(source) as fd, held("the former bytes are back"):
        _cut(fd, size, fsync)


def _cut(fd: int, size: int, fsync: bool) -> None:
    if os.fstat(fd).st_size != size:  # else its time of change would be another
        os.ftruncate(fd, size)
    if os.fstat(fd).st_size != size:
        raise OSError(errno.EIO, "the disk did not cut the file back")
    try:
        if fsync:
            os.fsync(fd)
    except OSError as error:
        found = output_error(error, "")
        found.path = None  # `_opened` names it
        found.text = f"the file was cut back, but not flushed to disk: {error.strerror}"
        found.hint = "check the disk, then look at the file with ckptool verify"
        raise found from error


def recover(
    path: str,
    *,
    fsync: bool = True,
    check: Callable[[Source, int], object] = lambda source, length: None,
) -> tuple[int, int]:
    """Cut a file back to where an interrupted edit found it, when all four facts of the
    journal agree; then remove the journal. Returns the sizes before and after.

    `check(source, length)` is called before anything is cut off, and may raise. Raises
    NothingToDo without a journal, OutputError when it does not agree.
    """
    with open_source(path) as source:
        found = pending(source)
        if found is None:
            raise NothingToDo(
                "no edit in place was interrupted: no journal lies beside the file", path=path
            )
        if found.reason:
            raise OutputError(
                f"the journal beside the file is not obeyed: {found.reason}; nothing was changed",
                path=path,
                hint=f"if no edit of this file was interrupted, remove '{found.path}'",
            )
        if found.length < source.size:
            check(source, found.length)
        with _opened(source) as fd, held("the former bytes are back"):
            _cut(fd, found.length, fsync)
            os.unlink(found.path)
            if fsync:  # a journal that comes back after a crash does no harm
                with contextlib.suppress(OSError):
                    sync_folder(os.path.dirname(found.path))
        return source.size, found.length


@contextlib.contextmanager
def _opened(source: Source) -> Iterator[int]:
    """The same file as `source`, to be written to, locked; every error names it."""
    path = source.address.uri
    fd = -1
    try:
        fd = _open(path)
        _lock(fd)
        _check_same(fd, source)
        yield fd
    except OSError as error:
        raise output_error(error, path) from error
    except CkptError as error:
        error.path = error.path or path
        raise
    finally:
        if fd >= 0:
            with contextlib.suppress(OSError):  # what counts was flushed before
                os.close(fd)


def _open(path: str) -> int:
    try:
        fd = os.open(path, _FLAGS)
    except OSError as error:
        raise OutputError(
            f"it cannot be opened for writing: {error.strerror or error}",
            hint=f"give yourself write permission, or {_ELSEWHERE}",
            slug="output-file",
        ) from error
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise SpecialFile(f"{describe(mode)}, not a file", hint=_ELSEWHERE)
    return fd


def _lock(fd: int) -> None:
    """Keep other runs of ckptool out, where the system has such locks."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OutputError(
            "another run is editing it in place", hint="wait until it has finished"
        ) from error
    except OSError:  # some file systems have no locks; the journal excludes others too
        return


def _check_same(fd: int, source: Source) -> None:
    info = os.fstat(fd)
    now = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
    if now != source.address.identity:
        raise changed(source.address.uri)
