"""Splits the difference of a latency: one definition after the other becomes that of the tool.

Pure. The order of the definitions is fixed, because a part depends on those before it: the requests
that count, what has one value, where the time starts, which event is the first token, where the
time ends, the tokens that it is divided by, how they are counted, and the rule of percentiles. Then
follow differences between the two runs: the length of responses, and the time that the client of
the other tool needed for sending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from loadgen.explain.other_result import OtherResult
from loadgen.explain.our_run import DefinedLatency, LoadgenRun
from loadgen.explain.parts import (
    ExplainedMetric,
    MetricName,
    MetricStep,
    PartName,
    combine_variation,
    find_last_value,
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


_ReplaceProperty = Callable[[LatencyDefinition, LatencyDefinition], LatencyDefinition]
"""Returns the first definition with one property of the second definition."""


class Redefinition(NamedTuple):
    """A latency after one more definition was replaced."""

    part: PartName
    latency: DefinedLatency


def explain_latencies(
    loadgen_run: LoadgenRun, other_result: OtherResult
) -> Iterator[ExplainedMetric]:
    """Yield each statistic of each latency that both results have, such as the p99 of TTFT."""
    for tool_latency in other_result.definitions.latencies:
        for statistic in STATISTICS:
            explained = _explain_statistic(loadgen_run, other_result, tool_latency, statistic)
            if explained is not None:
                yield explained


def list_withheld_latencies(loadgen_run: LoadgenRun, other_result: OtherResult) -> list[str]:
    """Return the labels of the latencies, such as "TTFT", that loadgen leaves out of its summary.

    A run leaves out a statistic that its timestamps are too coarse to support. One such statistic
    is enough for the latency to be listed.
    """
    labels = []
    for latency in other_result.definitions.latencies:
        has_withheld_statistic = any(
            _find_withheld_reason(loadgen_run, latency.name, statistic) for statistic in STATISTICS
        )
        if has_withheld_statistic:
            labels.append(LATENCY_LABELS[latency.name])
    return labels


class _LatencyChange(NamedTuple):
    """New values of some fields of a DefinedLatency, and the name of this change."""

    part: PartName
    fields: dict[str, Any]


def list_redefinitions(
    loadgen_definition: LatencyDefinition,
    other_definition: LatencyDefinition,
    *,
    counts_warm_up: bool,
    tokens: TokenRatio,
    percentiles: PercentileRule,
) -> list[Redefinition]:
    """Return a latency of loadgen after each change towards the definition of another tool.

    Changes are cumulative: each entry includes all earlier changes. A change without an effect is
    left out.

    Args:
        loadgen_definition: The definition of the latency in loadgen.
        other_definition: The definition of the latency in the other tool.
        counts_warm_up: Whether requests of loadgen's warm-up count.
        tokens: The token counts of the other tool, divided by the token counts of loadgen.
        percentiles: The rule by which the other tool computes percentiles.
    """
    token_scale = tokens.counting if other_definition.is_per_token else 1.0
    definition_changes = [
        _LatencyChange(changed.part, {"definition": changed.definition})
        for changed in _list_definitions(loadgen_definition, other_definition)
    ]
    changes = [
        _LatencyChange("warm_up", {"includes_warm_up": counts_warm_up}),
        *definition_changes,
        _LatencyChange("token_counts", {"token_scale": token_scale}),
        _LatencyChange("percentile_rule", {"percentiles": percentiles}),
        _LatencyChange("response_lengths", {"length_scale": tokens.length}),
    ]

    latency = DefinedLatency(loadgen_definition, percentiles=OWN_PERCENTILES)
    redefinitions = []
    for change in changes:
        changed_latency = latency._replace(**change.fields)
        if changed_latency != latency:
            redefinitions.append(Redefinition(change.part, changed_latency))
        latency = changed_latency
    return redefinitions


class _NamedDefinition(NamedTuple):
    """A definition, and which part of it was replaced last."""

    part: PartName
    definition: LatencyDefinition


def _list_definitions(
    loadgen_definition: LatencyDefinition, other_definition: LatencyDefinition
) -> Iterator[_NamedDefinition]:
    """Yield definitions of a latency that change step by step from loadgen's to another tool's.

    Each step replaces one property, and equal properties have no step. Example: loadgen measures
    TTFT from the scheduled time of a request, and the other tool measures from sending. The only
    step is "origin", which replaces the start.
    """
    # The order decides what is attributed to which property, so it is the same for all latencies.
    replacements: tuple[tuple[PartName, _ReplaceProperty], ...] = (
        ("aggregation", _replace_unit),
        ("origin", _start_at_sending),
        ("first_event", _replace_first_token_by_first_event),
        ("end", _replace_end),
        ("divided_tokens", _replace_divisor),
    )
    definition = loadgen_definition
    for part, replace_property in replacements:
        changed_definition = replace_property(definition, other_definition)
        if changed_definition != definition:
            yield _NamedDefinition(part, changed_definition)
        definition = changed_definition


def _replace_unit(definition: LatencyDefinition, other: LatencyDefinition) -> LatencyDefinition:
    """Return a definition whose sample has the unit of the other one, such as "request"."""
    if definition.unit == other.unit:
        return definition

    if definition.has_value_per_gap:
        # The times between the tokens of a request become one value, their mean.
        return _MEAN_PER_REQUEST._replace(unit=other.unit)
    return definition._replace(unit=other.unit)


def _start_at_sending(definition: LatencyDefinition, other: LatencyDefinition) -> LatencyDefinition:
    """Return a definition that starts when a request is sent, if the other tool's starts there."""
    return definition._replace(start="sent_ns") if other.start == "sent_ns" else definition


def _replace_first_token_by_first_event(
    definition: LatencyDefinition, other: LatencyDefinition
) -> LatencyDefinition:
    """Return a definition that uses the first event of a response if the other tool's does so.

    The first event, `role_event`, may carry only a role such as "assistant" and no token. Another
    tool may take it for the first token. Its TTFT then ends at this event, and its TPOT starts
    there. No definition does both.
    """
    if other.end == "role_event":
        return definition._replace(end="role_event")
    if other.start == "role_event":
        return definition._replace(start="role_event")
    return definition


def _replace_end(definition: LatencyDefinition, other: LatencyDefinition) -> LatencyDefinition:
    """Return a definition that ends at the timestamp of the other one."""
    return definition._replace(end=other.end)


def _replace_divisor(definition: LatencyDefinition, other: LatencyDefinition) -> LatencyDefinition:
    """Return a definition that divides by the same tokens as the other one."""
    return definition._replace(divisor=other.divisor)


def _explain_statistic(
    loadgen_run: LoadgenRun, other_result: OtherResult, tool_latency: ToolLatency, statistic: str
) -> ExplainedMetric | None:
    """Return why a statistic of a latency, such as p99, differs between loadgen and another tool.

    First, the definitions of loadgen are replaced by those of the other tool. What remains is how
    the server and the client differed between the two runs. Return None if one of the results does
    not have the statistic.
    """
    metric = f"{tool_latency.metric}.{statistic}"
    loadgen_value_ms = _find_loadgen_value(loadgen_run, tool_latency.name, statistic)
    other_value_ms = other_result.metrics.get(metric)
    if loadgen_value_ms is None or other_value_ms is None:
        return None

    redefined = _redefine_statistic(
        loadgen_run, other_result, tool_latency, statistic, loadgen_value_ms
    )
    run_steps = _list_run_steps(other_result, tool_latency, redefined, statistic)
    return split_difference(
        MetricName(metric, f"{LATENCY_LABELS[tool_latency.name]} {statistic}, ms"),
        loadgen_value_ms,
        redefined.definition_steps,
        other_value_ms,
        run_steps=[*redefined.length_steps, *run_steps],
        expected_variation=_estimate_variation(
            loadgen_run, other_result, redefined.latency, statistic
        ),
    )


def _find_loadgen_value(loadgen_run: LoadgenRun, name: LatencyName, statistic: str) -> float | None:
    """Return a statistic of a latency in ms by loadgen's own definition.

    Return None if the run leaves it out of its summary, or if no request has a value.
    """
    if _find_withheld_reason(loadgen_run, name, statistic):
        return None
    latency = DefinedLatency(OWN_LATENCIES[name], percentiles=OWN_PERCENTILES)
    return loadgen_run.compute_statistic(latency, statistic)


class _RedefinedStatistic(NamedTuple):
    """A statistic of a latency in loadgen's run, computed as the other tool computes it.

    Attributes:
        latency: How the other tool computes the latency.
        value_ms: The value in loadgen's run.
        definition_steps: The value after each replaced definition.
        length_steps: The value for responses as long as those to the other tool. Empty if the
            lengths are equal.
    """

    latency: DefinedLatency
    value_ms: float
    definition_steps: list[MetricStep]
    length_steps: list[MetricStep]


def _redefine_statistic(
    loadgen_run: LoadgenRun,
    other_result: OtherResult,
    tool_latency: ToolLatency,
    statistic: str,
    loadgen_value_ms: float,
) -> _RedefinedStatistic:
    """Return a statistic of loadgen's run by the definition of the other tool, with all steps.

    Args:
        loadgen_run: The run of loadgen.
        other_result: The result of the other tool.
        tool_latency: The latency.
        statistic: The statistic of the latency, such as "p99".
        loadgen_value_ms: The value by loadgen's own definition.
    """
    latency = DefinedLatency(OWN_LATENCIES[tool_latency.name], percentiles=OWN_PERCENTILES)
    redefinitions = _list_redefinitions_of_tool(loadgen_run, other_result, tool_latency)
    if redefinitions:
        latency = redefinitions[-1].latency

    steps = list(_compute_steps(loadgen_run, redefinitions, statistic))
    return _RedefinedStatistic(
        latency,
        find_last_value(steps, value_before=loadgen_value_ms),
        definition_steps=[step for step in steps if step.name != "response_lengths"],
        length_steps=[step for step in steps if step.name == "response_lengths"],
    )


def _list_redefinitions_of_tool(
    loadgen_run: LoadgenRun, other_result: OtherResult, tool_latency: ToolLatency
) -> list[Redefinition]:
    """Return the definitions of a latency from loadgen's to that of the tool that wrote a result.

    Each entry replaces one more property. If the other tool sent no warm-up, all its requests
    count, so those of loadgen's warm-up are included, too.
    """
    includes_warm_up = other_result.sent_no_warm_up and loadgen_run.has_warm_up
    return list_redefinitions(
        OWN_LATENCIES[tool_latency.name],
        tool_latency.definition,
        counts_warm_up=includes_warm_up,
        tokens=_find_tokens_of_latency(loadgen_run, other_result, tool_latency.definition),
        percentiles=other_result.definitions.percentiles,
    )


def _find_tokens_of_latency(
    loadgen_run: LoadgenRun, other_result: OtherResult, definition: LatencyDefinition
) -> TokenRatio:
    """Return the token counts that a latency depends on: the other tool's divided by loadgen's."""
    ratio = find_token_ratio(loadgen_run, other_result)
    if not definition.has_value_per_gap:
        return ratio
    # Times between events do not depend on token counts, unless the tool splits events into tokens.
    return ratio._replace(counting=other_result.tokens_per_chunk)


def _compute_steps(
    loadgen_run: LoadgenRun, redefinitions: list[Redefinition], statistic: str
) -> Iterator[MetricStep]:
    """Yield a statistic of loadgen's run, in ms, after each change of the latency's definition."""
    for redefinition in redefinitions:
        value_ms = loadgen_run.compute_statistic(redefinition.latency, statistic)
        if value_ms is not None:
            yield MetricStep(redefinition.part, value_ms)


def _list_run_steps(
    other_result: OtherResult,
    tool_latency: ToolLatency,
    redefined: _RedefinedStatistic,
    statistic: str,
) -> Iterator[MetricStep]:
    """Yield the steps from loadgen's value to the other tool's, if both use the same definition.

    What remains different are the server and the client of the two runs. Example: the value is
    100 ms in loadgen's run, and the other tool reports 106 ms. The server log of its run says
    103 ms, and its client needed 2 ms for sending. The steps are "server" 103, "client_send" 105
    and "client" 106. A step with an unknown value is left out. Without a log, the last step is
    unknown, too.

    Args:
        other_result: The result of the other tool.
        tool_latency: The latency.
        redefined: The statistic in loadgen's run by the definition of the other tool.
        statistic: The statistic of the latency, such as "p99".
    """
    server_times = other_result.server_times
    server_ms = None
    if server_times is not None:
        server_ms = server_times.compute_statistic(redefined.latency, statistic)
    if server_ms is not None:
        yield MetricStep("server", server_ms)

    client_send_ms = other_result.find_client_send_ms(tool_latency.name, statistic)
    if client_send_ms is not None:
        value_before_ms = redefined.value_ms if server_ms is None else server_ms
        yield MetricStep("client_send", value_before_ms + client_send_ms)

    if server_ms is not None:
        reported_ms = other_result.metrics[f"{tool_latency.metric}.{statistic}"]
        yield MetricStep("client", reported_ms)


def _estimate_variation(
    loadgen_run: LoadgenRun, other_result: OtherResult, latency: DefinedLatency, statistic: str
) -> float | None:
    """Return how far a statistic differs by chance between two runs of the same load, in ms.

    The number is half of the 95 % interval of the difference. Return None if it is not known.
    """
    standard_error_ms = loadgen_run.estimate_standard_error(latency, statistic)
    if standard_error_ms is None:
        return None

    loadgen_count = loadgen_run.count_successful(includes_warm_up=latency.includes_warm_up)
    other_count = other_result.metrics.get("requests.ok")
    return combine_variation(standard_error_ms, loadgen_count, other_count)


def _find_withheld_reason(loadgen_run: LoadgenRun, name: LatencyName, statistic: str) -> str:
    """Return why loadgen does not report a statistic of a latency, or "" if it does.

    For example, a run with coarse timestamps does not report the p99 of short latencies.
    """
    return loadgen_run.summary.withheld_reason(name, statistic)
