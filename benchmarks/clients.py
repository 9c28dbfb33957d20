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

The table also shows how far each client's TTFT p50 and p99 are from the endpoint's own log (first
byte sent minus request arrived). A case takes some minutes.
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
from collections.abc import Callable
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
    """One load: options of the endpoint, concurrency, tokens per response and requests."""

    description: str
    options: dict[str, Any]
    concurrency: int
    tokens: int
    requests: int
    counted_unit: str = "events"


CASES = {
    "paced": Case(
        "25,000 events/s, 256 streams, one event a read",
        {"ttft": "normal:40ms,10ms", "itl": "10.24ms"},
        256,
        400,
        1280,
    ),
    "slow": Case(
        "10,000 events/s, 256 streams, one event a read",
        {"ttft": "normal:100ms,25ms", "itl": "25.6ms"},
        256,
        400,
        512,
    ),
    "bundled": Case(
        "as fast as it goes, 64 streams, many events a read",
        {"ttft": "1ms", "flood": True},
        64,
        500,
        4000,
    ),
    "short": Case(
        "answers of 4 tokens, 2 ms apart, concurrency 256",
        {"ttft": "normal:50ms,10ms", "itl": "2ms"},
        256,
        4,
        20_000,
        "requests",
    ),
    "full": Case(
        "answers of 4 tokens at full speed, concurrency 256",
        {"ttft": "1ms", "itl": "0.1ms"},
        256,
        4,
        20_000,
        "requests",
    ),
}
PROMPT = "w1 w2 w3 w4"
OTHER_CHECKOUT = "beside"


class TtftQuantiles(NamedTuple):
    """The p50 and the p99 of TTFT in ms."""

    p50_ms: float
    p99_ms: float


class PreparedClient(NamedTuple):
    """A client that can be started.

    `read_ttft` returns the TTFT that the client has reported after it ended. It is None if the
    client reports no TTFT.
    """

    command: list[str]
    read_ttft: Callable[[], TtftQuantiles] | None = None


class ClientUsage(NamedTuple):
    """What one client process used, and the TTFT that it reported (None if it does not)."""

    cpu_s: float
    wall_s: float
    ttft: TtftQuantiles | None


PrepareClient = Callable[[str, Case, Path], PreparedClient]


def prepare_floor(url: str, case: Case, _scratch: Path) -> PreparedClient:
    """Prepare the C reader, which only counts bytes."""
    port = url.rpartition(":")[2]
    body = json.dumps(contenders.request_body(case.tokens))
    binary = str(compile_floor())
    return PreparedClient([binary, port, str(case.concurrency), str(case.requests), body])


def prepare_loadgen(url: str, case: Case, scratch: Path) -> PreparedClient:
    """Prepare `loadgen run` with everything that it does by default."""
    workload = scratch / "bench.yaml"
    run_dir = scratch / "ours"
    workload.write_text(
        f"name: bench\nrequests: {{input_tokens: 4, output_tokens: {case.tokens}}}\n"
    )

    def read_ttft() -> TtftQuantiles:
        """Return the TTFT in the summary of the run."""
        ttft = json.loads((run_dir / "summary.json").read_text())["ttft_ms"]
        return TtftQuantiles(ttft["p50"], ttft["p99"])

    # Without -P, the checkout in the current directory would hide the one of PYTHONPATH.
    program = [sys.executable, "-P", "-m", "loadgen", "run", str(workload), "--url", url]
    load = ["-c", str(case.concurrency), "-n", str(case.requests), "--seed", "1", "--warmup", "0"]
    return PreparedClient([*program, *load, "--out", str(run_dir)], read_ttft)


def prepare_vllm(url: str, case: Case, scratch: Path) -> PreparedClient:
    """Prepare `vllm bench serve`, which is the program vllm-rs."""
    dataset_path = scratch / "rows.jsonl"
    dataset_path.write_text((json.dumps({"prompt": PROMPT}) + "\n") * case.requests)
    result_path = scratch / "vllm.json"
    options = {
        "--backend": "openai-chat",
        "--base-url": url,
        "--model": "sim",
        "--tokenizer": str(write_tokenizer(scratch)),
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

    def read_ttft() -> TtftQuantiles:
        """Return the TTFT in its result file."""
        result = json.loads(result_path.read_text())
        assert result["completed"] == case.requests, (
            f"vllm-rs: {result['completed']} of {case.requests}"
        )
        return TtftQuantiles(result["p50_ttft_ms"], result["p99_ttft_ms"])

    command = [FLAGS.vllm_rs, "bench", "serve", *list_options(options)]
    return PreparedClient([*command, "--ignore-eos", "--disable-tqdm", "--save-result"], read_ttft)


def list_options(options: dict[str, str]) -> list[str]:
    """Return options with their values as arguments of a command."""
    return [word for option in options.items() for word in option]


def prepare_sglang(url: str, case: Case, scratch: Path) -> PreparedClient:
    """Prepare SGLang's `bench_serving --rust`, which is its module `_bench`."""
    output_path = scratch / "sglang.jsonl"
    code = (
        f"import sys; sys.path.insert(0, {FLAGS.sglang_bench!r}); import _bench; "
        f"_bench.run_argv(['b', *sys.argv[1:]])"
    )
    options = {
        "--backend": "vllm-chat",
        "--base-url": url,
        "--model": "sim",
        "--tokenizer": str(write_tokenizer(scratch)),
        "--dataset-name": "random-ids",
        "--random-input-len": "4",
        "--random-output-len": str(case.tokens),
        "--random-range-ratio": "1",
        "--worker-threads": "1",
        "--warmup-requests": "0",
        "--num-prompts": str(case.requests),
        "--max-concurrency": str(case.concurrency),
        "--output-file": str(output_path),
    }

    def read_ttft() -> TtftQuantiles:
        """Return the TTFT in the last line of its result file."""
        result = json.loads(output_path.read_text().splitlines()[-1])
        assert result["completed"] == case.requests, (
            f"SGLang: {result['completed']} of {case.requests}"
        )
        return TtftQuantiles(result["median_ttft_ms"], result["p99_ttft_ms"])

    command = [sys.executable, "-c", code, *list_options(options)]
    return PreparedClient([*command, "--disable-retokenize", "--disable-tqdm"], read_ttft)


def prepare_aiohttp(url: str, case: Case, _scratch: Path) -> PreparedClient:
    """Prepare an aiohttp client that reads line by line, as home-made generators do."""
    arguments = {
        "url": url,
        "concurrency": case.concurrency,
        "tokens": case.tokens,
        "requests": case.requests,
    }
    script = str(rig.BENCHMARKS_DIR / "contenders.py")
    command = [sys.executable, script, "closed", json.dumps(arguments)]

    return PreparedClient(command)


CLIENTS: dict[str, PrepareClient] = {
    "floor": prepare_floor,
    "ours": prepare_loadgen,
    OTHER_CHECKOUT: prepare_loadgen,
    "vllm": prepare_vllm,
    "sglang": prepare_sglang,
    "lines": prepare_aiohttp,
}
NAMES = {
    OTHER_CHECKOUT: "the other checkout",
    "floor": "C, epoll and read, counts bytes",
    "ours": "`loadgen run`",
    "vllm": "`vllm bench serve` (Rust)",
    "sglang": "SGLang `bench_serving` (Rust)",
    "lines": "aiohttp lines, json.loads",
}
FLAGS = argparse.Namespace(vllm_rs="", sglang_bench="", beside=None)


def compile_floor() -> Path:
    """Compile the C reader once and return its path."""
    binary = Path(tempfile.gettempdir()) / f"loadgen-floor-{os.getuid()}"
    source = rig.BENCHMARKS_DIR / "floor.c"
    if not binary.exists() or binary.stat().st_mtime < source.stat().st_mtime:
        subprocess.run(["cc", "-O2", str(source), "-o", str(binary)], check=True)
    return binary


def write_tokenizer(scratch: Path) -> Path:
    """Write a tokenizer of a thousand words that both Rust clients can load."""
    folder = scratch / "tokenizer"
    folder.mkdir(exist_ok=True)
    vocabulary = {"[UNK]": 0, **{f"w{i}": i + 1 for i in range(1000)}}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    empty_parts = dict.fromkeys(
        ("truncation", "padding", "normalizer", "post_processor", "decoder")
    )
    header = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}}
    (folder / "tokenizer.json").write_text(json.dumps({**header, **empty_parts, "model": model}))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')

    return folder


class ClientRun(NamedTuple):
    """A run of a client: what it used, the CPU-seconds of the server, and the true TTFT."""

    usage: ClientUsage
    server_cpu_s: float
    true_ttft: TtftQuantiles


def run_client_once(name: str, case: Case) -> ClientRun:
    """Run one client process against an endpoint of its own."""
    with tempfile.TemporaryDirectory(prefix="loadgen-clients-") as folder:
        scratch = Path(folder)
        log_path = scratch / "sends"
        with rig.serve_endpoint(
            **case.options, idle_close="60s", log_events="ends", log=str(log_path)
        ) as server:
            client = CLIENTS[name](server.url, case, scratch)
            before = rig.read_counters(server.url)
            started_s = time.monotonic()
            resources = run_on_client_core(name, client.command, scratch)
            wall_s = time.monotonic() - started_s
            after = rig.read_counters(server.url)
            ttft = client.read_ttft() if client.read_ttft else None

        true_ttft = read_true_ttft(log_path)

    served_requests = after["requests"] - before["requests"]
    if served_requests < case.requests:
        raise SystemExit(f"{name} sent {served_requests} of {case.requests} requests")

    usage = ClientUsage(resources.ru_utime + resources.ru_stime, wall_s, ttft)
    return ClientRun(usage, after["cpu_s"] - before["cpu_s"], true_ttft)


SUCCESS_EXIT_CODES = (0, 3)  # 3: loadgen, when the host was too busy for its latencies


def run_on_client_core(name: str, command: list[str], scratch: Path) -> resource.struct_rusage:
    """Run a client on the client's core, and return the resources that it used.

    Raises SystemExit if it fails.
    """
    client_cores = rig.assign_cores().client
    pinned_command = ["taskset", "-c", ",".join(map(str, client_cores)), *command]

    environment = {**os.environ, "TOKIO_WORKER_THREADS": "1"}  # for the Rust clients
    if name == OTHER_CHECKOUT:
        packages = (str(FLAGS.beside), str(FLAGS.beside / "sdk"))
        environment["PYTHONPATH"] = os.pathsep.join(packages)

    with (scratch / "out").open("w+b") as output:
        process = subprocess.Popen(pinned_command, stdout=output, stderr=output, env=environment)
        _, status, resources = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        if process.returncode not in SUCCESS_EXIT_CODES:
            raise SystemExit(
                f"{name} ended with {process.returncode}: {output.read()[-1000:].decode()}"
            )

    return resources


def read_true_ttft(log_path: Path) -> TtftQuantiles:
    """Return the TTFT by the endpoint's log: first byte sent minus request arrived."""
    log = parse_log(log_path.read_bytes())
    first_sent_ns: dict[int, int] = {}
    for number, sent_ns in zip(log.request.tolist(), log.sent_ns.tolist(), strict=True):
        first_sent_ns.setdefault(number, sent_ns)

    ttft_ms = [
        (first_sent_ns[request.number] - request.arrival_ns) / 1e6
        for request in log.requests
        if request.number in first_sent_ns
    ]
    return TtftQuantiles(float(np.quantile(ttft_ms, 0.5)), float(np.quantile(ttft_ms, 0.99)))


class ClientResults(NamedTuple):
    """All runs of one client: units per CPU-second, cores of both sides, and errors of TTFT."""

    rates_per_cpu_s: list[float]
    core_usage: list[str]
    p50_errors_ms: list[float]
    p99_errors_ms: list[float]


def summarize_runs(runs: list[ClientRun], unit_count: int) -> ClientResults:
    """Compute the results of a client whose runs have so many events or requests each."""
    results = ClientResults([], [], [], [])
    for usage, server_cpu_s, true_ttft in runs:
        results.rates_per_cpu_s.append(unit_count / usage.cpu_s)
        client_fraction = usage.cpu_s / usage.wall_s
        server_fraction = server_cpu_s / usage.wall_s
        results.core_usage.append(f"{client_fraction:.0%} / {server_fraction:.0%}")

        # loadgen withholds quantiles (None) if the host was too busy.
        if usage.ttft is not None and None not in usage.ttft:
            results.p50_errors_ms.append(usage.ttft.p50_ms - true_ttft.p50_ms)
            results.p99_errors_ms.append(usage.ttft.p99_ms - true_ttft.p99_ms)

    return results


REFERENCE_CLIENTS = ("floor", "lines", "ours")  # to which the others are compared


def measure_case(case: Case, names: list[str], rounds: int) -> str:
    """Return the table of one load."""
    unit_count = case.requests * (case.tokens if case.counted_unit == "events" else 1)
    runs_by_client = rig.interleave_rounds(
        rounds, {name: partial(run_client_once, name, case) for name in names}
    )
    results = {name: summarize_runs(runs, unit_count) for name, runs in runs_by_client.items()}
    columns = [
        "client",
        f"{case.counted_unit}/CPU-s",
        "range",
        "of the floor",
        "of aiohttp",
        "of ours",
        "TTFT p50 off, ms",
        "p99 off, ms",
        "CPU client / server",
    ]
    rows = [format_client(name, results) for name in names]

    return (
        f"{case.description}; {case.requests:,} requests of {case.tokens} tokens, median of "
        f"{rounds}\n\n" + rig.format_table(columns, rows)
    )


def compile_sources() -> None:
    """Compile the bytecode of the packages that the client process imports."""
    for package in (loadgen, loadgen_sdk):
        compileall.compile_dir(Path(package.__path__[0]), quiet=2)


def format_client(name: str, results: dict[str, ClientResults]) -> list[str]:
    """Return the row of a client, with its ratios to the reference clients."""
    own_results = results[name]
    rates = own_results.rates_per_cpu_s

    ratios = []
    for reference in REFERENCE_CLIENTS:
        is_comparable = reference in results and reference != name
        ratios.append(
            f"{rig.median_ratio(rates, results[reference].rates_per_cpu_s):.2f}"
            if is_comparable
            else ""
        )

    return [
        NAMES[name],
        f"{rig.median(rates):,.0f}",
        f"{min(rates):,.0f} to {max(rates):,.0f}",
        *ratios,
        format_median_error(own_results.p50_errors_ms),
        format_median_error(own_results.p99_errors_ms),
        own_results.core_usage[0],
    ]


def format_median_error(errors_ms: list[float]) -> str:
    """Return the median of errors in ms with its sign, "" if there are none."""
    return f"{rig.median(errors_ms):+.2f}" if errors_ms else ""


def find_missing_clients() -> dict[str, str]:
    """Return the clients that cannot run here, with the reason."""
    missing = {}
    if shutil.which("cc") is None:
        missing["floor"] = "no C compiler"

    if not FLAGS.vllm_rs:
        missing["vllm"] = "no --vllm-rs"

    if not FLAGS.sglang_bench:
        missing["sglang"] = "no --sglang-bench"

    if FLAGS.beside is None:
        missing[OTHER_CHECKOUT] = "no --beside"

    return missing


def select_clients(only: str) -> list[str]:
    """Return the selected clients that can run, and print those that are left out."""
    selected = [name for name in CLIENTS if name in only.split(",")]
    missing = find_missing_clients()
    for name, reason in missing.items():
        if name in selected:
            print(f"left out: {NAMES[name]} ({reason})")
    return [name for name in selected if name not in missing]


def prepare_other_checkout() -> None:
    """Name the other checkout of `--beside` by its commit, and compile its bytecode."""
    FLAGS.beside = FLAGS.beside.resolve()
    NAMES[OTHER_CHECKOUT] = f"`loadgen run`, {rig.describe_commit(FLAGS.beside)}"
    compileall.compile_dir(FLAGS.beside, quiet=2)


def main() -> None:
    """Print the table of each load: CPU time of all clients, and the errors of their TTFT.

    The options are kept in FLAGS, because the functions that prepare a client need them.
    """
    parser = rig.create_parser(__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the requests of each case")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--only", default=",".join(CLIENTS))
    parser.add_argument("--vllm-rs", default="", metavar="FILE")
    parser.add_argument("--sglang-bench", default="", metavar="FOLDER")
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT")
    args = rig.parse_arguments(parser, share=0.02, rounds=1, cases="short")
    vars(FLAGS).update(vars(args))

    if args.beside is not None:
        prepare_other_checkout()

    compile_sources()
    names = select_clients(args.only)
    print("Whole processes, one core for the client and another for the server.\n", flush=True)

    for case_name in args.cases.split(","):
        case = CASES[case_name]
        requests = max(case.concurrency, round(case.requests * args.share))
        case = case._replace(requests=requests)
        print(measure_case(case, names, args.rounds) + "\n", flush=True)


if __name__ == "__main__":
    main()
