"""What the tests of in-place editing share: edits of a file without the command line."""

from __future__ import annotations

from pathlib import Path

from ckptool.checkpoint import Changes
from ckptool.formats import read
from ckptool.places import open_source
from ckptool.verbs.inplace import append_changes


def changes_of(checkpoint, tag=None, strip=False, **options):
    """Every storage to `tag`; `module.` off every key of the tables that all have it."""
    devices = {s.key: tag for s in checkpoint.storages if tag and s.device not in (tag, "meta")}
    renames = {
        (table.path, tensor.key): tensor.key.removeprefix("module.")
        for table in checkpoint.tables
        if strip and all(t.key.startswith("module.") for t in table.tensors)
        for tensor in table.tensors
    }
    return Changes(renames=renames, devices=devices, **options)


def edit(path, tag=None, strip=False, *, fsync=True, **options):
    """Edit one file in place; what `append_changes` returns."""
    with open_source(str(path)) as source:
        checkpoint = read(source)
        wanted = changes_of(checkpoint, tag, strip, **options)
        return append_changes(source, checkpoint, wanted, fsync=fsync)


def opened(path):
    """The checkpoint of a file, read whole."""
    with open_source(str(path)) as source:
        return read(source)


def links(path):
    return opened(path).handle.container.directory.links


def journal(path):
    path = Path(path).resolve()
    return path.with_name(f".{path.name}.ckptool-journal")
