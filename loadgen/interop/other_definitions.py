"""How other tools would have reported the same records, by their definitions. Pure: rows in, samples per tool out.

Their definitions are those of `foreign.COUNTS`. Our records hold fewer instants than some of them use: an answer ends
at its last output or finish event here, where some count the usage event behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from loadgen.metrics.columns import OK, Columns
from loadgen.stats.quantiles import Histogram, milliseconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from loadgen.metrics.summary import Summary
    from loadgen.results.manifest import Header

Pair = tuple[float | None, float | None]
NONE: Pair = (None, None)
STATS = {"p1": 0.01, "p5": 0.05, "p10": 0.1, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99}
STATS["p99_9"] = 0.999


class WeightedValues(NamedTuple):
    """Values in ns, each as often as `weights` says (once without)."""

    values: NDArray[np.float64]
    weights: NDArray[np.int64] | None = None

    def stats(self) -> dict[str, float]:
        """count, mean, std, min, max and the percentiles of STATS, in ms; interpolated where nothing is weighted, as
        numpy and all these tools have them; {} without a value."""
        known = ~np.isnan(self.values) if self.weights is None else ~np.isnan(self.values) & (self.weights > 0)
        values = self.values[known]
        if len(values) == 0:
            return {}
        if self.weights is None:
            found = dict(zip(STATS, np.percentile(values, [100 * p for p in STATS.values()]), strict=True))
            mean, std, count = values.mean(), values.std(), len(values)
        else:
            weights = self.weights[known]
            order = np.argsort(values)
            sums = np.cumsum(weights[order])
            count = int(sums[-1])
            found = {n: values[order][int(np.searchsorted(sums, p * count))] for n, p in STATS.items()}
            mean = np.average(values, weights=weights)
            std = np.sqrt(np.average((values - mean) ** 2, weights=weights))
        told = {"mean": mean, "std": std, "min": values.min(), "max": values.max(), **found}
        return {"count": count} | {name: milliseconds(float(value)) for name, value in told.items()}


class Pooled(NamedTuple):
    """Gaps of all requests, as a histogram."""

    gaps: Histogram

    def stats(self) -> dict[str, float]:
        """As of a Sample, within the histogram's bound; the standard deviation by the middles of the buckets."""
        count = self.gaps.count
        if count == 0:
            return {}
        mean = self.gaps.total_ns / count
        places = np.flatnonzero(self.gaps.counts)
        middles = np.array([self.gaps.middle(int(place)) for place in places])
        std = np.sqrt(np.average((middles - mean) ** 2, weights=self.gaps.counts[places]))
        told = {"mean": mean, "std": float(std), "min": self.gaps.least_ns, "max": self.gaps.largest_ns}
        told |= {name: self.gaps.quantile(p) for name, p in STATS.items()}
        return {"count": count} | {name: milliseconds(value) for name, value in told.items()}


class Theirs(NamedTuple):
    """The samples that one tool would have had; None: it has no such metric."""

    ttft: WeightedValues
    tpot: WeightedValues | None
    itl: WeightedValues | Pooled | None
    e2e: WeightedValues


class ToolFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one tool would print, in ms: (p50, p99) of each metric, None where it has none; `counts` says how."""

    tool: str
    ttft: Pair
    tpot: Pair
    itl: Pair
    e2e: Pair
    counts: str


def chosen(header: Header, rows: NDArray[np.void]) -> tuple[Columns, NDArray[np.bool_]]:
    """Measured rows, and which of them are ok and streamed something: what other tools make their figures of."""
    stages = np.array([stage.measured for stage in header.stages] or [True])
    columns = Columns(rows, stages[rows["stage"]])
    return columns, columns.where(OK) & (columns["first_token_ns"] >= 0)


def theirs(header: Header, rows: NDArray[np.void], gaps: Sequence[Histogram]) -> dict[str, Theirs]:
    """By tool, as they are called in `foreign.COUNTS`; {} when no request is ok."""
    columns, ok = chosen(header, rows)
    if not ok.any():
        return {}
    pooled = Histogram()
    for i, histogram in enumerate(gaps):
        if not header.stages or header.stages[i].measured:
            pooled.merge(histogram)
    sent, first, last = (columns[name][ok] for name in ("sent_ns", "first_token_ns", "last_token_ns"))
    end, n = columns["end_ns"][ok], columns["output_tokens"][ok].astype(np.int64)
    role = columns["first_event_ns"][ok]
    role = np.where(role < 0, first, role) if header.api == "chat" else first
    with_role = Histogram()
    with_role.merge(pooled)
    with_role.add((first - role)[first > role])
    from_sent, whole = WeightedValues((first - sent) / 1.0), WeightedValues((end - sent) / 1.0)
    decode, steps = WeightedValues(_per(end - first, n - 1)), WeightedValues(_per(last - first, n - 1))
    itl = Pooled(pooled)
    return {
        "vllm bench serve": Theirs(
            WeightedValues((role - sent) / 1.0), WeightedValues(_per(end - role, n - 1)), Pooled(with_role), whole
        ),
        "SGLang bench_serving": Theirs(from_sent, decode, itl, whole),
        "AIPerf": Theirs(from_sent, None, decode, whole),
        "GuideLLM": Theirs(
            from_sent, WeightedValues(_per(last - sent, n), n), WeightedValues(_per(last - first, n - 1), n - 1), whole
        ),
        "inference-perf": Theirs(from_sent, steps, itl, whole),
        "genai-bench": Theirs(from_sent, decode, None, whole),
        "mlcommons/endpoints": Theirs(from_sent, decode, None, whole),
    }


def _per(span: NDArray[np.int64], by: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.where(by > 0, span / np.maximum(by, 1), np.nan)


def reported(summary: Summary, header: Header, rows: NDArray[np.void], gaps: Sequence[Histogram]) -> list[ToolFigures]:
    """Ours first, then each tool; [] when no request is ok."""
    from loadgen.interop.reader import COUNTS

    found = theirs(header, rows, gaps)
    if not found:
        return []
    ours = ToolFigures(
        tool="loadgen",
        ttft=(summary.ttft_ms.p50, summary.ttft_ms.p99),
        tpot=(summary.tpot_ms.p50, summary.tpot_ms.p99),
        itl=NONE if summary.itl_ms is None else (summary.itl_ms.p50, summary.itl_ms.p99),
        e2e=(summary.e2e_ms.p50, summary.e2e_ms.p99),
        counts="From due. TTFT is the first event with output. TPOT is (last - first) / (n - n1). ITL is pooled, and "
        "only where an event carries one token. Quantiles are elements of the sample",
    )
    return [ours, *(_line(tool, samples, COUNTS[tool]) for tool, samples in found.items())]


def _line(tool: str, samples: Theirs, counts: str) -> ToolFigures:
    def pair(sample: WeightedValues | Pooled | None) -> Pair:
        stats = sample.stats() if sample is not None else {}
        return stats.get("p50"), stats.get("p99")

    return ToolFigures(
        tool=tool,
        ttft=pair(samples.ttft),
        tpot=pair(samples.tpot),
        itl=pair(samples.itl),
        e2e=pair(samples.e2e),
        counts=counts,
    )
