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
    """Return the metrics to withhold because token counts contradict the responses.

    A count contradicts a response that has fewer tokens than output events (understated), or more
    tokens than were requested (overstated). If that is so for too many responses, no token count of
    the run is trusted. The metrics that are withheld are "tokens", and those whose definition names
    the reason code "counts_contradict".

    Returns:
        Each withheld metric with the reason. Empty if the counts can be trusted.
    """
    counted_responses = accumulator.sum("exact_counts")
    contradicting = accumulator.sum("conflicting_counts")
    if contradicting <= limits.CONTRADICTING_SHARE * counted_responses:
        return {}

    understated = accumulator.sum("understated_counts")
    reason = make_code(
        "counts_contradict",
        contradicting=contradicting,
        answers=counted_responses,
        share=contradicting / counted_responses,
        understated=understated,
        overstated=contradicting - understated,
        limit=limits.CONTRADICTING_SHARE,
    )
    withheld_metrics = ("tokens", *guarded("counts_contradict"))

    return dict.fromkeys(withheld_metrics, format_reason(reason))


def withhold_kernel_time_metrics(
    accumulator: MetricAccumulator, manifest: RunManifest
) -> dict[str, str]:
    """Return the metrics to withhold because the kernel gave no timestamps of received packets.

    Without them, as on macOS, a client cannot know how late it read a response, nor whether a pause
    in a response was its own. The metrics that are withheld are "stalls", and those whose
    definition names the reason code "no_kernel_times".

    Nothing is withheld if any response has such a timestamp, if no response has a first token, or
    if the run was in virtual time, in which all times are exact.

    Returns:
        Each withheld metric with the reason.
    """
    # `hot_path` names the implementation that reads sockets. Virtual time has no sockets, so it is
    # "" then.
    is_virtual_time = manifest.host.hot_path == ""
    has_kernel_times = accumulator.sum("kernel_timestamps") > 0
    has_no_responses = accumulator.sum("with_first_token") == 0
    if is_virtual_time or has_kernel_times or has_no_responses:
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
