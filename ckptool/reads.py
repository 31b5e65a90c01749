"""Bytes that can be read at any offset, wherever they lie.

Knows: bounds, short reads, windows. Must not know: files, networks, formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

from ckptool.errors import CkptError, InputChanged, Truncated
from ckptool.spans import Address, Span


class Doubted(Exception):
    """A check that was put off has failed, or gives something else than was computed meanwhile:
    what was made of the source is void. Whoever put it off begins again, checking first.
    """


class Source:
    """Bytes that can be read at any offset; `size` in bytes, `name` is what errors call it.

    Thread-safe. Subclasses give `_fetch`.
    """

    far = False
    """Whether a read costs a journey: what can be computed from a directory is then not read."""

    patient = False
    """Whether checks of it may be put off: whoever reads it calls `settle` before that counts."""

    def __init__(self, name: str, size: int, address: Address) -> None:
        self.name = name
        self.size = size
        self.address = address

    def _fetch(self, offset: int, size: int) -> bytes:
        """At most `size` bytes from `offset`; empty only at the end."""
        raise NotImplementedError

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from byte `offset`.

        Raises Truncated outside of the source or when the file became shorter, CkptError
        when the device fails.
        """
        self._check(offset, size)
        data = self._fetched(offset, size)
        if len(data) == size:
            return data
        pieces = [data]
        have = len(data)
        while have < size:
            pieces.append(self._fetched(offset + have, size - have))
            have += len(pieces[-1])
        return b"".join(pieces)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset`. Raises as `read`."""
        buffer[:] = self.read(offset, len(buffer))

    def near(self, span: Span) -> bool:
        """Whether these bytes can be had without a journey of their own."""
        return True

    def expect(self, spans: Iterable[Span]) -> None:
        """Say which short spans will be read soon: they may be fetched together. Not looked at
        where reading costs nothing.
        """

    def will_read(self, spans: Iterable[Span]) -> None:
        """Say which spans will be read from now on, in about this order: only these are fetched
        before they are asked for. Not looked at where reading costs nothing.
        """

    def put_off(self, spans: Iterable[Span], check: Callable[[], bool]) -> None:
        """Have `check`, which needs these short spans, run in `settle`: they are kept when they
        pass. Only of a source that is `patient`.
        """
        raise NotImplementedError

    def watch(self, spans: Sequence[Span], check: Callable[[int], object]) -> None:
        """Have `check(number)` run before bytes of `spans[number]` are given for the first time; spans
        do not overlap. Only of a source that is `far`: what was computed of others was compared.
        """

    def settle(self) -> None:
        """Run what was put off. Raises Doubted, or that the spans cannot be read."""

    def again(self, address: Address) -> Source | None:
        """Another source of the same bytes, whose reads count for what was put off here; None
        where nothing is, or `address` is another's.
        """
        return None

    def window(self, span: Span) -> Source:
        """The bytes of `span` as a Source of their own. Raises Truncated when out of bounds."""
        self._check(span.offset, span.size)
        return _Window(self, span)

    def absolute(self, span: Span) -> Span:
        """A span of this source in the coordinates of the file that lies under it."""
        return span

    def fileno(self) -> int | None:
        """A descriptor the kernel can copy from (in `absolute` coordinates), if there is one."""
        return None

    def unchanged(self) -> bool:
        """Whether the file is still the one that was opened (inode, size, time of change)."""
        return True

    def close(self) -> None:
        """Give the file back; closing twice is fine."""

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise Truncated(
                f"{size:,} bytes from byte {offset:,} are needed, there are {self.size:,} in all",
                path=self.name,
                hint="download or copy it again",
            )

    def _fetched(self, offset: int, size: int) -> bytes:
        try:
            data = self._fetch(offset, size)
        except OSError as error:
            raise self._device_error(error, offset) from error
        if not data and size:
            raise self._shortened(offset)
        return data

    def _device_error(self, error: OSError, offset: int) -> CkptError:
        return CkptError(
            f"reading failed: {error.strerror or error}",
            path=self.name,
            offset=offset,
            hint="the disk or the network failed; copy the file elsewhere and try again",
        )

    def _shortened(self, offset: int) -> Truncated:
        return Truncated(
            "the file became shorter while it was read",
            path=self.name,
            offset=offset,
            hint="wait until whoever writes it has finished",
        )


class BytesSource(Source):
    """A byte string read as a file."""

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(name, len(data), Address("", len(data)))
        self._data = data

    def _fetch(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size]


class _Window(Source):
    """A span of another source. Closing it leaves the other open."""

    def __init__(self, outer: Source, span: Span) -> None:
        super().__init__(outer.name, span.size, outer.address)
        self._outer = outer
        self._span = span
        self.far = outer.far

    def _fetch(self, offset: int, size: int) -> bytes:
        return self._outer.read(self._span.offset + offset, size)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._check(offset, len(buffer))
        self._outer.read_into(self._span.offset + offset, buffer)

    def near(self, span: Span) -> bool:
        return self._outer.near(span.within(self._span))

    def expect(self, spans: Iterable[Span]) -> None:
        self._outer.expect(span.within(self._span) for span in spans)

    def will_read(self, spans: Iterable[Span]) -> None:
        self._outer.will_read(span.within(self._span) for span in spans)

    def watch(self, spans: Sequence[Span], check: Callable[[int], object]) -> None:
        self._outer.watch([span.within(self._span) for span in spans], check)

    def absolute(self, span: Span) -> Span:
        return self._outer.absolute(span.within(self._span))

    def fileno(self) -> int | None:
        return self._outer.fileno()

    def unchanged(self) -> bool:
        return self._outer.unchanged()


class _Whole(Source):
    """A small file that was read at once. Closing it leaves the file open."""

    def __init__(self, file: Source) -> None:
        super().__init__(file.name, file.size, file.address)
        self._data = file.read(0, file.size)
        self.absolute = file.absolute  # type: ignore[method-assign]
        self.fileno = file.fileno  # type: ignore[method-assign]
        self.unchanged = file.unchanged  # type: ignore[method-assign]

    def read(self, offset: int, size: int) -> bytes:
        self._check(offset, size)
        return self._data[offset : offset + size]

    def _fetch(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size]


_SMALL = 1 << 16


def at_once(source: Source) -> Source:
    """For who reads many places of a file one by one: a small one is read at once, and its bytes
    are kept. Raises as `read`.
    """
    return source if source.far or source.size > _SMALL else _Whole(source)


def changed(path: str) -> InputChanged:
    """The error for an input that is not what it was when it was opened."""
    return InputChanged(
        "the file changed while it was read",
        path=path,
        hint="wait until whoever writes it has finished, then run again",
    )
