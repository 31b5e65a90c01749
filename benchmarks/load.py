"""`ckptool.load` beside torch.load and the safetensors package: same files, everything in memory.

python benchmarks/load.py [--dir FOLDER] [--rounds 5] [--small] [--results FILE]

Each contender is a process that imports torch and loads one file onto the CPU; the row that
only imports torch says how much of that is not loading. Checksums are compared by default, which
torch never does. Needs torch and safetensors.
"""

import os
import sys
from typing import NamedTuple

# This folder must not stay on the path: inspect.py would hide the standard library's inspect.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE), *(p for p in sys.path if os.path.abspath(p) != HERE)]

from benchmarks import common, export  # noqa: E402

OURS, UNCHECKED = "ckptool.load", "ckptool.load(check=False)"
IMPORT = "import torch"
LOADS = {
    OURS: "import torch, ckptool; found = ckptool.load(path)",
    UNCHECKED: "import torch, ckptool; found = ckptool.load(path, check=False)",
    "torch.load": "import torch; found = torch.load(path, map_location='cpu')",
    "torch.load(weights_only=False)": "import torch; found = torch.load(path, map_location='cpu', weights_only=False)",
    "load_file, clone": "import torch; from safetensors.torch import load_file; "
    "found = {key: tensor.clone() for key, tensor in load_file(path).items()}",
    "load_file (mapped, nothing read)": "import torch; from safetensors.torch import load_file; found = load_file(path)",
    IMPORT: "import torch",
}
TORCH = ("torch.load", "torch.load(weights_only=False)")
SAFETENSORS = ("load_file, clone", "load_file (mapped, nothing read)")


class Job(NamedTuple):
    """One file, who loads it besides us, and the one that we must not be slower than."""

    title: str
    file: str
    others: tuple[str, ...]
    rival: str


JOBS = (
    Job("zip, 128 tensors", "big", TORCH, "torch.load"),
    Job("legacy stream, 128 tensors", "legacy", TORCH, "torch.load"),
    Job("zip, 10,000 tensors", "many", TORCH, "torch.load"),
    Job(".safetensors, 128 tensors", "safetensors", SAFETENSORS, "load_file, clone"),
)


def command(name: str, path: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import sys; path = sys.argv[1]; {LOADS[name]}", path)


def section(job: Job, path: str, rounds: int) -> str:
    names = (OURS, UNCHECKED, *job.others, IMPORT)
    todo = [common.Contender(name, command(name, path)) for name in names]
    rows = common.compete(todo, rounds)
    best = {row.name: row.best for row in rows}
    mine, other, start = best[OURS], best[job.rival], best[IMPORT]
    said = [common.table(rows, OURS), ""]
    wall, peak = mine.wall / other.wall, mine.peak / other.peak
    said.append(f"- {OURS}: {wall:.2f} times {job.rival} from start to end, at most 1: {verdict(wall <= 1)}")  # fmt: skip
    said.append(f"- beyond {IMPORT}: {mine.wall - start.wall:.3f} s, {job.rival} {other.wall - start.wall:.3f} s")  # fmt: skip
    said.append(f"- peak memory: {peak:.3f} times {job.rival} ({(mine.peak - other.peak) / 1e6:+.1f} MB), at most 1.01: {verdict(peak <= 1.01)}")  # fmt: skip
    said += [f"- noisy: {row.name} took {', '.join(f'{w:.3f}' for w in row.walls)} s" for row in rows if common.noisy(row)]  # fmt: skip
    return "\n".join(said)


def verdict(good: bool) -> str:
    return "reached" if good else "missed"


def main() -> None:
    given = common.parser(__doc__.splitlines()[0]).parse_args()
    with common.work_folder(given.dir) as folder:
        files = export.make_files(folder, given.small)
        sections = {
            f"{job.title}, {os.path.getsize(files[job.file]) / 1e6:,.0f} MB": section(
                job, files[job.file], given.rounds
            )
            for job in JOBS
        }
        common.report("load", sections, given, folder)


if __name__ == "__main__":
    main()
