"""Globs over names: what they select, and that no name makes them slow."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.globs import compiled, match_glob

GLOBS = [
    ("fc", "fc.weight", True),
    ("fc", "fc2.weight", False),
    ("fc", "a.fc.weight", True),
    ("*norm*", "layers.0.norm1.weight", True),
    ("*norm*", "layers.0.fc.weight", False),
    ("total_ops", "a.total_ops", True),
    ("layers.1", "layers.1.weight", True),
    ("layers.1", "layers.1.weight.lora_A", True),
    ("layers.1", "layers.10.weight", False),
    ("layers.1", "x.layers.1.weight", False),
    ("fc.*", "fc.weight", True),
    ("*.weight", "fc.weight", True),
    ("*.weight", "a.fc.weight", False),
    ("**.weight", "a.fc.weight", True),
    ("layers.?.w", "layers.1.w", True),
    ("layers.?.w", "layers.11.w", False),
    ("**", "a.b", True),
    ("*", "a.b", True),
    ("a.***.c", "a.b.x.c", True),
    ("a[b].c", "a[b].c", True),
    ("a[b].c", "ab.c", False),
    ("FC", "fc.weight", False),
    ("f?", "a\n.fc", True),
]


@pytest.mark.parametrize(("pattern", "key", "expected"), GLOBS)
def test_globs(pattern, key, expected):
    assert match_glob(pattern, key) is expected


# The same by Python's plain backtracking

_WILD = {"**": ".*", "*": "[^.]*", "?": "[^.]"}


def plainly(pattern, key):
    pieces = re.split(r"(\*\*|\*|\?)", re.sub(r"\*{3,}", "**", pattern))
    body = "".join(_WILD.get(piece) or re.escape(piece) for piece in pieces)
    start = r"\A" if "." in pattern else r"(?:\A|(?<=\.))"
    return re.search(rf"(?s){start}{body}(?=\.|\Z)", key) is not None


@given(st.text("ab.*?", max_size=8), st.lists(st.text("ab.", max_size=12), max_size=20))
def test_globs_mean_what_backtracking_says(pattern, keys):
    assert [match_glob(pattern, key) for key in keys] == [plainly(pattern, key) for key in keys]


@pytest.mark.parametrize(
    "pattern",
    ["**.**.**.**x", "**a*a*a*a*b", "*a*a*a*a*b", "**a**a**a**b", "**a*b**a*b**c.d", "a.*a*a*b"],
)
@pytest.mark.parametrize("unit", ["a", ".", "a.", "ab.", "a" * 300 + "."])
def test_no_name_of_a_file_makes_a_glob_slow(pattern, unit):
    """Linear work takes up to 0.1 s here; with one square in it, minutes."""
    key = (unit * 100_000)[:100_000]
    start = time.perf_counter()
    match_glob(pattern, key)

    assert time.perf_counter() - start < 3


def test_a_selection_over_many_keys_is_quick():
    keys = [f"module.layers.{i // 10}.block{i % 10}.weight" for i in range(100_000)]
    match = compiled("module.**.block3.*").match
    start = time.perf_counter()

    assert sum(match(key) is not None for key in keys) == 10_000
    assert time.perf_counter() - start < 2
