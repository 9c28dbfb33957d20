"""The notes beside a comparison: what differs between the sides without forbidding it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from loadgen.compare.work_differences import describe_slo
from loadgen.core import format
from loadgen.core.limits import CACHED_SHARE
from loadgen.core.metrics.reasons import STATES
from loadgen.core.metrics.summary import Summary
from loadgen.repeated import comparable_metrics
from loadgen.repeated.comparable_metrics import find_metric
from loadgen.runs.comparison_side import ComparedRun, Side

OTHER_TOOL_METRICS = ("tokens.output_per_s", "load.completed_rps")
"""Metrics that are compared in addition if a side is the result of another tool."""

_FACTS: dict[str, Callable[[ComparedRun], set[str]]] = {
    "models": lambda run: {run.summary.target.model},
    "versions of loadgen": lambda run: {run.summary.run.version},
    "regions": lambda run: {target.region for target in run.targets},
    "software": lambda run: {", ".join(run.summary.target.software)},
    "metadata": lambda run: {format.pairs(dict(sorted(run.summary.run.metadata.items())))},
}
"""Facts of a run that are named if they differ between sides."""


def comparison_notes(sides: Sequence[Side]) -> list[str]:
    """Return what a reader should know that does not forbid the comparison."""
    return [
        *(note for side in sides for note in _side_notes(side)),
        *_fact_notes(sides),
        *_slo_notes(sides),
        *_seed_notes(sides),
        *_cache_notes(sides),
    ]


def describe_scope(sides: Sequence[Side]) -> str:
    """Return what the outcomes of the comparison hold for."""
    if any(side.reported_metrics for side in sides):
        return (
            "another tool's figures stand without records: differences are shown, and cannot be "
            "judged"
        )
    if all(len(side.runs) > 1 for side in sides):
        return "by repeated runs on every side"
    single_runs = [side.name for side in sides if len(side.runs) < 2]
    return (
        f"by blocks of time within these runs: one run of {' and '.join(single_runs)}. What "
        "another start of the server would show, they cannot tell: no word of better or worse. "
        "Repeats can: loadgen run ... --repeat 3"
    )


def run_label(side: Side, run: ComparedRun) -> str:
    """Return the name of a run, with the name of its side."""
    return side.name if len(side.runs) == 1 else f"{side.name}/{run.name}"


def _side_notes(side: Side) -> Iterator[str]:
    for note in side.notes:
        yield f"{side.name}: {note}"
    missing = _missing_metrics(side)
    if missing:
        yield f"{side.name} does not say: {'; '.join(missing)}"
    for run in side.runs:
        yield from _run_notes(run_label(side, run), run)


def _missing_metrics(side: Side) -> list[str]:
    """Return the names of metrics that another tool did not report."""
    if not side.reported_metrics:
        return []
    names = []
    for path in (*comparable_metrics.default_metric_paths(), *OTHER_TOOL_METRICS):
        metric = find_metric(path)
        if metric is not None and path not in side.reported_metrics:
            names.append(metric.name)
    return names


def _run_notes(label: str, run: ComparedRun) -> Iterator[str]:
    """Yield why a run may not show what its server can do.

    It may be invalid, have warnings, have been stopped, or have one node that stands out.
    """
    summary = run.summary
    verdict = summary.verdict
    if not verdict.valid:
        yield f"{label} is not valid: {'; '.join(verdict.reasons)}"
    for caveat in verdict.caveats:
        yield f"{label}: {caveat}"
    for node in summary.node_differences.outliers:
        yield (
            f"{label}: {node.name} stands out, {node.metric.upper()} {node.change:+.1%} against "
            f"the other {summary.node_differences.compared}s"
        )
    state = summary.run.state
    if state != "finished":
        yield f"{label}: {STATES.get(state, state)}"
    if run.rows is None:
        yield f"{label} has no records, only a summary: nothing can be told from it alone"


def _fact_notes(sides: Sequence[Side]) -> Iterator[str]:
    """Yield each fact that differs, such as "different model: llama-8b against llama-70b".

    A side has several values of a fact if its runs differ in it. Sides without runs are left out,
    because the results of other tools do not state these facts.
    """
    for subject, values_of_run in _FACTS.items():
        values_by_side = [
            set().union(*map(values_of_run, side.runs)) for side in sides if side.runs
        ]
        if any(values != values_by_side[0] for values in values_by_side[1:]):
            texts = ["/".join(sorted(values)) or "none" for values in values_by_side]
            yield f"different {subject}: {' against '.join(texts)}"


def _slo_notes(sides: Sequence[Side]) -> Iterator[str]:
    slos = [describe_slo(side) or "none" for side in sides if side.runs]
    if len(set(slos)) > 1:
        yield f"different SLOs: {' against '.join(slos)}; what meets them is not compared"


def _seed_notes(sides: Sequence[Side]) -> Iterator[str]:
    """Yield whether the runs had different seeds, which fix lengths, arrivals and prompts."""
    summaries = [run.summary for side in sides for run in side.runs]
    seeds = [summary.run.seed for summary in summaries if summary.run.seed is not None]
    if len(seeds) < 2:
        return
    if len(set(seeds)) > 1:
        yield "seeds differ, as they should: the chance of the draw is inside the intervals"
    else:
        yield _describe_same_seed(summaries)


def _describe_same_seed(summaries: Sequence[Summary]) -> str:
    """Return what equal seeds mean for the runs.

    The texts of prompts depend on the seed and the salt. Equal texts may be in the prefix cache of
    a server that both sides used.
    """
    prompts = {summary.fingerprints.prompts for summary in summaries}
    if len(prompts) == 1 and "" not in prompts:
        return "the seed is the same: equal prompts, a prefix cache may remember them"
    if len({summary.run.salt for summary in summaries}) > 1:
        return "the seed is the same, the salt is not: equal lengths and arrivals, other texts"
    return "the seed is the same: equal lengths and arrivals"


def _cache_notes(sides: Sequence[Side]) -> Iterator[str]:
    """Yield that the runs found different shares of their prompts in prefix caches, if they did."""
    shares = [
        run.summary.tokens.cached_share
        for side in sides
        for run in side.runs
        if run.summary.tokens.cached_share is not None
    ]
    if shares and max(shares) - min(shares) > CACHED_SHARE:
        yield (
            f"shares of cached prompt tokens differ: {min(shares) * 100:.1f} % to "
            f"{max(shares) * 100:.1f} %"
        )
