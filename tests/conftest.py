"""A test that starts a process carries the mark `processes`, so that `pytest -m "not processes"` stays quick."""

from __future__ import annotations

import sys
from typing import Any

import pytest

_unmarked = ""  # the test that runs, unless it has the mark


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _unmarked and event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
        test, program = _unmarked, arguments[0] if arguments else ""
        raise RuntimeError(f"{test} starts a process ({program}): put @pytest.mark.processes on it")


sys.addaudithook(_watch)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    global _unmarked  # noqa: PLW0603 - an audit hook has no other way to know the test
    _unmarked = "" if item.get_closest_marker("processes") else item.nodeid


def pytest_runtest_teardown() -> None:
    global _unmarked  # noqa: PLW0603
    _unmarked = ""
