"""The fluidity index of a run and of its request classes: how many token deadlines were met.

Pure. `token_deadlines` counts the deadlines of each response and says who defined the index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from loadgen.core import format
from loadgen.core.limits import NO_SPAN_SHARE
from loadgen.core.metrics.goodput import combine_outcomes
from loadgen.core.metrics.outcomes import is_undecided
from loadgen.core.metrics.token_deadlines import (
    DeadlineCounts,
    DeadlineGroup,
    count_deadlines_of_groups,
)
from loadgen.core.slo import describe_fluidity_index
from loadgen.core.stats.quantiles import (
    milliseconds,
    needed_samples,
    quantile_index,
    quantile_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from loadgen.core.metrics.columns import Columns
    from loadgen.core.metrics.goodput import Goodput
    from loadgen.core.metrics.part_summaries import ClassSummary
    from loadgen.core.metrics.request_counts import RequestCounts
    from loadgen.core.results.gaps import RequestGaps
    from loadgen.core.slo import FluidityTerm, Slo, TokenDeadlines

NO_TOKEN_TIMES = (
    "the times between output events of each request were not stored. A run with --slo fluidity or "
    "--keep gaps stores them"
)
NO_STREAM = "the responses were not streamed, so their tokens have no times"
NO_RESPONSES = "no successful response has known token times"
RUN_SCOPE = ""
"""The name of the requests of a run, among those of its request classes. No class is named so."""
REQUIRED_METRICS = ("ttft", "tokens", "tpot", "inter_chunk")
"""The fluidity index rests on these metrics. It is withheld if one of them is."""


class FluidityObjective(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the objective `fluidity` of an SLO.

    Attributes:
        quantile: The fraction of the requests that must reach the index.
        limit: The smallest index, as a fraction.
        value: The index that this fraction of the requests reached. Failed requests count as 0.
            None if it is not known.
        met: Whether the objective is met. None if that is undecided, or the run is not valid.
        below: Requests with a smaller index, failed requests included.
        count: Requests with an index, and failed requests.
        needed: The number of requests from which the percentile is supported.
        supported: Whether there are so many.
        undecided: Why it is undecided, else "".
    """

    quantile: float
    limit: float
    value: float | None = None
    met: bool | None = None
    below: int = 0
    count: int = 0
    needed: int
    supported: bool = False
    undecided: str = ""

    @property
    def text(self) -> str:
        """The objective as users write it, such as `Fluidity index p99 at least 90 %`."""
        return describe_fluidity_index(self.quantile, self.limit)


class Fluidity(msgspec.Struct, frozen=True, kw_only=True):
    """How many token deadlines the successful responses of a run or of a request class met.

    The percentiles are about the requests: `p95` is the index that 95 % of them reached.

    Attributes:
        first_token_ms: The deadline of the first token, from the scheduled time of the request.
        per_token_ms: The time that each later token adds to the deadline.
        requests: The responses whose token times are known.
        deadlines: Their token deadlines.
        missed: The deadlines that they missed.
        index: The fraction of all deadlines that were met. None without any.
        mean: The mean of the index of each request.
        min: The smallest index of a request.
        p50: The index that 50 % of the requests reached, and so on.
        p90: For 90 %.
        p95: For 95 %.
        p99: For 99 %.
        absent: Why there is no index, else "".
        objective: The result of the objective of the SLO, None if it has none.
    """

    first_token_ms: float
    per_token_ms: float
    requests: int = 0
    deadlines: int = 0
    missed: int = 0
    index: float | None = None
    mean: float | None = None
    min: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    absent: str = ""
    objective: FluidityObjective | None = None


class FluidityScope(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that one SLO applies to: those of a run, or those of a request class.

    Attributes:
        slo: The SLO. It may set token deadlines, and an objective for the fluidity index.
        stages: The measured records, by stage.
        requests: The numbers of measured requests by outcome.
    """

    slo: Slo
    stages: Sequence[Columns]
    requests: RequestCounts

    @property
    def has_objective(self) -> bool:
        """Whether the SLO has an objective for the fluidity index."""
        return self.slo.fluidity is not None


class FluidityInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run from which its fluidity index is computed.

    Attributes:
        scopes: The requests of each request class that has an SLO, by the name of the class. Those
            of the run have the name RUN_SCOPE.
        gaps: The times between the output events of each request, None if they were not stored.
        is_streamed: Whether the responses were streamed.
        withheld_metrics: The metrics that the run withholds, with the reason.
    """

    scopes: Mapping[str, FluidityScope]
    gaps: Iterable[RequestGaps] | None
    is_streamed: bool
    withheld_metrics: Mapping[str, str]


def measure_fluidity(inputs: FluidityInputs) -> dict[str, Fluidity]:
    """Return the fluidity index of a run and of its request classes, by the name of the scope.

    The fluidity index is the fraction of token deadlines that were met. A token deadline is the
    time by which an output token has to arrive. A scope is the run or one of its request classes.
    It is left out if its SLO sets no deadlines, or if it has neither token times nor an objective
    for the index. A result without an index states the reason.
    """
    deadline_groups = _list_deadline_groups(inputs.scopes)

    absent_reason = _find_reason_without_index(inputs)
    if absent_reason or inputs.gaps is None:
        return _explain_absent_indices(inputs, deadline_groups, absent_reason)

    groups = list(deadline_groups.values())
    counts_of_groups = count_deadlines_of_groups(groups, inputs.gaps)

    fluidity_by_scope = {}
    for (name, group), counts in zip(deadline_groups.items(), counts_of_groups, strict=True):
        scope = inputs.scopes[name]
        has_responses = len(counts.slots) > 0
        if has_responses or scope.has_objective:
            fluidity_by_scope[name] = _summarize_counts(scope, group.deadlines, counts)
    return fluidity_by_scope


def _explain_absent_indices(
    inputs: FluidityInputs, deadline_groups: Mapping[str, DeadlineGroup], reason: str
) -> dict[str, Fluidity]:
    """Return a result without a fluidity index for each scope of a run, with the reason.

    A scope is the run or one of its request classes. If no token times were stored, only the scopes
    with an objective for the index need the reason, and the others are left out.
    """
    has_token_times = inputs.gaps is not None

    fluidity_by_scope = {}
    for name, group in deadline_groups.items():
        scope = inputs.scopes[name]
        if has_token_times or scope.has_objective:
            fluidity_by_scope[name] = _without_index(group.deadlines, scope.slo.fluidity, reason)
    return fluidity_by_scope


def _list_deadline_groups(scopes: Mapping[str, FluidityScope]) -> dict[str, DeadlineGroup]:
    """Return the records and the token deadlines of each scope whose SLO sets deadlines."""
    groups = {}
    for name, scope in scopes.items():
        deadlines = scope.slo.find_token_deadlines()
        if deadlines is not None:
            groups[name] = DeadlineGroup(scope.stages, deadlines)
    return groups


def include_fluidity_outcome(goodput: Goodput, fluidity: Fluidity | None) -> Goodput:
    """Return the goodput of a run or class with an outcome that includes its fluidity objective.

    The SLO is met if the terms on single requests and the fluidity objective are met. If the SLO
    has no terms on single requests, the fluidity objective alone decides. The goodput is returned
    unchanged if there is no such objective.
    """
    if fluidity is None or fluidity.objective is None:
        return goodput

    outcomes = [fluidity.objective.met]
    if goodput.has_any_slo:
        outcomes.append(goodput.met)
    return msgspec.structs.replace(goodput, met=combine_outcomes(outcomes))


def combine_class_outcomes(classes: Sequence[ClassSummary]) -> bool | None:
    """Return whether every request class with an SLO meets it, None if that is undecided.

    It is undecided if no class misses its SLO, but the outcome of one is undecided. Return None,
    too, if no class has an SLO.
    """
    outcomes = []
    for request_class in classes:
        fluidity = request_class.fluidity
        has_objective = fluidity is not None and fluidity.objective is not None
        if request_class.goodput.has_any_slo or has_objective:
            outcomes.append(request_class.goodput.met)
    return combine_outcomes(outcomes) if outcomes else None


def _find_reason_without_index(inputs: FluidityInputs) -> str:
    """Return why the token deadlines of a run cannot be judged, or "" if they can.

    The deadlines need streamed responses, token times and the metrics of REQUIRED_METRICS.
    """
    if not inputs.is_streamed:
        return NO_STREAM
    if inputs.gaps is None:
        return NO_TOKEN_TIMES

    for metric in REQUIRED_METRICS:
        if metric in inputs.withheld_metrics:
            return inputs.withheld_metrics[metric]
    return ""


def _without_index(
    deadlines: TokenDeadlines, objective: FluidityTerm | None, reason: str
) -> Fluidity:
    """Return the result of a run or request class without a fluidity index, with the reason.

    If its SLO has an objective for the index, the objective is undecided.
    """
    return Fluidity(
        first_token_ms=milliseconds(deadlines.first_token_ns),
        per_token_ms=milliseconds(deadlines.per_token_ns),
        absent=reason,
        objective=None if objective is None else _undecided_objective(objective, reason),
    )


def _undecided_objective(objective: FluidityTerm, reason: str) -> FluidityObjective:
    """Return the result of an objective that is neither met nor missed, with the reason."""
    return FluidityObjective(
        quantile=objective.quantile,
        limit=objective.least_index,
        needed=needed_samples(objective.quantile),
        undecided=reason,
    )


def _summarize_counts(
    scope: FluidityScope, deadlines: TokenDeadlines, counts: DeadlineCounts
) -> Fluidity:
    """Return the fluidity index of all requests together, and its percentiles over requests.

    The fluidity index is the fraction of token deadlines that were met.

    Args:
        scope: The SLO of the requests, and their numbers by outcome.
        deadlines: The time limits of the first token and of each later token.
        counts: The deadlines and missed deadlines of each response.
    """
    indices = counts.indices
    has_responses = len(indices) > 0

    total_deadlines = int(counts.deadlines.sum())
    missed_deadlines = int(counts.missed.sum())
    met_deadlines = total_deadlines - missed_deadlines
    overall_index = met_deadlines / total_deadlines if total_deadlines else None

    objective = scope.slo.fluidity
    judged_objective = None
    if objective is not None:
        judged_objective = _judge_objective(objective, indices, scope.requests)

    return Fluidity(
        # The limits.
        first_token_ms=milliseconds(deadlines.first_token_ns),
        per_token_ms=milliseconds(deadlines.per_token_ns),
        # All requests together.
        requests=len(indices),
        deadlines=total_deadlines,
        missed=missed_deadlines,
        index=overall_index,
        # The index of each request.
        mean=float(indices.mean()) if has_responses else None,
        min=float(indices.min()) if has_responses else None,
        p50=_index_reached_by(indices, 0.5),
        p90=_index_reached_by(indices, 0.9),
        p95=_index_reached_by(indices, 0.95),
        p99=_index_reached_by(indices, 0.99),
        # The verdict.
        absent="" if has_responses else NO_RESPONSES,
        objective=judged_objective,
    )


def _index_reached_by(indices: NDArray[np.float64], fraction: float) -> float | None:
    """Return the fluidity index that a fraction of the requests reached, None without requests.

    The fluidity index of a request is the fraction of its token deadlines that were met. For a
    fraction of 0.95, the result is the index that 95 % of the requests reached or exceeded.
    """
    if len(indices) == 0:
        return None

    # A quantile is a value that a fraction of the values does not exceed. Here, the fraction of the
    # values does not fall below it, so the signs are changed before and after.
    quantile_of_negative = quantile_of(-indices, fraction)
    return -quantile_of_negative


def _judge_objective(
    objective: FluidityTerm, indices: NDArray[np.float64], requests: RequestCounts
) -> FluidityObjective:
    """Return whether enough requests reached the fluidity index that an SLO requires.

    An objective of 90 % at p95 is met if 95 % of the requests met at least 90 % of their token
    deadlines. A failed, dropped or lost request counts as one with the index 0. Unfinished requests
    and responses without known token times do not count.

    Args:
        objective: The required index (`least_index`) and the percentile (`quantile`).
        indices: The index of each response whose token times are known.
        requests: The numbers of requests by outcome.
    """
    failed_count = requests.failed + requests.dropped + requests.lost
    indices_with_failures = np.concatenate([indices, np.zeros(failed_count)])
    count = len(indices_with_failures)

    # How many requests are below the required index, and how many reached it.
    responses_below = int((indices < objective.least_index).sum())
    below_count = responses_below + failed_count
    reached_count = count - below_count

    # The request at the percentile, counted from the best one, has to reach the required index.
    undecided_reason = _find_reason_not_to_judge(len(indices), failed_count, requests)
    is_met = None
    if count > 0 and not undecided_reason:
        position_of_percentile = quantile_index(count, objective.quantile)
        is_met = position_of_percentile < reached_count

    needed_count = needed_samples(objective.quantile)
    return FluidityObjective(
        # The objective.
        quantile=objective.quantile,
        limit=objective.least_index,
        # The requests.
        count=count,
        below=below_count,
        needed=needed_count,
        supported=count >= needed_count,
        # The index that the required fraction of the requests reached, and the verdict.
        value=_index_reached_by(indices_with_failures, objective.quantile),
        met=is_met,
        undecided=undecided_reason,
    )


def _find_reason_not_to_judge(known_count: int, failed_count: int, requests: RequestCounts) -> str:
    """Return why the fluidity objective of an SLO cannot be judged, or "" if it can.

    Args:
        known_count: The number of successful responses whose token times are known.
        failed_count: The number of requests that failed, were dropped or were lost.
        requests: The numbers of requests by outcome.
    """
    if known_count + failed_count == 0:
        return NO_RESPONSES

    unfinished_count = requests.unfinished
    started_count = requests.ok + failed_count + unfinished_count
    if is_undecided(unfinished_count, started_count):
        return (
            "too many requests were unfinished when the drain ended. Use a longer --grace, or none"
        )

    unknown_count = requests.ok - known_count
    most_unknown = NO_SPAN_SHARE * requests.ok
    if unknown_count > most_unknown:
        responses = format.counted(unknown_count, "successful response")
        return f"the token times of {responses} are not known"
    return ""
