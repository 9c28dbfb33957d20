"""`loadgen compare --live A B`: the same load to both targets, in alternating blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from loadgen.cli.invocation import Invocation
from loadgen.cli.option_parsers import parse_option
from loadgen.cli.options import default_output_folder
from loadgen.cli.output import add_resume_hint, print_result, print_status, write_file
from loadgen.cli.run_options import COMMAND_OPTIONS
from loadgen.cli.settings import request_options
from loadgen.compare import compare_text, thresholds
from loadgen.compare.alternating_blocks import (
    BLOCKS_PER_GROUP,
    BLOCKS_PER_PAIR,
    FIRST_SIDE,
    FIRST_STAGE_GROUPS,
    OTHER_SIDE,
    SideName,
    seed_of_pair,
)
from loadgen.compare.exit_code import comparison_exit_code
from loadgen.compare.live_plan import PLAN_FILE, LivePlan, describe_plan
from loadgen.compare.live_result import StoredComparison, read_plan
from loadgen.compare.live_run import LiveOutcome, LiveRun, run_live
from loadgen.compare.live_text import build_live_report
from loadgen.core import seeds, units
from loadgen.core.errors import INTERRUPTED, CombinedError, LoadgenError, UserError, collecting
from loadgen.core.execution import backend
from loadgen.core.workload.flags import select_load_options
from loadgen.render import html as html_renderer
from loadgen.render import junit as junit_renderer
from loadgen.result_kinds import PAGE

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.workload import Workload
    from loadgen.repeated.repeats import Repetition
    from loadgen.runs.planned_runs import PlannedRun

DEFAULT_GROUPS = 20
"""Groups without --repeat and --duration. docs/guides/compare.md has the power that they give."""

DEFAULT_BLOCK_S = 15.0
"""The length of a block without --repeat. Shorter blocks follow the drift of the host more closely,
but more of their time is spent on starting and on waiting for the last response."""

FEWEST_DEFAULT_GROUPS = 10
MOST_DEFAULT_GROUPS = 100
"""The limits of the number of groups that follows from DEFAULT_BLOCK_S."""

DEFAULT_MAX_GROUPS = 40
"""The largest number of groups of `--repeat auto`."""

DEFAULT_PRECISION = 0.01
"""The half width of the intervals at which `--repeat auto` ends."""

MIN_BLOCK_S = 1.0
"""A shorter block measures little more than the start and the end of its load."""

NS_PER_S = 1e9


class LiveOptions(NamedTuple):
    """The options of `compare` that a live comparison has, too.

    Attributes:
        targets: The URLs of A and B, or names of --targets.
        confidence: The confidence of all metrics together.
        conditions: The conditions of --fail-on.
        is_beyond_noise: Whether a condition fails only if the whole interval is beyond its limit.
        allows_different_work: Whether the metrics are judged even if the sides did other work.
        is_dry_run: Whether nothing is sent.
        as_json: Whether JSON is printed.
        as_markdown: Whether Markdown is printed.
        full: Whether every section is printed.
        html: The file of an additional page.
        junit: The file of an additional JUnit report.
    """

    targets: tuple[str, str]
    confidence: float
    conditions: tuple[str, ...]
    is_beyond_noise: bool
    allows_different_work: bool
    is_dry_run: bool
    as_json: bool
    as_markdown: bool
    full: bool
    html: Path | None
    junit: Path | None


class _Blocks(NamedTuple):
    """How many groups of blocks there are, and how long a block is.

    Attributes:
        max_groups: The number of groups, or the largest number.
        half_width: The half width at which the comparison ends. None for a fixed number of groups.
        block_s: The duration of a block. None if the workload decides it.
        pause_ns: The pause between two blocks.
    """

    max_groups: int
    half_width: float | None
    block_s: float | None
    pause_ns: int


class _PlannedLive(NamedTuple):
    """A live comparison that was checked: what is requested, and what is sent to each side."""

    plan: LivePlan
    workload: Workload
    settings: dict[SideName, Settings]

    @property
    def blocks(self) -> list[PlannedRun]:
        """The runs of all blocks in the order of time, if no precision ends the comparison."""
        from loadgen.runs.planned_runs import PlannedRun

        return [
            PlannedRun(self.workload_of_pair(block.pair), self.settings[block.side])
            for group in self.plan.groups
            for block in group.blocks
        ]

    def workload_of_pair(self, pair: int) -> Workload:
        """Return the workload of both blocks of a pair."""
        return self.workload.model_copy(update={"seed": seed_of_pair(self.plan.seed, pair)})


def compare_live(
    invocation: Invocation, workload_names: Sequence[Path], options: LiveOptions
) -> int:
    """Run a live comparison, print it and return the exit code.

    Args:
        invocation: The options of the load.
        workload_names: The positional arguments: the workload, or nothing.
        options: The other options.

    Raises:
        CombinedError: Everything that is wrong with the options.
    """
    from loadgen.runs.run_display import create_display

    planned = _plan_live(invocation, workload_names, options)
    display = create_display(invocation, quiet=True, has_line_per_step=True)
    if options.is_dry_run:
        return _print_dry_run(planned, invocation)

    output_dir = _output_dir(planned)
    invocation.move_existing_results(output_dir if invocation["out"] else None)
    plan = _with_stored_seed(planned.plan, output_dir, invocation)
    live = LiveRun(
        plan=plan,
        workload=planned.workload,
        settings=planned.settings,
        output_dir=output_dir,
        display=display,
        execute=invocation.executor(display.event_handlers),
    )
    outcome = _run_blocks(live, planned._replace(plan=plan))
    if outcome.stored is None:
        print_status(
            f"Nothing was compared. Repeat the command with --out {output_dir} to continue."
        )
        return INTERRUPTED

    _print_comparison(outcome.stored, output_dir, options)
    if outcome.is_interrupted:
        print_status(f"Stopped. Repeat the command with --out {output_dir} to continue.")
        return INTERRUPTED

    return comparison_exit_code(outcome.stored.comparison, outcome.stored.conditions)


def _print_dry_run(planned: _PlannedLive, invocation: Invocation) -> int:
    """Print the plan and the load of one block of each side. Return the exit code."""
    from loadgen.runs.planned_runs import print_plans

    print_status(describe_plan(planned.plan))
    first_pair = planned.blocks[:BLOCKS_PER_PAIR]
    return print_plans(first_pair, invocation.budget())


def _run_blocks(live: LiveRun, planned: _PlannedLive) -> LiveOutcome:
    """Run the blocks that the directory does not have yet, and compare all of them."""
    from loadgen.core.execution.folder_names import locked_folder

    is_resumed = (live.output_dir / PLAN_FILE).is_file()
    if not is_resumed:
        live.display.announce_runs(planned.blocks)

    resume_hint = f"the same command with --out {live.output_dir} resumes it"
    with locked_folder(live.output_dir), add_resume_hint(live.output_dir, resume_hint):
        return run_live(live)


def refuse_load_options(invocation: Invocation) -> None:
    """Raise UserError for an option of a load without --live, because stored results have no load.

    --force is allowed, because it also has a meaning with --save.
    """
    for name, value in invocation.options.items():
        option = COMMAND_OPTIONS[name]
        is_default = value == option.default
        if is_default or name == "force":
            continue
        raise UserError(
            "missing_option",
            "this option needs --live, because stored results send no load",
            option.describe(name, value),
            "add --live URL_A URL_B, or leave it out",
        )


def _plan_live(
    invocation: Invocation, workload_names: Sequence[Path], options: LiveOptions
) -> _PlannedLive:
    """Return the live comparison that the options request.

    Each kind of option is checked even if another one is wrong, so that CombinedError lists all
    errors.
    """
    errors: list[LoadgenError] = []
    settings: dict[SideName, Settings] = {}
    blocks = _Blocks(max_groups=DEFAULT_GROUPS, half_width=None, block_s=None, pause_ns=0)

    with collecting(errors):
        settings = _settings_by_side(invocation, options.targets)
        for settings_of_side in settings.values():
            backend.known(settings_of_side)  # raises for a simulated server that does not exist

    with collecting(errors):
        blocks = _plan_blocks(invocation)

    with collecting(errors):
        thresholds.parse_thresholds(options.conditions)

    with collecting(errors):
        workload_name = _choose_workload(workload_names)
        changes = {} if blocks.block_s is None else {"duration": f"{blocks.block_s:g}s"}
        workload = invocation.load_workload(workload_name, **changes)

    if errors:
        raise CombinedError(errors)

    any_settings = settings[FIRST_SIDE]
    plan = LivePlan(
        workload=workload_name or str(invocation["trace"] or invocation["dataset"]),
        source_text=workload.source_text,
        targets=(settings[FIRST_SIDE].display_name, settings[OTHER_SIDE].display_name),
        options=_list_plan_options(invocation, any_settings),
        seed=seeds.random_seed() if workload.seed is None else workload.seed,
        max_groups=blocks.max_groups,
        half_width=blocks.half_width,
        block_s=blocks.block_s,
        pause_ns=blocks.pause_ns,
        confidence=options.confidence,
        conditions=options.conditions,
        is_beyond_noise=options.is_beyond_noise,
        allows_different_work=options.allows_different_work,
        metadata=dict(any_settings.metadata),
        command=any_settings.command,
    )
    return _PlannedLive(plan, workload, settings)


def _list_plan_options(invocation: Invocation, settings: Settings) -> dict[str, str]:
    """Return the options that change the load or its requests, as text by name.

    The plan has the duration and the seed in fields of their own.
    """
    load_options = {
        name: str(value)
        for name, value in select_load_options(invocation.options).items()
        if name not in ("duration", "seed")
    }
    return load_options | request_options(settings)


def _settings_by_side(invocation: Invocation, targets: tuple[str, str]) -> dict[SideName, Settings]:
    """Return the settings of each side.

    The targets are URLs. With --targets FILE, they are names of endpoints in that file.

    Raises LoadgenError if a target cannot be used or is not known.
    """
    if invocation["targets"] is not None:
        return _settings_of_endpoints(invocation, targets)

    target_a, target_b = targets
    return {
        FIRST_SIDE: invocation.with_options(url=[target_a]).settings(),
        OTHER_SIDE: invocation.with_options(url=[target_b]).settings(),
    }


def _settings_of_endpoints(
    invocation: Invocation, names: tuple[str, str]
) -> dict[SideName, Settings]:
    """Return the settings of each side, whose endpoints are selected from --targets by name."""
    from loadgen.cli.targets import select_endpoint

    settings = invocation.settings()
    option = f"--live {' '.join(names)}"
    settings_by_side: dict[SideName, Settings] = {}
    for side, name in zip((FIRST_SIDE, OTHER_SIDE), names, strict=True):
        endpoint = select_endpoint(settings.endpoints, name, option)
        settings_by_side[side] = replace(settings, targets=(endpoint,), url=endpoint.url)
    return settings_by_side


def _plan_blocks(invocation: Invocation) -> _Blocks:
    """Return the number and the length of the blocks that --repeat and --duration specify.

    --repeat is the number of groups of four blocks, or "auto" to repeat until a precision is
    reached. --duration is the time of all blocks together.

    Raises UserError or CombinedError for values out of range.
    """
    repetition = invocation.repetition(
        default_most=DEFAULT_MAX_GROUPS, default_precision=DEFAULT_PRECISION
    )
    total_s = _parse_total_s(invocation["duration"])
    if repetition is None:
        max_groups = DEFAULT_GROUPS if total_s is None else _choose_group_count(total_s)
        block_s = _block_duration_s(total_s, max_groups)
        return _Blocks(max_groups, half_width=None, block_s=block_s, pause_ns=0)

    _check_first_stage(repetition)
    is_auto = repetition.count is None
    return _Blocks(
        max_groups=repetition.max_runs,
        half_width=repetition.precision if is_auto else None,
        block_s=_block_duration_s(total_s, repetition.max_runs),
        pause_ns=repetition.pause_ns,
    )


def _choose_group_count(total_s: float) -> int:
    """Return how many groups with blocks of DEFAULT_BLOCK_S fit into a time, within limits."""
    groups = round(total_s / (BLOCKS_PER_GROUP * DEFAULT_BLOCK_S))
    return min(max(groups, FEWEST_DEFAULT_GROUPS), MOST_DEFAULT_GROUPS)


def _parse_total_s(duration: str | None) -> float | None:
    """Return the time of all blocks in seconds, or None without --duration. Raises UserError."""
    if duration is None:
        return None
    total_ns = parse_option("--duration", duration, partial(units.duration_ns, default_unit="s"))
    return (total_ns or 0) / NS_PER_S


def _check_first_stage(repetition: Repetition) -> None:
    """Raise UserError if `--repeat auto` allows fewer groups than its first stage needs."""
    if repetition.count is None and repetition.most < FIRST_STAGE_GROUPS:
        raise UserError(
            "out_of_range",
            f"a live comparison needs {FIRST_STAGE_GROUPS} groups to know its precision",
            f"--repeat auto,most={repetition.most}",
            f"use most={FIRST_STAGE_GROUPS} or more",
        )


def _block_duration_s(total_s: float | None, max_groups: int) -> float | None:
    """Return the duration of a block in seconds, or None if the workload decides it.

    Args:
        total_s: The time of all blocks in seconds, or None.
        max_groups: The number of groups.

    Raises:
        UserError: The blocks are too short to measure anything.
    """
    if total_s is None:
        return None

    block_count = max_groups * BLOCKS_PER_GROUP
    block_s = total_s / block_count
    if block_s < MIN_BLOCK_S:
        raise UserError(
            "out_of_range",
            f"{block_count} blocks of {block_s:g} s are too short to measure anything",
            f"--duration {total_s:g}s",
            f"use at least {block_count * MIN_BLOCK_S:g}s, or fewer groups (--repeat)",
        )
    return block_s


def _choose_workload(workload_names: Sequence[Path]) -> str | None:
    """Return the only workload, or None without one: --trace or --dataset may replace it.

    Raises UserError for several workloads.
    """
    if len(workload_names) > 1:
        raise UserError(
            "conflict",
            "a live comparison sends one workload to both targets",
            " ".join(map(str, workload_names)),
            "give one workload",
        )
    return str(workload_names[0]) if workload_names else None


def _output_dir(planned: _PlannedLive) -> Path:
    """Return the directory of --out, or a new one in `results/`."""
    out = planned.settings[FIRST_SIDE].out
    return default_output_folder(f"live-{planned.workload.name}") if out is None else out


def _with_stored_seed(plan: LivePlan, output_dir: Path, invocation: Invocation) -> LivePlan:
    """Return the plan with the seed of an earlier command in the directory, if there was one.

    Raises UserError if --seed specifies another one.
    """
    if not (output_dir / PLAN_FILE).is_file():
        return plan

    stored_seed = read_plan(output_dir).seed
    if invocation["seed"] is not None and plan.seed != stored_seed:
        raise UserError(
            "mismatch",
            f"the live comparison in the directory has the seed {stored_seed}",
            f"--seed {plan.seed}",
            "leave out --seed to resume, or use another --out",
        )
    return replace(plan, seed=stored_seed)


def _print_comparison(stored: StoredComparison, output_dir: Path, options: LiveOptions) -> None:
    """Print a comparison, and write the files that the user named."""
    report = build_live_report(stored)
    print_result(
        stored,
        report,
        as_json=options.as_json,
        as_markdown=options.as_markdown,
        full=options.full,
    )
    print_status(f"Report: {output_dir / PAGE}. All details: loadgen report {output_dir} --full")

    if options.html is not None:
        write_file(options.html, html_renderer.render(report), "--html")

    if options.junit is not None:
        cases = list(compare_text.list_junit_cases(stored.comparison, stored.conditions))
        write_file(options.junit, junit_renderer.render("loadgen compare", cases), "--junit")
