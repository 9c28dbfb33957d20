"""Finds a server that delivers less than the arrivals of an open loop lead to expect.

Pure. This needs no growth over time, so it also recognises an overload in which every request waits
longer than the load lasts. Only the second half of a load is examined, because a server fills in
the first half.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from loadgen.core import format
from loadgen.core.metrics.columns import CANCELLED, LOST, OK, as_selection, join_arrays
from loadgen.core.stats.quantiles import block_slices, sort_times

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from loadgen.core.metrics.columns import Columns

MIN_DELIVERED_SHARE = 0.95
"""A server that delivers a smaller share of the expected events does not keep up."""

CHANCE_SIGMAS = 3.3
"""A shortfall of fewer standard deviations may be chance. So many are hardly ever reached by
chance in all trials of a search."""

MIN_GROWTH_SHARE = 0.10
"""Requests or series that grow by a smaller share of their mean are not said to grow."""

MIN_DURATIONS = 2.0
"""The second half of a load must last so many times as long as a request does (p50 of E2E)."""

DELAY_QUANTILES = 1_000
"""So many quantiles stand for the delays of the first quarter of a load."""

EventName = Literal["first tokens", "responses"]


class Shortfall(NamedTuple):
    """How far a server fell behind the arrivals in the second half of a load."""

    events: EventName
    expected: float
    observed: int
    span_s: float

    @property
    def text(self) -> str:
        """What the server delivered and what was due, as one sentence."""
        return (
            f"overloaded: the server delivered {self.observed:,} of {self.expected:,.0f} expected "
            f"{self.events} ({self.observed / self.expected:.0%}) in the second half of the load "
            f"({format.duration(self.span_s)})"
        )


def find_shortfall(measured: Sequence[Columns]) -> Shortfall | None:
    """Return how far the server of an open loop fell behind, or None if it kept up.

    In the second half of the load a server that keeps up delivers as many first tokens, and ends
    as many responses, as the arrivals and the delays of the first quarter lead to expect. It does
    not keep up if it delivers less than MIN_DELIVERED_SHARE of them and the difference is beyond
    chance. How long requests wait does not matter. Failed and dropped requests are expected and not
    delivered.

    Of sessions only the first tokens of the first turns are compared, because how long a session
    lasts depends on more than the server.
    """
    requests = _IndependentRequests(measured)
    due_ns = requests.column("due_ns")
    if len(due_ns) < 2 or int(due_ns.min()) == int(due_ns.max()):
        return None
    half = _SecondHalf(due_ns)
    prompt_work = half.relative_work(requests.column("input_tokens"))
    shortfall = half.find_shortfall("first tokens", requests.first_token_ns(), prompt_work)
    if shortfall is not None or requests.have_sessions:
        return shortfall
    end_ns = requests.ok_end_ns()
    durations_ns = (end_ns - due_ns)[end_ns >= 0]
    if not len(durations_ns):
        return None
    if MIN_DURATIONS * float(np.median(durations_ns)) > half.duration_ns:
        return None  # the server is still filling: its first responses came faster than later ones
    output_work = half.relative_work(requests.requested_output_tokens())
    work = _multiply_work(prompt_work, output_work)
    return half.find_shortfall("responses", end_ns, work)


def requested_output_tokens(columns: Columns) -> NDArray[np.int64]:
    """Return the requested output tokens, or those received where no number was requested."""
    requested = columns["asked_output"]
    return np.where(requested >= 0, requested, columns["output_tokens"])


class _IndependentRequests:
    """Requests that reached their due time and wait for no earlier request of a session.

    Cancelled and lost requests are left out. Each column is read when it is asked for, because all
    of them together would take more memory than the rest of a summary.

    Attributes:
        have_sessions: Whether any request belongs to a session.
    """

    def __init__(self, measured: Sequence[Columns]) -> None:
        """Select the independent requests of each measured stage."""
        self._stages = measured
        self._selections: list[NDArray[np.bool_] | slice] = []
        self.have_sessions = False
        for columns in measured:
            was_due = columns.reached_due_time & ~columns.where(CANCELLED) & ~columns.where(LOST)
            in_session = columns["session"] >= 0
            self.have_sessions = self.have_sessions or bool((was_due & in_session).any())
            is_independent = was_due & (~in_session | (columns["turn"] == 0))
            self._selections.append(as_selection(is_independent))

    def column(self, field: str) -> NDArray[np.int64]:
        """Return a field of the records."""
        return self._select(columns[field] for columns in self._stages)

    def first_token_ns(self) -> NDArray[np.int64]:
        """Return the time of the first token, -1 without one.

        An ok response whose first token could not be timed counts as delivered at its end.
        """
        first_token_ns = self.column("first_token_ns")
        is_untimed = (first_token_ns < 0) & (self.column("status") == OK)
        if not is_untimed.any():
            return first_token_ns
        return np.where(is_untimed, self.column("end_ns"), first_token_ns)

    def ok_end_ns(self) -> NDArray[np.int64]:
        """Return the end of each ok response, -1 for other requests."""
        return np.where(self.column("status") == OK, self.column("end_ns"), -1)

    def requested_output_tokens(self) -> NDArray[np.int64]:
        """Return the requested output tokens, or those received where no number was requested."""
        return self._select(requested_output_tokens(columns) for columns in self._stages)

    def _select(self, columns_of_stages: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Return the values of the independent requests of all stages as one array."""
        selected = zip(columns_of_stages, self._selections, strict=True)
        return join_arrays([column[selection] for column, selection in selected])


RelativeWork: TypeAlias = "NDArray[np.float64] | None"
"""The work of each request relative to the first quarter of a load; None if requests are alike."""


def _multiply_work(first: RelativeWork, second: RelativeWork) -> RelativeWork:
    """Return the product of two kinds of work, where None stands for a factor of 1."""
    if first is None or second is None:
        return second if first is None else first
    return first * second


class _SecondHalf:
    """The second half of a load, in which events are compared with those that are expected."""

    def __init__(self, due_ns: NDArray[np.int64]) -> None:
        """Take the due times of all requests of the load, and divide the load at its middle.

        The delays of the requests of the first quarter, which are called early, tell how long
        requests take while the server still keeps up.
        """
        first_ns = int(due_ns.min())
        last_ns = int(due_ns.max())
        quarter_end_ns = first_ns + (last_ns - first_ns) / 4
        self._due_ns = due_ns
        self._start_ns = (first_ns + last_ns) / 2
        self._end_ns = float(last_ns)
        self._is_early = due_ns <= quarter_end_ns
        self._ordered_due_ns = sort_times(due_ns)
        self._dispersion = _index_of_dispersion(self._ordered_due_ns)

    @property
    def duration_ns(self) -> float:
        """The length of the second half."""
        return self._end_ns - self._start_ns

    def relative_work(self, tokens: NDArray[np.int64]) -> RelativeWork:
        """Return the tokens of each request relative to the mean of the first quarter.

        Returns None unless requests became longer. A count of -1 is not known and counts as 1.
        """
        is_known = tokens >= 0
        early_tokens = tokens[is_known & self._is_early]
        late_tokens = tokens[is_known & (self._due_ns > self._start_ns)]
        if not len(early_tokens) or not len(late_tokens) or not early_tokens.any():
            return None
        early_mean = float(early_tokens.mean())
        if float(late_tokens.mean()) <= (1 + MIN_GROWTH_SHARE) * early_mean:
            return None
        return np.where(is_known, tokens / early_mean, 1.0)

    def find_shortfall(
        self, events: EventName, event_ns: NDArray[np.int64], work: RelativeWork
    ) -> Shortfall | None:
        """Return how many fewer events came than expected, or None if enough came.

        A shortfall within CHANCE_SIGMAS standard deviations may be chance and does not count. The
        variance of the number of events is that of the number of arrivals: their mean times their
        index of dispersion.

        Args:
            events: What the events are called.
            event_ns: The time of the event of each request, -1 if it never came.
            work: The work of each request, by which its expected delay is multiplied.
        """
        is_early_event = (event_ns >= 0) & self._is_early
        early_delays_ns = event_ns[is_early_event] - self._due_ns[is_early_event]
        if not len(early_delays_ns):
            return None
        expected = self._count_expected(early_delays_ns, work)
        observed = int(((event_ns > self._start_ns) & (event_ns <= self._end_ns)).sum())
        is_negligible = observed >= MIN_DELIVERED_SHARE * expected
        standard_deviation = math.sqrt(self._dispersion * expected)
        may_be_chance = expected - observed <= CHANCE_SIGMAS * standard_deviation
        if is_negligible or may_be_chance:
            return None
        return Shortfall(events, expected, observed, self.duration_ns / 1e9)

    def _count_expected(self, early_delays_ns: NDArray[np.int64], work: RelativeWork) -> float:
        """Return the expected events of the second half if delays stay those of the first quarter.

        Each request contributes the probability that its event comes in the second half.

        Args:
            early_delays_ns: The delays from the due time to the event in the first quarter.
            work: The work of each request, by which its delay is multiplied.
        """
        delays_ns = np.quantile(
            early_delays_ns, np.linspace(0, 1, DELAY_QUANTILES), method="nearest"
        )
        if work is None:
            # All requests have the same delays. It is faster then to count, for each delay, the
            # requests whose event comes in the second half, and to take the mean over the delays.
            due_by_end = self._count_due(self._end_ns - delays_ns)
            due_by_start = self._count_due(self._start_ns - delays_ns)
            return float((due_by_end - due_by_start).mean())
        probabilities = np.empty(len(self._due_ns))
        for rows in block_slices(len(self._due_ns)):
            # A delay of d times the work is over by a time if d is at most (time - due) / work.
            until_end_ns = (self._end_ns - self._due_ns[rows]) / work[rows]
            until_start_ns = (self._start_ns - self._due_ns[rows]) / work[rows]
            by_end = _share_of_delays(delays_ns, until_end_ns)
            by_start = _share_of_delays(delays_ns, until_start_ns)
            probabilities[rows] = by_end - by_start
        return float(probabilities.sum())

    def _count_due(self, times_ns: NDArray[Any]) -> NDArray[np.int64]:
        """Return the number of requests that are due up to each time."""
        whole_ns = np.floor(times_ns).astype(np.int64)
        counts: NDArray[np.int64] = np.searchsorted(self._ordered_due_ns, whole_ns, "right")
        return counts


def _share_of_delays(delays_ns: NDArray[Any], elapsed_ns: NDArray[Any]) -> NDArray[np.float64]:
    """Return, for each request, the share of the delays that are over after the elapsed time."""
    return np.searchsorted(delays_ns, elapsed_ns, "right") / len(delays_ns)


def _index_of_dispersion(ordered_due_ns: NDArray[np.int64]) -> float:
    """Return the squared coefficient of variation of the gaps between arrivals, at least 1.

    For a renewal process, it is the variance of the number of arrivals divided by its mean (Cox
    1962). It is 1 for a Poisson load; a steadier load is given the same tolerance.
    """
    gaps_ns = np.diff(ordered_due_ns)
    return max(1.0, float(gaps_ns.var()) / float(gaps_ns.mean()) ** 2)
