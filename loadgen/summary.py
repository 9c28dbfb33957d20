"""What is true of a run: the types of `summary.json`, and the one function that makes it from rows.

Pure numpy. Each field is defined in `docs/summary.md`, which a test holds against these types; `schema` grows when a field
changes its meaning or goes, not when one is added.
"""

from __future__ import annotations

import msgspec

from loadgen.header import Fingerprints, Host, Target
from loadgen.metrics import Goodput, Limits, Load, Window
from loadgen.quantiles import Distribution

SCHEMA = 1


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Which run, made how, by what."""

    id: str
    name: str
    workload: str
    started: str
    ended: str
    state: str  # finished, interrupted (by the user), cut_off (no clean end: as far as it got)
    version: str
    command: tuple[str, ...]
    seed: int | None
    schedule_seed: int | None
    client: str
    api: str
    stream: bool
    tokenizer: str
    tokenizer_tag: str
    host: Host


class Bytes(msgspec.Struct, frozen=True, kw_only=True):
    """On the wire, heads and bodies, measured requests of any status."""

    sent: int
    received: int


class ErrorKind(msgspec.Struct, frozen=True, kw_only=True):
    """How often a kind of failure happened, and the first words about it (of the request due first)."""

    count: int
    first_text: str


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """ok + failed + dropped + cancelled + lost = scheduled, always."""

    scheduled: int
    ok: int
    failed: int
    dropped: int
    cancelled: int
    lost: int
    resent: int
    by_error: dict[str, ErrorKind]


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """How many ok requests have their counts from where: server, tokenizer, estimate, events, or none."""

    input: dict[str, int]
    output: dict[str, int]


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of ok requests, and their rates. A sum is over the requests whose count is known; null when none is."""

    input: int | None
    output: int | None
    cached: int | None
    reasoning: int | None
    asked_output: int | None
    cached_share: float | None
    length_mismatch_share: float | None
    per_event: float | None
    output_per_s: float | None
    total_per_s: float | None
    input_per_s: float | None
    steady_output_per_s: float | None
    steady_total_per_s: float | None
    steady_input_per_s: float | None
    last_issued_output_per_s: float | None
    whole_output_per_s: float | None
    failed_input: int
    failed_output: int
    sources: Sources


class Stalls(msgspec.Struct, frozen=True, kw_only=True):
    """Ok requests with a gap between output events of more than `over_ms`."""

    over_ms: float
    requests: int
    share: float | None


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """What the load generator itself used, all workers together; `cpu_share_max` is of one worker, of one core."""

    cpu_s: float | None
    peak_rss_bytes: int | None
    workers: int
    cpu_share_max: float | None
    kernel_stamp_share: float | None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the measurement can be trusted. Not about the SLO: a sound run that missed a limit is a sound run."""

    valid: bool
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    limits: Limits


class StageSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One stage, with its own window; rows of this stage only (in flight: all)."""

    name: str
    arrival: str
    measured: bool
    concurrency: int | None
    window: Window
    requests: Requests
    load: Load
    tokens: Tokens
    ttft_ms: Distribution
    tpot_ms: Distribution
    inter_chunk_ms: Distribution
    e2e_ms: Distribution
    goodput: Goodput


class TargetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One of several targets: its measured requests, over the window of the whole run (one clock for all)."""

    target: Target
    requests: Requests
    bytes: Bytes
    load: Load
    tokens: Tokens
    ttft_ms: Distribution
    tpot_ms: Distribution
    e2e_ms: Distribution
    goodput: Goodput


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`summary.json`. Only measured stages count, except where a name says otherwise (`warmup`, `window.whole`)."""

    schema: int
    run: Run
    target: Target
    rtt_ms: float | None
    window: Window
    bytes: Bytes
    fingerprints: Fingerprints
    verdict: Verdict
    requests: Requests
    warmup: Requests
    load: Load
    tokens: Tokens
    ttft_ms: Distribution
    ttft_from_sent_ms: Distribution
    first_answer_ms: Distribution
    tpot_ms: Distribution
    tpot_undefined: int  # ok requests too short to have a TPOT
    tpot_mlperf_ms: Distribution
    inter_chunk_ms: Distribution
    itl_ms: Distribution | None
    itl_absent: str  # why itl_ms is null, in words
    e2e_ms: Distribution
    max_gap_ms: Distribution
    stalls: Stalls
    connect_ms: Distribution
    send_lag_ms: Distribution
    client_lag_ms: Distribution
    stamp_error_ms: Distribution
    goodput: Goodput
    client: Client
    stages: tuple[StageSummary, ...]
    targets: tuple[TargetSummary, ...]  # empty with a single target
