"""Names in a line of text.

Knows: how many are worth reading. Must not know: anything else.
"""

from __future__ import annotations

from collections.abc import Sequence


def some(names: Sequence[str]) -> str:
    """The first four names, quoted, and how many more there are."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(f"'{name}'" for name in names[:4]) + more
