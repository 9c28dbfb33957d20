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
        """Prepare the latencies of the measured requests, and of those with the warm-up.

        Args:
            summary: The summary of the run.
            manifest: The manifest of the run, which has its load stages and its API.
            rows: The record of each request.
            gaps: The histogram of times between output events of each load stage.
        """
        self.summary = summary
        self.manifest = manifest
        self.measured = select_successful(manifest, rows)
        self.all_requests = _select_all_successful(rows)

        measured_gaps = merge_histograms(_select_measured_gaps(manifest, gaps))
        self._measured_samples = LatencySamples(manifest.api, self.measured, measured_gaps)
        self._all_samples = LatencySamples(manifest.api, self.all_requests, merge_histograms(gaps))

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
        """Return the standard error of a statistic of a latency in ms, from blocks of time.

        Return None for times between events, which the records do not have one by one, and for too
        few requests.

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
            estimate = estimate_mean(values_ns)
            return None if estimate is None else estimate.error / NS_PER_MS

        # The error of a logarithm is a relative error: 0.02 is 2 % of the percentile.
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

        Requests without a value are left out.
        """
        values_ns, weights = self._compute_values(latency)
        is_known = ~np.isnan(values_ns)
        if weights is not None:
            is_known &= weights > 0

        requests = self.select_requests(includes_warm_up=latency.includes_warm_up)
        scheduled_ns = requests.columns["due_ns"][requests.is_successful]
        known_indices = np.flatnonzero(is_known)
        by_scheduled_time = np.argsort(scheduled_ns[known_indices], kind="stable")
        ordered_indices = known_indices[by_scheduled_time]

        ordered_weights = None if weights is None else weights[ordered_indices]
        return WeightedValues(values_ns[ordered_indices], ordered_weights)

    def _compute_values(self, latency: DefinedLatency) -> WeightedValues:
        """Return the latency of each successful request in ns, NaN for a request without a value.

        The values are scaled to the token counts and response lengths of the other tool.
        """
        samples = self._select_samples(latency)
        sample = samples.sample(latency.definition)
        assert not isinstance(sample, PooledGaps), "times between events are no values of requests"

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

    Args:
        latencies: The latencies in ns, with a weight for each if they are weighted.
        rule: Whether a percentile is one of the values, or is interpolated between two of them.
        statistic: "mean" or a percentile such as "p99".
    """
    if len(latencies.values) == 0:
        return None
    if statistic == "mean":
        mean_ns = float(np.average(latencies.values, weights=latencies.weights))
        return mean_ns / NS_PER_MS

    is_one_of_the_values = rule == "element" and latencies.weights is None
    if is_one_of_the_values:
        return quantile_of(latencies.values, PERCENTILES[statistic]) / NS_PER_MS
    return latencies.percentiles((statistic,))[statistic]


def _compute_gap_statistic(gaps: Histogram, token_scale: float, statistic: str) -> float | None:
    """Return the mean or a percentile of the times between tokens in ms, or None without any.

    Tokens of the same event have a time of 0 between them. With 2 tokens per event, half of all
    times are 0, so the p90 of all times is the p80 of the times between events.

    Args:
        gaps: The times between events.
        token_scale: The mean number of tokens per event.
        statistic: "mean" or a percentile such as "p99".
    """
    if gaps.count == 0:
        return None
    if statistic == "mean":
        return gaps.total_ns / gaps.count / token_scale / NS_PER_MS

    zero_fraction = 1 - 1 / token_scale
    quantile_of_gaps = (PERCENTILES[statistic] - zero_fraction) / (1 - zero_fraction)
    if quantile_of_gaps <= 0:
        return 0.0
    return gaps.quantile(quantile_of_gaps) / NS_PER_MS


def _scale_lengths(
    values_ns: NDArray[np.float64], latency: DefinedLatency, samples: LatencySamples
) -> NDArray[np.float64]:
    """Return latencies as they would be for longer responses with the same time per token.

    For responses of twice the length, the time after the first token doubles, and the time before
    the first token does not change. For a latency per token, the number of tokens doubles, too.
    """
    definition = latency.definition
    if latency.length_scale == 1.0 or not definition.ends_with_response:
        return values_ns

    generation_ns = samples.timestamps(definition.end) - samples.timestamps("first_token_ns")
    added_ns = (latency.length_scale - 1) * generation_ns
    if definition.divisor is None:
        return values_ns + added_ns

    token_counts = samples.token_counts(definition.divisor)
    durations_ns = values_ns * token_counts + added_ns
    scaled_counts = np.maximum(token_counts * latency.length_scale, 1.0)
    scaled_values_ns: NDArray[np.float64] = durations_ns / scaled_counts
    return scaled_values_ns


def _scale_tokens(
    values_ns: NDArray[np.float64], latency: DefinedLatency, samples: LatencySamples
) -> NDArray[np.float64]:
    """Return latencies per token as they would be with the token counts of another tool.

    Example: loadgen counts 101 tokens and divides by the 100 tokens after the first one. The other
    tool counts 1.5 times as many tokens, 151.5, and divides by 150.5.
    """
    divisor = latency.definition.divisor
    if divisor is None or latency.token_scale == 1.0:
        return values_ns

    token_counts = samples.token_counts(divisor)
    durations_ns = values_ns * token_counts
    added_counts = (latency.token_scale - 1) * samples.token_counts("all_tokens")
    scaled_counts = token_counts + added_counts
    has_tokens = scaled_counts > 0

    scaled_values_ns = np.full(len(values_ns), np.nan)
    np.divide(durations_ns, scaled_counts, out=scaled_values_ns, where=has_tokens)
    return scaled_values_ns
