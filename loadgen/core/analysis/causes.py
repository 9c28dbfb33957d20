"""Explain why the slow requests of a run were slow.

Pure. Slow requests are compared with fast ones, see `cause_detectors`. The first cause with a clear
trace is named, with its evidence. If no trace is clear, no cause is named.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadgen.core.analysis import queue_of_few
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
    client_cause,
    excess_of_slow,
)
from loadgen.core.metrics.columns import UNDEFINED, Columns, JoinedColumns, order_by_time
from loadgen.core.metrics.replica_keys import replica_keys
from loadgen.core.metrics.request_metrics import sendable_ns
from loadgen.core.metrics.sections import Cause, Explanation
from loadgen.core.server_metrics import series

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from loadgen.core.results.manifest import RunManifest
    from loadgen.core.server_metrics.series import MetricSample

MAX_REQUESTS = 200_000
"""The largest number of requests that are examined. Of more, every second, third and so on is."""
FAST_QUANTILE = 0.2
"""The quantile of TTFT that stands for a request without any delay."""
SLOW_FACTOR = 3.0
"""A request is slow if its TTFT exceeds that of FAST_QUANTILE by this factor."""
MIN_CLIENT_SHARE = 0.05
"""The share of the mean TTFT from which on the client's send delay is named beside other causes."""
_CODES_ABOUT_ALL = ("held_back", "power", "batch")
"""The causes whose evidence is about all requests instead of the slow ones."""


class _Speed(NamedTuple):
    """Which requests are slow and which are fast, and whether the slow ones need an explanation."""

    is_slow: Mask
    is_fast: Mask
    is_explainable: bool


def explain(
    measured: Sequence[Columns],
    manifest: RunManifest,
    samples: Sequence[MetricSample] = (),
    unsound: Collection[str] = (),
) -> Explanation:
    """Return the causes of the slow requests among the measured records.

    Of a long run, only every k-th request is examined, so that it takes little time and memory.

    Args:
        measured: The measured records.
        manifest: The manifest of the run.
        samples: The samples of the servers' metrics pages.
        unsound: Metrics that are not reported, so that they are no evidence.
    """
    ok_requests = JoinedColumns(measured, only_ok=True, keeps_columns=False)
    has_ttft = ok_requests.measure("ttft") != UNDEFINED
    request_count = int(np.count_nonzero(has_ttft))
    if request_count < MIN_REQUESTS:
        return _explain_few(measured, request_count, manifest, samples)
    order = _order_by_scheduled_time(ok_requests, has_ttft)
    stride = _choose_stride(len(order))
    requests = JoinedColumns(measured, only_ok=True, order=order[::stride])
    del ok_requests, has_ttft, order  # They are large in a run of millions of requests.
    send_delay_ns = _measure_send_delay(requests)
    case = _build_case(requests, send_delay_ns, stride, manifest, samples)
    return _describe(case, _detect_causes(case, unsound), send_delay_ns)


def _order_by_scheduled_time(requests: JoinedColumns, has_ttft: Mask) -> Ints:
    """Return the indexes of the requests with a TTFT, ordered by scheduled time."""
    due_ns = requests["due_ns"]
    slot = requests["slot"]
    if has_ttft.all():
        return order_by_time(due_ns, slot)
    order: Ints = np.flatnonzero(has_ttft)[order_by_time(due_ns[has_ttft], slot[has_ttft])]
    return order


def _build_case(
    requests: JoinedColumns,
    send_delay_ns: Ints,
    stride: int,
    manifest: RunManifest,
    samples: Sequence[MetricSample],
) -> Case:
    """Return what the detectors of causes examine.

    Args:
        requests: The ok requests with a TTFT, ordered by scheduled time.
        send_delay_ns: How late the client itself sent each of them.
        stride: Every how many-th request of the run is among them.
        manifest: The manifest of the run.
        samples: The samples of the servers' metrics pages.
    """
    server_ttft_ns = requests.measure("ttft") - send_delay_ns
    speed = _classify(server_ttft_ns, send_delay_ns)
    due_ns = requests["due_ns"]
    span_ns = max(int(due_ns[-1] - due_ns[0]), 1)
    excess: dict[str, float] = {}
    if speed.is_explainable:
        excess = _divide_excess(requests, server_ttft_ns, send_delay_ns, speed)
    return Case(
        requests=requests,
        ttft_ns=server_ttft_ns,
        is_slow=speed.is_slow,
        is_fast=speed.is_fast,
        time=(due_ns - due_ns[0]) / span_ns,
        span_s=span_ns / 1e9,
        replica_keys=replica_keys(requests).astype(np.int64),
        stride=stride,
        excess=excess,
        server_curves=series.compute_curves(samples),
        manifest=manifest,
        samples=samples,
    )


def _detect_causes(case: Case, unsound: Collection[str]) -> list[Cause]:
    """Return the causes that the detectors find, in their order.

    If too few requests are slow to be compared with fast ones, only detectors that look at all
    requests are called.
    """
    skipped = TPOT_DETECTORS if "tpot" in unsound else ()
    detectors = DETECTORS if case.is_explainable else DETECTORS_OF_ALL
    causes = [detect(case) for detect in detectors if detect not in skipped]
    return [cause for cause in causes if cause is not None]


def _describe(case: Case, causes: list[Cause], send_delay_ns: Ints) -> Explanation:
    """Return the explanation with its paragraph, and with the client as a cause if it is one.

    - If the client's send delay explains most of the excess TTFT, it is the first cause.
    - If no cause was detected, a queue that explains a missed TTFT objective is the only one.
    - If the send delay is a smaller part of TTFT, it is a possible cause after the others.

    Args:
        case: The requests.
        causes: The causes that the detectors found.
        send_delay_ns: How late the client itself sent each request.
    """
    ttft_ns = case.requests.measure("ttft")
    # With the send delay in TTFT, other requests may be slow than without it.
    speed = _classify(ttft_ns, np.zeros_like(ttft_ns))
    slow_count = int(speed.is_slow.sum())
    client_share = _client_share_of_excess(ttft_ns, send_delay_ns, speed)
    if client_share >= MOST_OF_EXCESS:
        evidence = (
            f"the client sent them late, which explains {client_share:.0%} of their excess TTFT"
        )
        causes = [client_cause(client_share, evidence), *causes]
        text = _compose_text(causes, _describe_slow(slow_count, len(ttft_ns)))
        return Explanation(text=text, slow=slow_count, causes=tuple(causes))
    if not causes:
        queue = _find_queue(case.requests, ttft_ns, send_delay_ns, case.manifest, case.samples)
        if queue is None:
            return Explanation(slow=slow_count)
        return Explanation(slow=slow_count, text=_compose_text([queue]), causes=(queue,))
    share_of_mean = float(send_delay_ns.mean() / ttft_ns.mean())
    if share_of_mean >= MIN_CLIENT_SHARE:
        evidence = (
            f"the client sent requests late, which explains {share_of_mean:.0%} of the mean TTFT"
        )
        causes = [*causes, client_cause(share_of_mean, evidence, "possible")]
    subject = ""
    if case.is_explainable and causes[0].code not in _CODES_ABOUT_ALL:
        subject = _describe_slow(int(case.is_slow.sum()), len(ttft_ns))
    text = _compose_text(causes, subject)
    return Explanation(text=text, slow=slow_count, causes=tuple(causes))


def _client_share_of_excess(ttft_ns: Ints, send_delay_ns: Ints, speed: _Speed) -> float:
    """Return the share of the excess TTFT of the slow requests that the client caused, else 0."""
    if not speed.is_explainable:
        return 0.0
    delay_excess_ns = excess_of_slow(send_delay_ns, speed.is_slow, speed.is_fast)
    return delay_excess_ns / excess_of_slow(ttft_ns, speed.is_slow, speed.is_fast)


def _describe_slow(slow_count: int, request_count: int) -> str:
    """Return how many requests were slow, as the beginning of a sentence about them."""
    return (
        f"{slow_count:,} of {request_count:,} requests exceeded {SLOW_FACTOR:g}x the TTFT of fast "
        "requests: "
    )


def _compose_text(causes: Sequence[Cause], subject: str = "") -> str:
    """Return the paragraph that explains slow requests: the first cause, and then the others.

    Args:
        causes: The causes, at least one.
        subject: What the evidence of the first cause is about, "" if it says so itself.
    """
    text = f"{causes[0].sure.capitalize()}: {subject}{causes[0].evidence}."
    if len(causes) > 1:
        text += f" Also: {'; '.join(cause.evidence for cause in causes[1:])}."
    return text


def _explain_few(
    measured: Sequence[Columns],
    request_count: int,
    manifest: RunManifest,
    samples: Sequence[MetricSample],
) -> Explanation:
    """Return what is known if there are too few requests to compare slow ones with fast ones.

    A queue that explains most of a missed TTFT objective is named. Other causes are not examined,
    and the explanation says so.
    """
    if not request_count:
        return Explanation()
    too_few = (
        f"{request_count:,} requests are too few to compare slow requests with fast "
        f"ones ({MIN_REQUESTS} needed)"
    )
    if request_count < queue_of_few.MIN_REQUESTS:
        return Explanation(not_examined=too_few)
    ok_requests = JoinedColumns(measured, only_ok=True, keeps_columns=False)
    order = queue_of_few.order_by_scheduled_time(ok_requests)
    requests = JoinedColumns(measured, only_ok=True, order=order)
    send_delay_ns = _measure_send_delay(requests)
    queue = _find_queue(requests, requests.measure("ttft"), send_delay_ns, manifest, samples)
    if queue is None:
        return Explanation(not_examined=too_few)
    not_examined = f"other causes, since {too_few}"
    return Explanation(text=_compose_text([queue]), causes=(queue,), not_examined=not_examined)


def _find_queue(
    requests: JoinedColumns,
    ttft_ns: Ints,
    send_delay_ns: Ints,
    manifest: RunManifest,
    samples: Sequence[MetricSample],
) -> Cause | None:
    """Return the queue if the run missed a TTFT objective and a queue explains most of it."""
    limit_ns = queue_of_few.missed_ttft_limit(ttft_ns, manifest.slo)
    if limit_ns is None:
        return None
    missed = queue_of_few.MissedTtft(requests, ttft_ns, send_delay_ns, limit_ns, samples)
    return queue_of_few.find_queue(missed)


def _measure_send_delay(requests: JoinedColumns) -> Ints:
    """Return how late the client itself sent each request, in ns.

    It is the time from when the request could be sent until it was sent. A client that was stopped,
    for example by the operating system, also opens its connections late. It was stopped at least
    until it sent the latest earlier request on a connection that was open already. Until then, the
    wait for a new connection therefore counts as the client's delay too.

    Args:
        requests: The requests, ordered by scheduled time.
    """
    sendable = sendable_ns(requests)
    due_ns = requests["due_ns"]
    sent_ns = requests["sent_ns"]
    sent_on_open_connection_ns = np.where(requests["reused"] > 0, sent_ns, 0)
    stopped_until_ns = np.maximum.accumulate(sent_on_open_connection_ns)
    connect_wait_ns = sendable - due_ns
    stopped_ns = np.clip(stopped_until_ns - due_ns, 0, connect_wait_ns)
    delay_ns: Ints = sent_ns - sendable + stopped_ns
    return delay_ns


def _classify(ttft_ns: Ints, send_delay_ns: Ints) -> _Speed:
    """Return which requests are slow and which are fast.

    A request is slow if it takes SLOW_FACTOR times as long as one without any delay, which the
    FAST_QUANTILE of TTFT stands for. It is fast up to the median. Requests that the client sent
    later than a fast response takes are neither, because the server is not to blame.
    """
    undelayed_ttft_ns = np.quantile(ttft_ns, FAST_QUANTILE, method="lower")
    is_on_time = send_delay_ns <= undelayed_ttft_ns
    is_slow = (ttft_ns > SLOW_FACTOR * undelayed_ttft_ns) & is_on_time
    is_fast = (ttft_ns <= np.median(ttft_ns)) & ~is_slow & is_on_time
    is_explainable = has_enough_slow(int(is_slow.sum()), len(ttft_ns)) and bool(is_fast.any())
    return _Speed(is_slow, is_fast, is_explainable)


def _choose_stride(request_count: int) -> int:
    """Return every how many-th request is examined, so that at most MAX_REQUESTS are."""
    return request_count // MAX_REQUESTS + 1


def examined_count(request_count: int) -> int:
    """Return how many of the ok requests with a TTFT are examined.

    `Explanation.slow` is a number of these.
    """
    return math.ceil(request_count / _choose_stride(request_count))


def has_enough_slow(slow_count: int, request_count: int) -> bool:
    """Return True if the slow requests among those examined are enough to explain: 1 %."""
    return slow_count >= max(MIN_SLOW_REQUESTS, request_count // 100)


def _divide_excess(
    requests: JoinedColumns, ttft_ns: Ints, send_delay_ns: Ints, speed: _Speed
) -> dict[str, float]:
    """Return which fraction of the excess TTFT of the slow requests each part of TTFT explains.

    The excess is the difference of the means of slow and of fast requests. The parts are the time
    to connect, the durations that the server reports for all requests, and the rest. The client's
    send delay belongs to none of them.
    """
    parts_ns = {"connect": requests["sent_ns"] - requests["due_ns"] - send_delay_ns}
    for name in ("queue", "prefill", "transfer"):
        duration_ns = requests[f"server_{name}_ns"]
        if (duration_ns >= 0).all():
            parts_ns[name] = duration_ns
    parts_ns["rest"] = ttft_ns - sum(parts_ns.values())
    excess_ns = excess_of_slow(ttft_ns, speed.is_slow, speed.is_fast)
    return {
        name: excess_of_slow(part_ns, speed.is_slow, speed.is_fast) / excess_ns
        for name, part_ns in parts_ns.items()
    }
