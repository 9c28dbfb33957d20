"""Our run, with the values of its metrics by any definition. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.compare.block_errors import estimate_percentile_error
from loadgen.core.analysis.within_run_variance import BLOCK_COUNTS, estimate_mean
from loadgen.core.metrics.columns import OK, Columns
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import RunManifest
from loadgen.core.stats.histogram import Histogram, merge_histograms
from loadgen.core.stats.quantiles import quantile_of
from loadgen.interop.sample_statistics import PERCENTILES, PooledGaps, WeightedValues
from loadgen.interop.tool_definitions import LatencyDefinition, PercentileRule
from loadgen.interop.tool_samples import LatencySamples, SuccessfulRequests, select_successful

NS_PER_MS = 1e6

MIN_SAMPLES = 2 * max(BLOCK_COUNTS)
"""The smallest sample whose variation can be estimated from blocks of time."""


class DefinedLatency(NamedTuple):
    """How a statistic of a latency is computed.

    Attributes:
        definition: The timestamps and tokens that the latency uses.
        includes_warm_up: Whether requests of the warm-up count.
        percentiles: How percentiles are computed.
        token_scale: How many tokens the other tool counts where loadgen counts one token. In times
            between events, the additional tokens have a time of 0.
        length_scale: How many times as long the responses to the other tool were.
    """

    definition: LatencyDefinition
    includes_warm_up: bool = False
    percentiles: PercentileRule = "element"
    token_scale: float = 1.0
    length_scale: float = 1.0


class LoadgenRun:
    """The records of our run. Every statistic is computed when it is needed.

    Attributes:
        summary: The summary of the run.
        manifest: Its manifest.
        measured: The measured requests.
        all_requests: The measured requests and those of the warm-up.
    """

    def __init__(
        self,
        summary: Summary,
        manifest: RunManifest,
        rows: NDArray[np.void],
        gaps: Sequence[Histogram],
    ) -> None:
        """Select the measured requests, and collect the latencies with and without the warm-up.

        Args:
            summary: The summary of the run.
            manifest: The manifest of the run, which has its load stages and its API.
            rows: The record of each request.
            gaps: The histogram of times between output events of each load stage.
        """
        self.summary = summary
        self.manifest = manifest

        self.measured = select_successful(manifest, rows)
        measured_gaps = merge_histograms(_select_measured_gaps(manifest, gaps))
        self._measured_samples = LatencySamples(manifest.api, self.measured, measured_gaps)

        self.all_requests = _select_all_successful(rows)
        all_gaps = merge_histograms(gaps)
        self._all_samples = LatencySamples(manifest.api, self.all_requests, all_gaps)

    @property
    def has_warm_up(self) -> bool:
        """Whether the run has requests that are not measured."""
        return len(self.all_requests.columns) > len(self.measured.columns)

    def select_requests(self, *, includes_warm_up: bool) -> SuccessfulRequests:
        """Return the measured requests, or also those of the warm-up."""
        return self.all_requests if includes_warm_up else self.measured

    def compute_statistic(self, latency: DefinedLatency, statistic: str) -> float | None:
        """Return a statistic of a latency in ms, or None if no request has a value.

        Args:
            latency: How the latency is computed.
            statistic: "mean" or a percentile such as "p99".
        """
        sample = self._select_samples(latency).sample(latency.definition)
        if isinstance(sample, PooledGaps):
            return _compute_gap_statistic(sample.histogram, latency.token_scale, statistic)

        latencies_ns = self._compute_ordered_values(latency)
        return compute_value_statistic(latencies_ns, latency.percentiles, statistic)

    def estimate_standard_error(self, latency: DefinedLatency, statistic: str) -> float | None:
        """Return the standard error of a statistic of a latency in ms.

        It is estimated from the scatter between blocks of successive requests. Return None if there
        are too few requests, or if the latency is the time between events: the records have only a
        histogram of it.

        Args:
            latency: How the latency is computed.
            statistic: "mean" or a percentile such as "p99".
        """
        if latency.definition.has_value_per_gap:
            return None

        values_ns = self._compute_ordered_values(latency).values
        if len(values_ns) < MIN_SAMPLES:
            return None

        if statistic == "mean":
            mean_estimate = estimate_mean(values_ns)
            return None if mean_estimate is None else mean_estimate.error / NS_PER_MS

        # The error of the logarithm of a percentile is the relative error of the percentile.
        fraction = PERCENTILES[statistic]
        relative_error = estimate_percentile_error(values_ns, fraction).error
        percentile_ns = quantile_of(values_ns, fraction)
        return relative_error * percentile_ns / NS_PER_MS

    def count_successful(self, *, includes_warm_up: bool = False) -> int:
        """Return the number of successful requests, with or without those of the warm-up."""
        requests = self.select_requests(includes_warm_up=includes_warm_up)
        return int(requests.is_successful.sum())

    def compute_mean_tokens(self, field: str, *, includes_warm_up: bool = False) -> float | None:
        """Return the mean input or output tokens of successful requests, or None if unknown.

        Args:
            field: The field of the records: "output_tokens" or "input_tokens".
            includes_warm_up: Whether requests of the warm-up count.
        """
        requests = self.select_requests(includes_warm_up=includes_warm_up)
        tokens = requests.columns[field][requests.is_successful]
        known_tokens = tokens[tokens >= 0]  # a negative number stands for an unknown one
        return float(known_tokens.mean()) if len(known_tokens) else None

    def _select_samples(self, latency: DefinedLatency) -> LatencySamples:
        """Return the samples of the measured requests, or also those of the warm-up."""
        return self._all_samples if latency.includes_warm_up else self._measured_samples

    def _compute_ordered_values(self, latency: DefinedLatency) -> WeightedValues:
        """Return the latency of each successful request in ns, ordered by scheduled time.

        Requests without a value, or with a weight of 0, are left out.
        """
        values_ns, weights = self._compute_values(latency)
        is_known = ~np.isnan(values_ns)
        if weights is not None:
            is_known &= weights > 0

        requests = self.select_requests(includes_warm_up=latency.includes_warm_up)
        scheduled_ns = requests.columns["due_ns"][requests.is_successful]
        order = np.argsort(scheduled_ns, kind="stable")
        known_order = order[is_known[order]]

        ordered_weights = None if weights is None else weights[known_order]
        return WeightedValues(values_ns[known_order], ordered_weights)

    def _compute_values(self, latency: DefinedLatency) -> WeightedValues:
        """Return the latency of each successful request in ns, NaN for a request without a value.

        The values are scaled to the token counts and response lengths of the other tool. The
        latency must not be the time between events, of which a request has many.
        """
        samples = self._select_samples(latency)
        sample = samples.sample(latency.definition)
        assert not isinstance(sample, PooledGaps), "a request has many times between events"

        values_ns, weights = sample.compute()
        values_ns = _scale_lengths(values_ns, latency, samples)
        values_ns = _scale_tokens(values_ns, latency, samples)
        return WeightedValues(values_ns, weights)


def _select_all_successful(rows: NDArray[np.void]) -> SuccessfulRequests:
    """Return the requests of a run, of which those that succeeded with a token are marked."""
    columns = Columns(rows)
    has_token = columns["first_token_ns"] >= 0
    is_successful = columns.has_status(OK) & has_token
    return SuccessfulRequests(columns, is_successful)


def _select_measured_gaps(manifest: RunManifest, gaps: Sequence[Histogram]) -> list[Histogram]:
    """Return the histograms of the measured load stages, or all if the run has no stages."""
    if not manifest.stages:
        return list(gaps)

    stages_with_gaps = manifest.stages[: len(gaps)]
    return [gaps[index] for index, stage in enumerate(stages_with_gaps) if stage.measured]


def compute_value_statistic(
    latencies: WeightedValues, rule: PercentileRule, statistic: str
) -> float | None:
    """Return the mean or a percentile of latencies in ms, or None without any latency.

    Weighted percentiles are always interpolated.

    Args:
        latencies: The latencies in ns, with a weight for each if they are weighted.
        rule: "element" for a percentile that is one of the values. With any other rule it is
            interpolated between two of them.
        statistic: "mean" or a percentile such as "p99".
    """
    if len(latencies.values) == 0:
        return None
    if statistic == "mean":
        mean_ns = float(np.average(latencies.values, weights=latencies.weights))
        return mean_ns / NS_PER_MS

    is_interpolated = rule != "element" or latencies.weights is not None
    if is_interpolated:
        percentiles_ms = latencies.percentiles((statistic,))
        return percentiles_ms[statistic]

    percentile_ns = quantile_of(latencies.values, PERCENTILES[statistic])
    return percentile_ns / NS_PER_MS


def _compute_gap_statistic(gaps: Histogram, token_scale: float, statistic: str) -> float | None:
    """Return the mean or a percentile of the times between tokens in ms, or None without any.

    The tokens of one event arrive together, so the times between them are 0. Example: with 2 tokens
    per event, half of the times between tokens are 0, and the larger half are the times between
    events. The p90 of all is then the p80 of the times between events: (0.9 - 0.5) / (1 - 0.5).

    Args:
        gaps: The times between events.
        token_scale: The mean number of tokens per event.
        statistic: "mean" or a percentile such as "p99".
    """
    if gaps.count == 0:
        return None
    if statistic == "mean":
        mean_between_events_ns = gaps.total_ns / gaps.count
        return mean_between_events_ns / token_scale / NS_PER_MS

    fraction_of_zeros = 1 - 1 / token_scale
    fraction = PERCENTILES[statistic]
    fraction_of_events = (fraction - fraction_of_zeros) / (1 - fraction_of_zeros)
    if fraction_of_events <= 0:
        return 0.0
    return gaps.quantile(fraction_of_events) / NS_PER_MS


def _scale_lengths(
    values_ns: NDArray[np.float64], latency: DefinedLatency, samples: LatencySamples
) -> NDArray[np.float64]:
    """Return latencies as they would be if responses had the length of those to the other tool.

    The time per token stays the same. Example: a response of 101 tokens takes 100 ms to the first
    token and 1,000 ms for the others. With twice the length, the E2E latency is 100 + 2,000 ms.
    Latencies that end before the response ends are returned unchanged.
    """
    definition = latency.definition
    if latency.length_scale == 1.0 or not definition.ends_with_response:
        return values_ns

    generation_ns = samples.timestamps(definition.end) - samples.timestamps("first_token_ns")
    added_ns = (latency.length_scale - 1) * generation_ns
    if definition.divisor is None:
        return values_ns + added_ns

    # A latency per token: both the duration and the tokens become longer.
    token_counts = samples.token_counts(definition.divisor)
    scaled_durations_ns = values_ns * token_counts + added_ns
    scaled_counts = np.maximum(token_counts * latency.length_scale, 1.0)
    scaled_values_ns: NDArray[np.float64] = scaled_durations_ns / scaled_counts
    return scaled_values_ns


def _scale_tokens(
    values_ns: NDArray[np.float64], latency: DefinedLatency, samples: LatencySamples
) -> NDArray[np.float64]:
    """Return latencies per token as they would be with the token counts of another tool.

    Example: loadgen counts 101 tokens and divides by the 100 tokens after the first one. The other
    tool counts 1.5 times as many tokens, 151.5, and divides by 150.5. A response without a token to
    divide by has NaN. Latencies that are not per token are returned unchanged.
    """
    divisor_name = latency.definition.divisor
    if divisor_name is None or latency.token_scale == 1.0:
        return values_ns

    divisors = samples.token_counts(divisor_name)
    durations_ns = values_ns * divisors

    # Both counts, with and without the first token, grow by the same number: 50.5 in the example.
    added_tokens = (latency.token_scale - 1) * samples.token_counts("all_tokens")
    other_divisors = divisors + added_tokens

    scaled_values_ns = np.full(len(values_ns), np.nan)
    np.divide(durations_ns, other_divisors, out=scaled_values_ns, where=other_divisors > 0)
    return scaled_values_ns
