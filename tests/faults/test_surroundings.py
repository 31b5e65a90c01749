"""Streams that are closed or full, odd terminals, odd names, odd folders, files of odd size."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time

import pytest
import torch
from fixtures.make_fixtures import save
from verbs_support import FIXTURES, ROOT, left_alone, run
from wcwidth import wcswidth

import ckptool
from ckptool.render.text import columns, lay_out, padded

DP_CUDA = FIXTURES / "dp_cuda.pth"
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def shell(line, cwd, **env):
    """A line of sh; `$C` is the command."""
    known = os.environ.get("PYTHONPATH")  # an empty part would be the current folder
    path = os.pathsep.join([str(ROOT), known] if known else [str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "C": f"{sys.executable} -m ckptool", **env}
    return subprocess.run(
        ["sh", "-c", line], cwd=cwd, env=env, capture_output=True, check=False, timeout=60
    )


@pytest.fixture
def net(tmp_path):
    path = tmp_path / "net.pth"
    save({"module.w": torch.ones(3)}, path, "cuda:0")
    return path


# -- streams -----------------------------------------------------------------------------------
UNWRITTEN = b"standard output: it cannot be written to: "
STREAMS = [
    ("$C inspect net.pth >&-", 2, UNWRITTEN + b"Bad file descriptor"),
    ("$C inspect nothing.pth --json >&-", 2, UNWRITTEN + b"Bad file descriptor"),
    ("$C inspect net.pth >/dev/full", 2, UNWRITTEN + b"No space left on device"),
    ("$C verify net.pth --json >/dev/full", 2, UNWRITTEN + b"No space left on device"),
    ("$C --help >/dev/full", 2, UNWRITTEN + b"No space left on device"),
    ("$C inspect net.pth >&- 2>&-", 2, b""),
    ("$C inspect nothing.pth 2>&-", 2, b""),
    ("$C inspect nothing.pth 2>/dev/full", 2, b""),
    ("$C inspect --nonsense 2>/dev/full", 2, b""),
    ("$C inspect net.pth <&- >/dev/null", 0, b""),
    ("$C convert net.pth --to-cpu <&- >&- 2>&-", 0, b""),
    ("$C convert net.pth --to-cpu 2>/dev/full", 0, b""),
]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(("line", "status", "said"), STREAMS, ids=[row[0] for row in STREAMS])
def test_streams_that_are_closed_or_full(line, status, said, net, tmp_path):
    """0 and 1 are answers; where none could be given it is 2, never a bug or a traceback."""
    done = shell(line, tmp_path)

    assert done.returncode == status
    assert said in done.stderr
    assert b"Traceback" not in done.stderr
    assert done.stderr.count(b"\n") <= 2
    if "convert" in line:  # no message went into the file, whose number could have been theirs
        assert ckptool.verify(tmp_path / "net.cpu.pth").whole
        assert ckptool.inspect(tmp_path / "net.cpu.pth").rows[0].key == "w"


@pytest.mark.parametrize("words", ["inspect {0}", "inspect {0} --json", "diff {0} {0}", "verify {0}"])  # fmt: skip
def test_the_reader_goes_away(words, net, tmp_path):
    """A status of the command, not of the pipe: POSIX sh has no pipefail."""
    line = f"($C {words.format(net)}; echo $? >&2) | true"
    assert shell(line, tmp_path).stderr in (b"141\n", b"0\n")  # 0: it was quicker than the reader


def test_no_terminal_no_colour_no_prompt(net, tmp_path):
    (tmp_path / "net.cpu.pth").touch()
    done = run("convert", net, "--to-cpu", cwd=tmp_path, stdin=subprocess.DEVNULL)

    assert done.returncode == 2  # it exists: refused, not asked about
    assert b"replace it with -f" in done.stderr
    assert b"\x1b" not in done.stderr


@pytest.mark.parametrize("width", ["100000", "1", "0", "-5", "garbage", "9" * 30])
@pytest.mark.parametrize("words", [["inspect", DP_CUDA], ["convert", "--help"], ["--nonsense"]], ids=["table", "help", "error"])  # fmt: skip
def test_odd_widths_of_a_terminal(words, width):
    env = {"COLUMNS": width, "LINES": width, "TERM": "dumb"}
    done = run(*words, env=env)
    plain = run(*words, env={"COLUMNS": "80", "TERM": "xterm"})

    assert done.returncode == plain.returncode
    assert b"Traceback" not in done.stderr
    assert len(done.stdout) < 100_000
    if words[0] == "inspect":
        assert done.stdout == plain.stdout


# -- names of files -----------------------------------------------------------------------------
ODD = b"b\xff\xfe\n\x1b[31m\xe2\x80\xae\xe6\x9d\x83.pth"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
@pytest.mark.parametrize("env", [{}, {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}], ids=["UTF-8", "ASCII"])  # fmt: skip
def test_names_of_files_that_are_no_text(env, net, tmp_path):
    """Escaped in every message, valid in JSON, the right bytes on the disk."""
    odd = os.fsdecode(ODD)
    os.rename(net, tmp_path / odd)
    rows = [
        (["inspect", odd], 0),
        (["inspect", odd, "--json"], 0),
        (["verify", odd], 0),
        (["diff", odd, odd, "--json"], 0),
        (["inspect", f"no{odd}"], 2),
        (["inspect", f"no{odd}", "--json"], 2),
        (["convert", odd, "--to-cpu"], 0),
        (["convert", odd, "--to-cpu"], 2),
        (["convert", odd, "--to-cpu", "--json", "-o", f"out{odd}"], 0),
        (["convert", odd, "--to-cpu", "--in-place"], 0),
        (["convert", odd, "--undo", "--json"], 0),
        (["inspect", odd, f"--nonsense{odd}"], 2),
        (["convert", odd, "--to", odd], 2),
        ([odd], 2),
    ]
    for words, status in rows:
        done = run(*words, cwd=tmp_path, env=env)
        text = (done.stdout + done.stderr).decode("ascii" if env else "utf-8")
        assert done.returncode == status, (words, text)
        assert CONTROL.search(text) is None, words
        assert "Traceback" not in text
        assert "bug" not in text
        if "--json" in words:
            data = json.loads(done.stdout)
            named = data.get("file") or data.get("input") or odd
            assert os.fsencode(named).endswith(ODD)
    made = sorted(os.fsencode(p.name) for p in tmp_path.iterdir())
    assert made == sorted([ODD, ODD.replace(b".pth", b".cpu.pth"), b"out" + ODD])


# -- odd inputs and folders -----------------------------------------------------------------------
@pytest.mark.skipif(sys.platform != "linux", reason="devices of Linux")
@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom", "/proc/self/mem", "/proc/cpuinfo", "fifo"])  # fmt: skip
def test_devices_as_inputs_are_refused_at_once(device, net, tmp_path):
    if device == "fifo":
        device = tmp_path / "fifo"
        os.mkfifo(device)
    for words in (
        ["inspect", device],
        ["verify", device],
        ["diff", net, device],
        ["convert", device, "--to", "zip", "-o", "out"],
        ["convert", net, "--rename-file", device, "-o", "out"],
        ["inspect", net, "--against", device],
    ):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run(*words, cwd=tmp_path, timeout=30)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 2, words
        assert b"Traceback" not in done.stderr
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
    assert not (tmp_path / "out").exists()


def test_a_current_folder_that_is_gone(net, tmp_path):
    rows = [
        ("$C inspect ../net.pth >/dev/null", 0),
        ("$C inspect net.pth", 2),
        ("$C verify ../net.pth >/dev/null", 0),
        ("$C convert ../net.pth --to-cpu -o out.pth", 2),
        ("$C convert ../net.pth --to shards -o out", 2),
        (f"$C convert {net} --to-cpu -o {tmp_path}/out.pth", 0),
    ]
    for line, status in rows:
        (tmp_path / "gone").mkdir()
        done = shell(f"cd gone; rmdir ../gone; {line}", tmp_path)
        assert done.returncode == status, (line, done.stderr)
        assert b"bug" not in done.stderr
    left_alone(tmp_path, "net.pth", "out.pth")


def test_next_to_no_environment(net):
    env = {k: v for k, v in os.environ.items() if k in ("PYTHONPATH", "SYSTEMROOT")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    words = [sys.executable, "-m", "ckptool", "inspect", str(net)]
    done = subprocess.run(words, env=env, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("name", "said"),
    [("n" * 300, b"File name too long"), ("a/" * 3000 + "x.pth", b"a/a/a"), ("权" * 83, b"")],
    ids=["a long name", "a long path", "as long as it may be"],
)
def test_long_names(name, said, net, tmp_path):
    done = run("convert", net, "--to", "zip", "-o", name, cwd=tmp_path)

    assert done.returncode == (2 if said else 0), done.stderr
    assert said in done.stderr
    assert len(done.stderr) < 10_000
    if said:
        left_alone(tmp_path, "net.pth")


# -- how much -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    """100,000 tensors in one storage."""
    path = tmp_path_factory.mktemp("crowd") / "crowd.pth"
    base = torch.arange(100_000.0)
    save({f"module.layers.{i}.w": base[i : i + 1] for i in range(100_000)}, path)
    return path


# CPU seconds and MB that are allowed: three times, and a fifth more, than what they take.
CROWDED = {
    "inspect": (["inspect", "{0}"], 16, 240),
    "inspect as JSON": (["inspect", "{0}", "--json"], 16, 250),
    "verify": (["verify", "{0}"], 16, 240),
    "diff": (["diff", "{0}", "{0}"], 40, 290),
    "convert": (["convert", "{0}", "--to-cpu", "-o", "{1}/out.pth"], 20, 370),
}


# A process begins as a copy of its parent: of this one it would have torch in its peak.
WATCH = """
import json, resource, subprocess, sys
status = subprocess.call([sys.executable, "-m", "ckptool", *sys.argv[1:]],
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([status, used.ru_utime + used.ru_stime, used.ru_maxrss]))
"""


def used_by(words):
    """CPU seconds and peak kB of a command that ends well."""
    known = os.environ.get("PYTHONPATH")  # an empty part would be the current folder
    path = os.pathsep.join([str(ROOT), known] if known else [str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", WATCH, *words], check=True, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    status, seconds, peak = json.loads(done.stdout)
    assert status == 0
    return seconds, peak


@pytest.mark.long
@pytest.mark.parametrize("case", CROWDED)
def test_a_hundred_thousand_tensors(case, crowd, tmp_path):
    words, seconds, megabytes = CROWDED[case]
    took, peak = used_by([word.format(crowd, tmp_path) for word in words])
    assert took < seconds
    assert peak / 1000 < megabytes


@pytest.fixture(scope="module")
def owners(tmp_path_factory):
    """One tensor, and 25,000, each with a storage of its own; the same as .safetensors."""
    folder = tmp_path_factory.mktemp("owners")
    for count in (1, 25_000):
        net = {f"module.layers.{i // 10}.block{i % 10}.weight": torch.ones(8) for i in range(count)}
        save(net, folder / f"{count}.pth")
        ckptool.convert(folder / f"{count}.pth", folder / f"{count}.safetensors")
    return folder


# Bytes of memory that a tensor may take, a sixth more than it does; they took 2,700 to 4,500 when
# nodes were kept by who only reads, and 6,100 to 11,100 when these kept positions in lists.
EACH = {
    "inspect": (["inspect", "{0}.pth"], 2400),
    "verify": (["verify", "{0}.pth"], 3050),
    "diff": (["diff", "{0}.pth", "{0}.pth"], 3600),
    "diff of safetensors": (["diff", "{0}.safetensors", "{0}.safetensors"], 3400),
    "convert": (["convert", "{0}.pth", "--strip-prefix", "module.", "-o", "{1}.pth", "-f"], 4400),
    "to safetensors": (["convert", "{0}.pth", "-o", "{1}.safetensors", "-f"], 3450),
    "from safetensors": (["convert", "{0}.safetensors", "-o", "{1}.pth", "-f"], 5600),
}


@pytest.mark.parametrize("case", EACH)
def test_the_memory_of_each_tensor(case, owners, tmp_path):
    words, most = EACH[case]
    few, many = (
        used_by([word.format(owners / f"{count}", tmp_path / "out") for word in words])[1]
        for count in (1, 25_000)
    )
    assert (many - few) * 1024 / 25_000 < most


def test_keys_of_ten_thousand_characters(tmp_path, capsys):
    keys = [f"module.{letter * 10_000}" for letter in "x权"] + ["module.w"]
    save({key: torch.ones(1) for key in keys}, tmp_path / "net.pth")
    started = time.process_time()
    text = str(ckptool.inspect(tmp_path / "net.pth"))

    assert max(map(len, text.splitlines())) < 1_000
    ckptool.convert(tmp_path / "net.pth", to_cpu=True)
    made = [row.key for row in ckptool.inspect(tmp_path / "net.cpu.pth").rows]
    assert made == [key.removeprefix("module.") for key in keys]
    assert time.process_time() - started < 5


# -- columns ------------------------------------------------------------------------------------
WIDE = [
    "编码器.权重", "日本語.キー", "한국어.w", "\uff46\uff55.w", "\U0001f44d\U0001f3fd.w", "\U0001f1ef\U0001f1f5.w",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467.w", "e\u0301cole.w", "\u2764\ufe0f.w", "नमस्ते.w", "plain.weight",
]  # fmt: skip


def places(lines, word):
    """The display columns at which `word` begins, where it stands."""
    return {wcswidth(line[: line.index(word)]) for line in lines if word in line}


@pytest.mark.parametrize("copies", [1, 150], ids=["tabulate", "our own layout"])
@pytest.mark.parametrize("style", ["table", "tree"])
def test_columns_stand_below_each_other_whatever_the_keys(style, copies, tmp_path):
    keys = [f"{key}.{i}" for i in range(copies) for key in WIDE]
    save({key: torch.ones(3) for key in keys}, tmp_path / "net.pth")
    done = run("inspect", tmp_path / "net.pth", "--format", style, env={"PYTHONUTF8": "1"})
    lines = [line for line in done.stdout.decode().splitlines() if "12 B" in line]

    assert len(lines) >= len(keys)
    for word in ("[3]", "float32", "cpu"):
        assert len(places(lines, word)) == 1, word


def test_columns_of_a_comparison(tmp_path):
    for name, size in (("a", 2), ("b", 3)):
        save({key: torch.ones(size) for key in WIDE}, tmp_path / f"{name}.pth")
    done = run("diff", tmp_path / "a.pth", tmp_path / "b.pth", env={"PYTHONUTF8": "1"})
    lines = [line for line in done.stdout.decode().splitlines() if "[2]" in line]

    assert len(lines) == len(WIDE)
    assert len(places(lines, "[2]")) == 1


def test_padding_and_layout():
    assert [columns(text) for text in ("", "abc", "权", "e\u0301", "\u2764\ufe0f")] == [
        0,
        3,
        2,
        1,
        2,
    ]
    assert padded("权", 4) == "权  "
    assert padded("权", 4, right=True) == "  权"
    assert padded("too long", 3) == "too long"
    assert lay_out([("a", "1", "x"), ("权", "22", "y")], {1}) == ["a    1  x", "权  22  y"]
