"""The fluidity index of a run and its classes: its report section, and texts about objectives.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from loadgen.core import format
from loadgen.core.metrics.summary import Summary
from loadgen.core.slo import describe_deadlines
from loadgen.render.section import Paragraph, Section, Table, section

if TYPE_CHECKING:
    from loadgen.core.metrics.fluidity import Fluidity, FluidityObjective
    from loadgen.core.metrics.part_summaries import ClassSummary
    from loadgen.render.section import Part

LEGEND = (
    "The fluidity index is the share of token deadlines that were met (Etalon, arXiv 2407.07000). "
    "An early token leaves slack for later ones. A late token misses one deadline for each TPOT "
    "deadline that passed, and the deadlines after it start anew. Tokens of one event arrive at "
    "the same time."
)
PERCENTILES = ("p50", "p90", "p95", "p99")

FLOAT_ERROR = 1e-9
"""More than the error of a product of two floating-point numbers up to 1,000."""


class ScopeObjective(NamedTuple):
    """A fluidity objective, and the request class whose SLO has it, or "" for that of the run."""

    class_name: str
    objective: FluidityObjective


def list_fluidity_objectives(summary: Summary) -> Iterator[ScopeObjective]:
    """Yield the results of the objectives for the fluidity index in the SLOs of a run.

    The SLO of the run takes precedence. If the run has none, the objectives are those in the SLOs
    of its request classes.
    """
    run_objective = find_fluidity_objective(summary)
    if run_objective is not None:
        yield ScopeObjective("", run_objective)
        return

    has_slo_of_run = bool(summary.goodput.slo)
    if has_slo_of_run:
        return

    for request_class in summary.classes:
        objective = find_fluidity_objective(request_class)
        if objective is not None:
            yield ScopeObjective(request_class.name, objective)


def build_fluidity_sections(summary: Summary) -> Iterator[Section]:
    """Yield the report section about token deadlines.

    A token deadline is the time by which an output token has to arrive. Nothing is yielded if
    neither the run nor any of its request classes has token deadlines.
    """
    fluidity = summary.fluidity
    class_table = _classes_table(summary)
    has_deadlines = fluidity is not None or bool(class_table.rows)
    if not has_deadlines:
        return

    parts_of_run: list[Part] = []
    if fluidity is not None:
        parts_of_run = [*_deadline_paragraphs(fluidity), _statistics_table(fluidity)]

    legend = Paragraph(LEGEND, "soft")
    yield section("Token deadlines", *parts_of_run, class_table, legend, id="fluidity")


def _deadline_paragraphs(fluidity: Fluidity) -> Iterator[Paragraph]:
    """Yield the token deadlines of a run, and a warning if they could not be judged."""
    yield Paragraph(_describe_deadlines(fluidity))

    reason_without_index = fluidity.absent
    if reason_without_index:
        yield Paragraph(f"There is no fluidity index: {reason_without_index}.", "warn")


def _classes_table(summary: Summary) -> Table:
    """Return a table with the token deadlines and the fluidity index of each request class.

    It has no rows if no class has deadlines. A percentile is the index that this percentage of the
    requests of the class reached.
    """
    head = (
        "class",
        "first token (ms)",
        "each later token (ms)",
        "missed deadlines",
        "fluidity index",
        *PERCENTILES,
        "lowest",
    )
    rows = []
    for request_class in summary.classes:
        fluidity = request_class.fluidity
        if fluidity is not None:
            rows.append((request_class.name, *_class_cells(fluidity)))
    return Table(head, rows)


def _class_cells(fluidity: Fluidity) -> tuple[str, ...]:
    """Return the cells of a request class, without its name, in the table of all classes."""
    has_index = fluidity.index is not None
    missed = format.NONE
    if has_index:
        missed = f"{format.count(fluidity.missed)} of {format.count(fluidity.deadlines)}"

    percentiles = [format_index(getattr(fluidity, percentile)) for percentile in PERCENTILES]
    return (
        format.quantity(fluidity.first_token_ms),
        format.quantity(fluidity.per_token_ms),
        missed,
        format_index(fluidity.index),
        *percentiles,
        format_index(fluidity.min),
    )


def _describe_deadlines(fluidity: Fluidity) -> str:
    """Return the time limits of tokens, and how many tokens missed their limits, as sentences."""
    deadlines = (
        f"First token within {format.quantity(fluidity.first_token_ms)} ms, "
        f"and each later one within {format.quantity(fluidity.per_token_ms)} ms more."
    )
    if fluidity.index is None:
        return deadlines

    missed = format.count(fluidity.missed)
    total = format.counted(fluidity.deadlines, "token deadline")
    responses = format.counted(fluidity.requests, "response")
    return f"{deadlines} Missed: {missed} of {total} in {responses}."


def _statistics_table(fluidity: Fluidity) -> Table:
    """Return a table with the fluidity index (share of token deadlines met) and its percentiles.

    A percentile such as p95 is the index that 95 % of the requests reached.
    """
    head = ("fluidity index", "all tokens", "mean of requests", *PERCENTILES, "lowest")
    if fluidity.index is None:
        return Table(head, ())

    percentiles = [format_index(getattr(fluidity, percentile)) for percentile in PERCENTILES]
    cells = (
        "reached by that share of requests",
        format_index(fluidity.index),
        format_index(fluidity.mean),
        *percentiles,
        format_index(fluidity.min),
    )
    return Table(head, [cells])


def format_index(index: float | None) -> str:
    """Return a fluidity index as a percentage with at most one decimal: 0.9997 is `99.9 %`.

    An index is rounded down, so that an index below a limit never looks as if it had reached it. An
    index that is not known is shown as a dash.
    """
    if index is None:
        return format.NONE

    # A product such as 989.9999999999999 is 990 with an error of floating-point arithmetic.
    tenths_of_percent = math.floor(index * 1000 + FLOAT_ERROR)
    return f"{tenths_of_percent / 10:g} %"


def find_fluidity_objective(scope: Summary | ClassSummary) -> FluidityObjective | None:
    """Return the result of the objective for the fluidity index, or None if the SLO has none."""
    return None if scope.fluidity is None else scope.fluidity.objective


def describe_fluidity_objective(scope: Summary | ClassSummary) -> str:
    """Return the objective for token deadlines with the deadlines, or "" if there is none.

    The deadlines are, for example, "deadlines 2,000 ms, then 50 ms per token": the first token has
    to arrive within 2,000 ms, and the deadline of each later one is 50 ms after that of the token
    before it.
    """
    fluidity = scope.fluidity
    if fluidity is None or fluidity.objective is None:
        return ""

    deadlines = describe_deadlines(fluidity.first_token_ms, fluidity.per_token_ms)
    return f"{fluidity.objective.text} ({deadlines})"


def format_measured_index(objective: FluidityObjective) -> str:
    """Return the fluidity index that the required share of requests reached: `97 %`.

    A `~` before it means that the run has too few requests for this share.
    """
    if objective.undecided or objective.value is None:
        return "not measured"
    mark = "" if objective.supported else "~"
    return f"{mark}{format_index(objective.value)}"


def count_requests_below(objective: FluidityObjective) -> str:
    """Return how many requests have a smaller index than the objective requires: `3 of 1,500`."""
    return f"{format.count(objective.below)} of {format.count(objective.count)}"


def describe_class_objective(objective: FluidityObjective) -> str:
    """Return an objective of a class with its value: `Fluidity index p95 at least 90 %: 97 %`."""
    result = objective.undecided or format_measured_index(objective)
    return f"{objective.text}: {result}"


def describe_missed_index(objective: FluidityObjective) -> str:
    """Return a missed objective with its numbers.

    For example: `Fluidity index p95 is 85 %, limit 90 % (9 of 99 requests below)`.
    """
    name = f"Fluidity index p{objective.quantile * 100:g}"
    limit = f"{objective.limit * 100:g} %"
    requests = count_requests_below(objective)
    return f"{name} is {format_index(objective.value)}, limit {limit} ({requests} requests below)"


def describe_fluidity_result(objective: FluidityObjective) -> str:
    """Return whether an SLO is met whose only objective is the fluidity index, as a sentence."""
    if objective.met is None:
        return f"SLO undecided: {objective.text}: {objective.undecided}."
    if not objective.met:
        return f"SLO missed: {describe_missed_index(objective)}."
    return f"SLO met: {objective.text}, and it is {format_index(objective.value)}."
