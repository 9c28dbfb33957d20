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
    """Return the YAML of a contract that holds one machine to every limit of a run.

    Args:
        size: The machines. Each has to serve its share of the demand.
        summary: The run that the size follows from.
        workload: A packaged workload, or a path relative to the contract.
    """
    assert size.carrying, "machines were counted"
    terms = list(_terms(summary))
    limits = list(_limits(summary))
    if not summary.goodput.slo and summary.classes:
        # The request classes have limits of their own.
        terms += [term for part in summary.classes for term in _terms(part, part.name)]
        limits = []
    lines: list[str] = []
    if summary.target.simulated:
        lines.append("# SIMULATED: the limits come from a performance model, not a real server")
    lines += [
        f"# For one of {size.carrying} machines that serve the load. Check it first: "
        "loadgen validate FILE --url URL --dry-run",
        f"name: {summary.run.workload}",
        f"gpus: {size.gpus_per_machine}",
    ]
    if limits:
        lines.append(f"slo: {{{', '.join(limits)}}}")
    lines += [
        "levels:",
        "  - name: share",
        f"    workload: {workload}",
        f"    rate: {size.demand_per_s / size.carrying:.6g}/s",
        "    duration: auto",
        "    must:",
    ]
    lines += [f"      - {term}" for term in terms]
    return "\n".join(lines) + "\n"


def _terms(part: Summary | ClassSummary, class_name: str = "") -> Iterator[str]:
    """Yield the objectives of a run, or of one request class, as terms of a contract.

    For example `ttft: {limit: 2s, at: p95}`, with the name of the class if there is one.
    """
    suffix = f", class: {class_name}" if class_name else ""
    for term in part.goodput.slo:
        yield f"{term.metric}: {{{_limit(term)}{suffix}}}"
    if part.goodput.share_limit is not None:
        yield f"goodput: {{share: {part.goodput.share_limit * 100:g}%{suffix}}}"
    if part.sessions is not None and part.sessions.goodput is not None:
        yield f"task_goodput: {{share: {part.sessions.goodput.share_limit * 100:g}%{suffix}}}"


def _limits(summary: Summary) -> Iterator[str]:
    """Yield the keys of the run's SLO as they are written in a workload or contract file.

    Several percentiles of one metric are a list: `ttft: [{limit: 1s, at: p50}, ...]`.
    """
    limits_of_metric: dict[str, list[str]] = {}
    for term in summary.goodput.slo:
        limits_of_metric.setdefault(term.metric, []).append(f"{{{_limit(term)}}}")
    for metric, limits in limits_of_metric.items():
        all_limits = ", ".join(limits)
        yield f"{metric}: {all_limits if len(limits) == 1 else f'[{all_limits}]'}"
    if summary.goodput.share_limit is not None:
        yield f"attainment: {summary.goodput.share_limit * 100:g}%"
    tasks = summary.sessions.goodput if summary.sessions is not None else None
    if tasks is not None:
        task_limits = ""
        if tasks.within_ms is not None:
            task_limits += f"within: {_duration(tasks.within_ms)}, "
        if tasks.wait_ms is not None:
            task_limits += f"wait: {_duration(tasks.wait_ms)}, "
        yield f"task: {{{task_limits}attainment: {tasks.share_limit * 100:g}%}}"


def _limit(term: TermResult) -> str:
    return f"limit: {_duration(term.limit_ms)}, at: p{term.quantile * 100:g}"


def _duration(ms: float) -> str:
    return f"{ms / 1000:.12g}s" if ms >= 1000 else f"{ms:.12g}ms"
