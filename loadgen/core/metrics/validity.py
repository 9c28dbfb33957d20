"""Judges whether a measurement can be trusted.

Pure. Every finding is a code with its values, and `reasons` has the sentences. A run is INVALID for
*reasons*. *Caveats* belong beside VALID: withheld metrics, or a load that is not the requested one.
*Warnings*, in `validity_warnings`, are what else to know. The limits come from
`loadgen.core.limits`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from loadgen.core import limits
from loadgen.core.metrics.client_use import worst_second
from loadgen.core.metrics.run_evidence import RunEvidence, make_code
from loadgen.core.metrics.timing_evidence import explain_lateness, is_local
from loadgen.core.metrics.validity_warnings import find_warnings
from loadgen.core.metrics.verdict import make_verdict
from loadgen.core.stats.quantiles import SUPPORT, deciding_quantile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadgen.core.metrics.request_counts import RequestCounts
    from loadgen.core.metrics.run_evidence import ReferenceLatency
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
    """Yield the reasons why a run is INVALID, in the order in which reports show them.

    Each reason is an error of the measurement and not of the server: too few requests, a client
    that was late, overloaded or failed, or a run that ended early.
    """
    failed_by_client = evidence.summary.requests.failed_by_client
    yield from _check_request_count(evidence.summary.requests)
    yield from _check_client_lateness(evidence)
    yield from _check_worker_load(evidence)
    yield from _check_dropped_requests(evidence)
    yield from _check_failures(evidence, "client_failures", failed_by_client)
    yield from _check_worker_deaths(evidence)

    if evidence.manifest.stopped_by is None:
        yield from reasons_of_state(evidence.summary.run.state)
    else:
        yield evidence.manifest.stopped_by


def _check_request_count(requests: RequestCounts) -> Iterator[ReasonCode]:
    """Yield a reason if too few requests have an outcome, which says what became of them."""
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


def _check_client_lateness(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield a reason if the client sent requests late, and one if arrival times are uncertain.

    Both are errors of the client in ms. They matter if they are a large share of the measured
    latency.
    """
    limits_of_run = evidence.manifest.limits
    summary = evidence.summary
    latency = evidence.inputs.reference_latency

    send_lag = _describe_excessive_error(summary.send_lag_ms, latency, limits_of_run.send_lag_share)
    if send_lag is not None:
        yield make_code("sent_late", **send_lag, **_cause_of_lateness(evidence))

    timestamp_error = _describe_excessive_error(
        summary.stamp_error_ms, latency, limits_of_run.stamp_error_share
    )
    if timestamp_error is not None:
        yield make_code("arrivals_unsure", **timestamp_error, **_cause_of_lateness(evidence))


def _cause_of_lateness(evidence: RunEvidence) -> dict[str, str | float | None]:
    """Return why the client sends or reads late, as values of a `ReasonCode`."""
    return explain_lateness(
        evidence.worker_samples,
        evidence.summary.window,
        is_local=is_local(evidence.manifest),
    )


def _describe_excessive_error(
    error_ms: Distribution, latency: ReferenceLatency, limit_share: float
) -> dict[str, str | float | None] | None:
    """Return the values of a `ReasonCode` about an error of the client that is too large.

    The error is too large if its deciding quantile is more than a share of a typical latency. The
    deciding quantile is the highest one for which there are enough values, such as the p99. Returns
    None if the error is small enough, or if there are no values.

    Args:
        error_ms: The distribution of the error, such as how much later than due requests were sent.
        latency: The latency that it is compared with: the p50 of TTFT, or of E2E.
        limit_share: The largest share of that latency that the error may have.
    """
    error = deciding_quantile(error_ms)
    latency_ms = latency.p50_ms
    if error is None or latency_ms is None or error.value_ms <= limit_share * latency_ms:
        return None

    return {
        "quantile": error.name,
        "value_ms": error.value_ms,
        "share": error.value_ms / latency_ms if latency_ms > 0 else None,
        "basis": latency.name,
        "basis_ms": latency_ms,
        "limit": limit_share,
    }


def _check_worker_load(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield a reason if a worker used more of its core, in any second, than the limit allows."""
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


def _check_dropped_requests(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield a reason if the run is invalid because the client dropped too many requests."""
    if _is_invalid_by_dropped_requests(evidence):
        values = _dropped_values(evidence.summary.requests)
        yield make_code("dropped", **values, limit=evidence.manifest.limits.not_offered_share)


def _is_invalid_by_dropped_requests(evidence: RunEvidence) -> bool:
    """Return True if the client dropped so many requests that the run is invalid.

    The largest share of dropped requests that the user accepts is `limits.not_offered_share`. Above
    it the run stays valid only if the server misses the SLO even without the dropped requests,
    because more load would not change that outcome.
    """
    dropped_share = evidence.summary.requests.dropped_share
    if dropped_share <= evidence.manifest.limits.not_offered_share:
        return False
    return not evidence.inputs.is_slo_missed


def _check_failures(evidence: RunEvidence, code: str, failed_requests: int) -> Iterator[ReasonCode]:
    """Yield the code if failures are a larger share of the requests than the limit allows.

    The limit is `failure_share`. It holds for failures of the client, which make a run INVALID, and
    for failures of the server, which leave it valid but are shown beside that verdict.

    Args:
        evidence: What the run is judged by.
        code: The code to yield.
        failed_requests: How many requests failed, by the client or by the server.
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


def _check_worker_deaths(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield a reason for each worker that died, with its node in a cluster."""
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
    """Yield the caveats of a run, in the order in which reports show them beside VALID.

    The measurement is sound, but statistics are withheld, or the load was not the requested one:
    failures, dropped requests, other lengths of responses or prompts, or too few requests for the
    virtual users.
    """
    failed_by_server = evidence.summary.requests.failed_by_server
    yield from _check_failures(evidence, "failures", failed_by_server)
    yield from _list_withheld_statistics(evidence.summary)
    yield from _check_offered_load(evidence)
    yield from _check_lengths(evidence)
    yield from _check_concurrency(evidence)


def _check_lengths(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield a caveat if responses are shorter than requested, and one if prompts differ in length.

    The server then had less or more work than the requested load.
    """
    inputs = evidence.inputs
    if evidence.has_short_responses:
        requested_tokens = inputs.requested_tokens
        received_tokens = inputs.received_tokens
        share = received_tokens / requested_tokens
        yield make_code("shortened", asked=requested_tokens, got=received_tokens, share=share)

    if evidence.has_wrong_prompt_lengths:
        difference = inputs.prompt_count_difference
        yield make_code("prompt_lengths", share=difference, limit=limits.PROMPT_LENGTHS)


def _check_concurrency(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield a caveat if a closed loop sent so few requests that some virtual users sent none.

    Virtual users are called lanes in results files.
    """
    if evidence.is_concurrency_unfilled:
        virtual_users = evidence.largest_concurrency
        yield make_code(
            "lanes_unfilled",
            requests=evidence.inputs.sends,
            lanes=virtual_users,
            needed=REQUESTS_PER_USER * virtual_users,
        )


def _check_offered_load(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield a caveat if the client dropped more than the share limits.NOT_OFFERED of the requests.

    The client drops a request instead of sending it if too many requests are in flight. If the run
    is invalid because of that, `_check_dropped_requests` yields a reason and no caveat is needed.
    """
    if _is_invalid_by_dropped_requests(evidence):
        return
    requests = evidence.summary.requests
    if requests.dropped_share > limits.NOT_OFFERED:
        yield make_code("not_offered", **_dropped_values(requests))


def _list_withheld_statistics(summary: Summary) -> Iterator[ReasonCode]:
    """Yield a caveat for each reason why metrics, or statistics of metrics, are not reported.

    The caveats about whole metrics come first, and then those about single statistics, such as p99.
    """
    whole_metrics = [
        _WithheldMetric(metric, statistics=[], reason=reason)
        for metric, reason in summary.withheld_metrics.items()
    ]
    yield from _group_by_reason(whole_metrics)

    has_itl = summary.itl_ms is not None
    single_statistics = []
    for metric, withheld in summary.withheld_statistics.items():
        is_listed_as_itl = metric == "inter_chunk" and has_itl  # the same gaps between events
        if not is_listed_as_itl:
            statistics = list(withheld.ranges)
            single_statistics.append(_WithheldMetric(metric, statistics, withheld.reason))
    yield from _group_by_reason(single_statistics)


class _WithheldMetric(NamedTuple):
    """A metric with the names of its statistics that are withheld ([] for all), and the reason."""

    metric: str
    statistics: list[str]
    reason: str


def _group_by_reason(withheld_metrics: Sequence[_WithheldMetric]) -> Iterator[ReasonCode]:
    """Yield a caveat for each reason, with the withheld statistics of all metrics that share it."""
    statistics_by_reason: dict[str, dict[str, list[str]]] = {}
    for withheld in withheld_metrics:
        statistics = statistics_by_reason.setdefault(withheld.reason, {})
        statistics[withheld.metric] = withheld.statistics
    for reason, statistics in statistics_by_reason.items():
        yield make_code("withheld", statistics=statistics, why=reason)
