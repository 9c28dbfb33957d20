"""Figures of a level's requests in order of due: those of the part of the load that settled, and what speaks against
taking them for those of a load that goes on.

Pure. Where a start-up ends and how long a server remembers is said in `settled.py`; here it becomes words and a bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen import format
from loadgen.metrics import columns as metrics
from loadgen.metrics.columns import CANCELLED, OK, Columns
from loadgen.metrics.summary import Summary
from loadgen.results.manifest import Header
from loadgen.stats import intervals, quantile_interval, steady_state
from loadgen.stats.quantile_interval import Series
from loadgen.stats.quantiles import Histogram, support

QUEUED = ("ttft", "ttft_from_sent", "first_answer", "e2e")  # latencies with the wait in a queue in them
NO_WAIT = 0.05  # of the median E2E: TTFTs that short at p99 make E2E no figure of a queue
LOOKS = dict.fromkeys(QUEUED, 2 * intervals.BATCHES) | {"e2e": intervals.BATCHES * 5 // 4}
"""Looks at a queue from which batches stand for a load that goes on: more than one each, two where the figure is the
wait, which is nothing or long. With fewer, benchmarks/contract_power.py finds a wrong PASS near saturation."""

Timed = tuple[NDArray[np.int64], NDArray[np.float64]]  # due instants in ns, and a figure of each, in order of due


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """One run as it was recorded. `rows`: `record.ROW` of all stages; `gaps`: of the measured stages, pooled."""

    folder: str
    header: Header
    summary: Summary
    rows: NDArray[np.void]
    gaps: Histogram

    def columns(self) -> Columns:
        stages = np.array([stage.measured for stage in self.header.stages] or [True])
        return Columns(self.rows, stages[self.rows["stage"]])


class Missing(Exception):
    """Nothing can be said, and why."""


class SteadySample(NamedTuple):
    """The figures of the settled part of each run, of `total` requests in all. `caveat`: why they cannot show that a
    promise is kept which `bound` does not keep; `of`: the part of the load, in words."""

    values: list[NDArray[np.float64]]
    total: int
    caveat: str = ""
    bound: float = math.inf
    of: str = ""


def figures(columns: Columns, metric: str, chosen: NDArray[np.bool_] | None = None) -> Timed:
    """A metric in ns of every request that has one; infinite for those that are not ok."""
    ok = columns.where(OK)
    values = columns.measure(metric)
    kept = counted(columns) & (~ok | (values != metrics.UNDEFINED))
    if chosen is not None:
        kept &= chosen
    return ordered(columns, kept, np.where(ok, values, np.inf))


def latencies(columns: Columns, metric: str, chosen: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
    """The figures alone."""
    return figures(columns, metric, chosen)[1]


def ordered(columns: Columns, kept: NDArray[np.bool_], values: NDArray[np.float64]) -> Timed:
    due: NDArray[np.int64] = columns["due_ns"][kept]
    order = np.argsort(due, kind="stable")
    return due[order], values[kept][order]


def counted(columns: Columns) -> NDArray[np.bool_]:
    counted: NDArray[np.bool_] = columns["status"] != CANCELLED
    return counted


def size(values: Series) -> int:
    return sum(map(len, values))


def looks(runs: Sequence[RecordedRun]) -> tuple[float, float] | None:
    """Stays that the load lasts (load time / mean time in the system), and the load time in s, over all runs; None for
    closed loops, whose number in the system does not wander."""
    if not runs or any(stage.closed for stage in runs[0].header.stages if stage.measured):
        return None
    count = length = 0.0
    for run in runs:
        stay_s, steady_s = _stay_s(run), run.summary.window.steady.duration_s
        if stay_s and steady_s:
            count, length = count + steady_s / stay_s, length + steady_s
    return (count, length) if count else None


def _stay_s(run: RecordedRun) -> float:
    return (run.summary.e2e_ms.mean or 0.0) / 1e3


def supported(values: Series, p: float, what: str) -> None:
    n, least = size(values), support(p)
    if n == 0:
        raise Missing(f"no request has a {what}")
    if n < least:
        raise Missing(f"{n:,} samples; p{p * 100:g} is supported from {least:,}")


def settle(
    runs: Sequence[RecordedRun], timed: Sequence[Timed], metric: str, p: float, confidence: float, what: str
) -> SteadySample:
    """What of the figures is after the start-up and before the end, and what stands against a pass by them."""
    parts = [steady_state.part(*one, _stay_s(run) * 1e9) for run, one in zip(runs, timed, strict=True)]
    cut = [(due[part.start : part.end], one[part.start : part.end])
           for (due, one), part in zip(timed, parts, strict=True)]  # fmt: skip
    sample = SteadySample([values for _, values in cut], sum(len(values) for _, values in timed))
    stays = looks(runs) if waits(runs, metric) else None
    if not all(part.settled for part in parts):
        lengths = [float(due[-1] - due[0]) / 1e9 for due, _ in timed if len(due)]
        return sample._replace(caveat=unsettled(max(lengths, default=0.0)))
    if stays is not None:
        stay = [_stay_s(run) * 1e9 for run in runs]
        first = [figures(run.columns(), QUEUED[0]) for run in runs]
        seen = sum(steady_state.looks(*one, ns, errors=0.0) for one, ns in zip(first, stay, strict=True))
        alike = sum(steady_state.looks(*one, ns) for one, ns in zip(cut, stay, strict=True))
        caveat = tail(min(seen, stays[0]), stays, p, confidence, what)
        if not caveat:
            caveat = _memory(alike, LOOKS[metric], stays[1])
            few = 0.0 if _no_wait(runs) else LOOKS[metric] * 0.75  # where nothing waited, it is a batch that swings
            if alike >= max(intervals.unseen(p, confidence), few):  # but they met the worst
                each = zip(cut, stay, strict=True)
                sample = sample._replace(bound=max(steady_state.worst(*one, ns, p) for one, ns in each))
        sample = sample._replace(caveat=caveat)
    starts = [float(due[part.start] - due[0]) for (due, _), part in zip(timed, parts, strict=True) if part.start]
    return sample._replace(of=f"from {format.duration(max(starts) / 1e9)} on" if starts else "")


def unsettled(length_s: float) -> str:
    return (
        f"after {format.duration(length_s / 2)} of load the start-up was not over, so what a steady load gives was not "
        "seen: a longer load, or a warm-up stage longer than that before it"
    )


def _memory(seen: float, needed: int, length_s: float) -> str:
    """Why batches of a load do not stand for one that goes on: the queue of one resembles that of the next."""
    if seen >= needed:
        return ""
    wanted = f"about {format.duration(length_s * needed / seen)} of load" if seen else "a much longer load"
    return (
        f"a queue that lasts: requests that came one after another fared alike, so this load is worth some {seen:.0f} "
        f"looks at it; {needed} needed: {wanted}"
    )


def tail(seen: float, stays: tuple[float, float], p: float, confidence: float, what: str) -> str:
    """Why a tail that a queue makes is not bounded from above, though there are requests enough; "" when it is.

    However many requests a load has, it saw the queue anew only so often; that a share 1 - p of the time is bad would
    go unseen with probability p ** seen.
    """
    needed = intervals.unseen(p, confidence)
    if seen >= needed:
        return ""
    count, length_s = stays
    wanted = f"about {format.duration(needed * length_s / seen)} of load" if seen else "a much longer load"
    return (
        f"requests stay {format.duration(length_s / count)} on average, so this load saw the queue some {seen:.0f} "
        f"times; {what} needs {needed}: {wanted}"
    )


def together(values: Series, p: float, confidence: float, length_s: float) -> str:
    """Why a tail is not bounded from above though there are requests enough: what lies beyond it came in a few
    stretches of the load, which was `length_s` long. "" when it is bounded."""
    worth, needed = quantile_interval.known(values, p, confidence), intervals.unseen(p, confidence)
    if worth >= needed or needed <= quantile_interval.LEAST_WORTH:
        return ""
    wanted = f"about {format.duration(length_s * needed / worth)} of load" if worth > 0 else "a much longer load"
    return (
        f"the slowest came together, in a few stretches of {format.duration(length_s)}: {size(values):,} requests are "
        f"worth some {worth:.0f} that do not share their fate; p{p * 100:g} needs {needed}: {wanted}"
    )


def waits(runs: Sequence[RecordedRun], metric: str) -> bool:
    """Whether the wait in a queue is a part of the figure that counts."""
    return metric in QUEUED and not (metric == "e2e" and _no_wait(runs))


def _no_wait(runs: Sequence[RecordedRun]) -> bool:
    """Whether next to nothing of E2E is a wait for the first token."""
    pairs = [(run.summary.ttft_ms.p99, run.summary.e2e_ms.p50) for run in runs]
    return all(wait is not None and stay is not None and wait < NO_WAIT * stay for wait, stay in pairs)
