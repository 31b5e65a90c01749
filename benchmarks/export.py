"""Conversions beside the scripts people write and `cp`: other containers, bfloat16, in place.

python benchmarks/export.py [--dir FOLDER] [--rounds 5] [--small] [--results FILE]

Nobody waits for the disk, but for the rows that say fsync. Needs torch and safetensors.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

# This folder must not stay on the path: inspect.py would hide the standard library's inspect.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE), *(p for p in sys.path if os.path.abspath(p) != HERE)]

from benchmarks import common  # noqa: E402

PYTHON = sys.executable
COPY, STARTUP = "cp", "python -c 'import click, tabulate'"


class Limit(NamedTuple):
    """What a row must reach: wall at most `times` that of the row `of` plus `seconds`, and
    at most `megabytes` of memory.
    """

    row: str
    times: float
    of: str
    seconds: float = 0.0
    megabytes: float = float("inf")


class Job(NamedTuple):
    """One conversion of the file called `source` into `out`: its contenders by name, of which
    the first is ours, and what they must reach. `in_place`: the file is cut back before a run.
    """

    title: str
    source: str
    out: str
    contenders: Mapping[str, tuple[str, ...]]
    limits: tuple[Limit, ...] = ()
    in_place: bool = False


# ------------------------------------------------------------------ the files
OTHERS = """
import sys, torch
from safetensors.torch import save_file
big, legacy, safe, views = sys.argv[1:5]
loaded = torch.load(big, map_location="cpu", mmap=True)
torch.save(loaded, legacy, _use_new_zipfile_serialization=False)
save_file(loaded["state_dict"], safe)
half = {key: tensor[: len(tensor) // 2] for key, tensor in loaded["state_dict"].items()}
torch.save({"epoch": 7, "state_dict": half}, views)
"""
SPARSE = """
import sys, torch
path, count, numel = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
weights = {f"module.layers.{i // 2}.{('weight', 'bias')[i % 2]}": torch.empty(numel)
           for i in range(count)}
with torch.serialization.skip_data():
    torch.save({"epoch": 7, "state_dict": weights}, path)
"""


def make_files(folder: str, small: bool) -> dict[str, str]:
    """{name: path}: the `big` of all benchmarks, the same as `legacy` and `safetensors`, with
    tensors that use half of their storages (`views`), and `sparse`: 10,000 tensors, 10 GiB.
    """
    paths = common.make_files(folder, small)
    size = "small" if small else "1GiB"
    for name, suffix in (("legacy", "pth"), ("safetensors", "safetensors"), ("views", "pth")):
        paths[name] = os.path.join(folder, f"{name}-{size}.{suffix}")
    if not all(map(os.path.exists, paths.values())):
        made = (paths["legacy"], paths["safetensors"], paths["views"])
        subprocess.run([PYTHON, "-c", OTHERS, paths["big"], *made], check=True)
    count, numel = (100, 64) if small else (10_000, 268_436)
    paths["sparse"] = os.path.join(folder, f"sparse-{count}x{numel}.pth")
    if not os.path.exists(paths["sparse"]):
        numbers = (str(count), str(numel))
        subprocess.run([PYTHON, "-c", SPARSE, paths["sparse"], *numbers], check=True)
    return paths


# ------------------------------------------------------------------ the scripts people write
MMAP_SAVE_FILE = """
import sys, torch
from safetensors.torch import save_file
loaded = torch.load(sys.argv[1], map_location="cpu", mmap=True)
save_file(loaded["state_dict"], sys.argv[2])
"""
# As Hugging Face's converter does it: weights only, one name of each storage, contiguous.
CONVERTER = """
import sys, torch
from safetensors.torch import save_file
loaded = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
loaded = loaded.get("state_dict", loaded)
seen, kept = set(), {}
for key, tensor in loaded.items():
    where = tensor.untyped_storage().data_ptr()
    if where not in seen:
        seen.add(where)
        kept[key] = tensor.contiguous()
save_file(kept, sys.argv[2], metadata={"format": "pt"})
"""
LOAD_FILE = """
import sys, torch
from safetensors.torch import load_file
torch.save(load_file(sys.argv[1]), sys.argv[2])
"""
LOAD_SAVE = """
import sys, torch
torch.save(torch.load(sys.argv[1], map_location="cpu"), sys.argv[2])
"""
CAST = """
import sys, torch
source, target, mmap = sys.argv[1:4]
loaded = torch.load(source, map_location="cpu", mmap=mmap == "mmap")
loaded["state_dict"] = {
    key: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
    for key, tensor in loaded["state_dict"].items()
}
torch.save(loaded, target)
"""
CLONE = """
import sys, torch
loaded = torch.load(sys.argv[1], map_location="cpu", mmap=sys.argv[3] == "mmap")
loaded["state_dict"] = {key: tensor.clone() for key, tensor in loaded["state_dict"].items()}
torch.save(loaded, sys.argv[2])
"""


def script(text: str, source: str, out: str, *more: str) -> tuple[str, ...]:
    return (PYTHON, "-c", text, source, out, *more)


def ours(source: str, out: str, *options: str, sync: bool = False) -> tuple[str, ...]:
    """`ckptool convert` of `source` to `out`."""
    waits = () if sync else ("--no-fsync",)
    return (*common.CKPTOOL, "convert", source, "-o", out, "-f", "-q", *options, *waits)


def copies(source: str, out: str) -> dict[str, tuple[str, ...]]:
    """`cp`, and `cp` that waits for the disk."""
    return {
        COPY: ("cp", source, out),
        "cp, fsync": ("sh", "-c", 'cp "$0" "$1" && sync "$1"', source, out),
    }


def four_of_ours(source: str, out: str, text: str, *options: str) -> dict[str, tuple[str, ...]]:
    """Ours as it is measured, without the check, and as it runs by default: with fsync."""
    return {
        text: ours(source, out, *options),
        f"{text} --no-check": ours(source, out, *options, "--no-check"),
        f"{text}, fsync": ours(source, out, *options, sync=True),
    }


# ------------------------------------------------------------------ the jobs
def to_safetensors(files: Mapping[str, str], folder: str) -> Job:
    source, out, text = files["big"], os.path.join(folder, "out.safetensors"), "ckptool convert"
    contenders = four_of_ours(source, out, text) | {
        "torch.load(mmap=True), save_file": script(MMAP_SAVE_FILE, source, out),
        "Hugging Face's way": script(CONVERTER, source, out),
        **copies(source, out),
    }
    limits = (Limit(text, 2, COPY, megabytes=60), Limit(f"{text} --no-check", 1.6, COPY))
    return Job(".pth -> .safetensors", source, out, contenders, limits)


def from_safetensors(files: Mapping[str, str], folder: str) -> Job:
    source, out = files["safetensors"], os.path.join(folder, "out.pth")
    text = "ckptool convert"
    contenders = four_of_ours(source, out, text) | {
        "load_file, torch.save": script(LOAD_FILE, source, out),
        **copies(source, out),
    }
    limits = (Limit(text, 3, COPY, megabytes=60),)
    return Job(".safetensors -> .pth", source, out, contenders, limits)


def from_legacy(files: Mapping[str, str], folder: str) -> Job:
    source, out = files["legacy"], os.path.join(folder, "out.pth")
    contenders = four_of_ours(source, out, "ckptool convert --to zip", "--to", "zip") | {
        "torch.load, torch.save": script(LOAD_SAVE, source, out),
        **copies(source, out),
    }
    return Job("legacy -> zip", source, out, contenders)


def to_bfloat16(files: Mapping[str, str], folder: str) -> Job:
    source, out = files["big"], os.path.join(folder, "out.pth")
    text, plain = "ckptool convert --dtype bfloat16", "torch.load, cast, torch.save"
    mapped = "torch.load(mmap=True), cast, torch.save"
    contenders = four_of_ours(source, out, text, "--dtype", "bfloat16") | {
        plain: script(CAST, source, out, "plain"),
        mapped: script(CAST, source, out, "mmap"),
        **copies(source, out),
    }
    limits = (Limit(text, 1, plain, megabytes=200), Limit(text, 1, mapped))
    return Job("float32 -> bfloat16, .pth -> .pth", source, out, contenders, limits)


def compacted(files: Mapping[str, str], folder: str) -> Job:
    source, out, text = files["views"], os.path.join(folder, "out.pth"), "ckptool convert --compact"
    contenders = four_of_ours(source, out, text, "--compact") | {
        "torch.load, clone, torch.save": script(CLONE, source, out, "plain"),
        "torch.load(mmap=True), clone, torch.save": script(CLONE, source, out, "mmap"),
        **copies(source, out),
    }
    return Job("storages cut to the half that is used", source, out, contenders)


def in_place(files: Mapping[str, str], folder: str) -> Job:
    source, text = files["sparse"], "ckptool convert --in-place --to-gpu 1"
    edit = (*common.CKPTOOL, "convert", source, "--in-place", "-q")
    contenders = {
        text: (*edit, "--to-gpu", "1", "--keep-module", "--no-fsync"),
        "ckptool convert --in-place --strip-module": (*edit, "--strip-module", "--no-fsync"),
        "ckptool convert --in-place --to-gpu 1 --strip-module": (
            *edit, "--to-gpu", "1", "--strip-module", "--no-fsync",
        ),
        "the same, fsync": (*edit, "--to-gpu", "1", "--strip-module"),
        "ckptool inspect": (*common.CKPTOOL, "inspect", source),
        STARTUP: (PYTHON, "-c", "import click, tabulate"),
    }  # fmt: skip
    limits = tuple(Limit(name, 1, STARTUP, 0.5) for name in list(contenders)[:3])
    return Job("in place, 10,000 keys", source, "", contenders, limits, in_place=True)


JOBS = (to_safetensors, from_safetensors, from_legacy, to_bfloat16, compacted, in_place)


# ------------------------------------------------------------------ measuring
def run(job: Job, rounds: int) -> str:
    """The table, and what was reached."""
    length = os.path.getsize(job.source)

    def prepare() -> None:
        if job.in_place:
            os.truncate(job.source, length)
        else:
            with suppress(FileNotFoundError):
                os.unlink(job.out)

    todo = [common.Contender(name, argv, prepare) for name, argv in job.contenders.items()]
    rows = common.compete(todo, rounds)
    prepare()
    said = [common.table(rows, rows[0].name)]
    said += [f"- {reached(limit, rows)}" for limit in job.limits]
    said += [f"- noisy: {row.name} took {_walls(row)}" for row in rows if common.noisy(row)]
    return "\n".join((said[0], "", *said[1:])).rstrip()


def reached(limit: Limit, rows: list[common.Row]) -> str:
    """One sentence: the target, the figure, whether it is missed."""
    best = {row.name: row.best for row in rows}
    mine, other = best[limit.row], best[limit.of]
    if limit.seconds:
        have = mine.wall - other.wall
        text = f"{limit.row}: {have:.2f} s beyond {limit.of}, at most {limit.seconds} s"
        return f"{text}: {_verdict(have <= limit.seconds)} (CPU {mine.cpu - other.cpu:.2f} s)"
    ratio = mine.wall / other.wall
    text = f"{limit.row}: {ratio:.2f} times {limit.of}, at most {limit.times:g}"
    said = [f"{text}: {_verdict(ratio <= limit.times)}"]
    if limit.megabytes < float("inf"):
        peak = mine.peak / 1e6
        said.append(
            f"{peak:.0f} MB, at most {limit.megabytes:g}: {_verdict(peak < limit.megabytes)}"
        )
    return "; ".join(said)


def _verdict(good: bool) -> str:
    return "reached" if good else "missed"


def _walls(row: common.Row) -> str:
    return ", ".join(f"{wall:.3f}" for wall in row.walls) + " s"


def main() -> None:
    given = common.parser(__doc__.splitlines()[0]).parse_args()
    with common.work_folder(given.dir) as folder:
        files = make_files(folder, given.small)
        sections = {}
        for make in JOBS:
            job = make(files, folder)
            size = os.path.getsize(job.source) / 1e6
            sections[f"{job.title}, {size:,.0f} MB"] = run(job, given.rounds)
            with suppress(FileNotFoundError):
                os.unlink(job.out)
        common.report("export", sections, given, folder)


if __name__ == "__main__":
    main()
