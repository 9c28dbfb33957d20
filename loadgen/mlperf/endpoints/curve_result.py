"""The stored result of a rehearsed curve: what was planned, and what each point measured.

`endpoints_curve.json` is written before the first point and says what the curve is, so that the
same command resumes it. `endpoints.json` has the results of the points that have run.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadgen.core import format
from loadgen.core.errors import UserError, missing_result
from loadgen.core.results import store
from loadgen.core.results.files import refuse_links
from loadgen.core.results.json_files import decode_json
from loadgen.mlperf.endpoints import rules
from loadgen.mlperf.endpoints.points import Curve, CurvePoint
from loadgen.mlperf.endpoints.steady_state_block import SteadyStateBlock
from loadgen.mlperf.endpoints.steady_window import SteadyState

CURVE_FILE = "endpoints_curve.json"
RESULT_FILE = "endpoints.json"
RUN_AGAIN = "give a results folder of loadgen mlperf endpoints run"


class StoredCurve(msgspec.Struct, frozen=True, kw_only=True):
    """A curve as it was requested, with everything that decides its requests.

    Attributes:
        benchmark: The name of the benchmark.
        model: The model that the benchmark requires.
        data_name: The name of the data set.
        dataset_size: Its number of samples.
        seed_set: The identifier of the seed set.
        target_cohort: The cohort of the seed set.
        curve: The points.
        requests: The requests of each point, by its name.
        target: The name of the server.
        is_simulated: Whether the server is simulated.
        max_point_s: The limit on the time of one run, in seconds.
        provisioned_power_kw: The provisioned power of the system in kW. None if it is not known.
        command: The command line without secrets.
        disclosure: That the result is unofficial.
    """

    benchmark: str
    model: str
    data_name: str
    dataset_size: int
    seed_set: str
    target_cohort: str
    curve: Curve
    requests: dict[str, int]
    target: str
    is_simulated: bool
    max_point_s: float | None
    provisioned_power_kw: float | None
    command: tuple[str, ...] = ()
    disclosure: str = rules.DISCLOSURE


class PointMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of a part of a run (section 4.1).

    Attributes:
        queries: The issued queries.
        completed: Those that completed.
        duration_s: The time that throughput is divided by, in seconds. It is the time from the
            first to the last issue for a window, and to the last completion for a complete run.
        output_tokens: The output tokens of the completed queries.
        system_tps: Output tokens per second of all users together.
        ttft_p50_ms: TTFT p50 in ms. None without a sample, like the percentiles below.
        ttft_p90_ms: TTFT p90 in ms.
        tpot_p50_ms: TPOT p50 in ms.
        tpot_p90_ms: TPOT p90 in ms.
    """

    queries: int
    completed: int
    duration_s: float
    output_tokens: int
    system_tps: float
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    tpot_p50_ms: float | None
    tpot_p90_ms: float | None

    @property
    def tps_per_user(self) -> float | None:
        """Output tokens per second that a user sees: 1000 / TPOT p90 in ms. None without TPOT."""
        return 1000 / self.tpot_p90_ms if self.tpot_p90_ms else None


class PointLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How the requests of a point were sent, as its run recorded it.

    Attributes:
        concurrency: The requests in flight. None if the load had no fixed concurrency.
        has_warmup: Whether requests were sent before the measured ones.
        is_streaming: Whether responses were streamed.
        seed: The random seed.
        salt: What made the texts of this run differ from those of others.
        target: The name of the server.
        model: The model that the server names.
        metadata: What the user stated about the run, such as the facts of a system file.
        gpus: The number of GPUs that the user stated. None if it is not known.
        precision: The precision that the server reports. "" if it reports none.
    """

    concurrency: int | None
    has_warmup: bool
    is_streaming: bool
    seed: int | None
    salt: str
    target: str
    model: str
    metadata: dict[str, str] = {}
    gpus: int | None = None
    precision: str = ""


class PointResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the run of one point measured.

    Attributes:
        point: The point. Its run is in the directory with its name.
        load: How its requests were sent.
        issued: The queries that were issued.
        completed: Those that completed.
        failed: Those that did not.
        steady_state: The steady window and its verdict. None for an Offline run, which has none
            (section 4.4, scope).
        steady_state_block: The block `steady_state` of `point.yaml`. None for an Offline run.
        window: The metrics of the steady window. None without a window.
        total: The metrics of the complete run.
        measurement_errors: Why the run is not a valid measurement. Empty if it is.
    """

    point: CurvePoint
    load: PointLoad
    issued: int
    completed: int
    failed: int
    steady_state: SteadyState | None
    steady_state_block: SteadyStateBlock | None = None
    window: PointMetrics | None
    total: PointMetrics
    measurement_errors: tuple[str, ...] = ()

    @property
    def has_official_window(self) -> bool:
        """Whether the metrics of the window are the result, by sections 4.4 and 6.2."""
        if self.steady_state is None or self.window is None:
            return False
        is_long_enough = self.window.duration_s >= self.point.min_window_s
        return self.steady_state.is_official and is_long_enough

    @property
    def basis(self) -> str:
        """What the result of the point is computed over."""
        return "steady window" if self.has_official_window else "complete run"

    @property
    def metrics(self) -> PointMetrics:
        """The metrics that are the result of the point."""
        if self.has_official_window and self.window is not None:
            return self.window
        return self.total

    @property
    def verdict(self) -> str:
        """The verdict about the shape of the run, in words for people."""
        if self.steady_state is None:
            return "no window needed"
        return VERDICT_LABELS[self.steady_state.verdict]


VERDICT_LABELS = {
    "STEADY STATE": "steady",
    "drifting_up": "drifting up",
    "drifting_down": "drifting down",
    "anomaly": "staircase",
    "not found": "not found",
}
"""The verdicts of section 4.4 in words. A staircase is a step to another level."""


class CurveResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results of the points of a curve that have run, in the order of concurrency."""

    curve: StoredCurve
    points: tuple[PointResult, ...]

    @property
    def missing_points(self) -> tuple[str, ...]:
        """The names of the points that have not run."""
        measured = {result.point.name for result in self.points}
        return tuple(point.name for point in self.curve.curve.points if point.name not in measured)

    @property
    def fixed_results(self) -> tuple[PointResult, ...]:
        """The results of the points with a fixed concurrency."""
        return tuple(result for result in self.points if not result.point.is_offline_run)

    @property
    def offline_result(self) -> PointResult | None:
        """The Offline result: that of the Offline run, or that of the elected point."""
        offline = [result for result in self.points if result.point.offline != "none"]
        return offline[0] if offline else None

    @property
    def max_system_tps(self) -> float:
        """The highest throughput of all points, 0 without a point."""
        return max((result.metrics.system_tps for result in self.points), default=0.0)

    def tps_per_kw(self, result: PointResult) -> float | None:
        """Return the throughput per provisioned kW (section 4.5.3), or None without the power."""
        power_kw = self.curve.provisioned_power_kw
        return result.metrics.system_tps / power_kw if power_kw else None


def begin_curve(output_dir: Path, curve: StoredCurve) -> None:
    """Store the description of a curve, or check that the directory already has the same one.

    A command that resumes a curve may have another command line and another limit on time.

    Raises:
        UserError: The directory has a curve of different points, requests, seeds or servers.
    """
    path = output_dir / CURVE_FILE
    if not path.exists():
        store.replace(path, format.document(curve))
        return

    stored = read_curve(output_dir)
    if _identity(stored) != _identity(curve):
        raise UserError(
            "mismatch",
            "the folder has a curve of other points, requests, seeds or another server",
            f"--out {output_dir}",
            "use another folder, or the options of the first command",
        )


def _identity(curve: StoredCurve) -> StoredCurve:
    """Return a curve without the fields that may change when it is resumed."""
    return msgspec.structs.replace(curve, command=(), max_point_s=None)


def read_curve(output_dir: Path) -> StoredCurve:
    """Return the curve that a directory was created for.

    Raises:
        UserError: The directory has no curve, or the file is damaged.
    """
    path = _existing_file(output_dir, CURVE_FILE)
    return decode_json(path.read_bytes(), StoredCurve, str(path), "a curve of MLPerf Endpoints")


def read_result(output_dir: Path) -> CurveResult:
    """Return the stored result of a curve.

    Raises:
        UserError: The directory has no result, or the file is damaged.
    """
    path = _existing_file(output_dir, RESULT_FILE)
    return decode_json(path.read_bytes(), CurveResult, str(path), "a result of MLPerf Endpoints")


def _existing_file(output_dir: Path, name: str) -> Path:
    """Return the path of a file in the directory of a curve.

    Raises:
        UserError: The directory or the file does not exist, or the directory has links.
    """
    if not output_dir.is_dir():
        raise missing_result(output_dir, RUN_AGAIN)

    refuse_links(output_dir)
    path = output_dir / name
    if not path.is_file():
        raise UserError("no_result", "the folder has no curve", str(path), RUN_AGAIN)
    return path
