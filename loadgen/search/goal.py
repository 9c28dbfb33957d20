"""What has to hold at a load for a trial to pass, and the decision that it does or does not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np
from msgspec import Struct

from loadgen.core import format
from loadgen.core.metrics import columns as metrics
from loadgen.core.metrics import outcomes
from loadgen.core.metrics.columns import Columns
from loadgen.core.stats import early_stopping

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.core.slo import Slo

Outcome = Literal["under", "over", "invalid"]
PASSED: Final = "under"
"""The outcome of a trial that met the SLO, as result files store it: its load is under the
capacity.
"""
FAILED: Final = "over"
"""The outcome of a trial that missed the SLO: its load is over the capacity."""
INVALID: Final = "invalid"
"""The outcome of a trial that says nothing about its load."""

FULL_LENGTH: Final = "full_length"
"""The reason code of a trial that met the SLO to its end."""

NS_PER_MS = 1_000_000
ROUNDING = 1e-9  # keeps a product such as 0.95 * 100 from being rounded up to 96


class Decision(NamedTuple):
    """The outcome of a trial.

    Attributes:
        outcome: Whether the trial passed, failed or is not valid.
        reason_code: The reason for programs, for example "misses" or "steady".
        reason: The reason as text.
        decided_at_ns: When the outcome was certain, since the start of the schedule.
    """

    outcome: Outcome
    reason_code: str
    reason: str
    decided_at_ns: int


class Goal(Struct, frozen=True, kw_only=True):
    """What has to hold at a load: the terms of an SLO, each at its quantile.

    Attributes:
        slo: The SLO of all requests.
        mlperf: Whether the limits of MLPerf's early stopping have to hold too.
        full_run_terms: The names of the terms that only a trial at full length can meet: those of
            tasks and token deadlines, and of classes with an SLO of their own. With any of them, no
            trial passes before its end.
    """

    slo: Slo
    mlperf: bool = False
    full_run_terms: tuple[str, ...] = ()

    @property
    def request_terms(self) -> tuple[str, ...]:
        """The names of the terms that are judged request by request."""
        names = [f"{term.metric} p{term.quantile * 100:g}" for term in self.slo.terms]
        if self.slo.goodput_share is not None:
            names.append("goodput")
        return tuple(names)

    @property
    def term_names(self) -> tuple[str, ...]:
        """The names of all terms, to be shown to the user."""
        return self.request_terms + self.full_run_terms

    def allowed_misses(self, request_count: int) -> tuple[int, ...]:
        """Return for each request term how many of `request_count` requests may miss it.

        A term at p99 allows as many misses as there are requests above the 99th percentile. For an
        MLPerf run the early-stopping criterion of MLPerf LoadGen may allow fewer.

        The number is -1 for a term that so few requests cannot meet, even if none of them misses
        it. Any number of misses then exceeds what is allowed.
        """
        allowed_by_term = [
            self._allowed_misses_above(term.quantile, request_count) for term in self.slo.terms
        ]
        if self.slo.goodput_share is not None:
            needed_count = math.ceil(self.slo.goodput_share * request_count - ROUNDING)
            allowed_by_term.append(request_count - needed_count)
        return tuple(allowed_by_term)

    def _allowed_misses_above(self, quantile: float, request_count: int) -> int:
        """Return how many of the requests may exceed a limit that holds at this quantile."""
        allowed = _requests_above_quantile(request_count, quantile)
        if not self.mlperf:
            return allowed
        return min(allowed, early_stopping.allowed_over(request_count, quantile))

    def describe_misses(
        self, term_index: int, miss_count: int, request_count: int, allowed: int
    ) -> str:
        """Return a sentence that too many requests missed a request term, with its limit.

        An example is "12 of 1,000 requests exceeded TTFT 500 ms (p99 allows 1 %: 9)".

        Args:
            term_index: The index of the term in `request_terms`. The goodput objective, if there
                is one, comes after the latency terms.
            miss_count: How many requests missed it.
            request_count: How many requests were judged, from which `allowed` follows.
            allowed: How many of them may miss it, as `allowed_misses` returns it. The value -1, for
                a term that so few requests cannot meet, is shown as 0.
        """
        counts = f"{miss_count:,} of {format.counted(request_count, 'request')}"
        allowed_text = f"{max(allowed, 0):,}"
        is_goodput_term = term_index == len(self.slo.terms)
        if is_goodput_term:
            allowed_share = 1 - (self.slo.goodput_share or 0)
            return (
                f"{counts} violated the SLO ({allowed_share * 100:.10g} % allowed: {allowed_text})"
            )

        term = self.slo.terms[term_index]
        limit = format.milliseconds(term.limit_ns / NS_PER_MS)
        missed_limit = f"{counts} exceeded {term.metric.upper()} {limit} ms"
        percentile = term.quantile * 100
        if self.mlperf:
            return (
                f"{missed_limit} (p{percentile:g} with MLPerf's early stopping allows "
                f"{allowed_text})"
            )
        return f"{missed_limit} (p{percentile:g} allows {100 - percentile:.10g} %: {allowed_text})"

    def find_misses(self, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return which request misses which request term, as a mask of shape (terms, rows).

        - A request that ended with a response misses the terms whose limit it exceeded.
        - A failed or dropped request misses every term.
        - An unfinished request, which the end of the run cut off, misses the terms whose limit it
          had exceeded by then.

        The last row of the mask is that of the goodput objective, if there is one. A request misses
        it if it misses any other term.
        """
        columns = Columns(rows)
        was_cut_off = columns.has_status(metrics.UNFINISHED)
        has_failed = ~(columns.has_status(metrics.OK) | was_cut_off)

        misses_by_term = []
        for term in self.slo.terms:
            exceeded_at_end = columns.measure(term.metric) > term.limit_ns
            exceeded_when_cut_off = outcomes.is_over_when_cut(columns, term)
            has_exceeded_limit = np.where(was_cut_off, exceeded_when_cut_off, exceeded_at_end)
            misses_by_term.append(has_failed | has_exceeded_limit)

        if self.slo.goodput_share is not None:
            misses_by_term.append(np.logical_or.reduce([has_failed, *misses_by_term]))

        return np.array(misses_by_term, bool).reshape(len(misses_by_term), len(rows))


def _requests_above_quantile(request_count: int, quantile: float) -> int:
    """Return how many of the sorted latencies of these requests lie above their quantile.

    The p99 of 1000 latencies is the one at index 990, so that 9 lie above it. If more than these
    exceed a limit, the quantile exceeds it.
    """
    quantile_index = min(int(request_count * quantile), request_count - 1)
    return request_count - 1 - quantile_index
