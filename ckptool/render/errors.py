"""An error as the one line a person reads, and its hint as another.

Knows: the look. Must not know: files, verbs.
"""

from __future__ import annotations

from ckptool.errors import CkptError
from ckptool.render.parts import Report
from ckptool.render.text import LONG, show

_PLACES = ("key", "member", "offset")


def error_lines(err: Report) -> str:
    """`ckptool: FILE: TEXT (place)`, then `  hint: ...` where there is one.

    `err` has `file`, `text`, `where` (key, member, byte offset) and `hint`; all but `text`
    may be None.
    """
    where = {name: (err.get("where") or {}).get(name) for name in _PLACES}
    lines = [f"ckptool: {show(str(CkptError(err['text'], path=err.get('file'), **where)), LONG)}"]
    if err.get("hint"):
        lines.append(f"  hint: {show(err['hint'], LONG)}")
    return "\n".join(lines)
