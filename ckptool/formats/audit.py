"""What a container can prove of its own bytes: the records with a checksum, and those without.

Knows: which records an open checkpoint has, which storage each of them is. Must not know:
verbs, how a checksum is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckptool.checkpoint import Checkpoint
from ckptool.formats.assemble import PickleHandle
from ckptool.formats.dicts import dict_items
from ckptool.formats.torch_legacy import PROTOCOL_VERSION, Stream
from ckptool.formats.torch_zip import Archive
from ckptool.pickles.nodes import text_of
from ckptool.places import Source
from ckptool.spans import Span
from ckptool.ziplayout import DEFLATED
from ckptool.zips import Entry


class Member(NamedTuple):
    """One record: where its `span` lies in the source, how many bytes it has once decoded, and
    the CRC-32 recorded for them (None: not recorded). `storage` is the key of the storage that
    it is, where it is one.
    """

    name: str
    span: Span
    deflated: bool
    size: int
    crc: int | None
    storage: str | None = None


class Records(NamedTuple):
    """The records of the files of a folder, by the number of the file; `text` says why none has a
    checksum. Which storage of the whole a record is, is not said: it may hold many.
    """

    members: Mapping[int, tuple[Member, ...]]
    text: str = ""

    def records(self, source: Source, number: int) -> tuple[Member, ...]:
        """Those of file `number`."""
        return self.members.get(number, ())


class Listed(NamedTuple):
    """The handle of a folder of ranks: what the screens call it; its records, for verify."""

    title: str
    container: Records


UNPROVABLE = {
    "torch-legacy": "a legacy stream records no checksums",
    "torch-tar": "a tar of torch 0.1 records no checksums",
    "safetensors": "a .safetensors file records no checksums",
    "pickle": "a pickle records no checksums",
}
"""Containers whose bytes nothing in the file vouches for."""


def members_of(checkpoint: Checkpoint) -> tuple[Member, ...]:
    """Every record of an archive in file order; none where the container has no records."""
    archive = archive_of(checkpoint)
    if archive is None:
        return ()
    by_place = {
        piece.span.offset: storage.key
        for storage in checkpoint.storages
        for piece in storage.pieces[:1]
    }
    directory = archive.directory
    skip = len(directory.top) + 1
    rows = [_member(archive, entry, skip, by_place) for entry in directory.entries if entry.size]
    older = enumerate(directory.older, 1)
    rows += [_member(archive, row, skip, {}, f" before edit {n}") for n, row in older]
    return tuple(rows)


def _member(
    archive: Archive, entry: Entry, skip: int, by_place: dict[int, str], later: str = ""
) -> Member:
    span = Span(entry.data_offset, entry.compressed_size)
    key = by_place.get(archive.source.absolute(span).offset)
    deflated = entry.method == DEFLATED
    return Member(entry.name[skip:] + later, span, deflated, entry.size, entry.crc or None, key)


def records_of(checkpoint: Checkpoint, name: str) -> tuple[Member, ...]:
    """The records of one file of a folder, as `name:record`."""
    rows = members_of(checkpoint)
    return tuple([row._replace(name=f"{name}:{row.name}", storage=None) for row in rows])


def storage_members(checkpoint: Checkpoint) -> tuple[Member, ...]:
    """The storages that lie in one piece and have a recorded checksum, as records."""
    return tuple(
        Member(f"data/{s.key}", s.pieces[0].span, "deflated" in s.pieces[0].encoding,
               s.size_bytes, s.crc, s.key)
        for s in checkpoint.storages
        if len(s.pieces) == 1 and s.crc
    )  # fmt: skip


def piece_members(checkpoint: Checkpoint) -> dict[int, list[Member]]:
    """The same of every piece that has a checksum of its own, by the number of its file."""
    found: dict[int, list[Member]] = {}
    for s in checkpoint.storages:
        single = len(s.pieces) == 1
        for piece in s.pieces:
            crc = s.crc if single and s.crc else piece.crc
            size = s.size_bytes if single else piece.span.size
            if crc:
                deflated = "deflated" in piece.encoding
                row = Member(f"data/{s.key}", piece.span, deflated, size, crc, s.key)
                found.setdefault(piece.source_id, []).append(row)
    return found


def archive_of(checkpoint: Checkpoint) -> Archive | None:
    """The zip archive behind a checkpoint; None when it is in another container."""
    handle = checkpoint.handle
    container = handle.container if isinstance(handle, PickleHandle) else handle
    return container if isinstance(container, Archive) else None


_SYSTEM = ("protocol_version", "little_endian", "type_sizes")


def odd_head(checkpoint: Checkpoint) -> str | None:
    """What is odd in the system info of a legacy stream, which no loader reads; None when it is
    as torch writes it (torch/serialization.py, _legacy_save).
    """
    handle = checkpoint.handle
    container = handle.container if isinstance(handle, PickleHandle) else None
    if not isinstance(container, Stream):
        return None
    rows = dict_items(container.pickles[2].root) or []
    found = {text_of(key): value for key, value, *_ in rows}
    sizes = {text_of(key): value for key, value, *_ in dict_items(found.get("type_sizes")) or ()}
    usual = (
        tuple(found) == _SYSTEM
        and found["protocol_version"] == PROTOCOL_VERSION
        and type(found["little_endian"]) is bool
        and sizes.keys() == {"short", "int", "long"}
        and (sizes["short"], sizes["int"]) == (2, 4)
        and sizes["long"] in (4, 8)
    )
    return (
        None
        if usual
        else "the system info of the stream is not as torch writes it; no loader reads it"
    )
