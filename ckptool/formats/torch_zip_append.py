"""An edited data.pkl behind the end of torch.save's zip: no other byte of it is written.

Knows: which record is replaced, what the directory keeps. Must not know: files, verbs.
"""

from __future__ import annotations

import zlib

from ckptool.checkpoint import Changes, Checkpoint
from ckptool.errors import OutputError, Unsupported
from ckptool.formats.rewrite import Rewritten, rewrite
from ckptool.formats.torch_zip import NAME, Archive
from ckptool.places import Source
from ckptool.plans import Literal
from ckptool.zipcentral import central_span
from ckptool.zipchain import MOST_LINKS, ORDINARY, last_link
from ckptool.zipplan import Record, plan_append
from ckptool.zips import EDITED, read_entry


def append(checkpoint: Checkpoint, changes: Changes) -> tuple[bytes, Rewritten]:
    """The bytes that make `changes` when they are put at the end of the file; none when the
    pickle stays as it is.

    Raises Unsupported for what cannot be edited in place, and what `rewrite` raises.
    """
    refuse_in_place(checkpoint)
    if changes.restructures:
        raise _refusal(checkpoint, "only names and devices are changed in place")
    rewritten = rewrite(checkpoint, changes)
    if rewritten.housing is not None:
        raise _refusal(checkpoint, "its storages would have to move")
    archive: Archive = checkpoint.handle.container
    source, directory = archive.source, archive.directory
    old = directory.records[EDITED]
    if checkpoint.handle.walked.data == rewritten.data:
        return b"", rewritten
    crc = zlib.crc32(rewritten.data) if old.crc else 0
    record = Record(old.name, (Literal(rewritten.data),), len(rewritten.data), crc)
    around = _around(archive)
    return plan_append(record, source.size, *around, len(directory.entries)), rewritten


def _around(archive: Archive) -> tuple[bytes, bytes]:
    """The directory before and after its entry of the pickle."""
    central = archive.directory.central
    data = archive.source.read(central.offset, central.size)
    replaced = central_span(data, archive.directory.records[EDITED].name)
    return data[: replaced.offset], data[replaced.end :]


def refuse_in_place(checkpoint: Checkpoint) -> None:
    """Raise Unsupported when this file cannot be edited in place, whatever the changes."""
    if checkpoint.format != NAME:
        text = f"only PyTorch zip files are edited in place, this is {checkpoint.format}"
        raise _refusal(checkpoint, text)
    directory = checkpoint.handle.container.directory
    if EDITED not in directory.records:
        raise _refusal(checkpoint, f"its pickle is not called {EDITED}")
    if len(directory.links) >= MOST_LINKS:
        text = f"edited in place {MOST_LINKS} times already, which is the most"
        raise Unsupported(text, path=checkpoint.file, hint=ORDINARY)


def _refusal(checkpoint: Checkpoint, text: str) -> Unsupported:
    return Unsupported(text, path=checkpoint.file, hint="write another file with -o OUT")


def confirm_append(checkpoint: Checkpoint, rewritten: Rewritten, written: Source) -> None:
    """Read the directory back, strictly: one link more, the proven pickle, all else as before.
    What lies before the append is the file that was read, byte for byte: it is not read again.

    Raises OutputError, ZipAmbiguous, Truncated.
    """
    archive: Archive = checkpoint.handle.container
    directory = archive.directory
    name = directory.records[EDITED].name
    new = last_link(written, _around(archive), name, len(directory.entries))
    if new.header_offset != archive.source.size:
        raise OutputError("self-check failed: the edit is not one link more of the file")
    if read_entry(written, new, archive.limits) != rewritten.data:
        raise OutputError("self-check failed: the pickle was not written whole")
