"""A folder of torch.distributed.checkpoint (DCP), FSDP's sharded checkpoints among them.

Knows: how `.metadata` and the items become one checkpoint: a pickle is written of it that torch
could have saved, and read as any other. Must not know: verbs. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Iterable
from shlex import quote
from typing import NamedTuple

from ckptool.checkpoint import Checkpoint, Note
from ckptool.commands import convert_command
from ckptool.errors import CkptError, HeaderInvalid, LimitExceeded, SpecialFile, Truncated
from ckptool.formats.assemble import PickleHandle, assemble
from ckptool.formats.collector import paused
from ckptool.formats.dcp_apart import rank_files, read_ranks
from ckptool.formats.dcp_items import Shelf
from ckptool.formats.dcp_metadata import FILE, Index, Item, Key, Metadata, check_tiling, read_index
from ckptool.formats.judge import CODE
from ckptool.formats.nested import Nested
from ckptool.formats.salvaged import WHOLE, Losses, Remains
from ckptool.formats.torch_pickle import TensorReader
from ckptool.formats.wording import some
from ckptool.limits import DEFAULT, Limits
from ckptool.pickles.walk import walk
from ckptool.pickles.write import whole
from ckptool.places import BytesSource, Folder, Source, is_plain_name
from ckptool.spans import Address

NAME = "dcp"
TITLE = "DCP folder"
_AGAIN = "copy the folder again"


class Place(NamedTuple):
    """One item of a file: its key, and which slice of it (0 for an object); `copy`: another rank's
    counts.
    """

    item: Item
    key: Key
    at: int
    copy: bool = False


def read(folder: Folder, limits: Limits = DEFAULT, name: str | None = None) -> Checkpoint:
    """Read `.metadata` (or, where `name` is a rank's, those of all ranks) and the directory of every
    item; no numbers.

    `handle` is a PickleHandle whose container is the `Shelf`. Raises what `read_metadata` raises,
    SpecialFile for missing files, PathEscape for names that lead out of the folder,
    HeaderInvalid where items or slices overlap or are missing.
    """
    with paused():
        return _read(folder, limits, name or FILE, Losses())


def read_remains(folder: Folder, limits: Limits, name: str | None = None) -> Remains:
    """What is whole of a folder that `read` refuses: files and ranks may be missing or cut, items
    damaged. Raises CkptError where the metadata are, and for a folder that is hostile.
    """
    losses = Losses(tolerant=True)
    with paused():
        found = _read(folder, limits, name or FILE, losses)
    return Remains(found, losses.lost)


def _read(folder: Folder, limits: Limits, name: str, losses: Losses) -> Checkpoint:
    strict = not losses.tolerant
    index = read_index(folder, limits) if name == FILE else read_ranks(folder, limits, strict)
    metadata, size_bytes = index.metadata, index.size_bytes
    for key in metadata.keys:
        if key.dtype is not None:
            try:
                check_tiling(key)
            except HeaderInvalid as error:
                losses.add(key.name, error)
    shelf, addresses = Shelf(limits), list[Address]()
    files = _by_file(metadata.keys)
    if len(files) > limits.shard_count:
        raise LimitExceeded("shard-count", f"{len(files):,} files", path=folder.path)
    for file in _missing(folder, files, losses):
        del files[file]
    for number, (file, places) in enumerate(files.items()):
        with folder.child(file) as source:
            _read_file(source, number, places, shelf, losses)
            addresses.append(source.address)
            size_bytes += source.size
    addresses += index.addresses  # no piece lies in them, but they have to stay what they were
    notes = _notes(folder, name, metadata, files)
    return _checkpoint(folder, index, shelf, addresses, size_bytes, notes, losses)


def _by_file(keys: Iterable[Key]) -> dict[str, list[Place]]:
    """All items in the order of their files' first mention, those of a file by offset."""
    found: dict[str, list[Place]] = {}
    for key in keys:
        if key.item is not None:
            found.setdefault(key.item.file, []).append(Place(key.item, key, 0))
        for at, chunk in enumerate(key.chunks):
            found.setdefault(chunk.item.file, []).append(Place(chunk.item, key, at))
        for at, item in key.copies:
            found.setdefault(item.file, []).append(Place(item, key, at, copy=True))
    for places in found.values():
        places.sort(key=lambda place: (place.item.offset, place.item.length))
    return found


def _missing(folder: Folder, files: dict[str, list[Place]], losses: Losses) -> list[str]:
    """Files that are not there, what is in them lost. Raises SpecialFile in a strict reading."""
    there = set(folder.list())
    missing = [name for name in files if is_plain_name(name) and name not in there]
    if losses.tolerant:
        for name in missing:
            error = SpecialFile(f"'{name}' is missing")
            for place in files[name]:
                losses.add(place.key.name, error, counts=not place.copy)
    elif missing:
        raise _absence(folder, files, missing)
    return missing


def _absence(folder: Folder, files: dict[str, list[Place]], missing: list[str]) -> SpecialFile:
    keys = {place.key.name for name in missing for place in files[name]}
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    listed = ", ".join(f"'{name}'" for name in missing[:3])
    error = SpecialFile(
        f"{len(missing)} of {len(files)} files are missing: {listed}{more}; "
        f"{len(keys):,} keys are in them",
        path=folder.path, hint=f"copy what is missing into the folder{WHOLE}",
    )  # fmt: skip
    error.findings = tuple(sorted(keys)[:50])
    return error


def _read_file(
    source: Source, number: int, places: list[Place], shelf: Shelf, losses: Losses
) -> None:
    end = 0
    for item, key, at, copy in places:
        if item.offset < end and not shelf.is_header(number, item.offset):
            raise HeaderInvalid("two items overlap", path=source.name, key=key.name,
                                offset=item.offset, hint=_AGAIN)  # fmt: skip
        try:
            _check_end(source, item, key)
            shelf.add(source, number, key, at, item, copy=copy)
        except CkptError as error:
            losses.add(key.name, error, counts=not copy)
        if not shelf.is_header(number, item.offset):
            end = item.offset + item.length


def _check_end(source: Source, item: Item, key: Key) -> None:
    if item.offset + item.length > source.size:
        raise Truncated(
            f"an item should end at byte {item.offset + item.length:,}, the file has "
            f"{source.size:,}", path=source.name, key=key.name, hint=_AGAIN + WHOLE,
        )  # fmt: skip


def _checkpoint(
    folder: Folder, index: Index, shelf: Shelf, addresses: list[Address], size_bytes: int,
    notes: tuple[Note, ...], losses: Losses,
) -> Checkpoint:  # fmt: skip
    nested = Nested()
    for key in index.metadata.keys:
        nested.put(key.path, _made(key, shelf, losses), key.name)
    data = whole(nested.expression())
    walked = walk(data, 0, limits=shelf.limits, member="the state_dict")
    reader = TensorReader(shelf.resolve, shelf.limits)
    found = assemble(
        BytesSource(data, folder.path), NAME, walked, reader, shelf.limits,
        container=shelf, notes=notes,
    )  # fmt: skip
    handle: PickleHandle = found.handle
    handle.found.call_paths.clear()  # of a pickle that nobody else can look at
    unsafe = any(row.verdict == CODE for row in shelf.verdicts.rows)
    offer = () if unsafe else (_offer(folder.path, index.rank_count),)
    return found._replace(
        size_bytes=size_bytes, sources=tuple(addresses),
        globals=(*index.metadata.globals, *shelf.verdicts.rows),
        notes=(*found.notes, *_of_copies(shelf), *offer),
    )  # fmt: skip


def _made(key: Key, shelf: Shelf, losses: Losses) -> bytes:
    """The expression of a key; of a lost one, one whose storage has no bytes."""
    if key.name not in losses.lost:
        try:
            return shelf.objects.pop(key.name) if key.dtype is None else shelf.joined(key)
        except CkptError as error:
            losses.add(key.name, error)
    return shelf.blank(key)


def _offer(path: str, rank_count: int) -> Note:
    """What people look for who have such a folder."""
    name = path.rstrip("/") or path
    text = "torch.load opens no folder; the file that torch's dcp_to_torch_save would make, in less memory"
    if rank_count:
        text = (
            f"saved without collectives by {rank_count} rank{'s' * (rank_count > 1)}, here put "
            "together: torch's dcp_to_torch_save would fill in rank 0's part alone"
        )
    return Note("dcp-folder", text, convert_command(path, f"-o {quote(name + '.pth')}"))


def _of_copies(shelf: Shelf) -> tuple[Note, ...]:
    """Where ranks that saved the same key have not the same under it."""
    found = []
    for names, text in (
        (shelf.differing(), "are not the same on every rank that saved them; the lowest rank's is read"),
        (shelf.unproven(), "were saved by several ranks, with no checksum to compare; the lowest rank's is read"),
    ):  # fmt: skip
        if names:
            found.append(Note("ranks-differ", f"{len(names):,} keys {text}: {some(names)}"))
    return tuple(found)


def _notes(
    folder: Folder, name: str, metadata: Metadata, files: dict[str, list[Place]]
) -> tuple[Note, ...]:
    found, there = [], folder.list()
    unnamed = [n for n in there if n.endswith(".distcp") and n not in files]
    if unnamed:
        shown = ", ".join(f"'{name}'" for name in unnamed[:4])
        text = f"{len(unnamed)} .distcp files that the metadata do not name: {shown}"
        found.append(Note("index-extra-files", text))
    ranks = rank_files(there) if name == FILE else []
    if ranks:
        text = f"{FILE} is read, as by torch; not the metadata of single ranks: '{ranks[0]}' …"
        found.append(Note("index-extra-files", text))
    if metadata.unused_count:
        text = f"{metadata.unused_count:,} items in {FILE} that belong to no key"
        found.append(Note("dcp-unused-items", text))
    return tuple(found)
