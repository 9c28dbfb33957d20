"""A pytest fixture: `def test_latency(loadgen_run): assert loadgen_run("qa", url=...).ttft_ms.p99 < 500`.

Loaded by every pytest in whose environment loadgen is installed, so nothing is imported here, no hook is taken and no
option is added; the work begins when a test asks for the fixture.
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
    """The measurement that a test judges by is not sound; its text gives the reasons."""


@pytest.fixture
def loadgen_run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Result]:
    """`loadgen.run` with its results in the test's `tmp_path`. The report of each run is shown when the test fails; a
    measurement that is not valid warns with NotValid (turn that into an error with `-W error`)."""
    made = 0

    def run(*args: Any, **flags: Any) -> Result:
        nonlocal made
        from loadgen.api import run

        made += 1
        flags.setdefault("out", tmp_path / f"loadgen-{made}")
        result = run(*args, **flags)
        request.node.add_report_section("call", "loadgen", str(result))
        if not result.valid:
            reasons = "; ".join(result.verdict.reasons)
            warnings.warn(NotValid(f"the measurement is not valid: {reasons}"), stacklevel=2)
        return result

    return run
