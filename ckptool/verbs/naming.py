"""Names of outputs beside an input.

Knows: suffixes people give checkpoints. Must not know: files.
"""

from __future__ import annotations

import os

from ckptool.places import is_url

_DOUBLE = (".pth.tar", ".pt.tar")


def suffixed(path: str, word: str) -> str:
    """`net.pth` and `cpu` give `net.cpu.pth`; `.pth.tar` counts as one suffix. Beside a URL is
    the current folder: most of them cannot be written to.
    """
    folder, name = os.path.split(path)
    if is_url(path):
        folder, name = "", os.path.basename(path.partition("?")[0].partition("#")[0]) or "model"
    double = next((suffix for suffix in _DOUBLE if name.lower().endswith(suffix)), "")
    if double:
        stem, suffix = name[: -len(double)], name[-len(double) :]
    else:
        stem, suffix = os.path.splitext(name)
    return os.path.join(folder, f"{stem}.{word}{suffix}")


def clean_name(path: str) -> str:
    """`net.pth` and the folder `net/` give `net.clean.safetensors`."""
    word = "clean"
    named = suffixed(path.rstrip(os.sep), word)
    return f"{named[: named.rindex(word)]}{word}.safetensors"


def part_name(path: str, is_folder: bool, suffix: str = ".pth") -> str:
    """`net.pth` and the folder `net/` give `net.part.pth`; the folder of shards has another suffix."""
    if not is_folder:
        return suffixed(path, "part")
    return f"{path.rstrip(os.sep).removesuffix('.pth')}.part{suffix}"


def default_output(path: str, device: str) -> str:
    """Where --to-cpu and --to-gpu write without -o: `net.cpu.pth`, `net.cuda1.pth`."""
    return suffixed(path, device.replace(":", ""))
