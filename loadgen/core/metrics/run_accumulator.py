"""Adds up the records of a run for each stage, target, class and step. Pure numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadgen.core.metrics import tasks
from loadgen.core.metrics.accumulator import MetricAccumulator
from loadgen.core.metrics.columns import Columns, class_indices, join_arrays, step_indices
from loadgen.core.metrics.tasks import TaskColumns
from loadgen.core.metrics.windows import is_first_request_of_user, is_last_request_of_user
from loadgen.core.results.manifest import StagePlan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from loadgen.core.results.manifest import RunManifest
    from loadgen.core.slo import Slo


class MeasuredAndWarmup(NamedTuple):
    """What is known of one target, class or step: in the measured stages, and in all others."""

    measured: MetricAccumulator
    warmup: MetricAccumulator

    def of_stage(self, plan: StagePlan) -> MetricAccumulator:
        """Return the one to which the records of a stage belong."""
        return self.measured if plan.measured else self.warmup


class CutConversations(NamedTuple):
    """Measured conversations whose last turn was never scheduled.

    A conversation with a turn that was cancelled counts as `cancelled` only.
    """

    by_end_of_load: int
    cancelled: int


class RunAccumulator:
    """The records of a run added up, for each stage, target, class and step.

    A conversation lies within one stage. One whose last turn was never scheduled is counted by
    `count_cut_conversations` alone.
    """

    def __init__(self, manifest: RunManifest, rows: NDArray[np.void], texts: Sequence[str]) -> None:
        """Add up all records of a run.

        Args:
            manifest: The manifest of the run.
            rows: The records of all stages.
            texts: Error texts and other texts of records, which `rows["text"]` indexes.
        """
        self._manifest = manifest
        self._plans = manifest.stages or (StagePlan(),)
        self.stages = [MetricAccumulator(manifest.slo) for _ in self._plans]
        # A single target has the records of the run, so it is not accumulated once more.
        target_count = len(manifest.targets) if len(manifest.targets) > 1 else 0
        self.targets = _new_pairs([manifest.slo] * target_count)
        self.classes = _new_pairs([plan.slo for plan in manifest.classes])
        self.steps = _new_pairs([None] * len(manifest.steps))
        # For each measured stage, the conversations that the end of the load cut off.
        self._cut_conversation_numbers: list[NDArray[np.int64]] = []
        self._is_cut_conversation_cancelled: list[NDArray[np.bool_]] = []
        for stage in range(len(self._plans)):
            self._add_stage(stage, rows, texts)

    def _add_stage(self, stage: int, rows: NDArray[np.void], texts: Sequence[str]) -> None:
        """Add the records of a stage to the stage and to its targets, classes and steps.

        Args:
            stage: The index of the stage.
            rows: The records of all stages.
            texts: The texts of records.
        """
        plan = self._plans[stage]
        accumulator = self.stages[stage]
        # Columns that are read once more for each target, class or step stay in memory.
        has_parts = bool(self.targets or self.classes or self.steps)
        columns = Columns(rows, rows["stage"] == stage, keep_all=has_parts)
        accumulator.add(columns, texts, is_open_loop=not plan.closed)
        if not len(columns):
            return
        self._add_conversations(stage, columns)
        self._add_user_times(stage, columns)
        for pairs, index_of_row in self._assign_rows(columns):
            for index, pair in enumerate(pairs):
                part_columns = Columns(columns, index_of_row == index)
                part = pair.of_stage(plan)
                part.add(part_columns, texts, is_open_loop=not plan.closed)
                part_columns.forget()

    def _add_user_times(self, stage: int, columns: Columns) -> None:
        """Add when the virtual users of a closed loop began and ended.

        Between the last start and the first ends, the load runs at its full concurrency. In an open
        loop no time is added.
        """
        plan = self._plans[stage]
        accumulator = self.stages[stage]
        turns = self._manifest.turns_per_session
        is_first = is_first_request_of_user(columns, plan, turns)
        is_last = is_last_request_of_user(columns, plan, turns)
        accumulator.add_maximum("user_start", columns["due_ns"][is_first])
        accumulator.sample("user_end").add(columns["done_ns"][is_last])

    def _assign_rows(
        self, columns: Columns
    ) -> Iterator[tuple[list[MeasuredAndWarmup], NDArray[np.int64]]]:
        """Yield the targets, the classes and the steps, each with the assignment of the records.

        The assignment has, for each record, the index of its target, class or step in the list. A
        record of no step has NO_STEP, which is no index.
        """
        if self.targets:
            yield self.targets, columns["target"]
        if self.classes:
            start_ids = columns["request"] // self._manifest.turns_per_session
            yield self.classes, class_indices(self._manifest, start_ids)
        if self.steps:
            yield self.steps, step_indices(self._manifest, columns["request"], columns["turn"])

    def _add_conversations(self, stage: int, columns: Columns) -> None:
        """Add the conversations and tasks of a stage whose last request is recorded.

        The end of the load cuts off a conversation whose last turn was never scheduled. Such a one
        has no outcome. In a measured stage it is counted by `count_cut_conversations`.
        """
        table = tasks.tabulate_tasks(columns, self._manifest.turns_per_session)
        if not len(table.numbers):
            return
        plan = self._plans[stage]
        if plan.measured:
            is_cut = ~table.has_ended
            self._cut_conversation_numbers.append(table.numbers[is_cut])
            self._is_cut_conversation_cancelled.append(table.columns.cancelled[is_cut] > 0)
        ended = table.columns.select(table.has_ended)
        _add_ended_tasks(self.stages[stage], ended)
        if self.classes:
            class_of_task = class_indices(self._manifest, table.numbers[table.has_ended])
            for index, pair in enumerate(self.classes):
                _add_ended_tasks(pair.of_stage(plan), ended.select(class_of_task == index))

    def count_cut_conversations(self, class_index: int | None = None) -> CutConversations:
        """Count the measured conversations of a class, or of all, that the load cut off."""
        numbers = join_arrays(self._cut_conversation_numbers)
        is_cancelled = np.concatenate([np.zeros(0, bool), *self._is_cut_conversation_cancelled])
        if class_index is not None and len(numbers):
            is_cancelled = is_cancelled[class_indices(self._manifest, numbers) == class_index]
        cancelled = int(is_cancelled.sum())
        return CutConversations(by_end_of_load=len(is_cancelled) - cancelled, cancelled=cancelled)

    def measured_and_warmup(self) -> MeasuredAndWarmup:
        """Return the total of all measured stages, and that of all other stages."""
        stages = list(zip(self.stages, self._plans, strict=True))
        measured = [accumulator for accumulator, plan in stages if plan.measured]
        warmup = [accumulator for accumulator, plan in stages if not plan.measured]
        return MeasuredAndWarmup(self._merge(measured), self._merge(warmup))

    def _merge(self, accumulators: Sequence[MetricAccumulator]) -> MetricAccumulator:
        """Return what several accumulators add up to. A single one is not copied."""
        if len(accumulators) == 1:
            return accumulators[0]
        total = MetricAccumulator(self._manifest.slo)
        for accumulator in accumulators:
            total.merge(accumulator)
        return total

    def of_targets(self, numbers: Sequence[int]) -> MeasuredAndWarmup:
        """Return the total of several targets, such as those of a region."""
        pairs = [self.targets[number] for number in numbers]
        return MeasuredAndWarmup(
            self._merge([pair.measured for pair in pairs]),
            self._merge([pair.warmup for pair in pairs]),
        )

    def of_classes(self, numbers: Sequence[int]) -> MeasuredAndWarmup:
        """Return the total of several classes, such as those of a model, without their SLOs."""
        total = MeasuredAndWarmup(MetricAccumulator(), MetricAccumulator())
        for number in numbers:
            total.measured.merge(self.classes[number].measured)
            total.warmup.merge(self.classes[number].warmup)
        return total


def _new_pairs(slos: Sequence[Slo | None]) -> list[MeasuredAndWarmup]:
    """Return a pair of empty accumulators for each SLO."""
    return [MeasuredAndWarmup(MetricAccumulator(slo), MetricAccumulator(slo)) for slo in slos]


def _add_ended_tasks(accumulator: MetricAccumulator, ended: TaskColumns) -> None:
    """Add conversations and tasks whose last request is recorded.

    The sums "sessions..." count them: all, cancelled ones, those whose user went away, and those
    that the end of the drain cut. Durations, waits and tokens are those of the ok ones, of which
    all requests are ok. If the SLO limits whole tasks, those within its limits are counted too.
    """
    is_ok = ended.ok > 0
    is_cancelled = ended.cancelled > 0
    is_cut_by_drain = (ended.unfinished > 0) & ~is_cancelled
    accumulator.add_to_sum("sessions", len(is_ok))
    accumulator.add_to_sum("sessions_cancelled", is_cancelled.sum())
    accumulator.add_to_sum("sessions_abandoned", ended.abandoned.sum())
    accumulator.add_to_sum("sessions_cut", is_cut_by_drain.sum())

    ok = ended.select(is_ok)
    accumulator.add_to_sum("sessions_ok", len(ok.end_ns))
    accumulator.sample("session").add(ok.end_ns - ok.due_ns)
    accumulator.sample("session_wait").add(ok.wait_ns)
    accumulator.sample("session_longest_wait").add(ok.longest_wait_ns)
    accumulator.add_to_sum("session_requests", ok.requests.sum())
    accumulator.add_to_sum("session_input", ok.input_tokens.sum())
    accumulator.add_to_sum("session_cached", ok.cached_tokens.sum())
    accumulator.add_to_sum("session_output", ok.output_tokens.sum())
    _add_task_ends(accumulator, "session", ok.end_ns)

    if accumulator.slo is not None and accumulator.slo.task is not None:
        good = ended.select(tasks.meets_task_term(ended, accumulator.slo.task))
        accumulator.add_to_sum("sessions_good", len(good.end_ns))
        _add_task_ends(accumulator, "good_session", good.end_ns)


def _add_task_ends(accumulator: MetricAccumulator, name: str, end_ns: NDArray[np.int64]) -> None:
    """Add tasks as amounts of 1 at their ends, for the rate of tasks in an interval."""
    accumulator.amount(name).add(end_ns, end_ns, np.ones(len(end_ns), np.int64))
