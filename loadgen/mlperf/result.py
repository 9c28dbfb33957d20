"""Judges a run by the rules of MLPerf Inference, with LoadGen's arithmetic: VALID or INVALID, with reasons.

Pure: takes a test (`rules.py`) and columns of records, returns an `MlperfResult`. Figures are integer nanoseconds,
computed as LoadGen 6.0.17 does. LoadGen is wrong about one-token replies; `lenient` reproduces that for the oracle
tests only. Results are "MLPerf-style, unofficial": `DISCLOSURE` is printed with each of them.
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
    "MLPerf-style, unofficial: not verified by MLCommons Association. The MLPerf name and logo are registered and "
    "unregistered trademarks of MLCommons Association; see https://mlcommons.org for the official results."
)

END_TOKEN = 2  # that of run_verification.py
UNRESOLVED = 1 << 62
"""The latency of a query that never completed, in ns: above every limit."""


# -- a run, reduced ----------------------------------------------------------------------------------------------------


class QueryTrace(NamedTuple):
    """One entry per issued query, in the order of issue. Times are in ns.

    `ttft_ns` and `latency_ns` start at the scheduled instant. For a failed query they are UNRESOLVED and `tokens` is 0.
    """

    due_ns: NDArray[np.int64]  # offset from the start of the schedule
    ttft_ns: NDArray[np.int64]
    latency_ns: NDArray[np.int64]
    tokens: NDArray[np.int64]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The check of one limit. `met`: p99 <= limit (LoadGen). `checker_met`: p99 < limit (submission checker)."""

    metric: str
    limit_ns: int
    value_ns: int | None
    met: bool
    checker_met: bool
    over: int  # queries strictly above the limit, including those that never completed
    count: int
    needed: int  # queries needed for early stopping to pass with `over` queries above the limit
    early_stopping_met: bool

    @property
    def more(self) -> int:
        """How many more queries, all under the limit, early stopping needs to pass; 0 when it passes."""
        return max(0, self.needed - self.count)


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a result is INVALID. `limit`: a limit or early stopping was missed; `size`: the run is too short, has too few
    queries, or queries that never completed.
    """

    kind: Literal["limit", "size"]
    text: str


class MlperfResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run, stored as `mlperf.json`. Rates are per second.

    `completed_*` rates cover the window until the last-issued query completes, `whole_*` rates the whole run until the
    last completion. `errors` and `warnings` are those of LoadGen's logs: what went wrong in the run, and what stands
    against relying on its figures. `checker_valid`: of the submission checker's tests only the two latency limits were
    made (p99 strictly below), beside LoadGen's own verdict.
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
    samples: int  # of the data set
    target_qps: float | None = None
    notes: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    simulated: bool = False
    sustained: bool | None = (
        None  # whether the rate can go on for ever; null: VALID by the rules only
    )
    sustained_why: str = ""
    rules_qps: float | None = (
        None  # the peak by the rules, where a search confirmed both it and this sustained rate
    )
    longer_minutes: float | None = None  # of load, that would show whether the rate is sustained
    disclosure: str = DISCLOSURE

    @property
    def rules_only(self) -> bool:
        """Whether it is VALID, and it is not shown that the rate can go on for ever."""
        return self.valid and self.scenario != "offline" and self.sustained is not True

    @property
    def exit_code(self) -> int:
        """0 valid; 3 when the run itself falls short of the rules; 1 when a limit was missed."""
        if self.valid:
            return OK
        return UNSOUND if any(reason.kind == "size" for reason in self.reasons) else SLO_MISSED


def reduce(
    trace: QueryTrace,
    test: Test,
    *,
    lenient: bool = False,
    dataset: str = "",
    target_qps: float | None = None,
    notes: Sequence[str] = (),
    errors: Sequence[str] = (),
    warnings: Sequence[str] = (),
    simulated: bool = False,
) -> MlperfResult:
    """Judge a run by the rules of `test`. `errors` and `warnings` are added to those that the records show.

    With `lenient`, one-token replies count as in LoadGen: 0 tokens and a TPOT of -(latency - ttft).
    """
    due, ttft, latency, tokens = trace
    issued = len(due)
    resolved = latency < UNRESOLVED
    total, tpot = _tpot(trace, resolved, lenient)
    last_query = issued - 1
    last_issued_end_ns = (
        int(due[last_query] + latency[last_query]) if issued and resolved[last_query] else None
    )
    whole_run_ns = int((due + latency).max(initial=0, where=resolved)) if resolved.any() else None
    offline = test.scenario == "offline"
    scheduled_ns = int(due[last_query]) if issued else 0
    duration_ns = (whole_run_ns or 0) if offline else scheduled_ns
    checks: tuple[Check, ...] = ()
    if test.ttft_ns is not None and test.tpot_ns is not None:
        checks = (
            _check("ttft", ttft, test.ttft_ns, test),
            _check("tpot", tpot, test.tpot_ns, test),
        )
    incomplete = issued - int(resolved.sum())
    found = _errors(issued, incomplete, int((resolved & (tokens < 1)).sum()))
    reasons = tuple(_reasons(test, issued, found, duration_ns, checks))
    counted_queries = issued if offline else issued - 1  # n instants enclose n - 1 gaps
    window_ns = whole_run_ns if offline else last_issued_end_ns
    return MlperfResult(
        benchmark=test.benchmark,
        scenario=test.scenario,
        round=test.round,
        valid=not reasons,
        reasons=reasons,
        checker_valid=not reasons and all(check.checker_met for check in checks),
        queries=issued,
        resolved=issued - incomplete,
        tokens=total,
        one_token_replies=int((resolved & (tokens == 1)).sum()),
        scheduled_s=scheduled_ns / 1e9,
        min_duration_s=test.min_duration_ns / 1e9,
        min_duration_met=duration_ns >= test.min_duration_ns,
        min_queries=test.min_queries,
        min_queries_met=issued >= test.min_queries,
        checks=checks,
        scheduled_samples_per_s=_rate(issued - 1, scheduled_ns),
        completed_samples_per_s=_rate(counted_queries, window_ns),
        completed_tokens_per_s=_rate(total, window_ns),
        whole_samples_per_s=_rate(issued - incomplete, whole_run_ns),
        whole_tokens_per_s=_rate(total, whole_run_ns),
        latency=_spread(latency),
        ttft=None if offline else _spread(ttft),
        tpot=None if offline else _spread(tpot),
        dataset=dataset,
        samples=test.samples,
        target_qps=target_qps,
        notes=tuple(notes),
        errors=(*found, *errors),
        warnings=tuple(warnings),
        simulated=simulated,
    )


def _tpot(
    trace: QueryTrace, resolved: NDArray[np.bool_], lenient: bool
) -> tuple[int, NDArray[np.int64]]:
    """The total of output tokens, and the TPOT in ns of each query that has one: (latency - ttft) // (n - 1)."""
    _, ttft, latency, tokens = trace
    multi_token = resolved & (tokens > 1)
    total = int(tokens.sum(where=multi_token, dtype=np.int64))
    values = np.full(len(tokens), UNRESOLVED, np.int64)
    np.floor_divide(
        latency - ttft, np.maximum(tokens.astype(np.int64) - 1, 1), out=values, where=multi_token
    )
    if lenient:
        one_token = resolved & ~multi_token
        values[one_token] = (ttft - latency)[one_token]
        return total, values
    return total + int((resolved & (tokens == 1)).sum()), values[multi_token | ~resolved]


def _check(metric: str, values: NDArray[np.int64], limit_ns: int, test: Test) -> Check:
    n = len(values)
    value_index = quantile_index(n, test.percentile) if n else 0
    value_ns = int(np.partition(values, value_index)[value_index]) if n else UNRESOLVED
    over = int((values > limit_ns).sum())
    queries_needed = needed_queries(over, test.percentile, test.confidence)
    return Check(
        metric=metric,
        limit_ns=limit_ns,
        value_ns=None if value_ns >= UNRESOLVED else value_ns,
        met=value_ns <= limit_ns,
        checker_met=value_ns < limit_ns,
        over=over,
        count=n,
        needed=queries_needed,
        early_stopping_met=n >= queries_needed,
    )


def _errors(issued: int, incomplete: int, uncounted: int) -> tuple[str, ...]:
    """What went wrong with single queries; each of these makes a result INVALID too."""
    found = []
    if incomplete:
        found.append(
            f"{incomplete:,} of {issued:,} queries did not complete; LoadGen would wait for them"
        )
    if uncounted:
        found.append(f"{uncounted:,} replies have no tokens or no token count")
    return tuple(found)


def _reasons(
    test: Test, issued: int, errors: Sequence[str], duration_ns: int, checks: Sequence[Check]
) -> Iterator[Reason]:
    percent = f"p{test.percentile * 100:g}"
    if duration_ns < test.min_duration_ns:
        verb = "took" if test.scenario == "offline" else "was scheduled for"
        text = f"too short: it {verb} {duration_ns / 1e9:.3f} s, {test.min_duration_ns / 1e9:g} s needed"
        yield Reason(kind="size", text=text)
    if issued < test.min_queries:
        yield Reason(kind="size", text=f"too few queries: {issued:,}, {test.min_queries:,} needed")
    for error in errors:
        yield Reason(kind="size", text=error)
    for check in checks:
        name = check.metric.upper()
        if not check.met:
            value = (
                "a query that did not complete"
                if check.value_ns is None
                else f"{check.value_ns / 1e6:,.6f} ms"
            )
            text = f"{name} {percent} is {value}, limit {check.limit_ns / 1e6:g} ms: lower the rate"
            yield Reason(kind="limit", text=text)
        if not check.early_stopping_met:
            text = (
                f"{name} early stopping: {check.over:,} of {check.count:,} queries over the limit; at least "
                f"{format.counted(check.more, 'more query', 'more queries')}, all under it, would be needed"
            )
            yield Reason(kind="limit", text=text)


def _spread(values: NDArray[np.int64]) -> LoadGenSpread:
    count = len(values)
    if count == 0:
        return LoadGenSpread(
            count=0, min=None, max=None, mean=None, percentiles=(None,) * len(PERCENTILES)
        )
    ordered = np.sort(values)

    def at(place: int) -> int | None:
        value = int(ordered[place])
        return None if value >= UNRESOLVED else value

    complete = at(count - 1) is not None
    return LoadGenSpread(
        count=count,
        min=at(0),
        max=at(count - 1),
        mean=_divide_towards_zero(int(ordered.sum()), count) if complete else None,
        percentiles=tuple(at(quantile_index(count, p)) for p in PERCENTILES),
    )


def _divide_towards_zero(total: int, n: int) -> int:
    """Total / n rounded towards zero, as C++ divides integers."""
    return total // n if total >= 0 else -(-total // n)


def _rate(count: int, length_ns: int | None) -> float | None:
    return None if not length_ns or length_ns <= 0 else count / (length_ns / 1e9)


def trace(
    columns: Mapping[str, NDArray[np.int64]], origin_ns: int = 0, *, one_query: bool = False
) -> QueryTrace:
    """The trace of a run from its columns (`record.FIELDS` by name, rows in any order).

    A request that did not end ok counts as not completed. `origin_ns` is where LoadGen's clock starts: the first due
    instant of the measured stage. Rows that never became due, because the load was stopped before, are not queries.
    With `one_query` (Offline) all rows are due at the origin, no matter when a closed loop sent them.
    """
    order = np.lexsort((columns["slot"], columns["due_ns"]))
    order = order[np.searchsorted(columns["due_ns"], 0, sorter=order) :]
    due = np.full(len(order), origin_ns, np.int64) if one_query else columns["due_ns"][order]
    ok = (columns["status"] == STATUS["ok"]) & (columns["end_ns"] >= 0)
    ok = ok[order]
    latency, ttft = columns["end_ns"][order], columns["first_token_ns"][order]
    tokens = np.maximum(columns["output_tokens"][order], 0)
    latency -= due
    ttft = np.where(
        ttft < 0, latency, ttft - due
    )  # an answer that was not streamed has its first token at its end
    latency[~ok] = ttft[~ok] = UNRESOLVED
    tokens[~ok] = 0
    return QueryTrace(due - origin_ns, ttft, latency, tokens)


# -- TEST06 ------------------------------------------------------------------------------------------------------------


class Reply(NamedTuple):
    """One reply of a compliance run, in token ids: first token(s) reported, whole output, reported token count."""

    first: Sequence[int]
    output: Sequence[int]
    reported: int


class Test06(msgspec.Struct, frozen=True, kw_only=True):
    """How many replies fail each of TEST06's three checks; `first_token` is None where it does not apply (Offline)."""

    __test__ = False

    replies: int
    first_token: int | None
    end_tokens: int
    length: int

    @property
    def passed(self) -> bool:
        return self.replies > 0 and not (self.first_token or self.end_tokens or self.length)


def test06(replies: Iterable[Reply], *, offline: bool = False) -> Test06:
    """TEST06: the first reported token begins the output, at most one end token ends it, the count is the length.

    Source: compliance/TEST06/run_verification.py. End tokens are those at the end of the output.
    """
    total = first = ends = length = 0
    for reply in replies:
        total += 1
        shared = min(len(reply.first), len(reply.output))
        first += list(reply.first[:shared]) != list(reply.output[:shared])
        ends += len(reply.output) > 2 and list(reply.output[-2:]) == [END_TOKEN, END_TOKEN]
        length += len(reply.output) != reply.reported
    return Test06(
        replies=total, first_token=None if offline else first, end_tokens=ends, length=length
    )
