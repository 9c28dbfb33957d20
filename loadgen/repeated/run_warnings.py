"""The warnings that the requests or the server of a run differed from the workload.

A capacity or a price that is computed from the run repeats them.

A warning about the measurement itself stays with the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from loadgen.core.limits import CACHED_SHARE
from loadgen.core.metrics import reasons
from loadgen.core.results.manifest import ReasonCode

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary

WORK_CODES = (
    "prompts_repeated",
    "rows_repeated",
    "cached",
    "cache_differs",
    "cache_disputed",
    "shortened",
    "lengths_differ",
    "prompt_lengths",
    "replicas_changed",
    "target_gone",
)
"""Codes of warnings and caveats about prompts, caches, lengths and replicas."""

CACHED_ROWS = "cached_rows"
SENTENCES = reasons.SENTENCES | {
    CACHED_ROWS: (
        "{share:share} of the prompt tokens came from the server's cache. "
        "Prompts that repeat less need more server capacity"
    ),
}


def describe_work_warnings(summary: Summary) -> tuple[str, ...]:
    """Return the warnings of a run about differences between its requests and its workload.

    Examples are repeated prompts, requests of other lengths than the workload specifies, and a
    replica of the server that was replaced. A capacity or a price that is computed from the run
    repeats these warnings.
    """
    verdict = summary.verdict
    all_findings = (*verdict.caveat_codes, *verdict.warning_codes)
    findings = [finding for finding in all_findings if finding.code in WORK_CODES]
    cached_share = summary.tokens.cached_share or 0.0
    if _has_repeated_rows(findings) and cached_share > CACHED_SHARE:
        findings.append(ReasonCode(code=CACHED_ROWS, values={"share": cached_share}))
    return tuple(reasons.format_reason(finding, SENTENCES) for finding in findings)


def _has_repeated_rows(findings: Iterable[ReasonCode]) -> bool:
    """Return whether rows of a data set were sent several times: a server may cache them."""
    return any(finding.code == "rows_repeated" for finding in findings)
