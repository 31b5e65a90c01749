"""Writing torch's zip: an edited data.pkl and every other record copied, or new storages.

Knows: which records promise something about the bytes (formats 2.3). Must not know: verbs.
"""

from __future__ import annotations

import zlib

from ckptool.checkpoint import Changes, Checkpoint
from ckptool.errors import OutputError
from ckptool.formats.contents import Filler
from ckptool.formats.homes import Home
from ckptool.formats.readback import compare
from ckptool.formats.rewrite import Rewritten, rewrite
from ckptool.formats.serial_id import serialization_id
from ckptool.formats.torch_zip import Archive
from ckptool.limits import Limits
from ckptool.places import Source
from ckptool.plans import Copy, Literal, Made, Output, Plan, total_size
from ckptool.spans import Span
from ckptool.zipplan import Record, plan_zip
from ckptool.zips import Entry, read_directory

_MARKERS = (".format_version", ".storage_alignment")
_SERIAL = ".data/serialization_id"
_TOP = "archive"  # torch's own name where it knows none


def write(checkpoint: Checkpoint, changes: Changes) -> tuple[Plan, Rewritten]:
    """A zip of any checkpoint that is a pickle. From a zip whose storages stay: the same
    records, order and checksums but for data.pkl.
    """
    rewritten = rewrite(checkpoint, changes, "torch-zip")
    if rewritten.housing is None:
        records, alignment = _edited(checkpoint, rewritten)
    else:
        records, alignment = _rebuilt(checkpoint, changes, rewritten)
    parts = plan_zip(records, alignment)
    output = Output("", parts, total_size(parts))
    return Plan(checkpoint.sources, (output,)), rewritten


def _edited(checkpoint: Checkpoint, rewritten: Rewritten) -> tuple[list[Record], int]:
    archive: Archive = checkpoint.handle.container
    labels = _labels(checkpoint)
    keep_markers = _keeps_promise(checkpoint, archive)
    alignment = _alignment(archive)
    records = []
    for entry in archive.directory.entries:
        name = entry.name[len(archive.directory.top) + 1 :]
        if name.lower() in _MARKERS and not (keep_markers and alignment):
            continue
        if name.lower() == "data.pkl":
            records.append(_pickle_record(entry, rewritten.data))
        else:
            records.append(_copied(entry, archive.source, labels.get(name, name)))
    return serialization_id(archive, records), alignment or 64


def _pickle_record(entry: Entry, data: bytes) -> Record:
    return Record(entry.name, (Literal(data),), len(data), zlib.crc32(data) if entry.crc else 0)


def _rebuilt(
    checkpoint: Checkpoint, changes: Changes, rewritten: Rewritten
) -> tuple[list[Record], int]:
    """New storages, numbered in the order of first use, one after another (formats 2.3)."""
    assert rewritten.housing is not None
    container = checkpoint.handle.container
    inline = getattr(container, "inline", None)
    filler = Filler(changes.check, inline)
    archive = container if isinstance(container, Archive) else None
    top = archive.directory.top if archive else _TOP
    homes = rewritten.housing.homes
    stored = [
        storage_record(filler, home, f"{top}/data/{number}", archive is not None)
        for number, home in enumerate(homes)
    ]
    if archive is None:
        return new_records(top, rewritten.data, stored), 64
    records: list[Record] = []
    for entry in archive.directory.entries:
        name = entry.name[len(top) + 1 :].lower()
        if name == "data.pkl":
            records.append(_pickle_record(entry, rewritten.data))
        elif name == "byteorder":
            records.append(Record(entry.name, (Literal(b"little"),), 6, None))
        elif name == _SERIAL or (name in _MARKERS and not _alignment(archive)):
            continue
        elif name.startswith("data/"):
            records += stored
            stored = []
        else:
            records.append(_copied(entry, archive.source, name))
    return records + stored, _alignment(archive) or 64


def new_records(top: str, data: bytes, stored: list[Record]) -> list[Record]:
    """The records of a new archive in torch's order (formats 2.1)."""
    before = (("data.pkl", data), (".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", b"little"))  # fmt: skip
    small = [Record(f"{top}/{name}", (Literal(text),), len(text), None) for name, text in before]
    return [*small, *stored, Record(f"{top}/version", (Literal(b"3\n"),), 2, None)]


def storage_record(filler: Filler, home: Home, name: str, archived: bool) -> Record:
    """One storage; a whole one out of an archive keeps its checksum, recorded (or 0) or not."""
    parts = filler.parts(home)
    if not parts:
        return Record(name, (), 0, 0)
    kept = archived and home.read is None and home.source.pieces[0].encoding == "stored"
    return Record(name, parts, home.size_bytes, home.source.crc or 0 if kept else None)


def confirm(checkpoint: Checkpoint, rewritten: Rewritten, written: Source, limits: Limits) -> None:
    """Read it back, strictly: the proven pickle, and every record or tensor where it must be.

    Raises OutputError; the pickle itself was compared with the old one by `rewrite`.
    """
    if rewritten.housing is not None:
        compare(written, rewritten.expected, rewritten.housing, limits)
        return
    before: Archive = checkpoint.handle.container
    after = Archive(written, read_directory(written, limits), limits)
    sizes = {name: entry.size for name, entry in after.directory.records.items()}
    for name, entry in before.directory.records.items():
        kept = name.lower() not in (*_MARKERS, "data.pkl", ".data/serialization_id")
        if kept and sizes.get(name) != entry.size:
            raise OutputError(f"self-check failed: the record '{name}' was not written whole")
    if after.read("data.pkl") != rewritten.data:
        raise OutputError("self-check failed: the pickle was not written whole")


def _copied(entry: Entry, source: Source, label: str) -> Record:
    if entry.name.endswith("/") or not entry.size:
        return Record(entry.name, (), 0, 0)
    span = source.absolute(Span(entry.data_offset, entry.compressed_size))
    if entry.method:
        made = Made(((0, span),), "inflate", (), entry.size, entry.crc, label)
        return Record(entry.name, (made,), entry.size, entry.crc)
    return Record(entry.name, (Copy(0, span, entry.crc or None, label),), entry.size, entry.crc)


def _labels(checkpoint: Checkpoint) -> dict[str, str]:
    """What an error calls a record: the first tensor key that uses it."""
    labels: dict[str, str] = {}
    for tensor in checkpoint.tensors:
        if tensor.storage is not None:
            labels.setdefault(f"data/{tensor.storage.key}", ".".join(map(str, tensor.path)))
    return labels


def _keeps_promise(checkpoint: Checkpoint, archive: Archive) -> bool:
    """Whether `.format_version` will be true of what we write (formats 2.3): keys 0 to n-1
    in the order of first reference, records in that order without another between them.
    """
    keys = [storage.key for storage in checkpoint.storages]
    if keys != [str(i) for i in range(len(keys))]:
        return False
    top = len(archive.directory.top) + 1
    names = [entry.name[top:] for entry in archive.directory.entries]
    stored = [i for i, name in enumerate(names) if name.startswith("data/")]
    run = stored == list(range(stored[0], stored[0] + len(stored))) if stored else True
    return run and [names[i] for i in stored] == [f"data/{key}" for key in keys]


def _alignment(archive: Archive) -> int | None:
    """The archive's own alignment: 64 without a record, None when the record is no number."""
    if archive.find(".storage_alignment") is None:
        return 64
    text = archive.read(".storage_alignment")
    value = int(text) if text.isdigit() and len(text) < 6 else 0
    return value if 1 <= value <= 32768 else None
