"""Our list of what torch.load(weights_only=True) allows, against torch's own."""

from __future__ import annotations

import re

import pytest
import torch

from ckptool.verbs.restricted import ALLOWED

if not torch.__version__.startswith("2.13."):
    pytest.skip("the list is that of torch 2.13", allow_module_level=True)

NEVER_IN_A_FILE = re.compile(
    r"torch\.(cuda|xpu|mtia|mps|sparse)\."  # aliases of tensor types nothing pickles today
)


def theirs():
    from torch._weights_only_unpickler import _get_allowed_globals

    renamed = {"__builtin__": "builtins", "copy_reg": "copyreg"}
    names = set()
    for name in _get_allowed_globals():
        module, _, attribute = name.rpartition(".")
        names.add(f"{renamed.get(module, module)}.{attribute}")
    return names


def test_we_allow_nothing_that_torch_refuses():
    assert ALLOWED - theirs() == set()


def test_torch_allows_nothing_that_we_call_refused():
    left = {name for name in theirs() - ALLOWED if not NEVER_IN_A_FILE.match(name)}

    assert left == set()


def test_the_names_are_those_after_protocol_2_mapping():
    assert not [name for name in ALLOWED if name.startswith(("__builtin__", "copy_reg"))]
