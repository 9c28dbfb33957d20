"""Estimate rates per second in the steady state of runs, with confidence intervals.

This module is pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.contracts import steady_state
from loadgen.contracts.load_checks import (
    PLANNING_MARGIN,
    EstimateError,
    create_failed_startup_check,
)
from loadgen.contracts.recorded_run import LoadedRun, RecordedRun
from loadgen.contracts.sample_sizes import MIN_WINDOWS
from loadgen.contracts.steady_state import STARTUP_BATCHES
from loadgen.contracts.terms import NS_PER_S
from loadgen.core import format
from loadgen.core.metrics import outcomes, windows
from loadgen.core.metrics.columns import OK, Columns
from loadgen.core.metrics.windows import Span
from loadgen.core.stats import intervals
from loadgen.core.stats.intervals import Interval

RATE_BATCHES = intervals.BATCHES
"""Batches of time of all runs together, for the interval of a rate."""

MIN_RESIDENCE_TIMES = 2
"""The length that a load needs for a rate, in mean residence times of a request.

In a shorter load most requests end after it, so their rate is that of the start-up.
"""

RECOMMENDED_RESIDENCE_TIMES = 10
"""The length that is recommended if a load is too short for a rate, in mean residence times."""

WINDOW_TOLERANCE = 0.99
"""The fraction of two windows from which a load has two windows.

A load is measured up to its last scheduled request, which comes before its planned end.
"""

CountInSpan = Callable[[RecordedRun, Columns, Span], float]
"""Counts one kind of unit, such as ok requests or output tokens, in a span of time of a run."""


class RateEstimate(NamedTuple):
    """A rate per second. `caveat` says why its interval has no upper end, if it has none."""

    interval: Interval
    caveat: str


class FirstAndLastWindows(NamedTuple):
    """The first and the last window of each run."""

    first: list[Span]
    last: list[Span]


# -- counts ---------------------------------------------------------------------------------------


def _find_requests_ended_in(columns: Columns, span: Span) -> NDArray[np.bool_]:
    """Return which requests are ok and ended in a span."""
    end_ns = columns["end_ns"]
    is_inside = (end_ns >= round(_get_start_ns(span))) & (end_ns < round(_get_end_ns(span)))
    return is_inside & columns.has_status(OK)


def count_ok_requests(_run: RecordedRun, columns: Columns, span: Span) -> float:
    """Return the number of ok requests that ended in a span."""
    return float(_find_requests_ended_in(columns, span).sum())


def count_good_requests(run: RecordedRun, columns: Columns, span: Span) -> float:
    """Return the number of requests that met the SLO and ended in a span."""
    has_ended_in_span = _find_requests_ended_in(columns, span)
    is_good = find_good_requests(run, columns)
    return float((has_ended_in_span & is_good).sum())


def count_output_tokens(_run: RecordedRun, columns: Columns, span: Span) -> float:
    """Return the output tokens in a span of time.

    The times of single tokens are not stored, so the tokens of a request are spread evenly over the
    time of its response. The result can therefore be a fraction.

    Raises:
        EstimateError: The tokens of an ok request were not counted.
    """
    _require_counted(columns, "output_tokens", "some responses have no count of output tokens")
    return windows.estimate_tokens_within(columns, span)


def count_all_tokens(run: RecordedRun, columns: Columns, span: Span) -> float:
    """Return the output tokens in a span plus the prompt tokens of requests that ended in it.

    Raises:
        EstimateError: The tokens of an ok request were not counted.
    """
    output_tokens = count_output_tokens(run, columns, span)
    _require_counted(columns, "input_tokens", "some requests have no count of prompt tokens")
    prompt_tokens = columns["input_tokens"][_find_requests_ended_in(columns, span)]
    return output_tokens + float(prompt_tokens.sum())


def _require_counted(columns: Columns, column: str, reason: str) -> None:
    """Raise EstimateError if the tokens of an ok request were not counted (negative)."""
    if bool((columns[column][columns.has_status(OK)] < 0).any()):
        raise EstimateError(reason)


def find_good_requests(run: RecordedRun, columns: Columns) -> NDArray[np.bool_]:
    """Return which requests meet the SLO of the run. Raise EstimateError if it has none."""
    if run.manifest.slo is None or not run.manifest.slo.terms:
        raise EstimateError("the run has no SLO, so no request can be called good")
    return outcomes.meets_slo(columns, run.manifest.slo)


# -- spans ----------------------------------------------------------------------------------------


def _get_start_ns(span: Span) -> float:
    """Return the start of a span that exists, in ns."""
    assert span.start_s is not None
    return span.start_s * NS_PER_S


def _get_end_ns(span: Span) -> float:
    """Return the end of a span that exists, in ns."""
    assert span.end_s is not None
    return span.end_s * NS_PER_S


def get_steady_span(loaded_run: LoadedRun) -> Span:
    """Return the steady-state window of a run, in which the full load is offered.

    It excludes the times in which requests of the warm-up are still in flight, and in which the
    virtual users of a closed loop start or end.

    Raises:
        EstimateError: The run has no such window. The message says why.
    """
    span = loaded_run.run.summary.window.steady
    if span.duration_s is not None:
        return span

    columns = loaded_run.columns
    measured_due_ns = columns["due_ns"][columns.reached_due_time]
    if len(np.unique(measured_due_ns)) < 2:
        raise EstimateError("all requests were scheduled at the same time, so there is no rate")

    raise EstimateError(
        f"the load was too short for a steady-state window ({len(measured_due_ns):,} measured "
        "requests): warm-up requests were still in flight, or virtual users were starting or ending"
    )


def split_span(span: Span, count: int) -> list[Span]:
    """Return a number of equal parts of a span."""
    edges_ns = np.linspace(_get_start_ns(span), _get_end_ns(span), count + 1)
    return [windows.make_span(float(start), float(end)) for start, end in pairwise(edges_ns)]


def has_two_windows(run: RecordedRun, window_ns: int) -> bool:
    """Return whether the steady state of a run is long enough for two windows of this length.

    Terms such as `drift` compare the first window of a run with the last one.
    """
    steady_ns = (run.summary.window.steady.duration_s or 0.0) * NS_PER_S
    return steady_ns >= MIN_WINDOWS * window_ns * WINDOW_TOLERANCE


def find_first_and_last_windows(
    loaded_runs: Sequence[LoadedRun], window_ns: int
) -> FirstAndLastWindows:
    """Return the first and the last window of each run, such as its first and its last hour.

    Terms that compare the end of a load with its beginning use them.

    Args:
        loaded_runs: The runs of a level.
        window_ns: The length of a window.

    Raises:
        EstimateError: A run is shorter than two windows. The error says how much load an extension
            would have to add.
    """
    first_windows = []
    last_windows = []
    for loaded_run in loaded_runs:
        span = get_steady_span(loaded_run)
        if not has_two_windows(loaded_run.run, window_ns):
            raise _create_short_run_error(span, window_ns, run_count=len(loaded_runs))
        start_ns = round(_get_start_ns(span))
        end_ns = round(_get_end_ns(span))
        first_windows.append(windows.make_span(start_ns, start_ns + window_ns))
        last_windows.append(windows.make_span(end_ns - window_ns, end_ns))

    return FirstAndLastWindows(first_windows, last_windows)


def _create_short_run_error(span: Span, window_ns: int, *, run_count: int) -> EstimateError:
    """Return the error for a run whose steady state is shorter than two windows.

    Args:
        span: The steady state of the run.
        window_ns: The length of a window.
        run_count: The number of runs of the level. An extension adds as many runs again, and each
            of them has to have two windows.
    """
    span_ns = round(_get_end_ns(span)) - round(_get_start_ns(span))
    length = format.duration(span_ns / NS_PER_S)
    window = format.duration(window_ns / NS_PER_S)
    additional_s = PLANNING_MARGIN * MIN_WINDOWS * window_ns / NS_PER_S * run_count
    return EstimateError(f"{length} of load has no two windows of {window}", additional_s)


# -- rates ----------------------------------------------------------------------------------------


def estimate_rate(
    loaded_runs: Sequence[LoadedRun], count_in_span: CountInSpan, confidence: float
) -> RateEstimate:
    """Return how many units per second were counted in steady state, with an interval.

    The interval comes from batch means: the steady state is cut into batches of time, whose rates
    are treated as independent. It has no upper end if the start-up of a run did not end, or if the
    load was too short for the time that requests take.

    Args:
        loaded_runs: The runs of a level.
        count_in_span: Counts the units, such as ok requests, in a span of time.
        confidence: The confidence of the interval.

    Raises:
        EstimateError: A run has no steady-state window, or the units were not counted.
    """
    steady_spans = [get_steady_span(loaded_run) for loaded_run in loaded_runs]
    trimmed_spans = [
        _remove_startup(loaded_run, span, count_in_span)
        for loaded_run, span in zip(loaded_runs, steady_spans, strict=True)
    ]

    # A span whose start-up did not end is used as it is, and the caveat says so.
    used_spans = [
        trimmed_span or steady_span
        for trimmed_span, steady_span in zip(trimmed_spans, steady_spans, strict=True)
    ]
    batch_rates = compute_batch_rates(loaded_runs, used_spans, count_in_span)
    batch_interval = intervals.batch_means(batch_rates, batches=len(batch_rates), level=confidence)
    run_rates = compute_mean_of_runs(batch_rates, len(loaded_runs))
    interval = intervals.widen_by_runs(batch_interval, run_rates)

    caveat = _describe_short_load(loaded_runs, steady_spans)
    if not caveat:
        caveat = _describe_unfinished_startup(steady_spans, trimmed_spans)

    if caveat:
        interval = replace(interval, high=math.inf)

    return RateEstimate(interval, caveat)


def compute_mean_of_runs(batch_rates: Sequence[float], run_count: int) -> list[float]:
    """Return the mean rate of each run.

    Args:
        batch_rates: The rates of all batches, run after run. Each run has the same number of them.
        run_count: The number of runs.
    """
    return [float(np.mean(rates)) for rates in np.split(np.array(batch_rates), run_count)]


def _describe_unfinished_startup(
    steady_spans: Sequence[Span], trimmed_spans: Sequence[Span | None]
) -> str:
    """Return a sentence if the start-up of a run, in which the server fills, did not end.

    Return "" if the start-up of every run ended. The sentence is about the last run in which it did
    not, and says how long that run was.

    Args:
        steady_spans: The time of each run in which the full load was offered.
        trimmed_spans: The same without the start-up, or None where the start-up did not end.
    """
    run_lengths_s = [
        steady_span.duration_s or 0.0
        for steady_span, trimmed_span in zip(steady_spans, trimmed_spans, strict=True)
        if trimmed_span is None
    ]
    if not run_lengths_s:
        return ""

    startup_check = create_failed_startup_check(run_lengths_s[-1])
    return startup_check.sentence()


def _remove_startup(
    loaded_run: LoadedRun, steady_span: Span, count_in_span: CountInSpan
) -> Span | None:
    """Return a span without the start-up of its rate, or None if the start-up did not end.

    At the start of a load no request has ended yet, so the rate at which requests end is too low
    until the server is filled. To find the end of this start-up, the span is cut into short
    intervals, and the units that are counted in each of them form a series.

    Args:
        loaded_run: The run.
        steady_span: The span in which the full load was offered.
        count_in_span: Counts the units whose rate is estimated.
    """
    short_spans = split_span(steady_span, STARTUP_BATCHES)
    counts = [
        count_in_span(loaded_run.run, loaded_run.columns, short_span) for short_span in short_spans
    ]
    startup_intervals = steady_state.count_startup_values(np.array(counts))
    if startup_intervals is None:
        return None
    if startup_intervals == 0:
        return steady_span

    startup_end_ns = _get_start_ns(short_spans[startup_intervals])
    return windows.make_span(startup_end_ns, _get_end_ns(steady_span))


def compute_batch_rates(
    loaded_runs: Sequence[LoadedRun], spans: Sequence[Span], count_in_span: CountInSpan
) -> list[float]:
    """Return the rates per second in batches of time, those of the first run first.

    The span of each run is cut into equal batches. All runs together have about as many batches as
    the method of batch means needs (`RATE_BATCHES`), and each run has at least two.

    Args:
        loaded_runs: The runs of a level.
        spans: The span of time of each run.
        count_in_span: Counts the units, such as ok requests, in a span.
    """
    batches_per_run = max(RATE_BATCHES // len(loaded_runs), 2)
    rates = []
    for loaded_run, span in zip(loaded_runs, spans, strict=True):
        for batch in split_span(span, batches_per_run):
            count = count_in_span(loaded_run.run, loaded_run.columns, batch)
            rates.append(count / (batch.duration_s or 1))
    return rates


def _describe_short_load(loaded_runs: Sequence[LoadedRun], spans: Sequence[Span]) -> str:
    """Return the caveat of a rate if a run was too short for it, or "" if all were long enough.

    A request ends some time after it was scheduled (the residence time). If a run lasts less than
    two of these times, most of its requests end after the load, and their rate is too low. A server
    that completes no request has a rate of 0, so a run without ok requests is never too short.

    Args:
        loaded_runs: The runs of a level.
        spans: The steady-state window of each run.
    """
    for loaded_run, span in zip(loaded_runs, spans, strict=True):
        residence_s = _compute_mean_residence_s(loaded_run.columns)
        load_s = span.duration_s or 0.0
        if residence_s is not None and load_s < MIN_RESIDENCE_TIMES * residence_s:
            recommended_s = RECOMMENDED_RESIDENCE_TIMES * residence_s
            return (
                f"run too short: requests take {format.duration(residence_s)} on average and "
                f"the load lasts {format.duration(load_s)} ({format.duration(recommended_s)} "
                "needed)"
            )
    return ""


def _compute_mean_residence_s(columns: Columns) -> float | None:
    """Return the mean time from the scheduled start to the end of ok requests, None without any."""
    is_ok = columns.has_status(OK)
    if not is_ok.any():
        return None
    residence_ns = (columns["end_ns"] - columns["due_ns"])[is_ok]
    return float(residence_ns.mean()) / NS_PER_S
