"""Comparing two checkpoints beside `cmp` and a torch script: by checksum, by bytes, by value.

python benchmarks/diff.py [--dir FOLDER] [--rounds 5] [--small] [--results FILE]

Peers: `cmp`, and torch.load(mmap=True) with torch.equal or with what --values measures, on all
cores. Files are read before, so that nobody waits for the disk.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

# This folder must not stay on the path: inspect.py would hide the standard library's inspect.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE), *(p for p in sys.path if os.path.abspath(p) != HERE)]

from benchmarks import common  # noqa: E402

PYTHON = sys.executable
STARTUP = "python -c 'import click, tabulate'"


class Limit(NamedTuple):
    """What a row must reach beside the row `of`: `figure` (wall or cpu) at most `times` of it
    plus `seconds`, and at most `megabytes` of memory.
    """

    row: str
    of: str
    figure: str = "wall"
    times: float = 1.0
    seconds: float = 0.0
    megabytes: float = float("inf")


class Job(NamedTuple):
    """One comparison: its contenders by name, of which the first is ours, what they must reach."""

    title: str
    contenders: Mapping[str, tuple[str, ...]]
    limits: tuple[Limit, ...]


# ------------------------------------------------------------------ the files
MAKE = """
import sys, torch
from safetensors.torch import save_file
folder, count, numel = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(1)
weights = {f"layers.{i // 2}.{('weight', 'bias')[i % 2]}": torch.randn(numel) for i in range(count)}
torch.save({"epoch": 7, "state_dict": weights}, f"{folder}/one.pth")
torch.save({"epoch": 7, "state_dict": {f"module.{k}": v for k, v in weights.items()}}, f"{folder}/same.pth")
save_file(weights, f"{folder}/same.safetensors")
for tensor in weights.values():
    tensor += 1e-3 * torch.randn(numel)
torch.save({"epoch": 9, "state_dict": weights}, f"{folder}/tuned.pth")
save_file(weights, f"{folder}/tuned.safetensors")
"""
NAMES = ("one.pth", "same.pth", "same.safetensors", "tuned.pth", "tuned.safetensors")


def make_files(folder: str, small: bool) -> dict[str, str]:
    """{name: path}: 1 GiB of random numbers, the same under other names and in another container,
    and fine-tuned ones.
    """
    home = os.path.join(folder, "diff-small" if small else "diff-1GiB")
    paths = {name: os.path.join(home, name) for name in NAMES}
    if not all(map(os.path.exists, paths.values())):
        os.makedirs(home, exist_ok=True)
        numel = (16 if small else 1024) * 2**20 // 4 // 128
        subprocess.run([PYTHON, "-c", MAKE, home, "128", str(numel)], check=True)
    return paths


# ------------------------------------------------------------------ the scripts people write
EQUAL = """
import sys, torch
from safetensors.torch import load_file
def loaded(path):
    if path.endswith(".safetensors"):
        return load_file(path)
    return torch.load(path, map_location="cpu", mmap=True)["state_dict"]
one, two = map(loaded, sys.argv[1:3])
two = {key.removeprefix("module."): tensor for key, tensor in two.items()}
print(sum(torch.equal(tensor, two[key]) for key, tensor in one.items()), "of", len(one), "equal")
"""
MEASURE = """
import sys, torch
one, two = (torch.load(p, map_location="cpu", mmap=True)["state_dict"] for p in sys.argv[1:3])
for key, tensor in one.items():
    x, y = tensor.flatten(), two[key].flatten()
    gap = (x - y).abs()
    print(key, gap.max().item(), (gap / y.abs()).max().item(), (x != y).sum().item(),
          torch.nn.functional.cosine_similarity(x, y, dim=0).item(), gap.norm().item())
"""


def ours(one: str, two: str, *options: str, differ: bool = False) -> tuple[str, ...]:
    """`ckptool diff`; where the files differ, its exit status 1 is the right answer."""
    argv = (*common.CKPTOOL, "diff", one, two, *options)
    return ("sh", "-c", '"$@"; [ $? = 1 ]', "sh", *argv) if differ else argv


def startup() -> tuple[str, ...]:
    return (PYTHON, "-c", "import click, tabulate")


# ------------------------------------------------------------------ the jobs
def by_checksum(files: Mapping[str, str]) -> Job:
    text, peer = "ckptool diff", "torch.load(mmap=True), torch.equal"
    contenders = {
        text: ours(files["one.pth"], files["same.pth"]),
        peer: (PYTHON, "-c", EQUAL, files["one.pth"], files["same.pth"]),
        STARTUP: startup(),
    }
    return Job("by checksum, names differ", contenders, (Limit(text, STARTUP, "cpu", 1, 0.15),))


def by_bytes(files: Mapping[str, str]) -> Job:
    text, peer = "ckptool diff --bytes", "torch.load(mmap=True), torch.equal"
    pair = files["one.pth"], _twin(files["one.pth"])
    contenders = {
        text: ours(*pair, "--bytes"),
        "cmp": ("cmp", *pair),
        peer: (PYTHON, "-c", EQUAL, *pair),
        STARTUP: startup(),
    }
    return Job("by bytes, one file twice", contenders, (Limit(text, "cmp", "wall", 1.5),))


def across(files: Mapping[str, str]) -> Job:
    text, peer = "ckptool diff --at state_dict", "torch.load(mmap=True), load_file, torch.equal"
    pair = files["one.pth"], files["same.safetensors"]
    contenders = {
        text: ours(*pair, "--at", "state_dict"),
        peer: (PYTHON, "-c", EQUAL, *pair),
        "cmp, the same in two .safetensors": ("cmp", pair[1], _twin(pair[1])),
        STARTUP: startup(),
    }
    limit = Limit(text, "cmp, the same in two .safetensors", "wall", 1.5)
    return Job("by bytes, .pth and .safetensors", contenders, (limit, Limit(text, peer)))


def by_value(files: Mapping[str, str]) -> Job:
    text, peer = "ckptool diff --values", "torch.load(mmap=True), the same figures"
    pair = files["one.pth"], files["tuned.pth"]
    contenders = {
        text: ours(*pair, "--values", differ=True),
        peer: (PYTHON, "-c", MEASURE, *pair),
        "ckptool diff": ours(*pair, differ=True),
        "import torch": (PYTHON, "-c", "import torch"),
        "import numpy": (PYTHON, "-c", "import click, numpy"),
        STARTUP: startup(),
    }
    return Job("by value, every number differs", contenders, (Limit(text, peer, megabytes=150),))


def _twin(path: str) -> str:
    """The same bytes in another file."""
    twin = f"{path}.twin"
    if not os.path.exists(twin):
        subprocess.run(["cp", path, twin], check=True)
    return twin


JOBS = (by_checksum, by_bytes, across, by_value)


# ------------------------------------------------------------------ measuring
def run(job: Job, rounds: int) -> str:
    """The table, and what was reached."""
    todo = [common.Contender(name, argv) for name, argv in job.contenders.items()]
    rows = common.compete(todo, rounds)
    said = [common.table(rows, rows[0].name), ""]
    said += [f"- {reached(limit, rows)}" for limit in job.limits]
    said += [f"- noisy: {row.name}" for row in rows if common.noisy(row)]
    return "\n".join(said).rstrip()


def reached(limit: Limit, rows: list[common.Row]) -> str:
    """One sentence: the target, the figure, whether it is missed."""
    best = {row.name: row.best for row in rows}
    mine, other = (getattr(best[name], limit.figure) for name in (limit.row, limit.of))
    if limit.seconds:
        have, most = (
            f"{mine - other:.2f} s of {limit.figure} beyond {limit.of}",
            f"{limit.seconds:g} s",
        )
    else:
        have, most = f"{mine / other:.2f} times {limit.of}", f"{limit.times:g}"
    said = [
        f"{limit.row}: {have}, at most {most}: {_verdict(mine <= other * limit.times + limit.seconds)}"
    ]
    if limit.megabytes < float("inf"):
        peak = best[limit.row].peak / 1e6
        said.append(
            f"{peak:.0f} MB, at most {limit.megabytes:g}: {_verdict(peak < limit.megabytes)}"
        )
    return "; ".join(said)


def _verdict(good: bool) -> str:
    return "reached" if good else "missed"


def main() -> None:
    given = common.parser(__doc__.splitlines()[0]).parse_args()
    with common.work_folder(given.dir) as folder:
        files = make_files(folder, given.small)
        sections = {}
        for make in JOBS:
            job = make(files)
            size = os.path.getsize(files["one.pth"]) / 1e6
            sections[f"{job.title}, 2 x {size:,.0f} MB"] = run(job, given.rounds)
        common.report("diff", sections, given, folder)


if __name__ == "__main__":
    main()
