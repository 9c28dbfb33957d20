"""Renders a live comparison as a report. Pure.

It is the report of any comparison (`compare_text`) with what the blocks were and a chart of the
groups.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from loadgen.compare.alternating_blocks import BLOCKS_PER_GROUP
from loadgen.compare.compare_text import (
    build_report,
    list_simulated_notices,
    summarize_differences,
)
from loadgen.compare.comparison import Comparison
from loadgen.compare.live_plan import describe_plan
from loadgen.compare.live_result import GroupChanges, StoredComparison
from loadgen.core import format
from loadgen.core.metrics.reasons import format_reason, join_reasons
from loadgen.core.metrics.summary import Summary
from loadgen.render.page import COLORS, Axis, Chart, Mark, Series
from loadgen.render.section import (
    Charts,
    Links,
    Notice,
    Paragraph,
    Report,
    named_facts,
    section,
)
from loadgen.runs import sweep_charts


def build_live_report(stored: StoredComparison) -> Report:
    """Return the report of a live comparison.

    It is the report of any comparison with a section on the blocks of both sides, and with their
    progress and warnings in the short form for a terminal.
    """
    plan = stored.plan
    target_a, target_b = plan.targets
    progress = Paragraph(describe_progress(stored), "" if stored.is_complete else "warn")
    short_blocks_warning = Paragraph(stored.short_blocks, "warn")

    blocks_section = section(
        "Blocks",
        named_facts(A=target_a, B=target_b, Plan=describe_plan(plan), Seed=f"{plan.seed}"),
        progress,
        short_blocks_warning,
        Charts([_build_group_chart(changes) for changes in stored.group_changes]),
        Links("The run of each block", list(_list_links(stored))),
    )
    brief_section = section("", progress, short_blocks_warning)
    notices = [
        *list_simulated_notices(stored.comparison),
        *_list_invalid_notices(stored.comparison),
    ]

    comparison_report = build_report(stored.comparison, stored.conditions)
    return msgspec.structs.replace(
        comparison_report,
        title=f"{plan.workload} · B vs. A, in alternating blocks",
        generated_by="loadgen compare --live",
        notices=notices,
        sections=[*comparison_report.sections, blocks_section],
        brief=[brief_section, *comparison_report.brief],
    )


def _list_invalid_notices(comparison: Comparison) -> Iterator[Notice]:
    """Yield one notice for all blocks that are INVALID for the same reason.

    There may be hundreds of such blocks, so a notice names only the first of them: "12 blocks, the
    first is block-003-a: ...".
    """
    blocks_by_reason: dict[str, list[str]] = {}
    for block_name, codes in comparison.codes.items():
        reason = "; ".join(map(format_reason, codes))
        blocks_by_reason.setdefault(reason, []).append(block_name)

    for reason, block_names in blocks_by_reason.items():
        first_name = block_names[0]
        if len(block_names) == 1:
            blocks = first_name
        else:
            blocks = f"{format.counted(len(block_names), 'block')}, the first is {first_name}"
        yield Notice("INVALID", f"{blocks}: {reason}", "bad")


def describe_progress(stored: StoredComparison) -> str:
    """Return how many groups of blocks are compared, and how many more are planned or needed.

    If the user requested a precision, the number of groups that it needs follows from the first
    groups. It may be larger than the number of planned groups, so that a complete comparison is
    less precise than requested.
    """
    text = _describe_compared_groups(stored)
    needed_groups = stored.needed_groups
    planned_groups = stored.plan.max_groups
    if not stored.is_complete:
        if needed_groups is not None:
            planned_groups = min(needed_groups, planned_groups)
        return (
            f"{text}. NOT COMPLETE: {planned_groups} groups were planned. "
            "Repeat the command to resume."
        )

    compared_groups = stored.complete_groups - stored.excluded_groups
    is_too_imprecise = needed_groups is not None and needed_groups > compared_groups
    if not is_too_imprecise:
        return f"{text}."

    half_width_percent = (stored.plan.half_width or 0) * 100
    return (
        f"{text}. The requested precision of ±{half_width_percent:g} % would need "
        f"about {needed_groups:,} groups."
    )


def _describe_compared_groups(stored: StoredComparison) -> str:
    """Return the numbers of blocks and groups, such as "Compared: 40 blocks in 10 groups"."""
    compared_groups = stored.complete_groups - stored.excluded_groups
    blocks = format.counted(compared_groups * BLOCKS_PER_GROUP, "block")
    groups = format.counted(compared_groups, "group")
    text = f"Compared: {blocks} in {groups}"
    if stored.excluded_groups == 0:
        return text

    excluded = format.counted(stored.excluded_groups, "group")
    return f"{text} ({excluded} with an INVALID block left out)"


def describe_live_result(stored: StoredComparison) -> str:
    """Return the result in one sentence, after "SIMULATED: " or "INVALID: " if it is so."""
    comparison = stored.comparison
    mark = ""
    if comparison.simulated:
        mark = "SIMULATED: "
    elif not comparison.valid:
        mark = "INVALID: "

    other_side = comparison.sides[1]
    return f"{mark}{summarize_differences(comparison, other_side)}"


def describe_block(summary: Summary) -> str:
    """Return the key metrics of a block for its line of progress, or why it has none.

    For example: "TTFT p50 120, TPOT p50 20 ms, 900 output tokens/s".
    """
    if summary.run.state == "interrupted":
        return "interrupted; its group is measured again when the comparison is resumed"
    if not summary.verdict.valid:
        return f"INVALID: {join_reasons(summary.verdict.reasons)}"

    ttft_ms = format.milliseconds(summary.ttft_ms.p50)
    tpot_ms = format.milliseconds(summary.tpot_ms.p50)
    tokens_per_s = format.quantity(summary.tokens.steady_output_per_s)
    return f"TTFT p50 {ttft_ms}, TPOT p50 {tpot_ms} ms, {tokens_per_s} output tokens/s"


def _build_group_chart(changes: GroupChanges) -> Chart:
    """Return the chart of one metric: its change from A to B in each group of four blocks.

    Each group is one point, without lines between them. The order of the blocks in a group (ABBA or
    BAAB) makes a drift that is linear in time cancel out.
    """
    percentages = [change * 100 for change in changes.changes]
    group_count = len(percentages)
    group_numbers = [float(number) for number in range(1, group_count + 1)]
    points = Series(
        x=group_numbers,
        y=percentages,
        color=COLORS[0],
        width=0,  # no line
        dots=True,
    )
    no_change = Mark(y=0.0, label="no change", color="good", extends_axis=True)
    return Chart(
        title=f"{changes.name}: change from A to B",
        note="a point for each group of four blocks; drift that is linear in time cancels in it",
        x=Axis(label="group", min=0.5, max=group_count + 0.5, integer_ticks=True),
        y=Axis(label="%", unit="%"),
        series=(points,),
        marks=(no_change,),
    )


def _list_links(stored: StoredComparison) -> Iterator[tuple[str, str]]:
    """Yield the name and the page of each block of the groups that were run."""
    for group in stored.plan.groups[: stored.complete_groups]:
        for block in group.blocks:
            yield block.name, sweep_charts.run_link(block.name)
