"""Judges a trial by the records of its run: whether it passed, and at which load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from loadgen.core import run_folder
from loadgen.core.metrics import columns, outcomes, reasons
from loadgen.core.results import store
from loadgen.core.results.record import KIND, select_rows
from loadgen.core.slo import Slo
from loadgen.runs.slo_text import missed_objectives
from loadgen.runs.table_metrics import table_metrics
from loadgen.search import failures
from loadgen.search.goal import FAILED, FULL_LENGTH, INVALID, PASSED, Decision, Goal
from loadgen.search.search_results import PlannedTrial, TrialResult
from loadgen.search.trial_workload import is_closed_loop

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.core.metrics.summary import Summary
    from loadgen.core.workload import Workload

NS_PER_S = 1_000_000_000
NEVER_NS = np.iinfo(np.int64).max
"""A time later than any other, as the minimum of no times."""
SERVER_GONE_KINDS = tuple(KIND[name] for name in ("dns", "connect", "tls", "reset"))
"""Kinds of failure of a server that is gone. One that is overloaded responds late, or with errors.
"""


class TrialRecords(NamedTuple):
    """What the run of a trial left: its summary and the records of the measured requests."""

    summary: Summary
    rows: NDArray[np.void]

    @property
    def due_rows(self) -> NDArray[np.void]:
        """The records of the requests that were due, whether they were sent or not."""
        return select_rows(self.rows, self.rows["due_ns"] >= 0)

    @property
    def end_ns(self) -> int:
        """When the last request ended."""
        return int(self.rows["done_ns"].max(initial=0))


class FinishedTrial(NamedTuple):
    """A trial whose run is over.

    Attributes:
        trial: What was tried.
        workload: What was sent.
        records: What the run left.
        run_dir: The directory of the run.
        early_decision: The decision that ended the run before its full length, or None.
    """

    trial: PlannedTrial
    workload: Workload
    records: TrialRecords
    run_dir: Path
    early_decision: Decision | None


class _OfferedLoad(NamedTuple):
    """The load that the arrivals of a trial offered.

    Attributes:
        load: The rate of the arrivals, or the number of virtual users.
        full_length_requests: How many requests (or sessions) a trial of full length has at this
            load. For a trial that ended early this is extrapolated, and not an integer.
    """

    load: float
    full_length_requests: float

    @property
    def sampling_noise(self) -> float:
        """The relative standard error of a rate that is measured by counting n arrivals.

        It is 1 / sqrt(n), as of a Poisson process, or 0 if there are none.
        """
        if self.full_length_requests <= 0:
            return 0.0
        return 1 / math.sqrt(self.full_length_requests)


class _Invalidity(NamedTuple):
    """Why a trial says nothing about its load."""

    reason_code: str
    reason: str


class _Growth(NamedTuple):
    """Whether a queue grew during a run.

    Attributes:
        sustained: False if a queue grew, True if the run shows that none did, None if not known.
        reason: Why it is known to have grown or not, or why it is not known, as text.
        needed_load_s: How long the load would have to last to show whether a queue grows. None if
            this is known.
    """

    sustained: bool | None = None
    reason: str = ""
    needed_load_s: float | None = None


def make_trial_result(finished: FinishedTrial, goal: Goal, *, has_own_seed: bool) -> TrialResult:
    """Return the result of a trial, as the search uses it and `probes.jsonl` stores it.

    Args:
        finished: The trial, with the records of its run.
        goal: What has to hold for the trial to pass.
        has_own_seed: Whether the arrivals of the trial have a seed of their own. Their rate then
            differs by chance from the requested load, and the outcome counts at the load that was
            really offered. Trials with the same arrivals, as in a sweep, need no such correction.
    """
    early_decision = finished.early_decision
    summary = finished.records.summary
    offered = _measure_offered_load(finished)
    decision = judge_search_trial(goal, finished.trial, finished.records, early_decision)
    growth = _read_growth(summary) if early_decision is None else _Growth()
    uses_offered_load = offered.load > 0 and has_own_seed

    return TrialResult(
        trial=finished.trial,
        outcome=decision.outcome,
        ended_early=early_decision is not None and decision.outcome != INVALID,
        duration_s=summary.window.full_run.duration_s or 0.0,
        offered_load=offered.load if uses_offered_load else finished.trial.load,
        sampling_noise=offered.sampling_noise,
        reason=decision.reason,
        reason_code=decision.reason_code,
        run_name=finished.run_dir.name,
        metrics=table_metrics(summary),
        sustained=growth.sustained,
        sustained_reason=growth.reason,
        needed_load_s=growth.needed_load_s,
    )


def recompute_result(output_dir: Path, result: TrialResult, *, mlperf: bool) -> TrialResult:
    """Return the result of a stored trial, computed again from the records of its run.

    `loadgen verify` compares it with the stored result. What the records do not show is taken from
    the stored result: what was tried, what the schedule offered, and how a trial was decided before
    its end.

    Args:
        output_dir: The directory of the search or sweep.
        result: The stored result.
        mlperf: Whether the trial was judged by the rules of MLPerf.
    """
    run_dir = output_dir / result.run_name
    summary = run_folder.read_summary(run_dir)
    recomputed = msgspec.structs.replace(
        result, metrics=table_metrics(summary), duration_s=summary.window.full_run.duration_s or 0.0
    )
    if result.ended_early:
        return recomputed

    stored = store.read_run(run_dir)
    goal = Goal(slo=stored.manifest.slo or Slo(terms=()), mlperf=mlperf)
    records = TrialRecords(summary, select_measured(stored.rows, summary))
    decision = judge_search_trial(goal, result.trial, records, None)
    growth = _read_growth(summary)

    return msgspec.structs.replace(
        recomputed,
        outcome=decision.outcome,
        reason_code=decision.reason_code,
        reason=decision.reason,
        sustained=growth.sustained,
        sustained_reason=growth.reason,
        needed_load_s=growth.needed_load_s,
    )


def select_measured(rows: NDArray[np.void], summary: Summary) -> NDArray[np.void]:
    """Return the rows of the measured stages, without those of a warm-up.

    A summary without stages is of a run with a single one, which is measured.
    """
    if not summary.stages:
        return rows
    is_stage_measured = np.array([stage.measured for stage in summary.stages])
    return select_rows(rows, is_stage_measured[rows["stage"]])


def judge_search_trial(
    goal: Goal,
    trial: PlannedTrial,
    records: TrialRecords,
    early_decision: Decision | None,
) -> Decision:
    """Return the outcome of a trial by its SLO, and by what a search requires in addition.

    The first of these rules that applies decides:

    1. INVALID: the endpoint refused requests for a quota or a rate limit.
    2. INVALID: the measurement is not sound (see `judge_trial`).
    3. FAILED: more than 1 % of the requests failed.
    4. FAILED: a full-length trial met the SLO, but a queue grew, so that the load is not sustained.
    5. The outcome by the SLO.

    Only the SLO counts in a run by MLPerf's rules, which decide everything, and for a load point of
    a sweep, whose table states the other facts.
    """
    decision = judge_trial(goal, records, early_decision)
    if trial.is_load_point or goal.mlperf:
        return decision

    summary = records.summary
    refusals = failures.describe_refusals(summary.requests)
    if refusals:
        return Decision(INVALID, failures.REFUSED, refusals, decision.decided_at_ns)
    if decision.outcome == INVALID:
        return decision

    failed_requests = failures.describe_failures(summary.requests)
    if failed_requests:
        return Decision(FAILED, "failures", failed_requests, decision.decided_at_ns)

    has_passed_at_full_length = decision.reason_code == FULL_LENGTH
    if has_passed_at_full_length and summary.sustainable.sustained is False:
        growth = summary.sustainable.reason
        return Decision(FAILED, "not_sustained", growth, decision.decided_at_ns)

    return decision


def judge_trial(goal: Goal, records: TrialRecords, early_decision: Decision | None) -> Decision:
    """Return the outcome of a trial by its SLO.

    It is INVALID if the measurement is not sound. Otherwise the decision that ended the trial early
    stands, and a trial at full length is judged by how many requests missed each term.
    """
    invalidity = _find_invalidity(records, ended_early=early_decision is not None)
    if invalidity is not None:
        return Decision(INVALID, invalidity.reason_code, invalidity.reason, records.end_ns)
    if early_decision is not None:
        return early_decision
    return _judge_full_length(goal, records)


def _judge_full_length(goal: Goal, records: TrialRecords) -> Decision:
    """Return the outcome of a trial that ran to its end and is a sound measurement.

    The first of these rules that applies decides:

    1. FAILED: a term of the SLO was missed by more requests than may miss it.
    2. FAILED: the SLO of tasks, or that of a class of requests, was missed.
    3. INVALID: the end of the run cut off so many requests that they could change the outcome.
    4. PASSED.

    Cancelled requests are not counted: they say nothing about the server.
    """
    due_rows = records.due_rows
    counted_rows = due_rows[due_rows["status"] != columns.CANCELLED]
    unfinished_count = int((counted_rows["status"] == columns.UNFINISHED).sum())
    has_too_many_unfinished = outcomes.is_undecided(unfinished_count, len(counted_rows))

    # With many unfinished requests, a failure is only certain if it does not depend on them.
    exceeded_terms = _describe_exceeded_terms(
        goal, counted_rows, assumes_unfinished_met=has_too_many_unfinished
    )
    if exceeded_terms:
        return Decision(FAILED, "misses", "; ".join(exceeded_terms), records.end_ns)

    if records.summary.goodput.met is False:
        missed = "; ".join(missed_objectives(records.summary))
        return Decision(FAILED, "misses", missed, records.end_ns)

    if has_too_many_unfinished and goal.request_terms:
        reason = _describe_unfinished(unfinished_count, len(counted_rows))
        return Decision(INVALID, "unfinished", reason, records.end_ns)

    return Decision(PASSED, FULL_LENGTH, "at full length", records.end_ns)


def _describe_exceeded_terms(
    goal: Goal, counted_rows: NDArray[np.void], *, assumes_unfinished_met: bool
) -> list[str]:
    """Return a sentence for each term of the SLO that more requests missed than it allows.

    The end of the run cuts off unfinished requests. One that had exceeded the limit of a term by
    then has missed it. For the others it is open whether they would have met it.

    Args:
        goal: The SLO of the trial, with its terms.
        counted_rows: The records of the requests that were due, without cancelled ones.
        assumes_unfinished_met: True counts the open requests as having met the term, so that a term
            that is exceeded would have been exceeded in any case. False leaves them out.
    """
    is_unfinished = counted_rows["status"] == columns.UNFINISHED
    request_count = len(counted_rows)

    sentences = []
    for term_index, is_missed in enumerate(goal.find_misses(counted_rows)):
        missed_count = int(is_missed.sum())
        open_count = int((is_unfinished & ~is_missed).sum())
        judged_count = request_count if assumes_unfinished_met else request_count - open_count
        allowed = goal.allowed_misses(judged_count)[term_index]
        if missed_count > allowed:
            sentences.append(goal.describe_misses(term_index, missed_count, judged_count, allowed))

    return sentences


def _describe_unfinished(unfinished_count: int, request_count: int) -> str:
    """Return that too many requests were unfinished to judge the trial, and what helps."""
    return (
        f"{unfinished_count:,} of {request_count:,} requests were unfinished when the drain ended, "
        "too many to decide the SLO. Use a longer --grace, or none"
    )


def _find_invalidity(records: TrialRecords, *, ended_early: bool) -> _Invalidity | None:
    """Return why a trial says nothing about its load, or None if it does.

    The first of these reasons that applies is returned:

    1. The verdict of the run is INVALID.
    2. The client measured the metric of a term too inaccurately.
    3. The server could not be reached.
    """
    summary = records.summary
    for verdict_code in summary.verdict.codes:
        # A trial that ended early has few requests, but was judged by its planned number of them.
        is_expected = ended_early and verdict_code.code == "too_few"
        if not is_expected:
            return _Invalidity(verdict_code.code, reasons.format_reason(verdict_code))
    return _find_inaccurate_term(summary) or _find_unreachable_server(records)


def _find_inaccurate_term(summary: Summary) -> _Invalidity | None:
    """Return the first term that is undecided because its metric is inaccurate, or None.

    The metric is inaccurate if it is withheld, or if only a range of its value is known.
    A term may also be undecided because it has too few samples. This does not make a trial invalid.
    """
    for term in summary.goodput.slo:
        is_withheld = term.metric in summary.withheld_metrics
        has_only_range = term.low_ms is not None
        if term.undecided and (is_withheld or has_only_range):
            return _Invalidity("withheld", term.undecided)
    return None


def _find_unreachable_server(records: TrialRecords) -> _Invalidity | None:
    """Return the error that too many requests failed to reach the server, or None.

    How many are too many is the limit of the share of failed requests by which every run is judged.
    A server that cannot be reached is broken rather than overloaded, so a lower load would not
    help, and the trial must not count as failed.
    """
    request_count = len(records.rows)
    unreached_count = int(np.isin(records.rows["kind"], SERVER_GONE_KINDS).sum())
    max_share = records.summary.verdict.limits.failure_share
    if unreached_count <= max_share * max(request_count, 1):
        return None

    reason = (
        f"{unreached_count:,} of {request_count:,} requests could not reach the server (DNS, "
        "connect, TLS or connection reset)"
    )
    return _Invalidity("server_gone", reason)


def _read_growth(summary: Summary) -> _Growth:
    """Return whether a queue grew during a run at full length, according to its summary."""
    sustainability = summary.sustainable
    is_known = sustainability.sustained is not None
    needed_load_s = None if is_known else sustainability.needed_s
    return _Growth(sustainability.sustained, sustainability.reason, needed_load_s)


def _measure_offered_load(finished: FinishedTrial) -> _OfferedLoad:
    """Return the load that a trial offered to the server until it was decided.

    A closed loop offers as many virtual users as requested. In an open loop the arrivals are
    random: where 30/s were requested they may offer 30.4/s, so they are counted. A session counts
    as one arrival, that of its first request (turn 0).
    """
    due_rows = finished.records.due_rows
    first_turns = due_rows[due_rows["turn"] == 0]
    planned_load_s = _planned_load_s(finished.workload, due_rows)

    offered_load = finished.trial.load
    if not is_closed_loop(finished.workload):
        observed_load_s = _observed_load_s(finished, planned_load_s)
        if observed_load_s > 0:
            offered_load = _arrival_rate(first_turns["due_ns"], observed_load_s)

    has_run_to_end = finished.early_decision is None
    if has_run_to_end:
        return _OfferedLoad(offered_load, full_length_requests=len(first_turns))

    return _OfferedLoad(offered_load, full_length_requests=offered_load * planned_load_s)


def _arrival_rate(due_ns: NDArray[np.int64], period_s: float) -> float:
    """Return the number of arrivals per second in a period that begins with the first arrival."""
    first_arrival_ns = due_ns.min(initial=NEVER_NS)
    is_in_period = due_ns - first_arrival_ns < period_s * NS_PER_S
    return int(is_in_period.sum()) / period_s


def _observed_load_s(finished: FinishedTrial, planned_load_s: float) -> float:
    """Return for how many seconds of the measured load its arrivals are known.

    They are known for the whole planned load, or until an early decision stopped it. A decision may
    also come after the last session has begun, while later requests of sessions are still due. The
    arrivals of sessions are then known for the whole load.
    """
    if finished.early_decision is None:
        return planned_load_s
    # The decision counts from the start of the schedule, and the load from the end of the warm-up.
    decided_after_ns = finished.early_decision.decided_at_ns - _warmup_ns(finished.workload)
    return min(decided_after_ns / NS_PER_S, planned_load_s)


def _warmup_ns(workload: Workload) -> int:
    """Return how long the stages before the measured load last."""
    return sum(stage.duration_ns or 0 for stage in workload.stages if not stage.measured)


def _planned_load_s(workload: Workload, due_rows: NDArray[np.void]) -> float:
    """Return the planned duration of the measured load, in seconds.

    It is the sum of the durations of the measured stages. If one of them is limited by its number
    of requests instead, it is the time from the first to the last time at which a request is due,
    but at least the minimum duration of the stages (`at_least`), which MLPerf's rules require.

    Args:
        workload: What was sent.
        due_rows: The records of the requests that were due, whether they were sent or not.
    """
    measured_stages = [stage for stage in workload.stages if stage.measured]
    planned_ns = _sum_if_known([stage.duration_ns for stage in measured_stages])
    if planned_ns:
        return planned_ns / NS_PER_S
    if not len(due_rows):
        return 0.0

    arrival_span_ns = int(due_rows["due_ns"].max() - due_rows["due_ns"].min())
    minimum_ns = sum(stage.at_least.duration_ns for stage in measured_stages if stage.at_least)
    return max(arrival_span_ns, minimum_ns) / NS_PER_S


def _sum_if_known(values: Sequence[int | None]) -> int | None:
    """Return the sum of the values, or None if there are none or one is None or 0."""
    known_values = [value for value in values if value]
    if not values or len(known_values) < len(values):
        return None
    return sum(known_values)
