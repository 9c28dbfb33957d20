"""Whether a queue at the server explains a TTFT objective that a run missed. Pure.

The detectors of `causes` compare slow requests with fast ones, which needs hundreds of requests. A
queue that makes up most of a missed TTFT shows in a few dozen: in the server's own timing of each
request, in its metrics page, or in a TTFT that grows while the load goes on.
"""

from __future__ import annotations

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
    """Return the queue as the cause of a missed TTFT, with the evidence, or None.

    The evidence is the first of three that shows a queue: the server's own timing of each request,
    the metrics pages of the servers, and a TTFT that grew. If the client caused most of the TTFT,
    it is not the queue.
    """
    is_over = missed.exceeds_limit
    mean_ttft_ns = float(missed.ttft_ns[is_over].mean())
    if float(missed.send_delay_ns[is_over].mean()) >= MOST_OF_TTFT * mean_ttft_ns:
        return None
    return (
        _find_by_server_timing(missed, mean_ttft_ns)
        or _find_by_metrics_page(missed)
        or _find_by_growth(missed)
    )


def _find_by_server_timing(missed: MissedTtft, mean_ttft_ns: float) -> Cause | None:
    """Return the queue as a cause if the server reports that requests waited in it.

    Args:
        missed: The requests.
        mean_ttft_ns: The mean TTFT of those that exceed the limit.
    """
    queued = missed.requests["server_queue_ns"][missed.exceeds_limit]
    if int(queued.min()) < 0:
        return None
    mean_queued_ns = float(queued.mean())
    if mean_queued_ns < MOST_OF_TTFT * mean_ttft_ns:
        return None
    text = (
        f"{len(queued):,} requests exceeded the TTFT limit of {_ms(missed.limit_ns)}: they waited "
        f"{_ms(mean_queued_ns)} of {_ms(mean_ttft_ns)} in the server's queue"
    )
    return _queue(mean_queued_ns / mean_ttft_ns, text)


def _find_by_metrics_page(missed: MissedTtft) -> Cause | None:
    """Return the queue as a cause if the metrics pages of the servers show it.

    Some pages count the time that requests spent in the queue. Others only show how many requests
    wait, from which the mean wait follows by Little's law.
    """
    mean_ttft_ns = float(missed.ttft_ns.mean())
    waiting_ns = mean_queue_time_ns(missed.samples)
    if waiting_ns is not None:
        text = f"requests waited {_ms(waiting_ns)} in the queue according to the metrics page"
    else:
        requests = missed.requests
        span_s = float(requests["first_token_ns"].max() - requests["due_ns"][0]) / 1e9
        waiting_ns = _waiting_by_littles_law(missed.samples, len(missed.ttft_ns), span_s)
        if waiting_ns is None:
            return None
        text = (
            f"requests waited about {_ms(waiting_ns)} in the queue according to the number of "
            "waiting requests on the metrics page"
        )
    if waiting_ns < MOST_OF_TTFT * mean_ttft_ns:
        return None
    return _queue(waiting_ns / mean_ttft_ns, f"{text}, of a mean TTFT of {_ms(mean_ttft_ns)}")


def mean_queue_time_ns(samples: Sequence[MetricSample]) -> float | None:
    """Return the mean time in the queue that the servers counted during the run, or None.

    A histogram of Prometheus has two counters, the sum of all times and their number. The mean of
    the run is the growth of the sums of all servers divided by the growth of the numbers.
    """
    growth = {"sum": 0.0, "count": 0.0}
    first_values: dict[tuple[str, str, str], float] = {}
    last_values: dict[tuple[str, str, str], float] = {}
    for sample in sorted(samples, key=lambda sample: sample.t_s):
        histogram, _, counter = sample.name.rpartition("_")
        if histogram.endswith(QUEUE_TIME) and counter in growth:
            key = (counter, sample.page, sample.labels)
            first_values.setdefault(key, sample.value)
            last_values[key] = sample.value
    for (counter, _, _), value in last_values.items():
        growth[counter] += value
    for (counter, _, _), value in first_values.items():
        growth[counter] -= value
    return growth["sum"] / growth["count"] * 1e9 if growth["count"] > 0 else None


def _waiting_by_littles_law(
    samples: Sequence[MetricSample], requests: int, span_s: float
) -> float | None:
    """Return the mean wait in ns by Little's law, or None if no page shows waiting requests.

    It is the mean number of waiting requests divided by the rate of requests.

    Args:
        samples: The samples of the servers' metrics pages.
        requests: The number of requests of the run.
        span_s: The time from the first scheduled request to the last first token.
    """
    waiting = series.compute_curves(samples).get(series.WAITING)
    if waiting is None or span_s <= 0:
        return None
    waiting_during_load = [
        value
        for time_s, value in zip(waiting.t_s, waiting.values, strict=True)
        if 0 <= time_s <= span_s
    ]
    if not waiting_during_load:
        return None
    mean_waiting = sum(waiting_during_load) / len(waiting_during_load)
    return mean_waiting / (requests / span_s) * 1e9


def _find_by_growth(missed: MissedTtft) -> Cause | None:
    """Return a queue as a possible cause if the median TTFT grew during the load."""
    third = len(missed.ttft_ns) // 3
    first_ns = float(np.median(missed.ttft_ns[:third]))
    last_ns = float(np.median(missed.ttft_ns[-third:]))
    due_ns = missed.requests["due_ns"]
    are_due_at_once = due_ns[0] == due_ns[-1]
    if are_due_at_once or last_ns < GROWTH_FACTOR * first_ns:
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
