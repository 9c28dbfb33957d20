"""Finds a server that delivers less than the arrivals of an open loop lead to expect.

Pure. This needs no growth over time, so it also recognises an overload in which every request waits
longer than the load lasts. Only the second half of a load is examined, because a server fills in
the first half.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

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

    # A longer prompt may delay the first token of its response by the same factor.
    test = _DeliveryTest(due_ns)
    prompt_factors = test.measure_length_factors(requests.column("input_tokens"))
    first_token_shortfall = test.find_shortfall(
        "first tokens", requests.first_token_ns(), delay_factors=prompt_factors
    )
    if first_token_shortfall is not None:
        return first_token_shortfall

    return _find_response_shortfall(test, requests, prompt_factors)


def _find_response_shortfall(
    test: _DeliveryTest, requests: _PlannedRequests, prompt_factors: NDArray[np.float64] | None
) -> Shortfall | None:
    """Return how many fewer responses ended than expected, or None if enough ended.

    Args:
        test: Compares the responses that ended with those that were expected.
        requests: The requests with a planned time.
        prompt_factors: How many times as long as at first each prompt is, None if prompts did not
            become longer.
    """
    # In a session, a request begins when the previous one ends, so responses are not expected at
    # planned times.
    end_ns = requests.ok_end_ns()
    if requests.have_sessions() or not test.lasts_long_enough(end_ns):
        return None

    # A longer prompt or a longer output may delay the end of a response.
    output_factors = test.measure_length_factors(requests.requested_output_tokens())
    request_factors = _multiply_factors(prompt_factors, output_factors)
    return test.find_shortfall("responses", end_ns, delay_factors=request_factors)


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


def _multiply_factors(
    first: NDArray[np.float64] | None, second: NDArray[np.float64] | None
) -> NDArray[np.float64] | None:
    """Return the products of two factors of each request, where None stands for factors of 1."""
    if first is None:
        return second
    if second is None:
        return first
    return first * second


class _Interval(NamedTuple):
    """A part of a load, from after its start until its end."""

    start_ns: float
    end_ns: float

    @property
    def duration_ns(self) -> float:
        """The length of the interval."""
        return self.end_ns - self.start_ns

    def contains(self, times_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which times are in the interval."""
        return (times_ns > self.start_ns) & (times_ns <= self.end_ns)


class _DeliveryTest:
    """Compares the events in the second half of a load with the number that is expected.

    An event is the first token or the end of a response. The first quarter of the load shows how
    long after its due time the event of a request comes while the server still keeps up.
    """

    def __init__(self, due_ns: NDArray[np.int64]) -> None:
        """Divide the time in which requests are due into the parts that are compared.

        Args:
            due_ns: The due time of each request, in any order.
        """
        self._due_ns = due_ns
        self._ordered_due_ns = sort_times(due_ns)

        load_start_ns = int(due_ns.min())
        load_end_ns = int(due_ns.max())

        # No queue has formed yet in the first quarter, so its delays are normal.
        first_quarter_end_ns = load_start_ns + (load_end_ns - load_start_ns) / 4
        self._is_in_first_quarter = due_ns <= first_quarter_end_ns

        # The events in the second half are compared with the number that these delays predict.
        middle_ns = (load_start_ns + load_end_ns) / 2
        self._second_half = _Interval(start_ns=middle_ns, end_ns=float(load_end_ns))

    def lasts_long_enough(self, end_ns: NDArray[np.int64]) -> bool:
        """Return True if the second half of the load is long compared with a request.

        It has to last MIN_DURATIONS times as long as the median request.

        Args:
            end_ns: The end of each response, -1 without one.
        """
        has_end = end_ns >= 0
        durations_ns = (end_ns - self._due_ns)[has_end]
        if not len(durations_ns):
            return False

        needed_ns = MIN_DURATIONS * float(np.median(durations_ns))
        return needed_ns <= self._second_half.duration_ns

    def measure_length_factors(self, tokens: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """Return how many times as long as in the first quarter of the load each request is.

        If the mean of the first quarter is 200 tokens, a request with 400 tokens has the factor 2.
        Return None if requests did not become much longer.

        Args:
            tokens: The prompt or output tokens of each request, -1 if not known.
        """
        is_known = tokens >= 0
        is_in_second_half = self._second_half.contains(self._due_ns)
        tokens_at_first = tokens[is_known & self._is_in_first_quarter]
        tokens_later = tokens[is_known & is_in_second_half]
        if not _have_tokens_grown(tokens_at_first, tokens_later):
            return None

        factors = tokens / float(tokens_at_first.mean())
        return np.where(is_known, factors, 1.0)  # an unknown length counts as the usual one

    def find_shortfall(
        self,
        events: EventName,
        event_ns: NDArray[np.int64],
        delay_factors: NDArray[np.float64] | None,
    ) -> Shortfall | None:
        """Return the shortfall of events in the second half of the load, or None if enough came.

        An event is the first token or the end of a response. The expected number of events follows
        from the delays in the first quarter of the load, before a queue has formed.

        Args:
            events: The name of the events, for reports.
            event_ns: The time of the event of each request, -1 if the event never came.
            delay_factors: By which factor each request may be delayed because it is longer than the
                requests of the first quarter. None if requests did not become longer.
        """
        usual_delays_ns = self._first_quarter_delays(event_ns)
        if not len(usual_delays_ns):
            return None

        expected = self._count_expected(usual_delays_ns, delay_factors)
        observed = int(self._second_half.contains(event_ns).sum())

        smallest_accepted = MIN_DELIVERED_SHARE * expected
        if observed >= smallest_accepted or self._may_be_chance(expected, observed):
            return None

        return Shortfall(
            events=events,
            expected=expected,
            observed=observed,
            span_s=self._second_half.duration_ns / 1e9,
        )

    def _first_quarter_delays(self, event_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the delay from the due time to the event for each request of the first quarter."""
        has_event = event_ns >= 0
        selected = has_event & self._is_in_first_quarter
        return event_ns[selected] - self._due_ns[selected]

    def _may_be_chance(self, expected: float, observed: int) -> bool:
        """Return True if a shortfall is within CHANCE_SIGMAS standard deviations."""
        variance = _index_of_dispersion(self._ordered_due_ns) * expected
        standard_deviation = math.sqrt(variance)
        return expected - observed <= CHANCE_SIGMAS * standard_deviation

    def _count_expected(
        self, usual_delays_ns: NDArray[np.int64], delay_factors: NDArray[np.float64] | None
    ) -> float:
        """Return how many events should come in the second half of the load.

        Args:
            usual_delays_ns: The delays from the due time to the event in the first quarter, which
                the server is expected to have later, too.
            delay_factors: By which factor each request may be delayed because it is longer. None
                for usual requests.
        """
        # There may be millions of delays. A fixed number of quantiles has the same distribution.
        probabilities = np.linspace(0, 1, DELAY_QUANTILES)
        delay_quantiles_ns = np.quantile(usual_delays_ns, probabilities, method="nearest")

        if delay_factors is None:
            return self._count_expected_of_usual_requests(delay_quantiles_ns)
        return self._count_expected_of_longer_requests(delay_quantiles_ns, delay_factors)

    def _count_expected_of_usual_requests(self, delays_ns: NDArray[np.float64]) -> float:
        """Return how many events should come in the second half, from the delays of requests.

        If each event came 2 s after the due time of its request, a second half from 30 to 60 s
        would have the events of the requests that are due from 28 to 58 s. The result is the mean
        of this number over all delays.

        Args:
            delays_ns: The delays from the due time to the event, which are equally probable.
        """
        events_until_end = self._count_due(self._second_half.end_ns - delays_ns)
        events_until_start = self._count_due(self._second_half.start_ns - delays_ns)
        events_in_second_half = events_until_end - events_until_start
        return float(events_in_second_half.mean())

    def _count_expected_of_longer_requests(
        self, delays_ns: NDArray[np.float64], delay_factors: NDArray[np.float64]
    ) -> float:
        """Return how many events should come in the second half, if requests became longer.

        The result is the sum, over all requests, of the probability that the event of the request
        comes in the second half. A request with the factor 2 may have twice the usual delay.

        Args:
            delays_ns: The usual delays, in ascending order, which are equally probable.
            delay_factors: The factor by which the delay of each request may be longer.
        """
        request_count = len(self._due_ns)
        probabilities = np.empty(request_count)
        for rows in block_slices(request_count):  # slices of all requests, to save memory
            due_ns = self._due_ns[rows]
            factors = delay_factors[rows]
            before_end = _probability_before(self._second_half.end_ns, due_ns, delays_ns, factors)
            before_start = _probability_before(
                self._second_half.start_ns, due_ns, delays_ns, factors
            )
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
