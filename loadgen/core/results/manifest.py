"""Defines `run.json`, the manifest of a run: everything that is known about it except its records.

It also defines `WorkerSample`, what a worker measures about itself once a second. The module is
pure: it converts bytes to values and back. The types must never hold a secret, because they are
stored and printed unchanged.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from loadgen.core import format
from loadgen.core.accepted_lengths import AcceptedLengthTarget
from loadgen.core.limits import ValidityLimits
from loadgen.core.results.json_files import decode_json, decode_json_lines
from loadgen.core.results.record import SCHEMA
from loadgen.core.slo import Slo, missing_metrics
from loadgen.figures import METRICS


class TargetFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One target of the load.

    Attributes:
        url: Its URL, without secrets.
        server: The type of the server, as the key of its server profile: trtllm, vllm and so on.
        model: The model that requests name.
        gpus: The number of GPUs that the user declares for cost, or None.
        shape: The instance type that the user declares, as in the price list, or "".
        region: The region that the user declares for cost, or "".
        node: The machine that it runs on. Several targets may share one.
        name: Its name in a targets file, or a description such as "embedded simulation: gb300-vm".
        simulated: Whether a simulated server responds.
        version: The version that the server reports, such as "0.32.0", or "".
        engine: The engine that the server reports, such as "pytorch", or "".
        precision: The precision of weights and KV cache that the server reports, such as
            "nvfp4, KV cache fp8", or "".
        serves: The name by which steps of tasks request it. "" if it serves all other steps.
    """

    url: str = ""
    server: str = ""
    model: str = ""
    gpus: int | None = None
    shape: str = ""
    region: str = ""
    node: str = ""
    name: str = ""
    simulated: bool = False
    version: str = ""
    engine: str = ""
    precision: str = ""
    serves: str = ""

    @property
    def software(self) -> list[str]:
        """Return what the server reports about its software, one text per fact."""
        facts = []
        if self.version:
            facts.append(f"{self.server or 'server'} {self.version}")

        if self.engine:
            facts.append(f"engine {self.engine}")

        if self.precision:
            facts.append(f"precision {self.precision}")

        return facts


class Fingerprints(msgspec.Struct, frozen=True, kw_only=True):
    """Hashes of what was run. Equal hashes mean equal content, and "" means that it is not known.

    Attributes:
        recipe: The configuration: workload without seed and salt, SLOs, and limits of validity.
        work: The configuration without SLOs and limits of validity.
        prompts: The texts, requested lengths and order of the prompts.
        schedule: The arrival schedule.
        bodies: The bytes of all request bodies, if all were built before the start. "" for loads
            that have no end or are very large, for conversations with real replies, and in virtual
            time, where nothing is sent.
    """

    recipe: str = ""
    work: str = ""
    prompts: str = ""
    schedule: str = msgspec.field(default="", name="timetable")
    bodies: str = ""


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One planned stage of the load, with one arrival process.

    Records refer to it by its index in `RunManifest.stages`.

    Attributes:
        name: Its name.
        arrival: Its arrival process as text: "poisson 10/s", "8 in flight", "ramp 1/s to 10/s".
        closed: Whether it is a closed loop, in which a request waits for the one before it.
        measured: Whether its requests are measured.
        start_ns: Its start.
        end_ns: Its end, or None if it ends when its last request ends.
        slots: The number of planned requests, or None if only its duration limits it.
        rate: The nominal rate per second of requests, or of conversations.
        concurrency: The number of virtual users of a closed loop.
        first_slot: The id of its first slot.
        sessions: The tasks, conversations and single requests that start in it. If None, that is
            `slots / turns_per_session`.
        ramp_s: The time over which the virtual users of a closed loop start evenly spread. 0 if
            they start together.
        ramp_from: What decided `ramp_s`: asked, probe, preset, or stage if it continues with the
            virtual users of the stage before. "" if not known.
    """

    name: str = ""
    arrival: str = ""
    closed: bool = False
    measured: bool = True
    start_ns: int = 0
    end_ns: int | None = None
    slots: int | None = None
    rate: float | None = None
    concurrency: int | None = None
    first_slot: int = 0
    sessions: int | None = msgspec.field(default=None, name="chains")
    ramp_s: float | None = None
    ramp_from: str = ""


class ClassPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One request class of a run.

    Records do not name their class: the seed and the number of the session decide it.

    Attributes:
        name: Its name.
        share: Its requested fraction of all sessions.
        model: Its model, or None for that of the target.
        priority: The priority that its requests carry, or None.
        tenant: The tenant that its requests name for gateways, or None.
        slo: Its own SLO, or that of the workload.
    """

    name: str = ""
    share: float = 1.0
    model: str | None = None
    priority: int | None = None
    tenant: str | None = None
    slo: Slo | None = None


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the tasks of a run, if all tasks have the same requests.

    Records refer to it by their turn.

    Attributes:
        name: Its name.
        of_class: The request class of its tasks. "" if the run has no classes.
        kind: What its requests are: chat, embed or rerank.
        targets: The indices of the targets that serve it.
        model: Its model, or None for that of the target.
        pause: What passes before its requests: the names of tools, "thinking", or "" for nothing.
        turns: The turns of its requests.
        after: The turns that each of its requests waits for.
    """

    name: str = ""
    of_class: str = ""
    kind: str = "chat"
    targets: tuple[int, ...] = ()
    model: str | None = None
    pause: str = ""
    turns: tuple[int, ...] = ()
    after: tuple[tuple[int, ...], ...] = ()


class ChunkReuse(msgspec.Struct, frozen=True, kw_only=True):
    """How often the retrieved chunks of a load repeat, in the order of its planned requests.

    Attributes:
        requests: The examined requests: all that are planned, or those with the first 30,000
            chunks.
        reused_share: The fraction of chunks that an earlier prompt already contains.
        leading_share: The fraction of chunks that a prefix cache can serve, because an earlier
            prompt begins with the same chunks up to this one.
    """

    requests: int = 0
    reused_share: float = 0.0
    leading_share: float = 0.0


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that generated the load.

    Attributes:
        name: Its host name.
        kernel: The version of its kernel.
        python: The version of Python.
        cpu: The model of its CPU.
        cpus: The number of its CPUs.
        memory_bytes: Its memory.
        clock: The source of its monotonic clock, such as "tsc".
        versions: The versions of the libraries that affect results.
        hot_path: What read the sockets: "compiled" for C code, or "python" if at least one worker
            used Python. "" if no socket was read.
    """

    name: str = ""
    kernel: str = ""
    python: str = ""
    cpu: str = ""
    cpus: int | None = None
    memory_bytes: int | None = None
    clock: str = ""
    versions: dict[str, str] = {}
    hot_path: str = ""


class PlacedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker on a node of a cluster.

    Attributes:
        worker: Its number.
        node: The name of its node.
        address: The address of its node.
        offset_ms: How far its clock is ahead of the driver's clock.
        bound_ms: The uncertainty of `offset_ms`.
        lost: Whether its node was lost during the run.
        hot_path: As in `Host`. "" if the worker was lost or has not ended yet.
    """

    worker: int
    node: str = ""
    address: str = ""
    offset_ms: float = 0.0
    bound_ms: float = 0.0
    lost: bool = False
    hot_path: str = ""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Where the workers ran, if not on this machine.

    Attributes:
        address: The address of the Ray cluster, as the user gave it.
        nodes: The number of its nodes.
        start_bound_ms: All workers start within this time of the start of the run, by clock
            exchanges with each worker.
        drift_ms: The largest change of a clock offset until the end of the run, or None if it is
            not known.
        workers: Its workers.
        lost: The nodes that were lost before the load, since the last run of the command.
    """

    address: str = ""
    nodes: int = 0
    start_bound_ms: float = 0.0
    drift_ms: float | None = None
    workers: tuple[PlacedWorker, ...] = ()
    lost: tuple[str, ...] = ()


class ShardPart(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of a run divided with `--shard` a folder holds, and what merging needs.

    Attributes:
        index: The number of the part, from 1.
        count: The number of parts.
        start_at: The common start, as in RFC 3339.
        start_delay_ms: The time from the common start to the start of this part.
        stages: The stages of the complete run. `RunManifest.stages` are those of this part.
        prompts_total: The sum of the hashes of its prompts, in hexadecimal.
        bodies_total: The sum of the hashes of its request bodies, in hexadecimal.
        prompts_count: The number of prompts in these sums.
    """

    index: int
    count: int
    start_at: str
    start_delay_ms: float | None = None
    stages: tuple[StagePlan, ...] = ()
    prompts_total: str = ""
    bodies_total: str = ""
    prompts_count: int = 0


class MergedPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a merged run.

    Attributes:
        index: The number of the part, from 1.
        state: The state in its manifest, or killed, or missing if there is no result of it.
        host: The name of its machine.
        workers: The number of its workers.
        start_delay_ms: The time from the common start to the start of this part.
    """

    index: int
    state: str
    host: str = ""
    workers: int = 0
    start_delay_ms: float | None = None


class ReasonCode(msgspec.Struct, frozen=True, kw_only=True):
    """One finding about a run for programs: its code and its values.

    `metrics/reasons.py` has the sentence of each code.
    """

    code: str
    values: dict[str, Any] = {}


class PluginUsed(msgspec.Struct, frozen=True, kw_only=True):
    """A table row of another package that a run used.

    Attributes:
        table: The group of its entry point: loadgen.backends, loadgen.formats and so on.
        name: The name of the row.
        package: The package that it belongs to.
        version: The version of the package.
    """

    table: str
    name: str
    package: str
    version: str


class RunManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `run.json`.

    It is written when the run starts, with the state "running", and again when the run ends.
    """

    schema: int = SCHEMA

    # What was run, and when.
    run: str = ""
    """The id of the run, which is the name of its folder."""
    name: str = ""
    """The name that the user gave it."""
    started: str = ""
    """The wall clock at the start, ISO 8601 with offset. The times of all records count from it."""
    ended: str = ""
    state: str = "running"
    """running (or killed), finished, interrupted by the user, stopped by a rule, or decided by a
    search."""
    version: str = ""
    """The version of loadgen."""
    plugins: tuple[PluginUsed, ...] = ()
    """Rows of other packages that were used until the load began."""
    command: tuple[str, ...] = ()
    """The command line without secrets."""

    # The workload.
    workload: str = ""
    source_text: str = ""
    """The text of the workload file. `${VAR}` is not expanded."""
    source_sha256: str = ""
    seed: int | None = None
    schedule_seed: int | None = None
    salt: str = ""
    """Makes prompts unique. The same seed and salt give the same prompts."""
    new_prompts: bool = True
    """Whether seed or salt were drawn for this run, so that no server can know its prompts."""
    targets: tuple[TargetFacts, ...] = ()
    metadata: dict[str, str] = {}
    """The values of `--metadata`."""
    client: str = "wire"
    """wire, or virtual for a run in virtual time."""
    api: str = "chat"
    stream: bool = True
    slo: Slo | None = None
    limits: ValidityLimits = ValidityLimits()
    stages: tuple[StagePlan, ...] = ()
    classes: tuple[ClassPlan, ...] = ()
    """The request classes. Empty if all requests are of one kind."""
    steps: tuple[StepPlan, ...] = ()
    """The steps of tasks. Empty without tasks, or if their numbers of requests are random."""
    fingerprints: Fingerprints = Fingerprints()

    # The network and the tokenizer.
    rtt_ms: float | None = None
    """The time to connect, without load."""
    dns_ms: float | None = None
    """The longest lookup of a target's name before the load. None if targets are addresses."""
    tokenizer: str = ""
    tokenizer_tag: str = ""
    """The source of token counts: estimate or tokenizer."""
    tokenizer_sha256: str = ""
    """The hash of the tokenizer file. "" for the packaged vocabulary."""
    template_tokens: int | None = None
    """The tokens that the chat template adds, measured with prompts of two lengths. None if not
    known."""

    # What requests and prompts contain.
    requests_usage: bool = msgspec.field(default=True, name="usage_asked")
    """Whether requests ask the server for token counts."""
    session_header: str | None = None
    """The HTTP header that named the session of each request."""
    accepted_length: AcceptedLengthTarget | None = None
    """The accepted length that speculative decoding is to have, None if none was stated."""
    slo_headers: bool = False
    """Whether each request carried its SLO for a gateway."""
    server_timing: bool = False
    """Whether the server was asked for a timing breakdown of each request."""
    random_words: bool = False
    """Whether prompts consist of random words."""
    prompt_lengths_requested: bool = False
    """Whether the workload requests the lengths of its prompts. Only a file of prompts does not."""
    shares_prompts: bool = False
    """Whether prompts share prefixes or repeat history, so that cached tokens are expected."""
    cache_reset: bool = False
    """Whether the servers' prefix caches were emptied between the preflight and the load."""
    chunks: ChunkReuse | None = None
    """What prompts with retrieved chunks share. None if the workload has none."""
    requested_cache_share: float | None = msgspec.field(default=None, name="cache_asked")
    """The fraction of prompt tokens that the servers' caches were to contain. None if the workload
    does not request one."""
    trace_cache_share: float | None = msgspec.field(default=None, name="cache_bound")
    """The fraction of the prompt tokens of a trace that came before in it. None if not known."""

    # Limits of the load.
    max_in_flight: int | None = None
    max_in_prefill: int | None = None
    """Also None in runs before the minor version 8."""
    grace_s: float | None = None
    """How long the drain may last: the option `grace`, else `timeout`."""
    timeout_s: float | None = None
    stall_timeout_s: float | None = None
    turns_per_session: int = msgspec.field(default=1, name="turns")
    """The slot ids of each conversation or task, which is the largest number of its turns."""
    workers: int = 1

    # What else is measured.
    percentiles: tuple[float, ...] = ()
    """Further percentiles that the user requested, as fractions."""
    energy_pages: tuple[str, ...] = ()
    """The pages with the power of the hardware that are read."""
    server_pages: tuple[str, ...] | None = None
    """The URLs of the servers' metrics pages that are read. None if none were looked for."""

    # Where the load came from.
    host: Host = Host()
    cluster: Cluster | None = None
    """None if the workers ran on `host`."""
    shard: ShardPart | None = None
    """None if the folder holds a complete run."""
    merged_parts: tuple[MergedPart, ...] = msgspec.field(default=(), name="parts")
    """The parts of a run that `loadgen merge` created. Empty for any other run."""

    # Findings.
    warnings: tuple[str, ...] = msgspec.field(default=(), name="notes")
    """Sentences, most of them known before the first request. The verdict repeats them."""
    warning_codes: dict[str, ReasonCode] = msgspec.field(default={}, name="note_codes")
    """The code and the values of each warning that has a code, by its sentence."""
    stopped_by: ReasonCode | None = None
    """The rule of `stop_when` that ended the run."""

    def __post_init__(self) -> None:
        """Raise ValueError if an SLO names a metric that neither loadgen nor a plug-in defines.

        A metric that is not available here may have come from another package.
        """
        plugin_metrics = {plugin.name for plugin in self.plugins if plugin.table == METRICS.group}
        unknown = missing_metrics(self.slos).keys() - plugin_metrics
        if unknown:
            raise ValueError(f"there is no SLO metric {min(unknown)!r}")

    @property
    def slos(self) -> tuple[Slo, ...]:
        """Return the SLO of the run and those of its classes."""
        slos = [self.slo, *(request_class.slo for request_class in self.classes)]
        return tuple(slo for slo in slos if slo is not None)


class WorkerSample(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker measures about itself once a second.

    Attributes:
        t_s: The end of the sample, from the start of the run.
        worker: The number of the worker.
        span_s: The length of the sample. From 0.9 s on it counts as a full second.
        cpu_share: CPU time as a fraction of one core.
        waited_share: The fraction of the sample in which the worker was ready to run, but another
            thread had the core. None on systems other than Linux.
        write_share: The fraction of the sample that writing records took. Nothing is sent then.
        cpu_s: The CPU time since the start.
        peak_rss_bytes: The largest resident memory since the start.
        in_flight: Requests in flight.
        sent: Requests sent since the start.
        done: Requests that ended since the start.
        failed: Requests that failed since the start.
    """

    t_s: float
    worker: int = 0
    span_s: float = 1.0
    cpu_share: float = 0.0
    waited_share: float | None = None
    write_share: float = 0.0
    cpu_s: float = 0.0
    peak_rss_bytes: int = 0
    in_flight: int = 0
    sent: int = 0
    done: int = 0
    failed: int = 0


def are_interchangeable(targets: Sequence[TargetFacts]) -> bool:
    """Return True if each target serves all requests.

    Steps of tasks may have targets of their own, which serve only these steps.
    """
    return not any(target.serves for target in targets)


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
