"""Renders the contract that one machine of a size has to meet. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from loadgen.core.metrics.part_summaries import ClassSummary
from loadgen.core.metrics.slo_terms import TermResult
from loadgen.core.metrics.summary import Summary

if TYPE_CHECKING:
    from loadgen.cost.sizing import Size


def render_contract(size: Size, summary: Summary, workload: str) -> str:
    """Return the YAML of a contract that holds one machine to the objectives of a measured run.

    The machine must serve its part of the demand. The objectives are those of the whole run, or if
    only the request classes have some, those of each class.

    Args:
        size: The machines that share the demand.
        summary: The run from which the size follows.
        workload: A packaged workload, or a path relative to the contract.
    """
    assert size.serving_machines, "machines were counted"
    slo_keys = list(_render_slo_keys(summary))
    terms = list(_render_terms(summary))

    has_only_class_objectives = not summary.goodput.slo and bool(summary.classes)
    if has_only_class_objectives:
        slo_keys = []
        for request_class in summary.classes:
            terms += _render_terms(request_class, request_class.name)

    lines: list[str] = []
    if summary.target.simulated:
        lines.append("# SIMULATED: the limits come from a performance model, not a real server")

    lines += [
        f"# For one of {size.serving_machines} machines that serve the load. Check it first: "
        "loadgen validate FILE --url URL --dry-run",
        f"name: {summary.run.workload}",
        f"gpus: {size.gpus_per_machine}",
    ]
    if slo_keys:
        lines.append(f"slo: {{{', '.join(slo_keys)}}}")

    rate_per_machine = size.demand_per_s / size.serving_machines
    lines += [
        "levels:",
        "  - name: share",
        f"    workload: {workload}",
        f"    rate: {rate_per_machine:.6g}/s",
        "    duration: auto",
        "    must:",
    ]
    lines += [f"      - {term}" for term in terms]

    return "\n".join(lines) + "\n"


def _render_terms(summary: Summary | ClassSummary, class_name: str = "") -> Iterator[str]:
    """Yield the objectives of a run, or of one request class, as terms of a contract.

    For example `ttft: {limit: 2s, at: p95}`, with the name of the class if there is one.
    """
    class_key = f", class: {class_name}" if class_name else ""
    for term in summary.goodput.slo:
        yield f"{term.metric}: {{{_render_limit(term)}{class_key}}}"

    required_share = summary.goodput.share_limit
    if required_share is not None:
        yield f"goodput: {{share: {required_share * 100:g}%{class_key}}}"

    tasks = None if summary.sessions is None else summary.sessions.goodput
    if tasks is not None:
        yield f"task_goodput: {{share: {tasks.share_limit * 100:g}%{class_key}}}"


def _render_slo_keys(summary: Summary) -> Iterator[str]:
    """Yield the keys of the run's SLO as they are written below `slo:` in a YAML file.

    For example `ttft: {limit: 2s, at: p95}`. Several percentiles of one metric are a list:
    `ttft: [{limit: 1s, at: p50}, {limit: 2s, at: p95}]`.
    """
    limits_by_metric: dict[str, list[str]] = {}
    for term in summary.goodput.slo:
        limits_by_metric.setdefault(term.metric, []).append(f"{{{_render_limit(term)}}}")

    for metric, limits in limits_by_metric.items():
        if len(limits) == 1:
            yield f"{metric}: {limits[0]}"
        else:
            yield f"{metric}: [{', '.join(limits)}]"

    required_share = summary.goodput.share_limit
    if required_share is not None:
        yield f"attainment: {required_share * 100:g}%"

    tasks = None if summary.sessions is None else summary.sessions.goodput
    if tasks is not None:
        task_keys = []

        # The limits of the length of a task and of the wait for each first token in it.
        if tasks.within_ms is not None:
            task_keys.append(f"within: {_render_duration(tasks.within_ms)}")

        if tasks.wait_ms is not None:
            task_keys.append(f"wait: {_render_duration(tasks.wait_ms)}")

        task_keys.append(f"attainment: {tasks.share_limit * 100:g}%")
        yield f"task: {{{', '.join(task_keys)}}}"


def _render_limit(term: TermResult) -> str:
    """Return the limit of a percentile as YAML keys, such as "limit: 2s, at: p95"."""
    return f"limit: {_render_duration(term.limit_ms)}, at: p{term.quantile * 100:g}"


def _render_duration(ms: float) -> str:
    """Return a duration in a unit that a contract accepts, such as "200ms" or "2s"."""
    return f"{ms / 1000:.12g}s" if ms >= 1000 else f"{ms:.12g}ms"
