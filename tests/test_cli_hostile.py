"""No name in a file acts on a terminal; no special file makes a command hang."""

from __future__ import annotations

import os
import re

import pytest
import torch
from fixtures.make_fixtures import save
from verbs_support import FIXTURES, cli, keys, run

DP_CUDA = FIXTURES / "dp_cuda.pth"
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


# -- hostile -----------------------------------------------------------------------------------
EVIL = "\x1b[2J\x1b]0;x\x07\r\n\t\x00\x7f\x9b\u202e\u2066\u200b\ufeff\U000e0041"


@pytest.fixture
def hostile(tmp_path):
    path = tmp_path / "net.pth"
    sd = {f"module.{EVIL}w": torch.zeros(2), "module.b" + "x" * 5000: torch.zeros(1)}
    obj = {f"state{EVIL}": sd, f"extra{EVIL}": EVIL, "list": [EVIL, {EVIL: EVIL}]}
    save(obj, path, f"cuda:{EVIL}")
    return path


@pytest.mark.parametrize("style", ["table", "tree", "plain", "json", "jsonl", "csv", "markdown"])
def test_no_name_acts_on_a_terminal(style, hostile, capsys):
    status, out, err = cli(capsys, "inspect", hostile, "--format", style, "-v")

    assert status == 0
    assert CONTROL.search(out + err) is None
    assert out.count("\t") == (8 if style == "plain" else 0)


def test_no_name_acts_on_a_terminal_in_convert(hostile, capsys, tmp_path):
    for flags in (["-n"], [], ["--json", "-f"], ["--strip-module", "-f", "-o", tmp_path / "o"]):
        status, out, err = cli(capsys, "convert", hostile, "--to-cpu", *flags)
        assert status == 0
        assert CONTROL.search(out + err) is None
    assert keys(tmp_path / "o")[0] == f"{EVIL}w"


def test_no_name_acts_on_a_terminal_in_errors(capsys, tmp_path):
    save({f"module.{EVIL}": torch.zeros(1), EVIL: torch.zeros(1)}, tmp_path / "net.pth")
    missing = f"no{EVIL.replace(chr(0), '')}.pth"
    for args in (
        ["convert", tmp_path / "net.pth", "--strip-module", "-o", tmp_path / "o"],
        ["convert", tmp_path / "net.pth", "--strip-module", "-o", tmp_path / "o", "--debug"],
        ["convert", tmp_path / "net.pth", "--strip-module", "-o", tmp_path / "o", "--json"],
        ["convert", tmp_path / "net.pth", "--at", EVIL, "--to-cpu"],
        ["inspect", missing],
        ["inspect", missing, "--debug"],
        ["inspect", tmp_path / "net.pth", "--at", EVIL],
    ):
        status, out, err = cli(capsys, *args)
        assert status == 2
        assert CONTROL.search(out + err) is None, args


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
@pytest.mark.parametrize("args", [["inspect"], ["convert", "--to-cpu"]], ids=" ".join)
def test_a_fifo_does_not_hang(args, tmp_path):
    os.mkfifo(tmp_path / "net.pth")
    command, *flags = args
    done = run(command, tmp_path / "net.pth", *flags, timeout=30)

    assert (done.returncode, done.stdout) == (2, b"")
    assert b"FIFO" in done.stderr or b"pipe" in done.stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_fifo_as_the_output_is_refused(tmp_path):
    os.mkfifo(tmp_path / "out.pth")
    done = run("convert", DP_CUDA, "--to-cpu", "-f", "-o", tmp_path / "out.pth", timeout=30)

    assert done.returncode == 2
