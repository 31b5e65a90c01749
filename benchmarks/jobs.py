"""`ckptool convert --jobs N` beside one pair of hands: one file and shards, copied and cast.

python benchmarks/jobs.py [--dir FOLDER] [--rounds 5] [--small] [--results FILE]
"""

import os
import shutil
import sys

# This folder must not stay on the path: inspect.py would hide the standard library's inspect.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE), *(p for p in sys.path if os.path.abspath(p) != HERE)]

from benchmarks import common  # noqa: E402

JOBS = (1, 2, 4)
TASKS = {
    "copied, one .pth": ("out.pth", ("--to-cpu",)),
    "copied, shards": ("out", ("--max-shard-size", "128MB")),
    "cast to bfloat16, one .safetensors": ("out.safetensors", ("--dtype", "bfloat16")),
    "cast to float8_e4m3fn, shards": ("out", ("--dtype", "float8_e4m3fn", "--max-shard-size", "64MB")),
}  # fmt: skip


def contenders(path: str, out: str, flags: tuple[str, ...]) -> list[common.Contender]:
    def clear() -> None:
        shutil.rmtree(out, ignore_errors=True)
        if os.path.exists(out):
            os.unlink(out)

    usual = (*common.CKPTOOL, "convert", path, "-o", out, *flags)
    rows = [common.Contender(f"--jobs {n}", (*usual, "--jobs", str(n)), clear) for n in JOBS]
    return [*rows, common.Contender("--resume", (*usual, "--resume"), clear)]


def main() -> None:
    given = common.parser(__doc__.splitlines()[0]).parse_args()
    with common.work_folder(given.dir) as folder:
        path = common.make_files(folder, given.small)["big"]
        sections = {}
        for title, (name, flags) in TASKS.items():
            made = contenders(path, os.path.join(folder, name), flags)
            rows = common.compete(made, given.rounds)
            text = common.table(rows, "--jobs 1")
            if any(map(common.noisy, rows)):
                text += "\n\nnoisy: one command took twice as long at another time."
            sections[f"{os.path.getsize(path) / 1e6:.0f} MB, {title}"] = text
            made[0].prepare()
        common.report("jobs", sections, given, folder)


if __name__ == "__main__":
    main()
