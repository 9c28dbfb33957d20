"""Computes what other tools would report for the same records, by their definitions.

Pure: rows in, samples per tool out. The definitions are in `formats.FORMATS`. Our records have fewer instants than some
tools use: an answer ends at its last output or finish event here, while some tools include the usage event after it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.columns import OK, Columns, as_selection, is_measured, pool_measured_gaps
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import RunManifest
from loadgen.core.stats.histogram import Histogram
from loadgen.core.stats.quantiles import Distribution, block_slices, milliseconds
from loadgen.formats import definitions_of

Pair = tuple[float | None, float | None]
NONE: Pair = (None, None)
STATS = {
    "p1": 0.01,
    "p5": 0.05,
    "p10": 0.1,
    "p25": 0.25,
    "p50": 0.5,
    "p75": 0.75,
    "p90": 0.9,
    "p95": 0.95,
    "p99": 0.99,
}
STATS["p99_9"] = 0.999


INSTANTS = ("sent_ns", "first_token_ns", "role_event", "last_token_ns", "end_ns")


class WeightedValues(NamedTuple):
    """Values in ns, each counted `weights` times (once without weights)."""

    values: NDArray[np.float64]
    weights: NDArray[np.int64] | None = None

    def stats(self, only: Sequence[str] = ()) -> dict[str, float]:
        """count, and in ms: mean, std, min, max and the percentiles of STATS; {} without a value. `only`: of these
        percentiles, and nothing else.

        Percentiles are interpolated where there are no weights, as in numpy and in all these tools.
        """
        is_known = (
            ~np.isnan(self.values)
            if self.weights is None
            else ~np.isnan(self.values) & (self.weights > 0)
        )
        known = as_selection(is_known)
        values = self.values[known]
        if len(values) == 0:
            return {}
        asked = {name: STATS[name] for name in only or STATS}
        if self.weights is None:
            count = len(values)
            shares = [100 * p for p in asked.values()]
            percentiles = dict(zip(asked, percentiles_of(np.sort(values), shares), strict=True))
            mean, std = (0.0, 0.0) if only else (values.mean(), values.std())
        else:
            weights = self.weights[known]
            count = int(weights.sum())
            if (each := int(weights.min())) == weights.max():  # in order without their places
                ordered, ends = np.sort(values), range(each, count + 1, each)
                places = {key: bisect_left(ends, p * count) for key, p in asked.items()}
            else:
                order = np.argsort(values).astype(np.int32)  # half as large
                ordered, cumulated = values[order], weights[order]
                del order
                np.cumsum(cumulated, out=cumulated)
                places = {
                    key: int(np.searchsorted(cumulated, p * count)) for key, p in asked.items()
                }
            percentiles = {key: ordered[place] for key, place in places.items()}
            mean = 0.0 if only else np.average(values, weights=weights)
            std = 0.0 if only else np.sqrt(np.average((values - mean) ** 2, weights=weights))
        if only:
            return {"count": count} | {
                name: milliseconds(float(value)) for name, value in percentiles.items()
            }
        statistics = {
            "mean": mean,
            "std": std,
            "min": values.min(),
            "max": values.max(),
            **percentiles,
        }
        return {"count": count} | {
            name: milliseconds(float(value)) for name, value in statistics.items()
        }


def percentiles_of(ordered: NDArray[np.float64], shares: Sequence[float]) -> NDArray[np.float64]:
    """As `numpy.percentile`, to the last bit, of values that are in order already: it would part them all again."""
    at = (len(ordered) - 1) * (np.array(shares) / 100)
    below = np.floor(at).astype(np.int64)
    low, high, over = ordered[below], ordered[np.minimum(below + 1, len(ordered) - 1)], at - below
    return np.where(over >= 0.5, high - (high - low) * (1 - over), low + (high - low) * over)


class Derived(NamedTuple):
    """A sample that is worked out when it is asked for, and not kept: a run has millions of requests."""

    make: Callable[[], WeightedValues]

    @property
    def values(self) -> NDArray[np.float64]:
        return self.make().values

    def stats(self, only: Sequence[str] = ()) -> dict[str, float]:
        """As `WeightedValues.stats`."""
        return self.make().stats(only)


class Pooled(NamedTuple):
    """Gaps between events of all requests, as a histogram."""

    gaps: Histogram

    def stats(self, only: Sequence[str] = ()) -> dict[str, float]:
        """As `WeightedValues.stats`, within the error of the histogram; std is that of the bucket middles."""
        count = self.gaps.count
        if count == 0:
            return {}
        mean = self.gaps.total_ns / count
        buckets = np.flatnonzero(self.gaps.counts)
        middles = np.array([self.gaps.middle(int(bucket)) for bucket in buckets])
        std = np.sqrt(np.average((middles - mean) ** 2, weights=self.gaps.counts[buckets]))
        statistics = {
            "mean": mean,
            "std": float(std),
            "min": self.gaps.least_ns,
            "max": self.gaps.largest_ns,
        }
        statistics |= {name: self.gaps.quantile(p) for name, p in STATS.items()}
        return {"count": count} | {name: milliseconds(value) for name, value in statistics.items()}


class Theirs(NamedTuple):
    """The samples of one tool, by its own definitions; None: the tool has no such metric."""

    ttft: Derived
    tpot: Derived | None
    itl: Derived | Pooled | None
    e2e: Derived


class ToolMetrics(NamedTuple):
    """What one tool would report.

    Attributes:
        tool: The name of the tool.
        definitions: How it defines its metrics.
        metrics: The median and p99 of TTFT, TPOT, ITL and E2E latency in ms.
    """

    tool: str
    definitions: str
    metrics: tuple[Pair, ...]


def chosen(manifest: RunManifest, rows: NDArray[np.void]) -> tuple[Columns, NDArray[np.bool_]]:
    """The measured rows, and which of them are ok and have output: the requests that other tools count."""
    columns = Columns(rows, is_measured(manifest, rows))
    return columns, columns.where(OK) & (columns["first_token_ns"] >= 0)


def theirs(
    manifest: RunManifest, rows: NDArray[np.void], gaps: Sequence[Histogram]
) -> dict[str, Theirs]:
    """The samples of each tool, by its name in `formats.FORMATS`; {} when no request is ok."""
    columns, ok = chosen(manifest, rows)
    if not ok.any():
        return {}
    known = as_selection(ok)
    pooled = pool_measured_gaps(manifest, gaps)

    def of(name: str) -> NDArray[np.int64]:
        if name != "role_event":
            return columns[name][known]
        role = of("first_event_ns" if manifest.api == "chat" else "first_token_ns")
        return np.where(role < 0, of("first_token_ns"), role) if role.min(initial=0) < 0 else role

    @cache
    def like(name: str) -> str:
        """The first of the instants that is the same in every request: what is the same is worked out once."""
        return next(one for one in INSTANTS if one == name or np.array_equal(of(one), of(name)))

    def between(start: str, end: str) -> Derived:
        return span(like(start), like(end))

    @cache
    def span(start: str, end: str) -> Derived:
        return Derived(lambda: WeightedValues((of(end) - of(start)) / 1.0))

    def each(start: str, end: str, without: int = 1, *, weighted: bool = False) -> Derived:
        """A span over the tokens but `without`, counted once for each of these where it is `weighted`."""
        return shared_out(like(start), like(end), without, weighted)

    @cache
    def shared_out(start: str, end: str, without: int, weighted: bool) -> Derived:
        def made() -> WeightedValues:
            count = of("output_tokens").astype(np.int64) - without
            return WeightedValues(_divided(of(end) - of(start), count), count if weighted else None)

        return Derived(made)

    with_role = Histogram()
    with_role.merge(pooled)
    first_gap = of("first_token_ns") - of("role_event")
    with_role.add(first_gap[first_gap > 0])
    from_sent, e2e = between("sent_ns", "first_token_ns"), between("sent_ns", "end_ns")
    tpot_to_end, tpot_to_last = (
        each("first_token_ns", "end_ns"),
        each("first_token_ns", "last_token_ns"),
    )
    itl = Pooled(pooled)
    return {
        "vllm bench serve": Theirs(
            between("sent_ns", "role_event"), each("role_event", "end_ns"), Pooled(with_role), e2e
        ),
        "SGLang bench_serving": Theirs(from_sent, tpot_to_end, itl, e2e),
        "AIPerf": Theirs(from_sent, None, tpot_to_end, e2e),
        "GuideLLM": Theirs(
            from_sent,
            each("sent_ns", "last_token_ns", 0, weighted=True),
            each("first_token_ns", "last_token_ns", weighted=True),
            e2e,
        ),
        "inference-perf": Theirs(from_sent, tpot_to_last, itl, e2e),
        "genai-bench": Theirs(from_sent, tpot_to_end, None, e2e),
        "mlcommons/endpoints": Theirs(from_sent, tpot_to_end, None, e2e),
    }


def _divided(span: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.float64]:
    found = np.empty(len(span))
    for part in block_slices(len(span)):
        found[part] = span[part] / np.maximum(count[part], 1)
    found[count <= 0] = np.nan
    return found


OWN_DEFINITIONS = (
    "Latencies start at the scheduled time. TTFT ends at the first event with output. TPOT is "
    "(last - first) / (n - n1). ITL is pooled over requests, and reported only if an event has one "
    "token. Percentiles are elements of the sample"
)

REPORTED_QUANTILES = ("p50", "p99")


def compute_tool_metrics(
    summary: Summary, manifest: RunManifest, rows: NDArray[np.void], gaps: Sequence[Histogram]
) -> list[ToolMetrics]:
    """Return the metrics of loadgen, then those that each tool would report of the same records.

    The list is empty if no request succeeded.
    """
    samples_by_tool = theirs(manifest, rows, gaps)
    if not samples_by_tool:
        return []
    distributions = (summary.ttft_ms, summary.tpot_ms, summary.itl_ms, summary.e2e_ms)
    own_metrics = tuple(_pair_of(distribution) for distribution in distributions)
    tools = [ToolMetrics("loadgen", OWN_DEFINITIONS, own_metrics)]
    # Tools share samples, and each sample is computed once.
    statistics = {
        id(sample): sample.stats(REPORTED_QUANTILES)
        for samples in samples_by_tool.values()
        for sample in samples
        if sample is not None
    }
    for tool, samples in samples_by_tool.items():
        metrics = []
        for sample in samples:
            values_ms = statistics.get(id(sample), {})
            metrics.append((values_ms.get("p50"), values_ms.get("p99")))
        tools.append(ToolMetrics(tool, definitions_of(tool), tuple(metrics)))
    return tools


def _pair_of(distribution: Distribution | None) -> Pair:
    """Return the median and p99 of a distribution; None each if it is not reported."""
    if distribution is None:
        return NONE
    return distribution.p50, distribution.p99
