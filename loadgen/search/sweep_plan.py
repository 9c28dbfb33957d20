"""Turns the options of `loadgen sweep` into load points with their workloads and settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from loadgen.core import format
from loadgen.core.errors import CombinedError, LoadgenError, UserError, closest, collecting
from loadgen.core.workload.flags import select_load_options
from loadgen.runs.load_points import LoadPoint, PointGroup
from loadgen.search.sweep import LoadKind, parse_loads, point_groups, points_of

if TYPE_CHECKING:
    from loadgen.cli.invocation import Invocation
    from loadgen.core.execution.plan import Settings
    from loadgen.core.workload import Workload
    from loadgen.runs.show import PlannedRun, Show

LOAD_OPTIONS = ("concurrency", "request_rate")
LENGTH_OPTIONS = ("input_tokens", "output_tokens")
REQUESTS_PER_VIRTUAL_USER = 5  # at least, in a closed loop whose length is not given


class PlannedPoint(Struct, frozen=True):
    """A load point with the workload that is sent and the settings of its target."""

    point: LoadPoint
    workload: Workload
    settings: Settings


class Sweep(Struct, frozen=True, kw_only=True):
    """A sweep as it was requested.

    Attributes:
        name: The name of the workload as it was typed.
        target: The target as it is shown, "" if the load points have targets of their own.
        flags: The options that change the load, without those that differ between load points.
    """

    name: str
    kind: LoadKind
    target: str
    flags: dict[str, str]
    points: tuple[PlannedPoint, ...]

    @property
    def workload(self) -> Workload:
        """The workload of the first load point, for what all of them share."""
        return self.points[0].workload

    @property
    def settings(self) -> Settings:
        """The settings of the first load point, for what all of them share."""
        return self.points[0].settings

    @property
    def planned_runs(self) -> list[PlannedRun]:
        """The runs of all load points."""
        return [(planned.workload, planned.settings) for planned in self.points]


class SweepRun(NamedTuple):
    """A sweep that is carried out in a directory, and where its progress is shown."""

    sweep: Sweep
    folder: Path
    show: Show


def plan_sweep(invocation: Invocation, workload: str | None, target: str | None) -> Sweep:
    """Return the sweep that the options ask for.

    `target` is the value of --target: the names of several targets. Raises Faults with
    everything that is wrong.
    """
    kind: LoadKind = "concurrency" if invocation["concurrency"] is not None else "request_rate"
    has_groups = target is not None or any(
        "," in str(invocation[option] or "") for option in LENGTH_OPTIONS
    )
    varied = LENGTH_OPTIONS if has_groups else ()
    faults: list[LoadgenError] = []
    settings: dict[str, Settings] = {}
    loads: tuple[float, ...] = ()
    points: list[LoadPoint] = []
    with collecting(faults):
        settings = _settings_by_target(invocation, target)
    with collecting(faults):
        loads = _loads(invocation, kind)
    with collecting(faults):
        isl, osl = (invocation[option] if option in varied else None for option in LENGTH_OPTIONS)
        groups = point_groups(isl, osl, [*settings] if target is not None else [])
        points = points_of(groups, loads, kind)
    if faults:
        raise CombinedError(faults)
    options = select_load_options(invocation.options)
    return Sweep(
        name=workload or str(invocation["trace"] or invocation["dataset"]),
        kind=kind,
        target="" if target is not None else settings[""].shown,
        flags={
            option: str(value)
            for option, value in options.items()
            if option not in (*LOAD_OPTIONS, *varied)
        },
        points=_planned_points(invocation, workload, kind, points, settings),
    )


def _loads(invocation: Invocation, kind: LoadKind) -> tuple[float, ...]:
    """Return the loads of --concurrency or --request-rate. Raises UserError."""
    given = [option for option in LOAD_OPTIONS if invocation[option] is not None]
    if len(given) != 1:
        hint = "either --concurrency 1,2,4,...,64 or --request-rate 1,2,4,...,64"
        raise UserError("missing_option", "one kind of levels is needed", "loadgen sweep", hint)
    return parse_loads(invocation[kind], f"--{kind.replace('_', '-')}", kind)


def _planned_points(
    invocation: Invocation,
    workload: str | None,
    kind: LoadKind,
    points: list[LoadPoint],
    settings: Mapping[str, Settings],
) -> tuple[PlannedPoint, ...]:
    """Return the load points with their workloads. Raises Faults for those of the first group."""
    planned: list[PlannedPoint] = []
    faults: list[LoadgenError] = []
    group: PointGroup | None = None
    for point in points:
        if faults and point.group != group:
            break  # the faults of other lengths are most often the same
        group = point.group
        with collecting(faults):
            at_point = workload_at(invocation, workload, kind, point)
            planned.append(PlannedPoint(point, at_point, settings[point.target]))
    if faults:
        raise CombinedError(faults)
    return tuple(planned)


def workload_at(
    invocation: Invocation, name: str | None, kind: LoadKind, point: LoadPoint
) -> Workload:
    """Return the workload at one load point.

    A closed loop without a given length gets at least REQUESTS_PER_VIRTUAL_USER requests for each
    virtual user. Raises UserError for fewer requests than virtual users.
    """
    options: dict[str, str | None] = {
        option: str(length)
        for option, length in zip(LENGTH_OPTIONS, (point.isl, point.osl), strict=True)
        if length is not None
    }
    options |= dict.fromkeys(LOAD_OPTIONS) | {kind: f"{point.load:g}"}
    workload = invocation.load_workload(name, **options)
    count = next((stage.count for stage in workload.stages if stage.measured), None)
    if kind == "request_rate" or count is None:
        return workload
    enough = REQUESTS_PER_VIRTUAL_USER * point.load
    if invocation["num_requests"] is not None and count < point.load:
        few = format.counted(count, "request is", "requests are")
        what = f"{few} fewer than {point.load:,.0f} lanes: so many would never be in flight"
        hint = f"--num-requests {enough:g}, or leave it out"
        raise UserError("out_of_range", what, f"--num-requests {count}", hint)
    has_length = invocation["num_requests"] is not None or invocation["duration"] is not None
    if not has_length and count < enough:
        return invocation.load_workload(name, **options, num_requests=f"{enough:g}")
    return workload


def _settings_by_target(invocation: Invocation, target: str | None) -> dict[str, Settings]:
    """Return the settings for each target of --target by its name; "" without --target.

    Raises Fault or Faults.
    """
    if target is None:
        return {"": invocation.settings()}
    where = f"--target {target}"
    names = [part.strip() for part in target.split(",")]
    if len(set(names)) < len(names) or not all(names):
        raise UserError("duplicate", "each target once, by a name", where, "--target a,b")
    if invocation["targets"] is None:
        if invocation["url"]:
            what = "--url and --target exclude each other"
            raise UserError("conflict", what, where, "leave out --url")
        return {name: invocation.with_options(url=[name]).settings() for name in names}
    settings = invocation.settings()
    known = {endpoint.name: endpoint for endpoint in settings.endpoints}
    if unknown := next((name for name in names if name not in known), None):
        hint = closest(unknown, [*known]) or f"known: {', '.join(known)}"
        raise UserError("unknown_name", f"no target is called {unknown}", where, hint)
    return {name: replace(settings, targets=(known[name],), url=known[name].url) for name in names}
