"""Spans of bytes, and where files can be found again.

Knows: offsets and sizes. Must not know: files, formats, plans.
"""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """`size` bytes from byte `offset` of some file."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        """The first byte after the span."""
        return self.offset + self.size

    def within(self, outer: Span) -> Span:
        """This span, counted from the start of `outer`, in the coordinates of `outer`'s file."""
        return Span(outer.offset + self.offset, self.size)


class Address(NamedTuple):
    """Where a source can be opened again, and how to know that it is still the same bytes."""

    uri: str
    size_bytes: int
    identity: tuple[int | str, ...] = ()
