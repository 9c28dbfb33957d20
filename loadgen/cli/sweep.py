"""`loadgen sweep`: run one workload at several loads into one folder; the same command continues a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadgen.cli import target
from loadgen.cli.repeats import Repeat, RepeatMost, RepeatPause, RepeatWithin
from loadgen.cli.run import ConcurrencyRamp

if TYPE_CHECKING:
    from loadgen.execution.plan import Settings
    from loadgen.metrics.repeats import RepeatSummary, Repetition
    from loadgen.metrics.summary import Summary
    from loadgen.workload import Workload

PER_LANE = 5  # minimum requests per lane of a closed-loop level


def sweep(
    workload: Annotated[
        str, typer.Argument(help="A workload file, or the name of a packaged one: qa, rag, summarization, agentic.")
    ],
    concurrency: Annotated[
        str | None,
        typer.Option("--concurrency", "-c", "--max-concurrency", help="Closed loop: 1,2,4,8 or 1,2,4,...,512."),
    ] = None,
    request_rate: Annotated[
        str | None, typer.Option("--request-rate", "--rate", help="Open loop: 1,2,5,10 or 2,4,...,20 per second.")
    ] = None,
    concurrency_ramp: ConcurrencyRamp = None,
    num_requests: Annotated[
        str | None,
        typer.Option(
            "--num-requests",
            "--num-prompts",
            "-n",
            help="Of each level; else as the workload says, and at least 5 for each lane.",
        ),
    ] = None,
    duration: Annotated[str | None, typer.Option("--duration", "-d", help="Of each level: 30s, 5m.")] = None,
    warmup: Annotated[
        str | None, typer.Option("--warmup", help="Unmeasured load before each level: 10s, 20req.")
    ] = None,
    grace: target.Grace = None,
    timeout: Annotated[str | None, typer.Option("--timeout", help="Longest time for one request.")] = None,
    slo: Annotated[
        list[str] | None, typer.Option("--slo", help="ttft:2s, tpot:200ms:p95, goodput:99%. Repeatable.")
    ] = None,
    goodput: Annotated[list[str] | None, typer.Option("--goodput", help="ttft:2000 tpot:200, in milliseconds.")] = None,
    input_tokens: Annotated[str | None, typer.Option("--input-tokens", "--isl", help="Prompt length.")] = None,
    output_tokens: Annotated[str | None, typer.Option("--output-tokens", "--osl", help="Output length.")] = None,
    seed: Annotated[
        str | None,
        typer.Option(
            "--seed",
            help="Of lengths and arrivals, the same for every level; each has texts of its own. Without it a fresh "
            "one, printed.",
        ),
    ] = None,
    salt: target.Salt = None,
    limit: Annotated[list[str] | None, typer.Option("--limit", help="Change a limit of the verdict.")] = None,
    repeat: Repeat = None,
    repeat_most: RepeatMost = None,
    repeat_within: RepeatWithin = None,
    repeat_pause: RepeatPause = None,
    url: target.Urls = None,
    targets: target.TargetsFile = None,
    route: target.RouteTo = "auto",
    on_target_failure: target.OnTargetFailure = "continue",
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
    no_stream: target.NoStream = False,
    client: target.Client = "wire",
    server_metrics: target.ServerMetrics = None,
    gpus: target.Gpus = None,
    shape: target.Shape = "",
    region: target.Region = "",
    metadata: target.Metadata = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Its folder; the same one again goes on where it stopped.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="A progress line instead of the live view.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the curve as JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
) -> int:
    """Run a workload at several loads: the throughput-latency curve, its knee, tokens/s per GPU against per user.

    Exit: 0, 2 wrong usage, 3 unreachable or no level is valid, 130 interrupted.
    """
    from dataclasses import replace
    from datetime import datetime

    from loadgen.cli.repeats import repetition
    from loadgen.errors import Fault, Faults, UserError
    from loadgen.execution.folder_names import run_id
    from loadgen.results import store
    from loadgen.search import sweep as levels
    from loadgen.workload.flags import Overrides

    overrides = Overrides(
        concurrency_ramp=concurrency_ramp, num_requests=num_requests, duration=duration, warmup=warmup, grace=grace,
        timeout=timeout, slo=tuple(slo or ()), goodput=tuple(goodput or ()), input_tokens=input_tokens,
        output_tokens=output_tokens, seed=seed, salt=salt, limit=tuple(limit or ()),
    )  # fmt: skip
    faults: list[Fault] = []
    how: Repetition | None = None
    try:
        how = repetition(repeat, repeat_most, repeat_within, repeat_pause)
    except Faults as found:
        faults += found.faults
    settings: Settings | None = None
    grid: dict[float, Workload] = {}
    kind: levels.Kind = "concurrency" if concurrency is not None else "request_rate"
    try:
        settings = target.given(locals(), stream=not no_stream, client=client, out=out)
    except Faults as found:
        faults += found.faults
    try:
        if (concurrency is None) == (request_rate is None):
            hint = "either --concurrency 1,2,4,...,64 or --request-rate 1,2,4,...,64"
            raise UserError("one kind of levels is needed", "loadgen sweep", hint)
        flag, text = ("--concurrency", concurrency) if concurrency else ("--request-rate", request_rate)
        for amount in levels.grid(text or "", flag, kind):
            grid[amount] = _level(workload, overrides, kind, amount)
    except Faults as found:
        faults += found.faults
    except UserError as fault:
        faults.append(fault)
    if faults or settings is None or how is None:
        raise Faults(faults)
    name = run_id(f"sweep-{next(iter(grid.values())).name}", datetime.now().astimezone())
    parent = settings.out or Path("results") / name
    settings = replace(settings, out=parent, leave_out_first_round=kind == "concurrency")
    with store.nothing_left(parent):
        if repeat is not None:
            return _repeated(how, workload, grid, kind, overrides, settings, plain=plain, as_json=as_json)
        return _run(workload, grid, kind, overrides, settings, plain=plain, as_json=as_json, as_markdown=as_markdown)


def _level(name: str, overrides: Any, kind: str, amount: float) -> Workload:
    """The workload at one level. A closed loop without a given length gets at least PER_LANE requests per lane."""
    from dataclasses import replace

    from loadgen.errors import UserError
    from loadgen.workload import load

    if kind == "request_rate":
        return load(name, replace(overrides, request_rate=f"{amount:g}"))
    at_level = replace(overrides, concurrency=f"{amount:g}")
    workload = load(name, at_level)
    count = next((stage.count for stage in workload.stages if stage.measured), None)
    if overrides.num_requests is not None and count is not None and count < amount:
        what = f"{count:,} requests are fewer than {amount:,.0f} lanes: so many would never be in flight"
        raise UserError(what, f"--num-requests {count}", f"--num-requests {PER_LANE * amount:g}, or leave it out")
    if (
        overrides.num_requests is None
        and overrides.duration is None
        and count is not None
        and count < PER_LANE * amount
    ):
        return load(name, replace(at_level, num_requests=f"{PER_LANE * amount:g}"))
    return workload


def _repeated(
    how: Repetition,
    name: str,
    grid: dict[float, Workload],
    kind: Any,
    overrides: Any,
    settings: Settings,
    *,
    plain: bool,
    as_json: bool,
) -> int:
    """The whole sweep several times, as r1, r2, ... of one folder: each level's runs lie as far apart as can be."""
    from dataclasses import replace

    import msgspec

    from loadgen import run_folder
    from loadgen.cli.show import say
    from loadgen.errors import INTERRUPTED, UserError
    from loadgen.execution.repeats import pause, seeded
    from loadgen.metrics.repeats import FILE, summarize_repeats
    from loadgen.report import repeats as table
    from loadgen.results import store
    from loadgen.search import sweep as levels

    parent = settings.out
    assert parent is not None
    if (parent / "plan.json").is_file():
        raise UserError("the folder holds a sweep that is not repeated", f"--out {parent}", "give another --out")
    by_level: dict[str, list[tuple[str, Summary]]] = {levels.name(kind, amount): [] for amount in grid}
    codes: list[int] = []
    within = how.within if how.count is None else None
    while len(codes) < how.at_most and (not codes or not all(map(how.enough, _summaries(by_level)))):
        number = len(codes) + 1
        if codes and not pause(how, f"r{number}", virtual=settings.virtual, say=say):
            codes.append(INTERRUPTED)
            break
        say(f"sweep r{number} of {how.words}")
        own = {amount: seeded(workload, number) for amount, workload in grid.items()}
        folder = parent / f"r{number}"
        with store.nothing_left(folder):
            codes.append(_run(name, own, kind, overrides, replace(settings, out=folder), plain=plain, quiet=True))
        for level, runs in by_level.items():
            if run_folder.is_run(folder / level):
                runs.append((f"r{number}/{level}", run_folder.open_run(folder / level).summary))
        if codes[-1] == INTERRUPTED:
            break
    made: list[tuple[str, RepeatSummary]] = [
        (level, summarize_repeats(runs, within=within)) for level, runs in by_level.items() if runs
    ]
    if not made:
        return INTERRUPTED
    document = msgspec.json.format(msgspec.json.encode({"levels": dict(made)}), indent=2)
    store.replace(parent / FILE, document + b"\n")
    print(document.decode() if as_json else table.render_levels(made), end="\n" if as_json else "", flush=True)
    say(f"results in {parent}: a sweep each in {', '.join(f'r{i + 1}' for i in range(len(codes)))}")
    return max(codes)


def _summaries(by_level: dict[str, list[tuple[str, Summary]]]) -> list[list[Summary]]:
    return [[summary for _, summary in runs] for runs in by_level.values()]


def _run(
    name: str,
    grid: dict[float, Workload],
    kind: Any,
    overrides: Any,
    settings: Settings,
    *,
    plain: bool,
    as_json: bool = False,
    as_markdown: bool = False,
    quiet: bool = False,
) -> int:
    from dataclasses import asdict

    import msgspec

    from loadgen import run_folder
    from loadgen.cli.show import Show, say
    from loadgen.errors import INTERRUPTED, OK, UNSOUND
    from loadgen.report import sweep as sweep_report
    from loadgen.results import checksums, store
    from loadgen.search import experiment, trials
    from loadgen.search import sweep as levels
    from loadgen.search.load_search import Goal, LoadSearch, NextTrial, resume
    from loadgen.slo import Slo

    first_workload = next(iter(grid.values()))
    parent = settings.out
    assert parent is not None
    seed = experiment.seed_of(parent, first_workload.seed)
    plan = experiment.ExperimentPlan(
        by="sweep",
        kind=kind,
        workload=name,
        source_text=first_workload.source_text,
        target=settings.shown,
        metadata=dict(settings.metadata),
        flags={field: str(value) for field, value in asdict(overrides).items() if value not in (None, ())},
        seed=seed,
    )
    trials_done = experiment.begin(parent, plan)
    say(f"seed: {seed}")
    folders_done = {trial.folder for trial in trials_done}
    if folders_done:
        count = sum(levels.name(kind, amount) in folders_done for amount in grid)
        say(f"going on with {parent}: {count} of {len(grid)} levels are done")
    trial_runner = trials.Trials(
        folder=parent,
        goal=Goal(slo=first_workload.slo or Slo(terms=())),
        make=lambda ask: grid[ask.load],
        settings=settings,
        seed=seed,
        seeded=False,
        watched=False,
        name=lambda ask: levels.name(kind, ask.load),
        execute=Show(as_json=False, plain=plain).perform,
    )
    interrupted = False
    try:
        for amount in grid:
            level = levels.name(kind, amount)
            if level not in folders_done:
                say(f"level {level}")
                trial_number = max((trial.ask.number for trial in trials_done), default=-1) + 1
                trials_done.append(
                    trial_runner.run(NextTrial(number=trial_number, load=amount, kind="level", early_under=False))
                )
    except trials.Interrupted:
        interrupted = True
    summaries = {folder.name: run_folder.open_run(folder).summary for folder in run_folder.runs_in(parent)}
    if not summaries:
        return INTERRUPTED
    sweep_curve = levels.curve(list(summaries.items()))
    # what the table says of a level is what the capacity is made from
    outcomes = {level.name: levels.outcome(level) for level in sweep_curve.levels}
    judged = [
        msgspec.structs.replace(
            trial, outcome=outcomes.get(trial.folder, "invalid") if sweep_curve.slo else trial.outcome
        )
        for trial in trials_done
    ]
    loads = sorted(trial.ask.load for trial in judged) or [1.0]
    answer = resume(
        LoadSearch(low=loads[0], high=loads[-1], start=loads[0]),
        [trial for trial in judged if trial.outcome != "invalid"],
    ).answer
    experiment.finish(parent, judged, answer, workload=first_workload, bound_why=levels.bound_why(sweep_curve))
    store.replace(parent / "sweep.md", sweep_report.render_markdown(sweep_curve).encode())
    store.replace(parent / "report.html", sweep_report.render_html(sweep_curve).encode())
    checksums.write(parent)
    if quiet:
        pass
    elif as_json:
        print(msgspec.json.format(msgspec.json.encode(sweep_curve), indent=2).decode())
    else:
        print(
            sweep_report.render_markdown(sweep_curve) if as_markdown else sweep_report.render_text(sweep_curve), end=""
        )
    say(f"results in {parent}, page: {parent / 'report.html'}, table: {parent / 'sweep.md'}")
    if interrupted:
        return INTERRUPTED
    return OK if any(trial.valid for trial in sweep_curve.levels) else UNSOUND
