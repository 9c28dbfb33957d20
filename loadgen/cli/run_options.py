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
        part: What uses the value: the file of the workload, its load, or the settings of the run.
        must_be_typed: Whether it names a host, a key or a listener. Such an option is never taken
            from the command line that a results folder stores: the folder may be a stranger's.
        other_tools: Flags of other tools that it replaces, for hints.
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
    part: Literal["workload", "load", "settings"] = "settings"
    must_be_typed: bool = False
    other_tools: tuple[str, ...] = ()
    complete: Callable[[str], list[str]] | None = None

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it takes, if they can be listed."""
        return self.parse.choices if isinstance(self.parse, parsers.ChoiceParser) else ()

    def place(self, name: str, value: object) -> str:
        """Return how an error message names the option with a value; `name` is its keyword."""
        if self.set_metavar:
            return f"--set {name}={value}"
        return f"{self.flags[0] if self.flags else name} {value}"


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
                "URL of the server, with or without a path prefix and /v1; repeat it for several. "
                "sim:PRESET simulates a server in virtual time, for example sim:gb300-vm. "
                "NAME=URL is the server for the steps of a task that name it. Required without "
                "--targets."
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
            help="A YAML list of endpoints: name, url, api_key_env, gpus, shape, region, node.",
            cli_type=Path,
            must_be_typed=True,
        ),
    ]
    route: Annotated[
        str,
        Option(
            help=(
                "With several targets: round-robin, least-in-flight, or sticky per "
                "conversation; auto chooses."
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
                "A header that names the conversation or task of a request, for routers "
                "that keep a session in place."
            ),
            set_metavar="NAME",
            parse=parsers.parse_header_name,
        ),
    ]
    slo_headers: Annotated[
        bool,
        Option(
            help=(
                "Send each request's SLO of TTFT and TPOT, for gateways that schedule by "
                "it (llm-d)."
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
                "Further percentiles of the latencies: 25,99.5. All runs tell 50, 90, 95, "
                "99 and 99.9."
            ),
            set_metavar="P,P",
            parse=parsers.parse_percentiles,
        ),
    ]
    on_target_failure: Annotated[
        str,
        Option(
            help="When a target stops answering: continue, or stop the run.",
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
            help="Model name.",
            default_text="the only one that the server lists",
        ),
    ]
    server: Annotated[
        str,
        Option(
            flags=("--server",),
            metavar="KIND",
            panel="Target",
            help=f"auto, {', '.join(tuple(SERVER_PROFILES)[:-1])} or {tuple(SERVER_PROFILES)[-1]}.",
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
            help="chat, completions, responses, messages, embeddings or rerank.",
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
                "Replay a trace: its arrivals, lengths and shared beginnings, in the "
                "place of the workload's."
            ),
            cli_type=Path,
            part="workload",
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
                "Prompts of your own: JSONL, JSON list, ShareGPT, CSV, Parquet, OpenAI "
                "batch, or hf:ORG/NAME."
            ),
            cli_type=Path,
            part="workload",
            other_tools=("--dataset-path", "--input-file"),
        ),
    ]
    trace_speed: Annotated[
        LoadValue,
        Option(
            help="Replay a trace so many times as fast.",
            default_text="1",
            set_metavar="FACTOR",
            part="load",
        ),
    ]
    trace_slice: Annotated[
        LoadValue,
        Option(
            help=(
                "Only what came in this time: 10m..20m, 10m.. or ..20m, from the first "
                "request of the trace."
            ),
            default_text="all",
            set_metavar="FROM..TO",
            part="load",
        ),
    ]
    trace_loop: Annotated[
        LoadValue,
        Option(
            help="Play the trace so many times, one after the other, with new text each time.",
            default_text="1",
            set_metavar="N",
            part="load",
        ),
    ]
    trace_replay: Annotated[
        LoadValue,
        Option(
            help=(
                "instants: each request when it came; sessions: each after the answers "
                "that it waited for in its session, and the recorded time of tools and "
                "users."
            ),
            default_text="instants",
            set_metavar="WHAT",
            part="load",
        ),
    ]
    trace_unit: Annotated[
        LoadValue,
        Option(
            help=("Unit of the times of a trace whose format leaves it open: s, ms, us or ns."),
            default_text="decided by all rows, and printed",
            set_metavar="UNIT",
            part="load",
        ),
    ]
    on_bad_row: Annotated[
        LoadValue,
        Option(
            help=(
                "A row of the trace with something wrong in it: fail, or skip (leave it "
                "out, and count it)."
            ),
            default_text="fail",
            set_metavar="WHAT",
            part="load",
        ),
    ]
    request_rate: Annotated[
        LoadValue,
        Option(
            flags=("--request-rate",),
            metavar="RATE",
            panel="Load",
            help="Open loop: arrivals per second (10, 600/min, inf).",
            part="load",
            other_tools=("--rate", "--rps", "--qps", "--target-qps"),
        ),
    ]
    burstiness: Annotated[
        LoadValue,
        Option(
            help="Gamma shape of the gaps; 1 is Poisson, below 1 burstier.",
            default_text="1",
            set_metavar="SHAPE",
            part="load",
        ),
    ]
    concurrency: Annotated[
        LoadValue,
        Option(
            flags=("--concurrency", "-c"),
            metavar="N",
            panel="Load",
            help="Closed loop: lanes. A list (1,2,4,8) runs one level after the other.",
            part="load",
            other_tools=("--max-concurrency", "--parallel"),
        ),
    ]
    stagger: Annotated[
        LoadValue,
        Option(
            flags=("--stagger",),
            metavar="TIME",
            panel="Load",
            help="Closed loop: spread the starts over this time; 0: all start at once.",
            default_text="one response time",
            part="load",
            other_tools=("--concurrency-ramp-duration", "--ramp-up"),
        ),
    ]
    max_in_flight: Annotated[
        LoadValue,
        Option(
            flags=("--max-in-flight",),
            metavar="N",
            help="Open loop: a start above this many in flight is dropped and counted.",
            default_text="no limit",
            part="load",
        ),
    ]
    max_in_prefill: Annotated[
        LoadValue,
        Option(
            help=(
                "At most this many sent and without a first output: a lane waits for its "
                "place, a start of an open loop is dropped and counted."
            ),
            default_text="no limit",
            set_metavar="N",
            part="load",
        ),
    ]
    num_requests: Annotated[
        LoadValue,
        Option(
            flags=("--num-requests", "-n"),
            metavar="N",
            panel="Load",
            help="Stop after this many.",
            default_text="as the workload says",
            part="load",
            other_tools=("--num-prompts", "--request-count"),
        ),
    ]
    duration: Annotated[
        LoadValue,
        Option(
            flags=("--duration", "-d"),
            metavar="TIME",
            panel="Load",
            help="Stop after this long (30s, 5m; bare numbers are seconds).",
            default_text="as the workload says",
            part="load",
            other_tools=("--benchmark-duration", "--max-seconds", "--max-duration", "--run-time"),
        ),
    ]
    warmup: Annotated[
        LoadValue,
        Option(
            flags=("--warmup",),
            metavar="TIME|Nreq",
            panel="Load",
            help="Unmeasured load before: a time (10s), a count (20req), or 0.",
            default_text="as the workload says",
            part="load",
        ),
    ]
    num_warmups: Annotated[
        LoadValue,
        Option(
            help="Unmeasured requests before.",
            part="load",
        ),
    ]
    grace: Annotated[
        LoadValue,
        Option(
            flags=("--grace",),
            metavar="TIME",
            help=(
                "How long requests in flight may go on after the end of the load. What is "
                "left then is unfinished, not failed."
            ),
            default_text="as --timeout",
            part="load",
        ),
    ]
    timeout: Annotated[
        LoadValue,
        Option(
            flags=("--timeout",),
            metavar="TIME",
            help="Longest time for one request, from its due instant.",
            default_text="600s",
            part="load",
        ),
    ]
    stall_timeout: Annotated[
        LoadValue,
        Option(
            help="Longest silence within a stream.",
            default_text="120s",
            set_metavar="TIME",
            part="load",
        ),
    ]
    slo: Annotated[
        Texts,
        Option(
            flags=("--slo",),
            metavar="TERM",
            panel="SLO",
            help=(
                "SLO term METRIC:LIMIT[:PERCENTILE], like ttft:2s:p95 (p99 if left out), or "
                "attainment:99%. Terms replace the SLO of the workload; +TERM adds to it. "
                "Repeatable."
            ),
            cli_type=list[str],
            default_text="the workload's",
            part="load",
            complete=completion.complete_slo_term,
        ),
    ]
    goodput: Annotated[
        Texts,
        Option(
            help="ttft:2000 tpot:200, in milliseconds.",
            cli_type=list[str],
            part="load",
        ),
    ]
    input_tokens: Annotated[
        LoadValue,
        Option(
            flags=("--input-tokens", "--isl"),
            metavar="N",
            panel="Load",
            help="Prompt length, replacing the file's.",
            default_text="the workload's",
            part="load",
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
                "Output length, replacing the workload's. unlimited sends no limit with the rows "
                "of a data set that have no length."
            ),
            default_text="the workload's",
            part="load",
            other_tools=("--random-output-len", "--max-tokens", "--max-output-tokens"),
        ),
    ]
    seed: Annotated[
        LoadValue,
        Option(
            flags=("--seed",),
            metavar="N",
            panel="Load",
            help="Of lengths, texts and arrivals.",
            default_text="a fresh one, printed",
            part="load",
            other_tools=("--random-seed",),
        ),
    ]
    schedule_seed: Annotated[
        LoadValue,
        Option(
            help="Of Poisson arrivals alone, as MLPerf LoadGen's schedule_rng_seed.",
            default_text="from --seed",
            set_metavar="N",
            part="load",
        ),
    ]
    salt: Annotated[
        LoadValue,
        Option(
            flags=("--salt",),
            metavar="WORD",
            help=(
                "Changes the texts of prompts, not lengths or arrivals: a word, or fresh "
                "for a new one in each run."
            ),
            default_text="from --seed",
            part="load",
        ),
    ]
    stop_when: Annotated[
        Texts,
        Option(
            flags=("--stop-when",),
            metavar="RULE",
            panel="SLO",
            help=(
                "End the run when the requests that ended last fail or wait too much: "
                "errors:20%, ttft:p50:30s. Repeatable."
            ),
            cli_type=list[str],
            part="load",
        ),
    ]
    limit: Annotated[
        Texts,
        Option(
            help="Change a limit of the verdict: send_lag_share:10%. Stored.",
            cli_type=list[str],
            set_metavar="NAME:SHARE",
            part="load",
        ),
    ]
    workers: Annotated[
        int | str | None,
        Option(
            flags=("--workers",),
            metavar="N",
            help=(
                "Worker processes on this machine, or auto: as many as the load can use. "
                "With --ray: on the nodes of the cluster, auto without the flag."
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
            default_text="this machine",
            must_be_typed=True,
        ),
    ]
    sources: Annotated[
        Texts,
        Option(
            help="Local address to send from. Repeatable: each has local ports of its own.",
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
            help=("raw: a record of each request. gaps: also each gap between its output events."),
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
            help="Of the model: a tokenizer.json, its folder, or ORG/NAME.",
        ),
    ]
    extra_body: Annotated[
        Mapping[str, Any] | str | None,
        Option(
            flags=("--extra-body",),
            metavar="JSON",
            help="JSON merged into every request body, last.",
            parse=parsers.parse_extra_body,
            other_tools=("--extra-request-body",),
        ),
    ]
    headers: Annotated[
        Mapping[str, str] | Sequence[tuple[str, str]] | Texts,
        Option(
            flags=("--header", "-H"),
            metavar="NAME:VALUE",
            help="NAME: VALUE or NAME=VALUE. Repeatable.",
            cli_type=list[str],
            parse=parsers.parse_headers,
            must_be_typed=True,
        ),
    ]
    api_key: Annotated[
        str | None,
        Option(
            help="The key itself; else api_key_file, else OPENAI_API_KEY.",
        ),
    ]
    api_key_file: Annotated[
        File,
        Option(
            flags=("--api-key-file",),
            metavar="FILE",
            panel="Target",
            help="A file with the key; else OPENAI_API_KEY (AZURE_OPENAI_API_KEY).",
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
            help="PEM file of the authority to trust.",
            cli_type=Path,
            default_text="the system's",
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
            help="PEM file of the client certificate, with its key.",
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
            help="PEM file of its key, where it is apart.",
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
            help="Do not verify the server's certificate.",
            cli_type=bool,
            parse=parsers.parse_switch,
            must_be_typed=True,
        ),
    ]
    stream: Annotated[
        bool,
        Option(
            flags=("--no-stream",),
            help="Ask for whole answers; TTFT is then the whole answer.",
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
                "The servers' own metrics pages, read once a second: auto (where they "
                "usually are), off, URLs (repeatable), or drain: trtllm-serve's JSON "
                "/metrics, which each read empties for everybody."
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
                "Ask the server for its own account of each request (queue, prefill, "
                "decode). One that comes unasked is always read."
            ),
            cli_type=bool,
            parse=parsers.parse_switch,
        ),
    ]
    reset_cache: Annotated[
        bool,
        Option(
            help=(
                "Empty the servers' prefix caches after the probe, before the load (vLLM, "
                "SGLang, some trtllm-serve)."
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
                "Run the profiler of vLLM, SGLang or TensorRT-LLM around a stage, or "
                "steady (all measured ones); at most so long: steady:10s."
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
                "What the GPUs use, read once a second: auto (trtllm-serve's "
                "/energy_metrics; nvidia-smi where the target is on this machine), off, "
                "nvidia-smi, or URLs of DCGM and node exporter pages (repeatable)."
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
            help="GPUs behind the endpoint, for per-GPU and cost figures.",
            cli_type=int,
            parse=parsers.CountParser("GPUs", "a whole number from 1"),
        ),
    ]
    shape: Annotated[
        str | None,
        Option(
            flags=("--shape",),
            metavar="NAME",
            panel="Target",
            help="Its machine shape, as in a price list.",
        ),
    ]
    region: Annotated[
        str | None,
        Option(
            help="Its region.",
            set_metavar="NAME",
        ),
    ]
    metadata: Annotated[
        Mapping[str, object] | Texts,
        Option(
            flags=("--metadata",),
            metavar="KEY=VALUE",
            panel="Output",
            help="KEY=VALUE, stored with the results and shown. Repeatable. Never a secret.",
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
                "A YAML file that describes the system under test, also its GPUs, shape, "
                "region, metadata: stored with these; what is missing is named."
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
            help="Results folder. s3://, az://, gs://, file://...: copied there at the end.",
            default_text="a new one in results/",
            parse=parsers.parse_output_folder,
            other_tools=("--output-artifact-dir", "--result-dir"),
        ),
    ]
    embedded: Annotated[
        Mapping[str, Any] | None,
        Option(
            help="Options of the embedded simulation.",
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
                "So many runs of the same load, r1, r2, ... in one folder; or "
                "auto,most=10,within=5%: until half an interval of the figures is within "
                "that share of their mean. Only repeats show what another start does."
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
                "Your prices (docs/prices.example.yaml): what a run will cost is said "
                "before it starts."
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
                "With --prices: no run that will cost more, all of the command together; "
                "and one that does is stopped."
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
                "On stderr: auto (a live view on a terminal, else a line every 10 s, of a search a "
                "line for each trial), "
                "plain (a line), json (a line of JSON every 10 s), or off."
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
                "Serve the metrics of each run to Prometheus while it goes: :9400 (on 127.0.0.1)."
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
                "Send each run to OpenTelemetry while it goes: metrics, traces (one span "
                "per request, whose traceparent the server gets) or all, to where "
                "OTEL_EXPORTER_OTLP_ENDPOINT says; or the URL of a collector. Extra: "
                "otlp."
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
                "Where --out holds results: keep those beside it, under a dated name, and "
                "begin anew."
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
                "What is rare and has no flag of its own: trace_speed=2, burstiness=0.5, "
                "route=sticky; --help-all has the keys. Repeatable."
            ),
            cli_type=list[str],
            complete=_complete_set_keys,
        ),
    ]


COMMAND_OPTIONS: dict[str, Option] = {
    name: annotation.__metadata__[0]
    for name, annotation in get_type_hints(CommandOptions, include_extras=True).items()
}
OPTIONS = {name: COMMAND_OPTIONS[name] for name in RunOptions.__annotations__}
SET_KEYS = {name: option for name, option in COMMAND_OPTIONS.items() if option.set_metavar}
LOAD_OPTIONS = frozenset(name for name, option in OPTIONS.items() if option.part != "settings")
"""The options that change the workload or its load."""
