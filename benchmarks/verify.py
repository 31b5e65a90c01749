"""`ckptool verify` beside `python -m zipfile -t` and a bare CRC-32 pass over the same bytes.

python benchmarks/verify.py [--dir FOLDER] [--rounds 5] [--small] [--results FILE]

Start-up is what each program takes for an archive of one small tensor; the ratio that counts is
that of what the file itself costs. Files lie in the page cache.
"""

import os
import subprocess
import sys

# This folder must not stay on the path: inspect.py would hide the standard library's inspect.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE), *(p for p in sys.path if os.path.abspath(p) != HERE)]

from benchmarks import common  # noqa: E402

PYTHON = sys.executable
OURS, FINITE = "ckptool verify", "ckptool verify --finite"
ZIPFILE, PASS = "python -m zipfile -t", "zlib.crc32 over the file"
TINY = ", one small tensor"
AIM = 1.3
CRC = """
import mmap, sys, zlib
crc, block = 0, memoryview(mmap.mmap(-1, 1 << 20))  # aligned: as fast as it can be
with open(sys.argv[1], "rb", buffering=0) as file:
    while count := file.readinto(block):
        crc = zlib.crc32(block[:count], crc)
print(f"{crc:08x}")
"""
TORCH = """
import sys, torch
loaded = torch.load(sys.argv[1], map_location="cpu", mmap=True)
for key, tensor in loaded["state_dict"].items():
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        print(key)
"""
TORCH_FINITE = "torch.load(mmap=True), torch.isfinite"


def make_tiny(folder: str) -> str:
    """The file that start-up is measured with."""
    path = os.path.join(folder, "tiny.pth")
    if not os.path.exists(path):
        subprocess.run([PYTHON, "-c", common.MAKE, path, "1", "8"], check=True)
    return path


def commands(path: str) -> dict[str, tuple[str, ...]]:
    """Every contender by name, without those that look at numbers."""
    return {
        OURS: (*common.CKPTOOL, "verify", path),
        ZIPFILE: (PYTHON, "-m", "zipfile", "-t", path),
        PASS: (PYTHON, "-c", CRC, path),
    }


def contenders(path: str, tiny: str) -> list[common.Contender]:
    """Those of the file, those of the numbers in it, and the start-up of each."""
    rows = commands(path)
    rows |= {FINITE: (*common.CKPTOOL, "verify", "--finite", path)}
    rows |= {TORCH_FINITE: (PYTHON, "-c", TORCH, path)}
    rows |= {name + TINY: argv for name, argv in commands(tiny).items()}
    return [common.Contender(name, argv) for name, argv in rows.items()]


def beyond(rows: list[common.Row], name: str) -> tuple[float, float]:
    """Seconds on the clock, and of CPU, that the file itself costs."""
    best = {row.name: row.best for row in rows}
    full, start = best[name], best[name + TINY]
    return max(full.wall - start.wall, 1e-4), max(full.cpu - start.cpu, 1e-4)


def verdict(rows: list[common.Row], large: bool) -> str:
    """The ratios over start-up and, where bytes and not tensors take the time, whether the aim
    is reached.
    """
    ours, crc, other = (beyond(rows, name) for name in (OURS, PASS, ZIPFILE))
    beside = f"{ours[0] / other[0]:.2f} times python -m zipfile -t, which reads no pickle"
    if not large:
        return f"Over start-up: {beside}."
    wall, cpu = ours[0] / crc[0], ours[1] / crc[1]
    reached = "reached" if wall <= AIM else "missed"
    return (
        f"Over start-up: {wall:.2f} times a bare CRC pass on the clock, at most {AIM}: {reached} "
        f"(CPU {cpu:.2f} times); {beside}."
    )


def main() -> None:
    given = common.parser(__doc__.splitlines()[0]).parse_args()
    with common.work_folder(given.dir) as folder:
        files = common.make_files(folder, given.small)
        tiny = make_tiny(folder)
        sections = {}
        for name, path in files.items():
            rows = common.compete(contenders(path, tiny), given.rounds)
            size = os.path.getsize(path) / 1e6
            title = f"{name}: {os.path.basename(path)}, {size:.0f} MB"
            sections[title] = f"{common.table(rows, OURS)}\n\n{verdict(rows, name == 'big')}"
        common.report("verify", sections, given, folder)


if __name__ == "__main__":
    main()
