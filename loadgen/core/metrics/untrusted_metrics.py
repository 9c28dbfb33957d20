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


def withhold_token_metrics(accumulator: MetricAccumulator) -> dict[str, str]:
    """Return the metrics to withhold because token counts conflict with the responses.

    A count conflicts if a response has fewer tokens than output events (understated), or more
    tokens than were requested (overstated). The metrics are withheld if the counts of too many
    responses do.

    Returns:
        Each withheld metric with the reason. Empty if the counts can be trusted.
    """
    counted_responses = accumulator.sum("exact_counts")
    conflicting = accumulator.sum("conflicting_counts")
    if conflicting <= limits.CONTRADICTING_SHARE * counted_responses:
        return {}
    understated = accumulator.sum("understated_counts")
    reason = make_code(
        "counts_contradict",
        contradicting=conflicting,
        answers=counted_responses,
        share=conflicting / counted_responses,
        understated=understated,
        overstated=conflicting - understated,
        limit=limits.CONTRADICTING_SHARE,
    )
    withheld_metrics = ("tokens", *guarded("counts_contradict"))
    return dict.fromkeys(withheld_metrics, format_reason(reason))


def withhold_kernel_time_metrics(
    accumulator: MetricAccumulator, manifest: RunManifest
) -> dict[str, str]:
    """Return the metrics to withhold because the kernel gave no timestamps of received packets.

    Without them, as on macOS, a client cannot know how late it read a response, nor whether a pause
    was its own. A load in virtual time needs none, because its times are exact.

    Returns:
        Each withheld metric with the reason. Empty if there are timestamps, or none are needed.
    """
    # The manifest names the code that reads sockets. In virtual time there is none.
    is_read_from_sockets = bool(manifest.host.hot_path)
    has_kernel_times = accumulator.sum("kernel_timestamps") > 0
    has_first_tokens = accumulator.sum("with_first_token") > 0
    if has_kernel_times or not is_read_from_sockets or not has_first_tokens:
        return {}
    reason = format_reason(make_code("no_kernel_times"))
    withheld_metrics = (*guarded("no_kernel_times"), "stalls")
    return dict.fromkeys(withheld_metrics, reason)


def withhold_first_token_metrics(accumulator: MetricAccumulator) -> dict[str, str]:
    """Return the metrics to withhold because too many streams did not show the first token.

    Such a response has several tokens by the server's count, but no output event that could be
    timed. Its output is in fields that are not known, or it came as one JSON object although a
    stream was requested.

    Returns:
        Each withheld metric with the reason. Empty if enough streams showed the first token.
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
