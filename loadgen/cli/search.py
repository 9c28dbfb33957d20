"""`loadgen search`: find the highest load at which an SLO holds. Parses flags, runs the trials, prints the answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadgen.cli import target

if TYPE_CHECKING:
    from loadgen.search.experiment import ExperimentPlan
    from loadgen.search.load_search import LoadSearch, SearchAnswer
    from loadgen.search.trials import Trials
    from loadgen.slo import Slo


def search(
    workload: Annotated[str, typer.Argument(help="A workload file, or the name of a packaged one.")],
    url: target.Urls = None,
    targets: target.TargetsFile = None,
    route: target.RouteTo = "auto",
    on_target_failure: target.OnTargetFailure = "continue",
    slo: Annotated[
        list[str] | None, typer.Option("--slo", help="ttft:2s, tpot:200ms:p95, goodput:99%. Repeatable.")
    ] = None,
    percentile: Annotated[
        str | None, typer.Option("--percentile", help="Of every --slo term that names none: 99, 95, 99.9.")
    ] = None,
    over: Annotated[str, typer.Option("--over", help="rate (open loop), or concurrency (closed loop).")] = "rate",
    low: Annotated[float | None, typer.Option("--low", min=0, help="Not below this load.")] = None,
    high: Annotated[float | None, typer.Option("--high", min=0, help="Not above this load.")] = None,
    start: Annotated[float | None, typer.Option("--start", min=0, help="First load, without --low and --high.")] = None,
    duration: Annotated[str, typer.Option("--duration", "-d", help="Full length of a probe.")] = "600s",
    grace: target.Grace = None,
    precision: Annotated[
        float, typer.Option("--precision", min=0.002, max=0.5, help="Half width of the interval, as a share.")
    ] = 0.02,
    max_probes: Annotated[int, typer.Option("--max-probes", min=1, help="Probes at most.")] = 40,
    max_time: Annotated[
        str | None, typer.Option("--max-time", help="Time of all probes together, at most: 2h, 90m.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Folder of a search that was interrupted: go on with it.")
    ] = None,
    sustain: target.Sustain = None,
    run_spread: target.RunSpread = None,
    limit: Annotated[
        list[str] | None, typer.Option("--limit", help="Change a limit of the verdict: send_lag_share:10%. Stored.")
    ] = None,
    seed: Annotated[
        str | None,
        typer.Option("--seed", help="Of the search; every probe derives its own. Without it a fresh one, printed."),
    ] = None,
    salt: target.Salt = None,
    model: target.Model = None,
    server: target.Server = "auto",
    api: target.Api = "chat",
    workers: target.Workers = "1",
    source: target.Sources = None,
    tokenizer: target.Tokenizer = None,
    extra_body: target.ExtraBody = None,
    header: target.Header = None,
    api_key_file: target.ApiKeyFile = None,
    cacert: target.CaCert = None,
    cert: target.Cert = None,
    cert_key: target.CertKey = None,
    insecure: target.Insecure = False,
    server_metrics: target.ServerMetrics = None,
    gpus: target.Gpus = None,
    shape: target.Shape = "",
    region: target.Region = "",
    metadata: target.Metadata = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the search.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print search.json instead of the table.")] = False,
) -> int:
    """Find the highest rate (or concurrency) at which every SLO term holds at its percentile, with an interval.

    Exit: 0 found, 1 no load holds or not confirmed, 2 wrong usage, 3 a probe was not valid, 130 interrupted.
    """
    import math
    from datetime import datetime

    from loadgen import units
    from loadgen.errors import Fault, Faults, UserError
    from loadgen.execution.folder_names import run_id
    from loadgen.search import experiment, trials
    from loadgen.search.load_search import Goal, LoadSearch
    from loadgen.workload import Closed, Overrides, load

    faults: list[Fault] = []
    settings = checked = None
    trial_ns, longest_s = 0, math.inf
    spread: float | None = None
    try:
        settings = target.given(locals(), stream=True, client="wire", out=None)
    except Faults as found:
        faults += found.faults
    if over not in ("rate", "concurrency"):
        faults.append(UserError(f"nothing to search over: {over!r}", "--over", "known: rate, concurrency"))
    closed = over == "concurrency"
    terms = tuple(
        term if percentile is None or term.count(":") != 1 or term.startswith("goodput") else f"{term}:p{percentile}"
        for term in slo or ()
    )
    first_load = start or low or 1.0
    overrides = Overrides(
        slo=terms, seed=seed, salt=salt, duration=duration, warmup=0, grace=grace, limit=tuple(limit or ()),
        **({"concurrency": max(1, round(first_load))} if closed else {"request_rate": first_load}),
    )  # fmt: skip
    try:
        checked = load(workload, overrides=overrides)
        if checked.slo is None:
            faults.append(UserError("no SLO to search under", workload, "give --slo ttft:2s --slo tpot:200ms"))
    except Faults as found:
        faults += found.faults
    try:
        trial_ns = units.duration_ns(duration, bare="s")
        longest_s = units.duration_ns(max_time, bare="s") / 1e9 if max_time else math.inf
    except units.Wrong as wrong:
        faults.append(UserError(f"it {wrong}", "--duration, --max-time", wrong.hint))
    try:
        spread = None if settings is None else target.run_spread(run_spread, settings)
    except UserError as found_spread:
        faults.append(found_spread)
    if low and high and low >= high:
        faults.append(UserError("the lowest load is not below the highest", f"--low {low:g} --high {high:g}", ""))
    if resume is not None and not (resume / experiment.PLAN).is_file():
        faults.append(UserError("no search to go on with", f"--resume {resume}", f"a folder with {experiment.PLAN}"))
    if faults or settings is None or checked is None:
        raise Faults(faults)
    slo_of_workload = checked.slo
    assert slo_of_workload is not None
    trial_workload = trials.probing(checked, trial_ns)
    folder = resume or out or Path("results") / run_id(f"search-{checked.name}", datetime.now().astimezone())
    lowest = 1.0 if closed else low or min(first_load, 1e-3)
    trial_runner = trials.Trials(
        folder=folder,
        goal=Goal(slo=slo_of_workload),
        make=lambda ask: trials.loaded(trials.lasting(trial_workload, ask.lengths), ask.load),
        settings=settings,
        seed=experiment.seed_of(folder, checked.seed),
    )
    has_bounds = low is not None and high is not None
    load_search = LoadSearch(
        low=float(math.ceil(max(1.0, low or 1.0))) if closed else lowest,
        high=float(max(1, math.floor(high or 1e6))) if closed else high or 1e6,
        start=None if has_bounds else first_load,
        precision=precision,
        most_probes=max_probes,
        most_s=longest_s,
        whole=closed or any(isinstance(stage.arrival, Closed) for stage in trial_workload.stages),
        longer=target.longer(sustain, settings),
        run_spread=spread,
    )
    plan = experiment.ExperimentPlan(
        by="search",
        kind="concurrency" if closed else "request_rate",
        workload=workload,
        source_text=checked.source_text,
        target=settings.shown,
        metadata=dict(settings.metadata),
        flags={"slo": _slo_text(slo_of_workload), "duration": f"{trial_ns / 1e9:g} s"}
        | ({"limit": ", ".join(limit)} if limit else {})
        | ({"grace": f"{checked.grace_ns / 1e9:g} s"} if grace and checked.grace_ns is not None else {}),
        seed=trial_runner.seed,
    )
    return perform(load_search, trial_runner, plan, unit=" in flight" if closed else "/s", as_json=as_json)


def _slo_text(slo: Slo) -> str:
    """The SLO as text: ttft p99 2000 ms, tpot p99 200 ms."""
    terms = [f"{term.metric} p{term.quantile * 100:g} {term.limit_ns / 1e6:g} ms" for term in slo.terms]
    return ", ".join([*terms, *([f"goodput {slo.goodput_share:.6g}"] if slo.goodput_share is not None else [])])


def perform(
    asking: LoadSearch, runs: Trials, plan: ExperimentPlan, *, unit: str, as_json: bool, silent: bool = False
) -> int:
    """Run trials until the search needs no more, print the answer and return the exit code.

    Continues from the trials already in the folder. A fault before the first trial leaves no folder. silent: print no
    answer on stdout.
    """
    from loadgen.results import store

    with store.nothing_left(runs.folder):
        return _run_trials(asking, runs, plan, unit, as_json, silent)


def _run_trials(
    load_search: LoadSearch, trial_runner: Trials, plan: ExperimentPlan, unit: str, as_json: bool, silent: bool
) -> int:
    from loadgen import format
    from loadgen.cli.show import say
    from loadgen.errors import TargetError
    from loadgen.report import search as report
    from loadgen.search import experiment
    from loadgen.search.load_search import resume
    from loadgen.search.trials import Interrupted

    earlier_trials = experiment.begin(trial_runner.folder, plan)
    resume(load_search, earlier_trials)
    if earlier_trials:
        say(f"going on with {trial_runner.folder}: {len(earlier_trials)} probes are done")
    simulated = (trial_runner.settings.url or "sim:").startswith("sim:")
    if simulated:
        say("SIMULATED: no real server is measured")
    elif (target_count := len(trial_runner.settings.endpoints)) > 1:
        say(f"load over {target_count} targets: every rate is that of all of them together")
    say(f"search in {trial_runner.folder}: {', '.join(trial_runner.goal.names)}")
    say(f"seed: {trial_runner.seed}")
    try:
        while (ask := load_search.ask()) is not None:
            say(report.asking(ask, unit))
            trial = trial_runner.run(ask)
            load_search.tell(trial)
            say(report.told(trial))
    except TargetError as error:
        if not load_search.told:
            raise
        say(str(error))
        load_search.stop("gone")
    except (KeyboardInterrupt, Interrupted):
        load_search.stop("interrupted")
    answer = trial_runner.finish(load_search)
    simulated = simulated or any(trial_done.figures.get("simulated") for trial_done in load_search.told)
    if silent:
        say(f"search in {trial_runner.folder}: {report.ENDINGS.get(answer.reason, answer.reason)}")
    elif as_json:
        sys.stdout.write((trial_runner.folder / "search.json").read_text())
    else:
        if plan.metadata:
            print(f"metadata: {format.pairs(plan.metadata)}")
        print(report.render(answer, load_search.told, trial_runner.goal, unit=unit, simulated=simulated), end="")
        say(f"results in {trial_runner.folder}; go on with --resume {trial_runner.folder}")
    return code(answer)


def code(answer: SearchAnswer) -> int:
    """The exit code of a search."""
    from loadgen import errors

    endings: dict[str, Any] = {
        "found": errors.OK,
        "highest": errors.OK,
        "invalid": errors.UNSOUND,
        "gone": errors.UNSOUND,
        "interrupted": errors.INTERRUPTED,
    }
    return int(endings.get(answer.reason, errors.SLO_MISSED))
