"""How other tools would have reported the same records, by their definitions. Pure: rows in, a line per tool out.

Their definitions are those of `foreign.COUNTS`. Our records hold fewer instants than some of them use: an answer ends
at its last output or finish event here, where some count the usage event behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from loadgen.metrics import OK, UNDEFINED, Columns
from loadgen.quantiles import Histogram

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from loadgen.header import Header
    from loadgen.summary import Summary

Pair = tuple[float | None, float | None]
NONE: Pair = (None, None)


class Reported(msgspec.Struct, frozen=True, kw_only=True):
    """What one tool would print, in ms: (p50, p99) of each metric, None where it has none; `counts` says how."""

    tool: str
    ttft: Pair
    tpot: Pair
    itl: Pair
    e2e: Pair
    counts: str


def reported(summary: Summary, header: Header, rows: NDArray[np.void], gaps: Sequence[Histogram]) -> list[Reported]:
    """Ours first, then each tool; [] when no request is ok."""
    from loadgen.foreign import COUNTS

    stages = np.array([stage.measured for stage in header.stages] or [True])
    columns = Columns(rows, stages[rows["stage"]])
    ok = columns.where(OK) & (columns["first_token_ns"] >= 0)
    if not ok.any():
        return []
    pooled = Histogram()
    for i, histogram in enumerate(gaps):
        if stages[i]:
            pooled.merge(histogram)
    sent, first, last = (columns[name][ok] for name in ("sent_ns", "first_token_ns", "last_token_ns"))
    end, n = columns["end_ns"][ok], columns["output_tokens"][ok].astype(np.int64)
    role = columns["first_event_ns"][ok]
    role = np.where(role < 0, first, role) if header.api == "chat" else first
    with_role = Histogram()
    with_role.merge(pooled)
    with_role.add((first - role)[first > role])
    from_sent, whole = _pair(first - sent), _pair(end - sent)
    decode = _pair(_per(end - first, n - 1))
    steps = _pair(_per(last - first, n - 1))
    itl = _pooled(pooled)
    lines = {
        "vllm bench serve": (_pair(role - sent), _pair(_per(end - role, n - 1)), _pooled(with_role), whole),
        "SGLang bench_serving": (from_sent, decode, itl, whole),
        "AIPerf": (from_sent, NONE, decode, whole),
        "GuideLLM": (
            from_sent,
            _weighted(_per(last - sent, n), n),
            _weighted(_per(last - first, n - 1), n - 1),
            whole,
        ),
        "inference-perf": (from_sent, steps, itl, whole),
        "genai-bench": (from_sent, decode, NONE, whole),
        "mlcommons/endpoints": (from_sent, decode, NONE, whole),
    }
    ours = Reported(
        tool="loadgen",
        ttft=(summary.ttft_ms.p50, summary.ttft_ms.p99),
        tpot=(summary.tpot_ms.p50, summary.tpot_ms.p99),
        itl=NONE if summary.itl_ms is None else (summary.itl_ms.p50, summary.itl_ms.p99),
        e2e=(summary.e2e_ms.p50, summary.e2e_ms.p99),
        counts="From due. TTFT is the first event with output. TPOT is (last - first) / (n - n1). ITL is pooled, and "
        "only where an event carries one token. Quantiles are elements of the sample",
    )
    theirs = [
        Reported(tool=tool, ttft=ttft, tpot=tpot, itl=itl, e2e=e2e, counts=COUNTS[tool])
        for tool, (ttft, tpot, itl, e2e) in lines.items()
    ]
    return [ours, *theirs]


def _per(span: NDArray[np.int64], by: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.where(by > 0, span / np.maximum(by, 1), np.nan)


def _pair(values_ns: NDArray[np.int64] | NDArray[np.float64]) -> Pair:
    """Interpolated percentiles, as numpy and all these tools have them."""
    known = values_ns[~np.isnan(values_ns)] if values_ns.dtype.kind == "f" else values_ns[values_ns != UNDEFINED]
    if len(known) == 0:
        return NONE
    p50, p99 = np.percentile(known, [50, 99]) / 1e6
    return round(float(p50), 6), round(float(p99), 6)


def _weighted(values: NDArray[np.float64], weights: NDArray[np.int64]) -> Pair:
    """Each request's value as often as it has tokens."""
    known = ~np.isnan(values) & (weights > 0)
    if not known.any():
        return NONE
    order = np.argsort(values[known])
    sums = np.cumsum(weights[known][order])
    p50, p99 = (values[known][order][int(np.searchsorted(sums, p * sums[-1]))] / 1e6 for p in (0.5, 0.99))
    return round(float(p50), 6), round(float(p99), 6)


def _pooled(histogram: Histogram) -> Pair:
    found = histogram.distribution()
    return found.p50, found.p99
