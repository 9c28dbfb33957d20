"""docs/evidence/features.md says what the checks of its rows say today."""

from __future__ import annotations

from pathlib import Path

import pytest
from feature_page import PAGE, page


@pytest.mark.processes
def test_the_page_says_what_its_checks_say(tmp_path: Path) -> None:
    """A row that changed: `python tests/make_features.py`, and read why."""
    assert PAGE.read_text("utf-8") == page(tmp_path)
