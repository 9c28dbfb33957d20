"""Where the expected rates of a plan come from: trials on a simulated server, or earlier runs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from loadgen.core import run_folder
from loadgen.core.errors import UserError
from loadgen.core.execution import run
from loadgen.core.execution.plan import Settings
from loadgen.core.results import store
from loadgen.core.results.record import STATUS
from loadgen.mlperf.endpoints.points import CurvePoint
from loadgen.mlperf.endpoints.rates import ConcurrencyRate
from loadgen.mlperf.endpoints.rules import SeedSet
from loadgen.mlperf.endpoints.workloads import CurveData, build_workload

NS_PER_S = 1_000_000_000

TRIAL_ROUNDS = 6
"""Requests of each concurrency slot in a trial. The first and the last round are left out.

In the first round all requests start at once, and in the last one the slots run empty.
"""

OFFLINE_TRIAL_ROUNDS = 3
"""The rounds of a trial of Offline, whose many slots need only one round in the middle."""

MIN_TRIAL_REQUESTS = 240
"""The fewest requests of a simulated trial, for a mean response time that is known to 10 %."""

MIN_REAL_TRIAL_REQUESTS = 40
"""The fewest requests of a trial on a real server, where they take time."""


def simulate_rates(
    points: Sequence[CurvePoint], data: CurveData, seed_set: SeedSet, settings: Settings
) -> list[ConcurrencyRate]:
    """Return the speed of a simulated server at each concurrency, by a short trial in virtual time.

    Nothing is stored.

    Raises UserError if the target is not simulated.
    """
    if not settings.virtual:
        raise UserError(
            "unsupported",
            "a plan sends nothing to a real server",
            "--url",
            "use --url sim:PRESET, or --from FOLDER with a sweep of the server",
        )

    return measure_rates(points, data, seed_set, settings)


def measure_rates(
    points: Sequence[CurvePoint], data: CurveData, seed_set: SeedSet, settings: Settings
) -> list[ConcurrencyRate]:
    """Return the speed of a server at the concurrency of each point, by a short trial.

    Nothing is stored.
    """
    with tempfile.TemporaryDirectory(prefix="loadgen-plan-") as folder:
        return [
            _measure_rate(point, data, seed_set, settings, Path(folder) / point.name)
            for point in points
        ]


def _measure_rate(
    point: CurvePoint, data: CurveData, seed_set: SeedSet, settings: Settings, folder: Path
) -> ConcurrencyRate:
    """Return the speed at the concurrency of one point.

    Raises UserError if no request completed.
    """
    fewest = MIN_TRIAL_REQUESTS if settings.virtual else MIN_REAL_TRIAL_REQUESTS
    rounds = OFFLINE_TRIAL_ROUNDS if point.is_offline_run else TRIAL_ROUNDS
    request_count = max(rounds * point.concurrency, fewest)
    workload = build_workload(point, data, seed_set, request_count, folder.parent)
    _, run_dir = run.execute(workload, replace(settings, out=folder))
    response_s = _mean_response_s(run_dir, left_out=point.concurrency)
    if response_s is None:
        raise UserError("no_figure", "no request of the trial completed", settings.display_name)
    return ConcurrencyRate(point.concurrency, response_s)


def read_rates(folder: Path) -> list[ConcurrencyRate]:
    """Return the speed at each concurrency of earlier runs, in the order of concurrency.

    Args:
        folder: A run with a fixed concurrency, or a folder of such runs, for example a sweep.

    Raises:
        UserError: No run has a fixed concurrency and a completed request.
    """
    run_dirs = [folder] if run_folder.is_run(folder) else run_folder.runs_in(folder)
    rates = [rate for run_dir in run_dirs for rate in _rate_of_run(run_dir)]
    if not rates:
        raise UserError(
            "no_figure",
            "no run with a fixed concurrency and a completed request is here",
            f"--from {folder}",
            "give the folder of loadgen sweep --concurrency 1,8,64,512",
        )
    return sorted(rates, key=lambda rate: rate.concurrency)


def _rate_of_run(run_dir: Path) -> Iterator[ConcurrencyRate]:
    """Yield the speed that a run shows, or nothing if it has no fixed concurrency."""
    manifest = store.read_run_lazily(run_dir).manifest
    for stage in manifest.stages:
        if not stage.measured or stage.concurrency is None:
            continue
        response_s = _mean_response_s(run_dir, left_out=0)
        if response_s is not None:
            yield ConcurrencyRate(stage.concurrency, response_s)
        return


def _mean_response_s(run_dir: Path, *, left_out: int) -> float | None:
    """Return the mean response time of the completed requests of a run, in seconds.

    Args:
        run_dir: The directory of the run.
        left_out: How many requests are left out at the start, and again at the end.
    """
    rows = store.read_run(run_dir).rows
    by_issue = np.argsort(rows["due_ns"], kind="stable")
    if len(by_issue) > 2 * left_out:
        by_issue = by_issue[left_out : len(by_issue) - left_out]
    is_completed = (rows["status"] == STATUS["ok"]) & (rows["end_ns"] >= 0)
    completed = by_issue[is_completed[by_issue]]
    if not len(completed):
        return None
    response_ns = rows["end_ns"][completed] - rows["due_ns"][completed]
    return float(response_ns.mean()) / NS_PER_S


def is_simulated(folder: Path) -> bool:
    """Return whether a run, or one of the runs in a folder, had a simulated server."""
    run_dirs = [folder] if run_folder.is_run(folder) else run_folder.runs_in(folder)
    return any(run_folder.open_run(run_dir).summary.target.simulated for run_dir in run_dirs)
