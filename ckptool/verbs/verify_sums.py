"""Checksums of the records of a file, taken by as many threads as help.

Knows: how bytes are read fast. Must not know: formats' meanings, what a wrong checksum means.
zlib and the system calls run without Python's lock, so threads do run at once.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from mmap import mmap  # of memory, never of a file
from typing import NamedTuple

from ckptool.errors import CkptError
from ckptool.formats.audit import Member
from ckptool.places import Source
from ckptool.plans import Made
from ckptool.spans import Span
from ckptool.values.inflate import inflate

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

_BLOCK = 1 << 20  # one read; small records that lie near each other are read together
_WORTH_A_THREAD = 16 << 20
_MOST_THREADS = 4
_TICK_SECONDS = 0.1


class Sum(NamedTuple):
    """The CRC-32 of a record's decoded bytes; `problem`, where they could not be had."""

    crc: int
    problem: CkptError | None = None


class _Group(NamedTuple):
    """Records that are read at once (each within `span`), or one large or deflated record."""

    span: Span
    members: tuple[Member, ...]


def checksums(
    source: Source, members: Sequence[Member], progress: Progress | None = None
) -> list[Sum]:
    """The checksum of each record, in their order. A record that cannot be read or inflated has
    a `problem` in its place; nothing is raised for it.
    """
    groups = _grouped(members)
    total = sum(group.span.size for group in groups)
    source.will_read(group.span for group in groups)
    job = _Job(source, groups)
    wanted = min(_MOST_THREADS, os.cpu_count() or 1, total // _WORTH_A_THREAD, len(groups))
    if wanted < 2 and progress is None:
        job.work()
    else:
        _run_threads(job, max(wanted, 1), total, progress)
    if job.bug is not None:
        raise job.bug
    return [job.sums[id(member)] for member in members]


def _run_threads(job: _Job, count: int, total: int, progress: Progress | None) -> None:
    threads = [
        threading.Thread(target=job.work, name="ckptool-verify", daemon=True) for _ in range(count)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_TICK_SECONDS)
                if progress is not None:
                    progress(min(job.done, total), total)
        if progress is not None:
            progress(total, total)
    finally:
        job.stopped = True  # also on Ctrl-C: a thread ends within one block
        for thread in threads:
            thread.join()


def _grouped(members: Sequence[Member]) -> list[_Group]:
    """In file order, so that a disk is read forwards."""
    groups: list[_Group] = []
    near: list[Member] = []
    for member in sorted(members, key=lambda member: member.span):
        if near and (member.deflated or member.span.end - near[0].span.offset > _BLOCK):
            groups.append(_joined(near))
            near = []
        if member.deflated or member.span.size > _BLOCK:
            groups.append(_Group(member.span, (member,)))
        else:
            near.append(member)
    return [*groups, _joined(near)] if near else groups


def _joined(near: Sequence[Member]) -> _Group:
    start = near[0].span.offset
    return _Group(Span(start, max(member.span.end for member in near) - start), tuple(near))


class _Job:
    """The groups still to be summed, shared by threads; `done` counts bytes for a progress bar."""

    def __init__(self, source: Source, groups: Sequence[_Group]) -> None:
        self.source = source
        self.left = deque(groups)
        self.sums: dict[int, Sum] = {}
        self.done = 0
        self.stopped = False
        self.bug: BaseException | None = None

    def work(self) -> None:
        """Sum group after group until none is left."""
        buffer = memoryview(mmap(-1, _BLOCK))  # begins a page: reads elsewhere take up to twice
        try:
            while not self.stopped and (group := self._next()) is not None:
                self._group(group, buffer)
        except BaseException as error:  # raised again by who waits
            self.stopped, self.bug = True, error

    def _next(self) -> _Group | None:
        try:
            return self.left.popleft()
        except IndexError:
            return None

    def _group(self, group: _Group, buffer: memoryview) -> None:
        first = group.members[0]
        if first.deflated or group.span.size > _BLOCK:
            self.sums[id(first)] = self._large(first, buffer)
            return
        view = buffer[: group.span.size]
        try:
            self.source.read_into(group.span.offset, view)
        except CkptError:  # a bad sector: then each for itself
            for member in group.members:
                self.sums[id(member)] = self._large(member, buffer)
            return
        self.done += group.span.size
        for member in group.members:
            at = member.span.offset - group.span.offset
            self.sums[id(member)] = Sum(zlib.crc32(view[at : at + member.span.size]))

    def _large(self, member: Member, buffer: memoryview) -> Sum:
        try:
            return Sum(self._inflated(member) if member.deflated else self._stored(member, buffer))
        except CkptError as error:
            return Sum(0, error)

    def _stored(self, member: Member, buffer: memoryview) -> int:
        crc = 0
        span = member.span
        for offset in range(span.offset, span.end, _BLOCK):
            if self.stopped:
                break
            view = buffer[: min(_BLOCK, span.end - offset)]
            self.source.read_into(offset, view)
            crc = zlib.crc32(view, crc)
            self.done += len(view)
        return crc

    def _inflated(self, member: Member) -> int:
        made = Made(((0, member.span),), "inflate", (), member.size, None, member.name)
        crc = 0
        for chunk in inflate(lambda _, offset, size: self.source.read(offset, size), made):
            if self.stopped:
                break
            crc = zlib.crc32(chunk, crc)
        self.done += member.span.size
        return crc
