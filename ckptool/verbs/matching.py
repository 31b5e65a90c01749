"""Patterns for paths and for URLs of a store: `*`, `?` and `[…]` within a name, `**` across folders.

Knows: how names are matched, folder by folder: only those are listed that a match can lie in.
Must not know: what looks like a checkpoint, printing. A name that is there is no pattern.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from ckptool.errors import CkptError, SpecialFile
from ckptool.places import is_url
from ckptool.urls import masked
from ckptool.verbs.opening import is_there, open_tree
from ckptool.verbs.walking import folder_name, joined

_MAGIC = re.compile(r"[*?]|\[.+\]", re.DOTALL)  # an unclosed bracket is a bracket
_WEB = ("http", "https")  # there a question mark begins a query
_KEPT = 16
"""Listings of a store that are kept: `**` asks twice, and each is a journey."""


class _Name(NamedTuple):
    """What lies in a folder. A link to a folder is one, and is not gone into by `**`."""

    name: str
    is_folder: bool
    is_link: bool = False


def is_glob(word: str) -> bool:
    """Whether it is a pattern, and not the name of something that is there; also one that no
    answer is to be had about.
    """
    if not is_url(word):
        return bool(_MAGIC.search(word)) and not os.path.lexists(word)
    scheme, key = _split(word)
    if scheme in _WEB or not _MAGIC.search(key):
        return False
    try:
        return not is_there(word)
    except CkptError:  # told when it is listed
        return True


def matching(pattern: str) -> list[str]:
    """The paths a pattern matches, each once; prefixes of a store end with a slash.

    Raises SpecialFile when there are none, for URLs what `open_tree` raises.
    """
    if is_url(pattern):
        key = _split(pattern)[1]
        tree: _Disk = _Store()
        root, parts = pattern.removesuffix(key).rstrip("/"), key.split("/")
    else:
        drive, rest = os.path.splitdrive(pattern)
        root = drive + os.sep if rest.startswith(("/", os.sep)) else drive
        tree, parts = _Disk(), re.split(r"[/\\]" if os.sep == "\\" else "/", rest)
    paths = [*dict.fromkeys(_expanded(tree, root, [part for part in parts if part]))]
    if not paths:
        raise SpecialFile("no file matches", path=masked(pattern), hint="check the pattern")
    return paths


def _split(url: str) -> tuple[str, str]:
    """Scheme and key; the bucket is no part of a pattern."""
    scheme, _, rest = url.partition("://")
    return scheme.lower(), rest.partition("/")[2]


def _expanded(tree: _Disk, folder: str, parts: Sequence[str]) -> Iterator[str]:
    first, rest = parts[0], parts[1:]
    if first == "**":
        yield from _expanded(tree, folder, rest or ["*"])
        for row in _fitting(tree, folder, "*"):
            if row.is_folder and not row.is_link:
                yield from _expanded(tree, joined(folder, row.name), parts)
        return
    found = _fitting(tree, folder, first) if _MAGIC.search(first) else tree.at(folder, first, rest)
    for row in found:
        path = joined(folder, row.name)
        if not rest:
            yield folder_name(path) if row.is_folder else path
        elif row.is_folder:
            yield from _expanded(tree, path, rest)


def _fitting(tree: _Disk, folder: str, pattern: str) -> Iterator[_Name]:
    """Names in a folder that match; hidden ones only by a pattern that begins with a dot."""
    hidden = pattern.startswith(".")
    for row in tree.names(folder):
        if fnmatchcase(row.name, pattern) and (hidden or not row.name.startswith(".")):
            yield row


class _Disk:
    """Folders of this machine."""

    def names(self, folder: str) -> Sequence[_Name]:
        """What lies in a folder, sorted; nothing in what is none, or not ours to read."""
        try:
            with os.scandir(folder or os.curdir) as entries:
                return sorted(_Name(e.name, e.is_dir(), e.is_symlink()) for e in entries)
        except OSError:
            return ()

    def at(self, folder: str, name: str, rest: Sequence[str]) -> Sequence[_Name]:
        """What has this very name, if anything has."""
        path = os.path.join(folder, name)
        return (_Name(name, os.path.isdir(path)),) if os.path.lexists(path) else ()


class _Store(_Disk):
    """Prefixes of a store, where a prefix and an object may have the same name."""

    def __init__(self) -> None:
        self._kept: dict[str, Sequence[_Name]] = {}

    def names(self, folder: str) -> Sequence[_Name]:
        if folder not in self._kept:
            tree = open_tree(folder, known=True)
            assert tree is not None
            rows = [_Name(name, False) for name in tree.list()]
            rows += [_Name(name, True) for name in tree.folders()]
            self._kept[folder] = sorted(rows)
            if len(self._kept) > _KEPT:
                del self._kept[next(iter(self._kept))]
        return self._kept[folder]

    def at(self, folder: str, name: str, rest: Sequence[str]) -> Sequence[_Name]:
        if rest:  # told by what lies in it
            return (_Name(name, True),)
        return [row for row in self.names(folder) if row.name == name]
