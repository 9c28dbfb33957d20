"""Judges whether a measurement can be trusted.

Pure. Every finding is a code with its values, and `reasons` has the sentences. A run is INVALID for
*reasons*. *Caveats* belong beside VALID: withheld metrics, or a load that is not the requested one.
*Warnings*, in `validity_warnings`, are what else to know. The limits come from
`loadgen.core.limits`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from loadgen.core import limits
from loadgen.core.metrics.client_use import find_worst_second
from loadgen.core.metrics.run_evidence import RunEvidence, make_code
from loadgen.core.metrics.timing_evidence import explain_lateness, is_local
from loadgen.core.metrics.validity_warnings import find_warnings
from loadgen.core.metrics.verdict import make_verdict
from loadgen.core.stats.quantiles import NEEDED_SAMPLES, deciding_quantile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadgen.core.metrics.request_counts import RequestCounts
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.metrics.verdict import Verdict
    from loadgen.core.results.manifest import ReasonCode
    from loadgen.core.stats.quantiles import Distribution

MIN_REQUESTS = NEEDED_SAMPLES["p50"]
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


def find_reasons_of_state(state: str) -> tuple[ReasonCode, ...]:
    """Return why a run that ended in this state is INVALID, () if it is not for that."""
    return (make_code(state),) if state in ("interrupted", "stopped") else ()


# -- reasons: why the run is INVALID ---------------------------------------------------------------


def find_reasons(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield the reasons why a run is INVALID, in the order in which reports show them.

    Each reason is an error of the measurement, such as an overloaded client, and not of the server.
    """
    failed_by_client = evidence.summary.requests.failed_by_client
    yield from _check_request_count(evidence.summary.requests)
    yield from _check_client_lateness(evidence)
    yield from _check_worker_load(evidence)
    yield from _check_dropped_requests(evidence)
    yield from _check_failures(evidence, "client_failures", failed_by_client)
    yield from _check_worker_deaths(evidence)

    # `stopped_by` is the rule that ended the run early, if any.
    if evidence.manifest.stopped_by is None:
        yield from find_reasons_of_state(evidence.summary.run.state)
    else:
        yield evidence.manifest.stopped_by


def _check_request_count(requests: RequestCounts) -> Iterator[ReasonCode]:
    """Yield a reason if too few requests have succeeded or failed."""
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
    """Yield a reason if the client sent requests late, and one if arrival times are uncertain."""
    summary = evidence.summary
    limits_of_run = evidence.manifest.limits
    yield from _check_client_error(
        evidence, "sent_late", summary.send_lag_ms, limits_of_run.send_lag_share
    )
    yield from _check_client_error(
        evidence, "arrivals_unsure", summary.stamp_error_ms, limits_of_run.stamp_error_share
    )


def _check_client_error(
    evidence: RunEvidence, code: str, errors_ms: Distribution, limit_share: float
) -> Iterator[ReasonCode]:
    """Yield a reason if an error of the client, such as late sending, is large for the latency.

    The latency is the median TTFT, or the median E2E of responses that are not streamed. An error
    of 10 ms is large for a TTFT of 20 ms, and small for one of 2 s.

    Args:
        evidence: The manifest and the metrics of the run.
        code: The code of the reason.
        errors_ms: The distribution of the errors, such as how much later than due each request was
            sent.
        limit_share: The largest share of the median latency that the errors may have.
    """
    high_error = deciding_quantile(errors_ms)  # p99, or a lower quantile if there are few values
    latency = evidence.inputs.reference_latency
    if high_error is None or latency.p50_ms is None:
        return

    is_error_small = high_error.value_ms <= limit_share * latency.p50_ms
    if is_error_small:
        return

    lateness = explain_lateness(
        evidence.worker_samples, evidence.summary.window, is_local=is_local(evidence.manifest)
    )
    yield make_code(
        code,
        # The error, compared with the latency.
        quantile=high_error.name,
        value_ms=high_error.value_ms,
        share=high_error.value_ms / latency.p50_ms if latency.p50_ms > 0 else None,
        basis=latency.name,
        basis_ms=latency.p50_ms,
        limit=limit_share,
        # The cause of the error, and what to do about it.
        **lateness.sentence_values,
    )


def _check_worker_load(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield a reason if a worker used more of its core, in any second, than the limit allows."""
    busiest = find_worst_second(evidence.worker_samples, evidence.summary.window, "cpu_share")
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
    """Return True if a run is invalid because the client did not send so many requests."""
    accepted_share = evidence.manifest.limits.not_offered_share
    if evidence.summary.requests.dropped_share <= accepted_share:
        return False

    # If the server misses the SLO already, the dropped requests would not change that.
    return not evidence.inputs.is_slo_missed


def _check_failures(evidence: RunEvidence, code: str, failed_requests: int) -> Iterator[ReasonCode]:
    """Yield the code if failures are a larger share of the requests than the limit allows.

    Args:
        evidence: The manifest and the metrics of the run.
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
    """Yield the caveats of a valid run, in the order in which reports show them.

    With a caveat, the load was not the requested one, or some metrics are not reported.
    """
    failed_by_server = evidence.summary.requests.failed_by_server
    yield from _check_failures(evidence, "failures", failed_by_server)
    yield from _list_withheld_statistics(evidence.summary)
    yield from _check_offered_load(evidence)
    yield from _check_lengths(evidence)
    yield from _check_concurrency(evidence)


def _check_lengths(evidence: RunEvidence) -> Iterator[ReasonCode]:
    """Yield a caveat if responses are too short, and one if prompts have wrong lengths."""
    if evidence.has_short_responses:
        requested_tokens = evidence.inputs.requested_tokens
        received_tokens = evidence.inputs.received_tokens
        yield make_code(
            "shortened",
            asked=requested_tokens,
            got=received_tokens,
            share=received_tokens / requested_tokens,
        )

    if evidence.has_wrong_prompt_lengths:
        yield make_code(
            "prompt_lengths",
            share=evidence.inputs.prompt_count_difference,
            limit=limits.PROMPT_LENGTHS,
        )


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
    """Yield a caveat if the client dropped many requests, because too many were in flight."""
    if _is_invalid_by_dropped_requests(evidence):
        return  # the verdict says so already

    requests = evidence.summary.requests
    if requests.dropped_share > limits.NOT_OFFERED:
        yield make_code("not_offered", **_dropped_values(requests))


def _list_withheld_statistics(summary: Summary) -> Iterator[ReasonCode]:
    """Yield one caveat for each reason why values are missing in the summary of a run.

    First come the metrics without any statistic, then the metrics without some statistics, such as
    the p99.
    """
    withheld_metrics = [
        _Withheld(metric, statistics=[], reason=reason)
        for metric, reason in summary.withheld_metrics.items()
    ]
    yield from _group_by_reason(withheld_metrics)

    withheld_statistics = [
        _Withheld(metric, list(withheld.ranges), withheld.reason)
        for metric, withheld in summary.withheld_statistics.items()
        if not _is_repeated_by_itl(metric, summary)
    ]
    yield from _group_by_reason(withheld_statistics)


def _is_repeated_by_itl(metric: str, summary: Summary) -> bool:
    """Return True for the inter-chunk latency if the run has an inter-token latency (ITL).

    Both are then the gaps between output events, so a reader needs only one of them.
    """
    has_itl = summary.itl_ms is not None
    return metric == "inter_chunk" and has_itl


class _Withheld(NamedTuple):
    """What is not reported of a metric, and why.

    Attributes:
        metric: The metric.
        statistics: The names of its statistics that are withheld. Empty if it is withheld with all
            of its statistics.
        reason: Why, as a sentence.
    """

    metric: str
    statistics: list[str]
    reason: str


def _group_by_reason(withheld: Sequence[_Withheld]) -> Iterator[ReasonCode]:
    """Yield one caveat for each reason, which lists all metrics that are withheld for it."""
    statistics_by_reason: dict[str, dict[str, list[str]]] = {}
    for metric, statistics, reason in withheld:
        statistics_by_metric = statistics_by_reason.setdefault(reason, {})
        statistics_by_metric[metric] = statistics

    for reason, statistics_by_metric in statistics_by_reason.items():
        yield make_code("withheld", statistics=statistics_by_metric, why=reason)
