"""`ckptool inspect -r` and `verify -r` over 5,000 small files beside `torch.load` of each.

python benchmarks/many.py [--dir FOLDER] [--rounds 5] [--small] [--results FILE]

The peer is what people run instead: one process that opens every file with torch.load, or with
safetensors' safe_open, and prints a line of it.
"""

import os
import subprocess
import sys

# This folder must not stay on the path: inspect.py would hide the standard library's inspect.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE), *(p for p in sys.path if os.path.abspath(p) != HERE)]

from benchmarks import common  # noqa: E402

MAKE = """
import os, sys, torch
from safetensors.torch import save_file
folder, count, tensors, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
os.makedirs(folder)
for number in range(count):
    state = {f"layers.{i // 2}.{('weight', 'bias')[i % 2]}": torch.full((8, 4), number / 8)
             for i in range(tensors)}
    suffix = ".safetensors" if kind == "safetensors" else ".pth"
    path = os.path.join(folder, f"{number:05}{suffix}")
    if kind == "safetensors":
        save_file(state, path)
    elif kind == "training":
        group = {"lr": 0.1 / (number + 1), "momentum": 0.9, "params": list(range(tensors))}
        optimizer = {"state": {}, "param_groups": [group]}
        torch.save({"epoch": number, "state_dict": state, "optimizer": optimizer}, path)
    else:
        torch.save(state, path)
"""
LOAD = """
import os, sys, torch
for name in sorted(os.listdir(sys.argv[1])):
    loaded = torch.load(os.path.join(sys.argv[1], name), map_location="cpu")
    state = loaded.get("state_dict", loaded)
    print(name, loaded.get("epoch"), len(state), sum(t.numel() for t in state.values()))
"""
OPEN = """
import os, sys
from safetensors import safe_open
for name in sorted(os.listdir(sys.argv[1])):
    with safe_open(os.path.join(sys.argv[1], name), "np") as file:
        slices = [file.get_slice(key) for key in file.keys()]
        print(name, len(slices), [(s.get_shape(), s.get_dtype()) for s in slices])
"""
KINDS = (
    (2, "plain", "2 tensors, .pth"),
    (6, "plain", "6 tensors, .pth"),
    (6, "training", "6 tensors, an epoch and an SGD optimizer, .pth"),
    (6, "safetensors", "6 tensors, .safetensors"),
)
PEERS = {
    "plain": ("torch.load of each, one process", LOAD),
    "training": ("torch.load of each, one process", LOAD),
    "safetensors": ("safe_open of each, one process", OPEN),
}
OURS, LINES = "ckptool inspect -r", "ckptool inspect -r --format jsonl"
MOST = 2.0
"""Seconds that the inspection of 5,000 files may take."""


def contenders(folder: str, kind: str) -> list[common.Contender]:
    name, code = PEERS[kind]
    commands = {
        OURS: (*common.CKPTOOL, "inspect", "-r", folder),
        LINES: (*common.CKPTOOL, "inspect", "-r", folder, "--format", "jsonl"),
        "ckptool verify -r": (*common.CKPTOOL, "verify", "-r", folder),
        name: (sys.executable, "-c", code, folder),
    }
    return [common.Contender(title, command) for title, command in commands.items()]


def judged(rows: list[common.Row], count: int) -> str:
    """Whether what was promised of 5,000 files was kept, and how often the peer's time that is."""
    by_name = {row.name: row for row in rows}
    peer = rows[-1]
    lines = []
    for name in (OURS, LINES):
        row = by_name[name]
        word = "reached" if row.best.wall < MOST else "missed"
        lines.append(
            f"{name}: {row.best.wall:.2f} s for {count:,} files, at most {MOST:.0f}: {word}; "
            f"{row.best.cpu:.2f} s of CPU; the peer ({peer.name}) takes {peer.best.wall / row.best.wall:.1f} times as long."
        )
        if common.noisy(row):
            lines[-1] += " The machine was uneven: one round took twice as long as another."
    return "\n\n".join(lines)


def main() -> None:
    given = common.parser(__doc__.splitlines()[0]).parse_args()
    count = 50 if given.small else 5_000
    with common.work_folder(given.dir) as folder:
        sections = {}
        for tensors, kind, title in KINDS:
            files = os.path.join(folder, f"many-{count}-{tensors}-{kind}")
            if not os.path.exists(files):
                made = (sys.executable, "-c", MAKE, f"{files}.part", str(count), str(tensors), kind)
                subprocess.run(made, check=True)
                os.rename(f"{files}.part", files)
            rows = common.compete(contenders(files, kind), given.rounds)
            sections[f"{count:,} files of {title}"] = (
                f"{common.table(rows, OURS)}\n\n{judged(rows, count)}"
            )
        common.report("many", sections, given, folder)


if __name__ == "__main__":
    main()
