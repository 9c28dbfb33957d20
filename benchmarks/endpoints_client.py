r"""Do loadgen and the reference client of MLPerf Endpoints measure the same point of a curve?

    git clone https://github.com/mlcommons/endpoints
    python -m venv endpoints/.venv && endpoints/.venv/bin/pip install ./endpoints
    python benchmarks/endpoints_client.py --alone \
        --reference-program endpoints/.venv/bin/inference-endpoint

Both send the same closed loops over HTTP to the same simulated server: a few concurrencies, a fixed
number of requests. The latencies of the server depend only on the number of a request, so both
clients meet the same ones, except for the few requests with which loadgen looks at the server
first. That matters only with a handful of requests, as with `--smoke`. The reference client cannot
ask for an exact length, so some of its responses end early. The events that each client recorded
are evaluated by the same functions, those of the steady window. The table has TTFT p90 and tokens/s
per user (1000 / TPOT p90 in ms, rules §4.1) as each client measured them, and how far they are from
the log of the server. A second table says how busy the threads of clients and servers were, because
a client without a free core measures its own delays.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
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

INPUT, OUTPUT = 100, 40  # tokens
OPTIONS: dict[str, Any] = {"ttft": "normal:800ms,150ms", "itl": "normal:40ms,2ms"}
DEFAULT_CONCURRENCIES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
QUANTILE = 0.9
MAX_DIFFERENCE = 0.005  # of a metric between both clients
TIMEOUT_S = 600
SAMPLE_INTERVAL_S = 0.5  # between two readings of the CPU time of clients and servers
CONFIG = """\
name: loadgen-comparison
type: online
model_params:
  name: m
  max_new_tokens: {output}
  streaming: 'on'
  tokenizer_name: {tokenizer}
datasets:
- {{name: perf, type: performance, path: {prompts}, parser: {{prompt: text_input}}}}
settings:
  runtime: {{min_duration_ms: 0, max_duration_ms: 0, n_samples_to_issue: {requests}}}
  load_pattern: {{type: concurrency, target_concurrency: {concurrency}}}
  client: {{num_workers: 1, worker_initialization_timeout: 300}}
  service_ready_timeout_s: 300
endpoint_config:
  endpoints: ['{url}']
report_dir: {report}
enable_cpu_affinity: false
"""
TOKENIZER: dict[str, Any] = {
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
"""A tokenizer whose tokens are words, as the simulated server sends one word per token."""


class Point(NamedTuple):
    """The metrics of a load at one concurrency, as one source has them.

    Attributes:
        ttft_p90_ms: The 90th percentile of TTFT.
        tpot_p90_ms: The 90th percentile of TPOT.
        queries: The complete queries.
    """

    ttft_p90_ms: float
    tpot_p90_ms: float
    queries: int

    @property
    def tokens_per_s_per_user(self) -> float:
        """The tokens per second and user, by rules §4.1."""
        return 1000 / self.tpot_p90_ms


class Load(NamedTuple):
    """One load: the endpoint and its process, the concurrency, the requests, a folder for files."""

    url: str
    server_pid: int
    concurrency: int
    requests: int
    folder: Path


class ProcessSamples(NamedTuple):
    """How much CPU time the processes of a client and of the server used, sample by sample."""

    client: list[UsageSample]
    server: list[UsageSample]


class ClientRun(NamedTuple):
    """What a client recorded of a load, and the samples of CPU time during it."""

    point: Point
    samples: ProcessSamples


class ServerLog(NamedTuple):
    """What the server recorded of a load, between its first request and its last send."""

    point: Point
    begin_ns: int
    end_ns: int


class Measurement(NamedTuple):
    """What a client and the server recorded of the same load, and how busy both were."""

    client: Point
    server: Point
    client_usage: Usage | None
    server_usage: Usage | None


def evaluate(log: QueryLog) -> Point:
    """Return the metrics of a load from its events."""
    tpot_ns = log.tpot_ns[~np.isnan(log.tpot_ns)]
    return Point(
        ttft_p90_ms=lower_percentile(np.sort(log.ttft_ns[~np.isnan(log.ttft_ns)]), QUANTILE) / 1e6,
        tpot_p90_ms=lower_percentile(np.sort(tpot_ns), QUANTILE) / 1e6,
        queries=len(tpot_ns),
    )


# -- the clients -----------------------------------------------------------------------------------


def run_loadgen(load: Load, _: str) -> ClientRun:
    """Run the load with loadgen and return what it recorded."""
    run_dir = load.folder / "run"
    command = [sys.executable, "-P", "-m", "loadgen", "run", "qa", "--url", load.url]
    command += ["-c", str(load.concurrency), "-n", str(load.requests)]
    command += ["--isl", str(INPUT), "--osl", str(OUTPUT), "--warmup", "0", "--progress", "off"]
    samples = run_client([*command, "-o", str(run_dir)], load, accepted_codes=(0, 1, 3))
    rows = store.read_run_lazily(run_dir).rows
    point = evaluate(build_query_log({name: rows[name] for name in QUERY_COLUMNS}))
    return ClientRun(point, samples)


def run_reference(load: Load, program: str) -> ClientRun:
    """Run the load with the reference client and return what it recorded."""
    config = write_reference_config(load)
    command = [program, "benchmark", "from-config", "--config", str(config)]
    samples = run_client(command, load, accepted_codes=(0,))
    log = read_reference_log(load.folder / "report" / "events.jsonl")
    return ClientRun(evaluate(log), samples)


def write_reference_config(load: Load) -> Path:
    """Write the tokenizer, the prompts and the configuration of the reference client."""
    tokenizer_dir = load.folder / "tokenizer"
    tokenizer_dir.mkdir()
    (tokenizer_dir / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (tokenizer_dir / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    prompts = load.folder / "prompts.jsonl"
    prompt_lines = [
        json.dumps({"text_input": f"{number} " + "word " * INPUT})
        for number in range(load.requests)
    ]
    prompts.write_text("\n".join(prompt_lines) + "\n")
    config = load.folder / "config.yaml"
    config.write_text(
        CONFIG.format(
            output=OUTPUT,
            tokenizer=tokenizer_dir,
            prompts=prompts,
            requests=load.requests,
            concurrency=load.concurrency,
            url=load.url,
            report=load.folder / "report",
        )
    )
    return config


def run_client(command: list[str], load: Load, accepted_codes: tuple[int, ...]) -> ProcessSamples:
    """Run a client to its end, and sample its CPU time and that of the server.

    Raises SystemExit with the output of the client if it fails or takes longer than TIMEOUT_S.
    """
    output_path = load.folder / "output.txt"
    with open(output_path, "w") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            preexec_fn=raise_priority,  # noqa: PLW1509 - this process has one thread
        )
    samples = sample_until_end(process, load.server_pid)
    if process.returncode not in accepted_codes:
        tail = output_path.read_text("utf-8", "replace")[-2000:]
        raise SystemExit(f"{command[0]} ended with {process.returncode}:\n{tail}")
    return samples


def sample_until_end(process: subprocess.Popen[bytes], server_pid: int) -> ProcessSamples:
    """Sample the CPU time of a client and of the server until the client ends.

    The client is killed after TIMEOUT_S.
    """
    samples = ProcessSamples([], [])
    deadline = time.monotonic() + TIMEOUT_S
    while process.poll() is None:
        samples.client.append(sample_usage(process.pid))
        samples.server.append(sample_usage(server_pid))
        time.sleep(SAMPLE_INTERVAL_S)
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
    return samples


def raise_priority() -> None:
    """Give this process and its children real-time priority, if `--alone` was passed.

    Both clients measure in child processes, too, which `rig.raise_priority` leaves out.
    """
    if rig.RealtimePriority.is_enabled:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def read_reference_log(path: Path) -> QueryLog:
    """Read the event log of the reference client. A word after the first chunk is a token."""
    queries: dict[str, dict[str, int]] = {}
    for line in path.read_text("utf-8").splitlines():
        event = json.loads(line)
        kind = event["event_type"]
        if not kind.startswith("sample."):
            continue
        query = queries.setdefault(event["sample_uuid"], {})
        query.setdefault(kind.removeprefix("sample."), event["timestamp_ns"])
        if kind == "sample.complete":
            query["later_tokens"] = count_later_words(event["data"])

    def column(name: str, default: int) -> NDArray[np.int64]:
        """Return one value of each query, in the order of issue."""
        values = [query.get(name, default) for query in queries.values() if "issued" in query]
        return np.array(values, np.int64)

    return QueryLog(
        issued_ns=column("issued", NEVER_NS),
        first_token_ns=column("recv_first", NEVER_NS),
        completed_ns=column("complete", NEVER_NS),
        later_tokens=column("later_tokens", 0),
    )


def count_later_words(data: list[Any]) -> int:
    """Return the words after the first chunk of a response: `[tag, [chunk, chunk, ...]]`."""
    chunks = data[1] if len(data) > 1 else ""
    return 0 if isinstance(chunks, str) else len("".join(chunks[1:]).split())


# -- the server ------------------------------------------------------------------------------------


def read_server_log(log: bytes, queries: int) -> ServerLog:
    """Return the metrics of a load according to the endpoint, from its arrival and send times.

    The load is the last `queries` requests. loadgen sends a few requests before it, to look at the
    endpoint.
    """
    sent = parse_log(log)
    sends_by_request: dict[int, list[int]] = {}
    for number, sent_ns in zip(sent.request.tolist(), sent.sent_ns.tolist(), strict=True):
        sends_by_request.setdefault(number, []).append(sent_ns)

    completions = [request for request in sent.requests if request.path.endswith("completions")]
    load_requests = completions[-queries:]
    sends_ns = [sends_by_request[request.number] for request in load_requests]
    query_log = QueryLog(
        issued_ns=np.array([request.arrival_ns for request in load_requests], np.int64),
        first_token_ns=np.array([sends[0] for sends in sends_ns], np.int64),
        completed_ns=np.array([sends[-1] for sends in sends_ns], np.int64),
        later_tokens=np.array([request.output_tokens - 1 for request in load_requests]),
    )
    return ServerLog(
        point=evaluate(query_log),
        begin_ns=int(query_log.issued_ns.min()),
        end_ns=int(query_log.completed_ns.max()),
    )


def measure(
    run: Callable[[Load, str], ClientRun], program: str, concurrency: int, requests: int
) -> Measurement:
    """Run a load with one client against a new server. Return what both recorded."""
    with (
        tempfile.TemporaryDirectory(prefix="loadgen-client-") as scratch,
        rig.serve_endpoint(**OPTIONS, log_events="all") as server,
    ):
        load = Load(server.url, server.pid, concurrency, requests, Path(scratch))
        client = run(load, program)
        log = read_server_log(rig.read_url(server.url + "/_log"), requests)
        return Measurement(
            client=client.point,
            server=log.point,
            client_usage=measure_usage(client.samples.client, log.begin_ns, log.end_ns),
            server_usage=measure_usage(client.samples.server, log.begin_ns, log.end_ns),
        )


# -- the script ------------------------------------------------------------------------------------


def read_ttft_ms(point: Point) -> float:
    """Return TTFT p90 in ms."""
    return point.ttft_p90_ms


def read_tokens_per_s(point: Point) -> float:
    """Return the tokens per second and user."""
    return point.tokens_per_s_per_user


METRICS: tuple[tuple[str, Callable[[Point], float]], ...] = (
    ("TTFT p90, ms", read_ttft_ms),
    ("tokens/s per user", read_tokens_per_s),
)


def format_rows(concurrency: int, measurements: Mapping[str, Measurement]) -> list[list[str]]:
    """Return the two rows of a concurrency: TTFT, and tokens per second and user."""
    ours = measurements["loadgen"]
    theirs = measurements["reference"]
    return [
        [
            str(concurrency),
            name,
            f"{value(ours.client):.2f}",
            f"{value(theirs.client):.2f}",
            f"{value(ours.client) / value(theirs.client) - 1:+.2%}",
            f"{value(ours.client) / value(ours.server) - 1:+.2%}",
            f"{value(theirs.client) / value(theirs.server) - 1:+.2%}",
            str(ours.client.queries),
        ]
        for name, value in METRICS
    ]


def format_usage_rows(concurrency: int, measurements: Mapping[str, Measurement]) -> list[list[str]]:
    """Return a row for each client: how busy it and its server were at a concurrency."""
    return [
        [
            str(concurrency),
            name,
            *format_usage(measurement.client_usage),
            *format_usage(measurement.server_usage),
        ]
        for name, measurement in measurements.items()
    ]


def format_usage(usage: Usage | None) -> list[str]:
    """Return the three cells of a usage, or dashes if the load was too short for one."""
    if usage is None:
        return ["-", "-", "-"]
    return [f"{usage.cores:.2f}", f"{usage.busiest_share:.0%}", f"{usage.waited_share:.1%}"]


COLUMNS = (
    "concurrency",
    "metric",
    "loadgen",
    "reference",
    "difference",
    "loadgen - server",
    "reference - server",
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


def main() -> None:
    """Measure every point with both clients and print the table."""
    parser = rig.create_parser(__doc__, offers_realtime_priority=True)
    parser.add_argument("--reference-program", default="inference-endpoint")
    parser.add_argument("--concurrency", type=int, nargs="+", default=DEFAULT_CONCURRENCIES)
    parser.add_argument("--waves", type=int, default=16, help="requests of each virtual user")
    args = rig.parse_arguments(parser, concurrency=[2], waves=2)
    program = shutil.which(args.reference_program)
    if program is None:
        rig.skip_script(f"{args.reference_program} is not installed")

    rows = []
    usage_rows = []
    for concurrency in args.concurrency:
        requests = max(concurrency * args.waves, 64 if not args.smoke else 4)
        measurements = {
            "loadgen": measure(run_loadgen, program, concurrency, requests),
            "reference": measure(run_reference, program, concurrency, requests),
        }
        rows += format_rows(concurrency, measurements)
        usage_rows += format_usage_rows(concurrency, measurements)

    print(rig.format_table(COLUMNS, rows))
    print("\n" + rig.format_table(USAGE_COLUMNS, usage_rows))
    differences = [abs(float(row[4].rstrip("%"))) / 100 for row in rows]
    within = sum(difference <= MAX_DIFFERENCE for difference in differences)
    print(f"\n{within} of {len(rows)} values are within {MAX_DIFFERENCE:.1%} of each other")


if __name__ == "__main__":
    main()
