"""docs/evidence/features.md says what the checks of its rows say today."""

from __future__ import annotations

from pathlib import Path

import pytest
from feature_page import PAGE, page


@pytest.mark.processes
def test_the_feature_page_equals_the_outcome_of_its_checks(tmp_path: Path) -> None:
    """A row that changed: `python tests/make_features.py`, and read why."""
    assert PAGE.read_text("utf-8") == page(tmp_path)
