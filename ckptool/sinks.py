"""Where the outputs of one write go: a file, or files in a folder, and files beside them.

Knows: which targets a write has, and which of them may not be. Must not know: plans, formats,
how one target is written.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ckptool.errors import OutputError
from ckptool.places import describe, is_plain_name
from ckptool.spans import Address
from ckptool.targets import (
    NewFolder,
    Target,
    check_folder,
    output_error,
    refusal,
    resolve,
    sync_folder,
)
from ckptool.taskbook import book_path

__all__ = [
    "FileSink", "FolderSink", "Outlet", "Sink", "Target", "check_different", "check_none_is_source",
    "check_space", "findings_beside", "output_error", "refuse_mixed", "sync_folder",
]  # fmt: skip

Beside = Mapping[str, "str | os.PathLike[str]"]

_TEMP_NAME = re.compile(r"(\..*\.ckptool-)(\d+)(?:-\d+)?\.tmp", re.DOTALL)
# What a loader of a folder would read beside new shards. It prefers .safetensors to an index
# of .bin files, so that one may stay.
_SHARDS = (".safetensors", ".index.json")
_KEPT = ".bin.index.json"
_OTHER_FOLDER = "remove them first, or give another folder with -o"


class Outlet(Protocol):
    """One output, a file or another: written in order, then shown at once, or given up."""

    path: str
    published: bool

    def open(self) -> int:
        """Begin; the descriptor to write to, or -1 where `write` takes the bytes."""

    def write(self, data: memoryview) -> None:
        """Take all of `data`; the caller may use its memory again."""

    def written(self) -> int:
        """Bytes taken so far."""

    def close(self, *, fsync: bool) -> None:
        """All is written."""

    def publish(self) -> None:
        """Put it in its place, at once."""

    def discard(self) -> None:
        """Give up what is not published; doing so twice is fine."""

    def folders(self) -> tuple[str, ...]:
        """Folders on this machine whose content a publish changes."""

    def check_space(self, needed: int) -> None:
        """Raise OutputError unless `needed` bytes, which is its whole size, find room."""

    def is_source(self, address: Address) -> bool:
        """Whether it would replace what `address` names."""


class Sink(Protocol):
    """Where outputs go; `path` is what the user called it."""

    path: str

    def targets(self, names: Sequence[str]) -> Sequence[Outlet]:
        """One target for each output, all of them checked; nothing is made yet."""


class FileSink:
    """One output to `path`; several, by their names, into its folder. An output whose name is
    a key of `beside` goes to the path that is given there.

    Raises OutputError before anything is read: `output-exists` without `force`,
    `output-special` for a folder, FIFO or device, `output-folder` for a missing or
    unwritable folder, `output-same` for two outputs in one file.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, force: bool = False, beside: Beside | None = None
    ) -> None:
        self.path = os.fsdecode(path)
        self.force = force
        self._first = Target(self.path, force)
        self._beside = _targets_beside(beside, force)
        _check_distinct([self._first, *self._beside.values()])

    def targets(self, names: Sequence[str]) -> list[Target]:
        """One target for each output, all of them checked."""
        inside = [name for name in names if name not in self._beside]
        if len(inside) == 1:
            made = {inside[0]: self._first}
        else:
            made = _targets_in(os.path.dirname(self.path), inside, self.force, None)
        return _in_order(names, {**made, **self._beside})


class FolderSink:
    """Outputs by their names into the folder `path`, which is made (not its parents) when the
    first is written, and removed again if none stays. `beside` as in `FileSink`.

    Raises OutputError as `FileSink`; `output-special` when `path` is no folder;
    `output-mixed`, also with `force`, when it holds shards or an index that would not be
    replaced: who loads the folder would read old and new ones together.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, force: bool = False, beside: Beside | None = None
    ) -> None:
        self.path = os.fsdecode(path)
        self.force = force
        if not self.path:
            raise refusal(self.path, "special", "an empty path", "give the name of a folder")
        self._real, there = resolve(self.path)
        self._new: NewFolder | None = None
        if there is None:
            self._new = NewFolder(self._real, self.path)
        elif stat.S_ISDIR(there.st_mode):
            check_folder(self._real, self.path)
        else:
            what = "a file" if stat.S_ISREG(there.st_mode) else describe(there.st_mode)
            raise refusal(
                self.path, "special", f"{what}, not a folder", "give the name of a folder"
            )
        self._beside = _targets_beside(beside, force, self._new)
        _check_distinct(list(self._beside.values()))

    def targets(self, names: Sequence[str]) -> list[Target]:
        """One target for each output, all of them checked."""
        inside = [name for name in names if name not in self._beside]
        self._check_unmixed(inside)
        made = _targets_in(self.path, inside, self.force, self._new)
        return _in_order(names, {**made, **self._beside})

    def _check_unmixed(self, names: Sequence[str]) -> None:
        try:
            there = [] if self._new else sorted(os.listdir(self._real))
        except OSError as error:
            raise output_error(error, self.path) from error
        refuse_mixed(self.path, there, names)


def refuse_mixed(path: str, there: Sequence[str], names: Sequence[str]) -> None:
    """Raise OutputError `output-mixed` when shards or an index are there that `names`, which
    will be written, do not replace.
    """
    replaced = {os.path.normcase(name) for name in names}
    old = [name for name in there if os.path.normcase(name) not in replaced and _is_shard(name)]
    if old:
        more = f" and {len(old) - 3} more" if len(old) > 3 else ""
        text = f"old files lie there that would be loaded with the new ones: {', '.join(old[:3])}{more}"
        refused = refusal(path, "mixed", text, _OTHER_FOLDER)
        refused.findings = tuple(old)
        raise refused


def _is_shard(name: str) -> bool:
    lower = name.lower()
    return lower.endswith(_SHARDS) and not lower.endswith(_KEPT)


def _targets_in(
    folder: str, names: Sequence[str], force: bool, new: NewFolder | None
) -> dict[str, Target]:
    unsafe = [name for name in names if not is_plain_name(name)]
    if unsafe:
        raise OutputError(f"not a plain file name: '{unsafe[0]}'", path=folder)
    return {name: Target(os.path.join(folder, name), force, new) for name in names}


def _targets_beside(
    beside: Beside | None, force: bool, new: NewFolder | None = None
) -> dict[str, Target]:
    return {name: Target(os.fsdecode(path), force, new) for name, path in (beside or {}).items()}


def _in_order(names: Sequence[str], made: Mapping[str, Target]) -> list[Target]:
    found = [made[name] for name in names]
    _check_distinct(found)
    return found


def _check_distinct(targets: Sequence[Target]) -> None:
    """Raise OutputError `output-same` when two of them are one file."""
    seen: dict[object, Target] = {}
    for target in targets:
        names: list[object] = [os.path.normcase(target.real)]
        if target.old is not None:
            names.append((target.old.st_dev, target.old.st_ino))
        for name in names:
            if name in seen:
                text = f"two outputs in one file: this one and {seen[name].path}"
                raise refusal(target.path, "same", text, "give them different names")
            seen[name] = target


# -- asked once for all targets ----------------------------------------------------------------
def check_different(sources: Iterable[Address], path: str | os.PathLike[str]) -> None:
    """Raise OutputError `output-same` when the target is one of the input files."""
    try:
        there = os.stat(path)
    except (OSError, ValueError):
        return
    if (there.st_dev, there.st_ino) in {source.identity[:2] for source in sources}:
        raise _same(os.fsdecode(path))


def check_none_is_source(targets: Sequence[Outlet], sources: Sequence[Address]) -> None:
    """Raise OutputError `output-same` when a target is one of the files that are read."""
    for target in targets:
        if any(map(target.is_source, sources)):
            raise _same(target.path)


def _same(path: str) -> OutputError:
    return refusal(path, "same", "the output is the input itself")


def check_space(targets: Sequence[Outlet], sizes: Sequence[int]) -> None:
    """Raise OutputError `output-space` when a disk has less free than its targets need."""
    needed: dict[int, int] = {}
    first: dict[int, Target] = {}
    for target, size in zip(targets, sizes, strict=True):
        if not isinstance(target, Target):
            target.check_space(size)
            continue
        disk = target.disk()
        needed[disk] = needed.get(disk, 0) + size
        first.setdefault(disk, target)
    for disk, size in needed.items():
        first[disk].check_space(size)


def findings_beside(outlets: Sequence[Outlet]) -> list[str]:
    """Sentences about what lies there: temp files and books of dead runs, other hard links."""
    targets = [outlet for outlet in outlets if isinstance(outlet, Target)]
    stems: dict[str, set[str]] = {}
    for target in targets:
        stems.setdefault(target.folder, set()).add(target.stem())
    said = [
        f"left by an interrupted run, remove it: {name}"
        for folder, ours in stems.items()
        for name in _stale(folder, ours)
    ]
    for target in targets:
        book = book_path(target.folder, target.name)
        if os.path.lexists(book):
            what = "what an interrupted run has done; --resume goes on from it, or remove it"
            said.append(f"{what}: {os.path.basename(book)}")
        if target.old is not None and target.old.st_nlink > 1:
            others = target.old.st_nlink - 1
            said.append(f"{others} other hard link(s) to {target.path} keep the old content")
    return said


def _stale(folder: str, stems: set[str]) -> list[str]:
    names: list[str] = []
    with contextlib.suppress(OSError):  # a folder may be writable and not readable, or not there
        names = sorted(os.listdir(folder))
    matches = [match for match in map(_TEMP_NAME.fullmatch, names) if match]
    return [m.group() for m in matches if m.group(1) in stems and not _alive(int(m.group(2)))]


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
