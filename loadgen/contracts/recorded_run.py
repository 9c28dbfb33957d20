"""A recorded run of a level, and views of one class of its requests or of its tasks.

This module is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.contracts.load_checks import EstimateError, LoadLength
from loadgen.core.metrics import outcomes, tasks, windows
from loadgen.core.metrics.columns import (
    CANCELLED,
    DROPPED,
    FAILED,
    OK,
    UNFINISHED,
    Columns,
    is_measured,
    is_of_class,
)
from loadgen.core.metrics.goodput import Goodput
from loadgen.core.metrics.summary import Summary
from loadgen.core.metrics.task_summary import Sessions
from loadgen.core.metrics.token_deadlines import DeadlineCounts
from loadgen.core.results.answer_files import ScoredAnswer
from loadgen.core.results.manifest import RunManifest
from loadgen.core.results.record import ROW
from loadgen.core.slo import Slo, Term
from loadgen.core.stats.histogram import Histogram
from loadgen.figures import METRICS

QUEUEING_METRICS = ("ttft", "ttft_from_sent", "first_answer", "e2e")
"""Latencies of this package that include time in a queue."""

MAX_NEGLIGIBLE_WAIT = 0.05
"""Share of the median E2E latency below which a p99 TTFT shows that requests did not queue."""


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded run of a level.

    Attributes:
        folder: The directory of the run, relative to that of the validation.
        manifest: The manifest of the run.
        summary: The summary of the run.
        rows: The records of the requests of all stages (`record.ROW`), or an object with the same
            columns.
        gaps: The times between consecutive events of responses, in the measured stages.
        deadline_counts: The token deadlines of each response, None if its token times or the
            deadlines are not known.
        scored_answers: The outcomes of the checks of answers, None if the run checked none.
    """

    folder: str
    manifest: RunManifest
    summary: Summary
    rows: NDArray[np.void]
    gaps: Histogram
    deadline_counts: DeadlineCounts | None = None
    scored_answers: tuple[ScoredAnswer, ...] | None = None

    @property
    def mean_residence_s(self) -> float:
        """The mean time from the scheduled time of a request to its end, 0 without ok requests."""
        return (self.summary.e2e_ms.mean or 0.0) / 1e3

    @property
    def mean_residence_ns(self) -> float:
        """The mean residence time in ns."""
        return self.mean_residence_s * 1e9

    def columns(self) -> Columns:
        """Return the columns of the records of the measured stages."""
        return Columns(self.rows, is_measured(self.manifest, self.rows))

    def exclude_dropped(self) -> RecordedRun:
        """Return the run without the requests that the client dropped at its in-flight limit."""
        return self._select_records(self.rows["status"] != DROPPED)

    def _select_records(self, mask: NDArray[np.bool_]) -> RecordedRun:
        """Return the run with the records that a mask selects, without copying them.

        A run may have millions of requests, so the result refers to the same records through a
        `Columns` view, which reads a column when it is needed.

        Args:
            mask: One boolean per record of the run.
        """
        if mask.all():
            return self
        column_view = Columns(self.rows, mask)
        # The type of `rows` is an array of records. A view may take its place, because all code
        # reads single columns, as in `rows["status"]`, which works for both.
        rows = cast("NDArray[np.void]", column_view)
        return replace(self, rows=rows)

    def has_class(self, class_name: str) -> bool:
        """Return whether the run has a class of requests with this name."""
        return any(plan.name == class_name for plan in self.manifest.classes)

    def select_class(self, class_name: str) -> RecordedRun:
        """Return the run with the requests of one class only, and with the SLO of this class.

        A workload may mix classes of requests, such as "chat" and "summarize". A term that names a
        class is evaluated on the result, as if the run had no other requests.

        Raises:
            EstimateError: The run has no such class.
        """
        if not self.has_class(class_name):
            raise EstimateError(f"the run has no request class {class_name}")

        class_plan = next(plan for plan in self.manifest.classes if plan.name == class_name)
        class_summary = next(
            summary for summary in self.summary.classes if summary.name == class_name
        )
        manifest = replace(self.manifest, slo=class_plan.slo)
        summary = replace(
            self.summary,
            goodput=class_summary.goodput,
            sessions=class_summary.sessions,
            fluidity=class_summary.fluidity,
        )
        is_of_this_class = is_of_class(self.manifest, class_name, self.rows)
        run_of_class = self._select_records(is_of_this_class)

        return replace(run_of_class, manifest=manifest, summary=summary)

    def convert_to_tasks(self) -> RecordedRun:
        """Return the run with one record per task instead of one per request.

        A task is a conversation or an agentic session of several requests. Each task becomes a
        record in the format of a request, so that terms about tasks can be evaluated by the same
        code as terms about requests. The SLO of the result has only the limits on tasks.

        Raises:
            EstimateError: There are no tasks, or too many of them were still unfinished when the
                load ended.
        """
        request_sessions = self.summary.sessions
        if request_sessions is None:
            raise EstimateError("the run has no tasks and no conversations")

        task_table = tasks.tabulate_tasks(Columns(self.rows), self.manifest.turns_per_session)
        task_slo = _build_task_slo(self.manifest.slo)
        task_manifest = replace(self.manifest, slo=task_slo, turns_per_session=1)
        task_run = replace(self, rows=build_task_rows(task_table), manifest=task_manifest)
        task_columns = task_run.columns()
        _require_finished_tasks(task_columns)
        task_summary = _build_task_summary(self.summary, request_sessions, task_columns)

        return replace(task_run, summary=task_summary)


def _build_task_slo(slo: Slo | None) -> Slo:
    """Return the limits of an SLO on whole tasks, as limits on the metrics of requests."""
    terms = []
    if slo is not None and slo.task is not None:
        if slo.task.within_ns is not None:
            terms.append(Term(metric="e2e", limit_ns=slo.task.within_ns))
        if slo.task.wait_ns is not None:
            terms.append(Term(metric="ttft_from_sent", limit_ns=slo.task.wait_ns))
    return Slo(terms=tuple(terms))


def _require_finished_tasks(columns: Columns) -> None:
    """Raise EstimateError if too many tasks were unfinished when the load or the drain ended.

    The drain is the time after the load in which requests in flight may still end. The metrics of
    the finished tasks alone would be too good, because the unfinished ones are mostly long tasks.
    """
    unfinished_count = int(columns.has_status(UNFINISHED).sum())
    task_count = int((~columns.has_status(CANCELLED)).sum())
    if outcomes.is_undecided(unfinished_count, task_count):
        raise EstimateError(
            f"{unfinished_count:,} of {task_count:,} tasks were unfinished when the load or the "
            "drain ended; end the level by a number of tasks (requests: 200) and without grace"
        )


def _build_task_summary(summary: Summary, sessions: Sessions, task_columns: Columns) -> Summary:
    """Return the summary of a run whose records are tasks (see `RecordedRun.convert_to_tasks`).

    A summary has fields for the metrics of requests only, and its readers look there. So the task
    time takes the place of E2E latency, and the sum of a task's waits for first tokens that of
    TTFT. The steady-state window becomes the time in which tasks were scheduled to start.

    Args:
        summary: The summary of the requests.
        sessions: The part of that summary that is about tasks.
        task_columns: The records of the tasks: see `build_task_rows`.
    """
    start_ns = task_columns["due_ns"]
    first_start_ns = float(start_ns.min(initial=0))
    last_start_ns = float(start_ns.max(initial=0))
    steady_window = windows.make_span(first_start_ns, last_start_ns)
    good_tasks = None if sessions.goodput is None else sessions.goodput.good

    return replace(
        summary,
        e2e_ms=sessions.duration_ms,
        ttft_ms=sessions.wait_ms,
        goodput=Goodput(good=good_tasks),
        requests=replace(summary.requests, ok=sessions.ok),
        window=replace(summary.window, steady=steady_window),
    )


def build_task_rows(table: tasks.TaskTable) -> NDArray[np.void]:
    """Return one record per task, in the format of the records of requests (`record.ROW`).

    The code that computes metrics of requests is then used for tasks. It computes a latency as the
    difference of two times of a record, so the times are set such that

    - `e2e` (end - due) is the time of the task,
    - `ttft` (first token - due) is the sum of all its waits for first tokens, and
    - `ttft_from_sent` (first token - sent) is the longest of these waits.

    Example: a task is due at 10 s, waits 1 s and 3 s for first tokens, and ends at 30 s. Its record
    is due at 10 s, has its first token at 14 s, is sent at 11 s and ends at 30 s.
    """
    columns = table.columns
    start_ns = columns.due_ns
    end_ns = np.maximum(columns.end_ns, start_ns)
    first_token_ns = start_ns + columns.wait_ns
    rows = np.zeros(len(table.numbers), ROW)
    rows["slot"] = table.numbers
    rows["request"] = table.numbers
    rows["session"] = table.numbers
    rows["stage"] = columns.stage
    rows["due_ns"] = start_ns
    rows["sent_ns"] = first_token_ns - columns.longest_wait_ns
    rows["first_token_ns"] = first_token_ns
    rows["end_ns"] = end_ns
    rows["done_ns"] = end_ns
    rows["status"] = _find_task_statuses(table)
    rows["input_tokens"] = columns.input_tokens
    rows["output_tokens"] = columns.output_tokens

    return rows


def _find_task_statuses(table: tasks.TaskTable) -> NDArray[np.int64]:
    """Return the status code of each task: CANCELLED, UNFINISHED, OK or FAILED.

    The first status that applies is used. A task whose last request was never sent is unfinished.
    """
    columns = table.columns
    is_cancelled = columns.cancelled > 0
    is_unfinished = (columns.unfinished > 0) | ~table.has_ended
    is_ok = columns.ok > 0
    return np.select(
        [is_cancelled, is_unfinished, is_ok], [CANCELLED, UNFINISHED, OK], default=FAILED
    )


class LoadedRun(NamedTuple):
    """A run and the columns of its measured records."""

    run: RecordedRun
    columns: Columns


class MeasuredLevel(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded runs of a level.

    `failure_reason` says why a run is missing, or is "" if none is.
    """

    runs: tuple[RecordedRun, ...] = ()
    failure_reason: str = ""


# -- several runs ---------------------------------------------------------------------------------


def measure_load_length(runs: Sequence[RecordedRun]) -> LoadLength | None:
    """Return the length of the load of all runs, in seconds and in mean residence times.

    The residence time of a request is the time from its scheduled start to its end. The queue
    hardly changes within one residence time, so the number of residence times says how often it
    could change during the load. Only runs with a steady state are counted.

    Returns:
        The length. None for a closed loop, in which the number of requests on the server is fixed
        and the queue cannot grow, and None if no run has a steady state.
    """
    if not runs or _is_closed_loop(runs[0]):
        return None  # all runs of a level have the same kind of load

    residence_times = 0.0
    load_s = 0.0
    for run in runs:
        steady_s = run.summary.window.steady.duration_s
        if run.mean_residence_s and steady_s:
            residence_times += steady_s / run.mean_residence_s
            load_s += steady_s

    if residence_times == 0:
        return None

    return LoadLength(residence_times, load_s)


def _is_closed_loop(run: RecordedRun) -> bool:
    """Return whether the measured load came from virtual users that wait for their responses."""
    return any(stage.closed for stage in run.manifest.stages if stage.measured)


def depends_on_queueing(runs: Sequence[RecordedRun], metric: str) -> bool:
    """Return whether the values of a metric depend on how long requests wait in a queue.

    Such a metric needs a longer load, because the queue changes slowly. TTFT depends on the queue
    and TPOT does not. E2E latency depends on it only if requests waited in these runs. For a metric
    of another package it is not known, so the answer is True, which is the safe one.

    Args:
        runs: The runs of a level.
        metric: The name of the metric.
    """
    if metric == "e2e":
        return not has_negligible_queueing(runs)
    if metric in QUEUEING_METRICS:
        return True
    # A metric that is not one of this package comes from another one.
    return METRICS.find(metric, include_plugins=False) is None


def has_negligible_queueing(runs: Sequence[RecordedRun]) -> bool:
    """Return whether waiting for the first token took a negligible part of E2E latency in all runs.

    Even the long waits (TTFT p99) have to be short against an ordinary response (E2E p50).
    """
    for run in runs:
        ttft_p99_ms = run.summary.ttft_ms.p99
        e2e_p50_ms = run.summary.e2e_ms.p50
        if ttft_p99_ms is None or e2e_p50_ms is None:
            return False
        if ttft_p99_ms >= MAX_NEGLIGIBLE_WAIT * e2e_p50_ms:
            return False
    return True
