"""Rewriting torch.save's zip: an edited data.pkl, every other record copied.

Knows: which records promise something about the bytes (formats 2.3). Must not know: verbs.
"""

from __future__ import annotations

import zlib

from ckptool.checkpoint import Changes, Checkpoint
from ckptool.errors import OutputError
from ckptool.formats.rewrite import Rewritten, rewrite
from ckptool.formats.serial_id import serialization_id
from ckptool.formats.torch_zip import Archive
from ckptool.limits import Limits
from ckptool.places import Source
from ckptool.plans import Copy, Literal, Made, Output, Part, Plan, total_size
from ckptool.spans import Span
from ckptool.zipplan import Record, plan_zip
from ckptool.zips import Entry, read_directory

_MARKERS = (".format_version", ".storage_alignment")


def edit(checkpoint: Checkpoint, changes: Changes) -> tuple[Plan, Rewritten]:
    """The same archive with an edited data.pkl: same records, order and checksums."""
    rewritten = rewrite(checkpoint, changes)
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
            part: Part = Literal(rewritten.data)
            crc = zlib.crc32(rewritten.data) if entry.crc else 0
            records.append(Record(entry.name, (part,), len(rewritten.data), crc))
        else:
            records.append(_copied(entry, archive.source, labels.get(name, name)))
    records = serialization_id(archive, records)
    parts = plan_zip(records, alignment or 64)
    output = Output("", parts, total_size(parts))
    return Plan(checkpoint.sources, (output,)), rewritten


def confirm(checkpoint: Checkpoint, rewritten: Rewritten, written: Source, limits: Limits) -> None:
    """Read the directory back, strictly: the proven pickle, and every record at its size.

    Raises OutputError; the pickle itself was compared with the old one by `rewrite`.
    """
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
