"""A recorded run of a level, and views of one class of its requests or of its tasks.

This module is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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

    def without_dropped(self) -> RecordedRun:
        """Return the run without the requests that the client dropped at its in-flight limit."""
        return self._filtered(self.rows["status"] != DROPPED)

    def _filtered(self, mask: NDArray[np.bool_]) -> RecordedRun:
        """Return the run with the records that a mask selects.

        The records stay in columns that are read when they are needed, because a run may have
        millions of requests.
        """
        if mask.all():
            return self
        rows: Any = Columns(self.rows, mask)
        return replace(self, rows=rows)

    def has_class(self, class_name: str) -> bool:
        """Return whether the run has a class of requests with this name."""
        return any(plan.name == class_name for plan in self.manifest.classes)

    def only_class(self, class_name: str) -> RecordedRun:
        """Return the run with the requests of one class, and with the SLO of this class.

        A workload may mix classes of requests, such as "chat" and "summarize". The manifest has the
        plan of each class, and the summary its goodput and sessions.

        Raises:
            EstimateError: The run has no such class.
        """
        if not self.has_class(class_name):
            raise EstimateError(f"the run has no request class {class_name}")
        class_plan = next(plan for plan in self.manifest.classes if plan.name == class_name)
        class_summary = next(
            summary for summary in self.summary.classes if summary.name == class_name
        )
        return replace(
            self._filtered(is_of_class(self.manifest, class_name, self.rows)),
            manifest=replace(self.manifest, slo=class_plan.slo),
            summary=replace(
                self.summary, goodput=class_summary.goodput, sessions=class_summary.sessions
            ),
        )

    def as_tasks(self) -> RecordedRun:
        """Return the run with a record per conversation or task, as if each were one request.

        Terms about tasks are then computed like terms about requests. The SLO of the result is the
        part of the SLO that is about tasks.

        Raises:
            EstimateError: There are no tasks, or the end of the load cut too many of them.
        """
        sessions = self.summary.sessions
        if sessions is None:
            raise EstimateError("the run has no tasks and no conversations")
        rows = task_rows(tasks.tabulate_tasks(Columns(self.rows), self.manifest.turns_per_session))
        manifest = replace(self.manifest, slo=_task_slo(self.manifest.slo), turns_per_session=1)
        run = replace(self, manifest=manifest, rows=rows)
        columns = run.columns()
        _require_finished_tasks(columns)
        return replace(run, summary=_task_summary(self.summary, sessions, columns))


def _task_slo(slo: Slo | None) -> Slo:
    """Return the limits of an SLO on whole tasks, as limits on the metrics of requests."""
    terms = []
    if slo is not None and slo.task is not None:
        if slo.task.within_ns is not None:
            terms.append(Term(metric="e2e", limit_ns=slo.task.within_ns))
        if slo.task.wait_ns is not None:
            terms.append(Term(metric="ttft_from_sent", limit_ns=slo.task.wait_ns))
    return Slo(terms=tuple(terms))


def _require_finished_tasks(columns: Columns) -> None:
    """Raise EstimateError if the end of the load cut too many tasks."""
    cut = int(columns.where(UNFINISHED).sum())
    total = int((~columns.where(CANCELLED)).sum())
    if outcomes.is_undecided(cut, total):
        raise EstimateError(
            f"{cut:,} of {total:,} tasks were unfinished when the load or the drain ended; end the "
            "level by a number of tasks (requests: 200) and without grace"
        )


def _task_summary(summary: Summary, sessions: Sessions, columns: Columns) -> Summary:
    """Return a summary with the metrics of tasks in the place of those of requests.

    E2E becomes the task time, and TTFT the sum of a task's waits for first tokens. The steady state
    is the time in which tasks were scheduled to start.
    """
    due_ns = columns["due_ns"]
    steady = windows.span(float(due_ns.min(initial=0)), float(due_ns.max(initial=0)))
    good = None if sessions.goodput is None else sessions.goodput.good
    return replace(
        summary,
        e2e_ms=sessions.duration_ms,
        ttft_ms=sessions.wait_ms,
        goodput=Goodput(good=good),
        requests=replace(summary.requests, ok=sessions.ok),
        window=replace(summary.window, steady=steady),
    )


def task_rows(table: tasks.TaskTable) -> NDArray[np.void]:
    """Return a record (`record.ROW`) per task, as if the task were one request.

    The metrics `e2e`, `ttft` and `ttft_from_sent` are differences of times in a record. The times
    are chosen such that `e2e` is the task time, `ttft` the sum of all waits for first tokens, and
    `ttft_from_sent` the longest of these waits. A task whose last request was never sent is
    unfinished.
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


def load_in_residences(runs: Sequence[RecordedRun]) -> LoadLength | None:
    """Return the length of the load of all runs, in mean residence times and in seconds.

    Return None for closed loops, whose number of requests in the system is fixed, so that their
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
    return LoadLength(residences, load_s) if residences else None


def includes_queueing(runs: Sequence[RecordedRun], metric: str) -> bool:
    """Return whether time in a queue is a relevant part of a metric.

    A metric of another package is assumed to include it. E2E latency includes it only if requests
    did wait in a queue.
    """
    is_foreign_metric = METRICS.find(metric, foreign=False) is None
    if metric == "e2e":
        return not never_queued(runs)
    return metric in QUEUEING_METRICS or is_foreign_metric


def never_queued(runs: Sequence[RecordedRun]) -> bool:
    """Return whether the wait for a first token is a negligible part of E2E in all runs."""
    for run in runs:
        ttft_p99_ms = run.summary.ttft_ms.p99
        e2e_p50_ms = run.summary.e2e_ms.p50
        if ttft_p99_ms is None or e2e_p50_ms is None:
            return False
        if ttft_p99_ms >= MAX_NEGLIGIBLE_WAIT * e2e_p50_ms:
            return False
    return True
