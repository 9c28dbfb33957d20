"""The report of repeats: of one load, or of each level of a sweep. Pure; its words are those of `loadgen.repeated.repeats_text`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from loadgen.core import format
from loadgen.render.page import Axis, Band, Chart, Mark, Tile, Series
from loadgen.render.section import (
    Charts,
    Kind,
    Links,
    Paragraph,
    Report,
    Section,
    Table,
    Tiles,
    Notice,
    section,
    simulated_notice,
)
from loadgen.repeated import repeats_text
from loadgen.repeated.repeats import RepeatedMetric, RepeatSummary
from loadgen.runs import sweep_report
from loadgen.runs.sweep_curve import SweepCurve


def report(repeats: RepeatSummary, runs: SweepCurve) -> Report:
    """Of repeats of one load. `runs`: each run as a level."""
    tiles = [
        Tile(one.name, repeats_text.value_words(one, one.mean), one.unit, _beside(one))
        for one in repeats_text.main_figures(repeats)
    ]
    return _report(
        f"{format.counted(len(repeats.runs), 'run')} of one load",
        [
            Paragraph(
                repeats_text.sentence(repeats), "good" if repeats.valid else "bad", large=True
            ),
            *_slo(repeats, runs),
        ],
        runs,
        {"": repeats},
        section("", Tiles(tiles), sweep_report.measured(runs)),
        section(
            "Figures",
            repeats_text.figures_table(repeats),
            Paragraph(repeats_text.legend(repeats), "soft"),
            Charts(list(_charts(repeats))),
        ),
    )


def report_of_levels(levels: Sequence[tuple[str, RepeatSummary]], runs: SweepCurve) -> Report:
    """Of a sweep that was repeated. `runs`: each run of each of its levels."""
    return _report(
        f"{format.counted(len(levels), 'level')}, repeated",
        [Paragraph(repeats_text.sentence_of_levels(levels), large=True)],
        runs,
        dict(levels),
        section("", sweep_report.measured(runs)),
        section(
            "Levels",
            repeats_text.levels_table(levels),
            Paragraph(f"{repeats_text.OF_LEVELS}.", "soft"),
        ),
        *(
            section(
                f"{level}: {format.counted(len(repeats.runs), 'run')}",
                repeats_text.figures_table(repeats),
                folded=True,
            )
            for level, repeats in levels
        ),
    )


def _slo(repeats: RepeatSummary, runs: SweepCurve) -> Iterator[Paragraph]:
    """In how many of the runs the SLO was met, and which missed it; nothing where nothing is promised."""
    if not runs.slo:
        return
    sound = [level for level in runs.levels if level.valid]
    over = {level.name for level in sound if level.slo_met is False}
    missed = [name for name in repeats.runs if name in over]
    met = sum(level.slo_met is True for level in sound)
    kind: Kind = "bad" if missed else "good" if met == len(runs.levels) else "warn"
    ends = f"; missed by {', '.join(missed)}" if missed else ""
    yield Paragraph(
        f"SLO met by {met} of {format.counted(len(runs.levels), 'run')}{ends}: {runs.slo}.", kind
    )


def _report(
    what: str,
    answer: Sequence[Paragraph],
    runs: SweepCurve,
    made: Mapping[str, RepeatSummary],
    *sections: Section,
) -> Report:
    valid = all(one.valid for one in made.values())
    seeds = {
        run: seed for one in made.values() for run, seed in zip(one.runs, one.seeds, strict=True)
    }
    marks = [simulated_notice()] if any(one.simulated for one in made.values()) else []
    marks += [
        Notice("INVALID", repeats_text.left_out_text(one), "warn")
        for one in made.values()
        if one.excluded_runs
    ]
    return Report(
        title=" · ".join(filter(None, (runs.workload, runs.model, what))),
        page_title=f"{runs.workload}: {what}",
        generated_by=f"loadgen {runs.version} report of repeats",
        verdict=Notice("VALID", "the means are those of valid measurements", "good")
        if valid
        else Notice("INVALID", repeats_text.NO_VALID_RUN, "bad"),
        notices=marks,
        headline=answer,
        sections=[*sections, _runs(runs, seeds)],
    )


def _beside(one: RepeatedMetric) -> str:
    return (
        f"95 % interval of the mean {repeats_text.interval_words(one)}"
        if one.low is not None
        else "one run: no interval"
    )


def _charts(repeats: RepeatSummary) -> Iterator[Chart]:
    """For each of the main figures its value in each run, with the mean and its interval."""
    run_names = repeats.counted_runs
    numbers = [float(number) for number in range(1, len(run_names) + 1)]
    if len(numbers) < 2:
        return
    for one in repeats_text.main_figures(repeats):
        low, high = one.low, one.high
        dots = Series(
            x=numbers,
            y=one.values,
            color="c1",
            width=0,
            dots=True,
            labels=run_names,
            links=tuple(map(sweep_report.address, run_names)),
        )
        yield Chart(
            title=one.name,
            note=f"a point for each run; shaded: the {repeats.confidence:.0%} interval of the mean".replace(
                "%", " %"
            ),
            x=Axis(label="run", min=0.5, max=len(numbers) + 0.5, integer_ticks=True),
            y=Axis(label=one.unit, unit=one.unit),
            series=(dots,),
            bands=()
            if low is None or high is None
            else (Band(start=low, end=high, color="good", across=True),),
            marks=(Mark(y=one.mean, label="mean", color="good", extends_axis=True),),
        )


def _runs(runs: SweepCurve, seeds: Mapping[str, int | None]) -> Section:
    head = (
        "run",
        "seed",
        "verdict",
        "ok",
        "req/s",
        "tokens/s",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "TPOT p99",
        "E2E p50",
    )
    cells = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "e2e_p50")
    rows = [
        (
            level.name,
            str(seeds.get(level.name) if seeds.get(level.name) is not None else format.NONE),
            sweep_report.verdict(level),
            format.count(level.ok),
            format.quantity(level.requests_per_s),
            format.quantity(level.output_per_s),
            *(sweep_report.level_ms(level, name) for name in cells),
            format.percent(level.goodput),
        )
        for level in sorted(
            runs.levels,
            key=lambda level: list(seeds).index(level.name) if level.name in seeds else -1,
        )
    ]
    pages = Links("The summary of each run", [(run, sweep_report.address(run)) for run in seeds])
    return section(
        "Runs",
        Table((*head, "within SLO"), rows),
        Paragraph("Latencies in ms; ~: too few samples.", "soft"),
        pages,
    )
