"""A checkpoint of some megabytes, the conversions that the engines are tried with, and workers
that misbehave.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import ckptool
from ckptool import engines, remote_sink, remote_tasks

STEP = 96 << 10
"""Bytes of a task in tests: dozens of tasks for a file of some megabytes."""
CONVERSIONS = {
    "zip": ("out.pth", {"to_cpu": True}),
    "safetensors": ("out.safetensors", {}),
    "shards": ("out", {"max_shard_size": "700KB"}),
    "cast zip": ("out.pth", {"dtype": "float16"}),  # Made parts, whose checksums are Late
    "cast shards": ("out", {"dtype": "bfloat16", "max_shard_size": "400KB"}),
    "legacy": ("out.pth", {"to": "legacy", "strip_module": True}),
}


def make(path: Path, count: int = 24, numel: int = 40_000) -> Path:
    """Tensors of 160 kB (some are cut), small ones, one that overflows float16."""
    import torch

    torch.manual_seed(0)
    state = {"module.big": torch.full((5,), 1e6)}
    state |= {f"module.l{i}.weight": torch.randn(numel + i) for i in range(count)}
    state |= {f"module.l{i}.bias": torch.randn(3) for i in range(count)}
    torch.save({"epoch": 7, "state_dict": state}, path)
    return path


def convert(source, folder, name, **options):
    """The conversion `name` of `source` into `folder`; what it said, and the output's path."""
    output, words = CONVERSIONS[name]
    done = ckptool.convert(source, Path(folder) / output, **words, **options)
    return done, Path(folder) / output


def made_alone(source, folders, names):
    """What one pair of hands makes of each conversion: its digests, and what it said."""
    made = {}
    for name in names:
        done, path = convert(source, folders.mktemp("plain"), name)
        made[name] = digests(path), done
    return made


def digests(path: Path) -> dict[str, str]:
    """SHA-256 of a file, or of each file in a folder, by name (in a file: '')."""
    if path.is_file():
        return {"": hashlib.sha256(path.read_bytes()).hexdigest()}
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(path.iterdir())}


def left(folder: Path) -> list[str]:
    """Names that begin with a dot: temp files and books."""
    return sorted(name for _, _, names in os.walk(folder) for name in names if name[0] == ".")


# -- workers -----------------------------------------------------------------------------------
def raising(task):
    """A worker that meets a bug in its third task."""
    if task.number == 2:
        raise RuntimeError("the worker fell over")
    return engines.run_task(task)


def full_disk(task):
    """A worker whose disk is full at its third task."""
    if task.number == 2:
        raise OSError(28, "No space left on device")
    return engines.run_task(task)


def dying(task, number=2):
    """A worker that is killed in the middle of one task, the first time that runs."""
    mark = Path(task.path).parent / "died"
    if task.number == number and not mark.exists():
        mark.write_text(str(os.getpid()))
        with open(task.path, "r+b") as file:  # half of it is written, and wrong
            file.seek(task.start)
            file.write(b"\xff" * (task.size // 2))
        os.kill(os.getpid(), 9)
    return engines.run_task(task)


def dying_sender(task, method="write", number=2, after=0):
    """A worker that is killed right after this method of its upload (when so many bytes were taken),
    the first time one task runs.
    """
    mark = Path(task.sources[0].uri).parent / "died"
    if task.number == number and not mark.exists():
        mark.write_text(str(os.getpid()))
        real = getattr(remote_sink.ObjectTarget, method)

        def killed(self, *args, **words):
            real(self, *args, **words)
            if self.written() >= after:
                os.kill(os.getpid(), 9)

        setattr(remote_sink.ObjectTarget, method, killed)
    return remote_tasks.send_far(task)


def signed(task):
    """A worker that leaves its address, and is killed once (see `dying`)."""
    from distributed import get_worker

    mark = Path(task.path).parent / ("by-" + get_worker().address.split("//")[1].split(":")[0])
    mark.touch()
    return dying(task, 6)
