"""Folders of other programs: which one it is, and which part of it is meant.

Knows: the names that DeepSpeed, Lightning, Megatron and unpackers of archives give (formats 1,
item 9). Must not know: what is in the files, but for the one line of a pointer file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ckptool.errors import (
    CkptError,
    HeaderInvalid,
    SpecialFile,
    UsageError,
)
from ckptool.formats.wording import some
from ckptool.places import Folder, is_plain_name

LATEST, _SCRIPT, ITERATION = "latest", "zero_to_fp32.py", "latest_checkpointed_iteration.txt"
_RANK = re.compile(
    r"(?:(?:(?:bf16_|fp16_)?zero_pp|expp)_rank_\d+_|(?:layer_\d+_)?expert_\d+_)?"
    r"mp_rank_\d+_(?:model|optim)_states\.pt"
)
_POINTER_BYTES = 1024
MEGATRON_FILE = "model_optim_rng.pt"


class Whole(NamedTuple):
    """What of a folder is one checkpoint: files, and folders with all that is in them. In the
    folder `tag` lie more of its files, beside others.
    """

    files: frozenset[str]
    folders: frozenset[str] = frozenset()
    tag: str = ""


def layout_of(folder: Folder, files: Sequence[str]) -> str | None:
    """Which layout is read as a whole; None for none of them."""
    return next((name for name, judge in _LAYOUTS if judge(folder, files)), None)


def whole_of(folder: Folder, files: Sequence[str], folders: Sequence[str]) -> Whole | None:
    """The part of `folders.whole_of` that is told here."""
    ranks = [name for name in files if _RANK.fullmatch(name)]
    if _are_joined(ranks):
        return Whole(frozenset(ranks))
    if LATEST in files and (tag := _latest_tag(folder, files, folders)) is not None:
        return Whole(frozenset((LATEST, _SCRIPT)), tag=tag)
    if "data.pkl" in files and "version" in files:
        return Whole(_RECORDS, frozenset(("data", "code", "constants")))
    return None


# -- DeepSpeed ---------------------------------------------------------------------------------
def _is_deepspeed(folder: Folder, files: Sequence[str]) -> bool:
    if any(map(_RANK.fullmatch, files)) or (LATEST in files and _SCRIPT in files):
        return True
    return any(_RANK.fullmatch(name) for names in _below(folder).values() for name in names)


def _are_joined(ranks: Sequence[str]) -> bool:
    return any(name.endswith("_optim_states.pt") for name in ranks)


def _latest_tag(folder: Folder, files: Sequence[str], folders: Sequence[str]) -> str | None:
    """The folder that `latest` names, where it is one of DeepSpeed's with files to join; empty
    where it is DeepSpeed's and names none; None where it is another program's.
    """
    try:
        tag = pointer(folder, LATEST)
        if tag in folders:
            names = folder.names_below(tag)
            return tag if _are_joined([n for n in names if _RANK.fullmatch(n)]) else None
    except CkptError:  # told when the folder itself is looked at
        pass
    return "" if _SCRIPT in files else None


def is_rank_of_zero(folder: Folder, name: str) -> bool:
    """Whether a file is one of those that a ZeRO checkpoint right in this folder is made of."""
    files = folder.list() if _RANK.fullmatch(name) else []
    return _are_joined([file for file in files if _RANK.fullmatch(file)])


def tag_of(folder: Folder) -> str:
    """The folder inside that is the checkpoint, as `latest` says, or the only one; empty where
    the files lie right here. Raises SpecialFile for a tag that is not there, UsageError for several.
    """
    files = folder.list()
    if any(map(_RANK.fullmatch, files)):
        return ""
    tags = [n for n, names in _below(folder).items() if any(map(_RANK.fullmatch, names))]
    if LATEST not in files:
        if len(tags) == 1:
            return tags[0]
        raise UsageError(
            f"{len(tags)} DeepSpeed checkpoints and no '{LATEST}' that names one: {some(tags)}",
            path=folder.path, hint="give the path of one of them",
        )  # fmt: skip
    tag = pointer(folder, LATEST)
    if is_plain_name(tag) and tag not in folder.folders():
        raise SpecialFile(
            f"'{LATEST}' names '{tag}', which is not there", path=folder.path,
            hint=f"there are {some(tags)}: give the path of one of them" if tags else "copy it too",
        )  # fmt: skip
    return tag


def bare_model_states(folder: Folder) -> str | None:
    """The one file that holds the weights where no ZeRO optimizer is beside it (stage 0, or its
    files were left out); None where that is not so.
    """
    tag = tag_of(folder)
    names = (folder.below(tag) if tag else folder).list()
    ranks = [name for name in names if _RANK.fullmatch(name)]
    return os.path.join(tag, ranks[0]) if ranks == ["mp_rank_00_model_states.pt"] else None


def pointer(folder: Folder, name: str) -> str:
    """The one line of a file that names what is meant. Raises HeaderInvalid."""
    with folder.child(name) as source:
        data = source.read(0, min(source.size, _POINTER_BYTES))
    try:
        text = data.decode("utf-8").strip()
    except UnicodeDecodeError:
        text = ""
    if not text or "\n" in text or source.size > _POINTER_BYTES:
        raise HeaderInvalid(
            f"'{name}' names nothing", path=folder.path, hint="write one name into it"
        )
    return text


# -- others ------------------------------------------------------------------------------------
def _is_megatron(folder: Folder, files: Sequence[str]) -> bool:
    return ITERATION in files or any(MEGATRON_FILE in names for names in _below(folder).values())


_RECORDS = frozenset((
    "data.pkl", "version", "byteorder", "constants.pkl", "attributes.pkl",
    ".format_version", ".storage_alignment",
))  # fmt: skip


def _is_unpacked(folder: Folder, files: Sequence[str]) -> bool:
    return bool(unpacked_tops(folder, files))


def unpacked_tops(folder: Folder, files: Sequence[str]) -> list[str]:
    """Folders with a data.pkl: this one ("."), else those right inside."""
    if "data.pkl" in files:
        return ["."]
    return [name for name, names in _below(folder).items() if "data.pkl" in names]


_Judge = Callable[[Folder, Sequence[str]], bool]
_LAYOUTS: tuple[tuple[str, _Judge], ...] = (
    ("deepspeed-zero", _is_deepspeed),
    ("megatron", _is_megatron),
    ("torch-unpacked", _is_unpacked),
)


def _below(folder: Folder) -> dict[str, tuple[str, ...]]:
    """{folder one deeper: names of its files}."""
    return {name: folder.names_below(name) for name in folder.folders()}


# -- folders of checkpoints --------------------------------------------------------------------
def several(folder: Folder, weights: Sequence[str]) -> CkptError | None:
    """A folder of Lightning checkpoints (files, or folders of a sharded strategy): which to give."""
    found = [*(name for name in weights if name.endswith(".ckpt")), *inner_ckpts(folder)]
    found.sort(key=_by_number)
    if not found or len(found) < len(weights):
        return None
    best = "last.ckpt" if "last.ckpt" in found else found[-1]
    path = os.path.join(folder.path, best)
    return UsageError(
        f"a folder of {len(found)} Lightning checkpoint{'s' * (len(found) != 1)}: {some(found)}", path=folder.path,
        hint=f"give one of them, such as {path}",
    )  # fmt: skip


def inner_ckpts(folder: Folder) -> list[str]:
    """Checkpoints of a sharded strategy, which are folders."""
    return [name for name in folder.folders() if name.endswith(".ckpt")]


def _by_number(name: str) -> list[tuple[int, str]]:
    """epoch=9 before epoch=10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part[:18]), "") if part.isdecimal() else (-1, part) for part in parts]
