"""A workload fitted to a trace: arrivals and lengths as laws, how good each is, and what no law keeps.

Pure. The words about it are in `report/fit.py`.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.core import format, units
from loadgen.core.errors import UserError
from loadgen.core.stats import fitting
from loadgen.core.stats.fitting import Fit
from loadgen.core.workload.traces import Trace

LEAST = 20  # requests: below, a fit says nothing
HOUR_NS = units.UNIT_NS["h"]
NO_RATE = 1e-6  # requests per second of an hour without any


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFit:
    """The requests of one label of the trace, or of the labels that are too rare for laws of their own."""

    name: str
    requests: int
    input_tokens: tuple[Fit, ...]
    output_tokens: tuple[Fit, ...]
    reused: float
    prefixes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFit:
    """What was fitted. Lists of fits: the chosen one first, then the others."""

    trace: Trace
    rates: tuple[float, ...]  # requests per second: of the whole trace, or of each hour if it varies
    stage_ns: tuple[int, ...]
    gaps: tuple[Fit, ...]
    input_tokens: tuple[Fit, ...]
    output_tokens: tuple[Fit, ...]
    step_ns: int  # the times of the trace are multiples of this; 0: of none that matters
    correlation: float  # of the ranks of input and output
    reused: float  # share of prompt tokens that an endless cache would know
    prefixes: int  # beginnings that several prompts have
    sessions: int
    classes: tuple[ClassFit, ...] = ()  # where the trace has labels: all its requests, by label

    @property
    def by_the_hour(self) -> bool:
        return len(self.rates) > 1


def fit(trace: Trace) -> TraceFit:
    """Raises UserError for a trace with too few requests, or with no time between them."""
    if len(trace) < LEAST or not trace.end_ns:
        problem = format.counted(len(trace), "request") if len(trace) < LEAST else "all requests at the same time"
        raise UserError(
            "too_few", f"nothing can be fitted to {problem}", str(trace.path), f"a trace of {LEAST} requests or more"
        )
    hour = trace.due_ns // HOUR_NS
    counts = np.bincount(hour)
    spans_ns = np.full(len(counts), HOUR_NS)
    spans_ns[-1] = trace.end_ns - (len(counts) - 1) * HOUR_NS
    whole = counts[:-1] if len(counts) > 1 and spans_ns[-1] < HOUR_NS else counts
    within = _gaps(trace, hour, counts / spans_ns)
    hourly = len(counts) > 1 and fitting.varies(
        whole.tolist(), float(within.var()) / max(float(within.mean()), 1e-9) ** 2
    )
    if hourly:
        rates = tuple(max(float(rate), NO_RATE) for rate in counts / spans_ns * 1e9)
        stage_ns = tuple(spans_ns.tolist())
    else:
        within = _gaps(trace, np.zeros_like(hour), np.array([len(trace) / trace.end_ns]))
        rates, stage_ns = (trace.rate,), (trace.end_ns,)
    reused, prefixes = _reused(trace)
    step_ns = _step_ns(trace.due_ns)
    return TraceFit(
        trace=trace,
        rates=rates,
        stage_ns=stage_ns,
        gaps=tuple(fitting.gaps(within, step_ns * trace.rate / 1e9)),
        input_tokens=_chosen_first(fitting.lengths(trace.input_tokens)),
        output_tokens=_chosen_first(fitting.lengths(trace.output_tokens)),
        step_ns=step_ns,
        correlation=fitting.rank_correlation(trace.input_tokens, trace.output_tokens),
        reused=reused,
        prefixes=prefixes,
        sessions=int(trace.session.max()) + 1,
        classes=_classes(trace),
    )


def _classes(trace: Trace) -> tuple[ClassFit, ...]:
    """A class for each label of at least LEAST requests; the requests of the others are one class. () where that is
    one class."""
    counts = {label: int((trace.label == label).sum()) for label in range(-1, len(trace.labels))}
    rare = [label for label, count in counts.items() if label < 0 or count < LEAST]
    merged = np.where(np.isin(trace.label, rare), -1, trace.label)
    numbers = [label for label in counts if (merged == label).any()]
    if len(numbers) < 2:
        return ()
    found = []
    taken: set[str] = set()
    for number in numbers:
        part = replace(trace, label=merged).of_label(number)
        name = _class_name("other" if number < 0 else trace.labels[number], taken)
        reused, prefixes = _reused(part)
        lengths = (_chosen_first(fitting.lengths(tokens)) for tokens in (part.input_tokens, part.output_tokens))
        read, write = lengths
        found.append(
            ClassFit(
                name=name, requests=len(part), input_tokens=read, output_tokens=write, reused=reused, prefixes=prefixes
            )
        )
    return tuple(found)


def _class_name(label: str, taken: set[str]) -> str:
    """A label as the name of a class: letters, digits and dashes, and no two alike."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", label).strip("-")[:40] or "label"
    name, number = plain, 2
    while name in taken:
        name, number = f"{plain}-{number}", number + 1
    taken.add(name)
    return name


def as_yaml(fitted: TraceFit, name: str) -> str:
    """The workload file, without comments."""

    lines = [
        f"name: {json.dumps(name)}",
    ]
    if fitted.classes:
        lines.append("classes:")
        for part in fitted.classes:
            share = part.requests / len(fitted.trace) * 100
            lines += [f"  {part.name}:", f"    weight: {share:.6g}%", "    requests:", *_requests(part, 6)]
    else:
        lines += ["requests:", *_requests(fitted, 2)]
    lines.append("stages:")
    gap = fitted.gaps[0]
    for hour, (rate, length_ns) in enumerate(zip(fitted.rates, fitted.stage_ns, strict=True)):
        rate_text = f"{rate:.6g}/s" if rate >= 1e-4 else f"{rate:.10f}/s"
        law = f"{{poisson: {rate_text}}}"
        if gap.law == "gamma":
            law = f"{{gamma: {{rate: {rate_text}, burstiness: {gap.parameters['burstiness']:g}}}}}"
        named = f"name: hour-{hour:02d}, " if fitted.by_the_hour else ""
        lines.append(f"  - {{{named}arrival: {law}, duration: {math.ceil(length_ns / 1e6) / 1000:.10g}s}}")
    return "\n".join(lines) + "\n"


def _requests(part: TraceFit | ClassFit, indent: int) -> list[str]:
    keys = [f"input_tokens: {_law(part.input_tokens[0])}", f"output_tokens: {_law(part.output_tokens[0])}"]
    if part.prefixes:
        keys += [f"prefixes: {part.prefixes}", f"cache: {{hit_rate: {part.reused * 100:.3g}%}}"]
    return [" " * indent + key for key in keys]


def _law(chosen: Fit) -> str:
    return json.dumps(chosen.parameters["value"]) if chosen.law == "fixed" else _flow({chosen.law: chosen.parameters})


def _flow(value: Any) -> str:
    """A mapping as YAML writes it in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _chosen_first(fits: list[Fit]) -> tuple[Fit, ...]:
    """The nearest law, if it fits; else the values of the trace themselves."""
    if fits[0].fits or len(fits) == 1:
        return tuple(fits)
    return (fits[-1], *fits[:-1])


def _gaps(trace: Trace, part: NDArray[np.int64], rate_per_ns: NDArray[np.float64]) -> NDArray[np.float64]:
    """The gaps between successive requests of the same part, as multiples of the mean gap of that part."""
    same = part[1:] == part[:-1]
    found: NDArray[np.float64] = np.diff(trace.due_ns)[same] * rate_per_ns[part[1:][same]]
    return found if len(found) else np.ones(1)


def _step_ns(due_ns: NDArray[np.int64]) -> int:
    """The step of the times, where more than 1 % of requests share theirs with another because of it."""
    step = int(np.gcd.reduce(due_ns))
    return step if (np.diff(due_ns) == 0).mean() > 0.01 else 0


def _reused(trace: Trace) -> tuple[float, int]:
    share = trace.reused_share() or 0.0
    if share < 0.01:
        return share, 0
    with_hashes = np.diff(trace.starts) > 0
    _, beginnings = np.unique(trace.hashes[trace.starts[:-1][with_hashes]], return_counts=True)
    return share, int(min(max((beginnings > 1).sum(), 1), 1000))
