"""Mutated files that torch's restricted loader takes: ckptool refuses, or agrees on every key,
shape, type and byte, in each of its ways: inspect, load, a rewrite to either container of torch
(storages moved to the CPU), and .safetensors.

torch can be crashed by a pickle, so all of it happens in a process that may die.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
WAYS = ("inspect", "load", "pth", "legacy", "safetensors")
KINDS = ("zip", "legacy")


def compared(kind, start, count):
    """(counts of what became of the files, problems). Where the process dies, the rest is done by
    another; a death in our own phase is a problem.
    """
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    counts, problems, end = Counter(), [], start + count
    while start < end:
        command = [sys.executable, "-m", "fuzz.against", kind, str(start), str(end - start)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        _count(rows, counts, problems)
        if done.returncode == 0:
            break
        last = rows[-1] if rows else {}
        if last.get("phase") != "torch":
            problems.append({"died": done.returncode, "last": last, "said": done.stderr[-2000:]})
            break
        counts["torch died"] += 1
        start = max(start, last["n"]) + 1
    return counts, problems


def _count(rows, counts, problems):
    for row in rows:
        if "problem" in row:
            problems.append(row)
        elif isinstance(row.get("result"), dict):
            counts["compared"] += 1
            counts.update(way for way in WAYS if row["result"][way] == "agrees")
        elif "result" in row:
            counts[row["result"]] += 1


def both(count):
    with ThreadPoolExecutor(len(KINDS)) as pool:
        return dict(zip(KINDS, pool.map(lambda kind: compared(kind, 0, count), KINDS), strict=True))


def check(found, least):
    for kind, (counts, problems) in found.items():
        print(kind, dict(counts))  # shown by pytest -rP
        assert not problems, problems[0]
        for way in WAYS:
            assert counts[way] >= least, (kind, way, counts)


def test_we_refuse_or_agree_with_torch():
    """Some hundreds of mutated files, and those they were made of."""
    check(both(300), 50)


@pytest.mark.long
def test_we_refuse_or_agree_with_torch_on_tens_of_thousands():
    check(both(15_000), 1_500)
