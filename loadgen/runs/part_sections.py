"""The sections about parts of a run: steps of tasks, stages, request classes, targets, replicas.

Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from loadgen.core import format
from loadgen.render.section import Paragraph, Section, Table, section
from loadgen.runs import replica_differences
from loadgen.runs.cells import PART_HEAD, part_cells
from loadgen.runs.fairness import fairness_section
from loadgen.runs.rates import headline
from loadgen.runs.run_title import short_arrival, target_name_with_region
from loadgen.runs.task_text import STEP_HEAD, STEP_LEGEND, describe_tasks, step_rows

if TYPE_CHECKING:
    from loadgen.core.metrics.part_summaries import (
        ClassSummary,
        RackTokens,
        StageSummary,
        TargetSummary,
    )
    from loadgen.core.metrics.slo_terms import TermResult
    from loadgen.core.metrics.summary import Summary
    from loadgen.runs.cells import Part

    NamedPart = tuple[str, Part]

CLASS_HEAD = ("class", "requested", "actual", "model", "priority", "SLO")
NOT_SPECIFIED = "not specified"


def part_sections(summary: Summary) -> Iterator[Section]:
    """Yield a section for each kind of part of which the run has several."""
    legend = Paragraph(STEP_LEGEND if summary.steps else "", "soft")
    yield section("Steps of a task", Table(STEP_HEAD, step_rows(summary)), legend, id="steps")
    if len(summary.stages) > 1:
        yield _stages_section(summary)
    if summary.classes:
        yield _classes_section(summary)
        yield fairness_section(summary.fairness)
    if summary.targets:
        yield _targets_section(summary)
    outliers = replica_differences.describe_outliers(summary.node_differences)
    if outliers:
        variances = Table(
            replica_differences.variance_head(summary.node_differences),
            replica_differences.variance_rows(summary.node_differences),
        )
        head = f"Latency variance by {summary.node_differences.compared}"
        yield section(head, variances, *outliers, folded=True, id="nodes")


def _part_table(head: str, parts: Iterable[NamedPart]) -> Table:
    return Table((head, *PART_HEAD), [(name, *part_cells(part)) for name, part in parts])


# -- stages ----------------------------------------------------------------------------------------


def _stages_section(summary: Summary) -> Section:
    """Return the metrics of each stage. A text shows them only if several stages are measured."""
    has_several = sum(stage.measured for stage in summary.stages) > 1
    table = _part_table("stage", [(_stage_name(stage), stage) for stage in summary.stages])
    return section("Stages", table, page_only=not has_several, folded=not has_several, id="stages")


def _stage_name(stage: StageSummary) -> str:
    names = (stage.name, short_arrival(stage.arrival))
    name = " · ".join(text for text in names if text)
    return name if stage.measured else f"{name} (not measured)"


# -- request classes -------------------------------------------------------------------------------


def _classes_section(summary: Summary) -> Section:
    """Return the metrics of each class and model, and what each class requests."""
    classes = [(part.name, part) for part in summary.classes]
    models = [(f"{part.model} ({', '.join(part.classes)})", part) for part in summary.models]
    if summary.sessions is None:
        legend = "Percentages of the requests."
    else:
        legend = "Percentages of the starts of requests, conversations and tasks."
    return section(
        "Request classes",
        _part_table("class", classes),
        _part_table("model", models),
        Table(CLASS_HEAD, [_class_row(summary, part) for part in summary.classes], "prose"),
        Paragraph(legend, "soft"),
        id="classes",
    )


def _class_row(summary: Summary, part: ClassSummary) -> tuple[str, ...]:
    slo_texts = [describe_class_term(term) for term in part.goodput.slo]
    if part.sessions is not None:
        slo_texts += describe_tasks(part.sessions)
    return (
        part.name,
        format.percent(part.share),
        format.percent(actual_class_share(summary, part)),
        part.model or summary.target.model,
        format.NONE if part.priority is None else str(part.priority),
        "; ".join(slo_texts),
    )


def actual_class_share(summary: Summary, part: ClassSummary) -> float | None:
    """Return the share of a class in the measured starts of requests, conversations and tasks."""
    total = sum(request_class.starts for request_class in summary.classes)
    return part.starts / total if total else None


def describe_class_term(term: TermResult) -> str:
    """Return an objective of a class with its value: `TTFT p99 at most 2,000 ms: 1,200 ms`."""
    if term.undecided:
        return f"{term.promise}: {term.undecided}"
    if term.value_ms is None:
        return f"{term.promise}: no response"
    return f"{term.promise}: {format.milliseconds(term.value_ms)} ms"


# -- targets ---------------------------------------------------------------------------------------


def _targets_section(summary: Summary) -> Section:
    """Return the metrics of each target, region and node, and the sums and means over the targets.

    There are no sums if the targets serve different steps of tasks.
    """
    tables = [
        _part_table("target", [(target_name_with_region(part), part) for part in summary.targets]),
        _part_table(
            "region", [(part.target.region or NOT_SPECIFIED, part) for part in summary.regions]
        ),
        _part_table("node", [(part.target.node or NOT_SPECIFIED, part) for part in summary.nodes]),
    ]
    if summary.rack is None:
        return section("Targets", *tables, id="targets")
    head = ("over the targets", "min", "max", "mean", "median", "sum")
    window = "The rates of all targets cover the same window of the run, so that they add up."
    return section(
        "Targets",
        *tables,
        Table(head, statistics_over_targets(summary.targets)),
        Table(("all targets, output tok/s", ""), _total_rows(summary.rack)),
        Paragraph(window, "soft"),
        id="targets",
    )


def _total_rows(rack: RackTokens) -> list[tuple[str, str]]:
    return [
        (
            f"sum of {rack.targets} rates, each over its own time",
            format.quantity(rack.sum_of_rates_per_s),
        ),
        ("all tokens over the common time", format.quantity(rack.single_clock_per_s)),
        ("spread of the targets", format.percent(rack.spread)),
    ]


class _MetricOverTargets(NamedTuple):
    """The values of a metric at each target. Rates add up, and latencies do not."""

    label: str
    values: list[float | None]
    adds_up: bool


def statistics_over_targets(targets: Sequence[TargetSummary]) -> list[tuple[str, ...]]:
    """Return the minimum, maximum, mean and median over the targets, and the sum of rates."""
    rates = [headline(target) for target in targets]
    metrics = (
        _MetricOverTargets("output tok/s", [rate.output for rate in rates], adds_up=True),
        _MetricOverTargets("req/s", [rate.requests for rate in rates], adds_up=True),
        _MetricOverTargets("TTFT p50, ms", [t.ttft_ms.p50 for t in targets], adds_up=False),
        _MetricOverTargets("TTFT p99, ms", [t.ttft_ms.p99 for t in targets], adds_up=False),
        _MetricOverTargets("TPOT p50, ms", [t.tpot_ms.p50 for t in targets], adds_up=False),
        _MetricOverTargets("TPOT p99, ms", [t.tpot_ms.p99 for t in targets], adds_up=False),
    )
    rows: list[tuple[str, ...]] = []
    for metric in metrics:
        known = [value for value in metric.values if value is not None]
        if not known:
            continue
        rows.append(
            (
                metric.label,
                format.quantity(min(known)),
                format.quantity(max(known)),
                format.quantity(statistics.fmean(known)),
                format.quantity(statistics.median(known)),
                format.quantity(sum(known)) if metric.adds_up else format.NONE,
            )
        )
    return rows
