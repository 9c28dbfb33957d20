"""Explain why the slow requests of a run were slow.

Pure. Slow requests are compared with fast ones, see `cause_detectors`. The first cause with a clear
trace is named, with its evidence. If no trace is clear, no cause is named.
"""

from __future__ import annotations

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
    stride = _stride(len(order))
    requests = JoinedColumns(measured, only_ok=True, order=order[::stride])
    del ok_requests, has_ttft, order  # They are large in a run of millions of requests.
    send_delay_ns = _client_delay_ns(requests)
    case, is_explainable = _build_case(requests, send_delay_ns, stride, manifest, samples)
    causes = _detect_causes(case, unsound, is_explainable=is_explainable)
    return _describe(case, causes, send_delay_ns, is_explainable=is_explainable)


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
) -> tuple[Case, bool]:
    """Return what detectors examine, and whether there are slow requests to explain."""
    ttft_ns = requests.measure("ttft") - send_delay_ns
    speed = _classify(ttft_ns, send_delay_ns)
    due_ns = requests["due_ns"]
    span_ns = max(int(due_ns[-1] - due_ns[0]), 1)
    excess: dict[str, float] = {}
    if speed.is_explainable:
        excess = _excess_by_part(requests, ttft_ns, send_delay_ns, speed)
    case = Case(
        requests=requests,
        ttft_ns=ttft_ns,
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
    return case, speed.is_explainable


def _detect_causes(case: Case, unsound: Collection[str], *, is_explainable: bool) -> list[Cause]:
    """Return the causes that the detectors name, in their order."""
    skipped = TPOT_DETECTORS if "tpot" in unsound else ()
    detectors = DETECTORS if is_explainable else DETECTORS_OF_ALL
    causes = [detect(case) for detect in detectors if detect not in skipped]
    return [cause for cause in causes if cause is not None]


def _describe(
    case: Case, causes: list[Cause], send_delay_ns: Ints, *, is_explainable: bool
) -> Explanation:
    """Return the explanation with its paragraph. The client is a cause of its own.

    With the client's send delay in TTFT, other requests may be slow than without it.
    """
    requests = case.requests
    ttft_ns = requests.measure("ttft")
    speed = _classify(ttft_ns, np.zeros_like(ttft_ns))
    slow_count = int(speed.is_slow.sum())
    client_share = 0.0
    if speed.is_explainable:
        client_share = excess_of_slow(send_delay_ns, speed.is_slow, speed.is_fast)
        client_share /= excess_of_slow(ttft_ns, speed.is_slow, speed.is_fast)
    affected_count = int(case.is_slow.sum())
    is_about_all = not is_explainable or (bool(causes) and causes[0].code in _CODES_ABOUT_ALL)
    if client_share >= MOST_OF_EXCESS:
        evidence = f"the client sent them late, which is {client_share:.0%} of their excess TTFT"
        causes = [client_cause(client_share, evidence), *causes]
        affected_count = slow_count
        is_about_all = False
    elif causes:
        share_of_mean = float(send_delay_ns.mean() / ttft_ns.mean())
        if share_of_mean >= MIN_CLIENT_SHARE:
            evidence = f"the client sent requests late ({share_of_mean:.0%} of the mean TTFT)"
            causes = [*causes, client_cause(share_of_mean, evidence, "possible")]
    if not causes:
        queue = _find_queue(requests, ttft_ns, send_delay_ns, case.manifest, case.samples)
        if queue is None:
            return Explanation(slow=slow_count)
        return Explanation(slow=slow_count, text=_sentence(queue), causes=(queue,))
    subject = ""
    if not is_about_all:
        subject = (
            f"{affected_count:,} of {len(ttft_ns):,} requests exceeded {SLOW_FACTOR:g}x the TTFT "
            "of fast requests: "
        )
    text = f"{causes[0].sure.capitalize()}: {subject}{causes[0].evidence}."
    if len(causes) > 1:
        text += f" Also: {'; '.join(cause.evidence for cause in causes[1:])}."
    return Explanation(text=text, slow=slow_count, causes=tuple(causes))


def _explain_few(
    measured: Sequence[Columns],
    request_count: int,
    manifest: RunManifest,
    samples: Sequence[MetricSample],
) -> Explanation:
    """Return what is known of too few requests to compare slow ones with fast ones.

    A queue that explains most of a missed TTFT is named. All other causes are not examined.
    """
    if not request_count:
        return Explanation()
    too_few = (
        f"{request_count:,} requests are too few to compare slow ones with fast ones "
        f"({MIN_REQUESTS} needed)"
    )
    if request_count < queue_of_few.MIN_REQUESTS:
        return Explanation(not_examined=too_few)
    ok_requests = JoinedColumns(measured, only_ok=True, keeps_columns=False)
    order = queue_of_few.order_by_scheduled_time(ok_requests)
    requests = JoinedColumns(measured, only_ok=True, order=order)
    send_delay_ns = _client_delay_ns(requests)
    queue = _find_queue(requests, requests.measure("ttft"), send_delay_ns, manifest, samples)
    if queue is None:
        return Explanation(not_examined=too_few)
    not_examined = f"other causes, since {too_few}"
    return Explanation(text=_sentence(queue), causes=(queue,), not_examined=not_examined)


def _sentence(cause: Cause) -> str:
    return f"{cause.sure.capitalize()}: {cause.evidence}."


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


def _client_delay_ns(requests: JoinedColumns) -> Ints:
    """Return how late the client itself sent each request.

    A client that was stopped opens its connections late too. Until the latest send on an open
    connection, the wait for a connection therefore counts as the client's delay.
    """
    sendable = sendable_ns(requests)
    due_ns = requests["due_ns"]
    sent_ns = requests["sent_ns"]
    sent_on_open_connection = np.where(requests["reused"] > 0, sent_ns, 0)
    stopped_until_ns = np.maximum.accumulate(sent_on_open_connection)
    delay_ns: Ints = sent_ns - sendable + np.clip(stopped_until_ns - due_ns, 0, sendable - due_ns)
    return delay_ns


def _classify(ttft_ns: Ints, send_delay_ns: Ints) -> _Speed:
    """Return which requests are slow and which are fast.

    Requests that the client sent later than a fast response takes are neither.
    """
    fast_ttft_ns = np.quantile(ttft_ns, FAST_QUANTILE, method="lower")
    is_on_time = send_delay_ns <= fast_ttft_ns
    is_slow = (ttft_ns > SLOW_FACTOR * fast_ttft_ns) & is_on_time
    is_fast = (ttft_ns <= np.median(ttft_ns)) & ~is_slow & is_on_time
    is_explainable = has_enough_slow(int(is_slow.sum()), len(ttft_ns)) and bool(is_fast.any())
    return _Speed(is_slow, is_fast, is_explainable)


def _stride(request_count: int) -> int:
    return request_count // MAX_REQUESTS + 1


def examined_count(request_count: int) -> int:
    """Return how many of the ok requests with a TTFT are examined.

    `Explanation.slow` is a number of these.
    """
    return -(-request_count // _stride(request_count))


def has_enough_slow(slow_count: int, request_count: int) -> bool:
    """Return True if the slow requests among those examined are enough to explain: 1 %."""
    return slow_count >= max(MIN_SLOW_REQUESTS, request_count // 100)


def _excess_by_part(
    requests: JoinedColumns, ttft_ns: Ints, send_delay_ns: Ints, speed: _Speed
) -> dict[str, float]:
    """Return which fraction of the additional TTFT of the slow requests each part explains.

    The parts are connect, the durations that the server reports for all requests, and the rest.
    The client's send delay belongs to none of them.
    """
    parts = {"connect": requests["sent_ns"] - requests["due_ns"] - send_delay_ns}
    for name in ("queue", "prefill", "transfer"):
        duration_ns = requests[f"server_{name}_ns"]
        if (duration_ns >= 0).all():
            parts[name] = duration_ns
    parts["rest"] = ttft_ns - sum(parts.values())
    excess_ns = excess_of_slow(ttft_ns, speed.is_slow, speed.is_fast)
    return {
        name: excess_of_slow(values_ns, speed.is_slow, speed.is_fast) / excess_ns
        for name, values_ns in parts.items()
    }
