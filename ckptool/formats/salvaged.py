"""What is left of a damaged file, whatever its container.

Knows: the nouns. Must not know: containers, verbs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckptool.checkpoint import Checkpoint
from ckptool.errors import CkptError, LimitExceeded, PathEscape

WHOLE = ", or take what is whole of it with convert --salvage"
"""Behind the hint of what could be salvaged."""


class Remains(NamedTuple):
    """A checkpoint as far as it can be read, and {storage key: what became of it} of those that
    are not there in full; `absent` says the same of keys of which not even a shape is known. The
    others are as long as they must be; whether their bytes are right is not known where they have
    a recorded checksum that nobody has compared yet.
    """

    checkpoint: Checkpoint
    lost: dict[str, str]
    absent: Mapping[str, str] = {}


class Losses:
    """What becomes of a key that is not whole: it ends a strict reading, a tolerant one notes it in
    `lost`.
    """

    def __init__(self, tolerant: bool = False) -> None:
        self.tolerant = tolerant
        self.lost: dict[str, str] = {}

    def add(self, name: str, error: CkptError, *, counts: bool = True) -> None:
        """One that is lost by `error`, which is raised in a strict reading, and where it is no
        damage. Where it does not `count`, nothing of the key is lost with it.
        """
        if not self.tolerant or isinstance(error, LimitExceeded | PathEscape):
            raise error
        if counts:
            self.lost.setdefault(name, error.text)


def unreadable(text: str) -> CkptError:
    """The error for a file of which no tensor can be told."""
    return CkptError(text, slug="truncated")
