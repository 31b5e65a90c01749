"""Sentences about the user's own code: what is there instead, which line raised.

Knows: tracebacks, names that look alike. Must not know: torch, checkpoints.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable
from difflib import get_close_matches
from traceback import walk_tb
from typing import NamedTuple

from ckptool.errors import CkptError, ModelError

_LISTED, _LONGEST = 8, 300
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_STANDARD = tuple(os.path.join(sysconfig.get_path(n), "") for n in ("stdlib", "platstdlib"))
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_ON_A_GPU = ("Torch not compiled with CUDA", "Found no NVIDIA driver", "No CUDA GPUs are available",
             "Torch not linked with CUDA")  # fmt: skip


class Spot(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{shown_path(self.file)}, line {self.line}"


def is_own(file: str) -> bool:
    """Whether a source file is the user's, not torch's, an installed package's or ours."""
    strange = file.startswith(("<", _OURS, *_STANDARD))
    return not strange and not any(part in file for part in _INSTALLED)


def spot_of(error: BaseException) -> Spot | None:
    """The deepest line of the user's code that an exception passed; else the deepest of all."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return Spot(error.filename, error.lineno)
    frames = [Spot(f.f_code.co_filename, line) for f, line in walk_tb(error.__traceback__)]
    frames = [spot for spot in frames if not spot.file.startswith((_OURS, "<"))]
    own = [spot for spot in frames if is_own(spot.file)]
    known = own or frames
    return known[-1] if known else None


def said(error: BaseException) -> str:
    """`ValueError: bad depth`, on one line, cut where it is long."""
    lines = str(error.msg if isinstance(error, SyntaxError) else error).strip().splitlines()
    text = lines[0] if lines else ""
    text = f"{text[:_LONGEST]} …" if len(text) > _LONGEST else text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def failed(doing: str, error: BaseException) -> CkptError:
    """The error to raise for one that the user's code raised."""
    spot = spot_of(error)
    at = f"line {spot.line}: " if spot else ""
    path = shown_path(spot.file) if spot else None
    hint = None
    if isinstance(error, ModuleNotFoundError) and error.name:
        return _not_installed(at, path, error.name)
    if isinstance(error, SystemExit):
        text = f"{at}{doing} ended the program with sys.exit or a command line of its own"
        hint = "put what is a script under `if __name__ == '__main__':`"
        return ModelError(text, path=path, hint=hint)
    if any(words in str(error) for words in _ON_A_GPU):
        hint = "the model asks for a GPU while it is built; ckptool needs none, so leave .cuda() to the training script"
    return ModelError(f"{at}{doing} raised {said(error)}", path=path, hint=hint)


def _not_installed(at: str, path: str | None, name: str) -> CkptError:
    root = name.split(".")[0]
    above = _folder_above(root, os.path.dirname(os.path.abspath(path))) if path else None
    if above:
        hint = f"'{root}' is in {above}: run ckptool in that folder"
        return ModelError(f"{at}imports '{name}', which is not on the path", path=path, hint=hint)
    text = f"{at}imports '{name}', which is not installed for {sys.executable}"
    hint = "install what provides it there, or name a SPEC that does without"
    return ModelError(text, path=path, hint=hint)


def _folder_above(name: str, folder: str) -> str | None:
    """The nearest folder around `folder` that holds a package or module `name`."""
    while True:
        base = os.path.join(folder, name)
        if os.path.isfile(f"{base}.py") or os.path.isfile(os.path.join(base, "__init__.py")):
            return folder
        above = os.path.dirname(folder)
        if above == folder:
            return None
        folder = above


def shown_path(file: str) -> str:
    """Relative to the current folder where it lies below, as a person would type it."""
    here = os.path.join(os.getcwd(), "")
    return file.removeprefix(here)


def instead(wanted: str, names: Iterable[str], others: Iterable[str] = ()) -> str:
    """`did you mean 'Net'? There is: Net, make_net`; empty where there is nothing. `others` may
    be meant too and are not listed.
    """
    names = sorted(set(names))
    pool = [*names, *sorted(set(others) - set(names))]
    near = [name for name in pool if name.lower() == wanted.lower()][:1]
    near = near or get_close_matches(wanted, pool, n=1, cutoff=0.6)
    parts = [f"did you mean '{near[0]}'?"] if near else []
    if names:
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        parts.append(f"there is: {', '.join(names[:_LISTED])}{more}")
    return " ".join(parts)
