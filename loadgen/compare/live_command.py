"""`loadgen compare --live A B`: the same load to both targets, in alternating blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from loadgen.cli.invocation import Invocation
from loadgen.cli.options import default_output_folder
from loadgen.cli.output import add_resume_hint, print_result, print_status, write_file
from loadgen.cli.run_options import COMMAND_OPTIONS
from loadgen.cli.settings import request_options
from loadgen.compare import compare_text, thresholds
from loadgen.compare.alternating_blocks import (
    BLOCKS_PER_PAIR,
    FIRST_SIDE,
    OTHER_SIDE,
    SideName,
    seed_of_pair,
)
from loadgen.compare.block_plan import BlockPlan, plan_blocks
from loadgen.compare.exit_code import comparison_exit_code
from loadgen.compare.live_plan import PLAN_FILE, LivePlan
from loadgen.compare.live_result import StoredComparison, read_plan
from loadgen.compare.live_run import LiveOutcome, LiveRun, print_plan, run_live
from loadgen.compare.live_text import build_live_report
from loadgen.core import seeds
from loadgen.core.errors import INTERRUPTED, CombinedError, LoadgenError, UserError, collecting
from loadgen.core.execution import backend
from loadgen.core.workload.flags import select_load_options
from loadgen.render import html as html_renderer
from loadgen.render import junit as junit_renderer
from loadgen.result_kinds import PAGE

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.execution.probing import ProbeCache
    from loadgen.core.workload import Workload
    from loadgen.runs.planned_runs import PlannedRun
    from loadgen.runs.run_display import RunDisplay


OPTIONS_WITH_FIELD = frozenset({"duration", "seed"})
"""The options of a load that a plan has in separate fields."""


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


class _PlannedLive(NamedTuple):
    """A live comparison that was checked: what is requested, and what is sent to each side."""

    plan: LivePlan
    workload: Workload
    settings: dict[SideName, Settings]

    @property
    def blocks(self) -> list[PlannedRun]:
        """The runs of all blocks in the order of time, if no precision ends the comparison."""
        from loadgen.runs.planned_runs import PlannedRun

        blocks_per_side = self.plan.max_blocks // len(self.settings)
        return [
            PlannedRun(
                self.workload_of_pair(block.pair),
                self.settings[block.side],
                title=f"{block.side}, the first block of {blocks_per_side}",
                command_seed=self.plan.seed,
            )
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

    _refuse_missing_url(invocation, options.targets)
    planned = _plan_live(invocation, workload_names, options)
    display = create_display(invocation, quiet=True, has_line_per_step=True)
    if options.is_dry_run:
        return _print_dry_run(planned, invocation)

    output_dir = _prepare_output_dir(planned, invocation)
    planned_with_seed = _use_stored_seed(planned, output_dir, invocation)
    outcome = _run_blocks(planned_with_seed, output_dir, invocation, display)
    return _print_outcome(outcome, output_dir, options)


def _print_outcome(outcome: LiveOutcome, output_dir: Path, options: LiveOptions) -> int:
    """Print what was compared, and how to continue if it was interrupted. Return the exit code."""
    how_to_continue = f"Repeat the command with --out {output_dir} to continue."
    if outcome.stored is None:
        print_status(f"Nothing was compared. {how_to_continue}")
        return INTERRUPTED

    _print_comparison(outcome.stored, output_dir, options)
    if outcome.is_interrupted:
        print_status(f"Stopped. {how_to_continue}")
        return INTERRUPTED

    return comparison_exit_code(outcome.stored.comparison, outcome.stored.conditions)


def _print_dry_run(planned: _PlannedLive, invocation: Invocation) -> int:
    """Print what a live comparison would send, and return the exit code.

    The first block of each side is described in detail. All blocks together are counted.
    """
    from loadgen.runs.planned_runs import print_plans

    print_plan(planned.plan)
    return print_plans(
        planned.blocks,
        invocation.budget(),
        described_count=BLOCKS_PER_PAIR,
        name_of_all=f"all {planned.plan.max_blocks} blocks",
    )


def _refuse_missing_url(invocation: Invocation, targets: tuple[str, str]) -> None:
    """Check that the two words after --live are URLs.

    If the user types fewer URLs, the parser takes the next words for them, such as another option
    or the workload. With --targets, the words are names of servers, which have no colon.

    Raises:
        UserError: A word is neither a URL nor a name of a server.
    """
    has_names = invocation["targets"] is not None
    for word in targets:
        is_option = word.startswith("-")
        is_url_or_name = ":" in word or has_names
        if is_option or not is_url_or_name:
            raise UserError(
                "missing_value",
                f"--live needs two URLs, and {word!r} is none",
                f"--live {' '.join(targets)}",
                "type the URLs of both servers after --live: A, then B",
            )


def _run_blocks(
    planned: _PlannedLive, output_dir: Path, invocation: Invocation, display: RunDisplay
) -> LiveOutcome:
    """Run the blocks that a directory does not have yet, and compare all of them.

    A block is a short run of the load on one of the two targets.

    Raises:
        TargetError: A target does not respond.
        CombinedError: Neither target responds.
    """
    from loadgen.core.execution.folder_names import locked_folder

    probe_cache: ProbeCache = {}
    live = LiveRun(
        plan=planned.plan,
        workload=planned.workload,
        settings=planned.settings,
        output_dir=output_dir,
        display=display,
        execute=invocation.executor(display.event_handlers, probe_cache),
        probe_cache=probe_cache,
    )
    is_resumed = (output_dir / PLAN_FILE).is_file()
    if not is_resumed:
        display.announce_runs(planned.blocks)

    resume_hint = f"the same command with --out {output_dir} resumes it"
    with locked_folder(output_dir), add_resume_hint(output_dir, resume_hint):
        return run_live(live)


def refuse_load_options(invocation: Invocation) -> None:
    """Check that a comparison of stored results has no options of a load, such as --concurrency.

    Only a comparison with --live sends requests. --force is allowed, because it also has a meaning
    with --save.

    Raises:
        UserError: At least one option of a load is used. The message names the first one.
    """
    used_names = [
        name for name, value in invocation.options.items() if value != COMMAND_OPTIONS[name].default
    ]
    forbidden_names = [name for name in used_names if name != "force"]
    if not forbidden_names:
        return

    first_name = forbidden_names[0]
    option = COMMAND_OPTIONS[first_name]
    raise UserError(
        "missing_option",
        "this option needs --live, because stored results send no load",
        option.describe(first_name, invocation.options[first_name]),
        "add --live URL_A URL_B, or leave it out",
    )


def _plan_live(
    invocation: Invocation, workload_names: Sequence[Path], options: LiveOptions
) -> _PlannedLive:
    """Return the live comparison that the options request.

    Each kind of option is checked even if another one is wrong.

    Raises:
        CombinedError: Options are wrong. The error contains all errors.
    """
    errors: list[LoadgenError] = []
    settings: dict[SideName, Settings] = {}
    blocks = BlockPlan()

    # `collecting` adds an error to the list and goes on after its block.
    with collecting(errors):
        settings = _settings_by_side(invocation, options.targets)
        for settings_of_side in settings.values():
            backend.known(settings_of_side)  # raises for a simulated server that does not exist

    with collecting(errors):
        blocks = plan_blocks(invocation)

    with collecting(errors):
        thresholds.parse_thresholds(options.conditions)

    with collecting(errors):
        workload_name = _choose_workload(workload_names)
        workload = _load_block_workload(invocation, workload_name, blocks)

    if errors:
        raise CombinedError(errors)

    source = workload_name or str(invocation["trace"] or invocation["dataset"])
    plan = _create_plan(source, workload, settings, blocks, invocation, options)
    return _PlannedLive(plan, workload, settings)


def _load_block_workload(
    invocation: Invocation, workload_name: str | None, blocks: BlockPlan
) -> Workload:
    """Return the load of one block.

    The option --duration is the time of all blocks, so it is replaced by the time of one.

    Args:
        invocation: The options of the load.
        workload_name: The workload, or None if a trace or a data set is used.
        blocks: The plan of the blocks, which has no time if the workload decides it.
    """
    block_duration = None if blocks.block_s is None else f"{blocks.block_s:g}s"
    return invocation.load_workload(workload_name, duration=block_duration)


def _create_plan(
    source: str,
    workload: Workload,
    settings: dict[SideName, Settings],
    blocks: BlockPlan,
    invocation: Invocation,
    options: LiveOptions,
) -> LivePlan:
    """Return the plan of a live comparison, as `live.json` stores it.

    Without --seed and a seed in the workload, the plan gets a random seed.

    Args:
        source: The workload as it was typed, or the trace or data set in place of one.
        workload: The load of a block.
        settings: The settings of each side. They differ only in the target.
        blocks: The number and the length of the blocks.
        invocation: The options of the load.
        options: The other options.
    """
    settings_a = settings[FIRST_SIDE]
    settings_b = settings[OTHER_SIDE]
    return LivePlan(
        # The load.
        workload=source,
        source_text=workload.source_text,
        targets=(settings_a.display_name, settings_b.display_name),
        options=_describe_load_options(invocation, settings_a),
        seed=seeds.random_seed() if workload.seed is None else workload.seed,
        # The blocks.
        max_groups=blocks.max_groups,
        half_width=blocks.half_width,
        block_s=blocks.block_s,
        pause_ns=blocks.pause_ns,
        # The comparison.
        confidence=options.confidence,
        conditions=options.conditions,
        is_beyond_noise=options.is_beyond_noise,
        allows_different_work=options.allows_different_work,
        # The command.
        metadata=dict(settings_a.metadata),
        command=settings_a.command,
    )


def _describe_load_options(invocation: Invocation, settings: Settings) -> dict[str, str]:
    """Return the options that change the load or its requests, as text by name.

    For example: {"concurrency": "8", "output_tokens": "256"}. Options that a plan stores in fields
    of their own, the duration and the seed, are left out.
    """
    load_options = select_load_options(invocation.options)
    text_by_name = {
        name: str(value) for name, value in load_options.items() if name not in OPTIONS_WITH_FIELD
    }
    return text_by_name | request_options(settings)


def _settings_by_side(invocation: Invocation, targets: tuple[str, str]) -> dict[SideName, Settings]:
    """Return the settings of the two sides A and B, which differ in the server they send to.

    Args:
        invocation: The options of the load.
        targets: The URL of each server, A first. With --targets FILE, the name of each server in
            that file.

    Raises:
        LoadgenError: A server cannot be used or is not known.
    """
    has_targets_file = invocation["targets"] is not None
    if has_targets_file:
        return _settings_of_endpoints(invocation, targets)

    url_a, url_b = targets
    return {
        FIRST_SIDE: invocation.with_options(url=[url_a]).settings(),
        OTHER_SIDE: invocation.with_options(url=[url_b]).settings(),
    }


def _settings_of_endpoints(
    invocation: Invocation, names: tuple[str, str]
) -> dict[SideName, Settings]:
    """Return the settings of each side, whose endpoints are selected from --targets by name."""
    from loadgen.cli.targets import select_endpoint

    settings = invocation.settings()
    option = f"--live {' '.join(names)}"
    name_a, name_b = names
    endpoint_a = select_endpoint(settings.endpoints, name_a, option)
    endpoint_b = select_endpoint(settings.endpoints, name_b, option)
    return {
        FIRST_SIDE: replace(settings, targets=(endpoint_a,), url=endpoint_a.url),
        OTHER_SIDE: replace(settings, targets=(endpoint_b,), url=endpoint_b.url),
    }


def _choose_workload(workload_names: Sequence[Path]) -> str | None:
    """Return the name of the workload, or None if --trace or --dataset is used instead.

    Raises:
        UserError: There are several workloads.
    """
    if len(workload_names) > 1:
        raise UserError(
            "conflict",
            "a live comparison sends one workload to both targets",
            " ".join(map(str, workload_names)),
            "give one workload",
        )
    return str(workload_names[0]) if workload_names else None


def _prepare_output_dir(planned: _PlannedLive, invocation: Invocation) -> Path:
    """Return the directory of --out, or a new one in `results/`.

    With --force, results that are in the directory of --out are moved away.
    """
    out = planned.settings[FIRST_SIDE].out
    output_dir = default_output_folder(f"live-{planned.workload.name}") if out is None else out
    invocation.move_existing_results(output_dir if invocation["out"] else None)
    return output_dir


def _use_stored_seed(
    planned: _PlannedLive, output_dir: Path, invocation: Invocation
) -> _PlannedLive:
    """Return the comparison with the seed of an earlier command in the directory, if there was one.

    Raises:
        UserError: The option --seed specifies another seed.
    """
    is_resumed = (output_dir / PLAN_FILE).is_file()
    if not is_resumed:
        return planned

    stored_seed = read_plan(output_dir).seed
    is_seed_requested = invocation["seed"] is not None
    if is_seed_requested and planned.plan.seed != stored_seed:
        raise UserError(
            "mismatch",
            f"the live comparison in the directory has the seed {stored_seed}",
            f"--seed {planned.plan.seed}",
            "leave out --seed to resume, or use another --out",
        )
    return planned._replace(plan=replace(planned.plan, seed=stored_seed))


def _print_comparison(stored: StoredComparison, output_dir: Path, options: LiveOptions) -> None:
    """Print a comparison, and write the files of --html and --junit."""
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
