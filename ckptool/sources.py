"""The files of one checkpoint, the last few of them open: there may be ten thousand.

Knows: addresses, when a file is no longer what it was. Must not know: plans, formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

from ckptool.places import Source, changed, reopen
from ckptool.spans import Address, Span

OPEN = 16
"""Files open at a time: a tensor in many shards is put together from all of them."""

Spans = Callable[[], Iterable[tuple[int, Span]]]
"""Gives the numbers of files, and spans of them."""


class Sources:
    """Reads by number of the file; the file that is `source`, where given, is open already and
    stays so.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        source: Source | None = None,
        opener: Callable[[Address], Source] = reopen,
    ) -> None:
        self._addresses = addresses
        self._source = source
        self._opener = opener
        self._spans: Spans | None = None
        self._known: dict[int, list[Span]] | None = None
        self._open: dict[int, Source] = {}  # the last one used at the end

    def __getitem__(self, source_id: int) -> Source:
        """The open file. Raises as `places.reopen`, InputChanged."""
        if self._source is not None:
            return self._source
        source = self._open.pop(source_id, None)
        if source is None:
            if len(self._open) >= OPEN:
                self.leave(next(iter(self._open)))
            source = self._opener(self._addresses[source_id])
            self._foresee(source_id, source)
        self._open[source_id] = source
        return source

    def will_read(self, spans: Spans) -> None:
        """Say which spans of which files will be read, in this order. It is asked for only when
        a file is opened that lies far away.
        """
        self._spans, self._known = spans, None
        for source_id, source in self._open.items():
            self._foresee(source_id, source)

    def _foresee(self, source_id: int, source: Source) -> None:
        if not source.far or self._spans is None:
            return
        if self._known is None:
            self._known = {}
            for number, span in self._spans():
                self._known.setdefault(number, []).append(span)
        source.will_read(self._known.get(source_id, []))

    def read(self, source_id: int, offset: int, size: int) -> bytes:
        """Exactly `size` bytes. Raises as `places.Source`, InputChanged."""
        return self[source_id].read(offset, size)

    def read_into(self, source_id: int, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`. Raises as `read`."""
        self[source_id].read_into(offset, buffer)

    def leave(self, source_id: int) -> None:
        """Close one. Raises InputChanged when it is not what it was."""
        source = self._open[source_id]
        if not source.unchanged():
            raise changed(source.name)
        del self._open[source_id]
        source.close()

    def check_unchanged(self) -> None:
        """Raise InputChanged when an open file is not what it was."""
        for source in (self._source, *self._open.values()):
            if source is not None and not source.unchanged():
                raise changed(source.name)

    def close(self) -> None:
        """Close what was opened here, as it is."""
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> Sources:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
