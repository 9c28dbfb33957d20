"""Where the expected rates of a plan come from: trials on a simulated server, or earlier runs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
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
    """Measure the speed of a simulated server at the concurrency of each point, by short trials.

    Raises:
        UserError: The server is not simulated.
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
    """Measure the speed of a server at the concurrency of each point, by short trials.

    The results of the trials are deleted afterwards.
    """
    with tempfile.TemporaryDirectory(prefix="loadgen-plan-") as temporary_dir:
        trials_dir = Path(temporary_dir)
        return [
            _measure_rate(point, data, seed_set, settings, trials_dir / point.name)
            for point in points
        ]


def _measure_rate(
    point: CurvePoint, data: CurveData, seed_set: SeedSet, settings: Settings, run_dir: Path
) -> ConcurrencyRate:
    """Measure the mean response time at the concurrency of one point, by a short run.

    With a concurrency of 8, 8 requests are in flight. While the first 8 requests are sent, the load
    builds up, and while the last 8 end, it goes down, so both are left out of the mean.

    Args:
        point: The measurement point, with the concurrency.
        data: The samples of the data set.
        seed_set: The random seeds of the samples.
        settings: The server and how requests are sent.
        run_dir: The directory for the results of the run. A file with the requests is next to it.

    Raises:
        UserError: No request completed.
    """
    request_count = _choose_trial_size(point, is_virtual=settings.virtual)
    workload = build_workload(point, data, seed_set, request_count, output_dir=run_dir.parent)
    _, run_dir = run.execute(workload, replace(settings, out=run_dir))

    response_s = _mean_response_s(run_dir, excluded_at_each_end=point.concurrency)
    if response_s is None:
        raise UserError("no_figure", "no request of the trial completed", settings.display_name)
    return ConcurrencyRate(point.concurrency, response_s)


def _choose_trial_size(point: CurvePoint, *, is_virtual: bool) -> int:
    """Return how many requests the short run at a measurement point sends.

    A simulation in virtual time is fast, so it has more requests than a run in real time.
    """
    least_requests = MIN_TRIAL_REQUESTS if is_virtual else MIN_REAL_TRIAL_REQUESTS
    rounds = OFFLINE_TRIAL_ROUNDS if point.is_offline_run else TRIAL_ROUNDS
    return max(rounds * point.concurrency, least_requests)


def read_rates(folder: Path) -> list[ConcurrencyRate]:
    """Return the mean response times of earlier runs, in the order of their concurrencies.

    Args:
        folder: The directory of a run with a fixed number of requests in flight (concurrency), or a
            directory of several runs, for example a sweep.

    Raises:
        UserError: No run has a fixed concurrency and a completed request.
    """
    run_dirs = [folder] if run_folder.is_run(folder) else run_folder.runs_in(folder)
    rates_or_none = [_read_rate(run_dir) for run_dir in run_dirs]
    rates = [rate for rate in rates_or_none if rate is not None]
    if not rates:
        raise UserError(
            "no_figure",
            "no run with a fixed concurrency and a completed request is here",
            f"--from {folder}",
            "give the folder of loadgen sweep --concurrency 1,8,64,512",
        )
    return sorted(rates, key=lambda rate: rate.concurrency)


def _read_rate(run_dir: Path) -> ConcurrencyRate | None:
    """Return the concurrency of a run and its mean response time.

    Return None if no measured stage of the load has a fixed concurrency, or if no request
    completed. With several such stages, the concurrency is that of the first one.
    """
    stages = store.read_run_lazily(run_dir).manifest.stages
    concurrencies = [
        stage.concurrency for stage in stages if stage.measured and stage.concurrency is not None
    ]
    if not concurrencies:
        return None

    response_s = _mean_response_s(run_dir, excluded_at_each_end=0)
    return None if response_s is None else ConcurrencyRate(concurrencies[0], response_s)


def _mean_response_s(run_dir: Path, *, excluded_at_each_end: int) -> float | None:
    """Return the mean response time of the completed requests of a run, in seconds.

    Return None if no request completed.

    Args:
        run_dir: The directory of the run.
        excluded_at_each_end: How many of the first requests are left out, and as many of the last
            ones. A run that would then have no request is used completely.
    """
    all_rows = store.read_run(run_dir).rows
    rows = all_rows[np.argsort(all_rows["due_ns"], kind="stable")]  # by scheduled time
    if len(rows) > 2 * excluded_at_each_end:
        rows = rows[excluded_at_each_end : len(rows) - excluded_at_each_end]

    is_successful = rows["status"] == STATUS["ok"]
    has_end_time = rows["end_ns"] >= 0
    completed = rows[is_successful & has_end_time]
    if len(completed) == 0:
        return None

    response_ns = completed["end_ns"] - completed["due_ns"]
    return float(response_ns.mean()) / NS_PER_S


def is_simulated(folder: Path) -> bool:
    """Return whether a run, or one of the runs in a folder, had a simulated server."""
    run_dirs = [folder] if run_folder.is_run(folder) else run_folder.runs_in(folder)
    return any(run_folder.open_run(run_dir).summary.target.simulated for run_dir in run_dirs)
