"""One output file: checked before anything is read, replaced only when all is written.

Knows: temp files, permissions, free space, renames. Must not know: plans, formats, which
outputs there are. The temp file lies beside the target, so that the rename is atomic; only
temp files and folders that this process made are ever removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Sequence

from ckptool.errors import OutputError
from ckptool.interrupts import held
from ckptool.places import describe, is_plain_name
from ckptool.spans import Address

_TEMP_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL
_TEMP_FLAGS |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_AGAIN_FLAGS = os.O_RDWR | sum(
    getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY", "O_NOFOLLOW")
)
_NAME_A_FILE = "give the name of a file"
_LONGEST_STEM = 200  # bytes of the name kept in a temp name; names end at 255

_SPACE = ("output-space", "free some space, or write to another disk with -o")
_DENIED = ("output-folder", "it needs write permission on the folder; give another -o")
_OS_ERRORS = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EROFS: ("output-folder", "the disk is read-only; give another -o"),
    errno.ENAMETOOLONG: ("output-folder", "give a shorter name with -o"),
    errno.EFBIG: ("output-io", "the file is larger than the disk or a limit (ulimit -f) allows"),
}


def output_error(error: OSError, path: str, in_place: Sequence[str] = ()) -> OutputError:
    """What the system refused while `path` was written, as an error of ours.

    `in_place` are outputs that had been put in their place before.
    """
    other = ("output-io", "check the disk, or write to another one with -o")
    slug, hint = _OS_ERRORS.get(error.errno or 0, other)
    text = f"writing failed: {error.strerror or error}"
    if in_place:
        names = ", ".join(in_place[:3]) + (" …" if len(in_place) > 3 else "")
        text += f"; {len(in_place)} of the files are in place already: {names}"
    found = OutputError(text, path=path, hint=hint, slug=slug)
    found.findings = tuple(f"written: {name}" for name in in_place)
    return found


def refusal(path: str, slug: str, text: str, hint: str = "give another -o") -> OutputError:
    """An OutputError before anything is written."""
    return OutputError(text, path=path, hint=hint, slug=f"output-{slug}")


class NewFolder:
    """A folder that does not exist yet: made when the first file is written into it, and
    removed again unless one stays. `path` is a real path; its parent must be there.

    Raises OutputError `output-folder` when it cannot be made.
    """

    def __init__(self, path: str, asked: str) -> None:
        self.path = path
        self.parent = os.path.dirname(path)
        self._made = False
        check_folder(self.parent, asked)

    def make(self) -> None:
        """Make it, once."""
        if not self._made:
            with held():
                os.mkdir(self.path)
                self._made = True

    def discard(self) -> None:
        """Remove it if this object made it and nothing is in it."""
        if self._made:
            with contextlib.suppress(OSError):
                os.rmdir(self.path)
                self._made = False


def check_folder(folder: str, asked: str) -> None:
    """Raise OutputError `output-folder` unless files can be made in it."""
    if not os.path.isdir(folder):
        raise refusal(asked, "folder", f"no folder '{folder}'", "make the folder first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise refusal(asked, "folder", "no permission to write there", _DENIED[1])


def resolve(path: str) -> tuple[str, os.stat_result | None]:
    """The path with its links followed, and what is there.

    Raises OutputError `output-special` when there can be no such path.
    """
    try:
        real = os.path.realpath(path)
        return real, _stat_of(real)
    except (OSError, ValueError) as error:
        text = getattr(error, "strerror", None) or str(error)
        raise refusal(path, "special", f"not a possible path: {text}") from error


class Target:
    """One output file: the path asked for, and the temp file that becomes it.

    `new`, where its folder is that one, is made when the file is written.
    Raises OutputError when it cannot be written to (see `sinks.FileSink`).
    """

    def __init__(self, path: str, force: bool, new: NewFolder | None = None) -> None:
        self.path = path
        if path.endswith(("/", os.sep)):
            raise refusal(path, "special", "it names a folder, not a file", _NAME_A_FILE)
        self.real, self.old = resolve(path)  # a link is kept, what it names is written
        self.folder, self.name = os.path.split(self.real)
        self.new = new if new is not None and new.path == self.folder else None
        self.temp = ""
        self.fd = -1
        self.published = False
        self._check(force)

    def _check(self, force: bool) -> None:
        if self.old is not None and not stat.S_ISREG(self.old.st_mode):
            what = describe(self.old.st_mode)
            raise refusal(self.path, "special", f"{what}, not a file", _NAME_A_FILE)
        if self.old is not None and not force:
            raise refusal(self.path, "exists", "it exists already", "replace it with -f")
        if self.new is None:
            check_folder(self.folder, self.path)

    def folders(self) -> tuple[str, ...]:
        """Folders whose content a publish changes."""
        return (self.folder, self.new.parent) if self.new else (self.folder,)

    def disk(self) -> int:
        """Number of the disk it will be written to."""
        return os.stat(self._there()).st_dev

    def is_source(self, address: Address) -> bool:
        """Whether it is the file that `address` names."""
        old = self.old
        return old is not None and (old.st_dev, old.st_ino) == address.identity[:2]

    def _there(self) -> str:
        """Its folder, or where that will be made."""
        return self.new.parent if self.new else self.folder

    def check_space(self, needed: int) -> None:
        """Raise OutputError `output-space` when the disk has less than `needed` bytes free."""
        free = free_bytes(self._there()) if free_bytes else None
        if free is not None and free < needed:
            text = f"{needed:,} bytes are needed, {free:,} are free on the disk"
            raise refusal(self.path, "space", text, _SPACE[1])

    def open(self, first: int = 0) -> int:
        """Create the temp file, with the mode and owner of the file it will replace. `first` is
        the number in its name to begin with: a random one where another machine must not have a
        file of that name by chance.
        """
        if self.new:
            self.new.make()
        for number in range(first, first + 1000):
            suffix = f"-{number}" if number else ""
            temp = os.path.join(self.folder, f"{self.stem()}{os.getpid()}{suffix}.tmp")
            with contextlib.suppress(FileExistsError), held():
                self.fd = os.open(temp, _TEMP_FLAGS, 0o666)
                self.temp = temp
                break
        if not self.temp:
            raise refusal(self.path, "folder", "too many temp files of earlier runs beside it")
        if self.old is not None:
            _take_over(self.fd, self.temp, self.old)
        return self.fd

    def reopen(self) -> int:
        """Open the temp file again, after it was closed."""
        self.fd = os.open(self.temp, _AGAIN_FLAGS)
        return self.fd

    def adopt(self, name: str, inode: int, size: int) -> bool:
        """Take the temp file of an interrupted run, where it lies there as it was; it is closed.

        Nothing is adopted that is no regular file with this inode and size and one name.
        """
        if not name.startswith(self.stem()) or not name.endswith(".tmp") or not is_plain_name(name):
            return False
        temp = os.path.join(self.folder, name)
        try:
            fd = os.open(temp, _AGAIN_FLAGS)
        except OSError:
            return False
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or (info.st_ino, info.st_size, info.st_nlink) != (
                inode,
                size,
                1,
            ):
                return False
            if self.old is not None:
                _take_over(fd, temp, self.old)
        finally:
            os.close(fd)
        self.temp = temp
        return True

    def leave(self) -> None:
        """Let the temp file stay when this target is discarded."""
        self.temp = ""

    def write(self, data: memoryview) -> None:
        """Write all of it at the end of the temp file."""
        write_all(self.fd, data)

    def written(self) -> int:
        """Bytes of the open temp file."""
        return os.fstat(self.fd).st_size

    def close(self, *, fsync: bool) -> None:
        """Close the temp file; with `fsync`, once the disk has it."""
        fd, self.fd = self.fd, -1
        try:
            if fsync:
                os.fsync(fd)
        finally:
            os.close(fd)

    def publish(self) -> None:
        """Put the temp file in the target's place, at once."""
        os.replace(self.temp, self.real)
        self.temp = ""
        self.published = True

    def discard(self) -> None:
        """Remove the temp file, and the folder, if this object made one and it is not used."""
        fd, self.fd = self.fd, -1
        temp, self.temp = self.temp, ""
        with contextlib.suppress(OSError):
            if fd >= 0:
                os.close(fd)
        with contextlib.suppress(OSError):
            if temp:
                os.unlink(temp)
        if self.new:
            self.new.discard()

    def stem(self) -> str:
        """How the names of its temp files begin."""
        name = self.name
        if len(os.fsencode(name)) > _LONGEST_STEM:
            name = name[: _LONGEST_STEM // 4]
        return f".{name}.ckptool-"


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of it, however little the system takes at once."""
    view = memoryview(data)
    while view:
        taken = os.write(fd, view)
        if not taken:
            raise OSError(errno.EIO, "the disk takes no bytes")
        view = view[taken:]


def lost(path: str, size: int, planned: int) -> OutputError:
    """The error of a file that is shorter than what was written to it."""
    text = f"the disk kept {size:,} bytes of {planned:,} that were written"
    return output_error(OSError(errno.EIO, text), path)


def sync_folder(folder: str) -> None:
    """Make renames in it durable, where the system can (not on Windows)."""
    if os.name == "nt":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot
            raise
    finally:
        os.close(fd)


def _statvfs_free(folder: str) -> int:
    info = os.statvfs(folder)
    return info.f_bavail * info.f_frsize


# None where the system has no statvfs: the write itself then finds out.
free_bytes: Callable[[str], int] | None = _statvfs_free if hasattr(os, "statvfs") else None


def _stat_of(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _take_over(fd: int, temp: str, old: os.stat_result) -> None:
    """Owner first: changing it clears mode bits. A stranger's file keeps only its mode."""
    if hasattr(os, "fchown"):
        with contextlib.suppress(OSError):
            os.fchown(fd, old.st_uid, old.st_gid)
    mode = old.st_mode & 0o777
    try:
        if hasattr(os, "fchmod"):
            os.fchmod(fd, mode)
        else:
            os.chmod(temp, mode)
    except OSError as error:
        if os.fstat(fd).st_mode & 0o777 & ~mode:  # others could read what they could not before
            text = f"the new file cannot be given the mode {mode:03o}: {error.strerror}"
            hint = "give another -o, or remove the old file first"
            raise OutputError(text, hint=hint, slug="output-mode") from error
