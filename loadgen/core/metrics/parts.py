"""The parts of a summary: by stage, target, region, node, class, model and step. Pure.

docs/summary.md defines each field.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from loadgen.core import format
from loadgen.core.metrics import blocks, drift, guards
from loadgen.core.metrics.accumulator import (
    Accumulator,
    CutConversations,
    MeasuredAndWarmup,
    MetricAccumulator,
)
from loadgen.core.metrics.blocks import Bytes, RequestCounts, Sessions, Tokens
from loadgen.core.metrics.goodput import Goodput, goodput, of_classes, with_tasks
from loadgen.core.metrics.load import Load, load
from loadgen.core.metrics.steps import StepTime
from loadgen.core.metrics.windows import Window, per_second
from loadgen.core.results.manifest import ClassPlan, StepPlan, TargetFacts
from loadgen.core.stats.quantiles import Distribution, Histogram
from loadgen.figures import pooled_figures

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from loadgen.core.results.manifest import RunManifest


class StageSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One stage over its own window. Only rows of this stage count, except for requests in flight (all rows)."""

    name: str
    arrival: str
    measured: bool
    concurrency: int | None
    ramp_s: float | None = (
        None  # the lanes of a closed loop begin spread over it; 0: in one instant
    )
    ramp_from: str = ""  # asked, probe, preset, or stage: lanes are taken over; "": not known
    window: Window
    requests: RequestCounts
    load: Load
    tokens: Tokens
    ttft_ms: Distribution
    tpot_ms: Distribution
    inter_chunk_ms: Distribution
    e2e_ms: Distribution
    goodput: Goodput


class TargetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One of several targets: its measured requests, over the window of the whole run."""

    target: TargetFacts
    requests: RequestCounts
    bytes: Bytes
    load: Load
    tokens: Tokens
    ttft_ms: Distribution
    tpot_ms: Distribution
    e2e_ms: Distribution
    goodput: Goodput
    own_output_per_s: float | None = (
        None  # over this target's own window: its first due instant to its last token
    )


class ClassSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One of several classes of requests: its measured requests, over the window of the whole run."""

    name: str
    share: float  # of all starts, as asked: single requests, conversations and tasks
    starts: int  # of this class: single requests, conversations and tasks
    model: str | None = None
    priority: int | None = None
    tenant: str | None = None
    requests: RequestCounts
    bytes: Bytes
    load: Load
    tokens: Tokens
    ttft_ms: Distribution
    tpot_ms: Distribution
    e2e_ms: Distribution
    goodput: Goodput  # under the SLO of the class
    sessions: Sessions | None = None  # null for a class of single requests


class ModelSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One of several models or adapters that the classes of a run ask for: the requests of these classes together."""

    model: str
    classes: tuple[str, ...]
    requests: RequestCounts
    bytes: Bytes
    load: Load
    tokens: Tokens
    ttft_ms: Distribution
    tpot_ms: Distribution
    e2e_ms: Distribution
    goodput: Goodput  # each class under its own SLO


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the tasks: its measured requests, over the window of the whole run.

    The shares are of the time of the tasks that ended ok, all of which add up to 1; null where no task ended ok.
    """

    name: str
    of_class: str = ""  # "": all requests are of one kind
    kind: str = "chat"  # chat, embed, rerank
    targets: tuple[
        str, ...
    ] = ()  # names of those that serve such steps alone; empty: those of all other requests
    model: str | None = None
    requests: RequestCounts
    bytes: Bytes
    load: Load
    tokens: Tokens
    ttft_ms: Distribution
    tpot_ms: Distribution
    e2e_ms: Distribution
    time_share: float | None = None
    pause: str = ""  # what passes before its requests: names of tools, "thinking"; "": nothing
    pause_ms: Distribution = Distribution()
    pause_share: float | None = None


class RackTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens/s of several targets by two definitions, which differ when the targets do not end together.

    `sum_of_rates_per_s` adds each target's rate over its own window, as published rack totals do. `single_clock_per_s`
    treats the targets as one system: all tokens divided by the duration of the whole run. The other fields describe the
    rates of the single targets.
    """

    targets: int
    sum_of_rates_per_s: float
    single_clock_per_s: float | None
    min_per_s: float
    mean_per_s: float
    median_per_s: float
    max_per_s: float
    spread: float  # (max - min) / median


_NO_GAPS_BY_PART = dict.fromkeys(pooled_figures(), "gaps are counted for all targets together")


class Parts(msgspec.Struct, frozen=True):
    """What the figures of the run, of its stages and of its targets have alike.

    `measured`: of the whole run. `whole`: it, where the figures are those of a part of it over the same time.
    """

    header: RunManifest
    undecided: Mapping[str, str]  # metrics on which no SLO term can be decided -> why
    measured: MetricAccumulator
    whole: MetricAccumulator | None = None

    def figures(
        self,
        cell: MetricAccumulator,
        everything: Sequence[MetricAccumulator],
        inside: Window,
        arrival: str,
        timeline: Sequence[NDArray[np.int64]],
        gpus: int | None,
        gaps: Histogram,
        unrecorded: int,
    ) -> dict[str, Any]:
        return {
            "requests": blocks.requests(cell, unrecorded),
            "load": load(cell, everything, inside, arrival, self.header.stages, self.whole),
            "tokens": blocks.tokens(cell, everything, inside, timeline, gpus),
            "goodput": goodput(
                cell,
                cell.slo,
                inside,
                gaps,
                unrecorded,
                self.undecided,
                limits=self.header.limits,
            ),
            **{
                f"{metric}_ms": guards.guard_metric(
                    cell.columns, metric, cell.distribution(metric), self.header.limits
                )
                for metric in drift.SHOWN
            },
        }

    def missed_without_dropped(
        self, accumulator: Accumulator, gaps: Histogram, inside: Window, lost: int
    ) -> bool:
        """Whether the SLO, or that of a class, is missed also without the starts that the client dropped."""
        whole = (accumulator.measured(), gaps, lost, self.undecided)
        of_classes = (
            (pair.measured, Histogram(), 0, self._by_part) for pair in accumulator.classes
        )
        results = (
            goodput(
                cell,
                cell.slo,
                inside,
                own_gaps,
                unrecorded,
                undecided,
                limits=self.header.limits,
                dropped_too=False,
            )
            for cell, own_gaps, unrecorded, undecided in (whole, *of_classes)
        )
        return any(result.met is False for result in results)

    @property
    def _by_part(self) -> dict[str, str]:
        """What is undecided of one of several targets or classes."""
        return {**_NO_GAPS_BY_PART, **self.undecided}

    def of_target(
        self, target: TargetFacts, everything: MeasuredAndWarmup, inside: Window
    ) -> TargetSummary:
        """One of several targets, or all of a region."""
        cell = everything.measured
        own_output_per_s = per_second(
            cell.sum_known("output_tokens"), blocks.window(cell, everything)
        )
        figures = self._of_part(everything, inside, target.gpus)
        return TargetSummary(target=target, own_output_per_s=own_output_per_s, **figures)

    def of_class(
        self, plan: ClassPlan, everything: MeasuredAndWarmup, inside: Window, cut: CutConversations
    ) -> ClassSummary:
        """One of several classes. `cut`: its conversations without an end."""
        figures = self._of_part(everything, inside, None)
        tasks = blocks.sessions(everything.measured, cut, inside)
        figures["goodput"] = with_tasks(figures["goodput"], tasks)
        starts = everything.measured.sum("starts")
        return ClassSummary(**shared(plan, ClassSummary), starts=starts, sessions=tasks, **figures)

    def of_model(
        self,
        model: str,
        everything: MeasuredAndWarmup,
        inside: Window,
        classes: Sequence[ClassSummary],
    ) -> ModelSummary:
        """One of several models, with the cells of its classes together."""
        good = of_classes([part.goodput for part in classes])
        figures = self._of_part(everything, inside, None) | {"goodput": good}
        return ModelSummary(model=model, classes=tuple(part.name for part in classes), **figures)

    def of_step(
        self, plan: StepPlan, everything: MeasuredAndWarmup, inside: Window, time: StepTime
    ) -> StepSummary:
        """One of the steps of tasks."""
        figures = self._of_part(everything, inside, None)
        del figures["goodput"]  # what was promised is promised of all requests, and of tasks
        targets = [self.header.targets[number] for number in plan.targets]
        names = tuple(target.name or target.url for target in targets if target.serves)
        return StepSummary(
            **shared(plan, StepSummary) | {"targets": names},
            **figures,
            **msgspec.structs.asdict(time),
        )

    def _of_part(
        self, everything: MeasuredAndWarmup, inside: Window, gpus: int | None
    ) -> dict[str, Any]:
        cell = everything.measured
        parts = msgspec.structs.replace(self, undecided=self._by_part, whole=self.measured)
        figures = parts.figures(cell, everything, inside, "", (), gpus, Histogram(), 0)
        for columns in cell.columns:
            columns.forget()
        return {"bytes": blocks.bytes(cell), **figures}

    def by_part(
        self, accumulator: Accumulator, inside: Window, times: Sequence[StepTime], model: str
    ) -> dict[str, Any]:
        """The blocks of targets, regions, nodes, classes, models and steps. `model`: of a class that names none."""
        header = self.header

        def together(by: Literal["region", "node"]) -> tuple[TargetSummary, ...]:
            return tuple(
                self.of_target(facts, accumulator.of_targets(numbers), inside)
                for facts, numbers in _grouped(header.targets, by)
            )

        classes = tuple(
            self.of_class(plan, pair, inside, accumulator.count_cut_conversations(i))
            for i, (plan, pair) in enumerate(zip(header.classes, accumulator.classes, strict=True))
        )
        by_model: dict[str, list[int]] = {}
        for i, plan in enumerate(header.classes):
            by_model.setdefault(plan.model or model, []).append(i)
        return {
            "targets": tuple(
                self.of_target(facts, pair, inside)
                for facts, pair in zip(header.targets, accumulator.targets, strict=False)
            ),
            "regions": together("region"),
            "nodes": together("node"),
            "classes": classes,
            "models": tuple(
                self.of_model(
                    name, accumulator.of_classes(numbers), inside, [classes[i] for i in numbers]
                )
                for name, numbers in (by_model.items() if len(by_model) > 1 else ())
            ),
            "steps": tuple(
                self.of_step(plan, pair, inside, time)
                for plan, pair, time in zip(header.steps, accumulator.steps, times, strict=True)
            ),
        }


def shared(facts: msgspec.Struct, block: type[msgspec.Struct]) -> dict[str, Any]:
    """The values of the fields that a block of the summary has from facts of the header, under the same names."""
    return {
        name: getattr(facts, name)
        for name in block.__struct_fields__
        if name in facts.__struct_fields__
    }


def whole_target(targets: Sequence[TargetFacts]) -> TargetFacts:
    """All targets described as one: the values they have in common, and the sum of their GPUs.

    Where steps of tasks have targets of their own, those of all other requests.
    """
    targets = [target for target in targets if not target.serves] or targets
    if not targets:
        return TargetFacts()
    if len(targets) == 1:
        return targets[0]
    gpus = [target.gpus for target in targets if target.gpus is not None]
    values = {
        name: {getattr(target, name) for target in targets}
        for name in TargetFacts.__struct_fields__
    }
    common = {name: found.pop() for name, found in values.items() if len(found) == 1}
    return TargetFacts(
        **common
        | {
            "name": format.counted(len(targets), "target"),
            "gpus": sum(gpus) if len(gpus) == len(targets) else None,
            "simulated": any(target.simulated for target in targets),
        }
    )


def _grouped(
    targets: Sequence[TargetFacts], by: Literal["region", "node"]
) -> list[tuple[TargetFacts, list[int]]]:
    """Per region or node the facts and the numbers of its targets; [] unless they are in several. "": not given."""
    numbers: dict[str, list[int]] = {}
    for i, target in enumerate(targets):
        numbers.setdefault(getattr(target, by), []).append(i)
    if len(numbers) < 2:
        return []
    return [(whole_target([targets[i] for i in own]), own) for own in numbers.values()]


def rack_of(
    targets: Sequence[TargetSummary], single_clock_per_s: float | None
) -> RackTokens | None:
    """The block `rack`; None for a single target."""
    rates = [target.own_output_per_s or 0.0 for target in targets]
    if not rates:
        return None
    median = statistics.median(rates)
    return RackTokens(
        targets=len(rates),
        sum_of_rates_per_s=sum(rates),
        single_clock_per_s=single_clock_per_s,
        min_per_s=min(rates),
        mean_per_s=statistics.fmean(rates),
        median_per_s=median,
        max_per_s=max(rates),
        spread=(max(rates) - min(rates)) / median if median else 0.0,
    )
