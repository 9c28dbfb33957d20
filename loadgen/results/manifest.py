"""`run.json`: all that is known of a run besides its rows, and the samples that each worker takes of itself.

Pure: bytes in, values out. Nothing that is secret may enter these types; they are stored and printed as they are.
"""

from __future__ import annotations

import msgspec

from loadgen.errors import UserError
from loadgen.limits import ValidityLimits
from loadgen.results.record import SCHEMA
from loadgen.slo import Slo


class TargetFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the load went. `gpus`, `shape` and `region` are what the user declared, for cost; "" and null: not said."""

    url: str = ""
    server: str = ""  # trtllm, vllm, ...: the row of the dialect table
    model: str = ""
    gpus: int | None = None
    shape: str = ""  # of the machine, as in the price list
    region: str = ""
    name: str = ""  # "embedded simulation: gb300-vm", or the name in a targets file
    simulated: bool = False


class Fingerprints(msgspec.Struct, frozen=True, kw_only=True):
    """Equal text, equal thing (metrics.md); "" where it could not be known."""

    recipe: str = ""
    prompts: str = ""
    timetable: str = ""
    bodies: str = ""


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the run as planned, with one arrival law; rows refer to it by its place in `Header.stages`."""

    name: str = ""
    arrival: str = ""  # in words: "poisson 10/s", "8 in flight", "ramp 1/s to 10/s"
    closed: bool = False  # closed loop: the next start waits for a completion
    measured: bool = True
    start_ns: int = 0
    end_ns: int | None = None  # null: ends when its requests do
    slots: int | None = None  # planned; null when bounded by time alone
    rate: float | None = None  # nominal, requests (conversations) per second
    concurrency: int | None = None  # lanes of a closed loop


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that made the load."""

    name: str = ""
    kernel: str = ""
    python: str = ""
    cpu: str = ""
    cpus: int | None = None
    memory_bytes: int | None = None
    clock: str = ""  # of the monotonic clock: "tsc"
    versions: dict[str, str] = {}  # of the libraries that matter


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A worker on a node of a cluster. Its clock is ahead of the driver's by `offset_ms`, give or take `bound_ms`."""

    worker: int
    node: str = ""
    address: str = ""
    offset_ms: float = 0.0
    bound_ms: float = 0.0
    lost: bool = False


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Where the workers were, when not on this machine. Their starts lie within `start_bound_ms` of the run's instant
    0, by exchanges with each of them; `drift_ms`: how far a clock had moved against ours at the end, null: not known.
    """

    address: str = ""  # of Ray, as given
    nodes: int = 0
    start_bound_ms: float = 0.0
    drift_ms: float | None = None
    workers: tuple[Placed, ...] = ()


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What `run.json` holds. Written when the run starts (`state` running) and again when it ends."""

    schema: int = SCHEMA
    run: str = ""  # the run's id, its folder's name
    name: str = ""  # what the user called it
    started: str = ""  # wall clock, ISO 8601 with offset: the instant 0 of all rows
    ended: str = ""
    state: str = "running"  # running (or cut off), finished, interrupted (by the user), stopped (a target went)
    version: str = ""  # of loadgen
    command: tuple[str, ...] = ()  # secrets taken out
    workload: str = ""
    source_text: str = ""  # of the workload file, `${VAR}` unexpanded
    source_sha256: str = ""
    seed: int | None = None
    schedule_seed: int | None = None
    salt: str = ""
    targets: tuple[TargetFacts, ...] = ()
    client: str = "wire"  # wire, openai
    api: str = "chat"
    stream: bool = True
    slo: Slo | None = None
    limits: ValidityLimits = ValidityLimits()
    stages: tuple[StagePlan, ...] = ()
    fingerprints: Fingerprints = Fingerprints()
    rtt_ms: float | None = None  # connect time without load
    tokenizer: str = ""
    tokenizer_tag: str = ""  # estimate, tokenizer
    template_tokens: int | None = None  # chat template's share of a prompt, from the two-length probe; null: not known
    usage_asked: bool = True
    shares_prompts: bool = (
        False  # the workload asks for shared prefixes, or history is sent again: cached tokens expected
    )
    max_in_flight: int | None = None
    grace_s: float | None = None
    timeout_s: float | None = None
    stall_timeout_s: float | None = None
    turns: int = 1  # of each conversation
    workers: int = 1
    keep: str = "raw"  # which rows are kept: raw (all), sample, histogram (none)
    server_pages: tuple[str, ...] | None = None  # the servers' own metrics pages that are read; null: not looked for
    host: Host = Host()
    cluster: Cluster | None = None  # null: the workers ran on `host`
    notes: tuple[str, ...] = ()  # warnings known before the first request; they become warnings of the verdict


class Second(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker noted of itself about once a second. Cumulative: cpu_s; highest so far: peak_rss_bytes."""

    t_s: float  # end of the sample, from the start of the run
    worker: int = 0
    span_s: float = 1.0  # length of the sample; only those of 0.9 s and more are full seconds
    cpu_share: float = 0.0  # of one core
    waited_share: float | None = None  # of the sample: ready to run, while others had the core (Linux)
    cpu_s: float = 0.0
    peak_rss_bytes: int = 0
    in_flight: int = 0
    sent: int = 0
    done: int = 0
    failed: int = 0


def encode(header: Header) -> bytes:
    """`run.json`, indented for people."""
    return msgspec.json.format(msgspec.json.encode(header), indent=2) + b"\n"


def decode(data: bytes, where: str = "run.json") -> Header:
    """The inverse. Fields that an older version did not write take their defaults, unknown ones are passed over.

    Raises UserError for what is no header, and for one that a newer version wrote.
    """
    refuse_newer(data, SCHEMA, where)
    try:
        return msgspec.json.decode(data, type=Header)
    except msgspec.DecodeError as error:
        raise UserError(f"not the header of a run: {error}", where, "the file was changed or damaged") from None


class _Version(msgspec.Struct):
    schema: int


def refuse_newer(data: bytes, schema: int, where: str) -> None:
    """Raises UserError unless `data` is a JSON object whose `schema` is an integer that this version can read."""
    try:
        found = msgspec.json.decode(data, type=_Version).schema
    except msgspec.DecodeError as error:
        raise UserError(f"not a file of a run: {error}", where, "give the folder that a run has written") from None
    if found > schema:
        what = f"written by a newer loadgen (schema {found}, this version reads up to {schema})"
        raise UserError(what, where, "update loadgen: pip install -U loadgen")
    if found < 1:
        raise UserError(f"schema {found} does not exist", where, "the file was changed or damaged")


def decode_seconds(lines: bytes) -> list[Second]:
    """The samples of a `seconds.jsonl`; a last line that was cut off is left out."""
    found = []
    for line in lines.splitlines():
        try:
            found.append(msgspec.json.decode(line, type=Second))
        except msgspec.DecodeError:  # only the last one can be: the file is written line by line
            break
    return found
