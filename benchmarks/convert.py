"""`ckptool convert --to-cpu` beside the script people write, and `cp`: same folder, same bytes.

python benchmarks/convert.py [--dir FOLDER] [--rounds 5] [--small] [--results FILE]
"""

import os
import subprocess
import sys
from contextlib import suppress

# This folder must not stay on the path: inspect.py would hide the standard library's inspect.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE), *(p for p in sys.path if os.path.abspath(p) != HERE)]

from benchmarks import common  # noqa: E402

SCRIPT = """
import os, sys, torch
source, target, mmap, sync = sys.argv[1:5]
loaded = torch.load(source, map_location="cpu", mmap=mmap == "mmap")
weights = loaded["state_dict"]
loaded["state_dict"] = {key.removeprefix("module."): value for key, value in weights.items()}
with open(target, "wb") as f:
    torch.save(loaded, f)
    if sync == "sync":
        f.flush()
        os.fsync(f.fileno())
"""
OURS = "ckptool convert --to-cpu"
COPY = "cp"


def can_skip_sync() -> bool:
    """Whether `convert` has --no-fsync."""
    command = (*common.CKPTOOL, "convert", "--help")
    env = {**os.environ, "PYTHONPATH": common.ROOT}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    return "--no-fsync" in done.stdout


def contenders(path: str, out: str, sync: bool) -> list[common.Contender]:
    """With `sync` everyone waits for the disk before the end; without it nobody does."""
    word = "sync" if sync else "nosync"
    waits = sync or not can_skip_sync()
    ours = (*common.CKPTOOL, "convert", path, "--to-cpu", "-o", out, "-f")
    ours += () if waits else ("--no-fsync",)
    copy = 'cp "$0" "$1" && sync "$1"' if sync else 'cp "$0" "$1"'
    script = (sys.executable, "-c", SCRIPT, path, out)
    commands = {
        OURS: ours,
        "ckptool convert --to-cpu --no-check": (*ours, "--no-check"),
        "torch.load, rename, torch.save": (*script, "plain", word),
        "torch.load(mmap=True), rename, torch.save": (*script, "mmap", word),
        COPY: ("sh", "-c", copy, path, out),
    }

    def clear() -> None:
        with suppress(FileNotFoundError):
            os.unlink(out)

    return [common.Contender(name, argv, clear) for name, argv in commands.items()]


def section(path: str, out: str, sync: bool, rounds: int) -> str:
    rows = common.compete(contenders(path, out, sync), rounds)
    text = common.table(rows, OURS)
    copies = next(row for row in rows if row.name == COPY)
    if common.noisy(copies):
        walls = ", ".join(f"{wall:.3f}" for wall in copies.walls)
        text += f"\n\nnoisy: `cp` alone took {walls} s; trust no ratio of wall times here."
    if not sync and not can_skip_sync():
        text += "\n\nckptool waited for the disk here too: it has no --no-fsync yet."
    return text


def main() -> None:
    given = common.parser(__doc__.splitlines()[0]).parse_args()
    with common.work_folder(given.dir) as folder:
        files = common.make_files(folder, given.small)
        out = os.path.join(folder, "out.pth")
        sections = {}
        for name, path in files.items():
            for sync in (True, False):
                title = f"{name}, {os.path.getsize(path) / 1e6:.0f} MB, "
                title += "on the disk before the end (fsync)" if sync else "no fsync"
                sections[title] = section(path, out, sync, given.rounds)
        with suppress(FileNotFoundError):
            os.unlink(out)
        common.report("convert", sections, given, folder)


if __name__ == "__main__":
    main()
