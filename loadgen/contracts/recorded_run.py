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
    """

    folder: str
    manifest: RunManifest
    summary: Summary
    rows: NDArray[np.void]
    gaps: Histogram

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

        A run may have millions of requests, so the result has a view (`Columns`) of the records,
        which reads a column when it is needed. The view can be indexed like the array.
        """
        if mask.all():
            return self
        view = cast("NDArray[np.void]", Columns(self.rows, mask))
        return replace(self, rows=view)

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
        is_of_this_class = is_of_class(self.manifest, class_name, self.rows)
        return replace(
            self._select_records(is_of_this_class),
            manifest=replace(self.manifest, slo=class_plan.slo),
            summary=replace(
                self.summary, goodput=class_summary.goodput, sessions=class_summary.sessions
            ),
        )

    def convert_to_tasks(self) -> RecordedRun:
        """Return the run with one record per task (or conversation), as if it were one request.

        Terms about tasks can then be evaluated like terms about requests. The SLO of the result is
        the part of the SLO that is about tasks.

        Raises:
            EstimateError: There are no tasks, or the end of the load cut too many of them.
        """
        sessions = self.summary.sessions
        if sessions is None:
            raise EstimateError("the run has no tasks and no conversations")
        task_table = tasks.tabulate_tasks(Columns(self.rows), self.manifest.turns_per_session)
        run = replace(
            self,
            rows=build_task_rows(task_table),
            manifest=replace(
                self.manifest, slo=_build_task_slo(self.manifest.slo), turns_per_session=1
            ),
        )
        columns = run.columns()
        _require_finished_tasks(columns)
        return replace(run, summary=_build_task_summary(self.summary, sessions, columns))


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

    The metrics of the tasks that did finish would be too good, because long tasks are cut most
    often.
    """
    unfinished = int(columns.where(UNFINISHED).sum())
    total = int((~columns.where(CANCELLED)).sum())
    if outcomes.is_undecided(unfinished, total):
        raise EstimateError(
            f"{unfinished:,} of {total:,} tasks were unfinished when the load or the drain ended; "
            "end the level by a number of tasks (requests: 200) and without grace"
        )


def _build_task_summary(summary: Summary, sessions: Sessions, columns: Columns) -> Summary:
    """Return the summary of a run with the metrics of tasks in the place of those of requests.

    E2E becomes the task time, and TTFT the sum of a task's waits for first tokens. The steady-state
    window is the time in which tasks were scheduled to start.

    Args:
        summary: The summary of the requests.
        sessions: The part of that summary that is about tasks.
        columns: The records of the tasks: see `build_task_rows`.
    """
    due_ns = columns["due_ns"]
    steady = windows.span(float(due_ns.min(initial=0)), float(due_ns.max(initial=0)))
    good_tasks = None if sessions.goodput is None else sessions.goodput.good
    return replace(
        summary,
        e2e_ms=sessions.duration_ms,
        ttft_ms=sessions.wait_ms,
        goodput=Goodput(good=good_tasks),
        requests=replace(summary.requests, ok=sessions.ok),
        window=replace(summary.window, steady=steady),
    )


def build_task_rows(table: tasks.TaskTable) -> NDArray[np.void]:
    """Return an array of records (`record.ROW`) with one record per task.

    The metrics `e2e`, `ttft` and `ttft_from_sent` of a record are differences of its times. The
    times are chosen such that, for a task,

    - `e2e` (end - due) is the time of the task,
    - `ttft` (first token - due) is the sum of all waits for first tokens, and
    - `ttft_from_sent` (first token - sent) is the longest of these waits.

    A task whose last request was never sent is unfinished.
    """
    columns = table.columns
    rows = np.zeros(len(table.numbers), ROW)
    for name in ("slot", "request", "session"):
        rows[name] = table.numbers
    rows["stage"] = columns.stage
    rows["due_ns"] = columns.due_ns
    rows["first_token_ns"] = columns.due_ns + columns.wait_ns
    rows["sent_ns"] = rows["first_token_ns"] - columns.longest_wait_ns
    rows["end_ns"] = np.maximum(columns.end_ns, columns.due_ns)
    rows["done_ns"] = rows["end_ns"]
    is_unfinished = (columns.unfinished > 0) | ~table.has_ended
    rows["status"] = np.select(
        [columns.cancelled > 0, is_unfinished, columns.ok > 0],
        [CANCELLED, UNFINISHED, OK],
        default=FAILED,
    )
    rows["input_tokens"] = columns.input_tokens
    rows["output_tokens"] = columns.output_tokens
    return rows


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

    The residence time of a request is the time from its scheduled start to its end. The number of
    residence times says how often the queue of an open loop could change during the load.

    Return None for a closed loop, whose number of requests in the system is fixed, so that its
    queue cannot grow. Return None also if no run has a steady state.
    """
    if not runs or any(stage.closed for stage in runs[0].manifest.stages if stage.measured):
        return None
    residences = 0.0
    load_s = 0.0
    for run in runs:
        steady_s = run.summary.window.steady.duration_s
        if run.mean_residence_s and steady_s:
            residences += steady_s / run.mean_residence_s
            load_s += steady_s
    if residences == 0:
        return None
    return LoadLength(residences, load_s)


def has_queueing_time(runs: Sequence[RecordedRun], metric: str) -> bool:
    """Return whether the values of a metric depend on how long requests wait in a queue.

    Such a metric needs a longer load, because the queue changes slowly. TTFT depends on it, TPOT
    does not. E2E latency does only if requests did wait. A metric of another package is assumed to
    depend on it.
    """
    if metric == "e2e":
        return not has_negligible_queueing(runs)
    is_builtin_metric = METRICS.find(metric, include_plugins=False) is not None
    return metric in QUEUEING_METRICS or not is_builtin_metric


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
