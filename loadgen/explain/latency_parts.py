"""Splits the difference of a latency: one definition after the other becomes that of the tool.

Pure. The order of the definitions is fixed, because a part depends on those before it: the requests
that count, what has one value, where the time starts, which event is the first token, where the
time ends, the tokens that it is divided by, how they are counted, and the rule of percentiles. Then
follow differences between the two runs: the length of responses, and the time that the client of
the other tool needed for sending.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from loadgen.explain.other_result import OtherResult
from loadgen.explain.our_run import DefinedLatency, OurRun
from loadgen.explain.parts import (
    ExplainedMetric,
    MetricName,
    MetricStep,
    PartName,
    combine_variation,
    split_difference,
)
from loadgen.explain.token_ratio import TokenRatio, find_token_ratio
from loadgen.interop.tool_definitions import (
    OWN_LATENCIES,
    OWN_PERCENTILES,
    LatencyDefinition,
    LatencyName,
    PercentileRule,
    ToolLatency,
)

STATISTICS = ("mean", "p50", "p90", "p99")

LATENCY_LABELS: dict[LatencyName, str] = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "inter_chunk": "inter-chunk latency",
    "e2e": "E2E latency",
}

_MEAN_PER_REQUEST = LatencyDefinition("first_token_ns", "last_token_ns", "tokens_after_first")
"""The mean time between the tokens of a request, which follows from its first and last token."""


class Redefinition(NamedTuple):
    """A latency after one more definition was replaced."""

    part: PartName
    latency: DefinedLatency


def explain_latencies(ours: OurRun, theirs: OtherResult) -> Iterator[ExplainedMetric]:
    """Yield each statistic of each latency that both results have."""
    for tool_latency in theirs.definitions.latencies:
        for statistic in STATISTICS:
            explained = _explain_statistic(ours, theirs, tool_latency, statistic)
            if explained is not None:
                yield explained


def list_withheld_latencies(ours: OurRun, theirs: OtherResult) -> list[str]:
    """Return the latencies that are not explained because our run withholds them."""
    return [
        LATENCY_LABELS[latency.name]
        for latency in theirs.definitions.latencies
        if any(_find_withheld_reason(ours, latency.name, statistic) for statistic in STATISTICS)
    ]


def list_redefinitions(
    our_definition: LatencyDefinition,
    their_definition: LatencyDefinition,
    *,
    counts_warm_up: bool,
    tokens: TokenRatio,
    percentiles: PercentileRule,
) -> list[Redefinition]:
    """Return our latency after each step in which it becomes more like that of the other tool.

    A step that changes nothing is left out. The order is fixed, see the module.

    Args:
        our_definition: Our definition of the latency.
        their_definition: That of the other tool.
        counts_warm_up: Whether the requests of our warm-up count, as those of the other tool do.
        tokens: How the token counts of the other result differ from ours.
        percentiles: How the other tool computes percentiles.
    """
    latency = DefinedLatency(our_definition, percentiles=OWN_PERCENTILES)
    redefinitions = []

    if counts_warm_up:
        latency = latency._replace(includes_warm_up=True)
        redefinitions.append(Redefinition("warm_up", latency))

    for part, definition in _list_definitions(our_definition, their_definition):
        latency = latency._replace(definition=definition)
        redefinitions.append(Redefinition(part, latency))

    is_per_token = their_definition.divisor is not None or their_definition.unit == "gap"
    if tokens.counting != 1.0 and is_per_token:
        latency = latency._replace(token_scale=tokens.counting)
        redefinitions.append(Redefinition("token_counts", latency))

    if percentiles != OWN_PERCENTILES:
        latency = latency._replace(percentiles=percentiles)
        redefinitions.append(Redefinition("percentile_rule", latency))

    if tokens.length != 1.0:
        latency = latency._replace(length_scale=tokens.length)
        redefinitions.append(Redefinition("response_lengths", latency))

    return redefinitions


class _NamedDefinition(NamedTuple):
    """A definition, and which part of it was replaced last."""

    part: PartName
    definition: LatencyDefinition


def _list_definitions(
    our_definition: LatencyDefinition, their_definition: LatencyDefinition
) -> Iterator[_NamedDefinition]:
    """Yield our definition after each change, until it is that of the other tool.

    Properties that are equal in both definitions have no step.
    """
    definition = our_definition
    if definition.unit != their_definition.unit:
        is_pooled = definition.unit == "gap"
        per_request = _MEAN_PER_REQUEST if is_pooled else definition
        definition = per_request._replace(unit=their_definition.unit)
        yield _NamedDefinition("aggregation", definition)

    if definition.start != their_definition.start and their_definition.start == "sent_ns":
        definition = definition._replace(start=their_definition.start)
        yield _NamedDefinition("origin", definition)

    # The role event replaces the first token, which is the end of a TTFT.
    if their_definition.end == "role_event":
        definition = definition._replace(end="role_event")
        yield _NamedDefinition("first_event", definition)

    # It is the start of a time between tokens.
    if their_definition.start == "role_event":
        definition = definition._replace(start="role_event")
        yield _NamedDefinition("first_event", definition)

    if definition.end != their_definition.end:
        definition = definition._replace(end=their_definition.end)
        yield _NamedDefinition("end", definition)

    if definition.divisor != their_definition.divisor:
        definition = definition._replace(divisor=their_definition.divisor)
        yield _NamedDefinition("divided_tokens", definition)


def _explain_statistic(
    ours: OurRun, theirs: OtherResult, tool_latency: ToolLatency, statistic: str
) -> ExplainedMetric | None:
    """Return one statistic of a latency in parts, or None if a result does not have it."""
    path = f"{tool_latency.metric}.{statistic}"
    their_value = theirs.metrics.get(path)
    if their_value is None or _find_withheld_reason(ours, tool_latency.name, statistic):
        return None

    our_definition = OWN_LATENCIES[tool_latency.name]
    own_latency = DefinedLatency(our_definition, percentiles=OWN_PERCENTILES)
    our_value = ours.compute_statistic(own_latency, statistic)
    if our_value is None:
        return None

    redefinitions = list_redefinitions(
        our_definition,
        tool_latency.definition,
        counts_warm_up=theirs.sent_no_warm_up and ours.has_warm_up,
        tokens=_find_tokens_of_latency(ours, theirs, tool_latency.definition),
        percentiles=theirs.definitions.percentiles,
    )
    final_latency = redefinitions[-1].latency if redefinitions else own_latency
    steps = list(_compute_steps(ours, redefinitions, statistic))
    final_value = steps[-1].value if steps else our_value
    run_steps = _list_run_steps(theirs, tool_latency, final_latency, statistic, final_value)

    return split_difference(
        MetricName(path, f"{LATENCY_LABELS[tool_latency.name]} {statistic}, ms"),
        our_value,
        [*steps, *run_steps],
        their_value,
        expected_variation=_estimate_variation(ours, theirs, final_latency, statistic),
        redefinition_steps=_count_definitions(steps),
    )


def _count_definitions(steps: list[MetricStep]) -> int:
    """Return how many steps replace a definition. Response lengths are a property of the runs."""
    return sum(step.name != "response_lengths" for step in steps)


def _find_tokens_of_latency(
    ours: OurRun, theirs: OtherResult, definition: LatencyDefinition
) -> TokenRatio:
    """Return how the tokens that a latency of the other tool depends on differ from ours."""
    ratio = find_token_ratio(ours, theirs)
    if definition.unit != "gap":
        return ratio
    # Times between events do not depend on token counts, unless the tool splits events into tokens.
    return ratio._replace(counting=theirs.tokens_per_chunk)


def _compute_steps(
    ours: OurRun, redefinitions: list[Redefinition], statistic: str
) -> Iterator[MetricStep]:
    """Yield the value of a statistic after each replaced definition."""
    for redefinition in redefinitions:
        value = ours.compute_statistic(redefinition.latency, statistic)
        if value is not None:
            yield MetricStep(redefinition.part, value)


def _list_run_steps(
    theirs: OtherResult,
    tool_latency: ToolLatency,
    redefined: DefinedLatency,
    statistic: str,
    value: float,
) -> Iterator[MetricStep]:
    """Yield the value after the server and the client of the other run replace ours.

    A step whose effect is not known is left out.

    Args:
        theirs: The other result.
        tool_latency: The latency.
        redefined: How the other tool computes the latency.
        statistic: The statistic of the latency, such as "p99".
        value: The value of our run by the definition of the other tool, in ms.
    """
    server_ms = None
    if theirs.server_times is not None:
        server_ms = theirs.server_times.compute_statistic(redefined, statistic)
    if server_ms is not None:
        yield MetricStep("server", server_ms)

    client_send_ms = theirs.find_client_send_ms(tool_latency.name, statistic)
    if client_send_ms is not None:
        before_sending_ms = value if server_ms is None else server_ms
        yield MetricStep("client_send", before_sending_ms + client_send_ms)

    if server_ms is not None:
        yield MetricStep("client", theirs.metrics[f"{tool_latency.metric}.{statistic}"])


def _estimate_variation(
    ours: OurRun, theirs: OtherResult, latency: DefinedLatency, statistic: str
) -> float | None:
    """Return half of the 95 % interval of the difference between two runs, or None if unknown."""
    standard_error_ms = ours.estimate_standard_error(latency, statistic)
    if standard_error_ms is None:
        return None
    our_count = ours.count_successful(includes_warm_up=latency.includes_warm_up)
    return combine_variation(standard_error_ms, our_count, theirs.metrics.get("requests.ok"))


def _find_withheld_reason(ours: OurRun, name: LatencyName, statistic: str) -> str:
    """Return why our run withholds a statistic of a latency, or "" if it does not.

    If events carry several tokens, our run has no ITL. The times between its events are used
    instead, which other tools call ITL then, too.
    """
    return ours.summary.withheld_reason(name, statistic)
