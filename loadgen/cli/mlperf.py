"""`loadgen mlperf server|interactive|offline`: MLPerf-style tests. Parses flags, makes one call, prints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadgen.cli import target

if TYPE_CHECKING:
    from loadgen.errors import Fault
    from loadgen.execution.plan import Settings
    from loadgen.mlperf.rules import Scenario, Test
    from loadgen.mlperf.run import Data

Benchmark = Annotated[str, typer.Option("--benchmark", "-b", help="llama2-70b, llama3.1-8b, ... (see docs/mlperf.md).")]
RoundName = Annotated[str | None, typer.Option("--round", help="Of the rules: its limits and seeds. v5.1, v6.1.")]
TargetQps = Annotated[float | None, typer.Option("--target-qps", min=0.001, help="Poisson arrivals per second.")]
FindPeak = Annotated[
    bool, typer.Option("--find-peak", help="Search the highest rate whose official run is VALID, then run it.")
]
Resume = Annotated[
    Path | None, typer.Option("--resume", help="Folder of a --find-peak that was interrupted: go on with it.")
]
ExpectedQps = Annotated[
    float | None,
    typer.Option("--target-qps", "--expected-qps", min=0.001, help="Expected samples/s: sizes the query for 600 s."),
]
Dataset = Annotated[
    Path | None, typer.Option("--dataset", help="The official data set (.pkl, .jsonl, .parquet), when you have it.")
]
MeanOutput = Annotated[
    float | None, typer.Option("--mean-output", help="Of the synthetic set, to match a published row's tokens/request.")
]
MeanInput = Annotated[float | None, typer.Option("--mean-input", help="Of the synthetic set.")]
MinDuration = Annotated[
    float | None, typer.Option("--min-duration", min=1, help="Seconds, instead of the rules' 600. Named in the result.")
]
Grace = Annotated[
    str | None,
    typer.Option(
        "--grace",
        help="How long queries may go on after the last one is issued; default: without a limit, as LoadGen. What it "
        "cuts did not complete, so the result is INVALID.",
    ),
]
Harness = Annotated[str, typer.Option("--harness", help="own, or loadgen: the official LoadGen issues the queries.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Results folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print mlperf.json instead of the report.")]

app = typer.Typer(
    name="mlperf",
    help="MLPerf-style tests, unofficial: LoadGen's schedule, arithmetic and verdict against any endpoint.",
    rich_markup_mode=None,
    no_args_is_help=True,
)


@app.command("interactive", help="As server, with Interactive's tighter limits: LoadGen knows no other difference.")
@app.command("server")
def limited(
    context: typer.Context,
    benchmark: Benchmark,
    url: target.Urls = None,
    targets: target.TargetsFile = None,
    route: target.RouteTo = "auto",
    on_target_failure: target.OnTargetFailure = "continue",
    target_qps: TargetQps = None,
    find_peak: FindPeak = False,
    resume: Resume = None,
    round_name: RoundName = None,
    dataset: Dataset = None,
    mean_output: MeanOutput = None,
    mean_input: MeanInput = None,
    min_duration: MinDuration = None,
    sustain: target.Sustain = None,
    run_spread: target.RunSpread = None,
    grace: Grace = None,
    harness: Harness = "own",
    seed: target.TextSeed = None,
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
    out: Out = None,
    as_json: AsJson = False,
) -> int:
    """The Server scenario: Poisson arrivals at a target rate, p99 limits on TTFT and TPOT, at least 600 s.

    Exit: 0 VALID, 1 a limit missed, 3 too short, too few, incomplete or not a sound measurement.
    """
    return _run_limited("interactive" if context.info_name == "interactive" else "server", locals())


@app.command()
def offline(
    benchmark: Benchmark,
    url: target.Urls = None,
    targets: target.TargetsFile = None,
    route: target.RouteTo = "auto",
    on_target_failure: target.OnTargetFailure = "continue",
    target_qps: ExpectedQps = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-c", min=1, help="In flight over HTTP, per target (default 1024).")
    ] = None,
    round_name: RoundName = None,
    dataset: Dataset = None,
    mean_output: MeanOutput = None,
    mean_input: MeanInput = None,
    min_duration: MinDuration = None,
    harness: Harness = "own",
    seed: target.TextSeed = None,
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
    out: Out = None,
    as_json: AsJson = False,
) -> int:
    """The Offline scenario: one query of all samples, tokens per second until the last one is done.

    Without --target-qps one pass of the data set is run first, to size the query so that it lasts 600 s.
    Exit: 0 VALID, 3 too short or incomplete.
    """
    return _run_offline(locals())


@app.command()
def verdict(
    folder: Annotated[Path, typer.Argument(help="Of a run of loadgen mlperf; of a search, that of its confirmation.")],
    as_json: AsJson = False,
) -> int:
    """The verdict of a stored run again, from its records. Nothing is written.

    Exit: as of the run; 3 when it differs from the stored one.
    """
    import msgspec

    from loadgen.cli.show import say
    from loadgen.errors import UNSOUND
    from loadgen.mlperf import run
    from loadgen.report import mlperf as text
    from loadgen.report.text import parts
    from loadgen.run_folder import kept_summary

    stored = run.read(folder)
    summary = kept_summary(folder)
    result = run.again(folder, summary)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())
    else:
        print(text.render(result, gpus=summary.target.gpus, parts=parts(summary)), end="")
    if result != stored:
        say("the records do not give the result that is stored beside them: one of the two was changed")
        return UNSOUND
    return int(result.exit_code if run.sound(summary) else UNSOUND)


def _parse_flags(scenario: Scenario, flags: dict[str, Any]) -> tuple[Test, Settings]:
    """Parse the flags: the test and the settings. Raises Faults with all faults together."""
    from loadgen.errors import Faults, UserError
    from loadgen.mlperf import rules
    from loadgen.workload.flags import seed_and_salt

    faults: list[Fault] = []
    test = settings = None
    try:
        test = rules.test(flags["benchmark"], scenario, flags["round_name"], min_duration_s=flags["min_duration"] or 0)
    except UserError as fault:
        faults.append(fault)
    try:
        settings = target.given(flags, stream=True, client="wire", out=None)
    except Faults as several:
        faults += several.faults
    if flags["harness"] not in ("own", "loadgen"):
        faults.append(UserError(f"unknown harness {flags['harness']!r}", "--harness", "known: own, loadgen"))
    if flags["harness"] == "loadgen":
        faults += _official_loadgen_faults(flags, settings)
    if flags["dataset"] is not None and (flags["mean_output"] or flags["mean_input"]):
        faults.append(UserError("the means are of the synthetic set", "--dataset", "leave --mean-output out"))
    try:
        seed_and_salt(flags["seed"], flags["salt"])
    except Faults as several:
        faults += several.faults
    if flags["dataset"] is not None:
        faults += [
            UserError("the data set is sent as it stands", f"--{name} {flags[name]}", f"leave --{name} out")
            for name in ("seed", "salt")
            if flags[name] is not None
        ]
    if faults or test is None or settings is None:
        raise Faults(faults)
    return test, settings


def _official_loadgen_faults(flags: dict[str, Any], settings: Settings | None) -> list[Fault]:
    """The faults of flags that the official LoadGen cannot follow: one process, one endpoint, a fixed rate."""
    from loadgen.errors import UserError

    problems = []
    if settings is not None and len(settings.endpoints) > 1:
        problems.append(
            (f"it drives one endpoint, {len(settings.endpoints)} were given", "one address for all of them")
        )
    if flags["workers"] not in ("1", "auto"):
        problems.append((f"it issues from one process, not from {flags['workers']}", "leave --workers out"))
    if flags.get("find_peak"):
        problems.append(
            ("it tests one rate and searches none", "--find-peak first, then --target-qps with what it found")
        )
    if flags.get("grace") is not None:
        problems.append(("it waits for every query", "leave --grace out"))
    if flags["server_metrics"] not in (None, ["off"]):
        problems.append(("the servers' metrics are not read beside it", "leave --server-metrics out"))
    return [
        UserError(f"the official LoadGen: {problem}", "--harness loadgen", f"{hint}; or --harness own")
        for problem, hint in problems
    ]


def _data(test: Test, flags: dict[str, Any], folder: Path) -> tuple[Data, Test]:
    from loadgen.mlperf import run as mlperf_run
    from loadgen.workload.flags import seed_and_salt

    if flags["dataset"] is not None:
        return mlperf_run.official(test, flags["dataset"], folder)
    data = mlperf_run.synthetic(test, mean_input=flags["mean_input"], mean_output=flags["mean_output"])
    seed, salt = seed_and_salt(flags["seed"], flags["salt"])
    return data._replace(seed=seed, salt=salt), test


def _results_folder(test: Test, flags: dict[str, Any]) -> Path:
    """An unused folder for the results. Does not create it."""
    from datetime import datetime

    from loadgen.execution.folder_names import unused

    return unused(flags["out"], f"mlperf-{test.benchmark}-{test.scenario}", datetime.now().astimezone())


def _run_limited(scenario: Scenario, flags: dict[str, Any]) -> int:
    """Run a Server or Interactive test, or search its peak rate. Returns the exit code."""
    from loadgen.errors import UserError
    from loadgen.mlperf import run as mlperf_run
    from loadgen.results import store
    from loadgen.search import experiment

    test, settings = _parse_flags(scenario, flags)
    qps, find_peak = flags["target_qps"], flags["find_peak"]
    if qps is None and not find_peak:
        raise UserError("no rate", "--target-qps", "give --target-qps 182, or --find-peak")
    if flags["resume"] is not None and not find_peak:
        raise UserError("only a search can be resumed", "--resume", "give --find-peak as well")
    if flags["resume"] is not None and not (flags["resume"] / experiment.PLAN).is_file():
        raise UserError("no search to go on with", f"--resume {flags['resume']}", f"a folder with {experiment.PLAN}")
    flags["drain_ns"] = _drain_ns(flags)
    folder = flags["resume"] or _results_folder(test, flags)
    with store.nothing_left(folder):
        data, test = _data(test, flags, folder)
        settings = mlperf_run.settings_for(data, settings)
        target.run_spread(flags["run_spread"], settings)
        if find_peak:
            return _find_peak(test, data, settings, folder, qps, flags)
        return _run_once(test, data, settings, folder, qps, flags)


def _drain_ns(flags: dict[str, Any]) -> int:
    """How long queries may go on after the last one is issued. Raises UserError for what is not a duration."""
    from loadgen import units
    from loadgen.errors import UserError
    from loadgen.mlperf import run as mlperf_run

    if flags["grace"] is None:
        return mlperf_run.WAIT_NS
    try:
        return units.duration_ns(flags["grace"], bare="s")
    except units.Wrong as wrong:
        raise UserError(f"it {wrong}", f"--grace {flags['grace']}", wrong.hint) from None


def _run_offline(flags: dict[str, Any]) -> int:
    from loadgen.errors import INTERRUPTED
    from loadgen.mlperf import run as mlperf_run
    from loadgen.results import store

    test, settings = _parse_flags("offline", flags)
    folder = _results_folder(test, flags)
    with store.nothing_left(folder):
        data, test = _data(test, flags, folder)
        settings = mlperf_run.settings_for(data, settings)
        lanes = flags["concurrency"]
        if lanes is None and not settings.virtual:
            lanes = mlperf_run.LANES
        lanes = lanes and lanes * len(settings.endpoints)
        qps = flags["target_qps"]
        if qps is None:
            qps = _measured_rate(test, data, settings, folder, lanes)
            if qps is None:
                return INTERRUPTED
        return _run_once(test, data, settings, folder, qps, flags, lanes)


def _measured_rate(test: Test, data: Data, settings: Settings, folder: Path, lanes: int | None) -> float | None:
    """Measure the samples/s that determine the size of the query; None if the user interrupted.

    Runs one pass of the data set, and up to two longer trials while a trial takes less than a tenth of the minimum
    duration.
    """
    from dataclasses import replace

    from loadgen.cli.show import Show, say
    from loadgen.errors import UserError
    from loadgen.mlperf import run as mlperf_run
    from loadgen.workload import placed

    say("no --target-qps: one pass of the data set first, to size the query by")
    trial_test = replace(test, min_duration_ns=test.min_duration_ns // 5)
    qps, show = 1e-9, Show(as_json=False)
    for trial in range(1, 4):
        out = _unused_beside(folder, f"trial-{trial}")
        workload = placed(mlperf_run.workload(trial_test, data, qps=qps, lanes=lanes), f"trial-{trial}")
        summary, trial_folder = show.perform(workload, replace(settings, out=out))
        if summary.run.state == "interrupted":
            return None
        rate_and_length = mlperf_run.offline_rate(trial_folder)
        if rate_and_length is None:
            raise UserError(
                "the trial pass completed nothing", str(trial_folder), "give --target-qps: expected samples/s"
            )
        qps, length_s = rate_and_length
        say(f"expected: {qps:,.4g} samples/s, from {length_s:,.3g} s in {trial_folder}")
        if length_s >= test.min_duration_ns / 10e9:
            break
    return qps


def _unused_beside(folder: Path, name: str) -> Path:
    """The path of an unused folder beside `folder`, with `name` in its name."""
    candidates = (f"{folder.name}-{name}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 1000))))
    return next(path for path in map(folder.with_name, candidates) if not path.exists())


def _run_once(
    test: Test,
    data: Data,
    settings: Settings,
    folder: Path,
    qps: float,
    flags: dict[str, Any],
    lanes: int | None = None,
) -> int:
    """Perform one run, print its MLPerf result and return the exit code."""
    from dataclasses import replace

    from loadgen.cli.show import Show, say
    from loadgen.mlperf import run as mlperf_run

    say(f"MLPerf-style, unofficial; data: {data.name}")
    if flags["harness"] == "loadgen":
        from loadgen.mlperf import official_loadgen

        result, gpus = official_loadgen.perform(test, data, replace(settings, out=folder), qps=qps, lanes=lanes)
        return _print(result, folder, gpus, flags["as_json"])
    drain_ns = flags.get("drain_ns", mlperf_run.WAIT_NS)
    workload = mlperf_run.workload(test, data, qps=qps, lanes=lanes, drain_ns=drain_ns)
    summary, folder = Show(as_json=False).perform(workload, replace(settings, out=folder))
    result = mlperf_run.judge(folder, test, summary, data_name=data.name, qps=qps)
    return _print(
        result, folder, summary.target.gpus, flags["as_json"], sound=mlperf_run.sound(summary), summary=summary
    )


def _find_peak(
    test: Test, data: Data, settings: Settings, folder: Path, qps: float | None, flags: dict[str, Any]
) -> int:
    """Search the highest VALID rate with the official seeds, then print the result of the confirming run."""
    from loadgen.cli.search import perform
    from loadgen.cli.show import say
    from loadgen.metrics.summary import summarize
    from loadgen.mlperf import run as mlperf_run
    from loadgen.mlperf.result import DISCLOSURE
    from loadgen.results import checksums, store
    from loadgen.search import trials

    say(f"MLPerf-style, unofficial; data: {data.name}")
    rate = qps or 10.0
    if (pass_s := test.samples / rate) > test.min_duration_ns / 1e9:
        say(
            f"a run ends with a whole pass of the {test.samples:,} samples: {pass_s:,.0f} s at {rate:g}/s, whatever "
            "the minimum duration; for a shorter trial a --dataset of fewer rows"
        )
    as_json = flags["as_json"]
    search, trial_runner, plan = mlperf_run.peak(test, data, settings, folder, rate, flags["drain_ns"])
    search.longer = target.longer(flags["sustain"], settings)
    search.run_spread = target.run_spread(flags["run_spread"], settings)
    code = perform(search, trial_runner, plan, unit=" queries/s", as_json=False, silent=as_json)
    answer = search.answer
    kind = "confirm" if answer.steady is None or answer.lengths == 1 else "sustain"
    confirmed = [
        trial
        for trial in search.told
        if trial.ask.kind == kind and trial.outcome == "under" and (kind == "confirm" or trial.sustained is not False)
    ]
    if not confirmed:
        print((folder / trials.ANSWER).read_text() if as_json else DISCLOSURE)
        return code
    best = max(confirmed, key=lambda trial: trial.ask.load)
    run_folder = folder / best.folder
    summary = summarize(*store.read_run(run_folder))
    result = mlperf_run.judge(run_folder, test, summary, data_name=data.name, qps=best.ask.load, answer=answer)
    mlperf_run.write_result(folder, result, test, summary)
    checksums.write(folder)
    if not as_json:
        print()
    return max(code, _print(result, run_folder, summary.target.gpus, as_json, mlperf_run.sound(summary), summary))


def _print(result: Any, folder: Path, gpus: int | None, as_json: bool, sound: bool = True, summary: Any = None) -> int:
    from loadgen.cli.show import say
    from loadgen.errors import INTERRUPTED, UNSOUND
    from loadgen.report import mlperf as text
    from loadgen.report.text import parts

    if as_json:
        sys.stdout.write((folder / "mlperf.json").read_text())
    else:
        print(text.render(result, gpus=gpus, parts=() if summary is None else parts(summary)), end="")
        say(f"results in {folder}, with LoadGen's log files")
    if summary is not None and summary.run.state == "interrupted":
        return INTERRUPTED
    return int(result.exit_code if sound else UNSOUND)
