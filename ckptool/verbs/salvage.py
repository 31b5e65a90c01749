"""Salvage: what is whole of a damaged file, opened so that it can be converted like any other.

Knows: that a storage is lost when its bytes are not there or have not their checksum.
Must not know: containers' insides, printing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ckptool.checkpoint import Checkpoint, Note
from ckptool.errors import CkptError, LimitExceeded
from ckptool.formats import read
from ckptool.formats.assemble import PickleHandle
from ckptool.formats.audit import Member, members_of, piece_members, storage_members
from ckptool.formats.folders import Held, read_folder
from ckptool.formats.salvage import refuse_layout, remains, remains_of_folder
from ckptool.formats.salvage_parts import Kept, without
from ckptool.limits import DEFAULT, Limits
from ckptool.places import Folder, PlaceLike, Source, reopen
from ckptool.verbs.deciding import Decision
from ckptool.verbs.opening import open_place
from ckptool.verbs.reading import meant
from ckptool.verbs.request import ONE_TABLE
from ckptool.verbs.verify_sums import Progress, checksums

WITH_IT = "left out as a whole, since tensors of it are lost"
WRONG = "its bytes do not have their recorded checksum"


class Rescue(NamedTuple):
    """A file as far as it can be read: `error` is why a strict reading refuses it (None: it does
    not), `lost` says of storages what became of them, `absent` of keys that nothing else is known
    of, `records` names damaged records that are no storages.
    """

    checkpoint: Checkpoint
    lost: dict[str, str]
    error: CkptError | None = None
    records: tuple[str, ...] = ()
    absent: Mapping[str, str] = {}


def rescue(source: Source, limits: Limits = DEFAULT, progress: Progress | None = None) -> Rescue:
    """Read a file in spite of damage, every recorded checksum compared.

    Raises the error of the strict reading when nothing can be told in spite of it.
    """
    try:
        checkpoint = read(source, limits)
    except CkptError as error:
        return after_refusal(source, limits, error, progress)
    lost: dict[str, str] = {}
    records: list[str] = []
    for member, why in _wrong(source, members_of(checkpoint), progress):
        if member.storage is None:
            records.append(member.name)
        else:
            lost[member.storage] = why
    return Rescue(checkpoint, lost, None, tuple(records))


def after_refusal(
    source: Source, limits: Limits, error: CkptError, progress: Progress | None = None
) -> Rescue:
    """What is whole of a file that a strict reading refuses. Raises `error` when that is unknown, or
    when the file asks for too much, which no damage explains.
    """
    if isinstance(error, LimitExceeded):
        raise error
    try:
        left = remains(source, limits)
    except CkptError:
        raise error from None
    rows = _wrong(source, storage_members(left.checkpoint), progress)
    lost = left.lost | {member.storage or "": why for member, why in rows}
    return Rescue(left.checkpoint, lost, error)


def _wrong(
    source: Source, members: Sequence[Member], progress: Progress | None = None
) -> Iterator[tuple[Member, str]]:
    """Records that do not have their recorded checksum, and why."""
    for member, found in zip(members, checksums(source, members, progress), strict=True):
        if member.crc is not None and (found.problem or found.crc != member.crc):
            yield member, found.problem.text if found.problem else WRONG


def rescue_folder(folder: Folder, held: Held, limits: Limits = DEFAULT) -> Rescue:
    """The same of a folder that is read as a whole. Raises also Unsupported for a layout of which
    nothing can be told.
    """
    refuse_layout(held)
    try:
        checkpoint = read_folder(folder, limits, held)
    except CkptError as error:
        return folder_after_refusal(folder, held, limits, error)
    return Rescue(checkpoint, _wrong_pieces(checkpoint))


def folder_after_refusal(folder: Folder, held: Held, limits: Limits, error: CkptError) -> Rescue:
    """As `after_refusal`, of a folder. Raises also Unsupported as `rescue_folder`."""
    if isinstance(error, LimitExceeded):
        raise error
    refuse_layout(held)
    try:
        left = remains_of_folder(folder, held, limits)
    except CkptError:
        raise error from None
    lost = _wrong_pieces(left.checkpoint) | left.lost
    return Rescue(left.checkpoint, lost, error, absent=left.absent)


def _wrong_pieces(checkpoint: Checkpoint) -> dict[str, str]:
    """Storages of which a piece does not have its recorded checksum."""
    lost: dict[str, str] = {}
    for number, members in piece_members(checkpoint).items():
        with reopen(checkpoint.sources[number]) as source:
            lost |= {member.storage or "": why for member, why in _wrong(source, members)}
    return lost


class Salvaged(NamedTuple):
    """What `convert --salvage` starts from: as `reading.Opened`, with what is left out of it."""

    checkpoint: Checkpoint
    source: Source | None
    kept: Kept
    absent: Mapping[str, str] = {}

    @property
    def lost(self) -> tuple[tuple[str, str], ...]:
        """(name, what became of it) of tensors, and of entries that go as a whole with them."""
        entries = ((name, WITH_IT) for name in sorted(self.kept.entries))
        return (*self.absent.items(), *self.kept.gone, *entries)

    def without_lost(self, decision: Decision, target: str) -> Decision:
        """The same decision, with what is lost cut out. Raises Unsupported where a container that
        keeps the pickle would keep something that is lost.
        """
        changes, kept = decision.changes, self.kept
        pickled = target not in ONE_TABLE and changes.select is None
        if kept.stuck is not None and pickled:
            raise kept.stuck
        entries = changes.entries | kept.entries if pickled else changes.entries
        return decision._replace(
            changes=changes._replace(drops=changes.drops | kept.drops, entries=entries)
        )


@contextmanager
def salvaged(
    place: PlaceLike, limits: Limits = DEFAULT, progress: Progress | None = None
) -> Iterator[Salvaged]:
    """Open a damaged file or folder. Raises CkptError when no tensor of it is whole, naming the file."""
    path = os.fsdecode(place) if isinstance(place, str | bytes | os.PathLike) else None
    asked = None if path is None else meant(path, strict=True)
    notes: tuple[Note, ...] = ()
    if asked is not None:
        folder, held = asked
        if held.is_index:
            yield _ready(rescue_folder(folder, held, limits), None, ())
            return
        place, notes = os.path.join(folder.path, held.name), held.notes
    source, said = open_place(place, strict=True)
    with source:
        yield _ready(rescue(source, limits, progress), source, (*notes, *said))


def _ready(found: Rescue, source: Source | None, said: tuple[Note, ...]) -> Salvaged:
    """Raises CkptError when nothing is left."""
    damaged = found.error is not None or found.lost or found.records
    checkpoint = _apart(found.checkpoint) if damaged else found.checkpoint
    kept = without(checkpoint, found.lost)
    gone = found.lost or found.absent
    if gone and not any(table.tensors for table in kept.checkpoint.tables):
        raise CkptError(
            "no tensor of a state_dict is whole: nothing to write",
            path=found.checkpoint.file, slug="truncated", hint="find another copy",
        )  # fmt: skip
    notes = (*said, *_notes(found, kept), *checkpoint.notes)
    return Salvaged(kept.checkpoint._replace(notes=notes), source, kept, found.absent)


def _apart(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint without its container, whose records are not all to be copied."""
    handle = checkpoint.handle
    if isinstance(handle, PickleHandle):
        handle = handle._replace(container=None)
    return checkpoint._replace(handle=handle, traits=checkpoint.traits | {"salvaged"})


_SLUG = "salvage"
_LISTED = 50


def _notes(found: Rescue, kept: Kept) -> Iterator[Note]:
    """What was wrong, and what is not in the output."""
    if found.error is None and not found.lost and not found.records:
        yield Note(_SLUG, "nothing is damaged as far as the file can tell: all of it is written")
    if found.error is not None:
        yield Note(_SLUG, f"the input is damaged: {found.error.text}")
    for name in found.records:
        yield Note(_SLUG, f"the record '{name}' is damaged and left out; it holds no tensor")
    gone = (*found.absent.items(), *kept.gone)
    for name, why in gone[:_LISTED]:
        yield Note(_SLUG, f"lost: {name} ({why})")
    if len(gone) > _LISTED:
        yield Note(_SLUG, f"lost: and {len(gone) - _LISTED:,} more tensors")
    for name in sorted(kept.entries):
        yield Note(_SLUG, f"'{name}' is {WITH_IT}")
    unproven = _unproven(kept.checkpoint)
    if unproven:
        yield Note(
            _SLUG, f"{unproven:,} storages are as long as they must be; no checksum is recorded"
        )


def _unproven(checkpoint: Checkpoint) -> int:
    return sum(bool(s.pieces) and not s.crc for s in checkpoint.storages)
