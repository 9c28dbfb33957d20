"""The contract that holds a machine to what it was sized by: its share of the load, the SLO of its run. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from loadgen.core.metrics.goodput import TermResult
from loadgen.core.metrics.parts import ClassSummary
from loadgen.core.metrics.summary import Summary

if TYPE_CHECKING:
    from loadgen.cost.sizing import Size


def text(size: Size, summary: Summary, *, workload: str, gpus: int) -> str:
    """The YAML that `loadgen validate` takes: every limit that the run kept is one that the machine has to keep.

    workload: packaged, or its path relative to the contract. gpus: of a machine.
    """
    assert size.carrying, "machines were counted"
    terms = [*_terms(summary)]
    own = [f"slo: {{{', '.join(limits)}}}"] if (limits := [*_limits(summary)]) else []
    if not summary.goodput.slo:  # the workload's classes have limits of their own: they stand there
        terms += [term for part in summary.classes for term in _terms(part, part.name)]
        own = own if not summary.classes else []
    mark = ["# SIMULATED: its limits are of a performance model, not of a real server"]
    return "\n".join(
        [
            *(mark if summary.target.simulated else []),
            f"# one of {size.carrying} machines that carry the load; check it first: "
            "loadgen validate FILE --url URL --dry-run",
            f"name: {summary.run.workload}",
            f"gpus: {gpus}",
            *own,
            "levels:",
            "  - name: share",
            f"    workload: {workload}",
            f"    rate: {size.demand_per_s / size.carrying:.6g}/s",
            "    duration: auto",
            "    must:",
            *(f"      - {term}" for term in terms),
            "",
        ]
    )


def _terms(part: Summary | ClassSummary, name: str = "") -> Iterator[str]:
    """What was promised of a run, or of a class of it, as terms of a contract."""
    of = f", class: {name}" if name else ""
    for term in part.goodput.slo:
        yield f"{term.metric}: {{{_limit(term)}{of}}}"
    if part.goodput.share_limit is not None:
        yield f"goodput: {{share: {part.goodput.share_limit * 100:g}%{of}}}"
    if part.sessions is not None and part.sessions.goodput is not None:
        yield f"task_goodput: {{share: {part.sessions.goodput.share_limit * 100:g}%{of}}}"


def _limits(summary: Summary) -> Iterator[str]:
    """Yield the keys of the run's SLO as they are written in a workload or contract file."""
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
        known = {"within": tasks.within_ms, "wait": tasks.wait_ms}
        task_limits = "".join(
            f"{name}: {_time(value)}, " for name, value in known.items() if value is not None
        )
        yield f"task: {{{task_limits}attainment: {tasks.share_limit * 100:g}%}}"


def _limit(term: TermResult) -> str:
    return f"limit: {_time(term.limit_ms)}, at: p{term.quantile * 100:g}"


def _time(ms: float) -> str:
    return f"{ms / 1000:.12g}s" if ms >= 1000 else f"{ms:.12g}ms"
