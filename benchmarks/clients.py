"""How much CPU time do whole client processes use for the same load?

    python benchmarks/clients.py [--cases paced,slow,bundled,short] [--only floor,ours,...]
        [--vllm-rs FILE] [--sglang-bench FOLDER] [--beside ANOTHER/CHECKOUT]

The clients are a C reader as the floor, this client, the Rust clients of vLLM and SGLang, and
aiohttp. All send the same closed-loop load to the same embedded endpoint, with one core for the
client and another for the server. CPU-seconds are those of the whole process and its children, from
start to end, including start, tokenizer and report. Rounds are interleaved; ratios are taken within
a round. Python starts as in an installation, with its bytecode compiled: a checkout under
PYTHONDONTWRITEBYTECODE would compile 300 files at each start.

`--vllm-rs`: the binary `vllm/vllm-rs` from a wheel of vLLM (0.33.0; it runs alone).
`--sglang-bench`: a folder with the module `_bench` from a wheel of SGLang (0.5.23,
`sglang/srt/rust_extensions/`). A client that is not given is left out, and so is the floor without
a C compiler. Both Rust clients get one thread. `--beside`: another checkout of loadgen alternates
too.

The table also shows the error of each client's TTFT p50 and p99, compared with the endpoint's own
log (first byte sent minus request arrived). A case takes some minutes.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import contenders
import loadgen_sdk
import numpy as np
import rig

import loadgen
from loadgen.sim.server.send_log import parse_log


class Case(NamedTuple):
    """A closed-loop load on the endpoint.

    Attributes:
        description: What the table is titled.
        server_options: The options of the endpoint, which decide when it sends tokens.
        concurrency: The number of requests in flight.
        tokens: The tokens of each response.
        requests: The number of requests in all.
        counted_unit: Whether the cost of a client is that of its "events" or of its "requests".
    """

    description: str
    server_options: dict[str, Any]
    concurrency: int
    tokens: int
    requests: int
    counted_unit: str = "events"

    def count_units(self) -> int:
        """Return how many events or requests, whichever are counted, the complete load has."""
        if self.counted_unit == "events":
            return self.requests * self.tokens
        return self.requests


CASES = {
    "paced": Case(
        "25,000 events/s, 256 streams, one event a read",
        {"ttft": "normal:40ms,10ms", "itl": "10.24ms"},
        concurrency=256,
        tokens=400,
        requests=1_280,
    ),
    "slow": Case(
        "10,000 events/s, 256 streams, one event a read",
        {"ttft": "normal:100ms,25ms", "itl": "25.6ms"},
        concurrency=256,
        tokens=400,
        requests=512,
    ),
    "bundled": Case(
        "as fast as possible, 64 streams, many events a read",
        {"ttft": "1ms", "flood": True},
        concurrency=64,
        tokens=500,
        requests=4_000,
    ),
    "short": Case(
        "responses of 4 tokens, 2 ms apart, concurrency 256",
        {"ttft": "normal:50ms,10ms", "itl": "2ms"},
        concurrency=256,
        tokens=4,
        requests=20_000,
        counted_unit="requests",
    ),
    "full": Case(
        "responses of 4 tokens at full speed, concurrency 256",
        {"ttft": "1ms", "itl": "0.1ms"},
        concurrency=256,
        tokens=4,
        requests=20_000,
        counted_unit="requests",
    ),
}
PROMPT = "w1 w2 w3 w4"  # four words of the vocabulary that `write_tokenizer` writes
VOCABULARY_WORDS = 1_000

SUCCESS_EXIT_CODES = (0, 3)  # 3: loadgen, if the host was too busy for valid latencies
SHOWN_OUTPUT_BYTES = 1_000  # of a client that failed


class TtftQuantiles(NamedTuple):
    """The p50 and the p99 of TTFT in ms. They are None if loadgen withheld them (busy host)."""

    p50_ms: float | None
    p99_ms: float | None


class ClientPrograms(NamedTuple):
    """Where the clients are that are not part of this checkout; empty or None if not given."""

    vllm_rs: str
    sglang_bench: str
    other_checkout: Path | None


class ClientSetup(NamedTuple):
    """What a client needs to know before it is started: its server, its load, and its files."""

    url: str
    case: Case
    scratch: Path
    programs: ClientPrograms


class PreparedClient(NamedTuple):
    """A client that can be started.

    Attributes:
        command: The command that sends the load and then exits.
        read_ttft: Returns the TTFT that the client has reported, after it exited. It is None for a
            client that reports no TTFT.
        environment: Variables to add to the environment of the process.
    """

    command: list[str]
    read_ttft: Callable[[], TtftQuantiles] | None = None
    environment: Mapping[str, str] = {}


class Client(NamedTuple):
    """A client that is compared: its description, and the function that prepares its command."""

    description: str
    prepare: Callable[[ClientSetup], PreparedClient]


def prepare_c_reader(setup: ClientSetup) -> PreparedClient:
    """Prepare the C reader `floor.c`, which only counts bytes and reports no TTFT."""
    case = setup.case
    port = setup.url.rpartition(":")[2]
    body = json.dumps(contenders.create_request_body(case.tokens))
    binary = str(compile_c_reader())
    return PreparedClient([binary, port, str(case.concurrency), str(case.requests), body])


def compile_c_reader() -> Path:
    """Compile `floor.c`, unless that was done since its last change, and return the binary."""
    binary = Path(tempfile.gettempdir()) / f"loadgen-floor-{os.getuid()}"
    source = rig.BENCHMARKS_DIR / "floor.c"
    is_current = binary.exists() and binary.stat().st_mtime >= source.stat().st_mtime
    if not is_current:
        subprocess.run(["cc", "-O2", str(source), "-o", str(binary)], check=True)
    return binary


def prepare_loadgen(setup: ClientSetup) -> PreparedClient:
    """Prepare `loadgen run` with everything that it does by default."""
    case = setup.case
    run_dir = setup.scratch / "run"
    workload_path = setup.scratch / "bench.yaml"
    workload_path.write_text(
        f"name: bench\nrequests: {{input_tokens: 4, output_tokens: {case.tokens}}}\n"
    )
    options = {
        "--url": setup.url,
        "--concurrency": str(case.concurrency),
        "--num-requests": str(case.requests),
        "--seed": "1",
        "--warmup": "0",
        "--out": str(run_dir),
    }

    # Without -P, Python would prefer the checkout in the current directory to that of PYTHONPATH.
    program = [sys.executable, "-P", "-m", "loadgen", "run", str(workload_path)]
    command = [*program, *list_arguments(options)]
    return PreparedClient(command, partial(read_loadgen_ttft, run_dir))


def prepare_other_checkout(setup: ClientSetup) -> PreparedClient:
    """Prepare `loadgen run` of the other checkout, which PYTHONPATH makes Python import."""
    checkout = setup.programs.other_checkout
    assert checkout is not None
    package_parents = [str(checkout), str(checkout / "sdk")]
    environment = {"PYTHONPATH": os.pathsep.join(package_parents)}
    return prepare_loadgen(setup)._replace(environment=environment)


def read_loadgen_ttft(run_dir: Path) -> TtftQuantiles:
    """Return the TTFT in the summary of a run of loadgen."""
    summary = json.loads((run_dir / "summary.json").read_text())
    return TtftQuantiles(summary["ttft_ms"]["p50"], summary["ttft_ms"]["p99"])


def prepare_vllm(setup: ClientSetup) -> PreparedClient:
    """Prepare `vllm bench serve`, which is the program vllm-rs."""
    case = setup.case
    dataset_path = setup.scratch / "prompts.jsonl"
    dataset_path.write_text((json.dumps({"prompt": PROMPT}) + "\n") * case.requests)
    result_path = setup.scratch / "vllm.json"
    options = {
        "--backend": "openai-chat",
        "--base-url": setup.url,
        "--model": "sim",
        "--tokenizer": str(write_tokenizer(setup.scratch)),
        "--dataset-name": "custom",
        "--dataset-path": str(dataset_path),
        "--custom-output-len": str(case.tokens),
        "--num-prompts": str(case.requests),
        "--max-concurrency": str(case.concurrency),
        "--result-dir": str(result_path.parent),
        "--result-filename": result_path.name,
        "--percentile-metrics": "ttft",
        "--metric-percentiles": "50,99",
    }
    switches = ["--ignore-eos", "--disable-tqdm", "--save-result"]

    command = [setup.programs.vllm_rs, "bench", "serve", *list_arguments(options), *switches]
    return PreparedClient(command, partial(read_vllm_ttft, result_path, case.requests))


def read_vllm_ttft(result_path: Path, requests: int) -> TtftQuantiles:
    """Return the TTFT in a result file of vLLM, which must have this number of requests."""
    result = json.loads(result_path.read_text())
    check_completed("vllm-rs", result["completed"], requests)
    return TtftQuantiles(result["p50_ttft_ms"], result["p99_ttft_ms"])


def prepare_sglang(setup: ClientSetup) -> PreparedClient:
    """Prepare SGLang's `bench_serving --rust`, which is its Python extension module `_bench`."""
    case = setup.case
    result_path = setup.scratch / "sglang.jsonl"
    options = {
        "--backend": "vllm-chat",
        "--base-url": setup.url,
        "--model": "sim",
        "--tokenizer": str(write_tokenizer(setup.scratch)),
        "--dataset-name": "random-ids",
        "--random-input-len": "4",
        "--random-output-len": str(case.tokens),
        "--random-range-ratio": "1",
        "--worker-threads": "1",
        "--warmup-requests": "0",
        "--num-prompts": str(case.requests),
        "--max-concurrency": str(case.concurrency),
        "--output-file": str(result_path),
    }
    switches = ["--disable-retokenize", "--disable-tqdm"]

    # The function takes a complete argv, whose first item is the name of the program.
    program = "import sys, _bench; _bench.run_argv(['bench_serving', *sys.argv[1:]])"
    command = [sys.executable, "-c", program, *list_arguments(options), *switches]
    environment = {"PYTHONPATH": setup.programs.sglang_bench}
    return PreparedClient(
        command, partial(read_sglang_ttft, result_path, case.requests), environment
    )


def read_sglang_ttft(result_path: Path, requests: int) -> TtftQuantiles:
    """Return the TTFT in the last line of a result file of SGLang.

    The line must have this number of requests.
    """
    last_line = result_path.read_text().splitlines()[-1]
    result = json.loads(last_line)
    check_completed("SGLang", result["completed"], requests)
    return TtftQuantiles(result["median_ttft_ms"], result["p99_ttft_ms"])


def prepare_aiohttp(setup: ClientSetup) -> PreparedClient:
    """Prepare an aiohttp client that reads line by line, as home-made load generators do."""
    case = setup.case
    arguments = {
        "url": setup.url,
        "concurrency": case.concurrency,
        "tokens": case.tokens,
        "requests": case.requests,
    }
    script = str(rig.BENCHMARKS_DIR / "contenders.py")
    return PreparedClient([sys.executable, script, "closed_loop", json.dumps(arguments)])


def check_completed(client: str, completed: int, requests: int) -> None:
    """Raise SystemExit if a client completed another number of requests than it was told to."""
    if completed != requests:
        raise SystemExit(f"{client} completed {completed} of {requests} requests")


def list_arguments(options: Mapping[str, str]) -> list[str]:
    """Return options with their values as a list of command-line arguments."""
    return [argument for option in options.items() for argument in option]


def write_tokenizer(scratch: Path) -> Path:
    """Write a Hugging Face tokenizer that both Rust clients can load, and return its folder.

    Its vocabulary is the words w0, w1 and so on.
    """
    token_ids = {f"w{number}": number + 1 for number in range(VOCABULARY_WORDS)}
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0, **token_ids}, "unk_token": "[UNK]"}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}

    folder = scratch / "tokenizer"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


CLIENTS = {
    "floor": Client("C, epoll and read, counts bytes", prepare_c_reader),
    "ours": Client("`loadgen run`", prepare_loadgen),
    "beside": Client("`loadgen run` of another checkout", prepare_other_checkout),
    "vllm": Client("`vllm bench serve` (Rust)", prepare_vllm),
    "sglang": Client("SGLang `bench_serving` (Rust)", prepare_sglang),
    "lines": Client("aiohttp lines, json.loads", prepare_aiohttp),
}


class ClientRun(NamedTuple):
    """One run of a client.

    Attributes:
        client_cpu_s: The CPU-seconds of the client process and its children.
        server_cpu_s: The CPU-seconds of the server while the client ran.
        wall_s: The seconds from the start of the client process to its exit.
        reported_ttft: The TTFT that the client reported, or None if it reports none.
        true_ttft: The TTFT by the log of the server.
    """

    client_cpu_s: float
    server_cpu_s: float
    wall_s: float
    reported_ttft: TtftQuantiles | None
    true_ttft: TtftQuantiles


def run_client_once(client: Client, case: Case, programs: ClientPrograms) -> ClientRun:
    """Run one client process against a server of its own, and return what both used."""
    with tempfile.TemporaryDirectory(prefix="loadgen-clients-") as folder:
        scratch = Path(folder)
        log_path = scratch / "server.log"
        server_options = {
            **case.server_options,
            "idle_close": "60s",
            "log_events": "ends",  # of each response, its first event and its last
            "log": str(log_path),
        }
        with rig.serve_endpoint(**server_options) as server:
            prepared = client.prepare(ClientSetup(server.url, case, scratch, programs))
            before = rig.read_counters(server.url)
            started_s = time.monotonic()
            client_cpu_s = run_on_client_core(prepared, scratch / "output.txt")
            wall_s = time.monotonic() - started_s
            after = rig.read_counters(server.url)

        # The server writes its log when it stops.
        true_ttft = read_true_ttft(log_path)
        reported_ttft = prepared.read_ttft() if prepared.read_ttft else None

    served_requests = int(after["requests"] - before["requests"])
    if served_requests < case.requests:
        raise SystemExit(f"{client.description} sent {served_requests} of {case.requests} requests")

    server_cpu_s = after["cpu_s"] - before["cpu_s"]
    return ClientRun(client_cpu_s, server_cpu_s, wall_s, reported_ttft, true_ttft)


def run_on_client_core(client: PreparedClient, output_path: Path) -> float:
    """Run a client on the client's core until it exits, and return its CPU-seconds.

    Its children, which it waited for, are included. Raises SystemExit with the end of its output if
    it failed.
    """
    client_cores = rig.assign_cores().client
    core_list = ",".join(map(str, client_cores))
    command = ["taskset", "-c", core_list, *client.command]

    # The Rust clients use the runtime Tokio.
    environment = {**os.environ, "TOKIO_WORKER_THREADS": "1", **client.environment}

    with output_path.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        # Only wait4 returns the resources of a single child process.
        _, wait_status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(wait_status)

    if process.returncode not in SUCCESS_EXIT_CODES:
        output_end = output_path.read_bytes()[-SHOWN_OUTPUT_BYTES:].decode(errors="replace")
        raise SystemExit(f"{client.command} exited with {process.returncode}: {output_end}")

    return total_cpu_s(usage)


def total_cpu_s(usage: resource.struct_rusage) -> float:
    """Return the CPU-seconds of a process in user mode and in the kernel."""
    return usage.ru_utime + usage.ru_stime


def read_true_ttft(log_path: Path) -> TtftQuantiles:
    """Return the TTFT by the server's log: the first byte sent minus the arrival of the request."""
    log = parse_log(log_path.read_bytes())

    # The log has several sends of each request, in the order of time. The first one counts.
    first_sent_ns: dict[int, int] = {}
    for request_number, sent_ns in zip(log.request.tolist(), log.sent_ns.tolist(), strict=True):
        first_sent_ns.setdefault(request_number, sent_ns)

    ttft_ms = [
        (first_sent_ns[request.number] - request.arrival_ns) / 1e6
        for request in log.requests
        if request.number in first_sent_ns
    ]
    p50_ms, p99_ms = np.quantile(ttft_ms, (0.5, 0.99)).tolist()
    return TtftQuantiles(p50_ms, p99_ms)


class ClientResults:
    """The results of one client from all its runs, one per round.

    `units_per_cpu_s` has the events or requests per CPU-second of each run. The TTFT errors have
    the runs in which the client reported the quantile.
    """

    def __init__(self, description: str, runs: Sequence[ClientRun], unit_count: int) -> None:
        self.description = description
        self.runs = runs
        self.units_per_cpu_s = [unit_count / run.client_cpu_s for run in runs]
        self.p50_errors_ms: list[float] = []
        self.p99_errors_ms: list[float] = []
        for run in runs:
            if run.reported_ttft is not None:
                self._add_ttft_errors(run.reported_ttft, run.true_ttft)

    def _add_ttft_errors(self, reported: TtftQuantiles, true: TtftQuantiles) -> None:
        """Add the errors of the TTFT that a run reported, unless loadgen withheld the values."""
        if reported.p50_ms is None or reported.p99_ms is None:
            return
        assert true.p50_ms is not None and true.p99_ms is not None
        self.p50_errors_ms.append(reported.p50_ms - true.p50_ms)
        self.p99_errors_ms.append(reported.p99_ms - true.p99_ms)


# Names of the clients with which the others are compared, in the order of their columns
REFERENCE_CLIENTS = ("floor", "lines", "ours")


def measure_case(
    case: Case, clients: Mapping[str, Client], programs: ClientPrograms, rounds: int
) -> dict[str, ClientResults]:
    """Run each client once per round, in turn, and return the results of each by its name."""
    run_functions = {
        name: partial(run_client_once, client, case, programs) for name, client in clients.items()
    }
    runs_by_client = rig.interleave_rounds(rounds, run_functions)
    return {
        name: ClientResults(clients[name].description, runs, case.count_units())
        for name, runs in runs_by_client.items()
    }


def format_case(case: Case, results: Mapping[str, ClientResults], rounds: int) -> str:
    """Return the title and the table of one case."""
    title = (
        f"{case.description}; {case.requests:,} requests of {case.tokens} tokens, median of "
        f"{rounds}"
    )
    columns = [
        "client",
        f"{case.counted_unit}/CPU-s",
        "range",
        "vs C reader",
        "vs aiohttp",
        "vs loadgen",
        "TTFT p50 error, ms",
        "TTFT p99 error, ms",
        "CPU client / server",
    ]
    rows = [format_client(name, results) for name in results]
    return title + "\n\n" + rig.format_table(columns, rows)


def format_client(name: str, results: Mapping[str, ClientResults]) -> list[str]:
    """Return the row of a client, with its ratios to the reference clients."""
    client = results[name]
    units_per_cpu_s = client.units_per_cpu_s
    first_run = client.runs[0]
    client_cores = first_run.client_cpu_s / first_run.wall_s
    server_cores = first_run.server_cpu_s / first_run.wall_s

    ratios = [format_ratio(name, reference_name, results) for reference_name in REFERENCE_CLIENTS]
    return [
        client.description,
        f"{rig.median(units_per_cpu_s):,.0f}",
        f"{min(units_per_cpu_s):,.0f} to {max(units_per_cpu_s):,.0f}",
        *ratios,
        format_median_error(client.p50_errors_ms),
        format_median_error(client.p99_errors_ms),
        f"{client_cores:.0%} / {server_cores:.0%}",
    ]


def format_ratio(name: str, reference_name: str, results: Mapping[str, ClientResults]) -> str:
    """Return the ratio of two clients in events or requests per CPU-second.

    Return "" for a client and itself, and if the reference client was not measured.
    """
    if reference_name == name or reference_name not in results:
        return ""
    rates = results[name].units_per_cpu_s
    reference_rates = results[reference_name].units_per_cpu_s
    return f"{rig.median_ratio(rates, reference_rates):.2f}"


def format_median_error(errors_ms: Sequence[float]) -> str:
    """Return the median of errors in ms with its sign, or "" if there are none."""
    return f"{rig.median(errors_ms):+.2f}" if errors_ms else ""


def find_missing_clients(programs: ClientPrograms) -> dict[str, str]:
    """Return the names of the clients that cannot run here, with the reason."""
    missing = {}
    if shutil.which("cc") is None:
        missing["floor"] = "no C compiler"
    if not programs.vllm_rs:
        missing["vllm"] = "no --vllm-rs"
    if not programs.sglang_bench:
        missing["sglang"] = "no --sglang-bench"
    if programs.other_checkout is None:
        missing["beside"] = "no --beside"
    return missing


def select_clients(names: Sequence[str], programs: ClientPrograms) -> dict[str, Client]:
    """Return the selected clients that can run here, and print which are left out and why.

    The other checkout is described by its commit.
    """
    missing = find_missing_clients(programs)
    clients = {}
    for name, client in CLIENTS.items():
        if name not in names:
            continue
        if name in missing:
            print(f"left out: {client.description} ({missing[name]})")
            continue
        clients[name] = client

    if "beside" in clients and programs.other_checkout is not None:
        commit = rig.describe_commit(programs.other_checkout)
        clients["beside"] = clients["beside"]._replace(description=f"`loadgen run`, {commit}")
    return clients


def compile_bytecode(other_checkout: Path | None) -> None:
    """Compile the bytecode of what the processes of loadgen import, of both checkouts."""
    for package in (loadgen, loadgen_sdk):
        compileall.compile_dir(Path(package.__path__[0]), quiet=2)
    if other_checkout is not None:
        compileall.compile_dir(other_checkout, quiet=2)


def parse_options() -> argparse.Namespace:
    """Parse the command line of this script."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the requests of each case")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--only", default=",".join(CLIENTS))
    parser.add_argument("--vllm-rs", default="", metavar="FILE")
    parser.add_argument("--sglang-bench", default="", metavar="FOLDER")
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT")
    smoke_defaults = {"share": 0.02, "rounds": 1, "cases": "short"}
    return rig.parse_arguments(parser, **smoke_defaults)


def main() -> None:
    """Print a table for each case: the CPU time of all clients, and the errors of their TTFT."""
    args = parse_options()
    other_checkout = None if args.beside is None else args.beside.resolve()
    programs = ClientPrograms(args.vllm_rs, args.sglang_bench, other_checkout)

    compile_bytecode(other_checkout)
    clients = select_clients(args.only.split(","), programs)
    print("Whole processes, one core for the client and another for the server.\n", flush=True)

    for case_name in args.cases.split(","):
        full_case = CASES[case_name]
        requests = max(full_case.concurrency, round(full_case.requests * args.share))
        case = full_case._replace(requests=requests)
        results = measure_case(case, clients, programs, args.rounds)
        print(format_case(case, results, args.rounds) + "\n", flush=True)


if __name__ == "__main__":
    main()
