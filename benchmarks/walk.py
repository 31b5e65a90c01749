"""Our pickle walk of 10,000 keys beside `pickletools.genops` and `torch.load`, in one process.

python benchmarks/walk.py [--dir FOLDER] [--rounds 5] [--small] [--results FILE]
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable

# This folder must not stay on the path: inspect.py would hide the standard library's inspect.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE), *(p for p in sys.path if os.path.abspath(p) != HERE)]

from benchmarks import common  # noqa: E402


def index_of(path: str) -> bytes:
    """The data.pkl of a file that torch wrote."""
    import zipfile

    with zipfile.ZipFile(path) as z:
        name = next(name for name in z.namelist() if name.endswith("/data.pkl"))
        return z.read(name)


def seconds(work: Callable[[], object], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    import pickletools

    import torch

    from ckptool.pickles.walk import walk

    given = common.parser(__doc__.splitlines()[0]).parse_args()
    with common.work_folder(given.dir) as folder:
        path = common.make_files(folder, given.small)["many"]
        data = index_of(path)
        runs = {
            "ckptool.pickles.walk": lambda: walk(data),
            "pickletools.genops": lambda: deque(pickletools.genops(data), maxlen=0),
            "torch.load(mmap=True)": lambda: torch.load(path, map_location="cpu", mmap=True),
        }
        taken = {name: seconds(work, given.rounds) for name, work in runs.items()}
        base = taken["ckptool.pickles.walk"]
        lines = [f"| {name} | {s:.3f} s | {s / base:.2f}x |" for name, s in taken.items()]
        body = "\n".join(["| what | wall | wall / ours |", "|---|--:|--:|", *lines])
        common.report("walk", {f"10,000 keys, {len(data):,} bytes": body}, given, folder)


if __name__ == "__main__":
    main()
