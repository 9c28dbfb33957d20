"""The guides show what their commands print today."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_guide_outputs import PAGES, ROOT, has_console_block, render_page

CONSOLE_PAGES = [page for page in PAGES if has_console_block(page)]


@pytest.mark.commands
@pytest.mark.processes
@pytest.mark.parametrize("page", CONSOLE_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_console_blocks_of_the_guides_equal_the_current_output(page: Path) -> None:
    assert render_page(page) == page.read_text("utf-8"), "python tests/make_guide_outputs.py"
