"""Run as a script: edits a file in a child that kills itself at each call that writes.

Prints JSON, a row for each kill: where, the file and its journal afterwards, what a reader
sees, and the file after --recover. Without torch, so that forking is cheap and safe.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

from inplace_support import edit, journal

from ckptool.errors import CkptError
from ckptool.formats import read
from ckptool.verbs.inplace import recover
from ckptool.verbs.opening import open_place

CALLS = ("write", "fsync", "link", "unlink", "lseek", "ftruncate")
REAL = {name: getattr(os, name) for name in CALLS}


class Killer:
    """Counts calls; at number `at` it kills this process, before or after the call, or in the
    middle of what it writes.
    """

    def __init__(self, at, when):
        self.at, self.when, self.count = at, when, 0

    def wrap(self, name):
        def call(*args, **options):
            self.count += 1
            if self.count != self.at:
                return REAL[name](*args, **options)
            if self.when == "after":
                REAL[name](*args, **options)
            if self.when == "within" and name == "write":
                REAL[name](args[0], bytes(args[1])[: len(args[1]) // 2])
            with Path("killed").open("w") as stream:
                stream.write(name)
            os.kill(os.getpid(), signal.SIGKILL)
            return None

        return call


def killed(path, at, when):
    """The call at which a child was killed, or None when it ended by itself."""
    Path("killed").unlink(missing_ok=True)
    child = os.fork()
    if not child:
        killer = Killer(at, when)
        for name in CALLS:
            setattr(os, name, killer.wrap(name))
        edit(path, "cuda:7", strip=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        assert status == 0, status
        return None
    return Path("killed").read_text()


def seen(path):
    """How large the file is to a reader, with notes; the error that reading gives."""
    source, notes = open_place(str(path))
    with source:
        try:
            return [read(source).size_bytes, [note.slug for note in notes]]
        except CkptError as error:
            return [str(error), []]


def one(original, at, when):
    """A row of the report, or None when there are fewer calls."""
    path = Path("net.pth")
    for left in Path().glob(".net.pth*"):
        left.unlink()
    shutil.copyfile(original, path)
    call = killed(path, at, when)
    if call is None:
        return None
    state = path.read_bytes()
    row = {
        "at": at, "when": when, "call": call, "size": len(state), "seen": seen(path),
        "kept": state.startswith(Path(original).read_bytes()), "journal": journal(path).exists(),
        "untouched": state == path.read_bytes(), "recovered": None,
    }  # fmt: skip
    with contextlib.suppress(CkptError):
        row["recovered"] = recover(str(path))[1]
    row["former"] = path.read_bytes() == Path(original).read_bytes()
    row["left"] = sorted(str(p) for p in Path().glob(".net.pth*"))
    return row


def main(original):
    rows = []
    for when in ("before", "within", "after"):
        for at in range(1, 100):
            row = one(original, at, when)
            if row is None:
                break
            if when != "within" or row["call"] == "write":
                rows.append(row)
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
