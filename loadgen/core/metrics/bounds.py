"""The smallest and the largest value that a metric of a request may have had. Pure, on columns.

The client knows how much earlier than its timestamp an event may have arrived: the columns
`stamp_error_ns` (first token) and `last_token_error_ns`. The delay with which the client sent a
request may be in its TTFT and E2E. And where events carry several tokens and the server does not
say how many the first one has, only bounds of the divisor of TPOT are known.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.columns import UNDEFINED, Columns
from loadgen.core.metrics.request_metrics import (
    count_textless_tokens,
    later_tokens,
    streamed_tokens,
)

FIRST_EVENT_FACTOR = 4
"""Where events carry two tokens or more on average, the first event is taken to have at most so
many times that average. Without a server's word, only this keeps the bounds of TPOT useful."""

NO_LIMIT = np.iinfo(np.int64).max
"""More tokens than any event has."""

Ints = NDArray[np.int64]


class Bounds(NamedTuple):
    """The smallest and the largest value of each request: ns, or tokens for a divisor.

    A request without a value has UNDEFINED in both.
    """

    lower: Ints
    upper: Ints


def _send_delays(columns: Columns) -> Ints:
    """Return how much later than due each request was sent in ns, 0 if it was not sent."""
    delays_ns = columns["sent_ns"] - columns["due_ns"]
    was_sent = columns.is_known("sent_ns")
    return np.where(was_sent, np.maximum(delays_ns, 0), 0)


def _less_errors(values: Ints, errors: Ints) -> Bounds:
    """Return the bounds of values that may be smaller by up to their errors, but not negative."""
    if not errors.any():
        return Bounds(values, values)

    lower = np.where(values == UNDEFINED, UNDEFINED, np.maximum(values - errors, 0))
    return Bounds(lower, values)


def bound_ttft(columns: Columns) -> Bounds:
    """Return the bounds of TTFT: less the error of the first token and less the send delay."""
    errors = columns.known_or_zero("stamp_error_ns") + _send_delays(columns)
    return _less_errors(columns.measure("ttft"), errors)


def bound_ttft_from_sent(columns: Columns) -> Bounds:
    """Return the bounds of TTFT from sent: less the error of the first token."""
    return _less_errors(columns.measure("ttft_from_sent"), columns.known_or_zero("stamp_error_ns"))


def bound_first_answer(columns: Columns) -> Bounds:
    """Return the bounds of the time to the first answer, which is output other than reasoning."""
    # Timestamp errors are known only for first tokens. A later answer is taken to have no error.
    first_token_errors = columns.known_or_zero("stamp_error_ns")
    is_first_token = columns["first_answer_ns"] == columns["first_token_ns"]
    timestamp_errors = np.where(is_first_token, first_token_errors, 0)

    errors = timestamp_errors + _send_delays(columns)
    return _less_errors(columns.measure("first_answer"), errors)


def bound_e2e(columns: Columns) -> Bounds:
    """Return the bounds of E2E: less the error of the last token and less the send delay."""
    errors = columns.known_or_zero("last_token_error_ns") + _send_delays(columns)
    return _less_errors(columns.measure("e2e"), errors)


def bound_max_gap(columns: Columns) -> Bounds:
    """Return the bounds of the largest gap: less the error of the event at its end."""
    return _less_errors(columns.measure("max_gap"), columns.known_or_zero("max_gap_error_ns"))


def bound_tpot(columns: Columns) -> Bounds:
    """Return the bounds of TPOT, from the errors of timestamps and of token counts.

    TPOT is divided by the tokens after the first event. How many tokens the first event has is not
    always known.
    """
    tokens = streamed_tokens(columns).astype(np.int64)
    most_tokens_of_first_event = _most_tokens_of_first_event(columns, tokens)
    return _bound_tpot_with(columns, fewest_tokens=tokens - most_tokens_of_first_event)


def bound_tpot_times(columns: Columns) -> Bounds:
    """Return the bounds of TPOT from the errors of timestamps alone."""
    return _bound_tpot_with(columns, fewest_tokens=later_tokens(columns))


def _bound_tpot_with(columns: Columns, fewest_tokens: Ints) -> Bounds:
    """Return the bounds of TPOT, whose divisor is at least `fewest_tokens`."""
    token_bounds = Bounds(lower=fewest_tokens, upper=later_tokens(columns))
    span_ns = columns["last_token_ns"] - columns["first_token_ns"]
    return _bound_time_per_token(columns, "tpot", span_ns, token_bounds)


def bound_tpot_mlperf(columns: Columns) -> Bounds:
    """Return the bounds of LoadGen's TPOT, which divides by all tokens but one."""
    span_ns = columns["end_ns"] - columns["first_token_ns"]
    tokens = columns["output_tokens"].astype(np.int64) - 1
    return _bound_time_per_token(columns, "tpot_mlperf", span_ns, Bounds(tokens, tokens))


def bound_e2e_per_token(columns: Columns) -> Bounds:
    """Return the bounds of E2E per token."""
    values = columns.measure("e2e_per_token")
    tokens = np.maximum(columns["output_tokens"].astype(np.int64), 1)
    errors = columns.known_or_zero("last_token_error_ns") + _send_delays(columns)
    return _less_errors(values, errors // tokens)


def _bound_time_per_token(
    columns: Columns, metric: str, span_ns: Ints, token_bounds: Bounds
) -> Bounds:
    """Return the bounds of a metric that is the time from first to last token, divided by tokens.

    It is smallest for the shortest possible time and the most possible tokens. For example, 800 to
    900 ns and 8 to 9 tokens are 800 // 9 = 88 to 900 // 8 = 112 ns per token.

    Args:
        columns: The records of the requests.
        metric: The name of the metric.
        span_ns: The time between the first and the last timestamp of each request.
        token_bounds: The fewest and the most tokens that the span may be divided by.
    """
    measured_ns = columns.measure(metric)
    are_tokens_certain = np.array_equal(token_bounds.lower, token_bounds.upper)
    if are_tokens_certain and not _has_timestamp_errors(columns):
        return Bounds(measured_ns, measured_ns)

    # The divisor is at least 1. A request without tokens has no value of the metric.
    span_bounds = _bound_span(columns, span_ns)
    smallest_ns = span_bounds.lower // np.maximum(token_bounds.upper, 1)
    largest_ns = span_bounds.upper // np.maximum(token_bounds.lower, 1)

    has_value = measured_ns != UNDEFINED
    return Bounds(
        lower=np.where(has_value, smallest_ns, UNDEFINED),
        upper=np.where(has_value, largest_ns, UNDEFINED),
    )


def _has_timestamp_errors(columns: Columns) -> bool:
    """Return True if the first or the last token of any request has a timestamp error."""
    has_first_error = (columns["stamp_error_ns"] > 0).any()
    has_last_error = (columns["last_token_error_ns"] > 0).any()
    return bool(has_first_error or has_last_error)


def _bound_span(columns: Columns, span_ns: Ints) -> Bounds:
    """Return the bounds of the true time from the first to the last token of each request, in ns.

    An event may have arrived earlier than its timestamp, but never later. So the true span is
    shorter than measured if the last token arrived earlier, and longer if the first one did. For
    example, a span of 900 ns with errors of 20 ns of the first token and 50 ns of the last one is
    truly from 850 to 920 ns.
    """
    first_token_errors_ns = columns.known_or_zero("stamp_error_ns")
    last_token_errors_ns = columns.known_or_zero("last_token_error_ns")
    shortest_span_ns = np.maximum(span_ns - last_token_errors_ns, 0)
    longest_span_ns = span_ns + first_token_errors_ns
    return Bounds(shortest_span_ns, longest_span_ns)


def _most_tokens_of_first_event(columns: Columns, tokens: Ints) -> Ints:
    """Return the most tokens that the first output event of each response may have.

    If the server reports how many tokens the first event has, that number is returned. Otherwise,
    the first event has at most the tokens that the later events leave, and it is unlikely to have
    many more tokens than the average event.

    Args:
        columns: The requests.
        tokens: The streamed tokens of each response.
    """
    tokens_left = _tokens_left_for_first_event(columns, tokens)
    likely_tokens = _most_likely_tokens_of_first_event(columns, tokens)
    estimated_tokens = np.minimum(tokens_left, likely_tokens)

    reported_tokens = columns["first_event_tokens"].astype(np.int64)
    is_reported = reported_tokens > 0
    return np.where(is_reported, reported_tokens, estimated_tokens)


def _tokens_left_for_first_event(columns: Columns, tokens: Ints) -> Ints:
    """Return the tokens of the first event of each response if all later events have one token.

    In a response with 12 tokens in 10 events, the first event has 12 - 9 = 3 tokens.

    Args:
        columns: The requests.
        tokens: The streamed tokens of each response.
    """
    event_counts = columns["output_events"].astype(np.int64)
    extra_tokens = np.maximum(tokens - event_counts, 0)  # more than one token per event
    tokens_if_all_extra = 1 + extra_tokens

    # A token without text, such as the one that ends a response, comes in no event. If no other
    # token is extra, each event has one token.
    textless_tokens = count_textless_tokens(columns["finish_reason"], tokens)
    are_extra_tokens_textless = extra_tokens <= textless_tokens
    return np.where(are_extra_tokens_textless, 1, tokens_if_all_extra)


def _most_likely_tokens_of_first_event(columns: Columns, tokens: Ints) -> Ints:
    """Return the most tokens that the first event of each response is likely to have.

    This is FIRST_EVENT_FACTOR times the mean number of tokens per event, rounded up. With a factor
    of 4, it is 4 * 3 = 12 for 25 tokens in 10 events. It is NO_LIMIT for a response with fewer than
    two tokens per event.

    Args:
        columns: The requests.
        tokens: The streamed tokens of each response.
    """
    event_counts = columns["output_events"].astype(np.int64)
    positive_event_counts = np.maximum(event_counts, 1)  # avoids a division by 0
    mean_tokens_per_event = _divide_rounding_up(tokens, positive_event_counts)
    most_likely_tokens = FIRST_EVENT_FACTOR * mean_tokens_per_event

    has_several_tokens_per_event = tokens >= 2 * event_counts
    return np.where(has_several_tokens_per_event, most_likely_tokens, NO_LIMIT)


def _divide_rounding_up(numerator: Ints, denominator: Ints) -> Ints:
    """Return each quotient of integers of at least 0, rounded up: 7 / 2 is 4."""
    return (numerator + denominator - 1) // denominator
