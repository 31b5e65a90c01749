"""Rewriting torch's old stream: head, edited main pickle, and the storages as they are.

Knows: the order of its parts. Must not know: verbs.
"""

from __future__ import annotations

from ckptool.checkpoint import Changes, Checkpoint
from ckptool.formats.rewrite import Rewritten, rewrite
from ckptool.formats.torch_legacy import Stream
from ckptool.pickles.downgrade import add_spellings
from ckptool.pickles.nodes import Walked
from ckptool.pickles.splice import Edits, splice
from ckptool.plans import Copy, Literal, Output, Part, Plan, total_size
from ckptool.spans import Span


def edit(checkpoint: Checkpoint, changes: Changes) -> tuple[Plan, Rewritten]:
    """Head, edited main pickle, rest: three parts. Trailing bytes are left out."""
    rewritten = rewrite(checkpoint, changes)
    stream: Stream = checkpoint.handle.container
    last = stream.pickles[4]
    head = b"".join(_spelled(walked) for walked in stream.pickles[:3])
    literal = Literal(head + rewritten.data + _spelled(last))
    size = stream.data_end - last.end
    parts: tuple[Part, ...] = (literal,)
    if size:
        parts += (Copy(0, Span(last.end, size), None, "the storages"),)
    return Plan(checkpoint.sources, (Output("", parts, total_size(parts)),)), rewritten


def _spelled(walked: Walked) -> bytes:
    """One of the four small pickles; protocols 3 to 5 come out as 2."""
    edits = Edits()
    if walked.protocol >= 3 and add_spellings(walked, edits) is not None:
        edits = Edits()
    return splice(walked, edits)
