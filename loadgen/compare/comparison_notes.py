"""The notes of a comparison: differences between the sides that do not prevent it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from loadgen.compare.accepted_lengths import list_accepted_length_notes
from loadgen.compare.work_differences import (
    describe_slo,
    describe_slo_of_requests,
    describe_token_deadlines,
)
from loadgen.core import format
from loadgen.core.limits import CACHED_SHARE
from loadgen.core.metrics.reasons import STATES, join_reasons
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
"""Facts that a note states if they differ between sides, each with a function that reads a run.

A function returns a set of values because a run may have several targets.
"""


def list_notes(sides: Sequence[Side]) -> list[str]:
    """Return the differences that a reader should know, and the warnings about the runs."""
    return [
        *(note for side in sides for note in _list_side_notes(side)),
        *_list_fact_notes(sides),
        *_list_slo_notes(sides),
        *_list_seed_notes(sides),
        *_list_cache_notes(sides),
        *list_accepted_length_notes(sides),
    ]


def describe_scope(sides: Sequence[Side]) -> str:
    """Return which variation the outcomes of the comparison take into account.

    A single run only shows how much the server varies over time. Another start of the same server
    may differ by more, which only repeated runs show.
    """
    if any(side.reported_metrics for side in sides):
        return "Not judged: results of other tools have no records."
    if all(len(side.runs) > 1 for side in sides):
        return "Variation between repeated runs."

    single_runs = [side.name for side in sides if len(side.runs) < 2]
    subject = "One run per side"
    if len(single_runs) < len(sides):
        subject = f"Only one run of {' and '.join(single_runs)}"

    return (
        f"{subject}: run-to-run variation unknown, so the outcomes are about these runs only. To "
        "compare the servers, measure each side with `loadgen run --repeat 3` and compare again."
    )


def format_run_label(side: Side, run: ComparedRun) -> str:
    """Return the name of a run, with the name of its side."""
    return side.name if len(side.runs) == 1 else f"{side.name}/{run.name}"


def _list_side_notes(side: Side) -> Iterator[str]:
    """Yield the notes on a side: its own, metrics that it does not have, and those on its runs."""
    for note in side.notes:
        yield f"{side.name}: {note}"
    missing = _list_missing_metrics(side)
    if missing:
        yield f"{side.name} does not report: {'; '.join(missing)}"
    for run in side.runs:
        yield from _list_run_notes(format_run_label(side, run), run)


def _list_missing_metrics(side: Side) -> list[str]:
    """Return the names of metrics that another tool did not report."""
    if not side.reported_metrics:
        return []

    names = []
    for path in (*comparable_metrics.default_metric_paths(), *OTHER_TOOL_METRICS):
        metric = find_metric(path)
        if metric is not None and path not in side.reported_metrics:
            names.append(metric.name)

    return names


def _list_run_notes(label: str, run: ComparedRun) -> Iterator[str]:
    """Yield why a run may not show what its server can do.

    It may be invalid, have warnings, have been stopped, or have one node that stands out.
    """
    summary = run.summary
    verdict = summary.verdict
    if not verdict.valid:
        yield f"{label} is INVALID: {join_reasons(verdict.reasons)}"

    for caveat in verdict.caveats:
        yield f"{label}: {caveat}"

    for node in summary.node_differences.outliers:
        yield (
            f"{label}: {node.name} is an outlier, {node.metric.upper()} {node.change:+.1%} vs. the "
            f"other {summary.node_differences.node_kind}s"
        )

    state = summary.run.state
    if state != "finished":
        yield f"{label}: {STATES.get(state, state)}"

    if run.rows is None:
        yield f"{label} has no records, only a summary, so its metrics are not judged"


def _list_fact_notes(sides: Sequence[Side]) -> Iterator[str]:
    """Yield each fact that differs, such as "different models: llama-8b vs. llama-70b".

    A side has several values of a fact if its runs differ in it. Sides without runs are left out,
    because the results of other tools do not state these facts.
    """
    sides_with_runs = [side for side in sides if side.runs]
    for fact_name, get_values in _FACTS.items():
        values_by_side: list[set[str]] = []
        for side in sides_with_runs:
            values: set[str] = set()
            for run in side.runs:
                values |= get_values(run)
            values_by_side.append(values)

        has_difference = any(values != values_by_side[0] for values in values_by_side[1:])
        if has_difference:
            texts = ["/".join(sorted(values)) or "none" for values in values_by_side]
            yield f"different {fact_name}: {' vs. '.join(texts)}"


def _list_slo_notes(sides: Sequence[Side]) -> Iterator[str]:
    """Yield that the SLOs of the sides differ, or their token deadlines, if they do."""
    slos = [describe_slo(side) or "none" for side in sides if side.runs]
    if len(set(slos)) > 1:
        slos_of_requests = {describe_slo_of_requests(side) for side in sides if side.runs}
        is_attainment_compared = len(slos_of_requests) == 1
        consequence = "" if is_attainment_compared else "; SLO attainment is not compared"
        yield f"different SLOs: {' vs. '.join(slos)}{consequence}"

    deadlines = [describe_token_deadlines(side) for side in sides]
    known_deadlines = [text for text in deadlines if text]
    if len(set(known_deadlines)) > 1:
        versus = " vs. ".join(known_deadlines)
        yield f"different token deadlines: {versus}; the fluidity index is not compared"


def _list_seed_notes(sides: Sequence[Side]) -> Iterator[str]:
    """Yield whether the runs had different seeds, which fix lengths, arrivals and prompts."""
    summaries = [run.summary for side in sides for run in side.runs]
    seeds = [summary.run.seed for summary in summaries if summary.run.seed is not None]
    if len(seeds) < 2:
        return

    if len(set(seeds)) > 1:
        yield "Seeds differ (intended); the intervals include it."
    else:
        yield _describe_same_seed(summaries)


def _describe_same_seed(summaries: Sequence[Summary]) -> str:
    """Return what equal seeds mean for the runs.

    The texts of prompts depend on the seed and the salt. Equal texts may be in the prefix cache of
    a server that both sides used.
    """
    prompts = {summary.fingerprints.prompts for summary in summaries}
    if len(prompts) == 1 and "" not in prompts:
        return (
            "Same seed and salt: the prompts are equal, so the prefix cache may "
            "already hold them. Use --salt fresh for one of the runs."
        )
    if len({summary.run.salt for summary in summaries}) > 1:
        return "Same seed, different salts: equal lengths and arrivals, different texts."

    return "Same seed: equal lengths and arrivals."


def _list_cache_notes(sides: Sequence[Side]) -> Iterator[str]:
    """Yield that the prefix cache hit rates of the runs differ, if they do."""
    hit_rates = [
        run.summary.tokens.cached_share
        for side in sides
        for run in side.runs
        if run.summary.tokens.cached_share is not None
    ]
    if hit_rates and max(hit_rates) - min(hit_rates) > CACHED_SHARE:
        lowest = f"{min(hit_rates) * 100:.1f} %"
        highest = f"{max(hit_rates) * 100:.1f} %"
        yield f"Prefix cache hit rates differ: {lowest} to {highest}."
