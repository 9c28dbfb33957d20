"""What a command prints on stderr about its runs: target and load, warnings, progress and cost."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from decimal import Decimal
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from loadgen.cli.output import (
    describe_nothing_measured,
    explain_interruption,
    print_status,
    text_width,
)
from loadgen.core import format
from loadgen.core.execution import staggered_start
from loadgen.core.execution.events import (
    LoadStarted,
    RunEnded,
    RunEvent,
    RunningLoad,
    RunPlanned,
    WaitingFor,
    WorkersPlaced,
)
from loadgen.core.execution.run_manifest import select_judgeable_terms
from loadgen.core.execution.stage_plans import describe_bounds
from loadgen.core.run_folder import is_run
from loadgen.core.schedule.forecast import Forecast, combine_forecasts, mean_tokens
from loadgen.core.workload.cache_fill import CACHE_FILL
from loadgen.render import text as text_renderer
from loadgen.runs.planned_runs import (
    ForecastRun,
    PlannedRun,
    RunForecast,
    compute_total_cost,
    describe_cost,
    describe_run_count,
    describe_too_few_requests,
    forecast_run,
    target_facts,
)
from loadgen.runs.progress import (
    MIN_FORECAST_S,
    ProgressLine,
    RemainingSteps,
    StepCounter,
    describe_step,
)
from loadgen.runs.run_table import run_table
from loadgen.runs.run_title import describe_arrival, format_duration, short_target_name
from loadgen.runs.table_metrics import table_metrics

if TYPE_CHECKING:
    from pathlib import Path

    from loadgen.cli.invocation import Invocation
    from loadgen.core.execution.events import EventHandler
    from loadgen.core.execution.plan import Settings
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.results.manifest import Cluster, RunManifest, StagePlan, TargetFacts
    from loadgen.pricing.budget import Budget

LONG_S = 60.0
"""From this length on, the size of several runs is printed before they start."""

COST_CHECK_S = 1.0
"""Time between two checks of the cost of a running load."""

_NS_PER_S = 1e9


_SIMULATION_WARNING = "virtual_time"
"""The code of a warning that is not printed, because the line about the target says the same."""


def create_display(
    invocation: Invocation, *, quiet: bool = False, has_line_per_step: bool = False
) -> RunDisplay:
    """Return the display of the runs of a command, with its budget and its telemetry.

    `quiet` and `has_line_per_step` are those of `RunDisplay`.

    Raises UserError or CombinedError if an option about prices or telemetry is wrong.
    """
    return RunDisplay(
        invocation["progress"],
        quiet=quiet,
        has_line_per_step=has_line_per_step,
        budget=invocation.budget(),
        listeners=invocation.telemetry_listeners(),
    )


class _PricedLoad(NamedTuple):
    """The forecast of the run that comes next, and its targets, from which its cost follows."""

    forecast: Forecast
    targets: Sequence[TargetFacts]


class RunDisplay:
    """Prints what happens in the runs of one command on stderr, and shows their progress.

    A command with several runs calls them steps. `begin_steps` starts the clock, and `begin_step`
    prints which one comes next. The display also checks the cost of each run against the budget.

    Attributes:
        event_handlers: Everything that listens to the runs; to be passed to `execute`.
    """

    def __init__(
        self,
        progress: str = "auto",
        *,
        quiet: bool = False,
        has_line_per_step: bool = False,
        budget: Budget | None = None,
        listeners: Sequence[EventHandler] = (),
    ) -> None:
        """Prepare the display.

        Args:
            progress: How progress is shown: `auto` (a live view on a terminal, else a line every
                10 s), `plain` (a line), `json` (an object per line) or `off`.
            quiet: Do not print target and load, as for the trials of a search.
            has_line_per_step: Print one line after each run and none while it runs. This applies
                only to `auto` without a terminal, for example in a log of a CI system.
            budget: Prices and the limit of cost.
            listeners: Other listeners to the runs, such as telemetry.
        """
        self._progress = progress
        self._quiet = quiet
        is_log = progress == "auto" and not sys.stderr.isatty()
        self._has_line_per_step = is_log and has_line_per_step
        handlers: list[EventHandler] = [self.handle, *listeners]

        progress_handler = _create_progress_handler(progress)
        if progress_handler is not None and not self._has_line_per_step:
            handlers.append(progress_handler)

        self.event_handlers = tuple(handlers)

        # The cost of the current run: its forecast with the prices, and the cost while it runs.
        self._budget = budget
        self._priced_load: _PricedLoad | None = None
        self._cost_monitor: _CostMonitor | None = None

        # A command with several runs: their counter, the line about the current run, and the
        # results of the finished ones.
        self._steps: StepCounter | None = None
        self._step_line = ""
        self._finished: list[Summary] = []

        # The directory of the latest run, which an interruption before its load leaves without run.
        self._run_dir: Path | None = None

        # Lines that are the same in each run of a command, and are printed only once.
        self._printed_lines: set[str] = set()

    # -- before the runs ---------------------------------------------------------------------------

    def announce_runs(self, runs: Sequence[PlannedRun], *, always_print: bool = False) -> None:
        """Print what all runs of a command will send and cost, before the first one starts.

        Their cost is checked against the limit too. The cost of a closed loop is not known yet,
        because it depends on the speed of the target. It is checked when each run starts.

        Args:
            runs: All runs of the command. They have the same target.
            always_print: Print the line in any case. By default it is left out for a single run,
                for runs in virtual time, and for short runs without a known cost.

        Raises:
            UserError: The runs together exceed the limit of cost.
        """
        if not runs:
            return

        settings = runs[0].settings
        has_several_real_runs = len(runs) > 1 and not settings.virtual
        if not has_several_real_runs and not always_print:
            return

        forecasts = _forecast_runs(runs)
        cost = self._forecast_and_check_cost(forecasts, settings)
        total = combine_forecasts([run.forecast for run in forecasts])

        is_long = total.seconds is None or total.seconds >= LONG_S
        if always_print or cost is not None or is_long:
            run_count = format.counted(len(runs), "run")
            cost_suffix = _cost_suffix(self._budget, cost, settings)
            print_status(f"Estimated: {run_count}, {total.text}{cost_suffix}")

    def _forecast_and_check_cost(
        self, forecasts: Sequence[ForecastRun], settings: Settings
    ) -> Decimal | None:
        """Return the cost of all runs, or None without prices or if it is not known yet.

        Raises UserError if it exceeds the limit.
        """
        if self._budget is None:
            return None
        cost = compute_total_cost(self._budget, forecasts)
        if not settings.virtual:
            _check_limit(self._budget, cost, describe_run_count(len(forecasts)))
        return cost

    def describe_cost_of_duration(self, duration_s: float, settings: Settings) -> str:
        """Return what the use of the targets costs for a time, such as `, about $12.40`.

        A search uses this, which knows how long it takes but not how many requests it will send.
        So the cost is only known if the price is per hour. Otherwise, and without prices, return
        "".
        """
        if self._budget is None:
            return ""
        load = Forecast(requests=None, seconds=duration_s, input_tokens=0.0, output_tokens=0.0)
        cost = self._budget.forecast_cost(load, target_facts(settings))
        if cost is None:
            return ""
        return f", about {describe_cost(self._budget, cost, settings)}"

    # -- steps: the runs of a sweep, a search or a validation --------------------------------------

    def begin_steps(
        self, count: int, *, at_most: bool = False, weights: Sequence[float] = ()
    ) -> None:
        """Prepare for several runs, each of which begins with `begin_step`.

        Args:
            count: The number of runs.
            at_most: Whether there may be fewer runs, as in a search.
            weights: How long each run takes relative to the others; empty if all take as long.
        """
        self._steps = StepCounter(count, at_most=at_most, weights=weights)

    @property
    def elapsed_s(self) -> float:
        """Time since `begin_steps`."""
        return self._steps.elapsed_s if self._steps is not None else 0.0

    def begin_step(self, name: str, remaining: RemainingSteps | None = None) -> None:
        """Print which run of the command comes next, and how long the remaining ones may take.

        The display may be set to print one line per run (`has_line_per_step`). Then `end_step`
        prints that line together with the outcome, and nothing is printed here.

        Args:
            name: The name of the run.
            remaining: The caller's own estimate of the remaining runs. Without one, the time is
                extrapolated from the runs so far.
        """
        if self._steps is None or self._progress == "off":
            return

        step = self._steps.begin_step(remaining)
        self._step_line = describe_step(name, step)
        if self._progress == "json":
            print_status(json.dumps({"step": {"name": name} | step.as_dict()}))
        elif not self._has_line_per_step:
            print_status(self._step_line)

    def end_step(self, outcome: str) -> None:
        """Print the outcome of the current step: on its line, or indented below it."""
        print_status(f"{self._step_line}: {outcome}" if self._has_line_per_step else f"  {outcome}")

    def print_finished(self, summary: Summary) -> None:
        """Print the result of a run that has finished: the table of all runs so far, or JSON.

        The table is not printed in the first MIN_FORECAST_S of the command, because the final
        report of such short runs follows at once.
        """
        self._finished.append(summary)
        if self._progress == "json":
            print_status(_finished_as_json(summary))
            return

        is_long_command = self.elapsed_s >= MIN_FORECAST_S
        if self._progress != "off" and is_long_command:
            table_section = run_table(self._finished)
            table = text_renderer.render_sections([table_section], width=text_width(sys.stderr))
            print_status(table.rstrip())

    # -- events of a run ---------------------------------------------------------------------------

    def handle(self, event: RunEvent) -> None:
        """Print what an event of a run means for the user, and check the cost of the run.

        Raises UserError when a run is planned whose cost would exceed the limit.
        """
        match event:
            case WaitingFor(reason):
                print_status(f"waiting for {reason}")
            case RunPlanned():
                self._run_dir = event.plan.job.folder
                self._print_plan(event)
                self._print_forecast(event)
            case WorkersPlaced(cluster):
                _print_cluster(cluster)
            case LoadStarted(load=load):
                self._start_cost_monitor(load)
            case RunEnded(stored_at):
                self._add_cost_of_run()
                if stored_at:
                    print_status(f"stored in {stored_at}")

    def explain_interruption(self) -> AbstractContextManager[None]:
        """Print what is stored and how to go on if Ctrl-C ends the `with` block.

        A load that is interrupted ends with a result. This is for an interruption before the load
        or after it, which leaves no report.
        """
        return explain_interruption(self._describe_interruption)

    def _describe_interruption(self) -> str:
        """Return what an interrupted command has stored, and how to go on."""
        if self._run_dir is None or not is_run(self._run_dir):
            return describe_nothing_measured()
        run_dir = shlex.quote(str(self._run_dir))
        return f"The requests until then are stored. To see them: loadgen report {run_dir}"

    def _print_plan(self, planned: RunPlanned) -> None:
        """Print the targets, each stage of the load, and the warnings of the plan.

        Runs of one command have the same targets and often the same warnings, so these are not
        repeated for later runs. The line of a simulated target says already that it is simulated,
        so there is no warning about that.
        """
        if self._quiet:
            return

        manifest = planned.manifest
        for line in _target_lines(manifest):
            self._print_once(line)

        for index, stage in enumerate(manifest.stages):
            counts = _stage_counts(planned, stage, index)
            print_status(_describe_stage(stage, counts))

        for warning_text in manifest.warnings:
            reason = manifest.warning_codes.get(warning_text)
            is_simulation_warning = reason is not None and reason.code == _SIMULATION_WARNING
            if not is_simulation_warning:
                self._print_once(f"Warning: {warning_text}")

    def _print_forecast(self, planned: RunPlanned) -> None:
        """Warn of a load that is too short for its SLO, and print what a paid load will cost.

        Raises UserError if the cost exceeds the limit.
        """
        settings = planned.plan.job.settings
        can_warn = not self._quiet and not settings.virtual
        if not can_warn and self._budget is None:
            return

        forecast = _forecast_planned_run(planned)
        if can_warn:
            self._warn_if_too_short(planned, forecast.measured)

        if self._budget is not None:
            self._priced_load = _PricedLoad(forecast.total, planned.manifest.targets)
            _check_and_print_cost(self._budget, self._priced_load, settings)

    def _warn_if_too_short(self, planned: RunPlanned, measured: Forecast) -> None:
        """Print a warning if the measured stages send too few requests to judge the SLO."""
        job = planned.plan.job
        judgeable_slo = select_judgeable_terms(job.workload.slo, job.settings).slo
        warning = describe_too_few_requests(measured, judgeable_slo)
        if warning:
            self._print_once(f"Warning: {warning}")

    def _print_once(self, line: str) -> None:
        """Print a line unless it was printed before, for what is the same in all runs."""
        if line not in self._printed_lines:
            self._printed_lines.add(line)
            print_status(line)

    # -- cost --------------------------------------------------------------------------------------

    def _start_cost_monitor(self, load: RunningLoad) -> None:
        """Compute the cost of a load while it runs, and stop the load if it reaches the limit."""
        if self._budget is None or self._priced_load is None:
            return
        self._cost_monitor = _CostMonitor(load, self._budget, self._priced_load)
        self._cost_monitor.start()

    def _add_cost_of_run(self) -> None:
        """Add the cost of the run that has ended to the money spent by the command."""
        if self._budget is not None and self._cost_monitor is not None:
            self._budget.spent += self._cost_monitor.cost()
        self._cost_monitor = None


class _CostMonitor:
    """Computes the cost of a running load, and stops the load at the limit of the budget."""

    def __init__(self, load: RunningLoad, budget: Budget, priced_load: _PricedLoad) -> None:
        self._load = load
        self._budget = budget
        self._priced_load = priced_load
        self._loop = asyncio.get_running_loop()
        self._start_s = monotonic()

    def start(self) -> None:
        """Check the cost now and once per second."""
        self._loop.call_soon(self._check)

    def cost(self) -> Decimal:
        """Return the cost of what was sent so far."""
        counters = self._load.counters()
        sent = self._priced_load.forecast._replace(
            requests=float(counters.sent),
            seconds=monotonic() - self._start_s,
            output_tokens=counters.events / max(counters.sent, 1),
        )
        return self._budget.forecast_cost(sent, self._priced_load.targets) or Decimal()

    def _check(self) -> None:
        """Stop the load if the command has spent the budget. Otherwise check again later."""
        limit = self._budget.limit
        spent = self._budget.spent + self.cost()
        if limit is not None and spent >= limit:
            print_status(
                f"stopped: the load has cost {self._budget.format_amount(spent)} (--max-cost)"
            )
            self._load.stop()
            return

        self._loop.call_later(COST_CHECK_S, self._check)


# -- lines about a run -----------------------------------------------------------------------------


def _forecast_runs(runs: Sequence[PlannedRun]) -> list[ForecastRun]:
    """Return the forecast of each run, as far as it is known before its target was probed."""
    from loadgen.core.execution.load_description import describe_load

    return [
        ForecastRun(describe_load(run.workload, run.settings).load, run.settings) for run in runs
    ]


def _check_limit(budget: Budget, cost: Decimal | None, subject: str) -> None:
    """Raise UserError if a cost, together with that of earlier runs, exceeds the budget's limit.

    Args:
        budget: The limit, and what earlier runs have cost.
        cost: The cost. None if it is not known: then only the earlier runs count.
        subject: What has this cost, for the error: "this run" or "these 3 runs".
    """
    known_cost = Decimal(0) if cost is None else cost
    budget.check_limit(known_cost, subject)


def _check_and_print_cost(budget: Budget, load: _PricedLoad, settings: Settings) -> None:
    """Print what a run will send and cost.

    Raises UserError if the cost exceeds the limit. A run in virtual time costs nothing, so its cost
    is only printed, as that of a real run.
    """
    cost = budget.forecast_cost(load.forecast, load.targets)
    if not settings.virtual:
        _check_limit(budget, cost, "this run")
    print_status(f"Estimated: {load.forecast.text}{_cost_suffix(budget, cost, settings)}")


def _cost_suffix(budget: Budget | None, cost: Decimal | None, settings: Settings) -> str:
    """Return a cost as text that starts with a comma, or "" without prices or a known cost."""
    if budget is None or cost is None:
        return ""
    return f", {describe_cost(budget, cost, settings)}"


def _finished_as_json(summary: Summary) -> str:
    """Return the result of a run that has finished as a line of JSON."""
    result = {
        "run": summary.run.id,
        "valid": summary.verdict.valid,
        "slo_met": summary.goodput.met,
    }
    return json.dumps({"finished": result | table_metrics(summary)})


def _forecast_planned_run(planned: RunPlanned) -> RunForecast:
    """Return the forecast of a run, assuming that the server responds as fast as to the probe.

    The probe is the first request to the target, which is sent before the load. Its response shows
    how long the server needs for the first token and for each further one. The forecast assumes
    that each response of the run takes as long as one with the mean prompt and output length.
    """
    plan = planned.plan
    probe = plan.job.probe_results[0]
    response_time = staggered_start.estimate_from_probe(
        probe.one_token_response_ms, probe.per_token_ms
    )
    tokens = mean_tokens(plan.requests)
    requests_in_flight = 1  # as during the probe
    response_ns = response_time.ns(requests_in_flight, tokens.input_tokens, tokens.output_tokens)

    return forecast_run(plan.schedule, tokens, response_ns / _NS_PER_S)


def _target_lines(manifest: RunManifest) -> Iterator[str]:
    """Yield the lines that describe the targets of a run.

    The first line describes the first target, and the second one names the targets that share the
    load with it. A target that serves only some steps of the tasks has a line of its own.
    """
    first, *further_targets = manifest.targets
    yield f"Target: {_describe_target(first)}"

    sharing = [target for target in further_targets if not target.serves]
    if sharing:
        names = ", ".join(target.name or target.url for target in sharing)
        yield f"        and {names}"

    for target in further_targets:
        if target.serves:
            yield f"        {_describe_target(target)}, serves {target.serves}"


def _describe_target(target: TargetFacts) -> str:
    parts = [short_target_name(target)]
    if target.simulated:
        parts[0] += " (SIMULATED)"

    if target.model:
        parts.append(f"model {target.model}")

    if target.server and not target.simulated:
        parts.append(f"server {target.server}")

    return ", ".join(parts)


def _stage_counts(planned: RunPlanned, stage: StagePlan, index: int) -> list[str]:
    """Return how many sessions and requests a stage sends and for how long, as texts."""
    plan = planned.plan
    counts = describe_bounds(stage, plan.schedule, index, plan.job.workload)
    if stage.end_ns is None:
        return counts
    length_s = (stage.end_ns - stage.start_ns) / _NS_PER_S
    return [*counts[:-1], format_duration(length_s)]


def _describe_stage(stage: StagePlan, counts: list[str]) -> str:
    """Return a stage of the load as text, such as `Load: concurrency 16, 500 requests`.

    A stage is a part of the load with its own rate or concurrency, such as a warm-up. Before a
    closed loop there may be a stage in which each virtual user sends one request, which is not
    measured. It has no rate, so its text only says that.

    Args:
        stage: The stage.
        counts: How many requests it sends and how long it takes, as texts.
    """
    label = "Load" if stage.measured else "Warm-up"
    if stage.name == CACHE_FILL:
        label = "Cache fill"

    is_first_round = stage.name == staggered_start.FIRST_ROUND
    if is_first_round:
        phrases = ["first request of each virtual user"]
    else:
        phrases = [describe_arrival(stage.arrival), *counts]

    start = staggered_start.describe_start(stage.ramp_s, stage.ramp_from, stage.concurrency)
    if start:
        phrases.append(start)

    return f"{label}: {', '.join(phrases)}"


def _print_cluster(cluster: Cluster) -> None:
    """Print the nodes on which the workers run, and a warning for each lost node."""
    worker_nodes = []
    for worker in cluster.workers:
        node = f"{worker.node} ({worker.address})"
        if node not in worker_nodes:
            worker_nodes.append(node)

    worker_count = format.counted(len(cluster.workers), "worker")
    node_count = format.counted(cluster.nodes, "node")
    print_status(f"Cluster: {worker_count} on {node_count}: {', '.join(worker_nodes)}")

    for lost_node in cluster.lost:
        print_status(
            f"Warning: {lost_node} was lost before the load; its workers are on the other nodes"
        )


def _create_progress_handler(progress: str) -> EventHandler | None:
    """Return the event handler that shows the progress of each run. Return None with `off`.

    With `auto` on a terminal, it is the live view (`Dashboard`). `SidecarStarter` draws that in a
    separate process, so that the drawing does not disturb the load. In all other cases the handler
    prints lines.
    """
    if progress == "off":
        return None

    if progress == "auto" and sys.stderr.isatty():
        from loadgen.runs.dashboard import Dashboard
        from loadgen.telemetry.reader_process import SidecarStarter

        return SidecarStarter(Dashboard)

    return ProgressLine(as_json=progress == "json")
