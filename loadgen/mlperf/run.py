"""Turns a test of the rules into a workload, and the folder of its run into a result with LoadGen's log files.

IO: writes the official data set as requests, reads records, writes the result. The load itself is an ordinary run
(`execution.run.execute`); `result.reduce` applies the rules to its records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from loadgen_sdk.wire_formats.server_profiles import Api
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.core import format
from loadgen.core.errors import UserError, missing_result
from loadgen.core.execution.plan import Settings
from loadgen.core.metrics import reasons, sustainable
from loadgen.core.metrics.summary import Summary
from loadgen.core.metrics.validity import has_high_error_rate
from loadgen.core.results import checksums, store
from loadgen.core.results.files import refuse_links
from loadgen.core.results.json_files import decode_json
from loadgen.core.results.record import STATUS
from loadgen.core.workload import (
    AtLeast,
    Closed,
    Constant,
    FromFile,
    ListedTokens,
    Poisson,
    Slo,
    Stage,
    Synthetic,
    Term,
    Workload,
)
from loadgen.mlperf import dataset, log_files, rules
from loadgen.mlperf import result as mlperf
from loadgen.search import experiment
from loadgen.search.goal import Goal
from loadgen.search.load_search import LoadSearch
from loadgen.search.search_results import CONFIRMING_KINDS, PlannedTrial, SearchResult
from loadgen.search.search_settings import SearchSettings
from loadgen.search.trial_runner import TrialRunner

WAIT_NS = 24 * 3_600 * 1_000_000_000  # LoadGen waits for every query without a limit
STALL_NS = 900 * 1_000_000_000
RESULT = "mlperf.json"
FILES = (RESULT, log_files.SUMMARY, log_files.DETAIL)
REQUESTS = "mlperf_requests.jsonl"
QUERIES = "mlperf_queries.parquet"  # of the official LoadGen, by our stamps
COLUMNS = ("slot", "stage", "status", "due_ns", "first_token_ns", "end_ns", "output_tokens")
MANY_PASSES = (
    10  # passes in the minimum duration from which completing the last pass adds at most a tenth
)
LANES = 1024  # default requests in flight in Offline over HTTP, per target


class Data(NamedTuple):
    """The requests of a workload made from a data set, and the data set's name for results.

    `seed`, `salt`: of generated texts; None: a fresh one in each run, the one of the seed.
    """

    requests: Synthetic | FromFile
    name: str
    api: Api | None  # the API that the prompts need: token ids go to completions; None: any
    seed: int | None = None
    salt: str | None = None


def synthetic(
    test: rules.Test, *, mean_input: float | None = None, mean_output: float | None = None
) -> Data:
    """The synthetic data set in LoadGen's order of issue: lengths repeat in every pass, texts do not."""
    spec = rules.rules().benchmarks[test.benchmark]
    lengths = dataset.synthetic(
        spec, benchmark=test.benchmark, mean_input=mean_input, mean_output=mean_output
    )
    order = dataset.issue_order(test)

    def listed(column: NDArray[np.int64]) -> ListedTokens:
        return ListedTokens(values=tuple(column[order].tolist()))

    return Data(
        Synthetic(input_tokens=listed(lengths.input), output_tokens=listed(lengths.output)),
        lengths.name,
        None,
    )


def official(test: rules.Test, path: Path, folder: Path) -> tuple[Data, rules.Test]:
    """The user's file as requests in LoadGen's order, and the test with the number of samples of that file.

    Writes the requests into `folder`. Answers end where the model stops, at the latest at the rules' maximum; sampling
    is greedy, as in the reference.
    """
    spec = rules.rules().benchmarks[test.benchmark]
    file = dataset.read_dataset(path, spec, benchmark=test.benchmark)
    test = replace(
        test, samples=len(file.prompts), min_queries=min(test.min_queries, len(file.prompts))
    )
    folder.mkdir(parents=True, exist_ok=True)
    requests_file = folder / REQUESTS
    with requests_file.open("wb") as output:
        for sample in dataset.issue_order(test):
            row = {"prompt": file.prompts[sample], "max_tokens": spec.max_output, "temperature": 0}
            output.write(msgspec.json.encode(row) + b"\n")
    return Data(
        FromFile(path=requests_file.resolve()), file.name, "completions" if file.tokens else None
    ), test


def workload(
    test: rules.Test, data: Data, *, qps: float, lanes: int | None = None, drain_ns: int = WAIT_NS
) -> Workload:
    """The test as a workload. Server and Interactive: Poisson arrivals by the round's seed and LoadGen's stop rule.

    Offline: the samples of LoadGen's single query, with `qps` the expected rate. All are due at once, or `lanes` are in
    flight: to a server that is kept full this is the same, and no client can hold a million sockets. `drain_ns`: how
    long queries may go on after the last one was issued; what it cuts did not complete, and the result is INVALID.
    """
    slo = None
    if test.scenario == "offline":
        arrival: Any = (
            Constant(rate=float("inf")) if lanes is None else Closed(concurrency=lanes, ramp_ns=0)
        )
        stage = Stage(
            name="load", arrival=arrival, duration_ns=None, count=rules.offline_samples(test, qps)
        )
    else:
        least = AtLeast(
            duration_ns=test.min_duration_ns, count=test.min_queries, passes_of=test.samples
        )
        stage = Stage(name="load", arrival=Poisson(rate=qps), duration_ns=None, at_least=least)
        slo = _limits(test)
    return Workload(
        name=f"mlperf-{test.benchmark}-{test.scenario}",
        description=f"{mlperf.DISCLOSURE} Data: {data.name}.",
        requests=data.requests,
        stages=(stage,),
        slo=slo,
        seed=data.seed,
        salt=data.salt,
        schedule_seed=test.seeds.schedule,
        grace_ns=drain_ns,
        timeout_ns=WAIT_NS,
        stall_timeout_ns=STALL_NS,
        source_text=f"# made by loadgen mlperf: {test.benchmark} {test.scenario}, round {test.round}\n",
    )


def _limits(test: rules.Test) -> Slo:
    """The limits of Server and Interactive."""
    assert test.ttft_ns is not None and test.tpot_ns is not None
    limits = (("ttft", test.ttft_ns), ("tpot_mlperf", test.tpot_ns))
    return Slo(
        terms=tuple(Term(metric=name, limit_ns=ns, quantile=test.percentile) for name, ns in limits)
    )


def probe(test: rules.Test, qps: float) -> rules.Test:
    """The test for a trial of the search at rate `qps`.

    Where a pass is short compared with the minimum duration, the trial does not complete its last pass. Otherwise it
    has the official length: a queue that grows for minutes can fail a long run at a rate that short trials sustain.
    """
    passes = qps * test.min_duration_ns / 1e9 / test.samples
    return replace(test, samples=1) if passes >= MANY_PASSES else test


def peak(
    test: rules.Test,
    data: Data,
    settings: Settings,
    folder: Path,
    start: float,
    drain_ns: int = WAIT_NS,
    *,
    sustain_length_factor: float = 1.0,
    run_spread: float | None = 0.0,
) -> tuple[LoadSearch, TrialRunner, experiment.ExperimentPlan]:
    """The search for the highest rate whose official run is VALID, with the official seeds.

    Returns the search, the runner of its trials, and the plan that identifies the search when it is resumed.
    """
    seed = experiment.choose_seed(folder, data.seed)

    def make_workload(trial: PlannedTrial) -> Workload:
        trial_test = test if trial.kind in CONFIRMING_KINDS else probe(test, trial.load)
        trial_test = replace(
            trial_test, min_duration_ns=round(trial_test.min_duration_ns * trial.length_factor)
        )
        return workload(trial_test, data, qps=trial.load, drain_ns=drain_ns)

    runner = TrialRunner(
        output_dir=folder,
        goal=Goal(slo=_limits(test), mlperf=True),
        make_workload=make_workload,
        settings=settings,
        seed=seed,
        has_seed_per_trial=False,
    )
    plan = experiment.ExperimentPlan(
        command_name="search",
        load_kind="request_rate",
        workload=f"mlperf {test.benchmark} {test.scenario}",
        source_text=f"round {test.round}, {test.min_duration_ns / 1e9:g} s, {test.samples} samples\n",
        target=settings.display_name,
        metadata=dict(settings.metadata),
        seed=seed,
        options={"data": data.name, **experiment.request_options(settings)}
        | ({"grace": f"{drain_ns / 1e9:g} s"} if drain_ns != WAIT_NS else {}),
        command=settings.command,
        rules="mlperf",
    )
    precision = 0.01 if test.scenario == "server" else 0.03
    search_settings = SearchSettings(
        low=0.01,
        high=1e6,
        start=start,
        precision=precision,
        sustain_length_factor=sustain_length_factor,
        run_spread=run_spread,
    )
    return LoadSearch(search_settings), runner, plan


def offline_rate(folder: Path) -> tuple[float, float] | None:
    """The Offline rate to expect (samples/s) and the trial's length (s), from a short trial; None without completions.

    The rate is that of the middle half of the completions, which leaves out the start-up and the wait for the last
    ones. It is at most 1.5 times the rate of the whole trial, because answers of a single batch end together.
    """
    columns = read_columns(folder)
    end_times = np.sort(
        columns["end_ns"][(columns["status"] == STATUS["ok"]) & (columns["end_ns"] >= 0)]
    )
    if not len(end_times) or end_times[-1] <= 0:
        return None
    trial_s = float(end_times[-1] - columns["due_ns"].min()) / 1e9
    whole_rate = len(end_times) / trial_s
    low, high = len(end_times) // 4, 3 * len(end_times) // 4
    middle_s = float(end_times[high] - end_times[low]) / 1e9
    middle_rate = (high - low) / middle_s if middle_s > 0 else math.inf
    return min(max(middle_rate, whole_rate), 1.5 * whole_rate), trial_s


# -- judging -----------------------------------------------------------------------------------------------------------


def read_columns(folder: Path) -> dict[str, NDArray[Any]]:
    """The columns that a result needs and no others: 2.1 million records in about 120 MB.

    Raises UserError when the folder holds no records.
    """
    rows = store.read_run_lazily(folder).rows
    return {name: np.ascontiguousarray(rows[name]) for name in COLUMNS}


def judge(
    folder: Path,
    test: rules.Test,
    summary: Summary,
    *,
    data_name: str,
    qps: float,
    search_result: SearchResult | None = None,
) -> mlperf.MlperfResult:
    """The result of a finished run. Also writes it into the run's folder, with LoadGen's two log files.

    `search_result`: of the search whose peak this run is.
    """
    query_trace = _query_trace(folder, test, summary)
    simulated = summary.target.simulated
    names = [part.target.name or part.target.url for part in summary.targets]
    served_by = (
        f"{len(names)} targets: {', '.join(names)}"
        if names
        else summary.target.name or summary.target.url
    )
    notes = [f"served by {served_by} ({summary.target.model})"]
    if summary.target.software:
        notes.append(f"software: {', '.join(summary.target.software)}")
    if summary.run.metadata:
        notes.append(f"metadata: {format.pairs(summary.run.metadata)}")
    errors = [f"the measurement is not sound: {reason}" for reason in summary.verdict.reasons]
    errors += [
        reasons.format_reason(caveat)
        for caveat in summary.verdict.caveat_codes
        if caveat.code == "failures"
    ]
    notes += [
        reasons.format_reason(warning)
        for warning in summary.verdict.warning_codes
        if warning.code == "resonance"
    ]
    warnings = [
        *summary.verdict.caveats,
        *cautions(test),
        *uncounted(summary.tokens.sources.output, summary.requests.ok),
    ]
    notes += [*errors, *warnings]
    result = mlperf.reduce(
        query_trace,
        test,
        dataset=data_name,
        target_qps=qps,
        notes=notes,
        errors=errors,
        warnings=warnings,
        simulated=simulated,
    )
    result = _with_standing(result, test, summary, search_result)
    write(folder, result, test, *of_summary(summary))
    return result


def sound(summary: Summary) -> bool:
    """Return True if the run is valid, few requests failed, and its rules miss no metric."""
    return (
        summary.verdict.valid
        and not has_high_error_rate(summary)
        and not any(term.undecided or term.low_ms is not None for term in summary.goodput.slo)
    )


def again(folder: Path, summary: Summary) -> mlperf.MlperfResult:
    """The result of a stored run, recomputed from its records; writes nothing. Raises UserError without a result."""
    stored = read(folder)
    result = mlperf.reduce(
        _query_trace(folder, test := _test_of(stored), summary),
        test,
        dataset=stored.dataset,
        target_qps=stored.target_qps,
        notes=stored.notes,
        simulated=stored.simulated,
    )
    # what the records do not show: findings about the measurement, and what other runs showed
    kept = (
        "samples",
        "errors",
        "warnings",
        "sustained",
        "sustained_why",
        "rules_qps",
        "longer_minutes",
    )
    return msgspec.structs.replace(result, **{name: getattr(stored, name) for name in kept})


def _test_of(stored: mlperf.MlperfResult) -> rules.Test:
    scenario: Any = stored.scenario
    test = rules.test(
        stored.benchmark, scenario, stored.round, min_duration_s=stored.min_duration_s
    )
    return replace(test, samples=stored.samples, min_queries=stored.min_queries)


def outputs_again(folder: Path, summary: Summary) -> dict[str, bytes]:
    """The files of a stored result, made again: `mlperf.json` and LoadGen's two log files."""
    result = again(folder, summary)
    return _outputs(result, _test_of(result), *of_summary(summary))


def _with_standing(
    result: mlperf.MlperfResult,
    test: rules.Test,
    summary: Summary,
    search_result: SearchResult | None,
) -> mlperf.MlperfResult:
    """The result with whether its rate can go on for ever. One run by the rules can show that it cannot, no more."""
    if test.scenario == "offline":
        return result
    found = summary.sustainable
    if found.sustained is False:
        return msgspec.structs.replace(result, sustained=False, sustained_why=found.why)
    if (
        search_result is not None
        and search_result.length_factor > 1
        and search_result.sustained_load == result.target_qps
    ):
        return msgspec.structs.replace(
            result,
            sustained=search_result.sustained,
            sustained_why=search_result.sustained_reason,
            rules_qps=search_result.confirmed_load,
        )
    longer_s = sustainable.CONFIRMATION_FACTOR * max(result.scheduled_s, test.min_duration_ns / 1e9)
    return msgspec.structs.replace(result, sustained_why=found.why, longer_minutes=longer_s / 60)


def _query_trace(folder: Path, test: rules.Test, summary: Summary) -> mlperf.QueryTrace:
    columns = read_columns(folder)
    is_measured = columns["stage"] == next(
        i for i, stage in enumerate(summary.stages) if stage.measured
    )
    if not is_measured.all():
        columns = {name: column[is_measured] for name, column in columns.items()}
    origin = int(columns["due_ns"].min()) if len(columns["due_ns"]) else 0
    return mlperf.trace(columns, max(origin, 0), one_query=test.scenario == "offline")


COUNTERS = {
    "tokenizer": "the tokenizer given by --tokenizer",
    "estimate": "a packaged vocabulary, not the model's",
    "events": "the events of the stream",
}
"""Who counted the output tokens, where the server's usage did not: by the tags of docs/reference/summary.md."""


def uncounted(sources: Mapping[str, int], answers: int) -> list[str]:
    """A warning where output tokens were counted without the server's usage, or none."""
    others = {source: count for source, count in sources.items() if source != "server" and count}
    if not others:
        return []
    who = " and ".join(COUNTERS.get(source, "nobody") for source in others)
    return [
        f"the output tokens of {sum(others.values()):,} of {answers:,} answers were counted by {who}, without the "
        "server's usage: tokens/s and TPOT rest on that count"
    ]


def cautions(test: rules.Test) -> list[str]:
    """Warnings about the test itself: too short, too small a data set, the note of its limits."""
    notes = []
    if test.min_duration_ns < rules.rules().min_duration_s * 10**9:
        notes.append(
            "a minimum duration below the rules' 600 s: good for a trial, for nothing else"
        )
    if test.samples < rules.rules().benchmarks[test.benchmark].samples:
        notes.append(
            f"a data set of {test.samples:,} samples is smaller than the rules': for a trial only"
        )
    return [*notes, *([test.note] if test.note else [])]


def of_summary(summary: Summary) -> tuple[str, str, datetime]:
    """What the log files say of a run: the system under test, the version of the generator, the beginning."""
    started = (
        datetime.fromisoformat(summary.run.started) if summary.run.started else datetime.now(UTC)
    )
    return summary.target.name or summary.target.url, summary.run.version, started


def write(
    folder: Path,
    result: mlperf.MlperfResult,
    test: rules.Test,
    sut: str,
    version: str,
    started: datetime,
) -> None:
    """Write `mlperf.json` and LoadGen's two log files into `folder`."""
    for name, data in _outputs(result, test, sut, version, started).items():
        store.replace(folder / name, data)
    checksums.write(folder)


def write_queries(
    folder: Path, trace: mlperf.QueryTrace, sut: str, version: str, started: datetime
) -> None:
    """Keep the queries of a result that has no run of its own, so that it can be made again: the official LoadGen's."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    of_run = msgspec.json.encode({"sut": sut, "version": version, "started": started.isoformat()})
    columns = pa.table(dict(zip(trace._fields, trace, strict=True)))
    pq.write_table(
        columns.replace_schema_metadata({QUERIES: of_run}), folder / QUERIES, compression="zstd"
    )


def outputs_of_queries(folder: Path) -> dict[str, bytes]:
    """The files of a stored result, made again from the queries beside it. Raises UserError or ValueError."""
    import pyarrow.parquet as pq

    table = pq.read_table(folder / QUERIES)
    of_run = msgspec.json.decode((table.schema.metadata or {})[QUERIES.encode()])
    trace = mlperf.QueryTrace(*(table[name].to_numpy() for name in mlperf.QueryTrace._fields))
    stored = read(folder)
    test = _test_of(stored)
    result = mlperf.reduce(
        trace,
        test,
        dataset=stored.dataset,
        target_qps=stored.target_qps,
        notes=stored.notes,
        errors=stored.errors,
        warnings=stored.warnings,
        simulated=stored.simulated,
    )
    result = msgspec.structs.replace(result, samples=stored.samples)
    return _outputs(
        result, test, of_run["sut"], of_run["version"], datetime.fromisoformat(of_run["started"])
    )


def _outputs(
    result: mlperf.MlperfResult, test: rules.Test, sut: str, version: str, started: datetime
) -> dict[str, bytes]:
    logs = log_files.texts(result, test, sut=sut, version=version, started=started)
    return {RESULT: format.document(result)} | {name: text.encode() for name, text in logs.items()}


def read(folder: Path) -> mlperf.MlperfResult:
    """A stored result. Raises UserError when there is none."""
    if not folder.is_dir():
        raise missing_result(folder, "a folder of loadgen mlperf")
    refuse_links(folder)
    path = folder / RESULT
    if not path.is_file():
        raise UserError(
            "no_result", "no MLPerf-style result there", str(path), "a folder of loadgen mlperf"
        )
    return decode_json(path.read_bytes(), mlperf.MlperfResult, str(path), "an MLPerf-style result")
