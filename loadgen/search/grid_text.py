"""What a grid of sweeps says: heat maps over lengths, all levels as InferenceX prints them, fronts per cell. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from loadgen.core import format
from loadgen.present.page import COLORS, Axis, Chart, Series
from loadgen.present.section import (
    Charts,
    Quoted,
    Report,
    Said,
    Section,
    Table,
    Warned,
    section,
    simulated,
)
from loadgen.runs import levels_text
from loadgen.runs.levels import SweepCurve, SweepLevel
from loadgen.runs.levels_text import level_ms
from loadgen.search.grid import CellCurve, GridResult

_HEAD = (
    *("target", "ISL", "OSL", "load", "verdict", "TTFT p50", "TPOT p50", "per user", "E2E p50"),
    *("tokens/s", "per GPU, all", "out", "in", ""),
)


def best(one: CellCurve) -> SweepLevel | None:
    """The level that stands for a cell: the best within the SLO; without an SLO, that with most output tokens/s."""
    if one.curve.slo:
        return next((level for level in one.curve.levels if level.name == one.curve.best), None)
    sound = [level for level in one.curve.levels if level.valid and level.output_per_s is not None]
    return max(sound, key=lambda level: level.output_per_s or 0.0, default=None)


def sentences(found: GridResult) -> Iterator[str]:
    """The cells with most and with fewest tokens/s, and those where nothing holds."""
    slo = found.cells[0].curve.slo
    within = f" within the SLO ({slo})" if slo else ""
    held = [
        (one, level)
        for one in found.cells
        if (level := best(one)) is not None and level.output_per_s is not None
    ]
    if held:
        most = max(held, key=lambda pair: pair[1].output_per_s or 0.0)
        yield f"Most output tokens/s{within}: {_told(*most)}."
    if len(held) > 1:
        yield f"Fewest: {_told(*min(held, key=lambda pair: pair[1].output_per_s or 0.0))}."
    unsound = [
        one.cell.words for one in found.cells if not any(level.valid for level in one.curve.levels)
    ]
    without = [one for one in found.cells if best(one) is None and one.cell.words not in unsound]
    open_ = [
        one.cell.words
        for one in without
        if not any(level.slo_met is False for level in one.curve.levels)
    ]
    missed = [one.cell.words for one in without if one.cell.words not in open_]
    for why, where in (
        ("No level kept the SLO", missed),
        ("No level decides the SLO", open_),
        ("No level is a valid measurement", unsound),
    ):
        if where:
            yield f"{why} at {'; '.join(where)}."
    if found.left:
        yield f"{format.counted(found.left, 'level')} of the grid {'has' if found.left == 1 else 'have'} not run yet."
    elif found.missing:
        cells = format.counted(len(found.cells) + len(found.missing), "cell")
        yield f"{len(found.missing)} of {cells} have no run yet."


def _told(one: CellCurve, level: SweepLevel) -> str:
    return f"{one.cell.words}, {level.load or level.name}: {format.quantity(level.output_per_s)}"


def headline(found: GridResult) -> str:
    """The result in one sentence."""
    mark = "SIMULATED: " if _simulated(found) else ""
    return mark + next(sentences(found))


def _simulated(found: GridResult) -> bool:
    return any(level.simulated for one in found.cells for level in one.curve.levels)


def report(found: GridResult) -> Report:
    """The answer, the heat maps, the table of all levels, the charts of each pair of lengths."""
    curves = [one.curve for one in found.cells]
    cells = format.counted(len(curves), "cell")
    warned = [simulated()] if _simulated(found) else []
    every = [(one, level) for one in found.cells for level in one.curve.levels]
    if invalid := [
        f"{one.cell.words}, {level.load or level.name}" for one, level in every if not level.valid
    ]:
        warned.append(Warned("INVALID", f"do not rely on: {'; '.join(invalid)}", "bad"))
    first = curves[0]
    return Report(
        title=" · ".join(filter(None, (found.workload, first.model, cells))),
        tab=f"{found.workload}: {cells}",
        made_by=f"loadgen {first.version} report of a grid",
        warned=warned,
        answer=[Said(sentence, large=True) for sentence in sentences(found)],
        sections=[
            section("", levels_text.measured(_of_all(found))),
            *_heat_maps(found),
            section("Levels", _table(found), Said(levels_text.UNITS, "soft"), Said(_WORDS, "soft")),
            section("Throughput against speed", Charts(list(_fronts(found))), page_only=True),
            *([section("Go on with", Quoted(found.go_on))] if found.go_on else []),
        ],
    )


def _of_all(found: GridResult) -> SweepCurve:
    """The first cell's curve with what is said of all of them: the targets, and GPUs where they are as many."""
    curves = [one.curve for one in found.cells]
    gpus = {curve.gpus for curve in curves}
    targets = ", ".join(dict.fromkeys(curve.target for curve in curves))
    return msgspec.structs.replace(
        curves[0], target=targets, gpus=gpus.pop() if len(gpus) == 1 else None
    )


_WORDS = (
    "per GPU, all: input and output tokens/s of a GPU; out, in: its parts. Pareto: no other level of any target at "
    "these lengths gives both more tokens/s per GPU (without --gpus: in all) and more tokens/s per user."
)


def _heat_maps(found: GridResult) -> Iterator[Section]:
    """For each target two tables, input lengths down and output lengths across."""
    within = (
        "best level within the SLO"
        if found.cells[0].curve.slo
        else "level with most output tokens/s"
    )
    by_gpu = all(one.curve.gpus for one in found.cells)
    figures: list[tuple[str, Callable[[SweepLevel], float | None]]] = [
        (f"Output tokens/s{' per GPU' if by_gpu else ''}", _output_per_gpu if by_gpu else _output),
        ("Tokens/s per user", lambda level: level.per_user),
    ]
    for target in dict.fromkeys(one.cell.target for one in found.cells):
        of_target = [one for one in found.cells if one.cell.target == target]
        for words, figure in figures:
            head = f"{words} of {target}" if target else words
            yield section(
                head, _heat_map(of_target, figure), Said(f"At the {within} of each cell.", "soft")
            )


def _output(level: SweepLevel) -> float | None:
    return level.output_per_s


def _output_per_gpu(level: SweepLevel) -> float | None:
    return level.per_gpu


def _heat_map(cells: Sequence[CellCurve], figure: Callable[[SweepLevel], float | None]) -> Table:
    values = {
        (one.cell.isl, one.cell.osl): figure(level) if (level := best(one)) is not None else None
        for one in cells
    }
    down = sorted({isl for isl, _ in values}, key=lambda length: length or 0)
    across = sorted({osl for _, osl in values}, key=lambda length: length or 0)
    most = max((value for value in values.values() if value is not None), default=0.0) or 1.0
    rows = [
        (_length("ISL", isl), *(format.quantity(values.get((isl, osl))) for osl in across))
        for isl in down
    ]
    shades = [(0.0, *((values.get((isl, osl)) or 0.0) / most for osl in across)) for isl in down]
    return Table(("", *(_length("OSL", osl) for osl in across)), rows, shades=shades)


def _length(axis: str, length: int | None) -> str:
    return f"{axis} of the workload" if length is None else f"{axis} {length:,}"


def _table(found: GridResult) -> Table:
    """A row for each level, without the columns that are empty in every row."""
    rows = [_row(one, level) for one in found.cells for level in one.curve.levels]
    kept = [
        i
        for i in range(len(_HEAD))
        if i == 3 or any(row[i] not in (format.NONE, "") for row in rows)
    ]
    head, cells = [_HEAD[i] for i in kept], [tuple(row[i] for i in kept) for row in rows]
    return Table(head, cells, "remarks" if head[-1] == "" else "", left=1 + head.index("verdict"))


def _row(one: CellCurve, level: SweepLevel) -> tuple[str, ...]:
    parts = (level.total_per_gpu, level.per_gpu)
    input_per_gpu = None if parts[0] is None or parts[1] is None else parts[0] - parts[1]
    remarks = [words for words in levels_text.remarks(one.curve, level) if words != "Pareto"]
    return (
        one.cell.target,
        "" if one.cell.isl is None else f"{one.cell.isl:,}",
        "" if one.cell.osl is None else f"{one.cell.osl:,}",
        level.load or level.name,
        levels_text.verdict(level),
        level_ms(level, "ttft_p50"),
        level_ms(level, "tpot_p50"),
        format.quantity(level.per_user),
        level_ms(level, "e2e_p50"),
        format.quantity(level.output_per_s),
        *(format.quantity(value) for value in (*parts, input_per_gpu)),
        ", ".join([*remarks, *(["Pareto"] if level.name in one.front else [])]),
    )


def _fronts(found: GridResult) -> Iterator[Chart]:
    """For each pair of lengths a chart with the levels of every target."""
    for isl, osl in dict.fromkeys((one.cell.isl, one.cell.osl) for one in found.cells):
        beside = [one for one in found.cells if (one.cell.isl, one.cell.osl) == (isl, osl)]
        by_gpu = all(one.curve.gpus for one in beside)
        drawn = tuple(
            _series(one, COLORS[i % len(COLORS)], by_gpu=by_gpu) for i, one in enumerate(beside)
        )
        if not any(series.x for series in drawn):
            continue
        unit = "tokens/s per GPU" if by_gpu else "tokens/s in all"
        yield Chart(
            title=", ".join(_length(*one) for one in (("ISL", isl), ("OSL", osl))),
            note="" if by_gpu else "of all GPUs together: --gpus was not given",
            x=Axis(label="tokens/s per user (1 / TPOT p50)", unit="tokens/s per user", pad=True),
            y=Axis(label=f"output {unit}", unit=unit, min=0),
            series=drawn,
        )


def _series(one: CellCurve, color: str, *, by_gpu: bool) -> Series:
    known = [level for level in one.curve.levels if level.valid and level.per_user is not None]
    known.sort(key=lambda level: level.per_user or 0.0)
    return Series(
        name=one.cell.target,
        x=[level.per_user or 0.0 for level in known],
        y=[level.per_gpu if by_gpu else level.output_per_s for level in known],
        color=color,
        dots=True,
        labels=tuple(level.name for level in known),
        links=tuple(levels_text.address(f"{one.folder}/{level.name}") for level in known),
    )
