"""The options of a run, in one table: a field of `RunOptions` is a keyword of `loadgen.run`, and its `Option` is the
flag of every command that drives load, with the parser that reads the value of both.

The options of the load itself are read by `workload/flags.py`; all others become `Settings` here. IO: reads the
files that options name.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypedDict, TypeVar

from loadgen_sdk.dialects.quirks import QUIRKS

from loadgen import backends
from loadgen.core import units
from loadgen.core.errors import Fault, Faults, UserError, collecting, of_reading

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.execution.system_file import SystemSaid
    from loadgen.core.followers.profiler import ProfileAsked

T = TypeVar("T")
Text = str | int | float | None
Texts = str | Sequence[str] | None
File = str | os.PathLike[str] | None

KEY_VARIABLES = ("AZURE_OPENAI_API_KEY", "OPENAI_API_KEY")
_HEADER_NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_HEADER_VALUE = r"[\t\x20-\x7e\xa0-\xff]*"


# -- parsers: of what was typed and of what Python gives; they raise units.Wrong, Fault or Faults --------------------


def _text(value: Any) -> str:
    if not isinstance(value, str | os.PathLike):
        raise units.Wrong("wrong_type", f"a {type(value).__name__} is no text", "")
    return os.fspath(value)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise units.Wrong(
            "wrong_type", f"{str(value)!r} is no mapping", "a mapping from option to value"
        )
    return dict(value)


def _pairs_or_texts(value: Any) -> Any:
    return value if isinstance(value, Mapping) else _texts(value)


def _system(value: Any) -> "SystemSaid":
    from loadgen.core.execution import system_file

    return system_file.load(Path(_text(value)))


def _texts(value: Any) -> tuple[str, ...]:
    return (
        tuple(map(str, value))
        if isinstance(value, Sequence) and not isinstance(value, str)
        else (str(value),)
    )


def _percentiles(value: Any) -> tuple[float, ...]:
    parts = value.split(",") if isinstance(value, str) else _texts(value)
    try:
        found = {round(float(str(part).strip().removeprefix("p")) / 100, 9) for part in parts}
    except ValueError:
        found = {0.0}
    if not all(0 < p < 1 for p in found):
        raise units.Wrong(
            "invalid_value",
            f"{value!r} are no percentiles",
            "numbers between 0 and 100, like 25,99.5",
        )
    return tuple(sorted(found))


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise units.Wrong("wrong_type", f"{value!r} is neither True nor False", "True or False")
    return value


def _choice(*known: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in known:
            raise units.Wrong(
                "unknown_name", f"unknown value {str(value)!r}", f"known: {', '.join(known)}"
            )
        return str(value)

    vars(parse)["known"] = known
    return parse


def _server(value: Any) -> str:
    from loadgen_sdk.dialects.quirks import SERVERS, names

    known = isinstance(value, str) and (value == "auto" or SERVERS.find(value) is not None)
    return str(value) if known else _choice(*names())(value)


def _count(what: str, hint: str) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if not re.fullmatch("[0-9]{1,9}", str(value)) or int(value) < 1:
            raise units.Wrong("invalid_value", f"{str(value)!r} is no number of {what}", hint)
        return int(value)

    return parse


def _workers(value: Any) -> int:
    return 0 if value == "auto" else _count("workers", "a number from 1, or auto")(value)


def _pem(value: Any) -> str:
    if not Path(_text(value)).is_file():
        raise units.Wrong("missing_file", "no such file", "give a PEM file")
    return _text(value)


def key_of_file(value: Any) -> str:
    try:
        return Path(_text(value)).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise units.Wrong(
            of_reading(error), f"cannot read the key: {reason}", "a file with the key alone"
        ) from None


def _folder(value: Any) -> str:
    """A folder that can be made and written into, as far as can be seen without making it; or an object store's URL."""
    if "://" in (text := _text(value)):
        return text
    path = Path(text).absolute()
    problem, hint = "", "give a path that can be written"
    if any(len(os.fsencode(part)) > LONGEST_NAME for part in path.parts):
        problem, hint = f"name too long (over {LONGEST_NAME} bytes)", "give a shorter one"
    elif not (
        there := next(folder for folder in (path, *path.parents) if folder.exists())
    ).is_dir():
        problem = f"{there} is not a directory"
    elif not os.access(there, os.W_OK | os.X_OK):
        problem = f"{there} cannot be written into"
    if problem:
        raise units.Wrong("unwritable_file", f"the host refuses it: {problem}", hint)
    return text


LONGEST_NAME = 255  # bytes of a file's name, on every file system in use


def _extra_body(value: Any) -> dict[str, Any]:
    try:
        body = dict(value) if isinstance(value, Mapping) else json.loads(_text(value))
        if not isinstance(body, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        hint = "write --extra-body '{\"temperature\": 0}'"
        raise UserError(
            "invalid_value", f"not a JSON object: {error}", "--extra-body", hint
        ) from None
    return body


def _header_name(value: Any) -> str:
    """The name of a header, like X-Session-ID."""
    if not isinstance(value, str) or not re.fullmatch(_HEADER_NAME, value):
        raise units.Wrong("invalid_value", "no name of a header", "like X-Session-ID")
    return value


def _headers(value: Any) -> tuple[tuple[str, str], ...]:
    """The pairs of a mapping, of pairs, or of texts like NAME: VALUE and NAME=VALUE."""
    given = (
        value.items()
        if isinstance(value, Mapping)
        else (value,)
        if isinstance(value, str)
        else value
    )
    pairs, faults = [], list[Fault]()
    for item in given:
        name, value = _split_header(item) if isinstance(item, str) else map(str, item)
        if not name:
            faults.append(
                UserError(
                    "invalid_value", "a header without a value", "--header", "write NAME: VALUE"
                )
            )
        elif not re.fullmatch(_HEADER_NAME, name) or not re.fullmatch(_HEADER_VALUE, value):
            shown = f"--header {name}: ***" if re.fullmatch(_HEADER_NAME, name) else "--header"
            faults.append(
                UserError(
                    "invalid_value",
                    "a header with a character that HTTP cannot carry",
                    shown,
                    "printable Latin-1 only",
                )
            )
        elif name.lower() in ("content-length", "transfer-encoding"):
            problem = "a header that says how long the body is: only the client knows"
            faults.append(UserError("unsupported", problem, f"--header {name}", "leave it out"))
        else:
            pairs.append((name, value))
    if faults:
        raise Faults(faults)
    return tuple(pairs)


def _split_header(text: str) -> tuple[str, str]:
    separator = min((index for index in (text.find(":"), text.find("=")) if index > 0), default=0)
    return text[:separator].strip(), text[separator + 1 :].strip()


def _metrics_pages(value: Any) -> tuple[str, ...]:
    from loadgen.core.followers import scraper

    if (fault := scraper.check(_texts(value))) is not None:
        raise fault
    return _texts(value)


def _profile(value: Any) -> "ProfileAsked":
    from loadgen.core.followers import profiler

    return profiler.asked(_text(value))


def _energy_pages(value: Any) -> tuple[str, ...]:
    from loadgen.core.followers import scraper

    if (
        fault := scraper.check(_texts(value), "--energy", scraper.ENERGY_WORDS, ("auto", "off"))
    ) is not None:
        raise fault
    return _texts(value)


# -- the table -------------------------------------------------------------------------------------------------------


class Option(NamedTuple):
    """How an option is typed and read.

    `flags`: its names on the command line, of which the first names it in faults, and what it takes, in capitals; with
    "" it is a keyword of Python, and on the command line `--set NAME=VALUE` where `sets` says what it takes. `type`:
    what the command line makes of it; a switch `--no-x` gives False. `default` is shown in the help; `shown`: what
    happens without it, where that is no value of it. `reaches`: it names a host, a key or who may watch, so that it is
    never taken from a folder (`shell/taken_up.py`).
    """

    flags: str
    help: str
    type: Any = str
    default: str | None = None
    parse: Callable[[Any], Any] = _text
    part: Literal["workload", "load", "settings"] = "settings"
    shown: str = ""
    sets: str = ""
    reaches: bool = False

    @property
    def names(self) -> list[str]:
        """How it is typed: `-c --concurrency ...`."""
        return [word for word in self.flags.split() if word.startswith("-")]

    @property
    def metavar(self) -> str | None:
        """What it takes, for the help; None for a switch."""
        last = (self.flags or "-").split()[-1]
        return None if last.startswith("-") else last

    def place(self, name: str, value: object) -> str:
        """How a fault names it with a value. `name`: its keyword."""
        return (
            f"--set {name}={value}"
            if self.sets
            else f"{self.names[0] if self.names else name} {value}"
        )

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it takes, where they can be listed."""
        return getattr(self.parse, "known", ())


def _of_load(flags: str, help: str, type: Any = str, shown: str = "", sets: str = "") -> Option:
    """An option that `workload/flags.py` reads."""
    return Option(flags, help, type, part="load", shown=shown, sets=sets)


class RunOptions(TypedDict, total=False):
    """What `loadgen.run` takes beside the workload, with the types that Python may give."""

    url: Annotated[
        Texts,
        Option(
            "--url -u URL",
            "Endpoint, with or without a path prefix and /v1; repeat it for several. sim:PRESET: a simulated one, in "
            "virtual time. NAME=URL: that of the steps of a task that ask for it by this name.",
            list[str],
            parse=_texts,
            shown="an embedded simulation of a GB300 VM, in real time",
            reaches=True,
        ),
    ]
    targets: Annotated[
        File,
        Option(
            "--targets FILE",
            "A YAML list of endpoints: name, url, api_key_env, gpus, shape, region, node.",
            Path,
            reaches=True,
        ),
    ]
    route: Annotated[
        str,
        Option(
            "",
            "With several targets: round-robin, least-in-flight, or sticky per conversation; auto chooses.",
            default="auto",
            parse=_choice("auto", "round-robin", "least-in-flight", "sticky"),
            sets="WAY",
        ),
    ]
    session_header: Annotated[
        str | None,
        Option(
            "",
            "A header that names the conversation or task of a request, for routers that keep a session in place.",
            parse=_header_name,
            sets="NAME",
        ),
    ]
    slo_headers: Annotated[
        bool,
        Option(
            "",
            "Send each request's SLO of TTFT and TPOT, for gateways that schedule by it (llm-d).",
            bool,
            parse=_switch,
            sets="yes",
        ),
    ]
    percentiles: Annotated[
        Sequence[float] | str,
        Option(
            "",
            "Further percentiles of the latencies: 25,99.5. All runs tell 50, 90, 95, 99 and 99.9.",
            parse=_percentiles,
            sets="P,P",
        ),
    ]
    on_target_failure: Annotated[
        str,
        Option(
            "",
            "When a target stops answering: continue, or stop the run.",
            default="continue",
            parse=_choice("continue", "stop"),
            sets="WHAT",
        ),
    ]
    model: Annotated[
        str | None,
        Option("--model -m NAME", "Model name.", shown="the only one that the server lists"),
    ]
    server: Annotated[
        str,
        Option(
            "--server KIND",
            f"auto, {', '.join(tuple(QUIRKS)[:-1])} or {tuple(QUIRKS)[-1]}.",
            default="auto",
            parse=_server,
        ),
    ]
    api: Annotated[
        str,
        Option(
            "--api KIND",
            "chat, completions, responses, messages, embeddings or rerank.",
            default="chat",
            parse=_choice("chat", "completions", "responses", "messages", "embeddings", "rerank"),
        ),
    ]
    trace: Annotated[
        File,
        Option(
            "--trace FILE",
            "Replay a trace: its arrivals, lengths and shared beginnings, in the place of the workload's.",
            Path,
            part="workload",
        ),
    ]
    dataset: Annotated[
        File,
        Option(
            "--dataset FILE",
            "Prompts of your own: JSONL, JSON list, ShareGPT, CSV, Parquet, OpenAI batch, or hf:ORG/NAME.",
            Path,
            part="workload",
        ),
    ]
    trace_speed: Annotated[
        Text, _of_load("", "Replay a trace so many times as fast.", shown="1", sets="FACTOR")
    ]
    trace_slice: Annotated[
        Text,
        _of_load(
            "",
            "Only what came in this time: 10m..20m, 10m.. or ..20m, from the first request of the trace.",
            shown="all",
            sets="FROM..TO",
        ),
    ]
    trace_loop: Annotated[
        Text,
        _of_load(
            "",
            "Play the trace so many times, one after the other, with new text each time.",
            shown="1",
            sets="N",
        ),
    ]
    trace_replay: Annotated[
        Text,
        _of_load(
            "",
            "instants: each request when it came; sessions: each after the answers that it waited for in its session, and "
            "the recorded time of tools and users.",
            shown="instants",
            sets="WHAT",
        ),
    ]
    on_bad_row: Annotated[
        Text,
        _of_load(
            "",
            "A row of the trace with something wrong in it: fail, or skip (leave it out, and count it).",
            shown="fail",
            sets="WHAT",
        ),
    ]
    request_rate: Annotated[
        Text, _of_load("--request-rate RATE", "Open loop: arrivals per second (10, 600/min, inf).")
    ]
    burstiness: Annotated[
        Text,
        _of_load(
            "", "Gamma shape of the gaps; 1 is Poisson, below 1 burstier.", shown="1", sets="SHAPE"
        ),
    ]
    concurrency: Annotated[
        Text,
        _of_load(
            "--concurrency -c N",
            "Closed loop: lanes. A list (1,2,4,8) runs one level after the other.",
        ),
    ]
    concurrency_ramp: Annotated[
        Text,
        _of_load(
            "",
            "Closed loop: lanes begin one after the other, evenly over this time; 0: all at once.",
            shown="the length of an answer",
            sets="TIME",
        ),
    ]
    max_in_flight: Annotated[
        Text,
        _of_load(
            "--max-in-flight N",
            "Open loop: a start above this many in flight is dropped and counted.",
            shown="no limit",
        ),
    ]
    max_in_prefill: Annotated[
        Text,
        _of_load(
            "",
            "At most this many sent and without a first output: a lane waits for its place, a start of an open loop is "
            "dropped and counted.",
            shown="no limit",
            sets="N",
        ),
    ]
    num_requests: Annotated[
        Text, _of_load("--num-requests -n N", "Stop after this many.", shown="as the workload says")
    ]
    duration: Annotated[
        Text,
        _of_load(
            "--duration -d TIME",
            "Stop after this long (30s, 5m; bare numbers are seconds).",
            shown="as the workload says",
        ),
    ]
    warmup: Annotated[
        Text,
        _of_load(
            "--warmup TIME|Nreq",
            "Unmeasured load before: a time (10s), a count (20req), or 0.",
            shown="as the workload says",
        ),
    ]
    num_warmups: Annotated[Text, _of_load("", "Unmeasured requests before.")]
    grace: Annotated[
        Text,
        _of_load(
            "--grace TIME",
            "How long requests in flight may go on after the end of the load. What is left then is unfinished, not failed.",
            shown="as --timeout",
        ),
    ]
    timeout: Annotated[
        Text,
        _of_load(
            "--timeout TIME", "Longest time for one request, from its due instant.", shown="600s"
        ),
    ]
    stall_timeout: Annotated[
        Text, _of_load("", "Longest silence within a stream.", shown="120s", sets="TIME")
    ]
    slo: Annotated[
        Texts,
        _of_load(
            "--slo TERM",
            "ttft:2s, tpot:200ms:p95, goodput:99%. Repeatable.",
            list[str],
            shown="the workload's",
        ),
    ]
    goodput: Annotated[Texts, _of_load("", "ttft:2000 tpot:200, in milliseconds.", list[str])]
    input_tokens: Annotated[
        Text,
        _of_load(
            "--input-tokens --isl N", "Prompt length, replacing the file's.", shown="the workload's"
        ),
    ]
    output_tokens: Annotated[
        Text,
        _of_load(
            "--output-tokens --osl N",
            "Output length, replacing the file's.",
            shown="the workload's",
        ),
    ]
    seed: Annotated[
        Text, _of_load("--seed N", "Of lengths, texts and arrivals.", shown="a fresh one, printed")
    ]
    schedule_seed: Annotated[
        Text,
        _of_load(
            "",
            "Of Poisson arrivals alone, as MLPerf LoadGen's schedule_rng_seed.",
            shown="from --seed",
            sets="N",
        ),
    ]
    salt: Annotated[
        Text,
        _of_load(
            "--salt WORD",
            "Changes the texts of prompts, not lengths or arrivals: a word, or fresh for a new one in each run.",
            shown="from --seed",
        ),
    ]
    stop_when: Annotated[
        Texts,
        _of_load(
            "--stop-when RULE",
            "End the run when the requests that ended last fail or wait too much: errors:20%, ttft:p50:30s. Repeatable.",
            list[str],
        ),
    ]
    limit: Annotated[
        Texts,
        _of_load(
            "",
            "Change a limit of the verdict: send_lag_share:10%. Stored.",
            list[str],
            sets="NAME:SHARE",
        ),
    ]
    workers: Annotated[
        int | str | None,
        Option(
            "--workers N",
            "Worker processes on this machine, or auto: as many as the load can use. With --ray: on "
            "the nodes of the cluster, auto without the flag.",
            parse=_workers,
            shown="1",
        ),
    ]
    ray: Annotated[
        str | None,
        Option(
            "--ray ADDRESS",
            "Run the workers on a Ray cluster: auto, or HOST:PORT of its head node.",
            shown="this machine",
            reaches=True,
        ),
    ]
    sources: Annotated[
        Texts,
        Option(
            "",
            "Local address to send from. Repeatable: each has local ports of its own.",
            list[str],
            parse=_texts,
            shown="chosen by the system",
            sets="IP",
        ),
    ]
    keep: Annotated[
        str,
        Option(
            "--keep WHAT",
            "raw: a record of every request; gaps: with each of its gaps. sample, histogram: of some, of none, for runs "
            "of hours, with quantiles within 0.1 %.",
            default="raw",
            parse=_choice("raw", "gaps", "sample", "histogram"),
        ),
    ]
    tokenizer: Annotated[
        File, Option("--tokenizer FILE", "Of the model: a tokenizer.json, its folder, or ORG/NAME.")
    ]
    extra_body: Annotated[
        Mapping[str, Any] | str | None,
        Option(
            "--extra-body JSON", "JSON merged into every request body, last.", parse=_extra_body
        ),
    ]
    headers: Annotated[
        Mapping[str, str] | Sequence[tuple[str, str]] | Texts,
        Option(
            "--header -H NAME:VALUE",
            "NAME: VALUE or NAME=VALUE. Repeatable.",
            list[str],
            parse=_headers,
            reaches=True,
        ),
    ]
    api_key: Annotated[
        str | None, Option("", "The key itself; else api_key_file, else OPENAI_API_KEY.")
    ]
    api_key_file: Annotated[
        File,
        Option(
            "--api-key-file FILE",
            "A file with the key; else OPENAI_API_KEY (AZURE_OPENAI_API_KEY).",
            Path,
            parse=key_of_file,
            reaches=True,
        ),
    ]
    cacert: Annotated[
        File,
        Option(
            "--cacert FILE",
            "PEM file of the authority to trust.",
            Path,
            parse=_pem,
            shown="the system's",
            reaches=True,
        ),
    ]
    cert: Annotated[
        File,
        Option(
            "--cert FILE",
            "PEM file of the client certificate, with its key.",
            Path,
            parse=_pem,
            reaches=True,
        ),
    ]
    key: Annotated[
        File,
        Option(
            "--key FILE", "PEM file of its key, where it is apart.", Path, parse=_pem, reaches=True
        ),
    ]
    insecure: Annotated[
        bool,
        Option(
            "--insecure -k",
            "Do not verify the server's certificate.",
            bool,
            parse=_switch,
            reaches=True,
        ),
    ]
    stream: Annotated[
        bool,
        Option(
            "--no-stream",
            "Ask for whole answers; TTFT is then the whole answer.",
            bool,
            parse=_switch,
        ),
    ]
    client: Annotated[
        str,
        Option(
            "",
            "wire (this project's), or openai: the openai package, for reference.",
            default="wire",
            parse=_choice("wire", "openai"),
            sets="KIND",
        ),
    ]
    server_metrics: Annotated[
        Texts,
        Option(
            "--server-metrics WHERE",
            "The servers' own metrics pages, read once a second: auto (where they usually are), off, URLs (repeatable), "
            "or drain: trtllm-serve's JSON /metrics, which each read empties for everybody.",
            list[str],
            parse=_metrics_pages,
            shown="auto",
            reaches=True,
        ),
    ]
    server_timing: Annotated[
        bool,
        Option(
            "--server-timing",
            "Ask the server for its own account of each request (queue, prefill, decode). One that comes unasked is always "
            "read.",
            bool,
            parse=_switch,
        ),
    ]
    reset_cache: Annotated[
        bool,
        Option(
            "",
            "Empty the servers' prefix caches after the probe, before the load (vLLM, SGLang, some trtllm-serve).",
            bool,
            parse=_switch,
            sets="yes",
        ),
    ]
    profile: Annotated[
        str | None,
        Option(
            "--profile STAGE[:TIME]",
            "Run the profiler of vLLM, SGLang or TensorRT-LLM around a stage, or steady (all measured ones); at most so "
            "long: steady:10s.",
            parse=_profile,
        ),
    ]
    energy: Annotated[
        Texts,
        Option(
            "--energy WHERE",
            "What the GPUs use, read once a second: auto (trtllm-serve's /energy_metrics; nvidia-smi where the target is "
            "on this machine), off, nvidia-smi, or URLs of DCGM and node exporter pages (repeatable).",
            list[str],
            parse=_energy_pages,
            shown="auto",
            reaches=True,
        ),
    ]
    gpus: Annotated[
        int | str | None,
        Option(
            "--gpus N",
            "GPUs behind the endpoint, for per-GPU and cost figures.",
            int,
            parse=_count("GPUs", "a whole number from 1"),
        ),
    ]
    shape: Annotated[str | None, Option("--shape NAME", "Its machine shape, as in a price list.")]
    region: Annotated[str | None, Option("", "Its region.", sets="NAME")]
    metadata: Annotated[
        Mapping[str, object] | Texts,
        Option(
            "--metadata KEY=VALUE",
            "KEY=VALUE, stored with the results and shown. Repeatable. Never a secret.",
            list[str],
            parse=_pairs_or_texts,
        ),
    ]
    system: Annotated[
        File,
        Option(
            "--system FILE",
            "A YAML file that describes the system under test, also its GPUs, shape, region, metadata: stored with these; "
            "what is missing is named.",
            Path,
            parse=_system,
        ),
    ]
    out: Annotated[
        File,
        Option(
            "--out -o FOLDER",
            "Results folder. s3://, az://, gs://, file://...: copied there at the end.",
            parse=_folder,
            shown="a new one in results/",
        ),
    ]
    embedded: Annotated[
        Mapping[str, Any] | None, Option("", "Options of the embedded simulation.", parse=_mapping)
    ]


class CommandOptions(RunOptions, total=False):
    """What several commands take and `loadgen.run` does not."""

    repeat: Annotated[
        str | None,
        Option(
            "--repeat N[,pause=TIME]",
            "So many runs of the same load, r1, r2, ... in one folder; or auto,most=10,within=5%: until half an interval "
            "of the figures is within that share of their mean. Only repeats show what another start does.",
            shown="1",
        ),
    ]
    prices: Annotated[
        File,
        Option(
            "--prices FILE",
            "Your prices (docs/prices.example.yaml): what a run will cost is said before it starts.",
            Path,
        ),
    ]
    max_cost: Annotated[
        float | None,
        Option(
            "--max-cost AMOUNT",
            "With --prices: no run that will cost more, all of the command together; and one that does is stopped.",
            float,
            shown="no limit",
        ),
    ]
    progress: Annotated[
        str,
        Option(
            "--progress HOW",
            "On stderr: auto (a live view on a terminal, else a line every 10 s), plain (a line), json (a line of JSON "
            "every 10 s), or off.",
            Literal["auto", "plain", "json", "off"],
            default="auto",
        ),
    ]
    prometheus: Annotated[
        str | None,
        Option(
            "--prometheus [HOST]:PORT",
            "Serve the metrics of each run to Prometheus while it goes: :9400 (on 127.0.0.1).",
            reaches=True,
        ),
    ]
    otel: Annotated[
        str | None,
        Option(
            "--otel WHAT",
            "Send each run to OpenTelemetry while it goes: metrics, traces (one span per request, whose traceparent the "
            "server gets) or all, to where OTEL_EXPORTER_OTLP_ENDPOINT says; or the URL of a collector. Extra: otlp.",
            reaches=True,
        ),
    ]
    force: Annotated[
        bool,
        Option(
            "--force",
            "Where --out holds results: keep those beside it, under a dated name, and begin anew.",
            bool,
        ),
    ]
    set: Annotated[
        list[str],
        Option(
            "--set KEY=VALUE",
            "What is rare and has no flag of its own: trace_speed=2, burstiness=0.5, route=sticky; --help-all has the "
            "keys. Repeatable.",
            list[str],
        ),
    ]


# annotations of this module are values: texts would be compiled and evaluated at every start, 2 % of its instructions
COMMAND_OPTIONS: dict[str, Option] = {
    name: as_typed.__metadata__[0] for name, as_typed in CommandOptions.__annotations__.items()
}
OPTIONS = {name: COMMAND_OPTIONS[name] for name in RunOptions.__annotations__}
PANELS = {
    "Load": (
        "trace",
        "dataset",
        "request_rate",
        "concurrency",
        "num_requests",
        "duration",
        "warmup",
        "input_tokens",
        "output_tokens",
        "seed",
        "repeat",
        "set",
    ),
    "Target": (
        "url",
        "targets",
        "model",
        "server",
        "api",
        "api_key_file",
        "tokenizer",
        "gpus",
        "shape",
        "system",
    ),
    "SLO": ("slo", "stop_when"),
    "Output": ("out", "force", "metadata", "keep", "progress", "prometheus", "otel"),
    "Cost": ("prices", "max_cost"),
    "TLS": ("cacert", "cert", "key", "insecure"),
}
"""Which options stand together in a help; all others are `Advanced`."""


# -- what they say ---------------------------------------------------------------------------------------------------


def typed(flag: str, text: str | None, read: Callable[[str], T]) -> T | None:
    """What was typed after a flag, read by a parser of `units`; None where nothing was. Raises UserError."""
    try:
        return None if text is None else read(text)
    except units.Wrong as wrong:
        raise UserError(wrong.code, f'"{text}" {wrong}', f"{flag} {text}", wrong.hint) from None


def share_of(flag: str, text: str) -> float:
    """A share typed as 5% or as 0.05. Raises UserError where it is neither."""
    return typed(flag, text, units.share if text.strip().endswith("%") else _number) or 0.0


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise units.Wrong("invalid_value", "is no share", "like 5%, or 0.05") from None


def settings(given: Mapping[str, Any]) -> "Settings":
    """The options that are not of the load, read and checked; those not given have the defaults of `Settings`.

    Raises Faults.
    """
    from loadgen_sdk.dialects.quirks import VALUES
    from loadgen_sdk.transport.wire import Tls

    from loadgen.core.execution.plan import Endpoint, Settings
    from loadgen.shell import targets, user_metadata

    faults: list[Fault] = []
    values: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        if option.part == "settings" and given.get(name) is not None:
            with collecting(faults):
                try:
                    values[name] = option.parse(given[name])
                except units.Wrong as wrong:
                    shown = "***" if name == "api_key" else given[name]
                    raise UserError(
                        wrong.code, str(wrong), option.place(name, shown), wrong.hint
                    ) from None
    urls, file = values.pop("url", ()), values.pop("targets", None)
    if file is not None and urls:
        faults.append(
            UserError(
                "conflict",
                "--url and --targets exclude each other",
                "--targets",
                "put every url into the file",
            )
        )
    if values.get("ray") is not None:
        values.setdefault("workers", 0)
        if "sources" in values:
            hint = "leave out sources or --ray"
            faults.append(
                UserError(
                    "unsupported", "local addresses differ from node to node", "--set sources", hint
                )
            )
    if "sources" in values and values.get("client") == "openai":
        faults.append(
            UserError(
                "unsupported",
                "the openai package does not choose its local address",
                "--set sources",
                "--set client=wire",
            )
        )
    if (api := values.get("api", "chat")) not in ("chat", "completions"):
        if values.get("client") == "openai":
            faults.append(
                UserError(
                    "unsupported",
                    f"no {api} with the openai package",
                    f"--api {api}",
                    "--set client=wire",
                )
            )
        if api in VALUES:
            values["stream"] = False
    key_of_file = values.pop("api_key_file", None)
    key = (
        values.pop("api_key", None)
        or key_of_file
        or _key_of_environment(values.get("server"), urls)
    )
    system = values.pop("system", None)
    values = {**({} if system is None else system.target), **values}  # a flag stands over the file
    machine = {
        "gpus": values.get("gpus"),
        "shape": values.get("shape", ""),
        "region": values.get("region", ""),
    }
    endpoints: tuple[Endpoint, ...] = ()
    with collecting(faults):
        if file is not None:
            endpoints = targets.load_targets(
                Path(file), common=Endpoint(url="", api_key=key, **machine)
            )
        elif len(urls) > 1 or any(map(targets.named, urls)):
            endpoints = targets.from_urls(urls, key, **machine)
        elif urls:
            backends.of_target(urls[0])
    keys = [key, *(endpoint.api_key for endpoint in endpoints), *map(os.environ.get, KEY_VARIABLES)]
    secrets = user_metadata.secrets_of(keys, values.get("headers", ()))
    described, faults_of_system = user_metadata.parse(
        {} if system is None else system.metadata, secrets
    )
    said, faults_of_metadata = user_metadata.parse(values.get("metadata", ()), secrets)
    values["metadata"] = (*described, *said)
    if faults := [*faults, *faults_of_system, *faults_of_metadata]:
        raise Faults(faults)
    tls = {
        name: values.pop(flag, None)
        for name, flag in (("ca", "cacert"), ("cert", "cert"), ("key", "key"))
    }
    values["tls"] = Tls(verify=not values.pop("insecure", False), **tls)
    if "out" in values:
        out = values.pop("out")
        values |= {"store": out} if "://" in out else {"out": Path(out)}
    url = endpoints[0].url if endpoints else urls[0] if urls else None
    return Settings(url=url, targets=endpoints, api_key=key, **values)


def _key_of_environment(server: str | None, urls: Sequence[str]) -> str | None:
    """The API key of the environment; None for simulated endpoints."""
    row = backends.find(urls[0] if urls else None)
    if row is not None and row.simulated:
        return None
    azure = server == "azure" or "azure.com" in urls[0]
    return next(
        filter(None, map(os.environ.get, KEY_VARIABLES if azure else KEY_VARIABLES[1:])), None
    )
