"""What a sweep, or any folder of levels, says. Pure: a `SweepCurve` in, the report of text, Markdown and page out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import quote

import msgspec

from loadgen.core import format
from loadgen.core.metrics.reasons import STATES
from loadgen.render.page import COLORS, Axis, Chart, Mark, Series
from loadgen.render.section import (
    Charts,
    Facts,
    Paragraph,
    Quoted,
    Report,
    Section,
    Table,
    Notice,
    named_facts,
    section,
    simulated_notice,
)
from loadgen.runs import sweep_curve
from loadgen.runs.headline import met_word
from loadgen.runs.load_points import counted_points
from loadgen.runs.sweep_curve import SweepCurve, SweepLevel

_HEAD: tuple[str, ...] = (
    *("target", "ISL", "OSL"),
    *("load", "verdict", "req/s", "tokens/s", "per GPU", "GPU, in+out", "per user"),
    *("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "E2E p50", "within SLO", ""),
)
_LOAD_COLUMN = _HEAD.index("load")


def level_ms(level: SweepLevel, name: str) -> str:
    """A latency of a level in ms, marked with ~ when it has too few samples."""
    text = format.milliseconds(getattr(level, name))
    return f"~{text}" if name in level.unsupported and text != format.NONE else text


def _row(curve: SweepCurve, level: SweepLevel) -> tuple[str, ...]:
    has_groups = bool(curve.groups)
    return (
        level.target,
        _tokens_cell(level.isl),
        _tokens_cell(level.osl),
        level.load or level.name,
        verdict(level),
        format.quantity(level.requests_per_s),
        format.quantity(level.output_per_s),
        format.quantity(level.per_gpu),
        format.quantity(level.total_per_gpu) if has_groups else "",
        format.quantity(level.per_user),
        *(
            level_ms(level, name)
            for name in ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "e2e_p50")
        ),
        format.percent(level.goodput),
        ", ".join(remarks(curve, level)),
    )


def _tokens_cell(tokens: int | None) -> str:
    """Return a length as a cell of the table, "" where it is the one of the workload."""
    return "" if tokens is None else f"{tokens:,}"


def verdict(level: SweepLevel) -> str:
    """Whether the level is a sound measurement, and of a sound one whether it met the SLO, if there is one."""
    if not level.valid:
        return "INVALID"
    if level.many_errors:
        return "too many errors"
    if level.slo_met is None:
        return "UNDECIDED" if level.slo_undecided else "valid"
    return met_word(level.slo_met)


def remarks(curve: SweepCurve, level: SweepLevel) -> Iterator[str]:
    if level.state != "finished":
        yield STATES.get(level.state, level.state).partition(":")[0]
    if not level.full:
        yield "too short for its lanes"
    if level.name in {curve.best, *(group.best for group in curve.groups)}:
        yield "best within the SLO"
    if level.name in {curve.knee, *(group.knee for group in curve.groups)}:
        yield "knee"
    if level.front:
        yield "Pareto"


def _tokens(level: SweepLevel) -> str:
    return f"{format.quantity(level.output_per_s)} output tokens/s"


def sentences(curve: SweepCurve) -> Iterator[str]:
    """Yield the result of a sweep in sentences: the best load point within the SLO, and the knee.

    Of a sweep over several lengths or targets: where throughput is highest and lowest, and where
    no load point met the SLO. Last, how many load points have not run.
    """
    yield from _sentences_of_groups(curve) if curve.groups else _sentences_of_one_curve(curve)
    if curve.not_run:
        requested = counted_points(len({level.name for level in curve.levels} | {*curve.not_run}))
        verb = "has" if len(curve.not_run) == 1 else "have"
        yield f"{len(curve.not_run)} of {requested} {verb} not run yet."


def _sentences_of_groups(curve: SweepCurve) -> Iterator[str]:
    """Yield where throughput is highest and lowest, and the groups without a best load point."""
    curves = curve.split()
    chosen = [level for one in curves if (level := representative(one)) is not None]
    if chosen:
        within = f" within the SLO ({curve.slo})" if curve.slo else ""
        highest = max(chosen, key=lambda level: level.output_per_s or 0.0)
        tokens = format.quantity(highest.output_per_s)
        yield f"Most output tokens/s{within}: {highest.label}: {tokens}."
    if len(chosen) > 1:
        lowest = min(chosen, key=lambda level: level.output_per_s or 0.0)
        yield f"Fewest: {lowest.label}: {format.quantity(lowest.output_per_s)}."
    for reason, groups in _groups_without_best(curves).items():
        yield f"{reason} at {'; '.join(groups)}."


def _groups_without_best(curves: Sequence[SweepCurve]) -> dict[str, list[str]]:
    """Return the labels of the groups without a best load point, by the reason."""
    by_reason: dict[str, list[str]] = {
        "No load point met the SLO": [],
        "No load point that met the SLO was sustained": [],
        "No load point decides the SLO": [],
        "No load point is a valid measurement": [],
    }
    missed, growing, undecided, invalid = by_reason.values()
    for one in curves:
        label = one.levels[0].group.label
        if not any(level.valid for level in one.levels):
            invalid.append(label)
        elif representative(one) is not None:
            continue
        elif sweep_curve.lowest_growing(one.levels) is not None:
            growing.append(label)
        elif any(level.slo_met is False for level in one.levels):
            missed.append(label)
        else:
            undecided.append(label)
    return {reason: labels for reason, labels in by_reason.items() if labels}


def representative(curve: SweepCurve) -> SweepLevel | None:
    """Return the load point that stands for one curve.

    That is the best one within the SLO, or without an SLO the valid one with the most output
    tokens/s. Return None if there is none.
    """
    if curve.slo:
        return next((level for level in curve.levels if level.name == curve.best), None)
    valid = [level for level in curve.levels if level.is_usable and level.output_per_s is not None]
    return max(valid, key=lambda level: level.output_per_s or 0.0, default=None)


def _sentences_of_one_curve(curve: SweepCurve) -> Iterator[str]:
    by_name = {level.name: level for level in curve.levels}
    if curve.slo:
        if curve.best:
            best = by_name[curve.best]
            rates = f"{format.quantity(best.requests_per_s)} requests/s completed, {_tokens(best)}"
            yield f"Best level within the SLO ({curve.slo}): {best.load}, {rates}."
            yield from _kept_above(curve, best)
            if why := sweep_curve.bound_why(curve):
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
    growing = sweep_curve.lowest_growing(curve.levels)
    for level in sweep_curve.kept(curve.levels[curve.levels.index(best) + 1 :]):
        missed, name = sweep_curve.lowest_missed(curve.levels), level.load or level.name
        if missed is not None and (level.amount or 0) >= (missed.amount or 0):
            lower = missed.load or missed.name
            yield f"{name} kept it too, but no capacity lies above a level that missed it ({lower})."
        elif level.sustained is False:
            yield f"{name} kept it too, but grew while it went on: it would not last."
        elif growing is not None and (level.amount or 0) > (growing.amount or 0):
            lower = growing.load or growing.name
            yield f"{name} kept it too, but no capacity lies above a level that grew ({lower})."
        else:
            yield f"{name} kept it too, but completed less: {format.quantity(level.requests_per_s)} requests/s."


def _without_best(curve: SweepCurve) -> Iterator[str]:
    """Why no level is the best within the SLO."""
    missed = [level for level in curve.levels if sweep_curve.outcome(level) == "over"]
    unsound = [
        level
        for level in curve.levels
        if not level.valid or level.state != "finished" or not level.full
    ]
    kept = sum(level.slo_met is True for level in unsound)
    within_slo = sweep_curve.kept(curve.levels)
    undecided = len(curve.levels) - len(missed) - len(unsound) - len(within_slo)
    growing = sweep_curve.lowest_growing(curve.levels)
    if growing is not None and (not missed or (growing.amount or 0) < (missed[0].amount or 0)):
        yield (
            f"No level within the SLO ({curve.slo}) is sustained: {growing.load or growing.name} kept it, but grew "
            "while it went on: it would not last. Add levels below it."
        )
    elif missed:
        lowest, above = missed[0], [level.load or level.name for level in within_slo]
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
        if i == _LOAD_COLUMN or any(row[i] not in (format.NONE, "") for row in rows)
    ]
    head = [_HEAD[i] for i in kept]
    cells = [tuple(row[i] for i in kept) for row in rows]
    return Table(
        head, cells, "remarks" if head[-1] == "" else "", label_columns=1 + head.index("verdict")
    )


UNITS = (
    "Latencies in ms. req/s, output tokens/s: in the steady-state window; per user: 1 / TPOT p50. "
    "~: too few samples."
)
WORDS = (
    "Knee: the largest output tokens/s divided by E2E p50 (Kleinrock's power). Pareto: no other level gives both more "
    "tokens/s per GPU and more tokens/s per user."
)


def report(curve: SweepCurve) -> Report:
    """Return the report of a sweep: the result, what was measured, the load points, the charts."""
    all_levels = format.counted(len(curve.levels), "level")
    warned = [simulated_notice()] if any(level.simulated for level in curve.levels) else []
    if invalid := [level.label for level in curve.levels if not level.valid]:
        warned.append(Notice("INVALID", f"do not rely on: {'; '.join(invalid)}", "bad"))
    return Report(
        title=" · ".join(filter(None, (curve.workload, curve.model, all_levels))),
        page_title=f"{curve.workload}: {all_levels}",
        generated_by=f"loadgen {curve.version} report of a sweep",
        notices=warned,
        headline=[Paragraph(sentence, large=True) for sentence in sentences(curve)],
        sections=[
            section("", measured(curve)),
            section("Levels", table(curve), Paragraph(UNITS, "soft"), Paragraph(WORDS, "soft")),
            *_chart_sections(curve),
            *([section("Resume with", Quoted(curve.resume))] if curve.resume else []),
        ],
    )


def _chart_sections(curve: SweepCurve) -> Iterator[Section]:
    """Yield the charts of a sweep, in a section for each pair of lengths.

    Curves and Pareto fronts assume one kind of work, so load points of different lengths never
    share a chart.
    """
    if not curve.groups:
        yield section("Throughput and latency", Charts(list(charts(curve))))
        return
    by_lengths: dict[str, list[SweepCurve]] = {}
    for one in curve.split():
        by_lengths.setdefault(one.levels[0].group.lengths_label, []).append(one)
    for lengths, curves in by_lengths.items():
        title = ": ".join(filter(None, ("Throughput and latency", lengths)))
        if len(curves) == 1:
            yield section(title, Charts(list(charts(curves[0]))))
        else:
            yield section(title, Charts(list(target_charts(curves))))


def measured(curve: SweepCurve) -> Facts:
    """What was measured, by which version, and what the user said of it."""
    return named_facts(
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


def target_charts(curves: Sequence[SweepCurve]) -> Iterator[Chart]:
    """Yield the charts that compare several targets at the same lengths, a series for each."""
    points = [level for one in curves for level in one.levels if level.valid]
    by_gpu = all(level.per_gpu is not None for level in points)
    unit = "tokens/s per GPU" if by_gpu else "tokens/s in all"
    axes = (
        ("per_user", "tokens/s per user (1 / TPOT p50)", "tokens/s per user"),
        ("ttft_p50", "TTFT p50, ms", "ms"),
    )
    for field, label, axis_unit in axes:
        series = [
            _target_series(one, field, COLORS[i % len(COLORS)], by_gpu=by_gpu)
            for i, one in enumerate(curves)
        ]
        if not any(one.x for one in series):
            continue
        yield Chart(
            title=f"{unit[0].upper()}{unit[1:]} against {label}",
            note="" if by_gpu else "of all GPUs together: --gpus was not given",
            x=Axis(label=label, unit=axis_unit, pad=True),
            y=Axis(label=f"output {unit}", unit=unit, min=0),
            series=tuple(series),
        )


def _target_series(curve: SweepCurve, field: str, color: str, *, by_gpu: bool) -> Series:
    """Return the valid load points of one target as a line, with `field` on the x axis."""
    known = [level for level in curve.levels if level.valid and getattr(level, field) is not None]
    known.sort(key=lambda level: float(getattr(level, field)))
    return Series(
        name=curve.levels[0].target,
        x=[getattr(level, field) for level in known],
        y=[level.per_gpu if by_gpu else level.output_per_s for level in known],
        color=color,
        dots=True,
        labels=tuple(level.load or level.name for level in known),
        links=tuple(address(level.name) for level in known),
    )


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
        label="requests in flight, log" if levels[0].closed else "requests/s offered, log",
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
