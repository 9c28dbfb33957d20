"""The curve of a sweep: runs of one workload at several loads, side by side.

Pure: summaries in, values out. `sweep_analysis.py` judges the load points, and `sweep_report.py`
renders the curve.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from loadgen.core.errors import INCONCLUSIVE, OK, SLO_MISSED, UNSOUND
from loadgen.core.metrics.interactivity import DEFAULT_DEFINITION
from loadgen.repeated.capacity import HIGHEST_LOAD_PASSED
from loadgen.runs.load_point_results import LoadPointResult, load_point_result
from loadgen.runs.load_points import PointGroup
from loadgen.runs.slo_text import list_objectives
from loadgen.runs.sweep_analysis import (
    best_load_point,
    find_knee,
    lowest_growing,
    lowest_missed,
    pareto_front,
    points_within_slo,
)
from loadgen.runs.sweep_answers import AnswersUnderLoad, compare_load_points

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loadgen.core.metrics.summary import NamedSummary
    from loadgen.runs.load_points import LoadPoint


class GroupCurve(PointGroup, frozen=True, kw_only=True):
    """The result of one group of load points.

    Attributes:
        knee: The name of the load point at the knee, or "".
        best: The name of the best load point within the SLO, or "".
    """

    knee: str
    best: str

    @property
    def group(self) -> PointGroup:
        """The lengths and the target alone."""
        return PointGroup(isl=self.isl, osl=self.osl, target=self.target)


class SweepCurve(msgspec.Struct, frozen=True, kw_only=True, rename={"load_points": "levels"}):
    """The result of a sweep.

    Attributes:
        target: All targets, separated by commas.
        gpus: Null if it is not known, or the targets differ.
        load_points: The load points, in order of load within each group.
        knee: The name of the load point at the knee. Empty if no load point lies between others,
            and if there are several groups.
        best: The name of the best load point within the SLO. Empty if there is none, without an
            SLO, and if there are several groups.
        metadata: The metadata of the first run.
        groups: The curves of a sweep over several lengths or targets. Empty if there is one.
        not_run: The names of the requested load points that have not run to their end.
        resume: The command that runs them.
        interactivity: The definition of the speed per user that the Pareto front is about: tpot50,
            endpoints or agentx.
        answers: Whether the checked answers are worse at higher load points. Null without checked
            answers, and if there are several groups.
    """

    workload: str
    model: str
    target: str
    gpus: int | None
    version: str
    started: str
    slo: str
    load_points: tuple[LoadPointResult, ...]
    knee: str
    best: str
    metadata: dict[str, str] = {}
    region: str = ""
    groups: tuple[GroupCurve, ...] = ()
    not_run: tuple[str, ...] = ()
    resume: str = ""
    interactivity: str = DEFAULT_DEFINITION
    answers: AnswersUnderLoad | None = None

    @property
    def best_point(self) -> LoadPointResult | None:
        """The best load point within the SLO, or None."""
        return self._point_called(self.best)

    @property
    def knee_point(self) -> LoadPointResult | None:
        """The load point at the knee, or None."""
        return self._point_called(self.knee)

    def _point_called(self, name: str) -> LoadPointResult | None:
        return next((point for point in self.load_points if point.name == name), None)

    @property
    def points_above_best(self) -> tuple[LoadPointResult, ...]:
        """The load points of more load than the best one. Empty if there is no best one."""
        best = self.best_point
        if best is None:
            return ()
        return self.load_points[self.load_points.index(best) + 1 :]

    def split(self) -> list[SweepCurve]:
        """Return one curve for each group of load points: this one, if there is only one."""
        if not self.groups:
            return [self]
        return [self._curve_of_group(group_curve) for group_curve in self.groups]

    def _curve_of_group(self, group_curve: GroupCurve) -> SweepCurve:
        group = group_curve.group
        return msgspec.structs.replace(
            self,
            load_points=tuple(point for point in self.load_points if point.group == group),
            knee=group_curve.knee,
            best=group_curve.best,
            groups=(),
        )


def exit_code(curve: SweepCurve, *, strict: bool = False) -> int:
    """Return the exit code of a sweep, when it ends and when its directory is read.

    A group is all load points with the same lengths and target. The exit code is:

    - UNSOUND (3) if the runs of a group are all INVALID.
    - SLO_MISSED (1) if there is no SLO, and in a group too many requests failed at every load.
    - INCONCLUSIVE (4) with `strict`, if a load point cannot decide the SLO.
    - OK (0) otherwise. A missed SLO is a normal result of a sweep.
    """
    for group_curve in curve.split():
        if not any(point.valid for point in group_curve.load_points):
            return UNSOUND

    for group_curve in curve.split():
        if not any(point.is_usable for point in group_curve.load_points):
            return SLO_MISSED

    if strict and any(point.slo_undecided for point in curve.load_points):
        return INCONCLUSIVE

    return OK


# Building a curve from the summaries of runs


def build_curve(
    runs: Sequence[NamedSummary], requested: Mapping[str, LoadPoint] | None = None
) -> SweepCurve:
    """Return the curve of a sweep, or of any directory of runs.

    A group is all runs with the same request lengths and target. With several groups, the curve
    has one `GroupCurve` for each of them. The knee and the best load point are then known only for
    each group, since loads of different groups cannot be compared.

    Args:
        runs: The name and the summary of each run, of at least one.
        requested: The load points that a sweep requested, by the names of their runs.
    """
    points = _load_point_results(runs, requested or {})
    group_curves = _group_curves(points)
    curve_without_groups = _curve_without_groups(runs, points)
    if len(group_curves) > 1:
        return msgspec.structs.replace(curve_without_groups, groups=tuple(group_curves))
    only_group = group_curves[0]
    return msgspec.structs.replace(
        curve_without_groups,
        knee=only_group.knee,
        best=only_group.best,
        answers=compare_load_points(points),
    )


def _curve_without_groups(
    runs: Sequence[NamedSummary], points: Sequence[LoadPointResult]
) -> SweepCurve:
    """Return the load points with what was measured, before they are divided into groups.

    What is the same for all runs is taken from the first one.
    """
    first_summary = runs[0].summary
    gpu_counts = {run.summary.target.gpus for run in runs}
    targets = [run.summary.target.name or run.summary.target.url for run in runs]

    return SweepCurve(
        workload=first_summary.run.workload,
        model=first_summary.target.model,
        target=", ".join(dict.fromkeys(targets)),
        gpus=first_summary.target.gpus if len(gpu_counts) == 1 else None,
        version=first_summary.run.version,
        started=first_summary.run.started,
        slo=_describe_slo(runs),
        load_points=tuple(points),
        knee="",
        best="",
        metadata=first_summary.run.metadata,
        region=first_summary.target.region,
    )


def _group_curves(points: Sequence[LoadPointResult]) -> list[GroupCurve]:
    """Return a curve for each group of load points, in the order of the load points."""
    groups = dict.fromkeys(point.group for point in points)
    return [
        _group_curve(group, [point for point in points if point.group == group]) for group in groups
    ]


def _load_point_results(
    runs: Sequence[NamedSummary], requested: Mapping[str, LoadPoint]
) -> list[LoadPointResult]:
    """Return the load points of runs by group, in order of load within each group.

    The groups are in the order in which they were requested, and groups that were not requested
    come last. The points on the Pareto front are marked.

    Args:
        runs: The name and the summary of each run.
        requested: The load points that a sweep requested, by the names of their runs.
    """
    points = [load_point_result(run.name, run.summary, requested.get(run.name)) for run in runs]
    all_groups = [point.group for point in requested.values()]
    all_groups += [point.group for point in points]
    ordered_groups = list(dict.fromkeys(all_groups))  # without repetitions

    def sort_key(point: LoadPointResult) -> tuple[int, float, str]:
        return ordered_groups.index(point.group), point.load_value or 0.0, point.name

    return mark_pareto_front(sorted(points, key=sort_key), DEFAULT_DEFINITION)


def _describe_slo(runs: Sequence[NamedSummary]) -> str:
    """Return the objectives of the SLO as text.

    A run states the objectives of tasks only if a task ended in it, so that the run with the most
    objectives states all of them.
    """
    objectives_of_runs: list[tuple[str, ...]] = [list_objectives(run.summary) for run in runs]
    objectives_of_runs.sort(key=len)
    return ", ".join(objectives_of_runs[-1])


def _group_curve(group: PointGroup, points: Sequence[LoadPointResult]) -> GroupCurve:
    """Return the knee and the best load point of the load points of one group."""
    best = best_load_point(points)
    return GroupCurve(
        isl=group.isl,
        osl=group.osl,
        target=group.target,
        knee=find_knee(points),
        best="" if best is None else best.name,
    )


def with_interactivity(curve: SweepCurve, interactivity: str) -> SweepCurve:
    """Return the curve with the Pareto front by another definition of the speed per user.

    Args:
        curve: The curve.
        interactivity: The name of the definition: tpot50, endpoints or agentx.
    """
    load_points = tuple(mark_pareto_front(curve.load_points, interactivity))
    return msgspec.structs.replace(curve, load_points=load_points, interactivity=interactivity)


def mark_pareto_front(
    points: Sequence[LoadPointResult], interactivity: str
) -> list[LoadPointResult]:
    """Mark the load points on the Pareto front, and return all of them in the same order.

    A load point is on the front if no other one has both a higher throughput and a higher speed for
    each user. Load points of all targets are compared, but only with the same prompt and output
    lengths.

    Args:
        points: The load points.
        interactivity: The name of the definition of the speed for each user.
    """
    names_on_front: set[str] = set()
    all_lengths = dict.fromkeys((point.isl, point.osl) for point in points)
    for lengths in all_lengths:
        comparable_points = [
            point for point in points if point.is_usable and (point.isl, point.osl) == lengths
        ]
        names_on_front |= _names_on_front(comparable_points, interactivity)

    return [
        msgspec.structs.replace(point, on_pareto_front=point.name in names_on_front)
        for point in points
    ]


def _names_on_front(points: Sequence[LoadPointResult], interactivity: str) -> set[str]:
    """Return the names on the Pareto front of throughput per GPU against throughput per user.

    Both are in output tokens per second. If the GPUs of a run are not known, the throughput of all
    GPUs together is compared.
    """
    has_gpus = all(point.per_gpu is not None for point in points)
    throughputs_by_name = {}
    for point in points:
        throughput = point.per_gpu if has_gpus else point.output_per_s
        throughputs_by_name[point.name] = (throughput, point.speed_per_user(interactivity))
    return pareto_front(throughputs_by_name)


# The best load point as a capacity


def lowest_growing_above_best(curve: SweepCurve) -> LoadPointResult | None:
    """Return the lowest load point above the best one that met the SLO and was not sustained."""
    return lowest_growing(curve.points_above_best)


def lower_bound_reason(curve: SweepCurve) -> str:
    """Return why the capacity may be higher than the best load point within the SLO.

    Return "" if there is no best load point, and for an open loop that missed the SLO at a higher
    rate: its capacity lies between the two rates and can be estimated. In a closed loop it cannot,
    because the completed rate hardly differs between a concurrency below the capacity and one
    above it.
    """
    best = curve.best_point
    if best is None:
        return ""
    if best.started_at_once:
        return (
            f"at {best.short_label} all virtual users started at once, and a synchronized start "
            "causes queues that a staggered one avoids"
        )

    missed = lowest_missed(curve.load_points)
    if missed is None:
        return _lower_bound_reason_without_missed_slo(curve, best)
    if best.is_closed_loop:
        return (
            f"{best.short_label} met the SLO, {missed.short_label} missed it, and the limit lies "
            "between them"
        )

    return ""


def _lower_bound_reason_without_missed_slo(curve: SweepCurve, best: LoadPointResult) -> str:
    """Return why the capacity may be higher, for a sweep in which no load missed the SLO.

    Either a higher load met the SLO, but the queue of the server kept growing. Then the capacity
    lies between the best load and that one. Or no higher load shows where the capacity ends.
    """
    unsustained = lowest_growing_above_best(curve)
    if unsustained is not None:
        return (
            f"{best.short_label} met the SLO, {unsustained.short_label} was not sustained, and the "
            "limit lies between them"
        )

    points_above = curve.points_above_best
    best_is_highest = not points_above
    if best_is_highest or points_within_slo(points_above):
        return HIGHEST_LOAD_PASSED

    return f"no load point above {best.short_label} is a valid measurement that decides the SLO"
