"""The directory of a live comparison: reads its blocks, and writes what follows from them.

live.json            what was requested (LivePlan); the same command resumes it
block-001-a/, ...    one run each, in the layout of `loadgen run`
unfinished/          blocks of a group that was interrupted
comparison.json      the comparison of the complete groups (StoredComparison)
report.html          its page
SHA256SUMS           the hash of every file, written last
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from loadgen.compare.alternating_blocks import (
    FIRST_SIDE,
    FIRST_STAGE_GROUPS,
    OTHER_SIDE,
    AlternatingBlocks,
    BlockGroup,
    LiveBlock,
    SideName,
    count_needed_groups,
)
from loadgen.compare.block_plan import format_needed_duration
from loadgen.compare.comparison import Comparison, compare
from loadgen.compare.live_plan import PLAN_FILE, SCHEMA, LivePlan
from loadgen.compare.thresholds import (
    Condition,
    ThresholdOutcome,
    check_thresholds,
    parse_thresholds,
)
from loadgen.core import format, run_folder
from loadgen.core.analysis.within_run_variance import ScaledEstimate
from loadgen.core.errors import UserError
from loadgen.core.metrics.summary import Summary
from loadgen.core.results import store
from loadgen.core.results.files import refuse_links
from loadgen.core.results.json_files import decode_json
from loadgen.repeated.comparable_metrics import find_metric
from loadgen.repeated.repeats import PRECISION_METRICS, is_valid
from loadgen.runs.comparison_side import ComparedRun, Side
from loadgen.runs.kind import load_compared_run

COMPARISON_FILE = "comparison.json"

MIN_RESPONSES_PER_BLOCK = 2
"""A block should be at least as long as so many responses, because the first ones only build up the
load, and the last ones end after it."""

MS_PER_S = 1e3

SCOPE = (
    "Variation between groups of four alternating blocks. It includes the drift of the host and of "
    "the network, and not what another start of a server would change."
)


class GroupChanges(msgspec.Struct, frozen=True, kw_only=True):
    """The change of one metric from A to B in each group.

    Attributes:
        metric: The path of the metric in `summary.json`.
        name: Its name for readers.
        changes: The relative change of each group, in the order of time: 0.1 is +10 %.
    """

    metric: str
    name: str
    changes: tuple[float, ...]


class StoredComparison(msgspec.Struct, frozen=True, kw_only=True):
    """A live comparison as far as it has come: the content of `comparison.json`.

    Attributes:
        plan: What was requested.
        complete_groups: The number of complete groups, which are compared.
        excluded_groups: The number of complete groups with an INVALID block, which are left out.
        needed_groups: How many groups the requested precision needs. None if none was requested, or
            if the first stage is not complete.
        is_complete: Whether no more groups are needed.
        comparison: The comparison of both sides.
        conditions: The outcomes of the conditions of --fail-on.
        group_changes: The changes of the key metrics in each group that is not left out.
        short_blocks: A warning if blocks are shorter than two responses. "" if they are longer.
    """

    plan: LivePlan
    complete_groups: int
    excluded_groups: int
    needed_groups: int | None
    is_complete: bool
    comparison: Comparison
    conditions: tuple[ThresholdOutcome, ...]
    group_changes: tuple[GroupChanges, ...] = ()
    short_blocks: str = ""


# Reading


def read_plan(output_dir: Path) -> LivePlan:
    """Return the plan of the live comparison in a directory.

    Raises:
        UserError: The directory has no live comparison, or the file is damaged.
    """
    path = output_dir / PLAN_FILE
    if not path.is_file():
        raise UserError(
            "no_result",
            "the directory has no live comparison",
            str(output_dir),
            f"give a directory with {PLAN_FILE}",
        )

    refuse_links(output_dir)
    return decode_json(
        path.read_bytes(), LivePlan, str(path), "the plan of a live comparison", schema=SCHEMA
    )


def list_block_dirs(output_dir: Path) -> list[Path]:
    """Return the directories of the blocks that have begun, in the order of time."""
    return run_folder.runs_in(output_dir)


def is_group_complete(output_dir: Path, group: BlockGroup) -> bool:
    """Return whether all four blocks of a group have come to their end."""
    return all(is_block_complete(output_dir / block.name) for block in group.blocks)


def is_block_complete(block_dir: Path) -> bool:
    """Return whether a block has come to its end, so that it was neither killed nor interrupted."""
    has_summary = (block_dir / run_folder.SUMMARY).is_file()
    if not has_summary:
        return False

    return run_folder.read_summary(block_dir).run.state != "interrupted"


class BlockReader:
    """Reads the blocks of a directory, each complete one only once."""

    def __init__(self, output_dir: Path) -> None:
        """Create a reader that has read nothing yet."""
        self._output_dir = output_dir
        self._run_by_name: dict[str, ComparedRun] = {}

    def read(self, block: LiveBlock) -> ComparedRun:
        """Return the run of a complete block.

        Raises:
            UserError: A file of the run is damaged.
        """
        if block.name not in self._run_by_name:
            self._run_by_name[block.name] = load_compared_run(self._output_dir / block.name)
        return self._run_by_name[block.name]


def read_comparison(output_dir: Path, reader: BlockReader | None = None) -> StoredComparison:
    """Return the comparison of the complete groups in a directory, computed from their records.

    Args:
        output_dir: The directory.
        reader: Has read some of the blocks already. None to read all of them.

    Raises:
        UserError: No group is complete yet, or a file is damaged.
    """
    plan = read_plan(output_dir)
    complete_groups = [group for group in plan.groups if is_group_complete(output_dir, group)]
    if not complete_groups:
        raise UserError(
            "no_result",
            "no group of four blocks is complete yet",
            str(output_dir),
            "repeat the command that created it to resume",
        )

    block_reader = BlockReader(output_dir) if reader is None else reader
    run_by_name = {}
    for group in complete_groups:
        for block in group.blocks:
            run_by_name[block.name] = block_reader.read(block)
    return compare_groups(plan, complete_groups, run_by_name)


def compare_groups(
    plan: LivePlan, groups: Sequence[BlockGroup], run_by_name: dict[str, ComparedRun]
) -> StoredComparison:
    """Return the comparison of A and B over groups of four blocks.

    Groups with an INVALID block are left out. If all have one, all are included, and the comparison
    then shows their metrics without saying which side is better.

    Args:
        plan: The plan of the live comparison.
        groups: The complete groups.
        run_by_name: The run of each block, by the name of the block.
    """
    compared = _select_groups(groups, run_by_name)
    estimator = AlternatingBlocks(compared.groups, is_two_stage=plan.is_two_stage)
    conditions = parse_thresholds(plan.conditions)
    comparison = _compare_sides(plan, compared, estimator, conditions)

    # The comparison ends at the requested precision, or after the last planned group.
    needed_groups = _count_needed_groups(plan, compared)
    is_precise = needed_groups is not None and len(compared.groups) >= needed_groups
    is_last_group_done = len(groups) >= plan.max_groups

    return StoredComparison(
        plan=plan,
        complete_groups=len(groups),
        excluded_groups=compared.excluded_count,
        needed_groups=needed_groups,
        is_complete=is_precise or is_last_group_done,
        comparison=comparison,
        conditions=tuple(
            check_thresholds(conditions, comparison, beyond_noise=plan.is_beyond_noise)
        ),
        group_changes=tuple(_list_group_changes(estimator, compared.first, compared.other)),
        short_blocks=_find_short_block_warning(plan, (compared.first, compared.other)),
    )


class _ComparedGroups(NamedTuple):
    """The groups of blocks that are compared.

    Attributes:
        groups: The groups.
        excluded_count: The number of complete groups that are left out.
        first: The runs of side A in these groups.
        other: The runs of side B.
    """

    groups: list[BlockGroup]
    excluded_count: int
    first: Side
    other: Side


def _select_groups(
    groups: Sequence[BlockGroup], run_by_name: dict[str, ComparedRun]
) -> _ComparedGroups:
    """Return the groups without an INVALID block, or all groups if each has one."""
    compared_groups = _select_valid_groups(groups, run_by_name)
    if not compared_groups:
        compared_groups = list(groups)

    return _ComparedGroups(
        compared_groups,
        excluded_count=len(groups) - len(compared_groups),
        first=_build_side(FIRST_SIDE, compared_groups, run_by_name),
        other=_build_side(OTHER_SIDE, compared_groups, run_by_name),
    )


def _compare_sides(
    plan: LivePlan,
    compared: _ComparedGroups,
    estimator: AlternatingBlocks,
    conditions: Sequence[Condition],
) -> Comparison:
    """Return the comparison of both sides, with its scope and a note on groups that are left out.

    Args:
        plan: The plan of the live comparison.
        compared: The groups of blocks that are compared.
        estimator: Estimates the difference of a metric from the groups.
        conditions: The conditions of --fail-on, whose metrics are compared too.
    """
    comparison = compare(
        [compared.first, compared.other],
        extra_metrics=[condition.metric for condition in conditions],
        confidence=plan.confidence,
        allow_different_work=plan.allows_different_work,
        estimator=estimator,
    )
    notes = (*_list_exclusion_notes(compared.excluded_count), *comparison.notes)
    return msgspec.structs.replace(comparison, scope=SCOPE, notes=notes)


def _select_valid_groups(
    groups: Sequence[BlockGroup], run_by_name: dict[str, ComparedRun]
) -> list[BlockGroup]:
    """Return the groups of which every block has a valid run."""
    valid_groups = []
    for group in groups:
        runs = [run_by_name[block.name] for block in group.blocks]
        if all(is_valid(run.summary) for run in runs):
            valid_groups.append(group)
    return valid_groups


def _list_exclusion_notes(excluded_count: int) -> list[str]:
    """Return a note on the groups that were left out, or nothing if there are none."""
    if not excluded_count:
        return []
    groups = format.counted(excluded_count, "group")
    return [f"{groups} with an INVALID block left out of the comparison."]


def _find_short_block_warning(plan: LivePlan, sides: Sequence[Side]) -> str:
    """Return a warning if blocks are too short to measure a load that is fully built up.

    A block should last as long as MIN_RESPONSES_PER_BLOCK responses. The time of a response is the
    median over all blocks. Return "" if the blocks are long enough, or if the plan does not set
    their length.
    """
    if plan.block_s is None:
        return ""

    block_length = format.duration(plan.block_s)
    summaries = [run.summary for side in sides for run in side.runs]
    has_requests = any(summary.requests.scheduled for summary in summaries)
    if not has_requests:
        return f"Blocks of {block_length} are too short to measure any request. Use a longer -d."

    response_s = _find_median_response_s(summaries)
    needed_s = MIN_RESPONSES_PER_BLOCK * response_s
    if plan.block_s >= needed_s:
        return ""

    return (
        f"Blocks of {block_length} are shorter than {MIN_RESPONSES_PER_BLOCK} responses of "
        f"{format.duration(response_s)} each, so they mostly show how a load starts. "
        f"Use {format_needed_duration(needed_s, plan.max_groups)} or more."
    )


def _find_median_response_s(summaries: Sequence[Summary]) -> float:
    """Return the median over all runs of their median E2E latency in s, or 0 if none has one."""
    responses_ms = [summary.e2e_ms.p50 for summary in summaries if summary.e2e_ms.p50 is not None]
    return statistics.median(responses_ms) / MS_PER_S if responses_ms else 0.0


def _list_group_changes(
    estimator: AlternatingBlocks, first: Side, other: Side
) -> Iterator[GroupChanges]:
    """Yield by how much each key metric changes from A to B in each group of blocks.

    A metric that a block does not have is left out.

    Args:
        estimator: Computes the difference of a metric within each group, as the logarithm of B / A.
        first: The runs of side A.
        other: The runs of side B.
    """
    for metric_path in PRECISION_METRICS:
        metric = find_metric(metric_path)
        if metric is None:
            continue

        log_ratios = estimator.compute_group_differences(first, other, metric)
        if log_ratios is None:
            continue

        relative_changes = np.expm1(log_ratios)  # exp(x) - 1: log(1.1) becomes 0.1, which is +10 %
        yield GroupChanges(
            metric=metric_path, name=metric.name, changes=tuple(relative_changes.tolist())
        )


def _build_side(
    name: SideName, groups: Sequence[BlockGroup], run_by_name: dict[str, ComparedRun]
) -> Side:
    """Return the side A or B, with the runs of its blocks in all groups."""
    runs = []
    for group in groups:
        runs += [run_by_name[block_name] for block_name in group.names_of(name)]
    return Side(name=name, runs=tuple(runs))


def _count_needed_groups(plan: LivePlan, compared: _ComparedGroups) -> int | None:
    """Return how many groups of blocks the requested precision needs.

    The number follows from the variation of the first FIRST_STAGE_GROUPS groups. Return None if
    fewer groups are complete, or if no precision was requested.
    """
    is_precision_requested = plan.is_two_stage
    has_first_stage = len(compared.groups) >= FIRST_STAGE_GROUPS
    if not is_precision_requested or not has_first_stage:
        return None

    first_stage = AlternatingBlocks(compared.groups[:FIRST_STAGE_GROUPS])
    estimates = _estimate_precision_metrics(first_stage, compared.first, compared.other)
    risk = 1 - plan.confidence
    return count_needed_groups(estimates, plan.scaled_half_width, risk)


def _estimate_precision_metrics(
    estimator: AlternatingBlocks, first: Side, other: Side
) -> list[ScaledEstimate]:
    """Return the estimated difference of each key metric that both sides have."""
    estimates = []
    for path in PRECISION_METRICS:
        metric = find_metric(path)
        if metric is None:
            continue
        estimate = estimator.estimate(first, other, metric).estimate
        if estimate is not None:
            estimates.append(estimate)

    return estimates


# Writing


def write_comparison(output_dir: Path, reader: BlockReader) -> StoredComparison:
    """Write `comparison.json` from the blocks in a directory, and return its content.

    Args:
        output_dir: The directory of the live comparison.
        reader: Has read some of the blocks already.

    Raises:
        UserError: No group is complete yet, or a file is damaged.
    """
    stored = read_comparison(output_dir, reader)
    store.replace(output_dir / COMPARISON_FILE, format.document(stored))
    return stored
