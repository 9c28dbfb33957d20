"""Renders the difference between our run and the result of another tool."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from loadgen.core import format
from loadgen.explain.explanation import ExplainedDifference
from loadgen.explain.parts import (
    EQUAL_WITHIN,
    PART_LABELS,
    PART_MEANINGS,
    ExplainedMetric,
)
from loadgen.render.section import (
    Bullets,
    Facts,
    Notice,
    Paragraph,
    Report,
    Section,
    Table,
    section,
    simulated_notice,
)

HEAD = ("metric", "ours", "theirs", "difference", "explained", "parts")

UNTITLED = ""
"""The title of a section that has no heading."""

SHOWN_SHARE = 0.02
"""Parts below this share of the difference are one part in the table. JSON has all of them."""

SMALLER_PARTS = "smaller parts"
UNEXPLAINED = "unexplained"
"""The labels of what is no part of its own: the parts below SHOWN_SHARE, and the rest."""

OPTIONAL_LABELS = frozenset({SMALLER_PARTS, UNEXPLAINED})
"""The labels that are left out if their share rounds to 0 %."""

BRIEF_STATISTICS = ("p50", "p99")
"""The statistics of latencies that a terminal always shows. It shows the others with `--full`, and
if their difference is not explained."""

READING = (
    "A part is the change of our metric if one more definition becomes that of the other tool, in "
    "the order of the table. Its share is that of the whole difference."
)
UNEXPLAINED_HINT = (
    "The rest of a latency is not in the definitions: one client sent or read later than the "
    "other, or the server was not equally fast in both runs. Repeat both, and compare the CPU use "
    "of the clients. If the server is simulated, --server-log tells the two apart."
)


def build_report(explanation: ExplainedDifference) -> Report:
    """Return the report of an explanation, in a full form and in a brief form for a terminal."""
    notices = [simulated_notice()] if explanation.simulated else []
    if not explanation.valid:
        # The client was too slow, or a similar reason that the summary of the run names.
        text = "our run is not valid, so its metrics may be those of the client"
        notices.append(Notice("INVALID", text, "bad"))

    return Report(
        title=f"loadgen and {explanation.tool}",
        generated_by="loadgen explain",
        notices=notices,
        headline=[Paragraph(_summarize(explanation))],
        sections=list(_list_full_sections(explanation)),
        brief=list(_list_brief_sections(explanation)),
    )


def _list_brief_sections(explanation: ExplainedDifference) -> Iterator[Section]:
    """Yield the sections that a terminal shows by default, with the most common metrics."""
    metrics = _select_brief(explanation)
    differing = [metric for metric in metrics if metric.outcome != "equal"]
    yield section(UNTITLED, Paragraph(_summarize(explanation)))
    yield section(UNTITLED, _build_table(differing))
    yield section(UNTITLED, Paragraph(_list_equal_metrics(metrics)))
    yield from _list_warning_sections(explanation)


def _list_full_sections(explanation: ExplainedDifference) -> Iterator[Section]:
    """Yield all metrics, the meaning of their parts, and the source of the definitions."""
    yield section(UNTITLED, _build_table(explanation.metrics))
    yield from _list_warning_sections(explanation)
    yield section("Parts", Paragraph(READING, "soft"), _build_part_table(explanation.metrics))
    yield section("Definitions", _describe_definitions(explanation))


def _build_table(metrics: Sequence[ExplainedMetric]) -> Table:
    """Return the table with a row for each metric."""
    return Table(HEAD, [_create_row(metric) for metric in metrics], "remarks")


def _list_warning_sections(explanation: ExplainedDifference) -> Iterator[Section]:
    """Yield what may make the comparison wrong, and what to do about unexplained latencies."""
    yield section(UNTITLED, Bullets(_list_warnings(explanation), "warn"))
    if _unexplained_latencies(explanation):
        yield section(UNTITLED, Paragraph(UNEXPLAINED_HINT))


def _build_part_table(metrics: Sequence[ExplainedMetric]) -> Table:
    """Return the table with the meaning of each part that any metric has."""
    used_names = {part.name for metric in metrics for part in metric.parts}
    meanings = [
        (label, PART_MEANINGS[name]) for name, label in PART_LABELS.items() if name in used_names
    ]
    return Table(("part", "meaning"), meanings, "prose")


def _describe_definitions(explanation: ExplainedDifference) -> Facts:
    """Return where the definitions of the other tool were read."""
    return Facts(
        [
            ("Our run", explanation.ours),
            ("Other result", f"{explanation.theirs}, {explanation.tool}"),
            ("Definitions of version", explanation.definitions_version),
            ("Source", explanation.definitions_source),
        ]
    )


def _select_brief(explanation: ExplainedDifference) -> list[ExplainedMetric]:
    """Return the metrics that a terminal shows by default."""
    return [metric for metric in explanation.metrics if _is_brief(metric)]


def _is_brief(metric: ExplainedMetric) -> bool:
    """Return True if a terminal shows a metric by default.

    These are rates, counts, the most common statistics of latencies, and all metrics whose
    difference is not explained.
    """
    if not metric.is_latency or metric.outcome == "unexplained":
        return True

    statistic = metric.metric.rpartition(".")[2]  # "p99" for "ttft_ms.p99"
    return statistic in BRIEF_STATISTICS


def _create_row(metric: ExplainedMetric) -> tuple[str, ...]:
    """Return the cells of a metric in the table: its values, their difference, and the parts."""
    is_equal = metric.outcome == "equal"
    return (
        metric.label,
        _format_value(metric.ours),
        _format_value(metric.theirs),
        "=" if is_equal else _format_change(metric.difference),
        _format_outcome(metric),
        _describe_parts(metric),
    )


def _format_outcome(metric: ExplainedMetric) -> str:
    """Return how much of a difference is explained, such as "95 %" or "80 %, rest by chance".

    The number is 100 % less the share of the unexplained rest, so that both numbers in a row of the
    table add up to 100 %.
    """
    if metric.explained_share is None:
        return "equal"

    unexplained_percent = 0
    for share in list_part_shares(metric):
        if share.label == UNEXPLAINED:
            unexplained_percent += abs(share.percent)
    text = f"{max(100 - unexplained_percent, 0)} %"

    is_rest_by_chance = metric.outcome == "within_variation"
    return f"{text}, rest by chance" if is_rest_by_chance else text


def _describe_parts(metric: ExplainedMetric) -> str:
    """Return the parts of a difference, such as "tail -0.8 (62 %), failures -0.5 (38 %)".

    Return "" for equal values. If the parts do not explain the difference, the text ends with how
    far two runs of the same load vary.
    """
    if metric.outcome == "equal":
        return ""

    texts = [
        f"{share.label} {_format_change(share.change)} ({share.percent} %)"
        for share in list_part_shares(metric)
    ]
    parts = ", ".join(texts)
    is_explained = metric.outcome == "explained"
    if is_explained or metric.expected_variation is None:
        return parts
    return f"{parts} (runs vary by ±{_format_value(metric.expected_variation)})"


class PartShare(NamedTuple):
    """A part of a difference as it is printed.

    Attributes:
        label: The name of the part.
        change: By how much it changes the metric, in the unit of the metric.
        percent: Its share of the difference, rounded so that all shares add up to 100.
    """

    label: str
    change: float
    percent: int


def list_part_shares(metric: ExplainedMetric) -> list[PartShare]:
    """Return the parts of a difference with shares that add up to 100 %.

    All parts below SHOWN_SHARE become one part "smaller parts". The last part is "unexplained".
    Both are left out if they round to 0 %. Example: parts of +6, +3 and +0.1 of a difference of +10
    are 60 %, 30 %, smaller parts 1 % and unexplained 9 %.

    Args:
        metric: A metric whose values differ.
    """
    change_by_label = _find_shown_changes(metric)
    labels = list(change_by_label)
    changes = list(change_by_label.values())
    percentages = _round_to_100([change / metric.difference * 100 for change in changes])

    shares = []
    for label, change, percent in zip(labels, changes, percentages, strict=True):
        is_left_out = label in OPTIONAL_LABELS and percent == 0
        if not is_left_out:
            shares.append(PartShare(label, change, percent))
    return shares


def _find_shown_changes(metric: ExplainedMetric) -> dict[str, float]:
    """Return the changes that add up to a difference, by label: large parts, small ones, the rest.

    For a difference of +10, this may be {"tail": 6, "smaller parts": 0.5, "unexplained": 3.5}.
    """
    large_changes = {
        PART_LABELS[part.name]: part.change
        for part in metric.parts
        if abs(part.share) >= SHOWN_SHARE
    }
    explained_change = metric.difference - metric.unexplained
    small_change = explained_change - math.fsum(large_changes.values())
    return {**large_changes, SMALLER_PARTS: small_change, UNEXPLAINED: metric.unexplained}


def _round_to_100(percentages: Sequence[float]) -> list[int]:
    """Round percentages that add up to 100 to integers that also add up to 100.

    By the largest remainder method, 33.4, 33.3 and 33.3 become 34, 33 and 33: all are rounded down,
    and the ones with the largest remainders are increased by 1.
    """
    rounded = [math.floor(percentage) for percentage in percentages]
    remainders = [percentage - math.floor(percentage) for percentage in percentages]
    missing_count = 100 - sum(rounded)

    indices_by_remainder = sorted(range(len(rounded)), key=remainders.__getitem__, reverse=True)
    for index in indices_by_remainder[:missing_count]:
        rounded[index] += 1
    return rounded


def _format_value(value: float) -> str:
    """Return a value with three significant digits, or all digits of a large one."""
    return format.quantity(value)


def _format_change(change: float) -> str:
    """Return a change with its sign."""
    sign = "+" if change >= 0 else "-"
    return f"{sign}{_format_value(abs(change))}"


def _summarize(explanation: ExplainedDifference) -> str:
    """Return in one or two sentences how many metrics differ, and which remain unexplained."""
    tool = explanation.tool
    metric_count = len(explanation.metrics)
    if metric_count == 0:
        return f"{tool} and our run have no metric in common."

    differing = [metric for metric in explanation.metrics if metric.outcome != "equal"]
    if not differing:
        return f"{tool} and our run agree in all {metric_count} metrics."

    unexplained = [metric for metric in differing if metric.outcome == "unexplained"]
    explained_count = len(differing) - len(unexplained)
    exception = ""
    if unexplained:
        exception = f", but not those of {', '.join(_group_labels(unexplained))}"
    return (
        f"{tool} differs from our run in {len(differing)} of {metric_count} metrics. "
        f"Parts and chance explain {explained_count} of these differences{exception}."
    )


def _group_labels(metrics: Sequence[ExplainedMetric]) -> list[str]:
    """Return the labels of metrics, with all statistics of a latency in one label.

    "TTFT p50, ms" and "TTFT p99, ms" become "TTFT p50/p99".
    """
    statistics_by_name: dict[str, list[str]] = {}
    for metric in metrics:
        if not metric.is_latency:
            statistics_by_name[metric.label] = []
            continue
        name, _, statistic = metric.label.removesuffix(", ms").rpartition(" ")
        statistics_by_name.setdefault(name, []).append(statistic)

    labels = []
    for name, statistics in statistics_by_name.items():
        label = f"{name} {'/'.join(statistics)}" if statistics else name
        labels.append(label)
    return labels


def _list_equal_metrics(metrics: Sequence[ExplainedMetric]) -> str:
    """Return the metrics that are equal in one sentence, "" without any."""
    equal = [metric for metric in metrics if metric.outcome == "equal"]
    if not equal:
        return ""
    return f"Equal within {EQUAL_WITHIN * 100:g} %: {', '.join(_group_labels(equal))}."


def _unexplained_latencies(explanation: ExplainedDifference) -> list[ExplainedMetric]:
    """Return the latencies whose difference is not explained."""
    return [
        metric
        for metric in explanation.metrics
        if metric.outcome == "unexplained" and metric.is_latency
    ]


def _list_warnings(explanation: ExplainedDifference) -> list[str]:
    """Return sentences on what may make the comparison wrong, such as different loads."""
    warnings = []
    if explanation.differences:
        differences = "; ".join(explanation.differences)
        warnings.append(f"The loads differ: {differences}.")

    if explanation.unknown:
        names = ", ".join(explanation.unknown)
        warnings.append(
            f"The other file does not name these, so check that they are equal: {names}."
        )

    if explanation.withheld:
        names = ", ".join(explanation.withheld)
        warnings.append(
            f"Our run does not report some statistics of {names}, so they are left out."
        )
    return [*warnings, *explanation.remarks]
