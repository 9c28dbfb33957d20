"""What commands print besides their answers: the first lines of a run, its progress, files that were changed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from loadgen.cli.output import columns_of, say
from loadgen.core import format, seeds, slo
from loadgen.core.errors import CombinedError, LoadgenError
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
from loadgen.core.execution.load_description import slo_lines
from loadgen.core.execution.run_manifest import judge_slo
from loadgen.core.execution.stage_plans import describe_bounds
from loadgen.core.schedule.forecast import (
    Forecast,
    MeanTokens,
    combine_forecasts,
    forecast_load,
    mean_tokens,
)
from loadgen.core.stats.quantiles import needed_samples
from loadgen.render import text as as_text
from loadgen.runs import text
from loadgen.runs.progress import SHORTEST_S, Left, ProgressLine, Steps, step_words
from loadgen.runs.table_metrics import table_metrics

if TYPE_CHECKING:
    from loadgen.cli.invocation import Invocation
    from loadgen.core.execution.events import EventHandler
    from loadgen.core.execution.plan import Settings
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.results.manifest import Cluster, TargetFacts
    from loadgen.core.schedule.schedule import Schedule
    from loadgen.core.slo import Slo
    from loadgen.core.workload import Workload
    from loadgen.pricing.budget import Budget

PlannedRun = tuple["Workload", "Settings"]
"""A run that is to come."""
LONG_S = 60.0  # of a run: from here on it is said before what it will send


def forecasts(schedule: Schedule, tokens: MeanTokens, answer_s: float) -> tuple[Forecast, Forecast]:
    """Of the measured stages, and of all. `tokens`, `answer_s`: of a mean request, as for `forecast_load`."""
    measured, others = (
        forecast_load(msgspec.structs.replace(schedule, stages=stages), tokens, answer_s)
        for stages in (
            tuple(span for span in schedule.stages if span.measured is which)
            for which in (True, False)
        )
    )
    return measured, combine_forecasts([measured, others])


def too_few(measured: Forecast, promised: Slo | None) -> str:
    """What of an SLO a load is too short to keep, said before it; "" where nothing, or nothing is known of it.

    A closed loop may send fewer than its forecast, never more.
    """
    count = measured.requests
    if count is None or promised is None or not promised.terms:
        return ""
    needed, term = max(
        (needed_samples(term.quantile), slo.name(term.metric, term.quantile))
        for term in promised.terms
    )
    few = f"about {count:,.0f} requests will be measured, and only {needed:,} or more can show that {term} is kept"
    return f"{few}: give a longer load" if count < needed else ""


def shown(invocation: Invocation, *, quiet: bool = False, has_line_per_step: bool = False) -> Show:
    """Return what shows the runs of a command on stderr. Raises Fault or Faults.

    With `quiet`, the first lines of each run are left out. With `has_line_per_step`, a stream that
    is no terminal gets one line for each run, after it.
    """
    return Show(
        invocation["progress"],
        quiet=quiet,
        has_line_per_step=has_line_per_step,
        budget=invocation.budget(),
        followers=invocation.telemetry_listeners(),
    )


def print_plans(planned: Iterable[PlannedRun], budget: Budget | None) -> int:
    """Print what would be sent and, where there are prices, what it would cost; for --dry-run.

    Raises UserError where all of it goes over the limit of money, and Faults where the target takes no such requests.
    """
    from loadgen.core.execution.load_description import describe_load

    refused: dict[str, LoadgenError] = {}
    loads = []
    for workload, settings in planned:
        described = describe_load(workload, settings)
        loads.append((described.load, settings))
        print(described.text)
        if budget is not None:
            cost = budget.forecast_cost(described.load, target_facts(settings))
            print(
                "cost: known once the target was probed"
                if cost is None
                else f"cost: about {_money(budget, cost, settings)}"
            )
        if described.error is not None:
            refused.setdefault(str(described.error), described.error)
    if refused:
        raise CombinedError(list(refused.values()))
    if budget is not None and (cost := _cost_of_all(budget, loads)) is not None:
        if len(loads) > 1:
            print(f"cost of all {len(loads)} runs: about {_money(budget, cost, settings)}")
        if not settings.virtual:
            budget.check_limit(cost, "this run" if len(loads) == 1 else f"these {len(loads)} runs")
    return 0


def _money(budget: Budget, cost: Decimal, settings: Settings) -> str:
    return f"{budget.format_amount(cost)}{' on a real server: virtual time costs nothing' if settings.virtual else ''}"


def _cost_of_all(budget: Budget, loads: Sequence[tuple[Forecast, Settings]]) -> Decimal | None:
    """What several loads cost together; None where it is not known of each before its target was probed."""
    costs = [budget.forecast_cost(load, target_facts(settings)) for load, settings in loads]
    return None if None in costs else sum(filter(None, costs), Decimal())


def target_facts(settings: Settings) -> list[TargetFacts]:
    """Return what is known of the targets before a request is sent."""
    from loadgen.core.execution import backend
    from loadgen.core.results.manifest import TargetFacts

    known = backend.known(settings)
    known_gpus = None if known is None else known.gpus
    return [
        TargetFacts(
            url=one.url,
            server="",
            model=settings.model or "",
            gpus=one.gpus or known_gpus,
            shape=one.shape,
            region=one.region,
        )
        for one in settings.endpoints
    ]


class Show:
    """Hears the runs of one command: their first lines go to stderr, and so does what `--progress` asks for.

    `progress`: auto (a live view on a terminal, else a line every 10 s), plain (a line), json or off. `quiet`: of the
    runs of a search, no first lines. `followers`: who hears these runs too. `hearers`: all, for `execute`.
    `has_line_per_step`: with auto and without a terminal, a line for each run, and none every 10 s.
    """

    def __init__(
        self,
        progress: str = "auto",
        *,
        quiet: bool = False,
        has_line_per_step: bool = False,
        budget: Budget | None = None,
        followers: Sequence[EventHandler] = (),
    ) -> None:
        self._form, self._quiet = progress, quiet
        self._has_line_per_step = (
            has_line_per_step and progress == "auto" and not sys.stderr.isatty()
        )
        self._step_line = ""
        followed = () if self._has_line_per_step else _of_progress(progress)
        self.hearers = (self.hear, *followers, *followed)
        self._budget = budget
        self._cost_so_far: Callable[[], Decimal] = Decimal
        self._steps: Steps | None = None
        self._done: list[Summary] = []
        self._printed: set[str] = set()

    def expect(self, planned: Sequence[PlannedRun], *, always: bool = False) -> None:
        """Print what several runs will send and cost together, before the first of them.

        Nothing is printed of a single run, or of runs in virtual time, unless `always` is True.
        Raises UserError if together they exceed the limit of money. What a closed loop costs is known
        only once its target was probed, so such runs are refused one by one.
        """
        from loadgen.core.execution.load_description import describe_load

        is_virtual = bool(planned) and planned[0][1].virtual
        if not planned or ((len(planned) < 2 or is_virtual) and not always):
            return
        loads = [
            (describe_load(workload, settings).load, settings) for workload, settings in planned
        ]
        whole = combine_forecasts([load for load, _ in loads])
        cost = None if self._budget is None else _cost_of_all(self._budget, loads)
        money = ""
        if self._budget is not None and cost is not None:
            if not is_virtual:
                what = "this run" if len(loads) == 1 else f"these {len(loads)} runs"
                self._budget.check_limit(cost, what)
            money = f", {_money(self._budget, cost, planned[0][1])}"
        if always or money or (whole.seconds or LONG_S) >= LONG_S:
            say(f"expected in all: {format.counted(len(loads), 'run')}, about {whole.text}{money}")

    def cost_per_time(self, seconds: float, settings: Settings) -> str:
        """Return what the targets cost for this time, as text after a comma.

        It is "" without prices, and where the price depends on the requests.
        """
        if self._budget is None:
            return ""
        load = Forecast(requests=None, seconds=seconds, input_tokens=0.0, output_tokens=0.0)
        cost = self._budget.forecast_cost(load, target_facts(settings))
        return "" if cost is None else f", about {_money(self._budget, cost, settings)}"

    def begin(self, of: int, *, at_most: bool = False, weights: Sequence[float] = ()) -> None:
        """Several runs follow, each after `step`. `weights`: how long each takes beside the others; (): all as long."""
        self._steps = Steps(of, at_most=at_most, weights=weights)

    @property
    def spent_s(self) -> float:
        """Time since `begin`."""
        return self._steps.spent_s if self._steps is not None else 0.0

    def step(self, name: str, left: Left | None = None) -> None:
        """Say which of the runs comes next, and how long those left may take. `left`: what the caller knows of it."""
        if self._steps is None or self._form == "off":
            return
        step = self._steps.next(left)
        self._step_line = step_words(name, step)
        if self._form == "json":
            say(json.dumps({"step": {"name": name} | step}))
        elif not self._has_line_per_step:
            say(self._step_line)

    def end_step(self, outcome: str) -> None:
        """Print the outcome of the run that `step` began: on its line, or below it, indented."""
        say(f"{self._step_line}: {outcome}" if self._has_line_per_step else f"  {outcome}")

    def finished(self, summary: Summary) -> None:
        """One of the runs is done: the table so far, where the runs are long enough to wait for."""
        self._done.append(summary)
        if self._form == "json":
            verdict = {
                "run": summary.run.id,
                "valid": summary.verdict.valid,
                "slo_met": summary.goodput.met,
            }
            say(json.dumps({"finished": verdict | table_metrics(summary)}))
        elif self._form != "off" and self._steps is not None and self._steps.spent_s >= SHORTEST_S:
            table = as_text.render_sections([text.levels(self._done)], width=columns_of(sys.stderr))
            say(table.rstrip())

    def hear(self, event: RunEvent) -> None:
        match event:
            case WaitingFor(what):
                say(f"waiting for {what}")
            case RunPlanned():
                self._announce(event)
                self._forecast(event)
            case WorkersPlaced(cluster):
                self._announce_cluster(cluster)
            case LoadStarted():
                if self._budget is not None:
                    self._follow_cost(event.load, self._budget)
            case RunEnded(stored):
                if self._budget is not None:
                    self._budget.spent += self._cost_so_far()
                    self._cost_so_far = Decimal
                if stored:
                    say(f"stored in {stored}")

    def _forecast(self, planned: RunPlanned) -> None:
        """Say what a run will send and cost, where it is long or paid. Raises UserError over the limit of money."""
        plan, manifest = planned
        virtual = plan.job.settings.virtual
        if virtual and self._budget is None:
            return
        found, tokens = plan.job.probe_results[0], mean_tokens(plan.requests)
        answer_s = (
            staggered_start.response_time_of_probe(
                found.one_token_response_ms, found.per_token_ms
            ).ns(1, *tokens)
            / 1e9
        )
        measured, load = forecasts(plan.schedule, tokens, answer_s)
        if self._budget is not None:
            self._planned = load, manifest.targets
        cost = None
        if self._budget is not None:
            cost = self._budget.forecast_cost(load, manifest.targets)
            if not virtual:
                self._budget.check_limit(cost or Decimal())
        promised, _ = judge_slo(plan.job.workload.slo, plan.job.settings)
        if not self._quiet and not virtual and (few := too_few(measured, promised)):
            self._say_once(f"note: {few}")
        if self._budget is not None or (not self._quiet and (load.seconds or LONG_S) >= LONG_S):
            money = ""
            if self._budget is not None and cost is not None:
                money = f", {_money(self._budget, cost, plan.job.settings)}"
            say(f"expected: about {load.text}{money}")

    def _follow_cost(self, load: RunningLoad, budget: Budget) -> None:
        """Count what a load has cost so far, and stop it where the limit is reached."""
        planned, targets = self._planned
        loop = asyncio.get_running_loop()
        began_s = monotonic()

        def so_far() -> Decimal:
            counters, seconds = load.counters(), monotonic() - began_s
            tokens = counters.events / max(counters.sent, 1)
            sent = planned._replace(
                requests=float(counters.sent), seconds=seconds, output_tokens=tokens
            )
            return budget.forecast_cost(sent, targets) or Decimal()

        def look() -> None:
            if budget.limit is not None and budget.spent + so_far() >= budget.limit:
                say(
                    f"stopped: the load has cost {budget.format_amount(budget.spent + so_far())} (--max-cost)"
                )
                load.stop()
            else:
                loop.call_later(1.0, look)

        self._cost_so_far = so_far
        loop.call_soon(look)

    def _announce(self, planned: RunPlanned) -> None:
        plan, manifest = planned
        if self._quiet:
            return
        target, *other_targets = manifest.targets
        target_text = target.url
        if target.simulated:
            target_text = f"{target.name} (a SIMULATED server, not a measurement of any real one)"
        self._say_once(
            f"target: {target_text}, model {target.model}, server {target.server}, api {manifest.api}"
        )
        for other in other_targets:
            own = f"{other.serves} of the tasks: {other.url}, model {other.model}, server {other.server}"
            self._say_once(f"        {own if other.serves else other.name or other.url}")
        self._announce_stages(planned)
        for line in slo_lines(manifest.slo, {one.name: one.slo for one in manifest.classes}):
            self._say_once(line)
        for target in manifest.targets:
            if target.software:
                self._say_once(f"software: {', '.join(target.software)}")
        for head, texts in format.said(manifest.metadata).items():
            self._say_once(f"{head.lower()}: {', '.join(texts)}")
        if manifest.server_pages is not None:
            self._say_once(f"server metrics: {', '.join(manifest.server_pages) or 'none'}")
        for note in manifest.warnings:
            self._say_once(f"note: {note}")
        say(f"reproduce with {seeds.words(manifest.seed, manifest.salt)}  results: {plan.job.folder}")

    def _announce_stages(self, planned: RunPlanned) -> None:
        """Print a line for each stage of the load."""
        plan, manifest = planned
        for index, stage in enumerate(manifest.stages):
            bounds = describe_bounds(stage, plan.schedule, index, plan.job.workload)
            note = "" if stage.measured else ", warm-up, not measured"
            if stage.name == staggered_start.FIRST_ROUND:
                bounds, note = ["the first request of each lane"], ", not measured"
            if begin := staggered_start.describe_start(
                stage.ramp_s, stage.ramp_from, stage.concurrency
            ):
                note += f"; {begin}"
            say(f"load: {stage.arrival}: {', '.join(bounds)}{note}")

    def _say_once(self, line: str) -> None:
        """Print a line that is equal for every level only once."""
        if line not in self._printed:
            self._printed.add(line)
            say(line)

    def _announce_cluster(self, cluster: Cluster) -> None:
        nodes = ", ".join(
            dict.fromkeys(f"{worker.node} ({worker.address})" for worker in cluster.workers)
        )
        workers, hosts = (
            format.counted(len(cluster.workers), "worker"),
            format.counted(cluster.nodes, "node"),
        )
        say(f"cluster: {workers} on {hosts}: {nodes}")
        for where in cluster.lost:
            say(
                f"note: {where} was lost before the load: all workers are on the nodes that are left"
            )
        say(
            f"start: common to all workers within ±{cluster.start_bound_ms:.3f} ms, by exchanges with their clocks"
        )


def _of_progress(form: str) -> Iterator[EventHandler]:
    """Yield what shows the progress of each run: the live view on a terminal, or lines."""
    if form == "auto" and sys.stderr.isatty():
        from loadgen.runs.dashboard import Dashboard
        from loadgen.telemetry.reader_process import SidecarStarter

        yield SidecarStarter(Dashboard)
    elif form != "off":
        yield ProgressLine(as_json=form == "json")
