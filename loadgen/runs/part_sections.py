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
from loadgen.runs.cells import RUN_PART_HEAD, run_part_cells
from loadgen.runs.fairness import fairness_section
from loadgen.runs.fluidity import describe_class_objective, find_fluidity_objective
from loadgen.runs.rates import select_headline_rates
from loadgen.runs.run_title import short_arrival, target_name_with_region
from loadgen.runs.task_text import STEP_HEAD, STEP_LEGEND, describe_tasks, step_rows

if TYPE_CHECKING:
    from loadgen.core.metrics.part_summaries import (
        ClassSummary,
        RackTokens,
        StageSummary,
        TargetSummary,
    )
    from loadgen.core.metrics.sections import BetweenNodes
    from loadgen.core.metrics.slo_terms import TermResult
    from loadgen.core.metrics.summary import Summary
    from loadgen.render.section import Part
    from loadgen.runs.cells import RunPart

    NamedPart = tuple[str, RunPart]
    """A stage, target, class or model of a run, with the name that a table shows."""

CLASS_HEAD = ("class", "requested", "actual", "model", "priority", "SLO")
TARGET_STATISTICS_HEAD = ("over the targets", "min", "max", "mean", "median", "sum")
NOT_SPECIFIED = "not specified"


def part_sections(summary: Summary) -> Iterator[Section]:
    """Yield the sections that divide a run into parts, each with a table of their metrics.

    The parts are the steps of tasks, the stages of the load, the request classes with their
    tenants, and the targets with their replicas. There is no section for what a run has only once.
    """
    yield _steps_section(summary)
    if len(summary.stages) > 1:
        yield _stages_section(summary)

    if summary.classes:
        yield _classes_section(summary)
        yield fairness_section(summary.fairness)

    if summary.targets:
        yield _targets_section(summary)

    yield _replica_section(summary.node_differences)


def _steps_section(summary: Summary) -> Section:
    """Return the metrics of each step of the tasks. It is not shown without tasks."""
    legend = STEP_LEGEND if summary.steps else ""
    table = Table(STEP_HEAD, step_rows(summary))
    return section("Steps of a task", table, Paragraph(legend, "soft"), id="steps")


def _replica_section(differences: BetweenNodes) -> Section:
    """Return how much latency varies between replicas or nodes, and which ones are outliers.

    If the run had too few replicas or requests to compare them, the section has no content. A
    report does not show such a section.
    """
    heading = f"Latency variance by {differences.node_kind}"
    sentences = replica_differences.describe_outliers(differences)
    if not sentences:
        return section(heading)

    variances = Table(
        replica_differences.variance_head(differences),
        replica_differences.variance_rows(differences),
    )
    return section(heading, variances, *sentences, folded=True, id="nodes")


def _part_table(head: str, parts: Iterable[NamedPart]) -> Table:
    """Return a table with a row of metrics for each of these parts of a run."""
    rows = [(name, *run_part_cells(part)) for name, part in parts]
    return Table((head, *RUN_PART_HEAD), rows)


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
    """Return the section about the request classes of a run.

    A request class is a part of the load with its own prompts, model and SLO. There are three
    tables: the metrics of each class, the metrics of each model, and the specification of each
    class with its SLO results. The legend explains the percentages of the last table.
    """
    named_classes = [(request_class.name, request_class) for request_class in summary.classes]
    named_models = [
        (f"{model_summary.model} ({', '.join(model_summary.classes)})", model_summary)
        for model_summary in summary.models
    ]
    class_rows = [_class_row(summary, request_class) for request_class in summary.classes]
    has_sessions = summary.sessions is not None

    # A conversation or a task counts once, no matter how many requests it sends.
    counted = "starts of requests, conversations and tasks" if has_sessions else "requests"
    return section(
        "Request classes",
        _part_table("class", named_classes),
        _part_table("model", named_models),
        Table(CLASS_HEAD, class_rows, "prose"),
        Paragraph(f"Percentages of the {counted}.", "soft"),
        id="classes",
    )


def _class_row(summary: Summary, request_class: ClassSummary) -> tuple[str, ...]:
    """Return the cells of a request class, in the order of the columns in CLASS_HEAD.

    They are its name, its requested and its actual fraction of the load, its model, its priority,
    and the result of each of its objectives.
    """
    requested_share = format.percent(request_class.share)
    actual_share = format.percent(actual_class_share(summary, request_class))
    model = request_class.model or summary.target.model
    has_priority = request_class.priority is not None
    priority = str(request_class.priority) if has_priority else format.NONE

    slo_results = [describe_class_term(term) for term in request_class.goodput.slo]
    if request_class.sessions is not None:
        slo_results += describe_tasks(request_class.sessions)
    fluidity = find_fluidity_objective(request_class)
    if fluidity is not None:
        slo_results.append(describe_class_objective(fluidity))

    return (
        request_class.name,
        requested_share,
        actual_share,
        model,
        priority,
        "; ".join(slo_results),
    )


def actual_class_share(summary: Summary, request_class: ClassSummary) -> float | None:
    """Return the fraction of a class among the started requests, conversations and tasks."""
    total = sum(summarized.starts for summarized in summary.classes)
    return request_class.starts / total if total else None


def describe_class_term(term: TermResult) -> str:
    """Return an objective of a class with its value: `TTFT p99 at most 2,000 ms: 1,200 ms`."""
    if term.undecided:
        return f"{term.objective}: {term.undecided}"
    if term.value_ms is None:
        return f"{term.objective}: no response"
    return f"{term.objective}: {format.milliseconds(term.value_ms)} ms"


# -- targets ---------------------------------------------------------------------------------------


def _targets_section(summary: Summary) -> Section:
    """Return the metrics of each target, region and node, and statistics over the targets.

    There are no statistics if the targets serve different steps of tasks, so that their metrics
    cannot be compared or added.
    """
    targets = [(target_name_with_region(target), target) for target in summary.targets]
    regions = [(region.target.region or NOT_SPECIFIED, region) for region in summary.regions]
    nodes = [(node.target.node or NOT_SPECIFIED, node) for node in summary.nodes]

    return section(
        "Targets",
        _part_table("target", targets),
        _part_table("region", regions),
        _part_table("node", nodes),
        *_target_statistics(summary),
        id="targets",
    )


def _target_statistics(summary: Summary) -> list[Part]:
    """Return tables of statistics over the targets and of their total throughput, with a legend.

    The summary has the total only if the metrics of the targets can be added. Otherwise the list is
    empty.
    """
    # The targets are like the servers of one rack: they share the load and produce tokens together.
    total_tokens = summary.rack
    if total_tokens is None:
        return []

    legend = "The rates of all targets cover the same window of the run, so that they add up."
    return [
        Table(TARGET_STATISTICS_HEAD, statistics_over_targets(summary.targets)),
        Table(("all targets, output tok/s", ""), _total_rows(total_tokens)),
        Paragraph(legend, "soft"),
    ]


def _total_rows(rack: RackTokens) -> list[tuple[str, str]]:
    """Return the output rate of all targets together, computed in two ways, and the spread."""
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
    rates = [select_headline_rates(target) for target in targets]
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
