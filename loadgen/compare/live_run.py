"""Sends the blocks of a live comparison one after the other, and stores them in a directory."""

from __future__ import annotations

import time
from collections.abc import Mapping
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
from loadgen.compare.live_text import build_live_report
from loadgen.core import format
from loadgen.core.errors import TargetError, UserError
from loadgen.core.execution.folder_names import move_to_unfinished
from loadgen.core.results import checksums, store
from loadgen.render import html
from loadgen.result_kinds import PAGE

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.execution.run import Execute
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.workload import Workload
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
    """

    plan: LivePlan
    workload: Workload
    settings: Mapping[SideName, Settings]
    output_dir: Path
    display: RunDisplay
    execute: Execute


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

    Raises TargetError if a target is lost, after the files are written.
    """
    begin_comparison(live.output_dir, live.plan)
    reader = BlockReader(live.output_dir)
    remaining_groups = list_remaining_groups(live.output_dir, live.plan, reader)
    print_status(f"{describe_plan(live.plan)}. Reproduce with --seed {live.plan.seed}")
    done_count = live.plan.max_groups - len(remaining_groups)
    if done_count:
        total = format.counted(live.plan.max_groups, "group")
        print_status(f"Resuming {live.output_dir}: {done_count} of {total} need not be run")

    live.display.begin_steps(
        len(remaining_groups) * BLOCKS_PER_GROUP, at_most=live.plan.is_two_stage
    )
    try:
        is_interrupted = not _run_groups(live, remaining_groups, reader)
    except TargetError:
        _write_files(live.output_dir, reader)
        raise

    return LiveOutcome(_write_files(live.output_dir, reader), is_interrupted)


def begin_comparison(output_dir: Path, plan: LivePlan) -> None:
    """Write the plan into a directory, or check that it has the same plan already.

    The plan that was stored first stays, so that a comparison that is complete does not change.

    Raises UserError if the directory holds runs of another command or another comparison.
    """
    if (output_dir / PLAN_FILE).is_file():
        check_same_comparison(read_plan(output_dir), plan, str(output_dir))
    elif list_block_dirs(output_dir):
        raise UserError(
            "mismatch",
            "the directory has runs that do not belong to a live comparison",
            str(output_dir),
            "use another --out",
        )

    checksums.begin(output_dir)
    if not (output_dir / PLAN_FILE).is_file():
        store.replace(output_dir / PLAN_FILE, format.document(plan))


def list_remaining_groups(
    output_dir: Path, plan: LivePlan, reader: BlockReader
) -> list[BlockGroup]:
    """Return the groups that have to be run: none if those in the directory are enough."""
    incomplete_groups = [group for group in plan.groups if not is_group_complete(output_dir, group)]
    has_complete_group = len(incomplete_groups) < plan.max_groups
    if has_complete_group and read_comparison(output_dir, reader).is_complete:
        return []
    return incomplete_groups


def _run_groups(live: LiveRun, groups: list[BlockGroup], reader: BlockReader) -> bool:
    """Run groups until there are enough. Return False if the user interrupted one.

    After each group the comparison so far is stored, for the case that the process is killed.
    """
    for group in groups:
        # A part of a group from before an interruption met another state of the host.
        for block in group.blocks:
            move_to_unfinished(live.output_dir / block.name)

        for block in group.blocks:
            is_first = block == groups[0].blocks[0]
            has_paused = is_first or _pause(live)
            if not has_paused or not _run_block(live, block):
                return False

        stored = write_comparison(live.output_dir, reader)
        if stored.is_complete:
            break

    return True


def _run_block(live: LiveRun, block: LiveBlock) -> bool:
    """Run one block. Return False if the user interrupted it."""
    live.display.begin_step(f"Block on {block.side}")
    workload = live.workload.model_copy(update={"seed": seed_of_pair(live.plan.seed, block.pair)})
    settings = replace(live.settings[block.side], out=live.output_dir / block.name)
    summary, _ = live.execute(workload, settings)
    live.display.end_step(_describe_block(summary))
    return summary.run.state != "interrupted"


def _describe_block(summary: Summary) -> str:
    """Return the key metrics of a block, for the line of progress about it."""
    if not summary.verdict.valid:
        return f"INVALID: {'; '.join(summary.verdict.reasons)}"

    latencies = (
        f"TTFT p50 {format.milliseconds(summary.ttft_ms.p50)}, "
        f"TPOT p50 {format.milliseconds(summary.tpot_ms.p50)} ms"
    )
    throughput = format.quantity(summary.tokens.steady_output_per_s)
    return f"{latencies}, {throughput} output tokens/s"


def _pause(live: LiveRun) -> bool:
    """Wait for the requested pause between two blocks. Return False if the user interrupted it.

    Blocks in virtual time do not affect each other, so they need no pause.
    """
    is_virtual = any(settings.virtual for settings in live.settings.values())
    if is_virtual or not live.plan.pause_ns:
        return True
    try:
        time.sleep(live.plan.pause_ns / NS_PER_S)
    except KeyboardInterrupt:
        return False
    return True


def _write_files(output_dir: Path, reader: BlockReader) -> StoredComparison | None:
    """Write the comparison, its page and the hashes of all files. Return the comparison.

    Return None if no group is complete.
    """
    plan = read_plan(output_dir)
    if not any(is_group_complete(output_dir, group) for group in plan.groups):
        return None

    stored = write_comparison(output_dir, reader)
    page = html.render(build_live_report(stored))
    store.replace(output_dir / PAGE, page.encode(), shared=True)
    checksums.write(output_dir)
    return stored
