"""Folders, and prefixes in a store, walked for what looks like a checkpoint.

Knows: which names look like one, that shards and folders of several files are one each.
Must not know: what is in them, printing. All goes by name; hidden names and links to folders are
left alone, so that no loop and no way out of the folder exists.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckptool.errors import CkptError, SpecialFile
from ckptool.formats import FORMATS
from ckptool.formats.folders import INDEXES, whole_of
from ckptool.places import Folder, is_url
from ckptool.verbs.opening import open_tree

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from ckptool.formats.layouts import Whole

SUFFIXES = tuple(sorted({suffix for row in FORMATS for suffix in row.suffixes} | {".pt2"}))
"""What is taken, by the end of the name in any case."""
_NO_WEIGHTS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")  # sentencepiece's own
_AHEAD = 8
"""Prefixes that are listed before their turn, at one time: each is a journey."""


class Place(NamedTuple):
    """One thing to look at; `error`, where it is known already that this will not do."""

    path: str
    error: CkptError | None = None


class Skipped:
    """What was passed over: files not called like a checkpoint, links to folders."""

    __slots__ = ("files", "links")

    def __init__(self) -> None:
        self.files = 0
        self.links = 0


class Level(NamedTuple):
    """One folder: its files (links to files too) and the folders to go into, by name; how many
    links to folders, and things that are neither, lie beside them.
    """

    folder: Folder
    files: Sequence[str]
    folders: Sequence[str]
    links: int = 0
    others: int = 0


def files_below(folder: Folder, skipped: Skipped) -> Iterator[Place]:
    """What looks like a checkpoint in a folder and the folders in it: files by their suffix, shards
    once, by their index, and once each folder that is one checkpoint. What cannot be listed comes
    out with its error.
    """
    waiting = [(folder.path, False)]
    with _Prefixes(folder) if is_url(folder.path) else _Folders() as levels:
        while waiting:
            path, taken = waiting.pop()
            try:
                level = levels.enter(path)
            except CkptError as error:
                yield Place(path, error)
                continue
            skipped.links += level.links
            skipped.files += level.others
            whole = whole_of(level.folder, level.files, level.folders)
            if whole is not None and not taken:
                yield Place(folder_name(path))
            yield from _chosen(level, whole, skipped)
            waiting += [*_inside(level, whole)][::-1]
            levels.expect([path for path, _ in waiting[-_AHEAD:]])


def level_in(path: str) -> Level:
    """One folder of this machine. Raises SpecialFile."""
    files, folders, links, others = [], [], 0, 0
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                elif entry.is_file() or _is_broken(entry):
                    files.append(entry.name)
                elif entry.is_symlink():
                    links += 1
                else:
                    others += 1
        return Level(Folder(path), sorted(files), sorted(folders), links, others)
    except OSError as error:
        text = f"the folder cannot be listed: {error.strerror or error}"
        raise SpecialFile(text, path=path, hint="ask its owner for permission") from error


def folder_name(path: str) -> str:
    """A prefix ends with a slash: else a dot in its name would make it an object."""
    return f"{path}/" if is_url(path) else path


def joined(folder: str, name: str) -> str:
    """The path, or the URL, of what lies right inside."""
    return f"{folder.rstrip('/')}/{name}" if is_url(folder) else os.path.join(folder, name)


def _is_broken(entry: os.DirEntry[str]) -> bool:
    """A link to nothing is taken: that its file is missing is worth a line."""
    return entry.is_symlink() and not os.path.exists(entry.path)


def _chosen(level: Level, whole: Whole | None, skipped: Skipped) -> Iterator[Place]:
    names = level.files
    indexes = [name for name in names if name.endswith(INDEXES) and not name.startswith(".")]
    inside = {shard for index in indexes for shard in _shards(level.folder, index)}
    if whole is not None:
        inside |= whole.files
    for name in names:
        if name in indexes or (name not in inside and _is_wanted(name)):
            yield Place(joined(level.folder.path, name))
        elif name not in inside:
            skipped.files += 1


def _inside(level: Level, whole: Whole | None) -> Iterator[tuple[str, bool]]:
    """The folders to go into; and whether the checkpoint in one is taken already."""
    for name in level.folders:
        if not name.startswith(".") and (whole is None or name not in whole.folders):
            yield joined(level.folder.path, name), whole is not None and name == whole.tag


def _is_wanted(name: str) -> bool:
    lower = name.lower()
    return lower.endswith(SUFFIXES) and not name.startswith(".") and lower not in _NO_WEIGHTS


def _shards(folder: Folder, index: str) -> tuple[str, ...]:
    """The files that an index stands for; none where it cannot be read: that is told when the
    index itself is looked at.
    """
    from ckptool.formats.hf_index import read_index

    try:
        return read_index(folder, index).shards
    except CkptError:
        return ()


# -- how folders are listed ---------------------------------------------------------------------
class _Folders:
    """One after the other, when their turn comes."""

    def __enter__(self) -> _Folders:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def enter(self, path: str) -> Level:
        """The files and folders in one. Raises CkptError."""
        return level_in(path)

    def expect(self, paths: Sequence[str]) -> None:
        """These come next, the last one first."""


class _Prefixes(_Folders):
    """Those of a store: the next ones are asked for beside what goes on."""

    def __init__(self, first: Folder) -> None:
        self._first = first
        self._coming: dict[str, Future[Level]] = {}
        self._hands: ThreadPoolExecutor | None = None

    def __exit__(self, *_: object) -> None:
        if self._hands is not None:
            self._hands.shutdown(wait=False, cancel_futures=True)

    def enter(self, path: str) -> Level:
        if path == self._first.path:
            return _level_of(self._first)
        coming = self._coming.pop(path, None)
        return _level_at(path) if coming is None else coming.result()

    def expect(self, paths: Sequence[str]) -> None:
        if self._hands is None:
            if len(paths) < 2:
                return
            from concurrent.futures import ThreadPoolExecutor

            self._hands = ThreadPoolExecutor(_AHEAD, "ckptool-list")
        for path in reversed(paths):
            if path not in self._coming:
                self._coming[path] = self._hands.submit(_level_at, path)


def _level_at(url: str) -> Level:
    folder = open_tree(url, known=True)
    assert folder is not None
    return _level_of(folder)


def _level_of(folder: Folder) -> Level:
    return Level(folder, folder.list(), folder.folders())
