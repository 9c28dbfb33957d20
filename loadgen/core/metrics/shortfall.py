"""Finds a server that delivers less than the arrivals of an open loop lead to expect.

Pure. This needs no growth over time, so it also recognises an overload in which every request waits
longer than the load lasts. Only the second half of a load is examined, because a server fills in
the first half.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from loadgen.core import format
from loadgen.core.metrics.columns import CANCELLED, LOST, OK, as_selection, join_selected
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


def find_shortfall(measured_stages: Sequence[Columns]) -> Shortfall | None:
    """Return how far a server fell behind the requests that were due, or None if it kept up.

    A server that keeps up responds as quickly in the second half of the load as in the first
    quarter. A server that delivered fewer first tokens, or fewer responses, fell behind.

    Args:
        measured_stages: The records of each measured stage. Requests were due at planned times.
    """
    requests = _PlannedRequests(measured_stages)
    due_ns = requests.column("due_ns")
    is_due_at_once = len(due_ns) < 2 or int(due_ns.min()) == int(due_ns.max())
    if is_due_at_once:
        return None

    test = _DeliveryTest(due_ns)
    prompt_growth = test.measure_token_growth(requests.column("input_tokens"))
    first_token_shortfall = test.compare_events(
        "first tokens", requests.first_token_ns(), delay_factors=prompt_growth
    )
    if first_token_shortfall is not None:
        return first_token_shortfall

    return _find_response_shortfall(test, requests, prompt_growth)


def _find_response_shortfall(
    test: _DeliveryTest, requests: _PlannedRequests, prompt_growth: RelativeGrowth
) -> Shortfall | None:
    """Return how many fewer responses came than expected, or None if enough came.

    Args:
        test: Compares the responses that came with those that were expected.
        requests: The requests with a planned time.
        prompt_growth: How many times as long as at first each prompt is, None if not longer.
    """
    # In a session, a request begins when the previous one ends, so responses are not expected at
    # planned times.
    end_ns = requests.ok_end_ns()
    if requests.have_sessions() or not test.lasts_long_enough(end_ns):
        return None

    output_growth = test.measure_token_growth(requests.requested_output_tokens())
    request_growth = _multiply_growths(prompt_growth, output_growth)
    return test.compare_events("responses", end_ns, delay_factors=request_growth)


def requested_output_tokens(columns: Columns) -> NDArray[np.int64]:
    """Return the requested output tokens, or those received where no number was requested."""
    requested = columns["asked_output"]
    return np.where(requested >= 0, requested, columns["output_tokens"])


class _PlannedRequests:
    """The requests with a planned time: single requests and the first requests of sessions.

    A later request of a session is due when the previous response has ended. Requests that were
    cancelled, lost or never due are left out.
    """

    def __init__(self, measured_stages: Sequence[Columns]) -> None:
        """Select the planned requests of each measured stage."""
        self._stages = measured_stages
        self._selections = [as_selection(_is_planned(columns)) for columns in measured_stages]

    def have_sessions(self) -> bool:
        """Return True if any request belongs to a session, which is a conversation or a task."""
        return any(
            bool((_was_due(columns) & columns.is_known("session")).any())
            for columns in self._stages
        )

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
        """Return the values of the planned requests of all stages as one array."""
        return join_selected(columns_of_stages, self._selections)


def _was_due(columns: Columns) -> NDArray[np.bool_]:
    """Return which requests reached their due time and were neither cancelled nor lost."""
    was_cancelled = columns.has_status(CANCELLED)
    was_lost = columns.has_status(LOST)
    return columns.reached_due_time & ~was_cancelled & ~was_lost


def _is_planned(columns: Columns) -> NDArray[np.bool_]:
    """Return which requests were due at a time that the arrival process planned."""
    is_first_turn = columns["turn"] == 0
    is_single_request = ~columns.is_known("session")
    is_planned: NDArray[np.bool_] = _was_due(columns) & (is_first_turn | is_single_request)
    return is_planned


RelativeGrowth: TypeAlias = "NDArray[np.float64] | None"
"""How many times as many tokens as in the first quarter of a load each request has: 2 for twice as
many. Its delay may grow by the same factor. None if requests did not become longer."""


def _multiply_growths(first: RelativeGrowth, second: RelativeGrowth) -> RelativeGrowth:
    """Return by what each request grew if two parts of it grew, its prompt and its output."""
    if first is None:
        return second
    if second is None:
        return first
    return first * second


class _DeliveryTest:
    """Compares the events in the second half of a load with the number that is expected.

    The first quarter of the load shows how long after its due time the event of a request comes
    while the server still keeps up. An event is a first token or the end of a response.
    """

    def __init__(self, due_ns: NDArray[np.int64]) -> None:
        """Find the first quarter of a load, whose delays are normal, and the tested second half.

        Args:
            due_ns: The due time of each request, in any order.
        """
        self._due_ns = due_ns
        self._ordered_due_ns = sort_times(due_ns)

        load_start_ns = int(due_ns.min())
        load_end_ns = int(due_ns.max())

        # The first quarter shows the delays before a queue has formed.
        first_quarter_end_ns = load_start_ns + (load_end_ns - load_start_ns) / 4
        self._is_in_first_quarter = due_ns <= first_quarter_end_ns

        # The events of the second half are compared with these delays.
        self._half_start_ns = (load_start_ns + load_end_ns) / 2
        self._half_end_ns = float(load_end_ns)

    @property
    def duration_ns(self) -> float:
        """The length of the second half."""
        return self._half_end_ns - self._half_start_ns

    def lasts_long_enough(self, end_ns: NDArray[np.int64]) -> bool:
        """Return True if the second half lasts MIN_DURATIONS times as long as a request.

        Args:
            end_ns: The end of each response, -1 without one.
        """
        has_end = end_ns >= 0
        durations_ns = (end_ns - self._due_ns)[has_end]
        if not len(durations_ns):
            return False

        needed_ns = MIN_DURATIONS * float(np.median(durations_ns))
        return needed_ns <= self.duration_ns

    def measure_token_growth(self, tokens: NDArray[np.int64]) -> RelativeGrowth:
        """Return the tokens of each request, divided by the mean of the first quarter.

        A request with 400 tokens has the growth 2 if the mean is 200. Return None if requests did
        not become much longer.

        Args:
            tokens: The prompt or output tokens of each request, -1 if not known.
        """
        is_known = tokens >= 0
        is_in_second_half = self._due_ns > self._half_start_ns
        first_tokens = tokens[is_known & self._is_in_first_quarter]
        later_tokens = tokens[is_known & is_in_second_half]
        if not _have_tokens_grown(first_tokens, later_tokens):
            return None

        growth = tokens / float(first_tokens.mean())
        return np.where(is_known, growth, 1.0)  # unknown tokens count as average

    def compare_events(
        self, events: EventName, event_ns: NDArray[np.int64], delay_factors: RelativeGrowth
    ) -> Shortfall | None:
        """Return the shortfall of events in the second half of the load, or None if enough came.

        An event is the first token or the end of a response. The expected number of events follows
        from the delays in the first quarter of the load, before a queue has formed.

        Args:
            events: The name of the events, for reports.
            event_ns: The time of the event of each request, -1 if the event never came.
            delay_factors: A factor for the delay of each request, for longer prompts or responses.
        """
        delays_ns = self._first_quarter_delays(event_ns)
        if not len(delays_ns):
            return None

        expected = self._count_expected(delays_ns, delay_factors)
        observed = self._count_in_second_half(event_ns)

        smallest_accepted = MIN_DELIVERED_SHARE * expected
        if observed >= smallest_accepted or self._may_be_chance(expected, observed):
            return None

        return Shortfall(
            events=events,
            expected=expected,
            observed=observed,
            span_s=self.duration_ns / 1e9,
        )

    def _first_quarter_delays(self, event_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the delay from the due time to the event for each request of the first quarter."""
        has_event = event_ns >= 0
        selected = has_event & self._is_in_first_quarter
        return event_ns[selected] - self._due_ns[selected]

    def _count_in_second_half(self, event_ns: NDArray[np.int64]) -> int:
        """Return the number of events that came in the second half of the load."""
        is_in_second_half = (event_ns > self._half_start_ns) & (event_ns <= self._half_end_ns)
        return int(is_in_second_half.sum())

    def _may_be_chance(self, expected: float, observed: int) -> bool:
        """Return True if a shortfall is within CHANCE_SIGMAS standard deviations."""
        variance = _index_of_dispersion(self._ordered_due_ns) * expected
        standard_deviation = math.sqrt(variance)
        return expected - observed <= CHANCE_SIGMAS * standard_deviation

    def _count_expected(self, delays_ns: NDArray[np.int64], delay_factors: RelativeGrowth) -> float:
        """Return how many events should come in the second half of the load.

        The server is expected to have the same delays as in the first quarter.

        Args:
            delays_ns: The delays from the due time to the event in the first quarter.
            delay_factors: A factor for the delay of each request, for longer prompts or responses.
                None if all requests have ordinary delays.
        """
        # A fixed number of quantiles stands for all delays, which may be millions.
        probabilities = np.linspace(0, 1, DELAY_QUANTILES)
        ordinary_delays_ns = np.quantile(delays_ns, probabilities, method="nearest")

        if delay_factors is None:
            return self._count_expected_by_delays(ordinary_delays_ns)
        return self._count_expected_by_scaled_delays(ordinary_delays_ns, delay_factors)

    def _count_expected_by_delays(self, delays_ns: NDArray[np.float64]) -> float:
        """Return the expected events of the second half if each delay is equally probable.

        With a delay of 2 s, the time from 30 to 60 s has the events of the requests due from 28 to
        58 s. The result is the mean of this number over all delays.

        Args:
            delays_ns: The delays from the due time to the event that a request may have.
        """
        events_until_end = self._count_due(self._half_end_ns - delays_ns)
        events_until_start = self._count_due(self._half_start_ns - delays_ns)
        events_in_second_half = events_until_end - events_until_start
        return float(events_in_second_half.mean())

    def _count_expected_by_scaled_delays(
        self, delays_ns: NDArray[np.float64], delay_factors: NDArray[np.float64]
    ) -> float:
        """Return how many events should come in the second half of the load.

        A request with twice as many tokens may have twice the delay. The result is the sum, over
        all requests, of the probability that the event of the request comes in the second half.

        Args:
            delays_ns: The delays of an ordinary request, equally probable and sorted.
            delay_factors: The factor by which the delay of each request is longer.
        """
        request_count = len(self._due_ns)
        probabilities = np.empty(request_count)
        for rows in block_slices(request_count):  # slices of all requests, to save memory
            due_ns = self._due_ns[rows]
            factors = delay_factors[rows]
            before_end = _probability_before(self._half_end_ns, due_ns, delays_ns, factors)
            before_start = _probability_before(self._half_start_ns, due_ns, delays_ns, factors)
            probabilities[rows] = before_end - before_start

        return float(probabilities.sum())

    def _count_due(self, times_ns: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the number of requests that are due up to each time."""
        whole_ns = np.floor(times_ns).astype(np.int64)
        return np.searchsorted(self._ordered_due_ns, whole_ns, side="right")


def _have_tokens_grown(earlier: NDArray[np.int64], later: NDArray[np.int64]) -> bool:
    """Return True if the mean tokens of requests grew by more than the share MIN_GROWTH_SHARE."""
    if not earlier.any() or not len(later):
        return False
    return float(later.mean()) > (1 + MIN_GROWTH_SHARE) * float(earlier.mean())


def _probability_before(
    deadline_ns: float,
    due_ns: NDArray[np.int64],
    ordered_delays_ns: NDArray[np.float64],
    delay_factors: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return, for each request, the probability that its event comes before a deadline.

    A request due 6 s before the deadline, with twice the ordinary delay, is in time if the ordinary
    delay is at most 3 s. If that holds for 80 of 100 ordinary delays, the probability is 0.8.

    Args:
        deadline_ns: The deadline.
        due_ns: The due time of each request.
        ordered_delays_ns: The delays of an ordinary request, equally probable and sorted.
        delay_factors: The delay of each request relative to an ordinary request.
    """
    allowed_delays_ns = (deadline_ns - due_ns) / delay_factors
    shorter_delays = np.searchsorted(ordered_delays_ns, allowed_delays_ns, side="right")
    return shorter_delays / len(ordered_delays_ns)


def _index_of_dispersion(ordered_due_ns: NDArray[np.int64]) -> float:
    """Return the variance of the number of arrivals divided by its mean, at least 1.

    It is 1 for a Poisson load. For a renewal process, it is the squared coefficient of variation of
    the gaps between arrivals (Cox 1962).
    """
    gaps_ns = np.diff(ordered_due_ns)
    squared_variation = float(gaps_ns.var()) / float(gaps_ns.mean()) ** 2
    return max(1.0, squared_variation)
