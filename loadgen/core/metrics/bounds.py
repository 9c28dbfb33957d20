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

from loadgen.core.limits import LONG_ANSWER
from loadgen.core.metrics.columns import UNDEFINED, Columns, streamed_tokens
from loadgen.core.results.record import FINISH

FIRST_EVENT_FACTOR = 4
"""Where events carry two tokens or more on average, the first event is taken to have at most so
many times that average. Without a server's word, only this keeps the bounds of TPOT useful."""

Ints = NDArray[np.int64]


class Bounds(NamedTuple):
    """The smallest and the largest value of each request, in ns; UNDEFINED where it has none."""

    lower: Ints
    upper: Ints


def _known(errors: Ints) -> Ints:
    """Return the errors, with 0 for those that are not known (-1)."""
    return np.maximum(errors, 0)


def _send_lag(columns: Columns) -> Ints:
    lag: Ints = columns["sent_ns"] - columns["due_ns"]
    return np.where(columns["sent_ns"] < 0, 0, np.maximum(lag, 0))


def _reduced(values: Ints, errors: Ints) -> Bounds:
    """Return the bounds of values that may be smaller by their errors, but not below 0.

    Without any error both bounds are the same array.
    """
    if not errors.any():
        return Bounds(values, values)
    lower = np.where(values == UNDEFINED, UNDEFINED, np.maximum(values - errors, 0))
    return Bounds(lower, values)


def bound_ttft(columns: Columns) -> Bounds:
    """Return the bounds of TTFT: less the error of the first token and less the send lag."""
    errors = _known(columns["stamp_error_ns"]) + _send_lag(columns)
    return _reduced(columns.measure("ttft"), errors)


def bound_ttft_from_sent(columns: Columns) -> Bounds:
    """Return the bounds of TTFT from sent: less the error of the first token."""
    return _reduced(columns.measure("ttft_from_sent"), _known(columns["stamp_error_ns"]))


def bound_first_answer(columns: Columns) -> Bounds:
    """Return the bounds of the first answer, whose error is known where it is the first token."""
    is_first_token = columns["first_answer_ns"] == columns["first_token_ns"]
    errors = np.where(is_first_token, _known(columns["stamp_error_ns"]), 0) + _send_lag(columns)
    return _reduced(columns.measure("first_answer"), errors)


def bound_e2e(columns: Columns) -> Bounds:
    """Return the bounds of E2E: less the error of the last token and less the send lag."""
    errors = _known(columns["last_token_error_ns"]) + _send_lag(columns)
    return _reduced(columns.measure("e2e"), errors)


def bound_max_gap(columns: Columns) -> Bounds:
    """Return the bounds of the largest gap: less the error of the event at its end."""
    return _reduced(columns.measure("max_gap"), _known(columns["max_gap_error_ns"]))


def bound_tpot(columns: Columns) -> Bounds:
    """Return the bounds of TPOT, by both timestamps and by the tokens of the first event."""
    tokens = streamed_tokens(columns).astype(np.int64)
    most_first = _most_tokens_of_first_event(columns, tokens)
    return _bound_tpot_with(columns, tokens - most_first)


def bound_tpot_times(columns: Columns) -> Bounds:
    """Return the bounds of TPOT by its timestamps alone."""
    return _bound_tpot_with(columns, _later_tokens(columns))


def _later_tokens(columns: Columns) -> Ints:
    """Return the tokens after the first event, which has one if the server does not say it."""
    first_event: Ints = np.maximum(columns["first_event_tokens"].astype(np.int64), 1)
    return streamed_tokens(columns).astype(np.int64) - first_event


def _bound_tpot_with(columns: Columns, least_later_tokens: Ints) -> Bounds:
    span = columns["last_token_ns"] - columns["first_token_ns"]
    is_defined = columns.measure("tpot") != UNDEFINED
    return _bound_per_token(
        columns, span, is_defined, most_later=_later_tokens(columns), least_later=least_later_tokens
    )


def bound_tpot_mlperf(columns: Columns) -> Bounds:
    """Return the bounds of LoadGen's TPOT, which divides by all tokens but one."""
    span = columns["end_ns"] - columns["first_token_ns"]
    later_tokens = columns["output_tokens"].astype(np.int64) - 1
    is_defined = columns.measure("tpot_mlperf") != UNDEFINED
    return _bound_per_token(
        columns, span, is_defined, most_later=later_tokens, least_later=later_tokens
    )


def bound_e2e_per_token(columns: Columns) -> Bounds:
    """Return the bounds of E2E per token."""
    values = columns.measure("e2e_per_token")
    tokens = np.maximum(columns["output_tokens"].astype(np.int64), 1)
    errors = _known(columns["last_token_error_ns"]) + _send_lag(columns)
    return _reduced(values, errors // tokens)


def _bound_per_token(
    columns: Columns,
    span: Ints,
    is_defined: NDArray[np.bool_],
    *,
    most_later: Ints,
    least_later: Ints,
) -> Bounds:
    """Return the bounds of a span per token, for the most and the fewest tokens."""
    shortest = np.maximum(span - _known(columns["last_token_error_ns"]), 0)
    longest = span + _known(columns["stamp_error_ns"])
    lower = shortest // np.maximum(most_later, 1)
    upper = longest // np.maximum(least_later, 1)
    return Bounds(
        np.where(is_defined, lower, UNDEFINED),
        np.where(is_defined, upper, UNDEFINED),
    )


def _most_tokens_of_first_event(columns: Columns, tokens: Ints) -> Ints:
    """Return how many tokens the first event has at most: each later event has at least one."""
    reported = columns["first_event_tokens"].astype(np.int64)
    events = columns["output_events"].astype(np.int64)
    surplus = np.maximum(tokens - events, 0)
    # one token may have had no text: the one that ends an answer, or any one of a long answer
    is_ended_by_token = columns["finish_reason"] != FINISH["length"]
    textless = (is_ended_by_token | (tokens >= LONG_ANSWER)).astype(np.int64)
    most = np.where(surplus > textless, surplus + 1, 1)
    are_bundles_usual = tokens >= 2 * events
    usual = FIRST_EVENT_FACTOR * -(-tokens // np.maximum(events, 1))
    most = np.where(are_bundles_usual, np.minimum(most, usual), most)
    return np.where(reported > 0, np.maximum(reported, 1), most)
