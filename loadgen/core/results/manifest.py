"""`run.json`: everything known about a run except its rows; and `WorkerSample`, what a worker measures of itself.

Pure: bytes in, values out. These types must never hold a secret: they are stored and printed unchanged.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from loadgen.core import format
from loadgen.core.limits import ValidityLimits
from loadgen.core.results.json_files import decode_json, decode_json_lines
from loadgen.core.results.record import SCHEMA
from loadgen.core.slo import Slo, not_here
from loadgen.figures import METRICS


class TargetFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One target of the load. The user declares `gpus`, `shape` and `region` for cost; "" or null: not declared.

    `version`, `engine` and `precision` are what the server says of itself when it is probed; "": it does not say.
    """

    url: str = ""
    server: str = ""  # trtllm, vllm, ...: the key in the dialect table
    model: str = ""
    gpus: int | None = None
    shape: str = ""  # machine type, as in the price list
    region: str = ""
    node: str = ""  # the machine that it is on, where several targets may share one
    name: str = ""  # "embedded simulation: gb300-vm", or the name in a targets file
    simulated: bool = False
    version: str = ""  # of the server: "0.32.0"
    engine: str = ""  # that runs the model behind the server: "pytorch"
    precision: str = ""  # of weights, and of the KV cache where it says so: "nvfp4, KV cache fp8"
    serves: str = (
        ""  # the name by which steps of tasks ask for it; "": it serves all that ask for no other
    )

    @property
    def software(self) -> list[str]:
        """What the server says of itself, as texts; [] when it says nothing."""
        return [
            *([f"{self.server or 'server'} {self.version}"] if self.version else []),
            *([f"engine {self.engine}"] if self.engine else []),
            *([f"precision {self.precision}"] if self.precision else []),
        ]


class Fingerprints(msgspec.Struct, frozen=True, kw_only=True):
    """Hashes of what was run: equal text means equal content (metrics.md). "" where it is not known.

    `bodies`: of the bytes of all request bodies, where all were built before the start; "" for endless and very large
    loads, conversations with real replies, and in virtual time, where nothing is sent.
    """

    recipe: str = ""
    work: str = ""  # the recipe without what was promised of it: SLOs and limits of validity
    prompts: str = ""
    timetable: str = ""
    bodies: str = ""


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One planned part of the run, with one arrival law. Rows refer to it by its index in `RunManifest.stages`."""

    name: str = ""
    arrival: str = ""  # as text: "poisson 10/s", "8 in flight", "ramp 1/s to 10/s"
    closed: bool = False  # closed loop: the next start waits for a completion
    measured: bool = True
    start_ns: int = 0
    end_ns: int | None = None  # null: ends when its last request ends
    slots: int | None = None  # planned; null when bounded by time alone
    rate: float | None = None  # nominal, requests (conversations) per second
    concurrency: int | None = None  # lanes of a closed loop
    first_slot: int = 0  # number of its first slot
    chains: int | None = (
        None  # tasks, conversations and single requests that start in it; null: `slots / turns`
    )
    ramp_s: float | None = (
        None  # closed loop: its lanes begin evenly spread over this time; 0: all at once
    )
    ramp_from: str = (
        ""  # where ramp_s is from: asked, probe, preset, stage (it takes lanes over); "": not known
    )


class ClassPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One class of a run. Rows do not name it: the seed and the number of a start decide its class."""

    name: str = ""
    share: float = 1.0  # of all starts, as asked: single requests, conversations and tasks
    model: str | None = None  # null: that of the target
    priority: int | None = None
    tenant: str | None = None  # as sent for gateways; null: none
    slo: Slo | None = None  # its own, or that of the workload


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the tasks of a run, where all tasks have the same requests. Rows name it by their turn."""

    name: str = ""
    of_class: str = ""  # "": all requests are of one kind
    kind: str = "chat"  # chat, embed, rerank
    targets: tuple[int, ...] = ()  # indices of those that serve it
    model: str | None = None  # null: that of the target
    pause: str = ""  # what passes before its requests: names of tools, "thinking"; "": nothing
    turns: tuple[int, ...] = ()  # of its requests
    after: tuple[tuple[int, ...], ...] = ()  # for each of these: the turns that it waits for


class ChunkReuse(msgspec.Struct, frozen=True, kw_only=True):
    """How often the retrieved chunks of a load come again, in the order in which its requests are planned."""

    requests: int = 0  # looked at: all that are planned, or those with the first 30,000 chunks
    reused_share: float = 0.0  # of the chunks: in an earlier prompt already
    leading_share: float = 0.0  # of the chunks: an earlier prompt has the same ones up to here, so a prefix cache helps


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that generated the load."""

    name: str = ""
    kernel: str = ""
    python: str = ""
    cpu: str = ""
    cpus: int | None = None
    memory_bytes: int | None = None
    clock: str = ""  # source of the monotonic clock: "tsc"
    versions: dict[str, str] = {}  # of the libraries that affect results
    hot_path: str = ""  # what read the sockets: "compiled" (C), "python" (or one of the workers did), "": none was read


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A worker on a node of a cluster. Its clock is ahead of the driver's clock by `offset_ms` ± `bound_ms`."""

    worker: int
    node: str = ""
    address: str = ""
    offset_ms: float = 0.0
    bound_ms: float = 0.0
    lost: bool = False
    hot_path: str = ""  # of `Host`; "": lost, or not at its end yet


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Where the workers ran, if not on this machine.

    All workers start within `start_bound_ms` of instant 0 of the run, measured by clock exchanges with each worker.
    `drift_ms`: largest change of a clock offset by the end of the run; null: not known.
    """

    address: str = ""  # of the Ray cluster, as the user gave it
    nodes: int = 0
    start_bound_ms: float = 0.0
    drift_ms: float | None = None
    workers: tuple[Placed, ...] = ()
    lost: tuple[
        str, ...
    ] = ()  # nodes that were lost before the load, since the last run of the command


class ShardPart(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of a run a folder holds, if the run was divided with `--shard`, and what merging the parts needs."""

    index: int  # from 1
    count: int
    start_at: str  # the common start, RFC 3339
    start_delay_ms: float | None = None  # from the common start to the start of this part
    stages: tuple[
        StagePlan, ...
    ] = ()  # those of the whole run; `RunManifest.stages` are of this part
    prompts_total: str = ""  # hexadecimal: the sum of the hashes of its prompts
    bodies_total: str = ""  # hexadecimal: the sum of the hashes of its request bodies
    prompts_count: int = 0  # number of prompts in these sums


class MergedPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a merged run."""

    index: int  # from 1
    state: str  # that of its header, killed, or missing: there is no result of it
    host: str = ""
    workers: int = 0
    start_delay_ms: float | None = None  # from the common start to the start of this part


class ReasonCode(msgspec.Struct, frozen=True, kw_only=True):
    """One finding about a run, for programs: what it is, and the values in it. `metrics/reasons.py` has the words."""

    code: str
    values: dict[str, Any] = {}


class PluginUsed(msgspec.Struct, frozen=True, kw_only=True):
    """A row of another package that a run used."""

    table: str  # loadgen.backends, loadgen.formats, ...: the group of its entry point
    name: str
    package: str
    version: str


class RunManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `run.json`. Written when the run starts (`state` running) and again when it ends."""

    schema: int = SCHEMA
    run: str = ""  # id of the run: the name of its folder
    name: str = ""  # the name that the user gave it
    started: str = ""  # wall clock, ISO 8601 with offset: instant 0 of all rows
    ended: str = ""
    state: str = "running"  # running (or killed), finished, interrupted (by the user), stopped, decided (by a search)
    version: str = ""  # of loadgen
    plugins: tuple[
        PluginUsed, ...
    ] = ()  # rows of other packages that were used until the load began
    command: tuple[str, ...] = ()  # secrets removed
    workload: str = ""
    source_text: str = ""  # of the workload file, `${VAR}` not expanded
    source_sha256: str = ""
    seed: int | None = None
    schedule_seed: int | None = None
    salt: str = ""  # the same seed and salt give the same prompts
    new_prompts: bool = True  # seed or salt were drawn for this run: no server can know its prompts
    targets: tuple[TargetFacts, ...] = ()
    metadata: dict[str, str] = {}  # what the user said with --metadata
    client: str = "wire"  # wire, or virtual for a run in virtual time
    api: str = "chat"
    stream: bool = True
    slo: Slo | None = None
    limits: ValidityLimits = ValidityLimits()
    stages: tuple[StagePlan, ...] = ()
    classes: tuple[ClassPlan, ...] = ()  # empty: all requests are of one kind
    steps: tuple[
        StepPlan, ...
    ] = ()  # of tasks; empty where there are none, or their numbers of requests are drawn
    fingerprints: Fingerprints = Fingerprints()
    rtt_ms: float | None = None  # connect time without load
    dns_ms: float | None = (
        None  # what the lookup of a target's name took before the load, the longest; null: addresses
    )
    tokenizer: str = ""
    tokenizer_tag: str = ""  # estimate, tokenizer
    tokenizer_sha256: str = ""  # of the tokenizer file; "": the packaged vocabulary
    template_tokens: int | None = (
        None  # tokens that the chat template adds, by the two-length probe; null: not known
    )
    usage_asked: bool = True
    session_header: str | None = None  # the header that named the session of each request
    slo_headers: bool = False  # each request told a gateway its SLO
    server_timing: bool = False  # the server was asked for its own account of each request
    random_words: bool = False  # prompts are made of words drawn at random
    # the workload requests the token counts of its prompts: all sources but a file of prompts
    prompt_lengths_requested: bool = False
    shares_prompts: bool = (
        False  # the workload shares prefixes or sends history again, so cached tokens are expected
    )
    cache_reset: bool = (
        False  # the servers' prefix caches were emptied between the probe and the load
    )
    chunks: ChunkReuse | None = (
        None  # what the prompts of a workload with retrieved chunks share; null: it has none
    )
    cache_asked: float | None = (
        None  # share of prompt tokens that the servers' caches were to know; null: not asked
    )
    cache_bound: float | None = (
        None  # share of a trace's prompt tokens that came before in it; null: not told
    )
    max_in_flight: int | None = None
    max_in_prefill: int | None = None  # null also in runs before minor version 8
    grace_s: float | None = (
        None  # how long the drain may last: as asked with `grace`, else as `timeout`
    )
    timeout_s: float | None = None
    stall_timeout_s: float | None = None
    turns: int = 1  # places of a conversation or task in the numbers of slots: the most turns that one may have
    workers: int = 1
    percentiles: tuple[float, ...] = ()  # further ones, as shares, that the user asked for
    energy_pages: tuple[str, ...] = ()  # pages about the power of the hardware that are read
    server_pages: tuple[str, ...] | None = (
        None  # URLs of the servers' metrics pages that are read; null: not searched
    )
    host: Host = Host()
    cluster: Cluster | None = None  # null: the workers ran on `host`
    shard: ShardPart | None = None  # null: the folder holds a whole run
    parts: tuple[MergedPart, ...] = ()  # of a run that `loadgen merge` made; empty: of any other
    notes: tuple[
        str, ...
    ] = ()  # warnings, most of them known before the first request; they become warnings of the verdict
    note_codes: dict[str, ReasonCode] = {}  # note -> its code and values, where it has some
    stopped_by: ReasonCode | None = None  # the rule of `stop_when` that ended the run

    def __post_init__(self) -> None:
        """A stored header may be damaged: a figure that is not here was of another package that the run used."""
        of_others = {one.name for one in self.plugins if one.table == METRICS.group}
        if unknown := not_here(self.slos).keys() - of_others:
            raise ValueError(f"no SLO is of {min(unknown)!r}")

    @property
    def slos(self) -> tuple[Slo, ...]:
        """That of the run, and those of its classes."""
        return tuple(
            slo for slo in (self.slo, *(plan.slo for plan in self.classes)) if slo is not None
        )


def are_interchangeable(targets: Sequence[TargetFacts]) -> bool:
    """Whether each target serves all requests: not where steps of tasks have targets of their own."""
    return not any(target.serves for target in targets)


class WorkerSample(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker measured of itself, once a second. `cpu_s` is cumulative, `peak_rss_bytes` the highest so far."""

    t_s: float  # end of the sample, from the start of the run
    worker: int = 0
    span_s: float = 1.0  # length of the sample; a full second is 0.9 s or more
    cpu_share: float = 0.0  # of one core
    waited_share: float | None = (
        None  # of the sample: ready to run, but another thread had the core (Linux only)
    )
    write_share: float = 0.0  # of the sample: writing records, in which nothing is sent
    cpu_s: float = 0.0
    peak_rss_bytes: int = 0
    in_flight: int = 0
    sent: int = 0
    done: int = 0
    failed: int = 0


def encode_manifest(manifest: RunManifest) -> bytes:
    """Return the bytes of `run.json`, indented for readers."""
    return format.document(manifest)


def decode_manifest(data: bytes, where: str = "run.json") -> RunManifest:
    """Return the manifest in the bytes of `run.json`. Unknown fields are ignored.

    Raises UserError if the bytes are no manifest, or that of a newer version. `where` names the
    file in the error.
    """
    return decode_json(data, RunManifest, where, "the manifest of a run", schema=SCHEMA)


def decode_worker_samples(data: bytes) -> list[WorkerSample]:
    """Return the samples in the bytes of `seconds.jsonl`, up to a damaged line."""
    return list(decode_json_lines(data.splitlines(), WorkerSample))
