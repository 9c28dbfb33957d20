"""Judges whether a measurement can be trusted.

Pure. Every finding is a code with its values, and `reasons` has the sentences. A run is INVALID for
*reasons*. *Caveats* belong beside VALID: withheld metrics, or a load that is not the requested one.
*Warnings*, in `validity_warnings`, are what else to know. The limits come from
`loadgen.core.limits`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loadgen.core import limits
from loadgen.core.metrics.client_use import worst_second
from loadgen.core.metrics.run_evidence import RunEvidence, make_code
from loadgen.core.metrics.timing_evidence import find_remedy, is_local
from loadgen.core.metrics.validity_warnings import find_warnings
from loadgen.core.metrics.verdict import make_verdict
from loadgen.core.stats.quantiles import SUPPORT, deciding_quantile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from loadgen.core.metrics.request_counts import RequestCounts
    from loadgen.core.metrics.run_evidence import LatenessScale
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.metrics.verdict import Verdict
    from loadgen.core.results.manifest import ReasonCode
    from loadgen.core.stats.quantiles import Distribution

MIN_REQUESTS = SUPPORT["p50"]
"""A run with fewer requests supports no quantile and is not valid."""

REQUESTS_PER_USER = 5
"""A closed loop that was not filled is recommended to send so many requests per virtual user."""


def judge_run(evidence: RunEvidence) -> Verdict:
    """Return the verdict on a run, whose summary is complete but for the verdict."""
    return make_verdict(
        evidence.manifest.limits,
        reasons=find_reasons(evidence),
        warnings=find_warnings(evidence),
        caveats=find_caveats(evidence),
    )


def has_high_error_rate(summary: Summary) -> bool:
    """Return True if the server failed a larger share of the requests than `failure_share`."""
    requests = summary.requests
    limit = summary.verdict.limits.failure_share
    return requests.decided > 0 and requests.failed_by_server > limit * requests.decided


def reasons_of_state(state: str) -> tuple[ReasonCode, ...]:
    """Return why a run that ended in this state is INVALID, () if it is not for that."""
    return (make_code(state),) if state in ("interrupted", "stopped") else ()


# -- reasons: why the run is INVALID ---------------------------------------------------------------


def find_reasons(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield why a run is INVALID, in the order in which reports show it.

    Each reason is an error of the measurement and not of the server: too few requests, a client
    that was late, overloaded or failed, or a run that ended early.
    """
    manifest = evidence.manifest
    requests = evidence.summary.requests
    yield from _too_few_requests(requests)
    yield from _late_client(evidence)
    yield from _busy_worker(evidence)
    drops_too_many = requests.dropped_share > manifest.limits.not_offered_share
    # If the server misses the SLO anyway, the dropped requests do not change the outcome.
    if drops_too_many and not evidence.inputs.is_slo_missed:
        yield make_code(
            "dropped", **_dropped_values(requests), limit=manifest.limits.not_offered_share
        )
    yield from _too_many_failures(evidence, "client_failures", requests.failed_by_client)
    yield from _dead_workers(evidence)
    if manifest.stopped_by is None:
        yield from reasons_of_state(evidence.summary.run.state)
    else:
        yield manifest.stopped_by


def _too_few_requests(requests: RequestCounts) -> Iterator[ReasonCode]:
    """Yield that there are too few requests with an outcome, and why."""
    if requests.decided >= MIN_REQUESTS:
        return
    if requests.decided:
        yield make_code("too_few", requests=requests.decided, needed=MIN_REQUESTS)
    elif requests.unfinished:
        yield make_code("all_unfinished", unfinished=requests.unfinished)
    elif requests.cancelled:
        yield make_code("all_cancelled", cancelled=requests.cancelled)
    else:
        yield make_code("none_due")


def _late_client(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield that requests were sent late or that arrival times are uncertain.

    Each is an error of the client, which matters if it is a large share of the measured latency.
    """
    manifest = evidence.manifest
    summary = evidence.summary
    errors = (
        ("sent_late", summary.send_lag_ms, manifest.limits.send_lag_share),
        ("arrivals_unsure", summary.stamp_error_ms, manifest.limits.stamp_error_share),
    )
    for code, error_ms, limit in errors:
        excess = _excess_values(error_ms, evidence.inputs.scale, limit)
        if excess is not None:
            remedy = find_remedy(
                evidence.worker_samples, summary.window, is_local=is_local(manifest)
            )
            yield make_code(code, **excess, **remedy)


def _excess_values(
    error_ms: Distribution, scale: LatenessScale, limit: float
) -> dict[str, Any] | None:
    """Return how an error of the client compares with the scale, None if it is within the limit."""
    error = deciding_quantile(error_ms)
    p50_ms = scale.p50_ms
    if error is None or p50_ms is None or error.value_ms <= limit * p50_ms:
        return None
    return {
        "quantile": error.name,
        "value_ms": error.value_ms,
        "share": error.value_ms / p50_ms if p50_ms > 0 else None,
        "basis": scale.name,
        "basis_ms": p50_ms,
        "limit": limit,
    }


def _busy_worker(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield that a worker used more of its core than the limit allows."""
    busiest = worst_second(evidence.worker_samples, evidence.summary.window, "cpu_share")
    limit = evidence.manifest.limits.cpu_share
    if busiest is not None and busiest.cpu_share > limit:
        yield make_code(
            "generator_busy",
            worker=busiest.worker,
            cpu_share=busiest.cpu_share,
            at_s=busiest.t_s,
            limit=limit,
        )


def _too_many_failures(
    evidence: RunEvidence, code: str, failed_requests: int
) -> Iterator[ReasonCode]:
    """Yield the code if so many failures are a larger share of the requests than is allowed.

    The same limit, `failure_share`, holds for failures of the client, which make a run INVALID, and
    for failures of the server, which are a caveat.
    """
    requests = evidence.summary.requests.decided
    limit = evidence.manifest.limits.failure_share
    if requests and failed_requests > limit * requests:
        yield make_code(
            code,
            failed=failed_requests,
            requests=requests,
            share=failed_requests / requests,
            limit=limit,
        )


def _dead_workers(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield each worker that died, with its node in a cluster."""
    cluster = evidence.manifest.cluster
    node_of_worker = {}
    if cluster:
        node_of_worker = {
            placement.worker: f"{placement.node} ({placement.address})"
            for placement in cluster.workers
        }
    for worker in evidence.inputs.dead_workers:
        yield make_code("worker_died", worker=worker, node=node_of_worker.get(worker))


def _dropped_values(requests: RequestCounts) -> dict[str, Any]:
    """Return the values of a code about requests that the client dropped."""
    return {
        "dropped": requests.dropped,
        "requests": requests.scheduled - requests.cancelled,
        "share": requests.dropped_share,
    }


# -- caveats: what belongs beside VALID ------------------------------------------------------------


def find_caveats(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield the caveats of a run, which reports show beside VALID, in their order.

    The measurement is sound, but statistics are withheld, or the load was not the requested one:
    failures, dropped requests, other lengths of responses or prompts, or too few requests for the
    virtual users.
    """
    summary = evidence.summary
    inputs = evidence.inputs
    yield from _too_many_failures(evidence, "failures", summary.requests.failed_by_server)
    yield from _withheld_statistics(summary)
    yield from _load_not_offered(evidence)
    if evidence.has_short_responses:
        yield make_code(
            "shortened",
            asked=inputs.requested_tokens,
            got=inputs.received_tokens,
            share=inputs.received_tokens / inputs.requested_tokens,
        )
    if evidence.has_wrong_prompt_lengths:
        yield make_code(
            "prompt_lengths", share=inputs.prompt_count_difference, limit=limits.PROMPT_LENGTHS
        )
    if evidence.is_concurrency_unfilled:
        virtual_users = evidence.largest_concurrency
        yield make_code(
            "lanes_unfilled",
            requests=inputs.sends,
            lanes=virtual_users,
            needed=REQUESTS_PER_USER * virtual_users,
        )


def _load_not_offered(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield, as a caveat, that the client dropped requests that it should have sent.

    If too many were dropped, the run is INVALID for that reason (`find_reasons`), and no caveat is
    needed. If the SLO is missed even without them, the run is valid and has the caveat.
    """
    requests = evidence.summary.requests
    drops_too_many = requests.dropped_share > evidence.manifest.limits.not_offered_share
    is_invalid = drops_too_many and not evidence.inputs.is_slo_missed
    if requests.dropped_share > limits.NOT_OFFERED and not is_invalid:
        yield make_code("not_offered", **_dropped_values(requests))


def _withheld_statistics(summary: Summary) -> Iterator[ReasonCode]:
    """Yield a caveat for each reason for which metrics or single statistics are withheld.

    Metrics that are unsound as a whole come first, with an empty list of statistics.
    """
    no_statistics: dict[str, list[str]] = {metric: [] for metric in summary.unsound}
    yield from _withheld_by_reason(summary.unsound, no_statistics)
    withheld = dict(summary.withheld)
    if summary.itl_ms is not None:
        withheld.pop("inter_chunk", None)  # its statistics are those of ITL
    reasons = {metric: statistics.why for metric, statistics in withheld.items()}
    names = {metric: list(statistics.ranges) for metric, statistics in withheld.items()}
    yield from _withheld_by_reason(reasons, names)


def _withheld_by_reason(
    reason_of_metric: Mapping[str, str], statistics_of_metric: Mapping[str, list[str]]
) -> Iterator[ReasonCode]:
    """Yield a caveat for each reason, with the withheld statistics of all its metrics."""
    reasons_in_order = dict.fromkeys(reason_of_metric.values())  # without repetitions
    for reason in reasons_in_order:
        statistics = {
            metric: statistics_of_metric[metric]
            for metric, metric_reason in reason_of_metric.items()
            if metric_reason == reason
        }
        yield make_code("withheld", statistics=statistics, why=reason)
