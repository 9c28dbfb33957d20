"""Judges whether a measurement can be trusted.

Pure. Every finding is a code with its values, and `reasons` has the sentences. A run is INVALID for
*reasons*. *Caveats* belong beside VALID: withheld metrics, or a load that is not the requested one.
*Warnings* are what else to know. The limits come from `loadgen.core.limits`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from loadgen.core import limits
from loadgen.core.format import SYSTEM
from loadgen.core.limits import ValidityLimits
from loadgen.core.metrics import outcomes
from loadgen.core.metrics.client_use import worst_second
from loadgen.core.metrics.reasons import format_reason
from loadgen.core.metrics.timing_evidence import find_remedy, is_local
from loadgen.core.metrics.verdict import make_verdict
from loadgen.core.results.manifest import ReasonCode
from loadgen.core.stats.quantiles import SUPPORT, deciding_quantile
from loadgen.figures import guarded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from loadgen.core.metrics.accumulator import MetricAccumulator
    from loadgen.core.metrics.request_counts import RequestCounts
    from loadgen.core.metrics.sections import Recovery
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.metrics.verdict import Verdict
    from loadgen.core.results.manifest import RunManifest, WorkerSample
    from loadgen.core.server_metrics.hardware import SeenHardware
    from loadgen.core.stats.quantiles import Distribution

MIN_REQUESTS = SUPPORT["p50"]
"""A run with fewer requests supports no quantile and is not valid."""

REQUESTS_PER_USER = 5
"""A closed loop that was not filled is recommended to send so many requests per virtual user."""


class LatenessScale(NamedTuple):
    """The latency by which the lateness of the client is judged, also if it is not shown.

    It is the p50 of TTFT, or of E2E if responses are not streamed. `p50_ms` is None if no request
    has a value.
    """

    name: str
    p50_ms: float | None

    @classmethod
    def of_samples(cls, ttft: Distribution, e2e: Distribution) -> LatenessScale:
        """Return the scale of the distributions of TTFT and E2E, before anything is withheld."""
        if ttft.p50 is not None:
            return cls("TTFT p50", ttft.p50)
        return cls("E2E p50", e2e.p50)


class VerdictInputs(msgspec.Struct, frozen=True):
    """What the verdict needs beside the summary.

    Attributes:
        scale: The latency by which the lateness of the client is judged.
        dead_workers: The numbers of the workers that died.
        sends: Measured requests that were sent.
        prompt_count_difference: By what share the server's prompt token counts differ from ours.
        repeated_prompts: Requests with a prompt that was sent before.
        requested_tokens: Output tokens requested by the ok requests whose output was counted.
        received_tokens: Output tokens of these requests.
        missed: Whether the SLO is missed also without the requests that the client dropped.
        remarks: What is unusual about ok responses, with the number of responses.
    """

    scale: LatenessScale
    dead_workers: list[int]
    sends: int
    prompt_count_difference: float | None
    repeated_prompts: int
    requested_tokens: int
    received_tokens: int
    missed: bool | None = None
    remarks: dict[str, int] = {}


def judge_run(
    header: RunManifest,
    summary: Summary,
    inputs: VerdictInputs,
    samples: Sequence[WorkerSample],
) -> Verdict:
    """Return the verdict on a run, whose summary is complete but for the verdict."""
    judgement = _Judgement(header, summary, inputs, samples)
    return make_verdict(
        header.limits, judgement.reasons(), judgement.warnings(), judgement.caveats()
    )


def has_high_error_rate(summary: Summary) -> bool:
    """Return True if the server failed a larger share of the requests than `failure_share`."""
    requests = summary.requests
    limit = summary.verdict.limits.failure_share
    return requests.decided > 0 and requests.failed_by_server > limit * requests.decided


def reasons_of_state(state: str) -> tuple[ReasonCode, ...]:
    """Return why a run that ended in this state is INVALID, () if it is not for that."""
    return (_code(state),) if state in ("interrupted", "stopped") else ()


def token_count_conflicts(accumulator: MetricAccumulator) -> dict[str, str]:
    """Return the metrics that rest on token counts, with the reason to withhold them.

    They are withheld if the counts of too many responses conflict with their streams: fewer tokens
    than output events, or more than were requested.
    """
    counted = accumulator.sum("exact_counts")
    conflicting = accumulator.sum("conflicting_counts")
    if conflicting <= limits.CONTRADICTING_SHARE * counted:
        return {}
    understated = accumulator.sum("understated_counts")
    reason = _code(
        "counts_contradict",
        contradicting=conflicting,
        answers=counted,
        share=conflicting / counted,
        understated=understated,
        overstated=conflicting - understated,
        limit=limits.CONTRADICTING_SHARE,
    )
    return dict.fromkeys(("tokens", *guarded("counts_contradict")), format_reason(reason))


def without_first_token(accumulator: MetricAccumulator) -> dict[str, str]:
    """Return the metrics that need the time of the first token, with the reason to withhold them.

    They are withheld if too many responses do not show that time. Such a response has several
    tokens by the server's count, but no output event that could be timed: its output is in fields
    that are not known, or it came as one JSON object although a stream was requested.
    """
    ok = accumulator.sum("ok")
    unseen = accumulator.sum("tpot_no_output")
    if unseen <= limits.UNSEEN_OUTPUT * ok:
        return {}
    reason = _code(
        "output_unseen", unseen=unseen, answers=ok, share=unseen / ok, limit=limits.UNSEEN_OUTPUT
    )
    return dict.fromkeys(guarded("output_unseen"), format_reason(reason))


def _code(code: str, **values: Any) -> ReasonCode:
    return ReasonCode(code=code, values=values)


class _Judgement:
    """The findings about one run."""

    def __init__(
        self,
        header: RunManifest,
        summary: Summary,
        inputs: VerdictInputs,
        samples: Sequence[WorkerSample],
    ) -> None:
        self._header = header
        self._summary = summary
        self._inputs = inputs
        self._samples = samples

    # -- reasons: why the run is INVALID -----------------------------------------------------------

    def reasons(self) -> Iterator[ReasonCode]:
        """Yield why the run is INVALID."""
        yield from _too_few_requests(self._summary.requests)
        yield from self._late_client()
        yield from self._busy_worker()
        requests = self._summary.requests
        not_offered_limit = self._header.limits.not_offered_share
        if requests.dropped_share > not_offered_limit and not self._inputs.missed:
            yield _code("dropped", **_dropped_values(requests), limit=not_offered_limit)
        yield from self._failures("client_failures", requests.failed_by_client)
        yield from self._dead_workers()
        if self._header.stopped_by is None:
            yield from reasons_of_state(self._summary.run.state)
        else:
            yield self._header.stopped_by

    def _late_client(self) -> Iterator[ReasonCode]:
        """Yield that requests were sent late or that arrival times are uncertain."""
        summary = self._summary
        limits = self._header.limits
        errors = (
            ("sent_late", summary.send_lag_ms, limits.send_lag_share),
            ("arrivals_unsure", summary.stamp_error_ms, limits.stamp_error_share),
        )
        for code, error_ms, limit in errors:
            excess = _excess_values(error_ms, self._inputs.scale, limit)
            if excess is not None:
                remedy = find_remedy(self._samples, summary.window, is_local=is_local(self._header))
                yield _code(code, **excess, **remedy)

    def _busy_worker(self) -> Iterator[ReasonCode]:
        """Yield that a worker used more of its core than the limit allows."""
        busiest = worst_second(self._samples, self._summary.window, "cpu_share")
        limit = self._header.limits.cpu_share
        if busiest is not None and busiest.cpu_share > limit:
            yield _code(
                "generator_busy",
                worker=busiest.worker,
                cpu_share=busiest.cpu_share,
                at_s=busiest.t_s,
                limit=limit,
            )

    def _failures(self, code: str, failed: int) -> Iterator[ReasonCode]:
        """Yield the code if `failed` is a larger share of the requests than `failure_share`."""
        requests = self._summary.requests.decided
        limit = self._header.limits.failure_share
        if requests and failed > limit * requests:
            yield _code(
                code, failed=failed, requests=requests, share=failed / requests, limit=limit
            )

    def _dead_workers(self) -> Iterator[ReasonCode]:
        """Yield each worker that died, with its node in a cluster."""
        node_of_worker = {}
        if self._header.cluster:
            node_of_worker = {
                placed.worker: f"{placed.node} ({placed.address})"
                for placed in self._header.cluster.workers
            }
        for worker in self._inputs.dead_workers:
            yield _code("worker_died", worker=worker, node=node_of_worker.get(worker))

    # -- caveats: what belongs beside VALID --------------------------------------------------------

    def caveats(self) -> Iterator[ReasonCode]:
        """Yield what belongs beside VALID: withheld statistics, and what makes it another load."""
        requests = self._summary.requests
        yield from self._failures("failures", requests.failed_by_server)
        yield from self._withheld()
        dropped_share = requests.dropped_share
        is_no_reason = self._inputs.missed or dropped_share <= self._header.limits.not_offered_share
        if dropped_share > limits.NOT_OFFERED and is_no_reason:
            yield _code("not_offered", **_dropped_values(requests))
        if self._are_responses_short():
            requested = self._inputs.requested_tokens
            received = self._inputs.received_tokens
            yield _code("shortened", asked=requested, got=received, share=received / requested)
        if self._have_prompts_another_length():
            yield _code(
                "prompt_lengths",
                share=self._inputs.prompt_count_difference,
                limit=limits.PROMPT_LENGTHS,
            )
        users = self._largest_concurrency()
        if self._is_concurrency_unfilled():
            yield _code(
                "lanes_unfilled",
                requests=self._inputs.sends,
                lanes=users,
                needed=REQUESTS_PER_USER * users,
            )

    def _withheld(self) -> Iterator[ReasonCode]:
        """Yield a caveat for each reason for which metrics or statistics are withheld."""
        # An empty list of statistics stands for all of them.
        all_statistics: dict[str, list[str]] = {metric: [] for metric in self._summary.unsound}
        yield from _withheld_by_reason(self._summary.unsound, all_statistics)
        withheld = dict(self._summary.withheld)
        if self._summary.itl_ms is not None:
            withheld.pop("inter_chunk", None)  # its statistics are those of ITL
        yield from _withheld_by_reason(
            {metric: found.why for metric, found in withheld.items()},
            {metric: list(found.ranges) for metric, found in withheld.items()},
        )

    def _are_responses_short(self) -> bool:
        requested = self._inputs.requested_tokens
        return self._inputs.received_tokens < requested * (1 - limits.SHORTENED)

    def _largest_concurrency(self) -> int:
        """Return the concurrency of the largest measured closed loop, or 0 without one."""
        measured = (stage for stage in self._header.stages if stage.measured)
        return max((stage.concurrency or 0 for stage in measured), default=0)

    def _is_concurrency_unfilled(self) -> bool:
        """Return True if a closed loop sent fewer requests than its concurrency."""
        return 0 < self._inputs.sends < self._largest_concurrency()

    def _have_prompts_another_length(self) -> bool:
        """Return True if generated prompts are not as long as requested, by the server's count.

        Without the size of the chat template, the difference may be the template.
        """
        difference = self._inputs.prompt_count_difference
        if difference is None or self._header.template_tokens is None:
            return False
        lengths_requested = self._header.prompt_lengths_requested or self._header.random_words
        return lengths_requested and abs(difference) > limits.PROMPT_LENGTHS

    # -- warnings ----------------------------------------------------------------------------------

    def warnings(self) -> Iterator[ReasonCode]:
        """Yield what else to know about the run."""
        summary = self._summary
        yield from self._notes()
        yield from _hardware_differences(self._header.metadata, summary.hardware)
        if summary.run.state == "cut_off":
            yield _code("cut_off")
        yield from self._unfinished_requests()
        yield from _changed_limits(self._header.limits)
        yield from self._token_counts()
        for remark, count in self._inputs.remarks.items():
            yield _code(
                "responses_remarked", responses=count, ok=summary.requests.ok, remark=remark
            )
        yield from self._missing_server_timing()
        if summary.speculation is not None and self._header.random_words:
            yield _code("drafts_random")
        yield from self._unsupported_terms()
        yield from self._differing_gaps()
        yield from self._never_steady()

    def _notes(self) -> Iterator[ReasonCode]:
        """Yield the notes that were made when the run started, without what is disclosed since."""
        for text in self._header.notes:
            note = self._header.note_codes.get(text) or _code("note", text=text)
            if note.code != "undisclosed":
                yield note
                continue
            missing = _undisclosed(note.values["missing"], self._summary.hardware)
            if missing:
                yield _code("undisclosed", missing=missing)

    def _unfinished_requests(self) -> Iterator[ReasonCode]:
        """Yield that the end of the drain cut requests, and if that leaves the SLO undecided."""
        requests = self._summary.requests
        unfinished = requests.unfinished
        if not unfinished:
            return
        not_cancelled = requests.scheduled - requests.cancelled
        values = {
            "unfinished": unfinished,
            "requests": not_cancelled,
            "share": unfinished / not_cancelled,
            "drain_s": self._header.grace_s,
        }
        if outcomes.is_undecided(unfinished, not_cancelled):
            yield _code(
                "unfinished_undecided",
                **values,
                limit=limits.UNFINISHED_SHARE,
                timeout_s=self._header.timeout_s,
            )
        else:
            yield _code("unfinished", **values)

    def _token_counts(self) -> Iterator[ReasonCode]:
        """Yield what is wrong with token counts, and whether a cache served prompt tokens."""
        ok = self._summary.requests.ok
        sources = self._summary.tokens.sources
        if self._header.usage_asked:
            without_output = sources.output.get("unasked", 0)
            missing = ok - without_output - sources.output.get("server", 0)
            if missing:
                yield _code("usage_missing", missing=missing, ok=ok)
        estimated = max(sources.input.get("estimate", 0), sources.output.get("estimate", 0))
        if estimated:
            yield _code("counts_estimated", estimated=estimated, ok=ok)
        yield from self._prompt_count_difference()
        yield from self._cached_prompts()
        mismatch_share = self._summary.tokens.length_mismatch_share
        is_mismatch = mismatch_share is not None and mismatch_share > limits.LENGTH_MISMATCH
        if is_mismatch and not self._are_responses_short():
            yield _code("lengths_differ", share=mismatch_share, limit=limits.LENGTH_MISMATCH)
        if self._inputs.repeated_prompts:
            yield _code("prompts_repeated", requests=self._inputs.repeated_prompts)
        changes = _replica_changes(self._summary.recovery)
        if changes:
            yield _code("replicas_changed", changes=changes)

    def _prompt_count_difference(self) -> Iterator[ReasonCode]:
        """Yield that the server's prompt token counts differ from ours, unless it is a caveat."""
        difference = self._inputs.prompt_count_difference or 0.0
        is_caveat = self._have_prompts_another_length()
        if abs(difference) > limits.COUNT_DISAGREEMENT and not is_caveat:
            yield _code(
                "prompt_counts_differ",
                share=difference,
                limit=limits.COUNT_DISAGREEMENT,
                template_known=self._header.template_tokens is not None,
            )

    def _cached_prompts(self) -> Iterator[ReasonCode]:
        """Yield that the share of cached prompt tokens is not the requested one."""
        cached_share = self._summary.tokens.cached_share
        requested_share = self._header.cache_asked
        if cached_share is None:
            if requested_share is not None:
                yield _code("cache_unsaid", asked=requested_share)
            return
        if (
            requested_share is not None
            and abs(cached_share - requested_share) > limits.CACHED_SHARE
        ):
            yield _code(
                "cache_differs",
                asked=requested_share,
                share=cached_share,
                limit=limits.CACHED_SHARE,
            )
        elif cached_share > limits.CACHED_SHARE and not self._header.shares_prompts:
            yield _code("cached", share=cached_share)

    def _missing_server_timing(self) -> Iterator[ReasonCode]:
        """Yield that no response had the timing that the server was asked for."""
        is_noted = any(
            note.code == "server_timing_missing" for note in self._header.note_codes.values()
        )
        has_none = self._summary.requests.ok and not self._summary.splits.accounted
        if self._header.server_timing and has_none and not is_noted:
            yield _code("server_timing_missing", server=self._summary.target.server or "it")

    def _unsupported_terms(self) -> Iterator[ReasonCode]:
        """Yield the SLO terms that rest on too few samples."""
        for term in self._summary.goodput.slo:
            if not term.supported and not term.undecided:
                yield _code(
                    "slo_samples",
                    metric=term.metric,
                    percentile=term.quantile * 100,
                    samples=term.count,
                    needed=term.needed,
                )

    def _differing_gaps(self) -> Iterator[ReasonCode]:
        """Yield that the arrivals were not as planned."""
        variation = self._summary.load.gap_variation
        planned = self._summary.load.gap_variation_planned
        if variation is None or planned is None or self._inputs.sends <= limits.GAPS_NEEDED:
            return
        if abs(variation - planned) > limits.GAP_VARIATION:
            yield _code("gaps_differ", variation=variation, planned=planned)

    def _never_steady(self) -> Iterator[ReasonCode]:
        """Yield that the load never ran alone and in full, so that there is no steady state."""
        if self._is_concurrency_unfilled() or self._summary.window.steady.duration_s is not None:
            return
        users = self._largest_concurrency()
        load = self._summary.load
        if users:
            has_lasted = load.achieved_rps is not None and self._inputs.sends > users
        else:
            has_lasted = load.offered_rps is not None
        if has_lasted:
            yield _code("never_steady", because="lanes" if users else "warmup")


def _withheld_by_reason(
    reason_of_metric: Mapping[str, str], statistics_of_metric: Mapping[str, list[str]]
) -> Iterator[ReasonCode]:
    """Yield a caveat for each reason, with the withheld statistics of all its metrics."""
    for why in dict.fromkeys(reason_of_metric.values()):
        statistics = {
            metric: statistics_of_metric[metric]
            for metric, metric_reason in reason_of_metric.items()
            if metric_reason == why
        }
        yield _code("withheld", statistics=statistics, why=why)


def _too_few_requests(requests: RequestCounts) -> Iterator[ReasonCode]:
    """Yield that there are too few requests with an outcome, and why."""
    if requests.decided >= MIN_REQUESTS:
        return
    if requests.decided:
        yield _code("too_few", requests=requests.decided, needed=MIN_REQUESTS)
    elif requests.unfinished:
        yield _code("all_unfinished", unfinished=requests.unfinished)
    elif requests.cancelled:
        yield _code("all_cancelled", cancelled=requests.cancelled)
    else:
        yield _code("none_due")


def _dropped_values(requests: RequestCounts) -> dict[str, Any]:
    """Return the values of a reason about requests that the client dropped."""
    return {
        "dropped": requests.dropped,
        "requests": requests.scheduled - requests.cancelled,
        "share": requests.dropped_share,
    }


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


def _changed_limits(changed: ValidityLimits) -> Iterator[ReasonCode]:
    """Yield the limits of validity that the user changed."""
    defaults = ValidityLimits()
    for field in defaults.__struct_fields__:
        value = getattr(changed, field)
        default = getattr(defaults, field)
        if value != default:
            yield _code("limit_changed", limit=field, value=value, default=default)


def _undisclosed(
    missing: Mapping[str, list[str]], hardware: SeenHardware | None
) -> dict[str, list[str]]:
    """Return the keys that the description of the system leaves out, by who asks for them.

    What the metrics pages of the hardware say counts as disclosed.
    """
    disclosed = set() if hardware is None else hardware.told
    left_out = {who: [key for key in keys if key not in disclosed] for who, keys in missing.items()}
    return {who: keys for who, keys in left_out.items() if keys}


def _hardware_differences(
    metadata: Mapping[str, str], hardware: SeenHardware | None
) -> Iterator[ReasonCode]:
    """Yield what the description of the system and the metrics page of the hardware disagree on."""
    if hardware is None:
        return
    power_limit = None if hardware.power_limit_w is None else f"{hardware.power_limit_w:g}"
    for key, seen in (("driver", hardware.driver), ("power_limit_w", power_limit)):
        declared = metadata.get(f"{SYSTEM}accelerator.{key}")
        if not declared or not seen:
            continue
        if seen != declared and not seen.startswith(f"{declared}."):
            yield _code("hardware_differs", key=f"accelerator.{key}", said=declared, seen=seen)


def _replica_changes(recovery: Sequence[Recovery]) -> list[tuple[str, str, float]]:
    """Return the changes of the number of replicas: what it was, what it became, and when."""
    return [
        (change.spike, change.after, change.at_s)
        for change in recovery
        if change.event in ("loss", "scale_up")
    ]
