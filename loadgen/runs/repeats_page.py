"""The page of repeats: of one load, or of each level of a sweep. Pure; the sentences are those of `repeats.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from loadgen.core import format
from loadgen.core.metrics.repeats import RepeatedFigure, RepeatSummary
from loadgen.present import page
from loadgen.present.page import Axis, Band, Chart, Mark, Number, Series
from loadgen.runs import levels_text
from loadgen.runs import repeats_text as words
from loadgen.runs.levels import SweepCurve


def render(repeats: RepeatSummary, runs: SweepCurve) -> str:
    """The page of repeats of one load. `runs`: each run as a level."""
    sheet = _begun(runs, f"{format.counted(len(repeats.runs), 'run')} of one load", {"": repeats})
    sheet.say(words.headline(repeats), f"sentence {'good' if repeats.valid else 'bad'}")
    sheet.tiles(
        [
            Number(one.name, words.value_words(one, one.mean), one.unit, _beside(one))
            for one in words.main_figures(repeats)
        ]
    )
    levels_text.facts(sheet, runs)
    sheet.section("Figures")
    sheet.table(*words.figures_table(repeats))
    sheet.say(words.legend(repeats), "soft")
    sheet.charts(_charts(repeats))
    _runs(sheet, runs, dict(zip(repeats.runs, repeats.seeds, strict=True)))
    return sheet.render()


def render_levels(levels: Sequence[tuple[str, RepeatSummary]], runs: SweepCurve) -> str:
    """The page of a sweep that was repeated. `runs`: each run of each of its levels."""
    sheet = _begun(runs, f"{format.counted(len(levels), 'level')}, repeated", dict(levels))
    sheet.say(words.headline_of_levels(levels), "sentence")
    levels_text.facts(sheet, runs)
    sheet.section("Levels")
    sheet.table(*words.levels_table(levels))
    sheet.say(f"{words.OF_LEVELS}.", "soft")
    for level, repeats in levels:
        with sheet.details(f"{level}: {format.counted(len(repeats.runs), 'run')}"):
            sheet.table(*words.figures_table(repeats))
    _runs(sheet, runs, {run: seed for _, one in levels for run, seed in zip(one.runs, one.seeds, strict=True)})
    return sheet.render()


def _begun(runs: SweepCurve, what: str, made: Mapping[str, RepeatSummary]) -> page.Page:
    sheet = page.Page(f"{runs.workload}: {what}", f"loadgen {runs.version} report of repeats")
    if any(one.simulated for one in made.values()):
        sheet.mark("SIMULATED", "a model of a server answered: nothing here was measured on hardware")
    if not all(one.valid for one in made.values()):
        sheet.mark("INVALID", words.NOT_VALID, "bad")
    sheet.heading(" · ".join(filter(None, (runs.workload, runs.model, what))))
    return sheet


def _beside(one: RepeatedFigure) -> str:
    return f"95 % interval of the mean {words.interval_words(one)}" if one.low is not None else "one run: no interval"


def _charts(repeats: RepeatSummary) -> Iterator[Chart]:
    """For each of the main figures its value in each run, with the mean and its interval."""
    numbers = [float(number) for number in range(1, len(repeats.runs) + 1)]
    if len(numbers) < 2:
        return
    for one in words.main_figures(repeats):
        low, high = one.low, one.high
        yield Chart(
            title=one.name,
            note="shaded: the 95 % interval of the mean",
            x=Axis(label="run", pad=True),
            y=Axis(label=one.unit, unit=one.unit),
            series=(Series(x=numbers, y=one.values, color="c1", width=0, dots=True, labels=repeats.runs),),
            bands=() if low is None or high is None else (Band(start=low, end=high, color="good", across=True),),
            marks=(Mark(y=one.mean, label="mean", color="good", fit=True),),
        )


def _runs(sheet: page.Page, runs: SweepCurve, seeds: Mapping[str, int | None]) -> None:
    sheet.section("Runs")
    head = ("run", "seed", "", "ok", "tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "E2E p50")
    cells = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "e2e_p50")
    rows = [
        (
            level.name,
            str(seeds.get(level.name) if seeds.get(level.name) is not None else format.NONE),
            "VALID" if level.valid else "INVALID",
            format.count(level.ok),
            format.quantity(level.output_per_s),
            *(levels_text.level_ms(level, name) for name in cells),
        )
        for level in runs.levels
    ]
    sheet.table(head, rows)
    sheet.say(
        "Latencies in ms; ~: too few samples. Each run has a page of its own: loadgen report on its folder.", "soft"
    )
