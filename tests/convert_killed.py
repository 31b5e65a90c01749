"""Run as a script: converts one file in children that kill themselves at calls that write, and in
this process with an interrupt at the same calls.

Prints JSON, a row for each: where, what lies in the folder afterwards. Without torch, so that
forking is cheap and safe.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import ckptool
from ckptool import writing

CALLS = ("write", "fsync", "replace", "open", "fchmod", "unlink", "mkdir", "close")
REAL = {name: getattr(os, name) for name in CALLS}
COPIERS = writing.COPIERS
INDEX = "out/model.safetensors.index.json"
WHEN = ("before", "within", "after")


class Stopper:
    """Counts calls; at number `at` it ends the run, before or after the call or in the middle
    of what it writes; 0 only counts.
    """

    def __init__(self, at, when, stop):
        self.at, self.when, self.stop, self.count = at, when, stop, 0
        for name in CALLS:
            setattr(os, name, self.wrap(REAL[name], halved=name == "write"))
        writing.COPIERS = tuple(self.wrap(way, copies=True) for way in COPIERS)

    def wrap(self, real, halved=False, copies=False):
        def call(*args, **options):
            self.count += 1
            if self.count != self.at:
                return real(*args, **options)
            if self.stop is interrupt and real is REAL["open"]:
                self.stop()  # an interrupt right after it leaves a temp file, which the next run names
            if self.when == "within" and halved:
                REAL["write"](args[0], bytes(args[1])[: len(args[1]) // 2])
            if self.when == "within" and copies:
                real(*args[:3], max(args[3] // 2, 1))
            try:
                return real(*args, **options) if self.when == "after" else None
            finally:
                self.stop()

        return call

    def undo(self):
        for name in CALLS:
            setattr(os, name, REAL[name])
        writing.COPIERS = COPIERS


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt():
    raise KeyboardInterrupt


def state(folder):
    """{name: bytes} of all files."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def run(words, at, when, stop):
    stopper = Stopper(at, when, stop)
    try:
        ckptool.convert("in", "there/out", force=True, **words)
    finally:
        stopper.undo()
    return stopper.count


def lay(old):
    """The folder as it was before."""
    shutil.rmtree("there", ignore_errors=True)
    for name, data in old.items():
        path = Path("there", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def one(words, at, when, old, new, stop):
    lay(old)
    if stop is kill:
        child = os.fork()
        if not child:
            run(words, at, when, kill)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        stopped = os.WIFSIGNALED(status)
    else:
        try:
            run(words, at, when, interrupt)
            stopped = False
        except KeyboardInterrupt:
            stopped = True
    found = state(Path("there"))
    named = {k: v for k, v in found.items() if ".ckptool-" not in k}
    row = {
        "at": at, "when": when, "stop": stop.__name__, "stopped": stopped,
        "left": sorted(set(found) - set(named)),
        "old": named == old, "new": named == new,
        "whole": all(v in (old.get(k), new.get(k)) for k, v in named.items()),
        "missing": sorted((set(old) & set(new)) - set(named)),
        "index_is_last": named.get(INDEX) in (None, old.get(INDEX)) or named == new,
        "folder": Path("there/out").exists(),
    }  # fmt: skip
    if at % 4 == 0:
        again = ckptool.convert("in", "there/out", force=True, fsync=False, **words)
        named = {k: v for k, v in state(Path("there")).items() if ".ckptool-" not in k}
        row["again"] = named == new
        row["said"] = [note.text for note in again.notes if note.slug == "stale-temp"]
    return row


def main(words, fresh, seed):
    """`words` are keywords of convert; `fresh`: there is no old output."""
    words = json.loads(words)
    Path("there").mkdir()
    ckptool.convert("in", "there/out", keep_dtype="**", dtype="float64", **words)
    old = state(Path("there"))
    if fresh == "fresh":
        old = {}
    words["dtype"] = "float16"
    lay({"keep": b"a stranger", **old})
    count = run(words, 0, "", kill)
    new = state(Path("there"))
    rng = random.Random(int(seed))
    points = sorted(rng.sample([(at, when) for at in range(1, count + 1) for when in WHEN], 20))
    rows = [
        one(words, at, when, {"keep": b"a stranger", **old}, new, stop)
        for number, (at, when) in enumerate(points)
        for stop in ((kill, interrupt) if number % 3 == 0 else (kill,))
    ]
    json.dump({"count": count, "rows": rows}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
