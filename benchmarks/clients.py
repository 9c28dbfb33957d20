"""Whole client processes side by side: a C reader as the floor, this client, Rust clients of vLLM and SGLang, aiohttp.

    python benchmarks/clients.py [--cases paced,slow,bundled,short] [--only floor,ours,...]
        [--vllm-rs FILE] [--sglang-bench FOLDER] [--beside ANOTHER/CHECKOUT]

All send the same closed-loop load to the same embedded endpoint, one core for the client and another for the server.
CPU-seconds are those of the whole process and its children, from its start to its end: start, tokenizer, report and
all. Rounds are interleaved; ratios are taken within a round. Python starts as it does where it was installed, with its
bytecode compiled: a checkout under PYTHONDONTWRITEBYTECODE would compile 300 files at each start.

`--vllm-rs`: the binary `vllm/vllm-rs` from a wheel of vLLM (0.33.0; it runs alone). `--sglang-bench`: a folder with the
module `_bench` from a wheel of SGLang (0.5.23, `sglang/srt/rust_extensions/`). What is not given is left out, and so is
the floor where there is no C compiler. Both Rust clients get one thread.

`--beside`: another checkout of loadgen takes turns too.

TTFT: how far each client's p50 and p99 are from the endpoint's own log (first byte sent minus request arrived).
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
    """One load: options of the endpoint, lanes, tokens of an answer, requests, and what is counted."""

    what: str
    options: dict[str, Any]
    lanes: int
    tokens: int
    requests: int
    counted: str = "events"


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
        "answers of 4 tokens, 2 ms apart, 256 lanes",
        {"ttft": "normal:50ms,10ms", "itl": "2ms"},
        256,
        4,
        20_000,
        "requests",
    ),
    "full": Case(
        "answers of 4 tokens at full speed, 256 lanes",
        {"ttft": "1ms", "itl": "0.1ms"},
        256,
        4,
        20_000,
        "requests",
    ),
}
PROMPT = "w1 w2 w3 w4"
BESIDE = "beside"


class Ran(NamedTuple):
    """What one client process used, and the TTFT that it reported (ms; None: it reports none)."""

    cpu_s: float
    wall_s: float
    ttft_ms: tuple[float, float] | None


Client = Callable[[str, Case, Path], tuple[list[str], Callable[[], tuple[float, float] | None]]]


def floor(
    url: str, case: Case, scratch: Path
) -> tuple[list[str], Callable[[], tuple[float, float] | None]]:
    """The C reader."""
    body = json.dumps(contenders.request_body(case.tokens))
    return [
        str(floor_binary()),
        url.rpartition(":")[2],
        str(case.lanes),
        str(case.requests),
        body,
    ], lambda: None


def ours(
    url: str, case: Case, scratch: Path
) -> tuple[list[str], Callable[[], tuple[float, float] | None]]:
    """`loadgen run`, with everything that it does by default."""
    workload, out = scratch / "bench.yaml", scratch / "ours"
    workload.write_text(
        f"name: bench\nrequests: {{input_tokens: 4, output_tokens: {case.tokens}}}\n"
    )
    load = ["-c", str(case.lanes), "-n", str(case.requests), "--seed", "1", "--warmup", "0"]

    def told() -> tuple[float, float]:
        ttft = json.loads((out / "summary.json").read_text())["ttft_ms"]
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
        str(out),
    ]
    return command, told


def vllm(
    url: str, case: Case, scratch: Path
) -> tuple[list[str], Callable[[], tuple[float, float] | None]]:
    """`vllm bench serve`, which is the program vllm-rs."""
    rows = scratch / "rows.jsonl"
    rows.write_text((json.dumps({"prompt": PROMPT}) + "\n") * case.requests)
    load = [
        "--num-prompts",
        str(case.requests),
        "--max-concurrency",
        str(case.lanes),
        "--ignore-eos",
        "--disable-tqdm",
    ]
    given = [
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(rows),
        "--custom-output-len",
        str(case.tokens),
    ]
    shown = ["--save-result", "--result-dir", str(scratch), "--result-filename", "vllm.json"]
    shown += ["--percentile-metrics", "ttft", "--metric-percentiles", "50,99"]
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

    def told() -> tuple[float, float]:
        result = json.loads((scratch / "vllm.json").read_text())
        assert result["completed"] == case.requests, (
            f"vllm-rs: {result['completed']} of {case.requests}"
        )
        return result["p50_ttft_ms"], result["p99_ttft_ms"]

    return [*command, "--tokenizer", str(tokenizer(scratch)), *given, *load, *shown], told


def sglang(
    url: str, case: Case, scratch: Path
) -> tuple[list[str], Callable[[], tuple[float, float] | None]]:
    """SGLang's `bench_serving --rust`: its module `_bench`."""
    out = scratch / "sglang.jsonl"
    start = f"import sys; sys.path.insert(0, {FLAGS.sglang_bench!r}); import _bench; _bench.run_argv(['b', *sys.argv[1:]])"
    load = [
        "--num-prompts",
        str(case.requests),
        "--max-concurrency",
        str(case.lanes),
        "--disable-tqdm",
    ]
    given = [
        "--dataset-name",
        "random-ids",
        "--random-input-len",
        "4",
        "--random-output-len",
        str(case.tokens),
    ]
    given += [
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
        start,
        "--backend",
        "vllm-chat",
        "--base-url",
        url,
        "--model",
        "sim",
    ]

    def told() -> tuple[float, float]:
        result = json.loads(out.read_text().splitlines()[-1])
        assert result["completed"] == case.requests, (
            f"SGLang: {result['completed']} of {case.requests}"
        )
        return result["median_ttft_ms"], result["p99_ttft_ms"]

    return [
        *command,
        "--tokenizer",
        str(tokenizer(scratch)),
        *given,
        *load,
        "--output-file",
        str(out),
    ], told


def lines(
    url: str, case: Case, scratch: Path
) -> tuple[list[str], Callable[[], tuple[float, float] | None]]:
    """aiohttp, line by line, as many home-made generators are."""
    arguments = json.dumps(
        {"url": url, "lanes": case.lanes, "tokens": case.tokens, "requests": case.requests}
    )
    return [
        sys.executable,
        str(rig.BENCHMARKS_DIR / "contenders.py"),
        "closed",
        arguments,
    ], lambda: None


CLIENTS: dict[str, Client] = {
    "floor": floor,
    "ours": ours,
    BESIDE: ours,
    "vllm": vllm,
    "sglang": sglang,
    "lines": lines,
}
NAMES = {
    BESIDE: "the other checkout",
    "floor": "C, epoll and read, counts bytes",
    "ours": "`loadgen run`",
    "vllm": "`vllm bench serve` (Rust)",
    "sglang": "SGLang `bench_serving` (Rust)",
    "lines": "aiohttp lines, json.loads",
}
FLAGS = argparse.Namespace(vllm_rs="", sglang_bench="", beside=None)


def floor_binary() -> Path:
    """The compiled reader, made once in a folder of its own."""
    made = Path(tempfile.gettempdir()) / f"loadgen-floor-{os.getuid()}"
    source = rig.BENCHMARKS_DIR / "floor.c"
    if not made.exists() or made.stat().st_mtime < source.stat().st_mtime:
        subprocess.run(["cc", "-O2", str(source), "-o", str(made)], check=True)
    return made


def tokenizer(scratch: Path) -> Path:
    """A tokenizer of a thousand words, as a folder that both Rust clients can load."""
    folder = scratch / "tokenizer"
    folder.mkdir(exist_ok=True)
    words = {"[UNK]": 0, **{f"w{i}": i + 1 for i in range(1000)}}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    spaces = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}}
    (folder / "tokenizer.json").write_text(json.dumps({**spaces, **parts, "model": model}))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def once(name: str, case: Case) -> tuple[Ran, dict[str, float], tuple[float, float]]:
    """One client process under one load: what it used, what the server did meanwhile, and the true TTFT (p50, p99)."""
    with tempfile.TemporaryDirectory(prefix="loadgen-clients-") as folder:
        scratch = Path(folder)
        log = scratch / "sends"
        with rig.serve_endpoint(
            **case.options, idle_close="60s", log_events="ends", log=str(log)
        ) as server:
            command, told = CLIENTS[name](server.url, case, scratch)
            core = ",".join(map(str, rig.client_and_server_cores()[0]))
            before, begun = rig.read_counters(server.url), time.monotonic()
            with (scratch / "out").open("w+b") as out:
                env = {**os.environ, "TOKIO_WORKER_THREADS": "1"}
                if name == BESIDE:
                    env["PYTHONPATH"] = os.pathsep.join(
                        (str(FLAGS.beside), str(FLAGS.beside / "sdk"))
                    )
                process = subprocess.Popen(
                    ["taskset", "-c", core, *command], stdout=out, stderr=out, env=env
                )
                _, status, used = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
                out.seek(0)
                if process.returncode not in (
                    0,
                    3,
                ):  # 3: ours, when the host was too busy for its latencies
                    raise SystemExit(
                        f"{name} ended with {process.returncode}: {out.read()[-1000:].decode()}"
                    )
            wall, after = time.monotonic() - begun, rig.read_counters(server.url)
            ttft_ms = told()
        sent = parse_log(log.read_bytes())
        first: dict[int, int] = {}
        for number, at in zip(sent.request.tolist(), sent.sent_ns.tolist(), strict=True):
            first.setdefault(number, at)
        waits = [
            (first[request.number] - request.arrival_ns) / 1e6
            for request in sent.requests
            if request.number in first
        ]
    did = {what: after[what] - before[what] for what in ("events", "requests", "cpu_s")}
    if did["requests"] < case.requests:
        raise SystemExit(f"{name} sent {did['requests']} of {case.requests} requests")
    ran = Ran(used.ru_utime + used.ru_stime, wall, ttft_ms)
    return ran, did, (float(np.quantile(waits, 0.5)), float(np.quantile(waits, 0.99)))


def measure(case: Case, names: list[str], rounds: int) -> str:
    """The table of one load."""
    per_cpu: dict[str, list[float]] = {name: [] for name in names}
    busy: dict[str, list[str]] = {name: [] for name in names}
    off: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    count = case.requests * (case.tokens if case.counted == "events" else 1)
    for name, runs in rig.interleave_rounds(
        rounds, {name: partial(once, name, case) for name in names}
    ).items():
        for ran, did, true in runs:
            per_cpu[name].append(count / ran.cpu_s)
            busy[name].append(f"{ran.cpu_s / ran.wall_s:.0%} / {did['cpu_s'] / ran.wall_s:.0%}")
            if ran.ttft_ms is not None and None not in ran.ttft_ms:
                off[name].append((ran.ttft_ms[0] - true[0], ran.ttft_ms[1] - true[1]))
    rows = []
    for name in names:
        beside = [
            f"{rig.median_ratio(per_cpu[name], per_cpu[other]):.2f}"
            if other in names and other != name
            else ""
            for other in ("floor", "lines", "ours")
        ]
        errors = [
            f"{rig.median([error[i] for error in off[name]]):+.2f}" if off[name] else ""
            for i in (0, 1)
        ]
        spread = f"{min(per_cpu[name]):,.0f} to {max(per_cpu[name]):,.0f}"
        rows.append(
            [
                NAMES[name],
                f"{rig.median(per_cpu[name]):,.0f}",
                spread,
                *beside,
                *errors,
                busy[name][0],
            ]
        )
    head = ["client", f"{case.counted}/CPU-s", "range", "of the floor", "of aiohttp", "of ours"]
    head += ["TTFT p50 off, ms", "p99 off, ms", "CPU client / server"]
    return (
        f"{case.what}; {case.requests:,} requests of {case.tokens} tokens, median of {rounds}\n\n"
        + rig.format_table(head, rows)
    )


def compile_sources() -> None:
    """The bytecode of the package that the client process will import."""
    for package in (loadgen, loadgen_sdk):
        compileall.compile_dir(Path(package.__path__[0]), quiet=2)


def main() -> None:
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
        NAMES[BESIDE] = f"`loadgen run`, {rig.describe_commit(FLAGS.beside)}"
        compileall.compile_dir(FLAGS.beside, quiet=2)
    compile_sources()
    names = [name for name in CLIENTS if name in FLAGS.only.split(",")]
    for name, missing, why in (
        ("floor", shutil.which("cc") is None, "no C compiler"),
        ("vllm", not FLAGS.vllm_rs, "no --vllm-rs"),
        ("sglang", not FLAGS.sglang_bench, "no --sglang-bench"),
        (BESIDE, FLAGS.beside is None, "no --beside"),
    ):
        if missing and name in names:
            names.remove(name)
            print(f"left out: {NAMES[name]} ({why})")
    print("Whole processes, one core for the client and another for the server.\n", flush=True)
    for name in FLAGS.cases.split(","):
        case = CASES[name]
        case = case._replace(requests=max(case.lanes, round(case.requests * FLAGS.share)))
        print(measure(case, names, FLAGS.rounds) + "\n", flush=True)


if __name__ == "__main__":
    main()
