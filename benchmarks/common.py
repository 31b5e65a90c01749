"""What the benchmarks share: the files, fair measurements of child processes, the table.

A contender is a command line. It runs in a fresh process under `os.wait4`, so that time and
peak memory are the child's own; the parent imports nothing heavy, since Linux counts the
parent's memory as the floor of a child's peak. Contenders run in turn, round by round, after a
`sync`; each one's best round counts.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import NamedTuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CKPTOOL = (sys.executable, "-m", "ckptool")


class Cost(NamedTuple):
    """What one run took: seconds on the clock, seconds of CPU, bytes of memory at the peak."""

    wall: float
    cpu: float
    peak: int


class Contender(NamedTuple):
    """One command. `prepare` runs before each measured run and is not counted."""

    name: str
    argv: Sequence[str]
    prepare: Callable[[], None] = lambda: None


class Row(NamedTuple):
    """A contender's best round, and the walls of all of them."""

    name: str
    best: Cost
    walls: list[float]


# ------------------------------------------------------------------ the files
MAKE = """
import sys, torch
path, count, numel = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.serialization.location_tag = lambda storage: "".join(("c", "uda:0"))
weights = {f"module.layers.{i // 2}.{('weight', 'bias')[i % 2]}":
           torch.full((numel,), 1 + i / 1024) for i in range(count)}
torch.save({"epoch": 7, "state_dict": weights}, path)
"""


def make_files(folder: str, small: bool) -> dict[str, str]:
    """{name: path}: `big` is 1 GiB in 128 tensors, `many` 10,000 small tensors; all of them
    tagged cuda:0 under names with 'module.', so that a conversion has work to do."""
    mib = 16 if small else 1024
    shapes = {"big": (128, mib * 2**20 // 4 // 128), "many": (10_000, 8)}
    paths = {}
    for name, (count, numel) in shapes.items():
        paths[name] = os.path.join(folder, f"{name}-{count}x{numel}.pth")
        if not os.path.exists(paths[name]):
            made = paths[name] + ".part"
            subprocess.run([sys.executable, "-c", MAKE, made, str(count), str(numel)], check=True)
            os.replace(made, paths[name])
    return paths


@contextmanager
def work_folder(given: str | None) -> Iterator[str]:
    """`given`, kept; or a fresh folder beside the benchmarks, removed afterwards."""
    if given:
        os.makedirs(given, exist_ok=True)
        yield os.path.abspath(given)
        return
    folder = tempfile.mkdtemp(prefix="tmp-", dir=os.path.dirname(os.path.abspath(__file__)))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


# ------------------------------------------------------------------ measuring
def measure(argv: Sequence[str]) -> Cost:
    """Run a command to its end and say what it took."""
    env = {**os.environ, "PYTHONPATH": ROOT}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # installed programs are compiled once
    program = shutil.which(argv[0]) or argv[0]
    quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    start = time.perf_counter()
    child = os.posix_spawn(program, list(argv), env, file_actions=quiet)
    _, status, used = os.wait4(child, 0)
    wall = time.perf_counter() - start
    if status:
        code = os.waitstatus_to_exitcode(status)
        raise SystemExit(f"{' '.join(argv)[:200]}: exit status {code}")
    unit = 1 if sys.platform == "darwin" else 1024
    return Cost(wall, used.ru_utime + used.ru_stime, used.ru_maxrss * unit)


def compete(contenders: Sequence[Contender], rounds: int) -> list[Row]:
    """All contenders in turn, `rounds` times; the order turns too, so that none is always first."""
    costs: dict[str, list[Cost]] = {one.name: [] for one in contenders}
    for turn in range(rounds):
        shift = turn % len(contenders)
        for one in (*contenders[shift:], *contenders[:shift]):
            one.prepare()
            os.sync()
            costs[one.name].append(measure(one.argv))
    return [Row(name, best_of(runs), [run.wall for run in runs]) for name, runs in costs.items()]


def best_of(runs: Sequence[Cost]) -> Cost:
    """The best of each figure."""
    return Cost(*(min(figures) for figures in zip(*runs, strict=True)))


def noisy(row: Row) -> bool:
    """Whether the machine was too uneven: the same command took twice as long at another time."""
    return max(row.walls) > 2 * min(row.walls)


# ------------------------------------------------------------------ telling
def table(rows: Sequence[Row], ours: str) -> str:
    """Markdown; the ratios are to the row called `ours` (2.0x: twice what ours takes)."""
    base = next(row.best for row in rows if row.name == ours)
    lines = [
        "| command | wall | CPU | peak memory | wall / ours | CPU / ours | memory / ours |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, cost, _ in rows:
        ratios = " | ".join(f"{a / b:.2f}x" for a, b in zip(cost, base, strict=True))
        figures = f"{cost.wall:.3f} s | {cost.cpu:.3f} s | {cost.peak / 1e6:.0f} MB"
        lines.append(f"| {name} | {figures} | {ratios} |")
    return "\n".join(lines)


def machine(folder: str) -> str:
    """One line: what this was measured on."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "click", "tabulate"))
    return (
        f"{platform.node()}: {cpu_name()}, {os.cpu_count()} cores, {file_system(folder)}, "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}, {versions}"
    )


def version(name: str) -> str:
    """The installed version, without importing the package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def cpu_name() -> str:
    """The processor as the system calls it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            names = [line.split(":", 1)[1].strip() for line in f if line.startswith("model name")]
        return names[0] if names else platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def file_system(folder: str) -> str:
    """The type of the file system that holds `folder`."""
    best = ("", "unknown file system")
    try:
        with open("/proc/mounts", encoding="utf-8") as f:
            for line in f:
                _, point, kind, *_ = line.split()
                inside = os.path.join(folder, "").startswith(os.path.join(point, ""))
                if inside and len(point) >= len(best[0]):
                    best = (point, kind)
    except OSError:
        pass
    return best[1]


def parser(text: str) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    options = argparse.ArgumentParser(description=text)
    options.add_argument("--dir", help="folder of the files, kept (default: a temporary one)")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--small", action="store_true", help="16 MiB: only to see that it runs")
    options.add_argument("--results", help="file for the table (--small writes none by default)")
    return options


def report(name: str, sections: Mapping[str, str], given: argparse.Namespace, folder: str) -> None:
    """Print the tables, and write them where they are kept."""
    measured = f"Best of {given.rounds} rounds, {time.strftime('%Y-%m-%d')}."
    parts = [f"# {name}", f"Machine: {machine(folder)}.", measured]
    if given.small:
        parts.append("Small files: these figures mean nothing.")
    parts += [f"## {title}\n\n{body}" for title, body in sections.items()]
    text = "\n\n".join(parts) + "\n"
    print(text)
    target = given.results
    if target is None and not given.small:
        target = os.path.join(ROOT, "benchmarks", f"RESULTS-{name}.md")
    if target:
        with open(target, "w", encoding="utf-8") as f:
            f.write(text)
