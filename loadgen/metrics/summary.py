"""The types of `summary.json`, and `summarize`, the function that computes a summary from the rows of a run.

Pure numpy. `docs/summary.md` defines every field; a test compares that page with these types. `schema` grows when a
field changes its meaning or is removed, not when a field is added.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from loadgen.metrics import blocks, drift, sustainable, validity
from loadgen.metrics import columns as metrics
from loadgen.metrics.blocks import Bytes, ClientUse, RequestCounts, Sessions, Stalls, Tokens
from loadgen.metrics.columns import OK, Columns, Goodput, Load, Window
from loadgen.metrics.drift import Drift
from loadgen.metrics.sustainable import Sustainable
from loadgen.metrics.validity import Families, Signs, Verdict
from loadgen.results.manifest import Fingerprints, Host, TargetFacts
from loadgen.results.record import KINDS, SCHEMA_MINOR
from loadgen.server_metrics.series import Served
from loadgen.stats.quantiles import Distribution, Histogram, exact

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
    state: str  # finished, interrupted (by the user), stopped, decided (by a search), cut_off (no clean end)
    version: str
    command: tuple[str, ...]
    metadata: dict[str, str] = {}
    seed: int | None
    schedule_seed: int | None
    salt: str = ""  # "": not known
    client: str
    api: str
    stream: bool
    tokenizer: str
    tokenizer_tag: str
    tokenizer_sha256: str = ""  # of the tokenizer file; "": the packaged vocabulary, or not known
    host: Host


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
    unsound: dict[str, str] = {}  # metric -> why its figures are null though there are samples: unsure arrival times
    e2e_ms: Distribution
    max_gap_ms: Distribution
    stalls: Stalls
    connect_ms: Distribution
    send_lag_ms: Distribution
    client_lag_ms: Distribution
    stamp_error_ms: Distribution
    event_error_ms: Distribution = Distribution()  # stamp error of every output event; empty in older runs
    event_unsure_share: float | None = None  # of output events: came with later ones in one read
    tpot_error_ms: Distribution = Distribution()  # (first + last stamp error) / (n - n1); empty in older runs
    max_gap_error_ms: Distribution = Distribution()  # of the stamp at the end of a request's largest gap
    goodput: Goodput
    sessions: Sessions | None  # null when no request belongs to a conversation
    client: ClientUse
    stages: tuple[StageSummary, ...]
    targets: tuple[TargetSummary, ...]  # empty with a single target
    regions: tuple[TargetSummary, ...] = ()  # one each, where the targets are in several
    rack: RackTokens | None = None  # null with a single target
    drift: Drift = Drift()
    sustainable: Sustainable = Sustainable()
    server: Served | None = None  # what the servers counted; null when no metrics page was read
    kept: str = "raw"  # which rows were kept: raw (all), sample, histogram (none)


def summarize(
    header: Header,
    rows: NDArray[np.void],
    gaps: Sequence[Histogram] = (),
    timeline: Sequence[NDArray[np.int64]] = (),
    seconds: Sequence[Second] = (),
    texts: Sequence[str] = (),
    event_errors: Sequence[Histogram] = (),
) -> Summary:
    """Compute the summary of a run.

    rows: `record.ROW` of all workers, in any order. gaps: per stage, a histogram of the gaps between output events.
    timeline: per stage, counts of output events in bins of `BIN_NS` from the start of the run. seconds: the samples
    that each worker takes of itself. texts: error texts, indexed by `rows["text"]`. event_errors: per stage, a
    histogram of the stamp errors of output events; empty when not known.
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
    target = whole_target(header.targets)
    tokens = blocks.tokens(measured, everything, inside, metrics.steady_events(own_timeline, inside.steady))
    tokens = blocks.with_gpus(tokens, target.gpus)
    ok = measured.where(OK)
    sent = measured["sent_ns"] >= 0
    errors = pooled_of(
        event_errors[i] for i in range(min(len(event_errors), len(measured_stages))) if measured_stages[i]
    )
    families = Families(
        inter_chunk=pooled.distribution(),
        event_error=errors.distribution(),
        unsure_share=unsure_share(errors),
        tpot=_distribution(measured, "tpot", ok),
        tpot_error=_distribution(measured, "tpot_error", ok),
        max_gap=_distribution(measured, "max_gap", ok),
        max_gap_error=_distribution(measured, "max_gap_error", ok),
    )
    unsound = validity.withheld(header.limits, families, seconds, inside)
    itl_absent = blocks.itl_absent(measured, families.inter_chunk)
    undecided = slo_undecided(unsound, itl_absent)
    targets = tuple(_targets(header, everything, inside, texts, undecided))
    goodput = metrics.goodput(measured, header.slo, inside, pooled, missing, undecided)
    summary = Summary(
        schema=SCHEMA,
        schema_minor=SCHEMA_MINOR,
        run=run_of(header),
        target=target,
        rtt_ms=header.rtt_ms,
        window=inside,
        bytes=blocks.bytes(measured),
        fingerprints=header.fingerprints,
        verdict=Verdict(valid=True, limits=header.limits),
        requests=requests,
        warmup=blocks.requests(warmup, texts, int(unrecorded[~measured_stages].sum())),
        load=load,
        tokens=tokens,
        ttft_ms=_distribution(measured, "ttft", ok),
        ttft_from_sent_ms=_distribution(measured, "ttft_from_sent", ok),
        first_answer_ms=_distribution(measured, "first_answer", ok),
        tpot_ms=families.tpot,
        tpot_undefined=int((measured.measure("tpot")[ok] == metrics.UNDEFINED).sum()),
        tpot_mlperf_ms=_distribution(measured, "tpot_mlperf", ok),
        inter_chunk_ms=families.inter_chunk,
        itl_ms=None if itl_absent else families.inter_chunk,
        itl_absent=itl_absent,
        unsound=unsound,
        e2e_ms=_distribution(measured, "e2e", ok),
        max_gap_ms=families.max_gap,
        stalls=blocks.stalls(measured),
        connect_ms=_distribution(measured, "connect", sent),
        send_lag_ms=_distribution(measured, "send_lag", sent),
        client_lag_ms=_distribution(measured, "client_lag", sent),
        stamp_error_ms=_distribution(measured, "stamp_error", sent),
        event_error_ms=families.event_error,
        event_unsure_share=families.unsure_share,
        tpot_error_ms=families.tpot_error,
        max_gap_error_ms=families.max_gap_error,
        goodput=goodput,
        sessions=blocks.sessions(measured, inside, header.turns),
        client=blocks.client(measured, seconds, inside, header.workers),
        stages=(),
        targets=targets,
        regions=tuple(_regions(header, everything, inside, texts, undecided)),
        rack=rack_of(targets, tokens.output_per_s),
        drift=drift.of_rows(measured, inside.steady, blocks.tokens_over_time(measured, own_timeline)),
        sustainable=sustainable.of_rows(measured, everything, inside, header),
    )
    stages = tuple(_stages(header, rows, everything, gaps, timeline, texts, unrecorded, summary, undecided))
    summary = withhold(msgspec.structs.replace(summary, stages=stages))
    return judged(header, summary, _verdict_inputs(header, measured, everything), seconds)


def exit_code(summary: Summary, *, strict: bool = False) -> int:
    """The exit code of the process: 130 interrupted, else 3 not valid, else 1 SLO missed, else 0.

    `strict`: an SLO that the run cannot decide is 3.
    """
    return validity.exit_code(
        interrupted=summary.run.state == "interrupted",
        valid=summary.verdict.valid,
        slo_met=summary.goodput.met,
        undecided=summary.goodput.undecided,
        strict=strict,
    )


def unsure_share(errors: Histogram) -> float | None:
    """The share of output events with a stamp error; None when the errors are not known."""
    return 1 - int(errors.counts[0]) / errors.count if errors.count else None


def slo_undecided(unsound: Mapping[str, str], itl_absent: str) -> dict[str, str]:
    """Metrics on which no SLO term can be decided -> why."""
    return {**({"itl": f"there is no ITL: {itl_absent}"} if itl_absent else {}), **unsound}


def withhold(summary: Summary) -> Summary:
    """The summary without the figures of its `unsound` metrics, whole and by stage, target and time."""
    unsound = summary.unsound
    if not unsound:
        return summary
    fields = {f"{metric}_ms" for metric in unsound}

    def without(part: Any) -> dict[str, Any]:
        values = {name: getattr(part, name) for name in part.__struct_fields__ if name in fields}
        return {name: value.withheld() for name, value in values.items() if isinstance(value, Distribution)}

    changes: dict[str, Any] = without(summary)
    if "itl" in unsound:
        changes |= {"itl_ms": None, "itl_absent": summary.itl_absent or unsound["itl"]}
    if "stalls" in unsound:
        changes["stalls"] = msgspec.structs.replace(summary.stalls, requests=None, share=None)
    if "tpot" in unsound:
        changes["drift"] = drift.without_tpot(summary.drift)
    for name in ("stages", "targets"):
        changes[name] = tuple(msgspec.structs.replace(part, **without(part)) for part in getattr(summary, name))
    return msgspec.structs.replace(summary, **changes)


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
        version=_common_value([target.version for target in targets], ""),
        engine=_common_value([target.engine for target in targets], ""),
        precision=_common_value([target.precision for target in targets], ""),
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
        metadata=header.metadata,
        seed=header.seed,
        schedule_seed=header.schedule_seed,
        salt=header.salt if header.schema_minor else "",  # that of older versions cannot be given again
        client=header.client,
        api=header.api,
        stream=header.stream,
        tokenizer=header.tokenizer,
        tokenizer_tag=header.tokenizer_tag,
        tokenizer_sha256=header.tokenizer_sha256,
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
    undecided: Mapping[str, str],
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
            tokens=blocks.with_gpus(
                blocks.tokens(columns, everything, inside, metrics.steady_events(timeline[i : i + 1], inside.steady)),
                summary.target.gpus,
            ),
            ttft_ms=_distribution(columns, "ttft", ok),
            tpot_ms=_distribution(columns, "tpot", ok),
            inter_chunk_ms=pooled.distribution(),
            e2e_ms=_distribution(columns, "e2e", ok),
            goodput=metrics.goodput(columns, header.slo, inside, pooled, missing, undecided),
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
    header: Header,
    everything: tuple[Columns, Columns],
    inside: Window,
    texts: Sequence[str],
    undecided: Mapping[str, str],
) -> Iterator[TargetSummary]:
    if len(header.targets) < 2:
        return
    for i, target in enumerate(header.targets):
        yield _part_of(header, everything, inside, texts, target, [i], undecided)


def by_region(targets: Sequence[TargetFacts]) -> list[tuple[TargetFacts, list[int]]]:
    """Per region the facts and the numbers of its targets; [] unless they are in several. "" is a region not given."""
    numbers: dict[str, list[int]] = {}
    for i, target in enumerate(targets):
        numbers.setdefault(target.region, []).append(i)
    if len(numbers) < 2:
        return []
    return [(whole_target([targets[i] for i in own]), own) for own in numbers.values()]


def _regions(
    header: Header,
    everything: tuple[Columns, Columns],
    inside: Window,
    texts: Sequence[str],
    undecided: Mapping[str, str],
) -> Iterator[TargetSummary]:
    for region, own in by_region(header.targets):
        yield _part_of(header, everything, inside, texts, region, own, undecided)


def _part_of(
    header: Header,
    everything: tuple[Columns, Columns],
    inside: Window,
    texts: Sequence[str],
    target: TargetFacts,
    numbers: Sequence[int],
    undecided: Mapping[str, str],
) -> TargetSummary:
    """The figures of some of the targets: those with these numbers."""
    target_parts = [Columns(columns, np.isin(columns["target"], numbers)) for columns in everything]
    columns = target_parts[0]
    ok = columns.where(OK)
    return TargetSummary(
        target=target,
        requests=blocks.requests(columns, texts, 0),
        bytes=blocks.bytes(columns),
        load=_load(columns, target_parts, inside, header, ""),
        tokens=blocks.with_gpus(blocks.tokens(columns, target_parts, inside, None), target.gpus),
        ttft_ms=_distribution(columns, "ttft", ok),
        tpot_ms=_distribution(columns, "tpot", ok),
        e2e_ms=_distribution(columns, "e2e", ok),
        goodput=metrics.goodput(columns, header.slo, inside, Histogram(), 0, {**NO_GAPS_BY_TARGET, **undecided}),
        own_output_per_s=blocks.tokens(columns, target_parts, metrics.window(columns, target_parts), None).output_per_s,
    )


NO_GAPS_BY_TARGET = dict.fromkeys(metrics.POOLED, "gaps are counted for all targets together")
"""SLO terms that cannot be decided for one of several targets -> why."""


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


def _verdict_inputs(header: Header, measured: Columns, everything: Sequence[Columns]) -> Signs:
    died = [part["worker"][part["kind"] == KINDS.index("worker_died")] for part in everything]  # in a warm-up too
    return Signs(
        np.unique(np.concatenate(died)).tolist(),
        bool((measured.where(OK) & (measured["first_event_tokens"] == 0)).any()),
        int((measured["sent_ns"] >= 0).sum()),
        blocks.prompt_disagreement(measured, header.template_tokens),
        blocks.repeated(measured),
        *blocks.asked_and_got(measured),
    )


def judged(header: Header, summary: Summary, signs: Signs, seconds: Sequence[Second]) -> Summary:
    """The summary with its verdict filled in."""
    return msgspec.structs.replace(summary, verdict=validity.of(header, summary, signs, seconds))
