"""What Python 2 wrote as byte strings, spelled as Python 3 reads it (formats 3.2, W7).

Knows: which byte strings are text and which are numbers of numpy. Must not know: containers.
Text is UTF-8 where it can be, else Latin-1, as everywhere in ckptool; a payload of numpy stays
bytes, since no text may stand for it.
"""

from __future__ import annotations

from typing import Any

from ckptool.formats.measures import global_name
from ckptool.pickles.downgrade import bytes_literal, opcodes
from ckptool.pickles.nodes import TEXT_OPS, Raw, Tup, Walked, text_of
from ckptool.pickles.rare import string_of
from ckptool.pickles.splice import Edits, text_literal

_PAYLOAD_AT = {"scalar": 1, "_reconstruct": 4}  # in the arguments; in the state


def add_unicode(walked: Walked, edits: Edits) -> None:
    """Add to `edits` what turns every byte string into text, or into bytes where it is numbers."""
    payloads = _payloads(walked)
    for start, end in opcodes(walked):
        if walked.data[start] in TEXT_OPS:
            value = _value(walked.data, start, end)
            node = Raw(walked.data[start], value, 0)
            new = bytes_literal(value) if start in payloads else text_literal(text_of(node) or "")
            edits.spellings[start] = (end, new, None)
    if edits.spellings:
        edits.decoded = True
        edits.respell = _respell


def _value(data: bytes, start: int, end: int) -> bytes:
    if data[start] == 0x53:  # STRING: quotes around it, a newline behind
        return string_of(data[start + 1 : end - 1], start)
    return data[start + {0x55: 2, 0x54: 5}[data[start]] : end]


def _respell(node: Any) -> bytes:
    text = text_of(node)
    return bytes_literal(node.value) if text is None else text_literal(text)


def _payloads(walked: Walked) -> set[int]:
    """Where the bytes of numpy's scalars and arrays stand."""
    found = set()
    for call in walked.calls:
        module, _, name = (global_name(call.fn) or "").rpartition(".")
        at = _PAYLOAD_AT.get(name)
        if at is None or not module.startswith("numpy."):
            continue
        args = call.args if name == "scalar" else call.state.value if call.state else None
        if type(args) is Tup and len(args.items) > at:
            found.add(args.starts[at])
    return found
