"""`ckptool inspect` beside `torch.load`: time, CPU and memory until the keys are known.

python benchmarks/inspect.py [--dir FOLDER] [--rounds 5] [--small] [--results FILE]
"""

import os
import sys

# This folder must not stay on the path: inspect.py would hide the standard library's inspect.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE), *(p for p in sys.path if os.path.abspath(p) != HERE)]

from benchmarks import common  # noqa: E402

LOAD = """
import sys, torch
loaded = torch.load(sys.argv[1], map_location="cpu", mmap=sys.argv[2] == "mmap")
for key, tensor in loaded["state_dict"].items():
    print(key, tuple(tensor.shape), tensor.dtype)
"""
OURS = "ckptool inspect"


def contenders(path: str) -> list[common.Contender]:
    """All print every key; the last two are what no tool in Python can go below."""
    python = sys.executable
    commands = {
        OURS: (*common.CKPTOOL, "inspect", path),
        "ckptool inspect --format plain": (*common.CKPTOOL, "inspect", path, "--format", "plain"),
        "torch.load": (python, "-c", LOAD, path, "plain"),
        "torch.load(mmap=True)": (python, "-c", LOAD, path, "mmap"),
        "python -c 'import click, tabulate'": (python, "-c", "import click, tabulate"),
        "python -c pass": (python, "-c", "pass"),
    }
    return [common.Contender(name, argv) for name, argv in commands.items()]


def main() -> None:
    given = common.parser(__doc__.splitlines()[0]).parse_args()
    with common.work_folder(given.dir) as folder:
        files = common.make_files(folder, given.small)
        sections = {}
        for name, path in files.items():
            rows = common.compete(contenders(path), given.rounds)
            size = os.path.getsize(path) / 1e6
            sections[f"{name}: {os.path.basename(path)}, {size:.0f} MB"] = common.table(rows, OURS)
        common.report("inspect", sections, given, folder)


if __name__ == "__main__":
    main()
