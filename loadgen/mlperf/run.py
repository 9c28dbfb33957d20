"""Turns a test of the rules into a workload, and a finished run into a result with log files.

Writes the requests of the official data set, reads records and writes results. The load itself is
an ordinary run (`execution.run.execute`); `result.judge_trace` applies the rules to its records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from loadgen_sdk.wire_formats.server_profiles import Api
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.cli.settings import request_options
from loadgen.core import format
from loadgen.core.errors import UserError, missing_result
from loadgen.core.execution.plan import Settings
from loadgen.core.metrics import reasons, sustainable
from loadgen.core.metrics.summary import Summary
from loadgen.core.metrics.validity import has_high_error_rate
from loadgen.core.results import checksums, store
from loadgen.core.results.files import refuse_links
from loadgen.core.results.json_files import decode_json
from loadgen.core.results.manifest import ReasonCode
from loadgen.core.results.record import STATUS
from loadgen.core.workload import (
    Arrival,
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
from loadgen.mlperf.log_files import LogContext
from loadgen.mlperf.result import (
    DISCLOSURE,
    MlperfResult,
    MlperfRunFacts,
    QueryTrace,
    build_trace,
    judge_trace,
)
from loadgen.search import experiment
from loadgen.search.goal import Goal
from loadgen.search.load_search import LoadSearch
from loadgen.search.search_results import CONFIRMING_KINDS, PlannedTrial, SearchResult
from loadgen.search.search_settings import SearchSettings
from loadgen.search.trial_runner import TrialRunner

NS_PER_S = 1_000_000_000

MAX_WAIT_NS = 24 * 3_600 * NS_PER_S
"""How long a query may take. LoadGen waits for every query without a limit."""

MAX_STALL_NS = 900 * NS_PER_S
"""How long a response may pause before its request counts as failed."""

RESULT = "mlperf.json"
LOG_FILES = (log_files.SUMMARY, log_files.DETAIL)
FILES = (RESULT, *LOG_FILES)
REQUESTS = "mlperf_requests.jsonl"

QUERIES = "mlperf_queries.parquet"
"""The queries that the official LoadGen issued, with the timestamps of this load generator."""

LOG_CONTEXT_KEY = "mlperf_queries.parquet"
"""The key of the metadata of QUERIES with what the log files say about the run, as JSON."""

COLUMNS = ("slot", "stage", "status", "due_ns", "first_token_ns", "end_ns", "output_tokens")
"""The columns of the records that a result needs."""

MANY_PASSES = 10
"""With so many passes of the data set in the minimum duration, one more pass adds a tenth to it."""

OFFLINE_CONCURRENCY = 1024
"""Concurrent requests over HTTP for each target in Offline, unless `--concurrency` is specified."""

PEAK_PRECISION = {"server": 0.01, "interactive": 0.03}
"""The relative precision of the search for the peak, by scenario."""

PEAK_LOW_QPS = 0.01
PEAK_HIGH_QPS = 1e6
"""Bounds of the search for the peak that no server reaches."""

MAX_OFFLINE_SPEEDUP = 1.5
"""The middle of an Offline trial counts as at most so many times faster than the whole trial.

Responses of one batch end together, so that the middle half of few responses can be arbitrarily
short.
"""


class DatasetRequests(NamedTuple):
    """The requests of a workload that are made from a data set.

    Attributes:
        requests: The requests.
        name: The name of the data set in results.
        api: The API that the prompts need: token IDs go to completions. None if any API will do.
        seed: The seed of generated texts, or None for a fresh one in each run.
        salt: The salt of generated texts, or None for the one that belongs to the seed.
    """

    requests: Synthetic | FromFile
    name: str
    api: Api | None
    seed: int | None = None
    salt: str | None = None


# -- workloads -------------------------------------------------------------------------------------


def synthetic_data(
    test: rules.Test, *, mean_input: float | None = None, mean_output: float | None = None
) -> DatasetRequests:
    """Return the requests of the synthetic data set, in the order in which LoadGen issues samples.

    The synthetic data set stands in for the official one, if the user does not have that. It fixes
    the lengths of prompts and responses. The texts are generated when the requests are sent.

    Args:
        test: The requirements of the rules.
        mean_input: The mean tokens of a prompt, or None for that of the official data set.
        mean_output: The mean tokens of a response, or None for that of the official data set.
    """
    benchmark = rules.load_rules().benchmarks[test.benchmark]
    lengths = dataset.synthetic_lengths(
        benchmark, benchmark_name=test.benchmark, mean_input=mean_input, mean_output=mean_output
    )
    order = dataset.issue_order(test)
    input_tokens = ListedTokens(values=tuple(lengths.input[order].tolist()))
    output_tokens = ListedTokens(values=tuple(lengths.output[order].tolist()))
    requests = Synthetic(input_tokens=input_tokens, output_tokens=output_tokens)

    return DatasetRequests(requests, lengths.name, api=None)


def write_official_requests(
    test: rules.Test, dataset_path: Path, output_dir: Path
) -> tuple[DatasetRequests, rules.Test]:
    """Write the user's copy of MLPerf's data set as a file of requests into the output directory.

    Returns the requests, in the order in which LoadGen issues samples, and the test with the number
    of samples of the file. Raises UserError or CombinedError if the data set cannot be used.
    """
    benchmark = rules.load_rules().benchmarks[test.benchmark]
    dataset_file = dataset.read_dataset(dataset_path, benchmark, benchmark_name=test.benchmark)
    sized_test = _with_sample_count(test, len(dataset_file.prompts))
    ordered_prompts = [dataset_file.prompts[sample] for sample in dataset.issue_order(sized_test)]
    output_dir.mkdir(parents=True, exist_ok=True)
    requests_path = output_dir / REQUESTS
    _write_request_lines(requests_path, ordered_prompts, max_tokens=benchmark.max_output)

    # Only the completions API accepts prompts of token IDs. Texts can be sent to any API.
    api: Api | None = "completions" if dataset_file.has_token_ids else None
    requests = FromFile(path=requests_path.resolve())
    return DatasetRequests(requests, dataset_file.name, api), sized_test


def _with_sample_count(test: rules.Test, sample_count: int) -> rules.Test:
    """Return the test for a data set of another size.

    A data set with fewer samples than the required queries also lowers their number.
    """
    return replace(test, samples=sample_count, min_queries=min(test.min_queries, sample_count))


def _write_request_lines(path: Path, prompts: Sequence[dataset.Prompt], *, max_tokens: int) -> None:
    """Write a JSONL file with one request per prompt.

    Responses end where the model stops, at the latest after `max_tokens`. Sampling is greedy
    (temperature 0), as in MLPerf's reference implementation.
    """
    with path.open("wb") as file:
        for prompt in prompts:
            request = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
            file.write(msgspec.json.encode(request) + b"\n")


def build_workload(
    test: rules.Test,
    data: DatasetRequests,
    *,
    qps: float,
    concurrency: int | None = None,
    drain_ns: int = MAX_WAIT_NS,
) -> Workload:
    """Return the test as a workload, which this program can run like any other load.

    A workload describes the requests, when they are sent and how long they may take. Server and
    Interactive have the Poisson arrivals that LoadGen draws with the seed of the round. Offline
    sends the samples of LoadGen's single query.

    Args:
        test: The test.
        data: The requests.
        qps: The target rate in queries/s. In Offline the expected rate in samples/s.
        concurrency: The requests in flight in Offline, or None to send all of them at once. A limit
            makes no difference to a server that always has enough work, and it is needed over HTTP,
            because no client can hold open a million connections.
        drain_ns: How long queries may take after the last one was issued. A query that is cut off
            did not complete, and the result is INVALID.
    """
    is_offline = test.scenario == "offline"
    stage = _offline_stage(test, qps, concurrency) if is_offline else _poisson_stage(test, qps)
    return Workload(
        name=f"mlperf-{test.benchmark}-{test.scenario}",
        description=f"{DISCLOSURE} Data: {data.name}.",
        requests=data.requests,
        stages=(stage,),
        slo=None if is_offline else _latency_limits(test),
        # Random numbers: the texts have the user's seed, the arrival times that of the round.
        seed=data.seed,
        salt=data.salt,
        schedule_seed=test.seeds.schedule,
        # Limits on waiting: for the last queries, for one response, and for its next token.
        grace_ns=drain_ns,
        timeout_ns=MAX_WAIT_NS,
        stall_timeout_ns=MAX_STALL_NS,
        source_text=(
            f"# made by loadgen mlperf: {test.benchmark} {test.scenario}, round {test.round}\n"
        ),
    )


def _offline_stage(test: rules.Test, samples_per_s: float, concurrency: int | None) -> Stage:
    """Return the stage that sends the samples of the single query."""
    arrival: Arrival = Constant(rate=math.inf)
    if concurrency is not None:
        arrival = Closed(concurrency=concurrency, ramp_ns=0)
    sample_count = rules.offline_samples(test, samples_per_s)
    return Stage(name="load", arrival=arrival, duration_ns=None, count=sample_count)


def _poisson_stage(test: rules.Test, qps: float) -> Stage:
    """Return the stage that lasts for the minimum duration, and then up to a whole pass."""
    at_least = AtLeast(
        duration_ns=test.min_duration_ns, count=test.min_queries, passes_of=test.samples
    )
    return Stage(name="load", arrival=Poisson(rate=qps), duration_ns=None, at_least=at_least)


def _latency_limits(test: rules.Test) -> Slo:
    """Return the limits of Server and Interactive as an SLO."""
    assert test.ttft_ns is not None and test.tpot_ns is not None
    ttft = Term(metric="ttft", limit_ns=test.ttft_ns, quantile=test.percentile)
    tpot = Term(metric="tpot_mlperf", limit_ns=test.tpot_ns, quantile=test.percentile)
    return Slo(terms=(ttft, tpot))


# -- the search for the peak -----------------------------------------------------------------------


def create_trial_test(test: rules.Test, qps: float) -> rules.Test:
    """Return the requirements for one trial of the search for the peak at a rate in queries/s.

    A trial is a run at one rate, and a pass sends every sample of the data set once. An official
    run goes on after the minimum duration until its last pass is complete. If the minimum duration
    has room for MANY_PASSES passes, completing the last one adds a tenth to the run at most. A
    trial then ends at the minimum duration, to save time. With fewer passes, a trial is as long as
    an official run: a shorter one could pass although a slowly growing queue fails the official
    run.
    """
    queries_in_min_duration = qps * test.min_duration_ns / NS_PER_S
    passes_in_min_duration = queries_in_min_duration / test.samples
    if passes_in_min_duration >= MANY_PASSES:
        return _without_complete_passes(test)
    return test


def _without_complete_passes(test: rules.Test) -> rules.Test:
    """Return a test whose run may end in the middle of a pass.

    The number of queries of a run is rounded up to a multiple of `samples`. With 1 sample, there is
    nothing to round up.
    """
    return replace(test, samples=1)


class PeakSearch(NamedTuple):
    """A search for the highest rate whose official run is VALID.

    Attributes:
        search: The search, which chooses the rate of each trial.
        runner: The runner of its trials.
        plan: The plan that identifies the search when it is resumed.
    """

    search: LoadSearch
    runner: TrialRunner
    plan: experiment.ExperimentPlan


def create_peak_search(
    test: rules.Test,
    data: DatasetRequests,
    settings: Settings,
    output_dir: Path,
    *,
    start_qps: float,
    drain_ns: int = MAX_WAIT_NS,
    sustain_factor: float = 1.0,
    run_spread: float | None = 0.0,
) -> PeakSearch:
    """Return the search for the highest rate whose official run is VALID.

    The search tries rates one after the other. Each trial is a run at one rate. A trial passes if
    it is VALID by the rules of MLPerf.

    Args:
        test: The test.
        data: The requests.
        settings: The endpoint, and how requests are sent.
        output_dir: The directory of the search.
        start_qps: The first rate that is tried.
        drain_ns: How long queries may take after the last one of a run was issued.
        sustain_factor: The length of the runs that show whether the rate is sustained, as a
            multiple of the length of an official run. With 1, there are no such runs.
        run_spread: How much the server varies from run to run, as a fraction (0.02 is 2 %), or
            None if the search has to learn it from its trials.
    """
    seed = experiment.choose_seed(output_dir, data.seed)
    trial_runner = TrialRunner(
        output_dir=output_dir,
        goal=Goal(slo=_latency_limits(test), mlperf=True),  # judged by MLPerf's rules
        make_workload=lambda trial: _build_trial_workload(trial, test, data, drain_ns),
        settings=settings,
        seed=seed,
        has_seed_per_trial=False,  # the rules fix the arrival times of every run
    )

    search_settings = SearchSettings(
        low=PEAK_LOW_QPS,
        high=PEAK_HIGH_QPS,
        start=start_qps,
        precision=PEAK_PRECISION[test.scenario],
        sustain_length_factor=sustain_factor,
        run_spread=run_spread,
    )
    plan = _peak_search_plan(test, data, settings, seed=seed, drain_ns=drain_ns)
    return PeakSearch(LoadSearch(search_settings), trial_runner, plan)


def _build_trial_workload(
    trial: PlannedTrial, test: rules.Test, data: DatasetRequests, drain_ns: int
) -> Workload:
    """Return the load of one trial of the search for the peak.

    Args:
        trial: Its rate, its kind, and its length as a multiple of an official run. The length is
            above 1 for a trial that shows whether the rate is sustained. A trial that confirms a
            rate follows the official rules; others may leave out the rest of the last pass.
        test: The requirements of the rules.
        data: The requests.
        drain_ns: How long queries may take after the last one was issued.
    """
    is_confirmation = trial.kind in CONFIRMING_KINDS
    trial_test = test if is_confirmation else create_trial_test(test, trial.load)
    trial_duration_ns = round(trial_test.min_duration_ns * trial.length_factor)
    scaled_test = replace(trial_test, min_duration_ns=trial_duration_ns)
    return build_workload(scaled_test, data, qps=trial.load, drain_ns=drain_ns)


def _peak_search_plan(
    test: rules.Test, data: DatasetRequests, settings: Settings, *, seed: int, drain_ns: int
) -> experiment.ExperimentPlan:
    """Return the plan that identifies a search for the peak.

    The plan is stored, and a search is resumed only if its plan is equal. So it has everything that
    would change the outcome of a trial. `ExperimentPlan` has no fields for the data set, the drain
    time, the round and the size of the test, so they are texts in `options` and `source_text`.
    """
    options = {"data": data.name, **request_options(settings)}
    if drain_ns != MAX_WAIT_NS:
        # The option `--grace` limits how long queries may take after the last one was issued.
        options["grace"] = f"{drain_ns / NS_PER_S:g} s"

    min_duration_s = test.min_duration_ns / NS_PER_S
    test_text = f"round {test.round}, {min_duration_s:g} s, {test.samples} samples\n"
    return experiment.ExperimentPlan(
        command_name="search",
        load_kind="request_rate",
        workload=f"mlperf {test.benchmark} {test.scenario}",
        source_text=test_text,
        target=settings.display_name,
        metadata=dict(settings.metadata),
        seed=seed,
        options=options,
        command=settings.command,
        rules="mlperf",
    )


# -- the rate that sizes an Offline query ----------------------------------------------------------


class OfflineTrial(NamedTuple):
    """What a short trial shows about Offline: the expected rate, and how long the trial took."""

    samples_per_s: float
    duration_s: float


def measure_offline_trial(run_dir: Path) -> OfflineTrial | None:
    """Return the Offline rate to expect after a trial, or None if no request of it completed.

    The rate is that of the middle half of the completions, which leaves out the start-up and the
    wait for the last ones. It is at least the mean rate of the trial, and at most
    MAX_OFFLINE_SPEEDUP times that.
    """
    columns = read_columns(run_dir)
    is_completed = (columns["status"] == STATUS["ok"]) & (columns["end_ns"] >= 0)
    end_times_ns = np.sort(columns["end_ns"][is_completed])
    if len(end_times_ns) == 0 or end_times_ns[-1] <= 0:
        return None

    duration_s = float(end_times_ns[-1] - columns["due_ns"].min()) / NS_PER_S
    mean_rate = len(end_times_ns) / duration_s
    max_rate = MAX_OFFLINE_SPEEDUP * mean_rate
    samples_per_s = min(max(_middle_rate(end_times_ns), mean_rate), max_rate)

    return OfflineTrial(samples_per_s, duration_s)


def _middle_rate(end_times_ns: NDArray[np.int64]) -> float:
    """Return the completions per second between the first and the third quartile of their times.

    `end_times_ns` are in ascending order. The rate is infinite if both quartiles are equal.
    """
    first_quartile = len(end_times_ns) // 4
    third_quartile = 3 * len(end_times_ns) // 4
    middle_s = float(end_times_ns[third_quartile] - end_times_ns[first_quartile]) / NS_PER_S
    if middle_s <= 0:
        return math.inf
    return (third_quartile - first_quartile) / middle_s


# -- judging a finished run ------------------------------------------------------------------------


def read_columns(run_dir: Path) -> dict[str, NDArray[np.int64]]:
    """Return the columns of the records that a result needs, and no others.

    2.1 million records then take about 120 MB. Raises UserError if the directory has no records.
    """
    rows = store.read_run_lazily(run_dir).rows
    return {name: np.ascontiguousarray(rows[name]) for name in COLUMNS}


def judge_run(
    run_dir: Path,
    test: rules.Test,
    summary: Summary,
    *,
    data_name: str,
    qps: float,
    search_result: SearchResult | None = None,
) -> MlperfResult:
    """Return the result of a finished run by the rules of MLPerf, and write it into its directory.

    `mlperf.json` and two logs in the format of LoadGen are written.

    Args:
        run_dir: The directory of the run.
        test: The requirements of the rules.
        summary: The summary of the run.
        data_name: The name of the data set in the result.
        qps: The target rate in queries/s, in Offline the expected rate in samples/s.
        search_result: The search whose peak this run confirmed, or None.
    """
    trace = _read_trace(run_dir, test, summary)
    facts = _run_facts(test, summary, data_name=data_name, qps=qps)
    result = _with_stability(judge_trace(trace, test, facts), test, summary, search_result)
    write_result(run_dir, result, test, log_context(summary))
    return result


def _run_facts(test: rules.Test, summary: Summary, *, data_name: str, qps: float) -> MlperfRunFacts:
    """Return the facts that a result shows besides the metrics of its queries.

    They are the data set, the target rate, errors, warnings, and notes. The notes describe the
    system under test and repeat all errors and warnings, because a report shows only the notes.
    """
    errors = _measurement_errors(summary)
    warnings = [
        *summary.verdict.caveats,
        *deviation_warnings(test),
        *token_count_warnings(summary.tokens.sources.output, summary.requests.ok),
    ]

    return MlperfRunFacts(
        dataset=data_name,
        target_qps=qps,
        notes=[*_system_notes(summary), *errors, *warnings],
        errors=errors,
        warnings=warnings,
        simulated=summary.target.simulated,
    )


def _measurement_errors(summary: Summary) -> list[str]:
    """Return why the run is not a valid measurement, or why many of its requests failed."""
    errors = [f"the measurement is INVALID: {reason}" for reason in summary.verdict.reasons]
    return errors + _format_reasons(summary.verdict.caveat_codes, "failures")


def _format_reasons(codes: Sequence[ReasonCode], code: str) -> list[str]:
    """Return the texts of the reasons with a code."""
    return [reasons.format_reason(reason) for reason in codes if reason.code == code]


def _system_notes(summary: Summary) -> list[str]:
    """Return notes about the system under test: its endpoints, model, software and metadata.

    The warning "resonance" is a note as well. It says that round robin sends the same samples to
    the same replica in every pass, so that replicas get unequal work.
    """
    target = summary.target
    server = target.name or target.url
    if summary.targets:
        target_names = [part.target.name or part.target.url for part in summary.targets]
        server = f"{len(target_names)} targets: {', '.join(target_names)}"

    notes = [f"served by {server} ({target.model})"]
    if target.software:
        notes.append(f"software: {', '.join(target.software)}")

    if summary.run.metadata:
        notes.append(f"metadata: {format.pairs(summary.run.metadata)}")

    return notes + _format_reasons(summary.verdict.warning_codes, "resonance")


def is_reliable(summary: Summary) -> bool:
    """Return True if the run is valid, few requests failed, and every objective could be judged."""
    return (
        summary.verdict.valid
        and not has_high_error_rate(summary)
        and not any(term.undecided or term.low_ms is not None for term in summary.goodput.slo)
    )


def _read_trace(run_dir: Path, test: rules.Test, summary: Summary) -> QueryTrace:
    """Return the queries of the measured stage of a run, without those of the warm-up.

    The clock of the trace starts when the first of them was due.
    """
    columns = read_columns(run_dir)
    measured_stage = next(index for index, stage in enumerate(summary.stages) if stage.measured)

    is_measured = columns["stage"] == measured_stage
    if not is_measured.all():
        columns = {name: column[is_measured] for name, column in columns.items()}

    due_ns = columns["due_ns"]
    origin_ns = max(int(due_ns.min()), 0) if len(due_ns) else 0
    return build_trace(columns, origin_ns, is_one_query=test.scenario == "offline")


def _with_stability(
    result: MlperfResult,
    test: rules.Test,
    summary: Summary,
    search_result: SearchResult | None,
) -> MlperfResult:
    """Return a copy of the result that says whether the server can sustain the rate for longer.

    A run can be VALID although a queue grows, which would fail a longer run. If a queue grew in
    this run, the rate is not sustained. Otherwise only a longer run can show that it is: some
    searches make such runs at the peak. Without one, it stays unknown. Offline has no rate, so its
    result is returned unchanged.

    Args:
        result: The result of the run.
        test: The requirements of the rules.
        summary: The summary of the run, which says whether a queue grew.
        search_result: The search whose peak this run confirmed, or None.
    """
    if test.scenario == "offline":
        return result

    has_growing_queue = summary.sustainable.sustained is False
    if has_growing_queue:
        return replace(result, sustained=False, sustained_reason=summary.sustainable.reason)
    if search_result is not None and _has_longer_runs_at(result.target_qps, search_result):
        return _with_outcome_of_longer_runs(result, search_result)

    return _with_minutes_to_verify(result, test, summary)


def _has_longer_runs_at(qps: float | None, search_result: SearchResult) -> bool:
    """Return whether a search made runs at a rate that are longer than an official run."""
    return search_result.length_factor > 1 and search_result.sustained_load == qps


def _with_outcome_of_longer_runs(result: MlperfResult, search_result: SearchResult) -> MlperfResult:
    """Return a copy of the result with what the longer runs of a search showed about its rate.

    `rules_qps` is the highest rate that is VALID in runs of the official length. It can be higher
    than the rate that is sustained.
    """
    return replace(
        result,
        sustained=search_result.sustained,
        sustained_reason=search_result.sustained_reason,
        rules_qps=search_result.confirmed_load,
    )


def _with_minutes_to_verify(
    result: MlperfResult, test: rules.Test, summary: Summary
) -> MlperfResult:
    """Return a copy of the result that says how many minutes of load would show the stability."""
    load_duration_s = max(result.scheduled_s, test.min_duration_ns / NS_PER_S)
    longer_minutes = sustainable.CONFIRMATION_FACTOR * load_duration_s / 60
    return replace(
        result, sustained_reason=summary.sustainable.reason, longer_minutes=longer_minutes
    )


# -- notes and warnings ----------------------------------------------------------------------------

TOKEN_COUNTERS = {
    "tokenizer": "the tokenizer of --tokenizer",
    "estimate": "a packaged vocabulary that is not the model's",
    "events": "the number of events of the stream",
}
"""How output tokens were counted without the server's usage, by the tags of summary.json."""


def token_count_warnings(sources: Mapping[str, int], responses: int) -> list[str]:
    """Return a warning if output tokens were not all counted by the server, or an empty list.

    A server reports the tokens of a response in its "usage". Without it, this program counts them,
    and its count can differ.

    Args:
        sources: The number of responses whose tokens were counted by each source, for example
            {"server": 90, "events": 10}. The sources other than "server" are in `TOKEN_COUNTERS`.
        responses: The number of all responses.
    """
    other_sources = {
        source: count for source, count in sources.items() if source != "server" and count
    }
    if not other_sources:
        return []

    affected = sum(other_sources.values())
    counters = " and ".join(TOKEN_COUNTERS.get(source, "no source") for source in other_sources)
    return [
        f"the output tokens of {affected:,} of {responses:,} responses were counted by "
        f"{counters}, without the server's usage: tokens/s and TPOT depend on that count"
    ]


def deviation_warnings(test: rules.Test) -> list[str]:
    """Return warnings about a test that deviates from the rules, and the note on its limits.

    A test deviates if its minimum duration or its data set is smaller than the rules require.
    """
    table = rules.load_rules()
    warnings = []
    if test.min_duration_ns < table.min_duration_s * NS_PER_S:
        warnings.append(
            f"the minimum duration is below the {table.min_duration_s} s of the rules: "
            "use this result as a trial only"
        )

    if test.samples < table.benchmarks[test.benchmark].samples:
        warnings.append(
            f"the data set has {test.samples:,} samples, fewer than the rules require: "
            "use this result as a trial only"
        )

    if test.note:
        warnings.append(test.note)

    return warnings


# -- stored results --------------------------------------------------------------------------------


def recompute_result(run_dir: Path, summary: Summary) -> MlperfResult:
    """Return the result of a stored run, computed again from its records. Writes nothing.

    Raises UserError if the directory has no result.
    """
    stored = read_result(run_dir)
    trace = _read_trace(run_dir, _stored_test(stored), summary)
    return _judge_again(trace, stored)


def _judge_again(trace: QueryTrace, stored: MlperfResult) -> MlperfResult:
    """Return a stored result, computed again from the queries of its run.

    Some fields depend on other data than the queries and are copied: the data set and target rate,
    notes, errors and warnings, and what a search showed about whether the rate is sustained.
    """
    facts = MlperfRunFacts(
        dataset=stored.dataset,
        target_qps=stored.target_qps,
        notes=stored.notes,
        simulated=stored.simulated,
    )
    result = judge_trace(trace, _stored_test(stored), facts)
    return replace(
        result,
        errors=stored.errors,
        warnings=stored.warnings,
        sustained=stored.sustained,
        sustained_reason=stored.sustained_reason,
        rules_qps=stored.rules_qps,
        longer_minutes=stored.longer_minutes,
    )


def _stored_test(stored: MlperfResult) -> rules.Test:
    """Return the test that a stored result is about."""
    test = rules.create_test(
        stored.benchmark,
        rules.parse_scenario(stored.scenario),
        stored.round,
        min_duration_s=stored.min_duration_s,
    )
    return replace(test, samples=stored.samples, min_queries=stored.min_queries)


def recompute_files(run_dir: Path, summary: Summary) -> dict[str, bytes]:
    """Return the content of `mlperf.json` and LoadGen's two logs, computed from the records."""
    result = recompute_result(run_dir, summary)
    return _file_contents(result, _stored_test(result), log_context(summary))


def log_context(summary: Summary) -> LogContext:
    """Return what the log files say about a run."""
    started = datetime.now(UTC)
    if summary.run.started:
        started = datetime.fromisoformat(summary.run.started)
    sut = summary.target.name or summary.target.url
    return LogContext(sut=sut, version=summary.run.version, started=started)


def write_result(
    output_dir: Path, result: MlperfResult, test: rules.Test, context: LogContext
) -> None:
    """Write `mlperf.json` and LoadGen's two logs into a directory."""
    for name, content in _file_contents(result, test, context).items():
        store.replace(output_dir / name, content)
    checksums.write(output_dir)


def _file_contents(result: MlperfResult, test: rules.Test, context: LogContext) -> dict[str, bytes]:
    """Return the content of `mlperf.json` and LoadGen's two logs, by the name of the file."""
    logs = log_files.create_logs(result, test, context)
    contents = {RESULT: format.document(result)}
    return contents | {name: text.encode() for name, text in logs.items()}


def write_queries(output_dir: Path, trace: QueryTrace, context: LogContext) -> None:
    """Store the queries that the official LoadGen issued, so that the result can be recomputed.

    Each query is a row of the Parquet file QUERIES. The metadata of the file have, as JSON under
    LOG_CONTEXT_KEY, the facts about the run that the log files name, such as its start.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields = context._asdict() | {"started": context.started.isoformat()}
    table = pa.table(trace._asdict())
    table = table.replace_schema_metadata({LOG_CONTEXT_KEY: msgspec.json.encode(fields)})
    pq.write_table(table, output_dir / QUERIES, compression="zstd")


class _StoredQueries(NamedTuple):
    """The queries that `write_queries` stored, and what the logs say about their run."""

    trace: QueryTrace
    context: LogContext


def _read_queries(output_dir: Path) -> _StoredQueries:
    """Return the queries that `write_queries` stored in a directory of results.

    Raises ValueError (pyarrow's errors are ValueErrors) or KeyError if the file is damaged.
    """
    import pyarrow.parquet as pq

    table = pq.read_table(output_dir / QUERIES)
    trace = QueryTrace(
        due_ns=table["due_ns"].to_numpy(),
        ttft_ns=table["ttft_ns"].to_numpy(),
        latency_ns=table["latency_ns"].to_numpy(),
        tokens=table["tokens"].to_numpy(),
    )
    file_metadata = table.schema.metadata or {}
    fields = msgspec.json.decode(file_metadata[LOG_CONTEXT_KEY.encode()])
    started = datetime.fromisoformat(fields["started"])
    context = LogContext(sut=fields["sut"], version=fields["version"], started=started)

    return _StoredQueries(trace, context)


def recompute_files_from_queries(output_dir: Path) -> dict[str, bytes]:
    """Return the files of a result of the official LoadGen, computed from the stored queries.

    They are `mlperf.json` and two logs, by file name. Raises UserError or ValueError if a file is
    damaged.
    """
    queries = _read_queries(output_dir)
    stored = read_result(output_dir)
    result = _judge_again(queries.trace, stored)
    return _file_contents(result, _stored_test(stored), queries.context)


def read_result(output_dir: Path) -> MlperfResult:
    """Return the result in `mlperf.json` of a directory.

    Links are refused, because a results directory may come from someone else.

    Raises UserError if there is no result, or if it is damaged.
    """
    if not output_dir.is_dir():
        raise missing_result(output_dir, "a results folder of loadgen mlperf")

    refuse_links(output_dir)
    path = output_dir / RESULT
    if not path.is_file():
        raise UserError(
            "no_result",
            "the folder has no MLPerf-style result",
            str(path),
            "give a results folder of loadgen mlperf",
        )

    return decode_json(path.read_bytes(), MlperfResult, str(path), "an MLPerf-style result")
