"""Rewriting torch's old stream: head, edited main pickle, and the storages as they are.

Knows: the order of its parts. Must not know: verbs.
"""

from __future__ import annotations

from ckptool.checkpoint import Changes, Checkpoint
from ckptool.errors import OutputError
from ckptool.formats.rewrite import Rewritten, rewrite
from ckptool.formats.torch_legacy import Stream
from ckptool.limits import Limits
from ckptool.pickles.downgrade import add_spellings
from ckptool.pickles.nodes import Walked
from ckptool.pickles.splice import Edits, splice
from ckptool.places import Source
from ckptool.plans import Copy, Literal, Output, Part, Plan, total_size
from ckptool.spans import Span


def edit(checkpoint: Checkpoint, changes: Changes) -> tuple[Plan, Rewritten]:
    """Five pickles, then the rest copied. Trailing bytes are left out."""
    rewritten = rewrite(checkpoint, changes)
    head, data = _head(checkpoint, rewritten), _data(checkpoint)
    parts: tuple[Part, ...] = (Literal(head),)
    if data.size:
        parts += (Copy(0, data, None, "the storages"),)
    return Plan(checkpoint.sources, (Output("", parts, total_size(parts)),)), rewritten


def confirm(checkpoint: Checkpoint, rewritten: Rewritten, written: Source, limits: Limits) -> None:
    """Read the pickles back and compare the size. Raises OutputError."""
    head = _head(checkpoint, rewritten)
    if written.size != len(head) + _data(checkpoint).size or written.read(0, len(head)) != head:
        raise OutputError("self-check failed: the stream was not written whole")


def _head(checkpoint: Checkpoint, rewritten: Rewritten) -> bytes:
    """The five pickles, the main one edited."""
    pickles = checkpoint.handle.container.pickles
    return b"".join(map(_spelled, pickles[:3])) + rewritten.data + _spelled(pickles[4])


def _data(checkpoint: Checkpoint) -> Span:
    """The storages, counts included."""
    stream: Stream = checkpoint.handle.container
    return Span(stream.pickles[4].end, stream.data_end - stream.pickles[4].end)


def _spelled(walked: Walked) -> bytes:
    """One of the four small pickles; protocols 3 to 5 come out as 2."""
    edits = Edits()
    if walked.protocol >= 3 and add_spellings(walked, edits) is not None:
        edits = Edits()
    return splice(walked, edits)
