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

FEWEST = 20
"""From so many requests on a queue is named."""
MOST_OF_IT = 0.5
"""Share of the TTFT that waiting has to make up."""
GROWTH = 1.5
"""Factor by which the median TTFT grows from the first third of the load to the last one."""
QUEUE_TIME = "queue_time_seconds"
"""How the names of the histograms end in which vLLM and TensorRT-LLM count the time in the queue."""


class MissedTtft(NamedTuple):
    """The requests of a run that missed a TTFT objective, in the order in which they were due."""

    requests: JoinedColumns
    ttft: NDArray[np.int64]
    late: NDArray[np.int64]
    """How late the client sent each request, in ns."""
    limit_ns: int
    samples: Sequence[MetricSample]

    @property
    def is_over(self) -> NDArray[np.bool_]:
        """Which requests exceed the limit."""
        return self.ttft > self.limit_ns


def missed_ttft_limit(ttft: NDArray[np.int64], slo: Slo | None) -> int | None:
    """Return the tightest TTFT limit of the SLO that too many requests exceed, in ns, or None."""
    missed = [
        term.limit_ns
        for term in (slo.terms if slo is not None else ())
        if term.metric == "ttft" and float((ttft > term.limit_ns).mean()) > 1 - term.quantile
    ]
    return min(missed, default=None)


def find_queue(missed: MissedTtft) -> Cause | None:
    """Return the queue as the cause of a missed TTFT, with the evidence, or None."""
    ttft_ns = float(missed.ttft[missed.is_over].mean())
    if float(missed.late[missed.is_over].mean()) >= MOST_OF_IT * ttft_ns:
        return None
    return _by_timing(missed, ttft_ns) or _by_page(missed) or _by_growth(missed)


def _by_timing(missed: MissedTtft, ttft_ns: float) -> Cause | None:
    """Return the queue by the server's own timing of each request."""
    queued = missed.requests["server_queue_ns"][missed.is_over]
    if int(queued.min()) < 0:
        return None
    queued_ns = float(queued.mean())
    if queued_ns < MOST_OF_IT * ttft_ns:
        return None
    text = (
        f"{len(queued):,} requests exceeded the TTFT limit of {_ms(missed.limit_ns)}. They waited "
        f"{_ms(queued_ns)} of {_ms(ttft_ns)} in the server's queue"
    )
    return _queue(queued_ns / ttft_ns, text)


def _by_page(missed: MissedTtft) -> Cause | None:
    """Return the queue by the metrics pages of the servers."""
    ttft_ns = float(missed.ttft.mean())
    waiting_ns = mean_queue_time_ns(missed.samples)
    text = f"by its metrics page a request waited {_ms(waiting_ns or 0)} in the server's queue"
    if waiting_ns is None:
        span_s = float(missed.requests["first_token_ns"].max() - missed.requests["due_ns"][0]) / 1e9
        waiting_ns = _waiting_by_littles_law(missed.samples, len(missed.ttft), span_s)
        if waiting_ns is None:
            return None
        text = (
            "by the number of waiting requests on its metrics page a request waited about "
            f"{_ms(waiting_ns)} in the server's queue"
        )
    if waiting_ns < MOST_OF_IT * ttft_ns:
        return None
    return _queue(waiting_ns / ttft_ns, f"{text}; the mean TTFT was {_ms(ttft_ns)}")


def mean_queue_time_ns(samples: Sequence[MetricSample]) -> float | None:
    """Return the mean time in the queue that the servers counted during the run, or None."""
    first: dict[tuple[str, str, str], float] = {}
    last: dict[tuple[str, str, str], float] = {}
    for sample in sorted(samples, key=lambda one: one.t_s):
        if sample.name.endswith((f"{QUEUE_TIME}_sum", f"{QUEUE_TIME}_count")):
            key = (sample.name.rpartition("_")[2], sample.page, sample.labels)
            first.setdefault(key, sample.value)
            last[key] = sample.value
    grown: dict[str, float] = defaultdict(float)
    for (kind, *_), value in last.items():
        grown[kind] += value
    for (kind, *_), value in first.items():
        grown[kind] -= value
    return grown["sum"] / grown["count"] * 1e9 if grown["count"] > 0 else None


def _waiting_by_littles_law(
    samples: Sequence[MetricSample], requests: int, span_s: float
) -> float | None:
    """Return the mean wait, in ns: the mean number of waiting requests over the rate of requests."""
    waiting = series.curves(samples).get(series.WAITING)
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
    """Return a queue as possible where TTFT grew while the load went on."""
    third = len(missed.ttft) // 3
    first_ns = float(np.median(missed.ttft[:third]))
    last_ns = float(np.median(missed.ttft[-third:]))
    due_ns = missed.requests["due_ns"]
    if due_ns[0] == due_ns[-1] or last_ns < GROWTH * first_ns:
        return None
    text = (
        "the requests waited in the server, probably in its queue: the median TTFT grew from "
        f"{_ms(first_ns)} in the first third of the load to {_ms(last_ns)} in the last"
    )
    return _queue(1.0, text, sure="possible")


def _queue(share: float, text: str, sure: str = "likely") -> Cause:
    advice = "the load is higher than the server can carry: lower it, or add replicas"
    return Cause(code="queue", share=min(share, 1.0), sure=sure, evidence=f"{text}; {advice}")


def _ms(value_ns: float) -> str:
    return f"{value_ns / 1e6:,.0f} ms"


def in_order_of_due(requests: JoinedColumns) -> NDArray[np.int64]:
    """Return the places of the requests with a TTFT, in the order in which they were due."""
    due_ns = requests["due_ns"]
    has_ttft = np.flatnonzero(requests.measure("ttft") != UNDEFINED)
    ordered: NDArray[np.int64] = has_ttft[np.argsort(due_ns[has_ttft], kind="stable")]
    return ordered
