"""The command line: exit statuses, help, errors, colour, terminals, pipes, hostile names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from fixtures.make_fixtures import save
from verbs_support import FIXTURES, ROOT, cli, left_alone, run

from ckptool.cli import main as entry

DP_CUDA = FIXTURES / "dp_cuda.pth"
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


# -- exit status -------------------------------------------------------------------------------
def test_0_done(capsys):
    assert cli(capsys, "inspect", DP_CUDA)[0] == 0
    assert cli(capsys, "--version")[:2] == (0, "ckptool, version 0.1.0\n")


def test_1_the_answer_is_no(capsys, tmp_path):
    assert cli(capsys, "inspect", FIXTURES / "evil.pth")[0] == 1
    plain = FIXTURES / "net_plain.pth"
    assert cli(capsys, "convert", plain, "--strip-module", "-o", tmp_path / "o")[0] == 1


MISUSED = [
    [],
    ["nothing"],
    ["inspect"],
    ["inspect", "x.pth", "--what"],
    ["inspect", "x.pth", "--format", "xml"],
    ["inspect", "x.pth", "--limit", "-1"],
    ["convert"],
    ["convert", str(DP_CUDA)],
    ["convert", str(DP_CUDA), "--to-cpu", "--to-gpu", "0"],
    ["convert", str(DP_CUDA), "--to-gpu", "-1"],
    ["convert", str(DP_CUDA), "--to-gpu", "x"],
    ["convert", str(DP_CUDA), "--strip-module", "--add-module", "-o", "o"],
    ["convert", str(DP_CUDA), "--to-cpu", "--keep-module", "--strip-module"],
    ["convert", str(DP_CUDA), "--to-cpu", "--map-location", "cuda:0", "cpu"],
    ["convert", str(DP_CUDA), "--strip-module"],
    ["convert", str(DP_CUDA), "--to-cpu", "-o", "no/such/folder/o"],
    ["inspect", "no-such-file.pth"],
    ["inspect", str(ROOT / "tests")],
    ["inspect", ""],
    ["inspect", str(FIXTURES / "gan.pth"), "--at", "nowhere"],
]


@pytest.mark.parametrize("args", MISUSED, ids=" ".join)
def test_2_trouble(args, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, err = cli(capsys, *args)

    assert status == 2
    assert err
    assert "Traceback" not in err
    left_alone(tmp_path)


@pytest.mark.parametrize("args", MISUSED[2:], ids=" ".join)
def test_trouble_as_json(args, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = cli(capsys, *args, "--json")
    found = json.loads(out)

    assert (status, err) == (2, "")
    assert set(found) == {"schema", "file", "error"}
    assert set(found["error"]) == {"slug", "text", "where", "hint"}
    assert re.fullmatch(r"[a-z0-9-]+", found["error"]["slug"])


@pytest.fixture
def broken_code(monkeypatch):
    def wrong(*args, **kwargs):
        raise ZeroDivisionError("a \x1b[2J bug")

    monkeypatch.setattr("ckptool.cli.inspect.inspect_place", wrong)


@pytest.mark.usefixtures("broken_code")
def test_70_our_own_bug(capsys):
    status, out, err = cli(capsys, "inspect", DP_CUDA)

    assert (status, out) == (70, "")
    assert err == (
        "ckptool: a bug in ckptool 0.1.0: ZeroDivisionError: a \\x1b[2J bug\n"
        "  hint: run it again with --debug and report what it prints\n"
    )


@pytest.mark.usefixtures("broken_code")
def test_a_bug_with_debug_shows_where_and_stays_70(capsys):
    status, _, err = cli(capsys, "inspect", DP_CUDA, "--debug")

    assert status == 70
    assert "Traceback (most recent call last)" in err
    assert CONTROL.search(err) is None


@pytest.mark.parametrize("args", [["inspect"], ["convert", "--to-cpu"]], ids=" ".join)
@pytest.mark.parametrize("style", [[], ["--json"]], ids=str)
def test_debug_shows_a_traceback_and_keeps_the_status(args, style, capsys):
    command, *flags = args
    status, out, err = cli(capsys, command, FIXTURES / "html.pth", *flags, *style, "--debug")

    assert status == 2
    assert "Traceback (most recent call last)" in err
    assert "NotACheckpoint" in err
    if style:
        assert json.loads(out)["error"]["slug"] == "not-a-checkpoint"


def test_130_interrupted(capsys, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptool.cli.inspect.inspect_place", interrupted)
    status, out, err = cli(capsys, "inspect", DP_CUDA)

    assert (status, out) == (130, "")
    assert err.endswith("ckptool: interrupted; nothing is left behind\n")


def test_an_interrupted_convert_leaves_nothing(capsys, copy, monkeypatch, tmp_path):
    path = copy("dp_cuda.pth")

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptool.cli.convert._Bar.show", interrupted)
    assert cli(capsys, "convert", path, "--to-cpu")[0] == 130
    left_alone(tmp_path, path.name)


@pytest.fixture
def many(tmp_path):
    """More keys than a pipe holds."""
    path = tmp_path / "many.pth"
    one = torch.zeros(1)
    save({f"module.block{i}.attention.weight": one for i in range(5000)}, path)
    return path


@pytest.mark.parametrize("flags", [["--keys"], ["--format", "plain"], ["--json"], []], ids=str)
def test_141_when_the_reader_went_away(flags, many):
    with subprocess.Popen(
        [sys.executable, "-m", "ckptool", "inspect", str(many), *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        process.stdout.close()
        err = process.stderr.read()

    assert (process.returncode, err) == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_under_stdout_is_no_success():
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ckptool", "inspect", DP_CUDA],
            stdout=full, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
        )  # fmt: skip
    assert done.returncode not in (0, 1)


# -- help --------------------------------------------------------------------------------------
HEADINGS = {
    "inspect": ["Examples:", "Rows:", "Format:", "Other:"],
    "convert": ["Examples:", "Device:", "Names:", "Output:", "Safety:", "Format:", "Other:"],
}


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", HEADINGS)
def test_help_opens_with_examples_and_has_headings(command, flag, capsys):
    status, out, err = cli(capsys, command, flag)
    lines = out.splitlines()

    assert (status, err) == (0, "")
    assert [line for line in lines if line in HEADINGS[command]] == HEADINGS[command]
    assert lines[2] == "Examples:"
    assert all(line.startswith(f"  ckptool {command} ") for line in lines[3:6])
    for flag in ("--json", "-q, --quiet", "-v, --verbose", "--color", "--debug", "-h, --help"):
        assert flag in out
    assert max(map(len, lines)) <= 80


def test_the_front_lists_the_commands(capsys):
    status, out, _ = cli(capsys, "-h")

    assert status == 0
    for name, (_, text) in entry.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(text)}$", out, re.MULTILINE)


# -- errors and colour -------------------------------------------------------------------------
def test_an_error_is_one_line_and_a_hint(capsys, monkeypatch):
    monkeypatch.chdir(FIXTURES)
    assert cli(capsys, "inspect", "html.pth")[2].splitlines() == [
        "ckptool: html.pth: not a checkpoint: an HTML page, 150 bytes "
        '("Google Drive - Virus scan warning")',
        "  hint: the download saved a web page instead of the file",
    ]


RED = "\x1b[31mckptool:\x1b[0m"
COLOURED = [
    ([], {}, False),
    ([], {"FORCE_COLOR": "1"}, True),
    ([], {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    (["--color", "always"], {"NO_COLOR": "1"}, True),
    (["--color=always"], {}, True),
    (["--color", "never"], {"FORCE_COLOR": "1"}, False),
]


@pytest.mark.parametrize(("flags", "env", "coloured"), COLOURED)
@pytest.mark.parametrize("command", [["inspect"], ["convert", "--to-cpu"]], ids=" ".join)
def test_colour_is_as_asked(command, flags, env, coloured, capsys, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    _, out, err = cli(capsys, *command, FIXTURES / "html.pth", *flags)

    assert err.startswith(RED if coloured else "ckptool:")
    assert "\x1b" not in out + err.replace(RED, "")


def test_colour_on_a_terminal(capsys, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    entry.main(["inspect", str(FIXTURES / "html.pth")])
    assert capsys.readouterr().err.startswith(RED)


# -- streams -----------------------------------------------------------------------------------
@pytest.mark.parametrize("style", ["table", "tree", "plain", "json", "csv", "markdown"])
def test_an_ascii_locale_is_no_trouble(style):
    env = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = run("inspect", FIXTURES / "unicode_keys.pth", "--format", style, env=env)

    assert done.returncode == 0
    assert done.stdout.isascii()
    assert rb"\u7f16" in done.stdout
    if style == "json":
        found = json.loads(done.stdout)
        assert found["tables"][0]["tensors"][0]["key"] == "module.编码器.权重"


def test_an_ascii_locale_converts(copy):
    env = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = run("convert", copy("unicode_keys.pth", "权重.pth"), "--to-cpu", env=env)

    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr.isascii()
    assert rb".cpu.pth" in done.stderr


def test_a_long_table_is_cut_on_a_terminal_only(capsys, monkeypatch, many):
    whole = cli(capsys, "inspect", many)[1]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    entry.main(["inspect", str(many)])
    cut = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    entry.main(["inspect", str(many), "--limit", "150"])
    asked = capsys.readouterr().out

    assert [text.count("  module.block") for text in (whole, cut, asked)] == [5000, 100, 150]
    assert "… 4,900 more of 5,000 tensors" in cut
    first = cut.splitlines()[0]
    assert cut.count(first) == 2  # the summary again, below the rows
    assert "more of" not in whole


def test_200_rows_are_not_cut(capsys, monkeypatch, tmp_path):
    save({f"w{i}": torch.zeros(1) for i in range(200)}, tmp_path / "net.pth")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    entry.main(["inspect", str(tmp_path / "net.pth")])
    assert "more of" not in capsys.readouterr().out


def test_convert_says_what_it_did_on_stderr_alone(capsys, copy):
    path = copy("dp_cuda.pth")
    status, out, err = cli(capsys, "convert", path, "--to-cpu")

    assert (status, out) == (0, "")
    assert re.match(
        rf"{re.escape(str(path))} -> \S+dp_cuda\.cpu\.pth   9\.\d kB in \d+\.\d\d s\n", err
    )
    assert "  devices   21 storages cuda:0 -> cpu\n" in err
    assert "  keys      9 renamed, 'module.' removed" in err
    assert "args.device still says 'cuda:0'" in err
    assert cli(capsys, "convert", path, "--to-cpu", "-f", "-q") == (0, "", "")


def test_a_dry_run_is_data(capsys, copy, tmp_path):
    path = copy("dp_cuda.pth")
    status, out, err = cli(capsys, "convert", path, "--to-cpu", "-n")

    assert (status, err) == (0, "")
    assert "dry run: nothing written" in out
    assert "module.fc.bias -> fc.bias" in out
    left_alone(tmp_path, path.name)


def test_convert_as_json(capsys, copy):
    path = copy("dp_cuda.pth")
    status, out, err = cli(capsys, "convert", path, "--to-cpu", "--json")
    found = json.loads(out)
    made = path.with_suffix(".cpu.pth")

    assert (status, err) == (0, "")
    promised = {
        "schema",
        "input",
        "outputs",
        "renames",
        "dropped",
        "devices",
        "left_behind",
        "notes",
    }
    assert set(found) >= promised
    assert found["outputs"] == [{"file": str(made), "size_bytes": made.stat().st_size}]
    assert found["devices"] == {"cuda:0": "cpu"}
    assert found["renames"]["module.fc.bias"] == "fc.bias"
    assert {"path": ["args", "device"], "text": "cuda:0"} in found["left_behind"]


# -- names of outputs --------------------------------------------------------------------------
NAMES = [
    ("net.pth", ["--to-cpu"], "net.cpu.pth"),
    ("net.pth", ["--to-gpu", "1"], "net.cuda1.pth"),
    ("net.pth.tar", ["--to-cpu"], "net.cpu.pth.tar"),
    ("net.pt.tar", ["--to-gpu", "0"], "net.cuda0.pt.tar"),
    ("a.b.ckpt", ["--to-cpu"], "a.b.cpu.ckpt"),
    ("net", ["--to-cpu"], "net.cpu"),
    ("权重.bin", ["--to-cpu"], "权重.cpu.bin"),
]


@pytest.mark.parametrize(("name", "flags", "output"), NAMES)
def test_the_name_of_the_output(name, flags, output, copy, capsys, tmp_path):
    copy("net_cuda3.pth", name)

    assert cli(capsys, "convert", tmp_path / name, *flags)[0] == 0
    left_alone(tmp_path, name, output)


def test_the_progress_bar_comes_after_a_second_on_a_terminal_only(copy, capsys, monkeypatch):
    times = iter(range(0, 10_000, 2))
    monkeypatch.setattr("ckptool.cli.convert.monotonic", lambda: next(times))
    path = copy("dp_cuda.pth")
    assert "writing" not in cli(capsys, "convert", path, "--to-cpu")[2]

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    entry.main(["convert", str(path), "--to-cpu", "-f"])
    assert "writing" in capsys.readouterr().err


def test_module_and_script_are_one(copy):
    path = copy("dp_cuda.pth")
    done = run("convert", path, "--to-cpu", "--json")

    assert done.returncode == 0
    assert json.loads(done.stdout)["outputs"][0]["file"] == str(path.with_suffix(".cpu.pth"))
