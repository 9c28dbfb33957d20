"""Finds metrics that cannot be trusted because responses lack, or contradict, what they rest on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core import limits
from loadgen.core.metrics.reasons import format_reason
from loadgen.core.metrics.run_evidence import make_code
from loadgen.figures import guarded

if TYPE_CHECKING:
    from loadgen.core.metrics.accumulator import MetricAccumulator
    from loadgen.core.results.manifest import RunManifest


def find_token_count_conflicts(accumulator: MetricAccumulator) -> dict[str, str]:
    """Return the metrics that rest on token counts, with the reason to withhold each.

    They are withheld if the counts of too many responses conflict with their streams: fewer tokens
    than output events, or more than were requested. Returns an empty dict otherwise.
    """
    counted = accumulator.sum("exact_counts")
    conflicting = accumulator.sum("conflicting_counts")
    if conflicting <= limits.CONTRADICTING_SHARE * counted:
        return {}
    understated = accumulator.sum("understated_counts")
    reason = make_code(
        "counts_contradict",
        contradicting=conflicting,
        answers=counted,
        share=conflicting / counted,
        understated=understated,
        overstated=conflicting - understated,
        limit=limits.CONTRADICTING_SHARE,
    )
    withheld_metrics = ("tokens", *guarded("counts_contradict"))
    return dict.fromkeys(withheld_metrics, format_reason(reason))


def find_metrics_of_kernel_times(
    accumulator: MetricAccumulator, manifest: RunManifest
) -> dict[str, str]:
    """Return the metrics that need timestamps of the kernel, with the reason to withhold each.

    They are withheld if a client read the responses from sockets without such timestamps, as on
    macOS. It then cannot know how late it read a response, nor whether a pause was its own. Returns
    an empty dict otherwise, and for a load in virtual time, whose times are exact.
    """
    is_read_from_sockets = bool(manifest.host.hot_path)
    has_kernel_times = bool(accumulator.sum("kernel_timestamps"))
    if not is_read_from_sockets or has_kernel_times or not accumulator.sum("with_first_token"):
        return {}
    withheld_metrics = (*guarded("no_kernel_times"), "stalls")
    return dict.fromkeys(withheld_metrics, format_reason(make_code("no_kernel_times")))


def find_missing_first_tokens(accumulator: MetricAccumulator) -> dict[str, str]:
    """Return the metrics that need the time of the first token, with the reason to withhold each.

    They are withheld if too many responses do not show that time. Such a response has several
    tokens by the server's count, but no output event that could be timed: its output is in fields
    that are not known, or it came as one JSON object although a stream was requested. Returns an
    empty dict otherwise.
    """
    ok = accumulator.sum("ok")
    without_output_event = accumulator.sum("tpot_no_output")
    if without_output_event <= limits.UNSEEN_OUTPUT * ok:
        return {}
    reason = make_code(
        "output_unseen",
        unseen=without_output_event,
        answers=ok,
        share=without_output_event / ok,
        limit=limits.UNSEEN_OUTPUT,
    )
    return dict.fromkeys(guarded("output_unseen"), format_reason(reason))
