"""The workload file that `loadgen fit` writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

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
        lines += ["requests:", *_indent(_render_requests(_fit_of_all_requests(fit)), 2)]
    lines += ["stages:", *_indent(_render_stages(fit.arrivals), 2)]
    return "\n".join(lines) + "\n"


def _fit_of_all_requests(fit: TraceFit) -> RequestFit:
    """Return the distributions of all requests of a trace that has at most one class.

    A single class is preferred to the fit of the trace, because only a class can have
    conversations.
    """
    return fit.classes[0] if fit.classes else fit


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
    """Return the YAML lines below `requests`: a conversation of steps, or one request's lengths."""
    if isinstance(fit, ClassFit) and fit.conversations is not None:
        return _render_steps(fit.conversations, fit.output_tokens)

    lines = [
        f"input_tokens: {_render_best(fit.input_tokens)}",
        f"output_tokens: {_render_best(fit.output_tokens)}",
    ]
    if fit.prefixes:
        lines += [
            f"prefixes: {fit.prefixes}",
            f"cache: {{hit_rate: {fit.reused_share * 100:.3g}%}}",
        ]

    return lines


def _render_steps(
    conversations: ConversationFit, output_tokens: Sequence[DistributionFit]
) -> list[str]:
    """Return the YAML lines of a conversation: a step for its first request, one for all later.

    The second step is repeated (`turns`). Its `input_tokens` are those that each request adds to
    the conversation, and its `think_time` is the pause of the user before the request.

    Args:
        conversations: The distributions of the conversations.
        output_tokens: The distributions of the response lengths, the best one first.
    """
    first_step = {
        "input_tokens": _render_best(conversations.first_input_tokens),
        "output_tokens": _render_best(output_tokens),
    }
    later_step = {
        "after": "first",
        "turns": _render_best(conversations.later_requests),
        "input_tokens": _render_best(conversations.added_tokens),
        "output_tokens": _render_best(output_tokens),
        "think_time": _render_best_duration(conversations.think_ms),
    }

    return [
        "steps:",
        f"  first: {_flow_mapping(first_step)}",
        f"  later: {_flow_mapping(later_step)}",
    ]


def _render_best(fits: Sequence[DistributionFit]) -> str:
    """Return the distribution of a quantity that the workload uses: the first of its fits."""
    best_fit = fits[0]
    return _render_distribution(best_fit)


def _render_best_duration(fits_ms: Sequence[DistributionFit]) -> str:
    """Return the first of several distributions of durations in ms."""
    best_fit = fits_ms[0]
    return _render_duration(best_fit)


def _render_stages(arrivals: ArrivalFit) -> list[str]:
    """Return a load stage for each rate. Stages are named if there is one for each hour."""
    lines = []
    for hour, (rate_per_s, stage_ns) in enumerate(
        zip(arrivals.rates_per_s, arrivals.stage_ns, strict=True)
    ):
        # The format of durations has no unit below 1 ms.
        duration_s = math.ceil(stage_ns / UNIT_NS["ms"]) / 1000
        stage = {"name": f"hour-{hour:02d}"} if arrivals.is_hourly else {}
        stage["arrival"] = _render_arrival(arrivals.gaps[0], rate_per_s)
        stage["duration"] = f"{duration_s:.10g}s"
        lines.append(f"- {_flow_mapping(stage)}")

    return lines


def _render_arrival(gap_fit: DistributionFit, rate_per_s: float) -> str:
    """Return an arrival process as a workload file has it, for example `{poisson: 20/s}`."""
    # Low rates would get an exponent, which the format of rates does not have.
    digits = ".6g" if rate_per_s >= LOW_RATE_PER_S else ".10f"
    rate = f"{rate_per_s:{digits}}/s"
    if gap_fit.distribution != "gamma":
        return _flow_mapping({"poisson": rate})
    burstiness = f"{gap_fit.parameters['burstiness']:g}"
    return _flow_mapping({"gamma": _flow_mapping({"rate": rate, "burstiness": burstiness})})


def _render_distribution(fit: DistributionFit) -> str:
    """Return a distribution as a workload file has it, for example `{uniform: {min: 1, max: 9}}`.

    A fixed value is only the number.
    """
    if fit.distribution == "fixed":
        return json.dumps(fit.parameters["value"])
    return _flow_mapping({fit.distribution: _render_parameters(fit.parameters)})


def _render_duration(fit: DistributionFit) -> str:
    """Return a distribution of milliseconds as a workload file has it, with the unit of each value.

    For example, `{uniform: {min: 1, max: 9}}` becomes `{uniform: {min: "1ms", max: "9ms"}}`.
    """
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

    return _flow_mapping({fit.distribution: _render_parameters(durations)})


def _render_parameters(parameters: Parameters) -> str:
    """Return the parameters of a distribution in one line."""
    return _flow_mapping(
        {
            name: f"{value:g}" if isinstance(value, float) else json.dumps(value)
            for name, value in parameters.items()
        }
    )


def _flow_mapping(items: Mapping[str, str]) -> str:
    """Return a mapping in one line, in YAML's flow style, for example `{min: 1, max: 9}`."""
    return "{" + ", ".join(f"{name}: {value}" for name, value in items.items()) + "}"


def _indent(lines: list[str], spaces: int) -> list[str]:
    return [" " * spaces + line for line in lines]
