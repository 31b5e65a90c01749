"""Writing torch's old stream: head, main pickle, keys, and the storages one after another.

Knows: the order of its parts (formats 3.1). Must not know: verbs.
"""

from __future__ import annotations

from struct import pack

from ckptool.checkpoint import Changes, Checkpoint
from ckptool.errors import OutputError
from ckptool.formats.contents import Filler
from ckptool.formats.homes import Home
from ckptool.formats.readback import compare
from ckptool.formats.rewrite import Rewritten, rewrite
from ckptool.formats.torch_legacy import MAGIC, PROTOCOL_VERSION, Stream
from ckptool.limits import Limits
from ckptool.pickles.downgrade import add_spellings
from ckptool.pickles.nodes import Walked
from ckptool.pickles.splice import Edits, splice
from ckptool.pickles.write import integer, plain, whole
from ckptool.places import Source
from ckptool.plans import Copy, Literal, Output, Part, Plan, total_size
from ckptool.spans import Span

# torch/serialization.py, _legacy_save; no loader reads it
_SYSTEM = {
    "protocol_version": PROTOCOL_VERSION,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}


def write(checkpoint: Checkpoint, changes: Changes) -> tuple[Plan, Rewritten]:
    """A stream of any checkpoint that is a pickle. From a stream whose storages stay: the
    edited main pickle and the rest copied; trailing bytes are left out.
    """
    rewritten = rewrite(checkpoint, changes, "torch-legacy")
    if rewritten.housing is None:
        parts = _edited(checkpoint, rewritten)
    else:
        inline = getattr(checkpoint.handle.container, "inline", None)
        parts = stream_parts(rewritten.data, rewritten.housing.homes, Filler(changes.check, inline))
    return Plan(checkpoint.sources, (Output("", parts, total_size(parts)),)), rewritten


def stream_parts(main: bytes, homes: tuple[Home, ...], filler: Filler) -> tuple[Part, ...]:
    """Head, main pickle, list of keys, then count and bytes of each storage."""
    head = [whole(integer(MAGIC)), whole(integer(PROTOCOL_VERSION)), whole(plain(_SYSTEM)), main]
    keys = whole(plain([str(number) for number in range(len(homes))]))
    parts: list[Part] = [Literal(b"".join(head) + keys)]
    for home in homes:
        parts.append(Literal(pack("<q", home.length)))
        parts += filler.parts(home)
    return tuple(parts)


def _edited(checkpoint: Checkpoint, rewritten: Rewritten) -> tuple[Part, ...]:
    head, data = _head(checkpoint, rewritten), _data(checkpoint)
    copied = (Copy(0, data, None, "the storages"),) if data.size else ()
    return (Literal(head), *copied)


def confirm(checkpoint: Checkpoint, rewritten: Rewritten, written: Source, limits: Limits) -> None:
    """Read the pickles back and compare the size. Raises OutputError."""
    if rewritten.housing is not None:
        compare(written, rewritten.expected, rewritten.housing, limits)
        return
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
