"""Turns the options of `loadgen sweep` into load points with their workloads and settings."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from loadgen.cli.targets import select_endpoint
from loadgen.core import format
from loadgen.core.errors import CombinedError, LoadgenError, UserError, collecting
from loadgen.core.workload.flags import select_load_options
from loadgen.runs.load_points import LoadPoint
from loadgen.search.sweep import LoadKind, combine_load_points, combine_point_groups, parse_loads

if TYPE_CHECKING:
    from loadgen.cli.invocation import Invocation
    from loadgen.core.execution.plan import Settings
    from loadgen.core.workload import Workload
    from loadgen.runs.planned_runs import PlannedRun
    from loadgen.runs.run_display import RunDisplay

LOAD_OPTIONS: tuple[LoadKind, ...] = ("concurrency", "request_rate")
LENGTH_OPTIONS = ("input_tokens", "output_tokens")
ONLY_TARGET = ""
"""The name that stands for the target of a sweep without --target, as in `LoadPoint.target`."""
REQUESTS_PER_VIRTUAL_USER = 5
"""The least number of requests of a virtual user, in a closed loop without a specified length."""


class PlannedPoint(Struct, frozen=True):
    """A load point with the workload that is sent and the settings of its target."""

    point: LoadPoint
    workload: Workload
    settings: Settings


class Sweep(Struct, frozen=True, kw_only=True):
    """A sweep as it was requested.

    Attributes:
        workload_name: The name of the workload as it was typed.
        load_kind: What the loads are.
        target: The target as it is shown, "" if the load points have targets of their own.
        options: The options that change the load, as text by their names. Options that differ
            between load points, such as the load itself, are left out.
        points: The load points.
    """

    workload_name: str
    load_kind: LoadKind
    target: str
    options: dict[str, str]
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
        from loadgen.runs.planned_runs import PlannedRun

        return [PlannedRun(planned.workload, planned.settings) for planned in self.points]


class SweepRun(NamedTuple):
    """A sweep that is carried out in a directory, and what shows its progress."""

    sweep: Sweep
    output_dir: Path
    display: RunDisplay


@dataclass(frozen=True)
class _PointPlanner:
    """Makes the workload of each load point from the options of the command."""

    invocation: Invocation
    workload_name: str | None
    load_kind: LoadKind

    def plan_points(
        self, points: Sequence[LoadPoint], settings_by_target: Mapping[str, Settings]
    ) -> tuple[PlannedPoint, ...]:
        """Return the load points with their workloads and settings.

        A group is the load points of one target and one pair of input and output lengths. `points`
        are ordered by group.

        Raises CombinedError with the errors of the first group that has any. The workloads of later
        groups are then not loaded, because most mistakes are the same in all groups and would be
        reported once for each.
        """
        planned_points: list[PlannedPoint] = []
        for _, points_of_group in itertools.groupby(points, key=lambda point: point.group):
            errors: list[LoadgenError] = []
            for point in points_of_group:
                with collecting(errors):
                    workload = self.workload_at(point)
                    settings = settings_by_target[point.target]
                    planned_points.append(PlannedPoint(point, workload, settings))

            if errors:
                raise CombinedError(errors)

        return tuple(planned_points)

    def workload_at(self, point: LoadPoint) -> Workload:
        """Return the workload at one load point.

        If it has too few requests for the virtual users of a closed loop, it gets more.

        Raises UserError if --num-requests is smaller than the number of virtual users.
        """
        options = self._options_at(point)
        workload = self.invocation.load_workload(self.workload_name, **options)
        if self.load_kind == "request_rate":
            return workload

        needed_count = self._missing_request_count(workload, virtual_users=point.load)
        if needed_count is None:
            return workload

        return self.invocation.load_workload(
            self.workload_name, **options, num_requests=f"{needed_count:g}"
        )

    def _missing_request_count(self, workload: Workload, virtual_users: float) -> float | None:
        """Return how many requests a closed loop needs, or None if its workload need not change.

        It needs REQUESTS_PER_VIRTUAL_USER for each virtual user, unless an option states its
        length: a duration, or a number of requests.

        Raises UserError if --num-requests is smaller than the number of virtual users.
        """
        measured_stages = (stage for stage in workload.stages if stage.measured)
        request_count = next((stage.count for stage in measured_stages), None)
        if request_count is None:  # A duration limits the stage.
            return None

        if self.invocation["num_requests"] is not None:
            _check_request_count(request_count, virtual_users)
            return None

        needed_count = REQUESTS_PER_VIRTUAL_USER * virtual_users
        has_duration_option = self.invocation["duration"] is not None
        if has_duration_option or request_count >= needed_count:
            return None

        return needed_count

    def _options_at(self, point: LoadPoint) -> dict[str, str | None]:
        """Return the options of the load and the lengths at one load point."""
        options: dict[str, str | None] = dict.fromkeys(LOAD_OPTIONS)
        options[self.load_kind] = f"{point.load:g}"
        for option, length in zip(LENGTH_OPTIONS, (point.isl, point.osl), strict=True):
            if length is not None:
                options[option] = str(length)
        return options


def plan_sweep(invocation: Invocation, workload_name: str | None, target: str | None) -> Sweep:
    """Return the sweep that the options ask for: its load points with workloads and settings.

    Args:
        invocation: The options that all commands have in common.
        workload_name: The workload as it was typed, or None.
        target: The value of --target, the names of several targets, or None.

    Raises:
        CombinedError: Everything that is wrong with the targets, the loads and the lengths, or
            else with the workloads.
    """
    load_kind: LoadKind = "request_rate"
    if invocation["concurrency"] is not None:
        load_kind = "concurrency"

    varied_lengths = _varied_length_options(invocation, target)

    errors: list[LoadgenError] = []
    settings_by_target: dict[str, Settings] = {}
    points: list[LoadPoint] = []

    with collecting(errors):
        settings_by_target = _settings_by_target(invocation, target)

    with collecting(errors):
        target_names = [] if target is None else list(settings_by_target)
        points = _parse_load_points(invocation, varied_lengths, target_names)

    if errors:
        raise CombinedError(errors)

    planner = _PointPlanner(invocation, workload_name, load_kind)
    return Sweep(
        workload_name=workload_name or str(invocation["trace"] or invocation["dataset"]),
        load_kind=load_kind,
        target="" if target is not None else settings_by_target[ONLY_TARGET].display_name,
        options=_common_load_options(invocation, varied_lengths),
        points=planner.plan_points(points, settings_by_target),
    )


def _parse_load_points(
    invocation: Invocation, varied_lengths: Sequence[str], target_names: Sequence[str]
) -> list[LoadPoint]:
    """Return a load point for each combination of a load, a pair of lengths and a target.

    Raises CombinedError for all mistakes in the loads and the lengths.

    Args:
        invocation: The options with the loads and the lengths.
        varied_lengths: The options of lengths that are properties of the load points, or none.
        target_names: The names of the targets of --target, or none.
    """
    errors: list[LoadgenError] = []
    loads: tuple[float, ...] = ()
    points: list[LoadPoint] = []

    with collecting(errors):
        load_kind = _load_option(invocation)
        flag = f"--{load_kind.replace('_', '-')}"
        loads = parse_loads(invocation[load_kind], flag, load_kind)

    with collecting(errors):
        groups = combine_point_groups(
            invocation["input_tokens"] if varied_lengths else None,
            invocation["output_tokens"] if varied_lengths else None,
            target_names,
        )
        if loads:
            points = combine_load_points(groups, loads, load_kind)

    if errors:
        raise CombinedError(errors)

    return points


def _common_load_options(invocation: Invocation, varied_lengths: Sequence[str]) -> dict[str, str]:
    """Return the options that change the load of all load points alike, as text by their names.

    `varied_lengths` are the options of lengths that differ between load points.
    """
    varied_options = (*LOAD_OPTIONS, *varied_lengths)
    return {
        option: str(value)
        for option, value in select_load_options(invocation.options).items()
        if option not in varied_options
    }


def _varied_length_options(invocation: Invocation, target: str | None) -> tuple[str, ...]:
    """Return LENGTH_OPTIONS if they are properties of the load points, else ().

    They are if the load points differ by length or target. The only length of a sweep with a single
    target is an option of the whole sweep instead.
    """
    has_several_lengths = any("," in str(invocation[option] or "") for option in LENGTH_OPTIONS)
    return LENGTH_OPTIONS if target is not None or has_several_lengths else ()


def _load_option(invocation: Invocation) -> LoadKind:
    """Return which option names the loads: "concurrency" for --concurrency, or "request_rate".

    Raises UserError unless exactly one of the two is used.
    """
    used_options = [option for option in LOAD_OPTIONS if invocation[option] is not None]
    if len(used_options) == 1:
        return used_options[0]

    raise UserError(
        "missing_option",
        "no loads are given, or two kinds of them",
        "loadgen sweep",
        "use either --concurrency 1,2,4,...,64 or --request-rate 1,2,4,...,64",
    )


def _check_request_count(request_count: int, virtual_users: float) -> None:
    """Raise UserError for fewer requests than virtual users."""
    if request_count >= virtual_users:
        return

    requests = format.counted(request_count, "request is", "requests are")
    enough = REQUESTS_PER_VIRTUAL_USER * virtual_users
    raise UserError(
        "out_of_range",
        f"{requests} too few for {virtual_users:,.0f} virtual users",
        f"--num-requests {request_count}",
        f"use --num-requests {enough:g}, or leave it out",
    )


def _settings_by_target(invocation: Invocation, target: str | None) -> dict[str, Settings]:
    """Return the settings for each target of a sweep, by the name of the target.

    Three options describe targets:

    - `--target a,b` names the targets that the sweep compares. Its value is `target`.
    - `--targets FILE` is a file that defines endpoints. If it is used, the names in `--target` are
      those of endpoints in this file. Otherwise they are URLs.
    - `--url URL` is the target of a sweep without `--target`. The two options exclude each other.

    Without `--target` all load points have the same settings, whose key is ONLY_TARGET.

    Raises LoadgenError if a name is repeated, empty or not known, or if there is also a --url.
    """
    if target is None:
        return {ONLY_TARGET: invocation.settings()}

    target_option = f"--target {target}"
    names = [part.strip() for part in target.split(",")]
    has_repeated_name = len(set(names)) < len(names)

    has_empty_name = not all(names)
    if has_repeated_name or has_empty_name:
        problem = "every target needs a name of its own"
        raise UserError("duplicate", problem, where=target_option, hint="--target a,b")

    if invocation["targets"] is not None:
        return _settings_of_known_targets(invocation.settings(), names, target_option)

    if invocation["url"]:
        problem = "--url and --target exclude each other"
        raise UserError("conflict", problem, where=target_option, hint="leave out --url")

    return {url: invocation.with_options(url=[url]).settings() for url in names}


def _settings_of_known_targets(
    settings: Settings, names: Sequence[str], target_option: str
) -> dict[str, Settings]:
    """Return the settings for the named endpoints of the --targets file, by their names.

    Raises UserError if the file has no endpoint of one of these names.

    Args:
        settings: The settings with all endpoints of the file.
        names: The names of the endpoints to use.
        target_option: The option --target with its value, for an error message.
    """
    settings_by_name = {}
    for name in names:
        endpoint = select_endpoint(settings.endpoints, name, target_option)
        settings_by_name[name] = replace(settings, targets=(endpoint,), url=endpoint.url)

    return settings_by_name
