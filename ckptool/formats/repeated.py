"""What the memo of a pickle repeats, weighed: three bytes there can be a megabyte in a report.

Knows: sizes. Must not know: what is weighed.
"""

from __future__ import annotations

from typing import Any

from ckptool.errors import LimitExceeded

ITEM_BYTES = 24
"""About, of one thing in a report."""


class Weigher:
    """Bytes that a report takes: `bytes` of all that was told. What is told again may take
    `most_bytes`; `what` names it in the error.
    """

    def __init__(self, what: str, most_bytes: int) -> None:
        self.bytes = 0
        self._again_bytes = 0
        self._what = what
        self._most_bytes = most_bytes
        self._met: set[int] = set()

    def weigh(self, node: Any, size_bytes: int) -> None:
        """Count what a node takes, by itself. Raises as `repeat`."""
        if id(node) in self._met:
            self.repeat(size_bytes)
        else:
            self._met.add(id(node))
            self.bytes += size_bytes

    def repeat(self, size_bytes: int) -> None:
        """Count what is told once more. Raises LimitExceeded for much of it."""
        self.bytes += size_bytes
        self._again_bytes += size_bytes
        if self._again_bytes > self._most_bytes:
            text = f"{self._what} of more than {self._most_bytes:,} bytes that are repeated"
            raise LimitExceeded("repeated-values", text)
