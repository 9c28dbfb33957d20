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
    describe_unfinished_startup,
)
from loadgen.contracts.recorded_run import LoadedRun, RecordedRun
from loadgen.contracts.steady_state import STARTUP_BATCHES
from loadgen.core import format
from loadgen.core.metrics import outcomes, windows
from loadgen.core.metrics.columns import OK, Columns
from loadgen.core.metrics.windows import Span
from loadgen.core.stats import intervals
from loadgen.core.stats.intervals import Interval

RATE_BATCHES = intervals.BATCHES
"""Batches of time of all runs together, for the interval of a rate."""

MIN_RESIDENCES_FOR_RATE = 2
"""The length that a load needs for a rate, in mean residence times of a request.

In a shorter load most requests end after it, so their rate is that of the start-up.
"""

RECOMMENDED_RESIDENCES = 10
"""The length that is recommended if a load is too short for a rate, in mean residence times."""

WINDOW_TOLERANCE = 0.99
"""The fraction of two windows from which a load has two windows.

A load is measured up to its last scheduled request, which comes before its planned end.
"""

CountInSpan = Callable[[RecordedRun, Columns, Span], float]
"""Returns how much of something ended in a span of a run."""


class RateEstimate(NamedTuple):
    """A rate per second. `caveat` says why its interval has no upper end, if it has none."""

    interval: Interval
    caveat: str


class FirstAndLastWindows(NamedTuple):
    """The first and the last window of each run."""

    first: list[Span]
    last: list[Span]


# -- counts ---------------------------------------------------------------------------------------


def _ended_in_span(columns: Columns, span: Span) -> NDArray[np.bool_]:
    """Return which requests are ok and ended in a span."""
    end_ns = columns["end_ns"]
    is_inside = (end_ns >= round(start_ns(span))) & (end_ns < round(stop_ns(span)))
    return is_inside & columns.where(OK)


def count_ok_requests(_run: RecordedRun, columns: Columns, span: Span) -> float:
    """Return the number of ok requests that ended in a span."""
    return float(_ended_in_span(columns, span).sum())


def count_good_requests(run: RecordedRun, columns: Columns, span: Span) -> float:
    """Return the number of requests that met the SLO and ended in a span."""
    return float((_ended_in_span(columns, span) & meets_slo(run, columns)).sum())


def count_output_tokens(_run: RecordedRun, columns: Columns, span: Span) -> float:
    """Return the output tokens in a span.

    Those of a request are spread evenly over the time of its response.
    """
    _require_counted(columns, "output_tokens", "some responses have no count of output tokens")
    return windows.spread_tokens(columns, span)


def count_all_tokens(run: RecordedRun, columns: Columns, span: Span) -> float:
    """Return the output tokens in a span plus the prompt tokens of requests that ended in it."""
    output_tokens = count_output_tokens(run, columns, span)
    _require_counted(columns, "input_tokens", "some requests have no count of prompt tokens")
    return output_tokens + float(columns["input_tokens"][_ended_in_span(columns, span)].sum())


def _require_counted(columns: Columns, column: str, reason: str) -> None:
    """Raise EstimateError if the tokens of an ok request were not counted (negative)."""
    if bool((columns[column][columns.where(OK)] < 0).any()):
        raise EstimateError(reason)


def meets_slo(run: RecordedRun, columns: Columns) -> NDArray[np.bool_]:
    """Return which requests meet the SLO of the run. Raise EstimateError if it has none."""
    if run.manifest.slo is None or not run.manifest.slo.terms:
        raise EstimateError("the run has no SLO, so no request can be called good")
    return outcomes.meets(columns, run.manifest.slo)


# -- spans ----------------------------------------------------------------------------------------


def start_ns(span: Span) -> float:
    """Return the start of a span that exists, in ns."""
    assert span.start_s is not None
    return span.start_s * 1e9


def stop_ns(span: Span) -> float:
    """Return the end of a span that exists, in ns."""
    assert span.end_s is not None
    return span.end_s * 1e9


def steady_span(loaded_run: LoadedRun) -> Span:
    """Return the steady-state window of a run, in which the full load is offered.

    It excludes the times in which requests of the warm-up are still in flight, and in which the
    virtual users of a closed loop start or end.

    Raises:
        EstimateError: The run has no such window.
    """
    span = loaded_run.run.summary.window.steady
    if span.duration_s is not None:
        return span
    due_ns = loaded_run.columns["due_ns"][loaded_run.columns.reached_due_time]
    if len(np.unique(due_ns)) < 2:
        raise EstimateError("all requests were scheduled at the same time, so there is no rate")
    raise EstimateError(
        f"the {len(due_ns):,} measured requests have no steady-state window: warm-up was in flight "
        "or virtual users were starting or ending; a longer load is needed"
    )


def split_span(span: Span, count: int) -> list[Span]:
    """Return a number of equal parts of a span."""
    edges_ns = np.linspace(start_ns(span), stop_ns(span), count + 1)
    return [windows.span(float(start), float(end)) for start, end in pairwise(edges_ns)]


def has_two_windows(run: RecordedRun, window_ns: int) -> bool:
    """Return whether the steady-state window of a run is as long as two windows."""
    steady_ns = (run.summary.window.steady.duration_s or 0.0) * 1e9
    return steady_ns >= 2 * window_ns * WINDOW_TOLERANCE


def first_and_last_windows(loaded_runs: Sequence[LoadedRun], window_ns: int) -> FirstAndLastWindows:
    """Return the first and the last window of each run, such as its first and its last hour.

    Raises:
        EstimateError: A run is shorter than two windows. The error says how much load an extension
            would have to add.
    """
    windows_of_runs = FirstAndLastWindows([], [])
    for loaded_run in loaded_runs:
        span = steady_span(loaded_run)
        first_ns = round(start_ns(span))
        last_ns = round(stop_ns(span))
        if not has_two_windows(loaded_run.run, window_ns):
            length = format.duration((last_ns - first_ns) / 1e9)
            window = format.duration(window_ns / 1e9)
            # An extension adds runs, so each added run has to have two windows.
            additional_s = PLANNING_MARGIN * 2 * window_ns / 1e9 * len(loaded_runs)
            raise EstimateError(f"{length} of load has no two windows of {window}", additional_s)
        windows_of_runs.first.append(windows.span(first_ns, first_ns + window_ns))
        windows_of_runs.last.append(windows.span(last_ns - window_ns, last_ns))
    return windows_of_runs


# -- rates ----------------------------------------------------------------------------------------


def estimate_rate(
    loaded_runs: Sequence[LoadedRun], count_in_span: CountInSpan, confidence: float
) -> RateEstimate:
    """Return the rate of something per second in steady state.

    The interval has no upper end if the start-up of a run did not end, or if the load was too
    short for the time that requests take.
    """
    spans = [steady_span(loaded_run) for loaded_run in loaded_runs]
    used_spans = []
    startup_caveat = ""
    for loaded_run, span in zip(loaded_runs, spans, strict=True):
        span_after_startup = _span_after_startup(loaded_run, span, count_in_span)
        if span_after_startup is None:
            startup_caveat = describe_unfinished_startup(span.duration_s or 0.0).sentence()
            used_spans.append(span)
        else:
            used_spans.append(span_after_startup)
    short_load_caveat = _find_short_load(loaded_runs, spans)
    caveat = short_load_caveat if short_load_caveat else startup_caveat
    rates = batch_rates(loaded_runs, used_spans, count_in_span)
    interval = intervals.batch_means(rates, batches=len(rates), level=confidence)
    batches_of_runs = np.split(np.array(rates), len(spans))
    run_rates = [float(np.mean(run_batches)) for run_batches in batches_of_runs]
    interval = intervals.widen_by_runs(interval, run_rates)
    if caveat:
        interval = replace(interval, high=math.inf)
    return RateEstimate(interval, caveat)


def _span_after_startup(
    loaded_run: LoadedRun, span: Span, count_in_span: CountInSpan
) -> Span | None:
    """Return the part of a span after the start-up, or None if the start-up did not end.

    The start-up is the beginning of the span, in which the rate is lower than in the rest. Its end
    is searched among short pieces of the span.
    """
    pieces = split_span(span, STARTUP_BATCHES)
    counts = [count_in_span(loaded_run.run, loaded_run.columns, piece) for piece in pieces]
    startup_pieces = steady_state.count_startup_values(np.array(counts))
    if startup_pieces is None:
        return None
    if startup_pieces == 0:
        return span
    return windows.span(start_ns(pieces[startup_pieces]), stop_ns(span))


def batch_rates(
    loaded_runs: Sequence[LoadedRun], spans: Sequence[Span], count_in_span: CountInSpan
) -> list[float]:
    """Return the rates per second in equal parts of one span of each run, run after run.

    All runs together have about as many parts as an interval from batch means needs, and each run
    has at least two.
    """
    parts_per_run = max(RATE_BATCHES // len(loaded_runs), 2)
    return [
        count_in_span(loaded_run.run, loaded_run.columns, piece) / (piece.duration_s or 1)
        for loaded_run, span in zip(loaded_runs, spans, strict=True)
        for piece in split_span(span, parts_per_run)
    ]


def _find_short_load(loaded_runs: Sequence[LoadedRun], spans: Sequence[Span]) -> str:
    """Return why a load was too short for a rate, or "" if it was not.

    A server that completes no request has a rate of 0, so a run without ok requests is never too
    short.
    """
    for loaded_run, span in zip(loaded_runs, spans, strict=True):
        is_ok = loaded_run.columns.where(OK)
        if not is_ok.any():
            continue
        residence_ns = (loaded_run.columns["end_ns"] - loaded_run.columns["due_ns"])[is_ok]
        residence_s = float(residence_ns.mean()) / 1e9
        load_s = span.duration_s or 0.0
        if load_s < MIN_RESIDENCES_FOR_RATE * residence_s:
            recommended_s = RECOMMENDED_RESIDENCES * residence_s
            return (
                f"run too short: requests take {format.duration(residence_s)} on average and the "
                f"load lasts {format.duration(load_s)} ({format.duration(recommended_s)} needed)"
            )
    return ""
