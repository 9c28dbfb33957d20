"""What a sweep, or any folder of levels, says. Pure: a `SweepCurve` in, the report of text, Markdown and page out."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import msgspec

from loadgen.core import format
from loadgen.core.metrics.reasons import STATES
from loadgen.present.page import Axis, Chart, Mark, Series
from loadgen.present.section import (
    Charts,
    Facts,
    Report,
    Said,
    Table,
    Warned,
    facts,
    section,
    simulated,
)
from loadgen.runs import levels
from loadgen.runs.headline import met_word
from loadgen.runs.levels import SweepCurve, SweepLevel

_HEAD: tuple[str, ...] = (
    *("load", "verdict", "req/s", "tokens/s", "per GPU", "per user"),
    *("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "E2E p50", "within SLO", ""),
)


def level_ms(level: SweepLevel, name: str) -> str:
    """A latency of a level in ms, marked with ~ when it has too few samples."""
    text = format.milliseconds(getattr(level, name))
    return f"~{text}" if name in level.unsupported and text != format.NONE else text


def _row(curve: SweepCurve, level: SweepLevel) -> tuple[str, ...]:
    return (
        level.load or level.name,
        verdict(level),
        format.quantity(level.requests_per_s),
        format.quantity(level.output_per_s),
        format.quantity(level.per_gpu),
        format.quantity(level.per_user),
        *(
            level_ms(level, name)
            for name in ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "e2e_p50")
        ),
        format.percent(level.goodput),
        ", ".join(remarks(curve, level)),
    )


def verdict(level: SweepLevel) -> str:
    """Whether the level is a sound measurement, and of a sound one whether it met the SLO, if there is one."""
    if not level.valid:
        return "INVALID"
    if level.slo_met is None:
        return "UNDECIDED" if level.slo_undecided else "valid"
    return met_word(level.slo_met)


def remarks(curve: SweepCurve, level: SweepLevel) -> Iterator[str]:
    if level.state != "finished":
        yield STATES.get(level.state, level.state).partition(":")[0]
    if not level.full:
        yield "too short for its lanes"
    if level.name == curve.best:
        yield "best within the SLO"
    if level.name == curve.knee:
        yield "knee"
    if level.front:
        yield "Pareto"


def _tokens(level: SweepLevel) -> str:
    return f"{format.quantity(level.output_per_s)} output tokens/s"


def sentences(curve: SweepCurve) -> Iterator[str]:
    """The result of the sweep in sentences: the best level within the SLO, and the knee."""
    by_name = {level.name: level for level in curve.levels}
    if curve.slo:
        if curve.best:
            best = by_name[curve.best]
            rates = f"{format.quantity(best.requests_per_s)} requests/s completed, {_tokens(best)}"
            yield f"Best level within the SLO ({curve.slo}): {best.load}, {rates}."
            yield from _kept_above(curve, best)
            if why := levels.bound_why(curve):
                higher = (
                    "may be far higher; add levels above it"
                    if best is curve.levels[-1]
                    else "is at least this"
                )
                yield f"It is a lower bound of the capacity: {why}. The capacity {higher}."
        else:
            yield from _without_best(curve)
    if curve.knee:
        knee = by_name[curve.knee]
        yield (
            f"Knee: {knee.load}, {_tokens(knee)} at E2E p50 "
            f"{format.milliseconds(knee.e2e_p50)} ms (largest ratio of the two)."
        )
    elif len(curve.levels) >= 3:
        yield "No knee yet: throughput still grows faster than E2E p50 at the last level."


def headline(curve: SweepCurve) -> str:
    """The result of the sweep in one sentence."""
    mark = "SIMULATED: " if any(level.simulated for level in curve.levels) else ""
    of_all = f"{format.counted(len(curve.levels), 'level')} of {curve.workload}."
    return mark + next(sentences(curve), of_all)


def _kept_above(curve: SweepCurve, best: SweepLevel) -> Iterator[str]:
    """Why levels of more load that kept the SLO too are not the best one."""
    for level in levels.kept(curve.levels[curve.levels.index(best) + 1 :]):
        missed, name = levels.lowest_missed(curve.levels), level.load or level.name
        if missed is not None and (level.amount or 0) >= (missed.amount or 0):
            lower = missed.load or missed.name
            yield f"{name} kept it too, but no capacity lies above a level that missed it ({lower})."
        elif level.sustained is False and best.sustained is not False:
            yield f"{name} kept it too, but grew while it went on: it would not last."
        else:
            yield f"{name} kept it too, but completed less: {format.quantity(level.requests_per_s)} requests/s."


def _without_best(curve: SweepCurve) -> Iterator[str]:
    """Why no level is the best within the SLO."""
    missed = [level for level in curve.levels if levels.outcome(level) == "over"]
    unsound = [
        level
        for level in curve.levels
        if not level.valid or level.state != "finished" or not level.full
    ]
    kept = sum(level.slo_met is True for level in unsound)
    undecided = len(curve.levels) - len(missed) - len(unsound)
    if missed:
        lowest, above = missed[0], [level.load or level.name for level in levels.kept(curve.levels)]
        name = lowest.load or lowest.name
        if above:
            yield (
                f"No capacity within the SLO ({curve.slo}): {name} missed it, and no level below it kept it. What is "
                f"above it and kept it is none: {', '.join(above)}. Run {name} again, or add levels below it."
            )
        else:
            yield (
                f"No level kept the SLO ({curve.slo}): {name}, the lowest valid level, missed it. Add levels below it."
            )
    else:
        yield f"Nothing is known about the SLO ({curve.slo}): no level is a valid measurement that decides it."
    if unsound:
        verb = "is" if len(unsound) == 1 else "are"
        counted = f"{len(unsound)} of {format.counted(len(curve.levels), 'level')} {verb} not valid or too short"
        within = f", {kept} of them within every limit" if kept else ""
        yield f"{counted}{within}: see why with loadgen report on the folder of a level."
    if undecided:
        all_levels = format.counted(len(curve.levels), "level")
        yield f"In {undecided} of {all_levels} the SLO is undecided: they need more requests."


def table(curve: SweepCurve) -> Table:
    """A row for each level, without the columns that are empty in every row."""
    rows = [_row(curve, level) for level in curve.levels]
    kept = [
        i
        for i in range(len(_HEAD))
        if i == 0 or any(row[i] not in (format.NONE, "") for row in rows)
    ]
    head, cells = [_HEAD[i] for i in kept], [tuple(row[i] for i in kept) for row in rows]
    return Table(head, cells, "remarks" if head[-1] == "" else "", left=2)


UNITS = (
    "Latencies in ms. req/s, output tokens/s: in the steady-state window; per user: 1 / TPOT p50. "
    "~: too few samples."
)
WORDS = (
    "Knee: the largest output tokens/s divided by E2E p50 (Kleinrock's power). Pareto: no other level gives both more "
    "tokens/s per GPU and more tokens/s per user."
)


def report(curve: SweepCurve) -> Report:
    """The result, what was measured, the table of levels, the charts with the Pareto front."""
    all_levels = format.counted(len(curve.levels), "level")
    warned = [simulated()] if any(level.simulated for level in curve.levels) else []
    if invalid := [level.load or level.name for level in curve.levels if not level.valid]:
        warned.append(Warned("INVALID", f"do not rely on: {', '.join(invalid)}", "bad"))
    return Report(
        title=" · ".join(filter(None, (curve.workload, curve.model, all_levels))),
        tab=f"{curve.workload}: {all_levels}",
        made_by=f"loadgen {curve.version} report of a sweep",
        warned=warned,
        answer=[Said(sentence, large=True) for sentence in sentences(curve)],
        sections=[
            section("", measured(curve)),
            section("Levels", table(curve), Said(UNITS, "soft"), Said(WORDS, "soft")),
            section("Throughput and latency", Charts(list(charts(curve)))),
        ],
    )


def measured(curve: SweepCurve) -> Facts:
    """What was measured, by which version, and what the user said of it."""
    return facts(
        Target=curve.target,
        Model=curve.model,
        GPUs=str(curve.gpus or ""),
        SLO=curve.slo,
        Region=curve.region,
        **format.said(curve.metadata),
        When=curve.started.replace("T", " "),
        Made_by=f"loadgen {curve.version}",
    )


def address(run: str) -> str:
    """Where a point of a chart leads: to the summary of its run, beside the page; `ui` shows its page there."""
    return f"{quote(run)}/summary.json"


def charts(curve: SweepCurve) -> Iterator[Chart]:
    """Charts: latency over throughput, tokens/s per GPU over per user, throughput and goodput over load."""
    levels = [level for level in curve.levels if level.output_per_s is not None]
    if not levels:
        return
    names = tuple(level.name for level in levels)
    links = tuple(map(address, names))
    output = [level.output_per_s or 0.0 for level in levels]
    marks = tuple(
        Mark(x=level.output_per_s, label=word, color=color)
        for word, name, color in (("knee", curve.knee, "c4"), ("← SLO kept", curve.best, "good"))
        for level in levels
        if level.name == name
    )

    def line(field: str, name: str, color: str, dash: str = "") -> Series:
        values, labels = [getattr(level, field) for level in levels], names if not dash else ()
        return Series(
            name=name,
            x=output,
            y=values,
            color=color,
            dots=True,
            labels=labels,
            dash=dash,
            links=links,
        )

    tokens = Axis(label="output tokens/s", unit="tokens/s", min=0)
    ms = Axis(label="ms, log", unit="ms", log=True)
    ttft = (line("ttft_p50", "p50", "c1"), line("ttft_p99", "p99", "c2", "5 4"))
    yield Chart(
        title="Throughput against time to first token", x=tokens, y=ms, marks=marks, series=ttft
    )
    yield Chart(
        title="Throughput against E2E",
        x=tokens,
        y=ms,
        marks=marks,
        series=(line("e2e_p50", "", "c1"),),
    )
    yield from _pareto(levels)
    loads = [level.amount for level in levels if level.amount is not None]
    if len(loads) < len(levels) or len(levels) == 1:
        return
    load = Axis(
        label="requests in flight, log" if names[0].startswith("c") else "requests/s offered, log",
        log=True,
    )
    tokens = Axis(label="tokens/s", unit="tokens/s", min=0)
    series = (Series(x=loads, y=output, color="c3", dots=True, links=links),)
    yield Chart(title="Output tokens per second against load", x=load, y=tokens, series=series)
    if any(level.goodput is not None for level in levels):
        share = Axis(label="share", format="percent", min=0, max=1)
        series = (
            Series(
                x=loads, y=[level.goodput for level in levels], color="good", dots=True, links=links
            ),
        )
        yield Chart(title="Requests within the SLO against load", x=load, y=share, series=series)


def _pareto(levels: list[SweepLevel]) -> Iterator[Chart]:
    known_levels = sorted(
        (level for level in levels if level.per_user is not None),
        key=lambda level: level.per_user or 0,
    )
    if not known_levels:
        return
    per_gpu = all(level.per_gpu is not None for level in known_levels)
    unit = "tokens/s per GPU" if per_gpu else "tokens/s in all"

    def series(chosen: list[SweepLevel], name: str, color: str) -> Series:
        x = [level.per_user or 0.0 for level in chosen]
        y = [level.per_gpu if per_gpu else level.output_per_s for level in chosen]
        names = tuple(level.name for level in chosen)
        links = tuple(map(address, names))
        return Series(name=name, x=x, y=y, color=color, dots=True, labels=names, links=links)

    front, rest = (
        [level for level in known_levels if level.front],
        [level for level in known_levels if not level.front],
    )
    all_series = [series(front, "Pareto front", "c4")] if front else []
    all_series += (
        [msgspec.structs.replace(series(rest, "dominated", "c6"), width=0)] if rest else []
    )
    yield Chart(
        title=f"{unit[0].upper()}{unit[1:]} against tokens/s per user",
        note="" if per_gpu else "of all GPUs together: --gpus was not given",
        x=Axis(label="tokens/s per user (1 / TPOT p50)", unit="tokens/s per user", pad=True),
        y=Axis(label=unit, unit=unit, min=0),
        series=tuple(all_series),
    )
