"""Computes the part of a summary that follows from the accumulated records of a run.

Pure numpy. `core.run_summary` adds the sections of `core.analysis` and asks `apply_verdict` for the
verdict.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from loadgen.core.metrics import drift, sample_bounds, uncertainty, validity
from loadgen.core.metrics.accumulator import DEAD_WORKER_PREFIX, REMARK_PREFIX, sampled_metrics
from loadgen.core.metrics.client_use import summarize_client_use
from loadgen.core.metrics.goodput import (
    combine_class_goodput,
    include_task_outcome,
    without_outcomes_if_invalid,
)
from loadgen.core.metrics.interactivity import compute_interactivity
from loadgen.core.metrics.machines import summarize_machines
from loadgen.core.metrics.part_summaries import (
    PartSummarizer,
    StageSummary,
    SummaryParts,
    combine_targets,
    summarize_rack,
)
from loadgen.core.metrics.request_counts import (
    count_repeated_prompts,
    count_requests,
    count_stalls,
)
from loadgen.core.metrics.request_group import RequestGroup
from loadgen.core.metrics.run_evidence import ReferenceLatency, RunEvidence, VerdictInputs
from loadgen.core.metrics.step_times import measure_step_times
from loadgen.core.metrics.summary import SCHEMA, RunFacts, Summary
from loadgen.core.metrics.sustainable import Sustainable, judge_load
from loadgen.core.metrics.task_summary import summarize_tasks
from loadgen.core.metrics.timing_evidence import TimingEvidence, are_events_read_promptly, is_local
from loadgen.core.metrics.token_usage import (
    OutputTokensOverTime,
    prompt_count_difference,
    whole_output_per_s,
)
from loadgen.core.metrics.uncertainty import BoundedSample
from loadgen.core.metrics.verdict import Verdict
from loadgen.core.metrics.windows import find_full_load_time, measure_window
from loadgen.core.metrics.withholding import (
    MeasuredStatistics,
    select_statistics,
    without_withheld_values,
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
    from loadgen.core.metrics.sample_bounds import GapBounds
    from loadgen.core.metrics.task_summary import Sessions
    from loadgen.core.metrics.windows import Span, Window
    from loadgen.core.metrics.withholding import ReportedStatistics
    from loadgen.core.results.manifest import RunManifest, TargetFacts, WorkerSample
    from loadgen.core.server_metrics.series import MetricSample
    from loadgen.core.stats.quantiles import Distribution
    from loadgen.figures import MetricDefinition


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

    @property
    def measured_stage_indices(self) -> list[int]:
        """The indices of the stages that are measured."""
        return [index for index, plan in enumerate(self.stage_plans) if plan.measured]

    def gaps_of_stage(self, stage: int) -> Histogram:
        """Return the gaps between output events of a stage."""
        return self.gaps[stage] if stage < len(self.gaps) else Histogram()

    def timeline_of_stage(self, stage: int) -> Sequence[NDArray[np.int64]]:
        """Return the timeline of a stage as a list of one, which is empty if it was not stored."""
        return self.timeline[stage : stage + 1]

    def event_errors_of_stage(self, stage: int) -> Histogram:
        """Return the timestamp errors of the output events of a stage."""
        return self.event_errors[stage] if stage < len(self.event_errors) else Histogram()


class MeasuredRun(NamedTuple):
    """What core computes of a run.

    Attributes:
        summary: The summary without the sections of `core.analysis` and without a verdict.
        accumulated: The accumulated requests, of measured stages and of others.
        verdict_inputs: What the verdict needs beside the summary.
        output_tokens_in: Returns the measured output tokens that came in an interval.
    """

    summary: Summary
    accumulated: MeasuredAndWarmup
    verdict_inputs: VerdictInputs
    output_tokens_in: Callable[[Span], float | None]

    @property
    def measured(self) -> MetricAccumulator:
        """The accumulated requests of the measured stages."""
        return self.accumulated.measured


def measure_run(data: RunData, accumulator: RunAccumulator, *, explained: bool) -> MeasuredRun:
    """Compute the metrics of a run from its accumulated records.

    Args:
        data: The files of the run other than its records.
        accumulator: The records, added up for each stage, target, class and step.
        explained: Whether to judge if the servers kept up with the load, which takes time.
    """
    measurement = _RunMeasurement(data, accumulator)
    return MeasuredRun(
        summary=measurement.summarize(explained=explained),
        accumulated=measurement.measured_and_warmup,
        verdict_inputs=measurement.verdict_inputs(),
        output_tokens_in=measurement.output_tokens.count_in,
    )


def apply_verdict(
    manifest: RunManifest, run: MeasuredRun, summary: Summary, samples: Sequence[WorkerSample]
) -> Summary:
    """Judge whether the measurement can be trusted, and return the summary with that verdict.

    If the measurement is not valid, the summary no longer says whether latency limits are met.

    Args:
        manifest: The manifest of the run.
        run: The result of `measure_run`.
        summary: The complete summary of the run.
        samples: The CPU time and memory of each worker over time.
    """
    evidence = RunEvidence(manifest, summary, run.verdict_inputs, samples)
    judged_summary = msgspec.structs.replace(summary, verdict=validity.judge_run(evidence))
    return without_outcomes_if_invalid(judged_summary)


class _EventData(NamedTuple):
    """The output events of all measured stages. An output event is a read chunk of a response.

    Attributes:
        gaps: The gaps between the events of a response.
        errors: How much earlier than its timestamp each event may have arrived.
        gap_bounds: The bounds of the gaps that follow from these errors, None if gaps are certain.
        timeline: For each stage, the number of events in bins of `BIN_NS`.
    """

    gaps: Histogram
    errors: Histogram
    gap_bounds: GapBounds | None
    timeline: Sequence[NDArray[np.int64]]

    @classmethod
    def of_stages(
        cls, data: RunData, stages: Sequence[int], requests: MetricAccumulator
    ) -> _EventData:
        """Return the output events of some stages.

        A response comes as output events, and a gap is the time between two of them.

        Args:
            data: The histograms and timelines of the run, among others.
            stages: The indices of the stages.
            requests: The requests of these stages.
        """
        gaps = merge_histograms(data.gaps_of_stage(stage) for stage in stages)

        # The errors of the timestamps of events make the gaps uncertain.
        errors = merge_histograms(data.event_errors_of_stage(stage) for stage in stages)
        gap_bounds = sample_bounds.bound_gaps(requests.columns, gaps, errors)

        # A run that was cut off may have no timeline of its last stages.
        timeline = [data.timeline[stage] for stage in stages if stage < len(data.timeline)]
        return cls(gaps=gaps, errors=errors, gap_bounds=gap_bounds, timeline=timeline)

    @property
    def uncertain_share(self) -> float | None:
        """The share of the events whose timestamp has an error, None if no errors are recorded."""
        if not self.errors.count:
            return None
        exact_events = int(self.errors.counts[0])  # bucket 0 has the errors of 0
        return 1 - exact_events / self.errors.count


def _measure_distributions(
    requests: MetricAccumulator, events: _EventData
) -> dict[str, Distribution]:
    """Return the distribution of each metric."""
    distributions = {name: requests.distribution(name) for name in sampled_metrics()}
    distributions["inter_chunk"] = events.gaps.distribution()
    distributions["event_error"] = events.errors.distribution()
    return distributions


class _RunMeasurement:
    """The measurement of one run: computes each section of its summary.

    Values that several sections use are properties, which are computed once.
    """

    def __init__(self, data: RunData, accumulator: RunAccumulator) -> None:
        """Prepare to measure a run.

        Args:
            data: The files of the run other than its records.
            accumulator: The records, added up for each stage, target, class and step.
        """
        self._data = data
        self._manifest = data.manifest
        self._run_accumulator = accumulator

    # -- requests, events and the window -----------------------------------------------------------

    @cached_property
    def measured_and_warmup(self) -> MeasuredAndWarmup:
        """The requests of all measured stages, and those of all other stages."""
        return self._run_accumulator.measured_and_warmup()

    @property
    def _measured_requests(self) -> MetricAccumulator:
        """The requests of all measured stages."""
        return self.measured_and_warmup.measured

    @cached_property
    def _target(self) -> TargetFacts:
        """All targets of the run, described as one."""
        return combine_targets(self._manifest.targets)

    @cached_property
    def _unrecorded_by_stage(self) -> list[int]:
        """For each stage, the number of requests that were lost and have no record."""
        return count_unrecorded(self._data, self._run_accumulator.stages)

    @property
    def _unrecorded(self) -> int:
        """The number of measured requests that were lost and have no record."""
        stages = self._data.measured_stage_indices
        return sum(self._unrecorded_by_stage[stage] for stage in stages)

    @cached_property
    def _events(self) -> _EventData:
        """The output events of all measured stages."""
        stages = self._data.measured_stage_indices
        return _EventData.of_stages(self._data, stages, self._measured_requests)

    @cached_property
    def _window(self) -> Window:
        """The intervals of the run that rates are computed over, such as its steady state."""
        stages = self._run_accumulator.stages
        return measure_window(
            self._measured_requests,
            all_stages=self.measured_and_warmup,
            full_load=find_full_load_time(stages, self._data.measured_stage_indices),
        )

    @cached_property
    def output_tokens(self) -> OutputTokensOverTime:
        """The measured output tokens, from which those of any interval are estimated."""
        return OutputTokensOverTime.of_requests(self._measured_requests, self._events.timeline)

    # -- latencies ---------------------------------------------------------------------------------

    @cached_property
    def _measured_distributions(self) -> dict[str, Distribution]:
        """The distribution of each metric, with the statistics that are too uncertain to report."""
        return _measure_distributions(self._measured_requests, self._events)

    @cached_property
    def _reference_latency(self) -> ReferenceLatency:
        """The typical latency, by which errors of the client are judged."""
        distributions = self._measured_distributions
        return ReferenceLatency.of_samples(distributions["ttft"], distributions["e2e"])

    @cached_property
    def _statistics(self) -> ReportedStatistics:
        """The statistics of all metrics that are certain enough to report."""
        measured_statistics = MeasuredStatistics(
            manifest=self._manifest,
            requests=self._measured_requests,
            distributions=self._measured_distributions,
            gap_bounds=self._events.gap_bounds,
            timing_evidence=self._find_timing_evidence(),
        )
        return select_statistics(measured_statistics)

    @cached_property
    def _part_summarizer(self) -> PartSummarizer:
        """The summarizer of the run and of its parts, such as its targets and classes."""
        return PartSummarizer(
            self._manifest,
            self._run_accumulator,
            self._measured_requests,
            withheld_metrics=self._statistics.metrics_without_slo_result(self._manifest),
        )

    def _find_timing_evidence(self) -> TimingEvidence:
        """Return the evidence of whether the client or the network makes timestamps uncertain.

        The client reads output events promptly if it read each packet soon after the kernel had
        received it. Without timestamps of the kernel, this is not known and counts as not prompt.
        """
        has_kernel_timestamps = self._measured_requests.sum("kernel_timestamps") > 0
        are_delays_short = are_events_read_promptly(
            receive_delays=self._measured_distributions["client_lag"],
            event_errors=self._measured_distributions["event_error"],
        )

        return TimingEvidence(
            uncertain_event_share=self._events.uncertain_share,
            is_read_promptly=has_kernel_timestamps and are_delays_short,
            is_local=is_local(self._manifest),
            samples=self._data.worker_samples,
            window=self._window,
        )

    # -- the summary -------------------------------------------------------------------------------

    def summarize(self, *, explained: bool) -> Summary:
        """Return the summary of the run, with a preliminary verdict.

        Args:
            explained: Whether to judge if the servers kept up with the load, which takes time.
        """
        run_metrics = self._measure_all_stages()
        step_times = measure_step_times(self._measured_requests.columns, self._manifest)
        parts = self._part_summarizer.summarize_all(self._window, step_times, self._target.model)

        # Each step returns a copy with more fields.
        summary = self._summarize_requests(run_metrics, parts)
        summary = self._add_run_conditions(summary)
        summary = self._add_summaries_of_parts(summary, parts)
        summary = self._add_analyses(summary, explained=explained)

        summary = without_withheld_values(summary)
        return msgspec.structs.replace(summary, interactivity=compute_interactivity(summary))

    def _summarize_requests(self, run_metrics: PartMetrics, parts: SummaryParts) -> Summary:
        """Return a summary with all required fields.

        Args:
            run_metrics: The metrics of all measured stages together.
            parts: The summaries of the targets, classes and other parts.
        """
        sessions = self._summarize_tasks()
        latency_fields = _distribution_fields(self._statistics.distributions)
        preliminary_verdict = Verdict(valid=True, limits=self._manifest.limits)  # replaced later

        return Summary(
            # Which run this is, and where it sent its requests.
            schema=SCHEMA,
            run=_run_facts(self._manifest),
            target=self._target,
            rtt_ms=self._manifest.rtt_ms,
            fingerprints=self._manifest.fingerprints,
            verdict=preliminary_verdict,
            # The metrics of all measured requests.
            window=self._window,
            bytes=run_metrics.bytes,
            requests=run_metrics.requests,
            warmup=self._count_warmup(),
            load=run_metrics.load,
            tokens=run_metrics.tokens,
            goodput=self._combine_goodput(run_metrics, parts, sessions),
            stalls=count_stalls(self._measured_requests),
            sessions=sessions,
            client=self._summarize_client(),
            # The distributions of latencies, and why values are missing in them.
            **latency_fields,
            itl_ms=self._itl_distribution(),
            itl_undefined_reason=self._statistics.itl_undefined_reason,
            withheld_metrics=self._statistics.withheld_metrics,
            withheld_statistics=self._statistics.withheld_statistics,
            tpot_undefined=self._measured_requests.sum("tpot_undefined"),
            tpot_no_span=self._count_streamed("tpot_no_span"),
            tpot_no_output=self._count_streamed("tpot_no_output"),
            event_unsure_share=self._events.uncertain_share,
            # The same metrics for each part of the run.
            stages=self._summarize_stages(run_metrics),
            targets=parts.targets,
        )

    def _summarize_tasks(self) -> Sessions | None:
        """Return the summary of the measured conversations and tasks, None if there are none."""
        cut_conversations = self._run_accumulator.count_cut_conversations()
        return summarize_tasks(self._measured_requests, cut_conversations, self._window)

    def _itl_distribution(self) -> Distribution | None:
        """Return the distribution of inter-token latencies (ITL), None if it is not known."""
        if self._statistics.itl_undefined_reason:
            return None

        # Each event carries one token, so the gaps between events are gaps between tokens.
        return self._statistics.distributions["inter_chunk"]

    def _count_streamed(self, sum_name: str) -> int:
        """Return a sum over the measured requests, 0 if their responses were not streamed."""
        return self._measured_requests.sum(sum_name) if self._manifest.stream else 0

    def _add_run_conditions(self, summary: Summary) -> Summary:
        """Return the summary with the conditions of the run, such as its hardware."""
        manifest = self._manifest
        return msgspec.structs.replace(
            summary,
            dns_ms=manifest.dns_ms,
            cache_reset=manifest.cache_reset,
            chunks=manifest.chunks,
            requested_cache_share=manifest.requested_cache_share,
            trace_cache_share=manifest.trace_cache_share,
            hardware=hardware.find_hardware(self._data.server_samples),
            machines=self._summarize_machines(),
        )

    def _add_summaries_of_parts(self, summary: Summary, parts: SummaryParts) -> Summary:
        """Return the summary of the run with the summaries of its parts, such as its regions."""
        return msgspec.structs.replace(
            summary,
            rack=self._summarize_rack(parts, summary.tokens.output_per_s),
            regions=parts.regions,
            nodes=parts.nodes,
            classes=parts.classes,
            models=parts.models,
            steps=parts.steps,
        )

    def _add_analyses(self, summary: Summary, *, explained: bool) -> Summary:
        """Return the summary with the sections that need another look at the requests.

        These are the change of latency and output over time (drift), whether the servers could
        sustain the load, and the percentiles that the user requested.

        Args:
            summary: The summary without these sections.
            explained: Whether to judge if the servers could sustain the load, which takes time.
        """
        sustainable = self._judge_load() if explained else Sustainable()
        return msgspec.structs.replace(
            summary,
            drift=self._measure_drift(),
            sustainable=sustainable,
            percentiles=self._requested_percentiles(),
        )

    def _summarize_client(self) -> ClientUse:
        """Return the CPU time and the memory that the workers used."""
        return summarize_client_use(
            self._measured_requests, self._data.worker_samples, self._window, self._manifest.workers
        )

    def _summarize_stages(self, run_metrics: PartMetrics) -> tuple[StageSummary, ...]:
        """Return the summary of each stage, measured or not."""
        stage_count = len(self._manifest.stages)
        return tuple(self._summarize_stage(stage, run_metrics) for stage in range(stage_count))

    def _measure_all_stages(self) -> PartMetrics:
        """Return the metrics of all measured stages together.

        Their arrival processes are named one after the other: "poisson 10/s, then poisson 20/s".
        """
        plans = [self._data.stage_plans[stage] for stage in self._data.measured_stage_indices]
        arrivals = [plan.arrival for plan in plans if plan.arrival]

        group = RequestGroup(
            requests=self._measured_requests,
            all_stages=self.measured_and_warmup,
            window=self._window,
            gpus=self._target.gpus,
            timeline=self._events.timeline,
            arrival=", then ".join(arrivals),
        )
        return self._part_summarizer.measure_stages(
            group, gaps=self._events.gaps, unrecorded=self._unrecorded
        )

    def _summarize_stage(self, stage: int, run_metrics: PartMetrics) -> StageSummary:
        """Return the summary of a stage, such as a warm-up or one of several request rates.

        Args:
            stage: The index of the stage.
            run_metrics: The metrics of all measured stages together.
        """
        window = self._measure_stage_window(stage)
        metrics = self._measure_stage(stage, window, run_metrics)
        plan = self._data.stage_plans[stage]

        return StageSummary(
            # The planned load.
            name=plan.name,
            arrival=plan.arrival,
            measured=plan.measured,
            concurrency=plan.concurrency,
            ramp_s=plan.ramp_s,
            ramp_from=plan.ramp_from,
            # What was measured.
            window=window,
            requests=metrics.requests,
            load=metrics.load,
            tokens=metrics.tokens,
            ttft_ms=metrics.ttft_ms,
            tpot_ms=metrics.tpot_ms,
            inter_chunk_ms=self._gap_distribution_of_stage(stage),
            e2e_ms=metrics.e2e_ms,
            goodput=metrics.goodput,
        )

    def _measure_stage_window(self, stage: int) -> Window:
        """Return the measurement window of a stage, with its steady state."""
        stages = self._run_accumulator.stages
        return measure_window(
            stages[stage],
            all_stages=[stages[stage]],
            full_load=find_full_load_time(stages, [stage]),
        )

    def _gap_distribution_of_stage(self, stage: int) -> Distribution:
        """Return the gaps between output events of a stage, without uncertain statistics."""
        columns = self._run_accumulator.stages[stage].columns
        gaps = self._data.gaps_of_stage(stage)
        event_errors = self._data.event_errors_of_stage(stage)
        gap_bounds = sample_bounds.bound_gaps(columns, gaps, event_errors)
        return uncertainty.certain_gap_distribution(gaps, gap_bounds, self._manifest.limits)

    def _measure_stage(self, stage: int, window: Window, run_metrics: PartMetrics) -> PartMetrics:
        """Return the metrics of a stage over its window.

        If a run has one measured stage, the metrics of the run are returned instead of computing
        the same again.

        Args:
            stage: The index of the stage.
            window: The window of the stage.
            run_metrics: The metrics of all measured stages together.
        """
        is_only_measured_stage = self._data.measured_stage_indices == [stage]
        if is_only_measured_stage:
            return self._change_full_run_rate(run_metrics, window)

        group = RequestGroup(
            requests=self._run_accumulator.stages[stage],
            all_stages=self.measured_and_warmup,
            window=window,
            gpus=self._target.gpus,
            timeline=self._data.timeline_of_stage(stage),
            arrival=self._data.stage_plans[stage].arrival,
        )
        return self._part_summarizer.measure_stages(
            group,
            gaps=self._data.gaps_of_stage(stage),
            unrecorded=self._unrecorded_by_stage[stage],
        )

    def _change_full_run_rate(self, run_metrics: PartMetrics, window: Window) -> PartMetrics:
        """Return the metrics of the run with the full-run output rate over another window.

        The window of a stage counts as its full run the time from the start of the run to the end
        of the stage. Later stages do not extend it, as they extend that of the run.
        """
        output_per_s = whole_output_per_s(self.measured_and_warmup, window)
        tokens = msgspec.structs.replace(run_metrics.tokens, whole_output_per_s=output_per_s)
        return run_metrics._replace(tokens=tokens)

    def _count_warmup(self) -> RequestCounts:
        """Return the requests of all stages that are not measured, by outcome."""
        unrecorded = sum(self._unrecorded_by_stage) - self._unrecorded
        return count_requests(self.measured_and_warmup.warmup, unrecorded)

    def _combine_goodput(
        self, metrics: PartMetrics, parts: SummaryParts, tasks: Sessions | None
    ) -> Goodput:
        """Return the goodput of the run: under its own SLO, or under the SLOs of its classes."""
        if self._manifest.slo is None:
            return combine_class_goodput([part.goodput for part in parts.classes])
        return include_task_outcome(metrics.goodput, tasks)

    def _summarize_rack(self, parts: SummaryParts, run_rate: float | None) -> RackTokens | None:
        """Return the output rates of the targets, or None if the targets serve different requests.

        Args:
            parts: The summaries of the targets and other parts.
            run_rate: The output tokens per second of the run.
        """
        if not are_interchangeable(self._manifest.targets):
            return None
        return summarize_rack(parts.targets, run_rate)

    def _measure_drift(self) -> drift.Drift:
        """Return how latency and output changed over the steady state."""
        # Both need much memory for a moment, so they are computed one after the other.
        count_output_tokens = self.output_tokens.count_in
        blocks = drift.sample_blocks(self._measured_requests.columns)
        return drift.measure_drift(blocks, self._window.steady, count_output_tokens)

    def _judge_load(self) -> Sustainable:
        """Return whether the servers kept up with the load."""
        measured, warmup = self.measured_and_warmup
        return judge_load(measured.columns, warmup.columns, self._window, self._manifest)

    def _summarize_machines(self) -> tuple[MachineSummary, ...]:
        """Return what each machine of a cluster sent."""
        return summarize_machines(
            self._manifest,
            self._window,
            self._reference_latency.p50_ms,
            self._measured_requests.columns,
            self._data.worker_samples,
        )

    def _requested_percentiles(self) -> dict[str, dict[str, float]]:
        """Return the percentiles that the user requested, in ms by metric and by percentile.

        A percentile whose timestamps are too uncertain is left out, and so is the inter-token
        latency (ITL) of a run that does not define it.
        """
        if not self._manifest.percentiles:
            return {}

        is_itl_defined = self._statistics.itl_undefined_reason == ""
        return {
            definition.field: self._certain_percentiles(definition)
            for definition in METRICS.shown_in("latency")
            if definition.name != "itl" or is_itl_defined
        }

    def _certain_percentiles(self, definition: MetricDefinition) -> dict[str, float]:
        """Return the requested percentiles of a metric that are certain enough, in ms by name."""
        sample = self._find_sample(definition)
        limit = uncertainty.max_error_share(definition.name, self._manifest.limits)
        probabilities = sample.select_certain(self._manifest.percentiles, limit)
        return quantiles_ms(sample.values, probabilities)

    def _find_sample(self, definition: MetricDefinition) -> BoundedSample:
        """Return the values of a metric: the gaps between events, or one value per request."""
        if definition.sample == "gaps":
            return BoundedSample(self._events.gaps, self._events.gap_bounds)

        requests = self._measured_requests
        value_bounds = sample_bounds.bound_metric(requests.columns, definition.name)
        return BoundedSample(requests.values(definition.name), value_bounds)

    def verdict_inputs(self) -> VerdictInputs:
        """Return what the verdict on the measurement needs to know beside the summary.

        The verdict says whether the measurement can be trusted: whether the client was on time, and
        whether prompts and responses are those that the workload requests.
        """
        requests = self._measured_requests
        template_tokens = self._manifest.template_tokens
        is_slo_missed = self._part_summarizer.is_slo_missed_by_server(
            gaps=self._events.gaps, unrecorded=self._unrecorded
        )

        return VerdictInputs(
            # The client.
            reference_latency=self._reference_latency,
            dead_workers=self._find_dead_workers(),
            sends=requests.sum("sent"),
            # The prompts.
            prompt_count_difference=prompt_count_difference(requests, template_tokens),
            repeated_prompts=count_repeated_prompts(requests),
            # The responses.
            requested_tokens=self._requested_tokens(),
            received_tokens=requests.sum("received_tokens"),
            remarks=requests.sums_with_prefix(REMARK_PREFIX),
            is_slo_missed=is_slo_missed,
        )

    def _requested_tokens(self) -> int:
        """Return the requested output tokens, 0 if token counts are not reliable."""
        if "tokens" in self._statistics.withheld_metrics:
            return 0
        return self._measured_requests.sum("requested_tokens")

    def _find_dead_workers(self) -> list[int]:
        """Return the numbers of the workers that died in any stage, in ascending order."""
        numbers = {
            int(number)
            for accumulator in self.measured_and_warmup
            for number in accumulator.sums_with_prefix(DEAD_WORKER_PREFIX)
        }
        return sorted(numbers)


def _run_facts(manifest: RunManifest) -> RunFacts:
    """Return the name of a run, its workload, its seeds and how it was started."""
    # A run that was cut off could not write its end to the manifest.
    was_cut_off = manifest.state == "running"
    return RunFacts(
        id=manifest.run,
        name=manifest.name,
        workload=manifest.workload,
        started=manifest.started,
        ended=manifest.ended,
        state="cut_off" if was_cut_off else manifest.state,
        version=manifest.version,
        command=manifest.command,
        metadata=manifest.metadata,
        seed=manifest.seed,
        schedule_seed=manifest.schedule_seed,
        salt=manifest.salt,
        client=manifest.client,
        api=manifest.api,
        stream=manifest.stream,
        tokenizer=manifest.tokenizer,
        tokenizer_tag=manifest.tokenizer_tag,
        tokenizer_sha256=manifest.tokenizer_sha256,
        host=manifest.host,
    )


def _distribution_fields(distributions: Mapping[str, Distribution]) -> dict[str, Any]:
    """Return the distributions of metrics as fields of `Summary`.

    A metric such as TTFT has a field, `ttft_ms`. The less common metrics are together in the field
    `other_metrics`.
    """
    distribution_by_field: dict[str, Any] = {}
    other_metrics: dict[str, Distribution] = {}
    for definition in METRICS.available():
        if definition.name not in distributions:
            continue

        distribution = distributions[definition.name]
        is_in_other_metrics = bool(definition.block)
        if is_in_other_metrics:
            other_metrics[definition.field] = distribution
        else:
            distribution_by_field[definition.field] = distribution

    distribution_by_field["other_metrics"] = other_metrics
    return distribution_by_field


def count_unrecorded(data: RunData, stages: Sequence[MetricAccumulator]) -> list[int]:
    """Return, for each stage, the number of requests without a record.

    The records of a worker that dies are lost, for example.

    Args:
        data: The files of the run other than its records.
        stages: The recorded requests of each stage.
    """
    recorded = [stage.sum("recorded") for stage in stages]

    # A run writes its final state at its end. A run that was cut off could not do that.
    was_cut_off = data.manifest.state == "running"
    if was_cut_off:
        dropped = sum(stage.sum("dropped") for stage in stages)
        return _count_unrecorded_of_cut_run(data.worker_samples, recorded, dropped)

    planned = [plan.slots or 0 for plan in data.stage_plans]
    return [
        max(0, planned_requests - records)
        for planned_requests, records in zip(planned, recorded, strict=True)
    ]


def _count_unrecorded_of_cut_run(
    samples: Sequence[WorkerSample], recorded: list[int], dropped: int
) -> list[int]:
    """Return, for each stage of a run that was cut off, how many sent requests have no record.

    The stage of such a request is not known. It is taken to be the stage in which the run was cut
    off, which is the last one with records.

    Args:
        samples: How many requests each worker had sent, at several times.
        recorded: The number of records of each stage.
        dropped: How many of the recorded requests were dropped and not sent.
    """
    # Every request that was sent or dropped should have a record.
    expected_records = _count_sent(samples) + dropped

    stages_with_records = [stage for stage, records in enumerate(recorded) if records]
    last_stage = max(stages_with_records, default=0)
    unrecorded = [0] * len(recorded)
    unrecorded[last_stage] = max(0, expected_records - sum(recorded))
    return unrecorded


def _count_sent(samples: Sequence[WorkerSample]) -> int:
    """Return how many requests all workers had sent at their last samples."""
    sent_by_worker: dict[int, int] = {}
    for sample in sorted(samples, key=lambda sample: sample.t_s):
        sent_by_worker[sample.worker] = sample.sent

    return sum(sent_by_worker.values())
