"""Whether a queue at the server explains a TTFT objective that a run missed. Pure.

The detectors of `causes` compare slow requests with fast ones, which needs hundreds of requests. A
queue that makes up most of a missed TTFT shows in a few dozen: in the server's own timing of each
request, in its metrics page, or in a TTFT that grows while the load goes on.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadgen.core.metrics.columns import UNDEFINED
from loadgen.core.metrics.sections import Cause
from loadgen.core.server_metrics import series

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from loadgen.core.metrics.columns import JoinedColumns
    from loadgen.core.server_metrics.series import MetricSample
    from loadgen.core.slo import Slo

MIN_REQUESTS = 20
"""Fewer requests do not show a queue."""
MOST_OF_TTFT = 0.5
"""The share of the TTFT that waiting has to explain."""
GROWTH_FACTOR = 1.5
"""The factor by which the median TTFT grows from the first third of the load to the last one."""
QUEUE_TIME = "queue_time_seconds"
"""The end of the names of the histograms in which vLLM and TensorRT-LLM count queueing time."""


class MissedTtft(NamedTuple):
    """The requests of a run that missed a TTFT objective, ordered by scheduled time."""

    requests: JoinedColumns
    ttft_ns: NDArray[np.int64]
    send_delay_ns: NDArray[np.int64]
    """How late the client sent each request."""
    limit_ns: int
    samples: Sequence[MetricSample]

    @property
    def exceeds_limit(self) -> NDArray[np.bool_]:
        """Return which requests exceed the limit."""
        return self.ttft_ns > self.limit_ns


def missed_ttft_limit(ttft_ns: NDArray[np.int64], slo: Slo | None) -> int | None:
    """Return the tightest TTFT limit of the SLO that too many requests exceed, in ns, or None."""
    missed = [
        term.limit_ns
        for term in (slo.terms if slo is not None else ())
        if term.metric == "ttft" and float((ttft_ns > term.limit_ns).mean()) > 1 - term.quantile
    ]
    return min(missed, default=None)


def find_queue(missed: MissedTtft) -> Cause | None:
    """Return the queue as the cause of a missed TTFT, with the evidence, or None."""
    ttft_ns = float(missed.ttft_ns[missed.exceeds_limit].mean())
    if float(missed.send_delay_ns[missed.exceeds_limit].mean()) >= MOST_OF_TTFT * ttft_ns:
        return None
    return _by_timing(missed, ttft_ns) or _by_page(missed) or _by_growth(missed)


def _by_timing(missed: MissedTtft, ttft_ns: float) -> Cause | None:
    """Return the queue by the server's own timing of each request."""
    queued = missed.requests["server_queue_ns"][missed.exceeds_limit]
    if int(queued.min()) < 0:
        return None
    queued_ns = float(queued.mean())
    if queued_ns < MOST_OF_TTFT * ttft_ns:
        return None
    text = (
        f"{len(queued):,} requests exceeded the TTFT limit of {_ms(missed.limit_ns)}: they waited "
        f"{_ms(queued_ns)} of {_ms(ttft_ns)} in the server's queue"
    )
    return _queue(queued_ns / ttft_ns, text)


def _by_page(missed: MissedTtft) -> Cause | None:
    """Return the queue by the metrics pages of the servers."""
    ttft_ns = float(missed.ttft_ns.mean())
    waiting_ns = mean_queue_time_ns(missed.samples)
    text = f"requests waited {_ms(waiting_ns or 0)} in the queue according to the metrics page"
    if waiting_ns is None:
        span_s = float(missed.requests["first_token_ns"].max() - missed.requests["due_ns"][0]) / 1e9
        waiting_ns = _waiting_by_littles_law(missed.samples, len(missed.ttft_ns), span_s)
        if waiting_ns is None:
            return None
        text = (
            f"requests waited about {_ms(waiting_ns)} in the queue according to the number of "
            "waiting requests on the metrics page"
        )
    if waiting_ns < MOST_OF_TTFT * ttft_ns:
        return None
    return _queue(waiting_ns / ttft_ns, f"{text}, of a mean TTFT of {_ms(ttft_ns)}")


def mean_queue_time_ns(samples: Sequence[MetricSample]) -> float | None:
    """Return the mean time in the queue that the servers counted during the run, or None."""
    first: dict[tuple[str, str, str], float] = {}
    last: dict[tuple[str, str, str], float] = {}
    for sample in sorted(samples, key=lambda sample: sample.t_s):
        if sample.name.endswith((f"{QUEUE_TIME}_sum", f"{QUEUE_TIME}_count")):
            key = (sample.name.rpartition("_")[2], sample.page, sample.labels)
            first.setdefault(key, sample.value)
            last[key] = sample.value
    growth: dict[str, float] = defaultdict(float)
    for (kind, *_), value in last.items():
        growth[kind] += value
    for (kind, *_), value in first.items():
        growth[kind] -= value
    return growth["sum"] / growth["count"] * 1e9 if growth["count"] > 0 else None


def _waiting_by_littles_law(
    samples: Sequence[MetricSample], requests: int, span_s: float
) -> float | None:
    """Return the mean wait: the mean number of waiting requests divided by the request rate."""
    waiting = series.compute_curves(samples).get(series.WAITING)
    if waiting is None or span_s <= 0:
        return None
    during = [
        value
        for time_s, value in zip(waiting.t_s, waiting.values, strict=True)
        if 0 <= time_s <= span_s
    ]
    if not during:
        return None
    return sum(during) / len(during) / (requests / span_s) * 1e9


def _by_growth(missed: MissedTtft) -> Cause | None:
    """Return a queue as a possible cause if TTFT grew during the load."""
    third = len(missed.ttft_ns) // 3
    first_ns = float(np.median(missed.ttft_ns[:third]))
    last_ns = float(np.median(missed.ttft_ns[-third:]))
    due_ns = missed.requests["due_ns"]
    if due_ns[0] == due_ns[-1] or last_ns < GROWTH_FACTOR * first_ns:
        return None
    text = (
        "requests probably waited in the server's queue: the median TTFT grew from "
        f"{_ms(first_ns)} (first third) to {_ms(last_ns)} (last third)"
    )
    return _queue(1.0, text, sure="possible")


def _queue(share: float, text: str, sure: str = "likely") -> Cause:
    advice = "lower the load or add replicas"
    return Cause(code="queue", share=min(share, 1.0), sure=sure, evidence=f"{text}; {advice}")


def _ms(value_ns: float) -> str:
    return f"{value_ns / 1e6:,.0f} ms"


def order_by_scheduled_time(requests: JoinedColumns) -> NDArray[np.int64]:
    """Return the indexes of the requests with a TTFT, ordered by scheduled time."""
    due_ns = requests["due_ns"]
    has_ttft = np.flatnonzero(requests.measure("ttft") != UNDEFINED)
    ordered: NDArray[np.int64] = has_ttft[np.argsort(due_ns[has_ttft], kind="stable")]
    return ordered
