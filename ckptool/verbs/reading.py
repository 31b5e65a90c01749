"""Opening whatever a verb was given: a file, a folder, an index of shards.

Knows: that a folder or its index stands for the files it names. Must not know: formats' insides,
printing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from shlex import quote
from typing import TYPE_CHECKING, NamedTuple

from ckptool.checkpoint import Checkpoint, Note
from ckptool.errors import CkptError
from ckptool.formats import read
from ckptool.limits import DEFAULT, Limits
from ckptool.places import Folder, PlaceLike, Source, is_url
from ckptool.verbs.opening import is_folder, open_folder, open_place, settle_after

if TYPE_CHECKING:
    from ckptool.formats.alike import Alike
    from ckptool.formats.folders import Held

_INDEX = ".index.json"
_RANK_FILE = "_states.pt"
_METADATA = re.compile(r"(?:__\d+)?\.metadata")


class Opened(NamedTuple):
    """A checkpoint and the open file behind it; None: a folder, whose files are opened when
    they are read.
    """

    checkpoint: Checkpoint
    source: Source | None


def let_go(checkpoint: Checkpoint) -> None:
    """Forget the nodes of its pickle, most of the memory of a large file: for who will neither
    edit nor read an object of it any more.
    """
    if hasattr(checkpoint.handle, "let_go"):
        checkpoint.handle.let_go()


@contextmanager
def opened(
    place: PlaceLike, limits: Limits = DEFAULT, *, strict: bool = False, patient: bool = False,
    numbers: bool = False, keep: bool = True, alike: Alike | None = None,
) -> Iterator[Opened]:  # fmt: skip
    """Read what `place` is; closed at the end. `strict` and `patient` as for `open_place`, `keep` and
    `alike` as for `formats.read`. `numbers`: they may be read, so that files of a folder, which are
    opened once more for that, are strictly read. Raises CkptError, naming the file; Doubted for one that is
    `patient` and lies.
    """
    path = os.fsdecode(place) if isinstance(place, str | bytes | os.PathLike) else None
    notes: tuple[Note, ...] = ()
    asked = None if path is None else meant(path, strict=strict or numbers)
    if asked is not None:
        folder, held = asked
        if held.is_index:
            from ckptool.formats.folders import read_folder

            yield Opened(read_folder(folder, limits, held), None)
            return
        place, notes = os.path.join(folder.path, held.name), held.notes
    source, said = open_place(place, strict=strict, patient=patient)
    with source:
        notes += (*_of_a_folder(path), *said)
        try:
            yield _read(source, limits, notes, keep, alike)  # the caller lets it go: not kept here
        except CkptError as error:
            settle_after(source, error)
            raise
        source.settle()


def _read(
    source: Source, limits: Limits, notes: tuple[Note, ...], keep: bool, alike: Alike | None
) -> Opened:
    try:
        checkpoint = read(source, limits, keep=keep, alike=alike)
    except CkptError as error:
        if source.name.endswith(".distcp"):
            error.hint = "it is a part of a DCP folder: give the folder"
        raise
    return Opened(checkpoint._replace(notes=(*notes, *checkpoint.notes)), source)


def meant(path: str, *, strict: bool = False) -> tuple[Folder, Held] | None:
    """The folder that a path stands for (its own, or that of an index in it), and what is to be read
    there; None for a file. Raises what `look` raises.
    """
    from ckptool.formats.folders import Held, look

    if path.endswith(_INDEX) and (is_url(path) or os.path.isfile(path)):
        folder = open_folder(os.path.dirname(path) or ".", strict=strict)
        return folder, Held(os.path.basename(path), "hf-shards")
    if is_index(path):
        path = os.path.dirname(path) or "."
    if not is_folder(path):
        return None
    folder = open_folder(path, strict=strict)
    return folder, look(folder)


def _of_a_folder(path: str | None) -> tuple[Note, ...]:
    """One file of a DeepSpeed checkpoint stands for no more than its rank."""
    if path is None or not path.endswith(_RANK_FILE) or is_url(path):
        return ()
    from ckptool.formats.layouts import is_rank_of_zero

    folder = os.path.dirname(path) or "."
    if not is_rank_of_zero(Folder(folder), os.path.basename(path)):
        return ()
    text = "one file of a DeepSpeed ZeRO checkpoint: its folder gives the fp32 weights of all ranks"
    return (Note("zero-rank-file", text, f"ckptool inspect {quote(folder)}"),)


def names_index(path: str) -> bool:
    """Whether this is an index that stands for its folder, by its name; a DCP one has to be there."""
    return is_index(path) or path.endswith(_INDEX)


def is_index(path: str) -> bool:
    """Whether this is the `.metadata` of a DCP folder, or a rank's, which stands for the folder."""
    return _METADATA.fullmatch(os.path.basename(path)) is not None and os.path.isfile(path)
