"""The time windows over which other tools compute their durations and rates.

The definitions and their sources are in docs/reference/exports.md. All windows are those of
measured requests, because the other tools do not count their warm-up requests either.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.columns import Columns
from loadgen.core.metrics.windows import Span, make_span

NS_PER_S = 1_000_000_000


def span_of_sent_requests(columns: Columns) -> Span:
    """Return the time from the first request sent to the end of the last one, failed or not."""
    was_sent = columns["sent_ns"] >= 0
    return _span_between(columns["sent_ns"][was_sent], columns["done_ns"][was_sent])


def span_of_successful_requests(columns: Columns, is_successful: NDArray[np.bool_]) -> Span:
    """Return the time from the first successful request to the end of the last one."""
    return _span_between(columns["sent_ns"][is_successful], columns["end_ns"][is_successful])


def mean_concurrency(
    columns: Columns, is_successful: NDArray[np.bool_], window: Span
) -> float | None:
    """Return the mean number of successful requests in flight in a window that has them all."""
    if window.duration_s is None:
        return None
    starts_ns = columns["sent_ns"][is_successful]
    ends_ns = columns["end_ns"][is_successful]
    return float((ends_ns - starts_ns).sum(dtype=np.int64)) / NS_PER_S / window.duration_s


def max_concurrency(columns: Columns, is_successful: NDArray[np.bool_]) -> int:
    """Return the largest number of successful requests in flight at once."""
    starts_ns = np.sort(columns["sent_ns"][is_successful])
    ends_ns = np.sort(columns["end_ns"][is_successful])
    ended_before = np.searchsorted(ends_ns, starts_ns, side="right")
    in_flight = np.arange(1, len(starts_ns) + 1) - ended_before
    return int(in_flight.max(initial=0))


def max_requests_per_whole_second(columns: Columns, is_successful: NDArray[np.bool_]) -> int:
    """Return the largest number of successful requests that any second of the run has seen.

    Seconds are counted from the first request sent, and a request counts in each second in which
    it was in flight at some time. For example, a request from 0.2 s to 1.1 s counts in the seconds
    0 and 1. vLLM reports this number as `max_concurrent_requests`, although it can be larger than
    the number in flight at once: two requests of 0.1 s in the same second both count.
    """
    starts_ns = columns["sent_ns"][is_successful]
    ends_ns = columns["end_ns"][is_successful]
    if len(starts_ns) == 0:
        return 0

    first_start_ns = starts_ns.min()
    first_seconds = (starts_ns - first_start_ns) // NS_PER_S
    last_seconds = (ends_ns - first_start_ns) // NS_PER_S

    # A request does not count any more in the second after its last one.
    leaving_seconds = last_seconds + 1
    second_count = int(leaving_seconds.max()) + 1
    joining_counts = np.bincount(first_seconds, minlength=second_count)
    leaving_counts = np.bincount(leaving_seconds, minlength=second_count)

    # The requests of a second are those that have joined so far minus those that have left.
    requests_per_second = np.cumsum(joining_counts) - np.cumsum(leaving_counts)
    return int(requests_per_second.max())


def _span_between(starts_ns: NDArray[np.int64], ends_ns: NDArray[np.int64]) -> Span:
    """Return the time from the first start to the last end; an empty span if there is none."""
    if len(starts_ns) == 0:
        return Span()
    return make_span(int(starts_ns.min()), int(ends_ns.max()))
