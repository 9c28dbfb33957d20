"""Computes the part of a summary that follows from the accumulated records of a run.

Pure numpy. `core.run_summary` adds the sections of `core.analysis` and asks `apply_verdict` for the
verdict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from loadgen.core.metrics import drift, uncertainty, validity
from loadgen.core.metrics.accumulator import DEAD_WORKER_PREFIX, REMARK_PREFIX, sampled_metrics
from loadgen.core.metrics.client_use import summarize_client_use
from loadgen.core.metrics.goodput import combine_class_goodput, include_task_outcome
from loadgen.core.metrics.machines import summarize_machines
from loadgen.core.metrics.part_summaries import (
    PartSummarizer,
    Scope,
    StageSummary,
    SummaryParts,
    combine_targets,
    shared_fields,
    summarize_rack,
)
from loadgen.core.metrics.request_counts import (
    count_repeated_prompts,
    count_requests,
    count_stalls,
    total_bytes,
)
from loadgen.core.metrics.run_evidence import LatenessScale, RunEvidence, VerdictInputs
from loadgen.core.metrics.step_times import measure_step_times
from loadgen.core.metrics.summary import SCHEMA, RunFacts, Summary
from loadgen.core.metrics.sustainable import Sustainable, judge_load
from loadgen.core.metrics.task_summary import summarize_tasks
from loadgen.core.metrics.timing_evidence import TimingEvidence, is_local, is_read_promptly
from loadgen.core.metrics.token_usage import (
    output_tokens_over_time,
    prompt_count_difference,
    whole_output_per_s,
)
from loadgen.core.metrics.verdict import Verdict
from loadgen.core.metrics.windows import find_full_load_time, measure_window
from loadgen.core.metrics.withholding import (
    select_statistics,
    withhold_unsound_metrics,
    without_outcomes_if_invalid,
)
from loadgen.core.results.manifest import StagePlan, are_interchangeable
from loadgen.core.server_metrics import hardware
from loadgen.core.stats.histogram import Histogram, merge_histograms
from loadgen.core.stats.quantiles import quantiles_ms
from loadgen.figures import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from loadgen.core.metrics.accumulator import MetricAccumulator
    from loadgen.core.metrics.client_use import ClientUse
    from loadgen.core.metrics.goodput import Goodput
    from loadgen.core.metrics.machines import MachineSummary
    from loadgen.core.metrics.part_summaries import PartMetrics, RackTokens
    from loadgen.core.metrics.request_counts import RequestCounts
    from loadgen.core.metrics.run_accumulator import MeasuredAndWarmup, RunAccumulator
    from loadgen.core.metrics.task_summary import Sessions
    from loadgen.core.metrics.uncertainty import SampleBounds
    from loadgen.core.metrics.windows import Span, Window
    from loadgen.core.metrics.withholding import ShownStatistics
    from loadgen.core.results.manifest import RunManifest, WorkerSample
    from loadgen.core.server_metrics.series import MetricSample
    from loadgen.core.stats.quantiles import Distribution, Values
    from loadgen.figures import MetricDefinition

_FIELDS_OF_HEADER = (
    "rtt_ms",
    "dns_ms",
    "cache_reset",
    "chunks",
    "requested_cache_share",
    "trace_cache_share",
)


@dataclass(frozen=True)
class RunData:
    """What is stored of a run beside its records.

    Attributes:
        manifest: The manifest of the run.
        gaps: Per stage, a histogram of the gaps between output events.
        timeline: Per stage, counts of output events in bins of `BIN_NS` from the start of the run.
        worker_samples: The samples that each worker takes of itself.
        event_errors: Per stage, a histogram of the timestamp errors of output events. Empty if they
            are not known.
        server_samples: The samples of the metrics pages of the servers.
    """

    manifest: RunManifest
    gaps: Sequence[Histogram] = ()
    timeline: Sequence[NDArray[np.int64]] = ()
    worker_samples: Sequence[WorkerSample] = ()
    event_errors: Sequence[Histogram] = ()
    server_samples: Sequence[MetricSample] = ()

    @property
    def stage_plans(self) -> Sequence[StagePlan]:
        """The plans of the stages; a run without any has one stage, which is measured."""
        return self.manifest.stages or (StagePlan(),)

    def gaps_of_stage(self, stage: int) -> Histogram:
        """Return the gaps between output events of a stage."""
        return self.gaps[stage] if stage < len(self.gaps) else Histogram()

    def event_errors_of_stage(self, stage: int) -> Histogram:
        """Return the timestamp errors of the output events of a stage."""
        return self.event_errors[stage] if stage < len(self.event_errors) else Histogram()


class MeasuredRun(NamedTuple):
    """What core computes of a run.

    Attributes:
        summary: The summary without the sections of `core.analysis` and without a verdict.
        accumulated: The accumulated requests, of measured stages and of others.
        verdict_inputs: What the verdict needs beside the summary.
        tokens_in: Returns the measured output tokens that came in an interval.
    """

    summary: Summary
    accumulated: MeasuredAndWarmup
    verdict_inputs: VerdictInputs
    tokens_in: Callable[[Span], float | None]

    @property
    def measured(self) -> MetricAccumulator:
        """The accumulated requests of the measured stages."""
        return self.accumulated.measured


def measure_run(data: RunData, accumulator: RunAccumulator, *, explained: bool) -> MeasuredRun:
    """Compute all metrics of a run that follow from its accumulated records.

    `core.run_summary` adds the sections of `core.analysis`, such as causes of slow requests, and
    then calls `apply_verdict`.

    Args:
        data: What is stored of the run beside its records.
        accumulator: The accumulated records.
        explained: Whether to judge if the load was sustained. It takes time, and only a report
            that a person reads needs it.
    """
    measurement = _RunMeasurement(data, accumulator)
    return MeasuredRun(
        summary=measurement.summarize(explained=explained),
        accumulated=measurement.accumulated,
        verdict_inputs=measurement.verdict_inputs(),
        tokens_in=measurement.tokens_in,
    )


def apply_verdict(
    manifest: RunManifest, run: MeasuredRun, summary: Summary, samples: Sequence[WorkerSample]
) -> Summary:
    """Return the summary with the verdict of the run, without outcomes of SLOs if it is not valid.

    Args:
        manifest: The manifest of the run.
        run: The result of `measure_run`.
        summary: Its summary with all sections.
        samples: The samples that each worker took of itself.
    """
    verdict = validity.judge_run(RunEvidence(manifest, summary, run.verdict_inputs, samples))
    return without_outcomes_if_invalid(msgspec.structs.replace(summary, verdict=verdict))


class _RunMeasurement:
    """The measurement of one run, with what several of its sections need."""

    def __init__(self, data: RunData, accumulator: RunAccumulator) -> None:
        """Compute what several sections of the summary need, step by step.

        Each step uses the results of those before it: the measurement window, lost requests, gaps
        between events, distributions, the statistics that are certain enough to be shown, and the
        summarizer of stages, targets and classes.
        """
        self._data = data
        self._manifest = data.manifest
        self._accumulator = accumulator
        self.accumulated = accumulator.measured_and_warmup()
        self._measured = self.accumulated.measured
        self._measured_stages = [i for i, plan in enumerate(data.stage_plans) if plan.measured]
        self._window = self._measure_window()
        self._target = combine_targets(self._manifest.targets)
        self._unrecorded_of_stages = count_unrecorded(data, accumulator.stages)
        self._unrecorded = sum(self._unrecorded_of_stages[i] for i in self._measured_stages)
        self._combine_event_data()
        self._distributions = self._measure_distributions()
        self._scale = LatenessScale.of_samples(
            self._distributions["ttft"], self._distributions["e2e"]
        )
        self._shown = self._select_statistics()
        self._parts = PartSummarizer(
            self._manifest,
            accumulator,
            self._measured,
            undecidable_metrics=self._shown.undecided_metrics(self._manifest),
        )

    def _combine_event_data(self) -> None:
        """Set the attributes about output events, from the data of all measured stages.

        They are the gaps between events, the errors of their timestamps, the bounds of the gaps
        that follow from these errors, the timeline of events, and the function that tells how many
        tokens came in an interval.
        """
        data = self._data
        stages = self._measured_stages
        self._gaps = merge_histograms(data.gaps_of_stage(i) for i in stages)
        self._event_errors = merge_histograms(data.event_errors_of_stage(i) for i in stages)
        self._gap_bounds = uncertainty.bound_gaps(
            self._measured.columns, self._gaps, self._event_errors
        )
        self._timeline = [data.timeline[i] for i in stages if i < len(data.timeline)]
        self.tokens_in = output_tokens_over_time(self._measured, self._timeline)

    def _measure_window(self) -> Window:
        """Return the intervals that the rates of the measured stages are over."""
        first_stage = min(self._measured_stages, default=0)
        last_stage = max(self._measured_stages, default=0)
        full_load = find_full_load_time(self._accumulator.stages, first_stage, last_stage)
        return measure_window(self._measured, self.accumulated, full_load)

    def _measure_distributions(self) -> dict[str, Distribution]:
        """Return the distribution of each metric, before anything is withheld."""
        distributions = {name: self._measured.distribution(name) for name in sampled_metrics()}
        distributions["inter_chunk"] = self._gaps.distribution()
        distributions["event_error"] = self._event_errors.distribution()
        return distributions

    @property
    def _unsure_event_share(self) -> float | None:
        """The share of the output events with a timestamp error, None if it is not known."""
        errors = self._event_errors
        return 1 - int(errors.counts[0]) / errors.count if errors.count else None

    def _select_statistics(self) -> ShownStatistics:
        """Return the statistics that are certain enough to be shown."""
        evidence = TimingEvidence(
            unsure_share=self._unsure_event_share,
            # Without timestamps of the kernel, the receive delay is 0 and proves nothing.
            is_read_promptly=self._measured.sum("kernel_timestamps") > 0
            and is_read_promptly(
                self._distributions["client_lag"], self._distributions["event_error"]
            ),
            is_local=is_local(self._manifest),
            samples=self._data.worker_samples,
            window=self._window,
        )
        return select_statistics(
            self._manifest, self._measured, self._distributions, self._gap_bounds, evidence
        )

    def summarize(self, *, explained: bool) -> Summary:
        """Return the summary without the sections of `core.analysis`; its verdict is preliminary.

        Metrics that cannot be trusted are withheld from it.

        Args:
            explained: Whether to judge if the load was sustained.
        """
        manifest = self._manifest
        measured = self._measured
        shown = self._shown
        metrics = self._measure_all_stages()
        step_times = measure_step_times(measured.columns, manifest)
        parts = self._parts.summarize_all(self._window, step_times, self._target.model)
        tasks = summarize_tasks(measured, self._accumulator.count_cut_conversations(), self._window)
        summary = Summary(
            schema=SCHEMA,
            run=_run_facts(manifest),
            target=self._target,
            window=self._window,
            bytes=total_bytes(measured),
            fingerprints=manifest.fingerprints,
            verdict=Verdict(valid=True, limits=manifest.limits),
            requests=metrics.requests,
            warmup=self._count_warmup(),
            load=metrics.load,
            tokens=metrics.tokens,
            goodput=self._combine_goodput(metrics, parts, tasks),
            tpot_undefined=measured.sum("tpot_undefined"),
            tpot_no_span=measured.sum("tpot_no_span") if manifest.stream else 0,
            tpot_no_output=measured.sum("tpot_no_output") if manifest.stream else 0,
            itl_ms=None if shown.itl_absent else shown.distributions["inter_chunk"],
            itl_absent=shown.itl_absent,
            unsound=shown.unsound,
            withheld=shown.withheld,
            stalls=count_stalls(measured),
            event_unsure_share=self._unsure_event_share,
            sessions=tasks,
            client=self._summarize_client(),
            stages=self._summarize_stages(metrics),
            hardware=hardware.find_hardware(self._data.server_samples),
            rack=self._summarize_rack(parts, metrics),
            drift=self._measure_drift(),
            sustainable=self._judge_load() if explained else Sustainable(),
            percentiles=self._requested_percentiles(),
            machines=self._summarize_machines(),
            **{field: getattr(manifest, field) for field in _FIELDS_OF_HEADER},
            **parts._asdict(),
            **_metric_fields(shown.distributions),
        )
        return withhold_unsound_metrics(summary)

    def _summarize_client(self) -> ClientUse:
        """Return the CPU time and the memory that the workers used."""
        return summarize_client_use(
            self._measured, self._data.worker_samples, self._window, self._manifest.workers
        )

    def _summarize_stages(self, run_metrics: PartMetrics) -> tuple[StageSummary, ...]:
        """Return the summary of each stage, measured or not."""
        stage_count = len(self._manifest.stages)
        return tuple(self._summarize_stage(stage, run_metrics) for stage in range(stage_count))

    def _measure_all_stages(self) -> PartMetrics:
        """Return the metrics of all measured stages together, which are those of the run."""
        arrivals = [self._data.stage_plans[i].arrival for i in self._measured_stages]
        scope = Scope(
            self._window,
            self.accumulated,
            self._target.gpus,
            timeline=self._timeline,
            arrival=", then ".join(arrival for arrival in arrivals if arrival),
        )
        return self._parts.measure_stages(self._measured, scope, self._gaps, self._unrecorded)

    def _summarize_stage(self, stage: int, run_metrics: PartMetrics) -> StageSummary:
        """Return the summary of a stage over its own window.

        Args:
            stage: The index of the stage.
            run_metrics: The metrics of all measured stages together.
        """
        accumulator = self._accumulator.stages[stage]
        gaps = self._data.gaps_of_stage(stage)
        full_load = find_full_load_time(self._accumulator.stages, stage, stage)
        window = measure_window(accumulator, [accumulator], full_load)
        gap_bounds = uncertainty.bound_gaps(
            accumulator.columns, gaps, self._data.event_errors_of_stage(stage)
        )
        metrics = self._measure_stage(stage, window, run_metrics)
        return StageSummary(
            window=window,
            inter_chunk_ms=uncertainty.certain_gap_distribution(
                gaps, gap_bounds, self._manifest.limits
            ),
            **shared_fields(self._data.stage_plans[stage], StageSummary),
            **metrics._asdict(),
        )

    def _measure_stage(self, stage: int, window: Window, run_metrics: PartMetrics) -> PartMetrics:
        """Return the metrics of a stage over its window.

        Args:
            stage: The index of the stage.
            window: The window of the stage.
            run_metrics: The metrics of all measured stages together. They are those of the stage if
                it is the only measured one, and are then not computed again.
        """
        accumulator = self._accumulator.stages[stage]
        if accumulator is self._measured:
            # `window.whole` is the time of the whole run there, and that of the stage here.
            output_per_s = whole_output_per_s(self.accumulated, window)
            tokens = msgspec.structs.replace(run_metrics.tokens, whole_output_per_s=output_per_s)
            return run_metrics._replace(tokens=tokens)
        scope = Scope(
            window,
            self.accumulated,
            self._target.gpus,
            timeline=self._data.timeline[stage : stage + 1],
            arrival=self._data.stage_plans[stage].arrival,
        )
        gaps = self._data.gaps_of_stage(stage)
        unrecorded = self._unrecorded_of_stages[stage]
        return self._parts.measure_stages(accumulator, scope, gaps, unrecorded)

    def _count_warmup(self) -> RequestCounts:
        """Return the requests of all stages that are not measured, by outcome."""
        unrecorded = sum(self._unrecorded_of_stages) - self._unrecorded
        return count_requests(self.accumulated.warmup, unrecorded)

    def _combine_goodput(
        self, metrics: PartMetrics, parts: SummaryParts, tasks: Sessions | None
    ) -> Goodput:
        """Return the goodput of the run: under its SLO, or under the SLOs of its classes."""
        if self._manifest.slo is None:
            return combine_class_goodput([part.goodput for part in parts.classes])
        return include_task_outcome(metrics.goodput, tasks)

    def _summarize_rack(self, parts: SummaryParts, metrics: PartMetrics) -> RackTokens | None:
        """Return the output rates over all targets, or None unless they are interchangeable."""
        if not are_interchangeable(self._manifest.targets):
            return None
        return summarize_rack(parts.targets, metrics.tokens.output_per_s)

    def _measure_drift(self) -> drift.Drift:
        """Return how latency and output changed in the course of the steady state."""
        blocks = drift.sample_blocks(self._measured.columns)
        return drift.measure_drift(blocks, self._window.steady, self.tokens_in)

    def _judge_load(self) -> Sustainable:
        """Return whether the servers kept up with the load."""
        measured, warmup = self.accumulated
        return judge_load(measured.columns, warmup.columns, self._window, self._manifest)

    def _summarize_machines(self) -> tuple[MachineSummary, ...]:
        """Return what each machine of a cluster sent."""
        return summarize_machines(
            self._manifest,
            self._window,
            self._scale.p50_ms,
            self._measured.columns,
            self._data.worker_samples,
        )

    def _requested_percentiles(self) -> dict[str, dict[str, float]]:
        """Return the percentiles that the user requested, without those that are too uncertain."""
        if not self._manifest.percentiles:
            return {}
        percentiles = {}
        for definition in METRICS.shown_in("latency"):
            if definition.name == "itl" and self._shown.itl_absent:
                continue
            percentiles[definition.field] = self._certain_percentiles(definition)
        return percentiles

    def _certain_percentiles(self, definition: MetricDefinition) -> dict[str, float]:
        """Return the requested percentiles of a metric that are certain enough to be shown.

        The sample of a metric is either the gaps between events, as a histogram, or one value per
        request. A percentile is certain if the errors of timestamps can hardly change it.
        """
        sample: Values | Histogram
        sample_bounds: SampleBounds | None
        if definition.sample == "gaps":
            sample = self._gaps
            sample_bounds = self._gap_bounds
        else:
            sample = self._measured.sample(definition.name)
            sample_bounds = uncertainty.bound_metric(self._measured.columns, definition.name)
        quantiles = uncertainty.certain_quantiles(sample, sample_bounds, definition, self._manifest)
        return quantiles_ms(sample, quantiles)

    def verdict_inputs(self) -> VerdictInputs:
        """Return what the verdict on the measurement needs beside the summary."""
        measured = self._measured
        # Token counts that are withheld must not be compared with the requested lengths.
        has_token_counts = "tokens" not in self._shown.unsound
        dead_workers = {
            int(worker)
            for accumulator in self.accumulated
            for worker in accumulator.sums_with_prefix(DEAD_WORKER_PREFIX)
        }
        return VerdictInputs(
            scale=self._scale,
            dead_workers=sorted(dead_workers),
            sends=measured.sum("sent"),
            prompt_count_difference=prompt_count_difference(
                measured, self._manifest.template_tokens
            ),
            repeated_prompts=count_repeated_prompts(measured),
            requested_tokens=measured.sum("requested_tokens") if has_token_counts else 0,
            received_tokens=measured.sum("received_tokens"),
            is_slo_missed=self._parts.is_missed_without_dropped(self._gaps, self._unrecorded),
            remarks=measured.sums_with_prefix(REMARK_PREFIX),
        )


def _run_facts(manifest: RunManifest) -> RunFacts:
    """Return the block `run` of the summary.

    A manifest that still says "running" belongs to a run that ended without writing its end.
    """
    facts = shared_fields(manifest, RunFacts)
    facts["state"] = "cut_off" if manifest.state == "running" else manifest.state
    return RunFacts(id=manifest.run, **facts)


def _metric_fields(distributions: Mapping[str, Distribution]) -> dict[str, Any]:
    """Return the distributions of all metrics as fields of the summary.

    Some metrics have a field of their own, such as `ttft_ms`. The others are in the dictionary
    `figures`, by name (`MetricDefinition.block`).
    """
    own_fields: dict[str, Distribution] = {}
    figures: dict[str, Distribution] = {}
    for definition in METRICS.available():
        if definition.name in distributions:
            destination = figures if definition.block else own_fields
            destination[definition.field] = distributions[definition.name]
    return {**own_fields, "figures": figures}


def count_unrecorded(data: RunData, stages: Sequence[MetricAccumulator]) -> list[int]:
    """Return, for each stage, the number of requests without a record.

    They were lost, for example with a worker that died. Of a complete run, they are the planned
    requests less the recorded ones. What was due after a run was cut off was never requested, so of
    such a run only requests that had been sent count.
    """
    recorded = [stage.sum("recorded") for stage in stages]
    if data.manifest.state == "running":
        dropped = sum(stage.sum("dropped") for stage in stages)
        return _count_unrecorded_of_cut_run(data.worker_samples, recorded, dropped)
    planned = [plan.slots or 0 for plan in data.stage_plans]
    return [max(0, planned[i] - recorded[i]) for i in range(len(recorded))]


def _count_unrecorded_of_cut_run(
    samples: Sequence[WorkerSample], recorded: list[int], dropped: int
) -> list[int]:
    """Return, for each stage of a run that was cut off, how many sent requests have no record.

    The last sample of each worker says how many requests it had sent, without their stage. They are
    assigned to the last stage that has records, in which the run was cut off.

    Args:
        samples: The samples that each worker took of itself.
        recorded: The number of records of each stage.
        dropped: How many of the recorded requests were dropped and not sent.
    """
    # A later sample of a worker replaces an earlier one.
    sent_by_worker = {
        sample.worker: sample.sent for sample in sorted(samples, key=lambda sample: sample.t_s)
    }
    expected_records = sum(sent_by_worker.values()) + dropped
    last_stage = max((stage for stage, count in enumerate(recorded) if count), default=0)
    unrecorded = [0] * len(recorded)
    unrecorded[last_stage] = max(0, expected_records - sum(recorded))
    return unrecorded
