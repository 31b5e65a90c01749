r"""Text from a file made safe for a terminal: control, direction and invisible code points as \x1b.

Knows: code points. Must not know: anything else. `errors` uses it too: a traceback is a screen.
"""

from __future__ import annotations

import re

# C0, DEL and C1; Arabic letter mark; zero-width and direction marks; separators and embeddings;
# isolates; the byte order mark; tags; lone surrogates. CJK and accents stay as they are.
_CLASS = (
    "\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f\x7f-\x9f"
)
UNSAFE_IN_JSON = re.compile(f"[{_CLASS}]")
"""The code points that a JSON encoder leaves as they are (it escapes C0 itself)."""

UNSAFE = re.compile(f"[\x00-\x1f{_CLASS}]")


def escape(text: str) -> str:
    r"""`text` with every control, direction and invisible code point as \x1b, \u202e, ..."""
    return UNSAFE.sub(_escaped, text) if UNSAFE.search(text) else text


def _escaped(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
