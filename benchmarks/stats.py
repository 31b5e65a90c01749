"""`ckptool inspect --stats` and `--hash` beside torch doing the same sums over a mapped file.

python benchmarks/stats.py [--dir FOLDER] [--rounds 5] [--small] [--results FILE]

torch reckons in the type of each tensor, which is the fastest it can do, and in doubles, which is
what ckptool's figures are as exact as. Files lie in the page cache; both use all cores.
"""

import os
import subprocess
import sys

# This folder must not stay on the path: inspect.py would hide the standard library's inspect.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE), *(p for p in sys.path if os.path.abspath(p) != HERE)]

from benchmarks import common  # noqa: E402

PYTHON = sys.executable
OURS, HASH = "ckptool inspect --stats", "ckptool inspect --stats --hash"
PLAIN, DOUBLE = "torch.load(mmap=True), its sums", "torch.load(mmap=True), its sums in doubles"
TORCH_HASH = "torch.load(mmap=True), its sums, sha256"
START = "import torch"
AIM_MEMORY = 150e6
MAKE = """
import sys, torch
path, count, numel, dtype = sys.argv[1], *map(int, sys.argv[2:4]), getattr(torch, sys.argv[4])
torch.manual_seed(0)
torch.save({f"layers.{i}.weight": (torch.randn(numel) * 0.02).to(dtype) for i in range(count)}, path)
"""
TORCH = """
import hashlib, sys, torch
path, double, hashed = sys.argv[1], *map(int, sys.argv[2:4])
for key, tensor in torch.load(path, map_location="cpu", mmap=True).items():
    if double or tensor.dtype.itemsize == 1:
        wide = tensor.double() if double else tensor.float()
    else:
        wide = tensor
    row = [key, wide.min().item(), wide.max().item(), wide.mean().item(), wide.std().item(),
           wide.norm().item(), (tensor == 0).sum().item() if tensor.dtype.itemsize > 1
           else (wide == 0).sum().item(), wide.isnan().sum().item(), wide.isinf().sum().item()]
    if hashed:
        row.append(hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest())
    print(*row)
"""
FILES = {
    "float32": (128, 2**30 // 4 // 128, "float32"),
    "bfloat16": (64, 2**29 // 2 // 64, "bfloat16"),
    "float8": (64, 2**28 // 64, "float8_e4m3fn"),
    "many": (10_000, 64, "float32"),
}


def make_files(folder: str, small: bool) -> dict[str, str]:
    """{name: path}: 1 GiB of float32, 512 MiB of bfloat16, 256 MiB of float8, 10,000 small tensors."""
    paths = {}
    for name, (count, numel, dtype) in FILES.items():
        numel = numel // 64 if small and name != "many" else numel
        paths[name] = os.path.join(folder, f"stats-{name}-{count}x{numel}.pth")
        if not os.path.exists(paths[name]):
            made = paths[name] + ".part"
            argv = [PYTHON, "-c", MAKE, made, str(count), str(numel), dtype]
            subprocess.run(argv, check=True)
            os.replace(made, paths[name])
    return paths


def contenders(path: str) -> list[common.Contender]:
    """Ours and torch's, without and with hashes."""
    rows = {
        OURS: (*common.CKPTOOL, "inspect", "--stats", "--json", path),
        PLAIN: (PYTHON, "-c", TORCH, path, "0", "0"),
        DOUBLE: (PYTHON, "-c", TORCH, path, "1", "0"),
        HASH: (*common.CKPTOOL, "inspect", "--stats", "--hash", "--json", path),
        TORCH_HASH: (PYTHON, "-c", TORCH, path, "0", "1"),
        START: (PYTHON, "-c", START),
    }
    return [common.Contender(name, argv) for name, argv in rows.items()]


def verdict(rows: list[common.Row]) -> str:
    """The ratios, and whether the aims are reached; the import of torch is not counted."""
    best = {row.name: row.best for row in rows}
    ours, plain, double, start = best[OURS], best[PLAIN], best[DOUBLE], best[START]
    ratio = ours.wall / max(plain.wall - start.wall, 1e-4)
    exact = ours.wall / max(double.wall - start.wall, 1e-4)
    fast = "reached" if ratio <= 1 else "missed"
    light = "reached" if ours.peak <= AIM_MEMORY else "missed"
    return (
        f"Wall: {ratio:.2f} times torch's own sums without its import, at most 1: {fast}; "
        f"{exact:.2f} times its sums in doubles. Memory: {ours.peak / 1e6:.0f} MB, at most "
        f"{AIM_MEMORY / 1e6:.0f}: {light}."
    )


def main() -> None:
    given = common.parser(__doc__.splitlines()[0]).parse_args()
    with common.work_folder(given.dir) as folder:
        sections = {}
        for name, path in make_files(folder, given.small).items():
            rows = common.compete(contenders(path), given.rounds)
            title = f"{name}: {os.path.basename(path)}, {os.path.getsize(path) / 1e6:.0f} MB"
            sections[title] = f"{common.table(rows, OURS)}\n\n{verdict(rows)}"
        common.report("stats", sections, given, folder)


if __name__ == "__main__":
    main()
