"""Tests of `tests/renew.py`, the one command that writes all generated files."""

from __future__ import annotations

from pathlib import Path

import renew


def test_every_script_that_generates_files_is_listed_once() -> None:
    listed = [*renew.QUICK, *renew.SLOW, *renew.BY_HAND]

    scripts = sorted(path.name for path in Path(__file__).parent.glob("make_*.py"))

    assert sorted(listed) == scripts
