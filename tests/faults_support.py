"""Faults put under the command by strace: which calls it makes, one of them failing, what stays.

Every run is the real command in a process of its own. The reference run says which calls touch
the folder (and their numbers, which strace counts for each thread); a faulted run has one of
them fail, lie, or be where a signal arrives.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field

import torch
from fixtures.make_fixtures import save
from verbs_support import LEGACY, ROOT

import ckptool

CALLS = (
    "write", "copy_file_range", "sendfile", "pread64", "openat", "fsync", "fchmod", "fchown",
    "close", "rename", "link", "unlink", "ftruncate", "mkdir", "rmdir", "flock",
)  # fmt: skip
_LINE = re.compile(r"(\d+)\s+(\w+)\((.*)")
_TEMP = re.compile(r"\.ckptool-\d+(-\d+)?\.tmp$")


@functools.cache
def why_no_strace():
    """Why there can be no such test here; empty where there can."""
    strace = shutil.which("strace")
    if sys.platform != "linux" or strace is None:
        return "needs strace (Debian's package strace)"
    words = ["-f", "--seccomp-bpf", "-o", os.devnull, "-e", "trace=write"]
    words += ["-e", "inject=write:error=EIO:when=9999", "true"]
    done = subprocess.run([strace, *words], capture_output=True, text=True, check=False)
    return f"strace may not trace here: {done.stderr.strip()[:200]}" if done.returncode else ""


def environment():
    """The same calls in every run."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}


def command(words, cwd, *before, env=None):
    words = [*before, sys.executable, "-m", "ckptool", *map(str, words)]
    return subprocess.run(
        words, cwd=cwd, env=env or environment(), capture_output=True, check=False, timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the back has none
    )  # fmt: skip


# -- what is converted -------------------------------------------------------------------------
def weights():
    """Enough for more than thirty writes; a view that is gathered, and small ones."""
    sd = {f"module.l{i}": torch.arange(17_000.0) + i for i in range(15)}
    return {**sd, "module.turned": torch.arange(2000.0).view(40, 50).t(), "module.n": torch.ones(3)}


def lay_inputs(folder):
    """The inputs of all rows."""
    obj = {"epoch": 3, "state_dict": weights()}
    save(obj, folder / "in.pth", "cuda:0")
    save(obj, folder / "legacy.pth", "cuda:0", **LEGACY)
    ckptool.convert(folder / "in.pth", folder / "in.safetensors")
    for name in ("edited.pth", "torn.pth"):
        shutil.copy(folder / "in.pth", folder / name)
        ckptool.convert(folder / name, in_place=True, to_cpu=True)


def _fresh(folder, row):
    """A folder as it is before the command."""
    there = folder / "there"
    shutil.rmtree(there, ignore_errors=True)
    there.mkdir()
    (there / "keep").write_bytes(b"a stranger")
    row.lay(folder, there)
    return there


def _old_file(name):
    return lambda folder, there: (there / name).write_bytes(b"old")


def _old_shards(folder, there):
    ckptool.convert(folder / "in.pth", there / "out", to="shards", max_shard_size=400_000)


def _copied(name):
    return lambda folder, there: shutil.copy(folder / name, there / "net.pth")


def _torn(folder, there):
    """As a SIGKILL in the middle of an edit leaves it: half of the new end, and a journal."""
    from ckptool import journals
    from ckptool.places import open_source

    data = (folder / "torn.pth").read_bytes()
    former = (folder / "in.pth").stat().st_size
    path = there / "net.pth"
    path.write_bytes(data[: (former + len(data)) // 2])
    with open_source(str(path)) as source:
        journals.Journal(str(path), journals.facts(source, former)).place(fsync=False)


@dataclass(frozen=True)
class Row:
    """One kind of write: its words, what lies there before, which file is the last to appear."""

    words: tuple
    lay: object = field(default=lambda folder, there: None)
    in_place: bool = False
    several: bool = False


OUT = ("-f", "-o", "there/out.pth")
SAFE = ("-f", "-o", "there/out.safetensors")
SHARDS = ("-f", "--to", "shards", "-o", "there/out")
ROWS = {
    "zip to zip": Row(("convert", "in.pth", "--to-cpu", *OUT), _old_file("out.pth")),
    "copied by the kernel": Row(("convert", "in.safetensors", "--rename", "module", "encode", *SAFE), _old_file("out.safetensors")),
    "zip to a new zip": Row(("convert", "in.pth", "--dtype", "float16", *OUT)),
    "legacy to zip": Row(("convert", "legacy.pth", "--to", "zip", *OUT), _old_file("out.pth")),
    "legacy to legacy": Row(("convert", "legacy.pth", "--to-cpu", *OUT), _old_file("out.pth")),
    "zip to safetensors": Row(("convert", "in.pth", *SAFE), _old_file("out.safetensors")),
    "safetensors to zip": Row(("convert", "in.safetensors", *OUT), _old_file("out.pth")),
    "zip to shards": Row(("convert", "in.pth", "--dtype", "float16", "--max-shard-size", "200kB", *SHARDS), _old_shards, several=True),
    "zip to new shards": Row(("convert", "in.pth", "--max-shard-size", "400kB", *SHARDS), several=True),
    "in place": Row(("convert", "there/net.pth", "--to-cpu", "--in-place"), _copied("in.pth"), in_place=True),
    "undo": Row(("convert", "there/net.pth", "--undo"), _copied("edited.pth"), in_place=True),
    "recover": Row(("convert", "there/net.pth", "--recover"), _torn, in_place=True),
}  # fmt: skip


# -- one run -----------------------------------------------------------------------------------
def tree(there):
    """{name: bytes} of all files; a folder is {name/: b""}."""
    found = {}
    for path in sorted(there.rglob("*")):
        name = str(path.relative_to(there))
        found[name if path.is_file() else f"{name}/"] = path.read_bytes() if path.is_file() else b""
    return found


def temps(state):
    return sorted(name for name in state if _TEMP.search(name))


@dataclass
class After:
    """What a run left and said."""

    status: int
    said: dict
    text: str
    state: dict
    fired: bool

    @property
    def slug(self):
        return self.said.get("error", {}).get("slug", "")


class Bench:
    """One row: its reference run, and runs with a fault."""

    def __init__(self, folder, row):
        self.folder, self.row = folder, row
        # Compiled modules of its own, complete before the calls are counted: another process
        # that writes some meanwhile would change how many files are opened.
        self.env = {**environment(), "PYTHONPYCACHEPREFIX": str(folder.parent / "pycache")}
        _fresh(folder, row)
        command([*row.words, "--json"], folder, env=self.env)
        self.env["PYTHONDONTWRITEBYTECODE"] = "1"
        there = _fresh(folder, row)
        self.old = tree(there)
        trace = folder / "trace"
        done = command(
            [*row.words, "--json"], folder,
            "strace", "-f", "--seccomp-bpf", "-y", "-s", "0", "-o", trace, "-e", f"trace={','.join(CALLS)}", env=self.env,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode()
        self.new = tree(there)
        assert self.new != self.old
        assert temps(self.new) == []
        self.lines = trace.read_text(errors="replace").splitlines()

    def lay(self):
        there = self.folder / "there"
        shutil.rmtree(there)
        _fresh(self.folder, self.row)
        self.old = tree(there)  # a journal holds the number of the file: other bytes each time
        return there

    def points(self, call, mark=None):
        """Numbers of the main thread's calls that touch the folder; with a `mark` in the line."""
        main, found, number = None, [], 0
        for line in self.lines:
            match = _LINE.match(line)
            if match is None:
                continue
            main = main or match.group(1)
            if match.group(1) != main or match.group(2) != call:
                continue
            number += 1
            if "/there" in match.group(3) and (mark is None or mark in match.group(3)):
                found.append(number)
        return found

    def run(self, call, how, number):
        """The command with one fault."""
        there = self.lay()
        trace = self.folder / "trace"
        quick = () if "signal" in how else ("--seccomp-bpf",)  # which drops injected signals
        done = command(
            [*self.row.words, "--json"], self.folder,
            "strace", "-f", *quick, "-s", "0", "-o", trace, "-e", f"trace={call}",
            "-e", f"inject={call}:{how}:when={number}", env=self.env,
        )  # fmt: skip
        said = {}
        if done.stdout:
            said = json.loads(done.stdout)
        text = (done.stdout + done.stderr).decode()
        trace_text = trace.read_text(errors="replace")
        fired = "(INJECTED)" in trace_text or "--- SIG" in trace_text or "+++ killed" in trace_text
        return After(done.returncode, said, text, tree(there), fired)

    def again(self, *words):
        """The command once more, undisturbed, on what was left."""
        done = command([*(words or self.row.words), "--json"], self.folder, env=self.env)
        said = json.loads(done.stdout) if done.stdout else {}
        return After(
            done.returncode, said, done.stderr.decode(), tree(self.folder / "there"), False
        )
