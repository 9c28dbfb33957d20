"""The warnings about a run that its capacity and its price carry too: the load or the server was another.

Pure. A warning about the measurement itself stays with the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core.limits import CACHED_SHARE
from loadgen.core.metrics import reasons
from loadgen.core.results.manifest import ReasonCode

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary

OF_THE_WORK = (
    *("prompts_repeated", "rows_repeated", "cached", "cache_differs", "cache_disputed"),
    *("shortened", "lengths_differ", "prompt_lengths"),
    *("replicas_changed", "target_gone"),
)
"""Codes of warnings and caveats: repeated prompts, a cache, other lengths, replicas that change."""

SENTENCES = reasons.SENTENCES | {
    "cached_rows": "{share:share} of the prompt tokens came from the server's cache: prompts that do "
    "not repeat like these need more of the server",
}


def describe_other_work(summary: Summary) -> tuple[str, ...]:
    """Return the sentences by which a run warns that it had other work or another server.

    A server's cache that knew more than a few prompt tokens of repeated rows is named with them.
    """
    verdict = summary.verdict
    codes = [
        code for code in (*verdict.caveat_codes, *verdict.warning_codes) if code.code in OF_THE_WORK
    ]
    cached_share = summary.tokens.cached_share or 0.0
    is_repeated = any(code.code == "rows_repeated" for code in codes)
    if is_repeated and cached_share > CACHED_SHARE:
        codes.append(ReasonCode(code="cached_rows", values={"share": cached_share}))
    return tuple(reasons.sentence(code, SENTENCES) for code in codes)
