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

MIN_REQUESTS_FOR_QUEUE = 20
"""Fewer requests do not show a queue."""
MOST_OF_TTFT = 0.5
"""The share of the TTFT that waiting in the queue has to explain."""
GROWTH_FACTOR = 1.5
"""The factor by which the median TTFT grows from the first third of the load to the last one."""
QUEUE_TIME = "queue_time_seconds"
"""The end of the names of the histograms in which vLLM and TensorRT-LLM count queueing time."""


class _CounterKey(NamedTuple):
    """What tells counters of the same name apart: the metrics page and the labels."""

    page: str
    labels: str


class _QueueWait(NamedTuple):
    """The mean time that requests waited in a queue, and the sentence that says so."""

    wait_ns: float
    text: str


class MissedTtft(NamedTuple):
    """A run that missed a TTFT objective, with all its requests in order of scheduled time.

    Attributes:
        requests: The requests with a TTFT.
        ttft_ns: The TTFT of each request.
        send_delay_ns: How late the client sent each request.
        limit_ns: The TTFT limit of the objective, which too many requests exceed.
        samples: The samples of the servers' metrics pages.
    """

    requests: JoinedColumns
    ttft_ns: NDArray[np.int64]
    send_delay_ns: NDArray[np.int64]
    limit_ns: int
    samples: Sequence[MetricSample]

    @property
    def exceeds_limit(self) -> NDArray[np.bool_]:
        """Return which requests exceed the limit."""
        return self.ttft_ns > self.limit_ns


def missed_ttft_limit(ttft_ns: NDArray[np.int64], slo: Slo | None) -> int | None:
    """Return the lowest TTFT limit of the SLO that too many requests exceed, in ns, or None.

    A term such as "p99 <= 500 ms" is missed if more than 1 % of the requests exceed 500 ms.
    """
    if slo is None:
        return None

    missed_limits_ns = []
    for term in slo.terms:
        if term.metric != "ttft":
            continue

        share_over_limit = float((ttft_ns > term.limit_ns).mean())
        allowed_share = 1 - term.quantile
        if share_over_limit > allowed_share:
            missed_limits_ns.append(term.limit_ns)

    return min(missed_limits_ns, default=None)


def find_queue_cause(missed: MissedTtft) -> Cause | None:
    """Return a queue at the server as the cause of a missed TTFT limit, or None.

    The evidence is, in this order, the server's timing of each request, the metrics pages of the
    servers, or a TTFT that grew.
    """
    # The client is the cause if it sent the slow requests late.
    exceeds_limit = missed.exceeds_limit
    mean_ttft_ns = float(missed.ttft_ns[exceeds_limit].mean())
    mean_send_delay_ns = float(missed.send_delay_ns[exceeds_limit].mean())
    if mean_send_delay_ns >= MOST_OF_TTFT * mean_ttft_ns:
        return None

    return (
        _queue_by_server_timing(missed, mean_ttft_ns)
        or _queue_by_metrics_page(missed)
        or _queue_by_ttft_growth(missed)
    )


def _queue_by_server_timing(missed: MissedTtft, mean_ttft_ns: float) -> Cause | None:
    """Return the queue as a cause if the server's own timing shows that it was most of TTFT.

    Only the requests that exceed the limit count. Return None if the server did not report for each
    of them how long it was queued, or if that was less than MOST_OF_TTFT.

    Args:
        missed: All requests of the run, with the TTFT limit that it missed.
        mean_ttft_ns: The mean TTFT of the requests that exceed the limit.
    """
    # The time that each of these requests was queued, negative if it is not reported.
    queued_ns = missed.requests["server_queue_ns"][missed.exceeds_limit]
    is_reported = queued_ns >= 0
    if not is_reported.all():
        return None

    mean_queue_ns = float(queued_ns.mean())
    if mean_queue_ns < MOST_OF_TTFT * mean_ttft_ns:
        return None

    text = (
        f"{len(queued_ns):,} requests exceeded the TTFT limit of {_format_ms(missed.limit_ns)}: "
        f"they waited {_format_ms(mean_queue_ns)} of {_format_ms(mean_ttft_ns)} in the server's "
        "queue"
    )
    return _queue_cause(mean_queue_ns / mean_ttft_ns, text)


def _queue_by_metrics_page(missed: MissedTtft) -> Cause | None:
    """Return the queue as a cause if the servers' metrics pages show that it was most of TTFT."""
    wait = _counted_wait(missed) or _wait_by_littles_law(missed)
    mean_ttft_ns = float(missed.ttft_ns.mean())
    if wait is None or wait.wait_ns < MOST_OF_TTFT * mean_ttft_ns:
        return None

    text = f"{wait.text}, of a mean TTFT of {_format_ms(mean_ttft_ns)}"
    return _queue_cause(wait.wait_ns / mean_ttft_ns, text)


def _counted_wait(missed: MissedTtft) -> _QueueWait | None:
    """Return the mean time in the queue that the metrics pages count, or None if not counted."""
    wait_ns = mean_queue_time_ns(missed.samples)
    if wait_ns is None:
        return None

    duration = _format_ms(wait_ns)
    text = f"requests waited {duration} in the queue according to the metrics page"
    return _QueueWait(wait_ns, text)


def _wait_by_littles_law(missed: MissedTtft) -> _QueueWait | None:
    """Return the mean time in the queue by Little's law.

    By this law, the mean wait is the mean number of waiting requests divided by the rate of
    requests: if 6 requests wait on average, and 2 requests come per second, each waits 3 s. The
    result is None if no metrics page shows the number of waiting requests.
    """
    # Requests come and wait from the first scheduled time to the last first token.
    first_due_ns = missed.requests["due_ns"][0]
    last_first_token_ns = missed.requests["first_token_ns"].max()
    load_s = float(last_first_token_ns - first_due_ns) / 1e9
    mean_waiting = _mean_waiting_requests(missed.samples, load_s)
    if mean_waiting is None:
        return None

    requests_per_s = len(missed.ttft_ns) / load_s
    wait_ns = mean_waiting / requests_per_s * 1e9
    text = (
        f"requests waited about {_format_ms(wait_ns)} in the queue according to the number "
        "of waiting requests on the metrics page"
    )

    return _QueueWait(wait_ns, text)


def mean_queue_time_ns(samples: Sequence[MetricSample]) -> float | None:
    """Return the mean time in the queue that the servers counted during the run, or None.

    A Prometheus histogram, such as `vllm:request_queue_time_seconds`, has a counter of the sum of
    all times (`_sum`) and a counter of the number of times (`_count`).
    """
    growth_of_sums_s = _growth_of_counters(samples, f"{QUEUE_TIME}_sum")
    growth_of_counts = _growth_of_counters(samples, f"{QUEUE_TIME}_count")
    if growth_of_counts <= 0:
        return None
    return growth_of_sums_s / growth_of_counts * 1e9


def _growth_of_counters(samples: Sequence[MetricSample], name_suffix: str) -> float:
    """Return the total growth of all counters whose names end with a suffix.

    Servers put different prefixes before the same name, such as `vllm:`. The growth of a counter is
    its last value minus its first value.

    Args:
        samples: The values of the metrics pages of servers, each read at one time.
        name_suffix: The end of the names of the counters, such as "queue_time_seconds_sum".
    """
    # A page has one counter of this name for each set of labels.
    first_values: dict[_CounterKey, float] = {}
    last_values: dict[_CounterKey, float] = {}
    for sample in sorted(samples, key=lambda sample: sample.t_s):
        if not sample.name.endswith(name_suffix):
            continue

        key = _CounterKey(sample.page, sample.labels)
        first_values.setdefault(key, sample.value)
        last_values[key] = sample.value

    growths = [last_values[key] - first_values[key] for key in first_values]
    return sum(growths)


def _mean_waiting_requests(samples: Sequence[MetricSample], load_s: float) -> float | None:
    """Return the mean number of requests that waited in the servers' queues, or None if unknown.

    Args:
        samples: The samples of the servers' metrics pages.
        load_s: The length of the load, which begins with the run. Only values from then count.
    """
    waiting = series.compute_curves(samples).get(series.WAITING)
    if waiting is None or load_s <= 0:
        return None

    waiting_during_load = [
        value
        for time_s, value in zip(waiting.t_s, waiting.values, strict=True)
        if 0 <= time_s <= load_s
    ]
    if not waiting_during_load:
        return None

    return sum(waiting_during_load) / len(waiting_during_load)


def _queue_by_ttft_growth(missed: MissedTtft) -> Cause | None:
    """Return a queue as a possible cause if the median TTFT grew during the load, else None."""
    due_ns = missed.requests["due_ns"]
    are_due_at_once = due_ns[0] == due_ns[-1]
    if are_due_at_once:
        return None  # there is no time in which TTFT could grow

    third = len(missed.ttft_ns) // 3
    first_median_ns = float(np.median(missed.ttft_ns[:third]))
    last_median_ns = float(np.median(missed.ttft_ns[-third:]))
    if last_median_ns < GROWTH_FACTOR * first_median_ns:
        return None

    text = (
        "requests probably waited in the server's queue: the median TTFT grew from "
        f"{_format_ms(first_median_ns)} (first third) to "
        f"{_format_ms(last_median_ns)} (last third)"
    )

    # How much of TTFT was waiting is not known, so all of it counts.
    return _queue_cause(1.0, text, sure="possible")


def _queue_cause(share: float, observation: str, sure: str = "likely") -> Cause:
    """Return a queue at the server as the cause of slow requests, with advice.

    Args:
        share: The share of TTFT that the queue explains. A share above 1 becomes 1.
        observation: What shows the queue, as the start of a sentence.
        sure: How certain the cause is: "likely" or "possible".
    """
    evidence = f"{observation}; lower the load or add replicas"
    return Cause(code="queue", share=min(share, 1.0), sure=sure, evidence=evidence)


def _format_ms(value_ns: float) -> str:
    """Return a duration in whole milliseconds, such as "1,250 ms"."""
    return f"{value_ns / 1e6:,.0f} ms"


def order_by_due_time(requests: JoinedColumns) -> NDArray[np.int64]:
    """Return the indexes of the requests with a TTFT, ordered by scheduled time."""
    due_ns = requests["due_ns"]
    has_ttft = np.flatnonzero(requests.measure("ttft") != UNDEFINED)
    ordered: NDArray[np.int64] = has_ttft[np.argsort(due_ns[has_ttft], kind="stable")]
    return ordered
