"""The page `docs/reference/summary.md` is generated from the types of the summary."""

from __future__ import annotations

import make_summary_reference


def test_the_summary_reference_equals_its_generated_text() -> None:
    page = make_summary_reference.PAGE.read_text("utf-8")

    assert page == make_summary_reference.render_page(), "python tests/make_summary_reference.py"
