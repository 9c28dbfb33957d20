"""Pytest fixtures that measure an endpoint in a test.

Example::

    def test_latency(loadgen_run):
        assert loadgen_run("qa", url=URL).ttft_ms.p99 < 500

Every pytest run loads this module if loadgen is installed. It therefore imports almost nothing
before a test uses a fixture, and adds no hook and no option.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from loadgen.api import Result


class NotValid(UserWarning):
    """The warning that the measurement of a test is not valid, with the reasons."""


@pytest.fixture
def loadgen_run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Result]:
    """Return `loadgen.run`, with its results in the `tmp_path` of the test.

    Pytest shows the report of each run if the test fails. A measurement that is not valid causes
    the warning NotValid, which `-W error` turns into an error.
    """
    run_numbers = itertools.count(1)

    def run_and_report(*args: Any, **options: Any) -> Result:
        from loadgen import api  # slow to import, and not every test session measures

        options.setdefault("out", tmp_path / f"loadgen-{next(run_numbers)}")
        result = api.run(*args, **options)
        request.node.add_report_section("call", "loadgen", str(result))

        if not result.valid:
            reasons = _describe_reasons(result)
            warnings.warn(NotValid(f"the measurement is not valid: {reasons}"), stacklevel=2)

        return result

    return run_and_report


@pytest.fixture
def loadgen_strict(loadgen_run: Callable[..., Result]) -> Callable[..., Result]:
    """Return a `loadgen_run` that fails the test if the measurement is not valid."""

    def run_strictly(*args: Any, **options: Any) -> Result:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotValid)  # the test fails instead
            result = loadgen_run(*args, **options)

        if not result.valid:
            pytest.fail(f"the measurement is not valid: {_describe_reasons(result)}", pytrace=False)

        return result

    return run_strictly


def _describe_reasons(result: Result) -> str:
    """Return why the measurement of a test is not valid, and what to do."""
    from loadgen.core.metrics.reasons import join_reasons  # only imported if a test measures

    return join_reasons(result.verdict.reasons)
