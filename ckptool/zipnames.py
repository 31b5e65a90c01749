"""Names of zip entries: which are plain paths in one folder, and what a zip without one is.

Knows: names. Must not know: bytes, files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckptool.errors import NotACheckpoint, PathEscape, ZipAmbiguous
from ckptool.ziplayout import REPACK

_BAD_NAME = re.compile(r"[\0\\]|^[A-Za-z]:|^\.{0,2}/|/\.{0,2}/|/\.{1,2}$|^\.{0,2}$")
# What every bad name has in it, once it stands between two line ends: found at once in many.
_HINTS = (
    "\0", "\\", ":", "\n/", "\n./", "\n../", "//", "/./", "/../", "/.\n", "/..\n",
    "\n\n", "\n.\n", "\n..\n",
)  # fmt: skip


def check_names(names: list[str]) -> str:
    """The one folder that all entries are in; names differ by more than case.

    Raises PathEscape, ZipAmbiguous, or NotACheckpoint for entries that are in no folder.
    """
    lines = "\n".join(("", *names, ""))
    if any(map(lines.__contains__, _HINTS)):
        for name in names:
            if _BAD_NAME.search(name):
                text = "an entry name that is not a plain path"
                raise PathEscape(text, member=name, hint=REPACK)
    top = names[0].partition("/")[0] if names else ""
    if lines.count("\n") == len(names) + 1 == lines.count(f"\n{top}/") + 1 and (
        len(set(lines.casefold().split("\n"))) == len(names) + 1
    ):  # no name has a line end in it: one folder, all names differ
        return top
    loose = [name for name in names if "/" not in name]
    if loose or not names:
        raise _loose(loose)
    roots = {name.partition("/")[0] for name in names}
    if len(roots) > 1:
        hint = "zip it again without __MACOSX" if "__MACOSX" in roots else REPACK
        text = f"more than one folder at the top of the zip: {_some(sorted(roots))}"
        raise ZipAmbiguous(text, hint=hint)
    # torch finds records without regard to case.
    if len({name.casefold() for name in names}) != len(names):
        seen: set[str] = set()
        for name in names:
            if name.casefold() in seen:
                raise ZipAmbiguous("two entries with one name", member=name, hint=REPACK)
            seen.add(name.casefold())
    return roots.pop()


_CHECKPOINTS = (".pth", ".pt", ".ckpt", ".bin", ".safetensors", ".tar", ".pkl", ".th")
_INSIDE = "unpack it and give the file inside"


def _loose(names: list[str]) -> NotACheckpoint:
    """What a zip without a top folder is: torch cannot read it."""
    listed = _some(names) or "nothing"
    if names and all(name.endswith(".npy") for name in names):
        return NotACheckpoint(
            f"not a checkpoint: a numpy archive (.npz) with {listed}",
            hint="open it with numpy.load",
        )
    if "data.pkl" in names:
        return NotACheckpoint(
            "the records of a checkpoint, zipped without their folder",
            hint="put them all in one folder and zip that folder",
        )
    if any(name.endswith(_CHECKPOINTS) for name in names):
        return NotACheckpoint(
            f"a zip that holds a checkpoint and is none itself: {listed}", hint=_INSIDE
        )
    return NotACheckpoint(f"not a checkpoint: a zip around other files: {listed}", hint=_INSIDE)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
