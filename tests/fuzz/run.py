"""`python -m fuzz.run TARGET --seconds N`: fuzz one target; a finding ends it with a status that
is not 0, its input saved in the folder `--keep`.

Guided by coverage where atheris is installed (Linux), else a seeded loop of the same mutations.
Prints one line of JSON at the end: executions, engine, answers.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import random
import sys
import time
import traceback
import zlib
from pathlib import Path

_LONGEST = 1 << 15
# What is imported while atheris counts: all that a target reaches, and no torch.
_COUNTED = ("ckptool.formats", "ckptool.pickles", "ckptool.places", "ckptool.zip", "ckptool.values",
            "ckptool.verbs.convert", "ckptool.verbs.inspect", "ckptool.verbs.leaving",
            "ckptool.verbs.salvage", "ckptool.verbs.verify", "ckptool.api_verify")  # fmt: skip


def main():
    asked = _arguments()
    try:
        import atheris
    except ImportError:
        atheris = None
    if asked.plain or asked.input or atheris is None:
        return _plain(asked)
    with atheris.instrument_imports(include=["ckptool"], enable_loader_override=False):
        _import_all()
    return _guided(asked, atheris)


def _arguments():
    parser = argparse.ArgumentParser(prog="fuzz.run")
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="the seeded loop, also with atheris")
    parser.add_argument("--keep", default=".", help="where an input that fails is saved")
    parser.add_argument("--input", help="ask of this one input alone")
    return parser.parse_args()


def _import_all():
    import ckptool

    for found in pkgutil.walk_packages(ckptool.__path__, "ckptool."):
        if found.name.startswith(_COUNTED):
            importlib.import_module(found.name)


class Run:
    """One target at work: counts, saves what fails, says at the end what was done."""

    def __init__(self, asked, engine):
        from fuzz.asked import Desk
        from fuzz.targets import TARGETS

        self.asked, self.engine, self.count = asked, engine, 0
        self.target, self.desk = TARGETS[asked.target], Desk()
        self.started, self.seeds = time.monotonic(), len(self.target.seeds())

    def one(self, data):
        """Ask once. An exception is a finding: the input is saved. The time runs from where the
        valid inputs, which come first, are done.
        """
        self.count += 1
        if self.count == self.seeds:
            self.started = time.monotonic()
        try:
            self.target.ask(self.desk, data)
        except BaseException:
            path = Path(self.asked.keep) / f"{self.asked.target}-{zlib.crc32(data):08x}"
            path.write_bytes(data)
            print(f"FINDING saved as {path}", file=sys.stderr)
            self.report()
            raise

    def report(self):
        row = {"target": self.asked.target, "engine": self.engine, "executions": self.count,
               "seconds": round(time.monotonic() - self.started, 1),
               "answers": dict(self.desk.answers.most_common())}  # fmt: skip
        print(json.dumps(row), flush=True)
        self.desk.close()


def _plain(asked):
    run = Run(asked, "plain")
    dice, seeds = random.Random(asked.seed), run.target.seeds()
    if asked.input:
        seeds = [Path(asked.input).read_bytes()]
    try:
        for data in seeds:
            run.one(data)
        pool = list(seeds)
        while not asked.input and time.monotonic() - run.started < asked.seconds:
            data = run.target.mutate(dice.choice(pool), dice)[:_LONGEST]
            run.one(data)
            if dice.random() < 0.02:  # mutated again later
                pool[dice.randrange(len(seeds), len(pool) + 1) :] = [data]
    except Exception:
        traceback.print_exc()
        return 1
    run.report()
    return 0


def _guided(asked, atheris):
    """libFuzzer ends the process itself, without Python: the report is made before it does."""
    run = Run(asked, "atheris")

    def one(data):
        run.one(data)
        if run.count > run.seeds and time.monotonic() - run.started > asked.seconds:
            run.report()
            os._exit(0)

    def mutate(data, longest, seed):
        dice = random.Random(seed)
        if dice.random() < 0.3:
            return atheris.Mutate(data, longest)
        return run.target.mutate(data, dice)[:longest]

    corpus = run.desk.path / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(run.target.seeds()):
        (corpus / str(number)).write_bytes(seed)
    options = [f"-max_total_time={asked.seconds + 30}", f"-seed={asked.seed}", f"-max_len={_LONGEST}",
               "-timeout=20", "-rss_limit_mb=2048", "-print_final_stats=0", "-verbosity=0",
               f"-artifact_prefix={asked.keep}/", "-len_control=0"]  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(corpus)], one, custom_mutator=mutate)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
