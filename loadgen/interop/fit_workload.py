"""The workload file that `loadgen fit` writes."""

from __future__ import annotations

import json
import math

from loadgen.core.units import UNIT_NS
from loadgen.interop.distribution_fits import DistributionFit, Parameters
from loadgen.interop.fit_conversations import ConversationFit
from loadgen.interop.trace_fit import ArrivalFit, ClassFit, RequestFit, TraceFit

LOW_RATE_PER_S = 1e-4
"""Python writes lower rates with an exponent, which the workload format does not read."""
PARAMETERS_WITHOUT_UNIT = ("sigma", "weights")
"""Parameters that are no durations where a distribution is one of durations."""


def render_workload(fit: TraceFit, name: str) -> str:
    """Return the workload file in YAML, without comments.

    It has a section for each class of requests, or one for all requests, and the load stages.
    """
    lines = [f"name: {json.dumps(name)}"]
    if len(fit.classes) > 1:
        lines += _render_classes(fit.classes)
    else:
        requests = fit.classes[0] if fit.classes else fit
        lines += ["requests:", *_indent(_render_requests(requests), 2)]
    lines += ["stages:", *_indent(_render_stages(fit.arrivals), 2)]
    return "\n".join(lines) + "\n"


def _render_classes(classes: tuple[ClassFit, ...]) -> list[str]:
    """Return the section with the classes. Their weights are their shares of all arrivals."""
    arrivals = sum(request_class.arrivals for request_class in classes)
    lines = ["classes:"]
    for request_class in classes:
        weight = request_class.arrivals / arrivals * 100
        lines += [
            f"  {request_class.name}:",
            f"    weight: {weight:.6g}%",
            "    requests:",
            *_indent(_render_requests(request_class), 6),
        ]
    return lines


def _render_requests(fit: RequestFit) -> list[str]:
    """Return the keys below `requests`: a conversation of steps, or the lengths of one request."""
    if isinstance(fit, ClassFit) and fit.conversations is not None:
        return _render_steps(fit.conversations, fit.output_tokens[0])
    lines = [
        f"input_tokens: {_render_distribution(fit.input_tokens[0])}",
        f"output_tokens: {_render_distribution(fit.output_tokens[0])}",
    ]
    if fit.prefixes:
        lines += [
            f"prefixes: {fit.prefixes}",
            f"cache: {{hit_rate: {fit.reused_share * 100:.3g}%}}",
        ]
    return lines


def _render_steps(conversations: ConversationFit, output_tokens: DistributionFit) -> list[str]:
    """Return the two steps of a conversation: its first request, and all later ones."""
    output = f"output_tokens: {_render_distribution(output_tokens)}"
    first_input = _render_distribution(conversations.first_input_tokens[0])
    turns = _render_distribution(conversations.later_requests[0])
    later_input = _render_distribution(conversations.added_tokens[0])
    think_time = _render_duration(conversations.think_ms[0])
    return [
        "steps:",
        f"  first: {{input_tokens: {first_input}, {output}}}",
        f"  later: {{after: first, turns: {turns}, input_tokens: {later_input}, {output}, "
        f"think_time: {think_time}}}",
    ]


def _render_stages(arrivals: ArrivalFit) -> list[str]:
    """Return a load stage for each rate. Stages are named if there is one for each hour."""
    process = arrivals.gaps[0]
    lines = []
    for hour, (rate_per_s, stage_ns) in enumerate(
        zip(arrivals.rates_per_s, arrivals.stage_ns, strict=True)
    ):
        rate = f"{rate_per_s:.6g}/s" if rate_per_s >= LOW_RATE_PER_S else f"{rate_per_s:.10f}/s"
        arrival = f"{{poisson: {rate}}}"
        if process.distribution == "gamma":
            burstiness = process.parameters["burstiness"]
            arrival = f"{{gamma: {{rate: {rate}, burstiness: {burstiness:g}}}}}"
        # The format of durations has no unit below 1 ms.
        duration_s = math.ceil(stage_ns / UNIT_NS["ms"]) / 1000
        name = f"name: hour-{hour:02d}, " if arrivals.is_hourly else ""
        lines.append(f"- {{{name}arrival: {arrival}, duration: {duration_s:.10g}s}}")
    return lines


def _render_distribution(fit: DistributionFit) -> str:
    """Return a distribution as a workload file has it, for example `{uniform: {min: 1, max: 9}}`.

    A fixed value is only the number.
    """
    if fit.distribution == "fixed":
        return json.dumps(fit.parameters["value"])
    return f"{{{fit.distribution}: {_render_parameters(fit.parameters)}}}"


def _render_duration(fit: DistributionFit) -> str:
    """Return a distribution of whole milliseconds as one of durations, whose values have a unit."""
    durations: Parameters = {}
    for name, value in fit.parameters.items():
        if name in PARAMETERS_WITHOUT_UNIT:
            durations[name] = value
        elif isinstance(value, list):
            durations[name] = [f"{item}ms" for item in value]
        else:
            durations[name] = f"{value:g}ms"
    if fit.distribution == "fixed":
        return json.dumps(durations["value"])
    return f"{{{fit.distribution}: {_render_parameters(durations)}}}"


def _render_parameters(parameters: Parameters) -> str:
    """Return a mapping in one line, in YAML's flow style."""
    items = []
    for name, value in parameters.items():
        text = f"{value:g}" if isinstance(value, float) else json.dumps(value)
        items.append(f"{name}: {text}")
    return "{" + ", ".join(items) + "}"


def _indent(lines: list[str], spaces: int) -> list[str]:
    return [" " * spaces + line for line in lines]
