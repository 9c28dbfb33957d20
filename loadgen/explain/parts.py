"""The parts of a difference between two tools, and a metric that is split into them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

PartName = Literal[
    "warm_up",
    "aggregation",
    "origin",
    "first_event",
    "end",
    "divided_tokens",
    "token_counts",
    "response_lengths",
    "percentile_rule",
    "server",
    "client_send",
    "client",
    "start_up",
    "tail",
    "failures",
    "requests",
    "in_flight",
    "latency",
]

PART_LABELS: dict[PartName, str] = {
    "warm_up": "warm-up counts",
    "aggregation": "one value per request",
    "origin": "from sending",
    "first_event": "first chunk",
    "end": "to the last event",
    "divided_tokens": "tokens divided by",
    "token_counts": "token counts",
    "response_lengths": "response lengths",
    "percentile_rule": "percentile rule",
    "server": "server in the other run",
    "client_send": "client sends late",
    "client": "client of the other tool",
    "start_up": "start-up",
    "tail": "tail",
    "failures": "failures",
    "requests": "number of requests",
    "in_flight": "requests in flight",
    "latency": "latency of requests",
}
"""The parts in the order in which definitions are replaced, with their short names in tables."""

PART_MEANINGS: dict[PartName, str] = {
    "warm_up": "The other tool sent no warm-up, so the warm-up of our run counts, too.",
    "aggregation": "The other tool has one value per request, or weights requests by their tokens.",
    "origin": "Latencies of the other tool start when a request is sent, not when it is scheduled.",
    "first_event": "The other tool takes the first chunk, which may have no token, for the first "
    "token.",
    "end": "The other tool measures to the last event of a response, not to the last token.",
    "divided_tokens": "The other tool divides by another number of tokens, such as n - 1 or n.",
    "token_counts": "The other tool counted another number of tokens for the same responses, for "
    "example with its own tokenizer.",
    "response_lengths": "The responses to the other tool had another number of tokens.",
    "percentile_rule": "The other tool interpolates percentiles between two values.",
    "server": "The server took another time in the run of the other tool, as its log says. The "
    "delays of our own client are subtracted here, too.",
    "client_send": "The client of the other tool needed this time to send a request, as its own "
    "file says. Its latencies contain this time.",
    "client": "The other tool measured another time than the log of the server says: its client "
    "sent or read late.",
    "start_up": "The other tool's rate includes the time in which the load builds up.",
    "tail": "The other tool's rate includes the time after the last request was started, in which "
    "the last responses end.",
    "failures": "Another share of the requests failed, or failed requests count.",
    "requests": "The other tool sent another number of requests.",
    "in_flight": "The other tool had another number of requests in flight on average: its virtual "
    "users paused, or its start-up and tail are a larger share of its duration.",
    "latency": "The responses took another time in the two runs, so the same virtual users sent "
    "another number of requests.",
}
"""What each part means, for the explanation below the table."""

EQUAL_WITHIN = 0.005
"""Two values that differ by less than this share of the larger one count as equal.

A tenth of the 5 % by which timestamp uncertainty may change a latency that a run reports."""

NEGLIGIBLE = 1e-5
"""Parts below this share of the metric, such as rounding errors, are left out."""

REQUIRED_SHARE = 0.95
"""A difference counts as explained if the parts add up to at least this share of it."""


class DifferencePart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a difference.

    Attributes:
        name: Which definition or property of the run it comes from.
        change: By how much it changes the metric, in the unit of the metric.
        share: The change divided by the whole difference. Parts of opposite sign may have shares
            above 1 or below 0.
    """

    name: PartName
    change: float
    share: float


Outcome = Literal["equal", "explained", "within_variation", "unexplained"]
"""What is known about a difference.

`equal`: there is none. `explained`: the parts add up to REQUIRED_SHARE of it. `within_variation`:
the rest is not larger than two runs of the same load differ by chance. `unexplained`: it is larger.
"""


class ExplainedMetric(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of both results, with the parts of the difference.

    Attributes:
        metric: The path of the metric in the other result, such as "ttft_ms.p50".
        label: Its name as the other tool calls it, with the unit.
        ours: Its value in our run, by our definition.
        ours_redefined: Its value in our run by the definition of the other tool.
        theirs: Its value in the other result.
        parts: The parts, without those that change nothing.
        unexplained: What the parts do not explain: the difference less all parts.
        expected_variation: Half of the 95 % interval of the difference between two runs of the same
            load. None if it is not known.
        explained_share: 1 less the share of the unexplained rest. None without a difference.
        outcome: What is known about the difference.
    """

    metric: str
    label: str
    ours: float
    ours_redefined: float
    theirs: float
    parts: tuple[DifferencePart, ...]
    unexplained: float
    expected_variation: float | None
    explained_share: float | None
    outcome: Outcome

    @property
    def is_latency(self) -> bool:
        """Return True for a statistic of a latency, such as "ttft_ms.p50"."""
        return "_ms." in self.metric

    @property
    def difference(self) -> float:
        """Return by how much the other result is larger."""
        return self.theirs - self.ours


class MetricStep(NamedTuple):
    """The value of a metric after one definition was replaced.

    Attributes:
        name: The definition that was replaced.
        value: The value of the metric with it and all earlier ones replaced.
    """

    name: PartName
    value: float


class MetricName(NamedTuple):
    """The path of a metric, and its name in tables."""

    path: str
    label: str


def split_difference(
    name: MetricName,
    loadgen_value: float,
    definition_steps: Sequence[MetricStep],
    other_value: float,
    *,
    run_steps: Sequence[MetricStep] = (),
    expected_variation: float | None = None,
) -> ExplainedMetric:
    """Split the difference of a metric between loadgen and another tool into parts.

    Example: loadgen's value is 100, the other tool's value is 112, and the values after two steps
    are 108 and 111. The parts are +8 and +3, and the remaining +1 is unexplained.

    Args:
        name: The metric.
        loadgen_value: The value in loadgen's run, before the first step.
        definition_steps: The value after each definition that is replaced by the other tool's.
        other_value: The value in the result of the other tool.
        run_steps: The value after each later step, which is about how the two runs differ.
        expected_variation: Half of the 95 % interval of the difference between two runs of the same
            load. None if it is not known.
    """
    redefined_value = find_last_value(definition_steps, value_before=loadgen_value)
    explained_value = find_last_value(run_steps, value_before=redefined_value)
    unexplained = other_value - explained_value

    difference = other_value - loadgen_value
    largest_value = max(abs(loadgen_value), abs(other_value))
    is_equal = abs(difference) <= EQUAL_WITHIN * largest_value
    explained_share = None if is_equal else 1 - abs(unexplained / difference)

    changes = _sum_changes(loadgen_value, [*definition_steps, *run_steps])
    return ExplainedMetric(
        metric=name.path,
        label=name.label,
        ours=loadgen_value,
        ours_redefined=redefined_value,
        theirs=other_value,
        parts=_create_parts(changes, difference, smallest_change=NEGLIGIBLE * largest_value),
        unexplained=unexplained,
        expected_variation=expected_variation,
        explained_share=explained_share,
        outcome=_judge_difference(explained_share, unexplained, expected_variation),
    )


def find_last_value(steps: Sequence[MetricStep], *, value_before: float) -> float:
    """Return the value of a metric after all steps, or the value before them if there is none."""
    return steps[-1].value if steps else value_before


def _sum_changes(first_value: float, steps: Sequence[MetricStep]) -> dict[PartName, float]:
    """Return by how much a metric changes in the steps of each name, such as {"tail": -0.5}.

    Args:
        first_value: The value before the first step.
        steps: The value after each step. Several steps may have the same name.
    """
    changes: dict[PartName, float] = {}
    previous_value = first_value
    for step in steps:
        sum_before = changes.get(step.name, 0.0)
        changes[step.name] = sum_before + step.value - previous_value
        previous_value = step.value
    return changes


def _create_parts(
    changes: dict[PartName, float], difference: float, smallest_change: float
) -> tuple[DifferencePart, ...]:
    """Return each change of a metric with its share of the whole difference.

    A change of 8 has the share 0.8 of a difference of 10. Changes that are not larger than
    `smallest_change` are left out.
    """
    parts = []
    for name, change in changes.items():
        if abs(change) <= smallest_change:
            continue
        share = change / difference if difference else 0.0
        parts.append(DifferencePart(name=name, change=change, share=share))
    return tuple(parts)


def _judge_difference(
    explained_share: float | None, unexplained: float, expected_variation: float | None
) -> Outcome:
    """Return whether a difference is explained by its parts, by chance, or not at all.

    Args:
        explained_share: The share of the difference that its parts explain. None if the two values
            are equal.
        unexplained: The remaining difference, in the unit of the metric.
        expected_variation: How far two runs of the same load differ by chance, in the unit of the
            metric. None if it is not known.
    """
    if explained_share is None:
        return "equal"
    if explained_share >= REQUIRED_SHARE:
        return "explained"
    if expected_variation is not None and abs(unexplained) <= expected_variation:
        return "within_variation"
    return "unexplained"


def combine_variation(
    standard_error: float, loadgen_count: float, other_count: float | None
) -> float | None:
    """Return half of the 95 % interval of the difference between a metric of two runs.

    The variance of a mean is inversely proportional to the number of requests: with half as many
    requests, the variance of the other run is twice the variance of loadgen's run. The variance of
    the difference is the sum of both. Return None if the standard error is not finite.

    Args:
        standard_error: The standard error of the metric in loadgen's run.
        loadgen_count: The number of requests in loadgen's run.
        other_count: The number of requests in the other run. If it is None or 0, both runs are
            taken to have the same number.
    """
    if not math.isfinite(standard_error):
        return None

    variance_ratio = loadgen_count / other_count if other_count else 1.0
    error_of_difference = standard_error * math.sqrt(1 + variance_ratio)
    return NORMAL_95 * error_of_difference


NORMAL_95 = 1.959964
"""The 97.5 % quantile of the normal distribution."""
