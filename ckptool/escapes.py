r"""Text from a file made safe for a terminal: control, direction and invisible code points as \x1b.

Knows: code points. Must not know: anything else. `errors` uses it too: a traceback is a screen.
"""

from __future__ import annotations

import re

# C0, DEL and C1; formats and direction marks; separators and lone surrogates; what Unicode calls
# ignorable by default (joiners, fillers, variation selectors, tags); empty Braille; every space but
# ours. CJK, accents and letters stay as they are.
_CLASS = (
    "\x7f-\xa0\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u1680\u17b4\u17b5"
    "\u180b-\u180f\u2000-\u200f\u2028-\u202f\u205f-\u206f\u2800\u3000\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff"
    "\uffa0\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U00016fe4\U0001bca0-\U0001bca3"
    "\U0001d159\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
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
