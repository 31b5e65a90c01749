"""What is asked of every mutated file: all that `inspect`, `verify` and a planned conversion do.

The rule is one: an answer or a CkptError, in bounded time and memory, and `inspect` and `verify`
agree on what is refused. Whatever else happens is a Finding. Needs no torch.
"""

from __future__ import annotations

import json
import os
import resource
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path

import ckptool
from ckptool.api_verify import verify

SECONDS = 3.0  # processor time of one file, all questions together; coverage counting costs half
GROWTH = 256 << 20  # bytes of memory that one file may take on top of what was ever taken
TARGETS = ("zip", "legacy", "safetensors", "shards")
_SUFFIXES = {"zip": "pth", "legacy": "pt", "safetensors": "safetensors", "shards": "shards"}
_HOME = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class Finding(Exception):
    """Something that no input may cause."""


class Desk:
    """A folder in memory where each input is put, and the count of answers."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="ckptool-fuzz-", dir=_HOME)
        self.path = Path(self._folder.name)
        self.out = self.path / "out"
        self.out.mkdir()
        self.answers = Counter()

    def close(self):
        self._folder.cleanup()

    def put(self, name, data):
        """The path of a file with these bytes."""
        path = self.path / name
        path.write_bytes(data)
        return str(path)

    def ask(self, path, really=False):
        """Every question about one path. Raises Finding, and whatever else ckptool lets out."""
        started, size = time.process_time(), _peak()
        refusal = self._inspect(path)
        checked = self._verify(path)
        if (refusal is not None) != (checked == 2):
            raise Finding(f"inspect says {refusal!r}, verify exits {checked}")
        self.answers["read" if refusal is None else refusal.slug] += 1
        if refusal is None:
            for target in TARGETS:
                self._convert(path, target, really)
        spent, grown = time.process_time() - started, _peak() - size
        if spent > SECONDS or grown > GROWTH:
            raise Finding(f"{spent:.1f} s and {grown >> 20} MiB for one file")

    def _inspect(self, path):
        try:
            found = ckptool.inspect(path, index=True)
        except ckptool.CkptError as error:
            _presentable(str(error))
            return error
        json.dumps(found.to_dict(), allow_nan=False)
        _presentable(str(found))
        return None

    def _verify(self, path):
        try:
            found = verify(path, finite=True)
        except ckptool.CkptError as error:
            return error.exit_status
        json.dumps(found.to_dict(), allow_nan=False)
        _presentable(str(found))
        return found.exit_status

    def _convert(self, path, target, really):
        output = self.out / f"net.{_SUFFIXES[target]}"
        try:
            done = ckptool.convert(path, output, to=target, to_cpu=target == "zip", force=True,
                                   fsync=False, dry_run=not really)  # fmt: skip
        except ckptool.CkptError as error:
            _presentable(str(error))
            self.answers[f"{target}: {error.slug}"] += 1
            if list(self.out.iterdir()):
                raise Finding(f"a refusal left {list(self.out.iterdir())}") from error
            return
        json.dumps(done.to_dict(), allow_nan=False)
        _presentable(str(done))
        self.answers[f"{target}: made"] += 1
        if really:
            self._clear()

    def _clear(self):
        for path in sorted(self.out.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


def _peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _presentable(text):
    """No control byte of a file may reach a terminal."""
    if any((ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 for c in text):
        raise Finding(f"control characters on the screen: {text!r}")


def chosen(data):
    """True for one input in eight, always the same ones: what costs more is done for those."""
    return zlib.crc32(data) % 8 == 0
