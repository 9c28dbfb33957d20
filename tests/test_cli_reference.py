"""The page `docs/reference/cli.md` is generated from the commands."""

from __future__ import annotations

import make_cli_reference


def test_the_cli_reference_equals_its_generated_text() -> None:
    page = make_cli_reference.PAGE.read_text("utf-8")

    assert page == make_cli_reference.render_page(), "python tests/make_cli_reference.py"
