"""Assemble summary.json from what `metrics` measures and the sections that `analysis` adds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from loadgen.core.analysis import (
    causes,
    fairness,
    latency_breakdown,
    load_fidelity,
    recovery,
    replica_differences,
    speculation,
    within_run_variance,
)
from loadgen.core.metrics.accepted_length import judge_accepted_length
from loadgen.core.metrics.fluidity import (
    RUN_SCOPE,
    FluidityInputs,
    FluidityScope,
    combine_class_outcomes,
    include_fluidity_outcome,
    measure_fluidity,
)
from loadgen.core.metrics.measurement import MeasuredRun, RunData, apply_verdict, measure_run
from loadgen.core.metrics.run_accumulator import RunAccumulator
from loadgen.core.metrics.summary import Summary

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from loadgen.core.metrics.fluidity import Fluidity
    from loadgen.core.metrics.goodput import Goodput
    from loadgen.core.metrics.part_summaries import ClassSummary, ModelSummary
    from loadgen.core.results.gaps import RequestGaps
    from loadgen.core.results.manifest import RunManifest, WorkerSample
    from loadgen.core.server_metrics.series import MetricSample
    from loadgen.core.stats.histogram import Histogram


def summarize(  # noqa: PLR0913 - the parts of a run that are stored separately
    manifest: RunManifest,
    rows: NDArray[np.void],
    gaps: Sequence[Histogram] = (),
    timeline: Sequence[NDArray[np.int64]] = (),
    worker_samples: Sequence[WorkerSample] = (),
    texts: Sequence[str] = (),
    event_errors: Sequence[Histogram] = (),
    server_samples: Sequence[MetricSample] = (),
    *,
    request_gaps: Iterable[RequestGaps] | None = None,
    explained: bool = True,
) -> Summary:
    """Compute the summary of a run from what was recorded.

    There are three steps: the metrics, then the sections that every summary has, and then those
    that explain the metrics to people. A stage is a phase of the run, such as the warm-up.

    Args:
        manifest: The manifest of the run.
        rows: The records (`record.ROW`) of all workers, one for each request, in any order.
        gaps: Per stage, a histogram of the gaps between output events.
        timeline: Per stage, counts of output events in bins of `BIN_NS` from the start of the run.
        worker_samples: The samples that each worker takes of itself.
        texts: The error texts, which `rows["text"]` indexes.
        event_errors: Per stage, a histogram of the timestamp errors of output events. Empty if they
            are not known.
        server_samples: The samples of the servers' metrics pages.
        request_gaps: The times between the output events of each request, None if they were not
            stored.
        explained: Whether to compute also what only people read, such as the causes of slow
            requests. It takes time, so code that computes many summaries leaves it out.
    """
    data = RunData(
        manifest=manifest,
        gaps=gaps,
        timeline=timeline,
        worker_samples=worker_samples,
        event_errors=event_errors,
        server_samples=server_samples,
    )
    accumulated_records = RunAccumulator(manifest, rows, texts)
    measured_run = measure_run(data, accumulated_records, explained=explained)

    summary = _add_sections(measured_run, data)
    fluidity_inputs = _collect_fluidity_inputs(
        measured_run, accumulated_records, data, request_gaps
    )
    summary = _add_fluidity(summary, fluidity_inputs)
    summary = _add_accepted_length(data, summary)
    if explained:
        summary = _add_explanations(measured_run, data, summary)

    return apply_verdict(manifest, measured_run, summary, worker_samples)


def _add_fluidity(summary: Summary, inputs: FluidityInputs) -> Summary:
    """Return the summary with the fluidity index of the run and of each of its request classes.

    An objective for the index is a part of an SLO, so it takes part in the outcome of the SLO. A
    run or class without an SLO has no token deadlines, so it has no fluidity index.
    """
    fluidity_by_scope = measure_fluidity(inputs)
    run_fluidity = fluidity_by_scope.get(RUN_SCOPE)
    classes = tuple(
        _with_fluidity(request_class, fluidity_by_scope.get(request_class.name))
        for request_class in summary.classes
    )

    goodput = include_fluidity_outcome(summary.goodput, run_fluidity)
    has_only_class_slos = RUN_SCOPE not in inputs.scopes
    if has_only_class_slos:
        goodput = _combine_outcomes_of(classes, goodput)

    return msgspec.structs.replace(
        summary,
        fluidity=run_fluidity,
        goodput=goodput,
        classes=classes,
        models=tuple(_with_class_outcomes(model, classes) for model in summary.models),
    )


def _with_fluidity(request_class: ClassSummary, fluidity: Fluidity | None) -> ClassSummary:
    """Return the summary of a class with its fluidity index, whose objective is part of its SLO."""
    return msgspec.structs.replace(
        request_class,
        fluidity=fluidity,
        goodput=include_fluidity_outcome(request_class.goodput, fluidity),
    )


def _with_class_outcomes(model: ModelSummary, classes: Sequence[ClassSummary]) -> ModelSummary:
    """Return the summary of a model whose SLO is met if the classes that use it meet theirs."""
    classes_of_model = [
        request_class for request_class in classes if request_class.name in model.classes
    ]
    return msgspec.structs.replace(
        model, goodput=_combine_outcomes_of(classes_of_model, model.goodput)
    )


def _combine_outcomes_of(classes: Sequence[ClassSummary], goodput: Goodput) -> Goodput:
    """Return a goodput whose SLO is met if all of some request classes meet their SLO."""
    return msgspec.structs.replace(goodput, met=combine_class_outcomes(classes))


def _collect_fluidity_inputs(
    run: MeasuredRun,
    accumulator: RunAccumulator,
    data: RunData,
    request_gaps: Iterable[RequestGaps] | None,
) -> FluidityInputs:
    """Return what is known of a run from which its fluidity index is computed.

    Args:
        run: The measured requests, and the summary so far.
        accumulator: The requests of each class.
        data: The manifest, with the SLO of the run and of each class.
        request_gaps: The times between the events of each response, None if they were not stored.
    """
    manifest = data.manifest
    scopes: dict[str, FluidityScope] = {}
    if manifest.slo is not None:
        scopes[RUN_SCOPE] = FluidityScope(
            slo=manifest.slo, stages=run.measured.columns, requests=run.summary.requests
        )

    class_parts = zip(manifest.classes, accumulator.classes, run.summary.classes, strict=True)
    for plan, requests, class_summary in class_parts:
        if plan.slo is not None:
            scopes[plan.name] = FluidityScope(
                slo=plan.slo, stages=requests.measured.columns, requests=class_summary.requests
            )

    return FluidityInputs(
        scopes=scopes,
        gaps=request_gaps,
        is_streamed=manifest.stream,
        withheld_metrics=run.summary.withheld_metrics,
    )


def _add_accepted_length(data: RunData, summary: Summary) -> Summary:
    """Return the summary with the check of the accepted length, if the run states one."""
    target = data.manifest.accepted_length
    if target is None:
        return summary
    check = judge_accepted_length(target, summary.speculation, data.server_samples, summary.window)
    return msgspec.structs.replace(summary, accepted_length=check)


def _add_sections(run: MeasuredRun, data: RunData) -> Summary:
    """Return the summary with the sections that every summary has besides the metrics."""
    measured_records = run.measured.columns
    return msgspec.structs.replace(
        run.summary,
        recovery=recovery.measure_recoveries(measured_records, data.manifest, data.server_samples),
        speculation=speculation.summarize_speculation(measured_records, data.server_samples),
        fairness=fairness.measure_fairness(run.summary.classes),
    )


def _add_explanations(run: MeasuredRun, data: RunData, summary: Summary) -> Summary:
    """Return the summary with the sections that explain its metrics to people.

    Statistics that the run withholds are not explained either.
    """
    records = run.measured.columns
    warmup_records = run.accumulated.warmup.columns
    phases = latency_breakdown.split_latencies(records, data.manifest)
    slowest_requests = latency_breakdown.list_slowest_requests(
        records, warmup_records, data.manifest
    )
    all_host_differences = replica_differences.compare_nodes(
        records, summary.window.steady, data.manifest
    )
    host_differences = replica_differences.without_metrics(
        all_host_differences, summary.metrics_withholding("mean")
    )
    likely_causes = causes.explain(
        records, data.manifest, data.server_samples, summary.metrics_withholding("p50")
    )
    confidence_intervals = within_run_variance.metric_intervals(
        records, summary, data.manifest.slo, run.output_tokens_in
    )
    explained_summary = msgspec.structs.replace(
        summary,
        splits=phases,
        slowest=slowest_requests,
        node_differences=host_differences,
        causes=likely_causes,
        within=confidence_intervals,
    )

    return _add_load_checks(run, data, explained_summary)


def _add_load_checks(run: MeasuredRun, data: RunData, summary: Summary) -> Summary:
    """Return the summary with the section that shows whether the load was sent as planned.

    The checks use the other explanations, so these must be in the summary already.
    """
    load_checks = load_fidelity.check_load(
        data.manifest, summary, run.verdict_inputs, run.measured.columns
    )
    return msgspec.structs.replace(summary, stimulus=load_checks)
