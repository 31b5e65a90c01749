"""What is imported: the heavy modules never, the others only by who needs them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from verbs_support import FIXTURES, ROOT

HEAVY = {"torch", "numpy", "pickle", "_pickle", "zipfile", "safetensors", "tarfile"}
DP_CUDA = str(FIXTURES / "dp_cuda.pth")
LEGACY = str(FIXTURES / "legacy_cuda1.pth")
BASE = "import click, tabulate"


def modules(code):
    """Top-level names in sys.modules after `code` in a fresh process."""
    code += "\nimport sys; sys.stderr.write('\\n'.join(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return {line for line in done.stderr.splitlines() if line.replace(".", "_").isidentifier()}


@pytest.fixture(scope="module")
def before():
    return modules(BASE)


def called(*args):
    return f"from ckptool.cli.main import main\nassert main({list(args)!r}) == 0"


COMMANDS = [
    ("inspect", DP_CUDA),
    ("inspect", DP_CUDA, "--json"),
    ("inspect", DP_CUDA, "--index", "-v", "--only", "fc"),
    ("inspect", DP_CUDA, "--format", "tree"),
    ("inspect", DP_CUDA, "--format", "csv"),
    ("inspect", LEGACY),
    ("inspect", str(FIXTURES / "model.safetensors")),
    ("inspect", str(FIXTURES / "tar_01x.pth")),
    ("inspect", str(FIXTURES / "whole_model.pth")),
    ("inspect", str(FIXTURES / "torchscript.pt")),
    ("inspect", str(FIXTURES / "torch_package.pt")),
    ("inspect", str(FIXTURES / "exported.pt2")),
    ("inspect", str(FIXTURES / "numpy_pickle.pkl")),
    ("inspect", str(FIXTURES / "deflated.pth")),
    ("verify", DP_CUDA),
    ("verify", LEGACY, "--json"),
    ("verify", str(FIXTURES / "model.safetensors")),
    ("verify", str(FIXTURES / "deflated.pth")),
    ("convert", DP_CUDA, "--to-cpu", "-o", "OUT"),
    ("convert", str(FIXTURES / "deflated.pth"), "--salvage", "-o", "OUT"),
    ("convert", LEGACY, "--to-gpu", "0", "-o", "OUT", "--json"),
    ("convert", str(FIXTURES / "deflated.pth"), "--unwrap", "-o", "OUT"),
    ("convert", str(FIXTURES / "proto5.pth"), "--add-module-at", "module.conv", "-o", "OUT"),
]


@pytest.mark.parametrize("args", COMMANDS, ids=lambda args: " ".join(map(os.path.basename, args)))
def test_nothing_heavy_is_imported(args, before, tmp_path):
    args = [str(tmp_path / "out.pth") if arg == "OUT" else arg for arg in args]

    assert (modules(f"{BASE}\n{called(*args)}") - before) & HEAVY == set()


@pytest.mark.parametrize("flags", [["--json"], ["--format", "plain"], ["--keys"]], ids=" ".join)
def test_data_needs_no_tabulate(flags):
    assert "tabulate" not in modules(called("inspect", DP_CUDA, *flags))


def test_convert_needs_no_tabulate(tmp_path):
    out = str(tmp_path / "out.pth")
    assert "tabulate" not in modules(called("convert", DP_CUDA, "--to-cpu", "-o", out))


def test_help_imports_no_checkpoint_code():
    found = modules(called("--help"))
    assert not {name for name in found if name.startswith(("ckptool.formats", "ckptool.verbs"))}


def test_import_ckptool_imports_next_to_nothing():
    found = modules("import ckptool")
    assert {name for name in found if name.startswith("ckptool")} == {"ckptool"}
    assert found & (HEAVY | {"click", "tabulate", "json"}) == set()


def test_the_api_needs_no_click():
    found = modules(f"import ckptool\nckptool.inspect({DP_CUDA!r}).to_dict()")
    assert found & (HEAVY | {"click", "tabulate"}) == set()
