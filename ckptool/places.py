"""Where bytes come from: bounded reads of regular files, byte strings and file objects.

Knows: files, folders, what may be opened. Must not know: formats.
Never mmap: a file cut while it is mapped kills the process; a short read is an error.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from _thread import allocate_lock  # threading.Lock by its own name; threading costs 3 ms
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

from ckptool.errors import PathEscape, SpecialFile
from ckptool.reads import BytesSource as BytesSource
from ckptool.reads import Doubted as Doubted
from ckptool.reads import Source as Source
from ckptool.reads import changed as changed
from ckptool.spans import Address

PlaceLike = str | bytes | os.PathLike[str] | os.PathLike[bytes] | BinaryIO

# Tests set these to None: the seek-and-read way of systems that have neither.
pread: Callable[[int, int, int], bytes] | None = getattr(os, "pread", None)
preadv: Callable[[int, list[memoryview], int], int] | None = getattr(os, "preadv", None)

# Opens what has a scheme; set by those who know networks: `verbs.opening`, an engine's worker.
open_url: Callable[[str], Source] | None = None
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")  # two letters: C:// is a disk

# O_NONBLOCK: opening a FIFO must not wait for its writer. O_BINARY exists on Windows only.
_OPEN_FLAGS = os.O_RDONLY | sum(
    getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO (named pipe)",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}
_OPEN_ERRORS = {
    errno.ENOENT: ("no such file", "check the path"),
    errno.ENOTDIR: ("no such file", "check the path"),
    errno.EACCES: ("no permission to read it", "ask its owner for read permission"),
    errno.ELOOP: ("a symbolic link that leads back to itself", "give the real file"),
    errno.ENXIO: ("a socket, not a file", "give a regular file"),
}


class StreamSource(Source):
    """A seekable binary file object that belongs to the caller: seek and read under a lock."""

    def __init__(self, stream: BinaryIO) -> None:
        self._lock = allocate_lock()
        self._stream = stream
        name = getattr(stream, "name", None)
        try:
            size = stream.seek(0, io.SEEK_END)
        except (OSError, ValueError, AttributeError) as error:
            raise SpecialFile(
                f"the file object cannot seek: {error}",
                hint="read it into io.BytesIO, or give a path",
            ) from error
        super().__init__(name if isinstance(name, str) else "<stream>", size, Address("", size))

    def _fetch(self, offset: int, size: int) -> bytes:
        with self._lock:
            self._stream.seek(offset)
            return self._stream.read(size)

    def unchanged(self) -> bool:
        """Whether the stream still has its size."""
        with self._lock:
            return self._stream.seek(0, io.SEEK_END) == self.size


class FileSource(Source):
    """A regular file by its descriptor; `identity` is (device, inode, size, mtime in ns)."""

    def __init__(self, fd: int, name: str, uri: str, info: os.stat_result) -> None:
        super().__init__(name, info.st_size, Address(uri, info.st_size, _identity(info)))
        self._fd = fd
        self._lock = allocate_lock()

    def _fetch(self, offset: int, size: int) -> bytes:
        if pread is not None:
            return pread(self._fd, size, offset)
        with self._lock:
            os.lseek(self._fd, offset, os.SEEK_SET)
            return os.read(self._fd, size)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` without a copy where the system can."""
        if preadv is None:
            return super().read_into(offset, buffer)
        self._check(offset, len(buffer))
        done = 0
        while done < len(buffer):
            try:
                count = preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise self._device_error(error, offset + done) from error
            if not count:
                raise self._shortened(offset + done)
            done += count
        return None

    def fileno(self) -> int | None:
        """The descriptor itself."""
        return self._fd

    def unchanged(self) -> bool:
        """Compare inode, size and mtime with those at opening."""
        return _identity(os.fstat(self._fd)) == self.address.identity

    def close(self) -> None:
        """Close the descriptor; later reads fail, and never read another file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):  # what was read, was read
                os.close(fd)


def open_source(place: PlaceLike) -> Source:
    """Open a path or URL, or wrap a seekable binary file object (whose position is moved).

    Raises SpecialFile for whatever is not a regular file that can be read; for URLs what
    `remote` raises.
    """
    if isinstance(place, str | bytes | os.PathLike):
        path = os.fsdecode(place)
        return open_url(path) if open_url and is_url(path) else _open_path(path, path)
    return StreamSource(place)


def reopen(address: Address) -> Source:
    """Open what `address` names, if it is still the same file.

    Raises InputChanged when it is another, SpecialFile when it is gone or never had a path.
    """
    if not address.uri:
        raise SpecialFile("a file object cannot be opened again", hint="give a path")
    source = open_source(address.uri)
    if source.address.identity == (address.identity or source.address.identity) and (
        source.size == address.size_bytes
    ):
        return source
    source.close()
    raise changed(source.name)


def describe(mode: int) -> str:
    """What a path with this `st_mode` is, in words."""
    return _KINDS.get(stat.S_IFMT(mode), "not a regular file")


def is_url(place: PlaceLike) -> bool:
    """Whether it begins with a scheme, as in s3://."""
    return isinstance(place, str) and _URL.match(place) is not None


def is_folder(place: PlaceLike) -> bool:
    """Whether it is the path of a folder; links are followed."""
    return isinstance(place, str | bytes | os.PathLike) and os.path.isdir(place)


def check_folder_name(name: str, within: str) -> None:
    """Raise PathEscape for a name that is none of a folder right inside `within`."""
    if not is_plain_name(name):
        raise PathEscape(
            "a folder name that leads out of the folder", path=within, member=name,
            hint="do not use this checkpoint",
        )  # fmt: skip


class Folder:
    """The regular files right inside a folder. Raises SpecialFile when it is none."""

    path: str

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fsdecode(path)
        if not os.path.isdir(self.path):
            text = "not a folder" if os.path.exists(self.path) else "no such folder"
            raise SpecialFile(text, path=self.path, hint="check the path")

    def list(self) -> list[str]:
        """Names of its regular files (links to such included), sorted."""
        return [*self._names(os.path.isfile)]

    def folders(self) -> tuple[str, ...]:
        """Names of the folders right inside it (links to such included), sorted."""
        return self._names(os.path.isdir)

    def _names(self, wanted: Callable[[str], bool]) -> tuple[str, ...]:
        try:
            names = sorted(os.listdir(self.path))
        except OSError as error:
            text, hint = _OPEN_ERRORS.get(error.errno or 0, (str(error.strerror), "check it"))
            raise SpecialFile(text, path=self.path, hint=hint) from error
        return tuple(name for name in names if wanted(os.path.join(self.path, name)))

    def holds(self, name: str) -> bool:
        """Whether anything has this name, be it a link that leads nowhere."""
        return os.path.lexists(os.path.join(self.path, name))

    def size_of(self, name: str) -> int:
        """Bytes of one of its files; 0 when it is none."""
        path = os.path.join(self.path, name)
        return os.path.getsize(path) if os.path.isfile(path) else 0

    def below(self, name: str) -> Folder:
        """A folder right inside it. Raises PathEscape for a name or a link that leads out,
        SpecialFile where there is none.
        """
        check_folder_name(name, self.path)
        path = os.path.join(self.path, name)
        home = os.path.realpath(self.path)
        if not os.path.realpath(path).startswith(os.path.join(home, "")):
            raise PathEscape("a link that leads out of the folder", path=path,
                             hint="give the folder that it leads to")  # fmt: skip
        return Folder(path)

    def names_below(self, name: str) -> tuple[str, ...]:
        """Names of the files in a folder right inside, wherever a link leads; none where it
        cannot be read.
        """
        try:
            return tuple(Folder(os.path.join(self.path, name)).list())
        except SpecialFile:
            return ()

    def child(self, name: str) -> Source:
        """Open one of its files.

        Raises PathEscape when `name` is not a plain name or a link leads out of the folder
        (in Hugging Face's cache: out of the blobs of its model), SpecialFile as `open_source`.
        """
        path = os.path.join(self.path, name)
        if not is_plain_name(name):
            raise PathEscape(
                "a file name that is not a plain name in the folder",
                path=self.path,
                member=name,
                hint="edit the name, or do not use this file",
            )
        try:
            real, home = os.path.realpath(path), os.path.realpath(self.path)
        except OSError as error:  # the current folder was removed
            raise _open_error(path, error) from error
        if not any(real.startswith(os.path.join(root, "")) for root in (home, *_blobs(home))):
            hint = "put the file itself in its place"
            raise PathEscape("a link that leads out of the folder", path=path, hint=hint)
        return _open_path(real, path)


def _blobs(folder: str) -> list[str]:
    """Where the links of `models--…/snapshots/REVISION` lead in Hugging Face's cache."""
    model, between, _ = folder.rpartition(f"{os.sep}snapshots{os.sep}")
    cached = between and os.path.basename(model).startswith("models--")
    return [os.path.join(model, "blobs")] if cached else []


def is_plain_name(name: str) -> bool:
    """Whether `name` names something right inside a folder, on any system."""
    unsafe = any(letter in name for letter in "/\\\0") or name in ("", ".", "..")
    return not unsafe and not os.path.splitdrive(name)[0]


def _identity(info: os.stat_result) -> tuple[int, ...]:
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)


def _open_path(path: str, name: str) -> Source:
    try:
        fd = os.open(path, _OPEN_FLAGS)
    except (OSError, ValueError) as error:
        raise _open_error(name, error) from error
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode):
        return FileSource(fd, name, path, info)
    os.close(fd)
    raise _special(name, info.st_mode)


def _special(path: str, mode: int) -> SpecialFile:
    return SpecialFile(f"{describe(mode)}, not a file", path=path, hint="give a regular file")


def _open_error(path: str, error: OSError | ValueError) -> SpecialFile:
    if isinstance(error, ValueError):  # a NUL byte in the path
        return SpecialFile("not a possible path", hint="check the path")
    if os.path.isdir(path):  # Windows refuses to open a folder
        return _special(path, stat.S_IFDIR)
    if error.errno == errno.ENOENT and os.path.islink(path):
        target = os.readlink(path)
        return SpecialFile(
            f"a link to '{target}', which does not exist", path=path, hint="restore the target"
        )
    text, hint = _OPEN_ERRORS.get(error.errno or 0, (error.strerror or str(error), "check it"))
    return SpecialFile(text, path=path, hint=hint)
