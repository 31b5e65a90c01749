"""Which files are meant, where many are: folders, patterns, lists of names, prefixes in a store.

Knows: what of a command line stands for several files, and lists of names. Must not know: how
folders are walked and patterns matched, what is in a file, printing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from ckptool.errors import CkptError, LimitExceeded, SpecialFile
from ckptool.places import Folder, is_folder, is_url
from ckptool.verbs.matching import is_glob, matching
from ckptool.verbs.opening import open_tree
from ckptool.verbs.walking import Place, Skipped, files_below

_LIST_BYTES = 256 << 20


def gather(words: Iterable[str], recursive: bool, skipped: Skipped) -> Iterator[Place]:
    """The places that words stand for, in their order; folders are walked when `recursive`, else
    each is one checkpoint. What cannot be listed comes out with its error.
    """
    for word in words:
        yield from _gathered(word, recursive, skipped)


def _gathered(word: str, recursive: bool, skipped: Skipped) -> Iterator[Place]:
    try:
        paths = matching(word) if is_glob(word) else [word]
    except CkptError as error:
        yield _refused(word, error)
        return
    for path in paths:
        try:
            tree = _tree(path) if recursive else None
        except CkptError as error:
            yield _refused(path, error)
            continue
        if tree is None:
            yield Place(path)
        else:
            yield from files_below(tree, skipped)


def _refused(path: str, error: CkptError) -> Place:
    error.path = error.path or path
    return Place(path, error)


def _tree(path: str) -> Folder | None:
    """The folder to walk; None for a file."""
    if is_url(path):
        return open_tree(path)
    return Folder(path) if is_folder(path) else None


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
