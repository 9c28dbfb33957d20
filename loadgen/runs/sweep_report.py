"""The report of a sweep, or of any directory of runs at several loads. Pure: a `SweepCurve` in.

The charts are in `sweep_charts.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal

from loadgen.core import format
from loadgen.core.metrics import interactivity
from loadgen.core.metrics.reasons import STATES
from loadgen.render.section import (
    Charts,
    Facts,
    Notice,
    Paragraph,
    Quoted,
    Report,
    Section,
    Table,
    named_facts,
    section,
    simulated_notice,
)
from loadgen.runs.answers_text import format_score_cell
from loadgen.runs.load_point_results import LoadPointResult
from loadgen.runs.load_points import counted_points
from loadgen.runs.sweep_analysis import (
    MIN_POINTS_FOR_KNEE,
    lowest_growing,
    lowest_missed,
    points_for_knee,
    points_within_slo,
)
from loadgen.runs.sweep_answers import describe_answers_under_load
from loadgen.runs.sweep_charts import sweep_charts, target_charts
from loadgen.runs.sweep_curve import SweepCurve, lower_bound_reason

LATENCIES = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "e2e_p50")
TABLE_HEADER = (
    "target",
    "ISL",
    "OSL",
    "load",
    "SLO",
    "req/s",
    "tokens/s",
    "per GPU",
    "GPU, in+out",
    "per user",
    "TTFT p50",
    "TTFT p99",
    "TPOT p50",
    "TPOT p99",
    "E2E p50",
    "SLO attainment",
    "answers right, %",
    "",
)
SPEED_PER_USER_TITLE = "Output speed per user, tok/s"
SLO_HEADING = "SLO"
REMARKS_HEADING = ""
LOAD_COLUMN = TABLE_HEADER.index("load")
BRIEF_COLUMNS = (
    "target",
    "ISL",
    "OSL",
    "load",
    "SLO",
    "req/s",
    "tokens/s",
    "TTFT p50",
    "TTFT p99",
    "TPOT p50",
    "TPOT p99",
    "E2E p50",
    "answers right, %",
    "",
)
"""The columns of the table that a terminal shows by default."""
MAX_UNDECIDED_REASONS = 4
"""The number of reasons that a report of a sweep names for undecided load points."""

WITHOUT_STEADY_STATE = "*"
"""Marks the throughput of a load point without a steady state."""

MS_PER_S = 1000

BRIEF_UNITS = "Latencies in ms. ~: too few samples."
UNITS = (
    "Latencies in ms. req/s and output tokens/s are those of the steady-state window. Per user: "
    "1 / TPOT p50. ~: too few samples."
)
DEFINITIONS = (
    "Knee: the load point with the highest ratio of output tokens/s to E2E p50 (Kleinrock's "
    "power). Pareto: no other load point has both more tokens/s per GPU and more tokens/s per user."
)


def sweep_report(curve: SweepCurve) -> Report:
    """Return the report of a sweep: the result, what was measured, the load points, the charts.

    `sections` are those of the full report and the page, and `brief` those of the short report.
    """
    title = describe_sweep(curve)
    sentences = list(result_sentences(curve))
    resume_sections = [section("Resume with", Quoted(curve.resume))] if curve.resume else []
    load_point_section = section(
        "Load points",
        load_point_table(curve),
        Paragraph(UNITS, "soft"),
        Paragraph(describe_missing_steady_state(curve), "warn"),
        *_interactivity_table(curve),
        Paragraph(DEFINITIONS, "soft"),
    )

    return Report(
        title=title,
        page_title=f"{curve.workload}: {_counted_points_of(curve)}",
        generated_by=f"loadgen {curve.version} report of a sweep",
        notices=_warnings(curve),
        headline=_headline_paragraphs(sentences),
        sections=[
            section("", measured_facts(curve)),
            load_point_section,
            *_chart_sections(curve),
            *resume_sections,
        ],
        brief=[
            section("", title),
            section(
                "",
                brief_load_point_table(curve),
                BRIEF_UNITS,
                Paragraph(describe_missing_steady_state(curve), "warn"),
                indented=True,
            ),
            section("", *sentences, indented=True),
            *resume_sections,
        ],
    )


def _headline_paragraphs(sentences: Sequence[str]) -> list[Paragraph]:
    """Return the sentences of the result as paragraphs, the first one in large letters."""
    first_sentence = [Paragraph(sentence, large=True) for sentence in sentences[:1]]
    return first_sentence + [Paragraph(sentence) for sentence in sentences[1:]]


def describe_sweep(curve: SweepCurve) -> str:
    """Return what was swept, for example "rag on sim (llama-2-70b, 4 GPUs): 6 load points"."""
    gpus = "" if curve.gpus is None else format.counted(curve.gpus, "GPU")
    details = ", ".join(filter(None, (curve.model, gpus)))
    target = f" on {curve.target}" if curve.target else ""
    suffix = f" ({details})" if details else ""
    return f"{curve.workload}{target}{suffix}: {_counted_points_of(curve)}"


def _counted_points_of(curve: SweepCurve) -> str:
    return counted_points(len(curve.load_points))


def _warnings(curve: SweepCurve) -> list[Notice]:
    """Return what has to be known before the result: a simulation, and INVALID load points."""
    warnings = []
    if any(point.simulated for point in curve.load_points):
        warnings.append(simulated_notice())
    invalid_labels = [point.label for point in curve.load_points if not point.valid]
    if invalid_labels:
        warnings.append(Notice("INVALID", f"discard {'; '.join(invalid_labels)}", "bad"))
    return warnings


def measured_facts(curve: SweepCurve) -> Facts:
    """Return what was measured, when, with which version, and the metadata of the user."""
    return named_facts(
        Target=curve.target,
        Model=curve.model,
        GPUs=str(curve.gpus or ""),
        SLO=curve.slo,
        Region=curve.region,
        **format.metadata_by_heading(curve.metadata),
        Date=_without_fraction(curve.started).replace("T", " "),
        Generated_by=f"loadgen {curve.version}",
    )


def _without_fraction(time: str) -> str:
    """Return a time in ISO 8601 without its fraction of a second."""
    return re.sub(r"\.\d+", "", time)


def _chart_sections(curve: SweepCurve) -> Iterator[Section]:
    """Yield the charts of a sweep, in a section for each pair of prompt and output length.

    Curves and Pareto fronts assume one kind of request, so load points of different lengths never
    share a chart. Several targets with the same lengths do, for comparison.
    """
    heading = "Throughput and latency"
    if not curve.groups:
        yield section(heading, Charts(list(sweep_charts(curve))))
        return

    for lengths, curves in _group_curves_by_lengths(curve).items():
        charts = sweep_charts(curves[0]) if len(curves) == 1 else target_charts(curves)
        heading_of_lengths = f"{heading}: {lengths}" if lengths else heading
        yield section(heading_of_lengths, Charts(list(charts)))


def _group_curves_by_lengths(curve: SweepCurve) -> dict[str, list[SweepCurve]]:
    """Return the curve of each group of load points, by the label of its request lengths.

    For example, `{"ISL 1,000 OSL 200": [curve of target A, curve of target B]}`.
    """
    curves_by_lengths: dict[str, list[SweepCurve]] = {}
    for group_curve in curve.split():
        lengths = group_curve.load_points[0].group.lengths_label
        curves_by_lengths.setdefault(lengths, []).append(group_curve)
    return curves_by_lengths


# The table of load points


def load_point_table(curve: SweepCurve) -> Table:
    """Return a table with a row for each load point and all metrics.

    Columns that are empty in every row are left out. The last column, without a name, marks the
    knee, the best load point and the Pareto front.
    """
    rows = [(*_metric_cells(curve, point), _remarks(curve, point)) for point in curve.load_points]
    return _load_point_table(rows, TABLE_HEADER, remarks_kind="remarks")


def _interactivity_table(curve: SweepCurve) -> Iterator[Table]:
    """Yield a table of the output speed per user by each definition, if it is known."""
    if all(point.per_user is None for point in curve.load_points):
        return

    labels = [definition.label for definition in interactivity.DEFINITIONS]
    rows = [
        (
            point.label,
            *(
                format.quantity(point.speed_per_user(definition.name))
                for definition in interactivity.DEFINITIONS
            ),
        )
        for point in curve.load_points
    ]
    yield Table((SPEED_PER_USER_TITLE, *labels), rows)


def brief_load_point_table(curve: SweepCurve) -> Table:
    """Return a table with the key metrics of each load point, for a terminal.

    Columns that are empty in every row are left out. The last column, without a name, marks the
    knee and the best load point.
    """
    rows = [
        (*_metric_cells(curve, point), _brief_remark(curve, point)) for point in curve.load_points
    ]
    return _load_point_table(rows, BRIEF_COLUMNS, remarks_kind="")


def _load_point_table(
    rows: Sequence[Sequence[str]], columns: Sequence[str], *, remarks_kind: Literal["", "remarks"]
) -> Table:
    """Return a table of the load points with only some columns, and without empty ones.

    Args:
        rows: The cells of each load point under TABLE_HEADER.
        columns: The names of the columns that the table may have. The column of the load is there
            even if it is empty.
        remarks_kind: The kind of the table (`Table.kind`) if its last column has remarks: "remarks"
            wraps long ones, and "" does not. Without that column it is "".
    """
    indices = [
        index
        for index, name in enumerate(TABLE_HEADER)
        if name in columns and (index == LOAD_COLUMN or _is_column_filled(rows, index))
    ]
    header = [TABLE_HEADER[index] for index in indices]
    rows_with_columns = [tuple(row[index] for index in indices) for row in rows]

    # The columns up to the outcome of the SLO are labels, and the following ones are numbers.
    label_columns = header.index(SLO_HEADING) + 1
    has_remarks = header[-1] == REMARKS_HEADING
    kind = remarks_kind if has_remarks else ""

    return Table(header, rows_with_columns, kind, label_columns=label_columns)


def _is_column_filled(rows: Sequence[Sequence[str]], index: int) -> bool:
    """Return whether a column has a value in at least one row."""
    return any(row[index] not in (format.NONE, "") for row in rows)


def _metric_cells(curve: SweepCurve, point: LoadPointResult) -> tuple[str, ...]:
    """Return the cells of a load point for all columns in TABLE_HEADER but the last one, remarks.

    `per_gpu` and `total_per_gpu` are tokens per second and GPU, of output and of input plus output.
    `per_user` is the output tokens per second that one user sees. `total_per_gpu` is shown only if
    the sweep has several groups, which differ in their request lengths or targets.
    """
    has_groups = bool(curve.groups)
    total_per_gpu = throughput_cell(point, point.total_per_gpu) if has_groups else ""
    latencies = [latency_cell(point, name) for name in LATENCIES]

    return (
        point.target,
        _token_count(point.isl),
        _token_count(point.osl),
        point.short_label,
        slo_label(point),
        throughput_cell(point, point.requests_per_s),
        throughput_cell(point, point.output_per_s),
        throughput_cell(point, point.per_gpu),
        total_per_gpu,
        format.quantity(point.per_user),
        *latencies,
        format.percent(point.slo_attainment),
        "" if point.answers is None else format_score_cell(point.answers.overall),
    )


def throughput_cell(point: LoadPointResult, rate: float | None) -> str:
    """Return a rate of a load point, marked with * if the load point has no steady state."""
    text = format.quantity(rate)
    is_marked = not point.has_steady_state and text != format.NONE
    return f"{WITHOUT_STEADY_STATE}{text}" if is_marked else text


def describe_missing_steady_state(curve: SweepCurve) -> str:
    """Return what the mark * of a throughput means and what to do, or "" if there is none."""
    marked_points = [point for point in curve.load_points if not point.has_steady_state]
    if not marked_points:
        return ""

    latencies_ms = [point.e2e_p50 for point in marked_points if point.e2e_p50 is not None]
    duration = ""
    if latencies_ms:
        longest_s = max(latencies_ms) / MS_PER_S
        duration = f" (p50 up to {format.duration(longest_s)})"

    return (
        f"{WITHOUT_STEADY_STATE}: throughput includes ramp-up and drain, because the load was "
        f"short compared with the E2E latency{duration}; use a longer -d/--duration."
    )


def _token_count(tokens: int | None) -> str:
    """Return a length as a cell of the table, "" if it is the one of the workload."""
    return "" if tokens is None else f"{tokens:,}"


def latency_cell(point: LoadPointResult, name: str) -> str:
    """Return a latency of a load point in ms, for example `ttft_p99`.

    It is marked with ~ if it has too few samples.
    """
    text = format.milliseconds(getattr(point, name))
    has_few_samples = name in point.unsupported and text != format.NONE
    return f"~{text}" if has_few_samples else text


def slo_label(point: LoadPointResult) -> str:
    """Return whether a load point met the SLO, or why this is not known."""
    if not point.valid:
        return "INVALID"
    if point.many_errors:
        return "too many errors"
    if point.slo_met is not None:
        return "met" if point.slo_met else "missed"
    return "undecided" if point.slo_undecided else "none"


def _brief_remark(curve: SweepCurve, point: LoadPointResult) -> str:
    """Return whether a load point is the knee or the best one of its curve, or is incomplete."""
    remarks = []
    if point.state != "finished":
        remarks.append(_state_label(point))

    if not point.reached_concurrency:
        remarks.append("too short for its concurrency")

    if point.name in {curve.best, *(group.best for group in curve.groups)}:
        remarks.append("best")

    if point.name in {curve.knee, *(group.knee for group in curve.groups)}:
        remarks.append("knee")

    return ", ".join(remarks)


def _state_label(point: LoadPointResult) -> str:
    """Return how a run ended that did not come to its end, for example "interrupted"."""
    return STATES.get(point.state, point.state).partition(":")[0]


def _remarks(curve: SweepCurve, point: LoadPointResult) -> str:
    """Return what is special about a load point."""
    front = "Pareto" if point.on_pareto_front else ""
    return ", ".join(filter(None, (_brief_remark(curve, point), front)))


# The result in sentences


def headline(curve: SweepCurve) -> str:
    """Return the result of the sweep in one sentence."""
    is_simulated = any(point.simulated for point in curve.load_points)
    mark = "SIMULATED: " if is_simulated else ""
    without_result = f"{_counted_points_of(curve)} of {curve.workload}."
    return mark + next(result_sentences(curve), without_result)


def result_sentences(curve: SweepCurve) -> Iterator[str]:
    """Yield the result of a sweep in sentences, and how many load points have not run yet.

    For a sweep of one target and one pair of request lengths, the result is the best load point
    within the SLO and the knee. For several of them (groups), it is where throughput is highest
    and lowest, and where no load point met the SLO.
    """
    if curve.groups:
        yield from _describe_groups(curve)
    else:
        yield from _describe_single_curve(curve)
    if curve.not_run:
        # A load point whose run was interrupted is in both lists.
        requested_names = {point.name for point in curve.load_points}.union(curve.not_run)
        verb = "has" if len(curve.not_run) == 1 else "have"
        total = counted_points(len(requested_names))
        yield f"{len(curve.not_run)} of {total} {verb} not run yet."


def _describe_single_curve(curve: SweepCurve) -> Iterator[str]:
    best = curve.best_point
    if best is not None and curve.slo:
        yield from _describe_best(curve, best)
    elif curve.slo:
        yield from _explain_missing_best(curve)
    yield from _describe_knee(curve)
    if curve.answers is not None:
        yield describe_answers_under_load(curve.answers)


def _describe_best(curve: SweepCurve, best: LoadPointResult) -> Iterator[str]:
    """Yield the best load point within the SLO, and why the capacity may lie above it.

    A load point with a higher load may have met the SLO and still not be the best one, for example
    because a lower load missed it. There is a sentence for each of these.
    """
    # A closed loop has no offered load, so its load points are compared by their throughput.
    criterion = (
        "the highest throughput within" if best.is_closed_loop else "the highest load within"
    )
    throughput = ""
    if best.has_steady_state:
        throughput = f": {format.quantity(best.requests_per_s)} req/s, {_output_tokens(best)}"
    yield f"Best load point: {best.short_label}, {criterion} the SLO ({curve.slo}){throughput}."

    for point in points_within_slo(curve.points_above_best):
        yield _explain_point_above_best(curve, point)

    reason = lower_bound_reason(curve)
    if reason:
        is_highest_load = best is curve.load_points[-1]
        advice = " Test higher loads to find the limit." if is_highest_load else ""
        load = best.short_label if best.is_closed_loop else f"{best.short_label} offered"
        yield f"A lower bound of the capacity is {load}: {reason}.{advice}"


def _explain_point_above_best(curve: SweepCurve, point: LoadPointResult) -> str:
    """Return why a load point that met the SLO at more load than the best one is not the best.

    There are four reasons, of which the first that applies is stated:

    1. Another load point missed the SLO at the same or a lower load.
    2. The queue kept growing at this load, so that a longer run would miss the SLO.
    3. The queue kept growing at a lower load.
    4. The server completed fewer requests per second than at the best load point, as in a closed
       loop with more virtual users than the server can handle.
    """
    missed = lowest_missed(curve.load_points)
    growing = lowest_growing(curve.load_points)
    if missed is not None and not _is_lower(point, missed):
        return (
            f"{point.short_label} met the SLO, but {missed.short_label} missed it at no more load, "
            "so it shows no capacity."
        )
    if point.sustained is False:
        return f"{point.short_label} met the SLO but is not sustainable: the queue kept growing."
    if growing is not None and _is_lower(growing, point):
        return (
            f"{point.short_label} met the SLO, but the lower load {growing.short_label} is not "
            "sustainable, so it shows no capacity."
        )

    completed = format.quantity(point.requests_per_s)
    return f"{point.short_label} met the SLO, but completed fewer requests: {completed} req/s."


def _explain_missing_best(curve: SweepCurve) -> Iterator[str]:
    """Yield why no load point is the best one within the SLO, and what to do.

    The first sentence is about the lowest load that failed. The following ones count the load
    points that are no proper measurement, and those that cannot decide the SLO, with the reasons.
    """
    yield _describe_lowest_failure(curve)
    complete_points = [point for point in curve.load_points if _is_complete_and_valid(point)]
    unusable_points = [point for point in curve.load_points if not _is_complete_and_valid(point)]
    undecided_points = [point for point in complete_points if point.slo_met is None]

    all_points = _counted_points_of(curve)
    if unusable_points:
        yield _describe_unusable_points(unusable_points, all_points)

    if undecided_points:
        yield f"{len(undecided_points)} of {all_points} cannot decide the SLO."
        yield from _describe_undecided_points(undecided_points)


def _describe_undecided_points(points: Sequence[LoadPointResult]) -> Iterator[str]:
    """Yield why load points cannot decide the SLO, as a sentence for each different reason.

    At most MAX_UNDECIDED_REASONS reasons are named.
    """
    labels_by_reason: dict[str, list[str]] = {}
    for point in points:
        for reason in point.undecided_reasons:
            labels_by_reason.setdefault(reason, []).append(point.short_label)

    listed_reasons = list(labels_by_reason.items())[:MAX_UNDECIDED_REASONS]
    for reason, labels in listed_reasons:
        yield f"{', '.join(labels)}: {reason}."

    other_count = len(labels_by_reason) - len(listed_reasons)
    if other_count:
        other_reasons = format.counted(other_count, "other reason")
        yield f"For {other_reasons}, run loadgen report on the directory of a load point."


def _describe_unusable_points(unusable: Sequence[LoadPointResult], all_points: str) -> str:
    """Return how many load points are INVALID, or ended before they reached their full load.

    `all_points` is the number of all load points as text, such as "6 load points".
    """
    verb = "is" if len(unusable) == 1 else "are"
    met_count = sum(point.slo_met is True for point in unusable)
    within_slo = f"; {met_count} of them met the SLO" if met_count else ""
    return (
        f"{len(unusable)} of {all_points} {verb} INVALID or too short{within_slo}. "
        "Run loadgen report on the directory of a load point to see why."
    )


def _is_complete_and_valid(point: LoadPointResult) -> bool:
    """Return whether a run came to its end as a valid measurement of its full load."""
    return point.valid and point.state == "finished" and point.reached_concurrency


def _describe_lowest_failure(curve: SweepCurve) -> str:
    """Return at which load a sweep without a best load point first failed, and what to do.

    A load fails if it missed the SLO, or if the queue kept growing although it met the SLO. If
    loads failed in both ways, the text is about the lower one.
    """
    missed = lowest_missed(curve.load_points)
    growing = lowest_growing(curve.load_points)
    if growing is not None and (missed is None or _is_lower(growing, missed)):
        return (
            f"No load point met the SLO ({curve.slo}) sustainably: {growing.short_label} met it, "
            "but the queue kept growing. Test lower loads."
        )
    if missed is None:
        return f"No load point is a valid measurement that decides the SLO ({curve.slo})."

    return _describe_lowest_missed(curve, missed)


def _describe_lowest_missed(curve: SweepCurve, missed: LoadPointResult) -> str:
    """Return that a load missed the SLO, and which higher loads met it, if any did."""
    met_labels = [point.short_label for point in points_within_slo(curve.load_points)]
    if met_labels:
        return (
            f"No capacity within the SLO ({curve.slo}): {missed.short_label} missed it, and only "
            f"higher loads met it ({', '.join(met_labels)}). Repeat {missed.short_label} or test "
            "lower loads."
        )

    return (
        f"No load point met the SLO ({curve.slo}): even {missed.short_label}, the lowest valid "
        "one, missed it. Test lower loads."
    )


def _is_lower(point: LoadPointResult, other: LoadPointResult) -> bool:
    """Return whether a load point has less load than another one. An unknown load counts as 0."""
    return (point.load_value or 0.0) < (other.load_value or 0.0)


def _describe_knee(curve: SweepCurve) -> Iterator[str]:
    """Yield the load point at the knee, or what is needed to find it.

    Nothing is said of a curve with so few load points that no knee can be expected.
    """
    knee = curve.knee_point
    if knee is not None:
        yield (
            f"Knee: {knee.short_label}, {_output_tokens(knee)} at an E2E p50 of "
            f"{format.milliseconds(knee.e2e_p50)} ms (highest ratio of throughput to latency)."
        )
        return

    if len(curve.load_points) < MIN_POINTS_FOR_KNEE:
        return

    comparable_count = len(points_for_knee(curve.load_points))
    if comparable_count >= MIN_POINTS_FOR_KNEE:
        yield (
            "No knee yet: throughput still grows faster than E2E p50 at the highest load. Test "
            "higher loads."
        )
    elif any(not point.has_steady_state for point in curve.load_points):
        yield (
            f"No knee: {comparable_count} of {_counted_points_of(curve)} have a steady state, and "
            f"{MIN_POINTS_FOR_KNEE} are needed."
        )


def _output_tokens(point: LoadPointResult) -> str:
    """Return the throughput of a load point, marked with * if it has no steady state."""
    return f"{throughput_cell(point, point.output_per_s)} output tok/s"


# The result of a sweep over several lengths or targets


def _describe_groups(curve: SweepCurve) -> Iterator[str]:
    """Yield where the throughput of a sweep over several lengths or targets is highest and lowest.

    A group is all load points with the same lengths and target. Groups are compared by the
    throughput of their best load points within the SLO. The last sentences name the groups that
    have none, with the reason.
    """
    curves = curve.split()
    best_points = [point for point in map(representative_point, curves) if point is not None]
    best_points.sort(key=_throughput, reverse=True)

    if best_points:
        highest = best_points[0]
        within_slo = f" within the SLO ({curve.slo})" if curve.slo else ""
        yield f"Highest throughput{within_slo}: {highest.label}, {_output_tokens(highest)}."

    if len(best_points) > 1:
        lowest = best_points[-1]
        yield f"Lowest throughput: {lowest.label}, {_output_tokens(lowest)}."

    for reason, labels in _list_groups_without_best(curves).items():
        yield f"{reason}: {'; '.join(labels)}."


def _throughput(point: LoadPointResult) -> float:
    return point.output_per_s or 0.0


def representative_point(curve: SweepCurve) -> LoadPointResult | None:
    """Return the load point that stands for one curve, or None if there is none.

    That is the best one within the SLO, or without an SLO the usable one with the highest
    throughput.
    """
    if curve.slo:
        return curve.best_point
    usable_points = [
        point for point in curve.load_points if point.is_usable and point.output_per_s is not None
    ]
    return max(usable_points, key=_throughput, default=None)


_ALL_MISSED = "No load point met the SLO"
_NONE_SUSTAINABLE = "No load point that met the SLO is sustainable"
_ALL_UNDECIDED = "No load point decides the SLO"
_NONE_VALID = "No valid load point"
_REASONS_WITHOUT_BEST = (_ALL_MISSED, _NONE_SUSTAINABLE, _ALL_UNDECIDED, _NONE_VALID)
"""Why a group has no best load point, in the order in which they are stated."""


def _list_groups_without_best(curves: Sequence[SweepCurve]) -> dict[str, list[str]]:
    """Return the labels of the groups that have no best load point, by the reason for that.

    For example: `{"No valid load point": ["ISL 1,000", "ISL 2,000"]}`. The reasons are in the order
    of _REASONS_WITHOUT_BEST, without those that apply to no group.
    """
    labels_by_reason: dict[str, list[str]] = {reason: [] for reason in _REASONS_WITHOUT_BEST}
    for curve in curves:
        reason = _reason_without_best(curve)
        if reason:
            labels_by_reason[reason].append(curve.load_points[0].group.label)
    return {reason: labels for reason, labels in labels_by_reason.items() if labels}


def _reason_without_best(curve: SweepCurve) -> str:
    """Return why a curve has no best load point, or "" if it has one."""
    if not any(point.valid for point in curve.load_points):
        return _NONE_VALID
    if representative_point(curve) is not None:
        return ""
    if lowest_growing(curve.load_points) is not None:
        return _NONE_SUSTAINABLE
    if any(point.slo_met is False for point in curve.load_points):
        return _ALL_MISSED

    return _ALL_UNDECIDED
