"""A workload fitted to a trace: arrivals and lengths as laws, how good each is, and what no law keeps.

The text about it is in `fit_text.py`.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadgen.core import format, units
from loadgen.core.errors import UserError
from loadgen.core.workload.trace import Trace
from loadgen.interop import laws
from loadgen.interop.fit_conversations import TalkFit, Talks, chosen_first, talks
from loadgen.interop.fit_conversations import fit as conversations_of
from loadgen.interop.laws import Fit

LEAST = 20  # requests: below, a fit says nothing
HOUR_NS = units.UNIT_NS["h"]
NO_RATE = 1e-6  # requests per second of an hour without any


class ClassFit(Struct, frozen=True, kw_only=True):
    """Requests of one kind: of one label of the trace, or of those too rare for laws of their own; conversations apart.

    starts: its conversations, or its requests, which stand alone. talk: the laws of conversations.
    """

    name: str
    requests: int
    starts: int
    talk: TalkFit | None = None
    input_tokens: tuple[Fit, ...]
    output_tokens: tuple[Fit, ...]
    reused: float
    prefixes: int


class TraceFit(Struct, frozen=True, kw_only=True):
    """What was fitted. Lists of fits: the chosen one first, then the others."""

    trace: Trace
    rates: tuple[
        float, ...
    ]  # requests per second: of the whole trace, or of each hour if it varies
    stage_ns: tuple[int, ...]
    gaps: tuple[Fit, ...]
    input_tokens: tuple[Fit, ...]
    output_tokens: tuple[Fit, ...]
    step_ns: int  # the times of the trace are multiples of this; 0: of none that matters
    correlation: float  # of the ranks of input and output
    reused: float  # share of prompt tokens that an endless cache would know
    prefixes: int  # beginnings that several prompts have
    sessions: int
    conversations: int = 0  # of several requests, that are kept
    lost: str = ""  # why conversations are not kept
    beside: int = 0  # conversations of sub-agents, which begin on their own in the workload
    classes: tuple[
        ClassFit, ...
    ] = ()  # where the trace has labels or conversations: all its requests, by kind

    @property
    def by_the_hour(self) -> bool:
        return len(self.rates) > 1


def fit(trace: Trace) -> TraceFit:
    """Raises UserError for a trace with too few requests, or with no time between them."""
    if len(trace) < LEAST or not trace.end_ns:
        problem = (
            format.counted(len(trace), "request")
            if len(trace) < LEAST
            else "all requests at the same time"
        )
        hint = (
            f"a trace of {LEAST} requests or more"
            if len(trace) < LEAST
            else "replay it: --set trace_replay=sessions"
        )
        raise UserError("too_few", f"nothing can be fitted to {problem}", str(trace.path), hint)
    whole_trace, found = trace, talks(trace)
    trace = trace.select(found.starts)  # rates are of what starts
    if len(trace) < LEAST or not trace.end_ns:
        raise UserError(
            "too_few",
            f"nothing can be fitted to {len(trace)} starts",
            str(trace.path),
            "a longer trace",
        )
    hour = trace.due_ns // HOUR_NS
    counts = np.bincount(hour)
    spans_ns = np.full(len(counts), HOUR_NS)
    spans_ns[-1] = trace.end_ns - (len(counts) - 1) * HOUR_NS
    whole = counts[:-1] if len(counts) > 1 and spans_ns[-1] < HOUR_NS else counts
    within = _gaps(trace, hour, counts / spans_ns)
    hourly = len(counts) > 1 and laws.varies(
        whole.tolist(), float(within.var()) / max(float(within.mean()), 1e-9) ** 2
    )
    if hourly:
        rates = tuple(max(float(rate), NO_RATE) for rate in counts / spans_ns * 1e9)
        stage_ns = tuple(spans_ns.tolist())
    else:
        within = _gaps(trace, np.zeros_like(hour), np.array([len(trace) / trace.end_ns]))
        rates, stage_ns = (trace.rate,), (trace.end_ns,)
    reused, prefixes = _reused(whole_trace)
    step_ns = _step_ns(trace.due_ns)
    started, trace = trace, whole_trace
    return TraceFit(
        trace=trace,
        rates=rates,
        stage_ns=stage_ns,
        gaps=tuple(laws.gaps(within, step_ns * started.rate / 1e9)),
        input_tokens=chosen_first(laws.lengths(trace.input_tokens)),
        output_tokens=chosen_first(laws.lengths(trace.output_tokens)),
        step_ns=step_ns,
        correlation=laws.rank_correlation(trace.input_tokens, trace.output_tokens),
        reused=reused,
        prefixes=prefixes,
        sessions=int(trace.session.max()) + 1,
        conversations=len(np.unique(trace.session[found.row])),
        lost=found.lost,
        beside=found.beside,
        classes=_classes(trace, found),
    )


def _classes(trace: Trace, found: Talks) -> tuple[ClassFit, ...]:
    """A class for each label of at least LEAST requests; the requests of the others are one class. What is of
    conversations is a class beside what stands alone. () where all of it is one class of requests that stand alone.
    """
    label = np.array(trace.label)
    if len(found.row):  # a conversation is of the label that it begins with
        for row, before in zip(found.row.tolist(), found.before.tolist(), strict=True):
            label[row] = label[before]
    counts = {number: int((label == number).sum()) for number in range(-1, len(trace.labels))}
    rare = [number for number, count in counts.items() if number < 0 or count < LEAST]
    merged = np.where(np.isin(label, rare), -1, label)
    kinds = [(number, talk) for number in counts for talk in (False, True)]
    rows = {kind: (merged == kind[0]) & (found.talks == kind[1]) for kind in kinds}
    rows = {kind: chosen for kind, chosen in rows.items() if chosen.any()}
    if [talk for _, talk in rows] == [False]:
        return ()
    taken: set[str] = set()
    several = len({number for number, _ in rows}) > 1
    return tuple(
        _class(
            trace,
            found,
            chosen,
            _class_name(_words(trace, number, talk, several=several), taken),
            talk=talk,
        )
        for (number, talk), chosen in rows.items()
    )


def _words(trace: Trace, number: int, talk: bool, *, several: bool) -> str:
    """What a kind of requests is called. several: by labels."""
    if not several:
        return "conversations" if talk else "single"
    label = "other" if number < 0 else trace.labels[number]
    return f"{label} conversations" if talk else label


def _class(
    trace: Trace, found: Talks, rows: NDArray[np.bool_], name: str, *, talk: bool
) -> ClassFit:
    part = trace.select(np.flatnonzero(rows))
    reused, prefixes = _reused(part)
    return ClassFit(
        name=name,
        requests=len(part),
        starts=int(rows[found.starts].sum()),
        talk=conversations_of(trace, found, rows) if talk else None,
        input_tokens=chosen_first(laws.lengths(part.input_tokens)),
        output_tokens=chosen_first(laws.lengths(part.output_tokens)),
        reused=reused,
        prefixes=prefixes,
    )


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
    if len(fitted.classes) == 1:
        lines += ["requests:", *_requests(fitted.classes[0], 2)]
    elif fitted.classes:
        lines.append("classes:")
        for part in fitted.classes:
            share = part.starts / sum(one.starts for one in fitted.classes) * 100
            lines += [
                f"  {part.name}:",
                f"    weight: {share:.6g}%",
                "    requests:",
                *_requests(part, 6),
            ]
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
        lines.append(
            f"  - {{{named}arrival: {law}, duration: {math.ceil(length_ns / 1e6) / 1000:.10g}s}}"
        )
    return "\n".join(lines) + "\n"


def _requests(part: TraceFit | ClassFit, indent: int) -> list[str]:
    talk = part.talk if isinstance(part, ClassFit) else None
    if talk is not None:
        output = f"output_tokens: {_law(part.output_tokens[0])}"
        first = f"first: {{input_tokens: {_law(talk.first[0])}, {output}}}"
        more = f"turns: {_law(talk.later[0])}, input_tokens: {_law(talk.added[0])}, {output}"
        later = f"later: {{after: first, {more}, think_time: {_delay(talk.think_ms[0])}}}"
        return [" " * indent + "steps:", *(" " * (indent + 2) + step for step in (first, later))]
    keys = [
        f"input_tokens: {_law(part.input_tokens[0])}",
        f"output_tokens: {_law(part.output_tokens[0])}",
    ]
    if part.prefixes:
        keys += [f"prefixes: {part.prefixes}", f"cache: {{hit_rate: {part.reused * 100:.3g}%}}"]
    return [" " * indent + key for key in keys]


def _law(chosen: Fit) -> str:
    return (
        json.dumps(chosen.parameters["value"])
        if chosen.law == "fixed"
        else _flow({chosen.law: chosen.parameters})
    )


def _delay(chosen: Fit) -> str:
    """A law of whole ms as one of durations."""

    def timed(value: Any) -> Any:
        return [f"{one}ms" for one in value] if isinstance(value, list) else f"{value:g}ms"

    plain = ("sigma", "weights")
    values = {
        name: value if name in plain else timed(value) for name, value in chosen.parameters.items()
    }
    return json.dumps(values["value"]) if chosen.law == "fixed" else _flow({chosen.law: values})


def _flow(value: Any) -> str:
    """A mapping as YAML writes it in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _gaps(
    trace: Trace, part: NDArray[np.int64], rate_per_ns: NDArray[np.float64]
) -> NDArray[np.float64]:
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
