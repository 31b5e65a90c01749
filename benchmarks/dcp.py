"""`ckptool convert` of a DCP folder to .safetensors beside `dcp_to_torch_save` and an export.

python benchmarks/dcp.py [--dir FOLDER] [--rounds 5] [--small] [--results FILE]
"""

import os
import subprocess
import sys
from contextlib import suppress

# This folder must not stay on the path: inspect.py would hide the standard library's inspect.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE), *(p for p in sys.path if os.path.abspath(p) != HERE)]

from benchmarks import common  # noqa: E402

MAKE = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
path, count, side, dim = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (4,))
shape = [side, side]
shape[dim] //= 4
rank = dist.get_rank()
weights = {f"layers.{i}.weight": DTensor.from_local(
               torch.full(shape, i + rank / 8), mesh, [Shard(dim)], run_check=False)
           for i in range(count)}
dcp.save({"model": weights, "epoch": 7}, checkpoint_id=path)
dist.destroy_process_group()
"""
THEIRS = """
import os, sys, torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
folder, between, target = sys.argv[1:4]
dcp_to_torch_save(folder, between)
save_file(torch.load(between, mmap=True)["model"], target)
with open(target, "rb+") as f:
    os.fsync(f.fileno())
"""
OURS = "ckptool convert"
TIMES, PEAK = 5, 60e6
"""How much faster it shall be at least, and the most memory it may take."""


def make_folder(folder: str, name: str, dim: int, small: bool) -> str:
    """1 GiB in 64 float32 matrices, cut along `dim` over four ranks."""
    path = os.path.join(folder, f"{name}-{'small' if small else 'big'}")
    if not os.path.exists(os.path.join(path, ".metadata")):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4",
                   "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]  # fmt: skip
        script = os.path.join(folder, "make_dcp.py")
        with open(script, "w", encoding="utf-8") as f:
            f.write(MAKE)
        side = "256" if small else "2048"
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, script, path, "64", side, str(dim)], check=True, env=env,
                       stderr=subprocess.DEVNULL)  # fmt: skip
    return path


def contenders(path: str, folder: str) -> list[common.Contender]:
    """All of them wait for the disk before the end."""
    out, between = os.path.join(folder, "out.safetensors"), os.path.join(folder, "between.pth")
    ours = (*common.CKPTOOL, "convert", path, "-o", out)
    commands = {
        OURS: ours,
        "ckptool convert --no-check": (*ours, "--no-check"),
        "dcp_to_torch_save, load, save_file": (sys.executable, "-c", THEIRS, path, between, out),
        "cp -r": ("sh", "-c", 'rm -rf "$1" && cp -r "$0" "$1" && sync -f "$1"', path, f"{out}.d"),
    }

    def clear() -> None:
        for name in (out, between):
            with suppress(FileNotFoundError):
                os.unlink(name)

    return [common.Contender(name, argv, clear) for name, argv in commands.items()]


def verdict(rows: list[common.Row]) -> str:
    """What it shall reach, and whether it does."""
    best = {row.name: row.best for row in rows}
    ours = best[OURS]
    times = best["dcp_to_torch_save, load, save_file"].wall / ours.wall
    fast = "reached" if times >= TIMES else "missed"
    lean = "reached" if ours.peak < PEAK else "missed"
    return (
        f"{times:.1f} times faster than dcp_to_torch_save and an export, at least {TIMES}: {fast}; "
        f"{ours.peak / 1e6:.0f} MB, at most {PEAK / 1e6:.0f}: {lean}."
    )


def main() -> None:
    given = common.parser(__doc__.splitlines()[0]).parse_args()
    with common.work_folder(given.dir) as folder:
        sections = {}
        for name, dim in (("rows", 0), ("columns", 1)):
            path = make_folder(folder, name, dim, given.small)
            rows = common.compete(contenders(path, folder), given.rounds)
            title = f"four ranks, cut by {name}, .safetensors on the disk before the end"
            sections[title] = f"{common.table(rows, OURS)}\n\n{verdict(rows)}"
        common.report("dcp", sections, given, folder)


if __name__ == "__main__":
    main()
