"""Files that take an output: checked before anything is read, replaced only when all is written.

Knows: temp files, permissions, free space, renames. Must not know: plans, formats.
The temp file lies beside the target, so that the rename is atomic; only temp files that this
process made are ever removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence

from ckptool.errors import OutputError
from ckptool.places import describe
from ckptool.spans import Address

_TEMP_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL
_TEMP_FLAGS |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
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


def output_error(error: OSError, path: str) -> OutputError:
    """What the system refused while `path` was written, as an error of ours."""
    other = ("output-io", "check the disk, or write to another one with -o")
    slug, hint = _OS_ERRORS.get(error.errno or 0, other)
    text = f"writing failed: {error.strerror or error}"
    return OutputError(text, path=path, hint=hint, slug=slug)


def check_different(sources: Iterable[Address], path: str | os.PathLike[str]) -> None:
    """Raise OutputError `output-same` when the target is one of the input files."""
    try:
        there = os.stat(path)
    except (OSError, ValueError):
        return
    for source in sources:
        if source.identity[:2] == (there.st_dev, there.st_ino):
            raise OutputError(
                "the output is the input itself",
                path=os.fsdecode(path),
                hint="give another -o",
                slug="output-same",
            )


class Target:
    """One output file: the path asked for, and the temp file that becomes it.

    Raises OutputError when it cannot be written to (see `FileSink`).
    """

    def __init__(self, path: str, force: bool) -> None:
        self.path = path
        if path.endswith(("/", os.sep)):
            raise self._refusal(
                "special", "it names a folder, not a file", "give the name of a file"
            )
        try:
            self.real = os.path.realpath(path)  # a link is kept, what it names is written
            self.old = _stat_of(self.real)
        except (OSError, ValueError) as error:
            raise self._refusal("special", f"not a possible path: {error}") from error
        self.folder, self.name = os.path.split(self.real)
        self.temp = ""
        self.fd = -1
        self._check(force)

    def _check(self, force: bool) -> None:
        if self.old is not None and not stat.S_ISREG(self.old.st_mode):
            what = describe(self.old.st_mode)
            raise self._refusal("special", f"{what}, not a file", "give the name of a file")
        if self.old is not None and not force:
            raise self._refusal("exists", "it exists already", "replace it with -f")
        if not os.path.isdir(self.folder):
            raise self._refusal("folder", f"no folder '{self.folder}'", "make the folder first")
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise self._refusal("folder", "no permission to write there", _DENIED[1])

    def _refusal(self, slug: str, text: str, hint: str = "give another -o") -> OutputError:
        return OutputError(text, path=self.path, hint=hint, slug=f"output-{slug}")

    def check_space(self, needed: int) -> None:
        """Raise OutputError `output-space` when the disk has less than `needed` bytes free."""
        free = free_bytes(self.folder) if free_bytes else None
        if free is not None and free < needed:
            text = f"{needed:,} bytes are needed, {free:,} are free on the disk"
            raise self._refusal("space", text, _SPACE[1])

    def open(self) -> int:
        """Create the temp file, with the mode and owner of the file it will replace."""
        for number in range(1000):
            suffix = f"-{number}" if number else ""
            temp = os.path.join(self.folder, f"{self._stem()}{os.getpid()}{suffix}.tmp")
            with contextlib.suppress(FileExistsError):
                self.fd = os.open(temp, _TEMP_FLAGS, 0o666)
                self.temp = temp
                break
        if not self.temp:
            raise self._refusal("folder", "too many temp files of earlier runs beside it")
        if self.old is not None:
            _take_over(self.fd, self.temp, self.old)
        return self.fd

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

    def discard(self) -> None:
        """Remove the temp file, if this object made one and it was not published."""
        fd, self.fd = self.fd, -1
        temp, self.temp = self.temp, ""
        with contextlib.suppress(OSError):
            if fd >= 0:
                os.close(fd)
        with contextlib.suppress(OSError):
            if temp:
                os.unlink(temp)

    def findings(self) -> list[str]:
        """Sentences about what lies there: temp files of dead runs, other hard links."""
        pattern = re.compile(re.escape(self._stem()) + r"(\d+)(?:-\d+)?\.tmp")
        names: list[str] = []
        with contextlib.suppress(OSError):  # a folder may be writable and not readable
            names = sorted(os.listdir(self.folder))
        matches = [pattern.fullmatch(name) for name in names]
        stale = [match.group() for match in matches if match and not _alive(int(match.group(1)))]
        said = [f"left by an interrupted run, remove it: {name}" for name in stale]
        if self.old is not None and self.old.st_nlink > 1:
            others = self.old.st_nlink - 1
            said.append(f"{others} other hard link(s) to {self.path} keep the old content")
        return said

    def _stem(self) -> str:
        name = self.name
        if len(os.fsencode(name)) > _LONGEST_STEM:
            name = name[: _LONGEST_STEM // 4]
        return f".{name}.ckptool-"


class FileSink:
    """Where outputs go: one output to `path`; several, by their names, into its folder.

    Where the input is a file too, call `check_different` first.
    Raises OutputError before anything is read: `output-exists` without `force`,
    `output-special` for a folder, FIFO or device, `output-folder` for a missing or
    unwritable folder.
    """

    def __init__(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        self.path = os.fsdecode(path)
        self.force = force
        self._first = Target(self.path, force)

    def targets(self, names: Sequence[str]) -> list[Target]:
        """One target for each output, all of them checked."""
        if len(names) == 1:
            return [self._first]
        folder = os.path.dirname(self.path)
        unsafe = [name for name in names if os.path.basename(name) != name or not name]
        if unsafe:
            raise OutputError(f"not a plain file name: '{unsafe[0]}'", path=self.path)
        return [Target(os.path.join(folder, name), self.force) for name in names]


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
    if hasattr(os, "fchmod"):
        os.fchmod(fd, mode)
    else:
        os.chmod(temp, mode)


def _alive(pid: int) -> bool:
    if os.name == "nt":  # os.kill(pid, 0) would end the process there
        return pid == os.getpid()
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True
