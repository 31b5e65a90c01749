"""What the tests of README.md and of docs/ share: the commands, code and screens in Markdown, run."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import devices_support
import pytest
import torch
from fixtures.make_fixtures import Tags, tagged

from ckptool.cli.main import COMMANDS, main
from ckptool.models import devices

ROOT = Path(__file__).parent.parent
VERBS = tuple(COMMANDS)


def run(argv: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "ckptool", *argv]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, encoding="utf-8", check=False
    )


# -- what a document shows -----------------------------------------------------------------------
class Step(NamedTuple):
    """A fenced block, or a command in a sentence (`inline`). `mark` is the comment above it."""

    kind: str
    text: str
    mark: str
    line: int

    @property
    def commands(self) -> list[str]:
        """The lines of a shell: continued ones joined, `&&` taken apart."""
        text = re.sub(r"(?:\\|&&)[ ]*\n", lambda found: found[0].strip(" \\\n") + " ", self.text)
        return [part.strip() for line in text.splitlines() for part in line.split("&&")]


_STEP = re.compile(
    r"(?:^<!-- (?P<mark>.*?) -->\n)?^```(?P<kind>\w+)\n(?P<fence>.*?)^```$"
    r"|(?<!`)`(?P<inline>ckptool [^`\n]* [^`\n]*)`",
    re.MULTILINE | re.DOTALL,
)


def steps(text: str) -> list[Step]:
    """All blocks and inline commands of a document, in its order."""
    found = []
    for match in _STEP.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match["kind"]:
            found.append(Step(match["kind"], match["fence"], match["mark"] or "", line))
        elif re.search(r"\.(pth|safetensors)\b", match["inline"]):
            found.append(Step("inline", match["inline"], "", line))
    return found


def sections(text: str) -> list[tuple[str, list[Step]]]:
    """(heading, its steps) of what stands before the first `## ` and of each such heading."""
    found: list[tuple[str, list[Step]]] = [("", [])]
    starts = [
        (m[1], text.count("\n", 0, m.start()) + 1) for m in re.finditer(r"(?m)^## (.*)$", text)
    ]
    for step in steps(text):
        while starts and starts[0][1] < step.line:
            found.append((starts.pop(0)[0], []))
        found[-1][1].append(step)
    return found


def commands(text: str) -> list[str]:
    """The ckptool commands of bash blocks and of inline code, each once."""
    lines = [
        line for step in steps(text) if step.kind in ("bash", "inline") for line in step.commands
    ]
    return list(dict.fromkeys(line for line in lines if line.startswith("ckptool ")))


def expected_status(command: str) -> int:
    """What `# exit N` after a command says; 0 without it."""
    found = re.search(r"# exit (\d+)", command)
    return int(found[1]) if found else 0


def ci_block(text: str, name: str) -> str | None:
    """The bash block that CI runs under this name."""
    blocks = [step.text for step in steps(text) if step.mark == f"ci: {name}"]
    return blocks[0] if blocks else None


def options_named(text: str) -> set[str]:
    """The long options a document names, but those of pip and pytest."""
    ours = re.sub(r"^.*(?:pip install|pytest).*$", "", text, flags=re.MULTILINE)
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", ours))


def options_known(folder: Path) -> set[str]:
    """The long options of all commands."""
    helps = "".join(run([verb, "--help"], folder).stdout for verb in VERBS)
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", helps))


# -- doing it ------------------------------------------------------------------------------------
_SECONDS = re.compile(r"\bin \d+\.\d\d s\b")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


def as_shown(printed: str) -> str:
    """Without what differs between two runs or cannot be seen: times, colours, tabs, blanks at the
    end of a line.
    """
    plain = _COLOUR.sub("", _SECONDS.sub("in T s", printed))
    lines = plain.expandtabs(4).splitlines()
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def is_shown(shown: str, printed: str) -> bool:
    """Whether a document shows what is printed; `…` at the end of a line stands for the rest of it,
    on a line of its own for any lines.
    """
    pattern = "".join(
        "(?:.*\n)*" if line == "…\n" else _line_pattern(line)
        for line in (as_shown(shown) + "\n").splitlines(keepends=True)
    )
    return re.fullmatch(pattern, as_shown(printed) + "\n") is not None


def _line_pattern(line: str) -> str:
    if line.endswith("…\n"):
        return re.escape(line[:-2]) + ".*\n"
    return re.escape(line)


class Reader:
    """Somebody who types what a document shows, in one folder: shell and Python, in order."""

    def __init__(self, document: str, folder: Path) -> None:
        self.document, self.folder = document, folder
        self.names: dict[str, object] = {"__name__": "__main__"}

    def do(self, step: Step, raises: bool = False) -> str:
        """What a block prints; with `raises` an exception of Python is a part of that."""
        if step.kind == "python":
            return self._python(step, raises)
        if step.kind == "inline":  # a sentence is no part of the session
            with tempfile.TemporaryDirectory() as aside, pytest.MonkeyPatch.context() as patch:
                shutil.copytree(self.folder, aside, dirs_exist_ok=True)
                patch.chdir(aside)
                return self._shell(step)
        return self._shell(step)

    def _shell(self, step: Step) -> str:
        with _pretending(step.mark, self.folder):
            return "".join(self._command(line, step.line) for line in step.commands)

    def _python(self, step: Step, raises: bool) -> str:
        if name := re.match(r"# (\w+\.py)\n", step.text):
            (self.folder / name[1]).write_text(step.text, encoding="utf-8")
            return ""
        code = compile("\n" * step.line + step.text, self.document, "exec", dont_inherit=True)
        out = io.StringIO()
        with contextlib.redirect_stdout(out), _pretending(step.mark, self.folder):
            try:
                exec(code, self.names)
            except Exception as error:
                if not raises:
                    raise
                out.write(f"{_name(error)}: {error}\n")
        return out.getvalue()

    def _command(self, line: str, at: int) -> str:
        words = shlex.split(line, comments=True)
        settings = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
        if not words or words[0] in ("pip", "pytest"):
            return ""
        assert words[0] == "ckptool", f"{self.document}:{at}: who runs {line!r}?"
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), _set(settings):
            status = main(words[1:])
        assert status == expected_status(line), f"{self.document}:{at}: {line}\n{out.getvalue()}"
        return out.getvalue()


def _name(error: Exception) -> str:
    """As the last line of a traceback spells it."""
    kind = type(error)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


@contextlib.contextmanager
def _set(settings: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _pretending(mark: str, folder: Path) -> Iterator[None]:
    """What the comment above a block says of the machine: `on cuda:0`, what is saved says that it
    lives there, all that a file from a GPU differs in; `gpus: 4`, so many are there (none
    otherwise); `without net.py`, that file is not here.
    """
    word, _, what = mark.partition(" ")
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        cards = int(what) if word == "gpus:" else 0
        _plug(patch, cards, folder)
        if word == "on":
            stack.enter_context(tagged(Tags(what)))
        elif word == "without":
            patch.delitem(sys.modules, what.removesuffix(".py"), raising=False)
            patch.setattr(sys, "path", [p for p in sys.path if p and not Path(p, what).exists()])
        yield


def _plug(patch: pytest.MonkeyPatch, cards: int, folder: Path) -> None:
    """A machine with so many cards, for nvidia-smi and for torch."""
    patch.setattr(torch.cuda, "is_available", lambda: cards > 0)
    patch.setattr(torch.cuda, "device_count", lambda: cards)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    if cards:
        rows = [_card(number) for number in range(cards)]
        patch.setenv("PATH", devices_support.install(programs, *rows))
        patch.setattr(devices, "_torch_without_cuda", tuple)
    else:
        patch.setenv("PATH", str(programs))


def _card(number: int) -> dict[str, object]:
    used = 1200 + 24000 * number
    return devices_support.card(
        number, f"GPU-{number}a7c41d0-5b2e", "NVIDIA A100-SXM4-80GB",
        free=81920 - used, used=used, total=81920, busy=30 * number,
    )  # fmt: skip
