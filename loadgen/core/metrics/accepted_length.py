"""Judges whether the accepted length of a run is the one that was stated, within 1 %.

Pure. The accepted length is the mean number of output tokens per step of the model under
speculative decoding: the accepted draft tokens and one token of the model's own. It is taken from
the first of these sources that a run has:

1. Counters on the metrics pages of the servers: 1 + accepted draft tokens / drafts, over the
   measurement window. vLLM has them (`vllm:spec_decode_num_drafts`, `..._num_accepted_tokens`).
   InferenceX computes its published lengths in the same way (golden_al_distribution/README.md).
2. The drafted and accepted tokens that responses report: output tokens / steps.
3. Gauges of the latest steps on the metrics pages, averaged over the reads. SGLang
   (`sglang:spec_accept_length`) and TensorRT-LLM (`specDecodingStats.acceptanceLength`) have them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from loadgen.core import format
from loadgen.core.accepted_lengths import TOLERANCE
from loadgen.core.server_metrics import series

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.core.accepted_lengths import AcceptedLengthTarget
    from loadgen.core.metrics.sections import Speculation
    from loadgen.core.metrics.windows import Window
    from loadgen.core.server_metrics.series import MetricSample

LengthSource = Literal["", "counters", "responses", "gauges"]

MIN_STEPS = 10_000
"""The mean of fewer steps is too uncertain. With 10,000 steps, the 95 % interval of a mean is at
most 1 % to either side, if the standard deviation is half of the mean: 1.96 * 0.5 / sqrt(10,000).
"""

NOT_REPORTED = (
    "no server reports drafted and accepted tokens. Read its metrics page with --server-metrics, "
    "or request its timing with --server-timing"
)


class AcceptedLengthCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the accepted length of a run is the stated one.

    Attributes:
        target: The stated length.
        target_name: The published length that it is, "" if it was stated as a number.
        realised: The measured length. None if no server reports it.
        difference: `realised` / `target` - 1. None without `realised`.
        steps: The steps of the model that it rests on. None if they are not known.
        source: Where `realised` is from, "" without it.
        comparable: Whether the two differ by at most 1 %. None if that is not known.
        reason: Why it is not known, else "".
    """

    target: float
    target_name: str = ""
    realised: float | None = None
    difference: float | None = None
    steps: int | None = None
    source: LengthSource = ""
    comparable: bool | None = None
    reason: str = ""


class _MeasuredLength(NamedTuple):
    """A measured accepted length, with its source and the number of steps, None if unknown."""

    length: float
    source: LengthSource
    steps: int | None


def judge_accepted_length(
    target: AcceptedLengthTarget,
    speculation: Speculation | None,
    samples: Sequence[MetricSample],
    window: Window,
) -> AcceptedLengthCheck:
    """Return whether the measured accepted length of a run is the stated one, within 1 %.

    The accepted length is the mean number of output tokens per step of the model under speculative
    decoding.

    Args:
        target: The stated length.
        speculation: What responses and metrics pages report about speculative decoding.
        samples: The samples of the servers' metrics pages.
        window: The measurement window.
    """
    measured = _measure_length(speculation, samples, window)
    if measured is None:
        return AcceptedLengthCheck(
            target=target.length, target_name=target.name, reason=NOT_REPORTED
        )

    relative_difference = measured.length / target.length - 1
    reason_not_to_compare = _explain_few_steps(measured.steps)
    is_comparable = None if reason_not_to_compare else is_within_tolerance(relative_difference)

    return AcceptedLengthCheck(
        # The stated length.
        target=target.length,
        target_name=target.name,
        # The measured length.
        realised=measured.length,
        steps=measured.steps,
        source=measured.source,
        # The comparison.
        difference=relative_difference,
        comparable=is_comparable,
        reason=reason_not_to_compare,
    )


def _explain_few_steps(steps: int | None) -> str:
    """Return that a mean over so few steps is too uncertain, or "" for enough or unknown steps."""
    if steps is None or steps >= MIN_STEPS:
        return ""

    counted_steps = format.counted(steps, "step")
    return f"only {counted_steps} of the model, {MIN_STEPS:,} needed. Use a longer load"


def is_within_tolerance(difference: float) -> bool:
    """Return whether a relative difference of two accepted lengths leaves them comparable."""
    rounding_error = 1e-9
    return abs(difference) <= TOLERANCE + rounding_error


def find_realised_length(speculation: Speculation | None) -> float | None:
    """Return the mean number of tokens per step of the model over the whole run.

    The metrics page of the server comes first, then the responses. Return None if neither reports
    a length.
    """
    if speculation is None:
        return None
    if speculation.server_length is not None:
        return speculation.server_length
    return speculation.length


def _measure_length(
    speculation: Speculation | None, samples: Sequence[MetricSample], window: Window
) -> _MeasuredLength | None:
    """Return the measured accepted length, in tokens per step of the model.

    It is taken from the first of these sources that has it: counters on the servers' metrics pages,
    responses, and gauges on the metrics pages. Return None if no source has it.
    """
    length_by_counters = _read_counters(samples, window)
    if length_by_counters is not None:
        return length_by_counters

    if speculation is None:
        return None

    if speculation.length is not None:
        steps = _count_steps_of_responses(speculation)
        return _MeasuredLength(speculation.length, "responses", steps)

    if speculation.server_length is not None:
        return _MeasuredLength(speculation.server_length, "gauges", steps=None)
    return None


def _read_counters(samples: Sequence[MetricSample], window: Window) -> _MeasuredLength | None:
    """Return the accepted length from counters on the servers' metrics pages.

    In each step, the model checks a draft of several tokens, and generates those that it accepts
    and one token more. Return None if there are no counters, or no step in the measurement window.
    """
    drafts = _measure_growth_in_window(samples, series.DRAFTS, window)
    accepted_tokens = _measure_growth_in_window(samples, series.ACCEPTED, window)
    if drafts is None or drafts == 0 or accepted_tokens is None:
        return None

    tokens_per_step = 1 + accepted_tokens / drafts
    return _MeasuredLength(tokens_per_step, "counters", steps=round(drafts))


def _measure_growth_in_window(
    samples: Sequence[MetricSample], quantity: str, window: Window
) -> float | None:
    """Return the growth of a counter of the servers during the measurement window.

    The metrics pages are read now and then. The growth is taken from the last read before the
    window to the first read after it, or over all reads if the window is not known. Return None if
    no page has the counter.
    """
    # The value of a point is the growth of the counter from the first read until this read.
    points = series.collect_points(samples, quantity)
    if not points:
        return None

    growth_until_last_read = points[-1].value
    if window.start_s is None or window.end_s is None:
        return growth_until_last_read

    points_before = [point for point in points if point.t_s <= window.start_s]
    growth_until_start = points_before[-1].value if points_before else 0.0

    points_after = [point for point in points if point.t_s >= window.end_s]
    growth_until_end = points_after[0].value if points_after else growth_until_last_read
    return growth_until_end - growth_until_start


def _count_steps_of_responses(speculation: Speculation) -> int | None:
    """Return the steps of the model in the responses that report drafts, or None.

    A step generates its accepted tokens and one more, so accepted tokens = steps * (length - 1).
    """
    if speculation.accepted is None or speculation.length is None or speculation.length <= 1:
        return None
    return round(speculation.accepted / (speculation.length - 1))
