"""All hostile cases, by subject; `python -m hostile.corpus FOLDER` (in tests/) writes them.

The table is the specification: for every row, tests/hostile/test_corpus.py asks each verb.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hostile import (
    archives,
    calls,
    controls,
    doubles,
    files,
    headers,
    resources,
    streams,
    tensors,
    texts,
)
from hostile.cases import Case, Content

CORPUS: dict[str, Case] = {
    f"{subject}/{case.name}": case
    for subject, cases in (
        ("control", controls.CASES),
        ("call", calls.CASES),
        ("legacy", streams.LEGACY),
        ("stream", streams.CASES),
        ("zip", archives.CASES),
        ("tensor", tensors.CASES),
        ("resource", resources.CASES),
        ("double", doubles.CASES),
        ("text", texts.CASES),
        ("header", headers.CASES),
        ("file", files.CASES),
    )
    for case in cases
}


def lay(case: Case, folder: Path) -> Path:
    """Write the files of a case into an empty folder; the path to be opened."""
    for name, content in case.files().items():
        put(folder / name, content)
    return folder / case.file


def put(path: Path, content: Content) -> None:
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content.kind == "fifo":
        os.mkfifo(path)
    elif content.kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(content.target)


if __name__ == "__main__":
    for label, case in CORPUS.items():
        home = Path(sys.argv[1], label)
        home.mkdir(parents=True)
        lay(case, home)
    print(f"{len(CORPUS)} cases in {sys.argv[1]}")
