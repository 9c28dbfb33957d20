"""A pytest fixture: `def test_latency(loadgen_run): assert loadgen_run("qa", url=...).ttft_ms.p99 < 500`.

Every pytest run loads this module if loadgen is installed. So it imports almost nothing and adds no hook and no option;
the imports happen when a test uses the fixture.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from loadgen.api import Result


class NotValid(UserWarning):
    """The measurement of a test is not valid; the text gives the reasons."""


@pytest.fixture
def loadgen_run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Result]:
    """`loadgen.run` with its results in the `tmp_path` of the test.

    pytest shows the report of each run if the test fails. A measurement that is not valid raises the warning NotValid
    (`-W error` turns it into an error).
    """
    runs = 0

    def run(*args: Any, **flags: Any) -> Result:
        nonlocal runs
        from loadgen.api import run

        runs += 1
        flags.setdefault("out", tmp_path / f"loadgen-{runs}")
        result = run(*args, **flags)
        request.node.add_report_section("call", "loadgen", str(result))
        if not result.valid:
            reasons = "; ".join(result.verdict.reasons)
            warnings.warn(NotValid(f"the measurement is not valid: {reasons}"), stacklevel=2)
        return result

    return run


@pytest.fixture
def loadgen_strict(loadgen_run: Callable[..., Result]) -> Callable[..., Result]:
    """`loadgen_run` for a build that must not rest on a bad measurement: one that is not valid fails the test."""

    def run(*args: Any, **flags: Any) -> Result:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotValid)
            result = loadgen_run(*args, **flags)
        if not result.valid:
            pytest.fail(
                f"the measurement is not valid: {'; '.join(result.verdict.reasons)}", pytrace=False
            )
        return result

    return run
