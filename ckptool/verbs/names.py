"""Reading a file of names for --rename-file.

Knows: that it is small JSON. Must not know: checkpoints, printing.
"""

from __future__ import annotations

from ckptool.errors import LimitExceeded
from ckptool.limits import DEFAULT
from ckptool.places import open_source
from ckptool.renaming import parse_rename_file


def read_names(path: str) -> tuple[tuple[str, str], ...]:
    """The (old, new) entries of the file. Raises UsageError, SpecialFile, LimitExceeded."""
    with open_source(path) as source:
        if source.size > DEFAULT.header_bytes:
            raise LimitExceeded("names", f"a file of names of {source.size:,} bytes", path=path)
        return parse_rename_file(source.read(0, source.size), path)
