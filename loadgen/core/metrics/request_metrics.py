"""The metrics of single requests, computed over columns.

Pure. The rows of `loadgen.figures` refer to these functions. `loadgen_sdk.measures` defines those
metrics for one request that the SDK also reports for a single call, such as `ttft`, and a test
compares the two. The other metrics are defined only here. Each function returns one int64 for each
row, in ns unless it says otherwise, and UNDEFINED for a row without a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loadgen.core.limits import CONTRADICTING, CONTRADICTING_TOKENS, LONG_ANSWER
from loadgen.core.metrics.columns import UNDEFINED, as_selection
from loadgen.core.results.record import FINISH
from loadgen.core.stats.amounts import TimedAmounts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from loadgen.core.metrics.columns import Columns, JoinedColumns

LARGEST_EXACT_FLOAT = 1 << 53
"""Integers below this are exact as floats, whose division is faster than that of integers."""

MILLIONTHS = 1_000_000
"""Values of another unit than ms are in millionths of it, as ns are of a ms."""


def _measure_time(columns: Columns, start: str, end: str) -> NDArray[np.int64]:
    """Return the time between two fields of each request, in ns.

    The time is UNDEFINED for a request in which one of the two fields is not known (-1).

    Args:
        columns: The requests.
        start: The field with the earlier time, such as "due_ns".
        end: The field with the later time.
    """
    start_ns = columns[start]
    end_ns = columns[end]
    durations_ns = end_ns - start_ns

    # A minimum is much faster than a mask, and most runs know all times.
    has_unknown_times = start_ns.min(initial=0) < 0 or end_ns.min(initial=0) < 0
    if has_unknown_times:
        durations_ns[(start_ns < 0) | (end_ns < 0)] = UNDEFINED
    return durations_ns


def ttft(columns: Columns) -> NDArray[np.int64]:
    """Return the time from the due time to the first token."""
    return _measure_time(columns, "due_ns", "first_token_ns")


def ttft_from_sent(columns: Columns) -> NDArray[np.int64]:
    """Return the time from the time of sending to the first token."""
    return _measure_time(columns, "sent_ns", "first_token_ns")


def first_answer(columns: Columns) -> NDArray[np.int64]:
    """Return the time from the due time to the first output that is not reasoning."""
    return _measure_time(columns, "due_ns", "first_answer_ns")


def e2e(columns: Columns) -> NDArray[np.int64]:
    """Return the time from the due time to the last output or finish event."""
    return _measure_time(columns, "due_ns", "end_ns")


def send_lag(columns: Columns) -> NDArray[np.int64]:
    """Return how much later than due each request was sent."""
    return _measure_time(columns, "due_ns", "sent_ns")


def client_lag(columns: Columns) -> NDArray[np.int64]:
    """Return the time from the arrival of the first token at the kernel until it was read."""
    return _value_with_first_token(columns, "client_lag_ns")


def stamp_error(columns: Columns) -> NDArray[np.int64]:
    """Return how much earlier than its timestamp the first token may have arrived."""
    return _value_with_first_token(columns, "stamp_error_ns")


def _value_with_first_token(columns: Columns, field: str) -> NDArray[np.int64]:
    """Return a field of each request, UNDEFINED for a request without a first token."""
    return np.where(columns.is_known("first_token_ns"), columns[field], UNDEFINED)


def _divide(span_ns: NDArray[np.int64], divisor: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each span of time divided by a number, such as the tokens in it, and rounded down.

    Args:
        span_ns: The length of each span, UNDEFINED for a request without one.
        divisor: The divisor of each span. For one of 0 or less, the result is UNDEFINED.
    """
    positive_divisor = np.maximum(divisor, 1)

    # NumPy divides floats faster than integers. The quotient is exact if no span is too long.
    are_floats_exact = span_ns.max(initial=0) < LARGEST_EXACT_FLOAT
    if are_floats_exact:
        quotient: NDArray[np.int64] = np.floor(span_ns / positive_divisor).astype(np.int64)
    else:
        quotient = span_ns // positive_divisor

    is_undefined = (divisor <= 0) | (span_ns == UNDEFINED)
    quotient[is_undefined] = UNDEFINED
    return quotient


def streamed_tokens(columns: Columns) -> NDArray[np.int64]:
    """Return the output tokens of each request that were streamed; negative if not counted.

    Some servers count reasoning tokens that they never stream. These hidden tokens are left out.
    """
    output_tokens = columns["output_tokens"]
    reasoning_tokens = columns["reasoning_tokens"]
    has_no_reasoning = int(reasoning_tokens.max(initial=0)) <= 0
    if has_no_reasoning:
        return output_tokens

    # Reasoning is hidden if the first streamed token is already a part of the answer.
    is_reasoning_hidden = columns["first_token_ns"] == columns["first_answer_ns"]
    hidden_tokens = np.where(is_reasoning_hidden, columns.known_or_zero("reasoning_tokens"), 0)

    token_counts: NDArray[np.int64] = output_tokens - hidden_tokens
    return token_counts


def later_tokens(columns: Columns) -> NDArray[np.int64]:
    """Return the tokens streamed after the first event, by which the span of TPOT is divided.

    The first event counts as one token if the server does not say how many it has.
    """
    return streamed_tokens(columns) - np.maximum(columns["first_event_tokens"], 1)


def tpot(columns: Columns) -> NDArray[np.int64]:
    """Return the time from the first to the last token per token after the first event."""
    span_ns = _measure_time(columns, "first_token_ns", "last_token_ns")
    positive_span_ns = np.where(span_ns == 0, UNDEFINED, span_ns)
    return _divide(positive_span_ns, later_tokens(columns))


def tpot_mlperf(columns: Columns) -> NDArray[np.int64]:
    """Return TPOT as MLPerf LoadGen defines it: E2E less TTFT, by all tokens but one."""
    span_ns = _measure_time(columns, "first_token_ns", "end_ns")
    span_ns = np.where(columns.is_known("due_ns"), span_ns, UNDEFINED)
    return _divide(span_ns, columns["output_tokens"].astype(np.int64) - 1)


def e2e_per_token(columns: Columns) -> NDArray[np.int64]:
    """Return E2E divided by the output tokens."""
    return _divide(e2e(columns), columns["output_tokens"].astype(np.int64))


def acceptance(columns: Columns) -> NDArray[np.int64]:
    """Return accepted by drafted tokens of speculative decoding, in millionths of a percent."""
    drafted = columns["draft_tokens"].astype(np.int64)
    accepted = columns["accepted_tokens"].astype(np.int64)
    is_reported = (drafted > 0) & (accepted >= 0)
    percent = accepted * 100 * MILLIONTHS // np.maximum(drafted, 1)
    return np.where(is_reported, percent, UNDEFINED)


def accepted_length(columns: Columns) -> NDArray[np.int64]:
    """Return the mean output tokens per step of speculative decoding, in millionths of a token.

    Speculative decoding drafts several tokens, of which the model accepts some. Each step yields
    the accepted tokens and one more. So a response of 10 tokens, of which 6 were accepted, took 4
    steps. Its mean is 2.5 tokens, or 2,500,000 millionths. The value is UNDEFINED for a response
    without drafted tokens.
    """
    drafted_tokens = columns["draft_tokens"]
    has_drafts = int(drafted_tokens.max(initial=0)) > 0
    if not has_drafts:
        # This array stores its value only once, so it takes little memory.
        return np.broadcast_to(np.int64(UNDEFINED), len(columns))

    accepted_tokens = columns["accepted_tokens"].astype(np.int64)
    output_tokens = columns["output_tokens"].astype(np.int64)
    steps = output_tokens - accepted_tokens
    tokens_per_step = output_tokens * MILLIONTHS // np.maximum(steps, 1)

    is_reported = (drafted_tokens > 0) & (accepted_tokens >= 0) & (steps > 0)
    return np.where(is_reported, tokens_per_step, UNDEFINED)


def max_gap(columns: Columns) -> NDArray[np.int64]:
    """Return the largest gap between output events of a request with two or more."""
    return np.where(columns["output_events"] >= 2, columns["max_gap_ns"], UNDEFINED)


def max_gap_error(columns: Columns) -> NDArray[np.int64]:
    """Return the timestamp error of the event at the end of the largest gap."""
    has_error = (columns["output_events"] >= 2) & columns.is_known("max_gap_error_ns")
    return np.where(has_error, columns["max_gap_error_ns"], UNDEFINED)


def tpot_error(columns: Columns) -> NDArray[np.int64]:
    """Return how wrong a TPOT can be: the errors of its two timestamps, divided as TPOT is."""
    has_errors = columns.is_known("stamp_error_ns") & columns.is_known("last_token_error_ns")
    has_tokens = columns.is_known("first_token_ns") & columns.is_known("last_token_ns")
    is_defined = has_errors & has_tokens & ~has_no_span(columns)
    errors_ns = columns["stamp_error_ns"] + columns["last_token_error_ns"]
    return _divide(np.where(is_defined, errors_ns, UNDEFINED), later_tokens(columns))


def connect(columns: Columns) -> NDArray[np.int64]:
    """Return the time from the due time until a new connection was ready; 0 on a reused one."""
    is_known = columns.is_known("due_ns") & columns.is_known("ready_ns")
    wait_ns = earliest_send_ns(columns) - columns["due_ns"]
    return np.where(is_known, wait_ns, UNDEFINED)


def tcp(columns: Columns) -> NDArray[np.int64]:
    """Return how long TCP took for the first request of a connection."""
    return np.where(columns.is_known("tcp_ns"), columns["tcp_ns"], UNDEFINED)


def tls(columns: Columns) -> NDArray[np.int64]:
    """Return how long the TLS handshake took for the first request of a connection with TLS."""
    return np.where(columns["tls_ns"] <= 0, UNDEFINED, columns["tls_ns"])


def earliest_send_ns(
    columns: Columns | JoinedColumns | Mapping[str, NDArray[np.int64]],
) -> NDArray[np.int64]:
    """Return the earliest time at which each request could be sent, in ns.

    A request can be sent when it is due and, on a new connection, when the connection is ready.

    Args:
        columns: The columns `due_ns`, `ready_ns` (when the connection was ready) and `reused`
            (whether the connection had been used before) of the requests.
    """
    due_ns = columns["due_ns"]
    is_reused = columns["reused"] > 0
    due_and_connected_ns = np.maximum(due_ns, columns["ready_ns"])
    times_ns: NDArray[np.int64] = np.where(is_reused, due_ns, due_and_connected_ns)
    return times_ns


# -- token counts and events -----------------------------------------------------------------------


def has_no_span(columns: Columns) -> NDArray[np.bool_]:
    """Return which responses have enough tokens for a TPOT, but all of them came at one instant."""
    first_token_ns = columns["first_token_ns"]
    has_first_token = columns.is_known("first_token_ns")
    is_instant = has_first_token & (columns["last_token_ns"] == first_token_ns)
    mask: NDArray[np.bool_] = is_instant & (later_tokens(columns) > 0)
    return mask


def lacks_output(columns: Columns) -> NDArray[np.bool_]:
    """Return which responses have enough tokens for a TPOT, but no event with output."""
    has_first_token = columns.is_known("first_token_ns")
    has_several_tokens: NDArray[np.bool_] = columns["output_tokens"] > 1
    return has_several_tokens & ~has_first_token


def _is_contradicting(value: NDArray[np.int64], limit: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which values exceed a limit by more than honest counts of tokens differ.

    The tolerances are a number of tokens, for short responses, and a share, for long ones.
    """
    surplus = value.astype(np.int64) - limit
    mask: NDArray[np.bool_] = (surplus > CONTRADICTING_TOKENS) & (surplus > CONTRADICTING * limit)
    return mask


def has_too_low_count(columns: Columns) -> NDArray[np.bool_]:
    """Return which responses came in more output events than they are reported to have tokens."""
    output_tokens = columns["output_tokens"]
    return (output_tokens >= 0) & _is_contradicting(columns["output_events"], output_tokens)


def has_too_high_count(columns: Columns) -> NDArray[np.bool_]:
    """Return which responses are reported to have more tokens than were requested."""
    requested = columns["asked_output"]
    return (requested > 0) & _is_contradicting(columns["output_tokens"], requested)


def time_output_tokens(columns: Columns) -> TimedAmounts:
    """Return the output tokens of each ok request with the times of its first and last token.

    The tokens of a response that was not streamed came at its end.
    """
    has_tokens = columns.is_known("output_tokens") & columns.is_known("end_ns")
    selected = as_selection(columns.is_ok & has_tokens)
    return TimedAmounts(
        start_ns=time_or_end(columns, "first_token_ns", selected),
        end_ns=time_or_end(columns, "last_token_ns", selected),
        amounts=columns["output_tokens"][selected],
    )


def time_or_end(
    columns: Columns, field: str, selected: NDArray[np.bool_] | slice
) -> NDArray[np.int64]:
    """Return a time of each selected request, or the end of the request where it is not known.

    Args:
        columns: The records of the requests.
        field: The field with the time, such as "first_token_ns", which is -1 if it is not known.
        selected: Which requests are selected, as a mask or as a slice.
    """
    times_ns = columns[field][selected]
    are_all_known = times_ns.min(initial=0) >= 0  # a minimum is much faster than a mask
    if are_all_known:
        return times_ns

    end_ns = columns["end_ns"][selected]
    return np.where(times_ns < 0, end_ns, times_ns)


def count_textless_tokens(
    finish_reasons: NDArray[np.int64], tokens: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return for each response how many of its tokens may have no text: 0 or 1.

    A response that ended by itself has an end token without text. A long response may have a
    character of several tokens, of which only the last token has text.

    Args:
        finish_reasons: The code of the finish reason of each response.
        tokens: The streamed tokens of each response.
    """
    has_end_token = finish_reasons != FINISH["length"]
    is_long_response = tokens >= LONG_ANSWER
    may_have_textless_token = has_end_token | is_long_response
    textless_counts: NDArray[np.int64] = may_have_textless_token.astype(np.int64)
    return textless_counts
