"""One fresh interpreter that asks ckptool about every case (see runner.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hostile.corpus import CORPUS, lay
from hostile.runner import TASKS

RUNNER = Path(__file__).parent / "runner.py"


class Asker:
    """Sends jobs to the runner; `ask` gives its answers for one case."""

    def __init__(self, home: Path) -> None:
        self.home, self.number = home, 0
        self.marker = home / "MARKER"
        self.plain = self.laid("control/plain")
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1"}
        self.process = subprocess.Popen(
            [sys.executable, RUNNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.send(self.job(self.plain, TASKS))

    def laid(self, label: str) -> Path:
        """The case in a folder of its own, alone."""
        self.number += 1
        folder = self.home / str(self.number)
        folder.mkdir()
        return lay(CORPUS[label], folder)

    def job(self, file: Path, tasks) -> dict:
        out = self.home / f"out{self.number}"
        out.mkdir()
        names = {"file": str(file), "out": str(out), "plain": str(self.plain)}
        return {**names, "marker": str(self.marker), "tasks": list(tasks)}

    def send(self, job: dict) -> None:
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def ask(self, file: Path, tasks) -> tuple[Path, dict]:
        """(the folder of outputs, what each task answered)."""
        job = self.job(file, tasks)
        self.send(job)
        line = self.process.stdout.readline()
        assert line, "the runner itself ended"
        answer = json.loads(line)
        assert not answer["died"], answer["died"]
        return Path(job["out"]), answer["tasks"]


@pytest.fixture(scope="session")
def asker(tmp_path_factory):
    made = Asker(tmp_path_factory.mktemp("hostile"))
    yield made
    made.process.stdin.close()
    made.process.stdout.close()
    made.process.wait()
