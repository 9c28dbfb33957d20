"""The options of a run: one table for the command line and for the keywords of `loadgen.run`.

A field of `RunOptions` is a keyword of `loadgen.run`, and its `Option` says how the commands that
drive a load take it. `CommandOptions` adds what only commands take. `add_options` in
`cli/options.py` gives a command the options of this table; `cli/settings.py` and
`workload/flags.py` read their values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_type_hints

from loadgen_sdk.wire_formats.server_profiles import SERVER_PROFILES

from loadgen.cli import completion
from loadgen.cli import option_parsers as parsers

PANELS = ("Load", "Target", "SLO", "Output", "Cost", "TLS", "Advanced")
"""The headings of a help, in their order."""

LoadValue = str | int | float | None
Texts = str | Sequence[str] | None
File = str | os.PathLike[str] | None


@dataclass(frozen=True, kw_only=True)
class Option:
    """How an option is specified on the command line, and how its value is read.

    An option without `flags` is a keyword of Python or, with a `set_metavar`, a key of `--set`.

    Attributes:
        help: What the help says about it.
        flags: Its names on the command line. Error messages use the first one.
        metavar: The placeholder for its value in the help; None for a switch.
        set_metavar: The placeholder for its value in `--set NAME=VALUE`, for a rare option.
        panel: The heading under which the help lists it.
        cli_type: The type to which typer converts the text; a switch named `--no-x` gives False.
        default: The value of the option if it is not specified.
        default_text: What happens without the option, where that is no value of it.
        parse: Reads a value from the command line or from Python.
        used_by: What uses the value: the workload ("workload": which file is read), its load, or
            the settings of the run.
        must_be_typed: Whether it names a host, a key or a listener. Such an option is never taken
            from the command line that a results folder stores, because another author may have
            written the folder.
        other_tools: Flags of other tools with the same meaning, for hints.
        complete: Offers values for what has been typed, for the completion of the shell.
    """

    help: str
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    set_metavar: str = ""
    panel: str = "Advanced"
    cli_type: Any = str
    default: str | None = None
    default_text: str = ""
    parse: Callable[[Any], Any] = parsers.parse_text
    used_by: Literal["workload", "load", "settings"] = "settings"
    must_be_typed: bool = False
    other_tools: tuple[str, ...] = ()
    complete: Callable[[str], list[str]] | None = None

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it takes, if they can be listed."""
        return self.parse.choices if isinstance(self.parse, parsers.ChoiceParser) else ()

    def describe(self, name: str, value: object) -> str:
        """Return how an error message names the option with a value; `name` is its keyword."""
        if self.set_metavar:
            return f"--set {name}={value}"
        option_name = self.flags[0] if self.flags else name
        return f"{option_name} {value}"


def _complete_set_keys(incomplete: str) -> list[str]:
    return [f"{name}=" for name in SET_KEYS if f"{name}=".startswith(incomplete)]


class RunOptions(TypedDict, total=False):
    """The keywords of `loadgen.run`, with the types that Python may give."""

    url: Annotated[
        Texts,
        Option(
            flags=("--url", "-u"),
            metavar="URL",
            panel="Target",
            help=(
                "URL of the server, with or without /v1. Repeat it for several servers. "
                "sim:PRESET simulates a server, for example sim:gb300-vm. NAME=URL serves "
                "the steps of a task that name it. Required unless --targets is given."
            ),
            cli_type=list[str],
            parse=parsers.parse_texts,
            must_be_typed=True,
            other_tools=("--base-url", "--target"),
            complete=completion.complete_target,
        ),
    ]
    targets: Annotated[
        File,
        Option(
            flags=("--targets",),
            metavar="FILE",
            panel="Target",
            help=(
                "YAML list of several servers, each with name, url, api_key_env, gpus, "
                "shape, region or node."
            ),
            cli_type=Path,
            must_be_typed=True,
        ),
    ]
    route: Annotated[
        str,
        Option(
            help=(
                "How requests are spread over several servers: round-robin, "
                "least-in-flight, or sticky (one server per conversation)."
            ),
            default="auto",
            set_metavar="WAY",
            parse=parsers.ChoiceParser("auto", "round-robin", "least-in-flight", "sticky"),
        ),
    ]
    session_header: Annotated[
        str | None,
        Option(
            help=(
                "Name of a header that carries the ID of the conversation or task, for "
                "routers that need it."
            ),
            set_metavar="NAME",
            parse=parsers.parse_header_name,
        ),
    ]
    slo_headers: Annotated[
        bool,
        Option(
            help=(
                "Send the TTFT and TPOT objective of each request in HTTP headers, "
                "for gateways that schedule by SLO, such as llm-d."
            ),
            cli_type=bool,
            set_metavar="yes",
            parse=parsers.parse_switch,
        ),
    ]
    percentiles: Annotated[
        Sequence[float] | str,
        Option(
            help=(
                "Additional percentiles, for example 25,99.5. p50, p90, p95, p99 and p99.9 "
                "are always reported."
            ),
            set_metavar="P,P",
            parse=parsers.parse_percentiles,
        ),
    ]
    on_target_failure: Annotated[
        str,
        Option(
            help=(
                "What to do when a server stops responding: continue without it, or stop the run."
            ),
            default="continue",
            set_metavar="WHAT",
            parse=parsers.ChoiceParser("continue", "stop"),
        ),
    ]
    model: Annotated[
        str | None,
        Option(
            flags=("--model", "-m"),
            metavar="NAME",
            panel="Target",
            help="Name of the model to request.",
            default_text="the only model of the server",
        ),
    ]
    server: Annotated[
        str,
        Option(
            flags=("--server",),
            metavar="KIND",
            panel="Target",
            help=f"Server software: auto (detect it), {', '.join(SERVER_PROFILES)}.",
            default="auto",
            parse=parsers.parse_server,
            other_tools=("--backend",),
            complete=completion.complete_server,
        ),
    ]
    api: Annotated[
        str,
        Option(
            flags=("--api",),
            metavar="KIND",
            panel="Target",
            help=(
                "API to send requests to: chat, completions, responses, messages, "
                "embeddings or rerank."
            ),
            default="chat",
            parse=parsers.ChoiceParser(
                "chat", "completions", "responses", "messages", "embeddings", "rerank"
            ),
            other_tools=("--endpoint-type",),
        ),
    ]
    trace: Annotated[
        File,
        Option(
            flags=("--trace",),
            metavar="FILE",
            panel="Load",
            help=(
                "Replay a trace: its arrival times, lengths and shared prefixes "
                "replace those of the workload."
            ),
            cli_type=Path,
            used_by="workload",
            other_tools=("--trace-path",),
        ),
    ]
    dataset: Annotated[
        File,
        Option(
            flags=("--dataset",),
            metavar="FILE",
            panel="Load",
            help=(
                "File with prompts to send: JSONL, JSON list, ShareGPT, CSV, "
                "Parquet, OpenAI batch, or hf:ORG/NAME."
            ),
            cli_type=Path,
            used_by="workload",
            other_tools=("--dataset-path", "--input-file"),
        ),
    ]
    check_answers: Annotated[
        File,
        Option(
            flags=("--check-answers",),
            metavar="FILE",
            panel="Load",
            help=(
                "File of questions with known answers (JSONL). Some requests of the load send "
                "them, and their responses are checked after the run."
            ),
            cli_type=Path,
            used_by="load",
        ),
    ]
    check_share: Annotated[
        LoadValue,
        Option(
            flags=("--check-share",),
            metavar="SHARE",
            panel="Load",
            help="Share of the requests that send questions of --check-answers, such as 5%.",
            default_text="5%",
            used_by="load",
        ),
    ]
    trace_speed: Annotated[
        LoadValue,
        Option(
            help="Replay the trace at FACTOR times its speed.",
            default_text="1",
            set_metavar="FACTOR",
            used_by="load",
        ),
    ]
    trace_slice: Annotated[
        LoadValue,
        Option(
            help=(
                "Replay only a part of the trace, counted from its first request: 10m..20m,"
                " 10m.. or ..20m."
            ),
            default_text="the whole trace",
            set_metavar="FROM..TO",
            used_by="load",
        ),
    ]
    trace_loop: Annotated[
        LoadValue,
        Option(
            help="Replay the trace N times in a row, with new prompt texts each time.",
            default_text="1",
            set_metavar="N",
            used_by="load",
        ),
    ]
    trace_replay: Annotated[
        LoadValue,
        Option(
            help=(
                "instants: send each request at its recorded time. sessions: send it "
                "when the responses before it in its session have ended, after the "
                "recorded pause for tools and users."
            ),
            default_text="instants",
            set_metavar="WHAT",
            used_by="load",
        ),
    ]
    trace_unit: Annotated[
        LoadValue,
        Option(
            help=(
                "Unit of the times in the trace, if its format does not define one: s, ms, "
                "us or ns."
            ),
            default_text="detected and printed",
            set_metavar="UNIT",
            used_by="load",
        ),
    ]
    on_bad_row: Annotated[
        LoadValue,
        Option(
            help="What to do with an invalid row of the trace: fail, or skip it and count it.",
            default_text="fail",
            set_metavar="WHAT",
            used_by="load",
        ),
    ]
    turns: Annotated[
        LoadValue,
        Option(
            help=(
                "Turns to send from each conversation of a data set: only the first, or all. "
                "Each turn waits for the response to the previous one."
            ),
            default_text="first; all if each row is one message",
            set_metavar="WHICH",
            used_by="load",
        ),
    ]
    trajectory_start: Annotated[
        LoadValue,
        Option(
            help=(
                "Where recorded sessions begin. middle: the first session of each virtual user "
                "begins at a random turn, whose earlier turns fill the cache before the load."
            ),
            default_text="beginning",
            set_metavar="WHERE",
            used_by="load",
        ),
    ]
    trajectory_end: Annotated[
        LoadValue,
        Option(
            help=(
                "When recorded sessions end. first: when a virtual user has no further session, "
                "as in MLPerf Endpoints."
            ),
            default_text="all",
            set_metavar="WHEN",
            used_by="load",
        ),
    ]
    trajectory_salt: Annotated[
        LoadValue,
        Option(
            help=(
                "What the prompts of recorded sessions share: nothing (session), system prompts "
                "(user, as in AgentX; pass, as in MLPerf Endpoints), or everything (none)."
            ),
            default_text="session",
            set_metavar="RULE",
            used_by="load",
        ),
    ]
    trajectory_history: Annotated[
        LoadValue,
        Option(
            help="Earlier responses in recorded sessions: recorded, or real ones of the server.",
            default_text="recorded, if the data set has responses",
            set_metavar="WHICH",
            used_by="load",
        ),
    ]
    idle_cap: Annotated[
        LoadValue,
        Option(
            help="The longest pause between two turns of a recorded session.",
            default_text="60s",
            set_metavar="TIME",
            used_by="load",
        ),
    ]
    request_rate: Annotated[
        LoadValue,
        Option(
            flags=("--request-rate",),
            metavar="RATE",
            panel="Load",
            help="Open loop: requests per second, for example 10, 600/min or inf.",
            used_by="load",
            other_tools=("--rate", "--rps", "--qps", "--target-qps"),
        ),
    ]
    burstiness: Annotated[
        LoadValue,
        Option(
            help=(
                "Shape of gamma-distributed inter-arrival times. 1 is Poisson; smaller "
                "values are burstier."
            ),
            default_text="1",
            set_metavar="SHAPE",
            used_by="load",
        ),
    ]
    concurrency: Annotated[
        LoadValue,
        Option(
            flags=("--concurrency", "-c"),
            metavar="N",
            panel="Load",
            help=(
                "Closed loop: number of concurrent requests. A list such as 1,2,4,8 runs "
                "one load after the other."
            ),
            used_by="load",
            other_tools=("--max-concurrency", "--parallel"),
        ),
    ]
    stagger: Annotated[
        LoadValue,
        Option(
            flags=("--stagger",),
            metavar="TIME",
            panel="Load",
            help=(
                "Closed loop: time over which the first requests are spread. 0 starts all at once."
            ),
            default_text="one response time",
            used_by="load",
            other_tools=("--concurrency-ramp-duration", "--ramp-up"),
        ),
    ]
    max_in_flight: Annotated[
        LoadValue,
        Option(
            flags=("--max-in-flight",),
            metavar="N",
            help=(
                "Open loop: maximum number of requests in flight. Requests above it are "
                "dropped and counted."
            ),
            default_text="no limit",
            used_by="load",
        ),
    ]
    max_in_prefill: Annotated[
        LoadValue,
        Option(
            help=(
                "Maximum number of requests in prefill (sent, but without a first "
                "token). A closed loop waits for one to finish; an open loop drops "
                "requests above it."
            ),
            default_text="no limit",
            set_metavar="N",
            used_by="load",
        ),
    ]
    num_requests: Annotated[
        LoadValue,
        Option(
            flags=("--num-requests", "-n"),
            metavar="N",
            panel="Load",
            help="Stop after N requests.",
            default_text="from the workload",
            used_by="load",
            other_tools=("--num-prompts", "--request-count"),
        ),
    ]
    duration: Annotated[
        LoadValue,
        Option(
            flags=("--duration", "-d"),
            metavar="TIME",
            panel="Load",
            help="Stop after this time, for example 30s or 5m. A bare number is in seconds.",
            default_text="from the workload",
            used_by="load",
            other_tools=("--benchmark-duration", "--max-seconds", "--max-duration", "--run-time"),
        ),
    ]
    warmup: Annotated[
        LoadValue,
        Option(
            flags=("--warmup",),
            metavar="TIME|Nreq",
            panel="Load",
            help=(
                "Load before the measurement that is not measured: a time (10s), a number "
                "of requests (20req), or 0."
            ),
            default_text="from the workload",
            used_by="load",
        ),
    ]
    num_warmups: Annotated[
        LoadValue,
        Option(
            help="Number of warm-up requests, which are not measured.",
            used_by="load",
        ),
    ]
    grace: Annotated[
        LoadValue,
        Option(
            flags=("--grace",),
            metavar="TIME",
            help=(
                "Maximum time to wait for running requests after the load ends. Requests "
                "that are still running then count as unfinished, not as failed."
            ),
            default_text="the value of --timeout",
            used_by="load",
        ),
    ]
    timeout: Annotated[
        LoadValue,
        Option(
            flags=("--timeout",),
            metavar="TIME",
            help="Maximum time for one request, from its scheduled time.",
            default_text="600s",
            used_by="load",
        ),
    ]
    stall_timeout: Annotated[
        LoadValue,
        Option(
            help="Maximum time without data within a stream.",
            default_text="120s",
            set_metavar="TIME",
            used_by="load",
        ),
    ]
    slo: Annotated[
        Texts,
        Option(
            flags=("--slo",),
            metavar="TERM",
            panel="SLO",
            help=(
                "SLO as METRIC:LIMIT[:PERCENTILE], for example ttft:2s:p95 (default p99), "
                "or attainment:99%, or fluidity:90%:p95, or answers:95%. Replaces the SLO of "
                "the workload; +TERM adds to it. "
                "Repeatable."
            ),
            cli_type=list[str],
            default_text="from the workload",
            used_by="load",
            complete=completion.complete_slo_term,
        ),
    ]
    goodput: Annotated[
        Texts,
        Option(
            help="SLO limits in milliseconds, for example ttft:2000 tpot:200.",
            cli_type=list[str],
            used_by="load",
        ),
    ]
    input_tokens: Annotated[
        LoadValue,
        Option(
            flags=("--input-tokens", "--isl"),
            metavar="N",
            panel="Load",
            help="Prompt length in tokens.",
            default_text="from the workload",
            used_by="load",
            other_tools=("--random-input-len", "--prompt-tokens"),
        ),
    ]
    output_tokens: Annotated[
        LoadValue,
        Option(
            flags=("--output-tokens", "--osl"),
            metavar="N",
            panel="Load",
            help=(
                "Output length in tokens. `unlimited` sends no limit for data set "
                "rows without a length."
            ),
            default_text="from the workload",
            used_by="load",
            other_tools=("--random-output-len", "--max-tokens", "--max-output-tokens"),
        ),
    ]
    seed: Annotated[
        LoadValue,
        Option(
            flags=("--seed",),
            metavar="N",
            panel="Load",
            help="Random seed for prompts, lengths and arrival times.",
            default_text="random, and printed",
            used_by="load",
            other_tools=("--random-seed",),
        ),
    ]
    schedule_seed: Annotated[
        LoadValue,
        Option(
            help=(
                "Random seed for Poisson arrival times only. Equals "
                "schedule_rng_seed of MLPerf LoadGen."
            ),
            default_text="from --seed",
            set_metavar="N",
            used_by="load",
        ),
    ]
    salt: Annotated[
        LoadValue,
        Option(
            flags=("--salt",),
            metavar="WORD",
            help=(
                "Text that changes prompts, but not lengths or arrival times. "
                "`fresh` uses new prompts in each run."
            ),
            default_text="from --seed",
            used_by="load",
        ),
    ]
    stop_when: Annotated[
        Texts,
        Option(
            flags=("--stop-when",),
            metavar="RULE",
            panel="SLO",
            help=(
                "Stop the run early if recent requests fail or are slow, for example "
                "errors:20% or ttft:p50:30s. Repeatable."
            ),
            cli_type=list[str],
            used_by="load",
        ),
    ]
    limit: Annotated[
        Texts,
        Option(
            help=(
                "Change a limit of the validity check, for example send_lag_share:10%. "
                "Stored with the result."
            ),
            cli_type=list[str],
            set_metavar="NAME:SHARE",
            used_by="load",
        ),
    ]
    workers: Annotated[
        int | str | None,
        Option(
            flags=("--workers",),
            metavar="N",
            help=(
                "Number of worker processes, or auto for as many as the load needs. With "
                "--ray, they run on the cluster and auto is the default."
            ),
            default_text="1",
            parse=parsers.parse_workers,
            other_tools=("--processes", "--num-workers", "--cpus"),
        ),
    ]
    ray: Annotated[
        str | None,
        Option(
            flags=("--ray",),
            metavar="ADDRESS",
            help="Run the workers on a Ray cluster: auto, or HOST:PORT of its head node.",
            default_text="local workers",
            must_be_typed=True,
        ),
    ]
    sources: Annotated[
        Texts,
        Option(
            help="Local IP address to send from. Repeat it to have more local ports.",
            cli_type=list[str],
            default_text="chosen by the system",
            set_metavar="IP",
            parse=parsers.parse_texts,
        ),
    ]
    keep: Annotated[
        str,
        Option(
            flags=("--keep",),
            metavar="WHAT",
            panel="Output",
            help=(
                "What to store: raw (a record per request), or gaps (also every inter-token"
                " latency)."
            ),
            default="raw",
            parse=parsers.ChoiceParser("raw", "gaps"),
        ),
    ]
    tokenizer: Annotated[
        File,
        Option(
            flags=("--tokenizer",),
            metavar="FILE",
            panel="Target",
            help=(
                "Tokenizer of the model: a tokenizer.json, its folder, or ORG/NAME on Hugging Face."
            ),
        ),
    ]
    extra_body: Annotated[
        Mapping[str, Any] | str | None,
        Option(
            flags=("--extra-body",),
            metavar="JSON",
            help="JSON object that is merged into the body of every request.",
            parse=parsers.parse_extra_body,
            other_tools=("--extra-request-body",),
        ),
    ]
    headers: Annotated[
        Mapping[str, str] | Sequence[tuple[str, str]] | Texts,
        Option(
            flags=("--header", "-H"),
            metavar="NAME:VALUE",
            help="HTTP header to send, as NAME: VALUE or NAME=VALUE. Repeatable.",
            cli_type=list[str],
            parse=parsers.parse_headers,
            must_be_typed=True,
        ),
    ]
    api_key: Annotated[
        str | None,
        Option(
            help="API key. If it is missing, api_key_file is used, then OPENAI_API_KEY.",
        ),
    ]
    api_key_file: Annotated[
        File,
        Option(
            flags=("--api-key-file",),
            metavar="FILE",
            panel="Target",
            help=(
                "File with the API key. Otherwise OPENAI_API_KEY (for Azure, "
                "AZURE_OPENAI_API_KEY) is used."
            ),
            cli_type=Path,
            parse=parsers.read_key_file,
            must_be_typed=True,
        ),
    ]
    cacert: Annotated[
        File,
        Option(
            flags=("--cacert",),
            metavar="FILE",
            panel="TLS",
            help="PEM file with the CA certificate to trust.",
            cli_type=Path,
            default_text="CA certificates of the system",
            parse=parsers.parse_pem_file,
            must_be_typed=True,
        ),
    ]
    cert: Annotated[
        File,
        Option(
            flags=("--cert",),
            metavar="FILE",
            panel="TLS",
            help="PEM file with the client certificate, and its key unless --key is given.",
            cli_type=Path,
            parse=parsers.parse_pem_file,
            must_be_typed=True,
        ),
    ]
    key: Annotated[
        File,
        Option(
            flags=("--key",),
            metavar="FILE",
            panel="TLS",
            help="PEM file with the key of the client certificate.",
            cli_type=Path,
            parse=parsers.parse_pem_file,
            must_be_typed=True,
        ),
    ]
    insecure: Annotated[
        bool,
        Option(
            flags=("--insecure", "-k"),
            panel="TLS",
            help="Do not verify the certificate of the server.",
            cli_type=bool,
            parse=parsers.parse_switch,
            must_be_typed=True,
        ),
    ]
    stream: Annotated[
        bool,
        Option(
            flags=("--no-stream",),
            help="Do not stream responses. TTFT is then the time of the whole response.",
            cli_type=bool,
            parse=parsers.parse_switch,
        ),
    ]
    server_metrics: Annotated[
        Texts,
        Option(
            flags=("--server-metrics",),
            metavar="WHERE",
            help=(
                "Prometheus pages of the servers to read every second: auto (usual "
                "paths), off, or URLs (repeatable). `drain` also reads the JSON at "
                "/metrics of trtllm-serve, but other readers then miss its samples."
            ),
            cli_type=list[str],
            default_text="auto",
            parse=parsers.parse_metrics_pages,
            must_be_typed=True,
        ),
    ]
    server_timing: Annotated[
        bool,
        Option(
            flags=("--server-timing",),
            help=(
                "Request the queue, prefill and decode time of each request from the "
                "server. Times that a server always sends are read without this "
                "option."
            ),
            cli_type=bool,
            parse=parsers.parse_switch,
        ),
    ]
    reset_cache: Annotated[
        bool,
        Option(
            help=(
                "Empty the prefix caches of the servers before the load (vLLM, SGLang and "
                "some trtllm-serve versions)."
            ),
            cli_type=bool,
            set_metavar="yes",
            parse=parsers.parse_switch,
        ),
    ]
    profile: Annotated[
        str | None,
        Option(
            flags=("--profile",),
            metavar="STAGE[:TIME]",
            help=(
                "Run the profiler of vLLM, SGLang or TensorRT-LLM during the named "
                "stage, or `steady` for all measured stages. A time limits how long "
                "it runs, for example steady:10s."
            ),
            parse=parsers.parse_profile,
        ),
    ]
    energy: Annotated[
        Texts,
        Option(
            flags=("--energy",),
            metavar="WHERE",
            help=(
                "Source of GPU power, read every second: auto (/energy_metrics of "
                "trtllm-serve; nvidia-smi for a server on this machine), off, nvidia-smi, "
                "or URLs of DCGM and node exporter pages (repeatable)."
            ),
            cli_type=list[str],
            default_text="auto",
            parse=parsers.parse_energy_pages,
            must_be_typed=True,
        ),
    ]
    gpus: Annotated[
        int | str | None,
        Option(
            flags=("--gpus",),
            metavar="N",
            panel="Target",
            help="Number of GPUs behind the endpoint, for metrics and costs per GPU.",
            cli_type=int,
            parse=parsers.CountParser("a whole number from 1"),
        ),
    ]
    accepted_length: Annotated[
        float | str | None,
        Option(
            flags=("--accepted-length",),
            metavar="LENGTH",
            panel="Target",
            help=(
                "Tokens per step that speculative decoding is to give, for example 2.49 or "
                "the published deepseek-v4-pro-mtp:3. The result says whether it is within 1 %."
            ),
            cli_type=str,
            parse=parsers.parse_accepted_length,
            complete=completion.complete_accepted_length,
        ),
    ]
    shape: Annotated[
        str | None,
        Option(
            flags=("--shape",),
            metavar="NAME",
            panel="Target",
            help="Instance type of the server, as in the price file.",
        ),
    ]
    region: Annotated[
        str | None,
        Option(
            help="Region of the server.",
            set_metavar="NAME",
        ),
    ]
    metadata: Annotated[
        Mapping[str, object] | Texts,
        Option(
            flags=("--metadata",),
            metavar="KEY=VALUE",
            panel="Output",
            help=(
                "KEY=VALUE pair to store and show with the result. Repeatable. Must not be "
                "a secret."
            ),
            cli_type=list[str],
            parse=parsers.parse_pairs,
        ),
    ]
    system: Annotated[
        File,
        Option(
            flags=("--system",),
            metavar="FILE",
            panel="Target",
            help=(
                "YAML file that describes the system under test (GPUs, instance type, "
                "region, metadata). Stored with the result."
            ),
            cli_type=Path,
            parse=parsers.parse_system_file,
        ),
    ]
    out: Annotated[
        File,
        Option(
            flags=("--out", "-o"),
            metavar="FOLDER",
            panel="Output",
            help=(
                "Results folder. Results are also copied to s3://, az://, gs:// or file:// "
                "URLs when the run ends."
            ),
            default_text="a new folder in results/",
            parse=parsers.parse_output_folder,
            other_tools=("--output-artifact-dir", "--result-dir"),
        ),
    ]
    embedded: Annotated[
        Mapping[str, Any] | None,
        Option(
            help="Options of the embedded simulator.",
            parse=parsers.parse_mapping,
        ),
    ]


class CommandOptions(RunOptions, total=False):
    """The options that several commands take: those of `loadgen.run`, and these."""

    repeat: Annotated[
        str | None,
        Option(
            flags=("--repeat",),
            metavar="N[,pause=TIME]",
            panel="Load",
            help=(
                "Repeat the run N times, or until the 95 % CI half-width is below a "
                "fraction of the mean: auto,most=10,within=5%."
            ),
            default_text="1",
        ),
    ]
    prices: Annotated[
        File,
        Option(
            flags=("--prices",),
            metavar="FILE",
            panel="Cost",
            help=(
                "Price file (see docs/prices.example.yaml). Prints the expected cost before"
                " the run starts."
            ),
            cli_type=Path,
        ),
    ]
    max_cost: Annotated[
        float | None,
        Option(
            flags=("--max-cost",),
            metavar="AMOUNT",
            panel="Cost",
            help=(
                "Maximum cost of the whole command; needs --prices. Runs that would cost "
                "more do not start, and a run that exceeds it is stopped."
            ),
            cli_type=float,
            default_text="no limit",
        ),
    ]
    progress: Annotated[
        str,
        Option(
            flags=("--progress",),
            metavar="HOW",
            panel="Output",
            help=(
                "Progress on stderr: auto (a live view on a terminal, otherwise "
                "plain), plain (one line at a time), json (JSON lines), or off."
            ),
            cli_type=Literal["auto", "plain", "json", "off"],
            default="auto",
        ),
    ]
    prometheus: Annotated[
        str | None,
        Option(
            flags=("--prometheus",),
            metavar="[HOST]:PORT",
            panel="Output",
            help=(
                "Serve the metrics of each run to Prometheus while it runs, for example "
                ":9400 on 127.0.0.1."
            ),
            must_be_typed=True,
        ),
    ]
    otel: Annotated[
        str | None,
        Option(
            flags=("--otel",),
            metavar="WHAT",
            panel="Output",
            help=(
                "Send each run to OpenTelemetry while it runs: metrics, traces (a "
                "span per request) or all, to OTEL_EXPORTER_OTLP_ENDPOINT or to the "
                "URL of a collector. Needs `pip install 'loadgen[otlp]'`."
            ),
            must_be_typed=True,
        ),
    ]
    force: Annotated[
        bool,
        Option(
            flags=("--force",),
            panel="Output",
            help=(
                "If the output folder holds results, rename that folder with a date "
                "and start a new one."
            ),
            cli_type=bool,
        ),
    ]
    set: Annotated[
        list[str],
        Option(
            flags=("--set",),
            metavar="KEY=VALUE",
            panel="Load",
            help=(
                "Set an advanced option, for example burstiness=0.5 or route=sticky. "
                "--help-all lists them. Repeatable."
            ),
            cli_type=list[str],
            complete=_complete_set_keys,
        ),
    ]


COMMAND_OPTIONS: dict[str, Option] = {
    name: annotation.__metadata__[0]
    for name, annotation in get_type_hints(CommandOptions, include_extras=True).items()
}
"""All options that several commands share, by keyword."""

OPTIONS = {name: COMMAND_OPTIONS[name] for name in RunOptions.__annotations__}
"""The options that are also keywords of `loadgen.run`."""

SET_KEYS = {name: option for name, option in COMMAND_OPTIONS.items() if option.set_metavar}
"""The rare options that have no flag and are specified as `--set KEY=VALUE`."""

LOAD_OPTIONS = frozenset(name for name, option in OPTIONS.items() if option.used_by != "settings")
"""The names of the options that change the workload or its load."""
