"""The smallest and the largest value that a metric of a request may have had. Pure, on columns.

The client knows how much earlier than its timestamp an event may have arrived: the columns
`stamp_error_ns` (first token) and `last_token_error_ns`. How late the client sent a request, the
send lag, may be in its TTFT and E2E. And where events carry several tokens and the server does not
say how many the first one has, the divisor of TPOT has bounds only.
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

Ints = NDArray[np.int64]


class Bounds(NamedTuple):
    """The smallest and the largest value of each request, in ns; UNDEFINED where it has none."""

    lower: Ints
    upper: Ints


def _known_errors(columns: Columns, field: str) -> Ints:
    """Return the errors in a field of the records, 0 for those that are not known (-1)."""
    return np.maximum(columns[field], 0)


def _send_lag(columns: Columns) -> Ints:
    """Return how much later than due each request was sent, 0 if it was not sent."""
    lag: Ints = columns["sent_ns"] - columns["due_ns"]
    return np.where(columns["sent_ns"] < 0, 0, np.maximum(lag, 0))


def _bounds_less_errors(values: Ints, errors: Ints) -> Bounds:
    """Return the bounds of values that may be smaller by their errors, but not negative.

    Without any error both bounds are the same array.
    """
    if not errors.any():
        return Bounds(values, values)
    lower = np.where(values == UNDEFINED, UNDEFINED, np.maximum(values - errors, 0))
    return Bounds(lower, values)


def bound_ttft(columns: Columns) -> Bounds:
    """Return the bounds of TTFT: less the error of the first token and less the send lag."""
    errors = _known_errors(columns, "stamp_error_ns") + _send_lag(columns)
    return _bounds_less_errors(columns.measure("ttft"), errors)


def bound_ttft_from_sent(columns: Columns) -> Bounds:
    """Return the bounds of TTFT from sent: less the error of the first token."""
    return _bounds_less_errors(
        columns.measure("ttft_from_sent"), _known_errors(columns, "stamp_error_ns")
    )


def bound_first_answer(columns: Columns) -> Bounds:
    """Return the bounds of the first answer, whose error is known where it is the first token."""
    is_first_token = columns["first_answer_ns"] == columns["first_token_ns"]
    errors = np.where(is_first_token, _known_errors(columns, "stamp_error_ns"), 0) + _send_lag(
        columns
    )
    return _bounds_less_errors(columns.measure("first_answer"), errors)


def bound_e2e(columns: Columns) -> Bounds:
    """Return the bounds of E2E: less the error of the last token and less the send lag."""
    errors = _known_errors(columns, "last_token_error_ns") + _send_lag(columns)
    return _bounds_less_errors(columns.measure("e2e"), errors)


def bound_max_gap(columns: Columns) -> Bounds:
    """Return the bounds of the largest gap: less the error of the event at its end."""
    return _bounds_less_errors(
        columns.measure("max_gap"), _known_errors(columns, "max_gap_error_ns")
    )


def bound_tpot(columns: Columns) -> Bounds:
    """Return the bounds of TPOT, by both timestamps and by the tokens of the first event."""
    tokens = streamed_tokens(columns).astype(np.int64)
    most_first = _most_tokens_of_first_event(columns, tokens)
    return _bound_tpot_with(columns, fewest_tokens=tokens - most_first)


def bound_tpot_times(columns: Columns) -> Bounds:
    """Return the bounds of TPOT by its timestamps alone."""
    return _bound_tpot_with(columns, fewest_tokens=later_tokens(columns))


def _bound_tpot_with(columns: Columns, fewest_tokens: Ints) -> Bounds:
    """Return the bounds of TPOT, whose divisor is at least `fewest_tokens`."""
    divisor = Bounds(fewest_tokens, later_tokens(columns))
    span = columns["last_token_ns"] - columns["first_token_ns"]
    return _bound_per_token(columns, "tpot", span, divisor)


def bound_tpot_mlperf(columns: Columns) -> Bounds:
    """Return the bounds of LoadGen's TPOT, which divides by all tokens but one."""
    span = columns["end_ns"] - columns["first_token_ns"]
    tokens = columns["output_tokens"].astype(np.int64) - 1
    return _bound_per_token(columns, "tpot_mlperf", span, Bounds(tokens, tokens))


def bound_e2e_per_token(columns: Columns) -> Bounds:
    """Return the bounds of E2E per token."""
    values = columns.measure("e2e_per_token")
    tokens = np.maximum(columns["output_tokens"].astype(np.int64), 1)
    errors = _known_errors(columns, "last_token_error_ns") + _send_lag(columns)
    return _bounds_less_errors(values, errors // tokens)


def _bound_per_token(columns: Columns, metric: str, span: Ints, divisor: Bounds) -> Bounds:
    """Return the bounds of a metric that is a time span divided by a number of tokens.

    The span is shorter if the last timestamp is too late by its error, and longer if the first one
    is. If neither timestamps nor divisors are uncertain, both bounds are the same array.

    Args:
        columns: The requests.
        metric: The name of the metric.
        span: The time between the first and the last timestamp.
        divisor: The fewest and the most tokens that the span may be divided by.
    """
    values = columns.measure(metric)
    first_errors = _known_errors(columns, "stamp_error_ns")
    last_errors = _known_errors(columns, "last_token_error_ns")
    has_errors = first_errors.any() or last_errors.any()
    if not has_errors and np.array_equal(divisor.lower, divisor.upper):
        return Bounds(values, values)
    shortest_span = np.maximum(span - last_errors, 0)
    longest_span = span + first_errors
    lower = shortest_span // np.maximum(divisor.upper, 1)
    upper = longest_span // np.maximum(divisor.lower, 1)
    is_defined = values != UNDEFINED
    return Bounds(
        np.where(is_defined, lower, UNDEFINED),
        np.where(is_defined, upper, UNDEFINED),
    )


def _most_tokens_of_first_event(columns: Columns, tokens: Ints) -> Ints:
    """Return the most tokens that the first output event of each response may have.

    TPOT divides by the tokens after the first event, so this gives its largest possible value. If
    the server reports the number, it is that one. Otherwise each later event has at least one
    token, so the first one has at most one token more than the surplus of tokens over events. The
    surplus does not count if it may be a token without text. Where events carry several tokens, the
    first event is also taken to have at most FIRST_EVENT_FACTOR times the average.

    Args:
        columns: The requests.
        tokens: The streamed tokens of each response.
    """
    reported = columns["first_event_tokens"].astype(np.int64)
    events = columns["output_events"].astype(np.int64)
    surplus = np.maximum(tokens - events, 0)
    textless = count_textless_tokens(columns["finish_reason"], tokens)
    most = np.where(surplus > textless, surplus + 1, 1)
    mean_per_event = _divide_rounding_up(tokens, np.maximum(events, 1))
    has_several_per_event = tokens >= 2 * events
    most_if_several = np.minimum(most, FIRST_EVENT_FACTOR * mean_per_event)
    most = np.where(has_several_per_event, most_if_several, most)
    return np.where(reported > 0, reported, most)


def _divide_rounding_up(numerator: Ints, denominator: Ints) -> Ints:
    """Return the quotient rounded up: floor division rounds its negative down."""
    return -(-numerator // denominator)
