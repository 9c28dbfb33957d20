"""Runs of one workload at several loads, side by side: the levels of a sweep, its knee, its Pareto front.

Pure: summaries in, values out. `sweep_report.py` renders them.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from loadgen.core.errors import INCONCLUSIVE, OK, SLO_MISSED, UNSOUND
from loadgen.core.metrics.summary import fails_by_errors
from loadgen.core.metrics.token_usage import per_gpu
from loadgen.repeated.capacity import HIGHEST_LOAD_PASSED
from loadgen.runs.headline import brief, promises
from loadgen.runs.load_points import LoadPoint, PointGroup
from loadgen.runs.rates import headline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loadgen.core.metrics.part_summaries import StageSummary
    from loadgen.core.metrics.summary import NamedSummary, Summary

Outcome = Literal["under", "over", "invalid"]
Name = TypeVar("Name")


class SweepLevel(msgspec.Struct, frozen=True, kw_only=True):
    """One load of a sweep. Rates are those of the steady window where known; latencies are in ms."""

    name: str  # name of its folder: c8, r2.5, isl500-osl100-c8
    isl: int | None = None  # prompt length, where the sweep has several
    osl: int | None = None  # output length, where the sweep has several
    target: str = ""  # where the sweep has several
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
    many_errors: bool = False  # there is no SLO, and the error rate is above its limit

    @property
    def is_usable(self) -> bool:
        """Whether its metrics describe a server that served its load."""
        return self.valid and not self.many_errors

    @property
    def group(self) -> PointGroup:
        """Return what it has in common with the other load points of its curve."""
        return PointGroup(isl=self.isl, osl=self.osl, target=self.target)

    @property
    def label(self) -> str:
        """Return the load as text, after the lengths and the target if the sweep has several."""
        return ", ".join(filter(None, (self.group.label, self.load or self.name)))


class GroupCurve(PointGroup, frozen=True, kw_only=True):
    """What was found on the curve of one group of load points.

    Attributes:
        knee: The name of the load point at the knee, or "".
        best: The name of the best load point within the SLO, or "".
    """

    knee: str
    best: str

    @property
    def group(self) -> PointGroup:
        """Return the lengths and the target alone."""
        return PointGroup(isl=self.isl, osl=self.osl, target=self.target)


class SweepCurve(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a sweep.

    Attributes:
        target: All targets, separated by commas.
        gpus: Null if it is not known, or the targets differ.
        levels: The load points, in order of load within each group.
        knee: The name of the load point at the knee. Empty if no load point lies between others,
            and if there are several groups.
        best: The name of the best load point within the SLO. Empty if there is none, without an
            SLO, and if there are several groups.
        metadata: The metadata of the first run.
        groups: The curves of a sweep over several lengths or targets. Empty if there is one.
        not_run: The names of the requested load points that have not run to their end.
        resume: The command that runs them.
    """

    workload: str
    model: str
    target: str
    gpus: int | None
    version: str
    started: str
    slo: str
    levels: tuple[SweepLevel, ...]
    knee: str
    best: str
    metadata: dict[str, str] = {}
    region: str = ""
    groups: tuple[GroupCurve, ...] = ()
    not_run: tuple[str, ...] = ()
    resume: str = ""

    def split(self) -> list[SweepCurve]:
        """Return one curve for each group of load points: this one, if there is only one."""
        if not self.groups:
            return [self]
        return [self._of_group(found) for found in self.groups]

    def _of_group(self, found: GroupCurve) -> SweepCurve:
        return msgspec.structs.replace(
            self,
            levels=tuple(level for level in self.levels if level.group == found.group),
            knee=found.knee,
            best=found.best,
            groups=(),
        )


def exit_code(curve: SweepCurve, *, strict: bool = False) -> int:
    """Return the exit code of a sweep, when it ends and when its folder is read.

    It is 3 if a workload or target has no valid load point, 1 if there is no SLO and too many
    requests failed at all its load points, 4 with `strict` if one is undecided, else 0.
    """
    curves = curve.split()
    if not all(any(level.valid for level in one.levels) for one in curves):
        return UNSOUND
    if not all(any(level.is_usable for level in one.levels) for one in curves):
        return SLO_MISSED
    if strict and any(level.slo_undecided for level in curve.levels):
        return INCONCLUSIVE
    return OK


def curve(
    named: Sequence[NamedSummary], points: Mapping[str, LoadPoint] | None = None
) -> SweepCurve:
    """Return the curve of a sweep, or of any folder of runs.

    `named` holds the name and the summary of each run, of at least one. `points` holds the load
    points of a sweep by the name of their run.
    """
    requested = points or {}
    levels = [_level(name, summary, requested.get(name)) for name, summary in named]
    groups = [point.group for point in requested.values()] + [level.group for level in levels]
    order = list(dict.fromkeys(groups))
    levels.sort(key=lambda level: (order.index(level.group), level.amount or 0, level.name))
    levels = _with_fronts(levels)
    curves = [
        _group_curve(group, [level for level in levels if level.group == group])
        for group in dict.fromkeys(level.group for level in levels)
    ]
    only = curves[0] if len(curves) == 1 else None
    first = named[0][1]
    gpus = {summary.target.gpus for _, summary in named}
    targets = [summary.target.name or summary.target.url for _, summary in named]
    slo_terms = max([promises(summary) for _, summary in named], key=len)  # of one with tasks
    return SweepCurve(
        workload=first.run.workload,
        model=first.target.model,
        target=", ".join(dict.fromkeys(targets)),
        gpus=first.target.gpus if len(gpus) == 1 else None,
        version=first.run.version,
        started=first.run.started,
        slo=", ".join(slo_terms),
        levels=tuple(levels),
        knee="" if only is None else only.knee,
        best="" if only is None else only.best,
        metadata=first.run.metadata,
        region=first.target.region,
        groups=() if only is not None else tuple(curves),
    )


def _group_curve(group: PointGroup, levels: Sequence[SweepLevel]) -> GroupCurve:
    """Return the knee and the best load point of the load points of one group."""
    best_level = best(levels)
    return GroupCurve(
        isl=group.isl,
        osl=group.osl,
        target=group.target,
        knee=knee(levels),
        best="" if best_level is None else best_level.name,
    )


def _with_fronts(levels: Sequence[SweepLevel]) -> list[SweepLevel]:
    """Mark the load points on the Pareto front of all targets at the same lengths."""
    front: set[str] = set()
    for lengths in dict.fromkeys((level.isl, level.osl) for level in levels):
        valid = [level for level in levels if level.is_usable and (level.isl, level.osl) == lengths]
        # Without the GPUs of every run, the throughput of all of them together is compared.
        by_gpu = all(level.per_gpu is not None for level in valid)
        front |= pareto(
            {
                level.name: (level.per_gpu if by_gpu else level.output_per_s, level.per_user)
                for level in valid
            }
        )
    return [msgspec.structs.replace(level, front=level.name in front) for level in levels]


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
    """Return the load point of least load that missed the SLO."""
    return next((level for level in levels if outcome(level) == "over"), None)


def lowest_growing(levels: Sequence[SweepLevel]) -> SweepLevel | None:
    """Return the load point of least load that met the SLO and was not sustained."""
    return next((level for level in kept(levels) if level.sustained is False), None)


def best(levels: Sequence[SweepLevel]) -> SweepLevel | None:
    """Return the load point with the highest load within the SLO, or None. `levels` are in order of load.

    A load point counts only below the lowest load that missed the SLO or was not sustained: one
    that passed above it shows no capacity. In an open loop the highest load is the one with the
    highest rate. In a closed loop, where the load is what the virtual users complete, it is the one
    that completed most.
    """
    limits = [
        level.amount or 0.0
        for level in (lowest_missed(levels), lowest_growing(levels))
        if level is not None
    ]
    limit = min(limits, default=math.inf)
    return max(
        (level for level in kept(levels) if (level.amount or 0.0) < limit),
        key=_sustained_load,
        default=None,
    )


def _sustained_load(level: SweepLevel) -> float:
    """Return the rate of an open loop, and of a closed loop the rate that it completed."""
    load = level.requests_per_s if level.closed else level.amount
    return load or 0.0


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
            f"at {best.load or best.name} all virtual users started at once: lanes in step meet "
            "queues that a spread load does not"
        )
    if missed is None and (grew := grew_above(curve)):
        return f"{best.load or best.name} kept the SLO, {grew.load or grew.name} grew, and the end lies between"
    if missed is None:
        last = not above or kept(above)
        at = best.load or best.name
        return (
            HIGHEST_LOAD_PASSED
            if last
            else f"no level above {at} is a valid measurement that decides the SLO"
        )
    if best.closed:
        return f"{best.load or best.name} kept the SLO, {missed.load or missed.name} missed it, and the end lies between"
    return ""


def grew_above(curve: SweepCurve) -> SweepLevel | None:
    """Return the lowest load point above the best one that met the SLO and was not sustained."""
    names = [level.name for level in curve.levels]
    if curve.best not in names:
        return None
    return lowest_growing(curve.levels[names.index(curve.best) + 1 :])


def _began_at_once(stages: Sequence[StageSummary]) -> bool:
    """Return whether all virtual users of the first closed loop began at the same time, which has to be requested."""
    begun = [
        stage
        for stage in stages
        if stage.concurrency and stage.concurrency > 1 and stage.ramp_from != "stage"
    ]
    return bool(begun) and begun[0].ramp_s == 0


def _level(name: str, summary: Summary, point: LoadPoint | None) -> SweepLevel:
    """Return the metrics of a run as a load point; `point` is what a sweep requested."""
    load = summary.load
    output, total = headline(summary).output, headline(summary).total
    lanes = next((stage.concurrency for stage in summary.stages if stage.measured), None)
    gpus, tpot = summary.target.gpus, summary.tpot_ms.p50
    shown = (("ttft", summary.ttft_ms), ("tpot", summary.tpot_ms), ("e2e", summary.e2e_ms))
    return SweepLevel(
        name=name,
        isl=None if point is None else point.isl,
        osl=None if point is None else point.osl,
        target="" if point is None else point.target,
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
        many_errors=fails_by_errors(summary),
    )


def knee(levels: Sequence[SweepLevel]) -> str:
    """The name of the level where more load begins to cost more latency than it brings throughput.

    That is the largest output tokens/s divided by E2E p50 (power: Kleinrock 1979), among valid levels. "" with fewer
    than three of them, or when it is the last one: then the knee is not reached yet.
    """
    valid_levels = [
        level for level in levels if level.is_usable and level.output_per_s and level.e2e_p50
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
