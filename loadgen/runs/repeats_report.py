"""The report of repeats: of one load, or of each load point of a sweep. Pure.

The sentences and tables are in `loadgen.repeated.repeats_text`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from loadgen.core import format
from loadgen.render.page import COLORS, Axis, Chart, Mark, Series, ShadedBand, Tile
from loadgen.render.section import (
    Charts,
    Kind,
    Links,
    Notice,
    Paragraph,
    Report,
    Section,
    Table,
    Tiles,
    section,
    simulated_notice,
)
from loadgen.repeated import repeats_text
from loadgen.repeated.repeats import RepeatedMetric, RepeatSummary
from loadgen.runs import sweep_charts, sweep_report
from loadgen.runs.load_point_results import LoadPointResult
from loadgen.runs.sweep_curve import SweepCurve

RUN_TABLE_HEADER = (
    "run",
    "seed",
    "SLO",
    "ok",
    "req/s",
    "tokens/s",
    "TTFT p50",
    "TTFT p99",
    "TPOT p50",
    "TPOT p99",
    "E2E p50",
    "SLO attainment",
)


def repeats_report(repeats: RepeatSummary, curve: SweepCurve) -> Report:
    """Return the report of repeats of one load.

    Args:
        repeats: The mean and the interval of each metric over the repeats.
        curve: The metrics of each repeat. They have the type of a sweep, with a load point for each
            repeat.
    """
    slo_paragraphs = _describe_slo_outcome(repeats, curve)
    result_color: Kind = "good" if repeats.valid else "bad"
    result = Paragraph(repeats_text.describe_repeats(repeats), result_color, large=True)
    key_numbers = [_key_number(metric) for metric in repeats_text.key_metrics(repeats)]
    full_sections = [
        section("", Tiles(key_numbers), sweep_report.measured_facts(curve)),
        _metric_section(repeats),
    ]
    brief_sections = [
        section("", _describe_repeated_load(repeats, curve)),
        section("", repeats_text.brief_metric_table(repeats), indented=True),
        section("", *slo_paragraphs, *_describe_validity(repeats), indented=True),
    ]

    return _report_of_repeats(
        title=f"{format.counted(len(repeats.runs), 'repeat')} of one load",
        headline=[result, *slo_paragraphs],
        curve=curve,
        summaries=[repeats],
        sections=full_sections,
        brief=brief_sections,
    )


def _metric_section(repeats: RepeatSummary) -> Section:
    """Return the section with the table of all metrics, and a chart of each key metric."""
    return section(
        "Metrics",
        repeats_text.metric_table(repeats),
        Paragraph(repeats_text.describe_interval(repeats), "soft"),
        Charts(list(_metric_charts(repeats))),
    )


def repeated_sweep_report(
    repeats_by_point: Mapping[str, RepeatSummary], curve: SweepCurve
) -> Report:
    """Return the report of a sweep whose load points were each run several times.

    Args:
        repeats_by_point: The summary of the repeats of each load point, by its name.
        curve: All runs as load points, with the workload, the target and the version.
    """
    description = repeats_text.describe_repeated_points(repeats_by_point)
    units = Paragraph(repeats_text.LOAD_POINT_UNITS, "soft")
    full_table = repeats_text.load_points_table(repeats_by_point)
    full_sections = [
        section("", sweep_report.measured_facts(curve)),
        section("Load points", full_table, units),
        *_load_point_sections(repeats_by_point),
    ]

    # A terminal shows only some of the metrics by default.
    brief_table = repeats_text.load_points_table(
        repeats_by_point, paths=repeats_text.BRIEF_LOAD_POINT_PATHS
    )
    brief_sections = [
        section("", f"{curve.workload} on {curve.target}, {description}"),
        section("", brief_table, units, indented=True),
    ]
    return _report_of_repeats(
        title=f"{format.counted(len(repeats_by_point), 'load point')}, repeated",
        headline=[Paragraph(description, large=True)],
        curve=curve,
        summaries=list(repeats_by_point.values()),
        sections=full_sections,
        brief=brief_sections,
    )


def _load_point_sections(repeats_by_point: Mapping[str, RepeatSummary]) -> Iterator[Section]:
    """Yield a folded section for each load point, with all its metrics."""
    for name, repeats in repeats_by_point.items():
        heading = f"{name}: {format.counted(len(repeats.runs), 'run')}"
        yield section(heading, repeats_text.metric_table(repeats), folded=True)


def _report_of_repeats(
    *,
    title: str,
    headline: Sequence[Paragraph],
    curve: SweepCurve,
    summaries: Sequence[RepeatSummary],
    sections: Sequence[Section],
    brief: Sequence[Section],
) -> Report:
    """Return the report of repeats of one or several loads.

    It adds to the sections what both kinds of report share: the verdict, the warnings, and a table
    with a row for each run.

    Args:
        title: What was repeated, such as "3 repeats of one load".
        headline: The paragraphs with the result, at the top of the report.
        curve: The metrics of all runs.
        summaries: The summary of the repeats of each load.
        sections: The other sections of the full report.
        brief: The sections of the short report.
    """
    title_parts = [text for text in (curve.workload, curve.model, title) if text]
    return Report(
        title=" · ".join(title_parts),
        page_title=f"{curve.workload}: {title}",
        generated_by=f"loadgen {curve.version} report of repeats",
        verdict=_verdict(summaries),
        notices=_warnings(summaries),
        headline=headline,
        sections=[*sections, _run_section(curve, summaries)],
        brief=brief,
    )


def _verdict(summaries: Sequence[RepeatSummary]) -> Notice:
    """Return the notice that the means are valid, or INVALID if a load has no valid run."""
    if all(repeats.valid for repeats in summaries):
        return Notice("VALID", "the means are those of valid measurements", "good")
    return Notice("INVALID", repeats_text.NO_VALID_RUN, "bad")


def _warnings(summaries: Sequence[RepeatSummary]) -> list[Notice]:
    """Return what has to be known before the means: a simulation, and runs that are left out."""
    warnings = []
    if any(repeats.simulated for repeats in summaries):
        warnings.append(simulated_notice())

    for repeats in summaries:
        excluded_runs = repeats_text.describe_excluded_runs(repeats)
        if excluded_runs:
            warnings.append(Notice("INVALID", excluded_runs, "warn"))

    return warnings


# One load


def _describe_repeated_load(repeats: RepeatSummary, curve: SweepCurve) -> str:
    """Return what was repeated, for example "rag on sim, poisson 10/s, 3 runs"."""
    load = curve.load_points[0].short_label
    return f"{curve.workload} on {curve.target}, {load}: {format.counted(len(repeats.runs), 'run')}"


def _describe_slo_outcome(repeats: RepeatSummary, curve: SweepCurve) -> list[Paragraph]:
    """Return in how many of the runs the SLO was met, and which missed it. Empty without an SLO.

    A run that is not valid, or cannot decide the SLO, neither met nor missed it. Runs that cannot
    decide it are named, and a paragraph for each has the reasons. The first paragraph is good if
    all runs met the SLO, bad if one missed it, and else a warning.
    """
    if not curve.slo:
        return []

    valid_points = [point for point in curve.load_points if point.valid]
    met_count = sum(point.slo_met is True for point in valid_points)
    missed_names = {point.name for point in valid_points if point.slo_met is False}
    missed_runs = [name for name in repeats.runs if name in missed_names]
    run_count = len(curve.load_points)

    undecided_by_name = {point.name: point for point in valid_points if point.slo_undecided}
    undecided_points = [
        undecided_by_name[name] for name in repeats.runs if name in undecided_by_name
    ]

    parts = [f"SLO met in {met_count} of {format.counted(run_count, 'run')}"]
    if missed_runs:
        parts.append(f"missed by {', '.join(missed_runs)}")
    if undecided_points:
        undecided_runs = ", ".join(point.name for point in undecided_points)
        parts.append(f"undecided in {len(undecided_points)} ({undecided_runs})")

    color = _choose_outcome_color(is_met_by_all=met_count == run_count, is_missed=bool(missed_runs))
    outcome = Paragraph(f"{'; '.join(parts)}: {curve.slo}.", color)
    return [outcome, *_describe_undecided_runs(undecided_points)]


def _choose_outcome_color(*, is_met_by_all: bool, is_missed: bool) -> Kind:
    """Return the color of the outcome: good if all runs met the SLO, bad if one missed it."""
    if is_missed:
        return "bad"
    return "good" if is_met_by_all else "warn"


def _describe_undecided_runs(undecided_points: Sequence[LoadPointResult]) -> Iterator[Paragraph]:
    """Yield a warning for each run that cannot decide the SLO, with the reasons."""
    for point in undecided_points:
        if point.undecided_reasons:
            yield Paragraph(f"{point.name}: {'; '.join(point.undecided_reasons)}.", "warn")


def _describe_validity(repeats: RepeatSummary) -> list[Paragraph]:
    """Return that no run is valid. Empty if one is, because a valid result needs no comment."""
    return [] if repeats.valid else [Paragraph(f"INVALID: {repeats_text.NO_VALID_RUN}", "bad")]


def _key_number(metric: RepeatedMetric) -> Tile:
    """Return the mean of a metric as a headline number, with its interval."""
    interval = repeats_text.interval_text(metric)
    note = f"95 % CI {interval}" if interval else "one run: no interval"
    return Tile(metric.name, repeats_text.value_text(metric, metric.mean), metric.unit, note)


def _metric_charts(repeats: RepeatSummary) -> Iterator[Chart]:
    """Yield for each key metric a chart with its value in each run, its mean and its interval.

    Nothing is yielded for a single run.
    """
    if len(repeats.counted_runs) < 2:
        return
    for metric in repeats_text.key_metrics(repeats):
        yield _metric_chart(metric, repeats)


def _metric_chart(metric: RepeatedMetric, repeats: RepeatSummary) -> Chart:
    """Return the chart of a metric: a point for each run, the mean, and its interval as a band."""
    run_count = len(repeats.counted_runs)
    confidence = f"{repeats.confidence * 100:g} %"

    bands: tuple[ShadedBand, ...] = ()
    if metric.low is not None and metric.high is not None:
        # `across` makes it a horizontal band, between two values of y.
        bands = (ShadedBand(start=metric.low, end=metric.high, color="good", across=True),)

    return Chart(
        title=metric.name,
        note=f"a point for each run; shaded: {confidence} confidence interval of the mean",
        x=Axis(label="run", min=0.5, max=run_count + 0.5, integer_ticks=True),
        y=Axis(label=metric.unit, unit=metric.unit),
        series=(_run_points(metric, repeats.counted_runs),),
        bands=bands,
        marks=(Mark(y=metric.mean, label="mean", color="good", extends_axis=True),),
    )


def _run_points(metric: RepeatedMetric, run_names: tuple[str, ...]) -> Series:
    """Return the values of a metric as points of a chart, one for each run.

    The points are not connected, because runs have no order of load. A click on a point opens the
    page of its run.
    """
    run_numbers = range(1, len(run_names) + 1)
    return Series(
        x=[float(number) for number in run_numbers],
        y=metric.values,
        color=COLORS[0],
        width=0,  # no line
        dots=True,
        labels=run_names,
        links=tuple(map(sweep_charts.run_link, run_names)),
    )


# The runs


def _run_section(curve: SweepCurve, summaries: Sequence[RepeatSummary]) -> Section:
    """Return the section with a row for each run and links to the runs.

    A summary names the runs that it includes, with their seeds. Other runs, such as an interrupted
    one, come first in the table, without a seed and without a link.

    Args:
        curve: The results of the runs.
        summaries: The summaries of the repeats of each load.
    """
    seed_by_included_run: dict[str, int | None] = {}
    for repeats in summaries:
        seed_by_included_run.update(zip(repeats.runs, repeats.seeds, strict=True))

    result_by_run = {point.name: point for point in curve.load_points}
    other_runs = [name for name in result_by_run if name not in seed_by_included_run]

    # The order of the summaries is that in which the runs took place.
    included_runs = [name for name in seed_by_included_run if name in result_by_run]
    rows = [_run_row(result_by_run[name], seed=None) for name in other_runs]
    rows += [_run_row(result_by_run[name], seed_by_included_run[name]) for name in included_runs]
    links = [(name, sweep_charts.run_link(name)) for name in seed_by_included_run]

    return section(
        "Runs",
        Table(RUN_TABLE_HEADER, rows),
        Paragraph(sweep_report.BRIEF_UNITS, "soft"),
        Paragraph(sweep_report.describe_missing_steady_state(curve), "warn"),
        Links("The summary of each run", links),
    )


def _run_row(point: LoadPointResult, seed: int | None) -> tuple[str, ...]:
    """Return the cells of a run under RUN_TABLE_HEADER."""
    return (
        point.name,
        format.NONE if seed is None else str(seed),
        sweep_report.slo_label(point),
        format.count(point.ok),
        sweep_report.throughput_cell(point, point.requests_per_s),
        sweep_report.throughput_cell(point, point.output_per_s),
        *(sweep_report.latency_cell(point, name) for name in sweep_report.LATENCIES),
        format.percent(point.slo_attainment),
    )
