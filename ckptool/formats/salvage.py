"""What is left of a damaged file: which tensors are whole, and the rest of it without the others.

Knows: which containers can be read in spite of damage. Must not know: verbs, checksums of
storages (whoever has compared them says which are wrong).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from ckptool.errors import CkptError, Unsupported
from ckptool.formats import TITLES, identify
from ckptool.formats.folders import Held
from ckptool.formats.salvaged import Remains, unreadable
from ckptool.limits import Limits
from ckptool.places import Folder, Source
from ckptool.zipcentral import central_entries, find_directory

Reader = Callable[[Source, Limits], Remains]


def remains(source: Source, limits: Limits) -> Remains:
    """Read what a strict reading refuses, as far as that can be done without a guess.

    Raises CkptError when not one tensor can be told; a file that is hostile rather than damaged
    (names twice, two archives in one) is such a file.
    """
    reader = _READERS.get(container_of(source) or "")
    if reader is None:
        raise unreadable("nothing can be taken out of a damaged file of this kind")
    return reader(source, limits)


def remains_of_folder(folder: Folder, held: Held, limits: Limits) -> Remains:
    """The same of a folder that is read as a whole."""
    read = import_module(f"ckptool.formats.{SALVAGED_FOLDERS[held.layout]}").read_remains
    found: Remains = read(folder, limits, held.name)
    checkpoint, notes = found.checkpoint, (*held.notes, *found.checkpoint.notes)
    traits = checkpoint.traits | {"salvaged"}
    return found._replace(checkpoint=checkpoint._replace(notes=notes, traits=traits))


SALVAGED_FOLDERS = {"hf-shards": "hf_shards_salvage", "dcp": "dcp", "torch-unpacked": "unpacked"}
"""Layouts of which a part can be read, and the module that does."""


def refuse_layout(held: Held) -> None:
    """Raise Unsupported for a folder in which one damaged file may take all weights with it."""
    if held.layout not in SALVAGED_FOLDERS:
        known = ", ".join(TITLES[name] for name in SALVAGED_FOLDERS)
        raise Unsupported(
            f"--salvage takes one file, or a folder of these kinds: {known}; not {TITLES[held.layout]}",
            hint="give the damaged file in it",
        )


def container_of(source: Source) -> str | None:
    """The container by its first bytes or, where these are damaged, by a zip directory at the end;
    None when it is no checkpoint at all.
    """
    try:
        return identify(source).name
    except CkptError:
        return "torch-zip" if _ends_with_directory(source) else None


def _ends_with_directory(source: Source) -> bool:
    """A directory whose first entry begins the file, whatever stands in these bytes now."""
    try:
        end = find_directory(source)
        listed = central_entries(source.read(end.offset, end.size), end.total)
    except CkptError:
        return False
    return bool(listed) and min(listed).header_offset == 0


def _zip(source: Source, limits: Limits) -> Remains:
    from ckptool.formats import salvage_zip

    return salvage_zip.remains(source, limits)


def _own(name: str) -> Reader:
    def read(source: Source, limits: Limits) -> Remains:
        checkpoint, lost = import_module(f"ckptool.formats.{name}").read_remains(source, limits)
        traits = checkpoint.traits | {"salvaged"}
        return Remains(checkpoint._replace(traits=traits), lost)

    return read


_READERS: dict[str, Reader] = {
    "torch-zip": _zip,
    "torch-legacy": _own("torch_legacy"),
    "safetensors": _own("safetensors"),
}
