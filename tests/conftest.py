"""Fixtures that several test files share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.register_assert_rewrite("fit_support", "fit_spoiled")
FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def copy(tmp_path):
    """A checkpoint of tests/fixtures by name, where writing beside it does no harm."""

    def make(name, as_name=None):
        return Path(shutil.copy(FIXTURES / name, tmp_path / (as_name or name)))

    return make
