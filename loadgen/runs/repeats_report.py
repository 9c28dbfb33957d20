"""The report of repeats: of one load, or of each load point of a sweep. Pure.

The sentences and tables are in `loadgen.repeated.repeats_text`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from loadgen.core import format
from loadgen.render.page import Axis, Chart, Mark, Series, ShadedBand, Tile
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


def repeats_report(repeats: RepeatSummary, runs: SweepCurve) -> Report:
    """Return the report of repeats of one load. `runs` has each run as a load point."""
    slo = _describe_slo_outcome(repeats, runs)
    result_paragraphs = [
        Paragraph(
            repeats_text.describe_repeats(repeats), "good" if repeats.valid else "bad", large=True
        )
    ]
    result_paragraphs += slo
    title = f"{format.counted(len(repeats.runs), 'repeat')} of one load"
    numbers = [_key_number(metric) for metric in repeats_text.key_metrics(repeats)]
    return _report(
        title,
        result_paragraphs,
        runs,
        {"": repeats},
        sections=[
            section("", Tiles(numbers), sweep_report.measured_facts(runs)),
            section(
                "Metrics",
                repeats_text.metric_table(repeats),
                Paragraph(repeats_text.describe_interval(repeats), "soft"),
                Charts(list(_metric_charts(repeats))),
            ),
        ],
        brief=[
            section("", _describe_repeated_load(repeats, runs)),
            section("", repeats_text.brief_metric_table(repeats), indented=True),
            section("", *slo, *_describe_validity(repeats), indented=True),
        ],
    )


def repeated_sweep_report(
    repeats_by_point: Mapping[str, RepeatSummary], runs: SweepCurve
) -> Report:
    """Return the report of a repeated sweep. `runs` has each run of each load point."""
    point_sections = [
        section(
            f"{name}: {format.counted(len(repeats.runs), 'run')}",
            repeats_text.metric_table(repeats),
            folded=True,
        )
        for name, repeats in repeats_by_point.items()
    ]
    sentence = repeats_text.describe_repeated_points(repeats_by_point)
    table = repeats_text.load_points_table(repeats_by_point)
    brief_table = repeats_text.load_points_table(
        repeats_by_point, repeats_text.BRIEF_LOAD_POINT_PATHS
    )
    units = Paragraph(repeats_text.LOAD_POINT_UNITS, "soft")
    return _report(
        f"{format.counted(len(repeats_by_point), 'load point')}, repeated",
        [Paragraph(sentence, large=True)],
        runs,
        repeats_by_point,
        sections=[
            section("", sweep_report.measured_facts(runs)),
            section("Load points", table, units),
            *point_sections,
        ],
        brief=[
            section("", f"{runs.workload} on {runs.target}, {sentence}"),
            section("", brief_table, units, indented=True),
        ],
    )


def _report(
    title: str,
    headline: Sequence[Paragraph],
    runs: SweepCurve,
    repeats_by_point: Mapping[str, RepeatSummary],
    *,
    sections: Sequence[Section],
    brief: Sequence[Section],
) -> Report:
    """Return the report of repeats, with their warnings and the table of all runs."""
    is_valid = all(repeats.valid for repeats in repeats_by_point.values())
    verdict = Notice("INVALID", repeats_text.NO_VALID_RUN, "bad")
    if is_valid:
        verdict = Notice("VALID", "the means are those of valid measurements", "good")
    return Report(
        title=" · ".join(filter(None, (runs.workload, runs.model, title))),
        page_title=f"{runs.workload}: {title}",
        generated_by=f"loadgen {runs.version} report of repeats",
        verdict=verdict,
        notices=_warnings(repeats_by_point),
        headline=headline,
        sections=[*sections, _run_section(runs, repeats_by_point)],
        brief=brief,
    )


def _warnings(repeats_by_point: Mapping[str, RepeatSummary]) -> list[Notice]:
    """Return what has to be known before the means: a simulation, and runs that are left out."""
    warnings = []
    if any(repeats.simulated for repeats in repeats_by_point.values()):
        warnings.append(simulated_notice())
    for repeats in repeats_by_point.values():
        excluded = repeats_text.describe_excluded_runs(repeats)
        if excluded:
            warnings.append(Notice("INVALID", excluded, "warn"))
    return warnings


# One load


def _describe_repeated_load(repeats: RepeatSummary, runs: SweepCurve) -> str:
    """Return what was repeated, for example "rag on sim, poisson 10/s, 3 runs"."""
    load = runs.load_points[0].short_label
    return f"{runs.workload} on {runs.target}, {load}: {format.counted(len(repeats.runs), 'run')}"


def _describe_slo_outcome(repeats: RepeatSummary, runs: SweepCurve) -> list[Paragraph]:
    """Return in how many of the runs the SLO was met, and which missed it. Empty without an SLO."""
    if not runs.slo:
        return []
    valid_points = [point for point in runs.load_points if point.valid]
    missed_names = {point.name for point in valid_points if point.slo_met is False}
    missed_runs = [name for name in repeats.runs if name in missed_names]
    met_count = sum(point.slo_met is True for point in valid_points)
    run_count = len(runs.load_points)
    kind: Kind = "warn"
    if missed_runs:
        kind = "bad"
    elif met_count == run_count:
        kind = "good"
    missed = f"; missed by {', '.join(missed_runs)}" if missed_runs else ""
    total = format.counted(run_count, "run")
    return [Paragraph(f"SLO met in {met_count} of {total}{missed}: {runs.slo}.", kind)]


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
    run_names = repeats.counted_runs
    run_numbers = [float(number) for number in range(1, len(run_names) + 1)]
    values = Series(
        x=run_numbers,
        y=metric.values,
        color="c1",
        width=0,
        dots=True,
        labels=run_names,
        links=tuple(map(sweep_charts.run_link, run_names)),
    )
    bands: tuple[ShadedBand, ...] = ()
    if metric.low is not None and metric.high is not None:
        bands = (ShadedBand(start=metric.low, end=metric.high, color="good", across=True),)
    confidence = f"{repeats.confidence * 100:g} %"
    return Chart(
        title=metric.name,
        note=f"a point for each run; shaded: {confidence} confidence interval of the mean",
        x=Axis(label="run", min=0.5, max=len(run_numbers) + 0.5, integer_ticks=True),
        y=Axis(label=metric.unit, unit=metric.unit),
        series=(values,),
        bands=bands,
        marks=(Mark(y=metric.mean, label="mean", color="good", extends_axis=True),),
    )


# The runs


def _run_section(runs: SweepCurve, repeats_by_point: Mapping[str, RepeatSummary]) -> Section:
    """Return the section with a row for each run, in the order in which they ran."""
    seeds = {
        name: seed
        for repeats in repeats_by_point.values()
        for name, seed in zip(repeats.runs, repeats.seeds, strict=True)
    }
    order = list(seeds)

    def position(point: LoadPointResult) -> int:
        return order.index(point.name) if point.name in seeds else -1

    rows = [
        _run_row(point, seeds.get(point.name)) for point in sorted(runs.load_points, key=position)
    ]
    links = [(name, sweep_charts.run_link(name)) for name in seeds]
    return section(
        "Runs",
        Table(RUN_TABLE_HEADER, rows),
        Paragraph(sweep_report.BRIEF_UNITS, "soft"),
        Links("The summary of each run", links),
    )


def _run_row(point: LoadPointResult, seed: int | None) -> tuple[str, ...]:
    """Return the cells of a run under RUN_TABLE_HEADER."""
    return (
        point.name,
        format.NONE if seed is None else str(seed),
        sweep_report.slo_label(point),
        format.count(point.ok),
        format.quantity(point.requests_per_s),
        format.quantity(point.output_per_s),
        *(sweep_report.latency_cell(point, name) for name in sweep_report.LATENCIES),
        format.percent(point.slo_attainment),
    )
