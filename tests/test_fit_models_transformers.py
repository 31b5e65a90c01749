"""The same with the architectures of transformers, from their configs alone."""

from __future__ import annotations

import pytest
from fit_spoiled import check_a_missing_layer, check_another_head
from fit_support import VARIANTS, cells, check_variant
from fit_transformers import CASES

pytestmark = pytest.mark.filterwarnings("ignore")
UNMENDED = {"missing": check_a_missing_layer, "head": check_another_head}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("name", "variant", "number"), cells(CASES, VARIANTS, 13))
def test_the_fix_gives_the_original_back(capsys, name, variant, number):
    check_variant(capsys, name, VARIANTS[variant], number)


@pytest.mark.parametrize(("name", "kind", "number"), cells(CASES, UNMENDED, 8))
def test_what_no_rule_mends_is_said_exactly(capsys, name, kind, number):
    UNMENDED[kind](capsys, name, "DataParallel" if number % 2 else "plain", number)
