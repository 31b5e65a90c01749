"""Which files are meant, where many are: folders, globs, lists of names, prefixes in a store.

Knows: which names look like checkpoints, what stands for several files. Must not know: what is in
them, printing. Folders are walked in the order of their names; hidden ones and links to folders
are left alone, so that no loop and no way out of the folder exists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from typing import NamedTuple

from ckptool.errors import CkptError, LimitExceeded, SpecialFile, Unsupported
from ckptool.formats import FORMATS
from ckptool.formats.folders import INDEXES
from ckptool.places import Folder, is_folder, is_url

SUFFIXES = tuple(sorted({suffix for row in FORMATS for suffix in row.suffixes} | {".pt2"}))
"""What -r takes, by the end of the name in any case."""
LISTERS: dict[str, str] = {}
"""Scheme of a URL -> `module:function`, called as `files_below` for what lies under a prefix."""
_NO_WEIGHTS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")  # sentencepiece's own
_WHOLE: tuple[Callable[[Sequence[str]], bool], ...] = (
    lambda names: ".metadata" in names or any(name.endswith(".distcp") for name in names),
)
"""Asked of the names in a folder: whether it is one checkpoint (DCP), read as a folder."""
_LIST_BYTES = 256 << 20
_MAGIC = re.compile(r"[*?]|\[.+\]", re.DOTALL)  # an unclosed bracket is a bracket


class Place(NamedTuple):
    """One thing to look at; `error`, where it is known already that this will not do."""

    path: str
    error: CkptError | None = None


@dataclass(slots=True)
class Skipped:
    """What was passed over: files not called like a checkpoint, links to folders."""

    files: int = 0
    links: int = 0


def scheme_of(place: str) -> str:
    """`s3` of `s3://bucket/key`; empty for a path."""
    return place.partition("://")[0].lower() if is_url(place) else ""


def is_glob(word: str) -> bool:
    """Whether it is a pattern, and not the name of something that is there."""
    return bool(_MAGIC.search(word)) and not scheme_of(word) and not os.path.lexists(word)


def gather(words: Iterable[str], recursive: bool, skipped: Skipped) -> Iterator[Place]:
    """The places that words stand for, in their order; folders are walked when `recursive`, else
    each is one checkpoint. What cannot be listed comes out with its error.
    """
    for word in words:
        yield from _gathered(word, recursive, skipped)


def _gathered(word: str, recursive: bool, skipped: Skipped) -> Iterator[Place]:
    try:
        if recursive and (scheme_of(word) or is_folder(word)):
            yield from files_below(word, skipped)
        elif is_glob(word):
            yield from _matching(word, recursive, skipped)
        else:
            yield Place(word)
    except CkptError as error:
        error.path = error.path or word
        yield Place(word, error)


def files_below(place: str, skipped: Skipped) -> Iterator[Place]:
    """What looks like a checkpoint in a folder and the folders in it, by name: files by their
    suffix, a folder of shards once, by its index. For a URL the lister of its scheme.

    Raises Unsupported for a scheme that cannot be listed, SpecialFile for no folder.
    """
    scheme = scheme_of(place)
    if not scheme:
        yield from _walk(Folder(place).path, skipped)
        return
    if scheme not in LISTERS:
        raise Unsupported(
            f"what lies under a {scheme}:// address cannot be listed",
            path=place,
            hint="give the files themselves, with --files-from",
        )
    module, _, function = LISTERS[scheme].partition(":")
    yield from getattr(import_module(module), function)(place, skipped)


def names_in(data: bytes) -> list[str]:
    """The paths in a list: NUL between them where there is one in it, else one a line."""
    if len(data) > _LIST_BYTES:
        raise LimitExceeded("list-bytes", f"a list of more than {_LIST_BYTES:,} bytes")
    end = b"\0" if b"\0" in data else b"\n"
    return [os.fsdecode(name) for name in data.split(end) if name]


def read_list(path: str) -> bytes:
    """The bytes of a list of names. Raises SpecialFile."""
    try:
        with open(path, "rb") as file:
            return file.read(_LIST_BYTES + 1)
    except (OSError, ValueError) as error:
        text = getattr(error, "strerror", None) or str(error)
        raise SpecialFile(f"the list cannot be read: {text}", path=path) from error


# -- folders -----------------------------------------------------------------------------------
class _Listing(NamedTuple):
    """One folder: its files (links to files too), and the folders to go into."""

    files: list[str]
    folders: list[str]


def _walk(folder: str, skipped: Skipped) -> Iterator[Place]:
    waiting = [folder]
    while waiting:
        path = waiting.pop()
        try:
            found = _listing(path, skipped)
        except OSError as error:
            text = f"the folder cannot be listed: {error.strerror or error}"
            yield Place(path, SpecialFile(text, path=path, hint="ask its owner for permission"))
            continue
        if any(judge(found.files) for judge in _WHOLE):
            yield Place(path)
            continue
        yield from _chosen(path, found.files, skipped)
        waiting += [os.path.join(path, name) for name in reversed(found.folders)]


def _listing(path: str, skipped: Skipped) -> _Listing:
    files, folders = [], []
    with os.scandir(path) as entries:
        for entry in entries:
            name = entry.name
            if entry.is_dir(follow_symlinks=False):
                if not name.startswith("."):
                    folders.append(name)
            elif entry.is_file() or _is_broken(entry):
                files.append(name)
            elif entry.is_symlink():
                skipped.links += 1
            else:
                skipped.files += 1
    return _Listing(sorted(files), sorted(folders))


def _is_broken(entry: os.DirEntry[str]) -> bool:
    """A link to nothing is taken: that its file is missing is worth a line."""
    return entry.is_symlink() and not os.path.exists(entry.path)


def _chosen(folder: str, names: list[str], skipped: Skipped) -> Iterator[Place]:
    indexes = [name for name in names if name.endswith(INDEXES) and not name.startswith(".")]
    inside = {shard for index in indexes for shard in _shards(folder, index)}
    for name in names:
        if name in indexes or (name not in inside and _is_wanted(name)):
            yield Place(os.path.join(folder, name))
        elif name not in inside:
            skipped.files += 1


def _is_wanted(name: str) -> bool:
    lower = name.lower()
    return lower.endswith(SUFFIXES) and not name.startswith(".") and lower not in _NO_WEIGHTS


def _shards(folder: str, index: str) -> tuple[str, ...]:
    """The files that an index stands for; none where it cannot be read: that is told when the
    index itself is looked at.
    """
    from ckptool.formats.hf_index import read_index

    try:
        return read_index(Folder(folder), index).shards
    except CkptError:
        return ()


# -- globs -------------------------------------------------------------------------------------
def _matching(pattern: str, recursive: bool, skipped: Skipped) -> Iterator[Place]:
    """The paths a pattern matches: `*`, `?` and `[…]` within a name, `**` across folders.

    Raises SpecialFile when there are none.
    """
    drive, rest = os.path.splitdrive(pattern)
    root = drive + os.sep if rest.startswith(("/", os.sep)) else drive
    parts = [part for part in re.split(r"[/\\]" if os.sep == "\\" else "/", rest) if part]
    paths = dict.fromkeys(_expanded(root, parts))
    if not paths:
        raise SpecialFile("no file matches", path=pattern, hint="check the pattern")
    for path in paths:
        if recursive and is_folder(path):
            yield from files_below(path, skipped)
        else:
            yield Place(path)


def _expanded(folder: str, parts: Sequence[str]) -> Iterator[str]:
    if not parts:
        yield folder
        return
    first, rest = parts[0], parts[1:]
    if first == "**":
        yield from _expanded(folder, rest or ["*"])
        for name in _named(folder, "*"):
            path = os.path.join(folder, name)
            if os.path.isdir(path) and not os.path.islink(path):
                yield from _expanded(path, parts)
    elif _MAGIC.search(first):
        for name in _named(folder, first):
            path = os.path.join(folder, name)
            if not rest or os.path.isdir(path):
                yield from _expanded(path, rest)
    elif os.path.lexists(os.path.join(folder, first)):
        yield from _expanded(os.path.join(folder, first), rest)


def _named(folder: str, pattern: str) -> list[str]:
    """Names in a folder that match; hidden ones only by a pattern that begins with a dot."""
    try:
        names = sorted(os.listdir(folder or os.curdir))
    except OSError:  # no folder, or not ours to read: nothing matches in it
        return []
    hidden = pattern.startswith(".")
    return [n for n in names if fnmatchcase(n, pattern) and (hidden or not n.startswith("."))]
