"""The types of `summary.json`, the part of a summary that the accumulator of a run gives, and the JSON text.

`measure` leaves out the sections of `core.analysis`; `core.run_summary` adds them and asks `judge` for the verdict.

Pure numpy. `docs/summary.md` defines every field; a test compares that page with these types. `schema` grows when a
field changes its meaning or is removed, not when a field is added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from loadgen.core import errors as codes
from loadgen.core import format
from loadgen.core.metrics import blocks, drift, guards, machines, steps, sustainable, validity
from loadgen.core.metrics.accumulator import (
    REMARK_PREFIX,
    Accumulator,
    MeasuredAndWarmup,
    MetricAccumulator,
    sampled,
)
from loadgen.core.metrics.blocks import Bytes, ClientUse, RequestCounts, Sessions, Stalls, Tokens
from loadgen.core.metrics.drift import Drift
from loadgen.core.metrics.goodput import Goodput, of_classes, unjudged, with_tasks
from loadgen.core.metrics.guards import STATISTICS, WithheldStatistics
from loadgen.core.metrics.load import Load
from loadgen.core.metrics.machines import MachineSummary
from loadgen.core.metrics.parts import (
    ClassSummary,
    ModelSummary,
    Parts,
    RackTokens,
    StageSummary,
    StepSummary,
    TargetSummary,
    rack_of,
    shared,
    whole_target,
)
from loadgen.core.metrics.sections import (
    BetweenNodes,
    Explanation,
    Fairness,
    Recovery,
    SlowRequest,
    Speculation,
    Splits,
    StimulusCheck,
)
from loadgen.core.metrics.sustainable import Sustainable
from loadgen.core.metrics.validity import LatenessScale, Verdict, VerdictInputs
from loadgen.core.metrics.windows import Span, Window
from loadgen.core.results.manifest import (
    ChunkReuse,
    Fingerprints,
    Host,
    StagePlan,
    TargetFacts,
    decoded,
    interchangeable,
)
from loadgen.core.server_metrics import hardware
from loadgen.core.server_metrics.energy import EnergyUse
from loadgen.core.server_metrics.hardware import SeenHardware
from loadgen.core.server_metrics.series import Served
from loadgen.core.slo import not_here
from loadgen.core.stats import quantiles
from loadgen.core.stats.intervals import Interval
from loadgen.core.stats.quantiles import Distribution, Histogram, asked, pooled
from loadgen.figures import FIGURES, pooled_figures

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from loadgen.core.results.manifest import RunManifest, WorkerSample
    from loadgen.core.server_metrics.series import MetricSample

SCHEMA = 1
_FROM_HEADER = ("rtt_ms", "dns_ms", "cache_reset", "chunks", "cache_asked", "cache_bound")


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


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `summary.json`. Only measured stages count, unless a name says otherwise (`warmup`,
    `window.whole`).
    """

    schema: int
    run: RunFacts
    target: TargetFacts
    rtt_ms: float | None
    dns_ms: float | None = (
        None  # names are looked up once, before the load; null: addresses, or not known
    )
    window: Window
    bytes: Bytes
    fingerprints: Fingerprints
    verdict: Verdict
    stimulus: tuple[StimulusCheck, ...] = ()  # whether the load delivered is the load asked for
    requests: RequestCounts
    warmup: RequestCounts
    load: Load
    tokens: Tokens
    ttft_ms: Distribution
    ttft_from_sent_ms: Distribution
    first_answer_ms: Distribution
    tpot_ms: Distribution
    tpot_undefined: int  # ok requests without a TPOT: too short, or without a span
    tpot_no_span: int = 0  # of these, with tokens enough, that all came at one instant
    tpot_no_output: int = 0  # of these, with tokens enough, and not one event with output
    tpot_mlperf_ms: Distribution
    inter_chunk_ms: Distribution
    itl_ms: Distribution | None
    itl_absent: str  # why itl_ms is null, in words
    unsound: dict[str, str] = {}  # metric -> why all its statistics are null despite its samples
    withheld: dict[str, WithheldStatistics] = {}  # metric -> statistics that are too uncertain
    e2e_ms: Distribution
    max_gap_ms: Distribution
    stalls: Stalls
    connect_ms: Distribution
    send_lag_ms: Distribution
    client_lag_ms: Distribution
    stamp_error_ms: Distribution
    event_error_ms: Distribution = Distribution()  # stamp error of every output event
    event_unsure_share: float | None = None  # of output events: came with later ones in one read
    tpot_error_ms: Distribution = Distribution()  # (first + last stamp error) / (n - n1)
    max_gap_error_ms: Distribution = (
        Distribution()
    )  # of the stamp at the end of a request's largest gap
    goodput: Goodput
    sessions: Sessions | None  # null when no request belongs to a conversation
    client: ClientUse
    stages: tuple[StageSummary, ...]
    targets: tuple[TargetSummary, ...]  # empty with a single target
    regions: tuple[TargetSummary, ...] = ()  # one each, where the targets are in several
    nodes: tuple[TargetSummary, ...] = ()  # one each, where targets name the node that they are on
    rack: RackTokens | None = None  # null with a single target
    between: BetweenNodes = BetweenNodes()
    hardware: SeenHardware | None = (
        None  # accelerators, driver, power limit that metrics pages name; null: none read
    )
    classes: tuple[ClassSummary, ...] = ()  # empty where all requests are of one kind
    fairness: Fairness | None = None  # over tenants; null: there are no two
    models: tuple[ModelSummary, ...] = ()  # empty where classes do not ask for several
    steps: tuple[
        StepSummary, ...
    ] = ()  # of tasks; empty where there are none, or their numbers of requests are drawn
    cache_reset: bool = False  # the servers' prefix caches were emptied before the load
    chunks: ChunkReuse | None = (
        None  # what prompts with retrieved chunks share; null: there are none
    )
    cache_asked: float | None = (
        None  # beside tokens.cached_share: what the workload asked for with `cache`
    )
    cache_bound: float | None = (
        None  # of a replayed trace: what a prefix cache without end would have known of it
    )
    drift: Drift = Drift()
    sustainable: Sustainable = Sustainable()
    recovery: tuple[Recovery, ...] = ()  # one for each spike, where there is an SLO
    speculation: Speculation | None = None  # null: nobody says that anything was drafted
    splits: Splits = Splits()
    slowest: tuple[SlowRequest, ...] = ()
    causes: Explanation = Explanation()
    server: Served | None = None  # what the servers counted; null when no metrics page was read
    energy: EnergyUse | None = None  # what the accelerators used; null when nothing says it
    figures: dict[
        str, Distribution
    ] = {}  # those that have no field of their own: newer ones, and of other packages
    machines: tuple[
        MachineSummary, ...
    ] = ()  # those that sent the load, or were lost; empty: one did
    within: dict[
        str, Interval
    ] = {}  # path of a figure -> its interval by blocks of time; empty: too short
    percentiles: dict[
        str, dict[str, float]
    ] = {}  # those that were asked for: field of a figure -> its name -> ms

    def withheld_reason(self, metric: str, statistic: str) -> str:
        """Return why a statistic of a metric (`p99`, `mean`) is withheld; "" if it is not."""
        if metric in self.unsound:
            return self.unsound[metric]
        found = self.withheld.get(metric)
        return found.why if found is not None and statistic in found.ranges else ""

    def metrics_without(self, statistic: str) -> set[str]:
        """Return the metrics of which a statistic is withheld."""
        partly = {name for name, found in self.withheld.items() if statistic in found.ranges}
        return set(self.unsound) | partly


class NamedSummary(NamedTuple):
    """The summary of a run, with the name of its directory in the result that it belongs to."""

    name: str
    summary: Summary


class MeasuredRun(NamedTuple):
    """What core computes of a run: its summary without the sections of `core.analysis` and without a verdict."""

    summary: Summary
    everything: MeasuredAndWarmup
    signs: VerdictInputs
    tokens_in: Callable[[Span], float | None]

    @property
    def measured(self) -> MetricAccumulator:
        """The accumulated requests of the measured stages."""
        return self.everything.measured


def measure(
    header: RunManifest,
    accumulator: Accumulator,
    gaps: Sequence[Histogram],
    timeline: Sequence[NDArray[np.int64]],
    seconds: Sequence[WorkerSample],
    event_errors: Sequence[Histogram],
    server_samples: Sequence[MetricSample],
    *,
    explained: bool,
) -> MeasuredRun:
    """Compute what core knows of a run. The arguments are those of `core.run_summary.summarize`."""
    plans, cells = header.stages or (StagePlan(),), accumulator.stages
    chosen = [i for i, plan in enumerate(plans) if plan.measured]
    everything = measured, warmup = MeasuredAndWarmup(
        accumulator.measured(), accumulator.measured(False)
    )
    full = blocks.full_load(cells, min(chosen, default=0), max(chosen, default=0))
    inside = blocks.window(measured, everything, full)
    unrecorded = _unrecorded(header, plans, cells, seconds)
    lost = sum(unrecorded[i] for i in chosen)
    own_gaps, errors = (pooled(of[i] for i in chosen if i < len(of)) for of in (gaps, event_errors))
    own_timeline = [timeline[i] for i in chosen if i < len(timeline)]
    target = whole_target(header.targets)
    samples = {name: measured.distribution(name) for name in sampled()}
    samples |= {"inter_chunk": own_gaps.distribution(), "event_error": errors.distribution()}
    unsure_share = 1 - int(errors.counts[0]) / errors.count if errors.count else None
    gap_bounds = guards.bound_gaps(measured.columns, own_gaps, errors)
    evidence = validity.TimingEvidence(
        unsure_share=unsure_share,
        is_read_at_once=validity.is_read_at_once(samples["client_lag"], samples["event_error"]),
        is_local=validity.is_local(header),
        seconds=seconds,
        window=inside,
    )
    shown = _statistics_shown(header, measured, samples, gap_bounds, evidence)
    scale = LatenessScale.of_samples(samples["ttft"], samples["e2e"])
    tokens_in = blocks.tokens_over_time(measured, own_timeline)
    arrival = ", then ".join(plans[i].arrival for i in chosen if plans[i].arrival)
    parts = Parts(header, shown.undecided(header), measured)
    whole = parts.figures(
        measured, everything, inside, arrival, own_timeline, target.gpus, own_gaps, lost
    )

    def of_stage(i: int) -> StageSummary:
        stage, cell = plans[i], cells[i]
        window = blocks.window(cell, [cell], blocks.full_load(cells, i, i))
        own, events = gaps[i] if i < len(gaps) else Histogram(), timeline[i : i + 1]
        if (
            cell is measured
        ):  # the only measured stage: but for `whole`, its windows are those of the run
            output_per_s = blocks.whole_output_per_s(everything, window)
            figures = {
                **whole,
                "tokens": msgspec.structs.replace(whole["tokens"], whole_output_per_s=output_per_s),
            }
        else:
            figures = parts.figures(
                cell, everything, window, stage.arrival, events, target.gpus, own, unrecorded[i]
            )
        facts = shared(stage, StageSummary)
        own_errors = event_errors[i] if i < len(event_errors) else Histogram()
        stage_gaps = guards.guard_gaps(cell.columns, own, own_errors, header.limits)
        return StageSummary(window=window, inter_chunk_ms=stage_gaps, **facts, **figures)

    step_times = steps.times(measured.columns, header)
    by_part = parts.by_part(accumulator, inside, step_times, target.model)
    tasks = blocks.sessions(measured, accumulator.count_cut_conversations(), inside)
    whole["goodput"] = with_tasks(whole["goodput"], tasks)
    if header.slo is None:
        whole["goodput"] = of_classes([part.goodput for part in by_part["classes"]])
    summary = Summary(
        schema=SCHEMA,
        run=_run_facts(header),
        target=target,
        window=inside,
        bytes=blocks.bytes(measured),
        fingerprints=header.fingerprints,
        verdict=Verdict(valid=True, limits=header.limits),
        warmup=blocks.requests(warmup, sum(unrecorded) - lost),
        tpot_undefined=measured.sum("tpot_undefined"),
        tpot_no_span=measured.sum("tpot_no_span") if header.stream else 0,
        tpot_no_output=measured.sum("tpot_no_output") if header.stream else 0,
        itl_ms=None if shown.itl_absent else shown.samples["inter_chunk"],
        itl_absent=shown.itl_absent,
        unsound=shown.unsound,
        withheld=shown.withheld,
        stalls=blocks.stalls(measured),
        event_unsure_share=unsure_share,
        sessions=tasks,
        client=blocks.client(measured, seconds, inside, header.workers),
        stages=tuple(of_stage(i) for i in range(len(header.stages))),
        hardware=hardware.of_samples(server_samples),
        rack=rack_of(by_part["targets"], whole["tokens"].output_per_s)
        if interchangeable(header.targets)
        else None,
        **{name: getattr(header, name) for name in _FROM_HEADER},
        drift=drift.of_blocks(drift.sample_blocks(measured.columns), inside.steady, tokens_in),
        sustainable=sustainable.of_rows(measured.columns, warmup.columns, inside, header)
        if explained
        else Sustainable(),
        **{
            **_of_figures(shown.samples),
            "percentiles": _asked_percentiles(
                header, measured, own_gaps, gap_bounds, shown.itl_absent
            ),
            **whole,
            **by_part,
        },
    )
    summary = withhold(summary)
    summary = msgspec.structs.replace(
        summary,
        machines=machines.of_cluster(header, inside, scale.p50_ms, measured.columns, seconds),
    )
    missed = parts.missed_without_dropped(accumulator, own_gaps, inside, lost)
    signs = _signs(
        everything, header, scale, missed=missed, is_counted="tokens" not in shown.unsound
    )
    return MeasuredRun(summary, everything, signs, tokens_in)


class ShownStatistics(NamedTuple):
    """The distributions of a run without what is withheld, and why it is withheld."""

    samples: dict[str, Distribution]
    itl_absent: str
    unsound: dict[str, str]
    withheld: dict[str, WithheldStatistics]

    def undecided(self, header: RunManifest) -> dict[str, str]:
        """Return the metrics on which no term of an SLO can be decided, with the reason."""
        no_itl = {"itl": f"there is no ITL: {self.itl_absent}"} if self.itl_absent else {}
        uncertain_gaps = {
            term.metric: "it is too uncertain to be reported"
            for slo in header.slos
            for term in slo.terms
            if term.metric in pooled_figures()
            and term.metric in self.withheld
            and quantiles.name(term.quantile) in self.withheld[term.metric].ranges
        }
        return no_itl | self.unsound | uncertain_gaps


def _statistics_shown(
    header: RunManifest,
    measured: MetricAccumulator,
    samples: Mapping[str, Distribution],
    gap_bounds: guards.GapBounds | None,
    evidence: validity.TimingEvidence,
) -> ShownStatistics:
    """Return the distributions without the statistics that are too uncertain, and the reasons."""
    unsound = validity.contradicted(measured) | not_here(header.slos)
    if header.stream:
        unsound |= validity.without_first_token(measured)
    if guards.are_stalls_uncertain(measured.columns, measured.sum("stalled"), header.limits):
        unsound["stalls"] = validity.why_times_are_uncertain(evidence)
    by_first_event = guards.limited_by_first_event(measured.columns, samples["tpot"], header.limits)
    withheld = validity.explain_withheld(
        guards.find_withheld(samples, measured.columns, gap_bounds, header.limits),
        by_first_event=by_first_event,
        evidence=evidence,
    )
    shown = {
        metric: sample.without(withheld[metric].ranges) if metric in withheld else sample
        for metric, sample in samples.items()
    }
    itl_absent = blocks.itl_absent(measured, samples["inter_chunk"])
    if "inter_chunk" in withheld and not itl_absent:
        withheld["itl"] = withheld["inter_chunk"]
    partly = {metric: found for metric, found in withheld.items() if metric not in unsound}
    return ShownStatistics(shown, itl_absent, unsound, partly)


def judge(
    header: RunManifest, run: MeasuredRun, summary: Summary, seconds: Sequence[WorkerSample]
) -> Summary:
    """Return the complete summary with its verdict, and as the verdict lets it be read."""
    verdict = validity.of(header, summary, run.signs, seconds)
    return by_verdict(msgspec.structs.replace(summary, verdict=verdict))


def _signs(
    everything: MeasuredAndWarmup,
    header: RunManifest,
    scale: LatenessScale,
    *,
    missed: bool,
    is_counted: bool,
) -> VerdictInputs:
    """Return what the verdict needs beside the summary.

    `missed`: whether the SLO is missed also without the requests that the client dropped. `is_counted`: whether tokens
    are counted, so that the requested tokens can be compared with those that came.
    """
    measured = everything.measured
    died = {
        name.removeprefix("dead_")
        for cell in everything
        for name in cell.sums
        if name.startswith("dead_")
    }
    return VerdictInputs(
        scale=scale,
        dead_workers=sorted(map(int, died)),
        sends=measured.sum("sent"),
        disagreement=blocks.prompt_disagreement(measured, header.template_tokens),
        repeated=blocks.repeated(measured),
        asked=measured.sum("asked") if is_counted else 0,
        asked_got=measured.sum("asked_got"),
        missed=missed,
        remarks=measured.sums_with_prefix(REMARK_PREFIX),
    )


def _of_figures(samples: Mapping[str, Distribution]) -> dict[str, Any]:
    """Return the fields of the metrics that have one, and the block `figures` of the others."""
    found = [(row, samples[row.name]) for row in FIGURES.here() if row.name in samples]
    own = {row.field: distribution for row, distribution in found if not row.block}
    return own | {"figures": {row.field: each for row, each in found if row.block}}


def _asked_percentiles(
    header: RunManifest,
    measured: MetricAccumulator,
    gaps: Histogram,
    gap_bounds: guards.GapBounds | None,
    itl_absent: str,
) -> dict[str, dict[str, float]]:
    """Return the percentiles that the user asked for, without those that are too uncertain."""
    found = {}
    for row in FIGURES.at("latency") if header.percentiles else ():
        if row.name == "itl" and itl_absent:
            continue
        is_gaps = row.sample == "gaps"
        sample = gaps if is_gaps else measured.sample(row.name)
        sample_bounds: guards.SampleBounds | None = gap_bounds
        if not is_gaps:
            sample_bounds = guards.bound_metric(measured.columns, row.name)
        shares = guards.certain_quantiles(sample, sample_bounds, row, header)
        found[row.field] = asked(sample, shares)
    return found


def _unrecorded(
    header: RunManifest,
    plans: Sequence[StagePlan],
    cells: Sequence[MetricAccumulator],
    seconds: Sequence[WorkerSample],
) -> list[int]:
    """Per stage, the slots without a row: of what was planned, or, of a run that was cut off, of what had been sent.

    What was due after the cut was never asked for. The samples that workers take of themselves say what was sent.
    """
    rows = [cell.sum("rows") for cell in cells]
    if header.state != "running":
        return [max(0, (plan.slots or 0) - count) for plan, count in zip(plans, rows, strict=True)]
    sent_by = {
        second.worker: second.sent for second in sorted(seconds, key=lambda second: second.t_s)
    }
    sent = sum(sent_by.values()) + sum(cell.sum("dropped") for cell in cells)
    last = max((i for i, count in enumerate(rows) if count), default=0)
    return [max(0, sent - sum(rows)) if i == last else 0 for i in range(len(rows))]


def by_verdict(summary: Summary) -> Summary:
    """Return the summary, and if its verdict is not valid, without the outcomes of its SLO."""
    if summary.verdict.valid:
        return summary
    parts = ("stages", "targets", "regions", "nodes", "classes", "models")
    changes = {name: tuple(unjudged(part) for part in getattr(summary, name)) for name in parts}
    summary = unjudged(summary)
    return msgspec.structs.replace(summary, **changes)


def exit_code(summary: Summary, *, strict: bool = False, reported: bool = False) -> int:
    """Return the exit code of a run: 130 interrupted, else 3 not valid, else 1 SLO missed, else 0.

    With `strict` an SLO that the run does not decide is 4, also where its percentile rests on too
    few samples to be supported.

    A run without an SLO ends with 1 if its error rate is above the limit `failure_share`.

    Args:
        summary: The run.
        strict: Whether an SLO that the run cannot decide is 4.
        reported: Whether this is the exit code of a report, which does not end with 130.
    """
    if summary.run.state == "interrupted" and not reported:
        return codes.INTERRUPTED
    if not summary.verdict.valid:
        return codes.UNSOUND
    if summary.goodput.met is False or fails_by_errors(summary):
        return codes.SLO_MISSED
    return codes.INCONCLUSIVE if strict and is_inconclusive(summary) else codes.OK


def is_inconclusive(summary: Summary) -> bool:
    """Return whether a run does not decide its SLO, or decides a term on too few samples.

    The terms of request classes with their own SLOs count too.
    """
    judged = [summary.goodput, *(part.goodput for part in summary.classes)]
    return summary.goodput.undecided or any(
        not term.supported for goodput in judged for term in goodput.slo
    )


def fails_by_errors(summary: Summary) -> bool:
    """Return True if a valid run has no SLO and an error rate above the limit `failure_share`."""
    has_slo = summary.goodput.has_slo or summary.goodput.met is not None
    return summary.verdict.valid and not has_slo and validity.has_high_error_rate(summary)


def withhold(summary: Summary) -> Summary:
    """Return the summary without its `unsound` metrics, also those of its parts."""
    summary = msgspec.structs.replace(summary, drift=_drift_shown(summary))
    unsound = summary.unsound
    if not unsound:
        return summary
    fields = {f"{metric}_ms" for metric in unsound}

    def without(part: Any) -> dict[str, Any]:
        values = {name: getattr(part, name) for name in part.__struct_fields__ if name in fields}
        changed: dict[str, Any] = {
            name: value.withheld()
            for name, value in values.items()
            if isinstance(value, Distribution)
        }
        if "tokens" in unsound:
            changed["tokens"] = blocks.without_output(part.tokens)
            changed |= {"own_output_per_s": None} if isinstance(part, TargetSummary) else {}
        return changed

    changes: dict[str, Any] = without(summary)
    changes["figures"] = summary.figures | {
        row.field: summary.figures[row.field].withheld()
        for row in FIGURES.here()
        if row.name in unsound and row.field in summary.figures
    }
    changes["percentiles"] = {
        name: asked_for for name, asked_for in summary.percentiles.items() if name not in fields
    }
    if "itl" in unsound:
        changes |= {"itl_ms": None, "itl_absent": summary.itl_absent or unsound["itl"]}
    if "stalls" in unsound:
        changes["stalls"] = msgspec.structs.replace(summary.stalls, requests=None, share=None)
    if "tokens" in unsound:
        changes["drift"] = drift.without_tokens(summary.drift)
        changes["rack"] = None
        if summary.sessions is not None:
            changes["sessions"] = msgspec.structs.replace(summary.sessions, output_tokens=None)
    for name in ("stages", "targets", "regions", "nodes", "classes", "models", "steps"):
        changes[name] = tuple(
            msgspec.structs.replace(part, **without(part)) for part in getattr(summary, name)
        )
    return msgspec.structs.replace(summary, **changes)


def _drift_shown(summary: Summary) -> Drift:
    """Return the drift of a run without the statistics that are withheld."""
    found = summary.drift
    for metric, withheld in summary.withheld.items():
        found = drift.without_statistics(found, metric, withheld.ranges)
    for metric in summary.unsound:
        found = drift.without_statistics(found, metric, STATISTICS)
    return found


def _run_facts(header: RunManifest) -> RunFacts:
    """The block `run` of the summary."""
    own = {"state": "cut_off" if header.state == "running" else header.state}
    return RunFacts(id=header.run, **shared(header, RunFacts) | own)


FILE = "summary.json"  # in the folder of a run


def dump_summary(summary: Summary) -> bytes:
    """The bytes of `summary.json`: UTF-8, indented by two, with a final newline. Unknown values are null, never left
    out.
    """
    return format.document(summary)


def load_summary(data: bytes, where: str = "summary.json") -> Summary:
    """The inverse of `dump_summary`. Fields that this version does not know are ignored.

    Raises UserError for data that is no summary, and for a summary of a newer schema.
    """
    hint = f"loadgen report {(at := where.rpartition('/')[0] or 'DIR')} --json > {at}/summary.json makes it again"
    return decoded(data, Summary, where, "a summary of a run", hint, schema=SCHEMA)
