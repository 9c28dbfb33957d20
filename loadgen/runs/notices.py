"""Notices above the result of a run: simulated, not valid, or without a clean end.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core.metrics.reasons import STATES, join_reasons
from loadgen.render.section import Notice, simulated_notice
from loadgen.runs.client_text import is_host_busy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadgen.core.metrics.summary import Summary

_STATE_LABELS = {
    "interrupted": "INTERRUPTED",
    "cut_off": "CUT OFF",
    "stopped": "ENDED EARLY",
    "decided": "ENDED EARLY",
}
"""The label of the notice for each state of a run that did not finish."""


def notices(summary: Summary) -> Iterator[Notice]:
    """Yield the notices above a report: that a run is INVALID, simulated, or did not finish.

    An INVALID run is only a warning if other programs kept the host of the client busy, because
    its counts and errors are correct then.
    """
    verdict = summary.verdict
    if not verdict.valid:
        reasons = join_reasons(verdict.reasons)
        yield Notice("INVALID", reasons, "warn" if is_host_busy(verdict) else "bad")

    if summary.target.simulated:
        yield simulated_notice()

    state = summary.run.state

    # A finished run has no label.
    if state in _STATE_LABELS:
        explanation = STATES[state]
        text = f"{explanation}; results cover the time until then"
        yield Notice(_STATE_LABELS[state], text)


def caveats(summary: Summary) -> list[str]:
    """Return what limits a valid result: omitted metrics and deviations from the workload."""
    return list(summary.verdict.caveats) if summary.verdict.valid else []
