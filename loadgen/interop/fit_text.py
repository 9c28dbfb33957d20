"""The report of `loadgen fit`: which distributions describe a trace, and how well each one fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from loadgen.core import format
from loadgen.core.units import NS_PER_S
from loadgen.interop.distribution_fits import DistributionFit
from loadgen.interop.fit_conversations import ConversationFit
from loadgen.interop.trace_fit import ClassFit, TraceFit
from loadgen.render.table import wrap_text

LABEL_WIDTH = 15
NOTABLE_RANK_CORRELATION = 0.1
"""A weaker correlation between input and output length is not worth a sentence."""


def render_fit(fitted: TraceFit) -> list[str]:
    """Return the lines of the report of `loadgen fit`, which fits a workload to a trace.

    The report describes the trace, the distributions that were fitted to its arrivals and lengths,
    how well each of them fits, and what of the trace the workload does not have. The first of the
    fits of a quantity is the one that the workload uses.
    """
    return [
        _render_trace(fitted),
        *_render_timestamps(fitted),
        *_render_row("Arrivals", _describe_arrivals(fitted)),
        *_render_fits(fitted.arrivals.gaps),
        *_render_row("Input tokens", _describe_length(fitted.input_tokens[0])),
        *_render_fits(fitted.input_tokens),
        *_render_row("Output tokens", _describe_length(fitted.output_tokens[0])),
        *_render_fits(fitted.output_tokens),
        *_render_classes(fitted.classes),
        *_render_labelled_rows("Not modelled", list(_describe_losses(fitted))),
    ]


def fit_to_json(fitted: TraceFit, workload: str) -> dict[str, Any]:
    """Return the report as a JSON object, with the text of the workload file."""
    return {
        "trace": str(fitted.trace.path),
        "format": fitted.trace.format,
        "requests": len(fitted.trace),
        "duration_s": fitted.trace.end_ns / NS_PER_S,
        "bad_rows": fitted.trace.bad_rows,
        "rates": list(fitted.arrivals.rates_per_s),
        "by_the_hour": fitted.arrivals.is_hourly,
        "fits": {
            "arrivals": _distributions_to_json(fitted.arrivals.gaps),
            "input_tokens": _distributions_to_json(fitted.input_tokens),
            "output_tokens": _distributions_to_json(fitted.output_tokens),
        },
        "rank_correlation": fitted.length_correlation,
        "reused_share": fitted.reused_share,
        "sessions": fitted.sessions,
        "conversations": fitted.conversations,
        "conversations_lost": fitted.conversations_lost_reason,
        "conversations_of_subagents": fitted.subagents,
        "classes": [
            {
                "name": request_class.name,
                "requests": request_class.requests,
                "starts": request_class.arrivals,
                "talk": request_class.conversations is not None,
            }
            for request_class in fitted.classes
        ],
        "workload": workload,
    }


def _distributions_to_json(fits: Sequence[DistributionFit]) -> list[dict[str, Any]]:
    """Return fits as JSON objects, the one that the workload uses first."""
    return [
        {
            "law": fit.distribution,
            "parameters": fit.parameters,
            "distance": fit.ks_distance,
            "critical": fit.critical_distance,
            "fits": fit.is_good,
        }
        for fit in fits
    ]


def _render_row(label: str, text: str) -> list[str]:
    """Return a label and its text, wrapped to the width of a report."""
    return wrap_text(text, f"{label:{LABEL_WIDTH}}", " " * LABEL_WIDTH)


def _render_labelled_rows(label: str, texts: Sequence[str]) -> list[str]:
    """Return one row for each text. Only the first row has the label."""
    lines: list[str] = []
    for index, text in enumerate(texts):
        lines += _render_row(label if index == 0 else "", text)
    return lines


def _render_trace(fitted: TraceFit) -> str:
    trace = fitted.trace
    return (
        f"{trace.path.name}: {trace.format}, {format.counted(len(trace), 'request')} in "
        f"{format.duration(trace.end_ns / NS_PER_S)} ({trace.rate:.4g} req/s)"
    )


def _render_timestamps(fitted: TraceFit) -> list[str]:
    """Return a row with the unit that was assumed for the times of the trace, and why.

    There is none if the format of the trace defines the unit.
    """
    if not fitted.trace.time_unit:
        return []
    return _render_row("Timestamps", f"read as {fitted.trace.time_unit}")


def _describe_arrivals(fitted: TraceFit) -> str:
    """Return the arrival process that the workload uses, and its rate or range of hourly rates."""
    best_fit = fitted.arrivals.gaps[0]
    process = best_fit.distribution
    if process != "poisson":
        process = f"gamma with burstiness {best_fit.parameters['burstiness']:g}"

    rates_per_s = fitted.arrivals.rates_per_s
    if fitted.arrivals.is_hourly:
        return (
            f"{process}, with a rate for each of {len(rates_per_s)} hours, "
            f"from {min(rates_per_s):.4g}/s to {max(rates_per_s):.4g}/s"
        )

    [rate_per_s] = rates_per_s
    if fitted.conversations:
        return (
            f"{process}, at a constant {rate_per_s:.4g}/s, "
            "where a conversation counts as one arrival"
        )

    return f"{process}, at a constant {rate_per_s:.4g} req/s"


def _describe_length(fit: DistributionFit) -> str:
    """Return a distribution and its parameters, for example `uniform, min 5, max 64`."""
    if fit.distribution == "empirical":
        count = len(fit.parameters["values"])
        return f"empirical: {count} values from the trace, because no standard distribution fits"
    parameters = [f"{name} {value:g}" for name, value in fit.parameters.items()]
    return ", ".join([fit.distribution, *parameters])


def _render_fits(fits: Sequence[DistributionFit]) -> list[str]:
    """Return how well the chosen distribution fits, and the distances of the alternatives."""
    chosen, *alternatives = fits
    lines = _render_row("", _describe_goodness(chosen))
    if alternatives:
        distances = ", ".join(f"{fit.distribution} {fit.ks_distance:.3f}" for fit in alternatives)
        lines += _render_row("", f"KS distance of the alternatives: {distances}")
    return lines


def _describe_goodness(fit: DistributionFit) -> str:
    """Return the Kolmogorov-Smirnov distance of a distribution and what it means."""
    numbers = (
        f"Kolmogorov-Smirnov (KS) distance {fit.ks_distance:.3f}, limit {fit.critical_distance:.3f}"
    )
    if fit.is_good:
        return f"good fit: {numbers}"
    if fit.distribution == "empirical":
        return f"approximate: {numbers}, because only a sample of the values is kept"

    return f"poor fit: {numbers}; it misplaces up to {fit.ks_distance * 100:.0f} % of the requests"


def _render_classes(classes: Sequence[ClassFit]) -> list[str]:
    """Return a row for each class of requests of the workload."""
    return _render_labelled_rows(
        "Classes",
        [
            f"{request_class.name}: {format.counted(request_class.requests, 'request')}; "
            f"{_describe_class_lengths(request_class)}"
            for request_class in classes
        ],
    )


def _describe_class_lengths(request_class: ClassFit) -> str:
    """Return the distributions of a class: of its conversations, or of its single requests."""
    output = f"output tokens: {_describe_length(request_class.output_tokens[0])}"
    if request_class.conversations is not None:
        conversations = _describe_conversations(request_class.conversations, request_class.arrivals)
        return f"{conversations}; {output}"
    return f"input tokens: {_describe_length(request_class.input_tokens[0])}; {output}"


def _describe_conversations(conversations: ConversationFit, count: int) -> str:
    """Return the number of conversations, and the four distributions that describe them."""
    first = _describe_length(conversations.first_input_tokens[0])
    later = _describe_length(conversations.later_requests[0])
    added = _describe_length(conversations.added_tokens[0])
    pause = _describe_length(conversations.think_ms[0])

    return (
        f"{format.counted(count, 'conversation')}; "
        f"input tokens of the first request: {first}; "
        f"requests after the first: {later}; "
        f"tokens of each new message: {added}; "
        f"pause before it in ms: {pause}"
    )


def _describe_losses(fitted: TraceFit) -> Iterator[str]:
    """Yield a text for each property of the trace that the workload does not reproduce.

    The texts follow the label "Not modelled", so each one begins with the name of the property, for
    example "The correlation of input and output lengths", and ends with what the workload does.
    """
    if abs(fitted.length_correlation) >= NOTABLE_RANK_CORRELATION:
        yield (
            f"The correlation of input and output lengths (rank correlation "
            f"{fitted.length_correlation:.2f}). The workload draws them independently."
        )

    if fitted.arrivals.clock_step_ns:
        clock_step_s = fitted.arrivals.clock_step_ns / NS_PER_S
        yield (
            f"The spacing of requests within {clock_step_s:g} s. "
            "The times of the trace are multiples of this step."
        )

    if fitted.prefixes:
        yield _describe_lost_prefixes(fitted)

    if fitted.conversations_lost_reason:
        yield (
            f"{format.counted(fitted.sessions, 'conversation')}. Every request is independent "
            f"in the workload, because {fitted.conversations_lost_reason}."
        )

    if fitted.subagents:
        subagents = format.counted(fitted.subagents, "sub-agent conversation")
        yield f"The link of {subagents} to its agent. Each starts on its own in the workload."

    if fitted.trace.bad_rows:
        yield (
            f"{format.counted(fitted.trace.bad_rows, 'row')} that could not be read. "
            f"The first one: {fitted.trace.first_error}"
        )


def _describe_lost_prefixes(fitted: TraceFit) -> str:
    """Return a text about the prefixes that prompts of the trace share.

    A workload cannot say which prompts share a prefix. For requests on their own it has a cache hit
    rate instead, which reproduces how many tokens are shared. In a conversation, each prompt begins
    with the one before it, but conversations share nothing.
    """
    repeated = f"{fitted.reused_share * 100:.0f} % of the prompt tokens repeat an earlier prefix"
    if _has_cache_hit_rate(fitted):
        return (
            f"Which prompts share a prefix. In the trace, {repeated}; "
            "the workload requests the same cache hit rate."
        )

    return (
        f"Prefixes that are shared between conversations. In the trace, {repeated}; "
        "the workload shares prefixes only within a conversation."
    )


def _has_cache_hit_rate(fitted: TraceFit) -> bool:
    """Return True if the workload has a cache hit rate, given that the trace shares prefixes.

    Only requests outside conversations have one. A trace without classes has only such requests.
    """
    if not fitted.classes:
        return True
    return any(
        request_class.conversations is None and request_class.prefixes > 0
        for request_class in fitted.classes
    )
