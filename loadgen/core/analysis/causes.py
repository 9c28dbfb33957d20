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
    COMPARING_DETECTORS,
    DETECTORS_WITHOUT_COMPARISON,
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
from loadgen.core.metrics.columns import (
    UNDEFINED,
    Columns,
    JoinedColumns,
    as_selection,
    order_by_time,
)
from loadgen.core.metrics.replica_keys import replica_keys
from loadgen.core.metrics.request_metrics import earliest_send_ns
from loadgen.core.metrics.sections import Cause, Explanation
from loadgen.core.server_metrics import series

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from loadgen.core.results.manifest import RunManifest
    from loadgen.core.server_metrics.series import MetricSample
    from loadgen.core.slo import Slo

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
    # There may be millions of requests, so the columns of all of them are not kept in memory.
    ok_requests = JoinedColumns(measured_stages, only_ok=True, keeps_columns=False)
    has_ttft = ok_requests.measure("ttft") != UNDEFINED
    request_count = int(np.count_nonzero(has_ttft))
    if request_count < MIN_REQUESTS:
        return None

    # To save time, only every n-th request in order of time is examined, where n is the stride.
    stride = _choose_stride(request_count)
    indexes_by_time = _order_by_due_time_and_slot(ok_requests, has_ttft)
    examined_indexes = indexes_by_time[::stride]

    examined_requests = JoinedColumns(measured_stages, only_ok=True, order=examined_indexes)
    return _ExaminedRequests(examined_requests, stride)


def _order_by_due_time_and_slot(requests: JoinedColumns, has_ttft: Mask) -> Ints:
    """Return the indexes of the requests with a TTFT, ordered by scheduled time.

    Requests with the same scheduled time are in the order of their slots. A slot is the position of
    a request in the schedule.

    Args:
        requests: The ok requests.
        has_ttft: Which of them have a TTFT.
    """
    rows_with_ttft = as_selection(has_ttft)
    due_ns = requests["due_ns"][rows_with_ttft]
    slots = requests["slot"][rows_with_ttft]
    time_order = order_by_time(due_ns, slots)

    # `time_order` counts only the requests with a TTFT; the result counts all requests.
    indexes_with_ttft = np.flatnonzero(has_ttft)
    ordered_indexes: Ints = indexes_with_ttft[time_order]
    return ordered_indexes


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
    time_in_load = _measure_time_in_load(requests["due_ns"])

    return Case(
        requests=requests,
        stride=examined.stride,
        ttft_ns=server_ttft_ns,
        is_slow=speed.is_slow,
        is_fast=speed.is_fast,
        excess_shares=_share_of_excess_by_part(requests, server_ttft_ns, send_delay_ns, speed),
        relative_time=time_in_load.relative,
        span_s=time_in_load.span_s,
        replica_keys=replica_keys(requests).astype(np.int64),
        run=RunSources(manifest, samples, series.compute_curves(samples)),
    )


class _TimeInLoad(NamedTuple):
    """When requests were scheduled, as a fraction of the load.

    Attributes:
        relative: The time of each request, from 0 at the first request to 1 at the last.
        span_s: The time from the first request to the last, which is more than 0.
    """

    relative: NDArray[np.float64]
    span_s: float


def _measure_time_in_load(due_ns: Ints) -> _TimeInLoad:
    """Return when each request was scheduled, as a fraction of the load.

    With requests at 10 s, 12 s and 20 s, the fractions are 0, 0.2 and 1, of a span of 10 s.

    Args:
        due_ns: The scheduled times, in ascending order.
    """
    since_first_ns = due_ns - due_ns[0]
    span_ns = max(int(since_first_ns[-1]), 1)  # not 0, because it is a divisor
    return _TimeInLoad(relative=since_first_ns / span_ns, span_s=span_ns / 1e9)


def _detect_causes(case: Case, withheld_metrics: Collection[str]) -> list[Cause]:
    """Return the causes that the detectors find, the most specific first.

    A detector is a function that returns a cause, or None if the requests show no trace of it. If
    too few requests are slow, only the detectors that need no comparison of slow requests with fast
    ones are used. If the metric "tpot" is withheld, the detectors that need it are left out.
    """
    detectors = COMPARING_DETECTORS if case.has_slow_requests else DETECTORS_WITHOUT_COMPARISON
    if "tpot" in withheld_metrics:
        detectors = tuple(detect for detect in detectors if detect not in TPOT_DETECTORS)

    return _known_causes(*(detect(case) for detect in detectors))


def _known_causes(*causes: Cause | None) -> list[Cause]:
    """Return the causes that are not None, in the same order."""
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
    ttft_ns = case.requests.measure("ttft")  # with the send delay
    speed = _classify_speed(ttft_ns)
    slow_count = int(speed.is_slow.sum())

    client = _client_as_main_cause(ttft_ns, send_delay_ns, speed)
    if client is not None:
        causes = [client, *server_causes]
        introduction = _count_slow_requests(speed.is_slow)
    elif server_causes:
        minor_client = _client_as_minor_cause(ttft_ns, send_delay_ns)
        causes = _known_causes(*server_causes, minor_client)
        introduction = _introduce_server_cause(server_causes[0], case)
    else:
        run = case.run
        queue = _queue_of_missed_limit(case.requests, send_delay_ns, run.manifest.slo, run.samples)
        causes = _known_causes(queue)
        introduction = ""

    text = _compose_text(causes, introduction)
    return Explanation(text=text, slow=slow_count, causes=tuple(causes))


def _client_as_main_cause(ttft_ns: Ints, send_delay_ns: Ints, speed: _Speed) -> Cause | None:
    """Return the client as a cause if its send delay explains most of the excess TTFT, else None.

    An excess is by how much the mean of the slow requests is above that of the fast ones. If slow
    requests were sent 300 ms later than fast ones, and their TTFT is 400 ms longer, the delay
    explains 300 / 400 = 75 %.

    Args:
        ttft_ns: The TTFT of each request, with the send delay.
        send_delay_ns: How late the client sent each request.
        speed: Which requests are slow, and which are fast.
    """
    if not speed.is_comparable:
        return None

    excess_delay_ns = speed.excess_of_slow(send_delay_ns)
    excess_ttft_ns = speed.excess_of_slow(ttft_ns)
    explained_share = excess_delay_ns / excess_ttft_ns
    if explained_share < MOST_OF_EXCESS:
        return None

    evidence = (
        f"the client sent them late, which explains {explained_share:.0%} of their excess TTFT"
    )
    return client_cause(explained_share, evidence)


def _client_as_minor_cause(ttft_ns: Ints, send_delay_ns: Ints) -> Cause | None:
    """Return the client as a possible cause, or None if its send delay is short.

    A delay is short if its share of the mean TTFT is below MIN_CLIENT_SHARE.
    """
    share = float(send_delay_ns.mean() / ttft_ns.mean())
    if share < MIN_CLIENT_SHARE:
        return None

    evidence = f"the client sent requests late, which explains {share:.0%} of the mean TTFT"
    return client_cause(share, evidence, "possible")


def _introduce_server_cause(cause: Cause, case: Case) -> str:
    """Return how many requests were slow, as the beginning of the sentence about a cause.

    Return "" if the sentence is not about slow requests: if too few are slow, or if the evidence
    for the cause is about all requests.
    """
    is_about_all = cause.code in _CODES_ABOUT_ALL
    if is_about_all or not case.has_slow_requests:
        return ""
    return _count_slow_requests(case.is_slow)


def _count_slow_requests(is_slow: Mask) -> str:
    """Return the beginning of a sentence that says how many requests were slow.

    An example is "120 of 5,000 requests exceeded 3x the TTFT of fast requests: ".
    """
    slow_count = int(is_slow.sum())
    request_count = len(is_slow)
    return (
        f"{slow_count:,} of {request_count:,} requests exceeded {SLOW_FACTOR:g}x the TTFT of fast "
        "requests: "
    )


def _compose_text(causes: Sequence[Cause], introduction: str = "") -> str:
    """Return the paragraph that explains slow requests, "" without any cause.

    Args:
        causes: The causes, the main one first.
        introduction: The beginning of the sentence about the main cause, or "".
    """
    if not causes:
        return ""

    main_cause, *further_causes = causes
    text = f"{main_cause.sure.capitalize()}: {introduction}{main_cause.evidence}."
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
        queue = _queue_of_missed_limit(requests, send_delay_ns, manifest.slo, samples)

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


def _queue_of_missed_limit(
    requests: JoinedColumns,
    send_delay_ns: Ints,
    slo: Slo | None,
    samples: Sequence[MetricSample],
) -> Cause | None:
    """Return a queue at the server as the cause of a missed TTFT limit.

    Return None if the run has no SLO with a TTFT limit, if it meets the limits, or if nothing shows
    a queue.

    Args:
        requests: The requests with a TTFT, ordered by scheduled time.
        send_delay_ns: How late the client sent each request.
        slo: The SLO of the run, or None.
        samples: The samples of the servers' metrics pages.
    """
    ttft_ns = requests.measure("ttft")
    limit_ns = queue_evidence.missed_ttft_limit(ttft_ns, slo)
    if limit_ns is None:
        return None

    missed = queue_evidence.MissedTtft(
        requests=requests,
        ttft_ns=ttft_ns,
        send_delay_ns=send_delay_ns,
        limit_ns=limit_ns,
        samples=samples,
    )
    return queue_evidence.find_queue_cause(missed)


def _measure_send_delay(requests: JoinedColumns) -> Ints:
    """Return by how much the client delayed the send of each request, in ns.

    A request can be sent when it is due and its connection is open. The delay by the client is the
    time from then until the send. If the operating system stopped the client while a new connection
    was opened, the time of the stop is a part of the delay too, but the other wait for the
    connection is not.

    Args:
        requests: The requests, ordered by scheduled time.
    """
    could_send_ns = earliest_send_ns(requests)
    delay_of_send_ns = requests["sent_ns"] - could_send_ns

    connect_wait_ns = could_send_ns - requests["due_ns"]
    stop_while_connecting_ns = _measure_stop_while_connecting(requests, connect_wait_ns)

    total_delay_ns: Ints = delay_of_send_ns + stop_while_connecting_ns
    return total_delay_ns


def _measure_stop_while_connecting(requests: JoinedColumns, connect_wait_ns: Ints) -> Ints:
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
    - A request that the client sent late, by more than the reference, is neither slow nor fast.

    Args:
        ttft_ns: The TTFT of each request.
        send_delay_ns: How late the client sent each request, or None if that does not matter.
    """
    reference_ttft_ns = np.quantile(ttft_ns, FAST_QUANTILE, method="lower")
    is_slow = ttft_ns > SLOW_FACTOR * reference_ttft_ns
    is_up_to_median = ttft_ns <= np.median(ttft_ns)
    is_fast = is_up_to_median & ~is_slow

    if send_delay_ns is not None:
        is_sent_on_time = send_delay_ns <= reference_ttft_ns
        is_slow &= is_sent_on_time
        is_fast &= is_sent_on_time

    is_enough_slow = has_enough_slow(slow_count=int(is_slow.sum()), request_count=len(ttft_ns))
    is_any_fast = bool(is_fast.any())
    return _Speed(is_slow, is_fast, is_comparable=is_enough_slow and is_any_fast)


def _choose_stride(request_count: int) -> int:
    """Return n such that every n-th request makes at most MAX_REQUESTS requests."""
    return request_count // MAX_REQUESTS + 1


def examined_count(request_count: int) -> int:
    """Return how many of `request_count` requests are examined for causes."""
    return math.ceil(request_count / _choose_stride(request_count))


def has_enough_slow(slow_count: int, request_count: int) -> bool:
    """Return True if at least 1 % of the requests are slow, and at least MIN_SLOW_REQUESTS."""
    return slow_count >= max(MIN_SLOW_REQUESTS, request_count // 100)


def _share_of_excess_by_part(
    requests: JoinedColumns, ttft_ns: Ints, send_delay_ns: Ints, speed: _Speed
) -> dict[str, float]:
    """Return the share of each part of TTFT, such as "queue", in the excess TTFT of slow requests.

    An excess is by how much the mean of the slow requests is above that of the fast ones. For
    example, if TTFT has an excess of 500 ms, and the time in the queue one of 350 ms, the share of
    the part "queue" is 350 / 500 = 0.7. The result is empty if too few requests are slow.

    Args:
        requests: The requests.
        ttft_ns: The TTFT of each request, from which the send delay was subtracted.
        send_delay_ns: The send delay of each request, which is not part of any of the parts.
        speed: Which requests are slow, and which are fast.
    """
    if not speed.is_comparable:
        return {}

    excess_ttft_ns = speed.excess_of_slow(ttft_ns)
    duration_by_part_ns = _divide_ttft(requests, ttft_ns, send_delay_ns)
    return {
        part: speed.excess_of_slow(duration_ns) / excess_ttft_ns
        for part, duration_ns in duration_by_part_ns.items()
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
