"""Finds the steady-state window of a measurement point of MLPerf Endpoints, and judges it.

Pure. Takes the query log of one run at one concurrency and returns a `SteadyState`: the verdict,
the window as query indices and times, and the diagnostics that the rules name.

The method works on the series of super-passes (`super_passes.py`) in four steps:

1. *Ramp-up*: drop the first super-passes whose median TPOT is not yet near that of the second half.
2. *Plateaus*: from left to right, find the longest windows in which both gating metrics, TPOT p50
   and p90, scatter little and have no trend that is both significant and large.
3. *Window*: the first plateau that lasts long enough. It is never chosen by its throughput, which
   would select favourable noise.
4. *Rest of the run*: test whether a gating metric drifts from the start of the window to the end of
   the run, and whether a later plateau lies at another level.

Sources, both public, of MLCommons:
    "Rules": `endpoints_rules.md` of mlcommons/endpoints_policies, version 1.0 draft.
    "Detection": `docs/steady-state-detection.md` of mlcommons/endpoints. Two of its thresholds were
    changed later (`docs/steady_state_diagnostics.md`): p90 took the place of p95 and of p99.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.core.stats.rank_tests import (
    NORMAL_QUANTILE_95,
    TrendDirection,
    find_change_point,
    find_monotonic_trend,
    relative_linear_growth,
)
from loadgen.mlperf.endpoints.rules import MIN_SUPER_PASSES, minimum_window_s
from loadgen.mlperf.endpoints.super_passes import (
    QueryLog,
    SuperPasses,
    group_by_super_pass,
    lower_percentile,
    percentile_series,
    pool_samples,
)

Verdict = Literal["STEADY STATE", "drifting_up", "drifting_down", "anomaly", "not found"]
"""The shape of a run, by the words of rules §4.4. A staircase is an `anomaly`."""

Status = Literal["windowable", "insufficient_duration", "insufficient_passes", "partial_dataset"]
"""The coverage of a run, by the words of rules §4.4. Only `windowable` makes the window official.
"""

MetricState = Literal["Plateau", "Drifting Up", "Drifting Down"]
"""The state of a gating metric, by the words of rules §4.4."""

GATING_METRICS = ("tpot_p50", "tpot_p90")
"""The metrics that decide whether a window is steady (rules §4.4, definitions)."""

WATCHED_METRICS = (*GATING_METRICS, "ttft_p50", "ttft_p90")
"""The metrics that are tested for drift after the window. TTFT only warns (detection §5.5)."""

RAMP_UP_BAND = 0.05
"""A super-pass belongs to the ramp-up while its TPOT p50 is further than this from the steady level
(detection §5.3; the default of the reference detector)."""

MIN_RAMP_UP_SUPER_PASSES = 1
"""The first super-pass always belongs to the ramp-up (the default of the reference detector)."""

MAX_RAMP_UP_SHARE = 0.5
"""At most this share of the super-passes belongs to the ramp-up (detection §5.3)."""

MAX_VARIATION = 0.08
"""The largest coefficient of variation of a gating metric in a plateau. It is the loosest of the
bounds 0.03, 0.05 and 0.08, of which one has to hold (detection §5.5)."""

MIN_TREND_CHANGE = 0.05
"""A significant trend ends a plateau only if it changes the metric by this fraction from the first
to the last super-pass: TREND_REL_DRIFT_MIN of detection §5.5."""

LEVEL_SHIFT = 0.05
"""A later plateau lies at another level if its mean TPOT differs by more than this fraction
(detection §5.5)."""

DETECTABLE_DURATION_S = 600.0
"""The shortest window that shows disturbances which last minutes: T_floor of detection §5.5."""

RELAXATION_LATENCIES = 5.0
"""A window lasts at least so many p90 latencies: T_relaxation of detection §5.5."""

PRECISION = 0.05
"""The mean of the window has to be known to this fraction: epsilon of detection §5.5."""

NS_PER_S = 1_000_000_000


class SteadyWindow(msgspec.Struct, frozen=True, kw_only=True):
    """A range of super-passes, with the same range as queries and as times.

    Attributes:
        first_super_pass: The index of the first super-pass of the window, counted from the start
            of the run.
        end_super_pass: The index after the last super-pass.
        first_query: The index of the first query, in the order of issue.
        end_query: The index after the last query.
        start_ns: When the first query was issued.
        end_ns: When the last query was issued. The drain after it does not belong to the window.
    """

    first_super_pass: int
    end_super_pass: int
    first_query: int
    end_query: int
    start_ns: int
    end_ns: int

    @property
    def super_passes(self) -> int:
        """The number of super-passes."""
        return self.end_super_pass - self.first_super_pass

    @property
    def duration_s(self) -> float:
        """The time from the first to the last issue, which the rules limit (§6.2)."""
        return (self.end_ns - self.start_ns) / NS_PER_S


class DurationNeed(msgspec.Struct, frozen=True, kw_only=True):
    """How long a plateau has to last to be reported, by three criteria (detection §5.5).

    Attributes:
        precision_s: The time for enough super-passes to know the mean of TPOT p50 to PRECISION, 0
            if MIN_SUPER_PASSES are enough.
        relaxation_s: RELAXATION_LATENCIES times the p90 of latency.
        floor_s: DETECTABLE_DURATION_S.
        needed_super_passes: The super-passes that PRECISION needs.
        variation: The coefficient of variation of TPOT p50 in the plateau.
        super_pass_s: The median issue span of its super-passes.
        latency_p90_s: The p90 of its end-to-end latencies.
    """

    precision_s: float
    relaxation_s: float
    floor_s: float
    needed_super_passes: int
    variation: float
    super_pass_s: float
    latency_p90_s: float

    @property
    def needed_s(self) -> float:
        """The longest of the three times."""
        return max(self.precision_s, self.relaxation_s, self.floor_s)

    @property
    def decisive_term(self) -> Literal["precision", "relaxation", "floor"]:
        """The criterion that needs the longest time."""
        if self.needed_s == self.precision_s:
            return "precision"
        if self.needed_s == self.relaxation_s:
            return "relaxation"
        return "floor"


class LevelShift(msgspec.Struct, frozen=True, kw_only=True):
    """A confirmed step of TPOT to another level after the window: a staircase.

    Attributes:
        super_pass: The super-pass at which TPOT changes, counted from the start of the run.
        change: The change of the mean TPOT relative to the window. 0.2 means 20 % slower.
        p_value: The significance of the step, by Pettitt's test.
    """

    super_pass: int
    change: float
    p_value: float


class SteadyState(msgspec.Struct, frozen=True, kw_only=True):
    """The steady state of one run at one concurrency, as rules §4.4 report it.

    Attributes:
        verdict: The shape of the run.
        status: The coverage of the run.
        reason: Why no window was found, in a sentence. Empty if one was.
        window: The reported window. If every plateau is too short, it is the longest one, which
            is not official. None if there is no plateau.
        states: The state of each gating metric in the window, which is a plateau by definition.
            Without a window, the state over the run after the ramp-up, if it is long enough.
        trends: The direction of each watched metric from the start of the window to the end of the
            run, which decides the verdict. A metric with too few super-passes for a test has none.
        super_pass_size: The queries per super-pass.
        super_passes: The super-passes of the run. The last one may be incomplete.
        ramp_up_super_passes: Those at the start that were dropped.
        plateaus: Every plateau, from left to right. The window is one of them.
        skipped_plateaus: The number of plateaus before the window, which are too short.
        minimum_duration_s: The shortest official window at this concurrency (rules §6.2).
        duration_need: How long the window has to last to be found. None without a window.
        level_shift: The step after the window, if the verdict is `anomaly`.
        variations: The coefficient of variation of each watched metric in the window.
    """

    verdict: Verdict
    status: Status
    reason: str
    window: SteadyWindow | None
    states: dict[str, MetricState]
    trends: dict[str, TrendDirection]
    super_pass_size: int
    super_passes: int
    ramp_up_super_passes: int
    plateaus: tuple[SteadyWindow, ...]
    skipped_plateaus: int
    minimum_duration_s: float
    duration_need: DurationNeed | None
    level_shift: LevelShift | None
    variations: dict[str, float]

    @property
    def is_official(self) -> bool:
        """Whether the metrics of the window are the official result, instead of the full run's."""
        return self.status == "windowable"


class _PlateauChoice(NamedTuple):
    """The plateau that is reported as the window.

    Attributes:
        plateau_index: Its index in the list of all plateaus.
        window: The plateau.
        need: How long it has to last.
        is_long_enough: Whether it lasts that long.
    """

    plateau_index: int
    window: SteadyWindow
    need: DurationNeed
    is_long_enough: bool


class _RunSeries(NamedTuple):
    """A run as a series of super-passes: blocks of as many queries as the data set has samples.

    Attributes:
        passes: The samples of each super-pass.
        metrics: Each watched metric by super-pass, in ns. A super-pass without samples has NaN.
        ramp_up: The number of super-passes at the start in which the server is not yet at its
            steady level.
    """

    passes: SuperPasses
    metrics: Mapping[str, NDArray[np.float64]]
    ramp_up: int


def find_steady_state(log: QueryLog, super_pass_size: int, concurrency: int) -> SteadyState:
    """Find the steady-state window of a run: the part in which its latency is stable.

    A super-pass is a block of consecutive queries, as many as the data set has. A plateau is a
    range of super-passes in which the time per output token (TPOT) has little scatter and no trend.
    The window is the first plateau that lasts long enough.

    Args:
        log: The queries of the run in the order of issue, without the queries of the warm-up.
        super_pass_size: The number of queries per super-pass.
        concurrency: The number of queries in flight, which decides how long the window has to last.

    Raises:
        ValueError: The size is not positive, or the queries are not in the order of issue.
    """
    run = _divide_run(log, super_pass_size)
    plateaus = _find_plateaus(run)
    if not plateaus:
        return _report_no_plateau(run, concurrency)

    needs = [_find_duration_need(run, plateau) for plateau in plateaus]
    choice = _choose_plateau(plateaus, needs)
    return _report_window(run, plateaus, choice, concurrency)


def _divide_run(log: QueryLog, super_pass_size: int) -> _RunSeries:
    """Return a run in super-passes, with its metrics by super-pass and its ramp-up."""
    passes = group_by_super_pass(log, super_pass_size)
    metrics = _compute_metrics(passes)
    return _RunSeries(passes, metrics, ramp_up=_count_ramp_up(metrics["tpot_p50"]))


def _report_window(
    run: _RunSeries,
    plateaus: Sequence[SteadyWindow],
    choice: _PlateauChoice,
    concurrency: int,
) -> SteadyState:
    """Return the result of a run with a steady range of super-passes.

    If even the chosen range is too short, it is reported, but the verdict is "not found".

    Args:
        run: The run.
        plateaus: All steady ranges, in the order of time.
        choice: The range that is reported as the window.
        concurrency: The number of queries in flight.
    """
    window = choice.window

    # Whether the run stays steady after the start of the window.
    trends = _find_trends(run, window.first_super_pass)
    later_plateaus = plateaus[choice.plateau_index + 1 :]
    level_shift = _find_level_shift(run, window, later_plateaus)

    verdict: Verdict = "not found"
    reason = _explain_short(window, choice.need)
    if choice.is_long_enough:
        verdict = _judge_rest_of_run(level_shift, trends)
        reason = ""

    minimum_duration_s = minimum_window_s(concurrency)
    is_official = choice.is_long_enough and window.duration_s >= minimum_duration_s
    return SteadyState(
        # The result.
        verdict=verdict,
        status="windowable" if is_official else "insufficient_duration",
        reason=reason,
        # The window, and how long it has to last.
        window=window,
        states=_judge_gating_metrics(run, window.first_super_pass, window.end_super_pass),
        variations=_compute_variations(run, window),
        duration_need=choice.need,
        minimum_duration_s=minimum_duration_s,
        # The run around the window.
        super_pass_size=run.passes.size,
        super_passes=run.passes.count,
        ramp_up_super_passes=run.ramp_up,
        plateaus=tuple(plateaus),
        skipped_plateaus=choice.plateau_index,
        trends=trends,
        level_shift=level_shift,
    )


def _report_no_plateau(run: _RunSeries, concurrency: int) -> SteadyState:
    """Return the result of a run that has no steady range of super-passes, and so no window.

    Args:
        run: The run.
        concurrency: The number of queries in flight.
    """
    passes = run.passes
    states = _judge_gating_metrics(run, run.ramp_up, passes.count)
    has_part_of_dataset = passes.queries < passes.size

    return SteadyState(
        # The result.
        verdict="not found",
        status="partial_dataset" if has_part_of_dataset else "insufficient_passes",
        reason=_explain_no_plateau(passes.count - run.ramp_up, states),
        # The run.
        states=states,
        trends=_find_trends(run, run.ramp_up),
        super_pass_size=passes.size,
        super_passes=passes.count,
        ramp_up_super_passes=run.ramp_up,
        minimum_duration_s=minimum_window_s(concurrency),
        # Nothing about a window.
        window=None,
        plateaus=(),
        skipped_plateaus=0,
        duration_need=None,
        level_shift=None,
        variations={},
    )


# -- step 1: the ramp-up ---------------------------------------------------------------------------


def _compute_metrics(passes: SuperPasses) -> dict[str, NDArray[np.float64]]:
    """Return each watched metric by super-pass, in ns. A super-pass without samples has NaN."""
    return {
        "tpot_p50": percentile_series(passes.tpot_ns, 0.5),
        "tpot_p90": percentile_series(passes.tpot_ns, 0.9),
        "ttft_p50": percentile_series(passes.ttft_ns, 0.5),
        "ttft_p90": percentile_series(passes.ttft_ns, 0.9),
    }


def _count_ramp_up(tpot_p50: NDArray[np.float64]) -> int:
    """Return how many super-passes at the start belong to the ramp-up.

    The time per output token (TPOT) rises while the batches of the server fill. The ramp-up ends at
    the first super-pass whose TPOT is within 5 % of the steady level, which is the median of the
    second half of the run. It has at least one super-pass and at most half of all, which is also
    its length if no super-pass is near the level.

    Args:
        tpot_p50: The median TPOT of each super-pass. NaN for a super-pass without samples, which
            does not count.
    """
    known_tpot = tpot_p50[~np.isnan(tpot_p50)]
    if len(known_tpot) < MIN_SUPER_PASSES:
        return MIN_RAMP_UP_SUPER_PASSES

    second_half = known_tpot[len(known_tpot) // 2 :]
    steady_level = float(np.median(second_half))
    is_near_level = np.abs(known_tpot - steady_level) <= RAMP_UP_BAND * steady_level

    ramp_up = int(len(known_tpot) * MAX_RAMP_UP_SHARE)
    if is_near_level.any():
        first_near_level = int(np.argmax(is_near_level))  # the index of the first True
        ramp_up = min(ramp_up, first_near_level)
    return max(ramp_up, MIN_RAMP_UP_SUPER_PASSES)


# -- step 2: the plateaus --------------------------------------------------------------------------


def _find_plateaus(run: _RunSeries) -> list[SteadyWindow]:
    """Return the plateaus after the ramp-up, in the order of time.

    A plateau is a range of super-passes with steady metrics. The range begins with MIN_SUPER_PASSES
    super-passes and grows as long as the metrics are steady. The next plateau begins after its end.
    """
    plateaus = []
    start = run.ramp_up
    while start + MIN_SUPER_PASSES <= run.passes.count:
        end = _find_plateau_end(run, start)
        if end is None:
            start += 1
        else:
            plateaus.append(_create_window(run.passes, start, end))
            start = end
    return plateaus


def _find_plateau_end(run: _RunSeries, start: int) -> int | None:
    """Return the index after the last super-pass of the plateau that starts at a super-pass.

    Return None if no plateau starts there: the first MIN_SUPER_PASSES super-passes are not steady.
    """
    plateau_end = None
    shortest_end = start + MIN_SUPER_PASSES
    for end in range(shortest_end, run.passes.count + 1):
        is_steady = all(_is_steady(run.metrics[name][start:end]) for name in GATING_METRICS)
        if not is_steady:
            break
        plateau_end = end
    return plateau_end


def _is_steady(values: NDArray[np.float64]) -> bool:
    """Return whether a metric has little scatter and no trend over some super-passes.

    A super-pass without samples has the value NaN, and makes the metric unsteady.
    """
    if np.isnan(values).any():
        return False
    if _compute_variation(values) > MAX_VARIATION:
        return False
    return _judge_trend(values) == "Plateau"


def _judge_trend(values: NDArray[np.float64]) -> MetricState:
    """Return whether the values of a metric, one per super-pass, rise, fall or stay the same.

    A trend counts only if it is statistically significant and changes the metric by at least 5 %.
    Over many super-passes, a change too small to matter would also be significant.
    """
    is_small_change = abs(relative_linear_growth(values)) < MIN_TREND_CHANGE
    if is_small_change:
        return "Plateau"

    direction = find_monotonic_trend(values).direction
    states: dict[TrendDirection, MetricState] = {
        "none": "Plateau",
        "up": "Drifting Up",
        "down": "Drifting Down",
    }
    return states[direction]


def _create_window(passes: SuperPasses, start: int, end: int) -> SteadyWindow:
    """Return the window from super-pass `start` to super-pass `end` - 1, with its queries."""
    query_indices = passes.query_range(start, end)
    return SteadyWindow(
        first_super_pass=start,
        end_super_pass=end,
        first_query=query_indices.start,
        end_query=query_indices.stop,
        start_ns=int(passes.issued_ns[query_indices[0]]),
        end_ns=int(passes.issued_ns[query_indices[-1]]),
    )


# -- step 3: the window ----------------------------------------------------------------------------


def _find_duration_need(run: _RunSeries, plateau: SteadyWindow) -> DurationNeed:
    """Return how long a plateau has to last, by three criteria of the reference detector.

    The criteria are a precise mean, several times the latency of a query, and a fixed minimum (see
    `docs/steady-state-detection.md` of mlcommons/endpoints, section 5.5).

    Args:
        run: The run.
        plateau: The range of super-passes with steady metrics.
    """
    start = plateau.first_super_pass
    end = plateau.end_super_pass

    # With a coefficient of variation v, the mean of n super-passes is precise to z * v / sqrt(n).
    variation = _compute_variation(run.metrics["tpot_p50"][start:end])
    root_of_count = NORMAL_QUANTILE_95 * variation / PRECISION
    precise_super_passes = math.ceil(root_of_count**2)
    needed_super_passes = max(MIN_SUPER_PASSES, precise_super_passes)

    # A plateau always has MIN_SUPER_PASSES, so a need of no more than these adds no time.
    super_pass_s = _find_median_span_s(run.passes, start, end)
    has_enough_super_passes = needed_super_passes == MIN_SUPER_PASSES
    precision_s = 0.0 if has_enough_super_passes else needed_super_passes * super_pass_s

    latencies_ns = pool_samples(run.passes.latency_ns[start:end])
    latency_p90_s = lower_percentile(latencies_ns, 0.9) / NS_PER_S

    return DurationNeed(
        # The three criteria.
        precision_s=precision_s,
        relaxation_s=RELAXATION_LATENCIES * latency_p90_s,
        floor_s=DETECTABLE_DURATION_S,
        # The quantities from which they follow.
        needed_super_passes=needed_super_passes,
        variation=variation,
        super_pass_s=super_pass_s,
        latency_p90_s=latency_p90_s,
    )


def _find_median_span_s(passes: SuperPasses, start: int, end: int) -> float:
    """Return the median time in which a super-pass was issued, in seconds.

    Super-passes that were issued in one instant do not count. Return 0 if all were.

    Args:
        passes: The super-passes of the run.
        start: The index of the first super-pass.
        end: The index after the last super-pass.
    """
    spans_s = [passes.issue_span_s(index, index + 1) for index in range(start, end)]
    positive_spans_s = [span_s for span_s in spans_s if span_s > 0]
    return float(np.median(positive_spans_s)) if positive_spans_s else 0.0


def _choose_plateau(
    plateaus: Sequence[SteadyWindow], needs: Sequence[DurationNeed]
) -> _PlateauChoice:
    """Choose the first steady range of a run that lasts long enough, or else the longest one.

    Args:
        plateaus: The steady ranges, in the order of time.
        needs: How long each of them has to last.
    """
    for index, (plateau, need) in enumerate(zip(plateaus, needs, strict=True)):
        if plateau.duration_s >= need.needed_s:
            return _PlateauChoice(index, plateau, need, is_long_enough=True)

    durations_s = [plateau.duration_s for plateau in plateaus]
    longest = durations_s.index(max(durations_s))
    return _PlateauChoice(longest, plateaus[longest], needs[longest], is_long_enough=False)


def _compute_variations(run: _RunSeries, window: SteadyWindow) -> dict[str, float]:
    """Return the coefficient of variation of each watched metric over a window."""
    return {
        name: _compute_variation(values[window.first_super_pass : window.end_super_pass])
        for name, values in run.metrics.items()
    }


def _compute_variation(values: NDArray[np.float64]) -> float:
    """Return the coefficient of variation: the standard deviation divided by the mean.

    Values that are NaN are ignored. Return 0 for fewer than two other values.
    """
    known = values[~np.isnan(values)]
    if len(known) < 2:
        return 0.0

    mean = known.mean()
    return 0.0 if mean == 0 else float(known.std() / mean)


# -- step 4: the rest of the run -------------------------------------------------------------------


def _find_trends(run: _RunSeries, start: int) -> dict[str, TrendDirection]:
    """Return whether each metric rises or falls from a super-pass to the end of the run.

    Super-passes without samples (NaN) are ignored. A metric with fewer than MIN_SUPER_PASSES values
    is not in the result, because its trend cannot be tested.

    Args:
        run: The run.
        start: The index of the first super-pass.
    """
    directions: dict[str, TrendDirection] = {}
    for name in WATCHED_METRICS:
        values = run.metrics[name][start:]
        known_values = values[~np.isnan(values)]
        if len(known_values) >= MIN_SUPER_PASSES:
            directions[name] = find_monotonic_trend(known_values).direction
    return directions


def _judge_gating_metrics(run: _RunSeries, start: int, end: int) -> dict[str, MetricState]:
    """Return whether each metric that decides steadiness rises, falls or stays in a range.

    A metric is left out if the range has fewer than MIN_SUPER_PASSES super-passes, or if one of the
    super-passes has no samples (NaN).

    Args:
        run: The run.
        start: The index of the first super-pass of the range.
        end: The index after the last super-pass.
    """
    states: dict[str, MetricState] = {}
    for name in GATING_METRICS:
        values = run.metrics[name][start:end]
        is_long_enough = len(values) >= MIN_SUPER_PASSES
        is_complete = not np.isnan(values).any()
        if is_long_enough and is_complete:
            states[name] = _judge_trend(values)
    return states


def _find_level_shift(
    run: _RunSeries, window: SteadyWindow, plateaus_after_window: Sequence[SteadyWindow]
) -> LevelShift | None:
    """Return the step of the time per output token (TPOT) to another level after the window.

    Return None unless two conditions hold: the mean TPOT of the super-passes after the ramp-up has
    a significant step by Pettitt's test, and the mean TPOT of a later steady range (plateau)
    differs by more than LEVEL_SHIFT from that of the window.

    Args:
        run: The run.
        window: The steady range that is reported.
        plateaus_after_window: The later steady ranges.
    """
    if not plateaus_after_window:
        return None

    # Whether there is a step.
    step = find_change_point(_mean_tpot_by_super_pass(run))
    if not step.is_significant:
        return None

    # Whether a later steady range confirms it.
    window_tpot = _mean_tpot(run.passes, window)
    for plateau in plateaus_after_window:
        relative_shift = _mean_tpot(run.passes, plateau) / window_tpot - 1
        if abs(relative_shift) > LEVEL_SHIFT:
            return LevelShift(
                super_pass=run.ramp_up + step.index,
                change=relative_shift,
                p_value=step.p_value,
            )
    return None


def _mean_tpot_by_super_pass(run: _RunSeries) -> NDArray[np.float64]:
    """Return the mean TPOT of each super-pass after the ramp-up, in ns.

    A super-pass without samples has 0.
    """
    samples_by_super_pass = run.passes.tpot_ns[run.ramp_up :]
    means = [float(samples.mean()) if len(samples) else 0.0 for samples in samples_by_super_pass]
    return np.array(means)


def _mean_tpot(passes: SuperPasses, window: SteadyWindow) -> float:
    """Return the mean of all samples of TPOT in a window, in ns."""
    samples = passes.tpot_ns[window.first_super_pass : window.end_super_pass]
    return float(pool_samples(samples).mean())


def _judge_rest_of_run(
    level_shift: LevelShift | None, trends: Mapping[str, TrendDirection]
) -> Verdict:
    """Return the verdict on a run with a steady window, by what happens after the window's start.

    The verdicts are the words of the rules. A step to another level comes first, because a step
    also looks like a trend. Of the metrics, only those of TPOT decide. If one of them rises (gets
    slower) and the other one falls, the run drifts up.

    Args:
        level_shift: The step to another level, or None.
        trends: The direction of each metric from the start of the window to the end of the run.
    """
    if level_shift is not None:
        return "anomaly"

    directions = [trends[name] for name in GATING_METRICS if name in trends]
    if "up" in directions:
        return "drifting_up"
    if "down" in directions:
        return "drifting_down"
    return "STEADY STATE"


# -- reasons ---------------------------------------------------------------------------------------


def _explain_short(window: SteadyWindow, need: DurationNeed) -> str:
    """Return why the longest steady range of a run is not a valid window, as sentences."""
    return (
        f"Every plateau is too short. The longest one lasts {window.duration_s:.0f} s, and "
        f"{need.needed_s:.0f} s are needed ({need.decisive_term}). Run longer."
    )


def _explain_no_plateau(super_passes: int, states: Mapping[str, MetricState]) -> str:
    """Return why a run has no steady range of super-passes (no plateau), as sentences.

    A super-pass is a block of as many queries as the data set has samples.

    Args:
        super_passes: The number of super-passes after the ramp-up. It is negative if the ramp-up
            counts more than the run has.
        states: Whether each metric drifts over these super-passes. Empty if a super-pass has no
            samples, so that no trend can be tested.
    """
    if super_passes < MIN_SUPER_PASSES:
        return (
            f"The run has {max(super_passes, 0)} super-passes after the ramp-up, and a window "
            f"needs {MIN_SUPER_PASSES}. Run longer."
        )
    if not states:
        return "No window is steady, because whole super-passes have no complete response."

    drifting_metrics = [name for name, state in states.items() if state != "Plateau"]
    if drifting_metrics:
        return f"No window is steady, because {' and '.join(drifting_metrics)} drift over the run."
    return (
        "No window is steady: TPOT varies by more than "
        f"{MAX_VARIATION:.0%} between the super-passes of every window."
    )
