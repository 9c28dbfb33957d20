"""Selects the steady part of a level's samples, and says why that part may not represent a load that continues.

Pure. Samples are in order of due instants. `steady_state.py` finds the end of the start-up and how long queueing
keeps requests correlated; this module turns both into a caveat in words and an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.contracts import quantile_interval, steady_state
from loadgen.contracts.quantile_interval import Series
from loadgen.core import format
from loadgen.core.metrics import columns as metrics
from loadgen.core.metrics import outcomes, tasks, windows
from loadgen.core.metrics.columns import (
    CANCELLED,
    DROPPED,
    FAILED,
    OK,
    UNFINISHED,
    Columns,
    is_measured,
    of_class,
)
from loadgen.core.metrics.goodput import Goodput
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import RunManifest
from loadgen.core.results.record import ROW
from loadgen.core.slo import Slo, Term, absent
from loadgen.core.stats import intervals
from loadgen.core.stats.quantiles import Histogram, support
from loadgen.figures import FIGURES

QUEUED = (
    "ttft",
    "ttft_from_sent",
    "first_answer",
    "e2e",
)  # latencies that include queueing time; ours
NO_WAIT = 0.05  # share of the median E2E: with p99 TTFT below it, E2E is not dominated by queueing
LOOKS = dict.fromkeys(QUEUED, 2 * intervals.BATCHES) | {"e2e": intervals.BATCHES * 5 // 4}
"""How many independent looks at the queue are needed before batches represent a load that continues.

More than one look per batch; two per batch where the metric is mostly queueing time, which is near zero or long. With
fewer, benchmarks/contract_power.py finds wrong PASS verdicts near saturation.
"""

LEAST_LOOKS = 6
"""How many independent looks at the server any latency needs: with fewer, batches of time do not represent a load that
continues. benchmarks/trust.py finds the wrong PASS verdicts.
"""
MARGIN = 1.1  # an estimate of the load that would do is of what varies
NEARLY = 0.9  # share of a length that counts as that length: a load ends with its last request, not with its time

Timed = tuple[
    NDArray[np.int64], NDArray[np.float64]
]  # due instants in ns and one value for each, in order of due


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded run. `rows`: `record.ROW` of all stages, or what has their columns; `gaps`: gaps between events of
    the measured stages.
    """

    folder: str
    header: RunManifest
    summary: Summary
    rows: NDArray[np.void]
    gaps: Histogram

    def columns(self) -> Columns:
        return Columns(self.rows, is_measured(self.header, self.rows))

    def without_dropped(self) -> RecordedRun:
        """The run without the starts that the client dropped at its in-flight cap."""
        return self._chosen(self.rows["status"] != DROPPED)

    def _chosen(self, mask: NDArray[np.bool_]) -> RecordedRun:
        """The run with some of its rows, of which none are made: of millions they are columns in a file."""
        rows: Any = Columns(self.rows, mask)
        return self if mask.all() else replace(self, rows=rows)

    def only(self, class_name: str) -> RecordedRun:
        """The requests of one class, with its SLO. Raises Missing where the run has no such class."""
        plan = next((one for one in self.header.classes if one.name == class_name), None)
        if plan is None:
            raise Missing(f"the run has no class {class_name}")
        part = next(one for one in self.summary.classes if one.name == class_name)
        return replace(
            self._chosen(of_class(self.header, class_name, self.rows)),
            header=msgspec.structs.replace(self.header, slo=plan.slo),
            summary=msgspec.structs.replace(
                self.summary, goodput=part.goodput, sessions=part.sessions
            ),
        )

    def of_tasks(self) -> RecordedRun:
        """The conversations and tasks, each as if it were one request (`as_rows`), with their part of the SLO.

        Raises Missing where there are none, or where the end of the load cut too many of them.
        """
        found = self.summary.sessions
        if found is None:
            raise Missing("there were no tasks and no conversations")
        rows = as_rows(tasks.of_requests(Columns(self.rows), self.header.turns))
        task = None if self.header.slo is None else self.header.slo.task
        limits = () if task is None else (("e2e", task.within_ns), ("ttft_from_sent", task.wait_ns))
        slo = Slo(
            terms=tuple(
                Term(metric=name, limit_ns=limit) for name, limit in limits if limit is not None
            )
        )
        header = msgspec.structs.replace(self.header, slo=slo, turns=1)
        as_one = replace(self, header=header, rows=rows)
        columns = as_one.columns()
        cut, everyone = int(columns.where(UNFINISHED).sum()), int((~columns.where(CANCELLED)).sum())
        if outcomes.is_undecided(cut, everyone):
            raise Missing(
                f"{cut:,} of {everyone:,} tasks were cut by the end of the load or of the drain, the longest ones most "
                "often: end the level by its number of tasks (`requests: 200`), and give it no grace"
            )
        due = columns["due_ns"]
        summary = msgspec.structs.replace(
            self.summary,
            e2e_ms=found.duration_ms,
            ttft_ms=found.wait_ms,
            goodput=Goodput(good=None if found.goodput is None else found.goodput.good),
            requests=msgspec.structs.replace(self.summary.requests, ok=found.ok),
            window=msgspec.structs.replace(
                self.summary.window,
                steady=windows.span(float(due.min(initial=0)), float(due.max(initial=0))),
            ),
        )
        return replace(as_one, summary=summary)


class Missing(Exception):
    """A figure cannot be computed. The message says why; `missing_s`: how much more load will do, 0 if not known."""

    def __init__(self, why: str, missing_s: float = 0.0) -> None:
        super().__init__(why)
        self.missing_s = missing_s


class Shortage(NamedTuple):
    """Why a load is too short for a figure, and how long a load will do if what comes is like what was seen.

    `words` is "" where nothing is missing. `enough_s`: of all runs together, at the confidence of the next look, also
    where this look found enough; infinite where it is not known.
    """

    words: str = ""
    enough_s: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.words)

    def sentence(self) -> str:
        """The words, with the load that would do."""
        if not self.words:
            return ""
        load = (
            f"about {format.duration(self.enough_s)} of load"
            if math.isfinite(self.enough_s)
            else "a longer load"
        )
        return f"{self.words}: {load}"


class SteadySample(NamedTuple):
    """The values of the steady part of each run; `total` counts the values before the start-up was cut.

    `short` says why the sample gives no upper end of its own, if it gives none. `bound` is then the least upper end:
    the worst batch that was seen, or infinity. `of` names the part of the load in words ("" for all of it). `length_s`:
    the load of all runs together; `looks`: the independent looks at the server that it is worth (None: not known).
    """

    values: list[NDArray[np.float64]]
    total: int
    short: Shortage = Shortage()
    bound: float = math.inf
    of: str = ""
    length_s: float = 0.0
    looks: float | None = None


def figures(
    columns: Columns,
    metric: str,
    chosen: NDArray[np.bool_] | None = None,
    limit_ns: int | None = None,
) -> Timed:
    """A metric in ns of every counted request that has it, with due instants; infinite for requests that are not ok.

    Raises Missing for a figure whose package is not here.
    `limit_ns`: the limit that the figure is held against, if there is one: see `counted`.
    """
    if why := absent(metric):
        raise Missing(why)
    ok = columns.where(OK)
    values = columns.measure(metric)
    slo = None if limit_ns is None else Slo(terms=(Term(metric=metric, limit_ns=limit_ns),))
    kept = counted(columns, slo) & (~ok | (values != metrics.UNDEFINED))
    if chosen is not None:
        kept &= chosen
    return ordered(columns, kept, np.where(ok, values, np.inf))


def latencies(
    columns: Columns, metric: str, chosen: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """The values of `figures`, without due instants."""
    return figures(columns, metric, chosen)[1]


def ordered(columns: Columns, kept: NDArray[np.bool_], values: NDArray[np.float64]) -> Timed:
    due: NDArray[np.int64] = columns["due_ns"][kept]
    order = np.argsort(due, kind="stable")
    return due[order], values[kept][order]


def counted(columns: Columns, slo: Slo | None = None) -> NDArray[np.bool_]:
    """Which requests count: all but cancelled ones, and of the unfinished ones those over a term of `slo` already.

    Raises Missing where so many are unfinished that nothing can be said.
    """
    unfinished, everyone = (
        int(columns.where(UNFINISHED).sum()),
        int((~columns.where(CANCELLED)).sum()),
    )
    if outcomes.is_undecided(unfinished, everyone):
        raise Missing(
            f"{unfinished:,} of {everyone:,} requests were unfinished when the drain ended: give the level a "
            "longer grace (`grace: 10m`), or none: then the drain lasts as long as a request may (`timeout`)"
        )
    return outcomes.is_counted(columns, slo)


def size(values: Series) -> int:
    return sum(map(len, values))


def looks(runs: Sequence[RecordedRun]) -> tuple[float, float] | None:
    """The load time in mean stays (load time / mean time in the system) and in s, both summed over all runs.

    None for closed loops, where the number in the system does not vary.
    """
    if not runs or any(stage.closed for stage in runs[0].header.stages if stage.measured):
        return None
    count = load_s = 0.0
    for run in runs:
        stay_s, steady_s = _mean_stay_s(run), run.summary.window.steady.duration_s
        if stay_s and steady_s:
            count, load_s = count + steady_s / stay_s, load_s + steady_s
    return (count, load_s) if count else None


def _mean_stay_s(run: RecordedRun) -> float:
    return (run.summary.e2e_ms.mean or 0.0) / 1e3


def supported(values: Series, p: float, what: str, length_s: float) -> None:
    """Raises Missing where a load of `length_s` brought fewer values than a percentile needs."""
    n, least = size(values), support(p)
    if n == 0:
        raise Missing(f"no request has a {what}")
    if n < least:
        what = f"{format.counted(n, 'sample')}; p{p * 100:g} is supported from {least:,}"
        raise Missing(what, _enough_s(length_s, least, n) - length_s)


def too_short(length_s: float, confidence: float, horizon: float, what: str) -> Shortage:
    """Why a load of this length, over all runs, cannot show that a latency stays low, if it cannot. `horizon` in s."""
    enough_s = intervals.length_for(horizon, intervals.at_next_look(confidence))
    if length_s >= NEARLY * intervals.length_for(horizon, confidence):
        return Shortage(enough_s=enough_s)
    words = (
        f"a load of {format.duration(length_s)} sees what comes back within "
        f"{format.duration(intervals.recurrence(length_s, confidence))}; {what} needs {format.duration(horizon)}"
    )
    return Shortage(words, enough_s)


def load_length_s(due: Sequence[NDArray[np.int64]]) -> float:
    """From the first to the last due instant of each run, together."""
    return sum(float(run_due[-1] - run_due[0]) / 1e9 for run_due in due if len(run_due))


def settle(
    runs: Sequence[RecordedRun],
    timed: Sequence[Timed],
    metric: str,
    p: float,
    confidence: float,
    what: str,
    horizon_s: float,
) -> SteadySample:
    """The steady part of the samples, and the reason why it cannot show that a promise is kept, if there is one."""
    parts = [
        steady_state.part(*one, _mean_stay_s(run) * 1e9)
        for run, one in zip(runs, timed, strict=True)
    ]
    settled = [
        (due[part.start : part.end], one[part.start : part.end])
        for (due, one), part in zip(timed, parts, strict=True)
    ]
    length_s = load_length_s([due for due, _ in timed])
    sample = SteadySample(
        [values for _, values in settled],
        sum(len(values) for _, values in timed),
        length_s=length_s,
    )
    sample = sample._replace(looks=independent_looks(runs, settled))
    if not all(part.settled for part in parts):
        lengths = [float(due[-1] - due[0]) / 1e9 for due, _ in timed if len(due)]
        return sample._replace(short=unsettled(max(lengths, default=0.0)))
    of_time = [
        too_short(length_s, confidence, horizon_s, what),
        _too_few_states(sample.looks, length_s),
    ]
    of_queue = []
    stays = looks(runs) if waits(runs, metric) else None
    if stays is not None:
        stays_ns = [_mean_stay_s(run) * 1e9 for run in runs]
        ttft_samples = [figures(run.columns(), QUEUED[0]) for run in runs]
        seen = sum(
            steady_state.looks(*one, stay_ns, errors=0.0)
            for one, stay_ns in zip(ttft_samples, stays_ns, strict=True)
        )
        distinct_looks = sum(
            steady_state.looks(*one, stay_ns)
            for one, stay_ns in zip(settled, stays_ns, strict=True)
        )
        unseen = tail(min(seen, stays[0]), stays, p, confidence, what)
        least_looks = LOOKS.get(metric, LOOKS[QUEUED[0]])
        of_queue = [
            unseen,
            _too_few_looks(distinct_looks, least_looks, length_s, settled, stays_ns),
        ]
        # without queueing no least number: the batches just vary
        nearly = 0.0 if _never_queued(runs) else least_looks * 0.75
        is_met = distinct_looks >= max(
            intervals.unseen(p, confidence), nearly
        )  # the worst case, in so many looks
        if of_queue[1] and not unseen and not any(of_time) and is_met:
            settled_with_stay = zip(settled, stays_ns, strict=True)
            sample = sample._replace(
                bound=max(
                    steady_state.worst(*one, stay_ns, p) for one, stay_ns in settled_with_stay
                )
            )
    starts = [
        float(due[part.start] - due[0])
        for (due, _), part in zip(timed, parts, strict=True)
        if part.start
    ]
    return sample._replace(
        short=all_of(of_queue, of_time),
        of=f"from {format.duration(max(starts) / 1e9)} on" if starts else "",
    )


def all_of(*groups: Sequence[Shortage]) -> Shortage:
    """The first reason of each group in words, and the load that leaves no reason of any group."""
    words = [next((one.words for one in group if one), "") for group in groups]
    enough_s = max((one.enough_s for group in groups for one in group), default=0.0)
    return Shortage("; and ".join(filter(None, words)), enough_s)


def independent_looks(runs: Sequence[RecordedRun], timed: Sequence[Timed]) -> float | None:
    """How many independent looks at the server these values are; None where no request stayed."""
    stays_ns = [_mean_stay_s(run) * 1e9 for run in runs]
    if not all(stays_ns):
        return None
    return sum(
        steady_state.slow_looks(*one, stay_ns) for one, stay_ns in zip(timed, stays_ns, strict=True)
    )


def _too_few_states(seen: float | None, length_s: float) -> Shortage:
    if seen is None:
        return Shortage()
    enough_s = _enough_s(length_s, LEAST_LOOKS, seen or 1)
    if seen >= LEAST_LOOKS:
        return Shortage(enough_s=enough_s)
    words = (
        f"a server that changes slowly: this load is worth some {math.floor(seen)} independent samples of it; "
        f"{LEAST_LOOKS} needed"
    )
    return Shortage(words, enough_s)


def _enough_s(length_s: float, needed: float, seen: float) -> float:
    """The load that brings `needed` of what a load of `length_s` brought `seen` of."""
    return MARGIN * length_s * needed / seen if seen else math.inf


def unsettled(length_s: float) -> Shortage:
    words = (
        f"after {format.duration(length_s / 2)} of load the start-up was not over, so what a steady load gives was not "
        "seen (a warm-up stage longer than that before it helps too)"
    )
    return Shortage(words, math.inf)


def _too_few_looks(
    seen: float, needed: int, length_s: float, timed: Sequence[Timed], stays_ns: Sequence[float]
) -> Shortage:
    """Why batches do not represent a load that continues, if they do not: successive queue states are correlated."""
    if seen >= needed:
        return Shortage()
    longest, stay_ns = max(zip(timed, stays_ns, strict=True), key=lambda run: len(run[0][0]))
    enough_s = length_s + MARGIN * steady_state.length_for(needed - seen, *longest, stay_ns) / 1e9
    words = (
        f"a queue that lasts: requests that came one after another fared alike, so this load is worth some {seen:.0f} "
        f"independent samples of it; {needed} needed"
    )
    return Shortage(words, enough_s)


def tail(
    seen: float, stays: tuple[float, float], p: float, confidence: float, what: str
) -> Shortage:
    """Why a tail that queueing causes has no upper bound although there are enough requests, if it has none.

    `seen` counts independent looks at the queue. Requests close together see the same queue, so more requests do not
    help: a bad state that lasts a share 1 - p of the time stays unseen with probability p ** seen.
    """
    needed = intervals.unseen(p, confidence)
    count, length_s = stays
    enough_s = _enough_s(
        length_s, intervals.unseen(p, intervals.at_next_look(confidence)), seen or count
    )
    if seen >= needed:
        return Shortage(enough_s=enough_s)
    words = (
        f"requests stay {format.duration(length_s / count)} on average, so this load saw the queue some {seen:.0f} "
        f"times; {what} needs {needed}"
    )
    return Shortage(words, enough_s)


def together(values: Series, p: float, confidence: float, length_s: float) -> Shortage:
    """Why a tail has no upper bound although there are enough requests, if so: its slow requests came in few clusters.

    `length_s` is the length of the load.
    """
    worth, needed = quantile_interval.known(values, p, confidence), intervals.unseen(p, confidence)
    if needed <= quantile_interval.LEAST_WORTH:
        return Shortage()
    enough_s = _enough_s(length_s, intervals.unseen(p, intervals.at_next_look(confidence)), worth)
    if worth >= needed:
        return Shortage(enough_s=enough_s)
    words = (
        f"the slowest came together, in a few stretches of the {format.duration(length_s)}: {size(values):,} requests "
        f"are worth some {worth:.0f} that do not share their fate; p{p * 100:g} needs {needed}"
    )
    return Shortage(words, enough_s)


def waits(runs: Sequence[RecordedRun], metric: str) -> bool:
    """Whether queueing time is a relevant part of the metric. Of a figure of another package it is taken to be one."""
    is_queued = metric in QUEUED or FIGURES.find(metric, foreign=False) is None
    return is_queued and not (metric == "e2e" and _never_queued(runs))


def _never_queued(runs: Sequence[RecordedRun]) -> bool:
    """Whether the wait for the first token is a negligible part of E2E in every run."""
    pairs = [(run.summary.ttft_ms.p99, run.summary.e2e_ms.p50) for run in runs]
    return all(
        ttft_p99_ms is not None and e2e_p50_ms is not None and ttft_p99_ms < NO_WAIT * e2e_p50_ms
        for ttft_p99_ms, e2e_p50_ms in pairs
    )


def as_rows(made: tasks.TaskTable) -> NDArray[np.void]:
    """A row (`record.ROW`) for each task, as if it were one request.

    Its `e2e` is then the task time, its `ttft` the time waited for first tokens, its `ttft_from_sent` the longest such
    wait. A task whose last request was never sent is unfinished.
    """
    columns = made.columns
    rows = np.zeros(len(made.numbers), ROW)
    rows["slot"] = rows["request"] = rows["session"] = made.numbers
    rows["stage"], rows["due_ns"] = columns.stage, columns.due
    rows["first_token_ns"] = columns.due + columns.wait
    rows["sent_ns"] = rows["first_token_ns"] - columns.longest_wait
    rows["end_ns"] = rows["done_ns"] = np.maximum(made.end, columns.due)
    cut = (columns.unfinished > 0) | ~made.over
    rows["status"] = np.select(
        [columns.cancelled > 0, cut, columns.ok > 0], [CANCELLED, UNFINISHED, OK], default=FAILED
    )
    rows["input_tokens"], rows["output_tokens"] = columns.input, columns.output
    return rows
