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


class ClientUsage(NamedTuple):
    """What one client process used, and its TTFT p50 and p99 in ms (None if not reported)."""

    cpu_s: float
    wall_s: float
    ttft_ms: tuple[float, float] | None


PrepareClient = Callable[
    [str, Case, Path], tuple[list[str], Callable[[], tuple[float, float] | None]]
]


def prepare_floor(
    url: str, case: Case, _scratch: Path
) -> tuple[list[str], Callable[[], tuple[float, float] | None]]:
    """Prepare the C reader, which only counts bytes."""
    body = json.dumps(contenders.request_body(case.tokens))
    return [
        str(compile_floor()),
        url.rpartition(":")[2],
        str(case.concurrency),
        str(case.requests),
        body,
    ], lambda: None


def prepare_loadgen(
    url: str, case: Case, scratch: Path
) -> tuple[list[str], Callable[[], tuple[float, float] | None]]:
    """Prepare `loadgen run` with everything that it does by default."""
    workload, run_dir = scratch / "bench.yaml", scratch / "ours"
    workload.write_text(
        f"name: bench\nrequests: {{input_tokens: 4, output_tokens: {case.tokens}}}\n"
    )
    load = ["-c", str(case.concurrency), "-n", str(case.requests), "--seed", "1", "--warmup", "0"]

    def read_ttft_ms() -> tuple[float, float]:
        """Return TTFT p50 and p99 in ms of the run."""
        ttft = json.loads((run_dir / "summary.json").read_text())["ttft_ms"]
        return ttft["p50"], ttft["p99"]

    command = [
        sys.executable,
        "-P",  # Without it, the checkout in the current directory would hide the one of PYTHONPATH.
        "-m",
        "loadgen",
        "run",
        str(workload),
        "--url",
        url,
        *load,
        "--out",
        str(run_dir),
    ]
    return command, read_ttft_ms


def prepare_vllm(
    url: str, case: Case, scratch: Path
) -> tuple[list[str], Callable[[], tuple[float, float] | None]]:
    """Prepare `vllm bench serve`, which is the program vllm-rs."""
    dataset_path = scratch / "rows.jsonl"
    dataset_path.write_text((json.dumps({"prompt": PROMPT}) + "\n") * case.requests)
    load = [
        "--num-prompts",
        str(case.requests),
        "--max-concurrency",
        str(case.concurrency),
        "--ignore-eos",
        "--disable-tqdm",
    ]
    dataset = [
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(dataset_path),
        "--custom-output-len",
        str(case.tokens),
    ]
    output_options = [
        "--save-result",
        "--result-dir",
        str(scratch),
        "--result-filename",
        "vllm.json",
    ]
    output_options += ["--percentile-metrics", "ttft", "--metric-percentiles", "50,99"]
    command = [
        FLAGS.vllm_rs,
        "bench",
        "serve",
        "--backend",
        "openai-chat",
        "--base-url",
        url,
        "--model",
        "sim",
    ]

    def read_ttft_ms() -> tuple[float, float]:
        """Return TTFT p50 and p99 in ms that it reports."""
        result = json.loads((scratch / "vllm.json").read_text())
        assert result["completed"] == case.requests, (
            f"vllm-rs: {result['completed']} of {case.requests}"
        )
        return result["p50_ttft_ms"], result["p99_ttft_ms"]

    return [
        *command,
        "--tokenizer",
        str(write_tokenizer(scratch)),
        *dataset,
        *load,
        *output_options,
    ], read_ttft_ms


def prepare_sglang(
    url: str, case: Case, scratch: Path
) -> tuple[list[str], Callable[[], tuple[float, float] | None]]:
    """Prepare SGLang's `bench_serving --rust`, which is its module `_bench`."""
    output_path = scratch / "sglang.jsonl"
    code = (
        f"import sys; sys.path.insert(0, {FLAGS.sglang_bench!r}); import _bench; "
        f"_bench.run_argv(['b', *sys.argv[1:]])"
    )
    load = [
        "--num-prompts",
        str(case.requests),
        "--max-concurrency",
        str(case.concurrency),
        "--disable-tqdm",
    ]
    dataset = [
        "--dataset-name",
        "random-ids",
        "--random-input-len",
        "4",
        "--random-output-len",
        str(case.tokens),
    ]
    dataset += [
        "--random-range-ratio",
        "1",
        "--worker-threads",
        "1",
        "--warmup-requests",
        "0",
        "--disable-retokenize",
    ]
    command = [
        sys.executable,
        "-c",
        code,
        "--backend",
        "vllm-chat",
        "--base-url",
        url,
        "--model",
        "sim",
    ]

    def read_ttft_ms() -> tuple[float, float]:
        """Return TTFT p50 and p99 in ms that it reports."""
        result = json.loads(output_path.read_text().splitlines()[-1])
        assert result["completed"] == case.requests, (
            f"SGLang: {result['completed']} of {case.requests}"
        )
        return result["median_ttft_ms"], result["p99_ttft_ms"]

    return [
        *command,
        "--tokenizer",
        str(write_tokenizer(scratch)),
        *dataset,
        *load,
        "--output-file",
        str(output_path),
    ], read_ttft_ms


def prepare_aiohttp(
    url: str, case: Case, _scratch: Path
) -> tuple[list[str], Callable[[], tuple[float, float] | None]]:
    """Prepare an aiohttp client that reads line by line, as home-made generators do."""
    arguments = json.dumps(
        {
            "url": url,
            "concurrency": case.concurrency,
            "tokens": case.tokens,
            "requests": case.requests,
        }
    )
    return [
        sys.executable,
        str(rig.BENCHMARKS_DIR / "contenders.py"),
        "closed",
        arguments,
    ], lambda: None


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


def run_client_once(
    name: str, case: Case
) -> tuple[ClientUsage, dict[str, float], tuple[float, float]]:
    """Run one client process; return its usage, what the server did and the true TTFT.

    The true TTFT is p50 and p99 in ms.
    """
    with tempfile.TemporaryDirectory(prefix="loadgen-clients-") as folder:
        scratch = Path(folder)
        log = scratch / "sends"
        with rig.serve_endpoint(
            **case.options, idle_close="60s", log_events="ends", log=str(log)
        ) as server:
            command, read_ttft_ms = CLIENTS[name](server.url, case, scratch)
            core = ",".join(map(str, rig.client_and_server_cores()[0]))
            counters_before, started_s = rig.read_counters(server.url), time.monotonic()
            with (scratch / "out").open("w+b") as output:
                env = {**os.environ, "TOKIO_WORKER_THREADS": "1"}
                if name == OTHER_CHECKOUT:
                    env["PYTHONPATH"] = os.pathsep.join(
                        (str(FLAGS.beside), str(FLAGS.beside / "sdk"))
                    )
                process = subprocess.Popen(
                    ["taskset", "-c", core, *command], stdout=output, stderr=output, env=env
                )
                _, status, resources = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
                output.seek(0)
                if process.returncode not in (
                    0,
                    3,
                ):  # 3: ours, when the host was too busy for its latencies
                    raise SystemExit(
                        f"{name} ended with {process.returncode}: {output.read()[-1000:].decode()}"
                    )
            wall_s, counters_after = time.monotonic() - started_s, rig.read_counters(server.url)
            ttft_ms = read_ttft_ms()
        send_log = parse_log(log.read_bytes())
        first_sent_ns: dict[int, int] = {}
        for number, sent_ns in zip(
            send_log.request.tolist(), send_log.sent_ns.tolist(), strict=True
        ):
            first_sent_ns.setdefault(number, sent_ns)
        true_ttft_ms = [
            (first_sent_ns[request.number] - request.arrival_ns) / 1e6
            for request in send_log.requests
            if request.number in first_sent_ns
        ]
    server_did = {
        counter: counters_after[counter] - counters_before[counter]
        for counter in ("events", "requests", "cpu_s")
    }
    if server_did["requests"] < case.requests:
        raise SystemExit(f"{name} sent {server_did['requests']} of {case.requests} requests")
    usage = ClientUsage(resources.ru_utime + resources.ru_stime, wall_s, ttft_ms)
    return (
        usage,
        server_did,
        (float(np.quantile(true_ttft_ms, 0.5)), float(np.quantile(true_ttft_ms, 0.99))),
    )


def measure_case(case: Case, names: list[str], rounds: int) -> str:
    """Return the table of one load."""
    rates_per_cpu_s: dict[str, list[float]] = {name: [] for name in names}
    core_usage: dict[str, list[str]] = {name: [] for name in names}
    ttft_errors_ms: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    count = case.requests * (case.tokens if case.counted_unit == "events" else 1)
    for name, runs in rig.interleave_rounds(
        rounds, {name: partial(run_client_once, name, case) for name in names}
    ).items():
        for usage, server_did, true_ttft_ms in runs:
            rates_per_cpu_s[name].append(count / usage.cpu_s)
            core_usage[name].append(
                f"{usage.cpu_s / usage.wall_s:.0%} / {server_did['cpu_s'] / usage.wall_s:.0%}"
            )
            if usage.ttft_ms is not None and None not in usage.ttft_ms:
                ttft_errors_ms[name].append(
                    (usage.ttft_ms[0] - true_ttft_ms[0], usage.ttft_ms[1] - true_ttft_ms[1])
                )
    rows = []
    for name in names:
        ratios = [
            f"{rig.median_ratio(rates_per_cpu_s[name], rates_per_cpu_s[other]):.2f}"
            if other in names and other != name
            else ""
            for other in ("floor", "lines", "ours")
        ]
        errors = [
            f"{rig.median([error[index] for error in ttft_errors_ms[name]]):+.2f}"
            if ttft_errors_ms[name]
            else ""
            for index in (0, 1)
        ]
        spread = f"{min(rates_per_cpu_s[name]):,.0f} to {max(rates_per_cpu_s[name]):,.0f}"
        rows.append(
            [
                NAMES[name],
                f"{rig.median(rates_per_cpu_s[name]):,.0f}",
                spread,
                *ratios,
                *errors,
                core_usage[name][0],
            ]
        )
    columns = [
        "client",
        f"{case.counted_unit}/CPU-s",
        "range",
        "of the floor",
        "of aiohttp",
        "of ours",
    ]
    columns += ["TTFT p50 off, ms", "p99 off, ms", "CPU client / server"]
    return (
        f"{case.description}; {case.requests:,} requests of {case.tokens} tokens, median of "
        f"{rounds}\n\n" + rig.format_table(columns, rows)
    )


def compile_sources() -> None:
    """Compile the bytecode of the packages that the client process imports."""
    for package in (loadgen, loadgen_sdk):
        compileall.compile_dir(Path(package.__path__[0]), quiet=2)


def main() -> None:
    """Print the table of each load."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the requests of each case")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--only", default=",".join(CLIENTS))
    parser.add_argument("--vllm-rs", default="", metavar="FILE")
    parser.add_argument("--sglang-bench", default="", metavar="FOLDER")
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT")
    vars(FLAGS).update(vars(rig.parse_arguments(parser, share=0.02, rounds=1, cases="short")))
    if FLAGS.beside is not None:
        FLAGS.beside = FLAGS.beside.resolve()
        NAMES[OTHER_CHECKOUT] = f"`loadgen run`, {rig.describe_commit(FLAGS.beside)}"
        compileall.compile_dir(FLAGS.beside, quiet=2)
    compile_sources()
    names = [name for name in CLIENTS if name in FLAGS.only.split(",")]
    for name, is_missing, reason in (
        ("floor", shutil.which("cc") is None, "no C compiler"),
        ("vllm", not FLAGS.vllm_rs, "no --vllm-rs"),
        ("sglang", not FLAGS.sglang_bench, "no --sglang-bench"),
        (OTHER_CHECKOUT, FLAGS.beside is None, "no --beside"),
    ):
        if is_missing and name in names:
            names.remove(name)
            print(f"left out: {NAMES[name]} ({reason})")
    print("Whole processes, one core for the client and another for the server.\n", flush=True)
    for name in FLAGS.cases.split(","):
        case = CASES[name]
        case = case._replace(requests=max(case.concurrency, round(case.requests * FLAGS.share)))
        print(measure_case(case, names, FLAGS.rounds) + "\n", flush=True)


if __name__ == "__main__":
    main()
