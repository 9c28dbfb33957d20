"""Sends the blocks of a live comparison one after the other, and stores them in a directory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from loadgen.cli.output import print_status
from loadgen.compare.alternating_blocks import (
    BLOCKS_PER_GROUP,
    BlockGroup,
    LiveBlock,
    SideName,
    seed_of_pair,
)
from loadgen.compare.block_plan import describe_short_blocks
from loadgen.compare.live_plan import PLAN_FILE, LivePlan, check_same_comparison, describe_plan
from loadgen.compare.live_result import (
    BlockReader,
    StoredComparison,
    is_group_complete,
    list_block_dirs,
    read_comparison,
    read_plan,
    write_comparison,
)
from loadgen.compare.live_text import build_live_report, describe_block
from loadgen.core import format
from loadgen.core.errors import (
    CombinedError,
    LoadgenError,
    TargetError,
    UserError,
    collecting,
)
from loadgen.core.execution.folder_names import move_to_unfinished
from loadgen.core.metrics.reasons import join_reasons
from loadgen.core.results import checksums, store
from loadgen.render import html
from loadgen.repeated.repeats import is_valid
from loadgen.result_kinds import PAGE

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.execution.probing import ProbeCache
    from loadgen.core.execution.run import Execute
    from loadgen.core.workload import Workload
    from loadgen.runs.comparison_side import ComparedRun
    from loadgen.runs.run_display import RunDisplay

NS_PER_S = 1e9


class LiveRun(NamedTuple):
    """A live comparison that is carried out in a directory.

    Attributes:
        plan: What was requested.
        workload: The load of a block.
        settings: The settings of each side.
        output_dir: The directory.
        display: Shows the progress.
        execute: Executes a run.
        probe_cache: What was found out about the targets. `execute` has the same cache.
    """

    plan: LivePlan
    workload: Workload
    settings: Mapping[SideName, Settings]
    output_dir: Path
    display: RunDisplay
    execute: Execute
    probe_cache: ProbeCache


class LiveOutcome(NamedTuple):
    """What a live comparison has found.

    Attributes:
        stored: The comparison of the complete groups, or None if none is complete.
        is_interrupted: Whether the user stopped it.
    """

    stored: StoredComparison | None
    is_interrupted: bool


def run_live(live: LiveRun) -> LiveOutcome:
    """Run the groups that are not in the directory yet, and write the files of the comparison.

    A group is four short runs (blocks), two on each target. If a target stops responding after the
    first block, the files are written before the error is raised.

    Raises:
        UserError: The directory has other results.
        LoadgenError: One target cannot be used. A TargetError if it stops responding later.
        CombinedError: Both targets cannot be used.
    """
    _check_directory(live.output_dir, live.plan)
    reader = BlockReader(live.output_dir)
    remaining_groups = list_remaining_groups(live.output_dir, live.plan, reader)
    if remaining_groups:
        probe_targets(live)

    _begin_comparison(live.output_dir, live.plan)
    _print_begin(live, len(remaining_groups))
    try:
        is_interrupted = not _run_groups(live, remaining_groups, reader)
    except TargetError:
        _write_comparison_files(live.output_dir, reader)
        raise

    stored = _write_comparison_files(live.output_dir, reader)
    return LiveOutcome(stored, is_interrupted)


def _print_begin(live: LiveRun, remaining_groups: int) -> None:
    """Print the plan and what is done already, and show the progress of the remaining blocks.

    If the user requested a precision instead of a number of groups, the comparison may end earlier.
    """
    print_plan(live.plan)
    done_count = live.plan.max_groups - remaining_groups
    if done_count:
        total = format.counted(live.plan.max_groups, "group")
        print_status(f"Resuming {live.output_dir}: {done_count} of {total} need not be run")

    remaining_blocks = remaining_groups * BLOCKS_PER_GROUP
    live.display.begin_steps(remaining_blocks, at_most=live.plan.is_two_stage)


def print_plan(plan: LivePlan) -> None:
    """Print the blocks of a plan, its seed, and a warning if the blocks are very short."""
    print_status(f"{describe_plan(plan)}. Reproduce with --seed {plan.seed}")
    warning = describe_short_blocks(plan.max_groups, plan.block_s)
    if warning:
        print_status(warning)


def probe_targets(live: LiveRun) -> None:
    """Send a few requests to both targets, so that one that is down is noticed before any block.

    The responses are stored in a cache, and the blocks do not send these requests again. Servers
    that loadgen simulates or starts itself are left out. Both targets are tried, so that the user
    sees both errors.

    Raises:
        LoadgenError: One target cannot be used.
        CombinedError: Both targets cannot be used.
    """
    # Imported here, because the command line also loads this module without running anything.
    from loadgen.core.execution import backend, events, step_targets
    from loadgen.core.execution.probing import probe_all

    emit = events.broadcast(live.display.event_handlers)
    errors: list[LoadgenError] = []
    for settings in live.settings.values():
        if not backend.is_started_by_user(settings):
            continue
        with collecting(errors):
            run_settings = step_targets.resolve_step_targets(live.workload, settings)
            asyncio.run(probe_all(run_settings, live.workload, live.probe_cache, emit))

    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise CombinedError(errors)


def _check_directory(output_dir: Path, plan: LivePlan) -> None:
    """Check that a directory has no runs of another command or of another comparison.

    Raises:
        UserError: The directory has such runs.
    """
    if (output_dir / PLAN_FILE).is_file():
        check_same_comparison(read_plan(output_dir), plan, str(output_dir))
        return

    if list_block_dirs(output_dir):
        raise UserError(
            "mismatch",
            "the directory has runs that do not belong to a live comparison",
            str(output_dir),
            "use another --out",
        )


def _begin_comparison(output_dir: Path, plan: LivePlan) -> None:
    """Write the plan into a directory that has none.

    The plan that was stored first stays, so that a comparison that is complete does not change.
    """
    checksums.begin(output_dir)
    if not (output_dir / PLAN_FILE).is_file():
        store.replace(output_dir / PLAN_FILE, format.document(plan))


def list_remaining_groups(
    output_dir: Path, plan: LivePlan, reader: BlockReader
) -> list[BlockGroup]:
    """Return the groups of blocks that have to be run.

    None is left if all groups are complete, or if the complete groups reach the requested
    precision.
    """
    incomplete_groups = [group for group in plan.groups if not is_group_complete(output_dir, group)]
    has_complete_group = len(incomplete_groups) < plan.max_groups
    if has_complete_group and read_comparison(output_dir, reader).is_complete:
        return []
    return incomplete_groups


def _run_groups(live: LiveRun, groups: list[BlockGroup], reader: BlockReader) -> bool:
    """Run groups of blocks, and return False if the user interrupted one.

    The comparison ends after the last group, or earlier if it reaches the requested precision. It
    also ends if every block of the first group is INVALID.

    After each group the comparison so far is stored, for the case that the process is killed.
    """
    for group in groups:
        is_first_group = group == groups[0]
        is_finished = _run_group(live, group, begins_with_pause=not is_first_group)
        if not is_finished:
            return False

        stored = write_comparison(live.output_dir, reader)
        if stored.is_complete:
            break

        invalid_reasons = find_common_invalidity(reader.read(block) for block in group.blocks)
        if is_first_group and invalid_reasons:
            reasons = join_reasons(invalid_reasons)
            print_status(
                f"Stopped: every block of the first group is INVALID: {reasons}. "
                "Correct the cause, and repeat the command."
            )
            break

    return True


def _run_group(live: LiveRun, group: BlockGroup, *, begins_with_pause: bool) -> bool:
    """Run the four blocks of a group with pauses between them.

    Return False if the user interrupted a block or a pause.
    """
    # Blocks from before an interruption are not used. The host may have been slower or faster.
    for block in group.blocks:
        move_to_unfinished(live.output_dir / block.name)

    has_pause_before = begins_with_pause
    for block in group.blocks:
        if has_pause_before and not _pause(live):
            return False
        if not _run_block(live, block):
            return False
        has_pause_before = True
    return True


def find_common_invalidity(runs: Iterable[ComparedRun]) -> list[str]:
    """Return why all runs are INVALID, each reason once, or an empty list if one of them is not.

    If every block of the first group is INVALID, more blocks would be, too, and the comparison
    would take its full time without a result.
    """
    reasons: list[str] = []
    for run in runs:
        if is_valid(run.summary):
            return []
        reasons += run.summary.verdict.reasons
    return list(dict.fromkeys(reasons))


def _run_block(live: LiveRun, block: LiveBlock) -> bool:
    """Run one block and display its metrics. Return False if the user interrupted it.

    Both blocks of a pair have the same seed, so they send the same requests.
    """
    live.display.begin_step(f"Block on {block.side}")
    seed = seed_of_pair(live.plan.seed, block.pair)
    workload = live.workload.model_copy(update={"seed": seed})
    settings = replace(live.settings[block.side], out=live.output_dir / block.name)

    summary, _ = live.execute(workload, settings)
    live.display.end_step(describe_block(summary))
    return summary.run.state != "interrupted"


def _pause(live: LiveRun) -> bool:
    """Wait for the requested pause between two blocks. Return False if the user interrupted it.

    Blocks in virtual time do not affect each other, so they need no pause.
    """
    is_virtual = any(settings.virtual for settings in live.settings.values())
    pause_s = live.plan.pause_ns / NS_PER_S
    if is_virtual or pause_s == 0:
        return True

    try:
        time.sleep(pause_s)
    except KeyboardInterrupt:
        return False
    return True


def _write_comparison_files(output_dir: Path, reader: BlockReader) -> StoredComparison | None:
    """Write the comparison of the complete groups, its page and the hashes of all files.

    Return the comparison. If no group is complete, nothing can be compared, so no file is written
    and None is returned.
    """
    plan = read_plan(output_dir)
    has_complete_group = any(is_group_complete(output_dir, group) for group in plan.groups)
    if not has_complete_group:
        return None

    stored = write_comparison(output_dir, reader)
    page = html.render(build_live_report(stored))
    store.replace(output_dir / PAGE, page.encode(), shared=True)
    checksums.write(output_dir)
    return stored
