"""What the README shows works: every `ckptool` line of it is run, every option it names exists."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from readme_support import (
    ROOT,
    ci_block,
    commands,
    expected_status,
    options_known,
    options_named,
    run,
)

README = (ROOT / "README.md").read_text(encoding="utf-8")
STANDING_FOR = {
    "net.pth": "dp_cuda.pth",
    "plain.pth": "net_plain.pth",
    "net3.pth": "net_cuda3.pth",
    "alexnet.pth": "features_module.pth",
    "download.pth": "html.pth",
}
"""The README's friendly names for files of tests/fixtures."""

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes=3):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.bn = nn.BatchNorm2d(2)
        self.fc = nn.Linear(8, num_classes)
"""
"""The net that dp_cuda.pth was saved from."""


def test_the_readme_shows_enough_commands():
    assert len(commands(README)) > 20


@pytest.mark.parametrize("command", commands(README))
def test_a_command_of_the_readme_ends_as_it_says(command: str, tmp_path: Path):
    shutil.copytree(ROOT / "tests" / "fixtures", tmp_path / "tests" / "fixtures")
    shutil.copytree(ROOT / "tests" / "fixtures", tmp_path, dirs_exist_ok=True)
    for name, fixture in STANDING_FOR.items():
        shutil.copy(tmp_path / fixture, tmp_path / name)
    shutil.copytree(tmp_path / "dcp" / "fsdp", tmp_path / "step5")
    (tmp_path / "runs").mkdir()
    for name in ("net_plain.pth", "dp_cuda.pth"):
        shutil.copy(tmp_path / name, tmp_path / "runs")
    (tmp_path / "net.py").write_text(NET)
    argv = shlex.split(command, comments=True)[1:]
    if "-o" in argv:
        (tmp_path / argv[argv.index("-o") + 1]).unlink(missing_ok=True)

    done = run(argv, tmp_path)

    assert done.returncode == expected_status(command), done.stdout + done.stderr
    if "-o" in argv and done.returncode == 0:
        assert (tmp_path / argv[argv.index("-o") + 1]).exists()


def test_every_option_the_readme_names_exists(tmp_path: Path):
    named = options_named(README)

    assert "--to-cpu" in named
    assert named - options_known(tmp_path) == set()


def test_the_screen_is_what_is_printed(tmp_path: Path):
    shown = re.search(r"<!-- screen: (.*?) -->\n```text\n(.*?)```", README, re.DOTALL)
    shutil.copytree(ROOT / "tests" / "fixtures", tmp_path, dirs_exist_ok=True)

    assert shown
    assert run(shlex.split(shown[1]), tmp_path).stdout == shown[2]


def test_the_readme_has_the_blocks_that_ci_runs():
    for name in ("try", "test"):
        assert ci_block(README, name)
