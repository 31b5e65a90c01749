"""What the README shows works: every `ckptool` line of it is run, every option it names exists."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
STANDING_FOR = {
    "net.pth": "dp_cuda.pth",
    "plain.pth": "net_plain.pth",
    "net3.pth": "net_cuda3.pth",
    "alexnet.pth": "features_module.pth",
    "download.pth": "html.pth",
}
"""The README's friendly names for files of tests/fixtures."""


def commands() -> list[str]:
    """The commands of bash blocks and of inline code; no install lines, no patterns."""
    blocks = re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in re.sub(r"&&\s*\n", "&& ", block).splitlines()]
    inline = re.findall(
        r"`(ckptool [^`]* [^`]*)`", re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    )
    inline = [line for line in inline if re.search(r"\.(pth|safetensors)\b", line)]
    parts = [part.strip() for line in [*lines, *inline] for part in line.split("&&")]
    return list(dict.fromkeys(part for part in parts if part.startswith("ckptool ")))


def expected_status(command: str) -> int:
    found = re.search(r"# exit (\d+)", command)
    return int(found[1]) if found else 0


def run(argv: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "ckptool", *argv]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, encoding="utf-8", check=False
    )


def test_the_readme_shows_enough_commands():
    assert len(commands()) > 20


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_readme_ends_as_it_says(command: str, tmp_path: Path):
    shutil.copytree(ROOT / "tests" / "fixtures", tmp_path / "tests" / "fixtures")
    shutil.copytree(ROOT / "tests" / "fixtures", tmp_path, dirs_exist_ok=True)
    for name, fixture in STANDING_FOR.items():
        shutil.copy(tmp_path / fixture, tmp_path / name)
    argv = shlex.split(command, comments=True)[1:]
    if "-o" in argv:
        (tmp_path / argv[argv.index("-o") + 1]).unlink(missing_ok=True)

    done = run(argv, tmp_path)

    assert done.returncode == expected_status(command), done.stdout + done.stderr
    if "-o" in argv and done.returncode == 0:
        assert (tmp_path / argv[argv.index("-o") + 1]).exists()


def test_every_option_the_readme_names_exists(tmp_path: Path):
    helps = "".join(run([verb, "--help"], tmp_path).stdout for verb in ("inspect", "convert"))
    ours = re.sub(r"^.*(?:pip install|pytest).*$", "", README, flags=re.MULTILINE)

    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", ours))

    assert "--to-cpu" in named
    assert {option for option in named if option not in helps} == set()


def test_the_screen_is_what_is_printed(tmp_path: Path):
    shown = re.search(r"<!-- screen: (.*?) -->\n```text\n(.*?)```", README, re.DOTALL)
    shutil.copytree(ROOT / "tests" / "fixtures", tmp_path, dirs_exist_ok=True)

    assert shown
    assert run(shlex.split(shown[1]), tmp_path).stdout == shown[2]


def test_the_readme_has_the_blocks_that_ci_runs():
    for name in ("try", "test"):
        assert re.search(rf"^<!-- ci: {name} -->\n```bash\n", README, re.MULTILINE)
