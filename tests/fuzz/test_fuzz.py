"""Every fuzz target for ten seconds, two at a time; a minute each by `pytest -m long`.

Guided by coverage where atheris is installed, else the same mutations in a seeded loop.
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
from fuzz.targets import TARGETS

TESTS = Path(__file__).parent.parent
AT_ONCE = 2
LEAST = 20  # mutated files in ten seconds, of the slowest target on a slow and busy machine


def fuzz(target, seconds, keep):
    """(exit status, the report, what was said)."""
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "fuzz.run", target, "--seconds", str(seconds), "--keep", str(keep)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True, text=True, timeout=seconds * 3 + 120, check=False,
    )  # fmt: skip
    reports = [line for line in done.stdout.splitlines() if line.startswith('{"target"')]
    return done.returncode, json.loads(reports[-1]) if reports else {}, done.stderr[-3000:]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """Starts all targets of one length; `running(target, seconds)` waits for one."""
    keep, started = tmp_path_factory.mktemp("findings"), {}
    with ThreadPoolExecutor(AT_ONCE) as pool:

        def wait(target, seconds):
            if seconds not in started:
                started[seconds] = {
                    name: pool.submit(fuzz, name, seconds, keep) for name in TARGETS
                }
            return started[seconds][target].result()

        yield wait


def check(target, result):
    status, report, said = result
    print(report)  # shown by pytest -rP: the counts
    assert status == 0, said
    assert report["executions"] >= LEAST + len(TARGETS[target].seeds())
    answers = Counter(report["answers"])
    refused = sum(n for word, n in answers.items() if ":" not in word) - answers["read"]
    assert refused >= LEAST // 2  # what is mutated is broken more often than not
    assert answers["read"] > 0


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_but_our_own_errors_comes_out(target, running):
    check(target, running(target, 10))


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_but_our_own_errors_comes_out_in_a_minute(target, running):
    check(target, running(target, 60))
