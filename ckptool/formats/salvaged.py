"""What is left of a damaged file, whatever its container.

Knows: the nouns. Must not know: containers, verbs.
"""

from __future__ import annotations

from typing import NamedTuple

from ckptool.checkpoint import Checkpoint
from ckptool.errors import CkptError


class Remains(NamedTuple):
    """A checkpoint as far as it can be read, and {storage key: what became of it} of those that
    are not there in full. The others are as long as they must be; whether their bytes are right
    is not known where they have a recorded checksum that nobody has compared yet.
    """

    checkpoint: Checkpoint
    lost: dict[str, str]


def unreadable(text: str) -> CkptError:
    """The error for a file of which no tensor can be told."""
    return CkptError(text, slug="truncated")
