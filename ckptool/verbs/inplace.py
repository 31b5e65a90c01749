"""--in-place, --undo and --recover: a file edited where it lies, and given back.

Knows: when that is refused, what is confirmed before it counts. Must not know: printing, which
changes are made.
"""

from __future__ import annotations

from typing import NamedTuple

from ckptool import inplace
from ckptool.checkpoint import Changes, Checkpoint
from ckptool.errors import CkptError, NothingToDo, OutputError, Unsupported, UsageError
from ckptool.formats import identify, read
from ckptool.formats.rewrite import Rewritten
from ckptool.formats.torch_zip import NAME, open_archive
from ckptool.formats.torch_zip_append import append, confirm_append, refuse_in_place
from ckptool.journals import pending, pending_error
from ckptool.limits import DEFAULT, Limits
from ckptool.places import Source, is_folder, open_source
from ckptool.spans import Span
from ckptool.verbs.reading import names_index
from ckptool.zips import read_directory


class Appended(NamedTuple):
    """What an in-place edit did: sizes in bytes, equal when there was nothing to change;
    `findings` are sentences about the file.
    """

    rewritten: Rewritten
    size_before: int
    size_after: int
    findings: tuple[str, ...] = ()


def stands_for_folder(path: str) -> bool:
    """Whether it is a folder, or the index in one that stands for it: nothing is appended there."""
    return is_folder(path) or names_index(path)


def _refuse_folder(path: str) -> None:
    if stands_for_folder(path):
        text = "a folder is never edited in place: there is nothing to give back"
        raise NothingToDo(text, path=path, hint="name the file that was edited")


def refuse_place(source: Source) -> None:
    """Raise for a file object (UsageError) and while a journal lies beside the file
    (OutputError). Asked before the file is read: an interrupted one cannot be read.
    """
    if not source.address.uri:
        raise UsageError("a file object cannot be edited in place", hint="give a path")
    found = pending(source)
    if found is not None:
        raise pending_error(found.path)
    if source.size != source.address.size_bytes:
        raise Unsupported("only a part of the file was read: it cannot be edited in place")


def refuse(source: Source, checkpoint: Checkpoint) -> None:
    """Raise when this file cannot be edited in place, whatever the changes: UsageError for a
    file object, OutputError while a journal lies beside it, Unsupported for other containers
    and a chain of 8 edits.
    """
    refuse_place(source)
    refuse_in_place(checkpoint)


def plan_append(
    source: Source, checkpoint: Checkpoint, changes: Changes
) -> tuple[bytes, Rewritten]:
    """What `append_changes` would put at the end (a dry run); refuses as it does."""
    refuse(source, checkpoint)
    return append(checkpoint, changes)


def append_changes(
    source: Source, checkpoint: Checkpoint, changes: Changes, *, fsync: bool = True
) -> Appended:
    """Make `changes` in the file that `source` was opened from and `checkpoint` read from.

    What was written is read back before it counts. Raises CkptError; then, and when it is
    interrupted, the file is as it was.
    """
    data, rewritten = plan_append(source, checkpoint, changes)
    if not data:
        return Appended(rewritten, source.size, source.size)

    def confirm() -> None:
        try:
            with open_source(source.address.uri) as written:
                confirm_append(checkpoint, rewritten, written)
        except CkptError as error:
            raise OutputError(
                f"what was written does not read back: {error.text}; it was cut off again",
                hint="check the disk, or write another file with -o OUT",
                slug="output-io",
            ) from error

    findings = inplace.append(source, data, fsync=fsync, confirm=confirm)
    return Appended(rewritten, source.size, source.size + len(data), findings)


def undo(path: str, limits: Limits = DEFAULT, *, fsync: bool = True) -> tuple[int, int]:
    """Cut the last in-place edit off; sizes before and after.

    The file that remains is read whole first, as strictly as any. Raises NothingToDo when the
    file was not edited in place, OutputError, and whatever reading raises.
    """
    _refuse_folder(path)
    with open_source(path) as source:
        try:
            refuse_place(source)
            if identify(source).name != NAME:
                text = "only PyTorch zip files are edited in place: there is nothing to undo"
                raise NothingToDo(text)
            links = open_archive(source, limits).directory.links
            if not links:
                raise NothingToDo("it was not edited in place: there is nothing to undo")
            read(source.window(Span(0, links[-1])), limits)
            inplace.truncate(source, links[-1], fsync=fsync)
        except CkptError as error:
            error.path = error.path or path
            raise
        return source.size, links[-1]


def recover(path: str, limits: Limits = DEFAULT, *, fsync: bool = True) -> tuple[int, int]:
    """Give a file back that an in-place edit was interrupted in; sizes before and after.

    Raises NothingToDo without a journal, OutputError when it does not agree with the file,
    and what `read_directory` raises when the former file would be no archive.
    """
    _refuse_folder(path)

    def check(source: Source, length: int) -> None:
        read_directory(source.window(Span(0, length)), limits)

    return inplace.recover(path, fsync=fsync, check=check)
