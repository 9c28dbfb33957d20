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
        definition: The timestamps and tokens that it uses.
        includes_warm_up: Whether requests of the warm-up count.
        percentiles: How percentiles are computed.
        token_scale: The tokens that the other tool counted for one of our records. For times
            between events, the further tokens have a time of 0.
        length_scale: How much longer the responses of the other run were.
    """

    definition: LatencyDefinition
    includes_warm_up: bool = False
    percentiles: PercentileRule = "element"
    token_scale: float = 1.0
    length_scale: float = 1.0


class OurRun:
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
        """Select the requests.

        Args:
            summary: The summary of the run.
            manifest: Its manifest.
            rows: The records of its requests.
            gaps: For each stage, the times between output events.
        """
        self.summary = summary
        self.manifest = manifest
        self.measured = select_successful(manifest, rows)
        every_row = Columns(rows)
        is_successful = every_row.where(OK) & (every_row["first_token_ns"] >= 0)
        self.all_requests = SuccessfulRequests(every_row, is_successful)

        measured_gaps = [
            histogram
            for index, histogram in enumerate(gaps)
            if not manifest.stages or manifest.stages[index].measured
        ]
        self._measured_samples = LatencySamples(
            manifest.api, self.measured, merge_histograms(measured_gaps)
        )
        self._all_samples = LatencySamples(manifest.api, self.all_requests, merge_histograms(gaps))

    @property
    def has_warm_up(self) -> bool:
        """Whether the run has requests that are not measured."""
        return len(self.all_requests.columns) > len(self.measured.columns)

    def requests(self, *, includes_warm_up: bool) -> SuccessfulRequests:
        """Return the requests that count."""
        return self.all_requests if includes_warm_up else self.measured

    def compute_statistic(self, latency: DefinedLatency, statistic: str) -> float | None:
        """Return a statistic of a latency, such as "mean" or "p99", in ms; None without values."""
        sample = self._samples(latency).sample(latency.definition)
        if isinstance(sample, PooledGaps):
            return _compute_gap_statistic(sample.histogram, latency.token_scale, statistic)

        values = self._known_values(latency)
        if len(values.values) == 0:
            return None
        if statistic == "mean":
            return float(np.average(values.values, weights=values.weights)) / NS_PER_MS
        if latency.percentiles == "element" and values.weights is None:
            return quantile_of(values.values, PERCENTILES[statistic]) / NS_PER_MS
        return values.percentiles((statistic,))[statistic]

    def estimate_standard_error(self, latency: DefinedLatency, statistic: str) -> float | None:
        """Return the standard error of a statistic in ms, from blocks of time of the run.

        Return None for times between events, which the records do not have one by one, and for too
        few requests.
        """
        if latency.definition.unit == "gap":
            return None

        values = self._known_values(latency).values
        if len(values) < MIN_SAMPLES:
            return None

        if statistic == "mean":
            estimate = estimate_mean(values)
            return None if estimate is None else estimate.error / NS_PER_MS

        # The error is that of the logarithm, which is the relative error.
        fraction = PERCENTILES[statistic]
        error = estimate_percentile_error(values, fraction).error
        return error * quantile_of(values, fraction) / NS_PER_MS

    def count_successful(self, *, includes_warm_up: bool = False) -> int:
        """Return the number of successful requests that count."""
        return int(self.requests(includes_warm_up=includes_warm_up).is_successful.sum())

    def mean_tokens(self, field: str, *, includes_warm_up: bool = False) -> float | None:
        """Return the mean of a count of tokens per successful request, or None if unknown.

        Args:
            field: The field of the records: "output_tokens" or "input_tokens".
            includes_warm_up: Whether requests of the warm-up count.
        """
        requests = self.requests(includes_warm_up=includes_warm_up)
        tokens = requests.columns[field][requests.is_successful]
        known_tokens = tokens[tokens >= 0]
        return float(known_tokens.mean()) if len(known_tokens) else None

    def _samples(self, latency: DefinedLatency) -> LatencySamples:
        """Return the samples of the requests that count."""
        return self._all_samples if latency.includes_warm_up else self._measured_samples

    def _known_values(self, latency: DefinedLatency) -> WeightedValues:
        """Return the values of a latency in ns in the order of scheduled times.

        Requests without a value are left out.
        """
        samples = self._samples(latency)
        sample = samples.sample(latency.definition)
        assert not isinstance(sample, PooledGaps), "times between events are no values of requests"
        values_ns, weights = sample.compute()
        values_ns = _scale_lengths(values_ns, latency, samples)
        values_ns = _scale_tokens(values_ns, latency, samples)

        requests = self.requests(includes_warm_up=latency.includes_warm_up)
        order = np.argsort(requests.columns["due_ns"][requests.is_successful], kind="stable")
        is_known = ~np.isnan(values_ns)
        if weights is not None:
            is_known &= weights > 0
        order = order[is_known[order]]
        return WeightedValues(values_ns[order], None if weights is None else weights[order])


def _compute_gap_statistic(gaps: Histogram, token_scale: float, statistic: str) -> float | None:
    """Return a statistic of the times between tokens in ms, or None without any.

    With a scale of 1.6, each event has 1.6 tokens on average. The 0.6 further tokens come at the
    same time as the first one, so 0.6 of 1.6 times are 0, and percentiles of the others are taken
    at smaller shares of them.
    """
    if gaps.count == 0:
        return None
    if statistic == "mean":
        return gaps.total_ns / gaps.count / token_scale / NS_PER_MS

    zero_share = 1 - 1 / token_scale
    share_of_gaps = (PERCENTILES[statistic] - zero_share) / (1 - zero_share)
    return gaps.quantile(share_of_gaps) / NS_PER_MS if share_of_gaps > 0 else 0.0


def _scale_lengths(
    values_ns: NDArray[np.float64], latency: DefinedLatency, samples: LatencySamples
) -> NDArray[np.float64]:
    """Return latencies as they would be for longer responses, at the same time per token.

    The time from the first token to the end grows with the length, and the time before it does not.
    A latency that is divided by tokens is divided by more of them as well.
    """
    definition = latency.definition
    if latency.length_scale == 1.0 or definition.end not in ("last_token_ns", "end_ns"):
        return values_ns

    generation_ns = samples.timestamps(definition.end) - samples.timestamps("first_token_ns")
    added_ns = (latency.length_scale - 1) * generation_ns
    if definition.divisor is None:
        return values_ns + added_ns

    counts = samples.token_counts(definition.divisor)
    durations_ns = values_ns * counts + added_ns
    scaled_counts = np.maximum(counts * latency.length_scale, 1.0)
    scaled_values: NDArray[np.float64] = durations_ns / scaled_counts
    return scaled_values


def _scale_tokens(
    values_ns: NDArray[np.float64], latency: DefinedLatency, samples: LatencySamples
) -> NDArray[np.float64]:
    """Return latencies per token as they would be with another number of tokens per request.

    With a scale of 1.5, a request of 101 tokens counts as one of 151.5. A latency that was divided
    by 100 tokens is then divided by 150.5.
    """
    divisor = latency.definition.divisor
    if divisor is None or latency.token_scale == 1.0:
        return values_ns

    counts = samples.token_counts(divisor)
    added_tokens = (latency.token_scale - 1) * samples.token_counts("all_tokens")
    scaled_counts = counts + added_tokens
    scaled_values: NDArray[np.float64] = np.where(
        scaled_counts > 0, values_ns * counts / np.maximum(scaled_counts, 1e-9), np.nan
    )
    return scaled_values
