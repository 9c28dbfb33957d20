r"""Do loadgen and the reference client of MLPerf Endpoints measure the same point of a curve?

    git clone https://github.com/mlcommons/endpoints
    python -m venv endpoints/.venv && endpoints/.venv/bin/pip install ./endpoints
    python benchmarks/endpoints_client.py --alone \
        --reference-program endpoints/.venv/bin/inference-endpoint

Both send the same closed loops over HTTP to the same simulated server: a few concurrencies, a fixed
number of requests. The latencies of the server depend only on the number of a request, so both
clients meet the same ones, except for the few requests that loadgen sends first to learn about the
server. That matters only with a handful of requests, as with `--smoke`. The reference client cannot
ask for an exact length, so some of its responses end early. The events that each client recorded
are evaluated by the same functions, those of the steady window. The table has TTFT p90 and tokens/s
per user (1000 / TPOT p90 in ms, rules §4.1) as each client measured them, and how far they are from
the log of the server. A second table says how busy the threads of clients and servers were, because
a client without a free core measures its own delays.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rig
from numpy.typing import NDArray
from thread_usage import Usage, UsageSample, measure_usage, sample_usage

from loadgen.core.results import store
from loadgen.mlperf.endpoints.super_passes import (
    NEVER_NS,
    QUERY_COLUMNS,
    QueryLog,
    build_query_log,
    lower_percentile,
)
from loadgen.sim.server.send_log import parse_log

INPUT_TOKENS = 100
OUTPUT_TOKENS = 40
SERVER_OPTIONS: dict[str, Any] = {"ttft": "normal:800ms,150ms", "itl": "normal:40ms,2ms"}
DEFAULT_CONCURRENCIES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
MIN_REQUESTS = 64  # of a load, because a 90th percentile of fewer would depend on chance
MIN_SMOKE_REQUESTS = 4
PERCENTILE = 0.9  # the rules of MLPerf Endpoints limit TTFT and TPOT at p90
MAX_RELATIVE_DIFFERENCE = 0.005  # between the metrics of both clients
CLIENT_TIMEOUT_S = 600
SAMPLE_INTERVAL_S = 0.5  # between two readings of the CPU time of clients and servers
LOADGEN_EXIT_CODES = (0, 1, 3)  # of a completed run: valid, objective missed, invalid
PRINTED_ERROR_CHARACTERS = 2000

REFERENCE_CONFIG = """\
name: loadgen-comparison
type: online
model_params:
  name: m
  max_new_tokens: {output_tokens}
  streaming: 'on'
  tokenizer_name: {tokenizer_dir}
datasets:
- {{name: perf, type: performance, path: {prompts_path}, parser: {{prompt: text_input}}}}
settings:
  runtime: {{min_duration_ms: 0, max_duration_ms: 0, n_samples_to_issue: {requests}}}
  load_pattern: {{type: concurrency, target_concurrency: {concurrency}}}
  client: {{num_workers: 1, worker_initialization_timeout: 300}}
  service_ready_timeout_s: 300
endpoint_config:
  endpoints: ['{url}']
report_dir: {report_dir}
enable_cpu_affinity: false
"""
# Its tokens are words, because the simulated server sends one word per token.
WORD_TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"},
}
WORD_TOKENIZER_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast"}


class LatencyMetrics(NamedTuple):
    """The metrics of a load, as a client or the server recorded it.

    Attributes:
        ttft_p90_ms: The 90th percentile of the time to first token.
        tpot_p90_ms: The 90th percentile of the time per output token.
        queries: The number of completed queries.
    """

    ttft_p90_ms: float
    tpot_p90_ms: float
    queries: int

    @property
    def tokens_per_s_per_user(self) -> float:
        """The output tokens per second that a user receives, as section 4.1 of the rules has it."""
        return 1000 / self.tpot_p90_ms


class LoadSpec(NamedTuple):
    """A closed loop against a running server.

    Attributes:
        url: The URL of the server.
        server_pid: The process of the server, whose CPU time is sampled.
        concurrency: The requests in flight.
        requests: The number of requests.
        scratch_dir: An empty folder for the files of the client.
    """

    url: str
    server_pid: int
    concurrency: int
    requests: int
    scratch_dir: Path


class CpuSamples(NamedTuple):
    """Readings of the CPU time of the client's and of the server's threads during a load."""

    client: list[UsageSample]
    server: list[UsageSample]


class ClientResult(NamedTuple):
    """What a client measured during a load, and how busy it and the server were."""

    metrics: LatencyMetrics
    cpu_samples: CpuSamples


class ServerResult(NamedTuple):
    """What the server recorded of a load, which lasts from its first request to its last token."""

    metrics: LatencyMetrics
    begin_ns: int
    end_ns: int


class Measurement(NamedTuple):
    """What a client and the server recorded of the same load, and how busy both were."""

    client: LatencyMetrics
    server: LatencyMetrics
    client_usage: Usage | None
    server_usage: Usage | None


class Comparison(NamedTuple):
    """The same load, measured with both clients one after the other."""

    concurrency: int
    loadgen: Measurement
    reference: Measurement


Client = Callable[[LoadSpec], ClientResult]
"""A function that runs a load with one client to its end."""


def compute_metrics(log: QueryLog) -> LatencyMetrics:
    """Return the metrics of a load from the times of its queries, without incomplete queries."""
    ttft_ns = np.sort(log.ttft_ns[~np.isnan(log.ttft_ns)])
    tpot_ns = np.sort(log.tpot_ns[~np.isnan(log.tpot_ns)])
    return LatencyMetrics(
        ttft_p90_ms=lower_percentile(ttft_ns, PERCENTILE) / 1e6,
        tpot_p90_ms=lower_percentile(tpot_ns, PERCENTILE) / 1e6,
        queries=len(tpot_ns),
    )


# -- running a client ------------------------------------------------------------------------------


def run_with_loadgen(load: LoadSpec) -> ClientResult:
    """Run a load with loadgen and return what it measured."""
    run_dir = load.scratch_dir / "run"
    command = [
        *(sys.executable, "-P", "-m", "loadgen", "run", "qa"),
        *("--url", load.url),
        *("-c", str(load.concurrency)),
        *("-n", str(load.requests)),
        *("--isl", str(INPUT_TOKENS)),
        *("--osl", str(OUTPUT_TOKENS)),
        *("--warmup", "0"),
        *("--progress", "off"),
        *("-o", str(run_dir)),
    ]
    cpu_samples = run_client(command, load, accepted_codes=LOADGEN_EXIT_CODES)
    records = store.read_run_lazily(run_dir).rows
    query_log = build_query_log({name: records[name] for name in QUERY_COLUMNS})
    return ClientResult(compute_metrics(query_log), cpu_samples)


def run_with_reference(load: LoadSpec, program: str) -> ClientResult:
    """Run a load with the reference client and return what it measured.

    `program` is the path of the executable `inference-endpoint`.
    """
    config_path = write_reference_config(load)
    command = [program, "benchmark", "from-config", "--config", str(config_path)]
    cpu_samples = run_client(command, load, accepted_codes=(0,))
    query_log = read_reference_log(load.scratch_dir / "report" / "events.jsonl")
    return ClientResult(compute_metrics(query_log), cpu_samples)


def write_reference_config(load: LoadSpec) -> Path:
    """Write the tokenizer, the prompts and the configuration of the reference client.

    Returns:
        The path of the configuration, which names the other files.
    """
    tokenizer_dir = load.scratch_dir / "tokenizer"
    tokenizer_dir.mkdir()
    (tokenizer_dir / "tokenizer.json").write_text(json.dumps(WORD_TOKENIZER))
    (tokenizer_dir / "tokenizer_config.json").write_text(json.dumps(WORD_TOKENIZER_CONFIG))

    prompts_path = load.scratch_dir / "prompts.jsonl"
    with prompts_path.open("w") as prompts:
        for number in range(load.requests):
            prompt = f"{number} " + "word " * INPUT_TOKENS
            prompts.write(json.dumps({"text_input": prompt}) + "\n")

    config = REFERENCE_CONFIG.format(
        output_tokens=OUTPUT_TOKENS,
        tokenizer_dir=tokenizer_dir,
        prompts_path=prompts_path,
        requests=load.requests,
        concurrency=load.concurrency,
        url=load.url,
        report_dir=load.scratch_dir / "report",
    )
    config_path = load.scratch_dir / "config.yaml"
    config_path.write_text(config)
    return config_path


def run_client(command: list[str], load: LoadSpec, accepted_codes: tuple[int, ...]) -> CpuSamples:
    """Run the command of a client to its end, and sample its CPU time and that of the server.

    Raises SystemExit with the end of its output if its exit code is not accepted, as that of a
    client that took longer than CLIENT_TIMEOUT_S and was killed.
    """
    output_path = load.scratch_dir / "output.txt"
    with output_path.open("w") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            preexec_fn=raise_priority_with_children,  # noqa: PLW1509 - this process has one thread
        )
    cpu_samples = sample_cpu_until_exit(process, load.server_pid)
    if process.returncode not in accepted_codes:
        end_of_output = output_path.read_text("utf-8", "replace")[-PRINTED_ERROR_CHARACTERS:]
        raise SystemExit(f"{command[0]} ended with {process.returncode}:\n{end_of_output}")
    return cpu_samples


def raise_priority_with_children() -> None:
    """Give this process and its future children real-time priority, if `--alone` was passed.

    `rig.raise_priority` gives it to one process only, but both clients measure in child processes.
    """
    if rig.RealtimePriority.is_enabled:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def sample_cpu_until_exit(client: subprocess.Popen[bytes], server_pid: int) -> CpuSamples:
    """Sample the CPU time of a client and of the server until the client exits.

    A client that takes longer than CLIENT_TIMEOUT_S is killed.
    """
    samples = CpuSamples(client=[], server=[])
    deadline_s = time.monotonic() + CLIENT_TIMEOUT_S
    while client.poll() is None:
        samples.client.append(sample_usage(client.pid))
        samples.server.append(sample_usage(server_pid))
        time.sleep(SAMPLE_INTERVAL_S)
        if time.monotonic() > deadline_s:
            client.kill()
            client.wait()
    return samples


# -- the event log of the reference client ---------------------------------------------------------


def read_reference_log(path: Path) -> QueryLog:
    """Return the times of the queries that the reference client issued, from its event log.

    Each line is a JSON object: an event of one query, such as "sample.issued", with its time.
    """
    queries: dict[str, dict[str, int]] = {}
    for line in path.read_text("utf-8").splitlines():
        event = json.loads(line)
        scope, _, name = event["event_type"].partition(".")
        if scope != "sample":
            continue
        query = queries.setdefault(event["sample_uuid"], {})
        query.setdefault(name, event["timestamp_ns"])  # the first event of a name counts
        if name == "complete":
            query["later_tokens"] = count_later_words(event["data"])

    issued_queries = [query for query in queries.values() if "issued" in query]
    return QueryLog(
        issued_ns=collect_column(issued_queries, "issued", default=NEVER_NS),
        first_token_ns=collect_column(issued_queries, "recv_first", default=NEVER_NS),
        completed_ns=collect_column(issued_queries, "complete", default=NEVER_NS),
        later_tokens=collect_column(issued_queries, "later_tokens", default=0),
    )


def collect_column(
    queries: Sequence[Mapping[str, int]], name: str, default: int
) -> NDArray[np.int64]:
    """Return one value of each query as an array, with a default for queries without the value."""
    return np.array([query.get(name, default) for query in queries], np.int64)


def count_later_words(data: list[Any]) -> int:
    """Return the number of words of a response after its first chunk.

    The server sends one word per token, so these are the tokens whose rate TPOT measures. The data
    of a completed query is `[type, [chunk, chunk, ...]]`. A response without chunks is `[type]` or
    `[type, text]`.
    """
    chunks = data[1] if len(data) > 1 else ""
    if isinstance(chunks, str):
        return 0
    return len("".join(chunks[1:]).split())


# -- the log of the server -------------------------------------------------------------------------


def read_server_log(log: bytes, queries: int) -> ServerResult:
    """Return the metrics of a load according to the server's own log of arrivals and sends.

    Only the last `queries` requests are the load: before it, loadgen sends a few requests to learn
    about the server.
    """
    send_log = parse_log(log)
    send_times_by_request: dict[int, list[int]] = {}
    for request_number, sent_ns in zip(
        send_log.request.tolist(), send_log.sent_ns.tolist(), strict=True
    ):
        send_times_by_request.setdefault(request_number, []).append(sent_ns)

    completions = [request for request in send_log.requests if request.path.endswith("completions")]
    load_requests = completions[-queries:]
    send_times = [send_times_by_request[request.number] for request in load_requests]
    query_log = QueryLog(
        issued_ns=np.array([request.arrival_ns for request in load_requests], np.int64),
        first_token_ns=np.array([times_ns[0] for times_ns in send_times], np.int64),
        completed_ns=np.array([times_ns[-1] for times_ns in send_times], np.int64),
        later_tokens=np.array([request.output_tokens - 1 for request in load_requests]),
    )
    return ServerResult(
        metrics=compute_metrics(query_log),
        begin_ns=int(query_log.issued_ns.min()),
        end_ns=int(query_log.completed_ns.max()),
    )


# -- measuring -------------------------------------------------------------------------------------


def measure_with_client(run_load: Client, concurrency: int, requests: int) -> Measurement:
    """Run a load with one client against a new server, and return what both recorded."""
    with (
        tempfile.TemporaryDirectory(prefix="loadgen-client-") as scratch,
        rig.serve_endpoint(**SERVER_OPTIONS, log_events="all") as server,
    ):
        load = LoadSpec(server.url, server.pid, concurrency, requests, Path(scratch))
        client_result = run_load(load)
        server_log = rig.read_url(server.url + "/_log")

    server_result = read_server_log(server_log, requests)
    begin_ns = server_result.begin_ns
    end_ns = server_result.end_ns
    cpu_samples = client_result.cpu_samples
    return Measurement(
        client=client_result.metrics,
        server=server_result.metrics,
        client_usage=measure_usage(cpu_samples.client, begin_ns, end_ns),
        server_usage=measure_usage(cpu_samples.server, begin_ns, end_ns),
    )


def compare_clients(concurrency: int, requests: int, reference_program: str) -> Comparison:
    """Measure the same load with both clients, one after the other."""
    run_reference = partial(run_with_reference, program=reference_program)
    return Comparison(
        concurrency=concurrency,
        loadgen=measure_with_client(run_with_loadgen, concurrency, requests),
        reference=measure_with_client(run_reference, concurrency, requests),
    )


# -- the tables ------------------------------------------------------------------------------------

METRIC_COLUMNS = (
    "concurrency",
    "metric",
    "loadgen",
    "reference client",
    "difference",
    "loadgen, from the log of the server",
    "reference, from the log of the server",
    "requests",
)
USAGE_COLUMNS = (
    "concurrency",
    "client",
    "cores of the client",
    "its busiest thread",
    "its longest wait for a core",
    "cores of the server",
    "its busiest thread",
    "its longest wait for a core",
)


class MetricComparison(NamedTuple):
    """One metric of a load: as each client measured it, and as the server recorded it meanwhile."""

    name: str
    loadgen: float
    loadgen_server: float
    reference: float
    reference_server: float

    @property
    def relative_difference(self) -> float:
        """How much larger loadgen's value is than the reference client's, as a fraction."""
        return self.loadgen / self.reference - 1

    def format_cells(self) -> list[str]:
        """Return the name, both values, and the differences from each other and the server."""
        return [
            self.name,
            f"{self.loadgen:.2f}",
            f"{self.reference:.2f}",
            f"{self.relative_difference:+.2%}",
            f"{self.loadgen / self.loadgen_server - 1:+.2%}",
            f"{self.reference / self.reference_server - 1:+.2%}",
        ]


def list_metric_comparisons(comparison: Comparison) -> list[MetricComparison]:
    """Return the two metrics of MLPerf Endpoints for a load that both clients measured."""
    loadgen = comparison.loadgen
    reference = comparison.reference
    return [
        MetricComparison(
            "TTFT p90, ms",
            loadgen.client.ttft_p90_ms,
            loadgen.server.ttft_p90_ms,
            reference.client.ttft_p90_ms,
            reference.server.ttft_p90_ms,
        ),
        MetricComparison(
            "tokens/s per user",
            loadgen.client.tokens_per_s_per_user,
            loadgen.server.tokens_per_s_per_user,
            reference.client.tokens_per_s_per_user,
            reference.server.tokens_per_s_per_user,
        ),
    ]


def format_metric_rows(comparison: Comparison) -> list[list[str]]:
    """Return a table row for each metric of a load.

    A row is the concurrency, the cells of the metric and the number of completed requests.
    """
    return [
        [
            str(comparison.concurrency),
            *metric.format_cells(),
            str(comparison.loadgen.client.queries),
        ]
        for metric in list_metric_comparisons(comparison)
    ]


def format_usage_rows(comparison: Comparison) -> list[list[str]]:
    """Return a table row for each client: how busy it and the server were during a load."""
    measurements = {"loadgen": comparison.loadgen, "reference": comparison.reference}
    return [
        [
            str(comparison.concurrency),
            client_name,
            *format_usage_cells(measurement.client_usage),
            *format_usage_cells(measurement.server_usage),
        ]
        for client_name, measurement in measurements.items()
    ]


def format_usage_cells(usage: Usage | None) -> list[str]:
    """Return three cells: the used cores, the busiest thread and the longest wait for a core.

    They are dashes if the load was too short for two samples.
    """
    if usage is None:
        return ["-", "-", "-"]
    return [f"{usage.cores:.2f}", f"{usage.busiest_share:.0%}", f"{usage.waited_share:.1%}"]


def format_report(comparisons: Sequence[Comparison]) -> str:
    """Return the table of metrics, the table of CPU usage, and how many metrics agree."""
    metric_rows = []
    usage_rows = []
    metrics = []
    for comparison in comparisons:
        metric_rows += format_metric_rows(comparison)
        usage_rows += format_usage_rows(comparison)
        metrics += list_metric_comparisons(comparison)

    agreeing = [
        metric for metric in metrics if abs(metric.relative_difference) <= MAX_RELATIVE_DIFFERENCE
    ]
    return "\n\n".join(
        [
            rig.format_table(METRIC_COLUMNS, metric_rows),
            rig.format_table(USAGE_COLUMNS, usage_rows),
            f"{len(agreeing)} of {len(metrics)} values of the two clients differ by at most "
            f"{MAX_RELATIVE_DIFFERENCE:.1%}.",
        ]
    )


# -- the script ------------------------------------------------------------------------------------


def main() -> None:
    """Measure every concurrency with both clients and print the tables."""
    args = parse_command_line()
    program = shutil.which(args.reference_program)
    if program is None:
        rig.skip_script(f"{args.reference_program} is not installed")

    min_requests = MIN_SMOKE_REQUESTS if args.smoke else MIN_REQUESTS
    comparisons = [
        compare_clients(concurrency, max(concurrency * args.waves, min_requests), program)
        for concurrency in args.concurrency
    ]
    print(format_report(comparisons))


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script."""
    parser = rig.create_parser(__doc__, offers_realtime_priority=True)
    parser.add_argument(
        "--reference-program",
        default="inference-endpoint",
        help="the executable of the reference client",
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=DEFAULT_CONCURRENCIES)
    parser.add_argument("--waves", type=int, default=16, help="requests of each virtual user")
    return rig.parse_arguments(parser, concurrency=[2], waves=2)


if __name__ == "__main__":
    main()
