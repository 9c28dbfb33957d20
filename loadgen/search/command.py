"""`loadgen search`: find the highest load at which an SLO holds. Parses flags, runs the trials, prints the answer."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadgen.cli import completion
from loadgen.cli.invocation import Invocation
from loadgen.cli.option_parsers import parse_option, parse_share_option
from loadgen.cli.options import (
    DryRunOption,
    WorkloadArgument,
    add_options,
    default_output_folder,
)
from loadgen.cli.output import print_report, say
from loadgen.cli.resume import resume_arguments
from loadgen.core import format, units
from loadgen.core.errors import OK, CombinedError, LoadgenError, TargetError, UserError, collecting

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.workload import Workload
    from loadgen.runs.show import Show
    from loadgen.search.experiment import ExperimentPlan
    from loadgen.search.load_search import LoadSearch, SearchAnswer, TrialResult
    from loadgen.search.trials import Trials
    from loadgen.search.watch import Goal

Sustain = Annotated[
    bool | None,
    typer.Option(
        "--sustain/--no-sustain",
        help="Also confirm the load in a run twice as long, in which nothing may grow: else the peak is by the rules "
        "only.",
        show_default="--sustain in virtual time",
    ),
]
RunSpread = Annotated[
    str | None,
    typer.Option(
        "--run-spread",
        metavar="SHARE",
        help="Variation of the server from run to run, as known from repeats: 3%.",
    ),
]
OF_THE_SEARCH = ("slo", "goodput", "duration", "limit", "grace", "seed")
"""Options over the workload that stand in the plan of a search in another form, or not: each trial has its own seed."""


@add_options(
    without=(
        "trace_speed",
        "trace_loop",
        "request_rate",
        "concurrency",
        "burstiness",
        "num_requests",
        "warmup",
        "num_warmups",
        "schedule_seed",
        "keep",
        "repeat",
    ),
    help_texts={
        "duration": "Full length of a trial.",
        "seed": "Of the search; every trial derives its own.",
        "out": "Folder of the search.",
    },
    default_texts={
        "duration": "600s, of tasks at least 10 times what one may take",
    },
)
def search(
    invocation: Invocation,
    workload: WorkloadArgument = None,
    percentile: Annotated[
        str | None,
        typer.Option(
            "--percentile",
            metavar="P",
            rich_help_panel="SLO",
            help="Of every --slo term that names none: 99, 95, 99.9.",
        ),
    ] = None,
    over: Annotated[
        str,
        typer.Option(
            "--over",
            metavar="LOAD",
            help="rate (open loop), or concurrency (closed loop).",
            autocompletion=completion.complete_choice(lambda: ("rate", "concurrency")),
        ),
    ] = "rate",
    low: Annotated[
        float | None, typer.Option("--low", metavar="LOAD", min=0, help="Not below this load.")
    ] = None,
    high: Annotated[
        float | None, typer.Option("--high", metavar="LOAD", min=0, help="Not above this load.")
    ] = None,
    start: Annotated[
        float | None,
        typer.Option(
            "--start",
            metavar="LOAD",
            min=0,
            help="First load, without --low and --high. Default: 1; of a simulated target what its preset lets expect.",
        ),
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            "--precision",
            metavar="SHARE",
            help="Half width of the interval, as a share: 5%, or 0.05.",
        ),
    ] = "2%",
    max_probes: Annotated[
        int, typer.Option("--max-probes", metavar="N", min=1, help="Trials at most.")
    ] = 40,
    max_time: Annotated[
        str | None,
        typer.Option(
            "--max-time", metavar="TIME", help="Time of all trials together, at most: 2h, 90m."
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="FOLDER",
            help="Folder of a search that is not finished: go on, without its flags.",
        ),
    ] = None,
    sustain: Sustain = None,
    run_spread: RunSpread = None,
    dry_run: DryRunOption = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", rich_help_panel="Output", help="Print search.json instead of the table."
        ),
    ] = False,
) -> int:
    """Find the highest rate (or concurrency) at which every SLO term holds at its percentile, with an interval.

    Exit: 0 found, 1 no load holds or not confirmed, 2 wrong usage, 3 two trials in a row were not valid, or
    --max-time or --max-probes stopped it, 130 interrupted.

    Example: loadgen search rag --url http://HOST:8000 --slo ttft:2s --slo tpot:50ms -d 5m
    """
    from loadgen.core.execution.folder_names import alone
    from loadgen.core.workload import Closed
    from loadgen.repeated import capacity
    from loadgen.runs.show import shown
    from loadgen.search import experiment, trials
    from loadgen.search.load_search import NEAR, STEP, LoadSearch

    own_workload = (
        workload,
        invocation["trace"],
        invocation["dataset"],
        invocation["input_tokens"],
    ) != (None,) * 4
    if (
        resume is not None
        and not own_workload
        and (command := experiment.search_of(resume).command)
    ):
        return invocation.run_command_line(
            resume_arguments(command[1:], invocation.arguments, "--resume", resume)
        )
    faults, trial_ns, longest_s = list[LoadgenError](), 0, None
    closed = over == "concurrency"
    first_load = start or low or 1.0
    terms = _terms(invocation["slo"] or (), percentile)
    at_first_load: Any = (
        {"concurrency": max(1, round(first_load))} if closed else {"request_rate": first_load}
    )
    if over not in ("rate", "concurrency"):
        raise UserError(
            "unknown_name",
            f"nothing to search over: {over!r}",
            "--over",
            "known: rate, concurrency",
        )
    with collecting(faults):
        settings = invocation.settings()
        spread = spread_of_runs(run_spread, settings)
        half_width = _half_width(precision)
    length = invocation["duration"]
    with collecting(faults):
        checked = invocation.load_workload(
            workload, slo=terms, warmup=0, duration=length or "600s", **at_first_load
        )
        goal = None if faults else _goal(checked, settings, workload or "loadgen search")
        trial_ns = parse_option(
            "--duration", length, partial(units.duration_ns, bare="s")
        ) or capacity.default_trial_ns(checked)
    with collecting(faults):
        longest_s = parse_option("--max-time", max_time, units.seconds)
    with collecting(faults):
        _check_bounds(low, high)
    if resume is not None:
        with collecting(faults):
            experiment.search_of(resume)
    if faults:
        raise CombinedError(faults)
    assert goal is not None
    trial_workload = trials.probing(checked, trial_ns)
    if resume is None and not dry_run:
        invocation.move_existing_results(settings.out)
    folder = resume or settings.out or default_output_folder(f"search-{checked.name}")
    lowest = 1.0 if closed else low or min(first_load, 1e-3)
    trial_runner = trials.Trials(
        folder=folder,
        goal=goal,
        make=lambda ask: trials.loaded(trials.lasting(trial_workload, ask.lengths), ask.load),
        settings=settings,
        seed=experiment.seed_of(folder, checked.seed),
    )
    has_bounds = low is not None and high is not None
    from loadgen.core.execution.backend import filling_rate

    about = None if closed or start or low else filling_rate(checked, settings)
    load_search = LoadSearch(
        low=float(math.ceil(max(1.0, low or 1.0))) if closed else lowest,
        high=float(max(1, math.floor(high or 1e6))) if closed else high or 1e6,
        start=None
        if has_bounds
        else first_load
        if about is None
        else min(about / math.sqrt(NEAR), high or math.inf),
        step=STEP if about is None else NEAR,
        precision=half_width,
        most_probes=max_probes,
        most_s=longest_s,
        whole=closed or any(isinstance(stage.arrival, Closed) for stage in trial_workload.stages),
        longer=longer(sustain, settings),
        run_spread=spread,
        trial_s=None if settings.virtual else trial_ns / 1e9,
        requires_steady=not closed,
        may_extend=sustain is not False,
        load_s=trial_ns / 1e9,
    )
    plan = experiment.ExperimentPlan(
        by="search",
        kind="concurrency" if closed else "request_rate",
        workload=workload or str(invocation["trace"] or invocation["dataset"] or checked.name),
        source_text=checked.source_text,
        target=settings.shown,
        metadata=dict(settings.metadata),
        flags=_flags(invocation, checked, settings, trial_ns),
        seed=trial_runner.seed,
        command=settings.command,
    )
    if dry_run:
        return _dry_run(
            load_search,
            trial_runner,
            invocation,
            trial_s=trial_ns / 1e9,
            is_load_known=about is not None or bool(start or low),
        )
    show = shown(invocation, quiet=True, has_line_per_step=True)
    with alone(folder):
        unit = experiment.unit_of(plan, experiment.counted_by(trial_workload))
        return perform(
            load_search,
            trial_runner,
            plan,
            show,
            unit=unit,
            as_json=as_json,
            trial_s=trial_ns / 1e9,
        )


def _dry_run(
    load_search: LoadSearch,
    trial_runner: Trials,
    invocation: Invocation,
    *,
    trial_s: float,
    is_load_known: bool,
) -> int:
    """Print what a search would do, or what is left of it, and return the exit code."""
    from loadgen.search import experiment
    from loadgen.search.forecast import DryRun
    from loadgen.search.load_search import NextTrial, resume

    resume(load_search, experiment.told(trial_runner.folder))
    settings = trial_runner.settings
    first = load_search.ask() or NextTrial(
        number=0, load=load_search.low, kind="probe", early_under=False
    )
    DryRun(
        load_search,
        trial_runner.make(first),
        settings,
        invocation.budget(),
        trial_s=trial_s,
        whole=bool(trial_runner.goal.whole) or settings.virtual,
        is_load_known=is_load_known,
    ).show()
    return OK


def _check_bounds(low: float | None, high: float | None) -> None:
    """Raise UserError if the lowest load of a search is not below the highest."""
    if low and high and low >= high:
        where = f"--low {low:g} --high {high:g}"
        hint = "give --low a smaller number than --high"
        raise UserError("out_of_range", "the lowest load is not below the highest", where, hint)


def _terms(asked: Sequence[str], percentile: str | None) -> tuple[str, ...]:
    """Return the typed terms of an SLO, with `percentile` added to those that have none."""
    from loadgen.core.slo import ATTAINMENT

    return tuple(
        term
        if percentile is None or term.count(":") != 1 or term.lstrip("+").startswith(ATTAINMENT)
        else f"{term}:p{percentile}"
        for term in asked
    )


def _goal(workload: Workload, settings: Settings, where: str) -> Goal:
    """What has to hold, of what can be judged. Raises UserError for nothing."""
    from loadgen.core.execution import run_header
    from loadgen.core.slo import Slo
    from loadgen.search.watch import Goal

    slo, why = run_header.judged_slo(workload.slo, settings)
    classes, of_classes = run_header.class_plans(workload, settings)
    if any(one.slo != slo for one in classes):  # as `run` judges them: each class by its own
        named = tuple(f"class {one.name}" for one in classes if one.slo is not None)
        slo, why, whole = Slo(), why | of_classes, named
    else:
        whole = ("tasks",) if slo is not None and slo.task is not None else ()
    if slo is not None and (slo != Slo() or whole):
        return Goal(slo=slo, whole=whole)
    if why:
        what = f"nothing of the SLO can be judged. {next(iter(why))}"
        raise UserError("no_slo", what, f"--api {settings.api}", "--slo e2e:500ms")
    raise UserError(
        "no_slo", "no SLO to search under", where, "give --slo ttft:2s --slo tpot:200ms"
    )


def _flags(
    invocation: Invocation, checked: Workload, settings: Settings, trial_ns: int
) -> dict[str, Any]:
    """What was typed of each trial, for the plan of the search."""
    from loadgen.core.workload.flags import select_load_options
    from loadgen.search.experiment import of_requests

    flags: dict[str, Any] = {
        "slo": ", ".join(_slo_texts(checked)),
        "duration": f"{trial_ns / 1e9:g} s",
    }
    if invocation["limit"]:
        flags["limit"] = ", ".join(invocation["limit"])
    if invocation["grace"] and checked.grace_ns is not None:
        flags["grace"] = f"{checked.grace_ns / 1e9:g} s"
    others = {
        name: value
        for name, value in select_load_options(invocation.options).items()
        if name not in OF_THE_SEARCH
    }
    return flags | {name: str(value) for name, value in others.items()} | of_requests(settings)


def longer(sustain: bool | None, settings: Settings) -> float:
    """The value of `LoadSearch.longer`: 1 where no longer confirmation is wanted."""
    from loadgen.core.metrics.sustainable import LONGER

    return LONGER if (settings.virtual if sustain is None else sustain) else 1.0


def spread_of_runs(text: str | None, settings: Settings) -> float | None:
    """The value of `LoadSearch.run_spread`. Raises UserError.

    None: not told, to be learned. In virtual time a run repeats itself: 0.
    """
    share = parse_option("--run-spread", text, units.share)
    if share is None:
        return 0.0 if settings.virtual else None
    if not 0 <= share <= 0.2:
        raise UserError(
            "out_of_range",
            "a variation of more than 20 %",
            f"--run-spread {text}",
            "a share, like 3%",
        )
    return share


def _half_width(text: str) -> float:
    """The value of `LoadSearch.precision`. Raises UserError."""
    share = parse_share_option("--precision", text)
    if not 0.002 <= share <= 0.5:
        raise UserError(
            "out_of_range", "no precision of a search", f"--precision {text}", "from 0.2% to 50%"
        )
    return share


def _slo_texts(workload: Workload) -> Iterator[str]:
    """The SLO of a workload, and those of its classes, as text: ttft p99 2000 ms, tpot p99 200 ms."""
    from loadgen.core.slo import task_promise
    from loadgen.core.workload import Mix

    classes = workload.requests.classes if isinstance(workload.requests, Mix) else {}
    for name, slo in (
        ("", workload.slo),
        *((f"{name}: ", one.slo) for name, one in classes.items()),
    ):
        if slo is None:
            continue
        for term in slo.terms:
            yield f"{name}{term.metric} p{term.quantile * 100:g} {term.limit_ns / 1e6:g} ms"
        if slo.goodput_share is not None:
            yield f"{name}goodput {slo.goodput_share:.6g}"
        if slo.task is not None:
            within, wait = (
                None if ns is None else ns / 1e6 for ns in (slo.task.within_ns, slo.task.wait_ns)
            )
            yield f"{name}{slo.task.share:.6g} of tasks {task_promise(within, wait)}"


def perform(
    load_search: LoadSearch,
    trial_runner: Trials,
    plan: ExperimentPlan,
    show: Show,
    *,
    unit: str,
    as_json: bool,
    trial_s: float,
    silent: bool = False,
) -> int:
    """Run trials until the search needs no more, print the answer and return the exit code.

    Continues from the trials already in the folder, which the caller has taken (`folder_names.alone`). trial_s: length
    of the load of a trial. silent: print no answer on stdout.
    """
    from loadgen.search import experiment
    from loadgen.search import text as report
    from loadgen.search.ahead import ahead
    from loadgen.search.forecast import describe_forecast, forecast_search
    from loadgen.search.kind import ended
    from loadgen.search.load_search import exit_code, resume
    from loadgen.search.trials import Interrupted

    earlier_trials = experiment.begin(trial_runner.folder, plan)
    resume(load_search, earlier_trials)
    if earlier_trials:
        say(
            f"going on with {trial_runner.folder}: {format.counted(len(earlier_trials), 'trial is', 'trials are')} done"
        )
    if trial_runner.settings.backend.simulated:
        say("SIMULATED: no real server is measured")
    elif (target_count := len(trial_runner.settings.endpoints)) > 1:
        say(
            f"load over {format.counted(target_count, 'target')}: every rate is that of all of them together"
        )
    say(f"search in {trial_runner.folder}: {', '.join(trial_runner.goal.promised)}")
    say(f"repeat with --seed {trial_runner.seed}")
    whole = bool(trial_runner.goal.whole)

    def left() -> tuple[float, float | None]:
        """Trials that are left, and how long they take by what those of this process took."""
        # in virtual time what is decided early costs as much: it is simulated whole, or nearly
        virtual, of_this = trial_runner.settings.virtual, load_search.told[len(earlier_trials) :]
        found = ahead(load_search, whole=whole or virtual, trial_s=trial_s)
        lengths = sum(one.ask.lengths if virtual else one.spent_s / trial_s for one in of_this)
        return found.trials, show.spent_s / lengths * found.lengths if lengths else None

    trial_runner.hearers, short = show.hearers, ""
    expected = forecast_search(load_search, trial_s, whole=whole)
    if expected is not None:
        words = describe_forecast(expected, virtual=trial_runner.settings.virtual)
        say(f"expected: {words}{show.cost_per_time(expected.seconds, trial_runner.settings)}")
    trial_runner.go_on = experiment.resuming(trial_runner.folder, plan)
    trial_runner.keep(load_search)
    show.begin(load_search.most_probes - len(earlier_trials), at_most=True)
    try:
        while (ask := load_search.ask()) is not None:
            show.step(report.asking(ask, unit), left())
            trial = trial_runner.run(ask)
            load_search.tell(trial)
            trial_runner.keep(load_search)
            show.end_step(report.told(trial))
            if not short and unit != report.QUERIES and (short := report.too_short(trial, trial_s)):
                say(f"note: {short}")
    except TargetError as error:
        if not load_search.told:
            raise
        say(str(error))
        load_search.stop("nodes" if error.code == "node_lost" else "gone")
    except (KeyboardInterrupt, Interrupted) as broken_off:
        if (
            isinstance(broken_off, KeyboardInterrupt) and not load_search.told
        ):  # before any load: nothing is left
            raise
        load_search.stop("interrupted")
    answer = trial_runner.finish(load_search)
    if silent:
        say(f"search in {trial_runner.folder}: {report.ending(answer)}")
    elif as_json:
        sys.stdout.write((trial_runner.folder / experiment.ANSWER).read_text("utf-8"))
    else:
        print_report(ended(trial_runner.folder))
        say(
            f"results in {trial_runner.folder}{_go_on(answer, load_search.told, trial_runner.folder, plan)}"
        )
    return exit_code(answer)


def _go_on(
    answer: SearchAnswer, told: Sequence[TrialResult], folder: Path, plan: ExperimentPlan
) -> str:
    """How to go on, where something is left to be done."""
    from loadgen.search.experiment import going_on, resuming

    command = going_on(answer, told, resuming(folder, plan))
    return f"; go on with: {command}" if command else ""
