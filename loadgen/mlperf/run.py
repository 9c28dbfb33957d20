"""From a test of the rules to a workload, and from the folder of its run to a result with LoadGen's log files.

IO at the edges: the official data set is copied into requests, records are read, files written. The load itself is an
ordinary run (`run.execute`); what the rules say of its records is `mlperf.reduce`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from loadgen import slo
from loadgen.errors import UserError
from loadgen.mlperf import dataset, log_files, rules
from loadgen.mlperf import result as mlperf
from loadgen.results import store
from loadgen.results.parquet import NAMES
from loadgen.results.record import ROW, STATUS
from loadgen.search import experiment, trials
from loadgen.search.load_search import Goal, LoadSearch, NextTrial
from loadgen.workload import (
    AtLeast,
    Closed,
    Constant,
    FromFile,
    Listed,
    Poisson,
    Slo,
    Stage,
    Synthetic,
    Term,
    Workload,
)
from loadgen.workload.schema import OneTokenOrMore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.execution.plan import Settings
    from loadgen.metrics.summary import Summary

WAIT_NS = 24 * 3_600 * 1_000_000_000  # LoadGen waits for every query, however long
STALL_NS = 900 * 1_000_000_000
RESULT = "mlperf.json"
REQUESTS = "mlperf_requests.jsonl"
COLUMNS = ("slot", "stage", "status", "due_ns", "first_token_ns", "end_ns", "output_tokens")
MANY_PASSES = 10  # of the data set in the minimum duration: the rest of one lengthens the run by a tenth at most
LANES = 1024  # in flight in Offline over HTTP, per target, unless it is said


class Data(NamedTuple):
    """What is asked: the requests of a workload, and the name that every result carries."""

    requests: Synthetic | FromFile
    name: str
    api: str | None  # the API that the prompts need; None: any


def synthetic(asked: rules.Test, *, mean_input: float | None = None, mean_output: float | None = None) -> Data:
    """The synthetic set, in LoadGen's order of issue: lengths repeat in every pass, texts never do."""
    found = rules.rules().benchmarks[asked.benchmark]
    lengths = dataset.synthetic(found, benchmark=asked.benchmark, mean_input=mean_input, mean_output=mean_output)
    order = dataset.issue_order(asked)

    def listed(column: NDArray[np.int64]) -> Any:
        return Listed[OneTokenOrMore](values=tuple(column[order].tolist()))

    return Data(Synthetic(input_tokens=listed(lengths.input), output_tokens=listed(lengths.output)), lengths.name, None)


def official(asked: rules.Test, path: Path, folder: Path) -> tuple[Data, rules.Test]:
    """The user's file, as requests in LoadGen's order beside the results; and the test with as many samples as it has.

    Answers end where the model ends them, at the rules' maximum at the latest; greedy, as in the reference.
    """
    found = rules.rules().benchmarks[asked.benchmark]
    file = dataset.read_dataset(path, found, benchmark=asked.benchmark)
    asked = replace(asked, samples=len(file.samples), min_queries=min(asked.min_queries, len(file.samples)))
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / REQUESTS
    with out.open("wb") as lines:
        for place in dataset.issue_order(asked):
            row = {"prompt": file.samples[place].prompt, "max_tokens": found.max_output, "temperature": 0}
            lines.write(msgspec.json.encode(row) + b"\n")
    return Data(FromFile(path=out.resolve()), file.name, "completions" if file.tokens else None), asked


def workload(asked: rules.Test, data: Data, *, qps: float, lanes: int | None = None) -> Workload:
    """The test as a workload. Server and Interactive: Poisson arrivals by the round's seed and LoadGen's stop rule.

    Offline: the samples of LoadGen's one query (`qps` is the expected rate), all due at once, or with `lanes` so many
    in flight: a server that is kept full does not see the difference, and no client holds a million sockets.
    """
    slo = None
    if asked.scenario == "offline":
        law: Any = Constant(rate=float("inf")) if lanes is None else Closed(concurrency=lanes)
        stage = Stage(name="load", arrival=law, duration_ns=None, count=rules.offline_samples(asked, qps))
    else:
        least = AtLeast(duration_ns=asked.min_duration_ns, count=asked.min_queries, passes_of=asked.samples)
        stage = Stage(name="load", arrival=Poisson(rate=qps), duration_ns=None, at_least=least)
        assert asked.ttft_ns is not None and asked.tpot_ns is not None
        terms = (
            Term(metric="ttft", limit_ns=asked.ttft_ns, quantile=asked.percentile),
            Term(metric="tpot_mlperf", limit_ns=asked.tpot_ns, quantile=asked.percentile),
        )
        slo = Slo(terms=terms)
    return Workload(
        name=f"mlperf-{asked.benchmark}-{asked.scenario}",
        description=f"{mlperf.DISCLOSURE} Data: {data.name}.",
        requests=data.requests,
        stages=(stage,),
        slo=slo,
        schedule_seed=asked.seeds.schedule,
        grace_ns=WAIT_NS,
        timeout_ns=WAIT_NS,
        stall_timeout_ns=STALL_NS,
        source_text=f"# made by loadgen mlperf: {asked.benchmark} {asked.scenario}, round {asked.round}\n",
    )


def probe(asked: rules.Test, qps: float) -> rules.Test:
    """The test as a search probes it at this rate: without the rest of the last pass where a pass is short beside the
    minimum duration, else at the official length. What builds up for minutes would make a run of several times the
    length fail at a rate that short probes hold."""
    passes = qps * asked.min_duration_ns / 1e9 / asked.samples
    return replace(asked, samples=1) if passes >= MANY_PASSES else asked


def peak(
    asked: rules.Test, data: Data, settings: Settings, folder: Path, start: float
) -> tuple[LoadSearch, trials.Trials, experiment.ExperimentPlan]:
    """The search for the highest rate whose official run is VALID, by the official seeds: what is asked, how a probe of
    it is run, and what makes it the same search."""
    assert asked.ttft_ns is not None and asked.tpot_ns is not None
    terms = (
        slo.Term(metric="ttft", limit_ns=asked.ttft_ns, quantile=asked.percentile),
        slo.Term(metric="tpot_mlperf", limit_ns=asked.tpot_ns, quantile=asked.percentile),
    )

    def make(ask: NextTrial) -> Workload:
        length = asked if ask.kind == "confirm" else probe(asked, ask.load)
        return workload(length, data, qps=ask.load)

    runs = trials.Trials(
        folder=folder,
        goal=Goal(slo=slo.Slo(terms=terms), mlperf=True),
        make=make,
        settings=settings,
        seed=asked.seeds.schedule >> 11,
        seeded=False,
    )
    plan = experiment.ExperimentPlan(
        by="search",
        kind="request_rate",
        workload=f"mlperf {asked.benchmark} {asked.scenario}",
        source_text=f"round {asked.round}, {asked.min_duration_ns / 1e9:g} s, {asked.samples} samples\n",
        target=settings.shown,
        flags={"data": data.name},
    )
    precision = 0.01 if asked.scenario == "server" else 0.03
    return LoadSearch(low=0.01, high=1e6, start=start, precision=precision), runs, plan


def settings_for(data: Data, settings: Settings) -> Settings:
    """The settings that the data need: token ids go to the completions API."""
    if data.api is None or settings.api == data.api:
        return settings
    return replace(settings, api="completions")


def offline_rate(folder: Path) -> tuple[float, float] | None:
    """Samples/s to expect in Offline, and how long the trial took, s, from a short run; None when it ended nothing.

    The rate of the middle half of its completions, which leaves out how it began and how the last ones were waited for,
    but at most half as much again as that of the whole trial: answers that were all made in one batch end together.
    """
    columns = read_columns(folder)
    ended = np.sort(columns["end_ns"][(columns["status"] == STATUS["ok"]) & (columns["end_ns"] >= 0)])
    if not len(ended) or ended[-1] <= 0:
        return None
    length_s = float(ended[-1] - columns["due_ns"].min()) / 1e9
    whole = len(ended) / length_s
    low, high = len(ended) // 4, 3 * len(ended) // 4
    between_s = float(ended[high] - ended[low]) / 1e9
    middle = (high - low) / between_s if between_s > 0 else math.inf
    return min(max(middle, whole), 1.5 * whole), length_s


# -- judging -----------------------------------------------------------------------------------------------------------


def read_columns(folder: Path) -> dict[str, NDArray[Any]]:
    """The columns that a verdict needs, and no others: 2.1 million records in about 120 MB.

    Raises UserError when the folder holds no records.
    """
    files = sorted((folder / "requests").glob("*.parquet"))
    if (folder / "spool").is_dir() or not files:
        rows = store.read_run(folder).rows
        return {name: np.ascontiguousarray(rows[name]) for name in COLUMNS}
    import pyarrow as pa
    import pyarrow.parquet as pq

    sources = [pq.ParquetFile(file) for file in files]
    total = sum(source.metadata.num_rows for source in sources)
    columns = {name: np.empty(total, ROW[name]) for name in COLUMNS}
    at = 0
    for source in sources:
        for group in range(source.num_row_groups):
            rows = source.metadata.row_group(group).num_rows
            for name in COLUMNS:  # one at a time: a row group of a rack's run is large
                column = source.read_row_group(group, columns=[name], use_threads=False).column(name)
                columns[name][at : at + rows] = _plain(name, column)
            at += rows
            pa.default_memory_pool().release_unused()
    return columns


def _plain(name: str, column: Any) -> NDArray[Any]:
    """A Parquet column as its numbers in a row: codes for words, -1 for what never came."""
    if name in NAMES:
        import pyarrow.compute as pc

        made = np.zeros(len(column), ROW[name])
        for word in pc.unique(column).to_pylist():
            made[pc.equal(column, word).to_numpy(zero_copy_only=False)] = NAMES[name].index(word)
        return made
    filled = column.fill_null(-1) if column.null_count else column
    made = np.asarray(filled.to_numpy(), ROW[name])
    return made


def judge(folder: Path, asked: rules.Test, summary: Summary, *, data_name: str, qps: float) -> mlperf.MlperfResult:
    """The result of a finished run; written into its folder with LoadGen's two log files."""
    traced = _traced(folder, asked, summary)
    simulated = summary.target.simulated
    names = [part.target.name or part.target.url for part in summary.targets]
    served = f"{len(names)} targets: {', '.join(names)}" if names else summary.target.name or summary.target.url
    notes = [f"served by {served} ({summary.target.model})"]
    notes += [f"the measurement is not sound: {reason}" for reason in summary.verdict.reasons]
    notes += cautions(asked)
    result = mlperf.reduce(traced, asked, dataset=data_name, target_qps=qps, notes=notes, simulated=simulated)
    write(folder, result, asked, sut=summary.target.name or summary.target.url, version=summary.run.version)
    return result


def again(folder: Path, summary: Summary) -> mlperf.MlperfResult:
    """The result of a stored run, worked out once more from its records; nothing is written. Raises UserError."""
    before = read(folder)
    scenario: Any = before.scenario
    asked = rules.test(before.benchmark, scenario, before.round, min_duration_s=before.min_duration_s)
    asked = replace(asked, min_queries=before.min_queries)
    return mlperf.reduce(
        _traced(folder, asked, summary), asked, dataset=before.dataset, target_qps=before.target_qps,
        notes=before.notes, simulated=before.simulated,
    )  # fmt: skip


def _traced(folder: Path, asked: rules.Test, summary: Summary) -> mlperf.QueryTrace:
    columns = read_columns(folder)
    chosen = columns["stage"] == _measured(summary)
    if not chosen.all():
        columns = {name: column[chosen] for name, column in columns.items()}
    origin = int(columns["due_ns"].min()) if len(columns["due_ns"]) else 0
    return mlperf.trace(columns, max(origin, 0), one_query=asked.scenario == "offline")


def cautions(asked: rules.Test) -> list[str]:
    """What a reader must know of the test itself."""
    notes = []
    if asked.min_duration_ns < rules.rules().min_duration_s * 10**9:
        notes.append("a minimum duration below the rules' 600 s: good for a trial, for nothing else")
    if asked.samples < rules.rules().benchmarks[asked.benchmark].samples:
        notes.append(f"a data set of {asked.samples:,} samples is smaller than the rules': for a trial only")
    return [*notes, *([asked.note] if asked.note else [])]


def write(folder: Path, result: mlperf.MlperfResult, asked: rules.Test, *, sut: str, version: str) -> None:
    """`mlperf.json` and LoadGen's two log files."""
    store.replace(folder / RESULT, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    log_files.write(folder, result, asked, sut=sut, version=version)


def read(folder: Path) -> mlperf.MlperfResult:
    """A stored result. Raises UserError when there is none."""
    path = folder / RESULT
    try:
        return msgspec.json.decode(path.read_bytes(), type=mlperf.MlperfResult)
    except OSError as error:
        raise UserError(
            f"no MLPerf-style result there: {error.strerror}", str(path), "a folder of loadgen mlperf"
        ) from None
    except msgspec.DecodeError as error:
        raise UserError(f"a damaged result: {error}", str(path)) from None


def _measured(summary: Summary) -> int:
    return next(i for i, stage in enumerate(summary.stages) if stage.measured)
