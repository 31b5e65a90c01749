"""Opening a file to look at it, also while an in-place edit of it is unfinished.

Knows: what a journal beside a file means for a reader, which room opens a URL. Must not know:
formats, printing. What opens URLs is imported when the first one comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ckptool import places
from ckptool.checkpoint import Note
from ckptool.commands import convert_command
from ckptool.errors import CkptError, InputChanged, OutputError
from ckptool.journals import Pending, pending
from ckptool.places import Doubted, Folder, PlaceLike, Source, is_url, open_source
from ckptool.places import is_folder as is_local_folder
from ckptool.spans import Span

if TYPE_CHECKING:
    from ckptool.sinks import Sink

_SLUG = "pending-journal"
Found = TypeVar("Found")


def _open_url(url: str) -> Source:
    from ckptool.remote import open_url

    return open_url(url)


places.open_url = _open_url


def doubting(work: Callable[[bool], Found]) -> Found:
    """What `work(True)` gives, which may put checks off; where those fail, `work(False)`, which
    does not: it refuses what lies, in the words for it.
    """
    try:
        return work(True)
    except Doubted:
        return work(False)


def settle_after(source: Source, error: CkptError) -> None:
    """Whether `error` came of something that was believed so far. Raises Doubted."""
    if not isinstance(error, InputChanged | OutputError) and not error.slug.startswith("remote-"):
        source.settle()


def open_place(
    place: PlaceLike, *, strict: bool = False, patient: bool = False
) -> tuple[Source, tuple[Note, ...]]:
    """The source to read, and what there is to say about it: a file beside which a journal
    lies that agrees with it is read up to its former end. Nothing is written. `strict`: check
    also what a distant file is believed in, at the price of a journey for each; `patient`: at the
    end, in `settle`, what passes anyway.

    Raises what `open_source` raises.
    """
    source = open_source(place)
    if strict:
        source.far, source.patient = False, source.far and patient
    try:
        local = source.address.uri and not is_url(source.address.uri)
        found = pending(source) if local else None
        if found is None:
            return source, ()
        return _former(source, found), (_note(source.name, found),)
    except BaseException:
        source.close()
        raise


def is_folder(place: PlaceLike) -> bool:
    """Whether it names a folder, or a prefix in a bucket. Raises what `remote` raises."""
    if isinstance(place, str) and is_url(place):
        from ckptool.remote import open_prefix

        return open_prefix(place) is not None
    return is_local_folder(place)


def open_folder(path: str, *, strict: bool = False) -> Folder:
    """The folder, or prefix; `strict` as for `open_place`. Raises SpecialFile."""
    if not is_url(path):
        return Folder(path)
    from ckptool.remote import open_prefix

    return open_prefix(path, known=True, strict=strict) or Folder(path)


def open_tree(url: str, *, known: bool = False) -> Folder | None:
    """The prefix to walk; None where the URL names one object. Raises what `remote` raises."""
    from ckptool.remote import open_tree

    return open_tree(url, known=known)


def is_there(url: str) -> bool:
    """Whether something has this very name, or may have it. Raises CkptError."""
    from ckptool.remote import is_there

    return is_there(url)


def url_sink(url: str, *, shards: bool, force: bool, beside: dict[str, str] | None) -> Sink:
    """Where outputs go that a URL names. Raises OutputError, CkptError."""
    from ckptool.remote import make_sink

    return make_sink(url, shards=shards, force=force, beside=beside)


def _former(source: Source, found: Pending) -> Source:
    return source if found.reason else _Former(source, found.length)


def _note(file: str, found: Pending) -> Note:
    if found.reason:
        text = f"a journal of an in-place edit beside the file is not obeyed: {found.reason}"
        return Note(_SLUG, text)
    text = "an in-place edit was interrupted: read up to the former end"
    return Note(_SLUG, text, convert_command(file, "--recover"))


class _Former(Source):
    """A file up to its former end; closing this closes the file."""

    def __init__(self, file: Source, size: int) -> None:
        super().__init__(file.name, size, file.address)
        self._file = file
        self._window = file.window(Span(0, size))

    def _fetch(self, offset: int, size: int) -> bytes:
        return self._window.read(offset, size)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._window.read_into(offset, buffer)

    def absolute(self, span: Span) -> Span:
        return self._window.absolute(span)

    def fileno(self) -> int | None:
        return self._window.fileno()

    def unchanged(self) -> bool:
        return self._window.unchanged()

    def close(self) -> None:
        self._file.close()
