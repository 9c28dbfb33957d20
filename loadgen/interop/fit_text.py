"""How well a workload fits the trace that it was made from, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadgen.core import format
from loadgen.interop.fit import ClassFit, TraceFit
from loadgen.interop.laws import Fit

WIDTH = 14


def words(fitted: TraceFit) -> list[str]:
    """Return the lines of the report."""
    trace = fitted.trace
    lines = [
        f"{trace.path.name}: {trace.format}, {format.counted(len(trace), 'request')} in "
        f"{format.duration(trace.end_ns / 1e9)}, {trace.rate:.4g} per second",
        *([f"{'times':{WIDTH}}read as {trace.time_unit}"] if trace.time_unit else []),
        f"{'arrivals':{WIDTH}}{_arrivals(fitted)}",
        *_compared(fitted.gaps),
        f"{'input tokens':{WIDTH}}{_length(fitted.input_tokens[0])}",
        *_compared(fitted.input_tokens),
        f"{'output tokens':{WIDTH}}{_length(fitted.output_tokens[0])}",
        *_compared(fitted.output_tokens),
        *_classes(fitted),
    ]
    return [*lines, *(f"{'not kept':{WIDTH}}{lost}" for lost in _lost(fitted))]


def data(fitted: TraceFit, workload: str) -> dict[str, Any]:
    """The same for programs."""
    quantities = {
        "arrivals": fitted.gaps,
        "input_tokens": fitted.input_tokens,
        "output_tokens": fitted.output_tokens,
    }
    return {
        "trace": str(fitted.trace.path),
        "format": fitted.trace.format,
        "requests": len(fitted.trace),
        "duration_s": fitted.trace.end_ns / 1e9,
        "bad_rows": fitted.trace.bad_rows,
        "rates": list(fitted.rates),
        "by_the_hour": fitted.by_the_hour,
        "fits": {
            name: [
                {
                    "law": fit.law,
                    "parameters": fit.parameters,
                    "distance": fit.distance,
                    "critical": fit.critical,
                    "fits": fit.fits,
                }
                for fit in fits
            ]
            for name, fits in quantities.items()
        },
        "rank_correlation": fitted.correlation,
        "reused_share": fitted.reused,
        "sessions": fitted.sessions,
        "conversations": fitted.conversations,
        "conversations_lost": fitted.lost,
        "conversations_of_subagents": fitted.beside,
        "classes": [
            {
                "name": part.name,
                "requests": part.requests,
                "starts": part.starts,
                "talk": part.talk is not None,
            }
            for part in fitted.classes
        ],
        "workload": workload,
    }


def _arrivals(fitted: TraceFit) -> str:
    gap = fitted.gaps[0]
    law = (
        "poisson" if gap.law == "poisson" else f"gamma, burstiness {gap.parameters['burstiness']:g}"
    )
    if not fitted.by_the_hour:
        of = " of conversations and single requests" if fitted.conversations else ""
        return f"{law}, {fitted.rates[0]:.4g}/s{of} all the time"
    return f"{law}, a rate for each of {len(fitted.rates)} hours, {min(fitted.rates):.4g}/s to {max(fitted.rates):.4g}/s"


def _length(fit: Fit) -> str:
    if fit.law == "empirical":
        return f"empirical, {len(fit.parameters['values'])} values of the trace: no law fits"
    return ", ".join([fit.law, *(f"{name} {value:g}" for name, value in fit.parameters.items())])


def _classes(fitted: TraceFit) -> list[str]:
    """A line for each kind of request."""
    names = ["classes", *[""] * len(fitted.classes)]
    return [
        f"{name:{WIDTH}}{part.name}: {format.counted(part.requests, 'request')}, {_lengths(part)}"
        for name, part in zip(names, fitted.classes, strict=False)
    ]


def _lengths(part: ClassFit) -> str:
    output = f"output {_length(part.output_tokens[0])}"
    if part.talk is None:
        return f"input {_length(part.input_tokens[0])}; {output}"
    talk = part.talk
    pause = f"pause in ms {_length(talk.think_ms[0])}"
    return (
        f"of {format.counted(part.starts, 'conversation')}; first input {_length(talk.first[0])}; requests after it "
        f"{_length(talk.later[0])}; each adds {_length(talk.added[0])}; {output}; {pause}"
    )


def _compared(fits: Sequence[Fit]) -> list[str]:
    """What the distance of the chosen law says, and the others'."""
    chosen, *others = fits
    known = f"distance {chosen.distance:.3f}, the critical value is {chosen.critical:.3f}"
    if chosen.fits:
        said = "the trace cannot be told from it"
    elif chosen.law == "empirical":
        said = "as near as so few values are"
    else:
        said = f"the trace is not of this law: up to {chosen.distance * 100:.0f} % of requests are elsewhere"
    lines = [f"{'':{WIDTH}}{known}: {said}"]
    if others:
        lines.append(
            f"{'':{WIDTH}}other laws: {', '.join(f'{fit.law} {fit.distance:.3f}' for fit in others)}"
        )
    return lines


def _lost(fitted: TraceFit) -> list[str]:
    found = []
    if abs(fitted.correlation) >= 0.1:
        found.append(
            f"input and output go together (rank correlation {fitted.correlation:.2f}), and are drawn apart"
        )
    if fitted.step_ns:
        found.append(
            f"times in steps of {fitted.step_ns / 1e9:g} s: how requests come within a step is not in the trace"
        )
    if fitted.prefixes:
        asks = not fitted.classes or any(
            part.prefixes and part.talk is None for part in fitted.classes
        )
        instead = (
            "asks for that share of the cache" if asks else "shares only within its conversations"
        )
        found.append(
            f"which prompts share what: {fitted.reused * 100:.0f} % of prompt tokens came before, and the workload "
            f"{instead}"
        )
    if fitted.lost:
        found.append(
            f"{format.counted(fitted.sessions, 'conversation')}: every request stands alone: {fitted.lost}"
        )
    if fitted.beside:
        found.append(
            f"{format.counted(fitted.beside, 'conversation')} of sub-agents: each begins on its own, not in its agent's"
        )
    if fitted.trace.bad_rows:
        found.append(
            f"{format.counted(fitted.trace.bad_rows, 'bad row')}, the first {fitted.trace.first_bad}"
        )
    return found
