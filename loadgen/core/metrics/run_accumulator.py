"""Adds up the records of a run for each stage, target, class and step. Pure numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadgen.core.metrics import tasks
from loadgen.core.metrics.accumulator import MetricAccumulator
from loadgen.core.metrics.columns import Columns, class_indices, step_indices
from loadgen.core.metrics.tasks import TaskColumns
from loadgen.core.metrics.windows import first_round, last_round
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
        """Add up all records of a run. `rows["text"]` indexes `texts`."""
        self._manifest = manifest
        self._plans = manifest.stages or (StagePlan(),)
        target_count = len(manifest.targets) if len(manifest.targets) > 1 else 0
        self.stages = [MetricAccumulator(manifest.slo) for _ in self._plans]
        self.targets = _new_pairs([manifest.slo] * target_count)
        self.classes = _new_pairs([plan.slo for plan in manifest.classes])
        self.steps = _new_pairs([None] * len(manifest.steps))
        self._cut_conversations: list[NDArray[np.int64]] = []
        self._cut_is_cancelled: list[NDArray[np.bool_]] = []
        for stage in range(len(self._plans)):
            self._add_stage(stage, rows, texts)

    def _add_stage(self, stage: int, rows: NDArray[np.void], texts: Sequence[str]) -> None:
        """Add the records of a stage to the stage and to its targets, classes and steps.

        The columns of the stage stay in memory if they are read for several parts. Where its
        virtual users began and ended bounds the time in which the load runs in full.
        """
        plan = self._plans[stage]
        accumulator = self.stages[stage]
        has_parts = bool(self.targets or self.classes or self.steps)
        columns = Columns(rows, rows["stage"] == stage, keep_all=has_parts)
        accumulator.add(columns, texts, is_open_loop=not plan.closed)
        if not len(columns):
            return
        self._add_conversations(stage, columns)
        turns = self._manifest.turns_per_session
        accumulator.sample("user_end").add(columns["done_ns"][last_round(columns, plan, turns)])
        accumulator.add_maximum("user_start", columns["due_ns"][first_round(columns, plan, turns)])
        for pairs, part_of_row in self._parts_of_rows(columns):
            for number, pair in enumerate(pairs):
                part_columns = Columns(columns, part_of_row == number)
                part_accumulator = pair.of_stage(plan)
                part_accumulator.add(part_columns, texts, is_open_loop=not plan.closed)
                part_columns.forget()

    def _parts_of_rows(
        self, columns: Columns
    ) -> Iterator[tuple[list[MeasuredAndWarmup], NDArray[np.int64]]]:
        """Yield the targets, the classes and the steps, and which one each record belongs to.

        It is given as an index of the list; a record of no step has NO_STEP.
        """
        yield self.targets, columns["target"]
        if self.classes:
            yield (
                self.classes,
                class_indices(
                    self._manifest, columns["request"] // self._manifest.turns_per_session
                ),
            )
        if self.steps:
            yield self.steps, step_indices(self._manifest, columns["request"], columns["turn"])

    def _add_conversations(self, stage: int, columns: Columns) -> None:
        """Add the conversations and tasks of a stage, and set those aside that the load cut off.

        The end of the load cuts a conversation if its last turn was never scheduled. It has no
        outcome, and is only counted.
        """
        table = tasks.tabulate_tasks(columns, self._manifest.turns_per_session)
        if not len(table.numbers):
            return
        plan = self._plans[stage]
        is_cut = ~table.has_ended
        if plan.measured:
            self._cut_conversations.append(table.numbers[is_cut])
            self._cut_is_cancelled.append(table.columns.cancelled[is_cut] > 0)
        ended = table.columns.select(table.has_ended)
        _add_ended_tasks(self.stages[stage], ended)
        if self.classes:
            class_index = class_indices(self._manifest, table.numbers[table.has_ended])
            for index, pair in enumerate(self.classes):
                _add_ended_tasks(pair.of_stage(plan), ended.select(class_index == index))

    def count_cut_conversations(self, class_index: int | None = None) -> CutConversations:
        """Count the measured conversations of a class, or of all, that the load cut off."""
        numbers = np.concatenate([np.zeros(0, np.int64), *self._cut_conversations])
        is_cancelled = np.concatenate([np.zeros(0, bool), *self._cut_is_cancelled])
        if class_index is not None and len(numbers):
            is_cancelled = is_cancelled[class_indices(self._manifest, numbers) == class_index]
        cancelled = int(is_cancelled.sum())
        return CutConversations(len(is_cancelled) - cancelled, cancelled)

    def measured_and_warmup(self) -> MeasuredAndWarmup:
        """Return what all measured stages add up to, and what all others do."""
        measured: list[MetricAccumulator] = []
        warmup: list[MetricAccumulator] = []
        for accumulator, plan in zip(self.stages, self._plans, strict=True):
            (measured if plan.measured else warmup).append(accumulator)
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
        """Return what several targets add up to."""
        pairs = [self.targets[number] for number in numbers]
        return MeasuredAndWarmup(
            self._merge([pair.measured for pair in pairs]),
            self._merge([pair.warmup for pair in pairs]),
        )

    def of_classes(self, numbers: Sequence[int]) -> MeasuredAndWarmup:
        """Return what several classes add up to, without their SLOs."""
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

    Times, tokens and rates are those of tasks of which all requests are ok.
    """
    ok = ended.ok > 0
    is_cut = (ended.unfinished > 0) & ~(ended.cancelled > 0)
    accumulator.add_to_sum("sessions", len(ok))
    accumulator.add_to_sum("sessions_cancelled", (ended.cancelled > 0).sum())
    accumulator.add_to_sum("sessions_abandoned", ended.abandoned.sum())
    accumulator.add_to_sum("sessions_cut", is_cut.sum())
    accumulator.add_to_sum("sessions_ok", ok.sum())
    accumulator.sample("session").add((ended.end_ns - ended.due_ns)[ok])
    accumulator.sample("session_wait").add(ended.wait_ns[ok])
    accumulator.sample("session_longest_wait").add(ended.longest_wait_ns[ok])
    accumulator.add_to_sum("session_requests", ended.requests[ok].sum())
    accumulator.add_to_sum("session_input", ended.input_tokens[ok].sum())
    accumulator.add_to_sum("session_cached", ended.cached_tokens[ok].sum())
    accumulator.add_to_sum("session_output", ended.output_tokens[ok].sum())
    _add_task_ends(accumulator, "session", ended.end_ns[ok])
    if accumulator.slo is not None and accumulator.slo.task is not None:
        good_end_ns = ended.end_ns[tasks.meets_task_term(ended, accumulator.slo.task)]
        accumulator.add_to_sum("sessions_good", len(good_end_ns))
        _add_task_ends(accumulator, "good_session", good_end_ns)


def _add_task_ends(accumulator: MetricAccumulator, name: str, end_ns: NDArray[np.int64]) -> None:
    """Add tasks as amounts of 1 at their ends, for the rate of tasks in an interval."""
    accumulator.amount(name).add(end_ns, end_ns, np.ones(len(end_ns), np.int64))
