"""Bytes of a checkpoint into the memory of torch storages: each storage once, no second copy.

Knows: torch storages, how they are filled on a CPU and elsewhere. Must not know: pickles, what
tensors look at a storage, formats (but that the safetensors package reads its own).
On the CPU the file is read straight into the storage; for other devices blocks pass through a
small buffer of each reading thread. Files are read one at a time, in the order of their bytes,
by a few threads; recorded checksums are taken of the blocks on their way.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple

import torch  # noqa: TID253 - this room is imported only where torch is asked for

from ckptool.checkpoint import Storage
from ckptool.errors import CkptError, CrcMismatch, HeaderInvalid, StorageSize
from ckptool.formats import identify
from ckptool.pieces import encoding_of, is_pieced, is_plain, made_from
from ckptool.places import BytesSource, Source, changed, is_url, reopen
from ckptool.sources import Sources
from ckptool.spans import Address
from ckptool.values.storages import CHUNK, decode

BLOCK = 1 << 20
"""Bytes read at a time: they are still in a processor's cache when their checksum is taken."""
PART = 32 << 20
"""What one thread reads of a storage of more than twice this."""
FEW = 8 << 20
"""Bytes in all below which threads cost more than they save."""
WINDOW = 64 << 20
"""Bytes of a .safetensors file that its package maps before they are let go again."""
THREADS = min(4, os.cpu_count() or 1)
META = torch.device("meta")
_AGAIN = "download or copy it again, or skip the check with check=False"

Place = Callable[[Storage], torch.device]
Inline = Callable[[Storage], bytes]


class Files:
    """The files of a checkpoint: one that is open already, or several, opened one by one; `packed`
    says whether they may be .safetensors, each a file of its own.
    """

    def __init__(
        self, addresses: Sequence[Address], source: Source | None, packed: bool = True
    ) -> None:
        self._addresses = addresses
        self._source = source
        self.packed = packed
        self.sharded = source is None

    @contextmanager
    def opened(self, source_id: int) -> Iterator[Source]:
        """The file with this id. Raises InputChanged when it is not what it was."""
        if self._source is None:
            with reopen(self._addresses[source_id]) as source:
                yield source
                self._see(source)
        else:
            yield self._source
            self._see(self._source)

    @contextmanager
    def all(self) -> Iterator[Sources]:
        """All files, to be read in any order. Raises InputChanged as `opened`."""
        with Sources(self._addresses, self._source) as files:
            yield files
            files.check_unchanged()

    def _see(self, source: Source) -> None:
        if not source.unchanged():
            raise changed(source.name)


def _has_package(source: Source) -> bool:
    """Whether the safetensors package can read it: it opens paths only."""
    path = source.address.uri
    return bool(path) and not is_url(path) and identify(source).name == "safetensors"


class _Job(NamedTuple):
    storage: Storage
    made: torch.UntypedStorage
    label: str


class Memory:
    """The storages of a checkpoint as torch storages: allocated when asked for, filled by `read`.

    `storages` are all of the file; `place` says where each goes, `labels` what errors call it
    (by its key), `inline` gives the bytes of one that has no span in a file.
    """

    def __init__(
        self,
        storages: Iterable[Storage],
        files: Files,
        place: Place,
        *,
        check: bool = True,
        inline: Inline | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._storages = {storage.key: storage for storage in storages}
        self._files = files
        self._place = place
        self._check = check
        self._inline = inline
        self._labels = labels or {}
        self._made: dict[str, torch.UntypedStorage] = {}
        self._unread: list[_Job] = []

    def storage(self, storage: Storage) -> torch.UntypedStorage:
        """Its memory, unread until `read`. Raises CkptError where the device has no room."""
        made = self._made.get(storage.key)
        if made is None:
            storage = self._storages.get(storage.key, storage)
            empty = storage.device == "meta" and not storage.pieces
            device = META if empty else self._place(storage)
            label = self._labels.get(storage.key, "")
            made = self._made[storage.key] = _allocated(storage, device, label)
            if device.type != "meta" and storage.size_bytes:
                self._unread.append(_Job(storage, made, label))
        return made

    def read(self) -> None:
        """Fill all that is unread. Raises CrcMismatch, Truncated, StorageSize, InputChanged."""
        jobs, self._unread = self._unread, []
        placed = [job for job in jobs if job.storage.pieces]
        for job in jobs:
            if not job.storage.pieces:
                _fill_inline(job, self._inline)
        with self._files.all() as files:
            _Joining(files, self._check).fill([job for job in placed if is_pieced(job.storage)])
        placed = [job for job in placed if not is_pieced(job.storage)]
        placed.sort(key=_position)
        for source_id, group in groupby(placed, key=lambda job: _position(job)[0]):
            with self._files.opened(source_id) as source:
                if self._files.packed and _has_package(source):
                    _fill_by_package(list(group), source, self._files.sharded)
                else:
                    _Filling(source, self._check).fill(list(group))


def _position(job: _Job) -> tuple[int, int]:
    piece = job.storage.pieces[0]
    return piece.source_id, piece.span.offset


def _allocated(storage: Storage, device: torch.device, label: str) -> torch.UntypedStorage:
    try:
        return torch.UntypedStorage(storage.size_bytes, device=device)  # type: ignore[no-untyped-call]
    except (RuntimeError, MemoryError, TypeError) as error:  # TypeError: beyond 64 bits
        text = f"no room for {storage.size_bytes:,} bytes on {device}: {_first_line(error)}"
        raise CkptError(text, key=label or None, slug="no-memory") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage as one row of bytes: the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _fill_inline(job: _Job, inline: Inline | None) -> None:
    data = inline(job.storage) if inline is not None else b""
    if len(data) != job.storage.size_bytes:
        text = f"{job.storage.size_bytes:,} bytes are needed, there are {len(data):,}"
        raise StorageSize(text, key=job.label or None)
    as_bytes(job.made).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


# -- .safetensors ------------------------------------------------------------------------------
def _fill_by_package(jobs: Sequence[_Job], source: Source, sharded: bool) -> None:
    """Through safetensors, copied out of its mapping: a mapped file that is cut kills whoever
    reads it. The file is mapped anew now and then, so that little of it counts as memory.
    """
    from safetensors import SafetensorError, safe_open

    left = list(jobs)
    try:
        while left:
            taken = size = 0
            with safe_open(source.address.uri, framework="pt", device="cpu") as file:
                while taken < len(left) and size < WINDOW:
                    key = left[taken].storage.key  # of a shard it begins with its number
                    name = key.partition("/")[2] if sharded else key
                    _take_packed(left[taken], file.get_tensor(name))
                    size += left[taken].storage.size_bytes
                    taken += 1
            del left[:taken]
    except SafetensorError as error:
        text = f"the safetensors package refuses it: {_first_line(error)}"
        raise HeaderInvalid(text, path=source.name) from error


def _take_packed(job: _Job, tensor: torch.Tensor) -> None:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    if raw.numel() != job.storage.size_bytes:
        text = f"{job.storage.size_bytes:,} bytes are needed, the package reads {raw.numel():,}"
        raise StorageSize(text, key=job.label or None)
    as_bytes(job.made).copy_(raw)


# -- everything else ---------------------------------------------------------------------------
class _Filling:
    """Reading storages of one file by a few threads."""

    def __init__(self, source: Source, check: bool) -> None:
        self._source = source
        self._check = check
        self._own = threading.local()
        self._stopped = False

    def fill(self, jobs: Sequence[_Job]) -> None:
        """Fill them all; the first error of any thread ends it."""
        self._source.will_read(job.storage.pieces[0].span for job in jobs)
        if THREADS < 2 or sum(job.storage.size_bytes for job in jobs) < FEW:
            for job in jobs:
                self._whole(job)
            return
        with ThreadPoolExecutor(THREADS, "ckptool-read") as pool:
            try:
                for finish in [self._submit(pool, batch) for batch in _batches(jobs)]:
                    finish()
            except BaseException:
                self._stopped = True
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _submit(self, pool: ThreadPoolExecutor, batch: Sequence[_Job]) -> Callable[[], object]:
        """Have a batch read; what is returned waits for its end. A large storage is read in
        parts, and this thread takes its checksum.
        """
        job = batch[0]
        size = job.storage.size_bytes
        if size <= 2 * PART or job.made.device.type != "cpu" or not is_plain(job.storage):
            return pool.submit(self._several, batch).result
        view = as_bytes(job.made).numpy().data
        parts = [view[at : at + PART] for at in range(0, size, PART)]
        start = job.storage.pieces[0].span.offset
        tasks = [pool.submit(self._part, start + at * PART, part) for at, part in enumerate(parts)]

        def finish() -> None:
            total = 0
            for task, part in zip(tasks, parts, strict=True):
                task.result()
                total = zlib.crc32(part, total) if self._wanted(job.storage) else 0
            self._compare(job, total)

        return finish

    def _part(self, offset: int, part: memoryview) -> None:
        for at in range(0, len(part), BLOCK):
            if not self._stopped:
                self._source.read_into(offset + at, part[at : at + BLOCK])

    def _several(self, batch: Sequence[_Job]) -> None:
        for job in batch:
            self._whole(job)

    def _whole(self, job: _Job) -> None:
        """One storage, block by block."""
        storage, target = job.storage, self._target(job.made)
        if not is_plain(storage):
            at = 0
            for chunk in self._decoded(job):
                target.block(at, len(chunk))[:] = chunk
                target.put(at, len(chunk))
                at += len(chunk)
            return
        total, offset = 0, storage.pieces[0].span.offset
        wanted = self._wanted(storage)
        for at in range(0, storage.size_bytes, BLOCK):
            if self._stopped:
                return
            block = target.block(at, min(BLOCK, storage.size_bytes - at))
            self._source.read_into(offset + at, block)
            if wanted:
                total = zlib.crc32(block, total)
            target.put(at, len(block))
        self._compare(job, total)

    def _wanted(self, storage: Storage) -> bool:
        return self._check and bool(storage.crc)

    def _compare(self, job: _Job, total: int) -> None:
        if self._wanted(job.storage) and total != job.storage.crc:
            what = f"bytes of '{job.label}'" if job.label else "bytes"
            text = f"{what} do not have their recorded checksum"
            raise CrcMismatch(text, path=self._source.name, hint=_AGAIN)

    def _decoded(self, job: _Job) -> Iterator[bytes]:
        """The blocks of a storage that is deflated, swapped, or spelled as text."""
        storage = job.storage
        unit = storage.dtype.size_bytes // storage.dtype.components
        crc = storage.crc if self._check else None
        args = (encoding_of(storage, job.label), unit, storage.size_bytes, crc)
        size, label = storage.size_bytes, job.label
        made = made_from(storage, "decode", args, size, None, label, self._check)
        try:
            yield from decode(self._read, made)
        except CkptError as error:
            error.path = error.path or self._source.name
            error.hint = _AGAIN if isinstance(error, CrcMismatch) else error.hint
            raise

    def _read(self, source_id: int, offset: int, size: int) -> bytes:
        return self._source.read(offset, size)

    def _target(self, made: torch.UntypedStorage) -> _Straight | _Through:
        if made.device.type == "cpu" and not THROUGH_BUFFER:
            return _Straight(made)
        buffer = getattr(self._own, "buffer", None)
        if buffer is None:
            buffer = self._own.buffer = _buffer(made.device)
        return _Through(made, buffer)


class _Joining(_Filling):
    """Storages that lie in several pieces, of several files perhaps: one after another."""

    def __init__(self, files: Sources, check: bool) -> None:
        super().__init__(BytesSource(b"", ""), check)
        self._files = files

    def fill(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            self._whole(job)

    def _read(self, source_id: int, offset: int, size: int) -> bytes:
        return self._files.read(source_id, offset, size)


THROUGH_BUFFER = False
"""Tests set this to send storages of a CPU the way of those of a GPU."""


def _batches(jobs: Sequence[_Job]) -> Iterator[list[_Job]]:
    """Small storages together, so that a thread has something to do."""
    batch: list[_Job] = []
    size = 0
    for job in jobs:
        if batch and size + job.storage.size_bytes > PART:
            yield batch
            batch, size = [], 0
        batch.append(job)
        size += job.storage.size_bytes
    if batch:
        yield batch


def _buffer(device: torch.device) -> torch.Tensor:
    """A block on the CPU, pinned where that makes copies to the device faster."""
    size = max(BLOCK, CHUNK)
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    except RuntimeError:  # no room that can be pinned
        return torch.empty(size, dtype=torch.uint8)


class _Straight:
    """A storage on the CPU: blocks are its own memory."""

    def __init__(self, made: torch.UntypedStorage) -> None:
        self._view = as_bytes(made).numpy().data

    def block(self, at: int, size: int) -> memoryview:
        return self._view[at : at + size]

    def put(self, at: int, size: int) -> None:
        """It is there already."""


class _Through:
    """A storage elsewhere: blocks are a buffer's memory, copied when they are full."""

    def __init__(self, made: torch.UntypedStorage, buffer: torch.Tensor) -> None:
        self._bytes = as_bytes(made)
        self._buffer = buffer
        self._view = buffer.numpy().data

    def block(self, at: int, size: int) -> memoryview:
        return self._view[:size]

    def put(self, at: int, size: int) -> None:
        self._bytes[at : at + size].copy_(self._buffer[:size])
