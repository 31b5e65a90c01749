"""`ckptool inspect -r` and `verify -r` over 5,000 small files beside `torch.load` of each.

python benchmarks/many.py [--dir FOLDER] [--rounds 5] [--small] [--results FILE]
"""

import os
import subprocess
import sys

# This folder must not stay on the path: inspect.py would hide the standard library's inspect.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE), *(p for p in sys.path if os.path.abspath(p) != HERE)]

from benchmarks import common  # noqa: E402

MAKE = """
import os, shutil, sys, torch
folder, count, tensors, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
os.makedirs(folder)
state = {f"layers.{i // 2}.{('weight', 'bias')[i % 2]}": torch.ones(8, 4) for i in range(tensors)}
first = os.path.join(folder, "00000" + kind)
if kind == ".pth":
    torch.save(state, first)
else:
    from safetensors.torch import save_file
    save_file(state, first)
for number in range(1, count):
    shutil.copy(first, os.path.join(folder, f"{number:05}{kind}"))
"""
LOAD = """
import os, sys, torch
for name in sorted(os.listdir(sys.argv[1])):
    loaded = torch.load(os.path.join(sys.argv[1], name), map_location="cpu")
    print(name, len(loaded), sum(t.numel() for t in loaded.values()))
"""
OPEN = """
import os, sys
from safetensors import safe_open
for name in sorted(os.listdir(sys.argv[1])):
    with safe_open(os.path.join(sys.argv[1], name), "np") as file:
        slices = [file.get_slice(key) for key in file.keys()]
        print(name, len(slices), [(s.get_shape(), s.get_dtype()) for s in slices])
"""
OURS = "ckptool inspect -r"
MOST = 2.0
"""Seconds that the inspection of 5,000 files may take."""


def contenders(folder: str, kind: str) -> list[common.Contender]:
    python = sys.executable
    peers = {
        ".pth": ("torch.load of each, one process", (python, "-c", LOAD, folder)),
        ".safetensors": ("safe_open of each, one process", (python, "-c", OPEN, folder)),
    }
    name, argv = peers[kind]
    commands = {
        OURS: (*common.CKPTOOL, "inspect", "-r", folder),
        "ckptool inspect -r --format jsonl": (
            *(*common.CKPTOOL, "inspect", "-r", folder, "--format", "jsonl"),
        ),
        "ckptool verify -r": (*common.CKPTOOL, "verify", "-r", folder),
        name: argv,
    }
    return [common.Contender(title, command) for title, command in commands.items()]


def main() -> None:
    given = common.parser(__doc__.splitlines()[0]).parse_args()
    count = 50 if given.small else 5_000
    with common.work_folder(given.dir) as folder:
        sections = {}
        for tensors, kind in ((2, ".pth"), (6, ".pth"), (6, ".safetensors")):
            files = os.path.join(folder, f"many{tensors}{kind[1:]}")
            if not os.path.exists(files):
                made = (sys.executable, "-c", MAKE, files, str(count), str(tensors), kind)
                subprocess.run(made, check=True)
            rows = common.compete(contenders(files, kind), given.rounds)
            wall = rows[0].best.wall
            word = "reached" if wall < MOST else "missed"
            text = f"{OURS}: {wall:.2f} s for {count:,} files, at most {MOST:.0f}: {word}"
            if common.noisy(rows[0]):
                text += " (the machine was uneven)"
            sections[f"{count:,} {kind} files of {tensors} tensors"] = (
                f"{common.table(rows, OURS)}\n\n{text}"
            )
        common.report("many", sections, given, folder)


if __name__ == "__main__":
    main()
