"""One tensor a line, tab separated, for `cut`, `awk` and `grep`.

Knows: the order of the fields. Must not know: files, verbs. No headings, nothing cut short.
"""

from __future__ import annotations

from ckptool.escapes import escape
from ckptool.render.parts import Report, shown_tensors
from ckptool.render.stats import fields, is_measured

FIELDS = ("key", "shape", "dtype", "device", "size_bytes")


def plain(report: Report) -> str:
    """key, shape, dtype, device and bytes of each tensor, then what --stats and --hash tell of it;
    `?` where unknown.
    """
    tensors = shown_tensors(report)
    asked = is_measured(tensors)
    rows = ([*(t.get(name) for name in FIELDS), *fields(t, *asked)] for t in tensors)
    return "\n".join("\t".join(map(_field, row)) for row in rows)


def _field(value: object) -> str:
    return "?" if value is None else escape(str(value))
