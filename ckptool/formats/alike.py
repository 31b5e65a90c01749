"""Files whose pickles are the same bytes, but for numbers like `epoch`: what was found in one is
told of the next, with the next one's own storages and numbers. Clients of one net and copies of one
state_dict are such, by the thousand.

Knows: that what is read of a zip of torch's follows from data.pkl and from where its records lie
(`torch_pickle.Resolver`), and from nothing else. Must not know: zips, verbs.
Only what was read without an error is kept; who meets one is sent the whole way, which tells it.
"""

from __future__ import annotations

from _thread import allocate_lock
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ckptool.checkpoint import Checkpoint, Extra, Storage, Table, Tensor
from ckptool.errors import CkptError
from ckptool.formats.loose import Loose, loose_numbers
from ckptool.formats.measures import on_storage
from ckptool.formats.torch_pickle import Resolver
from ckptool.limits import Limits
from ckptool.pickles.nodes import Walked
from ckptool.places import Source

_KEPT = 8  # pickles
_PICKLE_BYTES = 1 << 18
_FOUND_BYTES = 1 << 20  # about, of what was found in one
_MET = 16  # pickles that were met once, of which nothing is kept yet
_PATIENCE, _SELDOM = 64, 7  # after so many files of which none was known, each 7th is looked at
_ABOUT = 300  # bytes of a Tensor, with its numbers


class Outline(NamedTuple):
    """The handle of a file whose pickle was not walked: `walked` has its protocol and no nodes."""

    walked: Walked


class _Known(NamedTuple):
    """What one pickle of `size` bytes said, whose `parts` are all of it but `loose` numbers.
    `tensors` are its records, each once, the storage of number i being number `storages[i]` of the
    checkpoint's, -1 for none; `all_at` and `tables_at` say which of them stand in
    `Checkpoint.tensors` and in each table.
    """

    limits: Limits
    size: int
    parts: tuple[tuple[int, bytes], ...]
    loose: Loose
    found: Checkpoint
    tensors: tuple[Tensor, ...]
    storages: tuple[int, ...]
    all_at: tuple[int, ...]
    tables_at: tuple[tuple[int, ...], ...]

    def is_of(self, data: bytes, limits: Limits) -> bool:
        """Whether a pickle says the same, but for the loose numbers."""
        if len(data) != self.size or limits is not self.limits:
            return False
        return all(data.startswith(part, at) for at, part in self.parts)


class Alike:
    """The last pickles that came more than once. Threads may share it."""

    def __init__(self) -> None:
        self._known: tuple[_Known, ...] = ()
        self._met: deque[int] = deque(maxlen=_MET)
        self._missed = 0
        self._lock = allocate_lock()

    def takes(self, data: bytes) -> bool:
        """Whether a pickle is small enough to be kept."""
        return len(data) <= _PICKLE_BYTES

    def tell(
        self, source: Source, data: bytes, resolve: Resolver, limits: Limits, traits: frozenset[str]
    ) -> Checkpoint | None:
        """What the whole way would make of `data`; None where that way has to be gone: the pickle
        is new, or a storage is not where it should be.
        """
        known = next((one for one in self._known if one.is_of(data, limits)), None)
        if known is None:
            return None
        try:
            storages = [_located(storage, resolve) for storage in known.found.storages]
            extras = known.found.extras
            if known.loose.numbers:
                with self._lock:  # its nodes are changed
                    extras = known.loose.told(data, extras)
        except CkptError:
            return None
        self._missed = 0
        return _told(known, source, storages, extras, traits)

    def note(self, data: bytes, found: Checkpoint, limits: Limits) -> None:
        """Remember what the whole way made of `data`, from the second time on. Its handle has all
        nodes, and nobody is to read them then.
        """
        self._missed += 1
        if self._missed > _PATIENCE and self._missed % _SELDOM:
            return
        loose = loose_numbers(found.handle.walked, found.extras)
        parts = loose.parts_between(data)
        with self._lock:
            if hash(parts) not in self._met:
                self._met.append(hash(parts))
                return
            known = _known(found, limits, len(data), parts, loose)
            if known is not None:
                self._known = (*self._known[1 - _KEPT :], known)


def _located(storage: Storage, resolve: Resolver) -> Storage:
    key, dtype, count = storage.key, storage.dtype, storage.count
    return Storage(key, dtype, count, storage.device, *resolve(key, dtype, count))


def _told(
    known: _Known,
    source: Source,
    storages: Sequence[Storage],
    extras: tuple[Extra, ...],
    traits: frozenset[str],
) -> Checkpoint:
    """The checkpoint over these storages, in which all else is as it was found."""
    found = known.found
    tensors = [
        tensor if at < 0 else on_storage(tensor, storages[at])
        for tensor, at in zip(known.tensors, known.storages, strict=True)
    ]
    tables = [
        Table(table.path, tuple([tensors[at] for at in rows]), *table[2:])
        for table, rows in zip(found.tables, known.tables_at, strict=True)
    ]
    return Checkpoint(
        source.name, found.format, source.size, (source.address,), tuple(tables), found.weights,
        tuple([tensors[at] for at in known.all_at]), tuple(storages), extras, found.globals, found.notes,
        found.handle, traits,
    )  # fmt: skip


def _known(
    found: Checkpoint,
    limits: Limits,
    size: int,
    parts: tuple[tuple[int, bytes], ...],
    loose: Loose,
) -> _Known | None:
    """What to keep; None for what is large, or holds a storage that the file does not list."""
    places = {id(storage): at for at, storage in enumerate(found.storages)}
    groups = [found.tensors, *(table.tensors for table in found.tables)]
    each = list({id(tensor): tensor for group in groups for tensor in group}.values())
    if any(tensor.storage is not None and id(tensor.storage) not in places for tensor in each):
        return None
    if _about_bytes(found, each) > _FOUND_BYTES:
        return None
    number = {id(tensor): at for at, tensor in enumerate(each)}
    all_at, *tables_at = [tuple([number[id(tensor)] for tensor in group]) for group in groups]
    storages = tuple([-1 if t.storage is None else places[id(t.storage)] for t in each])
    walked = Walked(b"", 0)
    walked.protocol = found.handle.walked.protocol
    found = found._replace(handle=Outline(walked))
    return _Known(
        limits, size, parts, loose, found, tuple(each), storages, all_at, tuple(tables_at)
    )


def _about_bytes(found: Checkpoint, tensors: Sequence[Tensor]) -> int:
    rest = (found.extras, found.globals, found.notes, [(t.path, *t[2:]) for t in found.tables])
    names = sum(len(t.key) + 8 * (len(t.path) + 8 * len(t.shape or ())) for t in tensors)
    return len(repr(rest)) + names + _ABOUT * (len(tensors) + len(found.storages))
