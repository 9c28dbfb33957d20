"""Summaries of the parts of a run: stages, targets, regions, nodes, classes, models and steps.

Pure. docs/reference/summary.md defines each field.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import msgspec

from loadgen.core import format
from loadgen.core.metrics.fluidity import Fluidity
from loadgen.core.metrics.goodput import (
    Goodput,
    combine_class_goodput,
    include_task_outcome,
    is_slo_missed,
    measure_goodput,
)
from loadgen.core.metrics.load import Load, summarize_load
from loadgen.core.metrics.request_counts import Bytes, RequestCounts, count_requests, total_bytes
from loadgen.core.metrics.request_group import RequestGroup
from loadgen.core.metrics.slo_sample import SloSample
from loadgen.core.metrics.task_summary import Sessions, summarize_tasks
from loadgen.core.metrics.token_usage import Tokens, summarize_tokens
from loadgen.core.metrics.uncertainty import certain_distribution
from loadgen.core.metrics.windows import Window, measure_window, per_second
from loadgen.core.results.manifest import TargetFacts
from loadgen.core.stats.histogram import Histogram
from loadgen.core.stats.quantiles import Distribution
from loadgen.figures import pooled_metrics

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loadgen.core.metrics.accumulator import MetricAccumulator
    from loadgen.core.metrics.run_accumulator import MeasuredAndWarmup, RunAccumulator
    from loadgen.core.metrics.step_times import StepTime
    from loadgen.core.results.manifest import RunManifest, StepPlan


class StageSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One stage over its own window.

    Only requests of this stage count, except for requests in flight, where those of all stages do.

    Attributes:
        name: The name of the stage.
        arrival: The arrival process as written in the workload.
        measured: False for a warm-up.
        concurrency: The number of virtual users of a closed loop.
        ramp_s: The time over which the virtual users of a closed loop begin, 0 for all at once.
        ramp_from: What determined the ramp: asked, probe, preset, or stage, whose virtual users go
            on. "" if not known.
        window: The intervals that rates are over.
        requests: Requests by status.
        load: Offered, achieved and completed load.
        tokens: Tokens and their rates.
        ttft_ms: Time to first token.
        tpot_ms: Time per output token.
        inter_chunk_ms: Gaps between output events.
        e2e_ms: End-to-end latency.
        goodput: Requests that meet the SLO.
    """

    name: str
    arrival: str
    measured: bool
    concurrency: int | None
    ramp_s: float | None = None
    ramp_from: str = ""
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
    """One of several targets: its measured requests, over the window of the whole run.

    `active_output_per_s` is the rate while the target was in use: from its first due time to its
    last token.
    """

    target: TargetFacts
    requests: RequestCounts
    bytes: Bytes
    load: Load
    tokens: Tokens
    ttft_ms: Distribution
    tpot_ms: Distribution
    e2e_ms: Distribution
    goodput: Goodput
    active_output_per_s: float | None = msgspec.field(default=None, name="own_output_per_s")


class ClassSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One of several request classes: its measured requests, over the window of the whole run.

    `share` is the requested share of all starts, which are single requests, conversations and
    tasks; `starts` is the number of those of this class. `goodput` is under the SLO of the class.
    `sessions` is None for a class of single requests. `fluidity` is None if the SLO of the class
    sets no token deadlines, or if the token times were not stored.
    """

    name: str
    share: float
    starts: int
    model: str | None = None
    priority: int | None = None
    tenant: str | None = None
    requests: RequestCounts
    bytes: Bytes
    load: Load
    tokens: Tokens
    ttft_ms: Distribution
    tpot_ms: Distribution
    e2e_ms: Distribution
    goodput: Goodput
    sessions: Sessions | None = None
    fluidity: Fluidity | None = None


class ModelSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One of several models or adapters of a run: the requests of all classes that request it.

    In `goodput` each class is judged by its own SLO.
    """

    model: str
    classes: tuple[str, ...]
    requests: RequestCounts
    bytes: Bytes
    load: Load
    tokens: Tokens
    ttft_ms: Distribution
    tpot_ms: Distribution
    e2e_ms: Distribution
    goodput: Goodput


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the tasks: its measured requests, over the window of the whole run.

    The shares are of the time of the tasks that ended ok, and add up to 1 over all steps and
    pauses. They are None if no task ended ok.

    Attributes:
        name: The name of the step.
        of_class: The request class of the tasks, "" if all requests are of one kind.
        kind: chat, embed or rerank.
        targets: The targets that serve such steps alone. Empty if those of other requests do.
        model: The model of the step.
        requests: Requests by status.
        bytes: Bytes on the wire.
        load: Offered, achieved and completed load.
        tokens: Tokens and their rates.
        ttft_ms: Time to first token.
        tpot_ms: Time per output token.
        e2e_ms: End-to-end latency.
        time_share: The share of the time of the tasks that went to requests of this step.
        pause: What the pause before its requests stands for: names of tools, "thinking", or "".
        pause_ms: The length of these pauses.
        pause_share: The share of the time of the tasks that went to these pauses.
    """

    name: str
    of_class: str = ""
    kind: str = "chat"
    targets: tuple[str, ...] = ()
    model: str | None = None
    requests: RequestCounts
    bytes: Bytes
    load: Load
    tokens: Tokens
    ttft_ms: Distribution
    tpot_ms: Distribution
    e2e_ms: Distribution
    time_share: float | None = None
    pause: str = ""
    pause_ms: Distribution = Distribution()
    pause_share: float | None = None


SummaryWithSlo: TypeAlias = StageSummary | TargetSummary | ClassSummary | ModelSummary
"""The summary of a part of a run that may have an SLO."""

PartSummary: TypeAlias = SummaryWithSlo | StepSummary
"""The summary of a part of a run, which has the same metrics as that of the run."""


class RackTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens/s of several targets by two definitions.

    They differ if the targets do not end together. `sum_of_rates_per_s` adds each target's rate
    over its own window, as published rack totals do. `single_clock_per_s` treats the targets as one
    system: all tokens divided by the duration of the whole run. The other fields describe the rates
    of the single targets; `spread` is (max - min) / median.
    """

    targets: int
    sum_of_rates_per_s: float
    single_clock_per_s: float | None
    min_per_s: float
    mean_per_s: float
    median_per_s: float
    max_per_s: float
    spread: float


_NO_GAPS_BY_PART = dict.fromkeys(
    pooled_metrics(), "inter-chunk latencies are counted for all targets together"
)


class PartMetrics(NamedTuple):
    """The metrics that the run, its stages, its targets and other parts have in common."""

    requests: RequestCounts
    bytes: Bytes
    load: Load
    tokens: Tokens
    goodput: Goodput
    ttft_ms: Distribution
    tpot_ms: Distribution
    e2e_ms: Distribution


class SummaryParts(NamedTuple):
    """The summaries of the parts of a run."""

    targets: tuple[TargetSummary, ...]
    regions: tuple[TargetSummary, ...]
    nodes: tuple[TargetSummary, ...]
    classes: tuple[ClassSummary, ...]
    models: tuple[ModelSummary, ...]
    steps: tuple[StepSummary, ...]


class PartSummarizer:
    """Computes the metrics of the run, its stages, targets, classes, models and steps.

    All of them have the same metrics (`PartMetrics`). Stages have windows of their own. The other
    parts are summarized over the window of the run, so that their rates add up to those of the run.
    """

    def __init__(
        self,
        manifest: RunManifest,
        accumulator: RunAccumulator,
        requests: MetricAccumulator,
        withheld_metrics: Mapping[str, str],
    ) -> None:
        """Prepare to summarize the parts of one run.

        Args:
            manifest: The manifest of the run.
            accumulator: The records of the run, added up for each stage, target, class and step.
            requests: All measured requests, which means all but those of a warm-up.
            withheld_metrics: The metrics that are too uncertain to judge an SLO by, each with the
                reason as a sentence.
        """
        self._manifest = manifest
        self._accumulator = accumulator
        self._measured_requests = requests
        self._withheld_metrics = withheld_metrics

        # Gaps between events are recorded by stage only, so other parts cannot be judged by them.
        self._withheld_metrics_of_parts = {**_NO_GAPS_BY_PART, **withheld_metrics}

    def measure_stages(self, group: RequestGroup, gaps: Histogram, unrecorded: int) -> PartMetrics:
        """Return the metrics of the requests of one stage, or of all measured stages together.

        Args:
            group: The requests, and the time that their number is divided by to get a rate.
            gaps: The gaps between output events of these requests.
            unrecorded: The number of requests of the stages that were lost and have no record.
        """
        slo_sample = self._slo_sample_of_stages(group.requests, gaps, unrecorded)
        return self._compute_metrics(group, slo_sample)

    def _slo_sample_of_stages(
        self,
        requests: MetricAccumulator,
        gaps: Histogram,
        unrecorded: int,
        *,
        counts_dropped: bool = True,
    ) -> SloSample:
        """Return the data by which the SLO of one or several stages is judged.

        Args:
            requests: The requests of the stages that have a record.
            gaps: The times between two output events of these requests.
            unrecorded: The number of requests of the stages that were lost and have no record. They
                miss the SLO.
            counts_dropped: Whether the requests that the client dropped, which means that it did
                not send them, miss the SLO. Otherwise they do not count.
        """
        return SloSample(
            requests,
            gaps,
            unrecorded,
            withheld_metrics=self._withheld_metrics,
            limits=self._manifest.limits,
            counts_dropped=counts_dropped,
        )

    def _compute_metrics(self, group: RequestGroup, slo_sample: SloSample) -> PartMetrics:
        """Return the counts, load, tokens, goodput and latencies of a group of requests.

        Args:
            group: The requests, with the time over which their rates are computed.
            slo_sample: The same requests, with the data by which their SLO is judged.
        """
        requests = group.requests
        limits = self._manifest.limits

        return PartMetrics(
            requests=count_requests(requests, slo_sample.unrecorded),
            bytes=total_bytes(requests),
            load=summarize_load(group, self._manifest.stages),
            tokens=summarize_tokens(group),
            goodput=measure_goodput(slo_sample, group.window),
            ttft_ms=certain_distribution(requests, "ttft", limits),
            tpot_ms=certain_distribution(requests, "tpot", limits),
            e2e_ms=certain_distribution(requests, "e2e", limits),
        )

    def _measure_part(
        self, part: MeasuredAndWarmup, window: Window, gpus: int | None = None
    ) -> PartMetrics:
        """Return the metrics of a part of the run: of a target, class, model or step.

        The columns of the requests are freed then, because only one part is measured at a time.

        Args:
            part: The requests of the part, in the measured stages and in the warm-up.
            window: The window of the run.
            gpus: The number of GPUs that served the requests, None if not known.
        """
        group = RequestGroup(
            requests=part.measured,
            all_stages=[part.measured, part.warmup],
            window=window,
            gpus=gpus,
            requests_of_run=self._measured_requests,
        )
        slo_sample = self._slo_sample_of_part(part.measured)
        metrics = self._compute_metrics(group, slo_sample)

        _free_columns(part.measured)
        return metrics

    def _slo_sample_of_part(
        self, accumulator: MetricAccumulator, *, counts_dropped: bool = True
    ) -> SloSample:
        """Return the requests by which the SLO of a part of the run is judged.

        A part is, for example, the requests of one target or of one request class.

        Args:
            accumulator: The requests.
            counts_dropped: Whether requests that the client dropped, and did not send, count as
                misses.
        """
        return SloSample(
            accumulator,
            gaps=Histogram(),  # gaps between events are recorded by stage only
            unrecorded=0,  # requests without a record are not known to belong to a part
            withheld_metrics=self._withheld_metrics_of_parts,
            limits=self._manifest.limits,
            counts_dropped=counts_dropped,
        )

    def is_slo_missed_by_server(self, gaps: Histogram, unrecorded: int) -> bool:
        """Return True if the run or a request class misses its SLO, without the dropped requests.

        The client drops a request, and does not send it, if too many requests are in flight. So a
        dropped request does not show how fast the server is.

        Args:
            gaps: The gaps between output events of all measured requests.
            unrecorded: The number of measured requests that have no record.
        """
        run_sample = self._slo_sample_of_stages(
            self._measured_requests, gaps, unrecorded, counts_dropped=False
        )
        if is_slo_missed(run_sample):
            return True

        for request_class in self._accumulator.classes:
            class_sample = self._slo_sample_of_part(request_class.measured, counts_dropped=False)
            if is_slo_missed(class_sample):
                return True

        return False

    def summarize_all(
        self, window: Window, step_times: Sequence[StepTime], default_model: str
    ) -> SummaryParts:
        """Return the summaries of targets, regions, nodes, classes, models and steps.

        Args:
            window: The window of the run.
            step_times: How much of the time of tasks each step took.
            default_model: The model of request classes that name no model.
        """
        class_count = len(self._manifest.classes)
        classes = tuple(self._summarize_class(index, window) for index in range(class_count))

        return SummaryParts(
            targets=self._summarize_targets(window),
            regions=self._summarize_target_groups("region", window),
            nodes=self._summarize_target_groups("node", window),
            classes=classes,
            models=self._summarize_models(classes, window, default_model=default_model),
            steps=self._summarize_steps(window, step_times),
        )

    def _summarize_targets(self, window: Window) -> tuple[TargetSummary, ...]:
        """Return a summary of each target, or no summaries if the run has a single target."""
        # A single target has no accumulator, because its requests are those of the run.
        targets = zip(self._manifest.targets, self._accumulator.targets, strict=False)
        return tuple(self._summarize_target(target, part, window) for target, part in targets)

    def _summarize_target(
        self, target: TargetFacts, part: MeasuredAndWarmup, window: Window
    ) -> TargetSummary:
        """Return the summary of a target, or of several targets of one region or node.

        Args:
            target: The target, or the facts that several targets have in common.
            part: The requests that were sent to the target.
            window: The window of the run.
        """
        # The rates of `metrics` are over the window of the run. So the rates of all targets add up
        # to the rate of the run.
        metrics = self._measure_part(part, window, target.gpus)

        # The active rate is over the time in which the target was used.
        active_window = measure_window(part.measured, part)
        output_tokens = part.measured.sum_known("output_tokens")
        active_output_per_s = per_second(output_tokens, active_window)

        return TargetSummary(
            target=target,
            requests=metrics.requests,
            bytes=metrics.bytes,
            load=metrics.load,
            tokens=metrics.tokens,
            ttft_ms=metrics.ttft_ms,
            tpot_ms=metrics.tpot_ms,
            e2e_ms=metrics.e2e_ms,
            goodput=metrics.goodput,
            active_output_per_s=active_output_per_s,
        )

    def _summarize_target_groups(
        self, by: Literal["region", "node"], window: Window
    ) -> tuple[TargetSummary, ...]:
        """Return a summary of the targets of each region or node.

        Return no summaries if all targets are in the same region or node.
        """
        groups = _group_targets(self._manifest.targets, by)
        if len(groups) < 2:
            return ()

        summaries = []
        for target_indices in groups:
            targets = [self._manifest.targets[index] for index in target_indices]
            combined_target = combine_targets(targets)
            requests = self._accumulator.of_targets(target_indices)
            summaries.append(self._summarize_target(combined_target, requests, window))

        return tuple(summaries)

    def _summarize_class(self, index: int, window: Window) -> ClassSummary:
        """Return the summary of a request class and of its tasks.

        A task is a series of requests, such as a conversation. If the SLO of the class limits whole
        tasks, the goodput of the class says whether the tasks meet that limit.

        Args:
            index: The index of the class.
            window: The window of the run.
        """
        plan = self._manifest.classes[index]
        class_requests = self._accumulator.classes[index]
        metrics = self._measure_part(class_requests, window)

        cut_tasks = self._accumulator.count_cut_conversations(index)
        tasks = summarize_tasks(class_requests.measured, cut_tasks, window)

        return ClassSummary(
            # The planned class.
            name=plan.name,
            share=plan.share,
            model=plan.model,
            priority=plan.priority,
            tenant=plan.tenant,
            # The requests, and their metrics.
            starts=class_requests.measured.sum("starts"),
            requests=metrics.requests,
            bytes=metrics.bytes,
            load=metrics.load,
            tokens=metrics.tokens,
            ttft_ms=metrics.ttft_ms,
            tpot_ms=metrics.tpot_ms,
            e2e_ms=metrics.e2e_ms,
            # The tasks.
            goodput=include_task_outcome(metrics.goodput, tasks),
            sessions=tasks,
        )

    def _summarize_models(
        self, classes: Sequence[ClassSummary], window: Window, *, default_model: str
    ) -> tuple[ModelSummary, ...]:
        """Return a summary of each model, or no summaries if the run uses a single model.

        Args:
            classes: The summary of each request class.
            window: The window of the run.
            default_model: The model of classes that name no model.
        """
        classes_of_model: dict[str, list[int]] = {}
        for index, plan in enumerate(self._manifest.classes):
            model = plan.model or default_model
            classes_of_model.setdefault(model, []).append(index)

        if len(classes_of_model) < 2:
            return ()

        return tuple(
            self._summarize_model(model, class_indices, classes, window)
            for model, class_indices in classes_of_model.items()
        )

    def _summarize_model(
        self,
        model: str,
        class_indices: list[int],
        all_classes: Sequence[ClassSummary],
        window: Window,
    ) -> ModelSummary:
        """Return the summary of all requests that were sent to one model.

        Each class of these requests has an SLO of its own. So the goodput of the model is combined
        from the goodput of the classes, and is not measured for all requests together.

        Args:
            model: The name of the model.
            class_indices: The indices of the request classes that use the model.
            all_classes: The summary of each class of the run.
            window: The window of the run.
        """
        requests = self._accumulator.of_classes(class_indices)
        metrics = self._measure_part(requests, window)
        classes = [all_classes[index] for index in class_indices]

        return ModelSummary(
            model=model,
            classes=tuple(summary.name for summary in classes),
            requests=metrics.requests,
            bytes=metrics.bytes,
            load=metrics.load,
            tokens=metrics.tokens,
            ttft_ms=metrics.ttft_ms,
            tpot_ms=metrics.tpot_ms,
            e2e_ms=metrics.e2e_ms,
            goodput=combine_class_goodput([summary.goodput for summary in classes]),
        )

    def _summarize_steps(
        self, window: Window, step_times: Sequence[StepTime]
    ) -> tuple[StepSummary, ...]:
        """Return the summary of each step of agentic tasks."""
        steps = zip(self._manifest.steps, self._accumulator.steps, step_times, strict=True)
        return tuple(
            self._summarize_step(plan, part, window, step_time) for plan, part, step_time in steps
        )

    def _summarize_step(
        self, plan: StepPlan, part: MeasuredAndWarmup, window: Window, step_time: StepTime
    ) -> StepSummary:
        """Return the summary of a step of agentic tasks, such as "plan" or "embed".

        An agentic task is a sequence of requests. A step is a named group of these requests.

        Args:
            plan: The plan of the step.
            part: The requests of the step.
            window: The window of the run.
            step_time: How much of the time of tasks the step took, and the pauses before the step.
        """
        metrics = self._measure_part(part, window)
        return StepSummary(
            # The planned step.
            name=plan.name,
            of_class=plan.of_class,
            kind=plan.kind,
            targets=self._targets_of_step(plan),
            model=plan.model,
            pause=plan.pause,
            # The metrics of its requests.
            requests=metrics.requests,
            bytes=metrics.bytes,
            load=metrics.load,
            tokens=metrics.tokens,
            ttft_ms=metrics.ttft_ms,
            tpot_ms=metrics.tpot_ms,
            e2e_ms=metrics.e2e_ms,
            # The share of the time of the tasks that the step and the pauses before it took.
            time_share=step_time.time_share,
            pause_ms=step_time.pause_ms,
            pause_share=step_time.pause_share,
        )

    def _targets_of_step(self, plan: StepPlan) -> tuple[str, ...]:
        """Return the names of the targets that serve a step and nothing else."""
        targets = [self._manifest.targets[index] for index in plan.targets]
        # `serves` lists the steps of a target that serves certain steps alone.
        return tuple(target.name or target.url for target in targets if target.serves)


def _free_columns(accumulator: MetricAccumulator) -> None:
    """Free the memory of the columns of requests, which are read again if they are needed."""
    for columns in accumulator.columns:
        columns.clear_cache()


def combine_targets(targets: Sequence[TargetFacts]) -> TargetFacts:
    """Describe several targets as one: with their common values and the sum of their GPUs.

    A field in which the targets differ gets its default value. Side services, such as a server for
    the embeddings of agentic tasks, are left out if there are other targets.
    """
    # `serves` lists the steps of agentic tasks that a side service is for.
    main_targets = [target for target in targets if not target.serves]
    described_targets = main_targets or targets
    if not described_targets:
        return TargetFacts()
    if len(described_targets) == 1:
        return described_targets[0]

    fields = _common_fields(described_targets)
    fields["name"] = format.counted(len(described_targets), "target")
    fields["gpus"] = _sum_gpus(described_targets)
    fields["simulated"] = any(target.simulated for target in described_targets)
    return TargetFacts(**fields)


def _sum_gpus(targets: Sequence[TargetFacts]) -> int | None:
    """Return the number of GPUs of all targets, or None if it is not known of one of them."""
    known_gpus = [target.gpus for target in targets if target.gpus is not None]
    return sum(known_gpus) if len(known_gpus) == len(targets) else None


def _common_fields(targets: Sequence[TargetFacts]) -> dict[str, Any]:
    """Return the fields of targets that have the same value for all of them."""
    values_of_first = msgspec.structs.asdict(targets[0])
    return {
        field: value
        for field, value in values_of_first.items()
        if all(getattr(target, field) == value for target in targets)
    }


def _group_targets(
    targets: Sequence[TargetFacts], by: Literal["region", "node"]
) -> list[list[int]]:
    """Return the indices of the targets of each region or node.

    Targets without a region or node are one more group.
    """
    indices_by_name: dict[str, list[int]] = {}
    for index, target in enumerate(targets):
        name = target.region if by == "region" else target.node
        indices_by_name.setdefault(name, []).append(index)

    return list(indices_by_name.values())


def summarize_rack(targets: Sequence[TargetSummary], run_rate: float | None) -> RackTokens | None:
    """Return statistics of the output tokens per second of several targets, or None without any.

    The rate of a target is over the time in which it was used. A target without output has a rate
    of 0.

    Args:
        targets: The summary of each target, such as a node of a rack. Empty for a run with a single
            target.
        run_rate: The rate of all targets together over the time of the run, None if not known.
    """
    if not targets:
        return None

    target_rates = [target.active_output_per_s or 0.0 for target in targets]

    lowest = min(target_rates)
    highest = max(target_rates)
    median = statistics.median(target_rates)
    spread = (highest - lowest) / median if median else 0.0

    return RackTokens(
        targets=len(target_rates),
        sum_of_rates_per_s=sum(target_rates),
        single_clock_per_s=run_rate,
        min_per_s=lowest,
        mean_per_s=statistics.fmean(target_rates),
        median_per_s=median,
        max_per_s=highest,
        spread=spread,
    )
