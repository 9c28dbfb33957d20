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


def find_untrusted_token_metrics(accumulator: MetricAccumulator) -> dict[str, str]:
    """Return the metrics that use token counts, with the reason, if the counts cannot be trusted.

    A count is wrong if it is lower than the number of output events (understated), or higher than
    the number of requested tokens (overstated). A few wrong counts are tolerated: the result is
    empty then.
    """
    checked_responses = accumulator.sum("exact_counts")
    wrong_counts = accumulator.sum("conflicting_counts")
    if wrong_counts <= limits.CONTRADICTING_SHARE * checked_responses:
        return {}

    understated_counts = accumulator.sum("understated_counts")
    reason = make_code(
        "counts_contradict",
        contradicting=wrong_counts,
        answers=checked_responses,
        share=wrong_counts / checked_responses,
        understated=understated_counts,
        overstated=wrong_counts - understated_counts,
        limit=limits.CONTRADICTING_SHARE,
    )
    untrusted_metrics = ("tokens", *guarded(reason.code))
    return dict.fromkeys(untrusted_metrics, format_reason(reason))


def find_untrusted_kernel_time_metrics(
    accumulator: MetricAccumulator, manifest: RunManifest
) -> dict[str, str]:
    """Return the metrics that need kernel timestamps, with the reason, if there are none.

    The kernel stamps received packets on Linux, but not on macOS. Without that, a client cannot
    know how late it read a response. The result is empty if any response has such a timestamp, if
    no response has a first token, or in virtual time, in which all times are exact.
    """
    has_kernel_times = accumulator.sum("kernel_timestamps") > 0
    has_first_tokens = accumulator.sum("with_first_token") > 0
    if has_kernel_times or not has_first_tokens or _is_virtual_time(manifest):
        return {}

    reason = make_code("no_kernel_times")
    untrusted_metrics = (*guarded(reason.code), "stalls")
    return dict.fromkeys(untrusted_metrics, format_reason(reason))


def _is_virtual_time(manifest: RunManifest) -> bool:
    """Return True if the run was simulated, so that no implementation read any sockets."""
    return manifest.host.hot_path == ""


def find_untrusted_first_token_metrics(accumulator: MetricAccumulator) -> dict[str, str]:
    """Return the metrics that need the first token, with the reason, if many streams hid it.

    A stream hides its first token if the server counts tokens, but none came in an event that could
    be timed. The result is empty if few streams did.
    """
    ok_responses = accumulator.sum("ok")
    hidden_first_tokens = accumulator.sum("tpot_no_output")
    if hidden_first_tokens <= limits.UNSEEN_OUTPUT * ok_responses:
        return {}

    reason = make_code(
        "output_unseen",
        unseen=hidden_first_tokens,
        answers=ok_responses,
        share=hidden_first_tokens / ok_responses,
        limit=limits.UNSEEN_OUTPUT,
    )
    untrusted_metrics = guarded(reason.code)
    return dict.fromkeys(untrusted_metrics, format_reason(reason))
