"""Recorded checksums of the records that a joined weight is cut out of, compared before it is used.

Knows: which records hold bytes of storages that have no checksum of their own. Must not know:
printing, formats. A slice of a record cannot be checked alone: the whole of it is read once more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from ckptool.checkpoint import Checkpoint
from ckptool.errors import CrcMismatch
from ckptool.formats.audit import Member
from ckptool.places import reopen
from ckptool.verbs.leaving import JOINED
from ckptool.verbs.verify_sums import checksums

_AGAIN = "copy that file again, or skip the check (--no-check, check=False)"


def check_joined(checkpoint: Checkpoint) -> None:
    """Raise CrcMismatch for the first record that is wrong, and what `places.reopen` raises.
    Nothing is done for a checkpoint whose storages have their own checksums.
    """
    if checkpoint.format not in JOINED:
        return
    for number, members in _relied(checkpoint):
        with reopen(checkpoint.sources[number]) as source:
            for member, found in zip(members, checksums(source, members), strict=True):
                if found.problem is not None:
                    raise found.problem
                if found.crc != member.crc:
                    raise CrcMismatch(
                        "the bytes do not have the checksum that was recorded for them",
                        path=source.name, member=member.name, hint=_AGAIN,
                    )  # fmt: skip


def _relied(checkpoint: Checkpoint) -> Iterator[tuple[int, list[Member]]]:
    """By file, the records with a checksum that reach into a piece of such a storage."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for storage in checkpoint.storages:
        for piece in storage.pieces if storage.crc is None else ():
            row = (piece.span.offset, piece.span.offset + piece.span.size)
            spans.setdefault(piece.source_id, []).append(row)
    for rows in spans.values():
        rows.sort()
    starts = {number: [start for start, _ in rows] for number, rows in spans.items()}
    found: dict[int, list[Member]] = {}
    for number, members in checkpoint.handle.container.members.items():
        for member in members:
            begin, end = member.span.offset, member.span.offset + member.span.size
            at = bisect_right(starts.get(number, []), end - 1)
            if member.crc is not None and at and spans[number][at - 1][1] > begin:
                found.setdefault(number, []).append(member)
    yield from found.items()
