"""From rows to rates, intervals of time, load and goodput; the validity limits and the terms of an SLO.

Pure, and columns only: no loop over rows, since a rack's run has two million of them. Per-request definitions are those
of `loadgen_sdk.measures`, here over whole columns (a test holds the two against each other).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from loadgen.quantiles import Histogram, index, milliseconds, name, support
from loadgen.record import STATUSES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

OK, FAILED, DROPPED, CANCELLED, LOST = range(len(STATUSES))

# Limits of the verdict: beyond one of them a run is INVALID. `Limits` lets a run change them, and stores the change.
SEND_LAG_SHARE = 0.05  # p99 send lag, of TTFT p50
STAMP_ERROR_SHARE = 0.05  # p99 stamp error, of TTFT p50
CPU_SHARE = 0.90  # of one core, of a worker, over any full second of the measured window
FAILURE_SHARE = 0.01  # failed + lost, of all that were to be sent

# Limits of the warnings: beyond one of them a run stays valid, and says so.
COUNT_DISAGREEMENT = 0.02  # between two counts of the same tokens
LENGTH_MISMATCH = 0.02  # of requests whose output is not as long as asked
CACHED_SHARE = 0.05  # of prompt tokens, when the workload declares no sharing
GAP_VARIATION = 0.10  # between the planned and the real coefficient of variation of send gaps
GAPS_NEEDED = 30  # fewer send gaps than this say nothing about their variation
ITL_TOKENS_PER_EVENT = 0.01  # events that carry a further token, before inter-chunk gaps are no longer ITL
STALL_NS = 1_000_000_000  # a gap between output events that a reader notices as a standstill

BIN_NS = 10_000_000  # of the timeline of output events


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The limits of the verdict that a run was judged by, as shares (0.05 is 5 %)."""

    send_lag_share: float = SEND_LAG_SHARE
    stamp_error_share: float = STAMP_ERROR_SHARE
    cpu_share: float = CPU_SHARE
    failure_share: float = FAILURE_SHARE


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """One promise: `metric` (a key of TERMS) is at most `limit_ns` at `quantile` (0.99 is p99)."""

    metric: str
    limit_ns: int
    quantile: float = 0.99


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """What was promised: every term at its own quantile and, if asked for, the share of requests that meet all terms."""

    terms: tuple[Term, ...] = ()
    goodput_share: float | None = None


class TermResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a term came out. `value_ms` is null when no request has one or the quantile falls on a failed request."""

    metric: str
    quantile: float
    limit_ms: float
    value_ms: float | None
    margin_ms: float | None  # limit - value: negative is missed
    met: bool
    over: int  # samples over the limit, failed ones included
    count: int
    needed: int  # samples from which the quantile is supported
    supported: bool


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that meet every term; all null without an SLO. `counted` leaves out only what the user cancelled."""

    rps: float | None = None  # good requests over the measured window
    steady_rps: float | None = None  # good requests that ended in the steady window, over it
    share: float | None = None
    good: int | None = None
    counted: int | None = None
    slo: tuple[TermResult, ...] = ()
    share_limit: float | None = None
    met: bool | None = None


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of time, in seconds from the start of the run; null when there is none."""

    start_s: float | None = None
    end_s: float | None = None
    duration_s: float | None = None


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """What rates are divided by. The fields of its own are the measured window: first measured due to last measured
    `last_token`. `steady` is first to last measured due; `last_issued` first measured due to the end of the request
    issued last (MLPerf LoadGen's); `whole` the start of the run to the last end of a body, warm-up included."""

    start_s: float | None = None
    end_s: float | None = None
    duration_s: float | None = None
    steady: Span = Span()
    last_issued: Span = Span()
    whole: Span = Span()


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the timetable asked for, what was sent, what came back. A rate of n instants is (n - 1) / (last - first)."""

    arrival: str = ""  # in words, as written in the workload: "poisson 10/s"
    offered_rps: float | None = None  # of due instants; null in a closed loop, which offers nothing by itself
    achieved_rps: float | None = None  # of sent instants
    completed_rps: float | None = None  # ok requests over the measured window
    steady_completed_rps: float | None = None  # ok requests that ended in the steady window, over it
    in_flight_mean: float | None = None  # over the measured window, all stages' requests counted
    in_flight_max: int | None = None
    gap_variation: float | None = None  # standard deviation / mean of real send gaps; open-loop stages only
    gap_variation_planned: float | None = None  # of the due instants of the same requests
