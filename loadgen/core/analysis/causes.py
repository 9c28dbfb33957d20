"""Explain why the slow requests of a run were slow.

Pure. Slow requests are compared with fast ones, see `cause_detectors`. The first cause with a clear
trace is named, with its evidence. If no trace is clear, no cause is named.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadgen.core.analysis import queue_evidence
from loadgen.core.analysis.cause_detectors import (
    DETECTORS,
    DETECTORS_OF_ALL,
    MIN_REQUESTS,
    MIN_SLOW_REQUESTS,
    MOST_OF_EXCESS,
    TPOT_DETECTORS,
    Case,
    Ints,
    Mask,
    RunSources,
    client_cause,
)
from loadgen.core.metrics.columns import UNDEFINED, Columns, JoinedColumns, order_by_time
from loadgen.core.metrics.replica_keys import replica_keys
from loadgen.core.metrics.request_metrics import earliest_send_ns
from loadgen.core.metrics.sections import Cause, Explanation
from loadgen.core.server_metrics import series

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from loadgen.core.results.manifest import RunManifest
    from loadgen.core.server_metrics.series import MetricSample

MAX_REQUESTS = 200_000
"""The largest number of requests that are examined. Of more, every second or third one is, and so
on."""
FAST_QUANTILE = 0.2
"""The quantile of TTFT that stands for a request without any delay."""
SLOW_FACTOR = 3.0
"""A request is slow if its TTFT exceeds that of FAST_QUANTILE by this factor."""
MIN_CLIENT_SHARE = 0.05
"""The share of the mean TTFT from which on the client's send delay is named beside other causes."""
_CODES_ABOUT_ALL = ("held_back", "power", "batch")
"""The causes whose evidence is about all requests instead of the slow ones."""


class _Speed(NamedTuple):
    """Which requests are slow, and which are fast. Some are neither.

    `is_comparable` says whether enough of them are slow, and any fast, to compare both.
    """

    is_slow: Mask
    is_fast: Mask
    is_comparable: bool

    def excess_of_slow(self, values: Ints) -> float:
        """Return by how much the mean of the slow requests is larger than that of the fast ones."""
        return float(values[self.is_slow].mean() - values[self.is_fast].mean())


class _ExaminedRequests(NamedTuple):
    """The ok requests with a TTFT that are examined, ordered by scheduled time.

    Of a long run they are only every `stride`-th request: the first, the third, the fifth and so on
    for a stride of 2.
    """

    requests: JoinedColumns
    stride: int


def explain(
    measured_stages: Sequence[Columns],
    manifest: RunManifest,
    samples: Sequence[MetricSample] = (),
    withheld_metrics: Collection[str] = (),
) -> Explanation:
    """Return the causes of the slow requests of a run.

    Args:
        measured_stages: The records of each measured stage.
        manifest: The manifest of the run.
        samples: The samples of the servers' metrics pages.
        withheld_metrics: Metrics whose values cannot be trusted, so that they are not used.
    """
    examined = _select_examined_requests(measured_stages)
    if examined is None:  # too few requests to compare slow ones with fast ones
        return _explain_short_run(measured_stages, manifest, samples)

    send_delay_ns = _measure_send_delay(examined.requests)
    case = _build_case(examined, send_delay_ns, manifest, samples)
    causes = _detect_causes(case, withheld_metrics)
    return _explain_by_causes(case, causes, send_delay_ns)


def _select_examined_requests(measured_stages: Sequence[Columns]) -> _ExaminedRequests | None:
    """Return the requests to examine, or None if there are fewer than MIN_REQUESTS."""
    # There may be millions of requests, so their columns do not stay in memory.
    all_requests = JoinedColumns(measured_stages, only_ok=True, keeps_columns=False)
    has_ttft = all_requests.measure("ttft") != UNDEFINED
    request_count = int(np.count_nonzero(has_ttft))
    if request_count < MIN_REQUESTS:
        return None

    # To save time, only every n-th request is examined, where n is the stride.
    stride = _choose_stride(request_count)
    order = _order_by_due_time_and_slot(all_requests, has_ttft)
    examined_order = order[::stride]

    examined_requests = JoinedColumns(measured_stages, only_ok=True, order=examined_order)
    return _ExaminedRequests(examined_requests, stride)


def _order_by_due_time_and_slot(requests: JoinedColumns, has_ttft: Mask) -> Ints:
    """Return the indexes of the requests with a TTFT, ordered by scheduled time.

    Requests with the same scheduled time are ordered by their position in the schedule.
    """
    due_ns = requests["due_ns"]
    slot = requests["slot"]
    if has_ttft.all():
        return order_by_time(due_ns, slot)
    indexes = np.flatnonzero(has_ttft)
    order: Ints = indexes[order_by_time(due_ns[has_ttft], slot[has_ttft])]
    return order


def _build_case(
    examined: _ExaminedRequests,
    send_delay_ns: Ints,
    manifest: RunManifest,
    samples: Sequence[MetricSample],
) -> Case:
    """Return the examined requests, with what the detectors of causes need to know about them.

    The detectors look for causes at the server. So the delay with which the client sent a request
    is subtracted from the TTFT of that request.

    Args:
        examined: The requests that are examined.
        send_delay_ns: How late the client itself sent each request.
        manifest: The manifest of the run.
        samples: The samples of the servers' metrics pages.
    """
    requests = examined.requests
    server_ttft_ns = requests.measure("ttft") - send_delay_ns
    speed = _classify_speed(server_ttft_ns, send_delay_ns)

    excess_shares = _explain_excess_by_parts(requests, server_ttft_ns, send_delay_ns, speed)

    # Times since the first request, relative to the time of the last request.
    time_since_first_ns = requests["due_ns"] - requests["due_ns"][0]
    span_ns = max(int(time_since_first_ns[-1]), 1)  # not 0, because it is a divisor
    relative_time = time_since_first_ns / span_ns

    target_and_replica_keys = replica_keys(requests).astype(np.int64)
    run = RunSources(manifest, samples, series.compute_curves(samples))
    return Case(
        requests=requests,
        stride=examined.stride,
        ttft_ns=server_ttft_ns,
        is_slow=speed.is_slow,
        is_fast=speed.is_fast,
        excess_shares=excess_shares,
        relative_time=relative_time,
        span_s=span_ns / 1e9,
        replica_keys=target_and_replica_keys,
        run=run,
    )


def _detect_causes(case: Case, withheld_metrics: Collection[str]) -> list[Cause]:
    """Return the causes that the detectors find, the most specific first.

    If too few requests are slow, only the detectors that need no comparison with fast requests are
    used. If TPOT is withheld, the detectors that need TPOT are left out.
    """
    detectors = DETECTORS if case.is_explainable else DETECTORS_OF_ALL
    if "tpot" in withheld_metrics:
        detectors = tuple(detect for detect in detectors if detect not in TPOT_DETECTORS)

    causes = [detect(case) for detect in detectors]
    return [cause for cause in causes if cause is not None]


def _explain_by_causes(case: Case, server_causes: list[Cause], send_delay_ns: Ints) -> Explanation:
    """Return the explanation of the slow requests of a run.

    The main cause is the first that applies:

    1. The client, which is the load generator itself, if it sent the slow requests late.
    2. The first cause at the server. The client may be a minor cause.
    3. A queue at the server, if too many requests missed the TTFT limit of the SLO.

    Args:
        case: The requests.
        server_causes: The causes at the server, the most specific first.
        send_delay_ns: How late the client sent each request.
    """
    ttft_with_send_delay_ns = case.requests.measure("ttft")
    speed = _classify_speed(ttft_with_send_delay_ns)
    slow_count = int(speed.is_slow.sum())

    client = _client_as_main_cause(ttft_with_send_delay_ns, send_delay_ns, speed)
    if client is not None:
        subject = _describe_slow(slow_count, len(ttft_with_send_delay_ns))
        return _compose_explanation([client, *server_causes], slow_count, subject)

    if server_causes:
        main_cause = server_causes[0]
        minor_causes = _client_as_minor_cause(ttft_with_send_delay_ns, send_delay_ns)
        subject = _subject_of_evidence(main_cause, case)
        return _compose_explanation([*server_causes, *minor_causes], slow_count, subject)

    queue = _find_queue(case.requests, send_delay_ns, case.run.manifest, case.run.samples)
    queue_causes = [] if queue is None else [queue]
    return _compose_explanation(queue_causes, slow_count)


def _compose_explanation(
    causes: Sequence[Cause], slow_count: int, subject: str = ""
) -> Explanation:
    """Return the causes of slow requests, with a paragraph that explains them."""
    text = _compose_text(causes, subject)
    return Explanation(text=text, slow=slow_count, causes=tuple(causes))


def _client_as_main_cause(ttft_ns: Ints, send_delay_ns: Ints, speed: _Speed) -> Cause | None:
    """Return the client as a cause if its send delay explains most of the excess TTFT, else None.

    The excess TTFT is the mean TTFT of the slow requests minus that of the fast ones.
    """
    if not speed.is_comparable:
        return None

    # How much larger the mean of the slow requests is than the mean of the fast ones.
    excess_delay_ns = speed.excess_of_slow(send_delay_ns)
    excess_ttft_ns = speed.excess_of_slow(ttft_ns)

    explained_share = excess_delay_ns / excess_ttft_ns
    if explained_share < MOST_OF_EXCESS:
        return None

    evidence = (
        f"the client sent them late, which explains {explained_share:.0%} of their excess TTFT"
    )
    return client_cause(explained_share, evidence)


def _client_as_minor_cause(ttft_ns: Ints, send_delay_ns: Ints) -> list[Cause]:
    """Return the client as a possible cause, or an empty list if its send delay is short.

    A delay is short if its share of the mean TTFT is below MIN_CLIENT_SHARE.
    """
    share = float(send_delay_ns.mean() / ttft_ns.mean())
    if share < MIN_CLIENT_SHARE:
        return []

    evidence = f"the client sent requests late, which explains {share:.0%} of the mean TTFT"
    return [client_cause(share, evidence, "possible")]


def _subject_of_evidence(cause: Cause, case: Case) -> str:
    """Return the beginning of the sentence about a cause, which says how many requests were slow.

    A cause that concerns all requests has no such beginning: "".
    """
    is_about_slow = case.is_explainable and cause.code not in _CODES_ABOUT_ALL
    if not is_about_slow:
        return ""

    slow_count = int(case.is_slow.sum())
    return _describe_slow(slow_count, len(case.is_slow))


def _describe_slow(slow_count: int, request_count: int) -> str:
    """Return the beginning of a sentence that says how many requests were slow.

    An example is "120 of 5,000 requests exceeded 3x the TTFT of fast requests: ".
    """
    return (
        f"{slow_count:,} of {request_count:,} requests exceeded {SLOW_FACTOR:g}x the TTFT of fast "
        "requests: "
    )


def _compose_text(causes: Sequence[Cause], subject: str = "") -> str:
    """Return the paragraph that explains slow requests, "" without any cause.

    Args:
        causes: The causes, the main one first.
        subject: The beginning of the sentence about the main cause, or "".
    """
    if not causes:
        return ""

    main_cause, *further_causes = causes
    text = f"{main_cause.sure.capitalize()}: {subject}{main_cause.evidence}."
    if further_causes:
        further_evidence = "; ".join(cause.evidence for cause in further_causes)
        text += f" Also: {further_evidence}."
    return text


def _explain_short_run(
    measured_stages: Sequence[Columns], manifest: RunManifest, samples: Sequence[MetricSample]
) -> Explanation:
    """Return the explanation of a run with too few requests to compare slow ones with fast ones.

    Only a queue at the server is examined as a cause, because it shows in few requests.

    Args:
        measured_stages: The records of each measured stage.
        manifest: The manifest of the run.
        samples: The samples of the servers' metrics pages.
    """
    requests = _order_requests_with_ttft(measured_stages)
    request_count = len(requests["due_ns"])
    if not request_count:
        return Explanation()

    queue = None
    if request_count >= queue_evidence.MIN_REQUESTS_FOR_QUEUE:
        send_delay_ns = _measure_send_delay(requests)
        queue = _find_queue(requests, send_delay_ns, manifest, samples)

    return _compose_short_explanation(queue, request_count)


def _order_requests_with_ttft(measured_stages: Sequence[Columns]) -> JoinedColumns:
    """Return the ok requests with a TTFT, ordered by scheduled time."""
    ok_requests = JoinedColumns(measured_stages, only_ok=True, keeps_columns=False)
    order = queue_evidence.order_by_due_time(ok_requests)
    return JoinedColumns(measured_stages, only_ok=True, order=order)


def _compose_short_explanation(queue: Cause | None, request_count: int) -> Explanation:
    """Return the explanation of a run with few requests: a queue, or no cause."""
    reason = (
        f"{request_count:,} requests are too few to compare slow requests with fast "
        f"ones ({MIN_REQUESTS} needed)"
    )
    if queue is None:
        return Explanation(not_examined=reason)

    return Explanation(
        text=_compose_text([queue]),
        causes=(queue,),
        not_examined=f"other causes, since {reason}",
    )


def _find_queue(
    requests: JoinedColumns,
    send_delay_ns: Ints,
    manifest: RunManifest,
    samples: Sequence[MetricSample],
) -> Cause | None:
    """Return a queue at the server as the cause of a missed TTFT limit, or None.

    Args:
        requests: The requests with a TTFT, ordered by scheduled time.
        send_delay_ns: How late the client sent each request.
        manifest: The manifest of the run, with its SLO.
        samples: The samples of the servers' metrics pages.
    """
    ttft_ns = requests.measure("ttft")
    missed_limit_ns = queue_evidence.missed_ttft_limit(ttft_ns, manifest.slo)
    if missed_limit_ns is None:
        return None

    missed = queue_evidence.MissedTtft(requests, ttft_ns, send_delay_ns, missed_limit_ns, samples)
    return queue_evidence.find_queue_cause(missed)


def _measure_send_delay(requests: JoinedColumns) -> Ints:
    """Return by how much the client delayed the send of each request, in ns.

    The wait for a new connection is not a delay by the client, except for the time in which the
    operating system had stopped the client.

    Args:
        requests: The requests, ordered by scheduled time.
    """
    # A request could be sent when it was due, or when its new connection was open.
    could_send_ns = earliest_send_ns(requests)
    delay_when_ready_ns = requests["sent_ns"] - could_send_ns

    connect_wait_ns = could_send_ns - requests["due_ns"]
    stopped_while_connecting_ns = _measure_stop(requests, connect_wait_ns)

    delay_ns: Ints = delay_when_ready_ns + stopped_while_connecting_ns
    return delay_ns


def _measure_stop(requests: JoinedColumns, connect_wait_ns: Ints) -> Ints:
    """Return how long the client was stopped while each request waited for a new connection, in ns.

    The operating system may stop the client. That shows in requests on open connections, which
    should be sent when they are due. For example:

    - Request A is due at 1 s on an open connection, and sent at 5 s. So the client was stopped
      until 5 s.
    - Request B is due at 2 s, and its new connection is open at 6 s. So B waited from 2 s to 6 s,
      and the client was stopped from 2 s to 5 s of that time. The result for B is 3 s.

    Args:
        requests: The requests, ordered by scheduled time.
        connect_wait_ns: How long each request waited for a connection, 0 on an open one.
    """
    # The end of the stop is the latest send of an earlier request, A in the example, at 5 s.
    has_open_connection = requests["reused"] > 0
    sent_on_open_connection_ns = np.where(has_open_connection, requests["sent_ns"], 0)
    stopped_until_ns = np.maximum.accumulate(sent_on_open_connection_ns)

    # Request B is due at 2 s, so it was stopped for 5 - 2 = 3 s.
    stopped_since_due_ns = stopped_until_ns - requests["due_ns"]

    # The stop of B is not negative, and not longer than the wait of B, 4 s.
    stopped_during_wait_ns: Ints = np.clip(stopped_since_due_ns, 0, connect_wait_ns)
    return stopped_during_wait_ns


def _classify_speed(ttft_ns: Ints, send_delay_ns: Ints | None = None) -> _Speed:
    """Return which requests are slow and which are fast, by their TTFT.

    - The reference is the 20th percentile of TTFT, which stands for a request without any delay.
    - A request is slow if its TTFT is more than SLOW_FACTOR times the reference.
    - A request is fast if its TTFT is at most the median, and it is not slow.
    - A request that the client sent later than the reference is neither slow nor fast.

    Args:
        ttft_ns: The TTFT of each request.
        send_delay_ns: How late the client sent each request, or None if that does not matter.
    """
    reference_ttft_ns = np.quantile(ttft_ns, FAST_QUANTILE, method="lower")
    is_slow = ttft_ns > SLOW_FACTOR * reference_ttft_ns
    is_up_to_median = ttft_ns <= np.median(ttft_ns)
    is_fast = is_up_to_median & ~is_slow

    if send_delay_ns is not None:
        max_send_delay_ns = reference_ttft_ns
        is_sent_on_time = send_delay_ns <= max_send_delay_ns
        is_slow &= is_sent_on_time
        is_fast &= is_sent_on_time

    slow_count = int(is_slow.sum())
    has_many_slow = has_enough_slow(slow_count, len(ttft_ns))
    is_any_fast = bool(is_fast.any())
    return _Speed(is_slow, is_fast, is_comparable=has_many_slow and is_any_fast)


def _choose_stride(request_count: int) -> int:
    """Return n such that every n-th request makes at most MAX_REQUESTS requests."""
    return request_count // MAX_REQUESTS + 1


def examined_count(request_count: int) -> int:
    """Return how many of `request_count` requests are examined for causes."""
    return math.ceil(request_count / _choose_stride(request_count))


def has_enough_slow(slow_count: int, request_count: int) -> bool:
    """Return True if at least 1 % of the requests are slow, and at least MIN_SLOW_REQUESTS."""
    return slow_count >= max(MIN_SLOW_REQUESTS, request_count // 100)


def _explain_excess_by_parts(
    requests: JoinedColumns, ttft_ns: Ints, send_delay_ns: Ints, speed: _Speed
) -> dict[str, float]:
    """Return which fraction of the excess TTFT each part of TTFT explains.

    The excess TTFT is the mean TTFT of the slow requests minus that of the fast ones. For example,
    if the excess is 500 ms, and slow requests queue 350 ms longer on average, the part "queue"
    explains 350 / 500 = 0.7. The result is empty if too few requests are slow.

    Args:
        requests: The requests.
        ttft_ns: The TTFT of each request, without the send delay of the client.
        send_delay_ns: The send delay of each request.
        speed: Which requests are slow, and which are fast.
    """
    if not speed.is_comparable:
        return {}

    ttft_excess_ns = speed.excess_of_slow(ttft_ns)
    parts_ns = _divide_ttft(requests, ttft_ns, send_delay_ns)
    return {
        name: speed.excess_of_slow(part_ns) / ttft_excess_ns for name, part_ns in parts_ns.items()
    }


def _divide_ttft(requests: JoinedColumns, ttft_ns: Ints, send_delay_ns: Ints) -> dict[str, Ints]:
    """Return the parts of the TTFT of each request, by name. The parts add up to `ttft_ns`.

    The parts are "connect", those of "queue", "prefill" and "transfer" that the server reports for
    all requests, and "rest".

    Args:
        requests: The requests.
        ttft_ns: The TTFT of each request.
        send_delay_ns: By how much the client delayed the send of each request.
    """
    # Before the send, a request waits for its connection and for the client.
    wait_before_send_ns = requests["sent_ns"] - requests["due_ns"]
    parts_ns = {"connect": wait_before_send_ns - send_delay_ns}

    for name in ("queue", "prefill", "transfer"):
        duration_ns = requests[f"server_{name}_ns"]
        is_reported = duration_ns >= 0
        if is_reported.all():
            parts_ns[name] = duration_ns

    sum_of_parts_ns = sum(parts_ns.values())
    parts_ns["rest"] = ttft_ns - sum_of_parts_ns
    return parts_ns
