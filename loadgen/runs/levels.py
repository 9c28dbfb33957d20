"""Runs of one workload at several loads, side by side: the levels of a sweep, its knee, its Pareto front.

Pure: summaries in, values out. `levels_text.py` renders them.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from loadgen.core.errors import OK, UNSOUND
from loadgen.core.metrics.blocks import per_gpu
from loadgen.repeated.capacity import STILL_KEPT
from loadgen.runs.headline import brief, promises
from loadgen.runs.rates import headline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loadgen.core.metrics.parts import StageSummary
    from loadgen.core.metrics.summary import Summary

Outcome = Literal["under", "over", "invalid"]
Name = TypeVar("Name")


class SweepLevel(msgspec.Struct, frozen=True, kw_only=True):
    """One load of a sweep. Rates are those of the steady window where known; latencies are in ms."""

    name: str  # name of its folder: c8, r2.5
    load: str
    amount: float | None  # lanes, or requests per second offered
    ok: int
    failed: int
    requests_per_s: float | None
    output_per_s: float | None
    per_gpu: float | None  # output tokens/s; null without --gpus
    per_user: float | None  # tokens/s that one user sees: 1 / TPOT p50
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    e2e_p50: float | None
    unsupported: tuple[str, ...]  # the latencies above that rest on too few samples
    goodput: float | None  # share of requests
    slo_met: bool | None
    slo_undecided: bool = False
    valid: bool
    state: str
    simulated: bool
    closed: bool = False  # its load is lanes, so `amount` is their number
    front: bool = False  # no other level gives more per GPU and more per user
    at_once: bool = False  # closed loop: all lanes began in one instant
    full: bool = True  # closed loop: for some time all lanes were at work
    total_per_gpu: float | None = None  # input and output tokens/s; null without --gpus
    sustained: bool | None = None  # false: something grew while it went on; null: not known


class SweepCurve(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a sweep, levels in order of load."""

    workload: str
    model: str
    target: str
    gpus: int | None
    version: str
    started: str
    slo: str
    levels: tuple[SweepLevel, ...]
    knee: str  # name of the level, "" when no level lies between others
    best: str  # name of the level that answers what is held within the SLO (`best`), "" when none or no SLO
    metadata: dict[str, str] = {}  # what the user said of the first level
    region: str = ""


def exit_code(curve: SweepCurve, *, strict: bool = False) -> int:
    """Of a sweep when it ends and when its folder is read: 3 (no valid level; `strict`: one is undecided), else 0."""
    undecided = strict and any(level.slo_undecided for level in curve.levels)
    return UNSOUND if undecided or not any(level.valid for level in curve.levels) else OK


def curve(named: Sequence[tuple[str, Summary]]) -> SweepCurve:
    """The levels of a sweep, or of any folder of runs, in order of load. `named`: at least one name and summary."""
    levels = sorted(
        (_level(called, summary) for called, summary in named),
        key=lambda level: (level.amount or 0, level.name),
    )
    # all levels have the same number of GPUs, so throughput ranks them as throughput per GPU would
    front = pareto(
        {level.name: (level.output_per_s, level.per_user) for level in levels if level.valid}
    )
    levels = [msgspec.structs.replace(level, front=level.name in front) for level in levels]
    first = named[0][1]
    held = best(levels)
    promised = max(
        [promises(summary) for _, summary in named], key=len
    )  # all of it, of one in which tasks ended
    return SweepCurve(
        workload=first.run.workload,
        model=first.target.model,
        target=first.target.name or first.target.url,
        gpus=first.target.gpus,
        version=first.run.version,
        started=first.run.started,
        slo=", ".join(promised),
        levels=tuple(levels),
        knee=knee(levels),
        best="" if held is None else held.name,
        metadata=first.run.metadata,
        region=first.target.region,
    )


AVERAGED = (
    *("requests_per_s", "output_per_s", "per_gpu", "total_per_gpu", "per_user"),
    *("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "e2e_p50", "goodput"),
)
"""The fields of `SweepLevel` that repeats of one load are averaged over."""


def average_repeats(repeats: Sequence[SweepLevel]) -> SweepLevel:
    """Return the load point that stands for repeats of one load.

    It has the means of the valid repeats, or of all if none is valid. It met the SLO if every
    repeat did. Its name says the load and how many runs were averaged; a single run stands for
    itself.
    """
    counted = [level for level in repeats if level.valid] or list(repeats)
    first = counted[0]
    if len(counted) == 1:
        return first
    means = {name: _mean([getattr(level, name) for level in counted]) for name in AVERAGED}
    too_few_samples = {name for level in counted for name in level.unsupported}
    return msgspec.structs.replace(
        first,
        **means,
        name=f"{first.load or first.name}, mean of {len(counted)} runs",
        ok=sum(level.ok for level in counted),
        failed=sum(level.failed for level in counted),
        unsupported=tuple(sorted(too_few_samples)),
        slo_met=_true_of_all([level.slo_met for level in counted]),
        slo_undecided=any(level.slo_undecided for level in counted),
        sustained=_true_of_all([level.sustained for level in counted]),
        simulated=any(level.simulated for level in counted),
        full=all(level.full for level in counted),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean, or None if a value is not known."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def _true_of_all(values: Sequence[bool | None]) -> bool | None:
    """Return False if one value is False, None if one is not known, else True."""
    if False in values:
        return False
    return None if None in values else True


def outcome(level: SweepLevel) -> Outcome:
    """What a level says of the SLO: kept (under), missed (over), or nothing (invalid)."""
    if not level.valid or level.state != "finished" or level.slo_met is None or not level.full:
        return "invalid"
    return "under" if level.slo_met else "over"


def kept(levels: Sequence[SweepLevel]) -> list[SweepLevel]:
    """The levels that kept the SLO, in order of load."""
    return [level for level in levels if outcome(level) == "under"]


def lowest_missed(levels: Sequence[SweepLevel]) -> SweepLevel | None:
    """The level of least load that missed the SLO."""
    return next((level for level in levels if outcome(level) == "over"), None)


def best(levels: Sequence[SweepLevel]) -> SweepLevel | None:
    """The level that answers what load is held within the SLO. `levels`: in order of load.

    Of those that kept it at less load than any that missed it: what passed once above a miss is no capacity. One that
    grew while it went on only where no other is. Of an open loop that of most load; of a closed one, whose load is what
    its lanes complete, that which completed most.
    """
    missed = lowest_missed(levels)
    below = [
        level
        for level in kept(levels)
        if missed is None or (level.amount or 0) < (missed.amount or 0)
    ]

    def rank(level: SweepLevel) -> tuple[bool, float]:
        load = level.requests_per_s if level.closed else level.amount
        return level.sustained is not False, load or 0.0

    return max(below, key=rank, default=None)


def bound_why(curve: SweepCurve) -> str:
    """Why the best level within the SLO is only a lower bound of the capacity; "" when it is not, or there is none.

    The levels of an open loop enclose the capacity, and a rate between them is estimated. In a closed loop a level that
    is too high completes no more than one that is not, so nothing is known of the rates between two levels.
    """
    names = [level.name for level in curve.levels]
    if curve.best not in names:
        return ""
    best, above = curve.levels[names.index(curve.best)], curve.levels[names.index(curve.best) + 1 :]
    missed = lowest_missed(curve.levels)
    if best.at_once:
        return (
            f"at {best.load or best.name} all lanes began in one instant (concurrency_ramp 0): lanes in step meet "
            "queues that a spread load does not"
        )
    if missed is None and (grew := grew_above(curve)):
        return f"{best.load or best.name} kept the SLO, {grew.load or grew.name} grew, and the end lies between"
    if missed is None:
        last = not above or kept(above)
        at = best.load or best.name
        return (
            STILL_KEPT
            if last
            else f"no level above {at} is a valid measurement that decides the SLO"
        )
    if best.closed:
        return f"{best.load or best.name} kept the SLO, {missed.load or missed.name} missed it, and the end lies between"
    return ""


def grew_above(curve: SweepCurve) -> SweepLevel | None:
    """The lowest level above the best one that kept the SLO and grew while it went on, where the best one did not."""
    names = [level.name for level in curve.levels]
    place = names.index(curve.best) if curve.best in names else len(names)
    if any(level.sustained is False for level in curve.levels[place : place + 1]):
        return None
    return next(
        (level for level in kept(curve.levels[place + 1 :]) if level.sustained is False), None
    )


def _began_at_once(stages: Sequence[StageSummary]) -> bool:
    """Whether all lanes of a closed loop began in one instant: asked for, or in a run of an earlier version."""
    begun = [
        stage
        for stage in stages
        if stage.concurrency and stage.concurrency > 1 and stage.ramp_from != "stage"
    ]
    return bool(begun) and not begun[0].ramp_s


def _level(called: str, summary: Summary) -> SweepLevel:
    load = summary.load
    output, total = headline(summary).output, headline(summary).total
    lanes = next((stage.concurrency for stage in summary.stages if stage.measured), None)
    gpus, tpot = summary.target.gpus, summary.tpot_ms.p50
    shown = (("ttft", summary.ttft_ms), ("tpot", summary.tpot_ms), ("e2e", summary.e2e_ms))
    return SweepLevel(
        name=called,
        load=brief(load.arrival),
        amount=float(lanes) if lanes is not None else load.offered_rps,
        ok=summary.requests.ok,
        failed=summary.requests.decided - summary.requests.ok,
        requests_per_s=headline(summary).requests,
        output_per_s=output,
        per_gpu=per_gpu(output, gpus),
        per_user=1000 / tpot if tpot else None,
        ttft_p50=summary.ttft_ms.p50,
        ttft_p99=summary.ttft_ms.p99,
        tpot_p50=tpot,
        tpot_p99=summary.tpot_ms.p99,
        e2e_p50=summary.e2e_ms.p50,
        unsupported=tuple(
            f"{n}_{q}" for n, d in shown for q in ("p50", "p99") if q not in d.supported and d.count
        ),
        goodput=summary.goodput.share,
        slo_met=summary.goodput.met,
        slo_undecided=summary.goodput.undecided,
        valid=summary.verdict.valid,
        state=summary.run.state,
        simulated=summary.target.simulated,
        closed=lanes is not None,
        at_once=_began_at_once(summary.stages),
        full=lanes is None or summary.window.steady.duration_s is not None,
        total_per_gpu=per_gpu(total, gpus),
        sustained=summary.sustainable.sustained,
    )


def knee(levels: Sequence[SweepLevel]) -> str:
    """The name of the level where more load begins to cost more latency than it brings throughput.

    That is the largest output tokens/s divided by E2E p50 (power: Kleinrock 1979), among valid levels. "" with fewer
    than three of them, or when it is the last one: then the knee is not reached yet.
    """
    valid_levels = [
        level for level in levels if level.valid and level.output_per_s and level.e2e_p50
    ]
    if len(valid_levels) < 3:
        return ""
    best = max(valid_levels, key=lambda level: (level.output_per_s or 0) / (level.e2e_p50 or 1))
    return "" if best is valid_levels[-1] else best.name


def pareto(points: Mapping[Name, tuple[float | None, float | None]]) -> set[Name]:
    """The names of the points on the Pareto front: no other point is at least as good in both values and better in one.

    A point with an unknown value is not on the front.
    """
    known = {name: (x, y) for name, (x, y) in points.items() if x is not None and y is not None}
    return {
        name
        for name, (x, y) in known.items()
        if not any(a >= x and b >= y and (a, b) != (x, y) for a, b in known.values())
    }
