"""The types of `summary.json`, and `summarize`, the function that computes a summary from the rows of a run.

Pure numpy. `docs/summary.md` defines every field; a test compares that page with these types. `schema` grows when a
field changes its meaning or is removed, not when a field is added.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
import numpy as np

from loadgen.limits import ValidityLimits
from loadgen.metrics import blocks, drift, validity
from loadgen.metrics import columns as metrics
from loadgen.metrics.blocks import Bytes, ClientUse, RequestCounts, Sessions, Stalls, Tokens
from loadgen.metrics.columns import OK, Columns, Goodput, Load, Window
from loadgen.metrics.drift import Drift
from loadgen.results.manifest import Fingerprints, Host, TargetFacts
from loadgen.results.record import KINDS, SCHEMA_MINOR
from loadgen.server_metrics.series import Served
from loadgen.stats.quantiles import Distribution, Histogram, exact

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from loadgen.results.manifest import Header, Second, StagePlan

SCHEMA = 1


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Which run this is, how it was started, and by which program."""

    id: str
    name: str
    workload: str
    started: str
    ended: str
    state: str  # finished, interrupted (by the user), cut_off (no clean end: the summary covers what was recorded)
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


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the measurement can be trusted. This does not judge the SLO: a run that missed a limit can be valid."""

    valid: bool
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    limits: ValidityLimits


class StageSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One stage over its own window. Only rows of this stage count, except for requests in flight (all rows)."""

    name: str
    arrival: str
    measured: bool
    concurrency: int | None
    ramp_s: float | None = None  # the lanes of a closed loop begin spread over it; 0: in one instant
    ramp_from: str = ""  # asked, probe, preset, or stage: lanes are taken over; "": not known
    window: Window
    requests: RequestCounts
    load: Load
    tokens: Tokens
    ttft_ms: Distribution
    tpot_ms: Distribution
    inter_chunk_ms: Distribution
    e2e_ms: Distribution
    goodput: Goodput


class TargetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One of several targets: its measured requests, over the window of the whole run."""

    target: TargetFacts
    requests: RequestCounts
    bytes: Bytes
    load: Load
    tokens: Tokens
    ttft_ms: Distribution
    tpot_ms: Distribution
    e2e_ms: Distribution
    goodput: Goodput
    own_output_per_s: float | None = None  # over this target's own window: its first due instant to its last token


class RackTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens/s of several targets by two definitions, which differ when the targets do not end together.

    `sum_of_rates_per_s` adds each target's rate over its own window, as published rack totals do. `single_clock_per_s`
    treats the targets as one system: all tokens divided by the duration of the whole run. The other fields describe the
    rates of the single targets.
    """

    targets: int
    sum_of_rates_per_s: float
    single_clock_per_s: float | None
    min_per_s: float
    mean_per_s: float
    median_per_s: float
    max_per_s: float
    spread: float  # (max - min) / median


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `summary.json`. Only measured stages count, unless a name says otherwise (`warmup`,
    `window.whole`).
    """

    schema: int
    schema_minor: int = 0  # record.SCHEMA_MINOR of the version that made it
    run: RunFacts
    target: TargetFacts
    rtt_ms: float | None
    window: Window
    bytes: Bytes
    fingerprints: Fingerprints
    verdict: Verdict
    requests: RequestCounts
    warmup: RequestCounts
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
    sessions: Sessions | None  # null when no request belongs to a conversation
    client: ClientUse
    stages: tuple[StageSummary, ...]
    targets: tuple[TargetSummary, ...]  # empty with a single target
    rack: RackTokens | None = None  # null with a single target
    drift: Drift = Drift()
    server: Served | None = None  # what the servers counted; null when no metrics page was read
    kept: str = "raw"  # which rows were kept: raw (all), sample, histogram (none)


def summarize(
    header: Header,
    rows: NDArray[np.void],
    gaps: Sequence[Histogram] = (),
    timeline: Sequence[NDArray[np.int64]] = (),
    seconds: Sequence[Second] = (),
    texts: Sequence[str] = (),
) -> Summary:
    """Compute the summary of a run.

    rows: `record.ROW` of all workers, in any order. gaps: per stage, a histogram of the gaps between output events.
    timeline: per stage, counts of output events in bins of `BIN_NS` from the start of the run. seconds: the samples
    that each worker takes of itself. texts: error texts, indexed by `rows["text"]`.
    """
    measured_stages = np.array([stage.measured for stage in header.stages] or [True])
    is_measured = measured_stages[rows["stage"]]
    many_targets = len(header.targets) > 1  # then every target reads every column: keep them all
    measured, warmup = (
        Columns(rows, is_measured, keep_all=many_targets),
        Columns(rows, ~is_measured, keep_all=many_targets),
    )
    everything = (measured, warmup)
    unrecorded = _unrecorded(header.stages, rows)
    missing = int(unrecorded[measured_stages].sum())
    first_measured = int(np.argmax(measured_stages))
    earlier = Columns(warmup, warmup["stage"] < first_measured)
    last_measured = len(measured_stages) - 1 - int(np.argmax(measured_stages[::-1]))
    full = _full_load(header, first_measured, last_measured, measured, earlier)
    inside = metrics.window(measured, everything, full)
    own_timeline = [counts for i, counts in enumerate(timeline) if i < len(measured_stages) and measured_stages[i]]
    pooled = pooled_of(gaps[i] for i in range(min(len(gaps), len(measured_stages))) if measured_stages[i])
    requests = blocks.requests(measured, texts, missing)
    arrivals = [stage.arrival for stage in header.stages if stage.measured and stage.arrival]
    load = _load(measured, everything, inside, header, ", then ".join(arrivals))
    tokens = blocks.tokens(measured, everything, inside, metrics.steady_events(own_timeline, inside.steady))
    targets = tuple(_targets(header, everything, inside, texts))
    goodput = metrics.goodput(measured, header.slo, inside, pooled, missing)
    ok = measured.where(OK)
    sent = measured["sent_ns"] >= 0
    inter_chunk = pooled.distribution()
    itl_absent = blocks.itl_absent(measured, inter_chunk)
    summary = Summary(
        schema=SCHEMA,
        schema_minor=SCHEMA_MINOR,
        run=run_of(header),
        target=whole_target(header.targets),
        rtt_ms=header.rtt_ms,
        window=inside,
        bytes=blocks.bytes(measured),
        fingerprints=header.fingerprints,
        verdict=Verdict(valid=True, reasons=(), warnings=(), limits=header.limits),
        requests=requests,
        warmup=blocks.requests(warmup, texts, int(unrecorded[~measured_stages].sum())),
        load=load,
        tokens=tokens,
        ttft_ms=_distribution(measured, "ttft", ok),
        ttft_from_sent_ms=_distribution(measured, "ttft_from_sent", ok),
        first_answer_ms=_distribution(measured, "first_answer", ok),
        tpot_ms=_distribution(measured, "tpot", ok),
        tpot_undefined=int((measured.measure("tpot")[ok] == metrics.UNDEFINED).sum()),
        tpot_mlperf_ms=_distribution(measured, "tpot_mlperf", ok),
        inter_chunk_ms=inter_chunk,
        itl_ms=None if itl_absent else inter_chunk,
        itl_absent=itl_absent,
        e2e_ms=_distribution(measured, "e2e", ok),
        max_gap_ms=_distribution(measured, "max_gap", ok),
        stalls=blocks.stalls(measured),
        connect_ms=_distribution(measured, "connect", sent),
        send_lag_ms=_distribution(measured, "send_lag", sent),
        client_lag_ms=_distribution(measured, "client_lag", sent),
        stamp_error_ms=_distribution(measured, "stamp_error", sent),
        goodput=goodput,
        sessions=blocks.sessions(measured, inside, header.turns),
        client=blocks.client(measured, seconds, inside, header.workers),
        stages=(),
        targets=targets,
        rack=rack_of(targets, tokens.output_per_s),
        drift=drift.of_rows(measured, inside.steady, blocks.tokens_over_time(measured, own_timeline)),
    )
    stages = tuple(_stages(header, rows, everything, gaps, timeline, texts, unrecorded, summary))
    return judged(header, msgspec.structs.replace(summary, stages=stages), _verdict_inputs(header, measured), seconds)


def exit_code(summary: Summary) -> int:
    """The exit code of the process: 130 interrupted, else 3 not valid, else 1 SLO missed, else 0."""
    return validity.exit_code(
        interrupted=summary.run.state == "interrupted", valid=summary.verdict.valid, slo_met=summary.goodput.met
    )


def _distribution(columns: Columns, metric: str, selected: NDArray[np.bool_]) -> Distribution:
    values = columns.measure(metric)
    return exact(values[selected & (values != metrics.UNDEFINED)], own=True)


def pooled_of(histograms: Iterator[Histogram]) -> Histogram:
    """The gaps of several stages in one histogram."""
    pooled = Histogram()
    for histogram in histograms:
        pooled.merge(histogram)
    return pooled


_T = TypeVar("_T")


def _common_value(values: Sequence[_T], fallback: _T) -> _T:
    return values[0] if all(value == values[0] for value in values) else fallback


def whole_target(targets: Sequence[TargetFacts]) -> TargetFacts:
    """All targets described as one: the values they have in common, and the sum of their GPUs."""
    if not targets:
        return TargetFacts()
    if len(targets) == 1:
        return targets[0]
    gpus = [target.gpus for target in targets if target.gpus is not None]
    return TargetFacts(
        name=f"{len(targets)} targets",
        gpus=sum(gpus) if len(gpus) == len(targets) else None,
        simulated=any(target.simulated for target in targets),
        url=_common_value([target.url for target in targets], ""),
        server=_common_value([target.server for target in targets], ""),
        model=_common_value([target.model for target in targets], ""),
        shape=_common_value([target.shape for target in targets], ""),
        region=_common_value([target.region for target in targets], ""),
    )


def run_of(header: Header) -> RunFacts:
    """The block `run` of the summary."""
    return RunFacts(
        id=header.run,
        name=header.name,
        workload=header.workload,
        started=header.started,
        ended=header.ended,
        state="cut_off" if header.state == "running" else header.state,
        version=header.version,
        command=header.command,
        seed=header.seed,
        schedule_seed=header.schedule_seed,
        client=header.client,
        api=header.api,
        stream=header.stream,
        tokenizer=header.tokenizer,
        tokenizer_tag=header.tokenizer_tag,
        host=header.host,
    )


def _unrecorded(stages: Sequence[StagePlan], rows: NDArray[np.void]) -> NDArray[np.int64]:
    """Per stage, the number of planned slots that have no row: what a run that was cut off has lost."""
    recorded = np.bincount(rows["stage"], minlength=max(len(stages), 1))
    planned = np.array([-1 if stage.slots is None else stage.slots for stage in stages] or [-1])
    return np.maximum(planned - recorded, 0)


def _load(measured: Columns, everything: Sequence[Columns], inside: Window, header: Header, arrival: str) -> Load:
    closed = np.array([stage.closed for stage in header.stages] or [False])
    return metrics.load(measured, everything, inside, closed, arrival)


def _full_load(header: Header, first: int, last: int, own: Columns, earlier: Columns) -> metrics.FullLoad:
    """When the load of the stages from `first` to `last`, and nothing else, is in flight."""
    if not header.stages:
        return metrics.FullLoad()
    start_ns, end_ns = metrics.full_load(
        Columns(own, own["stage"] == first), earlier, header.stages[first], header.turns
    )
    if last != first:
        of_last = Columns(own, own["stage"] == last)
        end_ns = metrics.full_load(of_last, Columns(own, own["stage"] < 0), header.stages[last], header.turns).end_ns
    return metrics.FullLoad(start_ns, end_ns)


def _stages(
    header: Header,
    rows: NDArray[np.void],
    everything: tuple[Columns, Columns],
    gaps: Sequence[Histogram],
    timeline: Sequence[NDArray[np.int64]],
    texts: Sequence[str],
    unrecorded: NDArray[np.int64],
    summary: Summary,
) -> Iterator[StageSummary]:
    for i, stage in enumerate(header.stages):
        # the columns of all stages of this kind: measured, or not measured
        same_kind = everything[0 if stage.measured else 1]
        only_of_kind = sum(other.measured == stage.measured for other in header.stages) == 1
        if only_of_kind and stage.measured:
            yield _only_measured_stage(stage, same_kind, summary)
            continue
        columns = same_kind if only_of_kind else Columns(same_kind, same_kind["stage"] == i)
        earlier = Columns(rows, rows["stage"] < i)
        inside = metrics.window(columns, [columns], _full_load(header, i, i, columns, earlier))
        pooled = gaps[i] if i < len(gaps) else Histogram()
        ok = columns.where(OK)
        missing = int(unrecorded[i])
        yield StageSummary(
            name=stage.name,
            arrival=stage.arrival,
            measured=stage.measured,
            concurrency=stage.concurrency,
            ramp_s=stage.ramp_s,
            ramp_from=stage.ramp_from,
            window=inside,
            requests=blocks.requests(columns, texts, missing),
            load=_load(columns, everything, inside, header, stage.arrival),
            tokens=blocks.tokens(
                columns, everything, inside, metrics.steady_events(timeline[i : i + 1], inside.steady)
            ),
            ttft_ms=_distribution(columns, "ttft", ok),
            tpot_ms=_distribution(columns, "tpot", ok),
            inter_chunk_ms=pooled.distribution(),
            e2e_ms=_distribution(columns, "e2e", ok),
            goodput=metrics.goodput(columns, header.slo, inside, pooled, missing),
        )


def _only_measured_stage(stage: StagePlan, measured: Columns, summary: Summary) -> StageSummary:
    """The single measured stage. Its figures equal those of the summary, so they are copied.

    Only `window.whole` differs: the stage's own does not include the warm-up before it.
    """
    whole = metrics.span(0, int(measured["done_ns"].max(initial=-1)))
    token_block, rate = summary.tokens, summary.tokens.whole_output_per_s
    if rate is not None and whole.duration_s and summary.window.whole.duration_s:
        rate = rate * summary.window.whole.duration_s / whole.duration_s
    return StageSummary(
        name=stage.name,
        arrival=stage.arrival,
        measured=True,
        concurrency=stage.concurrency,
        ramp_s=stage.ramp_s,
        ramp_from=stage.ramp_from,
        window=msgspec.structs.replace(summary.window, whole=whole),
        requests=summary.requests,
        load=msgspec.structs.replace(summary.load, arrival=stage.arrival),
        tokens=msgspec.structs.replace(token_block, whole_output_per_s=rate),
        ttft_ms=summary.ttft_ms,
        tpot_ms=summary.tpot_ms,
        inter_chunk_ms=summary.inter_chunk_ms,
        e2e_ms=summary.e2e_ms,
        goodput=summary.goodput,
    )


def _targets(
    header: Header, everything: tuple[Columns, Columns], inside: Window, texts: Sequence[str]
) -> Iterator[TargetSummary]:
    if len(header.targets) < 2:
        return
    for i, target in enumerate(header.targets):
        target_parts = [Columns(columns_of_kind, columns_of_kind["target"] == i) for columns_of_kind in everything]
        columns = target_parts[0]
        ok = columns.where(OK)
        yield TargetSummary(
            target=target,
            requests=blocks.requests(columns, texts, 0),
            bytes=blocks.bytes(columns),
            load=_load(columns, target_parts, inside, header, ""),
            tokens=blocks.tokens(columns, target_parts, inside, None),
            ttft_ms=_distribution(columns, "ttft", ok),
            tpot_ms=_distribution(columns, "tpot", ok),
            e2e_ms=_distribution(columns, "e2e", ok),
            goodput=metrics.goodput(columns, header.slo, inside, Histogram()),
            own_output_per_s=blocks.tokens(
                columns, target_parts, metrics.window(columns, target_parts), None
            ).output_per_s,
        )


def rack_of(targets: Sequence[TargetSummary], single_clock_per_s: float | None) -> RackTokens | None:
    """The block `rack`; None for a single target."""
    rates = [target.own_output_per_s or 0.0 for target in targets]
    if not rates:
        return None
    median = statistics.median(rates)
    return RackTokens(
        targets=len(rates),
        sum_of_rates_per_s=sum(rates),
        single_clock_per_s=single_clock_per_s,
        min_per_s=min(rates),
        mean_per_s=statistics.fmean(rates),
        median_per_s=median,
        max_per_s=max(rates),
        spread=(max(rates) - min(rates)) / median if median else 0.0,
    )


class Signs(NamedTuple):
    """What the verdict needs beside the summary."""

    dead_workers: list[int]
    unsaid: bool  # some ok request has a first event without a token count
    sends: int
    disagreement: float | None  # of prompt token counts: `blocks.prompt_disagreement`
    repeated: int


def _verdict_inputs(header: Header, measured: Columns) -> Signs:
    return Signs(
        np.unique(measured["worker"][measured["kind"] == KINDS.index("worker_died")]).tolist(),
        bool((measured.where(OK) & (measured["first_event_tokens"] == 0)).any()),
        int((measured["sent_ns"] >= 0).sum()),
        blocks.prompt_disagreement(measured, header.template_tokens),
        blocks.repeated(measured),
    )


def judged(header: Header, summary: Summary, signs: Signs, seconds: Sequence[Second]) -> Summary:
    """The summary with its verdict filled in."""
    requests, tokens = summary.requests, summary.tokens
    reasons = validity.reasons(
        header.limits,
        ttft=summary.ttft_ms,
        e2e=summary.e2e_ms,
        send_lag=summary.send_lag_ms,
        stamp_error=summary.stamp_error_ms,
        busiest=validity.busiest(seconds, summary.window),
        most_waited=validity.most_waited(seconds, summary.window),
        counted=requests.scheduled - requests.cancelled,
        ok=requests.ok,
        unsound=requests.failed + requests.lost,
        dead_workers=signs.dead_workers,
    )
    sources = tokens.sources
    bundled = bool(summary.itl_absent) and tokens.per_event is not None and tokens.per_event > 1
    warnings = (
        *header.notes,
        *([_CUT_OFF] if summary.run.state == "cut_off" else []),
        *validity.changed(header.limits),
        *validity.count_warnings(
            ok=requests.ok,
            without_usage=requests.ok - sources.output.get("server", 0) if header.usage_asked else 0,
            estimates=max(sources.input.get("estimate", 0), sources.output.get("estimate", 0)),
            disagreement=signs.disagreement,
            template_known=header.template_tokens is not None,
            cached_share=tokens.cached_share,
            shares_prompts=header.shares_prompts,
            mismatch_share=tokens.length_mismatch_share,
            unknown_first=bundled and signs.unsaid,
            repeated=signs.repeated,
        ),
        *validity.slo_warnings(summary.goodput),
        *validity.gap_warning(summary.load, signs.sends - 1),
        *validity.steady_warning(summary.window, summary.load, signs.sends, _most_lanes(header)),
    )
    invalid_reasons = (*reasons, *([_STOPPED] if summary.run.state == "stopped" else []))
    verdict = Verdict(valid=not invalid_reasons, reasons=invalid_reasons, warnings=warnings, limits=header.limits)
    return msgspec.structs.replace(summary, verdict=verdict)


def _most_lanes(header: Header) -> int:
    return max((stage.concurrency or 0 for stage in header.stages if stage.measured), default=0)


_STOPPED = "the run ended early, as asked for when a target stops answering (--on-target-failure stop)"
_CUT_OFF = "the run has no clean end (still running, or killed): this is as far as its records go"
