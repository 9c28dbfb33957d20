"""Adds up the records of a run for each stage, target, class and step. Pure numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadgen.core.metrics import tasks
from loadgen.core.metrics.accumulator import MetricAccumulator
from loadgen.core.metrics.columns import (
    Columns,
    class_indices,
    request_class_indices,
    step_indices,
)
from loadgen.core.metrics.tasks import TaskColumns, TaskTable
from loadgen.core.metrics.windows import is_first_request_of_user, is_last_request_of_user
from loadgen.core.results.manifest import StagePlan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from loadgen.core.results.manifest import RunManifest
    from loadgen.core.slo import Slo, TaskTerm
    from loadgen.core.stats.amounts import Amounts


class MeasuredAndWarmup(NamedTuple):
    """The requests of one target, class or step: in the measured stages, and in all others."""

    measured: MetricAccumulator
    warmup: MetricAccumulator

    def of_stage(self, plan: StagePlan) -> MetricAccumulator:
        """Return the accumulator to which the records of a stage belong."""
        return self.measured if plan.measured else self.warmup


class CutConversations(NamedTuple):
    """Measured conversations whose last turn was never scheduled.

    A conversation with a turn that was cancelled counts as `cancelled` only.
    """

    by_end_of_load: int
    cancelled: int


class _CutConversationTable(NamedTuple):
    """The conversations of a stage whose last turn was never scheduled, as columns.

    Attributes:
        ids: The id of each conversation, which decides its class.
        is_cancelled: Whether one of its turns was cancelled.
    """

    ids: NDArray[np.int64]
    is_cancelled: NDArray[np.bool_]


class _PartGrouping(NamedTuple):
    """How records are divided among targets, among classes or among steps.

    Attributes:
        parts: The accumulators of the targets, classes or steps.
        part_of_record: The index of the part that each record belongs to. It is NO_STEP, which is
            no index, for a record that belongs to none.
    """

    parts: list[MeasuredAndWarmup]
    part_of_record: NDArray[np.int64]


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

        # Empty accumulators. A run with a single target needs none for the target, because all
        # records are those of the target. Each class has an SLO of its own, and steps have none.
        has_several_targets = len(manifest.targets) > 1
        accumulated_targets = manifest.targets if has_several_targets else ()
        self.stages = [MetricAccumulator(manifest.slo) for _ in self._plans]
        self.targets = [_create_part(manifest.slo) for _ in accumulated_targets]
        self.classes = [_create_part(plan.slo) for plan in manifest.classes]
        self.steps = [_create_part(slo=None) for _ in manifest.steps]

        # For each measured stage, the conversations whose last turn was never scheduled.
        self._cut_conversations: list[_CutConversationTable] = []

        for stage in range(len(self._plans)):
            self._add_stage(stage, rows, texts)

    def _add_stage(self, stage: int, rows: NDArray[np.void], texts: Sequence[str]) -> None:
        """Add up the records of a stage, for the whole stage and for each of its parts.

        Args:
            stage: The index of the stage.
            rows: The records of all stages.
            texts: Error texts and other texts of records, which `rows["text"]` indexes.
        """
        plan = self._plans[stage]

        # Each target, class and step reads the columns again, so they stay in memory.
        has_parts = bool(self.targets or self.classes or self.steps)
        columns = Columns(rows, rows["stage"] == stage, keep_all=has_parts)

        self.stages[stage].add(columns, texts, is_open_loop=not plan.closed)
        if not len(columns):
            return

        self._add_conversations(stage, columns)
        self._add_user_times(stage, columns)
        self._add_to_parts(plan, columns, texts)

    def _add_to_parts(self, plan: StagePlan, columns: Columns, texts: Sequence[str]) -> None:
        """Add the records of a stage to the targets, classes and steps that they belong to.

        Args:
            plan: The plan of the stage.
            columns: The records of the stage.
            texts: Error texts and other texts of records, which `columns["text"]` indexes.
        """
        for grouping in self._group_by_part(columns):
            for part_index, part in enumerate(grouping.parts):
                is_of_part = grouping.part_of_record == part_index
                part_columns = Columns(columns, is_of_part)
                accumulator = part.of_stage(plan)
                accumulator.add(part_columns, texts, is_open_loop=not plan.closed)

                # Free the memory. The columns are read again if they are needed.
                part_columns.clear_cache()

    def _add_user_times(self, stage: int, columns: Columns) -> None:
        """Add when the last virtual user of a stage started, and when each virtual user ended.

        A virtual user of a closed loop sends one request after the other. An open loop has no
        virtual users, so nothing is added.

        Args:
            stage: The index of the stage.
            columns: The records of the stage.
        """
        plan = self._plans[stage]
        turns = self._manifest.turns_per_session
        is_first_of_user = is_first_request_of_user(columns, plan, turns)
        is_last_of_user = is_last_request_of_user(columns, plan, turns)
        user_starts_ns = columns["due_ns"][is_first_of_user]
        user_ends_ns = columns["done_ns"][is_last_of_user]

        accumulator = self.stages[stage]
        accumulator.add_maximum("user_start", user_starts_ns)
        accumulator.user_ends_ns.add(user_ends_ns)

    def _group_by_part(self, columns: Columns) -> Iterator[_PartGrouping]:
        """Yield how the records are divided among targets, among classes and among steps.

        Each grouping has the index of the target, class or step of each record.
        """
        if self.targets:
            target_of_record = columns["target"]
            yield _PartGrouping(self.targets, target_of_record)

        if self.classes:
            class_of_record = request_class_indices(self._manifest, columns["request"])
            yield _PartGrouping(self.classes, class_of_record)

        if self.steps:
            step_of_record = step_indices(self._manifest, columns["request"], columns["turn"])
            yield _PartGrouping(self.steps, step_of_record)

    def _add_conversations(self, stage: int, columns: Columns) -> None:
        """Add the conversations of a stage. The tasks of agents count as conversations, too.

        A conversation has ended if its last request has a record. Otherwise it was cut off, which
        matters in measured stages only.

        Args:
            stage: The index of the stage.
            columns: The records of the stage.
        """
        conversations = tasks.tabulate_tasks(columns, self._manifest.turns_per_session)
        if len(conversations.numbers) == 0:
            return

        self._add_ended_conversations(stage, conversations)

        is_measured = self._plans[stage].measured
        if is_measured:
            self._cut_conversations.append(_select_cut_conversations(conversations))

    def _add_ended_conversations(self, stage: int, conversations: TaskTable) -> None:
        """Add the ended conversations to the sums of their stage and of their request class.

        Args:
            stage: The index of the stage.
            conversations: The conversations of the stage, ended or not.
        """
        ended = conversations.columns.select(conversations.has_ended)
        _add_ended_tasks(self.stages[stage], ended)
        if not self.classes:
            return

        plan = self._plans[stage]
        ended_ids = conversations.numbers[conversations.has_ended]
        class_of_ended = class_indices(self._manifest, ended_ids)
        for class_index, request_class in enumerate(self.classes):
            ended_of_class = ended.select(class_of_ended == class_index)
            _add_ended_tasks(request_class.of_stage(plan), ended_of_class)

    def count_cut_conversations(self, class_index: int | None = None) -> CutConversations:
        """Count the conversations cut off by a cancelled turn or by the end of the load.

        Args:
            class_index: The request class whose conversations are counted. None counts all.
        """
        by_end_of_load = 0
        cancelled = 0
        for table in self._cut_conversations:
            is_cancelled = table.is_cancelled
            if class_index is not None:
                class_of_conversation = class_indices(self._manifest, table.ids)
                is_cancelled = is_cancelled[class_of_conversation == class_index]

            cancelled += int(np.count_nonzero(is_cancelled))
            by_end_of_load += int(np.count_nonzero(~is_cancelled))

        return CutConversations(by_end_of_load=by_end_of_load, cancelled=cancelled)

    def measured_and_warmup(self) -> MeasuredAndWarmup:
        """Return the total of all measured stages, and that of all other stages."""
        stages = list(zip(self.stages, self._plans, strict=True))
        measured = [accumulator for accumulator, plan in stages if plan.measured]
        warmup = [accumulator for accumulator, plan in stages if not plan.measured]
        return MeasuredAndWarmup(self._merge(measured), self._merge(warmup))

    def _merge(self, accumulators: Sequence[MetricAccumulator]) -> MetricAccumulator:
        """Return the total of several accumulators. A single accumulator is not copied."""
        if len(accumulators) == 1:
            return accumulators[0]

        total = MetricAccumulator(self._manifest.slo)
        for accumulator in accumulators:
            total.merge(accumulator)
        return total

    def of_targets(self, numbers: Sequence[int]) -> MeasuredAndWarmup:
        """Return the total of several targets, such as those of a region."""
        parts = [self.targets[number] for number in numbers]
        return MeasuredAndWarmup(
            measured=self._merge([part.measured for part in parts]),
            warmup=self._merge([part.warmup for part in parts]),
        )

    def of_classes(self, numbers: Sequence[int]) -> MeasuredAndWarmup:
        """Return the total of several classes, such as those of a model, without their SLOs."""
        total = MeasuredAndWarmup(MetricAccumulator(), MetricAccumulator())
        for number in numbers:
            total.measured.merge(self.classes[number].measured)
            total.warmup.merge(self.classes[number].warmup)
        return total


def _create_part(slo: Slo | None) -> MeasuredAndWarmup:
    """Return empty accumulators of one target, class or step."""
    return MeasuredAndWarmup(measured=MetricAccumulator(slo), warmup=MetricAccumulator(slo))


def _select_cut_conversations(table: TaskTable) -> _CutConversationTable:
    """Return the conversations and tasks of a stage whose last turn was never scheduled."""
    is_cut = ~table.has_ended
    is_cancelled = table.columns.cancelled > 0
    return _CutConversationTable(table.numbers[is_cut], is_cancelled[is_cut])


def _add_ended_tasks(accumulator: MetricAccumulator, ended: TaskColumns) -> None:
    """Count tasks by how they ended, and add the times and tokens of the ok tasks.

    Args:
        accumulator: The sums to add to.
        ended: Tasks whose last request has ended. A conversation is a task, too.
    """
    _count_task_outcomes(accumulator, ended)

    is_ok = ended.ok == 1
    _add_ok_tasks(accumulator, ended.select(is_ok))

    slo = accumulator.slo
    if slo is not None and slo.task is not None:
        _add_good_tasks(accumulator, ended, slo.task)


def _count_task_outcomes(accumulator: MetricAccumulator, ended: TaskColumns) -> None:
    """Count tasks by how they ended.

    - "tasks": all tasks.
    - "tasks_cancelled": a request was cancelled.
    - "tasks_abandoned": the user went away during a response.
    - "tasks_cut": a request was unfinished when the run ended, and none was cancelled.
    """
    is_cancelled = ended.cancelled == 1
    is_abandoned = ended.abandoned == 1
    is_cut_by_end_of_run = (ended.unfinished == 1) & ~is_cancelled

    accumulator.add_to_sum("tasks", len(ended.due_ns))
    accumulator.add_to_sum("tasks_cancelled", is_cancelled.sum())
    accumulator.add_to_sum("tasks_abandoned", is_abandoned.sum())
    accumulator.add_to_sum("tasks_cut", is_cut_by_end_of_run.sum())


def _add_good_tasks(
    accumulator: MetricAccumulator, ended: TaskColumns, task_term: TaskTerm
) -> None:
    """Count the good tasks, which meet the SLO on whole tasks, and add the times of their ends.

    Args:
        accumulator: The sums to add to.
        ended: Tasks whose last request has ended.
        task_term: The limits of the SLO on the duration of a task and on its waits.
    """
    is_good = tasks.meets_task_term(ended, task_term)
    accumulator.add_to_sum("tasks_good", is_good.sum())
    _add_task_ends(accumulator.task_times.good_ends, ended.end_ns[is_good])


def _add_ok_tasks(accumulator: MetricAccumulator, ok: TaskColumns) -> None:
    """Add the durations, the waits for first tokens and the tokens of tasks that ended ok."""
    durations_ns = ok.end_ns - ok.due_ns
    times = accumulator.task_times
    times.durations_ns.add(durations_ns)
    times.waits_ns.add(ok.wait_ns)
    times.longest_waits_ns.add(ok.longest_wait_ns)
    _add_task_ends(times.ok_ends, ok.end_ns)

    accumulator.add_to_sum("tasks_ok", len(ok.end_ns))
    accumulator.add_to_sum("task_requests", ok.requests.sum())
    accumulator.add_to_sum("task_input", ok.input_tokens.sum())
    accumulator.add_to_sum("task_cached", ok.cached_tokens.sum())
    accumulator.add_to_sum("task_output", ok.output_tokens.sum())


def _add_task_ends(task_ends: Amounts, end_ns: NDArray[np.int64]) -> None:
    """Add an amount of 1 at the end of each task, for the rate of tasks in an interval."""
    ones = np.ones(len(end_ns), np.int64)
    task_ends.add(end_ns, end_ns, ones)
