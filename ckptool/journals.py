"""The journal beside a file that is being edited in place: what the file was before.

Knows: the four facts, where they are kept, whether they still agree with the file.
Must not know: formats, who edits.
A journal is hostile input like any other file: read up to a bound, and obeyed only when device,
inode, length and the checksum of the former end all agree.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
import zlib
from typing import NamedTuple

from ckptool.errors import OutputError
from ckptool.places import Source
from ckptool.targets import lost, sync_folder, write_all

_TAIL = 64 << 10
_LARGEST = 512
_TEXT = "ckptool-journal 1 device {} inode {} length {} crc32 {:08x}\n"
_PATTERN = re.compile(
    rb"ckptool-journal 1 device (\d{1,40}) inode (\d{1,40}) length (\d{1,19}) crc32 ([0-9a-f]{8})\n"
)
_READ = os.O_RDONLY | sum(
    getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY", "O_NOFOLLOW")
)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_CREATE |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class Facts(NamedTuple):
    """What a file was: `length` in bytes, `crc` of its last 64 KiB (or of all, if fewer)."""

    device: int
    inode: int
    length: int
    crc: int


class Pending(NamedTuple):
    """A journal that lies beside a file. `length` is the former end of the file; `reason` is
    empty when all four facts agree, and else says why the journal is not obeyed.
    """

    path: str
    length: int
    reason: str = ""


def journal_path(path: str) -> str:
    """Where the journal of a file lies: beside the file itself, not beside a link to it."""
    real = path
    with contextlib.suppress(OSError):  # the current folder was removed: no link is followed
        real = os.path.realpath(path)
    folder, name = os.path.split(real)
    return os.path.join(folder, _name(name))


def _name(name: str) -> str:
    return f".{name}.ckptool-journal"


def facts(source: Source, length: int) -> Facts:
    """The four facts of an open file, were it `length` bytes long. Raises Truncated."""
    device, inode = source.address.identity[:2]
    size = min(length, _TAIL)
    return Facts(int(device), int(inode), length, zlib.crc32(source.read(length - size, size)))


def pending(source: Source) -> Pending | None:
    """The journal beside an open file, if there is one.

    One failed open where there is none. Raises CkptError when the device fails.
    """
    uri = source.address.uri
    folder, name = os.path.split(uri)  # its links need not be resolved to look beside it
    path = (
        journal_path(uri) if os.path.islink(uri) else os.path.join(folder or os.curdir, _name(name))
    )
    try:
        data = _read(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return None
        return Pending(path, 0, f"it cannot be read: {error.strerror or error}")
    match = _PATTERN.fullmatch(data)
    if match is None:
        return Pending(path, 0, "it is not a journal of ckptool")
    device, inode, length = map(int, match.groups()[:3])
    said = Facts(device, inode, length, int(match.group(4), 16))
    return Pending(path, said.length, _disagreement(said, source))


def _read(path: str) -> bytes:
    """At most one byte more than a journal can have; nothing of what is no regular file."""
    fd = os.open(path, _READ)
    try:
        return os.read(fd, _LARGEST + 1) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)


def _disagreement(said: Facts, source: Source) -> str:
    if (said.device, said.inode) != source.address.identity[:2]:
        return "it was made for another file"
    if said.length > source.size:
        return "the file is shorter than it was before the edit"
    if said != facts(source, said.length):
        return "the former end of the file has other bytes"
    return ""


class Journal:
    """The journal of one edit. It lies beside the file from `place` until `remove`.

    `path` is that of the file, links resolved.
    """

    def __init__(self, path: str, said: Facts) -> None:
        self.path = journal_path(path)
        self.folder = os.path.dirname(self.path)
        unique = f"{os.getpid()}-{time.time_ns()}.tmp"  # `sinks` tells of those left over
        self._temp = self.path.removesuffix("journal") + unique
        self._data = _TEXT.format(*said).encode()
        self._made: tuple[int, int] | None = None

    def place(self, *, fsync: bool) -> None:
        """Put it there whole, and with `fsync` for good.

        Raises OutputError when one lies there already, OSError when the system refuses.
        """
        try:
            self._write_temp(fsync)
            _move(self._temp, self.path)
        except FileExistsError:
            raise pending_error(self.path) from None
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temp)
        if fsync:
            sync_folder(self.folder)

    def placed(self) -> bool:
        """Whether the file there is the one that `place` put there."""
        with contextlib.suppress(FileNotFoundError):
            return self._made == _identity(os.lstat(self.path))
        return False

    def remove(self, *, fsync: bool) -> None:
        """Remove it if it is ours. Raises OSError; then it may come back after a crash."""
        if self.placed():
            os.unlink(self.path)
        if fsync:
            sync_folder(self.folder)

    def discard(self, *, fsync: bool) -> None:
        """Remove whatever `place` has left. Raises OSError."""
        if self._made:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temp)
        self.remove(fsync=fsync)

    def _write_temp(self, fsync: bool) -> None:
        fd = os.open(self._temp, _CREATE, 0o666)
        try:
            self._made = _identity(os.fstat(fd))
            write_all(fd, self._data)
            if os.fstat(fd).st_size != len(self._data):  # cut short it would not be obeyed
                raise lost(self.path, os.fstat(fd).st_size, len(self._data))
            if fsync:
                os.fsync(fd)
        finally:
            os.close(fd)


def pending_error(path: str) -> OutputError:
    """The refusal to edit a file beside which a journal lies."""
    return OutputError(
        f"an edit in place was interrupted, or is going on: '{os.path.basename(path)}' lies beside it",
        hint="run ckptool convert FILE --recover first",
    )


def _identity(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino


def _move(old: str, new: str) -> None:
    """Give a file its name, never replacing another: FileExistsError then."""
    try:
        os.link(old, new)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, "it exists", new) from error
        os.rename(old, new)
