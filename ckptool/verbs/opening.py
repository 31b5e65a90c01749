"""Opening a file to look at it, also while an in-place edit of it is unfinished.

Knows: what a journal beside a file means for a reader. Must not know: formats, printing.
"""

from __future__ import annotations

from ckptool.checkpoint import Note
from ckptool.commands import convert_command
from ckptool.journals import Pending, pending
from ckptool.places import PlaceLike, Source, open_source
from ckptool.spans import Span

_SLUG = "pending-journal"


def open_place(place: PlaceLike) -> tuple[Source, tuple[Note, ...]]:
    """The source to read, and what there is to say about it: a file beside which a journal
    lies that agrees with it is read up to its former end. Nothing is written.

    Raises what `open_source` raises.
    """
    source = open_source(place)
    try:
        found = pending(source) if source.address.uri else None
        if found is None:
            return source, ()
        return _former(source, found), (_note(source.name, found),)
    except BaseException:
        source.close()
        raise


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
