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
    """Return the queries of a run in the order of issue, from the columns of its records.

    The records may be in any order. A request that failed counts as not completed. Records that
    never became due, because the load was stopped before, are not queries.

    Args:
        columns: Columns by the names of `record.FIELDS`. `slot` is the number of a request in the
            schedule.
        origin_ns: When LoadGen's clock starts: the first scheduled time of the measured stage.
        is_one_query: Whether all rows belong to one query, which is issued at the origin (Offline),
            no matter when a closed loop sent them.
    """
    issue_order = np.lexsort((columns["slot"], columns["due_ns"]))
    has_become_due = columns["due_ns"][issue_order] >= 0  # due_ns is -1 if it never did
    order = issue_order[has_become_due]
    due_ns = columns["due_ns"][order]
    if is_one_query:
        due_ns = np.full(len(order), origin_ns, np.int64)
    is_completed = (columns["status"][order] == STATUS["ok"]) & (columns["end_ns"][order] >= 0)
    latency_ns = columns["end_ns"][order] - due_ns
    first_token_ns = columns["first_token_ns"][order]
    # A response that was not streamed has its first token at its end.
    ttft_ns = np.where(first_token_ns < 0, latency_ns, first_token_ns - due_ns)
    latency_ns[~is_completed] = UNRESOLVED
    ttft_ns[~is_completed] = UNRESOLVED
    tokens = np.maximum(columns["output_tokens"][order], 0)
    tokens[~is_completed] = 0
    return QueryTrace(due_ns - origin_ns, ttft_ns, latency_ns, tokens)


# -- the result ------------------------------------------------------------------------------------


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The check of one limit.

    Attributes:
        metric: "ttft" or "tpot".
        limit_ns: The limit of the percentile.
        value_ns: The measured percentile, or None if it falls on a query that never completed.
        met: Whether the percentile is at most the limit, as LoadGen requires.
        checker_met: Whether it is less than the limit, as the submission checker requires.
        over: How many queries exceed the limit, with those that never completed.
        count: The number of queries.
        needed: How many queries early stopping requires with `over` of them above the limit.
        early_stopping_met: Whether there are enough queries for early stopping.
    """

    metric: str
    limit_ns: int
    value_ns: int | None
    met: bool
    checker_met: bool
    over: int
    count: int
    needed: int
    early_stopping_met: bool

    @property
    def more(self) -> int:
        """How many more queries, all under the limit, early stopping requires."""
        return max(0, self.needed - self.count)


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a result is INVALID.

    The kind is "limit" if a limit or early stopping was missed. It is "size" if the run is too
    short, has too few queries, or has queries that never completed.
    """

    kind: Literal["limit", "size"]
    text: str


class MlperfResult(msgspec.Struct, frozen=True, kw_only=True):
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
        resolved: How many of them completed.
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
        whole_samples_per_s: The rate until the last completion.
        whole_tokens_per_s: The output tokens until the last completion.
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
        sustained_why: Why it can or cannot, or what the run shows about it.
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
    whole_samples_per_s: float | None
    whole_tokens_per_s: float | None
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
    sustained_why: str = ""
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
        sustained_why="",
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
        trace: The queries of the run.
        test: The requirements of the rules.
        facts: What is known about the run apart from its queries.
        with_one_token_defect: Whether to reproduce LoadGen's defect, by which a response of one
            token has no tokens and a negative TPOT. Used to compare results with LoadGen's own.
    """
    facts = facts or MlperfRunFacts()
    is_offline = test.scenario == "offline"
    span = _RunSpan.from_trace(trace, is_offline=is_offline)
    token_counts = _count_tokens(trace, with_one_token_defect=with_one_token_defect)
    tpot_ns = _tpot_values(trace, with_one_token_defect=with_one_token_defect)
    checks = _check_latency_limits(test, trace.ttft_ns, tpot_ns)
    query_errors = _query_errors(trace)
    reasons = tuple(_invalid_reasons(test, span, query_errors, checks))
    return MlperfResult(
        benchmark=test.benchmark,
        scenario=test.scenario,
        round=test.round,
        valid=not reasons,
        reasons=reasons,
        checker_valid=not reasons and all(check.checker_met for check in checks),
        queries=span.issued,
        resolved=span.resolved,
        tokens=token_counts.total,
        one_token_replies=token_counts.one_token_replies,
        scheduled_s=span.scheduled_ns / NS_PER_S,
        min_duration_s=test.min_duration_ns / NS_PER_S,
        min_duration_met=span.duration_ns >= test.min_duration_ns,
        min_queries=test.min_queries,
        min_queries_met=span.issued >= test.min_queries,
        checks=checks,
        # n arrivals have n - 1 intervals between them.
        scheduled_samples_per_s=_rate_per_s(span.issued - 1, span.scheduled_ns),
        completed_samples_per_s=_rate_per_s(span.window_queries, span.window_ns),
        completed_tokens_per_s=_rate_per_s(token_counts.total, span.window_ns),
        whole_samples_per_s=_rate_per_s(span.resolved, span.full_ns),
        whole_tokens_per_s=_rate_per_s(token_counts.total, span.full_ns),
        latency=_compute_spread(trace.latency_ns),
        ttft=None if is_offline else _compute_spread(trace.ttft_ns),
        tpot=None if is_offline else _compute_spread(tpot_ns),
        dataset=facts.dataset,
        samples=test.samples,
        target_qps=facts.target_qps,
        notes=tuple(facts.notes),
        errors=(*query_errors, *facts.errors),
        warnings=tuple(facts.warnings),
        simulated=facts.simulated,
    )


class _RunSpan(NamedTuple):
    """How many queries a run has, and the windows over which LoadGen counts.

    Attributes:
        issued: The queries that were issued.
        resolved: How many of them completed.
        scheduled_ns: When the last query was scheduled.
        duration_ns: What the rules compare with the minimum duration: in Offline the time until the
            last completion, otherwise the length of the schedule.
        full_ns: When the last query completed; None if none did.
        window_ns: The window of the completed rates: until the query that was issued last
            completed, in Offline until the last completion. None if that query did not complete.
        window_queries: The queries that the rate of that window counts: all in Offline, otherwise
            one less than were issued, as LoadGen counts intervals between arrivals.
    """

    issued: int
    resolved: int
    scheduled_ns: int
    duration_ns: int
    full_ns: int | None
    window_ns: int | None
    window_queries: int

    @classmethod
    def from_trace(cls, trace: QueryTrace, *, is_offline: bool) -> _RunSpan:
        """Return the counts and windows of a run.

        In Server and Interactive, LoadGen's window of the completed rates ends when the query that
        was issued last completes, even if other queries complete later.
        """
        issued = len(trace.due_ns)
        is_resolved = trace.is_resolved
        end_ns = trace.due_ns + trace.latency_ns
        scheduled_ns = int(trace.due_ns[-1]) if issued else 0
        full_ns = int(end_ns[is_resolved].max()) if is_resolved.any() else None
        if is_offline:
            duration_ns = full_ns or 0
            window_ns = full_ns
            window_queries = issued
        else:
            is_last_query_resolved = issued > 0 and bool(is_resolved[-1])
            duration_ns = scheduled_ns
            window_ns = int(end_ns[-1]) if is_last_query_resolved else None
            window_queries = issued - 1
        return cls(
            issued=issued,
            resolved=int(is_resolved.sum()),
            scheduled_ns=scheduled_ns,
            duration_ns=duration_ns,
            full_ns=full_ns,
            window_ns=window_ns,
            window_queries=window_queries,
        )


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


def _tpot_values(trace: QueryTrace, *, with_one_token_defect: bool) -> NDArray[np.int64]:
    """Return the time per output token (TPOT) in ns of each query that has one.

    It is (latency - ttft) // (tokens - 1), as in LoadGen. A query that never completed has
    UNRESOLVED. A response of one token has no interval between tokens, so it has no TPOT and is
    left out. LoadGen's defect counts its tokens as 0 and so divides by -1.
    """
    has_many_tokens = trace.is_resolved & (trace.tokens > 1)
    has_one_token = trace.is_resolved & ~has_many_tokens
    generation_ns = trace.latency_ns - trace.ttft_ns
    token_intervals = trace.tokens.astype(np.int64) - 1

    tpot_ns = np.full(len(trace.tokens), UNRESOLVED, np.int64)
    tpot_ns[has_many_tokens] = generation_ns[has_many_tokens] // token_intervals[has_many_tokens]
    if with_one_token_defect:
        tpot_ns[has_one_token] = -generation_ns[has_one_token]
        return tpot_ns
    return tpot_ns[~has_one_token]


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
        value_ns=None if percentile_ns >= UNRESOLVED else percentile_ns,
        met=percentile_ns <= limit_ns,
        checker_met=percentile_ns < limit_ns,
        over=violations,
        count=query_count,
        needed=required_queries,
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
    if span.duration_ns < test.min_duration_ns:
        verb = "took" if test.scenario == "offline" else "was scheduled for"
        text = (
            f"too short: the run {verb} {span.duration_ns / NS_PER_S:.3f} s, "
            f"{test.min_duration_ns / NS_PER_S:g} s required"
        )
        yield Reason(kind="size", text=text)
    if span.issued < test.min_queries:
        text = f"too few queries: {span.issued:,}, {test.min_queries:,} required"
        yield Reason(kind="size", text=text)
    for error in query_errors:
        yield Reason(kind="size", text=error)
    for check in checks:
        yield from _limit_reasons(check, test)


def _limit_reasons(check: Check, test: Test) -> Iterator[Reason]:
    """Yield a reason if a percentile exceeds its limit, and one if early stopping fails."""
    name = check.metric.upper()
    if not check.met:
        value = "a query that did not complete"
        if check.value_ns is not None:
            value = f"{check.value_ns / NS_PER_MS:,.6f} ms"
        text = (
            f"{name} p{test.percentile * 100:g} is {value}, "
            f"limit {check.limit_ns / NS_PER_MS:g} ms: lower the rate"
        )
        yield Reason(kind="limit", text=text)
    if not check.early_stopping_met:
        text = (
            f"{name} early stopping: {check.over:,} of {check.count:,} queries exceeded the limit; "
            f"at least {format.counted(check.more, 'more query', 'more queries')} under the limit "
            "would be required"
        )
        yield Reason(kind="limit", text=text)


def _compute_spread(values_ns: NDArray[np.int64]) -> LoadGenSpread:
    """Return the statistics of a distribution that LoadGen prints.

    A statistic is None if there are no values, or if it is that of a query that never completed.
    The mean is None if any query did not complete.
    """
    count = len(values_ns)
    if count == 0:
        return LoadGenSpread(
            count=0, min=None, max=None, mean=None, percentiles=(None,) * len(PERCENTILES)
        )
    ordered_ns = np.sort(values_ns)
    max_ns = _value_at(ordered_ns, count - 1)
    mean_ns = None
    if max_ns is not None:
        mean_ns = _divide_towards_zero(int(ordered_ns.sum()), count)
    return LoadGenSpread(
        count=count,
        min=_value_at(ordered_ns, 0),
        max=max_ns,
        mean=mean_ns,
        percentiles=tuple(_value_at(ordered_ns, quantile_index(count, p)) for p in PERCENTILES),
    )


def _value_at(ordered_ns: NDArray[np.int64], index: int) -> int | None:
    """Return the value at an index, or None for a query that never completed."""
    value_ns = int(ordered_ns[index])
    return None if value_ns >= UNRESOLVED else value_ns


def _divide_towards_zero(total: int, divisor: int) -> int:
    """Return the quotient rounded towards zero, as C++ divides integers."""
    return total // divisor if total >= 0 else -(-total // divisor)


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


class Test06(msgspec.Struct, frozen=True, kw_only=True):
    """How many replies fail each check of TEST06, a compliance test of MLPerf for token counts.

    Attributes:
        replies: The replies that were checked.
        first_token: How many do not begin with the reported token; None in Offline, which does not
            report it.
        end_tokens: How many end with more than one end token.
        length: How many are not as long as reported.
    """

    __test__ = False  # for pytest: not a test case

    replies: int
    first_token: int | None
    end_tokens: int
    length: int

    @property
    def passed(self) -> bool:
        """Whether there are replies and all of them pass every check."""
        has_failures = bool(self.first_token or self.end_tokens or self.length)
        return self.replies > 0 and not has_failures


def run_test06(replies: Iterable[Reply], *, is_offline: bool = False) -> Test06:
    """Return how many replies fail each check of TEST06, MLPerf's compliance test of token counts.

    Without it, a server could report a first token too early, or tokens that it did not generate.
    The first reported token must begin the output, at most one end token may end it, and the
    reported count must be its length. Source: compliance/TEST06/run_verification.py.

    Args:
        replies: The responses of a run.
        is_offline: Whether the run is Offline, where the first token is not reported.
    """
    checked_replies = list(replies)
    wrong_first_tokens = sum(not reply.begins_as_reported for reply in checked_replies)
    return Test06(
        replies=len(checked_replies),
        first_token=None if is_offline else wrong_first_tokens,
        end_tokens=sum(reply.repeats_end_token for reply in checked_replies),
        length=sum(not reply.has_reported_length for reply in checked_replies),
    )
