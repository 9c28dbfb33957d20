"""Judges a run by the rules of MLPerf Inference, with LoadGen's arithmetic.

Pure: takes a test (`rules.py`) and columns of records, returns an `MlperfResult` that is VALID or
INVALID, with reasons. Values are integer nanoseconds, computed as LoadGen 6.0.17 does. LoadGen
counts responses of one token wrongly; this defect is reproduced only to compare results with
LoadGen's own.
Every result is "MLPerf-style, unofficial": `DISCLOSURE` is printed with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.core import format
from loadgen.core.errors import OK, SLO_MISSED, UNSOUND
from loadgen.core.results.record import STATUS
from loadgen.core.stats.early_stopping import needed_queries
from loadgen.core.stats.quantiles import quantile_index
from loadgen.mlperf.loadgen_spread import PERCENTILES, LoadGenSpread
from loadgen.mlperf.rules import Test

DISCLOSURE = (
    "MLPerf-style, unofficial: not verified by MLCommons Association. The MLPerf name and logo are "
    "registered and unregistered trademarks of MLCommons Association; see https://mlcommons.org "
    "for the official results."
)

END_TOKEN = 2
"""The token that ends a response, from run_verification.py of TEST06."""

UNRESOLVED = 1 << 62
"""The latency of a query that never completed, in ns: above every limit."""

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000


# -- a run, reduced to its queries -----------------------------------------------------------------


class QueryTrace(NamedTuple):
    """One entry per issued query, in the order of issue. All times are in ns.

    A query that did not complete has `ttft_ns` and `latency_ns` of UNRESOLVED, and no tokens.

    Attributes:
        due_ns: The scheduled time, from the start of the schedule.
        ttft_ns: The time to the first token, from the scheduled time.
        latency_ns: The time to the end of the response, from the scheduled time.
        tokens: The number of output tokens.
    """

    due_ns: NDArray[np.int64]
    ttft_ns: NDArray[np.int64]
    latency_ns: NDArray[np.int64]
    tokens: NDArray[np.int64]

    @property
    def is_resolved(self) -> NDArray[np.bool_]:
        """True for each query that completed."""
        return self.latency_ns < UNRESOLVED


def build_trace(
    columns: Mapping[str, NDArray[np.int64]], origin_ns: int = 0, *, is_one_query: bool = False
) -> QueryTrace:
    """Return the queries of a run in the order of issue, from the columns of its request records.

    The records may be in any order. A request that failed counts as not completed, so it gets the
    latency UNRESOLVED, which is above every limit. Records that never became due, because the load
    was stopped before, are left out.

    Args:
        columns: Columns by the names of `record.FIELDS`. `slot` is the number of a request in the
            schedule. A timestamp is -1 if its event never happened.
        origin_ns: When LoadGen's clock starts: the first scheduled time of the measured stage.
        is_one_query: Whether all records belong to one query, which is issued at the origin
            (Offline), no matter when a closed loop sent them.
    """
    order = _order_of_issue(columns["due_ns"], columns["slot"])
    issued = {name: column[order] for name, column in columns.items()}

    due_ns = issued["due_ns"]
    if is_one_query:
        due_ns = np.full(len(order), origin_ns, np.int64)

    end_ns = issued["end_ns"]
    first_output_ns = _first_output_times(issued["first_token_ns"], end_ns)
    is_completed = (issued["status"] == STATUS["ok"]) & (end_ns >= 0)

    ttft_ns = np.where(is_completed, first_output_ns - due_ns, UNRESOLVED)
    latency_ns = np.where(is_completed, end_ns - due_ns, UNRESOLVED)
    known_tokens = np.maximum(issued["output_tokens"], 0)  # -1 if the count is not known
    tokens = np.where(is_completed, known_tokens, 0)

    return QueryTrace(
        due_ns=due_ns - origin_ns, ttft_ns=ttft_ns, latency_ns=latency_ns, tokens=tokens
    )


def _first_output_times(
    first_token_ns: NDArray[np.int64], end_ns: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return when the first output of each response came.

    A response that was not streamed has a `first_token_ns` of -1. Its first output comes at its
    end. For example, first tokens at [5, -1] and ends at [9, 8] give [5, 8].
    """
    is_streamed = first_token_ns >= 0
    return np.where(is_streamed, first_token_ns, end_ns)


def _order_of_issue(due_ns: NDArray[np.int64], slot: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indexes of the issued records, by scheduled time and then by schedule number.

    Records that never became due have a `due_ns` of -1 and are left out. For example, the times
    [7, -1, 3] give the indexes [2, 0].
    """
    by_due_time_and_slot = np.lexsort((slot, due_ns))
    is_issued = due_ns[by_due_time_and_slot] >= 0
    return by_due_time_and_slot[is_issued]


# -- the result ------------------------------------------------------------------------------------


class Check(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "percentile_ns": "value_ns",
        "is_within_limit": "met",
        "is_below_limit": "checker_met",
        "violations": "over",
        "query_count": "count",
        "required_queries": "needed",
    },
):
    """The check of the limit of one metric.

    Attributes:
        metric: "ttft" or "tpot".
        limit_ns: The limit of the percentile.
        percentile_ns: The measured percentile, or None if it falls on a query that never completed.
        is_within_limit: Whether the percentile is at most the limit, as LoadGen requires.
        is_below_limit: Whether it is less than the limit, as the submission checker requires.
        violations: How many queries exceed the limit, with those that never completed.
        query_count: The number of queries.
        required_queries: How many queries early stopping requires for so many violations.
        early_stopping_met: Whether there are enough queries for early stopping.
    """

    metric: str
    limit_ns: int
    percentile_ns: int | None
    is_within_limit: bool
    is_below_limit: bool
    violations: int
    query_count: int
    required_queries: int
    early_stopping_met: bool

    @property
    def missing_queries(self) -> int:
        """How many more queries, all under the limit, early stopping requires."""
        return max(0, self.required_queries - self.query_count)


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a result is INVALID.

    The kind is "limit" if a limit or early stopping was missed. It is "size" if the run does not
    have enough complete queries to be judged: it is too short, has too few queries, or queries
    failed or have no tokens.
    """

    kind: Literal["limit", "size"]
    text: str


class MlperfResult(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "full_run_samples_per_s": "whole_samples_per_s",
        "full_run_tokens_per_s": "whole_tokens_per_s",
        "sustained_reason": "sustained_why",
    },
):
    """The result of a run, stored as `mlperf.json`. Rates are per second.

    Attributes:
        benchmark: The benchmark, for example "llama2-70b".
        scenario: "server", "interactive" or "offline".
        round: The round whose limits and seeds were used.
        valid: Whether the run is VALID by LoadGen's rules.
        reasons: Why it is INVALID.
        checker_valid: Whether both percentiles are also strictly below the limits, as the
            submission checker requires. Its other checks were not made.
        queries: The queries that were issued; in Offline, the samples.
        resolved: How many of them completed: LoadGen's word for a complete response.
        tokens: The output tokens of all of them.
        one_token_replies: How many responses have one token. They have no TPOT.
        scheduled_s: The length of the schedule.
        min_duration_s: The minimum duration that was required.
        min_duration_met: Whether the run was long enough.
        min_queries: The minimum number of queries that was required.
        min_queries_met: Whether there were enough queries.
        checks: The check of each limit, empty in Offline.
        scheduled_samples_per_s: The rate of the schedule.
        completed_samples_per_s: The rate until the query that was issued last completed.
        completed_tokens_per_s: The output tokens in the same window.
        full_run_samples_per_s: The rate until the last completion.
        full_run_tokens_per_s: The output tokens until the last completion.
        latency: The distribution of the time to the end of the response.
        ttft: That of the time to the first token; None in Offline.
        tpot: That of the time per output token; None in Offline.
        dataset: The name of the data set.
        samples: The number of samples of the data set.
        target_qps: The rate that was requested.
        notes: What a reader of the result has to know.
        errors: What went wrong in the run, as in LoadGen's log.
        warnings: What speaks against relying on the result, as in LoadGen's log.
        simulated: Whether a performance model responded.
        sustained: Whether the rate can go on for longer than the run; None if not verified.
        sustained_reason: Why it can or cannot, or what the run shows about it.
        rules_qps: The peak by the rules alone, if a search confirmed both it and this rate.
        longer_minutes: Minutes of load that would show whether the rate is sustained.
        disclosure: That the result is unofficial.
    """

    benchmark: str
    scenario: str
    round: str
    valid: bool
    reasons: tuple[Reason, ...]
    checker_valid: bool
    queries: int
    resolved: int
    tokens: int
    one_token_replies: int
    scheduled_s: float
    min_duration_s: float
    min_duration_met: bool
    min_queries: int
    min_queries_met: bool
    checks: tuple[Check, ...]
    scheduled_samples_per_s: float | None
    completed_samples_per_s: float | None
    completed_tokens_per_s: float | None
    full_run_samples_per_s: float | None
    full_run_tokens_per_s: float | None
    latency: LoadGenSpread
    ttft: LoadGenSpread | None
    tpot: LoadGenSpread | None
    dataset: str = ""
    samples: int
    target_qps: float | None = None
    notes: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    simulated: bool = False
    sustained: bool | None = None
    sustained_reason: str = ""
    rules_qps: float | None = None
    longer_minutes: float | None = None
    disclosure: str = DISCLOSURE

    def has_same_values(self, other: MlperfResult) -> bool:
        """Return whether two results are equal apart from the wording of their sentences.

        Another version of loadgen may word a reason or a warning differently. Their kinds and
        their number count.
        """
        return _without_wording(self) == _without_wording(other)

    @property
    def is_valid_by_rules_only(self) -> bool:
        """Whether it is VALID, but not shown to be sustained for longer than the run."""
        return self.valid and self.scenario != "offline" and self.sustained is not True

    @property
    def exit_code(self) -> int:
        """0 if VALID, 3 if the run is too short or incomplete, else 1 for a missed limit."""
        if self.valid:
            return OK
        return UNSOUND if any(reason.kind == "size" for reason in self.reasons) else SLO_MISSED


def _without_wording(result: MlperfResult) -> MlperfResult:
    """Return a result whose sentences are empty, so that two results can be compared.

    The number of sentences and the kinds of reasons are kept.
    """
    return msgspec.structs.replace(
        result,
        reasons=tuple(Reason(kind=reason.kind, text="") for reason in result.reasons),
        notes=("",) * len(result.notes),
        errors=("",) * len(result.errors),
        warnings=("",) * len(result.warnings),
        sustained_reason="",
        disclosure="",
    )


# -- judging ---------------------------------------------------------------------------------------


class MlperfRunFacts(NamedTuple):
    """What is known about a run apart from its queries.

    Attributes:
        dataset: The name of the data set.
        target_qps: The rate that was requested.
        notes: What a reader of the result has to know.
        errors: What went wrong, apart from errors that the queries show.
        warnings: What speaks against relying on the result.
        simulated: Whether a performance model responded.
    """

    dataset: str = ""
    target_qps: float | None = None
    notes: Sequence[str] = ()
    errors: Sequence[str] = ()
    warnings: Sequence[str] = ()
    simulated: bool = False


def judge_trace(
    trace: QueryTrace,
    test: Test,
    facts: MlperfRunFacts | None = None,
    *,
    with_one_token_defect: bool = False,
) -> MlperfResult:
    """Return the result of a run by the rules of MLPerf: VALID or INVALID, with its metrics.

    Args:
        trace: The latencies and token counts of the queries of the run.
        test: The requirements of the rules, such as limits and the minimum duration.
        facts: What is known about the run apart from its queries, such as the data set.
        with_one_token_defect: Whether to count responses of one token as wrongly as LoadGen does:
            with no tokens and a negative time per output token (TPOT). This is only for comparing
            a result with one that LoadGen itself computed.
    """
    span = _RunSpan.from_trace(trace, is_offline=test.scenario == "offline")
    token_counts = _count_tokens(trace, with_one_token_defect=with_one_token_defect)

    if with_one_token_defect:
        tpot_ns = _tpot_values_with_defect(trace)
    else:
        tpot_ns = _tpot_values(trace)

    checks = _check_latency_limits(test, trace.ttft_ns, tpot_ns)
    query_errors = _query_errors(trace)
    judgment = _Judgment(
        span=span,
        token_counts=token_counts,
        latency=_compute_spread(trace.latency_ns),
        ttft=_compute_spread(trace.ttft_ns),
        tpot=_compute_spread(tpot_ns),
        checks=checks,
        query_errors=query_errors,
        reasons=tuple(_invalid_reasons(test, span, query_errors, checks)),
    )

    return _create_result(test, facts or MlperfRunFacts(), judgment)


class _Judgment(NamedTuple):
    """What the queries of a run show: its metrics, and why it is INVALID.

    Attributes:
        span: How many queries the run has, and how long it took.
        token_counts: The output tokens.
        latency: The distribution of the time to the end of the response.
        ttft: The distribution of the time to the first token.
        tpot: The distribution of the time per output token.
        checks: The check of each latency limit.
        query_errors: Sentences about queries that went wrong.
        reasons: Why the run is INVALID; empty if it is VALID.
    """

    span: _RunSpan
    token_counts: _TokenCounts
    latency: LoadGenSpread
    ttft: LoadGenSpread
    tpot: LoadGenSpread
    checks: tuple[Check, ...]
    query_errors: tuple[str, ...]
    reasons: tuple[Reason, ...]


def _create_result(test: Test, facts: MlperfRunFacts, judgment: _Judgment) -> MlperfResult:
    """Return the result of a run. It has no TTFT and no TPOT in Offline, which does not limit them.

    Args:
        test: The requirements of the rules.
        facts: What is known about the run apart from its queries.
        judgment: What its queries show.
    """
    is_offline = test.scenario == "offline"
    is_valid = not judgment.reasons
    is_below_limits = all(check.is_below_limit for check in judgment.checks)
    span = judgment.span
    rates = _compute_rates(span, judgment.token_counts.total)

    return MlperfResult(
        # the test
        benchmark=test.benchmark,
        scenario=test.scenario,
        round=test.round,
        samples=test.samples,
        min_duration_s=test.min_duration_ns / NS_PER_S,
        min_queries=test.min_queries,
        # the verdict
        valid=is_valid,
        reasons=judgment.reasons,
        checker_valid=is_valid and is_below_limits,
        min_duration_met=span.judged_duration_ns >= test.min_duration_ns,
        min_queries_met=span.issued_queries >= test.min_queries,
        checks=judgment.checks,
        # counts
        queries=span.issued_queries,
        resolved=span.completed_queries,  # MLPerf calls a completed query "resolved"
        tokens=judgment.token_counts.total,
        one_token_replies=judgment.token_counts.one_token_replies,
        scheduled_s=span.schedule_ns / NS_PER_S,
        # rates
        scheduled_samples_per_s=rates.scheduled_samples_per_s,
        completed_samples_per_s=rates.completed_samples_per_s,
        completed_tokens_per_s=rates.completed_tokens_per_s,
        full_run_samples_per_s=rates.full_run_samples_per_s,
        full_run_tokens_per_s=rates.full_run_tokens_per_s,
        # distributions
        latency=judgment.latency,
        ttft=None if is_offline else judgment.ttft,
        tpot=None if is_offline else judgment.tpot,
        # other facts about the run
        dataset=facts.dataset,
        target_qps=facts.target_qps,
        notes=tuple(facts.notes),
        errors=(*judgment.query_errors, *facts.errors),
        warnings=tuple(facts.warnings),
        simulated=facts.simulated,
    )


class _Rates(NamedTuple):
    """The rates of a run, with the names of the fields of `MlperfResult`. None if not known."""

    scheduled_samples_per_s: float | None
    completed_samples_per_s: float | None
    completed_tokens_per_s: float | None
    full_run_samples_per_s: float | None
    full_run_tokens_per_s: float | None


def _compute_rates(span: _RunSpan, total_tokens: int) -> _Rates:
    """Return the rates of a run: counts of samples and tokens, divided by the time they took.

    LoadGen's "completed" rates end when the query that was issued last completes. The rates of the
    full run end with the last completion of any query, which may be later.

    Args:
        span: How many queries the run has, and how long it took.
        total_tokens: The output tokens of all queries.
    """
    return _Rates(
        scheduled_samples_per_s=_rate_per_s(span.arrival_intervals, span.schedule_ns),
        completed_samples_per_s=_rate_per_s(span.loadgen_window_samples, span.loadgen_window_ns),
        completed_tokens_per_s=_rate_per_s(total_tokens, span.loadgen_window_ns),
        full_run_samples_per_s=_rate_per_s(span.completed_queries, span.full_run_ns),
        full_run_tokens_per_s=_rate_per_s(total_tokens, span.full_run_ns),
    )


class _RunSpan(NamedTuple):
    """How many queries a run has, and the times over which LoadGen counts. Times are in ns.

    Attributes:
        issued_queries: The queries that were issued; in Offline, the samples.
        completed_queries: How many of them got a complete response.
        schedule_ns: The length of the schedule: when the last query was scheduled.
        judged_duration_ns: What the rules compare with the minimum duration: in Offline the time
            until the last completion, otherwise the length of the schedule.
        full_run_ns: The time until the last completion of any query. None if none completed.
        loadgen_window_ns: The window of LoadGen's completed rates: until the query that was issued
            last completed, even if others complete later; in Offline until the last completion.
            None if that query did not complete.
        loadgen_window_samples: The count that LoadGen divides by this window for its rate of
            samples. In Offline it is the number of samples. Otherwise it is one less than the
            number of queries, because LoadGen counts the intervals between arrivals.
    """

    issued_queries: int
    completed_queries: int
    schedule_ns: int
    judged_duration_ns: int
    full_run_ns: int | None
    loadgen_window_ns: int | None
    loadgen_window_samples: int

    @property
    def arrival_intervals(self) -> int:
        """The number of intervals between arrivals: n arrivals have n - 1 of them."""
        return self.issued_queries - 1

    @classmethod
    def from_trace(cls, trace: QueryTrace, *, is_offline: bool) -> _RunSpan:
        """Return the counts and the times of a run, as LoadGen defines them for its scenario."""
        return _measure_offline_span(trace) if is_offline else _measure_server_span(trace)


def _measure_offline_span(trace: QueryTrace) -> _RunSpan:
    """Return the counts and the times of an Offline run.

    All samples belong to one query at the start, so every time ends with the last completion.
    """
    full_run_ns = _last_completion_ns(trace)
    return _RunSpan(
        issued_queries=len(trace.due_ns),
        completed_queries=int(trace.is_resolved.sum()),
        schedule_ns=_last_scheduled_ns(trace),
        judged_duration_ns=full_run_ns or 0,
        full_run_ns=full_run_ns,
        loadgen_window_ns=full_run_ns,
        loadgen_window_samples=len(trace.due_ns),
    )


def _measure_server_span(trace: QueryTrace) -> _RunSpan:
    """Return the counts and the times of a run of Server or Interactive, as LoadGen defines them.

    LoadGen's rate of completed samples is the number of intervals between arrivals, divided by the
    time until the query that was issued last completed. For example, 3 queries have 2 intervals. A
    run without queries then has -1 intervals, but no rate, because its window is None.
    """
    issued_queries = len(trace.due_ns)
    arrival_intervals = issued_queries - 1
    schedule_ns = _last_scheduled_ns(trace)

    return _RunSpan(
        issued_queries=issued_queries,
        completed_queries=int(trace.is_resolved.sum()),
        schedule_ns=schedule_ns,
        # The rules require a minimum length of the schedule, however long responses take.
        judged_duration_ns=schedule_ns,
        full_run_ns=_last_completion_ns(trace),
        loadgen_window_ns=_completion_of_last_issued_ns(trace),
        loadgen_window_samples=arrival_intervals,
    )


def _completion_of_last_issued_ns(trace: QueryTrace) -> int | None:
    """Return when the query that was issued last completed. None if it did not, or if none is."""
    if len(trace.due_ns) == 0 or not trace.is_resolved[-1]:
        return None
    return int(trace.due_ns[-1] + trace.latency_ns[-1])


def _last_scheduled_ns(trace: QueryTrace) -> int:
    """Return when the last query was scheduled, or 0 if there are no queries."""
    return int(trace.due_ns[-1]) if len(trace.due_ns) else 0


def _last_completion_ns(trace: QueryTrace) -> int | None:
    """Return when the last response of any query was complete, or None if none was."""
    completion_ns = (trace.due_ns + trace.latency_ns)[trace.is_resolved]
    return int(completion_ns.max()) if len(completion_ns) else None


class _TokenCounts(NamedTuple):
    """The output tokens of a run, and how many replies have one token."""

    total: int
    one_token_replies: int


def _count_tokens(trace: QueryTrace, *, with_one_token_defect: bool) -> _TokenCounts:
    """Return the tokens of completed queries. With LoadGen's defect, one token counts as none."""
    has_many_tokens = trace.is_resolved & (trace.tokens > 1)
    total = int(trace.tokens.sum(where=has_many_tokens, dtype=np.int64))
    one_token_replies = int((trace.is_resolved & (trace.tokens == 1)).sum())
    if not with_one_token_defect:
        total += one_token_replies
    return _TokenCounts(total, one_token_replies)


def _tpot_values(trace: QueryTrace) -> NDArray[np.int64]:
    """Return the time per output token (TPOT) in ns of the queries that have one.

    It is (latency - TTFT) // (tokens - 1), as in LoadGen. A response of one token has no interval
    between tokens, so it has no TPOT and is left out. A query that never completed has UNRESOLVED.
    """
    has_many_tokens = trace.is_resolved & (trace.tokens > 1)
    has_one_token = trace.is_resolved & ~has_many_tokens
    generation_ns = (trace.latency_ns - trace.ttft_ns)[has_many_tokens]
    token_intervals = trace.tokens[has_many_tokens].astype(np.int64) - 1
    tpot_ns = np.full(len(trace.tokens), UNRESOLVED, np.int64)
    tpot_ns[has_many_tokens] = generation_ns // token_intervals
    return tpot_ns[~has_one_token]


def _tpot_values_with_defect(trace: QueryTrace) -> NDArray[np.int64]:
    """Return the TPOT in ns of every query, with LoadGen's defect for responses of one token.

    LoadGen takes their token count as 0, so it divides by 0 - 1 and gets a negative TPOT. A query
    that never completed has UNRESOLVED.
    """
    loadgen_tokens = np.where(trace.tokens > 1, trace.tokens, 0).astype(np.int64)
    generation_ns = trace.latency_ns - trace.ttft_ns
    return np.where(trace.is_resolved, generation_ns // (loadgen_tokens - 1), UNRESOLVED)


def _check_latency_limits(
    test: Test, measured_ttft_ns: NDArray[np.int64], measured_tpot_ns: NDArray[np.int64]
) -> tuple[Check, ...]:
    """Return the checks of the limits of TTFT and TPOT, or none in Offline, which has no limits.

    Args:
        test: The requirements of the rules, among them the two limits.
        measured_ttft_ns: The time to the first token of each query.
        measured_tpot_ns: The time per output token of each query that has one.
    """
    ttft_limit_ns = test.ttft_ns
    tpot_limit_ns = test.tpot_ns
    if ttft_limit_ns is None or tpot_limit_ns is None:
        return ()

    return (
        _check_percentile("ttft", measured_ttft_ns, ttft_limit_ns, test),
        _check_percentile("tpot", measured_tpot_ns, tpot_limit_ns, test),
    )


def _check_percentile(
    metric: str, measured_ns: NDArray[np.int64], limit_ns: int, test: Test
) -> Check:
    """Return the check of the limit of one metric: its percentile and early stopping.

    Early stopping is MLPerf's statistical test: enough queries must have been measured, given the
    number of them over the limit, to be confident that the percentile is within the limit. The two
    comparisons of the percentile differ: LoadGen accepts a value equal to the limit, and the
    submission checker does not.

    Args:
        metric: "ttft" or "tpot".
        measured_ns: The value of each query, which is UNRESOLVED if it did not complete. That is
            above every limit, so such a query counts as a violation.
        limit_ns: The limit of the percentile.
        test: The percentile and the confidence of early stopping.
    """
    query_count = len(measured_ns)
    percentile_ns = UNRESOLVED
    if query_count:
        percentile_index = quantile_index(query_count, test.percentile)
        percentile_ns = int(np.partition(measured_ns, percentile_index)[percentile_index])

    violations = int((measured_ns > limit_ns).sum())
    required_queries = needed_queries(violations, test.percentile, test.confidence)
    return Check(
        metric=metric,
        limit_ns=limit_ns,
        percentile_ns=None if percentile_ns >= UNRESOLVED else percentile_ns,
        is_within_limit=percentile_ns <= limit_ns,
        is_below_limit=percentile_ns < limit_ns,
        violations=violations,
        query_count=query_count,
        required_queries=required_queries,
        early_stopping_met=query_count >= required_queries,
    )


def _query_errors(trace: QueryTrace) -> tuple[str, ...]:
    """Return sentences about queries that went wrong, each of which makes the result INVALID.

    These are queries that did not complete, and responses without tokens.
    """
    errors = []
    issued = len(trace.due_ns)

    unresolved = issued - int(trace.is_resolved.sum())
    if unresolved:
        errors.append(
            f"{unresolved:,} of {issued:,} queries did not complete; LoadGen would wait for them"
        )

    without_tokens = int((trace.is_resolved & (trace.tokens < 1)).sum())
    if without_tokens:
        errors.append(f"{without_tokens:,} responses have no tokens or no token count")

    return tuple(errors)


def _invalid_reasons(
    test: Test, span: _RunSpan, query_errors: Sequence[str], checks: Sequence[Check]
) -> Iterator[Reason]:
    """Yield the reasons why a run is INVALID, or nothing if it is VALID.

    They are, in this order: it is too short, it has too few queries, queries went wrong, and a
    limit or its early stopping was missed.
    """
    if span.judged_duration_ns < test.min_duration_ns:
        verb = "took" if test.scenario == "offline" else "was scheduled for"
        text = (
            f"too short: the run {verb} {span.judged_duration_ns / NS_PER_S:.3f} s, "
            f"{test.min_duration_ns / NS_PER_S:g} s required"
        )
        yield Reason(kind="size", text=text)

    if span.issued_queries < test.min_queries:
        text = f"too few queries: {span.issued_queries:,}, {test.min_queries:,} required"
        yield Reason(kind="size", text=text)

    for error in query_errors:
        # A query that went wrong is missing from those that the rules require.
        yield Reason(kind="size", text=error)

    for check in checks:
        yield from _limit_reasons(check, test)


def _limit_reasons(check: Check, test: Test) -> Iterator[Reason]:
    """Yield a reason if the percentile exceeds its limit, and one if early stopping fails.

    Early stopping is MLPerf's statistical test of whether enough queries were measured. The
    percentile has no value if the query it falls on never completed.
    """
    name = check.metric.upper()
    if not check.is_within_limit:
        percentile_text = "a query that did not complete"
        if check.percentile_ns is not None:
            percentile_text = f"{check.percentile_ns / NS_PER_MS:,.6f} ms"

        text = (
            f"{name} p{test.percentile * 100:g} is {percentile_text}, "
            f"limit {check.limit_ns / NS_PER_MS:g} ms: lower the rate"
        )
        yield Reason(kind="limit", text=text)

    if not check.early_stopping_met:
        missing_queries = format.counted(check.missing_queries, "more query", "more queries")
        text = (
            f"{name} early stopping: {check.violations:,} of {check.query_count:,} queries "
            f"exceeded the limit; at least {missing_queries} under the limit would be required"
        )
        yield Reason(kind="limit", text=text)


UNSIGNED_RANGE = 2**64
"""The number of values of an unsigned 64-bit integer."""


def _compute_spread(values_ns: NDArray[np.int64]) -> LoadGenSpread:
    """Return the statistics of a distribution that LoadGen prints: extremes, mean, percentiles.

    A query that never completed has the value UNRESOLVED, which is above all others. A percentile
    or an extreme that is the value of such a query is None. The mean is None if any query never
    completed.
    """
    count = len(values_ns)
    if count == 0:
        return LoadGenSpread(
            count=0, min=None, max=None, mean=None, percentiles=(None,) * len(PERCENTILES)
        )

    ordered_ns = np.sort(values_ns)

    # Unresolved values come last, so all queries completed if the largest value is a latency.
    have_all_completed = ordered_ns[-1] < UNRESOLVED
    mean_ns = _divide_like_loadgen(int(ordered_ns.sum()), count) if have_all_completed else None
    percentile_indexes = [quantile_index(count, percentile) for percentile in PERCENTILES]

    return LoadGenSpread(
        count=count,
        min=_resolved_value_at(ordered_ns, 0),
        max=_resolved_value_at(ordered_ns, count - 1),
        mean=mean_ns,
        percentiles=tuple(_resolved_value_at(ordered_ns, index) for index in percentile_indexes),
    )


def _resolved_value_at(ordered_ns: NDArray[np.int64], index: int) -> int | None:
    """Return the value at an index, or None for a query that never completed."""
    value_ns = int(ordered_ns[index])
    return None if value_ns >= UNRESOLVED else value_ns


def _divide_like_loadgen(total_ns: int, count: int) -> int:
    """Return the mean that LoadGen computes from a total, which may be negative.

    LoadGen divides a signed 64-bit total by an unsigned count. C++ converts a negative total to an
    unsigned number first (2**64 is added), and the quotient back to a signed one.
    """
    quotient = total_ns % UNSIGNED_RANGE // count
    return quotient - UNSIGNED_RANGE if quotient >= UNSIGNED_RANGE // 2 else quotient


def _rate_per_s(count: int, length_ns: int | None) -> float | None:
    """Return a rate per second, or None if the length of its window is unknown or zero."""
    if not length_ns or length_ns <= 0:
        return None
    return count / (length_ns / NS_PER_S)


# -- TEST06 ----------------------------------------------------------------------------------------


class Reply(NamedTuple):
    """One response of a compliance run, in token IDs.

    Attributes:
        first_tokens: The first tokens, as the server reported them when they were generated.
        output_tokens: All tokens of the response.
        reported_count: The number of output tokens that the server reported.
    """

    first_tokens: Sequence[int]
    output_tokens: Sequence[int]
    reported_count: int

    @property
    def begins_as_reported(self) -> bool:
        """Whether the output begins with the first tokens, as far as both have tokens."""
        common_length = min(len(self.first_tokens), len(self.output_tokens))
        reported_start = list(self.first_tokens[:common_length])
        return reported_start == list(self.output_tokens[:common_length])

    @property
    def repeats_end_token(self) -> bool:
        """Whether the output ends with two end tokens.

        The official check looks at outputs of more than two tokens only.
        """
        ends_twice = list(self.output_tokens[-2:]) == [END_TOKEN, END_TOKEN]
        return ends_twice and len(self.output_tokens) > 2

    @property
    def has_reported_length(self) -> bool:
        """Whether the output has as many tokens as the server reported."""
        return len(self.output_tokens) == self.reported_count


class Test06(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "wrong_first_tokens": "first_token",
        "repeated_end_tokens": "end_tokens",
        "wrong_lengths": "length",
    },
):
    """How many replies fail each check of TEST06, a compliance test of MLPerf for token counts.

    Attributes:
        replies: The replies that were checked.
        wrong_first_tokens: How many do not begin with the reported token; None in Offline, which
            does not report it.
        repeated_end_tokens: How many end with more than one end token.
        wrong_lengths: How many are not as long as reported.
    """

    __test__ = False  # for pytest: not a test case

    replies: int
    wrong_first_tokens: int | None
    repeated_end_tokens: int
    wrong_lengths: int

    @property
    def passed(self) -> bool:
        """Whether there are replies and all of them pass every check."""
        has_failures = bool(
            self.wrong_first_tokens or self.repeated_end_tokens or self.wrong_lengths
        )
        return self.replies > 0 and not has_failures


def count_test06_failures(replies: Iterable[Reply], *, reports_first_tokens: bool = True) -> Test06:
    """Return how many replies fail each check of TEST06, MLPerf's compliance test of token counts.

    Without it, a server could report a first token too early, or tokens that it did not generate.
    The first reported token must begin the output, at most one end token may end it, and the
    reported count must be its length. Source: compliance/TEST06/run_verification.py.

    Args:
        replies: The responses of a run.
        reports_first_tokens: Whether the server reported first tokens. If it did not, as in
            Offline, the check of the first token is left out.
    """
    checked_replies = list(replies)
    wrong_first_tokens = None
    if reports_first_tokens:
        wrong_first_tokens = sum(not reply.begins_as_reported for reply in checked_replies)

    return Test06(
        replies=len(checked_replies),
        wrong_first_tokens=wrong_first_tokens,
        repeated_end_tokens=sum(reply.repeats_end_token for reply in checked_replies),
        wrong_lengths=sum(not reply.has_reported_length for reply in checked_replies),
    )
