"""What a folder is: the index or the one file to read in it, or another program's layout.

Knows: the names that frameworks give (formats 1, item 9). Must not know: what is in the files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from ckptool.checkpoint import Checkpoint, Note
from ckptool.errors import CkptError, HeaderInvalid, NotACheckpoint, UsageError
from ckptool.formats.wording import some
from ckptool.limits import Limits
from ckptool.places import Folder

if TYPE_CHECKING:
    from ckptool.formats.layouts import Whole

INDEXES = (".safetensors.index.json", ".bin.index.json")  # in the order loaders look
_SINGLES = ("model.safetensors", "pytorch_model.bin")
_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".tar", ".pkl", ".pt2")
_NUMBERED = re.compile(r"(.+)-\d+-of-(?!0*1\.)\d+(\.safetensors|\.bin)")  # one of several


_BARE = "DeepSpeed's weights in the precision of training, from 'module': no optim_states files of ZeRO are beside them"


class Held(NamedTuple):
    """What stands for a folder: an index in it (`layout` says of what), or the one file that is
    the checkpoint (`layout` is empty).
    """

    name: str
    layout: str
    notes: tuple[Note, ...] = ()

    @property
    def is_index(self) -> bool:
        """Whether the folder is read as a whole."""
        return bool(self.layout)


READERS = {"hf-shards": "hf_shards", "dcp": "dcp", "deepspeed-zero": "zero",
           "megatron": "megatron", "torch-unpacked": "unpacked"}  # fmt: skip
"""The module of `formats` for each layout, with `read(folder, limits, index name)`."""


def read_folder(folder: Folder, limits: Limits, held: Held) -> Checkpoint:
    """All files of a folder that is read as a whole, as one checkpoint."""
    module = import_module(f"ckptool.formats.{READERS[held.layout]}")
    try:
        found: Checkpoint = module.read(folder, limits, held.name)
    except CkptError as error:
        error.path = error.path or folder.path
        raise
    return found._replace(notes=(*held.notes, *found.notes))


def look(folder: Folder) -> Held:
    """Which file stands for the folder.

    Raises UsageError when several could, Unsupported for a layout that is not read yet,
    NotACheckpoint when nothing is known.
    """
    files = folder.list()
    for suffix in INDEXES:
        found = [name for name in files if name.endswith(suffix)]
        if len(found) > 1:
            raise UsageError(
                f"{len(found)} indexes in one folder: {some(found)}",
                path=folder.path,
                hint="give the path of one of them",
            )
        if found:
            return Held(found[0], "hf-shards", _beside(found[0], files) + _inside(folder, files))
    index = _dcp_index(files)
    if index:
        return Held(index, "dcp", _LIGHTNING if _TRAINER in files else ())
    single = _single(files)
    if single:
        return Held(single, "", _beside(single, files) + _inside(folder, files))
    if _is_dcp(files):
        raise _without_metadata(folder)
    return _of_others(folder, files)


def _dcp_index(files: Sequence[str]) -> str | None:
    """The metadata of all ranks, else that of the first: they are looked for in this order."""
    if ".metadata" in files:
        return ".metadata"
    from ckptool.formats.dcp_apart import rank_files

    return next(iter(rank_files(files)), None)


def whole_of(folder: Folder, files: Sequence[str], folders: Sequence[str]) -> Whole | None:
    """What `look` reads as one checkpoint here, by the names in the folder alone (and, where
    DeepSpeed's `latest` is one of them, those in its tag): for a search of many folders, each
    of which comes by itself. None for shards with an index, and for Megatron's ranks, which
    are files of their own.
    """
    from ckptool.formats import layouts

    if any(name.endswith(INDEXES) for name in files):
        return None
    if ".metadata" in files or _is_dcp(files):
        return layouts.Whole(frozenset(filter(_is_of_dcp, files)))
    return None if _single(files) else layouts.whole_of(folder, files, folders)


def _of_others(folder: Folder, files: Sequence[str]) -> Held:
    """Layouts of other programs, and single files among theirs. Raises as `look`."""
    from ckptool.formats import layouts, rank_slices

    layout = layouts.layout_of(folder, files)
    if layout == "deepspeed-zero":
        bare = layouts.bare_model_states(folder)
        return (
            Held(bare, "", (Note("zero-without-optimizer", _BARE),)) if bare else Held(".", layout)
        )
    if layout is not None:
        return Held(".", layout)
    if layouts.MEGATRON_FILE in files:
        return Held(layouts.MEGATRON_FILE, "")
    weights = [name for name in files if name.endswith(_WEIGHTS)]
    if len(weights) == 1 and weights[0].endswith(".ckpt") and not layouts.inner_ckpts(folder):
        return Held(weights[0], "")
    raise (
        layouts.several(folder, weights)
        or rank_slices.refusal(folder.path, files)
        or _refusal(folder, files)
    )


def _single(files: Sequence[str]) -> str | None:
    named = [name for name in _SINGLES if name in files]
    plain = [name for name in files if name.endswith(".safetensors")]
    if named:
        return named[0]
    return plain[0] if len(plain) == 1 and not _NUMBERED.fullmatch(plain[0]) else None


def _beside(chosen: str, files: Sequence[str]) -> tuple[Note, ...]:
    """Another file that could have stood for the folder is mentioned."""
    rivals = [n for n in files if n != chosen and (n in _SINGLES or n.endswith(INDEXES))]
    if not rivals:
        return ()
    return (Note("folder-choice", f"read by {chosen}, as loaders do; not by {some(rivals)}"),)


_TRAINER = "meta.pt"
_LIGHTNING = (Note("lightning-folder", f"Lightning's: the state of its trainer is in {_TRAINER}"),)


def _inside(folder: Folder, files: Sequence[str]) -> tuple[Note, ...]:
    """A DeepSpeed checkpoint one deeper, as transformers' Trainer leaves it."""
    from ckptool.formats import layouts

    if layouts.LATEST not in files or layouts.layout_of(folder, files) != "deepspeed-zero":
        return ()
    try:
        tag = layouts.tag_of(folder)
    except CkptError:  # it is not what was asked for
        return ()
    return (
        Note("folder-choice", f"a DeepSpeed checkpoint with fp32 weights is inside, in '{tag}'"),
    )


# -- folders that are something else -----------------------------------------------------------
def _is_dcp(files: Sequence[str]) -> bool:
    return any(name[:2] == "__" and name.endswith((".distcp", ".metadata")) for name in files)


def _is_of_dcp(name: str) -> bool:
    return name.endswith((".distcp", ".metadata", ".metadata.tmp")) or name == _TRAINER


def _without_metadata(folder: Folder) -> HeaderInvalid:
    """What a folder of `.distcp` files without `.metadata` is."""
    return HeaderInvalid(
        "a DCP folder without its .metadata", path=folder.path,
        hint="copy it too (a hidden file); .metadata.tmp is one that was never finished",
    )  # fmt: skip


def _refusal(folder: Folder, files: Sequence[str]) -> Exception:
    numbered = next((match for name in files if (match := _NUMBERED.fullmatch(name))), None)
    if numbered:
        index = f"{numbered.group(1)}{numbered.group(2)}.index.json"
        return NotACheckpoint(
            f"the index of its shards is missing: no '{index}'",
            path=folder.path,
            hint="download the index too: it says which file holds which key",
        )
    held = [name for name in files if name.endswith(_WEIGHTS)]
    folders = folder.folders()
    inner = [f"{name}/" for name in folders if _has_checkpoint(folder.names_below(name))]
    if held or inner:
        text = f"a folder without an index; it holds {some([*held, *inner])}"
        hint = "give one of these" if inner else "give one of these files"
        hint += "; ckptool inspect -r takes all" if len(held) + len(inner) > 1 else ""
        return NotACheckpoint(text, path=folder.path, hint=hint)
    what = "a folder with no checkpoint in it" if files or folders else "an empty folder"
    return NotACheckpoint(what, path=folder.path, hint="check the path")


def _has_checkpoint(files: Sequence[str]) -> bool:
    return ".metadata" in files or any(name.endswith((*INDEXES, *_WEIGHTS)) for name in files)
