"""`loadgen mlperf server|interactive|offline`: MLPerf-style tests. Parses flags, makes one call, prints."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Struct
from msgspec.structs import replace

from loadgen.answers.command import show_progress
from loadgen.cli import completion
from loadgen.cli.help import Command, Group
from loadgen.cli.invocation import Invocation
from loadgen.cli.option_parsers import parse_option
from loadgen.cli.options import TARGET_OPTIONS, add_options, default_output_folder
from loadgen.cli.output import print_result, print_report, print_status
from loadgen.cli.resume import resume_arguments
from loadgen.cli.run_options import LOAD_OPTIONS
from loadgen.core import units
from loadgen.core.errors import (
    INTERRUPTED,
    UNSOUND,
    CombinedError,
    LoadgenError,
    UserError,
    collecting,
)
from loadgen.search.search_command import RunSpreadOption, SustainOption

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.workload import Overrides, Workload
    from loadgen.mlperf.rules import Scenario, Test
    from loadgen.mlperf.run import Data

AsJson = Annotated[
    bool,
    typer.Option(
        "--json", rich_help_panel="Output", help="Print mlperf.json instead of the report."
    ),
]


def _benchmarks() -> list[str]:
    from loadgen.mlperf.rules import rules

    return list(rules().benchmarks)


@dataclass(frozen=True, kw_only=True)
class Common:
    """The options that the tests share."""

    benchmark: Annotated[
        str | None,
        typer.Option(
            "--benchmark",
            "-b",
            metavar="NAME",
            help="llama2-70b, llama3.1-8b, ... (see docs/reference/mlperf.md).",
            autocompletion=completion.complete_choice(_benchmarks),
        ),
    ] = None
    round_name: Annotated[
        str | None,
        typer.Option(
            "--round", metavar="ROUND", help="Of the rules: its limits and seeds. v5.1, v6.1."
        ),
    ] = None
    dataset: Annotated[
        Path | None,
        typer.Option(
            "--dataset",
            metavar="FILE",
            help="The official data set (.pkl, .jsonl, .parquet), when you have it.",
        ),
    ] = None
    mean_output: Annotated[
        float | None,
        typer.Option(
            "--mean-output",
            metavar="TOKENS",
            help="Of the synthetic set, to match a published row's tokens/request.",
        ),
    ] = None
    mean_input: Annotated[
        float | None, typer.Option("--mean-input", metavar="TOKENS", help="Of the synthetic set.")
    ] = None
    min_duration: Annotated[
        str | None,
        typer.Option(
            "--min-duration",
            metavar="TIME",
            help="Instead of the rules' 10m; a bare number: seconds. Named in the result.",
        ),
    ] = None
    harness: Annotated[
        str,
        typer.Option(
            "--harness",
            metavar="NAME",
            help="own, or loadgen: the official LoadGen issues the queries.",
        ),
    ] = "own"
    as_json: AsJson = False


app = typer.Typer(
    name="mlperf",
    help="MLPerf-style tests, unofficial: LoadGen's schedule, arithmetic and verdict against any endpoint.",
    rich_markup_mode=None,
    cls=Group,
    no_args_is_help=True,
)


with_options = add_options(
    without=(
        *(LOAD_OPTIONS - {"grace", "seed", "salt"}),
        "keep",
        "stream",
        "repeat",
    ),
    help_texts={
        "grace": (
            "How long queries may go on after the last one is issued. What it cuts did not "
            "complete, so the result is INVALID."
        ),
        "seed": "Of the synthetic set's texts; lengths and arrivals are those of the rules.",
        "out": "Results folder.",
    },
    default_texts={"grace": "without a limit, as LoadGen"},
)


@app.command(
    "interactive",
    cls=Command,
    help="As server, with Interactive's tighter limits: LoadGen knows no other difference.\n\n"
    "Example: loadgen mlperf interactive -b llama2-70b --url http://HOST:8000 --target-qps 20",
)
@app.command("server", cls=Command)
@with_options
def limited(
    invocation: Invocation,
    common: Common,
    target_qps: Annotated[
        float | None,
        typer.Option(
            "--target-qps", metavar="RATE", min=0.001, help="Poisson arrivals per second."
        ),
    ] = None,
    find_peak: Annotated[
        bool,
        typer.Option(
            "--find-peak", help="Search the highest rate whose official run is VALID, then run it."
        ),
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="FOLDER",
            help="Folder of a --find-peak that was interrupted: go on, without its flags.",
        ),
    ] = None,
    sustain: SustainOption = None,
    run_spread: RunSpreadOption = None,
) -> int:
    """The Server scenario: Poisson arrivals at a target rate, p99 limits on TTFT and TPOT, at least 600 s.

    Exit: 0 VALID, 1 a limit missed, 3 too short, too few, incomplete or not a sound measurement.

    Example: loadgen mlperf server -b llama2-70b --url http://HOST:8000 --find-peak
    """
    from loadgen.core.execution.folder_names import check_no_results, locked_folder
    from loadgen.search import experiment
    from loadgen.search.search_plan import choose_sustain_factor, parse_run_spread

    if (
        resume is not None
        and common.benchmark is None
        and (command := experiment.read_plan(resume).command)
    ):
        return invocation.run_command_line(
            resume_arguments(command[1:], invocation.arguments, "--resume", resume, depth=2)
        )
    scenario: Scenario = "interactive" if invocation.command == "interactive" else "server"
    test, settings, overrides = _checked(invocation, common, scenario, find_peak=find_peak)
    if target_qps is None and not find_peak:
        raise UserError(
            "missing_option", "no rate", "--target-qps", "give --target-qps 182, or --find-peak"
        )
    if resume is not None and not find_peak:
        raise UserError(
            "no_effect", "only a search can be resumed", "--resume", "give --find-peak as well"
        )
    if resume is not None:
        experiment.read_plan(resume)
    spread = parse_run_spread(run_spread, settings)
    if resume is None:
        invocation.move_existing_results(settings.out)
    folder = resume or settings.out or _new_name(test)
    if not find_peak:
        check_no_results(folder)
    with locked_folder(folder):
        load = _prepared(invocation, common, test, settings, overrides, folder)
        if find_peak:
            return _find_peak(
                load, folder, target_qps, choose_sustain_factor(sustain, settings), spread
            )
        assert target_qps is not None
        return _run_once(load, folder, target_qps)


@app.command(cls=Command)
@with_options
def offline(
    invocation: Invocation,
    common: Common,
    target_qps: Annotated[
        float | None,
        typer.Option(
            "--target-qps",
            "--expected-qps",
            metavar="RATE",
            min=0.001,
            help="Expected samples/s: sizes the query for 600 s.",
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            "-c",
            metavar="N",
            min=1,
            help="In flight over HTTP, per target (default 1024).",
        ),
    ] = None,
) -> int:
    """The Offline scenario: one query of all samples, tokens per second until the last one is done.

    Without --target-qps one pass of the data set is run first, to size the query so that it lasts 600 s.
    Exit: 0 VALID, 3 too short or incomplete.

    Example: loadgen mlperf offline -b llama2-70b --url http://HOST:8000
    """
    from loadgen.core.execution.folder_names import check_no_results, locked_folder
    from loadgen.mlperf import run as mlperf_run

    test, settings, overrides = _checked(invocation, common, "offline")
    invocation.move_existing_results(settings.out)
    folder = settings.out or _new_name(test)
    check_no_results(folder)
    with locked_folder(folder):
        load = _prepared(invocation, common, test, settings, overrides, folder)
        lanes = concurrency or (None if settings.virtual else mlperf_run.LANES)
        lanes = lanes and lanes * len(settings.endpoints)
        qps = target_qps or _measured_rate(load, folder, lanes)
        return INTERRUPTED if qps is None else _run_once(load, folder, qps, lanes)


@app.command(cls=Command)
@add_options(
    only=TARGET_OPTIONS,
    without=("stream",),
    help_texts={"tokenizer": "Makes the token ids of mlperf_log_accuracy.json."},
)
def accuracy(
    invocation: Invocation,
    benchmark: Annotated[
        str, typer.Option("--benchmark", "-b", metavar="NAME", help="llama2-70b.")
    ],
    dataset: Annotated[
        Path,
        typer.Option(
            "--dataset", metavar="FILE", help="The official data set, with its reference answers."
        ),
    ],
    round_name: Annotated[
        str | None, typer.Option("--round", metavar="ROUND", help="Of the rules. v5.1, v6.1.")
    ] = None,
    lanes: Annotated[
        int,
        typer.Option("-c", "--concurrency", metavar="N", min=1, max=100_000, help="Asked at once."),
    ] = 64,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FOLDER", help="Results folder.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel="Output", help="Print mlperf_accuracy.json.")
    ] = False,
) -> int:
    """Accuracy mode: every sample once, scored by ROUGE against the rules' targets, and TEST06's checks.

    Nothing is timed. With --tokenizer it also writes mlperf_log_accuracy.json in LoadGen's form.

    Exit: 0 99 % is met, 1 it is missed, 2 wrong usage, 3 samples or answers are missing, or not reachable.

    Example: loadgen mlperf accuracy -b llama2-70b --dataset open_orca.pkl --url http://HOST:8000 --tokenizer ./llama2
    """
    from loadgen.core.execution.backend import serving
    from loadgen.core.execution.folder_names import check_no_results, locked_folder
    from loadgen.mlperf import accuracy as rules_of_accuracy
    from loadgen.mlperf import rules
    from loadgen.mlperf.accuracy_run import run
    from loadgen.mlperf.accuracy_text import report

    rules_of_accuracy.reference(benchmark)
    test = rules.test(benchmark, "offline", round_name)
    settings = invocation.settings(needs_text="accuracy is scored over texts")
    if settings.targets or settings.virtual:
        raise UserError(
            "unsupported",
            "accuracy mode asks one endpoint over HTTP",
            "--url",
            "--url http://HOST:8000",
        )
    folder = out or _new_name(test)
    check_no_results(folder)
    with locked_folder(folder), serving(settings) as served:
        result, reasons = run(
            test,
            dataset,
            served,
            folder,
            tokenizer=settings.tokenizer,
            lanes=lanes,
            tell=lambda done: show_progress("samples", done, test.samples),
            simulated=settings.backend.simulated,
        )
    print_result(result, report(result, reasons), as_json=as_json)
    if not as_json:
        print_status(f"results in {folder}")
    return int(result.exit_code)


@app.command(cls=Command)
def verdict(
    folder: Annotated[
        Path,
        typer.Argument(help="Of a run of loadgen mlperf; of a search, that of its confirmation."),
    ],
    as_json: AsJson = False,
) -> int:
    """The verdict of a stored run again, from its records. Nothing is written.

    Exit: as of the run; 3 when it differs from the stored one.

    Example: loadgen mlperf verdict results/mlperf-llama2-70b-server
    """
    from loadgen.core.run_folder import kept_summary
    from loadgen.mlperf import run, text
    from loadgen.runs.part_sections import part_sections

    stored = run.read(folder)
    summary = kept_summary(folder)
    result = run.again(folder, summary)
    print_result(
        result,
        text.report(result, gpus=summary.target.gpus, parts=part_sections(summary)),
        as_json=as_json,
    )
    if result != stored:
        print_status(
            "the records do not give the result that is stored beside them: one of the two was changed"
        )
        return UNSOUND
    return int(result.exit_code if run.sound(summary) else UNSOUND)


class _Load(Struct, frozen=True, kw_only=True):
    """A test with its data, and how it is sent."""

    test: Test
    data: Data
    settings: Settings
    drain_ns: int
    invocation: Invocation
    official: bool  # the official LoadGen issues the queries
    as_json: bool

    def workload(self, qps: float, lanes: int | None) -> Workload:
        from loadgen.mlperf import run as mlperf_run

        return mlperf_run.workload(
            self.test, self.data, qps=qps, lanes=lanes, drain_ns=self.drain_ns
        )


def _checked(
    invocation: Invocation, common: Common, scenario: Scenario, *, find_peak: bool = False
) -> tuple[Test, Settings, Overrides]:
    """The test, the settings and the options of the load. Raises Faults with all faults together."""
    from loadgen.mlperf import rules

    faults: list[LoadgenError] = []
    with collecting(faults):
        if common.benchmark is None:
            known = ", ".join(rules.rules().benchmarks)
            raise UserError(
                "missing_option", "which benchmark?", "--benchmark", f"give -b with one of {known}"
            )
        typed_text = common.min_duration
        shorter = parse_option("--min-duration", typed_text, units.seconds)
        if shorter is not None and shorter < 1:
            raise UserError(
                "out_of_range",
                "a test has at least a second",
                f"--min-duration {typed_text}",
                "10m",
            )
        test = rules.test(
            common.benchmark, scenario, common.round_name, min_duration_s=shorter or 0
        )
    with collecting(faults):
        settings = invocation.settings(needs_text="the rules are about generated tokens")
        if common.harness == "loadgen":
            faults += _official_loadgen_faults(invocation, settings, find_peak=find_peak)
    if common.harness not in ("own", "loadgen"):
        faults.append(
            UserError(
                "unknown_name",
                f"unknown harness {common.harness!r}",
                "--harness",
                "known: own, loadgen",
            )
        )
    if common.dataset is not None and (common.mean_output or common.mean_input):
        faults.append(
            UserError(
                "conflict",
                "the means are of the synthetic set",
                "--dataset",
                "leave --mean-output out",
            )
        )
    overrides = invocation.overrides()
    faults += overrides.errors
    if common.dataset is not None:
        faults += [
            UserError(
                "conflict",
                "the data set is sent as it stands",
                f"--{name} {invocation[name]}",
                f"leave --{name} out",
            )
            for name in ("seed", "salt")
            if invocation[name] is not None
        ]
    if faults:
        raise CombinedError(faults)
    return test, settings, overrides


def _official_loadgen_faults(
    invocation: Invocation, settings: Settings, *, find_peak: bool
) -> list[LoadgenError]:
    """The faults of flags that the official LoadGen cannot follow: one process, one endpoint, a fixed rate."""
    endpoints, workers = len(settings.endpoints), invocation["workers"]
    checks = (
        (
            endpoints > 1,
            f"it drives one endpoint, {endpoints} were given",
            "one address for all of them",
        ),
        (
            workers not in (None, "1", "auto"),
            f"it issues from one process, not from {workers}",
            "leave --workers out",
        ),
        (
            invocation["ray"] is not None,
            "it issues from one process, not from a cluster",
            "leave --ray out",
        ),
        (
            find_peak,
            "it tests one rate and searches none",
            "--find-peak first, then --target-qps with what it found",
        ),
        (invocation["grace"] is not None, "it waits for every query", "leave --grace out"),
        (
            invocation["server_metrics"] not in (None, ["off"]),
            "the servers' metrics are not read beside it",
            "leave --server-metrics out",
        ),
    )
    return [
        UserError(
            "unsupported",
            f"the official LoadGen: {problem}",
            "--harness loadgen",
            f"{hint}; or --harness own",
        )
        for wrong, problem, hint in checks
        if wrong
    ]


def _new_name(test: Test) -> Path:
    return default_output_folder(f"mlperf-{test.benchmark}-{test.scenario}")


def _prepared(
    invocation: Invocation,
    common: Common,
    test: Test,
    settings: Settings,
    overrides: Overrides,
    folder: Path,
) -> _Load:
    """The test with its data: the user's own, whose requests are written into the folder, or synthetic ones."""
    from loadgen.mlperf import run as mlperf_run

    if common.dataset is not None:
        data, test = mlperf_run.official(test, common.dataset, folder)
    else:
        data = mlperf_run.synthetic(
            test, mean_input=common.mean_input, mean_output=common.mean_output
        )
        data = data._replace(seed=overrides.seed, salt=overrides.salt)
    return _Load(
        test=test,
        data=data,
        settings=replace(settings, api=data.api or settings.api),
        drain_ns=mlperf_run.WAIT_NS if overrides.grace is None else overrides.grace,
        invocation=invocation,
        official=common.harness == "loadgen",
        as_json=common.as_json,
    )


def _measured_rate(load: _Load, folder: Path, lanes: int | None) -> float | None:
    """Measure the samples/s that determine the size of the query; None if the user interrupted.

    Runs one pass of the data set, and up to two longer trials while a trial takes less than a tenth of the minimum
    duration.
    """
    from loadgen.core.workload import with_unique_prompts
    from loadgen.mlperf import run as mlperf_run
    from loadgen.runs.run_display import create_display

    print_status("no --target-qps: one pass of the data set first, to size the query by")
    length_ns = load.test.min_duration_ns
    trial_load = replace(
        load, test=replace(load.test, min_duration_ns=length_ns // 5), drain_ns=mlperf_run.WAIT_NS
    )
    qps, execute = 1e-9, load.invocation.executor(create_display(load.invocation).event_handlers)
    for trial in range(1, 4):
        out = _unused_beside(folder, f"trial-{trial}")
        workload = with_unique_prompts(trial_load.workload(qps, lanes), f"trial-{trial}")
        summary, trial_folder = execute(workload, replace(load.settings, out=out))
        if summary.run.state == "interrupted":
            return None
        rate_and_length = mlperf_run.offline_rate(trial_folder)
        if rate_and_length is None:
            hint = "give --target-qps: expected samples/s"
            raise UserError(
                "no_figure", "the trial pass completed nothing", str(trial_folder), hint
            )
        qps, length_s = rate_and_length
        print_status(f"expected: {qps:,.4g} samples/s, from {length_s:,.3g} s in {trial_folder}")
        if length_s >= length_ns / 10e9:
            break
    return qps


def _unused_beside(folder: Path, name: str) -> Path:
    """The path of an unused folder beside `folder`, with `name` in its name."""
    candidates = (
        f"{folder.name}-{name}{suffix}"
        for suffix in ("", *(f"-{number}" for number in range(2, 1000)))
    )
    return next(path for path in map(folder.with_name, candidates) if not path.exists())


def _run_once(load: _Load, folder: Path, qps: float, lanes: int | None = None) -> int:
    """Perform one run, print its MLPerf result and return the exit code."""
    from loadgen.mlperf import run as mlperf_run
    from loadgen.runs.run_display import create_display

    print_status(f"MLPerf-style, unofficial; data: {load.data.name}")
    settings = replace(load.settings, out=folder)
    if load.official:
        from loadgen.mlperf import official_loadgen

        result, gpus = official_loadgen.perform(
            load.test, load.data, settings, qps=qps, lanes=lanes
        )
        return _print(result, folder, gpus, load.as_json)
    summary, folder = load.invocation.executor(create_display(load.invocation).event_handlers)(
        load.workload(qps, lanes), settings, folder=folder
    )
    result = mlperf_run.judge(folder, load.test, summary, data_name=load.data.name, qps=qps)
    return _print(
        result, folder, summary.target.gpus, load.as_json, mlperf_run.sound(summary), summary
    )


def _find_peak(
    load: _Load, folder: Path, qps: float | None, longer: float, run_spread: float | None
) -> int:
    """Search the highest VALID rate with the official seeds, then print the result of the confirming run."""
    from loadgen.core.results import checksums, store
    from loadgen.core.run_summary import summarize
    from loadgen.mlperf import run as mlperf_run
    from loadgen.mlperf.result import DISCLOSURE
    from loadgen.runs.run_display import create_display
    from loadgen.search import experiment
    from loadgen.search.search_run import SearchRun
    from loadgen.search.search_text import QUERIES_UNIT

    test, data = load.test, load.data
    print_status(f"MLPerf-style, unofficial; data: {data.name}")
    rate = qps or 10.0
    if (pass_s := test.samples / rate) > test.min_duration_ns / 1e9:
        print_status(
            f"a run ends with a whole pass of the {test.samples:,} samples: {pass_s:,.0f} s at {rate:g}/s, whatever "
            "the minimum duration; for a shorter trial a --dataset of fewer rows"
        )
    search, runner, plan = mlperf_run.peak(
        test,
        data,
        load.settings,
        folder,
        rate,
        load.drain_ns,
        sustain_length_factor=longer,
        run_spread=run_spread,
    )
    search_run = SearchRun(
        search=search,
        runner=runner,
        plan=plan,
        show=create_display(load.invocation, quiet=True, has_line_per_step=True),
        unit=QUERIES_UNIT,
        trial_s=max(test.min_duration_ns / 1e9, pass_s),
    )
    code = search_run.run("none" if load.as_json else "report")
    search_result = search.result
    is_shown_longer = search_result.sustained_load is not None and search_result.length_factor > 1
    kind = "sustain" if is_shown_longer else "confirm"
    confirmed = [
        trial
        for trial in search.results
        if trial.kind == kind
        and trial.has_passed
        and (kind == "confirm" or trial.sustained is not False)
    ]
    if not confirmed:
        print((folder / experiment.RESULT_FILE).read_text("utf-8") if load.as_json else DISCLOSURE)
        return code
    best = max(confirmed, key=lambda trial: trial.load)
    run_folder = folder / best.run_name
    summary = summarize(*store.read_run_lazily(run_folder))
    result = mlperf_run.judge(
        run_folder, test, summary, data_name=data.name, qps=best.load, search_result=search_result
    )
    mlperf_run.write(folder, result, test, *mlperf_run.of_summary(summary))
    checksums.write(folder)
    if not load.as_json:
        print()
    sound = mlperf_run.sound(summary)
    return max(code, _print(result, run_folder, summary.target.gpus, load.as_json, sound, summary))


def _print(
    result: Any,
    folder: Path,
    gpus: int | None,
    as_json: bool,
    sound: bool = True,
    summary: Any = None,
) -> int:
    from loadgen.mlperf import text
    from loadgen.mlperf.run import RESULT
    from loadgen.runs.part_sections import part_sections

    if as_json:
        sys.stdout.write((folder / RESULT).read_text("utf-8"))
    else:
        print_report(
            text.report(result, gpus=gpus, parts=() if summary is None else part_sections(summary))
        )
        print_status(f"results in {folder}, with LoadGen's log files")
    if summary is not None and summary.run.state == "interrupted":
        return INTERRUPTED
    return int(result.exit_code if sound else UNSOUND)
