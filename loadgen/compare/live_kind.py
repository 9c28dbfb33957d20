"""The result kind of a live comparison."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from loadgen.compare import live_result
from loadgen.compare.exit_code import comparison_exit_code
from loadgen.compare.live_plan import LivePlan
from loadgen.compare.live_result import COMPARISON_FILE, StoredComparison
from loadgen.compare.live_text import build_live_report, describe_live_result
from loadgen.core import format
from loadgen.core.errors import UserError
from loadgen.core.results.json_files import decode_json
from loadgen.render import html
from loadgen.render.section import Report
from loadgen.result_kinds import PAGE, RECORDS, ListRow, RegeneratedFile, ResultFunctions
from loadgen.runs.kind import stored_summaries


def load(output_dir: Path) -> StoredComparison:
    """Return the live comparison in a directory, computed from the records of its blocks.

    Raises:
        UserError: No group of blocks is complete, or a file is damaged.
    """
    return live_result.read_comparison(output_dir)


def report(stored: StoredComparison) -> Report:
    """Return the report."""
    return build_live_report(stored)


def document(stored: StoredComparison) -> bytes:
    """Return what `report --json` prints: the content of `comparison.json`."""
    return format.document(stored)


def code(stored: StoredComparison, _strict: bool) -> int:
    """Return the exit code: that of `loadgen compare` with the stored conditions."""
    return comparison_exit_code(stored.comparison, stored.conditions)


def list_row(output_dir: Path) -> ListRow:
    """Return the row of a live comparison in the list of results, without its metrics.

    A row has the metrics of one target, and a live comparison has two targets.
    """
    plan = live_result.read_plan(output_dir)
    blocks = stored_summaries(output_dir, live_result.list_block_dirs(output_dir))

    # A block knows whether its server is simulated. Before the first block, only the target tells.
    has_simulated_block = any(block.summary.target.simulated for block in blocks)
    has_simulated_target = any(target.startswith("sim:") for target in plan.targets)
    start_times = [block.summary.run.started for block in blocks]
    return ListRow(
        outcome=_describe_outcome(output_dir, plan, len(blocks)),
        description=plan.workload,
        target=" vs. ".join(plan.targets),
        simulated=has_simulated_target or has_simulated_block,
        started=min(start_times, default=""),
    )


def _describe_outcome(output_dir: Path, plan: LivePlan, block_count: int) -> str:
    """Return the differences between the sides, or "3 of 40 blocks" without a comparison yet."""
    path = output_dir / COMPARISON_FILE
    if not path.is_file():
        return f"{block_count} of {format.counted(plan.max_blocks, 'block')}"

    stored = decode_json(path.read_bytes(), StoredComparison, str(path), "a live comparison")
    return describe_live_result(stored).removeprefix("SIMULATED: ").rstrip(".")


def compare_side(output_dir: Path) -> NoReturn:
    """Raise UserError, because a live comparison cannot be a side of another comparison.

    `loadgen compare` calls the function of this name for each directory that it compares. For a
    run, it returns the side A or B. A live comparison has both sides in itself.
    """
    block_dirs = live_result.list_block_dirs(output_dir)
    example = f", like {block_dirs[0]}" if block_dirs else ""
    problem = "a live comparison has two sides already"
    hint = f"read it with: loadgen report {output_dir}; or compare single blocks{example}"
    raise UserError("unsupported", problem, str(output_dir), hint)


def regenerate(output_dir: Path) -> Iterator[RegeneratedFile]:
    """Yield the comparison and its page, generated again from the records of the blocks."""
    stored = live_result.read_comparison(output_dir)
    yield RegeneratedFile(COMPARISON_FILE, format.document(stored), RECORDS)
    yield RegeneratedFile(PAGE, html.render(build_live_report(stored)).encode(), RECORDS)


FUNCTIONS = ResultFunctions(
    load=load,
    headline=describe_live_result,
    report=report,
    document=document,
    code=code,
    runs=live_result.list_block_dirs,
    list_row=list_row,
    compare_side=compare_side,
    regenerate=regenerate,
    schema=LivePlan,
)
